//! Reads the samples of windows, one window or one group at a time, which bounds the memory.

use std::ops::Range;

use flow_speakers::silero::SAMPLE_RATE;

use crate::Result;
use crate::streamed::{Samples, shorter};

/// Most samples of a group: ten minutes of speech, in 38 MB. A recording with less is one group, whose windows are decoded
/// together with those of their length; a longer one is decoded group by group.
pub(crate) const GROUP_SAMPLES: u64 = 600 * SAMPLE_RATE as u64;

/// Takes the indices of the windows of a group, and the samples of each.
pub(crate) type DecodeGroup<'a> = dyn FnMut(Range<usize>, &[Vec<f32>]) -> Result<bool> + 'a;

/// Takes the index of a window and its samples. False: no more are wanted.
pub type TakeWindow<'a> = dyn FnMut(usize, Vec<f32>) -> Result<bool> + 'a;

/// Reads a recording once and passes the samples of its windows (in order, not overlapping) to `decode`, group by
/// group, with the indices of the windows. False: `decode` returned false.
///
/// # Errors
/// As [`each_window`].
pub(crate) fn group_by_group(
    windows: &[Range<u64>],
    recording: &dyn Samples,
    decode: &mut DecodeGroup<'_>,
) -> Result<bool> {
    let mut ends = group_ends(windows, GROUP_SAMPLES).into_iter();
    let mut end_of_group = ends.next();
    let mut first = 0;
    let mut signals: Vec<Vec<f32>> = Vec::new();
    each_window(windows, recording, &mut |index, signal| {
        signals.push(signal);
        let next = index + 1;
        if end_of_group != Some(next) {
            return Ok(true);
        }
        let wanted = decode(first..next, &signals)?;
        signals.clear();
        first = next;
        end_of_group = ends.next();
        Ok(wanted)
    })
}

/// Reads a recording once and passes the index and the samples of each of its windows (in order, not overlapping) to
/// `take`, one at a time. False: `take` returned false.
///
/// # Errors
/// Those of `take`, if the recording cannot be read, and if it is shorter than its windows say.
pub fn each_window(windows: &[Range<u64>], recording: &dyn Samples, take: &mut TakeWindow<'_>) -> Result<bool> {
    if windows.is_empty() {
        return Ok(true);
    }
    let (mut at, mut next, mut stopped) = (0, 0, false);
    let mut signal = Vec::new();
    recording.pass(&mut |block| {
        let end = at + block.len() as u64;
        while let Some(window) = windows.get(next).filter(|window| window.start < end) {
            if signal.is_empty() {
                signal.reserve_exact((window.end - window.start) as usize);
            }
            let (from, to) = (window.start.max(at), window.end.min(end));
            if from < to {
                signal.extend_from_slice(&block[(from - at) as usize..(to - at) as usize]);
            }
            if window.end > end {
                break;
            }
            next += 1;
            if !take(next - 1, std::mem::take(&mut signal))? {
                stopped = true;
                return Ok(false);
            }
        }
        at = end;
        Ok(next < windows.len())
    })?;
    if next < windows.len() && !stopped {
        return Err(shorter(at));
    }
    Ok(!stopped)
}

/// Where groups of consecutive windows end: each has at most `most` samples, or one window.
fn group_ends(windows: &[Range<u64>], most: u64) -> Vec<usize> {
    let mut ends = Vec::new();
    let mut samples = 0;
    for (index, window) in windows.iter().enumerate() {
        let length = window.end - window.start;
        if index > 0 && samples + length > most {
            ends.push(index);
            samples = 0;
        }
        samples += length;
    }
    ends.push(windows.len());
    ends
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Samples that come in blocks of given sizes, over and over.
    struct InBlocks<'a>(&'a [f32], &'a [usize]);

    impl Samples for InBlocks<'_> {
        fn pass(&self, take: &mut crate::streamed::Take<'_>) -> Result<()> {
            let mut rest = self.0;
            for size in self.1.iter().cycle() {
                let (block, after) = rest.split_at(rest.len().min(*size));
                if !take(block)? {
                    return Ok(());
                }
                rest = after;
                if rest.is_empty() {
                    break;
                }
            }
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn every_window_has_its_samples(
            parts in prop::collection::vec((0u64..40, 1u64..60), 0..20),
            sizes in prop::collection::vec(1usize..50, 1..4), wanted in 1usize..30,
        ) {
            let mut at = 0;
            let windows: Vec<Range<u64>> = parts.iter().map(|(gap, length)| {
                let start = at + gap;
                at = start + length;
                start..at
            }).collect();
            let samples: Vec<f32> = (0..at + 7).map(|at| at as f32).collect();
            let mut found: Vec<Vec<f32>> = Vec::new();
            let mut decode = |indices: Range<usize>, signals: &[Vec<f32>]| {
                assert_eq!(indices, found.len()..found.len() + signals.len());
                found.extend_from_slice(signals);
                Ok(true)
            };
            prop_assert!(group_by_group(&windows, &InBlocks(&samples, &sizes), &mut decode).unwrap());
            let expected: Vec<&[f32]> =
                windows.iter().map(|window| &samples[window.start as usize..window.end as usize]).collect();
            prop_assert_eq!(&found, &expected);
            let mut one_by_one = Vec::new();
            let mut take = |index: usize, signal: Vec<f32>| {
                assert_eq!(index, one_by_one.len());
                one_by_one.push(signal);
                Ok(one_by_one.len() < wanted)
            };
            let whole = each_window(&windows, &InBlocks(&samples, &sizes), &mut take).unwrap();
            prop_assert_eq!(whole, windows.len() < wanted || windows.is_empty());
            prop_assert_eq!(&one_by_one[..], &expected[..wanted.min(expected.len())]);
            if at > 0 {
                let short = &samples[..at as usize - 1];
                prop_assert!(group_by_group(&windows, &InBlocks(short, &sizes), &mut |_, _| Ok(true)).is_err());
                prop_assert!(each_window(&windows, &InBlocks(short, &sizes), &mut |_, _| Ok(true)).is_err());
            }
        }
    }

    #[test]
    fn groups_are_no_larger_than_they_may_be() {
        let windows = [0..4, 4..8, 10..12, 12..40, 40..41];
        assert_eq!(group_ends(&windows, 8), [2, 3, 4, 5]);
        assert_eq!(group_ends(&windows, 1_000), [5]);
        assert_eq!(group_ends(&windows[..1], 1), [1]);
        // Two of more than half a group.
        let long = GROUP_SAMPLES * 2 / 3;
        let windows = [0..long, long..2 * long];
        let samples = vec![0.5f32; 2 * long as usize];
        let mut groups = Vec::new();
        let mut decode = |indices: Range<usize>, signals: &[Vec<f32>]| {
            groups.push((indices, signals.len()));
            Ok(false)
        };
        let recording = &samples[..];
        // Who wants no more after the first group gets no second one.
        assert!(!group_by_group(&windows, &recording, &mut decode).unwrap());
        assert_eq!(groups, [(0..1, 1)]);
    }
}
