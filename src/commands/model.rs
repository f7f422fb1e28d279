//! `flow model`: models on disk, shown, converted and compared.

use std::io::Write;
use std::path::Path;

use flow_inspect::table;
use flow_model::checkpoint::diff::{ModelDiff, diff};
use flow_model::checkpoint::{DType, Format, OpenModel, dtype_name};
use flow_model::config::{AttentionContext, CausalConfig, NormPosition};
use flow_model::tokenizer::Tokenizer;
use flow_model::{ModelConfig, Weights, vocabulary};
use flow_storage::Storage;
use flow_store::{remove_left, write_atomically};
use flow_transcription::calibration::Calibration;
use flow_transcription::recognizer::digest;

use crate::arguments::{
    ModelCommand, ModelConvertArguments, ModelDiffArguments, ModelFormat, ModelInfoArguments, NewPieces,
};
use flow_cli::failure::{Exit, Failure};
use flow_cli::fetch::{local_model, tokenizer_of_file};

pub fn model(storage: &Storage, command: &ModelCommand, out: &mut dyn Write) -> Result<Exit, Failure> {
    match command {
        ModelCommand::Info(arguments) => info(storage, arguments, out),
        ModelCommand::Convert(arguments) => convert(storage, arguments, out),
        ModelCommand::Diff(arguments) => compare(storage, arguments, out),
    }
}

fn open(storage: &Storage, model: &str) -> Result<OpenModel, Failure> {
    let path = local_model(storage, model, true)?;
    OpenModel::open(&path).map_err(Failure::unreadable)
}

fn configuration(model: &OpenModel) -> Result<ModelConfig, Failure> {
    ModelConfig::from_nemo_yaml(&model.config_yaml)
        .map_err(|error| Failure::unreadable(format!("{}: {error}", model.path.display())))
}

fn tokenizer(model: &OpenModel) -> Result<Option<Tokenizer>, Failure> {
    let read = model.tokenizer.as_deref().map(Tokenizer::from_bytes).transpose();
    read.map_err(|error| Failure::unreadable(format!("{}: {error}", model.path.display())))
}

