//! Jobs: transcriptions that outlive the request that asked for them, and the process.
//!
//! A job is accepted once it is on disk ([`folder`]). A task runs one job after the other ([`worker`]), as one more client of the
//! engine, so that the windows of a job get the share of one request beside those of others. The end of a job is committed
//! with its result by one rename. When the process dies before that, the next one goes on with the job behind what its log says is
//! done. [`webhook`] tells of the end; [`handlers`] are the paths of the API.

mod folder;
pub mod handlers;
mod settings;
mod source;
mod webhook;
pub mod worker;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use flow_storage::Storage;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Mutex as AsyncMutex, Notify};
use tokio::time::sleep;

use self::folder::{Delivery, DeliveryState, End, JobFolder, JobRequest, Outcome, new_id};
use self::webhook::Secret;
use super::app::Log;
use super::error::ApiError;
use super::settings::SettingsError;
use super::upload::{Upload, Uploads};
use crate::engine::{JobProgress, Logged, Reservation};

pub use self::settings::JobSettings;

/// Bytes that a job counts for at least: its files and folders have that much.
const LEAST_BYTES: u64 = 16 << 10;

/// How often the files of a job that runs are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// The jobs of the service.
pub struct Jobs {
    /// For recordings that are in object storage.
    storage: Storage,
    settings: JobSettings,
    folder: Arc<JobFolder>,
    /// For the recordings of jobs, beside those of requests.
    pub uploads: Uploads,
    secret: Option<Secret>,
    table: Mutex<Table>,
    /// Held while the end of a job is committed or a job is removed, so that a job has one end.
    commits: AsyncMutex<()>,
    /// Held by the worker until it takes no more jobs.
    working: AsyncMutex<()>,
    /// There is a job to be run.
    queued: Notify,
    /// Numbers of jobs whose webhook is to be sent.
    owed: UnboundedSender<u64>,
    sending: Mutex<Option<UnboundedReceiver<u64>>>,
}

#[derive(Default)]
struct Table {
    /// By their numbers.
    jobs: BTreeMap<u64, Entry>,
    numbers: HashMap<String, u64>,
    next: u64,
}

struct Entry {
    request: Arc<JobRequest>,
    status: Status,
    /// How often it was begun without progress.
    attempts: u32,
    /// How much of it is done, as of its last beginning.
    logged: Logged,
    /// How often its recording could not be fetched.
    tries: u32,
    /// It is not begun before.
    not_before: Option<Instant>,
    delivery: Delivery,
    /// Of the recording and the logs of what is done, or of the result.
    reservation: Reservation,
}

enum Status {
    Queued,
    Running(Running),
    Ended(Outcome),
}

struct Running {
    started_at: u64,
    progress: Option<JobProgress>,
    /// A client cancels it.
    cancelled: Arc<Notify>,
}

/// A job that is begun.
pub struct Begun {
    pub request: Arc<JobRequest>,
    pub attempts: u32,
    pub cancelled: Arc<Notify>,
}

/// A webhook that is to be sent.
struct Owed {
    url: String,
    id: String,
    outcome: Outcome,
    delivery: Delivery,
}

/// Seconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(io::Error::other)?
}

