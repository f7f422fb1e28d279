//! Named points at which a test stops or ends the process. The released program sets no hook, and a point then costs
//! one load.

use std::sync::OnceLock;

/// A data file has its temporary name.
pub const DATA_WRITTEN: &str = "data-written";
/// A data file has its final name; no record names it yet.
pub const DATA_RENAMED: &str = "data-renamed";
/// The record of a group has its temporary name, and is on the disk.
pub const RECORD_WRITTEN: &str = "record-written";
/// The record of a group has its final name: the group is committed.
pub const RECORD_LINKED: &str = "record-linked";
/// The index is in place; the group records that it replaces are still there.
pub const INDEX_WRITTEN: &str = "index-written";
/// One file of an export has its final name; `flow.json` is not there.
pub const EXPORT_RENAMING: &str = "export-renaming";
/// `flow.json` is there.
pub const EXPORT_DONE: &str = "export-done";

/// The data files of a group are in object storage; no record names them yet.
pub const DATA_UPLOADED: &str = "data-uploaded";
/// The record of a group is in object storage: the group is committed. The copy on this machine does not have it yet.
pub const RECORD_CREATED: &str = "record-created";

/// The points that a state directory in object storage has beside those of a folder.
pub const REMOTE: [&str; 2] = [DATA_UPLOADED, RECORD_CREATED];

/// The points of the store, in the order in which one partition passes them.
pub const STORE: [&str; 7] = [
    DATA_WRITTEN,
    DATA_RENAMED,
    RECORD_WRITTEN,
    RECORD_LINKED,
    INDEX_WRITTEN,
    EXPORT_RENAMING,
    EXPORT_DONE,
];

/// A decision over all rows is made, and not committed.
pub const DECIDED: &str = "decided";

/// Called with the name of each point that is passed, and the numbers that go with it (rank and step, say).
type Hook = Box<dyn Fn(&str, &[u64]) + Send + Sync>;

static HOOK: OnceLock<Hook> = OnceLock::new();

/// Has `hook` called at each point that this process passes from now on.
///
/// # Panics
/// When it is called a second time.
pub fn set(hook: impl Fn(&str, &[u64]) + Send + Sync + 'static) {
    assert!(HOOK.set(Box::new(hook)).is_ok(), "failpoints are set once in a process");
}

/// Called where a test may want to stop or end the process.
pub fn hit(point: &'static str, numbers: &[u64]) {
    if let Some(hook) = HOOK.get() {
        hook(point, numbers);
    }
}
