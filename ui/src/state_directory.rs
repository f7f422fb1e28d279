//! The state directory, and its runs that are being watched.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use flow_storage::is_url;
use flow_store::{Access, Store};

use super::app::App;
use super::follower::Follower;
use super::page_error::PageError;

/// Interval at which a state directory in object storage is reread.
const REOPENED: Duration = Duration::from_secs(60);

/// The state directory, for looking.
pub fn store(app: &App) -> Result<Store, PageError> {
    let mut known = app.store.lock().unwrap_or_else(PoisonError::into_inner);
    // What other machines wrote in object storage is seen when it is opened again.
    let is_old = |opened: &Instant| is_url(&app.settings.state) && opened.elapsed() > REOPENED;
    if let Some((store, _)) = known.as_ref().filter(|(_, opened)| !is_old(opened)) {
        return Ok(store.clone());
    }
    // Opened once, since opening reads the digests of all source files.
    let store = Store::open(&app.settings.storage, &app.settings.state, Access::Read)?;
    *known = Some((store.clone(), Instant::now()));
    Ok(store)
}

/// The run of this name, read as far as it is written.
pub fn follower(app: &App, id: &str) -> Result<Arc<Mutex<Follower>>, PageError> {
    const REMEMBERED: usize = 8;
    let folder = store(app)?.run_folder(id).map_err(|_| PageError::absent("run"))?;
    if !folder.is_dir() {
        return Err(PageError::absent("run"));
    }
    let mut followers = app.followers.lock().unwrap_or_else(PoisonError::into_inner);
    let known = followers.iter().position(|(known, _)| known == id);
    let follower = match known {
        Some(at) => followers.remove(at).1,
        None => Arc::new(Mutex::new(Follower::new(&folder.join("events.jsonl")))),
    };
    followers.push((id.to_owned(), Arc::clone(&follower)));
    let too_many = followers.len().saturating_sub(REMEMBERED);
    followers.drain(..too_many);
    drop(followers);
    follower.lock().unwrap_or_else(PoisonError::into_inner).advance()?;
    Ok(follower)
}

/// A time of RFC 3339 to the second, in UTC.
pub fn when(at: &str) -> String {
    match chrono::DateTime::parse_from_rfc3339(at) {
        Ok(at) => at.to_utc().format("%Y-%m-%d %H:%M:%S").to_string(),
        Err(_) => at.to_owned(),
    }
}
