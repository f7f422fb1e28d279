//! A library with NCCL's functions that works on host memory, for ranks whose model is on the CPU. Tests load one (the crate
//! `flow-cuda-emulator`); without it such ranks have no NCCL.

use std::cell::Cell;
use std::ffi::CStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::library::Library;
use crate::error::TrainingError;
use crate::ranks::nccl::nccl_error;

static LOADED: OnceLock<Library> = OnceLock::new();
static EVERYWHERE: AtomicBool = AtomicBool::new(false);

thread_local! {
    static CHOSEN: Cell<bool> = const { Cell::new(false) };
}

/// Loads the library of this name, or of any, as a process has one.
fn load(name: &CStr) -> Result<(), TrainingError> {
    if LOADED.get().is_none() {
        let library = Library::open(name).map_err(|message| nccl_error(&message))?;
        // Another thread has loaded it meanwhile.
        let _ = LOADED.set(library);
    }
    Ok(())
}

/// Does `work`; trainings that it begins on this thread, of models on the CPU and with several ranks, exchange by the library that
/// the system's loader knows by this name.
///
/// # Errors
/// Where the library cannot be loaded.
pub fn with_host_library<R>(name: &CStr, work: impl FnOnce() -> R) -> Result<R, TrainingError> {
    struct Back(bool);
    impl Drop for Back {
        fn drop(&mut self) {
            CHOSEN.set(self.0);
        }
    }
    load(name)?;
    let _back = Back(CHOSEN.replace(true));
    Ok(work())
}

/// As [`with_host_library`] from now on, whichever thread of this process begins a training.
///
/// # Errors
/// Where the library cannot be loaded.
pub fn use_host_library(name: &CStr) -> Result<(), TrainingError> {
    load(name)?;
    EVERYWHERE.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether trainings that this thread begins are to use it.
pub(in crate::ranks) fn is_chosen() -> bool {
    CHOSEN.get() || EVERYWHERE.load(Ordering::Relaxed)
}

/// Its functions, in a process that uses it.
pub(super) fn library() -> Option<&'static Library> {
    LOADED.get()
}
