//! One rank: its replica of the model, and its share of each optimizer step.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use candle_core::{DType, Tensor};
use flow_kernels::batch_norm::MOMENTUM;
use flow_kernels::device::{set_tf32, with_released_memory};
use flow_model::model::{MicroBatchOutput, TdtModel, TrainOptions};
use flow_model::parameter_groups::{PassObserver, StatisticsPass, trainable_groups};
use flow_model::{Gradients, ParameterGroup, ParameterId, Parameters};
use flow_nn::layers::convolution::BatchNorm;

use super::out_of_memory::{self, OutOfMemory, Remedies, train_in_parts};
use super::update::{ParameterUpdates, StepUpdate, Updater};
use super::{
    Collective, CollectiveKey, CollectiveOp, HostStaging, SingleRank, local_group, parameter_owners, rank_disconnected,
};
use crate::error::TrainingError;
use crate::optimizer::{AdamW, clip_factor, squared_norm};
use crate::row_losses::RowLoss;
use crate::settings::ReduceEvery;
use crate::trainer::{LoadedBatch, TrainerConfig, micro_batch_seed};

/// The failpoint before each step of a rank, with the numbers of both.
pub const OPTIMIZER_STEP: &str = "optimizer-step";

/// What all ranks know about an optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepPlan {
    pub step: u64,
    /// Micro-batches that were planned for all ranks. One that was not received counts as one with a gradient of zero.
    pub planned: u32,
    /// Micro-batches that were received for all ranks.
    pub received: usize,
    /// The most micro-batches that any rank has.
    pub rounds: u32,
}

/// The report of a rank on an optimizer step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankReport {
    /// Mean of the losses of all micro-batches of all ranks.
    pub loss: f64,
    /// Global norm of the accumulated gradient before clipping.
    pub gradient_norm: f64,
    /// Whether the step was skipped, on all ranks.
    pub skipped: bool,
    /// Segments of this rank whose loss is not finite, or that may be why a step was skipped.
    pub bad_segments: Vec<String>,
    /// Target tokens of this rank.
    pub tokens: u64,
    /// Operations that the backward pass of this rank's micro-batches left out.
    pub flops_left_out: f64,
    /// Seconds that this rank waited for others.
    pub wait_seconds: f64,
    /// Micro-batches for which the device had no memory left.
    pub out_of_memory: Vec<OutOfMemory>,
    /// The loss of each row of this rank, where the settings ask for them.
    pub rows: Vec<RowLoss>,
}

/// One rank.
pub struct Replica {
    /// While an offloaded update is running its parameters are those before the update; see [`Replica::synchronize`].
    pub model: TdtModel,
    config: TrainerConfig,
    rank: usize,
    ranks: usize,
    /// Of the current micro-batch; of all micro-batches of the step so far where gradients are not reduced.
    gradients: Gradients,
    updates: ParameterUpdates,
    /// The trainable parameters by group.
    groups: BTreeMap<ParameterGroup, Vec<ParameterId>>,
    /// Parameters without a gradient, such as the statistics of batch normalisation.
    buffers: Vec<ParameterId>,
    /// The parameters of the model, while others are evaluated.
    pub(super) live: Option<Parameters>,
    /// The part of a step that is computed, for messages.
    at: &'static str,
}

impl Replica {
    /// The rank of a training with one rank.
    pub fn single(model: TdtModel, optimizer: AdamW, config: TrainerConfig) -> Result<Self, TrainingError> {
        if !config.offload {
            return Replica::new(model, optimizer, config, Box::new(SingleRank));
        }
        // Its gradients and updates go through host memory as those of several ranks do.
        let local = local_group(1, parameter_owners(&model.parameters, 1), config.rank_timeout).pop();
        let device = model.parameters.device().clone();
        let collective = HostStaging::new(local.ok_or_else(|| rank_disconnected(0))?, device, None);
        Replica::new(model, optimizer, config, Box::new(collective))
    }

