//! Times of words against speech whose times are known (`tests/data/golden/times`).

use flow_evaluation::alignment::aligned;
use flow_storage::Storage;
use serde_json::Value;

use super::tests::{recognizer, settings};
use super::*;
use crate::alignment::AlignmentSettings;
use crate::test_data;
use crate::word_key::word_key;

/// The samples of a recording, its words, and where each begins, in seconds, if that is known.
fn known(language: &str) -> (Vec<f32>, Vec<(String, Option<f64>)>) {
    let folder = test_data::root().join("tests/data/golden/times");
    let samples = flow_audio::samples::samples(&Storage::default(), &folder.join(format!("{language}.flac")), 100.0);
    let words = test_data::json(&folder.join(format!("{language}.json")));
    let word = |word: &Value| (word[0].as_str().unwrap().to_owned(), word[1].as_f64());
    (
        samples.unwrap().unwrap(),
        words.as_array().unwrap().iter().map(word).collect(),
    )
}

/// The number of differences, the median and the 95th percentile of their sizes, and their signed median.
fn spread(differences: impl Iterator<Item = f64>) -> (usize, f64, f64, f64) {
    let mut differences: Vec<f64> = differences.collect();
    differences.sort_by(f64::total_cmp);
    let signed = differences[differences.len() / 2];
    let mut sizes: Vec<f64> = differences.iter().map(|difference| difference.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    (
        sizes.len(),
        sizes[sizes.len() / 2],
        sizes[sizes.len() * 95 / 100],
        signed,
    )
}

/// Beginnings of the words that were recognised, and of all words where the text is given. Bounds are what was measured, with 10 ms
/// (an eighth of a frame) for another machine's rounding.
#[test]
fn words_begin_near_where_they_were_said() {
    let recognizer = recognizer();
    let mut measured = Vec::new();
    for (language, heard, delayed, placed) in [
        ("en", (0.102, 0.184), (0.039, 0.104), (0.048, 0.157)),
        ("hi", (0.121, 0.185), (0.045, 0.105), (0.067, 0.161)),
    ] {
        let (samples, words) = known(language);
        let keys: Vec<String> = words.iter().map(|(word, _)| word_key(word)).collect();
        for (delay, bounds) in [(0.0, heard), (0.08, delayed)] {
            let settings = RecognitionSettings {
                delay,
                ..settings(VoiceActivity::Neural)
            };
            let found = recognizer.transcribe(&samples, &settings, &|| false);
            let found = found.unwrap().unwrap().segments.into_iter();
            let found: Vec<Word> = found.flat_map(|segment| segment.words).collect();
            let found_keys: Vec<String> = found.iter().map(|word| word_key(&word.word)).collect();
            let pairs = aligned(&keys, &found_keys).into_iter();
            let same = pairs.filter(|(known, heard)| keys[*known] == found_keys[*heard]);
            let spread = spread(same.filter_map(|(known, heard)| Some(found[heard].start - words[known].1?)));
            measured.push((format!("{language}, delay {delay}"), spread, bounds));
        }
        let text: Vec<&str> = words.iter().map(|(word, _)| word.as_str()).collect();
        let found = recognizer.align(
            &samples,
            &[text.join(" ")],
            &settings(VoiceActivity::Neural),
            &AlignmentSettings::default(),
            &|| false,
        );
        let found = found.unwrap().unwrap();
        let starts = found.words.iter().zip(&words).filter(|(word, _)| word.said);
        let spread = spread(starts.filter_map(|(word, (_, known))| Some(word.start - (*known)?)));
        measured.push((format!("{language}, aligned"), spread, placed));
    }
    for (name, (count, median, most, _), bounds) in &measured {
        let is_good = *count >= 24 && *median <= bounds.0 && *most <= bounds.1;
        assert!(is_good, "{name} of {measured:#?}");
    }
}

/// Twenty seconds of speech have no text, and the last lines of the text no speech: as many words each, so that the fewest edits
/// would put every line beside speech of another.
#[test]
fn lines_between_missing_passages_are_where_they_were_said() {
    let recognizer = recognizer();
    let ((english, others), (hindi, words)) = (known("en"), known("hi"));
    let after = english.len() as f64 / 16_000.0;
    let samples = [english, hindi].concat();
    let line =
        |words: &[(String, Option<f64>)]| words.iter().map(|(word, _)| word.clone()).collect::<Vec<_>>().join(" ");
    let never_said: Vec<_> = others.into_iter().rev().collect();
    let lines: Vec<String> = words.chunks(6).chain(never_said.chunks(6)).map(line).collect();
    let settings = settings(VoiceActivity::Neural);
    let found = recognizer.align(&samples, &lines, &settings, &AlignmentSettings::default(), &|| false);
    let found = found.unwrap().unwrap();
    let (hindi, rest) = found.words.split_at(words.len());
    let said: Vec<f64> = (hindi.iter().zip(&words).filter(|(word, _)| word.said))
        .filter_map(|(word, (_, known))| Some(word.start - (*known)? - after))
        .collect();
    assert!(
        said.len() >= 34 && said.iter().all(|difference| difference.abs() < 0.5),
        "{said:?}"
    );
    assert!(rest.iter().filter(|word| word.said).count() <= 6, "{rest:?}");
    let untold: f64 = found.without_text.iter().map(|part| part.end - part.start).sum();
    assert!(untold > 6.0, "{:?}", found.without_text);
}
