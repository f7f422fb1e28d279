//! What answers requests, apart from connections: the state that they share, the model that is loaded for them, and their end.

use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use axum::Router;
use flow_storage::Storage;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::addresses::Addresses;
use super::app::{App, Log, Phase, Shared};
use super::endpoints::router;
use super::information::{not_found, wrong_method};
use super::jobs::{Jobs, worker};
use super::keys::Keys;
use super::metrics::Metrics;
use super::origin::Callers;
use super::server::ServeError;
use super::settings::ServeSettings;
use super::upload::Uploads;
use crate::engine::{Engine, EngineSettings, Observer, TempFolder};
use crate::live::{self, LiveSettings};

/// The paths of the service, for a program that serves them beside its own ones. [`Server`](super::Server) is it with
/// connections.
pub struct Service {
    pub(super) app: App,
    pub(super) phase: watch::Sender<Phase>,
    engine: EngineSettings,
    live: LiveSettings,
}

impl Service {
    /// Checks the settings, reads the keys, and makes the folder for uploads. `address` is what the program listens on;
    /// `http.listen` and the settings of TLS and of connections are its own concern.
    ///
    /// # Errors
    /// If a setting is wrong, or a file or folder that it names cannot be used.
    pub fn new(
        storage: &Storage,
        settings: ServeSettings,
        address: SocketAddr,
        version: &str,
        log: Log,
    ) -> Result<Self, ServeError> {
        let ServeSettings {
            engine,
            http,
            live,
            jobs,
        } = settings.checked()?;
        let keys = http.keys.as_deref().map(Keys::read).transpose()?.unwrap_or_default();
        let folder = http.upload_folder.clone().unwrap_or_else(std::env::temp_dir);
        let uploads = TempFolder::new(&folder, http.max_upload_space);
        let folder = uploads.map_err(|error| ServeError::Uploads { folder, error })?;
        let jobs = Jobs::open(storage, &jobs, &log)?.map(Arc::new);
        let phase = watch::Sender::new(Phase::Running);
        let app: App = Arc::new(Shared {
            callers: Callers::new(keys.is_open(), address, &http.allowed_hosts, &http.cors),
            keys,
            uploads: Uploads { folder },
            jobs,
            metrics: Arc::new(Metrics::default()),
            log,
            version: version.to_owned(),
            started: SystemTime::now(),
            engine: OnceLock::new(),
            live: OnceLock::new(),
            phase: phase.subscribe(),
            failure: Mutex::new(None),
            connections: Arc::new(Semaphore::new(http.max_connections)),
            addresses: Arc::new(Addresses::new(http.max_connections_per_address, &http.trusted_proxies)),
            requests: AtomicU64::new(0),
            settings: http,
        });
        Ok(Self {
            app,
            phase,
            engine,
            live,
        })
    }

    /// All paths, with `page` beside them, which needs no key. A connection has to be able to become a WebSocket.
    pub fn router(&self, page: Router) -> Router {
        router(&self.app, page)
    }

    /// Begins to load the first model; until it is loaded, requests are refused. What is returned gives the time, after
    /// a stop and once accepted requests are finished, up to which the others may take. To be called in a runtime of tokio.
    pub(super) fn start(self) -> JoinHandle<Instant> {
        tokio::spawn(load(Arc::clone(&self.app), self.phase.clone(), self.engine, self.live));
        tokio::spawn(drain(self.app, self.phase))
    }

    /// Loads the first model, and waits as long as requests are answered. It is to be dropped where they are no longer.
    ///
    /// # Errors
    /// If the model cannot be loaded.
    pub async fn run(self) -> Result<(), ServeError> {
        let app = Arc::clone(&self.app);
        let _drained = self.start();
        reached(app.phase.clone(), Phase::Closing).await;
        let failure = app.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        failure.map_or(Ok(()), Err)
    }
}

/// Loads the first model; if that fails the service ends.
async fn load(app: App, phase: watch::Sender<Phase>, engine: EngineSettings, live: LiveSettings) {
    let observer: Arc<dyn Observer> = Arc::clone(&app.metrics) as _;
    let started = tokio::task::spawn_blocking(move || Engine::start_observed(engine, observer)).await;
    let failure = match started {
        Ok(Ok(engine)) => {
            let routes = live::routes(Arc::new(engine.clone()), live)
                .fallback(not_found)
                .method_not_allowed_fallback(wrong_method);
            // Both are set only here.
            let _ = app.live.set(routes);
            let _ = app.engine.set(engine);
            if let Some(jobs) = app.jobs.clone() {
                tokio::spawn(worker::run(app, jobs));
            }
            return;
        }
        Ok(Err(error)) => error.into(),
        Err(error) => ServeError::Failed(format!("the model was not loaded: {error}")),
    };
    *app.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
    phase.send_replace(Phase::Closing);
}

/// After a stop: waits for the accepted requests and for the worker of jobs, at most `drain_timeout`.
async fn drain(app: App, phase: watch::Sender<Phase>) -> Instant {
    reached(app.phase.clone(), Phase::Draining).await;
    let limit = Duration::from_secs_f64(app.settings.drain_timeout);
    let until = Instant::now() + limit;
    if let Some(engine) = app.engine.get() {
        engine.drain(limit).await;
    }
    if let Some(jobs) = &app.jobs {
        let _ = timeout_at(until, jobs.has_stopped()).await;
    }
    phase.send_replace(Phase::Closing);
    until
}

/// Waits until the service is in this phase, or past it.
pub async fn reached(mut phase: watch::Receiver<Phase>, wanted: Phase) {
    // The sender lives as long as the service.
    let _ = phase.wait_for(|phase| *phase >= wanted).await;
}
