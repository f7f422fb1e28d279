//! The state that all requests share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use tokio::sync::{Semaphore, watch};

use super::addresses::Addresses;
use super::error::ApiError;
use super::jobs::Jobs;
use super::keys::Keys;
use super::metrics::Metrics;
use super::origin::Callers;
use super::server::ServeError;
use super::settings::HttpSettings;
use super::upload::Uploads;
use crate::engine::Engine;

/// Prints a line for whoever runs the service.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// The phase of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Until it is asked to stop.
    Running,
    /// Accepted requests are finished, new ones refused.
    Draining,
    /// Connections are closed.
    Closing,
}

/// The state that all requests share.
pub struct Shared {
    pub settings: HttpSettings,
    pub keys: Keys,
    pub callers: Callers,
    pub uploads: Uploads,
    /// None: the service was started without a folder for jobs.
    pub jobs: Option<Arc<Jobs>>,
    pub metrics: Arc<Metrics>,
    pub log: Log,
    /// The response of `/version`.
    pub version: String,
    pub started: SystemTime,
    /// Set once the first model is loaded.
    pub engine: OnceLock<Engine>,
    /// Routes of other modules, which need the engine.
    pub live: OnceLock<Router>,
    pub phase: watch::Receiver<Phase>,
    /// The error with which the service ends, if there is one.
    pub failure: Mutex<Option<ServeError>>,
    /// A permit for each connection.
    pub connections: Arc<Semaphore>,
    pub addresses: Arc<Addresses>,
    pub requests: AtomicU64,
}

pub type App = Arc<Shared>;

impl Shared {
    /// # Errors
    /// 503 while the first model is loaded.
    pub fn engine(&self) -> Result<&Engine, ApiError> {
        self.engine.get().ok_or_else(ApiError::loading)
    }

    /// # Errors
    /// 503 while the first model is loaded, and from the signal to stop on.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        if *self.phase.borrow() > Phase::Running {
            return Err(ApiError::unavailable("server_stopping", "the server is being stopped"));
        }
        self.engine()?;
        Ok(())
    }

    /// Seconds since 1970 at which the service began.
    pub fn started_at(&self) -> u64 {
        self.started
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs())
    }

    /// A unique id of a request.
    pub fn request_id(&self) -> String {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        format!("req_{:x}_{number:x}", self.started_at())
    }
}
