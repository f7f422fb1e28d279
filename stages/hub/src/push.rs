//! Pushes files to a repository of the hub: large ones to its storage, then a commit that names all of them.
//!
//! The calls are those of the hub's HTTP API: `repos/create`, `preupload` (which files are large, and which are there already), git
//! LFS's batch API with the transfers `basic` and `multipart`, and `commit` with lines of JSON. A push that breaks off has changed
//! nothing but the storage, and the next one does not send again what is there.

mod files;
mod lfs;

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use flow_storage::origin;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::{HttpClient, Method, RemoteRevision, text};
use crate::download::{TRIES, amount, pause};
use crate::error::HubError;
use crate::hub::{Hub, Progress};
use crate::reference::{HubReference, RepositoryKind};
pub use files::{NewFile, files_below};

/// Files about which the hub is asked at once.
const ASKED_AT_ONCE: usize = 256;
/// Bytes of the beginning of a file by which the hub tells text from other files.
const SAMPLE: u64 = 512;
/// What one commit has at most: files, and bytes of those that are in it.
const COMMIT_FILES: usize = 5_000;
const COMMIT_BYTES: u64 = 32 << 20;
/// Statuses of a commit at the same time as another one.
const CONFLICTS: [u16; 2] = [409, 412];
/// The longest answer that is read, in bytes.
const LONGEST_ANSWER: u64 = 16 << 20;

/// What is pushed where.
pub struct Push<'p> {
    /// Its revision is a branch, which is made where it is not there.
    pub repository: &'p HubReference,
    pub files: &'p [NewFile],
    /// A repository that is made is private.
    pub private: bool,
    /// The first line of the commit's message.
    pub message: &'p str,
}

/// What a push did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pushed {
    /// Files that are new or have changed.
    pub files: usize,
    /// Bytes that were sent; the storage had the others.
    pub sent: u64,
    /// Files that were the same already, or that the repository ignores.
    pub unchanged: usize,
    /// Files of an earlier push whose numbering has changed (`train-00000-of-00003.parquet`).
    pub deleted: Vec<String>,
    /// The page of the repository.
    pub page: String,
}

impl Hub {
    /// Pushes files: makes the repository and the branch where they are not there, sends large files that the hub does not have,
    /// and commits. Of a dataset, numbered files of the same splits that are no longer there are deleted. None: `progress`
    /// cancelled it.
    ///
    /// # Errors
    /// Without a token, where a file cannot be read, or the hub refuses or does not answer, after several tries.
    pub fn push(&self, push: &Push<'_>, progress: Progress<'_>) -> Result<Option<Pushed>, HubError> {
        if self.token.is_none() {
            return Err(HubError::Unavailable {
                message: format!("pushing to {} needs a token", push.repository),
                help:
                    "make one with the right to write at https://huggingface.co/settings/tokens, and set HF_TOKEN to it"
                        .into(),
            });
        }
        if self.offline {
            return Err(HubError::Unavailable {
                message: format!("{} cannot be pushed: HF_HUB_OFFLINE is set", push.repository),
                help: "unset HF_HUB_OFFLINE".into(),
            });
        }
        if push.repository.is_commit() || push.repository.revision.starts_with("refs/") {
            return Err(HubError::Reference {
                message: format!(
                    "{} is not a branch, and only branches are pushed to",
                    push.repository.revision
                ),
            });
        }
        let client = HttpClient::new(self);
        let mut session = Session {
            hub: self,
            client: &client,
            push,
            progress,
        };
        match session.run() {
            Ok(pushed) => Ok(Some(pushed)),
            Err(Stopped::Cancelled) => Ok(None),
            Err(Stopped::Failed(error)) => Err(error),
        }
    }
}

/// Why a push goes no further.
enum Stopped {
    Cancelled,
    Failed(HubError),
}

impl From<HubError> for Stopped {
    fn from(error: HubError) -> Self {
        Stopped::Failed(error)
    }
}

/// An answer of the hub: its status and its body.
struct Answer {
    status: u16,
    etag: Option<String>,
    error_code: String,
    body: Vec<u8>,
}

/// A request: what it is for in messages, and what it says.
struct Call<'c> {
    what: &'c str,
    method: Method,
    address: &'c str,
    headers: &'c [(String, String)],
    /// Statuses that are no errors, beside those of success.
    accepted: &'c [u16],
    tries: u32,
}

