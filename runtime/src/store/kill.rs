//! Named points at which a test lets the process kill itself.
//!
//! `FLOW_KILL_AT=name[:n]` sends SIGKILL to this process when it passes the point for the n-th time (the
//! first, if no number is given), so that a test can look at what any crash leaves. Without the variable a
//! point costs one load.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::StoreError;

/// The points, in the order in which one partition passes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    /// A data file lies under its temporary name.
    DataWritten,
    /// A data file got its final name; no record names it yet.
    DataRenamed,
    /// The record of a group lies under its temporary name, on the disk.
    RecordWritten,
    /// The record of a group has its final name: the group is committed.
    RecordLinked,
    /// The index is in place; the group records it replaces are still there.
    IndexWritten,
    /// One file of an export got its final name; `flow.json` is not there.
    ExportRenaming,
    /// `flow.json` is there.
    ExportDone,
}

const POINTS: [(Point, &str); 7] = [
    (Point::DataWritten, "data-written"),
    (Point::DataRenamed, "data-renamed"),
    (Point::RecordWritten, "record-written"),
    (Point::RecordLinked, "record-linked"),
    (Point::IndexWritten, "index-written"),
    (Point::ExportRenaming, "export-renaming"),
    (Point::ExportDone, "export-done"),
];

struct Armed {
    point: Point,
    passes_left: AtomicU64,
}

static ARMED: OnceLock<Option<Armed>> = OnceLock::new();

fn parse(value: &str) -> Option<Armed> {
    let (name, passes) = match value.split_once(':') {
        Some((name, passes)) => (name, passes.parse().ok().filter(|&n| n > 0)?),
        None => (value, 1),
    };
    let (point, _) = POINTS.iter().find(|(_, known)| *known == name)?;
    Some(Armed {
        point: *point,
        passes_left: AtomicU64::new(passes),
    })
}

fn armed() -> &'static Option<Armed> {
    ARMED.get_or_init(|| std::env::var("FLOW_KILL_AT").ok().and_then(|value| parse(&value)))
}

/// Refuses a `FLOW_KILL_AT` that would never fire: a crash test that kills nothing proves nothing.
pub(crate) fn check() -> Result<(), StoreError> {
    match std::env::var("FLOW_KILL_AT") {
        Ok(value) if !value.is_empty() && armed().is_none() => Err(StoreError::KillPoint {
            value,
            known: POINTS.map(|(_, name)| name).join(", "),
        }),
        _ => Ok(()),
    }
}

/// Called where the process may be asked to die.
pub(crate) fn pass(point: Point) {
    let Some(armed) = armed() else { return };
    if armed.point == point && armed.passes_left.fetch_sub(1, Ordering::SeqCst) == 1 {
        // Not an exit: nothing may be flushed, dropped or cleaned up.
        let _ = signal_hook::low_level::raise(signal_hook::consts::SIGKILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_parsed_strictly() {
        let armed = parse("data-renamed:3").unwrap();
        assert_eq!((armed.point, armed.passes_left.into_inner()), (Point::DataRenamed, 3));
        assert_eq!(parse("export-done").unwrap().passes_left.into_inner(), 1);
        for wrong in [
            "",
            "data",
            "data-renamed:",
            "data-renamed:0",
            "data-renamed:-1",
            "data-renamed:x",
        ] {
            assert!(parse(wrong).is_none(), "{wrong}");
        }
    }
}
