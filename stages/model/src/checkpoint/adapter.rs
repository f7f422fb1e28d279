//! LoRA adapters in the files of PEFT: `adapter_config.json` and `adapter_model.safetensors`. They are added to the weights of a
//! model when it is opened, or written beside those of a model in training.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use super::huggingface::{huggingface_module, nemo_name};
use super::{OpenModel, TensorEntry, broken, open_tensors, write_safetensors};
use crate::{Error, Result};
use flow_nn::lora::{A, B, LoraConfig};
use flow_nn::patterns::NamePattern;
use flow_nn::tensor_files::files::{read_small, write_renamed};
use flow_nn::tensor_files::tensor_entry::{LowRankSum, is_finite};

pub const ADAPTER_CONFIG: &str = "adapter_config.json";
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
/// Older files of weights.
pub const ADAPTER_PICKLE: &str = "adapter_model.bin";
/// What PEFT puts before the names of a model's modules.
const PREFIX: &str = "base_model.model.";

/// A LoRA adapter on disk.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// The folder.
    pub path: PathBuf,
    /// The model that it is for, as the file names it.
    pub base: Option<String>,
    pairs: Vec<Pair>,
    /// Tensors that replace those of the model (PEFT's `modules_to_save`, and biases), with the name in the file.
    whole: Vec<(String, TensorEntry)>,
    /// Modules that the settings name and that have no tensors, and settings that are not known.
    notes: Vec<String>,
}

/// The two matrices of one module.
#[derive(Clone, Debug)]
struct Pair {
    /// NeMo's name of the module.
    module: String,
    /// The names of the tensors in the file.
    keys: [String; 2],
    /// (rank, in) and (out, rank), with as many axes of size 1 more as the weight has.
    a: Tensor,
    b: Tensor,
    scale: f64,
}

/// What is read of `adapter_config.json`.
#[derive(Deserialize)]
struct Config {
    base_model_name_or_path: Option<String>,
    r: usize,
    lora_alpha: f64,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    rank_pattern: Option<Ordered<usize>>,
    #[serde(default)]
    alpha_pattern: Option<Ordered<f64>>,
    #[serde(default)]
    target_modules: Value,
    #[serde(default)]
    modules_to_save: Value,
    #[serde(default)]
    init_lora_weights: Value,
    #[serde(flatten)]
    other: BTreeMap<String, Value>,
}

/// The members of a JSON object in their order, whose keys are patterns: of several that match, PEFT takes the first.
struct Ordered<T>(Vec<(NamePattern, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Ordered<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Members<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Members<T> {
            type Value = Ordered<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of patterns")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> std::result::Result<Ordered<T>, M::Error> {
                let mut members = Vec::new();
                while let Some((pattern, value)) = map.next_entry::<String, T>()? {
                    members.push((NamePattern::new(&pattern).map_err(serde::de::Error::custom)?, value));
                }
                Ok(Ordered(members))
            }
        }

        deserializer.deserialize_map(Members(PhantomData))
    }
}

/// Settings of PEFT with which an adapter is more than two matrices for each module.
const MORE_THAN_LORA: [&str; 13] = [
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "layer_replication",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "target_parameters",
    "megatron_config",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
];

/// Settings of PEFT that do not change what its files mean, beside those of [`Config`].
const WITHOUT_EFFECT: [&str; 20] = [
    "arrow_config",
    "auto_mapping",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
];

/// Ways to begin with which PEFT changes the weights of the model too, so that the adapter is for other weights.
const OTHER_BASE: [&str; 5] = ["pissa", "olora", "loftq", "corda", "lora_ga"];

