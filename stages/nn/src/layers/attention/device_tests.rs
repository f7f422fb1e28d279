//! The attention module as one kernel, run by the emulator or on a device, against that on the CPU, which has all scores.

use flow_cuda_emulator::DeviceUnderTest;
use flow_kernels::testing::{normal, values};
use flow_kernels::{Lengths, Noise};

use super::*;
use crate::config::CausalConfig;

struct Case {
    time: usize,
    heads: usize,
    /// Width of a head.
    k: usize,
    context: Context,
    dropout: f64,
    biases: bool,
}

/// Output, gradient of the input and of each parameter; and how many times weights' gradients were added.
fn run(case: &Case, device: &Device) -> Result<Vec<Tensor>> {
    let d = case.heads * case.k;
    let config = EncoderConfig {
        feat_in: 8,
        n_layers: 1,
        d_model: d,
        use_bias: case.biases,
        subsampling_conv_channels: 4,
        ff_expansion_factor: 2,
        n_heads: case.heads,
        attention_context: AttentionContext::Full,
        xscaling: false,
        conv_kernel_size: 3,
        causal: CausalConfig::default(),
        dropout: 0.0,
        dropout_pre_encoder: 0.0,
        dropout_emb: 0.0,
        dropout_att: case.dropout,
    };
    let mut builder = ParameterBuilder::random(DType::F32, device.clone(), 3);
    let attention = Attention::new("attention", &config, &mut builder)?;
    let (mut parameters, _) = builder.finish();
    let mut noise = Noise::new(11);
    let mut random =
        |shape: &[usize]| -> Result<Tensor> { Ok(normal(shape, &mut noise).to_dtype(DType::F32)?.to_device(device)?) };
    for id in [attention.bias_u, attention.bias_v] {
        parameters.overwrite(id, &random(&[case.heads, case.k])?)?;
    }
    let frames = Frames {
        batch: 4,
        time: case.time,
        lengths: Lengths::new([case.time, case.time / 2, 1, 0]),
        context: case.context,
    };
    let rows = frames.rows();
    let (x, dy) = (random(&[rows, d])?, random(&[rows, d])?);
    let positions = PositionTable::new(d + d % 2).rows(case.time, DType::F32, device)?;
    let positions = positions.narrow(1, 0, d)?.contiguous()?;
    let mut gradients = Gradients::new(&parameters);
    let mut all = Vec::new();
    // Twice: the second time gradients are added to those that are there.
    for _ in 0..2 {
        let mut noise = Noise::new(5);
        let mode = &mut Mode::Train(&mut noise);
        let (y, saved) = attention.forward(&parameters, &x, &positions, &frames, mode)?;
        let mut sums = PendingSums::default();
        let dx = attention.backward(&parameters, &saved, &frames, &dy, &mut gradients, &mut sums)?;
        let kept = sums.complete(&parameters, &mut gradients)?;
        attention.backward_positions(&parameters, &saved, &kept, &mut gradients)?;
        all.extend([y, dx]);
    }
    all.extend(parameters.iter().filter_map(|(id, _)| gradients.get(id).cloned()));
    Ok(all)
}

/// In f32, of sums in another order: 2e-5 of the largest value. Gradients of weights are sums over all rows.
#[test]
fn one_kernel_gives_what_all_scores_give() {
    let sound = |time: usize, heads: usize, k: usize| Case {
        time,
        heads,
        k,
        context: Context::All,
        dropout: 0.0,
        biases: false,
    };
    let cases = [
        sound(1, 1, 1),
        sound(5, 2, 4),
        sound(16, 1, 16),
        sound(37, 3, 5),
        Case {
            dropout: 0.3,
            ..sound(50, 2, 17)
        },
        Case {
            biases: true,
            dropout: 0.1,
            ..sound(17, 1, 128)
        },
        Case {
            context: Context::Band(0),
            ..sound(9, 2, 4)
        },
        Case {
            context: Context::Band(usize::MAX),
            ..sound(9, 2, 4)
        },
        // Blocks of 16 queries, each with a mask of its own; the last is shorter.
        Case {
            context: Context::Band(3),
            dropout: 0.3,
            ..sound(45, 2, 6)
        },
        // Blocks of 40.
        Case {
            context: Context::Band(20),
            dropout: 0.3,
            ..sound(100, 1, 4)
        },
        // Not by one kernel.
        Case {
            context: Context::Chunks { size: 3, left: 2 },
            ..sound(40, 2, 6)
        },
    ];
    for case in &cases {
        let name = format!("{} frames, {} x {}, {:?}", case.time, case.heads, case.k, case.context);
        let expected = run(case, &Device::Cpu).unwrap();
        let found = DeviceUnderTest::get().run(|device| run(case, device).unwrap());
        assert_eq!(expected.len(), found.len());
        // The gradient of the keys' bias is zero but for rounding, as a bias moves all scores of a query alike.
        let all = expected
            .iter()
            .flat_map(values)
            .fold(0.0f64, |largest, value| largest.max(value.abs()));
        for (number, (expected, found)) in expected.iter().zip(&found).enumerate() {
            assert_eq!(expected.dims(), found.dims(), "{name}: result {number}");
            let (expected, found) = (values(expected), values(found));
            let largest = expected
                .iter()
                .fold(0.01 * all, |largest, value| largest.max(value.abs()));
            for (at, (expected, found)) in expected.iter().zip(&found).enumerate() {
                assert!(
                    (expected - found).abs() <= 2e-5 * largest,
                    "{name}: result {number}, element {at}: {expected} on the CPU, {found} on the device"
                );
            }
        }
    }
}

/// Queries, keys and values come of one product, and so do the gradients of their weights.
#[test]
fn projections_are_one_product() {
    let case = Case {
        time: 5,
        heads: 2,
        k: 4,
        context: Context::All,
        dropout: 0.0,
        biases: false,
    };
    let products = |device: &Device| flow_kernels::counts::counted(|| run(&case, device).unwrap()).1.products;
    // Two passes. On the CPU: five projections and three products of heads forward; two for each projection but one for that of
    // the positions, and six of heads, backward.
    assert_eq!(products(&Device::Cpu), 2 * (5 + 3 + 9 + 6));
    assert_eq!(DeviceUnderTest::get().run(products), 2 * (3 + 5));
}
