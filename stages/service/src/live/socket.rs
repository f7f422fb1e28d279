//! Live transcription over a WebSocket: OpenAI's `/v1/realtime?intent=transcription`.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::extract::{Query, State};
use axum::http::{HeaderMap, header};
use axum::response::Response;
use axum::routing::get;
use bytes::Bytes;
use flow_audio::wire_audio::WireAudio;
use flow_speakers::diarizer::{Decided, OnlineDiarizer};
use flow_speakers::silero::SileroVad;
use flow_transcription::decoding_request::DecodingRequest;
use flow_transcription::recognizer::Heard;
use flow_transcription::recognizer::listen::HeardNext;
use futures::SinkExt;
use futures::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::Decoder;
use super::protocol::{ClientEvent, KnownModels, Refused, SessionConfig, SessionUpdate};
use super::session::Session;
use super::session_event::{DecodeRequest, SessionEvent};
use super::settings::LiveSettings;
use super::speakers::{DiarizeRequest, WordSpeakers};
use crate::engine::{EngineError, LiveListener};
use crate::http::ApiError;
use crate::logprobs::logprobs;

/// The path of the WebSocket.
pub const PATH: &str = "/v1/realtime";
/// Subprotocols, for browsers, which cannot send headers: the one that is spoken, what is before an API key, and the one that
/// asks for the older form.
const SUBPROTOCOL: &str = "realtime";
const KEY_SUBPROTOCOL: &str = "openai-insecure-api-key.";
const OLDER_SUBPROTOCOL: &str = "openai-beta.realtime-v1";
/// A client that does not take an event in this time has gone.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client has to close its side after the server did.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long it may take to decode what was said, once the server ends a session.
const LAST_WORDS: Duration = Duration::from_secs(60);
/// How often a session in which nothing happens looks whether the server is being stopped.
const STOP_CHECK: Duration = Duration::from_millis(250);
/// Bytes of audio that are taken at once: from 85 ms to a second, by their format.
const BLOCK: usize = 8_192;
/// How often a window that grows no more is tried again while the engine is busy.
const TRIES: u32 = 5;

struct Service {
    decoder: Arc<dyn Decoder>,
    settings: LiveSettings,
    places: Arc<Semaphore>,
}

/// The route of live transcription, [`PATH`]. Who may use it, and pages of which origin, is for layers around it to say; browsers send
/// an API key as [`api_key_of_subprotocols`] reads it.
///
/// The settings must be such that [`LiveSettings::check`] takes them, and `max_window` no longer than the decoder's own.
pub fn routes(decoder: Arc<dyn Decoder>, settings: LiveSettings) -> Router {
    let places = Arc::new(Semaphore::new(settings.max_sessions));
    let service = Arc::new(Service {
        decoder,
        settings,
        places,
    });
    Router::new().route(PATH, get(upgrade)).with_state(service)
}

/// The API key that a browser sends among the subprotocols of a WebSocket, as `openai-insecure-api-key.KEY`.
pub fn api_key_of_subprotocols(headers: &HeaderMap) -> Option<&str> {
    subprotocols(headers).find_map(|name| name.strip_prefix(KEY_SUBPROTOCOL))
}

fn subprotocols(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let lists = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).into_iter();
    lists
        .filter_map(|list| list.to_str().ok())
        .flat_map(|list| list.split(',').map(str::trim))
}

#[derive(Deserialize)]
struct Parameters {
    intent: Option<String>,
    model: Option<String>,
}

