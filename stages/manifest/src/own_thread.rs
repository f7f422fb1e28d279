//! Work on a thread of its own, which whoever waits for it can give up.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use flow_kind::StageError;

type Job = Box<dyn FnOnce() + Send>;

/// How often a waiting caller asks whether to go on.
const ASK: Duration = Duration::from_millis(50);

/// Ends when this is dropped, after the work that it has.
pub(crate) struct OwnThread(Sender<Job>);

impl OwnThread {
    /// # Errors
    /// When the machine gives no thread.
    pub fn start() -> Result<OwnThread, StageError> {
        let (sender, jobs) = channel::<Job>();
        let work = move || jobs.into_iter().for_each(|job| job());
        std::thread::Builder::new()
            .name("sql".into())
            .spawn(work)
            .map_err(|error| StageError::failed(format!("cannot start a thread: {error}")))?;
        Ok(OwnThread(sender))
    }

    /// Does the work and waits for it. None once `gives_up` is true: the work goes on, and what it gives is lost; the thread
    /// cannot be used again, and ends with it, or with the process.
    pub fn run<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
        mut gives_up: impl FnMut() -> bool,
    ) -> Option<(T, OwnThread)> {
        let (done, result) = channel::<Result<T, Box<dyn Any + Send>>>();
        let job = move || {
            // Whoever waits may be gone.
            let _ = done.send(catch_unwind(AssertUnwindSafe(work)));
        };
        // The thread lives while its sender does.
        let _ = self.0.send(Box::new(job));
        loop {
            match result.recv_timeout(ASK) {
                Ok(Ok(value)) => return Some((value, self)),
                Ok(Err(panic)) => resume_unwind(panic),
                Err(RecvTimeoutError::Timeout) if !gives_up() => {}
                Err(_) => return None,
            }
        }
    }
}
