//! The kind `transcription.transcribe`: recordings to segments of words.

use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use chrono::{SecondsFormat, Utc};
use flow_audio::recording_reader::Channels;
pub use flow_audio::samples::OnDamage;
use flow_audio::samples::Refusal;
use flow_kernels::device::DeviceChoice;
use flow_model::Weights;
use flow_model::checkpoint::OpenModel;
use flow_model::decoding::DecodingOptions;
use flow_runtime::{
    Body, Context, InputPort, Inputs, Kind, Out, OutputPort, Partition, Port, RejectClass, Shape, Source,
    SourcePartition, StageError,
};
use flow_speakers::silero::SAMPLE_RATE;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::channels::{ChannelUse, Listed, shared_listed};
use crate::recognizer::{RecognitionSettings, Recognizer, VoiceActivity};
use crate::rows::{
    Speakers, recordings_batch, recordings_schema, segments_batch, segments_schema, timings_batch, timings_schema,
};
use crate::segments::SegmentRules;
use crate::streamed::StreamedRecording;
use crate::{Metadata, Performance};

/// Transcribes recordings: what was said, when, and how sure the model is.
///
/// # What it does
///
/// Each recording is a partition, named by its path below the folder that was named in `input`, without its ending (unless
/// two would then have one name). A recording whose bytes, and those of the model, are as they were is not decoded again;
/// one that is new or changed is, alone.
///
/// A recording is decoded to 16 kHz mono, block by block, so that memory does not grow with its length; one of more than ten
/// minutes is decoded twice. Voice activity says where speech is; what lies between two pauses is a window, which goes through the model by itself, together with others of its length. Words get the
/// times at which they were spoken and a confidence (NeMo's default: Tsallis entropy, the least sure of a word's tokens), and
/// are put together to segments. Tags such as `<|hi|>` are taken out of the text and listed as languages. In silence nothing
/// is said: that is a transcript without segments, and no error.
///
/// Port `segments`, one row per segment: `_row, start, end, text, confidence, words`; times are seconds from the beginning of
/// the recording, `words` is a list of `word, start, end, confidence`. Port `recordings`, one row per partition: `_row,
/// recording` (its path with its ending), `duration` and `decoded` in seconds (all of it, and what went through the model, in
/// `windows`), `languages, model, model_digest, damaged_at` (see `on_damage`). Port `timings`, one row per partition: `_row, processed_at, transcription_s,
/// total_s`; it alone differs from run to run.
///
/// With `channels: split`, each channel of a recording is a partition of its own, `NAME.ch1`, `NAME.ch2` and so on; recordings
/// of one channel keep their name.
///
/// Recordings that cannot be transcribed are rejects of class `fault`: `missing_file`, `empty_file`, `unsupported_format`,
/// `decode_error`, `too_long` (see `max_duration`), `unreadable_file`.
///
/// # Example
///
/// ```yaml
/// transcribe:
///   uses: transcription.transcribe
///   with: {input: [talks], model: configs/models/small.nemo}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TranscribeSettings {
    /// Recordings (FLAC, WAV, AIFF, CAF, MP3, Ogg with Vorbis or Opus, the audio of MP4, QuickTime, Matroska and WebM, told by
    /// content): files, folders, of which all files with an ending of audio are taken, and patterns with `*`, `?`, and `**` for
    /// folders.
    pub input: Vec<String>,
    /// What becomes of several channels: `mix` (their mean is transcribed) or `split` (each by itself).
    #[serde(default)]
    pub channels: ChannelUse,
    /// What becomes of a recording that is damaged or cut off: `keep` (what is before the damage is transcribed, if it is a second
    /// or more, and `damaged_at` says where it ends, in seconds) or `refuse` (it is a reject, `decode_error`).
    #[serde(default)]
    pub on_damage: OnDamage,
    /// The model: a `.nemo` archive, a model folder such as a checkpoint, or a Hugging Face folder.
    pub model: PathBuf,
    /// How it is found where speech is: `neural` (silero-vad), `energy` (how loud it is), or `off`, where everything is decoded.
    #[serde(default)]
    pub vad: VoiceActivity,
    /// The longest window that goes through the model, in seconds. Longer speech is cut at its longest pause, or where it is
    /// least likely to be speech.
    #[serde(default = "max_window")]
    pub max_window: f64,
    /// A pause as long as this ends a window, in seconds, by the probabilities of voice activity: these lag, so that 0.06 is
    /// a pause of some 0.15 s. For models that were trained on long recordings, 0.5 lets them hear more at once.
    #[serde(default = "min_pause")]
    pub min_pause: f64,
    /// Most seconds of audio, padding included, in the model at once; changes nothing but speed and memory.
    #[serde(default = "batch_seconds")]
    pub batch_seconds: f64,
    /// Longer recordings are refused, in seconds; 12 hours at most.
    #[serde(default = "max_duration")]
    pub max_duration: f64,
    /// The longest pause within a segment, in seconds.
    #[serde(default = "max_gap")]
    pub max_gap: f64,
    /// The longest segment, in seconds.
    #[serde(default = "max_segment")]
    pub max_segment: f64,
    /// The number type in which the matrices of linear layers are kept in memory. `bf16` and `f16` halve it; all is
    /// computed in 32 bits.
    #[serde(default)]
    pub weights: Weights,
    /// Hypotheses that beam search keeps, up to 64; 0 or 1 for greedy search. 4 costs some times the time of decoding, which is
    /// a small part of all.
    #[serde(default)]
    pub beam: usize,
    /// An n-gram language model over the model's tokens, in the ARPA format, such as `flow lm build` writes; empty for none.
    #[serde(default)]
    pub lm: PathBuf,
    /// What its scores count, from 0 to 100.
    #[serde(default = "lm_weight")]
    pub lm_weight: f64,
    /// A file of phrases that are to be heard more readily, one a line (a score of a phrase of its own after a tab; 1 is usual);
    /// empty for none.
    #[serde(default)]
    pub boost: PathBuf,
    /// What their scores count, from 0 to 100.
    #[serde(default = "boost_weight")]
    pub boost_weight: f64,
    /// Where the model is computed: `cpu`, `cuda` or `cuda:1` (see docs/gpu.md).
    #[serde(default = "cpu")]
    pub device: String,
}

