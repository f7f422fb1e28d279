use std::cell::Cell;
use std::time::Instant;

use candle_core::{Device, Tensor};
use flow_storage::Storage;

use super::super::tests::{recognizer, settings, two};
use super::*;
use crate::coverage::{CoverageSettings, coverage};
use crate::recognizer::SpeechWindows;
use crate::suspects::Reason;
use crate::test_data;

thread_local! {
    /// Samples that were decoded again on this thread.
    pub(super) static DECODED: Cell<usize> = const { Cell::new(0) };
}

fn recovering() -> RecognitionSettings {
    RecognitionSettings {
        coverage: CoverageSettings {
            mode: CoverageMode::Recover,
            suspects: SuspectUse::Keep,
        },
        ..settings(VoiceActivity::Neural)
    }
}

/// A recording whose windows were found and heard.
struct Long {
    samples: Vec<f32>,
    windows: SpeechWindows,
    heard: Vec<Heard>,
    seconds: f64,
}

impl Long {
    fn of(recognizer: &Recognizer, samples: Vec<f32>, settings: &RecognitionSettings) -> Self {
        let mut first = recognizer.first_pass(settings);
        first.feed(&samples).unwrap();
        let windows = first.windows(settings).unwrap();
        let begun = Instant::now();
        let heard = {
            let signals = signals(&samples, &windows);
            recognizer
                .decode_in_batches(&signals, &speech_of(&windows), settings.batch_seconds, &|| false)
                .unwrap()
                .unwrap()
        };
        Long {
            seconds: begun.elapsed().as_secs_f64(),
            samples,
            windows,
            heard,
        }
    }

    /// Each recording is one window, with this many seconds of zeros before and behind it.
    fn in_windows(
        recognizer: &Recognizer,
        recordings: &[Vec<f32>],
        (before, behind): (f64, f64),
        settings: &RecognitionSettings,
    ) -> Self {
        let zeros = |seconds: f64| vec![0.0; (seconds * 16_000.0) as usize];
        let (mut samples, mut windows) = (Vec::new(), Vec::new());
        for recording in recordings {
            let start = samples.len() as u64;
            samples.extend(zeros(before));
            samples.extend_from_slice(recording);
            samples.extend(zeros(behind));
            windows.push(start..samples.len() as u64);
        }
        let found = Long::of(recognizer, samples, settings);
        let windows = SpeechWindows {
            windows,
            ..found.windows
        };
        let heard = {
            let signals = signals(&found.samples, &windows);
            let heard = recognizer.decode_in_batches(&signals, &speech_of(&windows), settings.batch_seconds, &|| false);
            heard.unwrap().unwrap()
        };
        Long {
            windows,
            heard,
            ..found
        }
    }

    fn speech(&self) -> Vec<Vec<Range<f64>>> {
        speech_of(&self.windows)
    }
}

fn speech_of(windows: &SpeechWindows) -> Vec<Vec<Range<f64>>> {
    (0..windows.windows.len())
        .map(|index| windows.stretches(index))
        .collect()
}

fn signals<'a>(samples: &'a [f32], windows: &SpeechWindows) -> Vec<&'a [f32]> {
    let windows = windows.windows.iter();
    windows
        .map(|window| &samples[window.start as usize..window.end as usize])
        .collect()
}

fn texts(heard: &[Heard]) -> Vec<String> {
    heard
        .iter()
        .flat_map(|heard| &heard.words)
        .map(|word| word_key(&word.word))
        .collect()
}

/// Length of the longest common subsequence.
fn common(a: &[String], b: &[String]) -> usize {
    let mut row = vec![0; b.len() + 1];
    for a in a {
        let mut before = 0;
        for (at, b) in b.iter().enumerate() {
            let above = row[at + 1];
            row[at + 1] = if a == b { before + 1 } else { above.max(row[at]) };
            before = above;
        }
    }
    row[b.len()]
}

