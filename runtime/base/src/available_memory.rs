//! How much memory this process may use.

use std::path::Path;

/// Bytes that this process may still use: the memory that the system has available, or less where a control group (a
/// container) sets a limit. None where the system does not report it.
pub fn available_memory() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok();
    let system = meminfo.as_deref().and_then(available_in);
    let group = [
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ]
    .into_iter()
    .find_map(|(limit, used)| Some(number(Path::new(limit))?.saturating_sub(number(Path::new(used))?)));
    match (system, group) {
        (Some(system), Some(group)) => Some(system.min(group)),
        (one, other) => one.or(other),
    }
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn available_in(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The number that a file holds; none for `max`, which means no limit.
fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read() {
        let text = "MemTotal:       24614512 kB\nMemFree: 1 kB\nMemAvailable:   22000000 kB\n";
        assert_eq!(available_in(text), Some(22_000_000 * 1024));
        for wrong in [
            "",
            "MemAvailable:",
            "MemAvailable: many kB",
            "MemAvailable: 99999999999999999999 kB",
        ] {
            assert_eq!(available_in(wrong), None, "{wrong}");
        }
        // The machine that runs the tests.
        assert!(available_memory().is_none_or(|bytes| bytes > 1 << 20));
    }
}
