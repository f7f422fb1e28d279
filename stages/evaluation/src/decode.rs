//! The kind `evaluation.decode`: transcribes a manifest with a trained model and scores it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{
    ArrayRef, BinaryArray, Float64Array, Int64Array, ListArray, RecordBatch, StringArray, StructArray, UInt32Array,
};
use arrow::buffer::OffsetBuffer;
use arrow::compute::{can_cast_types, take};
use arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef};
use flow_hub::HubReference;
use flow_kernels::device::{DeviceChoice, visible_gpus};
use flow_kind::{
    Artifact, Body, Conservation, Context, FileRange, InputPort, Inputs, Kind, Out, OutputPort, Partition, Port, ROW,
    Reject, RejectClass, Secret, Shape, Source, SourcePartition, StageError, Storage, UrlUse,
};
use flow_model::checkpoint::OpenModel;
use flow_model::decoding::DecodingOptions;
use flow_model::heads::HeadKind;
use flow_model::model::TdtModel;
use flow_model::{Precision, Weights};
use flow_sampling::dataset::{AudioColumns, ROW_COLUMNS};
use flow_shards::probe::MEMBER_COLUMNS;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::audio_rows::{AudioPlace, AudioRows, EXTRA, Origin};
use crate::clips;
use crate::error::{EvaluationError, nothing_to_score};
use crate::hub_token::{hub_error, local_model};
use crate::prompts::PromptSettings;
use crate::recordings::Recordings;
use crate::report::{MODEL_COLUMNS, read_model};
use crate::transcribe::{HeardWord, Outcome, micro_batches, transcribe};

/// The one partition of the output.
const ALL: &str = "all";
/// The most devices.
const MAX_DEVICES: u32 = 64;
/// Seconds of padded audio in the model at once.
pub const BATCH_SECONDS: f64 = 120.0;

/// Transcribes a manifest with a trained model and scores it.
///
/// # What it does
///
/// `rows` are those with `segment_id`, `lang`, `text`, `duration` and the place of their audio, as
/// `sampling.load` takes them; `model` is the output of `training.train`, or left out where the setting `model` names
/// one; `members`, where rows say only `tar_member_name`, is the port of an `audio.probe`. All are read whole. The
/// output has one row per utterance: reference and hypothesis, with the language tags in separate columns, and the
/// counts of words, characters and errors in each. The reference is scored as NeMo does: encoded and decoded by the
/// model's tokenizer (as it is where the tokenizer does not know a character), and with no normalisation: normalised
/// rates are made by `evaluation.report`, from the same texts. Utterances whose audio cannot be read are rejects.
///
/// Each row also says where it comes from (`source`: the column `dataset`, or else `source`; `shard`: the partition,
/// or the column `shard_id` where that names another) and where its audio is (`audio_path`, or `tar_path` below `shards`; `tar_offset` and
/// `tar_size` in bytes; `start` in seconds). `word` lists what was heard, without tags: `word, start, end, confidence`, in seconds from
/// the beginning of the row's audio, as the model emits words; confidences are those of `flow transcribe` without calibration. `by` and
/// `cluster` add columns of the rows. The worst utterances carry their audio (`clip`, a FLAC file), so that the
/// report can play them wherever it is read.
///
/// # Example
///
/// ```yaml
/// decode:
///   uses: evaluation.decode
///   from: {rows: manifest/split.val, model: train, members: manifest/probe.members}
///   with: {shards: tests/data/corpus/mini/shards}
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DecodeSettings {
    /// Name of this set of utterances in the report.
    pub set: String,
    /// Folder below which the tars are (the parameter `shards`); it is put before every `tar_path`.
    pub shards: String,
    /// Utterances per language to transcribe, always the same ones; 0 for all.
    pub samples_per_language: usize,
    /// The model to transcribe with, where none comes from a `training.train`: a `.nemo` archive, a model folder such as
    /// a checkpoint, a Hugging Face folder, or a model of the Hugging Face hub, `hf://OWNER/NAME[@REVISION][/FILE]`, which
    /// is downloaded into the hub's own cache. For a model of the hub the key has its reference, not its bytes: name a
    /// revision where it may change. Of a URL of object storage a copy is kept on this machine.
    pub model: String,
    /// Number of utterances, those with the most errors, whose audio is kept for the report; 0 for none.
    pub clips: usize,
    /// Most bytes of such audio, over all of them (10 s of speech are some 150 kB). One that does not fit any more is
    /// left out.
    pub clip_bytes: usize,
    /// The number type in which the matrices of linear layers, nearly all of a model, are kept in memory. `bf16` and
    /// `f16` halve it; all is computed in 32 bits (on CUDA, products of these matrices are of factors in that type).
    pub weights: Weights,
    /// What the factors of products with weights of the encoder's layers and of the joint network are rounded to, on the CPU: `f32`
    /// (not at all), `bf16`, or `int8` (each row and each column with a scale of its own). Weights are then kept in that type.
    pub precision: Precision,
    /// The head that decodes a model with two: `transducer` or `ctc`. Left out: the transducer, or CTC where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoder: Option<HeadKind>,
    /// Hypotheses that beam search keeps, up to 64; 0 or 1 for greedy search.
    pub beam: usize,
    /// An n-gram language model over the model's tokens, in the ARPA format, such as `flow lm build` writes; empty for none.
    pub lm: PathBuf,
    /// Weight of its scores, from 0 to 100.
    pub lm_weight: f64,
    /// A file of phrases to boost, one per line (optionally with its own score after a tab; 1 is usual); empty for
    /// none.
    pub boost: PathBuf,
    /// Weight of their scores, from 0 to 100.
    pub boost_weight: f64,
    /// The language prompts of the rows, for a model that has them. A row has that of its `lang`, or `auto` where the model has none
    /// for it.
    #[serde(skip_serializing_if = "PromptSettings::is_default")]
    pub prompts: PromptSettings,
    /// Where the model is computed: `cpu`, `cuda` or `cuda:1` (see docs/gpu.md).
    pub device: String,
    /// How many devices work at once, each with the whole model on micro-batches of its own: with `device: cuda` the first ones
    /// that the process sees. On the CPU as many micro-batches are computed at a time, each by its share of the cores. 0 is all
    /// of them for `cuda`, and else one. The transcripts do not depend on it.
    pub devices: u32,
    /// A token for the Hugging Face hub, from a parameter with `secret: true`. Default: `HF_TOKEN`, or the token that
    /// `hf auth login` stored.
    pub hub_token: Option<Secret>,
    /// Columns of the rows, or keys of their column `extra`, that the transcripts have too, as texts: for the setting `by` of
    /// `evaluation.report`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub by: Vec<String>,
    /// One more, for the setting `cluster` of `evaluation.report`. Empty: none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cluster: String,
}

