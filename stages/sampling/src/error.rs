//! What can go wrong with sampling.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum SamplingError {
    #[error("`{name}`: {why}")]
    Setting { name: &'static str, why: String },
    #[error("row {row} has a duration of {seconds} s; only positive, finite durations can be packed")]
    Duration { row: usize, seconds: f64 },
    #[error("{durations} durations and {languages} languages; as many of both, and fewer than 2^32, are needed")]
    Rows { durations: usize, languages: usize },
    #[error("more than 65,536 languages")]
    TooManyLanguages,
    #[error(
        "{rows} rows make {batches} batches, which gives none to some of the {ranks} ranks when every rank takes whole \
         steps of {grad_accum} micro-batches"
    )]
    NoBatch {
        rows: usize,
        batches: usize,
        ranks: u32,
        grad_accum: u32,
    },
    #[error(
        "`balance: quota` would give the {rows} rows of `{language}` {times} times in an epoch; raise `temperature`, or \
         leave `{language}` out"
    )]
    Repeats { language: String, rows: u64, times: u64 },
    #[error("stage {stage} of the curriculum: {error}")]
    Stage { stage: String, error: Box<SamplingError> },
    #[error("{path}: {why}")]
    Manifest { path: PathBuf, why: String },
    #[error("column `{column}` {why}")]
    Column { column: String, why: String },
}
