//! OpenAI's events of transcription sessions, as far as they are known here. Sessions are described in two ways, the older of which
//! (`input_audio_format`, `transcription_session.update`) is still in use; both are taken, and answered in kind.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use flow_audio::wire_audio::{AudioFormat, PCM_RATES};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use serde_path_to_error::Segment;

use super::settings::ServerVad;
use crate::options::Options;

/// Many programs leave the padding out.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// What a client may ask for beyond OpenAI's events: what may come next, the words with times and confidences, and who says them.
pub const PARTIALS: &str = "item.input_audio_transcription.partials";
pub const WORDS: &str = "item.input_audio_transcription.words";
pub const SPEAKERS: &str = "item.input_audio_transcription.speakers";
/// OpenAI's: the tokens of words, with their log probabilities.
pub const LOGPROBS: &str = "item.input_audio_transcription.logprobs";
/// The rate of `pcm16` and of `audio/pcm` that names none.
const DEFAULT_RATE: u32 = 24_000;

/// Why an event of a client is not followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    pub code: &'static str,
    pub message: String,
    /// The part of the event that is wrong.
    pub param: Option<String>,
}

impl Refused {
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Refused {
            code,
            message: message.into(),
            param: None,
        }
    }

    pub fn value(param: &str, message: impl Into<String>) -> Self {
        Refused {
            param: Some(param.to_owned()),
            ..Refused::new("invalid_value", message)
        }
    }
}

/// The models that clients may name.
#[derive(Clone, Debug, Default)]
pub struct KnownModels {
    /// The first one is the default one.
    pub names: Vec<String>,
    /// Whether any other name represents the default one.
    pub accept_any: bool,
}

/// What a client says.
#[derive(Clone, Debug)]
pub enum ClientEvent {
    /// `older`: by `transcription_session.update`. `ignored`: fields of OpenAI's that have no effect here.
    Update {
        update: Box<SessionUpdate>,
        older: bool,
        ignored: Vec<String>,
    },
    /// Bytes of audio.
    Append(Vec<u8>),
    Commit,
    Clear,
}

impl ClientEvent {
    /// Reads an event, and the id that the client gave it.
    pub fn parse(text: &str) -> (Option<String>, Result<ClientEvent, Refused>) {
        let event: Value = match serde_json::from_str(text) {
            Ok(event) => event,
            Err(error) => {
                let refused = Refused::new("invalid_json", format!("the message is not JSON: {error}"));
                return (None, Err(refused));
            }
        };
        // It is sent back with errors.
        let id = event["event_id"]
            .as_str()
            .filter(|id| id.len() <= 512)
            .map(str::to_owned);
        (id, ClientEvent::of(event))
    }

    fn of(mut event: Value) -> Result<ClientEvent, Refused> {
        let kind = match &event["type"] {
            Value::String(kind) => kind.clone(),
            _ => {
                let refused = Refused::new("missing_required_parameter", "the event has no `type`");
                return Err(Refused {
                    param: Some("type".into()),
                    ..refused
                });
            }
        };
        let own: &[&str] = match &kind[..] {
            "session.update" | "transcription_session.update" => &["session"],
            "input_audio_buffer.append" => &["audio"],
            _ => &[],
        };
        let known = |name: &str| ["type", "event_id"].contains(&name) || own.contains(&name);
        let unknown = event
            .as_object()
            .and_then(|event| event.keys().find(|name| !known(name.as_str())));
        if let Some(name) = unknown.filter(|_| KINDS.contains(&&kind[..])) {
            return Err(unknown_field(name, &[&["type", "event_id"][..], own].concat()));
        }
        match &kind[..] {
            "session.update" | "transcription_session.update" => {
                let session = event["session"].take();
                let update: Result<SessionUpdate, _> = serde_path_to_error::deserialize(&session);
                let update = update.map_err(|error| wrong_type(&session, &error))?;
                Ok(ClientEvent::Update {
                    update: Box::new(update),
                    older: kind == "transcription_session.update",
                    ignored: ignored(&session)?,
                })
            }
            "input_audio_buffer.append" => {
                let Value::String(audio) = &event["audio"] else {
                    return Err(Refused::value("audio", "`audio` must be a text in base64"));
                };
                let bytes = BASE64.decode(audio);
                let bytes =
                    bytes.map_err(|error| Refused::value("audio", format!("`audio` is not base64: {error}")))?;
                Ok(ClientEvent::Append(bytes))
            }
            "input_audio_buffer.commit" => Ok(ClientEvent::Commit),
            "input_audio_buffer.clear" => Ok(ClientEvent::Clear),
            _ => {
                let shown: String = kind.chars().take(100).collect();
                let message = format!("no event `{shown}` is known here; known are {}", KINDS.join(", "));
                Err(Refused {
                    param: Some("type".into()),
                    ..Refused::new("unknown_event", message)
                })
            }
        }
    }
}

