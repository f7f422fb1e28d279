//! Matrix products, the kernels around them, and one whole layer of the encoder.

use candle_core::{DType, Device, Tensor};
use flow_kernels::Lengths;
use flow_kernels::Noise;
use flow_kernels::attention::{Context, Scores, weights, weights_backward};
use flow_kernels::batch_norm::{Normaliser, Statistics, batch_statistics, normalise_silu, normalise_silu_backward};
use flow_kernels::depthwise::{depthwise, depthwise_backward, depthwise_backward_weight};
use flow_kernels::elementwise::{silu, silu_backward};
use flow_kernels::glu::{glu, glu_backward};
use flow_kernels::layer_norm::{layer_norm, layer_norm_backward};
use flow_kernels::lstm::{LstmWeights, lstm, lstm_backward};
use flow_kernels::product::{PackedRhs, product};
use flow_model::config::{AttentionContext, CausalConfig, EncoderConfig};
use flow_model::{BufferUpdates, Gradients, Mode, ParameterBuilder, Result};
use flow_nn::layers::Frames;
use flow_nn::layers::attention::PositionTable;
use flow_nn::layers::conformer_layer::ConformerLayer;
use flow_nn::layers::convolution::{BatchNorm, BatchNormPass};

use crate::peer::{Peer, compare};

pub fn random(shape: &[usize]) -> Result<Tensor> {
    let mut noise = Noise::new(shape.len() as u64);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| noise.normal() as f32).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// Products of the block's sizes: x W^T and its two gradients, products per head, the joint network's last layer, and
/// the prediction network's steps.
pub fn products(torch: &mut Peer) -> Result<()> {
    for (name, layout, [m, k, n]) in [
        ("feed-forward 1", "nt", [1200, 256, 1024]),
        ("feed-forward 1, dx", "nn", [1200, 1024, 256]),
        ("feed-forward 1, dW", "tn", [1024, 1200, 256]),
        ("feed-forward 2", "nt", [1200, 1024, 256]),
        ("feed-forward 2, dW", "tn", [256, 1200, 1024]),
        ("projection", "nt", [1200, 256, 256]),
        ("positions, one head", "nt", [1200, 32, 299]),
        ("joint", "nt", [512, 320, 1030]),
        ("joint, dh", "nn", [512, 1030, 320]),
        ("joint, dW", "tn", [1030, 512, 320]),
        ("1024 cubed", "nn", [1024, 1024, 1024]),
        ("feed-forward 1, d 1024, 15 s", "nt", [188, 1024, 4096]),
        ("LSTM step of 8", "nt", [8, 640, 2560]),
        ("LSTM step of 1", "nt", [1, 640, 2560]),
        ("one frame", "nt", [1, 1024, 4096]),
    ] {
        let of = |letter: u8, rows: usize, columns: usize| -> Result<Tensor> {
            Ok(if letter == b'n' {
                random(&[rows, columns])?
            } else {
                random(&[columns, rows])?.t()?
            })
        };
        let (a, b) = (of(layout.as_bytes()[0], m, k)?, of(layout.as_bytes()[1], k, n)?);
        compare(
            &format!("{name} {m}x{k}x{n}"),
            torch,
            &format!("matmul {layout} {m} {k} {n}"),
            || Ok(product(&a, &b).map(drop)?),
        )?;
    }
    // As the LSTM has its recurrent weights.
    for [m, k, n] in [[8, 640, 2560], [8, 2560, 640]] {
        let (a, b) = (random(&[m, k])?, random(&[n, k])?.t()?);
        let kept = PackedRhs::new(&b)?;
        compare(
            &format!("packed before, {m}x{k}x{n}"),
            torch,
            &format!("matmul nt {m} {k} {n}"),
            || Ok(kept.product(&a).map(drop)?),
        )?;
    }
    for [batch, m, k, n] in [[64, 150, 32, 150], [64, 150, 150, 32]] {
        let (a, b) = (random(&[batch, m, k])?, random(&[batch, k, n])?);
        compare(
            &format!("{batch} of {m}x{k}x{n}"),
            torch,
            &format!("batched {batch} {m} {k} {n}"),
            || Ok(product(&a, &b).map(drop)?),
        )?;
    }
    Ok(())
}

