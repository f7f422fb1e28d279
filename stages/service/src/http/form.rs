//! The form of a transcription: its fields, their values, and which of them have an effect here.

use std::sync::Arc;

use axum::body::Bytes;
use flow_speakers::clustering::Clusters;
use flow_transcription::decoding_request::DecodingRequest;
use futures::Stream;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tempfile::TempPath;

use super::body::BodyError;
use super::error::ApiError;
use super::multipart::{Multipart, MultipartError, Part};
use super::upload::{Upload, Uploads};
use crate::engine::{SpeakerRequest, TranscriptionRequest};
use crate::options::{Options, WrongOption, shown};

/// Most bytes of a field that is not a file.
const MAX_VALUE: usize = 16 << 10;

/// Most names in the header that lists ignored fields.
const MAX_IGNORED: usize = 16;

/// The format of the response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResponseFormat {
    #[default]
    Json,
    Text,
    Srt,
    VerboseJson,
    Vtt,
    DiarizedJson,
}

impl ResponseFormat {
    pub const ALL: [Self; 6] = [
        Self::Json,
        Self::Text,
        Self::Srt,
        Self::VerboseJson,
        Self::Vtt,
        Self::DiarizedJson,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Text => "text",
            Self::Srt => "srt",
            Self::VerboseJson => "verbose_json",
            Self::Vtt => "vtt",
            Self::DiarizedJson => "diarized_json",
        }
    }

    /// Whether the transcript may be sent as events.
    pub fn streams(self) -> bool {
        matches!(self, Self::Json | Self::Text | Self::DiarizedJson)
    }
}

/// Values of `timestamp_granularities[]`.
pub const GRANULARITIES: [&str; 2] = ["word", "segment"];

/// The types of values, as in JSON Schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldType {
    File,
    String,
    Number,
    Boolean,
    /// From 0 to 100.
    Weight,
    /// One of these.
    Choice(&'static [&'static str]),
    /// Several of these, each in a field of its own.
    Choices(&'static [&'static str]),
    /// From 1 to [`crate::options::MAX_SPEAKERS`].
    Count,
    /// Several, each in a field of its own.
    Strings,
    /// JSON, or one of these.
    Object(&'static [&'static str]),
}

/// A field of the form.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    pub name: &'static str,
    pub kind: FieldType,
    pub doc: &'static str,
}

impl Field {
    pub const fn new(name: &'static str, kind: FieldType, doc: &'static str) -> Field {
        Field { name, kind, doc }
    }
}

/// Values of `channels`.
const CHANNELS: &[&str] = &["mix", "split"];

const FORMATS: &[&str] = &["json", "text", "srt", "verbose_json", "vtt", "diarized_json"];

/// The recording, in every form.
pub const FILE: Field = Field::new(
    "file",
    FieldType::File,
    "the recording, in any of the formats that `flow transcribe` reads",
);

/// The model, in every form.
pub const MODEL: Field = Field::new(
    "model",
    FieldType::String,
    "one of `/v1/models`; the first one if not given",
);

