//! The loss of connectionist temporal classification (Graves et al., 2006): the probability of a target is the sum over
//! all ways to place its labels in order on the frames, with blanks between equal labels and anywhere else. Forward and
//! backward sums run over the target with a blank before, between and after its labels; the gradient with respect to a
//! frame's logits is its softmax minus the posterior of each label there.

mod cuda;
#[cfg(test)]
mod device_tests;

use candle_core::Tensor;
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::{Float, dispatch, on_gpu, slice, tensor};

/// CTC losses of a padded batch of logits (batch * time, tokens and blank), blank last, and the gradient with respect
/// to the logits of the sum of losses times `factors`. An utterance whose frames cannot hold its target has an infinite loss; one
/// whose loss is not finite has a gradient of zeros. On a device, logits are in f32, and the call waits for the losses.
///
/// # Errors
/// If shapes do not fit, or a target has blank or a token that does not exist.
pub fn loss_and_gradient(
    logits: &Tensor,
    time: usize,
    lengths: &[usize],
    targets: &[Vec<u32>],
    factors: &[f64],
) -> Result<(Vec<f64>, Tensor)> {
    let (rows, outputs) = logits.dims2()?;
    let blank = outputs.saturating_sub(1);
    let batch = lengths.len();
    if batch.checked_mul(time) != Some(rows) || targets.len() != batch || factors.len() != batch || outputs == 0 {
        return Err(Error::Input(format!(
            "CTC: {rows} rows of logits for {batch} utterances of {time} frames and {} targets",
            targets.len()
        )));
    }
    if let Some(token) = targets.iter().flatten().find(|token| **token as usize >= blank) {
        return Err(Error::Input(format!("CTC: token {token} in a vocabulary of {blank}")));
    }
    if rows == 0 {
        return Ok((
            targets.iter().map(|target| without_frames(target)).collect(),
            logits.clone(),
        ));
    }
    on_gpu!(logits, cuda::loss_and_gradient(logits, time, lengths, targets, factors));
    let logits = logits.contiguous()?;
    dispatch!(logits.dtype(), T => {
        let values = slice::<T>(&logits)?;
        let values: &[T] = &values;
        let mut gradient = vec![0.0 as T; values.len()];
        let losses = gradient
            .par_chunks_mut(time * outputs)
            .zip(values.par_chunks(time * outputs))
            .enumerate()
            .map(|(utterance, (gradient, values))| {
                let used = lengths[utterance].min(time) * outputs;
                one(&values[..used], outputs, &targets[utterance], factors[utterance], &mut gradient[..used])
            })
            .collect();
        Ok((losses, tensor(gradient, logits.shape())?))
    })
}

/// The loss of an utterance without frames.
fn without_frames(target: &[u32]) -> f64 {
    if target.is_empty() { 0.0 } else { f64::INFINITY }
}

/// One utterance; `gradient` is zeros and stays so if the target does not fit.
fn one<T: Float>(logits: &[T], outputs: usize, target: &[u32], factor: f64, gradient: &mut [T]) -> f64 {
    let blank = outputs - 1;
    let frames = logits.len() / outputs;
    let states = 2 * target.len() + 1;
    let label = |state: usize| {
        if state.is_multiple_of(2) {
            blank
        } else {
            target[state / 2] as usize
        }
    };
    // Whether a path may come from two states before: over a blank between two different labels.
    let skips = |state: usize| state >= 3 && !state.is_multiple_of(2) && label(state) != label(state - 2);
    let log_norms: Vec<f64> = logits.chunks_exact(outputs).map(log_sum_exp).collect();
    let log_probability = |frame: usize, state: usize| logits[frame * outputs + label(state)].wide() - log_norms[frame];

    if frames == 0 {
        return without_frames(target);
    }
    let mut forward = vec![f64::NEG_INFINITY; frames * states];
    forward[0] = log_probability(0, 0);
    if states > 1 {
        forward[1] = log_probability(0, 1);
    }
    for frame in 1..frames {
        let (before, now) = forward.split_at_mut(frame * states);
        let before = &before[(frame - 1) * states..];
        for state in 0..states {
            let mut sum = before[state];
            if state >= 1 {
                sum = log_add(sum, before[state - 1]);
            }
            if skips(state) {
                sum = log_add(sum, before[state - 2]);
            }
            now[state] = sum + log_probability(frame, state);
        }
    }
    let last = &forward[(frames - 1) * states..];
    let total = if states > 1 {
        log_add(last[states - 1], last[states - 2])
    } else {
        last[0]
    };
    if !total.is_finite() {
        return -total;
    }

    // `after[s]`: log probability of what follows a frame in state s.
    let mut after = vec![f64::NEG_INFINITY; states];
    after[states - 1] = 0.0;
    if states > 1 {
        after[states - 2] = 0.0;
    }
    for frame in (0..frames).rev() {
        let values = &logits[frame * outputs..][..outputs];
        let gradient = &mut gradient[frame * outputs..][..outputs];
        for (gradient, value) in gradient.iter_mut().zip(values) {
            *gradient = T::of(factor * (value.wide() - log_norms[frame]).exp());
        }
        for state in 0..states {
            let posterior = (forward[frame * states + state] + after[state] - total).exp();
            gradient[label(state)] -= T::of(factor * posterior);
        }
        let entered: Vec<f64> = (0..states)
            .map(|state| after[state] + log_probability(frame, state))
            .collect();
        for state in 0..states {
            let mut sum = entered[state];
            if state + 1 < states {
                sum = log_add(sum, entered[state + 1]);
            }
            if state + 2 < states && skips(state + 2) {
                sum = log_add(sum, entered[state + 2]);
            }
            after[state] = sum;
        }
    }
    -total
}