fn max_window() -> f64 {
    20.0
}

fn min_pause() -> f64 {
    0.06
}

fn batch_seconds() -> f64 {
    120.0
}

fn max_duration() -> f64 {
    43_200.0
}

fn max_gap() -> f64 {
    SegmentRules::default().max_gap
}

fn max_segment() -> f64 {
    SegmentRules::default().max_duration
}

fn lm_weight() -> f64 {
    DecodingOptions::default().lm_weight
}

fn boost_weight() -> f64 {
    DecodingOptions::default().boost_weight
}

fn cpu() -> String {
    "cpu".into()
}

impl TranscribeSettings {
    /// With the defaults of all but these.
    pub fn new(input: Vec<String>, model: impl Into<PathBuf>) -> Self {
        TranscribeSettings {
            input,
            channels: ChannelUse::default(),
            on_damage: OnDamage::default(),
            model: model.into(),
            vad: VoiceActivity::default(),
            max_window: max_window(),
            min_pause: min_pause(),
            batch_seconds: batch_seconds(),
            max_duration: max_duration(),
            max_gap: max_gap(),
            max_segment: max_segment(),
            weights: Weights::default(),
            beam: 0,
            lm: PathBuf::new(),
            lm_weight: lm_weight(),
            boost: PathBuf::new(),
            boost_weight: boost_weight(),
            device: cpu(),
        }
    }

    /// What the way from samples to segments needs.
    pub fn recognition(&self) -> RecognitionSettings {
        RecognitionSettings {
            voice_activity: self.vad,
            max_window: self.max_window,
            min_pause: self.min_pause,
            batch_seconds: self.batch_seconds,
            segments: SegmentRules {
                max_gap: self.max_gap,
                max_duration: self.max_segment,
            },
        }
    }

    /// How the model is decoded.
    pub fn decoding(&self) -> DecodingOptions {
        DecodingOptions::of(self.beam, (&self.lm, self.lm_weight), (&self.boost, self.boost_weight))
    }

    fn device(&self) -> Result<DeviceChoice, StageError> {
        self.device
            .parse()
            .map_err(|error| StageError::setting("device", error))
    }

