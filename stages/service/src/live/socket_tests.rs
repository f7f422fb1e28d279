use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::http::StatusCode;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use candle_core::{DType, Device};
use flow_transcription::Word;
use flow_transcription::boosted::PhraseIndex;
use flow_transcription::recognizer::Recognizer;
use futures::StreamExt;
use http_body_util::BodyExt;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::Message as ClientMessage;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};
use tower::ServiceExt;

use super::*;
use crate::engine::{Engine, EngineSettings, ModelSettings};
use crate::live::protocol::{LOGPROBS, PARTIALS, WORDS};
use crate::live::session_event::Requested;
use crate::live::test_data::{Oracle, recording, root, talk};

#[path = "socket_speakers_tests.rs"]
mod speakers;

/// Nothing here takes as long, however slow the machine.
const LONG: Duration = Duration::from_secs(600);

fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async { timeout(LONG, test).await.expect("the test hangs") })
}

/// What is heard in samples.
type Hear = fn(&[f32]) -> Result<Heard, EngineError>;

/// Hears by a function of the samples.
struct Fake<F>(F);

impl<F: Fn(&[f32]) -> Result<Heard, EngineError> + Send + Sync + 'static> Decoder for Fake<F> {
    fn models(&self) -> Vec<String> {
        vec!["small".into(), "large".into()]
    }

    fn is_stopping(&self) -> bool {
        false
    }

    fn decode(
        &self,
        _: Option<String>,
        _: Arc<DecodingRequest>,
        request: DecodeRequest,
    ) -> BoxFuture<'static, Result<Heard, EngineError>> {
        Box::pin(std::future::ready((self.0)(&request.samples)))
    }
}

/// A word for each half second.
fn count(samples: &[f32]) -> Result<Heard, EngineError> {
    let words = (0..samples.len() / 8_000).map(|index| Word {
        word: format!("w{index}"),
        start: index as f64 / 2.0,
        end: index as f64 / 2.0 + 0.25,
        confidence: Some(0.5),
        speaker: None,
    });
    Ok(Heard {
        words: words.collect(),
        ..Heard::default()
    })
}

fn counting() -> Fake<Hear> {
    Fake(count)
}

async fn serve(decoder: impl Decoder, settings: LiveSettings) -> String {
    settings.check().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = routes(Arc::new(decoder), settings);
    tokio::spawn(async move { axum::serve(listener, router).await });
    format!("ws://{address}{PATH}")
}

struct Client {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
}

impl Client {
    async fn connect(url: &str, headers: &[(&'static str, &'static str)]) -> Client {
        let mut request = url.into_client_request().unwrap();
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        let (socket, _) = connect_async(request).await.unwrap();
        Client { socket }
    }

    async fn send(&mut self, event: Value) {
        self.socket.send(ClientMessage::text(event.to_string())).await.unwrap();
    }

    async fn append(&mut self, bytes: &[u8]) {
        let audio = STANDARD.encode(bytes);
        self.send(json!({"type": "input_audio_buffer.append", "audio": audio}))
            .await;
    }

