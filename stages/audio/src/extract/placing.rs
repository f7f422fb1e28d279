//! Writes the wanted recordings of one shard to their places.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::ops;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use flow_runtime::UNREADABLE;
use flow_runtime::store::{has_tombstone, is_fault_of_the_file};
use flow_storage::{AskedRange, InputFile, is_file};
use rayon::prelude::*;

use super::destination::Destination;
use super::wanted::{Job, Refusal};
use super::{ExtractSettings, Store};
use crate::decode::read_open_range;
use crate::error::AudioError;
use crate::flac;
use crate::flac_encode::encode;
use crate::format::Format;
use crate::place::{Content, Range};
use crate::recording;
use crate::shards::Shard;
use crate::space;

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

/// Recordings of a tar in object storage that lie close together are asked for by one request: of so many bytes at most,
const SPAN: u64 = 8 << 20;
/// and of at least so many, where there are enough of them for all threads;
const LEAST_SPAN: u64 = 1 << 20;
/// with no more bytes between two of them.
const GAP: u64 = 64 << 10;

/// Ranges that are asked for beyond the one that is needed next, of each tar,
const AHEAD: usize = 4;
/// and bytes of these in the whole process.
const AHEAD_BYTES: u64 = 128 << 20;

/// Recordings that are read together.
#[derive(Debug, PartialEq)]
struct Span {
    /// Where they lie in the tar.
    range: ops::Range<u64>,
    /// Places of the jobs, in the order of the tar.
    jobs: Vec<usize>,
    /// Whether the range is asked for as a whole, before the jobs are done.
    is_asked_for: bool,
}

