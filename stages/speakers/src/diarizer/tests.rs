use std::cell::Cell;

use super::*;
use crate::clustering::assign::Assignment;
use crate::clustering::plda::{Plda, PldaParts};
use crate::clustering::tests::clusters;
use crate::error_rate::{Scoring, errors};
use crate::fbank::Fbank;
use crate::golden;
use crate::turns::tests::assert_turns;

const NEVER: &dyn Fn() -> bool = &|| false;

fn settings(clusters: Clusters) -> DiarizationSettings {
    DiarizationSettings {
        clusters,
        ..DiarizationSettings::default()
    }
}

/// What the steps make of golden segmentations and embeddings.
fn golden_steps(
    tensors: &golden::Tensors,
    recording: &str,
    steps: &Steps,
    settings: &DiarizationSettings,
) -> steps::Found {
    let (shape, values) = tensors.bytes(&format!("{recording}.segmentations"));
    let segmentations = Segmentations::new(&values, shape[1], shape[2]).unwrap();
    let (shape, values) = tensors.floats(&format!("{recording}.embeddings"));
    let embeddings = Embeddings::new(&values, shape[1], shape[2]).unwrap();
    steps.apply(&segmentations, &embeddings, settings).unwrap()
}

#[test]
fn the_steps_are_those_of_the_reference() {
    let tensors = golden::Tensors::load("flow_reference.safetensors");
    let mut compared = 0;
    let cases = golden::json("flow_reference.json");
    for case in cases.as_array().unwrap() {
        let key = case["key"].as_str().unwrap();
        let steps = Steps {
            method: Method::Agglomerative {
                min_cluster_size: case["min_cluster_size"].as_u64().unwrap() as usize,
                assignment: Assignment::Constrained,
            },
            as_pyannote: true,
        };
        let mut settings = settings(clusters(&case["arguments"]));
        settings.clustering_threshold = case["threshold"].as_f64().unwrap();
        let recording = key.split('.').next().unwrap();
        let found = golden_steps(&tensors, recording, &steps, &settings);
        assert_turns(&found.turns, &case["turns"], key);
        assert_turns(&found.exclusive, &case["exclusive_turns"], key);
        let (shape, centroids) = tensors.doubles(&format!("{key}.centroids"));
        assert_eq!(found.voices.len(), shape[0], "{key}");
        for (voice, centroid) in found.voices.concat().iter().zip(&centroids) {
            // Means of f32, of size 1 or so.
            assert!(
                (f64::from(*voice) - centroid).abs() < 1e-4,
                "{key}: {voice}, not {centroid}"
            );
        }
        // The default makes no one active whom no chunk heard. Only where fewer speakers were asked for than are heard the
        // reference may have some.
        let ours = golden_steps(&tensors, recording, &Steps::default(), &settings);
        let heard = golden::speakers_heard(&cases, recording);
        if settings.clusters.number.is_none_or(|number| number >= heard) {
            assert_eq!(ours, found, "{key}");
        }
        compared += 1;
    }
    assert!(compared > 0);
}