    /// The next event; none when the server closes, with its code.
    async fn next(&mut self) -> Result<Value, u16> {
        loop {
            match self.socket.next().await {
                Some(Ok(ClientMessage::Text(text))) => return Ok(serde_json::from_str(&text).unwrap()),
                Some(Ok(ClientMessage::Close(frame))) => return Err(frame.map_or(0, |frame| frame.code.into())),
                Some(Ok(_)) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// The next event, which is of a type.
    async fn expect(&mut self, kind: &str) -> Value {
        let event = self.next().await.unwrap();
        assert_eq!(event["type"], kind, "{event}");
        assert!(event["event_id"].is_string(), "{event}");
        event
    }

    /// The first event of a type.
    async fn wait_for(&mut self, kind: &str) -> Value {
        loop {
            let event = self.next().await.unwrap();
            if event["type"] == kind {
                return event;
            }
        }
    }
}

fn pcm(samples: &[f32]) -> Vec<u8> {
    let numbers = samples.iter().map(|sample| (sample * 32_768.0) as i16);
    numbers.flat_map(i16::to_le_bytes).collect()
}

#[test]
fn a_talk_is_transcribed_while_it_is_spoken() {
    let oracle = Oracle::new(talk());
    let (expected, bytes) = (oracle.text(), pcm(&oracle.recording));
    // Where the window is, its samples say.
    let decoder = Fake(move |samples: &[f32]| {
        let starts = (0..oracle.recording.len()).step_by(512);
        // What a short window was filled up with is not looked at.
        let used = samples
            .iter()
            .rposition(|sample| *sample != 0.0)
            .map_or(0, |last| last + 1);
        let is_here = |start: &usize| oracle.recording[*start..].starts_with(&samples[..used]);
        let start = starts.into_iter().find(is_here).expect("a window of the recording") as u64;
        let samples = samples.to_vec();
        Ok(oracle.hear(&DecodeRequest {
            samples,
            start,
            speech: Vec::new(),
            is_final: true,
            spoken: None,
        }))
    });
    run(async {
        let url = serve(decoder, LiveSettings::default()).await;
        let mut client = Client::connect(&format!("{url}?intent=transcription"), &[]).await;
        let created = client.expect("session.created").await;
        assert_eq!(created["session"]["audio"]["input"]["format"]["rate"], 24_000);
        assert_eq!(created["session"]["audio"]["input"]["transcription"]["model"], "small");
        let update = json!({"type": "transcription", "include": [PARTIALS, WORDS], "audio": {"input": {
            "format": {"type": "audio/pcm", "rate": 16_000}, "transcription": {"model": "large"},
        }}});
        client.send(json!({"type": "session.update", "session": update})).await;
        let updated = client.expect("session.updated").await;
        assert_eq!(updated["session"]["audio"]["input"]["transcription"]["model"], "large");
        // Events and plain bytes in turn, which may end within a sample.
        for (number, block) in bytes.chunks(3_201).enumerate() {
            if number % 2 == 0 {
                client.append(block).await;
            } else {
                client.socket.send(ClientMessage::binary(block.to_vec())).await.unwrap();
            }
        }
        let (mut deltas, mut texts, mut partials) = (String::new(), Vec::new(), 0);
        let mut turn = Vec::new();
        while texts.join(" ") != expected {
            let event = client.next().await.unwrap();
            let kind = event["type"].as_str().unwrap().to_owned();
            match &kind[..] {
                "conversation.item.input_audio_transcription.delta" => {
                    deltas.push_str(event["delta"].as_str().unwrap())
                }
                "conversation.item.input_audio_transcription.partial" => partials += 1,
                "conversation.item.input_audio_transcription.completed" => {
                    let text = event["transcript"].as_str().unwrap();
                    assert_eq!(deltas, text);
                    deltas.clear();
                    let words = event["words"].as_array().unwrap().iter();
                    let words: Vec<&str> = words.map(|word| word["word"].as_str().unwrap()).collect();
                    assert_eq!(words.join(" "), text);
                    assert_eq!(event["languages"], json!(["hi"]));
                    assert!(event["usage"]["seconds"].as_f64().unwrap() > 0.0);
                    if !text.is_empty() {
                        texts.push(text.to_owned());
                    }
                    assert!(expected.starts_with(&texts.join(" ")), "{texts:?}");
                }
                "input_audio_buffer.speech_started" => turn = vec![event["item_id"].clone()],
                "input_audio_buffer.speech_stopped" => turn.push(event["item_id"].clone()),
                "input_audio_buffer.committed" => turn.push(event["item_id"].clone()),
                "conversation.item.added" => {
                    turn.push(event["item"]["id"].clone());
                    assert!(turn.len() == 4 && turn.iter().all(|item| *item == turn[0]), "{turn:?}");
                }
                _ => panic!("{event}"),
            }
        }
        assert!(partials > 0);
    });
}

#[test]
fn older_clients_commit_and_clear_by_hand_and_errors_end_nothing() {
    run(async {
        let url = serve(counting(), LiveSettings::default()).await;
        let mut client = Client::connect(&url, &[("openai-beta", "realtime=v1")]).await;
        let created = client.expect("transcription_session.created").await;
        assert_eq!(created["session"]["input_audio_format"], "pcm16");
        client
            .send(json!({"type": "transcription_session.update", "session": {
                "turn_detection": null, "input_audio_noise_reduction": {"type": "near_field"},
            }}))
            .await;
        let updated = client.expect("transcription_session.updated").await;
        assert_eq!(updated["ignored"], json!(["session.input_audio_noise_reduction"]));
        client
            .send(json!({"type": "input_audio_buffer.commit", "event_id": "mine"}))
            .await;
        let error = client.expect("error").await;
        assert_eq!(error["error"]["code"], "input_audio_buffer_commit_empty");
        assert_eq!(error["error"]["event_id"], "mine");
        for (message, code) in [
            (ClientMessage::text("no JSON"), "invalid_json"),
            (
                ClientMessage::text(json!({"type": "input_audio_buffer.commit", "final": true}).to_string()),
                "unknown_parameter",
            ),
            (
                ClientMessage::text(json!({"type": "response.create"}).to_string()),
                "unknown_event",
            ),
            (
                ClientMessage::text(json!({"type": "input_audio_buffer.append", "audio": "~"}).to_string()),
                "invalid_value",
            ),
        ] {
            client.socket.send(message).await.unwrap();
            assert_eq!(client.expect("error").await["error"]["code"], code);
        }
        // Two seconds that are forgotten, and 1.5 s that are not: 24 kHz.
        client.append(&vec![0; 2 * 48_000]).await;
        client.send(json!({"type": "input_audio_buffer.clear"})).await;
        client.wait_for("input_audio_buffer.cleared").await;
        client.append(&vec![0; 72_000]).await;
        client.send(json!({"type": "input_audio_buffer.commit"})).await;
        let committed = client.wait_for("input_audio_buffer.committed").await;
        assert_eq!(committed["previous_item_id"], Value::Null);
        let item = client.expect("conversation.item.created").await["item"].clone();
        assert_eq!(item["id"], committed["item_id"]);
        let completed = client
            .wait_for("conversation.item.input_audio_transcription.completed")
            .await;
        assert_eq!(completed["item_id"], committed["item_id"]);
        assert_eq!(completed["transcript"], "w0 w1 w2");
        // To two frames of voice activity.
        assert!(
            (completed["usage"]["seconds"].as_f64().unwrap() - 1.5).abs() < 0.065,
            "{completed}"
        );
        assert_eq!(completed["words"], Value::Null);
        // The next item knows the one before.
        client.append(&vec![0; 48_000]).await;
        client.send(json!({"type": "input_audio_buffer.commit"})).await;
        let next = client.wait_for("input_audio_buffer.committed").await;
        assert_eq!(next["previous_item_id"], committed["item_id"]);
    });
}

/// Hears as [`counting`] does, with a model that makes this of every request.
struct Boosting(Requested);

impl Decoder for Boosting {
    fn models(&self) -> Vec<String> {
        counting().models()
    }

    fn is_stopping(&self) -> bool {
        false
    }

    fn requested(
        &self,
        _: Option<String>,
        decoding: Arc<DecodingRequest>,
    ) -> BoxFuture<'static, Result<Requested, EngineError>> {
        let requested = match decoding.phrases.is_empty() {
            true => Requested::default(),
            false => self.0.clone(),
        };
        Box::pin(async move { Ok(requested) })
    }

    fn decode(
        &self,
        model: Option<String>,
        asked: Arc<DecodingRequest>,
        request: DecodeRequest,
    ) -> BoxFuture<'static, Result<Heard, EngineError>> {
        counting().decode(model, asked, request)
    }
}

#[test]
fn sessions_say_what_phrases_did_and_which_have_no_effect() {
    run(async {
        let requested = Requested {
            phrases: Some(PhraseIndex::of(&["w1 w2".to_owned(), "w9".to_owned()])),
            warnings: vec!["1 phrase is not boosted".to_owned()],
        };
        let url = serve(Boosting(requested), LiveSettings::default()).await;
        let mut client = Client::connect(&url, &[]).await;
        // Options change within a session; a turn says what those of its end do.
        for (phrases, count) in [(json!([]), None), (json!(["w1 w2"]), Some(1)), (Value::Null, None)] {
            let input = json!({"transcription": {"phrases": phrases}, "turn_detection": null});
            client
                .send(json!({"type": "session.update", "session": {"audio": {"input": input}}}))
                .await;
            client.wait_for("session.updated").await;
            client.append(&vec![0; 72_000]).await;
            client.send(json!({"type": "input_audio_buffer.commit"})).await;
            let completed = client
                .wait_for("conversation.item.input_audio_transcription.completed")
                .await;
            let boosted = &completed["boosted"]["phrases"];
            assert_eq!(boosted[0]["count"].as_u64(), count, "{completed}");
            assert_eq!(boosted.as_array().map(Vec::len), count.map(|_| 1), "{completed}");
            assert_eq!(completed["warnings"].is_array(), count.is_some(), "{completed}");
            if count.is_some() {
                let begin = completed["boosted"]["phrases"][0]["times"][0].as_f64().unwrap();
                assert!(begin > 1.5, "since the beginning of the session: {completed}");
            }
        }
    });
}

#[test]
fn telephones_speak_eight_thousand_samples_a_second() {
    run(async {
        let url = serve(counting(), LiveSettings::default()).await;
        for format in ["audio/pcmu", "audio/pcma"] {
            let mut client = Client::connect(&url, &[]).await;
            let input = json!({"format": {"type": format}, "turn_detection": null});
            client
                .send(json!({"type": "session.update", "session": {"audio": {"input": input}}}))
                .await;
            client.wait_for("session.updated").await;
            client.append(&[0x55; 8_000]).await;
            client.send(json!({"type": "input_audio_buffer.commit"})).await;
            let completed = client
                .wait_for("conversation.item.input_audio_transcription.completed")
                .await;
            assert_eq!(completed["transcript"], "w0 w1", "{format}");
        }
    });
}

#[test]
fn a_decoder_that_fails_is_an_event() {
    run(async {
        let failing = Fake(|_: &[f32]| Err(EngineError::Failed("it broke".into())));
        let url = serve(failing, LiveSettings::default()).await;
        let mut client = Client::connect(&url, &[]).await;
        client
            .send(json!({"type": "session.update", "session": {"turn_detection": null}}))
            .await;
        for _ in 0..2 {
            client.append(&[0; 96_000]).await;
            client.send(json!({"type": "input_audio_buffer.commit"})).await;
            let failed = client
                .wait_for("conversation.item.input_audio_transcription.failed")
                .await;
            assert_eq!(failed["error"]["message"], "it broke");
            // As in the answers to requests.
            assert_eq!(failed["error"]["code"], "internal_error");
            assert_eq!(failed["error"]["type"], "server_error");
        }
    });
}

#[test]
fn sessions_messages_and_silence_have_limits() {
    run(async {
        let settings = LiveSettings {
            max_sessions: 1,
            max_message: 4_096,
            ..LiveSettings::default()
        };
        let url = serve(counting(), settings).await;
        let mut first = Client::connect(&url, &[]).await;
        first.expect("session.created").await;
        let mut second = Client::connect(&url, &[]).await;
        assert_eq!(second.expect("error").await["error"]["code"], "too_many_sessions");
        assert_eq!(second.next().await, Err(1013));
        // Too large: told, and closed.
        first.append(&[0; 8_000]).await;
        assert_eq!(first.expect("error").await["error"]["code"], "invalid_message");
        assert_eq!(first.next().await, Err(1009));
        drop(first);
        // Its place is free, as soon as the server has seen it go.
        loop {
            let mut third = Client::connect(&url, &[]).await;
            if third.next().await.unwrap()["type"] == "session.created" {
                break;
            }
        }

        let settings = LiveSettings {
            idle_timeout: 0.2,
            ..LiveSettings::default()
        };
        let url = serve(counting(), settings).await;
        let mut client = Client::connect(&url, &[]).await;
        assert_eq!(client.wait_for("error").await["error"]["code"], "idle_timeout");
        assert_eq!(client.next().await, Err(1000));

        let settings = LiveSettings {
            max_session: 1.0,
            ..LiveSettings::default()
        };
        let url = serve(counting(), settings).await;
        let mut client = Client::connect(&url, &[]).await;
        assert_eq!(client.wait_for("error").await["error"]["code"], "session_expired");
    });
}

#[test]
fn a_client_that_pings_and_reads_nothing_is_not_read_on() {
    const PING: usize = 125;
    run(async {
        let url = serve(counting(), LiveSettings::default()).await;
        let mut client = Client::connect(&url, &[]).await;
        client.expect("session.created").await;
        let MaybeTlsStream::Plain(stream) = client.socket.get_mut() else {
            panic!("no TLS is asked for");
        };
        // A masked frame, by a mask of zeros.
        let mut frame = vec![0x89, 0x80 | PING as u8, 0, 0, 0, 0];
        frame.resize(frame.len() + PING, 0);
        let frames = frame.repeat(1_000);
        let mut sent = 0;
        // All that the two sockets hold is a few MiB; what else was sent is in the memory of the server.
        while let Ok(written) = timeout(Duration::from_secs(3), stream.write_all(&frames)).await {
            written.unwrap();
            sent += frames.len();
            assert!(sent < 256 << 20, "all of it is read, and the answers are kept");
        }
    });
}

#[test]
fn other_intents_and_models_are_refused() {
    run(async {
        let url = serve(counting(), LiveSettings::default()).await;
        let refused = connect_async(format!("{url}?intent=conversation")).await.unwrap_err();
        assert!(refused.to_string().contains("400"), "{refused}");
        let mut client = Client::connect(&format!("{url}?model=whisper-1"), &[]).await;
        let error = client.expect("error").await;
        assert_eq!(error["error"]["code"], "model_not_found");
        assert!(error["error"]["message"].as_str().unwrap().contains("small, large"));
        assert_eq!(client.next().await, Err(1008));
        let any = LiveSettings {
            accept_any_model: true,
            ..LiveSettings::default()
        };
        let url = serve(counting(), any).await;
        let mut client = Client::connect(&format!("{url}?model=whisper-1"), &[]).await;
        client.expect("session.created").await;
    });
}

#[test]
fn requests_that_are_no_websockets_are_refused_as_others_are() {
    run(async {
        let routes = routes(Arc::new(counting()), LiveSettings::default());
        for path in [PATH.to_owned(), format!("{PATH}?model=small&model=large")] {
            let request = axum::http::Request::get(path).body(axum::body::Body::empty()).unwrap();
            let response = routes.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status(), StatusCode::BAD_REQUEST);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let body: Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(body["error"]["type"], "invalid_request_error");
            assert!(!body["error"]["message"].as_str().unwrap().is_empty());
        }
    });
}

