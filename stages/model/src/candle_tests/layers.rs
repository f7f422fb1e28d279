//! Layers of the encoder, and all of it.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{BatchNorm, Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, Module, ModuleT, ops};
use flow_kernels::attention::Context;
use flow_kernels::{Lengths, Noise};

use super::{Case, DTYPES, Variables, declared, random};
use crate::config::{AttentionContext, CausalConfig, ChunkContext, EncoderConfig};
use crate::encoder::Encoder;
use flow_nn::layers::Frames;
use flow_nn::layers::attention::{Attention, PositionTable};
use flow_nn::layers::convolution::{self, BatchNormPass, Convolution};
use flow_nn::layers::feed_forward::FeedForward;
use flow_nn::layers::linear::Linear;
use flow_nn::layers::norm::LayerNorm;
use flow_nn::layers::subsampling::Subsampling;
use flow_nn::lora::{LoraConfig, Targets};
use flow_nn::parameters::{BufferUpdates, Mode, ParameterBuilder};
use flow_nn::pending_sums::PendingSums;

/// No size is a multiple of a vector's width.
fn config() -> EncoderConfig {
    EncoderConfig {
        feat_in: 13,
        n_layers: 2,
        d_model: 12,
        use_bias: true,
        subsampling_conv_channels: 5,
        ff_expansion_factor: 3,
        n_heads: 3,
        attention_context: AttentionContext::Full,
        xscaling: true,
        conv_kernel_size: 5,
        causal: CausalConfig::default(),
        dropout: 0.0,
        dropout_pre_encoder: 0.0,
        dropout_emb: 0.0,
        dropout_att: 0.0,
    }
}

/// The configuration of a cache-aware model.
fn causal() -> EncoderConfig {
    let context = ChunkContext::limited(4, 1);
    EncoderConfig {
        attention_context: AttentionContext::Chunks(context),
        causal: CausalConfig {
            subsampling: true,
            convolution: true,
            layer_norm: true,
            contexts: vec![context],
            probabilities: Vec::new(),
        },
        ..config()
    }
}

fn unlimited(left: Option<usize>, right: Option<usize>) -> ChunkContext {
    ChunkContext { left, right }
}

const TIME: usize = 19;

fn frames(context: AttentionContext) -> Frames {
    Frames {
        batch: 3,
        time: TIME,
        lengths: Lengths::new([TIME, 8, 1]),
        context: context.into(),
    }
}

/// 1 for valid frames, (B, T).
fn valid(lengths: &[usize], time: usize, dtype: DType) -> Result<Tensor> {
    let rows = lengths
        .iter()
        .flat_map(|&length| (0..time).map(move |t| f64::from(u8::from(t < length))));
    Tensor::from_iter(rows, &Device::Cpu)?
        .reshape((lengths.len(), time))?
        .to_dtype(dtype)
}

fn layer_norm(v: &Variables, name: &str, x: &Tensor) -> Result<Tensor> {
    let [weight, bias] = ["weight", "bias"].map(|part| v.get(&format!("{name}.{part}")));
    // For a contiguous input candle-nn has an operation without a gradient.
    let x = x.t()?.contiguous()?.t()?;
    candle_nn::LayerNorm::new(weight, bias, 1e-5).forward(&x)
}

fn feed_forward(v: &Variables, name: &str, x: &Tensor) -> Result<Tensor> {
    let hidden = v.linear(&format!("{name}.linear1"))?.forward(x)?;
    v.linear(&format!("{name}.linear2"))?.forward(&ops::silu(&hidden)?)
}

