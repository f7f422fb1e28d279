//! The whole model: signals and tokens in, loss and gradients out, or text out.

mod stream;

use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use flow_kernels::Noise;
use flow_kernels::device::{is_out_of_memory, release_memory};
use flow_kernels::elementwise::add_in_place;

use crate::checkpoint::{OpenModel, StoredModel, broken, write_model_folder};
use crate::config::{EncoderConfig, ModelConfig};
use crate::ctc::CtcHead;
use crate::decoding::beam::{Steps, decode_beam};
use crate::decoding::{DecodingSettings, Hypothesis, Networks, TokenObserver, decode_greedy_observed};
use crate::encoder::Encoder;
use crate::features::LogMel;
use crate::joint::{Joint, JointSizes};
use crate::layers::convolution::BatchNorm;
use crate::loss::{TdtLoss, factors_in, reduction_factors};
use crate::parameter_groups::{ParameterGroup, PassObserver};
use crate::parameters::{BufferUpdates, Gradients, Mode, Parameter, ParameterBuilder, Parameters};
use crate::prediction::Prediction;
use crate::tokenizer::Tokenizer;
use crate::{Error, Precision, Result, encoder};

/// Utterances that share one forward and one backward pass.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MicroBatch {
    /// 16 kHz mono samples in [-1, 1], one vector per utterance; padded inside to the longest.
    pub signals: Vec<Vec<f32>>,
    /// Token ids of the target, one vector per utterance, each below the blank id. May be empty.
    pub tokens: Vec<Vec<u32>>,
}

/// How one micro-batch is trained.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainOptions {
    /// No gradient and no dropout in the encoder, batch normalisation with its stored statistics.
    pub freeze_encoder: bool,
    /// Seeds dither, SpecAugment, dropout and the loss's omega draw of this micro-batch.
    pub seed: u64,
    /// Mask the features as the configuration's `spec_augment` says.
    pub spec_augment: bool,
    /// Add the configuration's dither to the signals.
    pub dither: bool,
    /// Apply the dropout rates that the model was made with; otherwise all are zero.
    pub dropout: bool,
    /// Factor on the gradients: 1 / number of micro-batches per optimizer step.
    pub scale: f64,
    /// The micro-batch that this one is a part of, if it is one. Loss and gradients are then the part's share of those of
    /// the whole, and dropout, dither and masks are drawn for each part.
    pub part: Option<PartOf>,
}

/// A part of a micro-batch that was divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartOf {
    /// Its number; the first is 0.
    pub number: u64,
    /// Utterances of the whole.
    pub utterances: usize,
    /// Target tokens of the whole.
    pub tokens: usize,
}

impl Default for TrainOptions {
    fn default() -> Self {
        TrainOptions {
            freeze_encoder: false,
            seed: 0,
            spec_augment: true,
            dither: true,
            dropout: true,
            scale: 1.0,
            part: None,
        }
    }
}

/// The result of a forward pass over a micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct MicroBatchOutput {
    /// Loss after the configured reduction, not multiplied by `TrainOptions::scale`. Not finite when an utterance's
    /// loss is not.
    pub loss: f64,
    /// Negative log likelihood of each utterance: zero for one too short to have a frame, infinite for one whose
    /// target cannot be aligned.
    pub losses: Vec<f64>,
    /// Mean CTC loss per utterance, where the model has an auxiliary CTC head and trains it. The gradient is then that
    /// of `(1 - weight) * loss + weight * ctc_loss`.
    pub ctc_loss: Option<f64>,
    /// Encoder frames of each utterance.
    pub frames: Vec<usize>,
    /// Encoder frames of the padded tensor, times utterances.
    pub padded_frames: usize,
    /// Target tokens of all utterances.
    pub tokens: usize,
    /// Operations of matrix products that the backward pass leaves out on a device, since cells of the lattices do not count.
    pub flops_left_out: f64,
}

