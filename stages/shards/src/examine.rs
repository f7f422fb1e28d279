//! Looks at all recordings of a shard: in its tar, or as files in its folder.

use std::io::{self, BufReader};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use flow_kind::store::DigestedFile;
use flow_storage::{Storage, is_url};
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::shards::{self, Shard};
use flow_audio::decode::{MAX_RECORDING_BYTES, read_file};
use flow_audio::error::AudioError;
use flow_audio::flac::{Status, Verdict};
use flow_audio::format::Format;
use flow_audio::recording;
use flow_audio::tar::{self, End, MemberKind};

/// The result for one recording.
#[derive(Clone, Debug, PartialEq)]
pub struct Examined {
    /// Without leading `./`.
    pub name: String,
    /// `ok`, `not_regular_file`, `tar_truncated`, or a [`Status`].
    pub status: &'static str,
    /// Description of the error; empty where there is none.
    pub detail: String,
    /// Where the bytes are: from the beginning of the tar, or 0 for a file.
    pub offset: u64,
    pub size: u64,
    /// Only with `ok`.
    pub verdict: Option<(Format, Verdict)>,
}

/// The result for a shard.
#[derive(Clone, Debug, PartialEq)]
pub struct ExaminedShard {
    /// `ok`, `tar_truncated` or `missing_tar`.
    pub status: &'static str,
    pub detail: String,
    /// One per name, in the order of the tar, or of names for files. The later member of a name counts.
    pub recordings: Vec<Examined>,
    /// Members in the tar, those of a repeated name included; files where there is no tar.
    pub members: u64,
}

/// Decodes every recording of a tar that is of one of `formats` once, on the threads of `pool`. The tar is read from its
/// beginning to the last recording, and returned with its digest state, so that it is read only once; none where there
/// is not a tar. `stop` is asked before each recording; once true, the rest is left out and `None` given. `open` opens the tar, and may
/// give up with an error once `stop` is true.
pub fn tar_of(
    path: &Path,
    open: impl FnOnce(&Path) -> io::Result<DigestedFile>,
    formats: &[Format],
    pool: &ThreadPool,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<Option<(ExaminedShard, Option<DigestedFile>)>, AudioError> {
    let failed = |source| AudioError::read(path, source);
    if !is_url(path) {
        match std::fs::metadata(path) {
            Ok(metadata) if !metadata.is_file() => {
                return Ok(Some((missing("what has the name of the tar is not a file"), None)));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Some((missing("no tar"), None))),
            _ => {}
        }
    }
    let file = match open(path) {
        Err(_) if stop() => return Ok(None),
        Err(error) if is_url(path) && error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Some((missing("no tar"), None)));
        }
        file => file.map_err(failed)?,
    };
    let mut headers = BufReader::with_capacity(512, file.file());
    let listing = tar::list(&mut headers, file.length()).map_err(failed)?;
    let members = listing.last_of_each_name();
    let tar = Mutex::new((file, members.iter().copied().enumerate()));
    // The next recording in the order of the tar, with its place and its bytes. While one thread reads, the others decode.
    type Next<'a> = (usize, &'a tar::Member, Vec<u8>);
    let next = || -> Result<Option<Next>, AudioError> {
        let mut tar = tar.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, members) = &mut *tar;
        let Some((place, member)) = members.next() else {
            return Ok(None);
        };
        let decodable = member.kind == MemberKind::Regular && !member.truncated && member.size <= MAX_RECORDING_BYTES;
        let bytes = match decodable {
            true => file.read(member.offset, member.size as usize).map_err(failed)?,
            false => Vec::new(),
        };
        Ok(Some((place, member, bytes)))
    };
    let stopped = AtomicBool::new(false);
    let work = || -> Result<Vec<(usize, Examined)>, AudioError> {
        let mut done = Vec::new();
        loop {
            if stop() {
                stopped.store(true, Ordering::Release);
                return Ok(done);
            }
            let Some((place, member, bytes)) = next()? else {
                return Ok(done);
            };
            let (status, detail, verdict) = match member.kind {
                MemberKind::Other => (
                    "not_regular_file",
                    "a link, folder, device or sparse file".to_owned(),
                    None,
                ),
                MemberKind::Regular if member.truncated => ("tar_truncated", "the tar ends within it".to_owned(), None),
                MemberKind::Regular => judge(member.size, formats, || Ok(bytes))?,
            };
            done.push((
                place,
                Examined {
                    name: member.name.clone(),
                    status,
                    detail,
                    offset: member.offset,
                    size: member.size,
                    verdict,
                },
            ));
        }
    };
    let mut recordings = Vec::with_capacity(members.len());
    for done in pool.broadcast(|_| work()) {
        recordings.extend(done?);
    }
    if stopped.into_inner() {
        return Ok(None);
    }
    recordings.sort_unstable_by_key(|(place, _)| *place);
    let recordings = recordings.into_iter().map(|(_, examined)| examined).collect();
    let (file, _) = tar.into_inner().unwrap_or_else(PoisonError::into_inner);
    let (status, detail) = match listing.end {
        End::Whole => ("ok", String::new()),
        End::Cut(why) => ("tar_truncated", why),
    };
    let members = listing.members.len() as u64;
    let shard = ExaminedShard {
        status,
        detail,
        recordings,
        members,
    };
    Ok(Some((shard, Some(file))))
}