/// All fields of a transcription.
pub const FIELDS: &[Field] = &[
    FILE,
    MODEL,
    Field::new(
        "response_format",
        FieldType::Choice(FORMATS),
        "the form of the transcript; `json` if not given",
    ),
    Field::new(
        "timestamp_granularities[]",
        FieldType::Choices(&GRANULARITIES),
        "what `verbose_json` holds; `segment` if not given",
    ),
    Field::new(
        "stream",
        FieldType::Boolean,
        "send text as it is decoded, as server-sent events (with `json`, `text` and `diarized_json`)",
    ),
    Field::new(
        "diarize",
        FieldType::Boolean,
        "say who speaks, in every format (an addition to OpenAI's fields); `diarized_json` always does",
    ),
    Field::new(
        "num_speakers",
        FieldType::Count,
        "with speakers: their number (an addition to OpenAI's fields)",
    ),
    Field::new(
        "min_speakers",
        FieldType::Count,
        "with speakers: their number at least (an addition to OpenAI's fields)",
    ),
    Field::new(
        "max_speakers",
        FieldType::Count,
        "with speakers: their number at most (an addition to OpenAI's fields)",
    ),
    Field::new(
        "known_speaker_names[]",
        FieldType::Strings,
        "with speakers: names of up to four of them, instead of those that the server knows",
    ),
    Field::new(
        "known_speaker_references[]",
        FieldType::Strings,
        "a recording of each of these names in the same order, as a data URL in base64",
    ),
    Field::new(
        "channels",
        FieldType::Choice(CHANNELS),
        "`split`: channels are transcribed apart, into one transcript in the order of time whose speakers are `CHANNEL_1`, \
              `CHANNEL_2` and so on; `mix` if not given (an addition to OpenAI's fields)",
    ),
    Field::new(
        "temperature",
        FieldType::Number,
        "from 0 to 1; has no effect, as decoding is greedy",
    ),
    Field::new(
        "language",
        FieldType::String,
        "the language that is spoken, such as `fr`; several are separated by commas. Nothing is written in another script, and \
              pieces of other languages are less probable",
    ),
    Field::new(
        "languages[]",
        FieldType::Strings,
        "the languages that are spoken, each in a field of its own (an addition to OpenAI's fields)",
    ),
    Field::new(
        "prompt",
        FieldType::String,
        "names and terms, separated by commas, line breaks or full stops, which are more probable; sentences have no effect",
    ),
    Field::new(
        "phrases[]",
        FieldType::Strings,
        "a name or term that is more probable (an addition to OpenAI's fields)",
    ),
    Field::new(
        "boost_weight",
        FieldType::Weight,
        "how much more probable names and terms are; 1 if not given (an addition to OpenAI's fields)",
    ),
    Field::new(
        "numbers",
        FieldType::Choices(&["keep", "digits", "words"]),
        "cardinal numbers in digits, or digits in words; it needs a `language` that has a table (an addition to OpenAI's fields)",
    ),
    Field::new(
        "fillers",
        FieldType::Choices(&["keep", "drop"]),
        "whether fillers such as `uh` are left out; it needs a `language` that has a table (an addition to OpenAI's fields)",
    ),
    Field::new(
        "include[]",
        FieldType::Choices(&["logprobs"]),
        "with `json`: the tokens of the text with their log probabilities; has no effect with other formats",
    ),
    Field::new(
        "chunking_strategy",
        FieldType::Object(&["auto"]),
        "`auto`, or an object of type `server_vad`, whose numbers have no effect: those of the server hold",
    ),
    Field::new(
        "url",
        FieldType::String,
        "of jobs alone, in place of `file`: a recording in object storage (an addition to OpenAI's fields)",
    ),
    Field::new(
        "webhook",
        FieldType::String,
        "of jobs alone: the URL that is told of the end (an addition to OpenAI's fields)",
    ),
];

/// A form that was read.
pub struct TranscriptionForm {
    pub upload: Upload,
    pub asked: Asked,
    /// Known speakers: a name, and a file with a recording of the voice.
    pub references: Vec<(String, Vec<u8>)>,
    /// Of jobs alone: where the recording is; the upload is then empty.
    pub url: Option<String>,
    /// Of jobs alone.
    pub webhook: Option<String>,
}

/// The requested function.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Asked {
    pub model: Option<String>,
    pub format: ResponseFormat,
    pub words: bool,
    pub segments: bool,
    pub stream: bool,
    pub diarize: bool,
    /// Tokens with their log probabilities.
    pub logprobs: bool,
    /// Channels are transcribed apart.
    #[serde(default)]
    pub split_channels: bool,
    /// Phrases and languages.
    #[serde(default)]
    pub decoding: DecodingRequest,
    #[serde(default)]
    pub num_speakers: Option<usize>,
    #[serde(default)]
    pub min_speakers: Option<usize>,
    #[serde(default)]
    pub max_speakers: Option<usize>,
    /// Names with the embeddings of their voices.
    #[serde(default)]
    pub known_speakers: Vec<(String, Vec<f32>)>,
    /// Names of fields that were given and have no effect.
    pub ignored: Vec<String>,
}