/// What a request sends.
#[derive(Clone, Copy)]
enum Payload<'p> {
    Bytes(&'p [u8]),
    Part { file: &'p NewFile, from: u64, size: u64 },
}

/// What the hub says of a file that is to be pushed.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Announced {
    path: String,
    upload_mode: Mode,
    #[serde(default)]
    should_ignore: bool,
    /// SHA-256 of a large file, SHA-1 of git of another; none where there is no such file.
    oid: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Lfs,
    Regular,
}

#[derive(Deserialize)]
struct AnnouncedFiles {
    files: Vec<Announced>,
}

/// A file that is new or has changed.
struct Changed<'p> {
    file: &'p NewFile,
    mode: Mode,
    /// SHA-256 of a large one.
    oid: String,
}

struct Session<'s> {
    hub: &'s Hub,
    client: &'s HttpClient,
    push: &'s Push<'s>,
    progress: Progress<'s>,
}

impl<'s> Session<'s> {
    fn run(&mut self) -> Result<Pushed, Stopped> {
        self.make_repository()?;
        self.make_branch()?;
        let listed = self.listed()?;
        let deleted = self.renumbered(listed.files);
        let changed = self.changed()?;
        let large: Vec<&Changed<'_>> = changed.iter().filter(|file| file.mode == Mode::Lfs).collect();
        let sent = self.upload(&large)?;
        self.commit(&changed, &deleted, listed.commit)?;
        let regular = changed.iter().filter(|file| file.mode == Mode::Regular);
        Ok(Pushed {
            files: changed.len(),
            sent: sent + regular.map(|file| file.file.size).sum::<u64>(),
            unchanged: self.push.files.len() - changed.len(),
            deleted,
            page: format!("{}/{}", self.hub.endpoint, self.push.repository.path()),
        })
    }

    /// An address of the API of the repository, such as `.../preupload/main`.
    fn api(&self, call: &str) -> String {
        let repository = self.push.repository;
        let (kind, name) = (repository.kind.plural(), repository.repository());
        let revision = repository.revision.replace('/', "%2F");
        format!("{}/api/{kind}/{name}/{call}/{revision}", self.hub.endpoint)
    }

    fn make_repository(&mut self) -> Result<(), Stopped> {
        let repository = self.push.repository;
        let address = format!(
            "{}/api/{}/{}",
            self.hub.endpoint,
            repository.kind.plural(),
            repository.repository()
        );
        let asked = self.call(
            Call {
                what: "looking for the repository",
                method: Method::Get,
                address: &address,
                headers: &[],
                accepted: &[401, 404],
                // A missing network is reported at once.
                tries: 1,
            },
            Payload::Bytes(&[]),
        )?;
        if asked.status < 300 {
            let is_private = answer_json(&asked, &address)?["private"].as_bool();
            if self.push.private && is_private == Some(false) {
                return Err(Stopped::Failed(HubError::Unavailable {
                    message: format!("{repository} is there already, and is public"),
                    help: "make it private in its settings first, or leave --private out".into(),
                }));
            }
            return Ok(());
        }
        if asked.status == 401 && asked.error_code != "RepoNotFound" {
            return Err(Stopped::Failed(self.refused(
                "looking for the repository",
                &address,
                &asked,
            )));
        }
        let kind = match repository.kind {
            RepositoryKind::Model => "model",
            RepositoryKind::Dataset => "dataset",
        };
        let mut body = json!({ "name": repository.name, "organization": repository.owner, "type": kind });
        // Otherwise the organization may have its own default.
        if self.push.private {
            body["private"] = true.into();
        }
        let address = format!("{}/api/repos/create", self.hub.endpoint);
        // Somebody else may have made it meanwhile (409).
        self.post_json("making the repository", &address, &body, &[409])?;
        Ok(())
    }

    fn make_branch(&mut self) -> Result<(), Stopped> {
        if self.push.repository.revision == "main" {
            return Ok(());
        }
        let address = self.api("branch");
        self.post_json("making the branch", &address, &json!({}), &[409])?;
        Ok(())
    }

    /// The commit of the branch, and its files.
    fn listed(&mut self) -> Result<RemoteRevision, Stopped> {
        let mut tries = 0;
        loop {
            match self.client.list(self.push.repository) {
                Ok(listed) => return Ok(listed),
                Err(error) if error.transient && tries + 1 < TRIES => {
                    tries += 1;
                    self.wait("listing the repository", tries)?;
                }
                Err(error) => return Err(Stopped::Failed(error.into())),
            }
        }
    }

