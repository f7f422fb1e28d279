//! Reads what a region's verdicts need, has them decided by [`flow_plan::verdict`], and settles what is reused.

use std::path::PathBuf;

use super::state::PlanState;
use flow_base::error::StageError;
use flow_base::panic_guard::catch_panic;
use flow_base::partition::Partition;
use flow_kind::kind::{Body, LogPosition, Role};
use flow_plan::Action;
use flow_plan::graph::{KeyInput, RESULT, RegionKind, StagePart};
use flow_plan::keys::{key_of, result_key};
use flow_plan::run_error::RunError;
use flow_plan::verdict::{self, NodeVerdict, PartitionVerdict, Verdict};
use flow_store::ExportSet;

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
                    None => self.unknown(node),
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

    fn unknown(&self, node: usize) -> Verdict {
        Verdict::Unknown {
            waits_for: self.snapshot().waits_for(node),
        }
    }

    /// Digests the partitions of sources that some node of the region has a record of.
    fn digest_what_keys_need(&mut self, nodes: &[usize]) -> Result<(), RunError> {
        for &source in nodes {
            if self.graph.nodes[source].role != Role::Source || self.space(source)?.is_none() {
                continue;
            }
            for &node in nodes {
                let key_inputs = &self.graph.nodes[node].key_inputs;
                if key_inputs.contains(&KeyInput::Source { node: source }) {
                    self.records(node)?;
                }
            }
            let needed = verdict::digests_needed(&self.snapshot(), nodes, source);
            self.digest_sources(source, &needed)?;
        }
        Ok(())
    }

    fn decide_partitions(&mut self, node: usize) -> Result<Verdict, RunError> {
        if self.space(node)?.is_none() {
            return Ok(self.unknown(node));
        }
        let why_no_recipe = match self.records(node)?.is_empty() {
            true => Some(self.with_earlier_plans(|known, earlier| known.why_no_recipe(node, earlier))),
            false => None,
        };
        self.read_key_inputs(node)?;
        let Some(mut decided) = verdict::of_partitions(&self.snapshot(), node, why_no_recipe.as_deref()) else {
            return Ok(self.unknown(node));
        };
        let all_reused = decided.reused.len() == decided.verdicts.len();
        self.nodes[node].settle_all(decided.reused);
        let all_there = self.rerun_missing_outputs(node, &mut decided.verdicts)?;
        self.nodes[node].all_settled = all_reused && all_there;
        Ok(Verdict::Partitions(decided.verdicts))
    }

    /// Partitions whose files outside the state directory are missing or changed run again. Returns whether there are
    /// none.
    fn rerun_missing_outputs(&mut self, node: usize, verdicts: &mut [PartitionVerdict]) -> Result<bool, RunError> {
        let described = &self.graph.nodes[node];
        let kept = described.stored.first() == Some(&true);
        let may_leave_files =
            described.part == StagePart::Whole && matches!(described.role, Role::Local | Role::Source);
        if !may_leave_files || !kept || !self.selection.selected[node] {
            return Ok(true);
        }
        let committed = self.artifact(node, 0)?;
        let missing = catch_panic(|| {
            self.stage(node)
                .settings
                .missing_outputs(&self.options.storage, &committed, self.threads())
        })
        .map_err(|error| self.failed(node, None, error))?;
        for partition in verdict::without_missing(&self.nodes[node], &missing, verdicts) {
            self.nodes[node].unsettle(&partition);
        }
        Ok(missing.is_empty())
    }

    fn decide_export(&mut self, node: usize) -> Result<Verdict, RunError> {
        let own_change = self.with_earlier_plans(|known, earlier| known.changed_since(node, earlier, 0));
        let Some(context) = self.context(node)? else {
            let reason = format!("if `{}` gives something else", self.snapshot().waits_for(node));
            return Ok(verdict::of_open_export(PathBuf::new(), own_change, reason));
        };
        let stage = &self.checked.stages[self.graph.nodes[node].stage];
        let (folder, manifest, body) = catch_panic(|| match stage.settings.open(&context)? {
            Body::Export(body) => Ok((body.folder(), body.manifest(), body)),
            _ => Err(StageError::failed(
                "the kind says it is an export, but its body is none",
            )),
        })
        .map_err(|error| self.failed(node, None, error))?;
        if !self.is_settled_upstream(node) {
            let reason = "if the rejects before it change".to_string();
            return Ok(verdict::of_open_export(folder, own_change, reason));
        }
        let further = match self.selection.selected[node] {
            true => catch_panic(|| body.further_inputs()).map_err(|error| self.failed(node, None, error))?,
            false => None,
        };
        self.read_key_inputs(node)?;
        let known = self.snapshot();
        let key_inputs = self.graph.nodes[node].key_inputs.iter();
        // Only whole inputs, which are all settled, or there would be no context.
        let mut inputs: Vec<_> = key_inputs
            .filter_map(|input| known.key_input(*input, &Partition::new("")))
            .collect();
        inputs.push(context.rejects.digest());
        inputs.extend(further);
        let key = key_of(&self.graph.nodes[node].recipe, &inputs);
        let standing = ExportSet::status(&folder, &manifest, &key, self.store.sources())?;
        let verdict = verdict::of_export(&known, node, &folder, key, own_change, standing);
        let is_reused = matches!(
            verdict,
            Verdict::Export {
                action: Action::Reuse,
                ..
            }
        );
        self.nodes[node].all_settled = is_reused;
        Ok(verdict)
    }

    pub fn decide_log(&mut self, node: usize) -> Result<Verdict, RunError> {
        let Some(context) = self.context(node)? else {
            return Ok(self.unknown(node));
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
