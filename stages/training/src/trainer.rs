//! Optimizer steps: micro-batches in, one update out.

use std::time::Duration;

use candle_core::Device;
use crossbeam_channel::{Receiver, bounded};
use flow_evaluation::transcribe::Recognize;
use flow_kernels::device::DeviceChoice;
use flow_kernels::threads::install;
use flow_model::Parameters;
use flow_model::model::{MicroBatch, TdtModel};
use flow_nn::layers::convolution::BatchNorm;
use flow_random::nth;
use flow_sampling::dealing::rank_of;
use rayon::ThreadPool;

use crate::average::MovingAverage;
use crate::error::TrainingError;
use crate::optimizer::AdamW;
use crate::ranks::{
    Evaluators, GroupWatch, LoadedElsewhere, OutOfMemory, ProcessGroup, RankCommand, RankHandle, RankLayout,
    RankReport, RemoteRanks, RemoteStart, Replica, StepPlan, gone, group_in_process, new_collective, new_nccl_id,
    open_device, parameter_owners, rank_disconnected, rank_thread_pool,
};
use crate::row_losses::RowLoss;
use crate::schedule::Recipe;
use crate::settings::{ReduceDtype, ReduceEvery};

/// One micro-batch with its place in the plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadedBatch {
    pub epoch: u64,
    /// The rank that it was planned for.
    pub rank: u32,
    /// Index among the micro-batches of that rank in the step.
    pub micro: u32,
    /// Index among all planned micro-batches of the step, ordered by rank and then `micro`.
    pub place: u32,
    /// The rows of all clips of `batch`, in their order.
    pub segments: Vec<String>,
    /// How many rows were joined to each clip of `batch`. Empty: each is one row.
    pub joined: Vec<u32>,
    pub batch: MicroBatch,
}

impl LoadedBatch {
    /// The rows of each clip.
    pub fn segments_of_clips(&self) -> impl Iterator<Item = &[String]> {
        let mut rest = self.segments.as_slice();
        (0..self.batch.signals.len()).map(move |clip| {
            let count = self.joined.get(clip).map_or(1, |count| *count as usize).min(rest.len());
            let (these, others) = rest.split_at(count);
            rest = others;
            these
        })
    }

    pub fn figures(&self) -> BatchFigures {
        BatchFigures {
            place: self.place,
            epoch: self.epoch,
            utterances: self.segments.len() as u64,
            audio_samples: self.audio_samples(),
            padded_seconds: self.padded_seconds(),
        }
    }

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

/// What the report of a step needs of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchFigures {
    /// As [`LoadedBatch::place`].
    pub place: u32,
    pub epoch: u64,
    pub utterances: u64,
    pub audio_samples: u64,
    pub padded_seconds: f64,
}

/// Samples per second of all signals.
pub const SAMPLE_RATE: f64 = 16_000.0;

/// What decides the numbers of a training run, beside the model and the data.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerConfig {
    pub recipe: Recipe,
    /// Global norm that gradients are clipped to; 0 for none.
    pub clip: f64,
    /// Replicas of the model, over all processes, that share the micro-batches of a step.
    pub ranks: u32,
    /// Updates each parameter group as soon as its gradients are complete. For one rank, one micro-batch and no
    /// clipping.
    pub fold_update: bool,
    /// Keeps sums of gradients and moments in host memory, and updates parameters there during the next forward pass.
    pub offload: bool,
    /// The longest that a rank waits for others.
    pub rank_timeout: Duration,
    /// Where the ranks compute.
    pub device: DeviceChoice,
    /// Whether their products of factors in f32 may be in TF32, on GPUs.
    pub tf32: bool,
    /// Whether encoder layers are computed again in the backward pass: for replicas in other processes. A replica in
    /// this process has the setting of its model.
    pub recompute: bool,
    /// Which statistics batch normalisation uses: for all replicas, as `recompute`.
    pub batch_norm: BatchNorm,
    /// The number type in which ranks send each other gradients.
    pub reduce_dtype: ReduceDtype,
    /// How often they do.
    pub reduce_every: ReduceEvery,
    pub seed: u64,
    pub spec_augment: bool,
    pub dither: bool,
    pub dropout: bool,
    /// Whether the loss of each row is reported.
    pub row_losses: bool,
}

