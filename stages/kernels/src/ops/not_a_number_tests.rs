//! Tests that every kernel propagates NaN: training must not continue with a hidden numerical error.

use candle_core::{Device, Tensor};

use super::attention::{Context, Scores, weights, weights_backward};
use super::batch_norm::{Normaliser, Statistics, normalise_silu, normalise_silu_backward};
use super::ctc;
use super::depthwise::{depthwise, depthwise_backward, depthwise_backward_weight};
use super::elementwise::glu::{glu, glu_backward};
use super::elementwise::{add_in_place, blend_in_place, drop_scaled, residual, scale_in_place, silu, silu_backward};
use super::joint::{Cell, hidden};
use super::layer_norm::{layer_norm, layer_norm_backward};
use super::subsample;
use super::sums::bias::{add_bias, column_sum};
use crate::lengths::Lengths;
use crate::testing::values;

/// Ones in f32, the quick functions' type, with one element that is not a number.
fn spoilt(shape: &[usize]) -> Tensor {
    let mut values = vec![1.0f32; shape.iter().product()];
    values[0] = f32::NAN;
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn ones(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, candle_core::DType::F32, &Device::Cpu).unwrap()
}

fn shows(what: &str, result: &Tensor) {
    assert!(values(result).iter().any(|value| value.is_nan()), "{what} hides it");
}

#[test]
fn it_comes_out_of_every_kernel() {
    let (rows, width) = (4, 40);
    let (x, y) = (spoilt(&[rows, width]), ones(&[rows, width]));
    let (vector, zero) = (ones(&[width]), ones(&[width]).zeros_like().unwrap());
    shows("silu", &silu(&x, None).unwrap());
    shows(
        "silu, backward",
        &silu_backward(x.dtype(), &x, y.copy().unwrap(), None).unwrap(),
    );
    shows(
        "silu, backward",
        &silu_backward(y.dtype(), &y, x.copy().unwrap(), None).unwrap(),
    );
    shows("residual", &residual(&x, &y, 0.5, None).unwrap());
    shows("residual", &residual(&y, &x, 0.5, None).unwrap());
    shows("factor", &drop_scaled(&x, 0.5, None).unwrap());
    let sum = y.copy().unwrap();
    add_in_place(&sum, &x).unwrap();
    shows("sum", &sum);
    let sum = y.copy().unwrap();
    blend_in_place(&sum, &x, 0.1).unwrap();
    shows("blend", &sum);
    let product = x.copy().unwrap();
    scale_in_place(&product, 0.0).unwrap();
    shows("product", &product);
    let biased = x.copy().unwrap();
    add_bias(&biased, &vector).unwrap();
    shows("bias", &biased);
    shows("sum of columns", &column_sum(&x).unwrap());

    let (normal, statistics) = layer_norm(&x, &vector, &zero).unwrap();
    shows("layer norm", &normal);
    let (dx, sums) = layer_norm_backward(&x, &statistics, &vector, &y, None).unwrap();
    let dw = sums.total().unwrap().narrow(0, 0, vector.elem_count()).unwrap();
    shows("layer norm, dx", &dx);
    shows("layer norm, dw", &dw);
    let by = Normaliser {
        mean: &zero,
        inverse: &vector,
        weight: &vector,
        bias: &zero,
    };
    shows("batch norm", &normalise_silu(&x, &by).unwrap());
    shows(
        "batch norm, dx",
        &normalise_silu_backward(&x, &by, &y, Statistics::Own).unwrap().0,
    );
    shows(
        "batch norm, dx",
        &normalise_silu_backward(&y, &by, &x, Statistics::Own).unwrap().0,
    );

    let (frames, lengths) = (spoilt(&[1, rows, width]), Lengths::new([rows]));
    let kernel = ones(&[width, 1, 3]);
    shows("depthwise", &depthwise(&frames, &kernel, None).unwrap());
    shows("depthwise, dx", &depthwise_backward(&frames, &kernel).unwrap());
    shows(
        "depthwise, dw",
        &depthwise_backward_weight(&frames, &frames, 3).unwrap(),
    );
    shows("glu", &glu(&frames, &lengths).unwrap());
    shows(
        "glu, backward",
        &glu_backward(&frames, &ones(&[1, rows, width / 2]), &lengths).unwrap(),
    );

    let scores = Scores {
        lengths: &Lengths::new([3]),
        scale: 1.0,
        context: Context::All,
        queries: 0..3,
        keys: 0..3,
        reach: 2,
    };
    let (content, position) = (spoilt(&[1, 1, 3, 3]), ones(&[1, 1, 3, 5]));
    shows("softmax", &weights(&content, &position, &scores).unwrap());
    shows(
        "softmax, backward",
        &weights_backward(&ones(&[1, 1, 3, 3]), &content, &scores).unwrap().0,
    );

    let image = spoilt(&[1, 6, 8]);
    let (taps, bias) = (ones(&[4, 1, 3, 3]), ones(&[4]));
    shows(
        "first convolution",
        &subsample::first(&image, &taps, &bias, &Lengths::new([8]), &Lengths::new([4])).unwrap(),
    );
    let planes = spoilt(&[1, 4, 3, 4]);
    shows(
        "second convolution",
        &subsample::depthwise(&planes, &taps, &bias, &Lengths::new([2])).unwrap(),
    );
    shows("relu, backward", &subsample::relu_backward(&planes, &planes).unwrap());
    let rectified = planes.copy().unwrap();
    subsample::bias_relu(&rectified, &bias, &Lengths::new([4])).unwrap();
    shows("relu", &rectified);
    let cell = Cell {
        frame: 0,
        state: 0,
        label: None,
        index: 0,
    };
    shows("joint", &hidden(&x, &y, &[cell], None).unwrap());

    // Its gradient is zeros then: the loss is what shows it.
    let (losses, gradient) = ctc::loss_and_gradient(&x, rows, &[rows], &[vec![1]], &[1.0]).unwrap();
    assert!(losses[0].is_nan() && values(&gradient).iter().all(|value| *value == 0.0));
}