/// A Parakeet TDT model: front end, FastConformer encoder, prediction network and joint network.
pub struct TdtModel {
    /// Sizes and dropout rates are fixed when the model is made; the settings of loss, decoding and SpecAugment may be
    /// changed at any time.
    pub config: ModelConfig,
    pub parameters: Parameters,
    pub tokenizer: Option<Tokenizer>,
    /// Decoding settings; greedy by default.
    pub decoding: DecodingSettings,
    front_end: LogMel,
    encoder: Encoder,
    prediction: Prediction,
    joint: Joint,
    ctc: Option<CtcHead>,
    unused: Vec<String>,
}

/// A forward pass of the encoder.
struct Encoded {
    frames: Tensor,
    lengths: Vec<usize>,
    /// None if the encoder is not trained.
    saved: Option<encoder::Saved>,
    updates: BufferUpdates,
}

impl TdtModel {
    /// A freshly initialised model. The tokenizer's size must be the configuration's vocabulary size.
    pub fn new(
        config: ModelConfig,
        tokenizer: Option<Tokenizer>,
        seed: u64,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        Self::build(config, tokenizer, ParameterBuilder::random(dtype, device.clone(), seed))
    }

    /// Reads a `.nemo` archive or a model folder (`model.safetensors`, `model_config.yaml`, `tokenizer.model`).
    pub fn load(path: &Path, dtype: DType, device: &Device) -> Result<Self> {
        Self::load_storing(path, dtype, dtype, device)
    }

    /// The same with the matrices of linear layers stored in another data type than `dtype`, which is computed in: for
    /// decoding in half the memory. Such a model is not for training.
    pub fn load_storing(path: &Path, dtype: DType, matrices: DType, device: &Device) -> Result<Self> {
        Self::load_in(path, (dtype, matrices, Precision::F32), device)
    }

    /// A model for decoding in f32, with its matrices stored in a data type, or with products of its encoder's layers and its joint
    /// network in low precision, on the CPU; their weights are then kept in that precision alone.
    ///
    /// # Errors
    /// If it cannot be read, or if low precision is asked for with matrices of another data type than f32 or on a device.
    pub fn load_for_decoding(path: &Path, matrices: DType, precision: Precision, device: &Device) -> Result<Self> {
        if precision != Precision::F32 && (matrices != DType::F32 || !device.is_cpu()) {
            return Err(Error::Input(format!(
                "precision {} is for matrices in f32 on the CPU",
                precision.name()
            )));
        }
        Self::load_in(path, (DType::F32, matrices, precision), device)
    }

    fn load_in(path: &Path, numbers: (DType, DType, Precision), device: &Device) -> Result<Self> {
        let opened = OpenModel::open(path)?;
        let config = ModelConfig::from_nemo_yaml(&opened.config_yaml).map_err(|error| broken(path, error))?;
        Self::from_entries(opened, config, numbers, device).map_err(|error| match error {
            Error::File { .. } | Error::Io { .. } => error,
            other => broken(path, other),
        })
    }

    /// An opened model under a configuration, which is its own or one with other settings (dropout rates, for
    /// instance). Its tensors are read one by one.
    pub fn from_open(opened: OpenModel, config: ModelConfig, dtype: DType, device: &Device) -> Result<Self> {
        Self::from_entries(opened, config, (dtype, dtype, Precision::F32), device)
    }

    /// An opened model whose configuration may have fewer layers, computed in the first number type, with matrices stored in the second
    /// one and products in a precision.
    pub(crate) fn from_entries(
        opened: OpenModel,
        config: ModelConfig,
        (dtype, matrices, precision): (DType, DType, Precision),
        device: &Device,
    ) -> Result<Self> {
        let tokenizer = opened.tokenizer.as_deref().map(Tokenizer::from_bytes).transpose()?;
        let builder = ParameterBuilder::from_entries(dtype, device.clone(), opened.tensors);
        let builder = builder.store_matrices_as(matrices).compute_products_in(precision);
        Self::build(config, tokenizer, builder)
    }

    /// A model of stored tensors under a configuration, which is the stored one or one with other settings (dropout
    /// rates, for instance).
    pub fn from_stored(stored: StoredModel, config: ModelConfig, dtype: DType, device: &Device) -> Result<Self> {
        let tokenizer = stored.tokenizer.as_deref().map(Tokenizer::from_bytes).transpose()?;
        Self::build(
            config,
            tokenizer,
            ParameterBuilder::from_tensors(dtype, device.clone(), stored.tensors),
        )
    }