fn convolution(v: &Variables, name: &str, x: &Tensor, frames: &Frames, causal: bool, frozen: bool) -> Result<Tensor> {
    let d = x.dim(1)?;
    let halves = v.linear(&format!("{name}.pointwise_conv1"))?.forward(x)?.chunk(2, 1)?;
    let gated = (&halves[0] * ops::sigmoid(&halves[1])?)?.reshape((frames.batch, frames.time, d))?;
    let gated = gated.broadcast_mul(&valid(&frames.lengths, frames.time, x.dtype())?.unsqueeze(2)?)?;
    let taps = v.get(&format!("{name}.depthwise_conv.weight"));
    let kernel = taps.dim(2)?;
    let (before, behind) = if causal {
        (kernel - 1, 0)
    } else {
        (kernel / 2, kernel / 2)
    };
    let padded = gated.transpose(1, 2)?.contiguous()?.pad_with_zeros(2, before, behind)?;
    let groups = Conv1dConfig {
        groups: d,
        ..Default::default()
    };
    let convolved = Conv1d::new(taps, v.find(&format!("{name}.depthwise_conv.bias")), groups).forward(&padded)?;
    let rows = |x: &Tensor| x.transpose(1, 2)?.contiguous()?.reshape((frames.rows(), d));
    let norm = format!("{name}.batch_norm");
    let normalised = if causal {
        layer_norm(v, &norm, &rows(&convolved)?)?
    } else {
        let [mean, variance, weight, bias] =
            ["running_mean", "running_var", "weight", "bias"].map(|part| v.get(&format!("{norm}.{part}")));
        rows(&BatchNorm::new(d, mean, variance, weight, bias, 1e-5)?.forward_t(&convolved, !frozen)?)?
    };
    v.linear(&format!("{name}.pointwise_conv2"))?
        .forward(&ops::silu(&normalised)?)
}

/// Whether a frame sees another.
fn sees(context: Context, query: usize, key: usize) -> bool {
    match context {
        Context::All => true,
        Context::Band(width) => query.abs_diff(key) <= width,
        Context::From(left) => query.saturating_sub(key) <= left,
        Context::Chunks { size, left } => (query / size)
            .checked_sub(key / size)
            .is_some_and(|chunks| chunks <= left),
    }
}

/// Scores of queries (B, H, T, k) with positions (H, 2T - 1, k), the first of which is T - 1, by query and key: Transformer-XL's shift.
fn shifted(query: &Tensor, positions: &Tensor) -> Result<Tensor> {
    let scores = query
        .contiguous()?
        .broadcast_matmul(&positions.transpose(1, 2)?.unsqueeze(0)?.contiguous()?)?;
    let (batch, heads, time, reach) = scores.dims4()?;
    let scores = scores
        .pad_with_zeros(3, 1, 0)?
        .reshape((batch, heads, reach + 1, time))?;
    let scores = scores
        .narrow(2, 1, reach)?
        .contiguous()?
        .reshape((batch, heads, time, reach))?;
    scores.narrow(3, 0, time)
}

fn attention(v: &Variables, name: &str, x: &Tensor, positions: &Tensor, frames: &Frames) -> Result<Tensor> {
    let [u, w] = ["u", "v"].map(|part| v.get(&format!("{name}.pos_bias_{part}")));
    let (heads, k) = u.dims2()?;
    let (batch, time) = (frames.batch, frames.time);
    let project = |part: &str| -> Result<Tensor> {
        let y = v.linear(&format!("{name}.linear_{part}"))?.forward(x)?;
        y.reshape((batch, time, heads, k))?.transpose(1, 2)
    };
    let (query, key, value) = (project("q")?, project("k")?, project("v")?.contiguous()?);
    let positions = v.linear(&format!("{name}.linear_pos"))?.forward(positions)?;
    let positions = positions.reshape(((), heads, k))?.transpose(0, 1)?;
    let with = |bias: &Tensor| query.broadcast_add(&bias.unsqueeze(1)?.unsqueeze(0)?);
    let content = with(&u)?.contiguous()?.matmul(&key.transpose(2, 3)?.contiguous()?)?;
    let scores = ((content + shifted(&with(&w)?, &positions)?)? / (k as f64).sqrt())?;
    let seen = frames.lengths.iter().flat_map(|&length| {
        let seen = move |q: usize, s: usize| q < length && s < length && sees(frames.context, q, s);
        (0..time).flat_map(move |q| (0..time).map(move |s| f64::from(u8::from(seen(q, s)))))
    });
    let seen = Tensor::from_iter(seen, &Device::Cpu)?
        .reshape((batch, 1, time, time))?
        .to_dtype(x.dtype())?;
    let weights = ops::softmax(&scores.broadcast_add(&((&seen - 1.0)? * 1e4)?)?, D::Minus1)?.broadcast_mul(&seen)?;
    let context = weights.matmul(&value)?.transpose(1, 2)?.contiguous()?;
    v.linear(&format!("{name}.linear_out"))?
        .forward(&context.reshape((batch * time, heads * k))?)
}

