//! A cache-aware encoder step by step at 80 ms: how many cores a session needs.
//!
//! `RAYON_NUM_THREADS=1 cargo bench -p flow-model --bench streaming`: CPU milliseconds of a step over 80 are cores. The
//! encoders have random weights: the sizes of the golden streaming network, for ten minutes of speech, and those of a model of 0.6
//! billion parameters, for a few seconds. `FLOW_BENCH_LAYERS` is the number of layers of the large one (24).

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::time::Instant;

use candle_core::{DType, Device};
use flow_kernels::Noise;
use flow_model::config::{AttentionContext, CausalConfig, ChunkContext, EncoderConfig};
use flow_model::encoder::cached::EncoderCache;
use flow_model::{Encoder, ParameterBuilder, Precision, Result};

/// Milliseconds of audio of an encoded frame.
const FRAME: f64 = 80.0;

fn config([n_layers, d_model, n_heads, channels, bands]: [usize; 5], left: Option<usize>) -> EncoderConfig {
    let context = ChunkContext { left, right: Some(0) };
    EncoderConfig {
        feat_in: bands,
        n_layers,
        d_model,
        use_bias: false,
        subsampling_conv_channels: channels,
        ff_expansion_factor: 4,
        n_heads,
        attention_context: AttentionContext::Chunks(context),
        xscaling: false,
        conv_kernel_size: 9,
        causal: CausalConfig {
            subsampling: true,
            convolution: true,
            layer_norm: true,
            contexts: vec![context],
            probabilities: Vec::new(),
        },
        dropout: 0.0,
        dropout_pre_encoder: 0.0,
        dropout_emb: 0.0,
        dropout_att: 0.0,
    }
}

/// Seconds that the threads of this process have computed.
fn cpu_seconds() -> f64 {
    // SAFETY: getrusage writes the whole struct that it is given, and zero is a valid value of each of its fields.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Steps of so many sessions beside each other: the mean time of one, the longest, the mean CPU time, and what it means.
fn steps(name: &str, config: &EncoderConfig, precision: Precision, (sessions, steps): (usize, usize)) -> Result<()> {
    let builder = ParameterBuilder::random(DType::F32, Device::Cpu, 1);
    let mut builder = builder.compute_products_in(precision);
    let encoder = Encoder::new(config, "encoder", &mut builder)?;
    let (parameters, _) = builder.finish();
    let plan = encoder.chunk_plan(&parameters, config.causal.contexts[0])?;
    let caches: Result<Vec<EncoderCache>> = (0..sessions).map(|_| encoder.cache(&parameters)).collect();
    let (mut caches, mut noise) = (caches?, Noise::new(3));
    // The cache of the attention is full before the measurement begins.
    let before = plan.context.rows_kept() + 1;
    let (mut total, mut longest, mut cpu) = (0.0f64, 0.0f64, 0.0f64);
    for step in 0..before + steps {
        let features: Vec<Vec<f32>> = caches
            .iter()
            .map(|cache| {
                let count = plan.next_chunk(cache) * config.feat_in;
                (0..count).map(|_| noise.normal() as f32).collect()
            })
            .collect();
        let mut chunks: Vec<_> = caches.iter_mut().zip(features.iter().map(Vec::as_slice)).collect();
        let (begun, cpu_before) = (Instant::now(), cpu_seconds());
        std::hint::black_box(encoder.step(&parameters, &plan, &mut chunks)?);
        if step >= before {
            let took = begun.elapsed().as_secs_f64() * 1e3;
            (total, longest) = (total + took, longest.max(took));
            cpu += (cpu_seconds() - cpu_before) * 1e3;
        }
    }
    let (mean, cpu) = (total / steps as f64, cpu / steps as f64);
    println!(
        "{name:28} {:5} {sessions} sessions, {:6.1} s: {mean:8.2} ms a step, {longest:8.2} at most, {cpu:8.2} of a CPU; {:5.2} cores a session",
        precision.name(),
        steps as f64 * FRAME / 1e3,
        cpu / FRAME / sessions as f64,
    );
    Ok(())
}

fn main() -> Result<()> {
    let layers = std::env::var("FLOW_BENCH_LAYERS")
        .ok()
        .and_then(|text| text.parse().ok());
    flow_kernels::threads::install(|| {
        println!("{} threads", rayon::current_num_threads());
        let small = config([2, 40, 4, 16, 80], Some(70));
        steps("2 layers of width 40", &small, Precision::F32, (1, 7_500))?;
        let large = config([layers.unwrap_or(24), 1024, 8, 256, 128], Some(70));
        let name = format!("{} layers of width 1024", large.n_layers);
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
            for sessions in [1, 4] {
                steps(&name, &large, precision, (sessions, 25))?;
            }
        }
        Ok(())
    })
}