impl Asked {
    /// Whether another request asks for the same, as far as fields say: of known speakers the names are compared.
    pub fn is_like(&self, other: &Self) -> bool {
        let without_voices = |asked: &Self| Self {
            known_speakers: asked
                .known_speakers
                .iter()
                .map(|(name, _)| (name.clone(), Vec::new()))
                .collect(),
            ..asked.clone()
        };
        without_voices(self) == without_voices(other)
    }

    /// The request for the engine.
    pub fn request(&self, audio: TempPath, source_name: String) -> TranscriptionRequest {
        TranscriptionRequest {
            model: self.model.clone(),
            audio,
            source_name,
            diarize: self.diarize,
            speakers: SpeakerRequest {
                clusters: Clusters {
                    number: self.num_speakers,
                    least: self.min_speakers,
                    most: self.max_speakers,
                },
                known: self.known_speakers.clone(),
            },
            tokens: self.logprobs,
            decoding: Arc::new(self.decoding.clone()),
            channel: None,
            log: None,
        }
    }
}

/// The fields read so far.
#[derive(Default)]
struct Reading {
    upload: Option<Upload>,
    model: Option<String>,
    format: Option<ResponseFormat>,
    granularities: Vec<String>,
    stream: Option<bool>,
    diarize: Option<bool>,
    logprobs: bool,
    temperature: Option<f64>,
    split_channels: Option<bool>,
    options: Options,
    url: Option<String>,
    webhook: Option<String>,
    ignored: Vec<String>,
}

/// Reads a form; its file goes to the private folder. `is_diarization`: of a path that tells speakers apart in any case.
///
/// # Errors
/// If the body is no form, is too large or too slow, has no file, or a field has a wrong value.
pub async fn read<S>(
    mut form: Multipart<S>,
    uploads: &Uploads,
    is_diarization: bool,
) -> Result<TranscriptionForm, ApiError>
where
    S: Stream<Item = Result<Bytes, BodyError>> + Unpin,
{
    let mut reading = Reading::default();
    while let Some(part) = form.next_part().await? {
        if part.name == "file" {
            if reading.upload.is_some() {
                return Err(ApiError::parameter(
                    "file",
                    "duplicate_parameter",
                    "there are two files",
                ));
            }
            let name = part.file_name.as_deref().unwrap_or_default();
            reading.upload = Some(uploads.store(&mut form, name).await?);
        } else {
            reading.field(&part, &mut form).await?;
        }
    }
    if let (None, Some(url)) = (&reading.upload, &reading.url) {
        reading.upload = Some(uploads.begin().await?.finish(url).await?);
    } else if reading.url.is_some() {
        let message = "give `file` or `url`, not both";
        return Err(ApiError::parameter("url", "invalid_value", message));
    }
    reading.done(is_diarization)
}

