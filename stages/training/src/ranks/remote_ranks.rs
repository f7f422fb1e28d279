//! At process 0: the ranks of the other processes. A proxy thread for each forwards its commands and reports.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select_biased, unbounded};
use flow_evaluation::transcribe::Recognized;
use flow_kind::processes::Processes;
use flow_model::Parameters;
use flow_model::model::TdtModel;

use super::codec::{Message, MessageReader, malformed_message};
use super::peer_transport::PeerTransport;
use super::{
    Evaluation, EvaluationReply, LoadedElsewhere, LoadedShare, NamedWeights, NcclUniqueId, RankCommand, RankHandle,
    RankLayout, RankReport, ShareOutcome, StateReply,
};
use crate::error::TrainingError;
use crate::loaded_rows::RowRules;
use crate::optimizer::{AdamW, AdamWConfig};
use crate::prompts::PromptSettings;
use crate::trainer::TrainerConfig;

/// Topic of the commands of process 0.
pub(super) const COMMANDS: u32 = 0;

/// Topic of the replies of one training.
pub(super) fn replies_topic(session: u32) -> u32 {
    1 + 2 * session
}

// Kinds of commands.

/// Settings of a new training, followed by [`MODEL_TENSOR`]s, [`OPTIMIZER_STATE`]s and [`START_TRAINING`].
pub(super) const NEW_TRAINING: u8 = 0;
/// A parameter or buffer of the model.
pub(super) const MODEL_TENSOR: u8 = 1;
/// The optimizer's state of one parameter.
pub(super) const OPTIMIZER_STATE: u8 = 2;
/// The model and the optimizer's state are complete.
pub(super) const START_TRAINING: u8 = 3;
/// An optimizer step of one rank.
pub(super) const STEP: u8 = 4;
/// Asks for the optimizer's state of the parameters that a rank owns.
pub(super) const GET_OPTIMIZER_STATE: u8 = 5;
/// The training is over.
pub(super) const END_TRAINING: u8 = 6;
/// The ranks do not take part in a step, of which no process has loaded an utterance.
pub(super) const SKIP_STEP: u8 = 7;
/// A tensor of the weights of the evaluation that begins.
pub(super) const EVALUATED_TENSOR: u8 = 8;
/// An evaluation begins for a rank, of the weights that were sent if there are any.
pub(super) const BEGIN_EVALUATION: u8 = 9;
/// A micro-batch that a rank is to transcribe.
pub(super) const EVALUATE: u8 = 10;
/// The evaluation is over for a rank.
pub(super) const END_EVALUATION: u8 = 11;

// Kinds of replies.

/// The report of a rank on a step.
pub(super) const STEP_REPORT: u8 = 0;
/// The error of a rank in a step.
pub(super) const STEP_FAILED: u8 = 1;
/// The optimizer's state of one parameter.
pub(super) const OPTIMIZER_STATE_OF_ONE: u8 = 2;
/// No more states follow.
pub(super) const OPTIMIZER_STATE_END: u8 = 3;
/// What the process has loaded of a step for its ranks.
pub(super) const STEP_LOADED: u8 = 4;
/// Why the process cannot go on: before the ranks begin a step they do not notice it.
pub(super) const PROCESS_FAILED: u8 = 5;
/// A rank has done its part of an evaluation.
pub(super) const EVALUATED: u8 = 6;
/// Why a rank could not do its part of an evaluation.
pub(super) const EVALUATION_FAILED: u8 = 7;

/// The ranks of other processes, whose training ends when this is dropped: after the commands that were given before.
pub(crate) struct RemoteRanks {
    processes: Arc<Processes>,
    session: u32,
    layout: RankLayout,
    ranks: usize,
    optimizer: AdamWConfig,
    /// Whether the others load the micro-batches of their ranks.
    own_batches: bool,
    /// What they have loaded.
    loaded: (Sender<ShareOutcome>, Receiver<ShareOutcome>),
    proxies: Vec<JoinHandle<()>>,
}

/// What the other processes need to start a training.
pub(crate) struct RemoteStart<'a> {
    pub layout: RankLayout,
    /// The owner of each parameter, by index.
    pub owners: &'a [usize],
    pub model: &'a TdtModel,
    /// With the moments of all parameters.
    pub optimizer: &'a AdamW,
    pub config: &'a TrainerConfig,
    /// Where ranks on GPUs use NCCL.
    pub nccl_id: Option<NcclUniqueId>,
    /// Bytes of memory that a rank needs, where they are known.
    pub rank_bytes: Option<u64>,
    /// As [`super::ProcessGroup::own_batches`].
    pub own_batches: Option<(RowRules, &'a PromptSettings)>,
}

