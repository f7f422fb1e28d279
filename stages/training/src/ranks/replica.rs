//! One rank: its replica of the model, and its part in each optimizer step.

use std::collections::{BTreeMap, VecDeque};

use candle_core::Tensor;
use flow_model::layers::convolution::MOMENTUM;
use flow_model::model::{MicroBatchOutput, TdtModel, TrainOptions};
use flow_model::parts::Follow;
use flow_model::{Gradients, ParameterId, Parameters, Part};

use super::update::{StepUpdate, Updater, Updates};
use super::{Alone, Collective, OPTIMIZER_STEP, OverHost, Place, What, gone, members, owners};
use crate::error::TrainingError;
use crate::optimizer::{AdamW, clip_factor, squared_norm};
use crate::trainer::{LoadedBatch, TrainerConfig, micro_batch_seed};

/// What all ranks know of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepPlan {
    pub step: u64,
    /// Micro-batches of the step over all ranks. One that did not come counts as one without gradient.
    pub planned: u32,
    /// Micro-batches that came, over all ranks.
    pub came: usize,
    /// The most micro-batches that any rank has.
    pub rounds: u32,
}

/// What one rank tells of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankReport {
    /// Mean of the losses of all micro-batches of all ranks.
    pub loss: f64,
    /// Global norm of the accumulated gradient before clipping.
    pub gradient_norm: f64,
    /// Whether the step was skipped, on all ranks.
    pub skipped: bool,
    /// Segments of this rank at fault.
    pub bad: Vec<String>,
    /// Tokens of this rank.
    pub tokens: u64,
    /// Seconds that this rank waited for others.
    pub waited: f64,
}

/// One rank.
pub struct Replica {
    /// While an update is offloaded and under way its parameters lag behind; see [`Replica::settled`].
    pub model: TdtModel,
    config: TrainerConfig,
    rank: usize,
    ranks: usize,
    /// Of the micro-batch in hand, or of all so far if nothing is exchanged.
    gradients: Gradients,
    updates: Updates,
    parts: BTreeMap<Part, Vec<ParameterId>>,
    buffers: Vec<ParameterId>,
}

impl Replica {
    /// The one rank of a training without others.
    pub fn alone(model: TdtModel, optimizer: AdamW, config: TrainerConfig) -> Result<Self, TrainingError> {
        if !config.offload {
            return Replica::new(model, optimizer, config, Box::new(Alone));
        }
        // Its sums and updates are made in host memory as those of several ranks are.
        let member = members(1, owners(&model.parameters, 1), config.rank_timeout).pop();
        let device = model.parameters.device().clone();
        let collective = OverHost::new(member.ok_or_else(|| gone(0))?, device, None);
        Replica::new(model, optimizer, config, Box::new(collective))
    }

