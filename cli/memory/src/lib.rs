//! `flow memory`: how much memory a pipeline's training will need, and the least time of one of its steps; or how much a model needs
//! for decoding.

use std::cmp::Ordering;
use std::io::Write;
use std::sync::Arc;

use flow_cli::arguments::PipelineArguments;
use flow_cli::failure::{Exit, Failure};
use flow_kind::available_memory;
use flow_kind::{Kind, Storage};
use flow_spec::{Checked, yaml};
use flow_training::init::{configuration, is_remote};
use flow_training::memory::{
    DataAssumptions, MeasuredMemory, MemoryNeeds, TOKENS_PER_SECOND, gigabytes, largest_batch,
};
use flow_training::resolved_settings::ResolvedSettings;
use flow_training::settings::{Optimizer, TrainSettings};
use flow_training::train::TrainingTrain;

mod arguments;
mod buckets;
mod decoding;
mod roofline;

pub use arguments::{DecodingMemoryArguments, MemoryArguments};
use flow_inspect::table;

/// Pieces of the vocabulary of parakeet-tdt-0.6b-v3.
const HUB_VOCABULARY: usize = 8192;

/// Writes what memory a training needs, or decoding with a model. `checked` reads and checks the pipeline.
///
/// # Errors
/// If an option, the pipeline or the model is wrong, or `out` cannot be written.
pub fn memory(
    storage: &Storage,
    arguments: &MemoryArguments,
    checked: &dyn Fn(&PipelineArguments) -> Result<Arc<Checked>, Failure>,
    out: &mut dyn Write,
) -> Result<Exit, Failure> {
    if decoding::is_model(&arguments.pipeline.pipeline) {
        return decoding::write(storage, out, arguments);
    }
    decoding::refuse_options(&arguments.decoding)?;
    let checked = checked(&arguments.pipeline)?;
    let pipeline = &checked.pipeline;
    let mut settings = settings(&checked, arguments)?;
    if arguments.device_memory.is_some() && !settings.separate_memory() {
        // Only the prediction depends on the device; the program need not be built for it.
        settings.device = "cuda".into();
    }
    let separate = settings.separate_memory();
    let wrong =
        |error: flow_training::TrainingError| Failure::unreadable(format!("{}: {error}", pipeline.path.display()));
    let config = if is_remote(&settings.init) {
        let vocabulary = arguments.vocabulary.unwrap_or(HUB_VOCABULARY);
        writeln!(
            out,
            "{} is not read: sizes are those of `model`, with {} pieces",
            settings.init,
            table::count(vocabulary as u64)
        )?;
        let sizes = settings.with(|settings| {
            settings.init = "none".into();
            settings.tokenizer.clear();
            settings.model.tokenizer.clear();
        });
        configuration(storage, &sizes, Some(vocabulary)).map_err(wrong)?
    } else {
        configuration(storage, &settings, arguments.vocabulary).map_err(wrong)?
    };
    let assumed = DataAssumptions {
        longest: arguments.longest.unwrap_or(settings.max_duration),
        tokens_per_second: arguments.tokens_per_second.unwrap_or(TOKENS_PER_SECOND),
    };
    // Beyond these the search for the largest batch would not end.
    for (option, value, most) in [
        ("--longest", assumed.longest, 86_400.0),
        ("--tokens-per-second", assumed.tokens_per_second, 1000.0),
    ] {
        if !(value > 0.0 && value <= most) {
            return Err(Failure::usage(
                format!("`{option}` is {value}"),
                format!("give a number above 0, at most {most}"),
            ));
        }
    }
    if arguments.roofline {
        let shape = arguments.micro_batch.or_else(|| assumed.shapes(&settings).pop());
        let shape = shape.ok_or_else(|| Failure::unreadable("there is no micro-batch to look at"))?;
        let name = pipeline.path.display().to_string();
        roofline::write(out, &name, &config, &settings, shape, arguments.device)?;
        return Ok(Exit::Done);
    }
    if arguments.bucket_batch_size {
        return buckets::write(out, pipeline, &config, &settings, &assumed, arguments);
    }
    let measure = |settings: &ResolvedSettings| -> Result<MeasuredMemory, Failure> {
        MeasuredMemory::new(&config, settings, &assumed.shapes(settings))
            .map_err(wrong)?
            .ok_or_else(|| Failure::unreadable("this program's allocator does not count"))
    };
    let measured = measure(&settings)?;
    let total = measured.needs(&settings);
    let shape = total.shape.map_or(String::new(), |shape| {
        format!(
            "; the worst micro-batch is {} of {} s with {} tokens each",
            table::plural(shape.utterances as u64, "clip"),
            shape.seconds,
            shape.tokens
        )
    });
    writeln!(
        out,
        "{}: {} encoder layers of width {}, {}, micro-batches of {} s{shape}",
        pipeline.path.display(),
        config.encoder.n_layers,
        config.encoder.d_model,
        table::plural(u64::from(settings.ranks), "rank"),
        settings.max_batch_seconds()
    )?;
    writeln!(out)?;
    let host = &total.host;
    let mut rows = vec![match separate {
        true => ["of one rank", "device", "host", "when"].map(String::from).to_vec(),
        false => ["of one rank", "memory", "when"].map(String::from).to_vec(),
    }];
    let mut row = |what: &str, device: u64, host: u64, when: &str| {
        let host = separate.then(|| gigabytes(host));
        let row = [Some(what.into()), Some(gigabytes(device)), host, Some(when.into())];
        rows.push(row.into_iter().flatten().collect());
    };
    let first = "while one is written, on the first rank";
    row("parameters", total.parameters, host.parameters, "always");
    row("optimizer", total.optimizer, host.optimizer, "always");
    row("averaged weights", total.average, 0, "always, on the first rank");
    row("copy for a checkpoint", total.checkpoint, host.checkpoint, first);
    let growing = "growing through the backward pass";
    row("gradients", total.gradients, host.gradients, growing);
    let used = "until the backward pass has used them";
    row("activations", total.activations, 0, used);
    row("joint and loss", total.joint, 0, "between forward and backward pass");
    row("one layer's workspace", total.workspace, 0, "in the layers");
    row("a step's peak", total.step, 0, "the most of the last four at once");
    row("an evaluation's peak", total.evaluation, 0, "between steps");
    row("all", total.total(), host.total(), "at most");
    let all = (total.of_ranks(settings.ranks), total.of_host(settings.ranks));
    if settings.ranks > 1 {
        let when = match separate {
            true => "devices together; the host, where it is one for all",
            false => "where they share one memory, as on the CPU",
        };
        row("all ranks", all.0, all.1, when);
    }
    for line in table::lines(&rows) {
        writeln!(out, "{line}")?;
    }
    writeln!(out)?;
    let recomputed = settings.with(|settings| settings.recompute = !settings.recompute);
    let other = measure(&recomputed)?.needs(&recomputed);
    switches(out, &settings, &measured, &other, separate)?;
    writeln!(out)?;
    let largest = |out: &mut dyn Write, device: u64| -> Result<(), Failure> {
        match largest_batch(&config, &settings, &assumed, device).map_err(wrong)? {
            Some(seconds) => writeln!(out, "the largest max_batch_seconds that fits: {seconds}")?,
            None => writeln!(out, "not even one clip of {} s fits", assumed.longest)?,
        }
        Ok(())
    };
    let mut fits = true;
    if let Some(here) = available_memory() {
        let (of, needed) = match separate {
            true => ("in host memory: ", all.1),
            false => ("", all.0),
        };
        let (verdict, bytes, there) = (verdict(needed, here), gigabytes(needed), gigabytes(here));
        writeln!(out, "{of}{bytes} {verdict} {there} that are available now")?;
        // With a device given, the host of the training is unknown.
        fits = separate || needed <= here;
        if !separate {
            let share = here / u64::from(settings.ranks.max(1));
            largest(out, share)?;
        }
    }
    if let Some(device) = arguments.device_memory {
        let needed = total.total();
        let (verdict, bytes, there) = (verdict(needed, device), gigabytes(needed), gigabytes(device));
        writeln!(out, "on the device: {bytes} {verdict} {there}")?;
        fits = needed <= device;
        largest(out, device)?;
    }
    Ok(if fits { Exit::Done } else { Exit::Noted })
}

