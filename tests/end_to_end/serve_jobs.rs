//! Jobs of `flow serve` when the process is killed at any time: none is lost, none is done twice.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use flow_random::SplitMix64;
use flow_storage_testing::{Fault, FaultRule, TestServer};
use serde_json::Value;

use crate::binary::program;
use crate::served::{Answer, PATIENCE, Served, TRANSCRIPTIONS, agent, content_type, form, get, post};

const JOBS: &str = "/v1/jobs";

/// Kills of the test that is not ignored.
const KILLS: usize = 20;
/// Jobs that are sent before each kill.
const JOBS_EACH: usize = 3;

/// Event ids of webhooks, by job.
type Events = Arc<Mutex<BTreeMap<String, BTreeSet<String>>>>;

/// Takes webhooks.
fn webhooks() -> (String, Events) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let origin = format!("http://{}", listener.local_addr().unwrap());
    let events = Events::default();
    let received = Arc::clone(&events);
    spawn(move || {
        for stream in listener.incoming() {
            // The service may be killed while it sends.
            let _ = stream.and_then(|stream| {
                stream.set_read_timeout(Some(PATIENCE))?;
                let mut reader = BufReader::new(stream);
                let (mut line, mut length) = (String::new(), 0);
                while reader.read_line(&mut line)? > 2 {
                    if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
                        length = value.trim().parse().unwrap();
                    }
                    line.clear();
                }
                let mut body = vec![0; length];
                reader.read_exact(&mut body)?;
                let event: Value = serde_json::from_slice(&body)?;
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let mut events = received.lock().unwrap();
                let ids = events.entry(text(&event["data"]["id"])).or_default();
                ids.insert(text(&event["id"]));
                drop(events);
                let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
                reader.into_inner().write_all(answer)
            });
        }
    });
    (origin, events)
}

/// Sends a job. None where the service is killed before it answers.
fn sent(url: &str, key: &str, hook: &str, audio: &[u8]) -> Option<Answer> {
    let body = form(Some(audio), &[("webhook", hook)]);
    let request = agent(PATIENCE).post(format!("{url}{JOBS}"));
    let request = request
        .header("Content-Type", content_type())
        .header("Idempotency-Key", key);
    let mut response = request.send(&body[..]).ok()?;
    let status = response.status().as_u16();
    let text = response.body_mut().read_to_string().ok()?;
    Some(Answer { status, text })
}

fn id_of(answer: &Answer) -> String {
    assert_eq!(answer.status, 202, "{}", answer.text);
    let job: Value = serde_json::from_str(&answer.text).unwrap();
    job["id"].as_str().unwrap().to_owned()
}