    /// A rank of several. It keeps the optimizer's state of the parameters that it owns.
    ///
    /// # Errors
    /// Where the name of a trainable parameter belongs to no parameter group.
    pub fn new(
        model: TdtModel,
        mut optimizer: AdamW,
        config: TrainerConfig,
        collective: Box<dyn Collective>,
    ) -> Result<Self, TrainingError> {
        set_tf32(model.parameters.device(), config.tf32);
        let owners = parameter_owners(&model.parameters, collective.size());
        let groups = trainable_groups(&model.parameters)?;
        let parameters = model.parameters.iter();
        let buffers = parameters.filter(|(_, parameter)| !parameter.trainable);
        let buffers = buffers.map(|(id, _)| id).collect();
        let (rank, ranks) = (collective.rank(), collective.size());
        let owned = |name: &str| {
            let id = model.parameters.id(name);
            id.is_some_and(|id| owners[id.index()] == rank)
        };
        optimizer.retain(owned);
        let updater = Updater {
            optimizer,
            collective,
            sums: Gradients::new(&model.parameters),
        };
        Ok(Replica {
            gradients: Gradients::new(&model.parameters),
            updates: ParameterUpdates::new(updater, &model.parameters, config.offload)?,
            model,
            config,
            rank,
            ranks,
            groups,
            buffers,
            live: None,
            at: "",
        })
    }

    /// Makes the other ranks fail with an error that names this one and says why its step failed. They know of a failure of
    /// another rank already.
    pub fn step_failed(&mut self, error: &TrainingError) {
        match error {
            TrainingError::Rank { rank, .. } if *rank != self.rank => {}
            TrainingError::Rank { message, .. } => self.updates.abort(message),
            error => self.updates.abort(&error.with_help()),
        }
    }

    /// Waits for an offloaded update. The model with its current parameters, and the optimizer with the moments of the
    /// parameters that this rank owns.
    pub fn synchronize(&mut self) -> Result<(&mut TdtModel, &AdamW), TrainingError> {
        let updater = self.updates.synchronize(&self.model.parameters)?;
        Ok((&mut self.model, &updater.optimizer))
    }

    /// This rank's share of an optimizer step. Where a loss of any rank or the norm of the gradient is not finite,
    /// nothing changes on any of them: neither parameters nor statistics of batch normalisation.
    pub fn step(&mut self, plan: &StepPlan, micro_batches: &[LoadedBatch]) -> Result<RankReport, TrainingError> {
        self.at = "in a micro-batch or the exchange of its gradients";
        let outcome = self.step_here(plan, micro_batches);
        outcome.map_err(|error| out_of_memory::named(error, plan.step, self.at))
    }

