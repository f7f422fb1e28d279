//! Weights for WeSpeaker's ResNet34, made up from a seed.

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError};

use crate::noise;

/// A safetensors file under WeSpeaker's names.
pub fn made_up_weights() -> Result<Vec<u8>, SafeTensorError> {
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
    let mut add = |name: String, shape: &[usize], one: bool| {
        let count: usize = shape.iter().product();
        let inputs = (count / shape[0]) as f32;
        let values = if one {
            vec![1.0; count]
        } else {
            noise(count, (6.0 / inputs).sqrt().min(0.1))
        };
        tensors.push((name, shape.to_vec(), values));
    };
    let mut layer = |convolution: &str, norm: &str, shape: [usize; 4]| {
        add(format!("{convolution}.weight"), &shape, false);
        for (part, one) in [
            ("weight", true),
            ("bias", false),
            ("running_mean", false),
            ("running_var", true),
        ] {
            add(format!("{norm}.{part}"), &shape[..1], one);
        }
    };
    layer("conv1", "bn1", [32, 1, 3, 3]);
    let mut inputs = 32;
    for (number, (count, outputs)) in [(3, 32), (4, 64), (6, 128), (3, 256)].into_iter().enumerate() {
        for block in 0..count {
            let name = |part: &str| format!("layer{}.{block}.{part}", number + 1);
            layer(&name("conv1"), &name("bn1"), [outputs, inputs, 3, 3]);
            layer(&name("conv2"), &name("bn2"), [outputs, outputs, 3, 3]);
            if inputs != outputs {
                layer(&name("shortcut.0"), &name("shortcut.1"), [outputs, inputs, 1, 1]);
            }
            inputs = outputs;
        }
    }
    add("seg_1.weight".into(), &[256, 5120], false);
    add("seg_1.bias".into(), &[256], false);
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(.., values)| values.iter().flat_map(|value| value.to_le_bytes()).collect())
        .collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, shape, _), bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
        .collect::<Result<Vec<_>, SafeTensorError>>()?;
    safetensors::serialize(views, None)
}
