//! The comparison of the needed memory with what is available.

use flow_kernels::device::DeviceChoice;
use flow_model::ModelConfig;
use flow_runtime::available_memory;

use super::{DataAssumptions, MeasuredMemory, TOKENS_PER_SECOND, gigabytes};
use crate::error::TrainingError;
use crate::resolved_settings::ResolvedSettings;

/// The result of a check, in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryCheck {
    /// Needed by the ranks of this process.
    pub needed: u64,
    /// Needed by each rank that is not the first.
    pub another: u64,
    /// Available to this process.
    pub available: u64,
}

/// Compares the needs of the `local_ranks` ranks of this process with its available memory, for training on the CPU.
/// None for other devices, and where one of the two cannot be measured.
///
/// # Errors
/// Where more memory is needed than available.
pub fn check(
    settings: &ResolvedSettings,
    config: &ModelConfig,
    local_ranks: u32,
) -> Result<Option<MemoryCheck>, TrainingError> {
    if settings.device()? != DeviceChoice::Cpu {
        return Ok(None);
    }
    let assumed = DataAssumptions {
        longest: settings.max_duration,
        tokens_per_second: TOKENS_PER_SECOND,
    };
    let Some(available) = available_memory() else {
        return Ok(None);
    };
    let Some(measured) = MeasuredMemory::new(config, settings, &assumed.shapes(settings))? else {
        return Ok(None);
    };
    let needs = measured.needs(settings);
    let (total, another) = (needs.of_ranks(local_ranks), needs.of_another());
    if total <= available {
        return Ok(Some(MemoryCheck {
            needed: total,
            another,
            available,
        }));
    }
    Err(TrainingError::Refused {
        message: format!(
            "training would need {} of memory, and {} are available",
            gigabytes(total),
            gigabytes(available)
        ),
        help: Some(
            "`flow memory PIPELINE` says what needs how much; lower `max_batch_seconds`, set `recompute: true`, `optimizer: \
             adamw8bit` or `checkpoint_in_background: false`; or `memory_check: false` to try all the same"
                .into(),
        ),
    })
}
