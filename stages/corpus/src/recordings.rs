//! Finds the recordings that manifests name: as files, or as members of a tar.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use flow_audio::decode::{SAMPLE_RATE, decode, read_file, read_range};
use flow_audio::embedded::file_of;
use flow_audio::part::{Extent, TOLERANCE_SECONDS, opened_extent};
use flow_audio::tar::{self, MemberKind};
use flow_kind::StageError;
use flow_storage::{Storage, is_file, is_url};
use unicode_normalization::UnicodeNormalization;

use crate::error::at;
use crate::manifest_row::{ManifestRow, Refusal, Wanted, refuse};
use crate::tree::list_tar;
use crate::unpacking::misnamed;

/// Longest recording whose length is measured.
const LONGEST_SECONDS: f64 = 4.0 * 3600.0;

/// Shorter durations are hardly ever meant as milliseconds.
const LEAST_MILLISECONDS: f64 = 100.0;

/// Where it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The file, or the tar.
    pub audio_path: String,
    /// Offset and size in bytes within a tar.
    pub range: Option<(i64, i64)>,
    /// In seconds.
    pub duration: f64,
}

/// A file and, where that is a tar, offset and size in it.
type Place = (PathBuf, Option<(i64, i64)>);

/// Members of a tar by name: offset and size.
struct Members {
    by_name: HashMap<String, (i64, i64)>,
    /// Names by their last part.
    by_file_name: HashMap<String, Vec<String>>,
}

/// Finds recordings. Caches the last tar listing and the last recording.
pub struct Recordings {
    storage: Storage,
    /// Whether files are checked; if not, the first is taken.
    look: bool,
    listed: Option<(PathBuf, Result<Members, String>)>,
    /// One that could be opened, and its length and channels, where its header says them.
    stated: Option<(Place, Option<Extent>)>,
}

impl Recordings {
    pub fn new(storage: &Storage, look: bool) -> Self {
        Recordings {
            storage: storage.clone(),
            look,
            listed: None,
            stated: None,
        }
    }

