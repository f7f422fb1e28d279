//! Manifests that name what is transcribed: each row is a recording, or a part of one.
//!
//! Read are NeMo's JSON lines and parquet files, with the names of `manifest.read` and of the rows that it gives.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type, Int64Type, UInt64Type};
use flow_audio::json_line;
use flow_audio::listing::{Recording, has_ending_of_audio};
use flow_audio::member_name::{is_unsafe, safe_components, strip_dot_slash};
use flow_audio::part::TOLERANCE_SECONDS;
use flow_audio::row_times::{ENDS, OFFSET, STARTS, Unit, UnitSample, is_time, unread, unread_among};
use flow_audio::samples::Refusal;
use flow_audio::tar::{self, MemberKind};
use flow_kind::{ROW, StageError, open_input_file, open_regular_file};
use flow_parquet::ForeignParquet;
use flow_storage::{Storage, is_url, path_of_file_url};
use parquet::arrow::ProjectionMask;
use serde_json::{Map, Value};

use crate::streamed::Part;

/// Endings of manifests.
const ENDINGS: [&str; 3] = ["jsonl", "json", "parquet"];
/// The key of the length of a row, in seconds.
const DURATION: &str = "duration";
/// What a parquet file begins with.
const PARQUET: &[u8] = b"PAR1";
/// Longest line that is read, in bytes.
const LONGEST_LINE: u64 = 1 << 20;
/// Longest part of the name of a transcript, in bytes: endings and channels are added to it.
const LONGEST_NAME: usize = 200;
/// Rows of a parquet file that are decoded at a time.
const BATCH_ROWS: usize = 256;
/// Most bytes that the columns of a parquet file take in memory: a small file may repeat a long text.
const MOST_BYTES: usize = 1 << 30;

/// The row of a manifest.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Its place in the manifests that were named: which of these it is in, and which line or row of that, from 1.
    pub place: (usize, u64),
    /// Offset and size in bytes of a recording within a tar.
    pub range: Option<(u64, u64)>,
    /// The part of the recording; none for all of it.
    pub part: Option<Part>,
    /// What the manifest says, with the id as `segment_id`, and the absolute path of a recording as `audio_filepath`.
    pub values: Map<String, Value>,
    /// Of where rows of the manifest begin and end.
    pub unit: Unit,
    /// Why there is nothing to be transcribed.
    pub refused: Option<Refusal>,
}

/// Whether a text that names recordings is the file of a manifest, by its ending or else by how it begins.
pub fn is_manifest(text: &str) -> bool {
    let path = Path::new(text);
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
    let has_ending = ending.is_some_and(|ending| ENDINGS.contains(&ending.as_str()));
    if is_url(text) {
        return has_ending;
    }
    if has_ending || has_ending_of_audio(text) {
        return has_ending && path.is_file();
    }
    let mut head = Vec::new();
    let read = open_regular_file(path).and_then(|file| file.take(4).read_to_end(&mut head));
    read.is_ok() && is_manifest_by_content(&head)
}

/// Whether a file that begins with these bytes (four of them are enough) is a manifest, if it is anything.
pub fn is_manifest_by_content(head: &[u8]) -> bool {
    head.starts_with(PARQUET) || head.starts_with(b"{")
}

