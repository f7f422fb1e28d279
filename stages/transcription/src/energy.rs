//! Voice activity from the energy of the signal alone, without a network.

/// Lower limit of levels, in decibels of full scale: silence.
const QUIETEST: f64 = -70.0;

/// Upper limit: no valid signal is louder.
const LOUDEST: f64 = 100.0;

/// Smallest difference in decibels between the loud and the quiet frames of a recording by which they are
/// distinguished.
const LEAST_RANGE: f64 = 10.0;

/// Position of the threshold between the quiet and the loud frames, 0 to 1.
const SHARE: f64 = 0.35;

/// Decibels that change the odds of speech by a factor of e.
const SLOPE: f64 = 2.0;

/// Mean energy of each frame of `frame_samples`, in decibels of full scale, from -70 up. The last frame may be shorter.
/// Of a recording in parts, where each part but the last has whole frames, the levels are in a row.
pub fn frame_levels(samples: &[f32], frame_samples: usize) -> Vec<f32> {
    let frames = samples.chunks(frame_samples.max(1));
    let levels = frames.map(|frame| {
        let energy: f64 = frame.iter().map(|&sample| f64::from(sample) * f64::from(sample)).sum();
        let level = 10.0 * (energy / frame.len() as f64).log10();
        bounded(level) as f32
    });
    levels.collect()
}

/// NaN counts as silence.
fn bounded(level: f64) -> f64 {
    if level.is_nan() {
        QUIETEST
    } else {
        level.clamp(QUIETEST, LOUDEST)
    }
}

/// How likely each frame of a recording is to hold speech, from the levels of all its frames: 0.5 where the level is
/// 35 % of the way from the quiet frames (one in ten is quieter) to the loud ones (one in twenty is louder). Where these
/// are less than 10 dB apart, all but silence counts as speech: better to decode noise than to lose words.
pub fn speech_probabilities(levels: &[f32]) -> Vec<f32> {
    let mut sorted: Vec<f64> = levels.iter().map(|&level| bounded(f64::from(level))).collect();
    sorted.sort_by(f64::total_cmp);
    let percentile = |percent: usize| sorted.get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1)));
    let (Some(quiet), Some(loud)) = (percentile(10), percentile(95)) else {
        return Vec::new();
    };
    let middle = if loud - quiet < LEAST_RANGE {
        // Half way from silence to the lowest level that is not.
        QUIETEST + SLOPE
    } else {
        quiet + SHARE * (loud - quiet)
    };
    let probability = |&level: &f32| 1.0 / (1.0 + ((middle - bounded(f64::from(level))) / SLOPE).exp());
    levels.iter().map(|level| probability(level) as f32).collect()
}

#[cfg(test)]
mod tests {
    use flow_speakers::speech::{SpeechSettings, speech};
    use proptest::prelude::*;

    use super::*;

    /// Seconds of a tone of an amplitude, at 16 kHz.
    fn tone(seconds: f64, amplitude: f32) -> Vec<f32> {
        let samples = 0..(seconds * 16_000.0) as usize;
        samples.map(|index| amplitude * (index as f32 * 0.3).sin()).collect()
    }

    #[test]
    fn levels_are_decibels_of_full_scale() {
        let samples = [&[1.0; 512][..], &[0.1; 512], &[0.0; 512], &[f32::NAN; 100]].concat();
        let levels = frame_levels(&samples, 512);
        assert_eq!(levels.len(), 4);
        for (found, expected) in levels.iter().zip([0.0, -20.0, -70.0, -70.0]) {
            assert!((found - expected).abs() < 1e-4, "{levels:?}");
        }
        assert!(frame_levels(&[], 512).is_empty());
    }

    #[test]
    fn loud_parts_are_turns() {
        for noise in [0.0, 0.002, 0.01] {
            let samples = [
                tone(1.0, noise),
                tone(2.0, 0.3),
                tone(1.0, noise),
                tone(1.5, 0.1),
                tone(0.5, noise),
            ]
            .concat();
            let probabilities = speech_probabilities(&frame_levels(&samples, 512));
            let turns = speech(&probabilities, samples.len(), &SpeechSettings::default()).unwrap();
            assert_eq!(turns.len(), 2, "{noise}: {turns:?}");
            // To a frame and the padding.
            for (found, expected) in turns.iter().zip([16_000..48_000, 64_000..88_000usize]) {
                assert!(found.start.abs_diff(expected.start) <= 512 + 480, "{noise}: {turns:?}");
                assert!(found.end.abs_diff(expected.end) <= 512 + 480, "{noise}: {turns:?}");
            }
        }
    }

    #[test]
    fn even_noise_is_speech_and_silence_is_not() {
        let probabilities = speech_probabilities(&frame_levels(&tone(2.0, 0.01), 512));
        assert!(probabilities.iter().all(|&probability| probability > 0.5));
        let probabilities = speech_probabilities(&frame_levels(&[0.0; 20_000], 512));
        assert!(probabilities.iter().all(|&probability| probability < 0.5));
        assert!(speech_probabilities(&[]).is_empty());
    }

    proptest! {
        #[test]
        fn probabilities_are_between_0_and_1(levels in prop::collection::vec(any::<f32>(), 0..50)) {
            let probabilities = speech_probabilities(&levels);
            prop_assert_eq!(probabilities.len(), levels.len());
            prop_assert!(probabilities.iter().all(|probability| (0.0..=1.0).contains(probability)));
        }
    }
}
