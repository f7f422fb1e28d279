//! Optimizer steps: micro-batches in, one update out.

use std::time::Duration;

use crossbeam_channel::bounded;
use flow_kernels::device::DeviceChoice;
use flow_kernels::threads::install;
use flow_model::Parameters;
use flow_model::model::{MicroBatch, TdtModel};
use flow_random::nth;
use rayon::ThreadPool;

use crate::average::Average;
use crate::error::TrainingError;
use crate::optimizer::AdamW;
use crate::ranks::{
    Among, Begin, OtherRank, RankReport, Remote, Replica, StepPlan, Work, collective, gone, members_among, nccl_group,
    owners, pool, share,
};
use crate::schedule::Recipe;

/// One micro-batch with what is told about it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadedBatch {
    pub epoch: u64,
    /// The rank that it was planned for.
    pub rank: u32,
    /// Which of that rank's micro-batches of the step it is.
    pub micro: u32,
    /// Place among all planned micro-batches of the step, by rank and then `micro`.
    pub place: u32,
    pub segments: Vec<String>,
    pub batch: MicroBatch,
}

impl LoadedBatch {
    /// Samples of audio.
    pub fn audio_samples(&self) -> u64 {
        self.batch.signals.iter().map(|signal| signal.len() as u64).sum()
    }

    /// Seconds that the padded batch computes on.
    pub fn padded_seconds(&self) -> f64 {
        let longest = self.batch.signals.iter().map(Vec::len).max().unwrap_or(0);
        (longest * self.batch.signals.len()) as f64 / SAMPLE_RATE
    }
}

/// Samples per second of all signals.
pub const SAMPLE_RATE: f64 = 16_000.0;

/// What decides the numbers of a training run, beside the model and the data.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerConfig {
    pub recipe: Recipe,
    /// Global norm that gradients are clipped to; 0 for none.
    pub clip: f64,
    /// Replicas of the model, each on a thread of its own, that share the micro-batches of a step; of all processes.
    pub ranks: u32,
    /// Updates each part as soon as its gradients are complete. For one rank, one micro-batch and no clipping.
    pub fold_update: bool,
    /// Keeps sums of gradients and moments in host memory, and updates there beside the next forward pass.
    pub offload: bool,
    /// How long a rank waits for another one.
    pub rank_timeout: Duration,
    /// Where the ranks compute.
    pub device: DeviceChoice,
    /// Whether encoder layers are computed again in the backward pass: for replicas in other processes, which are made to
    /// this measure. A replica here does as its model was told.
    pub recompute: bool,
    pub seed: u64,
    pub spec_augment: bool,
    pub dither: bool,
    pub dropout: bool,
}

/// What one optimizer step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Number of this step; the first is 0.
    pub step: u64,
    pub micro_batches: u32,
    /// Mean of the micro-batches' losses.
    pub loss: f64,
    pub rate: f64,
    /// Global norm of the accumulated gradient before clipping.
    pub gradient_norm: f64,
    pub utterances: u64,
    pub audio_samples: u64,
    pub padded_seconds: f64,
    pub tokens: u64,
    pub epoch: u64,
    pub encoder_frozen: bool,
    /// Where a loss or the gradient was not finite, or no micro-batch came: the segments to look at. The step changed nothing.
    pub skipped: Option<Vec<String>>,
    /// Seconds that each rank waited for the others.
    pub waited: Vec<f64>,
}

impl StepReport {
    /// Seconds of audio.
    pub fn seconds(&self) -> f64 {
        self.audio_samples as f64 / SAMPLE_RATE
    }
}

/// A model in training, with its optimizer: the first rank, and the others on threads of their own.
pub struct Trainer {
    pub config: TrainerConfig,
    /// Averaged weights, where they are asked for: what is evaluated and handed on instead of the model's own.
    pub average: Option<Average>,
    first: Replica,
    others: Vec<OtherRank>,
    /// The first rank's share of the processor, where there are others.
    pool: Option<ThreadPool>,
    /// The ranks of other processes; dropped after those of this one.
    _remote: Option<Remote>,
}

impl Trainer {
    /// Begins training with `config.ranks` replicas of the model in this process. `optimizer` holds the moments of all
    /// parameters so far.
    pub fn new(
        model: TdtModel,
        optimizer: AdamW,
        config: TrainerConfig,
        average: Option<Average>,
    ) -> Result<Self, TrainingError> {
        Self::among(model, optimizer, config, average, None)
    }

