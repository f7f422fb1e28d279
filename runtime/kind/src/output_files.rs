//! Files that a local stage writes into a folder of the user's or into object storage, some for each partition: written, told as
//! rows, and looked after when the next run is planned.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use flow_storage::{Location, ObjectUrl, Storage};

use flow_base::digest::Digest;
use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_base::regular_file::read_regular_file;
use flow_base::row_number::ROW;
use flow_store::{Artifact, Batches, on_threads, write_atomically};

use crate::kind::{Conservation, Port, Shape};

/// The file of notes in a stage's scratch folder.
const NOTES: &str = "output_files.jsonl";

/// A larger file of notes is started anew: notes matter only for the few files that no record names yet.
const MOST_NOTES: u64 = 1 << 20;

/// A file to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputFile {
    /// The name of its format, for the rows.
    pub format: &'static str,
    /// In object storage its URL.
    pub path: PathBuf,
    pub bytes: Vec<u8>,
}

/// Columns of the rows: `_row, format, path, bytes, digest`, and `etag` where `out`, which the files go to, is a URL.
pub fn schema(out: &Path) -> SchemaRef {
    let mut fields = vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("format", DataType::Utf8, false),
        Field::new("path", DataType::Utf8, false),
        Field::new("bytes", DataType::Int64, false),
        Field::new("digest", DataType::Utf8, false),
    ];
    if flow_storage::is_url(out) {
        fields.push(Field::new("etag", DataType::Utf8, true));
    }
    Arc::new(Schema::new(fields))
}

/// The shape of a local stage that writes files of `formats` into `out`, with one port `files`.
///
/// # Errors
/// When there are no formats, or no folder.
pub fn shape<F>(formats: &[F], out: &Path) -> Result<Shape, StageError> {
    if formats.is_empty() {
        let message = "`formats` is empty, so that nothing would be written";
        return Err(StageError::setting("formats", message));
    }
    if out.as_os_str().is_empty() {
        return Err(StageError::setting("out", "`out` names no folder"));
    }
    Ok(Shape {
        expensive: true,
        conservation: Conservation::NewRows,
        ..Shape::local(vec![Port::new("files", schema(out))])
    })
}

/// Writes the files of a partition, each as a whole, into `out` or below it, and gives a row for each. Files of `kept`, which
/// somebody has edited, get a row alone. The files are noted in `scratch`, the stage's [scratch folder](crate::Context::scratch),
/// before: [`Notes`] tells them from files of others when the process is killed before the rows are committed.
///
/// # Errors
/// When a path is not UTF-8, or a file or a folder above it cannot be written.
pub fn write(
    storage: &Storage,
    kept: &BTreeSet<PathBuf>,
    files: &[OutputFile],
    out: &Path,
    scratch: &Path,
) -> Result<RecordBatch, StageError> {
    let mut paths = Vec::with_capacity(files.len());
    let mut locations = Vec::with_capacity(files.len());
    for file in files {
        let location = Location::of_path(&file.path).map_err(StageError::failed)?;
        let path = location.to_path();
        let path = path.to_str().ok_or_else(|| {
            let message = format!(
                "{} is not UTF-8, as names of files in tables must be",
                file.path.display()
            );
            StageError::failed(message).with_help("give the folder another name")
        })?;
        paths.push(path.to_owned());
        locations.push(location);
    }
    let digests: Vec<String> = files.iter().map(|file| Digest::of(&file.bytes).to_hex()).collect();
    // Without the note the files would be taken for those of others, which costs a question, no file.
    let _ = note(
        scratch,
        paths.iter().map(String::as_str).zip(digests.iter().map(String::as_str)),
    );
    let mut etags = Vec::with_capacity(files.len());
    for (file, location) in files.iter().zip(&locations) {
        etags.push(match location {
            Location::Local(path) => {
                if !kept.contains(path) {
                    write_file(path, &file.bytes)?;
                }
                None
            }
            Location::Object(url) => write_object(storage, url, &file.bytes)?,
        });
    }
    let rows = UInt32Array::from_iter_values((0..).take(files.len()));
    let formats = files.iter().map(|file| file.format);
    // Lengths of what is in memory are below 2^63.
    let sizes = files.iter().map(|file| file.bytes.len() as i64);
    let schema = schema(out);
    let mut columns: Vec<ArrayRef> = vec![
        Arc::new(rows),
        Arc::new(StringArray::from_iter_values(formats)),
        Arc::new(StringArray::from(paths)),
        Arc::new(Int64Array::from_iter_values(sizes)),
        Arc::new(StringArray::from(digests)),
    ];
    if schema.fields().len() > columns.len() {
        columns.push(Arc::new(StringArray::from(etags)));
    }
    Ok(RecordBatch::try_new(schema, columns)?)
}

