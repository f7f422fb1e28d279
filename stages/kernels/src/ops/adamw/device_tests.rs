//! Against the kernels for the CPU, in the emulator or on a device.

use candle_core::{DType, Device, Tensor};

use crate::counts::counted;
use crate::error::Result;
use crate::flow_cuda_emulator::DeviceUnderTest;
use crate::noise::Noise;
use crate::ops::adamw::{self, DeviceTables, Moment, Numbers, ParameterUpdate, Update, eight_bit};
use crate::testing::on_device::{Place, on_device, random};

/// Bit for bit: the arithmetic is written in the same order on both sides. Parameters of all kinds are updated together:
/// shorter than a block, of several chunks, in either type, with moments of either width, at different counts of steps.
#[test]
fn adamw_moves_weights_and_moments_as_on_the_cpu() {
    let mut noise = Noise::new(9);
    let kinds = [
        (1, false),
        (700, false),
        (9001, false),
        (eight_bit::LEAST, true),
        (eight_bit::LEAST + 300, true),
    ];
    let mut all: Vec<(Tensor, bool, Vec<Tensor>)> = Vec::new();
    for (n, eight_bit) in kinds {
        for dtype in [DType::F32, DType::BF16] {
            let start = random(&[n], &mut noise).to_dtype(dtype).unwrap();
            let mut gradients: Vec<Tensor> = (0..4).map(|_| random(&[n], &mut noise)).collect();
            // A block that nothing ever touched, and at last one that is not a number.
            for (step, gradient) in gradients.iter_mut().enumerate() {
                let mut values: Vec<f32> = gradient.to_vec1().unwrap();
                values.iter_mut().take(256).skip(5).for_each(|value| *value = 0.0);
                values[n / 2] *= if step == 3 { f32::NAN } else { 1e-20 };
                *gradient = Tensor::from_vec(values, n, &Device::Cpu).unwrap();
            }
            all.push((start, eight_bit, gradients));
        }
    }
    same_to_the_bit(|on| {
        let parameters: Vec<Tensor> = all.iter().map(|(start, ..)| on(start).copy().unwrap()).collect();
        let zeros = |(start, eight_bit, _): &(Tensor, bool, Vec<Tensor>)| {
            let zeros = || Numbers::zeros(start.dtype(), start.elem_count(), *eight_bit).unwrap();
            (Moment::Host(zeros()), Moment::Host(zeros()))
        };
        let mut moments: Vec<(Moment, Moment)> = all.iter().map(zeros).collect();
        let mut tables = DeviceTables::default();
        for step in 0..4 {
            let gradients: Vec<Tensor> = all.iter().map(|(.., gradients)| on(&gradients[step])).collect();
            let tensors = parameters.iter().zip(&gradients).zip(&mut moments);
            let mut updates: Vec<ParameterUpdate> = (1 + step as u64..)
                .zip(tensors)
                .map(|(steps, ((parameter, gradient), (first, second)))| ParameterUpdate {
                    parameter,
                    gradient,
                    first,
                    second,
                    update: Update::new((0.9, 0.98), 1e-8, 1e-3, steps, 1e-2, 0.7),
                    noise: adamw::seed("w", steps),
                })
                .collect();
            let (done, counts) = counted(|| adamw::update_all(&mut updates, &mut tables));
            done?;
            assert!(counts.launches() <= 4 && counts.to_device.count <= 4, "{counts:?}");
        }
        let mut bytes = Vec::new();
        for (parameter, (first, second)) in parameters.iter().zip(moments) {
            for moment in [first, second] {
                let numbers = moment.on_host()?;
                match numbers.scales() {
                    Some(scales) => {
                        bytes.extend_from_slice(numbers.bytes());
                        bytes.extend(with_one_nan(scales.bytes()));
                    }
                    None => bytes.extend(with_one_nan(numbers.bytes())),
                }
            }
            let weights: Vec<f32> = parameter.to_dtype(DType::F32)?.to_vec1()?;
            let weights: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
            bytes.extend(with_one_nan(&weights));
        }
        Ok(bytes)
    });
}

/// Numbers in f32. A GPU gives those that are not numbers other bits than a processor: there all of them get the same.
fn with_one_nan(numbers: &[u8]) -> impl Iterator<Item = u8> {
    let any_nan = !DeviceUnderTest::get().is_emulated();
    numbers.chunks_exact(4).flat_map(move |number| {
        let number = f32::from_le_bytes([number[0], number[1], number[2], number[3]]);
        if any_nan && number.is_nan() { f32::NAN } else { number }.to_le_bytes()
    })
}

fn same_to_the_bit(run: impl Fn(Place) -> Result<Vec<u8>>) {
    let (expected, found) = (run(&Tensor::clone).unwrap(), on_device(&run).unwrap());
    assert_eq!(expected.len(), found.len());
    let differ = expected.iter().zip(&found).position(|(a, b)| a != b);
    assert_eq!(differ, None, "first byte that differs, of {}", expected.len());
}
