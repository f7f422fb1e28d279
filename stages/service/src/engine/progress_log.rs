//! The log of what is done of a recording, by which a request goes on after the process was killed.
//!
//! Each line is half a SHA-256 in hexadecimal digits, a space, and a [`Record`] in JSON, of which the digest is. What follows the
//! first line that is torn or damaged is ignored, and cut off before more is written. The first record names what the others are of
//! (the recording, the model, the settings): the log of something else is begun anew. Numbers are written as their bits, so that
//! transcripts are the same to the byte.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use flow_speakers::silero::SAMPLE_RATE;
use flow_transcription::Word;
use flow_transcription::recognizer::{ActivityPart, Heard, SpeechWindows};
use flow_transcription::suspects::{Reason, Suspect};
use flow_transcription::tokens::Token;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// How often the log is flushed to the disk. A kill of the process loses nothing that was written, flushed or not.
const FLUSH: Duration = Duration::from_secs(1);

/// Digits of the digest of a line.
const DIGITS: usize = 32;

/// A larger log is begun anew: a day of speech has some 100 MB.
const MOST: u64 = 1 << 30;

/// Something that is done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Record {
    /// What the log is of.
    Of(String),
    Activity(ActivityPart),
    Windows(FoundWindows),
    Heard {
        window: Range<u64>,
        heard: HeardBits,
    },
}

/// The windows of a recording, once all of it was read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct FoundWindows {
    windows: Vec<Range<u64>>,
    speech: Vec<Range<u64>>,
    is_heard: bool,
    samples: u64,
    /// Whether the recording could not be decoded to its end.
    pub damaged: bool,
    /// What a user has to know of how it is read.
    pub note: Option<String>,
}

impl FoundWindows {
    pub fn new(found: &SpeechWindows, damaged: bool, note: Option<String>) -> Self {
        let SpeechWindows {
            windows,
            speech,
            is_heard,
            samples,
        } = found.clone();
        Self {
            windows,
            speech,
            is_heard,
            samples,
            damaged,
            note,
        }
    }

    pub fn windows(&self) -> SpeechWindows {
        SpeechWindows {
            windows: self.windows.clone(),
            speech: self.speech.clone(),
            is_heard: self.is_heard,
            samples: self.samples,
        }
    }
}

/// [`Word`], to the bit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct WordBits {
    word: String,
    start: u64,
    end: u64,
    confidence: Option<u64>,
    speaker: Option<String>,
}

/// [`Suspect`], to the bit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SuspectBits {
    start: u64,
    end: u64,
    text: String,
    reason: Reason,
    dropped: bool,
}

/// [`Heard`], to the bit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct HeardBits {
    words: Vec<WordBits>,
    /// Bytes, probability, and whether it is the first choice.
    tokens: Vec<Vec<(Vec<u8>, u64, bool)>>,
    languages: Vec<String>,
    recovered: usize,
    /// Time and lead.
    blanks: Vec<(u64, u32)>,
    dropped: Vec<SuspectBits>,
}

impl From<&Heard> for HeardBits {
    fn from(heard: &Heard) -> Self {
        let word = |word: &Word| WordBits {
            word: word.word.clone(),
            start: word.start.to_bits(),
            end: word.end.to_bits(),
            confidence: word.confidence.map(f64::to_bits),
            speaker: word.speaker.clone(),
        };
        let token = |token: &Token| (token.bytes.clone(), token.logprob.to_bits(), token.is_first_choice);
        let suspect = |suspect: &Suspect| SuspectBits {
            start: suspect.start.to_bits(),
            end: suspect.end.to_bits(),
            text: suspect.text.clone(),
            reason: suspect.reason,
            dropped: suspect.dropped,
        };
        let tokens = heard.tokens.iter().map(|tokens| tokens.iter().map(token).collect());
        Self {
            words: heard.words.iter().map(word).collect(),
            tokens: tokens.collect(),
            languages: heard.languages.clone(),
            recovered: heard.recovered,
            blanks: (heard.blanks.iter())
                .map(|(time, lead)| (time.to_bits(), lead.to_bits()))
                .collect(),
            dropped: heard.dropped.iter().map(suspect).collect(),
        }
    }
}

