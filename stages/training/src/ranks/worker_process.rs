//! At every process but 0: its ranks, which do what process 0 commands.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use crossbeam_channel::{Receiver, Sender, bounded};
use flow_evaluation::transcribe::Recognized;
use flow_kernels::device::DeviceChoice;
use flow_kernels::threads::install;
use flow_kind::available_memory;
use flow_kind::processes::Processes;
use flow_model::ModelConfig;
use flow_model::checkpoint::StoredModel;
use flow_model::model::TdtModel;
use flow_model::tokenizer::Tokenizer;

use super::codec::{Message, MessageReader, malformed_message};
use super::own_batches::{BatchRules, OwnBatches, WorkerInput, WorkerInputs};
use super::peer_transport::{PeerTransport, broadcast_failure};
use super::remote_ranks::{
    BEGIN_EVALUATION, COMMANDS, END_EVALUATION, END_TRAINING, EVALUATE, EVALUATED, EVALUATED_TENSOR, EVALUATION_FAILED,
    GET_OPTIMIZER_STATE, MODEL_TENSOR, NEW_TRAINING, OPTIMIZER_STATE, OPTIMIZER_STATE_END, OPTIMIZER_STATE_OF_ONE,
    PROCESS_FAILED, SKIP_STEP, START_TRAINING, STEP, STEP_FAILED, STEP_LOADED, STEP_REPORT, replies_topic,
};
use super::{
    Evaluation, EvaluationReply, NamedWeights, NcclUniqueId, RankCommand, RankHandle, RankLayout, Replica, StepPlan,
    group_in_process, new_collective, open_device, parameter_owners, rank_thread_pool,
};
use crate::error::TrainingError;
use crate::loaded_rows::RowRules;
use crate::memory::{check_device, gigabytes};
use crate::optimizer::AdamW;
use crate::prompts::{PromptSettings, RowPrompts};
use crate::trainer::TrainerConfig;

/// How long a process whose ranks failed waits for process 0 to end the run, before it ends by itself.
const ABORT_DELAY: Duration = Duration::from_secs(30);

/// A process other than 0, whose ranks train on threads of their own until the process ends.
pub struct WorkerProcess {
    failure: Failure,
}

type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// When this process failed, and why.
type Failure = Arc<Mutex<Option<(Instant, String)>>>;

impl WorkerProcess {
    /// Starts the thread that executes the commands of process 0: one training after the other. `log` is called with a
    /// line for each event.
    ///
    /// # Errors
    /// Where the thread cannot be started. All other errors are sent to all processes and end the run.
    pub fn start(
        processes: &Arc<Processes>,
        log: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<WorkerProcess, TrainingError> {
        let failure = Failure::default();
        let inputs = processes.shared::<WorkerInputs>();
        let (send, received) = (inputs.send.clone(), inputs.receive.clone());
        processes.listen(COMMANDS, move |from, message| {
            if from == 0 {
                // The receiving thread lives as long as the process.
                let _ = send.send(WorkerInput::Command(message));
            }
        });
        let mut worker = Worker {
            processes: Arc::clone(processes),
            log: Arc::new(log),
            failure: Arc::clone(&failure),
            session: None,
            pending: None,
            running: None,
            rules: None,
            own_batches: OwnBatches::default(),
            evaluated: Vec::new(),
            evaluating: None,
        };
        std::thread::Builder::new()
            .name("worker".into())
            .spawn(move || worker.run(&received))
            .map_err(|e| TrainingError::data(format!("the thread of the ranks cannot be started: {e}")))?;
        Ok(WorkerProcess { failure })
    }

    /// Why this process is to end although process 0 did not end the run: its ranks failed more than 30 s ago.
    pub fn abort_reason(&self) -> Option<String> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, message) = failure.as_ref()?;
        (since.elapsed() > ABORT_DELAY).then(|| {
            format!(
                "{message}; process 0 did not end the run within {} s",
                ABORT_DELAY.as_secs()
            )
        })
    }
}

