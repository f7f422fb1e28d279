//! The names that manifests have for where a row begins and ends in its recording: one rule for all who read them.

use std::path::{Path, PathBuf};

use flow_storage::{Storage, is_file};
use serde_json::Value;

use crate::part::{TOLERANCE_SECONDS, stated_seconds};

/// NeMo's name for where a row begins.
pub const OFFSET: &str = "offset";
/// Where a row begins and ends in its recording.
pub const STARTS: [&str; 5] = [OFFSET, "start", "start_time", "begin", "begin_time"];
pub const ENDS: [&str; 4] = ["end", "end_time", "stop", "stop_time"];

/// Rows that are looked at to tell seconds from milliseconds.
const MOST_SAMPLED: usize = 256;
/// Times that end this many times later than their recordings cannot be seconds.
const FAR_BEYOND: f64 = 3.0;
/// Shortest row in milliseconds that is believed.
const LEAST_MILLISECONDS: f64 = 50.0;
const MILLISECONDS: f64 = 1000.0;

/// Words of names that say where a row begins or ends, and words that may be beside these.
const OF_PLACES: [&str; 9] = [
    "start", "begin", "beg", "onset", "end", "stop", "offset", "tmin", "tmax",
];
const BESIDE: [&str; 28] = [
    "time",
    "times",
    "timestamp",
    "ts",
    "t",
    "sec",
    "secs",
    "second",
    "seconds",
    "s",
    "ms",
    "msec",
    "millis",
    "milliseconds",
    "pos",
    "position",
    "at",
    "in",
    "segment",
    "seg",
    "utterance",
    "utt",
    "clip",
    "audio",
    "speech",
    "sample",
    "samples",
    "frame",
];

/// Names that say it where both are there.
const PAIRS: [[&str; 2]; 3] = [["from", "to"], ["t0", "t1"], ["xmin", "xmax"]];

/// Whether a name says where a row begins or ends in its recording, but is none of those that are read: `start_ms`,
/// `segmentEnd`. With such a column left out, each row would be the whole recording.
fn is_unread(name: &str) -> bool {
    if STARTS.contains(&name) || ENDS.contains(&name) {
        return false;
    }
    // Asked of every key of every line, of which hardly any is one.
    let holds = |word: &&str| {
        name.as_bytes()
            .windows(word.len())
            .any(|part| part.eq_ignore_ascii_case(word.as_bytes()))
    };
    if !OF_PLACES.iter().any(holds) {
        return false;
    }
    let mut words = vec![String::new()];
    let mut small = false;
    for letter in name.chars() {
        if !letter.is_alphanumeric() || (letter.is_uppercase() && small) {
            words.push(String::new());
        }
        small = letter.is_lowercase();
        if let Some(word) = words.last_mut()
            && letter.is_alphanumeric()
        {
            word.extend(letter.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    // `starttime`
    let is_place = |word: &str| {
        let plain = word
            .strip_suffix("time")
            .filter(|plain| !plain.is_empty())
            .unwrap_or(word);
        OF_PLACES.contains(&plain)
    };
    words.iter().any(|word| is_place(word))
        && words
            .iter()
            .all(|word| is_place(word) || BESIDE.contains(&word.as_str()))
}

/// Whether a value beside a name says a time: a number, or a clock time.
pub fn is_time(value: &Value) -> bool {
    match value {
        Value::String(text) => {
            text.starts_with(|first: char| first.is_ascii_digit()) && !text.contains(char::is_alphabetic)
        }
        value => value.is_number(),
    }
}

/// The first of the names beside those of a row that nothing reads.
pub fn unread_among<'n>(names: impl Iterator<Item = &'n str> + Clone) -> Option<&'n str> {
    let has = |wanted: &&str| names.clone().any(|name| name.eq_ignore_ascii_case(wanted));
    let pair = PAIRS.iter().find(|pair| pair.iter().all(has));
    let is_of_pair = |name: &str| pair.is_some_and(|pair| pair.iter().any(|of| of.eq_ignore_ascii_case(name)));
    names.clone().find(|name| is_unread(name) || is_of_pair(name))
}

/// What is wrong with such a name.
pub fn unread(name: &str) -> String {
    format!(
        "`{name}` seems to say where a row begins or ends in its recording, but is not read: times are called {} and {}",
        STARTS.join(", "),
        ENDS.join(", ")
    )
}

/// The unit of `start` and `end`. An `offset` and a `duration` are seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unit {
    #[default]
    Seconds,
    Milliseconds,
}

