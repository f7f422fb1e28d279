//! Whatever bytes come in, there is a verdict: no panic gets out, memory stays within a bound, and it ends.
//!
//! Inputs are good files (recordings, tars, parquet, JSON lines, texts), damaged by a generator with fixed seeds: flips,
//! cuts, splices, numbers in headers. The suite tries some thousands of each; a million for each format with
//!
//! ```text
//! cargo test --release --workspace --test hostile -- --ignored --nocapture
//! ```

#![allow(
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "an ignored test tells people how far it is"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use flow_audio::decode::decode;
use flow_audio::flac::{Samples, StreamInfo};
use flow_audio::format::Format;
use flow_audio::recording_reader::{Channels, Progress, RecordingReader};
use flow_audio::{flac_encode, recording, tar};
use flow_corpus::ReadSettings;
use flow_corpus::names;
use flow_kind::StageError;
use flow_layouts::read::Read;
use flow_manifest::shard::{AUDIO_INDEX, METADATA, Shard, ShardOptions};
use flow_manifest::{identify, language};
use flow_random::SplitMix64;
use flow_runtime::harness::Harness;
use flow_storage::Storage;
use flow_text::{normalize as text, written_form};

/// Counts what this thread holds, and the most it held.
struct Counting;

thread_local! {
    static HELD: Cell<i64> = const { Cell::new(0) };
    static MOST: Cell<i64> = const { Cell::new(0) };
}

fn count(bytes: i64) {
    // Gone at the very end of a thread, when nobody looks any more.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
    });
}

// SAFETY: every call is handed on to the system's allocator as it is; counting touches plain cells of the
// thread, which allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise, handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise, handed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's promise, handed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        // SAFETY: the caller's promise, handed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Most bytes that one input of some ten kilobytes may make us hold.
const MOST_MEMORY: i64 = 64 << 20;
/// An input that takes longer than this never ends.
const PATIENCE: Duration = Duration::from_secs(120);

