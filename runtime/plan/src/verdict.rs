//! Decides for each partition of a node: run, reuse, or (while an upstream node is not settled) run if changed.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::RecordBatch;

use super::Action;
use super::cursor::Cursor;
use super::graph::KeyInput;
use super::keys::key_of;
use super::node_state::NodeState;
use super::reason;
use super::snapshot::Snapshot;
use flow_base::digest::Digest;
use flow_base::partition::Partition;
use flow_base::reject::UNREADABLE;
use flow_kind::kind::{LogPosition, Role};
use flow_store::{ExportStatus, Record};

/// The decision for one partition of a node.
#[derive(Clone, Debug)]
pub struct PartitionVerdict {
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
pub enum Verdict {
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
pub struct NodeVerdict {
    pub node: usize,
    pub verdict: Verdict,
}

/// Whether the record has rejects for an unreadable file, which may be readable now.
fn lacks_a_file(record: &Record) -> bool {
    record.rejects.by_reason.iter().any(|count| count.reason == UNREADABLE)
}

/// What is decided about the partitions of a node.
pub struct Decided {
    pub verdicts: Vec<PartitionVerdict>,
    /// The records that are reused.
    pub reused: Vec<(Partition, Arc<Record>)>,
}

/// Decides about the partitions of a node. None: not even these are known. `why_no_recipe`: why it runs, where its recipe has no
/// records.
pub fn of_partitions(known: &Snapshot<'_>, node: usize, why_no_recipe: Option<&str>) -> Option<Decided> {
    let state = &known.nodes[node];
    let (Some(space), Some(records)) = (&state.space, &state.records) else {
        return None;
    };
    let described = &known.graph.nodes[node];
    let (selected, forced) = (known.selection.selected[node], known.selection.forced[node]);
    let mut decided: Vec<PartitionVerdict> = Vec::with_capacity(space.len());
    let mut reused: Vec<(Partition, Arc<Record>)> = Vec::with_capacity(space.len());
    let key_inputs = described.key_inputs.iter();
    let key_inputs: Vec<_> = key_inputs.map(|input| known.key_input_of_each(*input, space)).collect();
    let mut recorded = Cursor::new(records.by_partition());
    for (at, partition) in space.iter().enumerate() {
        let inputs: Vec<Option<Digest>> = key_inputs.iter().map(|of_each| of_each[at]).collect();
        let digests: Option<Vec<Digest>> = inputs.iter().copied().collect();
        let recorded = recorded.find(partition).unwrap_or(&[]);
        let key = digests.as_ref().map(|digests| key_of(&described.recipe, digests));
        let standing = key.and_then(|key| recorded.iter().find(|record| record.key == key));
        let unkept = standing.and_then(|record| described.unkept(record));
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
                let reason = match why_no_recipe {
                    Some(reason) => reason.into(),
                    None => reason::no_record(records, partition).into(),
                };
                (Action::Run, reason)
            }
            (None, _, Some(before)) => match digests {
                Some(_) => {
                    let reason = reason::input_changed(known.graph, &described.key_inputs, before, &inputs);
                    (Action::Run, reason.into())
                }
                None => (
                    Action::IfChanged,
                    what_may_change(known, &described.key_inputs, &inputs).into(),
                ),
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
    Some(Decided {
        verdicts: decided,
        reused,
    })
}

/// Which input is not settled yet.
fn what_may_change(known: &Snapshot<'_>, key_inputs: &[KeyInput], inputs: &[Option<Digest>]) -> String {
    let open = key_inputs.iter().zip(inputs).find(|(_, digest)| digest.is_none());
    match open {
        Some((KeyInput::Partition { node, .. } | KeyInput::Whole { node, .. } | KeyInput::Decisions { node }, _)) => {
            format!("if `{}` gives something else", known.graph.nodes[*node].name)
        }
        _ => "if its source files changed".to_string(),
    }
}

/// Partitions whose files outside the state directory are `missing` or changed run again, each with the reason.
pub fn without_missing(
    state: &NodeState,
    missing: &BTreeMap<Partition, String>,
    verdicts: &mut [PartitionVerdict],
) -> Vec<Partition> {
    let mut again = Vec::new();
    for verdict in verdicts.iter_mut().filter(|verdict| verdict.action == Action::Reuse) {
        let Some(reason) = missing.get(&verdict.partition) else {
            continue;
        };
        verdict.action = Action::Run;
        verdict.reason = reason.as_str().into();
        // The record has the inputs of its key.
        let record = state.settled.get(&verdict.partition);
        let inputs = record.map_or(&[][..], |record| &record.inputs);
        verdict.inputs = inputs.iter().copied().map(Some).collect();
        again.push(verdict.partition.clone());
    }
    again
}

/// Decides about an export of which not all inputs are known, for this `reason`: it runs for certain only where it has changed
/// itself.
pub fn of_open_export(folder: PathBuf, own_change: Option<String>, reason: String) -> Verdict {
    Verdict::Export {
        folder,
        key: None,
        action: match own_change {
            Some(_) => Action::Run,
            None => Action::IfChanged,
        },
        reason: own_change.unwrap_or(reason),
    }
}

/// Decides about an export with all inputs known.
pub fn of_export(
    known: &Snapshot<'_>,
    node: usize,
    folder: &Path,
    key: Digest,
    own_change: Option<String>,
    standing: ExportStatus,
) -> Verdict {
    let (action, reason) = match standing {
        _ if !known.selection.selected[node] => (Action::Reuse, "not selected".to_string()),
        _ if known.selection.forced[node] => (Action::Run, "forced".to_string()),
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
    Verdict::Export {
        folder: folder.to_path_buf(),
        key: Some(key),
        action,
        reason,
    }
}

/// Of a source, the partitions of a region's records that have to be digested: others are new, and digested when they run.
pub fn digests_needed(known: &Snapshot<'_>, nodes: &[usize], source: usize) -> Vec<Partition> {
    let Some(space) = &known.nodes[source].space else {
        return Vec::new();
    };
    let mut recorded = vec![false; space.len()];
    for &node in nodes {
        let reads = known.graph.nodes[node]
            .key_inputs
            .contains(&KeyInput::Source { node: source });
        let Some(records) = known.nodes[node]
            .records
            .as_ref()
            .filter(|records| reads && !records.is_empty())
        else {
            continue;
        };
        let mut of_node = Cursor::new(records.by_partition());
        for (known, partition) in recorded.iter_mut().zip(space.iter()) {
            *known |= of_node.find(partition).is_some();
        }
    }
    let needed = space.iter().zip(recorded).filter(|(_, known)| *known);
    needed.map(|(partition, _)| partition.clone()).collect()
}