fn kills_lose_no_job(kills: usize) {
    let folder = tempfile::tempdir().unwrap();
    let (origin, events) = webhooks();
    let hook = format!("{origin}/hook");
    fs::write(folder.path().join("secret"), "0123456789abcdef0123456789abcdef").unwrap();
    let config = folder.path().join("serve.yaml");
    let text = format!(
        "jobs: {{folder: jobs, max_attempts: 1000, webhook_secret: secret, webhook_origins: ['{origin}']}}\n\
         http: {{upload_folder: '{}'}}\n",
        folder.path().display()
    );
    fs::write(&config, text).unwrap();
    let command = || -> Command {
        let mut flow = program();
        flow.args(["serve", "--listen", "127.0.0.1:0", "--config"]).arg(&config);
        flow
    };
    let audio = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/model/audio");
        fs::read(path.join(name)).unwrap()
    };
    // Some are done before the kill, others while it comes.
    let recordings = [audio("eval0_en-us.wav"), audio("eval3_es.wav"), audio("train0_it.wav")];
    let mut random = SplitMix64::new(29);
    // Ids by the keys of jobs; none where the service did not answer.
    let mut jobs: BTreeMap<String, Option<String>> = BTreeMap::new();
    for kill in 0..kills {
        if random.below(4) == 0 {
            // Perhaps while it reads the folder.
            let mut child = command().stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            sleep(Duration::from_millis(random.below(1500) as u64));
            child.kill().unwrap();
            child.wait().unwrap();
            continue;
        }
        let service = Served::start(command(), PATIENCE).unwrap();
        let (url, hook, recordings) = (service.url.clone(), hook.clone(), recordings.clone());
        let client = spawn(move || {
            let sent = (0..JOBS_EACH).map(|number| {
                let key = format!("{kill}-{number}");
                let answer = sent(&url, &key, &hook, &recordings[number % recordings.len()]);
                (key, answer.map(|answer| id_of(&answer)))
            });
            sent.collect::<Vec<_>>()
        });
        sleep(Duration::from_millis(random.below(400) as u64));
        drop(service);
        jobs.extend(client.join().unwrap());
    }

    let service = Served::start(command(), PATIENCE).unwrap();
    // Those without an answer are sent again, as a client does.
    for (key, id) in &mut jobs {
        let number: usize = key.rsplit('-').next().unwrap().parse().unwrap();
        let again = sent(&service.url, key, &hook, &recordings[number % recordings.len()]);
        let again = id_of(&again.expect("an answer"));
        assert_eq!(*id.get_or_insert_with(|| again.clone()), again, "{key}: a second job");
    }
    let known: BTreeSet<String> = jobs.values().flatten().cloned().collect();
    assert_eq!(known.len(), jobs.len());
    let agent = agent(PATIENCE);
    let listed = || {
        let (mut all, mut after) = (Vec::new(), String::new());
        loop {
            let page = get(&agent, &format!("{}{JOBS}?limit=100{after}", service.url)).unwrap();
            let page: Value = serde_json::from_str(&page.text).unwrap();
            all.extend(page["data"].as_array().unwrap().clone());
            if page["has_more"] == false {
                return all;
            }
            after = format!("&after={}", page["last_id"].as_str().unwrap());
        }
    };
    let is_over = |job: &Value| job["state"] == "done" && job["webhook"]["state"] == "delivered";
    let begin = Instant::now();
    let mut all = listed();
    while !all.iter().all(is_over) {
        let wrong = all.iter().find(|job| job["state"] == "failed");
        assert!(wrong.is_none() && begin.elapsed() < PATIENCE, "{all:#?}");
        sleep(Duration::from_millis(50));
        all = listed();
    }
    let ids: BTreeSet<String> = all.iter().map(|job| job["id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(
        (ids.len(), &ids),
        (all.len(), &known),
        "no job is lost, and none is there twice"
    );
    let expected = recordings.map(|audio| {
        let answer = post(
            &agent,
            &format!("{}{TRANSCRIPTIONS}", service.url),
            &content_type(),
            &form(Some(&audio), &[]),
        );
        answer.unwrap().text
    });
    for (key, id) in &jobs {
        let id = id.as_ref().unwrap();
        let number: usize = key.rsplit('-').next().unwrap().parse().unwrap();
        let result = get(&agent, &format!("{}{JOBS}/{id}/result", service.url)).unwrap();
        assert_eq!(
            (result.status, &result.text),
            (200, &expected[number % expected.len()]),
            "{key}"
        );
    }
    let events = events.lock().unwrap();
    assert_eq!(events.keys().cloned().collect::<BTreeSet<_>>(), known);
    assert!(events.values().all(|ids| ids.len() == 1), "{events:#?}");
    let of_all: BTreeSet<&String> = events.values().flatten().collect();
    assert_eq!(of_all.len(), known.len());
    drop(events);

    let (status, told) = service.terminate();
    assert!(status.success() && !told.contains("warning: the job"), "{told}");
    // Each job has its request and its outcome, and nothing of what was killed is left.
    for id in &known {
        let files = fs::read_dir(folder.path().join("jobs").join(id)).unwrap();
        let files: BTreeSet<String> = files
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        let most = ["attempts.json", "delivery.json", "outcome", "request.json"].map(str::to_owned);
        assert_eq!(files, BTreeSet::from(most), "{id}");
    }
    let left = fs::read_dir(folder.path().join("jobs")).unwrap().count();
    assert_eq!(left, known.len() + 1, "the jobs and the lock");
}

#[test]
fn kills_lose_no_job_and_do_none_twice() {
    kills_lose_no_job(KILLS);
}

/// `FLOW_TEST_KILLS` is another number of kills.
#[test]
#[ignore = "minutes: 200 kills"]
fn many_kills_lose_no_job_and_do_none_twice() {
    kills_lose_no_job(std::env::var("FLOW_TEST_KILLS").map_or(200, |kills| kills.parse().unwrap()));
    kills_do_not_begin_a_long_recording_again(None);
}

/// `FLOW_TEST_RECORDING` is a recording, such as one of an hour, in place of joined ones of ten minutes.
#[test]
#[ignore = "minutes: a service that is killed until a long job is done"]
fn many_kills_of_one_long_job() {
    kills_do_not_begin_a_long_recording_again(
        std::env::var_os("FLOW_TEST_RECORDING").map(|path| fs::read(path).unwrap()),
    );
}