fn info(storage: &Storage, arguments: &ModelInfoArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let model = open(storage, &arguments.model)?;
    let config = configuration(&model)?;
    let tokenizer = tokenizer(&model)?;
    let (in_config, in_weights, in_tokenizer) = model.format.parts();
    let mut rows = vec![["what", "value", "from"].map(String::from).to_vec()];
    let mut row = |what: &str, value: String, from: &str| rows.push(vec![what.into(), value, from.into()]);
    row("model", model.path.display().to_string(), model.format.name());
    let count = |number: usize| table::count(number as u64);
    let trainable = model.tensors.iter().filter(|entry| !entry.is_buffer());
    let parameters: usize = trainable.map(|entry| entry.elements()).sum();
    row(
        "parameters",
        format!(
            "{} trainable, in {} tensors",
            count(parameters),
            count(model.tensors.len())
        ),
        in_weights,
    );
    row("number types", number_types(&model), in_weights);
    let (p, e) = (&config.preprocessor, &config.encoder);
    row(
        "features",
        format!(
            "{} mel bands, {} Hz, window {} s every {} s, FFT of {}",
            p.features, p.sample_rate, p.window_size, p.window_stride, p.n_fft
        ),
        in_config,
    );
    let attention = match e.attention_context {
        AttentionContext::Full => "full attention".to_string(),
        AttentionContext::Band(width) => format!("attention over {width} frames to either side"),
        AttentionContext::Chunks(_) => {
            let contexts: Vec<String> = e.causal.contexts.iter().map(ToString::to_string).collect();
            format!("attention in chunks with a context of {}", contexts.join(", "))
        }
    };
    row(
        "encoder",
        format!(
            "{} layers of width {}, {} heads, {attention}, convolution of {}, feed-forward x {}{}{}",
            e.n_layers,
            e.d_model,
            e.n_heads,
            e.conv_kernel_size,
            e.ff_expansion_factor,
            if e.use_bias { ", biases" } else { "" },
            if e.xscaling { ", scaled input" } else { "" },
        ),
        in_config,
    );
    row(
        "sub-sampling",
        format!("x 8, {} channels", e.subsampling_conv_channels),
        in_config,
    );
    if e.causal != CausalConfig::default() || !p.normalized {
        let streamed = config.streamed_contexts().unwrap_or_default();
        let cache_aware = match streamed.len() == e.causal.contexts.len() {
            true => "cache-aware".to_owned(),
            false => {
                let contexts: Vec<String> = streamed.iter().map(ToString::to_string).collect();
                format!("cache-aware in {}", contexts.join(", "))
            }
        };
        let facts = [
            (e.causal.subsampling, "causal sub-sampling"),
            (e.causal.convolution, "causal convolutions"),
            (e.causal.layer_norm, "layer normalisation in convolutions"),
            (!p.normalized, "features as they are"),
            (!streamed.is_empty(), cache_aware.as_str()),
        ];
        let facts = facts.into_iter().filter_map(|(is_so, fact)| is_so.then_some(fact));
        row("streaming", facts.collect::<Vec<_>>().join(", "), in_config);
    }
    if let Some(prompt) = &config.prompt {
        let languages: Vec<&str> = prompt.dictionary.iter().map(|(name, _)| name.as_str()).collect();
        let text = format!("{} prompts: {}", prompt.prompts, languages.join(", "));
        row("language prompt", text, in_config);
    }
    for adapter in &config.adapters {
        let norm = match adapter.norm_position {
            NormPosition::Pre => "first",
            NormPosition::Post => "last",
        };
        let state = if adapter.enabled { "" } else { ", not enabled" };
        let text = format!("{} of width {}, norm {norm}{state}", adapter.name, adapter.dim);
        row("linear adapter", text, in_config);
    }
    row("heads", config.heads().to_string(), in_config);
    let of_loss = if model.format == Format::HuggingFace {
        "stock values"
    } else {
        in_config
    };
    if let Some(transducer) = &config.transducer {
        let (prediction, loss) = (&transducer.prediction, &transducer.loss);
        row(
            "prediction network",
            format!(
                "{} LSTM layers of width {}",
                prediction.pred_rnn_layers, prediction.pred_hidden
            ),
            in_config,
        );
        row(
            "joint network",
            format!("width {}", transducer.joint.joint_hidden),
            in_config,
        );
        if !transducer.is_rnnt() {
            row("durations", format!("{:?}", loss.durations), in_config);
        }
        row(
            "loss",
            format!(
                "sigma {}, omega {}, {}{}",
                loss.sigma,
                loss.omega,
                loss.reduction.name(),
                config
                    .ctc
                    .as_ref()
                    .map_or(String::new(), |ctc| format!(", CTC head with weight {}", ctc.weight))
            ),
            of_loss,
        );
    } else {
        row("loss", format!("CTC, {}", config.reduction().name()), of_loss);
    }
    row(
        "vocabulary",
        format!("{} pieces, blank is {}", count(config.vocab_size), config.vocab_size),
        in_config,
    );
    match &tokenizer {
        Some(tokenizer) => row(
            "tokenizer",
            format!("{} pieces", count(tokenizer.vocabulary_size())),
            in_tokenizer,
        ),
        None => row(
            "tokenizer",
            format!("none: {}", model.no_tokenizer.as_deref().unwrap_or("")),
            "-",
        ),
    }
    for line in table::lines(&rows) {
        writeln!(out, "{line}")?;
    }
    for note in &model.notes {
        writeln!(out, "note: {note}")?;
    }
    if arguments.tensors {
        writeln!(out)?;
        let mut rows = vec![["tensor", "type", "shape", "values"].map(String::from).to_vec()];
        rows.extend(model.tensors.iter().map(|entry| {
            vec![
                entry.name.clone(),
                dtype_name(entry.dtype()).to_string(),
                format!("{:?}", entry.shape()),
                count(entry.elements()),
            ]
        }));
        for line in table::lines(&rows) {
            writeln!(out, "{line}")?;
        }
    }
    Ok(Exit::Done)
}

