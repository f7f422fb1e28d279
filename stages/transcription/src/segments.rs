//! Groups words into segments.

use crate::transcript::{Segment, Word};
use crate::{Result, TranscriptionError};

/// Limits of segments, besides ends of sentences and changes of the speaker.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SegmentRules {
    /// The longest pause within a segment, in seconds.
    pub max_gap: f64,
    /// The longest segment, in seconds. A longer one is cut at its longest pause in the second half of that time; a
    /// single word may be longer.
    pub max_duration: f64,
}

impl Default for SegmentRules {
    fn default() -> Self {
        Self {
            max_gap: 1.0,
            max_duration: 30.0,
        }
    }
}

impl SegmentRules {
    fn check(&self) -> Result<()> {
        for (setting, seconds) in [("max_gap", self.max_gap), ("max_duration", self.max_duration)] {
            if seconds.is_nan() || seconds <= 0.0 {
                let why = format!("{seconds} s is not a duration above 0");
                return Err(TranscriptionError::setting(setting, why));
            }
        }
        Ok(())
    }
}

/// Marks that end a sentence: NeMo's, and those of other scripts.
const SENTENCE_ENDS: &[char] = &[
    '.', '!', '?', '…', '。', '．', '｡', '！', '？', '।', '॥', '؟', '۔', '։', '።', '፧', '။', '។',
];

/// Marks that may be between the end of a sentence and the next word.
const CLOSING: &[char] = &['"', '\'', '”', '’', '»', '›', ')', ']', '}', '」', '』', '）'];

/// Whether a sentence ends with a word: behind a full stop or the like, and marks that close.
pub fn ends_sentence(word: &str) -> bool {
    word.trim_end().trim_end_matches(CLOSING).ends_with(SENTENCE_ENDS)
}

/// Groups words, in the order in which they were spoken, into segments. Each word is in one segment, in the same order.
/// The confidence of a segment is the mean of those of its words that have one.
///
/// An error if a rule is not above 0.
pub fn segments(words: Vec<Word>, rules: &SegmentRules) -> Result<Vec<Segment>> {
    rules.check()?;
    let mut segments = Vec::new();
    let mut segment: Vec<Word> = Vec::new();
    for word in words {
        if let Some(last) = segment.last()
            && (ends_sentence(&last.word) || last.speaker != word.speaker || word.start - last.end > rules.max_gap)
        {
            segments.push(joined(std::mem::take(&mut segment)));
        }
        segment.push(word);
        // The first part is within the limit, the rest may have to be split again.
        while segment.len() > 1 && duration(&segment) > rules.max_duration {
            let rest = segment.split_off(longest_pause(&segment, rules.max_duration));
            segments.push(joined(std::mem::replace(&mut segment, rest)));
        }
    }
    if !segment.is_empty() {
        segments.push(joined(segment));
    }
    Ok(segments)
}

/// A segment cut wherever the speaker of its words changes. One without a change stays as it is, with its words' speaker.
pub(crate) fn cut_at_speakers(mut segment: Segment) -> Vec<Segment> {
    let changes = segment.words.windows(2).any(|pair| pair[0].speaker != pair[1].speaker);
    if !changes {
        if let Some(first) = segment.words.first() {
            segment.speaker.clone_from(&first.speaker);
        }
        return vec![segment];
    }
    let same_speaker = segment.words.chunk_by(|a, b| a.speaker == b.speaker);
    same_speaker.map(|words| joined(words.to_vec())).collect()
}

fn duration(words: &[Word]) -> f64 {
    end(words) - words.first().map_or(0.0, |word| word.start)
}

fn end(words: &[Word]) -> f64 {
    words.iter().map(|word| word.end).fold(f64::NEG_INFINITY, f64::max)
}

/// The number of words before the longest pause (the last of equal ones) that leaves between a half of `max_duration`
/// and all of it before it. Without one: as many words as fit, one at least.
fn longest_pause(words: &[Word], max_duration: f64) -> usize {
    let start = words[0].start;
    let mut best: Option<(f64, usize)> = None;
    let mut fitting = 1;
    let mut end = words[0].end;
    for (index, pair) in words.windows(2).enumerate() {
        end = end.max(pair[0].end);
        if end - start > max_duration {
            break;
        }
        fitting = index + 1;
        let pause = pair[1].start - pair[0].end;
        if end - start >= max_duration / 2.0 && best.is_none_or(|(longest, _)| pause >= longest) {
            best = Some((pause, fitting));
        }
    }
    best.map_or(fitting, |(_, count)| count)
}

