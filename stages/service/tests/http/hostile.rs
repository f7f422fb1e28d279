//! What clients send by mistake or on purpose.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use crate::service::{PATIENCE, Service, content_type, end, form, part, recording, settings, shared, wait};

const PATH: &str = "/v1/audio/transcriptions";

#[test]
fn wrong_forms_are_told_what_is_wrong() {
    let service = shared();
    let audio = recording("eval0_en-us.wav");
    let long = "x".repeat(64 << 10);
    for (fields, status, code, param) in [
        (&[("model", "whisper-1")][..], 404, "model_not_found", "model"),
        (&[("model", long.as_str())], 400, "string_above_max_length", "model"),
        (
            &[("model", "small"), ("model", "small")],
            400,
            "duplicate_parameter",
            "model",
        ),
        (&[("response_format", "docx")], 400, "invalid_value", "response_format"),
        (&[("temperature", "NaN")], 400, "invalid_value", "temperature"),
        (&[("temperature", "1e400")], 400, "invalid_value", "temperature"),
        (&[("temperature", "-1")], 400, "invalid_value", "temperature"),
        (&[("stream", "maybe")], 400, "invalid_value", "stream"),
        (
            &[("stream", "true"), ("response_format", "srt")],
            400,
            "unsupported_value",
            "stream",
        ),
        (
            &[("timestamp_granularities[]", "word")],
            400,
            "invalid_value",
            "timestamp_granularities[]",
        ),
        (
            &[
                ("timestamp_granularities[]", "letter"),
                ("response_format", "verbose_json"),
            ],
            400,
            "invalid_value",
            "timestamp_granularities[]",
        ),
        (&[("include[]", "secrets")], 400, "invalid_value", "include[]"),
        (
            &[("chunking_strategy", "{\"type\":")],
            400,
            "invalid_value",
            "chunking_strategy",
        ),
    ] {
        let answer = service.transcribe(Some(&audio), fields);
        let (found, of) = answer.error();
        assert_eq!(
            (answer.status, found.as_str(), of.as_deref()),
            (status, code, Some(param)),
            "{}",
            answer.text
        );
    }
    // The names that there are.
    let unknown = service.transcribe(Some(&audio), &[("model", "whisper-1")]);
    assert!(
        unknown.json()["error"]["message"].as_str().unwrap().contains("small"),
        "{}",
        unknown.text
    );

    for (file, code) in [(None, "missing_required_parameter"), (Some(&b""[..]), "empty_file")] {
        let answer = service.transcribe(file, &[]);
        assert_eq!(
            (answer.status, answer.error()),
            (400, (code.to_owned(), Some("file".to_owned())))
        );
    }
    let text = service.transcribe(Some(b"this is not a recording, but a text"), &[]);
    assert_eq!((text.status, text.error().1.as_deref()), (400, Some("file")));
    assert!(
        !text.text.contains("/tmp"),
        "paths of the server are its own: {}",
        text.text
    );
    let rttm = service.send("/v1/audio/diarizations", Some(&audio), &[("response_format", "srt")]);
    assert_eq!((rttm.status, rttm.error().0.as_str()), (400, "unsupported_value"));
}

/// What programs send that fill in a form which has every field.
#[test]
fn fields_without_a_value_are_not_given() {
    let service = shared();
    let audio = recording("eval0_en-us.wav");
    let names = [
        "model",
        "response_format",
        "timestamp_granularities[]",
        "stream",
        "diarize",
        "temperature",
        "language",
        "prompt",
        "include[]",
        "chunking_strategy",
    ];
    let empty = service.transcribe(Some(&audio), &names.map(|name| (name, "")));
    assert_eq!(empty.status, 200, "{}", empty.text);
    assert_eq!(
        empty.json()["text"],
        service.transcribe(Some(&audio), &[]).json()["text"]
    );
}

#[test]
fn a_compressed_body_is_refused_by_its_encoding() {
    let service = shared();
    let whole = form(Some(&recording("eval0_en-us.wav")), &[]);
    let send = |encoding| service.post(PATH, &content_type(), &whole, &[("Content-Encoding", encoding)]);
    let answer = send("gzip");
    assert_eq!(
        (answer.status, answer.error().0.as_str()),
        (415, "unsupported_encoding")
    );
    assert_eq!(send("identity").status, 200);
}

