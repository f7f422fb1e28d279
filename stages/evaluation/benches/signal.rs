//! Measures a recording's way to the model on one core: FLAC, 16 kHz mono, log-mel features.
//!
//! ```text
//! RAYON_NUM_THREADS=1 cargo bench --locked --workspace --bench signal -- FOLDER
//! ```
//!
//! Without `FOLDER` it measures the bundled corpus; with it, the recordings right in it, in any format, or FLAC files in
//! `<lang>/<shard_id>/` folders.
//!
//! Then the same with the usual augmentation (noise for half of the recordings, a room for three in ten, gain for half), as a share
//! of loading without it.
//!
//! The peer, in the same run where `FLOW_BENCH_PYTHON` (or `python3`) names a Python that has `soundfile` and NeMo:
//! `benches/peers/signal_nemo.py`, on one thread as well. Both get the recordings that are 16 kHz mono.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use candle_core::{DType, Device};
use flow_audio::decode::{decode, read_file};
use flow_audio::flac::{Samples, StreamInfo};
use flow_audio::{flac, flac_encode, tar};
use flow_kind::Storage;
use flow_model::{ModelConfig, ParameterBuilder};
use flow_nn::features::LogMel;
use flow_random::SplitMix64;
use flow_sampling::augment::Augmenter;
use flow_shards::shards::{list, recordings};
use serde_json::json;

/// Times are the best of so many.
const ROUNDS: usize = 3;

fn main() {
    // On a thread of the pool, as training loads: from another one every kernel would wait to be taken up.
    rayon::scope(|_| measure());
}

fn measure() {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load of the machine: {}", load.trim());
    let bytes = speech();
    let seconds: f64 = bytes.iter().map(|bytes| length_of(bytes)).sum();
    println!("{} recordings, {seconds:.0} s", bytes.len());
    let front_end = front_end();
    let decoded = best(|| {
        for bytes in &bytes {
            std::hint::black_box(decode(bytes, 100.0).expect("a good recording"));
        }
    });
    let both_of = |recordings: &[Vec<u8>]| {
        best(|| {
            for bytes in recordings {
                let signal = decode(bytes, 100.0).expect("a good recording");
                std::hint::black_box(front_end.compute(&[&signal], None).expect("features"));
            }
        })
    };
    let both = both_of(&bytes);
    // The peer verifies no MD5; neither do we where a recording says that it has none.
    let mut without = bytes.clone();
    let with_md5 = without.iter_mut().filter(|bytes| bytes.starts_with(b"fLaC"));
    with_md5.for_each(|bytes| bytes[26..42].fill(0));
    let unverified = both_of(&without);
    println!("to 16 kHz mono: {:.0} times as fast as it is spoken", seconds / decoded);
    println!(
        "to log-mel, 128 bands: {:.0} times; with no MD5 to verify {:.0} times",
        seconds / both,
        seconds / unverified
    );
    let folder = tempfile::tempdir().expect("a temporary folder");
    let augmenter = usual_augmentation(folder.path());
    let mut epoch = 0;
    let augmented = best(|| {
        // Each epoch draws other steps, so that a round has several.
        for _ in 0..4 {
            epoch += 1;
            for (number, bytes) in bytes.iter().enumerate() {
                let signal = decode(bytes, 100.0).expect("a good recording");
                let signal = augmenter.apply(signal, 42, epoch, &number.to_string()).unwrap();
                std::hint::black_box(front_end.compute(&[&signal], None).expect("features"));
            }
        }
    }) / 4.0;
    println!(
        "the same with `mix` 0.5, `reverb_rir` 0.3 and `gain` 0.5: {:.0} times; {:.1} % more time, {:.1} % of decoding",
        seconds / augmented,
        100.0 * (augmented / both - 1.0),
        100.0 * (augmented - both) / decoded
    );
    let Some([peer_decoded, peer_both]) = peer(&bytes) else {
        println!("no Python with soundfile and NeMo: nothing to compare with");
        return;
    };
    println!(
        "soundfile: {:.0} times, {:.2} times as long as ours; with NeMo's features: {:.0} times, {:.2} times as long, {:.2} \
         times as long as ours without MD5",
        seconds / peer_decoded,
        peer_decoded / decoded,
        seconds / peer_both,
        peer_both / both,
        peer_both / unverified
    );
}

/// Seconds that the peer takes to decode, and to decode and make features.
fn peer(recordings: &[Vec<u8>]) -> Option<[f64; 2]> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (number, bytes) in recordings.iter().enumerate() {
        std::fs::write(folder.path().join(format!("{number:06}.flac")), bytes).expect("room for a recording");
    }
    let python = std::env::var("FLOW_BENCH_PYTHON").unwrap_or_else(|_| "python3".into());
    let output = Command::new(python)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers/signal_nemo.py"))
        .arg(folder.path())
        .output()
        .ok()?;
    let said = String::from_utf8(output.stdout).ok()?;
    let mut numbers = said.lines().last()?.split(' ').map(str::parse::<f64>);
    Some([numbers.next()?.ok()?, numbers.next()?.ok()?])
}

