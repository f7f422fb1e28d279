//! Writes the wanted recordings of one shard to their places.

use std::io::ErrorKind;
use std::path::Path;

use flow_runtime::UNREADABLE;
use flow_runtime::store::has_tombstone;
use flow_storage::{InputFile, is_file};
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
}

/// A recording, or why it is refused.
type Placed = Result<Kept, Refusal>;

/// Recordings of a tar in object storage that lie close together are asked for by one request: of so many bytes at most,
const SPAN: u64 = 8 << 20;
/// and of at least so many, where there are enough of them for all threads;
const LEAST_SPAN: u64 = 1 << 20;
/// with no more bytes between two of them.
const GAP: u64 = 64 << 10;

/// The jobs by their places, in the order of the tar: together those whose recordings lie in one range of it.
fn spans(jobs: &[Job<'_>], threads: usize) -> Vec<(std::ops::Range<u64>, Vec<usize>)> {
    let mut places: Vec<usize> = (0..jobs.len()).collect();
    places.sort_by_key(|place| jobs[*place].member.offset);
    let all: u64 = jobs.iter().fold(0, |sum, job| sum.saturating_add(job.member.size));
    let most = (all / (2 * threads.max(1) as u64)).clamp(LEAST_SPAN, SPAN);
    let mut spans: Vec<(std::ops::Range<u64>, Vec<usize>)> = Vec::new();
    for place in places {
        let member = &jobs[place].member;
        // What was probed is compared with the length of the tar where it is read.
        let range = member.offset..member.offset.saturating_add(member.size);
        match spans.last_mut() {
            Some((span, places))
                if member.in_tar
                    && jobs[places[0]].member.in_tar
                    && range.start <= span.end.saturating_add(GAP)
                    && range.end.saturating_sub(span.start) <= most =>
            {
                span.end = span.end.max(range.end);
                places.push(place);
            }
            _ => spans.push((range, vec![place])),
        }
    }
    spans
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
    pub fn all(&self, jobs: &[Job<'_>]) -> Result<Vec<Result<Kept, Refusal>>, AudioError> {
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
                .one(job, tar, &tar_path)
                .or_else(|error| unreadable(error).map(Err));
            room.used(*needed);
            match placed {
                Err(error @ AudioError::UnsafePath { .. }) => Ok(Err(("unsafe_path".into(), error.to_string()))),
                other => other,
            }
        };
        let spans = match &tar {
            Ok(InputFile::Object(_)) => spans(jobs, rayon::current_num_threads()),
            _ => (0..jobs.len()).map(|place| (0..0, vec![place])).collect(),
        };
        let of_span =
            |(range, places): (std::ops::Range<u64>, Vec<usize>)| -> Result<Vec<(usize, Placed)>, AudioError> {
                let more = places.len() > 1;
                // Where they cannot be read together, each recording says for itself why.
                let held = tar
                    .as_ref()
                    .ok()
                    .filter(|_| more)
                    .and_then(|tar| tar.holding(range).ok()?);
                let tar = held.as_ref().map_or(tar.as_ref(), Ok);
                let places = places.into_iter();
                places
                    .map(|place| Ok((place, one((&jobs[place], &needed[place]), tar)?)))
                    .collect()
            };
        let placed = spans
            .into_par_iter()
            .map(of_span)
            .collect::<Result<Vec<_>, AudioError>>()?;
        let mut placed: Vec<(usize, Placed)> = placed.into_iter().flatten().collect();
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
    use super::super::wanted::Member;
    use super::*;

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
        let spans = spans(&jobs, 2);
        let mut places: Vec<usize> = spans.iter().flat_map(|(_, places)| places.clone()).collect();
        places.sort_unstable();
        assert_eq!(places, (0..members.len()).collect::<Vec<_>>());
        for (range, places) in &spans {
            let alone = places.len() == 1;
            assert!(alone || range.end - range.start <= SPAN, "{range:?}");
            for place in places {
                let member = &members[*place];
                assert!(alone || member.in_tar);
                assert!(member.offset >= range.start && member.offset.saturating_add(member.size) <= range.end);
            }
        }
        assert!(spans.len() <= 10, "{spans:?}");
    }
}