    /// # Errors
    /// When an existing tar cannot be read.
    pub fn find(&mut self, row: &ManifestRow) -> Result<Result<Found, Refusal>, StageError> {
        let (path, range) = match self.place(row)? {
            Ok(place) => place,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let Some(audio_path) = path.to_str() else {
            return Ok(Err(refuse("unsafe_name", "the path is not UTF-8")));
        };
        if row.one_channel
            && self.look
            && let Some(Some(Extent { channels, .. })) = self.stated(&path, range)
            && channels > 1
        {
            let why = format!("the recording has {channels} channels; write each as a recording of its own");
            return Ok(Err(refuse("several_channels", why)));
        }
        let start = row.start.unwrap_or(0.0);
        let duration = match row.duration {
            Some(seconds) => {
                let end = start + seconds;
                if self.look
                    && let Some(Some(extent)) = self.stated(&path, range)
                    && let length = extent.seconds()
                    && end - length > TOLERANCE_SECONDS
                {
                    let fits = (start + seconds / 1000.0).min(end / 1000.0) <= length + TOLERANCE_SECONDS;
                    let unit = match fits && seconds > LEAST_MILLISECONDS {
                        true => "; as milliseconds the row would fit, but `duration` and `offset` are seconds",
                        false => "",
                    };
                    let why = format!(
                        "the row ends at {} s, the recording at {} s{unit}",
                        shown(end),
                        shown(length)
                    );
                    return Ok(Err(refuse("duration_past_end", why)));
                }
                seconds
            }
            None => match measure(&self.storage, &path, range) {
                Ok(length) if length > start => length - start,
                Ok(length) => {
                    let why = format!(
                        "the row begins at {} s, the recording ends at {} s",
                        shown(start),
                        shown(length)
                    );
                    return Ok(Err(refuse("duration_past_end", why)));
                }
                Err(why) => return Ok(Err(refuse("decode_error", why))),
            },
        };
        Ok(Ok(Found {
            audio_path: audio_path.to_string(),
            range,
            duration,
        }))
    }

    fn place(&mut self, row: &ManifestRow) -> Result<Result<Place, Refusal>, StageError> {
        let wanted: &Wanted = &row.wanted;
        // One that is opened for its length is there; no second look is needed.
        let is_opened = self.look && row.duration.is_some();
        // Without candidate files the tar must be searched in any case.
        let look = self.look || wanted.files.is_empty();
        for file in &wanted.files {
            // Links are followed: folders of recordings are often made of them.
            let is_there = !look
                || (is_opened && self.stated(file, None).is_some())
                || is_file(&self.storage, file_of(file)).map_err(|error| failed(file, &error))?;
            if is_there {
                return Ok(Ok((file.clone(), None)));
            }
        }
        let mut tried: Vec<String> = wanted.files.iter().map(|file| not_there(file)).collect();
        if let Some((tar, member)) = &wanted.member {
            match self.members(tar)? {
                Ok(members) => match members.find(member) {
                    Ok(range) => return Ok(Ok((tar.clone(), Some(range)))),
                    Err(others) => tried.push(format!("{member:?} in {}{others}", tar.display())),
                },
                Err(why) => tried.push(format!("{member:?} in {} ({why})", tar.display())),
            }
        }
        // Behind the files, whose names come first.
        if let Some(other) = wanted.files.iter().find_map(|file| in_other_form(file)) {
            let why = format!(
                "; {} is there, whose name is written in another form of Unicode",
                other.display()
            );
            if let Some(last) = tried.get_mut(wanted.files.len() - 1) {
                last.push_str(&why);
            }
        }
        Ok(Err(match tried.as_slice() {
            [] => refuse("missing_audio", "the row names no recording"),
            tried => refuse("missing_audio", format!("missing: {}", tried.join(", "))),
        }))
    }

    /// The length and channels of a recording, where its header says them. The outer is none if it cannot be opened.
    fn stated(&mut self, path: &Path, range: Option<(i64, i64)>) -> Option<Option<Extent>> {
        match &self.stated {
            Some(((known, of), extent)) if known == path && *of == range => Some(*extent),
            _ => {
                let bytes = range.map(|(offset, size)| (offset.unsigned_abs(), size.unsigned_abs()));
                let extent = opened_extent(&self.storage, path, bytes)?;
                self.stated = Some(((path.to_path_buf(), range), extent));
                Some(extent)
            }
        }
    }

    fn members(&mut self, tar: &Path) -> Result<Result<&Members, &str>, StageError> {
        if self.listed.as_ref().is_none_or(|(path, _)| path != tar) {
            self.listed = Some((tar.to_path_buf(), list(&self.storage, tar)?));
        }
        match &self.listed {
            Some((_, Ok(members))) => Ok(Ok(members)),
            Some((_, Err(why))) => Ok(Err(why)),
            None => Ok(Err("not listed")),
        }
    }
}

impl Members {
    /// By its whole name, or by the one member whose name ends as this one does, since tools may leave out the first folders of
    /// either. Folders that differ are another recording's. The error says what there is.
    fn find(&self, name: &str) -> Result<(i64, i64), String> {
        let bare = crate::names::strip_dot_slash(name);
        if let Some(range) = self.by_name.get(bare) {
            return Ok(*range);
        }
        let file_name = bare.rsplit('/').next().unwrap_or(bare);
        let alike = self.by_file_name.get(file_name).map_or(&[][..], Vec::as_slice);
        let below = |long: &str, short: &str| long.strip_suffix(short).is_some_and(|rest| rest.ends_with('/'));
        let fitting = |other: &&String| below(other, bare) || below(bare, other);
        let found: Vec<&String> = alike.iter().filter(fitting).collect();
        match (found.as_slice(), alike) {
            ([one], _) => self.by_name.get(*one).copied().ok_or_else(String::new),
            ([one, other, ..], _) => Err(format!(", where {one:?} and {other:?} are called so")),
            ([], [other, ..]) => Err(format!(", which has {other:?} in another folder")),
            ([], []) => Err(String::new()),
        }
    }
}

/// A path where there is no recording, for a message.
fn not_there(path: &Path) -> String {
    let what = match path.metadata() {
        Ok(found) if found.is_dir() => " (a folder)",
        Ok(_) if !is_url(path) => " (a device or pipe)",
        _ => "",
    };
    format!("{}{what}", path.display())
}

/// Seconds in messages: of hostile numbers no hundreds of zeros.
fn shown(seconds: f64) -> String {
    match seconds.abs() < 1e9 {
        true => seconds.to_string(),
        false => format!("{seconds:e}"),
    }
}

fn failed(path: &Path, error: &std::io::Error) -> StageError {
    StageError::failed(at(path, error))
}

/// A file whose path differs only by the form in which Unicode writes its letters: `é` as one letter, or as two.
fn in_other_form(path: &Path) -> Option<PathBuf> {
    let written = path.to_str().filter(|path| !path.is_ascii() && !is_url(path))?;
    let others: [String; 2] = [written.nfc().collect(), written.nfd().collect()];
    let mut others = others.into_iter().filter(|other| other != written).map(PathBuf::from);
    others.find(|other| other.is_file())
}

/// The inner error is the reason why the tar has no such member.
fn list(storage: &Storage, path: &Path) -> Result<Result<Members, String>, StageError> {
    let failed = |error: std::io::Error| failed(path, &error);
    if !is_file(storage, path).map_err(failed)? {
        let why = if path.exists() { "not a file" } else { "no such tar" };
        return Ok(Err(why.into()));
    }
    let listing = list_tar(storage, path).map_err(failed)?;
    if let (tar::End::Cut(why), true) = (&listing.end, listing.members.is_empty()) {
        return Ok(Err(misnamed(storage, path).unwrap_or_else(|| why.clone())));
    }
    let mut members = Members {
        by_name: HashMap::new(),
        by_file_name: HashMap::new(),
    };
    for member in listing.last_of_each_name() {
        let (Ok(offset), Ok(size)) = (i64::try_from(member.offset), i64::try_from(member.size)) else {
            continue;
        };
        if member.kind != MemberKind::Regular || member.truncated {
            continue;
        }
        let file_name = member.name.rsplit('/').next().unwrap_or(&member.name);
        let alike = members.by_file_name.entry(file_name.to_string()).or_default();
        alike.push(member.name.clone());
        members.by_name.insert(member.name.clone(), (offset, size));
    }
    Ok(Ok(members))
}

/// The length of a recording in seconds, by decoding it.
fn measure(storage: &Storage, path: &Path, range: Option<(i64, i64)>) -> Result<f64, String> {
    let bytes = match range.map(|(offset, size)| (u64::try_from(offset), u64::try_from(size))) {
        None => read_file(storage, path),
        Some((Ok(offset), Ok(size))) => read_range(storage, path, offset, size),
        Some(_) => return Err("a negative offset".into()),
    };
    let signal = bytes
        .and_then(|bytes| decode(&bytes, LONGEST_SECONDS))
        .map_err(|error| error.to_string())?;
    if signal.is_empty() {
        return Err("no frames".into());
    }
    Ok(signal.len() as f64 / f64::from(SAMPLE_RATE))
}
