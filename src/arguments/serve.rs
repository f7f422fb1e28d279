//! The arguments of `flow serve`.

use std::path::PathBuf;

use clap::Args;
use flow_kernels::device::DeviceChoice;

use flow_cli::arguments::Precision;

/// What is given here counts more than the file of `--config`.
#[derive(Args, Debug, Default)]
pub struct ServeArguments {
    /// A .nemo archive, a model folder, a Hugging Face folder, hf://OWNER/NAME, or a URL of object storage, with its name for
    /// clients; may be given several times, and the first is used where a client names none. The bundled small model if none is given
    #[arg(long, value_name = "[NAME=]MODEL")]
    pub model: Vec<String>,
    /// Allow requests for diarization
    #[arg(long)]
    pub diarize: bool,
    /// A JSON file of names, each with a recording or an embedding of its voice; with --diarize
    #[arg(long, value_name = "FILE")]
    pub known_speakers: Option<PathBuf>,
    /// Where models are computed: cpu, cuda or cuda:1 [default: cpu]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceChoice>,
    /// What products of models are computed in, on the CPU: int8 and bf16 take less time and memory than f32, and may give other
    /// words [default: f32]
    #[arg(long, value_name = "TYPE")]
    pub precision: Option<Precision>,
    /// Address and port; port 0 for any that is free [default: 127.0.0.1:8000]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<String>,
    /// Address and port for clients of the Wyoming protocol, such as Home Assistant (usual: 0.0.0.0:10300)
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub wyoming: Option<String>,
    /// A file of settings; see docs/service.md
    #[arg(long, value_name = "serve.yaml")]
    pub config: Option<PathBuf>,
    /// A file with an API key on each line, one of which requests then need
    #[arg(long, value_name = "FILE")]
    pub keys: Option<PathBuf>,
    /// Take jobs (/v1/jobs), and keep them in this folder over restarts
    #[arg(long, value_name = "FOLDER")]
    pub jobs: Option<PathBuf>,
    /// The certificate for HTTPS, in PEM
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key, in PEM
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Let pages of this origin call the service, such as `https://app.example`, or `*` for all; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    pub cors: Vec<String>,
    /// Without keys, accept only this host name and localhost; may be given several times
    #[arg(long, value_name = "HOST")]
    pub allowed_host: Vec<String>,
    /// Use the first model for requests that name an unknown one
    #[arg(long)]
    pub accept_any_model: bool,
    /// Print a line for each request on standard error
    #[arg(long)]
    pub log_requests: bool,
    /// Refuse longer recordings, in seconds [default: 43200]
    #[arg(long, value_name = "SECONDS")]
    pub max_duration: Option<f64>,
    /// Refuse larger requests, in MiB [default: 512]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub max_upload: Option<u64>,
    /// Most requests that wait or run; more are refused [default: 100]
    #[arg(long, value_name = "N")]
    pub max_queue: Option<usize>,
    /// When stopped, time for accepted requests to finish, in seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub drain_timeout: Option<f64>,
}
