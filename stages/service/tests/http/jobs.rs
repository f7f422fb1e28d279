//! Jobs: from the upload to the result, over restarts, and their limits.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use flow_service::http::ServeSettings;
use flow_storage::Storage;
use serde_json::Value;

use crate::service::{Answer, PATIENCE, Service, content_type, form, long_recording, recording, settings, wait};

const JOBS: &str = "/v1/jobs";

fn with_jobs(folder: &Path) -> ServeSettings {
    let mut settings = settings();
    settings.jobs.folder = Some(folder.join("jobs"));
    settings
}

fn state(service: &Service, id: &str) -> String {
    let job = service.get(&format!("{JOBS}/{id}"));
    assert_eq!(job.status, 200, "{}", job.text);
    job.json()["state"].as_str().unwrap().to_owned()
}

fn result(service: &Service, id: &str) -> Answer {
    service.get(&format!("{JOBS}/{id}/result"))
}

fn id_of(answer: &Answer) -> String {
    assert_eq!(answer.status, 202, "{}", answer.text);
    answer.json()["id"].as_str().unwrap().to_owned()
}

fn delete(service: &Service, id: &str) -> Answer {
    service.delete(&format!("{JOBS}/{id}"))
}

#[test]
fn a_job_has_the_result_that_the_request_would_have_had() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::start(with_jobs(folder.path()));
    let audio = recording("eval3_es.wav");
    for fields in [
        &[
            ("response_format", "verbose_json"),
            ("timestamp_granularities[]", "word"),
        ][..],
        &[("response_format", "srt")],
        &[
            ("temperature", "0.5"),
            ("model", "small"),
            ("language", "ta"),
            ("prompt", "Ada"),
        ],
        &[
            ("language", "en"),
            ("phrases[]", "seventeen"),
            ("boost_weight", "100"),
            ("numbers", "digits"),
        ],
    ] {
        let made = service.send(JOBS, Some(&audio), fields);
        let id = id_of(&made);
        assert_eq!(made.header("location"), Some(&*format!("{JOBS}/{id}")));
        wait(|| state(&service, &id) == "done");
        let job = service.get(&format!("{JOBS}/{id}")).json();
        assert_eq!(
            (&job["file_name"], &job["bytes"]),
            (&"talk.wav".into(), &audio.len().into())
        );
        assert_eq!(job["done_seconds"], job["audio_seconds"]);
        assert!(job["audio_seconds"].as_f64().unwrap() > 1.0, "{job}");
        let (of_job, direct) = (result(&service, &id), service.transcribe(Some(&audio), fields));
        assert_eq!(of_job.status, 200, "{}", of_job.text);
        assert_eq!(of_job.text, direct.text);
        for header in ["content-type", "x-flow-ignored"] {
            assert_eq!(of_job.header(header), direct.header(header), "{header}");
        }
        assert_eq!(made.header("x-flow-ignored"), direct.header("x-flow-ignored"));
    }
    // A recording that is none fails as the request does.
    let id = id_of(&service.send(JOBS, Some(b"no recording"), &[]));
    wait(|| state(&service, &id) == "failed");
    let job = service.get(&format!("{JOBS}/{id}")).json();
    assert_eq!(
        job["error"],
        service.transcribe(Some(b"no recording"), &[]).json()["error"]
    );
    let failed = result(&service, &id);
    assert_eq!((failed.status, failed.error().0.as_str()), (409, "job_failed"));

    for (limit, told) in [
        ("-1", "`-1`"),
        ("0", "`0`"),
        ("101", "`101`"),
        ("1e2", "`1e2`"),
        ("", "``"),
    ] {
        let refused = service.get(&format!("/v1/jobs?limit={limit}"));
        assert_eq!(refused.status, 400, "{limit}");
        assert_eq!(refused.error().1.as_deref(), Some("limit"), "{limit}");
        let message = format!("`limit` is {told}; it must be a whole number from 1 to 100");
        assert_eq!(refused.json()["error"]["message"], message);
    }
    let unknown = service.get("/v1/jobs?limits=3");
    assert_eq!((unknown.status, unknown.error().0.as_str()), (400, "unknown_parameter"));
    assert!(unknown.text.contains("`limits`"), "{}", unknown.text);
    let listed = service.get("/v1/jobs?limit=3").json();
    assert_eq!(listed["data"].as_array().unwrap().len(), 3);
    assert_eq!(
        (&listed["data"][0]["id"], &listed["has_more"]),
        (&id.as_str().into(), &true.into())
    );
    let rest = service
        .get(&format!("/v1/jobs?after={}", listed["last_id"].as_str().unwrap()))
        .json();
    assert_eq!(
        (rest["data"].as_array().unwrap().len(), &rest["has_more"]),
        (2, &false.into())
    );
    let failed = service.get("/v1/jobs?state=failed").json();
    assert_eq!(failed["data"].as_array().unwrap().len(), 1);
    assert_eq!(delete(&service, &id).json()["deleted"], true);
    assert_eq!(service.get(&format!("{JOBS}/{id}")).error().0, "job_not_found");
    assert_eq!(delete(&service, &id).status, 404);
}