impl Jobs {
    /// Opens the folder of the settings; None where there is none.
    ///
    /// # Errors
    /// If the folder or the secret cannot be used.
    pub fn open(storage: &Storage, settings: &JobSettings, log: &Log) -> Result<Option<Self>, SettingsError> {
        let Some(path) = &settings.folder else { return Ok(None) };
        let fault = |setting, path: &Path, error: &dyn std::fmt::Display| SettingsError::Value {
            section: "jobs",
            setting,
            why: format!("{}: {error}", path.display()),
        };
        let secret = settings.webhook_secret.as_deref();
        let secret = secret.map(|path| Secret::read(path).map_err(|error| fault("webhook_secret", path, &error)));
        let secret = secret.transpose()?;
        let opened = JobFolder::open(path, settings.max_bytes);
        let (folder, stored, faults) = opened.map_err(|error| fault("folder", path, &error))?;
        for fault in faults {
            log(&format!("warning: {fault}"));
        }
        let mut table = Table::default();
        let (owed, sending) = unbounded_channel();
        for mut job in stored {
            // One that could not be read at an earlier start may have the number of a later one.
            let number = job.request.number.max(table.next);
            job.request.number = number;
            table.next = number.saturating_add(1);
            table.numbers.insert(job.request.id.clone(), number);
            let entry = Entry {
                request: Arc::new(job.request),
                status: job.outcome.map_or(Status::Queued, Status::Ended),
                attempts: job.attempts,
                logged: job.logged,
                tries: 0,
                not_before: None,
                delivery: job.delivery,
                reservation: folder.private.reserve_anyway(job.bytes.max(LEAST_BYTES)),
            };
            if entry.owes_webhook() {
                // The receiver is below.
                let _ = owed.send(number);
            }
            table.jobs.insert(number, entry);
        }
        Ok(Some(Self {
            storage: storage.clone(),
            uploads: Uploads {
                folder: folder.private.clone(),
            },
            settings: settings.clone(),
            folder: Arc::new(folder),
            secret,
            table: Mutex::new(table),
            commits: AsyncMutex::new(()),
            working: AsyncMutex::new(()),
            queued: Notify::new(),
            owed,
            sending: Mutex::new(Some(sending)),
        }))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Jobs that wait or run.
    pub fn queued(&self) -> usize {
        self.table().queued()
    }

    /// Whether there is a place for one more job.
    ///
    /// # Errors
    /// 429 where there are `max_queued`.
    pub fn check_room(&self) -> Result<(), ApiError> {
        self.table().check_room(self.settings.max_queued)
    }

    /// Checks the URL of a webhook.
    ///
    /// # Errors
    /// 400 if webhooks are not sent there.
    pub fn check_webhook(&self, url: &str) -> Result<(), ApiError> {
        let refused = |message: &str| Err(ApiError::parameter("webhook", "webhook_not_allowed", message));
        if self.secret.is_none() {
            return refused("this server sends no webhooks: jobs.webhook_secret and jobs.webhook_origins are not set");
        }
        if !self.settings.allows_webhook(url) {
            return refused("the URL is of none of the origins that this server sends webhooks to");
        }
        Ok(())
    }

    /// Whether the same client sent a job with this `Idempotency-Key`.
    pub fn knows_key(&self, owner: Option<&str>, key: &str) -> bool {
        self.table().by_key(owner, key).is_some()
    }

    /// Accepts a job; it is on disk when this returns. Number, id and time of the request are set here. Where there
    /// is a job of the same `Idempotency-Key`, that one is returned.
    ///
    /// # Errors
    /// 422 if the job of the key is another one, 429 if there is no place for it, 507 if it cannot be written.
    pub async fn accept(&self, mut request: JobRequest, upload: Upload) -> Result<Value, ApiError> {
        let failed = |error: io::Error| {
            let message = format!("the job cannot be kept: {}", error.kind());
            ApiError::new(axum::http::StatusCode::INSUFFICIENT_STORAGE, "job_not_stored", message)
        };
        request.id = new_id().map_err(failed)?;
        request.created_at = now();
        // One after the other, so that two of the same key are not both accepted.
        let _alone = self.commits.lock().await;
        {
            let mut table = self.table();
            let of_key = request.idempotency_key.as_deref();
            if let Some(entry) = of_key.and_then(|key| table.by_key(request.owner.as_deref(), key)) {
                return if entry.request.asks_same(&request) {
                    Ok(entry.described())
                } else {
                    let message = "this `Idempotency-Key` was sent before with another recording or other fields";
                    let status = axum::http::StatusCode::UNPROCESSABLE_ENTITY;
                    Err(ApiError::new(status, "idempotency_key_reused", message))
                };
            }
            table.check_room(self.settings.max_queued)?;
            request.number = table.next;
            table.next += 1;
        }
        let mut reservation = upload.reservation;
        reservation.shrink(upload.bytes.max(LEAST_BYTES));
        let request = Arc::new(request);
        let (folder, written) = (Arc::clone(&self.folder), Arc::clone(&request));
        let path = upload.path;
        blocking(move || folder.accept(&written, path)).await.map_err(failed)?;
        let entry = Entry {
            request: Arc::clone(&request),
            status: Status::Queued,
            attempts: 0,
            logged: Logged::default(),
            tries: 0,
            not_before: None,
            delivery: Delivery::default(),
            reservation,
        };
        let described = entry.described();
        let mut table = self.table();
        table.numbers.insert(request.id.clone(), request.number);
        table.jobs.insert(request.number, entry);
        drop(table);
        self.queued.notify_one();
        Ok(described)
    }

    /// A job of this owner.
    ///
    /// # Errors
    /// 404 if there is none, or it is of another owner.
    pub fn find(&self, owner: Option<&str>, id: &str) -> Result<Value, ApiError> {
        let table = self.table();
        Ok(table.owned(owner, id)?.described())
    }

    /// Jobs of this owner, the newest first: those after the job `after`, in one of the states.
    ///
    /// # Errors
    /// 404 if there is no job `after`.
    pub fn list(
        &self,
        owner: Option<&str>,
        limit: usize,
        after: Option<&str>,
        state: Option<&str>,
    ) -> Result<Value, ApiError> {
        let table = self.table();
        let before = match after {
            Some(id) => table.owned(owner, id)?.request.number,
            None => u64::MAX,
        };
        let of_owner = table.jobs.range(..before).rev().map(|(_, entry)| entry);
        let of_owner = of_owner.filter(|entry| {
            entry.request.owner.as_deref() == owner && state.is_none_or(|state| entry.state() == state)
        });
        let mut found: Vec<Value> = of_owner.take(limit.saturating_add(1)).map(Entry::described).collect();
        let has_more = found.len() > limit;
        found.truncate(limit);
        Ok(json!({
            "object": "list",
            "first_id": found.first().map(|job| job["id"].clone()),
            "last_id": found.last().map(|job| job["id"].clone()),
            "data": found,
            "has_more": has_more,
        }))
    }

    /// The result of a job: content type, bytes, and names of fields without effect.
    ///
    /// # Errors
    /// 404 if there is no such job, 409 if it has no result.
    pub async fn result(&self, owner: Option<&str>, id: &str) -> Result<(String, Vec<u8>, Vec<String>), ApiError> {
        let (content_type, ignored) = {
            let table = self.table();
            let entry = table.owned(owner, id)?;
            let none = |code, message: String| Err(ApiError::new(axum::http::StatusCode::CONFLICT, code, message));
            let outcome = match &entry.status {
                Status::Ended(outcome) => outcome,
                _ => {
                    let message = format!("the job is {}: it has no result yet", entry.state());
                    return none("job_not_done", message);
                }
            };
            match outcome.end {
                End::Done => {}
                End::Cancelled => return none("job_cancelled", "the job was cancelled".to_owned()),
                End::Failed => {
                    let error = outcome.error.as_ref().and_then(|error| error["message"].as_str());
                    let message = format!("the job has failed: {}", error.unwrap_or_default());
                    return none("job_failed", message);
                }
            }
            let content_type = outcome.content_type.clone().unwrap_or_default();
            (content_type, entry.request.asked.ignored.clone())
        };
        let (folder, of) = (Arc::clone(&self.folder), id.to_owned());
        let bytes = blocking(move || folder.result(&of)).await.map_err(|error| {
            let message = format!("the result cannot be read: {}", error.kind());
            ApiError::new(axum::http::StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
        })?;
        Ok((content_type, bytes, ignored))
    }

    /// Cancels a job that waits or runs; removes one that has ended.
    ///
    /// # Errors
    /// 404 if there is none of this owner; 507 if the folder cannot be written.
    pub async fn delete(&self, owner: Option<&str>, id: &str, log: &Log) -> Result<Value, ApiError> {
        let failed = |error: io::Error| {
            let message = format!("the job cannot be changed: {}", error.kind());
            ApiError::new(axum::http::StatusCode::INSUFFICIENT_STORAGE, "job_not_stored", message)
        };
        self.table().owned(owner, id)?;
        self.forget_if_gone(id, log).await;
        let _alone = self.commits.lock().await;
        let (number, has_ended) = {
            let table = self.table();
            let entry = table.owned(owner, id)?;
            (entry.request.number, matches!(entry.status, Status::Ended(_)))
        };
        if has_ended {
            self.remove(number).await.map_err(failed)?;
            return Ok(json!({"id": id, "object": "job.deleted", "deleted": true}));
        }
        let cancelled = Outcome {
            end: End::Cancelled,
            finished_at: now(),
            audio_seconds: None,
            content_type: None,
            error: None,
        };
        self.commit(number, cancelled, Bytes::new()).await.map_err(failed)?;
        self.find(owner, id)
    }

    /// The job to be run next: of those that were begun least often the first one. Waits until there is one.
    pub async fn next(&self) -> Begun {
        loop {
            if let Some(begun) = self.table().begin() {
                return begun;
            }
            self.queued.notified().await;
        }
    }

    /// Notes on disk how often a job was begun without progress.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub async fn note_attempts(&self, request: &JobRequest, attempts: u32, logged: Logged) -> io::Result<()> {
        if let Some(entry) = self.table().jobs.get_mut(&request.number) {
            (entry.attempts, entry.logged) = (attempts, logged);
        }
        let (folder, id) = (Arc::clone(&self.folder), request.id.clone());
        blocking(move || folder.note_attempts(&id, attempts, logged.records)).await
    }

    /// How much of a job is done. Warns of a log that is not used.
    ///
    /// # Errors
    /// If no thread can read it.
    pub async fn logged(&self, request: &JobRequest, log: &Log) -> io::Result<Logged> {
        let (folder, id) = (Arc::clone(&self.folder), request.id.clone());
        let (logged, unusable) = blocking(move || Ok((folder.logged(&id), folder.unusable_log(&id)))).await?;
        if let Some(path) = unusable {
            log(&format!(
                "warning: {}: it is not a regular file: what is done of the job is not noted, and an interruption begins it anew",
                path.display()
            ));
        }
        Ok(logged)
    }

    /// Sets what tells of the progress of a job that runs.
    pub fn set_progress(&self, request: &JobRequest, progress: JobProgress) {
        if let Some(entry) = self.table().jobs.get_mut(&request.number)
            && let Status::Running(running) = &mut entry.status
        {
            running.progress = Some(progress);
        }
    }

    /// Puts a job back that was begun and did not end.
    pub fn put_back(&self, request: &JobRequest) {
        if let Some(entry) = self.table().jobs.get_mut(&request.number)
            && matches!(entry.status, Status::Running(_))
        {
            entry.status = Status::Queued;
        }
        self.queued.notify_one();
    }

    /// As [`Jobs::put_back`], of a job that is not begun again for some time; [`Jobs::wake`] is to be called then.
    pub fn put_back_for(&self, request: &JobRequest, time: Duration) {
        if let Some(entry) = self.table().jobs.get_mut(&request.number) {
            entry.not_before = Instant::now().checked_add(time);
        }
        self.put_back(request);
    }

    /// A job may be begun again.
    pub fn wake(&self) {
        self.queued.notify_one();
    }

    /// Commits the end of a job that runs. False where it has been cancelled before.
    ///
    /// # Errors
    /// If the folder cannot be written: the job runs still.
    pub async fn finish(&self, request: &JobRequest, outcome: Outcome, result: Bytes) -> io::Result<bool> {
        let _alone = self.commits.lock().await;
        let runs = |entry: &Entry| matches!(entry.status, Status::Running(_));
        if !self.table().jobs.get(&request.number).is_some_and(runs) {
            return Ok(false);
        }
        self.commit(request.number, outcome, result).await?;
        Ok(true)
    }

    /// Commits the end of a job that has none; `commits` is held.
    async fn commit(&self, number: u64, outcome: Outcome, result: Bytes) -> io::Result<()> {
        let Some(id) = self.table().jobs.get(&number).map(|entry| entry.request.id.clone()) else {
            return Ok(());
        };
        let (folder, written) = (Arc::clone(&self.folder), outcome.clone());
        let bytes = (result.len() as u64).max(LEAST_BYTES);
        blocking(move || folder.commit(&id, &written, &result)).await?;
        let mut table = self.table();
        if let Some(entry) = table.jobs.get_mut(&number) {
            entry.reservation = self.folder.private.reserve_anyway(bytes);
            if let Status::Running(running) = std::mem::replace(&mut entry.status, Status::Ended(outcome)) {
                running.cancelled.notify_one();
            }
            if entry.owes_webhook() {
                let _ = self.owed.send(number);
            }
        }
        Ok(())
    }

    /// Removes a job; `commits` is held.
    async fn remove(&self, number: u64) -> io::Result<()> {
        let Some(id) = self.table().jobs.get(&number).map(|entry| entry.request.id.clone()) else {
            return Ok(());
        };
        let folder = Arc::clone(&self.folder);
        let removed = id.clone();
        blocking(move || folder.remove(&removed)).await?;
        let mut table = self.table();
        table.jobs.remove(&number);
        table.numbers.remove(&id);
        Ok(())
    }

    /// Forgets a job whose folder somebody has deleted. Returns whether it is gone.
    pub async fn forget_if_gone(&self, id: &str, log: &Log) -> bool {
        let _alone = self.commits.lock().await;
        let (folder, of) = (Arc::clone(&self.folder), id.to_owned());
        if !blocking(move || Ok(folder.is_gone(&of))).await.unwrap_or(false) {
            return false;
        }
        let mut table = self.table();
        if let Some(entry) = table.numbers.remove(id).and_then(|number| table.jobs.remove(&number)) {
            drop(table);
            if let Status::Running(running) = entry.status {
                running.cancelled.notify_one();
            }
            let path = self.folder.of(id);
            log(&format!(
                "warning: the job {id} is gone: its folder {} was deleted",
                path.display()
            ));
        }
        true
    }

    /// Looks at the files of a job that runs from time to time, since its logs grow and count in `max_bytes`. Returns once the job is
    /// gone.
    pub async fn watch(&self, request: &JobRequest, log: &Log) {
        while !self.forget_if_gone(&request.id, log).await {
            self.measure(request).await;
            sleep(LOOK).await;
        }
    }

    /// Reserves what the files of a job that runs have now.
    async fn measure(&self, request: &JobRequest) {
        let (folder, id) = (Arc::clone(&self.folder), request.id.clone());
        let Ok(bytes) = blocking(move || folder.bytes(&id)).await else {
            return;
        };
        if let Some(entry) = self.table().jobs.get_mut(&request.number)
            && matches!(entry.status, Status::Running(_))
        {
            entry.reservation.set_anyway(bytes.max(LEAST_BYTES));
        }
    }

    /// Waits until the worker has taken back what it had begun, after a stop of the service.
    pub async fn has_stopped(&self) {
        drop(self.working.lock().await);
    }

    /// The webhook of a job, if it is to be sent.
    fn owed_webhook(&self, number: u64) -> Option<Owed> {
        let table = self.table();
        let entry = table.jobs.get(&number).filter(|entry| entry.owes_webhook())?;
        let Status::Ended(outcome) = &entry.status else {
            return None;
        };
        Some(Owed {
            url: entry.request.webhook.clone()?,
            id: entry.request.id.clone(),
            outcome: outcome.clone(),
            delivery: entry.delivery,
        })
    }

    /// Notes the state of a webhook.
    async fn note_delivery(&self, number: u64, id: String, delivery: Delivery) -> io::Result<()> {
        if let Some(entry) = self.table().jobs.get_mut(&number) {
            entry.delivery = delivery;
        }
        let folder = Arc::clone(&self.folder);
        blocking(move || folder.note_delivery(&id, &delivery)).await
    }

    /// Removes jobs that ended `keep_days` ago, and the oldest ones where more than `max_kept` have ended.
    pub async fn sweep(&self, log: &Log) {
        let before = now().saturating_sub((self.settings.keep_days * 86_400.0) as u64);
        let old: Vec<u64> = self.table().old(before, self.settings.max_kept);
        for number in old {
            let _alone = self.commits.lock().await;
            if let Err(error) = self.remove(number).await {
                log(&format!("warning: an old job cannot be removed: {error}"));
            }
        }
    }
}

impl Table {
    fn queued(&self) -> usize {
        let waits = |entry: &&Entry| !matches!(entry.status, Status::Ended(_));
        self.jobs.values().filter(waits).count()
    }

