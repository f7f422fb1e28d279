//! The kind `transcription.transcribe`: recordings to segments of words.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use chrono::{SecondsFormat, Utc};
use flow_audio::listing::Recording;
use flow_audio::recording_reader::Channels;
pub use flow_audio::samples::OnDamage;
use flow_audio::samples::Refusal;
use flow_evaluation::hub_token::local_model;
use flow_kind::event::Event;
use flow_kind::{
    Body, Context, InputPort, Inputs, Kind, Out, OutputPort, Partition, Port, RejectClass, Shape, Shared, Source,
    SourcePartition, StageError, Storage, UrlUse, open_regular_file,
};
use flow_model::checkpoint::OpenModel;
use flow_model::decoding::DecodingOptions;
use flow_model::{Precision, Weights};
use flow_speakers::silero::SAMPLE_RATE;
use flow_storage::FileVersion;
use serde_json::{Value, json};

use crate::calibration::Calibration;
use crate::channels::{Listed, shared_listed};
use crate::long_audio::{ChunkSettings, LongAudio};
use crate::read_ahead::{ReadAhead, Transcribed};
use crate::recognizer::{FirstPass, RecognitionSettings, Recognizer};
use crate::rows::{
    Speakers, recordings_batch, recordings_schema, segments_batch, segments_schema, timings_batch, timings_schema,
};
use crate::streamed::{Extent, OpenDecoders};
use crate::text_style::TextStyle;
use crate::{Metadata, Performance};

pub use crate::transcribe_settings::{MAX_DURATION, TranscribeSettings};

/// The kind `transcription.transcribe`.
pub struct Transcribe;

