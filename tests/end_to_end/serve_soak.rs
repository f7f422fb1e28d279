//! Thousands of requests of all kinds to one `flow serve`: no leaks of memory or files, and every client gets the same
//! response as without other clients.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use flow_random::SplitMix64;
use serde_json::Value;

use crate::binary::program;
use crate::served::{
    Answer, PATIENCE, Served, TRANSCRIPTIONS, agent, content_type, form, get, post, raw_post, read_answer,
};

const REQUESTS: usize = 10_000;
const CLIENTS: usize = 8;
/// Requests between two checks of the process.
const ROUND: usize = 200;
const SEED: u64 = 10_000;

/// What the least resident memory of each later fifth of the requests may exceed the most of the first two fifths by, in KiB. For
/// the last fifth it is 16 KiB for each of the 4,000 requests between, and the smallest recording that is sent has 25: a leak of
/// recordings, of their samples or of jobs exceeds it. The least counts, as without a leak 120 MiB are between rounds (606 to 727 in
/// those from the 2,400th request to the 14,400th): what the allocator keeps depends on which requests come together.
const MOST_GROWTH: u64 = 64 << 10;

/// A request, and its response without other requests.
struct Case {
    name: String,
    content_type: String,
    body: Vec<u8>,
    /// None: a client that goes.
    alone: Option<Answer>,
}

fn file(path: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Speech in WAV and FLAC, and a tone in every other container.
fn recordings() -> Vec<(String, Vec<u8>)> {
    let speech = [
        "model/audio/eval0_en-us.wav",
        "model/audio/eval1_de.wav",
        "model/audio/train0_it.wav",
        "model/audio/train2_ru.wav",
        "model/audio/eval3_es.wav",
        "transcription/short/s1.flac",
        "transcription/short/s9.flac",
    ];
    let mut recordings: Vec<(String, Vec<u8>)> = speech
        .iter()
        .map(|name| ((*name).to_owned(), file(&format!("tests/data/golden/{name}"))))
        .collect();
    for ending in ["caf", "m4a", "mkv", "mov", "mp3", "ogg", "opus", "webm"] {
        let name = format!("tone.{ending}");
        let bytes = file(&format!("stages/audio/tests/data/{name}"));
        recordings.push((name, bytes));
    }
    recordings
}

fn case(name: String, body: Vec<u8>) -> Case {
    Case {
        name,
        content_type: content_type(),
        body,
        alone: None,
    }
}

/// Every recording in one of the forms of a transcript, and one with speakers.
fn good(recordings: &[(String, Vec<u8>)]) -> Vec<Case> {
    let forms: [&[(&str, &str)]; 6] = [
        &[
            ("response_format", "verbose_json"),
            ("timestamp_granularities[]", "word"),
        ],
        &[("response_format", "json")],
        &[("stream", "true")],
        &[("response_format", "srt")],
        &[("response_format", "vtt")],
        &[("response_format", "text"), ("language", "de")],
    ];
    let mut cases: Vec<Case> = recordings
        .iter()
        .enumerate()
        .flat_map(|(number, (name, bytes))| {
            [number, number + 1].map(|which| {
                let fields = forms[which % forms.len()];
                case(format!("{name} with {fields:?}"), form(Some(bytes), fields))
            })
        })
        .collect();
    let (name, bytes) = &recordings[1];
    let speakers = form(Some(bytes), &[("response_format", "diarized_json")]);
    cases.push(case(format!("{name} with speakers"), speakers));
    cases
}

/// Invalid and damaged requests. Some get a transcript of the readable part.
fn hostile(recordings: &[(String, Vec<u8>)], draw: &mut SplitMix64) -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, bytes) in recordings {
        let half = &bytes[..bytes.len() / 2];
        cases.push(case(format!("{name}, cut off"), form(Some(half), &[])));
        let mut damaged = bytes.clone();
        for _ in 0..20 {
            let place = draw.below(damaged.len());
            damaged[place] ^= 1 << draw.below(8);
        }
        cases.push(case(format!("{name}, damaged"), form(Some(&damaged), &[])));
    }
    let wav = &recordings[0].1;
    let mut huge = wav.clone();
    huge[40..44].copy_from_slice(&0xFFFF_FFF0_u32.to_le_bytes());
    cases.push(case("sizes of 4 GiB".to_owned(), form(Some(&huge), &[])));
    let mut channels = wav.clone();
    channels[22..24].copy_from_slice(&u16::MAX.to_le_bytes());
    cases.push(case("65535 channels".to_owned(), form(Some(&channels), &[])));
    let mut rate = wav.clone();
    rate[24..28].copy_from_slice(&0_u32.to_le_bytes());
    cases.push(case("a rate of 0".to_owned(), form(Some(&rate), &[])));
    let noise: Vec<u8> = (0..64 << 10).map(|_| draw.next_u64() as u8).collect();
    cases.push(case("noise".to_owned(), form(Some(&noise), &[])));
    cases.push(case("an empty file".to_owned(), form(Some(b""), &[])));
    cases.push(case("no file".to_owned(), form(None, &[])));
    cases.push(case(
        "another model".to_owned(),
        form(Some(wav), &[("model", "whisper-1")]),
    ));
    let format = [("response_format", "docx")];
    cases.push(case("an unknown format".to_owned(), form(Some(wav), &format)));
    let fields = vec![("a", "b"); 5_000];
    cases.push(case("5000 fields".to_owned(), form(Some(wav), &fields)));
    let whole = form(Some(wav), &[]);
    cases.push(case("half a form".to_owned(), whole[..whole.len() / 2].to_vec()));
    cases.push(Case {
        content_type: "application/json".to_owned(),
        ..case("JSON".to_owned(), b"{\"model\": \"small\"}".to_vec())
    });
    cases
}

