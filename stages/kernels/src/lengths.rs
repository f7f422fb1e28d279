//! Valid frames of each sequence of a batch.

use std::ops::Deref;
use std::sync::OnceLock;

use candle_core::{Device, Tensor};

use crate::device::is_gpu;
use crate::device::launch::numbers;
use crate::error::{Error, Result};

/// How many frames of each sequence are valid. They are copied to a device once, when a kernel there first needs them.
#[derive(Clone, Debug, Default)]
pub struct Lengths {
    values: Vec<usize>,
    /// (sequences), in u32.
    on_device: OnceLock<Tensor>,
}

impl Lengths {
    pub fn new(values: impl Into<Vec<usize>>) -> Self {
        Self {
            values: values.into(),
            on_device: OnceLock::new(),
        }
    }

    /// Several of them for tensors on a device, to which they go in one copy.
    ///
    /// # Errors
    /// If the device fails.
    pub fn copied_together<const N: usize>(all: [Vec<usize>; N], device: &Device) -> Result<[Self; N]> {
        let made = all.map(Self::new);
        if is_gpu(device) && made.iter().all(|one| !one.is_empty()) {
            let copied = numbers(made.iter().flat_map(|one| one.iter().copied()), device)?;
            let mut first = 0;
            for one in &made {
                // New, so that none is there.
                let _ = one.on_device.set(copied.narrow(0, first, one.len())?);
                first += one.len();
            }
        }
        Ok(made)
    }

    /// One number for each of `batch` sequences, on a device.
    pub(crate) fn on_device(&self, batch: usize, device: &Device) -> Result<Tensor> {
        if self.values.len() != batch {
            return Err(Error::Input(format!(
                "{} lengths for {batch} sequences",
                self.values.len()
            )));
        }
        if let Some(made) = self.on_device.get().filter(|made| made.device().same_device(device)) {
            return Ok(made.clone());
        }
        let made = numbers(self.values.iter().copied(), device)?;
        // Those on another device stay there.
        let _ = self.on_device.set(made.clone());
        Ok(made)
    }
}

impl Deref for Lengths {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.values
    }
}

impl PartialEq for Lengths {
    fn eq(&self, other: &Self) -> bool {
        self.values == other.values
    }
}

impl Eq for Lengths {}