#[test]
fn browsers_say_by_subprotocols_what_others_say_in_headers() {
    let mut headers = HeaderMap::new();
    assert_eq!(api_key_of_subprotocols(&headers), None);
    let offered = "realtime, openai-insecure-api-key.abc";
    headers.insert(header::SEC_WEBSOCKET_PROTOCOL, offered.parse().unwrap());
    assert_eq!(api_key_of_subprotocols(&headers), Some("abc"));
    run(async {
        let url = serve(counting(), LiveSettings::default()).await;
        let offered = (
            "sec-websocket-protocol",
            "realtime, openai-insecure-api-key.abc, openai-beta.realtime-v1",
        );
        let mut client = Client::connect(&url, &[offered]).await;
        client.expect("transcription_session.created").await;
    });
}

/// Says that the service is being stopped once it has heard something.
struct Stopping {
    hears: Fake<Hear>,
    stops: Arc<AtomicBool>,
}

impl Decoder for Stopping {
    fn models(&self) -> Vec<String> {
        self.hears.models()
    }

    fn is_stopping(&self) -> bool {
        self.stops.load(Ordering::SeqCst)
    }

    fn decode(
        &self,
        model: Option<String>,
        asked: Arc<DecodingRequest>,
        request: DecodeRequest,
    ) -> BoxFuture<'static, Result<Heard, EngineError>> {
        self.stops.store(true, Ordering::SeqCst);
        self.hears.decode(model, asked, request)
    }
}

