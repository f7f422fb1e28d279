//! The settings of a training as it runs: the user's settings, completed from inputs and the hub.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::datatypes::Schema;
use flow_hub::HubReference;
use flow_kernels::device::DeviceChoice;
use flow_kind::store::path_in_set;
use flow_kind::{ReadOnce, RunLabels, read_regular_file};
use flow_sampling::SamplingRecord;
use flow_sampling::plan::Packing;
use flow_storage::Storage;
use serde_json::{Value, json};

use crate::checkpoint::Identity;
use crate::error::TrainingError;
use crate::long_texts::OverLimit;
use crate::memory::MemoryCheck;
use crate::settings::{BatchNormStatistics, ModelFrom, NewPieces, Precision, ScheduleShape, TrainSettings};
use crate::trainable;

/// The settings of a training, with values from its inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedSettings {
    pub settings: TrainSettings,
    /// How the micro-batches are made; none where they do not come from a `sampling.load`.
    pub sampling: Option<SamplingRecord>,
    /// The `.model` that came as an input.
    pub tokenizer_input: Option<Arc<[u8]>>,
    /// The content of the file that `tokenizer` names.
    pub tokenizer_read: ReadOnce<Vec<u8>>,
    /// The local path of `init`, if it was fetched.
    pub fetched: Option<PathBuf>,
    /// What ranks need of devices that have a memory of their own, where that is to be checked.
    pub device_needs: Option<MemoryCheck>,
    /// What people call the run.
    pub labels: RunLabels,
}

/// The most ranks, over all processes.
const MAX_RANKS: u32 = 64;

impl ResolvedSettings {
    /// Settings whose micro-batches have this schema.
    ///
    /// # Errors
    /// When the record of how they are made cannot be read.
    pub fn new(settings: TrainSettings, batches: &Schema) -> Result<Self, TrainingError> {
        let sampling = SamplingRecord::of(batches).map_err(|error| {
            TrainingError::data(format!("the micro-batches do not say how they were made: {error}"))
        })?;
        Ok(ResolvedSettings {
            sampling,
            ..ResolvedSettings::from(settings)
        })
    }

    /// Most seconds of audio in a micro-batch.
    pub fn max_batch_seconds(&self) -> f64 {
        let packing = self
            .sampling
            .as_ref()
            .map(|sampling| sampling.packing.max_batch_seconds);
        packing.unwrap_or(Packing::default().max_batch_seconds)
    }

    /// The same with some settings changed.
    pub fn with(&self, change: impl FnOnce(&mut TrainSettings)) -> Self {
        let mut other = self.clone();
        change(&mut other.settings);
        other
    }

    /// The same with other micro-batches, to predict their memory.
    pub fn with_batch_seconds(&self, seconds: f64) -> Self {
        let mut other = self.clone();
        let packing = &mut other.sampling.get_or_insert_default().packing;
        packing.max_batch_seconds = seconds;
        other
    }

