//! The Wyoming protocol, as Home Assistant speaks it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};

use serde_json::{Value, json};

use super::service::{PATIENCE, Service, long_recording, recording, settings, wait};

fn service() -> Service {
    let mut settings = settings();
    settings.http.wyoming = Some("127.0.0.1:0".to_owned());
    settings.http.max_upload = 1 << 20;
    Service::start(settings)
}

struct Client(BufReader<TcpStream>);

impl Client {
    fn new(service: &Service) -> Self {
        let stream = TcpStream::connect(service.wyoming.unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(BufReader::new(stream))
    }

    fn raw(&mut self, bytes: &[u8]) {
        // The service may have closed the connection.
        let _ = self.0.get_mut().write_all(bytes);
    }

    /// An event whose data are in its line.
    fn send(&mut self, kind: &str, data: &Value, payload: &[u8]) {
        let line = json!({"type": kind, "data": data, "payload_length": payload.len()});
        self.raw(format!("{line}\n").as_bytes());
        self.raw(payload);
    }

    /// The type and the data of the next event.
    fn next(&mut self) -> (String, Value) {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        let head: Value = serde_json::from_str(&line).unwrap();
        let mut data = vec![0; head["data_length"].as_u64().unwrap() as usize];
        self.0.read_exact(&mut data).unwrap();
        let data = serde_json::from_slice(&data).unwrap();
        (head["type"].as_str().unwrap().to_owned(), data)
    }

    fn speak(&mut self, samples: &[u8]) {
        let format = json!({"rate": 16_000, "width": 2, "channels": 1});
        self.send("audio-start", &format, b"");
        for chunk in samples.chunks(3_001) {
            self.send("audio-chunk", &format, chunk);
        }
        self.send("audio-stop", &json!({}), b"");
    }
}

#[test]
fn events_are_answered_with_the_transcript() {
    let service = service();
    let mut client = Client::new(&service);
    client.raw(b"{\"type\": \"describe\"}\n");
    let (kind, information) = client.next();
    let model = &information["asr"][0]["models"][0];
    assert_eq!((kind.as_str(), &model["name"]), ("info", &json!("small")));
    assert!(model["languages"].as_array().unwrap().contains(&json!("hi")), "{model}");
    client.send("ping", &json!({"text": "x"}), b"");
    assert_eq!(client.next(), ("pong".to_owned(), json!({"text": "x"})));

    // Twice on one connection; further data behind the line; an unknown event before.
    let wav = recording("eval3_es.wav");
    client.send("voice-started", &json!({}), b"abc");
    client.raw(b"{\"type\": \"transcribe\", \"data_length\": 41}\n{\"name\": \"small\", \"language\": \"hi\"}      ");
    for fields in [&[("language", "hi")][..], &[]] {
        let said = service.transcribe(Some(&wav), fields).json()["text"].clone();
        assert!(said.as_str().unwrap().len() > 10);
        client.speak(&wav[44..]);
        let (kind, transcript) = client.next();
        assert_eq!((kind.as_str(), &transcript["text"]), ("transcript", &said));
    }
}

#[test]
fn wrong_events_are_refused_and_hold_nothing_up() {
    let service = service();
    let audio = json!({"rate": 16_000, "width": 2, "channels": 1});
    let pcm = |rate: u64| json!({"type": "audio-start", "data": {"rate": rate, "width": 2, "channels": 1}}).to_string();
    let start = pcm(16_000);
    let chunk = json!({"type": "audio-chunk", "data": audio, "payload_length": 2}).to_string();
    let too_much = {
        let chunk = json!({"type": "audio-chunk", "data": audio, "payload_length": 1 << 19}).to_string();
        let chunk = [chunk.as_bytes(), b"\n", &vec![0; 1 << 19]].concat();
        [start.as_bytes(), b"\n", &chunk, &chunk].concat()
    };
    for (bytes, why) in [
        (b"GET / HTTP/1.1\r\n".to_vec(), "not a JSON object"),
        (b"[]\n".to_vec(), "not a JSON object"),
        (b"{}\n".to_vec(), "`type`"),
        (vec![b' '; 1 << 20], "16 KiB"),
        (b"{\"type\": \"x\", \"payload_length\": -1}\n".to_vec(), "`payload_length`"),
        (b"{\"type\": \"x\", \"payload_length\": 99999999999}\n".to_vec(), "`payload_length`"),
        (b"{\"type\": \"x\", \"data_length\": 2}\n[]".to_vec(), "not a JSON object"),
        (b"{\"type\": \"audio-chunk\"}\n".to_vec(), "before `audio-start`"),
        (b"{\"type\": \"audio-stop\"}\n".to_vec(), "before `audio-start`"),
        (b"{\"type\": \"audio-start\"}\n".to_vec(), "`rate`"),
        (format!("{}\n", pcm(u64::MAX)).into_bytes(), "`rate`"),
        (format!("{start}\n{{\"type\": \"audio-stop\"}}\n").into_bytes(), ""),
        (b"{\"type\": \"transcribe\", \"data\": {\"language\": \"klingon\"}}\n".to_vec(), "`language`"),
        (
            format!("{{\"type\": \"transcribe\", \"data\": {{\"name\": \"large\"}}}}\n{start}\n{chunk}\n..{{\"type\": \"audio-stop\"}}\n").into_bytes(),
            "large",
        ),
        (
            format!("{start}\n{}\n..", chunk.replace("16000", "8000")).into_bytes(),
            "another format",
        ),
        (too_much, "more than 1048576 bytes"),
    ] {
        let mut client = Client::new(&service);
        client.raw(&bytes);
        let (kind, data) = client.next();
        // Of no sound nothing was said.
        let expected = if why.is_empty() { "transcript" } else { "error" };
        assert_eq!(kind, expected, "{data}");
        assert!(data["text"].as_str().unwrap().contains(why), "{data}");
    }
    // Those that go away within an event, or with a transcript on its way.
    for bytes in [&b"{\"type\""[..], b"{\"type\": \"x\", \"payload_length\": 9}\nabc"] {
        let mut client = Client::new(&service);
        client.raw(bytes);
        client.0.get_mut().shutdown(Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        client.0.read_to_end(&mut rest).unwrap();
    }
    let cancelled = "flow_transcriptions_total{outcome=\"cancelled\"}";
    let before = service.metric(cancelled);
    let mut client = Client::new(&service);
    client.speak(&long_recording(15)[44..]);
    drop(client);
    wait(|| service.metric(cancelled) == before + 1.0);
    assert_eq!(service.metric("flow_queued_requests"), 0.0);

    // One that waits for the next event when the service stops.
    let mut client = Client::new(&service);
    client.send("ping", &json!({}), b"");
    assert_eq!(client.next().0, "pong");
    service.stop.stop();
    assert!(client.next().1["text"].as_str().unwrap().contains("stopped"));
}
