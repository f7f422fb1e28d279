//! Settings of `audio.synthesize`.

use std::path::PathBuf;

use flow_kind::StageError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Speaks sentences with espeak-ng, into shards of speech.
///
/// # What it does
///
/// For each language, `<texts>/<lang>.yaml` holds words and forms of sentences. Sentences are drawn from it, spoken by
/// the program espeak-ng (which must be installed), resampled to 16 kHz, augmented with reverberation, noise and
/// silence, and written as FLAC (one channel, 16 bits) into shards that `manifest.scan` and `audio.probe` read:
/// `<out>/<lang>/<shard_id>/{metadata.parquet, audio_index.parquet, <shard_id>.tar}`. The transcription is the
/// sentence, as words without punctuation; `speaker_id` is the voice with its variant, such as `hi+f2`.
///
/// Each shard is a partition: `<lang>/<lang>_train_0000`, ..., and `<lang>/<lang>_val_0000`, ... for validation. In
/// validation alone there are the variants `held_out.voices` and the share `held_out.sentences` of all sentences (told by
/// the words alone, so that it is the same one for every language, seed and corpus). A clip of several sentences (`joined`)
/// has the words of all of them, and as `voice` (and `speaker_id`) each of its voices once, in order, with spaces between;
/// `speed` and `pitch` are those of the first. A shard is as long as
/// `clips_per_shard` clips of 3 seconds, the last one of a language shorter; `hours` is met to within a clip for each shard.
///
/// The same settings and the same version of espeak-ng give the same bytes, whatever the number of workers and wherever
/// `out` is. More `hours` add shards and leave whole ones as they are. Each run checks that the files exist with their
/// sizes; a shard with missing files is made again. A folder `out` with shards of other settings is refused.
///
/// Ports: `files`, one row for each file of a shard (`_row, path, bytes`, the path below `out`); `train` and `val`, one row for
/// each clip: `_row, segment_id, shard_id, text, duration, lang, tar_member_name, tar_path, source, offset, size, audio_hash` as
/// `audio.webdataset` gives them (so that `manifest.write` and `sampling.load` take them), and `voice, speed, pitch`,
/// `noise_ratio` (dB, null without noise) and `room_decay` (s, null without a room).
///
/// Rejects: `no_audio`, `espeak_failed`, `espeak_timeout` (class `fault`) and `duration_too_long` (class `rule`). Another
/// clip takes the place of each; a shard with more faults than clips is an error.
///
/// A file of a language:
///
/// ```yaml
/// voice: hi                        # of espeak-ng: espeak-ng --voices
/// words:
///   number: [एक, दो, तीन]
///   animal: [कुत्ता, बिल्ली]
/// sequences:                       # words in a row, this share of all sentences
///   - {of: [number, animal], length: [2, 4], share: 0.3}
/// templates:                       # the rest, each as often
///   - "{number} {animal} घर में हैं"
/// ```
///
/// # Example
///
/// ```yaml
/// speech:
///   uses: audio.synthesize
///   with: {out: work/speech, hours: 2, languages: [hi=2, en], exclude: [val_manifest_v2.parquet]}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SynthesizeSettings {
    /// Folder that receives `<lang>/<shard_id>/`. It belongs to this stage.
    pub out: PathBuf,
    /// Folder of the languages' files, `<lang>.yaml`.
    #[serde(default = "texts")]
    pub texts: PathBuf,
    /// Languages to speak; empty: every file in `texts`. `hi` has an even share of `hours`, `hi=2` twice as much as
    /// one without a number, `hi=1.5h` has 1.5 hours, whatever `hours` says.
    #[serde(default)]
    pub languages: Vec<String>,
    /// Hours of speech in all, validation included (but for languages with hours of their own).
    pub hours: f64,
    /// How many clips of 3 seconds make a shard, 1 to 5,000.
    #[serde(default = "clips_per_shard")]
    pub clips_per_shard: u32,
    /// Another seed gives other sentences, voices and sounds.
    #[serde(default = "seed")]
    pub seed: u64,
    /// Share of the words of classes, 0 to 1, that are invented: spelled by a Markov chain of order 2 over the characters of
    /// the file's words, and none of these. A model that is trained on them learns to spell what it hears, and not only the
    /// words of the lists.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub invented: f64,
    /// Manifests (parquet, or JSON lines, with a column `text` or `transcription_native`) whose sentences are never
    /// spoken: compared by their words, without language tag, punctuation and case.
    #[serde(default)]
    pub exclude: Vec<PathBuf>,
    /// Voices and sentences that occur in validation only.
    #[serde(default)]
    pub held_out: HeldOut,
    /// Variants of the voices, of `espeak-ng --voices=variant`; each clip has one.
    #[serde(default = "variants")]
    pub variants: Vec<String>,
    /// Words per minute, from and to, 80 to 450.
    #[serde(default = "speed")]
    pub speed: [u32; 2],
    /// espeak-ng's pitch, from and to, 0 to 99.
    #[serde(default = "pitch")]
    pub pitch: [u32; 2],
    /// Level of a clip's loudest sample, from and to, in dB of full scale (at most 0).
    #[serde(default = "gain")]
    pub gain: [f64; 2],
    /// Silence before and after the words, each from and to, in seconds (at most 10).
    #[serde(default = "silence")]
    pub silence: [f64; 2],
    /// Shortest clip in seconds; shorter ones are padded with silence.
    #[serde(default = "min_duration")]
    pub min_duration: f64,
    /// Longest clip in seconds; longer ones are rejected.
    #[serde(default = "max_duration")]
    pub max_duration: f64,
    /// Noise that is added to clips.
    #[serde(default)]
    pub noise: NoiseSettings,
    /// Reverberation of clips.
    #[serde(default)]
    pub room: RoomSettings,
    /// Clips of several sentences with pauses between them, as recordings of conversations and lectures are.
    #[serde(default)]
    pub joined: JoinedSettings,
    /// The program: a name to be looked for in `PATH`, or a path.
    #[serde(default = "program")]
    pub program: PathBuf,
    /// Seconds that espeak-ng may take for one clip; it is tried once more before the clip is refused.
    #[serde(default = "time_limit")]
    pub time_limit: f64,
}