/// A client, which commits by hand, of a service that is stopped once it has heard something, or once the flag is set.
async fn stoppable(hears: Hear, settings: LiveSettings) -> (Client, Arc<AtomicBool>) {
    let stops = Arc::new(AtomicBool::new(false));
    let decoder = Stopping {
        hears: Fake(hears),
        stops: Arc::clone(&stops),
    };
    let mut client = Client::connect(&serve(decoder, settings).await, &[]).await;
    client
        .send(json!({"type": "session.update", "session": {"turn_detection": null}}))
        .await;
    client.wait_for("session.updated").await;
    (client, stops)
}

/// The service says what it heard, and closes because it is being stopped.
async fn expect_stop(mut client: Client, transcript: &str) {
    let completed = client
        .wait_for("conversation.item.input_audio_transcription.completed")
        .await;
    assert_eq!(completed["transcript"], transcript);
    assert_eq!(client.wait_for("error").await["error"]["code"], "server_stopping");
    assert_eq!(client.next().await, Err(1001));
}

#[test]
fn a_service_that_is_stopped_says_what_it_heard() {
    run(async {
        let (mut client, _) = stoppable(count, LiveSettings::default()).await;
        // The first second is decoded as part of an item; after that the service stops.
        client.append(&vec![0; 48_000]).await;
        client.send(json!({"type": "input_audio_buffer.commit"})).await;
        expect_stop(client, "w0 w1").await;
    });
}

