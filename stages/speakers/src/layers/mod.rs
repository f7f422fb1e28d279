//! Layers that the networks of speaker embeddings share. Batch norms are folded into the convolutions before them.

pub mod conv2d;
pub mod pooling;
pub mod winograd;

use crate::error::{Error, Result};
use crate::weights::Weights;

/// What PyTorch's batch norm adds to a variance.
const EPSILON: f64 = 1e-5;

/// Activations of a time-frequency network, (frames, bands, channels) row-major.
pub struct FeatureMap {
    pub frames: usize,
    pub bands: usize,
    pub channels: usize,
    pub values: Vec<f32>,
}

impl FeatureMap {
    pub fn zeros(frames: usize, bands: usize, channels: usize) -> Self {
        Self {
            frames,
            bands,
            channels,
            values: vec![0.0; frames * bands * channels],
        }
    }

    /// The channels of a frame in a band.
    pub fn at(&self, frame: usize, band: usize) -> &[f32] {
        let start = (frame * self.bands + band) * self.channels;
        &self.values[start..start + self.channels]
    }
}

/// A batch norm with its running statistics: `y = x scale + shift`.
pub struct BatchNorm {
    pub scale: Vec<f64>,
    pub shift: Vec<f64>,
}

impl BatchNorm {
    /// `NAME.{weight,bias,running_mean,running_var}`, the first two only where it is affine.
    pub fn read(weights: &Weights, name: &str, channels: usize, affine: bool) -> Result<Self> {
        let read = |part: &str| weights.floats(&format!("{name}.{part}"), &[channels]);
        let (weight, bias) = if affine {
            (read("weight")?, read("bias")?)
        } else {
            (vec![1.0; channels], vec![0.0; channels])
        };
        let (mean, variance) = (read("running_mean")?, read("running_var")?);
        if variance.iter().any(|value| *value < 0.0) {
            return Err(Error::Weights(format!("{name}.running_var has values below zero")));
        }
        let scale: Vec<f64> = weight
            .iter()
            .zip(&variance)
            .map(|(&weight, &variance)| f64::from(weight) / (f64::from(variance) + EPSILON).sqrt())
            .collect();
        let shift = bias
            .iter()
            .zip(mean.iter().zip(&scale))
            .map(|(&bias, (&mean, scale))| f64::from(bias) - f64::from(mean) * scale)
            .collect();
        Ok(Self { scale, shift })
    }

    /// The weight of the layer before, (channels, any number), scaled.
    pub fn fold(&self, weight: &[f32]) -> Vec<f64> {
        let row = weight.len() / self.scale.len();
        weight
            .chunks_exact(row)
            .zip(&self.scale)
            .flat_map(|(row, scale)| row.iter().map(move |&weight| f64::from(weight) * scale))
            .collect()
    }
}

/// Rounds to f32. A value that is then infinite is an error that names `name`.
pub fn rounded(values: &[f64], name: &str) -> Result<Vec<f32>> {
    let rounded: Vec<f32> = values.iter().map(|&value| value as f32).collect();
    if rounded.iter().any(|value| !value.is_finite()) {
        return Err(Error::Weights(format!(
            "{name} leaves the range of f32 with its batch norm"
        )));
    }
    Ok(rounded)
}

/// A failure of a matrix product.
pub fn product_error(error: flow_kernels::Error) -> Error {
    Error::Input(error.to_string())
}

/// `to = x scale + shift` for a frame, with ReLU.
pub fn normalized_relu(x: &[f32], scale: &[f32], shift: &[f32], to: &mut [f32]) {
    for ((to, &x), (&scale, &shift)) in to.iter_mut().zip(x).zip(scale.iter().zip(shift)) {
        *to = x.mul_add(scale, shift).max(0.0);
    }
}