/// Voices and sentences that occur in validation only.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HeldOut {
    /// Some of `variants`, used for validation only. Empty: both use all.
    pub voices: Vec<String>,
    /// Percent of all sentences that are used for validation only. 0: both use all.
    pub sentences: f64,
    /// Percent of each language's hours that are for validation; 0 for none.
    pub hours: f64,
}

/// Noise that is added to clips.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NoiseSettings {
    /// Share of the clips that have noise, 0 to 1.
    pub share: f64,
    /// Signal-to-noise ratio in dB, from and to: power of the words to that of the noise.
    pub ratio: [f64; 2],
    /// Colour, from and to: 0 is white, 1 pink, between them a mixture.
    pub colour: [f64; 2],
}

/// Reverberation of clips: synthetic impulse responses of sparse random reflections that decay.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RoomSettings {
    /// Share of the clips with reverberation, 0 to 1.
    pub share: f64,
    /// Time until the reverberation has lost 60 dB, from and to, in seconds (at most 5).
    pub decay: [f64; 2],
    /// Energy of the reverberation to that of the direct sound, from and to, in dB.
    pub level: [f64; 2],
}

/// Clips of several sentences with pauses between them.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct JoinedSettings {
    /// Share of the clips that are of several sentences, 0 to 1.
    pub share: f64,
    /// Sentences are added until a clip has this many seconds, from and to; one that would make it longer than
    /// `max_duration` is left out, and ends it.
    pub seconds: [f64; 2],
    /// Pause before each further sentence, from and to, in seconds (at most 10).
    pub pause: [f64; 2],
    /// Share of the pauses of at least 0.3 seconds that hold a tone, 0 to 1.
    pub tones: f64,
    /// Share of the further sentences that another voice speaks, 0 to 1.
    pub voices: f64,
    /// Share of the further sentences that are of another of the languages to be spoken, 0 to 1. Such a clip still
    /// counts as one of its shard's language.
    pub languages: f64,
    /// Power of each further sentence to that of the first one, from and to, in dB (-40 to 40).
    pub level: [f64; 2],
}

