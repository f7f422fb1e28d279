//! The settings of `training.train`.

use std::time::Duration;

use candle_core::DType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use flow_kernels::device::DeviceChoice;
use flow_kind::Secret;
use flow_nn::layers::convolution::BatchNorm;

use crate::checkpoint::Ranking;
pub use crate::checkpoint::{KeepBest, Monitor};
pub use crate::concatenate::Concatenate;
pub use crate::early_stopping::EarlyStopping;
use crate::error::TrainingError;
use crate::long_texts::OverLimit;
pub use crate::mlflow::MlflowSettings;
pub use crate::model_from::ModelFrom;
pub use crate::model_settings::{ModelSettings, NewPieces};
use crate::optimizer::AdamWConfig;
pub use crate::prompts::{PromptMode, PromptSettings};
pub use crate::protect::ProtectSettings;
use crate::ranks::RankLayout;
use crate::schedule::{Recipe, Schedule};
pub use crate::trainable::{GroupSettings, LoraSettings};
use crate::trainer::TrainerConfig;

/// Trains a TDT model on the micro-batches that come in, step by step, and keeps checkpoints.
///
/// # What it does
///
/// `batches` is the stream of `sampling.load`: partition `step-000000012` holds the micro-batches of
/// optimizer step 12. On a sample of the rows of `validation` the model is evaluated while it trains: error rates, and the
/// TDT loss without dropout and SpecAugment (`val_loss`), both from one pass of the encoder; texts of more than `max_tokens`
/// tokens have no part in the loss. The digest of `train`, the train rows, is recorded in each checkpoint, so that
/// changed data is detected. In `members`, the port of an `audio.probe`, the audio of the validation rows is looked up
/// where they say only `tar_member_name`. `tokenizer` comes in place of the setting.
///
/// `protect` has rows of languages that are not trained on and must not get worse (or of the domain that the first model is good
/// at). Their word error rates are taken before the first step and at each evaluation; where one rises by more than
/// `protect.max_rise`, training ends with a message, and the newest checkpoint from before is handed on, or `init` if there is none.
///
/// A model of the hub is downloaded into the hub's own cache when training begins, if no stage before it did; an
/// interrupted download is resumed. `HF_TOKEN` (or the token file), `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`,
/// `HF_HUB_OFFLINE` and the proxy settings of the environment apply.
///
/// Rows whose transcripts have more than `max_tokens` tokens are left out (or learned only up to there, with `long_texts:
/// truncate`): they are counted by language in a warning and in `metrics.jsonl` when training begins. A `tokenizer.limit`
/// before sampling makes rejects of them, and then none come here.
///
/// Letters that the tokenizer has no piece for (`ß`, say) are learned as its unknown piece. Where `train` is given they are
/// counted by language and letter before the first step: in a table of the run's report, in `metrics.jsonl`, and in a warning
/// where more than `warn_unknown_letters` of a language's transcripts have any. Rows and texts stay as they are.
///
/// Where the micro-batches belong to the stages of a `curriculum` (see `sampling.load`), the model is evaluated and a
/// checkpoint written when a stage ends; optimizer, schedule and all else go on. Evaluation lines of `metrics.jsonl` then
/// name the stage as `stage_end`. A changed curriculum is refused like changes of other recorded settings, and so is a
/// raised `max_steps` if `curriculum_steps` is empty, since that moves the ends of stages.
///
/// Training is a log of checkpoints and not a cached artifact: its progress is read from the folder `checkpoints`, and
/// deleting the state directory loses nothing. Output `model` is one row once `max_steps` are done: `path` of the
/// checkpoint that `model_from` chooses, `step`, the model's `digest`, and `which` it is in words.
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
    /// Folder that receives the checkpoints, `metrics.jsonl`, and the same figures for TensorBoard (`tensorboard
    /// --logdir`). Locked while training runs. With a URL of object storage that is a folder on this machine
    /// (docs/storage.md), from which each checkpoint is copied to that prefix while training goes on; where the folder lacks
    /// the newest, it is fetched.
    pub checkpoints: String,
    /// Where the first weights come from: `none` (random, sized by `model`), a `.nemo` archive, a model folder
    /// such as a checkpoint, a folder of Hugging Face's transformers (`ParakeetForTDT`), a Lightning `.ckpt`, or a model
    /// of the Hugging Face hub, `hf://OWNER/NAME[@REVISION][/FILE]`: of that its `.nemo` archive, else its safetensors.
    /// Of a URL of object storage a copy is kept on this machine.
    pub init: String,
    /// A token for the hub, from a parameter with `secret: true`. Default: `HF_TOKEN`, or the token that `hf auth
    /// login` stored.
    pub hub_token: Option<Secret>,
    /// Path of a SentencePiece `.model`, BPE or unigram. Required with an `init` without a tokenizer (a `.ckpt`).
    /// Empty: that of `init`, and with `init: none` the one that `model.tokenizer` names. Where its pieces differ from
    /// those of `init`, the vocabulary is changed: encoder, LSTM, durations and the rows of all pieces that both have
    /// keep their weights, other rows are initialised by `new_pieces`. The origin of each piece's rows is written to
    /// `vocabulary.tsv` beside the checkpoints.
    pub tokenizer: String,
    /// How the rows of pieces are initialised that are in `tokenizer` but not in that of `init`.
    pub new_pieces: NewPieces,
    /// Sizes of a new model. Only used with `init: none`.
    pub model: ModelSettings,
    /// Folder below which the tars of the validation rows are (the parameter `shards`).
    pub shards: String,

    /// Optimizer steps to do in all.
    pub max_steps: u64,
    /// Peak learning rate while the encoder is frozen (phase 1); constant after its warm-up.
    pub phase1_lr: f64,
    /// Peak learning rate once all parameters are trained (phase 2).
    pub phase2_lr: f64,
    /// Steps during which the encoder is frozen; 0 for none.
    pub unfreeze_step: u64,
    /// Warm-up steps of phase 1.
    pub warmup_steps: u64,
    /// Warm-up steps of phase 2.
    pub phase2_warmup: u64,
    /// Schedule of the learning rate of phase 2 after its warm-up.
    pub schedule: ScheduleShape,
    /// Rate at the end of the cosine (and floor of Noam).
    pub min_lr: f64,
    /// Train thin matrices beside the model's, which stay as they are (LoRA): far less memory for gradients and optimizer, and an
    /// adapter as PEFT reads and writes them. Needs an `init`, `unfreeze_step: 0` and `batch_norm: frozen`. Checkpoints are models
    /// with the adapter in files of its own; whatever opens them adds it to the weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraSettings>,
    /// Learning rates and freezing by patterns of names; of several that match a name the first one counts. Names are those of
    /// `flow model info --tensors`; LoRA's matrices end in `lora_A.weight` and `lora_B.weight`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupSettings>,
    /// Decoupled weight decay of every trainable parameter, as in NeMo.
    pub weight_decay: f64,
    /// AdamW's two coefficients.
    pub betas: (f64, f64),
    /// Global gradient norm to clip to; 0 for none.
    pub clip: f64,
    /// Decay of an exponential moving average of the weights, updated after every step; 0 for none. With it the
    /// averaged model is evaluated, kept in checkpoints and given to later stages.
    pub average_decay: f64,
    /// Micro-batches per optimizer step on each rank.
    pub grad_accum: u32,
    /// Training replicas, which share the micro-batches of a step and the optimizer's state. On the CPU they are threads
    /// that share the cores of their process. Where a run has several processes (`flow run --hosts`), this is the number
    /// over all of them, and each has the same number. May be changed between runs.
    pub ranks: u32,
    /// The number type in which ranks send each other gradients: `bf16` halves what goes over links and network, and rounds
    /// each gradient once before the sum (and with NCCL sums too). May be changed between runs.
    pub reduce_dtype: ReduceDtype,
    /// When gradients are summed over the ranks. May be changed between runs.
    pub reduce_every: ReduceEvery,
    /// Seconds that a rank waits for another one, or process 0 for micro-batches that another process loads, before training
    /// ends and names it.
    pub rank_timeout: f64,
    /// Where the model is computed: `cpu`; `cuda`, with the second rank on the second device and so on; or `cuda:1`, that
    /// device, for one rank. CUDA needs a program that was built for it (see docs/gpu.md). May be changed between runs.
    pub device: String,
    /// Seed of the first weights, of dropout and of SpecAugment.
    pub seed: u64,
    /// Mask parts of the features in training, as the model's configuration says.
    pub spec_augment: bool,
    /// Use the model's dropout rates in training.
    pub dropout: bool,
    /// Which statistics the encoder's batch normalisation uses while the encoder learns.
    pub batch_norm: BatchNormStatistics,
    /// Most tokens of a transcript.
    pub max_tokens: usize,
    /// How to treat a row with a longer transcript: `reject` (it is not trained on) or `truncate` (it is trained on up
    /// to there, with all of its audio).
    pub long_texts: OverLimit,
    /// Join short clips of a micro-batch to longer ones: `{gap_seconds: 0.1, max_duration: 20}`. Each row is checked, and left out
    /// or not, by itself; of rows that are joined, `row_losses` has the loss of the joined clip. Left out: clips are not joined.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concatenate: Option<Concatenate>,
    /// Share of the transcripts of a language, from 0 to 1, that may have letters which the tokenizer does not know before a
    /// warning names them. In place of such a letter the model learns the tokenizer's unknown piece.
    pub warn_unknown_letters: f64,
    /// Share of all transcripts, from 0 to 1, that may be without a word before a warning gives their number. Many of them mean
    /// that the text was read from a wrong column.
    pub warn_empty_texts: f64,

    /// For models with language prompts: how those of rows are chosen, with the names of NeMo's `train_ds`. Rows of validation have
    /// the prompt of their language, or with the mode `auto` that.
    #[serde(skip_serializing_if = "PromptSettings::is_default")]
    pub prompts: PromptSettings,
    /// Optimizer.
    pub optimizer: Optimizer,
    /// How weights are stored.
    pub precision: Precision,
    /// On a CUDA device, products of factors in f32 may round these to TF32, which has 10 bits of a fraction (`tf32: true` in Hugging
    /// Face's `TrainingArguments`): eight times the operations per second on an H100, sums in f32. `null`: they do so with `precision:
    /// bf16`, which leaves few products in f32 (of the sub-sampling and the LSTM), and has factors of 7 bits elsewhere; not with
    /// `precision: f32`. May be changed between runs.
    pub tf32: Option<bool>,
    /// With `precision: bf16`, keep the weights in f32 too, with the optimizer's state, and update those: 4 bytes more for each
    /// weight of a matrix, shared out over the ranks as the optimizer's state is. Without, an updated weight is rounded to bf16
    /// at random.
    pub master_weights: bool,
    /// Keep only the input of each encoder layer for the backward pass, and compute the layer again there: much less
    /// memory, about a third more time, the same result to the bit. May be changed between runs.
    pub recompute: bool,
    /// Update each parameter group as soon as the backward pass has its gradients, and drop them: the memory of all
    /// gradients is saved, and the result is the same to the bit. Needs `grad_accum: 1`, `ranks: 1` and `clip: 0`,
    /// since the norm of the whole gradient is known only at the end. If a gradient is not finite, the groups before it
    /// in the backward pass are updated already.
    pub fold_update: bool,
    /// Keep the optimizer's state and the sums of the gradients in host memory, with a copy of the weights that is updated
    /// there while the next forward pass goes on, which waits for each part of the model in turn: a GPU then needs memory for
    /// weights and activations only, and the result is the same to the bit. Where weights are averaged, each update is waited
    /// for at once. On the CPU, which has one memory, it costs the copy. May be changed between runs.
    pub offload: bool,

    /// Steps between checkpoints; one is always written at the end.
    pub checkpoint_every: u64,
    /// Checkpoints to keep; older ones are removed.
    pub keep_checkpoints: usize,
    /// Keep the best checkpoints too, of those that were evaluated (where `eval_every` and `checkpoint_every` coincide): `true`
    /// (one), `false` (none), or a number (`save_top_k` in NeMo).
    pub keep_best: KeepBest,
    /// The figure of the validation sample by which checkpoints are the best, and by which `early_stopping` decides: `val_wer`,
    /// `val_cer` or `val_loss`.
    #[serde(skip_serializing_if = "Monitor::is_default")]
    pub monitor: Monitor,
    /// End training once `monitor` no longer gets better: `{patience: 10, min_delta: 0.001}`. Left out: all steps are done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub early_stopping: Option<EarlyStopping>,
    /// With the input `protect`: by how much the error rates of its languages may rise, and what happens then.
    #[serde(skip_serializing_if = "ProtectSettings::is_default")]
    pub protect: ProtectSettings,
    /// Keep the loss of each row in the checkpoints, for `training.rank`; a number above 0 turns it on. Losses count from the run on
    /// in which it is set. Weights do not depend on it.
    #[serde(skip_serializing_if = "is_zero")]
    pub row_losses: u64,
    /// Which checkpoint becomes the output model, once all steps are done: `last`; `best`, which has the lowest `monitor` on
    /// the validation sample (a checkpoint is written at each evaluation that finds a lower one); `average`, the mean of the
    /// weights of the last `keep_checkpoints` ones; or `average_best`, that of the `keep_best` best ones. Later stages decode
    /// and score this model. May be changed when training is done.
    pub model_from: ModelFrom,
    /// Go on training while a checkpoint is written, from a copy of weights and optimizer state in memory.
    pub checkpoint_in_background: bool,
    /// Steps between evaluations; 0 for none.
    pub eval_every: u64,
    /// Validation utterances per language to evaluate on.
    pub eval_samples_per_language: usize,
    /// Steps between lines of `metrics.jsonl`.
    pub log_every: u64,
    /// Steps in one run that may be skipped because a loss or gradient is not finite, or no utterance of them can be
    /// loaded.
    pub max_bad_steps: u64,

    /// What to do when the newest checkpoint was made with other settings or data: `refuse` names the differences and
    /// ends, `continue` trains on with the new ones, `restart` begins again from `init` in a new folder beside the old
    /// checkpoints.
    pub on_change: OnChange,

    /// Before the first step, predict how much memory training needs, and refuse to begin where that is more than
    /// available: to each process, and on CUDA devices to each rank.
    pub memory_check: bool,
    /// Seconds of the longest clip, which determines the largest micro-batch.
    pub max_duration: f64,

    /// Write the figures into MLflow's file store, too: `{folder: mlruns, experiment_name: flow}`. May be changed between runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mlflow: Option<MlflowSettings>,
}