impl Default for DecodeSettings {
    fn default() -> Self {
        DecodeSettings {
            set: "validation".into(),
            shards: String::new(),
            samples_per_language: 0,
            model: String::new(),
            clips: 10,
            clip_bytes: 1_500_000,
            weights: Weights::default(),
            precision: Precision::default(),
            decoder: None,
            beam: 0,
            lm: PathBuf::new(),
            lm_weight: DecodingOptions::default().lm_weight,
            boost: PathBuf::new(),
            boost_weight: DecodingOptions::default().boost_weight,
            prompts: PromptSettings::default(),
            device: "cpu".into(),
            devices: 0,
            hub_token: None,
            by: Vec::new(),
            cluster: String::new(),
        }
    }
}

impl DecodeSettings {
    /// Where the model is computed.
    fn device(&self) -> Result<DeviceChoice, StageError> {
        self.device
            .parse()
            .map_err(|error| StageError::setting("device", error))
    }

    /// How many devices work at once, on so many micro-batches.
    fn device_count(&self, micro_batches: usize) -> Result<usize, StageError> {
        let count = match (self.device()?, self.devices) {
            (DeviceChoice::Cuda(None), 0) => visible_gpus().map_err(EvaluationError::from)?,
            (_, 0) => 1,
            (_, count) => count as usize,
        };
        Ok(count.min(micro_batches).max(1))
    }

    /// How the model is decoded.
    fn decoding(&self) -> DecodingOptions {
        DecodingOptions::of(self.beam, (&self.lm, self.lm_weight), (&self.boost, self.boost_weight))
            .with_head(self.decoder)
    }

    /// What the transcripts have of the rows beside their own columns, each once. `rows`: the columns of the rows.
    ///
    /// # Errors
    /// If the rows have neither such a column nor `extra`.
    fn kept(&self, rows: &Schema) -> Result<Vec<&str>, StageError> {
        let own = transcript_schema();
        let by = self.by.iter().map(|name| ("by", name.as_str()));
        let mut kept = Vec::new();
        for (setting, name) in by.chain([("cluster", self.cluster.as_str())]) {
            if name.is_empty() || own.column_with_name(name).is_some() || kept.contains(&name) {
                continue;
            }
            let column = rows.field_with_name(name).or_else(|_| rows.field_with_name(EXTRA));
            if !column.is_ok_and(|column| can_cast_types(column.data_type(), &DataType::Utf8)) {
                let why = format!("the rows have no column `{name}` with texts or numbers, and no column `{EXTRA}`");
                return Err(StageError::setting(setting, why));
            }
            kept.push(name);
        }
        Ok(kept)
    }

