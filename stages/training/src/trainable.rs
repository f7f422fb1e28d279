//! Which parameters are trained, and how: LoRA in place of whole matrices, and rates and freezing by patterns of names.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use flow_model::ModelConfig;
use flow_model::checkpoint::{Adapter, OpenModel};
use flow_model::model::TdtModel;
use flow_nn::lora::{LoraConfig, module_of};
use flow_nn::patterns::NamePattern;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::TrainingError;
use crate::resolved_settings::ResolvedSettings;
use crate::settings::{BatchNormStatistics, TrainSettings};

/// LoRA: the model stays as it is, and two thin matrices for each target are trained, whose product is added to its weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LoraSettings {
    /// Rows of the one matrix and columns of the other: what is added to a weight has this rank.
    pub rank: usize,
    /// What is added is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// Patterns of the names of linear layers and pointwise convolutions, as NeMo or transformers has them: regular
    /// expressions that match a whole name or its end after a dot. All layers: `linear.*`, `pointwise_conv[12]`, `joint.(enc|pred)`.
    pub targets: Vec<String>,
    /// Dropout of the matrices' input. Only 0 can be trained with.
    pub dropout: f64,
}

impl Default for LoraSettings {
    fn default() -> Self {
        LoraSettings {
            rank: 16,
            alpha: 32.0,
            targets: ["linear_q", "linear_k", "linear_v", "linear_out", "linear1", "linear2"]
                .map(String::from)
                .to_vec(),
            dropout: 0.0,
        }
    }
}

/// How the parameters are trained whose names a pattern matches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupSettings {
    /// A regular expression that matches a whole name of NeMo's state dict, or its end after a dot: `encoder\.layers\.[0-5]\..*`,
    /// `bias`, `joint\..*`.
    pub pattern: String,
    /// Factor on the learning rate of the schedule.
    #[serde(default = "one")]
    pub scale: f64,
    /// Do not train them.
    #[serde(default)]
    pub freeze: bool,
}

fn one() -> f64 {
    1.0
}

/// The largest rank: that of the largest matrices.
const MAX_RANK: usize = 4096;

/// Refuses values of `lora` and `groups` that cannot be used.
pub(crate) fn validate(settings: &TrainSettings) -> Result<(), TrainingError> {
    for (number, group) in settings.groups.iter().enumerate() {
        let refuse = |key: &str, message: String| {
            let path = format!("groups[{number}].{key}");
            Err(TrainingError::setting(path, message))
        };
        if let Err(error) = NamePattern::new(&group.pattern) {
            return refuse("pattern", error.to_string());
        }
        if !(group.scale.is_finite() && group.scale > 0.0) {
            return refuse(
                "scale",
                "it must be a number above 0 (`freeze: true` trains nothing)".into(),
            );
        }
        if group.freeze && group.scale != 1.0 {
            return refuse("scale", "what is frozen has no learning rate".into());
        }
        if group.freeze && settings.batch_norm == BatchNormStatistics::Sync {
            return refuse(
                "freeze",
                "it goes with `batch_norm: rank` and `frozen`, not with `sync`".into(),
            );
        }
    }
    let Some(lora) = &settings.lora else { return Ok(()) };
    let refuse = |key: &str, message: &str| Err(TrainingError::setting(format!("lora.{key}"), message));
    if !(1..=MAX_RANK).contains(&lora.rank) {
        return refuse("rank", &format!("it must be from 1 to {MAX_RANK}"));
    }
    if !(lora.alpha.is_finite() && lora.alpha > 0.0) {
        return refuse("alpha", "it must be a number above 0");
    }
    if lora.dropout != 0.0 {
        return refuse(
            "dropout",
            "only 0 is possible: the matrices have the input of their layer, to which the model's own dropout was applied",
        );
    }
    if lora.targets.is_empty() {
        return refuse("targets", "name at least one pattern");
    }
    for target in &lora.targets {
        if let Err(error) = NamePattern::new(target) {
            return refuse("targets", &error.to_string());
        }
    }
    let refuse = |path: &str, message: &str| Err(TrainingError::setting(path, message));
    if settings.init == "none" {
        return refuse("init", "`lora` adapts a trained model: name one");
    }
    if settings.unfreeze_step != 0 {
        return refuse(
            "unfreeze_step",
            "with `lora` it must be 0: the model is frozen in all steps",
        );
    }
    if settings.batch_norm != BatchNormStatistics::Frozen {
        return refuse(
            "batch_norm",
            "with `lora` it must be `frozen`: an adapter has no statistics of batch normalisation",
        );
    }
    if settings.master_weights {
        return refuse("master_weights", "with `lora` all that is trained is in 32 bits anyway");
    }
    Ok(())
}

impl LoraSettings {
    fn config(&self, base: &str) -> LoraConfig {
        LoraConfig {
            rank: self.rank,
            alpha: self.alpha,
            targets: self.targets.clone(),
            base: base.to_string(),
        }
    }
}

/// The model before its first step as it is trained: with new matrices of LoRA where the settings ask for them.
pub(crate) fn with_new_matrices(model: TdtModel, settings: &ResolvedSettings) -> Result<TdtModel, TrainingError> {
    let Some(lora) = &settings.lora else {
        return Ok(model);
    };
    let adapted = model.with_lora(lora.config(&settings.init), Vec::new(), settings.seed);
    adapted.map_err(|error| TrainingError::setting("lora", error))
}