enum Reply {
    Step(Result<RankReport, TrainingError>),
    OptimizerState(AdamW),
    OptimizerStateEnd,
    Evaluated(Result<Recognized, TrainingError>),
    /// Nothing more comes of the rank, for this reason: its process is lost, or cannot go on.
    Gone(String),
}

/// What a proxy waits for.
struct Outstanding {
    rank: usize,
    report: Sender<Result<RankReport, TrainingError>>,
    stepping: bool,
    /// The state of the optimizer that is on its way, beside which the next step may run.
    arriving: Option<(AdamW, StateReply)>,
    evaluating: Option<EvaluationReply>,
}

impl RemoteRanks {
    /// Sends settings, model and optimizer state to the other processes. Returns before they have received them.
    ///
    /// # Errors
    /// Where a tensor has a data type that is not sent.
    pub fn start(processes: &Arc<Processes>, start: &RemoteStart) -> Result<RemoteRanks, TrainingError> {
        let RemoteStart {
            layout,
            owners,
            model,
            optimizer,
            config,
            nccl_id,
            rank_bytes,
            own_batches,
        } = *start;
        // Without a tokenizer there are no targets: the caller refuses the first step.
        let own_batches = own_batches
            .map(|(rows, prompts)| (rows, prompts.clone()))
            .zip(model.tokenizer.as_ref().map(|tokenizer| tokenizer.bytes().to_vec()));
        let session = processes.new_session();
        let parameters = &model.parameters;
        let yaml = model.config.to_nemo_yaml()?;
        // Copied to host memory once; messages to all processes share the copies.
        let mut tensors = Vec::new();
        for (_, parameter) in parameters.iter() {
            let message = Message::new(MODEL_TENSOR).with_text(&parameter.name);
            tensors.push(message.with_tensor(&parameter.tensor)?);
        }
        for to in 1..processes.count() {
            let send = |message| processes.send(to, COMMANDS, Box::new(message));
            let training = Message::new(NEW_TRAINING)
                .with(&session)
                .with(config)
                .with(&optimizer.config);
            let training = training
                .with_dtype(parameters.dtype())?
                .with_dtype(parameters.matrix_dtype())?;
            let training = training.with(&yaml).with(&nccl_id).with(&rank_bytes.unwrap_or(0));
            send(training.with(&own_batches));
            tensors.iter().cloned().for_each(&send);
            for name in optimizer.names() {
                let owner = parameters.id(name).and_then(|id| owners.get(id.index()));
                if owner.is_some_and(|&owner| layout.process_of(owner) == to) {
                    send(Message::new(OPTIMIZER_STATE).with_bytes(&optimizer.bytes_of(name)?));
                }
            }
            send(Message::new(START_TRAINING));
        }
        Ok(RemoteRanks {
            processes: Arc::clone(processes),
            session,
            layout,
            ranks: config.ranks as usize,
            optimizer: optimizer.config,
            own_batches: own_batches.is_some(),
            loaded: unbounded(),
            proxies: Vec::new(),
        })
    }

    /// The connection of the ranks of this process to those of the others.
    pub fn transport(&self, parameters: &Parameters) -> PeerTransport {
        PeerTransport::new(&self.processes, self.session, self.layout, parameters)
    }

