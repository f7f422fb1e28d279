//! The work of a node on streamed batches, whatever its role.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use arrow::datatypes::SchemaRef;

use super::collected::in_row_order;
use super::job::NodeJob;
use crate::context::Context;
use crate::kind::{Body, Global, Log, Operator, Progress, StageError};
use crate::out::Out;
use crate::partition::Partition;
use crate::plan::decisions::Decisions;
use crate::plan::graph::Part;

pub(super) enum Work {
    Local(Box<dyn Operator>),
    Log(Box<dyn Log>),
    Keys(Box<dyn Global>),
    Apply {
        body: Box<dyn Global>,
        schema: SchemaRef,
        rows: BTreeMap<Partition, Vec<RecordBatch>>,
        decisions: Arc<Decisions>,
    },
}

impl Work {
    /// Opens the body of a node.
    pub fn open(node: &NodeJob, context: &Context) -> Result<Work, StageError> {
        Ok(match (node.settings.open(context)?, node.part) {
            (Body::Local(body), Part::Whole) => Work::Local(body),
            (Body::Log(body), Part::Whole) => Work::Log(body),
            (Body::Global(body), Part::Keys) => Work::Keys(body),
            (Body::Global(body), Part::Apply) => {
                let streamed = node.streams.first().and_then(|stream| node.from.get(stream.position));
                let (Some(input), Some(decisions)) = (streamed, node.decisions.clone()) else {
                    return Err(StageError::failed(
                        "it was given no rows or no decisions: a fault of the runtime",
                    ));
                };
                Work::Apply {
                    body,
                    schema: input.schema.clone(),
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

    pub fn batch(
        &mut self,
        input: usize,
        partition: &Partition,
        batch: RecordBatch,
        out: &mut Out,
    ) -> Result<(), StageError> {
        match self {
            Work::Local(body) => body.batch(input, partition, batch, out),
            Work::Log(body) => body.batch(input, partition, batch, out),
            Work::Keys(body) => {
                out.send(0, body.keys(partition, &batch)?);
                Ok(())
            }
            Work::Apply { rows, .. } => {
                rows.entry(partition.clone()).or_default().push(batch);
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
                schema,
                rows,
                decisions,
            } => {
                let batches = in_row_order(schema, rows.remove(partition).unwrap_or_default())?;
                let rows = concat_batches(schema, &batches)?;
                body.apply(partition, rows, &decisions.of(partition), out)?;
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
