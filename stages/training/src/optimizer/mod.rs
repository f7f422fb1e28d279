//! AdamW and gradient clipping, as in torch and NeMo; with moments in 32 or in 8 bits.
//!
//! NeMo uses one parameter group: weight decay acts on biases, norms and embeddings too. A parameter
//! without a gradient (frozen, or untouched by the loss) is left as it is, decay included.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use candle_core::Tensor;
use flow_kernels::adamw::eight_bit::BLOCK;
use flow_kernels::adamw::{DeviceTables, Moment, Numbers, Update, seed, update};
use flow_kernels::squares::sum_of_squares;
use flow_model::{Gradients, ParameterId, Parameters};
use safetensors::tensor::{Dtype, Metadata, SafeTensors, TensorInfo, View};
use serde::{Deserialize, Serialize};

use crate::error::TrainingError;

pub use flow_kernels::adamw::moment_bytes;

/// Name of the metadata entry of a state file.
const STATE: &str = "state";

#[derive(Deserialize)]
struct State {
    optimizer: String,
    /// Updates that each parameter has had.
    steps: BTreeMap<String, u64>,
}

/// Coefficients of AdamW.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamWConfig {
    pub betas: (f64, f64),
    pub epsilon: f64,
    pub weight_decay: f64,
    /// Keep the moments in eight bits, but for small tensors: a quarter of the memory.
    pub eight_bit: bool,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        AdamWConfig {
            betas: (0.9, 0.98),
            epsilon: 1e-8,
            weight_decay: 1e-3,
            eight_bit: false,
        }
    }
}

/// Running mean of the gradient and of its square, for one parameter.
#[derive(Debug, PartialEq)]
struct Moments {
    /// Updates this parameter has had.
    steps: u64,
    shape: Vec<usize>,
    first: Moment,
    second: Moment,
}

/// AdamW with decoupled weight decay. Works in place on the parameters; its own state is kept by name, where the parameter
/// lies.
#[derive(Debug)]
pub struct AdamW {
    pub config: AdamWConfig,
    moments: BTreeMap<String, Moments>,
    tables: DeviceTables,
}

impl PartialEq for AdamW {
    fn eq(&self, other: &Self) -> bool {
        self.config == other.config && self.moments == other.moments
    }
}

/// Tensors and metadata of a safetensors file.
type Stored<'a> = (Vec<(String, NumbersView<'a>)>, HashMap<String, String>);

impl AdamW {
    pub fn new(config: AdamWConfig) -> Self {
        AdamW {
            config,
            moments: BTreeMap::new(),
            tables: DeviceTables::default(),
        }
    }

    /// A copy in host memory.
    pub fn on_host(&self) -> Result<Self, TrainingError> {
        let mut copy = AdamW::new(self.config);
        for (name, moments) in &self.moments {
            let moments = Moments {
                steps: moments.steps,
                shape: moments.shape.clone(),
                first: Moment::Host(moments.first.on_host()?.into_owned()),
                second: Moment::Host(moments.second.on_host()?.into_owned()),
            };
            copy.moments.insert(name.clone(), moments);
        }
        Ok(copy)
    }

