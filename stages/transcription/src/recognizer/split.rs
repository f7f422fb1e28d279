//! A second hearing of windows that have a pause which voice activity does not see: the speech before it and the speech after it
//! may be sentences of two speakers or languages.

use flow_speakers::silero::SAMPLE_RATE;

use super::Heard;
use crate::Word;

/// Samples of a frame, of which the level is computed: 10 ms.
const FRAME: usize = SAMPLE_RATE as usize / 100;
/// A pause is this far below the level that a fifth of the window's frames exceed, in decibels.
const DEPTH: f32 = 20.0;
/// The shortest pause, in frames. Closures of stops are shorter.
const LEAST_PAUSE: usize = 10;
/// The middle of the pause is this many frames from either end of the window.
const LEAST_PART: usize = 50;
/// The shortest window, in frames.
const LEAST_WINDOW: usize = 160;
/// How much higher the mean confidence of words must be in the parts.
const MARGIN: f64 = 0.05;

/// The sample at which a window is cut for a second hearing: the middle of its longest pause, the first of equal ones.
pub(super) fn pause(signal: &[f32]) -> Option<usize> {
    let level = |frame: &[f32]| {
        let energy: f32 = frame.iter().map(|sample| sample * sample).sum();
        10.0 * (energy / FRAME as f32 + 1e-10).log10()
    };
    let levels: Vec<f32> = signal.chunks_exact(FRAME).map(level).collect();
    if levels.len() < LEAST_WINDOW {
        return None;
    }
    let mut sorted = levels.clone();
    sorted.sort_by(f32::total_cmp);
    let most = sorted[levels.len() * 4 / 5] - DEPTH;
    let mut longest: Option<(usize, usize)> = None;
    let mut at = 0;
    while at < levels.len() {
        let length = levels[at..].iter().take_while(|level| **level < most).count();
        let middle = at + length / 2;
        if length >= LEAST_PAUSE
            && (LEAST_PART..=levels.len() - LEAST_PART).contains(&middle)
            && longest.is_none_or(|(before, _)| length > before)
        {
            longest = Some((length, middle));
        }
        at += length.max(1);
    }
    longest.map(|(_, middle)| middle * FRAME)
}

/// What was heard in a window as a whole, or in its two parts, the second of which begins `after` seconds after the first: the
/// parts where both have words, and these are more confident.
pub(super) fn more_confident(whole: Heard, first: Heard, second: Heard, after: f64) -> Heard {
    if whole.words.is_empty() || first.words.is_empty() || second.words.is_empty() {
        return whole;
    }
    let parts = mean(first.words.iter().chain(&second.words));
    // Not true where one is not a number.
    if parts > mean(whole.words.iter()) + MARGIN {
        joined(first, second, after)
    } else {
        whole
    }
}

/// The mean confidence of words, of which there is one at least.
pub(super) fn mean<'a>(words: impl Iterator<Item = &'a Word>) -> f64 {
    let (mut sum, mut count) = (0.0, 0.0);
    for word in words {
        sum += word.confidence.unwrap_or(0.0);
        count += 1.0;
    }
    sum / count
}

fn joined(first: Heard, second: Heard, after: f64) -> Heard {
    let Heard {
        mut words,
        mut tokens,
        mut languages,
        mut blanks,
        ..
    } = first;
    // The duration of a last token may go beyond the part.
    for word in &mut words {
        word.start = word.start.min(after);
        word.end = word.end.min(after);
    }
    words.extend(second.words.into_iter().map(|word| Word {
        start: word.start + after,
        end: word.end + after,
        ..word
    }));
    tokens.extend(second.tokens);
    languages.extend(second.languages);
    blanks.extend(second.blanks.into_iter().map(|(time, lead)| (time + after, lead)));
    Heard {
        words,
        tokens,
        languages,
        blanks,
        ..Heard::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::Token;

    /// A tone of this many frames.
    fn sound(frames: usize, amplitude: f32) -> Vec<f32> {
        let sample = |at: usize| amplitude * (at as f32 * 0.3).sin();
        (0..frames * FRAME).map(sample).collect()
    }

    #[test]
    fn windows_are_cut_in_the_middle_of_their_longest_pause() {
        let with = |parts: &[(usize, f32)]| {
            let signal: Vec<f32> = parts
                .iter()
                .flat_map(|(frames, level)| sound(*frames, *level))
                .collect();
            pause(&signal).map(|at| at / FRAME)
        };
        assert_eq!(with(&[(80, 0.5), (12, 0.0), (80, 0.5)]), Some(86));
        assert_eq!(
            with(&[(60, 0.5), (11, 0.01), (60, 0.5), (14, 0.0), (60, 0.4)]),
            Some(138)
        );
        // The first of equal ones.
        assert_eq!(with(&[(60, 0.5), (12, 0.0), (60, 0.5), (12, 0.0), (60, 0.5)]), Some(66));
        // Too short a pause, one that is not deep, one near an end, too short a window, silence, nothing.
        assert_eq!(with(&[(80, 0.5), (9, 0.0), (80, 0.5)]), None);
        assert_eq!(with(&[(80, 0.5), (12, 0.1), (80, 0.5)]), None);
        assert_eq!(with(&[(30, 0.5), (12, 0.0), (160, 0.5)]), None);
        assert_eq!(with(&[(160, 0.5), (12, 0.0), (30, 0.5)]), None);
        assert_eq!(with(&[(60, 0.5), (12, 0.0), (60, 0.5)]), None);
        assert_eq!(with(&[(300, 0.0)]), None);
        assert_eq!(pause(&[]), None);
        assert_eq!(pause(&[f32::NAN; 200 * FRAME]), None);
    }

    #[test]
    fn parts_are_taken_where_they_are_more_confident() {
        let heard = |words: &[(&str, f64, f64)], language: &str| Heard {
            words: words
                .iter()
                .map(|(word, end, confidence)| Word {
                    word: (*word).to_owned(),
                    start: end - 0.25,
                    end: *end,
                    confidence: Some(*confidence),
                    speaker: None,
                })
                .collect(),
            tokens: words
                .iter()
                .map(|(word, ..)| {
                    vec![Token {
                        bytes: word.as_bytes().to_vec(),
                        logprob: -1.0,
                        is_first_choice: true,
                    }]
                })
                .collect(),
            languages: vec![language.to_owned()],
            ..Heard::default()
        };
        let whole = heard(&[("a", 0.5, 0.5), ("b", 1.5, 0.5)], "hi");
        let (first, second) = (heard(&[("c", 1.25, 0.7)], "hi"), heard(&[("d", 0.5, 0.5)], "en"));
        let found = more_confident(whole.clone(), first.clone(), second.clone(), 1.0);
        let times: Vec<_> = found
            .words
            .iter()
            .map(|word| (&word.word[..], word.start, word.end))
            .collect();
        assert_eq!(times, [("c", 1.0, 1.0), ("d", 1.25, 1.5)]);
        assert_eq!(found.languages, ["hi", "en"]);
        let texts: Vec<_> = found.tokens.iter().map(|tokens| &tokens[0].bytes[..]).collect();
        assert_eq!(texts, [b"c", b"d"]);
        let unsure = heard(&[("c", 0.5, 0.58)], "hi");
        assert_eq!(more_confident(whole.clone(), unsure, second.clone(), 1.0), whole);
        let none = heard(&[], "hi");
        assert_eq!(more_confident(whole.clone(), first, none.clone(), 1.0), whole);
        assert_eq!(more_confident(none.clone(), second.clone(), second, 1.0), none);
    }
}
