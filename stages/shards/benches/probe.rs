//! Measures what the audio stages cost against the least that would do:
//!
//! - probing a tar against decoding the same recordings and hashing their samples, and nothing else;
//! - copying members out of a tar against GNU `tar -x`;
//! - FLAC to 16 kHz mono.
//!
//! ```text
//! cargo bench --locked --workspace --bench probe            # 100 MB of recordings
//! cargo bench --locked --workspace --bench probe -- 400     # 400 MB
//! ```
//!
//! Files are made in the temporary folder. ext4 is several times slower at making files where many were removed in
//! the last minutes (which a run of this bench does at its end); `TMPDIR=/dev/shm` measures without it.
//!
//! The peer in Python, for the same tar (its path is printed with `--keep`): `soundfile` decodes, `hashlib` hashes.
//!
//! ```text
//! python -c "
//! import hashlib, io, sys, tarfile, time, soundfile
//! start, cpu = time.time(), time.process_time()
//! for m in (tar := tarfile.open(sys.argv[1])):
//!     x, rate = soundfile.read(io.BytesIO(tar.extractfile(m).read()), dtype='int32', always_2d=True)
//!     hashlib.sha256(x.tobytes()).hexdigest()
//! print(time.time() - start, time.process_time() - cpu)" TAR
//! ```

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::fs::{self, File};
use std::io::{BufReader, Cursor};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use flow_audio::decode::{decode, read_range};
use flow_audio::format::Format;
use flow_audio::{flac, tar};
use flow_kind::store::DigestedFile;
use flow_shards::examine;
use flow_shards::place::{Content, Range, Target};
use flow_storage::Storage;
use rayon::prelude::*;
use sha2::{Digest as _, Sha256};
use symphonia::core::audio::{Audio, GenericAudioBufferRef};
use symphonia::core::codecs::audio::{AudioDecoder, AudioDecoderOptions};
use symphonia::core::formats::{FormatOptions, FormatReader};
use symphonia::core::io::{MediaSourceStream, MediaSourceStreamOptions};
use symphonia::default::codecs::FlacDecoder;
use symphonia::default::formats::FlacReader;

/// Times are the best of so many.
const ROUNDS: usize = 5;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let megabytes = arguments
        .iter()
        .find_map(|text| text.parse::<u64>().ok())
        .unwrap_or(100);
    let keep = arguments.iter().any(|text| text == "--keep");
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load of the machine: {}", load.trim());
    let temp = tempfile::tempdir().expect("a temporary folder");
    let path = temp.path().join("bench.tar");
    let recordings = build(&path, megabytes << 20);
    let file = File::open(&path).expect("the tar that was just written");
    let length = file.metadata().expect("its size").len();
    let listing = tar::list(&mut BufReader::new(&file), length).expect("its members");
    let members = listing.last_of_each_name();
    println!(
        "{} recordings, {:.0} MB, {} cores",
        members.len(),
        length as f64 / 1e6,
        cores()
    );
    assert_eq!(members.len(), recordings);
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(cores())
        .build()
        .expect("threads");

    let ours = best("probe", || {
        let (shard, _) = examine::tar_of(
            &path,
            |path| DigestedFile::open(&Storage::default(), path),
            &[Format::Flac],
            &pool,
            &|| false,
        )
        .expect("a tar")
        .expect("to its end");
        assert!(shard.recordings.iter().all(|recording| recording.status == "ok"));
    });
    let md5 = best("bare: decode, SHA-256, MD5", || {
        pool.install(|| members.par_iter().for_each(|member| bare(&file, member, true)));
    });
    let sha = best("bare: decode, SHA-256", || {
        pool.install(|| members.par_iter().for_each(|member| bare(&file, member, false)));
    });
    println!(
        "probe / bare with MD5: {:.2} (goal 1.15); without: {:.2}\n",
        ours / md5,
        ours / sha
    );

    // In turns: a file system that has just removed many files is slower at making new ones, for both. The tar is in
    // the page cache for both. First as far as the page cache, then to the disk, as `audio.extract` does it.
    let source = flow_storage::InputFile::open(&Storage::default(), &path).expect("the tar that was just written");
    for to_disk in [false, true] {
        let (mut copied, mut peer) = (Best::default(), Best::default());
        for round in 0..ROUNDS {
            let (ours, theirs) = (temp.path().join("ours"), temp.path().join("theirs"));
            fs::create_dir_all(ours.join("hi/hi_0000")).expect("a folder");
            fs::create_dir(&theirs).expect("a folder");
            let target = Target::open(&ours).expect("a folder");
            let place = |member: &&tar::Member| {
                let content = Content::Copy(Range {
                    file: &source,
                    path: &path,
                    offset: member.offset,
                    size: member.size,
                });
                target.place(&["hi", "hi_0000", &member.name], content).expect("room");
            };
            let mut copy = || {
                copied.round(|| {
                    pool.install(|| members.par_iter().for_each(place));
                    if to_disk {
                        target.sync().expect("room");
                    }
                });
            };
            let mut unpack = || {
                peer.round(|| {
                    run(Command::new("tar").arg("-xf").arg(&path).arg("-C").arg(&theirs));
                    if to_disk {
                        run(Command::new("sync").arg("-f").arg(&theirs));
                    }
                });
            };
            // Neither is always the first.
            if round % 2 == 0 {
                copy();
                unpack();
            } else {
                unpack();
                copy();
            }
            for folder in [ours, theirs] {
                fs::remove_dir_all(folder).expect("our own folder");
            }
            run(Command::new("sync").arg("-f").arg(temp.path()));
        }
        let (ours, theirs) = match to_disk {
            false => ("copy members out", "GNU tar -x"),
            true => ("copy members out, sync", "GNU tar -x, sync -f"),
        };
        println!("copy / tar: {:.2} (goal 1.2)\n", copied.say(ours) / peer.say(theirs));
    }

    let bytes: Vec<Vec<u8>> = members
        .iter()
        .take(2000)
        .map(|member| read_range(&Storage::default(), &path, member.offset, member.size).expect("a member"))
        .collect();
    let seconds: f64 = bytes.iter().map(|bytes| length_of(bytes)).sum();
    let took = best("FLAC to 16 kHz mono, one core", || {
        for bytes in &bytes {
            std::hint::black_box(decode(bytes, 100.0).expect("it decodes"));
        }
    });
    println!(
        "{:.0} times as fast as it is spoken ({seconds:.0} s of speech)",
        seconds / took
    );
    if keep {
        let kept = temp.keep();
        println!("kept: {}", kept.join("bench.tar").display());
    }
}

