//! Checks cores, memory, vector instructions, limits of open files, and external programs.

use std::path::{Path, PathBuf};

use flow_training::memory::gigabytes;

use super::check::Check;

/// Memory below which little can be trained.
const LITTLE_MEMORY: u64 = 2_000_000_000;
/// Files that a run may have open at once: a shard's three, for every worker, and those of many ranks.
const FEW_FILES: u64 = 1024;

pub fn cores() -> Check {
    let name = "cores";
    // Counted as for the threads of a run: the cores that this process may run on, limited by a quota in whole cores.
    let usable = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    // SAFETY: the function takes a number and reads no memory of ours.
    let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    let quota = quota(&|path| std::fs::read_to_string(path).ok());
    let threads = std::env::var("RAYON_NUM_THREADS")
        .ok()
        .and_then(|text| text.parse().ok());
    core_check(name, usable, usize::try_from(online).ok(), quota, threads)
}

fn core_check(name: &str, usable: usize, online: Option<usize>, quota: Option<f64>, threads: Option<usize>) -> Check {
    let mut found = format!("{usable} usable");
    if let Some(online) = online.filter(|online| *online != usable) {
        found.push_str(&format!(" of {online}"));
    }
    if let Some(quota) = quota {
        found.push_str(&format!(", the container's quota is {quota:.1}"));
    }
    if let Some(threads) = threads.filter(|threads| *threads > usable) {
        return Check::warn(
            name,
            format!("{found}, and RAYON_NUM_THREADS is {threads}"),
            "threads beyond the cores wait for each other: unset RAYON_NUM_THREADS, or lower it",
        );
    }
    match quota {
        Some(quota) if quota < usable as f64 => Check::warn(
            name,
            found,
            format!(
                "threads beyond the quota are stopped for parts of each second: set RAYON_NUM_THREADS and --workers to {}",
                (quota as usize).max(1)
            ),
        ),
        _ => Check::ok(name, found),
    }
}