impl Reading {
    async fn field<S>(&mut self, part: &Part, form: &mut Multipart<S>) -> Result<(), ApiError>
    where
        S: Stream<Item = Result<Bytes, BodyError>> + Unpin,
    {
        if let Some((field, most)) = Options::field(&part.name) {
            let text = value(field, most, form).await?;
            return Ok(self.options.set(field, &text)?);
        }
        match part.name.as_str() {
            "model" => match given("model", MAX_VALUE, form).await? {
                Some(name) => once("model", &mut self.model, name),
                None => Ok(()),
            },
            "response_format" => {
                let Some(name) = given("response_format", MAX_VALUE, form).await? else {
                    return Ok(());
                };
                let found = ResponseFormat::ALL.into_iter().find(|format| format.name() == name);
                let format = found.ok_or_else(|| none_of("response_format", &name, FORMATS))?;
                once("response_format", &mut self.format, format)
            }
            "timestamp_granularities[]" | "timestamp_granularities" => {
                let Some(name) = given("timestamp_granularities[]", MAX_VALUE, form).await? else {
                    return Ok(());
                };
                if !GRANULARITIES.contains(&name.as_str()) {
                    return Err(none_of("timestamp_granularities[]", &name, &GRANULARITIES));
                }
                self.granularities.push(name);
                Ok(())
            }
            "stream" => {
                let flag = boolean("stream", &value("stream", MAX_VALUE, form).await?)?;
                once("stream", &mut self.stream, flag)
            }
            "diarize" => {
                let flag = boolean("diarize", &value("diarize", MAX_VALUE, form).await?)?;
                once("diarize", &mut self.diarize, flag)
            }
            "channels" => {
                let Some(name) = given("channels", MAX_VALUE, form).await? else {
                    return Ok(());
                };
                if !CHANNELS.contains(&name.as_str()) {
                    return Err(none_of("channels", &name, CHANNELS));
                }
                once("channels", &mut self.split_channels, name == "split")
            }
            "temperature" => {
                let Some(text) = given("temperature", MAX_VALUE, form).await? else {
                    return Ok(());
                };
                let number = text
                    .trim()
                    .parse::<f64>()
                    .ok()
                    .filter(|number| (0.0..=1.0).contains(number));
                let number = number.ok_or_else(|| {
                    let message = format!("`{}` is not a number from 0 to 1", shown(&text));
                    ApiError::parameter("temperature", "invalid_value", message)
                })?;
                once("temperature", &mut self.temperature, number)?;
                if number != 0.0 {
                    self.ignore("temperature");
                }
                Ok(())
            }
            "include[]" | "include" => {
                let Some(name) = given("include[]", MAX_VALUE, form).await? else {
                    return Ok(());
                };
                if name != "logprobs" {
                    return Err(none_of("include[]", &name, &["logprobs"]));
                }
                self.logprobs = true;
                Ok(())
            }
            "chunking_strategy" => {
                let Some(text) = given("chunking_strategy", MAX_VALUE, form).await? else {
                    return Ok(());
                };
                if chunking_strategy(&text)? {
                    self.ignore("chunking_strategy");
                }
                Ok(())
            }
            "url" => match given("url", MAX_VALUE, form).await? {
                Some(url) => once("url", &mut self.url, url.trim().to_owned()),
                None => Ok(()),
            },
            "webhook" => match given("webhook", MAX_VALUE, form).await? {
                Some(url) => once("webhook", &mut self.webhook, url.trim().to_owned()),
                None => Ok(()),
            },
            // A field without effect is read and dropped, however long it is.
            name => {
                let mut is_empty = true;
                while form.chunk().await?.is_some() {
                    is_empty = false;
                }
                if !is_empty {
                    self.ignore(name);
                }
                Ok(())
            }
        }
    }

    /// Notes a field without effect, if its name is valid in a header.
    fn ignore(&mut self, name: &str) {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-[].".contains(c);
        let name: String = name.chars().filter(|c| plain(*c)).take(64).collect();
        if !name.is_empty() && self.ignored.len() < MAX_IGNORED && !self.ignored.contains(&name) {
            self.ignored.push(name);
        }
    }

