//! Tables of text: separated by commas or tabs, or one JSON object to a line.

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use arrow::datatypes::SchemaRef;
use flow_corpus::decoded_text::{DecodedText, no_text};
use flow_corpus::manifest_row::line_values;
use flow_corpus::quoting::Quoting;
use flow_corpus::table_text::{Layout, Record, records};
use flow_corpus::unpacking::misnamed_or;
use flow_corpus::{ManifestError, json_line};
use flow_kind::{Out, Reject, RejectClass, StageError, open_input_file};
use flow_storage::Storage;
use serde_json::Value;

use super::cells::{Cell, CellType, Columns, Rows, of_json, of_text, type_of};
use super::{TableFormat, check_taken, lacks, send, too_many_rows, wrong};

/// Most bytes of a file.
const LARGEST: u64 = 1 << 30;
/// Most bytes of the beginning that columns are looked for in.
const LARGEST_HEAD: u64 = 1 << 20;

/// Why a line is rejected: reason and detail.
type Refusal = (&'static str, String);

/// At most this many bytes of a file from its beginning, and how many these are. What is not UTF-8 is replaced, and refused line
/// by line.
fn text_of(storage: &Storage, path: &Path, most: u64) -> Result<(DecodedText, u64), ManifestError> {
    let of_path = |error| ManifestError::io(path, error);
    let mut bytes = Vec::new();
    let file = open_input_file(storage, path).map_err(of_path)?;
    file.take(most).read_to_end(&mut bytes).map_err(of_path)?;
    if let Some(why) = no_text(&bytes) {
        return Err(misnamed_or(storage, path, wrong(path, why)));
    }
    let size = bytes.len() as u64;
    Ok((DecodedText::of(bytes), size))
}

/// The first line of a file that is not blank.
fn first_line(storage: &Storage, path: &Path) -> Result<String, ManifestError> {
    let of_path = |error| ManifestError::io(path, error);
    let mut reader = BufReader::new(open_input_file(storage, path).map_err(of_path)?.take(LARGEST_HEAD));
    loop {
        let mut line = Vec::new();
        if reader.read_until(b'\n', &mut line).map_err(of_path)? == 0 {
            return Err(wrong(path, "it has no rows to infer its columns from"));
        }
        if let Some(why) = no_text(&line) {
            return Err(misnamed_or(storage, path, wrong(path, why)));
        }
        let line = DecodedText::of(line).text;
        if !line.trim().is_empty() {
            return Ok(line);
        }
    }
}

/// The columns that a file has.
pub(super) fn columns(
    storage: &Storage,
    path: &Path,
    format: TableFormat,
    quoting: Quoting,
) -> Result<Columns, ManifestError> {
    if format == TableFormat::Jsonl {
        let line = first_line(storage, path)?;
        let Ok((Value::Object(object), _)) = json_line::parse(&line) else {
            return Err(wrong(
                path,
                "its first line is not a JSON object, so its columns cannot be inferred",
            ));
        };
        let mut columns: Columns = object
            .iter()
            .map(|(name, value)| (name.clone(), type_of(value)))
            .collect();
        columns.sort_by(|a, b| a.0.cmp(&b.0));
        return Ok(columns);
    }
    let head = text_of(storage, path, LARGEST_HEAD)?.0.text;
    let names = heading(path, &head, layout_of_heading(&head, format, quoting))?;
    Ok(names.into_iter().map(|name| (name, CellType::Text)).collect())
}

/// How the heading of a text is written, by its first line alone: names may be in quotes where fields below them hold quotes
/// as letters, and the end of a text may be within a field.
fn layout_of_heading(text: &str, format: TableFormat, quoting: Quoting) -> Layout {
    let first = text.trim_start().lines().next().unwrap_or_default();
    quoting.layout(first, separator(format)).0
}

/// The names of a heading.
fn heading(path: &Path, text: &str, layout: Layout) -> Result<Vec<String>, ManifestError> {
    let Some(heading) = records(text, layout).next() else {
        return Err(wrong(path, "it has no heading"));
    };
    if let Some((_, why)) = heading.broken {
        return Err(wrong(path, format!("its heading: {why}")));
    }
    let names: Vec<String> = heading.fields.iter().map(|name| name.trim().to_string()).collect();
    let mut seen = HashSet::new();
    match names.iter().find(|name| !seen.insert(name.as_str())) {
        Some(name) => Err(wrong(path, format!("two columns are called `{name}`"))),
        None => Ok(names),
    }
}

/// What separates the fields of a table.
fn separator(format: TableFormat) -> char {
    if format == TableFormat::Tsv { '\t' } else { ',' }
}

/// Reads all rows of a file. Gives what a person should know of its quotes.
pub(super) fn read(
    storage: &Storage,
    path: &Path,
    format: TableFormat,
    quoting: Quoting,
    columns: &Columns,
    schema: &SchemaRef,
    out: &mut Out,
) -> Result<Option<String>, StageError> {
    let (text, bytes) = text_of(storage, path, LARGEST + 1)?;
    if bytes > LARGEST {
        return Err(wrong(path, "it has more than 1 GiB; write it as parquet").into());
    }
    let mut told = None;
    let mut rows = Rows::new(columns, schema);
    let (mut number, mut taken, mut first_refused) = (0u32, 0, None);
    let mut push = |line: &str, cells: Result<Vec<Cell>, Refusal>| {
        out.read(1);
        match cells {
            Ok(cells) => {
                rows.push(number, cells);
                taken += 1;
            }
            Err((reason, detail)) => {
                first_refused.get_or_insert_with(|| detail.clone());
                out.reject(Reject {
                    row: Some(number),
                    id: None,
                    reason: reason.into(),
                    class: RejectClass::Fault,
                    detail,
                    values: line_values(line),
                });
            }
        }
        number = number.checked_add(1).ok_or_else(|| too_many_rows(path))?;
        if rows.is_full() {
            send(out, rows.take()?);
        }
        Ok::<(), StageError>(())
    };
    if format == TableFormat::Jsonl {
        for (line, is_replaced) in text.lines() {
            if line.trim().is_empty() {
                continue;
            }
            let cells = match is_replaced {
                true => Err(("not_utf8", "the line is not UTF-8".into())),
                false => of_line(columns, line),
            };
            push(line, cells)?;
        }
    } else {
        let (layout, of_quotes) = quoting.layout(&text.text, separator(format));
        told = of_quotes;
        let mut records = text.records(0..text.text.len(), layout);
        records.next();
        let of_heading = match layout.quoted {
            true => layout,
            false => layout_of_heading(&text.text, format, quoting),
        };
        let names = heading(path, &text.text, of_heading)?;
        let mut places = Vec::with_capacity(columns.len());
        for (column, cell) in columns {
            let place = names.iter().position(|name| name == column).ok_or_else(|| {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                lacks(path, column, &names)
            })?;
            places.push((place, column.as_str(), *cell));
        }
        for record in records {
            push(record.line, of_record(&places, names.len(), &record))?;
        }
    }
    send(out, rows.take()?);
    check_taken(path, taken, first_refused)?;
    Ok(told)
}

fn bad_value(column: &str, cell: CellType, value: &str) -> Refusal {
    // Truncated: enough to find the value.
    const SHOWN: usize = 60;
    let short: String = value.chars().take(SHOWN).collect();
    let cell = match cell {
        CellType::Text => "a text",
        CellType::Int64 => "a whole number of 64 bits",
        CellType::Float64 => "a number",
        CellType::Bool => "true or false",
    };
    ("bad_value", format!("column `{column}`: {short:?} is not {cell}"))
}

fn of_record(places: &[(usize, &str, CellType)], fields: usize, record: &Record<'_>) -> Result<Vec<Cell>, Refusal> {
    if let Some((reason, why)) = record.broken {
        return Err((reason, why.into()));
    }
    if record.fields.len() != fields {
        let found = record.fields.len();
        return Err(("bad_line", format!("it has {found} fields, the heading has {fields}")));
    }
    let cell = |&(place, column, cell): &(usize, &str, CellType)| {
        let text = &record.fields[place];
        of_text(cell, text).ok_or_else(|| bad_value(column, cell, text))
    };
    places.iter().map(cell).collect()
}

fn of_line(columns: &Columns, line: &str) -> Result<Vec<Cell>, Refusal> {
    let object = match json_line::parse(line) {
        Ok((Value::Object(object), _)) => object,
        Ok(_) => return Err(("bad_line", "it is not a JSON object".into())),
        Err(error) => return Err(("bad_line", format!("it is not JSON: {error}"))),
    };
    let cell = |(column, cell): &(String, CellType)| {
        let value = object.get(column).unwrap_or(&Value::Null);
        of_json(*cell, value).ok_or_else(|| bad_value(column, *cell, &value.to_string()))
    };
    columns.iter().map(cell).collect()
}
