//! The packings with which the steps of a training run were planned, from its checkpoints.
//!
//! Which rows make which batch follows from the number of ranks and of micro-batches. When training continues with
//! another number, the current epoch ends as it was planned, so that every row of it comes once; later epochs are
//! planned with the new number.

use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::plan::Packing;

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
    /// checkpoint can be read: training then begins, or reports the error.
    pub fn history(checkpoints: &Path, ranks: u32, grad_accum: u32) -> Vec<Planned> {
        #[derive(Deserialize)]
        struct Record {
            step: u64,
            #[serde(default)]
            plans: Vec<Planned>,
        }
        let numbered = |folder: &Path, prefix: &str| {
            let mut found: Vec<(u64, std::path::PathBuf)> = std::fs::read_dir(folder)
                .into_iter()
                .flatten()
                .flatten()
                .filter_map(|entry| {
                    let number = entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok()?;
                    Some((number, entry.path()))
                })
                .collect();
            found.sort();
            found.into_iter().map(|(_, path)| path).rev()
        };
        // The newest of the folders in which training was begun anew, or the folder itself.
        let folder = numbered(checkpoints, "restart-").next();
        let folder = folder.as_deref().unwrap_or(checkpoints);
        let read = |checkpoint: std::path::PathBuf| {
            let text = std::fs::read(checkpoint.join("training.json")).ok()?;
            serde_json::from_slice::<Record>(&text).ok()
        };
        let Some(Record { step, mut plans }) = numbered(folder, "step-").find_map(read) else {
            return Vec::new();
        };
        Planned::note(&mut plans, step, ranks, grad_accum);
        plans
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_checkpoint_tells() {
        let folder = tempfile::tempdir().unwrap();
        let history = |ranks| Planned::history(folder.path(), ranks, 3);
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
}
