//! The kind `transcription.align`.

use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array, Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_evaluation::audio_rows::AudioRows;
use flow_evaluation::hub_token::{is_of_hub, local_model};
use flow_kernels::device::DeviceChoice;
use flow_kind::{
    Body, Conservation, Context, FileRange, InputPort, Inputs, Kind, Out, OutputPort, Partition, Port, ROW, Reject,
    RejectClass, Secret, Shape, Source, SourcePartition, StageError, Storage, UrlUse,
};
use flow_model::Weights;
use flow_model::checkpoint::OpenModel;
use flow_model::heads::HeadKind;
use flow_sampling::dataset::{AudioColumns, ROW_COLUMNS};
use flow_shards::probe::MEMBER_COLUMNS;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::alignment::{Aligned, AlignmentSettings};
use crate::recognizer::Recognizer;
use crate::rows::{Speakers, segments_batch, segments_schema};
use crate::transcribe::TranscribeSettings;
use crate::{Segment, TranscriptionError, Word};

/// The one partition of the output.
const ALL: &str = "all";

/// Aligns the texts of rows with their recordings, so that rows whose texts do not fit can be refused.
///
/// # What it does
///
/// `rows` are those with `segment_id`, `lang`, `text`, `duration` and the place of their audio, as `sampling.load` takes them;
/// `members`, where rows say only `tar_member_name`, is the port of an `audio.probe`. Both are read whole. The output has one row for
/// each row: `segment_id, lang, text, duration, alignment_score, words_said, not_said, without_text, start, end, words`.
///
/// `alignment_score` is the natural logarithm of the probability of the best path of the text through the recording, divided by
/// the number of the text's tokens. A path may leave out words, at -5 for each token, and pass over frames between words without
/// text, at -2 at most for each. If other words were heard than the text has, it may also go over a passage as the model hears it, at
/// -0.25 for each token there and -12 where the text goes on, unless it would leave out more than half of the tokens so. The score is
/// near 0 where the model is certain of the text, and falls with words that were not said and with speech that is not in the text.
/// docs/alignment.md has scores of texts that fit and that do not.
///
/// `words_said` counts the words that the path places, `not_said` has the others that the model can spell; `without_text` is what the model hears where there is no
/// text. `start` and `end` are those of the text within the recording, in seconds (null where nothing of it was said); `words` is a list
/// of `word, start, end, confidence` (null where the vocabulary has no letter of the word). Tags such as `<|hi|>` are not part of a text.
///
/// Rejects: `audio_unreadable` (class `fault`), and of class `rule` `empty_text`, `unknown_letters` (the model knows none of the text's
/// letters) and `text_too_long` (for the recording).
///
/// # Example
///
/// ```yaml
/// fit:
///   uses: transcription.align
///   from: {rows: manifest}
///   with: {model: configs/models/small.nemo}
/// kept:
///   uses: sql
///   from: {rows: manifest, fit: fit}
///   with:
///     whole: [fit]
///     join: SELECT rows.*, fit.alignment_score FROM rows LEFT JOIN fit USING (segment_id)
///     rejects:
///       - {reason: not_aligned, when: alignment_score IS NULL}
///       - {reason: text_does_not_fit, when: "alignment_score < -2"}
///     query: SELECT * FROM input
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AlignSettings {
    /// The model: a `.nemo` archive, a model folder such as a checkpoint, a Hugging Face folder, or a model of the Hugging Face hub,
    /// `hf://OWNER/NAME[@REVISION][/FILE]`, which is downloaded into the hub's own cache. Of a URL of object storage a copy is kept
    /// on this machine.
    pub model: PathBuf,
    /// Folder below which the tars are (the parameter `shards`); it is put before every `tar_path`.
    #[serde(default)]
    pub shards: String,
    /// The head that aligns, `ctc` or `transducer`. Left out: CTC where the model has it, and else the transducer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head: Option<HeadKind>,
    /// Seconds by which the model emits tokens late; they are subtracted from all times.
    #[serde(default = "delay")]
    pub delay: f64,
    /// The number type in which the matrices of linear layers are kept in memory. `bf16` and `f16` halve it; all is computed in 32
    /// bits.
    #[serde(default)]
    pub weights: Weights,
    /// Where the model is computed: `cpu`, `cuda` or `cuda:1` (see docs/gpu.md).
    #[serde(default = "cpu")]
    pub device: String,
    /// A token for the Hugging Face hub, from a parameter with `secret: true`. Default: `HF_TOKEN`, or the token that
    /// `hf auth login` stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hub_token: Option<Secret>,
}