fn run(command: &mut Command) {
    assert!(command.status().expect("a program of GNU's").success());
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

fn length_of(bytes: &[u8]) -> f64 {
    let verdict = flac::probe(bytes).expect("a good recording");
    verdict.frames as f64 / f64::from(verdict.info.sample_rate)
}

/// Writes a tar of the good recordings of the bundled corpus, again and again under other names.
fn build(path: &Path, size: u64) -> usize {
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
                let bytes = read_range(&Storage::default(), &tar_path, member.offset, member.size).expect("a member");
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
    count
}

/// The least that gives the hash: no check of any kind.
fn bare(file: &File, member: &tar::Member, with_md5: bool) {
    let mut bytes = vec![0u8; member.size as usize];
    file.read_exact_at(&mut bytes, member.offset).expect("a member");
    let source = MediaSourceStream::new(Box::new(Cursor::new(bytes)), MediaSourceStreamOptions::default());
    let mut reader = FlacReader::try_new(source, FormatOptions::default()).expect("FLAC");
    let track = reader.tracks().first().expect("a track");
    let parameters = track
        .codec_params
        .as_ref()
        .and_then(|parameters| parameters.audio())
        .expect("audio");
    let mut decoder = FlacDecoder::try_new(parameters, &AudioDecoderOptions::default()).expect("a decoder");
    let (mut sha, mut md5) = (Sha256::new(), md5::Md5::new());
    let mut samples: Vec<i32> = Vec::new();
    let mut bytes: Vec<u8> = Vec::new();
    while let Some(packet) = reader.next_packet().expect("a frame") {
        let GenericAudioBufferRef::S32(block) = decoder.decode(&packet).expect("a good frame") else {
            unreachable!("FLAC has 32-bit samples");
        };
        block.copy_to_vec_interleaved(&mut samples);
        bytes.clear();
        bytes.extend(samples.iter().flat_map(|sample| sample.to_le_bytes()));
        sha.update(&bytes);
        if with_md5 {
            bytes.clear();
            bytes.extend(samples.iter().flat_map(|sample| ((sample >> 16) as i16).to_le_bytes()));
            md5.update(&bytes);
        }
    }
    std::hint::black_box((sha.finalize(), md5.finalize()));
}

/// Runs it, prints wall and processor seconds of the best round, and gives the wall seconds.
fn best(name: &str, mut run: impl FnMut()) -> f64 {
    let mut best = Best::default();
    for _ in 0..ROUNDS {
        best.round(&mut run);
    }
    best.say(name)
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

    fn say(&self, name: &str) -> f64 {
        let (wall, processor) = self.0.unwrap_or_default();
        println!("{name}: {wall:.3} s, {processor:.2} s of processor");
        wall
    }
}

/// Of this process and of its children that ended.
fn processor_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the name in brackets, which may hold spaces: fields 14 to 17 of the line, in hundredths.
    let after = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after.split_whitespace().skip(11).take(4);
    ticks.filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() / 100.0
}
