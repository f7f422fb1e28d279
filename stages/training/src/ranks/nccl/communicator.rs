//! The thread of a rank that has its communicator: it starts the operations, and looks after those that run.
//!
//! NCCL waits for ever for a rank that hangs or has ended. So this thread ends the communicator where another rank has
//! failed, as the group of the ranks says, where NCCL reports an error, and where an operation takes too long; the model's
//! stream, which may wait for the operation, then goes on, and the rank gets the error at its next operation.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::Tensor;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use super::library::{Communicator, Failure, Library};
use super::stream::{Mark, Streams, memory};
use crate::ranks::local_collective::GroupWatch;
use crate::ranks::{CollectiveKey, NcclUniqueId};

/// How often the state of NCCL is asked for.
const POLL_INTERVAL: Duration = Duration::from_micros(100);
/// How long a rank to which NCCL says that another one has failed waits to be told which.
const REMOTE_PATIENCE: Duration = Duration::from_secs(2);

/// Operations that are started as one group.
pub(super) struct Operation {
    pub key: CollectiveKey,
    /// The tensors are computed when the model's stream has come here.
    pub after: Mark,
    pub calls: Vec<Call>,
    /// Gets the point of NCCL's stream at which they are finished.
    pub done: Sender<Result<Arc<Mark>, String>>,
}

/// One operation, with the tensors that it works on.
pub(super) enum Call {
    /// Sums the tensor over the ranks to that of a rank.
    Reduce(Tensor, usize),
    /// Overwrites the tensor with that of a rank.
    Broadcast(Tensor, usize),
    /// Writes `from` of all ranks to `to`.
    AllGather { from: Tensor, to: Tensor },
}

/// What the thread of a communicator is given.
pub(super) struct CommunicatorThread {
    pub library: &'static Library,
    pub rank: usize,
    pub size: usize,
    pub id: NcclUniqueId,
    pub streams: Streams,
    pub group: GroupWatch,
    pub timeout: Duration,
}

/// An operation that is to be given to the device or was. Its tensors are held until it is finished, as their memory would
/// be used again otherwise.
struct Running {
    operation: Operation,
    /// When it was taken.
    since: Instant,
    /// Where NCCL has given it to the device.
    mark: Option<Arc<Mark>>,
}

impl Running {
    fn new(operation: Operation) -> Self {
        Running {
            operation,
            since: Instant::now(),
            mark: None,
        }
    }
}

/// Why the thread gives the communicator up.
enum End {
    /// A rank has failed, and the group knows which.
    Known(String),
    Failed(Failure),
    /// An operation takes too long.
    Late(CollectiveKey),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        End::Failed(failure)
    }
}

impl From<String> for End {
    fn from(message: String) -> Self {
        End::Failed(message.into())
    }
}

impl CommunicatorThread {
    /// Works until the channel is closed, and then until the last operation is finished.
    pub fn run(self, operations: &Receiver<Operation>) {
        let mut running = VecDeque::new();
        let Err(end) = self.serve(operations, &mut running) else {
            return;
        };
        let message = self.report(end);
        // Not before: a rank that finds its channel closed asks the group why.
        drop(running);
        for operation in operations {
            // The receiver is dropped where the rank has failed.
            let _ = operation.done.send(Err(message.clone()));
        }
    }

    /// When this returns the communicator is gone, and nothing uses the tensors of `running`.
    fn serve(&self, operations: &Receiver<Operation>, running: &mut VecDeque<Running>) -> Result<(), End> {
        let Ok(first) = operations.recv() else {
            return Ok(());
        };
        let key = first.key;
        running.push_back(Running::new(first));
        self.streams.use_device()?;
        let communicator = Communicator::join(self.library, self.rank, self.size, self.id)?;
        self.await_progress(&communicator, key, Instant::now())?;
        let mut open = true;
        loop {
            if let Some(last) = running.back_mut() {
                self.launch(&communicator, last)?;
            }
            let next = loop {
                while let Some(front) = running.front() {
                    if !front.mark.as_ref().map_or(Ok(true), |mark| mark.is_past())? {
                        communicator.progress()?;
                        self.watch(front.operation.key, front.since)?;
                        break;
                    }
                    running.pop_front();
                }
                let idle = running.is_empty();
                match open {
                    true if idle => match operations.recv() {
                        Ok(operation) => break operation,
                        Err(_) => return Ok(()),
                    },
                    true => match operations.recv_timeout(POLL_INTERVAL) {
                        Ok(operation) => break operation,
                        Err(RecvTimeoutError::Timeout) => {}
                        Err(RecvTimeoutError::Disconnected) => open = false,
                    },
                    false if idle => return Ok(()),
                    false => std::thread::sleep(POLL_INTERVAL),
                }
            };
            running.push_back(Running::new(next));
        }
    }

    /// Gives an operation to the device.
    fn launch(&self, communicator: &Communicator, running: &mut Running) -> Result<(), End> {
        let Operation {
            key,
            after,
            calls,
            done,
        } = &running.operation;
        let stream = self.streams.exchange();
        self.streams.exchange_after(after)?;
        communicator.group(|| {
            for call in calls {
                // SAFETY: the tensors are held until the operation is finished or the communicator is given up, and the
                // rank uses none of them before: it waits for `done`.
                unsafe {
                    match call {
                        Call::Reduce(tensor, root) => {
                            communicator.reduce(memory(tensor, &self.streams)?, *root, stream)?;
                        }
                        Call::Broadcast(tensor, root) => {
                            communicator.broadcast(memory(tensor, &self.streams)?, *root, stream)?;
                        }
                        Call::AllGather { from, to } => {
                            let (from, to) = (memory(from, &self.streams)?, memory(to, &self.streams)?);
                            communicator.all_gather(from, to, stream)?;
                        }
                    }
                }
            }
            Ok(())
        })?;
        self.await_progress(communicator, *key, running.since)?;
        let mark = Arc::new(self.streams.exchanged()?);
        // The receiver is dropped where the rank has failed.
        let _ = done.send(Ok(mark.clone()));
        running.mark = Some(mark);
        Ok(())
    }

    /// Waits until NCCL has done what it was told at `since`.
    fn await_progress(&self, communicator: &Communicator, key: CollectiveKey, since: Instant) -> Result<(), End> {
        while !communicator.progress()? {
            self.watch(key, since)?;
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Ends the wait for an operation where a rank has failed, or does not come to it.
    fn watch(&self, key: CollectiveKey, since: Instant) -> Result<(), End> {
        if let Err(error) = self.group.check() {
            return Err(End::Known(error.to_string()));
        }
        match since.elapsed() > self.timeout {
            true => Err(End::Late(key)),
            false => Ok(()),
        }
    }

    /// Tells the group who has failed, and gives the words for it.
    fn report(&self, end: End) -> String {
        match end {
            End::Known(message) => message,
            End::Late(key) => {
                let message = format!("within {} s", self.timeout.as_secs_f64());
                self.group.late(
                    key,
                    &format!("it did not come to {key} {message}"),
                    &format!("NCCL did not end the exchange of {key} {message}"),
                )
            }
            End::Failed(Failure { remote, message }) => {
                let began = Instant::now();
                while remote && self.group.check().is_ok() && began.elapsed() < REMOTE_PATIENCE.min(self.timeout) {
                    std::thread::sleep(POLL_INTERVAL);
                }
                self.group.fail(&format!("NCCL: {message}"))
            }
        }
    }
}