impl Config {
    fn read(path: &Path) -> Result<Self> {
        let text = read_small(path)?;
        let value: Value =
            serde_json::from_slice(&text).map_err(|error| broken(path, format!("is not JSON: {error}")))?;
        let kind = &value["peft_type"];
        if kind != "LORA" {
            return Err(broken(
                path,
                format!("`peft_type` is {kind}; only adapters of type \"LORA\" can be read"),
            ));
        }
        for key in MORE_THAN_LORA {
            if is_used(&value[key]) {
                return Err(broken(
                    path,
                    format!("`{key}` is {}, which is not supported", value[key]),
                ));
            }
        }
        // Not from the value, which sorts the members.
        let config: Config = serde_json::from_slice(&text).map_err(|error| broken(path, error))?;
        // Switches of later versions: with one that is on, PEFT computes something else from the same matrices.
        if let Some((key, _)) = config
            .other
            .iter()
            .find(|(key, value)| key.starts_with("use_") && **value == true)
        {
            return Err(broken(path, format!("`{key}` is true, which is not supported")));
        }
        if let Some(how) = config.init_lora_weights.as_str()
            && let Some(other) = OTHER_BASE.iter().find(|other| how.starts_with(*other))
        {
            let what = "the adapter is for weights that PEFT changed when training began; convert it with PEFT first";
            return Err(broken(
                path,
                format!("`init_lora_weights` is `{how}`: with {other} {what}"),
            ));
        }
        Ok(config)
    }

    /// Notes about settings that are not known.
    fn unknown(&self, path: &Path) -> Vec<String> {
        let unknown = self.other.iter().filter(|(key, value)| {
            let known = MORE_THAN_LORA.iter().chain(&WITHOUT_EFFECT);
            is_used(value) && !known.into_iter().any(|known| known == key)
        });
        let told = unknown.map(|(key, value)| {
            let (file, value) = (path.display(), value.to_string());
            let value = value.chars().take(60).collect::<String>();
            format!("{file}: the setting `{key}` ({value}) is not known and has no effect")
        });
        told.collect()
    }

    /// Notes about modules that `target_modules` and `modules_to_save` list by name and for which there is no tensor.
    fn without_tensors(&self, adapted: &[&str], whole: &[(String, TensorEntry)]) -> Vec<String> {
        let names = |list: &Value| -> Vec<String> {
            let list = list.as_array().into_iter().flatten();
            list.filter_map(|name| name.as_str().map(str::to_owned)).collect()
        };
        let is_of = |module: &str, name: &str| module == name || module.ends_with(&format!(".{name}"));
        let targets = names(&self.target_modules).into_iter();
        let targets = targets
            .filter(|name| !adapted.iter().any(|module| is_of(module, name)))
            .map(|name| ("target_modules", name));
        let saved = names(&self.modules_to_save).into_iter();
        let saved = saved
            .filter(|name| !whole.iter().any(|(key, _)| key.contains(&format!("{name}."))))
            .map(|name| ("modules_to_save", name));
        targets
            .chain(saved)
            .map(|(setting, name)| format!("`{setting}` names `{name}`, for which the adapter has no tensors"))
            .collect()
    }

    /// Rank and factor of a module, by its name in the file.
    fn of(&self, module: &str) -> Result<(usize, f64)> {
        let rank = value_of(self.rank_pattern.as_ref(), module).unwrap_or(self.r);
        let alpha = value_of(self.alpha_pattern.as_ref(), module).unwrap_or(self.lora_alpha);
        let divisor = match self.use_rslora {
            true => (rank as f64).sqrt(),
            false => rank as f64,
        };
        let scale = alpha / divisor;
        match rank > 0 && (scale as f32).is_finite() {
            true => Ok((rank, scale)),
            false => Err(Error::Input(format!(
                "rank {rank} and alpha {alpha} of `{module}` give no factor"
            ))),
        }
    }
}

/// Whether a setting is other than PEFT writes it where it is not used.
fn is_used(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => true,
    }
}

fn value_of<T: Copy>(patterns: Option<&Ordered<T>>, module: &str) -> Option<T> {
    let mut patterns = patterns.into_iter().flat_map(|patterns| &patterns.0);
    let found = patterns.find(|(pattern, _)| pattern.matches(module));
    found.map(|(_, value)| *value)
}