/// The rows of a manifest, in its order. The name of a row's results is that of the manifest without its ending, and in a folder
/// of that name the row's id: `segment_id` or `id`, or else the path of its recording without ending and where it begins
/// (`spk1/a@2.5`). A row that cannot be used is there too, with the reason.
///
/// # Errors
/// If the manifest cannot be read, or has no row.
pub fn rows(storage: &Storage, manifest: &str, number: usize) -> Result<Vec<(Recording, Row)>, StageError> {
    let path = Path::new(manifest);
    let failed = |why: String| StageError::setting("input", format!("the manifest {manifest}: {why}"));
    let mut head = Vec::new();
    let file = open_input_file(storage, path).map_err(|error| failed(error.to_string()))?;
    let read = file.take(4).read_to_end(&mut head);
    read.map_err(|error| failed(error.to_string()))?;
    let found = match head == PARQUET {
        true => parquet_rows(storage, path),
        false => lines(storage, path).map_err(|error| error.to_string()),
    };
    let found = found.map_err(failed)?;
    if found.is_empty() {
        return Err(failed("it has no rows".to_owned()));
    }
    if !found.iter().any(|(_, row)| row.is_ok()) {
        return Err(failed(
            "none of its lines is a JSON object; write one object to a line (`jq -c .`, or `jq -c '.[]'` of an array)"
                .to_owned(),
        ));
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let mut maker = Maker {
        folder: path.parent().unwrap_or(Path::new("")),
        listed: HashMap::new(),
        seen: BTreeSet::new(),
        unit: Unit::Seconds,
    };
    let mut sample = UnitSample::default();
    for values in found.iter().filter_map(|(_, row)| row.as_ref().ok()) {
        let first = |names: &[&str]| names.iter().find_map(|name| values.get(*name)?.as_f64());
        if let (Some(start), Some(end)) = (first(&STARTS[1..]), first(&ENDS))
            && sample.is_due()
            && let Some(file) = file_of(values).ok().flatten().or_else(|| file_of_table(values))
        {
            sample.add(start, end, vec![maker.resolved(&file)]);
        }
    }
    let unit = sample.unit(storage);
    maker.unit = unit;
    let row = |(line, values): (u64, Result<Map<String, Value>, Refusal>)| {
        let place = format!("line {line}");
        let refused = |mut refusal: Refusal, values: Map<String, Value>| {
            refusal.detail = format!("{} ({manifest}, {place})", refusal.detail);
            let recording = Recording {
                name: format!("{stem}/{place}"),
                file: format!("{manifest}, {place}"),
                path: PathBuf::new(),
            };
            let row = Row {
                place: (number, line),
                range: None,
                part: None,
                values,
                unit,
                refused: Some(refusal),
            };
            (recording, row)
        };
        match values {
            Err(refusal) => refused(refusal, Map::new()),
            Ok(values) => match maker.row(storage, values.clone()) {
                Err(refusal) => refused(refusal, values),
                Ok(made) => {
                    let recording = Recording {
                        name: format!("{stem}/{}", made.id),
                        file: made.file,
                        path: made.path,
                    };
                    let row = Row {
                        place: (number, line),
                        range: made.range,
                        part: made.part,
                        values: made.values,
                        unit,
                        refused: None,
                    };
                    (recording, row)
                }
            },
        }
    };
    Ok(found.into_iter().map(row).collect())
}

/// A line by its number, or what is wrong with it.
type Line = (u64, Result<Map<String, Value>, Refusal>);

fn refuse(reason: &'static str, detail: impl Into<String>) -> Refusal {
    Refusal {
        reason,
        detail: detail.into(),
    }
}

/// JSON lines; empty ones are left out.
fn lines(storage: &Storage, path: &Path) -> io::Result<Vec<Line>> {
    let mut reader = BufReader::new(open_input_file(storage, path)?);
    let (mut found, mut line) = (Vec::new(), Vec::new());
    for number in 1.. {
        line.clear();
        (&mut reader).take(LONGEST_LINE + 1).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            break;
        }
        if line.len() as u64 > LONGEST_LINE {
            let mut rest = line.len();
            while rest > 0 && !line.ends_with(b"\n") {
                line.clear();
                rest = (&mut reader).take(LONGEST_LINE).read_until(b'\n', &mut line)?;
            }
            let why = format!("it is longer than {LONGEST_LINE} bytes");
            found.push((number, Err(refuse("line_too_long", why))));
            continue;
        }
        let bytes = match number {
            1 => line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&line),
            _ => &line,
        };
        let object = match std::str::from_utf8(bytes) {
            Err(error) => Err(refuse("not_utf8", error.to_string())),
            Ok(text) if text.trim().is_empty() => continue,
            Ok(text) => match json_line::parse_with_words(text) {
                Ok(Value::Object(values)) => Ok(without_nan(values, text)),
                Ok(_) => Err(refuse("bad_json", "it is not a JSON object")),
                Err(error) => Err(refuse("bad_json", error.to_string())),
            },
        };
        found.push((number, object));
    }
    Ok(found)
}

/// The values of a line, in which the word NaN is null where it is not a time. `NaN` in quotes is a text and stays.
fn without_nan(mut values: Map<String, Value>, line: &str) -> Map<String, Value> {
    let is_nan = |value: &Value| value.as_str() == Some("NaN");
    if !values.values().any(is_nan) {
        return values;
    }
    let Ok((Value::Object(nulls), _)) = json_line::parse(line) else {
        return values;
    };
    for (name, value) in &mut values {
        if is_nan(value) && !is_time_name(name) && nulls.get(name).is_some_and(Value::is_null) {
            *value = Value::Null;
        }
    }
    values
}

