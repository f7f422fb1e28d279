//! Decides for each partition of each node of a region: run, reuse, or (while an upstream node is not settled) run if
//! changed.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::RecordBatch;

use super::Action;
use super::cursor::Cursor;
use super::graph::{KeyInput, RegionKind, StagePart};
use super::keys::{key_of, result_key};
use super::reason::{self, Identity};
use super::state::{PlanState, RESULT};
use crate::digest::Digest;
use crate::error::StageError;
use crate::kind::{Body, LogPosition, Role};
use crate::panic_guard::catch_panic;
use crate::partition::Partition;
use crate::reject::UNREADABLE;
use crate::run_error::RunError;
use crate::store::{ExportSet, ExportStatus, Record};

/// The decision for one partition of a node.
#[derive(Clone, Debug)]
pub(crate) struct PartitionVerdict {
    pub partition: Partition,
    pub action: Action,
    /// Shared by partitions that follow each other.
    pub reason: Arc<str>,
    /// The key, where all inputs are known.
    pub key: Option<Digest>,
    /// In the order of the node's key inputs; none where a digest is not known yet. Empty where the partition is reused: there may
    /// be millions.
    pub inputs: Vec<Option<Digest>>,
}

#[derive(Clone, Debug)]
pub(crate) enum Verdict {
    Partitions(Vec<PartitionVerdict>),
    /// Not even the partitions are known before this stage has run.
    Unknown {
        waits_for: String,
    },
    Log {
        standing: LogPosition,
        result: Option<RecordBatch>,
    },
    Export {
        folder: PathBuf,
        key: Option<Digest>,
        action: Action,
        reason: String,
    },
    /// Feeds a log stage: runs with it, and keeps no record.
    Feeds,
}

#[derive(Clone, Debug)]
pub(crate) struct NodeVerdict {
    pub node: usize,
    pub verdict: Verdict,
}

/// Whether the record has rejects for an unreadable file, which may be readable now.
fn lacks_a_file(record: &Record) -> bool {
    record.rejects.by_reason.iter().any(|count| count.reason == UNREADABLE)
}

impl PlanState {
    /// Decides over a region, and settles the reused partitions.
    pub fn decide(&mut self, region: usize) -> Result<Vec<NodeVerdict>, RunError> {
        let nodes = self.graph.regions[region].nodes.clone();
        // Settled again by the present records, which may have changed since the pipeline was planned.
        nodes.iter().for_each(|node| self.nodes[*node].unsettle_all());
        let selected = nodes.iter().any(|node| self.selection.selected[*node]);
        match self.try_decide(region) {
            // An unselected region need not be decidable: its source may be missing.
            Err(_) if !selected => {
                let unknown = |node| NodeVerdict {
                    node,
                    verdict: Verdict::Unknown {
                        waits_for: String::new(),
                    },
                };
                Ok(nodes.into_iter().map(unknown).collect())
            }
            decided => decided,
        }
    }

    fn try_decide(&mut self, region: usize) -> Result<Vec<NodeVerdict>, RunError> {
        let region = self.graph.regions[region].clone();
        self.digest_what_keys_need(&region.nodes)?;
        let mut verdicts = Vec::new();
        for &node in &region.nodes {
            let verdict = match region.kind {
                RegionKind::Export { .. } => self.decide_export(node)?,
                RegionKind::Log { log } if log == node => self.decide_log(node)?,
                RegionKind::Log { .. } => match self.space(node)? {
                    Some(_) => Verdict::Feeds,
                    None => Verdict::Unknown {
                        waits_for: self.waits_for(node),
                    },
                },
                RegionKind::Dataflow | RegionKind::Decide { .. } => self.decide_partitions(node)?,
            };
            verdicts.push(NodeVerdict { node, verdict });
        }
        // What feeds a log that is finished does not run.
        if let RegionKind::Log { log } = region.kind
            && self.nodes[log].all_settled
        {
            region
                .nodes
                .iter()
                .for_each(|node| self.nodes[*node].all_settled = true);
        }
        Ok(verdicts)
    }

