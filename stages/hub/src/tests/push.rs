//! Pushes to a server that answers as the hub and its storage do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use super::{Answer, COMMIT, Request, Server, TestCache, git_sha1, sha256};
use crate::{HubError, HubReference, NewFile, Push, Pushed, files_below};

/// Bytes of a part; larger files are sent in parts.
const CHUNK: usize = 1000;

/// What the hub and its storage hold.
#[derive(Default)]
struct State {
    /// None before it is made; else whether it is private.
    repository: Option<bool>,
    branches: BTreeSet<String>,
    /// The bytes of files by path.
    files: BTreeMap<String, Vec<u8>>,
    /// By SHA-256.
    stored: BTreeMap<String, Vec<u8>>,
    parts: BTreeMap<String, BTreeMap<u64, Vec<u8>>>,
    commits: Vec<Vec<Value>>,
}

/// The hub and its storage, on two ports. A test may answer in their place.
struct FakeHub {
    hub: Server,
    storage: Server,
    state: Arc<Mutex<State>>,
}

type Instead = dyn Fn(&Request, &mut State) -> Option<Answer> + Send + Sync;

fn ok(body: &Value) -> Answer {
    Answer::new(200, &[], body.to_string().as_bytes())
}

impl FakeHub {
    fn new(instead: impl Fn(&Request, &mut State) -> Option<Answer> + Send + Sync + 'static) -> FakeHub {
        let state = Arc::new(Mutex::new(State::default()));
        let instead: Arc<Instead> = Arc::new(instead);
        let (held, first) = (state.clone(), instead.clone());
        let storage = Server::new(move |request, _| {
            let mut state = held.lock().unwrap();
            first(request, &mut state).unwrap_or_else(|| stores(request, &mut state))
        });
        let (held, address) = (state.clone(), storage.address.clone());
        let hub = Server::new(move |request, _| {
            let mut state = held.lock().unwrap();
            instead(request, &mut state).unwrap_or_else(|| answers(request, &mut state, &address))
        });
        FakeHub { hub, storage, state }
    }

    fn push(&self, target: &str, files: &[NewFile], private: bool) -> Result<Pushed, String> {
        let cache = TestCache::new();
        let push = Push {
            repository: &HubReference::target(target).unwrap(),
            files,
            private,
            message: "Upload",
        };
        let pushed = cache.hub(&self.hub.address, Some("secret")).push(&push, &mut |_| true);
        pushed.map(Option::unwrap).map_err(|error| match error {
            HubError::Unavailable { message, help } => format!("{message} | {help}"),
            other => other.to_string(),
        })
    }

    /// Requests whose paths have this text.
    fn asked(&self, text: &str) -> usize {
        let requests = [self.hub.requests(), self.storage.requests()].concat();
        requests.iter().filter(|request| request.path.contains(text)).count()
    }
}

fn stores(request: &Request, state: &mut State) -> Answer {
    let parts: Vec<&str> = request.path.trim_start_matches('/').split('/').collect();
    match (request.method.as_str(), parts.as_slice()) {
        ("PUT", ["whole", oid]) => {
            assert_eq!(request.headers.get("x-upload").map(String::as_str), Some("yes"));
            state.stored.insert((*oid).to_owned(), request.body.clone());
            Answer::new(200, &[], b"")
        }
        ("PUT", ["part", oid, number]) => {
            let parts = state.parts.entry((*oid).to_owned()).or_default();
            parts.insert(number.parse().unwrap(), request.body.clone());
            Answer::new(200, &[("etag", &format!("\"{oid}-{number}\""))], b"")
        }
        _ => Answer::new(400, &[], b""),
    }
}

