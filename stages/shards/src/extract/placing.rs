//! Writes the wanted recordings of one shard to their places.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use flow_kind::UNREADABLE;
use flow_kind::store::{has_tombstone, is_fault_of_the_file};
use flow_storage::{AskedRange, InputFile, Storage, is_file};
use rayon::prelude::*;

use super::destination::Destination;
use super::read_ahead::{ReadAhead, Span, spans};
use super::settings::{ExtractSettings, Store};
use super::wanted::{Job, Refusal};
use crate::place::{Content, Range};
use crate::shards::Shard;
use crate::space;
use flow_audio::decode::read_open_range;
use flow_audio::error::AudioError;
use flow_audio::flac;
use flow_audio::flac_encode::encode;
use flow_audio::format::Format;
use flow_audio::recording;

/// Where a recording is now.
pub(super) struct Kept {
    /// Of the file; below `shards` with `store: tar`.
    pub path: String,
    /// 0 for a file of its own.
    pub offset: u64,
    pub size: u64,
    /// A file that an extraction made, now or earlier.
    made: bool,
}

pub(super) struct Place<'a> {
    pub shard: &'a Shard,
    pub target: &'a Destination,
    pub settings: &'a ExtractSettings,
    /// Whether the run is being aborted.
    pub is_stopped: &'a (dyn Fn() -> bool + Sync),
}

/// A recording, or why it is refused.
type Placed = Result<Kept, Refusal>;

/// Returns places within the tar (or existing files) instead of writing files.
///
/// # Errors
/// When storage does not say whether the tar is there.
pub(super) fn point_into_tar(
    storage: &Storage,
    jobs: &[Job<'_>],
    shard: &Shard,
) -> Result<Vec<Result<Kept, Refusal>>, AudioError> {
    let tar = shard.tar();
    let tar_stands = is_file(storage, &tar).map_err(|source| AudioError::read(&tar, source))?;
    let point = |job: &Job<'_>| {
        let (name, offset) = if job.member.in_tar {
            (format!("{}.tar", shard.shard_id), job.member.offset)
        } else {
            (job.components.join("/"), 0)
        };
        if job.member.in_tar && !tar_stands {
            return Err(("missing_tar".into(), tar.display().to_string()));
        }
        Ok(Kept {
            path: format!("{}/{name}", shard.name()),
            offset,
            size: job.member.size,
            made: false,
        })
    };
    Ok(jobs.iter().map(point).collect())
}

/// The reject for a recording that cannot be read; any other error is one of the target disk, or of this process.
fn unreadable(error: AudioError) -> Result<Refusal, AudioError> {
    if error.is_unreadable() {
        Ok((UNREADABLE.into(), error.to_string()))
    } else {
        Err(error)
    }
}