/// Writes an object, and gives its ETag.
fn write_object(storage: &Storage, url: &ObjectUrl, bytes: &[u8]) -> Result<Option<String>, StageError> {
    let put = storage.put(url, bytes.to_vec()).and_then(|()| storage.stat(url));
    let stat = put.map_err(|error| StageError::failed(error).with_help("a rerun goes on here"))?;
    Ok(stat.etag)
}

/// Appends paths and digests of files to the notes, if the folder is there.
fn note<'a>(scratch: &Path, files: impl Iterator<Item = (&'a str, &'a str)>) -> std::io::Result<()> {
    if !scratch.is_dir() {
        return Ok(());
    }
    let mut text = String::new();
    for file in files {
        // A last line that was cut short does not spoil this one.
        text.push('\n');
        text.push_str(&serde_json::to_string(&file)?);
    }
    text.push('\n');
    let path = scratch.join(NOTES);
    let mut notes = OpenOptions::new().create(true).append(true).open(path)?;
    if notes.metadata()?.len() > MOST_NOTES {
        notes.set_len(0)?;
    }
    notes.write_all(text.as_bytes())?;
    notes.sync_data()
}

/// The files that a stage was about to write, from the notes in its scratch folder.
#[derive(Debug, Default)]
pub struct Notes(BTreeSet<(PathBuf, String)>);

impl Notes {
    /// Those in a stage's scratch folder; none where there are no notes or they cannot be read.
    pub fn read(scratch: &Path) -> Notes {
        let text = std::fs::read(scratch.join(NOTES)).unwrap_or_default();
        let lines = text.split(|byte| *byte == b'\n');
        Notes(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect())
    }

    /// Whether the notes hold this path, spelled as it was noted, with the digest of the bytes that the file has now.
    pub fn hold(&self, storage: &Storage, path: &Path) -> bool {
        let known = self.0.range((path.to_owned(), String::new())..);
        let known: Vec<&str> = known
            .take_while(|(noted, _)| noted == path)
            .map(|(_, digest)| digest.as_str())
            .collect();
        if known.is_empty() {
            return false;
        }
        read_regular_file(storage, path).is_ok_and(|bytes| known.contains(&Digest::of(&bytes).to_hex().as_str()))
    }
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), StageError> {
    let help = "check the space and the permissions of the folder; a rerun goes on here";
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|error| {
            StageError::failed(format!("cannot make the folder {}: {error}", folder.display())).with_help(help)
        })?;
    }
    write_atomically(path, bytes).map_err(|error| StageError::failed(error).with_help(help))
}

/// The partitions of which a file in `out` or below it is gone or changed, but for files of `kept`, with the reason: what a
/// kind's `missing_outputs` gives. Files are read by up to `threads` threads; in object storage, one listing has size and ETag of
/// all.
///
/// # Errors
/// When the rows cannot be read, or object storage cannot be listed.
pub fn missing(
    storage: &Storage,
    kept: &BTreeSet<PathBuf>,
    committed: &Artifact,
    out: &Path,
    threads: usize,
) -> Result<BTreeMap<Partition, String>, StageError> {
    let objects = Objects::of(storage, out)?;
    let columns: &[&str] = match objects {
        Some(_) => &["path", "bytes", "etag"],
        None => &["path", "digest"],
    };
    with_faults(committed, columns, threads, |batches| {
        for batch in batches {
            let missing = match &objects {
                Some(objects) => objects.missing(&batch?)?,
                None => missing_file(kept, &batch?)?,
            };
            if missing.is_some() {
                return Ok(missing);
            }
        }
        Ok(None)
    })
}

