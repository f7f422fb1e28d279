//! Building manifests of a metadata-only corpus (scan, filter, clean, correct tags, deduplicate, split, write),
//! compared with the same work in polars, DuckDB and pandas, each in a separate process on the same machine.
//!
//! `cargo bench --bench build_manifest -- ROWS SHARDS` (default: 500,000 rows in 200 shards). The corpus is made from a
//! seed below `work/bench` and kept. Peers run where `FLOW_BENCH_PYTHON` (or `python3`) has their packages. Prints wall
//! and CPU seconds, peak memory, rows kept, and the ratio to `flow`. Then the same by 1, 2 and 4 processes of `flow` with
//! one worker each: time and memory of each process, and the bytes that they exchange. Their files have to be the same. Before
//! that, one shard changes and one comes, each followed by a run, and shards come one after the other below a process that
//! watches (`FLOW_BENCH_GENERATIONS`: how many).

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array, RecordBatch, StringArray};
use flow_random::SplitMix64;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

mod measured;
mod watched;

use measured::{Measured, installed, measure, python};
use watched::{SETTLE, Watching};

/// Languages with their share of the rows, and the range of code points that their words are made of.
const LANGUAGES: [(&str, u32, u32, u32); 13] = [
    ("en", 340, 0x61, 0x7A),
    ("hi", 260, 0x915, 0x94C),
    ("ta", 80, 0xB95, 0xBCC),
    ("bn", 80, 0x995, 0x9B0),
    ("te", 70, 0xC15, 0xC4C),
    ("mr", 50, 0x915, 0x94C),
    ("gu", 30, 0xA95, 0xAC5),
    ("kn", 30, 0xC95, 0xCC4),
    ("ml", 25, 0xD15, 0xD44),
    ("pa", 15, 0xA15, 0xA39),
    ("ur", 10, 0x627, 0x64A),
    ("as", 6, 0x995, 0x9B0),
    ("or", 4, 0xB15, 0xB39),
];

fn words(draw: &mut SplitMix64, first: u32, last: u32) -> Vec<String> {
    let word = |draw: &mut SplitMix64| -> String {
        let letters = 2 + draw.below(6);
        (0..letters)
            .filter_map(|_| char::from_u32(first + draw.below((last - first + 1) as usize) as u32))
            .collect()
    };
    (0..600).map(|_| word(draw)).collect()
}

fn sentence(draw: &mut SplitMix64, words: &[String], language: &str) -> String {
    let mut text = String::new();
    if draw.unit() < 0.05 {
        text.push_str(["[laugh] ", "[music] ", "<unk> "][draw.below(3)]);
    }
    for place in 0..4 + draw.below(14) {
        if place > 0 {
            text.push_str(if draw.unit() < 0.06 { ", " } else { " " });
        }
        text.push_str(&words[draw.below(words.len())]);
    }
    if draw.unit() < 0.3 {
        text.push(if language == "en" { '.' } else { '।' });
    }
    if language == "en" && draw.unit() < 0.3 {
        text[..1].make_ascii_uppercase();
    }
    text
}

fn write(path: &Path, columns: Vec<(&str, ArrayRef)>) {
    let batch = RecordBatch::try_from_iter(columns).expect("columns of one length");
    let zstd = Compression::ZSTD(ZstdLevel::try_new(1).expect("level 1"));
    let properties = WriterProperties::builder().set_compression(zstd).build();
    let file = File::create(path).expect("a file of the corpus");
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).expect("a parquet file");
    writer.write(&batch).expect("rows");
    writer.close().expect("the end of the file");
}