/// The recordings right in a folder; or the good ones of shards of FLAC files, or of the bundled corpus.
fn speech() -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let mut take = |bytes: Vec<u8>| {
        if flac::probe(&bytes).is_ok_and(|verdict| verdict.info.sample_rate == 16_000 && verdict.info.channels == 1) {
            found.push(bytes);
        }
    };
    if let Some(folder) = std::env::args().skip(1).find(|text| Path::new(text).is_dir()) {
        let entries = std::fs::read_dir(&folder).expect("a folder");
        let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("its files").path()).collect();
        files.retain(|path| path.is_file());
        if !files.is_empty() {
            files.sort();
            let read = |path: &PathBuf| read_file(&Storage::default(), path).expect("a recording");
            return files.iter().map(read).collect();
        }
        for shard in list(&Storage::default(), Path::new(&folder)).expect("<lang>/<shard_id>/ folders") {
            for (name, _) in recordings(&Storage::default(), &shard).expect("its files") {
                take(read_file(&Storage::default(), &shard.folder.join(name)).expect("a recording"));
            }
        }
        return found;
    }
    let corpus: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/corpus/mini/shards");
    for shard in list(&Storage::default(), &corpus).expect("the bundled corpus") {
        let Ok(mut file) = std::fs::File::open(shard.tar()) else {
            continue;
        };
        let length = file.metadata().expect("its size").len();
        let listing = tar::list(&mut file, length).expect("its members");
        for member in listing.last_of_each_name() {
            if let Ok(bytes) =
                flow_audio::decode::read_range(&Storage::default(), &shard.tar(), member.offset, member.size)
            {
                take(bytes);
            }
        }
    }
    found
}

/// Noise is 40 files of 30 s, rooms are 40 responses of 0.5 s: exponentially decaying noise.
fn usual_augmentation(folder: &Path) -> Augmenter {
    let mut random = SplitMix64::new(1);
    for (name, seconds, decay) in [("noise", 30.0, 0.0), ("rooms", 0.5, 10.0)] {
        std::fs::create_dir(folder.join(name)).expect("a folder");
        for number in 0..40 {
            let total_frames = (seconds * 16_000.0) as u64;
            let sample = |at: u64| (random.unit() - 0.5) * 0.25 * (-decay * at as f64 / 16_000.0).exp();
            let interleaved = (0..total_frames)
                .map(sample)
                .map(|x| ((x * 32767.0) as i32) << 16)
                .collect();
            let info = StreamInfo {
                sample_rate: 16_000,
                channels: 1,
                bits: 16,
                total_frames,
                md5: [0; 16],
            };
            let bytes = flac_encode::encode(&Samples { info, interleaved }).expect("a FLAC file");
            std::fs::write(folder.join(name).join(format!("{number}.flac")), bytes).expect("room for a recording");
        }
    }
    let steps = json!([
        {"mix": {"path": folder.join("noise"), "prob": 0.5}},
        {"reverb_rir": {"path": folder.join("rooms"), "prob": 0.3}},
        {"gain": {"prob": 0.5}},
    ]);
    Augmenter::open(
        &Storage::default(),
        &serde_json::from_value::<Vec<_>>(steps).expect("steps"),
    )
    .expect("recordings")
}

fn length_of(bytes: &[u8]) -> f64 {
    decode(bytes, 100.0).expect("a good recording").len() as f64 / 16_000.0
}

fn front_end() -> LogMel {
    let config = ModelConfig::from_nemo_yaml(
        "
preprocessor: {sample_rate: 16000, window_size: 0.025, window_stride: 0.01, features: 128, n_fft: 512, pad_to: 0}
encoder:
  {feat_in: 128, n_layers: 1, d_model: 64, n_heads: 4, use_bias: false, xscaling: false, conv_kernel_size: 9,
   subsampling: dw_striding, subsampling_factor: 8, subsampling_conv_channels: 16, dropout: 0.1,
   dropout_pre_encoder: 0.1, dropout_emb: 0.0, dropout_att: 0.1}
decoder: {vocab_size: 1024, prednet: {pred_hidden: 64, pred_rnn_layers: 1}}
joint: {jointnet: {joint_hidden: 64}}
loss: {tdt_kwargs: {durations: [0, 1, 2, 3, 4], sigma: 0.02}}
",
    )
    .expect("the configuration above is valid");
    let mut builder = ParameterBuilder::random(DType::F32, Device::Cpu, 1);
    LogMel::new(&config.preprocessor, &mut builder).expect("a front end")
}

fn best(mut run: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let started = Instant::now();
        run();
        best = best.min(started.elapsed().as_secs_f64());
    }
    best
}