/// The report of an optimizer step.
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
    /// Operations that the backward pass left out, on all ranks.
    pub flops_left_out: f64,
    pub epoch: u64,
    pub encoder_frozen: bool,
    /// Where a loss or the gradient was not finite, or no micro-batch was received, so that the step changed nothing:
    /// the segments that may be why.
    pub skipped: Option<Vec<String>>,
    /// Seconds that each rank waited for the others.
    pub waited: Vec<f64>,
    /// Micro-batches for which a device had no memory left, of all ranks.
    pub out_of_memory: Vec<OutOfMemory>,
    /// The loss of each row, where the settings ask for them.
    pub rows: Vec<RowLoss>,
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
    /// The moving average of the weights, where the settings ask for one; it is evaluated and exported in place of the
    /// model.
    pub average: Option<MovingAverage>,
    first: Replica,
    others: Vec<RankHandle>,
    /// The threads of the first rank, where there are several.
    pool: Option<ThreadPool>,
    /// The ranks of other processes; dropped after those of this one.
    remote: Option<RemoteRanks>,
    /// Tells of ranks that have failed, where there are several.
    watch: Option<GroupWatch>,
}

impl Trainer {
    /// Begins training with `config.ranks` replicas of the model in this process. `optimizer` holds the moments of all
    /// parameters so far.
    pub fn new(
        model: TdtModel,
        optimizer: AdamW,
        config: TrainerConfig,
        average: Option<MovingAverage>,
    ) -> Result<Self, TrainingError> {
        Self::distributed(model, optimizer, config, average, None)
    }

    /// As [`Trainer::new`] with the ranks distributed over the processes of a run. This is process 0; the others run a
    /// [`WorkerProcess`](crate::ranks::WorkerProcess).
    pub fn distributed(
        model: TdtModel,
        optimizer: AdamW,
        config: TrainerConfig,
        average: Option<MovingAverage>,
        group: Option<ProcessGroup>,
    ) -> Result<Self, TrainingError> {
        let ranks = config.ranks.max(1) as usize;
        let distributed = match group {
            Some(group) if group.processes.count() > 1 => {
                Some((group, RankLayout::new(ranks, group.processes.count())?))
            }
            _ => None,
        };
        if ranks == 1 {
            return Ok(Trainer {
                first: Replica::single(model, optimizer, config.clone())?,
                others: Vec::new(),
                pool: None,
                remote: None,
                watch: None,
                config,
                average,
            });
        }
        let owners = parameter_owners(&model.parameters, ranks);
        let local_ranks = distributed.map_or(0..ranks, |(_, layout)| layout.ranks_of(0));
        let nccl_id = new_nccl_id(&model.parameters, &config)?;
        let remote = distributed.map(|(group, layout)| {
            let ProcessGroup {
                processes,
                rank_bytes,
                own_batches,
            } = group;
            let start = RemoteStart {
                layout,
                owners: &owners,
                model: &model,
                optimizer: &optimizer,
                config: &config,
                nccl_id,
                rank_bytes,
                own_batches,
            };
            RemoteRanks::start(processes, &start)
        });
        let mut remote = remote.transpose()?;
        let local_count = local_ranks.len();
        let threads = (install(rayon::current_num_threads) / local_count).max(1);
        let transport = remote.as_ref().map(|remote| remote.transport(&model.parameters));
        let mut group = group_in_process(ranks, local_ranks, owners, config.rank_timeout, transport).into_iter();
        let first = group
            .next()
            .ok_or_else(|| TrainingError::setting("ranks", "it must be at least 1"))?;
        let mut others = Vec::with_capacity(ranks - 1);
        for (rank, local) in (1..).zip(group) {
            let device = open_device(config.device, rank, local_count, distributed.is_some())?;
            let replica = model.replica_on(&device)?;
            let collective = new_collective(local, &replica.parameters, &config, nccl_id)?;
            let replica = Replica::new(replica, optimizer.on_host()?, config.clone(), collective)?;
            others.push(RankHandle::spawn(rank, replica, rank_thread_pool(rank, threads)?)?);
        }
        if let Some(remote) = &mut remote {
            others.extend(remote.handles()?);
        }
        let watch = Some(first.watch());
        let first = new_collective(first, &model.parameters, &config, nccl_id)?;
        Ok(Trainer {
            first: Replica::new(model, optimizer, config.clone(), first)?,
            others,
            pool: Some(rank_thread_pool(0, threads)?),
            remote,
            watch,
            config,
            average,
        })
    }

