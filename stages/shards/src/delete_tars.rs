//! The kind `audio.delete_tars`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use arrow::array::{Array, AsArray};
use arrow::datatypes::{DataType, Int64Type};
use flow_kind::store::{has_tombstone, remove_source};
use flow_kind::{
    Artifact, Body, ColumnType, Context, Export, ExportSet, InputCount, InputPort, Inputs, Kind, OutputPort, Partition,
    RejectSet, Shape, StageError, UrlUse,
};
use flow_storage::{InputFile, Storage, is_url};
use rayon::ThreadPool;
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::extract::{Member, members_by_name};
use crate::probe::decoding_pool;
use crate::shards::Shard;
use flow_audio::decode::{read_file, read_open_range};
use flow_audio::format::Format;
use flow_audio::member_name::strip_dot_slash;
use flow_audio::recording;
use flow_audio::tar;

/// Deletes the tars whose wanted recordings were extracted.
///
/// # What it does
///
/// The input `members` is the port of `audio.probe`; all others, under names of your own, are the rows of every
/// `audio.extract` that takes recordings from those tars (name them all, or recordings that an extraction still needs
/// are lost). It runs when all of them are committed. A tar is deleted only if
///
/// - at least one of its members was extracted, and no row was refused as `unsafe_path` or `name_taken`;
/// - its members are where `audio.probe` found them;
/// - every extracted file has the size that was committed, decodes, and has the samples that `audio.probe`
///   hashed; a copy also has the bytes of its member;
/// - these files are flushed to the disk, so that they survive a power failure.
///
/// The note `<shard_id>.tar.flow-removed` replaces the tar and keeps its digest: for `audio.probe` the tar counts as
/// unchanged, and results computed from it are reused. Members that no row wanted are lost. Rows of an `audio.extract`
/// with `store: tar` need their tars and are refused as input.
///
/// `tars.jsonl` in the folder `out` lists each tar as `deleted` or `kept`, with the reason.
///
/// # Example
///
/// ```yaml
/// tars:
///   uses: audio.delete_tars
///   from: {members: probe.members, train: train_audio, val: val_audio}
///   with: {shards: /corpus/shards, out: /data/audio}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeleteTarsSettings {
    /// Folder that holds `<lang>/<shard_id>/` folders.
    pub shards: PathBuf,
    /// Folder that receives `tars.jsonl`.
    pub out: PathBuf,
}

const LIST: &str = "tars.jsonl";
const EXTRACTED: [(&str, DataType); 3] = [
    ("tar_member_name", DataType::Utf8),
    ("audio_path", DataType::Utf8),
    ("audio_bytes", DataType::Int64),
];

pub struct DeleteTars;

impl Kind for DeleteTars {
    const NAME: &'static str = "audio.delete_tars";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::whole("members", "the port `members` of an audio.probe").columns(&[
            ("name", ColumnType::Any),
            ("status", ColumnType::Any),
            ("offset", ColumnType::Any),
            ("size", ColumnType::Any),
            ("audio_hash", ColumnType::Any),
            ("stored", ColumnType::Any),
        ]),
        InputPort::whole(
            "extracted",
            "rows of an audio.extract; each one under a name of its own",
        )
        .count(InputCount::Many),
    ];
    const OUTPUTS: &'static [OutputPort] = &[];
    /// Refused by `shape`, so that a pipeline in which the stage is switched off may read and write in object storage.
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[("shards", UrlUse::Text), ("out", UrlUse::Text)];
    type Settings = DeleteTarsSettings;

    fn shape(settings: &DeleteTarsSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        for (name, folder) in [("shards", &settings.shards), ("out", &settings.out)] {
            if is_url(folder) {
                let message = "tars are deleted from folders of this machine, and listed in one; this is a URL";
                return Err(StageError::setting(name, message));
            }
        }
        for input in inputs.of("extracted") {
            let has = |name: &str| input.schema.field_with_name(name).is_ok();
            if !has("audio_path") && has("tar_path") && has("offset") {
                return Err(StageError::input(
                    input.name.clone(),
                    format!(
                        "`{}` leaves its recordings in the tars, so that they are needed",
                        input.name
                    ),
                ));
            }
            for (name, data_type) in &EXTRACTED {
                let found = input.schema.field_with_name(name).ok();
                if found.is_none_or(|field| field.data_type() != data_type) {
                    let message = format!("`{}` has no column `{name}` of type {data_type}", input.name);
                    return Err(StageError::input(input.name.clone(), message)
                        .with_help("the rows of an audio.extract are needed"));
                }
            }
        }
        Ok(Shape {
            needs_current: true,
            ..Shape::export()
        })
    }

    fn open(settings: &DeleteTarsSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Export(Box::new(Deleter {
            settings: settings.clone(),
            pool: decoding_pool(context)?,
            context: context.clone(),
        })))
    }

    /// Without the paths of the tars and the list.
    fn identity(_: &DeleteTarsSettings) -> serde_json::Value {
        serde_json::json!({"delete": true})
    }
}

