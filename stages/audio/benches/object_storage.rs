//! Measures `audio.probe` and `audio.extract` of a shard in object storage beside the same shard in the file system. The
//! server is one for tests, of S3's protocol over loopback, and computes on the same cores: a process of its own, whose
//! processor time is told.
//!
//! ```text
//! cargo bench --locked --workspace --bench object_storage            # 100 MB of recordings
//! cargo bench --locked --workspace --bench object_storage -- 400     # 400 MB
//! ```

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema};
use flow_audio::decode::read_range;
use flow_audio::extract::{ExtractSettings, Store};
use flow_audio::format::Format;
use flow_audio::probe::{AudioFrom, ProbeSettings};
use flow_audio::{Extract, Probe, flac, tar};
use flow_runtime::harness::Harness;
use flow_storage_testing::TestServer;

/// Times are the best of so many.
const ROUNDS: usize = 7;

/// The folder of the process that measures, which the one that serves starts.
const FOLDER: &str = "FLOW_BENCH_FOLDER";

const SHARD: &str = "hi/hi_0000";

fn main() {
    match std::env::var_os(FOLDER) {
        Some(folder) => measure(Path::new(&folder)),
        None => serve(),
    }
}

/// Makes the shard, and serves it to a process that measures.
fn serve() {
    let arguments: Vec<String> = std::env::args().collect();
    let megabytes = arguments.iter().find_map(|text| text.parse::<u64>().ok());
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load of the machine: {}", load.trim());
    let temp = tempfile::tempdir().expect("a temporary folder");
    let shard = temp.path().join("served/bucket/shards").join(SHARD);
    fs::create_dir_all(&shard).expect("a folder");
    build(&shard.join("hi_0000.tar"), megabytes.unwrap_or(100) << 20);
    let server = TestServer::start(&temp.path().join("served")).expect("a port");
    let before = processor_seconds();
    let measuring = Command::new(std::env::current_exe().expect("this program"))
        .env(FOLDER, temp.path())
        .envs(server.environment())
        .status();
    assert!(measuring.expect("this program").success());
    println!("the server: {:.2} s of processor in all", processor_seconds() - before);
}

fn measure(folder: &Path) {
    let places = [
        ("file system", folder.join("served/bucket/shards")),
        ("object storage", PathBuf::from("s3://bucket/shards")),
    ];
    let length = fs::metadata(places[0].1.join(SHARD).join("hi_0000.tar"))
        .expect("the tar")
        .len();
    let mut members = None;
    let mut probes = [Best::default(), Best::default()];
    let mut extractions = [Best::default(), Best::default()];
    for round in 0..ROUNDS {
        // Neither is always the first.
        for place in [round % 2, (round + 1) % 2] {
            let shards = &places[place].1;
            let mut probed = None;
            probes[place].round(|| probed = Some(probe(shards)));
            let probed = probed.expect("it was probed");
            let before = members.get_or_insert_with(|| probed.clone());
            assert!(*before == probed, "other members from {}", places[place].0);
        }
        for place in [round % 2, (round + 1) % 2] {
            let into = folder.join("extracted");
            let members = members.clone().expect("they were probed");
            let names = names(&members);
            extractions[place].round(|| extract(&places[place].1, &into, &names, members));
            let made = fs::read_dir(into.join(SHARD)).expect("the recordings").count();
            assert_eq!(made, names.num_rows());
            fs::remove_dir_all(&into).expect("our own folder");
            let synced = Command::new("sync").arg("-f").arg(folder).status();
            assert!(synced.expect("a program of GNU's").success());
        }
    }
    let recordings = members.map_or(0, |members| members.num_rows());
    println!("{recordings} recordings, {:.0} MB", length as f64 / 1e6);
    for (what, best) in [("probe", &probes), ("extract", &extractions)] {
        let [here, there] = [0, 1].map(|place| best[place].say(&format!("{what}, {}", places[place].0), length));
        println!(
            "{what}: {:.2} of the throughput of the file system (goal 0.85)\n",
            here / there
        );
    }
}

