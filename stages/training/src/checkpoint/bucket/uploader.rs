//! The thread that copies checkpoints while training goes on.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, bounded};

use super::upload::Mirror;
use crate::error::TrainingError;
use crate::trainer::panic_text;

/// Copies checkpoints, one after the other. When it is dropped before [`Uploader::finish`], it stops where it is.
pub struct Uploader {
    /// Gone once no more checkpoints will come.
    wake: Option<Sender<()>>,
    thread: Option<JoinHandle<Result<(), TrainingError>>>,
    cancel: Arc<AtomicBool>,
    warnings: Arc<Mutex<Vec<String>>>,
}

/// Tells an [`Uploader`] that there is a new checkpoint.
#[derive(Clone)]
pub struct Waker(Sender<()>);

impl Waker {
    pub fn wake(&self) {
        // If it is full, the thread looks at the folder later than now anyway.
        let _ = self.0.try_send(());
    }
}

impl Uploader {
    /// Begins with what the bucket lacks of the folder.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(mut mirror: Mirror) -> Result<Uploader, TrainingError> {
        let (wake, woken) = bounded(1);
        let cancel = mirror.cancel();
        let warnings: Arc<Mutex<Vec<String>>> = Arc::default();
        let told = Arc::clone(&warnings);
        let copy = move || {
            let mut last = Ok(());
            for () in woken {
                last = mirror.copy_all();
                if let Err(error) = &last {
                    let message = format!("a checkpoint is not copied to object storage: {error}");
                    told.lock().unwrap_or_else(PoisonError::into_inner).push(message);
                }
            }
            last
        };
        let thread = std::thread::Builder::new().name("upload".into()).spawn(copy);
        let uploader = Uploader {
            wake: Some(wake),
            thread: Some(thread.map_err(TrainingError::file(&PathBuf::from("a thread")))?),
            cancel,
            warnings,
        };
        uploader.wake();
        Ok(uploader)
    }

    pub fn wake(&self) {
        if let Some(waker) = self.waker() {
            waker.wake();
        }
    }

    pub fn waker(&self) -> Option<Waker> {
        self.wake.clone().map(Waker)
    }

    /// What could not be copied since the last call, one line each.
    pub fn warnings(&self) -> Vec<String> {
        std::mem::take(&mut self.warnings.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until all checkpoints are copied. All [`Waker`]s have to be gone.
    ///
    /// # Errors
    /// Where the last ones could not be copied.
    pub fn finish(mut self) -> Result<(), TrainingError> {
        self.wake = None;
        match self.thread.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(copied)) => copied,
            Some(Err(panic)) => Err(TrainingError::data(format!(
                "copying a checkpoint panicked: {}",
                panic_text(panic.as_ref())
            ))),
        }
    }
}

impl Drop for Uploader {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.cancel.store(true, Ordering::Relaxed);
        self.wake = None;
        // The next run copies what is missing.
        let _ = thread.join();
    }
}