impl From<HeardBits> for Heard {
    fn from(bits: HeardBits) -> Self {
        let words = bits.words.into_iter();
        let words = words.map(|bits| Word {
            word: bits.word,
            start: f64::from_bits(bits.start),
            end: f64::from_bits(bits.end),
            confidence: bits.confidence.map(f64::from_bits),
            speaker: bits.speaker,
        });
        let token = |(bytes, logprob, is_first_choice)| Token {
            bytes,
            logprob: f64::from_bits(logprob),
            is_first_choice,
        };
        let suspect = |bits: SuspectBits| Suspect {
            start: f64::from_bits(bits.start),
            end: f64::from_bits(bits.end),
            text: bits.text,
            reason: bits.reason,
            dropped: bits.dropped,
        };
        let blank = |(time, lead)| (f64::from_bits(time), f32::from_bits(lead));
        let tokens = bits.tokens.into_iter();
        Self {
            words: words.collect(),
            tokens: tokens.map(|tokens| tokens.into_iter().map(token).collect()).collect(),
            languages: bits.languages,
            recovered: bits.recovered,
            blanks: bits.blanks.into_iter().map(blank).collect(),
            dropped: bits.dropped.into_iter().map(suspect).collect(),
        }
    }
}

/// What earlier attempts did.
#[derive(Debug, Default)]
pub(crate) struct Earlier {
    /// Stretches of voice activity, one behind the other.
    pub activity: Vec<ActivityPart>,
    pub windows: Option<FoundWindows>,
    /// By the first and the last sample of windows.
    heard: HashMap<(u64, u64), Heard>,
}

impl Earlier {
    fn add(&mut self, record: Record) {
        match record {
            Record::Of(_) => {}
            Record::Activity(part) => self.activity.push(part),
            Record::Windows(found) => self.windows = Some(found),
            Record::Heard { window, heard } => {
                self.heard.insert((window.start, window.end), heard.into());
            }
        }
    }

    /// What was heard in each of these windows; none where they were not decoded.
    pub fn heard_in(&self, windows: &[Range<u64>]) -> Vec<Option<Heard>> {
        let heard = |window: &Range<u64>| self.heard.get(&(window.start, window.end)).cloned();
        windows.iter().map(heard).collect()
    }
}

/// How far a log is.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Logged {
    /// Stretches and windows that are done.
    pub records: u64,
    /// Where the first that is not done begins, in seconds.
    pub place: f64,
    /// Seconds without those of windows that are not decoded, and all seconds; none before windows are found.
    pub seconds: Option<(f64, f64)>,
}

impl Logged {
    /// That of a log. There may be none.
    pub fn read(path: &Path) -> Self {
        let (mut earlier, mut records) = (Earlier::default(), 0);
        if let Ok(file) = opened(path, OpenOptions::new().read(true)) {
            let _ = each_record(&file, &mut |record| {
                records += u64::from(!matches!(record, Record::Of(_)));
                earlier.add(record);
                true
            });
        }
        let seconds = |samples: u64| samples as f64 / f64::from(SAMPLE_RATE);
        let heard_to = earlier.activity.last().map_or(0, |part| part.samples);
        let Some(found) = earlier.windows.as_ref() else {
            return Self {
                records,
                place: seconds(heard_to),
                seconds: None,
            };
        };
        let missing = |window: &&Range<u64>| !earlier.heard.contains_key(&(window.start, window.end));
        let mut missing = found.windows.iter().filter(missing).peekable();
        let first = missing.peek().map_or(found.samples, |window| window.start);
        let left: u64 = missing.map(|window| window.end.saturating_sub(window.start)).sum();
        Self {
            records,
            place: seconds(first),
            seconds: Some((seconds(found.samples.saturating_sub(left)), seconds(found.samples))),
        }
    }

    /// That of a recording with several logs: of its channels.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let less = |a: (f64, f64), b: (f64, f64)| if b.1 - b.0 > a.1 - a.0 { b } else { a };
        Self {
            records: self.records.saturating_add(other.records),
            place: self.place.min(other.place),
            seconds: match (self.seconds, other.seconds) {
                (Some(one), Some(other)) => Some(less(one, other)),
                (one, other) => one.or(other),
            },
        }
    }
}

/// Opens a regular file. A link is not followed, since what it names would be read and cut off; a pipe is not waited for.
fn opened(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let is_not_one = || io::Error::other("it is not a regular file");
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match options.custom_flags(flags.bits().cast_signed()).open(path) {
        Err(_) if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) => return Err(is_not_one()),
        file => file?,
    };
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(is_not_one()),
    }
}