    /// The model of the hub that is named, if one is.
    fn of_hub(&self) -> Result<Option<HubReference>, StageError> {
        let reference = HubReference::parse(self.model.trim()).transpose();
        reference.map_err(|error| hub_error("model", error))
    }

    /// The model that is named, if one is.
    fn named(&self) -> Option<&Path> {
        Some(self.model.trim()).filter(|model| !model.is_empty()).map(Path::new)
    }
}

/// The kind `evaluation.decode`.
pub struct EvaluationDecode;

/// Columns of the output.
pub fn transcript_schema() -> SchemaRef {
    let text = |name: &str, nullable| Field::new(name, DataType::Utf8, nullable);
    let count = |name: &str| Field::new(name, DataType::Int64, false);
    let place = |name: &str, data_type| Field::new(name, data_type, true);
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        text("set", false),
        text("segment_id", false),
        text("lang", false),
        text("reference", false),
        text("hypothesis", false),
        count("words"),
        count("word_errors"),
        count("chars"),
        count("char_errors"),
        Field::new("duration", DataType::Float64, false),
        text("tag_reference", true),
        text("tag_hypothesis", true),
        text("source", false),
        text("shard", false),
        text("audio_path", true),
        text("tar_path", true),
        place("tar_offset", DataType::Int64),
        place("tar_size", DataType::Int64),
        place("start", DataType::Float64),
        place("clip", DataType::Binary),
        Field::new("word", DataType::List(word_item()), false),
    ]))
}

/// The columns of the output with further ones, which are texts.
fn schema_with(names: &[&str]) -> SchemaRef {
    let mut fields = transcript_schema().fields().to_vec();
    fields.extend(
        names
            .iter()
            .map(|name| Arc::new(Field::new(*name, DataType::Utf8, true))),
    );
    Arc::new(Schema::new(fields))
}

fn word_fields() -> Fields {
    let time = |name: &str| Field::new(name, DataType::Float64, false);
    Fields::from(vec![
        Field::new("word", DataType::Utf8, false),
        time("start"),
        time("end"),
        time("confidence"),
    ])
}

fn word_item() -> Arc<Field> {
    Arc::new(Field::new_list_field(DataType::Struct(word_fields()), false))
}

/// The column `word` of rows.
pub(crate) fn word_lists(rows: &[&[HeardWord]]) -> Result<ListArray, StageError> {
    let words = || rows.iter().copied().flatten();
    let number =
        |of: &dyn Fn(&HeardWord) -> f64| -> ArrayRef { Arc::new(Float64Array::from_iter_values(words().map(of))) };
    let columns = vec![
        Arc::new(StringArray::from_iter(words().map(|word| Some(&word.text)))) as ArrayRef,
        number(&|word| word.times[0]),
        number(&|word| word.times[1]),
        number(&|word| word.confidence),
    ];
    let offsets = OffsetBuffer::from_lengths(rows.iter().map(|words| words.len()));
    let words = StructArray::try_new(word_fields(), columns, None)?;
    Ok(ListArray::try_new(word_item(), offsets, Arc::new(words), None)?)
}