impl Default for TrainSettings {
    fn default() -> Self {
        TrainSettings {
            checkpoints: String::new(),
            init: "none".into(),
            hub_token: None,
            tokenizer: String::new(),
            new_pieces: NewPieces::Mean,
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
            lora: None,
            groups: Vec::new(),
            weight_decay: 1e-3,
            betas: (0.9, 0.98),
            clip: 1.0,
            average_decay: 0.0,
            grad_accum: 1,
            ranks: 1,
            reduce_dtype: ReduceDtype::F32,
            reduce_every: ReduceEvery::MicroBatch,
            rank_timeout: 600.0,
            device: "cpu".into(),
            seed: 42,
            spec_augment: true,
            dropout: true,
            batch_norm: BatchNormStatistics::Rank,
            max_tokens: 512,
            long_texts: OverLimit::Reject,
            concatenate: None,
            warn_unknown_letters: 0.01,
            warn_empty_texts: 0.01,
            prompts: PromptSettings::default(),
            optimizer: Optimizer::Adamw,
            precision: Precision::F32,
            tf32: None,
            master_weights: false,
            recompute: false,
            fold_update: false,
            offload: false,
            checkpoint_every: 1_000,
            keep_checkpoints: 3,
            keep_best: KeepBest(1),
            monitor: Monitor::ValWer,
            early_stopping: None,
            protect: ProtectSettings::default(),
            row_losses: 0,
            model_from: ModelFrom::Last,
            checkpoint_in_background: true,
            eval_every: 1_000,
            eval_samples_per_language: 10,
            log_every: 10,
            max_bad_steps: 20,
            on_change: OnChange::Refuse,
            memory_check: true,
            max_duration: 20.0,
            mlflow: None,
        }
    }
}