async fn upgrade(
    State(service): State<Arc<Service>>,
    parameters: Result<Query<Parameters>, QueryRejection>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let refusal = |status, message: String| ApiError::new(status, "invalid_value", message);
    let Query(parameters) = parameters.map_err(|error| refusal(error.status(), error.body_text()))?;
    if let Some(intent) = parameters.intent.filter(|intent| intent != "transcription") {
        let intent: String = intent.chars().take(100).collect();
        let message = format!("sessions of intent `{intent}` are not known here: `transcription` is");
        return Err(ApiError::parameter("intent", "invalid_value", message));
    }
    let upgrade = upgrade.map_err(|error| refusal(error.status(), error.body_text()))?;
    let older = headers.get("openai-beta").is_some_and(|value| value == "realtime=v1")
        || subprotocols(&headers).any(|name| name == OLDER_SUBPROTOCOL);
    let size = service.settings.max_message;
    let upgraded = upgrade
        .max_message_size(size)
        .max_frame_size(size)
        .protocols([SUBPROTOCOL])
        .on_upgrade(move |socket| async move {
            let mut connection = Connection::new(socket, older);
            let end = connection.serve(&service, parameters.model).await.err();
            connection.close(end).await;
        });
    Ok(upgraded)
}

/// How a connection is closed.
struct End {
    code: u16,
    reason: &'static str,
}

/// Why the server ends a session.
struct Ending {
    code: u16,
    kind: &'static str,
    refused: Refused,
}

impl Ending {
    fn stopping() -> Self {
        Ending {
            code: close_code::AWAY,
            kind: "server_error",
            refused: Refused::new("server_stopping", "the server is being stopped"),
        }
    }

    /// The client broke a rule or a limit.
    fn by_rule(code: u16, refused: Refused) -> Self {
        Ending {
            code,
            kind: "invalid_request_error",
            refused,
        }
    }
}

/// The client is not there any more.
const GONE: End = End {
    code: close_code::NORMAL,
    reason: "",
};

/// What was heard.
enum Answer {
    Window(Result<Heard, EngineError>),
    Next(Box<Result<(LiveListener, HeardNext), EngineError>>),
}

/// The diarizer again, with what it decided; or why it failed.
type Diarizing = BoxFuture<'static, Result<(OnlineDiarizer, Decided), String>>;

/// What is at work in a session.
struct Live {
    settings: LiveSettings,
    config: SessionConfig,
    /// The phrases and languages of the options.
    asked: Arc<DecodingRequest>,
    models: KnownModels,
    /// When the session ends at the latest, in seconds since 1970.
    expires_at: i64,
    session: Session,
    audio: WireAudio,
    /// Bytes of a message that were not taken yet.
    pending: Bytes,
    decoding: Option<BoxFuture<'static, Answer>>,
    /// Whether it is known how the model hears, and what it makes of the options.
    knows_model: bool,
    /// What a model that hears what is spoken keeps of the turn, between its parts.
    listener: Option<LiveListener>,
    decoder: Arc<dyn Decoder>,
    /// Of a session that asks who speaks, while it is not at work.
    diarizer: Option<OnlineDiarizer>,
    diarizing: Option<Diarizing>,
    samples: Vec<f32>,
}

struct Connection {
    socket: WebSocket,
    /// In which form the client is told of its session when it begins, and of items.
    older: bool,
    /// A number that tells sessions apart.
    id: String,
    events: u64,
    segments: u64,
    last_item: Option<String>,
}

impl Connection {
    fn new(socket: WebSocket, older: bool) -> Self {
        // Each state has keys of its own.
        let number = RandomState::new().build_hasher().finish();
        Connection {
            socket,
            older,
            id: format!("{number:016x}"),
            events: 0,
            segments: 0,
            last_item: None,
        }
    }

