//! Divides long audio into windows at pauses, and joins the words of the windows.

use std::ops::Range;

use crate::speech_frames::SpeechFrames;
use crate::transcript::Word;
use crate::{Result, TranscriptionError};

/// Divides a recording into consecutive windows, in samples, without gaps or overlaps. None is longer than `max_window`
/// seconds, and none but the last is shorter than half of that (the last one may have a quarter, unless it is the only
/// one).
///
/// A window ends in the middle of the longest pause between `turns` (in order and not overlapping, as
/// [`speech`](flow_speakers::speech::speech) gives them) that is in its second half; where there is none, in the middle
/// of the frame that is least likely to hold speech.
///
/// An error if `max_window` has fewer than four samples or is not a number.
pub fn windows(frames: &SpeechFrames, turns: &[Range<u64>], max_window: f64) -> Result<Vec<Range<u64>>> {
    let longest = longest_window(frames, max_window)?;
    let pauses = pauses(turns, frames.samples());
    let mut windows = Vec::new();
    cut(frames, &pauses, 0..frames.samples(), longest, &mut windows);
    Ok(windows)
}

/// The windows of `turns` alone, in samples: each turn (in order, not overlapping, within the recording) is a window, and
/// one that is longer than `max_window` seconds is cut as [`windows`] cuts a recording, in its pauses between `shorter`
/// turns first. What is between the turns is in no window.
///
/// An error as with [`windows`], or if a turn is not within the recording.
pub fn windows_of_turns(
    frames: &SpeechFrames,
    turns: &[Range<u64>],
    shorter: &[Range<u64>],
    max_window: f64,
) -> Result<Vec<Range<u64>>> {
    let longest = longest_window(frames, max_window)?;
    let samples = frames.samples();
    if turns.iter().any(|turn| turn.start > turn.end || turn.end > samples) {
        return Err(TranscriptionError::Input(format!(
            "a turn of speech is not within {samples} samples"
        )));
    }
    let pauses = pauses(shorter, samples);
    let mut windows = Vec::new();
    for turn in turns {
        cut(frames, &pauses, turn.clone(), longest, &mut windows);
    }
    Ok(windows)
}

fn longest_window(frames: &SpeechFrames, max_window: f64) -> Result<u64> {
    let longest = frames.samples_in(max_window);
    if max_window.is_nan() || longest < 4 {
        let why = format!("{max_window} s is too short");
        return Err(TranscriptionError::setting("max_window", why));
    }
    Ok(longest)
}

/// Cuts `whole` into windows of at most `longest` samples, which are appended to `windows`.
fn cut(frames: &SpeechFrames, pauses: &[Range<u64>], whole: Range<u64>, longest: u64, windows: &mut Vec<Range<u64>>) {
    let Range { mut start, end } = whole;
    while end - start > longest {
        // What is left is longer than a window, so it leaves room behind this range.
        let range = start + longest / 2..(start + longest).min(end - longest / 4);
        let cut = longest_pause(pauses, &range)
            .or_else(|| frames.quietest(range.clone()))
            .unwrap_or(range.end);
        windows.push(start..cut);
        start = cut;
    }
    if start < end {
        windows.push(start..end);
    }
}

/// [`join_words`] of windows between which there may be gaps, as those of [`windows_of_turns`].
///
/// An error as with [`join_words`], or if the windows are not in order within the recording's `samples`.
pub fn join_words_of_turns(
    windows: &[Range<u64>],
    samples: u64,
    sample_rate: u32,
    words: Vec<Vec<Word>>,
) -> Result<Vec<Word>> {
    if words.len() != windows.len() {
        return Err(TranscriptionError::Input(format!(
            "{} lists of words are not those of {} windows",
            words.len(),
            windows.len()
        )));
    }
    // A gap is a window without words.
    let (mut all, mut all_words) = (Vec::new(), Vec::new());
    let mut at = 0;
    for (window, words) in windows.iter().zip(words) {
        if window.start > at {
            all.push(at..window.start);
            all_words.push(Vec::new());
        }
        all.push(window.clone());
        all_words.push(words);
        at = window.end;
    }
    if at > samples {
        return Err(TranscriptionError::Input(format!(
            "windows up to {at} are not those of {samples} samples"
        )));
    }
    join_words(&all, sample_rate, all_words)
}

