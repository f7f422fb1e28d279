//! AdamW and gradient clipping, as in torch and NeMo.
//!
//! NeMo uses one parameter group: weight decay acts on biases, norms and embeddings too. A parameter
//! without a gradient (frozen, or untouched by the loss) is left as it is, decay included.

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
}

impl Default for AdamWConfig {
    fn default() -> Self {
        AdamWConfig {
            betas: (0.9, 0.98),
            epsilon: 1e-8,
            weight_decay: 1e-3,
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
}

impl Numbers {
    fn zeros(dtype: DType, len: usize) -> Result<Self, TrainingError> {
        match dtype {
            DType::F32 => Ok(Numbers::F32(vec![0.0; len])),
            DType::F64 => Ok(Numbers::F64(vec![0.0; len])),
            other => Err(TrainingError::setting(
                "precision",
                format!("adamw works on f32 and f64, not on {other:?}"),
            )),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Numbers::F32(values) => bytemuck::cast_slice(values),
            Numbers::F64(values) => bytemuck::cast_slice(values),
        }
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
                        first: Numbers::zeros(dtype, len)?,
                        second: Numbers::zeros(dtype, len)?,
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
                state: Mutex::new((&mut moments.first, &mut moments.second)),
            };
            parameter.tensor.inplace_op2(&gradient.contiguous()?, &op)?;
        }
        Ok(())
    }

    /// Writes the state as safetensors: `first.<name>`, `second.<name>`, and the update counts as metadata.
    pub fn save(&self, path: &Path) -> Result<(), TrainingError> {
        let mut tensors: Vec<(String, NumbersView<'_>)> = Vec::with_capacity(self.moments.len() * 2);
        let mut steps = BTreeMap::new();
        for (name, moments) in &self.moments {
            tensors.push((format!("first.{name}"), NumbersView(&moments.first, &moments.shape)));
            tensors.push((format!("second.{name}"), NumbersView(&moments.second, &moments.shape)));
            steps.insert(name.as_str(), moments.steps);
        }
        let state = serde_json::json!({ "optimizer": "adamw", "steps": steps }).to_string();
        // One metadata entry only: the format keeps them in a hash map, whose order is not fixed.
        let metadata = HashMap::from([(STATE.to_owned(), state)]);
        safetensors::serialize_to_file(tensors, Some(metadata), path).map_err(|e| TrainingError::Data {
            message: format!("{}: optimizer state cannot be written: {e}", path.display()),
        })
    }

    /// Reads what [`AdamW::save`] wrote. The coefficients are not part of it.
    pub fn load(path: &Path, config: AdamWConfig) -> Result<Self, TrainingError> {
        let bytes = std::fs::read(path).map_err(TrainingError::file(path))?;
        let bad = |message: String| TrainingError::Data {
            message: format!("{}: {message}", path.display()),
        };
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| bad(e.to_string()))?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|e| bad(e.to_string()))?;
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

struct NumbersView<'a>(&'a Numbers, &'a [usize]);

impl View for NumbersView<'_> {
    fn dtype(&self) -> Dtype {
        match self.0 {
            Numbers::F32(_) => Dtype::F32,
            Numbers::F64(_) => Dtype::F64,
        }
    }

    fn shape(&self) -> &[usize] {
        self.1
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
        match (parameter, gradient, &mut **first, &mut **second) {
            (CpuStorage::F32(p), CpuStorage::F32(g), Numbers::F32(m), Numbers::F32(v)) => {
                update_all!(f32, self.update, p[start..end], m, v, g[gradient_start..gradient_end]);
            }
            (CpuStorage::F64(p), CpuStorage::F64(g), Numbers::F64(m), Numbers::F64(v)) => {
                update_all!(f64, self.update, p[start..end], m, v, g[gradient_start..gradient_end]);
            }
            _ => candle_core::bail!("adamw: parameter, gradient and state differ in type"),
        }
        Ok(())
    }
}