#[test]
fn a_service_that_is_stopped_says_what_it_heard_also_where_nothing_comes_any_more() {
    run(async {
        let (mut client, stops) = stoppable(count, LiveSettings::default()).await;
        client.append(&vec![0; 48_000]).await;
        // The audio is taken before this is answered. Silence is not decoded before it is committed.
        client.send(json!({"type": "none"})).await;
        assert_eq!(client.wait_for("error").await["error"]["code"], "unknown_event");
        stops.store(true, Ordering::SeqCst);
        expect_stop(client, "w0 w1").await;
    });
}

/// A word for each frame whose samples are a number: that of the frame, as 16 bits.
fn frame_numbers(samples: &[f32]) -> Result<Heard, EngineError> {
    let frames = samples.chunks_exact(512).map(|frame| (frame[0] * 32_768.0) as u32);
    let words = (0u32..).zip(frames).filter(|(_, number)| *number > 0);
    let words = words.map(|(index, number)| Word {
        word: number.to_string(),
        start: f64::from(index) * 0.032,
        end: f64::from(index) * 0.032 + 0.016,
        ..Word::default()
    });
    Ok(Heard {
        words: words.collect(),
        ..Heard::default()
    })
}

#[test]
fn a_service_that_is_stopped_says_all_of_a_message_that_is_longer_than_the_buffer() {
    run(async {
        let settings = LiveSettings {
            max_buffer: 1.0,
            max_window: 2.0,
            ..LiveSettings::default()
        };
        let (mut client, _) = stoppable(frame_numbers, settings).await;
        let input = json!({"format": {"type": "audio/pcm", "rate": 16_000}});
        client
            .send(json!({"type": "session.update", "session": {"audio": {"input": input}}}))
            .await;
        client.wait_for("session.updated").await;
        // Ten seconds: after the first window of two the service stops.
        let numbers: Vec<i16> = (1..=313).collect();
        let samples = numbers.iter().flat_map(|number| [number.to_le_bytes(); 512]);
        client
            .socket
            .send(ClientMessage::binary(samples.flatten().collect::<Vec<u8>>()))
            .await
            .unwrap();
        let words: Vec<String> = numbers.iter().map(i16::to_string).collect();
        expect_stop(client, &words.join(" ")).await;
    });
}

