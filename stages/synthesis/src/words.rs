//! Normal forms by which sentences are compared, and the sentences of existing manifests.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use arrow::array::{Array, AsArray};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use flow_kind::Storage;
use flow_parquet::ForeignParquet;
use parquet::arrow::ProjectionMask;
use sha2::{Digest as _, Sha256};
use unicode_normalization::UnicodeNormalization;

use flow_audio::AudioError;
use flow_text::language_tag::split_tag;

/// Columns that may hold the text, the first that is there counts.
const TEXT_COLUMNS: [&str; 2] = ["text", "transcription_native"];
/// Longest line of a manifest of JSON lines.
const LONGEST_LINE: u64 = 16 << 20;

/// The words of a sentence in a form to compare: without language tag, punctuation and zero-width characters, in
/// normal form C, in lower case, with single spaces.
pub fn normal_words(text: &str) -> String {
    let kept: String = split_tag(text).1.chars().filter(|c| !is_silent(*c)).collect();
    let composed: String = kept.nfc().collect::<String>().to_lowercase();
    composed.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether a character is punctuation, or one that is not seen: no part of a word.
pub fn is_silent(c: char) -> bool {
    c.is_ascii_punctuation()
        || (c.is_control() && !c.is_whitespace())
        || matches!(c,
            '\u{ad}' | '\u{964}' | '\u{965}' | '\u{60c}' | '\u{61b}' | '\u{61f}' | '\u{6d4}' | '\u{feff}'
            | '\u{200b}'..='\u{2027}' | '\u{202a}'..='\u{202e}' | '\u{2030}'..='\u{205e}' | '\u{2060}'..='\u{206f}'
            | '\u{3002}')
}

/// Sentences that must not be spoken, in the form of [`normal_words`].
#[derive(Debug, Default)]
pub struct Excluded(BTreeSet<String>);

impl Excluded {
    pub fn holds(&self, normal: &str) -> bool {
        self.0.contains(normal)
    }

    /// Equal for equal sentences, wherever they were read.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for sentence in &self.0 {
            hash.update(sentence.as_bytes());
            hash.update(b"\n");
        }
        hex::encode(hash.finalize())
    }

    /// Adds the sentences of a manifest: parquet (`.parquet`), otherwise JSON lines, with a column `text` (or
    /// `transcription_native`).
    pub fn read(&mut self, storage: &Storage, path: &Path) -> Result<(), AudioError> {
        if path.extension().is_some_and(|extension| extension == "parquet") {
            self.read_parquet(storage, path)
        } else {
            self.read_lines(path)
        }
    }

    fn add(&mut self, text: &str) {
        let normal = normal_words(text);
        if !normal.is_empty() {
            self.0.insert(normal);
        }
    }

    fn read_parquet(&mut self, storage: &Storage, path: &Path) -> Result<(), AudioError> {
        let wrong = |error: &dyn std::fmt::Display| AudioError::Manifest {
            path: path.to_owned(),
            why: error.to_string(),
        };
        let file = ForeignParquet::open(storage, path).map_err(|source| unreadable(path, source))?;
        let metadata = file.metadata().map_err(|error| wrong(&error))?;
        let schema = metadata.schema();
        let found = TEXT_COLUMNS.iter().find_map(|name| schema.index_of(name).ok());
        let column = found.ok_or_else(|| wrong(&format!("no column `{}`", TEXT_COLUMNS.join("` or `"))))?;
        let mask = ProjectionMask::roots(metadata.parquet_schema(), [column]);
        let reader = file.rows(&metadata, mask, 8192, None).map_err(|error| wrong(&error))?;
        for batch in reader {
            let batch = batch.map_err(|error| wrong(&error))?;
            let texts = batch.column(0);
            let is_text = |data_type: &DataType| {
                matches!(
                    data_type,
                    DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View | DataType::Null
                )
            };
            let readable = match texts.data_type() {
                DataType::Dictionary(_, values) => is_text(values),
                other => is_text(other),
            };
            if !readable {
                return Err(wrong(&format!(
                    "the column of texts has the type {}",
                    texts.data_type()
                )));
            }
            let texts = cast(texts, &DataType::Utf8).map_err(|error| wrong(&error))?;
            for text in texts.as_string::<i32>().iter().flatten() {
                self.add(text);
            }
        }
        Ok(())
    }

    fn read_lines(&mut self, path: &Path) -> Result<(), AudioError> {
        let mut reader = BufReader::new(open(path)?);
        let mut line = Vec::new();
        for number in 1u64.. {
            let wrong = |why: String| AudioError::Manifest {
                path: path.to_owned(),
                why: format!("line {number}: {why}"),
            };
            line.clear();
            let read = (&mut reader).take(LONGEST_LINE).read_until(b'\n', &mut line);
            let read = read.map_err(|source| AudioError::read(path, source))?;
            if read == 0 {
                break;
            }
            if read as u64 == LONGEST_LINE {
                return Err(wrong("longer than 16 MiB".into()));
            }
            if line.trim_ascii().is_empty() {
                continue;
            }
            let row: serde_json::Value = serde_json::from_slice(&line).map_err(|error| wrong(error.to_string()))?;
            let found = TEXT_COLUMNS.iter().find_map(|name| row.get(name));
            match found {
                Some(serde_json::Value::String(text)) => self.add(text),
                Some(serde_json::Value::Null) => {}
                _ => return Err(wrong(format!("no text under `{}`", TEXT_COLUMNS.join("` or `")))),
            }
        }
        Ok(())
    }
}

