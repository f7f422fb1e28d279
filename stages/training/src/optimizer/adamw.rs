//! AdamW: its coefficients, moments and update.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use candle_core::{DType, Device, Tensor};
use flow_kernels::adamw::{DeviceTables, Moment, Numbers, ParameterUpdate, Update, seed, update_all};
use flow_kernels::device::moved;
use flow_model::{Gradients, ParameterId, Parameters};
use serde::{Deserialize, Serialize};

use crate::error::TrainingError;

/// Coefficients of AdamW.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamWConfig {
    pub betas: (f64, f64),
    pub epsilon: f64,
    pub weight_decay: f64,
    /// Keep the moments in eight bits, but for small tensors: a quarter of the memory.
    pub eight_bit: bool,
    /// Keep weights that are stored in bf16 in f32 too, and update those (master weights). Without, an update is rounded at
    /// random.
    pub master_weights: bool,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        AdamWConfig {
            betas: (0.9, 0.98),
            epsilon: 1e-8,
            weight_decay: 1e-3,
            eight_bit: false,
            master_weights: false,
        }
    }
}

/// Running mean of the gradient and of its square, for one parameter, and its master weights.
#[derive(Debug)]
pub(super) struct Moments {
    /// Updates this parameter has had.
    pub steps: u64,
    pub shape: Vec<usize>,
    pub first: Moment,
    pub second: Moment,
    /// The parameter in f32, where it is stored in bf16 and master weights are kept.
    pub master: Option<Tensor>,
}

impl Moments {
    /// The master weights in host memory.
    pub fn master_on_host(&self) -> Result<Option<Numbers>, TrainingError> {
        let values = |master: &Tensor| Ok(Numbers::F32(master.flatten_all()?.to_vec1::<f32>()?));
        self.master.as_ref().map(values).transpose()
    }
}

impl PartialEq for Moments {
    fn eq(&self, other: &Self) -> bool {
        let masters = (self.master_on_host(), other.master_on_host());
        (self.steps, &self.shape) == (other.steps, &other.shape)
            && (&self.first, &self.second) == (&other.first, &other.second)
            && matches!(masters, (Ok(one), Ok(other)) if one == other)
    }
}

/// AdamW with decoupled weight decay. Updates parameters in place. Its state is kept by name, on the device of the
/// parameter.
#[derive(Debug)]
pub struct AdamW {
    pub config: AdamWConfig,
    pub(super) moments: BTreeMap<String, Moments>,
    /// Factors on the learning rate, by name; 1 where there is none.
    factors: BTreeMap<String, f64>,
    tables: DeviceTables,
}

impl PartialEq for AdamW {
    fn eq(&self, other: &Self) -> bool {
        self.config == other.config && self.moments == other.moments
    }
}

impl AdamW {
    pub fn new(config: AdamWConfig) -> Self {
        AdamW {
            config,
            moments: BTreeMap::new(),
            factors: BTreeMap::new(),
            tables: DeviceTables::default(),
        }
    }

    /// A copy in host memory.
    pub fn on_host(&self) -> Result<Self, TrainingError> {
        let mut copy = AdamW::new(self.config);
        copy.factors.clone_from(&self.factors);
        for (name, moments) in &self.moments {
            let moments = Moments {
                steps: moments.steps,
                shape: moments.shape.clone(),
                first: Moment::Host(moments.first.on_host()?.into_owned()),
                second: Moment::Host(moments.second.on_host()?.into_owned()),
                master: match &moments.master {
                    // The next update changes it in place.
                    Some(master) if master.device().is_cpu() => Some(master.copy()?),
                    Some(master) => Some(moved(master, &Device::Cpu)?),
                    None => None,
                },
            };
            copy.moments.insert(name.clone(), moments);
        }
        Ok(copy)
    }

    /// Sets factors on the learning rate of some parameters, by name.
    pub fn set_rate_factors(&mut self, factors: BTreeMap<String, f64>) {
        self.factors = factors;
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
        let mut updated = BTreeMap::new();
        for &id in ids {
            let parameter = parameters.parameter(id);
            let Some(gradient) = gradients.get(id).filter(|_| parameter.trainable) else {
                continue;
            };
            let (dtype, len) = (parameter.tensor.dtype(), parameter.tensor.elem_count());
            let moments = match self.moments.entry(parameter.name.clone()) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(Moments {
                    steps: 0,
                    shape: parameter.tensor.dims().to_vec(),
                    first: Moment::Host(Numbers::zeros(dtype, len, self.config.eight_bit)?),
                    second: Moment::Host(Numbers::zeros(dtype, len, self.config.eight_bit)?),
                    master: None,
                }),
            };
            if moments.shape != parameter.tensor.dims() {
                return Err(TrainingError::data(format!(
                    "optimizer state of {} has shape {:?}, the parameter {:?}",
                    parameter.name,
                    moments.shape,
                    parameter.tensor.dims()
                )));
            }
            moments.master = match moments.master.take() {
                _ if !self.config.master_weights || dtype != DType::BF16 => None,
                Some(master) => Some(moved(&master, parameter.tensor.device())?),
                None => Some(parameter.tensor.to_dtype(DType::F32)?),
            };
            updated.insert(parameter.name.as_str(), (&parameter.tensor, gradient));
        }
        let AdamWConfig {
            betas,
            epsilon,
            weight_decay,
            ..
        } = self.config;
        let mut updates = Vec::with_capacity(updated.len());
        for (name, moments) in &mut self.moments {
            let Some((parameter, gradient)) = updated.get(name.as_str()) else {
                continue;
            };
            moments.steps += 1;
            let rate = self.factors.get(name).map_or(rate, |factor| rate * factor);
            updates.push(ParameterUpdate {
                parameter: moments.master.as_ref().unwrap_or(parameter),
                gradient,
                first: &mut moments.first,
                second: &mut moments.second,
                update: Update::new(betas, epsilon, weight_decay, moments.steps, rate, scale),
                noise: seed(name, moments.steps),
            });
        }
        update_all(&mut updates, &mut self.tables)?;
        for (name, (parameter, _)) in updated {
            if let Some(master) = self.moments.get(name).and_then(|moments| moments.master.as_ref()) {
                parameter.slice_set(&master.to_dtype(parameter.dtype())?, 0, 0)?;
            }
        }
        Ok(())
    }

    /// Names of the parameters that have moments.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.moments.keys().map(String::as_str)
    }
}
