use std::cell::Cell;
use std::path::PathBuf;

use flow_kernels::threads::install;
use flow_storage::Storage;
use serde_json::Value;

use super::*;
use crate::long_audio::LongAudio;
use crate::recognizer::tests::{InBlocks, golden_recognizer, recognizer, settings, two};
use crate::recognizer::{RecognitionSettings, VoiceActivity};
use crate::test_data;

const CHUNKS: ChunkSettings = ChunkSettings {
    left: 2.0,
    chunk: 1.0,
    right: 0.5,
};

fn by(long_audio: LongAudio) -> RecognitionSettings {
    RecognitionSettings {
        long_audio,
        ..settings(VoiceActivity::Neural)
    }
}

fn chunked(chunks: ChunkSettings) -> RecognitionSettings {
    by(LongAudio::Chunked(chunks))
}

/// One pass, with limited attention in recordings that are longer than this many seconds.
fn full(full_attention: f64) -> RecognitionSettings {
    by(LongAudio::Full(FullSettings {
        full_attention,
        attention_context: 16,
    }))
}

/// Samples in which voice activity was not looked for.
fn unheard(samples: &[f32]) -> SpeechWindows {
    SpeechWindows {
        samples: samples.len() as u64,
        ..SpeechWindows::default()
    }
}

fn whole(recognizer: &Recognizer, samples: &[f32], context: Option<usize>) -> Decoded {
    let found = recognizer.decode_whole(&samples, &unheard(samples), context, &|| false);
    found.unwrap().unwrap()
}

fn assert_found(found: &Hypothesis, ids: &[u32], frames: &[u32], durations: &[u32], case: &str) {
    assert_eq!(found.ids, ids, "{case}: ids");
    assert_eq!(found.frames, frames, "{case}: frames");
    assert_eq!(found.durations, durations, "{case}: durations");
}

#[test]
fn one_pass_in_blocks_finds_what_the_model_finds_at_once() {
    let recognizer = recognizer();
    let (samples, _) = two();
    for samples in [&samples[..], &samples[..100_003], &samples[..161], &samples[..159], &[]] {
        let expected = match samples.len() {
            0 => Hypothesis::default(),
            _ => recognizer.model.transcribe(&[samples]).unwrap().swap_remove(0),
        };
        let found = whole(&recognizer, samples, None);
        let Hypothesis {
            ids, frames, durations, ..
        } = &expected;
        assert_found(
            &found.hypothesis,
            ids,
            frames,
            durations,
            &format!("{} samples", samples.len()),
        );
        assert_eq!(found.scores.len(), ids.len());
        assert_eq!(found.frames, recognizer.model.encoded_frames(samples.len()));
        // A chunk that is longer than the recording is the same pass.
        let windows = [ChunkWindow {
            samples: 0..samples.len() as u64,
            left: 0,
            frames: None,
        }];
        if !samples.is_empty() {
            let chunk = recognizer
                .decode_chunks(&samples, (&windows, &unheard(samples)), &|| false)
                .unwrap()
                .unwrap();
            assert_found(&chunk.hypothesis, ids, frames, durations, "one chunk");
        }
    }
    assert!(!whole(&recognizer, &samples, None).hypothesis.ids.is_empty());
}