impl Default for JoinedSettings {
    fn default() -> Self {
        JoinedSettings {
            share: 0.0,
            seconds: [5.0, 20.0],
            pause: [0.2, 1.2],
            tones: 0.1,
            voices: 0.5,
            languages: 0.3,
            level: [-6.0, 6.0],
        }
    }
}

impl Default for HeldOut {
    fn default() -> Self {
        HeldOut {
            voices: Vec::new(),
            sentences: 10.0,
            hours: 5.0,
        }
    }
}

impl Default for NoiseSettings {
    fn default() -> Self {
        NoiseSettings {
            share: 0.5,
            ratio: [15.0, 45.0],
            colour: [0.0, 1.0],
        }
    }
}

impl Default for RoomSettings {
    fn default() -> Self {
        RoomSettings {
            share: 0.25,
            decay: [0.1, 0.5],
            level: [-20.0, -8.0],
        }
    }
}

// Without invented words the settings are those of before there were any: the same clips, and the same state.
fn is_zero(share: &f64) -> bool {
    *share == 0.0
}

fn texts() -> PathBuf {
    "configs/speech".into()
}

fn clips_per_shard() -> u32 {
    400
}

fn seed() -> u64 {
    1
}

fn variants() -> Vec<String> {
    let names = [
        "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8", "f1", "f2", "f3", "f4", "f5", "klatt", "klatt2", "klatt3",
        "klatt4",
    ];
    names.map(str::to_owned).to_vec()
}

fn speed() -> [u32; 2] {
    [140, 230]
}

fn pitch() -> [u32; 2] {
    [25, 75]
}

fn gain() -> [f64; 2] {
    [-30.0, -6.0]
}

fn silence() -> [f64; 2] {
    [0.02, 0.3]
}

fn min_duration() -> f64 {
    1.0
}

fn max_duration() -> f64 {
    20.0
}

fn program() -> PathBuf {
    "espeak-ng".into()
}

fn time_limit() -> f64 {
    20.0
}

/// Sorted, each once: their order in a pipeline does not matter.
fn in_order(names: &[String]) -> Vec<String> {
    let mut names = names.to_vec();
    names.sort_unstable();
    names.dedup();
    names
}

impl SynthesizeSettings {
    /// With lists in one order, so that equal settings draw equal clips.
    pub(super) fn in_order(&self) -> Self {
        let mut settings = self.clone();
        settings.variants = in_order(&self.variants);
        settings.held_out.voices = in_order(&self.held_out.voices);
        settings
    }

    /// Variants for training, and for validation.
    pub(super) fn variants_of_sides(&self) -> [Vec<String>; 2] {
        let held_out = &self.held_out.voices;
        let (mut train, mut val) = (in_order(&self.variants), in_order(held_out));
        train.retain(|variant| !held_out.contains(variant));
        if val.is_empty() {
            val = train.clone();
        }
        [train, val]
    }

