//! A stand-in for cuBLASLt: it has the library's functions and works on memory of the host (`cublaslt.cpp`). Products under emulation
//! are computed by it where a test says so.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use flow_kernels::device::cublaslt::Library;

use super::compiled::Compiled;

thread_local! {
    static CHOSEN: Cell<bool> = const { Cell::new(false) };
}

struct StandIn {
    functions: Library,
    count: unsafe extern "C" fn(c_int) -> u64,
    fail: unsafe extern "C" fn(c_int, c_int),
}

/// What goes wrong on this thread, and with which status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No product goes wrong.
    Nothing = 0,
    /// How to compute a product cannot be chosen.
    Choice = 1,
    /// A product cannot be started.
    Product = 2,
}

/// What is counted of this thread, or where it is said, of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    Products = 0,
    Choices = 1,
    /// Descriptors, layouts and preferences of the process that are not destroyed.
    Alive = 2,
    /// Not a count: what addresses and rows of factors in bf16 were multiples of, in bytes, at most 256.
    Aligned = 3,
}

fn loaded() -> &'static StandIn {
    static LOADED: OnceLock<StandIn> = OnceLock::new();
    LOADED.get_or_init(|| {
        let path = Compiled::new("cublaslt", include_str!("cublaslt.cpp"));
        let functions = Library::open(path.name(), 0).unwrap();
        // SAFETY: the stand-in has these functions, and they are of these types.
        unsafe {
            StandIn {
                functions,
                count: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int) -> u64>(
                    path.function(c"standInCount"),
                ),
                fail: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int, c_int)>(
                    path.function(c"standInFail"),
                ),
            }
        }
    })
}

/// Does `work`, in which products under emulation are the stand-in's.
pub fn with<R>(work: impl FnOnce() -> R) -> R {
    struct Back(bool);
    impl Drop for Back {
        fn drop(&mut self) {
            CHOSEN.set(self.0);
        }
    }
    loaded();
    let _back = Back(CHOSEN.replace(true));
    work()
}

/// From now on this goes wrong on this thread with a status of `cublasStatus_t`.
pub fn set_fault(fault: Fault, status: i32) {
    // SAFETY: it takes two numbers.
    unsafe { (loaded().fail)(fault as c_int, status) }
}

/// What was counted so far.
pub fn count(what: Counted) -> u64 {
    // SAFETY: it takes a number.
    unsafe { (loaded().count)(what as c_int) }
}

pub(super) fn chosen() -> Option<&'static Library> {
    CHOSEN.get().then(|| &loaded().functions)
}
