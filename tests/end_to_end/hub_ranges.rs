//! A dataset of the hub whose files stay there (`fetch: ranges`), against two servers that answer as the hub and its storage.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};

use arrow::array::{ArrayRef, BinaryArray, Float64Array, RecordBatch, StringArray, StructArray};
use arrow::datatypes::{DataType, Field};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use serde_json::{Value, json};

use crate::binary::{Workplace, expect_code, stderr, wav};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const FILE: &str = "hindi/train-00000-of-00001.parquet";
const ROWS: usize = 60;
const SECRET: &str = "hf_hush_hush";
/// Bytes that are asked for where a small part of a file is read.
const WINDOW: u64 = 256 << 10;

/// Two row groups with recordings of a second.
fn parquet() -> Vec<u8> {
    let recordings: Vec<Vec<u8>> = (0..ROWS as u64)
        .map(|row| {
            let mut random = flow_random::SplitMix64::new(row);
            let samples: Vec<i16> = (0..16_000).map(|_| (random.next_u64() >> 50) as i16).collect();
            wav(&samples)
        })
        .collect();
    let audio = StructArray::from(vec![
        (
            Arc::new(Field::new("bytes", DataType::Binary, true)),
            Arc::new(BinaryArray::from_iter_values(&recordings)) as ArrayRef,
        ),
        (
            Arc::new(Field::new("path", DataType::Utf8, true)),
            Arc::new(StringArray::from_iter_values((0..ROWS).map(|row| format!("{row}.wav")))),
        ),
    ]);
    let texts = StringArray::from_iter_values((0..ROWS).map(|row| format!("text of row {row}")));
    let columns: [(&str, ArrayRef); 3] = [
        ("audio", Arc::new(audio)),
        ("text", Arc::new(texts)),
        (
            "duration",
            Arc::new(Float64Array::from_iter_values((0..ROWS).map(|_| 1.0))),
        ),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(ROWS / 2))
        .build();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.into_inner().unwrap()
}

/// What was asked of both servers.
#[derive(Default)]
struct Seen {
    /// Bytes of the file that were sent.
    bytes: u64,
    /// Requests to the storage, with their headers.
    storage: Vec<String>,
    /// The status by which the hub refuses the file, and its code.
    refused: Option<(u16, &'static str)>,
}

/// A server that gives each request to `answer`, which gives status, headers and body.
pub fn serve(answer: impl Fn(&str) -> (u16, String, Vec<u8>) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let one = |mut stream: TcpStream| {
            let lines = BufReader::new(stream.try_clone().unwrap())
                .lines()
                .map_while(Result::ok);
            let request: String = lines
                .take_while(|line| !line.is_empty())
                .map(|line| line + "\n")
                .collect();
            let (status, headers, body) = answer(&request);
            let head = format!(
                "HTTP/1.1 {status} x\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n",
                body.len()
            );
            let _ = stream.write_all(head.as_bytes());
            if !request.starts_with("HEAD") {
                let _ = stream.write_all(&body);
            }
        };
        listener.incoming().flatten().for_each(one);
    });
    address
}

/// The hub's address, and what it saw.
fn hub(file: Vec<u8>) -> (String, Arc<Mutex<Seen>>) {
    let seen: Arc<Mutex<Seen>> = Arc::default();
    let (size, noted) = (file.len(), Arc::clone(&seen));
    let storage = serve(move |request| {
        let range = request.lines().find_map(|line| line.strip_prefix("range: bytes="));
        let bounds = range.and_then(|range| range.split_once('-'));
        let (from, to) = match bounds {
            Some((from, "")) => (from.parse().unwrap(), size),
            Some((from, last)) => (from.parse().unwrap(), last.parse::<usize>().unwrap() + 1),
            None => (0, size),
        };
        let mut noted = noted.lock().unwrap();
        noted.storage.push(request.to_owned());
        noted.bytes += (to - from) as u64;
        let about = format!("content-range: bytes {from}-{}/{size}\r\netag: \"another\"\r\n", to - 1);
        (if range.is_some() { 206 } else { 200 }, about, file[from..to].to_vec())
    });
    let noted = Arc::clone(&seen);
    let address = serve(move |request| {
        assert!(
            request.contains(&format!("authorization: Bearer {SECRET}\n")),
            "{request}"
        );
        let path = request.split(' ').nth(1).unwrap();
        if path.starts_with("/api/datasets/o/n/revision/") {
            let listing = json!({ "sha": COMMIT, "siblings": [{ "rfilename": FILE }] });
            return (200, String::new(), listing.to_string().into_bytes());
        }
        assert_eq!(path, format!("/datasets/o/n/resolve/{COMMIT}/{FILE}"));
        if let Some((status, code)) = noted.lock().unwrap().refused {
            return (status, format!("x-error-code: {code}\r\n"), b"{}".to_vec());
        }
        let linked = format!("x-linked-etag: \"abc\"\r\nx-linked-size: {size}\r\nlocation: {storage}/blob?sig=x\r\n");
        (302, linked, Vec::new())
    });
    (address, seen)
}