impl Kind for Transcribe {
    const NAME: &'static str = "transcription.transcribe";
    const VERSION: u32 = 16;
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
        let port = |name: &str, schema| Port::new(name, schema);
        let outputs = vec![
            port("segments", segments_schema(Speakers::Unasked)),
            port(
                "recordings",
                recordings_schema(!settings.coverage().is_off(), settings.boosts()),
            ),
            port("timings", timings_schema()),
        ];
        Ok(Shape {
            expensive: true,
            ..Shape::source(outputs)
        })
    }

    fn ready(settings: &TranscribeSettings, _storage: &Storage) -> Result<(), StageError> {
        let checked = settings.device()?.check();
        checked.map_err(|error| StageError::setting("device", error))
    }

    fn open(settings: &TranscribeSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(Transcriber {
            settings: settings.clone(),
            context: context.clone(),
            listed: None,
            recognizer: None,
            style: None,
            ahead: ReadAhead::default(),
            open: OpenDecoders::default(),
            told: BTreeSet::new(),
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
                let coverage = settings.coverage();
                if !coverage.is_off() {
                    identity["coverage"] = json!({"mode": coverage.mode, "suspects": coverage.suspects});
                }
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
        if settings.delay > 0.0 {
            identity["delay"] = json!(settings.delay);
        }
        if let Some(track) = settings.track() {
            identity["track"] = json!(track);
        }
        if settings.precision != Precision::F32 {
            identity["precision"] = json!(settings.precision);
        }
        if let Some(decoding) = settings.decoding().identity() {
            identity["decoding"] = decoding;
        }
        if settings.boosts() {
            // They are boosted where speech is, and reported.
            identity["boosted"] = json!("speech");
        }
        if !settings.languages.is_empty() {
            let weight = settings.language_prior().map(|_| settings.language_weight);
            identity["languages"] = json!({"languages": settings.languages, "weight": weight});
        }
        if settings.has_text_style() {
            identity["text_style"] = json!({"numbers": settings.numbers, "fillers": settings.fillers});
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
    style: Option<TextStyle>,
    ahead: ReadAhead,
    open: OpenDecoders,
    /// Notes that were told: the path of the file, the recording's name (several may be in one tar), and the letters of the note.
    /// Each row of a recording has them, with figures of its own.
    told: BTreeSet<(PathBuf, String, String)>,
}

impl Transcriber {
    fn listed(&mut self) -> Result<Arc<Vec<Listed>>, StageError> {
        let listed = match self.listed.take() {
            Some(listed) => listed,
            None => shared_listed(
                &self.context.storage,
                &self.settings.input,
                self.settings.channels,
                self.settings.track(),
            )?,
        };
        Ok(Arc::clone(self.listed.insert(listed)))
    }

    fn recognizer(&mut self) -> Result<Arc<Recognizer>, StageError> {
        let recognizer = match self.recognizer.take() {
            Some(recognizer) => recognizer,
            None => shared_recognizer(&self.settings, self.model()?, &self.context)?,
        };
        Ok(Arc::clone(self.recognizer.insert(recognizer)))
    }
}

impl Transcriber {
    /// The local path of the model.
    fn model(&self) -> Result<PathBuf, StageError> {
        local_model(&self.context, "model", &self.settings.model, None)
    }
}

impl Source for Transcriber {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let path = self.model()?;
        let model = OpenModel::files(&path).map_err(|error| StageError::setting("model", error))?;
        // Confidences depend on it.
        let calibration = Some(Calibration::path_of(&path)).filter(|path| path.exists());
        for file in &model {
            // Checked here, or each recording would be rejected for it.
            let unreadable = |error| StageError::setting("model", format!("cannot read {}: {error}", file.display()));
            open_regular_file(file).map_err(unreadable)?;
        }
        let decoding = self.settings.decoding();
        let prior = self.settings.language_prior().map(Path::to_path_buf);
        let prior = prior.iter().map(|file| ("language_prior", file));
        let table = self.settings.text_table().map(Path::to_path_buf);
        let others = prior.chain(table.iter().map(|file| ("text_table", file)));
        for (setting, file) in decoding.files().chain(others.clone()) {
            let unreadable = |error| StageError::setting(setting, format!("cannot read {}: {error}", file.display()));
            open_regular_file(file).map_err(unreadable)?;
        }
        let read: Vec<PathBuf> = model
            .into_iter()
            .chain(calibration)
            .chain(decoding.files().chain(others).map(|(_, file)| file.clone()))
            .collect();
        let model_name = OpenModel::name(&self.settings.model);
        let partition = |listed: &Listed| {
            // Both names are columns.
            let mut extra = match listed.channels {
                Channels::Mix => format!("{}\0{model_name}", listed.recording.file),
                Channels::One(channel) => format!("{}\0{model_name}\0{channel}", listed.recording.file),
            };
            let mut files = vec![listed.recording.path.clone()];
            // So is the row, and its part is in it.
            if let Some(row) = &listed.row {
                let values = Value::Object(row.values.clone());
                extra += &format!("\0row\0{values}\0{:?}\0{:?}", row.range, row.refused);
                extra += row.unit.in_key();
                if row.refused.is_some() {
                    files.clear();
                }
            }
            files.extend(read.iter().cloned());
            SourcePartition::new(Partition::new(&listed.recording.name), files, extra)
        };
        let listed = self.listed()?;
        if let Some(decision) = listed.iter().find_map(|listed| listed.row.as_ref()?.unit.decision()) {
            self.context.events.send(Event::Note { message: decision });
        }
        Ok(listed.iter().map(partition).collect())
    }

    /// Recordings are often still being written.
    fn refuses_changed_files(&self) -> bool {
        true
    }

    fn upcoming(&mut self, partitions: &[Partition]) {
        self.ahead.upcoming = partitions.to_vec();
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        let begun = Instant::now();
        let listed = self.find(partition)?;
        if self.context.cancel.is_set() {
            return Err(stopped());
        }
        // Before the model is loaded: a table may be wrong.
        let style = match self.style.take() {
            Some(style) => style,
            None => self.settings.text_style()?,
        };
        let style = self.style.insert(style).clone();
        let recognizer = self.recognizer()?;
        let before = begun.elapsed().as_secs_f64();
        let transcribed = match self.ahead.take(partition, &listed.recording.path) {
            Some(transcribed) => transcribed,
            None => match self.transcribe(&recognizer, &listed)? {
                Ok(transcribed) => transcribed,
                Err(Refusal { reason, detail }) => {
                    out.reject_partition(reason, RejectClass::Fault, detail);
                    return Ok(());
                }
            },
        };
        let Transcribed { extent, recognized, .. } = transcribed;
        let segments = style.apply(recognized.segments);
        if let Some(note) = extent.note
            && self.told.insert(told_as(&listed.recording, &note))
        {
            self.context.warn(format!("{}: {note}", listed.recording.file));
        }
        let metadata = Metadata {
            source_file: listed.recording.file,
            channel: match listed.channels {
                Channels::Mix => None,
                Channels::One(channel) => Some(channel + 1),
            },
            row: listed.row.map(|row| row.values.clone()),
            duration_s: seconds(extent.samples),
            damaged_at: extent.damage.map(|_| seconds(extent.samples)),
            model: recognizer.name.clone(),
            model_digest: recognizer.digest.clone(),
            languages: recognized.languages,
            coverage: recognized.coverage,
            boosted: recognized.boosted,
            ..Metadata::default()
        };
        let total = before + transcribed.seconds;
        let performance = Performance::new(metadata.duration_s, transcribed.seconds, 0.0, total);
        let now = Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true);
        out.read(1);
        out.send(0, segments_batch(&segments, Speakers::Unasked)?);
        out.send(
            1,
            recordings_batch(&metadata, recognized.decoded_seconds, recognized.windows)?,
        );
        out.send(2, timings_batch(&now, &performance)?);
        Ok(())
    }
}

/// What makes a note of a recording one that was told before.
fn told_as(recording: &Recording, note: &str) -> (PathBuf, String, String) {
    let letters = note.chars().filter(|letter| letter.is_alphabetic()).collect();
    (recording.path.clone(), recording.file.clone(), letters)
}

/// Longest recording that is transcribed together with others, in samples.
const SHORT: u64 = 60 * SAMPLE_RATE as u64;
/// Recordings are transcribed together until they have this many samples, which are in memory then: 15 MB, with the last
/// recording at most 19 MB.
const TOGETHER: u64 = 240 * SAMPLE_RATE as u64;
/// Workers that decode several recordings at once share `batch_seconds`, but none has less: shorter batches take longer.
const LEAST_BATCH_SECONDS: f64 = 15.0;

/// The error of a stage that ends with the run.
fn stopped() -> StageError {
    StageError::failed("stopped")
}

/// A recording after its first pass.
struct Prepared<'a> {
    first: FirstPass<'a>,
    extent: Extent,
    seconds: f64,
}

