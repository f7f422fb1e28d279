//! Transcribing an hour in one file and 500 short files with the bundled model, compared with NeMo and onnx-asr with
//! the same model, each in a separate process on the same machine, with two threads.
//!
//! `cargo bench --bench transcribe -- ROUNDS` (1 if not said; the best of each counts). The recordings are made of those of
//! the bundled corpus below `work/bench/transcribe` and kept. Peers run where `FLOW_BENCH_PYTHON` (or `python3`) has their
//! packages; onnx-asr also needs NeMo, which exports the model for it. Prints wall and CPU seconds, peak memory, seconds of
//! audio for each second (real-time factor), and the time from the start of a process to its first text (`one file`);
//! the same with `--precision bf16` and `int8`, as ratios to f32.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::{DType, Device, Tensor};
use flow_model::ModelConfig;
use flow_model::checkpoint::{Format, OpenModel};
use flow_model::model::TdtModel;
use flow_model::tokenizer::Tokenizer;

mod measured;
mod peers;
mod recordings;

use measured::{Measured, installed, measure};
use peers::{THREADS, exported, peer, rounds};
use recordings::{RATE, clips, long, wav};

const SHORT_FILES: usize = 500;
/// What `--precision` is given beside f32, in turns with it.
const LOW: [&str; 2] = ["bf16", "int8"];
/// Length of the long recording, and of the cuts of it that peers are given, in samples.
const LONG: usize = 3600 * RATE;
const CUT: usize = 20 * RATE;

/// Lengths of the recordings of the large network, in samples.
const SOON: usize = 15 * RATE;
const FIVE_MINUTES: usize = 300 * RATE;
/// Tokens that the large network emits in fifteen seconds: as many as people speak.
const TOKENS: usize = 50;

/// A set of recordings. Peers, which do not detect speech, get the long one in segments.
#[derive(Clone)]
struct Workload {
    name: &'static str,
    flow: &'static str,
    peers: &'static str,
    seconds: f64,
}

fn write_wav(path: &Path, samples: &[f32]) {
    fs::write(path, wav(samples)).expect("a recording can be written");
}

/// Makes the recordings, and returns the seconds of each set.
fn workloads(root: &Path, work: &Path) -> [Workload; 3] {
    let clips = clips(root);
    let short = |number: usize| &clips[number % clips.len()];
    if !work.join("whole").exists() {
        for folder in ["one", "short", "long", "cuts"] {
            fs::create_dir_all(work.join(folder)).expect("the folder of the recordings");
        }
        write_wav(&work.join("one/0000.wav"), short(0));
        for number in 0..SHORT_FILES {
            write_wav(&work.join(format!("short/{number:04}.wav")), short(number));
        }
        let long = long(&clips, LONG);
        write_wav(&work.join("long/hour.wav"), &long);
        for (number, cut) in long.chunks(CUT).enumerate() {
            write_wav(&work.join(format!("cuts/{number:04}.wav")), cut);
        }
        File::create(work.join("whole")).expect("the mark of a complete set");
    }
    let seconds = |samples: usize| samples as f64 / RATE as f64;
    let all_short: usize = (0..SHORT_FILES).map(|number| short(number).len()).sum();
    let workload = |name, flow, peers, samples| Workload {
        name,
        flow,
        peers,
        seconds: seconds(samples),
    };
    [
        workload("one file", "one", "one", short(0).len()),
        workload("500 short files", "short", "short", all_short),
        workload("one hour", "long", "cuts", LONG),
    ]
}