/// Recovers and prints a row of the table: `whole` is what would be heard without holes.
fn measured(
    name: &str,
    recognizer: &Recognizer,
    long: &Long,
    whole: &[Heard],
    with_holes: &[Heard],
    settings: &RecognitionSettings,
) -> (f64, f64) {
    let speech = long.speech();
    let (whole, before) = (texts(whole), texts(with_holes));
    let mut heard = with_holes.to_vec();
    let signals = signals(&long.samples, &long.windows);
    DECODED.set(0);
    let begun = Instant::now();
    assert!(
        recognizer
            .recover(
                &signals,
                &speech,
                (settings, recognizer.decoding()),
                &mut heard,
                &|| false
            )
            .unwrap()
    );
    let seconds = begun.elapsed().as_secs_f64();
    let after = texts(&heard);
    let (found_before, found_after) = (common(&whole, &before), common(&whole, &after));
    let lost = whole.len() - found_before;
    let added = after.len() - before.len();
    let gained = found_after as f64 - found_before as f64;
    let other = added as f64 - gained;
    let false_words = added.saturating_sub(lost);
    let decoded: u64 = long
        .windows
        .windows
        .iter()
        .map(|window| window.end - window.start)
        .sum();
    let again = DECODED.get() as f64 / decoded as f64;
    let shares = [with_holes, &heard].map(|heard| {
        let found = coverage(&long.windows.windows, &speech, heard);
        (100.0 * found.share, found.holes.len())
    });
    let recall = gained / lost.max(1) as f64;
    println!(
        "| {name} | {} | {lost} | {:.1} | {:.1} -> {:.1} | {other} | {false_words} ({:.2}) | {:.1} ({}) -> {:.1} ({}) | {:.1} ({:.1}) |",
        whole.len(),
        100.0 * recall,
        100.0 * found_before as f64 / whole.len().max(1) as f64,
        100.0 * found_after as f64 / whole.len().max(1) as f64,
        100.0 * false_words as f64 / whole.len().max(1) as f64,
        shares[0].0,
        shares[0].1,
        shares[1].0,
        shares[1].1,
        100.0 * again,
        100.0 * seconds / long.seconds,
    );
    (recall, false_words as f64 / whole.len().max(1) as f64)
}

/// Recordings one after the other, with such pauses between them, in seconds.
fn in_a_row(recordings: &[Vec<f32>], pause: f64) -> Vec<f32> {
    let silence = vec![0.0; (pause * 16_000.0) as usize];
    let mut all = silence.clone();
    for recording in recordings {
        all.extend_from_slice(recording);
        all.extend_from_slice(&silence);
    }
    all
}

/// Speech with chords of three notes that change twice a second, so many decibels below it.
fn with_music(speech: &[f32], decibels: f64) -> Vec<f32> {
    let level = |samples: &[f32]| samples.iter().map(|sample| f64::from(sample * sample)).sum::<f64>();
    let note = |at: usize, index: usize| {
        let step = (at / 8_000 * 5 + index * 4) % 24;
        let frequency = 220.0 * 2f64.powf(step as f64 / 12.0);
        let phase = std::f64::consts::TAU * frequency * at as f64 / 16_000.0;
        (phase.sin() + 0.5 * (2.0 * phase).sin()) * (-((at % 8_000) as f64) / 4_000.0).exp()
    };
    let music: Vec<f32> = (0..speech.len())
        .map(|at| (0..3).map(|index| note(at, index)).sum::<f64>() as f32)
        .collect();
    let factor = (level(speech) / level(&music) * 10f64.powf(-decibels / 10.0)).sqrt() as f32;
    speech
        .iter()
        .zip(&music)
        .map(|(speech, music)| speech + factor * music)
        .collect()
}

/// With the model that `FLOW_TEST_MODEL` names, or the bundled one.
fn measured_recognizer() -> Recognizer {
    match std::env::var_os("FLOW_TEST_MODEL") {
        Some(model) => Recognizer::load(model.as_ref(), candle_core::DType::F32, &Device::Cpu).unwrap(),
        None => recognizer(),
    }
}