#[test]
fn pyannotes_pipelines_give_its_turns() {
    if !golden::file("pipeline.safetensors").exists() {
        golden::not_compared("pipeline.safetensors", "it is not among the golden data");
        return;
    }
    let tensors = golden::Tensors::load("pipeline.safetensors");
    let plda = golden::Tensors::load("pipeline_plda.safetensors");
    let part = |name: &str| plda.doubles(name).1;
    let parts = PldaParts {
        mean1: part("mean1"),
        lda: part("lda"),
        mean2: part("mean2"),
        mu: part("mu"),
        tr: part("tr"),
        psi: part("psi"),
    };
    let plda = Plda::new(&parts, parts.psi.len()).unwrap();
    for case in golden::json("pipeline.json").as_array().unwrap() {
        let key = case["key"].as_str().unwrap();
        let hyper = |name: &str| case["hyper"][name].as_f64().unwrap();
        let method = match case["clustering"].as_str().unwrap() {
            "AgglomerativeClustering" => Method::Agglomerative {
                min_cluster_size: hyper("min_cluster_size") as usize,
                assignment: Assignment::Nearest,
            },
            "VBxClustering" => Method::Vbx {
                fa: hyper("Fa"),
                fb: hyper("Fb"),
                plda: Box::new(plda.clone()),
            },
            other => panic!("{key}: {other}"),
        };
        let steps = Steps {
            method,
            as_pyannote: true,
        };
        let number = |name: &str| case["arguments"][name].as_u64().map(|number| number as usize);
        let mut settings = settings(Clusters {
            number: number("num_speakers"),
            least: number("min_speakers"),
            most: number("max_speakers"),
        });
        settings.clustering_threshold = hyper("threshold");
        let found = golden_steps(&tensors, case["conversation"].as_str().unwrap(), &steps, &settings);
        // pyannote's names are numbers of the clusters that have turns, in order.
        let mut order: Vec<usize> = found.turns.iter().map(|turn| turn.speaker).collect();
        order.sort_unstable();
        order.dedup();
        for (found, expected) in [
            (&found.turns, &case["turns"]),
            (&found.exclusive, &case["exclusive_turns"]),
        ] {
            let expected = expected.as_array().unwrap();
            assert_eq!(found.len(), expected.len(), "{key}");
            for (found, expected) in found.iter().zip(expected) {
                let name = format!("SPEAKER_{:02}", order.binary_search(&found.speaker).unwrap());
                let close = |a: f64, b: &serde_json::Value| (a - b.as_f64().unwrap()).abs() < 1e-9;
                assert!(
                    close(found.start, &expected[0]) && close(found.end, &expected[1]) && expected[2] == name,
                    "{key}: {found:?}, not {expected}"
                );
            }
        }
    }
}

/// Hears two tones: a high one and a low one. Speaker 0 of a chunk is the one that is heard first, as with real networks.
struct Tones;

/// Frequencies of the voices.
const TONES: [f64; 2] = [500.0, 2_000.0];

fn sounds(samples: &[f32], tone: usize) -> bool {
    let (mut real, mut imaginary) = (0.0, 0.0);
    for (at, &sample) in samples.iter().enumerate() {
        let angle = 2.0 * std::f64::consts::PI * TONES[tone] * at as f64 / f64::from(SAMPLE_RATE);
        real += f64::from(sample) * angle.cos();
        imaginary += f64::from(sample) * angle.sin();
    }
    f64::hypot(real, imaginary) > 0.02 * samples.len() as f64
}

impl SegmentationNetwork for Tones {
    fn frames(&self) -> usize {
        589
    }

    fn speakers(&self) -> usize {
        3
    }