#[test]
fn requests_that_are_wrong_make_no_job() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::start(with_jobs(folder.path()));
    let audio = recording("eval0_en-us.wav");
    for (fields, status, code, param) in [
        (&[("stream", "true")][..], 400, "unsupported_value", Some("stream")),
        (&[("model", "whisper-1")], 404, "model_not_found", Some("model")),
        (
            &[("diarize", "true")],
            400,
            "diarization_not_available",
            Some("response_format"),
        ),
        (
            &[("webhook", "http://127.0.0.1:1/")],
            400,
            "webhook_not_allowed",
            Some("webhook"),
        ),
        (
            &[("response_format", "docx")],
            400,
            "invalid_value",
            Some("response_format"),
        ),
    ] {
        let refused = service.send(JOBS, Some(&audio), fields);
        assert_eq!(refused.status, status, "{fields:?}: {}", refused.text);
        assert_eq!(
            refused.error(),
            (code.to_owned(), param.map(str::to_owned)),
            "{fields:?}"
        );
    }
    assert_eq!(service.send(JOBS, None, &[]).status, 400);
    assert_eq!(service.send(JOBS, Some(b""), &[]).error().0, "empty_file");
    for path in ["?limit=0", "?limit=x", "?state=over", "?order=asc", "?limit=101"] {
        assert_eq!(service.get(&format!("{JOBS}{path}")).status, 400, "{path}");
    }
    for path in ["/job_0", "/job_0/result", "/..%2f..%2fetc", "/%ff", "?after=job_0"] {
        assert_eq!(service.get(&format!("{JOBS}{path}")).status, 404, "{path}");
    }
    assert_eq!(service.get(JOBS).json()["data"].as_array().unwrap().len(), 0);
    // Nothing is left of their uploads.
    let left = fs::read_dir(folder.path().join("jobs")).unwrap();
    let left: Vec<_> = left
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .collect();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(fs::read_dir(&left[0]).unwrap().count(), 1, "its lock");
    // A webhook is of jobs alone.
    let direct = service.transcribe(Some(&audio), &[("webhook", "http://127.0.0.1:1/")]);
    assert_eq!(direct.error().1.as_deref(), Some("webhook"));
}

#[test]
fn without_a_folder_there_are_no_jobs() {
    let service = crate::service::shared();
    let audio = recording("eval0_en-us.wav");
    assert_eq!(service.send(JOBS, Some(&audio), &[]).error().0, "no_jobs");
    assert_eq!(service.get(JOBS).error().0, "no_jobs");
}

