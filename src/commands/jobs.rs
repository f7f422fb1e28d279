//! `flow jobs`: the jobs of a service, over its API.

use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use flow_inspect::table;
use flow_kind::open_regular_file;
use flow_store::write_atomically;
use serde_json::Value;
use ureq::Agent;

use crate::arguments::{JobsArguments, JobsCommand};
use flow_cli::failure::{Exit, Failure};

/// Longest time for a request, the result of a long recording included.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Most bytes of a response.
const LARGEST: u64 = 1 << 30;
/// Most bytes of the file of a key.
const LARGEST_KEY: u64 = 4096;
/// Most jobs that the service lists at once.
const PAGE: usize = 100;

pub fn jobs(arguments: &JobsArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let client = Client::new(arguments)?;
    match &arguments.command {
        JobsCommand::List { state, limit } => list(&client, state.as_deref(), *limit, out)?,
        JobsCommand::Show { id } => {
            let job = client.json("GET", &format!("/{}", plain(id)?))?;
            writeln!(out, "{job:#}")?;
        }
        JobsCommand::Result { id, out: file } => {
            let bytes = client.send("GET", &format!("/{}/result", plain(id)?))?;
            match file {
                Some(file) => write_atomically(file, &bytes)?,
                None => out.write_all(&bytes)?,
            }
        }
        JobsCommand::Cancel { id } => {
            let job = client.json("DELETE", &format!("/{}", plain(id)?))?;
            let is_removed = job["deleted"] == true;
            writeln!(out, "{id} is {}", if is_removed { "removed" } else { "cancelled" })?;
        }
    }
    Ok(Exit::Done)
}

/// An id, which is a part of a path.
fn plain(id: &str) -> Result<&str, Failure> {
    let is_plain = !id.is_empty() && id.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    is_plain
        .then_some(id)
        .ok_or_else(|| Failure::usage(format!("`{id}` is not an id of a job"), "`flow jobs list` lists them"))
}

fn list(client: &Client, state: Option<&str>, limit: usize, out: &mut dyn Write) -> Result<(), Failure> {
    let state = state.map(|state| plain(state).map(|state| format!("&state={state}")));
    let state = state.transpose()?.unwrap_or_default();
    let mut rows = vec![["id", "state", "seconds", "of", "file"].map(str::to_owned).to_vec()];
    let mut after = String::new();
    while rows.len() <= limit {
        // The heading is one of the rows.
        let most = (limit - rows.len()).saturating_add(1).min(PAGE);
        let page = client.json("GET", &format!("?limit={most}{state}{after}"))?;
        rows.extend(page["data"].as_array().into_iter().flatten().map(row));
        match page["last_id"].as_str() {
            Some(last) if page["has_more"] == true => after = format!("&after={}", plain(last)?),
            _ => break,
        }
    }
    for line in table::lines(&rows) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

fn row(job: &Value) -> Vec<String> {
    let text = |name: &str| job[name].as_str().unwrap_or("?").to_owned();
    let seconds = |name: &str| {
        job[name]
            .as_f64()
            .map_or("-".to_owned(), |seconds| format!("{seconds:.1}"))
    };
    vec![
        text("id"),
        text("state"),
        seconds("done_seconds"),
        seconds("audio_seconds"),
        text("file_name"),
    ]
}

/// A service.
struct Client {
    agent: Agent,
    url: String,
    key: Option<String>,
}

impl Client {
    fn new(arguments: &JobsArguments) -> Result<Self, Failure> {
        let url = arguments.url.trim_end_matches('/').to_owned();
        if !url.starts_with("http://") && !url.starts_with("https://") {
            let message = format!("--url: `{url}` is not an address of a service");
            return Err(Failure::usage(
                message,
                "it is as `flow serve` prints it: http://127.0.0.1:8000",
            ));
        }
        let key = arguments.key_file.as_deref().map(read_key).transpose()?;
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(TIMEOUT))
            // A key goes to no other host.
            .max_redirects(0)
            .max_redirects_will_error(false);
        Ok(Self {
            agent: config.build().into(),
            url,
            key,
        })
    }

    /// The body of a response.
    fn send(&self, method: &str, path: &str) -> Result<Vec<u8>, Failure> {
        let address = format!("{}/v1/jobs{path}", self.url);
        let unreadable = |error: &dyn std::fmt::Display| Failure::unreadable(format!("{address}: {error}"));
        let mut request = ureq::http::Request::builder().method(method).uri(&address);
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let request = request.body(()).map_err(|error| unreadable(&error))?;
        let mut response = self.agent.run(request).map_err(|error| unreadable(&error))?;
        let bytes = response.body_mut().with_config().limit(LARGEST).read_to_vec();
        let bytes = bytes.map_err(|error| unreadable(&error))?;
        if response.status().is_success() {
            return Ok(bytes);
        }
        let document: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        match document["error"]["message"].as_str() {
            Some(message) => Err(unreadable(&message)),
            None => Err(unreadable(&format!("the answer is {}", response.status()))),
        }
    }

    fn json(&self, method: &str, path: &str) -> Result<Value, Failure> {
        let bytes = self.send(method, path)?;
        serde_json::from_slice(&bytes)
            .map_err(|error| Failure::unreadable(format!("{} does not answer as `flow serve` does: {error}", self.url)))
    }
}

/// The first line of a file that is neither empty nor a comment, as in the file of `--keys`.
fn read_key(file: &Path) -> Result<String, Failure> {
    let refused = |why: &dyn std::fmt::Display| {
        let message = format!("--key-file: {}: {why}", file.display());
        Failure::usage(message, "it holds the key on a line of its own")
    };
    let opened = open_regular_file(file).map_err(|error| refused(&error))?;
    let mut text = String::new();
    opened
        .take(LARGEST_KEY)
        .read_to_string(&mut text)
        .map_err(|error| refused(&error))?;
    let key = text
        .lines()
        .map(str::trim)
        .find(|line| !line.is_empty() && !line.starts_with('#'));
    let key = key.filter(|key| key.chars().all(|c| c.is_ascii_graphic()));
    key.map(str::to_owned).ok_or_else(|| refused(&"it holds no key"))
}