    fn done(mut self, is_diarization: bool) -> Result<TranscriptionForm, ApiError> {
        let Some(upload) = self.upload.take() else {
            let message = "the form has no `file`, which is the recording (a job may have a `url` instead)";
            return Err(ApiError::parameter("file", "missing_required_parameter", message));
        };
        if upload.bytes == 0 && self.url.is_none() {
            return Err(ApiError::parameter("file", "empty_file", "the file is empty"));
        }
        let format = self.format.unwrap_or(ResponseFormat::Json);
        if !self.granularities.is_empty() && format != ResponseFormat::VerboseJson {
            let message = "timestamp_granularities[] needs response_format `verbose_json`";
            return Err(ApiError::parameter(
                "timestamp_granularities[]",
                "invalid_value",
                message,
            ));
        }
        let stream = self.stream.unwrap_or(false);
        if stream && !format.streams() {
            let message = format!(
                "`{}` cannot be streamed: take json, text or diarized_json",
                format.name()
            );
            return Err(ApiError::parameter("stream", "unsupported_value", message));
        }
        let split_channels = self.split_channels.unwrap_or(false);
        if split_channels && (self.diarize == Some(true) || is_diarization) {
            let message = "with `split` the speakers are the channels; their voices are not compared";
            return Err(ApiError::parameter("channels", "invalid_value", message));
        }
        if split_channels && self.stream == Some(true) {
            let message = "a transcript of channels apart cannot be streamed";
            return Err(ApiError::parameter("stream", "unsupported_value", message));
        }
        let diarize = self.diarize.unwrap_or(false) || (format == ResponseFormat::DiarizedJson && !split_channels);
        if let Some(name) = self.options.of_speakers().filter(|_| !diarize && !is_diarization) {
            let message = match split_channels {
                true => format!("`{name}` does not go with channels=split, where each channel is a speaker"),
                false => format!("`{name}` needs `diarize`, or response_format `diarized_json`"),
            };
            return Err(ApiError::parameter(name, "invalid_value", message));
        }
        self.options.check()?;
        if self.logprobs && format != ResponseFormat::Json {
            self.ignore("include[]");
        }
        let has = |name: &str| self.granularities.iter().any(|given| given == name);
        let asked = Asked {
            words: has("word"),
            segments: has("segment") || !has("word"),
            model: self.model,
            format,
            stream,
            diarize,
            logprobs: self.logprobs && format == ResponseFormat::Json,
            split_channels,
            num_speakers: self.options.clusters.number,
            min_speakers: self.options.clusters.least,
            max_speakers: self.options.clusters.most,
            known_speakers: Vec::new(),
            decoding: std::mem::take(&mut self.options.decoding),
            ignored: self.ignored,
        };
        Ok(TranscriptionForm {
            upload,
            asked,
            references: self.options.take_references(),
            url: self.url,
            webhook: self.webhook,
        })
    }
}

/// Sets a value that may be given only once.
pub fn once<T>(name: &'static str, place: &mut Option<T>, value: T) -> Result<(), ApiError> {
    if place.replace(value).is_some() {
        let message = format!("`{name}` is given twice");
        return Err(ApiError::parameter(name, "duplicate_parameter", message));
    }
    Ok(())
}

