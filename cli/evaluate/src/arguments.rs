//! Arguments of `flow evaluate`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use flow_text::language_tag::usual_language;

use flow_cli::arguments::DecodingArguments;

#[derive(Debug, Subcommand)]
pub enum EvaluateCommand {
    /// Compute error rates of diarization, and of words with speakers, against a reference
    Diarization(EvaluateDiarizationArguments),
    /// Compute error rates of the texts of any system against a reference
    Texts(EvaluateTextsArguments),
    /// Compare two results on the same references: difference of their error rates, confidence interval and p-value
    Compare(EvaluateCompareArguments),
    /// Measure how far confidences of words are from the share of correct words, or calibrate a model's confidences
    Confidence(EvaluateConfidenceArguments),
    /// Find the best weight of boosted phrases: error rates with each, on recordings whose texts are known
    Boosting(EvaluateBoostingArguments),
    /// Measure how far the times of words are from those of a reference
    Times(EvaluateTimesArguments),
}

// How words are compared. (A doc comment would become that of the commands.)
#[derive(Args, Debug, Default)]
pub struct NormalizationArguments {
    /// How words are normalised before they are compared, as in evaluation.report; `texts` also compares them without
    /// it
    #[arg(long, value_name = "HOW", default_value = "none")]
    pub normalize: Normalize,
    /// With `--normalize whisper_basic`: drop diacritics
    #[arg(long)]
    pub remove_diacritics: bool,
    /// With `--normalize`: put a space between any two letters
    #[arg(long)]
    pub split_letters: bool,
    /// Another normalisation for rows of a language: `en=open_asr_english` (may be repeated)
    #[arg(long, value_name = "LANG=HOW", value_parser = language_normalization)]
    pub normalize_language: Vec<(String, Normalize)>,
    /// With `--normalize indic` or `by_language`: convert the digits of all scripts to ASCII
    #[arg(long)]
    pub ascii_digits: bool,
}

fn language_normalization(text: &str) -> Result<(String, Normalize), String> {
    let (lang, how) = text
        .split_once('=')
        .ok_or("write LANG=HOW, such as en=whisper_english")?;
    match lang.is_empty() {
        true => Err("the code of the language is missing before `=`".to_owned()),
        // As rows have it: `EN` and `en-GB` are `en`.
        false => Ok((usual_language(lang), Normalize::from_str(how, false)?)),
    }
}

// What is drawn by the bootstrap.
#[derive(Args, Debug)]
pub struct DrawArguments {
    /// Seed of the bootstrap
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// The column (key of the manifest's lines) whose rows of equal values are drawn as a whole, such as `speaker`; without it
    /// the recording
    #[arg(long, value_name = "COLUMN")]
    pub cluster: Option<String>,
}

/// More resamples give nothing but work.
const MOST_RESAMPLES: i64 = 1_000_000;