    /// A rank among others. Of the optimizer's state it keeps what it owns.
    pub fn new(
        model: TdtModel,
        mut optimizer: AdamW,
        config: TrainerConfig,
        collective: Box<dyn Collective>,
    ) -> Result<Self, TrainingError> {
        let owners = owners(&model.parameters, collective.size());
        let mut parts: BTreeMap<Part, Vec<ParameterId>> = BTreeMap::new();
        let mut buffers = Vec::new();
        for (id, parameter) in model.parameters.iter() {
            if parameter.trainable {
                parts.entry(Part::of(&parameter.name)).or_default().push(id);
            } else {
                buffers.push(id);
            }
        }
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
            updates: Updates::new(updater, &model.parameters, config.offload)?,
            model,
            config,
            rank,
            ranks,
            parts,
            buffers,
        })
    }

    /// Lets the other ranks know that this one cannot go on.
    pub fn fail(&mut self, message: &str) {
        self.updates.fail(message);
    }

    /// The model, and the optimizer with the moments of the parameters that this rank owns, when all updates are made.
    pub fn settled(&mut self) -> Result<(&mut TdtModel, &AdamW), TrainingError> {
        let updater = self.updates.settled(&self.model.parameters)?;
        Ok((&mut self.model, &updater.optimizer))
    }

    /// This rank's part of an optimizer step. Where a loss of any rank or the norm of the gradient is not finite,
    /// nothing changes on any of them: neither parameters nor statistics of batch normalisation.
    pub fn step(&mut self, plan: &StepPlan, micro_batches: &[LoadedBatch]) -> Result<RankReport, TrainingError> {
        flow_runtime::failpoints::hit(OPTIMIZER_STEP, &[self.rank as u64, plan.step]);
        let frozen = self.config.recipe.encoder_frozen(plan.step);
        self.gradients.clear();
        let before: Vec<Tensor> = self
            .buffers
            .iter()
            .map(|&id| self.model.parameters.get(id).clone())
            .collect();
        let mut report = RankReport::default();
        let (mut loss, mut squares) = (0.0, 0.0);
        for round in 0..plan.rounds {
            let loaded = micro_batches.get(round as usize);
            if let Some(output) = self.round(plan, round, loaded, frozen, &mut squares)? {
                loss += output.loss / plan.came as f64;
                report.tokens += output.tokens as u64;
                if let Some(loaded) = loaded.filter(|_| !output.loss.is_finite()) {
                    report.bad.extend(at_fault(loaded, &output.losses));
                }
            }
        }
        let exchanges = self.exchanges();
        let updater = self.updates.settled(&self.model.parameters)?;
        if !exchanges {
            std::mem::swap(&mut updater.sums, &mut self.gradients);
        }
        squares += squared_norm(&self.model.parameters, &updater.sums)?;
        let bad = f64::from(u8::from(!report.bad.is_empty()));
        let place = |what| Place {
            step: plan.step,
            round: 0,
            what,
        };
        let figures = [squares, loss, bad, micro_batches.len() as f64];
        let figures = updater.collective.gather(place(What::Figures), figures.to_vec())?;
        let total = |column: usize| -> f64 { figures.iter().filter_map(|rank| rank.get(column)).sum() };
        report.gradient_norm = total(0).sqrt();
        report.loss = total(1);
        report.skipped = total(2) > 0.0 || !report.gradient_norm.is_finite() || !report.loss.is_finite();
        report.waited = updater.collective.waited();
        if report.skipped {
            updater.sums.clear();
            if total(2) == 0.0 {
                // All losses are finite, so any segment may be at fault.
                let segments = micro_batches.iter().flat_map(|loaded| loaded.segments.iter().cloned());
                report.bad.extend(segments);
            }
            for (&id, tensor) in self.buffers.iter().zip(before) {
                self.model.parameters.set(id, tensor)?;
            }
        } else {
            if self.ranks > 1 && !frozen {
                let counts: Vec<f64> = figures.iter().filter_map(|rank| rank.get(3).copied()).collect();
                self.join_statistics(place(What::Statistics), &before, &counts)?;
            }
            let update = StepUpdate {
                step: plan.step,
                rate: self.config.recipe.rate(plan.step),
                scale: clip_factor(report.gradient_norm, self.config.clip),
            };
            // The forward pass reads them the other way round.
            let parts = self.learning(frozen).into_iter().rev().collect();
            self.updates.update(parts, update, &mut self.model.parameters)?;
        }
        Ok(report)
    }

    /// Whether gradients go through the collective, part by part.
    fn exchanges(&self) -> bool {
        self.ranks > 1 || self.config.offload
    }

    /// The parts that get gradients, in the order in which the backward pass completes them.
    fn learning(&self, frozen: bool) -> VecDeque<(Part, Vec<ParameterId>)> {
        Part::in_order(self.model.encoder_layers())
            .into_iter()
            .filter(move |part| !frozen || matches!(part, Part::Heads | Part::Prediction))
            .map(|part| (part, self.parts.get(&part).cloned().unwrap_or_default()))
            .collect()
    }

    /// One micro-batch, or its absence, which the others must not wait for. Adds the squares of gradients that are used up
    /// in it to `squares`.
    fn round(
        &mut self,
        plan: &StepPlan,
        round: u32,
        loaded: Option<&LoadedBatch>,
        frozen: bool,
        squares: &mut f64,
    ) -> Result<Option<MicroBatchOutput>, TrainingError> {
        let exchanges = self.exchanges();
        let mut pass = Pass {
            left: self.learning(frozen),
            updates: &mut self.updates,
            plan,
            round,
            does: match (exchanges, self.config.fold_update && plan.came == 1) {
                (true, _) => Does::Exchange,
                (false, true) => Does::Fold(self.config.recipe.rate(plan.step)),
                (false, false) => Does::Gather,
            },
            under_way: VecDeque::new(),
            squares,
            failed: None,
        };
        let mut output = None;
        if let Some(loaded) = loaded {
            let options = TrainOptions {
                freeze_encoder: frozen,
                seed: micro_batch_seed(self.config.seed, plan.step, loaded.rank, loaded.micro),
                spec_augment: self.config.spec_augment,
                dither: self.config.dither,
                dropout: self.config.dropout,
                scale: 1.0 / f64::from(plan.planned.max(1)),
            };
            output =
                Some(
                    self.model
                        .train_micro_batch_telling(&loaded.batch, &options, &mut self.gradients, &mut pass)?,
                );
        }
        if let Some(error) = pass.failed {
            return Err(error);
        }
        if exchanges {
            while let Some((part, ids)) = pass.left.pop_front() {
                pass.exchange(part, &ids, &mut self.gradients, &self.model.parameters)?;
            }
            pass.take_in(true, &self.model.parameters)?;
        }
        Ok(output)
    }

    /// Running statistics of batch normalisation, as if one rank had seen all micro-batches, rank by rank. Each micro-batch
    /// moves them by `r <- (1 - m) r + m s`, so `n` of them by `r <- (1 - m)^n r + c`, where `c` is known from what a rank
    /// made of the statistics `r0` before the step: `c = r_n - (1 - m)^n r0`.
    fn join_statistics(&mut self, place: Place, before: &[Tensor], counts: &[f64]) -> Result<(), TrainingError> {
        let names = ["running_mean", "running_var", "num_batches_tracked"];
        let parameters = &self.model.parameters;
        let kept: Vec<(ParameterId, &Tensor)> = self
            .buffers
            .iter()
            .copied()
            .zip(before)
            .filter(|(id, _)| names.iter().any(|name| parameters.parameter(*id).name.ends_with(name)))
            .collect();
        let own = kept.iter().map(|(id, _)| parameters.get(*id).clone()).collect();
        let updater = self.updates.settled(&self.model.parameters)?;
        let all = updater.collective.gather_tensors(place, own)?;
        for (at, (id, start)) in kept.into_iter().enumerate() {
            let mut joined = start.clone();
            for (moved, count) in all.iter().zip(counts) {
                let Some(moved) = moved.get(at) else { continue };
                let mut difference = (&joined - start)?;
                if difference.dtype().is_float() {
                    difference = (difference * (1.0 - MOMENTUM).powf(*count))?;
                }
                joined = (difference + moved)?;
            }
            self.model.parameters.set(id, joined)?;
        }
        Ok(())
    }
}

