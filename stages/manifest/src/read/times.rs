//! Where in its recording a row lies, by the names that manifests have for that.

use std::path::{Path, PathBuf};

use flow_audio::part::{TOLERANCE_SECONDS, stated_seconds};
pub use flow_audio::row_times::{ENDS, OFFSET, STARTS, is_time, unread, unread_among};

use super::rows::{Refusal, refuse};

pub const DURATION: &str = "duration";
/// Rows that are looked at to tell seconds from milliseconds.
const MOST_SAMPLED: usize = 256;
/// Times that end so many times later than their recordings cannot be seconds.
const FAR_BEYOND: f64 = 3.0;
/// Shortest row in milliseconds that is believed.
const LEAST_MILLISECONDS: f64 = 50.0;
const MILLISECONDS: f64 = 1000.0;

/// Keys of a row's place that rows have no column of the same name for.
pub const TIME_KEYS: [&str; 8] = [
    "start",
    "start_time",
    "begin",
    "begin_time",
    "end",
    "end_time",
    "stop",
    "stop_time",
];

/// A time, and the key or column that gives it.
pub type Named = (&'static str, f64);

/// The unit of `start` and `end`. An `offset` and a `duration` are seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unit {
    #[default]
    Seconds,
    Milliseconds,
}

impl Unit {
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

/// What a row says of its place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Times {
    pub starts: Vec<Named>,
    pub ends: Vec<Named>,
    pub duration: Option<f64>,
}

