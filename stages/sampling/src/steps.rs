//! Which micro-batches make which optimizer step, over all epochs.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use flow_kind::Digest;
use flow_kind::store::{read_note, write_note};
use serde::{Deserialize, Serialize};

use crate::error::SamplingError;
use crate::manifest_rows::ManifestRows;
use crate::plan::{BatchPlan, Packing};
use crate::planned::Planned;

/// Steps of all epochs. An epoch is planned when one of its steps is requested. The number of steps of each planned
/// epoch is noted in a file, since it is only known by planning.
pub struct Steps {
    packing: Packing,
    /// For how many ranks epochs are planned, by the step of the run at which they begin; empty: as `packing` says.
    plans: Vec<Planned>,
    /// Steps of the run before the first of these.
    first: u64,
    /// The file of notes; losing it only costs time.
    notes: Option<PathBuf>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Steps of each epoch that was planned so far.
    per_epoch: Vec<u64>,
    /// The plans used last; two, since workers may be on both sides of an epoch's end.
    recent: Vec<(u64, Arc<BatchPlan>)>,
}

#[derive(Serialize, Deserialize)]
struct Notes {
    version: u32,
    steps_per_epoch: Vec<u64>,
}

/// One optimizer step.
#[derive(Clone, Debug)]
pub struct Step {
    pub epoch: u64,
    /// Which step of the epoch it is.
    pub in_epoch: u64,
    pub ranks: u32,
    /// Micro-batches of each rank.
    pub grad_accum: u32,
    plan: Arc<BatchPlan>,
}

impl Step {
    /// Row numbers of a micro-batch of this step; none where `rank` or `micro` is too large.
    pub fn micro_batch(&self, rank: u32, micro: u32) -> Option<&[u32]> {
        if micro >= self.grad_accum {
            return None;
        }
        let place = self.in_epoch * u64::from(self.grad_accum) + u64::from(micro);
        self.plan.batch(rank, usize::try_from(place).ok()?)
    }
}

impl Steps {
    /// `data` is a digest of the rows, which the notes are kept under. `first` steps of the run come before these.
    pub fn new(packing: Packing, plans: &[Planned], first: u64, data: &str, notes_folder: Option<PathBuf>) -> Self {
        let mut key = serde_json::to_string(&packing).unwrap_or_default();
        if !plans.is_empty() {
            key.push_str(&format!("{plans:?} {first}"));
        }
        let name = format!(
            "epochs-{}.json",
            Digest::of_parts([data.as_bytes(), key.as_bytes()]).short()
        );
        let notes = notes_folder.map(|folder| folder.join(name));
        let read = |path: &PathBuf| read_note::<Notes>(path);
        let noted = notes.as_ref().and_then(read).filter(|notes| notes.version == 1);
        let per_epoch = noted
            .map(|notes| notes.steps_per_epoch)
            .filter(|steps| !steps.contains(&0))
            .unwrap_or_default();
        Steps {
            packing,
            plans: plans.to_vec(),
            first,
            notes,
            state: Mutex::new(State {
                per_epoch,
                recent: Vec::new(),
            }),
        }
    }