    /// Serves the client until it goes, or must.
    async fn serve(&mut self, service: &Service, model: Option<String>) -> Result<(), End> {
        let settings = &service.settings;
        let Ok(_place) = service.places.clone().try_acquire_owned() else {
            let refused = Refused::new(
                "too_many_sessions",
                "as many sessions as may be are open; try again later",
            );
            let (code, kind) = (close_code::AGAIN, "server_error");
            return self.end(Ending { code, kind, refused }).await;
        };
        let models = KnownModels {
            names: service.decoder.models(),
            accept_any: settings.accept_any_model,
        };
        let mut live = match Live::new(settings, models, model, Arc::clone(&service.decoder)) {
            Ok(live) => live,
            Err(refused) => return self.end(Ending::by_rule(close_code::POLICY, refused)).await,
        };
        let created = if self.older {
            "transcription_session.created"
        } else {
            "session.created"
        };
        let session = live.to_json(&self.id, self.older);
        self.send(created, session).await?;

        let idle_timeout = Duration::from_secs_f64(settings.idle_timeout);
        let mut ends = Instant::now() + Duration::from_secs_f64(settings.max_session);
        let mut idle = Instant::now() + idle_timeout;
        // Once it is set, no more is read, and the session ends when all that was read is decoded.
        let mut ending: Option<Ending> = None;
        loop {
            if ending.is_none() && service.decoder.is_stopping() {
                ending = Some(Ending::stopping());
                ends = Instant::now() + LAST_WORDS;
            }
            if ending.is_some() && live.pending.is_empty() {
                // There may be nothing to commit, and after the first time there is nothing.
                let _ = live.commit();
            }
            if live.decoding.is_none()
                && let Some(request) = live.session.next_decode()
            {
                live.decode(request);
            }
            live.diarize();
            for event in live.session.take_events() {
                self.tell(event, &live.config).await?;
            }
            if live.decoding.is_none()
                && live.pending.is_empty()
                && live.session.speakers().is_none_or(|speakers| speakers.is_done())
                && let Some(ending) = ending.take()
            {
                return self.end(ending).await;
            }
            let has_room = !live.session.is_full();
            let has_pending = !live.pending.is_empty();
            // While something is decoded, or waits to be taken, the client may well wait.
            let deadline = if live.decoding.is_some() || live.diarizing.is_some() || has_pending {
                ends
            } else {
                idle.min(ends)
            };
            tokio::select! {
                biased;
                heard = next(&mut live.decoding) => {
                    live.decoding = None;
                    live.heard(heard);
                    idle = Instant::now() + idle_timeout;
                }
                diarized = next(&mut live.diarizing) => {
                    if let Err(why) = live.diarized(diarized) {
                        let why = format!("speakers are no longer distinguished: {why}");
                        self.tell_error("server_error", Refused::new("server_error", why), None).await?;
                    }
                    idle = Instant::now() + idle_timeout;
                }
                () = tokio::task::yield_now(), if has_pending && has_room => {
                    let block = live.pending.split_to(live.pending.len().min(BLOCK));
                    self.take_audio(&mut live, &block).await?;
                    idle = Instant::now() + idle_timeout;
                }
                () = sleep_until(deadline) => {
                    if let Some(ending) = ending.take() {
                        return self.end(ending).await;
                    }
                    let refused = if Instant::now() >= ends {
                        let why = format!("the session lasted {} s, which is the limit", settings.max_session);
                        Refused::new("session_expired", why)
                    } else {
                        Refused::new("idle_timeout", format!("nothing came for {} s", settings.idle_timeout))
                    };
                    ending = Some(Ending::by_rule(close_code::NORMAL, refused));
                    ends = Instant::now() + LAST_WORDS;
                }
                message = self.socket.recv(), if ending.is_none() && has_room && !has_pending => {
                    match message {
                        None | Some(Ok(Message::Close(_))) => return Ok(()),
                        // Signs of life of the connection, not of the client.
                        Some(Ok(Message::Pong(_))) => continue,
                        Some(Ok(Message::Ping(_))) => {
                            self.flush().await?;
                            continue;
                        }
                        Some(Ok(Message::Binary(bytes))) => live.pending = bytes,
                        Some(Ok(Message::Text(text))) => self.follow(&mut live, &text).await?,
                        Some(Err(error)) => {
                            // Most often a message that is too large; what comes after it cannot be read.
                            let why = format!("the connection cannot be read on: {error}");
                            let refused = Refused::new("invalid_message", why);
                            return self.end(Ending::by_rule(close_code::SIZE, refused)).await;
                        }
                    }
                    idle = Instant::now() + idle_timeout;
                }
                () = sleep(STOP_CHECK), if ending.is_none() => {}
            }
        }
    }

