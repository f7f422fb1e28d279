//! The service over HTTP: OpenAI's API for transcriptions (`transcriptions`, `form`, `responses`, `events`), times of texts that are known (`alignments`),
//! transcriptions that outlive their requests (`jobs`), information about the service (`information`, `openapi`, `metrics`), access control (`keys`, `origin`), and
//! connections with their limits (`server`) around all of that (`service`).
//!
//! All input of clients is limited: the number of connections, the size and time of a request's head, the size, time
//! and rate of its body, the number and length of a form's parts, the files in the private folder, and how long a
//! response may wait for its reader.

mod addresses;
mod alignments;
mod app;
mod body;
mod channels;
mod client_stream;
mod endpoints;
mod error;
mod events;
mod form;
mod information;
mod jobs;
mod keys;
mod metrics;
mod middleware;
mod multipart;
mod openapi;
mod origin;
mod responses;
mod server;
mod service;
mod setting_file;
mod settings;
mod tls;
mod transcriptions;
mod upload;

pub use app::Log;
pub use endpoints::{Action, ENDPOINTS, Endpoint};
pub use error::ApiError;
pub use jobs::JobSettings;
pub use origin::Callers;
pub use server::{ServeError, Server, StopHandle};
pub use service::Service;
pub use settings::{HttpSettings, ServeSettings, SettingsError};
