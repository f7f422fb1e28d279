//! One rank: its replica of the model, and its part in each optimizer step.

use std::collections::{BTreeMap, VecDeque};

use candle_core::Tensor;
use flow_model::layers::convolution::MOMENTUM;
use flow_model::model::{TdtModel, TrainOptions};
use flow_model::{Gradients, ParameterId, Parameters, Part};

use super::{Alone, Collective, Place, What, hang, owners};
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
    pub model: TdtModel,
    /// Holds the moments of the parameters that this rank owns.
    pub optimizer: AdamW,
    config: TrainerConfig,
    collective: Box<dyn Collective>,
    /// Of the micro-batch in hand, or of all so far if there is one rank.
    gradients: Gradients,
    folded: Folded,
    /// Sums over all ranks of what this one owns. Unused if there is one rank.
    sums: Gradients,
    parts: BTreeMap<Part, Vec<ParameterId>>,
    buffers: Vec<ParameterId>,
}

impl Replica {
    /// The one rank of a training without others.
    pub fn alone(model: TdtModel, optimizer: AdamW, config: TrainerConfig) -> Self {
        Replica::new(model, optimizer, config, Box::new(Alone))
    }

    /// A rank among others. Of the optimizer's state it keeps what it owns.
    pub fn new(model: TdtModel, mut optimizer: AdamW, config: TrainerConfig, collective: Box<dyn Collective>) -> Self {
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
        let owned = |name: &str| {
            let id = model.parameters.id(name);
            id.is_some_and(|id| owners[id.index()] == collective.rank())
        };
        optimizer.retain(owned);
        Replica {
            gradients: Gradients::new(&model.parameters),
            sums: Gradients::new(&model.parameters),
            folded: Folded::default(),
            model,
            optimizer,
            config,
            collective,
            parts,
            buffers,
        }
    }

    /// Lets the other ranks know that this one cannot go on.
    pub fn fail(&mut self, message: &str) {
        self.collective.fail(message);
    }

    /// This rank's part of an optimizer step. Where a loss of any rank or the norm of the gradient is not finite,
    /// nothing changes on any of them: neither parameters nor statistics of batch normalisation.
    pub fn step(&mut self, plan: &StepPlan, micro_batches: &[LoadedBatch]) -> Result<RankReport, TrainingError> {
        hang::pass(self.collective.rank(), plan.step);
        let frozen = self.config.recipe.encoder_frozen(plan.step);
        self.gradients.clear();
        self.sums.clear();
        self.folded = Folded::default();
        let before: Vec<Tensor> = self
            .buffers
            .iter()
            .map(|&id| self.model.parameters.get(id).clone())
            .collect();
        let mut report = RankReport::default();
        let mut loss = 0.0;
        for round in 0..plan.rounds {
            let loaded = micro_batches.get(round as usize);
            if let Some(output) = self.round(plan, round, loaded, frozen)? {
                loss += output.loss / plan.came as f64;
                report.tokens += output.tokens as u64;
                if let Some(loaded) = loaded.filter(|_| !output.loss.is_finite()) {
                    report.bad.extend(at_fault(loaded, &output.losses));
                }
            }
        }
        let several = self.collective.size() > 1;
        let sums = if several { &self.sums } else { &self.gradients };
        let squares = self.folded.squares + squared_norm(&self.model.parameters, sums)?;
        let bad = f64::from(u8::from(!report.bad.is_empty()));
        let place = |what| Place {
            step: plan.step,
            round: 0,
            what,
        };
        let figures = [squares, loss, bad, micro_batches.len() as f64];
        let figures = self.collective.gather(place(What::Figures), figures.to_vec())?;
        let total = |column: usize| -> f64 { figures.iter().filter_map(|rank| rank.get(column)).sum() };
        report.gradient_norm = total(0).sqrt();
        report.loss = total(1);
        report.skipped = total(2) > 0.0 || !report.gradient_norm.is_finite() || !report.loss.is_finite();
        if report.skipped {
            if total(2) == 0.0 {
                // All losses are finite, so any segment may be at fault.
                let segments = micro_batches.iter().flat_map(|loaded| loaded.segments.iter().cloned());
                report.bad.extend(segments);
            }
            for (&id, tensor) in self.buffers.iter().zip(before) {
                self.model.parameters.set(id, tensor)?;
            }
        } else {
            let rate = self.config.recipe.rate(plan.step);
            let scale = clip_factor(report.gradient_norm, self.config.clip);
            self.optimizer.step(&self.model.parameters, sums, rate, scale)?;
            if several {
                let changed: Vec<ParameterId> =
                    self.learning(frozen).flat_map(|(_, ids)| ids.iter().copied()).collect();
                self.collective
                    .spread(place(What::Parameters), &mut self.model.parameters, &changed)?;
                if !frozen {
                    let counts: Vec<f64> = figures.iter().filter_map(|rank| rank.get(3).copied()).collect();
                    self.join_statistics(place(What::Statistics), &before, &counts)?;
                }
            }
        }
        self.gradients.clear();
        self.sums.clear();
        report.waited = self.collective.waited();
        Ok(report)
    }

