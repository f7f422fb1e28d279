//! At process 0: the ranks of other processes. Each looks like a rank on a thread of its own, which hands on what it is
//! given.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use crossbeam_channel::bounded;
use flow_model::Parameters;
use flow_model::model::TdtModel;
use flow_runtime::processes::Processes;

use super::elsewhere::{Elsewhere, Share};
use super::wire::{Parcel, Reader, damaged};
use super::{NcclId, OtherRank, RankReport, Work};
use crate::error::TrainingError;
use crate::optimizer::AdamW;
use crate::trainer::TrainerConfig;

/// Topic of what process 0 asks of the others.
pub(super) const WORK: u32 = 0;

/// Topic of what they answer.
pub(super) fn reports(session: u32) -> u32 {
    1 + 2 * session
}

/// Settings and sizes of a training that begins, after which come [`TENSOR`], [`MOMENTS`] and [`START`].
pub(super) const BEGIN: u8 = 0;
/// A parameter or buffer of the model.
pub(super) const TENSOR: u8 = 1;
/// The optimizer's state of one parameter.
pub(super) const MOMENTS: u8 = 2;
pub(super) const START: u8 = 3;
/// A rank's part of an optimizer step.
pub(super) const STEP: u8 = 4;
/// Asks for the optimizer's state that a rank keeps.
pub(super) const ASK_MOMENTS: u8 = 5;
pub(super) const FINISH: u8 = 6;

/// What a rank did in a step.
pub(super) const REPORT: u8 = 0;
/// Why a rank did not do a step.
pub(super) const FAILED: u8 = 1;
/// The optimizer's state of one parameter.
pub(super) const KEPT: u8 = 2;
/// There are no more.
pub(super) const ALL_KEPT: u8 = 3;

/// The ranks of other processes, which end when this is dropped.
pub(crate) struct Remote {
    processes: Arc<Processes>,
    session: u32,
    share: Share,
    ranks: usize,
    optimizer: crate::optimizer::AdamWConfig,
}

/// What the other processes need to begin.
pub(crate) struct Begin<'a> {
    pub share: Share,
    /// The owner of each parameter.
    pub owners: &'a [usize],
    pub model: &'a TdtModel,
    /// With the moments of all parameters.
    pub optimizer: &'a AdamW,
    pub config: &'a TrainerConfig,
    /// Where ranks on GPUs meet.
    pub nccl: Option<NcclId>,
    /// Memory that a rank needs, where it is known.
    pub rank_bytes: Option<u64>,
}

enum Answer {
    Step(Result<RankReport, TrainingError>),
    Kept(AdamW),
    AllKept,
}

impl Remote {
    /// Sends everything that the other processes need, to those that need it. They read it while this process goes on.
    pub fn begin(processes: &Arc<Processes>, begin: &Begin) -> Result<Remote, TrainingError> {
        let Begin {
            share,
            owners,
            model,
            optimizer,
            config,
            nccl,
            rank_bytes,
        } = *begin;
        let session = processes.new_session();
        let parameters = &model.parameters;
        let yaml = model.config.to_nemo_yaml()?;
        for to in 1..processes.count() {
            let send = |parcel| processes.send(to, WORK, Box::new(parcel));
            let mut begin = Parcel::of(BEGIN);
            begin.u32(session);
            begin.config(config);
            begin.adamw(&optimizer.config);
            begin.dtype(parameters.dtype())?;
            begin.dtype(parameters.matrix_dtype())?;
            begin.text(&yaml);
            begin.bool(nccl.is_some());
            begin.bytes(nccl.as_ref().map_or(&[], |id| &id[..]));
            begin.u64(rank_bytes.unwrap_or(0));
            send(begin);
            for (_, parameter) in parameters.iter() {
                let mut parcel = Parcel::of(TENSOR);
                parcel.text(&parameter.name);
                parcel.tensor(&parameter.tensor)?;
                send(parcel);
            }
            for name in optimizer.names() {
                let owner = parameters.id(name).and_then(|id| owners.get(id.index()));
                if owner.is_some_and(|&owner| share.process_of(owner) == to) {
                    let mut parcel = Parcel::of(MOMENTS);
                    parcel.bytes(&optimizer.bytes_of(name)?);
                    send(parcel);
                }
            }
            send(Parcel::of(START));
        }
        Ok(Remote {
            processes: Arc::clone(processes),
            session,
            share,
            ranks: config.ranks as usize,
            optimizer: optimizer.config,
        })
    }

