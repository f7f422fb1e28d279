//! What all requests share, and how one is answered.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use flow_storage::Storage;
use flow_store::Store;
use tokio::sync::Semaphore;

use super::access::Access;
use super::follower::Follower;
use super::page_error::PageError;
use super::run_summary::RunSummary;
use super::table_ref::{Pairs, Table, TableRef};

/// Requests that are processed concurrently; others wait.
const AT_ONCE: usize = 3;

/// The inputs of the interface.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    pub storage: Storage,
    pub state: PathBuf,
    /// Parquet files and files of JSON lines.
    pub files: Vec<PathBuf>,
    /// The folder of shards, where it is not that of a run.
    pub shards: Option<PathBuf>,
    /// JSON transcripts, and folders of them.
    pub transcripts: Vec<PathBuf>,
    /// Folders that their recordings are in.
    pub recordings: Vec<PathBuf>,
    /// The file of corrections, where some may be made.
    pub corrections: Option<PathBuf>,
}

/// The state that all requests share.
pub struct App {
    pub settings: Settings,
    pub access: Arc<Access>,
    /// Whether there is a model for recordings and the microphone.
    pub transcribes: bool,
    /// With the time at which it was opened.
    pub store: Mutex<Option<(Store, Instant)>>,
    questions: Arc<Semaphore>,
    /// Of runs that are over.
    pub summaries: Mutex<BTreeMap<String, Arc<RunSummary>>>,
    pub followers: Mutex<Vec<(String, Arc<Mutex<Follower>>)>>,
    pub tables: Mutex<Vec<(TableRef, Table)>>,
    pub clips: Mutex<Vec<(Pairs, Arc<Vec<f32>>)>>,
}

impl App {
    pub fn new(settings: Settings, access: Access, transcribes: bool) -> App {
        App {
            settings,
            access: Arc::new(access),
            transcribes,
            store: Mutex::default(),
            questions: Arc::new(Semaphore::new(AT_ONCE)),
            summaries: Mutex::default(),
            followers: Mutex::default(),
            tables: Mutex::default(),
            clips: Mutex::default(),
        }
    }
}

pub type Shared = Arc<App>;

/// Runs blocking work of a request on a separate thread. A panic only affects this request.
pub async fn answer(app: &Shared, work: impl FnOnce(&App) -> Result<Response, PageError> + Send + 'static) -> Response {
    let permit = Arc::clone(&app.questions).acquire_owned().await;
    let worker = Arc::clone(app);
    let done = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        work(&worker)
    });
    match done.await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => error.into_response(),
        Err(_) => {
            let message = "this page could not be made; this is a bug in flow, and the lines that it printed say where";
            PageError::new(StatusCode::INTERNAL_SERVER_ERROR, message).into_response()
        }
    }
}
