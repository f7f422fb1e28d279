//! Gradients of a layer that are sums over rows: on a device they are added up at the layer's end, in one launch.

use candle_core::Tensor;
use flow_kernels::column_sums::{ColumnSums, totals};
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
        let (mut wanted, mut sums, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for (ids, of_these) in self.parameters.into_iter().zip(self.sums) {
            if ids.iter().flatten().any(|&id| gradients.wants(id)) || ids.is_none() {
                wanted.push(ids);
                sums.push(of_these);
            }
        }
        for (ids, sums) in wanted.into_iter().zip(totals(sums)?) {
            let Some(ids) = ids else {
                kept.push(sums);
                continue;
            };
            let mut first = 0;
            for id in ids {
                let shape = parameters.get(id).shape();
                let (count, columns) = (shape.elem_count(), sums.elem_count());
                if first + count > columns {
                    let name = &parameters.parameter(id).name;
                    return Err(Error::Input(format!(
                        "{columns} sums are too few for the gradient of {name}"
                    )));
                }
                let part = sums.narrow(0, first, count)?.reshape(shape)?;
                // On the CPU each has a storage of its own.
                gradients.add(id, if is_gpu(part.device()) { part } else { part.copy()? })?;
                first += count;
            }
        }
        Ok(kept)
    }
}
