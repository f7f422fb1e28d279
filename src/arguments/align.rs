//! Arguments of `flow align`.

use std::path::PathBuf;

use clap::Args;

#[derive(Args, Debug)]
pub struct AlignArguments {
    /// The recording: any format that `flow transcribe` reads
    pub audio: PathBuf,
    /// Its text: UTF-8 with one segment per line, or subtitles (.srt, .vtt), whose cues are kept and get new times;
    /// `-` is standard input, and a pipe (`<(...)`) is read as well
    pub text: PathBuf,
    /// The file to write; the result is printed if not given
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// json, srt, vtt, ctm, tsv, txt or jsonl [default: the extension of --output, or that of TEXT if it is srt or vtt,
    /// or else json]
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// A .nemo archive, a model folder, a Hugging Face folder, hf://OWNER/NAME, or a URL of object storage; the bundled small
    /// model if not given
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// The delay of the model's tokens, in seconds, which is subtracted from all times
    #[arg(long, value_name = "SECONDS", default_value_t = flow_transcription::alignment::DELAY)]
    pub delay: f64,
    /// The device that runs the model: cpu, cuda or cuda:1
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: String,
}