/// Settings that later versions added are left out where they change nothing.
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Schedule of the learning rate of phase 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleShape {
    /// Half a cosine down to `min_lr` at `max_steps`.
    Cosine,
    /// NeMo's `NoamAnnealing`; `phase2_lr` is then its factor (5, say), not a peak.
    Noam,
    Constant,
}

/// Number type of gradients on their way between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReduceDtype {
    F32,
    Bf16,
}

impl ReduceDtype {
    /// Of gradients that are computed in `dtype`.
    pub fn of(self, dtype: DType) -> DType {
        match self {
            ReduceDtype::F32 => dtype,
            ReduceDtype::Bf16 => DType::BF16,
        }
    }
}

/// When gradients are summed over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReduceEvery {
    /// In the backward pass of each micro-batch: a rank keeps the sums of the parameters that it owns, and no other gradients.
    MicroBatch,
    /// In the backward pass of the last micro-batch of a step: `grad_accum` times less is sent, and each rank keeps the
    /// gradients of all parameters until then.
    Step,
}

/// Statistics of batch normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BatchNormStatistics {
    /// Those of the micro-batch of each rank; the running ones are merged at the end of a step.
    Rank,
    /// Those of the micro-batches that all ranks compute at the same time (PyTorch's `SyncBatchNorm`, `sync_batchnorm: true`
    /// in NeMo's recipes): the ranks wait for each other in each layer, forward and backward.
    Sync,
    /// The running ones of the model that training begins with, which stay as they are.
    Frozen,
}