/// The rows of a parquet file as objects of those columns that are texts, numbers, truth values, dates and times. In rows of
/// `manifest.read`, where `start` is in seconds and `offset` and `size` are a place in a tar, these get the names of
/// [`Maker::row`].
fn parquet_rows(storage: &Storage, path: &Path) -> Result<Vec<Line>, String> {
    let file = ForeignParquet::open(storage, path).map_err(|error| error.to_string())?;
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    let batches = file.rows(&metadata, ProjectionMask::all(), BATCH_ROWS, None);
    let mut found = Vec::new();
    let mut bytes = 0usize;
    for batch in batches.map_err(|error| error.to_string())? {
        let batch = batch.map_err(|error| error.to_string())?;
        let sizes = batch
            .columns()
            .iter()
            .map(|column| column.to_data().get_slice_memory_size());
        bytes = sizes.fold(bytes, |bytes, size| bytes.saturating_add(size.unwrap_or(0)));
        if bytes > MOST_BYTES {
            return Err(format!("its rows have more than {} MiB", MOST_BYTES >> 20));
        }
        let before = found.len() as u64;
        let mut rows = vec![Map::new(); batch.num_rows()];
        let is_place = batch.column_by_name("start").is_some() && batch.column_by_name("size").is_some();
        for (name, column) in names_and_columns(&batch).filter(|(name, _)| *name != ROW) {
            let name = match name {
                "start" if is_place => "offset",
                "offset" if is_place => TAR_OFFSET,
                "size" if is_place => TAR_SIZE,
                name => name,
            };
            add_column(&mut rows, name, column);
        }
        let rows = rows.into_iter().zip(before + 1..);
        found.extend(rows.map(|(mut row, number)| {
            flatten(&mut row);
            (number, Ok(row))
        }));
    }
    Ok(found)
}

/// Keys that name the recording, the first one first; and those that tables have for it, as `manifest.read` takes them.
const FILES: [&str; 3] = ["audio_filepath", "audio_path", "file_name"];
const FILES_OF_TABLES: [&str; 5] = ["audio", "path", "file", "filename", "wav"];

/// Keys of a row by which it is transcribed.
const USED: [&str; 11] = [
    "audio_filepath",
    "audio_path",
    "file_name",
    "offset",
    DURATION,
    "tar_path",
    "tar_member_name",
    "segment_id",
    "id",
    TAR_OFFSET,
    TAR_SIZE,
];

/// Keys of a row of `manifest.read` that is in a tar: its offset and size in bytes.
const TAR_OFFSET: &str = "_tar_offset";
const TAR_SIZE: &str = "_tar_size";

fn names_and_columns(batch: &RecordBatch) -> impl Iterator<Item = (&str, &ArrayRef)> {
    let schema = batch.schema_ref();
    schema
        .fields()
        .iter()
        .map(|field| field.name().as_str())
        .zip(batch.columns())
}