/// A recognizer with a larger bias of blank in the joint network.
fn reluctant(mut recognizer: Recognizer, bias: f32) -> Recognizer {
    let names = ["joint.joint_net.2.bias", "joint.joint_net.1.bias"];
    let parameters = &mut recognizer.model.parameters;
    let id = names.iter().find_map(|name| parameters.id(name)).unwrap();
    let mut values: Vec<f32> = parameters.get(id).to_vec1().unwrap();
    values[recognizer.model.config.vocab_size] += bias;
    let length = values.len();
    parameters
        .set(id, Tensor::from_vec(values, length, &Device::Cpu).unwrap())
        .unwrap();
    recognizer
}

/// Takes words away from every window that is longer than `seconds` by a second: of this many seconds in its middle, or from its first
/// third on to its end, as a decoder that stays on blank does.
fn silenced(heard: &[Heard], seconds: f64, to_the_end: bool, windows: &[Range<u64>]) -> Vec<Heard> {
    let mut heard = heard.to_vec();
    for (heard, window) in heard.iter_mut().zip(windows) {
        let length = (window.end - window.start) as f64 / 16_000.0;
        if length < seconds + 1.0 {
            continue;
        }
        let lost = if to_the_end {
            length / 3.0..length
        } else {
            0.5 * (length - seconds)..0.5 * (length + seconds)
        };
        let keep: Vec<bool> = heard.words.iter().map(|word| !lost.contains(&word.start)).collect();
        let mut kept = keep.iter();
        heard.words.retain(|_| *kept.next().unwrap());
        let mut kept = keep.iter();
        heard.tokens.retain(|_| *kept.next().unwrap());
    }
    heard
}

#[test]
#[ignore = "minutes: prints the table of docs/transcription.md"]
fn lost_words_are_found_again() {
    for surely in [true, false] {
        table(surely);
    }
}

fn table(surely: bool) {
    let plain = measured_recognizer();
    let settings = recovering();
    // What was reached with recordings that the model knows, by the bundled model and the one that was fine-tuned.
    let reached = if std::env::var_os("FLOW_TEST_MODEL").is_some() {
        0.94
    } else {
        0.88
    };
    let check = |(found, too_many): (f64, f64), least: f64| {
        assert!(
            !surely || (found >= least && too_many <= 0.01),
            "{found} of {least}, {too_many}"
        );
    };
    let mut recordings = test_data::corpus_samples(&Storage::default(), if surely { 2 } else { 8 });
    if surely {
        let signals: Vec<&[f32]> = recordings.iter().map(Vec::as_slice).collect();
        let heard = plain.decode_in_batches(&signals, &vec![Vec::new(); signals.len()], 60.0, &|| false);
        let heard = heard.unwrap().unwrap();
        let mut sure = heard.iter().map(|heard| confidence(heard) >= 0.7);
        recordings.retain(|_| sure.next().unwrap());
    }
    println!(
        "| holes | words | lost | found again, % | of all, % | other words | false (%) | coverage | again, % of audio (time) |"
    );
    let paused = Long::of(&plain, in_a_row(&recordings, 0.7), &settings);
    println!(
        "{} recordings, {} windows, {:.0} s",
        recordings.len(),
        paused.heard.len(),
        paused.samples.len() as f64 / 16_000.0
    );
    measured("none", &plain, &paused, &paused.heard, &paused.heard, &settings);
    let joined: Vec<Vec<f32>> = recordings.chunks(4).map(|four| four.concat()).collect();
    let wide = RecognitionSettings {
        min_pause: 0.5,
        ..settings
    };
    let long = Long::of(&plain, in_a_row(&joined, 1.5), &wide);
    measured(
        "none, windows of long speech",
        &plain,
        &long,
        &long.heard,
        &long.heard,
        &wide,
    );
    for seconds in [1.5, 2.0, 3.0, 4.0] {
        let holes = silenced(&long.heard, seconds, false, &long.windows.windows);
        let name = format!("{seconds} s in a window");
        check(measured(&name, &plain, &long, &long.heard, &holes, &wide), reached);
    }
    let stuck = silenced(&long.heard, 1.0, true, &long.windows.windows);
    check(
        measured("from a third on", &plain, &long, &long.heard, &stuck, &wide),
        reached,
    );
    let mut every_third = paused.heard.clone();
    for heard in every_third.iter_mut().step_by(3) {
        *heard = Heard::default();
    }
    let found = measured(
        "every third window",
        &plain,
        &paused,
        &paused.heard,
        &every_third,
        &settings,
    );
    check(found, reached);
    let whole = Long::in_windows(&plain, &recordings, (0.0, 0.0), &settings);
    for (name, silence) in [
        ("0.4 s of zeros behind each", (0.0, 0.4)),
        ("0.5 s of zeros before each", (0.5, 0.0)),
    ] {
        let with = Long::in_windows(&plain, &recordings, silence, &settings);
        measured(name, &plain, &with, &whole.heard, &with.heard, &settings);
    }
    for decibels in [20.0, 10.0] {
        let music: Vec<f32> = with_music(&paused.samples, decibels);
        let with = Long::of(&plain, music, &settings);
        let name = format!("music, {decibels} dB below speech");
        measured(&name, &plain, &with, &paused.heard, &with.heard, &settings);
    }
    for (bias, least) in [
        (3.0, 0.0),
        (6.0, 0.5),
        (8.0, 0.65),
        (10.0, 0.75),
        (13.0, 0.85),
        (16.0, 0.8),
    ] {
        let reluctant = reluctant(measured_recognizer(), bias);
        let stuck = Long::of(&reluctant, paused.samples.clone(), &settings);
        let name = format!("blank + {bias}");
        let found = measured(&name, &reluctant, &stuck, &paused.heard, &stuck.heard, &settings);
        check(found, least);
    }
}

