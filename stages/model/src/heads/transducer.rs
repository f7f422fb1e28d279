//! A transducer: prediction network, joint network and their loss; TDT, or RNN-T where there are no durations.

use std::ops::Range;

use candle_core::Tensor;

use super::{Head, HeadInput, HeadKind, HeadPass, SearchState};
use crate::alignment::{self, AlignedTokens, Costs, HeardFrame, WordTokens};
use crate::config::{ModelConfig, Reduction, TransducerConfig};
use crate::decoding::beam::{Steps, decode_beam};
use crate::decoding::{DecodingSettings, GreedyState, Hypothesis, Networks, TokenObserver, decode_greedy_on};
use crate::joint::{Joint, JointLoss, JointSizes};
use crate::loss::TdtLoss;
use crate::parameter_groups::{ParameterGroup, PassObserver};
use crate::prediction::{Prediction, PredictionSaved};
use crate::{Error, Result};
use flow_nn::parameters::{Gradients, Mode, ParameterBuilder, Parameters};

/// A transducer.
#[derive(Debug)]
pub struct Transducer {
    pub(crate) prediction: Prediction,
    pub(crate) joint: Joint,
}

impl Transducer {
    /// Declares the parameters under `decoder.prediction` and `joint`.
    pub fn new(model: &ModelConfig, config: &TransducerConfig, builder: &mut ParameterBuilder) -> Result<Self> {
        let prediction = Prediction::new(
            model.vocab_size,
            config.prediction.pred_hidden,
            config.prediction.pred_rnn_layers,
            config.prediction.dropout,
            "decoder.prediction",
            builder,
        )?;
        let sizes = JointSizes {
            encoder: model.encoder.d_model,
            prediction: config.prediction.pred_hidden,
            hidden: config.joint.joint_hidden,
            vocabulary: model.vocab_size,
            durations: config.loss.durations.len(),
            dropout: config.joint.dropout,
        };
        let joint = Joint::new(&sizes, "joint", builder)?;
        Ok(Transducer { prediction, joint })
    }

    fn networks<'a>(&'a self, parameters: &'a Parameters) -> Networks<'a> {
        Networks {
            parameters,
            prediction: &self.prediction,
            joint: &self.joint,
        }
    }
}

fn of(config: &ModelConfig) -> Result<&TransducerConfig> {
    let config = config.transducer.as_ref();
    config.ok_or_else(|| Error::Config("the transducer's configuration is missing".into()))
}

/// Durations, the limit of tokens on one frame, the penalty on blank, and where speech is.
fn steps<'a>(config: &'a TransducerConfig, settings: &'a DecodingSettings) -> Steps<'a> {
    Steps {
        durations: &config.loss.durations,
        max_symbols: config.decoding.max_symbols,
        blank_penalty: settings.blank_penalty,
        speech: &settings.speech,
    }
}

/// In RNN-T a token is on one frame, in time stamps too, as NeMo has it.
fn fill_durations(config: &TransducerConfig, hypotheses: &mut [Hypothesis]) {
    if config.is_rnnt() {
        hypotheses
            .iter_mut()
            .for_each(|hypothesis| hypothesis.durations.fill(1));
    }
}

/// What the backward pass of a micro-batch needs.
struct TransducerPass<'a> {
    head: &'a Transducer,
    settings: TdtLoss,
    factors: Vec<f64>,
    losses: Vec<f64>,
    /// Given back when the joint network's gradients are there.
    loss: Option<JointLoss>,
    prediction: PredictionSaved,
    d_predicted: Option<Tensor>,
}

