use proptest::prelude::*;

use super::super::{Activities, EmbeddingNetwork, SegmentationNetwork, Steps};
use super::*;
use crate::error_rate::{Scoring, errors};
use crate::fbank::Fbank;
use crate::golden;

/// Frequencies of the voices: at most one is heard at a time.
const TONES: [f64; 3] = [500.0, 1_200.0, 3_000.0];
const FRAMES: usize = 589;
const LOCALS: usize = 3;

/// Hears tones by how often samples change their sign. Speaker 0 of a window is the one that is heard first, and so on.
struct Tones;

fn tone_of(samples: &[f32]) -> Option<usize> {
    let sounding = samples.iter().filter(|sample| **sample != 0.0).count();
    if sounding < samples.len() / 2 {
        return None;
    }
    let changes = samples
        .windows(2)
        .filter(|pair| (pair[0] < 0.0) != (pair[1] < 0.0))
        .count();
    let frequency = changes as f64 / 2.0 / sounding as f64 * f64::from(SAMPLE_RATE);
    let difference = |tone: &usize| (TONES[*tone] - frequency).abs();
    (0..TONES.len()).min_by(|a, b| difference(a).total_cmp(&difference(b)))
}

impl SegmentationNetwork for Tones {
    fn frames(&self) -> usize {
        FRAMES
    }

    fn speakers(&self) -> usize {
        LOCALS
    }

    fn recording<'a>(&'a self, samples: &'a [f32]) -> Result<Activities<'a>> {
        assert_eq!(samples.len(), CHUNK, "the networks hear whole windows");
        let mut order = Vec::new();
        let mut activities = vec![0; FRAMES * LOCALS];
        for (frame, active) in activities.chunks_exact_mut(LOCALS).enumerate() {
            let Some(tone) = tone_of(&samples[frame * FRAME_STEP..][..RECEPTIVE_FIELD.min(CHUNK - frame * FRAME_STEP)])
            else {
                continue;
            };
            if !order.contains(&tone) {
                order.push(tone);
            }
            active[order.iter().position(|other| *other == tone).unwrap()] = 1;
        }
        Ok(Box::new(std::iter::once(Ok(activities))))
    }
}

impl EmbeddingNetwork for Tones {
    fn dimension(&self) -> usize {
        BANDS
    }

    fn fbank(&self) -> Fbank {
        Fbank::three_d_speaker()
    }

    fn min_clean_frames(&self) -> usize {
        15
    }

    /// In how many frames each band is the loudest.
    fn embeddings(&self, features: &[f32], masks: &[Vec<bool>]) -> Result<Vec<Option<Vec<f32>>>> {
        let frames = features.len() / BANDS;
        let of_mask = |mask: &Vec<bool>| {
            let rows = features.chunks_exact(BANDS).enumerate();
            let heard = rows
                .filter(|(frame, _)| mask[frame * mask.len() / frames])
                .map(|(_, row)| row);
            let mut counts = vec![0.0; BANDS];
            heard.for_each(|row| counts[(0..BANDS).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap()] += 1.0);
            (counts.iter().sum::<f32>() >= 30.0).then_some(counts)
        };
        Ok(masks.iter().map(of_mask).collect())
    }
}

fn tones() -> Arc<Diarizer> {
    Arc::new(Diarizer::new(Box::new(Tones), Box::new(Tones), Steps::default()).unwrap())
}

/// Parts follow each other: seconds of silence, then seconds of a tone.
fn recording(parts: &[(f64, f64, usize)]) -> Vec<f32> {
    let mut samples = Vec::new();
    let count = |seconds: f64| (seconds * f64::from(SAMPLE_RATE)) as usize;
    for &(silence, sound, tone) in parts {
        samples.resize(samples.len() + count(silence), 0.0);
        let angle = 2.0 * std::f64::consts::PI * TONES[tone] / f64::from(SAMPLE_RATE);
        samples.extend((0..count(sound)).map(|at| (0.2 * (angle * at as f64 + 0.1).sin()) as f32));
    }
    samples
}

fn online(settings: OnlineSettings) -> OnlineDiarizer {
    OnlineDiarizer::new(tones(), settings, None).unwrap()
}