/// What of an answer does not depend on other requests: of a stream its last event, and all but confidences, which may be
/// rounded otherwise in another batch.
fn lasting(answer: Answer) -> Answer {
    let last_event = answer.text.lines().rev().find_map(|line| line.strip_prefix("data: "));
    let text = last_event.unwrap_or(&answer.text);
    let Ok(mut document) = serde_json::from_str::<Value>(text) else {
        return answer;
    };
    drop_confidences(&mut document);
    Answer {
        status: answer.status,
        text: document.to_string(),
    }
}

fn drop_confidences(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove("confidence");
            fields.values_mut().for_each(drop_confidences);
        }
        Value::Array(values) => values.iter_mut().for_each(drop_confidences),
        _ => {}
    }
}

fn ask(service: &Served, agent: &ureq::Agent, case: &Case) -> Answer {
    let url = format!("{}{TRANSCRIPTIONS}", service.url);
    let answer = post(agent, &url, &case.content_type, &case.body);
    lasting(answer.unwrap_or_else(|error| panic!("{}: {error}\n{}", case.name, service.told())))
}

/// A client that disconnects early, or sends invalid requests.
fn go(service: &Served, cases: &[Case], draw: &mut SplitMix64) {
    let case = &cases[draw.below(cases.len())];
    let request = raw_post(&service.url, &case.content_type, &case.body);
    let mut stream = service.connect().unwrap();
    let host = service.url.trim_start_matches("http://");
    // The server may close the connection at any time.
    match draw.below(6) {
        // In the midst of the upload, at the first byte of the head or before the last of the body.
        0 => drop(stream.write_all(&request[..draw.below(request.len())])),
        1 => drop(stream.write_all(&request)),
        // With the head of the answer.
        2 => {
            let _ = stream.write_all(&request);
            let _ = stream.read_exact(&mut [0; 12]);
        }
        3 => drop(stream.write_all(b"\x16\x03\x01\0\0\r\n\r\n")),
        4 => {
            let head = format!(
                "POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {}\r\nContent-Length: 1000000000\r\n\
                 Expect: 100-continue\r\n\r\n",
                content_type()
            );
            stream.write_all(head.as_bytes()).unwrap();
            let answer = read_answer(&mut stream);
            assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
        }
        // A live session that ends with its first message.
        _ => {
            let head = format!(
                "GET /v1/realtime?intent=transcription HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\n\
                 Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            );
            stream.write_all(head.as_bytes()).unwrap();
            let mut status = [0; 12];
            stream.read_exact(&mut status).unwrap();
            assert_eq!(&status, b"HTTP/1.1 101");
        }
    }
}

/// `count` requests one after the other.
fn client(service: &Served, good: &[Case], hostile: &[Case], count: usize, seed: u64) {
    let mut draw = SplitMix64::new(seed);
    let agent = agent(PATIENCE);
    for _ in 0..count {
        let cases = match draw.below(20) {
            0..=10 => good,
            11..=14 => hostile,
            15..=18 => {
                go(service, good, &mut draw);
                continue;
            }
            _ => {
                let answer = get(&agent, &format!("{}/v1/models", service.url)).unwrap();
                assert_eq!(answer.status, 200, "{}", answer.text);
                continue;
            }
        };
        let case = &cases[draw.below(cases.len())];
        let answer = ask(service, &agent, case);
        assert_eq!(Some(&answer), case.alone.as_ref(), "{}", case.name);
    }
}

/// Resources of the idle process.
#[derive(Default)]
struct Held {
    /// KiB.
    resident: u64,
    descriptors: usize,
}

/// Waits until all requests are over, and looks. `descriptors`: as many as there may be.
fn settled(service: &Served, uploads: &Path, descriptors: usize) -> Held {
    let count = |folder: &str| fs::read_dir(folder).unwrap().count();
    let of_process = format!("/proc/{}/fd", service.id());
    let begin = Instant::now();
    loop {
        // Of the connections there is that of the one who asks.
        let (jobs, connections) = (
            service.metric("flow_queued_requests"),
            service.metric("flow_connections"),
        );
        let folders: Vec<_> = fs::read_dir(uploads)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        let [folder] = folders.as_slice() else {
            panic!("not one folder of uploads: {folders:?}");
        };
        let files: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        let open = count(&of_process);
        if jobs == 0.0 && connections == 1.0 && files == ["lock"] && open <= descriptors {
            return Held {
                resident: service.kibibytes("VmRSS"),
                descriptors: open,
            };
        }
        assert!(
            begin.elapsed() < PATIENCE,
            "left behind: {jobs} jobs, {connections} connections, files {files:?}, {open} descriptors of {descriptors}\n{}",
            service.told()
        );
        thread::sleep(Duration::from_millis(20));
    }
}

/// Minutes: `cargo test --release --test end_to_end -- --ignored --nocapture soak`. `FLOW_SOAK_REQUESTS` is another number of
/// requests.
#[test]
#[ignore = "minutes: 10,000 requests to one service"]
#[allow(clippy::print_stdout, reason = "tells people how far it is")]
fn a_soak_of_ten_thousand_requests_leaves_nothing_behind() {
    let requests = std::env::var("FLOW_SOAK_REQUESTS").map_or(REQUESTS, |number| number.parse().expect("a number"));
    let folder = tempfile::tempdir().unwrap();
    let uploads = folder.path().join("uploads");
    fs::create_dir(&uploads).unwrap();
    let config = folder.path().join("serve.yaml");
    fs::write(&config, "http: {upload_folder: uploads, max_upload: 16777216}\n").unwrap();
    let mut flow = program();
    flow.args(["serve", "--listen", "127.0.0.1:0", "--diarize", "--model"]);
    flow.args(["configs/models/small.nemo", "--config"]).arg(&config);
    // Freed memory is given back at once, not after a minute: what is resident is what is in use.
    flow.env("MIMALLOC_PURGE_DELAY", "10");
    let service = Served::start(flow, PATIENCE).unwrap();

    let recordings = recordings();
    let mut draw = SplitMix64::new(SEED);
    let (mut good, mut hostile) = (good(&recordings), hostile(&recordings, &mut draw));
    let alone = agent(PATIENCE);
    for case in &mut good {
        let answer = ask(&service, &alone, case);
        assert_eq!(answer.status, 200, "{}: {}", case.name, answer.text);
        case.alone = Some(answer);
    }
    for case in &mut hostile {
        let answer = ask(&service, &alone, case);
        assert!(matches!(answer.status, 200 | 400..=499), "{}: {answer:?}", case.name);
        case.alone = Some(answer);
    }
    // Its connection counts.
    drop(alone);

    let (mut sent, mut warm, mut least) = (0, Held::default(), u64::MAX);
    let fifth = (requests / 5).max(ROUND);
    while sent < requests {
        thread::scope(|scope| {
            for _ in 0..CLIENTS {
                let seed = draw.next_u64();
                let (service, good, hostile) = (&service, &good, &hostile);
                scope.spawn(move || client(service, good, hostile, ROUND / CLIENTS, seed));
            }
        });
        sent += ROUND;
        let is_warm = sent > 2 * fifth;
        let held = settled(&service, &uploads, if is_warm { warm.descriptors } else { usize::MAX });
        println!(
            "{sent} requests: {} MiB, {} descriptors",
            held.resident >> 10,
            held.descriptors
        );
        if is_warm {
            least = least.min(held.resident);
            if sent / fifth > (sent - ROUND) / fifth {
                let before = warm.resident;
                assert!(
                    least <= before + MOST_GROWTH,
                    "{least} KiB at least, after {sent} requests, {before} before"
                );
                least = u64::MAX;
            }
        } else {
            warm.resident = warm.resident.max(held.resident);
            warm.descriptors = warm.descriptors.max(held.descriptors);
        }
    }
    let (status, told) = service.terminate();
    assert_eq!(status.code(), Some(0), "{told}");
    assert!(!told.contains("panicked"), "{told}");
    assert_eq!(
        fs::read_dir(&uploads).unwrap().count(),
        0,
        "the folder of uploads is left behind"
    );
}