/// The jobs in the order of the tar, those together whose recordings lie in one range of it. `is_read` says whether the recording
/// of a job will be read.
fn spans(jobs: &[Job<'_>], threads: usize, is_read: impl Fn(usize) -> bool) -> Vec<Span> {
    let mut places: Vec<usize> = (0..jobs.len()).collect();
    places.sort_by_key(|place| jobs[*place].member.offset);
    let all: u64 = jobs.iter().fold(0, |sum, job| sum.saturating_add(job.member.size));
    let most = (all / (2 * threads.max(1) as u64)).clamp(LEAST_SPAN, SPAN);
    let mut spans: Vec<Span> = Vec::new();
    for place in places {
        let member = &jobs[place].member;
        // What was probed is compared with the length of the tar where it is asked for.
        let range = member.offset..member.offset.saturating_add(member.size);
        match spans.last_mut() {
            Some(span)
                if member.in_tar
                    && jobs[span.jobs[0]].member.in_tar
                    && range.start <= span.range.end.saturating_add(GAP)
                    && range.end.saturating_sub(span.range.start) <= most =>
            {
                span.range.end = span.range.end.max(range.end);
                span.jobs.push(place);
                span.is_asked_for = true;
            }
            _ => spans.push(Span {
                is_asked_for: member.in_tar && member.size <= SPAN && is_read(place),
                range,
                jobs: vec![place],
            }),
        }
    }
    spans
}

/// Bytes of ranges that were asked for in this process and are not needed yet.
static AHEAD_NOW: AtomicU64 = AtomicU64::new(0);

/// A share of [`AHEAD_BYTES`], given back when it is dropped.
struct Room(u64);

impl Room {
    fn take(bytes: u64) -> Option<Room> {
        let more = |now: u64| now.checked_add(bytes).filter(|sum| *sum <= AHEAD_BYTES);
        let taken = AHEAD_NOW.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        // No room is made where none was taken: it would be given back.
        taken.ok().map(|_| Room(bytes))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        AHEAD_NOW.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Hands out the spans of a tar, one after the other, whose ranges were asked for while those before them were used.
struct ReadAhead<'a> {
    tar: Option<&'a InputFile>,
    spans: &'a [Span],
    state: Mutex<Handed>,
}

#[derive(Default)]
struct Handed {
    /// Spans that were handed out.
    handed: usize,
    /// Those that come next, with what was asked for.
    asked: VecDeque<(Asked, Room)>,
}

/// A range that was asked for; none where nothing is to be asked for.
type Asked = io::Result<Option<AskedRange>>;

impl<'a> ReadAhead<'a> {
    fn ask(&self, span: &Span) -> Asked {
        match self.tar.filter(|_| span.is_asked_for) {
            Some(tar) => tar.ask_for(span.range.clone()),
            None => Ok(None),
        }
    }

    /// The next span.
    fn next(&self) -> Option<(&'a Span, Asked)> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let span = self.spans.get(state.handed)?;
        state.handed += 1;
        let asked = match state.asked.pop_front() {
            Some((asked, _)) => asked,
            None => self.ask(span),
        };
        while state.asked.len() < AHEAD
            && let Some(next) = self.spans.get(state.handed + state.asked.len())
        {
            let bytes = if next.is_asked_for {
                next.range.end - next.range.start
            } else {
                0
            };
            let Some(room) = Room::take(bytes) else { break };
            state.asked.push_back((self.ask(next), room));
        }
        Some((span, asked))
    }
}

/// Returns places within the tar (or existing files) instead of writing files.
///
/// # Errors
/// When storage does not say whether the tar is there.
pub(super) fn point_into_tar(jobs: &[Job<'_>], shard: &Shard) -> Result<Vec<Result<Kept, Refusal>>, AudioError> {
    let tar = shard.tar();
    let tar_stands = is_file(&tar).map_err(|source| AudioError::Read {
        path: tar.clone(),
        source,
    })?;
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
    pub fn all(&self, jobs: &[Job<'_>]) -> Result<Vec<Placed>, AudioError> {
        let tar_path = self.shard.tar();
        let tar = match InputFile::open(&tar_path) {
            Ok(tar) => Ok(tar),
            // The tar was deleted after an extraction: recordings wanted then exist as files.
            Err(_) if has_tombstone(&tar_path) => {
                Err(("missing_tar".into(), format!("{} was deleted", tar_path.display())))
            }
            // An error of the stage and not rejects of rows: the whole corpus may have been moved.
            Err(source) if source.kind() == ErrorKind::NotFound && jobs.iter().any(|job| job.member.in_tar) => {
                return Err(AudioError::Read { path: tar_path, source });
            }
            // No row needs the tar.
            Err(source) if source.kind() == ErrorKind::NotFound => Err(("missing_tar".into(), source.to_string())),
            Err(source) => {
                let path = tar_path.clone();
                Err(unreadable(AudioError::Read { path, source })?)
            }
        };
        self.all_of(jobs, &tar, &tar_path)
    }

    /// The same, with the tar, or why it cannot be read.
    fn all_of(
        &self,
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
            let placed = self.one(job, tar, tar_path).or_else(|error| unreadable(error).map(Err));
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
        let ahead = ReadAhead {
            tar: tar.as_ref().ok(),
            spans: &spans,
            state: Mutex::default(),
        };
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
                        return Err(AudioError::Read { path, source });
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
                None => Err((reason.clone(), format!("{why}, and {name:?} is not there"))),
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
                opened = InputFile::open(&source_path).map_err(|source| AudioError::Read {
                    path: source_path.clone(),
                    source,
                })?;
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
    use flow_storage::{Location, ObjectUrl};
    use flow_storage_testing::{Fault, FaultRule, TestServer};

    use super::super::wanted::Member;
    use super::*;
    use crate::place::Target;

    fn member(offset: u64, size: u64, in_tar: bool) -> Member {
        Member {
            status: "ok".into(),
            offset,
            size,
            in_tar,
            audio_hash: String::new(),
            is_flac: true,
            decoded_bytes: 0,
        }
    }

    #[test]
    fn recordings_that_lie_close_together_are_read_together() {
        let mebibyte = 1 << 20;
        // Behind one another in another order; then one behind a gap, one that is too long, one with a wild size, a file.
        let mut members: Vec<Member> = (0..40).rev().map(|at| member(at * mebibyte, mebibyte, true)).collect();
        members.push(member(100 * mebibyte, 5, true));
        members.push(member(200 * mebibyte, 20 * mebibyte, true));
        members.push(member(u64::MAX - 3, 10, true));
        members.push(member(0, 5, false));
        let job = |member| Job {
            components: vec!["a"],
            member,
            encode: false,
        };
        let jobs: Vec<Job<'_>> = members.iter().map(job).collect();
        let spans = spans(&jobs, 2, |_| true);
        let mut places: Vec<usize> = spans.iter().flat_map(|span| span.jobs.clone()).collect();
        places.sort_unstable();
        assert_eq!(places, (0..members.len()).collect::<Vec<_>>());
        for Span {
            range,
            jobs: places,
            is_asked_for,
        } in &spans
        {
            let alone = places.len() == 1;
            assert!(alone || range.end - range.start <= SPAN, "{range:?}");
            assert!(!is_asked_for || range.end - range.start <= SPAN, "{range:?}");
            assert!(alone || *is_asked_for);
            for place in places {
                let member = &members[*place];
                assert!(alone || member.in_tar);
                assert!(member.offset >= range.start && member.offset.saturating_add(member.size) <= range.end);
            }
        }
        assert!(spans.len() <= 10, "{spans:?}");
    }

    fn url(text: &str) -> ObjectUrl {
        match Location::parse(text).unwrap() {
            Location::Object(url) => url,
            Location::Local(path) => panic!("{} is a path", path.display()),
        }
    }

    /// Bytes of a tar, and recordings in it as if they had been probed: many small ones close together, some apart, and one that
    /// is read in several ranges.
    fn tar() -> (Vec<u8>, Vec<Member>) {
        let bytes: Vec<u8> = (0..40u64 << 20).map(|at| (at * at / 7 + at) as u8).collect();
        let mut members: Vec<Member> = (0..200).map(|at| member(512 + at * 60_000, 59_000, true)).collect();
        members.extend((0..5).map(|at| member((14 << 20) + at * 500_000, 200_000, true)));
        members.push(member(17 << 20, 20 << 20, true));
        members.push(member(38 << 20, 2 << 20, true));
        (bytes, members)
    }

    /// Tests that ask for ranges, whose bytes are counted in the whole process.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    /// An object with these bytes, and what serves it.
    fn served(bytes: &[u8]) -> (tempfile::TempDir, TestServer, InputFile) {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("bucket")).unwrap();
        std::fs::write(root.path().join("bucket/a.tar"), bytes).unwrap();
        let server = TestServer::start(root.path()).unwrap();
        let object = server.storage().open(&url("s3://bucket/a.tar")).unwrap();
        (root, server, object.into())
    }

    #[test]
    fn recordings_in_an_object_become_files_with_their_bytes_whatever_fails_meanwhile() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let (bytes, members) = tar();
        let (_root, server, object) = served(&bytes);
        let names: Vec<String> = (0..members.len()).map(|at| format!("{at}.flac")).collect();
        let job = |(member, name)| Job {
            components: vec![name],
            member,
            encode: false,
        };
        let jobs: Vec<Job<'_>> = members.iter().zip(names.iter().map(String::as_str)).map(job).collect();
        let folder = tempfile::tempdir().unwrap();
        let settings = ExtractSettings {
            shards: folder.path().join("shards"),
            audio: folder.path().join("audio"),
            store: Store::AsIs,
            watch: true,
        };
        let shard = Shard::named(&settings.shards, "hi/hi_0000").unwrap();
        let target = Destination::Folder(Target::open(&settings.audio).unwrap());
        let place = |is_stopped: &(dyn Fn() -> bool + Sync), jobs: &[Job<'_>], tar: &InputFile| {
            let place = Place {
                shard: &shard,
                target: &target,
                settings: &settings,
                is_stopped,
            };
            // As if it were opened anew.
            let tar = match tar {
                InputFile::Object(object) => Ok(InputFile::Object(object.clone())),
                InputFile::Local(_) => panic!("no object"),
            };
            place.all_of(jobs, &tar, &shard.tar())
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
                let path = settings.audio.join("hi/hi_0000").join(name);
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
        assert_eq!(AHEAD_NOW.load(Ordering::Relaxed), 0, "room is given back");
    }

    /// By another process, while ranges of it are under way and others are still to be asked for: no recording has bytes of another
    /// tar, and none is passed over.
    #[test]
    fn a_tar_that_is_replaced_or_removed_meanwhile_gives_no_other_bytes() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let (bytes, members) = tar();
        let names: Vec<String> = (0..members.len()).map(|at| format!("{at}.flac")).collect();
        let jobs: Vec<Job<'_>> = members
            .iter()
            .zip(&names)
            .map(|(member, name)| Job {
                components: vec![name],
                member,
                encode: false,
            })
            .collect();
        for is_removed in [false, true] {
            let (_root, server, object) = served(&bytes);
            let folder = tempfile::tempdir().unwrap();
            let settings = ExtractSettings {
                shards: folder.path().join("shards"),
                audio: folder.path().join("audio"),
                store: Store::AsIs,
                watch: true,
            };
            let shard = Shard::named(&settings.shards, "hi/hi_0000").unwrap();
            let target = Destination::Folder(Target::open(&settings.audio).unwrap());
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
            let place = Place {
                shard: &shard,
                target: &target,
                settings: &settings,
                is_stopped: &change,
            };
            let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
            let placed = pool.install(|| place.all_of(&jobs, &Ok(object), &shard.tar()));
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
                if let Ok(found) = std::fs::read(settings.audio.join("hi/hi_0000").join(name)) {
                    assert!(found == bytes[range], "{name}");
                    right += 1;
                }
            }
            assert!(right >= 30, "{right}");
            assert_eq!(AHEAD_NOW.load(Ordering::Relaxed), 0, "room is given back");
        }
    }

    /// What is asked for ahead stays below its bound however many tars are read, and the range that is needed is asked for in any
    /// case.
    #[test]
    fn what_is_asked_for_ahead_is_bounded_in_the_whole_process() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let large = |at: u64| Span {
            range: at * SPAN..(at + 1) * SPAN,
            jobs: vec![0],
            is_asked_for: true,
        };
        let spans: Vec<Span> = (0..8).map(large).collect();
        let tars: Vec<ReadAhead<'_>> = (0..10)
            .map(|_| ReadAhead {
                tar: None,
                spans: &spans,
                state: Mutex::default(),
            })
            .collect();
        for (round, span) in spans.iter().enumerate() {
            for tar in &tars {
                assert_eq!(tar.next().unwrap().0, span);
                let asked = tars
                    .iter()
                    .map(|tar| tar.state.lock().unwrap().asked.len() as u64 * SPAN);
                let asked: u64 = asked.sum();
                assert!(asked <= AHEAD_BYTES, "{asked}");
                assert_eq!(AHEAD_NOW.load(Ordering::Relaxed), asked);
            }
            if round == 0 {
                assert_eq!(AHEAD_NOW.load(Ordering::Relaxed), AHEAD_BYTES, "all of it is used");
            }
        }
        drop(tars);
        assert_eq!(AHEAD_NOW.load(Ordering::Relaxed), 0, "room is given back");
    }

    #[test]
    fn some_ranges_are_asked_for_before_they_are_needed() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let (bytes, members) = tar();
        let (_root, server, object) = served(&bytes);
        let jobs: Vec<Job<'_>> = members[..200]
            .iter()
            .map(|member| Job {
                components: vec!["a"],
                member,
                encode: false,
            })
            .collect();
        let spans = spans(&jobs, 64, |_| true);
        assert!(spans.len() > AHEAD + 4, "{}", spans.len());
        let ahead = ReadAhead {
            tar: Some(&object),
            spans: &spans,
            state: Mutex::default(),
        };
        for taken in 0..spans.len() {
            let (span, asked) = ahead.next().unwrap();
            assert_eq!(span, &spans[taken]);
            let wanted = (taken + 1 + AHEAD).min(spans.len()) as u64;
            let begun = std::time::Instant::now();
            while server.requests("GET") < wanted {
                assert!(begun.elapsed().as_secs() < 60, "{} of {wanted}", server.requests("GET"));
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let got = asked.unwrap().unwrap().bytes().unwrap();
            assert!(got == bytes[span.range.start as usize..span.range.end as usize]);
            assert_eq!(server.requests("GET"), wanted, "no more than these");
        }
        assert!(ahead.next().is_none());
    }
}
