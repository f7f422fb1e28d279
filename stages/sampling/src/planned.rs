//! The packings with which the steps of a training run were planned, from its checkpoints.
//!
//! Which rows make which batch follows from the number of ranks and of micro-batches. When training continues with
//! another number, the current epoch ends as it was planned, so that every row of it comes once; later epochs are
//! planned with the new number.

use std::path::{Path, PathBuf};

use flow_kind::store::checked_json;
use flow_storage::{Location, ObjectUrl, Storage, StorageError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::plan::Packing;

/// What is read of the record of a checkpoint.
#[derive(Deserialize)]
struct Record {
    step: u64,
    #[serde(default)]
    plans: Vec<Planned>,
}

/// The file of a checkpoint that has its record.
const RECORD: &str = "training.json";

/// A record that is longer is none.
const LONGEST_RECORD: u64 = 64 << 20;

/// For how many ranks, and micro-batches of each, the steps from `from_step` on were planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Planned {
    pub from_step: u64,
    pub ranks: u32,
    pub grad_accum: u32,
}

impl Planned {
    /// Adds the packing of the steps from `step` on, if it differs from the last one.
    pub fn note(plans: &mut Vec<Planned>, step: u64, ranks: u32, grad_accum: u32) {
        let same = |last: &Planned| (last.ranks, last.grad_accum) == (ranks, grad_accum);
        if !plans.last().is_some_and(same) {
            plans.push(Planned {
                from_step: step,
                ranks,
                grad_accum,
            });
        }
    }

    /// The packing of an epoch that begins at a step.
    pub fn packing(plans: &[Planned], packing: &Packing, step: u64) -> Packing {
        match plans.iter().rev().find(|planned| planned.from_step <= step) {
            None => packing.clone(),
            Some(planned) => Packing {
                world_size: planned.ranks,
                grad_accum: planned.grad_accum,
                ..packing.clone()
            },
        }
    }

    /// The packings recorded in the newest checkpoint below `checkpoints`, followed by the present one. Empty if no
    /// checkpoint can be read: training then begins, or reports the error. Of a URL the newest counts of those in the bucket
    /// and of those on this machine that are copied there.
    ///
    /// # Errors
    /// If the bucket cannot be read.
    pub fn history(
        storage: &Storage,
        checkpoints: &Path,
        ranks: u32,
        grad_accum: u32,
    ) -> Result<Vec<Planned>, StorageError> {
        let newest = match Location::of_path(checkpoints)? {
            Location::Local(folder) => newest(&folder),
            Location::Object(url) => {
                let here = newest(&storage.working_folder(&url)?);
                let there = newest_object(storage, &url)?;
                let place = |found: &(u64, Record)| (found.0, found.1.step);
                here.into_iter().chain(there).max_by_key(place)
            }
        };
        let Some((_, Record { step, mut plans })) = newest else {
            return Ok(Vec::new());
        };
        Planned::note(&mut plans, step, ranks, grad_accum);
        Ok(plans)
    }
}

/// The newest checkpoint of a folder that can be read, and the number of the restart that it belongs to (0: none).
fn newest(checkpoints: &Path) -> Option<(u64, Record)> {
    let numbered = |folder: &Path, prefix: &str| {
        let mut found: Vec<(u64, PathBuf)> = std::fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| {
                let number = entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok()?;
                Some((number, entry.path()))
            })
            .collect();
        found.sort();
        found.into_iter().rev()
    };
    // The newest of the folders in which training was begun anew, or the folder itself.
    let folder = numbered(checkpoints, "restart-").next();
    let (restart, folder) = folder.unwrap_or((0, checkpoints.to_owned()));
    let read = |(_, checkpoint): (u64, PathBuf)| {
        let text = std::fs::read(checkpoint.join(RECORD)).ok()?;
        Some((restart, record_of(&text)?))
    };
    numbered(&folder, "step-").find_map(read)
}

