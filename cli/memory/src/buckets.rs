//! `flow memory --bucket-batch-size`: the largest micro-batch of each bucket.

use std::io::Write;

use flow_inspect::table;
use flow_kernels::device::free_memory;
use flow_kind::available_memory;
use flow_model::ModelConfig;
use flow_spec::Pipeline;
use flow_training::TrainingError;
use flow_training::memory::{BatchShape, DataAssumptions, bucket_batch_sizes, gigabytes, step_fits};
use flow_training::resolved_settings::ResolvedSettings;

use crate::arguments::MemoryArguments;
use flow_cli::failure::{Exit, Failure};

pub fn write(
    out: &mut dyn Write,
    pipeline: &Pipeline,
    config: &ModelConfig,
    settings: &ResolvedSettings,
    assumed: &DataAssumptions,
    arguments: &MemoryArguments,
) -> Result<Exit, Failure> {
    let wrong = |error: TrainingError| Failure::unreadable(format!("{}: {error}", pipeline.path.display()));
    let uncounted = || Failure::unreadable("this program's allocator does not count");
    let memory = match arguments.device_memory {
        Some(memory) => memory,
        None if settings.separate_memory() => {
            let device = settings.device().map_err(wrong)?.open(0);
            let free = device.ok().as_ref().and_then(free_memory);
            free.ok_or_else(|| {
                Failure::usage(
                    "the memory of the device cannot be asked for here",
                    "say how much it has with --device-memory, such as 80GB",
                )
            })?
        }
        None => {
            let here = available_memory().ok_or_else(|| {
                Failure::usage(
                    "the memory of this machine is not known",
                    "say how much there is with --device-memory",
                )
            })?;
            here / u64::from(settings.ranks.max(1))
        }
    };
    let sizes = bucket_batch_sizes(config, settings, assumed, memory).map_err(wrong)?;
    let mut sizes = sizes.ok_or_else(uncounted)?;
    if arguments.trial {
        lower(&mut sizes, |shape| {
            step_fits(config, settings, shape, memory)
                .map_err(wrong)?
                .ok_or_else(uncounted)
        })?;
    }
    let mut rows = vec![
        ["seconds, up to", "tokens", "clips", "seconds in all"]
            .map(String::from)
            .to_vec(),
    ];
    rows.extend(sizes.iter().map(|shape| {
        let all = shape.seconds * shape.utterances as f64;
        [
            format!("{:.2}", shape.seconds),
            shape.tokens.to_string(),
            table::count(shape.utterances as u64),
            format!("{all:.0}"),
        ]
        .to_vec()
    }));
    writeln!(out, "{}: what fits into {}", pipeline.path.display(), gigabytes(memory))?;
    writeln!(out)?;
    for line in table::lines(&rows) {
        writeln!(out, "{line}")?;
    }
    writeln!(out)?;
    if let Some(shape) = sizes.iter().find(|shape| shape.utterances == 0) {
        writeln!(out, "not even one clip of {:.2} s fits", shape.seconds)?;
        return Ok(Exit::Noted);
    }
    let sizes: Vec<String> = sizes.iter().map(|shape| shape.utterances.to_string()).collect();
    writeln!(out, "bucket_batch_size: [{}]", sizes.join(", "))?;
    Ok(Exit::Done)
}

/// Lowers each size, by a tenth at a time, until `fits` says so. Equal buckets are tried once.
fn lower(sizes: &mut [BatchShape], fits: impl Fn(BatchShape) -> Result<bool, Failure>) -> Result<(), Failure> {
    let mut tried: Vec<(BatchShape, BatchShape)> = Vec::new();
    for size in sizes {
        let wanted = *size;
        if let Some((_, found)) = tried.iter().find(|(asked, _)| *asked == wanted) {
            *size = *found;
            continue;
        }
        while size.utterances > 0 && !fits(*size)? {
            size.utterances -= size.utterances.div_ceil(10);
        }
        tried.push((wanted, *size));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn sizes_are_lowered_until_they_fit() {
        let shape = |utterances, seconds| BatchShape {
            utterances,
            seconds,
            tokens: 10,
        };
        let mut sizes = [shape(100, 2.0), shape(9, 20.0), shape(9, 20.0), shape(3, 50.0)];
        let asked = RefCell::new(Vec::new());
        lower(&mut sizes, |shape| {
            asked.borrow_mut().push(shape.utterances);
            Ok(shape.utterances as f64 * shape.seconds <= 150.0 && shape.seconds < 40.0)
        })
        .unwrap();
        let found: Vec<usize> = sizes.iter().map(|shape| shape.utterances).collect();
        assert_eq!(found, [72, 7, 7, 0]);
        assert_eq!(asked.into_inner(), [100, 90, 81, 72, 9, 8, 7, 3, 2, 1]);
    }
}