/// `f32`, or `bf16 (120 tensors), f32 (6)`.
fn number_types(model: &OpenModel) -> String {
    let mut counts = std::collections::BTreeMap::new();
    for entry in &model.tensors {
        *counts.entry(dtype_name(entry.dtype())).or_insert(0u64) += 1;
    }
    let parts: Vec<String> = (counts.into_iter())
        .map(|(name, tensors)| format!("{name} ({})", table::plural(tensors, "tensor")))
        .collect();
    parts.join(", ")
}

fn convert(storage: &Storage, arguments: &ModelConvertArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let format = match arguments.format {
        Some(ModelFormat::Nemo) => Format::Nemo,
        Some(ModelFormat::Hf) => Format::HuggingFace,
        Some(ModelFormat::Flow) => Format::Folder,
        None => format_of(&arguments.to)?,
    };
    if !arguments.force && arguments.to.symlink_metadata().is_ok() {
        return Err(Failure::usage(
            format!("{} is there already", arguments.to.display()),
            "give another name, or `--force` to replace it",
        ));
    }
    // What a process that was killed left there; what cannot be removed does no harm.
    // (A link that is replaced represents its target.)
    let target = std::fs::canonicalize(&arguments.to).unwrap_or_else(|_| arguments.to.clone());
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
    let _ = remove_left(folder.unwrap_or(Path::new(".")));
    let mut model = open(storage, &arguments.from)?;
    let calibration = calibration_of(&model.path)?;
    // Beside an archive; of a folder, which is not there yet, it is a part.
    let beside = Calibration::path_of(&arguments.to);
    if format == Format::Nemo && !arguments.force && beside.symlink_metadata().is_ok() {
        return Err(Failure::usage(
            format!("{} is there already: it is of another model", beside.display()),
            "give another name, or `--force` to replace it",
        ));
    }
    for note in &model.notes {
        writeln!(out, "note: {note}")?;
    }
    let mut keeps_scores = arguments.dtype.is_none();
    if let Some(path) = &arguments.tokenizer {
        let tokenizer = tokenizer_of_file(path)?;
        let how = match arguments.new_pieces {
            NewPieces::Mean => vocabulary::NewPieces::Mean,
            NewPieces::Random => vocabulary::NewPieces::Random,
        };
        let (changed, change) = model
            .with_tokenizer(&tokenizer, how, arguments.seed)
            .map_err(Failure::unreadable)?;
        model = changed;
        match change {
            Some(change) => {
                write!(out, "{}", change.table())?;
                writeln!(out, "{}", change.summary())?;
                keeps_scores = false;
            }
            None => writeln!(out, "the tokenizer has the model's own pieces: no row changes")?,
        }
    }
    if arguments.without_ctc {
        model = model.without_ctc().map_err(Failure::unreadable)?;
    }
    let dtype = arguments.dtype.map(|dtype| DType::from(Weights::from(dtype)));
    let old = match format {
        // One beside a folder is of an archive of this name.
        Format::HuggingFace | Format::Folder if !arguments.to.is_dir() => None,
        _ => Some(beside.as_path()),
    };
    let notes = without_calibration(old, || {
        let written = model.write(&arguments.to, format, dtype, arguments.force);
        written.map_err(Failure::unreadable)
    })?;
    for note in notes {
        writeln!(out, "note: {note}")?;
    }
    match calibration {
        Some(calibration) if keeps_scores => {
            let copied = Calibration::path_of(&arguments.to);
            let calibration = calibration.of_copy(&arguments.to).map_err(Failure::unreadable)?;
            write_atomically(&copied, &calibration.to_json().map_err(Failure::unreadable)?)?;
            writeln!(out, "{}: the calibration of confidences", copied.display())?;
        }
        Some(_) => writeln!(
            out,
            "note: the calibration of confidences is left out, as scores change: `flow evaluate confidence --calibrate` makes \
             another one"
        )?,
        None => {}
    }
    writeln!(out, "{}: {}", arguments.to.display(), format.name())?;
    Ok(Exit::Done)
}

/// Writes a model while the calibration of the one that it replaces is not there: a process that is killed leaves no model with the
/// calibration of another one. If the model cannot be written, the calibration is put back.
fn without_calibration<T>(path: Option<&Path>, write: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let Some(path) = path else { return write() };
    let failed = |error| Failure::unreadable(format!("cannot remove {}: {error}", path.display()));
    let old = match std::fs::read(path) {
        Ok(old) => old,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return write(),
        Err(error) => return Err(failed(error)),
    };
    std::fs::remove_file(path).map_err(failed)?;
    let written = write();
    if written.is_err() {
        // The first error counts.
        let _ = write_atomically(path, &old);
    }
    written
}