    fn step_here(&mut self, plan: &StepPlan, micro_batches: &[LoadedBatch]) -> Result<RankReport, TrainingError> {
        flow_kind::failpoints::hit(OPTIMIZER_STEP, &[self.rank as u64, plan.step]);
        let frozen = self.config.recipe.encoder_frozen(plan.step);
        self.gradients.clear();
        let before: Vec<Tensor> = self
            .buffers
            .iter()
            .map(|&id| self.model.parameters.get(id).clone())
            .collect();
        let mut report = RankReport::default();
        let mut remedies = Remedies::default();
        let (loss, mut squares) = loop {
            if let Some(sums) = self.micro_batches(plan, micro_batches, frozen, &mut remedies, &mut report)? {
                break sums;
            }
            // A micro-batch found no memory, and what it added to the gradients is in their sums.
            self.gradients.clear();
            self.restore_buffers(&before)?;
            report = RankReport::default();
        };
        let passes = (0..micro_batches.len() as u32)
            .map(|round| remedies.of(round).0)
            .sum::<usize>();
        report.out_of_memory = remedies.events;
        self.at = "in the norm of the gradient or the optimizer's update";
        let reduces = self.reduces_gradients();
        let updater = self.updates.synchronize(&self.model.parameters)?;
        if !reduces {
            std::mem::swap(&mut updater.sums, &mut self.gradients);
        }
        squares += squared_norm(&self.model.parameters, &updater.sums)?;
        let bad = f64::from(u8::from(!report.bad_segments.is_empty()));
        let key = |op| CollectiveKey {
            step: plan.step,
            round: 0,
            op,
        };
        let metrics = [squares, loss, bad, passes as f64];
        let metrics = updater
            .collective
            .all_gather(key(CollectiveOp::GatherMetrics), metrics.to_vec())?;
        let total = |column: usize| -> f64 { metrics.iter().filter_map(|rank| rank.get(column)).sum() };
        report.gradient_norm = total(0).sqrt();
        report.loss = total(1);
        report.skipped = total(2) > 0.0 || !report.gradient_norm.is_finite() || !report.loss.is_finite();
        report.wait_seconds = updater.collective.take_wait_seconds();
        if report.skipped {
            updater.sums.clear();
            if total(2) == 0.0 {
                // All losses are finite, so the gradient of any segment may be the one that is not.
                let segments = micro_batches.iter().flat_map(|loaded| loaded.segments.iter().cloned());
                report.bad_segments.extend(segments);
            }
            self.restore_buffers(&before)?;
        } else {
            if self.ranks > 1 && !frozen && self.config.batch_norm != BatchNorm::Frozen {
                let counts: Vec<f64> = metrics.iter().filter_map(|rank| rank.get(3).copied()).collect();
                self.merge_batch_norm(key(CollectiveOp::GatherBatchNorm), &before, &counts)?;
            }
            let update = StepUpdate {
                step: plan.step,
                rate: self.config.recipe.rate(plan.step),
                scale: clip_factor(report.gradient_norm, self.config.clip),
            };
            // The forward pass reads them in the reverse order.
            let groups = self.learning_groups(frozen).into_iter().rev().collect();
            self.updates.update(groups, update, &mut self.model.parameters)?;
        }
        Ok(report)
    }

    /// All micro-batches of this rank: sum of the losses' shares, and of the squares of gradients that were applied at once.
    /// None: one found no memory, and all are to be computed anew.
    fn micro_batches(
        &mut self,
        plan: &StepPlan,
        micro_batches: &[LoadedBatch],
        frozen: bool,
        remedies: &mut Remedies,
        report: &mut RankReport,
    ) -> Result<Option<(f64, f64)>, TrainingError> {
        let (mut loss, mut squares) = (0.0, 0.0);
        for round in 0..plan.rounds {
            let loaded = micro_batches.get(round as usize);
            let output = match self.micro_batch(plan, round, loaded, frozen, &mut squares, remedies)? {
                Computed::Nothing => continue,
                Computed::NoMemory => return Ok(None),
                Computed::Output(output) => output,
            };
            loss += output.loss / plan.received as f64;
            report.tokens += output.tokens as u64;
            report.flops_left_out += output.flops_left_out;
            if let Some(loaded) = loaded.filter(|_| self.config.row_losses) {
                report.rows.extend(row_losses(loaded, &output.losses));
            }
            if let Some(loaded) = loaded.filter(|_| !output.loss.is_finite()) {
                report.bad_segments.extend(not_finite_segments(loaded, &output.losses));
            }
        }
        Ok(Some((loss, squares)))
    }

    /// Sets all buffers.
    fn restore_buffers(&mut self, tensors: &[Tensor]) -> Result<(), TrainingError> {
        for (&id, tensor) in self.buffers.iter().zip(tensors) {
            self.model.parameters.set(id, tensor.clone())?;
        }
        Ok(())
    }

    /// Whether gradients go through the collective, group by group.
    fn reduces_gradients(&self) -> bool {
        self.ranks > 1 || self.config.offload
    }

