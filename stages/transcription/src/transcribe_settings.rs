//! Settings of the kind `transcription.transcribe`.

use std::path::{Path, PathBuf};

use flow_audio::samples::OnDamage;
use flow_kernels::device::DeviceChoice;
use flow_kind::StageError;
use flow_model::decoding::DecodingOptions;
use flow_model::heads::HeadKind;
use flow_model::{Precision, Weights};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::channels::ChannelUse;
use crate::coverage::{CoverageMode, CoverageSettings, SuspectUse};
use crate::decoding_request::DecodingRequest;
use crate::language_prior::{WEIGHT, parse_languages};
use crate::long_audio::{ChunkSettings, FullSettings, LongAudio, WindowMethod};
use crate::recognizer::{RecognitionSettings, VoiceActivity};
use crate::segments::SegmentRules;
use crate::text_style::{FillerUse, NumberStyle, Tables, TextStyle};

/// The longest recording, in seconds, that may be asked for. Twelve hours: times and samples are counted in 32 bits further down.
pub const MAX_DURATION: f64 = 43_200.0;

/// Transcribes recordings, with times and confidences of words.
///
/// # What it does
///
/// Each recording is a partition, named by its path below the folder that was named in `input`, without its ending (unless
/// two would then have one name). Only new or changed recordings are decoded, or all of them when the model has
/// changed.
///
/// A recording is decoded to 16 kHz mono, block by block. Voice activity detection finds speech; the speech between two
/// pauses is a window, which the model processes independently, in a batch with windows of similar length. A window with
/// a pause that voice activity does not see is processed again as two, and these are used if they are more confident. Memory does
/// not grow with the length of a recording, and the file of one of more than ten minutes is decoded twice. `window` has
/// other modes; of these, `full` decodes the file of such a recording four times and keeps rows for all frames up to
/// `full_attention`. Words get the times at which they were spoken and a confidence (NeMo's default: Tsallis entropy,
/// the minimum over a word's tokens), and are grouped into segments. Tags such as `<|hi|>` are removed from the text
/// and listed as languages. Silence gives a transcript without segments, which is not an error.
///
/// Port `segments`, one row per segment: `_row, start, end, text, confidence, words`; times are seconds from the beginning of
/// the recording, `words` is a list of `word, start, end, confidence`. Port `recordings`, one row per partition: `_row,
/// recording` (its path with its ending), `channel` (from 1, of a recording whose channels are split), `duration` and `decoded` in seconds (total, and the part that the model
/// processed, in `windows`), `languages, model, model_digest, damaged_at` (see `on_damage`). With `coverage` it also has `coverage`
/// (share of the speech that has words, from 0 to 1), `speech` (in seconds), `holes` (speech without words: `start, end`), `recovered`
/// (words found when holes were decoded again) and `suspects` (`start, end, text, reason, dropped`). Port `timings`, one row
/// per partition: `_row, processed_at, transcription_s, total_s`; it alone differs from run to run.
///
/// With `channels: split`, each channel of a recording is a partition of its own, `NAME.ch1`, `NAME.ch2` and so on; recordings
/// of one channel keep their name.
///
/// The rows of manifests that `input` names (JSON lines as NeMo has them, or parquet with the columns of `manifest.write` or of the
/// rows of `manifest.read`) are partitions, too: `MANIFEST/ID`, by the manifest's name without its ending and the row's
/// `segment_id` or `id` (or else its path and offset). A row is the part of its recording that begins at `offset` and is `duration`
/// seconds long, or all of it without these; times are from the beginning of the part. A relative path is looked for in the
/// folder of the manifest, then in the current one; a recording may be in a tar (`tar_path`, `tar_member_name`). What a row
/// says is in `row` of port `recordings`, as JSON.
///
/// Recordings that cannot be transcribed are rejects of class `fault`: `missing_file`, `empty_file`, `unsupported_format`,
/// `decode_error`, `too_long` (see `max_duration`), `unreadable_file`, `changed_while_read` (it is still being written; the next
/// run reads it again). So are rows of manifests: `bad_json`, `not_utf8`, `line_too_long` (1 MiB), `bad_type`, `missing_field`,
/// `missing_audio`, `offset_invalid`, `duration_invalid`, `duration_past_end` (by more than 0.1 s), `duplicate_id`, `unsafe_name`.
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
    /// Recordings (FLAC, WAV, AIFF, CAF, MP3, Ogg with Vorbis, Opus or FLAC, the audio of MP4, QuickTime, Matroska and WebM,
    /// detected by content): files, folders (all their files with an extension of audio), patterns with
    /// `*`, `?`, and `**` for folders, and manifests (`.jsonl`, `.json`, `.parquet`, or of such content).
    pub input: Vec<String>,
    /// How to use several channels: `mix` (their mean is transcribed) or `split` (each separately).
    #[serde(default)]
    pub channels: ChannelUse,
    /// The audio track of films and other files with several, counted from 1; 0 for the one that is played where nobody chooses. A
    /// recording without such a track is a reject, `decode_error`.
    #[serde(default)]
    pub track: u32,
    /// How to treat a damaged or truncated recording: `keep` (the part before the damage is transcribed, if it is a
    /// second or more, and `damaged_at` is its end in seconds) or `refuse` (it is a reject, `decode_error`).
    #[serde(default)]
    pub on_damage: OnDamage,
    /// The model: a `.nemo` archive, a model folder such as a checkpoint, a Hugging Face folder, or a model of the Hugging Face hub,
    /// `hf://OWNER/NAME[@REVISION][/FILE]`, which is downloaded into the hub's own cache (with `HF_TOKEN` or the stored token). Of a
    /// URL of object storage a copy is kept on this machine.
    pub model: PathBuf,
    /// What the model processes at once: `vad` (windows of speech between pauses, independently), `chunked` (chunks of
    /// a fixed length with context, with the decoder's state carried from one to the next, as NeMo's streaming
    /// inference does it) or `full` (the whole recording in one pass); the last two for models that were trained on
    /// long recordings, with greedy search only. `auto` is `vad`.
    #[serde(default)]
    pub window: WindowMethod,
    /// With `chunked`: the length of a chunk, in seconds, of which whole frames of the encoder (0.08 s) are taken.
    #[serde(default = "chunk")]
    pub chunk: f64,
    /// With `chunked`: left context of a chunk in the encoder, in seconds.
    #[serde(default = "chunk_left")]
    pub chunk_left: f64,
    /// With `chunked`: right context of a chunk in the encoder, in seconds.
    #[serde(default = "chunk_right")]
    pub chunk_right: f64,
    /// With `full`: in longer recordings, in seconds, a frame of the encoder sees `attention_context` frames to either side;
    /// in others all frames, whose time grows with the square of the length.
    #[serde(default = "full_attention")]
    pub full_attention: f64,
    /// With `full`: frames of 0.08 s that a frame sees to either side in recordings that are longer than `full_attention`. A
    /// model that was made with limited attention keeps its own.
    #[serde(default = "attention_context")]
    pub attention_context: usize,
    /// With `vad`: the method of voice activity detection: `neural` (silero-vad), `energy` (by the level), or `off`
    /// (everything is decoded).
    #[serde(default)]
    pub vad: VoiceActivity,
    /// The longest window for the model, in seconds. Longer speech is cut at its longest pause, or where it is least
    /// likely to be speech.
    #[serde(default = "max_window")]
    pub max_window: f64,
    /// A pause as long as this ends a window, in seconds, by the probabilities of voice activity: these lag, so that 0.06 is
    /// a pause of some 0.15 s. For models that were trained on long recordings, 0.5 gives longer windows.
    #[serde(default = "min_pause")]
    pub min_pause: f64,
    /// Speech that voice activity hears and no word covers (a word reaches 0.4 s to either side): `off` (it is not looked for),
    /// `measure` (it is reported in the port `recordings`) or `recover` (it is also decoded again, in ways that cost more and more, until
    /// sure words are found). Needs `vad`.
    #[serde(default)]
    pub coverage: CoverageMode,
    /// With `coverage`: words that are probably invented (far from speech, repeated again and again, faster than anybody speaks) stay
    /// and are told (`keep`), or are left out (`drop`).
    #[serde(default)]
    pub suspects: SuspectUse,
    /// Most seconds of audio, padding included, in the model at once; affects only speed and memory.
    #[serde(default = "batch_seconds")]
    pub batch_seconds: f64,
    /// Longest recording in seconds, 12 hours at most; longer ones are rejected.
    #[serde(default = "max_duration")]
    pub max_duration: f64,
    /// The longest pause within a segment, in seconds.
    #[serde(default = "max_gap")]
    pub max_gap: f64,
    /// The longest segment, in seconds.
    #[serde(default = "max_segment")]
    pub max_segment: f64,
    /// Seconds that are subtracted from the times of words: transducers emit words late. 0.08 to 0.16 are usual
    /// (docs/transcription.md).
    #[serde(default)]
    pub delay: f64,
    /// The number type in which the matrices of linear layers are kept in memory. `bf16` and `f16` halve it; all is
    /// computed in 32 bits.
    #[serde(default)]
    pub weights: Weights,
    /// What the factors of products with weights of the encoder's layers and of the joint network are rounded to, on the CPU: `f32`
    /// (not at all), `bf16`, or `int8` (each row and each column with a scale of its own). Weights are then kept in that type.
    /// Other texts than with `f32` may come of it, but always the same ones.
    #[serde(default)]
    pub precision: Precision,
    /// The head that decodes a model with two: `transducer` or `ctc`. Left out: the transducer, or CTC where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoder: Option<HeadKind>,
    /// Hypotheses that beam search keeps, up to 64; 0 or 1 for greedy search. 4 costs some times the time of decoding, which is
    /// a small part of all.
    #[serde(default)]
    pub beam: usize,
    /// An n-gram language model over the model's tokens, in the ARPA format, such as `flow lm build` writes; empty for none.
    #[serde(default)]
    pub lm: PathBuf,
    /// Weight of its scores, from 0 to 100.
    #[serde(default = "lm_weight")]
    pub lm_weight: f64,
    /// A file of phrases to boost, one per line (optionally with its own score after a tab; 1 is usual); empty for
    /// none.
    #[serde(default)]
    pub boost: PathBuf,
    /// Weight of their scores, from 0 to 100.
    #[serde(default = "boost_weight")]
    pub boost_weight: f64,
    /// The languages that are spoken, such as `[fr, en]`; empty where nobody knows. Nothing is written in another script, and tags of
    /// other languages are never chosen, as far as the model's vocabulary has them.
    #[serde(default)]
    pub languages: Vec<String>,
    /// With `languages`: counts of the model's tokens in texts of several languages, such as `flow lm build --languages` writes, by
    /// which tokens of other languages are less probable; empty for none.
    #[serde(default)]
    pub language_prior: PathBuf,
    /// Weight of what follows from the counts, from 0 to 100.
    #[serde(default = "language_weight")]
    pub language_weight: f64,
    /// How numbers are written, with one of `languages` that has a table: as the model does (`keep`), cardinal numbers in digits
    /// (`digits`), or digits in words (`words`).
    #[serde(default)]
    pub numbers: NumberStyle,
    /// With one of `languages` that has a table: fillers such as `uh` stay (`keep`) or are left out (`drop`).
    #[serde(default)]
    pub fillers: FillerUse,
    /// A table of number words and fillers (docs/transcription.md) in place of the bundled one of the language; empty for that. English,
    /// German, Hindi and Spanish are bundled.
    #[serde(default)]
    pub text_table: PathBuf,
    /// Where the model is computed: `cpu`, `cuda` or `cuda:1` (see docs/gpu.md).
    #[serde(default = "cpu")]
    pub device: String,
}

