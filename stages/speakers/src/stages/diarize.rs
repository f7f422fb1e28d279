//! The kind `speakers.diarize`: recordings to turns of speakers.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use flow_audio::listing::{Recording, shared_recordings};
use flow_audio::samples::{OnDamage, RecordingSamples, Refusal, lock_if_long, samples_or_damage};
use flow_hub::HubReference;
use flow_kind::{
    Body, Context, InputPort, Inputs, Kind, Out, OutputPort, Partition, Port, RejectClass, Shape, Source,
    SourcePartition, StageError, Storage, UrlUse,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::known::{self, Voice};
use super::networks::{LoadedDiarizer, found, loaded};
use super::rows::{
    recordings_batch, recordings_schema, speakers_batch, speakers_schema, timings_batch, timings_schema, turns_batch,
    turns_schema,
};
use crate::clustering::Clusters;
use crate::diarizer::{DiarizationSettings, KnownSpeakers};
use crate::error::Error;
use crate::pyannote::Pipeline;
use crate::silero::SAMPLE_RATE;

/// Diarizes recordings: finds who speaks when.
///
/// # What it does
///
/// Each recording is a partition, named as by `transcription.transcribe` with the same `input`. Only new or changed
/// recordings are diarized.
///
/// A recording is decoded to 16 kHz mono and held in memory as a whole. A network (pyannote's segmentation 3.0) finds
/// in chunks of 10 seconds, one second apart, when up to three people speak; another one (CAM++) computes an embedding
/// of each of them; these are clustered to the speakers of the recording, named `SPEAKER_00`, `SPEAKER_01` and so on in
/// the order in which they begin to speak. Silence gives no turns, which is not an error. With `model` the networks and
/// steps are those of a pyannote pipeline; the digests of its files are then part of the key, not their paths.
///
/// Port `turns`, one row per turn: `_row, start, end, speaker`; times are seconds from the beginning of the recording, and turns
/// overlap where several people speak at once. Port `exclusive`: the same columns, with one speaker at a time, for words. Port
/// `speakers`, one row per speaker: `_row, name, seconds, embedding`. Port `recordings`, one row per partition: `_row, recording`
/// (its path with its ending), `duration` in seconds, `num_speakers`, `damaged_at` (see `on_damage`). Port `timings`, one row per partition: `_row,
/// diarization_s, total_s`; it alone differs from run to run.
///
/// Recordings that cannot be diarized are rejects of class `fault`: `missing_file`, `empty_file`, `unsupported_format`,
/// `decode_error`, `too_long` (see `max_duration`), `unreadable_file`, `changed_while_read` (it is still being written; the next
/// run reads it again).
///
/// # Example
///
/// ```yaml
/// diarize:
///   uses: speakers.diarize
///   with: {input: [talks], max_speakers: 4}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DiarizeSettings {
    /// Recordings (FLAC, WAV, AIFF, CAF, MP3, MP4, QuickTime, Ogg with Vorbis, Opus or FLAC, Matroska, WebM, detected by
    /// content): files, folders (all their files with an extension of audio), and patterns with `*`, `?`, and
    /// `**` for folders.
    pub input: Vec<String>,
    /// A pyannote pipeline in place of the bundled networks: a folder with `config.yaml`, or `hf://OWNER/NAME[@REVISION]`, which is
    /// fetched into the hub's cache when the run is planned. Known are pyannote/speaker-diarization-3.1 and
    /// pyannote/speaker-diarization-community-1, and others of their classes and networks. Empty for the bundled networks.
    #[serde(default)]
    pub model: String,
    /// The audio track of films and other files with several, counted from 1; 0 for the one that is played where nobody chooses.
    #[serde(default)]
    pub track: u32,
    /// How many speakers each recording has; 0 where that is not known.
    #[serde(default)]
    pub num_speakers: usize,
    /// Fewest speakers of a recording with speech; 0 for no limit.
    #[serde(default)]
    pub min_speakers: usize,
    /// Most speakers of a recording; 0 for no limit.
    #[serde(default)]
    pub max_speakers: usize,
    /// Largest distance between the embeddings of one speaker (Euclidean distance of centroids of normalised
    /// embeddings, above 0 to 2): a larger value gives fewer speakers. Default: 0.7, or the value of the model's
    /// configuration.
    #[serde(default)]
    pub clustering_threshold: Option<f64>,
    /// Shorter turns are left out, in seconds. Not with `model`: pyannote's pipelines have no such setting.
    #[serde(default)]
    pub min_duration_on: f64,
    /// Shorter pauses of a speaker are filled, in seconds. Default: 0, or the value of the model's configuration.
    #[serde(default)]
    pub min_duration_off: Option<f64>,
    /// Longest recording in seconds; longer ones are rejected.
    #[serde(default = "max_duration")]
    pub max_duration: f64,
    /// How to treat a damaged or truncated recording: `keep` (the part before the damage is diarized, if it is a second
    /// or more, and `damaged_at` is its end in seconds) or `refuse` (it is a reject, `decode_error`).
    #[serde(default)]
    pub on_damage: OnDamage,
    /// A JSON file of speakers whose names are known: `{"Ann": "ann.wav", "Bob": [0.1, ...]}`, each with a recording of
    /// only this person (its path is relative to the file's folder) or with an embedding as `speakers.write` writes it.
    /// Empty for none.
    #[serde(default)]
    pub known_speakers: PathBuf,
    /// A speaker gets a known name if the cosine of the angle between the embeddings is at least this.
    #[serde(default = "known_threshold")]
    pub known_threshold: f64,
}