/// The thread that executes commands.
struct Worker {
    processes: Arc<Processes>,
    log: Log,
    failure: Failure,
    /// The session of the latest training, and the first rank of this process in it.
    session: Option<(u32, usize)>,
    pending: Option<PendingTraining>,
    running: Option<RunningTraining>,
    /// Of the latest training, where this process loads the micro-batches of its ranks.
    rules: Option<BatchRules>,
    own_batches: OwnBatches,
    /// Weights that are evaluated, as far as they have arrived.
    evaluated: Vec<(String, Tensor)>,
    /// When they are complete, until the evaluation is over.
    evaluating: Option<NamedWeights>,
}

/// A training that is not received completely.
struct PendingTraining {
    session: u32,
    layout: RankLayout,
    config: TrainerConfig,
    optimizer: AdamW,
    dtype: DType,
    matrix_dtype: DType,
    yaml: String,
    nccl_id: Option<NcclUniqueId>,
    /// Bytes of memory that a rank needs; 0 where that is not known.
    rank_bytes: u64,
    tensors: Vec<(String, Tensor)>,
}

struct RunningTraining {
    session: u32,
    /// The first rank of this process.
    first_rank: usize,
    ranks: Vec<Sender<RankCommand>>,
}

impl Worker {
    fn run(&mut self, inputs: &Receiver<WorkerInput>) {
        while let Ok(input) = inputs.recv() {
            let outcome = match input {
                WorkerInput::Command(command) => self.execute(&command),
                WorkerInput::Step(step) => {
                    self.own_batches.arrive(step);
                    self.convert()
                }
                WorkerInput::FeedEnded => {
                    self.own_batches.feed_ended();
                    Ok(())
                }
            };
            if let Err(error) = outcome {
                let error = error.with_help();
                record_failure(&self.failure, &self.log, &error);
                if let Some((session, rank)) = self.session {
                    broadcast_failure(&self.processes, session, rank, &error);
                    let message = Message::new(PROCESS_FAILED).with(&rank).with(&error);
                    self.processes.send(0, replies_topic(session), Box::new(message));
                }
            }
        }
    }

    /// Makes micro-batches of what the dataflow has loaded, and tells process 0 of them.
    fn convert(&mut self) -> Result<(), TrainingError> {
        let (Some(rules), Some((session, _))) = (&self.rules, self.session) else {
            return Ok(());
        };
        for share in self.own_batches.convert(rules)? {
            let message = Message::new(STEP_LOADED).with(&share);
            self.processes.send(0, replies_topic(session), Box::new(message));
        }
        Ok(())
    }