/// Whether a folder has an adapter.
pub(super) fn is_adapter(folder: &Path) -> bool {
    folder.join(ADAPTER_CONFIG).is_file()
}

/// The file with the weights of an adapter.
pub(super) fn weights_of(folder: &Path) -> PathBuf {
    let (safetensors, pickle) = (folder.join(ADAPTER_WEIGHTS), folder.join(ADAPTER_PICKLE));
    match !safetensors.exists() && pickle.exists() {
        true => pickle,
        false => safetensors,
    }
}

/// A path `MODEL+ADAPTER` as its two parts: `ADAPTER` is a folder with PEFT's files. None for any other path.
pub fn base_and_adapter(path: &Path) -> Option<(PathBuf, PathBuf)> {
    if path.exists() {
        return None;
    }
    let text = path.to_str()?;
    let mut parts = text.rmatch_indices('+').map(|(at, _)| (&text[..at], &text[at + 1..]));
    let (base, adapter) = parts.find(|(_, adapter)| is_adapter(Path::new(adapter)))?;
    Some((base.into(), adapter.into()))
}

impl Adapter {
    /// Reads an adapter whole: its matrices are small.
    ///
    /// # Errors
    /// Where it is damaged, of another type than LoRA, or of a form of it that is not supported; the message names setting or
    /// tensor.
    pub fn open(folder: &Path) -> Result<Self> {
        let config_path = folder.join(ADAPTER_CONFIG);
        let config = Config::read(&config_path)?;
        let path = weights_of(folder);
        let mut halves: BTreeMap<String, [Option<(String, Tensor)>; 2]> = BTreeMap::new();
        let mut whole = Vec::new();
        for mut entry in open_tensors(&path)? {
            let key = entry.name.clone();
            let name = key.strip_prefix(PREFIX).unwrap_or(&key);
            let name = name.strip_prefix("model.").unwrap_or(name);
            let half = [A, B].iter().position(|ending| name.ends_with(ending));
            if half.is_none() && name.contains(".lora_") {
                return Err(broken(
                    &path,
                    format!("tensor `{key}` is of a form of LoRA that is not supported"),
                ));
            }
            let Some(half) = half else {
                finite(&path, &entry)?;
                entry.name = nemo_name(name);
                whole.push((key, entry));
                continue;
            };
            let module = name[..name.len() - A.len()].to_string();
            let tensor = finite(&path, &entry)?;
            let place = &mut halves.entry(module).or_default()[half];
            if let Some((other, _)) = place {
                return Err(broken(
                    &path,
                    format!("tensors `{other}` and `{key}` are for the same matrix"),
                ));
            }
            *place = Some((key, tensor));
        }
        let mut notes = config.without_tensors(&halves.keys().map(String::as_str).collect::<Vec<_>>(), &whole);
        notes.extend(config.unknown(&config_path));
        let mut pairs: Vec<Pair> = Vec::with_capacity(halves.len());
        for (module, halves) in halves {
            let [Some((key_a, a)), Some((key_b, b))] = halves else {
                let what = format!("`{module}` has one of `lora_A` and `lora_B` without the other");
                return Err(broken(&path, what));
            };
            // Patterns are for the names that PEFT has, with all their parts.
            let named = key_a.strip_prefix(PREFIX).unwrap_or(&key_a).trim_end_matches(A);
            let (rank, scale) = config.of(named).map_err(|error| broken(&config_path, error))?;
            for (key, tensor, at) in [(&key_a, &a, 0), (&key_b, &b, 1)] {
                if tensor.dims().get(at) != Some(&rank) || tensor.rank() < 2 {
                    let shape = tensor.dims();
                    let what = format!("tensor `{key}` has shape {shape:?}, but {ADAPTER_CONFIG} gives it rank {rank}");
                    return Err(broken(&path, what));
                }
            }
            let name = nemo_name(&format!("{module}.weight"));
            let module = name.strip_suffix(".weight").unwrap_or(&name).to_string();
            if let Some(other) = pairs.iter().find(|pair| pair.module == module) {
                let other = &other.keys[0];
                return Err(broken(
                    &path,
                    format!("tensors `{other}` and `{key_a}` are for the same module"),
                ));
            }
            pairs.push(Pair {
                module,
                keys: [key_a, key_b],
                a,
                b,
                scale,
            });
        }
        if pairs.is_empty() && whole.is_empty() {
            return Err(broken(&path, "has no tensors"));
        }
        Ok(Adapter {
            path: folder.to_path_buf(),
            base: config.base_model_name_or_path,
            pairs,
            whole,
            notes,
        })
    }