fn max_duration() -> f64 {
    10_800.0
}

fn known_threshold() -> f64 {
    KnownSpeakers::THRESHOLD
}

impl DiarizeSettings {
    /// With the defaults of all but these.
    pub fn new(input: Vec<String>) -> Self {
        DiarizeSettings {
            input,
            model: String::new(),
            track: 0,
            num_speakers: 0,
            min_speakers: 0,
            max_speakers: 0,
            clustering_threshold: None,
            min_duration_on: 0.0,
            min_duration_off: None,
            max_duration: max_duration(),
            on_damage: OnDamage::default(),
            known_speakers: PathBuf::new(),
            known_threshold: known_threshold(),
        }
    }

    /// The settings of the diarizer; `defaults` are those of the networks.
    pub fn diarization(&self, defaults: &DiarizationSettings) -> DiarizationSettings {
        let given = |number: usize| Some(number).filter(|&number| number > 0);
        DiarizationSettings {
            clusters: Clusters {
                number: given(self.num_speakers),
                least: given(self.min_speakers),
                most: given(self.max_speakers),
            },
            clustering_threshold: self.clustering_threshold.unwrap_or(defaults.clustering_threshold),
            min_duration_on: self.min_duration_on,
            min_duration_off: self.min_duration_off.unwrap_or(defaults.min_duration_off),
        }
    }

    /// The pyannote pipeline that is named, if one is.
    fn model(&self) -> Option<&str> {
        Some(self.model.trim()).filter(|model| !model.is_empty())
    }

    /// The file of known speakers, if there is one.
    fn known(&self) -> Option<&PathBuf> {
        Some(&self.known_speakers).filter(|path| !path.as_os_str().is_empty())
    }

