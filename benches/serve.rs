//! `flow serve` with 1, 4, 16 and 64 clients, and with short clips during a long recording, compared with services that
//! use NeMo and onnx-asr, in the same run on the same machine, each in a separate process with two threads.
//!
//! `cargo bench --bench serve -- ROUNDS` (default 1; the best of each counts). The clips, 2 to 12 seconds long, are cut
//! from the bundled corpus by a seed. Peers run where `FLOW_BENCH_PYTHON` (or `python3`) has their packages and
//! fastapi, uvicorn and python-multipart; onnx-asr also needs NeMo, which exports the model for it. A running service,
//! such as `speaches`, is measured if `FLOW_BENCH_SERVICE` is its address (`http://127.0.0.1:8000`) and
//! `FLOW_BENCH_SERVICE_MODEL` its model. Prints clips and seconds of audio for each second, percentiles of the response
//! time, and two ratios with targets: throughput of 16 clients to that of one, and the 95th percentile during a long
//! recording to that without.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use flow_random::SplitMix64;

#[allow(dead_code, reason = "other benchmarks use the rest")]
mod measured;
mod peers;
mod recordings;
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../tests/end_to_end/served.rs"]
mod served;

use measured::installed;
use peers::{THREADS, exported, peer, rounds};
use recordings::{RATE, clips, long, wav};
use served::{Served, TRANSCRIPTIONS, agent, content_type, form, post, raw_post};

const SEED: u64 = 23;
const CLIPS: usize = 64;
/// Of each number of clients; those beside a long recording are `CLIPS`.
const REQUESTS: usize = 256;
const CLIENTS: [usize; 4] = [1, 4, 16, 64];
/// The longest time for an answer, and for a peer to load its model.
const LIMIT: Duration = Duration::from_secs(1200);

/// Target: least ratio of the throughput of 16 clients to that of one.
const THROUGHPUT_MARK: f64 = 1.5;
/// Target: largest ratio of the 95th percentile of short clips during a long recording to that without.
const LATENCY_MARK: f64 = 3.0;

/// A service, and its requests.
struct Service {
    name: &'static str,
    url: String,
    /// None: it was already running.
    process: Option<Served>,
    /// Sent as the field `model`.
    model: Option<String>,
    /// Minutes of the long recording.
    long: usize,
}

struct Clip {
    wav: Vec<u8>,
    seconds: f64,
}

/// Requests of some clients, each of which sends one after the other.
struct Level {
    wall: f64,
    /// Of audio that was transcribed.
    seconds: f64,
    /// To the whole answer, the shortest first.
    latencies: Vec<f64>,
}

impl Level {
    fn throughput(&self) -> f64 {
        self.latencies.len() as f64 / self.wall
    }

    /// The percentile of the latencies.
    fn percentile(&self, percent: usize) -> f64 {
        let rank = (self.latencies.len() * percent).div_ceil(100).max(1);
        self.latencies.get(rank - 1).copied().unwrap_or(f64::NAN)
    }
}

/// Clips of 2 to 12 seconds, cut from the bundled corpus.
fn short_clips(corpus: &[Vec<f32>]) -> Vec<Clip> {
    let mut draw = SplitMix64::new(SEED);
    let mut clip = || {
        let length = 2 * RATE + draw.below(10 * RATE);
        let first = draw.below(corpus.len());
        let rotated: Vec<Vec<f32>> = corpus.iter().cycle().skip(first).take(12).cloned().collect();
        Clip {
            wav: wav(&long(&rotated, length)),
            seconds: length as f64 / RATE as f64,
        }
    };
    (0..CLIPS).map(|_| clip()).collect()
}

/// The forms of the clips for a service.
fn forms(service: &Service, clips: &[Clip]) -> Vec<Vec<u8>> {
    clips.iter().map(|clip| form_of(service, &clip.wav)).collect()
}

fn form_of(service: &Service, wav: &[u8]) -> Vec<u8> {
    let model = service.model.as_deref().map(|model| ("model", model));
    form(Some(wav), model.as_slice())
}