/// The service is killed whenever a few more windows are done, far more often than attempts without progress are allowed.
fn kills_do_not_begin_a_long_recording_again(recording: Option<Vec<u8>>) {
    const SAMPLES: usize = 600 * 16_000;
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("serve.yaml");
    fs::write(
        &config,
        "jobs: {folder: jobs, max_attempts: 3}\nengine: {batch_seconds: 10}\n",
    )
    .unwrap();
    let start = || {
        let mut flow = program();
        flow.args(["serve", "--listen", "127.0.0.1:0", "--config"]).arg(&config);
        Served::start(flow, PATIENCE).unwrap()
    };
    let audio = recording.unwrap_or_else(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/model/audio");
        let names = ["eval0_en-us.wav", "eval3_es.wav", "train0_it.wav"];
        // 44 bytes are the header of a plain file of 16 bits.
        let files = names.map(|name| fs::read(path.join(name)).unwrap());
        let mut joined = files[0][..44].to_vec();
        let samples = files.iter().cycle().flat_map(|file| &file[44..]);
        joined.extend(samples.take(2 * SAMPLES));
        joined[4..8].copy_from_slice(&(2 * SAMPLES as u32 + 36).to_le_bytes());
        joined[40..44].copy_from_slice(&(2 * SAMPLES as u32).to_le_bytes());
        joined
    });
    let agent = agent(PATIENCE);
    let fields = &[
        ("response_format", "verbose_json"),
        ("timestamp_granularities[]", "word"),
    ][..];
    let service = start();
    let made = post(
        &agent,
        &format!("{}{JOBS}", service.url),
        &content_type(),
        &form(Some(&audio), fields),
    );
    let id = id_of(&made.unwrap());
    drop(service);
    let mut random = SplitMix64::new(31);
    let (mut kills, mut most) = (1, 0.0);
    let service = loop {
        let service = start();
        let job = || -> Value {
            let job = get(&agent, &format!("{}{JOBS}/{id}", service.url)).unwrap();
            serde_json::from_str(&job.text).unwrap()
        };
        let mut seen = job();
        let done = seen["done_seconds"].as_f64().unwrap();
        assert!(done >= most, "{done} s are done after a kill, {most} s were before");
        let begin = Instant::now();
        // Until there is more than before.
        while seen["state"] != "done" && seen["done_seconds"].as_f64().unwrap() <= most {
            assert!(
                seen["state"] != "failed" && begin.elapsed() < PATIENCE,
                "{kills} kills: {seen}"
            );
            sleep(Duration::from_millis(5));
            seen = job();
        }
        if seen["state"] == "done" {
            break service;
        }
        most = seen["done_seconds"].as_f64().unwrap();
        // What was seen is written by then.
        sleep(Duration::from_millis(20 + random.below(30) as u64));
        drop(service);
        kills += 1;
    };
    assert!(kills > 20, "{kills} kills");
    let result = get(&agent, &format!("{}{JOBS}/{id}/result", service.url)).unwrap();
    let expected = post(
        &agent,
        &format!("{}{TRANSCRIPTIONS}", service.url),
        &content_type(),
        &form(Some(&audio), fields),
    );
    assert_eq!((result.status, result.text), (200, expected.unwrap().text));
}

