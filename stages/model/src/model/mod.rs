//! The whole model: signals and tokens in, loss and gradients out, or text out.

pub mod chunks;
mod stream;

use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use flow_kernels::Noise;
use flow_kernels::device::{is_out_of_memory, release_memory};
use flow_kernels::elementwise::add_in_place;

use crate::alignment::{AlignedTokens, Costs, WordTokens};
use crate::checkpoint::{ADAPTER_CONFIG, OpenModel, StoredModel, broken, write_adapter, write_model_folder};
use crate::config::{AttentionContext, ChunkContext, EncoderConfig, ModelConfig, PromptConfig, TransducerConfig};
use crate::decoding::{DecodingSettings, Hypothesis, TokenObserver, check_lengths};
use crate::encoder::Encoder;
use crate::features::LogMel;
use crate::heads::{self, Head, HeadInput, HeadKind, HeadPass};
use crate::layers::convolution::BatchNorm;
use crate::lora::{self, LoraConfig, Targets};
use crate::loss::divisors_in;
use crate::parameter_groups::{ParameterGroup, PassObserver};
use crate::parameters::{BufferUpdates, Gradients, Mode, Parameter, ParameterBuilder, Parameters};
use crate::prompt::PromptKernel;
use crate::timestamps::{TimeStamps, time_stamps};
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
    /// Negative log likelihood of each utterance by the model's first head: zero for one too short to have a frame, infinite
    /// for one whose target a transducer cannot align; zero for one that CTC cannot, which then has no gradient, as in NeMo.
    pub losses: Vec<f64>,
    /// CTC loss after its own reduction, where the model has a CTC head beside a transducer and trains it. The gradient is then
    /// that of `(1 - weight) * loss + weight * ctc_loss`.
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

