//! The kind `transcription.transcribe`: recordings to segments of words.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use chrono::{SecondsFormat, Utc};
use flow_audio::recording_reader::Channels;
pub use flow_audio::samples::OnDamage;
use flow_audio::samples::Refusal;
use flow_model::checkpoint::OpenModel;
use flow_model::decoding::DecodingOptions;
use flow_model::{Precision, Weights};
use flow_runtime::{
    Body, Context, InputPort, Inputs, Kind, Out, OutputPort, Partition, Port, RejectClass, Shape, Shared, Source,
    SourcePartition, StageError, UrlUse, open_regular_file,
};
use flow_speakers::silero::SAMPLE_RATE;
use serde_json::{Value, json};

use crate::channels::{Listed, shared_listed};
use crate::long_audio::{ChunkSettings, LongAudio};
use crate::recognizer::Recognizer;
use crate::rows::{
    Speakers, recordings_batch, recordings_schema, segments_batch, segments_schema, timings_batch, timings_schema,
};
use crate::streamed::StreamedRecording;
use crate::{Metadata, Performance};

pub use crate::transcribe_settings::{MAX_DURATION, TranscribeSettings};

/// The kind `transcription.transcribe`.
pub struct Transcribe;

impl Kind for Transcribe {
    const NAME: &'static str = "transcription.transcribe";
    const VERSION: u32 = 4;
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
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[("input", UrlUse::Read), ("model", UrlUse::Read)];
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

    /// Without the paths of recordings and model, the device and the batch size.
    fn identity(settings: &TranscribeSettings) -> Value {
        let mut identity = json!({
            "channels": settings.channels,
            "on_damage": settings.on_damage,
            "max_duration": settings.max_duration,
            "max_gap": settings.max_gap,
            "max_segment": settings.max_segment,
            "weights": settings.weights,
        });
        match settings.long_audio() {
            LongAudio::Vad => {
                identity["vad"] = json!(settings.vad);
                identity["max_window"] = json!(settings.max_window);
                identity["min_pause"] = json!(settings.min_pause);
            }
            LongAudio::Chunked(ChunkSettings { left, chunk, right }) => {
                identity["chunked"] = json!({"left": left, "chunk": chunk, "right": right});
            }
            LongAudio::Full(full) => {
                identity["full"] = json!({
                    "full_attention": full.full_attention,
                    "attention_context": full.attention_context,
                });
            }
        }
        if settings.precision != Precision::F32 {
            identity["precision"] = json!(settings.precision);
        }
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
            None => shared_recognizer(&self.settings, self.model()?)?,
        };
        Ok(Arc::clone(self.recognizer.insert(recognizer)))
    }
}

impl Transcriber {
    /// The local path of the model.
    fn model(&self) -> Result<PathBuf, StageError> {
        self.context
            .local_copy("model", &self.settings.model, &OpenModel::is_part)
    }
}

impl Source for Transcriber {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let model = OpenModel::files(&self.model()?).map_err(|error| StageError::setting("model", error))?;
        for file in &model {
            // Checked here, or each recording would be rejected for it.
            let unreadable = |error| StageError::setting("model", format!("cannot read {}: {error}", file.display()));
            open_regular_file(file).map_err(unreadable)?;
        }
        let decoding = self.settings.decoding();
        for (setting, file) in decoding.files() {
            let unreadable = |error| StageError::setting(setting, format!("cannot read {}: {error}", file.display()));
            open_regular_file(file).map_err(unreadable)?;
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
        let (max_duration, on_damage) = (self.settings.max_duration, self.settings.on_damage);
        let extent = recording.first_pass(max_duration, on_damage, &mut |samples| {
            first.feed(samples)?;
            Ok(!cancel.is_set())
        })?;
        if cancel.is_set() {
            return Err(stopped());
        }
        let extent = match extent {
            Ok(extent) => extent,
            Err(Refusal { reason, detail }) => {
                out.reject_partition(reason, RejectClass::Fault, detail);
                return Ok(());
            }
        };
        let recognized = recognizer
            .transcribe_again(first, &recording, &settings, &|| cancel.is_set())
            .map_err(|error| error.of(&listed.recording.file))?;
        // None: the run is being aborted.
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

/// What a recognizer is loaded by: model, number types, device, decoding.
type Loaded = (PathBuf, (Weights, Precision), String, DecodingOptions);

/// The recognizer of these settings, which all workers of a run share: it is loaded by the first that needs it.
fn shared_recognizer(settings: &TranscribeSettings, model: PathBuf) -> Result<Arc<Recognizer>, StageError> {
    static LOADED: Shared<Loaded, Recognizer> = Shared::new();
    let decoding = settings.decoding();
    let key = (
        model.clone(),
        (settings.weights, settings.precision),
        settings.device.clone(),
        decoding.clone(),
    );
    LOADED.get(key, || {
        let device = settings
            .device()?
            .open(0)
            .map_err(|error| StageError::setting("device", error))?;
        let recognizer = Recognizer::load_in(&model, settings.weights.into(), settings.precision, &device)?;
        Ok(recognizer.with_decoding(&decoding)?)
    })
}

#[cfg(test)]
#[path = "transcribe_tests.rs"]
mod tests;