struct Deleter {
    settings: DeleteTarsSettings,
    pool: ThreadPool,
    context: Context,
}

/// One extracted file.
struct Extracted {
    name: String,
    path: PathBuf,
    bytes: u64,
}

#[derive(Serialize)]
struct Line<'a> {
    partition: &'a str,
    status: &'static str,
    why: String,
    bytes: u64,
}

impl Export for Deleter {
    fn folder(&self) -> PathBuf {
        self.settings.out.clone()
    }

    fn manifest(&self) -> String {
        "tars.json".into()
    }

    fn write(&mut self, set: &mut ExportSet) -> Result<(), StageError> {
        let members = self.context.required("members")?;
        let extracted: Vec<&Artifact> = self.context.whole("extracted").map(|(_, rows)| rows).collect();
        let unplaced = unplaced(&self.context.rejects)?;
        let path = set.file(LIST).map_err(StageError::failed)?;
        let failed = |error: std::io::Error| StageError::failed(format!("cannot write {}: {error}", path.display()));
        let mut list = BufWriter::new(File::create(&path).map_err(failed)?);
        for partition in members.partitions() {
            let (status, why, bytes) = self.partition(partition, members, &extracted, &unplaced)?;
            let line = Line {
                partition: partition.as_str(),
                status,
                why,
                bytes,
            };
            serde_json::to_writer(&mut list, &line).map_err(StageError::failed)?;
            list.write_all(b"\n").map_err(failed)?;
        }
        list.flush().map_err(failed)
    }
}

/// Partitions with rows whose recordings an extraction could not place.
fn unplaced(rejects: &RejectSet) -> Result<BTreeSet<Partition>, StageError> {
    let mut found = BTreeSet::new();
    for reject in rejects.iter() {
        let (_, partition, reject) = reject?;
        if ["unsafe_path", "name_taken"].contains(&reject.reason.as_str()) {
            found.insert(partition);
        }
    }
    Ok(found)
}

impl Deleter {
    fn partition(
        &self,
        partition: &Partition,
        members: &Artifact,
        extracted: &[&Artifact],
        unplaced: &BTreeSet<Partition>,
    ) -> Result<(&'static str, String, u64), StageError> {
        let kept = |why: &str| Ok(("kept", why.to_owned(), 0));
        let shard = Shard::named(&self.settings.shards, partition.as_str())
            .ok_or_else(|| StageError::failed(format!("`{partition}` is not the name of a shard")))?;
        let tar = shard.tar();
        if has_tombstone(&tar) {
            return Ok(("deleted", "earlier".into(), 0));
        }
        if !tar.is_file() {
            return kept("there is no tar");
        }
        if unplaced.contains(partition) {
            return kept("a recording could not be placed");
        }
        let batches: Vec<_> = members.read(partition, None)?.collect::<Result<_, _>>()?;
        let found = members_by_name(&batches)?;
        let files = files_of(partition, extracted)?;
        if files.is_empty() {
            return kept("nothing of it was extracted");
        }
        let doubt = || doubt(&self.context.storage, &tar, &found, &files).or_else(|| unflushed(&files, bring_to_disk));
        if let Some(why) = self.pool.install(doubt) {
            return kept(&why);
        }
        let bytes = remove_source(&tar).map_err(StageError::failed)?;
        Ok(("deleted", String::new(), bytes))
    }
}

fn files_of(partition: &Partition, extracted: &[&Artifact]) -> Result<Vec<Extracted>, StageError> {
    let mut files: BTreeMap<PathBuf, Extracted> = BTreeMap::new();
    let columns: Vec<&str> = EXTRACTED.iter().map(|(name, _)| *name).collect();
    for artifact in extracted {
        if artifact.rows_of(partition).is_none() {
            continue;
        }
        for batch in artifact.read(partition, Some(&columns))? {
            let batch = batch?;
            let (names, paths) = (batch.column(0).as_string::<i32>(), batch.column(1).as_string::<i32>());
            let sizes = batch.column(2).as_primitive::<Int64Type>();
            for row in 0..batch.num_rows() {
                let name = if names.is_null(row) { "" } else { names.value(row) };
                let path = PathBuf::from(paths.value(row));
                let extracted = Extracted {
                    name: strip_dot_slash(name).to_owned(),
                    path: path.clone(),
                    bytes: u64::try_from(sizes.value(row)).unwrap_or_default(),
                };
                files.insert(path, extracted);
            }
        }
    }
    Ok(files.into_values().collect())
}

