//! Letters of transcripts that the tokenizer does not know.

use std::collections::{BTreeMap, BTreeSet};

use flow_kind::{Artifact, StageError};
use flow_model::tokenizer::Tokenizer;
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::transcripts::Transcripts;

/// Letters that a warning names for each language.
const NAMED: usize = 5;
/// Rows of the table in the report.
const TABLE_ROWS: usize = 50;

/// The letters of transcripts that the tokenizer has no piece for, by language. In place of each, a model learns the
/// unknown piece.
#[derive(Debug, Default, PartialEq)]
pub struct UnknownLetters {
    /// By the column `lang`; rows without it are counted under the empty text.
    pub languages: BTreeMap<String, LanguageLetters>,
}

/// The unknown letters of one language.
#[derive(Debug, Default, PartialEq)]
pub struct LanguageLetters {
    /// All its transcripts.
    pub texts: u64,
    /// Those that have an unknown letter.
    pub affected: u64,
    pub letters: BTreeMap<char, LetterCount>,
}

/// How often a letter occurs in the transcripts of a language.
#[derive(Debug, Default, PartialEq)]
pub struct LetterCount {
    pub count: u64,
    /// Transcripts that have it.
    pub texts: u64,
    /// The first segment that has it, in the order of the rows.
    pub example: String,
}

impl LanguageLetters {
    /// Transcripts with an unknown letter, as a share of all.
    pub fn share(&self) -> f64 {
        self.affected as f64 / self.texts.max(1) as f64
    }

    /// The letters, the commonest first.
    fn commonest(&self) -> Vec<(char, &LetterCount)> {
        let mut letters: Vec<_> = self.letters.iter().map(|(letter, count)| (*letter, count)).collect();
        letters.sort_by_key(|(letter, count)| (std::cmp::Reverse(count.texts), *letter));
        letters
    }
}

impl UnknownLetters {
    /// Counts the rows of a manifest. Columns `segment_id` and `text` are needed; `lang` is used where it is.
    ///
    /// # Errors
    /// Where a column is missing, or the rows cannot be read.
    pub fn count(rows: &Artifact, tokenizer: &Tokenizer) -> Result<Self, StageError> {
        let mut found = UnknownLetters::default();
        for batch in Transcripts::of_rows(rows) {
            let batch = batch?;
            let unknown: Vec<Vec<char>> = (0..batch.len())
                .into_par_iter()
                .map(|row| {
                    batch
                        .text(row)
                        .map_or_else(Vec::new, |text| tokenizer.unknown_letters(text))
                })
                .collect();
            for (row, letters) in unknown.into_iter().enumerate() {
                let language = batch.language(row);
                if !found.languages.contains_key(language) {
                    found.languages.insert(language.to_owned(), LanguageLetters::default());
                }
                if let Some(language) = found.languages.get_mut(language) {
                    language.add(&letters, batch.segment(row));
                }
            }
        }
        Ok(found)
    }

    /// All transcripts with an unknown letter.
    pub fn affected(&self) -> u64 {
        self.languages.values().map(|language| language.affected).sum()
    }

    /// The warning about languages of which more than this share of the transcripts have an unknown letter; none if
    /// there is no such language.
    pub fn warning(&self, share: f64) -> Option<String> {
        let above = |language: &&LanguageLetters| language.affected > 0 && language.share() > share;
        let each: Vec<String> = self
            .languages
            .iter()
            .filter(|(_, language)| above(language))
            .map(|(name, language)| {
                let letters = language.commonest();
                let named = letters.iter().take(NAMED);
                let named: Vec<String> = named
                    .map(|(letter, count)| format!("{} in {}", shown(*letter), count.texts))
                    .collect();
                let more = if letters.len() > NAMED { ", ..." } else { "" };
                let name = if name.is_empty() { "no language" } else { name };
                let (affected, texts) = (language.affected, language.texts);
                format!("{name} {affected} of {texts} ({}{more})", named.join(", "))
            })
            .collect();
        if each.is_empty() {
            return None;
        }
        Some(format!(
            "transcripts have letters that the tokenizer does not know; in their place the model learns its unknown piece: {}. \
             Take a tokenizer that has them (tokenizer.train, with `extend` to keep the pieces of `init`), or write the texts without them",
            each.join("; ")
        ))
    }

    /// A table for the report: a row for each language and letter, the commonest first. None if all letters are known.
    pub fn table(&self) -> Option<Value> {
        let mut rows: Vec<(&str, char, &LanguageLetters, &LetterCount)> = Vec::new();
        for (name, language) in &self.languages {
            let letters = language.letters.iter();
            rows.extend(letters.map(|(letter, count)| (name.as_str(), *letter, language, count)));
        }
        if rows.is_empty() {
            return None;
        }
        rows.sort_by_key(|(name, letter, _, count)| (std::cmp::Reverse(count.texts), *name, *letter));
        let left = rows.len().saturating_sub(TABLE_ROWS);
        let mut lines: Vec<Value> = rows
            .into_iter()
            .take(TABLE_ROWS)
            .map(|(name, letter, language, count)| {
                let share = 100.0 * count.texts as f64 / language.texts.max(1) as f64;
                json!([
                    name,
                    shown(letter),
                    count.count,
                    count.texts,
                    format!("{share:.2} %"),
                    count.example
                ])
            })
            .collect();
        if left > 0 {
            lines.push(json!(["", format!("and {left} more"), "", "", "", ""]));
        }
        Some(json!({ "table": {
            "title": "Letters that the tokenizer does not know",
            "columns": ["language", "letter", "times", "transcripts", "of the language", "example"],
            "rows": lines,
        } }))
    }

    /// A line for `metrics.jsonl`.
    pub fn figures(&self) -> Value {
        let affected = self.languages.iter().filter(|(_, language)| language.affected > 0);
        let languages: BTreeMap<&str, Value> = affected
            .map(|(name, language)| {
                let letters: BTreeMap<String, u64> = (language.letters.iter())
                    .map(|(letter, count)| (letter.to_string(), count.count))
                    .collect();
                let value = json!({ "texts": language.texts, "affected": language.affected, "letters": letters });
                (name.as_str(), value)
            })
            .collect();
        let texts: u64 = self.languages.values().map(|language| language.texts).sum();
        json!({ "kind": "unknown_letters", "texts": texts, "affected": self.affected(), "languages": languages })
    }
}

impl LanguageLetters {
    fn add(&mut self, letters: &[char], segment: &str) {
        self.texts += 1;
        self.affected += u64::from(!letters.is_empty());
        for letter in letters {
            self.letters.entry(*letter).or_default().count += 1;
        }
        for letter in letters.iter().collect::<BTreeSet<_>>() {
            let count = self.letters.entry(*letter).or_default();
            if count.texts == 0 {
                count.example = segment.to_owned();
            }
            count.texts += 1;
        }
    }
}

/// A letter with its code point, since many look alike or are invisible.
fn shown(letter: char) -> String {
    if letter.is_control() || letter.is_whitespace() {
        format!("U+{:04X}", u32::from(letter))
    } else {
        format!("{letter} (U+{:04X})", u32::from(letter))
    }
}