    /// Does what an event of the client asks for, or tells why not.
    async fn follow(&mut self, live: &mut Live, text: &str) -> Result<(), End> {
        let (id, event) = ClientEvent::parse(text);
        let followed = match event {
            Ok(ClientEvent::Update { update, older, ignored }) => match live.update(*update).await {
                Ok(()) => {
                    let updated = if older {
                        "transcription_session.updated"
                    } else {
                        "session.updated"
                    };
                    let mut answer = live.to_json(&self.id, older);
                    if !ignored.is_empty() {
                        answer["ignored"] = json!(ignored);
                    }
                    return self.send(updated, answer).await;
                }
                Err(refused) => Err(refused),
            },
            Ok(ClientEvent::Append(bytes)) => {
                live.pending = bytes.into();
                Ok(())
            }
            Ok(ClientEvent::Commit) => live.commit(),
            Ok(ClientEvent::Clear) => match live.clear() {
                Ok(()) => return self.send("input_audio_buffer.cleared", json!({})).await,
                Err(refused) => Err(refused),
            },
            Err(refused) => Err(refused),
        };
        match followed {
            Ok(()) => Ok(()),
            Err(refused) => self.tell_error("invalid_request_error", refused, id).await,
        }
    }

    /// Gives a block of audio to the session.
    async fn take_audio(&mut self, live: &mut Live, block: &[u8]) -> Result<(), End> {
        live.ask_for_model().await;
        live.samples.clear();
        live.audio.feed(block, &mut live.samples);
        if let Err(error) = live.session.feed(&live.samples) {
            // Whole numbers of 16 bits are samples, whatever they are.
            self.tell_error("server_error", Refused::new("server_error", error.to_string()), None)
                .await?;
        }
        Ok(())
    }

    fn item(&self, number: u64) -> String {
        format!("item_{}_{number}", self.id)
    }

    /// Tells the client what the session says.
    async fn tell(&mut self, event: SessionEvent, config: &SessionConfig) -> Result<(), End> {
        let milliseconds = |seconds: f64| (seconds * 1000.0).round() as u64;
        match event {
            SessionEvent::SpeechStarted { item, at } => {
                let fields = json!({"audio_start_ms": milliseconds(at), "item_id": self.item(item)});
                self.send("input_audio_buffer.speech_started", fields).await
            }
            SessionEvent::SpeechStopped { item, at } => {
                let fields = json!({"audio_end_ms": milliseconds(at), "item_id": self.item(item)});
                self.send("input_audio_buffer.speech_stopped", fields).await
            }
            SessionEvent::Committed { item } => {
                let id = self.item(item);
                let before = self.last_item.replace(id.clone());
                let fields = json!({"previous_item_id": before, "item_id": id});
                self.send("input_audio_buffer.committed", fields).await?;
                let kind = if self.older {
                    "conversation.item.created"
                } else {
                    "conversation.item.added"
                };
                let fields = json!({"previous_item_id": before, "item": {
                    "id": id,
                    "object": "realtime.item",
                    "type": "message",
                    "status": "completed",
                    "role": "user",
                    "content": [{"type": "input_audio", "transcript": null}],
                }});
                self.send(kind, fields).await
            }
            SessionEvent::Delta {
                item,
                text,
                tokens,
                first,
            } => {
                let mut fields = json!({"item_id": self.item(item), "content_index": 0, "delta": text});
                if config.logprobs {
                    fields["logprobs"] = logprobs(&tokens, first);
                }
                self.send("conversation.item.input_audio_transcription.delta", fields)
                    .await
            }
            SessionEvent::Partial { item, text } => {
                if !config.partials {
                    return Ok(());
                }
                let fields = json!({"item_id": self.item(item), "content_index": 0, "partial": text});
                self.send("conversation.item.input_audio_transcription.partial", fields)
                    .await
            }
            SessionEvent::Completed { item, transcript } => {
                let mut fields = json!({
                    "item_id": self.item(item),
                    "content_index": 0,
                    "transcript": transcript.text,
                    "usage": {"type": "duration", "seconds": transcript.seconds},
                });
                if config.words {
                    fields["words"] = json!(transcript.words);
                    fields["languages"] = json!(transcript.languages);
                }
                if config.logprobs {
                    fields["logprobs"] = logprobs(&transcript.tokens, true);
                }
                if let Some(boosted) = &transcript.boosted {
                    fields["boosted"] = json!(boosted);
                }
                if !transcript.warnings.is_empty() {
                    fields["warnings"] = json!(transcript.warnings);
                }
                self.send("conversation.item.input_audio_transcription.completed", fields)
                    .await
            }
            SessionEvent::Segment { item, segment } => {
                self.segments += 1;
                // As the times of words are written: whole milliseconds.
                let seconds = |time: f64| (time * 1000.0).round() / 1000.0;
                let mut fields = json!({
                    "item_id": self.item(item),
                    "content_index": 0,
                    "id": format!("seg_{:03}", self.segments),
                    "start": seconds(segment.start),
                    "end": seconds(segment.end),
                    "text": segment.text,
                    "speaker": segment.speaker,
                });
                if config.words {
                    fields["words"] = json!(segment.words);
                }
                self.send("conversation.item.input_audio_transcription.segment", fields)
                    .await
            }
            SessionEvent::Failed { item, error } => {
                let error = ApiError::from(error).envelope();
                let fields = json!({"item_id": self.item(item), "content_index": 0, "error": error["error"]});
                self.send("conversation.item.input_audio_transcription.failed", fields)
                    .await
            }
        }
    }

