//! AdamW, over many parameters in a launch.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use crate::device::launch::Argument::{Int, Longs, Read, ReadAll, WriteAll};
use crate::device::launch::{Grid, THREADS, launch};
use crate::error::{Error, Result};
use crate::ops::adamw::{DeviceTables, ParameterUpdate, eight_bit};

// Numbers that share a scale are those of one block of threads.
const _: () = assert!(eight_bit::BLOCK == THREADS);

/// Elements that one block of threads updates.
const CHUNK: usize = 16 * THREADS;

/// Parameters of one type whose moments are stored alike, with the tables of a launch.
#[derive(Default)]
struct Group {
    parameters: Vec<Tensor>,
    gradients: Vec<Tensor>,
    /// First and second moments, and their scales if they are coded.
    moments: [Vec<Tensor>; 2],
    scales: [Vec<Tensor>; 2],
    plan: Vec<u64>,
    blocks: usize,
}

/// One launch for all parameters in f32, one for those in bf16, and as many for moments in eight bits.
pub fn update_all(updates: &mut [ParameterUpdate], tables: &mut DeviceTables) -> Result<()> {
    // By whether the moments are coded and whether the parameter is in bf16.
    let mut groups: BTreeMap<(bool, bool), Group> = BTreeMap::new();
    for one in updates {
        let (parameter, device) = (one.parameter, one.parameter.device());
        let (n, gradient) = (parameter.elem_count(), one.gradient.contiguous()?);
        let moments = [one.first.on_device(device)?, one.second.on_device(device)?];
        let unfit = |moment: &&crate::adamw::DeviceNumbers| {
            let scales = moment.scales.as_ref().map(Tensor::elem_count);
            moment.values.elem_count() != n || scales.is_some_and(|scales| scales != n.div_ceil(eight_bit::BLOCK))
        };
        if gradient.elem_count() != n || moments.iter().any(unfit) {
            return Err(Error::Input(format!(
                "adamw: a gradient of shape {:?} or moments for a parameter of shape {:?}",
                gradient.dims(),
                parameter.dims()
            )));
        }
        let coded = moments[0].scales.is_some();
        if coded != moments[1].scales.is_some() {
            return Err(Error::Input("adamw: one moment is in 8 bits, the other in 32".into()));
        }
        let group = groups.entry((coded, parameter.dtype() == DType::BF16)).or_default();
        group.parameters.push(parameter.clone());
        group.gradients.push(gradient);
        for (at, moment) in moments.into_iter().enumerate() {
            group.moments[at].push(moment.values.clone());
            group.scales[at].extend(moment.scales.clone());
        }
        group.plan.extend([group.blocks as u64, n as u64, one.noise]);
        let mut rates = one.update.rates(coded).to_vec();
        rates.push(0.0);
        let word = |pair: &[f32]| u64::from(pair[0].to_bits()) | u64::from(pair[1].to_bits()) << 32;
        group.plan.extend(rates.chunks_exact(2).map(word));
        group.blocks += n.div_ceil(CHUNK);
    }
    for ((coded, narrow), group) in &groups {
        let tensors = [WriteAll(&group.parameters), ReadAll(&group.gradients)];
        let plan = [Longs(&group.plan), Int(group.parameters.len()), Int(CHUNK)];
        let (first, second) = (WriteAll(&group.moments[0]), WriteAll(&group.moments[1]));
        let grid = Grid::rows(group.blocks);
        if *coded {
            let device = group.parameters[0].device();
            let both = tables.get(device)?;
            let (values, nearest) = &*both;
            let scales = group.scales.each_ref().map(|scales| WriteAll(scales));
            let moments = [first, scales[0], second, scales[1], Read(values), Read(nearest)];
            let name = if *narrow { "adamw_coded_bf16" } else { "adamw_coded_f32" };
            launch(name, grid, &[&tensors[..], &moments, &plan].concat())?;
        } else {
            let name = if *narrow { "adamw_bf16" } else { "adamw_f32" };
            launch(name, grid, &[&tensors[..], &[first, second], &plan].concat())?;
        }
    }
    Ok(())
}
