//! Arguments of `flow evaluate`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

#[derive(Debug, Subcommand)]
pub enum EvaluateCommand {
    /// Error rates of diarization, and of words with speakers, against a reference
    Diarization(EvaluateDiarizationArguments),
    /// Error rates of texts that any system wrote, against a reference
    Texts(EvaluateTextsArguments),
}

// How words are compared. (A doc comment would become that of the commands.)
#[derive(Args, Debug)]
pub struct NormalizationArguments {
    /// Normalisation of words before they are compared, as in evaluation.report; by `texts` beside the plain comparison
    #[arg(long, value_name = "HOW", default_value = "none")]
    pub normalize: Normalize,
    /// With `--normalize whisper_basic`: drop diacritics
    #[arg(long)]
    pub remove_diacritics: bool,
    /// With `--normalize`: a space between any two letters
    #[arg(long)]
    pub split_letters: bool,
}

#[derive(Args, Debug)]
pub struct EvaluateTextsArguments {
    /// The reference: a NeMo manifest (JSON lines), a file of lines, STM, CTM, TRN or the output of `flow transcribe --format
    /// json`; a manifest with `text` and `pred_text` needs no second file
    #[arg(value_name = "REFERENCE")]
    pub reference: PathBuf,
    /// The hypothesis, in any of these forms: of a manifest `pred_text`, or `text` in a line without it
    #[arg(value_name = "HYPOTHESIS")]
    pub hypothesis: Option<PathBuf>,
    /// Lines of text begin with the name of their utterance, as in Kaldi's `text`
    #[arg(long)]
    pub ids: bool,
    #[command(flatten)]
    pub normalization: NormalizationArguments,
    /// Show so many utterances with the most errors
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub worst: usize,
    /// One JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct EvaluateDiarizationArguments {
    /// The reference, of one or several recordings: RTTM; or with words STM, SegLST (JSON) or the output of `flow
    /// transcribe --diarize --format json`
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub reference: Vec<PathBuf>,
    /// The hypothesis, in any of these formats; words are scored where both sides have them
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub hypothesis: Vec<PathBuf>,
    /// The parts of recordings that are scored: UEM; recordings that it does not name are left out
    #[arg(long, value_name = "UEM")]
    pub uem: Option<PathBuf>,
    /// Seconds around each boundary of the reference that are excluded, half before it and half after it (as in
    /// pyannote.metrics; twice the collar of md-eval)
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    pub collar: f64,
    /// Leave out where speakers of the reference overlap
    #[arg(long)]
    pub skip_overlap: bool,
    #[command(flatten)]
    pub normalization: NormalizationArguments,
    /// Write an HTML page with timelines of speakers and errors
    #[arg(long, value_name = "FILE.html")]
    pub page: Option<PathBuf>,
    /// The folder of the recordings, which the page plays
    #[arg(long, value_name = "FOLDER", requires = "page")]
    pub audio: Option<PathBuf>,
    /// One JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Normalisation of texts before they are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Normalize {
    /// Case and punctuation count
    None,
    /// Whisper's BasicTextNormalizer, which removes vowel signs like punctuation
    WhisperBasic,
    /// The same, but marks such as vowel signs stay
    KeepMarks,
}
