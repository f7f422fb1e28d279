//! Looks for one line of a manifest among those that are read.

use std::path::{Component, Path, PathBuf};

use crate::manifest_row::{ManifestRow, Refusal};

/// A line of a manifest of JSON lines, or a row of a table as text, as `manifest.read` takes it.
#[derive(Clone, Debug, PartialEq)]
pub struct ManifestLine {
    /// The values of its reject, where it is refused before its recording is looked for: a JSON object with the line.
    pub values: String,
    /// The segment that it represents; none where it makes no row.
    pub segment_id: Option<String>,
    /// Where its recording may be, without the root and `.` and `..` that paths begin with; empty where it is in a tar.
    pub recordings: Vec<String>,
}

/// The line that a reader looks for, and what it found.
pub struct LineSearch {
    /// In its canonical form.
    pub file: PathBuf,
    pub number: u64,
    pub is_file: bool,
    pub found: Option<ManifestLine>,
}

impl LineSearch {
    pub fn begin_file(&mut self, path: &Path) {
        self.is_file = path.canonicalize().is_ok_and(|path| path == self.file);
    }

    /// The row that begins at a line.
    pub fn row(&mut self, line: u64, row: Result<ManifestRow, Refusal>, values: impl FnOnce() -> String) {
        if self.is_file && line == self.number && self.found.is_none() {
            let row = row.ok();
            let files = row.iter().flat_map(|row| &row.wanted.files);
            self.found = Some(ManifestLine {
                values: values(),
                recordings: files.filter_map(|file| plain(file)).collect(),
                segment_id: row.map(|row| row.segment_id),
            });
        }
    }
}

pub fn plain(file: &Path) -> Option<String> {
    let parts = file.components();
    let parts = parts.skip_while(|part| !matches!(part, Component::Normal(_)));
    let plain = parts.collect::<PathBuf>();
    plain.to_str().filter(|plain| !plain.is_empty()).map(str::to_string)
}
