//! Gradients of a layer that are sums over rows: on a device they are added up at the layer's end, in one launch.

use candle_core::Tensor;
use flow_kernels::column_sums::{ColumnSums, add_together, totals};
use flow_kernels::is_gpu;

use crate::error::{Error, Result};
use crate::parameters::{Gradients, ParameterId, Parameters};

/// Sums, and for each the parameters whose gradients its columns are, one after another.
#[derive(Debug, Default)]
pub struct PendingSums {
    sums: Vec<ColumnSums>,
    /// None at those that are given back.
    parameters: Vec<Option<Vec<ParameterId>>>,
}

impl PendingSums {
    /// Sums that are the gradients of these parameters, one after another.
    pub fn add(&mut self, parameters: &[ParameterId], sums: ColumnSums) {
        self.sums.push(sums);
        self.parameters.push(Some(parameters.to_vec()));
    }

    /// Sums that [`PendingSums::complete`] is to give back.
    pub fn keep(&mut self, sums: ColumnSums) {
        self.sums.push(sums);
        self.parameters.push(None);
    }

    /// Adds them to the gradients, and gives back those to be kept.
    ///
    /// # Errors
    /// Where sums have other columns than their parameters have elements.
    pub fn complete(self, parameters: &Parameters, gradients: &mut Gradients) -> Result<Vec<Tensor>> {
        let (mut ids, mut sums, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for (of_these, found) in self.parameters.into_iter().zip(self.sums) {
            match of_these {
                None => kept.push(found),
                Some(of_these) if of_these.iter().any(|&id| gradients.wants(id)) => {
                    ids.push(of_these);
                    sums.push(found);
                }
                Some(_) => {}
            }
        }
        let all = ids.concat();
        let there = gradients.stacked(&all).cloned();
        if let Some(added) = add_together(&sums, &kept, there.as_ref())? {
            if there.is_none() {
                let parts = cut(parameters, &all, &added.sums)?;
                gradients.add_parts(&all, added.sums, parts)?;
            }
            return Ok(added.apart);
        }
        for (ids, sums) in ids.into_iter().zip(totals(sums)?) {
            for (&id, part) in ids.iter().zip(cut(parameters, &ids, &sums)?) {
                // On the CPU each has a storage of its own.
                let part = if is_gpu(part.device()) {
                    part
                } else {
                    part.force_contiguous()?
                };
                gradients.add(id, part)?;
            }
        }
        Ok(totals(kept)?)
    }
}

/// The parts of a vector that are the gradients of some parameters, one after another.
fn cut(parameters: &Parameters, ids: &[ParameterId], sums: &Tensor) -> Result<Vec<Tensor>> {
    let (columns, mut first) = (sums.elem_count(), 0);
    let mut parts = Vec::with_capacity(ids.len());
    for &id in ids {
        let shape = parameters.get(id).shape();
        let count = shape.elem_count();
        if first + count > columns {
            let name = &parameters.parameter(id).name;
            return Err(Error::Input(format!(
                "{columns} sums are too few for the gradient of {name}"
            )));
        }
        parts.push(sums.narrow(0, first, count)?.reshape(shape)?);
        first += count;
    }
    Ok(parts)
}