impl Kind for EvaluationDecode {
    const NAME: &'static str = "evaluation.decode";
    const VERSION: u32 = 13;
    const INPUTS: &'static [InputPort] = &[
        InputPort::whole("rows", "rows to transcribe, with where their recordings are").columns(ROW_COLUMNS),
        InputPort::whole(
            "model",
            "the model of a training.train, where the setting `model` is empty",
        )
        .optional()
        .columns(MODEL_COLUMNS),
        InputPort::whole(
            "members",
            "the port `members` of an audio.probe, to read recordings from tars",
        )
        .optional()
        .columns(MEMBER_COLUMNS),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new(
        "transcripts",
        "one row for each recording: reference, hypothesis, their words and characters with the errors, where the audio is",
    )];
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[("shards", UrlUse::Read), ("model", UrlUse::Read)];
    type Settings = DecodeSettings;

    fn shape(settings: &DecodeSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        let device = settings.device()?;
        if settings.devices > MAX_DEVICES {
            return Err(StageError::setting(
                "devices",
                format!("it must be from 0 to {MAX_DEVICES}"),
            ));
        }
        if settings.devices > 1 && matches!(device, DeviceChoice::Cuda(Some(_))) {
            return Err(StageError::setting(
                "devices",
                format!("`device: {device}` is one; write `cuda` for several"),
            ));
        }
        settings.of_hub()?;
        let decoding = settings.decoding().check();
        decoding.map_err(|(name, why)| StageError::setting(name, why))?;
        let precision = settings.precision.check(settings.weights, device);
        precision.map_err(|why| StageError::setting("precision", why))?;
        match (inputs.get("model"), settings.named()) {
            (None, Some(_)) | (Some(_), None) => {}
            (None, None) => {
                let message = "a model is needed: the input `model`, or the setting";
                return Err(StageError::setting("model", message)
                    .with_help("from: {rows: ..., model: train}, or with: {model: PATH}"));
            }
            (Some(input), Some(_)) => {
                return Err(
                    StageError::input(input.name.clone(), "the setting `model` names a model already")
                        .with_help("leave out one of the two"),
                );
            }
        }
        let rows = inputs.required("rows")?;
        AudioColumns::of_input(rows, inputs.has("members"))?;
        let outputs = vec![Port::new("transcripts", schema_with(&settings.kept(&rows.schema)?))];
        Ok(Shape {
            expensive: true,
            conservation: Conservation::Rows,
            ..Shape::source(outputs)
        })
    }

    fn sources(settings: &DecodeSettings) -> Vec<(&'static str, PathBuf)> {
        let mut sources = match (settings.of_hub(), settings.named()) {
            (Ok(None), Some(model)) => vec![("model", model.to_path_buf())],
            _ => Vec::new(),
        };
        let decoding = settings.decoding();
        sources.extend(decoding.files().map(|(name, file)| (name, file.clone())));
        sources
    }

    fn ready(settings: &DecodeSettings, _storage: &Storage) -> Result<(), StageError> {
        let checked = settings.device()?.check();
        checked.map_err(|error| StageError::setting("device", error))
    }

    fn open(settings: &DecodeSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(DecodeBody {
            settings: settings.clone(),
            context: context.clone(),
        })))
    }

    /// Without the folder of the tars, whose content counts.
    fn identity(settings: &DecodeSettings) -> Value {
        let mut identity = json!({
            "set": settings.set,
            "samples_per_language": settings.samples_per_language,
            "named": settings.named().is_some(),
            "weights": settings.weights,
            "clips": [settings.clips, settings.clip_bytes],
        });
        if settings.precision != Precision::F32 {
            identity["precision"] = json!(settings.precision);
        }
        // Its files are known only when it was fetched.
        if let Ok(Some(reference)) = settings.of_hub() {
            identity["hub"] = json!(reference.to_string());
        }
        if let Some(decoding) = settings.decoding().identity() {
            identity["decoding"] = decoding;
        }
        if !settings.prompts.is_default() {
            identity["prompts"] = json!(settings.prompts);
        }
        if !settings.by.is_empty() || !settings.cluster.is_empty() {
            identity["kept"] = json!([settings.by, settings.cluster]);
        }
        identity
    }
}

struct DecodeBody {
    settings: DecodeSettings,
    context: Context,
}

impl DecodeBody {
    /// The local path of the model that is named.
    fn local(&self, model: &Path) -> Result<PathBuf, StageError> {
        local_model(&self.context, "model", model, self.settings.hub_token.as_ref())
    }

    /// The recordings that are transcribed. Their content is not part of the rows, so their digests are part of the
    /// key.
    fn recordings(&self) -> Result<Recordings, StageError> {
        let (rows, settings) = (self.context.required("rows")?, &self.settings);
        let members = self.context.input("members");
        let of = serde_json::json!([
            rows.digest(),
            members.map(Artifact::digest),
            settings.shards,
            settings.samples_per_language
        ]);
        Recordings::noted(&self.context.scratch, &of, || {
            let rows = AudioRows::read(rows, members, &settings.shards, settings.samples_per_language)?;
            Ok(Recordings::of(&rows))
        })
    }
}

