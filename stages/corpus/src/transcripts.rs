//! Transcripts in files of their own, and lists of them as LibriSpeech has them.

use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::path::Path;

use flow_kind::open_input_file;
use flow_storage::{Storage, is_url};

use crate::ManifestError;
use crate::decoded_text::DecodedText;
use crate::error::at;
use crate::manifest_row::{Refusal, refuse};
use crate::tree;

/// Suffix of the name of a list.
pub const LIST: &str = ".trans.txt";

/// Longest transcript, and largest list, in bytes.
const LONGEST_TRANSCRIPT: u64 = 1 << 20;
const LARGEST_LIST: u64 = 1 << 30;

/// The words of a file, with one space between them.
///
/// # Errors
/// Where it is not there, too long, or not UTF-8. See [`tree::answered`].
pub fn transcript(storage: &Storage, path: &Path) -> Result<String, Refusal> {
    let missing = |error: std::io::Error| {
        let refusal = refuse("missing_text", at(path, &error));
        if error.kind() != std::io::ErrorKind::PermissionDenied {
            tree::or_note::<()>(path, Err(error));
        }
        refusal
    };
    if !is_url(path) && !fs::metadata(path).map_err(missing)?.is_file() {
        return Err(refuse("missing_text", format!("{} is not a file", path.display())));
    }
    let mut bytes = Vec::new();
    let file = open_input_file(storage, path).map_err(missing)?;
    file.take(LONGEST_TRANSCRIPT + 1)
        .read_to_end(&mut bytes)
        .map_err(missing)?;
    if bytes.len() as u64 > LONGEST_TRANSCRIPT {
        return Err(refuse(
            "line_too_long",
            format!("{} has more than 1 MiB", path.display()),
        ));
    }
    let text = String::from_utf8(bytes).map_err(|error| refuse("not_utf8", error.to_string()))?;
    let text = text.trim_start_matches('\u{feff}');
    if has_times(text) {
        let why = format!(
            "{} has labels with times, as Audacity and TIMIT have them; a table with `start`, `end` and `text` is read",
            path.display()
        );
        return Err(refuse("unread_time", why));
    }
    Ok(spaced(text))
}

/// Whether all lines of a transcript are labels of Audacity: beginning, end and text with tabs between them. (A second line may
/// tell frequencies, and begins with a backslash.) Or it is one line of TIMIT's: 0, samples of the recording, and the text.
fn has_times(text: &str) -> bool {
    let mut lines = text
        .lines()
        .filter(|line| !line.trim().is_empty() && !line.starts_with('\\'))
        .peekable();
    let is_time = |field: Option<&str>| {
        let field = field.filter(|field| field.contains('.'));
        field.is_some_and(|field| field.parse::<f64>().is_ok_and(f64::is_finite))
    };
    let is_label = |line: &str| {
        let mut fields = line.split('\t');
        is_time(fields.next()) && is_time(fields.next())
    };
    let is_of_timit = |line: &str| {
        let samples = line.strip_prefix("0 ").and_then(|rest| rest.split_once(' '));
        samples.is_some_and(|(samples, _)| samples.len() >= 4 && samples.bytes().all(|byte| byte.is_ascii_digit()))
    };
    match lines.next() {
        Some(only) if lines.peek().is_none() => is_label(only) || is_of_timit(only),
        Some(first) => is_label(first) && lines.all(is_label),
        None => false,
    }
}

fn spaced(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The text of a list. Bytes that are not UTF-8 are replaced, and the line is rejected.
///
/// # Errors
/// Where it cannot be read or is too large.
pub fn lines_of(storage: &Storage, path: &Path) -> Result<DecodedText, ManifestError> {
    let mut bytes = Vec::new();
    let read = open_input_file(storage, path).and_then(|file| file.take(LARGEST_LIST + 1).read_to_end(&mut bytes));
    read.map_err(|e| ManifestError::io(path, e))?;
    if bytes.len() as u64 > LARGEST_LIST {
        return Err(ManifestError::manifest(
            path,
            "it has more than 1 GiB; a list of transcripts is one of a folder",
        ));
    }
    Ok(DecodedText::of(bytes))
}

/// The utterance and the text of a line; none where it is blank.
pub fn split_line(line: &str) -> Option<(&str, &str)> {
    let line = line.trim();
    let (utterance, text) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    (!utterance.is_empty()).then_some((utterance, text))
}

/// The transcripts of some utterances of a list: of those that it has, the first line of each.
///
/// # Errors
/// Where the list cannot be read.
pub fn transcripts_of<'u>(
    storage: &Storage,
    path: &Path,
    utterances: impl Iterator<Item = &'u str>,
) -> Result<HashMap<&'u str, Result<String, Refusal>>, ManifestError> {
    let mut found: HashMap<&str, Option<Result<String, Refusal>>> = utterances.map(|name| (name, None)).collect();
    for (number, (line, is_replaced)) in (1..).zip(lines_of(storage, path)?.lines()) {
        let place = || format!("line {number} of {}", path.display());
        if let Some((utterance, text)) = split_line(line)
            && let Some(text_of_it) = found.get_mut(utterance)
            && text_of_it.is_none()
        {
            *text_of_it = Some(if is_replaced {
                Err(refuse("not_utf8", place()))
            } else if line.len() as u64 > LONGEST_TRANSCRIPT {
                Err(refuse("line_too_long", format!("{} has more than 1 MiB", place())))
            } else {
                Ok(spaced(text))
            });
        }
    }
    let there = found.into_iter().filter_map(|(name, text)| Some((name, text?)));
    Ok(there.collect())
}