/// Forward and backward of everything in a layer that is no matrix product, and the LSTM.
pub fn around(torch: &mut Peer) -> Result<()> {
    let (batch, time, d, heads) = (8, 150, 256, 8);
    let rows = batch * time;
    let lengths = Lengths::new(vec![time; batch]);
    let (x, dy) = (random(&[rows, d])?, random(&[rows, d])?);
    let (weight, bias) = (random(&[d])?, random(&[d])?);
    compare("layer norm 1200x256", torch, "layer_norm 1200 256", || {
        let (_, statistics) = layer_norm(&x, &weight, &bias)?;
        Ok(layer_norm_backward(&x, &statistics, &weight, &dy, None).map(drop)?)
    })?;
    let (content, position) = (
        random(&[heads, batch, time, time])?,
        random(&[heads, batch, time, 2 * time - 1])?,
    );
    let scores = Scores {
        lengths: &lengths,
        scale: 0.17,
        context: Context::All,
        queries: 0..time,
        keys: 0..time,
        reach: time - 1,
    };
    compare("softmax, relative shift 8x8x150", torch, "softmax 8 8 150", || {
        let p = weights(&content, &position, &scores)?;
        Ok(weights_backward(&p, &content, &scores).map(drop)?)
    })?;
    let (x3, dy3) = (x.reshape((batch, time, d))?, dy.reshape((batch, time, d))?);
    let kernel = random(&[d, 1, 9])?;
    compare("depthwise convolution k 9", torch, "depthwise 8 150 256 9", || {
        depthwise(&x3, &kernel, None)?;
        depthwise_backward(&dy3, &kernel)?;
        Ok(depthwise_backward_weight(&x3, &dy3, 9).map(drop)?)
    })?;
    let doubled = random(&[batch, time, 2 * d])?;
    compare("GLU 8x150x256", torch, "glu 8 150 256", || {
        glu(&doubled, &lengths)?;
        Ok(glu_backward(&doubled, &dy3, &lengths).map(drop)?)
    })?;
    // Where SiLU's slope is exactly 1, so that the gradient, which is changed in place, stays what it is.
    let (h, dh) = ((random(&[rows, 4 * d])?.abs()? + 20.0)?, random(&[rows, 4 * d])?);
    compare("SiLU 1200x1024", torch, "silu 1200 1024", || {
        silu(&h, None)?;
        Ok(silu_backward(h.dtype(), &h, dh.clone(), None).map(drop)?)
    })?;
    compare("batch norm, SiLU 1200x256", torch, "batch_norm_silu 8 150 256", || {
        let (mean, inverse, _) = batch_statistics(&x, (&bias, &weight))?;
        let by = Normaliser {
            mean: &mean,
            inverse: &inverse,
            weight: &weight,
            bias: &bias,
        };
        normalise_silu(&x, &by)?;
        Ok(normalise_silu_backward(&x, &by, &dy, Statistics::Own).map(drop)?)
    })?;
    for (steps, batch, width) in [(41, 8, 640), (41, 9, 320)] {
        let (x, dy) = (random(&[steps, batch, width])?, random(&[steps, batch, width])?);
        let small = |shape: &[usize]| -> Result<Tensor> { Ok((random(shape)? * 0.03)?) };
        let (input, hidden) = (small(&[4 * width, width])?, small(&[4 * width, width])?);
        let (input_bias, hidden_bias) = (small(&[4 * width])?, small(&[4 * width])?);
        let weights = LstmWeights {
            input: &input,
            hidden: &hidden,
            input_bias: &input_bias,
            hidden_bias: &hidden_bias,
        };
        compare(
            &format!("LSTM {steps} steps, {batch}, {width}"),
            torch,
            &format!("lstm {steps} {batch} {width}"),
            || {
                let (_, saved) = lstm(&x, weights)?;
                let d = lstm_backward(&dy, &saved, weights)?;
                d.input_weight()?;
                d.hidden_weight()?;
                Ok(d.bias().map(drop)?)
            },
        )?;
    }
    Ok(())
}

/// Forward and backward of one layer, d 256, 8 heads, 8 utterances of 150 frames.
pub fn block(torch: &mut Peer) -> Result<()> {
    let (batch, time, d, heads) = (8, 150, 256, 8);
    let config = EncoderConfig {
        d_model: d,
        n_heads: heads,
        ..layer_config()
    };
    let mut builder = ParameterBuilder::random(DType::F32, Device::Cpu, 1);
    let layer = ConformerLayer::new("layer", &config, &mut builder)?;
    let (parameters, _) = builder.finish();
    let frames = Frames {
        batch,
        time,
        lengths: Lengths::new(vec![time; batch]),
        context: Context::All,
    };
    let positions = PositionTable::new(d).rows(time, DType::F32, &Device::Cpu)?;
    let (x, dy) = (random(&[batch * time, d])?, random(&[batch * time, d])?);
    let mut noise = Noise::new(1);
    let mut gradients = Gradients::new(&parameters);
    compare("layer d 256, 8 x 150 frames", torch, "block 256 8 8 150", || {
        gradients.clear();
        let mut norm = BatchNormPass {
            batch_norm: BatchNorm::OwnRows,
            known: None,
            gather: None,
            updates: &mut BufferUpdates::default(),
        };
        let mut mode = Mode::Train(&mut noise);
        let (_, saved) = layer.forward(&parameters, &x, &positions, &frames, &mut mode, &mut norm)?;
        let alone = &mut |own: &Tensor| Ok(own.unsqueeze(0)?);
        layer
            .backward(&parameters, &saved, &frames, &dy, alone, &mut gradients)
            .map(drop)
    })?;
    Ok(())
}

fn layer_config() -> EncoderConfig {
    EncoderConfig {
        feat_in: 80,
        n_layers: 1,
        d_model: 0,
        n_heads: 0,
        subsampling_conv_channels: 8,
        ff_expansion_factor: 4,
        conv_kernel_size: 9,
        causal: CausalConfig::default(),
        use_bias: false,
        xscaling: false,
        attention_context: AttentionContext::Full,
        dropout: 0.0,
        dropout_pre_encoder: 0.0,
        dropout_emb: 0.0,
        dropout_att: 0.0,
    }
}