    /// The parts that get gradients, in the order in which the backward pass completes them.
    fn learning(&self, frozen: bool) -> impl Iterator<Item = (Part, &[ParameterId])> {
        Part::in_order(self.model.encoder_layers())
            .into_iter()
            .filter(move |part| !frozen || matches!(part, Part::Heads | Part::Prediction))
            .map(|part| (part, self.parts.get(&part).map_or(&[][..], Vec::as_slice)))
    }

    /// One micro-batch, or its absence, which the others must not wait for.
    fn round(
        &mut self,
        plan: &StepPlan,
        round: u32,
        loaded: Option<&LoadedBatch>,
        frozen: bool,
    ) -> Result<Option<flow_model::model::MicroBatchOutput>, TrainingError> {
        let mut left: VecDeque<(Part, Vec<ParameterId>)> =
            self.learning(frozen).map(|(part, ids)| (part, ids.to_vec())).collect();
        let mut exchange = Exchange {
            collective: self.collective.as_mut(),
            sums: &mut self.sums,
            under_way: VecDeque::new(),
            place: |part| Place {
                step: plan.step,
                round,
                what: What::Gradients(part),
            },
        };
        let several = exchange.collective.size() > 1;
        let fold = self.config.fold_update && !several && plan.came == 1;
        let (optimizer, rate) = (&mut self.optimizer, self.config.recipe.rate(plan.step));
        let folded = &mut self.folded;
        let mut failed = None;
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
            let mut finished = |part: Part, gradients: &mut Gradients, parameters: &Parameters| {
                if failed.is_some() {
                    return;
                }
                if fold {
                    failed = folded.update(optimizer, parameters, gradients, rate).err();
                    return;
                }
                if several
                    && let Some(at) = left.iter().position(|(other, _)| *other == part)
                    && let Some((part, ids)) = left.remove(at)
                {
                    failed = exchange.begin(part, &ids, gradients).err();
                }
            };
            output = Some(self.model.train_micro_batch_telling(
                &loaded.batch,
                &options,
                &mut self.gradients,
                &mut finished,
            )?);
        }
        if let Some(error) = failed {
            return Err(error);
        }
        if several {
            for (part, ids) in left {
                exchange.begin(part, &ids, &mut self.gradients)?;
            }
            exchange.end()?;
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
        let all = self.collective.gather_tensors(place, own)?;
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

/// What was updated within the backward pass.
#[derive(Default)]
struct Folded {
    /// Sum of the squares of all gradients so far.
    squares: f64,
}

impl Folded {
    /// Applies the gradients that stand and drops them, unless one was not finite.
    fn update(
        &mut self,
        optimizer: &mut AdamW,
        parameters: &Parameters,
        gradients: &mut Gradients,
        rate: f64,
    ) -> Result<(), TrainingError> {
        self.squares += squared_norm(parameters, gradients)?;
        if self.squares.is_finite() {
            optimizer.step(parameters, gradients, rate, 1.0)?;
        }
        gradients.clear();
        Ok(())
    }
}

/// Gradients of one micro-batch on their way to their owners.
struct Exchange<'a, P: Fn(Part) -> Place> {
    collective: &'a mut dyn Collective,
    sums: &'a mut Gradients,
    under_way: VecDeque<Place>,
    place: P,
}

impl<P: Fn(Part) -> Place> Exchange<'_, P> {
    fn begin(&mut self, part: Part, ids: &[ParameterId], gradients: &mut Gradients) -> Result<(), TrainingError> {
        let place = (self.place)(part);
        let taken = ids.iter().filter_map(|&id| Some((id, gradients.take(id)?))).collect();
        self.collective.start_sum(place, taken)?;
        self.under_way.push_back(place);
        // Takes in what is there, so that it does not pile up.
        self.take_in(false)
    }

    fn end(&mut self) -> Result<(), TrainingError> {
        self.take_in(true)
    }

    fn take_in(&mut self, wait: bool) -> Result<(), TrainingError> {
        while let Some(&place) = self.under_way.front() {
            let Some(sums) = self.collective.finish_sum(place, wait)? else {
                break;
            };
            self.under_way.pop_front();
            for (id, sum) in sums {
                self.sums.add(id, sum)?;
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