/// One micro-batch on its way through the model.
struct Pass<'a> {
    updates: &'a mut Updates,
    plan: &'a StepPlan,
    round: u32,
    does: Does,
    /// Parts whose gradients are not complete.
    left: VecDeque<(Part, Vec<ParameterId>)>,
    /// Sums that are being made.
    under_way: VecDeque<Place>,
    /// Sum of the squares of all gradients that were used up.
    squares: &'a mut f64,
    failed: Option<TrainingError>,
}

/// What becomes of gradients that are complete.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Does {
    /// They wait for the end of the step.
    Gather,
    /// They are sent to the owners of their parameters.
    Exchange,
    /// They are applied at this rate and dropped, unless one was not finite.
    Fold(f64),
}

impl Follow for Pass<'_> {
    fn needed(&mut self, part: Part, parameters: &Parameters) {
        if self.failed.is_none() {
            self.failed = self.updates.need(part, parameters).err();
        }
    }

    fn finished(&mut self, part: Part, gradients: &mut Gradients, parameters: &Parameters) {
        if self.failed.is_some() {
            return;
        }
        self.failed = match self.does {
            Does::Gather => None,
            Does::Fold(rate) => self.fold(rate, gradients, parameters).err(),
            Does::Exchange => {
                let at = self.left.iter().position(|(other, _)| *other == part);
                at.and_then(|at| self.left.remove(at))
                    .and_then(|(part, ids)| self.exchange(part, &ids, gradients, parameters).err())
            }
        };
    }
}

impl Pass<'_> {
    fn fold(&mut self, rate: f64, gradients: &mut Gradients, parameters: &Parameters) -> Result<(), TrainingError> {
        *self.squares += squared_norm(parameters, gradients)?;
        if self.squares.is_finite() {
            let updater = self.updates.settled(parameters)?;
            updater.optimizer.step(parameters, gradients, rate, 1.0)?;
        }
        gradients.clear();
        Ok(())
    }

    fn exchange(
        &mut self,
        part: Part,
        ids: &[ParameterId],
        gradients: &mut Gradients,
        parameters: &Parameters,
    ) -> Result<(), TrainingError> {
        let place = Place {
            step: self.plan.step,
            round: self.round,
            what: What::Gradients(part),
        };
        let taken = ids.iter().filter_map(|&id| Some((id, gradients.take(id)?))).collect();
        let updater = self.updates.settled(parameters)?;
        updater.collective.start_sum(place, taken)?;
        self.under_way.push_back(place);
        // Takes in what is there, so that it does not pile up.
        self.take_in(false, parameters)
    }

    fn take_in(&mut self, wait: bool, parameters: &Parameters) -> Result<(), TrainingError> {
        let updater = self.updates.settled(parameters)?;
        while let Some(&place) = self.under_way.front() {
            let Some(sums) = updater.collective.finish_sum(place, wait)? else {
                break;
            };
            self.under_way.pop_front();
            for (id, sum) in sums {
                updater.sums.add(id, sum)?;
            }
        }
        Ok(())
    }
}

/// The utterances whose loss is not finite; all, if it cannot be told.
fn at_fault(loaded: &LoadedBatch, losses: &[f64]) -> Vec<String> {
    let named: Vec<String> = loaded
        .segments
        .iter()
        .zip(losses)
        .filter(|(_, loss)| !loss.is_finite())
        .map(|(name, _)| name.clone())
        .collect();
    if named.is_empty() {
        loaded.segments.clone()
    } else {
        named
    }
}
