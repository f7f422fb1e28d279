//! The work of a node on streamed batches, whatever its role.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch, UInt32Array};

use super::job::{Feed, NodeJob};
use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_base::row_number::ROW;
use flow_decide::stored::Decisions;
use flow_kind::context::Context;
use flow_kind::kind::{Body, Global, Log, Operator, Progress, RowOutcome};
use flow_kind::out::Out;
use flow_plan::graph::StagePart;
use flow_store::{Artifact, Ranges};

pub(super) enum Work {
    Local(Box<dyn Operator>),
    Log(Box<dyn Log>),
    Keys(Box<dyn Global>),
    Apply {
        body: Box<dyn Global>,
        input: Artifact,
        ports: usize,
        /// The column `_row`.
        rows: BTreeMap<Partition, Vec<ArrayRef>>,
        decisions: Arc<Decisions>,
    },
}

impl Work {
    /// Opens the body of a node.
    pub fn open(node: &NodeJob, context: &Context) -> Result<Work, StageError> {
        Ok(match (node.settings.open(context)?, node.part) {
            (Body::Local(body), StagePart::Whole) => Work::Local(body),
            (Body::Log(body), StagePart::Whole) => Work::Log(body),
            (Body::Global(body), StagePart::Keys) => Work::Keys(body),
            (Body::Global(body), StagePart::Apply) => {
                let feed = node.streams.first().map(|stream| &stream.feed);
                let (Some(Feed::Artifact(input)), Some(decisions)) = (feed, node.decisions.clone()) else {
                    return Err(StageError::failed(
                        "it was given no stored rows or no decisions: a fault of the runtime",
                    ));
                };
                Work::Apply {
                    body,
                    input: input.clone(),
                    ports: node.outputs.len(),
                    rows: BTreeMap::new(),
                    decisions,
                }
            }
            _ => {
                return Err(StageError::failed(
                    "the kind's body is not of the role that its shape says",
                ));
            }
        })
    }

    /// The columns that it reads of an artifact that it streams; all, if none are named.
    pub fn columns(&self) -> Option<Vec<String>> {
        match self {
            Work::Keys(body) => body.key_columns(),
            Work::Apply { .. } => Some(vec![ROW.to_owned()]),
            Work::Local(_) | Work::Log(_) => None,
        }
    }

    pub fn batch(
        &mut self,
        input: &str,
        partition: &Partition,
        batch: RecordBatch,
        out: &mut Out,
    ) -> Result<(), StageError> {
        match self {
            Work::Local(body) => body.batch(input, partition, batch, out),
            Work::Log(body) => body.batch(input, partition, batch, out),
            Work::Keys(body) => {
                let keys = body.keys(partition, &batch)?;
                if keys.num_rows() != batch.num_rows() {
                    let (rows, keys) = (batch.num_rows(), keys.num_rows());
                    return Err(StageError::failed(format!("it gave {keys} key rows for {rows} rows")));
                }
                out.send(0, keys);
                Ok(())
            }
            Work::Apply { rows, .. } => {
                let numbers = batch.column_by_name(ROW).cloned();
                let numbers = numbers.ok_or_else(|| StageError::failed(format!("its rows have no column `{ROW}`")))?;
                rows.entry(partition.clone()).or_default().push(numbers);
                Ok(())
            }
        }
    }

    pub fn partition_complete(&mut self, partition: &Partition, out: &mut Out) -> Result<Progress, StageError> {
        match self {
            Work::Local(body) => body.partition_complete(partition, out),
            Work::Log(body) => body.partition_complete(partition, out),
            Work::Keys(_) => Ok(Progress::Done),
            Work::Apply {
                body,
                input,
                ports,
                rows,
                decisions,
            } => {
                let pieces = rows.remove(partition).unwrap_or_default();
                let decisions = decisions.of(partition);
                apply(body.as_mut(), *ports, input, partition, &pieces, &decisions, out)?;
                Ok(Progress::Done)
            }
        }
    }

    pub fn poll(&mut self, out: &mut Out) -> Result<Vec<Partition>, StageError> {
        match self {
            Work::Local(body) => body.poll(out),
            Work::Log(body) => body.poll(out),
            Work::Keys(_) | Work::Apply { .. } => Ok(Vec::new()),
        }
    }

    /// Whether a log is finished although partitions are left.
    pub fn ended_early(&self) -> bool {
        matches!(self, Work::Log(body) if body.ended_early())
    }

    pub fn complete(&mut self) -> Result<(), StageError> {
        match self {
            Work::Local(body) => body.complete(),
            Work::Log(body) => body.complete(),
            Work::Keys(_) | Work::Apply { .. } => Ok(()),
        }
    }

    pub fn checkpoint(&mut self, stop: bool) -> Result<(), StageError> {
        match self {
            Work::Log(body) => body.checkpoint(stop),
            _ => Ok(()),
        }
    }
}

/// Asks a global stage for the outcome of each row of a partition, and selects the rows of each port. `pieces` are the
/// chunks of the stored column `_row`, ascending. Only rejected rows are read with all columns.
pub(crate) fn apply(
    body: &mut dyn Global,
    ports: usize,
    input: &Artifact,
    partition: &Partition,
    pieces: &[ArrayRef],
    decisions: &RecordBatch,
    out: &mut Out,
) -> Result<(), StageError> {
    let mut numbers: Vec<u32> = Vec::new();
    for piece in pieces {
        let piece = piece.as_any().downcast_ref::<UInt32Array>();
        let piece = piece.ok_or_else(|| StageError::failed(format!("column `{ROW}` of the input is not UInt32")))?;
        numbers.extend(piece.values());
    }
    let numbers = UInt32Array::from(numbers);
    let outcomes = body.apply(partition, &numbers, decisions)?;
    if outcomes.len() != numbers.len() {
        return Err(StageError::failed(format!(
            "it gave {} outcomes to {} rows",
            outcomes.len(),
            numbers.len()
        )));
    }
    let mut chosen: Vec<Ranges> = std::iter::repeat_with(Ranges::default).take(ports).collect();
    let (mut refused, mut reasons) = (Ranges::default(), Vec::new());
    for (place, outcome) in (0u32..).zip(&outcomes) {
        match outcome {
            RowOutcome::Port(port) => match chosen.get_mut(*port) {
                Some(ranges) => ranges.push(place, 1),
                None => {
                    return Err(StageError::failed(format!(
                        "it sent a row to port number {port}, but has {ports} ports"
                    )));
                }
            },
            RowOutcome::Rejected { reason, class, detail } => {
                refused.push(place, 1);
                reasons.push((*reason, *class, detail));
            }
        }
    }
    if !reasons.is_empty() {
        let mut reasons = reasons.into_iter();
        for rows in input.read_rows(partition, &refused.0)? {
            let rows = rows?;
            for (position, (reason, class, detail)) in (0..rows.num_rows()).zip(&mut reasons) {
                out.reject_rows(&rows, &[position], reason, class, detail)?;
            }
        }
    }
    for (port, ranges) in chosen.into_iter().enumerate() {
        out.select(port, ranges.0);
    }
    Ok(())
}
