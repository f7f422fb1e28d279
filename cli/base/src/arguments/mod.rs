//! Arguments that several commands take.

mod decoding;
mod pipeline;
pub mod sizes;

use clap::ValueEnum;

pub use decoding::{Decoder, DecodingArguments, ModelDtype, Precision, WindowMethod};
pub use pipeline::{PipelineArguments, StateArguments};

/// A value as it is written on the command line, which is also its name as a parameter of a pipeline.
pub fn written(value: impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}