    fn check_room(&self, max_queued: usize) -> Result<(), ApiError> {
        if self.queued() < max_queued {
            return Ok(());
        }
        let message = format!("{max_queued} jobs wait, which is the limit");
        let error = ApiError::new(axum::http::StatusCode::TOO_MANY_REQUESTS, "too_many_jobs", message);
        Err(ApiError {
            retry_after: Some(60),
            ..error
        })
    }

    fn owned(&self, owner: Option<&str>, id: &str) -> Result<&Entry, ApiError> {
        let entry = self.numbers.get(id).and_then(|number| self.jobs.get(number));
        // As if there were none, where it is another one's.
        entry
            .filter(|entry| entry.request.owner.as_deref() == owner)
            .ok_or_else(|| {
                let message = "there is no job of that id";
                ApiError::new(axum::http::StatusCode::NOT_FOUND, "job_not_found", message)
            })
    }

    fn by_key(&self, owner: Option<&str>, key: &str) -> Option<&Entry> {
        self.jobs.values().find(|entry| {
            entry.request.owner.as_deref() == owner && entry.request.idempotency_key.as_deref() == Some(key)
        })
    }

    fn begin(&mut self) -> Option<Begun> {
        let time = Instant::now();
        let queued = self.jobs.values_mut().filter(|entry| {
            matches!(entry.status, Status::Queued) && entry.not_before.is_none_or(|begin| begin <= time)
        });
        let entry = queued.min_by_key(|entry| (entry.attempts, entry.request.number))?;
        let cancelled = Arc::new(Notify::new());
        entry.status = Status::Running(Running {
            started_at: now(),
            progress: None,
            cancelled: Arc::clone(&cancelled),
        });
        Some(Begun {
            request: Arc::clone(&entry.request),
            attempts: entry.attempts,
            cancelled,
        })
    }