    fn build(mut config: ModelConfig, tokenizer: Option<Tokenizer>, mut builder: ParameterBuilder) -> Result<Self> {
        if let Some(tokenizer) = &tokenizer {
            if tokenizer.vocabulary_size() != config.decoder.vocab_size {
                return Err(Error::Config(format!(
                    "`decoder.vocab_size` is {}, but the tokenizer has {} pieces",
                    config.decoder.vocab_size,
                    tokenizer.vocabulary_size()
                )));
            }
            if config.labels.is_empty() {
                config.labels = tokenizer.pieces();
            }
        }
        let front_end = LogMel::new(&config.preprocessor, &mut builder)?;
        let encoder = Encoder::new(&config.encoder, "encoder", &mut builder)?;
        let decoder = &config.decoder;
        let prediction = Prediction::new(
            decoder.vocab_size,
            decoder.pred_hidden,
            decoder.pred_rnn_layers,
            decoder.dropout,
            "decoder.prediction",
            &mut builder,
        )?;
        let sizes = JointSizes {
            encoder: config.encoder.d_model,
            prediction: decoder.pred_hidden,
            hidden: config.joint.joint_hidden,
            vocabulary: decoder.vocab_size,
            durations: config.loss.durations.len(),
            dropout: config.joint.dropout,
        };
        let joint = Joint::new(&sizes, "joint", &mut builder)?;
        let ctc = match config.ctc_weight {
            Some(_) => Some(CtcHead::new(config.encoder.d_model, decoder.vocab_size, &mut builder)?),
            None => None,
        };
        let (parameters, unused) = builder.finish();
        Ok(TdtModel {
            config,
            parameters,
            tokenizer,
            decoding: DecodingSettings::default(),
            front_end,
            encoder,
            prediction,
            joint,
            ctc,
            unused,
        })
    }

    /// Names of tensors in the loaded file that the model does not use.
    pub fn unused_tensors(&self) -> &[String] {
        &self.unused
    }

    /// A model with the same weights in tensors of its own: another replica in training.
    pub fn replica(&self) -> Result<Self> {
        self.replica_on(self.parameters.device())
    }

    /// The same on a device.
    pub fn replica_on(&self, device: &Device) -> Result<Self> {
        self.parameters.check_f32("copied")?;
        let copied = self.parameters.copied_to(device)?;
        self.rebuilt(&copied, self.parameters.matrix_dtype())
    }

    /// The model with the matrices of linear layers stored in another data type.
    pub fn stored_as(self, matrices: DType) -> Result<Self> {
        if matrices == self.parameters.matrix_dtype() {
            return Ok(self);
        }
        self.rebuilt(&self.parameters, matrices)
    }

    fn rebuilt(&self, parameters: &Parameters, matrices: DType) -> Result<Self> {
        self.parameters.check_f32("stored in another type")?;
        let named = |(_, parameter): (_, &Parameter)| (parameter.name.clone(), parameter.tensor.clone());
        let tensors: Vec<(String, Tensor)> = parameters.iter().map(named).collect();
        let (dtype, device) = (parameters.dtype(), parameters.device().clone());
        let tokenizer = self
            .tokenizer
            .as_ref()
            .map(|tokenizer| Tokenizer::from_bytes(tokenizer.bytes()));
        let builder = ParameterBuilder::from_tensors(dtype, device, tensors).store_matrices_as(matrices);
        let mut model = Self::build(self.config.clone(), tokenizer.transpose()?, builder)?;
        model.set_recompute(self.encoder.recompute);
        model.set_batch_norm(self.encoder.batch_norm);
        model.decoding = self.decoding.clone();
        Ok(model)
    }

    /// Seconds of audio for each frame of the encoder's output: 0.08 for sub-sampling by 8.
    pub fn frame_seconds(&self) -> f64 {
        self.config.preprocessor.window_stride * EncoderConfig::SUBSAMPLING as f64
    }

    /// Number of layers of the encoder.
    pub fn encoder_layers(&self) -> usize {
        self.config.encoder.n_layers
    }