/// One of the good files with one to five damages.
fn damaged(random: &mut SplitMix64, good: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = good[random.below(good.len())].clone();
    for _ in 0..=random.below(5) {
        // Headers are where it hurts: half of the damages fall into the first kilobyte.
        let reach = if random.next_u64() & 1 == 0 {
            bytes.len().min(1024)
        } else {
            bytes.len()
        };
        let at = random.below(reach);
        match random.below(8) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !bytes.is_empty() => bytes[at] = random.next_u64() as u8,
            2 => bytes.truncate(at),
            3 => {
                let other = &good[random.below(good.len())];
                let from = random.below(other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
            4 => {
                let end = (at + random.below(64)).min(bytes.len());
                bytes.drain(at..end);
            }
            5 => {
                let length = random.below(64);
                let piece: Vec<u8> = (0..length).map(|_| random.next_u64() as u8).collect();
                bytes.splice(at..at, piece);
            }
            6 => {
                let end = (at + 1 + random.below(16)).min(bytes.len());
                let value = [0, 0xff, 0x7f, 0x80][random.below(4)];
                bytes[at..end].fill(value);
            }
            _ => {
                // Numbers that claim much, in either order of bytes.
                let numbers: [u32; 6] = [u32::MAX, i32::MAX as u32, 1 << 31, 1 << 24, 0, 1];
                let number = numbers[random.below(numbers.len())];
                let number = if random.next_u64() & 1 == 0 {
                    number.to_be_bytes()
                } else {
                    number.to_le_bytes()
                };
                let end = (at + 4).min(bytes.len());
                bytes[at..end].copy_from_slice(&number[..end - at]);
            }
        }
    }
    bytes
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn tone(name: &str) -> Vec<u8> {
    let path = repository("stages/audio/tests/data").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn samples(sample_rate: u32, channels: u32, bits: u32, frames: usize) -> Samples {
    let mut random = SplitMix64::new(7);
    let value = |n: usize| ((n as f64 / 9.0).sin() * 5000.0) as i32 + (random.next_u64() % 64) as i32;
    let interleaved = (0..frames * channels as usize)
        .map(value)
        .map(|x| x << (32 - bits))
        .collect();
    Samples {
        info: StreamInfo {
            sample_rate,
            channels,
            bits,
            total_frames: 0,
            md5: [0; 16],
        },
        interleaved,
    }
}

fn wav(format: u16, channels: u16, bits: u16, data: &[u8]) -> Vec<u8> {
    let block = channels * bits / 8;
    let mut bytes = [
        b"RIFF",
        &(36 + data.len() as u32).to_le_bytes()[..],
        b"WAVEfmt ",
        &16u32.to_le_bytes(),
    ]
    .concat();
    for number in [format, channels] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(16_000u32.to_le_bytes());
    bytes.extend((16_000 * u32::from(block)).to_le_bytes());
    bytes.extend(block.to_le_bytes());
    bytes.extend(bits.to_le_bytes());
    bytes.extend(b"data");
    bytes.extend((data.len() as u32).to_le_bytes());
    bytes.extend(data);
    bytes
}

/// A WAV of PCM with sizes of 64 bits.
fn rf64(channels: u16, bits: u16, data: &[u8]) -> Vec<u8> {
    let short = wav(1, channels, bits, data);
    let length = data.len() as u64;
    let mut sizes = [length + 80, length, 0].map(u64::to_le_bytes).concat();
    sizes.extend([0; 4]);
    let ds64 = [b"ds64", &28u32.to_le_bytes()[..], &sizes].concat();
    let unknown = [0xff; 4];
    [b"RF64", &unknown[..], b"WAVE", &ds64, &short[12..40], &unknown, data].concat()
}

/// AIFF of 16 bits at 16 kHz.
fn aiff(channels: u16, data: &[u8]) -> Vec<u8> {
    let chunk = |name: &[u8; 4], content: &[u8]| [name, &(content.len() as u32).to_be_bytes()[..], content].concat();
    let frames = (data.len() / 2 / usize::from(channels)) as u32;
    // The rate is an extended number of 80 bits: 2^13 times 1.953125.
    let common = [
        &channels.to_be_bytes()[..],
        &frames.to_be_bytes(),
        &[0, 16, 0x40, 0x0c, 0xfa, 0, 0, 0, 0, 0, 0, 0],
    ]
    .concat();
    let sound = [&[0; 8][..], data].concat();
    let content = [b"AIFF".to_vec(), chunk(b"COMM", &common), chunk(b"SSND", &sound)].concat();
    chunk(b"FORM", &content)
}

fn tars() -> Vec<Vec<u8>> {
    let long = "n".repeat(180);
    let mut files = Vec::new();
    for (gnu, names) in [
        (true, vec!["a.flac", &long, "dir/b", "a.flac"]),
        (false, vec!["./c", "d", &long[..90]]),
    ] {
        let mut builder = ::tar::Builder::new(Vec::new());
        for name in names {
            let mut header = if gnu {
                ::tar::Header::new_gnu()
            } else {
                ::tar::Header::new_ustar()
            };
            header.set_size(600);
            builder.append_data(&mut header, name, &[1u8; 600][..]).unwrap();
        }
        if !gnu {
            builder
                .append_pax_extensions([("path", "über/lang".as_bytes()), ("size", b"3")])
                .unwrap();
            let mut header = ::tar::Header::new_ustar();
            header.set_size(3);
            builder.append_data(&mut header, "short", &b"abc"[..]).unwrap();
        }
        files.push(builder.into_inner().unwrap());
    }
    files
}

/// A kind of input: good files, and what is done with a damaged one.
struct Target {
    name: &'static str,
    good: Vec<Vec<u8>>,
    try_it: fn(&[u8]) -> bool,
}

fn targets() -> Vec<Target> {
    let flac = |rate, channels, bits, frames| flac_encode::encode(&samples(rate, channels, bits, frames)).unwrap();
    let recording = |name, good| Target {
        name,
        good,
        try_it: try_recording,
    };
    let noise: Vec<u8> = (0..4000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let floats: Vec<u8> = (0..1000).flat_map(|n| (n as f32 / 1000.0).to_le_bytes()).collect();
    vec![
        Target {
            name: "tar",
            good: tars(),
            try_it: try_tar,
        },
        recording(
            "flac",
            vec![
                flac(16_000, 1, 16, 5000),
                flac(48_000, 2, 24, 700),
                flac(8_000, 1, 16, 1),
            ],
        ),
        recording(
            "wav",
            vec![wav(1, 1, 16, &noise), wav(1, 2, 24, &noise), wav(3, 1, 32, &floats)],
        ),
        recording("mp3", vec![tone("tone.mp3")]),
        recording("aac", vec![tone("tone.aac")]),
        recording("rf64", vec![rf64(2, 16, &noise), rf64(1, 24, &noise)]),
        recording("m4a", vec![tone("tone.m4a"), tone("tone.mp4")]),
        recording("ogg", vec![tone("tone.ogg"), tone("tone.opus")]),
        recording("mov", vec![tone("tone.mov")]),
        recording("caf", vec![tone("tone.caf")]),
        recording("mkv", vec![tone("tone.mkv"), tone("tone.webm")]),
        recording("aiff", vec![aiff(1, &noise), aiff(2, &noise)]),
        Target {
            name: "metadata",
            good: vec![SHARD.metadata.clone()],
            try_it: try_metadata,
        },
        Target {
            name: "index",
            good: vec![SHARD.index.clone()],
            try_it: try_index,
        },
        Target {
            name: "lines",
            good: lines(),
            try_it: try_lines,
        },
        Target {
            name: "text",
            good: texts(),
            try_it: try_text,
        },
    ]
}

/// A good shard, and a folder in which damaged ones take its place.
struct GoodShard {
    metadata: Vec<u8>,
    index: Vec<u8>,
    folder: tempfile::TempDir,
}

static SHARD: LazyLock<GoodShard> = LazyLock::new(|| {
    let shard = repository("tests/data/corpus/micro/shards/as/as_0000");
    let read = |name| std::fs::read(shard.join(name)).expect("the bundled corpus");
    GoodShard {
        metadata: read(METADATA),
        index: read(AUDIO_INDEX),
        folder: tempfile::tempdir().expect("a folder"),
    }
});

fn try_metadata(bytes: &[u8]) -> bool {
    try_shard("metadata", bytes, &SHARD.index)
}

fn try_index(bytes: &[u8]) -> bool {
    try_shard("index", &SHARD.metadata, bytes)
}

fn try_shard(target: &str, metadata: &[u8], index: &[u8]) -> bool {
    let folder = SHARD.folder.path().join(target);
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join(METADATA), metadata).expect("a file");
    std::fs::write(folder.join(AUDIO_INDEX), index).expect("a file");
    let Ok(shard) = Shard::read(
        &flow_storage::Storage::default(),
        &folder,
        "as",
        "as_0000",
        &ShardOptions::default(),
    ) else {
        return false;
    };
    let joined: usize = shard
        .joined(8192)
        .map(|batch| batch.map_or(0, |batch| batch.num_rows()))
        .sum();
    let unjoined = shard.unjoined().expect("what has no partner is known");
    assert!(joined as u64 <= shard.rows());
    assert!(
        unjoined.iter().map(|(_, rows)| rows.num_rows()).sum::<usize>() <= shard.metadata_rows() + shard.index_rows()
    );
    true
}

fn lines() -> Vec<Vec<u8>> {
    let line = r#"{"audio_filepath": "clips/über/a b.flac", "duration": 1.25, "text": "<|hi|> नमस्ते \u0928 \"x\"", "lang": "hi", "offset": 0.5, "shard_id": 3}"#;
    vec![
        format!("{line}\n").into_bytes(),
        format!("{line}\r\n\n{line}").into_bytes(),
    ]
}

/// Good where every line became a row.
fn try_lines(bytes: &[u8]) -> bool {
    let file = SHARD.folder.path().join("manifest.json");
    std::fs::write(&file, bytes).expect("a file");
    let settings = ReadSettings {
        manifest: file.to_str().expect("a plain path").into(),
        check_audio: false,
        ..ReadSettings::default()
    };
    match Harness::<Read>::new(settings).run() {
        Ok(output) => output.rejects().is_empty() && output.all_rows("rows").num_rows() > 0,
        Err(StageError::Setting { .. }) => false,
        Err(other) => panic!("{other:?}"),
    }
}

fn texts() -> Vec<Vec<u8>> {
    let texts = [
        "[laugh] नमस्ते, दुनिया।  <unk> ok - “x” (y)…",
        "বাংলা \u{9c7}\u{9be} க\u{bc6}\u{bbe} e\u{301}\u{323} \u{1100}\u{1161}\u{11a8} İΣ ﬁ",
        "\u{feff}a\u{200d}b\u{1c}c\u{a0}d\u{2028}../..//x.flac\0[[<<]>]",
    ];
    texts.map(|text| text.as_bytes().to_vec()).to_vec()
}

/// Good where the bytes are a text.
fn try_text(bytes: &[u8]) -> bool {
    let read = String::from_utf8_lossy(bytes);
    let clean = text::clean_text(&read);
    assert!(clean.len() <= read.len());
    assert_eq!(text::is_blank(&clean), clean.is_empty(), "{clean:?}");
    let norm = text::norm_text(&clean);
    assert!(norm.len() <= 16 * clean.len());
    let lang = language::correct_language(&clean, &read, "hi");
    let mut tagged = String::new();
    text::text_into(&clean, identify::identify_language(&clean, &lang, 0.6), &mut tagged);
    assert!(tagged.ends_with(&clean));
    assert_eq!(
        written_form::strip_zero_width(&written_form::nfc(&norm)),
        written_form::nfc(&norm)
    );
    assert!(names::strip_dot_slash(&read).len() <= read.len());
    if !names::unsafe_name(&read) {
        let parts = Path::new(read.as_ref()).components();
        assert!(
            parts
                .into_iter()
                .all(|part| matches!(part, std::path::Component::Normal(_) | std::path::Component::CurDir)),
            "{read:?}"
        );
    }
    std::str::from_utf8(bytes).is_ok()
}

/// True where the input was good all the same.
fn try_recording(bytes: &[u8]) -> bool {
    let good = try_whole_recording(bytes);
    try_stream(bytes, good);
    good
}

/// Block by block from a file: what is good as a whole is so here, and nothing else is longer than it could be.
fn try_stream(bytes: &[u8], good: bool) {
    let file = SHARD.folder.path().join("recording");
    std::fs::write(&file, bytes).expect("a file");
    let Ok(mut reader) = RecordingReader::open(&Storage::default(), &file, None, Channels::Mix) else {
        // The rate of what is good may be one that is not resampled.
        assert!(!good || decode(bytes, 1e6).is_err());
        return;
    };
    let mut samples = Vec::new();
    let mut count = 0;
    let end = loop {
        let progress = reader.read(&mut samples).expect("a file that can be read");
        assert!(samples.iter().all(|sample| sample.is_finite()));
        count += samples.len();
        samples.clear();
        if progress != Progress::More {
            break progress;
        }
    };
    if good {
        // Frames of FLAC may be numbered as they like where all are there.
        assert!(end == Progress::End || bytes.starts_with(b"fLaC"), "{end:?}");
    }
    if good && end == Progress::End {
        assert_eq!(decode(bytes, 1e6).map(|signal| signal.len()).ok(), Some(count));
    }
}

fn try_whole_recording(bytes: &[u8]) -> bool {
    let Ok((format, verdict)) = recording::probe(bytes, &Format::ALL) else {
        return false;
    };
    assert!(verdict.frames > 0 && (1..=8).contains(&verdict.info.channels));
    // What is called good decodes, to that many frames, and no more than are asked for.
    let samples = recording::decode(bytes, verdict.frames).unwrap_or_else(|fault| panic!("{format:?}: {fault}"));
    let count = verdict.frames * u64::from(verdict.info.channels);
    assert_eq!(samples.interleaved.len() as u64, count);
    assert!(recording::decode(bytes, verdict.frames - 1).is_err());
    true
}

fn try_tar(bytes: &[u8]) -> bool {
    let length = bytes.len() as u64;
    let listing = tar::list(&mut Cursor::new(bytes), length).expect("reading from memory does not fail");
    for member in &listing.members {
        let end = member.offset.checked_add(member.size).filter(|end| *end <= length);
        assert_eq!(end.is_none(), member.truncated, "{member:?}");
    }
    assert!(listing.last_of_each_name().len() <= listing.members.len());
    matches!(listing.end, tar::End::Whole)
}

fn attack(target: &Target, inputs: std::ops::Range<u64>) {
    let trying = Arc::new(AtomicU64::new(0));
    let watched = trying.clone();
    let name = target.name;
    std::thread::spawn(move || {
        let (mut before, mut since) = (u64::MAX, Instant::now());
        while Arc::strong_count(&watched) > 1 {
            std::thread::sleep(Duration::from_millis(200));
            let now = watched.load(Ordering::Relaxed);
            if now != before {
                (before, since) = (now, Instant::now());
            } else if since.elapsed() > PATIENCE {
                eprintln!("{name}: input {now} does not end");
                std::process::abort();
            }
        }
    });
    // A panic of a decoder is caught and becomes a verdict; its message would only fill the screen.
    std::panic::set_hook(Box::new(|_| {}));
    let started = Instant::now();
    let (mut good, mut most) = (0u64, 0);
    for number in inputs.clone() {
        trying.store(number, Ordering::Relaxed);
        let bytes = damaged(&mut SplitMix64::new(number), &target.good);
        let held = HELD.get();
        MOST.set(held);
        let tried = std::panic::catch_unwind(|| (target.try_it)(&bytes));
        let used = MOST.get() - held;
        most = most.max(used);
        match tried {
            Ok(was_good) => good += u64::from(was_good),
            Err(panic) => {
                let _ = std::panic::take_hook();
                let said = panic.downcast_ref::<String>().map_or("", String::as_str);
                panic!("{name}: input {number}: {said}");
            }
        }
        if used > MOST_MEMORY {
            let _ = std::panic::take_hook();
            panic!("{name}: input {number} of {} bytes took {used} bytes", bytes.len());
        }
    }
    let _ = std::panic::take_hook();
    let count = inputs.end - inputs.start;
    println!(
        "{name}: {count} inputs, {good} of them good all the same, at most {:.1} MB each, {:.0} s",
        most as f64 / 1e6,
        started.elapsed().as_secs_f64()
    );
    // Damage that spares a file, and damage that does not, both occur.
    assert!(count < 1000 || (good > 0 && good < count));
}

#[test]
fn damaged_files_get_a_verdict() {
    for target in targets() {
        for good in &target.good {
            // A tar and each recording are good as they are.
            let found = recording::probe(good, &Format::ALL).map_err(|fault| fault.detail);
            assert!((target.try_it)(good), "{}: {found:?}", target.name);
        }
        attack(&target, 0..3000);
    }
}

#[test]
#[ignore = "a million inputs for each format: minutes to an hour"]
fn a_million_damaged_files_get_a_verdict() {
    let only = std::env::var("FLOW_HOSTILE").ok();
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let from = number("FLOW_HOSTILE_FROM").unwrap_or(0);
    let inputs = from..from + number("FLOW_HOSTILE_INPUTS").unwrap_or(1_000_000);
    for target in targets() {
        if only.as_deref().is_none_or(|only| only == target.name) {
            attack(&target, inputs.clone());
        }
    }
}