#[test]
fn a_session_that_is_ended_by_a_limit_says_what_it_heard() {
    run(async {
        let settings = LiveSettings {
            idle_timeout: 3.0,
            ..LiveSettings::default()
        };
        let url = serve(counting(), settings).await;
        let mut client = Client::connect(&url, &[]).await;
        client
            .send(json!({"type": "session.update", "session": {"turn_detection": null}}))
            .await;
        client.append(&vec![0; 48_000]).await;
        let completed = client
            .wait_for("conversation.item.input_audio_transcription.completed")
            .await;
        assert_eq!(completed["transcript"], "w0 w1");
        assert_eq!(client.expect("error").await["error"]["code"], "idle_timeout");
        assert_eq!(client.next().await, Err(1000));
    });
}

#[test]
fn a_byte_that_is_cleared_does_not_shift_those_after_it() {
    let loud = Fake(|samples: &[f32]| {
        // A last frame is filled up with silence.
        let is_whole = samples.iter().take(16_000).all(|sample| *sample == 0.5);
        let word = Word {
            word: if is_whole { "whole" } else { "shifted" }.into(),
            ..Word::default()
        };
        Ok(Heard {
            words: vec![word],
            ..Heard::default()
        })
    });
    run(async {
        let url = serve(loud, LiveSettings::default()).await;
        let mut client = Client::connect(&url, &[]).await;
        let input = json!({"format": {"type": "audio/pcm", "rate": 16_000}, "turn_detection": null});
        client
            .send(json!({"type": "session.update", "session": {"audio": {"input": input}}}))
            .await;
        client.append(&[0xff; 641]).await;
        client.send(json!({"type": "input_audio_buffer.clear"})).await;
        client.append(&[0x00, 0x40].repeat(16_000)).await;
        client.send(json!({"type": "input_audio_buffer.commit"})).await;
        let completed = client
            .wait_for("conversation.item.input_audio_transcription.completed")
            .await;
        assert_eq!(completed["transcript"], "whole");
    });
}

