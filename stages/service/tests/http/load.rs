//! Many requests, clients that go, and the end of the service.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::thread;

use flow_service::http::{ServeError, ServeSettings, Server};
use flow_storage::Storage;

use crate::service::{PATIENCE, Service, content_type, form, long_recording, recording, settings, wait};

/// Seconds of a recording that is transcribed for longer than it takes to send a few requests.
const LONG: usize = 1200;

#[test]
fn a_full_queue_says_when_to_come_back_and_a_client_that_goes_makes_room() {
    let mut settings = settings();
    settings.engine.max_queue = 1;
    settings.http.log_requests = true;
    let lines = Arc::new(Mutex::new(Vec::new()));
    let log = {
        let lines = Arc::clone(&lines);
        Arc::new(move |line: &str| lines.lock().unwrap().push(line.to_owned()))
    };
    let service = Service::start_with_log(settings, log);
    let body = form(Some(&long_recording(LONG)), &[]);
    let mut client = TcpStream::connect(service.address).unwrap();
    let head = format!(
        "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n",
        service.address,
        content_type(),
        body.len()
    );
    client.write_all(head.as_bytes()).unwrap();
    client.write_all(&body).unwrap();
    wait(|| service.metric("flow_queued_requests") == 1.0);

    let audio = recording("eval0_en-us.wav");
    let busy = service.transcribe(Some(&audio), &[]);
    assert_eq!((busy.status, busy.error().0.as_str()), (429, "rate_limit_exceeded"));
    assert!(busy.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    assert_eq!(service.metric("flow_transcriptions_total{outcome=\"busy\"}"), 1.0);

    drop(client);
    wait(|| service.metric("flow_queued_requests") == 0.0);
    let done = service.transcribe(Some(&audio), &[]);
    assert_eq!(done.status, 200, "{}", done.text);
    let outcome = |name: &str| service.metric(&format!("flow_transcriptions_total{{outcome=\"{name}\"}}"));
    wait(|| outcome("done") + outcome("cancelled") == 2.0);
    assert_eq!(outcome("done"), 1.0, "the client that went has no transcript");
    // Only that of the client who asks is open.
    wait(|| service.metric("flow_connections") == 1.0);
    let lines = lines.lock().unwrap();
    for status in ["null", "429", "200"] {
        let is_line = |line: &&String| {
            line.contains("/v1/audio/transcriptions") && line.contains(&format!("\"status\":{status},"))
        };
        assert_eq!(lines.iter().filter(is_line).count(), 1, "{status}: {lines:?}");
    }
    assert!(lines.iter().all(|line| !line.contains("talk")), "{lines:?}");
}

#[test]
fn an_upload_is_not_read_while_the_queue_is_full() {
    let mut settings = settings();
    settings.engine.max_queue = 1;
    let service = Service::start(settings);
    let body = form(Some(&long_recording(LONG)), &[]);
    let head = |length: usize, more: &str| {
        format!(
            "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: {}\r\nContent-Type: {}\r\nContent-Length: {length}\r\n{more}\r\n",
            service.address,
            content_type()
        )
    };
    let mut client = TcpStream::connect(service.address).unwrap();
    client.write_all(head(body.len(), "").as_bytes()).unwrap();
    client.write_all(&body).unwrap();
    wait(|| service.metric("flow_queued_requests") == 1.0);
    // A client that asks first is not told to go on.
    let answer = service.raw(head(body.len(), "Expect: 100-continue\r\n").as_bytes());
    assert!(answer.starts_with("HTTP/1.1 429"), "{answer}");
    // One that does not has its answer while nothing of its body has come.
    let answer = service.raw(head(body.len(), "").as_bytes());
    assert!(answer.starts_with("HTTP/1.1 429"), "{answer}");
    assert!(answer.to_lowercase().contains("retry-after:"), "{answer}");
    drop(client);
}

#[test]
fn many_clients_at_once_are_served() {
    let service = Arc::new(Service::start(settings()));
    let audio = Arc::new(recording("eval1_de.wav"));
    let alone = service.transcribe(Some(&audio), &[]).json();
    let clients: Vec<_> = (0..12)
        .map(|_| {
            let (service, audio) = (Arc::clone(&service), Arc::clone(&audio));
            thread::spawn(move || service.transcribe(Some(&audio), &[]).json())
        })
        .collect();
    for client in clients {
        assert_eq!(client.join().unwrap(), alone);
    }
}

#[test]
fn a_service_that_is_stopped_finishes_what_it_took() {
    let mut settings = settings();
    settings.http.drain_timeout = 600.0;
    let service = Service::start(settings);
    let client = {
        let body = form(Some(&long_recording(LONG)), &[]);
        let url = format!("{}/v1/audio/transcriptions", service.url);
        thread::spawn(move || {
            let request = Service::agent().post(url).header("Content-Type", content_type());
            let mut response = request.send(&body[..]).unwrap();
            (
                response.status().as_u16(),
                response.body_mut().read_to_string().unwrap(),
            )
        })
    };
    wait(|| service.metric("flow_queued_requests") == 1.0);
    service.stop.stop();
    wait(|| service.get("/ready").status == 503);
    let refused = service.transcribe(Some(&recording("eval0_en-us.wav")), &[]);
    assert_eq!((refused.status, refused.error().0.as_str()), (503, "server_stopping"));
    assert!(refused.header("retry-after").is_some());
    assert_eq!(service.get("/health").status, 200);

    let (status, text) = client.join().unwrap();
    assert_eq!(status, 200, "{text}");
    service.join().unwrap();
}

#[test]
fn an_upload_that_is_under_way_is_refused_when_the_service_is_stopped() {
    let service = Service::start(settings());
    let mut client = TcpStream::connect(service.address).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = format!(
        "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: {}\r\nContent-Type: {}\r\nContent-Length: 100000\r\n\
         Expect: 100-continue\r\n\r\n",
        service.address,
        content_type(),
    );
    client.write_all(head.as_bytes()).unwrap();
    // The body is waited for.
    let mut status = [0; 12];
    client.read_exact(&mut status).unwrap();
    assert_eq!(&status, b"HTTP/1.1 100");
    service.stop.stop();
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    assert!(
        text.contains("HTTP/1.1 503") && text.contains("server_stopping"),
        "{text}"
    );
    service.join().unwrap();
}

#[test]
fn a_model_that_cannot_be_loaded_ends_the_service() {
    let uploads = tempfile::tempdir().unwrap();
    let mut settings = settings();
    settings.http.upload_folder = Some(uploads.path().to_owned());
    settings.engine.models[0].path = uploads.path().join("no-model.nemo");
    let server = Server::bind(&Storage::default(), settings, "1", Arc::new(|_| {})).unwrap();
    let error = server.serve().unwrap_err();
    assert!(matches!(error, ServeError::Engine(_)), "{error}");
    assert!(error.to_string().contains("no-model.nemo"), "{error}");
}

#[test]
fn settings_that_cannot_be_used_are_named() {
    let told = |settings: ServeSettings| {
        Server::bind(&Storage::default(), settings, "1", Arc::new(|_| {}))
            .err()
            .unwrap()
            .to_string()
    };
    let mut wrong = settings();
    wrong.http.upload_folder = Some("/nowhere/at/all".into());
    assert!(told(wrong).contains("/nowhere/at/all"));
    let mut wrong = settings();
    wrong.http.keys = Some("/nowhere/keys.txt".into());
    assert!(told(wrong).contains("/nowhere/keys.txt"));
    let mut wrong = settings();
    wrong.live.max_sessions = 0;
    assert!(told(wrong).starts_with("setting `live.max_sessions`: it is 0; "));

    let mut public = settings();
    public.http.listen = "0.0.0.0:0".to_owned();
    let server = Server::bind(&Storage::default(), public, "1", Arc::new(|_| {})).unwrap();
    assert_eq!(server.warnings().len(), 2);
    let local = Server::bind(&Storage::default(), settings(), "1", Arc::new(|_| {})).unwrap();
    assert_eq!(local.warnings(), Vec::<String>::new());
}
