//! This machine: its name, its cores.

/// The name of this machine, or words that say that it is unknown.
pub fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .ok()
        .or_else(|| std::env::var("HOSTNAME").ok())
        .map(|name| name.trim().to_string())
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "unknown host".into())
}

/// How many threads run at the same time.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_machine_has_a_name_and_a_core() {
        assert!(!super::host_name().is_empty());
        assert!(super::cores() > 0);
    }
}
