//! CPU seconds that the networks of diarization take for an hour of audio on one thread, beside PyTorch's with the same weights
//! and inputs, in turns in one run; and the whole default way from samples to turns on one thread and on two.
//!
//! `FLOW_BENCH_PYTHON=python cargo bench --workspace --bench speakers -- [segmentation] [campplus] [resnet34] [silero]
//! [diarization]`; all of them without arguments. The best of `FLOW_BENCH_ROUNDS` (3) rounds counts. The peers are PyTorch
//! modules (`benches/peers/speakers.py`) and the package silero-vad on onnxruntime; what Python does not have is left out, and
//! the reason printed. ResNet34 has made-up weights, as none are bundled.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

mod peer;
mod resnet34;

use std::path::Path;
use std::time::Instant;

use flow_kernels::threads::pool;
use flow_nn::tensor_files::read_packed;
use flow_speakers::campplus::CamPlusPlus;
use flow_speakers::diarizer::{DiarizationSettings, Diarizer};
use flow_speakers::fbank::BANDS;
use flow_speakers::pyannet::{PyanNet, SAMPLE_RATE};
use flow_speakers::silero::{SileroVad, WINDOW};
use peer::Peer;

const STEP: usize = SAMPLE_RATE as usize;
const CHUNK: usize = 10 * STEP;
/// Chunks of 10 s, one each second: those that are measured, and those of an hour.
const CHUNKS: usize = 32;
const CHUNKS_OF_HOUR: f64 = 3600.0;
/// Frames of features of a chunk.
const FRAMES: usize = 998;
/// Frames of a speaker of a chunk, and speakers, as they were counted in conversations.
const PART: usize = 400;
const SPEAKERS: f64 = 2.0;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Seconds that this thread had a processor; where the system does not tell, seconds that passed.
fn cpu_seconds(start: Instant) -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|first| first.parse::<f64>().ok());
    nanoseconds.map_or_else(|| start.elapsed().as_secs_f64(), |nanoseconds| nanoseconds / 1e9)
}

fn rounds() -> usize {
    let rounds = std::env::var("FLOW_BENCH_ROUNDS").ok();
    rounds.and_then(|text| text.parse().ok()).unwrap_or(3).max(1)
}

/// Numbers in (-`size`, `size`) from a seed.
fn noise(count: usize, size: f32) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| size * next()).collect()
}

/// A tone that comes and goes, in noise.
fn samples() -> Vec<f32> {
    let noise = noise(CHUNK + (CHUNKS - 1) * STEP, 0.05).into_iter().enumerate();
    let tone = |at: usize| 0.2 * (at as f32 * 0.07).sin() * (at as f32 * 0.000_8).sin();
    noise.map(|(at, noise)| noise + tone(at)).collect()
}

fn write(folder: &Path, name: &str, values: &[f32]) -> std::io::Result<()> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    std::fs::write(folder.join(name), bytes)
}

/// Runs ours and the peer's in turns, and prints the best of both for an hour of audio, which has so many runs, and how far the
/// results are apart.
fn compare(
    name: &str,
    runs_of_hour: f64,
    peer: &mut Peer,
    case: &str,
    mut ours: impl FnMut() -> flow_speakers::Result<Vec<f32>>,
) -> flow_speakers::Result<()> {
    let (mut best, mut other) = (f64::INFINITY, f64::INFINITY);
    let (mut found, mut difference) = (ours()?, None);
    let mut has_peer = true;
    for _ in 0..rounds() {
        let start = Instant::now();
        let before = cpu_seconds(start);
        found = ours()?;
        best = best.min(cpu_seconds(start) - before);
        match has_peer.then(|| peer.run(case)).flatten() {
            Some(ran) => {
                other = other.min(ran.cpu_seconds);
                let largest = found
                    .iter()
                    .zip(&ran.values)
                    .map(|(a, b)| (a - b).abs())
                    .fold(0.0, f32::max);
                difference = Some(largest);
            }
            None => has_peer = false,
        }
    }
    let hour = best * runs_of_hour;
    let largest = found.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    match difference {
        Some(difference) => println!(
            "{name:36} {hour:8.1} s {:8.1} s {:6.2} times; results differ by {difference:.1e} of {largest:.1e}",
            other * runs_of_hour,
            other / best
        ),
        None => println!("{name:36} {hour:8.1} s"),
    }
    Ok(())
}

