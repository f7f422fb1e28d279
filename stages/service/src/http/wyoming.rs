//! Transcription by the Wyoming protocol, which Home Assistant speaks: events over TCP, each a line of JSON, then perhaps more of
//! its data and a payload, whose lengths are in that line.
//!
//! `transcribe` (model and language, optional), `audio-start`, `audio-chunk`s of PCM and `audio-stop` give a `transcript`; `describe`
//! gives `info`, `ping` gives `pong`. Other events are ignored. What is wrong gives an `error`, and ends the connection.

use std::future::pending;
use std::io;
use std::time::Duration;

use flow_audio::wire_audio::wav_header;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::time::{Instant, timeout};

use super::app::{App, Phase};
use super::body::BodyLimits;
use super::error::ApiError;
use super::form::Asked;
use super::service::reached;
use super::transcriptions::{refused, submit_counted};
use super::upload::Unfinished;
use crate::options::Options;

/// Most bytes of the line of an event and of its further data, and of a payload.
const MAX_JSON: u64 = 16 << 10;
const MAX_PAYLOAD: u64 = 512 << 10;

/// Time of an upload before its rate counts.
const GRACE: Duration = Duration::from_secs(10);

/// How long, and how many bytes, a client that was refused may go on to send.
const LINGER: Duration = Duration::from_secs(2);
const MOST_LINGER: u64 = 4 << 20;

/// Highest rate in hertz, and most channels.
const MAX_RATE: u64 = 192_000;
const MAX_CHANNELS: u64 = 8;

/// An event, before its payload is read.
struct Event {
    kind: String,
    data: Map<String, Value>,
    payload_length: u64,
}

/// Audio that is being sent.
struct Sent {
    pcm: Pcm,
    file: Unfinished,
    begin: Instant,
}

impl Sent {
    /// Refuses audio that comes too slowly, or for too long.
    fn check_rate(&self, limits: BodyLimits) -> Result<(), End> {
        let counted = self.begin.elapsed().saturating_sub(GRACE).as_secs_f64();
        let is_slow = (self.file.bytes() as f64) < counted * limits.min_rate as f64;
        match is_slow || self.begin.elapsed() > limits.max_time {
            true => Err(End::Error("the audio comes too slowly".to_owned())),
            false => Ok(()),
        }
    }
}

/// Why a connection ends.
enum End {
    /// The client is gone, or sends nothing.
    Gone,
    /// What goes to the client.
    Error(String),
}

impl From<io::Error> for End {
    fn from(_: io::Error) -> Self {
        Self::Gone
    }
}

impl From<ApiError> for End {
    fn from(error: ApiError) -> Self {
        Self::Error(error.message)
    }
}

/// How audio is written: hertz, bytes of a sample, channels.
#[derive(Clone, Copy, PartialEq)]
struct Pcm {
    rate: u64,
    width: u64,
    channels: u64,
}

impl Pcm {
    fn of(data: &Map<String, Value>) -> Result<Self, End> {
        let number = |name: &str| data.get(name).and_then(Value::as_u64);
        let pcm = Self {
            rate: number("rate").unwrap_or_default(),
            width: number("width").unwrap_or_default(),
            channels: number("channels").unwrap_or_default(),
        };
        let is_known = (1_000..=MAX_RATE).contains(&pcm.rate)
            && (2..=4).contains(&pcm.width)
            && (1..=MAX_CHANNELS).contains(&pcm.channels);
        is_known.then_some(pcm).ok_or_else(|| {
            End::Error(format!(
                "audio has `rate` (1000 to {MAX_RATE}), `width` (2 to 4 bytes) and `channels` (1 to {MAX_CHANNELS})"
            ))
        })
    }

    /// The header of a WAV file whose length is not known yet. All fields are within bounds, see [`Self::of`].
    fn header(self) -> [u8; 44] {
        wav_header(self.rate as u32, self.channels as u16, self.width as u16, None)
    }
}

/// Answers the events of a connection. `idle`: the longest time for an event.
pub async fn connection<T: AsyncRead + AsyncWrite + Unpin>(app: &App, stream: T, idle: Duration) {
    let mut stream = BufReader::new(stream);
    if let Err(End::Error(text)) = events(app, &mut stream, idle).await {
        // The client may be gone.
        let _ = send(&mut stream, "error", json!({"text": text})).await;
        let _ = stream.shutdown().await;
        // Closed with bytes that were not read, the connection would be reset, and the error lost.
        let _ = timeout(LINGER, skip(&mut stream, MOST_LINGER)).await;
    }
}