    fn check(&self) -> Result<(), StageError> {
        let wrong = |name: &str, value: f64, rule: &str| {
            Err(StageError::setting(
                name,
                format!("`{name}` is {value}; it must be {rule}"),
            ))
        };
        if !(1.0..=3600.0).contains(&self.max_window) {
            return wrong("max_window", self.max_window, "from 1 to 3600 seconds");
        }
        if !(0.0..=self.max_window).contains(&self.min_pause) {
            return wrong("min_pause", self.min_pause, "from 0 to `max_window` seconds");
        }
        // Twelve hours: times and samples are counted in 32 bits further down.
        if !(1.0..=43_200.0).contains(&self.max_duration) {
            return wrong("max_duration", self.max_duration, "from 1 to 43200 seconds");
        }
        for (name, value) in [
            ("batch_seconds", self.batch_seconds),
            ("max_gap", self.max_gap),
            ("max_segment", self.max_segment),
        ] {
            if !(value > 0.0 && value.is_finite()) {
                return wrong(name, value, "a number of seconds above 0");
            }
        }
        if self.model.as_os_str().is_empty() {
            return Err(StageError::setting("model", "`model` names no model"));
        }
        if self.model.to_string_lossy().starts_with("hf://") {
            let error = StageError::setting("model", "models of the hub are fetched by commands, not by pipelines");
            return Err(error.with_help(
                "`flow transcribe --model hf://OWNER/NAME` fetches it; a pipeline names the file in the hub's cache",
            ));
        }
        if self.input.is_empty() {
            return Err(StageError::setting("input", "`input` names no recording"));
        }
        let decoding = self.decoding().check();
        decoding.map_err(|(name, why)| StageError::setting(name, why))?;
        self.device().map(|_| ())
    }
}

/// The kind `transcription.transcribe`.
pub struct Transcribe;

impl Kind for Transcribe {
    const NAME: &'static str = "transcription.transcribe";
    const VERSION: u32 = 2;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[
        OutputPort::new(
            "segments",
            "one row for each segment: its text, times, confidence and words",
        ),
        OutputPort::new(
            "recordings",
            "one row for each recording: its length, languages and model",
        ),
        OutputPort::new(
            "timings",
            "one row for each recording: when it was transcribed, and how long that took",
        ),
    ];
    type Settings = TranscribeSettings;

    fn shape(settings: &TranscribeSettings, _: &Inputs) -> Result<Shape, StageError> {
        settings.check()?;
        let port = |name: &str, schema| Port {
            name: name.into(),
            schema,
        };
        let outputs = vec![
            port("segments", segments_schema(Speakers::Unasked)),
            port("recordings", recordings_schema()),
            port("timings", timings_schema()),
        ];
        Ok(Shape {
            expensive: true,
            ..Shape::source(outputs)
        })
    }

    fn ready(settings: &TranscribeSettings) -> Result<(), StageError> {
        let checked = settings.device()?.check();
        checked.map_err(|error| StageError::setting("device", error))
    }

    fn open(settings: &TranscribeSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(Transcriber {
            settings: settings.clone(),
            context: context.clone(),
            listed: None,
            recognizer: None,
        })))
    }

    /// Where recordings and the model are does not matter, nor on what and in which batches the model is computed.
    fn identity(settings: &TranscribeSettings) -> Value {
        let mut identity = json!({
            "channels": settings.channels,
            "on_damage": settings.on_damage,
            "vad": settings.vad,
            "max_window": settings.max_window,
            "min_pause": settings.min_pause,
            "max_duration": settings.max_duration,
            "max_gap": settings.max_gap,
            "max_segment": settings.max_segment,
            "weights": settings.weights,
        });
        if let Some(decoding) = settings.decoding().identity() {
            identity["decoding"] = decoding;
        }
        identity
    }
}

struct Transcriber {
    settings: TranscribeSettings,
    context: Context,
    /// Sorted by name, which is that of the partition.
    listed: Option<Arc<Vec<Listed>>>,
    recognizer: Option<Arc<Recognizer>>,
}

impl Transcriber {
    fn listed(&mut self) -> Result<Arc<Vec<Listed>>, StageError> {
        let listed = match self.listed.take() {
            Some(listed) => listed,
            None => shared_listed(&self.settings.input, self.settings.channels)?,
        };
        Ok(Arc::clone(self.listed.insert(listed)))
    }

    fn recognizer(&mut self) -> Result<Arc<Recognizer>, StageError> {
        let recognizer = match self.recognizer.take() {
            Some(recognizer) => recognizer,
            None => shared_recognizer(&self.settings)?,
        };
        Ok(Arc::clone(self.recognizer.insert(recognizer)))
    }
}