impl Source for DecodeBody {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let mut files = match (self.settings.of_hub()?, self.settings.named()) {
            (Some(_), _) | (None, None) => Vec::new(),
            (None, Some(model)) => OpenModel::files(&self.local(model)?).map_err(|error| {
                let wrong = StageError::setting("model", error);
                match HubReference::meant(&self.settings.model) {
                    Some(meant) => wrong.with_help(format!("a model of the Hugging Face hub is written {meant}")),
                    None => wrong,
                }
            })?,
        };
        files.extend(self.settings.decoding().files().map(|(_, file)| file.clone()));
        Ok(vec![SourcePartition::new(Partition::new(ALL), files, "")])
    }

    fn ranges(&mut self, _: &Partition) -> Result<Vec<FileRange>, StageError> {
        // Also for recordings in separate files: one that is missing or cannot be read makes its row a reject, not the
        // others.
        let recordings = self.recordings()?;
        let whole = recordings.files.into_iter().map(|path| (path, 0, u64::MAX));
        let ranges = whole.chain(recordings.ranges);
        let range = |(path, offset, size): (PathBuf, u64, u64)| FileRange { path, offset, size };
        Ok(ranges.map(range).collect())
    }

    fn read(&mut self, _: &Partition, out: &mut Out) -> Result<(), StageError> {
        let model = match self.settings.named() {
            Some(model) => self.local(model)?,
            None => {
                let model = read_model(self.context.required("model")?)?;
                model
                    .ok_or_else(|| StageError::failed("there is no trained model"))?
                    .path
                    .into()
            }
        };
        let rows = AudioRows::read(
            self.context.required("rows")?,
            self.context.input("members"),
            &self.settings.shards,
            self.settings.samples_per_language,
        )?;
        if rows.utterances.is_empty() {
            return Err(nothing_to_score(
                "there are no rows to transcribe",
                &self.context.rejects,
            ));
        }
        let (weights, precision) = (self.settings.weights.into(), self.settings.precision);
        let choice = self.settings.device()?;
        let device = choice.open(0).map_err(EvaluationError::from)?;
        let mut model =
            TdtModel::load_for_decoding(&model, weights, precision, &device).map_err(EvaluationError::from)?;
        let Some(tokenizer) = &model.tokenizer else {
            return Err(StageError::failed("the model holds no tokenizer")
                .with_help("flow model convert MODEL OUT.nemo --tokenizer FILE.model"));
        };
        let decoding = self
            .settings
            .decoding()
            .load(tokenizer)
            .map_err(EvaluationError::from)?;
        model.set_decoding(decoding).map_err(EvaluationError::from)?;
        for note in &model.decoding.notes {
            self.context.warn(note.clone());
        }
        let (prompts, warning) = (self.settings.prompts).of_utterances(&model.config, &rows.utterances)?;
        if let Some(warning) = warning {
            self.context.warn(warning);
        }
        let cancelled = self.context.gives_up();
        let count = self
            .settings
            .device_count(micro_batches(&rows.utterances, BATCH_SECONDS))?;
        let mut replicas = Vec::new();
        // On the CPU all have one memory.
        for number in (1..count).filter(|_| choice != DeviceChoice::Cpu) {
            let device = choice.open(number).map_err(EvaluationError::from)?;
            replicas.push(model.replica_on(&device).map_err(EvaluationError::from)?);
        }
        let first = std::iter::repeat_n(&model, count - replicas.len());
        let models: Vec<&TdtModel> = first.chain(&replicas).collect();
        let outcomes = transcribe(
            &models,
            (&rows.utterances, &prompts),
            BATCH_SECONDS,
            &|indices| rows.signals(&self.context.storage, indices),
            &cancelled,
        )?;
        out.read(rows.utterances.len() as u64);
        for (row, (utterance, outcome)) in rows.utterances.iter().zip(&outcomes).enumerate() {
            if let Outcome::Unreadable { why } = outcome {
                out.reject(Reject {
                    row: u32::try_from(row).ok(),
                    id: Some(utterance.segment_id.clone()),
                    reason: "audio_unreadable".into(),
                    class: RejectClass::Fault,
                    detail: why.clone(),
                    values: json!({ "lang": utterance.lang, "text": utterance.text, "duration": format!("{}", utterance.duration) }).to_string(),
                });
            }
        }
        let origins = rows.origins(self.context.required("rows")?)?;
        let mut clips = clips::worst(
            &self.context.storage,
            &rows,
            &outcomes,
            self.settings.clips,
            self.settings.clip_bytes,
        );
        let origin = |index: usize| {
            let places = (rows.place(index), clips.remove(&index));
            (origins.get(index).cloned().unwrap_or_default(), places.0, places.1)
        };
        let transcripts = transcripts(&self.settings.set, &rows, &outcomes, origin)?;
        let input = self.context.required("rows")?;
        let kept = self.settings.kept(input.schema())?;
        let of_rows = rows.texts_of(input, &kept)?;
        out.send(0, with_columns(&transcripts, &kept, &of_rows)?);
        Ok(())
    }
}

