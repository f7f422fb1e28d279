//! A stand-in for NCCL's library, for tests on machines without a GPU: it has NCCL's functions and works on memory of the
//! host (`stand_in.cpp`). Ranks whose model is on the CPU exchange by it where a test says so.

use std::cell::Cell;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::library::{Library, library_path};

thread_local! {
    static CHOSEN: Cell<bool> = const { Cell::new(false) };
}

/// The compiled library; stays loaded as long as the process.
struct StandIn {
    functions: Library,
    fault: unsafe extern "C" fn(i32, i32, i32),
}

static LOADED: OnceLock<StandIn> = OnceLock::new();

/// Does `work`; trainings that it begins on this thread, of models on the CPU and with several ranks, exchange by the
/// stand-in. For tests: it panics where there is no C++ compiler.
pub fn with<R>(work: impl FnOnce() -> R) -> R {
    struct Back(bool);
    impl Drop for Back {
        fn drop(&mut self) {
            CHOSEN.set(self.0);
        }
    }
    LOADED.get_or_init(compiled);
    let _back = Back(CHOSEN.replace(true));
    work()
}

static EVERYWHERE: AtomicBool = AtomicBool::new(false);

/// From now on trainings of models on the CPU with several ranks exchange by the stand-in, whichever thread of this process
/// begins them. For a program that end-to-end tests run.
pub fn use_everywhere() {
    LOADED.get_or_init(compiled);
    EVERYWHERE.store(true, Ordering::Relaxed);
}

/// Whether this thread is to use it.
pub(in crate::ranks) fn is_chosen() -> bool {
    CHOSEN.get() || EVERYWHERE.load(Ordering::Relaxed)
}

/// Its functions, in a process that uses it.
pub(super) fn library() -> Option<&'static Library> {
    LOADED.get().map(|loaded| &loaded.functions)
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

/// From now on the operations of a rank that are started as its group of this number, from 1, go wrong, in every
/// communicator of this process.
pub fn set_fault(rank: usize, group: usize, fault: Fault) {
    let loaded = LOADED.get_or_init(compiled);
    // SAFETY: the function takes three numbers and locks what it changes.
    unsafe { (loaded.fault)(rank as i32, group as i32, fault as i32) };
}

/// Nothing goes wrong any more.
pub fn clear_faults() {
    let loaded = LOADED.get_or_init(compiled);
    // SAFETY: as above.
    unsafe { (loaded.fault)(0, 0, 0) };
}

fn compiled() -> StandIn {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("flow-stand-in-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, library) = (folder.join("nccl.cpp"), folder.join("nccl.so"));
    std::fs::write(&source, include_str!("stand_in.cpp")).unwrap();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let output = Command::new(&compiler)
        .args(["-std=c++17", "-O2", "-shared", "-fPIC", "-pthread", "-Wall", "-Werror"])
        .arg("-o")
        .args([&library, &source])
        .output()
        .unwrap_or_else(|error| panic!("NCCL is tested with a C++ compiler: {compiler}: {error}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let path = library_path(&library).unwrap();
    let functions = Library::open(&path).unwrap();
    // SAFETY: the library is loaded already, which gives its handle again; the function is of this type.
    let fault = unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        let found = libc::dlsym(handle, c"standInFault".as_ptr());
        assert!(!found.is_null(), "the stand-in has no faults");
        std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn(i32, i32, i32)>(found)
    };
    std::fs::remove_dir_all(&folder).unwrap();
    StandIn { functions, fault }
}
