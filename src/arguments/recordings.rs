//! Arguments of `flow transcribe` and `flow diarize`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use flow_cli::arguments::DecodingArguments;

use super::Progress;

#[derive(Args, Debug)]
pub struct TranscribeArguments {
    #[command(flatten)]
    pub recordings: RecordingsArguments,
    /// Print words as they are heard, of one recording or of standard input (a WAV file or raw samples as they come: 16 bit, one channel,
    /// 16 kHz), by a cache-aware model. With --format json one event per line. See docs/transcription.md
    #[arg(long)]
    pub stream: bool,
    /// With --stream: the delay of words that is accepted; the model looks as far ahead as it allows [default: the model's own]
    #[arg(long, value_name = "MS", requires = "stream", value_parser = clap::value_parser!(u32).range(1..))]
    pub latency: Option<u32>,
    /// Formats to write, apart by commas: txt, json, srt, vtt, tsv, ctm, jsonl, parquet, and with --diarize rttm
    #[arg(long, value_name = "FORMATS", default_value = "txt")]
    pub format: Vec<String>,
    #[command(flatten)]
    pub decoding: DecodingArguments,
    /// Tell how much of the speech has words (`measure`), and decode speech without words again (`recover`, if nothing else is said);
    /// the JSON has both. See docs/transcription.md
    #[arg(long, value_name = "HOW", num_args = 0..=1, require_equals = true, default_missing_value = "recover")]
    pub coverage: Option<Coverage>,
    /// End with exit code 5 if less than this share of the speech of a recording has words, such as 0.98; with it --coverage need not
    /// be given
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub require_coverage: Option<f64>,
    /// A file of phrases to boost, one per line (their weight: --set boost_weight=1)
    #[arg(long, value_name = "FILE")]
    pub boost: Option<PathBuf>,
    /// How to use several channels
    #[arg(long, value_name = "HOW", default_value = "mix")]
    pub channels: ChannelUse,
    /// Say who speaks: of each segment and each word
    #[arg(long)]
    pub diarize: bool,
    #[command(flatten)]
    pub speakers: SpeakersArguments,
}

#[derive(Args, Debug)]
pub struct DiarizeArguments {
    #[command(flatten)]
    pub recordings: RecordingsArguments,
    /// Formats to write, apart by commas: rttm, json
    #[arg(long, value_name = "FORMATS", default_value = "rttm")]
    pub format: Vec<String>,
    #[command(flatten)]
    pub speakers: SpeakersArguments,
}

/// Arguments that commands on recordings share.
#[derive(Args, Debug)]
pub struct RecordingsArguments {
    /// Recordings (FLAC, WAV, AIFF, CAF, MP3, AAC, Ogg with Vorbis, Opus or FLAC, MP4 and M4A, QuickTime, Matroska, WebM): files, folders (all audio in them), patterns in quotes, URLs of object storage, or `-` for standard input
    #[arg(required = true)]
    pub input: Vec<String>,
    /// The folder that receives the files, or a prefix in object storage; folders below an input keep their shape [default: .]
    #[arg(long, value_name = "DIR")]
    pub out: Option<String>,
    /// Replace results that were edited since they were written; without it they are left as they are
    #[arg(long)]
    pub overwrite: bool,
    /// The audio track of films and other files with several, counted from 1; the one that players play if not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub track: Option<u32>,
    /// Print the results, in the first of the formats; without --out no files are written
    #[arg(long)]
    pub stdout: bool,
    /// The value of another parameter of the command's pipeline, such as max_duration: see pipelines/transcribe.yaml,
    /// pipelines/diarize.yaml, docs/transcription.md and docs/speakers.md
    #[arg(long, value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    /// The state directory, with the results of earlier runs [default: .flow in the folder of --out; for a URL one beside what is
    /// kept of object storage]
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Worker threads; one per core if not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: Option<u16>,
    /// What standard error shows meanwhile
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub progress: Progress,
    /// Write the events, one JSON object per line, to this file too
    #[arg(long, value_name = "FILE")]
    pub events: Option<PathBuf>,
}

/// Arguments about speakers.
#[derive(Args, Debug)]
pub struct SpeakersArguments {
    /// A pyannote pipeline in place of the bundled networks: hf://pyannote/speaker-diarization-3.1,
    /// hf://pyannote/speaker-diarization-community-1, or a folder with config.yaml; see docs/speakers.md
    #[arg(long, value_name = "MODEL")]
    pub diarization_model: Option<String>,
    /// How many speakers each recording has
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub num_speakers: Option<u16>,
    /// Fewest speakers of a recording
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub min_speakers: Option<u16>,
    /// Most speakers of a recording
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub max_speakers: Option<u16>,
    /// Known speakers: JSON, {"NAME": "recording.wav", ...}; see docs/speakers.md
    #[arg(long, value_name = "FILE")]
    pub known_speakers: Option<PathBuf>,
}

/// A share from 0 to 1.
fn share(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| (0.0..=1.0).contains(number));
    number.ok_or_else(|| "it must be a number from 0 to 1".to_owned())
}

/// What is done about speech without words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Coverage {
    /// It is measured
    Measure,
    /// It is decoded again, and what then still has no words is measured
    Recover,
}

/// How to use the channels of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ChannelUse {
    /// Their mean is transcribed
    Mix,
    /// Each gets a transcript of its own: NAME.ch1, NAME.ch2 and so on
    Split,
}
