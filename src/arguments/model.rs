//! Arguments of `flow model` and `flow lm`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use flow_cli::arguments::ModelDtype;

#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// Show a model's sizes, parameters, tokenizer and number types
    Info(ModelInfoArguments),
    /// Write a model in another format or number type, or with another vocabulary
    Convert(ModelConvertArguments),
    /// Compare two models: exit code 0 if they are the same, 1 if they differ, 2 if one cannot be read
    Diff(ModelDiffArguments),
}

#[derive(Args, Debug)]
pub struct ModelInfoArguments {
    /// A .nemo archive, a model folder (such as a checkpoint), a Hugging Face folder or a Lightning .ckpt; hf://OWNER/NAME or a URL
    /// of object storage
    pub model: String,
    /// Also list every tensor with its type and shape
    #[arg(long)]
    pub tensors: bool,
}

#[derive(Args, Debug)]
pub struct ModelConvertArguments {
    /// The model: a .nemo archive, a model folder, a Hugging Face folder or a Lightning .ckpt; hf://OWNER/NAME or a URL of object
    /// storage
    pub from: String,
    /// The path to write. A name that ends in `.nemo` is an archive, one without an ending a model folder
    pub to: PathBuf,
    /// The format to write, where it does not follow from the name
    #[arg(long, value_name = "FORM")]
    pub format: Option<ModelFormat>,
    /// The number type of the weights; as they are stored if not given
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<ModelDtype>,
    /// A SentencePiece .model file: for a model without one, or to change the vocabulary
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// How the rows of new pieces are initialised
    #[arg(long, value_name = "HOW", default_value = "mean", requires = "tokenizer")]
    pub new_pieces: NewPieces,
    /// Seed of random initialisation
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
    /// Leave out the CTC head beside a transducer
    #[arg(long)]
    pub without_ctc: bool,
    /// Replace an existing target
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
    /// Count the texts of manifests and write an n-gram model in the ARPA format, or counts of tokens by language
    Build(LmBuildArguments),
}

#[derive(Args, Debug)]
pub struct LmBuildArguments {
    /// Manifests with texts: Parquet files, and NeMo's with one JSON object to a line
    #[arg(required = true)]
    pub manifests: Vec<PathBuf>,
    /// The acoustic model of the language model: a .nemo archive, a model folder, a Hugging Face folder or
    /// hf://OWNER/NAME
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
    /// Order of the n-grams, in tokens
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub order: u8,
    /// Write how often each token comes in the texts of each language instead, for `flow transcribe --language-prior`
    #[arg(long, conflicts_with = "order")]
    pub languages: bool,
    /// The file to write; an existing one is replaced
    #[arg(long, value_name = "FILE.arpa")]
    pub out: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModelFormat {
    /// NeMo's archive
    Nemo,
    /// A folder as Hugging Face's transformers has it
    Hf,
    /// flow's model folder
    Flow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NewPieces {
    /// As the mean of the rows of the old pieces they are made of
    Mean,
    /// At random, as in a new model
    Random,
}
