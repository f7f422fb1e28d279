//! Layouts that a repository of the hub has, read where they are, against a server that answers as the hub.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use arrow::array::{Array, AsArray};
use arrow::datatypes::Int64Type;
use flow_audio::decode::{read_file, read_range};
use flow_hub::HubToken;
use flow_runtime::harness::{Harness, Output};

use super::*;
use crate::read::Read;

const COMMITS: [&str; 2] = [
    "0123456789abcdef0123456789abcdef01234567",
    "abcdef0123456789abcdef0123456789abcdef01",
];
const OTHERS: Others = Others {
    open: crate::opening::open,
    open_selected: crate::opening::open_selected,
    is_recognised: crate::is_recognised,
};
const SECRET: &str = "hf_hush_hush";
/// Files of a page of a list.
const PAGE: usize = 2;

/// A repository that plays the hub; its first commit, until another one is chosen.
struct Repository {
    address: String,
    files: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    commit: Arc<Mutex<usize>>,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Repository {
    fn of(folder: &Path) -> Repository {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let repository = Repository {
            address: address.clone(),
            files: Arc::default(),
            commit: Arc::default(),
            requests: Arc::default(),
        };
        let mut folders = vec![folder.to_path_buf()];
        while let Some(next) = folders.pop() {
            for entry in fs::read_dir(next).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => folders.push(path),
                    false => {
                        let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
                        repository.files.lock().unwrap().insert(name, fs::read(&path).unwrap());
                    }
                }
            }
        }
        let (files, commit) = (Arc::clone(&repository.files), Arc::clone(&repository.commit));
        let requests = Arc::clone(&repository.requests);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (files, commit, requests) = (Arc::clone(&files), Arc::clone(&commit), Arc::clone(&requests));
                let address = address.clone();
                std::thread::spawn(move || {
                    let commit = COMMITS[*commit.lock().unwrap()];
                    let files = files.lock().unwrap().clone();
                    answer(stream, &address, commit, &files, &requests);
                });
            }
        });
        repository
    }

    fn hub(&self, cache: &Path, token: Option<&str>) -> Hub {
        Hub {
            endpoint: self.address.clone(),
            cache: cache.join("hub"),
            token: token.map(|secret| HubToken {
                secret: secret.into(),
                from: "a test".into(),
            }),
            offline: false,
            timeout: std::time::Duration::from_secs(10),
        }
    }

    fn storage(&self, cache: &Path) -> Storage {
        let variables = [
            ("HF_ENDPOINT", self.address.clone()),
            ("HF_TOKEN", SECRET.to_owned()),
            ("FLOW_STORAGE_CACHE", cache.join("blocks").display().to_string()),
        ];
        Storage::with_environment(variables.map(|(name, value)| (name.to_owned(), value)))
    }

    fn requests(&self, what: &str) -> usize {
        let requests = self.requests.lock().unwrap();
        requests.iter().filter(|request| request.contains(what)).count()
    }
}

fn etag(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..40].to_owned()
}