/// A sentence that was lost is found again as it was but for what another cut changes, whoever else lost one; nothing else changes.
#[test]
fn a_window_without_words_is_decoded_again() {
    let recognizer = recognizer();
    let settings = recovering();
    let long = Long::of(&recognizer, two().0, &settings);
    let speech = long.speech();
    let signals = signals(&long.samples, &long.windows);
    DECODED.set(0);
    let mut untouched = long.heard.clone();
    assert!(
        recognizer
            .recover(
                &signals,
                &speech,
                (&settings, recognizer.decoding()),
                &mut untouched,
                &|| false
            )
            .unwrap()
    );
    assert_eq!((untouched, DECODED.get()), (long.heard.clone(), 0));
    let longest = (0..signals.len())
        .max_by_key(|&index| long.heard[index].words.len())
        .unwrap();
    let mut lost = long.heard.clone();
    lost[longest] = Heard::default();
    let before = coverage(&long.windows.windows, &speech, &lost);
    assert!(before.share < 1.0 && !before.holes.is_empty(), "{before:?}");
    let mut found = lost.clone();
    assert!(
        recognizer
            .recover(
                &signals,
                &speech,
                (&settings, recognizer.decoding()),
                &mut found,
                &|| false
            )
            .unwrap()
    );
    let again = found[longest].clone();
    assert!(again.recovered > 0 && again.recovered == again.words.len(), "{again:?}");
    assert_eq!(again.words.len(), again.tokens.len());
    let (was, is) = (texts(&long.heard[longest..=longest]), texts(&found[longest..=longest]));
    assert!(2 * common(&was, &is) >= was.len(), "{was:?} {is:?}");
    let after = coverage(&long.windows.windows, &speech, &found);
    assert!(after.share > before.share && after.recovered == again.recovered as u64);
    lost[longest] = again.clone();
    assert_eq!(found, lost);
    // Alone, and with all others lost, too.
    let mut alone = [Heard::default()];
    let of_it = |all: &[Vec<Range<f64>>]| [all[longest].clone()];
    recognizer
        .recover(
            &signals[longest..=longest],
            &of_it(&speech),
            (&settings, recognizer.decoding()),
            &mut alone,
            &|| false,
        )
        .unwrap();
    let mut all = vec![Heard::default(); signals.len()];
    let pool = flow_kernels::threads::pool("test", 1).unwrap();
    pool.install(|| {
        recognizer
            .recover(&signals, &speech, (&settings, recognizer.decoding()), &mut all, &|| {
                false
            })
            .unwrap()
    });
    if recognizer.is_batch_invariant() {
        assert_eq!((&alone[0], &all[longest]), (&again, &again));
    }
    assert!(
        !recognizer
            .recover(
                &signals,
                &speech,
                (&settings, recognizer.decoding()),
                &mut vec![Heard::default(); signals.len()],
                &|| true
            )
            .unwrap()
    );
}