/// The events of clients.
const KINDS: [&str; 5] = [
    "session.update",
    "transcription_session.update",
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "input_audio_buffer.clear",
];

/// An object in the description of a session: what it may have.
struct Fields {
    /// A JSON pointer.
    place: &'static str,
    known: &'static [&'static str],
    /// OpenAI's without effect here.
    ignored: &'static [&'static str],
}

const TRANSCRIPTION_FIELDS: &[&str] = &[
    "model",
    "latency_ms",
    "language",
    "languages",
    "prompt",
    "phrases",
    "boost_weight",
    "numbers",
    "fillers",
    "num_speakers",
    "min_speakers",
    "max_speakers",
    "known_speaker_names",
    "known_speaker_references",
];
const TURN_FIELDS: &[&str] = &["type", "threshold", "prefix_padding_ms", "silence_duration_ms"];
const IGNORED_TURN_FIELDS: &[&str] = &["create_response", "interrupt_response", "idle_timeout_ms", "eagerness"];

const SESSION: [Fields; 8] = [
    Fields {
        place: "",
        known: &[
            "type",
            "audio",
            "include",
            "input_audio_format",
            "input_audio_transcription",
            "turn_detection",
            // What is said of a session may be said by a client.
            "id",
            "object",
            "expires_at",
        ],
        ignored: &["input_audio_noise_reduction", "modalities", "client_secret"],
    },
    Fields {
        place: "/audio",
        known: &["input"],
        ignored: &[],
    },
    Fields {
        place: "/audio/input",
        known: &["format", "transcription", "turn_detection"],
        ignored: &["noise_reduction"],
    },
    Fields {
        place: "/audio/input/format",
        known: &["type", "rate"],
        ignored: &[],
    },
    Fields {
        place: "/audio/input/transcription",
        known: TRANSCRIPTION_FIELDS,
        ignored: &[],
    },
    Fields {
        place: "/audio/input/turn_detection",
        known: TURN_FIELDS,
        ignored: IGNORED_TURN_FIELDS,
    },
    Fields {
        place: "/input_audio_transcription",
        known: TRANSCRIPTION_FIELDS,
        ignored: &[],
    },
    Fields {
        place: "/turn_detection",
        known: TURN_FIELDS,
        ignored: IGNORED_TURN_FIELDS,
    },
];

/// The fields of a session that have no effect here.
///
/// # Errors
/// The first field that is not known.
fn ignored(session: &Value) -> Result<Vec<String>, Refused> {
    let mut found = Vec::new();
    for Fields { place, known, ignored } in &SESSION {
        let object = session.pointer(place).and_then(Value::as_object);
        for (name, value) in object.into_iter().flatten() {
            let path = format!("session{}.{name}", place.replace('/', "."));
            if ignored.contains(&&name[..]) {
                if !value.is_null() {
                    found.push(path);
                }
            } else if !known.contains(&&name[..]) {
                return Err(unknown_field(&path, known));
            }
        }
    }
    Ok(found)
}

/// A field that is not known, by OpenAI's code.
fn unknown_field(path: &str, known: &[&str]) -> Refused {
    let path: String = path.chars().take(200).collect();
    let message = format!("there is no `{path}`; known here are {}", known.join(", "));
    Refused {
        param: Some(path),
        ..Refused::new("unknown_parameter", message)
    }
}

/// A value of another type than its field has.
fn wrong_type(session: &Value, error: &serde_path_to_error::Error<serde_json::Error>) -> Refused {
    let (mut param, mut found) = ("session".to_owned(), Some(session));
    for segment in error.path().iter() {
        match segment {
            Segment::Map { key } => {
                found = found.and_then(|found| found.get(key));
                param = format!("{param}.{key}");
            }
            Segment::Seq { .. } | Segment::Enum { .. } | Segment::Unknown => break,
        }
    }
    let name = param.rsplit('.').next().unwrap_or_default();
    let wanted = match name {
        "include" => "a list of texts".to_owned(),
        "type" | "model" | "input_audio_format" => "a text".to_owned(),
        _ => match range_of(name) {
            Some(range) => number_in(range),
            None => "an object".to_owned(),
        },
    };
    let found = found.map_or_else(String::new, Value::to_string);
    wrong_value(&param, &found, &wanted)
}