/// A Parakeet model: front end, FastConformer encoder, and one or two heads.
pub struct TdtModel {
    /// Sizes and dropout rates are fixed when the model is made; the settings of loss, decoding and SpecAugment may be
    /// changed at any time.
    pub config: ModelConfig,
    pub parameters: Parameters,
    pub tokenizer: Option<Tokenizer>,
    /// Decoding settings; greedy by default.
    pub decoding: DecodingSettings,
    /// The number of the language prompt; none where the model has no prompt, or is to run without.
    pub prompt: Option<usize>,
    front_end: LogMel,
    encoder: Encoder,
    prompt_kernel: Option<PromptKernel>,
    /// The first one is the main one.
    heads: Vec<Box<dyn Head>>,
    unused: Vec<String>,
    lora: Option<LoraConfig>,
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
        Self::from_open_storing(opened, config, dtype, dtype, device)
    }

    /// The same with the matrices of linear layers stored in another data type than `dtype`, as each is read.
    pub fn from_open_storing(
        opened: OpenModel,
        config: ModelConfig,
        dtype: DType,
        matrices: DType,
        device: &Device,
    ) -> Result<Self> {
        Self::from_entries(opened, config, (dtype, matrices, Precision::F32), device)
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
            if tokenizer.vocabulary_size() != config.vocab_size {
                return Err(Error::Config(format!(
                    "the model has {} tokens, but the tokenizer has {} pieces",
                    config.vocab_size,
                    tokenizer.vocabulary_size()
                )));
            }
            if config.labels.is_empty() {
                config.labels = tokenizer.pieces();
            }
        }
        let front_end = LogMel::new(&config.preprocessor, &mut builder)?;
        let encoder = Encoder::new(&config.encoder, "encoder", &mut builder)?;
        let prompt_kernel = PromptKernel::of_model(&config, &mut builder)?;
        let heads = heads::of_model(&config, &mut builder)?;
        if let Some(targets) = builder.lora_targets() {
            targets.check()?;
        }
        let (parameters, unused) = builder.finish();
        if let Some(name) = unused.iter().find(|name| name.contains(".adapter_layer.")) {
            return Err(Error::Config(format!(
                "tensor `{name}` is of an adapter of NeMo's, which is not supported: without it the model would be another"
            )));
        }
        Ok(TdtModel {
            prompt: config.prompt.as_ref().and_then(PromptConfig::default_prompt),
            prompt_kernel,
            config,
            parameters,
            tokenizer,
            decoding: DecodingSettings::default(),
            front_end,
            encoder,
            heads,
            unused,
            lora: None,
        })
    }

    /// The model with LoRA's matrices beside the weights of its targets: those among `matrices` (by the names that they have in
    /// [`TdtModel::parameters`]), the others made from `seed`, with which the model computes what it computed before. They alone
    /// are trainable from now on.
    ///
    /// # Errors
    /// Where a target matches no linear layer, a matrix has another shape than the configuration says, or belongs to no target.
    pub fn with_lora(self, lora: LoraConfig, matrices: Vec<(String, Tensor)>, seed: u64) -> Result<Self> {
        if self.lora.is_some() {
            return Err(Error::Input("the model has LoRA's matrices already".into()));
        }
        let given: Vec<String> = matrices.iter().map(|(name, _)| name.clone()).collect();
        let matrix_dtype = self.parameters.matrix_dtype();
        let mut model = self.rebuilt_with(&self.parameters, matrix_dtype, Some((&lora, seed)), matrices)?;
        if let Some(name) = model.unused.iter().find(|name| given.contains(name)) {
            return Err(Error::Input(format!("LoRA: `{name}` belongs to no target")));
        }
        let base: Vec<_> = (model.parameters.iter())
            .filter(|(_, parameter)| lora::module_of(&parameter.name).is_none())
            .map(|(id, _)| id)
            .collect();
        for id in base {
            model.parameters.set_trainable(id, false);
        }
        Ok(model)
    }

    /// What LoRA is for in this model, if anything.
    pub fn lora(&self) -> Option<&LoraConfig> {
        self.lora.as_ref()
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
        let lora = self.lora.as_ref().map(|lora| (lora, 0));
        self.rebuilt_with(parameters, matrices, lora, Vec::new())
    }

    /// The model of `parameters` and `more`, with LoRA as said. What is frozen stays frozen.
    fn rebuilt_with(
        &self,
        parameters: &Parameters,
        matrices: DType,
        lora: Option<(&LoraConfig, u64)>,
        more: Vec<(String, Tensor)>,
    ) -> Result<Self> {
        self.parameters.check_f32("stored in another type")?;
        let named = |(_, parameter): (_, &Parameter)| (parameter.name.clone(), parameter.tensor.clone());
        let tensors: Vec<(String, Tensor)> = parameters.iter().map(named).chain(more).collect();
        let (dtype, device) = (parameters.dtype(), parameters.device().clone());
        let tokenizer = self
            .tokenizer
            .as_ref()
            .map(|tokenizer| Tokenizer::from_bytes(tokenizer.bytes()));
        let mut builder = ParameterBuilder::from_tensors(dtype, device, tensors).store_matrices_as(matrices);
        if let Some((lora, seed)) = lora {
            builder = builder.with_lora(Targets::new(lora.clone())?, seed);
        }
        let mut model = Self::build(self.config.clone(), tokenizer.transpose()?, builder)?;
        model.lora = lora.map(|(lora, _)| lora.clone());
        for (_, parameter) in parameters.iter() {
            if let Some(id) = model.parameters.id(&parameter.name) {
                model.parameters.set_trainable(id, parameter.trainable);
            }
        }
        model.set_recompute(self.encoder.recompute);
        model.set_batch_norm(self.encoder.batch_norm);
        model.encoder.context = self.encoder.context;
        model.prompt = self.prompt;
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

    /// Sets the language that is spoken, for models with a language prompt; none for `auto`, by which the model finds it out.
    ///
    /// # Errors
    /// Where the model has no prompt, or none for this language.
    pub fn set_language(&mut self, language: Option<&str>) -> Result<()> {
        self.prompt = self.prompt_of(language)?;
        Ok(())
    }

    /// The number of a language's prompt; without a language that of `auto`, if there is one.
    ///
    /// # Errors
    /// As [`TdtModel::set_language`].
    pub fn prompt_of(&self, language: Option<&str>) -> Result<Option<usize>> {
        match (&self.config.prompt, language) {
            (Some(prompt), Some(language)) => prompt.find(language).map(Some),
            (Some(prompt), None) => Ok(prompt.default_prompt()),
            (None, None) => Ok(None),
            (None, Some(language)) => Err(Error::Input(format!(
                "`language` is `{language}`, but the model has no language prompt"
            ))),
        }
    }

    /// Frames (rows, d_model) of the encoder as the heads get them.
    fn prompted(&self, frames: &Tensor, prompt: Option<usize>) -> Result<Tensor> {
        match (&self.prompt_kernel, prompt) {
            (Some(kernel), Some(prompt)) => kernel.forward(&self.parameters, frames, prompt),
            _ => Ok(frames.clone()),
        }
    }

    /// Sets in which of the contexts that the model was trained with whole recordings are encoded; the first one is the default.
    ///
    /// # Errors
    /// Where it is none of them.
    pub fn set_context(&mut self, context: ChunkContext) -> Result<()> {
        self.config.encoder.check_context(context)?;
        self.encoder.context = AttentionContext::Chunks(context).into();
        Ok(())
    }

    /// Sets which statistics batch normalisation uses in training.
    pub fn set_batch_norm(&mut self, batch_norm: BatchNorm) {
        self.encoder.batch_norm = batch_norm;
    }

    /// Writes a model folder. Every file is written under a temporary name and renamed, the weights last. LoRA's matrices are
    /// beside the weights, in the files of an adapter, and are added to them when the folder is opened.
    pub fn save(&self, folder: &Path) -> Result<()> {
        self.parameters.check_f32("written")?;
        let all = self.parameters.iter();
        let all = all.map(|(_, parameter)| (parameter.name.as_str(), &parameter.tensor));
        let (matrices, tensors): (Vec<_>, Vec<(&str, &Tensor)>) =
            all.partition(|(name, _)| lora::module_of(name).is_some());
        if let Some(lora) = &self.lora {
            let rank = |name: &str| self.parameters.id(name).map_or(2, |id| self.parameters.get(id).rank());
            let matrices = matrices.into_iter().map(|(name, matrix)| {
                let module = lora::module_of(name).unwrap_or(name);
                (name, matrix, rank(&format!("{module}.weight")))
            });
            write_adapter(folder, lora, matrices)?;
        } else if let Err(error) = std::fs::remove_file(folder.join(ADAPTER_CONFIG))
            && error.kind() != std::io::ErrorKind::NotFound
        {
            // One of another model would be added to this one.
            return Err(broken(&folder.join(ADAPTER_CONFIG), error));
        }
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
        if self.config.prompt.is_some() {
            return Err(Error::Input(
                "models with a language prompt are not trained here".into(),
            ));
        }
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
        let encoded = self.encode_for_training(batch, options, (&of_whole, &noise), &mut dropout, observer)?;
        // Heads may have a group in common.
        let mut read: Vec<ParameterGroup> = Vec::new();
        let mut before = |group: ParameterGroup| {
            if !read.contains(&group) {
                read.push(group);
                observer.before_forward(group, &self.parameters);
            }
        };
        let mut passes: Vec<Box<dyn HeadPass + '_>> = Vec::with_capacity(self.heads.len());
        let mut output = self.output(batch, options.part, &encoded, Vec::new())?;
        for head in &self.heads {
            let weight = self.head_weight(head.as_ref());
            // The main head has a loss whatever its share is.
            if weight == 0.0 && !passes.is_empty() {
                continue;
            }
            let divisors = self.divisors(head.as_ref(), batch, options.part);
            let factors: Vec<f64> = if passes.is_empty() {
                let factors = divisors.iter().map(|divisor| 1.0 / divisor);
                factors.map(|factor| factor * options.scale * weight).collect()
            } else {
                divisors
                    .iter()
                    .map(|divisor| weight * options.scale / divisor)
                    .collect()
            };
            let input = HeadInput {
                frames: &encoded.frames,
                lengths: &encoded.lengths,
                targets: &batch.tokens,
                factors: &factors,
                choices: Some(&of_whole),
            };
            let mode = Mode::Train(&mut dropout);
            let pass = head.forward(&self.parameters, &self.config, &input, mode, &mut before)?;
            if passes.is_empty() {
                output = self.output(batch, options.part, &encoded, pass.losses().to_vec())?;
                if !output.loss.is_finite() {
                    return Ok(output);
                }
                output.flops_left_out = pass.flops_left_out();
            } else {
                output.ctc_loss = Some(reduced_by(pass.losses(), &divisors));
            }
            passes.push(pass);
        }
        let mut d_encoded: Option<Tensor> = None;
        for pass in &mut passes {
            let d_frames = pass.backward_outputs(&self.parameters, encoded.saved.is_none(), gradients)?;
            match (&d_encoded, d_frames) {
                (Some(sum), Some(d_frames)) => add_in_place(sum, &d_frames)?,
                (None, d_frames) => d_encoded = d_frames,
                (Some(_), None) => {}
            }
        }
        observer.gradients_complete(ParameterGroup::Heads, gradients, &self.parameters);
        for pass in passes {
            pass.backward_rest(&self.parameters, gradients, observer)?;
        }
        if let (Some(saved), Some(d_encoded)) = (encoded.saved, d_encoded) {
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
        (of_whole, noise): (&Noise, &Noise),
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
        let context = match self.encoder.drawn_context(&mut of_whole.derive("attention context")) {
            Some(context) => AttentionContext::Chunks(context).into(),
            None => self.encoder.context,
        };
        let (mode, features) = (Mode::Train(dropout), (&tensor, &lengths[..]));
        let (frames, lengths, saved, updates) =
            self.encoder
                .forward_observed(&self.parameters, features, context, mode, observer)?;
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
        self.output(batch, None, &encoded, losses)
    }

    /// The loss of each utterance by the main head in evaluation mode. `frames`: (batch, frames, d_model) as
    /// [`TdtModel::encode`] gives them, of which `lengths` are valid; `targets`: token ids of each utterance.
    fn losses_of_encoded(&self, frames: &Tensor, lengths: &[usize], targets: &[Vec<u32>]) -> Result<Vec<f64>> {
        let input = HeadInput {
            frames,
            lengths,
            targets,
            factors: &vec![1.0; targets.len()],
            choices: None,
        };
        let pass = self.heads[0].forward(&self.parameters, &self.config, &input, Mode::Evaluate, &mut |_| ())?;
        Ok(pass.losses().to_vec())
    }

    /// Encoder output in evaluation mode, (batch, frames, d_model), and valid frames per signal. Signals are 16 kHz
    /// mono in [-1, 1], padded to the longest.
    pub fn encode(&self, signals: &[&[f32]]) -> Result<(Tensor, Vec<usize>)> {
        let place = (self.parameters.dtype(), self.parameters.device());
        let (features, lengths) = self.front_end.on(place, signals, None, None)?;
        let (encoded, lengths) = self.encoder.encode(&self.parameters, &features, &lengths)?;
        let shape = encoded.dims3()?;
        let encoded = self.prompted(&encoded.flatten_to(1)?, self.prompt)?;
        Ok((encoded.reshape(shape)?, lengths))
    }

    /// Transcription of signals (16 kHz mono in [-1, 1]), padded to the longest: group them by length.
    pub fn transcribe(&self, signals: &[&[f32]]) -> Result<Vec<Hypothesis>> {
        self.transcribe_observed(signals, None)
    }

    /// The same; `observer` sees the outputs behind each token, for confidences.
    pub fn transcribe_observed(&self, signals: &[&[f32]], observer: Option<TokenObserver>) -> Result<Vec<Hypothesis>> {
        self.transcribe_with(signals, &self.decoding, observer)
    }

    /// The same with other decoding settings.
    ///
    /// # Errors
    /// Where the model cannot be decoded so.
    pub fn transcribe_with(
        &self,
        signals: &[&[f32]],
        settings: &DecodingSettings,
        observer: Option<TokenObserver>,
    ) -> Result<Vec<Hypothesis>> {
        let parts = self.in_parts(0..signals.len(), &|part| self.encode(&signals[part]))?;
        self.decode_parts(parts, settings, observer)
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
        Ok((self.decode_parts(encoded, &self.decoding, None)?, all_losses))
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
        settings: &DecodingSettings,
        mut observer: Option<TokenObserver>,
    ) -> Result<Vec<Hypothesis>> {
        let mut all = Vec::new();
        for (encoded, lengths) in parts {
            let before = all.len();
            let mut of_part = observer.as_mut().map(|observer| {
                move |utterance: usize, token: u32, logits: &[f32]| observer(before + utterance, token, logits)
            });
            let of_part = of_part.as_mut().map(|of_part| -> TokenObserver { of_part });
            all.extend(self.decode_encoded(&encoded, &lengths, settings, of_part)?);
        }
        Ok(all)
    }

    /// The best hypothesis of each utterance, from the output of the encoder: frames (batch, frames, d_model), of which so many
    /// are valid.
    ///
    /// # Errors
    /// Where lengths do not fit, or the settings name a head that the model does not have.
    pub fn decode_encoded(
        &self,
        encoded: &Tensor,
        lengths: &[usize],
        settings: &DecodingSettings,
        observer: Option<TokenObserver>,
    ) -> Result<Vec<Hypothesis>> {
        if settings.beam > 1 {
            let found = self.beam_search(encoded, lengths, settings, observer)?;
            return Ok(found
                .into_iter()
                .map(|best| best.into_iter().next().unwrap_or_default())
                .collect());
        }
        let (batch, padded, _) = encoded.dims3()?;
        check_lengths(lengths, batch, padded)?;
        let head = self.head_of(settings)?;
        if lengths.iter().all(|&length| length == 0) {
            return Ok(vec![Hypothesis::default(); batch]);
        }
        let mut state = head.start(&self.parameters, settings, batch)?;
        let encoded = (encoded, lengths);
        let mut hypotheses = head.search(&self.parameters, &self.config, settings, encoded, &mut state, observer)?;
        self.add_texts(&mut hypotheses)?;
        Ok(hypotheses)
    }

    /// The hypotheses of beam search for each signal, the best first.
    pub fn transcribe_n_best(&self, signals: &[&[f32]]) -> Result<Vec<Vec<Hypothesis>>> {
        if signals.is_empty() {
            return Ok(Vec::new());
        }
        let (encoded, lengths) = self.encode(signals)?;
        self.beam_search(&encoded, &lengths, &self.decoding, None)
    }

    fn beam_search(
        &self,
        encoded: &Tensor,
        lengths: &[usize],
        settings: &DecodingSettings,
        observer: Option<TokenObserver>,
    ) -> Result<Vec<Vec<Hypothesis>>> {
        let (head, encoded) = (self.head_of(settings)?, (encoded, lengths));
        let mut found = head.n_best(&self.parameters, &self.config, settings, encoded, observer)?;
        for hypotheses in &mut found {
            self.add_texts(hypotheses)?;
        }
        Ok(found)
    }

    /// The head that decodes.
    ///
    /// # Errors
    /// Where the settings name one that the model does not have.
    fn decoding_head(&self) -> Result<&dyn Head> {
        self.head_of(&self.decoding)
    }

    fn head_of(&self, settings: &DecodingSettings) -> Result<&dyn Head> {
        if let Some(kind) = settings.head {
            self.config.check_decoder(kind)?;
        }
        let mut heads = self.heads.iter().map(Box::as_ref);
        let head = heads.find(|head| settings.head.is_none_or(|kind| head.kind() == kind));
        head.ok_or_else(|| Error::Input("the model has no head".into()))
    }

    /// The best path of a known text through the encoded frames of one signal, (frames, d_model): by a head of the model, or if
    /// none is named by CTC where there is one, and else by the transducer.
    ///
    /// # Errors
    /// As those of the searches in [`crate::alignment`], and where the model has no such head.
    pub fn align(
        &self,
        frames: &Tensor,
        text: &WordTokens,
        costs: Costs,
        head: Option<HeadKind>,
    ) -> Result<AlignedTokens> {
        let kind = head.unwrap_or(match self.config.ctc {
            Some(_) => HeadKind::Ctc,
            None => HeadKind::Transducer,
        });
        let head = self.heads.iter().find(|head| head.kind() == kind);
        let head = head.ok_or_else(|| {
            Error::Input(format!(
                "the model has no head `{}`: it is of {}",
                kind.name(),
                self.config.heads()
            ))
        })?;
        head.align(&self.parameters, &self.config, frames, text, costs)
    }

    /// Sets how the model is decoded.
    ///
    /// # Errors
    /// Where it cannot be: it has no such head, or the head no such search.
    pub fn set_decoding(&mut self, settings: DecodingSettings) -> Result<()> {
        let before = std::mem::replace(&mut self.decoding, settings);
        let possible = self.decoding_head().and_then(|head| head.check(&self.decoding));
        if possible.is_err() {
            self.decoding = before;
        }
        possible
    }

    /// Time stamps of a hypothesis, by NeMo's rules for the head that found it. (For CTC, NeMo's own stamps place each token in the gap
    /// before it; these are where it is.)
    ///
    /// # Errors
    /// As [`time_stamps`], and where there is no tokenizer or the settings name a head that the model does not have.
    pub fn time_stamps(&self, hypothesis: &Hypothesis) -> Result<TimeStamps> {
        let Some(tokenizer) = &self.tokenizer else {
            return Err(Error::Tokenizer("the model holds none".into()));
        };
        let rnnt = self.config.transducer.as_ref().is_some_and(TransducerConfig::is_rnnt);
        let marks_last = rnnt && self.decoding_head()?.kind() == HeadKind::Transducer;
        time_stamps(tokenizer, hypothesis, !marks_last)
    }

    fn add_texts(&self, hypotheses: &mut [Hypothesis]) -> Result<()> {
        if let Some(tokenizer) = &self.tokenizer {
            for hypothesis in hypotheses {
                hypothesis.text = tokenizer.decode(&hypothesis.ids)?;
            }
        }
        Ok(())
    }

    /// The share of a head's loss in training.
    fn head_weight(&self, head: &dyn Head) -> f64 {
        let ctc = self.config.ctc.as_ref().map(|ctc| ctc.weight);
        match (head.kind(), ctc) {
            (HeadKind::Ctc, Some(weight)) => weight,
            (HeadKind::Transducer, Some(weight)) => 1.0 - weight,
            (_, None) => 1.0,
        }
    }

    /// What the losses of a head's utterances are divided by.
    fn divisors(&self, head: &dyn Head, batch: &MicroBatch, part: Option<PartOf>) -> Vec<f64> {
        let lengths: Vec<usize> = batch.tokens.iter().map(Vec::len).collect();
        let (utterances, tokens) = part.map_or((lengths.len(), lengths.iter().sum()), |part| {
            (part.utterances, part.tokens)
        });
        divisors_in(head.reduction(&self.config), &lengths, utterances, tokens)
    }

    /// The result of a batch.
    fn output(
        &self,
        batch: &MicroBatch,
        part: Option<PartOf>,
        encoded: &Encoded,
        losses: Vec<f64>,
    ) -> Result<MicroBatchOutput> {
        let divisors = self.divisors(self.heads[0].as_ref(), batch, part);
        let loss = losses
            .iter()
            .zip(&divisors)
            .map(|(loss, divisor)| loss * (1.0 / divisor))
            .sum();
        let (utterances, frames, _) = encoded.frames.dims3()?;
        Ok(MicroBatchOutput {
            loss,
            losses,
            ctc_loss: None,
            frames: encoded.lengths.clone(),
            padded_frames: utterances * frames,
            tokens: batch.tokens.iter().map(Vec::len).sum(),
            flops_left_out: 0.0,
        })
    }
}

/// Losses divided by these: the sum is divided once where all divisors are one.
fn reduced_by(losses: &[f64], divisors: &[f64]) -> f64 {
    match divisors.first() {
        Some(first) if divisors.iter().all(|divisor| divisor == first) => losses.iter().sum::<f64>() / first,
        _ => losses.iter().zip(divisors).map(|(loss, divisor)| loss / divisor).sum(),
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
mod lora_tests;
#[cfg(test)]
mod tests;