fn log_sum_exp<T: Float>(values: &[T]) -> f64 {
    // A NaN is left out of the maximum and comes back through the sum.
    let largest = values.iter().map(|v| v.wide()).fold(f64::NEG_INFINITY, f64::max);
    largest + values.iter().map(|v| (v.wide() - largest).exp()).sum::<f64>().ln()
}

/// `ln(e^a + e^b)`.
#[inline]
pub fn log_add(a: f64, b: f64) -> f64 {
    let (large, small) = if a >= b { (a, b) } else { (b, a) };
    if small == f64::NEG_INFINITY {
        return large;
    }
    large + (small - large).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Noise;
    use crate::testing::{check_gradient, normal, values};
    use candle_core::Device;
    use proptest::prelude::*;

    /// Sum over every path of labels that collapses to the target.
    fn by_enumeration(logits: &[f64], outputs: usize, target: &[u32]) -> f64 {
        let frames = logits.len() / outputs;
        let mut total = 0.0;
        for path in 0..outputs.pow(frames as u32) {
            let labels: Vec<usize> = (0..frames).map(|t| path / outputs.pow(t as u32) % outputs).collect();
            let mut collapsed = labels.clone();
            collapsed.dedup();
            collapsed.retain(|label| *label != outputs - 1);
            if collapsed.iter().map(|l| *l as u32).eq(target.iter().copied()) {
                let log: f64 = labels
                    .iter()
                    .zip(logits.chunks_exact(outputs))
                    .map(|(label, row)| row[*label] - log_sum_exp(row))
                    .sum();
                total += log.exp();
            }
        }
        -total.ln()
    }

    proptest! {
        #[test]
        fn loss_is_the_sum_over_all_paths(frames in 1usize..6, target in prop::collection::vec(0u32..2, 0..4), seed: u64) {
            let mut noise = Noise::new(seed);
            let logits = normal(&[frames, 3], &mut noise);
            let targets = std::slice::from_ref(&target);
            let (found, gradient) = loss_and_gradient(&logits, frames, &[frames], targets, &[1.0]).unwrap();
            let expected = by_enumeration(&values(&logits), 3, &target);
            if expected.is_finite() {
                prop_assert!((found[0] - expected).abs() < 1e-9, "{} {expected}", found[0]);
            } else {
                prop_assert_eq!(found[0], f64::INFINITY);
                prop_assert!(values(&gradient).iter().all(|g| *g == 0.0));
            }
        }
    }

    #[test]
    fn gradient_agrees_with_finite_differences_in_a_padded_batch() {
        let mut noise = Noise::new(3);
        let logits = normal(&[3 * 9, 6], &mut noise);
        let (lengths, factors) = ([9, 5, 7], [0.5, 0.25, 1.0]);
        let targets = [vec![0, 1, 1, 4], vec![3], vec![]];
        let (_, gradient) = loss_and_gradient(&logits, 9, &lengths, &targets, &factors).unwrap();
        let weight = Tensor::from_slice(&factors, 3, &Device::Cpu).unwrap();
        check_gradient("ctc", &logits, &weight, &gradient, |logits| {
            let (losses, _) = loss_and_gradient(logits, 9, &lengths, &targets, &factors)?;
            Result::Ok(Tensor::from_vec(losses, 3, &Device::Cpu)?)
        });
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let logits = normal(&[4, 3], &mut Noise::new(1));
        assert!(
            loss_and_gradient(&logits, 2, &[2, 2], &[vec![2], vec![]], &[1.0, 1.0]).is_err(),
            "blank as a label"
        );
        assert!(
            loss_and_gradient(&logits, 4, &[4, 4], &[vec![], vec![]], &[1.0, 1.0]).is_err(),
            "too few rows"
        );
        let nothing = loss_and_gradient(&logits, 4, &[0], &[vec![]], &[1.0]).unwrap();
        assert_eq!(nothing.0, [0.0]);
    }
}