/// The calibration of confidences that a model has.
fn calibration_of(model: &Path) -> Result<Option<Calibration>, Failure> {
    if !Calibration::path_of(model).exists() {
        return Ok(None);
    }
    let found = digest(model).and_then(|digest| Calibration::of_model(model, &digest));
    found.map_err(Failure::unreadable)
}

/// The format that follows from a name.
fn format_of(target: &Path) -> Result<Format, Failure> {
    match target.extension().and_then(|ending| ending.to_str()) {
        Some("nemo") => Ok(Format::Nemo),
        None => Ok(Format::Folder),
        Some(other) => Err(Failure::usage(
            format!("{} ends in .{other}, which is not a form of a model", target.display()),
            "let it end in .nemo, or say `--format nemo|hf|flow`",
        )),
    }
}

fn compare(storage: &Storage, arguments: &ModelDiffArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    // An unreadable model must not count as a difference.
    let trouble = |failure: Failure| Failure::usage(failure.to_string(), "give two models that can be read");
    let first = open(storage, &arguments.first).map_err(trouble)?;
    let second = open(storage, &arguments.second).map_err(trouble)?;
    let found = diff(&first, &second).map_err(|error| trouble(Failure::unreadable(error)))?;
    show(&found, out)?;
    Ok(if found.is_empty() { Exit::Done } else { Exit::Failed })
}

fn show(found: &ModelDiff, out: &mut dyn Write) -> Result<(), Failure> {
    for (which, names) in [("first", &found.only_first), ("second", &found.only_second)] {
        for name in names {
            writeln!(out, "only in the {which}: {name}")?;
        }
    }
    if !found.tensors.is_empty() {
        let head = ["tensor", "type", "shape", "values that differ", "largest", "relative"];
        let mut rows = vec![head.map(String::from).to_vec()];
        for tensor in &found.tensors {
            let both = |a: String, b: String| if a == b { a } else { format!("{a} -> {b}") };
            let (dtypes, shapes) = (tensor.dtypes, &tensor.shapes);
            let mut row = vec![
                tensor.name.clone(),
                both(dtype_name(dtypes.0).into(), dtype_name(dtypes.1).into()),
                both(format!("{:?}", shapes.0), format!("{:?}", shapes.1)),
            ];
            row.extend(match tensor.values {
                Some(values) => [
                    table::count(values.count as u64),
                    format!("{:.3e}", values.largest),
                    format!("{:.3e}", values.relative),
                ],
                None => ["-", "-", "-"].map(String::from),
            });
            rows.push(row);
        }
        for line in table::lines(&rows) {
            writeln!(out, "{line}")?;
        }
    }
    for value in &found.configuration {
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".into());
        let (first, second) = (text(&value.first), text(&value.second));
        writeln!(out, "configuration: {}: {first} -> {second}", value.key)?;
    }
    for line in &found.tokenizer {
        writeln!(out, "tokenizer: {line}")?;
    }
    let compared = table::plural(found.compared as u64, "tensor");
    if found.is_empty() {
        writeln!(out, "the same: {compared}, configuration and tokenizer")?;
    } else {
        writeln!(out, "{} of {compared} in both differ", found.tensors.len())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_never_beside_the_calibration_of_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.confidence_calibration.json");
        std::fs::write(&path, "old").unwrap();
        let failed = without_calibration(Some(&path), || {
            assert!(!path.exists());
            Err::<(), _>(Failure::unreadable("no space"))
        });
        assert!(failed.is_err() && std::fs::read_to_string(&path).unwrap() == "old");
        let was_there = without_calibration(Some(&path), || Ok(path.exists())).unwrap();
        assert!(!was_there && !path.exists());
        without_calibration(Some(&path), || Ok(())).unwrap();
        std::fs::write(&path, "of another").unwrap();
        without_calibration(None, || Ok(())).unwrap();
        assert!(path.exists());
    }
}
