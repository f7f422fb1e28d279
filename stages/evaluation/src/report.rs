//! The kind `evaluation.report`: writes the report page of a training run.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use arrow::array::{Array, AsArray};
use arrow::datatypes::Int64Type;
use flow_kind::{
    Artifact, Body, ColumnType, Context, Export, ExportSet, InputCount, InputPort, Inputs, Kind, OutputPort, Shape,
    StageError, UrlUse,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::bootstrap::Resampling;
use crate::error::{EvaluationError, nothing_to_score};
use crate::figures::{KnownTimes, Measure, SetFigures, as_json, float, read_known_times, read_sets, text};
use crate::normalize::{Normalization, Normalizer};
use crate::page::{Curves, Evaluated, Mixture, MixtureShare, ModelFigures, PageData, VocabularyFigures, page};
use crate::screen::tables;
use crate::transcript_lines::write_all;
use crate::word_groups::{TrainingCounts, WordMeasure};

/// Name of the page within the folder, ...
const PAGE: &str = "report.html";
/// ... of the same figures for programs, ...
const SCORES: &str = "scores.json";
/// ... and of the transcripts in NeMo's format.
const TRANSCRIPTS: &str = "transcripts.jsonl";
/// Bounds of the bars of the duration histogram, in seconds.
const DURATIONS: [f64; 10] = [1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 12.0, 16.0, 20.0, 30.0];

/// Writes the report of a training run: one page without other files, that works without scripts.
///
/// # What it does
///
/// Takes any number of inputs and identifies them by their columns: transcripts of `evaluation.decode`, the `model` of
/// `training.train` (whose curves are read from `metrics.jsonl` beside the checkpoint), train rows with `text`,
/// `duration` and `lang`, and the port `languages` of `sampling.plan`. The page `report.html` begins with the word error
/// rate before and after training, and shows the curves and error rates by
/// language (with a 95 % confidence interval, which takes utterances as independent), by duration and by source, the confusion of language tags, the worst utterances (with a player, where
/// `evaluation.decode` kept their audio: it is in the page itself), language shares in an epoch and in the
/// manifest, durations, padding, and the rejects by stage and reason. Where transcripts have the column `word` of `evaluation.decode`,
/// the page has the expected calibration error of confidences with a table of reliability (words are compared as normalised), and with
/// the input `alignments` the errors of the times of words: the median and the 95th percentile. The short tables are also shown on the screen.
/// `scores.json` beside the page holds all error rates for programs, and `transcripts.jsonl` the transcripts as NeMo
/// writes them: `audio_filepath`, `duration`, `text` (the reference as it is scored), `pred_text`, `lang`,
/// `segment_id`, `set`, `source`; where the audio is in a tar, `audio_filepath` is the tar, and `tar_offset` and
/// `tar_size` say where in it, in bytes.
///
/// Error rates count case and punctuation, as NeMo's do. With `normalize` the rates of normalised texts are shown
/// beside them. With `resamples` all rates have confidence intervals by the bootstrap, for which recordings, or the speakers of
/// `cluster`, are drawn as a whole. `by`, `training_counts`, `names` and `switches` add rates of rows and of words; they are
/// in `scores.json` as `columns`, `rare_words`, `names` and `switches`. A deleted or substituted word counts in its own group of
/// words, an inserted one in the group that it belongs to itself; words are normalised as `normalize` says, and tags inside of texts are none. A source is the column `dataset` of the rows that were decoded, or else `source`; where that is the
/// same for all, it is the shard.
///
/// # Example
///
/// ```yaml
/// report:
///   uses: evaluation.report
///   from: {validation: decode, model: train, train: manifest/split.train, mixture: plan.languages}
///   with: {out: work/mini/report, normalize: keep_marks}
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReportSettings {
    /// Folder that receives the page; may be in object storage (`s3://bucket/folder`, see docs/storage.md).
    pub out: String,
    /// Utterances to list among those with the most errors.
    #[serde(default = "default_worst")]
    pub worst: usize,
    /// Normalisation of texts for a second set of rates beside the plain ones.
    #[serde(default)]
    pub normalize: Normalization,
    /// With `normalize: whisper_basic`: drop diacritics (category Mn after NFKD, and strokes as in `ø`), as the option of
    /// Whisper's of that name.
    #[serde(default)]
    pub remove_diacritics: bool,
    /// With `normalize`: a space between any two letters (grapheme clusters), as the option of Whisper's of that name, for
    /// languages that put no spaces between words.
    #[serde(default)]
    pub split_letters: bool,
    /// Normalisers of single languages instead of `normalize`, by the codes of the rows: `{en: open_asr_english, hi: indic}`.
    #[serde(default)]
    pub normalize_languages: BTreeMap<String, Normalization>,
    /// With `normalize: indic` (or `by_language`): digits of all scripts become those of ASCII, so that `१२` is `12`.
    #[serde(default)]
    pub ascii_digits: bool,
    /// Resamples of the bootstrap for 95 % confidence intervals of all rates, 10000 for instance; 0: the interval of the word
    /// error rate that takes utterances as independent. Recordings are drawn as a whole (see `cluster`).
    #[serde(default)]
    pub resamples: u32,
    /// Seed of the bootstrap.
    #[serde(default)]
    pub seed: u64,
    /// With `resamples`: the column of the transcripts whose rows of equal values are drawn as a whole, such as `speaker`. Empty:
    /// the recording, by `audio_path`, or by `tar_path` and `tar_offset`, else each row for itself.
    #[serde(default)]
    pub cluster: String,
    /// Columns of the transcripts by whose values there are rates, too.
    #[serde(default)]
    pub by: Vec<String>,
    /// With an input `train`: rates of words by how often they are in its texts. Each number is the first count of a range;
    /// `[1, 10, 100]` has the ranges 0, 1 to 9, 10 to 99, and 100 or more.
    #[serde(default)]
    pub training_counts: Vec<u64>,
    /// Names, of one or several words, that have a rate of their own.
    #[serde(default)]
    pub names: Vec<String>,
    /// Rates of the words in another script, or behind a tag of another language in the text, than the word before (code-switching).
    #[serde(default)]
    pub switches: bool,
    /// Upper edges of the ranges of duration with separate rates, in seconds; an utterance on an edge falls into the
    /// range above it.
    #[serde(default = "default_bounds")]
    pub duration_bounds: Vec<f64>,
    /// Folder below which the tars are (the parameter `shards`); put before their paths in `transcripts.jsonl`.
    #[serde(default)]
    pub shards: PathBuf,
}

impl Default for ReportSettings {
    fn default() -> Self {
        ReportSettings {
            out: String::new(),
            worst: default_worst(),
            normalize: Normalization::None,
            remove_diacritics: false,
            split_letters: false,
            normalize_languages: BTreeMap::new(),
            ascii_digits: false,
            resamples: 0,
            seed: 0,
            cluster: String::new(),
            by: Vec::new(),
            training_counts: Vec::new(),
            names: Vec::new(),
            switches: false,
            duration_bounds: default_bounds(),
            shards: PathBuf::new(),
        }
    }
}

fn default_worst() -> usize {
    20
}

/// Those of the sampler's buckets.
fn default_bounds() -> Vec<f64> {
    flow_sampling::plan::Packing::default().boundaries
}

impl ReportSettings {
    fn normalizer(&self) -> Normalizer {
        Normalizer {
            normalization: self.normalize,
            remove_diacritics: self.remove_diacritics,
            split_letters: self.split_letters,
            languages: self.normalize_languages.clone(),
            ascii_digits: self.ascii_digits,
        }
    }

    fn measure(&self) -> Measure {
        Measure {
            normalizer: self.normalizer(),
            duration_bounds: self.duration_bounds.clone(),
            worst: self.worst,
            by: self.by.clone(),
            words: WordMeasure {
                rare: (!self.training_counts.is_empty()).then(|| TrainingCounts::new(self.training_counts.clone())),
                names: self.names.clone(),
                switches: self.switches,
            },
            resampling: (self.resamples > 0).then_some(Resampling {
                resamples: self.resamples as usize,
                seed: self.seed,
            }),
            cluster: self.cluster.clone(),
        }
    }

    /// The settings that later versions added, where they are given: without them, what was reported before stays valid.
    fn added(&self) -> BTreeMap<&'static str, Value> {
        let added = [
            (
                "normalize_languages",
                !self.normalize_languages.is_empty(),
                json!(self.normalize_languages),
            ),
            ("ascii_digits", self.ascii_digits, json!(self.ascii_digits)),
            (
                "resamples",
                self.resamples > 0,
                json!([self.resamples, self.seed, self.cluster]),
            ),
            ("by", !self.by.is_empty(), json!(self.by)),
            (
                "training_counts",
                !self.training_counts.is_empty(),
                json!(self.training_counts),
            ),
            ("names", !self.names.is_empty(), json!(self.names)),
            ("switches", self.switches, json!(self.switches)),
        ];
        let given = added.into_iter().filter(|(_, is_given, _)| *is_given);
        given.map(|(name, _, value)| (name, value)).collect()
    }

    /// Refuses settings that would do nothing, or that the inputs do not have the columns for.
    fn check(&self, inputs: &Inputs) -> Result<(), StageError> {
        let rising = self.training_counts.windows(2).all(|counts| counts[0] < counts[1]);
        if !rising || self.training_counts.first() == Some(&0) {
            let why = "`training_counts` are rising numbers from 1 on: the first counts of ranges after that of 0";
            return Err(StageError::setting("training_counts", why));
        }
        if !self.training_counts.is_empty() && inputs.of("train").next().is_none() {
            let why = "`training_counts` needs an input `train`, whose texts are counted";
            return Err(StageError::setting("training_counts", why));
        }
        if !self.cluster.is_empty() && self.resamples == 0 {
            return Err(StageError::setting("cluster", "`cluster` needs `resamples`"));
        }
        if self.resamples > MOST_RESAMPLES {
            let why = format!("`resamples` is at most {MOST_RESAMPLES}");
            return Err(StageError::setting("resamples", why));
        }
        let by = self.by.iter().map(|column| ("by", column));
        let cluster = Some(("cluster", &self.cluster)).filter(|(_, column)| !column.is_empty());
        for (setting, column) in by.chain(cluster) {
            for input in inputs.of("transcripts") {
                if input.schema.column_with_name(column).is_none() {
                    let why = format!("input `{}` has no column `{column}`", input.name);
                    let help = format!("if an evaluation.decode gives it, set `{setting}` there too");
                    return Err(StageError::setting(setting, why).with_help(help));
                }
            }
        }
        Ok(())
    }
}