/// One shard. Some 4 % of the rows have a wrong tag, 2 % words and audio of another, 4 % a low quality, 1 % no usable
/// text or number.
fn shard(folder: &Path, language: usize, name: &str, rows: usize, words: &[String], seed: u64) {
    std::fs::create_dir_all(folder).expect("a folder of the corpus");
    let mut draw = SplitMix64::new(seed);
    let (code, ..) = LANGUAGES[language];
    let (mut texts, mut durations, mut qualities, mut tags, mut hashes) = (vec![], vec![], vec![], vec![], vec![]);
    for _ in 0..rows {
        let twin = (draw.unit() < 0.02).then(|| draw.below(4096) as u64 + 10_000 * language as u64);
        let mut own = SplitMix64::new(twin.unwrap_or_else(|| draw.next_u64()));
        let text = sentence(&mut own, words, code);
        let odd = draw.unit();
        texts.push(if odd < 0.002 {
            None
        } else if odd < 0.004 {
            Some("  ".to_string())
        } else if odd < 0.005 {
            Some("[music] ...".to_string())
        } else {
            Some(text)
        });
        hashes.push(format!("{:016x}{:016x}", own.next_u64(), own.next_u64()));
        let seconds = 1.0 - 2.6 * (draw.unit().max(1e-12) * draw.unit().max(1e-12)).ln();
        let odd = draw.unit();
        durations.push(if odd < 0.0005 {
            f64::NAN
        } else if odd < 0.01 {
            0.4
        } else {
            (seconds.min(26.0) * 1000.0).round() / 1000.0
        });
        let quality = 1.0 - 0.3 * draw.unit() * draw.unit();
        qualities.push(match draw.unit() {
            odd if odd < 0.0005 => f64::NAN,
            odd if odd < 0.04 => quality * 0.5,
            _ => quality,
        });
        tags.push(match draw.unit() {
            odd if odd < 0.03 => Some(if code == "en" { "hi" } else { "en" }),
            odd if odd < 0.035 => Some(if code == "ta" { "bn" } else { "ta" }),
            odd if odd < 0.04 => None,
            _ => Some(code),
        });
    }
    let ids: ArrayRef = Arc::new(StringArray::from_iter_values(
        (0..rows).map(|row| format!("{name}_{row:06}")),
    ));
    write(
        &folder.join("metadata.parquet"),
        vec![
            ("segment_id", Arc::clone(&ids)),
            ("duration_s", Arc::new(Float64Array::from(durations))),
            ("transcription_native", Arc::new(StringArray::from(texts))),
            ("tx_quality_score", Arc::new(Float64Array::from(qualities))),
            ("segment_language", Arc::new(StringArray::from(tags))),
        ],
    );
    write(
        &folder.join("audio_index.parquet"),
        vec![
            ("segment_id", ids),
            (
                "tar_member_name",
                Arc::new(StringArray::from_iter_values(
                    (0..rows).map(|row| format!("{name}_{row:06}.flac")),
                )),
            ),
            ("audio_hash", Arc::new(StringArray::from(hashes))),
        ],
    );
}

fn corpus(folder: &Path, rows: usize, shards: usize) {
    if folder.join("whole").exists() {
        return;
    }
    let all: u32 = LANGUAGES.iter().map(|language| language.1).sum();
    let mut jobs = Vec::new();
    for (language, (code, share, ..)) in LANGUAGES.iter().enumerate() {
        let count = (shards as u32 * share / all).max(1);
        jobs.extend((0..count).map(|number| (language, format!("{code}_{number:05}"))));
    }
    let each = rows / jobs.len();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let jobs = &jobs;
            scope.spawn(move || {
                let vocabulary: Vec<Vec<String>> = (0u64..)
                    .zip(&LANGUAGES)
                    .map(|(seed, (_, _, first, last))| words(&mut SplitMix64::new(seed), *first, *last))
                    .collect();
                for (number, (language, name)) in jobs.iter().enumerate().skip(thread).step_by(threads) {
                    let (code, ..) = LANGUAGES[*language];
                    let path = folder.join("shards").join(code).join(name);
                    shard(&path, *language, name, each, &vocabulary[*language], number as u64 + 1);
                }
            });
        }
    });
    File::create(folder.join("whole")).expect("the mark of a whole corpus");
}

fn rows_of(path: &Path) -> i64 {
    let file = File::open(path).expect("the manifest");
    let reader = parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(file).expect("parquet");
    reader.metadata().file_metadata().num_rows()
}

/// Reads all files of a folder, so that all measured programs have a warm page cache.
fn warm(folder: &Path) {
    for entry in std::fs::read_dir(folder).expect("the corpus can be read") {
        let path = entry.expect("the corpus can be read").path();
        if path.is_dir() {
            warm(&path);
        } else {
            std::fs::read(&path).expect("the corpus can be read");
        }
    }
}

fn show(name: &str, of: &Measured, base: Option<&Measured>) {
    let ratio = base.map_or(String::new(), |flow| {
        format!(
            "; {:.2} times the wall time of flow, {:.2} times its CPU time, {:.2} times its memory",
            of.wall / flow.wall,
            of.cpu / flow.cpu,
            of.mebibytes / flow.mebibytes
        )
    });
    println!(
        "{name:24} {:8.2} s wall {:8.2} s CPU {:8.0} MiB{ratio}",
        of.wall, of.cpu, of.mebibytes
    );
}

/// Every file of the manifests and of the artifacts' data, by a digest of its bytes.
fn digests(folders: &[PathBuf]) -> BTreeMap<String, blake3::Hash> {
    let mut found = BTreeMap::new();
    for folder in folders {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if let (true, Ok(bytes)) = (name.ends_with(".parquet"), std::fs::read(entry.path())) {
                found.insert(name, blake3::hash(&bytes));
            }
        }
    }
    found
}

