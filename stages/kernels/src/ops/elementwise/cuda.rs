//! Element-wise passes, and the gated linear unit.

use candle_core::{DType, Tensor};

use crate::device::launch::Argument::{Float, Int, Long, Longs, Read, ReadAll, ReadIf, Write, WriteAll};
use crate::device::launch::{Grid, THREADS, alike, fresh, fresh_in, in_either, launch, mask_arguments, of_either};
use crate::error::{Error, Result};
use crate::lengths::Lengths;
use crate::noise::DropMask;

pub fn add_in_place(sum: &Tensor, x: &Tensor) -> Result<()> {
    let (x, n) = (x.contiguous()?, sum.elem_count());
    alike("sum", sum, &x)?;
    let arguments = [Write(sum), Read(&x), Long(n as u64)];
    launch("add_in_place", Grid::elements(n), &arguments)
}

pub fn scale_in_place(x: &Tensor, factor: f64) -> Result<()> {
    let n = x.elem_count();
    let arguments = [Write(x), Float(factor), Long(n as u64)];
    launch("scale_in_place", Grid::elements(n), &arguments)
}

/// Elements that one block blends.
const CHUNK: usize = 16 * THREADS;

pub fn blend_all_in_place(pairs: &[(&Tensor, &Tensor)], share: f64) -> Result<()> {
    for (dtype, name) in [(DType::F32, "blend_all_f32"), (DType::BF16, "blend_all_bf16")] {
        let (mut sums, mut tensors, mut plan, mut blocks) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for (sum, x) in pairs.iter().filter(|(_, x)| x.dtype() == dtype) {
            alike("blend", sum, x)?;
            plan.extend([blocks as u64, sum.elem_count() as u64]);
            blocks += sum.elem_count().div_ceil(CHUNK);
            sums.push((*sum).clone());
            tensors.push(x.contiguous()?);
        }
        if blocks == 0 {
            continue;
        }
        let tables = [WriteAll(&sums), ReadAll(&tensors), Longs(&plan)];
        let rest = [Int(sums.len()), Int(CHUNK), Float(share)];
        launch(name, Grid::rows(blocks), &[&tables[..], &rest].concat())?;
    }
    match pairs
        .iter()
        .find(|(_, x)| !matches!(x.dtype(), DType::F32 | DType::BF16))
    {
        Some((_, x)) => Err(Error::Input(format!("a blend of {} on a device", x.dtype().as_str()))),
        None => Ok(()),
    }
}

/// `x + factor * drop(y)`, or that without `x`.
pub fn residual(x: Option<&Tensor>, y: &Tensor, factor: f64, mask: Option<DropMask>) -> Result<Tensor> {
    let (x, y) = (x.map(Tensor::contiguous).transpose()?, y.contiguous()?);
    alike("residual", x.as_ref().unwrap_or(&y), &y)?;
    let (n, out) = (y.elem_count(), fresh(y.shape(), &y)?);
    let tensors = [ReadIf(x.as_ref()), Read(&y), Write(&out)];
    let [keep, key, threshold] = mask_arguments(mask, factor);
    launch(
        "residual",
        Grid::elements(n),
        &[&tensors[..], &[keep, key, threshold, Long(n as u64)]].concat(),
    )?;
    Ok(out)
}

pub fn silu(dtype: DType, h: &Tensor, mask: Option<DropMask>) -> Result<Tensor> {
    let h = h.contiguous()?;
    let (n, out) = (h.elem_count(), fresh_in(dtype, h.shape(), h.device())?);
    let ([wide, narrow], [keep, key, threshold]) = (in_either(&out), mask_arguments(mask, 1.0));
    let arguments = [Read(&h), wide, narrow, keep, key, threshold, Long(n as u64)];
    launch(
        of_either(&h, ["silu", "silu_of_bf16"]),
        Grid::elements(n.div_ceil(4)),
        &arguments,
    )?;
    Ok(out)
}

pub fn silu_backward(dtype: DType, h: &Tensor, dy: &Tensor, mask: Option<DropMask>) -> Result<Tensor> {
    let (h, dy) = (h.contiguous()?, dy.contiguous()?);
    alike("silu", &h, &dy)?;
    let (n, out) = (h.elem_count(), fresh_in(dtype, h.shape(), h.device())?);
    let ([wide, narrow], [keep, key, threshold]) = (in_either(&out), mask_arguments(mask, 1.0));
    let arguments = [Read(&h), Read(&dy), wide, narrow, keep, key, threshold, Long(n as u64)];
    let name = of_either(&h, ["silu_backward", "silu_backward_of_bf16"]);
    launch(name, Grid::elements(n.div_ceil(4)), &arguments)?;
    Ok(out)
}

pub fn glu(h: &Tensor, lengths: &Lengths) -> Result<Tensor> {
    let h = h.contiguous()?;
    let (batch, time, double) = h.dims3()?;
    let d = double / 2;
    let (n, out) = (batch * time * d, fresh((batch, time, d), &h)?);
    let lengths = lengths.on_device(batch, h.device())?;
    let tensors = [Read(&h), Read(&lengths), Write(&out)];
    launch(
        "glu",
        Grid::elements(n),
        &[&tensors[..], &[Long(n as u64), Int(time), Int(d)]].concat(),
    )?;
    Ok(out)
}

pub fn glu_backward(h: &Tensor, dy: &Tensor, lengths: &Lengths) -> Result<Tensor> {
    let (h, dy) = (h.contiguous()?, dy.contiguous()?);
    let (batch, time, double) = h.dims3()?;
    let d = double / 2;
    let (n, out) = (batch * time * d, fresh((batch, time, 2 * d), &h)?);
    let lengths = lengths.on_device(batch, h.device())?;
    let tensors = [Read(&h), Read(&dy), Read(&lengths), Write(&out)];
    launch(
        "glu_backward",
        Grid::elements(n),
        &[&tensors[..], &[Long(n as u64), Int(time), Int(d)]].concat(),
    )?;
    Ok(out)
}