async fn events<T: AsyncRead + AsyncWrite + Unpin>(
    app: &App,
    stream: &mut BufReader<T>,
    idle: Duration,
) -> Result<(), End> {
    let mut asked = Asked::default();
    let mut audio: Option<Sent> = None;
    loop {
        if let Some(sent) = &audio {
            sent.check_rate(app.settings.body_limits())?;
        }
        let event = tokio::select! {
            event = timeout(idle, next(stream)) => event.map_err(|_| End::Gone)??,
            () = reached(app.phase.clone(), Phase::Closing) => {
                return Err(End::Error("the server is being stopped".to_owned()));
            }
        };
        let payload = match event.kind.as_str() {
            "audio-chunk" => within(idle, exactly(stream, event.payload_length)).await?,
            _ => within(idle, skip(stream, event.payload_length)).await?,
        };
        let data = &event.data;
        match event.kind.as_str() {
            // A client that is told of no model may never ask again.
            "describe" => {
                app.check_ready()?;
                send(stream, "info", information(app)).await?;
            }
            "ping" => send(stream, "pong", json!({"text": data.get("text")})).await?,
            "transcribe" => asked = requested(app, data)?,
            "audio-start" => {
                app.check_ready()?;
                app.engine()?.check_room().map_err(|error| refused(app, error))?;
                let pcm = Pcm::of(data)?;
                audio = Some(Sent {
                    pcm,
                    file: app.uploads.begin().await?.with(&pcm.header()).await?,
                    begin: Instant::now(),
                });
            }
            "audio-chunk" => {
                let Some(sent) = audio else {
                    return Err(End::Error("`audio-chunk` comes before `audio-start`".to_owned()));
                };
                if Pcm::of(data)? != sent.pcm {
                    return Err(End::Error(
                        "a chunk has another format than the audio began with".to_owned(),
                    ));
                }
                let most = app.settings.max_upload;
                if sent.file.bytes() + payload.len() as u64 > most {
                    return Err(End::Error(format!("the audio has more than {most} bytes")));
                }
                audio = Some(Sent {
                    file: sent.file.with(&payload).await?,
                    ..sent
                });
            }
            "audio-stop" => {
                let Some(Sent { pcm, file, .. }) = audio.take() else {
                    return Err(End::Error("`audio-stop` comes before `audio-start`".to_owned()));
                };
                let asked = std::mem::take(&mut asked);
                let is_empty = file.bytes() < pcm.header().len() as u64 + pcm.width * pcm.channels;
                let transcript = match is_empty {
                    true => json!({"text": ""}),
                    false => transcript(app, stream, &asked, file).await?,
                };
                send(stream, "transcript", transcript).await?;
            }
            _ => {}
        }
    }
}

/// What a `transcribe` asks for.
fn requested(app: &App, data: &Map<String, Value>) -> Result<Asked, End> {
    let text = |name: &str| data.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    let mut options = Options::default();
    if let (Some(language), Some((field, _))) = (text("language"), Options::field("language")) {
        let set = options.set(field, language);
        set.map_err(|wrong| End::Error(format!("`language`: {}", wrong.message)))?;
    }
    let models = app.engine()?.models();
    let speaks = |language: &String| models.iter().find(|model| model.languages.contains(language));
    let of_language = options
        .decoding
        .languages
        .iter()
        .find_map(speaks)
        .map(|model| model.name.clone());
    Ok(Asked {
        model: text("name").map(str::to_owned).or(of_language),
        decoding: options.decoding,
        ..Asked::default()
    })
}

async fn transcript<T: AsyncRead + Unpin>(
    app: &App,
    stream: &mut BufReader<T>,
    asked: &Asked,
    file: Unfinished,
) -> Result<Value, End> {
    let begin = Instant::now();
    let upload = file.finish("wyoming.wav").await?;
    let submitted = submit_counted(app, asked, upload.path, upload.name).await?;
    let finished = tokio::select! {
        finished = submitted.finish() => finished.map_err(ApiError::from)?,
        () = gone(stream) => return Err(End::Gone),
    };
    app.metrics.total(begin.elapsed().as_secs_f64());
    let transcript = &finished.transcript;
    Ok(json!({"text": transcript.text, "language": transcript.metadata.languages.first()}))
}