impl Place<'_> {
    /// Places all jobs, on the threads of the current pool. An error is one of the disk, not of a recording.
    pub fn all(&self, storage: &Storage, jobs: &[Job<'_>]) -> Result<Vec<Placed>, AudioError> {
        let tar_path = self.shard.tar();
        let tar = match InputFile::open(storage, &tar_path) {
            Ok(tar) => Ok(tar),
            // The tar was deleted after an extraction: recordings wanted then exist as files.
            Err(_) if has_tombstone(&tar_path) => {
                Err(("missing_tar".into(), format!("{} was deleted", tar_path.display())))
            }
            // An error of the stage and not rejects of rows: the whole corpus may have been moved.
            Err(source) if source.kind() == ErrorKind::NotFound && jobs.iter().any(|job| job.member.in_tar) => {
                return Err(AudioError::read(tar_path, source));
            }
            // No row needs the tar.
            Err(source) if source.kind() == ErrorKind::NotFound => Err(("missing_tar".into(), source.to_string())),
            Err(source) => {
                let path = tar_path.clone();
                Err(unreadable(AudioError::read(path, source))?)
            }
        };
        self.all_of(storage, jobs, &tar, &tar_path)
    }

    /// The same, with the tar, or why it cannot be read.
    fn all_of(
        &self,
        storage: &Storage,
        jobs: &[Job<'_>],
        tar: &Result<InputFile, Refusal>,
        tar_path: &Path,
    ) -> Result<Vec<Placed>, AudioError> {
        let readable = |job: &Job<'_>| tar.is_ok() || !job.member.in_tar;
        let missing = |job: &Job<'_>| match readable(job) && !self.may_stand(job) {
            true => self.bound(job),
            false => 0,
        };
        let needed: Vec<u64> = jobs.par_iter().map(missing).collect();
        let room = space::reserve(
            self.settings.target(),
            needed.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes)),
        )?;
        let one = |(job, needed): (&Job<'_>, &u64), tar: Result<&InputFile, &Refusal>| {
            let placed = self
                .one(storage, job, tar, tar_path)
                .or_else(|error| unreadable(error).map(Err));
            room.used(*needed);
            match placed {
                Err(error @ AudioError::UnsafePath { .. }) => Ok(Err(("unsafe_path".into(), error.to_string()))),
                other => other,
            }
        };
        let is_read = |place: usize| !(jobs[place].encode && needed[place] == 0);
        let spans = match tar {
            Ok(InputFile::Object(_)) => spans(jobs, rayon::current_num_threads(), is_read),
            _ => (0..jobs.len())
                .map(|place| Span {
                    range: 0..0,
                    jobs: vec![place],
                    is_asked_for: false,
                })
                .collect(),
        };
        let ahead = ReadAhead::new(tar.as_ref().ok(), &spans);
        let is_over = AtomicBool::new(false);
        let work = || -> Result<Vec<(usize, Placed)>, AudioError> {
            let mut placed = Vec::new();
            while !is_over.load(Ordering::Relaxed)
                && let Some((span, asked)) = ahead.next()
            {
                // Where they cannot be read together, each recording says for itself why.
                let held = asked.and_then(|asked| asked.map(AskedRange::wait).transpose().map_err(io::Error::from));
                let held = match held {
                    Ok(held) => held.map(InputFile::from),
                    Err(source) if is_fault_of_the_file(&source) => None,
                    Err(source) => {
                        let path = tar_path.to_owned();
                        return Err(AudioError::read(path, source));
                    }
                };
                let tar = held.as_ref().map_or(tar.as_ref(), Ok);
                for &place in &span.jobs {
                    if (self.is_stopped)() {
                        return Err(AudioError::Stopped);
                    }
                    placed.push((place, one((&jobs[place], &needed[place]), tar)?));
                }
            }
            Ok(placed)
        };
        // In order, so that what is asked for is what comes next.
        let all = rayon::broadcast(|_| work().inspect_err(|_| is_over.store(true, Ordering::Relaxed)));
        let mut placed = Vec::with_capacity(jobs.len());
        for some in all {
            placed.extend(some?);
        }
        placed.sort_unstable_by_key(|(place, _)| *place);
        let placed: Vec<Placed> = placed.into_iter().map(|(_, placed)| placed).collect();
        if placed.iter().flatten().any(|kept| kept.made) {
            // Committed files must survive a power failure; existing ones may be from a run that was killed before it
            // flushed them.
            self.target.sync()?;
        }
        Ok(placed)
    }

    /// Whether a file that may be the right one is there: it costs no room.
    fn may_stand(&self, job: &Job<'_>) -> bool {
        let name = job.name();
        let below = [self.shard.lang.as_str(), &self.shard.shard_id, &name];
        let size = (!job.encode).then_some(job.member.size);
        let path = self.target.path(self.settings.target(), &below);
        path.map_or(true, |path| self.target.has_room_for(&path, size))
    }

    /// Most bytes that the file can have.
    fn bound(&self, job: &Job<'_>) -> u64 {
        if job.encode {
            // Verbatim coding with frame headers, and 16 bits where there are 8.
            job.member.decoded_bytes.saturating_mul(2).saturating_add(4096)
        } else {
            job.member.size
        }
    }

    fn one(
        &self,
        storage: &Storage,
        job: &Job<'_>,
        tar: Result<&InputFile, &Refusal>,
        tar_path: &Path,
    ) -> Result<Result<Kept, Refusal>, AudioError> {
        let name = job.name();
        let below: Vec<&str> = [self.shard.lang.as_str(), &self.shard.shard_id]
            .into_iter()
            .chain(name.split('/'))
            .collect();
        let path = self.target.path(self.settings.target(), &below)?;
        let path = path.to_string_lossy().into_owned();
        let kept = |size, made| Kept {
            path,
            offset: 0,
            size,
            made,
        };
        if job.member.in_tar
            && let Err((reason, why)) = tar
        {
            return Ok(match self.standing(job, &below)? {
                Some(size) => Ok(kept(size, true)),
                None => Err((reason.clone(), format!("{why}, and {name:?} does not exist"))),
            });
        }
        let opened;
        let source_path;
        let from = match tar {
            Ok(tar) if job.member.in_tar => Range {
                file: tar,
                path: tar_path,
                offset: job.member.offset,
                size: job.member.size,
            },
            _ => {
                if self.settings.target() == self.settings.shards && !job.encode {
                    return Ok(Ok(kept(job.member.size, false)));
                }
                source_path = self.shard.folder.join(job.components.join("/"));
                opened =
                    InputFile::open(storage, &source_path).map_err(|source| AudioError::read(&source_path, source))?;
                Range {
                    file: &opened,
                    path: &source_path,
                    offset: 0,
                    size: job.member.size,
                }
            }
        };
        if !job.encode {
            self.target.place(&below, Content::Copy(from))?;
            return Ok(Ok(kept(from.size, true)));
        }
        if let Some(size) = self.standing(job, &below)? {
            return Ok(Ok(kept(size, true)));
        }
        let bytes = read_open_range(from.file, from.path, from.offset, from.size)?;
        let encoded = recording::decode(&bytes, u64::MAX).map(|samples| encode(&samples));
        // Decoded again, and compared with the result of `audio.probe`.
        match encoded {
            Ok(Some(encoded))
                if flac::probe(&encoded).is_ok_and(|verdict| verdict.audio_hash == job.member.audio_hash) =>
            {
                self.target.place(&below, Content::Bytes(&encoded))?;
                Ok(Ok(kept(encoded.len() as u64, true)))
            }
            Ok(_) => {
                let detail = format!("{name:?} does not hold the samples that were probed");
                Ok(Err(("decode_error".into(), detail)))
            }
            Err(fault) => Ok(Err((fault.status.as_str().into(), fault.detail))),
        }
    }

    /// The size of an existing file, if it has exactly these samples.
    fn standing(&self, job: &Job<'_>, below: &[&str]) -> Result<Option<u64>, AudioError> {
        let bytes = match self.target.read(below) {
            Ok(Some(bytes)) => bytes,
            Ok(None) | Err(AudioError::TooLarge { .. } | AudioError::PastEnd { .. }) => return Ok(None),
            // Another file there is overwritten.
            Err(error) if error.is_unreadable() => return Ok(None),
            Err(error) => return Err(error),
        };
        let found = recording::probe(&bytes, &Format::ALL);
        let same = found.is_ok_and(|(_, verdict)| verdict.audio_hash == job.member.audio_hash);
        let as_kept = self.settings.store == Store::Flac || bytes.len() as u64 == job.member.size;
        Ok((same && as_kept).then_some(bytes.len() as u64))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use flow_storage_testing::{Fault, FaultRule};

    use super::super::read_ahead::tests::{ONE_AT_A_TIME, is_all_given_back, member, served, tar, url};
    use super::super::wanted::Member;
    use super::*;
    use crate::place::Target;

    /// A shard, and the folder that its recordings are extracted to.
    struct Extraction {
        _folder: tempfile::TempDir,
        settings: ExtractSettings,
        shard: Shard,
        target: Destination,
    }

    impl Extraction {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let settings = ExtractSettings {
                shards: folder.path().join("shards"),
                audio: folder.path().join("audio"),
                store: Store::AsIs,
                watch: true,
            };
            Extraction {
                shard: Shard::named(&settings.shards, "hi/hi_0000").unwrap(),
                target: Destination::Folder(Target::open(&settings.audio).unwrap()),
                _folder: folder,
                settings,
            }
        }

        fn place<'a>(&'a self, is_stopped: &'a (dyn Fn() -> bool + Sync)) -> Place<'a> {
            Place {
                shard: &self.shard,
                target: &self.target,
                settings: &self.settings,
                is_stopped,
            }
        }

        /// What a recording of this name was extracted to.
        fn path(&self, name: &str) -> std::path::PathBuf {
            self.settings.audio.join("hi/hi_0000").join(name)
        }
    }

    fn job<'a>((member, name): (&'a Member, &'a str)) -> Job<'a> {
        Job {
            components: vec![name],
            member,
            encode: false,
        }
    }

    #[test]
    fn recordings_in_an_object_become_files_with_their_bytes_whatever_fails_meanwhile() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let (bytes, members) = tar();
        let (_root, server, object) = served(&bytes);
        let names: Vec<String> = (0..members.len()).map(|at| format!("{at}.flac")).collect();
        let jobs: Vec<Job<'_>> = members.iter().zip(names.iter().map(String::as_str)).map(job).collect();
        let extraction = Extraction::new();
        let place = |is_stopped: &(dyn Fn() -> bool + Sync), jobs: &[Job<'_>], tar: &InputFile| {
            let place = extraction.place(is_stopped);
            // As if it were opened anew.
            let tar = match tar {
                InputFile::Object(object) => Ok(InputFile::Object(object.clone())),
                InputFile::Local(_) => panic!("no object"),
            };
            place.all_of(&Storage::default(), jobs, &tar, &extraction.shard.tar())
        };
        assert!(matches!(place(&|| true, &jobs, &object), Err(AudioError::Stopped)));
        for fault in [Fault::Drop, Fault::Truncate, Fault::Status(503)] {
            server.clear();
            server.fault(FaultRule::first(3, fault, "a.tar"));
            let placed = place(&|| false, &jobs, &object).unwrap();
            assert_eq!(placed.len(), jobs.len());
            for ((placed, member), name) in placed.iter().zip(&members).zip(&names) {
                let kept = placed.as_ref().unwrap_or_else(|why| panic!("{name}: {why:?}"));
                assert_eq!(kept.size, member.size);
                let path = extraction.path(name);
                let range = member.offset as usize..(member.offset + member.size) as usize;
                assert!(std::fs::read(&path).unwrap() == bytes[range], "{name}");
                std::fs::remove_file(path).unwrap();
            }
            // Few requests: ranges, not recordings.
            assert!(server.requests("GET") <= 60, "{}", server.requests("GET"));
        }
        // One that reaches past the end, alone and among others.
        let past = [
            member(bytes.len() as u64 - 100, 200, true),
            member(5, 9 << 20, true),
            member(39 << 20, 9 << 20, true),
        ];
        let past: Vec<Job<'_>> = past.iter().zip(["a", "b", "c"]).map(job).collect();
        server.clear();
        let error = place(&|| false, &past, &object).map(|_| ()).unwrap_err().to_string();
        assert!(
            error.contains("hi_0000.tar") && error.contains("past the end"),
            "{error}"
        );
        // Nobody may read it: each recording says so.
        server.fault(FaultRule::always(Fault::Status(403), "a.tar"));
        for placed in place(&|| false, &jobs[..10], &object).unwrap() {
            let (reason, why) = placed.map(|_| ()).unwrap_err();
            assert!(
                reason == UNREADABLE && why.contains("permission denied"),
                "{reason} {why}"
            );
        }
        assert!(is_all_given_back());
    }

    /// By another process, while ranges of it are under way and others are still to be asked for: no recording has bytes of another
    /// tar, and none is passed over.
    #[test]
    fn a_tar_that_is_replaced_or_removed_meanwhile_gives_no_other_bytes() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let (bytes, members) = tar();
        let names: Vec<String> = (0..members.len()).map(|at| format!("{at}.flac")).collect();
        let jobs: Vec<Job<'_>> = members.iter().zip(names.iter().map(String::as_str)).map(job).collect();
        for is_removed in [false, true] {
            let (_root, server, object) = served(&bytes);
            let extraction = Extraction::new();
            let (asked, tar_url) = (Mutex::new(0), url("s3://bucket/a.tar"));
            // Asked before each recording. The other thread waits meanwhile.
            let change = || {
                let mut asked = asked.lock().unwrap_or_else(PoisonError::into_inner);
                *asked += 1;
                if *asked == 31 {
                    let another = server.storage();
                    match is_removed {
                        true => another.delete(&tar_url).unwrap(),
                        false => another.put(&tar_url, vec![7; bytes.len()]).unwrap(),
                    }
                }
                false
            };
            let place = extraction.place(&change);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
            let placed =
                pool.install(|| place.all_of(&Storage::default(), &jobs, &Ok(object), &extraction.shard.tar()));
            match (is_removed, placed) {
                (true, Err(error)) => assert!(error.to_string().contains("no such object"), "{error}"),
                (true, Ok(_)) => panic!("a tar that is gone was read to its end"),
                (false, placed) => {
                    let placed = placed.unwrap();
                    assert_eq!(placed.len(), jobs.len());
                    let refused = placed.iter().filter_map(|placed| placed.as_ref().err());
                    let refused: Vec<_> = refused.collect();
                    let all_say_why = refused
                        .iter()
                        .all(|(reason, why)| reason == UNREADABLE && why.contains("changed"));
                    assert!(!refused.is_empty() && all_say_why, "{refused:?}");
                }
            }
            let mut right = 0;
            for (member, name) in members.iter().zip(&names) {
                let range = member.offset as usize..(member.offset + member.size) as usize;
                if let Ok(found) = std::fs::read(extraction.path(name)) {
                    assert!(found == bytes[range], "{name}");
                    right += 1;
                }
            }
            assert!(right >= 30, "{right}");
            assert!(is_all_given_back());
        }
    }
}