fn delay() -> f64 {
    crate::alignment::DELAY
}

fn cpu() -> String {
    "cpu".into()
}

impl AlignSettings {
    fn device(&self) -> Result<DeviceChoice, StageError> {
        self.device
            .parse()
            .map_err(|error| StageError::setting("device", error))
    }
}

/// The kind `transcription.align`.
pub struct Align;

fn alignments_schema() -> SchemaRef {
    let text = |name: &str| Field::new(name, DataType::Utf8, false);
    let number = |name: &str, nullable| Field::new(name, DataType::Float64, nullable);
    let segments = segments_schema(Speakers::Unasked);
    let words = segments.column_with_name("words").map(|(_, field)| field.clone());
    let fields = [
        Field::new(ROW, DataType::UInt32, false),
        text("segment_id"),
        text("lang"),
        text("text"),
        number("duration", false),
        number("alignment_score", false),
        Field::new("words_said", DataType::Int64, false),
        text("not_said"),
        text("without_text"),
        number("start", true),
        number("end", true),
    ];
    Arc::new(Schema::new(fields.into_iter().chain(words).collect::<Vec<_>>()))
}

impl Kind for Align {
    const NAME: &'static str = "transcription.align";
    const VERSION: u32 = 5;
    const INPUTS: &'static [InputPort] = &[
        InputPort::whole("rows", "rows with texts, and where their recordings are").columns(ROW_COLUMNS),
        InputPort::whole(
            "members",
            "the port `members` of an audio.probe, to read recordings from tars",
        )
        .optional()
        .columns(MEMBER_COLUMNS),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new(
        "alignments",
        "one row for each row: how well its text fits its recording, and the times of its words",
    )];
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[("shards", UrlUse::Read), ("model", UrlUse::Read)];
    type Settings = AlignSettings;

    fn shape(settings: &AlignSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        settings.device()?;
        if settings.model.as_os_str().is_empty() {
            return Err(StageError::setting("model", "`model` names no model"));
        }
        if !(0.0..=1.0).contains(&settings.delay) {
            let why = format!("`delay` is {}; it must be from 0 to 1 second", settings.delay);
            return Err(StageError::setting("delay", why));
        }
        AudioColumns::of_input(inputs.required("rows")?, inputs.has("members"))?;
        let outputs = vec![Port::new("alignments", alignments_schema())];
        Ok(Shape {
            expensive: true,
            conservation: Conservation::Rows,
            ..Shape::source(outputs)
        })
    }

    fn sources(settings: &AlignSettings) -> Vec<(&'static str, PathBuf)> {
        let is_file = !is_of_hub(&settings.model);
        is_file.then(|| ("model", settings.model.clone())).into_iter().collect()
    }

    fn ready(settings: &AlignSettings, _storage: &Storage) -> Result<(), StageError> {
        let checked = settings.device()?.check();
        checked.map_err(|error| StageError::setting("device", error))
    }

    fn open(settings: &AlignSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(Aligner {
            settings: settings.clone(),
            context: context.clone(),
        })))
    }

    /// Without the paths of model and tars, whose content counts, and the device.
    fn identity(settings: &AlignSettings) -> Value {
        json!({"head": settings.head, "delay": settings.delay, "weights": settings.weights})
    }
}

struct Aligner {
    settings: AlignSettings,
    context: Context,
}

impl Aligner {
    fn model(&self) -> Result<PathBuf, StageError> {
        local_model(
            &self.context,
            "model",
            &self.settings.model,
            self.settings.hub_token.as_ref(),
        )
    }

    fn rows(&self) -> Result<AudioRows, StageError> {
        let (rows, members) = (self.context.required("rows")?, self.context.input("members"));
        AudioRows::read(rows, members, &self.settings.shards, 0)
    }
}