    /// The same with the ranks shared out evenly over the processes of a run, of which this is process 0. The others
    /// [serve](crate::ranks::serve) it.
    pub fn among(
        model: TdtModel,
        optimizer: AdamW,
        config: TrainerConfig,
        average: Option<Average>,
        among: Option<Among>,
    ) -> Result<Self, TrainingError> {
        let ranks = config.ranks.max(1) as usize;
        let shared = match among {
            Some(among) if among.processes.count() > 1 => Some((among, share(ranks, among.processes.count())?)),
            _ => None,
        };
        if ranks == 1 {
            return Ok(Trainer {
                first: Replica::alone(model, optimizer, config.clone())?,
                others: Vec::new(),
                pool: None,
                _remote: None,
                config,
                average,
            });
        }
        let owners = owners(&model.parameters, ranks);
        let here = shared.map_or(0..ranks, |(_, share)| share.of(0));
        let nccl = nccl_group(&model.parameters, &config, here.len())?;
        let remote = shared.map(|(Among { processes, rank_bytes }, share)| {
            let begin = Begin {
                share,
                owners: &owners,
                model: &model,
                optimizer: &optimizer,
                config: &config,
                nccl,
                rank_bytes,
            };
            Remote::begin(processes, &begin)
        });
        let remote = remote.transpose()?;
        let threads = (install(rayon::current_num_threads) / here.len()).max(1);
        let elsewhere = remote.as_ref().map(|remote| remote.elsewhere(&model.parameters));
        let mut group = members_among(ranks, here, owners, config.rank_timeout, elsewhere).into_iter();
        let first = group
            .next()
            .ok_or_else(|| TrainingError::setting("ranks", "it must be at least 1"))?;
        let mut others = Vec::with_capacity(ranks - 1);
        for (number, member) in (1..).zip(group) {
            let device = config.device.open(number)?;
            let replica = model.replica_on(&device)?;
            let meeting = collective(member, &replica.parameters, &config, nccl)?;
            let replica = Replica::new(replica, optimizer.on_host()?, config.clone(), meeting)?;
            others.push(OtherRank::start(number, replica, pool(number, threads)?)?);
        }
        if let Some(remote) = &remote {
            others.extend(remote.ranks()?);
        }
        let first = collective(first, &model.parameters, &config, nccl)?;
        Ok(Trainer {
            first: Replica::new(model, optimizer, config.clone(), first)?,
            others,
            pool: Some(pool(0, threads)?),
            _remote: remote,
            config,
            average,
        })
    }

    /// The model of the first rank. Its parameters may lag behind by an update that is offloaded; see [`Trainer::lend`].
    pub fn model(&self) -> &TdtModel {
        &self.first.model
    }

    /// Optimizer step `step` on its micro-batches, of which `planned` were to come. The gradient is the mean over
    /// `planned` of the gradients of the micro-batches' own reduced losses, as Lightning accumulates; one that did not come
    /// counts as one without gradient. Micro-batches are dealt to the ranks by their place, so that each has as many as any
    /// other or one more. Where a loss or the norm of the gradient is not finite, or no micro-batch came, nothing changes:
    /// neither parameters nor statistics of batch normalisation.
    pub fn step(
        &mut self,
        step: u64,
        micro_batches: &[LoadedBatch],
        planned: u32,
    ) -> Result<StepReport, TrainingError> {
        install(|| self.step_here(step, micro_batches, planned))
    }

    fn step_here(
        &mut self,
        step: u64,
        micro_batches: &[LoadedBatch],
        planned: u32,
    ) -> Result<StepReport, TrainingError> {
        let ranks = self.others.len() + 1;
        if micro_batches.is_empty() {
            return Ok(self.skipped(step));
        }
        let mut dealt: Vec<Vec<LoadedBatch>> = vec![Vec::new(); ranks];
        if ranks > 1 {
            for loaded in micro_batches {
                dealt[rank_of(loaded.place, planned, ranks)].push(loaded.clone());
            }
        }
        let rounds = dealt.iter().map(Vec::len).max().filter(|_| ranks > 1);
        let plan = StepPlan {
            step,
            planned,
            came: micro_batches.len(),
            rounds: rounds.unwrap_or(micro_batches.len()) as u32,
        };
        let mut reports = Vec::with_capacity(ranks);
        if let Some(pool) = &self.pool {
            let mut dealt = dealt.into_iter();
            let own = dealt.next().unwrap_or_default();
            for (other, batches) in self.others.iter().zip(dealt) {
                // A rank that is gone has told the others why, which the first one learns below.
                let _ = other.work.send(Work::Step(plan, batches));
            }
            let first = &mut self.first;
            reports.push(pool.install(|| first.step(&plan, &own))?);
            for (number, other) in (1..).zip(&self.others) {
                // It came to the last place where all meet, so there is nothing left that takes long.
                let report = other.reports.recv_timeout(self.config.rank_timeout);
                reports.push(report.map_err(|_| gone(number))??);
            }
        } else {
            reports.push(self.first.step(&plan, micro_batches)?);
        }
        let report = self.joined(&plan, micro_batches, reports);
        if report.skipped.is_none()
            && let Some(average) = &mut self.average
        {
            average.update(&self.first.settled()?.0.parameters, step)?;
        }
        Ok(report)
    }