    /// Handles of the ranks of other processes, in their order. They end with this, which does not wait for them to be
    /// dropped.
    ///
    /// # Errors
    /// Where a thread cannot be started.
    pub fn handles(&mut self) -> Result<Vec<RankHandle>, TrainingError> {
        let first = self.layout.ranks_of(self.processes.process()).end;
        let (senders, receivers): (Vec<Sender<Reply>>, Vec<Receiver<Reply>>) =
            (first..self.ranks).map(|_| unbounded()).unzip();
        let adamw = self.optimizer;
        let topic = replies_topic(self.session);
        let loaded = self.loaded.0.clone();
        let layout = self.layout;
        // Receivers may be dropped already.
        let gone = move |senders: &[Sender<Reply>], process: usize, why: &str| {
            let of_process = layout.ranks_of(process).filter_map(|rank| rank.checked_sub(first));
            for sender in of_process.filter_map(|at| senders.get(at)) {
                let _ = sender.send(Reply::Gone(why.to_owned()));
            }
        };
        let senders = Arc::new(senders);
        // Those that listen live as long as the processes, the senders as long as the topic.
        let at_loss = Arc::downgrade(&senders);
        self.processes.listen(topic, move |from, message| {
            if let Some(share) = decode_share(&message) {
                if let Err(error) = &share {
                    let why = match error {
                        TrainingError::Rank { message, .. } => message.clone(),
                        error => error.to_string(),
                    };
                    gone(&senders, from, &why);
                }
                let _ = loaded.send((from, share));
                return;
            }
            match decode_reply(&message, adamw) {
                Ok((rank, reply)) => {
                    if let Some(sender) = rank.checked_sub(first).and_then(|at| senders.get(at)) {
                        let _ = sender.send(reply);
                    }
                }
                Err(error) => gone(
                    &senders,
                    from,
                    &format!("process {from} sent what cannot be read: {error}"),
                ),
            }
        });
        self.processes.on_loss(move |loss| {
            if let Some(senders) = at_loss.upgrade() {
                gone(&senders, loss.process, &loss.message);
            }
        });
        (first..self.ranks)
            .zip(receivers)
            .map(|(rank, replies)| self.spawn_proxy(rank, replies))
            .collect()
    }

    /// What the other processes load of each step, each of which process 0 waits for so long; none where it sends all
    /// micro-batches.
    pub fn loaded_elsewhere(&self, patience: Duration) -> Option<LoadedElsewhere> {
        let told = self.loaded.1.clone();
        self.own_batches
            .then(|| LoadedElsewhere::new(told, patience, self.layout, self.ranks, self.processes.count()))
    }

    /// Sends the weights of the evaluation that begins, once to each process. Returns before they have received them.
    ///
    /// # Errors
    /// Where a tensor has a data type that is not sent.
    pub fn send_evaluated(&self, weights: &NamedWeights) -> Result<(), TrainingError> {
        for (name, tensor) in weights.iter() {
            let message = Message::new(EVALUATED_TENSOR).with_text(name).with_tensor(tensor)?;
            for to in 1..self.processes.count() {
                self.processes.send(to, COMMANDS, Box::new(message.clone()));
            }
        }
        Ok(())
    }

    /// Tells the others that their ranks do not take part in a step.
    pub fn skip(&self, step: u64) {
        for to in 1..self.processes.count() {
            let message = Message::new(SKIP_STEP).with(&step);
            self.processes.send(to, COMMANDS, Box::new(message));
        }
    }

    /// The thread that forwards commands to a rank, and its reports.
    fn spawn_proxy(&mut self, rank: usize, replies: Receiver<Reply>) -> Result<RankHandle, TrainingError> {
        let (commands, received) = bounded::<RankCommand>(1);
        let (report, reports) = bounded(1);
        let (processes, adamw) = (Arc::clone(&self.processes), self.optimizer);
        let to = self.layout.process_of(rank);
        let own_batches = self.own_batches;
        let mut outstanding = Outstanding {
            rank,
            report,
            stepping: false,
            arriving: None,
            evaluating: None,
        };
        let forward = move || {
            let forward = |command: RankCommand, outstanding: &mut Outstanding| {
                let mut message = Message::new(match &command {
                    RankCommand::Step(..) => STEP,
                    RankCommand::OptimizerState(_) => GET_OPTIMIZER_STATE,
                    RankCommand::Evaluate(Evaluation::Begin(_), _) => BEGIN_EVALUATION,
                    RankCommand::Evaluate(Evaluation::Batch(_), _) => EVALUATE,
                    RankCommand::Evaluate(Evaluation::End, _) => END_EVALUATION,
                });
                message = message.with(&rank);
                match command {
                    RankCommand::Step(plan, batches) => {
                        message = message.with(&plan);
                        if !own_batches {
                            message = message.with(&batches);
                        }
                        outstanding.stepping = true;
                    }
                    RankCommand::OptimizerState(state) => outstanding.arriving = Some((AdamW::new(adamw), state)),
                    RankCommand::Evaluate(what, reply) => {
                        if let Evaluation::Batch(batch) = &what {
                            message = message.with(batch);
                        }
                        outstanding.evaluating = Some(reply);
                    }
                }
                processes.send(to, COMMANDS, Box::new(message));
            };
            loop {
                let reply = if outstanding.stepping {
                    replies.recv()
                } else {
                    // Commands first: one that was given before the training ended is sent.
                    select_biased! {
                        recv(received) -> command => match command {
                            Ok(command) => {
                                forward(command, &mut outstanding);
                                continue;
                            }
                            Err(_) => return,
                        },
                        recv(replies) -> reply => reply,
                    }
                };
                if !reply.is_ok_and(|reply| outstanding.take(reply)) {
                    return;
                }
            }
        };
        let proxy = std::thread::Builder::new()
            .name(format!("rank-{rank}"))
            .spawn(forward)
            .map_err(|e| TrainingError::rank(rank, format!("the thread that serves it cannot be started: {e}")))?;
        self.proxies.push(proxy);
        Ok(RankHandle { commands, reports })
    }
}