/// What is between the turns, and before and after them.
fn pauses(turns: &[Range<u64>], samples: u64) -> Vec<Range<u64>> {
    let ends = std::iter::once(0).chain(turns.iter().map(|turn| turn.end));
    let starts = turns.iter().map(|turn| turn.start).chain([samples]);
    ends.zip(starts)
        .map(|(start, end)| start..end)
        .filter(|pause| pause.start < pause.end)
        .collect()
}

/// The middle of the longest part of a pause that is in `range`, the last of equal ones.
fn longest_pause(pauses: &[Range<u64>], range: &Range<u64>) -> Option<u64> {
    let first = pauses.partition_point(|pause| pause.end <= range.start);
    let near = pauses[first..].iter().take_while(|pause| pause.start < range.end);
    let within = near.map(|pause| pause.start.max(range.start)..pause.end.min(range.end));
    let longest = within.max_by_key(|pause| pause.end - pause.start)?;
    Some(longest.start + (longest.end - longest.start) / 2)
}

/// Joins the words of windows: times relative to each window become times relative to the recording.
///
/// All words are kept, in order. Times are monotonic over the windows: a word that extends beyond its window (as the
/// duration of a last token may) ends with it, and no word starts before the previous one.
///
/// An error if there are not as many lists of words as windows, if the windows do not follow each other, or if a time
/// is not a number.
pub fn join_words(windows: &[Range<u64>], sample_rate: u32, words: Vec<Vec<Word>>) -> Result<Vec<Word>> {
    if words.len() != windows.len() || sample_rate == 0 {
        return Err(TranscriptionError::Input(format!(
            "{} lists of words are not those of {} windows at {sample_rate} Hz",
            words.len(),
            windows.len()
        )));
    }
    let in_order = windows.iter().all(|window| window.start <= window.end);
    if !in_order || windows.windows(2).any(|pair| pair[0].end != pair[1].start) {
        return Err(TranscriptionError::Input("windows do not follow each other".to_owned()));
    }
    let seconds = |samples: u64| samples as f64 / f64::from(sample_rate);
    let mut joined = Vec::with_capacity(words.iter().map(Vec::len).sum());
    let mut last = 0.0;
    for (window, words) in windows.iter().zip(words) {
        let (from, to) = (seconds(window.start), seconds(window.end));
        for mut word in words {
            if !word.start.is_finite() || !word.end.is_finite() {
                return Err(TranscriptionError::Input(format!(
                    "the word `{}` of the window at {from} s has no times",
                    word.word
                )));
            }
            word.start = (from + word.start).min(to).max(from).max(last);
            word.end = (from + word.end).min(to).max(word.start);
            last = word.start;
            joined.push(word);
        }
    }
    Ok(joined)
}

#[cfg(test)]
mod tests {
    use flow_speakers::speech::{SpeechSettings, speech};
    use proptest::prelude::*;

    use super::*;

    /// Ends of windows of at most a second, in frames of ten samples at 100 Hz.
    fn cuts(probabilities: &[f32], turns: &[Range<u64>], samples: u64) -> Vec<u64> {
        let frames = SpeechFrames::new(probabilities, 10, samples, 100).unwrap();
        let found = windows(&frames, turns, 1.0).unwrap();
        found.into_iter().map(|window| window.end).collect()
    }

    #[test]
    fn windows_end_in_the_longest_pause_of_their_second_half() {
        // Pauses 20..40 (in the first half), 55..60, 70..80, 85..88.
        let turns = [0..20, 40..55, 60..70, 80..85, 88..150];
        assert_eq!(cuts(&[1.0; 15], &turns, 150), [75, 150]);
        // A pause reaches over the end of the window: the middle of what is in it. Then there is none in reach.
        let turns = [0..90, 120..200];
        assert_eq!(cuts(&[1.0; 20], &turns, 200), [95, 165, 200]);
        assert_eq!(cuts(&[1.0; 10], &[], 100), [100]);
        assert_eq!(cuts(&[], &[], 0), [0; 0]);
    }

