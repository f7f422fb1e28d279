//! README.md of a model on the hub, from the run that wrote the model.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use flow_hub::HubReference;
use flow_inspect::frozen::Frozen;
use flow_storage::Storage;
use flow_store::{Access, Store};
use serde_json::{Value, json};

use flow_cli::failure::Failure;

/// The set of the report whose figures are shown.
const SET: &str = "validation";
/// The largest `scores.json` that is read.
const MAX_SCORES: u64 = 64 << 20;

/// What the run that wrote a model says of it.
#[derive(Default)]
struct Origin {
    /// What the training began from; none where it began from nothing.
    base: Option<String>,
    /// The validation set in `scores.json`.
    scores: Option<Value>,
}

/// The card of the model in a folder: where the state directory has the run that wrote it, with its base model and the error rates of
/// its report.
///
/// # Errors
/// Where the state directory cannot be read.
pub fn of_folder(storage: &Storage, folder: &Path, state: &Path, repository: &HubReference) -> Result<String, Failure> {
    Ok(card(&origin(storage, folder, state)?, repository))
}

fn origin(storage: &Storage, folder: &Path, state: &Path) -> Result<Origin, Failure> {
    if !Store::is_there(storage, state)? {
        return Ok(Origin::default());
    }
    let store = Store::open(storage, state, Access::Read)?;
    let wanted = real(folder);
    for id in store.runs()?.iter().rev() {
        let frozen = Frozen::read(&store.run_folder(id)?.join("spec.yaml"));
        let setting = |kind: &str, name: &str| {
            let values = frozen.stages_of(kind).map(|stage| format!("{stage}.{name}"));
            let values = values.filter_map(|name| frozen.settings.iter().find(|(known, _)| *known == name));
            values.map(|(_, value)| value.clone()).collect::<Vec<_>>()
        };
        if !setting("model.write", "out")
            .iter()
            .any(|out| real(Path::new(out)) == wanted)
        {
            continue;
        }
        let inits = setting("training.train", "init");
        let reports = setting("evaluation.report", "out");
        return Ok(Origin {
            base: inits.into_iter().next().filter(|init| init != "none"),
            scores: reports
                .first()
                .and_then(|report| scores(&Path::new(report).join("scores.json"))),
        });
    }
    Ok(Origin::default())
}

fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// The validation set of a report; none where there is no such file.
fn scores(file: &Path) -> Option<Value> {
    let is_small = file.metadata().is_ok_and(|metadata| metadata.len() <= MAX_SCORES);
    let text = is_small.then(|| std::fs::read(file).ok()).flatten()?;
    let scores: Value = serde_json::from_slice(&text).ok()?;
    let sets = scores["sets"].as_array()?;
    sets.iter().find(|set| set["name"] == SET).cloned()
}

/// An error rate in percent.
fn percent(score: &Value, units: &str) -> Option<f64> {
    let rate = score[units]["rate"].as_f64()?;
    Some((rate * 1e4).round() / 1e2)
}

fn card(origin: &Origin, repository: &HubReference) -> String {
    let scores = origin.scores.as_ref().unwrap_or(&Value::Null);
    let no_languages = serde_json::Map::new();
    let languages = scores["languages"].as_object().unwrap_or(&no_languages);
    // JSON is YAML.
    let mut header = String::new();
    let known: BTreeSet<&String> = languages
        .keys()
        .filter(|name| !["und", ""].contains(&name.as_str()))
        .collect();
    if !known.is_empty() {
        header += &format!("language: {}\n", json!(known));
    }
    header += "library_name: nemo\npipeline_tag: automatic-speech-recognition\n";
    let hub_model = origin.base.as_ref().and_then(|base| HubReference::parse(base)?.ok());
    if let Some(base) = &hub_model {
        header += &format!("base_model: {}\n", json!(base.repository()));
    }
    let metrics = [("wer", "words"), ("cer", "characters")]
        .into_iter()
        .filter_map(|(name, units)| Some(json!({ "type": name, "value": percent(&scores["overall"], units)? })));
    let metrics: Vec<Value> = metrics.collect();
    if !metrics.is_empty() {
        let result = json!({
            "task": { "type": "automatic-speech-recognition" }, "dataset": { "name": SET, "type": SET }, "metrics": metrics,
        });
        header += &format!(
            "model-index: {}\n",
            json!([{ "name": repository.name, "results": [result] }])
        );
    }
    let mut body = format!("# {}\n\n", repository.name);
    body += &match (&origin.base, &hub_model) {
        (_, Some(base)) => format!("Fine-tuned from {}.\n\n", base.repository()),
        // The path of a file says nothing elsewhere.
        _ => String::new(),
    };
    body += &format!(
        "    flow transcribe talk.wav --model hf://{}\n",
        repository.repository()
    );
    if !languages.is_empty() {
        body += "\nError rates on the validation rows, in percent:\n\n| language | utterances | WER | CER |\n|---|---|---|---|\n";
        for (name, score) in languages {
            let rate = |units| percent(score, units).map_or("-".to_owned(), |rate| format!("{rate:.2}"));
            let utterances = &score["utterances"];
            body += &format!(
                "| {} | {utterances} | {} | {} |\n",
                name.replace('|', "\\|"),
                rate("words"),
                rate("characters")
            );
        }
    }
    format!("---\n{header}---\n\n{body}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_has_the_base_model_and_the_figures() {
        let repository = HubReference::target("hf://o/parakeet-hi").unwrap();
        let score = |rate: f64| json!({ "utterances": 7, "words": { "rate": rate }, "characters": { "rate": null } });
        let origin = Origin {
            base: Some("hf://nvidia/parakeet-tdt-0.6b-v3@main".into()),
            scores: Some(json!({
                "name": "validation", "overall": score(0.1234), "languages": { "no": score(0.5), "und": score(0.25) },
            })),
        };
        let expected = r##"---
language: ["no"]
library_name: nemo
pipeline_tag: automatic-speech-recognition
base_model: "nvidia/parakeet-tdt-0.6b-v3"
model-index: [{"name":"parakeet-hi","results":[{"dataset":{"name":"validation","type":"validation"},"metrics":[{"type":"wer","value":12.34}],"task":{"type":"automatic-speech-recognition"}}]}]
---

# parakeet-hi

Fine-tuned from nvidia/parakeet-tdt-0.6b-v3.

    flow transcribe talk.wav --model hf://o/parakeet-hi

Error rates on the validation rows, in percent:

| language | utterances | WER | CER |
|---|---|---|---|
| no | 7 | 50.00 | - |
| und | 7 | 25.00 | - |
"##;
        assert_eq!(card(&origin, &repository), expected);
        let nothing = Origin {
            base: Some("/home/me/model.nemo".into()),
            scores: None,
        };
        let bare = card(&nothing, &repository);
        assert!(
            !bare.contains("/home") && !bare.contains("language") && bare.contains("library_name"),
            "{bare}"
        );
    }
}