fn answers(request: &Request, state: &mut State, storage: &str) -> Answer {
    if request.headers.get("authorization").map(String::as_str) != Some("Bearer secret") {
        return Answer::refused(401, "");
    }
    let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
    let path = request.path.as_str();
    match (request.method.as_str(), path) {
        ("GET", "/api/datasets/o/n" | "/api/models/o/n") => match state.repository {
            None => Answer::refused(404, "RepoNotFound"),
            Some(private) => ok(&json!({ "id": "o/n", "private": private })),
        },
        ("POST", "/api/repos/create") => {
            assert_eq!((&body["name"], &body["organization"]), (&json!("n"), &json!("o")));
            // As the hub's own client: without a word the default of the organization applies.
            assert_ne!(body["private"], false, "{body}");
            state.repository = Some(body["private"] == true);
            ok(&json!({ "url": "there" }))
        }
        ("GET", path) if path.contains("/revision/") => {
            let siblings: Vec<Value> = state.files.keys().map(|path| json!({ "rfilename": path })).collect();
            ok(&json!({ "sha": COMMIT, "siblings": siblings }))
        }
        ("POST", path) if path.contains("/branch/") => {
            let is_new = state.branches.insert(path.rsplit('/').next().unwrap().to_owned());
            Answer::new(if is_new { 200 } else { 409 }, &[], b"{}")
        }
        ("POST", path) if path.contains("/preupload/") => {
            let files = body["files"].as_array().unwrap().iter().map(|file| {
                let path = file["path"].as_str().unwrap();
                let is_large = path.ends_with(".parquet") || path.ends_with(".nemo");
                let oid = state.files.get(path).map(|bytes| {
                    if is_large && !bytes.is_empty() {
                        sha256(bytes)
                    } else {
                        git_sha1(bytes)
                    }
                });
                let sample = BASE64_STANDARD.decode(file["sample"].as_str().unwrap()).unwrap();
                assert_eq!(sample.len() as u64, file["size"].as_u64().unwrap().min(512));
                json!({
                    "path": path, "uploadMode": if is_large { "lfs" } else { "regular" },
                    "shouldIgnore": path.ends_with(".tmp"), "oid": oid,
                })
            });
            ok(&json!({ "files": files.collect::<Vec<_>>() }))
        }
        ("POST", path) if path.ends_with(".git/info/lfs/objects/batch") => {
            let objects = body["objects"].as_array().unwrap().iter().map(|object| {
                let (oid, size) = (object["oid"].as_str().unwrap(), object["size"].as_u64().unwrap() as usize);
                if state.stored.contains_key(oid) {
                    return json!({ "oid": oid, "size": size });
                }
                let hub = format!("http://{}", request.headers["host"]);
                let upload = if size <= CHUNK {
                    json!({ "href": format!("{storage}/whole/{oid}"), "header": { "x-upload": "yes" } })
                } else {
                    let parts = (1..=size.div_ceil(CHUNK)).map(|n| (format!("{n:05}"), json!(format!("{storage}/part/{oid}/{n}"))));
                    let mut header: serde_json::Map<String, Value> = parts.collect();
                    header.insert("chunk_size".into(), json!(CHUNK.to_string()));
                    json!({ "href": format!("{hub}/complete/{oid}"), "header": header })
                };
                json!({ "oid": oid, "size": size, "actions": { "upload": upload, "verify": { "href": format!("{hub}/verify/{oid}") } } })
            });
            ok(&json!({ "transfer": "multipart", "objects": objects.collect::<Vec<_>>() }))
        }
        ("POST", path) if path.starts_with("/complete/") => {
            let oid = body["oid"].as_str().unwrap();
            let parts = state.parts.remove(oid).unwrap();
            for (at, part) in body["parts"].as_array().unwrap().iter().enumerate() {
                assert_eq!(
                    *part,
                    json!({ "partNumber": at + 1, "etag": format!("\"{oid}-{}\"", at + 1) })
                );
            }
            state
                .stored
                .insert(oid.to_owned(), parts.into_values().flatten().collect());
            ok(&json!({ "success": true }))
        }
        ("POST", path) if path.starts_with("/verify/") => {
            let oid = body["oid"].as_str().unwrap();
            let is_right = state.stored.get(oid).is_some_and(|bytes| sha256(bytes) == oid);
            Answer::new(if is_right { 200 } else { 422 }, &[], b"{}")
        }
        ("POST", path) if path.contains("/commit/") => {
            assert_eq!(request.headers["content-type"], "application/x-ndjson");
            let text = String::from_utf8(request.body.clone()).unwrap();
            let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(lines[0]["key"], "header");
            for line in &lines[1..] {
                let (value, path) = (&line["value"], line["value"]["path"].as_str().unwrap().to_owned());
                match line["key"].as_str().unwrap() {
                    "deletedFile" => drop(state.files.remove(&path).unwrap()),
                    "lfsFile" => {
                        let bytes = state.stored[value["oid"].as_str().unwrap()].clone();
                        assert_eq!(bytes.len() as u64, value["size"]);
                        state.files.insert(path, bytes);
                    }
                    _ => {
                        let bytes = BASE64_STANDARD.decode(value["content"].as_str().unwrap()).unwrap();
                        state.files.insert(path, bytes);
                    }
                }
            }
            state.commits.push(lines);
            ok(&json!({ "commitUrl": "there", "commitOid": COMMIT }))
        }
        _ => Answer::refused(404, "EntryNotFound"),
    }
}

