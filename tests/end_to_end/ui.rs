//! `flow ui`: its pages over the state directory of a bundled pipeline, and who may see them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::binary::{Workplace, expect_code, program, read_manifest, stderr};
use crate::serve_clients::{browser, repository};
use crate::training::finetune;

const PATIENCE: Duration = Duration::from_secs(120);

/// The program while it serves, and what a browser knows of it.
struct Site {
    child: Child,
    address: String,
    /// With its token.
    url: String,
    cookie: String,
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

fn ask(address: &str, request: &[u8]) -> Answer {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // What is refused need not be read to its end.
    let _ = stream.write_all(request);
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let status = head[9..12].parse().unwrap();
    let mut body = bytes[end + 4..].to_vec();
    if head.to_lowercase().contains("transfer-encoding: chunked") {
        body = unchunked(&body);
    }
    Answer { status, head, body }
}

fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|two| two == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        body.extend_from_slice(&bytes[end + 2..end + 2 + size]);
        bytes = &bytes[(end + 4 + size).min(bytes.len())..];
        if size == 0 {
            break;
        }
    }
    body
}

impl Site {
    fn start(command: &mut Command) -> Site {
        let mut child = command
            .args(["--listen", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let url = line
            .trim()
            .strip_prefix("open http://")
            .unwrap_or_else(|| panic!("{line}"));
        let (address, path) = url.split_once('/').unwrap();
        let mut site = Site {
            child,
            address: address.to_owned(),
            url: format!("http://{url}"),
            cookie: String::new(),
        };
        assert_eq!(site.get("/").status, 403);
        let first = site.get(&format!("/{path}"));
        assert_eq!(first.status, 303, "{}", first.head);
        let cookie = first
            .head
            .lines()
            .find_map(|line| line.strip_prefix("set-cookie: "))
            .unwrap();
        assert!(
            cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"),
            "{cookie}"
        );
        site.cookie = cookie.split(';').next().unwrap().to_owned();
        site
    }

    fn request(&self, method: &str, path: &str, more: &str, body: &str) -> Answer {
        let (address, cookie) = (&self.address, &self.cookie);
        let length = body.len();
        ask(
            address,
            format!(
                "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nCookie: {cookie}\r\nContent-Length: {length}\r\n{more}\r\n{body}"
            )
            .as_bytes(),
        )
    }

    fn get(&self, path: &str) -> Answer {
        self.request("GET", path, "", "")
    }

    #[track_caller]
    fn page(&self, path: &str) -> String {
        let answer = self.get(path);
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.text()
    }
}

/// The addresses of a page that begin so, as they are meant.
fn links(page: &str, begin: &str) -> Vec<String> {
    let links = page.split("=\"").skip(1).filter_map(|rest| rest.split('"').next());
    let links = links.filter(|link| link.starts_with(begin));
    links.map(|link| link.replace("&amp;", "&")).collect()
}

#[track_caller]
fn first(page: &str, begin: &str) -> String {
    links(page, begin)
        .first()
        .unwrap_or_else(|| panic!("no {begin} in {page}"))
        .clone()
}

/// What the forms of a page hold.
#[track_caller]
fn form_token(page: &str) -> &str {
    let (_, rest) = page.split_once("name=\"form_token\" value=\"").unwrap();
    rest.split_once('"').unwrap().0
}

/// A folder with a transcript of two speakers.
fn transcripts(place: &Workplace) -> PathBuf {
    let folder = place.path("transcripts");
    std::fs::create_dir(&folder).unwrap();
    let source = repository("tests/data/golden/speakers/conv2.flac");
    let word = |word: &str, start: f64, confidence: f64, speaker: &str| serde_json::json!({"word": word, "start": start, "end": start + 0.4, "confidence": confidence, "speaker": speaker});
    let words = [
        word("नमस्ते", 0.2, 0.9, "SPEAKER_00"),
        word("कल", 0.8, 0.3, "SPEAKER_01"),
        word("سلام", 1.4, 0.8, "SPEAKER_01"),
    ];
    let transcript = serde_json::json!({
        "version": 1,
        "metadata": {"source_file": source, "duration_s": 2.0, "model": "small", "model_digest": "0", "processed_at": "2026-01-01T00:00:00Z"},
        "performance": {"transcription_s": 1.0, "diarization_s": 1.0, "total_s": 2.0},
        "text": "नमस्ते कल سلام",
        "segments": [{"start": 0.2, "end": 1.8, "text": "नमस्ते कल سلام", "speaker": "SPEAKER_00", "words": words}],
        "speakers": ["SPEAKER_00", "SPEAKER_01"],
    });
    std::fs::write(folder.join("conv2.json"), transcript.to_string()).unwrap();
    folder
}

#[test]
fn pages_lead_from_the_runs_to_a_row_and_its_sound() {
    let place = Workplace::bundled("micro");
    place.build_manifests(&[]);
    let manifest = place.out().join("train_manifest_v2.parquet");
    let damaged = place.path("damaged.parquet");
    std::fs::write(&damaged, b"PAR1 is how it begins").unwrap();
    let mut flow = program();
    flow.arg("ui")
        .args([&manifest, &damaged])
        .arg("--state")
        .arg(place.path("state"));
    flow.arg("--shards")
        .arg(&place.shards)
        .arg("--transcripts")
        .arg(transcripts(&place));
    let site = Site::start(&mut flow);

    let runs = site.get("/");
    assert!(
        runs.head.contains("content-security-policy: default-src 'none'"),
        "{}",
        runs.head
    );
    let runs = runs.text();
    assert!(runs.contains(">done<") && runs.contains(" s</td>"), "{runs}");
    let run = first(&runs, "/runs/");
    let shown = site.page(&run);
    assert!(
        shown.contains("<svg") && shown.contains("checked") && shown.contains("build_manifest_v2"),
        "{shown}"
    );
    // A run that is over is told once.
    let live = site.get(&format!("{run}/live"));
    assert!(live.text().contains("event: end"), "{}", live.text());
    assert!(site.page(&format!("{run}/log")).contains("unique"));
    assert!(site.page(&format!("{run}/report")).contains("<h2>"));

    // Rejects by reason, and rows that stages kept.
    let rejects = links(&shown, "/rows?of=rejects");
    assert!(!rejects.is_empty());
    for link in &rejects {
        let rows = site.page(link);
        assert!(!links(&rows, "/row?").is_empty(), "{link}: {rows}");
    }
    let kept = links(&shown, "/rows?of=artifact");
    assert!(!kept.is_empty());
    for link in &kept {
        site.page(link);
    }

    // The manifest of the command line.
    let rows = site.page("/rows?of=file&file=0");
    let expected = read_manifest(&manifest);
    assert!(rows.contains(&format!("<p>{} rows", expected.len())), "{rows}");
    let one = &expected[0].segment_id;
    let filtered = site.page(&format!("/rows?of=file&file=0&f.segment_id={one}"));
    assert!(filtered.contains("<p>1 rows of "), "{filtered}");
    assert!(
        site.page("/rows?of=file&file=0&c.text=%27%20OR%201%3D1")
            .contains("<p>0 rows of ")
    );
    assert!(site.page("/counts?of=file&file=0&by=lang").contains(&expected[0].lang));
    let row = site.page(&first(&filtered, "/row?"));
    assert!(row.contains(one.as_str()) && !row.contains("No sound"), "{row}");
    let sound = first(&row, "/sound?");
    let whole = site.get(&sound);
    assert_eq!((whole.status, &whole.body[..4]), (200, &b"RIFF"[..]));
    let part = site.request("GET", &sound, "Range: bytes=44-47\r\n", "");
    assert_eq!((part.status, &part.body[..]), (206, &whole.body[44..48]));
    assert!(site.get(&first(&row, "/spectrogram?")).body.starts_with(b"\x89PNG"));
    assert!(site.page(&first(&row, "/waveform?")).contains("<path"));

    // The same row of a stage tells its lineage.
    let of_stage = kept.iter().find(|link| link.contains("stage=split")).unwrap();
    let row = site.page(&first(&site.page(of_stage), "/row?"));
    assert!(row.contains("Lineage") && row.contains("goes on"), "{row}");

    // What is damaged or not there has a page that says so, and the others go on.
    let answer = site.get("/rows?of=file&file=1");
    assert_eq!(answer.status, 422, "{}", answer.text());
    assert!(answer.text().contains("damaged.parquet"));
    for (path, status) in [
        ("/rows?of=file&file=2", 404),
        ("/rows?of=file&file=../../etc/passwd", 400),
        ("/rows?of=artifact&run=..%2F..&stage=a&port=b", 404),
        ("/runs/..%2F..%2Fetc", 404),
        ("/runs/no-such/log", 404),
        ("/sound?of=file&file=0&part=0&row=999999", 404),
        ("/rows?of=file&file=0&min.duration=NaN", 400),
        ("/transcripts/show?name=../../etc/passwd", 404),
        ("/nowhere", 404),
    ] {
        let answer = site.get(path);
        assert_eq!(answer.status, status, "{path}: {}", answer.text());
    }
    for path in [
        "/tables",
        "/evaluation",
        "/training",
        "/transcripts",
        "/assets/ui.css",
        "/assets/ui.js",
        "/page.css",
        "/page-transcript.js",
    ] {
        site.page(path);
    }

    // The transcript: its words, and its recording as it is stored.
    let transcripts = site.page("/transcripts");
    for part in ["नमस्ते", "2.0 s", "1 transcript<", "flow ui --model MODEL"] {
        assert!(transcripts.contains(part), "{part}: {transcripts}");
    }
    assert!(site.page("/transcripts?name=other").contains("0 transcripts"));
    let shown = site.page(&first(&transcripts, "/transcripts/show?"));
    assert!(shown.contains("id=\"transcript\""), "{shown}");
    let json = site.get(&first(&shown, "/transcripts/json?")).body;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let word = &json["segments"][0]["words"][1];
    assert_eq!((&word["word"], &word["speaker"]), (&"कल".into(), &"SPEAKER_01".into()));
    let sound = first(&shown, "/transcripts/sound?");
    let part = site.request("GET", &sound, "Range: bytes=0-3\r\n", "");
    assert_eq!((part.status, &part.body[..]), (206, &b"fLaC"[..]));
    let whole = site.get(&sound);
    let stored = std::fs::read(repository("tests/data/golden/speakers/conv2.flac")).unwrap();
    assert!(whole.body == stored, "{} bytes of {}", whole.body.len(), stored.len());
    let length = format!("content-length: {}", stored.len());
    assert!(whole.head.to_lowercase().contains(&length), "{}", whole.head);

    // Nobody else, and nothing is changed.
    let (address, cookie) = (&site.address, &site.cookie);
    let other = format!("GET / HTTP/1.1\r\nHost: evil.example\r\nCookie: {cookie}\r\nConnection: close\r\n\r\n");
    assert_eq!(ask(address, other.as_bytes()).status, 403);
    let own = format!("Origin: http://{address}\r\n");
    assert_eq!(site.request("POST", "/corrections", &own, "segment_id=a").status, 403);
}

#[test]
fn recordings_are_transcribed_where_a_model_is_given() {
    let place = Workplace::bundled("micro");
    let mut flow = program();
    flow.arg("ui").arg("--state").arg(place.path("state"));
    flow.args(["--model", "configs/models/small.nemo", "--diarize"]);
    let site = Site::start(&mut flow);
    let page = site.page("/transcripts");
    assert!(
        page.contains("id=\"drop\"") && page.contains("id=\"transcript\""),
        "{page}"
    );
    assert!(!page.contains("flow ui --model MODEL"), "{page}");
    let begin = Instant::now();
    let models = loop {
        let models = site.get("/v1/models");
        if models.status == 200 {
            break models.text();
        }
        assert_eq!(models.status, 503, "{}", models.text());
        assert!(begin.elapsed() < PATIENCE, "the model is not loaded");
        sleep(Duration::from_millis(50));
    };
    assert!(
        models.contains("\"id\":\"small\"") && models.contains("\"diarization\":true"),
        "{models}"
    );

    let recording = std::fs::read(repository("tests/data/golden/model/audio/eval3_es.wav")).unwrap();
    let upload = |cookie: &str, origin: &str| {
        let mut body = b"--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n".to_vec();
        body.extend_from_slice(&recording);
        body.extend_from_slice(b"\r\n--b--\r\n");
        let (address, length) = (&site.address, body.len());
        let mut request = format!(
            "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nCookie: {cookie}\r\n{origin}Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {length}\r\n\r\n"
        )
        .into_bytes();
        // A form is longer than what pages take.
        assert!(body.len() > 128 << 10);
        request.extend_from_slice(&body);
        ask(address, &request)
    };
    let own = format!("Origin: http://{}\r\n", site.address);
    let answer = upload(&site.cookie, &own);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(answer.text().contains("\"text\":\""), "{}", answer.text());
    // Nobody else.
    for (cookie, origin) in [
        ("", own.as_str()),
        (&site.cookie, ""),
        (&site.cookie, "Origin: http://evil.example\r\n"),
    ] {
        assert_eq!(upload(cookie, origin).status, 403, "{cookie:?} {origin:?}");
    }
    assert_eq!(site.get("/v1/nothing").status, 404);
}

#[test]
fn evaluations_and_trainings_are_drawn() {
    let place = Workplace::bundled("micro");
    let mut evaluate = program();
    evaluate.args(["run", "pipelines/evaluate.yaml", "--progress", "plain", "--state"]);
    evaluate.arg(place.path("state"));
    for (name, value) in [
        ("shards", place.shards.as_path()),
        ("manifests", &place.out()),
        ("report", &place.path("report")),
    ] {
        evaluate.args(["--set", &format!("{name}={}", value.display())]);
    }
    evaluate.args(["--set", "samples_per_language=2", "--set", "max_faults=100%"]);
    expect_code(&evaluate.output().unwrap(), 0);
    // A training as its run and its figures tell of it.
    let (run, checkpoints) = (
        place.path("state/runs/29990101T000000000Z-99-0000"),
        place.path("checkpoints"),
    );
    std::fs::create_dir(&run).unwrap();
    std::fs::create_dir(&checkpoints).unwrap();
    let spec = format!(
        "stages: {{pieces: {{uses: tokenizer.read, with: {{checkpoints: '{0}'}}}}, train: {{uses: training.train, with: {{checkpoints: '{0}'}}}}}}\n",
        checkpoints.display()
    );
    std::fs::write(run.join("spec.yaml"), spec).unwrap();
    let figures =
        "{\"kind\":\"train\",\"step\":1,\"loss\":3.0}\n{\"kind\":\"train\",\"step\":2,\"loss\":2.0}\n{\"kind\"";
    std::fs::write(checkpoints.join("metrics.jsonl"), figures).unwrap();

    let mut flow = program();
    flow.arg("ui")
        .arg("--state")
        .arg(place.path("state"))
        .arg("--shards")
        .arg(&place.shards);
    let site = Site::start(&mut flow);
    let listed = site.page("/evaluation");
    assert!(listed.contains("evaluate") && listed.contains(" %</td>"), "{listed}");
    // The list of runs has the same rate.
    let runs = site.page("/");
    let rate = runs
        .split("</a> ")
        .find_map(|rest| rest.split_once(" %").map(|(rate, _)| rate))
        .unwrap();
    assert!(
        rate.parse::<f64>().is_ok() && listed.contains(&format!("{rate} %")),
        "{rate}: {listed}"
    );
    let shown = site.page(&first(&listed, "/evaluation/show?"));
    assert!(shown.contains(&format!("WER {rate} %")), "{shown}");
    for part in [
        "Error rates by language",
        "Most errors",
        "Words and letters heard as others",
        " %",
        "class=\"sub\"",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert_eq!(&site.get(&first(&shown, "/sound?")).body[..4], b"RIFF");
    // Beside itself it is as good as it is.
    let alone = first(&site.page("/evaluation"), "/evaluation/show?");
    let query = alone.split_once('?').unwrap().1;
    let other = format!("?{query}")
        .replace('%', "%25")
        .replace('&', "%26")
        .replace('=', "%3D")
        .replace('?', "%3F");
    let beside = site.page(&format!("{alone}&other={other}"));
    assert!(
        beside.contains("What the other heard") && beside.contains("+0.00"),
        "{beside}"
    );
    let drawn = site.page("/training");
    assert!(
        drawn.contains("Training loss") && drawn.contains("<polyline") && !drawn.contains("Validation WER"),
        "{drawn}"
    );
    assert!(drawn.contains("step 2"), "{drawn}");
    // Not by another stage that looks into its folder.
    assert!(drawn.contains(">train of ") && !drawn.contains("pieces"), "{drawn}");
    // A run that left nothing but that has a page.
    assert!(site.page("/runs/29990101T000000000Z-99-0000").contains("cut short"));
}

/// `FLOW_TEST_PICTURES=FOLDER cargo test --release --test end_to_end -- --ignored browser` saves pictures of the pages there.
#[test]
#[ignore = "needs chromium, and installs the Node package playwright-core from a package index"]
fn the_pages_work_in_a_browser() {
    let Some(mut browser) = browser("ui.mjs", "browser_ui") else {
        return;
    };
    let place = Workplace::bundled("mini");
    place.build_manifests(&[]);
    let mut flow = program();
    flow.arg("ui").arg(place.out().join("train_manifest_v2.parquet"));
    flow.arg("--state")
        .arg(place.path("state"))
        .arg("--shards")
        .arg(&place.shards);
    flow.arg("--transcripts").arg(transcripts(&place)).arg("--allow-edit");
    flow.arg("--corrections").arg(place.path("corrections.parquet"));
    flow.args(["--model", "configs/models/small.nemo", "--diarize"]);
    let site = Site::start(&mut flow);
    browser.arg(&site.url);
    browser.arg(repository("tests/data/golden/model/audio/eval3_es.wav"));
    let output = browser.stdin(Stdio::null()).output().unwrap();
    expect_code(&output, 0);
}

#[test]
fn corrections_are_kept_where_they_may_be_made() {
    let place = Workplace::bundled("micro");
    place.build_manifests(&[]);
    let corrections = place.path("corrections.parquet");
    let mut flow = program();
    flow.arg("ui").arg(place.out().join("train_manifest_v2.parquet"));
    flow.arg("--state")
        .arg(place.path("state"))
        .arg("--allow-edit")
        .arg("--corrections")
        .arg(&corrections);
    let site = Site::start(&mut flow);
    let address = first(&site.page("/rows?of=file&file=0"), "/row?");
    let row = site.page(&address);
    let token = form_token(&row);
    let back = address.replace('&', "%26").replace('=', "%3D").replace('?', "%3F");
    let form = format!("form_token={token}&what=text&segment_id=s1&old_text=a&new_text=%E0%A4%8F%E0%A4%95&back={back}");
    let own = format!("Origin: http://{}\r\n", site.address);
    assert_eq!(site.request("POST", "/corrections", "", &form).status, 403);
    assert_eq!(
        site.request("POST", "/corrections", &own, &form.replace(token, "0"))
            .status,
        403
    );
    assert!(!corrections.exists());
    let kept = site.request("POST", "/corrections", &own, &form);
    assert_eq!(kept.status, 303, "{}", kept.text());
    assert!(kept.head.contains(&format!("location: {address}")), "{}", kept.head);
    let batches = crate::binary::read_parquet(&corrections);
    assert_eq!(batches.iter().map(|batch| batch.num_rows()).sum::<usize>(), 1);
    // Somebody who has not seen it does not overwrite it.
    let late = site.request("POST", "/corrections", &own, &format!("{form}&seen="));
    assert_eq!(late.status, 409, "{}", late.text());
    let elsewhere = form.replace(&back, "%2F%2Fevil.example");
    let kept = site.request("POST", "/corrections", &own, &elsewhere);
    assert!(kept.head.contains("location: /\r\n"), "{}", kept.head);
}

#[test]
fn what_was_corrected_arrives_in_the_manifests() {
    let place = Workplace::bundled("micro");
    place.build_manifests(&[]);
    let train = || read_manifest(&place.out().join("train_manifest_v2.parquet"));
    let (before, bytes) = (train(), place.out_bytes());
    let (changed, bad) = (&before[0], &before[1]);
    let corrections = place.path("corrections.parquet");
    let mut flow = program();
    flow.arg("ui").arg("--state").arg(place.path("state"));
    flow.arg("--allow-edit").arg("--corrections").arg(&corrections);
    let site = Site::start(&mut flow);
    let run = first(&site.page("/"), "/runs/");
    let kept = links(&site.page(&run), "/rows?of=artifact");
    let rows = kept
        .iter()
        .find(|link| link.contains("stage=split") && link.contains("port=train"))
        .unwrap();
    let row = site.page(&first(
        &site.page(&format!("{rows}&f.segment_id={}", changed.segment_id)),
        "/row?",
    ));
    let token = form_token(&row);
    let own = format!("Origin: http://{}\r\n", site.address);
    for (segment, fields) in [
        (&changed.segment_id, "new_text=no"),
        (
            &changed.segment_id,
            "new_text=%E0%A4%A8%E0%A4%AF%E0%A4%BE+%E0%A4%AA%E0%A4%BE%E0%A4%A0",
        ),
        (&bad.segment_id, "new_text=&bad=1"),
    ] {
        let form = format!("form_token={token}&what=text&segment_id={segment}&old_text=a&{fields}");
        assert_eq!(site.request("POST", "/corrections", &own, &form).status, 303);
    }

    place.build_manifests(&[&format!("corrections={}", corrections.display())]);
    let after: Vec<_> = [train(), read_manifest(&place.out().join("val_manifest_v2.parquet"))].concat();
    let of = |segment: &str| after.iter().find(|row| row.segment_id == segment);
    assert!(of(&changed.segment_id).unwrap().text.ends_with("नया पाठ"));
    assert!(of(&bad.segment_id).is_none());
    let reasons: Vec<String> = crate::binary::read_rejects(&place.out().join("rejects.parquet"))
        .into_iter()
        .map(|reject| reject.reason)
        .collect();
    assert!(reasons.contains(&"marked_bad".to_owned()), "{reasons:?}");

    // Without them all is as it was, and nothing is done again but the writing.
    place.build_manifests(&[]);
    assert!(place.out_bytes() == bytes);
}

/// The whole loop: a training lists the rows that it learned worst, one is heard and corrected in a browser, and the next run trains
/// on the corrected text.
#[test]
fn a_hard_row_is_found_heard_corrected_and_trained_on() {
    let place = Workplace::bundled("micro");
    let corrections = place.path("corrections.parquet");
    let train = |more: &[&str]| {
        let all = [&["train.max_steps=4", "train.row_losses=6"], more].concat();
        expect_code(&finetune(&place, &all).output().unwrap(), 0);
    };
    train(&[]);
    let mut flow = program();
    flow.arg("ui").arg("--state").arg(place.path("state"));
    flow.arg("--allow-edit").arg("--corrections").arg(&corrections);
    let site = Site::start(&mut flow);
    let list = first(&site.page("/training"), "/rows?");
    assert!(list.contains("sort=mean_loss") && list.contains("desc=1"), "{list}");
    let rows = links(&site.page(&list), "/row?");
    let mut of_each: Vec<&String> = rows.iter().collect();
    of_each.dedup();
    let value = |row: &str, name: &str| {
        let (_, rest) = row.split_once(&format!("<th scope=\"row\">{name}</th><td>")).unwrap();
        let cell = rest.split("</td>").next().unwrap();
        cell.split('>')
            .find_map(|part| part.split('<').next().filter(|text| !text.is_empty()))
            .unwrap()
            .to_owned()
    };
    let losses: Vec<f64> = of_each
        .iter()
        .map(|row| value(&site.page(row), "mean_loss").parse().unwrap())
        .collect();
    assert_eq!(losses.len(), 6);
    assert!(
        losses.is_sorted_by(|one, next| one >= next) && losses[0] > 0.0,
        "{losses:?}"
    );
    let row = site.page(of_each[0]);
    assert_eq!(&site.get(&first(&row, "/sound?")).body[..4], b"RIFF");
    let segment = value(&row, "segment_id");
    let (token, own) = (form_token(&row), format!("Origin: http://{}\r\n", site.address));
    let form = format!(
        "form_token={token}&what=text&segment_id={segment}&old_text=a&new_text=%E0%A4%A8%E0%A4%AF%E0%A4%BE+%E0%A4%AA%E0%A4%BE%E0%A4%A0"
    );
    assert_eq!(site.request("POST", "/corrections", &own, &form).status, 303);

    // Kept while the checkpoint of another text stays refused.
    let taken = format!("corrections={}", corrections.display());
    let refused = finetune(&place, &["train.max_steps=4", "train.row_losses=6", &taken])
        .output()
        .unwrap();
    expect_code(&refused, 2);
    train(&[
        &taken,
        "train.on_change=restart",
        "align_with=configs/models/small.nemo",
        "rank_by=[loss, alignment]",
    ]);
    let list = site.page(&first(&site.page("/training"), "/rows?"));
    assert!(list.contains("alignment_score"), "{list}");
    let run = first(&site.page("/"), "/runs/");
    let kept = links(&site.page(&run), "/rows?of=artifact");
    let trained_on = kept.iter().find(|link| link.contains("stage=train_data&")).unwrap();
    let page = site.page(&format!("{trained_on}&f.segment_id={segment}"));
    assert!(page.contains("नया पाठ"), "{page}");
}

#[test]
fn it_ends_well_at_a_signal_and_says_what_is_wrong_before_it_begins() {
    let place = Workplace::bundled("micro");
    let mut flow = program();
    flow.arg("ui").arg("--state").arg(place.path("state"));
    let mut site = Site::start(&mut flow);
    assert!(site.page("/").contains("no runs yet"));
    // SAFETY: the call takes two numbers; the process is a child that was not waited for, so the number is its own.
    assert_eq!(unsafe { libc::kill(site.child.id() as i32, libc::SIGTERM) }, 0);
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = site.child.try_wait().unwrap() {
            break status;
        }
        assert!(begin.elapsed() < PATIENCE, "the signal does not end it");
        sleep(Duration::from_millis(20));
    };
    assert_eq!(status.code(), Some(0));
    for (arguments, said) in [
        (["ui", "no-such.parquet"], "no-such.parquet does not exist"),
        (["ui", "--listen=0.0.0.0:0"], "for this machine alone"),
        (["ui", "--state=src"], "is not a state directory"),
        (["ui", "--corrections=x"], "--allow-edit"),
        (["ui", "--diarize"], "--model"),
    ] {
        let output = program().args(arguments).output().unwrap();
        expect_code(&output, 2);
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
    }
    // A model that is not there, and one that is cut off.
    let (missing, damaged) = (place.path("no-such.nemo"), place.path("damaged.nemo"));
    let whole = std::fs::read(repository("configs/models/small.nemo")).unwrap();
    std::fs::write(&damaged, &whole[..whole.len() / 2]).unwrap();
    for model in [missing, damaged] {
        let mut flow = program();
        flow.args(["ui", "--listen", "127.0.0.1:0", "--state"])
            .arg(place.path("state"));
        let output = flow.arg("--model").arg(&model).output().unwrap();
        expect_code(&output, 1);
        let name = model.file_name().unwrap().to_string_lossy();
        assert!(stderr(&output).contains(&*name), "{}", stderr(&output));
    }
}