/// Decodes every file of a shard's folder that may be a recording. `stop` is as for [`tar_of`].
pub fn files_of(
    storage: &Storage,
    shard: &Shard,
    formats: &[Format],
    pool: &ThreadPool,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<Option<ExaminedShard>, AudioError> {
    let files = shards::recordings(storage, shard)?;
    let look = |(name, size): &(String, u64)| {
        let (status, detail, verdict) = judge(*size, formats, || read_file(storage, &shard.folder.join(name)))?;
        Ok(Examined {
            name: name.clone(),
            status,
            detail,
            offset: 0,
            size: *size,
            verdict,
        })
    };
    let Some(recordings) = each(pool, stop, &files, look)? else {
        return Ok(None);
    };
    let members = recordings.len() as u64;
    Ok(Some(ExaminedShard {
        status: "ok",
        detail: String::new(),
        recordings,
        members,
    }))
}

fn missing(detail: &str) -> ExaminedShard {
    ExaminedShard {
        status: "missing_tar",
        detail: detail.into(),
        recordings: Vec::new(),
        members: 0,
    }
}

pub(crate) type Judged = (&'static str, String, Option<(Format, Verdict)>);

pub(crate) fn judge(
    size: u64,
    formats: &[Format],
    read: impl FnOnce() -> Result<Vec<u8>, AudioError>,
) -> Result<Judged, AudioError> {
    if size > MAX_RECORDING_BYTES {
        let detail = format!("{size} bytes are more than one recording may have ({MAX_RECORDING_BYTES})");
        return Ok((Status::DecodeError.as_str(), detail, None));
    }
    match recording::probe(&read()?, formats) {
        Ok(verdict) => Ok((Status::Ok.as_str(), String::new(), Some(verdict))),
        Err(fault) => Ok((fault.status.as_str(), fault.detail, None)),
    }
}

/// What `look` gives for each item, in their order, on the threads of `pool`; none if `stop` becomes true.
///
/// # Errors
/// Those of `look`.
pub fn each<T: Sync, R: Send>(
    pool: &ThreadPool,
    stop: &(dyn Fn() -> bool + Sync),
    items: &[T],
    look: impl Fn(&T) -> Result<R, AudioError> + Sync,
) -> Result<Option<Vec<R>>, AudioError> {
    let one = |item: &T| if stop() { Ok(None) } else { look(item).map(Some) };
    // Results keep the order of the items, whichever thread made them.
    pool.install(|| items.par_iter().with_max_len(1).map(one).collect())
}