#[test]
fn forms_of_no_client_are_refused() {
    let service = shared();
    let audio = recording("eval0_en-us.wav");
    let refused = |body: &[u8], status: u16, code: &str| {
        let answer = service.post(PATH, &content_type(), body, &[]);
        assert_eq!(
            (answer.status, answer.error().0.as_str()),
            (status, code),
            "{}",
            answer.text
        );
    };
    let mut two = Vec::new();
    part(&mut two, "name=\"file\"; filename=\"a.wav\"", &audio);
    part(&mut two, "name=\"file\"; filename=\"b.wav\"", &audio);
    end(&mut two);
    refused(&two, 400, "duplicate_parameter");
    let mut many = Vec::new();
    for _ in 0..10_000 {
        part(&mut many, "name=\"a\"", b"b");
    }
    end(&mut many);
    refused(&many, 400, "invalid_form");
    let mut no_text = Vec::new();
    part(&mut no_text, "name=\"model\"", b"\xff\xfe");
    end(&mut no_text);
    refused(&no_text, 400, "invalid_value");
    let mut endless_head = Vec::new();
    part(&mut endless_head, &format!("name=\"{}\"", "a".repeat(100_000)), b"");
    refused(&endless_head, 400, "invalid_form");
    let whole = form(Some(&audio), &[]);
    refused(&whole[..whole.len() - 30], 400, "invalid_form");
    refused(b"", 400, "invalid_form");
    refused(b"{\"model\": \"small\"}", 400, "invalid_form");
    for content_type in ["application/json", "multipart/form-data", "multipart/mixed; boundary=a"] {
        let answer = service.post(PATH, content_type, &whole, &[]);
        assert_eq!(
            (answer.status, answer.error().0.as_str()),
            (415, "no_form"),
            "{content_type}"
        );
    }
    // A name is text: nothing was written beside the folder of uploads, and the recording is transcribed.
    let answer = service.post(PATH, &content_type(), &whole, &[]);
    assert_eq!(answer.status, 200, "{}", answer.text);
}

#[test]
fn requests_that_are_no_http_end_their_connection_alone() {
    let service = shared();
    let host = format!("Host: {}\r\n", service.address);
    for bytes in [
        "\0\0\0\0".to_owned(),
        "GET\r\n\r\n".to_owned(),
        format!("POST {PATH} HTTP/1.1\r\n{host}Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef"),
        format!("POST {PATH} HTTP/1.1\r\n{host}Content-Length: -1\r\n\r\n"),
        format!("POST {PATH} HTTP/1.1\r\n{host}Transfer-Encoding: chunked\r\n\r\nZZ\r\n"),
        format!("GET /{} HTTP/1.1\r\n{host}\r\n", "a".repeat(100_000)),
        format!("GET / HTTP/1.1\r\n{host}{}\r\n", "A: b\r\n".repeat(10_000)),
    ] {
        let answer = service.raw(bytes.as_bytes());
        let line = answer.lines().next().unwrap_or_default();
        let status = line
            .strip_prefix("HTTP/1.1 ")
            .and_then(|rest| rest.get(..3))
            .map(|code| code.parse::<u16>());
        assert!(matches!(status, None | Some(Ok(400..=499))), "{bytes:.60}: {line}");
    }
    assert_eq!(service.get("/health").status, 200);
}

