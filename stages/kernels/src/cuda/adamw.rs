//! AdamW.

use candle_core::{DType, Device, Tensor};

use super::Argument::{Long, Read, Write};
use super::{Grid, THREADS, launch};
use crate::adamw::{DeviceNumbers, DeviceTables, Update, eight_bit};
use crate::device::to_device;
use crate::error::{Error, Result};

// Numbers that share a scale are those of one block of threads.
const _: () = assert!(eight_bit::BLOCK == THREADS);

pub fn update(
    parameter: &Tensor,
    gradient: &Tensor,
    (first, second): (&DeviceNumbers, &DeviceNumbers),
    update: &Update,
    noise: u64,
    tables: &mut DeviceTables,
) -> Result<()> {
    let n = parameter.elem_count();
    let fits = |moment: &DeviceNumbers| {
        let scales = moment
            .scales
            .as_ref()
            .map_or(n.div_ceil(eight_bit::BLOCK), Tensor::elem_count);
        moment.values.elem_count() == n && scales == n.div_ceil(eight_bit::BLOCK)
    };
    if gradient.elem_count() != n || !fits(first) || !fits(second) {
        return Err(Error::Input(format!(
            "adamw: a gradient of shape {:?} or moments for a parameter of shape {:?}",
            gradient.dims(),
            parameter.dims()
        )));
    }
    let rates = update.rates(first.scales.is_some());
    let rates = to_device(
        &Tensor::from_slice(&rates, rates.len(), &Device::Cpu)?,
        parameter.device(),
    )?;
    let wide = parameter.dtype() != DType::BF16;
    let rest = [Read(&rates), Long(noise), Long(n as u64)];
    let grid = Grid::elements(n);
    match (&first.scales, &second.scales) {
        (None, None) => {
            let name = if wide { "adamw_f32" } else { "adamw_bf16" };
            let tensors = [
                Write(parameter),
                Read(gradient),
                Write(&first.values),
                Write(&second.values),
            ];
            launch(name, grid, &[&tensors[..], &rest].concat())
        }
        (Some(first_scales), Some(second_scales)) => {
            let name = if wide { "adamw_coded_f32" } else { "adamw_coded_bf16" };
            let (values, nearest) = tables.get(parameter.device())?;
            let tensors = [
                Write(parameter),
                Read(gradient),
                Write(&first.values),
                Write(first_scales),
            ];
            let others = [Write(&second.values), Write(second_scales), Read(values), Read(nearest)];
            launch(name, grid, &[&tensors[..], &others, &rest].concat())
        }
        _ => Err(Error::Input("adamw: one moment is in 8 bits, the other in 32".into())),
    }
}
