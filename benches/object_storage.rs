//! What object storage costs: recordings of a corpus are decoded and hashed (`audio.probe`) and extracted (`audio.extract`) by
//! `flow`, from a disk and from the server of S3's protocol that the tests have, on the same machine.
//!
//! `cargo bench --bench object_storage -- MEGABYTES SHARDS LATENCY RATE` (default: 300 in 12 shards, and answers that come as fast
//! as they can; otherwise LATENCY in milliseconds, and of each answer RATE megabytes a second). The server takes processor time of the same
//! cores, which is shown beside that of `flow`; a client of ours that throws away what it downloads shows the most that server and
//! client give.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::fs::{self, File};
use std::io::Cursor;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, Float64Array, RecordBatch, StringArray};
use flow_storage::{Location, Storage};
use flow_storage_testing::{Fault, FaultRule, TestServer};
use parquet::arrow::ArrowWriter;

#[allow(dead_code, reason = "it is there for other benches, too")]
mod measured;

use measured::{Measured, measure};

/// Times are the best of so many.
const ROUNDS: usize = 3;

/// Files of the bundled corpus that are decodable FLAC.
fn recordings() -> Vec<Vec<u8>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/corpus/mini/shards");
    let mut found = Vec::new();
    for lang in fs::read_dir(&corpus).expect("the bundled corpus").flatten() {
        for shard in fs::read_dir(lang.path()).into_iter().flatten().flatten() {
            let tar = shard.path().join(shard.file_name()).with_extension("tar");
            let Ok(bytes) = fs::read(&tar) else { continue };
            let mut archive = tar::Archive::new(Cursor::new(bytes));
            for member in archive.entries().expect("a tar").map_while(Result::ok) {
                let mut member = member;
                let mut bytes = Vec::new();
                let read = std::io::Read::read_to_end(&mut member, &mut bytes);
                if read.is_ok() && flow_audio::flac::probe(&bytes).is_ok() {
                    found.push(bytes);
                }
            }
        }
    }
    assert!(!found.is_empty(), "no recording in the bundled corpus");
    found
}

fn write(path: &Path, columns: Vec<(&str, ArrayRef)>) {
    let batch = RecordBatch::try_from_iter(columns).expect("columns of one length");
    let file = File::create(path).expect("a file of the corpus");
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None).expect("a parquet file");
    writer.write(&batch).expect("rows");
    writer.close().expect("the end of the file");
}

/// A shard of at least this many bytes. Gives their number.
fn shard(folder: &Path, name: &str, bytes: u64, recordings: &[Vec<u8>]) -> u64 {
    fs::create_dir_all(folder).expect("a folder of the corpus");
    let file = File::create(folder.join(name).with_extension("tar")).expect("a file of the corpus");
    let mut tar = tar::Builder::new(std::io::BufWriter::new(file));
    let (mut written, mut ids) = (0, Vec::new());
    for recording in recordings.iter().cycle() {
        if written >= bytes {
            break;
        }
        let id = format!("{name}_{:06}", ids.len());
        let mut header = tar::Header::new_ustar();
        header.set_size(recording.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, format!("{id}.flac"), recording.as_slice())
            .expect("room");
        written += recording.len() as u64;
        ids.push(id);
    }
    let finished = tar.into_inner().and_then(|file| file.into_inner().map_err(Into::into));
    finished.expect("room");
    let texts = |text: &dyn Fn(&String) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(ids.iter().map(text)))
    };
    let ones: ArrayRef = Arc::new(Float64Array::from(vec![1.0; ids.len()]));
    write(
        &folder.join("metadata.parquet"),
        vec![
            ("segment_id", texts(&String::clone)),
            ("duration_s", Arc::clone(&ones)),
            ("transcription_native", texts(&String::clone)),
            ("tx_quality_score", ones),
            ("segment_language", texts(&|_| "hi".into())),
        ],
    );
    write(
        &folder.join("audio_index.parquet"),
        vec![
            ("segment_id", texts(&String::clone)),
            ("tar_member_name", texts(&|id| format!("{id}.flac"))),
        ],
    );
    written
}

/// Puts all files below a folder into a bucket. The server keeps the ETag of what it was sent, and hashes files that were put into its
/// folder at each request.
fn upload(storage: &Storage, folder: &Path, prefix: &str) {
    for entry in fs::read_dir(folder).expect("the corpus").map_while(Result::ok) {
        let (path, name) = (entry.path(), entry.file_name());
        let url = format!("{prefix}/{}", name.to_str().expect("a name of text"));
        match path.is_dir() {
            true => upload(storage, &path, &url),
            false => {
                let Ok(Location::Object(url)) = Location::parse(&url) else {
                    panic!("{url} is not a URL")
                };
                let bytes = fs::read(&path).expect("a file of the corpus");
                storage.put(&url, bytes).expect("room in the bucket");
            }
        }
    }
}

/// Processor seconds of this process, which is the server.
fn own_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the name in brackets: fields 14 and 15 of the line, in hundredths.
    let after = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after.split_whitespace().skip(11).take(2);
    ticks.filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// What a run took, and what the server did meanwhile.
struct Run {
    flow: Measured,
    server: f64,
}

