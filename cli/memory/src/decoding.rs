//! How much memory a model needs for decoding, in a service or a transcription.

use std::io::{Read, Write};
use std::path::Path;

use flow_inspect::table;
use flow_kernels::device::DeviceChoice;
use flow_kind::{Storage, available_memory, open_regular_file};
use flow_model::checkpoint::{OpenModel, base_and_adapter};
use flow_model::decoding_memory::{batch_bytes, weight_bytes};
use flow_model::encoder::cached::stream_bytes;
use flow_model::{ModelConfig, Precision, Weights};
use flow_training::memory::gigabytes;

use super::verdict;
use crate::arguments::{DecodingMemoryArguments, MemoryArguments};
use flow_cli::failure::{Exit, Failure};
use flow_cli::fetch::local_model;

/// Seconds of a batch, and of its longest window: those of the service.
const BATCH_SECONDS: f64 = 120.0;
const MAX_WINDOW: f64 = 20.0;

/// Whether the first argument is a model and not a pipeline: an archive, by its name or by how it begins, a folder, or a URL.
pub fn is_model(named: &Path) -> bool {
    if named
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("nemo"))
        || named.is_dir()
        || base_and_adapter(named).is_some()
        || named.to_str().is_some_and(|text| text.contains("://"))
    {
        return true;
    }
    let mut head = Vec::new();
    let read = open_regular_file(named).and_then(|file| file.take(512).read_to_end(&mut head));
    let is_tar = || head.get(257..262) == Some(b"ustar".as_slice());
    read.is_ok() && (head.starts_with(b"\x1f\x8b") || head.starts_with(b"PK\x03\x04") || is_tar())
}

/// Options by name, and whether they are given.
type Given = (&'static str, bool);

/// Refuses options that are for something else.
fn refuse(options: &[Given], are_for: &str, help: &str) -> Result<(), Failure> {
    match options.iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((name, _)) => Err(Failure::usage(format!("`{name}` is for {are_for}"), help)),
    }
}

/// Refuses options of decoding where a pipeline is named.
pub fn refuse_options(given: &DecodingMemoryArguments) -> Result<(), Failure> {
    let options = [
        ("--batch-seconds", given.batch_seconds.is_some()),
        ("--max-window", given.max_window.is_some()),
        ("--weights", given.weights.is_some()),
        ("--precision", given.precision.is_some()),
    ];
    let help = "name a model, such as a .nemo archive, in place of the pipeline";
    refuse(&options, "decoding with a model", help)
}

pub fn write(storage: &Storage, out: &mut dyn Write, arguments: &MemoryArguments) -> Result<Exit, Failure> {
    let pipeline = &arguments.pipeline;
    let options = [
        ("--config", !pipeline.config.is_empty()),
        ("--set", !pipeline.set.is_empty()),
        ("--longest", arguments.longest.is_some()),
        ("--tokens-per-second", arguments.tokens_per_second.is_some()),
        ("--vocabulary", arguments.vocabulary.is_some()),
        ("--stage", arguments.stage.is_some()),
        ("--bucket-batch-size", arguments.bucket_batch_size),
        ("--roofline", arguments.roofline),
    ];
    let help = "a model, such as a .nemo archive, is looked at for decoding; name a pipeline's file for its training";
    refuse(&options, "the training of a pipeline", help)?;
    let named = pipeline.pipeline.to_string_lossy();
    let path = local_model(storage, &named, true)?;
    let batch_seconds = arguments.decoding.batch_seconds.unwrap_or(BATCH_SECONDS);
    let max_window = arguments.decoding.max_window.unwrap_or(MAX_WINDOW);
    for (name, value, most) in [
        ("--batch-seconds", batch_seconds, 1e6),
        ("--max-window", max_window, 3600.0),
    ] {
        if !(1.0..=most).contains(&value) {
            return Err(Failure::usage(
                format!("`{name}` is {value}"),
                format!("give a number of seconds from 1 to {most}"),
            ));
        }
    }
    let weights = arguments.decoding.weights.map_or(Weights::F32, Weights::from);
    let precision = arguments.decoding.precision.map_or(Precision::F32, Precision::from);
    let fits = precision.check(weights, DeviceChoice::Cpu);
    fits.map_err(|why| Failure::usage(why, "leave one of --precision and --weights out"))?;
    let opened = OpenModel::open(&path).map_err(Failure::unreadable)?;
    let stored = weight_bytes(&opened, weights, precision);
    let config = ModelConfig::from_nemo_yaml(&opened.config_yaml)
        .map_err(|error| Failure::unreadable(format!("{named}: {error}")))?;
    let batch = batch_bytes(opened, weights, precision, max_window, batch_seconds).map_err(Failure::unreadable)?;
    let batch = batch.ok_or_else(|| Failure::unreadable("this program's allocator does not count"))?;
    let all = stored.saturating_add(batch);
    writeln!(
        out,
        "{named}: batches of {batch_seconds} s, padding included, in windows of at most {max_window} s"
    )?;
    writeln!(out)?;
    let row = |what: &str, bytes: u64, when: &str| [what, &gigabytes(bytes), when].map(String::from).to_vec();
    let mut rows = vec![
        ["decoding", "memory", "when"].map(String::from).to_vec(),
        row("weights", stored, "always"),
        row("a batch", batch, "at most, while it is decoded"),
        row("all", all, "at most"),
    ];
    for context in config.streamed_contexts().unwrap_or_default() {
        let (bytes, shared) = stream_bytes(&config.encoder, context).map_err(Failure::unreadable)?;
        let when = format!("beside these, for each at most; {} once for all", gigabytes(shared));
        rows.push(row(&format!("a stream in {context}"), bytes, &when));
    }
    for line in table::lines(&rows) {
        writeln!(out, "{line}")?;
    }
    writeln!(out)?;
    let limit = match arguments.device_memory {
        Some(device) => Some(("on the device: ", device, "")),
        None => available_memory().map(|bytes| ("", bytes, " that are available now")),
    };
    let Some((of, limit, which)) = limit else {
        return Ok(Exit::Done);
    };
    writeln!(
        out,
        "{of}{} {} {}{which}",
        gigabytes(all),
        verdict(all, limit),
        gigabytes(limit)
    )?;
    Ok(if all <= limit { Exit::Done } else { Exit::Noted })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_told_from_pipelines() {
        for (named, expected) in [
            ("a/model.nemo", true),
            ("hf://owner/name", true),
            ("s3://bucket/model", true),
            ("/", true),
            ("finetune", false),
            ("pipelines/finetune.yaml", false),
            ("no-such-folder/model", false),
        ] {
            assert_eq!(is_model(Path::new(named)), expected, "{named}");
        }
    }

    #[test]
    fn defaults_are_those_of_the_service() {
        let service = flow_service::engine::EngineSettings::default();
        assert_eq!((BATCH_SECONDS, MAX_WINDOW), (service.batch_seconds, service.max_window));
    }
}