    /// Digests the partitions of sources that some node of the region has a record of. Others are new: they
    /// are digested when they run.
    fn digest_what_keys_need(&mut self, nodes: &[usize]) -> Result<(), RunError> {
        for &source in nodes {
            if self.graph.nodes[source].role != Role::Source {
                continue;
            }
            let Some(space) = self.space(source)? else { continue };
            let mut recorded = vec![false; space.len()];
            for &node in nodes {
                if self.graph.nodes[node]
                    .key_inputs
                    .contains(&KeyInput::Source { node: source })
                {
                    let records = self.records(node)?;
                    if records.is_empty() {
                        continue;
                    }
                    let mut of_node = Cursor::new(records.by_partition());
                    for (known, partition) in recorded.iter_mut().zip(space.iter()) {
                        *known |= of_node.find(partition).is_some();
                    }
                }
            }
            let needed: Vec<Partition> = space
                .iter()
                .zip(recorded)
                .filter(|(_, known)| *known)
                .map(|(partition, _)| partition.clone())
                .collect();
            self.digest_sources(source, &needed)?;
        }
        Ok(())
    }

    fn decide_partitions(&mut self, node: usize) -> Result<Verdict, RunError> {
        let Some(space) = self.space(node)? else {
            return Ok(Verdict::Unknown {
                waits_for: self.waits_for(node),
            });
        };
        let records = self.records(node)?;
        let recipe_reason = records.is_empty().then(|| self.why_no_recipe(node));
        let described = self.graph.nodes[node].clone();
        let (selected, forced) = (self.selection.selected[node], self.selection.forced[node]);
        let mut decided: Vec<PartitionVerdict> = Vec::with_capacity(space.len());
        let mut reused: Vec<(Partition, Arc<Record>)> = Vec::with_capacity(space.len());
        let mut key_inputs = Vec::with_capacity(described.key_inputs.len());
        for input in &described.key_inputs {
            key_inputs.push(self.key_input_of_each(*input, &space)?);
        }
        let mut recorded = Cursor::new(records.by_partition());
        for (at, partition) in space.iter().enumerate() {
            let inputs: Vec<Option<Digest>> = key_inputs.iter().map(|of_each| of_each[at]).collect();
            let known: Option<Vec<Digest>> = inputs.iter().copied().collect();
            let recorded = recorded.find(partition).unwrap_or(&[]);
            let key = known.as_ref().map(|known| key_of(&described.recipe, known));
            let standing = key.and_then(|key| recorded.iter().find(|record| record.key == key));
            let unkept = standing.and_then(|record| {
                described
                    .outputs
                    .iter()
                    .zip(&described.stored)
                    .find(|(port, kept)| **kept && !record.ports.contains_key(&port.name))
                    .map(|(port, _)| port.name.clone())
            });
            let (action, reason): (Action, Cow<str>) = match (standing, unkept, recorded.last()) {
                (Some(_), None, _) if selected && forced => (Action::Run, "forced".into()),
                // For a source, the key contains whether its files can be read.
                (Some(record), None, _) if selected && described.role == Role::Local && lacks_a_file(record) => {
                    (Action::Run, "a file could not be read".into())
                }
                (Some(record), None, _) => {
                    reused.push((partition.clone(), Arc::clone(record)));
                    (Action::Reuse, "unchanged".into())
                }
                _ if !selected => (Action::Reuse, "not selected".into()),
                (Some(_), Some(port), _) => (Action::Run, format!("its output `{port}` was not kept").into()),
                (None, _, None) => {
                    let reason = match &recipe_reason {
                        Some(reason) => reason.into(),
                        None => reason::no_record(&records, partition).into(),
                    };
                    (Action::Run, reason)
                }
                (None, _, Some(before)) => match known {
                    Some(_) => {
                        let key_inputs = &described.key_inputs;
                        let reason = reason::input_changed(&self.graph, key_inputs, before, &inputs);
                        (Action::Run, reason.into())
                    }
                    None => {
                        let reason = self.what_may_change(&described.key_inputs, &inputs);
                        (Action::IfChanged, reason.into())
                    }
                },
            };
            let reason = match decided.last().filter(|before| *before.reason == *reason) {
                Some(before) => Arc::clone(&before.reason),
                None => Arc::from(reason),
            };
            decided.push(PartitionVerdict {
                partition: partition.clone(),
                action,
                reason,
                key,
                inputs: if action == Action::Reuse { Vec::new() } else { inputs },
            });
        }
        let all_reused = reused.len() == space.len();
        self.nodes[node].settle_all(reused);
        let all_there = self.rerun_missing_outputs(node, &mut decided)?;
        self.nodes[node].all_settled = all_reused && all_there;
        Ok(Verdict::Partitions(decided))
    }

