//! Against a small HTTP server that plays the hub.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::{Hub, HubError, HubReference, HubToken};

mod dataset;
mod hostile;
mod push;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A request: method, path, headers by their names in small letters, body.
#[derive(Clone, Debug)]
struct Request {
    method: String,
    path: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

/// What the server answers: status, headers, the body, and how much of it before the connection breaks.
struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    until: usize,
}

impl Answer {
    fn new(status: u16, headers: &[(&str, &str)], body: &[u8]) -> Self {
        Answer {
            status,
            headers: headers.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect(),
            body: body.to_vec(),
            until: usize::MAX,
        }
    }

    fn refused(status: u16, code: &str) -> Self {
        Answer::new(status, &[("x-error-code", code)], b"{}")
    }
}

struct Server {
    address: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    fn new(answer: impl Fn(&Request, usize) -> Answer + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let Some(request) = read_request(&mut reader) else {
                    continue;
                };
                let number = {
                    let mut seen = seen.lock().unwrap();
                    seen.push(request.clone());
                    seen.len()
                };
                write_answer(stream, &request, answer(&request, number));
            }
        });
        Server { address, requests }
    }

    fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

fn read_request(reader: &mut impl BufRead) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut parts = line.split_whitespace();
    let (method, path) = (parts.next()?.to_owned(), parts.next()?.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim().split_once(": ") else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let length = headers
        .get("content-length")
        .map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Request {
        method,
        path,
        headers,
        body,
    })
}

fn write_answer(mut stream: TcpStream, request: &Request, answer: Answer) {
    let mut head = format!("HTTP/1.1 {} x\r\nconnection: close\r\n", answer.status);
    for (name, value) in &answer.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if !answer.headers.iter().any(|(name, _)| name == "content-length") {
        head.push_str(&format!("content-length: {}\r\n", answer.body.len()));
    }
    let _ = stream.write_all(format!("{head}\r\n").as_bytes());
    if request.method != "HEAD" {
        let _ = stream.write_all(&answer.body[..answer.until.min(answer.body.len())]);
    }
}

