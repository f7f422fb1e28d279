//! The comparison of the needed memory with what is available, on the host and on devices.

use std::path::Path;
use std::time::{Duration, Instant, UNIX_EPOCH};

use candle_core::Device;
use flow_evaluation::decode::BATCH_SECONDS;
use flow_kernels::device::free_memory;
use flow_kernels::threads::install;
use flow_kind::available_memory;
use flow_kind::store::{read_note, write_note};
use flow_model::ModelConfig;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{BatchShape, DataAssumptions, MeasuredMemory, TOKENS_PER_SECOND, gigabytes};
use crate::error::TrainingError;
use crate::resolved_settings::ResolvedSettings;

/// The result of a check of the memory that ranks compute in, in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryCheck {
    /// Needed by the ranks of this process.
    pub needed: u64,
    /// Needed by each rank that is not the first.
    pub another: u64,
    /// Available to this process; none where each rank has a device of its own, whose memory [`check_device`] compares.
    pub available: Option<u64>,
    /// How long the trial took; none where the measurements of an earlier one were noted.
    pub tried: Option<Duration>,
}

/// The file in the folder of notes.
const NOTES: &str = "memory.json";

/// What an earlier trial measured.
#[derive(Serialize, Deserialize)]
struct Notes {
    /// What the measurements depend on, as a digest.
    of: String,
    measured: MeasuredMemory,
}

/// Predicts the needs of the `local_ranks` ranks of this process, and compares those in host memory with what is available.
/// With devices that have a memory of their own `needed` is that of the first rank. None where one of the two cannot be
/// measured.
///
/// A trial takes minutes for a large model on few cores. What it measured is noted in the folder `notes`, if training is to begin,
/// and serves later runs of the same program on the same model and micro-batches.
///
/// # Errors
/// Where more memory is needed than available.
pub fn check(
    settings: &ResolvedSettings,
    config: &ModelConfig,
    local_ranks: u32,
    notes: &Path,
) -> Result<Option<MemoryCheck>, TrainingError> {
    let assumed = DataAssumptions {
        longest: settings.max_duration,
        tokens_per_second: TOKENS_PER_SECOND,
    };
    let Some(available) = available_memory() else {
        return Ok(None);
    };
    let shapes = assumed.shapes(settings);
    let (of, notes) = (identity(settings, config, &shapes), notes.join(NOTES));
    let noted = of.as_deref().and_then(|of| noted(&notes, of));
    let (measured, tried) = match noted {
        Some(measured) => (measured, None),
        None => {
            let began = Instant::now();
            let Some(measured) = MeasuredMemory::new(config, settings, &shapes)? else {
                return Ok(None);
            };
            (measured, Some(began.elapsed()))
        }
    };
    let needs = measured.needs(settings);
    let separate = settings.separate_memory();
    let (total, what) = match separate {
        true => (needs.of_host(local_ranks), "host memory"),
        false => (needs.of_ranks(local_ranks), "memory"),
    };
    compare(total, available, "training", what)?;
    if let (Some(of), Some(_)) = (of, tried) {
        let measured = measured.clone();
        // Without the note the next run only takes longer to begin.
        let _ = write_note(&notes, &Notes { of, measured });
    }
    Ok(Some(MemoryCheck {
        needed: if separate { needs.total() } else { total },
        another: needs.of_another(),
        available: Some(available).filter(|_| !separate),
        tried,
    }))
}

/// All that measurements depend on: model, settings, shapes, the program and how many threads it computes on. None where the
/// program's file cannot be distinguished from another one.
fn identity(settings: &ResolvedSettings, config: &ModelConfig, shapes: &[BatchShape]) -> Option<String> {
    let program = std::env::current_exe().ok()?.metadata().ok()?;
    let written = program.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    let evaluation = (settings.eval_every > 0).then(|| settings.max_batch_seconds().min(BATCH_SECONDS));
    let of = json!({
        "program": [program.len(), written.as_nanos().to_string()],
        "threads": install(rayon::current_num_threads),
        "model": format!("{config:?}"),
        "precision": settings.precision,
        "trainable": [json!(settings.lora), json!(settings.groups)],
        "switches": [settings.recompute, settings.dropout, settings.spec_augment],
        "shapes": shapes,
        "evaluation_seconds": evaluation,
    });
    Some(blake3::hash(of.to_string().as_bytes()).to_hex().to_string())
}

fn noted(path: &Path, of: &str) -> Option<MeasuredMemory> {
    let notes: Notes = read_note(path)?;
    (notes.of == of).then_some(notes.measured)
}

/// Compares the needs of a rank with the memory of its device that nobody has taken. Nothing is compared where the device has none
/// of its own, or the driver does not tell.
///
/// # Errors
/// Where more memory is needed than available.
pub fn check_device(device: &Device, rank: usize, needed: u64) -> Result<(), TrainingError> {
    match free_memory(device) {
        None => Ok(()),
        Some(free) => compare(needed, free, &format!("rank {rank} of training"), "its device's memory"),
    }
}

fn compare(needed: u64, available: u64, who: &str, what: &str) -> Result<(), TrainingError> {
    if needed <= available {
        return Ok(());
    }
    Err(TrainingError::refused(
        format!(
            "{who} would need {} of {what}, and {} are available",
            gigabytes(needed),
            gigabytes(available)
        ),
        "`flow memory PIPELINE` says what needs how much; lower `max_batch_seconds` or `bucket_batch_size`, set `recompute: \
             true`, `optimizer: adamw8bit` or `checkpoint_in_background: false`; or `memory_check: false` to try all the same",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_both_sizes() {
        compare(5, 5, "training", "memory").unwrap();
        let error = compare(
            90_000_000_000,
            80_000_000_000,
            "rank 3 of training",
            "its device's memory",
        )
        .unwrap_err();
        let text = error.with_help();
        assert!(
            text.starts_with("rank 3 of training would need 90.0 GB of its device's memory, and 80.0 GB are available")
                && text.contains("memory_check: false"),
            "{text}"
        );
        // The host's memory is compared as a whole.
        check_device(&Device::Cpu, 0, u64::MAX).unwrap();
    }
}