    /// What the other processes load of each step; none where they load nothing.
    pub(crate) fn loaded_elsewhere(&self) -> Option<LoadedElsewhere> {
        self.remote.as_ref()?.loaded_elsewhere(self.config.rank_timeout)
    }

    /// The model of the first rank. Its parameters may be those before an offloaded update that is running; see
    /// [`Trainer::with_model`].
    pub fn model(&self) -> &TdtModel {
        &self.first.model
    }

    /// Optimizer step `step` on its micro-batches, of which `planned` were planned. The gradient is the mean over
    /// `planned` of the gradients of the micro-batches' own reduced losses, as Lightning accumulates; one that was not
    /// received counts as one with a gradient of zero. Micro-batches are dealt to the ranks by their place, so that
    /// each has as many as any other or one more. Where a loss or the norm of the gradient is not finite, or no
    /// micro-batch was received, nothing changes: neither parameters nor statistics of batch normalisation.
    pub fn step(
        &mut self,
        step: u64,
        micro_batches: &[LoadedBatch],
        planned: u32,
    ) -> Result<StepReport, TrainingError> {
        self.step_beside(step, micro_batches, planned, &[])
    }

    /// As [`Trainer::step`], where other processes have loaded the micro-batches of their ranks themselves, which are
    /// `elsewhere`: `micro_batches` are those of the ranks of this process.
    pub fn step_beside(
        &mut self,
        step: u64,
        micro_batches: &[LoadedBatch],
        planned: u32,
        elsewhere: &[BatchFigures],
    ) -> Result<StepReport, TrainingError> {
        install(|| self.step_here(step, micro_batches, planned, elsewhere))
    }

    fn step_here(
        &mut self,
        step: u64,
        micro_batches: &[LoadedBatch],
        planned: u32,
        elsewhere: &[BatchFigures],
    ) -> Result<StepReport, TrainingError> {
        let ranks = self.others.len() + 1;
        let own = micro_batches.iter().map(LoadedBatch::figures);
        let mut all: Vec<BatchFigures> = own.chain(elsewhere.iter().copied()).collect();
        all.sort_by_key(|figures| figures.place);
        if all.is_empty() {
            if let Some(remote) = &self.remote {
                remote.skip(step);
            }
            return Ok(self.skipped(step));
        }
        let mut dealt: Vec<Vec<LoadedBatch>> = vec![Vec::new(); ranks];
        if ranks > 1 {
            for loaded in micro_batches {
                dealt[rank_of(loaded.place, planned, ranks)].push(loaded.clone());
            }
        }
        let mut rounds = vec![0; ranks];
        for figures in &all {
            rounds[rank_of(figures.place, planned, ranks)] += 1;
        }
        let plan = StepPlan {
            step,
            planned,
            received: all.len(),
            rounds: rounds.into_iter().max().unwrap_or(0),
        };
        let mut reports = Vec::with_capacity(ranks);
        if let Some(pool) = &self.pool {
            let mut dealt = dealt.into_iter();
            let own = dealt.next().unwrap_or_default();
            for (other, batches) in self.others.iter().zip(dealt) {
                // A rank that has ended has reported why to the group, which fails the step of the first rank.
                let _ = other.commands.send(RankCommand::Step(plan, batches));
            }
            let first = &mut self.first;
            let report = pool.install(|| first.step(&plan, &own));
            reports.push(report.inspect_err(|error| first.step_failed(error))?);
            for (rank, other) in (1..).zip(&self.others) {
                // It has contributed to the last operation of the step, so what is left is short.
                let report = other.reports.recv_timeout(self.config.rank_timeout);
                reports.push(report.map_err(|_| rank_disconnected(rank))??);
            }
        } else {
            reports.push(self.first.step(&plan, micro_batches)?);
        }
        let report = self.merged(&plan, &all, reports);
        if report.skipped.is_none()
            && let Some(average) = &mut self.average
        {
            average.update(&self.first.synchronize()?.0.parameters, step)?;
        }
        Ok(report)
    }

