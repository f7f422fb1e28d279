//! Which device each rank computes on: NCCL needs a GPU of its own for each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::Device;

use super::nccl_error;
use crate::error::TrainingError;

/// A device in words that no other device of any machine has.
pub(in crate::ranks) fn device_name(device: &Device) -> Result<String, TrainingError> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim();
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            let uuid = device.cuda_stream().context().uuid();
            let uuid = uuid.map_err(|error| nccl_error(&format!("the GPU does not tell which it is: {error:?}")))?;
            let hex: String = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
            Ok(format!("GPU {hex} of {host}"))
        }
        Device::Cpu => {
            // For the stand-in each rank has one.
            static NUMBER: AtomicU64 = AtomicU64::new(0);
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            Ok(format!(
                "stand-in device {number} of process {} on {host}",
                std::process::id()
            ))
        }
        _ => Err(nccl_error("the device is not one that it is for")),
    }
}

/// Refuses two ranks on one device. `names` are by rank.
pub(super) fn check(names: &[String]) -> Result<(), TrainingError> {
    let mut first: BTreeMap<&str, usize> = BTreeMap::new();
    for (rank, name) in names.iter().enumerate() {
        if let Some(other) = first.insert(name, rank) {
            let message = format!(
                "it computes on {name}, and so does rank {other}: NCCL needs a GPU for each rank. Give each process its own \
                 by CUDA_VISIBLE_DEVICES, or have LOCAL_RANK or SLURM_LOCALID say which process of its machine it is \
                 (docs/machines.md)"
            );
            return Err(TrainingError::rank(rank, message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_share_a_device_are_named() {
        let check = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            check(&names).map_err(|error| error.to_string())
        };
        assert_eq!(check(&["GPU a of node1", "GPU b of node1", "GPU a of node2"]), Ok(()));
        let shared = check(&["GPU a of node1", "GPU b of node1", "GPU a of node1"]).unwrap_err();
        assert!(
            shared.starts_with("rank 2 of training failed: it computes on GPU a of node1, and so does rank 0: "),
            "{shared}"
        );
    }
}
