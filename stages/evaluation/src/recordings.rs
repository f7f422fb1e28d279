//! A note of the recordings that are transcribed, so that the next plan need not read the rows.

use std::path::{Path, PathBuf};

use flow_kind::StageError;
use flow_kind::store::{read_note, write_note};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::audio_rows::AudioRows;

const NOTES: &str = "recordings.json";

/// The recordings of chosen rows.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Recordings {
    pub files: Vec<PathBuf>,
    /// Parts of files: offset and size in bytes.
    pub ranges: Vec<(PathBuf, u64, u64)>,
}

#[derive(Serialize, Deserialize)]
struct Notes {
    /// The identity of the rows and of their selection.
    of: Value,
    recordings: Recordings,
}

impl Recordings {
    pub fn of(rows: &AudioRows) -> Self {
        let (files, ranges) = rows.recordings();
        let range = |range: flow_kind::FileRange| (range.path, range.offset, range.size);
        Recordings {
            files,
            ranges: ranges.into_iter().map(range).collect(),
        }
    }

    /// The recordings noted in `scratch` under `of`, else those that `choose` finds, which are then noted if the folder
    /// exists.
    ///
    /// # Errors
    /// Those of `choose`.
    pub fn noted(
        scratch: &Path,
        of: &Value,
        choose: impl FnOnce() -> Result<Recordings, StageError>,
    ) -> Result<Recordings, StageError> {
        let path = scratch.join(NOTES);
        if let Some(notes) = read_note::<Notes>(&path).filter(|notes| notes.of == *of) {
            return Ok(notes.recordings);
        }
        let notes = Notes {
            of: of.clone(),
            recordings: choose()?,
        };
        // A failure to write the note only costs time when the next run is planned.
        if scratch.is_dir() {
            let _ = write_note(&path, &notes);
        }
        Ok(notes.recordings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_are_read_again_only_where_they_are_others() {
        let scratch = tempfile::tempdir().unwrap();
        let chosen = |name: &str| Recordings {
            files: vec![name.into()],
            ranges: vec![("a.tar".into(), 512, 7)],
        };
        let noted = |of: Value, otherwise: Option<&str>| {
            let choose = || {
                otherwise
                    .map(chosen)
                    .ok_or_else(|| StageError::failed("they were read again"))
            };
            Recordings::noted(scratch.path(), &of, choose)
        };
        assert_eq!(noted(json!(["rows", 1]), Some("a")).unwrap(), chosen("a"));
        assert_eq!(noted(json!(["rows", 1]), None).unwrap(), chosen("a"));
        assert!(noted(json!(["other rows", 1]), None).is_err());
        assert_eq!(noted(json!(["other rows", 1]), Some("b")).unwrap(), chosen("b"));
        std::fs::write(scratch.path().join(NOTES), b"{\"of\"").unwrap();
        assert_eq!(noted(json!(["other rows", 1]), Some("c")).unwrap(), chosen("c"));
        let none = scratch.path().join("none");
        assert!(Recordings::noted(&none, &json!(1), || Ok(chosen("d"))).is_ok() && !none.exists());
    }
}