impl HeadPass for TransducerPass<'_> {
    fn losses(&self) -> &[f64] {
        &self.losses
    }

    fn flops_left_out(&self) -> f64 {
        let left_out = |loss| self.head.joint.flops_left_out(loss);
        self.loss.as_ref().map_or(0.0, left_out)
    }

    fn backward_outputs(
        &mut self,
        parameters: &Parameters,
        encoder_frozen: bool,
        gradients: &mut Gradients,
    ) -> Result<Option<Tensor>> {
        let Some(loss) = self.loss.take() else {
            return Err(Error::Input("a micro-batch has one backward pass".into()));
        };
        let (d_encoded, d_predicted) = self.head.joint.backward(
            parameters,
            &self.settings,
            &loss,
            &self.factors,
            encoder_frozen,
            gradients,
        )?;
        self.d_predicted = Some(d_predicted);
        Ok(d_encoded)
    }

    fn backward_rest(
        self: Box<Self>,
        parameters: &Parameters,
        gradients: &mut Gradients,
        observer: &mut (dyn PassObserver + Send),
    ) -> Result<()> {
        if let Some(d_predicted) = &self.d_predicted {
            let prediction = &self.head.prediction;
            prediction.backward(parameters, &self.prediction, d_predicted, gradients)?;
        }
        observer.gradients_complete(ParameterGroup::Prediction, gradients, parameters);
        Ok(())
    }
}

impl Head for Transducer {
    fn kind(&self) -> HeadKind {
        HeadKind::Transducer
    }

    fn reduction(&self, config: &ModelConfig) -> Reduction {
        let transducer = config.transducer.as_ref();
        transducer.map_or(Reduction::MeanBatch, |transducer| transducer.loss.reduction)
    }

    fn forward<'a>(
        &'a self,
        parameters: &Parameters,
        config: &ModelConfig,
        input: &HeadInput,
        mut mode: Mode,
        before: &mut dyn FnMut(ParameterGroup),
    ) -> Result<Box<dyn HeadPass + 'a>> {
        let loss = &of(config)?.loss;
        let drawn = input
            .choices
            .is_some_and(|choices| loss.omega > choices.derive("omega").uniform());
        let settings = TdtLoss {
            durations: loss.durations.clone(),
            sigma: loss.sigma,
            fastemit: loss.fastemit_lambda,
            clamp: loss.clamp,
            rnnt: drawn || loss.durations.is_empty(),
        };
        before(ParameterGroup::Prediction);
        let (predicted, prediction) = self.prediction.forward(parameters, input.targets, mode.reborrow())?;
        before(ParameterGroup::Heads);
        let encoded = (input.frames, input.lengths);
        let loss = self
            .joint
            .loss(parameters, &settings, encoded, (&predicted, input.targets), mode)?;
        Ok(Box::new(TransducerPass {
            head: self,
            settings,
            factors: input.factors.to_vec(),
            losses: loss.losses.clone(),
            loss: Some(loss),
            prediction,
            d_predicted: None,
        }))
    }

    fn check(&self, settings: &DecodingSettings) -> Result<()> {
        settings.fusion.check(self.joint.blank())
    }

    fn start(&self, parameters: &Parameters, settings: &DecodingSettings, batch: usize) -> Result<SearchState> {
        self.check(settings)?;
        let state = GreedyState::start(&self.networks(parameters), &settings.fusion, batch)?;
        Ok(SearchState::Transducer(state))
    }

    fn search(
        &self,
        parameters: &Parameters,
        config: &ModelConfig,
        settings: &DecodingSettings,
        (encoded, lengths): (&Tensor, &[usize]),
        state: &mut SearchState,
        observer: Option<TokenObserver>,
    ) -> Result<Vec<Hypothesis>> {
        let SearchState::Transducer(state) = state else {
            return Err(Error::Input(
                "a state of CTC's search is not one of a transducer's".into(),
            ));
        };
        let (networks, config) = (self.networks(parameters), of(config)?);
        let (fusion, steps) = (&settings.fusion, steps(config, settings));
        let mut found = decode_greedy_on(&networks, fusion, steps, encoded, lengths, state, observer)?;
        fill_durations(config, &mut found);
        Ok(found)
    }

    fn n_best(
        &self,
        parameters: &Parameters,
        config: &ModelConfig,
        settings: &DecodingSettings,
        (encoded, lengths): (&Tensor, &[usize]),
        observer: Option<TokenObserver>,
    ) -> Result<Vec<Vec<Hypothesis>>> {
        let (networks, config) = (self.networks(parameters), of(config)?);
        let mut found = decode_beam(&networks, settings, steps(config, settings), encoded, lengths, observer)?;
        found
            .iter_mut()
            .for_each(|hypotheses| fill_durations(config, hypotheses));
        Ok(found)
    }

    fn align(
        &self,
        parameters: &Parameters,
        config: &ModelConfig,
        frames: &Tensor,
        text: &WordTokens,
        costs: Costs,
    ) -> Result<AlignedTokens> {
        let durations = &of(config)?.loss.durations;
        let tokens = text.tokens();
        // The prediction network's outputs are those of the whole text, also behind words that a path leaves out.
        let g = self.predicted(parameters, tokens)?;
        let count = frames.dim(0)?;
        let f = match count {
            0 => frames.clone(),
            _ => self.joint.project_encoder(parameters, &frames.contiguous()?)?,
        };
        let heard = match costs.has_passages() {
            true => self.heard(parameters, config, (frames, &f))?,
            false => vec![HeardFrame::default(); count],
        };
        alignment::transducer::align(&heard, durations, text, costs, &mut |range| {
            let cells = range.flat_map(|frame| (0..=tokens.len()).map(move |state| (frame, state)));
            self.joint.lattice_cells(parameters, (&f, &g), cells, tokens)
        })
    }
}