/// More resamples than this give nothing but work.
const MOST_RESAMPLES: u32 = 1_000_000;

/// The kind `evaluation.report`.
pub struct EvaluationReport;

impl Kind for EvaluationReport {
    const NAME: &'static str = "evaluation.report";
    const VERSION: u32 = 7;
    const INPUTS: &'static [InputPort] = &[
        InputPort::whole(
            "transcripts",
            "transcripts of an evaluation.decode; several inputs are shown one after the other",
        )
        .count(InputCount::Many)
        .columns(&[
            ("set", ColumnType::Any),
            ("segment_id", ColumnType::Any),
            ("lang", ColumnType::Any),
            ("reference", ColumnType::Any),
            ("hypothesis", ColumnType::Any),
            ("duration", ColumnType::Any),
        ]),
        InputPort::whole("model", "the model of a training.train")
            .optional()
            .columns(MODEL_COLUMNS),
        InputPort::whole("train", "the rows that were trained on")
            .optional()
            .columns(&[
                ("text", ColumnType::AnyText),
                ("duration", ColumnType::Number),
                ("lang", ColumnType::AnyText),
            ]),
        InputPort::whole(
            "alignments",
            "known times of words, such as a transcription.align gives them: `words` is a list of `word`, `start` and `end`, in seconds \
             from the beginning of the row's audio",
        )
        .optional()
        .columns(&[("segment_id", ColumnType::AnyText), ("words", ColumnType::Any)]),
        InputPort::whole("mixture", "the port `languages` of a sampling.plan")
            .optional()
            .columns(&[
                ("balance", ColumnType::Any),
                ("language", ColumnType::Any),
                ("seconds", ColumnType::Any),
                ("seconds_in_batches", ColumnType::Any),
            ]),
    ];
    const OUTPUTS: &'static [OutputPort] = &[];
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[("out", UrlUse::Write), ("shards", UrlUse::Text)];
    type Settings = ReportSettings;

    fn shape(settings: &ReportSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        if settings.out.trim().is_empty() {
            return Err(StageError::setting("out", "name a folder for the report"));
        }
        if let Err((option, needed)) = settings.normalizer().check() {
            let why = format!("`{option}` needs {needed} as `normalize`");
            return Err(StageError::setting(option, why));
        }
        let bounds = &settings.duration_bounds;
        if !bounds.iter().all(|edge| edge.is_finite()) || !bounds.is_sorted() {
            let why = "`duration_bounds` are finite numbers in rising order";
            return Err(StageError::setting("duration_bounds", why));
        }
        settings.check(inputs)?;
        Ok(Shape::export())
    }

    fn open(settings: &ReportSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Export(Box::new(ReportBody {
            settings: settings.clone(),
            context: context.clone(),
        })))
    }

    fn identity(settings: &ReportSettings) -> Value {
        let mut identity = json!({
            "worst": settings.worst, "normalize": settings.normalize, "remove_diacritics": settings.remove_diacritics,
            "split_letters": settings.split_letters, "duration_bounds": settings.duration_bounds,
            "shards": settings.shards,
        });
        for (name, value) in settings.added() {
            identity[name] = value;
        }
        identity
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

    fn write(&mut self, set: &mut ExportSet) -> Result<(), StageError> {
        let mut measure = self.settings.measure();
        if let (Some(counts), Some(input)) = (&mut measure.words.rare, self.context.input("train")) {
            count_words(input, counts, &measure.normalizer)?;
        }
        let mut data = PageData {
            normalizer: measure.normalizer.clone(),
            ..PageData::default()
        };
        let known = self.context.input("alignments").map(read_known_times).transpose()?;
        let known = known.unwrap_or_else(KnownTimes::new);
        for (_, input) in self.context.whole("transcripts") {
            let sets = read_sets(input, &measure, &known)?;
            if let Some(what) = without_words(&sets) {
                return Err(nothing_to_score(what, &self.context.rejects));
            }
            data.sets.extend(sets);
        }
        if let Some(input) = self.context.input("model") {
            data.model = read_model(input)?;
        }
        if let Some(input) = self.context.input("train") {
            read_rows(input, &mut data)?;
        }
        if let Some(input) = self.context.input("mixture") {
            data.mixture = read_mixture(input)?;
        }
        if let Some(model) = &data.model
            && let Some(folder) = Path::new(&model.path).parent()
        {
            data.curves = read_curves(&folder.join("metrics.jsonl"));
        }
        for (stage, counts) in self.context.rejects.by_reason() {
            for count in counts {
                data.rejects
                    .push((stage.to_string(), count.reason, count.class.as_str().into(), count.rows));
            }
        }
        for table in tables(&data) {
            self.context.report(table);
        }
        let scores =
            serde_json::to_vec_pretty(&as_json(&data.sets, &measure.normalizer)).map_err(StageError::failed)?;
        for (name, bytes) in [(PAGE, page(&data).into_bytes()), (SCORES, scores)] {
            let path = set.file(name).map_err(StageError::failed)?;
            std::fs::write(&path, bytes).map_err(EvaluationError::file(&path))?;
        }
        let transcripts = self.context.whole("transcripts").map(|(_, input)| input);
        let path = set.file(TRANSCRIPTS).map_err(StageError::failed)?;
        Ok(write_all(transcripts, &self.settings.shards, &path)?)
    }
}

