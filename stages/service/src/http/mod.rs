//! The service over HTTP: OpenAI's API for transcriptions (`transcriptions`, `form`, `responses`, `events`), what the
//! service tells of itself (`information`, `openapi`, `metrics`), who may ask (`keys`, `origin`), and connections
//! with their bounds (`server`).
//!
//! Whatever comes from clients is bounded: the number of connections, the head of a request and the time it takes, the body,
//! its time and its rate, the parts of a form and the length of each, the files that lie in the private folder, and how long a
//! response may wait for its reader.

mod addresses;
mod app;
mod body;
mod client_stream;
mod endpoints;
mod error;
mod events;
mod form;
mod information;
mod keys;
mod metrics;
mod middleware;
mod multipart;
mod openapi;
mod origin;
mod responses;
mod server;
mod settings;
mod tls;
mod transcriptions;
mod upload;

pub use app::Log;
pub use endpoints::{Action, ENDPOINTS, Endpoint};
pub use error::ApiError;
pub use origin::Callers;
pub use server::{ServeError, Server, StopHandle};
pub use settings::{HttpSettings, ServeSettings, SettingsError};