fn answer(
    mut stream: TcpStream,
    address: &str,
    commit: &str,
    files: &BTreeMap<String, Vec<u8>>,
    requests: &Mutex<Vec<String>>,
) {
    let lines = BufReader::new(stream.try_clone().unwrap())
        .lines()
        .map_while(Result::ok);
    let lines: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let Some(first) = lines.first() else { return };
    requests.lock().unwrap().push(first.clone());
    let target = first.split(' ').nth(1).unwrap();
    let header = |name: &str| lines.iter().find_map(|line| line.strip_prefix(name));
    let (status, about, body) = if header("authorization: ") != Some(&format!("Bearer {SECRET}")) {
        (401, "x-error-code: GatedRepo\r\n".to_owned(), Vec::new())
    } else if target == "/api/datasets/o/n/revision/main" {
        let siblings: Vec<_> = files
            .keys()
            .map(|name| serde_json::json!({ "rfilename": name }))
            .collect();
        let listing = serde_json::json!({ "sha": commit, "siblings": siblings });
        (200, String::new(), listing.to_string().into_bytes())
    } else if let Some(query) = target.strip_prefix(&format!("/api/datasets/o/n/tree/{commit}?recursive=true")) {
        let from: usize = query.strip_prefix("&cursor=").map_or(0, |from| from.parse().unwrap());
        let item = |(name, bytes): (&String, &Vec<u8>)| match name.ends_with(".tar") {
            true => serde_json::json!({ "type": "file", "path": name, "oid": "0".repeat(40), "size": 130,
                "lfs": { "oid": etag(bytes), "size": bytes.len(), "pointerSize": 130 } }),
            false => serde_json::json!({ "type": "file", "path": name, "oid": etag(bytes), "size": bytes.len() }),
        };
        let mut items =
            vec![serde_json::json!({ "type": "directory", "path": "audio", "oid": "1".repeat(40), "size": 0 })];
        items.extend(files.iter().skip(from).take(PAGE).map(item));
        let next = format!(
            "{address}/api/datasets/o/n/tree/{commit}?recursive=true&cursor={}",
            from + PAGE
        );
        let link = match from + PAGE < files.len() {
            true => format!("link: <{next}>; rel=\"next\"\r\n"),
            false => String::new(),
        };
        (200, link, serde_json::Value::from(items).to_string().into_bytes())
    } else {
        let name = target.strip_prefix(&format!("/datasets/o/n/resolve/{commit}/"));
        match name.and_then(|name| files.get(&name.replace("%20", " "))) {
            None => (404, "x-error-code: EntryNotFound\r\n".to_owned(), Vec::new()),
            Some(bytes) => {
                let range = header("range: bytes=").and_then(|range| range.split_once('-'));
                let end = |last: &str| {
                    last.parse()
                        .map_or(bytes.len(), |last: usize| bytes.len().min(last + 1))
                };
                let range = range.map(|(from, last)| from.parse().unwrap()..end(last));
                // The hub's program checks a file that it downloads by an ETag of this length.
                let length = if target.ends_with("README.md") { 39 } else { 40 };
                let about = format!("etag: \"{}\"\r\n", &etag(bytes)[..length]);
                match range {
                    None => (200, about, bytes.clone()),
                    Some(range) => {
                        let size = bytes.len();
                        let of = format!("content-range: bytes {}-{}/{size}\r\n", range.start, range.end - 1);
                        (206, about + &of, bytes[range].to_vec())
                    }
                }
            }
        }
    };
    let head = format!(
        "HTTP/1.1 {status} x\r\nconnection: close\r\ncontent-length: {}\r\n{about}\r\n",
        body.len()
    );
    let _ = stream.write_all(head.as_bytes());
    if !first.starts_with("HEAD") {
        let _ = stream.write_all(&body);
    }
}

/// What is shown of each row, and the bytes of its recording.
fn rows(storage: &Storage, output: &Output) -> Vec<(Vec<String>, Option<Vec<u8>>)> {
    let rows = output.all_rows("rows");
    let text = |name: &str, row: usize| {
        rows.column_by_name(name)
            .unwrap()
            .as_string::<i32>()
            .value(row)
            .to_owned()
    };
    let number = |name: &str| rows.column_by_name(name).unwrap().as_primitive::<Int64Type>().clone();
    let (offsets, sizes) = (number("offset"), number("size"));
    (0..rows.num_rows())
        .map(|row| {
            let path = PathBuf::from(text("audio_path", row));
            let bytes = match offsets.is_valid(row) {
                true => read_range(storage, &path, offsets.value(row) as u64, sizes.value(row) as u64),
                false => read_file(storage, &path),
            };
            (
                ["segment_id", "text", "lang"].map(|name| text(name, row)).to_vec(),
                bytes.ok(),
            )
        })
        .collect()
}