    /// Keeps the moments of those parameters that `keep` names; the others are forgotten.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.moments.retain(|name, _| keep(name));
    }

    /// Takes in the moments of other parameters.
    pub fn extend(&mut self, other: AdamW) {
        self.moments.extend(other.moments);
    }

    /// One update with learning rate `rate`. Every gradient is multiplied by `scale` first (the clipping
    /// factor; 1 leaves it exactly as it is).
    pub fn step(
        &mut self,
        parameters: &Parameters,
        gradients: &Gradients,
        rate: f64,
        scale: f64,
    ) -> Result<(), TrainingError> {
        let all: Vec<ParameterId> = parameters.iter().map(|(id, _)| id).collect();
        self.step_of(&all, parameters, gradients, rate, scale)
    }

    /// The same for some of the parameters.
    pub fn step_of(
        &mut self,
        ids: &[ParameterId],
        parameters: &Parameters,
        gradients: &Gradients,
        rate: f64,
        scale: f64,
    ) -> Result<(), TrainingError> {
        for &id in ids {
            let parameter = parameters.parameter(id);
            let Some(gradient) = gradients.get(id) else { continue };
            if !parameter.trainable {
                continue;
            }
            let moments = match self.moments.get_mut(&parameter.name) {
                Some(moments) => moments,
                None => {
                    let (dtype, len) = (parameter.tensor.dtype(), parameter.tensor.elem_count());
                    let fresh = Moments {
                        steps: 0,
                        shape: parameter.tensor.dims().to_vec(),
                        first: Moment::Host(Numbers::zeros(dtype, len, self.config.eight_bit)?),
                        second: Moment::Host(Numbers::zeros(dtype, len, self.config.eight_bit)?),
                    };
                    self.moments.entry(parameter.name.clone()).or_insert(fresh)
                }
            };
            if moments.shape != parameter.tensor.dims() {
                return Err(TrainingError::Data {
                    message: format!(
                        "optimizer state of {} has shape {:?}, the parameter {:?}",
                        parameter.name,
                        moments.shape,
                        parameter.tensor.dims()
                    ),
                });
            }
            moments.steps += 1;
            let AdamWConfig {
                betas,
                epsilon,
                weight_decay,
                ..
            } = self.config;
            let scalars = Update::new(betas, epsilon, weight_decay, moments.steps, rate, scale);
            update(
                &parameter.tensor,
                &gradient.contiguous()?,
                (&mut moments.first, &mut moments.second),
                &scalars,
                seed(&parameter.name, moments.steps),
                &mut self.tables,
            )?;
        }
        Ok(())
    }

    /// Names of the parameters that have moments.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.moments.keys().map(String::as_str)
    }

    /// The state as safetensors: `first.<name>`, `second.<name>`, and the update counts as metadata; where these are codes
    /// of eight bits, `first_scale.<name>` and `second_scale.<name>` too.
    fn stored<'a>(&'a self, keep: impl Fn(&str) -> bool) -> Result<Stored<'a>, TrainingError> {
        let mut tensors: Vec<(String, NumbersView<'_>)> = Vec::with_capacity(self.moments.len() * 2);
        let mut steps = BTreeMap::new();
        for (name, moments) in self.moments.iter().filter(|(name, _)| keep(name)) {
            for (part, numbers) in [("first", &moments.first), ("second", &moments.second)] {
                let numbers = numbers.on_host()?;
                let scales = numbers.scales();
                tensors.push((format!("{part}.{name}"), NumbersView(numbers, moments.shape.clone())));
                if let Some(scales) = scales {
                    let shape = vec![scales.bytes().len() / size_of::<f32>()];
                    tensors.push((format!("{part}_scale.{name}"), NumbersView(Cow::Owned(scales), shape)));
                }
            }
            steps.insert(name.as_str(), moments.steps);
        }
        let state = serde_json::json!({ "optimizer": "adamw", "steps": steps }).to_string();
        // One metadata entry only: the format keeps them in a hash map, whose order is not fixed.
        Ok((tensors, HashMap::from([(STATE.to_owned(), state)])))
    }

    /// Writes the state to a file: the bytes that `safetensors::serialize` gives, which are not made in memory first. (The
    /// library's own way to write a file makes one that nobody but its owner may read, whatever the umask.)
    pub fn save(&self, path: &Path) -> Result<(), TrainingError> {
        let (mut tensors, metadata) = self.stored(|_| true)?;
        tensors.sort_by(|(a, left), (b, right)| right.dtype().cmp(&left.dtype()).then_with(|| a.cmp(b)));
        let mut end = 0;
        let infos = tensors.iter().map(|(name, view)| {
            let begin = end;
            end += view.data_len();
            let info = TensorInfo {
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                data_offsets: (begin, end),
            };
            (name.clone(), info)
        });
        let infos = infos.collect();
        let wrong = |error: &dyn std::fmt::Display| TrainingError::Data {
            message: format!("{}: optimizer state cannot be written: {error}", path.display()),
        };
        let metadata = Metadata::new(Some(metadata), infos).map_err(|error| wrong(&error))?;
        let mut header = serde_json::to_vec(&metadata).map_err(|error| wrong(&error))?;
        header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
        let write = || -> std::io::Result<()> {
            let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
            out.write_all(&(header.len() as u64).to_le_bytes())?;
            out.write_all(&header)?;
            for (_, view) in &tensors {
                out.write_all(&view.data())?;
            }
            out.flush()
        };
        write().map_err(TrainingError::file(path))
    }

    /// The bytes that [`AdamW::save`] would write if there were the moments of this parameter alone.
    pub fn bytes_of(&self, name: &str) -> Result<Vec<u8>, TrainingError> {
        let (tensors, metadata) = self.stored(|other| other == name)?;
        safetensors::serialize(tensors, Some(metadata)).map_err(|e| TrainingError::Data {
            message: format!("optimizer state of {name} cannot be written: {e}"),
        })
    }

    /// Reads what [`AdamW::save`] wrote. The coefficients are not part of it; moments stay in as many bits as they have.
    pub fn load(path: &Path, config: AdamWConfig) -> Result<Self, TrainingError> {
        let bytes = std::fs::read(path).map_err(TrainingError::file(path))?;
        Self::from_bytes(&bytes, config, &path.display())
    }

    /// Reads the bytes of such a file; `whence` is named where they cannot be read.
    pub fn from_bytes(
        bytes: &[u8],
        config: AdamWConfig,
        whence: &dyn std::fmt::Display,
    ) -> Result<Self, TrainingError> {
        let bad = |message: String| TrainingError::Data {
            message: format!("{whence}: {message}"),
        };
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| bad(e.to_string()))?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| bad(e.to_string()))?;
        let metadata = header
            .metadata()
            .as_ref()
            .ok_or_else(|| bad("it has no metadata".into()))?;
        let state: State = metadata
            .get(STATE)
            .and_then(|text| serde_json::from_str(text).ok())
            .ok_or_else(|| bad("its update counts cannot be read".into()))?;
        if state.optimizer != "adamw" {
            return Err(bad(format!(
                "it holds the state of optimizer {}, not of adamw",
                state.optimizer
            )));
        }
        let mut moments = BTreeMap::new();
        for (name, steps) in state.steps {
            let read = |part: &str| -> Result<(Moment, Vec<usize>), TrainingError> {
                let view = tensors
                    .tensor(&format!("{part}.{name}"))
                    .map_err(|e| bad(format!("{part}.{name}: {e}")))?;
                let numbers = match view.dtype() {
                    Dtype::F32 => Numbers::F32(
                        view.data()
                            .as_chunks::<4>()
                            .0
                            .iter()
                            .map(|b| f32::from_le_bytes(*b))
                            .collect(),
                    ),
                    Dtype::F64 => Numbers::F64(
                        view.data()
                            .as_chunks::<8>()
                            .0
                            .iter()
                            .map(|b| f64::from_le_bytes(*b))
                            .collect(),
                    ),
                    Dtype::U8 => {
                        let scales = tensors
                            .tensor(&format!("{part}_scale.{name}"))
                            .map_err(|e| bad(format!("{part}_scale.{name}: {e}")))?;
                        let codes = view.data().to_vec();
                        let (scales, rest) = scales.data().as_chunks::<4>();
                        if !rest.is_empty() || scales.len() != codes.len().div_ceil(BLOCK) {
                            return Err(bad(format!("{part}_scale.{name} does not fit {part}.{name}")));
                        }
                        let scales = scales.iter().map(|b| f32::from_le_bytes(*b)).collect();
                        Numbers::Coded { codes, scales }
                    }
                    other => return Err(bad(format!("{part}.{name} has type {other:?}"))),
                };
                Ok((Moment::Host(numbers), view.shape().to_vec()))
            };
            let (first, shape) = read("first")?;
            let (second, second_shape) = read("second")?;
            if shape != second_shape {
                return Err(bad(format!("first.{name} and second.{name} differ in shape")));
            }
            moments.insert(
                name,
                Moments {
                    steps,
                    shape,
                    first,
                    second,
                },
            );
        }
        Ok(AdamW {
            config,
            moments,
            tables: DeviceTables::default(),
        })
    }
}