    #[test]
    fn without_a_pause_the_least_likely_speech_is_cut() {
        let mut probabilities = [0.9; 18];
        probabilities[2] = 0.1;
        probabilities[6] = 0.6;
        probabilities[8] = 0.6;
        let all = 0..180;
        let whole = std::slice::from_ref(&all);
        assert_eq!(cuts(&probabilities, whole, 180), [85, 180]);
        // All alike: as late as may be, with a quarter of a window left.
        assert_eq!(cuts(&[0.9; 11], whole, 110), [75, 110]);
    }

    #[test]
    fn long_turns_are_cut_and_the_rest_stays() {
        let frames = SpeechFrames::new(&[1.0; 40], 10, 400, 100).unwrap();
        // The first turn has a pause at 60..70, the last one none.
        let turns = [10..120, 150..200, 230..400];
        let shorter = [10..60, 70..120, 150..200, 230..400];
        let found = windows_of_turns(&frames, &turns, &shorter, 1.0).unwrap();
        assert_eq!(found, [10..65, 65..120, 150..200, 230..325, 325..400]);
        assert_eq!(windows_of_turns(&frames, &[], &[], 1.0).unwrap(), []);
        let outside = 390..401;
        assert!(windows_of_turns(&frames, std::slice::from_ref(&outside), &[], 1.0).is_err());
    }

    #[test]
    fn words_of_turns_stand_where_the_turns_do() {
        let windows = [100..200, 200..250, 300..400];
        let words = || vec![vec![word(0.1, 2.0)], Vec::new(), vec![word(0.0, 0.5)]];
        let joined = join_words_of_turns(&windows, 500, 100, words()).unwrap();
        assert_eq!(times(&joined), [(1.1, 2.0), (3.0, 3.5)]);
        assert!(join_words_of_turns(&windows, 399, 100, words()).is_err());
        assert!(join_words_of_turns(&windows[1..], 500, 100, words()).is_err());
        let turned = [300..400, 100..200];
        assert!(join_words_of_turns(&turned, 500, 100, vec![Vec::new(); 2]).is_err());
        assert_eq!(join_words_of_turns(&[], 500, 100, Vec::new()).unwrap(), []);
    }

    #[test]
    fn windows_of_nothing_are_refused() {
        let frames = SpeechFrames::new(&[1.0], 10, 10, 100).unwrap();
        for max_window in [0.0, 0.03, -1.0, f64::NAN] {
            assert!(windows(&frames, &[], max_window).is_err(), "{max_window}");
        }
        assert_eq!(windows(&frames, &[], f64::INFINITY).unwrap().len(), 1);
    }

    fn word(start: f64, end: f64) -> Word {
        Word {
            start,
            end,
            ..Word::default()
        }
    }

    fn times(words: &[Word]) -> Vec<(f64, f64)> {
        words.iter().map(|word| (word.start, word.end)).collect()
    }

    #[test]
    fn times_go_on_over_windows() {
        // The second window does not begin on the grid of the encoder's frames; the first one's last word overran it.
        let windows = [0..1608, 1608..3000];
        let words = vec![
            vec![word(0.0, 0.8), word(15.2, 16.16)],
            vec![word(0.0, 0.08), word(13.2, 14.0)],
        ];
        let joined = join_words(&windows, 100, words).unwrap();
        let expected = [(0.0, 0.8), (15.2, 16.08), (16.08, 16.16), (29.28, 30.0)];
        for ((start, end), expected) in times(&joined).into_iter().zip(expected) {
            assert!(
                (start - expected.0).abs() < 1e-9 && (end - expected.1).abs() < 1e-9,
                "{joined:?}"
            );
        }
    }

