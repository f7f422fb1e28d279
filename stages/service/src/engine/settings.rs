//! Settings of the engine.

use std::path::PathBuf;

use flow_kernels::device::DeviceChoice;
use flow_model::decoding::DecodingOptions;
use flow_model::heads::HeadKind;
use flow_model::{Precision, Weights};
use flow_speakers::diarizer::KnownSpeakers;
use flow_transcription::coverage::{CoverageMode, CoverageSettings, SuspectUse};
use flow_transcription::long_audio::LongAudio;
use flow_transcription::recognizer::{RecognitionSettings, VoiceActivity};
use flow_transcription::segments::SegmentRules;
use flow_transcription::text_style::{FillerUse, NumberStyle};
use flow_transcription::transcribe::{MAX_DURATION, TranscribeSettings};
use serde::{Deserialize, Deserializer, de};

use super::EngineError;

/// A model that clients can request.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSettings {
    /// Its name in requests.
    pub name: String,
    /// A `.nemo` archive, a model folder, or a Hugging Face folder.
    pub path: PathBuf,
    /// Counts of pieces by language, as `flow lm build --languages` writes them: a request for a language then makes pieces of other
    /// languages less probable.
    #[serde(default)]
    pub language_prior: Option<PathBuf>,
}

/// Settings of an [`Engine`](super::Engine). All but `models` have defaults: those of `transcription.transcribe` where it has
/// them too.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineSettings {
    /// The first one is used where a request names none.
    pub models: Vec<ModelSettings>,
    #[serde(deserialize_with = "device")]
    pub device: DeviceChoice,
    /// The number type in which matrices are kept.
    pub weights: Weights,
    /// What the factors of products are rounded to, on the CPU.
    pub precision: Precision,
    /// The longest window that goes through a model, in seconds.
    pub max_window: f64,
    /// A pause as long as this ends a window, in seconds.
    pub min_pause: f64,
    pub vad: VoiceActivity,
    /// What is done about speech without words.
    pub coverage: CoverageMode,
    /// With `coverage`: what is done about words that are probably invented.
    pub suspects: SuspectUse,
    /// The head that decodes models with two; none for the models' own choice.
    pub decoder: Option<HeadKind>,
    /// Weight of what follows from the language priors of models, from 0 to 100.
    pub language_weight: f64,
    /// How numbers are written, and what is done about fillers, where a request names a language with a table and does not say it.
    pub numbers: NumberStyle,
    pub fillers: FillerUse,
    /// Tables of number words and fillers, each in place of the bundled one of its language.
    pub text_tables: Vec<PathBuf>,
    /// The longest pause within a segment, in seconds.
    pub max_gap: f64,
    /// The longest segment, in seconds.
    pub max_segment: f64,
    /// Seconds that are subtracted from the times of words: transducers emit words late.
    pub delay: f64,
    /// Most seconds of audio, padding included, in a model at once.
    pub batch_seconds: f64,
    /// Largest share of a batch for one request while others wait: above 0, and 1 at most.
    pub batch_share: f64,
    /// Longer recordings are refused, in seconds.
    pub max_duration: f64,
    /// Most requests that wait or run, and most such windows of live sessions; more of either are refused.
    pub max_queue: usize,
    /// How long a request may take from its first window on, in seconds; and how long the preparation before it, such as the
    /// decoding of hours of silence.
    pub decode_timeout: f64,
    /// Seconds without use after which a model is unloaded; 0: never.
    pub idle_unload: f64,
    /// Most bytes of all loaded models together, with what their batches need.
    pub memory_budget: Option<u64>,
    /// Whether diarization may be requested.
    pub diarization: bool,
    /// A file of speakers whose names are known, with a recording or an embedding for each. It needs `diarization`.
    pub known_speakers: Option<PathBuf>,
    /// A speaker has a known name if the cosine similarity of the voices is at least this, from 0 to 1.
    pub known_threshold: f64,
    /// Whether names of models that are not known represent the first one.
    #[serde(skip)]
    pub accept_any_model: bool,
}

impl Default for EngineSettings {
    fn default() -> Self {
        let usual = TranscribeSettings::new(Vec::new(), "");
        EngineSettings {
            models: Vec::new(),
            device: DeviceChoice::Cpu,
            weights: usual.weights,
            precision: usual.precision,
            max_window: usual.max_window,
            min_pause: usual.min_pause,
            vad: usual.vad,
            coverage: usual.coverage,
            suspects: usual.suspects,
            decoder: usual.decoder,
            language_weight: flow_transcription::language_prior::WEIGHT,
            numbers: usual.numbers,
            fillers: usual.fillers,
            text_tables: Vec::new(),
            max_gap: usual.max_gap,
            max_segment: usual.max_segment,
            delay: usual.delay,
            // Twice that of one recording: windows of several requests share a batch.
            batch_seconds: 120.0,
            batch_share: 0.5,
            max_duration: usual.max_duration,
            max_queue: 100,
            decode_timeout: 3_600.0,
            idle_unload: 0.0,
            memory_budget: None,
            diarization: false,
            known_speakers: None,
            known_threshold: KnownSpeakers::THRESHOLD,
            accept_any_model: false,
        }
    }
}