#[test]
fn jobs_outlive_the_service_and_are_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::start(with_jobs(folder.path()));
    let long = id_of(&service.send(JOBS, Some(&long_recording(1200)), &[]));
    let short = recording("eval0_en-us.wav");
    let post = |service: &Service, key: &str| {
        let body = form(Some(&short), &[]);
        service.post(JOBS, &content_type(), &body, &[("Idempotency-Key", key)])
    };
    let second = id_of(&post(&service, "a"));
    assert_eq!(id_of(&post(&service, "a")), second);
    assert_ne!(id_of(&post(&service, "b")), second);
    // The key of another request is refused, not answered with its job.
    let other = form(Some(&short), &[("response_format", "srt")]);
    let other = service.post(JOBS, &content_type(), &other, &[("Idempotency-Key", "a")]);
    assert_eq!(
        (other.status, other.error().0.as_str()),
        (422, "idempotency_key_reused")
    );
    assert_eq!(post(&service, &"x".repeat(256)).status, 400);
    let progress = || service.get(&format!("{JOBS}/{long}")).json();
    wait(|| progress()["done_seconds"].as_f64().unwrap() > 0.0);
    let job = progress();
    assert!(job["done_seconds"].as_f64() <= job["audio_seconds"].as_f64(), "{job}");
    assert_eq!(state(&service, &second), "queued");
    assert_eq!(result(&service, &long).error().0, "job_not_done");
    // A request does not wait for the job.
    assert_eq!(service.transcribe(Some(&short), &[]).status, 200);
    assert_eq!(state(&service, &long), "running");
    // A second service cannot have the same folder.
    let settings = with_jobs(folder.path());
    let second_service = flow_service::http::Server::bind(&Storage::default(), settings, "1", Arc::new(|_: &str| {}));
    let error = second_service.err().unwrap().to_string();
    assert!(
        error.contains("`jobs.folder`") && error.contains("another service"),
        "{error}"
    );
    // It stops at once, although the job is long.
    drop(service);

    let service = Service::start(with_jobs(folder.path()));
    assert_eq!(id_of(&post(&service, "a")), second);
    wait(|| state(&service, &long) == "running");
    let cancelled = delete(&service, &long);
    assert_eq!(cancelled.json()["state"], "cancelled");
    assert_eq!(result(&service, &long).error().0, "job_cancelled");
    wait(|| {
        service.get("/v1/jobs?state=done").json()["data"]
            .as_array()
            .unwrap()
            .len()
            == 2
    });
    let direct = service.transcribe(Some(&short), &[]);
    assert_eq!(result(&service, &second).text, direct.text);
    assert_eq!(service.metric("flow_queued_jobs"), 0.0);
    drop(service);

    let service = Service::start(with_jobs(folder.path()));
    assert_eq!(result(&service, &second).text, direct.text);
    assert_eq!(state(&service, &long), "cancelled");
}

#[test]
fn jobs_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = with_jobs(folder.path());
    settings.jobs.max_queued = 1;
    settings.jobs.max_bytes = 100 << 20;
    settings.http.max_upload = 60 << 20;
    let service = Service::start(settings);
    let id = id_of(&service.send(JOBS, Some(&long_recording(1200)), &[]));
    let full = service.send(JOBS, Some(&recording("eval0_en-us.wav")), &[]);
    assert_eq!((full.status, full.error().0.as_str()), (429, "too_many_jobs"));
    assert!(full.header("retry-after").is_some());
    delete(&service, &id);
    let large = service.send(JOBS, Some(&vec![0; 61 << 20]), &[]);
    assert_eq!((large.status, large.error().0.as_str()), (413, "request_too_large"));
    let mut ended = vec![id];
    for _ in 0..2 {
        ended.push(id_of(&service.send(JOBS, Some(&long_recording(1200)), &[])));
        delete(&service, &ended[ended.len() - 1]);
    }
    drop(service);
    // One of them ended long ago.
    let outcome = folder.path().join("jobs").join(&ended[2]).join("outcome");
    let mut changed: Value = serde_json::from_str(&fs::read_to_string(&outcome).unwrap()).unwrap();
    changed["finished_at"] = 1_700_000_000.into();
    fs::write(&outcome, format!("{changed}\n")).unwrap();

    let mut settings = with_jobs(folder.path());
    settings.jobs.max_bytes = 5 << 20;
    settings.jobs.max_kept = 2;
    let service = Service::start(settings);
    // Two are kept, but not for longer than a week.
    wait(|| service.get(JOBS).json()["data"].as_array().unwrap().len() == 2);
    assert_eq!(service.get(&format!("{JOBS}/{}", ended[2])).status, 404);
    drop(service);
    let mut settings = with_jobs(folder.path());
    settings.jobs.max_bytes = 5 << 20;
    settings.jobs.max_kept = 1;
    let service = Service::start(settings);
    wait(|| service.get(JOBS).json()["data"].as_array().unwrap().len() == 1);
    assert_eq!(state(&service, &ended[1]), "cancelled", "the oldest one is removed");
    let full = service.send(JOBS, Some(&vec![0; 6 << 20]), &[]);
    assert_eq!((full.status, full.error().0.as_str()), (429, "no_room_for_job"));
    wait(|| {
        let made = service.send(JOBS, Some(&recording("eval0_en-us.wav")), &[]);
        made.status == 202
    });
}

