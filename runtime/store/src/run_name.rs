//! Names of runs: the time, a number that rises from run to run, and a mark. The number orders them: a clock may be set back.

use std::path::Path;

use chrono::Utc;

use super::StoreError;
use flow_base::digest::Digest;

/// More runs than any state directory has: a name with a larger number was not given by `flow`.
const MOST: u64 = 1 << 48;

/// A name after those of all runs in the state directory `dir`, a folder.
///
/// # Errors
/// If the folder of runs cannot be listed.
pub fn next(dir: &Path) -> Result<String, StoreError> {
    let number = runs_in(dir)?.last().map_or(0, |last| number_of(last)).saturating_add(1);
    let now = Utc::now();
    let seed = format!("{:?} {}", now, std::process::id());
    let mut mark = Digest::of(seed.as_bytes()).short();
    mark.truncate(4);
    Ok(format!("{}-{number}-{mark}", now.format("%Y%m%dT%H%M%S%3fZ")))
}

/// The names of all runs that have a folder in the state directory `dir`, in order.
pub(super) fn runs_in(dir: &Path) -> Result<Vec<String>, StoreError> {
    let folder = dir.join("runs");
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(StoreError::io("list the folder", &folder, e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| StoreError::io("list the folder", &folder, e))?;
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            names.extend(entry.file_name().into_string());
        }
    }
    names.sort_by(|a, b| (number_of(a), a).cmp(&(number_of(b), b)));
    Ok(names)
}

/// Whether a run has a higher number than another one.
pub fn is_after(name: &str, other: &str) -> bool {
    number_of(name) > number_of(other)
}

/// 0 for runs of a flow that gave no numbers, which are ordered by their times.
fn number_of(name: &str) -> u64 {
    let mut parts = name.split('-').skip(1);
    match (parts.next(), parts.next(), parts.next()) {
        (Some(number), Some(_), None) => number.parse().ok().filter(|number| *number < MOST - 1).unwrap_or(0),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_the_last_whatever_the_clock_said_to_earlier_ones() {
        let dir = tempfile::tempdir().unwrap();
        let mut expected = Vec::new();
        let mut begun = |name: &str| {
            std::fs::create_dir_all(dir.path().join("runs").join(name)).unwrap();
            expected.push(name.to_string());
            assert_eq!(runs_in(dir.path()).unwrap(), expected);
        };
        // Without numbers; of a clock that was ahead; and of one that was set back.
        begun("20260102T030405678Z-ab12");
        begun("29990101T000000000Z-0000");
        begun(&next(dir.path()).unwrap());
        begun("19700101T000000000Z-2-ffff");
        begun("20260102T030405678Z-9-0000");
        begun("20260101T030405678Z-10-0000");
        // Numbers that no run has count as none.
        let strange = format!("x-{}-y", MOST - 1);
        std::fs::create_dir(dir.path().join("runs").join(&strange)).unwrap();
        let last = next(dir.path()).unwrap();
        assert_eq!(number_of(&last), 11);
        std::fs::remove_dir(dir.path().join("runs").join(strange)).unwrap();
        begun(&last);
    }
}