fn networks(wants: &dyn Fn(&str) -> bool, folder: &Path) -> Result<(), Failure> {
    let samples = samples();
    let (features, part) = (noise(FRAMES * BANDS, 5.0), noise(PART * BANDS, 5.0));
    write(folder, "samples", &samples)?;
    write(folder, "features", &features)?;
    write(folder, "part", &part)?;
    let carried = Path::new(env!("CARGO_MANIFEST_DIR")).join("weights");
    for (name, file, size) in [
        ("segmentation", "segmentation-3.0", 4),
        ("campplus", "campplus-zh-en-common.f16", 2),
    ] {
        let bytes = read_packed(&carried.join(format!("{file}.safetensors")), size)?;
        std::fs::write(folder.join(format!("{name}.safetensors")), bytes)?;
    }
    let resnet34 = resnet34::made_up_weights()?;
    std::fs::write(folder.join("resnet34.safetensors"), &resnet34)?;

    println!("{:36} {:>10} {:>10}", "CPU s for an hour of audio", "flow", "peer");
    let mut peer = Peer::start(folder);
    if wants("segmentation") {
        let network = PyanNet::bundled()?;
        let runs = CHUNKS_OF_HOUR / CHUNKS as f64;
        compare("segmentation-3.0", runs, &mut peer, "segmentation", || {
            let chunks: Vec<Vec<f32>> = network.recording(&samples, CHUNK, STEP)?.collect::<Result<_, _>>()?;
            Ok(chunks.into_iter().next_back().unwrap_or_default())
        })?;
        let alone: Vec<&[f32]> = (0..CHUNKS).map(|chunk| &samples[chunk * STEP..][..CHUNK]).collect();
        compare(
            "segmentation-3.0, chunks alone",
            runs,
            &mut peer,
            "segmentation",
            || {
                let chunks = alone.iter().map(|chunk| network.log_probabilities(&[*chunk]));
                let chunks: Vec<Vec<Vec<f32>>> = chunks.collect::<Result<_, _>>()?;
                Ok(chunks.into_iter().flatten().next_back().unwrap_or_default())
            },
        )?;
    }
    if wants("campplus") {
        let network = CamPlusPlus::bundled()?;
        let runs = SPEAKERS * CHUNKS_OF_HOUR;
        let name = format!("CAM++, {SPEAKERS} speakers of {PART} frames");
        compare(&name, runs, &mut peer, "campplus part", || network.embedding(&part))?;
        compare("CAM++, a chunk", CHUNKS_OF_HOUR, &mut peer, "campplus chunk", || {
            network.embedding(&features)
        })?;
    }
    if wants("resnet34") {
        let network = flow_speakers::wespeaker::WeSpeakerResNet34::from_safetensors(&resnet34)?;
        let mask = [1.0; 589];
        compare(
            "ResNet34, a chunk with 3 masks",
            CHUNKS_OF_HOUR,
            &mut peer,
            "resnet34",
            || Ok(network.embeddings(&features, &[&mask[..]; 3])?.concat()),
        )?;
    }
    if wants("silero") {
        let network = SileroVad::bundled()?;
        let whole = &samples[..samples.len() / WINDOW * WINDOW];
        let runs = 3600.0 * f64::from(SAMPLE_RATE) / whole.len() as f64;
        compare("silero-vad, windows as they come", runs, &mut peer, "silero", || {
            let (mut stream, mut probabilities) = (network.stream(), Vec::new());
            for window in whole.chunks(WINDOW) {
                stream.feed(window, &mut probabilities)?;
            }
            stream.finish(&mut probabilities);
            Ok(probabilities)
        })?;
    }
    Ok(())
}

/// The bundled conversation of 45 s, by all networks and steps.
fn diarization() -> Result<(), Failure> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/golden/speakers/conv2.flac");
    let samples = flow_audio::decode::decode(&std::fs::read(path)?, 1e5)?;
    let seconds = samples.len() as f64 / f64::from(SAMPLE_RATE);
    let diarizer = Diarizer::bundled()?;
    for threads in [1, 2] {
        let pool = pool("bench", threads)?;
        let mut best = f64::INFINITY;
        for _ in 0..rounds() {
            let start = Instant::now();
            pool.install(|| diarizer.diarize(&samples, &DiarizationSettings::default(), &|| false))?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        println!(
            "diarization of {seconds:.0} s, {threads} thread(s): {best:.2} s wall, {:.1} times real time, {:.0} s for an hour",
            seconds / best,
            best / seconds * 3600.0
        );
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    let asked: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with("--"))
        .collect();
    let wants = |name: &str| asked.is_empty() || asked.iter().any(|asked| asked == name);
    if ["segmentation", "campplus", "resnet34", "silero"]
        .into_iter()
        .any(wants)
    {
        let folder = tempfile::tempdir()?;
        pool("bench", 1)?.install(|| networks(&wants, folder.path()))?;
    }
    if wants("diarization") {
        diarization()?;
    }
    Ok(())
}