/// The text of a field.
async fn value<S>(name: &'static str, most: usize, form: &mut Multipart<S>) -> Result<String, ApiError>
where
    S: Stream<Item = Result<Bytes, BodyError>> + Unpin,
{
    let mut bytes = Vec::new();
    while let Some(chunk) = form.chunk().await? {
        if bytes.len() + chunk.len() > most {
            let message = format!("`{name}` has more than {most} bytes");
            return Err(ApiError::parameter(name, "string_above_max_length", message));
        }
        bytes.extend_from_slice(&chunk);
    }
    String::from_utf8(bytes).map_err(|_| {
        let message = format!("the value of `{name}` is not UTF-8");
        ApiError::parameter(name, "invalid_value", message)
    })
}

/// The text of a field, as it is; none where it is empty, as programs send fields that nobody has filled in.
pub async fn given<S>(name: &'static str, most: usize, form: &mut Multipart<S>) -> Result<Option<String>, ApiError>
where
    S: Stream<Item = Result<Bytes, BodyError>> + Unpin,
{
    let text = value(name, most, form).await?;
    Ok(Some(text).filter(|text| !text.trim().is_empty()))
}

fn boolean(name: &'static str, text: &str) -> Result<bool, ApiError> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "1" => Ok(true),
        "false" | "0" | "" => Ok(false),
        _ => Err(none_of(name, text, &["true", "false"])),
    }
}

/// Whether a chunking strategy has parameters, which have no effect here.
fn chunking_strategy(text: &str) -> Result<bool, ApiError> {
    if text.trim() == "auto" {
        return Ok(false);
    }
    let wrong = |why: &str| {
        let message = format!("{why}: `auto`, or {{\"type\": \"server_vad\", ...}}");
        ApiError::parameter("chunking_strategy", "invalid_value", message)
    };
    let parsed: Value = serde_json::from_str(text).map_err(|error| wrong(&format!("it is not JSON ({error})")))?;
    let object = parsed.as_object().ok_or_else(|| wrong("it is not an object"))?;
    match object.get("type").and_then(Value::as_str) {
        Some("auto") if object.len() == 1 => return Ok(false),
        Some("server_vad") => {}
        _ => return Err(wrong("its `type` is not known")),
    }
    for (key, value) in object {
        let fits = match key.as_str() {
            "type" => true,
            "threshold" => value.as_f64().is_some_and(|number| (0.0..=1.0).contains(&number)),
            "prefix_padding_ms" | "silence_duration_ms" => value.as_u64().is_some(),
            _ => return Err(wrong("it has a key that is not known")),
        };
        if !fits {
            return Err(wrong("one of its numbers is out of range"));
        }
    }
    Ok(object.len() > 1)
}

pub fn none_of(name: &'static str, given: &str, known: &[&str]) -> ApiError {
    let message = format!("`{}` is none of {}", shown(given), known.join(", "));
    ApiError::parameter(name, "invalid_value", message)
}

impl From<WrongOption> for ApiError {
    fn from(wrong: WrongOption) -> Self {
        ApiError::parameter(wrong.field, wrong.code, wrong.message)
    }
}

impl From<MultipartError> for ApiError {
    fn from(error: MultipartError) -> Self {
        use axum::http::StatusCode;
        let message = error.to_string();
        match error {
            MultipartError::Body(BodyError::TooLarge(_)) => {
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
            }
            MultipartError::Body(BodyError::TooSlow) => {
                Self::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message)
            }
            MultipartError::Body(BodyError::Broken(_)) => Self::bad_request("body_incomplete", message),
            MultipartError::Truncated | MultipartError::Malformed(_) | MultipartError::TooManyParts => {
                Self::bad_request("invalid_form", message)
            }
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// What a form with a file alone asks for.
    pub fn asked() -> Asked {
        Asked {
            model: None,
            format: ResponseFormat::Json,
            words: false,
            segments: true,
            stream: false,
            diarize: false,
            logprobs: false,
            split_channels: false,
            decoding: DecodingRequest::default(),
            num_speakers: None,
            min_speakers: None,
            max_speakers: None,
            known_speakers: Vec::new(),
            ignored: Vec::new(),
        }
    }

    #[test]
    fn formats_of_the_parser_are_those_of_the_documentation() {
        assert_eq!(ResponseFormat::ALL.map(ResponseFormat::name), FORMATS);
        for format in ResponseFormat::ALL {
            assert_eq!(serde_json::json!(format), format.name());
        }
    }

    #[test]
    fn chunking_strategies_are_checked() {
        assert_eq!(chunking_strategy("auto"), Ok(false));
        assert_eq!(chunking_strategy(r#"{"type": "auto"}"#), Ok(false));
        assert_eq!(chunking_strategy(r#"{"type": "server_vad"}"#), Ok(false));
        assert_eq!(
            chunking_strategy(r#"{"type": "server_vad", "threshold": 0.3}"#),
            Ok(true)
        );
        for wrong in [
            "",
            "never",
            "{",
            "[]",
            "{}",
            r#"{"type": 1}"#,
            r#"{"type": "auto", "threshold": 0.3}"#,
            r#"{"type": "server_vad", "threshold": "a"}"#,
            r#"{"type": "server_vad", "silence_duration_ms": -1}"#,
            r#"{"type": "server_vad", "other": 1}"#,
        ] {
            let error = chunking_strategy(wrong).unwrap_err();
            assert_eq!(error.param, Some("chunking_strategy"), "{wrong}");
        }
    }

    #[test]
    fn names_of_ignored_fields_fit_into_a_header() {
        let mut reading = Reading::default();
        for name in ["prompt", "prompt", "a\r\nb: c", "", "é", &"x".repeat(100)] {
            reading.ignore(name);
        }
        assert_eq!(reading.ignored, ["prompt", "abc", &"x".repeat(64)]);
        for number in 0..100 {
            reading.ignore(&number.to_string());
        }
        assert_eq!(reading.ignored.len(), MAX_IGNORED);
    }

    #[test]
    fn booleans_are_read_as_clients_write_them() {
        assert_eq!(boolean("stream", "True"), Ok(true));
        assert_eq!(boolean("stream", "false"), Ok(false));
        assert_eq!(boolean("stream", "yes").unwrap_err().param, Some("stream"));
    }
}
