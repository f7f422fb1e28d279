//! The settings of `training.train`.

use std::collections::BTreeMap;
use std::path::Path;

use flow_model::ModelConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use flow_sampling::plan::Balance;

use crate::checkpoint::Identity;
use crate::error::TrainingError;
use crate::optimizer::AdamWConfig;
use crate::schedule::{Recipe, Schedule};
use crate::trainer::TrainerConfig;

/// Trains a TDT model on the micro-batches that come in, step by step, and keeps checkpoints.
///
/// # What it does
///
/// Input 0 is the stream of `sampling.load`: partition `step-000000012` holds the micro-batches of
/// optimizer step 12. Input 1 is read whole: validation rows, on a sample of which the model is evaluated
/// while it trains. Two more inputs may follow, in any order: the train rows, whose digest stands in each
/// checkpoint, so that changed data is noticed; and the port `members` of an `audio.probe`, in which the audio
/// of the validation rows is looked up where they say only `tar_member_name`.
///
/// Training is a log of checkpoints and not a cached artifact: where it stands is read from the folder
/// `checkpoints`, and deleting the state directory loses nothing. Output `model` is one row once `max_steps`
/// are done: `path` of the last checkpoint, `step`, and the model's `digest`.
///
/// # Example
///
/// ```yaml
/// train:
///   uses: training.train
///   from: {batches: load, validation: manifest/split.val, train: manifest/split.train, members: manifest/probe.members}
///   with:
///     checkpoints: work/mini/checkpoints
///     tokenizer: configs/tokenizers/mini.model
///     max_steps: 2000
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TrainSettings {
    /// Folder that receives the checkpoints and `metrics.jsonl`. Locked while training runs.
    pub checkpoints: String,
    /// Where the first weights come from: `none` (random, sized by `model`), a `.nemo` archive, or a model
    /// folder such as a checkpoint.
    pub init: String,
    /// Path of a SentencePiece `.model`. Needed with `init: none`; otherwise the archive's own is used.
    pub tokenizer: String,
    /// Sizes of a model that begins from nothing. Not used with any other `init`.
    pub model: ModelSettings,
    /// Folder below which the tars of the validation rows are (the parameter `shards`).
    pub shards: String,

    /// Optimizer steps to do in all.
    pub max_steps: u64,
    /// Peak learning rate while the encoder is frozen; constant after its warm-up.
    pub phase1_lr: f64,
    /// Peak learning rate once everything learns.
    pub phase2_lr: f64,
    /// Steps during which the encoder is frozen; 0 for none.
    pub unfreeze_step: u64,
    /// Warm-up steps of phase 1.
    pub warmup_steps: u64,
    /// Warm-up steps of phase 2.
    pub phase2_warmup: u64,
    /// How the rate of phase 2 goes on after its warm-up.
    pub schedule: ScheduleShape,
    /// Rate at the end of the cosine (and floor of Noam).
    pub min_lr: f64,
    /// Decoupled weight decay. It acts on every parameter that learns, as in NeMo.
    pub weight_decay: f64,
    /// AdamW's two coefficients.
    pub betas: (f64, f64),
    /// Global gradient norm to clip to; 0 for none.
    pub clip: f64,
    /// Share of the old value in a moving average of the weights, taken after every step; 0 for none. With it the
    /// averaged model is what is evaluated, kept and handed on.
    pub average_decay: f64,
    /// Micro-batches per optimizer step on each rank.
    pub grad_accum: u32,
    /// Training replicas, each with a device of its own. Only 1 so far.
    pub ranks: u32,
    /// Seed of the first weights, of dropout and of SpecAugment.
    pub seed: u64,
    /// Mask parts of the features in training, as the model's configuration says.
    pub spec_augment: bool,
    /// Use the model's dropout rates in training.
    pub dropout: bool,
    /// Longest target, in tokens; the rest is cut off.
    pub max_tokens: usize,

    /// Optimizer. Only `adamw` so far.
    pub optimizer: Optimizer,
    /// Number type of weights and activations. Only `f32` so far.
    pub precision: Precision,
    /// Keep only the input of each encoder layer for the backward pass, and compute the layer again there: much less
    /// memory, about a third more time, the same result to the bit. May be changed between runs.
    pub recompute: bool,
    /// Keep the optimizer's state in host memory. Not available yet.
    pub offload: bool,

    /// Steps between checkpoints; one is always written at the end.
    pub checkpoint_every: u64,
    /// Checkpoints to keep; older ones are removed.
    pub keep_checkpoints: usize,
    /// Steps between evaluations; 0 for none.
    pub eval_every: u64,
    /// Validation utterances per language to evaluate on.
    pub eval_samples_per_language: usize,
    /// Steps between lines of `metrics.jsonl`.
    pub log_every: u64,
    /// Steps in one run that may be skipped because a loss or gradient is not finite.
    pub max_bad_steps: u64,

    /// What to do when the newest checkpoint was made with other settings or data: `refuse` names them and
    /// ends, `continue` goes on with the new ones, `restart` begins anew in a folder of its own beside the
    /// old one.
    pub on_change: OnChange,

    /// As given to `sampling.load`; only recorded, so that a change is noticed.
    pub max_batch_seconds: f64,
    /// As given to `sampling.load`; only recorded.
    pub temperature: f64,
    /// As given to `sampling.load`; only recorded.
    pub balance: Balance,
    /// As given to `sampling.load`; only recorded.
    pub token_boundaries: Vec<u32>,
    /// As given to `sampling.load`; only recorded.
    pub speeds: Vec<f64>,
    /// As given to `sampling.load`; only recorded.
    pub max_samples: Option<u64>,
}