/// Why the tar is still needed; none if it is not.
fn doubt(storage: &Storage, tar_path: &Path, members: &HashMap<String, Member>, files: &[Extracted]) -> Option<String> {
    let cannot_read = |error: std::io::Error| Some(format!("it cannot be read: {error}"));
    let tar = match File::open(tar_path) {
        Ok(tar) => tar,
        Err(error) => return cannot_read(error),
    };
    let listed = tar.metadata().and_then(|about| {
        let mut reader = BufReader::with_capacity(512, &tar);
        tar::list(&mut reader, about.len())
    });
    let listing = match listed {
        Ok(listing) => listing,
        Err(error) => return cannot_read(error),
    };
    let last = listing.last_of_each_name();
    let unchanged = last.len() == members.len()
        && last.iter().all(|member| {
            let probed = members.get(&member.name);
            probed.is_some_and(|probed| (probed.offset, probed.size) == (member.offset, member.size))
        });
    if !unchanged {
        return Some("it changed since it was probed".into());
    }
    let tar = InputFile::Local(tar);
    // The first in the order of the files, whichever thread finds one.
    let doubts: Vec<String> = files
        .par_iter()
        .filter_map(|file| file_doubt(storage, &tar, tar_path, members, file))
        .collect();
    doubts.into_iter().next()
}

/// Why the files may not survive a power failure; none once `flush` has flushed all of them, and then one folder of
/// each file system. An extraction that was killed may have left files unflushed, which the next one reused.
fn unflushed(files: &[Extracted], flush: impl Fn(&Path) -> io::Result<()> + Sync) -> Option<String> {
    let failed = |path: &Path, error| format!("{} cannot be brought to the disk: {error}", path.display());
    let failures: Vec<String> = files
        .par_iter()
        .filter_map(|file| flush(&file.path).err().map(|error| failed(&file.path, error)))
        .collect();
    if let Some(first) = failures.into_iter().next() {
        return Some(first);
    }
    let mut systems: BTreeMap<u64, &Path> = BTreeMap::new();
    for folder in files.iter().filter_map(|file| file.path.parent()) {
        match folder.metadata() {
            Ok(about) => systems.entry(about.dev()).or_insert(folder),
            Err(error) => return Some(failed(folder, error)),
        };
    }
    systems
        .into_values()
        .find_map(|folder| flush(folder).err().map(|error| failed(folder, error)))
}

/// For a folder: syncs its whole file system.
fn bring_to_disk(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    if file.metadata()?.is_dir() {
        rustix::fs::syncfs(&file).map_err(io::Error::from)
    } else {
        file.sync_all()
    }
}

fn file_doubt(
    storage: &Storage,
    tar: &InputFile,
    tar_path: &Path,
    members: &HashMap<String, Member>,
    file: &Extracted,
) -> Option<String> {
    let path = file.path.display();
    let Some(member) = members.get(&file.name).filter(|member| member.status == "ok") else {
        return Some(format!("{path}: `audio.probe` knows no good member of its name"));
    };
    if !member.in_tar {
        return Some("its recordings were not taken from the tar".into());
    }
    let plain = std::fs::symlink_metadata(&file.path).is_ok_and(|about| about.is_file() && about.len() == file.bytes);
    if !plain {
        return Some(format!("{path} does not exist with {} bytes", file.bytes));
    }
    let bytes = match read_file(storage, &file.path) {
        Ok(bytes) => bytes,
        Err(error) => return Some(error.to_string()),
    };
    match recording::probe(&bytes, &Format::ALL) {
        Ok((_, verdict)) if verdict.audio_hash == member.audio_hash => {}
        Ok(_) => return Some(format!("{path} has other samples than its member")),
        Err(fault) => return Some(format!("{path}: {fault}")),
    }
    // A file that was encoded has other bytes; a copy has the same.
    let encoded = !member.is_flac && bytes.starts_with(flow_audio::flac::MARKER);
    match read_open_range(tar, tar_path, member.offset, member.size) {
        Ok(original) if encoded || original == bytes => None,
        Ok(_) => Some(format!("{path} has other bytes than its member")),
        Err(error) => Some(error.to_string()),
    }
}

#[cfg(test)]
#[path = "delete_tars_tests.rs"]
mod tests;