    /// Numbers of jobs that ended before a time, and of the oldest ones beyond `max_kept`.
    fn old(&self, before: u64, max_kept: usize) -> Vec<u64> {
        let mut ended: Vec<(u64, u64)> = self
            .jobs
            .iter()
            .filter_map(|(number, entry)| match &entry.status {
                Status::Ended(outcome) => Some((outcome.finished_at, *number)),
                _ => None,
            })
            .collect();
        ended.sort_unstable();
        let beyond = ended.len().saturating_sub(max_kept);
        let old = ended.iter().enumerate();
        let old = old.filter(|(place, (finished_at, _))| *place < beyond || *finished_at < before);
        old.map(|(_, (_, number))| *number).collect()
    }
}

impl Entry {
    fn state(&self) -> &'static str {
        match &self.status {
            Status::Queued => "queued",
            Status::Running(_) => "running",
            Status::Ended(outcome) => outcome.end.name(),
        }
    }

    /// The job as clients see it.
    fn described(&self) -> Value {
        let request = &self.request;
        let (mut started_at, mut finished_at, mut error) = (None, None, None);
        let mut seconds = self.logged.seconds;
        match &self.status {
            Status::Queued => {}
            Status::Running(running) => {
                started_at = Some(running.started_at);
                seconds = running.progress.as_ref().and_then(JobProgress::seconds).or(seconds);
            }
            Status::Ended(outcome) => {
                finished_at = Some(outcome.finished_at);
                seconds = outcome.audio_seconds.map(|seconds| (seconds, seconds));
                error = outcome.error.clone();
            }
        }
        let webhook = request.webhook.as_ref().map(|url| {
            let delivery = &self.delivery;
            json!({"url": url, "state": delivery.state.name(), "attempts": delivery.attempts})
        });
        json!({
            "id": request.id,
            "object": "job",
            "state": self.state(),
            "created_at": request.created_at,
            "started_at": started_at,
            "finished_at": finished_at,
            "file_name": request.file_name,
            "bytes": request.bytes,
            "url": request.url,
            "model": request.asked.model,
            "response_format": request.asked.format.name(),
            "done_seconds": seconds.map_or(0.0, |(done, _)| done),
            "audio_seconds": seconds.map(|(_, all)| all),
            "error": error,
            "webhook": webhook,
        })
    }