    /// Tells of an error; `of` is the id of the client's event.
    async fn tell_error(&mut self, kind: &str, refused: Refused, of: Option<String>) -> Result<(), End> {
        let Refused { code, message, param } = refused;
        let error = json!({"type": kind, "code": code, "message": message, "param": param, "event_id": of});
        self.send("error", json!({"error": error})).await
    }

    /// Tells why the connection is to be closed.
    async fn end(&mut self, ending: Ending) -> Result<(), End> {
        let Ending { code, kind, refused } = ending;
        let reason = refused.code;
        self.tell_error(kind, refused, None).await?;
        Err(End { code, reason })
    }

    /// Sends an event with its type and a new id.
    async fn send(&mut self, kind: &str, mut event: Value) -> Result<(), End> {
        self.events += 1;
        event["type"] = kind.into();
        event["event_id"] = format!("event_{}_{}", self.id, self.events).into();
        match timeout(SEND_TIMEOUT, self.socket.send(Message::text(event.to_string()))).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(GONE),
        }
    }

    /// Sends the answer to a ping, before another one is read: those that a client does not take would fill the memory.
    async fn flush(&mut self) -> Result<(), End> {
        match timeout(SEND_TIMEOUT, self.socket.flush()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(GONE),
        }
    }

    /// Closes the connection, unless the client did, and waits a little for the other side, so that what was said last is read.
    async fn close(&mut self, end: Option<End>) {
        let closed = async {
            if let Some(End { code, reason }) = end {
                let reason = reason.into();
                let frame = CloseFrame { code, reason };
                if self.socket.send(Message::Close(Some(frame))).await.is_err() {
                    return;
                }
            }
            while let Some(Ok(_)) = self.socket.recv().await {}
        };
        // Who does not answer is left.
        let _ = timeout(CLOSE_TIMEOUT, closed).await;
    }
}

impl Live {
    fn new(
        settings: &LiveSettings,
        models: KnownModels,
        model: Option<String>,
        decoder: Arc<dyn Decoder>,
    ) -> Result<Live, Refused> {
        let mut config = SessionConfig::default();
        config.set_model(model, &models, "model")?;
        let network = SileroVad::shared().map_err(|why| Refused::new("server_error", why.to_string()))?;
        let audio = WireAudio::new(config.format);
        Ok(Live {
            session: Session::new(network, settings, config.turn_detection),
            settings: settings.clone(),
            audio: audio.map_err(|error| Refused::new("server_error", error.to_string()))?,
            config,
            asked: Arc::default(),
            models,
            expires_at: chrono::Utc::now().timestamp() + settings.max_session as i64,
            pending: Bytes::new(),
            decoding: None,
            knows_model: false,
            listener: None,
            decoder,
            diarizer: None,
            diarizing: None,
            samples: Vec::new(),
        })
    }