    pub(super) fn check(&self) -> Result<(), StageError> {
        let within = |path: &str, [from, to]: [f64; 2], low: f64, high: f64| {
            // Not NaN either.
            if low <= from && from <= to && to <= high {
                return Ok(());
            }
            let message = format!("`{path}` is [{from}, {to}], not a range from and to within {low} to {high}");
            Err(StageError::setting(path, message))
        };
        let one = |path: &str, value: f64, low: f64, high: f64| {
            if low <= value && value <= high {
                return Ok(());
            }
            Err(StageError::setting(
                path,
                format!("`{path}` is {value}, not within {low} to {high}"),
            ))
        };
        if self.out.as_os_str().is_empty() {
            return Err(StageError::setting("out", "`out` is empty").with_help("name a folder for the shards"));
        }
        one("hours", self.hours, 0.0, 1e6)?;
        one("clips_per_shard", f64::from(self.clips_per_shard), 1.0, 5_000.0)?;
        within("speed", self.speed.map(f64::from), 80.0, 450.0)?;
        within("pitch", self.pitch.map(f64::from), 0.0, 99.0)?;
        within("gain", self.gain, -90.0, 0.0)?;
        within("silence", self.silence, 0.0, 10.0)?;
        one("min_duration", self.min_duration, 0.0, 3_600.0)?;
        one("max_duration", self.max_duration, 0.1, 3_600.0)?;
        if self.min_duration > self.max_duration {
            let message = "`min_duration` is more than `max_duration`, so that every clip would be refused";
            return Err(StageError::setting("min_duration", message));
        }
        one("invented", self.invented, 0.0, 1.0)?;
        one("noise.share", self.noise.share, 0.0, 1.0)?;
        within("noise.ratio", self.noise.ratio, -20.0, 100.0)?;
        within("noise.colour", self.noise.colour, 0.0, 1.0)?;
        one("room.share", self.room.share, 0.0, 1.0)?;
        within("room.decay", self.room.decay, 0.01, 5.0)?;
        within("room.level", self.room.level, -60.0, 20.0)?;
        one("joined.share", self.joined.share, 0.0, 1.0)?;
        within("joined.seconds", self.joined.seconds, 0.0, 3_600.0)?;
        within("joined.pause", self.joined.pause, 0.0, 10.0)?;
        one("joined.tones", self.joined.tones, 0.0, 1.0)?;
        one("joined.voices", self.joined.voices, 0.0, 1.0)?;
        one("joined.languages", self.joined.languages, 0.0, 1.0)?;
        within("joined.level", self.joined.level, -40.0, 40.0)?;
        if self.joined.share > 0.0 && self.joined.seconds[0] > self.max_duration {
            let message =
                "`joined.seconds` begins above `max_duration`, so that no clip could be as long as it asks for";
            return Err(StageError::setting("joined.seconds", message));
        }
        one("time_limit", self.time_limit, 0.1, 3_600.0)?;
        one("held_out.sentences", self.held_out.sentences, 0.0, 90.0)?;
        one("held_out.hours", self.held_out.hours, 0.0, 90.0)?;
        for (path, names) in [("variants", &self.variants), ("held_out.voices", &self.held_out.voices)] {
            for (number, name) in names.iter().enumerate() {
                // Anything else, such as `-f/etc/passwd`, is not a name.
                let first = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
                if !first
                    || !name
                        .bytes()
                        .all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
                {
                    let message = format!("{name:?} is not a name of a variant such as `f2`");
                    return Err(StageError::setting(format!("{path}[{number}]"), message));
                }
            }
        }
        for (number, name) in self.held_out.voices.iter().enumerate() {
            if !self.variants.contains(name) {
                let message = format!("`{name}` is held out, but is none of `variants`");
                let help = format!("add it to `variants`, which are {}", self.variants.join(", "));
                return Err(StageError::setting(format!("held_out.voices[{number}]"), message).with_help(help));
            }
        }
        if self.held_out.hours > 0.0 && self.held_out.voices.is_empty() && self.held_out.sentences == 0.0 {
            let message = "there are hours for validation, but neither voices nor sentences are held out for it";
            return Err(StageError::setting("held_out", message)
                .with_help("name voices or a percentage of sentences, or set `hours: 0`"));
        }
        if self.variants_of_sides()[0].is_empty() {
            let message = "no variant is left for training";
            return Err(StageError::setting("variants", message).with_help("name some that are not held out"));
        }
        Ok(())
    }
}
