//! How two models on disk differ.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::DType;
use serde_json::Value;

use super::{OpenModel, TensorEntry, broken};
use crate::config::ModelConfig;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// The differences between a first and a second model; none if all lists are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelDiff {
    /// Tensors that only the first has.
    pub only_first: Vec<String>,
    /// Tensors that only the second has.
    pub only_second: Vec<String>,
    /// Tensors that both have, with other types, shapes or values.
    pub tensors: Vec<TensorDiff>,
    /// Tensors that both have, in all.
    pub compared: usize,
    pub configuration: Vec<ConfigurationDiff>,
    /// One line for each way in which the tokenizers differ.
    pub tokenizer: Vec<String>,
}

impl ModelDiff {
    pub fn is_empty(&self) -> bool {
        self.only_first.is_empty()
            && self.only_second.is_empty()
            && self.tensors.is_empty()
            && self.configuration.is_empty()
            && self.tokenizer.is_empty()
    }
}

/// A value of the configuration that differs.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigurationDiff {
    /// The path to it, such as `encoder.n_layers`.
    pub key: String,
    /// The value in each model; none where it is absent.
    pub first: Option<String>,
    pub second: Option<String>,
}

/// A tensor that differs.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorDiff {
    pub name: String,
    pub dtypes: (DType, DType),
    pub shapes: (Vec<usize>, Vec<usize>),
    /// None where the shapes differ.
    pub values: Option<ValueDiff>,
}

/// How values differ; two NaN in one place are equal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValueDiff {
    /// Number of values that differ.
    pub count: usize,
    /// Largest absolute difference; infinite where one value is not a number.
    pub largest: f64,
    /// The largest difference divided by the largest absolute value of the first tensor.
    pub relative: f64,
}

/// Compares two models, one tensor of each in memory at a time.
pub fn diff(first: &OpenModel, second: &OpenModel) -> Result<ModelDiff> {
    let (left, right) = (by_name(first), by_name(second));
    let mut found = ModelDiff {
        only_first: left.keys().filter(|name| !right.contains_key(*name)).cloned().collect(),
        only_second: right.keys().filter(|name| !left.contains_key(*name)).cloned().collect(),
        configuration: configurations(first, second)?,
        tokenizer: tokenizers(first, second)?,
        ..ModelDiff::default()
    };
    for (name, a) in &left {
        let Some(b) = right.get(name) else { continue };
        found.compared += 1;
        let values = if a.shape() == b.shape() {
            Some(values(a, b)?)
        } else {
            None
        };
        if a.dtype() != b.dtype() || values.is_none_or(|values| values.count > 0) {
            found.tensors.push(TensorDiff {
                name: name.clone(),
                dtypes: (a.dtype(), b.dtype()),
                shapes: (a.shape().to_vec(), b.shape().to_vec()),
                values,
            });
        }
    }
    Ok(found)
}

/// The last layer of the joint network is `joint_net.1` without dropout and `joint_net.2` with: both count as the same
/// name.
fn by_name(model: &OpenModel) -> BTreeMap<String, &TensorEntry> {
    let name = |entry: &TensorEntry| entry.name.replace("joint.joint_net.1.", "joint.joint_net.2.");
    model.tensors.iter().map(|entry| (name(entry), entry)).collect()
}

fn values(a: &TensorEntry, b: &TensorEntry) -> Result<ValueDiff> {
    let load =
        |entry: &TensorEntry| -> Result<Vec<f64>> { Ok(entry.load()?.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?) };
    let (a, b) = (load(a)?, load(b)?);
    let mut found = ValueDiff {
        count: 0,
        largest: 0.0,
        relative: 0.0,
    };
    let mut size = 0.0f64;
    for (x, y) in a.iter().zip(&b) {
        size = size.max(x.abs());
        if x != y && !(x.is_nan() && y.is_nan()) {
            found.count += 1;
            let difference = (x - y).abs();
            found.largest = found
                .largest
                .max(if difference.is_nan() { f64::INFINITY } else { difference });
        }
    }
    found.relative = if size > 0.0 {
        found.largest / size
    } else {
        found.largest
    };
    Ok(found)
}

fn configurations(first: &OpenModel, second: &OpenModel) -> Result<Vec<ConfigurationDiff>> {
    let flat = |model: &OpenModel| -> Result<BTreeMap<String, String>> {
        let config = ModelConfig::from_nemo_yaml(&model.config_yaml).map_err(|error| broken(&model.path, error))?;
        let mut value = serde_json::to_value(&config).map_err(|error| Error::Config(error.to_string()))?;
        if let Value::Object(sections) = &mut value {
            // Not compared: the document as it was read, names within an archive, and the pieces, which belong to the
            // tokenizer.
            for section in ["source", "tokenizer", "labels"] {
                sections.remove(section);
            }
        }
        let mut found = BTreeMap::new();
        flatten(&value, String::new(), &mut found);
        Ok(found)
    };
    let (left, right) = (flat(first)?, flat(second)?);
    let keys: BTreeSet<&String> = left.keys().chain(right.keys()).collect();
    Ok(keys
        .into_iter()
        .filter(|key| left.get(*key) != right.get(*key))
        .map(|key| ConfigurationDiff {
            key: key.clone(),
            first: left.get(key).cloned(),
            second: right.get(key).cloned(),
        })
        .collect())
}

fn flatten(value: &Value, path: String, found: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                flatten(value, path, found);
            }
        }
        value => {
            found.insert(path, value.to_string());
        }
    }
}

fn tokenizers(first: &OpenModel, second: &OpenModel) -> Result<Vec<String>> {
    let read = |model: &OpenModel| model.tokenizer.as_deref().map(Tokenizer::from_bytes).transpose();
    let (a, b) = match (read(first)?, read(second)?) {
        (None, None) => return Ok(Vec::new()),
        (Some(_), None) => return Ok(vec!["only the first model has a tokenizer".into()]),
        (None, Some(_)) => return Ok(vec!["only the second model has a tokenizer".into()]),
        (Some(a), Some(b)) => (a, b),
    };
    if a.bytes() == b.bytes() {
        return Ok(Vec::new());
    }
    let (left, right) = (a.pieces(), b.pieces());
    let missing = |these: &[String], others: &[String]| {
        let others: BTreeSet<&String> = others.iter().collect();
        these.iter().filter(|piece| !others.contains(piece)).count()
    };
    let (only_a, only_b) = (missing(&left, &right), missing(&right, &left));
    let mut lines = Vec::new();
    if only_a + only_b > 0 {
        lines.push(format!(
            "{} pieces against {}: {only_a} only in the first, {only_b} only in the second",
            left.len(),
            right.len()
        ));
    }
    let moved = (left.iter().enumerate())
        .filter(|(id, piece)| b.id(piece).is_some_and(|other| other as usize != *id))
        .count();
    if moved > 0 {
        lines.push(format!("{moved} pieces have another id"));
    }
    if lines.is_empty() {
        lines.push("the same pieces, in another file: scores, kinds or normalisation differ".into());
    }
    Ok(lines)
}