    fn check(&self) -> Result<(), StageError> {
        let wrong = |name: &str, value: &dyn std::fmt::Display, rule: &str| {
            let message = format!("`{name}` is {value}; it must be {rule}");
            Err(StageError::setting(name, message))
        };
        let (number, least, most) = (self.num_speakers, self.min_speakers, self.max_speakers);
        if most > 0 && least > most {
            return wrong("min_speakers", &least, &format!("at most `max_speakers`, {most}"));
        }
        if number > 0 && (number < least || (most > 0 && number > most)) {
            return wrong("num_speakers", &number, "between `min_speakers` and `max_speakers`");
        }
        if let Some(threshold) = self.clustering_threshold
            && !(threshold > 0.0 && threshold <= 2.0)
        {
            return wrong("clustering_threshold", &threshold, "above 0 and at most 2");
        }
        if !(0.0..=1.0).contains(&self.known_threshold) {
            return wrong("known_threshold", &self.known_threshold, "from 0 to 1");
        }
        for (name, value) in [
            ("min_duration_on", self.min_duration_on),
            ("min_duration_off", self.min_duration_off.unwrap_or(0.0)),
        ] {
            if !(0.0..=3600.0).contains(&value) {
                return wrong(name, &value, "from 0 to 3600 seconds");
            }
        }
        // As in transcription.transcribe.
        if !(1.0..=43_200.0).contains(&self.max_duration) {
            return wrong("max_duration", &self.max_duration, "from 1 to 43200 seconds");
        }
        if self.input.is_empty() {
            return Err(StageError::setting("input", "`input` names no recording"));
        }
        let Some(model) = self.model() else { return Ok(()) };
        if self.min_duration_on > 0.0 {
            let error = StageError::setting("min_duration_on", "pyannote's pipelines have no `min_duration_on`");
            return Err(error.with_help("leave it out, or leave `model` out"));
        }
        if let Some(Err(error)) = HubReference::parse(model) {
            return Err(StageError::setting("model", error));
        }
        Ok(())
    }
}

/// The kind `speakers.diarize`.
pub struct Diarize;

impl Kind for Diarize {
    const NAME: &'static str = "speakers.diarize";
    const VERSION: u32 = 10;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[
        OutputPort::new(
            "turns",
            "one row for each turn: from when to when, and whose; turns may overlap",
        ),
        OutputPort::new(
            "exclusive",
            "one row for each turn where one speaker is heard at a time",
        ),
        OutputPort::new(
            "speakers",
            "one row for each speaker: name, seconds of speech, embedding",
        ),
        OutputPort::new(
            "recordings",
            "one row for each recording: its length and how many speakers it has",
        ),
        OutputPort::new("timings", "one row for each recording: how long it was worked on"),
    ];
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[("input", UrlUse::Read)];
    type Settings = DiarizeSettings;

    fn shape(settings: &DiarizeSettings, _: &Inputs) -> Result<Shape, StageError> {
        settings.check()?;
        let port = |name: &str, schema| Port::new(name, schema);
        let outputs = vec![
            port("turns", turns_schema()),
            port("exclusive", turns_schema()),
            port("speakers", speakers_schema()),
            port("recordings", recordings_schema()),
            port("timings", timings_schema()),
        ];
        Ok(Shape {
            expensive: true,
            ..Shape::source(outputs)
        })
    }

    fn open(settings: &DiarizeSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(Diarizing {
            settings: settings.clone(),
            context: context.clone(),
            listed: None,
            pipeline: None,
            diarizer: None,
            known: None,
        })))
    }

    /// Without the paths of recordings, of the file of known speakers and of a model's files.
    fn identity(settings: &DiarizeSettings) -> Value {
        // The defaults of a model are those of its configuration, which is among its files.
        let bundled = settings.model().is_none();
        let or = |given: Option<f64>, default: f64| given.or(bundled.then_some(default));
        let defaults = DiarizationSettings::default();
        let mut identity = json!({
            "num_speakers": settings.num_speakers,
            "min_speakers": settings.min_speakers,
            "max_speakers": settings.max_speakers,
            "clustering_threshold": or(settings.clustering_threshold, defaults.clustering_threshold),
            "min_duration_on": settings.min_duration_on,
            "min_duration_off": or(settings.min_duration_off, defaults.min_duration_off),
            "max_duration": settings.max_duration,
            "on_damage": settings.on_damage,
            "known_threshold": settings.known().map(|_| settings.known_threshold),
        });
        if settings.track > 0 {
            identity["track"] = json!(settings.track);
        }
        if !bundled {
            identity["model"] = json!(true);
        }
        identity
    }

    fn sources(settings: &DiarizeSettings) -> Vec<(&'static str, PathBuf)> {
        let known = settings.known().map(|path| ("known_speakers", path.clone()));
        let of_hub = |model: &&str| HubReference::parse(model).is_some();
        let model = settings.model().filter(|model| !of_hub(model));
        let model = model.map(|model| ("model", PathBuf::from(model)));
        known.into_iter().chain(model).collect()
    }
}