#[test]
fn other_layouts_of_a_repository_are_read_where_they_are_as_on_disk() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/layouts");
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    let wav = fs::read(data.join("wav/a.flac")).unwrap();
    write("README.md", b"---\nlicense: cc0-1.0\n---\n");
    for name in ["train-000000.tar", "test-000000.tar"] {
        write(
            &format!("tars/{name}"),
            &fs::read(data.join("webdataset").join(name)).unwrap(),
        );
    }
    write(
        "csv/metadata.csv",
        b"file_name,transcription\naudio/a b.flac,one\naudio/none.flac,two\n",
    );
    write("csv/audio/a b.flac", &wav);
    write(
        "lines/train/metadata.jsonl",
        b"{\"file_name\": \"x.flac\", \"text\": \"three\"}\n",
    );
    write("lines/train/x.flac", &wav);
    write(
        "nemo/lists/train.jsonl",
        b"{\"audio_filepath\": \"../audio/y.flac\", \"text\": \"four\"}\n",
    );
    write("nemo/audio/y.flac", &wav);
    write("texts/z.flac", &wav);
    write("texts/z.txt", b"five");
    let repository = Repository::of(folder.path());
    let cache = tempfile::tempdir().unwrap();
    let hub = |token: Option<&str>| repository.hub(cache.path(), token);
    let storage = || repository.storage(cache.path());
    let settings = |manifest: &str, layout: Layout| ReadSettings {
        manifest: manifest.into(),
        layout,
        lang: "hi".into(),
        ..ReadSettings::default()
    };
    let open = |storage: &Storage, hub: &Hub, text: &str, layout: Layout| {
        let reference = DatasetReference::parse(text).unwrap().unwrap();
        let settings = settings(text, layout);
        let opened = open_from(
            storage,
            hub,
            &reference,
            &settings,
            (cache.path(), &OTHERS),
            &mut |_| true,
        );
        opened.map_err(|error| error.to_string())
    };
    for (below, layout) in [
        ("tars", Layout::Auto),
        ("tars", Layout::WebDataset),
        ("csv", Layout::Auto),
        ("lines", Layout::Auto),
        ("nemo/lists/train.jsonl", Layout::Auto),
        ("texts", Layout::Transcripts),
    ] {
        let storage = storage();
        let name = format!("hf://datasets/o/n/{below}");
        let manifest = open(&storage, &hub(Some(SECRET)), &name, layout).unwrap_or_else(|why| panic!("{below}: {why}"));
        let run = |storage: &Storage, manifest: &str| {
            let harness = Harness::<Read>::new(settings(manifest, layout)).storage(storage);
            harness.run().unwrap_or_else(|error| panic!("{manifest}: {error:?}"))
        };
        // What was opened is read by its URL from now on.
        let url = format!("{}/datasets/o/n/resolve/{}/{below}", repository.address, COMMITS[0]);
        let (there, here) = (
            run(&storage, &url),
            run(&storage, folder.path().join(below).to_str().unwrap()),
        );
        let (found, expected) = (rows(&storage, &there), rows(&Storage::default(), &here));
        assert!(
            !expected.is_empty() && expected.iter().all(|(_, bytes)| bytes.is_some()),
            "{below}: {:?}",
            here.rejects()
        );
        assert!(found == expected, "{below}");
        assert_eq!(there.rejects().len(), here.rejects().len(), "{below}");
        assert_eq!(manifest.names(), there.partitions, "{below}");
    }
    // What is not there is in the list, and not asked for.
    assert_eq!(repository.requests("none.flac"), 0);
    // The commit is found out once: another one of the branch changes nothing of what is open.
    let storage = storage();
    let manifest = open(&storage, &hub(Some(SECRET)), "hf://datasets/o/n/csv", Layout::Auto).unwrap();
    let partitions = manifest.partitions(&storage).unwrap();
    let of_first = partitions.iter().flat_map(|partition| &partition.files);
    assert!(of_first.clone().count() > 0);
    assert!(of_first.clone().all(|file| file.to_str().unwrap().contains(COMMITS[0])));
    *repository.commit.lock().unwrap() = 1;
    let manifest = open(&storage, &hub(Some(SECRET)), "hf://datasets/o/n/csv", Layout::Auto).unwrap();
    let partitions = manifest.partitions(&storage).unwrap();
    let mut files = partitions.iter().flat_map(|partition| &partition.files);
    assert!(files.all(|file| file.to_str().unwrap().contains(COMMITS[1])));
    // Messages name what is missing.
    for (name, layout, token, said) in [
        (
            "hf://datasets/o/n/none",
            Layout::WebDataset,
            Some(SECRET),
            "no file or folder `none`",
        ),
        ("hf://datasets/o/n", Layout::Auto, None, "is gated: it needs a login"),
    ] {
        let error = open(&storage, &hub(token), name, layout).err().unwrap();
        assert!(error.contains(said) && !error.contains(SECRET), "{error}");
    }
    let mut offline = hub(Some(SECRET));
    offline.offline = true;
    let error = open(&storage, &offline, "hf://datasets/o/n/tars", Layout::WebDataset)
        .err()
        .unwrap();
    assert!(error.contains("HF_HUB_OFFLINE"), "{error}");
}

