//! Weights by the formula of the golden data: SplitMix64 from a hash (FNV-1a) of the tensor's name.

use std::collections::BTreeMap;

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::golden;

/// Shape and values of tensors by name.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// The tensors that a file of the golden data describes.
pub fn tensors(description: &str) -> Tensors {
    let all = golden::json(description);
    let mut tensors = Tensors::new();
    for (name, tensor) in all["tensors"].as_object().unwrap() {
        let shape: Vec<usize> = serde_json::from_value(tensor["shape"].clone()).unwrap();
        let number = |key: &str| tensor[key].as_f64().unwrap();
        let (low, high) = (number("lo"), number("hi"));
        let hash = name.bytes().fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
        });
        let base = hash ^ tensor["seed"].as_u64().unwrap();
        let value = |index: usize| {
            let mut z = base.wrapping_add((index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^= z >> 31;
            (low + (high - low) * ((z >> 40) as f64 / f64::from(1 << 24))) as f32
        };
        let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
        let first: Vec<f64> = serde_json::from_value(tensor["first"].clone()).unwrap();
        for (&value, first) in values.iter().zip(first) {
            assert_eq!(value, first as f32, "{name}");
        }
        let sum: f64 = values.iter().map(|&value| f64::from(value)).sum();
        let expected = number("sum_f64");
        assert!((sum - expected).abs() <= 1e-9 * expected.abs().max(1.0), "{name}");
        tensors.insert(name.clone(), (shape, values));
    }
    tensors
}

/// A safetensors file.
pub fn file(tensors: &Tensors) -> Vec<u8> {
    let bytes: Vec<Vec<u8>> = tensors
        .values()
        .map(|(_, values)| values.iter().flat_map(|value| value.to_le_bytes()).collect())
        .collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, (shape, _)), bytes)| (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    safetensors::serialize(views, None).unwrap()
}