/// Feeds samples by blocks of these sizes, and settles at the end. What is said at each block is checked: it is of a time that was
/// not decided before, it comes in time, and little is held.
fn feed(diarizer: &mut OnlineDiarizer, samples: &[f32], sizes: &[usize]) -> Decided {
    let settings = diarizer.settings;
    let mut all = Decided::default();
    let mut add = |diarizer: &OnlineDiarizer, before: f64, decided: Decided| {
        let now = diarizer.decided_until();
        assert!(now >= before);
        for turn in decided.turns.iter().chain(&decided.exclusive) {
            assert!(
                before <= turn.start && turn.start < turn.end && turn.end <= now,
                "{turn:?}: {before} to {now}"
            );
        }
        for pair in decided.exclusive.windows(2) {
            assert!(pair[0].end <= pair[1].start, "{pair:?}");
        }
        all.append(decided);
    };
    let mut rest = samples;
    for size in sizes.iter().cycle() {
        let (block, after) = rest.split_at(rest.len().min(*size));
        rest = after;
        let before = diarizer.decided_until();
        let decided = diarizer.feed(block).unwrap();
        add(diarizer, before, decided);
        let fed = samples.len() - rest.len();
        let in_time = fed.saturating_sub(settings.latency()) as f64 / f64::from(SAMPLE_RATE);
        assert!(
            diarizer.decided_until() >= in_time,
            "{fed}: {}",
            diarizer.decided_until()
        );
        assert!(diarizer.samples.len() <= CHUNK + SHIFT + settings.step_samples());
        assert!(diarizer.features.len() <= (WINDOW_FEATURES + 1) * BANDS);
        let open = CHUNK.max(settings.delay_samples() + settings.step_samples());
        assert!(
            diarizer.frames.len() <= open / FRAME_STEP + 8,
            "{}",
            diarizer.frames.len()
        );
        if rest.is_empty() {
            break;
        }
    }
    let before = diarizer.decided_until();
    let decided = diarizer.settle().unwrap();
    add(diarizer, before, decided);
    let end = samples.len() as f64 / f64::from(SAMPLE_RATE);
    assert!(end - diarizer.decided_until() < 2.0 * GEOMETRY.frame_duration);
    all
}

fn assert_turns(found: &[Turn], expected: &[(f64, f64, &str)]) {
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (turn, expected) in found.iter().zip(expected) {
        let close = |a: f64, b: f64| (a - b).abs() < 0.06;
        assert!(
            close(turn.start, expected.0) && close(turn.end, expected.1) && turn.speaker == expected.2,
            "{turn:?}, not {expected:?}"
        );
    }
}

#[test]
fn voices_are_known_again_and_turns_are_those_of_any_blocks() {
    // One turn is longer than the delay, and one voice is not heard for longer than a window.
    let samples = recording(&[
        (0.4, 3.0, 1),
        (1.5, 9.0, 0),
        (0.3, 2.5, 1),
        (0.0, 3.0, 2),
        (1.0, 2.0, 0),
        (0.7, 0.0, 0),
    ]);
    let expected = [
        (0.4, 3.4, "SPEAKER_00"),
        (4.9, 13.9, "SPEAKER_01"),
        (14.2, 16.7, "SPEAKER_00"),
        (16.7, 19.7, "SPEAKER_02"),
        (20.7, 22.7, "SPEAKER_01"),
    ];
    for settings in [
        OnlineSettings::default(),
        OnlineSettings {
            step: 0.5,
            delay: 3.0,
            ..OnlineSettings::default()
        },
    ] {
        let whole = feed(&mut online(settings), &samples, &[usize::MAX]);
        assert_turns(&whole.turns, &expected);
        assert_eq!(whole.turns, whole.exclusive);
        for sizes in [&[320][..], &[1, 4_097, 333], &[40_000]] {
            assert_eq!(feed(&mut online(settings), &samples, sizes), whole, "{sizes:?}");
        }
    }
}