    /// The parameter groups that get gradients, in the order in which the backward pass completes them.
    fn learning_groups(&self, frozen: bool) -> VecDeque<(ParameterGroup, Vec<ParameterId>)> {
        ParameterGroup::backward_order(self.model.encoder_layers())
            .into_iter()
            .filter(move |group| !frozen || matches!(group, ParameterGroup::Heads | ParameterGroup::Prediction))
            // A model without a transducer has no prediction network.
            .filter_map(|group| Some((group, self.groups.get(&group)?.clone())))
            .collect()
    }

    /// One micro-batch. A rank that has none (`loaded` is none) takes part in the reductions of the others. Adds the
    /// squares of gradients that are applied at once to `squares`.
    fn micro_batch(
        &mut self,
        plan: &StepPlan,
        round: u32,
        loaded: Option<&LoadedBatch>,
        frozen: bool,
        squares: &mut f64,
        remedies: &mut Remedies,
    ) -> Result<Computed, TrainingError> {
        // All ranks reduce in the same rounds, whether they have a micro-batch in them or not.
        let due = self.config.reduce_every == ReduceEvery::MicroBatch || round + 1 == plan.rounds;
        let exchanges = self.reduces_gradients();
        let reduces = exchanges && due;
        let synchronised = self.config.batch_norm == BatchNorm::AllRanks && !frozen && self.ranks > 1;
        let layers = self.model.encoder_layers();
        let policy = match (reduces, self.config.fold_update && plan.received == 1) {
            (true, _) => GradientPolicy::ReduceScatter,
            _ if exchanges => GradientPolicy::Accumulate,
            (false, true) => GradientPolicy::Apply {
                rate: self.config.recipe.rate(plan.step),
            },
            (false, false) => GradientPolicy::Accumulate,
        };
        // Whether the gradients that are reduced in this pass are those of earlier micro-batches too.
        let of_earlier = reduces && self.config.reduce_every == ReduceEvery::Step && round > 0;
        let remaining = self.learning_groups(frozen);
        let all_groups = remaining.len();
        let buffers: Vec<Tensor> = self
            .buffers
            .iter()
            .map(|&id| self.model.parameters.get(id).clone())
            .collect();
        let mut pass = MicroBatchPass {
            remaining,
            groups: &self.groups,
            updates: &mut self.updates,
            plan,
            round,
            policy,
            partial: false,
            applied: false,
            // One rank sends nothing to others, and its result does not depend on `offload`.
            dtype: match self.ranks {
                1 => self.model.parameters.dtype(),
                _ => self.config.reduce_dtype.of(self.model.parameters.dtype()),
            },
            statistics: StatisticsToGather {
                columns: self.model.config.encoder.d_model,
                forward: 0..if synchronised { layers } else { 0 },
                backward: if synchronised { layers } else { 0 },
            },
            pending: VecDeque::new(),
            squares,
            failed: None,
        };
        let mut output = Computed::Nothing;
        if let Some(loaded) = loaded {
            let options = TrainOptions {
                freeze_encoder: frozen,
                seed: micro_batch_seed(self.config.seed, plan.step, loaded.rank, loaded.micro),
                spec_augment: self.config.spec_augment,
                dither: self.config.dither,
                dropout: self.config.dropout,
                scale: 1.0 / f64::from(plan.planned.max(1)),
                part: None,
            };
            output = loop {
                let trained = train_in_parts(
                    &mut self.model,
                    &loaded.batch,
                    remedies.of(round),
                    &options,
                    &mut self.gradients,
                    &mut pass,
                    |pass, last| pass.partial = !last,
                );
                let error = match trained {
                    Ok(output) => break Computed::Output(output),
                    Err(error) => error,
                };
                if let Some(failed) = pass.failed.take() {
                    return Err(failed);
                }
                // What was updated, and what other ranks were given, cannot be taken back.
                let spent = if pass.applied {
                    Some("with `fold_update` some parameters are updated already")
                } else if synchronised {
                    Some("with `batch_norm: sync` other ranks go on with the statistics of the whole micro-batch")
                } else if of_earlier && pass.remaining.len() < all_groups {
                    Some("with `reduce_every: step` some sums have its gradients and those of earlier ones already")
                } else {
                    None
                };
                remedies.after(error, (plan.step, round), loaded, (&self.model, frozen), spent)?;
                if policy == GradientPolicy::Accumulate || of_earlier {
                    return Ok(Computed::NoMemory);
                }
                // Those of this micro-batch alone; what was reduced was complete.
                self.gradients.clear();
                for (&id, tensor) in self.buffers.iter().zip(&buffers) {
                    self.model.parameters.set(id, tensor.clone())?;
                }
            };
            // What failed in an exchange names the rank.
            if let Some(error) = pass.failed.take() {
                return Err(error);
            }
        }
        // What other ranks wait for and this one has nothing to add to: all, where it has no micro-batch, or the backward
        // pass, where the loss was not finite.
        let parameters = &self.model.parameters;
        pass.gather_nothing(StatisticsPass::Forward, 0, parameters)?;
        while let Some((group, ids)) = pass.remaining.pop_front() {
            if let ParameterGroup::Layer(layer) = group {
                pass.gather_nothing(StatisticsPass::Backward, layer, parameters)?;
            }
            if reduces {
                pass.reduce(group, &ids, &mut self.gradients, parameters)?;
            }
        }
        if reduces {
            pass.collect_sums(true, parameters)?;
        }
        Ok(output)
    }

