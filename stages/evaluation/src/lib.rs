//! Evaluation: decoding a manifest with a model, word and character error rates, the report page.

pub mod audio_rows;
pub mod chart;
pub mod decode;
pub mod error;
pub mod page;
pub mod report;
pub mod transcribe;
pub mod wer;

pub use error::EvaluationError;
