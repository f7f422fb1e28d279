//! The texts of manifests, without their recordings.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use arrow::array::AsArray;
use arrow::compute::cast;
use arrow::datatypes::DataType;
use flow_runtime::open_regular_file_or_open_pipe;
use flow_runtime::store::ForeignParquet;
use parquet::arrow::ProjectionMask;
use serde_json::Value;

use super::json_line;
use super::tables::sheltered;
use super::text_tables::TEXT_COLUMNS;
use crate::error::ManifestError;

/// Rows of a table in memory at once.
const BATCH_ROWS: usize = 1024;
/// Longest line that is read.
const LONGEST_LINE: u64 = 1 << 20;

/// Passes on the texts of a manifest, in order: of a Parquet file (by its ending), or of NeMo's JSON lines, with or
/// without a byte-order mark. Texts are those of the first of the columns or keys `text, transcription, transcript,
/// sentence, normalized_text` that is there. Returns how many rows have none.
///
/// # Errors
/// If the file cannot be read, or is no such manifest: the line is named.
pub fn read_texts(path: &Path, each: &mut dyn FnMut(&str)) -> Result<u64, ManifestError> {
    if path
        .extension()
        .is_some_and(|ending| ending.eq_ignore_ascii_case("parquet"))
    {
        sheltered(path, || of_table(path, each))
    } else {
        of_lines(path, each)
    }
}

fn wrong(path: &Path, why: impl Into<String>) -> ManifestError {
    ManifestError::Manifest {
        path: path.to_path_buf(),
        why: why.into(),
    }
}

fn of_table(path: &Path, each: &mut dyn FnMut(&str)) -> Result<u64, ManifestError> {
    let parquet = |source| ManifestError::Parquet {
        path: path.to_path_buf(),
        source,
    };
    let file = ForeignParquet::open(path).map_err(|error| ManifestError::io(path, error))?;
    let metadata = file.metadata().map_err(parquet)?;
    let fields = metadata.schema().fields();
    let place = TEXT_COLUMNS
        .iter()
        .find_map(|name| fields.iter().position(|field| field.name() == name));
    let Some(place) = place else {
        return Err(wrong(
            path,
            format!("it has none of the columns {}", TEXT_COLUMNS.join(", ")),
        ));
    };
    let mask = ProjectionMask::roots(metadata.parquet_schema(), [place]);
    let mut without = 0;
    for batch in file.rows(&metadata, mask, BATCH_ROWS, None).map_err(parquet)? {
        let batch = batch?;
        let texts = cast(batch.column(0), &DataType::Utf8)?;
        let Some(texts) = texts.as_string_opt::<i32>() else {
            return Err(wrong(path, format!("column `{}` is no text", fields[place].name())));
        };
        for text in texts {
            match text.map(str::trim).filter(|text| !text.is_empty()) {
                Some(text) => each(text),
                None => without += 1,
            }
        }
    }
    Ok(without)
}

fn of_lines(path: &Path, each: &mut dyn FnMut(&str)) -> Result<u64, ManifestError> {
    let io = |error| ManifestError::io(path, error);
    let mut reader = BufReader::new(open_regular_file_or_open_pipe(path).map_err(io)?);
    let (mut line, mut number, mut without) = (Vec::new(), 0u64, 0);
    let mut mark = "\u{feff}".as_bytes();
    loop {
        line.clear();
        number += 1;
        let read = reader
            .by_ref()
            .take(LONGEST_LINE + 1)
            .read_until(b'\n', &mut line)
            .map_err(io)?;
        if read == 0 {
            return Ok(without);
        }
        if read as u64 > LONGEST_LINE {
            return Err(wrong(path, format!("line {number} is longer than 1 MiB")));
        }
        let object = line.strip_prefix(mark).unwrap_or(&line);
        mark = b"";
        if object.trim_ascii().is_empty() {
            continue;
        }
        let no_object = |why: String| wrong(path, format!("line {number} is no JSON object: {why}"));
        let object = std::str::from_utf8(object).map_err(|error| no_object(error.to_string()))?;
        let values = match json_line::parse(object) {
            Ok((Value::Object(values), _)) => values,
            Ok(_) => return Err(no_object("it is another value".into())),
            Err(error) => return Err(no_object(error.to_string())),
        };
        let text = TEXT_COLUMNS.iter().find_map(|name| values.get(*name));
        match text
            .and_then(Value::as_str)
            .map(str::trim)
            .filter(|text| !text.is_empty())
        {
            Some(text) => each(text),
            None => without += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::Arc;

    use arrow::array::{ArrayRef, RecordBatch, StringArray};
    use parquet::arrow::ArrowWriter;

    use super::*;

    fn texts(path: &Path) -> Result<(Vec<String>, u64), ManifestError> {
        let mut texts = Vec::new();
        let without = read_texts(path, &mut |text| texts.push(text.to_owned()))?;
        Ok((texts, without))
    }

    #[test]
    fn lines_and_tables_give_the_same_texts() {
        let place = tempfile::tempdir().unwrap();
        let lines = place.path().join("a.jsonl");
        std::fs::write(
            &lines,
            "{\"text\": \"one two\", \"lang\": \"en\"}\n\n{\"audio_filepath\": \"a.wav\"}\n{\"transcript\": \" three \"}\n{\"text\": \"\"}",
        )
        .unwrap();
        let expected = (vec!["one two".to_owned(), "three".to_owned()], 2);
        assert_eq!(texts(&lines).unwrap(), expected);

        let table = place.path().join("a.parquet");
        let column: ArrayRef = Arc::new(StringArray::from(vec![
            Some("one two"),
            None,
            Some(" three "),
            Some(""),
        ]));
        let batch = RecordBatch::try_from_iter([("sentence", column)]).unwrap();
        let mut writer = ArrowWriter::try_new(File::create(&table).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        assert_eq!(texts(&table).unwrap(), expected);
    }

    #[test]
    fn a_named_pipe_is_not_waited_for() {
        let place = tempfile::tempdir().unwrap();
        let pipe = place.path().join("a.jsonl");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let error = texts(&pipe).unwrap_err().to_string();
        assert!(error.contains("it is a pipe, not a regular file"), "{error}");
    }

    #[test]
    fn the_first_key_that_is_there_has_the_text_and_a_byte_order_mark_is_none_of_it() {
        let place = tempfile::tempdir().unwrap();
        let lines = place.path().join("a.jsonl");
        std::fs::write(
            &lines,
            "\u{feff}{\"text\": \"one\"}\n{\"text\": null, \"transcript\": \"two\"}\n{\"text\": 3, \"sentence\": \"three\"}\n",
        )
        .unwrap();
        assert_eq!(texts(&lines).unwrap(), (vec!["one".to_owned()], 2));
    }

    #[test]
    fn what_is_no_manifest_is_told_with_its_line() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("a.json");
        std::fs::write(&path, "{\"text\": \"one\"}\nnothing\n").unwrap();
        assert!(
            texts(&path)
                .unwrap_err()
                .to_string()
                .contains("line 2 is no JSON object")
        );
        std::fs::write(place.path().join("b.parquet"), b"PAR1").unwrap();
        assert!(texts(&place.path().join("b.parquet")).is_err());
        assert!(texts(&place.path().join("gone.jsonl")).is_err());
    }
}