#[test]
fn blocks_and_threads_change_nothing() {
    let recognizer = recognizer();
    let (samples, _) = two();
    let pool = flow_kernels::threads::pool("test", 1).unwrap();
    for settings in [chunked(CHUNKS), full(0.0), full(1000.0)] {
        let heard = |recording: &dyn Samples| {
            let mut first = recognizer.first_pass(&settings);
            recording.pass(&mut |block| first.feed(block).map(|()| true)).unwrap();
            // As of one that is too long to be kept.
            first.kept = None;
            recognizer
                .transcribe_again(first, recording, &settings, &|| false)
                .unwrap()
                .unwrap()
        };
        let expected = recognizer.transcribe(&samples, &settings, &|| false).unwrap().unwrap();
        assert!(!expected.segments.is_empty(), "{settings:?}");
        assert!((expected.decoded_seconds - samples.len() as f64 / 16_000.0).abs() < 1e-9);
        assert_eq!(heard(&InBlocks(&samples)), expected, "{settings:?}");
        assert_eq!(pool.install(|| heard(&&samples[..])), expected, "{settings:?}");
        let words = expected.segments.iter().flat_map(|segment| &segment.words);
        let mut last = 0.0;
        for word in words {
            assert!(last <= word.start && word.start <= word.end, "{word:?}");
            assert!(word.end <= expected.decoded_seconds, "{word:?}");
            assert!((-1e-6..=1.0 + 1e-6).contains(&word.confidence.unwrap()), "{word:?}");
            assert!(!word.word.contains("<|"), "{word:?}");
            last = word.start;
        }
    }
}

#[test]
fn what_is_too_short_changed_or_given_up_is_told() {
    let recognizer = recognizer();
    let (samples, _) = two();
    for settings in [chunked(CHUNKS), full(0.0), full(1000.0)] {
        for short in [0, 1, 159, 160, 1_300] {
            let found = recognizer.transcribe(&samples[..short], &settings, &|| false);
            let found = found.unwrap().unwrap();
            assert_eq!(found.windows, usize::from(short > 0), "{short} {settings:?}");
        }
        let mut first = recognizer.first_pass(&settings);
        first.feed(&samples).unwrap();
        first.kept = None;
        let shorter = recognizer.transcribe_again(first, &&samples[..30_000], &settings, &|| false);
        assert!(shorter.unwrap_err().to_string().contains("had more"), "{settings:?}");
        // Now, and after a while.
        for after in [0, 2] {
            let asked = Cell::new(0);
            let cancelled = || asked.replace(asked.get() + 1) >= after;
            let found = recognizer.transcribe(&samples, &settings, &cancelled).unwrap();
            assert!(found.is_none(), "{after} {settings:?}");
        }
        for wrong in [f32::NAN, f32::INFINITY, 2e9] {
            let error = recognizer.transcribe(&[0.0, wrong], &settings, &|| false).unwrap_err();
            assert!(error.to_string().contains("sample 1"), "{error}");
        }
    }
    let error = recognizer.check_memory(u64::MAX / 4, None).unwrap_err().to_string();
    assert!(error.contains("`full_attention`") && error.contains("MB"), "{error}");
    let error = recognizer
        .check_memory(u64::MAX / 4, Some(usize::MAX))
        .unwrap_err()
        .to_string();
    assert!(error.contains("`attention_context`") && error.contains("MB"), "{error}");
    for context in [None, Some(128)] {
        recognizer.check_memory(16_000, context).unwrap();
    }
}

/// A file of NeMo's golden folder with long recordings, which are too large for the repository; None, and a line that says so,
/// where the golden data have none.
fn golden_file(name: &str) -> Option<PathBuf> {
    let path = test_data::transcription(name);
    let folder = path.parent().unwrap();
    assert!(folder.is_dir(), "{} is not a folder", folder.display());
    if !path.is_file() {
        println!("not compared: {} has no {name}", folder.display());
        return None;
    }
    Some(path)
}

fn golden(name: &str) -> Option<Value> {
    golden_file(name).map(|path| test_data::json(&path))
}

fn numbers(value: &Value) -> Vec<u32> {
    let numbers = value.as_array().unwrap().iter();
    numbers.map(|number| number.as_u64().unwrap() as u32).collect()
}

fn samples_of(name: &str) -> Vec<f32> {
    let path = test_data::transcription(name);
    flow_audio::samples::samples(&Storage::default(), &path, 1000.0)
        .unwrap()
        .unwrap()
}

/// Frame, token and duration.
type Token = (u32, u32, u32);

fn tokens_of(ids: &[u32], frames: &[u32], durations: &[u32]) -> Vec<Token> {
    assert_eq!((ids.len(), ids.len()), (frames.len(), durations.len()));
    let tokens = frames.iter().zip(ids).zip(durations);
    tokens.map(|((&frame, &id), &duration)| (frame, id, duration)).collect()
}