#[test]
fn little_speech_makes_no_speaker_and_there_are_no_more_than_may_be() {
    let samples = recording(&[
        (1.0, 0.8, 1),
        (12.0, 4.0, 0),
        (0.5, 0.8, 2),
        (10.0, 4.0, 1),
        (8.0, 0.0, 0),
    ]);
    // The first voice is nobody's, as nobody is known; the third one is beside the second in all its windows.
    let found = feed(&mut online(OnlineSettings::default()), &samples, &[16_000]);
    assert_turns(&found.turns, &[(13.8, 17.8, "SPEAKER_00"), (29.1, 33.1, "SPEAKER_01")]);
    let any = OnlineSettings {
        min_speech: 0.5,
        ..OnlineSettings::default()
    };
    assert_eq!(feed(&mut online(any), &samples, &[16_000]).turns.len(), 4);
    let one = OnlineSettings {
        max_speakers: 1,
        ..OnlineSettings::default()
    };
    let found = feed(&mut online(one), &samples, &[16_000]);
    assert!(found.turns.iter().all(|turn| turn.speaker == "SPEAKER_00"), "{found:?}");
    assert!(found.turns.iter().any(|turn| turn.start > 28.0), "{found:?}");
}

#[test]
fn somebody_who_is_short_takes_nobody_elses_place() {
    // The only one who is known speaks on; another voice is too short to be known beside it.
    let samples = recording(&[(0.5, 0.7, 1), (0.5, 7.0, 0), (3.0, 0.0, 0)]);
    let mut diarizer = online(OnlineSettings::default());
    let found = feed(&mut diarizer, &samples, &[16_000]);
    assert_eq!(diarizer.speakers().count(), 1, "{found:?}");
    assert_turns(&found.turns, &[(1.7, 8.7, "SPEAKER_00")]);
}

#[test]
fn known_voices_have_their_names() {
    let samples = recording(&[(0.4, 3.0, 1), (0.5, 3.0, 0), (0.3, 3.0, 1)]);
    let known = |tone| {
        let voice = tones().voice(&recording(&[(0.2, 3.0, tone)]).repeat(4)[..CHUNK], &|| false);
        voice.unwrap().unwrap()
    };
    let known = KnownSpeakers::new(vec![("Ann".into(), known(2)), ("Bo".into(), known(1))], 0.5).unwrap();
    let mut diarizer = OnlineDiarizer::new(tones(), OnlineSettings::default(), Some(known)).unwrap();
    let found = feed(&mut diarizer, &samples, &[16_000]);
    let expected = [(0.4, 3.4, "Bo"), (3.9, 6.9, "SPEAKER_01"), (7.2, 10.2, "Bo")];
    assert_turns(&found.turns, &expected);
    assert_eq!(diarizer.speakers().collect::<Vec<_>>(), ["Bo", "SPEAKER_01"]);
    let other = KnownSpeakers::new(vec![("Ann".into(), vec![1.0; 3])], 0.5).unwrap();
    assert!(OnlineDiarizer::new(tones(), OnlineSettings::default(), Some(other)).is_err());
}

#[test]
fn all_can_be_decided_at_any_time_and_more_may_follow() {
    let samples = recording(&[(0.4, 3.0, 1), (0.5, 8.0, 0), (0.3, 5.0, 1)]);
    let mut diarizer = online(OnlineSettings::default());
    let mut all = Decided::default();
    // Before anything came, and between: at a window's end, right after it, and where there is less than a frame.
    for piece in [
        0..0,
        0..48_000,
        48_000..48_001,
        48_001..48_001,
        48_001..120_003,
        120_003..samples.len(),
    ] {
        let before = diarizer.decided_until();
        let end = piece.end as f64 / f64::from(SAMPLE_RATE);
        let mut decided = diarizer.feed(&samples[piece]).unwrap();
        decided.append(diarizer.settle().unwrap());
        assert!(
            decided.turns.iter().all(|turn| before <= turn.start && turn.end <= end),
            "{decided:?}"
        );
        assert!(end - diarizer.decided_until() < 2.0 * GEOMETRY.frame_duration);
        all.append(decided);
    }
    let speakers: Vec<&str> = all.turns.iter().map(|turn| turn.speaker.as_str()).collect();
    assert!(
        speakers
            .iter()
            .all(|speaker| ["SPEAKER_00", "SPEAKER_01"].contains(speaker)),
        "{speakers:?}"
    );
    let seconds: f64 = all.turns.iter().map(Turn::duration).sum();
    // A frame at each cut may be heard or not.
    assert!((seconds - 16.0).abs() < 0.3, "{seconds}");
}