#[test]
fn a_job_whose_folder_is_deleted_is_gone_and_the_next_one_runs() {
    let folder = tempfile::tempdir().unwrap();
    let said = Arc::new(Mutex::new(String::new()));
    let log = Arc::clone(&said);
    let service = Service::start_with_log(
        with_jobs(folder.path()),
        Arc::new(move |line: &str| log.lock().unwrap().push_str(line)),
    );
    let short = recording("eval0_en-us.wav");
    let running = id_of(&service.send(JOBS, Some(&long_recording(1200)), &[]));
    let [waiting, unwanted, last] = [(); 3].map(|()| id_of(&service.send(JOBS, Some(&short), &[])));
    let of = |id: &str| folder.path().join("jobs").join(id);
    wait(|| fs::metadata(of(&running).join("progress")).is_ok_and(|log| log.len() > 0));
    for id in [&waiting, &unwanted, &running] {
        // A file may be made in it meanwhile.
        wait(|| fs::remove_dir_all(of(id)).is_ok());
    }
    assert_eq!(delete(&service, &unwanted).status, 404);
    wait(|| state(&service, &last) == "done");
    for id in [&running, &waiting, &unwanted] {
        assert_eq!(service.get(&format!("{JOBS}/{id}")).error().0, "job_not_found");
        let warning = format!(
            "warning: the job {id} is gone: its folder {} was deleted",
            of(id).display()
        );
        let said = said.lock().unwrap();
        assert_eq!(said.matches(&warning).count(), 1, "{said}");
    }
    assert_eq!(service.metric("flow_queued_jobs"), 0.0);
}

#[test]
fn a_result_that_cannot_be_written_is_written_again_and_not_transcribed_again() {
    let folder = tempfile::tempdir().unwrap();
    let said = Arc::new(Mutex::new(String::new()));
    let log = Arc::clone(&said);
    let service = Service::start_with_log(
        with_jobs(folder.path()),
        Arc::new(move |line: &str| log.lock().unwrap().push_str(line)),
    );
    let long = id_of(&service.send(JOBS, Some(&long_recording(1200)), &[]));
    let short = recording("eval0_en-us.wav");
    let id = id_of(&service.send(JOBS, Some(&short), &[]));
    // A folder that is not empty is replaced by no file.
    let obstacle = folder.path().join("jobs").join(&id).join("outcome");
    fs::create_dir_all(obstacle.join("full")).unwrap();
    delete(&service, &long);
    wait(|| said.lock().unwrap().contains("cannot be written"));
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(state(&service, &id), "running");
    fs::remove_dir_all(obstacle).unwrap();
    wait(|| state(&service, &id) == "done");
    assert_eq!(service.metric("flow_transcriptions_total{outcome=\"done\"}"), 1.0);
    assert_eq!(said.lock().unwrap().matches("cannot be written").count(), 1);
    assert_eq!(result(&service, &id).text, service.transcribe(Some(&short), &[]).text);
}