/// Features (B, F, T) -> rows (B T', d), T' and the valid frames.
fn subsampling(v: &Variables, name: &str, x: &Tensor, lengths: &[usize], causal: bool) -> Result<(Tensor, Vec<usize>)> {
    let more = usize::from(causal);
    let mut lengths = lengths.to_vec();
    let mask = |x: &Tensor, lengths: &[usize]| {
        let (batch, _, time, _) = x.dims4()?;
        x.broadcast_mul(&valid(lengths, time, x.dtype())?.reshape((batch, 1, time, 1))?)
    };
    // (B, 1, T, F)
    let mut x = mask(&x.transpose(1, 2)?.contiguous()?.unsqueeze(1)?, &lengths)?;
    for (strided, pointwise) in [(0, None), (2, Some(3)), (5, Some(6))] {
        let channels = x.dim(1)?;
        let settings = Conv2dConfig {
            stride: 2,
            padding: 1,
            groups: channels,
            ..Default::default()
        };
        let [weight, bias] = ["weight", "bias"].map(|part| v.get(&format!("{name}.conv.{strided}.{part}")));
        let padded = x.pad_with_zeros(2, more, 0)?.pad_with_zeros(3, more, 0)?;
        x = Conv2d::new(weight, Some(bias), settings).forward(&padded)?;
        if let Some(pointwise) = pointwise {
            let [weight, bias] = ["weight", "bias"].map(|part| v.get(&format!("{name}.conv.{pointwise}.{part}")));
            x = Conv2d::new(weight, Some(bias), Conv2dConfig::default()).forward(&x)?;
        }
        for length in &mut lengths {
            *length = (*length + more).div_ceil(2);
        }
        x = mask(&x.relu()?, &lengths)?;
    }
    let (batch, channels, time, bands) = x.dims4()?;
    let rows = x
        .transpose(1, 2)?
        .contiguous()?
        .reshape((batch * time, channels * bands))?;
    Ok((v.linear(&format!("{name}.out"))?.forward(&rows)?, lengths))
}

#[test]
fn layer_normalisation() {
    for dtype in DTYPES {
        let (norm, parameters) = declared(dtype, |builder| LayerNorm::new("norm", 37, builder));
        let noise = &mut Noise::new(1);
        let (x, dy) = (random(&[11, 37], dtype, noise), random(&[11, 37], dtype, noise));
        let case = Case {
            name: "layer norm",
            parameters: &parameters,
            inputs: &[&x],
            dy: &dy,
            terms: 37,
        };
        case.compare(
            |gradients| {
                let (y, saved) = norm.forward(&parameters, &x)?;
                let mut sums = PendingSums::default();
                let dx = norm.backward(&parameters, &saved, &dy, None, &mut sums)?;
                sums.complete(&parameters, gradients)?;
                Ok((y, vec![Some(dx)]))
            },
            |v, inputs| layer_norm(v, "norm", &inputs[0]),
        );
    }
}

#[test]
fn linear_layer_with_lora() {
    let lora = || {
        let config = LoraConfig {
            rank: 3,
            alpha: 5.0,
            targets: vec!["linear".into()],
            base: String::new(),
        };
        Targets::new(config, str::to_string)
    };
    for dtype in DTYPES {
        let mut builder = ParameterBuilder::random(dtype, Device::Cpu, 3).with_lora(lora().unwrap(), 4);
        let linear = Linear::new("linear", 21, 10, true, &mut builder).unwrap();
        let mut parameters = builder.finish().0;
        let noise = &mut Noise::new(2);
        // It begins as zeros.
        let b = parameters.id("linear.lora_B.weight").unwrap();
        parameters.set(b, random(&[10, 3], dtype, noise)).unwrap();
        let (x, dy) = (random(&[9, 21], dtype, noise), random(&[9, 10], dtype, noise));
        let case = Case {
            name: "LoRA",
            parameters: &parameters,
            inputs: &[&x],
            dy: &dy,
            terms: 21,
        };
        case.compare(
            |gradients| {
                let y = linear.forward(&parameters, &x)?;
                Ok((y, vec![Some(linear.backward(&parameters, &x, &dy, gradients)?)]))
            },
            |v, inputs| {
                let thin = v
                    .linear("linear.lora_B")?
                    .forward(&v.linear("linear.lora_A")?.forward(&inputs[0])?)?;
                v.linear("linear")?.forward(&inputs[0])? + (thin * (5.0 / 3.0))?
            },
        );
    }
}