/// Passes the records of a log on, up to the first that is none or of which `take` returns false, and returns where they end, in bytes.
fn each_record(file: &File, take: &mut dyn FnMut(Record) -> bool) -> io::Result<u64> {
    if file.metadata()?.len() > MOST {
        return Ok(0);
    }
    let mut reader = BufReader::new(file);
    let (mut line, mut end) = (Vec::new(), 0);
    loop {
        line.clear();
        let length = reader.read_until(b'\n', &mut line)? as u64;
        let Some(record) = parsed(&line) else { return Ok(end) };
        if !take(record) {
            return Ok(end);
        }
        end += length;
    }
}

fn parsed(line: &[u8]) -> Option<Record> {
    let (digest, rest) = line.split_at_checked(DIGITS)?;
    let json = rest.strip_prefix(b" ")?.strip_suffix(b"\n")?;
    let is_whole = digest == digest_of(json).as_bytes();
    is_whole.then(|| serde_json::from_slice(json).ok()).flatten()
}

fn digest_of(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let half = digest.iter().take(DIGITS / 2);
    half.map(|byte| format!("{byte:02x}")).collect()
}

/// The log of a request that runs. It is written by a thread of its own, which ends after this is dropped.
#[derive(Debug)]
pub(crate) struct ProgressLog {
    lines: Sender<Vec<u8>>,
}

impl ProgressLog {
    /// Opens the log at a path, and reads it if it is of the same: else it is begun anew. Waits until the log of an earlier attempt is
    /// written.
    ///
    /// # Errors
    /// If it cannot be read or written, or is not a regular file.
    pub fn open(path: &Path, of: &str) -> io::Result<(Self, Earlier)> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = opened(path, &mut options)?;
        file.lock()?;
        let (mut earlier, mut is_same) = (Earlier::default(), false);
        let end = each_record(&file, &mut |record| {
            is_same = is_same || matches!(&record, Record::Of(other) if other == of);
            earlier.add(record);
            is_same
        })?;
        if !is_same {
            earlier = Earlier::default();
        }
        file.set_len(end)?;
        file.seek(SeekFrom::Start(end))?;
        let (lines, waiting) = channel();
        thread::Builder::new()
            .name("progress".to_owned())
            .spawn(move || write(&file, &waiting))?;
        let log = Self { lines };
        if end == 0 {
            log.add(&Record::Of(of.to_owned()));
        }
        Ok((log, earlier))
    }

    pub fn activity(&self, part: ActivityPart) {
        self.add(&Record::Activity(part));
    }

    pub fn windows(&self, found: FoundWindows) {
        self.add(&Record::Windows(found));
    }

    pub fn heard(&self, window: &Range<u64>, heard: &Heard) {
        self.add(&Record::Heard {
            window: window.clone(),
            heard: heard.into(),
        });
    }

    fn add(&self, record: &Record) {
        let Ok(json) = serde_json::to_vec(record) else { return };
        let line = [digest_of(&json).as_bytes(), b" ", &json, b"\n"].concat();
        // The thread ends early where the log cannot be written, such as to a full disk: then the work is done without it.
        let _ = self.lines.send(line);
    }
}

/// Writes lines as they come. Another thread flushes them, since that may take long: until a line is written, a kill loses it,
/// although its window counts as done.
fn write(mut file: &File, lines: &Receiver<Vec<u8>>) {
    thread::scope(|scope| {
        let (written, waiting) = channel();
        let flusher = thread::Builder::new().name("progress-flush".to_owned());
        // Without the thread, the system flushes when it likes.
        let _ = flusher.spawn_scoped(scope, move || flush(file, &waiting));
        for line in lines {
            if file.write_all(&line).is_err() {
                return;
            }
            let _ = written.send(());
        }
    });
}

