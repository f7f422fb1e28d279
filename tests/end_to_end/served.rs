//! A service in a separate process, and its clients. Also used by `benches/serve.rs`.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use ureq::Agent;

/// Longer than the small model takes to load, and than any request here, however slow the machine.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Where recordings are sent to.
pub const TRANSCRIPTIONS: &str = "/v1/audio/transcriptions";

/// Between the parts of a form.
const BOUNDARY: &str = "a-boundary-of-tests";

/// The response to a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub status: u16,
    pub text: String,
}

/// A process that prints `listening on http://ADDRESS`, and answers `/ready` with 200 once it takes requests. It is killed
/// when this is dropped.
pub struct Served {
    child: Child,
    /// As the process prints it: `http://127.0.0.1:8000`.
    pub url: String,
    /// What it printed on standard error.
    told: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Served {
    /// Starts the process, and waits until it is ready.
    ///
    /// # Errors
    /// If it ends or is not ready within `patience`: what it printed on standard error.
    pub fn start(mut command: Command, patience: Duration) -> Result<Self, String> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("{command:?}: {error}"))?;
        let told = Arc::new(Mutex::new(String::new()));
        let (url, seen_url) = std::sync::mpsc::channel();
        // Both are read all the time, as a pipe that is full would hold up the process.
        let out = child.stdout.take().map(BufReader::new);
        let reader = spawn(move || {
            for line in out.into_iter().flat_map(BufRead::lines).map_while(Result::ok) {
                if let Some(found) = line.strip_prefix("listening on ") {
                    let _ = url.send(found.trim().to_owned());
                }
            }
        });
        let errors = child.stderr.take().map(BufReader::new);
        let lines = Arc::clone(&told);
        let error_reader = spawn(move || {
            for line in errors.into_iter().flat_map(BufRead::lines).map_while(Result::ok) {
                let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                lines.push_str(&line);
                lines.push('\n');
            }
        });
        let begin = Instant::now();
        let mut served = Self {
            child,
            url: String::new(),
            told,
            readers: vec![reader, error_reader],
        };
        // The sender is gone when the process has closed its output.
        let Ok(url) = seen_url.recv_timeout(patience) else {
            let _ = served.child.kill();
            served.join_readers();
            return Err(format!("no line `listening on …`; it says:\n{}", served.told()));
        };
        served.url = url;
        let agent = agent(PATIENCE);
        while !get(&agent, &format!("{}/ready", served.url)).is_ok_and(|answer| answer.status == 200) {
            let ended = served.child.try_wait().map_err(|error| error.to_string())?;
            if ended.is_some() || begin.elapsed() > patience {
                return Err(format!("not ready ({ended:?}); it says:\n{}", served.told()));
            }
            sleep(Duration::from_millis(20));
        }
        Ok(served)
    }

    pub fn told(&self) -> String {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Of the process, which is there as long as this is.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn connect(&self) -> std::io::Result<TcpStream> {
        let stream = TcpStream::connect(self.url.trim_start_matches("http://"))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    }

    /// The value of a line of `/metrics`; 0 where there is none.
    pub fn metric(&self, name: &str) -> f64 {
        let answer = get(&agent(PATIENCE), &format!("{}/metrics", self.url)).expect("the metrics");
        let line = answer
            .text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.parse().expect("a number"))
    }

    /// A number of kibibytes of `/proc/PID/status`, such as `VmRSS`.
    pub fn kibibytes(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id())).expect("the status of the process");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let number = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
        number.unwrap_or_else(|| panic!("no {name} in\n{status}"))
    }

    /// Ends it by SIGTERM: how it ended, and all that it printed on standard error.
    pub fn terminate(mut self) -> (ExitStatus, String) {
        // SAFETY: the call takes two numbers; the process is a child that was not waited for, so the number is its own.
        assert_eq!(unsafe { libc::kill(self.id() as i32, libc::SIGTERM) }, 0);
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("the state of the process") {
                break status;
            }
            assert!(begin.elapsed() < PATIENCE, "SIGTERM does not end it:\n{}", self.told());
            sleep(Duration::from_millis(20));
        };
        self.join_readers();
        (status, self.told())
    }

    /// Waits for all that a process which has ended printed.
    fn join_readers(&mut self) {
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
    }
}

/// A client that keeps its connections, and waits so long for an answer.
pub fn agent(timeout: Duration) -> Agent {
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(timeout))
        .proxy(None);
    config.build().into()
}

pub fn get(agent: &Agent, url: &str) -> Result<Answer, ureq::Error> {
    answer(agent.get(url).call())
}

pub fn post(agent: &Agent, url: &str, content_type: &str, body: &[u8]) -> Result<Answer, ureq::Error> {
    answer(agent.post(url).header("Content-Type", content_type).send(body))
}

fn answer(answered: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Result<Answer, ureq::Error> {
    let mut response = answered?;
    Ok(Answer {
        status: response.status().as_u16(),
        text: response.body_mut().read_to_string()?,
    })
}

/// That of [`form`].
pub fn content_type() -> String {
    format!("multipart/form-data; boundary={BOUNDARY}")
}

/// The body of a form: fields first, then the file.
pub fn form(file: Option<&[u8]>, fields: &[(&str, &str)]) -> Vec<u8> {
    let mut body = Vec::new();
    let mut part = |disposition: &str, content: &[u8]| {
        let head = format!("--{BOUNDARY}\r\nContent-Disposition: form-data; {disposition}\r\n\r\n");
        body.extend_from_slice(head.as_bytes());
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n");
    };
    for (name, value) in fields {
        part(&format!("name=\"{name}\""), value.as_bytes());
    }
    if let Some(file) = file {
        part("name=\"file\"; filename=\"talk.wav\"", file);
    }
    body.extend_from_slice(format!("--{BOUNDARY}--\r\n").as_bytes());
    body
}

/// A request as it goes over the connection, which the server closes after the answer.
pub fn raw_post(url: &str, content_type: &str, body: &[u8]) -> Vec<u8> {
    let host = url.trim_start_matches("http://");
    let head = format!(
        "POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    let mut request = head.into_bytes();
    request.extend_from_slice(body);
    request
}

/// What is left of an answer on the connection.
pub fn read_answer(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    // The server may close before it has read all.
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}