    /// The fields of an event that tells of the session.
    fn to_json(&self, id: &str, older: bool) -> Value {
        let default_model = self.models.names.first().map_or("", String::as_str);
        let id = format!("sess_{id}");
        json!({"session": self.config.to_json(&id, default_model, self.expires_at, older)})
    }

    async fn update(&mut self, update: SessionUpdate) -> Result<(), Refused> {
        let config = self.config.updated(update, &self.models)?;
        let style = self.decoder.text_style(&config.options.decoding);
        let style = style.map_err(|error| {
            let field = match &error {
                EngineError::Field { field, .. } => field,
                _ => "language",
            };
            Refused::value(&format!("session.audio.input.transcription.{field}"), error.to_string())
        })?;
        let is_same = config.options.has_same_speakers(&self.config.options);
        if config.speakers != self.config.speakers || !is_same {
            self.set_speakers(&config).await?;
            // It stands, also where what follows is refused.
            self.config.speakers = config.speakers;
            self.config.options = config.options.clone();
        }
        if config.format != self.audio.format() {
            let audio = WireAudio::new(config.format);
            let audio = audio.map_err(|error| Refused::new("invalid_value", error.to_string()))?;
            self.flush()?;
            self.audio = audio;
        }
        self.knows_model &= (&config.model, config.latency) == (&self.config.model, self.config.latency)
            && config.options.decoding == *self.asked;
        self.session.set_turn_detection(config.turn_detection);
        self.session.set_style(style);
        self.asked = Arc::new(config.options.decoding.clone());
        self.config = config;
        Ok(())
    }

    /// Says who speaks, or not any more.
    async fn set_speakers(&mut self, config: &SessionConfig) -> Result<(), Refused> {
        let wanted = config.speakers;
        let refused = |why: String| Refused::value("session.include", why);
        if self.session.has_begun() {
            let why = "speaker diarization must be requested before the first audio";
            return Err(refused(why.to_owned()));
        }
        self.diarizer = None;
        if wanted {
            let references = config.options.clone().take_references();
            let known = match references.is_empty() {
                true => Vec::new(),
                false => self
                    .decoder
                    .voices(references)
                    .await
                    .map_err(|error| refused(error.to_string()))?,
            };
            let mut settings = self.settings.speakers();
            let most = config.options.clusters.most.unwrap_or(settings.max_speakers);
            settings.max_speakers = settings.max_speakers.min(most);
            let diarizer = self.decoder.online_diarizer(settings, known);
            let diarizer = diarizer.ok_or_else(|| refused(EngineError::NotDiarizing.to_string()))?;
            self.diarizer = Some(diarizer.map_err(|error| refused(error.to_string()))?);
        }
        self.session
            .set_speakers(wanted.then(|| WordSpeakers::new(&self.settings)));
        Ok(())
    }

    /// Learns how the model hears and what it makes of the options, before it is to hear something. Why it cannot be loaded, its first
    /// turn says.
    async fn ask_for_model(&mut self) {
        if !self.knows_model {
            let (model, accepted) = (self.config.model.clone(), self.accepted_latency());
            let latency = self.decoder.latency(model.clone(), accepted).await;
            let requested = self.decoder.requested(model, Arc::clone(&self.asked)).await;
            self.knows_model = latency.is_ok() && requested.is_ok();
            self.session.set_latency(latency.ok().flatten());
            self.session.set_requested(requested.unwrap_or_default());
        }
    }

    fn accepted_latency(&self) -> Option<f64> {
        self.config.latency.or(self.settings.latency)
    }

