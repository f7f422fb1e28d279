//! Layers whose products are in bf16, on a device, against the CPU's functions with the same numbers rounded at the same places.

use candle_core::{DType, Device, Tensor};
use flow_cuda_emulator::DeviceUnderTest;
use flow_kernels::elementwise::{silu, silu_backward};
use flow_kernels::noise::DropMask;
use flow_kernels::product::product;
use flow_kernels::testing::{normal, values};
use flow_kernels::{Lengths, Noise};

use super::convolution::{BatchNorm, BatchNormPass, Convolution};
use super::feed_forward::FeedForward;
use super::{Frames, dropout};
use crate::config::{AttentionContext, CausalConfig, EncoderConfig};
use crate::error::Result;
use crate::parameters::{BufferUpdates, Gradients, Mode, ParameterBuilder, Parameters};
use crate::pending_sums::PendingSums;

const ROWS: usize = 12;
const WIDTH: usize = 16;

fn config(use_bias: bool) -> EncoderConfig {
    EncoderConfig {
        feat_in: 8,
        n_layers: 1,
        d_model: WIDTH,
        use_bias,
        subsampling_conv_channels: 4,
        ff_expansion_factor: 4,
        n_heads: 2,
        attention_context: AttentionContext::Full,
        xscaling: false,
        conv_kernel_size: 3,
        causal: CausalConfig::default(),
        dropout: 0.2,
        dropout_pre_encoder: 0.0,
        dropout_emb: 0.0,
        dropout_att: 0.0,
    }
}

fn builder(device: &Device) -> ParameterBuilder {
    ParameterBuilder::random(DType::F32, device.clone(), 3).store_matrices_as(DType::BF16)
}

/// The nearest numbers that bf16 has.
fn rounded(x: &Tensor) -> Tensor {
    x.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap()
}

/// Input and gradient of the output, in bf16 as norms give them.
fn inputs(device: &Device) -> Result<[Tensor; 2]> {
    let mut noise = Noise::new(11);
    let mut next = || -> Result<Tensor> {
        Ok(normal(&[ROWS, WIDTH], &mut noise)
            .to_dtype(DType::BF16)?
            .to_device(device)?)
    };
    Ok([next()?, next()?])
}

/// A sum that is halfway between two numbers may be rounded to either, as sums are in other orders: one unit of the largest value.
fn close(what: &str, expected: &Tensor, found: &Tensor) {
    let (expected, found) = (values(expected), values(found));
    assert_eq!(expected.len(), found.len(), "{what}");
    let largest = expected.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
    for (expected, found) in expected.iter().zip(&found) {
        assert!(
            (expected - found).abs() <= largest / 256.0,
            "{what}: {expected}, {found}, {largest}"
        );
    }
}

fn mask(noise: &mut Noise) -> Option<DropMask> {
    dropout::draw(0.2, &mut Mode::Train(noise))
}