#[test]
fn jobs_are_listed_shown_and_cancelled_from_the_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.txt");
    fs::write(&keys, "# of the team\nsk-team\n").unwrap();
    let mut flow = program();
    flow.args(["serve", "--listen", "127.0.0.1:0", "--jobs"])
        .arg(folder.path().join("jobs"));
    flow.arg("--keys").arg(&keys);
    let service = Served::start(flow, PATIENCE).unwrap();
    let jobs = |arguments: &[&str]| {
        let mut flow = program();
        flow.arg("jobs")
            .args(arguments)
            .args(["--url", &service.url, "--key-file"])
            .arg(&keys);
        let output = flow.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (
            output.status.code().unwrap(),
            text(&output.stdout),
            text(&output.stderr),
        )
    };
    let audio = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/model/audio/eval3_es.wav");
    let body = form(Some(&fs::read(audio).unwrap()), &[("response_format", "srt")]);
    let request = agent(PATIENCE).post(format!("{}{JOBS}", service.url));
    let request = request
        .header("Content-Type", content_type())
        .header("Authorization", "Bearer sk-team");
    let mut response = request.send(&body[..]).unwrap();
    let job: Value = serde_json::from_str(&response.body_mut().read_to_string().unwrap()).unwrap();
    let id = job["id"].as_str().unwrap();
    let begin = Instant::now();
    while !jobs(&["list", "--state", "done"]).1.contains(id) {
        assert!(begin.elapsed() < PATIENCE, "{:?}", jobs(&["list"]));
        sleep(Duration::from_millis(50));
    }
    let (code, listed, _) = jobs(&["list"]);
    assert_eq!(code, 0);
    assert!(
        listed.starts_with("id ") && listed.contains("talk.wav") && listed.lines().count() == 2,
        "{listed}"
    );
    let (_, shown, _) = jobs(&["show", id]);
    assert_eq!(serde_json::from_str::<Value>(&shown).unwrap()["state"], "done");
    let (_, srt, _) = jobs(&["result", id]);
    assert!(srt.starts_with("1\n00:00:0"), "{srt}");
    let out = folder.path().join("talk.srt");
    assert_eq!(jobs(&["result", id, "--out", out.to_str().unwrap()]).0, 0);
    assert_eq!(fs::read_to_string(&out).unwrap(), srt);
    assert_eq!(jobs(&["cancel", id]).1, format!("{id} is removed\n"));
    let (code, _, error) = jobs(&["show", id]);
    assert!(code == 1 && error.contains("no job of that id"), "{error}");
    let (code, _, error) = jobs(&["show", "../models"]);
    assert!(code == 2 && error.contains("`../models` is not an id"), "{error}");
    let without = program()
        .args(["jobs", "list", "--url", &service.url])
        .output()
        .unwrap();
    assert_eq!(without.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&without.stderr).contains("API key"));
}

#[test]
fn recordings_of_jobs_are_fetched_from_object_storage() {
    let folder = tempfile::tempdir().unwrap();
    let bucket = folder.path().join("s3/calls/may");
    fs::create_dir_all(&bucket).unwrap();
    let audio = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/model/audio/eval3_es.wav");
    let bytes = fs::read(&audio).unwrap();
    fs::write(bucket.join("a.wav"), &bytes).unwrap();
    fs::write(bucket.join("text.wav"), "no recording").unwrap();
    let server = TestServer::start(&folder.path().join("s3")).unwrap();
    let config = folder.path().join("serve.yaml");
    fs::write(&config, "jobs: {folder: jobs, sources: ['s3://calls/may']}\n").unwrap();
    let mut command = program();
    command
        .args(["serve", "--listen", "127.0.0.1:0", "--config"])
        .arg(&config);
    command.envs(server.environment());
    let service = Served::start(command, PATIENCE).unwrap();
    let agent = agent(PATIENCE);
    let posted =
        |path: &str, body: &[u8]| post(&agent, &format!("{}{path}", service.url), &content_type(), body).unwrap();
    let read = |path: &str| get(&agent, &format!("{}{JOBS}/{path}", service.url)).unwrap();
    let send = |url: &str| posted(JOBS, &form(None, &[("url", url)]));
    let ended = |answer: &Answer| {
        let id = id_of(answer);
        let begin = Instant::now();
        loop {
            let job: Value = serde_json::from_str(&read(&id).text).unwrap();
            if matches!(job["state"].as_str(), Some("done" | "failed")) {
                return job;
            }
            assert!(begin.elapsed() < PATIENCE, "{job}");
            sleep(Duration::from_millis(50));
        }
    };
    let refused = send("s3://calls/june/a.wav");
    assert_eq!(refused.status, 400, "{}", refused.text);
    let done = ended(&send("s3://calls/may/a.wav"));
    assert_eq!(done["state"], "done", "{done}");
    let result = read(&format!("{}/result", done["id"].as_str().unwrap()));
    let said = posted(TRANSCRIPTIONS, &form(Some(&bytes), &[]));
    let text = |answer: &Answer| serde_json::from_str::<Value>(&answer.text).unwrap()["text"].clone();
    assert_eq!(text(&result), text(&said));
    for (url, code) in [
        ("s3://calls/may/b.wav", "recording_not_found"),
        ("s3://calls/may/text.wav", "unsupported_format"),
    ] {
        let failed = ended(&send(url));
        assert_eq!(
            (&failed["state"], &failed["error"]["code"]),
            (&"failed".into(), &code.into()),
            "{failed}"
        );
    }
}

