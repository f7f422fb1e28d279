//! The whole model: signals and tokens in, loss and gradients out, or text out.

pub mod chunks;
mod decode;
mod stream;
mod train;

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use crate::checkpoint::{
    ADAPTER_CONFIG, OpenModel, StoredModel, huggingface_module, write_adapter, write_model_folder,
};
use crate::config::{AttentionContext, ChunkContext, EncoderConfig, ModelConfig, PromptConfig};
use crate::decoding::DecodingSettings;
use crate::encoder::Encoder;
use crate::heads::{self, Head};
use crate::parameter_groups::ParameterGroup;
use crate::prompt::PromptKernel;
use crate::tokenizer::Tokenizer;
use crate::{Error, Precision, Result};
use flow_nn::features::LogMel;
use flow_nn::layers::convolution::BatchNorm;
use flow_nn::lora::{self, LoraConfig, Targets};
use flow_nn::parameters::{Parameter, ParameterBuilder, Parameters};
use flow_nn::tensor_files::broken;

pub use train::{MicroBatch, MicroBatchOutput, PartOf, TrainOptions};

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
        Self::load_in(path, (dtype, matrices, Precision::F32), device, false)
    }

    /// A model for decoding in f32, with its matrices stored in a data type, or with products of its encoder's layers and its joint
    /// network in low precision, on the CPU; their weights are then kept in that precision alone.
    ///
    /// On the CPU such models share the tensors that they read from the same places of the same files: with adapters of one model
    /// in memory, the model's tensors are there once, beside those that an adapter changes.
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
        Self::load_in(path, (DType::F32, matrices, precision), device, true)
    }

    fn load_in(path: &Path, numbers: (DType, DType, Precision), device: &Device, shares: bool) -> Result<Self> {
        let opened = OpenModel::open(path)?;
        let config = ModelConfig::from_nemo_yaml(&opened.config_yaml).map_err(|error| broken(path, error))?;
        Self::from_entries(opened, config, numbers, device, shares).map_err(|error| match error {
            Error::File { .. } | Error::Io { .. } => error,
            other => broken(path, other),
        })
    }

    /// An opened model under a configuration, which is its own or one with other settings (dropout rates, for
    /// instance). Its tensors are read one by one, the matrices of linear layers stored in a data type of their own.
    pub fn from_open(
        opened: OpenModel,
        config: ModelConfig,
        dtype: DType,
        matrices: DType,
        device: &Device,
    ) -> Result<Self> {
        Self::from_entries(opened, config, (dtype, matrices, Precision::F32), device, false)
    }

    /// An opened model whose configuration may have fewer layers, computed in the first number type, with matrices stored in the second
    /// one and products in a precision. It may share tensors with others.
    pub(crate) fn from_entries(
        opened: OpenModel,
        config: ModelConfig,
        (dtype, matrices, precision): (DType, DType, Precision),
        device: &Device,
        shares: bool,
    ) -> Result<Self> {
        let tokenizer = opened.tokenizer.as_deref().map(Tokenizer::from_bytes).transpose()?;
        let builder = ParameterBuilder::from_entries(dtype, device.clone(), opened.tensors);
        let builder = builder.store_matrices_as(matrices).compute_products_in(precision);
        let builder = if shares { builder.share_tensors() } else { builder };
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
        let encoder = encoder.with_adapters(&config.adapters, "encoder", &mut builder)?;
        let prompt_kernel = PromptKernel::of_model(&config, &mut builder)?;
        let heads = heads::of_model(&config, &mut builder)?;
        if let Some(targets) = builder.lora_targets() {
            targets.check()?;
        }
        let (mut parameters, unused) = builder.finish();
        // A model may have been opened with fewer layers than it has.
        let of_layers = |name: &str| match ParameterGroup::from_name(name) {
            Ok(ParameterGroup::Layer(number)) => number < config.encoder.n_layers,
            _ => true,
        };
        let of_adapter = |name: &&String| name.contains(".adapter_layer.") && of_layers(name);
        if let Some(name) = unused.iter().find(of_adapter) {
            return Err(Error::Config(format!(
                "tensor `{name}` is of an adapter that `adapters` in the configuration does not describe: without it the model \
                 would be another"
            )));
        }
        for adapter in config.adapters.iter().filter(|adapter| !adapter.enabled) {
            let part = format!(".adapter_layer.{}.", adapter.name);
            let ids = parameters
                .iter()
                .filter(|(_, parameter)| parameter.name.contains(&part));
            for id in ids.map(|(id, _)| id).collect::<Vec<_>>() {
                parameters.set_trainable(id, false);
            }
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
            builder = builder.with_lora(Targets::new(lora.clone(), huggingface_module)?, seed);
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

    /// The prompts of utterances where those of a batch are given, one for each, or else the model's own; empty for frames as the
    /// encoder gives them.
    fn prompts_of(&self, given: &[usize], utterances: usize) -> Result<Vec<usize>> {
        if given.is_empty() {
            let own = self.prompt.filter(|_| self.prompt_kernel.is_some());
            return Ok(own.map_or(Vec::new(), |prompt| vec![prompt; utterances]));
        }
        if self.prompt_kernel.is_none() {
            return Err(Error::Input(
                "a micro-batch has language prompts, and the model has none".into(),
            ));
        }
        if given.len() != utterances {
            let given = given.len();
            return Err(Error::Input(format!(
                "{given} prompts are not those of {utterances} utterances"
            )));
        }
        Ok(given.to_vec())
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
}

#[cfg(test)]
mod adapter_tests;
#[cfg(test)]
mod emulated_tests;
#[cfg(test)]
mod launch_count_tests;
#[cfg(test)]
mod lora_tests;
#[cfg(test)]
mod tests;