#[test]
fn what_is_within_a_feed_forward_module_is_in_bf16() {
    let run = |use_bias: bool| {
        DeviceUnderTest::get().run(|device| -> Result<_> {
            let mut builder = builder(device);
            let module = FeedForward::new("ff", &config(use_bias), &mut builder)?;
            let (parameters, _) = builder.finish();
            let [x, dy] = inputs(device)?;
            let mut noise = Noise::new(5);
            let (y, saved) = module.forward(&parameters, &x, &mut Mode::Train(&mut noise))?;
            let (mut gradients, mut sums) = (Gradients::new(&parameters), PendingSums::default());
            let dx = module.backward(&parameters, &saved, &dy, &mut gradients, &mut sums)?;
            sums.complete(&parameters, &mut gradients)?;
            let weight = |parameters: &Parameters, name: &str| -> Tensor {
                let (id, parameter) = parameters.iter().find(|(_, parameter)| parameter.name == name).unwrap();
                let weight = parameter
                    .tensor
                    .to_device(&Device::Cpu)
                    .unwrap()
                    .to_dtype(DType::F32)
                    .unwrap();
                assert!(gradients.get(id).is_some());
                weight
            };
            let weights = ["ff.linear1.weight", "ff.linear2.weight"].map(|name| weight(&parameters, name));
            let of_weights: Vec<Tensor> = parameters
                .iter()
                .filter_map(|(id, _)| gradients.get(id).cloned())
                .collect();
            Ok((y, dx, weights, of_weights))
        })
    };
    let (y, dx, [first, second], of_weights) = run(false).unwrap();
    assert_eq!((y.dtype(), dx.dtype()), (DType::BF16, DType::BF16));
    let [x, dy] = inputs(&Device::Cpu).unwrap().map(|x| x.to_dtype(DType::F32).unwrap());
    let mask = mask(&mut Noise::new(5));
    let hidden = rounded(&product(&x, &first.t().unwrap()).unwrap());
    let activated = rounded(&silu(&hidden, mask).unwrap());
    close(
        "result",
        &rounded(&product(&activated, &second.t().unwrap()).unwrap()),
        &y,
    );
    let d_activated = rounded(&product(&dy, &second).unwrap());
    let d_hidden = rounded(&silu_backward(DType::F32, &hidden, d_activated, mask).unwrap());
    close("gradient", &rounded(&product(&d_hidden, &first).unwrap()), &dx);
    for (d, (x, of_weight)) in [(&d_hidden, (&x, &of_weights[0])), (&dy, (&activated, &of_weights[1]))] {
        assert_eq!(of_weight.dtype(), DType::F32);
        close("gradient of a weight", &product(&d.t().unwrap(), x).unwrap(), of_weight);
    }
    // A bias is added in 32 bits.
    let (y, dx, ..) = run(true).unwrap();
    assert_eq!((y.dtype(), dx.dtype()), (DType::F32, DType::F32));
}

/// Statistics of all ranks are found by other kernels, which take numbers in f32: the same results, but for what they do not round.
#[test]
fn a_convolution_module_in_bf16_takes_statistics_of_all_ranks() {
    let run = |batch_norm: BatchNorm| {
        DeviceUnderTest::get().run(|device| -> Result<_> {
            let mut builder = builder(device);
            let module = Convolution::new("conv", &config(false), &mut builder)?;
            let (parameters, _) = builder.finish();
            let frames = Frames {
                batch: 2,
                time: ROWS / 2,
                lengths: Lengths::new([ROWS / 2, ROWS / 2 - 1]),
                context: flow_kernels::attention::Context::All,
            };
            let [x, dy] = inputs(device)?;
            let mut alone = |own: &Tensor| Ok(own.unsqueeze(0)?);
            let mut norm = BatchNormPass {
                batch_norm,
                known: None,
                gather: None,
                updates: &mut BufferUpdates::default(),
            };
            let mut noise = Noise::new(5);
            let (y, saved) = module.forward(&parameters, &x, &frames, &Mode::Train(&mut noise), &mut norm)?;
            let (mut gradients, mut sums) = (Gradients::new(&parameters), PendingSums::default());
            let given = (&dy, &mut alone as flow_kernels::batch_norm::Gather);
            let dx = module.backward(&parameters, &saved, &frames, given, (&mut gradients, &mut sums))?;
            sums.complete(&parameters, &mut gradients)?;
            assert_eq!((y.dtype(), dx.dtype()), (DType::BF16, DType::BF16));
            Ok([y, dx])
        })
    };
    let (own, joined) = (run(BatchNorm::OwnRows).unwrap(), run(BatchNorm::AllRanks).unwrap());
    for (own, joined) in own.iter().zip(&joined) {
        let (own, joined) = (values(own), values(joined));
        let largest = own.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
        for (own, joined) in own.iter().zip(&joined) {
            // Three roundings: of the convolution's result, of the gradient of its input and of what is compared.
            assert!(
                (own - joined).abs() <= 3.0 * largest / 256.0,
                "{own} {joined} {largest}"
            );
        }
    }
}