/// Columns of an input that is the model of a `training.train`.
pub const MODEL_COLUMNS: &[(&str, ColumnType)] = &[
    ("path", ColumnType::AnyText),
    ("step", ColumnType::Int64),
    ("digest", ColumnType::AnyText),
];

/// The error where there are no transcripts, or a set of them has no reference words.
fn without_words(sets: &[SetFigures]) -> Option<String> {
    let empty = sets.iter().find(|set| set.scores.overall.words.units == 0);
    match empty {
        Some(set) => Some(format!("no reference of set `{}` has a word", set.name)),
        None => sets.is_empty().then(|| "there are no transcripts to score".to_owned()),
    }
}

/// The model of a `training.train`, or of the last one if there are several; none without a row.
///
/// # Errors
/// Where the rows cannot be read or lack a column.
pub fn read_model(input: &Artifact) -> Result<Option<ModelFigures>, StageError> {
    let mut last = None;
    for item in input.batches(None) {
        let (_, batch) = item?;
        let steps = batch
            .column_by_name("step")
            .and_then(|c| c.as_primitive_opt::<Int64Type>());
        let steps = steps.ok_or_else(|| StageError::failed("column step is missing or no int64"))?;
        let (paths, digests) = (text(&batch, "path")?, text(&batch, "digest")?);
        let which = match batch.column_by_name("which") {
            Some(_) => Some(text(&batch, "which")?),
            None => None,
        };
        for row in 0..batch.num_rows() {
            last = Some(ModelFigures {
                init: init_of(paths.value(row)),
                path: paths.value(row).into(),
                step: steps.value(row),
                digest: digests.value(row).into(),
                which: which.as_ref().map_or(String::new(), |which| which.value(row).into()),
            });
        }
    }
    Ok(last)
}

