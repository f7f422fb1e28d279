//! Finds one line of a manifest by its number, for `flow lineage`.

use std::path::Path;

use flow_kind::{Out, StageError};
use flow_storage::Storage;

use flow_corpus::files::{Format, expand, format_of};
use flow_corpus::recordings::Recordings;
use flow_corpus::rows::Rows;
use flow_corpus::{LineSearch, ManifestError, ManifestLine, ReadSettings};

use crate::opening::open;

/// The line of this number of a file, from 1, as the stage with these settings reads it; in a table the heading is line 1.
/// None where the stage reads another file.
///
/// # Errors
/// Where the file cannot be read, has no row at that line, or is not a manifest of lines.
pub fn line_of(
    storage: &Storage,
    settings: &ReadSettings,
    file: &Path,
    number: u64,
) -> Result<Option<ManifestLine>, StageError> {
    let wrong = |why: String| ManifestError::manifest(file, why);
    let file = file.canonicalize().map_err(|error| ManifestError::io(file, error))?;
    // Of a folder the table in it is read.
    let is_read = |path: String| {
        let path = Path::new(&path).canonicalize();
        path.is_ok_and(|path| path == file || (path.is_dir() && file.parent() == Some(&path)))
    };
    let patterns = expand(&settings.manifest).unwrap_or_default();
    if !patterns.into_iter().any(is_read) {
        return Ok(None);
    }
    let has_lines = |format| matches!(format, Some(Format::Nemo | Format::Table));
    let is_named = matches!(settings.format, Format::Nemo | Format::Table);
    if !is_named && !has_lines(format_of(storage, &file)) {
        return Err(wrong("it is neither a manifest of JSON lines nor a table as text".into()).into());
    }
    // Manifests of lines need no folder for temporary files.
    let manifest = open(storage, settings, Path::new(""), &mut |_| true)?;
    if !manifest.has_lines() {
        return Ok(None);
    }
    for partition in manifest.names() {
        let (mut out, mut recordings) = (Out::new(partition.clone()), Recordings::new(storage, false));
        let mut rows = Rows::new(&mut out, &mut recordings).searching(LineSearch {
            file: file.clone(),
            number,
            is_file: false,
            found: None,
        });
        manifest.read(storage, &partition, &mut rows)?;
        if let Some(found) = rows.into_search().and_then(|search| search.found) {
            return Ok(Some(found));
        }
    }
    Err(wrong(format!("it has no row at line {number}")).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flow_corpus::manifest_row::line_values;
    use flow_corpus::plain;

    #[test]
    fn lines_are_found_by_their_number_as_the_stage_reads_them() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let settings = |name: &str| ReadSettings {
            manifest: at(name).display().to_string(),
            ..ReadSettings::default()
        };
        let found =
            |name: &str, number| line_of(&Storage::default(), &settings(name), &at(name), number).map(Option::unwrap);
        let line = r#"{"audio_filepath": "a/b.wav", "duration": 1, "text": "x", "offset": 2.5}"#;
        let bytes = [format!("\n{line}\r\nnot json\n").as_bytes(), b"{\"text\": \"\xff\"}\n"].concat();
        std::fs::write(at("m.jsonl"), bytes).unwrap();
        let second = found("m.jsonl", 2).unwrap();
        assert_eq!(
            (second.segment_id.as_deref(), second.values),
            (Some("b@2.5"), line_values(line))
        );
        assert_eq!(second.recordings.last().map(String::as_str), Some("a/b.wav"));
        assert_eq!(found("m.jsonl", 3).unwrap().segment_id, None);
        // What is not UTF-8 has the values of its reject, too.
        assert_eq!(
            found("m.jsonl", 4).unwrap().values,
            line_values("{\"text\": \"\u{fffd}\"}\n")
        );
        let error = found("m.jsonl", 5).unwrap_err().to_string();
        assert!(error.contains("no row at line 5"), "{error}");
        // A field with a line break makes two lines of one row.
        std::fs::write(at("t.csv"), "path,text\na.wav,\"x\ny\"\nhi/b.wav,z\n").unwrap();
        let row = found("t.csv", 4).unwrap();
        assert_eq!(
            (row.segment_id.as_deref(), row.values),
            (Some("hi/b"), line_values("hi/b.wav,z"))
        );
        for (name, number) in [
            ("t.csv", 1),
            ("t.csv", 5),
            ("m.jsonl", 0),
            ("m.jsonl", 1),
            ("none.csv", 2),
        ] {
            assert!(
                line_of(&Storage::default(), &settings(name), &at(name), number).is_err(),
                "{name}:{number}"
            );
        }
        // Columns that are called differently, of the second of two tables, and of the table of a folder.
        std::fs::write(at("u0.csv"), "wav_file,words\nc.wav,x\n").unwrap();
        std::fs::write(at("u1.csv"), "wav_file,words\nd.wav,x\n").unwrap();
        let renamed = ReadSettings {
            columns: vec!["wav_file=audio_filepath".into(), "words=text".into()],
            ..settings("u{0..1}.csv")
        };
        let of = |name: &str| {
            line_of(&Storage::default(), &renamed, &at(name), 2)
                .unwrap()
                .unwrap()
                .segment_id
        };
        assert_eq!(
            (of("u0.csv").as_deref(), of("u1.csv").as_deref()),
            (Some("c"), Some("d"))
        );
        assert_eq!(
            line_of(&Storage::default(), &renamed, &at("t.csv"), 2).unwrap(),
            None,
            "it reads other files"
        );
        std::fs::create_dir(at("folder")).unwrap();
        std::fs::write(at("folder/metadata.csv"), "file_name,text\ne.wav,x\n").unwrap();
        let of_folder = line_of(&Storage::default(), &settings("folder"), &at("folder/metadata.csv"), 2).unwrap();
        assert_eq!(of_folder.unwrap().segment_id.as_deref(), Some("e"));
    }

    #[test]
    fn paths_lose_what_they_begin_with() {
        assert_eq!(plain(Path::new("../.././x/../b.wav")).as_deref(), Some("x/../b.wav"));
        assert_eq!(plain(Path::new("/")), None);
    }
}
