//! Manifests as NeMo reads them: one JSON object to a line.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Component, Path, PathBuf};

use flow_runtime::{Artifact, StageError};
use serde::Serialize;

use crate::columns::{self, MANIFEST_COLUMNS};
use crate::error::ManifestError;
use crate::keys::partition_order;
use crate::names::strip_dot_slash;
use crate::read::shard_folders;

#[derive(Serialize)]
struct Line<'r> {
    audio_filepath: String,
    duration: f64,
    text: &'r str,
    lang: &'r str,
    segment_id: &'r str,
    shard_id: &'r str,
    tar_member_name: &'r str,
    tar_path: &'r str,
    source: &'r str,
}

/// Where extracted recordings are, as `audio.extract` places them.
pub struct Extracted<'s> {
    /// Empty: beside the tars.
    pub audio: &'s Path,
    /// The folder that the manifest will lie in.
    pub out: &'s Path,
}

impl Extracted<'_> {
    /// The recording of a member: as it is where it is absolute, otherwise relative to the manifest's folder, which is how
    /// NeMo reads it.
    fn path(&self, tar_path: &str, member: &str) -> Result<String, StageError> {
        let member = strip_dot_slash(member);
        let path = match (self.audio.as_os_str().is_empty(), shard_folders(tar_path)) {
            (false, Some((lang, shard))) => self.audio.join(lang).join(shard).join(member),
            _ => Path::new(tar_path).parent().unwrap_or(Path::new("")).join(member),
        };
        let path = seen_from(self.out, &path).map_err(|e| ManifestError::io(&path, e))?;
        path.into_os_string()
            .into_string()
            .map_err(|path| StageError::failed(format!("{}: the path is not UTF-8", path.display())))
    }
}

/// `path` (from the current directory) as it is called from within `folder`.
fn seen_from(folder: &Path, path: &Path) -> std::io::Result<PathBuf> {
    if path.is_absolute() {
        return Ok(path.to_path_buf());
    }
    let mut up = PathBuf::new();
    for part in folder.components() {
        match part {
            Component::Normal(_) => up.push(".."),
            Component::CurDir => {}
            // What lies above is not known by name.
            _ => return std::path::absolute(path),
        }
    }
    let plain: PathBuf = path.components().filter(|part| *part != Component::CurDir).collect();
    Ok(up.join(plain))
}

/// Writes all rows of `artifact`, in the order of the parquet manifest. `tar_path` gets `shards` before it.
///
/// # Errors
/// When a duration is no number, or the file cannot be written.
pub fn write_lines(
    artifact: &Artifact,
    shards: impl Fn(&str) -> String,
    extracted: &Extracted<'_>,
    path: &Path,
) -> Result<(), StageError> {
    let failed = |e| ManifestError::io(path, e);
    let mut file = BufWriter::new(File::create(path).map_err(failed)?);
    let mut partitions: Vec<_> = artifact.partitions().collect();
    partitions.sort_by(|a, b| partition_order(a, b));
    for partition in partitions {
        for batch in artifact.read(partition, Some(&MANIFEST_COLUMNS))? {
            let batch = batch?;
            let text = |name| columns::text(&batch, name);
            let (ids, shard_ids, texts, langs) = (text("segment_id")?, text("shard_id")?, text("text")?, text("lang")?);
            let (members, tars, sources) = (text("tar_member_name")?, text("tar_path")?, text("source")?);
            let durations = columns::number(&batch, "duration")?;
            for row in 0..batch.num_rows() {
                let tar_path = shards(tars.value(row));
                let line = Line {
                    audio_filepath: extracted.path(&tar_path, members.value(row))?,
                    duration: durations.value(row),
                    text: texts.value(row),
                    lang: langs.value(row),
                    segment_id: ids.value(row),
                    shard_id: shard_ids.value(row),
                    tar_member_name: members.value(row),
                    tar_path: &tar_path,
                    source: sources.value(row),
                };
                if !line.duration.is_finite() {
                    let message = format!(
                        "{partition}: the duration of {} is {} s",
                        line.segment_id, line.duration
                    );
                    return Err(StageError::failed(message));
                }
                serde_json::to_writer(&mut file, &line).map_err(StageError::failed)?;
                file.write_all(b"\n").map_err(failed)?;
            }
        }
    }
    file.flush().map_err(failed)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_seen_from_the_manifest() {
        let call = |audio: &str, out: &str| {
            let extracted = Extracted {
                audio: Path::new(audio),
                out: Path::new(out),
            };
            extracted.path("s/hi/hi_1/hi_1.tar", "./a/b.flac").unwrap()
        };
        assert_eq!(call("", "work/out"), "../../s/hi/hi_1/a/b.flac");
        assert_eq!(call("./audio", "./out"), "../audio/hi/hi_1/a/b.flac");
        assert_eq!(call("/data/audio", "out"), "/data/audio/hi/hi_1/a/b.flac");
        let here = std::env::current_dir().unwrap();
        assert_eq!(
            call("audio", "/out"),
            here.join("audio/hi/hi_1/a/b.flac").to_str().unwrap()
        );
        assert_eq!(
            call("audio", "../out"),
            here.join("audio/hi/hi_1/a/b.flac").to_str().unwrap()
        );
    }
}