/// The partitions with files that are gone or have another size than was committed, with the first such file and the number of
/// others. `columns` have the path of a file, from the folder `below` if it is relative, and its size in bytes. If `out` is in
/// object storage, one listing has the sizes of all.
///
/// # Errors
/// When the rows cannot be read, or object storage cannot be listed.
pub fn missing_by_size(
    storage: &Storage,
    committed: &Artifact,
    columns: [&str; 2],
    out: &Path,
    below: &Path,
    threads: usize,
) -> Result<BTreeMap<Partition, String>, StageError> {
    let objects = Objects::of(storage, out)?;
    with_faults(committed, &columns, threads, |batches| {
        let (mut first, mut count) = (None, 0u64);
        for batch in batches {
            let batch = batch?;
            let (paths, sizes) = (batch.column(0).as_string_opt::<i32>(), batch.column(1));
            let (Some(paths), Some(sizes)) = (paths, sizes.as_primitive_opt::<Int64Type>()) else {
                return Err(other_columns());
            };
            for (path, size) in paths.iter().zip(sizes).filter_map(|(path, size)| path.zip(size)) {
                let fault = match &objects {
                    Some(objects) => objects.fault(path, size, None),
                    None => fault_of_file(&below.join(path), size),
                };
                let Some(fault) = fault else { continue };
                count += 1;
                first.get_or_insert(fault);
            }
        }
        Ok(first.map(|first| match count {
            1 => first,
            count => format!("{first} (and {} others)", count - 1),
        }))
    })
}

/// What is wrong with a file that was written with this many bytes.
fn fault_of_file(path: &Path, size: i64) -> Option<String> {
    let path_text = path.display();
    match std::fs::symlink_metadata(path) {
        Ok(file) if file.is_file() && i64::try_from(file.len()) == Ok(size) => None,
        Ok(file) if file.is_file() => Some(format!("{path_text} has {} bytes instead of {size}", file.len())),
        _ => Some(format!("{path_text} is gone")),
    }
}

fn other_columns() -> StageError {
    StageError::failed("the rows of written files have other columns")
}

/// The partitions in which `fault` finds something wrong, with what it says. It is given the rows of one partition, of `columns`
/// alone, on one of up to `threads` threads.
///
/// # Errors
/// Those of `fault`, and when rows cannot be read.
fn with_faults(
    committed: &Artifact,
    columns: &[&str],
    threads: usize,
    fault: impl Fn(Batches) -> Result<Option<String>, StageError> + Sync,
) -> Result<BTreeMap<Partition, String>, StageError> {
    let partitions: Vec<&Partition> = committed.partitions().collect();
    let found = on_threads(&partitions, threads, |partition| {
        let fault = fault(committed.read(partition, Some(columns))?)?;
        Ok(fault.map(|fault| ((*partition).clone(), fault)))
    });
    found.into_iter().filter_map(Result::transpose).collect()
}

/// Objects below a prefix, as a listing has them: size and ETag by URL.
#[derive(Debug, Default)]
struct Objects(HashMap<String, (u64, Option<String>)>);

impl Objects {
    /// Those below `out`; none if it is a folder.
    fn of(storage: &Storage, out: &Path) -> Result<Option<Objects>, StageError> {
        let Location::Object(url) = Location::of_path(out).map_err(StageError::failed)? else {
            return Ok(None);
        };
        let listed = storage.list(&url).map_err(StageError::failed)?;
        let object = |entry: flow_storage::Entry| (entry.url.to_string(), (entry.stat.size, entry.stat.etag));
        Ok(Some(Objects(listed.into_iter().map(object).collect())))
    }

    /// What is wrong with an object that was written with this many bytes and, where that is known, this ETag.
    fn fault(&self, url: &str, bytes: i64, etag: Option<&str>) -> Option<String> {
        let Some((size, found)) = self.0.get(url) else {
            return Some(format!("{url} is gone"));
        };
        if i64::try_from(*size) != Ok(bytes) {
            return Some(format!("{url} has {size} bytes instead of {bytes}"));
        }
        match (etag, found) {
            (Some(etag), Some(found)) if etag != found => {
                Some(format!("{url} is another than the one that was written"))
            }
            _ => None,
        }
    }