#[test]
fn feed_forward_module() {
    for dtype in DTYPES {
        let (module, parameters) = declared(dtype, |builder| FeedForward::new("ff", &config(), builder));
        let noise = &mut Noise::new(3);
        let (x, dy) = (random(&[11, 12], dtype, noise), random(&[11, 12], dtype, noise));
        let case = Case {
            name: "feed-forward",
            parameters: &parameters,
            inputs: &[&x],
            dy: &dy,
            terms: 36,
        };
        case.compare(
            |gradients| {
                let (y, saved) = module.forward(&parameters, &x, &mut Mode::Evaluate)?;
                let mut sums = PendingSums::default();
                let dx = module.backward(&parameters, &saved, &dy, gradients, &mut sums)?;
                sums.complete(&parameters, gradients)?;
                Ok((y, vec![Some(dx)]))
            },
            |v, inputs| feed_forward(v, "ff", &inputs[0]),
        );
    }
}

#[test]
fn convolution_module_with_each_norm() {
    for dtype in DTYPES {
        for (name, config, batch_norm) in [
            ("convolution, batch norm", config(), convolution::BatchNorm::OwnRows),
            (
                "convolution, running statistics",
                config(),
                convolution::BatchNorm::Frozen,
            ),
            (
                "causal convolution, layer norm",
                causal(),
                convolution::BatchNorm::OwnRows,
            ),
        ] {
            let (module, parameters) = declared(dtype, |builder| Convolution::new("conv", &config, builder));
            let frames = frames(AttentionContext::Full);
            let noise = &mut Noise::new(4);
            let (x, dy) = (
                random(&[frames.rows(), 12], dtype, noise),
                random(&[frames.rows(), 12], dtype, noise),
            );
            let case = Case {
                name,
                parameters: &parameters,
                inputs: &[&x],
                dy: &dy,
                terms: frames.rows(),
            };
            case.compare(
                |gradients| {
                    let mut updates = BufferUpdates::default();
                    let mut pass = BatchNormPass {
                        batch_norm,
                        known: None,
                        gather: None,
                        updates: &mut updates,
                    };
                    let mut drop = Noise::new(0);
                    let (y, saved) = module.forward(&parameters, &x, &frames, &Mode::Train(&mut drop), &mut pass)?;
                    let mut sums = PendingSums::default();
                    let gather = &mut |own: &Tensor| Ok(own.unsqueeze(0)?);
                    let dx = module.backward(&parameters, &saved, &frames, (&dy, gather), (gradients, &mut sums))?;
                    sums.complete(&parameters, gradients)?;
                    Ok((y, vec![Some(dx)]))
                },
                |v, inputs| {
                    let frozen = batch_norm == convolution::BatchNorm::Frozen;
                    convolution(v, "conv", &inputs[0], &frames, config.causal.convolution, frozen)
                },
            );
        }
    }
}

#[test]
fn attention_with_each_context() {
    for dtype in DTYPES {
        for context in [
            AttentionContext::Full,
            AttentionContext::Band(3),
            AttentionContext::Chunks(ChunkContext::limited(4, 1)),
            AttentionContext::Chunks(unlimited(None, Some(3))),
            AttentionContext::Chunks(unlimited(Some(5), None)),
        ] {
            let (module, parameters) = declared(dtype, |builder| Attention::new("att", &config(), builder));
            let frames = frames(context);
            let noise = &mut Noise::new(5);
            let (x, dy) = (
                random(&[frames.rows(), 12], dtype, noise),
                random(&[frames.rows(), 12], dtype, noise),
            );
            let positions = PositionTable::new(12).rows(TIME, dtype, &Device::Cpu).unwrap();
            let name = format!("attention, {context:?}");
            let case = Case {
                name: &name,
                parameters: &parameters,
                inputs: &[&x],
                dy: &dy,
                terms: frames.rows(),
            };
            case.compare(
                |gradients| {
                    let (y, saved) = module.forward(&parameters, &x, &positions, &frames, &mut Mode::Evaluate)?;
                    let mut sums = PendingSums::default();
                    let dx = module.backward(&parameters, &saved, &frames, &dy, gradients, &mut sums)?;
                    let kept = sums.complete(&parameters, gradients)?;
                    module.backward_positions(&parameters, &saved, &kept, gradients)?;
                    Ok((y, vec![Some(dx)]))
                },
                |v, inputs| attention(v, "att", &inputs[0], &positions, &frames),
            );
        }
    }
}