fn add_column(rows: &mut [Map<String, Value>], name: &str, column: &ArrayRef) {
    let kind = match column.data_type() {
        DataType::Dictionary(_, values) => values.as_ref(),
        kind => kind,
    };
    let to = match kind {
        // As where a writer saw no value.
        DataType::Null => return,
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Some(DataType::Utf8),
        // Of whole numbers, which may be ids, no digit is lost.
        DataType::Decimal32(_, 0)
        | DataType::Decimal64(_, 0)
        | DataType::Decimal128(_, 0)
        | DataType::Decimal256(_, 0) => Some(DataType::Utf8),
        kind if kind.is_temporal() => Some(DataType::Utf8),
        kind if kind.is_floating() || kind.is_decimal() => Some(DataType::Float64),
        DataType::UInt64 => Some(DataType::UInt64),
        kind if kind.is_integer() => Some(DataType::Int64),
        DataType::Boolean => Some(DataType::Boolean),
        _ => None,
    };
    // Names of zones need not be known here.
    let in_utc = match kind {
        DataType::Timestamp(unit, Some(_)) => cast(column, &DataType::Timestamp(*unit, Some("+00:00".into()))).ok(),
        _ => Some(Arc::clone(column)),
    };
    let Some(values) = to.zip(in_utc).and_then(|(to, column)| cast(&column, &to).ok()) else {
        // Of no type that these keys may have: the row is refused.
        let rows = rows.iter_mut().enumerate().filter(|(index, _)| column.is_valid(*index));
        if USED.contains(&name) {
            rows.for_each(|(_, row)| _ = row.insert(name.to_owned(), Value::Array(Vec::new())));
        }
        return;
    };
    let is_whole = kind.is_decimal();
    for (index, row) in rows.iter_mut().enumerate().filter(|(index, _)| values.is_valid(*index)) {
        let value = match values.data_type() {
            DataType::Utf8 => {
                let text = values.as_string::<i32>().value(index);
                let number = is_whole.then(|| text.parse::<i64>().ok()).flatten();
                number.map_or_else(|| Value::from(text), Value::from)
            }
            DataType::Int64 => Value::from(values.as_primitive::<Int64Type>().value(index)),
            DataType::UInt64 => Value::from(values.as_primitive::<UInt64Type>().value(index)),
            DataType::Boolean => Value::from(values.as_boolean().value(index)),
            _ => {
                let number = values.as_primitive::<Float64Type>().value(index);
                if number.is_nan() && !is_time_name(name) {
                    continue;
                }
                // JSON has no NaN and no infinity.
                serde_json::Number::from_f64(number).map_or_else(|| Value::from(number.to_string()), Value::Number)
            }
        };
        row.insert(name.to_owned(), value);
    }
}

/// Whether a key says where a row is in its recording. NaN is no such time; under other keys it says that there is no value, as
/// pandas writes it.
fn is_time_name(name: &str) -> bool {
    name == DURATION || STARTS.contains(&name) || ENDS.contains(&name)
}

/// The keys of the column `extra`, a JSON object, become keys of the row.
fn flatten(row: &mut Map<String, Value>) {
    let object = row.get("extra").and_then(Value::as_str);
    if let Some(Ok(Value::Object(extra))) = object.map(serde_json::from_str) {
        row.remove("extra");
        for (key, value) in extra {
            row.entry(key).or_insert(value);
        }
    }
}

/// What is made of a row.
struct Made {
    id: String,
    /// The recording as the manifest names it.
    file: String,
    path: PathBuf,
    range: Option<(u64, u64)>,
    part: Option<Part>,
    values: Map<String, Value>,
}

/// Offset and size of members of a tar, by name.
type Members = HashMap<String, (u64, u64)>;

struct Maker<'a> {
    /// The folder of the manifest.
    folder: &'a Path,
    /// Members of tars, or why there are none.
    listed: HashMap<PathBuf, Result<Members, String>>,
    /// Ids so far.
    seen: BTreeSet<String>,
    unit: Unit,
}