impl Transcriber {
    fn find(&mut self, partition: &Partition) -> Result<Listed, StageError> {
        let listed = self.listed()?;
        let place = listed.binary_search_by(|listed| listed.recording.name.as_str().cmp(partition.as_str()));
        match place {
            Ok(place) => Ok(listed[place].clone()),
            Err(_) => Err(StageError::failed(format!("there is no recording `{partition}`"))),
        }
    }

    /// The first pass over a recording, as far as it has `most` samples.
    fn prepare<'a>(
        &mut self,
        recognizer: &'a Recognizer,
        listed: &Listed,
        most: u64,
    ) -> Result<Result<Prepared<'a>, Refusal>, StageError> {
        if let Some(refusal) = listed.row.as_ref().and_then(|row| row.refused.clone()) {
            return Ok(Err(refusal));
        }
        let begun = Instant::now();
        let recording = listed.samples(&self.context.storage);
        let mut first = recognizer.first_pass(&self.settings.recognition());
        let (max_duration, on_damage) = (self.settings.max_duration, self.settings.on_damage);
        let mut samples = 0;
        let cancelled = self.context.gives_up();
        let extent = recording.first_pass_with(&mut self.open, max_duration, on_damage, &mut |block| {
            samples += block.len() as u64;
            first.feed(block)?;
            Ok(samples <= most && !cancelled())
        })?;
        if cancelled() {
            return Err(stopped());
        }
        Ok(extent.map(|extent| Prepared {
            first,
            extent,
            seconds: begun.elapsed().as_secs_f64(),
        }))
    }

    /// Transcribes a recording; if it is short, together with others that are short and come next.
    fn transcribe(
        &mut self,
        recognizer: &Recognizer,
        listed: &Listed,
    ) -> Result<Result<Transcribed, Refusal>, StageError> {
        let prepared = match self.prepare(recognizer, listed, u64::MAX)? {
            Ok(prepared) => prepared,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let settings = self.settings.recognition();
        let is_short = |prepared: &Prepared<'_>| prepared.extent.samples <= SHORT;
        let mut others = Vec::new();
        if is_short(&prepared) && settings.long_audio == LongAudio::Vad && recognizer.is_batch_invariant() {
            let mut samples = prepared.extent.samples;
            for partition in std::mem::take(&mut self.ahead.upcoming) {
                if samples >= TOGETHER || self.context.cancel.is_set() {
                    break;
                }
                // One that cannot be read now is read when it is asked for, and then told why.
                let next = self.find(&partition)?;
                let Some(identity) = FileVersion::settled(&next.recording.path) else {
                    continue;
                };
                let Ok(Ok(next)) = self.prepare(recognizer, &next, SHORT) else {
                    continue;
                };
                if !is_short(&next) {
                    break;
                }
                samples += next.extent.samples;
                others.push((partition, identity, next));
            }
        }
        let cancelled = self.context.gives_up();
        let begun = Instant::now();
        let Prepared { first, extent, seconds } = prepared;
        if others.is_empty() {
            let recording = listed.samples(&self.context.storage);
            let recognized = recognizer
                .transcribe_again(first, &recording, &settings, &cancelled)
                .map_err(|error| error.of(&listed.recording.file))?;
            // None: the run is ending.
            return Ok(Ok(Transcribed {
                extent,
                recognized: recognized.ok_or_else(stopped)?,
                seconds: seconds + begun.elapsed().as_secs_f64(),
            }));
        }
        let mut firsts = vec![first];
        let mut all = vec![(extent, seconds)];
        let mut partitions = Vec::new();
        for (partition, identity, Prepared { first, extent, seconds }) in others {
            partitions.push((partition, identity));
            firsts.push(first);
            all.push((extent, seconds));
        }
        // The result does not depend on it: recordings are decoded together only where the model is invariant to batches.
        let share = (settings.batch_seconds / self.context.workers.max(1) as f64).max(LEAST_BATCH_SECONDS);
        let settings = RecognitionSettings {
            batch_seconds: share.min(settings.batch_seconds),
            ..settings
        };
        let recognized = recognizer.transcribe_together(firsts, &settings, &cancelled)?;
        let recognized = recognized.ok_or_else(stopped)?;
        let decoding = begun.elapsed().as_secs_f64();
        let decoded: f64 = recognized.iter().map(|recognized| recognized.decoded_seconds).sum();
        let mut transcribed = recognized.into_iter().zip(all).map(|(recognized, (extent, seconds))| {
            let share = recognized.decoded_seconds / decoded.max(f64::MIN_POSITIVE);
            Transcribed {
                extent,
                recognized,
                seconds: seconds + share * decoding,
            }
        });
        let asked = transcribed.next().ok_or_else(stopped)?;
        let ready: BTreeMap<_, _> = partitions
            .into_iter()
            .zip(transcribed)
            .map(|((partition, identity), transcribed)| (partition, (identity, transcribed)))
            .collect();
        self.ahead.keep(ready);
        Ok(Ok(asked))
    }
}