    /// Merges the running statistics of batch normalisation of all ranks, as if one rank had seen all micro-batches,
    /// rank by rank. Each micro-batch moves them by `r <- (1 - m) r + m s`, so `n` of them by `r <- (1 - m)^n r + c`.
    /// With the statistics `r0` before the step and `r_n` of a rank after its `n` micro-batches, `c = r_n - (1 - m)^n
    /// r0`. `before` holds `r0` of all buffers, `counts` the number of micro-batches of each rank.
    fn merge_batch_norm(&mut self, key: CollectiveKey, before: &[Tensor], counts: &[f64]) -> Result<(), TrainingError> {
        let names = ["running_mean", "running_var", "num_batches_tracked"];
        let parameters = &self.model.parameters;
        let statistics: Vec<(ParameterId, &Tensor)> = self
            .buffers
            .iter()
            .copied()
            .zip(before)
            .filter(|(id, _)| names.iter().any(|name| parameters.parameter(*id).name.ends_with(name)))
            .collect();
        let own = statistics.iter().map(|(id, _)| parameters.get(*id).clone()).collect();
        let updater = self.updates.synchronize(&self.model.parameters)?;
        let all = updater.collective.all_gather_tensors(key, own)?;
        if self.config.batch_norm == BatchNorm::AllRanks {
            // A rank that had a micro-batch in each round has moved them by those of all ranks.
            let most = counts.iter().fold(0.0, |most: f64, count| most.max(*count));
            let whole = counts
                .iter()
                .position(|count| *count == most)
                .and_then(|rank| all.get(rank));
            for ((id, _), tensor) in statistics.into_iter().zip(whole.into_iter().flatten()) {
                self.model.parameters.set(id, tensor.clone())?;
            }
            return Ok(());
        }
        for (at, (id, start)) in statistics.into_iter().enumerate() {
            let mut merged = start.clone();
            for (moved, count) in all.iter().zip(counts) {
                let Some(moved) = moved.get(at) else { continue };
                let mut difference = (&merged - start)?;
                if difference.dtype().is_float() {
                    difference = (difference * (1.0 - MOMENTUM).powf(*count))?;
                }
                merged = (difference + moved)?;
            }
            self.model.parameters.set(id, merged)?;
        }
        Ok(())
    }
}

/// What came of a micro-batch.
enum Computed {
    /// There was none.
    Nothing,
    Output(MicroBatchOutput),
    /// The device had no memory left, and the sums of the gradients are spoilt.
    NoMemory,
}