/// Returns when the client has closed the connection.
async fn gone<T: AsyncRead + Unpin>(stream: &mut BufReader<T>) {
    if let Ok(more) = stream.fill_buf().await
        && !more.is_empty()
    {
        // The next event, which is read later.
        pending::<()>().await;
    }
}

/// The next event.
async fn next<T: AsyncRead + Unpin>(stream: &mut BufReader<T>) -> Result<Event, End> {
    let mut line = Vec::new();
    (&mut *stream).take(MAX_JSON).read_until(b'\n', &mut line).await?;
    if line.is_empty() {
        return Err(End::Gone);
    }
    let wrong = |why: &str| End::Error(format!("not an event of the Wyoming protocol: {why}"));
    if line.last() != Some(&b'\n') {
        return Err(wrong("its line is longer than 16 KiB, or cut off"));
    }
    let Ok(Value::Object(mut head)) = serde_json::from_slice(&line) else {
        return Err(wrong("its line is not a JSON object"));
    };
    let Some(Value::String(kind)) = head.remove("type") else {
        return Err(wrong("it has no `type`"));
    };
    let length = |name: &str, most: u64| match head.get(name) {
        None | Some(Value::Null) => Ok(0),
        Some(length) => length
            .as_u64()
            .filter(|length| *length <= most)
            .ok_or_else(|| wrong(&format!("`{name}` is not from 0 to {most}"))),
    };
    let (more, bytes) = (length("data_length", MAX_JSON)?, length("payload_length", MAX_PAYLOAD)?);
    let mut data = match head.remove("data") {
        Some(Value::Object(data)) => data,
        _ => Map::new(),
    };
    if more > 0 {
        match serde_json::from_slice(&exactly(stream, more).await?) {
            Ok(Value::Object(more)) => data.extend(more),
            _ => return Err(wrong("its data are not a JSON object")),
        }
    }
    Ok(Event {
        kind,
        data,
        payload_length: bytes,
    })
}

/// What a client sends in time.
async fn within<R>(idle: Duration, read: impl Future<Output = Result<R, End>>) -> Result<R, End> {
    timeout(idle, read).await.map_err(|_| End::Gone)?
}

/// Passes over `length` bytes.
async fn skip<T: AsyncRead + Unpin>(stream: &mut BufReader<T>, length: u64) -> Result<Vec<u8>, End> {
    let skipped = tokio::io::copy(&mut (&mut *stream).take(length), &mut tokio::io::sink()).await?;
    match skipped == length {
        true => Ok(Vec::new()),
        false => Err(End::Gone),
    }
}

/// `length` bytes; memory is taken as they come.
async fn exactly<T: AsyncRead + Unpin>(stream: &mut BufReader<T>, length: u64) -> Result<Vec<u8>, End> {
    let mut bytes = Vec::new();
    (&mut *stream).take(length).read_to_end(&mut bytes).await?;
    match bytes.len() as u64 == length {
        true => Ok(bytes),
        false => Err(End::Gone),
    }
}

async fn send<T: AsyncRead + AsyncWrite + Unpin>(stream: &mut BufReader<T>, kind: &str, data: Value) -> io::Result<()> {
    let data = data.to_string();
    let line = json!({"type": kind, "data_length": data.len()});
    stream.write_all(format!("{line}\n{data}").as_bytes()).await?;
    stream.flush().await
}

/// The models, as `info` has them.
fn information(app: &App) -> Value {
    let attribution = json!({"name": "flow", "url": ""});
    let models = app.engine().map(|engine| engine.models()).unwrap_or_default();
    let models = models.iter().map(|model| {
        let of_setting = &app.settings.wyoming_languages;
        // Home Assistant offers only models that name a language.
        let english = vec!["en".to_owned()];
        let lists = [of_setting, &model.languages, &english];
        let languages = lists.into_iter().find(|list| !list.is_empty());
        json!({
            "name": model.name,
            "description": model.name,
            "attribution": attribution,
            "installed": true,
            "version": model.digest,
            "languages": languages,
        })
    });
    json!({"asr": [{
        "name": "flow",
        "description": "Speech to text",
        "attribution": attribution,
        "installed": true,
        "version": app.version,
        "models": models.collect::<Vec<Value>>(),
    }]})
}