    fn execute(&mut self, command: &[u8]) -> Result<(), TrainingError> {
        let (kind, mut reader) = MessageReader::new(command)?;
        match kind {
            NEW_TRAINING => {
                self.running = None;
                let session = reader.value()?;
                let config: TrainerConfig = reader.value()?;
                let ranks = config.ranks as usize;
                let layout = RankLayout::new(ranks, self.processes.count())?;
                self.session = Some((session, layout.ranks_of(self.processes.process()).start));
                let optimizer = AdamW::new(reader.value()?);
                self.pending = Some(PendingTraining {
                    session,
                    layout,
                    config,
                    optimizer,
                    dtype: reader.dtype()?,
                    matrix_dtype: reader.dtype()?,
                    yaml: reader.value()?,
                    nccl_id: reader.value()?,
                    rank_bytes: reader.value()?,
                    tensors: Vec::new(),
                });
                let own_batches: Option<((RowRules, PromptSettings), Vec<u8>)> = reader.value()?;
                let pending = self.pending.as_ref().ok_or_else(malformed_message)?;
                self.rules = match own_batches {
                    Some(((rows, prompts), tokenizer)) => Some(BatchRules {
                        tokenizer: Tokenizer::from_bytes(&tokenizer)?,
                        rows,
                        prompts: RowPrompts::of_model(
                            &ModelConfig::from_nemo_yaml(&pending.yaml)?,
                            &prompts,
                            pending.config.seed,
                        )?,
                        layout,
                        ranks,
                        process: self.processes.process(),
                    }),
                    None => None,
                };
                self.convert()?;
            }
            MODEL_TENSOR => {
                let pending = self.pending.as_mut().ok_or_else(malformed_message)?;
                pending.tensors.push((reader.value()?, reader.tensor()?));
            }
            OPTIMIZER_STATE => {
                let pending = self.pending.as_mut().ok_or_else(malformed_message)?;
                let config = pending.optimizer.config;
                pending
                    .optimizer
                    .extend(AdamW::from_bytes(reader.rest(), config, &"process 0")?);
            }
            START_TRAINING => {
                let pending = self.pending.take().ok_or_else(malformed_message)?;
                self.check_memory(&pending)?;
                self.running = Some(self.start_training(pending)?);
            }
            STEP => {
                let (rank, plan): (usize, StepPlan) = reader.value()?;
                let batches = match &self.rules {
                    Some(_) => self.own_batches.take(plan.step, rank)?,
                    None => reader.value()?,
                };
                // A rank that has ended has reported its error.
                let _ = self.rank(rank)?.send(RankCommand::Step(plan, batches));
            }
            GET_OPTIMIZER_STATE => {
                let rank: usize = reader.value()?;
                let (reply, state) = bounded(1);
                let _ = self.rank(rank)?.send(RankCommand::OptimizerState(reply));
                let Ok(state) = state.recv() else { return Ok(()) };
                let state = state?;
                let running = self.running.as_ref().ok_or_else(malformed_message)?;
                let send = |message| {
                    self.processes
                        .send(0, replies_topic(running.session), Box::new(message));
                };
                for name in state.names() {
                    let message = Message::new(OPTIMIZER_STATE_OF_ONE).with(&rank);
                    send(message.with_bytes(&state.bytes_of(name)?));
                }
                send(Message::new(OPTIMIZER_STATE_END).with(&rank));
            }
            EVALUATED_TENSOR => self.evaluated.push((reader.value()?, reader.tensor()?)),
            BEGIN_EVALUATION => {
                if !self.evaluated.is_empty() {
                    self.evaluating = Some(Arc::new(std::mem::take(&mut self.evaluated)));
                }
                self.evaluate(reader.value()?, Evaluation::Begin(self.evaluating.clone()))?;
            }
            EVALUATE => self.evaluate(reader.value()?, Evaluation::Batch(reader.value()?))?,
            END_EVALUATION => {
                self.evaluating = None;
                self.evaluate(reader.value()?, Evaluation::End)?;
            }
            END_TRAINING => {
                self.pending = None;
                self.running = None;
                self.evaluated.clear();
                self.evaluating = None;
                let steps = self.own_batches.end();
                if self.rules.take().is_some() {
                    (self.log)(&format!(
                        "its ranks took the micro-batches of {steps} steps, loaded here"
                    ));
                }
            }
            SKIP_STEP => self.own_batches.skip(reader.value()?),
            _ => return Err(malformed_message()),
        }
        Ok(())
    }

    /// Has a rank do its part of an evaluation, and tells process 0 what comes of it.
    fn evaluate(&self, rank: usize, what: Evaluation) -> Result<(), TrainingError> {
        let running = self.running.as_ref().ok_or_else(malformed_message)?;
        let (processes, topic) = (Arc::clone(&self.processes), replies_topic(running.session));
        let reply: EvaluationReply = Box::new(move |outcome| {
            let message = match outcome {
                Ok(Recognized { ids, losses }) => Message::new(EVALUATED).with(&rank).with(&ids).with(&losses),
                Err(error) => Message::new(EVALUATION_FAILED).with(&rank).with(&error.of_rank(rank)),
            };
            processes.send(0, topic, Box::new(message));
        });
        // A rank that has ended has reported its error.
        let _ = self.rank(rank)?.send(RankCommand::Evaluate(what, reply));
        Ok(())
    }

    fn rank(&self, rank: usize) -> Result<&Sender<RankCommand>, TrainingError> {
        let running = self.running.as_ref().ok_or_else(malformed_message)?;
        let at = rank
            .checked_sub(running.first_rank)
            .and_then(|at| running.ranks.get(at));
        at.ok_or_else(malformed_message)
    }

    /// Refuses ranks that need more memory than is available. The tensors that process 0 sent are in memory already and
    /// count as used.
    fn check_memory(&self, pending: &PendingTraining) -> Result<(), TrainingError> {
        let ranks = pending.layout.ranks_of(self.processes.process()).len() as u64;
        let needed = pending.rank_bytes.saturating_mul(ranks);
        if pending.config.device != DeviceChoice::Cpu {
            // Each rank has a device of its own, with which it is compared when that is open.
            return Ok(());
        }
        match available_memory() {
            Some(available) if needed > available => Err(TrainingError::data(format!(
                "process {} has {} of memory available, and its {ranks} ranks need {}; `memory_check: false` tries all the same",
                self.processes.process(),
                gigabytes(available),
                gigabytes(needed),
            ))),
            _ => Ok(()),
        }
    }

