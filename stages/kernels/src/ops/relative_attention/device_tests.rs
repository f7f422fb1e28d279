//! Against the kernels for the CPU, in the emulator or on a device.

use candle_core::{DType, Device, Tensor};

use crate::error::Result;
use crate::lengths::Lengths;
use crate::noise::{DropMask, Noise};
use crate::ops::relative_attention::backward_of;
use crate::ops::relative_attention::{self, Attention, Positions, Projections};
use crate::testing::on_device::{exact, on_device};
use crate::testing::values;

/// Half a unit in the last place of bf16, as a share of a number; and what two roundings in f32 add to it.
const BF16: f64 = 1.0 / 256.0 + 1e-6;

/// The kernel that the tensor cores are for, against the one in f32, which the tests of the attention module hold against the CPU.
/// All that is rounded within it are weights and their gradients, once each, as the factors are numbers in bf16.
#[test]
fn attention_in_bf16_is_that_in_f32() {
    let mut noise = Noise::new(24);
    for (time, heads, k, band) in [
        (1, 1, 1, None),
        (33, 2, 17, None),
        (70, 1, 128, None),
        (50, 2, 16, Some(3)),
    ] {
        let (batch, d) = (2, heads * k);
        let lengths = Lengths::new([time, time / 2]);
        let reach = band.map_or(time - 1, |band: usize| band.min(time - 1));
        let together = exact(&[batch * time, 3 * d], &mut noise);
        let projected = exact(&[2 * reach + 1, d], &mut noise);
        let zeros = Tensor::zeros((heads, k), DType::F32, &Device::Cpu).unwrap();
        let d_context = exact(&[batch * time, d], &mut noise);
        let masks = [DropMask::draw(0.2, &mut noise)];
        // Gradients of positions are those of each sequence, or of both of them.
        let run = |factors: DType, of: DType, sequences: usize| {
            on_device(|on| -> Result<Vec<Tensor>> {
                let on_as = |tensor: &Tensor| on(tensor).to_dtype(of);
                let projections = Projections::Together(on_as(&together)?);
                let (projected, zeros) = (on_as(&projected)?, on(&zeros));
                let positions = Positions {
                    projected: &projected,
                    biases: (&zeros, &zeros),
                };
                let attention = Attention {
                    lengths: &lengths,
                    time,
                    heads,
                    scale: 1.0 / (k as f64).sqrt(),
                    band,
                    reach,
                    masks: &masks,
                    block: time,
                    factors,
                };
                let (context, logs) = relative_attention::forward(factors, &projections, positions, &attention)?;
                let found = backward_of(
                    factors,
                    &projections,
                    positions,
                    &attention,
                    (&context, &logs),
                    &on_as(&d_context)?,
                    sequences,
                )?;
                Ok(vec![
                    context,
                    found.projections,
                    found.biases.total()?,
                    found.positions.total()?,
                ])
            })
            .unwrap()
        };
        let in_bf16 = run(DType::BF16, DType::F32, 2);
        // As they are exact in bf16, it does not matter in which type they are read.
        for (wide, narrow) in in_bf16.iter().zip(run(DType::BF16, DType::BF16, 2)) {
            assert_eq!(values(wide), values(&narrow), "time {time}");
        }
        let in_f32 = run(DType::F32, DType::F32, 1);
        for (number, (wide, narrow)) in in_f32.iter().zip(in_bf16).enumerate() {
            let (wide, narrow) = (values(wide), values(&narrow));
            let largest = wide.iter().fold(1e-6f64, |largest, value| largest.max(value.abs()));
            for (wide, narrow) in wide.iter().zip(&narrow) {
                // Three roundings one after another: of a weight, of the context that the gradients are of, of a result.
                assert!(
                    (wide - narrow).abs() <= 3.0 * BF16 * largest,
                    "time {time}, result {number}: {wide} in f32, {narrow} in bf16, largest {largest}"
                );
            }
        }
    }
}

#[test]
fn attention_that_does_not_fit_is_refused() {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let (projected, bias) = (zeros(&[3, 8]), zeros(&[2, 4]));
    let lengths = Lengths::new([2]);
    let positions = Positions {
        projected: &projected,
        biases: (&bias, &bias),
    };
    let masks = [None];
    let sound = Attention {
        lengths: &lengths,
        time: 2,
        heads: 2,
        scale: 1.0,
        band: None,
        reach: 1,
        masks: &masks,
        block: 2,
        factors: DType::F32,
    };
    let run = |rows: usize, attention: &Attention| {
        on_device(|on| {
            let projections = Projections::Together(on(&zeros(&[rows, 24])));
            relative_attention::forward(DType::F32, &projections, positions, attention).is_ok()
        })
    };
    if crate::flow_cuda_emulator::DeviceUnderTest::get().is_emulated() {
        assert!(run(2, &sound));
        assert!(!run(3, &sound));
        for change in [
            |attention: &mut Attention| attention.reach = 0,
            |attention: &mut Attention| attention.heads = 3,
            |attention: &mut Attention| attention.block = 1,
            |attention: &mut Attention| attention.factors = DType::F16,
        ] {
            let mut attention = sound.clone();
            change(&mut attention);
            assert!(!run(2, &attention), "{attention:?}");
        }
    }
}