    /// Partitions whose files outside the state directory are missing or changed run again. Returns whether there are
    /// none.
    fn rerun_missing_outputs(&mut self, node: usize, decided: &mut [PartitionVerdict]) -> Result<bool, RunError> {
        let described = &self.graph.nodes[node];
        let kept = described.stored.first() == Some(&true);
        let may_leave_files =
            described.part == StagePart::Whole && matches!(described.role, Role::Local | Role::Source);
        if !may_leave_files || !kept || !self.selection.selected[node] {
            return Ok(true);
        }
        let committed = self.artifact(node, 0)?;
        let missing = catch_panic(|| self.stage(node).settings.missing_outputs(&committed, self.threads()))
            .map_err(|error| self.failed(node, None, error))?;
        for decided in decided.iter_mut().filter(|decided| decided.action == Action::Reuse) {
            if let Some(reason) = missing.get(&decided.partition) {
                decided.action = Action::Run;
                decided.reason = reason.as_str().into();
                // The record has the inputs of its key.
                let record = self.nodes[node].settled.get(&decided.partition);
                let inputs = record.map_or(&[][..], |record| &record.inputs);
                decided.inputs = inputs.iter().copied().map(Some).collect();
                self.nodes[node].unsettle(&decided.partition);
            }
        }
        Ok(missing.is_empty())
    }

    /// Which input is not settled yet.
    fn what_may_change(&self, key_inputs: &[KeyInput], inputs: &[Option<Digest>]) -> String {
        let open = key_inputs.iter().zip(inputs).find(|(_, digest)| digest.is_none());
        match open {
            Some((
                KeyInput::Partition { node, .. } | KeyInput::Whole { node, .. } | KeyInput::Decisions { node },
                _,
            )) => {
                format!("if `{}` gives something else", self.graph.nodes[*node].name)
            }
            _ => "if its source files changed".to_string(),
        }
    }

    /// The stage upstream whose artifact is not settled.
    fn waits_for(&self, node: usize) -> String {
        let open = |index: &usize| !self.nodes[*index].all_settled && self.graph.nodes[*index].stored.contains(&true);
        let upstream = self.graph.upstream(node);
        let first = upstream.iter().copied().find(open).unwrap_or(node);
        self.graph.nodes[first].name.clone()
    }

    fn why_no_recipe(&mut self, node: usize) -> String {
        let recipe = self.graph.nodes[node].recipe;
        let mut known = false;
        let mut back = 0;
        // A failed run has planned this recipe, too: the plan before it is compared instead.
        while let Some(before) = self.before(node, back).map(|before| before.recipe) {
            known = true;
            if before != recipe {
                break;
            }
            back += 1;
        }
        if !known {
            return "never run".to_string();
        }
        if let Some(own) = self.changed_since(node, back) {
            return own;
        }
        for upstream in self.graph.upstream(node).into_iter().rev() {
            if self.graph.nodes[upstream].region == self.graph.nodes[node].region
                && let Some(reason) = self.changed_since(upstream, back)
            {
                return format!("`{}` before it: {reason}", self.graph.nodes[upstream].name);
            }
        }
        match self.before(node, back) {
            Some(_) => "its inputs changed".to_string(),
            None => "no record of it".to_string(),
        }
    }

    /// What changed in a stage since an earlier plan.
    fn changed_since(&mut self, node: usize, back: usize) -> Option<String> {
        let stage = self.stage(node);
        let (kind, version, settings) = (stage.kind.name(), stage.kind.version(), stage.settings.identity());
        reason::recipe_changed(
            self.before(node, back)?,
            &Identity {
                kind,
                version,
                settings: &settings,
            },
        )
    }