    fn start_training(&self, pending: PendingTraining) -> Result<RunningTraining, TrainingError> {
        let PendingTraining {
            session,
            layout,
            config,
            optimizer,
            dtype,
            matrix_dtype,
            yaml,
            nccl_id,
            rank_bytes,
            tensors,
        } = pending;
        let stored = StoredModel {
            config_yaml: String::new(),
            tokenizer: None,
            tensors,
        };
        let model = TdtModel::from_stored(stored, ModelConfig::from_nemo_yaml(&yaml)?, dtype, &Device::Cpu)?;
        let mut model = model.stored_as(matrix_dtype)?;
        model.set_recompute(config.recompute);
        model.set_batch_norm(config.batch_norm);
        let ranks = config.ranks as usize;
        let local_ranks = layout.ranks_of(self.processes.process());
        let owners = parameter_owners(&model.parameters, ranks);
        let transport = PeerTransport::new(&self.processes, session, layout, &model.parameters);
        let group = group_in_process(ranks, local_ranks.clone(), owners, config.rank_timeout, Some(transport));
        let threads = (install(rayon::current_num_threads) / local_ranks.len()).max(1);
        let mut running = RunningTraining {
            session,
            first_rank: local_ranks.start,
            ranks: Vec::new(),
        };
        for (number, (rank, local)) in local_ranks.clone().zip(group).enumerate() {
            let device = open_device(config.device, number, local_ranks.len(), true)?;
            check_device(&device, rank, rank_bytes)?;
            let replica = model.replica_on(&device)?;
            let collective = new_collective(local, &replica.parameters, &config, nccl_id)?;
            let replica = Replica::new(replica, optimizer.on_host()?, config.clone(), collective)?;
            let handle = RankHandle::spawn(rank, replica, rank_thread_pool(rank, threads)?)?;
            running.ranks.push(handle.commands.clone());
            self.forward_reports(session, rank, handle)?;
        }
        (self.log)(&format!(
            "{} of {ranks} ready, {} each{}",
            match local_ranks.len() {
                1 => format!("rank {}", local_ranks.start),
                _ => format!("ranks {} to {}", local_ranks.start, local_ranks.end - 1),
            },
            match threads {
                1 => "one thread".to_owned(),
                threads => format!("{threads} threads"),
            },
            match nccl_id {
                Some(_) => ", gradients and parameters go by NCCL",
                None => "",
            }
        ));
        Ok(running)
    }

    /// Starts the thread that sends the reports of a rank to process 0.
    fn forward_reports(&self, session: u32, rank: usize, handle: RankHandle) -> Result<(), TrainingError> {
        let (processes, log, failure) = (
            Arc::clone(&self.processes),
            Arc::clone(&self.log),
            Arc::clone(&self.failure),
        );
        let RankHandle { commands, reports } = handle;
        // The rank ends when `RunningTraining` drops its sender, which must be the last one.
        drop(commands);
        std::thread::Builder::new()
            .name(format!("reports-of-{rank}"))
            .spawn(move || {
                while let Ok(outcome) = reports.recv() {
                    let message = match outcome {
                        Ok(report) => Message::new(STEP_REPORT).with(&rank).with(&report),
                        Err(error) => {
                            record_failure(&failure, &log, &error.to_string());
                            Message::new(STEP_FAILED).with(&rank).with(&error.of_rank(rank))
                        }
                    };
                    processes.send(0, replies_topic(session), Box::new(message));
                }
            })
            .map_err(|e| TrainingError::rank(rank, format!("its thread cannot be started: {e}")))?;
        Ok(())
    }
}

/// Logs the first failure; later ones follow from it.
fn record_failure(failure: &Failure, log: &Log, message: &str) {
    let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
    if failure.is_none() {
        log(message);
        *failure = Some((Instant::now(), message.to_owned()));
    }
}
