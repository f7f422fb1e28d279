//! The rules of speech on frames that are easy to count: a pause of a frame may end speech, and speech of three frames is
//! kept.

use proptest::prelude::*;

use super::*;

/// A frame of 512 samples, in milliseconds.
const FRAME: f64 = 32.0;

fn bare() -> SpeechSettings {
    SpeechSettings {
        min_speech_duration_ms: 2.5 * FRAME,
        min_silence_duration_ms: FRAME,
        min_silence_at_max_speech: 0.98 * FRAME,
        speech_pad_ms: 0.0,
        ..SpeechSettings::default()
    }
}

/// First frames of turns and those after their last.
fn turns(probabilities: &[f32], settings: &SpeechSettings) -> Vec<(f64, f64)> {
    let turns = speech(probabilities, probabilities.len() * WINDOW, settings).unwrap();
    let frames = |samples: usize| samples as f64 / WINDOW as f64;
    turns
        .into_iter()
        .map(|turn| (frames(turn.start), frames(turn.end)))
        .collect()
}

#[test]
fn speech_begins_above_one_threshold_and_ends_below_the_other() {
    let speech = [0.4, 0.5, 0.4, 0.36, 0.4, 0.3, 0.3, 0.4, 0.9];
    // The last frame alone is too short.
    assert_eq!(turns(&speech, &bare()), [(1.0, 5.0)]);
    assert_eq!(turns(&[f32::NAN, 0.49], &bare()), []);
    assert_eq!(turns(&[], &bare()), []);
    let padded = SpeechSettings {
        speech_pad_ms: 0.3 * FRAME,
        ..bare()
    };
    assert_eq!(turns(&[1.0; 5], &padded), [(0.0, 5.0)]);
}

#[test]
fn padding_is_shared_where_there_is_little_room() {
    let settings = SpeechSettings {
        speech_pad_ms: 1.5 * FRAME,
        ..bare()
    };
    let mut speech = [1.0; 14];
    speech[4..6].fill(0.0);
    speech[0] = 0.0;
    assert_eq!(turns(&speech, &settings), [(0.0, 5.0), (5.0, 14.0)]);
}

#[test]
fn long_turns_are_cut_at_their_longest_pause() {
    let settings = SpeechSettings {
        min_silence_duration_ms: 5.0 * FRAME,
        // A little more, as products of these are rounded.
        max_speech_duration_s: 11.05 * FRAME / 1000.0,
        ..bare()
    };
    let mut speech = [1.0; 16];
    speech[2] = 0.0;
    speech[4..7].fill(0.0);
    assert_eq!(turns(&speech, &settings), [(0.0, 4.0), (7.0, 16.0)]);
    assert_eq!(turns(&[1.0; 16], &settings), [(0.0, 11.0), (12.0, 16.0)]);
}

proptest! {
    #[test]
    fn turns_are_in_order_within_the_recording(
        probabilities in prop::collection::vec(prop_oneof![0.0..1.0f32, Just(0.0), Just(1.0)], 0..200),
        cut in 0..WINDOW, padding in 0.0..300.0f64, min_speech in 0.0..500.0f64, min_silence in 0.0..500.0f64,
        max_speech in 1.0..10.0f64,
    ) {
        let samples = (probabilities.len() * WINDOW).saturating_sub(cut);
        let settings = SpeechSettings {
            speech_pad_ms: padding,
            min_speech_duration_ms: min_speech,
            min_silence_duration_ms: min_silence,
            max_speech_duration_s: max_speech,
            ..SpeechSettings::default()
        };
        let turns = speech(&probabilities, samples, &settings).unwrap();
        prop_assert!(turns.iter().all(|turn| turn.start < turn.end && turn.end <= samples));
        prop_assert!(turns.windows(2).all(|pair| pair[0].end <= pair[1].start));
    }
}
