//! Which model transcribes, and how.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Which model transcribes, and how.
#[derive(Args, Clone, Debug)]
pub struct DecodingArguments {
    /// A .nemo archive, a model folder, a Hugging Face folder, hf://OWNER/NAME, or a URL of object storage; the bundled small
    /// model if not given
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// What the model processes at once
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub window: WindowMethod,
    /// The head that decodes a model with two [default: the transducer, or CTC where there is none]
    #[arg(long, value_name = "HEAD")]
    pub decoder: Option<Decoder>,
    /// Keep so many hypotheses (beam search); 0 or 1 for greedy search, the default
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=64))]
    pub beam: Option<u16>,
    /// An n-gram language model in the ARPA format, such as `flow lm build` writes (its weight: --set lm_weight=0.3)
    #[arg(long, value_name = "FILE")]
    pub lm: Option<PathBuf>,
    /// The languages that are spoken, apart by commas, such as `fr` or `hi,en`: nothing is written in another script
    #[arg(long, value_name = "CODES")]
    pub language: Option<String>,
    /// With --language: counts of the model's tokens by language, such as `flow lm build --languages` writes, by which tokens of other
    /// languages are less probable (their weight: --set language_weight=1)
    #[arg(long, value_name = "FILE", requires = "language")]
    pub language_prior: Option<PathBuf>,
    /// Where the model is computed: cpu, cuda or cuda:1
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: String,
    /// What products of the model are computed in, on the CPU: int8 and bf16 take less time and memory than f32, and may give other
    /// words; see docs/transcription.md
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub precision: Precision,
}

/// The head that decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Decoder {
    /// TDT or RNN-T
    Transducer,
    /// CTC
    Ctc,
}

/// What of a recording goes through the model at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WindowMethod {
    /// The same as vad
    Auto,
    /// Windows of speech between pauses
    Vad,
    /// Chunks of a fixed length, the decoder's state carried from one to the next
    Chunked,
    /// The whole recording in one pass
    Full,
}

/// What products of a model are computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    F32,
    Bf16,
    Int8,
}

impl From<Precision> for flow_model::Precision {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => flow_model::Precision::F32,
            Precision::Bf16 => flow_model::Precision::Bf16,
            Precision::Int8 => flow_model::Precision::Int8,
        }
    }
}

/// The number type of a model's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModelDtype {
    F32,
    F16,
    Bf16,
}

impl From<ModelDtype> for flow_model::Weights {
    fn from(dtype: ModelDtype) -> Self {
        match dtype {
            ModelDtype::F32 => flow_model::Weights::F32,
            ModelDtype::F16 => flow_model::Weights::F16,
            ModelDtype::Bf16 => flow_model::Weights::Bf16,
        }
    }
}
