//! `training.train` at every process but 0, where each loads for itself: hands the steps of the dataflow to the ranks of
//! this process.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::RecordBatch;
use crossbeam_channel::{Receiver, Sender, unbounded};
use flow_kind::processes::Processes;
use flow_kind::{Context, Log, LogPosition, Operator, Out, Partition, Progress, StageError};

use crate::ranks::{ArrivedStep, WorkerInput, WorkerInputs};
use crate::train::step_of;

/// Hands steps over; a step is done when the ranks have taken its micro-batches.
pub(crate) struct Feed {
    context: Context,
    inputs: Arc<WorkerInputs>,
    /// Batches of steps that are not complete.
    arriving: BTreeMap<u64, Vec<RecordBatch>>,
    taken_sender: Sender<Partition>,
    taken: Receiver<Partition>,
}

impl Feed {
    pub fn new(context: &Context, processes: &Processes) -> Feed {
        let (taken_sender, taken) = unbounded();
        Feed {
            context: context.clone(),
            inputs: processes.shared(),
            arriving: BTreeMap::new(),
            taken_sender,
            taken,
        }
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        // The other end is there as long as this one.
        let _ = self.inputs.send.send(WorkerInput::FeedEnded);
    }
}

impl Operator for Feed {
    fn batch(
        &mut self,
        input: &str,
        partition: &Partition,
        batch: RecordBatch,
        _out: &mut Out,
    ) -> Result<(), StageError> {
        if input == "batches" {
            self.arriving.entry(step_of(partition)?).or_default().push(batch);
        }
        Ok(())
    }

    fn partition_complete(&mut self, partition: &Partition, _out: &mut Out) -> Result<Progress, StageError> {
        let step = step_of(partition)?;
        let (partition, sender, waker) = (partition.clone(), self.taken_sender.clone(), self.context.waker.clone());
        let arrived = ArrivedStep {
            step,
            batches: self.arriving.remove(&step).unwrap_or_default(),
            taken: Box::new(move || {
                // The stage may have ended.
                let _ = sender.send(partition);
                waker.wake();
            }),
        };
        // As in `drop`.
        let _ = self.inputs.send.send(WorkerInput::Step(arrived));
        Ok(Progress::NotYet)
    }

    fn poll(&mut self, _out: &mut Out) -> Result<Vec<Partition>, StageError> {
        Ok(self.taken.try_iter().collect())
    }
}

impl Log for Feed {
    fn position(&mut self) -> Result<LogPosition, StageError> {
        Err(StageError::failed("process 0 keeps the checkpoints"))
    }

    fn result(&mut self) -> Result<RecordBatch, StageError> {
        Err(StageError::failed("process 0 keeps the checkpoints"))
    }

    fn checkpoint(&mut self, _stop: bool) -> Result<(), StageError> {
        Ok(())
    }
}