/// The service is killed again and again while it fetches a recording; in the end the job is done once, by its whole recording.
#[test]
fn kills_while_a_recording_is_fetched_lose_no_job_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let bucket = folder.path().join("s3/calls");
    fs::create_dir_all(&bucket).unwrap();
    let audio = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/model/audio/eval3_es.wav");
    let audio = fs::read(&audio).unwrap();
    fs::write(bucket.join("a.wav"), &audio).unwrap();
    let server = TestServer::start(&folder.path().join("s3")).unwrap();
    let (origin, events) = webhooks();
    let hook = format!("{origin}/hook");
    fs::write(folder.path().join("secret"), "0123456789abcdef0123456789abcdef").unwrap();
    let uploads = folder.path().join("uploads");
    fs::create_dir(&uploads).unwrap();
    let config = folder.path().join("serve.yaml");
    let text = format!(
        "jobs: {{folder: jobs, sources: ['s3://calls'], max_attempts: 1000, webhook_secret: secret, \
         webhook_origins: ['{origin}']}}\nhttp: {{upload_folder: '{}'}}\n",
        uploads.display()
    );
    fs::write(&config, text).unwrap();
    let start = || {
        let mut flow = program();
        flow.args(["serve", "--listen", "127.0.0.1:0", "--config"]).arg(&config);
        flow.envs(server.environment());
        Served::start(flow, PATIENCE).unwrap()
    };
    let agent = agent(PATIENCE);
    let reads = || server.requests("GET /calls/a.wav");
    // Before the answer, in its middle, and where all of it has come or is about to.
    let seconds = audio.len() as u64;
    let slow = |bytes_per_second| Fault::Slow {
        latency: Duration::ZERO,
        bytes_per_second,
    };
    let kills = [
        (Fault::Delay(PATIENCE), 0),
        (slow(seconds / 60), 100),
        (slow(seconds / 60), 700),
        (slow(seconds), 1000),
        (slow(2 * seconds), 550),
    ];
    let mut id = None;
    for (fault, milliseconds) in kills {
        server.clear();
        server.fault(FaultRule {
            method: Some("GET"),
            ..FaultRule::always(fault, "/calls/a.wav")
        });
        let service = start();
        if id.is_none() {
            let body = form(None, &[("url", "s3://calls/a.wav"), ("webhook", &hook)]);
            let made = post(&agent, &format!("{}{JOBS}", service.url), &content_type(), &body).unwrap();
            id = Some(id_of(&made));
        }
        let begin = Instant::now();
        let state = || {
            let job = get(&agent, &format!("{}{JOBS}/{}", service.url, id.as_ref().unwrap())).unwrap();
            serde_json::from_str::<Value>(&job.text).unwrap()["state"].clone()
        };
        while reads() == 0 && state() != "done" {
            assert!(begin.elapsed() < PATIENCE, "{}", state());
            sleep(Duration::from_millis(10));
        }
        sleep(Duration::from_millis(milliseconds));
        drop(service);
    }
    let id = id.unwrap();
    server.clear();
    let service = start();
    let job = || {
        let job = get(&agent, &format!("{}{JOBS}/{id}", service.url)).unwrap();
        serde_json::from_str::<Value>(&job.text).unwrap()
    };
    let begin = Instant::now();
    while job()["state"] != "done" || job()["webhook"]["state"] != "delivered" {
        assert!(job()["state"] != "failed" && begin.elapsed() < PATIENCE, "{}", job());
        sleep(Duration::from_millis(50));
    }
    let result = get(&agent, &format!("{}{JOBS}/{id}/result", service.url)).unwrap();
    let body = form(Some(&audio), &[]);
    let expected = post(
        &agent,
        &format!("{}{TRANSCRIPTIONS}", service.url),
        &content_type(),
        &body,
    );
    assert_eq!((result.status, result.text), (200, expected.unwrap().text));
    let listed = get(&agent, &format!("{}{JOBS}", service.url)).unwrap();
    let listed: Value = serde_json::from_str(&listed.text).unwrap();
    assert_eq!(listed["data"].as_array().unwrap().len(), 1, "{listed}");
    let delivered = events.lock().unwrap();
    assert_eq!(delivered.len(), 1);
    assert_eq!(delivered[&id].len(), 1, "one event, however often it is sent");
    drop(delivered);
    let (status, told) = service.terminate();
    assert!(status.success() && !told.contains("warning"), "{told}");
    let names = |folder: &Path| -> BTreeSet<String> {
        let files = fs::read_dir(folder).unwrap();
        files
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect()
    };
    let of_job = names(&folder.path().join("jobs").join(&id));
    let most = ["attempts.json", "delivery.json", "outcome", "request.json"].map(str::to_owned);
    assert_eq!(of_job, BTreeSet::from(most));
    assert_eq!(names(&folder.path().join("jobs")).len(), 2, "the job and the lock");
    assert_eq!(names(&uploads), BTreeSet::new());
}