    /// Whether encoder layers are computed again in the backward pass.
    pub fn recomputes(&self) -> bool {
        self.encoder.recompute
    }

    /// Computes encoder layers again in the backward pass instead of keeping what they need: less memory, the same
    /// gradients.
    pub fn set_recompute(&mut self, recompute: bool) {
        self.encoder.recompute = recompute;
    }

    /// Sets which statistics batch normalisation uses in training.
    pub fn set_batch_norm(&mut self, batch_norm: BatchNorm) {
        self.encoder.batch_norm = batch_norm;
    }

    /// Writes a model folder. Every file is written under a temporary name and renamed, the weights last.
    pub fn save(&self, folder: &Path) -> Result<()> {
        self.parameters.check_f32("written")?;
        let tensors: Vec<(&str, &Tensor)> = self
            .parameters
            .iter()
            .map(|(_, parameter)| (parameter.name.as_str(), &parameter.tensor))
            .collect();
        let tokenizer = self.tokenizer.as_ref().map(Tokenizer::bytes);
        write_model_folder(folder, &self.config.to_nemo_yaml()?, tokenizer, &tensors)
    }

    /// Trains one micro-batch: adds its gradients, times `options.scale`, to `gradients`, and moves the statistics of
    /// batch normalisation (unless the encoder is frozen).
    ///
    /// If the loss is not finite, neither happens: the caller learns which utterances are at fault from the result.
    pub fn train_micro_batch(
        &mut self,
        batch: &MicroBatch,
        options: &TrainOptions,
        gradients: &mut Gradients,
    ) -> Result<MicroBatchOutput> {
        self.train_micro_batch_observed(
            batch,
            options,
            gradients,
            &mut |_: ParameterGroup, _: &mut Gradients, _: &Parameters| {},
        )
    }

    /// As [`TdtModel::train_micro_batch`]; `observer` is called before each parameter group is read, and when its
    /// gradients are complete. If the loss is not finite, there is no backward pass.
    pub fn train_micro_batch_observed(
        &mut self,
        batch: &MicroBatch,
        options: &TrainOptions,
        gradients: &mut Gradients,
        observer: &mut (dyn PassObserver + Send),
    ) -> Result<MicroBatchOutput> {
        self.parameters.check_f32("trained")?;
        check(batch)?;
        let of_whole = Noise::new(options.seed);
        let noise = match options.part {
            Some(part) if part.number > 0 => of_whole.derive(&format!("part {}", part.number)),
            _ => of_whole.clone(),
        };
        let mut dropout = noise.derive("dropout");
        if !options.dropout {
            dropout = dropout.without_dropout();
        }
        let encoded = self.encode_for_training(batch, options, &noise, &mut dropout, observer)?;
        let rnnt = self.config.loss.omega > of_whole.derive("omega").uniform();
        let settings = self.loss_settings(rnnt);
        observer.before_forward(ParameterGroup::Prediction, &self.parameters);
        let (predicted, prediction_saved) =
            self.prediction
                .forward(&self.parameters, &batch.tokens, Mode::Train(&mut dropout))?;
        observer.before_forward(ParameterGroup::Heads, &self.parameters);
        let loss = self.joint.loss(
            &self.parameters,
            &settings,
            (&encoded.frames, &encoded.lengths),
            (&predicted, &batch.tokens),
            Mode::Train(&mut dropout),
        )?;
        let (mut output, factors) = self.output(batch, options.part, &encoded, loss.losses.clone())?;
        if !output.loss.is_finite() {
            return Ok(output);
        }
        output.flops_left_out = self.joint.flops_left_out(&loss);
        let ctc_weight = self.config.ctc_weight.unwrap_or(0.0);
        let factors: Vec<f64> = factors
            .iter()
            .map(|factor| factor * options.scale * (1.0 - ctc_weight))
            .collect();
        let d_ctc = match &self.ctc {
            Some(head) if ctc_weight > 0.0 => {
                let utterances = options.part.map_or(batch.tokens.len(), |part| part.utterances) as f64;
                let factors = vec![ctc_weight * options.scale / utterances; batch.tokens.len()];
                let frames = (&encoded.frames, encoded.lengths.as_slice());
                let (losses, d_frames) = head.loss(&self.parameters, frames, &batch.tokens, &factors, gradients)?;
                // Utterances whose target does not fit their frames contribute nothing, as in NeMo.
                let fitting = losses.iter().filter(|loss| **loss != f64::INFINITY);
                output.ctc_loss = Some(fitting.sum::<f64>() / utterances);
                Some(d_frames)
            }
            _ => None,
        };
        let (d_encoded, d_predicted) = self.joint.backward(
            &self.parameters,
            &settings,
            &loss,
            &factors,
            encoded.saved.is_none(),
            gradients,
        )?;
        drop(loss);
        observer.gradients_complete(ParameterGroup::Heads, gradients, &self.parameters);
        self.prediction
            .backward(&self.parameters, &prediction_saved, &d_predicted, gradients)?;
        observer.gradients_complete(ParameterGroup::Prediction, gradients, &self.parameters);
        if let (Some(saved), Some(d_encoded)) = (encoded.saved, d_encoded) {
            if let Some(d_ctc) = d_ctc {
                add_in_place(&d_encoded, &d_ctc)?;
            }
            self.encoder
                .backward_observed(&self.parameters, saved, &d_encoded, gradients, observer)?;
        }
        encoded.updates.apply(&mut self.parameters)?;
        Ok(output)
    }

