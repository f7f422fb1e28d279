//! Names that columns and keys of manifests have.

use crate::extra::EXTRA;
use crate::times::{DURATION, ENDS, STARTS};

pub const FILE_COLUMNS: [&str; 10] = [
    "file_name",
    "audio_filepath",
    "audio_path",
    "audio",
    "path",
    "file",
    "filename",
    "wav",
    "wav_filename",
    "audio_file_name",
];
/// Columns for the text; also keys of lines that name their recording by `file_name`.
pub const TEXT_COLUMNS: [&str; 5] = ["text", "transcription", "transcript", "sentence", "normalized_text"];
pub const LANGUAGE_COLUMNS: [&str; 3] = ["lang", "language", "locale"];
pub const ID_COLUMNS: [&str; 2] = ["segment_id", "id"];

/// The accepted column names of each field of a row.
const NAMES: [&[&str]; 10] = [
    &FILE_COLUMNS,
    &TEXT_COLUMNS,
    &LANGUAGE_COLUMNS,
    &ID_COLUMNS,
    &[DURATION],
    &STARTS,
    &ENDS,
    &["shard_id"],
    &["source"],
    &[EXTRA],
];

/// The setting `columns`: pairs of a column's name in the table and one that represents a field of a row.
///
/// # Errors
/// For one that is no such pair, and for a field that is given twice.
pub fn renamed(columns: &[String]) -> Result<Vec<(&str, &str)>, String> {
    let mut pairs: Vec<(&str, &str)> = Vec::new();
    for column in columns {
        let pair = column
            .rsplit_once('=')
            .map(|(theirs, ours)| (theirs.trim(), ours.trim()));
        let Some((theirs, ours)) = pair.filter(|(theirs, _)| !theirs.is_empty()) else {
            return Err(format!(
                "{column:?} is not of the form THEIRS=OURS, such as wav_file=audio_filepath"
            ));
        };
        let Some(names) = names_like(ours) else {
            return Err(format!(
                "{ours:?} is not a column that is read: one of {}",
                NAMES.concat().join(", ")
            ));
        };
        if let Some((before, _)) = pairs.iter().find(|(_, other)| names.contains(other) && ours != EXTRA) {
            return Err(format!("{before:?} and {theirs:?} are both {ours}"));
        }
        pairs.push((theirs, ours));
    }
    Ok(pairs)
}

pub fn names_like(ours: &str) -> Option<&'static [&'static str]> {
    NAMES.into_iter().find(|names| names.contains(&ours))
}
