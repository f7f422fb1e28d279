//! `flow evaluate`: results against references.

mod arguments;
mod audio;
mod boosting;
mod compare;
mod confidence;
mod diarization;
mod files;
mod normalizer;
mod page;
mod texts;
mod times;
mod times_page;
mod words;

use std::io::Write;

use flow_cli::failure::{Exit, Failure};
use flow_kind::Storage;

pub use arguments::{
    CompareFormat, DrawArguments, EvaluateBoostingArguments, EvaluateCommand, EvaluateCompareArguments,
    EvaluateConfidenceArguments, EvaluateDiarizationArguments, EvaluateTextsArguments, EvaluateTimesArguments,
    NormalizationArguments, Normalize,
};
pub use boosting::BoostedTranscription;

/// Runs a command. `transcribe` transcribes as `flow transcribe` does.
///
/// # Errors
/// If an option is wrong, or a file cannot be read or written.
pub fn evaluate(
    storage: &Storage,
    command: &EvaluateCommand,
    transcribe: &dyn Fn(&BoostedTranscription<'_>) -> Result<Exit, Failure>,
    out: &mut dyn Write,
) -> Result<Exit, Failure> {
    match command {
        EvaluateCommand::Diarization(arguments) => diarization::diarization(storage, arguments, out),
        EvaluateCommand::Texts(arguments) => texts::texts(storage, arguments, out),
        EvaluateCommand::Compare(arguments) => compare::compare(storage, arguments, out),
        EvaluateCommand::Confidence(arguments) => confidence::confidence(storage, arguments, out),
        EvaluateCommand::Boosting(arguments) => boosting::boosting(storage, arguments, transcribe, out),
        EvaluateCommand::Times(arguments) => times::times(storage, arguments, out),
    }
}
