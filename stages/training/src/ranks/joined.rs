//! At the other processes than 0: their ranks of a training, which do what process 0 sends.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use crossbeam_channel::{Sender, bounded};
use flow_kernels::threads::install;
use flow_model::ModelConfig;
use flow_model::checkpoint::StoredModel;
use flow_model::model::TdtModel;
use flow_runtime::available_memory;
use flow_runtime::processes::Processes;

use super::elsewhere::{Elsewhere, Share, share, tell_failed};
use super::remote::{
    ALL_KEPT, ASK_MOMENTS, BEGIN, FAILED, FINISH, KEPT, MOMENTS, REPORT, START, STEP, TENSOR, WORK, reports,
};
use super::wire::{Parcel, Reader, damaged};
use super::{NcclId, OtherRank, Replica, Work, collective, members_among, owners, pool};
use crate::error::TrainingError;
use crate::memory::gigabytes;
use crate::optimizer::AdamW;
use crate::trainer::TrainerConfig;

/// How long a process whose ranks failed waits for process 0 to end the run, before it ends by itself.
const PATIENCE: Duration = Duration::from_secs(30);

/// This process's ranks, which work until the process ends.
pub struct Joined {
    failed: Arc<Mutex<Option<(Instant, String)>>>,
}

impl Joined {
    /// Why this process ends though process 0 does not say so: its ranks failed a while ago.
    pub fn given_up(&self) -> Option<String> {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, message) = failed.as_ref()?;
        (since.elapsed() > PATIENCE).then(|| {
            format!(
                "{message}; process 0 did not end the run within {} s",
                PATIENCE.as_secs()
            )
        })
    }
}

/// Does the training that process 0 sends, one after the other, on threads of its own. `tell` is given what happens, line by
/// line.
///
/// # Errors
/// Where the thread cannot be started. Everything else is told to all processes and ends the run.
pub fn serve(processes: &Arc<Processes>, tell: impl Fn(&str) + Send + Sync + 'static) -> Result<Joined, TrainingError> {
    let failed = Arc::new(Mutex::new(None));
    let (send, messages) = channel();
    processes.listen(WORK, move |from, message| {
        if from == 0 {
            // The thread lives as long as the process.
            let _ = send.send(message);
        }
    });
    let mut life = Life {
        processes: Arc::clone(processes),
        tell: Arc::new(tell),
        failed: Arc::clone(&failed),
        session: None,
        building: None,
        working: None,
    };
    std::thread::Builder::new()
        .name("joined".into())
        .spawn(move || life.go_on(&messages))
        .map_err(|e| TrainingError::Data {
            message: format!("the thread of the ranks cannot be started: {e}"),
        })?;
    Ok(Joined { failed })
}

type Tell = Arc<dyn Fn(&str) + Send + Sync>;
type Failed = Arc<Mutex<Option<(Instant, String)>>>;

struct Life {
    processes: Arc<Processes>,
    tell: Tell,
    failed: Failed,
    /// The training that process 0 began last, and the first rank of this process in it.
    session: Option<(u32, usize)>,
    building: Option<Building>,
    working: Option<Working>,
}

/// A training of which not all is there.
struct Building {
    session: u32,
    share: Share,
    config: TrainerConfig,
    optimizer: AdamW,
    dtype: DType,
    matrices: DType,
    yaml: String,
    nccl: Option<NcclId>,
    /// Memory that a rank needs; 0 where that is not known.
    rank_bytes: u64,
    tensors: Vec<(String, Tensor)>,
}

struct Working {
    session: u32,
    /// Of this process's first rank.
    first: usize,
    ranks: Vec<Sender<Work>>,
}

impl Life {
    fn go_on(&mut self, messages: &Receiver<Vec<u8>>) {
        while let Ok(message) = messages.recv() {
            if let Err(error) = self.take(&message) {
                note(&self.failed, &self.tell, &error.to_string());
                if let Some((session, rank)) = self.session {
                    tell_failed(&self.processes, session, rank, &error.to_string());
                }
            }
        }
    }

    fn take(&mut self, message: &[u8]) -> Result<(), TrainingError> {
        let (kind, mut reader) = Reader::new(message)?;
        match kind {
            BEGIN => {
                self.working = None;
                let session = reader.u32()?;
                let config = reader.config()?;
                let share = share(config.ranks as usize, self.processes.count())?;
                self.session = Some((session, share.of(self.processes.process()).start));
                let optimizer = AdamW::new(reader.adamw()?);
                self.building = Some(Building {
                    session,
                    share,
                    config,
                    optimizer,
                    dtype: reader.dtype()?,
                    matrices: reader.dtype()?,
                    yaml: reader.text()?,
                    nccl: match reader.bool()? {
                        true => Some(reader.array()?),
                        false => None,
                    },
                    rank_bytes: reader.u64()?,
                    tensors: Vec::new(),
                });
            }
            TENSOR => {
                let building = self.building.as_mut().ok_or_else(damaged)?;
                building.tensors.push((reader.text()?, reader.tensor()?));
            }
            MOMENTS => {
                let building = self.building.as_mut().ok_or_else(damaged)?;
                let config = building.optimizer.config;
                building
                    .optimizer
                    .extend(AdamW::from_bytes(reader.rest(), config, &"process 0")?);
            }
            START => {
                let building = self.building.take().ok_or_else(damaged)?;
                self.check_memory(&building)?;
                self.working = Some(self.start(building)?);
            }
            STEP => {
                let rank = reader.count()?;
                let plan = reader.plan()?;
                let batches = reader.several(Reader::micro_batch)?;
                // A rank that failed has said so.
                let _ = self.rank(rank)?.send(Work::Step(plan, batches));
            }
            ASK_MOMENTS => {
                let rank = reader.count()?;
                let (reply, answer) = bounded(1);
                let _ = self.rank(rank)?.send(Work::Moments(reply));
                let Ok(kept) = answer.recv() else { return Ok(()) };
                let kept = kept?;
                let working = self.working.as_ref().ok_or_else(damaged)?;
                let send = |parcel| self.processes.send(0, reports(working.session), Box::new(parcel));
                for name in kept.names() {
                    let mut parcel = Parcel::of(KEPT);
                    parcel.count(rank);
                    parcel.bytes(&kept.bytes_of(name)?);
                    send(parcel);
                }
                let mut parcel = Parcel::of(ALL_KEPT);
                parcel.count(rank);
                send(parcel);
            }
            FINISH => {
                self.building = None;
                self.working = None;
            }
            _ => return Err(damaged()),
        }
        Ok(())
    }