/// A dataset of so many shards, one of which is sent whole and the others in parts.
fn dataset(shards: usize) -> (tempfile::TempDir, BTreeMap<String, Vec<u8>>) {
    let folder = tempfile::tempdir().unwrap();
    let mut files = BTreeMap::from([
        ("README.md".to_owned(), b"---\nlanguage: [hi]\n---\n".to_vec()),
        ("empty.parquet".to_owned(), Vec::new()),
    ]);
    for at in 0..shards {
        let bytes = (0..[2500, 400, 1000][at % 3] + at)
            .map(|byte| (byte * 7 + at) as u8)
            .collect();
        files.insert(format!("data/train-{at:05}-of-{shards:05}.parquet"), bytes);
    }
    fs::create_dir(folder.path().join("data")).unwrap();
    for (name, bytes) in &files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    for name in ["flow.json", ".hidden", "model.flow.json", "rejects.parquet"] {
        fs::write(folder.path().join(name), b"not pushed").unwrap();
    }
    (folder, files)
}

#[test]
fn a_dataset_arrives_and_nothing_is_sent_twice() {
    let hub = FakeHub::new(|_, _| None);
    let (folder, files) = dataset(4);
    let push = |folder: &tempfile::TempDir| {
        hub.push("hf://datasets/o/n", &files_below(folder.path()).unwrap(), true)
            .unwrap()
    };
    let pushed = push(&folder);
    assert_eq!(hub.state.lock().unwrap().files, files);
    assert_eq!(hub.state.lock().unwrap().repository, Some(true));
    assert_eq!((pushed.files, pushed.unchanged), (6, 0));
    assert_eq!(pushed.sent, files.values().map(|bytes| bytes.len() as u64).sum::<u64>());
    assert_eq!(pushed.page, format!("{}/datasets/o/n", hub.hub.address));
    assert!(
        hub.storage
            .requests()
            .iter()
            .all(|request| !request.headers.contains_key("authorization"))
    );
    let uploads = hub.storage.requests().len();
    assert_eq!(uploads, 3 + 1 + 2 + 3);

    let again = push(&folder);
    assert_eq!((again.files, again.sent, again.unchanged), (0, 0, 6));
    assert_eq!(
        (hub.storage.requests().len(), hub.state.lock().unwrap().commits.len()),
        (uploads, 1)
    );

    // Another number of shards: those of the storage are not sent, and the old ones do not stay beside the new ones.
    let (folder, files) = dataset(3);
    fs::write(folder.path().join("README.md"), b"other").unwrap();
    let pushed = push(&folder);
    assert_eq!(pushed.deleted.len(), 4);
    assert_eq!(pushed.sent, 5);
    assert_eq!(hub.storage.requests().len(), uploads);
    let state = hub.state.lock().unwrap();
    assert!(state.files.keys().eq(files.keys()));
    assert_eq!(state.commits.len(), 2);
}

#[test]
fn an_upload_that_breaks_is_taken_up_again() {
    // The third part is refused twice by a server in trouble, then its address has expired.
    let hub = FakeHub::new(|request, state| {
        let is_third = request.method == "PUT" && request.path.ends_with("/3");
        if !is_third || state.commits.len() > 2 {
            return None;
        }
        let tries = state.commits.len();
        state.commits.push(Vec::new());
        Some(Answer::new([503, 500, 403][tries], &[], b""))
    });
    let (folder, files) = dataset(1);
    let pushed = hub
        .push("hf://datasets/o/n", &files_below(folder.path()).unwrap(), false)
        .unwrap();
    assert_eq!(hub.state.lock().unwrap().files, files);
    assert_eq!(pushed.files, 3);
    assert_eq!((hub.asked("objects/batch"), hub.asked("/part/")), (2, 3 + 2 + 3));

    // A storage that takes only one file: the push ends after bounded tries, changes nothing, and the next one sends the others.
    let hub = FakeHub::new(|request, state| {
        let is_closed = request.method == "PUT" && state.repository == Some(true) && !state.stored.is_empty();
        is_closed.then(|| Answer::new(500, &[], b""))
    });
    let (folder, files) = dataset(2);
    let files_of_it = files_below(folder.path()).unwrap();
    let error = hub.push("hf://datasets/o/n", &files_of_it, true).unwrap_err();
    assert!(
        error.contains("server error (status 500)") && error.contains("run again"),
        "{error}"
    );
    assert!(hub.state.lock().unwrap().files.is_empty());
    let tries = hub.storage.requests().len();
    assert!(tries <= 3 + 3 * 6, "{tries}");
    hub.state.lock().unwrap().repository = Some(false);
    let pushed = hub.push("hf://datasets/o/n", &files_of_it, false).unwrap();
    assert_eq!(hub.state.lock().unwrap().files, files);
    assert_eq!(hub.storage.requests().len() - tries, 1);
    assert!(pushed.sent < 500, "{pushed:?}");
}

