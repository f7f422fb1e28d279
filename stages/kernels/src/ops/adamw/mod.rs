//! AdamW: the update of parameters and their moments, in 32 or in 8 bits.

mod cuda;
#[cfg(test)]
mod device_tests;
pub mod eight_bit;
mod rounding;

use std::borrow::Cow;
use std::sync::{Arc, Mutex};

use candle_core::Device;
use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Tensor};
use rayon::prelude::*;

use crate::device::{PerDevice, with_released_memory};
use crate::error::{Error, Result};
use eight_bit::{BLOCK, LEAST, Table};

pub use rounding::seed;

/// Elements that one task works on. Fixed, so that sums do not depend on the number of threads.
const CHUNK: usize = 16 * 1024;

/// Moments of one parameter, in host memory.
#[derive(Clone, Debug, PartialEq)]
pub enum Numbers {
    F32(Vec<f32>),
    F64(Vec<f64>),
    /// In blocks of 256, each with its scale.
    Coded {
        codes: Vec<u8>,
        scales: Vec<f32>,
    },
}

impl Numbers {
    /// Zeros for the moments of a parameter of this type and length.
    pub fn zeros(dtype: DType, len: usize, eight_bit: bool) -> Result<Self> {
        match dtype {
            DType::F32 | DType::BF16 if eight_bit && len >= LEAST => Ok(Numbers::Coded {
                codes: vec![0; len],
                scales: vec![0.0; len.div_ceil(BLOCK)],
            }),
            DType::F32 | DType::BF16 => Ok(Numbers::F32(vec![0.0; len])),
            DType::F64 => Ok(Numbers::F64(vec![0.0; len])),
            other => Err(Error::Input(format!(
                "adamw works on f32, f64 and bf16, not on {other:?}"
            ))),
        }
    }

    /// The numbers, or their codes, in little-endian order.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Numbers::F32(values) => bytemuck::cast_slice(values),
            Numbers::F64(values) => bytemuck::cast_slice(values),
            Numbers::Coded { codes, .. } => codes,
        }
    }

    /// The scales of coded numbers, as numbers.
    pub fn scales(&self) -> Option<Numbers> {
        match self {
            Numbers::Coded { scales, .. } => Some(Numbers::F32(scales.clone())),
            _ => None,
        }
    }
}

/// Bytes of both moments of a tensor of `elements` numbers, stored in 32 bits.
pub fn moment_bytes(elements: usize, eight_bit: bool) -> usize {
    if eight_bit && elements >= LEAST {
        2 * (elements + 4 * elements.div_ceil(BLOCK))
    } else {
        8 * elements
    }
}

/// Moments of one parameter, on the parameter's device.
#[derive(Debug)]
pub enum Moment {
    Host(Numbers),
    Device(DeviceNumbers),
}

/// Moments on a device: numbers, or codes with their scales.
#[derive(Debug)]
pub struct DeviceNumbers {
    /// In f32, or codes in u8.
    pub(crate) values: Tensor,
    pub(crate) scales: Option<Tensor>,
}

impl Moment {
    /// The numbers in host memory.
    pub fn on_host(&self) -> Result<Cow<'_, Numbers>> {
        match self {
            Moment::Host(numbers) => Ok(Cow::Borrowed(numbers)),
            Moment::Device(numbers) => Ok(Cow::Owned(match &numbers.scales {
                None => Numbers::F32(numbers.values.to_vec1()?),
                Some(scales) => Numbers::Coded {
                    codes: numbers.values.to_vec1()?,
                    scales: scales.to_vec1()?,
                },
            })),
        }
    }

    /// The numbers on a device, moved there if they are in host memory.
    pub(crate) fn on_device(&mut self, device: &Device) -> Result<&DeviceNumbers> {
        if let Moment::Host(numbers) = self {
            // They may come after the first backward pass, whose memory is in pieces.
            let (values, scales) = with_released_memory(device, || match numbers {
                Numbers::F32(values) => Ok((Tensor::from_slice(values, values.len(), device)?, None)),
                Numbers::Coded { codes, scales } => Ok((
                    Tensor::from_slice(codes, codes.len(), device)?,
                    Some(Tensor::from_slice(scales, scales.len(), device)?),
                )),
                Numbers::F64(_) => Err(Error::Input("not on CUDA yet: adamw in 64 bits".into())),
            })?;
            *self = Moment::Device(DeviceNumbers { values, scales });
        }
        match self {
            Moment::Device(numbers) => Ok(numbers),
            Moment::Host(_) => Err(Error::Input("moments are not on the device".into())),
        }
    }
}

