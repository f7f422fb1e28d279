//! Who may call the service.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;

use crate::service::{PATIENCE, Service, content_type, form, recording, settings, shared};

#[test]
fn keys_are_needed_where_there_are_any() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.txt");
    fs::write(&keys, "# the team's\nsk-first\nsk-second\n").unwrap();
    let mut settings = settings();
    settings.http.keys = Some(keys);
    settings.http.cors = vec!["https://App.example".to_owned()];
    settings.http.accept_any_model = true;
    let service = Service::start(settings);

    for open in [
        "/",
        "/page-transcribe.js",
        "/health",
        "/ready",
        "/v1/health/live",
        "/v1/health/ready",
    ] {
        assert_eq!(service.get(open).status, 200, "{open}");
    }
    let body = form(Some(&recording("eval0_en-us.wav")), &[("model", "whisper-1")]);
    let post = |headers: &[(&str, &str)]| service.post("/v1/audio/transcriptions", &content_type(), &body, headers);
    let missing = post(&[]);
    assert_eq!((missing.status, missing.error().0.as_str()), (401, "missing_api_key"));
    assert_eq!(missing.header("www-authenticate"), Some("Bearer"));
    let wrong = post(&[("Authorization", "Bearer sk-third")]);
    assert_eq!((wrong.status, wrong.error().0.as_str()), (401, "invalid_api_key"));
    assert!(!wrong.text.contains("sk-"), "{}", wrong.text);
    // Any name of a model is taken here.
    let done = post(&[("Authorization", "Bearer sk-second")]);
    assert_eq!(done.status, 200, "{}", done.text);
    for path in [
        "/metrics",
        "/v1/models",
        "/v1/models/small",
        "/openapi.json",
        "/version",
        "/nothing",
        "/v1/realtime",
    ] {
        assert_eq!(service.get(path).status, 401, "{path}");
        let answer = service.get_with(path, &[("Authorization", "Bearer sk-first")]);
        assert_ne!(answer.status, 401, "{path}");
    }

    // A browser gives its key to a WebSocket in another way.
    let upgraded = |key: &str| {
        let mut stream = TcpStream::connect(service.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = format!(
            "GET /v1/realtime?intent=transcription HTTP/1.1\r\nHost: speech.example\r\nConnection: Upgrade\r\n\
             Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
             Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.{key}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        String::from_utf8_lossy(&status).into_owned()
    };
    assert_eq!(upgraded("sk-first"), "HTTP/1.1 101");
    assert_eq!(upgraded("sk-third"), "HTTP/1.1 401");

    // A page that is listed may call, and learns that before it sends its key; others may not.
    let asked = |origin: &str| {
        let head = format!(
            "OPTIONS /v1/audio/transcriptions HTTP/1.1\r\nHost: speech.example\r\nOrigin: {origin}\r\n\
             Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,x-stainless-os\r\n\
             Connection: close\r\n\r\n"
        );
        service.raw(head.as_bytes()).to_lowercase()
    };
    let allowed = asked("https://app.example");
    assert!(allowed.starts_with("http/1.1 200"), "{allowed}");
    assert!(
        allowed.contains("access-control-allow-origin: https://app.example"),
        "{allowed}"
    );
    assert!(allowed.contains("authorization,x-stainless-os"), "{allowed}");
    assert!(!asked("https://evil.example").contains("access-control-allow-origin"));
}

#[test]
fn a_local_service_without_keys_answers_to_its_own_names_and_pages() {
    let service = shared();
    let asked = |head: &str| {
        let text = service.raw(format!("GET /v1/models HTTP/1.1\r\n{head}Connection: close\r\n\r\n").as_bytes());
        text.lines().next().unwrap_or_default().to_owned()
    };
    let port = service.address.port();
    assert!(asked(&format!("Host: localhost:{port}\r\n")).contains("200"));
    assert!(
        asked(&format!(
            "Host: 127.0.0.1:{port}\r\nOrigin: http://127.0.0.1:{port}\r\n"
        ))
        .contains("200")
    );
    assert!(asked("Host: evil.example\r\n").contains("403"));
    assert!(asked(&format!("Host: localhost:{port}\r\nOrigin: http://evil.example\r\n")).contains("403"));
    assert!(asked(&format!("Host: localhost:{port}\r\nOrigin: null\r\n")).contains("403"));
    assert!(asked("").contains("40"), "a request without a host is refused");
    let twice = format!("Host: localhost:{port}\r\nHost: localhost:{port}\r\n");
    assert!(asked(&twice).contains("400"), "RFC 9112, 3.2");
}

#[test]
fn a_service_answers_to_the_address_that_it_tells() {
    let mut settings = settings();
    settings.http.listen = "127.0.0.2:0".to_owned();
    let service = Service::start(settings);
    assert!(service.url.starts_with("http://127.0.0.2:"), "{}", service.url);
    assert_eq!(service.get("/v1/models").status, 200);
    let other = service.raw(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.3\r\nConnection: close\r\n\r\n");
    assert!(other.starts_with("HTTP/1.1 403"), "{other}");
}

#[test]
fn https_is_spoken_with_a_certificate() {
    let tls = |name: &str| {
        std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/tls")
            .join(name)
    };
    let mut settings = settings();
    settings.http.tls_cert = Some(tls("cert.pem"));
    settings.http.tls_key = Some(tls("key.pem"));
    let service = Service::start(settings);
    assert!(service.url.starts_with("https://"));
    let answer = service.transcribe(Some(&recording("eval0_en-us.wav")), &[]);
    assert_eq!(answer.status, 200, "{}", answer.text);
    // Whoever does not speak TLS gets no answer.
    assert!(
        !service
            .raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            .contains("HTTP/1.1")
    );
}