/// None where it is damaged: training then goes on from an earlier checkpoint.
fn record_of(text: &[u8]) -> Option<Record> {
    let checked = checked_json(Path::new(RECORD), text).ok()?;
    serde_json::from_slice(&checked).ok()
}

/// As [`newest`], of a prefix.
fn newest_object(storage: &Storage, url: &ObjectUrl) -> Result<Option<(u64, Record)>, StorageError> {
    let number = |name: &str, prefix: &str| name.strip_prefix(prefix)?.parse::<u64>().ok();
    let mut found: Vec<((u64, u64), _)> = storage
        .list(url)?
        .into_iter()
        .filter_map(|entry| {
            let parts: Vec<&str> = entry.url.below(url)?.split('/').collect();
            let place = match parts[..] {
                [step, RECORD] => (0, number(step, "step-")?),
                [restart, step, RECORD] => (number(restart, "restart-")?, number(step, "step-")?),
                _ => return None,
            };
            (entry.stat.size <= LONGEST_RECORD).then_some((place, entry))
        })
        .collect();
    found.sort_by_key(|(place, _)| *place);
    for ((restart, _), entry) in found.into_iter().rev() {
        let text = storage.read_range(&entry.url, 0..entry.stat.size, &entry.stat)?;
        if let Some(record) = record_of(&text) {
            return Ok(Some((restart, record)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_checkpoint_tells() {
        let folder = tempfile::tempdir().unwrap();
        let history = |ranks| Planned::history(&Storage::default(), folder.path(), ranks, 3).unwrap();
        let planned = |from_step, ranks| Planned {
            from_step,
            ranks,
            grad_accum: 3,
        };
        assert_eq!(history(2), []);
        let write = |name: &str, text: &str| {
            let checkpoint = folder.path().join(name);
            std::fs::create_dir_all(&checkpoint).unwrap();
            std::fs::write(checkpoint.join("training.json"), text).unwrap();
        };
        let plans = r#"[{"from_step":0,"ranks":4,"grad_accum":3},{"from_step":7,"ranks":2,"grad_accum":3}]"#;
        write("step-000000009", &format!(r#"{{"step":9,"other":1,"plans":{plans}}}"#));
        write("step-000000004", r#"{"step":4}"#);
        assert_eq!(history(2), [planned(0, 4), planned(7, 2)]);
        assert_eq!(history(1), [planned(0, 4), planned(7, 2), planned(9, 1)]);
        // Checkpoints that cannot be read are skipped, and so are folders of other names.
        write("step-000000012", "{");
        write("damaged-step-000000015", r#"{"step":15}"#);
        assert_eq!(history(2).len(), 2);
        write("restart-001/step-000000001", r#"{"step":1}"#);
        assert_eq!(history(5), [planned(1, 5)]);
        let packing = Packing::default();
        let at = |step| Planned::packing(&history(5), &packing, step).world_size;
        assert_eq!((at(0), at(1), at(100)), (packing.world_size, 5, 5));
    }

    #[test]
    fn the_newest_checkpoint_of_a_bucket_tells() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join("bucket/run").join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("step-000000004/training.json", r#"{"step":4,"other":1}"#);
        write("step-000000009/training.json", "{");
        // One that is incomplete.
        write("restart-001/step-000000002/model.safetensors", "weights");
        let server = flow_storage_testing::TestServer::start(folder.path()).unwrap();
        let newest = |text: &str| {
            let Ok(Location::Object(url)) = Location::parse(text) else {
                panic!("{text} is not a URL")
            };
            let found = newest_object(&server.storage(), &url).unwrap();
            found.map(|(restart, record)| (restart, record.step))
        };
        assert_eq!(newest("s3://bucket/run"), Some((0, 4)));
        write("restart-001/step-000000001/training.json", r#"{"step":1}"#);
        assert_eq!(newest("s3://bucket/run"), Some((1, 1)));
        assert_eq!(newest("s3://bucket/none"), None);
    }
}
