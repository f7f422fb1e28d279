//! The state of a run from its events, read incrementally. Memory is bounded by the number of stages, however long the
//! file of events.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use flow_base::event::Event;
use flow_spec::SwitchedOff;

use flow_inspect::figures;
use flow_inspect::progress::{RunProgress, stage_of};
use flow_inspect::sentence::sentence;

/// The longest event; longer ones are skipped.
const MAX_LINE: usize = 8 << 20;
const BLOCK: usize = 64 << 10;
/// Warnings and latest events that are kept.
const KEPT: usize = 30;

/// A run, as far as its events were read.
#[derive(Default)]
pub struct Follower {
    path: PathBuf,
    /// Of the end of what was read, in bytes.
    offset: u64,
    /// An incomplete line at the end of the file.
    partial: Vec<u8>,
    /// The line that is being read is longer than any event.
    too_long: bool,
    pub pipeline: String,
    pub started: String,
    /// As the user named the run, and the note of it.
    pub name: Option<String>,
    pub note: Option<String>,
    pub stages: Vec<String>,
    pub switched_off: Vec<SwitchedOff>,
    pub progress: RunProgress,
    /// For each stage, the times of its first and its last event.
    pub times: BTreeMap<String, (String, String)>,
    /// The last figures of a stage.
    pub figures: BTreeMap<String, String>,
    /// Stage, folder, files.
    pub exports: Vec<(String, String, Vec<String>)>,
    pub failures: Vec<String>,
    pub warnings: VecDeque<String>,
    /// When, and what.
    pub latest: VecDeque<(String, String)>,
    /// How it ended.
    pub ended: Option<Ended>,
    /// Lines that were no events.
    pub damaged: u64,
}

/// The end of a run.
pub struct Ended {
    pub outcome: String,
    pub in_words: String,
    pub seconds: f64,
}

impl Follower {
    /// A run whose events are in the file at `path`.
    pub fn new(path: &Path) -> Follower {
        Follower {
            path: path.to_owned(),
            ..Follower::default()
        }
    }

    /// Reads what was written since the last call; returns whether there was anything.
    ///
    /// # Errors
    /// If the file cannot be read. One that is not there yet is empty.
    pub fn advance(&mut self) -> io::Result<bool> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        if file.metadata()?.len() < self.offset {
            *self = Follower::new(&self.path);
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let before = self.offset;
        let mut block = vec![0; BLOCK];
        loop {
            let length = file.read(&mut block)?;
            if length == 0 {
                return Ok(self.offset > before);
            }
            self.offset += length as u64;
            let mut rest = &block[..length];
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                self.extend(&rest[..end]);
                rest = &rest[end + 1..];
                let line = std::mem::take(&mut self.partial);
                match std::mem::take(&mut self.too_long) {
                    true => self.damaged += 1,
                    false => self.take_line(&line),
                }
            }
            self.extend(rest);
        }
    }

    fn extend(&mut self, bytes: &[u8]) {
        if self.partial.len() + bytes.len() > MAX_LINE {
            self.too_long = true;
            self.partial.clear();
        }
        if !self.too_long {
            self.partial.extend_from_slice(bytes);
        }
    }

    fn take_line(&mut self, line: &[u8]) {
        if line.trim_ascii().is_empty() {
            return;
        }
        let Ok(mut value) = serde_json::from_slice::<serde_json::Value>(line) else {
            self.damaged += 1;
            return;
        };
        let at = value.as_object_mut().and_then(|object| object.remove("at"));
        let at = at.and_then(|at| at.as_str().map(str::to_owned)).unwrap_or_default();
        match serde_json::from_value(value) {
            Ok(event) => self.take(at, event),
            Err(_) => self.damaged += 1,
        }
    }

    fn take(&mut self, at: String, event: Event) {
        self.progress.take(&event);
        let told = sentence(&event);
        if let Some(stage) = stage_in(&event) {
            let times = self.times.entry(stage_of(stage).to_owned());
            times.or_insert_with(|| (at.clone(), at.clone())).1.clone_from(&at);
        }
        match event {
            Event::RunStarted {
                pipeline,
                stages,
                switched_off,
                name,
                note,
                ..
            } => {
                (self.name, self.note) = (name, note);
                (self.pipeline, self.stages, self.switched_off) = (pipeline, stages, switched_off);
                self.started.clone_from(&at);
            }
            Event::StageFigures { stage, figures } if figures::table(&figures).is_none() => {
                self.figures
                    .insert(stage_of(&stage).to_owned(), figures::on_one_line(&figures));
            }
            Event::Exported { stage, folder, files } => {
                self.exports.retain(|(known, ..)| *known != stage);
                self.exports.push((stage, folder, files));
            }
            Event::Warning { .. } => kept(&mut self.warnings, told.clone()),
            Event::RunFailed { .. } if self.failures.len() < KEPT => self.failures.push(told.clone()),
            Event::RunFinished { outcome, seconds, .. } => {
                self.ended = Some(Ended {
                    outcome,
                    in_words: told.clone(),
                    seconds,
                });
            }
            _ => {}
        }
        kept(&mut self.latest, (at, told));
    }
}