impl Default for TrainSettings {
    fn default() -> Self {
        TrainSettings {
            checkpoints: String::new(),
            init: "none".into(),
            tokenizer: String::new(),
            model: ModelSettings::default(),
            shards: String::new(),
            max_steps: 600_000,
            phase1_lr: 3e-4,
            phase2_lr: 1e-4,
            unfreeze_step: 40_000,
            warmup_steps: 5_000,
            phase2_warmup: 3_000,
            schedule: ScheduleShape::Cosine,
            min_lr: 1e-6,
            weight_decay: 1e-3,
            betas: (0.9, 0.98),
            clip: 1.0,
            average_decay: 0.0,
            grad_accum: 1,
            ranks: 1,
            seed: 42,
            spec_augment: true,
            dropout: true,
            max_tokens: 512,
            optimizer: Optimizer::Adamw,
            precision: Precision::F32,
            recompute: false,
            offload: false,
            checkpoint_every: 1_000,
            keep_checkpoints: 3,
            eval_every: 1_000,
            eval_samples_per_language: 10,
            log_every: 10,
            max_bad_steps: 20,
            on_change: OnChange::Refuse,
            max_batch_seconds: 90.0,
            temperature: 0.3,
            balance: Balance::default(),
            token_boundaries: Vec::new(),
            speeds: vec![1.0],
            max_samples: None,
        }
    }
}

/// How the rate of phase 2 goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleShape {
    /// Half a cosine down to `min_lr` at `max_steps`.
    Cosine,
    /// NeMo's `NoamAnnealing`; `phase2_lr` is then its factor (5, say), not a peak.
    Noam,
    Constant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Optimizer {
    Adamw,
    /// Not available yet.
    Adamw8bit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    F32,
    /// Not available yet.
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnChange {
    Refuse,
    Continue,
    Restart,
}

/// Sizes of a model that begins from nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSettings {
    /// Mel bands.
    pub mels: usize,
    /// Width of the encoder.
    pub d_model: usize,
    /// Conformer layers.
    pub layers: usize,
    /// Attention heads; divides `d_model`.
    pub heads: usize,
    /// Channels of the sub-sampling convolutions.
    pub conv_channels: usize,
    /// Width of the depthwise convolution in frames; odd.
    pub conv_kernel: usize,
    /// Width of the feed-forward layers, in multiples of `d_model`.
    pub feed_forward_factor: usize,
    /// Width of the prediction network.
    pub pred_hidden: usize,
    /// LSTM layers of the prediction network.
    pub pred_layers: usize,
    /// Width of the joint network.
    pub joint_hidden: usize,
    /// Dropout of the encoder.
    pub dropout: f64,
    /// Dropout of the prediction and the joint network.
    pub decoder_dropout: f64,
    /// Share of an auxiliary CTC loss on the encoder, as in NeMo's hybrid models; 0 for no such head. It finds
    /// alignments soon where data is scarce, and plays no part in decoding.
    pub ctc_weight: f64,
    /// Durations that a token can have, in encoder frames.
    pub durations: Vec<usize>,
    /// Subtracted from every token log-probability of the loss, which favours long durations.
    pub sigma: f64,
    /// Probability that a batch is trained with the plain RNN-T loss.
    pub omega: f64,
    /// How the losses of a micro-batch become one: `mean_batch`, `mean`, `mean_volume` or `sum`.
    pub reduction: String,
    /// SpecAugment: how many frequency masks.
    pub frequency_masks: usize,
    /// SpecAugment: the widest frequency mask, in mel bands.
    pub frequency_width: usize,
    /// SpecAugment: how many time masks.
    pub time_masks: usize,
    /// SpecAugment: the widest time mask, as a share of the utterance.
    pub time_width: f64,
    /// Tokens per frame at most, in decoding.
    pub max_symbols: usize,
}