    /// The matrices by the names that they have in a model in training, (rank, in) and (out, rank), with the factor of their
    /// product.
    ///
    /// # Errors
    /// Where the adapter has tensors that are no such matrices.
    pub fn matrices(&self) -> Result<Vec<(String, Tensor, f64)>> {
        if let Some((key, _)) = self.whole.first() {
            return Err(broken(
                &self.path,
                format!("tensor `{key}` replaces one of the model, and is not a matrix of LoRA"),
            ));
        }
        let mut matrices = Vec::with_capacity(2 * self.pairs.len());
        for pair in &self.pairs {
            for (ending, tensor) in [(A, &pair.a), (B, &pair.b)] {
                let matrix = tensor.flatten_from(1)?;
                matrices.push((format!("{}{ending}", pair.module), matrix, pair.scale));
            }
        }
        Ok(matrices)
    }

    /// How many modules are adapted.
    pub fn modules(&self) -> usize {
        self.pairs.len()
    }
}

/// The values of a tensor of the adapter, in 32 bits or more.
fn finite(path: &Path, entry: &TensorEntry) -> Result<Tensor> {
    let tensor = entry.load()?;
    let wide = match tensor.dtype() {
        DType::F64 | DType::F32 => tensor,
        DType::F16 | DType::BF16 => tensor.to_dtype(DType::F32)?,
        other => {
            let what = format!(
                "tensor `{}` is of type {}, and no matrix of LoRA",
                entry.name,
                other.as_str()
            );
            return Err(broken(path, what));
        }
    };
    match is_finite(&wide)? {
        true => Ok(wide),
        false => Err(broken(
            path,
            format!("tensor `{}` has values that are not finite numbers", entry.name),
        )),
    }
}

impl OpenModel {
    /// The model with an adapter added to its weights, which are computed as they are read: `W + s B A` in the wider type of f32
    /// and that of `W`, where `s` is `alpha / r`, or `alpha / sqrt(r)` with `use_rslora`.
    ///
    /// # Errors
    /// Where a tensor of the adapter fits none of the model; the message names it.
    pub fn with_adapter(mut self, adapter: &Adapter) -> Result<Self> {
        let refuse = |what: String| Err(broken(&adapter.path, what));
        for pair in &adapter.pairs {
            let [key_a, key_b] = &pair.keys;
            let name = format!("{}.weight", pair.module);
            let Some(entry) = self.tensor_mut(&name) else {
                return refuse(format!(
                    "tensor `{key_a}` is for `{name}`, which {} does not have",
                    self.path.display()
                ));
            };
            let shape = entry.shape().to_vec();
            if shape.len() < 2 || shape[2..].iter().any(|&size| size != 1) || !entry.dtype().is_float() {
                let what = "is not a linear layer or pointwise convolution";
                return refuse(format!(
                    "tensor `{key_a}` is for `{name}`, which has shape {shape:?} and {what}"
                ));
            }
            let rank = pair.a.dims()[0];
            let expected = |first: usize, second: usize| [&[first, second][..], &shape[2..]].concat();
            for (key, tensor, expected) in [
                (key_a, &pair.a, expected(rank, shape[1])),
                (key_b, &pair.b, expected(shape[0], rank)),
            ] {
                if tensor.dims() != expected {
                    let found = tensor.dims();
                    return refuse(format!(
                        "tensor `{key}` has shape {found:?}, but for `{name}` of shape {shape:?} it has to be {expected:?}"
                    ));
                }
            }
            *entry = TensorEntry::low_rank_sum(LowRankSum {
                base: entry.clone(),
                a: pair.a.flatten_from(1)?,
                b: pair.b.flatten_from(1)?,
                scale: pair.scale,
            });
        }
        for (key, tensor) in &adapter.whole {
            let Some(entry) = self.tensor_mut(&tensor.name) else {
                let (name, path) = (&tensor.name, self.path.display());
                return refuse(format!("tensor `{key}` is for `{name}`, which {path} does not have"));
            };
            if entry.shape() != tensor.shape() || !tensor.dtype().is_float() {
                let (found, expected) = (tensor.shape(), entry.shape());
                return refuse(format!(
                    "tensor `{key}` has shape {found:?}, but the model's has {expected:?}"
                ));
            }
            let mut tensor = tensor.clone();
            tensor.name = std::mem::take(&mut entry.name);
            *entry = tensor;
        }
        let notes = adapter.notes.iter();
        self.notes
            .extend(notes.map(|note| format!("adapter {}: {note}", adapter.path.display())));
        self.notes.push(format!(
            "adapter {}: {} matrices are added to, {} tensors replaced",
            adapter.path.display(),
            adapter.pairs.len(),
            adapter.whole.len()
        ));
        Ok(self)
    }

