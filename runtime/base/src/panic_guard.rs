//! Panics of bodies become errors.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::StageError;

/// Calls into a body; a panic, also one of a thread of rayon that works for it, becomes an error that says so.
pub fn catch_panic<T, E: From<StageError>>(call: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    // A body that panicked is never called again: its region ends.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(panic_error(panic.as_ref()).into()))
}

/// What a panic said.
pub fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| text.to_string())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_string())
}

/// A panic as an error.
pub fn panic_error(panic: &(dyn std::any::Any + Send)) -> StageError {
    let said = panic_message(panic);
    StageError::failed(format!("panicked: {said}")).with_help("this is a fault of the stage's code, not of the data")
}
