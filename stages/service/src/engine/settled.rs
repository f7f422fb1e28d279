//! The final segments of a recording whose windows are still being decoded.

use std::ops::Range;

use flow_speakers::silero::SAMPLE_RATE;
use flow_transcription::recognizer::Heard;
use flow_transcription::segments::{SegmentRules, segments};
use flow_transcription::windows::join_words_of_turns;
use flow_transcription::{Result, Segment, Word};

/// How far the segments of a recording are final: segments are made from the words in order, and later words change
/// only the last segment.
#[derive(Debug, Default)]
pub(crate) struct Settled {
    /// The first window that was not decoded at the last call.
    next: usize,
    /// The words of the last segment, to which others may be added.
    open: Vec<Word>,
}

impl Settled {
    /// Segments that became final since the last call, of a recording of `samples` samples.
    ///
    /// # Errors
    /// As [`joined`](flow_transcription::recognizer::joined).
    pub fn advance(
        &mut self,
        windows: &[Range<u64>],
        samples: u64,
        heard: &[Option<Heard>],
        rules: &SegmentRules,
    ) -> Result<Vec<Segment>> {
        let first = self.next;
        let new: Vec<Vec<Word>> = heard[first..]
            .iter()
            .map_while(|heard| heard.as_ref().map(|heard| heard.words.clone()))
            .collect();
        if new.is_empty() {
            return Ok(Vec::new());
        }
        self.next += new.len();
        let mut words = std::mem::take(&mut self.open);
        words.extend(join_words_of_turns(
            &windows[first..self.next],
            samples,
            SAMPLE_RATE,
            new,
        )?);
        let mut found = segments(words, rules)?;
        let Some(last) = found.last() else { return Ok(found) };
        // No word starts before its window does.
        let is_settled = windows.get(self.next).is_none_or(|window| {
            let start = window.start as f64 / f64::from(SAMPLE_RATE);
            let end = last.words.last().map_or(last.end, |word| word.end);
            start - end > rules.max_gap
        });
        if !is_settled && let Some(last) = found.pop() {
            self.open = last.words;
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use flow_transcription::recognizer::joined;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn settled_segments_are_those_of_the_whole_recording(
            parts in prop::collection::vec(
                (0u64..40_000, 1_000u64..200_000, prop::collection::vec(("[a-c]{1,3}[.?]?", 0.0..1.5f64, 0.0..2.0f64), 0..6)),
                0..12,
            ),
            order in prop::collection::vec(any::<u16>(), 12),
            max_gap in 0.1..2.0f64,
            max_duration in 0.5..15.0f64,
        ) {
            let rules = SegmentRules { max_gap, max_duration };
            let mut at = 0;
            let (windows, heard): (Vec<Range<u64>>, Vec<Heard>) = parts.into_iter().map(|(gap, length, words)| {
                let start = at + gap;
                at = start + length;
                let mut time = 0.0;
                let words = words.into_iter().map(|(word, pause, length)| {
                    let start = time + pause;
                    time = start + length;
                    Word { word, start, end: time, confidence: Some(0.5), speaker: None }
                });
                (start..at, Heard { words: words.collect(), ..Heard::default() })
            }).unzip();
            let whole = joined(&windows, at, heard.clone(), &rules).unwrap().segments;
            let mut by_order: Vec<usize> = (0..windows.len()).collect();
            by_order.sort_by_key(|&index| order[index]);
            let mut settled = Settled::default();
            let mut found = Vec::new();
            let mut known = vec![None; windows.len()];
            for index in by_order {
                known[index] = Some(heard[index].clone());
                found.extend(settled.advance(&windows, at, &known, &rules).unwrap());
                prop_assert_eq!(&found[..], &whole[..found.len()]);
            }
            prop_assert_eq!(found, whole);
        }
    }
}
