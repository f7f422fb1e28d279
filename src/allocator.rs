//! The allocator of the program, and how long it keeps memory that was freed.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Number of mimalloc's option `purge_delay` in all of its versions 2 and 3.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// Milliseconds after which freed memory goes back to the system. Training frees and asks for the same large tensors at
/// every step; with mimalloc's own 10 ms half of the processor's time went into clearing pages that had just been given
/// away.
const KEEP_MILLISECONDS: std::ffi::c_long = 10_000;

/// Keeps freed memory longer, unless the environment says otherwise (`MIMALLOC_PURGE_DELAY`).
pub fn keep_freed_memory() {
    if std::env::var_os("MIMALLOC_PURGE_DELAY").is_none() {
        // SAFETY: the function takes two numbers, may be called at any time from any thread, and ignores options that
        // it does not know.
        unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, KEEP_MILLISECONDS) };
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn freed_memory_is_kept_unless_the_environment_says_otherwise() {
        super::keep_freed_memory();
        // SAFETY: as above.
        let delay = unsafe { libmimalloc_sys::mi_option_get(super::PURGE_DELAY) };
        let asked = std::env::var("MIMALLOC_PURGE_DELAY").ok();
        assert_eq!(
            delay,
            asked.map_or(super::KEEP_MILLISECONDS, |text| text.parse().unwrap())
        );
        let block = vec![1u8; 64 << 20];
        drop(block);
    }
}
