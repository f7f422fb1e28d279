//! The arguments of `flow ui`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use super::StateArguments;

#[derive(Args, Debug)]
pub struct UiArguments {
    /// Additional manifests and other rows: Parquet files and files of JSON lines
    pub files: Vec<PathBuf>,
    #[command(flatten)]
    pub state: StateArguments,
    /// The address and port on this machine; port 0 chooses a free one [default: 127.0.0.1:8001, or another port
    /// if that is taken]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// The folder of shards that paths of tars in rows are relative to, if it is not that of the run
    #[arg(long, value_name = "FOLDER")]
    pub shards: Option<PathBuf>,
    /// A JSON transcript that `flow transcribe` wrote, or a folder of them; may be given several times
    #[arg(long, value_name = "PATH")]
    pub transcripts: Vec<PathBuf>,
    /// A folder with the recordings of transcripts, as given to `flow transcribe`; may be given several times
    #[arg(long, value_name = "FOLDER")]
    pub recordings: Vec<PathBuf>,
    /// Allow transcription of recordings and of the microphone on the page of transcripts, with this model (as for
    /// `flow serve`); may be given several times
    #[arg(long, value_name = "[NAME=]MODEL")]
    pub model: Vec<String>,
    /// Allow diarization of these recordings
    #[arg(long, requires = "model")]
    pub diarize: bool,
    /// Allow corrections of texts, marking of bad rows, and naming of speakers
    #[arg(long)]
    pub allow_edit: bool,
    /// The file that receives the corrections [default: corrections.parquet]
    #[arg(long, value_name = "FILE", requires = "allow_edit")]
    pub corrections: Option<PathBuf>,
}
