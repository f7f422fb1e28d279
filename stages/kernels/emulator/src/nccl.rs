//! A stand-in for NCCL: it has the library's functions and works on memory of the host (`nccl.cpp`).

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;

use super::compiled::Compiled;

fn loaded() -> &'static Compiled {
    static LOADED: OnceLock<Compiled> = OnceLock::new();
    LOADED.get_or_init(|| Compiled::new("nccl", include_str!("nccl.cpp")))
}

/// The name by which the system's loader knows it.
pub fn library() -> &'static CStr {
    loaded().name()
}

/// What goes wrong in the stand-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The operation cannot be started.
    Refused = 1,
    /// It ends with an error.
    Failed = 2,
    /// It does not end.
    Hangs = 3,
}

/// From now on the operations of a rank that are started as its group of this number, from 1, go wrong, in every communicator of
/// this process.
pub fn set_fault(rank: usize, group: usize, fault: Fault) {
    fail(rank as i32, group as i32, fault as i32);
}

/// Nothing goes wrong any more.
pub fn clear_faults() {
    fail(0, 0, 0);
}

fn fail(rank: i32, group: i32, fault: i32) {
    type Fail = unsafe extern "C" fn(i32, i32, i32);
    // SAFETY: the function is of this type: it takes three numbers, and locks what it changes.
    unsafe { std::mem::transmute::<*mut c_void, Fail>(loaded().function(c"standInFault"))(rank, group, fault) }
}
