//! The kind `evaluation.report`: gathers what a run made and writes the report page.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{Float64Type, Int64Type, Schema};
use flow_runtime::{
    Artifact, Body, Conservation, Context, Export, ExportSet, Input, Kind, Reads, RejectSet, Role, Shape, StageError,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::page::{
    Curves, Evaluated, Mixture, MixtureShare, ModelFigures, PageData, SetFigures, VocabularyFigures, Worst, chosen,
    page, percent, when,
};
use crate::wer::{Score, score};

/// Name of the page within the folder.
const PAGE: &str = "report.html";
/// Bounds of the bars of the duration histogram, in seconds.
const DURATIONS: [f64; 10] = [1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 12.0, 16.0, 20.0, 30.0];

/// Writes the report of a training run: one page without other files, that works without scripts.
///
/// # What it does
///
/// Takes any number of inputs and knows them by their columns: transcripts of `evaluation.decode`, the
/// `model` of `training.train` (whose curves are read from `metrics.jsonl` beside the checkpoint), train
/// rows with `text`, `duration` and `lang`, and the port `languages` of `sampling.plan`. The page `report.html` shows
/// error rates by language, the worst utterances, the curves, language shares, what an epoch emits of each language
/// beside what the manifest holds, durations, padding, and what was rejected where and why. The table of error rates is
/// also told to the screen.
///
/// # Example
///
/// ```yaml
/// report:
///   uses: evaluation.report
///   from: {validation: decode, model: train, train: manifest/split.train, mixture: plan.languages}
///   with: {out: work/mini/report}
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportSettings {
    /// Folder that receives the page.
    pub out: String,
    /// Utterances to list among those with the most errors.
    #[serde(default = "default_worst")]
    pub worst: usize,
}

fn default_worst() -> usize {
    20
}

/// The kind `evaluation.report`.
pub struct EvaluationReport;

impl Kind for EvaluationReport {
    const NAME: &'static str = "evaluation.report";
    const VERSION: u32 = 2;
    type Settings = ReportSettings;

    fn shape(settings: &ReportSettings, inputs: &[Input]) -> Result<Shape, StageError> {
        if settings.out.trim().is_empty() {
            return Err(StageError::setting("out", "name a folder for the report"));
        }
        for input in inputs {
            if part_of(&input.schema).is_none() {
                return Err(StageError::Input {
                    name: input.name.clone(),
                    message: "it is neither transcripts of evaluation.decode, nor the model of training.train, nor rows with text, duration and lang, nor the port languages of sampling.plan".into(),
                    help: None,
                });
            }
        }
        if !inputs
            .iter()
            .any(|input| part_of(&input.schema) == Some(Part::Transcripts))
        {
            return Err(StageError::Input {
                name: "from".into(),
                message: "a report needs the transcripts of evaluation.decode".into(),
                help: None,
            });
        }
        Ok(Shape {
            role: Role::Export,
            reads: vec![Reads::Whole; inputs.len()],
            outputs: Vec::new(),
            dear: false,
            conservation: Conservation::NewRows,
        })
    }

    fn open(settings: &ReportSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Export(Box::new(ReportBody {
            settings: settings.clone(),
            context: context.clone(),
        })))
    }

    fn identity(settings: &ReportSettings) -> Value {
        json!({ "worst": settings.worst })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Transcripts,
    Model,
    Rows,
    Mixture,
}

fn part_of(schema: &Schema) -> Option<Part> {
    let has = |names: &[&str]| names.iter().all(|name| schema.column_with_name(name).is_some());
    if has(&["set", "segment_id", "lang", "reference", "hypothesis", "duration"]) {
        Some(Part::Transcripts)
    } else if has(&["path", "step", "digest"]) {
        Some(Part::Model)
    } else if has(&["text", "duration", "lang"]) {
        Some(Part::Rows)
    } else if has(&["balance", "language", "seconds", "seconds_in_batches"]) {
        Some(Part::Mixture)
    } else {
        None
    }
}

struct ReportBody {
    settings: ReportSettings,
    context: Context,
}

impl Export for ReportBody {
    fn folder(&self) -> PathBuf {
        PathBuf::from(&self.settings.out)
    }

    fn write(&mut self, inputs: &[Artifact], rejects: &RejectSet, set: &mut ExportSet) -> Result<(), StageError> {
        let mut data = PageData::default();
        for input in inputs {
            match part_of(input.schema()) {
                Some(Part::Transcripts) => data.sets.extend(read_sets(input, self.settings.worst)?),
                Some(Part::Model) => data.model = read_model(input)?,
                Some(Part::Rows) => read_rows(input, &mut data)?,
                Some(Part::Mixture) => data.mixture = read_mixture(input)?,
                None => {}
            }
        }
        if let Some(model) = &data.model
            && let Some(folder) = Path::new(&model.path).parent()
        {
            data.curves = read_curves(&folder.join("metrics.jsonl"));
        }
        for (stage, counts) in rejects.by_reason() {
            for count in counts {
                data.rejects
                    .push((stage.to_string(), count.reason, count.class.as_str().into(), count.rows));
            }
        }
        for table in tables(&data) {
            self.context.report(table);
        }
        let path = set.file(PAGE).map_err(StageError::failed)?;
        std::fs::write(&path, page(&data)).map_err(|e| StageError::failed(format!("{}: {e}", path.display())))
    }
}

/// The error rates as tables for the screen.
fn tables(data: &PageData) -> Vec<Value> {
    let row = |name: &str, score: &Score| {
        json!([
            name,
            score.utterances,
            score.words.units,
            percent(score.words.rate()),
            percent(score.characters.rate()),
            score.wrong_tags
        ])
    };
    data.sets
        .iter()
        .map(|set| {
            let mut rows: Vec<Value> = set.scores.languages.iter().map(|(lang, score)| row(lang, score)).collect();
            rows.push(row("all", &set.scores.overall));
            json!({ "table": { "title": format!("Error rates: {}", set.name), "columns": ["language", "utterances", "words", "WER", "CER", "wrong tag"], "rows": rows } })
        })
        .chain(course(&data.curves.evaluations))
        .collect()
}

/// How the word error rate of each language went, where training began from a model.
fn course(evaluations: &[Evaluated]) -> Option<Value> {
    let columns = chosen(evaluations);
    let first = columns.first().filter(|first| first.step == 0)?;
    let head: Vec<String> = ["language".to_owned()]
        .into_iter()
        .chain(columns.iter().map(|e| when(e)))
        .collect();
    let row = |name: &str, rate: &dyn Fn(&Evaluated) -> f64| {
        let rates = columns.iter().map(|e| percent(rate(e)).into());
        Value::Array([Value::from(name)].into_iter().chain(rates).collect())
    };
    let of = |lang: &str| {
        let lang = lang.to_owned();
        move |e: &Evaluated| e.languages.get(&lang).copied().unwrap_or(f64::NAN)
    };
    let mut rows: Vec<Value> = first.languages.keys().map(|lang| row(lang, &of(lang))).collect();
    rows.push(row("all", &|e| e.overall));
    Some(json!({ "table": { "title": "Word error rate while training", "columns": head, "rows": rows } }))
}

fn text<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a arrow::array::StringArray, StageError> {
    batch
        .column_by_name(name)
        .and_then(|c| c.as_string_opt())
        .ok_or_else(|| StageError::failed(format!("column {name} is missing or no text")))
}

/// Transcripts by the name of their set, scored again from the texts.
fn read_sets(input: &Artifact, worst: usize) -> Result<Vec<SetFigures>, StageError> {
    let mut sets: BTreeMap<String, SetFigures> = BTreeMap::new();
    for item in input.batches(Some(&[
        "set",
        "segment_id",
        "lang",
        "reference",
        "hypothesis",
        "duration",
    ])) {
        let (_, batch) = item?;
        let (names, segments, langs) = (text(&batch, "set")?, text(&batch, "segment_id")?, text(&batch, "lang")?);
        let (references, hypotheses) = (text(&batch, "reference")?, text(&batch, "hypothesis")?);
        let durations = float(&batch, "duration")?;
        for row in 0..batch.num_rows() {
            let set = sets.entry(names.value(row).to_owned()).or_insert_with(|| SetFigures {
                name: names.value(row).to_owned(),
                ..Default::default()
            });
            let (reference, hypothesis) = (references.value(row), hypotheses.value(row));
            let utterance = score(reference, hypothesis);
            set.scores.add(langs.value(row), &utterance, durations.value(row));
            if utterance.words.errors() > 0 {
                set.worst.push(Worst {
                    segment_id: segments.value(row).to_owned(),
                    lang: langs.value(row).to_owned(),
                    words: utterance.words,
                    reference: reference.to_owned(),
                    hypothesis: hypothesis.to_owned(),
                });
            }
            if set.worst.len() > worst.saturating_mul(4).saturating_add(1000) {
                keep_worst(&mut set.worst, worst);
            }
        }
    }
    let mut sets: Vec<SetFigures> = sets.into_values().collect();
    for set in &mut sets {
        keep_worst(&mut set.worst, worst);
    }
    Ok(sets)
}

fn keep_worst(list: &mut Vec<Worst>, keep: usize) {
    list.sort_by(|a, b| {
        (b.words.errors(), b.words.utterance_rate())
            .partial_cmp(&(a.words.errors(), a.words.utterance_rate()))
            .unwrap_or(std::cmp::Ordering::Equal)
            .then_with(|| (&a.segment_id, &a.reference).cmp(&(&b.segment_id, &b.reference)))
    });
    list.truncate(keep);
}

fn float<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a arrow::array::Float64Array, StageError> {
    batch
        .column_by_name(name)
        .and_then(|c| c.as_primitive_opt::<Float64Type>())
        .ok_or_else(|| StageError::failed(format!("column {name} is missing or no float64")))
}

pub(crate) fn read_model(input: &Artifact) -> Result<Option<ModelFigures>, StageError> {
    let mut last = None;
    for item in input.batches(None) {
        let (_, batch) = item?;
        let steps = batch
            .column_by_name("step")
            .and_then(|c| c.as_primitive_opt::<Int64Type>());
        let steps = steps.ok_or_else(|| StageError::failed("column step is missing or no int64"))?;
        let (paths, digests) = (text(&batch, "path")?, text(&batch, "digest")?);
        for row in 0..batch.num_rows() {
            last = Some(ModelFigures {
                path: paths.value(row).into(),
                step: steps.value(row),
                digest: digests.value(row).into(),
            });
        }
    }
    Ok(last)
}

fn read_rows(input: &Artifact, data: &mut PageData) -> Result<(), StageError> {
    let mut languages: BTreeMap<String, (u64, f64)> = BTreeMap::new();
    let mut bars = vec![0u64; DURATIONS.len() + 1];
    for item in input.batches(Some(&["lang", "duration"])) {
        let (_, batch) = item?;
        let (langs, durations) = (text(&batch, "lang")?, float(&batch, "duration")?);
        for row in 0..batch.num_rows() {
            let duration = if durations.is_null(row) || !durations.value(row).is_finite() {
                0.0
            } else {
                durations.value(row)
            };
            match languages.get_mut(langs.value(row)) {
                Some(sum) => *sum = (sum.0 + 1, sum.1 + duration),
                None => drop(languages.insert(langs.value(row).to_owned(), (1, duration))),
            }
            bars[DURATIONS.partition_point(|bound| *bound <= duration)] += 1;
        }
    }
    let end = bars.iter().rposition(|n| *n > 0).unwrap_or(0);
    let label = |index: usize| match index {
        0 => format!("< {}", DURATIONS[0]),
        i if i == DURATIONS.len() => format!("{}+", DURATIONS[i - 1]),
        i => format!("{}–{}", DURATIONS[i - 1], DURATIONS[i]),
    };
    data.durations = bars
        .into_iter()
        .enumerate()
        .take(end + 1)
        .map(|(index, n)| (label(index), n))
        .collect();
    data.languages = languages
        .into_iter()
        .map(|(lang, (n, seconds))| (lang, n, seconds))
        .collect();
    data.languages
        .sort_by(|a, b| b.2.total_cmp(&a.2).then_with(|| a.0.cmp(&b.0)));
    Ok(())
}

/// What a `sampling.plan` says about an epoch; nothing where it planned no rows.
fn read_mixture(input: &Artifact) -> Result<Option<Mixture>, StageError> {
    let mut mixture: Option<Mixture> = None;
    for item in input.batches(None) {
        let (_, batch) = item?;
        let number = |name: &str| -> Result<arrow::array::Int64Array, StageError> {
            let column = batch.column_by_name(name);
            let column = column.ok_or_else(|| StageError::failed(format!("column {name} is missing")))?;
            let cast = arrow::compute::cast(column, &arrow::datatypes::DataType::Int64)?;
            Ok(cast.as_primitive::<Int64Type>().clone())
        };
        let (epochs, rows, rows_in_batches) = (number("epoch")?, number("rows")?, number("rows_in_batches")?);
        let (balances, names) = (text(&batch, "balance")?, text(&batch, "language")?);
        let (temperatures, seconds) = (float(&batch, "temperature")?, float(&batch, "seconds")?);
        let seconds_in_batches = float(&batch, "seconds_in_batches")?;
        for row in 0..batch.num_rows() {
            let mixture = mixture.get_or_insert_with(|| Mixture {
                epoch: epochs.value(row),
                balance: balances.value(row).to_owned(),
                temperature: temperatures.value(row),
                languages: Vec::new(),
            });
            mixture.languages.push(MixtureShare {
                language: names.value(row).to_owned(),
                rows: rows.value(row),
                seconds: seconds.value(row),
                rows_in_batches: rows_in_batches.value(row),
                seconds_in_batches: seconds_in_batches.value(row),
            });
        }
    }
    Ok(mixture)
}

/// Reads the training figures. A file that is not there, or a line that was cut off, leaves gaps.
fn read_curves(path: &Path) -> Curves {
    let mut curves = Curves::default();
    let mut frozen = None;
    let Ok(file) = std::fs::File::open(path) else {
        return curves;
    };
    for line in BufReader::new(file).lines().map_while(Result::ok) {
        let Ok(value) = serde_json::from_str::<Value>(&line) else {
            continue;
        };
        let Some(step) = value["step"].as_f64() else { continue };
        let point = |name: &str| value[name].as_f64().map(|y| (step, y));
        match value["kind"].as_str() {
            Some("train") => {
                curves.loss.extend(point("loss"));
                curves.rate.extend(point("lr"));
                curves.padding.extend(point("padding"));
                curves.gradient_norm.extend(point("grad_norm"));
                frozen = value["encoder_frozen"].as_bool();
            }
            Some("evaluation") => {
                curves.wer.extend(point("wer"));
                curves.cer.extend(point("cer"));
                let languages = value["languages"].as_object().into_iter().flatten();
                curves.evaluations.push(Evaluated {
                    step: step as u64,
                    frozen,
                    overall: value["wer"].as_f64().unwrap_or(f64::NAN),
                    languages: languages
                        .filter_map(|(lang, score)| Some((lang.clone(), score["wer"].as_f64()?)))
                        .collect(),
                });
            }
            Some("skipped") => curves.skipped += 1,
            Some("vocabulary") => {
                let number = |name: &str| value[name].as_u64().unwrap_or(0);
                curves.vocabulary = Some(VocabularyFigures {
                    pieces: number("pieces"),
                    old_pieces: number("old_pieces"),
                    kept: number("kept"),
                    mean: number("mean"),
                    random: number("random"),
                });
            }
            // Counted anew each time that training begins.
            Some("long_texts") => curves.long_texts = value["over"].as_u64().unwrap_or(0),
            _ => {}
        }
    }
    curves
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