impl Source for Aligner {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let files = OpenModel::files(&self.model()?).map_err(|error| StageError::setting("model", error))?;
        Ok(vec![SourcePartition::new(Partition::new(ALL), files, "")])
    }

    fn ranges(&mut self, _: &Partition) -> Result<Vec<FileRange>, StageError> {
        let (files, ranges) = self.rows()?.recordings();
        let whole = files.into_iter().map(|path| FileRange {
            path,
            offset: 0,
            size: u64::MAX,
        });
        Ok(whole.chain(ranges).collect())
    }

    fn read(&mut self, _: &Partition, out: &mut Out) -> Result<(), StageError> {
        let rows = self.rows()?;
        let device = self.settings.device()?.open(0);
        let device = device.map_err(|error| StageError::setting("device", error))?;
        let recognizer = Recognizer::load(&self.model()?, self.settings.weights.into(), &device)?;
        let recognition = TranscribeSettings::new(Vec::new(), "").recognition();
        let settings = AlignmentSettings {
            head: self.settings.head,
            delay: self.settings.delay,
            ..AlignmentSettings::default()
        };
        let cancelled = self.context.gives_up();
        let mut found: Vec<(usize, Aligned)> = Vec::new();
        for (index, utterance) in rows.utterances.iter().enumerate() {
            let signal = match rows.signal(&self.context.storage, index) {
                Ok(signal) => signal,
                Err(why) => {
                    self.reject(&rows, index, ("audio_unreadable", RejectClass::Fault, why), out);
                    continue;
                }
            };
            let text = std::slice::from_ref(&utterance.text);
            match recognizer.align(&signal, text, &recognition, &settings, &cancelled) {
                Ok(Some(aligned)) => found.push((index, aligned)),
                Ok(None) => return Err(StageError::failed("stopped")),
                Err(TranscriptionError::Text { reason, why }) => {
                    self.reject(&rows, index, (reason, RejectClass::Rule, why), out);
                }
                Err(error) => return Err(error.into()),
            }
        }
        out.read(rows.utterances.len() as u64);
        out.send(0, alignments(&rows, &found)?);
        Ok(())
    }
}

impl Aligner {
    fn reject(
        &self,
        rows: &AudioRows,
        index: usize,
        (reason, class, detail): (&str, RejectClass, String),
        out: &mut Out,
    ) {
        let utterance = &rows.utterances[index];
        let duration = format!("{}", utterance.duration);
        out.reject(Reject {
            row: u32::try_from(index).ok(),
            id: Some(utterance.segment_id.clone()),
            reason: reason.into(),
            class,
            detail,
            values: json!({ "lang": utterance.lang, "text": utterance.text, "duration": duration }).to_string(),
        });
    }
}

fn alignments(rows: &AudioRows, found: &[(usize, Aligned)]) -> Result<RecordBatch, StageError> {
    let numbers = found.iter().map(|(index, _)| u32::try_from(*index));
    let numbers: Result<Vec<u32>, _> = numbers.collect();
    let numbers = numbers.map_err(|_| StageError::failed("more than 4 billion rows to align"))?;
    let utterances = || found.iter().map(|(index, _)| &rows.utterances[*index]);
    let texts = |texts: Vec<String>| -> ArrayRef { Arc::new(StringArray::from(texts)) };
    let joined =
        |of: &dyn Fn(&Aligned) -> Vec<&str>| texts(found.iter().map(|(_, aligned)| of(aligned).join(" ")).collect());
    // All words of a row as one segment.
    let whole: Vec<Segment> = found
        .iter()
        .map(|(_, aligned)| Segment {
            words: aligned
                .segments
                .iter()
                .flat_map(|segment| segment.words.iter().cloned())
                .collect::<Vec<Word>>(),
            ..Segment::default()
        })
        .collect();
    let words = segments_batch(&whole, Speakers::Unasked)?;
    let words = words.column_by_name("words").cloned();
    let words = words.ok_or_else(|| StageError::failed("segments have no words"))?;
    let times = |end: bool| -> ArrayRef {
        let of = found.iter().map(|(_, aligned)| {
            let mut said = aligned.words.iter().filter(|word| word.logprob.is_some());
            match end {
                true => said.next_back().map(|word| word.end),
                false => said.next().map(|word| word.start),
            }
        });
        Arc::new(of.collect::<Float64Array>())
    };
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from(numbers)),
        texts(utterances().map(|utterance| utterance.segment_id.clone()).collect()),
        texts(utterances().map(|utterance| utterance.lang.clone()).collect()),
        texts(utterances().map(|utterance| utterance.text.clone()).collect()),
        Arc::new(Float64Array::from_iter_values(
            utterances().map(|utterance| utterance.duration),
        )),
        Arc::new(Float64Array::from_iter_values(
            found.iter().map(|(_, aligned)| aligned.score),
        )),
        Arc::new(Int64Array::from_iter_values(
            found.iter().map(|(_, aligned)| aligned.words_said() as i64),
        )),
        joined(&|aligned| aligned.not_said.iter().map(|words| &words.text[..]).collect()),
        joined(&|aligned| aligned.without_text.iter().map(|speech| &speech.text[..]).collect()),
        times(false),
        times(true),
        words,
    ];
    Ok(RecordBatch::try_new(alignments_schema(), columns)?)
}

