//! A peer process that times one run of a case when asked, and the comparison with one of our functions.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use flow_model::Result;
use serde_json::Value;

pub struct Peer {
    running: Option<(Child, ChildStdin, BufReader<ChildStdout>)>,
}

/// Seconds.
#[derive(Clone, Copy)]
pub struct Time {
    pub wall: f64,
    pub cpu: f64,
}

impl Time {
    const NEVER: Time = Time {
        wall: f64::INFINITY,
        cpu: f64::INFINITY,
    };

    fn best(self, other: Time) -> Time {
        Time {
            wall: self.wall.min(other.wall),
            cpu: self.cpu.min(other.cpu),
        }
    }
}

impl Peer {
    /// Starts a script of `benches/peers`; a peer that does not start is left out.
    pub fn start(script: &str) -> Peer {
        let python = std::env::var("FLOW_BENCH_PYTHON").unwrap_or_else(|_| "python3".into());
        let threads = std::env::var("RAYON_NUM_THREADS").unwrap_or_else(|_| "1".into());
        let child = Command::new(&python)
            .arg(format!("{}/benches/peers/{script}", env!("CARGO_MANIFEST_DIR")))
            .arg(&threads)
            .env("OMP_NUM_THREADS", &threads)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let running = child.ok().and_then(|mut child| {
            let (input, output) = (child.stdin.take()?, child.stdout.take()?);
            Some((child, input, BufReader::new(output)))
        });
        let mut peer = Peer { running };
        match peer.answer() {
            Some(hello) => println!("{script}: torch {}, {threads} thread(s)", hello["torch"]),
            None => {
                println!("{script}: {python} does not run it; left out");
                peer.running = None;
            }
        }
        peer
    }

    fn answer(&mut self) -> Option<Value> {
        let (_, _, output) = self.running.as_mut()?;
        loop {
            let mut line = String::new();
            if output.read_line(&mut line).ok()? == 0 {
                return None;
            }
            // Libraries talk on standard output too.
            if let Ok(value) = serde_json::from_str::<Value>(&line) {
                return Some(value);
            }
        }
    }

    /// One run of a case, and what it reported; none if the peer is left out or failed.
    pub fn run(&mut self, case: &str) -> Option<(Time, Value)> {
        let (_, input, _) = self.running.as_mut()?;
        writeln!(input, "{case}").ok()?;
        input.flush().ok()?;
        let Some(answer) = self.answer() else {
            println!("peer failed at `{case}`");
            self.running = None;
            return None;
        };
        let time = Time {
            wall: answer["wall"].as_f64().unwrap_or(f64::NAN),
            cpu: answer["cpu"].as_f64().unwrap_or(f64::NAN),
        };
        Some((time, answer))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some((mut child, input, _)) = self.running.take() {
            drop(input);
            child.wait().ok();
        }
    }
}

/// CPU seconds of this process so far.
fn cpu_seconds() -> f64 {
    // SAFETY: getrusage writes the whole struct that it is given, and zero is a valid value of each of its fields.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Greatest memory of this process so far, in bytes.
pub fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}

pub fn rounds() -> usize {
    std::env::var("FLOW_BENCH_ROUNDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(5)
}

/// Runs ours and the peer's in turns, prints the best of both and their ratio, and gives them back.
///
/// Short functions run several times per round, as clocks and neighbours disturb them more.
pub fn compare(
    name: &str,
    peer: &mut Peer,
    case: &str,
    mut ours: impl FnMut() -> Result<()>,
) -> Result<(Time, Option<Time>)> {
    let once = |ours: &mut dyn FnMut() -> Result<()>| -> Result<Time> {
        let (cpu, start) = (cpu_seconds(), Instant::now());
        ours()?;
        Ok(Time {
            wall: start.elapsed().as_secs_f64(),
            cpu: cpu_seconds() - cpu,
        })
    };
    let first = once(&mut ours)?;
    let repeats = ((0.05 / first.wall) as usize).clamp(1, 50);
    let (mut best, mut other) = (Time::NEVER, None::<Time>);
    for _ in 0..rounds() {
        for _ in 0..repeats {
            best = best.best(once(&mut ours)?);
        }
        for _ in 0..repeats {
            match peer.run(case) {
                Some((time, _)) => other = Some(other.unwrap_or(Time::NEVER).best(time)),
                None => break,
            }
        }
    }
    let show = |time: Time| format!("{:8.2} /{:8.2}", time.wall * 1e3, time.cpu * 1e3);
    match other {
        Some(other) => println!(
            "{name:34} {:>18} {:>18} {:>8.2}",
            show(best),
            show(other),
            other.wall / best.wall
        ),
        None => println!("{name:34} {:>18}", show(best)),
    }
    Ok((best, other))
}
