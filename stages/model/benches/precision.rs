//! Products and the encoder in bf16 and int8 beside f32, in turns in one process: times of f32 and ratios to them.
//!
//! `cargo bench -p flow-model --bench precision`; `RAYON_NUM_THREADS` is the number of threads. The encoders have random weights:
//! two layers of parakeet-tdt-0.6b's width, and the sizes of the bundled model.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use flow_kernels::Noise;
use flow_kernels::product::PackedRhs;
use flow_kernels::product::low_precision::{LowPrecision, LowPrecisionRhs};
use flow_model::config::{AttentionContext, CausalConfig, EncoderConfig};
use flow_model::{Encoder, ParameterBuilder, Parameters, Precision, Result};

/// Rounds, of each of which the best counts.
const ROUNDS: usize = 5;

/// Seconds that each candidate is measured for in a round, at the least.
const SECONDS: f64 = 0.1;

/// Rows, depth and columns: one step of decoding, feed-forward, attention and joint network of a large model, and the layers of the
/// bundled one.
const PRODUCTS: [[usize; 3]; 7] = [
    [1, 640, 8198],
    [250, 1024, 4096],
    [250, 4096, 1024],
    [1500, 1024, 1024],
    [1500, 144, 576],
    [1500, 576, 144],
    [1500, 144, 144],
];

fn random(shape: &[usize], noise: &mut Noise) -> Result<Tensor> {
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| noise.normal() as f32).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// The best time of each candidate in seconds, measured in turns.
fn best(candidates: &mut [&mut dyn FnMut() -> Result<Tensor>]) -> Result<Vec<f64>> {
    let mut best = vec![f64::INFINITY; candidates.len()];
    for _ in 0..ROUNDS {
        for (candidate, best) in candidates.iter_mut().zip(&mut best) {
            let begun = Instant::now();
            while begun.elapsed().as_secs_f64() < SECONDS {
                let start = Instant::now();
                std::hint::black_box(candidate()?);
                *best = best.min(start.elapsed().as_secs_f64());
            }
        }
    }
    Ok(best)
}

/// Of the times, f32 first, then bf16 and int8.
fn show(name: &str, times: &[f64]) {
    let ratio = |index: usize| times[0] / times[index];
    println!(
        "{name:32} f32 {:9.3} ms; bf16 {:5.2} times, int8 {:5.2} times as fast",
        times[0] * 1e3,
        ratio(1),
        ratio(2)
    );
}

fn products() -> Result<()> {
    let mut noise = Noise::new(1);
    for [rows, depth, columns] in PRODUCTS {
        let (x, weight) = (
            random(&[rows, depth], &mut noise)?,
            random(&[columns, depth], &mut noise)?,
        );
        let f32 = PackedRhs::new(&weight.t()?)?;
        let low = |precision| LowPrecisionRhs::from_weight(precision, &weight);
        let (bf16, int8) = (low(LowPrecision::Bf16)?, low(LowPrecision::Int8)?);
        let times = best(
            &mut [&mut || Ok(f32.product(&x)?), &mut || Ok(bf16.product(&x)?), &mut || {
                Ok(int8.product(&x)?)
            }],
        )?;
        show(&format!("{rows} x {depth} x {columns}"), &times);
    }
    Ok(())
}

fn encoder(config: &EncoderConfig, precision: Precision) -> Result<(Encoder, Parameters)> {
    let builder = ParameterBuilder::random(DType::F32, Device::Cpu, 1);
    let mut builder = builder.compute_products_in(precision);
    let encoder = Encoder::new(config, "encoder", &mut builder)?;
    Ok((encoder, builder.finish().0))
}

/// Four utterances of ten seconds.
fn encoders() -> Result<()> {
    let config = |n_layers, d_model, n_heads, channels, bands| EncoderConfig {
        feat_in: bands,
        n_layers,
        d_model,
        use_bias: false,
        subsampling_conv_channels: channels,
        ff_expansion_factor: 4,
        n_heads,
        attention_context: AttentionContext::Full,
        xscaling: false,
        conv_kernel_size: 9,
        causal: CausalConfig::default(),
        dropout: 0.0,
        dropout_pre_encoder: 0.0,
        dropout_emb: 0.0,
        dropout_att: 0.0,
    };
    for (name, config) in [
        ("2 layers of width 1024", config(2, 1024, 8, 256, 128)),
        ("5 layers of width 144", config(5, 144, 4, 64, 80)),
    ] {
        let features = random(&[4, config.feat_in, 1000], &mut Noise::new(2))?;
        let all = [Precision::F32, Precision::Bf16, Precision::Int8].map(|precision| encoder(&config, precision));
        let [f32, bf16, int8] = all;
        let (f32, bf16, int8) = (f32?, bf16?, int8?);
        let encode = |(encoder, parameters): &(Encoder, Parameters)| -> Result<Tensor> {
            Ok(encoder.encode(parameters, &features, &[1000; 4])?.0)
        };
        let times = best(&mut [&mut || encode(&f32), &mut || encode(&bf16), &mut || encode(&int8)])?;
        show(name, &times);
    }
    Ok(())
}

fn main() -> Result<()> {
    flow_kernels::threads::install(|| {
        products()?;
        encoders()
    })
}