    /// Of the first row, by the columns `path`, `bytes` and `etag`.
    fn missing(&self, rows: &RecordBatch) -> Result<Option<String>, StageError> {
        let text = |name: &str| rows.column_by_name(name)?.as_string_opt::<i32>();
        let sizes = rows.column_by_name("bytes");
        let sizes = sizes.and_then(|sizes| sizes.as_primitive_opt::<Int64Type>());
        let (Some(paths), Some(etags), Some(sizes)) = (text("path"), text("etag"), sizes) else {
            return Err(other_columns());
        };
        let fault = |row: usize| {
            let etag = etags.is_valid(row).then(|| etags.value(row));
            self.fault(paths.value(row), sizes.value(row), etag)
        };
        Ok((0..rows.num_rows()).find_map(fault))
    }
}

/// What is wrong with the first file that is not as it was written: it may have been rewritten by a run with other
/// settings; files of `kept` do not count. `files` has the columns `path` and `digest`.
///
/// # Errors
/// When it has others.
fn missing_file(kept: &BTreeSet<PathBuf>, files: &RecordBatch) -> Result<Option<String>, StageError> {
    let texts = |name: &str| {
        files
            .column_by_name(name)
            .and_then(|column| column.as_string_opt::<i32>())
    };
    let (Some(paths), Some(digests)) = (texts("path"), texts("digest")) else {
        return Err(other_columns());
    };
    let files = paths.iter().zip(digests).filter_map(|(path, digest)| path.zip(digest));
    let mut files = files.filter(|(path, _)| !kept.contains(Path::new(path)));
    Ok(files.find_map(|(path, digest)| match std::fs::read(path) {
        Ok(text) if Digest::of(&text).to_hex() == digest => None,
        Ok(_) => Some(format!("{path} is another than the one that was written")),
        Err(_) => Some(format!("{path} is gone")),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_missed_when_it_is_gone_or_changed() {
        let place = tempfile::tempdir().unwrap();
        let file = |name: &str| OutputFile {
            format: "txt",
            path: place.path().join(name),
            bytes: b"hello\n".to_vec(),
        };
        let rows = write(
            &Storage::default(),
            &BTreeSet::new(),
            &[file("below/a.txt"), file("b.txt")],
            place.path(),
            place.path(),
        )
        .unwrap();
        let none = BTreeSet::new();
        assert_eq!((rows.num_rows(), rows.schema()), (2, schema(place.path())));
        assert_eq!(
            std::fs::read_to_string(place.path().join("below/a.txt")).unwrap(),
            "hello\n"
        );
        assert_eq!(missing_file(&none, &rows).unwrap(), None);
        // Another text of the same length.
        std::fs::write(place.path().join("b.txt"), "hullo\n").unwrap();
        let why = missing_file(&none, &rows).unwrap().unwrap();
        assert!(why.ends_with("b.txt is another than the one that was written"), "{why}");
        std::fs::remove_file(place.path().join("below/a.txt")).unwrap();
        assert!(missing_file(&none, &rows).unwrap().unwrap().ends_with("a.txt is gone"));
        assert!(missing_file(&none, &rows.project(&[0]).unwrap()).is_err());
        // A file stands where a folder should be.
        std::fs::write(place.path().join("file"), "").unwrap();
        let error = write(
            &Storage::default(),
            &BTreeSet::new(),
            &[file("file/c.txt")],
            place.path(),
            place.path(),
        )
        .unwrap_err()
        .to_string();
        assert!(error.contains("cannot make the folder"), "{error}");
    }

    #[test]
    fn a_file_that_is_kept_is_neither_written_nor_missed() {
        let place = tempfile::tempdir().unwrap();
        let file = |name: &str| OutputFile {
            format: "txt",
            path: place.path().join(name),
            bytes: b"new\n".to_vec(),
        };
        let edited = place.path().join("a.txt");
        std::fs::write(&edited, "edited\n").unwrap();
        let kept = BTreeSet::from([edited]);
        let files = [file("a.txt"), file("b.txt")];
        let rows = write(&Storage::default(), &kept, &files, place.path(), Path::new("")).unwrap();
        let read = |name: &str| std::fs::read_to_string(place.path().join(name)).unwrap();
        assert_eq!(
            (read("a.txt"), read("b.txt")),
            ("edited\n".to_owned(), "new\n".to_owned())
        );
        let partitions = vec![(Partition::new("x"), vec![rows])];
        let committed = Artifact::in_memory(schema(place.path()), partitions).unwrap();
        assert!(
            missing(&Storage::default(), &kept, &committed, place.path(), 1)
                .unwrap()
                .is_empty()
        );
        // Once it is no longer kept, it is.
        assert_eq!(
            missing(&Storage::default(), &BTreeSet::new(), &committed, place.path(), 1)
                .unwrap()
                .len(),
            1
        );
    }

    #[test]
    fn partitions_of_missing_files_are_named_by_any_number_of_threads() {
        let place = tempfile::tempdir().unwrap();
        let mut partitions = Vec::new();
        for number in 0..20 {
            let name = format!("{number:02}");
            let file = OutputFile {
                format: "txt",
                path: place.path().join(&name),
                bytes: name.clone().into_bytes(),
            };
            let rows = write(
                &Storage::default(),
                &BTreeSet::new(),
                &[file],
                place.path(),
                Path::new(""),
            )
            .unwrap();
            partitions.push((Partition::new(&name), vec![rows]));
        }
        let committed = Artifact::in_memory(schema(place.path()), partitions).unwrap();
        std::fs::remove_file(place.path().join("07")).unwrap();
        std::fs::write(place.path().join("11"), "12").unwrap();
        for threads in [1, 4] {
            let missing = missing(&Storage::default(), &BTreeSet::new(), &committed, place.path(), threads).unwrap();
            let named: Vec<&str> = missing.keys().map(Partition::as_str).collect();
            assert_eq!(named, ["07", "11"]);
            assert!(missing[&Partition::new("07")].ends_with("is gone"));
        }
    }

    #[test]
    fn files_are_noted_before_they_are_written() {
        let (place, scratch) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = |name: &str, text: &str| OutputFile {
            format: "txt",
            path: place.path().join(name),
            bytes: text.as_bytes().to_vec(),
        };
        assert!(!Notes::read(scratch.path()).hold(&Storage::default(), &place.path().join("a")));
        // The second cannot be written.
        std::fs::create_dir(place.path().join("b")).unwrap();
        write(
            &Storage::default(),
            &BTreeSet::new(),
            &[file("a", "one"), file("b", "two")],
            place.path(),
            scratch.path(),
        )
        .unwrap_err();
        let holds = |name: &str| Notes::read(scratch.path()).hold(&Storage::default(), &place.path().join(name));
        assert!(holds("a") && !holds("b") && !holds("c"));
        // Another program writes there later.
        std::fs::write(place.path().join("a"), "other").unwrap();
        assert!(!holds("a"));
        // A line that was cut short, and many lines.
        let notes = scratch.path().join(NOTES);
        std::fs::write(&notes, b"\n[\"x\", \"").unwrap();
        write(
            &Storage::default(),
            &BTreeSet::new(),
            &[file("a", "three")],
            place.path(),
            scratch.path(),
        )
        .unwrap();
        assert!(holds("a"));
        std::fs::write(&notes, vec![b'\n'; MOST_NOTES as usize + 1]).unwrap();
        write(
            &Storage::default(),
            &BTreeSet::new(),
            &[file("a", "four")],
            place.path(),
            scratch.path(),
        )
        .unwrap();
        assert!(holds("a") && std::fs::metadata(&notes).unwrap().len() < 1000);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_path_that_is_no_text_is_refused() {
        use std::os::unix::ffi::OsStrExt;
        let place = tempfile::tempdir().unwrap();
        let file = OutputFile {
            format: "txt",
            path: place.path().join(std::ffi::OsStr::from_bytes(b"\xff")).join("a"),
            bytes: Vec::new(),
        };
        let error = write(
            &Storage::default(),
            &BTreeSet::new(),
            &[file],
            place.path(),
            place.path(),
        )
        .unwrap_err()
        .to_string();
        assert!(error.contains("is not UTF-8"), "{error}");
    }
}