/// The port `members`.
fn probe(shards: &Path) -> RecordBatch {
    let settings = ProbeSettings {
        shards: shards.to_owned(),
        audio_from: AudioFrom::Tar,
        formats: vec![Format::Flac],
    };
    let output = Harness::<Probe>::new(settings).threads(cores()).run();
    output.expect("a shard").rows("members", SHARD)
}

/// A row for each recording.
fn names(members: &RecordBatch) -> RecordBatch {
    let names = members.column_by_name("name").expect("names");
    let names = names.as_any().downcast_ref::<StringArray>().expect("texts").clone();
    let ids = StringArray::from_iter_values((0..names.len()).map(|number| format!("s{number}")));
    let schema = Schema::new(vec![
        Field::new("_row", DataType::UInt32, false),
        Field::new("segment_id", DataType::Utf8, false),
        Field::new("tar_member_name", DataType::Utf8, true),
    ]);
    let numbers = UInt32Array::from_iter_values(0..names.len() as u32);
    RecordBatch::try_new(
        Arc::new(schema),
        vec![Arc::new(numbers), Arc::new(ids), Arc::new(names)],
    )
    .expect("rows")
}

fn extract(shards: &Path, audio: &Path, rows: &RecordBatch, members: RecordBatch) {
    let settings = ExtractSettings {
        shards: shards.to_owned(),
        audio: audio.to_owned(),
        store: Store::AsIs,
        watch: true,
    };
    let output = Harness::<Extract>::new(settings)
        .threads(cores())
        .input("rows", rows.schema())
        .input("members", members.schema())
        .feed("rows", SHARD, rows.clone())
        .feed("members", SHARD, members)
        .run();
    assert!(output.expect("room").rejects().is_empty());
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Writes a tar of the good recordings of the bundled corpus, again and again under other names.
fn build(path: &Path, size: u64) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/corpus/mini/shards");
    let mut recordings = Vec::new();
    for lang in fs::read_dir(&corpus).expect("the bundled corpus").flatten() {
        for shard in fs::read_dir(lang.path()).into_iter().flatten().flatten() {
            let tar_path = shard.path().join(shard.file_name()).with_extension("tar");
            let Ok(file) = File::open(&tar_path) else { continue };
            let length = file.metadata().expect("its size").len();
            let listing = tar::list(&mut BufReader::new(&file), length).expect("its members");
            let whole = |member: &&&tar::Member| !member.truncated && member.kind == tar::MemberKind::Regular;
            for member in listing.last_of_each_name().iter().filter(whole) {
                let bytes = read_range(&tar_path, member.offset, member.size).expect("a member");
                if flac::probe(&bytes).is_ok() {
                    recordings.push(bytes);
                }
            }
        }
    }
    let mut builder = ::tar::Builder::new(std::io::BufWriter::new(File::create(path).expect("a file")));
    let (mut written, mut count) = (0, 0);
    while written < size {
        for bytes in &recordings {
            let mut header = ::tar::Header::new_ustar();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o644);
            builder
                .append_data(&mut header, format!("{count:08}.flac"), bytes.as_slice())
                .expect("room");
            written += bytes.len() as u64;
            count += 1;
        }
    }
    builder
        .into_inner()
        .and_then(|file| file.into_inner().map_err(Into::into))
        .expect("room");
}

/// Wall and processor seconds of the best round so far.
#[derive(Default)]
struct Best(Option<(f64, f64)>);

impl Best {
    fn round(&mut self, run: impl FnOnce()) {
        let (started, before) = (Instant::now(), processor_seconds());
        run();
        let took = (started.elapsed().as_secs_f64(), processor_seconds() - before);
        if self.0.is_none_or(|best| took.0 < best.0) {
            self.0 = Some(took);
        }
    }

    /// Wall seconds.
    fn say(&self, name: &str, bytes: u64) -> f64 {
        let (wall, processor) = self.0.unwrap_or_default();
        let throughput = bytes as f64 / 1e6 / wall;
        println!("{name}: {wall:.3} s, {throughput:.0} MB/s, {processor:.2} s of processor");
        wall
    }
}

/// Of this process.
fn processor_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the name in brackets, which may hold spaces: fields 14 to 17 of the line, in hundredths.
    let after = stat.rsplit(')').next().unwrap_or_default();
    let own = after.split_whitespace().skip(11).take(2);
    own.filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() / 100.0
}