    fn decide_export(&mut self, node: usize) -> Result<Verdict, RunError> {
        let own_change = self.changed_since(node, 0);
        // Not all inputs are known: it runs for certain only where it has changed itself.
        let open = |folder: PathBuf, own_change: Option<String>, reason: String| Verdict::Export {
            folder,
            key: None,
            action: match own_change {
                Some(_) => Action::Run,
                None => Action::IfChanged,
            },
            reason: own_change.unwrap_or(reason),
        };
        let Some(context) = self.context(node)? else {
            let reason = format!("if `{}` gives something else", self.waits_for(node));
            return Ok(open(PathBuf::new(), own_change, reason));
        };
        let stage = &self.checked.stages[self.graph.nodes[node].stage];
        let (folder, manifest) = catch_panic(|| match stage.settings.open(&context)? {
            Body::Export(body) => Ok((body.folder(), body.manifest())),
            _ => Err(StageError::failed(
                "the kind says it is an export, but its body is none",
            )),
        })
        .map_err(|error| self.failed(node, None, error))?;
        if !self.is_settled_upstream(node) {
            return Ok(open(folder, own_change, "if the rejects before it change".to_string()));
        }
        let mut inputs = Vec::new();
        for input in self.graph.nodes[node].key_inputs.clone() {
            // Only whole inputs, which are all settled, or there would be no context.
            inputs.extend(self.key_input(input, &Partition::new(""))?);
        }
        inputs.push(context.rejects.digest());
        let key = key_of(&self.graph.nodes[node].recipe, &inputs);
        let standing = ExportSet::status(&folder, &manifest, &key, self.store.sources())?;
        let (action, reason) = match standing {
            _ if !self.selection.selected[node] => (Action::Reuse, "not selected".to_string()),
            _ if self.selection.forced[node] => (Action::Run, "forced".to_string()),
            ExportStatus::Whole => (Action::Reuse, "unchanged".to_string()),
            ExportStatus::Missing => (
                Action::Run,
                format!("{} contains no complete set of files", folder.display()),
            ),
            ExportStatus::Outdated => (
                Action::Run,
                own_change.unwrap_or_else(|| "its inputs changed".to_string()),
            ),
            ExportStatus::Changed { file } => (
                Action::Run,
                format!("{file} in {} was changed or removed", folder.display()),
            ),
        };
        self.nodes[node].all_settled = action == Action::Reuse;
        Ok(Verdict::Export {
            folder,
            key: Some(key),
            action,
            reason,
        })
    }

    pub fn decide_log(&mut self, node: usize) -> Result<Verdict, RunError> {
        let Some(context) = self.context(node)? else {
            return Ok(Verdict::Unknown {
                waits_for: self.waits_for(node),
            });
        };
        let stage = &self.checked.stages[self.graph.nodes[node].stage];
        let has_result = !stage.shape.outputs.is_empty();
        let only_plans = !self.may_write;
        let mut refused = None;
        let (standing, result) = catch_panic(|| match stage.settings.open(&context)? {
            Body::Log(mut body) => {
                let standing = match body.position() {
                    // Planning continues, to show the other stages, too.
                    Err(error @ StageError::Refused { .. }) if only_plans => {
                        let detail = format!("would be refused: {error}");
                        refused = Some(error);
                        LogPosition::At { step: 0, detail }
                    }
                    standing => standing?,
                };
                let result = match standing {
                    LogPosition::Finished { .. } if has_result => Some(body.result()?),
                    _ => None,
                };
                Ok((standing, result))
            }
            _ => Err(StageError::failed(
                "the kind says it keeps a log, but its body does not",
            )),
        })
        .map_err(|error| self.failed(node, None, error))?;
        if let Some(error) = refused {
            self.refusals.push(self.failed(node, None, error));
        }
        if let LogPosition::Finished { .. } = standing {
            match &result {
                None => self.nodes[node].all_settled = true,
                Some(rows) => {
                    let recipe = self.graph.nodes[node].recipe;
                    let key = result_key(&recipe, rows).map_err(|error| self.failed(node, None, error))?;
                    let partition = Partition::new(RESULT);
                    if let Some(record) = self.records(node)?.get(&partition, &key).cloned() {
                        self.nodes[node].settle(&partition, record);
                        self.nodes[node].all_settled = true;
                    }
                }
            }
        }
        Ok(Verdict::Log { standing, result })
    }
}
