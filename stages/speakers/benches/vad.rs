//! How many times faster than real time voice activity is found, on one thread: recordings whole, and in pieces of 32 ms
//! as they come from a microphone.
//!
//! `cargo bench -p flow-speakers --bench vad`; `FLOW_BENCH_SECONDS` changes how long the recording is.

use std::time::Instant;

use flow_speakers::silero::{SAMPLE_RATE, SileroVad, WINDOW};

fn main() -> flow_speakers::Result<()> {
    let seconds: usize = std::env::var("FLOW_BENCH_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(300);
    let mut state = 1u32;
    let samples: Vec<f32> = (0..seconds * SAMPLE_RATE as usize)
        .map(|at| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let noise = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
            0.05 * noise + 0.2 * (at as f32 * 0.07).sin() * (at as f32 * 0.000_8).sin()
        })
        .collect();
    let network = SileroVad::bundled()?;
    for (name, piece) in [("whole", samples.len()), ("pieces of 512 samples", WINDOW)] {
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            let start = Instant::now();
            let mut probabilities = Vec::new();
            let mut stream = network.stream();
            for piece in samples.chunks(piece.max(1)) {
                stream.feed(piece, &mut probabilities)?;
            }
            stream.finish(&mut probabilities);
            assert_eq!(probabilities.len(), samples.len().div_ceil(WINDOW));
            best = best.min(start.elapsed().as_secs_f64());
        }
        println!("{name}: {:.0} times real time", seconds as f64 / best);
    }
    Ok(())
}