#[test]
fn a_job_that_every_process_dies_of_fails_in_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = with_jobs(folder.path());
    settings.jobs.max_attempts = 2;
    let service = Service::start(settings.clone());
    let id = id_of(&service.send(JOBS, Some(&long_recording(1200)), &[]));
    let attempts = folder.path().join("jobs").join(&id).join("attempts.json");
    let counts = |count: u32| {
        let text = fs::read_to_string(&attempts).unwrap_or_default();
        text.starts_with(&format!("{{\"count\":{count},"))
    };
    wait(|| counts(1));
    drop(service);
    // A stop does not count, whether the engine had the job or was about to have it; two deaths do where nothing more was done.
    assert!(counts(0));
    for _ in 0..8 {
        let service = Service::start(settings.clone());
        wait(|| counts(1));
        drop(service);
        assert!(counts(0));
    }
    fs::write(&attempts, r#"{"count": 2, "records": 1000000}"#).unwrap();
    let service = Service::start(settings);
    wait(|| state(&service, &id) == "failed");
    let error = service.get(&format!("{JOBS}/{id}")).json()["error"].clone();
    assert_eq!(error["code"], "too_many_attempts", "{error}");
    assert!(error["message"].as_str().unwrap().ends_with(" s on"), "{error}");
}

/// Lines of the log of a job are what is done; deaths after which there are more of them do not count.
#[test]
fn a_job_goes_on_behind_what_is_done_and_its_progress_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = with_jobs(folder.path());
    settings.jobs.max_attempts = 2;
    let audio = long_recording(1200);
    let fields = &[
        ("response_format", "verbose_json"),
        ("timestamp_granularities[]", "word"),
    ][..];
    let service = Service::start(settings.clone());
    let id = id_of(&service.send(JOBS, Some(&audio), fields));
    let done_of = |service: &Service| {
        let job = service.get(&format!("{JOBS}/{id}")).json();
        (job["done_seconds"].as_f64().unwrap(), job["audio_seconds"].clone())
    };
    wait(|| done_of(&service).0 > 100.0);
    let (before, _) = done_of(&service);
    drop(service);
    let job = folder.path().join("jobs").join(&id);
    assert!(job.join("progress").exists() && !job.join("outcome").exists());
    fs::write(job.join("attempts.json"), r#"{"count": 2, "records": 3}"#).unwrap();
    let service = Service::start(settings);
    let (after, all) = done_of(&service);
    assert!(
        after >= before && all.as_f64().unwrap() >= 1200.0,
        "{after} s after {before} s of {all}"
    );
    wait(|| state(&service, &id) == "done");
    assert_eq!(
        result(&service, &id).text,
        service.transcribe(Some(&audio), fields).text
    );
    assert!(!job.join("progress").exists());
}

#[test]
fn a_key_sees_its_own_jobs_alone() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.txt");
    fs::write(&keys, "sk-first\nsk-second\n").unwrap();
    let mut settings = with_jobs(folder.path());
    settings.http.keys = Some(keys);
    let service = Service::start(settings);
    let (first, second) = (
        [("Authorization", "Bearer sk-first")],
        [("Authorization", "Bearer sk-second")],
    );
    let body = form(Some(&recording("eval0_en-us.wav")), &[]);
    assert_eq!(service.post(JOBS, &content_type(), &body, &[]).status, 401);
    let id = id_of(&service.post(JOBS, &content_type(), &body, &first));
    let path = format!("{JOBS}/{id}");
    assert_eq!(service.get(&path).status, 401);
    assert_eq!(service.get_with(&path, &first).status, 200);
    for (path, status) in [
        (path.clone(), 404),
        (format!("{path}/result"), 404),
        (JOBS.to_owned(), 200),
    ] {
        let other = service.get_with(&path, &second);
        assert_eq!(other.status, status, "{path}");
        assert!(!other.text.contains(&id), "{path}");
    }
    // The key itself is not on disk.
    let stored = fs::read_to_string(folder.path().join("jobs").join(&id).join("request.json")).unwrap();
    assert!(stored.contains("\"owner\":\"") && !stored.contains("sk-"), "{stored}");
}

