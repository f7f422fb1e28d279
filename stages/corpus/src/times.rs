//! Where in its recording a row lies, by the names that manifests have for that.

use std::path::PathBuf;

use flow_audio::part::TOLERANCE_SECONDS;
pub use flow_audio::row_times::{ENDS, OFFSET, STARTS, Unit, UnitSample, is_time, unread, unread_among};

use crate::manifest_row::{Refusal, refuse};

pub const DURATION: &str = "duration";

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

    /// Adds the row, which is due, to those that tell the unit; its recording may be one of `files`.
    pub fn add_to(&self, sample: &mut UnitSample, files: Vec<PathBuf>) {
        let start = self.starts.iter().find(|(name, _)| *name != OFFSET);
        if let (Some(&(_, start)), Some(&(_, end))) = (start, self.ends.first()) {
            sample.add(start, end, files);
        }
    }

    /// Where the row begins (none: with its recording) and how long it is, in seconds.
    ///
    /// # Errors
    /// Where names contradict each other, or an end has no beginning.
    pub fn place(&self, unit: Unit) -> Result<(Option<f64>, Option<f64>), Refusal> {
        let in_seconds = |&(name, time): &Named| (name, unit.seconds(name, time));
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
}
