//! AdamW and gradient clipping, as in torch and NeMo; with moments in 32 or in 8 bits.
//!
//! NeMo uses one parameter group: weight decay acts on biases, norms and embeddings too. A parameter
//! without a gradient (frozen, or untouched by the loss) is left as it is, decay included.

mod eight_bit;
mod rounding;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Mutex;

use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Tensor};
use flow_model::{Gradients, Parameters};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, SafeTensors, View};
use serde::{Deserialize, Serialize};

use crate::error::TrainingError;
use eight_bit::{BLOCK, LEAST, Table};

/// Elements that one task works on. Fixed, so that sums do not depend on the number of threads.
const CHUNK: usize = 16 * 1024;

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
#[derive(Clone, Debug, PartialEq)]
struct Moments {
    /// Updates this parameter has had.
    steps: u64,
    shape: Vec<usize>,
    first: Numbers,
    second: Numbers,
}

#[derive(Clone, Debug, PartialEq)]
enum Numbers {
    F32(Vec<f32>),
    F64(Vec<f64>),
    /// In blocks of 256, each with its scale.
    Coded {
        codes: Vec<u8>,
        scales: Vec<f32>,
    },
}

impl Numbers {
    fn zeros(dtype: DType, len: usize, eight_bit: bool) -> Result<Self, TrainingError> {
        match dtype {
            DType::F32 | DType::BF16 if eight_bit && len >= LEAST => Ok(Numbers::Coded {
                codes: vec![0; len],
                scales: vec![0.0; len.div_ceil(BLOCK)],
            }),
            DType::F32 | DType::BF16 => Ok(Numbers::F32(vec![0.0; len])),
            DType::F64 => Ok(Numbers::F64(vec![0.0; len])),
            other => Err(TrainingError::setting(
                "precision",
                format!("adamw works on f32, f64 and bf16, not on {other:?}"),
            )),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Numbers::F32(values) => bytemuck::cast_slice(values),
            Numbers::F64(values) => bytemuck::cast_slice(values),
            Numbers::Coded { codes, .. } => codes,
        }
    }

    /// The scales of coded numbers, as numbers.
    fn scales(&self) -> Option<Numbers> {
        match self {
            Numbers::Coded { scales, .. } => Some(Numbers::F32(scales.clone())),
            _ => None,
        }
    }
}

/// Bytes of both moments of a tensor of so many numbers in 32 bits.
pub fn moment_bytes(elements: usize, eight_bit: bool) -> usize {
    if eight_bit && elements >= LEAST {
        2 * (elements + 4 * elements.div_ceil(BLOCK))
    } else {
        8 * elements
    }
}

/// AdamW with decoupled weight decay. Works in place on the parameters; its own state is kept by name.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    pub config: AdamWConfig,
    moments: BTreeMap<String, Moments>,
}

impl AdamW {
    pub fn new(config: AdamWConfig) -> Self {
        AdamW {
            config,
            moments: BTreeMap::new(),
        }
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
        for (id, parameter) in parameters.iter() {
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
                        first: Numbers::zeros(dtype, len, self.config.eight_bit)?,
                        second: Numbers::zeros(dtype, len, self.config.eight_bit)?,
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
            let update = Update::new(&self.config, moments.steps, rate, scale);
            let op = AdamWUpdate {
                update,
                noise: rounding::seed(&parameter.name, moments.steps),
                state: Mutex::new((&mut moments.first, &mut moments.second)),
            };
            parameter.tensor.inplace_op2(&gradient.contiguous()?, &op)?;
        }
        Ok(())
    }

