//! The progress of a run's stages, from its events: for `flow status`, the report, and the commands at a run's end.

use flow_base::event::{Event, StageFailure, StageOutcome};
use flow_base::reject::ReasonCount;
use flow_store::add_up;

use crate::figures;

/// The stages of a run, in the order in which they began.
#[derive(Default)]
pub struct RunProgress {
    pub stages: Vec<StageProgress>,
}

/// The progress of a stage. Its partitions are those of all its parts, as the run itself counts them.
#[derive(Default)]
pub struct StageProgress {
    pub name: String,
    /// Empty where it failed before it began.
    pub kind: String,
    parts: Vec<Part>,
    /// Rows of the partitions that this run committed, and once the stage ended, of those that were reused, too.
    pub rows_in: u64,
    pub rows_out: u64,
    pub rejected: u64,
    /// The rejected rows by reason.
    pub rejects: Vec<ReasonCount>,
    /// None where it did not end.
    pub outcome: Option<StageOutcome>,
    pub failures: Vec<StageFailure>,
}

/// A part of a global stage (`dedup:keys`), or the whole of another.
#[derive(Default)]
struct Part {
    name: String,
    to_run: u64,
    done: u64,
    reused: u64,
}

impl StageProgress {
    /// Partitions to run, those that are done among them.
    pub fn to_run(&self) -> u64 {
        self.parts.iter().map(|part| part.to_run).sum()
    }

    /// Partitions that this run has done.
    pub fn done(&self) -> u64 {
        self.parts.iter().map(|part| part.done).sum()
    }

    pub fn reused(&self) -> u64 {
        self.parts.iter().map(|part| part.reused).sum()
    }

    fn part(&mut self, name: &str) -> &mut Part {
        let known = self.parts.iter().position(|part| part.name == name);
        let at = known.unwrap_or_else(|| {
            self.parts.push(Part {
                name: name.to_string(),
                ..Part::default()
            });
            self.parts.len() - 1
        });
        &mut self.parts[at]
    }
}

/// The stage that a part belongs to: `dedup` of `dedup:keys`.
pub fn stage_of(part: &str) -> &str {
    part.split(':').next().unwrap_or(part)
}

impl RunProgress {
    fn stage(&mut self, part: &str) -> &mut StageProgress {
        let name = stage_of(part);
        let known = self.stages.iter().position(|stage| stage.name == name);
        let at = known.unwrap_or_else(|| {
            self.stages.push(StageProgress {
                name: name.to_string(),
                ..StageProgress::default()
            });
            self.stages.len() - 1
        });
        &mut self.stages[at]
    }