impl PartialEq for Moment {
    fn eq(&self, other: &Self) -> bool {
        matches!((self.on_host(), other.on_host()), (Ok(one), Ok(other)) if one == other)
    }
}

/// The tables of eight-bit codes on a device, copied there on first use.
#[derive(Debug, Default)]
pub struct DeviceTables(PerDevice<(Tensor, Tensor)>);

impl DeviceTables {
    /// The ratios of the codes, signed and then unsigned; and the codes of all steps, followed by those of zero.
    pub(crate) fn get(&self, device: &Device) -> Result<Arc<(Tensor, Tensor)>> {
        self.0.get(device, || {
            let (values, codes) = eight_bit::both();
            let values = Tensor::from_slice(&values, values.len(), device)?;
            Ok((values, Tensor::from_slice(&codes, codes.len(), device)?))
        })
    }
}

/// The scalars of one update of one parameter.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// Factor on the gradient.
    scale: f64,
    keep: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    step_size: f64,
    root_correction: f64,
}

impl Update {
    /// The `steps`-th update of a parameter.
    pub fn new((beta1, beta2): (f64, f64), epsilon: f64, weight_decay: f64, steps: u64, rate: f64, scale: f64) -> Self {
        let power = steps as f64;
        Update {
            scale,
            keep: 1.0 - rate * weight_decay,
            beta1,
            beta2,
            epsilon,
            step_size: rate / (1.0 - beta1.powf(power)),
            root_correction: (1.0 - beta2.powf(power)).sqrt(),
        }
    }

    /// The scalars as a kernel takes them; with moments in eight bits the order of operations differs.
    pub(crate) fn rates(&self, coded: bool) -> [f32; 9] {
        let correction = if coded { self.root_correction } else { 1.0 };
        [
            self.scale,
            self.keep,
            self.beta1,
            1.0 - self.beta1,
            self.beta2,
            1.0 - self.beta2,
            self.epsilon * correction,
            self.step_size * correction,
            self.root_correction,
        ]
        .map(|rate| rate as f32)
    }
}

/// One update of a parameter and its moments.
pub struct ParameterUpdate<'a> {
    /// Contiguous; updated in place.
    pub parameter: &'a Tensor,
    pub gradient: &'a Tensor,
    /// They move to where the parameter is.
    pub first: &'a mut Moment,
    pub second: &'a mut Moment,
    pub update: Update,
    /// The seed of the rounding of weights that are stored in bf16.
    pub noise: u64,
}

/// Updates parameters and their moments, in place. All parameters are on one device.
pub fn update_all(updates: &mut [ParameterUpdate], tables: &mut DeviceTables) -> Result<()> {
    if updates.first().is_some_and(|one| crate::is_gpu(one.parameter.device())) {
        return cuda::update_all(updates, tables);
    }
    for one in updates {
        let (Moment::Host(first), Moment::Host(second)) = (&mut *one.first, &mut *one.second) else {
            return Err(Error::Input(
                "adamw: moments on a device for a parameter on the CPU".into(),
            ));
        };
        let op = AdamWUpdate {
            update: one.update,
            noise: one.noise,
            state: Mutex::new((first, second)),
        };
        one.parameter.inplace_op2(&one.gradient.contiguous()?, &op)?;
    }
    Ok(())
}

struct AdamWUpdate<'a> {
    update: Update,
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

/// With moments in eight bits: each block is decoded, updated and encoded again, in bitsandbytes' order of operations.
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

#[cfg(test)]
mod tests {
    use candle_core::MetalDevice;

    use super::*;

    /// Tables of one device are not given for another; candle's for Metal is there in every build, and holds nothing.
    #[test]
    fn tables_lie_on_the_device_that_asks() {
        let tables = DeviceTables::default();
        let made = tables.get(&Device::Cpu).unwrap();
        assert!(tables.get(&Device::Metal(MetalDevice)).is_err());
        assert!(Arc::ptr_eq(&made, &tables.get(&Device::Cpu).unwrap()));
    }
}
