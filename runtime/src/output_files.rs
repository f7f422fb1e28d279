//! Files that a local stage writes into a folder of the user, for each partition: writing them, the rows that describe
//! them, and the check for missing or changed files when the next run is planned.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{AsArray, Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};

use crate::digest::Digest;
use crate::error::StageError;
use crate::partition::Partition;
use crate::row_number::ROW;
use crate::store::{Artifact, on_threads, write_atomically};

/// The file of notes in a stage's scratch folder.
const NOTES: &str = "output_files.jsonl";

/// A larger file of notes is started anew: notes matter only for the few files that no record names yet.
const MOST_NOTES: u64 = 1 << 20;

/// A file to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputFile {
    /// The name of its format, for the rows.
    pub format: &'static str,
    pub path: PathBuf,
    pub bytes: Vec<u8>,
}

/// Columns of the rows: `_row, format, path, bytes, digest`.
pub fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("format", DataType::Utf8, false),
        Field::new("path", DataType::Utf8, false),
        Field::new("bytes", DataType::Int64, false),
        Field::new("digest", DataType::Utf8, false),
    ]))
}

/// Writes the files of a partition, each atomically, and gives a row for each. They are noted in `scratch`, the stage's
/// [scratch folder](crate::Context::scratch), first: if the process is killed before the rows are committed, [`Notes`]
/// distinguishes them from files of other programs.
///
/// # Errors
/// When a path is not UTF-8, or a file or a folder above it cannot be written.
pub fn write(files: &[OutputFile], scratch: &Path) -> Result<RecordBatch, StageError> {
    let mut paths = Vec::with_capacity(files.len());
    for file in files {
        let path = file.path.to_str().ok_or_else(|| {
            let message = format!(
                "{} is not UTF-8, as names of files in tables must be",
                file.path.display()
            );
            StageError::failed(message).with_help("give the folder another name")
        })?;
        paths.push(path);
    }
    let digests: Vec<String> = files.iter().map(|file| Digest::of(&file.bytes).to_hex()).collect();
    // Without the note the files would be taken for those of another program; none is lost by that.
    let _ = note(scratch, paths.iter().copied().zip(digests.iter().map(String::as_str)));
    for file in files {
        write_file(&file.path, &file.bytes)?;
    }
    let rows = UInt32Array::from_iter_values((0..).take(files.len()));
    let formats = files.iter().map(|file| file.format);
    // Lengths of what is in memory are below 2^63.
    let sizes = files.iter().map(|file| file.bytes.len() as i64);
    Ok(RecordBatch::try_new(
        schema(),
        vec![
            Arc::new(rows),
            Arc::new(StringArray::from_iter_values(formats)),
            Arc::new(StringArray::from(paths)),
            Arc::new(Int64Array::from_iter_values(sizes)),
            Arc::new(StringArray::from(digests)),
        ],
    )?)
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
    pub fn hold(&self, path: &Path) -> bool {
        let known = self.0.range((path.to_owned(), String::new())..);
        let known: Vec<&str> = known
            .take_while(|(noted, _)| noted == path)
            .map(|(_, digest)| digest.as_str())
            .collect();
        if known.is_empty() {
            return false;
        }
        std::fs::read(path).is_ok_and(|bytes| known.contains(&Digest::of(&bytes).to_hex().as_str()))
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

/// The partitions of which a file is gone or changed, with the reason: what a kind's `missing_outputs` gives. The files are
/// read by up to `threads` threads.
///
/// # Errors
/// When the rows cannot be read.
pub fn missing(committed: &Artifact, threads: usize) -> Result<BTreeMap<Partition, String>, StageError> {
    let partitions: Vec<&Partition> = committed.partitions().collect();
    let why = on_threads(&partitions, threads, |partition| {
        for batch in committed.read(partition, Some(&["path", "digest"]))? {
            if let Some(why) = missing_file(&batch?)? {
                return Ok(Some(((*partition).clone(), why)));
            }
        }
        Ok(None)
    });
    why.into_iter().filter_map(Result::transpose).collect()
}

/// Describes the first file that is missing or changed (a run with other settings may have overwritten it). `files` has
/// the columns `path` and `digest`.
///
/// # Errors
/// When it has others.
pub fn missing_file(files: &RecordBatch) -> Result<Option<String>, StageError> {
    let texts = |name: &str| {
        files
            .column_by_name(name)
            .and_then(|column| column.as_string_opt::<i32>())
    };
    let (Some(paths), Some(digests)) = (texts("path"), texts("digest")) else {
        return Err(StageError::failed("the rows of written files have other columns"));
    };
    let mut files = paths.iter().zip(digests).filter_map(|(path, digest)| path.zip(digest));
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
        let rows = write(&[file("below/a.txt"), file("b.txt")], place.path()).unwrap();
        assert_eq!((rows.num_rows(), rows.schema()), (2, schema()));
        assert_eq!(
            std::fs::read_to_string(place.path().join("below/a.txt")).unwrap(),
            "hello\n"
        );
        assert_eq!(missing_file(&rows).unwrap(), None);
        // Another text of the same length.
        std::fs::write(place.path().join("b.txt"), "hullo\n").unwrap();
        let why = missing_file(&rows).unwrap().unwrap();
        assert!(why.ends_with("b.txt is another than the one that was written"), "{why}");
        std::fs::remove_file(place.path().join("below/a.txt")).unwrap();
        assert!(missing_file(&rows).unwrap().unwrap().ends_with("a.txt is gone"));
        assert!(missing_file(&rows.project(&[0]).unwrap()).is_err());
        // A file stands where a folder should be.
        std::fs::write(place.path().join("file"), "").unwrap();
        let error = write(&[file("file/c.txt")], place.path()).unwrap_err().to_string();
        assert!(error.contains("cannot make the folder"), "{error}");
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
            let rows = write(&[file], Path::new("")).unwrap();
            partitions.push((Partition::new(&name), vec![rows]));
        }
        let committed = Artifact::in_memory(schema(), partitions).unwrap();
        std::fs::remove_file(place.path().join("07")).unwrap();
        std::fs::write(place.path().join("11"), "12").unwrap();
        for threads in [1, 4] {
            let missing = missing(&committed, threads).unwrap();
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
        assert!(!Notes::read(scratch.path()).hold(&place.path().join("a")));
        // The second cannot be written.
        std::fs::create_dir(place.path().join("b")).unwrap();
        write(&[file("a", "one"), file("b", "two")], scratch.path()).unwrap_err();
        let holds = |name: &str| Notes::read(scratch.path()).hold(&place.path().join(name));
        assert!(holds("a") && !holds("b") && !holds("c"));
        // Another program writes there later.
        std::fs::write(place.path().join("a"), "other").unwrap();
        assert!(!holds("a"));
        // A line that was cut short, and many lines.
        let notes = scratch.path().join(NOTES);
        std::fs::write(&notes, b"\n[\"x\", \"").unwrap();
        write(&[file("a", "three")], scratch.path()).unwrap();
        assert!(holds("a"));
        std::fs::write(&notes, vec![b'\n'; MOST_NOTES as usize + 1]).unwrap();
        write(&[file("a", "four")], scratch.path()).unwrap();
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
        let error = write(&[file], place.path()).unwrap_err().to_string();
        assert!(error.contains("is not UTF-8"), "{error}");
    }
}