/// `requests` requests of so many clients. `texts` are those of the clips when they were first transcribed; `different` counts
/// the answers with another one.
fn level(
    service: &Service,
    clips: &[Clip],
    forms: &[Vec<u8>],
    (clients, requests): (usize, usize),
    texts: &[OnceLock<String>],
    different: &AtomicUsize,
) -> Result<Level, String> {
    let next = AtomicUsize::new(0);
    let url = format!("{}{TRANSCRIPTIONS}", service.url);
    let client = || {
        let agent = agent(LIMIT);
        let mut latencies = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= requests {
                return Ok(latencies);
            }
            let begin = Instant::now();
            let answer = post(&agent, &url, &content_type(), &forms[number % forms.len()]);
            let answer = answer.map_err(|error| error.to_string())?;
            latencies.push(begin.elapsed().as_secs_f64());
            let body: Option<serde_json::Value> = serde_json::from_str(&answer.text).ok();
            let text = body.as_ref().and_then(|body| body["text"].as_str());
            let (200, Some(text)) = (answer.status, text) else {
                return Err(format!("{}: {}", answer.status, answer.text));
            };
            if texts[number % texts.len()].get_or_init(|| text.to_owned()) != text {
                different.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    let begin = Instant::now();
    let parts: Result<Vec<Vec<f64>>, String> = thread::scope(|scope| {
        let threads: Vec<_> = (0..clients).map(|_| scope.spawn(client)).collect();
        let ended = threads.into_iter().map(|thread| thread.join().expect("a client"));
        // All are waited for, also where one fails.
        let parts: Vec<Result<Vec<f64>, String>> = ended.collect();
        parts.into_iter().collect()
    });
    let wall = begin.elapsed().as_secs_f64();
    let mut latencies = parts?.concat();
    latencies.sort_by(f64::total_cmp);
    let seconds = (0..requests).map(|number| clips[number % clips.len()].seconds).sum();
    Ok(Level {
        wall,
        seconds,
        latencies,
    })
}

/// Sends a long recording repeatedly until it is stopped, and then disconnects without waiting for the response.
fn send_long(service: &Service, request: &[u8], sent: &AtomicBool, stop: &AtomicBool) -> Result<usize, String> {
    let address = service.url.trim_start_matches("http://");
    let failed = |error: std::io::Error| format!("the long recording: {error}");
    let mut done = 0;
    loop {
        let mut stream = TcpStream::connect(address).map_err(failed)?;
        stream.write_all(request).map_err(failed)?;
        sent.store(true, Ordering::Relaxed);
        stream
            .set_read_timeout(Some(Duration::from_millis(50)))
            .map_err(failed)?;
        let mut answer = Vec::new();
        let mut block = [0; 4096];
        loop {
            match stream.read(&mut block) {
                Ok(0) => break,
                Ok(count) => answer.extend_from_slice(&block[..count]),
                Err(error)
                    if matches!(
                        error.kind(),
                        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                    ) => {}
                Err(error) => return Err(failed(error)),
            }
            if stop.load(Ordering::Relaxed) {
                return Ok(done);
            }
        }
        if !answer.starts_with(b"HTTP/1.1 200") {
            let line = String::from_utf8_lossy(&answer);
            return Err(format!(
                "the long recording: {}",
                line.lines().next().unwrap_or_default()
            ));
        }
        done += 1;
    }
}

fn better(best: Option<Level>, now: Level) -> Option<Level> {
    match best {
        Some(best) if best.wall <= now.wall => Some(best),
        _ => Some(now),
    }
}

fn mark(met: bool) -> &'static str {
    if met { "met" } else { "missed" }
}

/// Measures a service, and prints the results.
fn measure(service: &Service, clips: &[Clip], corpus: &[Vec<f32>], rounds: usize) -> Result<(), String> {
    let forms = forms(service, clips);
    let texts: Vec<OnceLock<String>> = clips.iter().map(|_| OnceLock::new()).collect();
    let different = AtomicUsize::new(0);
    let run = |clients, requests| level(service, clips, &forms, (clients, requests), &texts, &different);
    // A warm-up, which gives the texts of the clips alone.
    run(1, CLIPS)?;
    let mut one: Option<f64> = None;
    for clients in CLIENTS {
        let mut best = None;
        for _ in 0..rounds {
            best = better(best, run(clients, REQUESTS)?);
        }
        let Some(best) = best else { continue };
        let base = *one.get_or_insert(best.throughput());
        let ratio = best.throughput() / base;
        let verdict = match clients {
            16 => format!(
                " (mark: at least {THROUGHPUT_MARK}: {})",
                mark(ratio >= THROUGHPUT_MARK)
            ),
            _ => String::new(),
        };
        println!(
            "{:10} {clients:3} clients: {:7.2} clips/s {:8.1} s of audio/s, p50 {:7.3} s, p95 {:7.3} s, {ratio:.2} times the \
             throughput of one{verdict}",
            service.name,
            best.throughput(),
            best.seconds / best.wall,
            best.percentile(50),
            best.percentile(95)
        );
    }

    let request = {
        let samples = long(corpus, service.long * 60 * RATE);
        raw_post(&service.url, &content_type(), &form_of(service, &wav(&samples)))
    };
    let (sent, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    let alone = run(1, CLIPS)?;
    let (beside, done) = thread::scope(|scope| {
        let long_client = scope.spawn(|| send_long(service, &request, &sent, &stop));
        while !sent.load(Ordering::Relaxed) && !long_client.is_finished() {
            thread::sleep(Duration::from_millis(5));
        }
        let beside = run(1, CLIPS);
        stop.store(true, Ordering::Relaxed);
        (beside, long_client.join().expect("the client with the long recording"))
    });
    let (beside, done) = (beside?, done?);
    let ratio = beside.percentile(95) / alone.percentile(95);
    println!(
        "{:10} short clips beside {} min, sent again when it was done ({done} times): p50 {:.3} s, p95 {:.3} s; alone {:.3} s, \
         {:.3} s: {ratio:.2} times the p95 (mark: at most {LATENCY_MARK}: {})",
        service.name,
        service.long,
        beside.percentile(50),
        beside.percentile(95),
        alone.percentile(50),
        alone.percentile(95),
        mark(ratio <= LATENCY_MARK)
    );
    let memory = service
        .process
        .as_ref()
        .map(|process| process.kibibytes("VmHWM") / 1024);
    println!(
        "{:10} peak memory {}; {} answers had another text than the clip by itself",
        service.name,
        memory.map_or("not known".to_owned(), |mebibytes| format!("{mebibytes} MiB")),
        different.into_inner()
    );
    Ok(())
}

fn flow(root: &Path) -> Command {
    let mut flow = Command::new(env!("CARGO_BIN_EXE_flow"));
    flow.args(["serve", "--listen", "127.0.0.1:0", "--model"]);
    flow.arg(root.join("configs/models/small.nemo"));
    flow.env("RAYON_NUM_THREADS", THREADS);
    flow
}

/// The name of the processor, and how many of them there are.
fn machine() -> String {
    let information = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = information
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or("an unknown processor", |(_, model)| model.trim());
    let processors = thread::available_parallelism().map_or(0, usize::from);
    format!("{processors} processors of {model}")
}

fn main() {
    let rounds = rounds();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("{}; load before: {}; best of {rounds}", machine(), load.trim());
    let corpus = clips(root);
    let clips = short_clips(&corpus);
    let seconds: f64 = clips.iter().map(|clip| clip.seconds).sum();
    println!("{CLIPS} clips of {seconds:.0} s together, {REQUESTS} requests for each number of clients, seed {SEED}");

    let mut processes = vec![("flow", flow(root), 60)];
    let serves = ["fastapi", "uvicorn", "python_multipart"]
        .map(installed)
        .iter()
        .all(|found| *found);
    let nemo = installed("nemo.collections.asr");
    if serves && nemo {
        let mut command = peer("serve_nemo.py", root);
        command.arg(root.join("configs/models/small.nemo"));
        // It processes a recording as a whole: its memory grows with the square of the length.
        processes.push(("NeMo", command, 10));
    }
    // The folder of the other benchmark, which exports it as well.
    let onnx = root.join("work/bench/transcribe/onnx");
    if serves && installed("onnx_asr") && exported(root, &onnx, nemo) {
        let mut command = peer("serve_onnx_asr.py", root);
        command.arg(&onnx);
        processes.push(("onnx-asr", command, 10));
    }
    for (name, command, long) in processes {
        let process = match Served::start(command, LIMIT) {
            Ok(process) => process,
            Err(error) => {
                println!("{name}: left out: {error}");
                continue;
            }
        };
        let service = Service {
            name,
            url: process.url.clone(),
            process: Some(process),
            model: None,
            long,
        };
        if let Err(error) = measure(&service, &clips, &corpus, rounds) {
            println!("{name} failed: {error}");
        }
    }
    if let Ok(url) = std::env::var("FLOW_BENCH_SERVICE") {
        let service = Service {
            name: "other",
            url: url.trim_end_matches('/').to_owned(),
            process: None,
            model: std::env::var("FLOW_BENCH_SERVICE_MODEL").ok(),
            long: 10,
        };
        if let Err(error) = measure(&service, &clips, &corpus, rounds) {
            println!("{url} failed: {error}");
        }
    } else {
        println!("no other service: FLOW_BENCH_SERVICE and FLOW_BENCH_SERVICE_MODEL name one");
    }
}