/// The same for the large network.
fn full_workloads(root: &Path, work: &Path) -> [Workload; 2] {
    let sets = [
        ("15 seconds", "soon", "soon-cuts", SOON),
        ("five minutes", "minutes", "minutes-cuts", FIVE_MINUTES),
    ];
    let audio = long(&clips(root), FIVE_MINUTES);
    sets.map(|(name, folder, cuts, samples)| {
        fs::create_dir_all(work.join(folder)).expect("the folder of the recordings");
        write_wav(&work.join(folder).join("0000.wav"), &audio[..samples]);
        // Peers that take whole recordings would need the memory of all of it at once.
        fs::create_dir_all(work.join(cuts)).expect("the folder of the recordings");
        for (number, cut) in audio[..samples].chunks(CUT).enumerate() {
            write_wav(&work.join(cuts).join(format!("{number:04}.wav")), cut);
        }
        Workload {
            name,
            flow: folder,
            peers: cuts,
            seconds: samples as f64 / RATE as f64,
        }
    })
}

/// Writes a network of the size of parakeet-tdt-0.6b-v2 with random weights and the tokenizer of the bundled one, which has as many
/// pieces. The bias of blank is set such that it emits as many tokens as people speak.
fn full_model(root: &Path, work: &Path) -> flow_model::Result<PathBuf> {
    let path = work.join("full.nemo");
    if path.exists() {
        return Ok(path);
    }
    let config = "
preprocessor: {sample_rate: 16000, window_size: 0.025, window_stride: 0.01, features: 128, n_fft: 512, pad_to: 0}
encoder:
  {feat_in: 128, n_layers: 24, d_model: 1024, n_heads: 8, use_bias: false, xscaling: false,
   conv_kernel_size: 9, subsampling: dw_striding, subsampling_factor: 8, subsampling_conv_channels: 256,
   dropout: 0.0, dropout_pre_encoder: 0.0, dropout_emb: 0.0, dropout_att: 0.0}
decoder: {vocab_size: 1024, prednet: {pred_hidden: 640, pred_rnn_layers: 2}}
joint: {jointnet: {joint_hidden: 640, dropout: 0.0}}
loss: {tdt_kwargs: {durations: [0, 1, 2, 3, 4], sigma: 0.02}}
";
    let tokenizer = OpenModel::open(&root.join("configs/models/small.nemo"))?.tokenizer;
    let tokenizer = Tokenizer::from_bytes(&tokenizer.expect("the bundled model has a tokenizer"))?;
    let config = ModelConfig::from_nemo_yaml(config)?;
    let mut model = TdtModel::new(config, Some(tokenizer), 1, DType::F32, &Device::Cpu)?;
    let audio = long(&clips(root), SOON);
    let bias = model
        .parameters
        .id("joint.joint_net.2.bias")
        .expect("the joint network");
    let mut values: Vec<f32> = model.parameters.get(bias).to_vec1()?;
    let blank = values.len() - 6;
    values[blank + 1..].copy_from_slice(&[-2.0, 1.0, 2.0, 1.0, 0.0]);
    let (mut low, mut high) = (-40.0f32, 40.0f32);
    for _ in 0..12 {
        values[blank] = (low + high) / 2.0;
        let tensor = Tensor::from_slice(&values, values.len(), &Device::Cpu)?;
        model.parameters.set(bias, tensor)?;
        let emitted = model.transcribe(&[&audio])?[0].ids.len();
        (low, high) = if emitted > TOKENS {
            (values[blank], high)
        } else {
            (low, values[blank])
        };
    }
    let folder = work.join("full");
    model.save(&folder)?;
    OpenModel::open(&folder)?.write(&path, Format::Nemo, None, true)?;
    fs::remove_dir_all(&folder).expect("the folder of the model can be removed");
    Ok(path)
}

/// `flow transcribe` with products in a precision.
fn flow(model: &Path, work: &Path, workload: &Workload, precision: &str) -> Command {
    let out = work.join("out");
    if out.exists() {
        fs::remove_dir_all(&out).expect("transcripts of the last round can be removed");
    }
    let mut flow = Command::new(env!("CARGO_BIN_EXE_flow"));
    flow.arg("transcribe").arg(work.join(workload.flow));
    flow.arg("--model").arg(model);
    flow.arg("--out").arg(out);
    flow.args(["--format", "jsonl", "--progress", "none", "--workers", THREADS]);
    flow.args(["--precision", precision]);
    flow.env("RAYON_NUM_THREADS", THREADS);
    flow
}