/// Words before and after a hole stay, and what is found is between them.
#[test]
fn a_hole_within_a_window_is_filled_between_its_words() {
    let recognizer = recognizer();
    let wide = RecognitionSettings {
        min_pause: 0.5,
        ..recovering()
    };
    let joined = test_data::corpus_samples(&Storage::default(), 40)[..4].concat();
    let long = Long::of(&recognizer, in_a_row(&[joined], 0.5), &wide);
    let silenced = silenced(&long.heard, 2.5, false, &long.windows.windows);
    let mut heard = silenced.clone();
    let signals = signals(&long.samples, &long.windows);
    assert!(
        recognizer
            .recover(
                &signals,
                &long.speech(),
                (&wide, recognizer.decoding()),
                &mut heard,
                &|| false
            )
            .unwrap()
    );
    let recovered: usize = heard.iter().map(|heard| heard.recovered).sum();
    assert!(recovered > 0);
    for (found, before) in heard.iter().zip(&silenced) {
        assert_eq!(found.words.len(), before.words.len() + found.recovered);
        assert_eq!(found.words.len(), found.tokens.len());
        assert!(found.words.is_sorted_by(|a, b| a.start <= b.start), "{found:?}");
        assert!(before.words.iter().all(|word| found.words.contains(word)));
    }
}

/// What a model does not know is not decoded in all ways, and says nothing about its blank; nor does a choice of blank in much speech that
/// a penalty would not change.
#[test]
fn attempts_end_where_they_would_find_nothing() {
    let heard = |words: &[(f64, f64)], blanks: &[(f64, f32)]| Heard {
        words: words
            .iter()
            .map(|&(start, confidence)| Word {
                word: "word".to_owned(),
                start,
                end: start + 0.25,
                confidence: Some(confidence),
                speaker: None,
            })
            .collect(),
        blanks: blanks.to_vec(),
        ..Heard::default()
    };
    let mut piece = Piece {
        window: 0,
        cut: 0.0..2.0,
        inner: 0.0..2.0,
        hole: 0.5..1.0,
        tried: Vec::new(),
    };
    // Words that do not fill the hole, and one attempt that does.
    for found in [heard(&[(1.75, 0.05)], &[]), heard(&[(0.5, 0.05)], &[])] {
        assert!(piece.takes(found).is_none() && !piece.is_given_up());
    }
    assert!(piece.takes(heard(&[(0.6, 0.05)], &[])).is_none() && piece.is_given_up());
    // A word a second, and blank chosen by so many logits in the first two gaps: little speech, much, and much with a hole.
    for (lead, expected) in [(5.0, [true; 3]), (7.0, [true, false, true]), (9.0, [false; 3])] {
        let is = |seconds: usize, has_hole: bool| {
            let words: Vec<(f64, f64)> = (0..seconds).map(|start| (start as f64, 0.8)).collect();
            let found = heard(&words, &[(0.5, lead), (1.5, lead)]);
            is_reluctant(&found, &[0.0..seconds as f64 - 0.7], has_hole)
        };
        assert_eq!([is(3, false), is(6, false), is(6, true)], expected, "{lead}");
    }
}

#[test]
fn nothing_is_invented_over_noise_and_measuring_changes_nothing() {
    let recognizer = recognizer();
    let noise: Vec<f32> = (0..48_000u64)
        .map(|at| (at * at % 10_007) as f32 / 10_007.0 - 0.5)
        .collect();
    let signals = [&noise[..], &vec![0.0; 48_000]];
    let speech = vec![vec![0.0..3.0]; 2];
    let mut heard = vec![Heard::default(); 2];
    let settings = recovering();
    assert!(
        recognizer
            .recover(
                &signals,
                &speech,
                (&settings, recognizer.decoding()),
                &mut heard,
                &|| false
            )
            .unwrap()
    );
    assert_eq!(texts(&heard), [""; 0]);
    let (samples, _) = two();
    let measuring = RecognitionSettings {
        coverage: CoverageSettings {
            mode: CoverageMode::Measure,
            ..CoverageSettings::default()
        },
        ..settings
    };
    let off = recognizer
        .transcribe(&samples, &super::super::tests::settings(VoiceActivity::Neural), &|| {
            false
        })
        .unwrap()
        .unwrap();
    let measured = recognizer.transcribe(&samples, &measuring, &|| false).unwrap().unwrap();
    assert_eq!((&measured.segments, off.coverage), (&off.segments, None));
    let coverage = measured.coverage.unwrap();
    assert!(coverage.speech_s > 2.0 && coverage.share > 0.9, "{coverage:?}");
}