impl Times {
    /// Collects what `time` gives for each name.
    pub fn of(mut time: impl FnMut(&'static str) -> Result<Option<f64>, Refusal>) -> Result<Times, Refusal> {
        let mut all = |names: &[&'static str]| {
            let mut found = Vec::new();
            for &name in names {
                found.extend(time(name)?.map(|seconds| (name, seconds)));
            }
            Ok(found)
        };
        let (starts, ends) = (all(&STARTS)?, all(&ENDS)?);
        Ok(Times {
            starts,
            ends,
            duration: time(DURATION)?,
        })
    }

    /// Where the row begins (none: with its recording) and how long it is, in seconds.
    ///
    /// # Errors
    /// Where names contradict each other, or an end has no beginning.
    pub fn place(&self, unit: Unit) -> Result<(Option<f64>, Option<f64>), Refusal> {
        let in_seconds = |&(name, time): &Named| match unit {
            Unit::Milliseconds if name != OFFSET => (name, time / MILLISECONDS),
            _ => (name, time),
        };
        let start = agreed(self.starts.iter().map(in_seconds))?;
        let end = agreed(self.ends.iter().map(in_seconds))?;
        let length = match (start, end) {
            (_, None) => None,
            (None, Some((end, _))) => {
                let names = STARTS.join(", ");
                let why = format!("`{end}` says where the row ends, but nothing where it begins (one of {names})");
                return Err(refuse("missing_field", why));
            }
            (Some((begin, from)), Some((end, to))) => {
                let length = to - from;
                if !(length.is_finite() && length > 0.0) {
                    let why = format!("`{begin}` is {from} s, `{end}` is {to} s");
                    return Err(refuse("duration_invalid", why));
                }
                if let Some(said) = self.duration.filter(|said| (said - length).abs() > TOLERANCE_SECONDS) {
                    let why = format!("`{begin}` is {from} s, `{end}` is {to} s, but `{DURATION}` is {said} s");
                    return Err(refuse("duration_invalid", why));
                }
                Some(length)
            }
        };
        let start = start.map(|(_, start)| start).filter(|&start| start != 0.0);
        Ok((start, self.duration.or(length)))
    }
}

/// The one time that all names give.
fn agreed(mut times: impl Iterator<Item = Named>) -> Result<Option<Named>, Refusal> {
    let Some(first) = times.next() else { return Ok(None) };
    for (name, time) in times {
        // Not a number agrees with none.
        let agrees = (time - first.1).abs() <= TOLERANCE_SECONDS;
        if !agrees {
            let why = format!("`{}` is {} s, but `{name}` is {time} s", first.0, first.1);
            return Err(refuse("offset_invalid", why));
        }
    }
    Ok(Some(first))
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

    /// Adds a row that is due, whose recording may be one of `files`.
    pub fn add(&mut self, times: &Times, files: Vec<PathBuf>) {
        let start = times.starts.iter().find(|(name, _)| *name != OFFSET);
        if let (Some(&(_, start)), Some(&(_, end))) = (start, times.ends.first()) {
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
    }

    /// Milliseconds, where most recordings whose length is known are far too short for seconds, and long enough for these.
    pub fn unit(&self) -> Unit {
        let (mut known, mut beyond) = (0, 0);
        for (files, start, end) in &self.rows {
            let Some(length) = files.iter().find(|file| file.is_file()).and_then(|file| length(file)) else {
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

fn length(file: &Path) -> Option<f64> {
    stated_seconds(file, None).filter(|seconds| seconds.is_finite() && *seconds > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(named: &[Named]) -> Times {
        Times::of(|name| Ok(named.iter().find(|(other, _)| *other == name).map(|(_, time)| *time))).unwrap()
    }

    #[test]
    fn a_place_is_told_by_any_of_its_names() {
        for (named, start, duration) in [
            (&[("start", 2.0), ("end", 3.5)][..], Some(2.0), Some(1.5)),
            (&[("start_time", 2.0), ("end_time", 3.5)], Some(2.0), Some(1.5)),
            (&[("begin", 2.0), ("stop", 3.5)], Some(2.0), Some(1.5)),
            (&[("offset", 2.0), ("duration", 1.5)], Some(2.0), Some(1.5)),
            (&[("start", 2.0), ("duration", 1.5)], Some(2.0), Some(1.5)),
            (&[("start", 0.0), ("end", 1.5)], None, Some(1.5)),
            // The duration as it is given, where both say the same.
            (
                &[("start", 2.0), ("end", 3.502), ("duration", 1.5)],
                Some(2.0),
                Some(1.5),
            ),
            (&[("offset", 2.0), ("start", 2.0)], Some(2.0), None),
            (&[], None, None),
        ] {
            assert_eq!(times(named).place(Unit::Seconds), Ok((start, duration)), "{named:?}");
        }
    }

    #[test]
    fn times_that_contradict_each_other_are_refused_by_name() {
        for (named, reason, said) in [
            (&[("end", 2.0)][..], "missing_field", "`end` says where the row ends"),
            (
                &[("offset", 1.0), ("start", 2.0)],
                "offset_invalid",
                "`offset` is 1 s, but `start` is 2 s",
            ),
            (
                &[("begin", 3.0), ("stop", 2.0)],
                "duration_invalid",
                "`begin` is 3 s, `stop` is 2 s",
            ),
            (
                &[("start", f64::NAN), ("end", 2.0)],
                "duration_invalid",
                "`start` is NaN s",
            ),
            (
                &[("start", 1.0), ("end", 2.0), ("duration", 7.0)],
                "duration_invalid",
                "but `duration` is 7 s",
            ),
        ] {
            let refusal = times(named).place(Unit::Seconds).unwrap_err();
            assert_eq!(refusal.reason, reason, "{refusal:?}");
            assert!(refusal.detail.contains(said), "{refusal:?}");
        }
    }

    #[test]
    fn milliseconds_leave_an_offset_and_a_duration_as_they_are() {
        let place = |named: &[Named]| times(named).place(Unit::Milliseconds).unwrap();
        assert_eq!(place(&[("start", 500.0), ("end", 2000.0)]), (Some(0.5), Some(1.5)));
        assert_eq!(
            place(&[("start", 500.0), ("end", 2000.0), ("duration", 1.5)]),
            (Some(0.5), Some(1.5))
        );
        assert_eq!(place(&[("offset", 0.5), ("duration", 1.5)]), (Some(0.5), Some(1.5)));
    }

    #[test]
    fn a_sample_stays_small() {
        let mut sample = UnitSample::default();
        for _ in 0..10_000 {
            if sample.is_due() {
                sample.add(&times(&[("start", 0.0), ("end", 1.0)]), Vec::new());
            }
        }
        assert!(sample.rows.len() <= MOST_SAMPLED && sample.rows.len() > MOST_SAMPLED / 4);
        assert_eq!(sample.unit(), Unit::Seconds);
    }
}