    /// Whether the webhook is to be sent.
    fn owes_webhook(&self) -> bool {
        let has_ended = matches!(self.status, Status::Ended(_));
        has_ended && self.request.webhook.is_some() && self.delivery.state == DeliveryState::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;
    use tokio::runtime::Builder;

    use super::*;

    #[test]
    fn logs_of_what_is_done_count_in_the_bytes_of_all_jobs() {
        let folder = TempDir::new().unwrap();
        let settings = JobSettings {
            folder: Some(folder.path().join("jobs")),
            max_bytes: 1 << 20,
            ..JobSettings::default()
        };
        let path = settings.folder.as_deref().unwrap();
        let (made, ..) = JobFolder::open(path, settings.max_bytes).unwrap();
        folder::tests::accepted(&made, 1);
        drop(made);
        let log: Log = Arc::new(|_| {});
        let jobs = Jobs::open(&Storage::default(), &settings, &log).unwrap().unwrap();
        let runtime = Builder::new_current_thread().build().unwrap();
        let has_room = |jobs: &Jobs| jobs.folder.private.reserve(500 << 10).is_some();
        let begun = runtime.block_on(jobs.next());
        let log_of_job = jobs.folder.log(&begun.request.id);
        runtime.block_on(jobs.measure(&begun.request));
        assert!(has_room(&jobs));
        fs::write(&log_of_job, vec![0; 600 << 10]).unwrap();
        runtime.block_on(jobs.measure(&begun.request));
        assert!(!has_room(&jobs));
        drop(jobs);
        // As at the next start, until the job has ended.
        let jobs = Jobs::open(&Storage::default(), &settings, &log).unwrap().unwrap();
        assert!(!has_room(&jobs));
        let begun = runtime.block_on(jobs.next());
        let outcome = Outcome {
            end: End::Done,
            finished_at: now(),
            audio_seconds: None,
            content_type: None,
            error: None,
        };
        let finished = jobs.finish(&begun.request, outcome, Bytes::new());
        assert!(runtime.block_on(finished).unwrap() && !log_of_job.exists());
        assert!(has_room(&jobs));
        // What is measured late does not count.
        runtime.block_on(jobs.measure(&begun.request));
        assert!(has_room(&jobs));
    }
}