impl EngineSettings {
    /// # Errors
    /// [`EngineError::Setting`] if a value is out of its range.
    pub fn check(&self) -> Result<(), EngineError> {
        let wrong = |setting, value: f64, rule: &str| {
            Err(EngineError::setting(
                setting,
                format!("it is {value}; it must be {rule}"),
            ))
        };
        if self.models.is_empty() {
            return Err(EngineError::setting("models", "no model is named"));
        }
        for (index, model) in self.models.iter().enumerate() {
            if model.name.trim().is_empty() {
                return Err(EngineError::setting("models", "a model has an empty name"));
            }
            if self.models[..index].iter().any(|other| other.name == model.name) {
                let why = format!("two models are called `{}`", model.name);
                return Err(EngineError::setting("models", why));
            }
        }
        let device = self.device.check();
        device.map_err(|error| EngineError::setting("device", error.to_string()))?;
        self.precision
            .check(self.weights, self.device)
            .map_err(|why| EngineError::setting("precision", why))?;
        self.recognition()
            .check()
            .or_else(|(setting, value, rule)| wrong(setting, value, rule))?;
        let coverage = self.recognition().coverage;
        coverage
            .check(LongAudio::Vad, self.vad)
            .map_err(|(setting, why, _)| EngineError::setting(setting, why))?;
        if !(1.0..=MAX_DURATION).contains(&self.max_duration) {
            return wrong("max_duration", self.max_duration, "from 1 to 43200 seconds");
        }
        if !(self.batch_share > 0.0 && self.batch_share <= 1.0) {
            return wrong("batch_share", self.batch_share, "above 0, and 1 at most");
        }
        if self.known_speakers.is_some() && !self.diarization {
            let why = "speakers are not distinguished without `diarization`";
            return Err(EngineError::setting("known_speakers", why));
        }
        if !(0.0..=1.0).contains(&self.known_threshold) {
            return wrong("known_threshold", self.known_threshold, "from 0 to 1");
        }
        if !(0.0..=100.0).contains(&self.language_weight) {
            return wrong("language_weight", self.language_weight, "from 0 to 100");
        }
        if self.max_queue == 0 {
            return wrong("max_queue", 0.0, "1 or more");
        }
        // Larger values do not fit a `Duration`.
        if !(self.decode_timeout > 0.0 && self.decode_timeout <= 1e9) {
            return wrong(
                "decode_timeout",
                self.decode_timeout,
                "above 0, and at most 1e9 seconds",
            );
        }
        if !(0.0..=1e9).contains(&self.idle_unload) {
            return wrong("idle_unload", self.idle_unload, "from 0 to 1e9 seconds");
        }
        Ok(())
    }

    /// The settings of the recognizer.
    pub(crate) fn recognition(&self) -> RecognitionSettings {
        RecognitionSettings {
            long_audio: LongAudio::Vad,
            voice_activity: self.vad,
            max_window: self.max_window,
            min_pause: self.min_pause,
            batch_seconds: self.batch_seconds,
            segments: SegmentRules {
                max_gap: self.max_gap,
                max_duration: self.max_segment,
            },
            delay: self.delay,
            coverage: CoverageSettings {
                mode: self.coverage,
                suspects: self.suspects,
            },
        }
    }

    /// How models are decoded.
    pub(crate) fn decoding(&self) -> DecodingOptions {
        DecodingOptions::default().with_head(self.decoder)
    }
}

/// Reads `cpu`, `cuda` or `cuda:1`.
fn device<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DeviceChoice, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_with_defaults_and_checked() {
        let settings: EngineSettings =
            serde_yaml::from_str("models: [{name: a, path: a.nemo}]\nmax_queue: 3\nweights: bf16\n").unwrap();
        assert_eq!((settings.max_queue, settings.weights), (3, Weights::Bf16));
        assert_eq!(settings.precision, Precision::F32);
        assert_eq!(settings.max_window, EngineSettings::default().max_window);
        settings.check().unwrap();
        for wrong in [
            "max_que: 3",
            "device: gpu",
            "accept_any_model: true",
            "models: [{name: a}]",
            "models: [{name: a, path: b, x: 1}]",
        ] {
            assert!(serde_yaml::from_str::<EngineSettings>(wrong).is_err(), "{wrong}");
        }
        for (setting, wrong) in [
            ("models", "models: []"),
            ("models", "models: [{name: '', path: a}]"),
            ("models", "models: [{name: a, path: a}, {name: a, path: b}]"),
            ("precision", "precision: int8\nweights: bf16"),
            ("coverage", "coverage: recover\nvad: off"),
            ("suspects", "suspects: drop"),
            ("max_window", "max_window: .nan"),
            ("min_pause", "min_pause: 100"),
            ("max_duration", "max_duration: 50000"),
            ("max_gap", "max_gap: 0"),
            ("delay", "delay: .nan"),
            ("batch_seconds", "batch_seconds: .inf"),
            ("batch_share", "batch_share: 0"),
            ("language_weight", "language_weight: .nan"),
            ("max_queue", "max_queue: 0"),
            ("decode_timeout", "decode_timeout: 0"),
            ("idle_unload", "idle_unload: -1"),
            ("known_speakers", "known_speakers: known.json"),
            ("known_threshold", "known_threshold: 2"),
        ] {
            let named = wrong.starts_with("models");
            let yaml = if named {
                wrong.to_owned()
            } else {
                format!("models: [{{name: a, path: a}}]\n{wrong}")
            };
            let read: EngineSettings = serde_yaml::from_str(&yaml).unwrap();
            match read.check() {
                Err(EngineError::Setting { setting: found, .. }) => assert_eq!(found, setting, "{wrong}"),
                other => panic!("{wrong}: {other:?}"),
            }
        }
    }
}
