//! Against two servers: one that answers as the hub, and one as its storage.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use crate::{Location, ObjectUrl, Storage, StorageFault};

const FILE: &str = "/datasets/o/n/resolve/0123456789abcdef0123456789abcdef01234567/hi/train a.parquet";
const SECRET: &str = "hf_hush";

#[derive(Clone, Debug)]
struct Asked {
    method: String,
    path: String,
    headers: String,
}

impl Asked {
    /// What a header says, whose name is in small letters.
    fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.headers.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(found, _)| *found == name).map(|(_, value)| value)
    }
}

/// A status, further headers and a body.
type Answer = (u16, String, Vec<u8>);

struct Server {
    address: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    fn new(answer: impl Fn(&Asked) -> Answer + Send + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut lines = BufReader::new(stream.try_clone().unwrap())
                    .lines()
                    .map_while(Result::ok);
                let Some(first) = lines.next() else { continue };
                let mut parts = first.split(' ').map(str::to_owned);
                let request = Asked {
                    method: parts.next().unwrap(),
                    path: parts.next().unwrap(),
                    headers: lines
                        .take_while(|line| !line.is_empty())
                        .map(|line| line + "\n")
                        .collect(),
                };
                let (status, headers, body) = answer(&request);
                seen.lock().unwrap().push(request.clone());
                let length = if headers.contains("content-length") {
                    String::new()
                } else {
                    format!("content-length: {}\r\n", body.len())
                };
                let head = format!("HTTP/1.1 {status} x\r\nconnection: close\r\n{length}{headers}\r\n");
                let _ = stream.write_all(head.as_bytes());
                if request.method != "HEAD" {
                    let _ = stream.write_all(&body);
                }
            }
        });
        Server { address, asked }
    }

    fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

fn content() -> Vec<u8> {
    (0..3_000_000u32).map(|at| (at.wrapping_mul(at) >> 7) as u8).collect()
}