impl From<BatchNormStatistics> for BatchNorm {
    fn from(statistics: BatchNormStatistics) -> Self {
        match statistics {
            BatchNormStatistics::Rank => BatchNorm::OwnRows,
            BatchNormStatistics::Sync => BatchNorm::AllRanks,
            BatchNormStatistics::Frozen => BatchNorm::Frozen,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Optimizer {
    /// AdamW with moments in 32 bits: 8 bytes for each parameter.
    Adamw,
    /// AdamW with moments in 8 bits, in blocks of 256 with a scale each: 2 bytes for each parameter. Tensors of fewer than
    /// 4,096 elements stay in 32 bits.
    Adamw8bit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// Everything in 32 bits.
    F32,
    /// The matrices of linear layers, nearly all of a model, in bf16: two bytes less for each weight. All is computed in 32
    /// bits, gradients and moments too (on CUDA the products of these matrices, and of the joint network's last layer, are
    /// computed of factors in bf16, with sums in 32 bits); an updated weight is rounded up or down at random, in proportion, so that updates smaller than a bf16 step
    /// count on the average, unless `master_weights` keeps it in 32 bits too. Averaged weights are in 32 bits.
    Bf16,
}

impl Precision {
    /// The number type of stored matrices.
    pub fn matrices(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnChange {
    Refuse,
    Continue,
    Restart,
}

impl TrainSettings {
    /// Refuses a number of ranks that is not a multiple of the number of processes.
    pub fn check_processes(&self, processes: usize) -> Result<(), TrainingError> {
        RankLayout::new(self.ranks as usize, processes).map(drop)
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

    /// A note on the learning rate where training had ended after `before` steps and continues at `step`; none where it
    /// had not ended. `d_model` matters to Noam only.
    pub fn rate_after_end(&self, before: u64, step: u64, d_model: usize) -> Option<String> {
        if before == 0 || step < before || self.max_steps <= before {
            return None;
        }
        let earlier = TrainSettings {
            max_steps: before,
            ..self.clone()
        };
        let (earlier, now) = (earlier.recipe(d_model), self.recipe(d_model));
        let cosine = match self.schedule {
            ScheduleShape::Cosine => " (the cosine is that of all steps)",
            ScheduleShape::Noam | ScheduleShape::Constant => "",
        };
        Some(format!(
            "training had ended after {before} steps, and `max_steps` is now {}: the learning rate was {:.2e} in the last step, \
             is {:.2e} in the next one and {:.2e} in the last{cosine}",
            self.max_steps,
            earlier.rate(before - 1),
            now.rate(step),
            now.rate(self.max_steps - 1)
        ))
    }

    /// Text of a warning about phases and warm-ups that do not end within the run.
    pub fn phase_warnings(&self) -> Vec<String> {
        const GROUPS: &str = "the parameter groups are encoder, decoder and joint";
        let mut warnings = Vec::new();
        let (steps, unfreeze) = (self.max_steps, self.unfreeze_step);
        if unfreeze > 0 && unfreeze >= steps {
            warnings.push(format!(
                "`unfreeze_step` is {unfreeze} and `max_steps` is {steps}: the encoder stays frozen for the whole run, only decoder \
                 and joint learn, and `phase2_lr` is never used ({GROUPS}; `unfreeze_step: 0` trains all of them from the first step)"
            ));
        }
        let phases = [
            ("warmup_steps", self.warmup_steps, unfreeze.min(steps), "phase1_lr"),
            (
                "phase2_warmup",
                self.phase2_warmup,
                steps.saturating_sub(unfreeze),
                "phase2_lr",
            ),
        ];
        for (name, warmup, length, rate) in phases {
            if length > 0 && warmup > length {
                warnings.push(format!(
                    "`{name}` is {warmup} and its phase has {length} steps: the warm-up does not end, and `{rate}` is never reached"
                ));
            }
        }
        warnings
    }

    /// How many of the best checkpoints are kept, and by which figure.
    pub fn ranking(&self) -> Ranking {
        Ranking {
            monitor: self.monitor,
            keep: self.keep_best.0,
        }
    }

    /// Where the model is computed.
    pub fn device(&self) -> Result<DeviceChoice, TrainingError> {
        self.device
            .parse()
            .map_err(|error| TrainingError::setting("device", error))
    }

    /// Whether the device has its own memory, beside the host's. False for an invalid device, which is refused
    /// elsewhere.
    pub fn separate_memory(&self) -> bool {
        self.device().is_ok_and(|device| device != DeviceChoice::Cpu)
    }

    /// Whether factors in f32 are rounded to TF32, where the training is on a GPU.
    pub fn tf32_on_gpus(&self) -> bool {
        self.tf32.unwrap_or(self.precision == Precision::Bf16)
    }

    /// Whether factors in f32 are rounded to TF32.
    pub fn uses_tf32(&self) -> bool {
        self.separate_memory() && self.tf32_on_gpus()
    }

    pub fn adamw(&self) -> AdamWConfig {
        AdamWConfig {
            betas: self.betas,
            weight_decay: self.weight_decay,
            eight_bit: self.optimizer == Optimizer::Adamw8bit,
            master_weights: self.master_weights,
            ..AdamWConfig::default()
        }
    }

    pub fn trainer_config(&self, d_model: usize) -> TrainerConfig {
        TrainerConfig {
            recipe: self.recipe(d_model),
            clip: self.clip,
            ranks: self.ranks,
            fold_update: self.fold_update,
            offload: self.offload,
            rank_timeout: Duration::from_secs_f64(self.rank_timeout),
            // `validate` has read it.
            device: self.device().unwrap_or_default(),
            tf32: self.uses_tf32(),
            recompute: self.recompute,
            batch_norm: self.batch_norm.into(),
            reduce_dtype: self.reduce_dtype,
            reduce_every: self.reduce_every,
            seed: self.seed,
            spec_augment: self.spec_augment,
            dither: true,
            dropout: self.dropout,
            row_losses: self.row_losses > 0,
        }
    }

    /// Path of the tokenizer that is given, by this setting or for a model that begins from nothing; empty if none is.
    pub fn tokenizer_path(&self) -> &str {
        if self.tokenizer.is_empty() && self.init == "none" {
            &self.model.tokenizer
        } else {
            &self.tokenizer
        }
    }
}

#[cfg(test)]
mod tests {
    use flow_kind::Kind;

    use super::*;
    use crate::train::TrainingTrain;

    /// Where a finished schedule is extended, the rate rises again from its final value.
    #[test]
    fn what_the_rate_does_after_its_end_is_told() {
        let settings = TrainSettings {
            max_steps: 200,
            unfreeze_step: 0,
            phase2_warmup: 0,
            phase2_lr: 1e-3,
            min_lr: 0.0,
            ..TrainSettings::default()
        };
        let said = settings.rate_after_end(100, 100, 144).expect("it had ended");
        assert!(
            said.contains("after 100 steps") && said.contains("is 5.00e-4 in the next one") && said.contains("cosine"),
            "{said}"
        );
        // In the middle of a run, and where nothing is left to do.
        assert_eq!(settings.rate_after_end(100, 50, 144), None);
        assert_eq!(settings.rate_after_end(200, 200, 144), None);
    }

    #[test]
    fn tf32_is_for_trainings_in_bf16_unless_it_is_said() {
        let used = |device: &str, precision: Precision, tf32: Option<bool>| {
            let settings = TrainSettings {
                device: device.into(),
                precision,
                tf32,
                ..TrainSettings::default()
            };
            let used = settings.trainer_config(144).tf32;
            // What was trained before it became the default is trained again.
            assert_eq!(TrainingTrain::identity(&settings.into())["tf32"], used);
            used
        };
        assert!(used("cuda", Precision::Bf16, None) && used("cuda", Precision::F32, Some(true)));
        assert!(!used("cuda", Precision::Bf16, Some(false)) && !used("cuda", Precision::F32, None));
        assert!(!used("cpu", Precision::Bf16, None));
    }

    #[test]
    fn phases_that_do_not_end_are_told() {
        let warnings = |max_steps, unfreeze_step, warmup_steps, phase2_warmup| {
            let settings = TrainSettings {
                max_steps,
                unfreeze_step,
                warmup_steps,
                phase2_warmup,
                ..TrainSettings::default()
            };
            settings.phase_warnings()
        };
        assert_eq!(warnings(600, 100, 20, 50), Vec::<String>::new());
        // Phase 1 has no step, so its warm-up does not count.
        assert_eq!(warnings(1, 0, 20, 1), Vec::<String>::new());
        let frozen = warnings(100, 100, 20, 50);
        assert!(
            frozen.len() == 1
                && frozen[0].contains("`unfreeze_step` is 100")
                && frozen[0].contains("encoder, decoder and joint"),
            "{frozen:?}"
        );
        let cold = warnings(120, 10, 11, 111);
        assert!(
            cold.len() == 2 && cold[0].contains("`warmup_steps`") && cold[1].contains("`phase2_warmup` is 111"),
            "{cold:?}"
        );
    }
}