/// What the training of a checkpoint began from, as it says itself.
fn init_of(checkpoint: &str) -> Option<String> {
    /// The largest file of a training's state that is read.
    const LARGEST: u64 = 16 << 20;
    let file = flow_kind::open_regular_file(&Path::new(checkpoint).join("training.json")).ok()?;
    let told: Value = serde_json::from_reader(BufReader::new(file.take(LARGEST))).ok()?;
    let init = told["identity"]["init"].as_str()?;
    (!init.is_empty() && init != "none").then(|| init.to_owned())
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

/// Counts the words that training has.
fn count_words(input: &Artifact, counts: &mut TrainingCounts, normalizer: &Normalizer) -> Result<(), StageError> {
    for item in input.batches(Some(&["text", "lang"])) {
        let (_, batch) = item?;
        let (texts, langs) = (text(&batch, "text")?, text(&batch, "lang")?);
        for row in (0..batch.num_rows()).filter(|row| texts.is_valid(*row)) {
            counts.add(texts.value(row), langs.value(row), normalizer);
        }
    }
    Ok(())
}

/// The languages of an epoch from a `sampling.plan`; none where it planned no rows.
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

/// Reads the training metrics. A missing file or a truncated line leaves gaps.
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
        curves.ended = value["time"].as_f64().or(curves.ended);
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
                curves.validation_loss.extend(point("loss"));
                curves.wer.extend(point("wer"));
                curves.cer.extend(point("cer"));
                let languages = value["languages"].as_object().into_iter().flatten();
                curves.evaluations.push(Evaluated {
                    step: step as u64,
                    stage: value["stage_end"].as_str().map(str::to_owned),
                    frozen,
                    overall: value["wer"].as_f64().unwrap_or(f64::NAN),
                    loss: value["loss"].as_f64(),
                    single: languages
                        .clone()
                        .filter(|(_, score)| score["utterances"] == 1)
                        .map(|(lang, _)| lang.clone())
                        .collect(),
                    languages: languages
                        .filter_map(|(lang, score)| Some((lang.clone(), score["wer"].as_f64()?)))
                        .collect(),
                });
            }
            Some("skipped") if value["why"] == "nothing_loaded" => curves.not_loaded += 1,
            Some("skipped") => curves.skipped += 1,
            Some("left_out") => curves.left_out += value["recordings"].as_u64().unwrap_or(0),
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
            // Counted again each time that training begins.
            Some("long_texts") => {
                curves.long_texts = value["over"].as_u64().unwrap_or(0);
                // Lines without the field are of older versions, which truncated all.
                curves.truncated = value["long_texts"] != "reject";
            }
            _ => {}
        }
    }
    curves
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
