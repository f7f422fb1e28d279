//! The arguments of `flow ui`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use super::StateArguments;

#[derive(Args, Debug)]
pub struct UiArguments {
    /// Manifests and other rows to look at, too: Parquet files and files of JSON lines
    pub files: Vec<PathBuf>,
    #[command(flatten)]
    pub state: StateArguments,
    /// Address and port on this machine; port 0 for any that is free [default: 127.0.0.1:8001, or another port if that is taken]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// The folder of shards that the paths of tars in rows begin below, where it is not the one that the run was given
    #[arg(long, value_name = "FOLDER")]
    pub shards: Option<PathBuf>,
    /// A JSON transcript that `flow transcribe` wrote, or a folder of them; may be given several times
    #[arg(long, value_name = "PATH")]
    pub transcripts: Vec<PathBuf>,
    /// A folder that the recordings of transcripts lie in, as given to `flow transcribe`; may be given several times
    #[arg(long, value_name = "FOLDER")]
    pub recordings: Vec<PathBuf>,
    /// Let texts be corrected, rows be marked as bad, and speakers be named
    #[arg(long)]
    pub allow_edit: bool,
    /// The file that receives the corrections [default: corrections.parquet]
    #[arg(long, value_name = "FILE", requires = "allow_edit")]
    pub corrections: Option<PathBuf>,
}