#[test]
fn who_may_not_write_is_told_at_once() {
    let (folder, _) = dataset(1);
    let files = files_below(folder.path()).unwrap();
    let refused = |status: u16, at: &'static str| {
        let hub = FakeHub::new(move |request, _| {
            let body = json!({ "error": "so says\nthe hub" }).to_string();
            request
                .path
                .contains(at)
                .then(|| Answer::new(status, &[], body.as_bytes()))
        });
        let error = hub.push("hf://datasets/o/n", &files, false).unwrap_err();
        (error, hub.asked(at))
    };
    for (status, at, expected) in [
        (401, "/api/datasets/o/n", "does not accept the token from HF_TOKEN"),
        (403, "repos/create", "may not write to hf://datasets/o/n"),
        (403, "preupload", "may not write"),
        (403, "commit", "the commit: the token from HF_TOKEN may not write"),
        (413, "commit", "too large"),
        (301, "preupload", "renamed"),
    ] {
        let (error, asked) = refused(status, at);
        assert!(error.contains(expected) && error.contains("so says"), "{error}");
        assert_eq!(asked, 1, "{error}");
    }
    for status in [429, 500, 503] {
        let (error, asked) = refused(status, "preupload");
        assert!(error.contains(&status.to_string()), "{error}");
        assert_eq!(asked, 6, "{error}");
    }
    // Without a token nothing is asked.
    let hub = FakeHub::new(|_, _| None);
    let push = Push {
        repository: &HubReference::target("hf://o/n").unwrap(),
        files: &files,
        private: false,
        message: "x",
    };
    let error = TestCache::new()
        .hub(&hub.hub.address, None)
        .push(&push, &mut |_| true)
        .unwrap_err();
    assert!(error.to_string().contains("needs a token"), "{error}");
    assert!(hub.hub.requests().is_empty());
}

/// The hub answers 409 for a repository that is there already, and for a commit at the same time as another one.
#[test]
fn others_who_push_at_the_same_time_are_waited_for_and_their_commits_noticed() {
    let (folder, files) = dataset(1);
    let sent = files_below(folder.path()).unwrap();
    let other = "f".repeat(40);
    for (status, refusals, is_moved, expected) in [
        (409, 2, false, Ok(3)),
        (412, 1, false, Ok(2)),
        (409, usize::MAX, false, Err(6)),
        (409, 1, true, Err(1)),
        (412, 1, true, Err(1)),
    ] {
        let (other, tries) = (other.clone(), Mutex::new(0));
        let hub = FakeHub::new(move |request, state| {
            let mut tries = tries.lock().unwrap();
            match request.path.as_str() {
                // Made by somebody else since it was looked for.
                "/api/repos/create" => {
                    state.repository = Some(true);
                    Some(Answer::refused(409, ""))
                }
                path if path.contains("/commit/") => {
                    *tries += 1;
                    let said = json!({ "error": "A commit has happened since." }).to_string();
                    (*tries <= refusals).then(|| Answer::new(status, &[], said.as_bytes()))
                }
                path if path.contains("/revision/") && is_moved && *tries > 0 => {
                    Some(ok(&json!({ "sha": other, "siblings": [] })))
                }
                _ => None,
            }
        });
        let pushed = hub.push("hf://datasets/o/n", &sent, true);
        let asked = hub.asked("/commit/");
        match (pushed, expected) {
            (Ok(pushed), Ok(times)) => {
                assert_eq!((pushed.files, asked), (3, times));
                assert_eq!(hub.state.lock().unwrap().files, files);
            }
            (Err(error), Err(times)) => {
                assert!(
                    error.contains("another commit to hf://datasets/o/n meanwhile: A commit has happened since."),
                    "{error}"
                );
                assert_eq!(asked, times, "{error}");
                assert!(hub.state.lock().unwrap().files.is_empty());
            }
            (pushed, _) => panic!("{status}, {refusals} times: {pushed:?}"),
        }
    }
}

