//! Comparison of kernels for devices with those of the same name for the CPU.
//!
//! Both are in f32, in other orders of summation and with other exponentials: they may differ by some units in the last
//! place of the largest value for each sum of a few hundred terms. The bound is 2e-5 of it; a wrong index or a lost
//! element shows as a difference of order one.

use candle_core::{DType, Tensor};

use super::{normal, values};
use crate::counts::counted;
use crate::error::Result;
use crate::flow_cuda_emulator::DeviceUnderTest;
use crate::noise::Noise;

pub(crate) const BOUND: f64 = 2e-5;

pub(crate) fn random(shape: &[usize], noise: &mut Noise) -> Tensor {
    normal(shape, noise).to_dtype(DType::F32).unwrap()
}

/// Brings a tensor to where a function is to compute.
pub(crate) type Place<'a> = &'a dyn Fn(&Tensor) -> Tensor;

/// Runs the same function on the CPU and on the device under test, and compares what it gives.
pub(crate) fn same(what: &str, bound: f64, run: impl Fn(Place) -> Result<Vec<Tensor>>) {
    let expected = run(&Tensor::clone).unwrap();
    let (found, counts) = counted(|| on_device(&run).unwrap());
    assert!(counts.launches() > 0, "{what}: no kernel was launched");
    assert_eq!(expected.len(), found.len());
    for (number, (expected, found)) in expected.iter().zip(&found).enumerate() {
        assert_eq!(expected.dims(), found.dims(), "{what}: result {number}");
        let (expected, found) = (values(expected), values(found));
        let largest = expected.iter().fold(1e-6f64, |largest, value| largest.max(value.abs()));
        for (at, (expected, found)) in expected.iter().zip(&found).enumerate() {
            assert!(
                (expected - found).abs() <= bound * largest || expected == found,
                "{what}: result {number}, element {at}: {expected} on the CPU, {found} on the device, largest {largest}"
            );
        }
    }
}

/// Numbers in f32 that bf16 has too.
pub(crate) fn exact(shape: &[usize], noise: &mut Noise) -> Tensor {
    let rounded = random(shape, noise).to_dtype(DType::BF16).unwrap();
    rounded.to_dtype(DType::F32).unwrap()
}

/// The same numbers in bf16 on a device; on the CPU in f32, as they are.
pub(crate) fn narrow(x: &Tensor) -> Tensor {
    match crate::is_gpu(x.device()) {
        true => x.to_dtype(DType::BF16).unwrap(),
        false => x.clone(),
    }
}

pub(crate) fn on_device<R>(run: impl Fn(Place) -> R) -> R {
    DeviceUnderTest::get().run(|device| run(&|tensor: &Tensor| tensor.to_device(device).unwrap()))
}

/// Numbers are as far apart as a share of the largest, at most.
pub(crate) fn close(what: &str, bound: f64, expected: &[f64], found: &[f64]) {
    assert_eq!(expected.len(), found.len(), "{what}");
    let largest = expected.iter().fold(1e-6f64, |largest, value| largest.max(value.abs()));
    for (at, (expected, found)) in expected.iter().zip(found).enumerate() {
        assert!(
            (expected - found).abs() <= bound * largest,
            "{what}: element {at}: {expected} on the CPU, {found} on the device"
        );
    }
}