    /// A tensor by its name, of which the last layer of the joint network has two.
    fn tensor_mut(&mut self, name: &str) -> Option<&mut TensorEntry> {
        let other = name.replacen("joint.joint_net.2.", "joint.joint_net.1.", 1);
        let at = [name, &other]
            .iter()
            .find_map(|name| self.tensors.iter().position(|entry| entry.name == **name))?;
        self.tensors.get_mut(at)
    }
}

/// Writes an adapter into a folder, the weights last: matrices with the names that they have in the model, (rank, in) and (out,
/// rank), and the number of axes of the weight that they are for.
pub fn write_adapter<'a>(
    folder: &Path,
    lora: &LoraConfig,
    matrices: impl IntoIterator<Item = (&'a str, &'a Tensor, usize)>,
) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|error| broken(folder, error))?;
    let (mut modules, mut tensors) = (Vec::new(), Vec::new());
    for (name, matrix, axes) in matrices {
        let ending = [A, B]
            .into_iter()
            .find(|ending| name.ends_with(ending))
            .unwrap_or_default();
        let module = huggingface_module(name.strip_suffix(ending).unwrap_or(name));
        let shape = [matrix.dims(), &vec![1; axes.saturating_sub(2)]].concat();
        let matrix = matrix.to_device(&Device::Cpu)?.reshape(shape)?;
        tensors.push((format!("{PREFIX}{module}{ending}"), matrix));
        if ending == A {
            modules.push(module);
        }
    }
    modules.sort();
    let whole = |number: f64| match number.fract() == 0.0 && number < 1e15 {
        true => json!(number as u64),
        false => json!(number),
    };
    let config = json!({
        "alpha_pattern": {},
        "auto_mapping": null,
        "base_model_name_or_path": lora.base,
        "bias": "none",
        "exclude_modules": null,
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": null,
        "layers_to_transform": null,
        "lora_alpha": whole(lora.alpha),
        "lora_dropout": 0.0,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": lora.rank,
        "rank_pattern": {},
        "revision": null,
        "target_modules": modules,
        "task_type": null,
        "use_dora": false,
        "use_rslora": false,
    });
    let path = folder.join(ADAPTER_CONFIG);
    let mut text = serde_json::to_string_pretty(&config).map_err(|error| broken(&path, error))?;
    text.push('\n');
    write_renamed(&path, |file| {
        file.write_all(text.as_bytes()).map_err(|error| broken(&path, error))
    })?;
    let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write_safetensors(&folder.join(ADAPTER_WEIGHTS), &tensors)
}

#[cfg(test)]
#[path = "adapter_tests.rs"]
mod tests;
