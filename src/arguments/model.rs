//! Arguments of `flow model` and `flow lm`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// Show a model's sizes, parameters, tokenizer and number types
    Info(ModelInfoArguments),
    /// Write a model in another form or number type, or with another vocabulary
    Convert(ModelConvertArguments),
    /// Compare two models: exit code 0 if they are the same, 1 if they differ, 2 if one cannot be read
    Diff(ModelDiffArguments),
}

#[derive(Args, Debug)]
pub struct ModelInfoArguments {
    /// A .nemo archive, a model folder (such as a checkpoint), a Hugging Face folder or a Lightning .ckpt
    pub model: String,
    /// Also list every tensor with its type and shape
    #[arg(long)]
    pub tensors: bool,
}

#[derive(Args, Debug)]
pub struct ModelConvertArguments {
    /// The model: a .nemo archive, a model folder, a Hugging Face folder or a Lightning .ckpt
    pub from: String,
    /// What to write. A name that ends in `.nemo` is an archive, one without an ending a model folder
    pub to: PathBuf,
    /// The form to write, where the name does not say it
    #[arg(long, value_name = "FORM")]
    pub format: Option<ModelFormat>,
    /// The number type of the weights; as they are stored if not given
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<ModelDtype>,
    /// A SentencePiece .model file: for a model that holds none, or another vocabulary
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// How pieces begin that the new vocabulary has and the old one has not
    #[arg(long, value_name = "HOW", default_value = "mean", requires = "tokenizer")]
    pub new_pieces: NewPieces,
    /// Seed of what begins at random
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
    /// Leave out the auxiliary CTC head, which serves training alone
    #[arg(long)]
    pub without_ctc: bool,
    /// Replace what stands at the target
    #[arg(long)]
    pub force: bool,
}

#[derive(Args, Debug)]
pub struct ModelDiffArguments {
    pub first: String,
    pub second: String,
}

#[derive(Debug, Subcommand)]
pub enum LmCommand {
    /// Count the texts of manifests and write an n-gram model in the ARPA format
    Build(LmBuildArguments),
}

#[derive(Args, Debug)]
pub struct LmBuildArguments {
    /// Manifests with texts: Parquet files, and NeMo's with one JSON object to a line
    #[arg(required = true)]
    pub manifests: Vec<PathBuf>,
    /// The model that the language model is for: a .nemo archive, a model folder, a Hugging Face folder or hf://OWNER/NAME
    #[arg(
        long,
        value_name = "MODEL",
        required_unless_present = "tokenizer",
        conflicts_with = "tokenizer"
    )]
    pub model: Option<String>,
    /// Its tokenizer instead: a SentencePiece .model file
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Tokens that n-grams are made of
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub order: u8,
    /// What to write; what stands there is replaced
    #[arg(long, value_name = "FILE.arpa")]
    pub out: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModelFormat {
    /// NeMo's archive
    Nemo,
    /// A folder as Hugging Face's transformers has it
    Hf,
    /// A model folder of our own
    Flow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModelDtype {
    F32,
    F16,
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NewPieces {
    /// As the mean of the rows of the old pieces they are made of
    Mean,
    /// At random, as in a model that begins from nothing
    Random,
}