fn kept<T>(all: &mut VecDeque<T>, one: T) {
    if all.len() == KEPT {
        all.pop_front();
    }
    all.push_back(one);
}

fn stage_in(event: &Event) -> Option<&str> {
    match event {
        Event::StageStarted { stage, .. }
        | Event::Committed { stage, .. }
        | Event::StageFigures { stage, .. }
        | Event::StageFinished { stage, .. }
        | Event::Exported { stage, .. } => Some(stage),
        Event::RunFailed { stage, .. } => stage.as_deref(),
        _ => None,
    }
}

/// Some lines of a file that ends at `to`, or of the whole file, and where the first of them begins.
///
/// # Errors
/// If the file cannot be read.
pub fn last_lines(path: &Path, to: Option<u64>) -> io::Result<(u64, Vec<String>)> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let to = to.unwrap_or(length).min(length);
    let from = to.saturating_sub(4 * BLOCK as u64);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(to - from).read_to_end(&mut bytes)?;
    // The first line may have begun before.
    let begin = match bytes.iter().position(|byte| *byte == b'\n') {
        Some(end) if from > 0 => end + 1,
        _ => 0,
    };
    let end = bytes
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(begin, |end| (end + 1).max(begin));
    let text = String::from_utf8_lossy(&bytes[begin..end]);
    let lines = text.lines().map(str::to_owned).collect();
    // A line that is longer than what is read at once is passed over.
    let first = if begin == 0 { from } else { from + begin as u64 };
    Ok((first, lines))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn line(event: &str) -> String {
        format!("{{\"at\":\"2026-01-01T00:00:00Z\",{event}}}\n")
    }

    #[test]
    fn events_are_read_on_as_they_come_and_damaged_ones_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let mut follower = Follower::new(&path);
        assert!(!follower.advance().unwrap());
        let mut file = File::create(&path).unwrap();
        let started =
            line("\"event\":\"run_started\",\"version\":1,\"run\":\"r\",\"pipeline\":\"p\",\"stages\":[\"a\"]");
        let (first, second) = started.split_at(30);
        file.write_all(first.as_bytes()).unwrap();
        assert!(follower.advance().unwrap() && follower.pipeline.is_empty());
        file.write_all(second.as_bytes()).unwrap();
        file.write_all(b"no event\n{}\n\xff\n").unwrap();
        file.write_all(
            line("\"event\":\"stage_started\",\"stage\":\"a:keys\",\"kind\":\"k\",\"run\":2,\"reused\":0").as_bytes(),
        )
        .unwrap();
        assert!(follower.advance().unwrap());
        assert_eq!((follower.pipeline.as_str(), follower.damaged), ("p", 3));
        assert_eq!(follower.times["a"].0, "2026-01-01T00:00:00Z");
        assert!(!follower.advance().unwrap());
        let ended = line("\"event\":\"run_finished\",\"outcome\":\"done\",\"seconds\":1.5,\"ran\":2,\"reused\":0");
        file.write_all(ended.as_bytes()).unwrap();
        follower.advance().unwrap();
        assert_eq!(follower.ended.as_ref().map(|end| end.outcome.as_str()), Some("done"));
        // A file that became shorter belongs to another run.
        File::create(&path).unwrap().write_all(started.as_bytes()).unwrap();
        follower.advance().unwrap();
        assert!(follower.ended.is_none() && follower.damaged == 0);
    }

    #[test]
    fn a_line_without_an_end_is_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let mut file = File::create(&path).unwrap();
        file.write_all(&vec![b'x'; MAX_LINE + 3 * BLOCK]).unwrap();
        let mut follower = Follower::new(&path);
        follower.advance().unwrap();
        assert!(follower.partial.len() <= BLOCK);
        file.write_all(b"\n").unwrap();
        file.write_all(line("\"event\":\"note\",\"message\":\"hello\"").as_bytes())
            .unwrap();
        follower.advance().unwrap();
        assert_eq!((follower.damaged, follower.latest.len()), (1, 1));
    }

    #[test]
    fn the_log_is_read_from_its_end_back_to_its_beginning() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let all: Vec<String> = (0..40_000).map(|number| format!("line number {number}")).collect();
        std::fs::write(&path, format!("{}\ncut", all.join("\n"))).unwrap();
        let (mut to, mut read) = (None, Vec::new());
        loop {
            let (first, mut lines) = last_lines(&path, to).unwrap();
            lines.append(&mut read);
            read = lines;
            if first == 0 {
                break;
            }
            to = Some(first);
        }
        assert_eq!(read, all);
    }
}