impl Source for Transcriber {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let model = OpenModel::files(&self.settings.model).map_err(|error| StageError::setting("model", error))?;
        for file in &model {
            // Else each recording would be refused for it.
            let unreadable = |error| StageError::setting("model", format!("cannot read {}: {error}", file.display()));
            File::open(file).map_err(unreadable)?;
        }
        let decoding = self.settings.decoding();
        for (setting, file) in decoding.files() {
            let unreadable = |error| StageError::setting(setting, format!("cannot read {}: {error}", file.display()));
            File::open(file).map_err(unreadable)?;
        }
        let read: Vec<PathBuf> = model
            .into_iter()
            .chain(decoding.files().map(|(_, file)| file.clone()))
            .collect();
        let model_name = self.settings.model.file_name().unwrap_or_default();
        let model_name = model_name.to_string_lossy().into_owned();
        let partition = |listed: &Listed| SourcePartition {
            name: Partition::new(&listed.recording.name),
            files: std::iter::once(&listed.recording.path).chain(&read).cloned().collect(),
            // Both names are columns.
            extra: match listed.channels {
                Channels::Mix => format!("{}\0{model_name}", listed.recording.file),
                Channels::One(channel) => format!("{}\0{model_name}\0{channel}", listed.recording.file),
            },
        };
        Ok(self.listed()?.iter().map(partition).collect())
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        let begun = Instant::now();
        let listed = self.listed()?;
        let place = listed.binary_search_by(|listed| listed.recording.name.as_str().cmp(partition.as_str()));
        let listed = match place {
            Ok(place) => listed[place].clone(),
            Err(_) => return Err(StageError::failed(format!("there is no recording `{partition}`"))),
        };
        let stopped = || StageError::failed("stopped");
        let cancel = self.context.cancel.clone();
        if cancel.is_set() {
            return Err(stopped());
        }
        let recording = StreamedRecording::new(&listed.recording.path, listed.channels);
        let recognizer = self.recognizer()?;
        let settings = self.settings.recognition();
        let decoding = Instant::now();
        let mut first = recognizer.first_pass(&settings);
        let extent = recording.first_pass(self.settings.max_duration, &mut |samples| {
            first.feed(samples)?;
            Ok(!cancel.is_set())
        })?;
        if cancel.is_set() {
            return Err(stopped());
        }
        let path = &listed.recording.path;
        let accepted = extent.and_then(|extent| {
            if let Some(why) = &extent.damage {
                self.settings.on_damage.accept(path, extent.samples, why)?;
            }
            Ok(extent)
        });
        let extent = match accepted {
            Ok(extent) => extent,
            Err(Refusal { reason, detail }) => {
                out.reject_partition(reason, RejectClass::Fault, detail);
                return Ok(());
            }
        };
        let recognized = recognizer.transcribe_again(first, &recording, &settings, &|| cancel.is_set())?;
        // None: the run is being given up, and so is this partition.
        let recognized = recognized.ok_or_else(stopped)?;
        let metadata = Metadata {
            source_file: listed.recording.file,
            duration_s: seconds(extent.samples),
            damaged_at: extent.damage.map(|_| seconds(extent.samples)),
            model: recognizer.name.clone(),
            model_digest: recognizer.digest.clone(),
            languages: recognized.languages,
            ..Metadata::default()
        };
        let (transcription, total) = (decoding.elapsed().as_secs_f64(), begun.elapsed().as_secs_f64());
        let performance = Performance::new(metadata.duration_s, transcription, 0.0, total);
        let now = Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true);
        out.read(1);
        out.send(0, segments_batch(&recognized.segments, Speakers::Unasked)?);
        out.send(
            1,
            recordings_batch(&metadata, recognized.decoded_seconds, recognized.windows)?,
        );
        out.send(2, timings_batch(&now, &performance)?);
        Ok(())
    }
}

fn seconds(samples: u64) -> f64 {
    samples as f64 / f64::from(SAMPLE_RATE)
}

/// What a recognizer is loaded by: model, number type, device, decoding.
type Loaded = (PathBuf, Weights, String, DecodingOptions);

/// The recognizer of these settings, which all workers of a run share: it is loaded by the first that needs it.
fn shared_recognizer(settings: &TranscribeSettings) -> Result<Arc<Recognizer>, StageError> {
    static SHARED: Mutex<Vec<(Loaded, Weak<Recognizer>)>> = Mutex::new(Vec::new());
    let decoding = settings.decoding();
    let wanted = (
        settings.model.clone(),
        settings.weights,
        settings.device.clone(),
        decoding.clone(),
    );
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    shared.retain(|(_, recognizer)| recognizer.strong_count() > 0);
    let standing = shared.iter().find(|(loaded, _)| *loaded == wanted);
    if let Some(recognizer) = standing.and_then(|(_, recognizer)| recognizer.upgrade()) {
        return Ok(recognizer);
    }
    let device = settings
        .device()?
        .open(0)
        .map_err(|error| StageError::setting("device", error))?;
    let recognizer = Recognizer::load(&settings.model, settings.weights.into(), &device)?;
    let recognizer = Arc::new(recognizer.with_decoding(&decoding)?);
    shared.push((wanted, Arc::downgrade(&recognizer)));
    Ok(recognizer)
}

#[cfg(test)]
#[path = "transcribe_tests.rs"]
mod tests;