/// The CPU quota of the control group, version 2 or 1, in cores.
fn quota(read: &dyn Fn(&str) -> Option<String>) -> Option<f64> {
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|number| *number > 0.0);
    if let Some(text) = read("/sys/fs/cgroup/cpu.max") {
        let (time, period) = text.trim().split_once(' ')?;
        // Without a limit it says `max`.
        return Some(number(time)? / number(period)?);
    }
    let time = number(&read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")?)?;
    Some(time / number(&read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")?)?)
}

pub fn memory() -> Check {
    let name = "memory";
    let Some(available) = flow_kind::available_memory() else {
        return Check::warn(
            name,
            "the system does not say how much is available",
            "`flow memory PIPELINE` says how much training needs",
        );
    };
    let mut found = format!("{} available", gigabytes(available));
    if let Some(total) = std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| total(&text))
    {
        found.push_str(&format!(" of {}", gigabytes(total)));
    }
    let limits = [
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ];
    let limit = limits.into_iter().find_map(|path| {
        let limit: u64 = std::fs::read_to_string(path).ok()?.trim().parse().ok()?;
        // Version 1 has a very large number where there is no limit.
        (limit < 1 << 60).then_some(limit)
    });
    if let Some(limit) = limit {
        found.push_str(&format!(", the container's limit is {}", gigabytes(limit)));
    }
    if available < LITTLE_MEMORY {
        let help =
            "end other programs or raise the container's limit; `flow memory PIPELINE` says how much training needs";
        return Check::warn(name, found, help);
    }
    Check::ok(name, found)
}

/// `MemTotal` of `/proc/meminfo`, in bytes.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

pub fn vectors() -> Check {
    let name = "vector instructions";
    let all = instructions();
    let there: Vec<&str> = all.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect();
    let missing: Vec<&str> = all.iter().filter(|(_, there)| !there).map(|(name, _)| *name).collect();
    let mut found = match there.as_slice() {
        [] => "none that are known".to_string(),
        there => there.join(", "),
    };
    if !missing.is_empty() {
        found.push_str(&format!("; not {}", missing.join(", ")));
    }
    if cfg!(target_arch = "x86_64") && (missing.contains(&"AVX2") || missing.contains(&"FMA")) {
        return Check::warn(
            name,
            found,
            "training takes several times as long: use a processor with AVX2 and FMA",
        );
    }
    Check::ok(name, found)
}

#[cfg(target_arch = "x86_64")]
fn instructions() -> Vec<(&'static str, bool)> {
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    vec![
        ("AVX2", is_x86_feature_detected!("avx2")),
        ("FMA", is_x86_feature_detected!("fma")),
        ("AVX-512", avx512),
        ("AVX512-BF16", is_x86_feature_detected!("avx512bf16")),
        (
            "VNNI",
            is_x86_feature_detected!("avx512vnni") || is_x86_feature_detected!("avxvnni"),
        ),
    ]
}

#[cfg(target_arch = "aarch64")]
fn instructions() -> Vec<(&'static str, bool)> {
    vec![("NEON", std::arch::is_aarch64_feature_detected!("neon"))]
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn instructions() -> Vec<(&'static str, bool)> {
    Vec::new()
}

pub fn open_files() -> Check {
    let name = "open files";
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the limit is ours, and as large as the function writes.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        let error = std::io::Error::last_os_error();
        return Check::warn(
            name,
            format!("the limit cannot be read: {error}"),
            "look at `ulimit -n`",
        );
    }
    file_check(name, limit.rlim_cur, limit.rlim_max)
}

fn file_check(name: &str, soft: u64, hard: u64) -> Check {
    let shown = |limit: u64| match limit {
        libc::RLIM_INFINITY => "any number".to_string(),
        limit => limit.to_string(),
    };
    let found = format!("{} at once, at most {}", shown(soft), shown(hard));
    if soft < FEW_FILES {
        let help = if hard > soft {
            format!("raise it: `ulimit -n {}`", hard.min(65_536))
        } else {
            "ask who runs this machine for more".into()
        };
        return Check::warn(name, found, help);
    }
    Check::ok(name, found)
}

pub fn espeak() -> Check {
    let name = "espeak-ng";
    let path = std::env::var_os("PATH").unwrap_or_default();
    match in_path(&path, "espeak-ng") {
        Some(program) => Check::ok(name, program.display().to_string()),
        None => Check::warn(
            name,
            "not found in PATH",
            "only pipelines/synthesize.yaml needs it: `apt-get install espeak-ng`",
        ),
    }
}

/// The first program of this name that may be run.
fn in_path(path: &std::ffi::OsStr, name: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let may_be_run = |file: &Path| {
        std::fs::metadata(file).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(path)
        .map(|folder| folder.join(name))
        .find(|file| may_be_run(file))
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn quotas_of_both_versions_are_read() {
        let v2 = |text: &'static str| quota(&move |path| path.ends_with("cpu.max").then(|| text.to_string()));
        assert_eq!(v2("150000 100000\n"), Some(1.5));
        for without in ["max 100000\n", "", "0 100000", "1", "x y"] {
            assert_eq!(v2(without), None, "{without}");
        }
        let v1 = |time: &'static str| {
            quota(&move |path| match path.rsplit('/').next()? {
                "cpu.cfs_quota_us" => Some(time.to_string()),
                "cpu.cfs_period_us" => Some("100000\n".to_string()),
                _ => None,
            })
        };
        assert_eq!((v1("400000\n"), v1("-1\n")), (Some(4.0), None));
        assert_eq!(quota(&|_| None), None);
    }

    #[test]
    fn more_threads_than_cores_are_warned_of() {
        let check = |usable, quota, threads| core_check("cores", usable, Some(16), quota, threads);
        assert_eq!(check(16, None, Some(16)), Check::ok("cores", "16 usable"));
        let fine = check(2, Some(2.0), None);
        assert_eq!(fine, Check::ok("cores", "2 usable of 16, the container's quota is 2.0"));
        let throttled = check(16, Some(1.5), None);
        assert_eq!(throttled.state, State::Warn);
        assert!(throttled.help.unwrap().ends_with("to 1"));
        assert_eq!(check(2, None, Some(3)).state, State::Warn);
    }

    #[test]
    fn few_open_files_are_warned_of() {
        assert_eq!(file_check("f", 1024, 1024).state, State::Ok);
        let low = file_check("f", 256, libc::RLIM_INFINITY);
        assert_eq!(low.found, "256 at once, at most any number");
        assert_eq!(low.help.as_deref(), Some("raise it: `ulimit -n 65536`"));
        assert!(file_check("f", 256, 256).help.unwrap().starts_with("ask"));
        // The machine that runs the tests.
        assert!(!open_files().found.contains("cannot be read"));
    }

    #[test]
    fn programs_are_found_where_they_may_be_run() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = ["a", "b"].map(|name| folder.path().join(name));
        for (path, mode) in [(&first, 0o644), (&second, 0o755)] {
            std::fs::create_dir(path).unwrap();
            std::fs::write(path.join("speak"), "").unwrap();
            std::fs::set_permissions(path.join("speak"), std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let path = std::env::join_paths([&first, &second]).unwrap();
        assert_eq!(in_path(&path, "speak"), Some(second.join("speak")));
        assert_eq!(in_path(&path, "other"), None);
    }

    #[test]
    fn this_machine_is_looked_at() {
        assert!(cores().found.contains("usable"));
        assert_eq!(total("MemTotal:  24 kB\n"), Some(24 * 1024));
        assert_eq!(total("MemTotal: many kB\n"), None);
        assert!(!memory().found.is_empty());
        assert!(!vectors().found.is_empty());
    }
}