#[derive(Args, Debug)]
pub struct EvaluateCompareArguments {
    /// The first result: a manifest with `text` and `pred_text`, such as `transcripts.jsonl` of a report; with --reference the
    /// texts that were heard, in any form that `flow evaluate texts` reads
    #[arg(value_name = "A")]
    pub a: PathBuf,
    /// The second result
    #[arg(value_name = "B")]
    pub b: PathBuf,
    /// The reference of both results, if their files do not have it
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// Lines of text begin with the name of their utterance, as in Kaldi's `text`
    #[arg(long)]
    pub ids: bool,
    #[command(flatten)]
    pub normalization: NormalizationArguments,
    /// Also compare by the values of a column: a key of the manifest's lines (may be repeated)
    #[arg(long, value_name = "COLUMN")]
    pub by: Vec<String>,
    /// Resamples of the bootstrap
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=MOST_RESAMPLES))]
    pub resamples: u32,
    #[command(flatten)]
    pub draw: DrawArguments,
    /// The output format
    #[arg(long, default_value = "text")]
    pub format: CompareFormat,
    /// The same as `--format json`
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct EvaluateConfidenceArguments {
    /// Transcripts in JSON of the rows of a manifest (`flow transcribe MANIFEST --format json`), or folders of them: what was said is
    /// the `text` of a row
    #[arg(required = true)]
    pub transcripts: Vec<PathBuf>,
    #[command(flatten)]
    pub normalization: NormalizationArguments,
    /// Fit probabilities to the words, and write them into the folder of this model or beside its archive; they become
    /// the confidences of its words
    #[arg(long, value_name = "MODEL")]
    pub calibrate: Option<PathBuf>,
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct EvaluateBoostingArguments {
    /// A manifest whose rows say what was said (`text`), in any form that `flow transcribe` reads: held-out recordings, some of which have the
    /// phrases
    #[arg(value_name = "MANIFEST")]
    pub manifest: String,
    /// The file of phrases, as for `flow transcribe`
    #[arg(long, value_name = "FILE")]
    pub boost: PathBuf,
    /// The weights to try, separated by commas
    #[arg(long, value_name = "WEIGHTS", value_delimiter = ',', default_values_t = [0.0, 0.25, 0.5, 1.0, 2.0], value_parser = weight)]
    pub weights: Vec<f64>,
    #[command(flatten)]
    pub decoding: DecodingArguments,
    /// A parameter of pipelines/transcribe.yaml that has no option of `flow transcribe`, such as `coverage=off`
    #[arg(long, value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    #[command(flatten)]
    pub normalization: NormalizationArguments,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// A weight of phrases.
fn weight(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| (0.0..=100.0).contains(number));
    // Negative zero becomes zero.
    number
        .map(|number| number + 0.0)
        .ok_or_else(|| "it must be a number from 0 to 100".to_owned())
}

#[derive(Args, Debug)]
pub struct EvaluateTimesArguments {
    /// The reference: CTM, the JSON of `flow align` or `flow transcribe`, or a folder of such files
    #[arg(value_name = "REFERENCE")]
    pub reference: PathBuf,
    /// The hypothesis, in any of these forms
    #[arg(value_name = "HYPOTHESIS")]
    pub hypothesis: PathBuf,
    #[command(flatten)]
    pub normalization: NormalizationArguments,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    /// Write an HTML page with the distribution of the differences, and the table by recording
    #[arg(long, value_name = "FILE")]
    pub page: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CompareFormat {
    Text,
    Json,
}

#[derive(Args, Debug)]
pub struct EvaluateTextsArguments {
    /// The reference: a NeMo manifest (JSON lines), a file of lines, STM, CTM, TRN or the output of `flow transcribe --format
    /// json`; a manifest with `text` and `pred_text` needs no second file
    #[arg(value_name = "REFERENCE")]
    pub reference: PathBuf,
    /// The hypothesis, in any of these forms: a manifest's `pred_text`, or `text` in lines without it
    #[arg(value_name = "HYPOTHESIS")]
    pub hypothesis: Option<PathBuf>,
    /// Lines of text begin with the name of their utterance, as in Kaldi's `text`
    #[arg(long)]
    pub ids: bool,
    #[command(flatten)]
    pub normalization: NormalizationArguments,
    /// Also show error rates by the values of a column: a key of the manifest's lines (may be repeated)
    #[arg(long, value_name = "COLUMN")]
    pub by: Vec<String>,
    /// Resamples of the bootstrap for 95 % confidence intervals; recordings are drawn as a whole. 0: no intervals
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=MOST_RESAMPLES))]
    pub resamples: u32,
    #[command(flatten)]
    pub draw: DrawArguments,
    /// Manifests of the training data: show error rates of words by how often they occur in it
    #[arg(long, value_name = "MANIFEST", num_args = 1..)]
    pub train: Vec<PathBuf>,
    /// The lower bounds of the ranges of counts, beside the range of words that are not in the training data
    #[arg(
        long,
        value_name = "N,...",
        value_delimiter = ',',
        default_value = "1,10,100",
        requires = "train"
    )]
    pub training_counts: Vec<u64>,
    /// A file with one name per line: show error rates of names, and how many are entirely correct
    #[arg(long, value_name = "FILE")]
    pub names: Option<PathBuf>,
    /// Show error rates of words whose script, or language tag, differs from that of the word before
    #[arg(long)]
    pub switches: bool,
    /// Show this many utterances with the most errors
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub worst: usize,
    /// Print one JSON object instead of a table
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
    /// A UEM file with the parts of recordings to score; recordings that it does not name are left out
    #[arg(long, value_name = "UEM")]
    pub uem: Option<PathBuf>,
    /// Seconds around each boundary of the reference that are excluded, half before it and half after it (as in
    /// pyannote.metrics; twice the collar of md-eval)
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    pub collar: f64,
    /// Leave out overlapping speech of the reference
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
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Normalisation of texts before they are compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Normalize {
    /// Case and punctuation count
    #[default]
    None,
    /// Whisper's BasicTextNormalizer, which removes vowel signs like punctuation
    WhisperBasic,
    /// The same, but vowel signs and other marks are kept
    KeepMarks,
    /// Whisper's EnglishTextNormalizer: numbers, contractions and spellings, too
    WhisperEnglish,
    /// The Open ASR Leaderboard's EnglishTextNormalizer, of August 2026
    OpenAsrEnglish,
    /// The Open ASR Leaderboard's BasicMultilingualTextNormalizer, of August 2026
    OpenAsrMultilingual,
    /// The normalisation of Vistaar for Indic languages: no punctuation, one encoding
    Indic,
    /// whisper_english, indic or keep_marks, by the language of the row
    ByLanguage,
}