    /// Names of the parameters that have moments.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.moments.keys().map(String::as_str)
    }

    /// The state as safetensors: `first.<name>`, `second.<name>`, and the update counts as metadata; where these are codes
    /// of eight bits, `first_scale.<name>` and `second_scale.<name>` too.
    fn stored<'a>(&'a self, keep: impl Fn(&str) -> bool) -> (Vec<(String, NumbersView<'a>)>, HashMap<String, String>) {
        let mut tensors: Vec<(String, NumbersView<'_>)> = Vec::with_capacity(self.moments.len() * 2);
        let mut steps = BTreeMap::new();
        for (name, moments) in self.moments.iter().filter(|(name, _)| keep(name)) {
            for (part, numbers) in [("first", &moments.first), ("second", &moments.second)] {
                tensors.push((
                    format!("{part}.{name}"),
                    NumbersView(Cow::Borrowed(numbers), moments.shape.clone()),
                ));
                if let Some(scales) = numbers.scales() {
                    let shape = vec![scales.bytes().len() / size_of::<f32>()];
                    tensors.push((format!("{part}_scale.{name}"), NumbersView(Cow::Owned(scales), shape)));
                }
            }
            steps.insert(name.as_str(), moments.steps);
        }
        let state = serde_json::json!({ "optimizer": "adamw", "steps": steps }).to_string();
        // One metadata entry only: the format keeps them in a hash map, whose order is not fixed.
        (tensors, HashMap::from([(STATE.to_owned(), state)]))
    }

    /// Writes the state to a file.
    pub fn save(&self, path: &Path) -> Result<(), TrainingError> {
        let (tensors, metadata) = self.stored(|_| true);
        safetensors::serialize_to_file(tensors, Some(metadata), path).map_err(|e| TrainingError::Data {
            message: format!("{}: optimizer state cannot be written: {e}", path.display()),
        })
    }

    /// The bytes that [`AdamW::save`] would write if there were the moments of this parameter alone.
    pub fn bytes_of(&self, name: &str) -> Result<Vec<u8>, TrainingError> {
        let (tensors, metadata) = self.stored(|other| other == name);
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
            let read = |part: &str| -> Result<(Numbers, Vec<usize>), TrainingError> {
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
                Ok((numbers, view.shape().to_vec()))
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
        Ok(AdamW { config, moments })
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

/// The scalars of one update of one parameter.
#[derive(Clone, Copy, Debug)]
struct Update {
    scale: f64,
    keep: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    step_size: f64,
    root_correction: f64,
}

impl Update {
    fn new(config: &AdamWConfig, steps: u64, rate: f64, scale: f64) -> Self {
        let (beta1, beta2) = config.betas;
        let power = steps as f64;
        Update {
            scale,
            keep: 1.0 - rate * config.weight_decay,
            beta1,
            beta2,
            epsilon: config.epsilon,
            step_size: rate / (1.0 - beta1.powf(power)),
            root_correction: (1.0 - beta2.powf(power)).sqrt(),
        }
    }
}

struct AdamWUpdate<'a> {
    update: Update,
    /// Of the rounding of weights that are stored in bf16.
    noise: u64,
    state: Mutex<(&'a mut Numbers, &'a mut Numbers)>,
}

macro_rules! update_all {
    ($float:ty, $update:expr, $parameter:expr, $first:expr, $second:expr, $gradient:expr) => {{
        let update: Update = $update;
        let scale = update.scale as $float;
        let keep = update.keep as $float;
        let rest1 = (1.0 - update.beta1) as $float;
        let beta2 = update.beta2 as $float;
        let rest2 = (1.0 - update.beta2) as $float;
        let epsilon = update.epsilon as $float;
        let step_size = update.step_size as $float;
        let root_correction = update.root_correction as $float;
        $parameter
            .par_chunks_mut(CHUNK)
            .zip($first.par_chunks_mut(CHUNK))
            .zip($second.par_chunks_mut(CHUNK))
            .zip($gradient.par_chunks(CHUNK))
            .for_each(|(((parameter, first), second), gradient)| {
                for (((p, m), v), g) in parameter.iter_mut().zip(first).zip(second).zip(gradient) {
                    let g = g * scale;
                    *m += rest1 * (g - *m);
                    *v = beta2 * *v + rest2 * g * g;
                    *p = keep * *p - step_size * (*m / (v.sqrt() / root_correction + epsilon));
                }
            });
    }};
}

/// Moments in eight bits: a block is widened, moved and coded again. The arithmetic is in the order of bitsandbytes.
fn update_coded(
    update: Update,
    parameter: &mut [f32],
    gradient: &[f32],
    (first_codes, first_scales): (&mut [u8], &mut [f32]),
    (second_codes, second_scales): (&mut [u8], &mut [f32]),
) {
    let (signed, unsigned) = (Table::signed(), Table::unsigned());
    let (scale, keep) = (update.scale as f32, update.keep as f32);
    let (beta1, rest1) = (update.beta1 as f32, (1.0 - update.beta1) as f32);
    let (beta2, rest2) = (update.beta2 as f32, (1.0 - update.beta2) as f32);
    let epsilon = (update.epsilon * update.root_correction) as f32;
    let step_size = (update.step_size * update.root_correction) as f32;
    let blocks = CHUNK / BLOCK;
    parameter
        .par_chunks_mut(CHUNK)
        .zip(gradient.par_chunks(CHUNK))
        .zip(
            first_codes
                .par_chunks_mut(CHUNK)
                .zip(first_scales.par_chunks_mut(blocks)),
        )
        .zip(
            second_codes
                .par_chunks_mut(CHUNK)
                .zip(second_scales.par_chunks_mut(blocks)),
        )
        .for_each(|(((parameter, gradient), (codes1, scales1)), (codes2, scales2))| {
            let (mut first, mut second) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
            let numbers = parameter.chunks_mut(BLOCK).zip(gradient.chunks(BLOCK));
            let firsts = codes1.chunks_mut(BLOCK).zip(scales1);
            let seconds = codes2.chunks_mut(BLOCK).zip(scales2);
            for (((p, g), (codes1, scale1)), (codes2, scale2)) in numbers.zip(firsts).zip(seconds) {
                let (first, second) = (&mut first[..p.len()], &mut second[..p.len()]);
                signed.read(codes1, *scale1, first);
                unsigned.read(codes2, *scale2, second);
                for (((p, g), m), v) in p.iter_mut().zip(g).zip(first.iter_mut()).zip(second.iter_mut()) {
                    let g = g * scale;
                    *m = *m * beta1 + rest1 * g;
                    *v = *v * beta2 + rest2 * (g * g);
                    *p = *p * keep - step_size * (*m / (v.sqrt() + epsilon));
                }
                *scale1 = signed.write(first, codes1);
                *scale2 = unsigned.write(second, codes2);
            }
        });
}

impl InplaceOp2 for AdamWUpdate<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(
        &self,
        parameter: &mut CpuStorage,
        layout: &Layout,
        gradient: &CpuStorage,
        gradient_layout: &Layout,
    ) -> candle_core::Result<()> {
        let (Some((start, end)), Some((gradient_start, gradient_end))) =
            (layout.contiguous_offsets(), gradient_layout.contiguous_offsets())
        else {
            candle_core::bail!("adamw: parameters and gradients must be contiguous")
        };
        if end - start != gradient_end - gradient_start {
            candle_core::bail!(
                "adamw: a gradient of shape {:?} for a parameter of shape {:?}",
                gradient_layout.shape(),
                layout.shape()
            )
        }
        let mut state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (first, second) = &mut *state;
        match (parameter, gradient) {
            (CpuStorage::F64(p), CpuStorage::F64(g)) => {
                let (Numbers::F64(m), Numbers::F64(v)) = (&mut **first, &mut **second) else {
                    candle_core::bail!("adamw: parameter and state differ in type")
                };
                update_all!(f64, self.update, p[start..end], m, v, g[gradient_start..gradient_end]);
                Ok(())
            }
            (CpuStorage::F32(p), CpuStorage::F32(g)) => {
                self.update_f32(&mut p[start..end], &g[gradient_start..gradient_end], first, second)
            }
            (CpuStorage::BF16(p), CpuStorage::F32(g)) => {
                let stored = &mut p[start..end];
                let mut wide: Vec<f32> = stored.iter().map(|value| value.to_f32()).collect();
                self.update_f32(&mut wide, &g[gradient_start..gradient_end], first, second)?;
                rounding::store(&wide, stored, self.noise);
                Ok(())
            }
            _ => candle_core::bail!("adamw: parameter and gradient differ in type"),
        }
    }
}

impl AdamWUpdate<'_> {
    fn update_f32(
        &self,
        parameter: &mut [f32],
        gradient: &[f32],
        first: &mut Numbers,
        second: &mut Numbers,
    ) -> candle_core::Result<()> {
        match (first, second) {
            (Numbers::F32(m), Numbers::F32(v)) => {
                update_all!(f32, self.update, parameter, m, v, gradient);
            }
            (
                Numbers::Coded {
                    codes: first,
                    scales: first_scales,
                },
                Numbers::Coded {
                    codes: second,
                    scales: second_scales,
                },
            ) => update_coded(
                self.update,
                parameter,
                gradient,
                (first, first_scales),
                (second, second_scales),
            ),
            _ => candle_core::bail!("adamw: parameter and state differ in type"),
        }
        Ok(())
    }
}

/// Square of the global L2 norm of all gradients of trainable parameters. Summed in 64 bits, chunk by chunk in a fixed
/// order.
pub fn squared_norm(parameters: &Parameters, gradients: &Gradients) -> Result<f64, TrainingError> {
    let mut total = 0.0;
    for (id, parameter) in parameters.iter() {
        if let Some(gradient) = gradients.get(id).filter(|_| parameter.trainable) {
            total += sum_of_squares(gradient)?;
        }
    }
    Ok(total)
}

fn sum_of_squares(tensor: &Tensor) -> Result<f64, TrainingError> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let (start, end) = (layout.start_offset(), layout.start_offset() + tensor.elem_count());
    let candle_core::Storage::Cpu(storage) = &*storage else {
        return Err(TrainingError::setting("ranks", "gradients are expected on the CPU"));
    };
    let sums: Vec<f64> = match storage {
        CpuStorage::F32(values) => values[start..end]
            .par_chunks(CHUNK)
            .map(|chunk| chunk.iter().map(|&g| f64::from(g) * f64::from(g)).sum())
            .collect(),
        CpuStorage::F64(values) => values[start..end]
            .par_chunks(CHUNK)
            .map(|chunk| chunk.iter().map(|g| g * g).sum())
            .collect(),
        _ => {
            return Err(TrainingError::setting(
                "precision",
                format!("gradients of type {:?} are not supported", tensor.dtype()),
            ));
        }
    };
    Ok(sums.iter().sum())
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