impl Unit {
    /// A time of this name in seconds.
    pub fn seconds(self, name: &str, time: f64) -> f64 {
        match self {
            Unit::Milliseconds if name != OFFSET => time / MILLISECONDS,
            _ => time,
        }
    }

    /// The decision as text for the log, where it is not what goes without saying.
    pub fn decision(self) -> Option<String> {
        (self == Unit::Milliseconds).then(|| {
            "where rows begin and end is taken as milliseconds, since recordings are far too short for seconds".into()
        })
    }

    /// The part of the decision that belongs to the key of a partition, since it depends on all recordings.
    pub fn in_key(self) -> &'static str {
        match self {
            Unit::Seconds => "",
            Unit::Milliseconds => " milliseconds",
        }
    }
}

/// Evenly spread rows of a manifest that have a beginning and an end, to tell the unit of both.
#[derive(Clone, Debug, Default)]
pub struct UnitSample {
    rows: Vec<(Vec<PathBuf>, f64, f64)>,
    /// One row in this many is kept; a power of two.
    every: u64,
    seen: u64,
}

impl UnitSample {
    /// Whether the next row is one of those that are looked at.
    pub fn is_due(&mut self) -> bool {
        self.every = self.every.max(1);
        self.seen += 1;
        (self.seen - 1).is_multiple_of(self.every)
    }

    /// Adds where a row that is due begins and ends, and of which files one may be its recording.
    pub fn add(&mut self, start: f64, end: f64, files: Vec<PathBuf>) {
        self.rows.push((files, start, end));
        if self.rows.len() > MOST_SAMPLED {
            self.every *= 2;
            let mut number = 0u64;
            self.rows.retain(|_| {
                number += 1;
                number % 2 == 1
            });
        }
    }

    /// Milliseconds, where most recordings whose length is known are far too short for seconds, and long enough for these.
    pub fn unit(&self, storage: &Storage) -> Unit {
        let (mut known, mut beyond) = (0, 0);
        for (files, start, end) in &self.rows {
            let Some(length) = files
                .iter()
                .find(|file| is_file(storage, file).unwrap_or(false))
                .and_then(|file| length(storage, file))
            else {
                continue;
            };
            known += 1;
            beyond += usize::from(
                *end > FAR_BEYOND * length
                    && end / MILLISECONDS <= length + TOLERANCE_SECONDS
                    && end - start >= LEAST_MILLISECONDS,
            );
        }
        match 2 * beyond > known {
            true => Unit::Milliseconds,
            false => Unit::Seconds,
        }
    }
}

fn length(storage: &Storage, file: &Path) -> Option<f64> {
    stated_seconds(storage, file, None).filter(|seconds| seconds.is_finite() && *seconds > 0.0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_sample_stays_small() {
        let mut sample = UnitSample::default();
        for _ in 0..10_000 {
            if sample.is_due() {
                sample.add(0.0, 1.0, Vec::new());
            }
        }
        assert!(sample.rows.len() <= MOST_SAMPLED && sample.rows.len() > MOST_SAMPLED / 4);
        assert_eq!(sample.unit(&Storage::default()), Unit::Seconds);
    }

    #[test]
    fn names_of_times_that_are_not_read_are_told_from_others() {
        for name in [
            "start_ms",
            "End (s)",
            "segment_start",
            "startTime",
            "endtime",
            "audio.offset",
            "tmin",
            "Start_Frame",
            // Tables of text alone read names in other cases.
            "End_Time",
        ] {
            assert!(is_unread(name), "{name}");
        }
        let others = [
            "start",
            "end_time",
            "offset",
            "duration",
            "start_date",
            "weekend",
            "gender",
            "endpoint",
            "time",
            "speaker",
            "sentence",
            "stops",
            "",
            "__",
            "trend",
            "audio",
            "backend_time",
        ];
        for name in others {
            assert!(!is_unread(name), "{name}");
        }
        for time in [json!(1.5), json!(-3), json!("12"), json!("00:01:02.5")] {
            assert!(is_time(&time), "{time}");
        }
        for other in [
            json!("2 s"),
            json!("left"),
            json!(""),
            json!(null),
            json!(true),
            json!([1]),
        ] {
            assert!(!is_time(&other), "{other}");
        }
        let among = |names: &[&'static str]| unread_among(names.iter().copied());
        assert_eq!(among(&["speaker", "To", "From"]), Some("To"));
        assert_eq!(among(&["from", "speaker", "xmin"]), None);
    }
}
