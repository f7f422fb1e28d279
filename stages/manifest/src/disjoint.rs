//! The kind `manifest.disjoint`.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use arrow::array::{Array, AsArray, Float64Array, Int64Array, LargeStringArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type, Int64Type, SchemaRef};
use flow_kind::{
    Artifact, Body, ColumnType, Conservation, Context, InputPort, Inputs, Kind, Out, OutputPort, Partition, Port, ROW,
    ReadOnce, Shape, Source, SourcePartition, StageError, WithShared,
};
use flow_text::language_tag::untagged;
use flow_text::normalize::norm_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::keys::{ByKey, Key};

/// Rows that are named in the error.
const EXAMPLES: usize = 3;

/// What two rows may have in common.
const SHARED: [&str; 3] = ["segment", "text", "recording"];

/// Checks that training and validation have nothing in common, and gives the validation rows.
///
/// # What it does
///
/// `val` are the rows of validation, `train` those of training; both are read whole. The rows of validation pass
/// unchanged, if none of them has in training
///
/// - its segment: the same language, shard, `segment_id` and duration (to the millisecond),
/// - its text: the same words, without the language tag, whatever their case, Unicode form and zero-width characters,
/// - its recording: the same `audio_path` (links count as what they lead to, and all names of one file as one) and, in a tar, `offset`.
///
/// Otherwise it is an error that says how many have and names some. What is empty or missing in a row is compared with nothing.
///
/// # Example
///
/// ```yaml
/// held_out:
///   uses: manifest.disjoint
///   from: {val: val_rows, train: train_rows}
/// train:
///   uses: training.train
///   from: {batches: load, validation: held_out}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DisjointSettings {
    /// Continue with a warning instead of an error.
    pub allow_overlap: bool,
    /// What the message calls the rows of `val`.
    pub called: String,
}

impl Default for DisjointSettings {
    fn default() -> Self {
        DisjointSettings {
            allow_overlap: false,
            called: "validation".into(),
        }
    }
}

pub struct Disjoint;

impl Kind for Disjoint {
    const NAME: &'static str = "manifest.disjoint";
    const VERSION: u32 = 3;
    const INPUTS: &'static [InputPort] = &[
        InputPort::whole("val", "rows of validation").columns(&[
            (ROW, ColumnType::UInt32),
            ("segment_id", ColumnType::Text),
            ("text", ColumnType::Text),
        ]),
        InputPort::whole("train", "rows of training")
            .columns(&[("segment_id", ColumnType::Text), ("text", ColumnType::Text)]),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "the rows of validation, as they came")];
    /// Shared: whether the rows were compared.
    type Settings = WithShared<DisjointSettings, ReadOnce<()>>;

    fn shape(_: &Self::Settings, inputs: &Inputs) -> Result<Shape, StageError> {
        let val = inputs.required("val")?;
        let port = Port::new("rows", val.schema.clone());
        Ok(Shape {
            needs_current: true,
            conservation: Conservation::Rows,
            ..Shape::source(vec![port])
        })
    }

    fn open(settings: &Self::Settings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(Comparer {
            settings: settings.clone(),
            context: context.clone(),
        })))
    }

    /// Without `called`, which is only for messages.
    fn identity(settings: &Self::Settings) -> serde_json::Value {
        serde_json::json!({ "allow_overlap": settings.allow_overlap })
    }
}

struct Comparer {
    settings: WithShared<DisjointSettings, ReadOnce<()>>,
    context: Context,
}

impl Comparer {
    /// Once for all partitions and workers.
    fn compare(&self) -> Result<(), StageError> {
        let (val, train) = (self.context.required("val")?, self.context.required("train")?);
        let of = format!("{} {}", val.digest().to_hex(), train.digest().to_hex());
        self.settings.shared.get(&of, || {
            let Some(found) = overlap(val, train)? else {
                return Ok(());
            };
            let called = &self.settings.called;
            let message = found.message(called);
            if !self.settings.allow_overlap {
                let help = format!(
                    "error rates on rows that were learned say nothing: take rows of training and {called} that have nothing in \
                     common, such as those of one split, or set `allow_overlap` if this is meant"
                );
                return Err(StageError::refused(message, help));
            }
            self.context.warn(message);
            Ok(())
        })?;
        Ok(())
    }
}

impl Source for Comparer {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let partition = |name: &Partition| SourcePartition::new(name.clone(), Vec::new(), "");
        Ok(self.context.required("val")?.partitions().map(partition).collect())
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        self.compare()?;
        for batch in self.context.required("val")?.read(partition, None)? {
            let batch = batch?;
            out.read(batch.num_rows() as u64);
            out.send(0, batch);
        }
        Ok(())
    }
}

