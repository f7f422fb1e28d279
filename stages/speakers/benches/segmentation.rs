//! CPU seconds for an hour of audio that the segmentation network takes on one thread, with chunks of 10 s each second:
//! chunks alone, and those of a recording.
//!
//! `cargo bench --workspace --bench segmentation`; `FLOW_BENCH_CHUNKS` changes how many chunks are measured.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::time::Instant;

use flow_kernels::threads::pool;
use flow_speakers::pyannet::{PyanNet, SAMPLE_RATE};

const CHUNK: usize = 10 * SAMPLE_RATE as usize;
const STEP: usize = SAMPLE_RATE as usize;
const CHUNKS_OF_HOUR: f64 = 3600.0;

/// Seconds that this thread had a processor; where the system does not tell, seconds that passed.
fn cpu_seconds(start: Instant) -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|first| first.parse::<f64>().ok());
    nanoseconds.map_or_else(|| start.elapsed().as_secs_f64(), |nanoseconds| nanoseconds / 1e9)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let chunks: usize = std::env::var("FLOW_BENCH_CHUNKS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(60)
        .max(1);
    let mut state = 1u32;
    let samples: Vec<f32> = (0..CHUNK + (chunks - 1) * STEP)
        .map(|at| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let noise = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
            0.05 * noise + 0.2 * (at as f32 * 0.07).sin() * (at as f32 * 0.000_8).sin()
        })
        .collect();
    let network = PyanNet::bundled()?;
    let alone: Vec<&[f32]> = (0..chunks).map(|chunk| &samples[chunk * STEP..][..CHUNK]).collect();
    let measure = |name: &str, work: &(dyn Fn() -> flow_speakers::Result<usize> + Sync)| -> flow_speakers::Result<()> {
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            let start = Instant::now();
            let before = cpu_seconds(start);
            assert_eq!(work()?, chunks);
            best = best.min(cpu_seconds(start) - before);
        }
        println!(
            "{name}: {:.1} s for an hour of audio",
            best / chunks as f64 * CHUNKS_OF_HOUR
        );
        Ok(())
    };
    pool("bench", 1)?.install(|| {
        measure("chunks of a recording", &|| {
            network
                .recording(&samples, CHUNK, STEP)?
                .try_fold(0, |count, chunk| chunk.map(|_| count + 1))
        })?;
        measure("chunks alone", &|| Ok(network.log_probabilities(&alone)?.len()))
    })?;
    println!("torch on a Xeon of 2.8 GHz, for comparison: 145 s");
    Ok(())
}