    fn encode_for_training(
        &self,
        batch: &MicroBatch,
        options: &TrainOptions,
        noise: &Noise,
        dropout: &mut Noise,
        observer: &mut (dyn PassObserver + Send),
    ) -> Result<Encoded> {
        let mut dither = noise.derive("dither");
        let signals: Vec<&[f32]> = batch.signals.iter().map(Vec::as_slice).collect();
        let mut augment = noise.derive("spec_augment");
        let augment = options
            .spec_augment
            .then_some((&self.config.spec_augment, &mut augment));
        let (tensor, lengths) = self.front_end.on(
            (self.parameters.dtype(), self.parameters.device()),
            &signals,
            options.dither.then_some(&mut dither),
            augment,
        )?;
        if options.freeze_encoder {
            for group in ParameterGroup::encoder_forward_order(self.encoder_layers()) {
                observer.before_forward(group, &self.parameters);
            }
            let (frames, lengths) = self.encoder.encode(&self.parameters, &tensor, &lengths)?;
            return Ok(Encoded {
                frames,
                lengths,
                saved: None,
                updates: BufferUpdates::default(),
            });
        }
        let (frames, lengths, saved, updates) =
            self.encoder
                .forward_observed(&self.parameters, &tensor, &lengths, Mode::Train(dropout), observer)?;
        Ok(Encoded {
            frames,
            lengths,
            saved: Some(saved),
            updates,
        })
    }

    /// The loss in evaluation mode: no noise, stored statistics, no gradient.
    pub fn evaluate_loss(&self, batch: &MicroBatch) -> Result<MicroBatchOutput> {
        check(batch)?;
        let signals: Vec<&[f32]> = batch.signals.iter().map(Vec::as_slice).collect();
        let (frames, lengths) = self.encode(&signals)?;
        let losses = self.losses_of_encoded(&frames, &lengths, &batch.tokens)?;
        let encoded = Encoded {
            frames,
            lengths,
            saved: None,
            updates: BufferUpdates::default(),
        };
        Ok(self.output(batch, None, &encoded, losses)?.0)
    }

    /// The TDT loss of each utterance in evaluation mode. `frames`: (batch, frames, d_model) as [`TdtModel::encode`] gives
    /// them, of which `lengths` are valid; `targets`: token ids of each utterance.
    fn losses_of_encoded(&self, frames: &Tensor, lengths: &[usize], targets: &[Vec<u32>]) -> Result<Vec<f64>> {
        let (predicted, _) = self.prediction.forward(&self.parameters, targets, Mode::Evaluate)?;
        let loss = self.joint.loss(
            &self.parameters,
            &self.loss_settings(false),
            (frames, lengths),
            (&predicted, targets),
            Mode::Evaluate,
        )?;
        Ok(loss.losses)
    }

