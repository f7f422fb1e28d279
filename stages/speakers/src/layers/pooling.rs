//! Statistics of frames over time, as pyannote's `StatsPool` computes them.

/// Added to divisors to avoid division by zero.
const EPSILON: f32 = 1e-8;

/// Means of the channels of `x` (frames, channels), and then their standard deviations, unbiased.
pub fn statistics(x: &[f32], channels: usize) -> Vec<f32> {
    let frames = (x.len() / channels) as f64;
    let mut sums = vec![0.0f64; channels];
    for frame in x.chunks_exact(channels) {
        for (sum, &x) in sums.iter_mut().zip(frame) {
            *sum += f64::from(x);
        }
    }
    let means: Vec<f64> = sums.into_iter().map(|sum| sum / frames).collect();
    let mut squares = vec![0.0f64; channels];
    for frame in x.chunks_exact(channels) {
        for ((square, &x), mean) in squares.iter_mut().zip(frame).zip(&means) {
            let distance = f64::from(x) - mean;
            *square = distance.mul_add(distance, *square);
        }
    }
    let deviations = squares.iter().map(|square| (square / (frames - 1.0)).sqrt() as f32);
    means.iter().map(|&mean| mean as f32).chain(deviations).collect()
}

/// The same with a weight for each frame. Computed in f32, as the original does: of a single frame, and of none, the
/// deviation is then zero.
pub fn weighted_statistics(x: &[f32], channels: usize, weights: &[f32]) -> Vec<f32> {
    let total = weights.iter().sum::<f32>() + EPSILON;
    let squared = weights.iter().map(|weight| weight * weight).sum::<f32>();
    let mut means = vec![0.0f32; channels];
    let frames = || {
        x.chunks_exact(channels)
            .zip(weights)
            .filter(|(_, weight)| **weight != 0.0)
    };
    for (frame, &weight) in frames() {
        for (mean, &x) in means.iter_mut().zip(frame) {
            *mean = x.mul_add(weight, *mean);
        }
    }
    means.iter_mut().for_each(|mean| *mean /= total);
    let mut variances = vec![0.0f32; channels];
    for (frame, &weight) in frames() {
        for ((variance, &x), mean) in variances.iter_mut().zip(frame).zip(&means) {
            let distance = x - mean;
            *variance = (distance * distance).mul_add(weight, *variance);
        }
    }
    let count = total - squared / total + EPSILON;
    // Below zero, and 0 / 0, by rounding alone.
    let deviations = variances.iter().map(|variance| (variance / count).max(0.0).sqrt());
    means.iter().copied().chain(deviations).collect()
}

/// A mask for `frames` frames: for each the nearest value of `mask`, as PyTorch's `interpolate` takes it.
pub fn nearest(mask: &[f32], frames: usize) -> Vec<f32> {
    (0..frames).map(|frame| mask[frame * mask.len() / frames]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;

    /// Of `x` (channels, frames): (frames, channels).
    fn transposed(x: &[f32], frames: usize) -> Vec<f32> {
        (0..frames)
            .flat_map(|frame| x.iter().skip(frame).step_by(frames).copied())
            .collect()
    }

    #[test]
    fn pooling_is_that_of_the_original() {
        let tensors = golden::Tensors::load("wespeaker_stages.safetensors");
        let (shape, sequences) = tensors.floats("pool.sequences");
        let (channels, frames) = (shape[1], shape[2]);
        let (_, plain) = tensors.floats("pool.plain");
        let (weights_shape, weights) = tensors.floats("pool.weights");
        let (_, weighted) = tensors.floats("pool.weighted");
        let masks = weights_shape[1];
        // Sums of few numbers of size 1.
        let close = |found: &[f32], expected: &[f32]| {
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() < 1e-5, "{found} {expected}");
            }
        };
        for (batch, x) in sequences.chunks_exact(channels * frames).enumerate() {
            let x = transposed(x, frames);
            close(
                &statistics(&x, channels),
                &plain[batch * 2 * channels..][..2 * channels],
            );
            for mask in 0..masks {
                let at = batch * masks + mask;
                let mask = nearest(&weights[at * weights_shape[2]..][..weights_shape[2]], frames);
                let expected = &weighted[at * 2 * channels..][..2 * channels];
                close(&weighted_statistics(&x, channels, &mask), expected);
            }
        }
        let (shape, table) = tensors.integers("nearest_index_589_to_125");
        let mask: Vec<f32> = (0..589u16).map(f32::from).collect();
        let found: Vec<i64> = nearest(&mask, shape[0]).iter().map(|value| *value as i64).collect();
        assert_eq!(found, table);
    }

    #[test]
    fn frames_without_weight_do_not_count() {
        let x = [1.0, -2.0, 3.0, 5.0, 7.0, 11.0, 100.0, 100.0];
        let with = weighted_statistics(&x, 2, &[1.0, 1.0, 1.0, 0.0]);
        let plain = statistics(&x[..6], 2);
        for (with, plain) in with.iter().zip(&plain) {
            assert!((with - plain).abs() < 1e-5);
        }
        assert_eq!(weighted_statistics(&x, 2, &[0.0; 4]), [0.0; 4]);
        assert_eq!(weighted_statistics(&x, 2, &[0.0, 1.0, 0.0, 0.0]), [3.0, 5.0, 0.0, 0.0]);
        for weight in [1e-9, 0.3, 0.77, 1e9] {
            let found = weighted_statistics(&x, 2, &[0.0, 0.0, weight, 0.0]);
            assert!(found.iter().all(|value| value.is_finite()), "{found:?}");
        }
    }
}