fn open(path: &Path) -> Result<File, AudioError> {
    File::open(path).map_err(|source| unreadable(path, source))
}

fn unreadable(path: &Path, source: std::io::Error) -> AudioError {
    AudioError::read(path, source)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::parity_golden;

    #[test]
    fn the_same_words_have_one_form() {
        for (text, normal) in [
            ("<|en|> Twenty-one,  TEN;nine.", "twentyone tennine"),
            ("एक\u{200b}दो तीन\u{200d}।", "एकदो तीन"),
            ("\u{95c}ा", "\u{921}\u{93c}ा"),
            ("  “two” – three’s\u{a0}{four} ", "two threes four"),
            ("<|no end", "no end"),
            (" … ?", ""),
            ("\u{feff}گاڑی، چائے۔", "گاڑی چائے"),
        ] {
            assert_eq!(normal_words(text), normal, "{text:?}");
            assert_eq!(normal_words(normal), normal);
        }
    }

    #[test]
    fn manifests_are_read_as_parquet_and_as_lines() {
        let mut parquet = Excluded::default();
        parquet
            .read(
                &Storage::default(),
                &parity_golden("mini").join("train_manifest_v2.parquet"),
            )
            .unwrap();
        let mut lines = Excluded::default();
        lines
            .read(
                &Storage::default(),
                &parity_golden("mini").join("train_manifest_v2.jsonl"),
            )
            .unwrap();
        assert!(parquet.0.len() > 100);
        assert_eq!(parquet.digest(), lines.digest());
        assert!(parquet.0.iter().all(|sentence| parquet.holds(&normal_words(sentence))));
    }

    #[test]
    fn a_broken_manifest_is_named_with_its_line() {
        let temp = tempfile::tempdir().unwrap();
        let message = |name: &str, bytes: &[u8]| {
            let path = temp.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            Excluded::default()
                .read(&Storage::default(), &path)
                .unwrap_err()
                .to_string()
        };
        assert!(message("a.jsonl", b"{\"text\": \"x\"}\n\n{\"text\": 1}\n").contains("a.jsonl: line 3: no text"));
        assert!(message("b.jsonl", b"{\"text\": ").contains("line 1: "));
        assert!(message("c.jsonl", b"\xff\xfe\n").contains("line 1: "));
        assert!(message("d.parquet", b"PAR1PAR1").contains("d.parquet: "));
        let missing = Excluded::default()
            .read(&Storage::default(), &temp.path().join("e.parquet"))
            .unwrap_err();
        assert!(missing.to_string().contains("cannot read"), "{missing}");
    }
}