impl Default for ModelSettings {
    fn default() -> Self {
        ModelSettings {
            mels: 80,
            d_model: 144,
            layers: 4,
            heads: 4,
            conv_channels: 64,
            conv_kernel: 9,
            feed_forward_factor: 4,
            pred_hidden: 144,
            pred_layers: 1,
            joint_hidden: 256,
            dropout: 0.1,
            decoder_dropout: 0.2,
            ctc_weight: 0.0,
            durations: vec![0, 1, 2, 3, 4],
            sigma: 0.02,
            omega: 0.0,
            reduction: "mean_batch".into(),
            frequency_masks: 2,
            frequency_width: 27,
            time_masks: 10,
            time_width: 0.05,
            max_symbols: 10,
        }
    }
}

impl ModelSettings {
    /// The model's configuration in NeMo's terms, for a vocabulary of these pieces.
    pub fn config(&self, labels: &[String]) -> Result<ModelConfig, TrainingError> {
        if self.mels == 0 || self.heads == 0 || !self.d_model.is_multiple_of(self.heads) {
            return Err(TrainingError::setting("model.heads", "it must divide d_model"));
        }
        let greedy = json!({ "max_symbols": self.max_symbols });
        let document = json!({
            "target": "nemo.collections.asr.models.rnnt_bpe_models.EncDecRNNTBPEModel",
            "sample_rate": 16000,
            "rnnt_reduction": self.reduction,
            "labels": labels,
            "tokenizer": { "type": "bpe" },
            "preprocessor": {
                "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
                "sample_rate": 16000, "normalize": "per_feature", "window_size": 0.025, "window_stride": 0.01, "window": "hann",
                "features": self.mels, "n_fft": 512, "log": true, "frame_splicing": 1, "dither": 1e-5, "pad_to": 0, "pad_value": 0.0,
            },
            "spec_augment": {
                "_target_": "nemo.collections.asr.modules.SpectrogramAugmentation",
                "freq_masks": self.frequency_masks, "time_masks": self.time_masks,
                "freq_width": self.frequency_width, "time_width": self.time_width,
            },
            "encoder": {
                "_target_": "nemo.collections.asr.modules.ConformerEncoder",
                "feat_in": self.mels, "feat_out": -1, "n_layers": self.layers, "d_model": self.d_model, "use_bias": false,
                "subsampling": "dw_striding", "subsampling_factor": 8, "subsampling_conv_channels": self.conv_channels,
                "causal_downsampling": false, "ff_expansion_factor": self.feed_forward_factor,
                "self_attention_model": "rel_pos", "n_heads": self.heads, "att_context_size": [-1, -1], "att_context_style": "regular",
                "xscaling": false, "untie_biases": true, "pos_emb_max_len": 5000, "conv_kernel_size": self.conv_kernel,
                "conv_norm_type": "batch_norm", "conv_context_size": null,
                "dropout": self.dropout, "dropout_pre_encoder": self.dropout, "dropout_emb": 0.0, "dropout_att": self.dropout,
            },
            "decoder": {
                "_target_": "nemo.collections.asr.modules.RNNTDecoder",
                "normalization_mode": null, "random_state_sampling": false, "blank_as_pad": true, "vocab_size": labels.len(),
                "prednet": { "pred_hidden": self.pred_hidden, "pred_rnn_layers": self.pred_layers, "t_max": null, "dropout": self.decoder_dropout },
            },
            "joint": {
                "_target_": "nemo.collections.asr.modules.RNNTJoint",
                "log_softmax": null, "preserve_memory": false, "fuse_loss_wer": false, "num_extra_outputs": self.durations.len(),
                "num_classes": labels.len(), "vocabulary": labels,
                "jointnet": {
                    "joint_hidden": self.joint_hidden, "activation": "relu", "dropout": self.decoder_dropout,
                    "encoder_hidden": self.d_model, "pred_hidden": self.pred_hidden,
                },
            },
            "decoding": { "strategy": "greedy_batch", "model_type": "tdt", "durations": self.durations, "greedy": greedy },
            "loss": {
                "loss_name": "tdt",
                "tdt_kwargs": { "fastemit_lambda": 0.0, "clamp": -1.0, "durations": self.durations, "sigma": self.sigma, "omega": self.omega },
            },
            "model_defaults": {
                "enc_hidden": self.d_model, "pred_hidden": self.pred_hidden, "joint_hidden": self.joint_hidden,
                "tdt_durations": self.durations, "num_tdt_durations": self.durations.len(),
            },
        });
        // JSON is YAML too.
        let mut config = ModelConfig::from_nemo_yaml(&document.to_string())?;
        if !(0.0..=1.0).contains(&self.ctc_weight) {
            return Err(TrainingError::setting("model.ctc_weight", "it must be from 0 to 1"));
        }
        config.ctc_weight = (self.ctc_weight > 0.0).then_some(self.ctc_weight);
        Ok(config)
    }
}

