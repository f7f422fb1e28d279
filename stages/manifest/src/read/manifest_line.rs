//! Finds one line of a manifest by its number, for `flow trace`.

use std::io::{BufRead, BufReader, Read};
use std::path::{Component, Path, PathBuf};

use flow_runtime::open_regular_file;

use super::file_stem;
use super::files::{Format, format_of};
use super::lines::{LONGEST_LINE, LineRules, row_of};
use super::text_tables::segment_of_line;
use crate::error::ManifestError;

/// A line of a manifest of JSON lines, or of a table as text.
#[derive(Clone, Debug, PartialEq)]
pub struct ManifestLine {
    /// The text of the line, without its line end.
    pub line: String,
    /// The segment id of its row in `manifest.read`; none where it has no row.
    pub segment_id: Option<String>,
    /// The path of its recording, without a leading root, `.` and `..`; none where it names none.
    pub recording: Option<String>,
}

/// The line of this number, from 1; in a table the heading is line 1.
///
/// # Errors
/// Where the file cannot be read, has no such line, or is no manifest of lines.
pub fn manifest_line(path: &Path, number: u64) -> Result<ManifestLine, ManifestError> {
    let wrong = |why: String| ManifestError::Manifest {
        path: path.to_path_buf(),
        why,
    };
    match format_of(path) {
        Some(Format::Nemo) => {
            let line = json_line(path, number).map_err(|error| ManifestError::io(path, error))?;
            let line = line.ok_or_else(|| wrong(format!("it has no line {number}")))?;
            let row = row_of(&line, number, &LineRules::default(), &file_stem(path), |_| None, false);
            let row = row.ok();
            let file = row.as_ref().and_then(|row| row.wanted.files.first());
            Ok(ManifestLine {
                recording: file.and_then(|file| plain(file)),
                segment_id: row.map(|row| row.segment_id),
                line,
            })
        }
        Some(Format::Table) => {
            let (line, segment_id, file) =
                segment_of_line(path, number)?.ok_or_else(|| wrong(format!("it has no row at line {number}")))?;
            Ok(ManifestLine {
                line,
                segment_id,
                recording: file.and_then(|file| plain(Path::new(&file))),
            })
        }
        _ => Err(wrong(
            "it is neither a manifest of JSON lines nor a table as text".into(),
        )),
    }
}

fn plain(file: &Path) -> Option<String> {
    let parts = file.components();
    let parts = parts.skip_while(|part| !matches!(part, Component::Normal(_)));
    let plain = parts.collect::<PathBuf>();
    plain.to_str().filter(|plain| !plain.is_empty()).map(str::to_string)
}

fn json_line(path: &Path, number: u64) -> std::io::Result<Option<String>> {
    let mut reader = BufReader::new(open_regular_file(path)?);
    if number == 0 {
        return Ok(None);
    }
    for _ in 1..number {
        if reader.skip_until(b'\n')? == 0 {
            return Ok(None);
        }
    }
    let mut line = Vec::new();
    reader.take(LONGEST_LINE).read_until(b'\n', &mut line)?;
    let text = String::from_utf8_lossy(&line);
    let text = text.trim_start_matches('\u{feff}').trim_end_matches(['\n', '\r']);
    Ok((!line.is_empty()).then(|| text.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_by_their_number() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let line = r#"{"audio_filepath": "a/b.wav", "duration": 1, "text": "x", "offset": 2.5}"#;
        std::fs::write(at("m.jsonl"), format!("\n{line}\r\nnot json")).unwrap();
        let found = |name: &str, number| manifest_line(&at(name), number);
        let second = ManifestLine {
            line: line.into(),
            segment_id: Some("b@2.5".into()),
            recording: Some("a/b.wav".into()),
        };
        assert_eq!(found("m.jsonl", 2).unwrap(), second);
        assert_eq!(found("m.jsonl", 3).unwrap().segment_id, None);
        assert!(found("m.jsonl", 4).unwrap_err().to_string().contains("no line 4"));
        std::fs::write(at("spaces.csv"), "path,text\n \t\n\na.wav,x\n").unwrap();
        assert_eq!(found("spaces.csv", 4).unwrap().line, "a.wav,x");
        assert!(found("spaces.csv", 2).is_err());
        // A field with a line break: one row on two lines.
        std::fs::write(at("t.csv"), "path,text\na.wav,\"x\ny\"\nhi/b.wav,z\n").unwrap();
        assert_eq!(found("t.csv", 4).unwrap().segment_id.as_deref(), Some("hi/b"));
        assert_eq!(found("t.csv", 4).unwrap().line, "hi/b.wav,z");
        assert_eq!(found("t.csv", 4).unwrap().recording.as_deref(), Some("hi/b.wav"));
        assert_eq!(plain(Path::new("../.././x/../b.wav")).as_deref(), Some("x/../b.wav"));
        for (name, number) in [
            ("t.csv", 1),
            ("t.csv", 5),
            ("m.jsonl", 0),
            ("none.csv", 2),
            ("x.txt", 1),
        ] {
            assert!(found(name, number).is_err(), "{name}:{number}");
        }
    }
}