    /// The way to their ranks, for those of this process.
    pub fn elsewhere(&self, parameters: &Parameters) -> Elsewhere {
        Elsewhere::new(&self.processes, self.session, self.share, parameters)
    }

    /// Their ranks, in order.
    pub fn ranks(&self) -> Result<Vec<OtherRank>, TrainingError> {
        let first = self.share.of(self.processes.process()).end;
        let (tell, told): (Vec<Sender<Answer>>, Vec<Receiver<Answer>>) = (first..self.ranks).map(|_| channel()).unzip();
        let adamw = self.optimizer;
        self.processes.listen(reports(self.session), move |from, message| {
            if let Ok((rank, answer)) = read(&message, adamw, from)
                && let Some(tell) = rank.checked_sub(first).and_then(|at| tell.get(at))
            {
                // Whoever asked may be gone.
                let _ = tell.send(answer);
            }
        });
        (first..self.ranks)
            .zip(told)
            .map(|(rank, answers)| self.rank(rank, answers))
            .collect()
    }

    fn rank(&self, rank: usize, answers: Receiver<Answer>) -> Result<OtherRank, TrainingError> {
        let (work, take) = bounded::<Work>(1);
        let (tell, reports) = bounded(1);
        let (processes, adamw) = (Arc::clone(&self.processes), self.optimizer);
        let to = self.share.process_of(rank);
        let serve = move || {
            while let Ok(work) = take.recv() {
                match work {
                    Work::Step(plan, batches) => {
                        let mut parcel = Parcel::of(STEP);
                        parcel.count(rank);
                        parcel.plan(&plan);
                        parcel.count(batches.len());
                        batches.iter().for_each(|loaded| parcel.micro_batch(loaded));
                        drop(batches);
                        processes.send(to, WORK, Box::new(parcel));
                        let Ok(Answer::Step(outcome)) = answers.recv() else {
                            return;
                        };
                        let ended = outcome.is_err();
                        if tell.send(outcome).is_err() || ended {
                            return;
                        }
                    }
                    Work::Moments(reply) => {
                        let mut parcel = Parcel::of(ASK_MOMENTS);
                        parcel.count(rank);
                        processes.send(to, WORK, Box::new(parcel));
                        let mut whole = AdamW::new(adamw);
                        loop {
                            match answers.recv() {
                                Ok(Answer::Kept(part)) => whole.extend(part),
                                Ok(Answer::AllKept) => break,
                                Ok(Answer::Step(_)) | Err(_) => return,
                            }
                        }
                        // Whoever asked may be gone.
                        let _ = reply.send(Ok(whole));
                    }
                }
            }
        };
        std::thread::Builder::new()
            .name(format!("rank-{rank}"))
            .spawn(serve)
            .map_err(|e| TrainingError::Rank {
                rank,
                message: format!("the thread that serves it cannot be started: {e}"),
            })?;
        Ok(OtherRank { work, reports })
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.processes.close(reports(self.session));
        for to in 1..self.processes.count() {
            self.processes.send(to, WORK, Box::new(Parcel::of(FINISH)));
        }
    }
}

fn read(message: &[u8], adamw: crate::optimizer::AdamWConfig, from: usize) -> Result<(usize, Answer), TrainingError> {
    let (kind, mut reader) = Reader::new(message)?;
    let rank = reader.count()?;
    let answer = match kind {
        REPORT => Answer::Step(Ok(reader.report()?)),
        FAILED => Answer::Step(Err(TrainingError::Rank {
            rank: reader.count()?,
            message: reader.text()?,
        })),
        KEPT => Answer::Kept(AdamW::from_bytes(reader.rest(), adamw, &format!("process {from}"))?),
        ALL_KEPT => Answer::AllKept,
        _ => return Err(damaged()),
    };
    Ok((rank, answer))
}