/// A segment of words, of which there is one at least.
pub(crate) fn joined(words: Vec<Word>) -> Segment {
    let texts: Vec<&str> = words.iter().map(|word| word.word.trim()).collect();
    let confidences: Vec<f64> = words.iter().filter_map(|word| word.confidence).collect();
    let mean = confidences.iter().sum::<f64>() / confidences.len() as f64;
    Segment {
        start: words[0].start,
        end: end(&words),
        text: texts.join(" "),
        confidence: Some(mean).filter(|_| !confidences.is_empty()),
        speaker: words[0].speaker.clone(),
        words,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn word(text: &str, start: f64, end: f64) -> Word {
        Word {
            word: text.to_owned(),
            start,
            end,
            ..Word::default()
        }
    }

    fn texts(words: Vec<Word>, rules: &SegmentRules) -> Vec<String> {
        let found = segments(words, rules).unwrap();
        found.into_iter().map(|segment| segment.text).collect()
    }

    /// Words of 0.4 s, one each half second.
    fn steady(text: &str) -> Vec<Word> {
        let times = (0..).map(|index| f64::from(index) * 0.5);
        let words = text.split(' ').zip(times);
        words.map(|(text, start)| word(text, start, start + 0.4)).collect()
    }

    #[test]
    fn sentences_end_segments() {
        let rules = SegmentRules::default();
        assert_eq!(
            texts(steady("He said: \"Go!\" She (too.) went… वह गया। 3.5 is it"), &rules),
            ["He said: \"Go!\"", "She (too.)", "went…", "वह गया।", "3.5 is it"]
        );
        assert_eq!(texts(Vec::new(), &rules), [""; 0]);
    }

    #[test]
    fn pauses_and_speakers_end_segments() {
        let mut words = vec![
            word("a", 0.0, 0.5),
            word("b", 1.5, 2.0),
            word("c", 3.25, 4.0),
            word("d", 4.0, 5.0),
        ];
        assert_eq!(texts(words.clone(), &SegmentRules::default()), ["a b", "c d"]);
        words[1].speaker = Some("SPEAKER_00".to_owned());
        assert_eq!(texts(words.clone(), &SegmentRules::default()), ["a", "b", "c d"]);
        let found = segments(words, &SegmentRules::default()).unwrap();
        assert_eq!(found[1].speaker.as_deref(), Some("SPEAKER_00"));
        assert_eq!((found[2].start, found[2].end), (3.25, 5.0));
    }

    #[test]
    fn long_segments_are_cut_at_their_longest_pause() {
        let rules = SegmentRules {
            max_gap: 1.0,
            max_duration: 4.0,
        };
        // Pauses of 0.5 s after `b` (in the first half) and of 0.25 s after `e`.
        let words = vec![
            word("a", 0.0, 0.5),
            word("b", 0.5, 1.0),
            word("c", 1.5, 2.0),
            word("d", 2.0, 2.5),
            word("e", 2.5, 3.0),
            word("f", 3.25, 3.75),
            word("g", 3.75, 4.25),
        ];
        assert_eq!(texts(words, &rules), ["a b c d e", "f g"]);
        // No pause at all: as late as may be. And words that are too long alone.
        let even = (0..6)
            .map(|index| word("x", f64::from(index), f64::from(index) + 1.0))
            .collect();
        assert_eq!(texts(even, &rules), ["x x x x", "x x"]);
        let long = vec![word("aaa", 0.0, 9.0), word("bbb", 9.0, 18.0), word("c", 18.0, 19.0)];
        assert_eq!(texts(long, &rules), ["aaa", "bbb", "c"]);
    }

    #[test]
    fn confidence_is_the_mean_of_what_is_known() {
        let mut words = steady("a b c");
        assert_eq!(
            segments(words.clone(), &SegmentRules::default()).unwrap()[0].confidence,
            None
        );
        words[0].confidence = Some(0.25);
        words[2].confidence = Some(0.75);
        assert_eq!(
            segments(words, &SegmentRules::default()).unwrap()[0].confidence,
            Some(0.5)
        );
    }

    #[test]
    fn rules_of_nothing_are_refused() {
        for (max_gap, max_duration) in [(0.0, 1.0), (1.0, -1.0), (f64::NAN, 1.0)] {
            assert!(segments(Vec::new(), &SegmentRules { max_gap, max_duration }).is_err());
        }
    }

    proptest! {
        #[test]
        fn every_word_is_in_one_segment_that_keeps_the_rules(
            words in prop::collection::vec(("[a-z]{1,4}[.!?]?", 0.0..2.0f64, 0.0..3.0f64, 0..3u8), 0..40),
            max_gap in 0.1..2.0f64, max_duration in 0.5..10.0f64,
        ) {
            let mut at = 0.0;
            let words: Vec<Word> = words.into_iter().map(|(text, gap, length, speaker)| {
                let start = at + gap;
                at = start + length;
                Word { speaker: (speaker > 0).then(|| speaker.to_string()), ..word(&text, start, at) }
            }).collect();
            let found = segments(words.clone(), &SegmentRules { max_gap, max_duration }).unwrap();
            let again: Vec<Word> = found.iter().flat_map(|segment| segment.words.clone()).collect();
            prop_assert_eq!(again, words);
            for segment in &found {
                let words = &segment.words;
                prop_assert!(words.len() == 1 || segment.end - segment.start <= max_duration);
                for pair in words.windows(2) {
                    prop_assert!(pair[1].start - pair[0].end <= max_gap && !ends_sentence(&pair[0].word));
                    prop_assert_eq!(&pair[0].speaker, &pair[1].speaker);
                }
                prop_assert_eq!(&segment.speaker, &words[0].speaker);
                prop_assert!(segment.start <= segment.end);
            }
            prop_assert!(found.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }
}
