//! The pipeline file: from YAML to a checked pipeline, with the place of every mistake.
//!
//! [`load`] reads a file, opens its includes and puts parameters in; [`check()`] types the settings of each
//! stage and computes schemas.

mod check;
mod condition;
mod connections;
mod diagnostic;
mod edges;
mod merge;
mod params;
mod pipeline;
mod read;
mod source;
mod substitute;
mod test_case;
#[cfg(test)]
mod tests;

pub use check::{Checked, CheckedInput, CheckedStage, check};
pub use diagnostic::{Diagnostic, Diagnostics, Style};
pub use flow_base::suggest::{did_you_mean, nearest};
pub use flow_base::switched_off::SwitchedOff;
pub use flow_base::yaml;
pub use params::{Overrides, ParamValue, UsualNames};
pub use pipeline::{Edge, FORMAT, LimitAction, MaxRejects, Origin, Pipeline, RejectLimit, Stage};
pub use read::{load, load_for_test, load_params, load_tests};
pub use source::{Place, SourceFile};
pub use test_case::{Expectation, ExpectedRows, PortName, TestCase, TestRows};