#[cfg(test)]
mod tests {
    use arrow::array::AsArray;
    use flow_runtime::harness::Harness;

    use super::*;
    use crate::test_data;

    fn rows(texts: &[(&str, &str)]) -> RecordBatch {
        let recording = test_data::hindi(&Storage::default(), "rec_hi_0001_000.flac");
        let folder = std::env::temp_dir().join(format!("flow-align-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("rec_hi_0001_000.flac");
        std::fs::write(&path, recording).unwrap();
        let seconds = flow_audio::samples::samples(&Storage::default(), &path, 100.0)
            .unwrap()
            .unwrap()
            .len() as f64
            / 16_000.0;
        let count = texts.len();
        let column = |values: Vec<String>| -> ArrayRef { Arc::new(StringArray::from(values)) };
        let audio = texts.iter().map(|(id, _)| match *id {
            "missing" => folder.join("none.flac").display().to_string(),
            _ => path.display().to_string(),
        });
        let fields = ["segment_id", "text", "lang", "audio_path"].map(|name| Field::new(name, DataType::Utf8, false));
        let fields = fields.into_iter().chain([
            Field::new("duration", DataType::Float64, false),
            Field::new(ROW, DataType::UInt32, false),
        ]);
        RecordBatch::try_new(
            Arc::new(Schema::new(fields.collect::<Vec<_>>())),
            vec![
                column(texts.iter().map(|(id, _)| (*id).to_owned()).collect()),
                column(texts.iter().map(|(_, text)| (*text).to_owned()).collect()),
                column(vec!["hi".to_owned(); count]),
                column(audio.collect()),
                Arc::new(Float64Array::from(vec![seconds; count])),
                Arc::new(UInt32Array::from_iter_values(0..count as u32)),
            ],
        )
        .unwrap()
    }

    fn harness(settings: &str, rows: RecordBatch) -> Harness<Align> {
        let model = test_data::bundled_model();
        let settings = format!("{{model: {}, {settings}}}", model.display());
        let harness = Harness::from_yaml(&settings).unwrap().input("rows", rows.schema());
        harness.feed("rows", "hi/hi_0000", rows)
    }

    #[test]
    fn texts_that_fit_have_higher_scores() {
        let heard = {
            let recognizer = Recognizer::load(
                &test_data::bundled_model(),
                candle_core::DType::F32,
                &candle_core::Device::Cpu,
            )
            .unwrap();
            let samples =
                flow_audio::decode::decode(&test_data::hindi(&Storage::default(), "rec_hi_0001_000.flac"), 100.0)
                    .unwrap();
            recognizer.decode(&[&samples]).unwrap().remove(0).words
        };
        let heard: Vec<String> = heard.into_iter().map(|word| word.word).collect();
        let fits = format!("<|hi|> {}", heard.join(" "));
        let rows = rows(&[
            ("fits", &fits),
            ("other", "the cat eats bread in the kitchen"),
            ("empty", " "),
            ("unknown", "漢字"),
            ("missing", "कल"),
            ("long", &"कल शाम ".repeat(400)),
        ]);
        let output = harness("", rows).run().unwrap();
        let found = output.rows("alignments", ALL);
        let scores = found.column_by_name("alignment_score").unwrap();
        let scores = scores.as_primitive::<arrow::datatypes::Float64Type>();
        assert_eq!(found.num_rows(), 2);
        assert!(scores.value(0) > -1.0 && scores.value(1) < -3.0, "{scores:?}");
        let said = found.column_by_name("words_said").unwrap();
        assert_eq!(
            said.as_primitive::<arrow::datatypes::Int64Type>().value(0),
            heard.len() as i64
        );
        assert_eq!(
            output.reasons(ALL),
            [
                (Some(2), "empty_text"),
                (Some(3), "unknown_letters"),
                (Some(4), "audio_unreadable"),
                (Some(5), "text_too_long")
            ]
        );
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        for wrong in ["delay: 2", "delay: .nan", "device: tpu", "model: ''"] {
            let settings = match wrong.starts_with("model") {
                true => format!("{{{wrong}}}"),
                false => format!("{{model: a.nemo, {wrong}}}"),
            };
            let rows = rows(&[]);
            let harness = Harness::<Align>::from_yaml(&settings)
                .unwrap()
                .input("rows", rows.schema());
            let name = wrong.split(':').next().unwrap();
            assert!(harness.shape().unwrap_err().to_string().contains(name), "{wrong}");
        }
    }
}