impl Transducer {
    /// What the joint network takes of the prediction network, before and behind each of these tokens.
    fn predicted(&self, parameters: &Parameters, tokens: &[u32]) -> Result<Tensor> {
        let (predicted, _) = self
            .prediction
            .forward(parameters, &[tokens.to_vec()], Mode::Evaluate)?;
        self.joint.project_prediction(parameters, &predicted.flatten_to(1)?)
    }

    /// What greedy search does on each frame of one signal, (frames, d_model), of which `f` is the projection.
    fn heard(
        &self,
        parameters: &Parameters,
        config: &ModelConfig,
        (frames, f): (&Tensor, &Tensor),
    ) -> Result<Vec<HeardFrame>> {
        let count = frames.dim(0)?;
        let mut heard = vec![HeardFrame::default(); count];
        if count == 0 {
            return Ok(heard);
        }
        let settings = DecodingSettings::default();
        let (mut state, batch) = (self.start(parameters, &settings, 1)?, frames.unsqueeze(0)?);
        let found = self.search(parameters, config, &settings, (&batch, &[count]), &mut state, None)?;
        let found = found.into_iter().next().unwrap_or_default();
        let durations = &of(config)?.loss.durations;
        let emitted = |token: usize| found.frames.get(token).map(|frame| *frame as usize);
        // The frames between one token and the next, with that of the next.
        let mut from = 0;
        let parts: Vec<Range<usize>> = (0..=found.ids.len())
            .map(|state| {
                let until = emitted(state).unwrap_or(count);
                let part = from.min(until)..count.min(until + 1);
                from = match durations.is_empty() {
                    true => until,
                    false => until + found.durations.get(state).map_or(0, |duration| *duration as usize),
                };
                part
            })
            .collect();
        let g = self.predicted(parameters, &found.ids)?;
        let states = parts.iter().enumerate();
        let cells = states.flat_map(|(state, part)| part.clone().map(move |frame| (frame, state)));
        let cells = self.joint.lattice_cells(parameters, (f, &g), cells, &found.ids)?;
        let best = |cell: usize| -> (usize, f64) {
            let scores = &cells.durations[cell * durations.len()..][..durations.len()];
            let all = durations.iter().copied().zip(scores.iter().copied());
            all.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((1, 0.0))
        };
        let mut first = 0;
        for (state, part) in parts.iter().enumerate() {
            let token = emitted(state);
            let mut frame = part.start;
            while frame < token.unwrap_or(count) {
                let cell = first + frame - part.start;
                let (duration, score) = best(cell);
                heard[frame].logprob += cells.blank[cell] + score;
                frame += duration.max(1);
            }
            if let Some(frame) = token {
                let cell = first + frame - part.start;
                heard[frame].logprob += cells.label[cell] + best(cell).1;
                heard[frame].tokens += 1;
            }
            first += part.len();
        }
        Ok(heard)
    }
}