/// The samples with noise of half a unit of 24 bits. In near silence, where features are logarithms of nearly nothing, this moves
/// the outputs of the joint by a few hundredths, as the rounding of another Fourier transform does.
fn noisy(samples: &[f32], draw: u32) -> Vec<f32> {
    let unit = f32::exp2(-24.0);
    let noise = |(at, sample): (usize, &f32)| {
        let bits = (at as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        sample + if (bits >> (40 + draw)) & 1 == 0 { unit } else { -unit }
    };
    samples.iter().enumerate().map(noise).collect()
}

/// Frames of which the tokens differ; what is nearer than two seconds is one part.
fn differing(found: &[Token], expected: &[Token]) -> Vec<[u32; 2]> {
    let lacks = |all: &[Token], token: &Token| !all.contains(token);
    let only = found.iter().filter(|token| lacks(expected, token));
    let mut frames: Vec<u32> = only
        .chain(expected.iter().filter(|token| lacks(found, token)))
        .map(|token| token.0)
        .collect();
    frames.sort_unstable();
    let mut parts: Vec<[u32; 2]> = Vec::new();
    for frame in frames {
        match parts.last_mut() {
            Some([_, last]) if frame <= *last + 25 => *last = frame,
            _ => parts.push([frame, frame]),
        }
    }
    parts
}

/// Asserts that what is decoded is what NeMo found, and gives it. Another token may be there where two are as good as each other:
/// where noise below what features can tell makes all of the tokens NeMo's.
fn assert_nemos(samples: &[f32], expected: &Value, decode: &dyn Fn(&[f32]) -> Hypothesis, case: &str) -> Hypothesis {
    let [ids, frames, durations] = ["ids", "frames", "durations"].map(|key| numbers(&expected[key]));
    let expected = tokens_of(&ids, &frames, &durations);
    let tokens = |found: &Hypothesis| tokens_of(&found.ids, &found.frames, &found.durations);
    let found = decode(samples);
    let mut ties = differing(&tokens(&found), &expected);
    let tied: u32 = ties.iter().map(|[first, last]| last + 1 - first).sum();
    let end = frames.last().map_or(0, |frame| frame + 1);
    assert!(tied * 20 <= end, "{case}: {ties:?} of {end} frames differ from NeMo's");
    for draw in 0..16 {
        if ties.is_empty() {
            break;
        }
        let of_noise = differing(&tokens(&decode(&noisy(samples, draw))), &expected);
        ties.retain(|[first, last]| {
            let differs = of_noise.iter().any(|[from, to]| from <= last && first <= to);
            if !differs {
                println!("{case}: frames {first}..={last} are a tie, which noise {draw} decides as NeMo does");
            }
            differs
        });
    }
    assert!(
        ties.is_empty(),
        "{case}: frames {ties:?} differ from NeMo's, and are not a tie"
    );
    found
}

#[test]
fn parts_that_differ_are_told() {
    let expected = [(1, 7, 1), (2, 8, 0), (2, 9, 1), (40, 3, 1), (90, 3, 1)];
    assert_eq!(differing(&expected, &expected), [[0; 2]; 0]);
    assert_eq!(differing(&[], &expected[..3]), [[1, 2]]);
    let mut found = expected;
    (found[0].1, found[2].2, found[4].0) = (5, 2, 91);
    assert_eq!(differing(&found, &expected), [[1, 2], [90, 91]]);
}

#[test]
fn one_pass_is_nemos() {
    let Some(golden) = golden("greedy.json") else { return };
    let recognizer = golden_recognizer();
    let files = golden["files"].as_object().unwrap();
    assert!(!files.is_empty());
    for (name, file) in files {
        let expected = &file["one_pass"];
        let samples = samples_of(name);
        assert_eq!(
            recognizer.model.encoded_frames(samples.len()) as u64,
            expected["frames_total"].as_u64().unwrap(),
            "{name}"
        );
        let decode = |samples: &[f32]| whole(&recognizer, samples, None).hypothesis;
        assert_nemos(&samples, expected, &decode, name);
    }
}

/// The contexts of limited attention that are as wide on both sides, by their keys: `64,64`. What is in `full` is in
/// `greedy.json`, too.
fn contexts(golden: &Value) -> Vec<(&str, usize)> {
    let windows = golden["windows"].as_object().unwrap().keys();
    let both = windows.filter_map(|key| {
        let (left, right) = key.split_once(',')?;
        (left == right).then(|| (key.as_str(), left.parse().unwrap()))
    });
    both.collect()
}

#[test]
fn limited_attention_is_nemos() {
    let Some(golden) = golden("local.json") else { return };
    let recognizer = golden_recognizer();
    let contexts = contexts(&golden);
    assert!(!contexts.is_empty());
    for (key, context) in contexts {
        let files = golden["windows"][key].as_object().unwrap();
        assert!(!files.is_empty());
        for (name, expected) in files {
            let decode = |samples: &[f32]| whole(&recognizer, samples, Some(context)).hypothesis;
            assert_nemos(&samples_of(name), expected, &decode, &format!("{name} {context}"));
        }
    }
}

/// Encoder output at some frames of a recording; NeMo's own in 32 bits differ by 3.4e-6 from those in 64. Which recording it is,
/// the golden data do not say: it is the one whose output this is.
#[test]
fn encoded_frames_with_limited_attention_are_nemos() {
    let (Some(golden), Some(path)) = (golden("local.json"), golden_file("local_encoder.safetensors")) else {
        return;
    };
    let recognizer = golden_recognizer();
    let bytes = std::fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let rows = file.tensor("rows").unwrap();
    let rows = rows.data().chunks_exact(8);
    let rows: Vec<usize> = rows
        .map(|row| u64::from_le_bytes(row.try_into().unwrap()) as usize)
        .collect();
    let last = *rows.iter().max().unwrap();
    let worst = |samples: &[f32], name: &str, shape: &[usize], expected: &[f32]| {
        let context = match name {
            "full" => None,
            other => Some(other.strip_prefix("local_").unwrap().parse().unwrap()),
        };
        let mut encoded: Vec<Vec<f32>> = Vec::new();
        let frames = recognizer.model.feature_frames(samples.len());
        let features = features(&recognizer, samples);
        let mut stream = recognizer.model.encoder_stream(frames, context).unwrap();
        for part in features.chunks(recognizer.model.config.encoder.feat_in * 1_000) {
            let parts = install(|| stream.feed(part)).unwrap();
            encoded.extend(parts.iter().flat_map(|part| part.to_vec2::<f32>().unwrap()));
        }
        assert_eq!(shape, [rows.len(), encoded[0].len()]);
        let mut worst = 0f32;
        for (row, expected) in rows.iter().zip(expected.chunks_exact(shape[1])) {
            let pairs = encoded[*row].iter().zip(expected);
            worst = pairs.fold(worst, |worst, (a, b)| worst.max((a - b).abs()));
        }
        worst
    };
    let tensors = test_data::tensors(&path, |name| name != "rows");
    let (name, shape, expected) = tensors.iter().min_by_key(|tensor| &tensor.0).unwrap();
    let windows = golden["windows"].as_object().unwrap().values();
    let mut names: Vec<&String> = windows.flat_map(|files| files.as_object().unwrap().keys()).collect();
    names.sort_unstable();
    names.dedup();
    let recordings = names.into_iter().map(|name| (name, samples_of(name)));
    let (difference, recording, samples) = recordings
        .filter(|(_, samples)| recognizer.model.encoded_frames(samples.len()) > last)
        .map(|(recording, samples)| (worst(&samples, name, shape, expected), recording, samples))
        .min_by(|a, b| a.0.total_cmp(&b.0))
        .expect("a recording that is long enough");
    println!("{recording}, {name}: {difference:e}");
    assert!(difference < 3e-5, "nearest is {recording}, {name}: {difference}");
    for (name, shape, expected) in tensors.iter().filter(|tensor| tensor.0 != *name) {
        let difference = worst(&samples, name, shape, expected);
        println!("{recording}, {name}: {difference:e}");
        assert!(difference < 3e-5, "{recording}, {name}: {difference}");
    }
}

/// Normalised features, (frames, bands).
fn features(recognizer: &Recognizer, samples: &[f32]) -> Vec<f32> {
    let mut all = Vec::new();
    let mut take = |part: &mut [f32]| {
        all.extend_from_slice(part);
        Ok(())
    };
    let recording = samples;
    recognizer
        .features(&recording, samples.len() as u64, &|| false, &mut take)
        .unwrap();
    let mut moments = recognizer.model.feature_moments();
    moments.add(&all);
    moments.begin_again();
    moments.add(&all);
    moments.finish().unwrap().apply(&mut all);
    all
}

/// With NeMo's windows all is NeMo's; ours differ in the last, which begins on a frame.
#[test]
fn chunks_are_nemos() {
    let Some(golden) = golden("chunked.json") else { return };
    let recognizer = golden_recognizer();
    let frame_seconds = recognizer.model.frame_seconds();
    let frame_samples = (frame_seconds * 16_000.0).round() as u64;
    let contexts = golden["contexts"].as_object().unwrap();
    assert!(!contexts.is_empty());
    for (lengths, context) in contexts {
        let seconds: Vec<f64> = lengths.split('/').map(|part| part.parse().unwrap()).collect();
        let settings = ChunkSettings {
            left: seconds[0],
            chunk: seconds[1],
            right: seconds[2],
        };
        let of = |key: &str| context["encoder_frames"][key].as_u64().unwrap();
        let frames = settings.frames(frame_seconds).unwrap();
        assert_eq!(
            [frames.left, frames.chunk, frames.right],
            ["left", "chunk", "right"].map(of)
        );
        let files = context["files"].as_object().unwrap();
        assert!(!files.is_empty());
        for (name, file) in files {
            let case = format!("{name} {lengths}");
            let samples = samples_of(name);
            let column = |key: &str| file["windows"][key].as_array().unwrap().clone();
            let [starts, lengths_of, left, chunks] =
                ["window_start_sample", "window_samples", "left_frames", "chunk_frames"].map(column);
            let theirs: Vec<ChunkWindow> = (0..starts.len())
                .map(|index| {
                    let number = |column: &[Value]| column[index].as_u64().unwrap();
                    ChunkWindow {
                        samples: number(&starts)..number(&starts) + number(&lengths_of),
                        left: number(&left) as usize,
                        frames: Some(number(&chunks) as usize),
                    }
                })
                .collect();
            let decode = |samples: &[f32], windows: &[ChunkWindow]| {
                let found = recognizer.decode_chunks(&samples, (windows, &unheard(samples)), &|| false);
                found.unwrap().unwrap().hypothesis
            };
            let of_theirs = assert_nemos(&samples, file, &|samples| decode(samples, &theirs), &case);

            let ours = chunk_windows(samples.len() as u64, frame_samples, frames);
            let all_but_last = theirs.len() - 1;
            assert_eq!(
                (ours.len(), &ours[..all_but_last]),
                (theirs.len(), &theirs[..all_but_last]),
                "{case}"
            );
            assert_eq!(ours[all_but_last].left, theirs[all_but_last].left, "{case}");
            let found = decode(&samples, &ours);
            let last = theirs[..all_but_last]
                .iter()
                .filter_map(|window| window.frames)
                .sum::<usize>() as u32;
            let before = |found: &Hypothesis| -> Vec<Token> {
                let tokens = tokens_of(&found.ids, &found.frames, &found.durations);
                tokens.into_iter().filter(|token| token.0 < last).collect()
            };
            assert_eq!(before(&found), before(&of_theirs), "{case}");
            let end = recognizer.model.encoded_frames(samples.len()) as u32;
            assert!(found.frames.iter().all(|frame| *frame < end), "{case}");
        }
    }
}