    #[test]
    fn windows_and_words_that_do_not_fit_are_errors() {
        let (first, second, apart) = (0..10, 10..20, 11..20);
        assert!(join_words(std::slice::from_ref(&first), 100, Vec::new()).is_err());
        assert!(join_words(&[first.clone(), apart], 100, vec![Vec::new(); 2]).is_err());
        assert!(join_words(&[first, second.clone()], 100, vec![Vec::new(); 2]).is_ok());
        assert!(join_words(&[second], 100, vec![vec![word(f64::NAN, 1.0)]]).is_err());
        assert!(join_words(&[], 0, Vec::new()).is_err());
    }

    fn turns(probabilities: &[f32], samples: u64) -> Vec<Range<u64>> {
        let turns = speech(probabilities, samples as usize, &SpeechSettings::default()).unwrap();
        turns
            .into_iter()
            .map(|turn| turn.start as u64..turn.end as u64)
            .collect()
    }

    proptest! {
        #[test]
        fn windows_of_turns_are_the_turns_cut(
            probabilities in prop::collection::vec(prop_oneof![Just(0.0f32), Just(1.0)], 0..400), max_window in 0.05..3.0f64,
        ) {
            let samples = probabilities.len() as u64 * 512;
            let frames = SpeechFrames::new(&probabilities, 512, samples, 16_000).unwrap();
            let turns = turns(&probabilities, samples);
            let found = windows_of_turns(&frames, &turns, &turns, max_window).unwrap();
            let longest = (max_window * 16_000.0).round() as u64;
            prop_assert!(found.iter().all(|window| window.start < window.end && window.end - window.start <= longest));
            let mut rest = found.iter();
            for turn in turns {
                let mut at = turn.start;
                while at < turn.end {
                    let window = rest.next().unwrap();
                    prop_assert_eq!(window.start, at);
                    at = window.end;
                }
                prop_assert_eq!(at, turn.end);
            }
            prop_assert!(rest.next().is_none());
        }

        #[test]
        fn windows_tile_the_recording(
            probabilities in prop::collection::vec(prop_oneof![0.0..1.0f32, Just(0.0), Just(1.0)], 0..400), cut in 0..512u64,
            max_window in 0.005..3.0f64,
        ) {
            let samples = (probabilities.len() as u64 * 512).saturating_sub(cut);
            let frames = SpeechFrames::new(&probabilities, 512, samples, 16_000).unwrap();
            let turns = turns(&probabilities, samples);
            let longest = (max_window * 16_000.0).round() as u64;
            let found = windows(&frames, &turns, max_window).unwrap();
            let mut at = 0;
            for (index, window) in found.iter().enumerate() {
                prop_assert_eq!(window.start, at);
                let length = window.end - window.start;
                let last = index + 1 == found.len();
                let least = if found.len() == 1 { 1 } else { longest / if last { 4 } else { 2 } };
                prop_assert!(length >= least && length <= longest, "{window:?}");
                at = window.end;
            }
            prop_assert_eq!(at, samples);
        }

        #[test]
        fn words_are_neither_lost_nor_doubled_and_times_do_not_run_back(
            lengths in prop::collection::vec(1..5000u64, 1..8),
            parts in prop::collection::vec(prop::collection::vec((0.0..1.0f64, -0.1..2.0f64), 0..6), 8),
        ) {
            let mut at = 0;
            let windows: Vec<Range<u64>> = lengths.iter().map(|length| {
                let start = at;
                at += length;
                start..at
            }).collect();
            let mut number = 0;
            let words: Vec<Vec<Word>> = parts.iter().take(windows.len()).map(|part| {
                let mut start = 0.0;
                part.iter().map(|(gap, length)| {
                    start += gap;
                    number += 1;
                    Word { word: number.to_string(), ..word(start, start + length) }
                }).collect()
            }).collect();
            let before: Vec<String> = words.iter().flatten().map(|word| word.word.clone()).collect();
            let joined = join_words(&windows, 1000, words).unwrap();
            let after: Vec<String> = joined.iter().map(|word| word.word.clone()).collect();
            prop_assert_eq!(before, after);
            prop_assert!(joined.windows(2).all(|pair| pair[0].start <= pair[1].start));
            let end = at as f64 / 1000.0;
            prop_assert!(joined.iter().all(|word| 0.0 <= word.start && word.start <= word.end && word.end <= end));
        }
    }
}