    /// The report of a step without micro-batches, which the ranks do not take part in.
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
            flops_left_out: 0.0,
            epoch: 0,
            encoder_frozen: self.config.recipe.encoder_frozen(step),
            waited: vec![0.0; self.others.len() + 1],
            skipped: Some(Vec::new()),
            out_of_memory: Vec::new(),
            rows: Vec::new(),
        }
    }

    fn merged(&self, plan: &StepPlan, all: &[BatchFigures], mut ranks: Vec<RankReport>) -> StepReport {
        let out_of_memory = ranks
            .iter_mut()
            .flat_map(|rank| std::mem::take(&mut rank.out_of_memory));
        let out_of_memory = out_of_memory.collect();
        let skipped = ranks.iter().any(|rank| rank.skipped);
        let rows = ranks
            .iter_mut()
            .flat_map(|rank| std::mem::take(&mut rank.rows))
            .collect();
        StepReport {
            step: plan.step,
            micro_batches: plan.received as u32,
            // The same on all ranks.
            loss: ranks.first().map_or(0.0, |rank| rank.loss),
            gradient_norm: ranks.first().map_or(0.0, |rank| rank.gradient_norm),
            rate: self.config.recipe.rate(plan.step),
            utterances: all.iter().map(|batch| batch.utterances).sum(),
            audio_samples: all.iter().map(|batch| batch.audio_samples).sum(),
            padded_seconds: all.iter().map(|batch| batch.padded_seconds).sum(),
            tokens: ranks.iter().map(|rank| rank.tokens).sum(),
            flops_left_out: ranks.iter().map(|rank| rank.flops_left_out).sum(),
            epoch: all.iter().map(|batch| batch.epoch).max().unwrap_or(0),
            encoder_frozen: self.config.recipe.encoder_frozen(plan.step),
            waited: ranks.iter().map(|rank| rank.wait_seconds).collect(),
            out_of_memory,
            rows,
            skipped: skipped.then(|| ranks.into_iter().flat_map(|rank| rank.bad_segments).collect()),
        }
    }

    /// Calls `use_model` with the model that training is for: with averaged weights where there are some.
    pub fn with_model<R>(&mut self, use_model: impl FnOnce(&TdtModel) -> R) -> Result<R, TrainingError> {
        let (model, _) = self.first.synchronize()?;
        Ok(match &mut self.average {
            None => use_model(model),
            Some(average) => {
                let averaged = install(|| average.stored_as(&model.parameters))?;
                let live = std::mem::replace(&mut model.parameters, averaged);
                let result = use_model(model);
                model.parameters = live;
                result
            }
        })
    }

    /// Calls `evaluate` with the model that training is for and a function that has micro-batches transcribed by the replicas
    /// of all ranks.
    ///
    /// # Errors
    /// Where a rank fails.
    pub fn evaluate<R>(
        &mut self,
        evaluate: impl FnOnce(&TdtModel, &mut Recognize<'_, TrainingError>) -> R,
    ) -> Result<R, TrainingError> {
        let mut evaluators = Evaluators {
            others: &self.others,
            remote: self.remote.as_ref(),
            pool: self.pool.as_ref(),
            watch: self.watch.as_ref(),
            timeout: self.config.rank_timeout,
            begun: false,
        };
        let (model, _) = self.first.synchronize()?;
        let averaged = match &self.average {
            None => None,
            Some(average) => Some(install(|| average.stored_as(&model.parameters))?),
        };
        let is_averaged = averaged.is_some();
        let live = averaged.map(|averaged| std::mem::replace(&mut model.parameters, averaged));
        let result = evaluate(model, &mut |batches| {
            evaluators.recognize_all(model, is_averaged, batches)
        });
        if let Some(live) = live {
            model.parameters = live;
        }
        evaluators.end()?;
        Ok(result)
    }

    /// Calls `use_state` with the content of a checkpoint: the model that training is for, the optimizer's state of all
    /// ranks, and the weights that training continues from where the model has averaged ones.
    pub fn with_state<R>(
        &mut self,
        use_state: impl FnOnce(&TdtModel, &AdamW, Option<&Parameters>) -> R,
    ) -> Result<R, TrainingError> {
        let whole = match self.others.is_empty() {
            true => None,
            false => Some(self.moments()?),
        };
        let (model, own) = self.first.synchronize()?;
        let optimizer = whole.as_ref().unwrap_or(own);
        Ok(match &mut self.average {
            None => use_state(model, optimizer, None),
            Some(average) => average.with_average(model, |model, live| use_state(model, optimizer, Some(live))),
        })
    }

    /// The optimizer with the moments of all ranks.
    fn moments(&mut self) -> Result<AdamW, TrainingError> {
        let others = self.ask_for_moments()?;
        let own = self.first.synchronize()?.1.on_host()?;
        others.join(own)
    }

    /// Asks the other ranks for their moments as they are now; the next step may begin before they are here.
    fn ask_for_moments(&self) -> Result<OtherMoments, TrainingError> {
        let mut replies = Vec::with_capacity(self.others.len());
        for (rank, other) in (1..).zip(&self.others) {
            let (reply, state) = bounded(1);
            let command = RankCommand::OptimizerState(reply);
            let sent = other.commands.send(command);
            sent.map_err(|_| gone(self.watch.as_ref(), rank))?;
            replies.push((rank, state));
        }
        Ok(OtherMoments {
            replies,
            timeout: self.config.rank_timeout,
        })
    }

    /// The content of a checkpoint, copied to host memory; what the other ranks have of it comes while training goes on.
    pub(crate) fn snapshot(&mut self) -> Result<Snapshot, TrainingError> {
        let others = self.ask_for_moments()?;
        let (model, own) = self.first.synchronize()?;
        let host = &Device::Cpu;
        let optimizer = own.on_host()?;
        let (model, live) = match &mut self.average {
            None => (model.replica_on(host)?, None),
            Some(average) => average.with_average(model, |model, live| {
                Ok::<_, TrainingError>((model.replica_on(host)?, Some(live.copied_to(host)?)))
            })?,
        };
        Ok(Snapshot {
            model,
            live,
            optimizer,
            others,
        })
    }
}

/// What a checkpoint is made of, in host memory.
pub(crate) struct Snapshot {
    /// The model that training is for.
    pub model: TdtModel,
    /// The weights that training continues from, where the model has averaged ones.
    pub live: Option<Parameters>,
    /// With the moments of the first rank.
    optimizer: AdamW,
    others: OtherMoments,
}

impl Snapshot {
    /// Waits for the moments of all ranks: the model, the live weights, and the optimizer with them.
    pub fn whole(self) -> Result<(TdtModel, Option<Parameters>, AdamW), TrainingError> {
        Ok((self.model, self.live, self.others.join(self.optimizer)?))
    }
}

/// Moments of the other ranks that are on their way.
struct OtherMoments {
    replies: Vec<(usize, Receiver<Result<AdamW, TrainingError>>)>,
    timeout: Duration,
}

impl OtherMoments {
    /// Waits for all of them, and adds them to those of the first rank.
    fn join(self, mut whole: AdamW) -> Result<AdamW, TrainingError> {
        for (rank, state) in self.replies {
            let state = state.recv_timeout(self.timeout);
            whole.extend(state.map_err(|_| rank_disconnected(rank))??);
        }
        Ok(whole)
    }
}

/// The message of a panic.
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