/// The transcripts with columns of their rows. `of_rows` has a text for each utterance, whose number is `_row`.
fn with_columns(transcripts: &RecordBatch, names: &[&str], of_rows: &[StringArray]) -> Result<RecordBatch, StageError> {
    let mut columns = transcripts.columns().to_vec();
    for texts in of_rows {
        columns.push(take(texts, transcripts.column(0), None)?);
    }
    Ok(RecordBatch::try_new(schema_with(names), columns)?)
}

/// The transcripts as rows; `_row` counts the unreadable ones too. `origin` tells, of the utterance at an index, where it and
/// its audio come from, and gives its clip.
fn transcripts(
    set: &str,
    rows: &AudioRows,
    outcomes: &[Outcome],
    mut origin: impl FnMut(usize) -> (Origin, AudioPlace, Option<Vec<u8>>),
) -> Result<RecordBatch, StageError> {
    let mut places: Vec<(Origin, AudioPlace, Option<Vec<u8>>)> = Vec::new();
    let mut numbers = Vec::new();
    let mut texts: [Vec<String>; 5] = Default::default();
    let mut counts: [Vec<i64>; 4] = Default::default();
    let mut durations = Vec::new();
    let mut tags: [Vec<Option<String>>; 2] = Default::default();
    let mut heard: Vec<&[HeardWord]> = Vec::new();
    for (row, (utterance, outcome)) in rows.utterances.iter().zip(outcomes).enumerate() {
        let Outcome::Transcript {
            reference,
            hypothesis,
            score,
            seconds,
            words,
        } = outcome
        else {
            continue;
        };
        heard.push(words);
        numbers.push(u32::try_from(row).map_err(|_| StageError::failed("more than 4 billion rows to decode"))?);
        for (column, value) in
            texts
                .iter_mut()
                .zip([set, &utterance.segment_id, &utterance.lang, reference, hypothesis])
        {
            column.push(value.to_owned());
        }
        let found = [
            score.words.units,
            score.words.errors(),
            score.characters.units,
            score.characters.errors(),
        ];
        for (column, value) in counts.iter_mut().zip(found) {
            column.push(i64::try_from(value).unwrap_or(i64::MAX));
        }
        durations.push(*seconds);
        tags[0].push(score.tags.0.clone());
        tags[1].push(score.tags.1.clone());
        places.push(origin(row));
    }
    let mut columns: Vec<arrow::array::ArrayRef> = vec![Arc::new(UInt32Array::from(numbers))];
    columns.extend(texts.into_iter().map(|column| Arc::new(StringArray::from(column)) as _));
    columns.extend(counts.into_iter().map(|column| Arc::new(Int64Array::from(column)) as _));
    columns.push(Arc::new(Float64Array::from(durations)));
    columns.extend(tags.into_iter().map(|column| Arc::new(StringArray::from(column)) as _));
    let offsets = |of: fn((u64, u64)) -> u64| -> ArrayRef {
        let number = |place: &AudioPlace| place.range.and_then(|range| i64::try_from(of(range)).ok());
        Arc::new(Int64Array::from_iter(places.iter().map(|(_, place, _)| number(place))))
    };
    let (starts, clips) = (
        Float64Array::from_iter(places.iter().map(|(_, place, _)| place.start)),
        BinaryArray::from_iter(places.iter().map(|(.., clip)| clip.as_deref())),
    );
    columns.extend([
        Arc::new(StringArray::from_iter_values(
            places.iter().map(|(origin, ..)| &origin.source),
        )) as ArrayRef,
        Arc::new(StringArray::from_iter_values(
            places.iter().map(|(origin, ..)| &origin.shard),
        )),
        Arc::new(StringArray::from_iter(
            places.iter().map(|(_, place, _)| place.file.as_deref()),
        )),
        Arc::new(StringArray::from_iter(
            places.iter().map(|(_, place, _)| place.tar.as_deref()),
        )),
        offsets(|range| range.0),
        offsets(|range| range.1),
        Arc::new(starts),
        Arc::new(clips),
        Arc::new(word_lists(&heard)?),
    ]);
    Ok(RecordBatch::try_new(transcript_schema(), columns)?)
}