/// Flushes what is written: once in [`FLUSH`] at most, and at the end.
fn flush(file: &File, written: &Receiver<()>) {
    let (mut flushed, mut is_new) = (Instant::now(), false);
    loop {
        match written.recv_timeout(FLUSH) {
            Ok(()) => is_new = true,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                if is_new {
                    let _ = file.sync_data();
                }
                return;
            }
        }
        if is_new && flushed.elapsed() >= FLUSH {
            let _ = file.sync_data();
            (flushed, is_new) = (Instant::now(), false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(text: &str) -> Heard {
        Heard {
            words: vec![Word {
                word: text.to_owned(),
                start: 0.1 + 0.2,
                end: f64::NAN,
                confidence: Some(1.0 / 3.0),
                speaker: None,
            }],
            tokens: vec![vec![Token {
                bytes: vec![0xe0, 0xa4],
                logprob: -0.1,
                is_first_choice: true,
            }]],
            languages: vec!["hi".to_owned()],
            recovered: 1,
            blanks: vec![(0.08 * 3.0, 0.1)],
            dropped: vec![Suspect {
                start: 0.1 * 3.0,
                end: 0.4,
                text: "you".to_owned(),
                reason: Reason::NoSpeech,
                dropped: true,
            }],
        }
    }

    /// Opens a log as soon as what was written before is on disk.
    fn open(path: &Path, of: &str) -> (ProgressLog, Earlier) {
        ProgressLog::open(path, of).unwrap()
    }

    #[test]
    fn what_was_written_is_read_again_up_to_the_first_damage() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("progress");
        assert_eq!(Logged::read(&path), Logged::default());
        let windows = SpeechWindows {
            windows: vec![0..16_000, 32_000..48_000, 64_000..80_000],
            samples: 96_000,
            ..SpeechWindows::default()
        };
        let (log, earlier) = open(&path, "a");
        assert!(earlier.windows.is_none());
        log.windows(FoundWindows::new(&windows, true, Some("loud".to_owned())));
        log.heard(&windows.windows[0], &heard("one"));
        log.heard(&windows.windows[2], &heard("three"));
        drop(log);
        let found = |earlier: &Earlier| -> Vec<Option<String>> {
            let heard = earlier.heard_in(&windows.windows);
            let text = |heard: Heard| format!("{heard:?}");
            heard.into_iter().map(|heard| heard.map(text)).collect()
        };
        let text = |text: &str| Some(format!("{:?}", heard(text)));
        let (log, earlier) = open(&path, "a");
        drop(log);
        let again = earlier.windows.as_ref().unwrap();
        assert_eq!((again.windows(), again.damaged), (windows.clone(), true));
        assert_eq!(found(&earlier), [text("one"), None, text("three")]);
        let logged = Logged::read(&path);
        assert_eq!(
            (logged.records, logged.place, logged.seconds),
            (3, 2.0, Some((5.0, 6.0)))
        );
        let bytes = std::fs::read(&path).unwrap();
        let third = bytes
            .iter()
            .enumerate()
            .filter(|(_, byte)| **byte == b'\n')
            .nth(2)
            .unwrap()
            .0
            + 1;
        // Torn and damaged lines.
        for damaged in [bytes[..bytes.len() - 1].to_vec(), bytes[..third + 40].to_vec(), {
            let mut bytes = bytes.clone();
            bytes[third + 60] ^= 1;
            bytes
        }] {
            std::fs::write(&path, &damaged).unwrap();
            assert_eq!(Logged::read(&path).records, 2);
            let (log, earlier) = open(&path, "a");
            assert_eq!(found(&earlier), [text("one"), None, None]);
            log.heard(&windows.windows[2], &heard("three"));
            drop(log);
            let (log, earlier) = open(&path, "a");
            assert_eq!(found(&earlier), [text("one"), None, text("three")]);
            drop(log);
        }
        // The log of something else.
        let (log, earlier) = open(&path, "b");
        assert!(earlier.windows.is_none() && found(&earlier) == [None, None, None]);
        drop(log);
        drop(open(&path, "b"));
        assert_eq!(Logged::read(&path), Logged::default());
        std::fs::write(&path, [0xff; 300]).unwrap();
        assert!(open(&path, "b").1.windows.is_none());
        assert!(ProgressLog::open(folder.path(), "b").is_err());
    }

    #[test]
    fn what_is_not_a_file_is_neither_followed_nor_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (log, _) = open(&path("real"), "a");
        log.windows(FoundWindows::new(&SpeechWindows::default(), false, None));
        drop(log);
        drop(open(&path("real"), "a"));
        let before = std::fs::read(path("real")).unwrap();
        std::os::unix::fs::symlink("real", path("link")).unwrap();
        std::os::unix::fs::symlink("none", path("dangling")).unwrap();
        let made = std::process::Command::new("mkfifo").arg(path("pipe")).status().unwrap();
        assert!(made.success());
        std::fs::create_dir(path("folder")).unwrap();
        for name in ["link", "dangling", "pipe", "folder"] {
            let refused = ProgressLog::open(&path(name), "b").unwrap_err().to_string();
            assert_eq!(refused, "it is not a regular file", "{name}");
            assert_eq!(Logged::read(&path(name)), Logged::default(), "{name}");
        }
        assert!(!path("none").exists());
        assert_eq!(std::fs::read(path("real")).unwrap(), before);
    }
}