#[test]
fn answers_that_are_none_are_errors() {
    let (folder, _) = dataset(1);
    let files = files_below(folder.path()).unwrap();
    for (at, body) in [
        ("preupload", json!({ "files": [] })),
        (
            "preupload",
            json!({ "files": [{ "path": "README.md", "uploadMode": "new" }] }),
        ),
        ("preupload", json!("no")),
        ("objects/batch", json!({ "objects": [{ "oid": "00", "actions": {} }] })),
        ("objects/batch", json!([])),
    ] {
        let hub = FakeHub::new(move |request, _| request.path.contains(at).then(|| ok(&body)));
        let error = hub.push("hf://datasets/o/n", &files, false).unwrap_err();
        assert!(error.contains("does not answer as the hub does"), "{error}");
        assert!(hub.state.lock().unwrap().commits.is_empty());
    }
    for header in [
        json!({ "chunk_size": "0", "1": "http://x/" }),
        json!({ "chunk_size": "1000", "1": "http://x/", "2": "http://x/" }),
        json!({ "chunk_size": "1000", "1": "http://x/", "2": "http://x/", "4": "http://x/" }),
        json!({ "chunk_size": "1" }),
        json!({ "chunk_size": [] }),
    ] {
        let hub = FakeHub::new(move |request, _| {
            let body: Value = serde_json::from_slice(&request.body).ok()?;
            let oid = body["objects"][0]["oid"].as_str()?;
            let upload = json!({ "href": "http://127.0.0.1:1/", "header": header });
            Some(ok(
                &json!({ "objects": [{ "oid": oid, "actions": { "upload": upload } }] }),
            ))
        });
        let error = hub.push("hf://datasets/o/n", &files, false).unwrap_err();
        assert!(error.contains("does not answer as the hub does: data/train"), "{error}");
    }
}

#[test]
fn a_model_goes_to_a_branch_with_a_card_unless_there_is_one() {
    let hub = FakeHub::new(|_, _| None);
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("model.nemo"), vec![7; 1500]).unwrap();
    fs::write(folder.path().join("notes.tmp"), b"ignored").unwrap();
    let mut files = files_below(folder.path()).unwrap();
    files.push(NewFile::unless_there("README.md", b"card".to_vec()));
    let pushed = hub.push("hf://o/n@dev", &files, false).unwrap();
    assert_eq!((pushed.files, pushed.unchanged), (2, 1));
    assert!(hub.state.lock().unwrap().branches.contains("dev"));
    assert!(hub.asked("/api/models/o/n/commit/dev") == 1 && hub.asked("/o/n.git/info/lfs") == 1);
    hub.state
        .lock()
        .unwrap()
        .files
        .insert("README.md".into(), b"by hand".to_vec());
    let pushed = hub.push("hf://o/n@dev", &files, false).unwrap();
    assert_eq!((pushed.files, pushed.unchanged), (0, 3));
    let error = hub.push("hf://o/n", &files, true).unwrap_err();
    assert!(error.contains("there already, and is public"), "{error}");
}

#[test]
fn a_push_ends_where_it_is_cancelled() {
    let (folder, _) = dataset(1);
    let files = files_below(folder.path()).unwrap();
    let push = Push {
        repository: &HubReference::target("hf://datasets/o/n").unwrap(),
        files: &files,
        private: false,
        message: "x",
    };
    for most in [0, 1, 4, 7] {
        let hub = FakeHub::new(|_, _| None);
        let mut lines = 0;
        let mut progress = |_: &str| {
            lines += 1;
            lines <= most
        };
        let pushed = TestCache::new()
            .hub(&hub.hub.address, Some("secret"))
            .push(&push, &mut progress)
            .unwrap();
        assert!(pushed.is_none(), "{most}");
        assert!(hub.state.lock().unwrap().commits.is_empty());
    }
}

#[test]
fn targets_are_repositories_and_files_are_files() {
    let dataset = HubReference::target("hf://datasets/o/n@dev").unwrap();
    assert_eq!(dataset.to_string(), "hf://datasets/o/n@dev");
    for text in [
        "o/n",
        "hf://o",
        "hf://o/n/model.nemo",
        "hf://datasets/o/n/config",
        "hf://datasets/o/n:train",
        "hf://o/../n",
        "",
    ] {
        assert!(HubReference::target(text).is_err(), "{text}");
    }
    let cache = TestCache::new();
    for revision in ["refs/pr/1", COMMIT] {
        let repository = HubReference::target(&format!("hf://datasets/o/n@{revision}")).unwrap();
        let push = Push {
            repository: &repository,
            files: &[],
            private: false,
            message: "x",
        };
        let error = cache
            .hub("http://127.0.0.1:1", Some("secret"))
            .push(&push, &mut |_| true)
            .unwrap_err();
        assert!(error.to_string().contains("is not a branch"), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    assert!(files_below(&folder.path().join("nothing")).is_err());
    std::os::unix::fs::symlink(folder.path(), folder.path().join("round")).unwrap();
    let error = files_below(folder.path()).unwrap_err();
    assert!(error.to_string().contains("link to a folder"), "{error}");
}