/// The overlap of validation with training.
#[derive(Debug, PartialEq)]
pub struct Overlap {
    /// Rows of validation, and those of them that have something in training.
    pub rows: u64,
    pub in_training: u64,
    /// How many of them have their segment, their text, their recording in training.
    pub by: [u64; SHARED.len()],
    /// Some of them: `segment_id`, what is shared, and the `segment_id` in training.
    pub examples: Vec<(String, &'static str, String)>,
}

impl Overlap {
    /// The message about it; `called` are the rows that were compared with those of training.
    fn message(&self, called: &str) -> String {
        let by = SHARED
            .iter()
            .zip(self.by)
            .map(|(what, rows)| format!("{rows} by their {what}"));
        let examples = self.examples.iter().map(|(val, what, train)| match *what {
            "segment" => format!("{val:?}"),
            what => format!("{val:?} has the {what} of {train:?}"),
        });
        let has_more = self.in_training as usize > self.examples.len();
        format!(
            "{} of {} rows of {called} are also in training ({}): {}{}",
            self.in_training,
            self.rows,
            by.collect::<Vec<_>>().join(", "),
            examples.collect::<Vec<_>>().join(", "),
            if has_more { ", ..." } else { "" }
        )
    }
}

/// Rows of validation that have something in common with rows of training; none, if there are none. Memory goes with
/// the rows of validation, not with those of training.
///
/// # Errors
/// When rows cannot be read.
pub fn overlap(val: &Artifact, train: &Artifact) -> Result<Option<Overlap>, StageError> {
    let mut known: [ByKey<Found>; SHARED.len()] = Default::default();
    each_row(val, |rows, row, keys| {
        for (known, key) in known.iter_mut().zip(keys) {
            if let Some(key) = key {
                known.entry(key).or_default().val.push(rows.number(row));
            }
        }
    })?;
    let mut any = false;
    each_row(train, |rows, row, keys| {
        for (known, key) in known.iter_mut().zip(keys) {
            if let Some(found) = key.and_then(|key| known.get_mut(&key))
                && found.train.is_none()
            {
                found.train = Some(rows.segment_ids.value(row).to_string());
                any = true;
            }
        }
    })?;
    if !any {
        return Ok(None);
    }
    let mut overlap = Overlap {
        rows: val.rows(),
        in_training: 0,
        by: [0; SHARED.len()],
        examples: Vec::new(),
    };
    // By row: what it shares first, and with which training row.
    let mut shared: BTreeMap<u64, (&'static str, String)> = BTreeMap::new();
    for (place, known) in known.into_iter().enumerate() {
        for Found { val, train } in known.into_values() {
            let Some(train) = train else { continue };
            overlap.by[place] += val.len() as u64;
            for row in val {
                shared.entry(row).or_insert_with(|| (SHARED[place], train.clone()));
            }
        }
    }
    overlap.in_training = shared.len() as u64;
    each_row(val, |rows, row, _| {
        if overlap.examples.len() < EXAMPLES
            && let Some((what, train)) = shared.remove(&rows.number(row))
        {
            let segment_id = rows.segment_ids.value(row).to_string();
            overlap.examples.push((segment_id, what, train));
        }
    })?;
    Ok(Some(overlap))
}

/// The rows that have a key.
#[derive(Default)]
struct Found {
    /// Rows of validation, by number.
    val: Vec<u64>,
    /// The first row of training, by `segment_id`.
    train: Option<String>,
}

/// One batch of rows.
struct Rows {
    /// Number of its first row among all.
    first: u64,
    segment_ids: LargeStringArray,
    shard_ids: LargeStringArray,
    langs: LargeStringArray,
    texts: LargeStringArray,
    paths: LargeStringArray,
    durations: Float64Array,
    offsets: Int64Array,
}

impl Rows {
    fn of(batch: &RecordBatch, first: u64) -> Result<Rows, StageError> {
        let column = |name: &str, data_type: DataType| match batch.column_by_name(name) {
            Some(column) => cast(column, &data_type),
            None => Ok(arrow::array::new_null_array(&data_type, batch.num_rows())),
        };
        let text = |name| column(name, DataType::LargeUtf8).map(|column| column.as_string::<i64>().clone());
        Ok(Rows {
            first,
            segment_ids: text("segment_id")?,
            shard_ids: text("shard_id")?,
            langs: text("lang")?,
            texts: text("text")?,
            paths: text("audio_path")?,
            durations: column("duration", DataType::Float64)?
                .as_primitive::<Float64Type>()
                .clone(),
            offsets: column("offset", DataType::Int64)?.as_primitive::<Int64Type>().clone(),
        })
    }

    fn number(&self, row: usize) -> u64 {
        self.first + row as u64
    }

    fn keys(&self, row: usize, files: &mut Files) -> [Option<Key>; SHARED.len()] {
        // Empty where it is null.
        let of = |column: &LargeStringArray| match column.is_valid(row) {
            true => column.value(row).to_string(),
            false => String::new(),
        };
        let segment_id = of(&self.segment_ids);
        let milliseconds = self
            .durations
            .is_valid(row)
            .then(|| (self.durations.value(row) * 1e3).round());
        let segment = (!segment_id.is_empty()).then(|| {
            let duration = milliseconds.unwrap_or(f64::NAN).to_string();
            key(&[&of(&self.langs), &of(&self.shard_ids), &segment_id, &duration])
        });
        let text = of(&self.texts);
        let words = norm_text(untagged(&text));
        let path = of(&self.paths);
        let recording = (!path.is_empty()).then(|| {
            let offset = self.offsets.is_valid(row).then(|| self.offsets.value(row).to_string());
            key(&[&files.resolved(Path::new(&path)), &offset.unwrap_or_default()])
        });
        [segment, (!words.is_empty()).then(|| key(&[&words])), recording]
    }
}

/// A 128-bit hash of a list of texts.
fn key(parts: &[&str]) -> Key {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher
            .update(&(part.len() as u64).to_le_bytes())
            .update(part.as_bytes());
    }
    let mut key = Key::default();
    key.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    key
}

/// Identifies files independent of the path that leads to them; caches the last folder and the last file.
#[derive(Default)]
struct Files {
    folder: Option<(PathBuf, PathBuf)>,
    file: Option<(PathBuf, String)>,
}

impl Files {
    /// The path without links. A file that has several names (hard links) is known by its device and inode.
    fn resolved(&mut self, file: &Path) -> String {
        if let Some((known, resolved)) = &self.file
            && known == file
        {
            return resolved.clone();
        }
        let resolved = self.resolve(file);
        self.file = Some((file.to_path_buf(), resolved.clone()));
        resolved
    }

