//! The texts of manifests, without their recordings.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use arrow::array::{Array, AsArray, StringArray};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use flow_kind::open_regular_file_or_open_pipe;
use flow_parquet::ForeignParquet;
use flow_storage::Storage;
use parquet::arrow::ProjectionMask;
use serde_json::Value;

use crate::ManifestError;
use crate::column_names::{LANGUAGE_COLUMNS, TEXT_COLUMNS};
use crate::json_line;

/// Rows of a table in memory at once.
const BATCH_ROWS: usize = 1024;
/// Longest line that is read.
const LONGEST_LINE: u64 = 1 << 20;

/// Passes on the texts of a manifest, in order: of a Parquet file (by its ending), or of NeMo's JSON lines, with or
/// without a byte-order mark. Texts are those of the first of the columns or keys `text, transcription, transcript,
/// sentence, normalized_text` that is there. Each comes with the language that its row names, empty where it names none.
/// Returns how many rows have no text.
///
/// # Errors
/// If the file cannot be read, or is no such manifest: the line is named.
pub fn read_texts(storage: &Storage, path: &Path, each: &mut dyn FnMut(&str, &str)) -> Result<u64, ManifestError> {
    if path
        .extension()
        .is_some_and(|ending| ending.eq_ignore_ascii_case("parquet"))
    {
        of_table(storage, path, each)
    } else {
        of_lines(storage, path, each)
    }
}

fn wrong(path: &Path, why: impl Into<String>) -> ManifestError {
    ManifestError::manifest(path, why)
}

fn of_table(storage: &Storage, path: &Path, each: &mut dyn FnMut(&str, &str)) -> Result<u64, ManifestError> {
    let parquet = |source| ManifestError::parquet(path, source);
    let file = ForeignParquet::open(storage, path).map_err(|error| ManifestError::io(path, error))?;
    let metadata = file.metadata().map_err(parquet)?;
    let fields = metadata.schema().fields();
    let first = |names: &[&str]| {
        let place = |name: &&str| fields.iter().position(|field| field.name() == name);
        names.iter().find_map(place)
    };
    let Some(place) = first(&TEXT_COLUMNS) else {
        return Err(wrong(
            path,
            format!("it has none of the columns {}", TEXT_COLUMNS.join(", ")),
        ));
    };
    let of_language = first(&LANGUAGE_COLUMNS);
    let mask = ProjectionMask::roots(metadata.parquet_schema(), [place].into_iter().chain(of_language));
    let mut without = 0;
    for batch in file.rows(&metadata, mask, BATCH_ROWS, None).map_err(parquet)? {
        let batch = batch?;
        let column = |place: usize| -> Result<StringArray, ManifestError> {
            let name = fields[place].name();
            let no_text = || wrong(path, format!("column `{name}` is not text"));
            let texts = cast(batch.column_by_name(name).ok_or_else(no_text)?, &DataType::Utf8)?;
            texts.as_string_opt::<i32>().cloned().ok_or_else(no_text)
        };
        let texts = column(place)?;
        let languages = of_language.map(column).transpose()?;
        for (row, text) in texts.iter().enumerate() {
            let language = languages.as_ref().filter(|languages| languages.is_valid(row));
            let language = language.map_or("", |languages| languages.value(row));
            match text.map(str::trim).filter(|text| !text.is_empty()) {
                Some(text) => each(text, language),
                None => without += 1,
            }
        }
    }
    Ok(without)
}

fn of_lines(storage: &Storage, path: &Path, each: &mut dyn FnMut(&str, &str)) -> Result<u64, ManifestError> {
    let io = |error| ManifestError::io(path, error);
    let mut reader = BufReader::new(open_regular_file_or_open_pipe(storage, path).map_err(io)?);
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
        let no_object = |why: String| wrong(path, format!("line {number} is not a JSON object: {why}"));
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
            Some(text) => {
                let language = LANGUAGE_COLUMNS.iter().find_map(|name| values.get(*name)?.as_str());
                each(text, language.unwrap_or_default());
            }
            None => without += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::Arc;

    use arrow::array::{ArrayRef, RecordBatch};
    use parquet::arrow::ArrowWriter;

    use super::*;

    fn texts(path: &Path) -> Result<(Vec<(String, String)>, u64), ManifestError> {
        let mut texts = Vec::new();
        let without = read_texts(&Storage::default(), path, &mut |text, lang| {
            texts.push((text.to_owned(), lang.to_owned()))
        })?;
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
        let row = |text: &str, lang: &str| (text.to_owned(), lang.to_owned());
        let expected = (vec![row("one two", "en"), row("three", "")], 2);
        assert_eq!(texts(&lines).unwrap(), expected);

        let table = place.path().join("a.parquet");
        let column: ArrayRef = Arc::new(StringArray::from(vec![
            Some("one two"),
            None,
            Some(" three "),
            Some(""),
        ]));
        let languages: ArrayRef = Arc::new(StringArray::from(vec![Some("en"), None, None, None]));
        let batch = RecordBatch::try_from_iter([("locale", languages), ("sentence", column)]).unwrap();
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
        assert_eq!(texts(&lines).unwrap(), (vec![("one".to_owned(), String::new())], 2));
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
                .contains("line 2 is not a JSON object")
        );
        std::fs::write(place.path().join("b.parquet"), b"PAR1").unwrap();
        assert!(texts(&place.path().join("b.parquet")).is_err());
        assert!(texts(&place.path().join("gone.jsonl")).is_err());
    }
}
