//! The shape of a stage that writes a set of files about the one thing it is given.

use flow_runtime::{Conservation, Input, Reads, Role, Shape, StageError};

/// Checks the folder `out`, the files' `name` and the only input, which must be the output of a `maker` as `is_made` tells
/// by its columns.
pub(crate) fn shape(
    (out, name): (&str, &str),
    inputs: &[Input],
    maker: &str,
    is_made: impl FnOnce(&Input) -> bool,
) -> Result<Shape, StageError> {
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
    let [input] = inputs else {
        return Err(StageError::Input {
            name: "from".into(),
            message: format!("one input is needed, {} were given", inputs.len()),
            help: Some(format!("from: the stage of a {maker}")),
        });
    };
    if !is_made(input) {
        return Err(StageError::Input {
            name: input.name.clone(),
            message: format!("it is no output of a {maker}"),
            help: None,
        });
    }
    Ok(Shape {
        role: Role::Export,
        reads: vec![Reads::Whole],
        outputs: Vec::new(),
        dear: false,
        needs_current: false,
        conservation: Conservation::NewRows,
    })
}
