//! The [`Shape`] of an export that writes a set of files from its only input.

use flow_kind::{Shape, StageError};

/// Checks the folder `out` and the files' `name`.
pub(crate) fn shape(out: &str, name: &str) -> Result<Shape, StageError> {
    if out.trim().is_empty() {
        return Err(StageError::setting("out", "`out` names no folder"));
    }
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) {
        return Err(StageError::setting(
            "name",
            "`name` has letters, digits, `-`, `_` and `.` only",
        ));
    }
    Ok(Shape::export())
}