struct Diarizing {
    settings: DiarizeSettings,
    context: Context,
    /// Sorted by name, which is that of the partition.
    listed: Option<Arc<Vec<Recording>>>,
    /// The model, once it is found.
    pipeline: Option<Arc<Pipeline>>,
    diarizer: Option<Arc<LoadedDiarizer>>,
    known: Option<Arc<KnownSpeakers>>,
}

/// The progress of recordings from this many seconds on is reported.
const TOLD_FROM: f64 = 300.0;

fn stopped() -> StageError {
    StageError::failed("stopped")
}

impl Diarizing {
    fn listed(&mut self) -> Result<Arc<Vec<Recording>>, StageError> {
        let listed = match self.listed.take() {
            Some(listed) => listed,
            None => shared_recordings(&self.context.storage, &self.settings.input)?,
        };
        Ok(Arc::clone(self.listed.insert(listed)))
    }

    /// The model that is named, if one is; `again` where the hub is to be asked also if it was before.
    fn pipeline(&mut self, again: bool) -> Result<Option<Arc<Pipeline>>, StageError> {
        if let (None, Some(model)) = (&self.pipeline, self.settings.model()) {
            let context = &self.context;
            let gives_up = context.gives_up();
            let pipeline = found(model, again, &mut |line| {
                context.report(json!({ "line": line }));
                !gives_up()
            })?;
            self.pipeline = Some(pipeline.ok_or_else(stopped)?);
        }
        Ok(self.pipeline.clone())
    }

    fn diarizer(&mut self) -> Result<Arc<LoadedDiarizer>, StageError> {
        let diarizer = match self.diarizer.take() {
            Some(diarizer) => diarizer,
            None => loaded(self.pipeline(false)?)?,
        };
        Ok(Arc::clone(self.diarizer.insert(diarizer)))
    }

    /// The known speakers, if any are named.
    fn known(&mut self, diarizer: &Arc<LoadedDiarizer>) -> Result<Option<Arc<KnownSpeakers>>, StageError> {
        if let (None, Some(path)) = (&self.known, self.settings.known()) {
            let gives_up = self.context.gives_up();
            let known = shared_known(
                &self.context.storage,
                path,
                self.settings.known_threshold,
                diarizer,
                &gives_up,
            )?;
            self.known = Some(known.ok_or_else(stopped)?);
        }
        Ok(self.known.clone())
    }
}