    fn recording<'a>(&'a self, samples: &'a [f32]) -> Result<Activities<'a>> {
        let chunks = GEOMETRY.chunks(samples.len() as f64 / f64::from(SAMPLE_RATE));
        Ok(Box::new((0..chunks).map(move |chunk| {
            let given = &samples[chunk * CHUNK_STEP..samples.len().min(chunk * CHUNK_STEP + CHUNK)];
            let mut first = None;
            let frame = |frame: usize| {
                let from = (frame * 270).min(given.len());
                let heard = &given[from..given.len().min(from + 991)];
                let heard = [0, 1].map(|tone| heard.len() > 500 && sounds(heard, tone));
                let swap = *first.get_or_insert(heard[1]) && heard.contains(&true);
                let [a, b] = heard.map(u8::from);
                if swap { [b, a, 0] } else { [a, b, 0] }
            };
            Ok((0..589).flat_map(frame).collect())
        })))
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

    fn embeddings(&self, features: &[f32], masks: &[Vec<bool>]) -> Result<Vec<Option<Vec<f32>>>> {
        let of_mask = |mask: &Vec<bool>| {
            let rows: Vec<&[f32]> = features
                .chunks_exact(BANDS)
                .enumerate()
                .filter(|(frame, _)| mask[frame * mask.len() / (features.len() / BANDS)])
                .map(|(_, row)| row)
                .collect();
            let peak = |row: &[f32]| (0..BANDS).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
            let mut counts = vec![0.0; BANDS];
            rows.iter().for_each(|row| counts[peak(row)] += 1.0);
            (rows.len() >= 30).then_some(counts)
        };
        Ok(masks.iter().map(of_mask).collect())
    }
}

fn tones() -> Diarizer {
    Diarizer::new(Box::new(Tones), Box::new(Tones), Steps::default()).unwrap()
}

/// Who sounds from when to when, in seconds.
type Parts<'a> = &'a [(f64, f64, usize)];

fn recording(seconds: f64, parts: Parts) -> Vec<f32> {
    let sample = |at: usize| {
        let time = at as f64 / f64::from(SAMPLE_RATE);
        let of_part = |&(start, end, tone): &(f64, f64, usize)| match (start..end).contains(&time) {
            true => 0.2 * (2.0 * std::f64::consts::PI * TONES[tone] * time).sin(),
            false => 0.0,
        };
        parts.iter().map(of_part).sum::<f64>() as f32
    };
    (0..(seconds * f64::from(SAMPLE_RATE)) as usize).map(sample).collect()
}

fn assert_parts(found: &[Turn], expected: &[(f64, f64, &str)]) {
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (turn, expected) in found.iter().zip(expected) {
        // Frames are 62 ms long, a part of one is enough to be heard.
        let close = |a: f64, b: f64| (a - b).abs() < 0.06;
        assert!(
            close(turn.start, expected.0) && close(turn.end, expected.1) && turn.speaker == expected.2,
            "{turn:?}, not {expected:?}"
        );
    }
}

#[test]
fn voices_get_their_turns_in_a_recording_of_many_chunks() {
    // Voice 1 begins; the last chunk is incomplete; one is not heard for twelve seconds.
    let parts = [
        (0.5, 6.0, 1),
        (6.5, 12.0, 0),
        (24.0, 30.0, 1),
        (27.0, 31.3, 0),
        (31.5, 34.0, 1),
    ];
    let samples = recording(35.3, &parts);
    let diarizer = tones();
    let found = diarizer
        .diarize(&samples, &DiarizationSettings::default(), NEVER)
        .unwrap()
        .unwrap();
    let expected = [
        (0.5, 6.0, "SPEAKER_00"),
        (6.5, 12.0, "SPEAKER_01"),
        (24.0, 30.0, "SPEAKER_00"),
        (27.0, 31.3, "SPEAKER_01"),
        (31.5, 34.0, "SPEAKER_00"),
    ];
    assert_parts(&found.turns, &expected);
    let seconds: Vec<f64> = found.speakers.iter().map(|speaker| speaker.seconds.round()).collect();
    assert_eq!(seconds, [14.0, 10.0]);
    for pair in found.exclusive.windows(2) {
        assert!(pair[0].end <= pair[1].start, "{pair:?}");
    }
    // Each exclusive turn is in a turn of its speaker.
    for turn in &found.exclusive {
        let within = |other: &&Turn| other.start <= turn.start && turn.end <= other.end;
        assert!(
            found
                .turns
                .iter()
                .filter(within)
                .any(|other| other.speaker == turn.speaker)
        );
    }

    // The same bits on one thread, and on three, whose groups of chunks are others.
    for threads in [1, 3] {
        let pool = flow_kernels::threads::pool("test", threads).unwrap();
        let of = || {
            tones()
                .diarize(&samples, &DiarizationSettings::default(), &|| false)
                .unwrap()
        };
        assert_eq!(pool.install(of).as_ref(), Some(&found), "{threads}");
    }

    // Gaps are filled, also of exclusive turns where no one else speaks in them, and short turns dropped.
    let merged = DiarizationSettings {
        min_duration_on: 3.0,
        min_duration_off: 2.0,
        ..DiarizationSettings::default()
    };
    let found = diarizer.diarize(&samples, &merged, NEVER).unwrap().unwrap();
    let expected = [
        (0.5, 6.0, "SPEAKER_00"),
        (6.5, 12.0, "SPEAKER_01"),
        (24.0, 34.0, "SPEAKER_00"),
        (27.0, 31.3, "SPEAKER_01"),
    ];
    assert_parts(&found.turns, &expected);
    for pair in found.exclusive.windows(2) {
        assert!(pair[0].end <= pair[1].start, "{pair:?}");
    }

    // One speaker, if so asked, has all.
    let one = settings(Clusters {
        most: Some(1),
        ..Clusters::default()
    });
    let found = diarizer.diarize(&samples, &one, NEVER).unwrap().unwrap();
    assert_eq!((found.speakers.len(), &found.turns), (1, &found.exclusive));

    // Known by their voices, in recordings of their own.
    let voice = |tone| {
        diarizer
            .voice(&recording(3.0, &[(0.2, 2.9, tone)]), NEVER)
            .unwrap()
            .unwrap()
    };
    let known = vec![("High".to_owned(), voice(1)), ("Low".to_owned(), voice(0))];
    let mut found = diarizer
        .diarize(&samples, &DiarizationSettings::default(), NEVER)
        .unwrap()
        .unwrap();
    KnownSpeakers::new(known, KnownSpeakers::THRESHOLD)
        .unwrap()
        .name(&mut found)
        .unwrap();
    let names: Vec<&str> = found.turns.iter().map(|turn| turn.speaker.as_str()).collect();
    assert_eq!(names, ["High", "Low", "High", "Low", "High"]);
}

#[test]
fn short_and_silent_recordings_have_the_speakers_they_have() {
    let diarizer = tones();
    let of = |samples: &[f32]| {
        diarizer
            .diarize(samples, &DiarizationSettings::default(), NEVER)
            .unwrap()
            .unwrap()
    };
    for silent in [0, 100, 16_000, 200_000] {
        assert_eq!(of(&vec![0.0; silent]), Diarized::default());
    }
    // Less than two seconds of each, and still two.
    let found = of(&recording(4.0, &[(0.2, 1.5, 0), (2.1, 4.0, 1)]));
    assert_parts(&found.turns, &[(0.2, 1.5, "SPEAKER_00"), (2.1, 4.0, "SPEAKER_01")]);
    assert!(found.turns.iter().all(|turn| turn.end <= 4.0));
    // Too little for an embedding.
    let found = of(&recording(4.0, &[(0.2, 0.4, 0)]));
    assert_eq!((found.speakers.len(), found.turns.len()), (1, 1));
    assert!(found.speakers[0].embedding.iter().all(|value| *value == 0.0));
    assert!(diarizer.voice(&recording(4.0, &[(0.2, 0.4, 0)]), NEVER).is_err());
    assert!(diarizer.voice(&[0.0; 16_000], NEVER).is_err());
}

#[test]
fn pyannotes_models_know_voices_of_less_than_two_seconds() {
    let parts = PldaParts {
        mean1: vec![0.0; BANDS],
        lda: (0..2 * BANDS).map(|at| if at % 3 == 0 { 1.0 } else { -0.5 }).collect(),
        mean2: vec![0.0; 2],
        mu: vec![0.0; 2],
        tr: vec![1.0, 0.0, 0.0, 1.0],
        psi: vec![1.0, 0.5],
    };
    let methods = [
        Method::Agglomerative {
            min_cluster_size: 12,
            assignment: Assignment::Nearest,
        },
        Method::Vbx {
            fa: 0.07,
            fb: 0.8,
            plda: Box::new(Plda::new(&parts, 2).unwrap()),
        },
    ];
    for method in methods {
        let steps = Steps {
            method,
            as_pyannote: true,
        };
        let diarizer = Diarizer::new(Box::new(Tones), Box::new(Tones), steps).unwrap();
        // In one chunk, and in three.
        for (seconds, start) in [(3.0, 0.2), (11.5, 9.0)] {
            let samples = recording(seconds, &[(start, start + 1.3, 1)]);
            // pyannote's steps make no embedding of it.
            let found = diarizer
                .diarize(&samples, &DiarizationSettings::default(), NEVER)
                .unwrap()
                .unwrap();
            assert_eq!(found.speakers.len(), 1);
            assert!(found.speakers[0].embedding.iter().all(|value| *value == 0.0));
            let voice = diarizer.voice(&samples, NEVER).unwrap().unwrap();
            assert!(voice.iter().any(|value| *value != 0.0));
            assert_eq!(voice, tones().voice(&samples, NEVER).unwrap().unwrap());
        }
        let short = diarizer.voice(&recording(4.0, &[(0.2, 0.4, 0)]), NEVER);
        assert!(short.unwrap_err().to_string().contains("give 2 s or more of one voice"));
    }
}

#[test]
fn it_stops_when_asked_and_refuses_settings_by_name() {
    let diarizer = tones();
    let samples = recording(60.0, &[(0.5, 50.0, 1)]);
    let asked = Cell::new(0);
    let stop = || {
        asked.set(asked.get() + 1);
        asked.get() > 3
    };
    assert_eq!(
        diarizer.diarize(&samples, &DiarizationSettings::default(), &stop),
        Ok(None)
    );
    assert_eq!(asked.get(), 4);
    let bad = [
        (
            "clustering_threshold",
            DiarizationSettings {
                clustering_threshold: f64::NAN,
                ..Default::default()
            },
        ),
        (
            "min_duration_on",
            DiarizationSettings {
                min_duration_on: -1.0,
                ..Default::default()
            },
        ),
        (
            "min_duration_off",
            DiarizationSettings {
                min_duration_off: f64::INFINITY,
                ..Default::default()
            },
        ),
    ];
    for (name, settings) in bad {
        let error = diarizer.diarize(&samples, &settings, NEVER).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    let none = settings(Clusters {
        number: Some(0),
        ..Clusters::default()
    });
    assert!(diarizer.diarize(&samples, &none, NEVER).is_err());
}

#[test]
fn the_bundled_networks_find_who_speaks_as_the_reference_does() {
    let diarizer = Diarizer::bundled().unwrap();
    let tensors = golden::Tensors::load("flow_reference.safetensors");
    let cases = golden::json("flow_reference.json");
    let mut compared = 0;
    for (recording, samples) in golden::recordings() {
        let mut of_recording = cases.as_array().unwrap().iter();
        let case = of_recording.find(|case| case["key"] == format!("{recording}.auto"));
        let Some(case) = case.filter(|_| tensors.has(&format!("{recording}.segmentations"))) else {
            golden::lacks(&recording, "it is not in the reference");
            continue;
        };
        compared += 1;
        let (activities, embeddings) = diarizer.networks(&samples, &|_| false).unwrap().unwrap();
        let (shape, expected) = tensors.bytes(&format!("{recording}.segmentations"));
        assert_eq!(activities.len(), expected.len(), "{recording}");
        let other = activities.iter().zip(&expected).filter(|(a, b)| a != b).count();
        // Frames where two sets are as likely: at most one in a thousand.
        assert!(other <= shape[0] * shape[1] / 1000, "{recording}: {other} frames");
        let (shape, expected) = tensors.floats(&format!("{recording}.embeddings"));
        assert_eq!(embeddings.len(), expected.len(), "{recording}");
        for (place, (found, expected)) in embeddings.chunks(shape[2]).zip(expected.chunks(shape[2])).enumerate() {
            assert_eq!(found[0].is_nan(), expected[0].is_nan(), "{recording} {place}");
            let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
            let cosine = product(found, expected) / (product(found, found) * product(expected, expected)).sqrt();
            // The weights are rounded to f16, and a frame more or less may be heard.
            assert!(cosine.is_nan() || cosine > 0.999, "{recording} {place}: {cosine}");
        }

        let found = diarizer
            .diarize(&samples, &DiarizationSettings::default(), NEVER)
            .unwrap()
            .unwrap();
        for (found, expected) in [
            (&found.turns, &case["turns"]),
            (&found.exclusive, &case["exclusive_turns"]),
        ] {
            let expected = expected.as_array().unwrap();
            assert_eq!(found.len(), expected.len(), "{recording}");
            for (found, expected) in found.iter().zip(expected) {
                // A frame.
                let close = |a: f64, b: &serde_json::Value| (a - b.as_f64().unwrap()).abs() < 0.016_875 + 1e-9;
                assert!(
                    close(found.start, &expected[0]) && close(found.end, &expected[1]),
                    "{found:?}, not {expected}"
                );
            }
        }
        let Some(reference) = golden::turns(&recording) else {
            golden::lacks(&recording, "the folder has no turns that a person marked");
            continue;
        };
        let (counted, _) = errors(&reference, &found.turns, &Scoring::default()).unwrap();
        let expected = case["der_no_collar_with_overlap"]["diarization error rate"]
            .as_f64()
            .unwrap();
        assert!(
            (counted.der() - expected).abs() < 0.003,
            "{recording}: {}, not {expected}",
            counted.der()
        );
    }
    assert!(compared > 0);
}

/// Ten hours of four voices that speak in turn, seven seconds each: the steps behind the networks, on what these would give.
#[test]
#[ignore = "minutes: ten hours of chunks"]
fn ten_hours_are_diarized_in_bounded_memory() {
    const VOICES: usize = 4;
    const DIMENSION: usize = 192;
    let chunks = 35_991;
    let mut state = 1u64;
    let mut value = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let directions: Vec<f32> = (0..VOICES * DIMENSION).map(|_| value()).collect();
    let voice_at = |seconds: f64| {
        let part = (seconds / 7.0) as usize;
        (part + part / VOICES) % VOICES
    };
    let mut activities = vec![0; chunks * 589 * 3];
    let mut embeddings = vec![f32::NAN; chunks * 3 * DIMENSION];
    for chunk in 0..chunks {
        let mut heard: Vec<usize> = Vec::new();
        for frame in 0..589 {
            let voice = voice_at(GEOMETRY.middle(GEOMETRY.start_frame(chunk) + frame));
            let speaker = heard.iter().position(|other| *other == voice).unwrap_or_else(|| {
                heard.push(voice);
                heard.len() - 1
            });
            activities[(chunk * 589 + frame) * 3 + speaker] = 1;
        }
        for (speaker, voice) in heard.into_iter().enumerate() {
            let embedding = &mut embeddings[(chunk * 3 + speaker) * DIMENSION..][..DIMENSION];
            for (to, direction) in embedding.iter_mut().zip(&directions[voice * DIMENSION..]) {
                *to = direction + 0.4 * value();
            }
        }
    }
    let memory = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        peak.and_then(|peak| peak.trim().trim_end_matches("kB").trim().parse::<u64>().ok())
    };
    let (before, start) = (memory(), std::time::Instant::now());
    let segmentations = Segmentations::new(&activities, 589, 3).unwrap();
    let embeddings = Embeddings::new(&embeddings, 3, DIMENSION).unwrap();
    let steps = Steps::default();
    let found = install(|| steps.apply(&segmentations, &embeddings, &DiarizationSettings::default()));
    let found = found.unwrap().named();
    println!(
        "{:?}; peak {:?} kB before, {:?} kB after",
        start.elapsed(),
        before,
        memory()
    );
    if let (Some(before), Some(after)) = (before, memory()) {
        assert!(after - before < 400_000, "{} kB", after - before);
    }
    assert_eq!(found.speakers.len(), VOICES);
    assert_eq!(found.turns, found.exclusive);
    // Whose name is whose voice.
    let voices: Vec<usize> = found
        .speakers
        .iter()
        .map(|speaker| {
            let first = found.turns.iter().find(|turn| turn.speaker == speaker.name).unwrap();
            voice_at(first.start + 0.1)
        })
        .collect();
    for turn in &found.turns {
        let number = found
            .speakers
            .iter()
            .position(|speaker| speaker.name == turn.speaker)
            .unwrap();
        assert_eq!(voices[number], voice_at(0.5 * (turn.start + turn.end)), "{turn:?}");
    }
    let spoken: f64 = found.turns.iter().map(Turn::duration).sum();
    assert!((spoken - 36_000.0).abs() < 10.0, "{spoken}");
}