/// A value that a field cannot have, and what it may have.
fn wrong_value(param: &str, found: &str, wanted: &str) -> Refused {
    let found: String = found.chars().take(60).collect();
    Refused::value(param, format!("`{param}` is {found}; it must be {wanted}"))
}

/// The least and the most of a number.
fn range_of(name: &str) -> Option<(f64, f64)> {
    match name {
        "latency_ms" => Some((10.0, 60_000.0)),
        "threshold" => Some((0.0, 1.0)),
        "prefix_padding_ms" => Some((0.0, 5_000.0)),
        "silence_duration_ms" => Some((0.0, 10_000.0)),
        _ => None,
    }
}

/// A number of a field, where it is in the field's range.
fn in_range(place: &str, name: &str, value: f64) -> Result<f64, Refused> {
    match range_of(name) {
        Some(range @ (least, most)) if !(least..=most).contains(&value) => {
            let param = format!("{place}.{name}");
            Err(wrong_value(&param, &value.to_string(), &number_in(range)))
        }
        _ => Ok(value),
    }
}

fn number_in((least, most): (f64, f64)) -> String {
    format!("a number from {least} to {most}")
}

/// What a client wants changed of its session, in either form.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct SessionUpdate {
    #[serde(rename = "type")]
    kind: Option<String>,
    audio: Option<AudioUpdate>,
    input_audio_format: Option<String>,
    input_audio_transcription: Option<TranscriptionUpdate>,
    #[serde(default, deserialize_with = "given")]
    turn_detection: Option<Option<TurnDetection>>,
    include: Option<Vec<String>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct AudioUpdate {
    input: Option<InputUpdate>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct InputUpdate {
    format: Option<FormatUpdate>,
    transcription: Option<TranscriptionUpdate>,
    #[serde(default, deserialize_with = "given")]
    turn_detection: Option<Option<TurnDetection>>,
}

#[derive(Clone, Debug, Deserialize)]
struct FormatUpdate {
    #[serde(rename = "type")]
    kind: Option<String>,
    /// A number that may be none of the rates.
    rate: Option<Value>,
}

#[derive(Clone, Debug, Deserialize)]
struct TranscriptionUpdate {
    model: Option<String>,
    /// Ours: the delay of words that is accepted with a cache-aware model.
    latency_ms: Option<f64>,
    /// Options.
    #[serde(flatten)]
    options: Map<String, Value>,
}

#[derive(Clone, Debug, Deserialize)]
struct TurnDetection {
    #[serde(rename = "type")]
    kind: Option<String>,
    threshold: Option<f64>,
    prefix_padding_ms: Option<f64>,
    silence_duration_ms: Option<f64>,
}

/// Tells `null` from what is not there.
fn given<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// What holds in a session.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionConfig {
    /// None: the default one.
    pub model: Option<String>,
    pub format: AudioFormat,
    /// None: the client commits.
    pub turn_detection: Option<ServerVad>,
    /// In seconds; none: that of the settings.
    pub latency: Option<f64>,
    pub partials: bool,
    pub words: bool,
    pub speakers: bool,
    pub logprobs: bool,
    /// Phrases, languages and speakers.
    pub options: Options,
    /// The fields that these were read from.
    given: Map<String, Value>,
}

impl Default for SessionConfig {
    fn default() -> Self {
        SessionConfig {
            model: None,
            format: AudioFormat::Pcm { rate: DEFAULT_RATE },
            turn_detection: Some(ServerVad::default()),
            latency: None,
            partials: false,
            words: false,
            speakers: false,
            logprobs: false,
            options: Options::default(),
            given: Map::new(),
        }
    }
}

