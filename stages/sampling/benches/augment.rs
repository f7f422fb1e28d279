//! Measures what each step of augmentation costs on one core, as a share of decoding the same utterances.
//!
//! ```text
//! cargo bench --locked -p flow-sampling --bench augment -- FOLDER_OF_MP3 FOLDER_OF_OPUS
//! ```
//!
//! Shares are of decoding FLAC, and of decoding the recordings of each folder that is named, in any format.
//!
//! Utterances are those of the bundled corpus, joined to some ten seconds each; noise is 40 files of 30 s, and rooms are
//! exponentially decaying noise of 0.5 s.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use flow_audio::decode::{SAMPLE_RATE, decode, read_file};
use flow_audio::flac::{Samples, StreamInfo};
use flow_audio::{flac, flac_encode, tar};
use flow_random::SplitMix64;
use flow_sampling::augment::{Augmenter, Step};
use flow_shards::shards::list;
use flow_storage::Storage;
use serde_json::{Value, json};

/// Times are the best of so many.
const ROUNDS: usize = 5;
const RATE: usize = 16_000;

fn main() {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load of the machine: {}", load.trim());
    let utterances = utterances();
    let seconds = utterances.iter().map(Vec::len).sum::<usize>() as f64 / RATE as f64;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (noise, rooms) = (folder.path().join("noise"), folder.path().join("rooms"));
    let mut random = SplitMix64::new(1);
    for (folder, count, length, decay) in [(&noise, 40, 30 * RATE, 0.0), (&rooms, 40, RATE / 2, 10.0)] {
        fs::create_dir(folder).expect("a folder");
        for number in 0..count {
            let sample = |at: usize| ((random.unit() - 0.5) * 8000.0 * (-decay * at as f64 / RATE as f64).exp()) as f32;
            let signal: Vec<f32> = (0..length).map(sample).map(|x| x / 32768.0).collect();
            fs::write(folder.join(format!("{number}.flac")), flac_of(&signal)).expect("room for a recording");
        }
    }
    let stored: Vec<Vec<u8>> = utterances.iter().map(|signal| flac_of(signal)).collect();
    println!("{} utterances, {seconds:.0} s", stored.len());
    let mut decoding = vec![("FLAC".to_string(), ms_of_decoding(&stored))];
    for folder in std::env::args().skip(1).filter(|text| Path::new(text).is_dir()) {
        decoding.push((folder.clone(), ms_of_decoding(&recordings(Path::new(&folder)))));
    }
    for (name, ms) in &decoding {
        println!("decoding {name}: {ms:.3} ms per second of audio");
    }
    let decoding = &decoding[..];
    let (noise, rooms) = (noise.to_string_lossy(), rooms.to_string_lossy());
    let steps = [
        json!({"mix": {"path": noise, "prob": 1}}),
        json!({"noise": {"path": noise, "prob": 1}}),
        json!({"noise_norm": {"path": noise, "prob": 1}}),
        json!({"white_noise": {"prob": 1}}),
        json!({"reverb_rir": {"path": rooms, "prob": 1}}),
        json!({"impulse": {"path": rooms, "prob": 1}}),
        json!({"gain": {"prob": 1}}),
        json!({"perturb_volume": {"prob": 1}}),
        json!({"clip_amplitude": {"prob": 1}}),
        json!({"lowpass": {"prob": 1}}),
        json!({"narrowband": {"prob": 1}}),
        json!({"shift": {"prob": 1}}),
        json!({"silence": {"max_start_silence_secs": 1, "max_end_silence_secs": 1, "prob": 1}}),
    ];
    report("no step, a copy", &json!([]), &utterances, decoding, seconds);
    for step in &steps {
        let name = step
            .as_object()
            .and_then(|step| step.keys().next())
            .cloned()
            .unwrap_or_default();
        report(&name, &json!([step]), &utterances, decoding, seconds);
    }
    report(
        "reverb_rir, simulated",
        &json!([{"reverb_rir": {"prob": 1}}]),
        &utterances,
        decoding,
        seconds,
    );
    for codec in ["opus", "mp3"] {
        let steps = json!([{"compress": {"codecs": [codec], "prob": 1}}]);
        report(&format!("compress, {codec}"), &steps, &utterances, decoding, seconds);
    }
    let usual = [
        json!({"mix": {"path": noise, "prob": 0.5}}),
        json!({"reverb_rir": {"path": rooms, "prob": 0.3}}),
        json!({"gain": {"prob": 0.5}}),
    ];
    let name = "mix 0.5, reverb_rir 0.3, gain 0.5";
    report(name, &json!(usual), &utterances, decoding, seconds);
    for codec in ["opus", "mp3"] {
        let compress = json!({"compress": {"codecs": [codec], "prob": 0.1}});
        let steps = [&usual[..], &[compress]].concat();
        let name = format!("the same and compress 0.1, {codec}");
        report(&name, &json!(steps), &utterances, decoding, seconds);
    }
}