    fn resolve(&mut self, file: &Path) -> String {
        let shown = |path: &Path| path.to_string_lossy().into_owned();
        match std::fs::symlink_metadata(file) {
            Ok(found) if found.is_symlink() => {
                if let Ok(target) = file.canonicalize() {
                    return match std::fs::metadata(&target) {
                        Ok(found) if found.nlink() > 1 => inode(&found),
                        _ => shown(&target),
                    };
                }
            }
            Ok(found) if found.is_file() && found.nlink() > 1 => return inode(&found),
            _ => {}
        }
        let folder = match file.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        if self.folder.as_ref().is_none_or(|(known, _)| known != folder) {
            // A folder that does not exist is compared by its name.
            let found = folder.canonicalize().or_else(|_| std::path::absolute(folder));
            self.folder = Some((folder.to_path_buf(), found.unwrap_or_else(|_| folder.to_path_buf())));
        }
        let folder = self.folder.as_ref().map_or(folder, |(_, resolved)| resolved.as_path());
        shown(&folder.join(file.file_name().unwrap_or_default()))
    }
}

fn inode(found: &std::fs::Metadata) -> String {
    format!("inode {} {}", found.dev(), found.ino())
}

/// Gives every row, in the order of the partitions, with what it is compared by.
fn each_row(
    artifact: &Artifact,
    mut each: impl FnMut(&Rows, usize, [Option<Key>; SHARED.len()]),
) -> Result<(), StageError> {
    let schema: &SchemaRef = artifact.schema();
    let columns: Vec<&str> = [
        "segment_id",
        "shard_id",
        "lang",
        "text",
        "audio_path",
        "duration",
        "offset",
    ]
    .into_iter()
    .filter(|name| schema.column_with_name(name).is_some())
    .collect();
    let (mut first, mut files) = (0, Files::default());
    for batch in artifact.batches(Some(columns.as_slice())) {
        let (_, batch) = batch?;
        let rows = Rows::of(&batch, first)?;
        for row in 0..batch.num_rows() {
            let keys = rows.keys(row, &mut files);
            each(&rows, row, keys);
        }
        first += batch.num_rows() as u64;
    }
    Ok(())
}

#[cfg(test)]
#[path = "disjoint_tests.rs"]
mod tests;

#[cfg(test)]
mod file_tests {
    use super::*;

    #[test]
    fn a_file_is_the_same_by_all_its_names() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        for name in ["a", "b"] {
            std::fs::create_dir(at(name)).expect("a folder");
            std::fs::write(at(name).join("r.wav"), name).expect("a file");
        }
        std::os::unix::fs::symlink(at("a/r.wav"), at("link.wav")).expect("a link");
        std::os::unix::fs::symlink(at("a"), at("folder")).expect("a link");
        let mut files = Files::default();
        let mut resolved = |name: &str| files.resolved(&at(name));
        assert_eq!(resolved("link.wav"), resolved("a/r.wav"));
        assert_eq!(resolved("folder/r.wav"), resolved("a/r.wav"));
        assert_ne!(resolved("b/r.wav"), resolved("a/r.wav"));
        assert_ne!(resolved("a/gone.wav"), resolved("b/gone.wav"));
        std::fs::hard_link(at("b/r.wav"), at("other.wav")).expect("a link");
        let mut files = Files::default();
        let mut resolved = |name: &str| files.resolved(&at(name));
        assert_eq!(resolved("other.wav"), resolved("b/r.wav"));
        assert_ne!(resolved("other.wav"), resolved("a/r.wav"));
    }
}