/// The forward and the backward pass of one micro-batch.
struct MicroBatchPass<'a> {
    groups: &'a BTreeMap<ParameterGroup, Vec<ParameterId>>,
    updates: &'a mut ParameterUpdates,
    plan: &'a StepPlan,
    round: u32,
    policy: GradientPolicy,
    /// Whether gradients are those of a part that is not the last one, and so not complete.
    partial: bool,
    /// Whether parameters were changed.
    applied: bool,
    /// The number type of gradients on their way.
    dtype: DType,
    statistics: StatisticsToGather,
    /// Groups whose gradients are not complete.
    remaining: VecDeque<(ParameterGroup, Vec<ParameterId>)>,
    /// Reductions that are not finished.
    pending: VecDeque<CollectiveKey>,
    /// Sum of the squares of all gradients that were applied at once.
    squares: &'a mut f64,
    failed: Option<TrainingError>,
}

/// The gathers of batch statistics that are to come in a pass: of each layer in their order forward, and in the reverse order
/// backward. None where they are not those of all ranks.
struct StatisticsToGather {
    /// Columns of each layer's batch normalisation.
    columns: usize,
    forward: Range<usize>,
    /// The layers from 0 up to this one.
    backward: usize,
}

/// What happens to the gradients of a parameter group when they are complete.
#[derive(Clone, Copy, Debug, PartialEq)]
enum GradientPolicy {
    /// They are added up until the end of the step.
    Accumulate,
    /// They are reduced to the owners of their parameters.
    ReduceScatter,
    /// They are applied at once with this learning rate and dropped, unless one was not finite.
    Apply { rate: f64 },
}

impl PassObserver for MicroBatchPass<'_> {
    fn before_forward(&mut self, group: ParameterGroup, parameters: &Parameters) {
        if self.failed.is_none() {
            self.failed = self.updates.wait_for_group(group, parameters).err();
        }
    }

    fn gradients_complete(&mut self, group: ParameterGroup, gradients: &mut Gradients, parameters: &Parameters) {
        if self.failed.is_some() || self.partial {
            return;
        }
        self.failed = match self.policy {
            GradientPolicy::Accumulate => None,
            GradientPolicy::Apply { rate } => self.apply(rate, gradients, parameters).err(),
            GradientPolicy::ReduceScatter => {
                let at = self.remaining.iter().position(|(other, _)| *other == group);
                match at.and_then(|at| self.remaining.remove(at)) {
                    Some((group, ids)) => self.reduce(group, &ids, gradients, parameters).err(),
                    None => {
                        // Reduced before the device had no memory left for the rest of the micro-batch.
                        for id in self.groups.get(&group).into_iter().flatten() {
                            gradients.take(*id);
                        }
                        None
                    }
                }
            }
        };
    }

    fn gather_statistics(
        &mut self,
        layer: usize,
        pass: StatisticsPass,
        own: &Tensor,
        parameters: &Parameters,
    ) -> flow_kernels::Result<Tensor> {
        self.gather(layer, pass, own, parameters).map_err(|error| {
            let message = error.to_string();
            self.failed.get_or_insert(error);
            flow_kernels::Error::Input(message)
        })
    }
}

