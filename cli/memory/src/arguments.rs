//! Arguments of `flow memory`.

use clap::Args;
use flow_cli::arguments::{ModelDtype, PipelineArguments, Precision, sizes};

use crate::roofline::{card, micro_batch};

#[derive(Args, Debug)]
pub struct MemoryArguments {
    #[command(flatten)]
    pub pipeline: PipelineArguments,
    /// Memory of each rank's device, such as 8GB or 7.5GiB: shows the needs on the device and in host memory. Without
    /// it the available memory of this machine is the limit. Exit code 4 if it does not fit
    #[arg(long, value_name = "SIZE", value_parser = sizes::bytes)]
    pub device_memory: Option<u64>,
    /// The longest clip, in seconds; the stage's max_duration if not given
    #[arg(long, value_name = "SECONDS")]
    pub longest: Option<f64>,
    /// Tokens per second of speech, at most; 12 if not given
    #[arg(long, value_name = "N")]
    pub tokens_per_second: Option<f64>,
    /// Pieces of the vocabulary, where the pipeline makes its tokenizer itself or `init` is a model of the hub
    #[arg(long, value_name = "N", value_parser = vocabulary)]
    pub vocabulary: Option<usize>,
    /// The training stage, where a pipeline has several
    #[arg(long, value_name = "STAGE")]
    pub stage: Option<String>,
    /// In place of the table: the most clips of each bucket of durations and texts whose micro-batch fits into the device's
    /// memory, as the setting `bucket_batch_size` takes them. On a CUDA device without --device-memory: what the driver says is free
    #[arg(long, conflicts_with = "roofline")]
    pub bucket_batch_size: bool,
    /// With --bucket-batch-size: does a training step of each size on the device of the settings, and lowers those that do not fit
    #[arg(long, requires = "bucket_batch_size")]
    pub trial: bool,
    /// In place of memory: operations, bytes and the least time of each part of a training step on a card, by its published
    /// rates
    #[arg(long, conflicts_with = "device_memory")]
    pub roofline: bool,
    /// With --roofline: the card, h100, h200, l4 or 4090
    #[arg(long, value_name = "CARD", default_value = "h100", value_parser = card, requires = "roofline")]
    pub device: &'static flow_training::roofline::Card,
    /// With --roofline: the micro-batch, as CLIPSxSECONDSxTOKENS, the last two of each clip, such as 9x10x120; without it a
    /// full one of the longest clips
    #[arg(long, value_name = "SHAPE", value_parser = micro_batch, requires = "roofline")]
    pub micro_batch: Option<flow_training::memory::BatchShape>,
    #[command(flatten)]
    pub decoding: DecodingMemoryArguments,
}

fn vocabulary(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(pieces @ 2..=1_000_000) => Ok(pieces),
        _ => Err("write a number of pieces, 2 to 1000000".into()),
    }
}

#[derive(Args, Debug)]
pub struct DecodingMemoryArguments {
    /// Of a model: seconds of audio, padding included, that are decoded at once; 120 if not given, as in `flow serve`
    #[arg(long, value_name = "SECONDS")]
    pub batch_seconds: Option<f64>,
    /// Of a model: the longest window, in seconds; 20 if not given
    #[arg(long, value_name = "SECONDS")]
    pub max_window: Option<f64>,
    /// Of a model: the number type in which matrices are kept; f32 if not given
    #[arg(long, value_name = "TYPE")]
    pub weights: Option<ModelDtype>,
    /// Of a model: what products are computed in, on the CPU; f32 if not given
    #[arg(long, value_name = "TYPE")]
    pub precision: Option<Precision>,
}