fn verdict(needed: u64, there: u64) -> &'static str {
    match needed <= there {
        true => "fits into",
        false => "does not fit into",
    }
}

/// The effect of each setting.
fn switches(
    out: &mut dyn Write,
    settings: &ResolvedSettings,
    measured: &MeasuredMemory,
    recomputed: &MemoryNeeds,
    separate: bool,
) -> Result<(), Failure> {
    let now = measured.needs(settings);
    let other = match settings.optimizer {
        Optimizer::Adamw => (Optimizer::Adamw8bit, "optimizer: adamw8bit"),
        Optimizer::Adamw8bit => (Optimizer::Adamw, "optimizer: adamw"),
    };
    let mut changes = vec![
        (
            other.1.to_owned(),
            settings.with(|settings| settings.optimizer = other.0),
        ),
        (
            format!("checkpoint_in_background: {}", !settings.checkpoint_in_background),
            settings.with(|settings| settings.checkpoint_in_background = !settings.checkpoint_in_background),
        ),
        (
            format!("ranks: {}", settings.ranks * 2),
            settings.with(|settings| settings.ranks *= 2),
        ),
    ];
    if separate && !settings.fold_update {
        changes.push((
            format!("offload: {}", !settings.offload),
            settings.with(|settings| settings.offload = !settings.offload),
        ));
    }
    if settings.average_decay > 0.0 {
        changes.push((
            "average_decay: 0".into(),
            settings.with(|settings| settings.average_decay = 0.0),
        ));
    }
    let mut header = ["with", "one rank needs", "change", "host", "change"]
        .map(String::from)
        .to_vec();
    let columns = if separate { header.len() } else { 3 };
    header.truncate(columns);
    let mut rows = vec![header];
    let recomputed = (format!("recompute: {}", !settings.recompute), *recomputed);
    let changes = changes
        .into_iter()
        .map(|(name, settings)| (name, measured.needs(&settings)));
    for (name, then) in [recomputed].into_iter().chain(changes) {
        let mut row = vec![name];
        for (then, now) in [(then.total(), now.total()), (then.host.total(), now.host.total())] {
            let sign = match then.cmp(&now) {
                Ordering::Less => "-",
                Ordering::Equal => "",
                Ordering::Greater => "+",
            };
            row.extend([gigabytes(then), format!("{sign}{}", gigabytes(then.abs_diff(now)))]);
        }
        row.truncate(columns);
        rows.push(row);
    }
    for line in table::lines(&rows) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// The settings of the pipeline's training stage.
fn settings(checked: &Checked, arguments: &MemoryArguments) -> Result<ResolvedSettings, Failure> {
    let path = checked.pipeline.path.display();
    let written = checked.pipeline.stages.iter().zip(&checked.stages);
    let stages: Vec<_> = written
        .filter(|(_, stage)| stage.kind.name() == TrainingTrain::NAME)
        .filter(|(_, stage)| arguments.stage.as_ref().is_none_or(|name| *name == stage.name))
        .collect();
    let [(written, stage)] = stages.as_slice() else {
        let message = match (stages.is_empty(), &arguments.stage) {
            (true, Some(name)) => format!("{path} has no training stage {name}"),
            (true, None) => format!("{path} has no training stage"),
            (false, _) => format!("{path} has several training stages"),
        };
        return Err(Failure::usage(
            message,
            "name a stage of kind training.train with --stage",
        ));
    };
    // Both were read once before, by the check.
    let unreadable = |error: String| Failure::unreadable(format!("stage {}: {error}", stage.name));
    let secrets = &checked.pipeline.secrets;
    let settings: TrainSettings = secrets
        .while_reading(|| yaml::typed(&written.with))
        .map_err(|error| unreadable(error.message))?;
    let batches = stage.inputs.iter().find(|input| input.name == "batches");
    let schema = batches.ok_or_else(|| unreadable("it has no input `batches`".into()))?;
    ResolvedSettings::new(settings, &schema.schema).map_err(|error| unreadable(error.to_string()))
}