    /// Numbered files of a dataset's splits that the repository has and the push has not.
    fn renumbered(&self, there: Vec<String>) -> Vec<String> {
        let ours: BTreeSet<&str> = self.push.files.iter().map(|file| file.path.as_str()).collect();
        let splits: BTreeSet<&str> = ours.iter().filter_map(|path| files::numbered(path)).collect();
        if self.push.repository.kind != RepositoryKind::Dataset {
            return Vec::new();
        }
        let is_left = |path: &String| {
            !ours.contains(path.as_str()) && files::numbered(path).is_some_and(|split| splits.contains(split))
        };
        there.into_iter().filter(is_left).collect()
    }

    /// The files that the repository does not have as they are.
    fn changed(&mut self) -> Result<Vec<Changed<'s>>, Stopped> {
        let address = self.api("preupload");
        let mut changed = Vec::new();
        for files in self.push.files.chunks(ASKED_AT_ONCE) {
            let described = files.iter().map(|file| {
                let sample = file.read(0, file.size.min(SAMPLE))?;
                Ok(json!({ "path": file.path, "size": file.size, "sample": BASE64_STANDARD.encode(sample) }))
            });
            let described = described.collect::<Result<Vec<Value>, HubError>>()?;
            let answer = self.post_json("asking about files", &address, &json!({ "files": described }), &[])?;
            let announced: AnnouncedFiles =
                serde_json::from_slice(&answer.body).map_err(|error| strange(&address, &error.to_string()))?;
            for file in files {
                let found = announced.files.iter().find(|found| found.path == file.path);
                let found = found.ok_or_else(|| strange(&address, &format!("it says nothing of {}", file.path)))?;
                if found.should_ignore || (file.unless_there && found.oid.is_some()) {
                    continue;
                }
                // The storage takes no empty files, and a commit holds its regular files in memory.
                let mode = match file.size {
                    0 => Mode::Regular,
                    size if size > COMMIT_BYTES => Mode::Lfs,
                    _ => found.upload_mode,
                };
                let oid = match mode {
                    Mode::Lfs => self.digest(file)?,
                    Mode::Regular => file.git_digest()?,
                };
                if found.oid.as_ref() != Some(&oid) {
                    changed.push(Changed { file, mode, oid });
                }
            }
        }
        Ok(changed)
    }

    /// The SHA-256 of a file, in hexadecimal digits.
    fn digest(&mut self, file: &NewFile) -> Result<String, Stopped> {
        let path = &file.path;
        let progress = &mut self.progress;
        let digest = file.sha256(&mut |done| progress(&format!("{path}: {} read", amount(done, Some(file.size)))))?;
        digest.ok_or(Stopped::Cancelled)
    }

    /// Commits files and deletions, in as many commits as they need; those of README.md come last. `parent` is the commit with which
    /// the files were compared.
    fn commit(&mut self, changed: &[Changed<'s>], deleted: &[String], mut parent: String) -> Result<(), Stopped> {
        let mut order: Vec<&Changed<'_>> = changed.iter().collect();
        order.sort_by_key(|changed| (changed.file.path == "README.md", &changed.file.path));
        let mut commits: Vec<Vec<&Changed<'_>>> = Vec::new();
        let mut bytes = 0;
        for changed in order {
            let inline = if changed.mode == Mode::Regular {
                changed.file.size
            } else {
                0
            };
            match commits.last_mut() {
                Some(commit) if commit.len() < COMMIT_FILES && bytes + inline <= COMMIT_BYTES => {
                    bytes += inline;
                    commit.push(changed);
                }
                _ => {
                    bytes = inline;
                    commits.push(vec![changed]);
                }
            }
        }
        if commits.is_empty() && !deleted.is_empty() {
            commits.push(Vec::new());
        }
        let address = self.api("commit");
        let count = commits.len();
        for (number, files) in commits.into_iter().enumerate() {
            let summary = match count {
                1 => self.push.message.to_owned(),
                _ => format!("{} ({} of {count})", self.push.message, number + 1),
            };
            let mut lines = vec![json!({ "key": "header", "value": { "summary": summary, "description": "" } })];
            if number + 1 == count {
                lines.extend(
                    deleted
                        .iter()
                        .map(|path| json!({ "key": "deletedFile", "value": { "path": path } })),
                );
            }
            for Changed { file, mode, oid } in files {
                lines.push(match mode {
                    Mode::Lfs => json!({
                        "key": "lfsFile",
                        "value": { "path": file.path, "algo": "sha256", "oid": oid, "size": file.size },
                    }),
                    Mode::Regular => json!({
                        "key": "file",
                        "value": {
                            "path": file.path, "encoding": "base64",
                            "content": BASE64_STANDARD.encode(file.read(0, file.size)?),
                        },
                    }),
                });
            }
            let body: String = lines.iter().map(|line| format!("{line}\n")).collect();
            let answer = self.commit_on(&parent, &address, &body)?;
            if number + 1 < count {
                let made = answer_json(&answer, &address)?["commitOid"].as_str().map(str::to_owned);
                parent = made.map_or_else(|| Ok(self.listed()?.commit), Ok::<_, Stopped>)?;
            }
        }
        Ok(())
    }

    /// One commit. The hub refuses it while somebody else commits (409), and may do so afterwards (412). It is repeated as long as
    /// the branch is at `parent`: later commits may have changed the files that are there.
    fn commit_on(&mut self, parent: &str, address: &str, body: &str) -> Result<Answer, Stopped> {
        let headers = [("content-type".to_owned(), "application/x-ndjson".to_owned())];
        let call = || Call {
            what: "the commit",
            method: Method::Post,
            address,
            headers: &headers,
            accepted: &CONFLICTS,
            tries: TRIES,
        };
        let mut tries = 0;
        loop {
            let answer = self.call(call(), Payload::Bytes(body.as_bytes()))?;
            if answer.status < 300 {
                return Ok(answer);
            }
            tries += 1;
            if tries >= TRIES || self.listed()?.commit != parent {
                return Err(Stopped::Failed(self.refused("the commit", address, &answer)));
            }
            self.wait("the commit", tries)?;
        }
    }

    fn post_json(&mut self, what: &str, address: &str, body: &Value, accepted: &[u16]) -> Result<Answer, Stopped> {
        let headers = [("content-type".to_owned(), "application/json".to_owned())];
        let body = body.to_string();
        let call = Call {
            what,
            method: Method::Post,
            address,
            headers: &headers,
            accepted,
            tries: TRIES,
        };
        self.call(call, Payload::Bytes(body.as_bytes()))
    }

    /// A request, repeated after pauses while the server answers with an error of its own or not at all.
    fn call(&mut self, call: Call<'_>, payload: Payload<'_>) -> Result<Answer, Stopped> {
        let mut tries = 0;
        loop {
            let error = match self.send(&call, payload)? {
                Ok(answer) if answer.status < 300 || call.accepted.contains(&answer.status) => return Ok(answer),
                Ok(answer) if answer.status != 429 && answer.status < 500 => {
                    return Err(Stopped::Failed(self.refused(call.what, call.address, &answer)));
                }
                Ok(answer) => self.refused(call.what, call.address, &answer),
                Err(error) => error,
            };
            tries += 1;
            if tries >= call.tries {
                return Err(Stopped::Failed(error));
            }
            self.wait(call.what, tries)?;
        }
    }

    /// One request. The inner error is one of the connection.
    fn send(&mut self, call: &Call<'_>, payload: Payload<'_>) -> Result<Result<Answer, HubError>, Stopped> {
        let (mut bytes, mut part);
        let (body, size): (&mut dyn Read, u64) = match payload {
            Payload::Bytes(payload) => {
                bytes = payload;
                (&mut bytes, payload.len() as u64)
            }
            Payload::Part { file, from, size } => {
                part = file.open(from)?.take(size);
                (&mut part, size)
            }
        };
        let mut cancelled = false;
        let mut told = Told {
            body,
            done: 0,
            tell: &mut |done| {
                let goes_on = match payload {
                    Payload::Part { file, from, .. } => {
                        let line = format!("{}: {} sent", file.path, amount(from + done, Some(file.size)));
                        (self.progress)(&line)
                    }
                    Payload::Bytes(_) => (self.progress)(call.what),
                };
                cancelled |= !goes_on;
                goes_on
            },
            told: None,
        };
        // The hub answers late after large commits, the storage after large parts.
        let wait = self.hub.timeout * 4;
        let target = (call.method, call.address);
        let response = self.client.submit(target, call.headers, &mut told, size, wait);
        if cancelled {
            return Err(Stopped::Cancelled);
        }
        let mut response = match response {
            Ok(response) => response,
            Err(error) => return Ok(Err(error.into())),
        };
        let header = |name| text(response.headers(), name).map(str::to_owned);
        let (etag, error_code) = (header("etag"), header("x-error-code").unwrap_or_default());
        let status = response.status().as_u16();
        let body = response.body_mut().with_config().limit(LONGEST_ANSWER).read_to_vec();
        Ok(match body {
            Ok(body) => Ok(Answer {
                status,
                etag,
                error_code,
                body,
            }),
            Err(error) => Err(HubError::Unavailable {
                message: format!("{}: the answer of {} breaks off: {error}", call.what, call.address),
                help: "run again: what was sent is not sent again".into(),
            }),
        })
    }

    fn wait(&mut self, what: &str, tries: u32) -> Result<(), Stopped> {
        let line = format!("{what}: no success, try {} of {TRIES}", tries + 1);
        match pause(self.hub.timeout, tries, &line, self.progress) {
            true => Ok(()),
            false => Err(Stopped::Cancelled),
        }
    }

    /// The error for an answer that is one.
    fn refused(&self, what: &str, address: &str, answer: &Answer) -> HubError {
        let repository = self.push.repository;
        let endpoint = origin(address);
        let is_storage = endpoint != origin(&self.hub.endpoint);
        let from = self.hub.token.as_ref().map_or("HF_TOKEN", |token| token.from.as_str());
        let said: Option<String> = serde_json::from_slice::<Value>(&answer.body).ok().and_then(|body| {
            Some(
                body["error"]
                    .as_str()
                    .or(body["message"].as_str())?
                    .chars()
                    .take(500)
                    .collect(),
            )
        });
        let said = said.map_or(String::new(), |said| format!(": {said}"));
        let (why, help) = match answer.status {
            400..500 if is_storage && answer.status != 429 => (
                format!("the storage {endpoint} refuses it (status {})", answer.status),
                "run again: what was sent is not sent again",
            ),
            401 => (
                format!("{endpoint} does not accept the token from {from}"),
                "make one with the right to write at https://huggingface.co/settings/tokens",
            ),
            403 => (
                format!("the token from {from} may not write to {repository}"),
                "give it the right to write there, or use the token of another account",
            ),
            404 => (format!("{endpoint} does not know {repository}"), "check the name"),
            409 | 412 => (
                format!("there was another commit to {repository} meanwhile"),
                "run again: what was sent is not sent again, and files are compared with those that are there now",
            ),
            413 => (
                format!("{endpoint} says that this is too large"),
                "push fewer or smaller files at once",
            ),
            429 => (
                format!("{endpoint} limits the rate of requests (status 429)"),
                "wait some minutes and run again: what was sent is not sent again",
            ),
            300..400 => (
                format!("{endpoint} leads elsewhere: {repository} may have been renamed"),
                "use its new name",
            ),
            500.. => (
                format!("{endpoint} answers with a server error (status {})", answer.status),
                "run again later: what was sent is not sent again",
            ),
            status => (
                format!("{endpoint} refuses (status {status})"),
                "check HF_ENDPOINT and the name",
            ),
        };
        HubError::Unavailable {
            message: format!("{what}: {why}{said}"),
            help: help.into(),
        }
    }
}

fn answer_json(answer: &Answer, address: &str) -> Result<Value, HubError> {
    serde_json::from_slice(&answer.body).map_err(|error| strange(address, &error.to_string()))
}

fn strange(address: &str, what: &str) -> HubError {
    HubError::Unavailable {
        message: format!("{address} does not answer as the hub does: {what}"),
        help: "check HF_ENDPOINT, and whether there is a proxy".into(),
    }
}

/// A body that tells, about once a second, how much of it was read.
struct Told<'t> {
    body: &'t mut dyn Read,
    done: u64,
    /// False gives up.
    tell: &'t mut dyn FnMut(u64) -> bool,
    told: Option<Instant>,
}

impl Read for Told<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.told.is_none_or(|told| told.elapsed() >= Duration::from_secs(1)) {
            self.told = Some(Instant::now());
            if !(self.tell)(self.done) {
                return Err(io::Error::other("cancelled"));
            }
        }
        let count = self.body.read(buffer)?;
        self.done += count as u64;
        Ok(count)
    }
}