/// By the engine and the bundled model: a recording that is committed is heard as the model hears it alone.
#[test]
fn the_engine_transcribes_live() {
    let model = root().join("configs/models/small.nemo");
    let mut samples = recording("rec_hi_0001_000.flac");
    let bytes = pcm(&samples);
    samples.resize(samples.len().next_multiple_of(512), 0.0);
    let recognizer = Recognizer::load(&model, DType::F32, &Device::Cpu).unwrap();
    let heard = recognizer.decode(&[&samples]).unwrap().remove(0);
    let words: Vec<&str> = heard.words.iter().map(|word| word.word.trim()).collect();
    let engine = Engine::start(EngineSettings {
        models: vec![ModelSettings {
            name: "small".into(),
            path: model,
            language_prior: None,
        }],
        ..EngineSettings::default()
    });
    let engine = engine.unwrap();
    run(async {
        // No window is decoded while it grows.
        let settings = LiveSettings {
            decode_interval: 60.0,
            ..LiveSettings::default()
        };
        let url = serve(engine, settings).await;
        let mut client = Client::connect(&url, &[]).await;
        let input = json!({"format": {"type": "audio/pcm", "rate": 16_000}, "turn_detection": null});
        client
            .send(json!({"type": "session.update", "session": {"audio": {"input": input}, "include": [LOGPROBS]}}))
            .await;
        let numbers = json!({"transcription": {"numbers": "digits"}});
        client
            .send(json!({"type": "session.update", "session": {"audio": {"input": numbers}}}))
            .await;
        let refused = client.wait_for("error").await;
        assert_eq!(refused["error"]["param"], "session.audio.input.transcription.numbers");
        for block in bytes.chunks(640) {
            client.append(block).await;
        }
        client.send(json!({"type": "input_audio_buffer.commit"})).await;
        let completed = client
            .wait_for("conversation.item.input_audio_transcription.completed")
            .await;
        assert_eq!(completed["transcript"], words.join(" "));
        assert!(!words.is_empty());
        // Numbers that are read from a text are off by a last digit.
        let expected: Value = serde_json::from_str(&logprobs(&heard.tokens, true).to_string()).unwrap();
        assert_eq!(completed["logprobs"], expected);
    });
}