/// The best rounds of probing and of extracting, each in turns from a disk and from the server.
fn rounds(work: &Path, server: &TestServer, shards: &[&str; 2]) -> [[Option<Run>; 2]; 2] {
    let mut best: [[Option<Run>; 2]; 2] = Default::default();
    for round in 0..ROUNDS {
        for (at, shards) in shards.iter().enumerate() {
            let place = work.join(format!("round{round}-{at}"));
            for (step, only) in [Some("probe"), None].into_iter().enumerate() {
                let mut flow = Command::new(env!("CARGO_BIN_EXE_flow"));
                flow.current_dir(env!("CARGO_MANIFEST_DIR"));
                flow.args(["run", "benches/object_storage.yaml", "--progress", "none", "--state"]);
                flow.arg(place.join("state"))
                    .args(["--set", &format!("shards={shards}")]);
                flow.arg("--set")
                    .arg(format!("audio={}", place.join("audio").display()));
                flow.args(only.iter().flat_map(|stage| ["--only", stage]));
                flow.envs(server.environment());
                let before = own_seconds();
                let flow = measure(flow).expect("flow runs");
                let server = own_seconds() - before;
                let slot = &mut best[step][at];
                if slot.as_ref().is_none_or(|best| flow.wall < best.flow.wall) {
                    *slot = Some(Run { flow, server });
                }
            }
        }
    }
    best
}

/// Downloads all tars, on as many threads as there are cores, and throws them away. Wall and processor seconds, with the server's.
fn download(server: &TestServer, urls: &[String]) -> (f64, f64) {
    let storage = server.storage();
    let (next, bytes) = (AtomicUsize::new(0), AtomicU64::new(0));
    let (begun, before) = (Instant::now(), own_seconds());
    std::thread::scope(|scope| {
        for _ in 0..cores() {
            scope.spawn(|| {
                while let Some(url) = urls.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let Ok(Location::Object(url)) = Location::parse(url) else {
                        panic!("{url} is not a URL")
                    };
                    let object = storage.open(&url).expect("an object");
                    let mut take = |piece: &[u8]| {
                        bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
                        Ok(true)
                    };
                    object.copy_to(&mut take).expect("its bytes");
                }
            });
        }
    });
    assert!(bytes.into_inner() > 0);
    (begun.elapsed().as_secs_f64(), own_seconds() - before)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn main() {
    let numbers: Vec<u64> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let megabytes = numbers.first().copied().unwrap_or(300);
    let shards = numbers.get(1).copied().unwrap_or(12).max(1);
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let work = tempfile::tempdir().expect("a temporary folder");
    let (served, folder) = (work.path().join("served"), work.path().join("shards"));
    fs::create_dir_all(served.join("corpora")).expect("a bucket");
    let recordings = recordings();
    let name = |number: u64| format!("hi_{number:04}");
    let bytes: u64 = (0..shards)
        .map(|number| {
            let name = name(number);
            shard(
                &folder.join("hi").join(&name),
                &name,
                megabytes * 1_000_000 / shards,
                &recordings,
            )
        })
        .sum();
    let server = TestServer::start(&served).expect("a server");
    upload(&server.storage(), &folder, "s3://corpora/shards");
    if let (Some(milliseconds), Some(megabytes)) = (numbers.get(2), numbers.get(3)) {
        println!("answers come after {milliseconds} ms, each with {megabytes} MB/s");
        let slow = Fault::Slow {
            latency: Duration::from_millis(*milliseconds),
            bytes_per_second: megabytes.max(&1) * 1_000_000,
        };
        server.fault(FaultRule::always(slow, ""));
    }
    println!(
        "{:.0} MB in {shards} shards, {} cores; load of the machine before: {}",
        bytes as f64 / 1e6,
        cores(),
        load.trim()
    );
    let urls: Vec<String> = (0..shards)
        .map(|number| format!("s3://corpora/shards/hi/{0}/{0}.tar", name(number)))
        .collect();
    let raw = (0..ROUNDS).map(|_| download(&server, &urls));
    let (wall, cpu) = raw.reduce(|a, b| if a.0 < b.0 { a } else { b }).unwrap_or_default();
    println!(
        "downloaded and thrown away    {wall:6.2} s wall {:6.0} MB/s; {cpu:.2} s CPU of client and server",
        bytes as f64 / 1e6 / wall
    );
    let from = [folder.to_str().expect("a path of text"), "s3://corpora/shards"];
    let best = rounds(work.path(), &server, &from);
    for (what, [disk, bucket]) in ["probe", "extract"].iter().zip(&best) {
        let (Some(disk), Some(bucket)) = (disk, bucket) else {
            continue;
        };
        for (name, run) in [("disk", disk), ("server", bucket)] {
            println!(
                "{what:8} from the {name:12} {:6.2} s wall {:6.0} MB/s; {:.2} s CPU, the server {:.2} s; {:.0} MiB",
                run.flow.wall,
                bytes as f64 / 1e6 / run.flow.wall,
                run.flow.cpu,
                run.server,
                run.flow.mebibytes
            );
        }
        // With the server's work on the same cores a run cannot end before all of it is done.
        let least = (bucket.flow.cpu + bucket.server) / cores() as f64;
        println!(
            "{what}: {:.2} times the wall time of the disk; all processor time, with the server's, takes {least:.2} s on {} cores",
            bucket.flow.wall / disk.flow.wall,
            cores()
        );
    }
}