    /// The step of that number.
    pub fn step(&self, rows: &ManifestRows, number: u64) -> Result<Step, SamplingError> {
        // Held while an epoch is planned: all waiting workers need that plan.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let mut epoch = 0;
            let mut before: u64 = 0;
            loop {
                let steps = match state.per_epoch.get(epoch as usize) {
                    Some(&steps) => steps,
                    None => self.plan(&mut state, rows, epoch, before)?.1,
                };
                if number - before < steps {
                    break;
                }
                before += steps;
                epoch += 1;
            }
            let (plan, steps) = self.plan(&mut state, rows, epoch, before)?;
            // False where the notes were wrong; planning has corrected them.
            if number - before < steps {
                let packing = self.packing(before);
                return Ok(Step {
                    epoch,
                    in_epoch: number - before,
                    ranks: packing.world_size,
                    grad_accum: packing.grad_accum,
                    plan,
                });
            }
        }
    }

    /// How many steps the first epoch has, by its plan.
    pub fn first_epoch(&self, rows: &ManifestRows) -> Result<u64, SamplingError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(self.plan(&mut state, rows, 0, 0)?.1)
    }

    /// Checks that every rank gets batches. Nothing is planned where the notes show it.
    pub fn check(&self, rows: &ManifestRows) -> Result<(), SamplingError> {
        let noted = !self
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .per_epoch
            .is_empty();
        if noted { Ok(()) } else { self.step(rows, 0).map(drop) }
    }

    /// How an epoch is packed that begins with this step of ours.
    fn packing(&self, start: u64) -> Packing {
        Planned::packing(&self.plans, &self.packing, self.first + start)
    }

    /// The plan of an epoch that begins with step `start`, and the number of its steps.
    fn plan(
        &self,
        state: &mut State,
        rows: &ManifestRows,
        epoch: u64,
        start: u64,
    ) -> Result<(Arc<BatchPlan>, u64), SamplingError> {
        let packing = self.packing(start);
        let steps_of = |plan: &BatchPlan| plan.batches_per_rank() as u64 / u64::from(packing.grad_accum);
        if let Some((_, plan)) = state.recent.iter().find(|(of, _)| *of == epoch) {
            return Ok((plan.clone(), steps_of(plan)));
        }
        let plan = Arc::new(BatchPlan::new(rows, &packing, epoch)?);
        let steps = steps_of(&plan);
        if steps == 0 {
            return Err(SamplingError::NoBatch {
                rows: rows.durations.len(),
                batches: plan.batches(),
                ranks: packing.world_size,
                grad_accum: packing.grad_accum,
            });
        }
        if state.recent.len() >= 2 {
            state.recent.remove(0);
        }
        state.recent.push((epoch, plan.clone()));
        if state.per_epoch.len() as u64 == epoch {
            state.per_epoch.push(steps);
            self.note(&state.per_epoch);
        } else if state.per_epoch.get(epoch as usize).is_some_and(|&noted| noted != steps) {
            // Notes of another program version, or edited ones: start from nothing.
            state.per_epoch.truncate(epoch as usize);
            state.per_epoch.push(steps);
            self.note(&state.per_epoch);
        }
        Ok((plan, steps))
    }

    fn note(&self, per_epoch: &[u64]) {
        let Some(path) = &self.notes else { return };
        let notes = Notes {
            version: 1,
            steps_per_epoch: per_epoch.to_vec(),
        };
        // A failure to write the note only costs time after the next restart.
        if let Some(folder) = path.parent()
            && std::fs::create_dir_all(folder).is_ok()
        {
            let _ = write_note(path, &notes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::train_rows;

    fn rows() -> ManifestRows {
        let mut rows = ManifestRows::default();
        for row in train_rows("mini") {
            rows.durations.push(row.duration);
            rows.languages.push(&row.lang).unwrap();
        }
        rows
    }

    fn packing() -> Packing {
        Packing {
            world_size: 2,
            grad_accum: 3,
            max_batch_seconds: 12.0,
            ..Packing::default()
        }
    }

    #[test]
    fn steps_run_through_the_epochs_in_the_order_of_their_plans() {
        let rows = rows();
        let steps = Steps::new(packing(), &[], 0, "data", None);
        let mut number = 0;
        for epoch in 0..3 {
            let plan = BatchPlan::new(&rows, &packing(), epoch).unwrap();
            for in_epoch in 0..plan.batches_per_rank() / 3 {
                let step = steps.step(&rows, number).unwrap();
                assert_eq!((step.epoch, step.in_epoch), (epoch, in_epoch as u64));
                for (rank, micro) in [(0, 0), (1, 0), (0, 1), (1, 2)] {
                    let expected = plan.batch(rank, in_epoch * 3 + micro as usize);
                    assert!(expected.is_some());
                    assert_eq!(step.micro_batch(rank, micro), expected);
                }
                assert_eq!((step.micro_batch(2, 0), step.micro_batch(0, 3)), (None, None));
                number += 1;
            }
        }
    }

    #[test]
    fn a_place_far_in_is_found_again_without_planning_what_lies_before() {
        let rows = rows();
        let temp = tempfile::tempdir().unwrap();
        let first = Steps::new(packing(), &[], 0, "data", Some(temp.path().to_owned()));
        let far = first.step(&rows, 200).unwrap();
        assert!(far.epoch >= 5);
        let again = Steps::new(packing(), &[], 0, "data", Some(temp.path().to_owned()));
        again.check(&rows).unwrap();
        let found = again.step(&rows, 200).unwrap();
        assert_eq!((found.epoch, found.in_epoch), (far.epoch, far.in_epoch));
        assert_eq!(found.micro_batch(1, 1), far.micro_batch(1, 1));
        let state = again.state.lock().unwrap();
        assert_eq!(
            state.recent.iter().map(|(epoch, _)| *epoch).collect::<Vec<_>>(),
            [far.epoch]
        );
        // Notes are kept apart by data and settings, and damaged ones do not matter.
        assert_eq!(
            Steps::new(packing(), &[], 0, "other", Some(temp.path().to_owned()))
                .state
                .lock()
                .unwrap()
                .per_epoch
                .len(),
            0
        );
        for wrong in [
            "{\"version\":1,\"steps_per_epoch\":[0]}",
            "{\"version\":1,\"steps_per_epoch\":[400]}",
            "{",
        ] {
            for note in std::fs::read_dir(temp.path()).unwrap() {
                std::fs::write(note.unwrap().path(), wrong).unwrap();
            }
            let damaged = Steps::new(packing(), &[], 0, "data", Some(temp.path().to_owned()))
                .step(&rows, 200)
                .unwrap();
            assert_eq!((damaged.epoch, damaged.in_epoch), (far.epoch, far.in_epoch), "{wrong}");
        }
    }

    /// With another number of ranks in mid-epoch, all rows of the epoch come as they would have, and the next one is
    /// planned for the new number.
    #[test]
    fn an_epoch_ends_as_it_was_planned() {
        let rows = rows();
        let before = Steps::new(packing(), &[], 0, "data", None);
        let old = BatchPlan::new(&rows, &packing(), 0).unwrap();
        let in_first = old.batches_per_rank() as u64 / 3;
        let middle = in_first / 2;
        assert!(middle > 0);
        let mut plans = Vec::new();
        Planned::note(&mut plans, 100, 2, 3);
        Planned::note(&mut plans, 100 + middle, 1, 2);
        let now = Packing {
            world_size: 1,
            grad_accum: 2,
            ..packing()
        };
        let after = Steps::new(now.clone(), &plans, 100, "data", None);
        for number in 0..in_first {
            let (step, same) = (after.step(&rows, number).unwrap(), before.step(&rows, number).unwrap());
            assert_eq!((step.ranks, step.grad_accum, step.epoch), (2, 3, 0));
            for (rank, micro) in (0..2).flat_map(|rank| (0..3).map(move |micro| (rank, micro))) {
                assert_eq!(step.micro_batch(rank, micro), same.micro_batch(rank, micro));
            }
        }
        let step = after.step(&rows, in_first).unwrap();
        assert_eq!((step.ranks, step.grad_accum, step.epoch, step.in_epoch), (1, 2, 1, 0));
        let new = BatchPlan::new(&rows, &now, 1).unwrap();
        assert_eq!(step.micro_batch(0, 1), new.batch(0, 1));
        assert_eq!(step.micro_batch(1, 0), None);
    }

    #[test]
    fn a_rank_without_batches_is_an_error() {
        let wide = Packing {
            world_size: 8,
            grad_accum: 4,
            ..Packing::default()
        };
        let error = Steps::new(wide, &[], 0, "data", None).step(&rows(), 0).unwrap_err();
        assert!(
            matches!(
                error,
                SamplingError::NoBatch {
                    ranks: 8,
                    grad_accum: 4,
                    ..
                }
            ),
            "{error}"
        );
    }
}