fn bytes() -> Vec<u8> {
    (0..300_000u32).map(|n| (n.wrapping_mul(n) >> 7) as u8).collect()
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

fn git_sha1(bytes: &[u8]) -> String {
    let header = format!("blob {}\0", bytes.len());
    hex::encode(Sha1::new_with_prefix(header).chain_update(bytes).finalize())
}

/// A repository as the hub serves it: files with their bytes, the large ones (`.nemo`, `.safetensors`) by their
/// SHA-256, others by git's SHA-1.
fn repository(files: &[(&str, Vec<u8>)], request: &Request) -> Answer {
    if request.path.starts_with("/api/models/o/n/revision/") {
        let siblings: Vec<_> = files
            .iter()
            .map(|(name, _)| serde_json::json!({ "rfilename": name }))
            .collect();
        let listing = serde_json::json!({ "sha": COMMIT, "siblings": siblings });
        return Answer::new(200, &[], listing.to_string().as_bytes());
    }
    let prefix = format!("/o/n/resolve/{COMMIT}/");
    let Some((name, bytes)) = files.iter().find(|(name, _)| request.path == format!("{prefix}{name}")) else {
        return Answer::refused(404, "EntryNotFound");
    };
    let etag = if name.ends_with(".nemo") || name.ends_with(".safetensors") {
        sha256(bytes)
    } else {
        git_sha1(bytes)
    };
    let from = request.headers.get("range").map_or(0, |range| {
        range
            .trim_start_matches("bytes=")
            .trim_end_matches('-')
            .parse()
            .unwrap()
    });
    let status = if from > 0 { 206 } else { 200 };
    Answer::new(
        status,
        &[
            ("x-linked-etag", &format!("\"{etag}\"")),
            ("x-linked-size", &bytes.len().to_string()),
            ("x-repo-commit", COMMIT),
        ],
        &bytes[from..],
    )
}

struct TestCache {
    folder: tempfile::TempDir,
}

impl TestCache {
    fn new() -> Self {
        TestCache {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn hub(&self, endpoint: &str, token: Option<&str>) -> Hub {
        Hub {
            endpoint: endpoint.to_owned(),
            cache: self.folder.path().join("hub"),
            token: token.map(|secret| HubToken {
                secret: secret.into(),
                from: "HF_TOKEN".into(),
            }),
            offline: false,
            timeout: Duration::from_millis(600),
        }
    }
}

fn reference(text: &str) -> HubReference {
    HubReference::parse(text).unwrap().unwrap()
}

fn fetch(hub: &Hub, text: &str) -> Result<PathBuf, HubError> {
    hub.fetch(&reference(text), &mut |_| true).map(Option::unwrap)
}

/// Message and help of a failure.
fn refusal(hub: &Hub, text: &str) -> String {
    match fetch(hub, text).unwrap_err() {
        HubError::Unavailable { message, help } => format!("{message} | {help}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_greeting_takes_any_answer_and_sends_no_token() {
    let server = Server::new(|_, _| Answer::new(503, &[], b""));
    let cache = TestCache::new();
    assert_eq!(cache.hub(&server.address, Some("secret")).greet().unwrap(), 503);
    let [request] = &server.requests()[..] else {
        panic!("one request");
    };
    assert_eq!((request.method.as_str(), request.path.as_str()), ("HEAD", "/"));
    assert!(!request.headers.contains_key("authorization"));
}

#[test]
fn a_name_without_the_scheme_is_recognised() {
    let meant = HubReference::meant("nvidia/parakeet-tdt-0.6b-v2");
    assert_eq!(meant.as_deref(), Some("hf://nvidia/parakeet-tdt-0.6b-v2"));
    for other in [
        "none",
        "models/small.nemo",
        "work/mini/checkpoints",
        "../small",
        "/models/small",
        "hf://nvidia/parakeet",
        "a b/c",
        "",
        // A file that is there.
        "src/tests.rs",
    ] {
        assert_eq!(HubReference::meant(other), None, "{other}");
    }
}

#[test]
fn references_are_read_and_hostile_ones_refused() {
    let plain = reference("hf://nvidia/parakeet-tdt-0.6b-v3");
    assert_eq!(
        (plain.repository().as_str(), plain.revision.as_str(), &plain.file),
        ("nvidia/parakeet-tdt-0.6b-v3", "main", &None)
    );
    let whole = reference("hf://o/n@v1.2/a/b c.nemo");
    assert_eq!(
        (whole.revision.as_str(), whole.file.as_deref()),
        ("v1.2", Some("a/b c.nemo"))
    );
    assert_eq!(whole.to_string(), "hf://o/n@v1.2/a/b c.nemo");
    assert!(HubReference::parse("model.nemo").is_none());
    for bad in [
        "hf://",
        "hf://o",
        "hf://o/",
        "hf://../n",
        "hf://o/..",
        "hf://o/n@",
        "hf://o/n@../x",
        "hf://o/n/../x",
        "hf://o/n/a//b",
        "hf://o/n/",
        "hf://o/n/a\nb",
        "hf://o n/n",
    ] {
        assert!(HubReference::parse(bad).unwrap().is_err(), "{bad}");
    }
}

#[test]
fn the_environment_is_read_as_the_hubs_programs_read_it() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().to_str().unwrap().to_owned();
    let with = |pairs: &[(&str, &str)]| {
        let pairs: BTreeMap<String, String> = pairs.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect();
        Hub::from_variables(move |name| pairs.get(name).cloned())
    };
    let hub = with(&[("HOME", "/home/u")]).unwrap();
    assert_eq!(hub.cache, Path::new("/home/u/.cache/huggingface/hub"));
    assert_eq!(hub.endpoint, "https://huggingface.co");
    assert!(hub.token.is_none() && !hub.offline);
    std::fs::write(folder.path().join("token"), "kept\n").unwrap();
    let hub = with(&[
        ("HF_HOME", &home),
        ("HF_ENDPOINT", "http://mirror/"),
        ("HF_HUB_OFFLINE", "True"),
    ])
    .unwrap();
    assert_eq!(
        (hub.cache, hub.endpoint.as_str(), hub.offline),
        (folder.path().join("hub"), "http://mirror", true)
    );
    assert_eq!(hub.token.unwrap().secret, "kept");
    let hub = with(&[("HF_HOME", &home), ("HF_TOKEN", "given"), ("HF_HUB_CACHE", "/c")]).unwrap();
    assert_eq!(
        (hub.token.unwrap().secret.as_str(), hub.cache.as_path()),
        ("given", Path::new("/c"))
    );
    assert!(with(&[]).is_err());
}

#[test]
fn an_archive_is_downloaded_once_into_the_hubs_own_layout() {
    let files = vec![
        ("README.md", b"hello".to_vec()),
        ("m.nemo", bytes()),
        ("model.safetensors", bytes()),
    ];
    let server = Server::new(move |request, _| repository(&files, request));
    let test_cache = TestCache::new();
    let hub = test_cache.hub(&server.address, Some("secret"));
    let mut reported = Vec::new();
    let path = hub
        .fetch(&reference("hf://o/n"), &mut |line| {
            reported.push(line.to_owned());
            true
        })
        .unwrap()
        .unwrap();
    let root = hub.cache.join("models--o--n");
    assert_eq!(path, root.join("snapshots").join(COMMIT).join("m.nemo"));
    assert_eq!(std::fs::read(&path).unwrap(), bytes());
    assert_eq!(
        std::fs::read_link(&path).unwrap(),
        Path::new("../../blobs").join(sha256(&bytes()))
    );
    assert_eq!(std::fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    assert!(
        reported[0].contains("asking") && reported.iter().any(|line| line.contains("0.3 MB")),
        "{reported:?}"
    );
    assert!(
        server
            .requests()
            .iter()
            .all(|request| request.headers["authorization"] == "Bearer secret")
    );
    // Again: the list is asked for, the bytes are not.
    let before = server.requests().len();
    assert_eq!(fetch(&hub, "hf://o/n").unwrap(), path);
    assert_eq!(server.requests().len(), before + 1);
    // A commit never changes: nothing is asked.
    assert_eq!(fetch(&hub, &format!("hf://o/n@{COMMIT}")).unwrap(), path);
    // Without network, and with a hub that is gone, the copy serves.
    let offline = Hub {
        offline: true,
        ..hub.clone()
    };
    assert_eq!(fetch(&offline, "hf://o/n").unwrap(), path);
    let gone = test_cache.hub("http://127.0.0.1:9", None);
    assert_eq!(fetch(&gone, "hf://o/n").unwrap(), path);
    assert_eq!(server.requests().len(), before + 1);
}

#[test]
fn a_safetensors_model_comes_with_all_its_files() {
    let files = vec![
        ("config.json", b"{}".to_vec()),
        ("model.safetensors", bytes()),
        ("tokenizer.json", b"{ }".to_vec()),
        ("onnx/model.onnx", b"no".to_vec()),
        ("../../evil.json", b"no".to_vec()),
    ];
    let server = Server::new(move |request, _| repository(&files, request));
    let test_cache = TestCache::new();
    let hub = test_cache.hub(&server.address, None);
    let path = fetch(&hub, "hf://o/n").unwrap();
    let mut names: Vec<_> = std::fs::read_dir(&path)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json"]);
    assert!(refusal(&hub, "hf://o/n/other.nemo").contains("there is no file other.nemo in o/n"));
    let offline = Hub { offline: true, ..hub };
    assert_eq!(fetch(&offline, "hf://o/n").unwrap(), path);
}

#[test]
fn a_broken_download_goes_on_where_it_ended() {
    let files = vec![("m.nemo", bytes())];
    let server = Server::new(move |request, _| {
        let mut answer = repository(&files, request);
        if request.method == "GET" && request.path.contains("/resolve/") {
            answer.until = 130_000;
        }
        answer
    });
    let test_cache = TestCache::new();
    let hub = test_cache.hub(&server.address, None);
    let path = fetch(&hub, "hf://o/n").unwrap();
    assert_eq!(std::fs::read(path).unwrap(), bytes());
    let requests = server.requests();
    let ranges: Vec<_> = requests
        .iter()
        .filter_map(|request| request.headers.get("range"))
        .collect();
    assert_eq!(ranges, ["bytes=130000-", "bytes=260000-"]);
}

#[test]
fn an_ended_download_stays_to_go_on_from_and_a_dead_one_is_given_up() {
    let files = vec![("m.nemo", bytes())];
    let server = Server::new(move |request, _| {
        let mut answer = repository(&files, request);
        if request.method == "GET" && request.path.contains("/resolve/") {
            answer.until = if request.headers.contains_key("range") {
                0
            } else {
                50_000
            };
        }
        answer
    });
    let test_cache = TestCache::new();
    let hub = test_cache.hub(&server.address, None);
    let text = refusal(&hub, "hf://o/n");
    assert!(
        text.contains("breaks off at 0.1 of 0.3 MB") && text.contains("run again"),
        "{text}"
    );
    let partial = hub
        .cache
        .join("models--o--n/blobs")
        .join(format!("{}.incomplete", sha256(&bytes())));
    assert_eq!(std::fs::metadata(&partial).unwrap().len(), 50_000);
    // Whoever stops it keeps what came.
    assert_eq!(
        hub.fetch(&reference("hf://o/n"), &mut |line| line.contains("asking"))
            .unwrap(),
        None
    );
    assert_eq!(std::fs::metadata(&partial).unwrap().len(), 50_000);
    // A hub that can: only the rest is asked for.
    let files = vec![("m.nemo", bytes())];
    let server = Server::new(move |request, _| repository(&files, request));
    let path = fetch(&test_cache.hub(&server.address, None), "hf://o/n").unwrap();
    assert_eq!(std::fs::read(path).unwrap(), bytes());
    assert!(server.requests().iter().any(|request| {
        request
            .headers
            .get("range")
            .is_some_and(|range| range == "bytes=50000-")
    }));
}

#[test]
fn damaged_bytes_are_not_kept() {
    let files = vec![("m.nemo", bytes())];
    let server = Server::new(move |request, _| {
        let mut answer = repository(&files, request);
        if request.method == "GET" && request.path.contains("/resolve/") {
            answer.body[77] ^= 1;
        }
        answer
    });
    let test_cache = TestCache::new();
    let hub = test_cache.hub(&server.address, None);
    assert!(refusal(&hub, "hf://o/n").contains("came damaged"));
    assert_eq!(
        std::fs::read_dir(hub.cache.join("models--o--n/blobs")).unwrap().count(),
        0
    );
    assert!(!hub.cache.join("models--o--n/snapshots").exists());
}

#[test]
fn a_server_that_knows_no_ranges_begins_anew_and_one_that_redirects_gets_no_token() {
    let files = vec![("m.nemo", bytes())];
    let stored = files.clone();
    let store = Server::new(move |_, number| {
        let mut answer = Answer::new(200, &[], &stored[0].1);
        if number == 1 {
            answer.until = 1000;
        }
        answer
    });
    let to = format!("{}/blob?signed=1", store.address);
    let server = Server::new(move |request, _| {
        let mut answer = repository(&files, request);
        if request.path.contains("/resolve/") {
            answer.status = 302;
            answer.headers.push(("location".into(), to.clone()));
            answer.body.clear();
        }
        answer
    });
    let test_cache = TestCache::new();
    let path = fetch(&test_cache.hub(&server.address, Some("secret")), "hf://o/n").unwrap();
    assert_eq!(std::fs::read(path).unwrap(), bytes());
    let requests = store.requests();
    assert_eq!(requests.len(), 2);
    assert!(
        requests
            .iter()
            .all(|request| request.method == "GET" && !request.headers.contains_key("authorization"))
    );
}

#[test]
fn each_refusal_says_what_to_do() {
    let cases: [(u16, &str, Option<&str>, &[&str]); 10] = [
        (
            401,
            "GatedRepo",
            None,
            &["there is no token", "accept the conditions", "HF_TOKEN"],
        ),
        (
            403,
            "GatedRepo",
            Some("t"),
            &["has not, or is not let in yet", "/o/n with that account"],
        ),
        (401, "GatedRepo", Some("t"), &["the account of the token from HF_TOKEN"]),
        (401, "RepoNotFound", None, &["or it is private", "check the name"]),
        (404, "RepoNotFound", Some("t"), &["may not see it", "whose token"]),
        (404, "RevisionNotFound", None, &["has no revision v9"]),
        (401, "", Some("t"), &["does not accept the token from HF_TOKEN"]),
        (403, "", Some("t"), &["forbids access"]),
        (429, "", None, &["limits the rate of requests"]),
        (503, "", None, &["a server error (status 503)"]),
    ];
    for (status, code, token, words) in cases {
        let code = code.to_owned();
        let server = Server::new(move |_, _| Answer::refused(status, &code));
        let text = refusal(&TestCache::new().hub(&server.address, token), "hf://o/n@v9");
        assert!(words.iter().all(|word| text.contains(word)), "{status}: {text}");
    }
}

#[test]
fn a_hub_that_is_not_there_or_silent_is_told_apart() {
    let test_cache = TestCache::new();
    let text = refusal(&test_cache.hub("http://127.0.0.1:9", None), "hf://o/n");
    assert!(
        text.contains("refuses the connection") && text.contains("HF_HUB_OFFLINE"),
        "{text}"
    );
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", silent.local_addr().unwrap());
    let text = refusal(&test_cache.hub(&address, None), "hf://o/n");
    assert!(text.contains("does not answer within"), "{text}");
    let offline = Hub {
        offline: true,
        ..test_cache.hub(&address, None)
    };
    let text = refusal(&offline, "hf://o/n");
    assert!(
        text.contains("is not in the cache") && text.contains("HF_HUB_OFFLINE is set"),
        "{text}"
    );
}

#[test]
fn a_repository_without_a_model_or_with_several_says_what_it_holds() {
    for (names, word) in [
        (vec!["a.nemo", "b.nemo"], "several .nemo archives: a.nemo, b.nemo"),
        (vec!["README.md"], "neither a .nemo archive"),
    ] {
        let files: Vec<(&str, Vec<u8>)> = names.into_iter().map(|name| (name, vec![1])).collect();
        let server = Server::new(move |request, _| repository(&files, request));
        let text = refusal(&TestCache::new().hub(&server.address, None), "hf://o/n");
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn a_full_disk_is_told_with_what_to_do() {
    // The cache on a device that is always full.
    let error = std::fs::write("/dev/full", b"x").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    let test_cache = TestCache::new();
    let files = vec![("m.nemo", bytes())];
    let server = Server::new(move |request, _| repository(&files, request));
    let hub = test_cache.hub(&server.address, None);
    let blobs = hub.cache.join("models--o--n/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    std::os::unix::fs::symlink("/dev/full", blobs.join(format!("{}.incomplete", sha256(&bytes())))).unwrap();
    let text = refusal(&hub, "hf://o/n");
    assert!(text.contains("the disk is full") && text.contains("HF_HOME"), "{text}");
}
