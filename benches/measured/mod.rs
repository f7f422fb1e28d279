//! Time and memory of a process, for benchmarks that compare programs.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Time and memory of a process.
pub struct Measured {
    /// Seconds from its start to its end.
    pub wall: f64,
    /// Seconds of all its threads, the system's included.
    pub cpu: f64,
    /// Peak resident memory.
    pub mebibytes: f64,
    /// The last line that it printed.
    pub said: String,
}

/// Runs a process to its end; none if it fails.
pub fn measure(mut command: Command) -> Option<Measured> {
    let begun = Instant::now();
    let child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().ok()?;
    let id = child.id() as i32;
    let mut output = child.stdout?;
    let mut said = String::new();
    std::io::Read::read_to_string(&mut output, &mut said).ok()?;
    let mut status = 0;
    // SAFETY: `rusage` is plain numbers, for which zeros are values; wait4 writes to the two places that it is given,
    // which live until it returns, and the child is waited for by nobody else (its handle is gone).
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        if libc::wait4(id, &mut status, 0, &mut usage) != id {
            return None;
        }
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    std::process::ExitStatus::from_raw(status).success().then(|| Measured {
        wall: begun.elapsed().as_secs_f64(),
        cpu: seconds(usage.ru_utime) + seconds(usage.ru_stime),
        mebibytes: usage.ru_maxrss as f64 / 1024.0,
        said: said.trim().lines().last().unwrap_or_default().to_string(),
    })
}

/// The Python that has the packages of peers: `FLOW_BENCH_PYTHON`, or `python3`.
pub fn python() -> String {
    std::env::var("FLOW_BENCH_PYTHON").unwrap_or_else(|_| "python3".into())
}

/// Whether that Python has a package; prints a note if not.
pub fn installed(package: &str) -> bool {
    let python = python();
    let mut import = Command::new(&python);
    import.args(["-c", &format!("import {package}")]);
    let found = import
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !found {
        println!("{package}: not installed for {python}; left out");
    }
    found
}
