//! Process-wide settings that are made before anything else: the allocator, and the number of threads.

use flow_model::allocation::Counted;
use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: Counted<MiMalloc> = Counted(MiMalloc);

/// Number of mimalloc's option `purge_delay` in all of its versions 2 and 3.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// Milliseconds after which freed memory is returned to the system. Training frees and allocates the same large tensors
/// at every step; with mimalloc's default of 10 ms half of the CPU time was spent on clearing pages that had just been
/// returned. A corpus of millions of rows goes through the same memory stage after stage, some ten seconds each.
const KEEP_MILLISECONDS: std::ffi::c_long = 60_000;

/// Bytes up to which the C library's allocator keeps freed memory, and takes blocks from what it keeps. Zstandard makes a
/// context of some hundred kilobytes for every column chunk and frees it again; with the C library's defaults each time
/// pages are mapped and unmapped, which the kernel has to clear. 32 MiB is the largest value of the mmap threshold.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEEP_BYTES: std::ffi::c_int = 32 << 20;

/// The variable with the number of threads of rayon and of candle's matrix products.
const THREADS: &str = "RAYON_NUM_THREADS";

/// Sets up the process. To be called first in `main`.
pub fn set_up() {
    if std::env::var_os("MIMALLOC_PURGE_DELAY").is_none() {
        // SAFETY: the function takes two numbers, may be called at any time from any thread, and ignores options that
        // it does not know.
        unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, KEEP_MILLISECONDS) };
    }
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for setting in [libc::M_TRIM_THRESHOLD, libc::M_MMAP_THRESHOLD] {
        // SAFETY: the function takes two numbers, and refuses those that it does not know.
        unsafe { libc::mallopt(setting, KEEP_BYTES) };
    }
    // Where the variable is not set, candle reads /proc/cpuinfo at every single matrix product.
    if std::env::var_os(THREADS).is_none()
        && let Ok(threads) = std::thread::available_parallelism()
    {
        // SAFETY: `main` has not started a thread yet, so nobody reads the environment meanwhile.
        unsafe { std::env::set_var(THREADS, threads.to_string()) };
    }
}

#[cfg(test)]
mod tests {
    /// The blocks that the C library's allocator asked of the system one by one, here by the size of a context of zstd's.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn asked_one_by_one() -> usize {
        // SAFETY: a block is asked for, and freed once; the other function takes nothing.
        unsafe {
            let block = std::hint::black_box(libc::malloc(1 << 20));
            assert!(!block.is_null());
            let blocks = libc::mallinfo2().hblks;
            libc::free(block);
            blocks
        }
    }

    /// The only test of this program, so that no other thread reads the environment.
    #[test]
    fn freed_memory_is_kept_and_the_number_of_threads_is_told_unless_the_environment_says_otherwise() {
        let asked = std::env::var("MIMALLOC_PURGE_DELAY").ok();
        let threads = std::env::var(super::THREADS).ok();
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        let before = asked_one_by_one();
        super::set_up();
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        assert!(
            asked_one_by_one() < before,
            "a block of 1 MiB is still a mapping of its own"
        );
        // SAFETY: as above.
        let delay = unsafe { libmimalloc_sys::mi_option_get(super::PURGE_DELAY) };
        assert_eq!(
            delay,
            asked.map_or(super::KEEP_MILLISECONDS, |text| text.parse().unwrap())
        );
        let available = std::thread::available_parallelism().unwrap().to_string();
        assert_eq!(std::env::var(super::THREADS).ok(), threads.or(Some(available)));
    }
}