    /// Encoder output in evaluation mode, (batch, frames, d_model), and valid frames per signal. Signals are 16 kHz
    /// mono in [-1, 1], padded to the longest.
    pub fn encode(&self, signals: &[&[f32]]) -> Result<(Tensor, Vec<usize>)> {
        let place = (self.parameters.dtype(), self.parameters.device());
        let (features, lengths) = self.front_end.on(place, signals, None, None)?;
        self.encoder.encode(&self.parameters, &features, &lengths)
    }

    /// Transcription of signals (16 kHz mono in [-1, 1]), padded to the longest: group them by length.
    pub fn transcribe(&self, signals: &[&[f32]]) -> Result<Vec<Hypothesis>> {
        self.transcribe_observed(signals, None)
    }

    /// The same; `observer` sees the outputs behind each token, for confidences.
    pub fn transcribe_observed(&self, signals: &[&[f32]], observer: Option<TokenObserver>) -> Result<Vec<Hypothesis>> {
        let parts = self.in_parts(0..signals.len(), &|part| self.encode(&signals[part]))?;
        self.decode_parts(parts, observer)
    }

    /// Transcription of signals as [`TdtModel::transcribe`] gives it, and the loss of each as [`TdtModel::evaluate_loss`]
    /// gives it (natural logarithm, not divided by the number of tokens), from one pass of the encoder. `targets`: token
    /// ids of what was said in each signal.
    ///
    /// # Errors
    /// Where the numbers of targets and signals differ, or a target has a token outside the vocabulary.
    pub fn transcribe_with_losses(
        &self,
        signals: &[&[f32]],
        targets: &[Vec<u32>],
    ) -> Result<(Vec<Hypothesis>, Vec<f64>)> {
        if signals.len() != targets.len() {
            return Err(Error::Input(format!(
                "there are {} signals and {} token lists",
                signals.len(),
                targets.len()
            )));
        }
        let parts = self.in_parts(0..signals.len(), &|part| {
            let (encoded, lengths) = self.encode(&signals[part.clone()])?;
            let losses = self.losses_of_encoded(&encoded, &lengths, &targets[part])?;
            Ok((encoded, lengths, losses))
        })?;
        let mut all_losses = Vec::with_capacity(signals.len());
        let encoded = parts.into_iter().map(|(encoded, lengths, losses)| {
            all_losses.extend(losses);
            (encoded, lengths)
        });
        let encoded = encoded.collect();
        Ok((self.decode_parts(encoded, None)?, all_losses))
    }

    /// What `compute` gives for utterances: for all together, or where the device has no memory left for that, for halves of
    /// them, down to one.
    fn in_parts<T>(&self, utterances: Range<usize>, compute: &dyn Fn(Range<usize>) -> Result<T>) -> Result<Vec<T>> {
        if utterances.is_empty() {
            return Ok(Vec::new());
        }
        match compute(utterances.clone()) {
            Err(error) if utterances.len() > 1 && is_out_of_memory(&error) => {
                release_memory(self.parameters.device())?;
                let middle = utterances.start + utterances.len() / 2;
                let mut parts = self.in_parts(utterances.start..middle, compute)?;
                parts.extend(self.in_parts(middle..utterances.end, compute)?);
                Ok(parts)
            }
            outcome => Ok(vec![outcome?]),
        }
    }

    /// [`TdtModel::decode_encoded`] of the parts of a batch, one after the other.
    fn decode_parts(
        &self,
        parts: Vec<(Tensor, Vec<usize>)>,
        mut observer: Option<TokenObserver>,
    ) -> Result<Vec<Hypothesis>> {
        let mut all = Vec::new();
        for (encoded, lengths) in parts {
            let before = all.len();
            let mut of_part = observer.as_mut().map(|observer| {
                move |utterance: usize, token: u32, logits: &[f32]| observer(before + utterance, token, logits)
            });
            let of_part = of_part.as_mut().map(|of_part| -> TokenObserver { of_part });
            all.extend(self.decode_encoded(&encoded, &lengths, of_part)?);
        }
        Ok(all)
    }

