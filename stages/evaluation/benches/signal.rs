//! Measures a recording's way to the model on one core: FLAC, 16 kHz mono, log-mel features.
//!
//! ```text
//! cargo bench --locked --workspace --bench signal
//! ```
//!
//! The peer in Python: `soundfile.read`, then the features of NeMo's `AudioToMelSpectrogramPreprocessor`, or in
//! numpy alone
//!
//! ```text
//! python -c "
//! import glob, sys, time, numpy as np, soundfile
//! bank, window = np.random.rand(128, 257).astype('f4'), np.hanning(400).astype('f4')
//! start, cpu, n = time.time(), time.process_time(), 0
//! for path in glob.glob(sys.argv[1] + '/**/*.flac', recursive=True):
//!     x, rate = soundfile.read(path, dtype='float32')
//!     if rate != 16000 or x.ndim > 1: continue
//!     n += len(x) / rate
//!     x = np.pad(np.append(x[:1], x[1:] - 0.97 * x[:-1]), 256)
//!     frames = np.lib.stride_tricks.sliding_window_view(x, 400)[::160] * window
//!     np.log((np.abs(np.fft.rfft(frames, 512)) ** 2) @ bank.T + 2**-24)
//! print(n / (time.process_time() - cpu), 'times as fast as it is spoken')" FOLDER
//! ```

use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::{DType, Device};
use flow_audio::decode::{decode, read_file};
use flow_audio::shards::{list, recordings};
use flow_audio::{flac, tar};
use flow_model::features::LogMel;
use flow_model::{ModelConfig, ParameterBuilder};

/// Times are the best of so many.
const ROUNDS: usize = 3;

fn main() {
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
    let both = best(|| {
        for bytes in &bytes {
            let signal = decode(bytes, 100.0).expect("a good recording");
            std::hint::black_box(front_end.compute(&[&signal], None).expect("features"));
        }
    });
    println!(
        "FLAC to 16 kHz mono: {:.0} times as fast as it is spoken",
        seconds / decoded
    );
    println!("FLAC to log-mel, 128 bands: {:.0} times", seconds / both);
}

/// The good recordings of a folder of FLAC files, or of the bundled corpus.
fn speech() -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let mut take = |bytes: Vec<u8>| {
        if flac::probe(&bytes).is_ok() {
            found.push(bytes);
        }
    };
    if let Some(folder) = std::env::args().skip(1).find(|text| Path::new(text).is_dir()) {
        for shard in list(Path::new(&folder)).expect("<lang>/<shard_id>/ folders") {
            for (name, _) in recordings(&shard).expect("its files") {
                take(read_file(&shard.folder.join(name)).expect("a recording"));
            }
        }
        return found;
    }
    let corpus: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/corpus/mini/shards");
    for shard in list(&corpus).expect("the bundled corpus") {
        let Ok(mut file) = std::fs::File::open(shard.tar()) else {
            continue;
        };
        let length = file.metadata().expect("its size").len();
        let listing = tar::list(&mut file, length).expect("its members");
        for member in listing.last_of_each_name() {
            if let Ok(bytes) = flow_audio::decode::read_range(&shard.tar(), member.offset, member.size) {
                take(bytes);
            }
        }
    }
    found
}

fn length_of(bytes: &[u8]) -> f64 {
    let verdict = flac::probe(bytes).expect("a good recording");
    verdict.frames as f64 / f64::from(verdict.info.sample_rate)
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