    fn decode(&mut self, request: DecodeRequest) {
        let (decoder, model) = (Arc::clone(&self.decoder), self.config.model.clone());
        let asked = Arc::clone(&self.asked);
        let answer: BoxFuture<'static, Answer> = match request.spoken {
            None => Box::pin(async move { Answer::Window(decode(decoder, (model, asked), request).await) }),
            Some(part) => {
                let listener = self.listener.take().filter(|_| !part.begins);
                if listener.is_some() || part.begins {
                    let next = decoder.hear(model, self.accepted_latency(), listener, asked, request);
                    Box::pin(async move { Answer::Next(Box::new(next.await)) })
                } else {
                    let lost = EngineError::Failed("what was heard of the turn before is lost".to_owned());
                    Box::pin(async move { Answer::Next(Box::new(Err(lost))) })
                }
            }
        };
        self.decoding = Some(answer);
    }

    fn heard(&mut self, answer: Answer) {
        match answer {
            Answer::Window(heard) => self.session.heard(heard),
            Answer::Next(heard) => {
                let next = heard.map(|(listener, next)| {
                    self.listener = Some(listener);
                    next
                });
                self.session.heard_next(next);
            }
        }
    }

    /// Gives the diarizer what it is to hear, if it is not at work.
    fn diarize(&mut self) {
        let Some(diarizer) = self.diarizer.take() else { return };
        match self.session.speakers().and_then(WordSpeakers::next_request) {
            Some(request) => self.diarizing = Some(diarize(diarizer, request)),
            None => self.diarizer = Some(diarizer),
        }
    }

    /// Takes what the diarizer decided.
    fn diarized(&mut self, diarized: Result<(OnlineDiarizer, Decided), String>) -> Result<(), String> {
        self.diarizing = None;
        let Some(speakers) = self.session.speakers() else {
            return Ok(());
        };
        match diarized {
            Ok((diarizer, decided)) => {
                speakers.decided(decided, diarizer.decided_until());
                self.diarizer = Some(diarizer);
                Ok(())
            }
            Err(why) => {
                speakers.failed();
                Err(why)
            }
        }
    }

    fn commit(&mut self) -> Result<(), Refused> {
        self.flush()?;
        self.session.commit().map_err(|_| {
            let why = "there is no audio to be committed, or no speech in it where the server detects turns";
            Refused::new("input_audio_buffer_commit_empty", why)
        })
    }

    fn clear(&mut self) -> Result<(), Refused> {
        self.flush()?;
        self.session.clear();
        Ok(())
    }

    /// Gives the session what the resampler holds back, and forgets half a sample.
    fn flush(&mut self) -> Result<(), Refused> {
        self.samples.clear();
        self.audio.flush(&mut self.samples);
        let fed = self.session.feed(&self.samples);
        fed.map_err(|error| Refused::new("server_error", error.to_string()))
    }
}

/// What comes of it, once there is something at work.
async fn next<T>(running: &mut Option<BoxFuture<'static, T>>) -> T {
    match running {
        Some(running) => running.await,
        None => std::future::pending().await,
    }
}

/// Lets a diarizer hear samples, on a thread that may compute for long.
fn diarize(mut diarizer: OnlineDiarizer, request: DiarizeRequest) -> Diarizing {
    let hear = move || {
        let mut decided = diarizer.feed(&request.samples)?;
        if request.settle {
            decided.append(diarizer.settle()?);
        }
        Ok((diarizer, decided))
    };
    Box::pin(async move {
        let heard: Result<flow_speakers::Result<_>, _> = tokio::task::spawn_blocking(hear).await;
        let heard = heard.map_err(|error| error.to_string())?;
        heard.map_err(|error| error.to_string())
    })
}

/// Decodes a window; one that grows no more is tried again while the engine is busy.
async fn decode(
    decoder: Arc<dyn Decoder>,
    (model, asked): (Option<String>, Arc<DecodingRequest>),
    request: DecodeRequest,
) -> Result<Heard, EngineError> {
    if !request.is_final {
        return decoder.decode(model, asked, request).await;
    }
    for _ in 1..TRIES {
        match decoder.decode(model.clone(), Arc::clone(&asked), request.clone()).await {
            Err(EngineError::Busy { retry_after }) => sleep(Duration::from_secs(retry_after.clamp(1, 5))).await,
            heard => return heard,
        }
    }
    decoder.decode(model, asked, request).await
}

#[cfg(test)]
#[path = "socket_tests.rs"]
mod tests;
