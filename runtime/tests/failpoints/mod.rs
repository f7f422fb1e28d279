//! Actions of tests at failpoints.

use std::sync::atomic::{AtomicU64, Ordering};

/// Reads `name[:n]`: the process is killed when it passes that point for the n-th time (the first, if no number is given),
/// so that a test can look at what any crash leaves.
///
/// # Panics
/// When `points` has no such name, as the test would kill nothing.
pub fn kill_at(value: &str, points: &[&str]) -> impl Fn(&str) + Send + Sync + use<> {
    let (name, passes) = value.split_once(':').unwrap_or((value, "1"));
    let passes = passes.parse().ok().filter(|passes| *passes > 0);
    let passes_left = AtomicU64::new(passes.unwrap_or_else(|| panic!("`{value}` does not end with a number above 0")));
    assert!(points.contains(&name), "`{value}` names none of {points:?}");
    let name = name.to_string();
    move |point| {
        if point == name && passes_left.fetch_sub(1, Ordering::SeqCst) == 1 {
            // Not an exit: nothing may be flushed, dropped or cleaned up.
            // SAFETY: the call takes a number and touches no memory of this process.
            unsafe { libc::raise(libc::SIGKILL) };
        }
    }
}
