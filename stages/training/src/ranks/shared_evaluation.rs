//! Evaluation between two steps, shared over the ranks: each transcribes whole micro-batches of the validation sample with its
//! replica of the model. The results are those of one rank, to the bit, since no micro-batch is divided.

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use flow_evaluation::transcribe::{Recognized, recognize};
use flow_model::Parameters;
use flow_model::model::{MicroBatch, TdtModel};
use rayon::ThreadPool;

use super::local_collective::GroupWatch;
use super::{RankCommand, RankHandle, RemoteRanks, Replica, gone};
use crate::error::TrainingError;

/// Weights by name, in host memory if others are on a device. Never changed in place.
pub(crate) type NamedWeights = Arc<Vec<(String, Tensor)>>;

/// What a rank is to do in an evaluation.
pub(crate) enum Evaluation {
    /// An evaluation begins: of these weights, where it is not that of the rank's own.
    Begin(Option<NamedWeights>),
    /// A micro-batch is to be transcribed.
    Batch(MicroBatch),
    /// It is over: the rank's own weights come back.
    End,
}

/// Called with what a rank has made of an [`Evaluation`]: nothing but for [`Evaluation::Batch`].
pub(crate) type EvaluationReply = Box<dyn FnOnce(Result<Recognized, TrainingError>) + Send>;

/// How often a wait for a rank looks whether one has failed.
const LOOK: Duration = Duration::from_millis(200);

impl Replica {
    /// Does its part of an evaluation.
    pub(super) fn evaluate(&mut self, what: &Evaluation) -> Result<Recognized, TrainingError> {
        match what {
            Evaluation::Begin(weights) => {
                self.synchronize()?;
                if let Some(weights) = weights {
                    let mut evaluated = self.model.parameters.clone();
                    for (name, tensor) in weights.iter() {
                        if let Some(id) = evaluated.id(name) {
                            evaluated.set(id, tensor.clone())?;
                        }
                    }
                    let live = std::mem::replace(&mut self.model.parameters, evaluated);
                    self.live.get_or_insert(live);
                }
            }
            Evaluation::Batch(batch) => return Ok(recognize(&self.model, batch)?),
            Evaluation::End => {
                if let Some(live) = self.live.take() {
                    self.model.parameters = live;
                }
            }
        }
        Ok(Recognized::default())
    }
}

/// The ranks beside the first one, as an evaluation needs them.
pub(crate) struct Evaluators<'a> {
    pub others: &'a [RankHandle],
    pub remote: Option<&'a RemoteRanks>,
    /// The threads of the first rank, where there are several.
    pub pool: Option<&'a ThreadPool>,
    pub watch: Option<&'a GroupWatch>,
    pub timeout: Duration,
    /// Whether the ranks know of the evaluation.
    pub begun: bool,
}

impl Evaluators<'_> {
    /// What `model` makes of micro-batches, in their order. They are dealt to the ranks in turn, one to each at a time.
    /// `averaged`: whether the model has other weights than the other ranks have.
    ///
    /// # Errors
    /// Where a rank fails, or does not answer in time.
    pub fn recognize_all(
        &mut self,
        model: &TdtModel,
        averaged: bool,
        batches: &mut dyn Iterator<Item = MicroBatch>,
    ) -> Result<Vec<Recognized>, TrainingError> {
        let mut all = Vec::new();
        while let Some(own) = batches.next() {
            let mut asked = Vec::with_capacity(self.others.len());
            for (rank, other) in (1..).zip(self.others) {
                let Some(batch) = batches.next() else { break };
                if !std::mem::replace(&mut self.begun, true) {
                    self.begin(averaged.then_some(&model.parameters))?;
                }
                asked.push((rank, self.ask(rank, other, Evaluation::Batch(batch))?));
            }
            all.push(match self.pool {
                None => recognize(model, &own)?,
                Some(pool) => pool.install(|| recognize(model, &own))?,
            });
            for (rank, answer) in asked {
                all.push(self.wait(rank, &answer)?);
            }
        }
        Ok(all)
    }

    /// Gives the other ranks the weights that are evaluated, if they have others, and waits until all have them: they may change
    /// afterwards.
    fn begin(&self, averaged: Option<&Parameters>) -> Result<(), TrainingError> {
        let mut weights = None;
        if let Some(averaged) = averaged {
            // Each goes over the link of the first rank's device once.
            let host = match averaged.device() {
                Device::Cpu => averaged.clone(),
                _ => averaged.copied_to(&Device::Cpu)?,
            };
            let named = host.iter().map(|(_, one)| (one.name.clone(), one.tensor.clone()));
            let named: NamedWeights = Arc::new(named.collect());
            if let Some(remote) = self.remote {
                remote.send_evaluated(&named)?;
            }
            weights = Some(named);
        }
        self.ask_all(|| Evaluation::Begin(weights.clone()))
    }

    /// Tells the ranks that the evaluation is over.
    pub fn end(&self) -> Result<(), TrainingError> {
        match self.begun {
            true => self.ask_all(|| Evaluation::End),
            false => Ok(()),
        }
    }

    fn ask_all(&self, what: impl Fn() -> Evaluation) -> Result<(), TrainingError> {
        let ask = |(rank, other)| Ok((rank, self.ask(rank, other, what())?));
        let asked: Vec<_> = (1..).zip(self.others).map(ask).collect::<Result<_, TrainingError>>()?;
        asked
            .into_iter()
            .try_for_each(|(rank, answer)| self.wait(rank, &answer).map(drop))
    }

    fn ask(&self, rank: usize, other: &RankHandle, what: Evaluation) -> Result<Answer, TrainingError> {
        let (send, answer) = bounded(1);
        let reply: EvaluationReply = Box::new(move |outcome| {
            // The receiver may be dropped already.
            let _ = send.send(outcome);
        });
        let sent = other.commands.send(RankCommand::Evaluate(what, reply));
        sent.map_err(|_| gone(self.watch, rank))?;
        Ok(answer)
    }

    fn wait(&self, rank: usize, answer: &Answer) -> Result<Recognized, TrainingError> {
        let began = Instant::now();
        loop {
            match answer.recv_timeout(LOOK) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Timeout) if began.elapsed() < self.timeout => {
                    // A process that is lost does not answer.
                    self.watch.map_or(Ok(()), GroupWatch::check)?;
                }
                Err(_) => return Err(gone(self.watch, rank)),
            }
        }
    }
}

type Answer = Receiver<Result<Recognized, TrainingError>>;