/// Global L2 norm of all gradients of trainable parameters. Summed in 64 bits, chunk by chunk in a fixed
/// order.
pub fn global_norm(parameters: &Parameters, gradients: &Gradients) -> Result<f64, TrainingError> {
    let mut total = 0.0;
    for (id, parameter) in parameters.iter() {
        if let Some(gradient) = gradients.get(id).filter(|_| parameter.trainable) {
            total += sum_of_squares(gradient)?;
        }
    }
    Ok(total.sqrt())
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
mod tests {
    use super::*;
    use candle_core::Device;
    use proptest::prelude::*;

    fn parameters(values: &[Vec<f64>], dtype: DType) -> Parameters {
        let mut parameters = Parameters::new(dtype, Device::Cpu);
        for (index, values) in values.iter().enumerate() {
            parameters.add(format!("p{index}"), tensor(values, dtype), true);
        }
        parameters
    }

    fn tensor(values: &[f64], dtype: DType) -> Tensor {
        Tensor::from_slice(values, values.len(), &Device::Cpu)
            .and_then(|t| t.to_dtype(dtype))
            .expect("a tensor")
    }

    fn gradients(parameters: &Parameters, values: &[Vec<f64>]) -> Gradients {
        let mut gradients = Gradients::new(parameters);
        for ((id, parameter), values) in parameters.iter().zip(values) {
            gradients
                .add(id, tensor(values, parameter.tensor.dtype()))
                .expect("a gradient");
        }
        gradients
    }

    fn values(parameters: &Parameters) -> Vec<Vec<f64>> {
        let read = |t: &Tensor| t.to_dtype(DType::F64).and_then(|t| t.to_vec1()).expect("values");
        parameters.iter().map(|(_, p)| read(&p.tensor)).collect()
    }

    proptest! {
        /// Against the formula of the paper (decoupled decay), written out per number.
        #[test]
        fn steps_follow_the_formula(
            start in prop::collection::vec(-3.0..3.0f64, 1..40),
            all in prop::collection::vec(prop::collection::vec(-5.0..5.0f64, 40), 1..6),
            rate in 1e-5..0.1f64, scale in 0.01..1.0f64, decay in 0.0..0.5f64,
        ) {
            let config = AdamWConfig { betas: (0.9, 0.98), epsilon: 1e-8, weight_decay: decay };
            let mut adamw = AdamW::new(config);
            let parameters = parameters(std::slice::from_ref(&start), DType::F64);
            let mut expected: Vec<(f64, f64, f64)> = start.iter().map(|&p| (p, 0.0, 0.0)).collect();
            for (step, gradient) in all.iter().enumerate() {
                let gradient = gradient[..start.len()].to_vec();
                adamw.step(&parameters, &gradients(&parameters, std::slice::from_ref(&gradient)), rate, scale).expect("a step");
                let t = step as i32 + 1;
                for ((p, m, v), g) in expected.iter_mut().zip(&gradient) {
                    let g = g * scale;
                    *m = 0.9 * *m + 0.1 * g;
                    *v = 0.98 * *v + 0.02 * g * g;
                    let (mean, square) = (*m / (1.0 - 0.9f64.powi(t)), *v / (1.0 - 0.98f64.powi(t)));
                    *p -= rate * decay * *p + rate * mean / (square.sqrt() + 1e-8);
                }
            }
            for (ours, (p, ..)) in values(&parameters)[0].iter().zip(&expected) {
                prop_assert!((ours - p).abs() < 1e-11 * (1.0 + p.abs()), "{ours} is not {p}");
            }
        }
    }

    #[test]
    fn without_a_gradient_nothing_moves() {
        let parameters = parameters(&[vec![1.0, 2.0], vec![3.0]], DType::F32);
        let mut only_first = Gradients::new(&parameters);
        let (first, second) = (parameters.id("p0").expect("id"), parameters.id("p1").expect("id"));
        only_first.freeze(second);
        only_first
            .add(first, tensor(&[0.5, 0.0], DType::F32))
            .expect("a gradient");
        only_first.add(second, tensor(&[0.5], DType::F32)).expect("dropped");
        let mut adamw = AdamW::new(AdamWConfig {
            weight_decay: 0.1,
            ..AdamWConfig::default()
        });
        adamw.step(&parameters, &only_first, 0.1, 1.0).expect("a step");
        let after = values(&parameters);
        assert!(
            after[0][0] < 1.0 && after[0][1] < 2.0,
            "a zero gradient still decays: {after:?}"
        );
        assert_eq!(after[1], [3.0], "no gradient, no decay");
    }

    #[test]
    fn the_state_survives_the_disk() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("optimizer.safetensors");
        for dtype in [DType::F32, DType::F64] {
            let parameters = parameters(&[vec![1.0, -2.0, 0.3], vec![4.0]], dtype);
            let mut adamw = AdamW::new(AdamWConfig::default());
            for _ in 0..3 {
                adamw
                    .step(
                        &parameters,
                        &gradients(&parameters, &[vec![0.1, 0.2, -0.3], vec![1e-3]]),
                        0.01,
                        0.5,
                    )
                    .expect("a step");
            }
            adamw.save(&path).expect("saved");
            assert_eq!(AdamW::load(&path, AdamWConfig::default()).expect("loaded"), adamw);
        }
        let whole = std::fs::read(&path).expect("state");
        for end in [0, 7, 8, 100, whole.len() - 1] {
            std::fs::write(&path, &whole[..end]).expect("cut");
            assert!(
                AdamW::load(&path, AdamWConfig::default()).is_err(),
                "cut to {end} bytes"
            );
        }
    }

    #[test]
    fn the_norm_is_that_of_all_gradients_whatever_the_threads() {
        let long: Vec<f64> = (0..100_000).map(|i| f64::from(i % 997) * 1e-3).collect();
        let parameters = parameters(&[long.clone(), vec![3.0, 4.0]], DType::F32);
        let gradients = gradients(&parameters, &[long.clone(), vec![3.0, 4.0]]);
        let exact = (long.iter().map(|g| f64::from(*g as f32).powi(2)).sum::<f64>() + 25.0).sqrt();
        let norm = |threads| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .expect("threads");
            pool.install(|| global_norm(&parameters, &gradients)).expect("a norm")
        };
        assert!((norm(1) - exact).abs() < 1e-9 * exact);
        assert_eq!(norm(1).to_bits(), norm(3).to_bits());
        assert_eq!(clip_factor(10.0, 0.0), 1.0);
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert!((clip_factor(10.0, 1.0) - 0.1).abs() < 1e-7);
    }
}
