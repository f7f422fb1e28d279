//! The folder of a store: a log of changes, one on a line. The voices are what follows from them.
//!
//! A line is `{"check":"<16 digits>","number":N,"time":"...","change":{...}}`: the digits are the beginning of the digest of what is
//! behind them, to the end of the line. A line is only ever appended, and is on the disk before a command says that it is done. So a
//! crash can only leave an incomplete last line, which the next change cuts off.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use flow_kind::store::{Lock, StoreError};
use flow_kind::{Digest, read_local_file};
use serde::{Deserialize, Serialize};

use super::VoiceId;
use super::changes::{Change, Voices, undone};

/// The log in the folder.
const LOG: &str = "changes.jsonl";
const LOCK: &str = "lock";
const CHECK: &str = "{\"check\":\"";
const DIGITS: usize = 16;

/// A change with its number, from 1, and its time, in UTC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    pub number: u64,
    pub time: String,
    pub change: Change,
}

/// An incomplete last line, which does not count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TornLine {
    pub path: PathBuf,
    pub line: usize,
}

/// Why a store cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum VoiceStoreError {
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// There is no store.
    #[error("{} has no voices", folder.display())]
    Missing { folder: PathBuf },
    #[error("{}: line {line} is damaged: {why}", path.display())]
    Damaged { path: PathBuf, line: usize, why: String },
    /// What is asked for cannot be done with these voices.
    #[error("{0}")]
    Refused(String),
    /// Another process changes the store.
    #[error(transparent)]
    Lock(#[from] StoreError),
}

/// A store of voices. It holds the lock of its folder if it was opened to be changed.
#[derive(Debug)]
pub struct VoiceStore {
    path: PathBuf,
    entries: Vec<Entry>,
    is_undone: Vec<bool>,
    voices: Voices,
    torn: Option<TornLine>,
    /// Bytes of the whole lines.
    length: u64,
    /// Whether the last line has no end.
    is_open_ended: bool,
    lock: Option<Lock>,
}

impl VoiceStore {
    /// Whether a path is that of the log or the lock in the folder, also through links.
    pub fn owns(folder: &Path, path: &Path) -> bool {
        let real = path.canonicalize().ok().or_else(|| {
            let parent = path.parent()?;
            let parent = if parent.as_os_str().is_empty() {
                Path::new(".")
            } else {
                parent
            };
            Some(parent.canonicalize().ok()?.join(path.file_name()?))
        });
        let own = |name: &str| {
            let own = folder.canonicalize().ok()?.join(name);
            Some(own.canonicalize().unwrap_or(own))
        };
        real.is_some_and(|real| [LOG, LOCK].into_iter().filter_map(own).any(|own| own == real))
    }

    /// Opens a store to be read. It may be in a folder that cannot be written.
    ///
    /// # Errors
    /// If there is none, or a line of its log is damaged.
    pub fn open(folder: &Path) -> Result<Self, VoiceStoreError> {
        let path = folder.join(LOG);
        match read_local_file(&path) {
            Ok(bytes) => Self::read(path, &bytes, None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(VoiceStoreError::Missing {
                folder: folder.to_owned(),
            }),
            Err(source) => Err(failed("read", &path, source)),
        }
    }

    /// Opens a store to be changed, and makes the folder if there is none.
    ///
    /// # Errors
    /// If another process changes it, the folder cannot be made, or a line of its log is damaged.
    pub fn open_to_change(folder: &Path) -> Result<Self, VoiceStoreError> {
        fs::create_dir_all(folder).map_err(|source| failed("make the folder", folder, source))?;
        let lock = Lock::take(&folder.join(LOCK), "the store of voices", "flow speakers")?;
        let path = folder.join(LOG);
        match read_local_file(&path) {
            Ok(bytes) => Self::read(path, &bytes, Some(lock)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::read(path, &[], Some(lock)),
            Err(source) => Err(failed("read", &path, source)),
        }
    }

    fn read(path: PathBuf, bytes: &[u8], lock: Option<Lock>) -> Result<Self, VoiceStoreError> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut torn = None;
        let (mut length, mut is_open_ended) = (0, false);
        for line in bytes.split_inclusive(|&byte| byte == b'\n') {
            let number = entries.len() + 1;
            let (text, has_end) = match line.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (line, false),
            };
            match entry(text) {
                Ok(entry) if entry.number == number as u64 => entries.push(entry),
                Ok(entry) => {
                    let why = format!(
                        "it has the number {}, not {number}: lines are missing or out of order",
                        entry.number
                    );
                    return Err(damaged(path, number, why));
                }
                Err(_) if !has_end => {
                    torn = Some(TornLine {
                        path: path.clone(),
                        line: number,
                    });
                    break;
                }
                Err(why) => return Err(damaged(path, number, why)),
            }
            length += line.len() as u64;
            is_open_ended = !has_end;
        }
        let changes = || entries.iter().map(|entry| &entry.change);
        let replayed =
            undone(changes()).and_then(|is_undone| Ok((Voices::replayed(changes(), &is_undone)?, is_undone)));
        let (voices, is_undone) = match replayed {
            Ok(replayed) => replayed,
            Err((place, why)) => {
                return Err(damaged(
                    path,
                    place + 1,
                    format!("it does not fit the lines before it: {why}"),
                ));
            }
        };
        Ok(Self {
            path,
            entries,
            is_undone,
            voices,
            torn,
            length,
            is_open_ended,
            lock,
        })
    }

    pub fn voices(&self) -> &Voices {
        &self.voices
    }

    /// All changes in order, each with whether it is undone.
    pub fn history(&self) -> impl Iterator<Item = (&Entry, bool)> {
        self.entries.iter().zip(self.is_undone.iter().copied())
    }

