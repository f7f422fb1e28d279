//! Long work on a thread of its own, for as long as somebody waits for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::task::{JoinError, spawn_blocking};

/// Tells the work, when it is dropped, that nobody waits any more.
struct Waits(Arc<AtomicBool>);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs work that asks from time to time whether it is cancelled: it is once this future is dropped.
///
/// # Errors
/// If the work panics.
pub async fn cancellable<T: Send + 'static>(
    work: impl FnOnce(&dyn Fn() -> bool) -> T + Send + 'static,
) -> Result<T, JoinError> {
    let cancelled = Arc::new(AtomicBool::new(false));
    let _waits = Waits(Arc::clone(&cancelled));
    spawn_blocking(move || work(&|| cancelled.load(Ordering::Relaxed))).await
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread::yield_now;
    use std::time::Duration;

    use tokio::runtime::Builder;
    use tokio::time::timeout;

    use super::*;

    #[test]
    fn work_is_cancelled_when_nobody_waits_for_it() {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(waited_for_and_not());
    }

    async fn waited_for_and_not() {
        assert!(!cancellable(|is_cancelled| is_cancelled()).await.unwrap());
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let (ended, has_ended) = channel();
        let waiting = cancellable(move |is_cancelled| {
            begun.send(()).unwrap();
            while !is_cancelled() {
                yield_now();
            }
            ended.send(()).unwrap();
        });
        let mut waiting = Box::pin(waiting);
        tokio::select! {
            _ = &mut waiting => panic!("it ended by itself"),
            begun = has_begun => begun.unwrap(),
        }
        assert!(timeout(Duration::ZERO, &mut waiting).await.is_err());
        drop(waiting);
        has_ended.recv_timeout(Duration::from_secs(60)).unwrap();
    }
}
