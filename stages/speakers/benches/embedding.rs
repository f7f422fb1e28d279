//! CPU time that the networks of speaker embeddings take on one thread: of CAM++ for parts of 400 frames and for 10 s, of
//! WeSpeaker's ResNet34 for 10 s, and what that makes for an hour of audio with a chunk of 10 s each second.
//!
//! `cargo bench --workspace --bench embedding`

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::time::Instant;

use flow_kernels::threads::pool;
use flow_speakers::campplus::CamPlusPlus;
use flow_speakers::fbank::BANDS;
use flow_speakers::wespeaker::WeSpeakerResNet34;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

const CHUNKS_OF_HOUR: f64 = 3600.0;
/// Frames of a chunk.
const CHUNK: usize = 998;
/// Frames of a speaker of a chunk, and speakers, as they were counted in conversations.
const PART: usize = 400;
const SPEAKERS: f64 = 2.0;

/// Seconds that this thread had a processor; where the system does not tell, seconds that passed.
fn cpu_seconds(start: Instant) -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|first| first.parse::<f64>().ok());
    nanoseconds.map_or_else(|| start.elapsed().as_secs_f64(), |nanoseconds| nanoseconds / 1e9)
}

/// Least milliseconds of `runs` calls.
fn milliseconds(runs: usize, mut work: impl FnMut() -> flow_speakers::Result<()>) -> flow_speakers::Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..runs {
        let start = Instant::now();
        let before = cpu_seconds(start);
        work()?;
        best = best.min(cpu_seconds(start) - before);
    }
    Ok(best * 1e3)
}

fn noise(count: usize, size: f32) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| size * next()).collect()
}

/// WeSpeaker's network with random weights, as none are bundled.
fn wespeaker() -> Result<WeSpeakerResNet34, Box<dyn std::error::Error>> {
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
    let mut add = |name: String, shape: &[usize], one: bool| {
        let count: usize = shape.iter().product();
        let inputs = (count / shape[0]) as f32;
        let values = if one {
            vec![1.0; count]
        } else {
            noise(count, (6.0 / inputs).sqrt().min(0.1))
        };
        tensors.push((name, shape.to_vec(), values));
    };
    let mut layer = |convolution: &str, norm: &str, shape: [usize; 4]| {
        add(format!("{convolution}.weight"), &shape, false);
        for (part, one) in [
            ("weight", true),
            ("bias", false),
            ("running_mean", false),
            ("running_var", true),
        ] {
            add(format!("{norm}.{part}"), &shape[..1], one);
        }
    };
    layer("conv1", "bn1", [32, 1, 3, 3]);
    let mut inputs = 32;
    for (number, (count, outputs)) in [(3, 32), (4, 64), (6, 128), (3, 256)].into_iter().enumerate() {
        for block in 0..count {
            let name = |part: &str| format!("layer{}.{block}.{part}", number + 1);
            layer(&name("conv1"), &name("bn1"), [outputs, inputs, 3, 3]);
            layer(&name("conv2"), &name("bn2"), [outputs, outputs, 3, 3]);
            if inputs != outputs {
                layer(&name("shortcut.0"), &name("shortcut.1"), [outputs, inputs, 1, 1]);
            }
            inputs = outputs;
        }
    }
    add("seg_1.weight".into(), &[256, 5120], false);
    add("seg_1.bias".into(), &[256], false);
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(.., values)| values.iter().flat_map(|value| value.to_le_bytes()).collect())
        .collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, shape, _), bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    Ok(WeSpeakerResNet34::from_safetensors(&safetensors::serialize(
        views, None,
    )?)?)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let campplus = CamPlusPlus::bundled()?;
    let wespeaker = wespeaker()?;
    let mask = [1.0; 589];
    pool("bench", 1)?.install(|| -> flow_speakers::Result<()> {
        for (frames, reference) in [(100, 35.0), (PART, 92.1), (CHUNK, 205.5)] {
            let features = noise(frames * BANDS, 5.0);
            let time = milliseconds(10, || campplus.embedding(&features).map(|_| ()))?;
            println!(
                "CAM++, {frames} frames: {time:.1} ms, {:.3} a frame (torch on a Xeon of 2.8 GHz: {reference} ms)",
                time / frames as f64
            );
            if frames == PART {
                let hour = time / 1e3 * SPEAKERS * CHUNKS_OF_HOUR;
                println!("CAM++, {SPEAKERS} speakers of {PART} frames a chunk: {hour:.0} s for an hour (torch: 663 s)");
            }
        }
        let features = noise(CHUNK * BANDS, 5.0);
        let time = milliseconds(5, || wespeaker.embeddings(&features, &[&mask[..]; 3]).map(|_| ()))?;
        let hour = time / 1e3 * CHUNKS_OF_HOUR;
        println!("ResNet34, a chunk, 3 masks: {time:.0} ms, {hour:.0} s for an hour (torch: 435 ms, 1563 s)");
        Ok(())
    })?;
    Ok(())
}