    /// Refuses invalid values, and those that are not available yet.
    pub fn validate(&self) -> Result<(), TrainingError> {
        let refuse = |path: &str, message: &str| Err(TrainingError::setting(path, message));
        if self.checkpoints.trim().is_empty() {
            return refuse("checkpoints", "name a folder for the checkpoints");
        }
        if self.init.is_empty() {
            return refuse(
                "init",
                "write `none`, or the path of a .nemo archive, a model folder or a .ckpt",
            );
        }
        if self.init == "none" && self.tokenizer_path().is_empty() && self.tokenizer_input.is_none() {
            return refuse(
                "tokenizer",
                "with `init: none` name a SentencePiece .model file, or give a tokenizer.train as input",
            );
        }
        if !self.tokenizer.is_empty() && self.tokenizer_input.is_some() {
            return refuse("tokenizer", "a tokenizer comes as an input too; leave one of them out");
        }
        HubReference::parse(&self.init).transpose()?;
        if self.master_weights && self.precision == Precision::F32 {
            return refuse(
                "master_weights",
                "with `precision: f32` all weights are in 32 bits anyway",
            );
        }
        trainable::validate(self)?;
        let of_best = matches!(self.model_from, ModelFrom::Best | ModelFrom::AverageBest);
        if of_best && (self.eval_every == 0 || self.keep_best.0 == 0) {
            return refuse(
                "model_from",
                "`best` and `average_best` need `eval_every` and `keep_best` above 0",
            );
        }
        if !(self.protect.max_rise.is_finite() && self.protect.max_rise >= 0.0) {
            return refuse("protect", "`max_rise` must be a number of at least 0");
        }
        if !(0.0..=1.0).contains(&self.prompts.unified_auto_ratio) {
            return refuse("prompts.unified_auto_ratio", "it is a probability, from 0 to 1");
        }
        if let Some(mlflow) = &self.mlflow {
            mlflow.check().map_err(|why| TrainingError::setting("mlflow", why))?;
        }
        if let Some(concatenate) = &self.concatenate {
            concatenate
                .check()
                .map_err(|why| TrainingError::setting("concatenate", why))?;
        }
        if let Some(stopping) = &self.early_stopping {
            if self.eval_every == 0 || stopping.patience == 0 {
                return refuse("early_stopping", "it needs `eval_every` and `patience` above 0");
            }
            if !(stopping.min_delta.is_finite() && stopping.min_delta >= 0.0) {
                return refuse("early_stopping", "`min_delta` must be a number of at least 0");
            }
        }
        if self.offload && self.fold_update {
            return refuse(
                "fold_update",
                "with `offload` gradients leave the device as soon as they are complete anyway",
            );
        }
        if self.fold_update && (self.grad_accum != 1 || self.ranks != 1 || self.clip != 0.0) {
            return refuse("fold_update", "it needs `grad_accum: 1`, `ranks: 1` and `clip: 0`");
        }
        if !(1..=MAX_RANKS).contains(&self.ranks) {
            return refuse("ranks", &format!("it must be from 1 to {MAX_RANKS}"));
        }
        if !(self.rank_timeout > 0.0 && self.rank_timeout <= 1e9) {
            return refuse("rank_timeout", "it must be a number of seconds above 0");
        }
        let device = self.device()?;
        if self.tf32 == Some(true) && device == DeviceChoice::Cpu {
            return refuse(
                "tf32",
                "TF32 is a number type of GPUs; with `device: cpu` leave `tf32` out",
            );
        }
        if self.ranks > 1 && matches!(device, DeviceChoice::Cuda(Some(_))) {
            return refuse("device", "several ranks need a device each; write `cuda`");
        }
        if self.grad_accum == 0 {
            return refuse("grad_accum", "it must be at least 1");
        }
        for (path, value) in [("phase1_lr", self.phase1_lr), ("phase2_lr", self.phase2_lr)] {
            if !(value.is_finite() && value > 0.0) {
                return refuse(path, "it must be a number above 0");
            }
        }
        // Noam's rate is a factor, typically about 5.
        let rates = [
            ("phase1_lr", self.phase1_lr, true),
            ("phase2_lr", self.phase2_lr, self.schedule != ScheduleShape::Noam),
        ];
        for (path, value, is_rate) in rates {
            if is_rate && value > 1.0 {
                let message =
                    format!("{value} is above 1: no training with AdamW converges there; 1e-5 to 3e-3 are usual");
                return refuse(path, &message);
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
        if !(self.max_duration.is_finite() && self.max_duration > 0.0) {
            return refuse("max_duration", "it must be a number above 0");
        }
        if !(0.0..=1.0).contains(&self.warn_unknown_letters) {
            return refuse("warn_unknown_letters", "it is a share, from 0 to 1");
        }
        if !(0.0..=1.0).contains(&self.warn_empty_texts) {
            return refuse("warn_empty_texts", "it is a share, from 0 to 1");
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
        self.check_sampling()
    }

    /// Refuses micro-batches that were made for other settings.
    fn check_sampling(&self) -> Result<(), TrainingError> {
        let Some(sampling) = &self.sampling else { return Ok(()) };
        let packing = &sampling.packing;
        for (path, own, made, what) in [
            ("ranks", self.ranks, packing.world_size, "ranks"),
            (
                "grad_accum",
                self.grad_accum,
                packing.grad_accum,
                "micro-batches a step on each rank",
            ),
        ] {
            if own != made {
                let message = format!("the steps that come are made for {made} {what}, not for {own}");
                return Err(TrainingError::setting(path, message));
            }
        }
        if sampling.steps < self.max_steps {
            let message = format!(
                "micro-batches come for {} steps, not for {}",
                sampling.steps, self.max_steps
            );
            return Err(TrainingError::setting("max_steps", message));
        }
        Ok(())
    }

    /// The bytes of the SentencePiece model that was given, as an input or by its path.
    pub fn tokenizer_file(&self, storage: &Storage) -> Result<Option<Vec<u8>>, TrainingError> {
        if let Some(bytes) = &self.tokenizer_input {
            return Ok(Some(bytes.to_vec()));
        }
        let path = self.tokenizer_path();
        if path.is_empty() {
            return Ok(None);
        }
        let failed = |e| TrainingError::setting("tokenizer", format!("{path} cannot be read: {e}"));
        let read = || {
            let file = path_in_set(storage, Path::new(path)).map_err(std::io::Error::other)?;
            read_regular_file(storage, &file)
        };
        let read = self.tokenizer_read.get(path, read).map_err(failed)?;
        Ok(Some(read.to_vec()))
    }

    /// The path of the first weights.
    pub fn init_path(&self) -> &Path {
        self.fetched.as_deref().unwrap_or(Path::new(&self.init))
    }

    /// What the training run is; see [`Identity`].
    pub fn identity(&self, storage: &Storage) -> Result<Identity, TrainingError> {
        let fresh = self.init == "none";
        let tokenizer = self.tokenizer_file(storage)?;
        let tokenizer = tokenizer.map(|bytes| blake3::hash(&bytes).to_hex().to_string());
        let model = if fresh {
            self.fresh_model()
        } else if tokenizer.is_some() && self.new_pieces != NewPieces::default() {
            json!({ "new_pieces": self.new_pieces })
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

    /// The architecture of a new model, without its tokenizer.
    pub fn fresh_model(&self) -> Value {
        let mut model = serde_json::to_value(&self.model).unwrap_or(Value::Null);
        if let Some(sizes) = model.as_object_mut() {
            // The content of the file counts, not its path.
            sizes.remove("tokenizer");
        }
        model
    }

    /// The settings whose change is detected. Settings that do not affect the result (evaluation, logging, checkpoints,
    /// ranks) are not included.
    pub fn recorded(&self) -> BTreeMap<String, Value> {
        let mut fields = BTreeMap::new();
        let mut note = |name: &str, value: Value| {
            fields.insert(name.to_owned(), value);
        };
        note("max_steps", json!(self.max_steps));
        note("phase1_lr", json!(self.phase1_lr));
        note("phase2_lr", json!(self.phase2_lr));
        note("unfreeze_step", json!(self.unfreeze_step));
        note("warmup_steps", json!(self.warmup_steps));
        note("phase2_warmup", json!(self.phase2_warmup));
        note("schedule", json!(self.schedule));
        note("min_lr", json!(self.min_lr));
        note("weight_decay", json!(self.weight_decay));
        note("betas", json!(self.betas));
        note("clip", json!(self.clip));
        note("average_decay", json!(self.average_decay));
        note("grad_accum", json!(self.grad_accum));
        note("spec_augment", json!(self.spec_augment));
        note("dropout", json!(self.dropout));
        note("max_tokens", json!(self.max_tokens));
        note("optimizer", json!(self.optimizer));
        note("precision", json!(self.precision));
        // Omitted with `truncate`, the behaviour of checkpoints older than the setting.
        if self.long_texts != OverLimit::Truncate {
            note("long_texts", json!(self.long_texts));
        }
        if let Some(concatenate) = &self.concatenate {
            note("concatenate", json!(concatenate));
        }
        // As above.
        if self.batch_norm != BatchNormStatistics::Rank {
            note("batch_norm", json!(self.batch_norm));
        }
        if self.master_weights {
            note("master_weights", json!(true));
        }
        if let Some(lora) = &self.lora {
            note("lora", json!(lora));
        }
        if !self.groups.is_empty() {
            note("groups", json!(self.groups));
        }
        if !self.prompts.is_default() {
            note("prompts", json!(self.prompts));
        }
        let Some(sampling) = &self.sampling else { return fields };
        let packing = &sampling.packing;
        note("max_batch_seconds", json!(packing.max_batch_seconds));
        note("temperature", json!(packing.temperature));
        note("balance", json!(packing.balance));
        note("token_boundaries", json!(packing.token_boundaries));
        note("max_samples", json!(sampling.max_samples));
        note("speeds", json!(sampling.speeds));
        // Later settings are omitted where they have the behaviour of checkpoints older than them.
        if packing.boundaries != Packing::default().boundaries {
            note("boundaries", json!(packing.boundaries));
        }
        if !packing.bucket_batch_size.is_empty() {
            note("bucket_batch_size", json!(packing.bucket_batch_size));
        }
        if !sampling.augment.is_empty() {
            note("augment", json!(sampling.augment));
        }
        if let Some(steps) = sampling.augment_steps {
            note("augment_steps", json!(steps));
        }
        if u64::try_from(packing.seed) != Ok(self.seed) {
            note("sampling_seed", json!(packing.seed));
        }
        if !sampling.curriculum.is_empty() {
            note("curriculum", json!(sampling.curriculum));
            note("curriculum_steps", json!(sampling.curriculum_steps));
        }
        fields
    }
}

impl From<TrainSettings> for ResolvedSettings {
    fn from(settings: TrainSettings) -> Self {
        ResolvedSettings {
            settings,
            sampling: None,
            tokenizer_input: None,
            tokenizer_read: ReadOnce::default(),
            fetched: None,
            device_needs: None,
            labels: RunLabels::default(),
        }
    }
}

impl Deref for ResolvedSettings {
    type Target = TrainSettings;

    fn deref(&self) -> &TrainSettings {
        &self.settings
    }
}

impl DerefMut for ResolvedSettings {
    fn deref_mut(&mut self) -> &mut TrainSettings {
        &mut self.settings
    }
}
