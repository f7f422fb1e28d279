//! Counts transcripts without a word, and wrong tags in transcripts.

use std::collections::BTreeMap;

use flow_kind::{Artifact, StageError};
use flow_model::tokenizer::Tokenizer;
use flow_text::language_tag::{UNDETERMINED, is_language, next_tag, same_language};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::transcripts::Transcripts;

/// Segments that are kept as examples, and tags that a warning names.
const NAMED: usize = 5;
/// Tags that are counted separately; further ones are counted together.
const MOST_TAGS: usize = 100;

/// Some transcripts, with the first of their segments.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FaultyTexts {
    pub texts: u64,
    pub examples: Vec<String>,
}

/// Likely mistakes in transcripts, which are trained on unchanged.
#[derive(Debug, Default, PartialEq)]
pub struct TextFaults {
    /// All transcripts.
    pub texts: u64,
    /// Those without a word: nothing, white space or tags alone.
    pub empty: FaultyTexts,
    /// Those with a tag `<|xx|>` that is wrong.
    pub wrong_tags: u64,
    /// By tag: those with one that the tokenizer has no piece for.
    pub unknown_tags: BTreeMap<String, FaultyTexts>,
    /// By tag and language: those whose first tag names another language than the column `lang`.
    pub other_languages: BTreeMap<(String, String), FaultyTexts>,
}

/// What is wrong with one transcript.
struct Faults {
    is_empty: bool,
    unknown: Vec<String>,
    other_language: Option<String>,
}

impl TextFaults {
    /// Counts the rows of a manifest. Columns `segment_id` and `text` are needed; `lang` is used where it is.
    ///
    /// # Errors
    /// Where a column is missing, or the rows cannot be read.
    pub fn count(rows: &Artifact, tokenizer: &Tokenizer) -> Result<Self, StageError> {
        let mut found = TextFaults::default();
        for batch in Transcripts::of_rows(rows) {
            let batch = batch?;
            let faults: Vec<Faults> = (0..batch.len())
                .into_par_iter()
                .map(|row| faults_of(batch.text(row).unwrap_or_default(), batch.language(row), tokenizer))
                .collect();
            for (row, faults) in faults.into_iter().enumerate() {
                let segment = batch.segment(row);
                found.texts += 1;
                if faults.is_empty {
                    found.empty.add(segment);
                }
                found.wrong_tags += u64::from(!faults.unknown.is_empty() || faults.other_language.is_some());
                for tag in faults.unknown {
                    add(&mut found.unknown_tags, tag, "...".into(), segment);
                }
                if let Some(tag) = faults.other_language {
                    let key = (tag, batch.language(row).to_owned());
                    add(&mut found.other_languages, key, ("...".into(), "...".into()), segment);
                }
            }
        }
        Ok(found)
    }

    /// The warning where more than this share of the transcripts is empty; otherwise none.
    pub fn empty_warning(&self, share: f64) -> Option<String> {
        let of_all = self.empty.texts as f64 / self.texts.max(1) as f64;
        if self.empty.texts == 0 || of_all <= share {
            return None;
        }
        Some(format!(
            "{} of {} transcripts ({:.1} %) have no word, so the model learns to say nothing: {}. Many of them mean that the \
             text was read from a wrong column; rows that are silent on purpose can be filtered before training, and \
             `warn_empty_texts` sets the share",
            self.empty.texts,
            self.texts,
            100.0 * of_all,
            self.empty.examples.join(", ")
        ))
    }

    /// The warning about tags; none where all are plausible.
    pub fn tag_warning(&self) -> Option<String> {
        let mut parts = Vec::new();
        let unknown = commonest(&self.unknown_tags);
        if !unknown.is_empty() {
            let named = unknown.iter().map(|(tag, some)| {
                let example = some.examples.first().map_or("", String::as_str);
                format!("<|{tag}|> in {} (as {example})", some.texts)
            });
            let named: Vec<String> = named.collect();
            parts.push(format!(
                "the tokenizer has no piece for {}, which is learned letter by letter",
                named.join(", ")
            ));
        }
        let others = commonest(&self.other_languages);
        if !others.is_empty() {
            let named = others.iter().map(|((tag, language), some)| {
                let example = some.examples.first().map_or("", String::as_str);
                format!("<|{tag}|> where `lang` is {language} in {} (as {example})", some.texts)
            });
            let named: Vec<String> = named.collect();
            parts.push(format!("tags name another language than the row: {}", named.join(", ")));
        }
        if parts.is_empty() {
            return None;
        }
        Some(format!(
            "{} of {} transcripts have wrong tags (wrong_tags): {}",
            self.wrong_tags,
            self.texts,
            parts.join("; ")
        ))
    }

    /// Lines for `metrics.jsonl`; none where nothing is wrong.
    pub fn figures(&self) -> Vec<Value> {
        let mut figures = Vec::new();
        if self.empty.texts > 0 {
            figures.push(json!({
                "kind": "empty_texts",
                "texts": self.texts,
                "affected": self.empty.texts,
                "examples": self.empty.examples,
            }));
        }
        if self.wrong_tags > 0 {
            let unknown: BTreeMap<&String, u64> =
                self.unknown_tags.iter().map(|(tag, some)| (tag, some.texts)).collect();
            let others = self.other_languages.iter();
            let others: Vec<Value> = others
                .map(|((tag, language), some)| json!({ "tag": tag, "lang": language, "texts": some.texts }))
                .collect();
            figures.push(json!({
                "kind": "wrong_tags",
                "texts": self.texts,
                "affected": self.wrong_tags,
                "unknown": unknown,
                "other_languages": others,
            }));
        }
        figures
    }
}

impl FaultyTexts {
    fn add(&mut self, segment: &str) {
        self.texts += 1;
        if self.examples.len() < NAMED {
            self.examples.push(segment.to_owned());
        }
    }
}

fn add<K: Ord>(counts: &mut BTreeMap<K, FaultyTexts>, key: K, others: K, segment: &str) {
    let key = if counts.len() < MOST_TAGS || counts.contains_key(&key) {
        key
    } else {
        others
    };
    counts.entry(key).or_default().add(segment);
}

/// The first few by number.
fn commonest<K: Ord>(counts: &BTreeMap<K, FaultyTexts>) -> Vec<(&K, &FaultyTexts)> {
    let mut all: Vec<_> = counts.iter().collect();
    all.sort_by_key(|(_, some)| std::cmp::Reverse(some.texts));
    all.truncate(NAMED);
    all
}

fn faults_of(text: &str, language: &str, tokenizer: &Tokenizer) -> Faults {
    let mut faults = Faults {
        is_empty: true,
        unknown: Vec::new(),
        other_language: None,
    };
    let (mut rest, mut is_first) = (text, true);
    while let Some((before, tag, after)) = next_tag(rest) {
        faults.is_empty &= before.trim().is_empty();
        if tokenizer.id(&format!("<|{tag}|>")).is_none() && !faults.unknown.iter().any(|known| known == tag) {
            faults.unknown.push(tag.to_owned());
        }
        if is_first && before.trim().is_empty() && names_another(tag, language) {
            faults.other_language = Some(tag.to_owned());
        }
        is_first = false;
        rest = after;
    }
    faults.is_empty &= rest.trim().is_empty();
    faults
}

/// Whether a tag is that of a language, and of another than this one.
fn names_another(tag: &str, language: &str) -> bool {
    let is_known = !language.is_empty() && !same_language(language, UNDETERMINED);
    is_language(tag) && is_known && !same_language(tag, language)
}