    /// The best hypothesis of each utterance, from the output of the encoder.
    pub(crate) fn decode_encoded(
        &self,
        encoded: &Tensor,
        lengths: &[usize],
        observer: Option<TokenObserver>,
    ) -> Result<Vec<Hypothesis>> {
        if self.decoding.beam > 1 {
            let found = self.beam_search(encoded, lengths, observer)?;
            return Ok(found
                .into_iter()
                .map(|best| best.into_iter().next().unwrap_or_default())
                .collect());
        }
        let (networks, fusion) = (self.networks(), &self.decoding.fusion);
        let mut hypotheses = decode_greedy_observed(&networks, fusion, self.steps(), encoded, lengths, observer)?;
        self.add_texts(&mut hypotheses)?;
        Ok(hypotheses)
    }

    /// The hypotheses of beam search for each signal, the best first.
    pub fn transcribe_n_best(&self, signals: &[&[f32]]) -> Result<Vec<Vec<Hypothesis>>> {
        if signals.is_empty() {
            return Ok(Vec::new());
        }
        let (encoded, lengths) = self.encode(signals)?;
        self.beam_search(&encoded, &lengths, None)
    }

    fn beam_search(
        &self,
        encoded: &Tensor,
        lengths: &[usize],
        observer: Option<TokenObserver>,
    ) -> Result<Vec<Vec<Hypothesis>>> {
        let (networks, steps) = (self.networks(), self.steps());
        let mut found = decode_beam(&networks, &self.decoding, steps, encoded, lengths, observer)?;
        for hypotheses in &mut found {
            self.add_texts(hypotheses)?;
        }
        Ok(found)
    }

    fn networks(&self) -> Networks<'_> {
        Networks {
            parameters: &self.parameters,
            prediction: &self.prediction,
            joint: &self.joint,
        }
    }

    /// The model's durations, and its limit of tokens on one frame.
    fn steps(&self) -> Steps<'_> {
        Steps {
            durations: &self.config.loss.durations,
            max_symbols: self.config.decoding.max_symbols,
        }
    }

    fn add_texts(&self, hypotheses: &mut [Hypothesis]) -> Result<()> {
        if let Some(tokenizer) = &self.tokenizer {
            for hypothesis in hypotheses {
                hypothesis.text = tokenizer.decode(&hypothesis.ids)?;
            }
        }
        Ok(())
    }

    fn loss_settings(&self, rnnt: bool) -> TdtLoss {
        let loss = &self.config.loss;
        TdtLoss {
            durations: loss.durations.clone(),
            sigma: loss.sigma,
            fastemit: loss.fastemit_lambda,
            clamp: loss.clamp,
            rnnt,
        }
    }

    /// The result of a batch, and the factor of each utterance's loss in it.
    fn output(
        &self,
        batch: &MicroBatch,
        part: Option<PartOf>,
        encoded: &Encoded,
        losses: Vec<f64>,
    ) -> Result<(MicroBatchOutput, Vec<f64>)> {
        let (reduction, target_lengths) = (self.config.loss.reduction, batch.tokens.iter().map(Vec::len));
        let target_lengths: Vec<usize> = target_lengths.collect();
        let factors = match part {
            Some(part) => factors_in(reduction, &target_lengths, part.utterances, part.tokens),
            None => reduction_factors(reduction, &target_lengths),
        };
        let loss = losses.iter().zip(&factors).map(|(loss, factor)| loss * factor).sum();
        let (utterances, frames, _) = encoded.frames.dims3()?;
        let output = MicroBatchOutput {
            loss,
            losses,
            ctc_loss: None,
            frames: encoded.lengths.clone(),
            padded_frames: utterances * frames,
            tokens: target_lengths.iter().sum(),
            flops_left_out: 0.0,
        };
        Ok((output, factors))
    }
}

fn check(batch: &MicroBatch) -> Result<()> {
    if batch.signals.is_empty() || batch.signals.len() != batch.tokens.len() {
        return Err(Error::Input(format!(
            "a micro-batch has {} signals and {} token lists",
            batch.signals.len(),
            batch.tokens.len()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod emulated_tests;
#[cfg(test)]
mod launch_count_tests;
#[cfg(test)]
mod tests;