impl Outstanding {
    /// Hands on what is complete with a reply. False: nothing more comes of the rank. Receivers may be dropped already.
    fn take(&mut self, reply: Reply) -> bool {
        match reply {
            Reply::OptimizerState(part) => {
                if let Some((whole, _)) = &mut self.arriving {
                    whole.extend(part);
                }
            }
            Reply::OptimizerStateEnd => {
                if let Some((whole, reply)) = self.arriving.take() {
                    let _ = reply.send(Ok(whole));
                }
            }
            Reply::Evaluated(outcome) => {
                if let Some(reply) = self.evaluating.take() {
                    reply(outcome);
                }
            }
            Reply::Step(outcome) => {
                if std::mem::take(&mut self.stepping) {
                    let ended = outcome.is_err();
                    return self.report.send(outcome).is_ok() && !ended;
                }
            }
            Reply::Gone(message) => {
                let rank = self.rank;
                let error = || TrainingError::rank(rank, message.clone());
                if let Some((_, reply)) = self.arriving.take() {
                    let _ = reply.send(Err(error()));
                }
                if let Some(reply) = self.evaluating.take() {
                    reply(Err(error()));
                }
                if std::mem::take(&mut self.stepping) {
                    let _ = self.report.send(Err(error()));
                }
                return false;
            }
        }
        true
    }
}

impl Drop for RemoteRanks {
    fn drop(&mut self) {
        // Without replies the proxies end, when they have sent the commands that they were given; another process takes
        // a step that comes after the end of its training for a malformed message.
        self.processes.close(replies_topic(self.session));
        for proxy in self.proxies.drain(..) {
            // One that panicked has told so itself.
            let _ = proxy.join();
        }
        for to in 1..self.processes.count() {
            self.processes.send(to, COMMANDS, Box::new(Message::new(END_TRAINING)));
        }
    }
}

/// What a process has loaded of a step, or why it cannot go on; none where the message is another one.
fn decode_share(message: &[u8]) -> Option<Result<LoadedShare, TrainingError>> {
    let (kind, mut reader) = MessageReader::new(message).ok()?;
    match kind {
        STEP_LOADED => Some(reader.value()),
        PROCESS_FAILED => {
            let failed = reader.value::<(usize, String)>();
            Some(failed.and_then(|(rank, message)| Err(TrainingError::rank(rank, message))))
        }
        _ => None,
    }
}

/// The rank that a reply is from, and the reply.
fn decode_reply(message: &[u8], adamw: AdamWConfig) -> Result<(usize, Reply), TrainingError> {
    let (kind, mut reader) = MessageReader::new(message)?;
    let rank = reader.value()?;
    let reply = match kind {
        STEP_REPORT => Reply::Step(Ok(reader.value()?)),
        STEP_FAILED => Reply::Step(Err(TrainingError::rank(reader.value()?, reader.value::<String>()?))),
        OPTIMIZER_STATE_OF_ONE => {
            Reply::OptimizerState(AdamW::from_bytes(reader.rest(), adamw, &"the optimizer's state")?)
        }
        OPTIMIZER_STATE_END => Reply::OptimizerStateEnd,
        EVALUATED => Reply::Evaluated(Ok(Recognized {
            ids: reader.value()?,
            losses: reader.value()?,
        })),
        EVALUATION_FAILED => Reply::Evaluated(Err(TrainingError::rank(reader.value()?, reader.value::<String>()?))),
        _ => return Err(malformed_message()),
    };
    Ok((rank, reply))
}
