//! The threads that compute.
//!
//! They treat [subnormal numbers](crate::subnormals) as zeros. All computation therefore runs on pools that are made
//! here, whatever the number of threads, by way of [`install`]. Other threads, including rayon's global pool, are not
//! changed: users' tables, and the libraries that process them, keep subnormal numbers.

use std::cell::Cell;
use std::sync::OnceLock;

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

use crate::subnormals::flush_for_good;

thread_local! {
    static COMPUTES: Cell<bool> = const { Cell::new(false) };
}

/// A pool of threads that compute: `count` of them, or, for 0, as many as rayon's own pool would have
/// (`RAYON_NUM_THREADS`). They are called `name` and a number.
pub fn pool(name: &str, count: usize) -> Result<ThreadPool, ThreadPoolBuildError> {
    let name = name.to_owned();
    ThreadPoolBuilder::new()
        .num_threads(count)
        .thread_name(move |thread| format!("{name}-{thread}"))
        .start_handler(|_| {
            flush_for_good();
            COMPUTES.set(true);
        })
        .build()
}

/// Runs `work` on threads that compute: in the pool of this thread if it is one of them, else in one that the whole process
/// shares.
///
/// Call it once around a whole computation: otherwise each of the thousands of parallel loops of a training step would
/// be injected into the pool from outside and waited for, which costs system calls.
///
/// # Panics
///
/// Where the threads of the shared pool cannot be started, as rayon does for its own.
pub fn install<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    static SHARED: OnceLock<ThreadPool> = OnceLock::new();
    if COMPUTES.get() {
        return work();
    }
    let shared = SHARED.get_or_init(|| pool("compute", 0).expect("the threads that compute can be started"));
    shared.install(work)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subnormals::{are_flushed, kept};

    #[test]
    fn every_thread_of_every_pool_flushes_and_no_other_one() {
        let supported = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));
        let all = |found: Vec<bool>| found.iter().all(|flushed| *flushed == supported);
        for count in [1, 2, 5] {
            let pool = pool("test", count).unwrap();
            let found = pool.broadcast(|_| are_flushed());
            assert_eq!(found.len(), count);
            assert!(all(found));
            // Within a pool its own threads are used, and the setting is restored after a call of foreign code.
            pool.install(|| {
                assert_eq!(install(rayon::current_num_threads), count);
                assert!(!kept(are_flushed));
                assert!(all(install(|| rayon::broadcast(|_| are_flushed()))));
            });
        }
        assert!(all(install(|| rayon::broadcast(|_| are_flushed()))));
        assert!(!are_flushed());
        assert!(rayon::broadcast(|_| are_flushed()).iter().all(|flushed| !flushed));
        assert!(install(|| std::thread::current()
            .name()
            .unwrap()
            .starts_with("compute-")));
    }
}