impl Maker<'_> {
    fn row(&mut self, storage: &Storage, mut values: Map<String, Value>) -> Result<Made, Refusal> {
        let (start, length) = place_of(&values, self.unit)?;
        let part = (start.is_some_and(|start| start > 0.0) || length.is_some()).then(|| Part {
            start: start.unwrap_or(0.0),
            seconds: length,
        });
        let member = text(&values, "tar_member_name")?.filter(|member| !member.is_empty());
        let tar = text(&values, "tar_path")?.filter(|tar| !tar.is_empty());
        let in_tar = member.is_some() && tar.is_some();
        let file = file_of(&values)?.or_else(|| (!in_tar).then(|| file_of_table(&values)).flatten());
        let place = (whole(&values, TAR_OFFSET)?, whole(&values, TAR_SIZE)?);
        let (file, path, range) = match (file, member, tar, place) {
            (Some(tar), member, _, (Some(offset), Some(size))) => (
                member.unwrap_or_else(|| tar.clone()),
                self.resolved(&tar),
                Some((offset, size)),
            ),
            (Some(file), ..) => {
                let path = self.resolved(&file);
                (file, path, None)
            }
            (None, Some(member), Some(tar), _) => {
                let (path, range) = self.member(storage, &tar, &member)?;
                (member, path, range)
            }
            _ => {
                let others = [&FILES[1..], &FILES_OF_TABLES].concat().join(", ");
                let why = format!(
                    "no key names a recording: neither {} (or {others}), nor tar_path and tar_member_name",
                    FILES[0]
                );
                return Err(refuse("missing_field", why));
            }
        };
        // An `id` of another type is not a name, as for `manifest.read`: UUIDs of a database, objects.
        let id = values.get("id").filter(|id| id.is_string() || id.is_number());
        let id = match values.get("segment_id").or(id) {
            Some(Value::String(id)) if !id.is_empty() => id.clone(),
            Some(Value::Number(id)) => id.to_string(),
            None | Some(Value::Null | Value::String(_)) => match path_of_file_url(&file) {
                Some(path) => id_of(&path.to_string_lossy(), start),
                None => id_of(&file, start),
            },
            Some(_) => return Err(refuse("bad_type", "segment_id is neither text nor a number")),
        };
        let name = safe_components(&id, "").filter(|parts| parts.iter().all(|part| part.len() <= LONGEST_NAME));
        let name =
            name.ok_or_else(|| refuse("unsafe_name", format!("{} is not a name for a transcript", shown(&id))))?;
        let name = name.join("/");
        if !self.seen.insert(name.clone()) {
            return Err(refuse(
                "duplicate_id",
                format!("{} is the id of a row before", shown(&id)),
            ));
        }
        values.remove(TAR_OFFSET);
        values.remove(TAR_SIZE);
        values.remove("audio_path");
        values.insert("segment_id".to_owned(), Value::from(id));
        if range.is_none() {
            let Some(path) = absolute(&path) else {
                return Err(refuse("unsafe_name", "the path is not UTF-8"));
            };
            values.insert("audio_filepath".to_owned(), Value::from(path));
        }
        Ok(Made {
            id: name,
            file,
            path,
            range,
            part,
            values,
        })
    }

    /// A path relative to the manifest's folder, or where nothing is there to the current one.
    fn resolved(&self, file: &str) -> PathBuf {
        if let Some(path) = path_of_file_url(file) {
            return path;
        }
        let path = Path::new(file);
        if is_url(file) || path.is_absolute() {
            return path.to_owned();
        }
        let below = self.folder.join(path);
        match !is_url(&below) && !below.exists() && path.exists() {
            true => path.to_owned(),
            false => below,
        }
    }

    /// The member of a tar: beside the tar where it was extracted to, or else in it, with its offset and size.
    fn member(&mut self, storage: &Storage, tar: &str, member: &str) -> Result<(PathBuf, Option<(u64, u64)>), Refusal> {
        if is_unsafe(member) {
            return Err(refuse("unsafe_name", format!("{member:?}")));
        }
        let tar = self.resolved(tar);
        let member = strip_dot_slash(member);
        let beside = tar.with_file_name(member);
        if !is_url(&beside) && beside.is_file() {
            return Ok((beside, None));
        }
        let listed = self.listed.entry(tar.clone());
        match listed.or_insert_with(|| members(storage, &tar).map_err(|error| error.to_string())) {
            Ok(members) => match members.get(member) {
                Some(range) => Ok((tar, Some(*range))),
                None => Err(refuse(
                    "missing_audio",
                    format!("{member:?} is not in {}", tar.display()),
                )),
            },
            Err(why) => Err(refuse(
                "missing_audio",
                format!("{member:?} in {}: {why}", tar.display()),
            )),
        }
    }
}

fn members(storage: &Storage, tar: &Path) -> io::Result<Members> {
    let file = open_input_file(storage, tar)?;
    let length = file.length()?;
    let listing = tar::list(&mut BufReader::new(file), length)?;
    let members = listing.last_of_each_name().into_iter();
    let whole = members.filter(|member| member.kind == MemberKind::Regular && !member.truncated);
    Ok(whole
        .map(|member| (member.name.clone(), (member.offset, member.size)))
        .collect())
}

fn absolute(path: &Path) -> Option<String> {
    if is_url(path) {
        return path.to_str().map(str::to_owned);
    }
    std::path::absolute(path).ok()?.to_str().map(str::to_owned)
}