#[test]
fn wrong_samples_and_settings_are_refused() {
    let samples = recording(&[(0.4, 3.0, 1), (0.5, 3.0, 0)]);
    let mut diarizer = online(OnlineSettings::default());
    for wrong in [f32::NAN, f32::INFINITY, -2e9] {
        let error = diarizer.feed(&[0.0, wrong]).unwrap_err();
        assert!(matches!(error, Error::Sample { at: 1, .. }), "{error}");
    }
    let whole = feed(&mut online(OnlineSettings::default()), &samples, &[usize::MAX]);
    assert_eq!(feed(&mut diarizer, &samples, &[8_000]), whole);
    type Change = fn(&mut OnlineSettings);
    let wrong: [(&str, Change); 5] = [
        ("step", |settings| settings.step = 0.0),
        ("delay", |settings| settings.delay = f64::NAN),
        ("new_speaker_distance", |settings| settings.new_speaker_distance = 0.0),
        ("min_speech", |settings| settings.min_speech = f64::INFINITY),
        ("max_speakers", |settings| settings.max_speakers = 0),
    ];
    for (name, change) in wrong {
        let mut settings = OnlineSettings::default();
        change(&mut settings);
        let error = OnlineDiarizer::new(tones(), settings, None).unwrap_err().to_string();
        assert!(error.starts_with(name), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// `feed` asserts that what was said is never said otherwise, that all is said in time, and that little is held.
    #[test]
    fn what_was_said_stands_however_samples_come(
        parts in prop::collection::vec((0.0..2.0f64, 0.1..4.0f64, 0usize..3), 1..8),
        sizes in prop::collection::vec(1usize..50_000, 1..4),
        step in 0.3..3.0f64,
        delay in 0.0..9.0f64,
    ) {
        let samples = recording(&parts);
        let settings = OnlineSettings { step, delay, ..OnlineSettings::default() };
        let whole = feed(&mut online(settings), &samples, &[usize::MAX]);
        prop_assert_eq!(&feed(&mut online(settings), &samples, &sizes), &whole);
        for pair in whole.exclusive.windows(2) {
            prop_assert!(pair[0].end <= pair[1].start, "{:?}", pair);
        }
    }
}

/// Golden conversations of synthetic voices. As recordings they have DERs of 2.6 % and 17.5 % by the default; the same steps as
/// here, in PyTorch, have 3.5 % and 18.8 %. The bounds leave room for a turn of some seconds that is decided otherwise.
#[test]
fn conversations_are_told_apart_nearly_as_well_as_offline() {
    let diarizer = Arc::new(Diarizer::bundled().unwrap());
    let cases = golden::json("flow_reference.json");
    let mut compared = 0;
    for (recording, samples) in golden::recordings() {
        let mut online = OnlineDiarizer::new(Arc::clone(&diarizer), OnlineSettings::default(), None).unwrap();
        let found = feed(&mut online, &samples, &[3_200]);
        let mut of_recording = cases.as_array().unwrap().iter();
        let case = of_recording.find(|case| case["key"] == format!("{recording}.auto"));
        let (Some(case), Some(reference)) = (case, golden::turns(&recording)) else {
            golden::lacks(&recording, "it is not in the reference");
            continue;
        };
        let (counted, _) = errors(&reference, &found.turns, &Scoring::default()).unwrap();
        println!(
            "{recording}: DER {:.4} with speakers {:?}",
            counted.der(),
            online.speakers().collect::<Vec<_>>()
        );
        let offline = &case["der_no_collar_with_overlap"]["diarization error rate"];
        let offline = offline.as_f64().unwrap();
        // At most twice the errors where there are few, and seven in a hundred more where there are many.
        let most = match golden::is_bundled() {
            true => 0.055,
            false => (2.1 * offline).min(offline + 0.07).max(0.055),
        };
        assert!(counted.der() <= most, "{recording}: {}", counted.der());
        compared += 1;
    }
    assert!(compared > 0);
}