/// A network whose bias of blank is too large loses words between others: coverage says so, and what it says with a penalty on blank is
/// found.
#[test]
fn a_decoder_that_stays_on_blank_is_made_to_speak() {
    let (plain, settings) = (recognizer(), recovering());
    let mut recordings = test_data::corpus_samples(&Storage::default(), 4);
    recordings.retain(|recording| {
        let heard = plain.decode(&[recording]).unwrap();
        confidence(&heard[0]) >= 0.7
    });
    let whole = Long::of(&plain, in_a_row(&recordings, 0.7), &settings);
    for (bias, least_found, most_covered) in [(6.0, 0.5, 0.98), (10.0, 0.65, 0.92), (16.0, 0.85, 0.5)] {
        let stuck = reluctant(recognizer(), bias);
        let long = Long::of(&stuck, whole.samples.clone(), &settings);
        let lost = coverage(&long.windows.windows, &long.speech(), &long.heard);
        let name = format!("blank + {bias}");
        let (found, too_many) = measured(&name, &stuck, &long, &whole.heard, &long.heard, &settings);
        assert!(lost.share < most_covered, "{bias}: {lost:?}");
        assert!(found >= least_found && too_many <= 0.0, "{bias}: {found}, {too_many}");
    }
    // In one pass over a recording, too.
    let stuck = reluctant(recognizer(), 16.0);
    let of = |mode: CoverageMode| {
        let settings = RecognitionSettings {
            coverage: CoverageSettings {
                mode,
                ..CoverageSettings::default()
            },
            ..settings
        };
        let found = stuck.transcribe(&two().0, &settings, &|| false).unwrap().unwrap();
        found.coverage.unwrap()
    };
    let (before, after) = (of(CoverageMode::Measure), of(CoverageMode::Recover));
    assert!(
        before.share < after.share && after.recovered > 0,
        "{before:?} {after:?}"
    );
    assert_eq!(before.speech_s, after.speech_s);
}

#[test]
fn suspect_words_are_left_out_where_that_is_asked_for() {
    let recognizer = recognizer();
    let word = |index: usize| Word {
        word: "way".to_owned(),
        start: 0.16 * index as f64,
        end: 0.16 * index as f64 + 0.16,
        confidence: Some(0.9),
        speaker: None,
    };
    let repeated = Heard {
        words: (0..6).map(word).collect(),
        tokens: vec![Vec::new(); 6],
        ..Heard::default()
    };
    let silence = vec![0.0; 32_000];
    for (suspects, left) in [(SuspectUse::Keep, 6), (SuspectUse::Drop, 1)] {
        let settings = RecognitionSettings {
            coverage: CoverageSettings {
                mode: CoverageMode::Measure,
                suspects,
            },
            ..recovering()
        };
        let mut heard = [repeated.clone()];
        recognizer
            .recover(
                &[&silence],
                &[vec![0.0..2.0]],
                (&settings, recognizer.decoding()),
                &mut heard,
                &|| false,
            )
            .unwrap();
        assert_eq!((heard[0].words.len(), heard[0].tokens.len()), (left, left));
        let told = coverage(std::slice::from_ref(&(16_000..48_000)), &[vec![0.0..2.0]], &heard).suspects;
        assert_eq!(
            told,
            [Suspect {
                start: 1.16,
                end: 1.96,
                text: "way way way way way".to_owned(),
                reason: Reason::Repetition,
                dropped: suspects == SuspectUse::Drop,
            }]
        );
    }
}