/// The path without its ending, roots, `.` and `..`, and where the row begins.
fn id_of(file: &str, start: Option<f64>) -> String {
    let parts = Path::new(file).with_extension("");
    let parts = parts.components().filter_map(|part| match part {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    let name = parts.collect::<Vec<_>>().join("/");
    match start.filter(|start| *start != 0.0) {
        Some(start) => format!("{name}@{start}"),
        None => name,
    }
}

/// An id in messages.
fn shown(id: &str) -> String {
    let first: String = id.chars().take(LONGEST_NAME).collect();
    let rest = if first.len() < id.len() { "..." } else { "" };
    format!("{first:?}{rest}")
}

fn text(values: &Map<String, Value>, key: &str) -> Result<Option<String>, Refusal> {
    match values.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(refuse("bad_type", format!("{key} is not text"))),
    }
}

fn whole(values: &Map<String, Value>, key: &str) -> Result<Option<u64>, Refusal> {
    match values.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(number) => match number.as_u64() {
            Some(number) => Ok(Some(number)),
            None => Err(refuse("offset_invalid", format!("a place in a tar is {number}"))),
        },
    }
}

/// The file of a recording, by the names that manifests have for it.
fn file_of(values: &Map<String, Value>) -> Result<Option<String>, Refusal> {
    let mut file = None;
    for key in FILES {
        file = file.or(text(values, key)?.filter(|file| !file.is_empty()));
    }
    Ok(file)
}

/// The same by a name that tables have for it, where it holds a text.
fn file_of_table(values: &Map<String, Value>) -> Option<String> {
    let texts = FILES_OF_TABLES.into_iter().filter_map(|key| values.get(key)?.as_str());
    texts.filter(|file| !file.is_empty()).map(str::to_owned).next()
}

/// Where a row begins, and how long it is, in seconds, by any of the names that manifests have for that.
fn place_of(values: &Map<String, Value>, unit: Unit) -> Result<(Option<f64>, Option<f64>), Refusal> {
    let is_number = |name: &&str| values.get(*name).is_some_and(Value::is_number);
    let is_placed = STARTS.iter().any(is_number) && ENDS.iter().chain([&DURATION]).any(is_number);
    let times = values.iter().filter(|(_, value)| is_time(value));
    if let (false, Some(name)) = (is_placed, unread_among(times.map(|(name, _)| name.as_str()))) {
        return Err(refuse("unread_time", unread(name)));
    }
    // A text says something else where numbers say where the row is.
    let is_beside = |name: &str| is_placed && name != OFFSET && values.get(name).is_some_and(Value::is_string);
    let agreed = |names: &[&str]| -> Result<Option<f64>, Refusal> {
        let mut found = None;
        for name in names.iter().filter(|name| !is_beside(name)) {
            let Some(time) = seconds(values, name, "offset_invalid", 0.0)? else {
                continue;
            };
            let time = unit.seconds(name, time);
            if (*found.get_or_insert(time) - time).abs() > TOLERANCE_SECONDS {
                return Err(refuse(
                    "offset_invalid",
                    format!("{name} is {time} s, and another key differs"),
                ));
            }
        }
        Ok(found)
    };
    let (start, end) = (agreed(&STARTS)?, agreed(&ENDS)?);
    let length = seconds(values, DURATION, "duration_invalid", f64::MIN_POSITIVE)?;
    let Some(end) = end else { return Ok((start, length)) };
    let Some(begin) = start else {
        return Err(refuse(
            "missing_field",
            format!("the row ends at {end} s, but nothing says where it begins"),
        ));
    };
    let between = end - begin;
    if between <= 0.0 || length.is_some_and(|length| (length - between).abs() > TOLERANCE_SECONDS) {
        let why = match length {
            Some(length) => format!("the row is from {begin} to {end} s, but its duration is {length} s"),
            None => format!("the row is from {begin} to {end} s"),
        };
        return Err(refuse("duration_invalid", why));
    }
    Ok((start, length.or(Some(between))))
}