/// Milliseconds for a second of audio.
fn ms_of_decoding(recordings: &[Vec<u8>]) -> f64 {
    let mut frames = 0;
    let seconds = best(|| {
        let decoded = recordings
            .iter()
            .map(|bytes| decode(bytes, 100.0).expect("a good recording").len());
        frames = decoded.sum();
    });
    1000.0 * seconds * f64::from(SAMPLE_RATE) / frames as f64
}

/// The files of a folder.
fn recordings(folder: &Path) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a file").path()).collect();
    paths.sort();
    let read = |path: &PathBuf| read_file(&Storage::default(), path).expect("a recording");
    paths.iter().map(read).collect()
}

fn report(name: &str, steps: &Value, utterances: &[Vec<f32>], decoding: &[(String, f64)], seconds: f64) {
    let steps: Vec<Step> = serde_json::from_value(steps.clone()).expect("steps");
    let augmenter = Augmenter::open(&Storage::default(), &steps).expect("recordings");
    let mut epoch = 0;
    let mut heard = Vec::new();
    let cost = best(|| {
        epoch += 1;
        for (number, signal) in utterances.iter().enumerate() {
            // The loader decodes into a signal of its own; here it is copied into a buffer that stays.
            heard.clear();
            heard.extend_from_slice(signal);
            heard = augmenter
                .apply(std::mem::take(&mut heard), 42, epoch, &number.to_string())
                .unwrap();
        }
    });
    let ms = 1000.0 * cost / seconds;
    let shares = decoding
        .iter()
        .map(|(_, decoding)| format!("{:.1} %", 100.0 * ms / decoding));
    let shares = shares.collect::<Vec<String>>().join(", ");
    println!("{name}: {ms:.3} ms per second of audio, {shares} of decoding");
}

fn best(mut work: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let began = Instant::now();
        work();
        best = best.min(began.elapsed().as_secs_f64());
    }
    best
}

fn flac_of(signal: &[f32]) -> Vec<u8> {
    let info = StreamInfo {
        sample_rate: RATE as u32,
        channels: 1,
        bits: 16,
        total_frames: signal.len() as u64,
        md5: [0; 16],
    };
    let interleaved = signal.iter().map(|x| ((x * 32767.0) as i32) << 16).collect();
    flac_encode::encode(&Samples { info, interleaved }).expect("a FLAC file")
}

/// Speech of the bundled corpus in pieces of some ten seconds.
fn utterances() -> Vec<Vec<f32>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/corpus/mini/shards");
    let (mut found, mut joined) = (Vec::new(), Vec::new());
    for shard in list(&Storage::default(), &corpus).expect("the bundled corpus") {
        let Ok(mut file) = fs::File::open(shard.tar()) else {
            continue;
        };
        let length = file.metadata().expect("its size").len();
        let listing = tar::list(&mut file, length).expect("its members");
        for member in listing.last_of_each_name() {
            let bytes = flow_audio::decode::read_range(&Storage::default(), &shard.tar(), member.offset, member.size)
                .unwrap_or_default();
            if flac::probe(&bytes).is_ok() {
                joined.extend(decode(&bytes, 100.0).unwrap_or_default());
            }
            if joined.len() >= 10 * RATE {
                found.push(std::mem::take(&mut joined));
            }
        }
    }
    found
}