impl Source for Diarizing {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        // The files that affect the result: that of known speakers, the recordings that it names, and those of a model.
        let mut known = Vec::new();
        if let Some(path) = self.settings.known() {
            known.push(path.clone());
            known.extend(
                known::read(&self.context.storage, path)?
                    .into_iter()
                    .filter_map(|(_, voice)| match voice {
                        Voice::Recording(recording) => Some(recording),
                        Voice::Embedding(_) => None,
                    }),
            );
        }
        let model = self
            .pipeline(true)?
            .map_or_else(Vec::new, |pipeline| pipeline.files.all());
        let others = || known.iter().chain(&model);
        let partition = |recording: &Recording| SourcePartition {
            name: Partition::new(&recording.name),
            files: std::iter::once(&recording.path).chain(others()).cloned().collect(),
            // It is a column.
            extra: recording.file.clone(),
        };
        Ok(self.listed()?.iter().map(partition).collect())
    }

    /// Recordings are often still being written.
    fn refuses_changed_files(&self) -> bool {
        true
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        let begun = Instant::now();
        let listed = self.listed()?;
        let place = listed.binary_search_by(|recording| recording.name.as_str().cmp(partition.as_str()));
        let recording = match place {
            Ok(place) => listed[place].clone(),
            Err(_) => return Err(StageError::failed(format!("there is no recording `{partition}`"))),
        };
        let gives_up = self.context.gives_up();
        let Ok(_alone) = lock_if_long(&self.context.storage, &recording.path, &gives_up) else {
            return Err(stopped());
        };
        if gives_up() {
            return Err(stopped());
        }
        let found = samples_or_damage(
            &self.context.storage,
            &recording.path,
            self.settings.max_duration,
            self.settings.on_damage,
            Some(self.settings.track).filter(|track| *track > 0),
        )?;
        let RecordingSamples { samples, damaged, note } = match found {
            Ok(found) => found,
            Err(Refusal { reason, detail }) => {
                out.reject_partition(reason, RejectClass::Fault, detail);
                return Ok(());
            }
        };
        if let Some(note) = note {
            self.context.warn(format!("{}: {note}", recording.file));
        }
        if gives_up() {
            return Err(stopped());
        }
        let diarizer = self.diarizer()?;
        // First, so that a mistake in it is reported early.
        let known = self.known(&diarizer)?;
        let diarizing = Instant::now();
        let settings = self.settings.diarization(&diarizer.defaults);
        let duration = samples.len() as f64 / f64::from(SAMPLE_RATE);
        let told = Cell::new(0);
        let watch = |heard: f64| {
            let tenths = (10.0 * heard / duration) as u32;
            if duration >= TOLD_FROM && tenths > told.replace(tenths) && tenths < 10 {
                let (of, all) = (heard / 60.0, duration / 60.0);
                let line = format!("{}: {of:.1} of {all:.1} minutes", recording.file);
                self.context.report(json!({ "line": line }));
            }
            gives_up()
        };
        let mut diarized = match diarizer.diarizer.diarize_watched(&samples, &settings, &watch) {
            // None: the run is ending.
            Ok(diarized) => diarized.ok_or_else(stopped)?,
            Err(error @ Error::Sample { .. }) => {
                let detail = format!("{}: {error}", recording.path.display());
                out.reject_partition("decode_error", RejectClass::Fault, detail);
                return Ok(());
            }
            Err(error) => return Err(StageError::failed(error)),
        };
        if let Some(known) = known {
            let named = known.name(&mut diarized);
            named.map_err(|error| StageError::setting("known_speakers", error))?;
        }
        let diarization = diarizing.elapsed().as_secs_f64();
        out.read(1);
        out.send(0, turns_batch(&diarized.turns)?);
        out.send(1, turns_batch(&diarized.exclusive)?);
        out.send(2, speakers_batch(&diarized.speakers)?);
        let damaged_at = damaged.then_some(duration);
        out.send(
            3,
            recordings_batch(&recording.file, duration, diarized.speakers.len(), damaged_at)?,
        );
        out.send(4, timings_batch(diarization, begun.elapsed().as_secs_f64())?);
        Ok(())
    }
}

/// The known speakers of a file, which all workers of a run share: the first that needs them computes their embeddings.
/// None if `cancelled`.
fn shared_known(
    storage: &Storage,
    path: &Path,
    threshold: f64,
    diarizer: &Arc<LoadedDiarizer>,
    cancelled: &dyn Fn() -> bool,
) -> Result<Option<Arc<KnownSpeakers>>, StageError> {
    // The embeddings are those of one diarizer.
    type Loaded = (PathBuf, u64, Weak<LoadedDiarizer>, Weak<KnownSpeakers>);
    static SHARED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    shared.retain(|(.., known)| known.strong_count() > 0);
    let same =
        |(of, at, by, _): &&Loaded| of == path && *at == threshold.to_bits() && by.as_ptr() == Arc::as_ptr(diarizer);
    if let Some(known) = shared.iter().find(same).and_then(|(.., known)| known.upgrade()) {
        return Ok(Some(known));
    }
    let Some(known) = known::load(storage, path, threshold, &diarizer.diarizer, cancelled)? else {
        return Ok(None);
    };
    let known = Arc::new(known);
    let by = Arc::downgrade(diarizer);
    shared.push((path.to_owned(), threshold.to_bits(), by, Arc::downgrade(&known)));
    Ok(Some(known))
}

#[cfg(test)]
#[path = "diarize_tests.rs"]
mod tests;
