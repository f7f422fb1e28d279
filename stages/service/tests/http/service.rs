//! A service for tests, and its clients.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use flow_service::engine::ModelSettings;
use flow_service::http::{Log, ServeError, ServeSettings, Server, StopHandle};
use flow_storage::Storage;
use serde_json::Value;
use tempfile::TempDir;
use ureq::Agent;

/// Longer than anything here takes, however slow the machine.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// The boundary of forms.
const BOUNDARY: &str = "a-boundary-of-tests";

/// What a request gives.
pub struct Answer {
    pub status: u16,
    pub headers: ureq::http::HeaderMap,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// `code` and `param` of an error, whose envelope is checked.
    pub fn error(&self) -> (String, Option<String>) {
        let document = self.json();
        let error = &document["error"];
        for key in ["message", "type", "code"] {
            assert!(error[key].is_string(), "{key}: {document}");
        }
        assert!(error["param"].is_string() || error["param"].is_null(), "{document}");
        let code = error["code"].as_str().unwrap().to_owned();
        (code, error["param"].as_str().map(str::to_owned))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

/// A service that runs on a thread. It is stopped when it is dropped.
pub struct Service {
    pub address: SocketAddr,
    pub wyoming: Option<SocketAddr>,
    pub url: String,
    pub stop: StopHandle,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
    _uploads: TempDir,
}

pub fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// A recording of the repository.
pub fn recording(name: &str) -> Vec<u8> {
    fs::read(data(&format!("tests/data/golden/model/audio/{name}"))).unwrap()
}

/// A recording in which nobody speaks.
pub fn silence() -> Vec<u8> {
    let mut wav = recording("eval0_en-us.wav");
    wav[44..].fill(0);
    wav
}

/// Spanish speech, repeated, for this many seconds at least.
pub fn long_recording(seconds: usize) -> Vec<u8> {
    let wav = recording("eval3_es.wav");
    // 44 bytes are the header of a plain file, then come samples of 16 bits at 16 kHz.
    let (header, samples) = wav.split_at(44);
    let times = (seconds * 32_000).div_ceil(samples.len());
    let length = u32::try_from(samples.len() * times).unwrap();
    let mut long = header.to_vec();
    long[4..8].copy_from_slice(&(length + 36).to_le_bytes());
    long[40..44].copy_from_slice(&length.to_le_bytes());
    for _ in 0..times {
        long.extend_from_slice(samples);
    }
    long
}

/// The settings that tests have in common.
pub fn settings() -> ServeSettings {
    let mut settings = ServeSettings::default();
    settings.engine.models = vec![ModelSettings {
        name: "small".to_owned(),
        path: data("configs/models/small.nemo"),
        language_prior: None,
    }];
    settings.http.listen = "127.0.0.1:0".to_owned();
    settings
}

/// A service that tests share; it ends with the last of those that run at the same time.
pub fn shared() -> Arc<Service> {
    static SHARED: Mutex<Weak<Service>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(service) = shared.upgrade() {
        return service;
    }
    let mut settings = settings();
    settings.engine.diarization = true;
    let service = Arc::new(Service::start(settings));
    *shared = Arc::downgrade(&service);
    service
}

impl Service {
    /// Starts a service, and waits until it is ready.
    pub fn start(settings: ServeSettings) -> Self {
        Self::start_with_log(settings, Arc::new(|_| {}))
    }

    pub fn start_with_log(mut settings: ServeSettings, log: Log) -> Self {
        let uploads = TempDir::new().unwrap();
        settings.http.upload_folder = Some(uploads.path().to_owned());
        let server = Server::bind(&Storage::default(), settings, "1.2.3", log).unwrap();
        let service = Self {
            address: server.address(),
            wyoming: server.wyoming_address(),
            url: server.url(),
            stop: server.stop_handle(),
            thread: Some(thread::spawn(move || server.serve())),
            _uploads: uploads,
        };
        wait(|| service.get("/ready").status == 200);
        service
    }

    pub fn agent() -> Agent {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(PATIENCE))
            .proxy(None);
        // That of the test: it says nothing of who the other end is.
        let tls = ureq::tls::TlsConfig::builder().disable_verification(true).build();
        config.tls_config(tls).build().into()
    }

    pub fn get(&self, path: &str) -> Answer {
        self.get_with(path, &[])
    }

    pub fn get_with(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        let mut request = Self::agent().get(format!("{}{path}", self.url));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        answer(request.call())
    }

    pub fn delete(&self, path: &str) -> Answer {
        answer(Self::agent().delete(format!("{}{path}", self.url)).call())
    }

    pub fn post(&self, path: &str, content_type: &str, body: &[u8], headers: &[(&str, &str)]) -> Answer {
        let mut request = Self::agent()
            .post(format!("{}{path}", self.url))
            .header("Content-Type", content_type);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        answer(request.send(body))
    }

    /// Sends a form with these fields and, if one is given, a file.
    pub fn transcribe(&self, file: Option<&[u8]>, fields: &[(&str, &str)]) -> Answer {
        self.send("/v1/audio/transcriptions", file, fields)
    }

    pub fn send(&self, path: &str, file: Option<&[u8]>, fields: &[(&str, &str)]) -> Answer {
        self.post(path, &content_type(), &form(file, fields), &[])
    }

    /// Sends bytes as they are, and reads until the other end closes or `PATIENCE` is over.
    pub fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // The server may answer and close before it has read all.
        let _ = stream.write_all(bytes);
        let mut text = Vec::new();
        let _ = stream.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    }

    /// The value of a line of `/metrics`; 0 where there is none.
    pub fn metric(&self, name: &str) -> f64 {
        let answer = self.get("/metrics");
        let line = answer
            .text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.parse().unwrap())
    }

    /// Waits until it has ended by itself.
    pub fn join(mut self) -> Result<(), ServeError> {
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            if !thread::panicking() {
                ended.unwrap().unwrap();
            }
        }
    }
}

fn answer(answered: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Answer {
    let mut response = answered.unwrap();
    Answer {
        status: response.status().as_u16(),
        headers: response.headers().clone(),
        text: response.body_mut().read_to_string().unwrap(),
    }
}

pub fn content_type() -> String {
    format!("multipart/form-data; boundary={BOUNDARY}")
}

/// The body of a form: fields first, then the file.
pub fn form(file: Option<&[u8]>, fields: &[(&str, &str)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, value) in fields {
        part(&mut body, &format!("name=\"{name}\""), value.as_bytes());
    }
    if let Some(file) = file {
        part(&mut body, "name=\"file\"; filename=\"../../talk.wav\"", file);
    }
    end(&mut body);
    body
}

/// Adds a part to the body of a form.
pub fn part(body: &mut Vec<u8>, disposition: &str, content: &[u8]) {
    let head = format!("--{BOUNDARY}\r\nContent-Disposition: form-data; {disposition}\r\n\r\n");
    body.extend_from_slice(head.as_bytes());
    body.extend_from_slice(content);
    body.extend_from_slice(b"\r\n");
}

/// Ends the body of a form.
pub fn end(body: &mut Vec<u8>) {
    body.extend_from_slice(format!("--{BOUNDARY}--\r\n").as_bytes());
}

/// Waits until something is so; fails if it never is.
pub fn wait(mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "what is waited for does not come");
        thread::sleep(Duration::from_millis(10));
    }
}
