//! Hubs that never come to an end, or send other bytes than they say.

use std::time::Instant;

use super::*;

/// The hub of one file, whose bytes `answer` sends for a range from the given offset on.
fn one_file(name: &'static str, etag: String, size: u64, answer: impl Fn(usize) -> Answer + Send + 'static) -> Server {
    Server::new(move |request, _| {
        if !request.path.contains("/resolve/") {
            return repository(&[(name, Vec::new())], request);
        }
        if request.method == "HEAD" {
            let headers = [("x-linked-etag", etag.as_str()), ("x-linked-size", &size.to_string())];
            return Answer::new(200, &headers, b"");
        }
        let range = request
            .headers
            .get("range")
            .map_or("0", |range| range.trim_start_matches("bytes=").trim_end_matches('-'));
        answer(range.parse().unwrap())
    })
}

/// Bytes from `from` on of a file of zeros, with the length that belongs to them.
fn zeros(from: usize, count: usize) -> Answer {
    Answer::new(if from > 0 { 206 } else { 200 }, &[], &vec![0; count])
}

/// The bytes that are in the cache.
fn kept(hub: &Hub) -> u64 {
    let blobs = std::fs::read_dir(hub.cache.join("models--o--n/blobs")).unwrap();
    blobs.map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}

#[test]
fn a_body_longer_than_was_said_ends_at_its_first_byte_too_many() {
    // In one answer, after half of it, and behind a file that is whole.
    for until in [8 << 20, 500, 1000] {
        let server = one_file("m.nemo", sha256(&[0; 1000]), 1000, move |from| {
            let mut answer = zeros(from, 8 << 20);
            if from == 0 {
                answer.until = until;
            }
            answer
        });
        let cache = TestCache::new();
        let hub = cache.hub(&server.address, None);
        if until == 1000 {
            // It breaks where the file ends, which is whole.
            fetch(&hub, "hf://o/n").unwrap();
            continue;
        }
        let text = refusal(&hub, "hf://o/n");
        let named = ["m.nemo", &server.address, "more than the 1000 bytes", "HF_ENDPOINT"];
        assert!(named.iter().all(|word| text.contains(word)), "{text}");
        assert_eq!(kept(&hub), 0);
        assert!(server.requests().len() <= 5, "{:?}", server.requests());
    }
}

#[test]
fn a_body_shorter_than_was_said_is_asked_for_some_times_and_with_pauses() {
    type Bytes = fn(usize) -> Answer;
    let cases: [(&str, Bytes); 4] = [
        ("half of it, and no more", |from| match from {
            0 => zeros(0, 500_000),
            _ => zeros(from, 0),
        }),
        ("half of it, and no bytes there", |from| match from {
            0 => zeros(0, 500_000),
            _ => Answer::new(416, &[], b""),
        }),
        ("a byte each time", |from| {
            let mut answer = zeros(from, 1_000_000 - from);
            answer.until = 1;
            answer
        }),
        ("half of it, each time from the beginning", |_| zeros(0, 500_000)),
    ];
    for (case, answer) in cases {
        let server = one_file("m.nemo", sha256(b"x"), 1_000_000, answer);
        let cache = TestCache::new();
        let hub = cache.hub(&server.address, None);
        let begin = Instant::now();
        let text = refusal(&hub, "hf://o/n");
        let named = ["m.nemo", &server.address, "breaks off at", "of 1.0 MB", "run again"];
        assert!(named.iter().all(|word| text.contains(word)), "{case}: {text}");
        assert!(server.requests().len() <= 18, "{case}: {}", server.requests().len());
        assert!(
            begin.elapsed() >= Duration::from_millis(500),
            "{case}: {:?}",
            begin.elapsed()
        );
    }
}

#[test]
fn a_server_that_breaks_off_too_often_is_given_up() {
    let server = one_file("m.nemo", sha256(b"x"), 10 << 30, |from| {
        let mut answer = zeros(from, 300_000);
        answer.until = 280_000;
        answer
    });
    let cache = TestCache::new();
    let text = refusal(&cache.hub(&server.address, None), "hf://o/n");
    assert!(text.contains("breaks off at 2"), "{text}");
    let asked = server.requests().len();
    assert!((150..=210).contains(&asked), "{asked}");
}

#[test]
fn endless_lists_of_files_are_refused() {
    for (count, help) in [(200_000, "HF_ENDPOINT"), (5000, "name the file")] {
        let names = (0..count).map(|n| format!("{n}.json"));
        let model = ["config.json", "model.safetensors"].map(str::to_owned);
        let named = |name| serde_json::json!({ "rfilename": name });
        let siblings: Vec<_> = names.chain(model).map(named).collect();
        let listing = serde_json::json!({ "sha": COMMIT, "siblings": siblings }).to_string();
        let server = Server::new(move |_, _| Answer::new(200, &[], listing.as_bytes()));
        let cache = TestCache::new();
        let hub = Hub {
            timeout: Duration::from_secs(20),
            ..cache.hub(&server.address, None)
        };
        let text = refusal(&hub, "hf://o/n");
        assert!(text.contains("more than") && text.contains(help), "{text}");
        assert_eq!(server.requests().len(), 1);
    }
    // A long list is shortened in the message.
    let files: Vec<(String, Vec<u8>)> = (0..5000).map(|n| (format!("{n}.nemo"), vec![1])).collect();
    let server = Server::new(move |request, _| {
        let files: Vec<(&str, Vec<u8>)> = files
            .iter()
            .map(|(name, bytes)| (name.as_str(), bytes.clone()))
            .collect();
        repository(&files, request)
    });
    let text = refusal(&TestCache::new().hub(&server.address, None), "hf://o/n");
    assert!(text.contains("several .nemo archives") && text.len() < 1000, "{text}");
}

#[test]
fn small_files_are_compared_with_the_digest_that_git_gives_them() {
    let files = vec![("config.json", b"{\"a\": 1}".to_vec()), ("model.safetensors", bytes())];
    let server = Server::new(move |request, number| {
        let mut answer = repository(&files, request);
        // The first time a digit is another.
        if request.method == "GET" && request.path.ends_with("config.json") && number < 5 {
            answer.body[6] ^= 1;
        }
        answer
    });
    let cache = TestCache::new();
    let hub = cache.hub(&server.address, None);
    let text = refusal(&hub, "hf://o/n");
    let named = ["config.json came damaged", &server.address, "SHA-1", "run again"];
    assert!(named.iter().all(|word| text.contains(word)), "{text}");
    assert_eq!(kept(&hub), 0);
    let path = fetch(&hub, "hf://o/n").unwrap();
    assert_eq!(std::fs::read(path.join("config.json")).unwrap(), b"{\"a\": 1}");
}
