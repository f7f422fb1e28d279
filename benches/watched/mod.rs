//! A process of `flow run --watch`, and how long it takes to take up a new shard.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Seconds for which nothing must have changed before a change is taken up.
pub const SETTLE: f64 = 0.2;

/// What is waited for comes within this time, or never.
const LONGEST: Duration = Duration::from_secs(300);

/// A watching process, ended when this is dropped.
pub struct Watching {
    process: Child,
    events: PathBuf,
    manifest: PathBuf,
}

/// What taking up a change took.
pub struct TakenUp {
    /// Seconds from the change until the new set was on the disk, with [`SETTLE`].
    pub wall: f64,
    /// Milliseconds for the decisions, of all stages.
    pub decide: f64,
    /// Resident memory afterwards, and its peak so far, in MiB.
    pub resident: f64,
    pub peak: f64,
}

impl Watching {
    /// Starts `flow run ...` with `--watch`, and waits until it has run once and holds its key rows. `out` receives its set.
    pub fn start(mut flow: Command, events: &Path, out: &Path) -> Watching {
        let _ = std::fs::remove_file(events);
        flow.args(["--watch", "--settle", &SETTLE.to_string(), "--events"])
            .arg(events);
        let process = flow.stdout(Stdio::null()).spawn().expect("flow runs");
        let mut watching = Watching {
            process,
            events: events.to_path_buf(),
            manifest: out.join("flow.json"),
        };
        watching.wait("its first run", |watching| watching.told("run_finished") == 1);
        // Key rows are loaded after the run: until it does nothing more.
        let mut before = -1.0;
        watching.wait("its dataflows", |watching| {
            std::thread::sleep(Duration::from_millis(500));
            let now = watching.cpu();
            std::mem::replace(&mut before, now) == now
        });
        watching
    }

    fn wait(&mut self, what: &str, mut is_there: impl FnMut(&Self) -> bool) {
        let begun = Instant::now();
        while !is_there(self) {
            let ended = self.process.try_wait().expect("the state of a child");
            assert!(ended.is_none(), "flow ended while it was waited for {what}");
            assert!(begun.elapsed() < LONGEST, "{what} did not come");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.events).unwrap_or_default()
    }

    /// How many events there are of a kind.
    fn told(&self, kind: &str) -> usize {
        self.text().matches(&format!("\"{kind}\"")).count()
    }

    /// CPU seconds of the process, in hundredths.
    fn cpu(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap_or_default();
        let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        fields
            .skip(11)
            .take(2)
            .filter_map(|ticks| ticks.parse::<f64>().ok())
            .sum()
    }

    fn memory(&self, what: &str) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix(what));
        let kibibytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
        kibibytes.map_or(f64::NAN, |kibibytes| kibibytes / 1024.0)
    }

    /// Makes a change, and waits until its set is there.
    pub fn take_up(&mut self, change: impl FnOnce()) -> TakenUp {
        let before = std::fs::read(&self.manifest).expect("a set");
        let (told, runs) = (self.text().len(), self.told("run_finished"));
        let begun = Instant::now();
        change();
        let is_new = |watching: &Self| std::fs::read(&watching.manifest).is_ok_and(|now| now != before);
        self.wait("the new set", is_new);
        let wall = begun.elapsed().as_secs_f64();
        self.wait("the end of the run", |watching| watching.told("run_finished") > runs);
        let text = self.text();
        let decided = text[told..].split(" decided by changes in ").skip(1);
        let decided: Vec<f64> = decided
            .filter_map(|rest| rest.split(' ').next()?.parse().ok())
            .collect();
        assert!(!decided.is_empty(), "nothing was decided by changes");
        TakenUp {
            wall,
            decide: decided.iter().sum(),
            resident: self.memory("VmRSS"),
            peak: self.memory("VmHWM"),
        }
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        // SAFETY: sends a signal to the child, which is not waited for yet, so that its id is no other process's.
        unsafe { libc::kill(self.process.id() as i32, libc::SIGTERM) };
        let _ = self.process.wait();
    }
}