    /// Updates the progress by an event.
    pub fn take(&mut self, event: &Event) {
        match event {
            Event::StageStarted {
                stage,
                kind,
                run,
                reused,
            } => {
                let at = self.stage(stage);
                at.kind.clone_from(kind);
                let part = at.part(stage);
                // A stage that begins again after a failure runs the remaining partitions; failed partitions stay in
                // the number of those to run.
                part.to_run = part.to_run.max(part.done + run);
                part.reused = *reused;
            }
            Event::Committed {
                stage,
                partitions,
                rows_in,
                rows_out,
                rejects,
                reasons,
                ..
            } => {
                let at = self.stage(stage);
                at.part(stage).done += partitions;
                // The rows of keys are not those of their stage.
                if !stage.ends_with(":keys") {
                    at.rows_in += rows_in;
                    at.rows_out += rows_out;
                    at.rejected += rejects;
                    at.rejects = add_up(at.rejects.iter().chain(reasons));
                }
            }
            // A log stage commits no partitions; its figures have its progress.
            Event::StageFigures { stage, figures } => {
                if let Some((step, _)) = figures::steps(figures) {
                    let part = self.stage(stage).part(stage);
                    part.done = step.saturating_sub(part.reused).min(part.to_run);
                }
            }
            Event::StageFinished {
                stage,
                rows_in,
                rows_out,
                rejects,
                outcome,
                failures,
            } => {
                let at = self.stage(stage);
                if *outcome == StageOutcome::Done {
                    // Exports, and the decisions of global stages, only have an event at their end.
                    at.parts
                        .iter_mut()
                        .for_each(|part| part.done = part.done.max(part.to_run));
                }
                (at.rows_in, at.rows_out) = (*rows_in, *rows_out);
                at.rejected = rejects.iter().map(|reason| reason.rows).sum();
                at.rejects.clone_from(rejects);
                at.outcome = Some(*outcome);
                at.failures.clone_from(failures);
            }
            Event::RunFailed {
                stage: Some(stage),
                partition,
                message,
                ..
            } => {
                let at = self.stage(stage);
                at.outcome = Some(StageOutcome::Failed);
                let failure = StageFailure {
                    partition: partition.clone(),
                    message: message.clone(),
                };
                if !at.failures.contains(&failure) {
                    at.failures.push(failure);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use flow_kind::RejectClass;

    use super::*;

    fn started(stage: &str, run: u64, reused: u64) -> Event {
        Event::StageStarted {
            stage: stage.into(),
            kind: "a.kind".into(),
            run,
            reused,
        }
    }

    fn committed(stage: &str, partitions: u64, rejected: u64) -> Event {
        let reason = ReasonCount {
            reason: "too_short".into(),
            class: RejectClass::Fault,
            rows: rejected,
        };
        Event::Committed {
            stage: stage.into(),
            partitions,
            rows_in: 10 * partitions,
            rows_out: 10 * partitions - rejected,
            rejects: rejected,
            reasons: if rejected > 0 { vec![reason] } else { Vec::new() },
            done: 0,
            total: 0,
        }
    }

    fn finished(stage: &str, outcome: StageOutcome) -> Event {
        Event::StageFinished {
            stage: stage.into(),
            rows_in: 0,
            rows_out: 1,
            rejects: Vec::new(),
            outcome,
            failures: Vec::new(),
        }
    }

    fn stage<'a>(progress: &'a RunProgress, name: &str) -> &'a StageProgress {
        progress.stages.iter().find(|stage| stage.name == name).unwrap()
    }

    /// Partitions that are done, to run, and reused.
    fn partitions(progress: &RunProgress, name: &str) -> (u64, u64, u64) {
        let at = stage(progress, name);
        (at.done(), at.to_run(), at.reused())
    }

    #[test]
    fn what_is_not_committed_by_partitions_is_counted_too() {
        let mut progress = RunProgress::default();
        let stepped = |step: u64| Event::StageFigures {
            stage: "train".into(),
            figures: serde_json::json!({"step": step, "max_steps": 40}),
        };
        let done = |progress: &RunProgress, name: &str| {
            let at = stage(progress, name);
            (at.done(), at.to_run(), at.outcome == Some(StageOutcome::Done))
        };
        // Of 40 steps ten were done by a run before.
        progress.take(&started("train", 30, 10));
        assert_eq!(done(&progress, "train"), (0, 30, false));
        progress.take(&stepped(22));
        assert_eq!(done(&progress, "train"), (12, 30, false));
        progress.take(&stepped(40));
        progress.take(&finished("train", StageOutcome::Done));
        assert_eq!(done(&progress, "train"), (30, 30, true));
        // An export tells of its end alone.
        progress.take(&started("write", 1, 0));
        assert_eq!(done(&progress, "write"), (0, 1, false));
        progress.take(&finished("write", StageOutcome::Done));
        assert_eq!(done(&progress, "write"), (1, 1, true));
    }

    /// Five of 16 partitions are reused. Two fail, one after the other, and each time the rest begins again.
    #[test]
    fn a_stage_that_begins_again_counts_no_partition_twice() {
        let mut progress = RunProgress::default();
        progress.take(&started("clean", 11, 5));
        progress.take(&committed("clean", 4, 0));
        progress.take(&started("clean", 6, 5));
        assert_eq!(partitions(&progress, "clean"), (4, 11, 5));
        progress.take(&committed("clean", 2, 0));
        progress.take(&started("clean", 3, 5));
        progress.take(&committed("clean", 3, 0));
        progress.take(&finished("clean", StageOutcome::Failed));
        assert_eq!(partitions(&progress, "clean"), (9, 11, 5));
    }

    #[test]
    fn the_parts_of_a_global_stage_are_counted_as_its_own() {
        let mut progress = RunProgress::default();
        for event in [
            started("dedup:keys", 3, 4),
            committed("dedup:keys", 3, 0),
            started("dedup:decide", 1, 0),
            started("dedup:apply", 7, 0),
            committed("dedup:apply", 2, 5),
        ] {
            progress.take(&event);
        }
        assert_eq!(partitions(&progress, "dedup"), (5, 11, 4));
        let at = stage(&progress, "dedup");
        assert_eq!((at.rows_in, at.rows_out, at.rejected), (20, 15, 5));
        progress.take(&committed("dedup:apply", 5, 0));
        progress.take(&finished("dedup", StageOutcome::Done));
        assert_eq!(partitions(&progress, "dedup"), (11, 11, 4));
    }

    /// As where a run ends at `max_rejects` in the middle of a stage.
    #[test]
    fn what_was_committed_is_known_of_a_stage_that_did_not_end() {
        let mut progress = RunProgress::default();
        progress.take(&started("clean", 5, 0));
        progress.take(&committed("clean", 2, 3));
        progress.take(&committed("clean", 1, 1));
        progress.take(&Event::RunFailed {
            stage: Some("clean".into()),
            partition: None,
            row: None,
            message: "4 rejects".into(),
        });
        assert_eq!(partitions(&progress, "clean"), (3, 5, 0));
        let at = stage(&progress, "clean");
        assert_eq!((at.rows_in, at.rows_out, at.rejected), (30, 26, 4));
        let reasons: Vec<(&str, u64)> = at.rejects.iter().map(|one| (one.reason.as_str(), one.rows)).collect();
        assert_eq!(reasons, [("too_short", 4)]);
        assert_eq!(at.outcome, Some(StageOutcome::Failed));
        assert_eq!(at.failures.len(), 1);
    }
}