    fn rank(&self, rank: usize) -> Result<&Sender<Work>, TrainingError> {
        let working = self.working.as_ref().ok_or_else(damaged)?;
        let at = rank.checked_sub(working.first).and_then(|at| working.ranks.get(at));
        at.ok_or_else(damaged)
    }

    /// Refuses ranks that need more memory than there is. What process 0 sent of the model is here already, and counts as
    /// theirs.
    fn check_memory(&self, building: &Building) -> Result<(), TrainingError> {
        let ranks = building.share.of(self.processes.process()).len() as u64;
        let needed = building.rank_bytes.saturating_mul(ranks);
        match available_memory() {
            Some(here) if needed > here => Err(TrainingError::Data {
                message: format!(
                    "process {} has {} of memory available, and its {ranks} ranks need {}; `memory_check: false` tries all the same",
                    self.processes.process(),
                    gigabytes(here),
                    gigabytes(needed),
                ),
            }),
            _ => Ok(()),
        }
    }

    fn start(&self, building: Building) -> Result<Working, TrainingError> {
        let Building {
            session,
            share,
            config,
            optimizer,
            dtype,
            matrices,
            yaml,
            nccl,
            rank_bytes: _,
            tensors,
        } = building;
        let stored = StoredModel {
            config_yaml: String::new(),
            tokenizer: None,
            tensors,
        };
        let model = TdtModel::from_stored(stored, ModelConfig::from_nemo_yaml(&yaml)?, dtype, &Device::Cpu)?;
        let mut model = model.stored_as(matrices)?;
        model.set_recompute(config.recompute);
        let ranks = config.ranks as usize;
        let here = share.of(self.processes.process());
        let owners = owners(&model.parameters, ranks);
        let elsewhere = Elsewhere::new(&self.processes, session, share, &model.parameters);
        let members = members_among(ranks, here.clone(), owners, config.rank_timeout, Some(elsewhere));
        let threads = (install(rayon::current_num_threads) / here.len()).max(1);
        let mut working = Working {
            session,
            first: here.start,
            ranks: Vec::new(),
        };
        for (number, (rank, member)) in here.clone().zip(members).enumerate() {
            // The devices that this process sees are its own.
            let replica = model.replica_on(&config.device.open(number)?)?;
            let meeting = collective(member, &replica.parameters, &config, nccl)?;
            let replica = Replica::new(replica, optimizer.on_host()?, config.clone(), meeting)?;
            let other = OtherRank::start(rank, replica, pool(rank, threads)?)?;
            working.ranks.push(other.work.clone());
            self.forward(session, rank, other)?;
        }
        (self.tell)(&format!(
            "{} of {ranks} ready, {} each",
            match here.len() {
                1 => format!("rank {}", here.start),
                _ => format!("ranks {} to {}", here.start, here.end - 1),
            },
            match threads {
                1 => "one thread".to_owned(),
                threads => format!("{threads} threads"),
            }
        ));
        Ok(working)
    }

    /// Sends what a rank reports to process 0.
    fn forward(&self, session: u32, rank: usize, other: OtherRank) -> Result<(), TrainingError> {
        let (processes, tell, failed) = (
            Arc::clone(&self.processes),
            Arc::clone(&self.tell),
            Arc::clone(&self.failed),
        );
        let OtherRank {
            work,
            reports: outcomes,
        } = other;
        // Only `Working` keeps the rank alive.
        drop(work);
        std::thread::Builder::new()
            .name(format!("reports-of-{rank}"))
            .spawn(move || {
                while let Ok(outcome) = outcomes.recv() {
                    let mut parcel = match &outcome {
                        Ok(_) => Parcel::of(REPORT),
                        Err(_) => Parcel::of(FAILED),
                    };
                    parcel.count(rank);
                    match outcome {
                        Ok(report) => parcel.report(&report),
                        Err(error) => {
                            note(&failed, &tell, &error.to_string());
                            let (rank, message) = match error {
                                TrainingError::Rank { rank, message } => (rank, message),
                                error => (rank, error.to_string()),
                            };
                            parcel.count(rank);
                            parcel.text(&message);
                        }
                    }
                    processes.send(0, reports(session), Box::new(parcel));
                }
            })
            .map_err(|e| TrainingError::Rank {
                rank,
                message: format!("its thread cannot be started: {e}"),
            })?;
        Ok(())
    }
}

/// The first failure is told; what follows from it is not.
fn note(failed: &Failed, tell: &Tell, message: &str) {
    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
    if failed.is_none() {
        tell(message);
        *failed = Some((Instant::now(), message.to_owned()));
    }
}