/// Words in the transcripts that `flow` wrote.
fn words(out: &Path) -> usize {
    let entries = fs::read_dir(out)
        .expect("the transcripts")
        .map(|entry| entry.expect("a transcript").path());
    let lines = entries.filter(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    let count = |path: PathBuf| {
        let text = fs::read_to_string(path).expect("a transcript");
        let line: serde_json::Value = serde_json::from_str(&text).expect("a line of JSON");
        line["pred_text"]
            .as_str()
            .map_or(0, |text| text.split_whitespace().count())
    };
    lines.map(count).sum()
}

fn show(name: &str, workload: &Workload, of: &Measured, words: &str, base: Option<&Measured>) {
    let ratio = base.map_or(String::new(), |flow| {
        format!(
            "; {:.2} times the wall time of flow, {:.2} times its CPU time, {:.2} times its memory",
            of.wall / flow.wall,
            of.cpu / flow.cpu,
            of.mebibytes / flow.mebibytes
        )
    });
    println!(
        "{:16} {name:10} {:8.2} s wall {:8.2} s CPU {:8.0} MiB {:8.1} times real time, {words} words{ratio}",
        workload.name,
        of.wall,
        of.cpu,
        of.mebibytes,
        workload.seconds / of.wall
    );
}

fn better(best: Option<Measured>, now: Measured) -> Option<Measured> {
    match best {
        Some(best) if best.wall <= now.wall => Some(best),
        _ => Some(now),
    }
}

fn main() {
    let rounds = rounds();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let work = root.join("work/bench/transcribe");
    let is_full = std::env::args().any(|argument| argument == "full");
    let (workloads, model) = if is_full {
        fs::create_dir_all(&work).expect("the folder of the recordings");
        let model = full_model(root, &work).expect("the large network");
        (full_workloads(root, &work).to_vec(), model)
    } else {
        (workloads(root, &work).to_vec(), root.join("configs/models/small.nemo"))
    };
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("best of {rounds}; load of the machine before: {}", load.trim());

    let onnx = work.join("onnx");
    let nemo = installed("nemo.collections.asr");
    let mut peers: Vec<(&str, &str, &Path)> = Vec::new();
    if nemo {
        peers.push(("NeMo", "transcribe_nemo.py", &model));
    }
    if !is_full && installed("onnx_asr") && exported(root, &onnx, nemo) {
        peers.push(("onnx-asr", "transcribe_onnx_asr.py", &onnx));
    }
    for workload in &workloads {
        let (mut best, mut found): (Option<Measured>, String) = (None, String::new());
        let mut low: Vec<(Option<Measured>, String)> = LOW.iter().map(|_| (None, String::new())).collect();
        let mut others: Vec<Option<Measured>> = peers.iter().map(|_| None).collect();
        for _ in 0..rounds {
            let ran = measure(flow(&model, &work, workload, "f32")).expect("flow runs");
            best = better(best, ran);
            found = words(&work.join("out")).to_string();
            for (precision, (best, text)) in LOW.iter().zip(&mut low) {
                let ran = measure(flow(&model, &work, workload, precision)).expect("flow runs");
                *best = better(best.take(), ran);
                *text = words(&work.join("out")).to_string();
            }
            for ((_, script, model), best) in peers.iter().zip(&mut others) {
                let mut command = peer(script, root);
                command.arg(model).arg(work.join(workload.peers));
                if let Some(ran) = measure(command) {
                    *best = better(best.take(), ran);
                }
            }
        }
        let Some(flow) = best else { continue };
        show("flow", workload, &flow, &found, None);
        for (precision, (best, words)) in LOW.iter().zip(&low) {
            if let Some(best) = best {
                show(precision, workload, best, words, Some(&flow));
            }
        }
        for ((name, ..), best) in peers.iter().zip(&others) {
            match best {
                Some(best) => show(name, workload, best, &best.said, Some(&flow)),
                None => println!("{:16} {name:10} failed", workload.name),
            }
        }
    }
}