impl TrainSettings {
    /// Refuses values that cannot work, and those that are not available yet.
    pub fn validate(&self) -> Result<(), TrainingError> {
        let refuse = |path: &str, message: &str| Err(TrainingError::setting(path, message));
        if self.checkpoints.trim().is_empty() {
            return refuse("checkpoints", "name a folder for the checkpoints");
        }
        if self.init.is_empty() {
            return refuse("init", "write `none`, or the path of a .nemo archive or model folder");
        }
        if self.init == "none" && self.tokenizer.is_empty() {
            return refuse("tokenizer", "with `init: none` name a SentencePiece .model file");
        }
        if self.optimizer != Optimizer::Adamw {
            return refuse("optimizer", "adamw8bit is not available yet; use adamw");
        }
        if self.precision != Precision::F32 {
            return refuse("precision", "bf16 is not available yet; use f32");
        }
        if self.offload {
            return refuse("offload", "it is not available yet; use false");
        }
        if self.ranks != 1 {
            return refuse("ranks", "only 1 rank is available yet");
        }
        if self.grad_accum == 0 {
            return refuse("grad_accum", "it must be at least 1");
        }
        for (path, value) in [("phase1_lr", self.phase1_lr), ("phase2_lr", self.phase2_lr)] {
            if !(value.is_finite() && value > 0.0) {
                return refuse(path, "it must be a number above 0");
            }
        }
        for (path, value) in [
            ("min_lr", self.min_lr),
            ("weight_decay", self.weight_decay),
            ("clip", self.clip),
        ] {
            if !(value.is_finite() && value >= 0.0) {
                return refuse(path, "it must be a number of at least 0");
            }
        }
        if !(0.0..1.0).contains(&self.average_decay) {
            return refuse("average_decay", "it must be at least 0 and below 1");
        }
        for beta in [self.betas.0, self.betas.1] {
            if !(0.0..1.0).contains(&beta) {
                return refuse("betas", "both must be at least 0 and below 1");
            }
        }
        for (path, value) in [
            ("max_steps", self.max_steps),
            ("checkpoint_every", self.checkpoint_every),
            ("keep_checkpoints", self.keep_checkpoints as u64),
            ("log_every", self.log_every),
            ("max_tokens", self.max_tokens as u64),
        ] {
            if value == 0 {
                return refuse(path, "it must be at least 1");
            }
        }
        Ok(())
    }

