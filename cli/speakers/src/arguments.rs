//! Arguments of `flow speakers`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

#[derive(Args, Debug)]
pub struct VoicesArguments {
    #[command(subcommand)]
    pub command: VoicesCommand,
    /// The folder of the store
    #[arg(long, global = true, value_name = "DIR", default_value = "voices")]
    pub store: PathBuf,
}

#[derive(Debug, Subcommand)]
pub enum VoicesCommand {
    /// Add diarizations of recordings, and find which of their speakers are one voice; unchanged files are skipped
    Add(AddArguments),
    /// List the voices
    List(ListArguments),
    /// Show the speakers of a voice, and where to listen to them
    Show(ShowArguments),
    /// Show which voices may be the same and which speakers may have another voice, with the commands that settle it
    Review(ReviewArguments),
    /// Name a voice; its speakers stay in it from now on
    Name {
        /// The voice, by its number (`V7`) or its name
        #[arg(value_name = "VOICE")]
        voice: String,
        /// The new name
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Make two voices one, with the number and the name of the first
    Merge {
        /// The voice that stays; it takes the name of the other one if it has none
        #[arg(value_name = "VOICE")]
        voice: String,
        /// The voice that comes to it
        #[arg(value_name = "OTHER")]
        other: String,
    },
    /// Move a speaker of a recording to another voice, or confirm that its voice is right
    Move {
        /// The speaker, as `flow speakers show` names it
        #[arg(value_name = "RECORDING/SPEAKER")]
        speaker: String,
        /// The voice, or `new` for a voice of its own
        #[arg(value_name = "VOICE")]
        voice: String,
    },
    /// Remove a voice with its speakers
    Forget {
        /// The voice
        #[arg(value_name = "VOICE")]
        voice: String,
    },
    /// List the changes of the store, the last one first
    History(HistoryArguments),
    /// Take back the last change, or the change of a number; also an undo
    Undo {
        /// The number of the change in `flow speakers history`
        #[arg(value_name = "N")]
        change: Option<u64>,
    },
    /// Write the named voices into a file for `--known-speakers`
    Export(ExportArguments),
    /// Write diarizations with the names of their voices
    Apply(ApplyArguments),
}

#[derive(Args, Debug)]
pub struct AddArguments {
    /// Files that `flow diarize --format json` wrote, or folders of them
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<PathBuf>,
    /// Largest distance between voices without a name that become one, as that of the diarizer
    #[arg(long, value_name = "DISTANCE", default_value_t = 0.7, value_parser = distance)]
    pub clustering_threshold: f64,
    /// Least cosine similarity for a speaker to come to a named voice
    #[arg(long, value_name = "COSINE", default_value_t = 0.5, value_parser = cosine)]
    pub known_threshold: f64,
}

fn distance(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|&number: &f64| number > 0.0 && number <= 2.0);
    number.ok_or_else(|| "it must be a number above 0, at most 2".to_owned())
}

fn cosine(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..=1.0).contains(number));
    number.ok_or_else(|| "it must be a number from 0 to 1".to_owned())
}

#[derive(Args, Debug)]
pub struct ListArguments {
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct ShowArguments {
    /// The voice, by its number (`V7`) or its name
    #[arg(value_name = "VOICE")]
    pub voice: String,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct ReviewArguments {
    /// The maximum number of each kind
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub limit: u16,
    /// Least cosine similarity of what is shown
    #[arg(long, value_name = "COSINE", default_value_t = 0.5, value_parser = cosine)]
    pub known_threshold: f64,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct HistoryArguments {
    /// The maximum number of changes
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub limit: usize,
}

#[derive(Args, Debug)]
pub struct ExportArguments {
    /// The file, such as known.json
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    pub overwrite: bool,
}

#[derive(Args, Debug)]
pub struct ApplyArguments {
    /// Diarizations that were added, or folders of them
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<PathBuf>,
    /// The folder for the files, each named like its recording
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// The formats, separated by commas
    #[arg(long, value_name = "FORMATS", value_delimiter = ',', default_value = "rttm")]
    pub format: Vec<AppliedFormat>,
    /// Replace files that exist with another content; never those that are read
    #[arg(long)]
    pub overwrite: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AppliedFormat {
    Rttm,
    Json,
}

impl AppliedFormat {
    pub fn ending(self) -> &'static str {
        match self {
            Self::Rttm => "rttm",
            Self::Json => "json",
        }
    }
}
