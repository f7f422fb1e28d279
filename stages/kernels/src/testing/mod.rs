//! For tests of this crate and of those above it: finite differences for hand-written backward passes. It panics where something is
//! not as it should be.

#[cfg(test)]
pub(crate) mod on_device;

use candle_core::{Device, Tensor};

use crate::noise::Noise;

/// A tensor of standard normal values in f64.
pub fn normal(shape: &[usize], noise: &mut Noise) -> Tensor {
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| noise.normal()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Values of a tensor in f64, row-major.
pub fn values(tensor: &Tensor) -> Vec<f64> {
    tensor
        .flatten_all()
        .unwrap()
        .to_dtype(candle_core::DType::F64)
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// Largest absolute difference of two tensors of one shape.
pub fn max_difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let difference = values(a)
        .iter()
        .zip(values(b))
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |m: f64, d| if d.is_nan() { f64::NAN } else { m.max(d) });
    assert!(!difference.is_nan(), "not a number");
    difference
}

/// Checks `gradient` of `sum(output(x) * weight)` at `x` by central differences in f64, on up to 40 elements
/// spread over `x`. The bound, 1e-6 of the largest gradient plus 1e-8, is a few hundred times the truncation error
/// of a step of 1e-5 for functions whose third derivative is of order one.
pub fn check_gradient<E: std::fmt::Debug>(
    what: &str,
    x: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    output: impl Fn(&Tensor) -> Result<Tensor, E>,
) {
    assert_eq!(x.dims(), gradient.dims(), "{what}: shape of the gradient");
    let weight = values(weight);
    let objective = |x: &[f64]| -> f64 {
        let x = Tensor::from_slice(x, gradient.dims(), &Device::Cpu).unwrap();
        let y = values(&output(&x).unwrap());
        assert_eq!(y.len(), weight.len(), "{what}: shape of the output");
        y.iter().zip(&weight).map(|(a, b)| a * b).sum()
    };
    let point = values(x);
    let gradient_values = values(gradient);
    let largest = gradient_values.iter().fold(0.0f64, |m, g| m.max(g.abs()));
    let step = 1e-5;
    let stride = (point.len() / 40).max(1);
    for index in (0..point.len()).step_by(stride) {
        let mut moved = point.clone();
        moved[index] = point[index] + step;
        let up = objective(&moved);
        moved[index] = point[index] - step;
        let down = objective(&moved);
        let expected = (up - down) / (2.0 * step);
        let found = gradient_values[index];
        assert!(
            (expected - found).abs() <= 1e-6 * largest.max(1.0) + 1e-8,
            "{what}: element {index}: finite difference {expected}, gradient {found}"
        );
    }
}