fn seconds(samples: u64) -> f64 {
    samples as f64 / f64::from(SAMPLE_RATE)
}

/// What a recognizer is loaded by: model, number types, device, decoding, languages.
type Loaded = (
    PathBuf,
    (Weights, Precision),
    String,
    DecodingOptions,
    (Vec<String>, PathBuf, f64),
);

/// The recognizer of these settings, which all workers of a run share: it is loaded by the first that needs it.
fn shared_recognizer(
    settings: &TranscribeSettings,
    model: PathBuf,
    context: &Context,
) -> Result<Arc<Recognizer>, StageError> {
    static LOADED: Shared<Loaded, Recognizer> = Shared::new();
    let decoding = settings.decoding();
    let key = (
        model.clone(),
        (settings.weights, settings.precision),
        settings.device.clone(),
        decoding.clone(),
        (
            settings.languages.clone(),
            settings.language_prior.clone(),
            settings.language_weight,
        ),
    );
    LOADED.get(key, || {
        let device = settings
            .device()?
            .open(0)
            .map_err(|error| StageError::setting("device", error))?;
        let recognizer = Recognizer::load_in(&model, settings.weights.into(), settings.precision, &device)?;
        let mut recognizer = recognizer.with_decoding(&decoding)?;
        if let Some(prior) = settings.language_prior() {
            recognizer = recognizer.with_language_counts(prior, settings.language_weight)?;
        }
        let recognizer = recognizer.with_request(&settings.request())?;
        for note in recognizer.notes() {
            context.warn(note.clone());
        }
        Ok(recognizer)
    })
}

#[cfg(test)]
#[path = "transcribe_tests.rs"]
mod tests;