    /// Whether the first weights can be had. Matters only where no checkpoint stands.
    pub fn check_init(&self) -> Result<(), TrainingError> {
        if self.init == "none" {
            return Ok(());
        }
        if self.init.starts_with("hf://") || self.init.ends_with(".ckpt") {
            return Err(TrainingError::setting(
                "init",
                "only `none`, a .nemo archive or a model folder can be used yet",
            ));
        }
        if !Path::new(&self.init).exists() {
            return Err(TrainingError::setting("init", format!("{} is not there", self.init)));
        }
        Ok(())
    }

    /// The two phases as schedules. `d_model` matters to Noam only.
    pub fn recipe(&self, d_model: usize) -> Recipe {
        let (base, minimum, warmup) = (self.phase2_lr, self.min_lr, self.phase2_warmup);
        let phase2 = match self.schedule {
            ScheduleShape::Cosine => Schedule::Cosine {
                base,
                minimum,
                warmup,
                constant: 0,
                end: self.max_steps.saturating_sub(self.unfreeze_step),
            },
            ScheduleShape::Noam => Schedule::Noam {
                base,
                minimum,
                warmup,
                d_model: d_model as u64,
            },
            ScheduleShape::Constant => Schedule::Constant { base, warmup },
        };
        Recipe {
            unfreeze_step: self.unfreeze_step,
            phase1: Schedule::Constant {
                base: self.phase1_lr,
                warmup: self.warmup_steps,
            },
            phase2,
        }
    }

    pub fn adamw(&self) -> AdamWConfig {
        AdamWConfig {
            betas: self.betas,
            weight_decay: self.weight_decay,
            ..AdamWConfig::default()
        }
    }

    pub fn trainer_config(&self, d_model: usize) -> TrainerConfig {
        TrainerConfig {
            recipe: self.recipe(d_model),
            clip: self.clip,
            micro_batches_per_step: self.grad_accum.saturating_mul(self.ranks),
            seed: self.seed,
            spec_augment: self.spec_augment,
            dither: true,
            dropout: self.dropout,
        }
    }

    /// What the training run is; see [`Identity`].
    pub fn identity(&self) -> Result<Identity, TrainingError> {
        let fresh = self.init == "none";
        let tokenizer = if self.tokenizer.is_empty() {
            None
        } else {
            let path = Path::new(&self.tokenizer);
            let bytes = std::fs::read(path)
                .map_err(|e| TrainingError::setting("tokenizer", format!("{} cannot be read: {e}", path.display())))?;
            Some(blake3::hash(&bytes).to_hex().to_string())
        };
        let model = if fresh {
            serde_json::to_value(&self.model).unwrap_or(Value::Null)
        } else {
            Value::Null
        };
        Ok(Identity {
            model,
            tokenizer,
            init: self.init.clone(),
            seed: self.seed,
        })
    }

    /// The settings whose change is noticed. Those that never matter to the result (evaluation, logging,
    /// checkpoints, ranks) are not among them.
    pub fn recorded(&self) -> BTreeMap<String, Value> {
        let fields = json!({
            "max_steps": self.max_steps, "phase1_lr": self.phase1_lr, "phase2_lr": self.phase2_lr,
            "unfreeze_step": self.unfreeze_step, "warmup_steps": self.warmup_steps, "phase2_warmup": self.phase2_warmup,
            "schedule": self.schedule, "min_lr": self.min_lr, "weight_decay": self.weight_decay, "betas": self.betas, "clip": self.clip, "average_decay": self.average_decay,
            "grad_accum": self.grad_accum, "spec_augment": self.spec_augment, "dropout": self.dropout, "max_tokens": self.max_tokens,
            "optimizer": self.optimizer, "precision": self.precision, "max_batch_seconds": self.max_batch_seconds,
            "temperature": self.temperature, "max_samples": self.max_samples, "speeds": self.speeds, "balance": self.balance,
            "token_boundaries": self.token_boundaries,
        });
        match fields {
            Value::Object(map) => map.into_iter().collect(),
            _ => BTreeMap::new(),
        }
    }
}