/// Event id and body of each request.
type Events = Arc<Mutex<Vec<(String, Value)>>>;

/// Takes webhooks, and answers the first `refusals` of them with 500.
fn webhooks(refusals: usize) -> (String, Events) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let origin = format!("http://{}", listener.local_addr().unwrap());
    let received = Arc::new(Mutex::new(Vec::new()));
    let list = Arc::clone(&received);
    thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let mut reader = BufReader::new(stream.unwrap());
            reader.get_ref().set_read_timeout(Some(PATIENCE)).unwrap();
            let (mut id, mut length) = (String::new(), 0);
            let mut line = String::new();
            while reader.read_line(&mut line).unwrap() > 2 {
                if let Some(value) = line.strip_prefix("webhook-id: ") {
                    id = value.trim().to_owned();
                }
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
                    length = value.trim().parse().unwrap();
                }
                line.clear();
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let status = if number < refusals { "500 No" } else { "200 OK" };
            let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            list.lock().unwrap().push((id, serde_json::from_slice(&body).unwrap()));
            reader.into_inner().write_all(answer.as_bytes()).unwrap();
        }
    });
    (origin, received)
}

#[test]
fn webhooks_tell_of_the_end_and_are_sent_again_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (origin, received) = webhooks(1);
    let secret = folder.path().join("secret");
    fs::write(&secret, "0123456789abcdef0123456789abcdef").unwrap();
    let mut settings = with_jobs(folder.path());
    settings.jobs.webhook_secret = Some(secret);
    settings.jobs.webhook_origins = vec![origin.clone()];
    let service = Service::start(settings.clone());
    let url = format!("{origin}/hook");
    let audio = recording("eval0_en-us.wav");
    let foreign = service.send(JOBS, Some(&audio), &[("webhook", "http://127.0.0.1:1/")]);
    assert_eq!(foreign.error().0, "webhook_not_allowed");
    let id = id_of(&service.send(JOBS, Some(&audio), &[("webhook", &url)]));
    let webhook = |service: &Service, id: &str| service.get(&format!("{JOBS}/{id}")).json()["webhook"].clone();
    wait(|| webhook(&service, &id)["attempts"] == 1);
    assert_eq!(webhook(&service, &id)["state"], "pending");
    drop(service);
    // It waits for the time of the next attempt.
    let delivery = folder.path().join("jobs").join(&id).join("delivery.json");
    let text = fs::read_to_string(&delivery).unwrap();
    let mut noted: Value = serde_json::from_str(&text).unwrap();
    assert!(noted["next_at"].as_u64().unwrap() > 1_700_000_000, "{text}");
    noted["next_at"] = 0.into();
    fs::write(&delivery, noted.to_string()).unwrap();
    let service = Service::start(settings);
    wait(|| webhook(&service, &id)["state"] == "delivered");
    let cancelled = id_of(&service.send(JOBS, Some(&long_recording(1200)), &[("webhook", &url)]));
    delete(&service, &cancelled);
    wait(|| webhook(&service, &cancelled)["state"] == "delivered");
    let received = received.lock().unwrap();
    let [first, second, third] = &received[..] else {
        panic!("{received:?}");
    };
    assert_eq!(first, second, "the same event");
    assert_eq!(first.0, first.1["id"].as_str().unwrap());
    assert_eq!(
        (&first.1["type"], &first.1["data"]["id"]),
        (&"job.done".into(), &id.as_str().into())
    );
    assert_eq!(
        (&third.1["type"], &third.1["data"]["id"]),
        (&"job.cancelled".into(), &cancelled.into())
    );
}
