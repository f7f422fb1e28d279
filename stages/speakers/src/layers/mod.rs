//! Layers that the networks of speaker embeddings share. Batch norms are folded into the convolutions before them.

pub mod conv2d;
pub mod pooling;
pub mod winograd;
pub mod winograd_frames;

use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};

use flow_kernels::{Aligned, multiversion};

use crate::error::{Error, Result};
use crate::weights::Weights;

/// What PyTorch's batch norm adds to a variance.
const EPSILON: f64 = 1e-5;

/// Channels that are computed together, as two vectors or four.
pub const LANES: usize = 32;

/// Activations of a time-frequency network, (frames, bands, channels) row-major.
pub struct FeatureMap {
    pub frames: usize,
    pub bands: usize,
    pub channels: usize,
    pub values: Aligned<f32>,
}

impl FeatureMap {
    pub fn new(frames: usize, bands: usize, channels: usize, values: &[f32]) -> Self {
        Self {
            frames,
            bands,
            channels,
            values: values.into(),
        }
    }

    /// The channels of a frame in a band.
    #[inline(always)]
    pub fn at(&self, frame: usize, band: usize) -> &[f32] {
        let start = (frame * self.bands + band) * self.channels;
        &self.values[start..start + self.channels]
    }
}

/// Memory that is no longer needed, for what is computed next: fresh memory costs as much as a layer.
#[derive(Default)]
pub struct Spare(Vec<Aligned<f32>>);

impl Spare {
    /// A map whose values are without meaning.
    pub fn take(&mut self, frames: usize, bands: usize, channels: usize) -> FeatureMap {
        FeatureMap {
            frames,
            bands,
            channels,
            values: self.take_values(frames * bands * channels),
        }
    }

    /// Values without meaning: in the least memory that has room for them, or else in fresh memory, in place of the least
    /// there is.
    pub fn take_values(&mut self, len: usize) -> Aligned<f32> {
        let all = || self.0.iter().enumerate();
        let room = |(_, values): &(usize, &Aligned<f32>)| values.room();
        let fitting = all().filter(|found| room(found) >= len);
        let chosen = fitting.min_by_key(room).or_else(|| all().min_by_key(room));
        let mut values = match chosen.map(|(place, _)| place) {
            Some(place) => self.0.swap_remove(place),
            None => Aligned::default(),
        };
        values.resize(len);
        values
    }

    pub fn give(&mut self, map: FeatureMap) {
        self.give_values(map.values);
    }

    pub fn give_values(&mut self, values: Aligned<f32>) {
        self.0.push(values);
    }

    /// Floats of all its memory.
    fn floats(&self) -> usize {
        self.0.iter().map(Aligned::room).sum()
    }
}

/// Memory of the maps of a network, kept from one embedding to the next.
#[derive(Default)]
pub struct KeptSpare(Mutex<Vec<Spare>>);

impl KeptSpare {
    /// Embeddings that are computed at the same time beyond this number take fresh memory.
    const MOST: usize = 2;
    /// More than this is given back: a chunk of ten seconds takes some 30 MB, and there may be any number of frames.
    const MOST_FLOATS: usize = 12 << 20;

    pub fn lend<R>(&self, work: impl FnOnce(&mut Spare) -> R) -> R {
        let kept = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut spare = kept().pop().unwrap_or_default();
        let result = work(&mut spare);
        let mut kept = kept();
        if kept.len() < Self::MOST && spare.floats() <= Self::MOST_FLOATS {
            kept.push(spare);
        }
        result
    }
}

thread_local! {
    static SCRATCH: RefCell<[Aligned<f32>; 3]> = RefCell::default();
}

/// Gives `work` memory of this thread, of any length and with values without meaning.
pub fn with_scratch<R>(work: impl FnOnce(&mut [Aligned<f32>; 3]) -> R) -> R {
    // Taken out: while a product waits for other threads, this one may begin another piece of work.
    let mut scratch = SCRATCH.with_borrow_mut(std::mem::take);
    let result = work(&mut scratch);
    SCRATCH.with_borrow_mut(|kept| *kept = scratch);
    result
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

/// `to = x scale + shift` with ReLU for frames of `width`, of which the first channels count, as many as `scale` has; those
/// of `to` are `step` apart.
pub fn normalized_relu(x: &[f32], width: usize, [scale, shift]: [&[f32]; 2], to: &mut [f32], step: usize) {
    let channels = scale.len();
    let shift = &shift[..channels];
    multiversion!({
        for (x, to) in x.chunks_exact(width).zip(to.chunks_exact_mut(step)) {
            let (x, to) = (&x[..channels], &mut to[..channels]);
            for at in 0..channels {
                let value = x[at].mul_add(scale[at], shift[at]);
                to[at] = if value > 0.0 { value } else { 0.0 };
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_memory_with_room_is_taken() {
        let mut spare = Spare::default();
        for len in [1000, 100, 500] {
            let mut values = Aligned::default();
            values.resize(len);
            spare.give_values(values);
        }
        let mut take = |len: usize| {
            let values = spare.take_values(len);
            assert_eq!(values.len(), len);
            values.room()
        };
        assert_eq!(take(400), 500);
        // None has room: in place of the least one.
        assert_eq!(take(2000), 2000);
        assert_eq!(take(1), 1000);
        assert_eq!(take(1), 1);
    }

    #[test]
    fn memory_is_kept_for_the_next_one_unless_it_is_too_much() {
        let kept = KeptSpare::default();
        let floats = |frames: usize| {
            kept.lend(|spare| {
                let before = spare.floats();
                let map = spare.take(frames, 1, 1);
                spare.give(map);
                before
            })
        };
        assert_eq!(floats(1000), 0);
        assert!(floats(1000) >= 1000);
        assert!(floats(KeptSpare::MOST_FLOATS + 1) >= 1000);
        assert_eq!(floats(1), 0);
    }
}