#[test]
fn bodies_are_bounded_in_size_and_time() {
    let mut settings = settings();
    settings.http.max_upload = 100_000;
    settings.http.upload_timeout = 1.0;
    // The tests' own clients have to send their heads in this time, too, whatever else runs.
    settings.http.header_timeout = 5.0;
    let service = Service::start(settings);
    let host = format!("Host: {}\r\nContent-Type: {}\r\n", service.address, content_type());

    let large = vec![0; 300_000];
    let refused = service.transcribe(Some(&large), &[]);
    assert_eq!((refused.status, refused.error().0.as_str()), (413, "request_too_large"));
    // A client that asks first is told before it sends anything.
    let head = format!("POST {PATH} HTTP/1.1\r\n{host}Content-Length: 300000\r\nExpect: 100-continue\r\n\r\n");
    let answer = service.raw(head.as_bytes());
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");

    // Chunks without an end.
    let mut stream = TcpStream::connect(service.address).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let head = format!("POST {PATH} HTTP/1.1\r\n{host}Transfer-Encoding: chunked\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut chunk = b"10000\r\n".to_vec();
    chunk.extend_from_slice(&[b'a'; 0x10000]);
    chunk.extend_from_slice(b"\r\n");
    let mut written = 0_u64;
    while stream.write_all(&chunk).is_ok() {
        written += 0x10000;
        assert!(written < 1 << 40, "the server reads for ever");
    }
    drop(stream);

    // A body that does not come, and a head that does not.
    let head = format!("POST {PATH} HTTP/1.1\r\n{host}Content-Length: 50000\r\n\r\n--");
    let answer = service.raw(head.as_bytes());
    assert!(
        answer.starts_with("HTTP/1.1 408") && answer.contains("request_timeout"),
        "{answer}"
    );
    let answer = service.raw(b"GET /health HTTP/1.1\r\nHost: loc");
    assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");

    // A body that breaks off: there is nobody to answer to, and nothing is left behind.
    let mut stream = TcpStream::connect(service.address).unwrap();
    let head = format!("POST {PATH} HTTP/1.1\r\n{host}Content-Length: 50000\r\n\r\n--");
    stream.write_all(head.as_bytes()).unwrap();
    drop(stream);
    let mut one = [0; 1];
    let mut stream = TcpStream::connect(service.address).unwrap();
    stream
        .write_all(format!("GET /health HTTP/1.1\r\nHost: {}\r\n\r\n", service.address).as_bytes())
        .unwrap();
    assert_eq!(stream.read(&mut one).unwrap(), 1);
    assert_eq!(service.metric("flow_queued_requests"), 0.0);
}

#[test]
fn clients_that_say_nothing_keep_the_last_places_for_seconds_alone() {
    let mut settings = settings();
    settings.http.max_connections = 4;
    settings.http.header_timeout = 10_000.0;
    let service = Service::start(settings);
    // Only that of the client who asks is open.
    wait(|| service.metric("flow_connections") == 1.0);
    let mut silent: Vec<TcpStream> = (0..3).map(|_| TcpStream::connect(service.address).unwrap()).collect();
    let begin = Instant::now();
    let answer = service.raw(b"GET /health HTTP/1.1\r\nHost: loc");
    assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(begin.elapsed() < PATIENCE, "the last place is taken for ever");
    // The place is free again, and who came while there were others has the whole time.
    assert_eq!(service.get("/health").status, 200);
    let head = format!(
        "GET /health HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
        service.address
    );
    silent[0].set_read_timeout(Some(PATIENCE)).unwrap();
    silent[0].write_all(head.as_bytes()).unwrap();
    let mut text = String::new();
    silent[0].read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    drop(silent);
}

/// The first bytes of the answer to a request on this connection, which stays open.
fn first_bytes(service: &Service, stream: &mut TcpStream) -> String {
    let head = format!("GET /health HTTP/1.1\r\nHost: {}\r\n\r\n", service.address);
    let mut bytes = [0; 12];
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // A connection that is closed takes nothing, or gives nothing.
    let _ = stream.write_all(head.as_bytes());
    let _ = stream.read_exact(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn one_address_does_not_take_the_places_of_others() {
    const MOST: usize = 3;
    let mut settings = settings();
    settings.http.max_connections_per_address = MOST;
    settings.http.trusted_proxies = Vec::new();
    settings.http.header_timeout = 10_000.0;
    let service = Service::start(settings);
    let mut open = Vec::new();
    // Connections of the client that waited for the service may still be there.
    wait(|| {
        let mut stream = TcpStream::connect(service.address).unwrap();
        if first_bytes(&service, &mut stream) == "HTTP/1.1 200" {
            open.push(stream);
        }
        open.len() == MOST
    });
    let mut fourth = TcpStream::connect(service.address).unwrap();
    assert_ne!(first_bytes(&service, &mut fourth), "HTTP/1.1 200");

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let mut other = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        socket.connect(service.address).await.unwrap().into_std().unwrap()
    });
    other.set_nonblocking(false).unwrap();
    assert_eq!(first_bytes(&service, &mut other), "HTTP/1.1 200");

    // A place that is given back can be taken, and it is told how often there was none.
    open.pop();
    wait(|| {
        let mut stream = TcpStream::connect(service.address).unwrap();
        first_bytes(&service, &mut stream) == "HTTP/1.1 200"
    });
    open.clear();
    wait(|| {
        let answer = service.raw(
            format!(
                "GET /metrics HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
                service.address
            )
            .as_bytes(),
        );
        let count = answer
            .lines()
            .find_map(|line| line.strip_prefix("flow_refused_connections_total "));
        count.is_some_and(|count| count.parse::<u64>().unwrap() >= 1)
    });
}