impl MicroBatchPass<'_> {
    /// The statistics of all ranks for a layer, (ranks, n), where this one has `own`, (n).
    fn gather(
        &mut self,
        layer: usize,
        pass: StatisticsPass,
        own: &Tensor,
        parameters: &Parameters,
    ) -> Result<Tensor, TrainingError> {
        match pass {
            StatisticsPass::Forward => self.statistics.forward.start = layer + 1,
            StatisticsPass::Backward => self.statistics.backward = layer,
        }
        let key = CollectiveKey {
            step: self.plan.step,
            round: self.round,
            op: CollectiveOp::GatherStatistics(pass, layer),
        };
        let collective = self.updates.collective(parameters)?;
        let all = collective.all_gather_tensors(key, vec![own.clone()])?;
        let rows: Vec<Tensor> = all.into_iter().flatten().collect();
        Ok(Tensor::stack(&rows, 0)?)
    }

    /// Takes part in the gathers that are to come, those forward or those backward down to a layer, with no rows.
    fn gather_nothing(
        &mut self,
        pass: StatisticsPass,
        down_to: usize,
        parameters: &Parameters,
    ) -> Result<(), TrainingError> {
        let layers: Vec<usize> = match pass {
            StatisticsPass::Forward => self.statistics.forward.clone().collect(),
            StatisticsPass::Backward => (down_to..self.statistics.backward).rev().collect(),
        };
        for layer in layers {
            let count = 2 * self.statistics.columns + 1;
            let nothing = Tensor::zeros(count, DType::F64, parameters.device())?;
            self.gather(layer, pass, &nothing, parameters)?;
        }
        Ok(())
    }

    /// Updates the parameters that have gradients, and drops the gradients.
    fn apply(&mut self, rate: f64, gradients: &mut Gradients, parameters: &Parameters) -> Result<(), TrainingError> {
        *self.squares += squared_norm(parameters, gradients)?;
        if self.squares.is_finite() {
            self.applied = true;
            let updater = self.updates.synchronize(parameters)?;
            updater.optimizer.step(parameters, gradients, rate, 1.0)?;
        }
        gradients.clear();
        Ok(())
    }

    /// Starts to reduce the gradients of a group.
    fn reduce(
        &mut self,
        group: ParameterGroup,
        ids: &[ParameterId],
        gradients: &mut Gradients,
        parameters: &Parameters,
    ) -> Result<(), TrainingError> {
        let key = CollectiveKey {
            step: self.plan.step,
            round: self.round,
            op: CollectiveOp::ReduceGradients(group),
        };
        let mut taken = Vec::new();
        for &id in ids {
            if let Some(gradient) = gradients.take(id) {
                let convert = || Ok(gradient.to_dtype(self.dtype)?);
                taken.push((id, with_released_memory(parameters.device(), convert)?));
            }
        }
        let updater = self.updates.synchronize(parameters)?;
        updater.collective.start_reduce_scatter(key, taken)?;
        self.pending.push_back(key);
        // Sums that are complete are collected now, so that they do not pile up.
        self.collect_sums(false, parameters)
    }

    /// Adds the sums of finished reductions to those of the step; with `wait`, of all.
    fn collect_sums(&mut self, wait: bool, parameters: &Parameters) -> Result<(), TrainingError> {
        let updater = self.updates.synchronize(parameters)?;
        while let Some(&key) = self.pending.front() {
            let Some(sums) = updater.collective.finish_reduce_scatter(key, wait)? else {
                break;
            };
            self.pending.pop_front();
            for (id, sum) in sums {
                let convert = || Ok(sum.to_dtype(parameters.dtype())?);
                updater
                    .sums
                    .add(id, with_released_memory(parameters.device(), convert)?)?;
            }
        }
        Ok(())
    }
}

/// The loss of each segment of a micro-batch; of those that were joined to one clip, that of the clip.
fn row_losses(loaded: &LoadedBatch, losses: &[f64]) -> impl Iterator<Item = RowLoss> {
    let clips = loaded.segments_of_clips().zip(&loaded.batch.tokens).zip(losses);
    clips.flat_map(|((segments, tokens), loss)| {
        let loss = loss / tokens.len().max(1) as f64;
        segments.iter().map(move |segment| RowLoss {
            segment: segment.clone(),
            loss,
        })
    })
}

/// The segments of a micro-batch whose loss is not finite; all, where only the mean is not.
fn not_finite_segments(loaded: &LoadedBatch, losses: &[f64]) -> Vec<String> {
    let named: Vec<String> = loaded
        .segments_of_clips()
        .zip(losses)
        .filter(|(_, loss)| !loss.is_finite())
        .flat_map(|(names, _)| names.iter().cloned())
        .collect();
    if named.is_empty() {
        loaded.segments.clone()
    } else {
        named
    }
}
