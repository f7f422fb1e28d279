//! Evaluation: decoding a manifest with a model, word and character error rates, the report page.

pub mod alignment;
pub mod audio_rows;
pub mod bootstrap;
pub mod chart;
mod clips;
pub mod cpwer;
pub mod decode;
pub mod document;
pub mod error;
pub mod figures;
pub mod hub_token;
mod language_name;
pub mod normalize;
pub mod page;
pub mod prompts;
pub mod quality_report;
mod recordings;
pub mod report;
mod screen;
mod script;
pub mod set_section;
pub mod speaker_transcripts;
pub mod text_style;
pub mod timeline;
pub mod timeline_page;
pub mod transcribe;
mod transcript_lines;
pub mod utterance;
pub mod validation;
pub mod wder;
pub mod wer;
pub mod word_confidence;
pub mod word_groups;
pub mod word_times;

pub use error::EvaluationError;