/// Runs the pipeline on several processes with one worker each.
fn by_processes(root: &Path, work: &Path, aside: &Path) {
    let mut one: Option<(f64, BTreeMap<String, blake3::Hash>)> = None;
    for count in [1usize, 2, 4] {
        let place = work.join(format!("processes{count}"));
        let _ = std::fs::rename(&place, aside.join(format!("processes{count}")));
        std::fs::create_dir_all(&place).expect("the folder of the corpus can be written");
        let port = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
        let port = port.expect("a free port").port();
        let hosts = format!("localhost:{port}\n{}", "localhost\n".repeat(count - 1));
        std::fs::write(place.join("hosts.txt"), hosts).expect("the folder of the corpus can be written");
        let command = |process: usize| {
            let mut flow = Command::new(env!("CARGO_BIN_EXE_flow"));
            flow.current_dir(root).args([
                "run",
                "benches/build_metadata_only.yaml",
                "--progress",
                "none",
                "--workers",
                "1",
            ]);
            flow.env("RAYON_NUM_THREADS", "1")
                .arg("--state")
                .arg(place.join("state"));
            flow.arg("--set")
                .arg(format!("shards={}", work.join("shards").display()));
            flow.arg("--set").arg(format!("out={}", place.join("out").display()));
            flow.arg("--events").arg(place.join(format!("events{process}")));
            if count > 1 {
                flow.arg("--hosts")
                    .arg(place.join("hosts.txt"))
                    .args(["--process", &process.to_string()]);
            }
            flow
        };
        warm(&work.join("shards"));
        let command = &command;
        let measured: Vec<Measured> = std::thread::scope(|scope| {
            let running: Vec<_> = (0..count)
                .map(|process| scope.spawn(move || measure(command(process))))
                .collect();
            let measured = running.into_iter().map(|running| running.join().ok().flatten());
            measured.map(|measured| measured.expect("flow runs")).collect()
        });
        let wall = measured.iter().map(|process| process.wall).fold(0.0, f64::max);
        let cpu: f64 = measured.iter().map(|process| process.cpu).sum();
        let memory: Vec<String> = measured
            .iter()
            .map(|process| format!("{:.0}", process.mebibytes))
            .collect();
        let events = std::fs::read_to_string(place.join("events0")).unwrap_or_default();
        let exchanged = events
            .lines()
            .find_map(|line| Some(line.split_once("other processes: ")?.1.split('"').next()?.to_owned()));
        let state = std::fs::read_dir(place.join("state/artifacts"))
            .into_iter()
            .flatten()
            .flatten();
        let mut folders: Vec<PathBuf> = state.map(|recipe| recipe.path().join("data")).collect();
        folders.push(place.join("out"));
        let files = digests(&folders);
        assert!(!files.is_empty(), "no files to compare");
        println!(
            "{count} processes of 1 worker {wall:8.2} s wall {cpu:8.2} s CPU; peak MiB {}; {}{}",
            memory.join(", "),
            exchanged.unwrap_or_default(),
            one.as_ref().map_or(String::new(), |(wall_of_one, _)| format!(
                "; {:.2} times the wall time of one",
                wall / wall_of_one
            )),
        );
        match &one {
            Some((_, files_of_one)) => assert!(*files_of_one == files, "{count} processes give other bytes"),
            None => one = Some((wall, files)),
        }
    }
}

/// Shards that come; those after them come in place of these, so that the corpus grows no more.
const NEW_SHARDS: u64 = 5;

/// Shards come one after the other, each made by `make`, below a process that watches.
fn below_a_watching_process(flow: Command, work: &Path, out: &Path, make: impl Fn(u64) -> PathBuf) {
    let generations = std::env::var("FLOW_BENCH_GENERATIONS").ok();
    let generations: u64 = generations.and_then(|count| count.parse().ok()).unwrap_or(NEW_SHARDS);
    let mut watching = Watching::start(flow, &work.join("events"), out);
    let mut resident = Vec::new();
    for at in 0..generations {
        let place = work.join(format!("shards/en/en_watch_{:05}", at % NEW_SHARDS));
        let made = make(at);
        let taken_up = watching.take_up(|| {
            if at < NEW_SHARDS {
                return std::fs::rename(&made, &place).expect("the corpus can be written");
            }
            for file in std::fs::read_dir(&made).expect("a shard").flatten() {
                std::fs::rename(file.path(), place.join(file.file_name())).expect("the corpus can be written");
            }
        });
        resident.push(taken_up.resident);
        println!(
            "{:24} {:8.2} s until the set is there, {SETTLE} s to settle included; decided in {:.0} ms; {:.0} MiB, peak {:.0}",
            format!("flow --watch, shard {}", at + 1),
            taken_up.wall,
            taken_up.decide,
            taken_up.resident,
            taken_up.peak
        );
    }
    let quarter = resident.len() / 4;
    if quarter >= 10 {
        let mean = |from: usize| resident[from..from + quarter].iter().sum::<f64>() / quarter as f64;
        println!(
            "resident memory of the last quarter of {generations} generations: {:.0} MiB; from the second on it grew by {:.2} KiB a generation",
            mean(3 * quarter),
            (mean(3 * quarter) - mean(quarter)) * 1024.0 / (2 * quarter) as f64
        );
    }
}