impl SessionConfig {
    /// What holds after an update, where these models are known.
    ///
    /// # Errors
    /// The value that cannot be.
    pub fn updated(&self, update: SessionUpdate, models: &KnownModels) -> Result<SessionConfig, Refused> {
        let mut config = self.clone();
        if let Some(kind) = update.kind.filter(|kind| kind != "transcription") {
            let message = format!("sessions of type `{kind}` are not known here: `transcription` is");
            return Err(Refused::value("session.type", message));
        }
        if let Some(format) = update.input_audio_format {
            config.format = format_of_name(&format)?;
        }
        if let Some(transcription) = update.input_audio_transcription {
            config.set_transcription(transcription, models, "session.input_audio_transcription")?;
        }
        if let Some(turn_detection) = update.turn_detection {
            config.set_turn_detection(turn_detection, "session.turn_detection")?;
        }
        let input = update.audio.and_then(|audio| audio.input).unwrap_or_default();
        if let Some(format) = input.format {
            config.format = format_of_type(&format)?;
        }
        if let Some(transcription) = input.transcription {
            config.set_transcription(transcription, models, "session.audio.input.transcription")?;
        }
        if let Some(turn_detection) = input.turn_detection {
            config.set_turn_detection(turn_detection, "session.audio.input.turn_detection")?;
        }
        if let Some(include) = update.include {
            let unknown = |name: &&String| ![PARTIALS, WORDS, SPEAKERS, LOGPROBS].contains(&&name[..]);
            if let Some(unknown) = include.iter().find(unknown) {
                let message = format!("`{unknown}` is not known; {PARTIALS}, {WORDS}, {SPEAKERS} and {LOGPROBS} are");
                return Err(Refused::value("session.include", message));
            }
            let includes = |name: &str| include.iter().any(|included| included == name);
            (config.partials, config.words) = (includes(PARTIALS), includes(WORDS));
            (config.speakers, config.logprobs) = (includes(SPEAKERS), includes(LOGPROBS));
        }
        if let Some(field) = config.options.of_speakers().filter(|_| !config.speakers) {
            let message = format!("`{}` needs {SPEAKERS}", field.trim_end_matches("[]"));
            return Err(Refused::value("session.include", message));
        }
        Ok(config)
    }

    fn set_latency(&mut self, milliseconds: Option<f64>, param: &str) -> Result<(), Refused> {
        let Some(milliseconds) = milliseconds else {
            return Ok(());
        };
        self.latency = Some(in_range(param, "latency_ms", milliseconds)? / 1000.0);
        Ok(())
    }

    /// Another model, and options: those that are given replace those before, `null` removes them.
    fn set_transcription(
        &mut self,
        update: TranscriptionUpdate,
        models: &KnownModels,
        param: &str,
    ) -> Result<(), Refused> {
        self.set_latency(update.latency_ms, param)?;
        self.set_model(update.model, models, &format!("{param}.model"))?;
        let known = update.options.into_iter();
        for (name, value) in known.filter(|(name, _)| !name.ends_with("[]") && Options::field(name).is_some()) {
            match value {
                Value::Null => self.given.remove(&name),
                value => self.given.insert(name, value),
            };
        }
        let mut options = Options::default();
        let mut given = self
            .given
            .iter()
            .filter_map(|(name, value)| Some((Options::field(name)?, value)));
        let read = given.try_for_each(|(field, value)| options.set_json(field, value));
        read.and_then(|()| options.check()).map_err(|wrong| Refused {
            code: wrong.code,
            ..Refused::value(&format!("{param}.{}", wrong.json_name()), wrong.message)
        })?;
        if options.clusters.number.is_some() || options.clusters.least.is_some() {
            let message = "nobody knows how many will speak: a session has `max_speakers` alone";
            return Err(Refused::value(&format!("{param}.num_speakers"), message));
        }
        self.options = options;
        Ok(())
    }

    /// Another model, if one is named.
    ///
    /// # Errors
    /// If it is none of those that are known.
    pub fn set_model(&mut self, model: Option<String>, models: &KnownModels, param: &str) -> Result<(), Refused> {
        let Some(model) = model else { return Ok(()) };
        if !models.names.contains(&model) {
            if models.accept_any {
                self.model = None;
                return Ok(());
            }
            let shown: String = model.chars().take(200).collect();
            let message = format!("there is no model `{shown}`; there are: {}", models.names.join(", "));
            return Err(Refused {
                code: "model_not_found",
                ..Refused::value(param, message)
            });
        }
        self.model = Some(model);
        Ok(())
    }

    fn set_turn_detection(&mut self, update: Option<TurnDetection>, param: &str) -> Result<(), Refused> {
        let Some(update) = update else {
            self.turn_detection = None;
            return Ok(());
        };
        if let Some(kind) = update.kind.filter(|kind| kind != "server_vad") {
            let message =
                format!("`{kind}` is not known; `server_vad` is, and null: turns end where they are committed");
            return Err(Refused::value(&format!("{param}.type"), message));
        }
        let mut rules = self.turn_detection.unwrap_or_default();
        for (name, value, place) in [
            ("threshold", update.threshold, &mut rules.threshold),
            (
                "prefix_padding_ms",
                update.prefix_padding_ms,
                &mut rules.prefix_padding_ms,
            ),
            (
                "silence_duration_ms",
                update.silence_duration_ms,
                &mut rules.silence_duration_ms,
            ),
        ] {
            if let Some(value) = value {
                *place = in_range(param, name, value)?;
            }
        }
        self.turn_detection = Some(rules);
        Ok(())
    }