/// A number of seconds that is at least `least`.
fn seconds(values: &Map<String, Value>, key: &str, reason: &'static str, least: f64) -> Result<Option<f64>, Refusal> {
    let number = match values.get(key) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Number(number)) => number.as_f64(),
        // As numbers that JSON does not have are given, of its lines and of parquet files.
        Some(Value::String(text)) => text.parse().ok().filter(|number: &f64| !number.is_finite()),
        Some(_) => None,
    };
    match number {
        None => Err(refuse("bad_type", format!("{key} is not a number"))),
        Some(number) if number.is_finite() && number >= least => Ok(Some(number)),
        Some(number) => Err(refuse(reason, format!("{key} is {number} s"))),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use arrow::array::{Float64Array, StringArray};
    use parquet::arrow::ArrowWriter;

    use super::*;

    /// Whatever byte of a parquet manifest is wrong, it has all of its rows or is an error that names it.
    #[test]
    fn a_damaged_parquet_manifest_loses_no_row() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.parquet");
        let texts = |of: &str| Arc::new(StringArray::from_iter_values((0..20).map(|n| format!("{of}{n}")))) as ArrayRef;
        let columns = [
            ("segment_id", texts("s")),
            ("audio_filepath", texts("/recordings/")),
            ("duration", Arc::new(Float64Array::from(vec![1.5; 20])) as ArrayRef),
        ];
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        let manifest = path.to_str().unwrap();
        assert_eq!(rows(&Storage::default(), manifest, 0).unwrap().len(), 20);
        let whole = fs::read(&path).unwrap();
        let mut errors = 0;
        for place in 4..whole.len() {
            for flipped in [0x01, 0x82] {
                let mut damaged = whole.clone();
                damaged[place] ^= flipped;
                fs::write(&path, &damaged).unwrap();
                match rows(&Storage::default(), manifest, 0) {
                    Ok(found) => assert_eq!(found.len(), 20, "{flipped:#x} at {place}"),
                    Err(error) => {
                        assert!(error.to_string().contains("train.parquet"), "{error}");
                        errors += 1;
                    }
                }
            }
        }
        assert!(errors > whole.len() / 4, "{errors} errors of {} bytes", whole.len());
    }

    #[test]
    fn times_and_numbers_are_read_as_manifests_have_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.jsonl");
        let lines = r#"{"audio_filepath": "long.wav", "start": 2.5, "end": 4.0, "snr": NaN, "word": "NaN", "level": -Infinity}
{"audio_filepath": "long.wav", "begin": 4.0, "stop": 6.0, "duration": 2.0}
{"audio_filepath": "long.wav", "offset": 6.0, "duration": 1.0}
{"audio_filepath": "long.wav", "start": 7.0, "end": 8.0, "duration": 5.0}
{"audio_filepath": "long.wav", "end": 8.0}
{"audio_filepath": "long.wav", "start_ms": 7000}
{"audio_filepath": "long.wav", "offset": 8.0, "duration": 1.0, "start_ms": 7000, "start": "2020-01-01"}
{"audio_filepath": "long.wav", "offset": 9.0, "duration": NaN}
"#;
        fs::write(&path, lines).unwrap();
        let rows = rows(&Storage::default(), path.to_str().unwrap(), 0).unwrap();
        let parts: Vec<Option<(f64, Option<f64>)>> = rows
            .iter()
            .map(|(_, row)| row.part.as_ref().map(|part| (part.start, part.seconds)))
            .collect();
        let refused: Vec<&str> = rows
            .iter()
            .filter_map(|(_, row)| row.refused.as_ref().map(|refused| refused.reason))
            .collect();
        assert_eq!(
            parts[..3],
            [Some((2.5, Some(1.5))), Some((4.0, Some(2.0))), Some((6.0, Some(1.0)))]
        );
        assert_eq!(rows[0].0.name, "m/long@2.5");
        assert_eq!(parts[6], Some((8.0, Some(1.0))));
        assert_eq!(rows[0].1.unit, Unit::Seconds);
        let values = &rows[0].1.values;
        assert_eq!(
            [&values["snr"], &values["word"], &values["level"]],
            [&Value::Null, &Value::from("NaN"), &Value::from("-Infinity")]
        );
        assert_eq!(
            refused,
            ["duration_invalid", "missing_field", "unread_time", "duration_invalid"]
        );
    }

    #[test]
    fn recordings_are_named_by_urls_of_files_and_by_keys_of_tables() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.jsonl");
        let lines = r#"{"audio_filepath": "file:///data/a%20b.wav"}
{"path": "/data/c.wav", "sentence": "x"}
{"audio": {"path": "d.wav"}, "wav": "/data/d.wav"}
{"tar_path": "none.tar", "tar_member_name": "e.wav", "path": "/data/e.wav"}
{"path": 7}
"#;
        fs::write(&path, lines).unwrap();
        let rows = rows(&Storage::default(), path.to_str().unwrap(), 0).unwrap();
        let found: Vec<_> = rows[..3]
            .iter()
            .map(|(recording, row)| (recording.name.as_str(), recording.path.to_str().unwrap(), &row.refused))
            .collect();
        assert_eq!(
            found,
            [
                ("m/data/a b", "/data/a b.wav", &None),
                ("m/data/c", "/data/c.wav", &None),
                ("m/data/d", "/data/d.wav", &None)
            ]
        );
        assert_eq!(rows[0].1.values["audio_filepath"], "/data/a b.wav");
        // A row of a tar is none of a file.
        let refused = |row: &(Recording, Row)| row.1.refused.clone().unwrap();
        assert_eq!(refused(&rows[3]).reason, "missing_audio");
        assert_eq!(refused(&rows[4]).reason, "missing_field");
        assert!(refused(&rows[4]).detail.contains("no key names a recording"));
    }

    #[test]
    fn milliseconds_are_told_by_the_length_of_recordings() {
        let folder = tempfile::tempdir().unwrap();
        // Ten seconds.
        fs::write(
            folder.path().join("long.wav"),
            crate::test_data::wav(16_000, &[0; 160_000]),
        )
        .unwrap();
        let path = folder.path().join("m.jsonl");
        let lines = r#"{"audio_filepath": "long.wav", "start": 0, "end": 2500}
{"audio_filepath": "long.wav", "begin": 2500, "stop": 7000, "duration": 4.5}
{"audio_filepath": "long.wav", "offset": 7, "duration": 1}
"#;
        fs::write(&path, lines).unwrap();
        let rows = rows(&Storage::default(), path.to_str().unwrap(), 0).unwrap();
        let parts: Vec<_> = rows
            .iter()
            .map(|(_, row)| row.part.as_ref().map(|part| (part.start, part.seconds)))
            .collect();
        assert_eq!(
            parts,
            [Some((0.0, Some(2.5))), Some((2.5, Some(4.5))), Some((7.0, Some(1.0)))]
        );
        assert!(rows.iter().all(|(_, row)| row.unit == Unit::Milliseconds));
    }

    #[test]
    fn columns_without_a_value_and_of_whole_decimals() {
        use arrow::array::{Date32Array, Decimal128Array, ListArray, NullArray, TimestampSecondArray};
        use arrow::datatypes::Int32Type;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.parquet");
        let ids = [12_345_678_901_234_567_890_123i128, 12_345_678_901_234_567_890_124, 7];
        let ids = Decimal128Array::from_iter_values(ids)
            .with_precision_and_scale(30, 0)
            .unwrap();
        let lists = ListArray::from_iter_primitive::<Int32Type, _, _>(vec![Some(vec![Some(1)]); 3]);
        let columns = [
            ("id", Arc::new(ids) as ArrayRef),
            ("audio_filepath", Arc::new(StringArray::from(vec!["/a.wav"; 3]))),
            ("offset", Arc::new(NullArray::new(3))),
            (
                "duration",
                Arc::new(
                    Decimal128Array::from(vec![2; 3])
                        .with_precision_and_scale(9, 0)
                        .unwrap(),
                ),
            ),
            ("day", Arc::new(Date32Array::from(vec![20_000; 3]))),
            ("list", Arc::new(lists)),
            ("snr", Arc::new(Float64Array::from(vec![f64::NAN, f64::INFINITY, 2.5]))),
            // Of a zone that this program does not know.
            (
                "time",
                Arc::new(TimestampSecondArray::from(vec![5; 3]).with_timezone("Nowhere/Land")),
            ),
        ];
        let batch =
            RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true))).unwrap();
        let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        let rows = rows(&Storage::default(), path.to_str().unwrap(), 0).unwrap();
        let names: Vec<&str> = rows.iter().map(|(recording, _)| recording.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "train/12345678901234567890123",
                "train/12345678901234567890124",
                "train/7"
            ]
        );
        for (_, row) in &rows {
            assert_eq!(row.refused, None);
            assert_eq!(row.part.as_ref().and_then(|part| part.seconds), Some(2.0));
            assert_eq!(row.values["day"], "2024-10-04");
            assert_eq!(row.values["time"], "1970-01-01T00:00:05Z");
            assert!(!row.values.contains_key("list"));
        }
        let snr = rows.iter().map(|(_, row)| row.values.get("snr").cloned());
        assert_eq!(
            snr.collect::<Vec<_>>(),
            [None, Some(Value::from("inf")), Some(Value::from(2.5))]
        );
    }
}