fn chunk() -> f64 {
    10.0
}

fn chunk_left() -> f64 {
    10.0
}

fn chunk_right() -> f64 {
    5.0
}

fn full_attention() -> f64 {
    480.0
}

fn attention_context() -> usize {
    128
}

fn max_window() -> f64 {
    20.0
}

fn min_pause() -> f64 {
    0.06
}

fn batch_seconds() -> f64 {
    60.0
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

fn language_weight() -> f64 {
    WEIGHT
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
            track: 0,
            on_damage: OnDamage::default(),
            model: model.into(),
            window: WindowMethod::default(),
            chunk: chunk(),
            chunk_left: chunk_left(),
            chunk_right: chunk_right(),
            full_attention: full_attention(),
            attention_context: attention_context(),
            vad: VoiceActivity::default(),
            max_window: max_window(),
            min_pause: min_pause(),
            coverage: CoverageMode::default(),
            suspects: SuspectUse::default(),
            batch_seconds: batch_seconds(),
            max_duration: max_duration(),
            max_gap: max_gap(),
            max_segment: max_segment(),
            delay: 0.0,
            weights: Weights::default(),
            precision: Precision::default(),
            decoder: None,
            beam: 0,
            lm: PathBuf::new(),
            lm_weight: lm_weight(),
            boost: PathBuf::new(),
            boost_weight: boost_weight(),
            languages: Vec::new(),
            language_prior: PathBuf::new(),
            language_weight: language_weight(),
            numbers: NumberStyle::default(),
            fillers: FillerUse::default(),
            text_table: PathBuf::new(),
            device: cpu(),
        }
    }

    /// The audio track that is asked for, if one is.
    pub(crate) fn track(&self) -> Option<u32> {
        Some(self.track).filter(|track| *track > 0)
    }

    /// The settings of the recognizer.
    pub fn recognition(&self) -> RecognitionSettings {
        RecognitionSettings {
            long_audio: self.long_audio(),
            voice_activity: self.vad,
            max_window: self.max_window,
            min_pause: self.min_pause,
            batch_seconds: self.batch_seconds,
            segments: SegmentRules {
                max_gap: self.max_gap,
                max_duration: self.max_segment,
            },
            delay: self.delay,
            coverage: self.coverage(),
        }
    }

    /// What is done about speech without words.
    /// Whether phrases are boosted.
    pub(crate) fn boosts(&self) -> bool {
        self.boost_weight != 0.0 && self.decoding().boost.is_some()
    }

    pub(crate) fn coverage(&self) -> CoverageSettings {
        CoverageSettings {
            mode: self.coverage,
            suspects: self.suspects,
        }
    }

    /// The processing mode.
    pub(crate) fn long_audio(&self) -> LongAudio {
        match self.window {
            WindowMethod::Auto | WindowMethod::Vad => LongAudio::Vad,
            WindowMethod::Chunked => LongAudio::Chunked(ChunkSettings {
                left: self.chunk_left,
                chunk: self.chunk,
                right: self.chunk_right,
            }),
            WindowMethod::Full => LongAudio::Full(FullSettings {
                full_attention: self.full_attention,
                attention_context: self.attention_context,
            }),
        }
    }

    /// How the model is decoded.
    pub fn decoding(&self) -> DecodingOptions {
        DecodingOptions::of(self.beam, (&self.lm, self.lm_weight), (&self.boost, self.boost_weight))
            .with_head(self.decoder)
    }

    /// The languages that are spoken.
    pub(crate) fn request(&self) -> DecodingRequest {
        DecodingRequest {
            languages: self.languages.clone(),
            ..DecodingRequest::default()
        }
    }

    /// Whether numbers and fillers are written in another way than the model does.
    pub(crate) fn has_text_style(&self) -> bool {
        (self.numbers, self.fillers) != Default::default()
    }

    /// The file of the user's table, where one is used.
    pub(crate) fn text_table(&self) -> Option<&Path> {
        (self.has_text_style() && !self.text_table.as_os_str().is_empty()).then_some(&*self.text_table)
    }

    /// How numbers and fillers are written.
    pub(crate) fn text_style(&self) -> Result<TextStyle, StageError> {
        if !self.has_text_style() {
            return Ok(TextStyle::default());
        }
        // Of several languages or none a style is refused.
        let tables = match (self.text_table(), &self.languages[..]) {
            (Some(file), [language]) => Tables::with_file_for(file, language),
            _ => Ok(Tables::default()),
        };
        let tables = tables.map_err(|why| StageError::setting("text_table", why))?;
        let request = DecodingRequest {
            numbers: Some(self.numbers),
            fillers: Some(self.fillers),
            ..self.request()
        };
        let style = tables.style(&request, Default::default());
        style.map_err(|(setting, why)| StageError::setting(setting, why))
    }

    /// The file of counts, where there is one and languages are asked for.
    pub(crate) fn language_prior(&self) -> Option<&Path> {
        let is_used = !self.languages.is_empty() && !self.language_prior.as_os_str().is_empty();
        is_used.then_some(&*self.language_prior)
    }

    pub(crate) fn device(&self) -> Result<DeviceChoice, StageError> {
        self.device
            .parse()
            .map_err(|error| StageError::setting("device", error))
    }

    pub(crate) fn check(&self) -> Result<(), StageError> {
        let wrong = |name: &str, value: f64, rule: &str| {
            Err(StageError::setting(
                name,
                format!("`{name}` is {value}; it must be {rule}"),
            ))
        };
        self.recognition()
            .check()
            .or_else(|(name, value, rule)| wrong(name, value, rule))?;
        if !(1.0..=MAX_DURATION).contains(&self.max_duration) {
            return wrong("max_duration", self.max_duration, "from 1 to 43200 seconds");
        }
        if !(0.08..=300.0).contains(&self.chunk) {
            return wrong("chunk", self.chunk, "from 0.08 to 300 seconds");
        }
        for (name, value) in [("chunk_left", self.chunk_left), ("chunk_right", self.chunk_right)] {
            if !(0.0..=300.0).contains(&value) {
                return wrong(name, value, "from 0 to 300 seconds");
            }
        }
        let window = self.chunk_left + self.chunk + self.chunk_right;
        if window > 300.0 {
            let why = "with `chunk_left` and `chunk_right` at most 300 seconds: the encoder hears them at once";
            return wrong("chunk", self.chunk, why);
        }
        if !(0.0..=43_200.0).contains(&self.full_attention) {
            return wrong("full_attention", self.full_attention, "from 0 to 43200 seconds");
        }
        if !(1..=10_000).contains(&self.attention_context) {
            let context = self.attention_context as f64;
            return wrong("attention_context", context, "from 1 to 10000 frames");
        }
        if self.beam > 1 && self.long_audio() != LongAudio::Vad {
            let error = StageError::setting(
                "beam",
                "beam search cannot continue from one part of a recording to the next",
            );
            return Err(error.with_help("use `window: vad`, or `beam: 0`"));
        }
        self.coverage()
            .check(self.long_audio(), self.vad)
            .map_err(|(setting, why, help)| StageError::setting(setting, why).with_help(help))?;
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
        parse_languages(&self.languages.join(",")).map_err(|why| StageError::setting("languages", why))?;
        if self.text_table().is_none() {
            // A file is read when the stage opens.
            self.text_style()?;
        }
        if !(0.0..=100.0).contains(&self.language_weight) {
            return wrong("language_weight", self.language_weight, "from 0 to 100");
        }
        let decoding = self.decoding().check();
        decoding.map_err(|(name, why)| StageError::setting(name, why))?;
        let precision = self.precision.check(self.weights, self.device()?);
        precision.map_err(|why| StageError::setting("precision", why))
    }
}