/// The model of a checkpoint with which training continues, its matrices stored as `matrices`: where it has an adapter, with LoRA's
/// matrices beside weights that are those of `init`.
pub(crate) fn continued(
    checkpoint: &Path,
    settings: &ResolvedSettings,
    matrices: DType,
    device: &Device,
) -> Result<TdtModel, TrainingError> {
    let (opened, adapter) = OpenModel::open_apart(checkpoint)?;
    let refuse = |message: String| {
        TrainingError::refused(
            format!("checkpoint {}: {message}", checkpoint.display()),
            "undo the change of `lora`, or set `train.on_change: restart` to start over beside it",
        )
    };
    let (lora, adapter) = match (&settings.lora, adapter) {
        (None, None) => return Ok(TdtModel::load_storing(checkpoint, DType::F32, matrices, device)?),
        (Some(_), None) => return Err(refuse("it was trained without `lora`".into())),
        (None, Some(_)) => return Err(refuse("it was trained with `lora`".into())),
        (Some(lora), Some(adapter)) => (lora, adapter),
    };
    let config = ModelConfig::from_nemo_yaml(&opened.config_yaml)?;
    let model = TdtModel::from_open(opened, config, DType::F32, matrices, device)?;
    let given = given_matrices(&adapter, lora.config("").scale()).map_err(refuse)?;
    let count = given.len();
    let adapted = model.with_lora(lora.config(&settings.init), given, settings.seed);
    let model = adapted.map_err(|error| refuse(error.to_string()))?;
    let found = model.parameters.iter().filter(|(_, p)| module_of(&p.name).is_some());
    match found.count() {
        found if found == count => Ok(model),
        found => Err(refuse(format!(
            "it has {count} matrices of LoRA, and the settings ask for {found}"
        ))),
    }
}

/// The matrices of an adapter, if its factor is this one.
fn given_matrices(adapter: &Adapter, scale: f64) -> Result<Vec<(String, Tensor)>, String> {
    let matrices = adapter.matrices().map_err(|error| error.to_string())?;
    matrices
        .into_iter()
        .map(|(name, matrix, found)| match found == scale {
            true => Ok((name, matrix)),
            false => Err(format!(
                "`{name}` has the factor {found}, and the settings ask for {scale}"
            )),
        })
        .collect()
}

/// Applies `groups`: freezes parameters, and gives the factors on the learning rate of others, by name. Of several patterns that
/// match a name the first one counts.
///
/// # Errors
/// Where a pattern matches no parameter that is trained, or nothing is left to train.
pub(crate) fn apply_groups(
    groups: &[GroupSettings],
    model: &mut TdtModel,
) -> Result<BTreeMap<String, f64>, TrainingError> {
    let (factors, matched) = freeze_and_scale(groups, model)?;
    if let Some(number) = matched.iter().position(|matched| !matched) {
        let message = format!(
            "`{}` matches the name of no parameter that is trained; `flow model info --tensors` lists names",
            groups[number].pattern
        );
        return Err(TrainingError::setting(format!("groups[{number}].pattern"), message));
    }
    if model.parameters.count_trainable() == 0 {
        return Err(TrainingError::setting(
            "groups",
            "all parameters are frozen: nothing is left to train",
        ));
    }
    Ok(factors)
}

/// [`apply_groups`] without its checks: the factors, and which of the groups match a parameter that is trained.
fn freeze_and_scale(
    groups: &[GroupSettings],
    model: &mut TdtModel,
) -> Result<(BTreeMap<String, f64>, Vec<bool>), TrainingError> {
    let mut factors = BTreeMap::new();
    let mut patterns = Vec::with_capacity(groups.len());
    for (number, group) in groups.iter().enumerate() {
        let wrong = |error| TrainingError::setting(format!("groups[{number}].pattern"), error);
        patterns.push((NamePattern::new(&group.pattern).map_err(wrong)?, group, false));
    }
    let trained: Vec<_> = (model.parameters.iter())
        .filter(|(_, parameter)| parameter.trainable)
        .map(|(id, parameter)| (id, parameter.name.clone()))
        .collect();
    for (id, name) in trained {
        let mut first = true;
        for (pattern, group, matched) in &mut patterns {
            if !pattern.matches(&name) {
                continue;
            }
            *matched = true;
            if !std::mem::take(&mut first) {
                continue;
            }
            if group.freeze {
                model.parameters.set_trainable(id, false);
            } else if group.scale != 1.0 {
                factors.insert(name.clone(), group.scale);
            }
        }
    }
    Ok((factors, patterns.into_iter().map(|(.., matched)| matched).collect()))
}

/// Makes a model with fewer encoder layers trainable as the whole one is, to measure its memory. Patterns that match nothing here
/// may do so there.
pub(crate) fn applied_to_shallow(mut model: TdtModel, settings: &ResolvedSettings) -> Result<TdtModel, TrainingError> {
    let names: Vec<String> = model.parameters.iter().map(|(_, p)| p.name.clone()).collect();
    if let Some(lora) = &settings.lora {
        let modules = names.iter().filter_map(|name| name.strip_suffix(".weight"));
        let modules: Vec<(&str, String)> = modules
            .map(|module| (module, flow_model::checkpoint::huggingface_module(module)))
            .collect();
        let mut config = lora.config("");
        config.targets.retain(|target| {
            let pattern = NamePattern::new(target);
            pattern.is_ok_and(|pattern| {
                let matches = |(ours, theirs): &(&str, String)| pattern.matches(ours) || pattern.matches(theirs);
                modules.iter().any(matches)
            })
        });
        if config.targets.is_empty() {
            let ids: Vec<_> = model.parameters.iter().map(|(id, _)| id).collect();
            for id in ids {
                model.parameters.set_trainable(id, false);
            }
            return Ok(model);
        }
        model = model
            .with_lora(config, Vec::new(), 0)
            .map_err(|error| TrainingError::setting("lora", error))?;
    }
    freeze_and_scale(&settings.groups, &mut model)?;
    Ok(model)
}