struct NumbersView<'a>(Cow<'a, Numbers>, Vec<usize>);

impl View for NumbersView<'_> {
    fn dtype(&self) -> Dtype {
        match *self.0 {
            Numbers::F32(_) => Dtype::F32,
            Numbers::F64(_) => Dtype::F64,
            Numbers::Coded { .. } => Dtype::U8,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.1
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.0.bytes())
    }

    fn data_len(&self) -> usize {
        self.0.bytes().len()
    }
}

/// Square of the global L2 norm of all gradients of trainable parameters. Summed in 64 bits, chunk by chunk in a fixed
/// order.
pub fn squared_norm(parameters: &Parameters, gradients: &Gradients) -> Result<f64, TrainingError> {
    let taken = |(id, parameter): (_, &flow_model::Parameter)| {
        let gradient = gradients.get(id).filter(|_| parameter.trainable);
        gradient.cloned()
    };
    let gradients: Vec<Tensor> = parameters.iter().filter_map(taken).collect();
    Ok(sum_of_squares(&gradients)?)
}

/// The factor that brings gradients of global norm `norm` down to `clip`: `clip / (norm + 1e-6)`, at most
/// 1. A `clip` of 0 means no clipping.
pub fn clip_factor(norm: f64, clip: f64) -> f64 {
    if clip > 0.0 {
        (clip / (norm + 1e-6)).min(1.0)
    } else {
        1.0
    }
}

#[cfg(test)]
mod tests;
