//! Languages that are asked for: nothing is written in another script, and what that does to errors.

use flow_evaluation::wer::{EditCounts, character_edits, word_edits};
use flow_storage::Storage;
use flow_text::language_tag::same_language;

use super::tests::recognizer;
use super::*;
use crate::language_scripts::{scripts_of_language, scripts_of_text};
use crate::test_data;

fn asked(recognizer: &Recognizer, signals: &[&[f32]], languages: &[&str]) -> Vec<Heard> {
    let request = DecodingRequest {
        languages: languages.iter().map(|&code| code.to_owned()).collect(),
        ..DecodingRequest::default()
    };
    let decoding = recognizer.decoding_for(&request).unwrap();
    assert_eq!(decoding.notes, [""; 0]);
    recognizer
        .decode_again_where((signals, &[]), &|_| true, &decoding.settings)
        .unwrap()
}

fn text(heard: &Heard) -> String {
    heard
        .words
        .iter()
        .map(|word| word.word.trim())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Whether a word has letters that a language is not written with.
fn is_foreign(word: &str, language: &str) -> bool {
    let scripts = scripts_of_language(language).unwrap();
    scripts_of_text(word).iter().any(|script| !scripts.contains(script))
}

#[test]
fn nothing_is_written_in_another_script_than_that_of_the_language() {
    let recognizer = recognizer();
    let clips = test_data::corpus_samples(&Storage::default(), 16);
    let clips: Vec<&[f32]> = clips
        .iter()
        .map(Vec::as_slice)
        .filter(|clip| clip.len() < 160_000)
        .collect();
    assert!(clips.len() > 12, "{}", clips.len());
    let (mut words, mut foreign) = (0, 0);
    let plain = recognizer.decode(&clips).unwrap();
    for language in recognizer.languages() {
        for heard in asked(&recognizer, &clips, &[&language]) {
            let text = text(&heard);
            assert!(!is_foreign(&text, &language), "{language}: {text}");
            assert!(
                heard.languages.iter().all(|tag| *tag == language),
                "{language}: {:?}",
                heard.languages
            );
            words += heard.words.len();
        }
        foreign += plain.iter().filter(|heard| is_foreign(&text(heard), &language)).count();
    }
    // Otherwise it shows nothing.
    assert!(
        words > 200 && foreign > 100,
        "{words} words, {foreign} clips in another script"
    );
}

#[test]
fn a_language_of_no_effect_changes_no_bit() {
    let recognizer = recognizer();
    let clip = test_data::corpus_samples(&Storage::default(), 40).remove(0);
    let all: Vec<String> = recognizer.languages();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let plain = recognizer.decode(&[&clip]).unwrap();
    assert_eq!(asked(&recognizer, &[&clip], &all), plain);
    assert_eq!(asked(&recognizer, &[&clip], &[]), plain);
}

/// A line of a manifest.
struct Row {
    samples: Vec<f32>,
    text: String,
    lang: String,
}

fn rows(manifest: &Path) -> Vec<Row> {
    let lines = std::fs::read_to_string(manifest).unwrap();
    let row = |line: &str| {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let bytes = std::fs::read(row["audio_filepath"].as_str().unwrap()).unwrap();
        Some(Row {
            // Some of the bundled corpus are broken on purpose.
            samples: flow_audio::decode::decode(&bytes, 100.0).ok()?,
            text: row["text"].as_str().unwrap().to_owned(),
            lang: row["lang"].as_str().unwrap().to_owned(),
        })
    };
    lines.lines().filter_map(row).collect()
}

/// What rows asked for a language come to: errors, and words in another script, of all, and tags of other languages.
#[derive(Default)]
struct Outcome {
    words: EditCounts,
    characters: EditCounts,
    heard: usize,
    foreign: usize,
    tags: usize,
    other_tags: usize,
}

impl Outcome {
    fn add(&mut self, row: &Row, heard: &Heard, language: &str) {
        let text = text(heard);
        self.words.add(&word_edits(&row.text, &text));
        self.characters.add(&character_edits(&row.text, &text));
        self.heard += heard.words.len();
        self.foreign += heard
            .words
            .iter()
            .filter(|word| is_foreign(&word.word, language))
            .count();
        self.tags += heard.languages.len();
        self.other_tags += heard
            .languages
            .iter()
            .filter(|tag| !same_language(tag, language))
            .count();
    }

    fn line(&self) -> String {
        let share = |part: usize, whole: usize| 100.0 * part as f64 / whole.max(1) as f64;
        format!(
            "{:.1} ({:.1}) | {:.1} | {:.1}",
            100.0 * self.words.rate(),
            100.0 * self.characters.rate(),
            share(self.foreign, self.heard),
            share(self.other_tags, self.tags),
        )
    }
}

/// Prints error rates before and after, of the rows of `$FLOW_TEST_LANGUAGES/mini.jsonl` (`audio_filepath`, `text`, `lang`), with the
/// counts of the texts of `texts.jsonl` (`text`, `lang`).
#[test]
#[ignore = "a measurement: needs FLOW_TEST_LANGUAGES"]
fn languages_are_measured() {
    let folder = std::env::var_os("FLOW_TEST_LANGUAGES").expect("FLOW_TEST_LANGUAGES names a folder");
    let folder = Path::new(&folder);
    let mut recognizer = recognizer();
    let mut counts = LanguageCounts::new(&recognizer.tokenizer);
    for line in std::fs::read_to_string(folder.join("texts.jsonl")).unwrap().lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let tokens = recognizer.tokenizer.encode(row["text"].as_str().unwrap());
        counts.add(row["lang"].as_str().unwrap(), &tokens);
    }
    let rows = rows(&folder.join("mini.jsonl"));
    let languages = recognizer.languages();
    println!("| asked for | WER (CER) | words in another script | other tags |");
    let mut of_each: Vec<(String, Vec<String>)> = languages.iter().map(|code| (code.clone(), Vec::new())).collect();
    for weight in [None, Some(0.0), Some(0.5), Some(1.0), Some(2.0)] {
        recognizer.language_counts = weight
            .filter(|weight| *weight > 0.0)
            .map(|weight| (counts.clone(), weight));
        recognizer.requested = Mutex::default();
        let mut all = Outcome::default();
        for (language, lines) in &mut of_each {
            let of_language: Vec<&Row> = rows.iter().filter(|row| row.lang == *language).collect();
            let mut outcome = Outcome::default();
            for batch in of_language.chunks(16) {
                let signals: Vec<&[f32]> = batch.iter().map(|row| &row.samples[..]).collect();
                let languages: &[&str] = if weight.is_some() { &[language] } else { &[] };
                for (row, heard) in batch.iter().zip(asked(&recognizer, &signals, languages)) {
                    outcome.add(row, &heard, language);
                    all.add(row, &heard, language);
                }
            }
            lines.push(format!("{:.1}", 100.0 * outcome.words.rate()));
        }
        println!("| {weight:?} | {} |", all.line());
    }
    for (language, lines) in of_each {
        println!("| {language} | {} |", lines.join(" | "));
    }
}