#[test]
fn subsampling_by_eight() {
    for dtype in DTYPES {
        for (name, config) in [("sub-sampling", config()), ("causal sub-sampling", causal())] {
            let (module, parameters) = declared(dtype, |builder| Subsampling::new("pre", &config, builder));
            let noise = &mut Noise::new(6);
            let (features, lengths) = (random(&[3, 13, 45], dtype, noise), [45, 22, 1]);
            let rows = 3 * module.forward(&parameters, &features, &lengths).unwrap().1;
            let dy = random(&[rows, 12], dtype, noise);
            // Sums of the first taps are over most of the features.
            let case = Case {
                name,
                parameters: &parameters,
                inputs: &[&features],
                dy: &dy,
                terms: 3 * 13 * 45 / 4,
            };
            case.compare(
                |gradients| {
                    let (y, _, _, saved) = module.forward(&parameters, &features, &lengths)?;
                    module.backward(&parameters, &saved, &dy, gradients)?;
                    Ok((y, vec![None]))
                },
                |v, inputs| Ok(subsampling(v, "pre", &inputs[0], &lengths, config.causal.subsampling)?.0),
            );
        }
    }
}

/// Residual sums, and norms of two layers in one pass.
#[test]
fn whole_encoder() {
    for dtype in DTYPES {
        for (name, config) in [("encoder", config()), ("cache-aware encoder", causal())] {
            let (encoder, parameters) = declared(dtype, |builder| Encoder::new(&config, "encoder", builder));
            let noise = &mut Noise::new(7);
            let (features, lengths) = (random(&[3, 13, 77], dtype, noise), [77, 30, 9]);
            let time = encoder
                .encode(&parameters, &features, &lengths)
                .unwrap()
                .0
                .dim(1)
                .unwrap();
            let dy = random(&[3, time, 12], dtype, noise);
            let case = Case {
                name,
                parameters: &parameters,
                inputs: &[&features],
                dy: &dy,
                terms: 3 * 13 * 77 / 4,
            };
            case.compare(
                |gradients| {
                    let mode = Mode::Train(&mut Noise::new(0));
                    let (y, _, saved, _) = encoder.forward(&parameters, &features, &lengths, mode)?;
                    encoder.backward(&parameters, saved, &dy, gradients)?;
                    Ok((y, vec![None]))
                },
                |v, inputs| {
                    let is_causal = config.causal.convolution;
                    let (x, valid) = subsampling(v, "encoder.pre_encode", &inputs[0], &lengths, is_causal)?;
                    let frames = Frames {
                        batch: 3,
                        time,
                        lengths: Lengths::new(valid),
                        context: config.attention_context.into(),
                    };
                    let positions = PositionTable::new(12).rows(time, dtype, &Device::Cpu).unwrap();
                    let mut x = (x * 12f64.sqrt())?;
                    for layer in 0..config.n_layers {
                        let name = |part: &str| format!("encoder.layers.{layer}.{part}");
                        let norm = |part: &str, x: &Tensor| layer_norm(v, &name(&format!("norm_{part}")), x);
                        let half = |part: &str, x: &Tensor| feed_forward(v, &name(part), &norm(part, x)?)? * 0.5;
                        x = (&x + half("feed_forward1", &x)?)?;
                        x = (&x + attention(v, &name("self_attn"), &norm("self_att", &x)?, &positions, &frames)?)?;
                        x = (&x + convolution(v, &name("conv"), &norm("conv", &x)?, &frames, is_causal, false)?)?;
                        x = (&x + half("feed_forward2", &x)?)?;
                        x = norm("out", &x)?;
                    }
                    x.reshape((3, time, 12))
                },
            );
        }
    }
}