    /// The session as clients are told of it: `older` as `transcription_session`. `default_model` stands where none was named;
    /// `expires_at` is in seconds since 1970.
    pub fn to_json(&self, id: &str, default_model: &str, expires_at: i64, older: bool) -> Value {
        let turn_detection = self.turn_detection.map_or(Value::Null, |rules| {
            json!({
                "type": "server_vad",
                "threshold": rules.threshold,
                "prefix_padding_ms": rules.prefix_padding_ms.round() as u64,
                "silence_duration_ms": rules.silence_duration_ms.round() as u64,
            })
        });
        let mut transcription = json!({"model": self.model.as_deref().unwrap_or(default_model)});
        // Recordings of voices are not sent back.
        for (name, value) in self.given.iter().filter(|(name, _)| !name.starts_with("known_")) {
            transcription[name] = value.clone();
        }
        let include = [
            (self.partials, PARTIALS),
            (self.words, WORDS),
            (self.speakers, SPEAKERS),
            (self.logprobs, LOGPROBS),
        ];
        let include: Vec<&str> = include
            .into_iter()
            .filter_map(|(is_on, name)| is_on.then_some(name))
            .collect();
        let mut session = json!({
            "id": id, "object": "realtime.transcription_session", "expires_at": expires_at, "include": include,
        });
        if older {
            session["input_audio_format"] = match self.format {
                AudioFormat::Pcm { .. } => "pcm16".into(),
                AudioFormat::Ulaw => "g711_ulaw".into(),
                AudioFormat::Alaw => "g711_alaw".into(),
            };
            session["input_audio_transcription"] = transcription;
            session["turn_detection"] = turn_detection;
        } else {
            let format = match self.format {
                AudioFormat::Pcm { rate } => json!({"type": "audio/pcm", "rate": rate}),
                AudioFormat::Ulaw => json!({"type": "audio/pcmu"}),
                AudioFormat::Alaw => json!({"type": "audio/pcma"}),
            };
            session["type"] = "transcription".into();
            session["audio"] = json!({"input": {
                "format": format,
                "transcription": transcription,
                "turn_detection": turn_detection,
            }});
        }
        session
    }
}

fn format_of_name(name: &str) -> Result<AudioFormat, Refused> {
    match name {
        "pcm16" => Ok(AudioFormat::Pcm { rate: DEFAULT_RATE }),
        "g711_ulaw" => Ok(AudioFormat::Ulaw),
        "g711_alaw" => Ok(AudioFormat::Alaw),
        _ => Err(Refused::value(
            "session.input_audio_format",
            format!("`{name}` is not known; pcm16, g711_ulaw and g711_alaw are"),
        )),
    }
}

fn format_of_type(format: &FormatUpdate) -> Result<AudioFormat, Refused> {
    let of_rate = |rates: &[u32], usual: u32| {
        let Some(rate) = &format.rate else { return Ok(usual) };
        let known = rates.iter().find(|known| rate.as_u64() == Some(u64::from(**known)));
        known.copied().ok_or_else(|| {
            let rates: Vec<String> = rates.iter().map(u32::to_string).collect();
            let wanted = format!("one of {}", rates.join(", "));
            wrong_value("session.audio.input.format.rate", &rate.to_string(), &wanted)
        })
    };
    match format.kind.as_deref().unwrap_or("audio/pcm") {
        "audio/pcm" => of_rate(&PCM_RATES, DEFAULT_RATE).map(|rate| AudioFormat::Pcm { rate }),
        "audio/pcmu" => of_rate(&[8_000], 8_000).map(|_| AudioFormat::Ulaw),
        "audio/pcma" => of_rate(&[8_000], 8_000).map(|_| AudioFormat::Alaw),
        other => Err(Refused::value(
            "session.audio.input.format.type",
            format!("`{other}` is not known; audio/pcm, audio/pcmu and audio/pcma are"),
        )),
    }
}

#[cfg(test)]
#[path = "protocol_tests.rs"]
mod tests;