    /// A step without micro-batches, of which no rank is told: they meet again at the next one.
    fn skipped(&self, step: u64) -> StepReport {
        StepReport {
            step,
            micro_batches: 0,
            loss: f64::NAN,
            gradient_norm: f64::NAN,
            rate: self.config.recipe.rate(step),
            utterances: 0,
            audio_samples: 0,
            padded_seconds: 0.0,
            tokens: 0,
            epoch: 0,
            encoder_frozen: self.config.recipe.encoder_frozen(step),
            waited: vec![0.0; self.others.len() + 1],
            skipped: Some(Vec::new()),
        }
    }

    fn joined(&self, plan: &StepPlan, micro_batches: &[LoadedBatch], ranks: Vec<RankReport>) -> StepReport {
        let skipped = ranks.iter().any(|rank| rank.skipped);
        StepReport {
            step: plan.step,
            micro_batches: plan.came as u32,
            // The same on all ranks.
            loss: ranks.first().map_or(0.0, |rank| rank.loss),
            gradient_norm: ranks.first().map_or(0.0, |rank| rank.gradient_norm),
            rate: self.config.recipe.rate(plan.step),
            utterances: micro_batches.iter().map(|loaded| loaded.segments.len() as u64).sum(),
            audio_samples: micro_batches.iter().map(LoadedBatch::audio_samples).sum(),
            padded_seconds: micro_batches.iter().map(LoadedBatch::padded_seconds).sum(),
            tokens: ranks.iter().map(|rank| rank.tokens).sum(),
            epoch: micro_batches.iter().map(|loaded| loaded.epoch).max().unwrap_or(0),
            encoder_frozen: self.config.recipe.encoder_frozen(plan.step),
            waited: ranks.iter().map(|rank| rank.waited).collect(),
            skipped: skipped.then(|| ranks.into_iter().flat_map(|rank| rank.bad).collect()),
        }
    }

    /// Lends the model that training is for: with averaged weights where they are asked for.
    pub fn lend<R>(&mut self, use_model: impl FnOnce(&TdtModel) -> R) -> Result<R, TrainingError> {
        let (model, _) = self.first.settled()?;
        Ok(match &mut self.average {
            None => use_model(model),
            Some(average) => average.with(model, |model, _| use_model(model)),
        })
    }

    /// Lends everything that a checkpoint holds: the model that training is for, the optimizer's state of all ranks, and
    /// the weights that training goes on from where the model has averaged ones.
    pub fn lend_state<R>(
        &mut self,
        use_state: impl FnOnce(&TdtModel, &AdamW, Option<&Parameters>) -> R,
    ) -> Result<R, TrainingError> {
        let whole = match self.others.is_empty() {
            true => None,
            false => Some(self.moments()?),
        };
        let (model, own) = self.first.settled()?;
        let optimizer = whole.as_ref().unwrap_or(own);
        Ok(match &mut self.average {
            None => use_state(model, optimizer, None),
            Some(average) => average.with(model, |model, live| use_state(model, optimizer, Some(live))),
        })
    }

    /// The optimizer with the moments of all ranks.
    fn moments(&mut self) -> Result<AdamW, TrainingError> {
        let mut whole = self.first.settled()?.1.on_host()?;
        for (number, other) in (1..).zip(&self.others) {
            let (reply, answer) = bounded(1);
            other.work.send(Work::Moments(reply)).map_err(|_| gone(number))?;
            whole.extend(
                answer
                    .recv_timeout(self.config.rank_timeout)
                    .map_err(|_| gone(number))??,
            );
        }
        Ok(whole)
    }
}

/// The rank that gets a micro-batch: each gets those that follow one another, as many as any other or one more.
fn rank_of(place: u32, planned: u32, ranks: usize) -> usize {
    let rank = u64::from(place) * ranks as u64 / u64::from(planned.max(1));
    (rank as usize).min(ranks - 1)
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

/// Seed of the random numbers of one micro-batch: a mix of all four, so that no state of a generator
/// outlives a step (the finaliser of SplitMix64 after each).
pub(crate) fn micro_batch_seed(seed: u64, step: u64, rank: u32, micro: u32) -> u64 {
    [step, u64::from(rank), u64::from(micro)]
        .into_iter()
        .fold(nth(seed, 1), |state, part| nth(state ^ part, 1))
}