fn lines(place: &Workplace) -> Vec<Value> {
    let text = fs::read_to_string(place.out().join("master_manifest.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_dataset_is_planned_by_its_footers_and_read_in_parts() {
    let file = parquet();
    let size = file.len() as u64;
    let (endpoint, seen) = hub(file);
    let place = Workplace::bundled("micro");
    let flow = |place: &Workplace, command: &str, settings: &[&str]| -> Command {
        let mut flow = place.command(command, "pipelines/manifest.yaml", &["input=hf://datasets/o/n"]);
        for setting in settings {
            flow.args(["--set", setting]);
        }
        flow.env("HF_ENDPOINT", &endpoint).env("HF_TOKEN", SECRET);
        flow.env("HF_HOME", place.path("hub"))
            .env("FLOW_STORAGE_CACHE", place.path("cache"));
        flow
    };
    let run = |place: &Workplace, command: &str, settings: &[&str]| {
        let output = flow(place, command, settings).output().unwrap();
        expect_code(&output, 0);
        std::mem::take(&mut seen.lock().unwrap().bytes)
    };
    let planned = run(&place, "plan", &["fetch=ranges"]);
    assert!(planned > 0 && planned * 100 < size, "{planned} of {size} bytes");
    // The recordings once, and of each row group a window with the other columns.
    let read = run(&place, "run", &["fetch=ranges"]);
    assert!(read < size + 3 * WINDOW, "{read} of {size} bytes");
    let ranges = lines(&place);
    assert_eq!(ranges.len(), ROWS);
    let at = format!("{endpoint}/datasets/o/n/resolve/{COMMIT}/{FILE}#column=0&row_group=1&row=29");
    assert_eq!(ranges[ROWS - 1]["audio_filepath"], at);
    assert!(
        !place.path("hub/hub/datasets--o--n/blobs").exists(),
        "nothing is downloaded"
    );

    // As a dataset with its recordings: the same bytes as from files that were downloaded, and none from the storage twice.
    let dataset = ["format=huggingface", "fetch=ranges"];
    let written = Workplace::bundled("micro");
    let mut again = flow(&written, "run", &dataset);
    expect_code(
        &again.env("FLOW_STORAGE_CACHE", place.path("cache")).output().unwrap(),
        0,
    );
    let read = std::mem::take(&mut seen.lock().unwrap().bytes);
    assert!(read < 3 * WINDOW, "{read} of {size} bytes");
    let downloaded = Workplace::bundled("micro");
    run(&downloaded, "run", &["format=huggingface"]);
    let name = "data/train-00000-of-00001.parquet";
    assert_eq!(
        fs::read(written.out().join(name)).unwrap(),
        fs::read(downloaded.out().join(name)).unwrap()
    );
    let whole = Workplace::bundled("micro");
    run(&whole, "run", &[]);
    for (a, b) in ranges.iter().zip(lines(&whole)) {
        for key in ["text", "duration", "lang", "segment_id"] {
            assert_eq!(a[key], b[key]);
        }
    }
    for request in &seen.lock().unwrap().storage {
        assert!(
            !request.contains(SECRET) && !request.contains("authorization"),
            "{request}"
        );
    }

    for (status, code, said) in [
        (
            401,
            "GatedRepo",
            "o/n is given only to those who have accepted its conditions",
        ),
        (403, "", "forbids access to o/n"),
        (
            404,
            "EntryNotFound",
            "there is no file hindi/train-00000-of-00001.parquet",
        ),
    ] {
        seen.lock().unwrap().refused = Some((status, code));
        let output = flow(&Workplace::bundled("micro"), "plan", &["fetch=ranges"])
            .output()
            .unwrap();
        assert!(
            !output.status.success() && stderr(&output).contains(said),
            "{}",
            stderr(&output)
        );
    }
    let offline = flow(&place, "plan", &["fetch=ranges"])
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(stderr(&offline).contains("HF_HUB_OFFLINE"), "{}", stderr(&offline));
    let local = place
        .command("plan", "pipelines/manifest.yaml", &["fetch=ranges"])
        .output()
        .unwrap();
    assert!(
        stderr(&local).contains("`fetch` is of datasets of the hub"),
        "{}",
        stderr(&local)
    );
}