/// Each sample goes through a cache-aware model once, in parts of the latency that the client asks for.
#[test]
fn a_cache_aware_model_hears_what_is_spoken() {
    let path = root().join("tests/data/golden/streaming/model.nemo");
    let place = std::env::current_exe().unwrap().with_file_name("golden-socket");
    let path = flow_nn::testing::unpacked_copy(&path, &place).unwrap();
    let audio = root().join("tests/data/golden/streaming/audio/eval0_en-gb.wav");
    let speech = flow_audio::samples::samples(&flow_storage::Storage::default(), &audio, 100.0)
        .unwrap()
        .unwrap();
    let recognizer = Recognizer::load(&path, DType::F32, &Device::Cpu).unwrap();
    let context = recognizer.context_for(Some(0.2)).unwrap();
    // A committed turn is whole frames of voice activity.
    let mut filled = speech.clone();
    filled.resize(speech.len().next_multiple_of(512), 0.0);
    let mut listener = recognizer.listen(context, &DecodingRequest::default()).unwrap();
    let spoken = &mut [flow_transcription::recognizer::listen::Spoken {
        listener: &mut listener,
        samples: &filled,
        is_last: true,
    }];
    let expected = recognizer.hear_next(spoken).unwrap().remove(0).heard.words;
    let model = ModelSettings {
        name: "streaming".to_owned(),
        path,
        language_prior: None,
    };
    let engine = Engine::start(EngineSettings {
        models: vec![model],
        ..EngineSettings::default()
    });
    let engine = engine.unwrap();
    run(async {
        let mut client = Client::connect(&serve(engine, LiveSettings::default()).await, &[]).await;
        let update = |latency: f64| {
            json!({"type": "session.update", "session": {"include": [PARTIALS, WORDS], "audio": {"input": {
                "format": {"type": "audio/pcm", "rate": 16_000}, "turn_detection": null,
                "transcription": {"latency_ms": latency},
            }}}})
        };
        client.send(update(1.0)).await;
        let refused = client.wait_for("error").await;
        assert_eq!(
            refused["error"]["param"],
            "session.audio.input.transcription.latency_ms"
        );
        client.send(update(200.0)).await;
        client.wait_for("session.updated").await;
        for _ in 0..2 {
            for block in pcm(&speech).chunks(6_400) {
                client.append(block).await;
            }
            client.send(json!({"type": "input_audio_buffer.commit"})).await;
            let (mut text, mut partials) = (String::new(), 0);
            let completed = loop {
                let event = client.next().await.unwrap();
                match event["type"].as_str().unwrap() {
                    "conversation.item.input_audio_transcription.delta" => {
                        text.push_str(event["delta"].as_str().unwrap());
                    }
                    "conversation.item.input_audio_transcription.partial" => partials += 1,
                    "conversation.item.input_audio_transcription.completed" => break event,
                    _ => {}
                }
            };
            let words: Vec<&str> = expected.iter().map(|word| word.word.trim()).collect();
            assert_eq!((&text, &completed["transcript"]), (&words.join(" "), &json!(text)));
            assert!(partials > 10 && words.len() > 3);
        }
    });
}