#[test]
fn a_configuration_of_a_repository_is_what_its_readme_declares() {
    let folder = tempfile::tempdir().unwrap();
    crate::configs_folder::lay_out_configs(folder.path());
    let repository = Repository::of(folder.path());
    let cache = tempfile::tempdir().unwrap();
    let hub = repository.hub(cache.path(), Some(SECRET));
    let open = |text: &str| {
        let storage = repository.storage(cache.path());
        let settings = ReadSettings {
            manifest: text.into(),
            lang: "hi".into(),
            ..ReadSettings::default()
        };
        let reference = DatasetReference::parse(text).unwrap().unwrap();
        let opened = open_from(
            &storage,
            &hub,
            &reference,
            &settings,
            (cache.path(), &OTHERS),
            &mut |_| true,
        );
        opened.map_err(|error| error.to_string())
    };
    for (name, below) in [
        ("", ""),
        (":held_out", ":held_out"),
        ("/tars", "tars"),
        ("/folder:test", "folder:test"),
        ("/tables", "tables"),
        ("/archives", "archives"),
        // A folder that is not a configuration.
        ("/af:test", "af:test"),
    ] {
        let manifest = open(&format!("hf://datasets/o/n{name}")).unwrap_or_else(|why| panic!("{name}: {why}"));
        let (below, split) = below.split_once(':').unwrap_or((below, ""));
        let here = Harness::<Read>::new(ReadSettings {
            manifest: folder.path().join(below).to_str().unwrap().into(),
            split: split.into(),
            lang: "hi".into(),
            ..ReadSettings::default()
        });
        assert_eq!(manifest.names(), here.run().unwrap().partitions, "{name}");
        let partitions = manifest.partitions(&repository.storage(cache.path())).unwrap();
        assert!(!partitions.is_empty(), "{name}");
    }
    for (name, said) in [
        (
            "/line",
            "no configuration `line`; write hf://datasets/OWNER/NAME/CONFIG with one of lines, tars",
        ),
        (
            ":dev",
            "no split \"dev\", which `split` names; its splits are held_out, train",
        ),
    ] {
        let error = open(&format!("hf://datasets/o/n{name}")).err().unwrap();
        assert!(error.contains(said), "{error}");
    }
    repository.files.lock().unwrap().remove("README.md");
    *repository.commit.lock().unwrap() = 1;
    let error = open("hf://datasets/o/n/line").err().unwrap();
    assert!(
        error.contains("no folder `line`; its folders are af, lists, notes, tars, wav, zips"),
        "{error}"
    );
}
