//! `flow check`: is the pipeline right?

mod manifests;
mod training;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

use flow_hub::HubReference;
use flow_inspect::table::plural;
use flow_kind::StageError;
use flow_kind::registry::Registry;
use flow_runtime::Options;
use flow_spec::{Checked, CheckedStage, Diagnostic};
use flow_storage::Location;

use super::checked;
use crate::arguments::CheckArguments;
use flow_cli::failure::{Exit, Failure};

pub fn check(arguments: &CheckArguments, registry: &Registry, out: &mut dyn Write) -> Result<Exit, Failure> {
    let checked = checked(&arguments.pipeline, registry)?;
    if arguments.params {
        let lines = checked.pipeline.params.iter().map(|param| {
            let value = serde_json::to_string(&param.value).unwrap_or_default();
            vec![param.name.clone(), value, param.help.clone().unwrap_or_default()]
        });
        for line in flow_inspect::table::lines(&lines.collect::<Vec<_>>()) {
            writeln!(out, "{line}")?;
        }
    }
    let warnings = warnings(&checked);
    for warning in &warnings {
        match &warning.place {
            Some(place) => writeln!(out, "{place}: warning: {}", warning.message)?,
            None => writeln!(out, "warning: {}", warning.message)?,
        }
        if let Some(help) = &warning.help {
            writeln!(out, "  help: {help}")?;
        }
    }
    let stages = plural(checked.stages.len() as u64, "stage");
    let path = arguments.pipeline.pipeline.display();
    let found = match warnings.len() {
        0 => "nothing wrong".to_string(),
        count => format!(
            "nothing wrong with the pipeline itself, {}",
            plural(count as u64, "warning")
        ),
    };
    if arguments.deep {
        // Making the plan lists every source and reads the stages' logs.
        let options = Options::new(registry.storage(), &arguments.state.state);
        flow_runtime::run::plan(&checked, &options).map_err(|error| Failure::run(error, &checked))?;
        let (without, texts) = manifests::look_at_manifests(registry.storage(), &checked, out)?;
        training::look_at_training(registry.storage(), &checked, &texts, out)?;
        if !without.is_empty() {
            writeln!(
                out,
                "{path}: {stages}; the files are there, but {} would have no row",
                without.join(", ")
            )?;
            return Ok(Exit::Failed);
        }
        writeln!(out, "{path}: {stages}, {found}; the files are there")?;
    } else {
        writeln!(out, "{path}: {stages}, {found}")?;
    }
    Ok(Exit::Done)
}

/// Warnings about likely failures, without running anything.
fn warnings(checked: &Checked) -> Vec<Diagnostic> {
    let mut found = missing_sources(checked);
    found.extend(empty_ranges(checked));
    found.extend(same_manifest(checked));
    found
}

/// Settings that name a model, which may be one of the hub.
const HUB_SETTINGS: [&str; 3] = ["init", "model", "extend"];

/// Missing files and folders, each once.
fn missing_sources(checked: &Checked) -> Vec<Diagnostic> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for (index, stage) in checked.stages.iter().enumerate() {
        for (setting, path) in stage.settings.sources() {
            if path.as_os_str().is_empty() || !seen.insert(path.clone()) {
                continue;
            }
            match Location::of_path(&path) {
                // Nothing is asked of a server here.
                Ok(Location::Object(_)) => continue,
                Ok(Location::Local(path)) if path.exists() => continue,
                Ok(Location::Local(_)) => {}
                Err(error) => {
                    found.push(checked.diagnose(index, &StageError::setting(setting, error)));
                    continue;
                }
            }
            let hub = match path.to_str().and_then(HubReference::meant) {
                Some(meant) if HUB_SETTINGS.contains(&setting) => {
                    format!("; a model of the Hugging Face hub is written {meant}")
                }
                _ => String::new(),
            };
            let message = format!("{} does not exist{hub}", path.display());
            found.push(checked.diagnose(index, &StageError::setting(setting, message)));
        }
    }
    found
}

/// Pairs of parameters that are the ends of a range, the lower one first.
const RANGES: [(&str, &str); 1] = [("min_duration", "max_duration")];

/// Empty ranges of parameters.
fn empty_ranges(checked: &Checked) -> Vec<Diagnostic> {
    let params = &checked.pipeline.params;
    let mut found = Vec::new();
    for (low, high) in RANGES {
        for lower in params {
            let Some(group) = lower.name.strip_suffix(low) else {
                continue;
            };
            let upper = params.iter().find(|param| param.name.strip_suffix(high) == Some(group));
            let Some(upper) = upper else { continue };
            let (Some(least), Some(most)) = (lower.value.as_f64(), upper.value.as_f64()) else {
                continue;
            };
            if least > most {
                let message = format!(
                    "`{}` is {least}, more than `{}`, {most}: no row stays",
                    lower.name, upper.name
                );
                found.push(Diagnostic::new(message).help(format!("{}; {}", lower.given_by, upper.given_by)));
            }
        }
    }
    found
}

/// Training and validation rows that must be disjoint but are read from the same manifest.
fn same_manifest(checked: &Checked) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    for stage in &checked.stages {
        let may_overlap = stage.settings.all()["allow_overlap"] == true;
        if stage.kind.name() != "manifest.disjoint" || may_overlap {
            continue;
        }
        let input = |name: &str| {
            let input = stage.inputs.iter().find(|input| input.name == name)?;
            Some((input.stage, manifest_of(&checked.stages[input.stage])?))
        };
        if let (Some((val, val_manifest)), Some((train, train_manifest))) = (input("val"), input("train"))
            && is_same(&val_manifest, &train_manifest)
        {
            let train = &checked.stages[train].name;
            let message = format!("these are the rows that `{train}` reads too: what is trained on cannot validate");
            let wrong = StageError::setting("manifest", message);
            found.push(checked.diagnose(val, &wrong));
        }
    }
    found
}

/// The manifest that a stage reads, if it reads one.
fn manifest_of(stage: &CheckedStage) -> Option<String> {
    if stage.kind.name() != "manifest.read" {
        return None;
    }
    let settings = stage.settings.all();
    let manifest = settings["manifest"].as_str()?;
    (!manifest.is_empty()).then(|| manifest.to_string())
}

fn is_same(one: &str, other: &str) -> bool {
    let real = |path: &str| Path::new(path).canonicalize().ok();
    one == other || real(one).is_some_and(|one| real(other) == Some(one))
}