    /// The incomplete last line, if the log ends with one.
    pub fn torn(&self) -> Option<&TornLine> {
        self.torn.as_ref()
    }

    /// The number of the next voice. Those of voices that are gone are not used again.
    pub fn next_voice(&self) -> VoiceId {
        let last = self.entries.iter().map(|entry| entry.change.last_voice()).max();
        VoiceId(last.unwrap_or(0).saturating_add(1))
    }

    /// The last change that is not undone and is not an undo.
    pub fn last_change(&self) -> Option<u64> {
        let mut backwards = self.history().collect::<Vec<_>>().into_iter().rev();
        backwards
            .find(|(entry, is_undone)| !is_undone && !matches!(entry.change, Change::Undo { .. }))
            .map(|(entry, _)| entry.number)
    }

    /// Makes a change and writes it to the log. If it cannot be made, the store stays as it was. `time` is in UTC.
    ///
    /// # Errors
    /// If the change does not fit the voices (undo: a later change builds on the one that is undone), or the log cannot be written.
    pub fn change(&mut self, change: Change, time: String) -> Result<&Entry, VoiceStoreError> {
        let number = self.entries.len() as u64 + 1;
        let line = line(&Entry { number, time, change })?;
        // What is read later is what counts from now on.
        let entry = entry(line.trim_end().as_bytes()).map_err(VoiceStoreError::Refused)?;
        let (voices, is_undone) = self.after(&entry.change)?;
        self.append(&line)?;
        self.entries.push(entry);
        (self.voices, self.is_undone) = (voices, is_undone);
        Ok(&self.entries[self.entries.len() - 1])
    }

    fn after(&self, change: &Change) -> Result<(Voices, Vec<bool>), VoiceStoreError> {
        let refused = VoiceStoreError::Refused;
        let changes = || self.entries.iter().map(|entry| &entry.change).chain([change]);
        let is_undone = undone(changes()).map_err(|(_, why)| refused(why))?;
        let Change::Undo { change: of } = change else {
            let mut voices = self.voices.clone();
            voices.apply(change).map_err(refused)?;
            return Ok((voices, is_undone));
        };
        // An undone change has its number in `of`, which is that of an earlier one.
        let place = usize::try_from(*of).unwrap_or(usize::MAX).saturating_sub(1);
        if self.is_undone.get(place).copied().unwrap_or(true) {
            return Err(refused(format!("change {of} is undone already")));
        }
        let replayed = Voices::replayed(changes(), &is_undone);
        let voices = replayed.map_err(|(place, why)| {
            let later = place + 1;
            refused(format!(
                "change {later} builds on change {of} ({why}): undo {later} first"
            ))
        })?;
        Ok((voices, is_undone))
    }

    fn append(&mut self, line: &str) -> Result<(), VoiceStoreError> {
        if self.lock.is_none() {
            return Err(VoiceStoreError::Refused(
                "the store was opened to be read only".to_owned(),
            ));
        }
        let path = &self.path;
        let is_new = self.length == 0;
        let opened = OpenOptions::new().create(true).write(true).truncate(false).open(path);
        let mut file = opened.map_err(|source| failed("write", path, source))?;
        let written = write(&mut file, self.length, self.is_open_ended, line);
        if let Err(source) = written {
            // A part of a line would be cut off by the next change; it need not stay until then.
            let _ = file.set_len(self.length);
            return Err(failed("write", path, source));
        }
        if is_new && let Some(folder) = path.parent() {
            let synced = File::open(folder).and_then(|folder| folder.sync_all());
            synced.map_err(|source| failed("write", folder, source))?;
        }
        self.length += line.len() as u64 + u64::from(self.is_open_ended);
        (self.torn, self.is_open_ended) = (None, false);
        Ok(())
    }
}

/// Writes a line behind the first `length` bytes, and waits until it is on the disk.
fn write(file: &mut File, length: u64, is_open_ended: bool, line: &str) -> io::Result<()> {
    use std::io::Seek;
    file.set_len(length)?;
    file.seek(io::SeekFrom::Start(length))?;
    let end = if is_open_ended { "\n" } else { "" };
    file.write_all(format!("{end}{line}").as_bytes())?;
    file.sync_all()
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> VoiceStoreError {
    let path = path.to_owned();
    VoiceStoreError::Io { action, path, source }
}

fn damaged(path: PathBuf, line: usize, why: String) -> VoiceStoreError {
    VoiceStoreError::Damaged { path, line, why }
}

/// The beginning of the digest of what is behind the check.
fn check(rest: &[u8]) -> String {
    let mut digits = Digest::of(rest).to_hex();
    digits.truncate(DIGITS);
    digits
}

fn line(entry: &Entry) -> Result<String, VoiceStoreError> {
    let json = serde_json::to_string(entry).map_err(|error| VoiceStoreError::Refused(error.to_string()))?;
    let rest = &json[1..];
    Ok(format!("{CHECK}{}\",{rest}\n", check(rest.as_bytes())))
}

/// Reads a line without its end.
fn entry(line: &[u8]) -> Result<Entry, String> {
    let behind = line.strip_prefix(CHECK.as_bytes());
    let (digits, rest) = behind
        .and_then(|behind| behind.split_at_checked(DIGITS))
        .ok_or("it has no check")?;
    let rest = rest.strip_prefix(b"\",").ok_or("it has no check")?;
    if digits != check(rest).as_bytes() {
        return Err("its bytes are not those that were written".to_owned());
    }
    let json = [b"{", rest].concat();
    serde_json::from_slice(&json)
        .map_err(|error| format!("it is of no kind that is known here, perhaps of a newer flow: {error}"))
}