/// The bytes that a request asks for, as a server gives them that knows ranges.
fn ranged(asked: &Asked, bytes: &[u8]) -> Answer {
    let Some(range) = asked.header("range") else {
        return (200, String::new(), bytes.to_vec());
    };
    let (start, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
    let (start, last): (usize, usize) = (start.parse().unwrap(), last.parse().unwrap());
    let about = format!(
        "content-range: bytes {start}-{last}/{}\r\netag: \"of the storage\"\r\nlast-modified: Mon, 02 Jan 2006 15:04:05 GMT\r\n",
        bytes.len()
    );
    (206, about, bytes[start..=last].to_vec())
}

/// An answer of the hub that leads to its storage.
fn linked(storage: &str, etag: &str) -> Answer {
    let size = content().len();
    let headers = format!(
        "x-linked-etag: \"{etag}\"\r\nx-linked-size: {size}\r\netag: \"of the redirect\"\r\nlocation: {storage}/blob?X-Amz-Signature=signed\r\n"
    );
    (302, headers, b"Found".to_vec())
}

fn storage(endpoint: &str, more: &[(&str, &str)]) -> Storage {
    let variables = [
        ("HF_ENDPOINT", endpoint),
        ("HF_TOKEN", SECRET),
        ("FLOW_STORAGE_RETRIES", "1"),
    ];
    let all = variables.iter().chain(more);
    Storage::with_environment(all.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
}

fn url(endpoint: &str) -> ObjectUrl {
    match Location::parse(&format!("{endpoint}{}", FILE.replace(' ', "%20"))).unwrap() {
        Location::Object(url) => url,
        Location::Local(path) => panic!("{}", path.display()),
    }
}

#[test]
fn parts_come_from_the_storage_which_never_sees_the_token() {
    let cdn = Server::new(|asked| ranged(asked, &content()));
    let to = cdn.address.clone();
    let hub = Server::new(move |_| linked(&to, "abc"));
    let storage = storage(&hub.address, &[]);
    let url = url(&hub.address);
    let reader = storage.open(&url).unwrap();
    assert_eq!(
        (reader.stat().size, reader.stat().etag.as_deref()),
        (3_000_000, Some("abc"))
    );
    for range in [0..8, 1_000_000..1_300_000, 2_999_992..3_000_000] {
        let part = reader.read_range(range.clone()).unwrap();
        assert_eq!(part, content()[range.start as usize..range.end as usize]);
    }
    let mut whole = Vec::new();
    reader
        .copy_to(&mut |bytes| {
            whole.extend_from_slice(bytes);
            Ok(true)
        })
        .unwrap();
    assert_eq!(whole, content());
    let (of_hub, of_storage) = (hub.asked(), cdn.asked());
    assert!(
        of_hub
            .iter()
            .all(|asked| asked.header("authorization") == Some("Bearer hf_hush"))
    );
    assert!(of_hub.iter().all(|asked| asked.path == FILE.replace(' ', "%20")));
    let methods: Vec<&str> = of_hub.iter().map(|asked| asked.method.as_str()).collect();
    assert_eq!(methods, ["HEAD", "GET", "GET", "GET", "GET"]);
    assert_eq!(of_storage.len(), 4);
    for asked in of_storage {
        assert_eq!(
            (asked.method.as_str(), asked.path.as_str()),
            ("GET", "/blob?X-Amz-Signature=signed")
        );
        assert!(
            !asked.headers.contains("authorization") && !asked.headers.contains(SECRET),
            "{asked:?}"
        );
        // The storage has other ETags.
        assert!(asked.header("if-match").is_none(), "{asked:?}");
    }
}

/// As the hub gives small files: by an address of its own, which needs the token, too.
#[test]
fn files_of_git_come_from_the_hub_itself() {
    let hub = Server::new(|asked| match asked.path.strip_prefix("/api/resolve-cache") {
        None => (
            307,
            "etag: \"abc\"\r\nlocation: /api/resolve-cache/it\r\n".into(),
            Vec::new(),
        ),
        Some(_) => ranged(asked, &content()),
    });
    let storage = storage(&hub.address, &[]);
    let reader = storage.open(&url(&hub.address)).unwrap();
    assert_eq!(reader.stat().etag.as_deref(), Some("abc"));
    assert_eq!(reader.read_range(5..9).unwrap(), content()[5..9]);
    assert!(hub.asked().iter().all(|asked| asked.header("authorization").is_some()));
    assert!(hub.asked().len() == 4);
}

#[test]
fn a_file_that_is_another_one_meanwhile_is_an_error_that_names_it() {
    let cdn = Server::new(|asked| ranged(asked, &content()));
    let (to, etag) = (cdn.address.clone(), Arc::new(Mutex::new("abc")));
    let told = Arc::clone(&etag);
    let hub = Server::new(move |_| linked(&to, &told.lock().unwrap()));
    let storage = storage(&hub.address, &[]);
    let reader = storage.open(&url(&hub.address)).unwrap();
    reader.read_range(0..8).unwrap();
    *etag.lock().unwrap() = "other";
    let error = reader.read_range(8..16).unwrap_err();
    assert_eq!(error.fault, StorageFault::Changed);
    assert!(
        error.to_string().contains("hi/train%20a.parquet: it was changed"),
        "{error}"
    );
    assert_eq!(cdn.asked().len(), 1, "nothing of the other file is read");
}

#[test]
fn refusals_say_what_the_hub_says_and_no_token() {
    let refused = |status: u16, headers: &'static str| {
        let hub = Server::new(move |_| (status, headers.into(), b"<html>hf_hush</html>".to_vec()));
        storage(&hub.address, &[]).open(&url(&hub.address)).unwrap_err()
    };
    let gated = "x-error-code: GatedRepo\r\nx-error-message: Access to dataset o/n is restricted for hf_hush.\r\n";
    for (status, headers, fault, said) in [
        (
            401,
            gated,
            StorageFault::Credentials,
            "GatedRepo: Access to dataset o/n is restricted for ***.",
        ),
        (
            403,
            gated,
            StorageFault::PermissionDenied,
            "permission denied (GatedRepo: Access",
        ),
        (403, "", StorageFault::PermissionDenied, "permission denied (403"),
        (
            404,
            "x-error-code: EntryNotFound\r\n",
            StorageFault::NotFound,
            "there is no such object",
        ),
        (503, "", StorageFault::Unavailable, "the server is not available"),
        (
            302,
            "location: ftp://x/\r\n",
            StorageFault::Unavailable,
            "not an address",
        ),
        (
            302,
            "location: /datasets/round\r\n",
            StorageFault::Unavailable,
            "more than 8 redirections",
        ),
    ] {
        let error = refused(status, headers);
        assert_eq!(error.fault, fault, "{error}");
        let text = error.to_string();
        assert!(
            text.contains(said) && text.contains("train%20a.parquet") && !text.contains(SECRET),
            "{text}"
        );
    }
    let offline = storage("http://127.0.0.1:9", &[("HF_HUB_OFFLINE", "1")]);
    let error = offline.open(&url("http://127.0.0.1:9")).unwrap_err();
    assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
}

#[test]
fn answers_of_the_storage_that_are_not_the_range_are_errors() {
    let range = "content-range: bytes 0-7/3000000\r\n";
    for (status, headers, body, fault, said) in [
        (416, "", 0, StorageFault::Changed, "it was changed"),
        (200, "", 8, StorageFault::Unsupported, "not supported"),
        (206, range, 5, StorageFault::Other, "the request failed"),
        (
            206,
            "content-range: bytes 8-15/3000000\r\n",
            8,
            StorageFault::Other,
            "the request failed",
        ),
        (
            206,
            "content-range: bytes 0-7/16\r\n",
            8,
            StorageFault::Changed,
            "it was changed",
        ),
        (403, "", 0, StorageFault::PermissionDenied, "403"),
    ] {
        let cdn = Server::new(move |_| {
            let mut headers = headers.to_owned();
            if body == 5 {
                headers.push_str("content-length: 8\r\n");
            }
            (status, headers, content()[..body].to_vec())
        });
        let to = cdn.address.clone();
        let hub = Server::new(move |_| linked(&to, "abc"));
        let reader = storage(&hub.address, &[]).open(&url(&hub.address)).unwrap();
        let error = reader.read_range(0..8).unwrap_err();
        assert_eq!(error.fault, fault, "{status} {headers}: {error}");
        assert!(
            error.to_string().contains(said) && !error.to_string().contains("signed"),
            "{error}"
        );
    }
}
