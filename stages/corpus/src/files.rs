//! The files that a manifest consists of: lists and ranges in braces, and what kind of file each is.

use std::path::Path;

use flow_storage::Storage;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::tree;

/// More files than this are a mistake in a range.
const MOST_FILES: usize = 100_000;

/// What kind of manifest it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Detected: a folder, `.parquet`, `.json` and `.jsonl`, or `.csv` and `.tsv`.
    #[default]
    Auto,
    /// Parquet files with the columns that `manifest.write` writes.
    Parquet,
    /// NeMo's: one JSON object to a line.
    Nemo,
    /// Tables with a heading, separated by commas (`.csv`) or tabs.
    Table,
    /// A folder of recordings with their transcripts, or with a table of them.
    Folder,
}

/// Expands `a_{0..3}.json`, `a_{x,y}.json` and NeMo's `a__OP_0..3_CL_.json`. Numbers keep leading zeros. The name of a file that
/// is there names that file.
///
/// # Errors
/// Says what is wrong with the pattern.
pub fn expand(pattern: &str) -> Result<Vec<String>, String> {
    if Path::new(pattern).exists() {
        return Ok(vec![pattern.to_string()]);
    }
    expand_braces(pattern, pattern.replace("_OP_", "{").replace("_CL_", "}"))
}

/// Expands the braces of `text`, which messages call `pattern`.
///
/// # Errors
/// Says what is wrong with them.
pub fn expand_braces(pattern: &str, text: String) -> Result<Vec<String>, String> {
    let mut done = Vec::new();
    let mut waiting = vec![text];
    while let Some(text) = waiting.pop() {
        let Some(open) = text.find('{') else {
            done.push(text);
            continue;
        };
        let close = text[open..]
            .find('}')
            .map(|found| open + found)
            .ok_or_else(|| format!("{pattern:?}: a brace is not closed"))?;
        let (before, inner, after) = (&text[..open], &text[open + 1..close], &text[close + 1..]);
        if inner.contains('{') {
            return Err(format!("{pattern:?}: braces within braces are not supported"));
        }
        let choices = choices(inner).ok_or_else(|| {
            format!("{pattern:?}: {{{inner}}} is neither a range such as {{0..15}} nor a list such as {{a,b}}")
        })?;
        if choices.len().saturating_mul(waiting.len() + done.len() + 1) > MOST_FILES {
            return Err(format!("{pattern:?} matches more than {MOST_FILES} files"));
        }
        // The stack returns the first choice first.
        waiting.extend(choices.iter().rev().map(|choice| format!("{before}{choice}{after}")));
    }
    Ok(done)
}

fn choices(inner: &str) -> Option<Vec<String>> {
    if let Some((first, last)) = inner.split_once("..") {
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| text.parse::<u32>().ok()).flatten()
        };
        let (from, to) = (number(first)?, number(last)?);
        if from.abs_diff(to) as usize >= MOST_FILES {
            return Some(vec![String::new(); MOST_FILES + 1]);
        }
        let padded = [first, last].iter().any(|text| text.len() > 1 && text.starts_with('0'));
        let width = if padded { first.len().max(last.len()) } else { 0 };
        let name = |n: u32| format!("{n:0width$}");
        return Some(if from <= to {
            (from..=to).map(name).collect()
        } else {
            (to..=from).rev().map(name).collect()
        });
    }
    inner
        .contains(',')
        .then(|| inner.split(',').map(str::to_string).collect())
}

/// The format of a path under `auto`.
pub fn format_of(storage: &Storage, path: &Path) -> Option<Format> {
    if tree::is_folder(storage, path) {
        return Some(Format::Folder);
    }
    format_of_name(path)
}

/// The format of a file by its name alone.
pub fn format_of_name(path: &Path) -> Option<Format> {
    match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
        "parquet" => Some(Format::Parquet),
        "json" | "jsonl" | "ndjson" => Some(Format::Nemo),
        "csv" | "tsv" => Some(Format::Table),
        _ => None,
    }
}

/// A name for a file among others: its place in the list, so that names sort as the list does, and its stem.
pub fn label(place: usize, path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    format!("{place:05}-{stem}")
}

/// The number at the end of a file's stem: `audio_12.tar` is 12.
pub fn trailing_number(path: &Path) -> Option<u64> {
    let stem = path.file_stem()?.to_str()?;
    let digits = stem.len() - stem.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    stem[stem.len() - digits..].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_and_lists_become_files() {
        for (pattern, files) in [
            ("a.json", vec!["a.json"]),
            ("m__OP_0..2_CL_.json", vec!["m_0.json", "m_1.json", "m_2.json"]),
            ("m_{08..10}.json", vec!["m_08.json", "m_09.json", "m_10.json"]),
            ("{a,b}/{1..0}", vec!["a/1", "a/0", "b/1", "b/0"]),
        ] {
            assert_eq!(expand(pattern).unwrap(), files, "{pattern}");
        }
        for (pattern, expected) in [
            ("{0..3", "not closed"),
            ("{a}", "neither a range"),
            ("{-1..3}", "neither a range"),
            ("{0..999999999}", "more than"),
            ("{1..90000}{1..90000}", "more than"),
            ("{a,{b,c}}", "within braces"),
        ] {
            let error = expand(pattern).unwrap_err();
            assert!(error.contains(expected), "{pattern}: {error}");
        }
        let folder = tempfile::tempdir().unwrap();
        for name in ["{a}.jsonl", "{a,b}.jsonl", "m__OP_0..1_CL_.json", "{"] {
            let file = folder.path().join(name);
            std::fs::write(&file, "").unwrap();
            let file = file.to_str().unwrap();
            assert_eq!(expand(file).unwrap(), [file]);
        }
        assert_eq!(trailing_number(Path::new("x/audio_012.tar")), Some(12));
        assert_eq!(trailing_number(Path::new("x/audio.tar")), None);
    }

    proptest! {
        #[test]
        fn any_pattern_gives_files_or_an_error(pattern in "[{}.,a0-9_OPCL]{0,24}") {
            if let Ok(files) = expand(&pattern) {
                prop_assert!(!files.is_empty() && files.len() <= MOST_FILES);
            }
        }
    }
}