fn main() {
    let numbers: Vec<usize> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let (rows, shards) = (
        numbers.first().copied().unwrap_or(500_000),
        numbers.get(1).copied().unwrap_or(200),
    );
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let work: PathBuf = root.join("work/bench").join(format!("{rows}-{shards}"));
    corpus(&work, rows, shards);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!(
        "{rows} rows in {shards} shards; load of the machine before: {}",
        load.trim()
    );

    // The shard to be changed, restored to its original state if an earlier run of this benchmark changed it.
    let touched = work.join("shards/en/en_00000");
    let vocabulary = words(&mut SplitMix64::new(0), LANGUAGES[0].2, LANGUAGES[0].3);
    let each = rows_of(&touched.join("metadata.parquet")) as usize;
    let shard_of = |seed| shard(&touched, 0, "en_00000", each, &vocabulary, seed);
    shard_of(1);
    // The shard that comes new; an earlier run may have left it.
    let new = work.join("shards/en/en_new");
    let _ = std::fs::remove_dir_all(&new);
    for shard in std::fs::read_dir(work.join("shards/en"))
        .into_iter()
        .flatten()
        .flatten()
    {
        if shard.file_name().to_string_lossy().starts_with("en_watch_") {
            std::fs::remove_dir_all(shard.path()).expect("a shard of an earlier run can be removed");
        }
    }
    let (state, out) = (work.join("state"), work.join("out"));
    // Files of the last round are removed at the end: for some minutes after thousands of files were removed, ext4
    // takes several times as long to create files.
    let aside = work.join("aside");
    std::fs::create_dir_all(&aside).expect("the folder of the corpus can be written");
    for folder in ["state", "out"] {
        // It may not exist.
        let _ = std::fs::rename(work.join(folder), aside.join(folder));
    }
    let flow = |_: &str| {
        let mut flow = Command::new(env!("CARGO_BIN_EXE_flow"));
        flow.current_dir(root)
            .args(["run", "benches/build_metadata_only.yaml", "--progress", "none"]);
        flow.arg("--state").arg(&state);
        flow.arg("--set")
            .arg(format!("shards={}", work.join("shards").display()));
        flow.arg("--set").arg(format!("out={}", out.display()));
        flow
    };
    let shards = work.join("shards");
    warm(&shards);
    let first = measure(flow("first")).expect("flow runs");
    show("flow", &first, None);
    show(
        "flow, nothing changed",
        &measure(flow("again")).expect("flow runs"),
        Some(&first),
    );
    // What the build wrote goes to the disk first: until it has, a device takes a second and more for any flush.
    let _ = Command::new("sync").status();
    shard_of(999_999);
    show(
        "flow, one shard changed",
        &measure(flow("changed")).expect("flow runs"),
        Some(&first),
    );
    shard(&new, 0, "en_new", each, &vocabulary, 999_998);
    show(
        "flow, one new shard",
        &measure(flow("new")).expect("flow runs"),
        Some(&first),
    );
    below_a_watching_process(flow("watch"), &work, &out, |at| {
        let made = work.join("made/en_watch");
        shard(&made, 0, "en_watch", each, &vocabulary, 500_000 + at);
        made
    });
    let kept = rows_of(&out.join("train_manifest_v2.parquet")) + rows_of(&out.join("val_manifest_v2.parquet"));

    by_processes(root, &work, &aside);
    let from_nothing = digests(&[work.join("processes1/out")]);
    assert!(
        digests(&[out]) == from_nothing,
        "edits give other bytes than a set that is written from nothing"
    );
    for peer in ["polars", "duckdb", "pandas"] {
        if !installed(peer) {
            continue;
        }
        let mut command = Command::new(python());
        command.current_dir(root).env("POLARS_MAX_THREADS", "2");
        command
            .arg(format!("benches/peers/build_{peer}.py"))
            .arg(&work)
            .arg(work.join(peer));
        warm(&shards);
        match measure(command) {
            Some(measured) => {
                show(peer, &measured, Some(&first));
                println!("{:24} rows kept: {}, flow: {kept}", "", measured.said);
            }
            None => println!("{peer}: failed"),
        }
    }
    std::fs::remove_dir_all(&aside).expect("what was put aside can be removed");
}
