use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, PoisonError};
use std::time::Instant;

use candle_core::{DType, Device};
use flow_speakers::diarizer::DiarizationSettings;
use flow_transcription::recognizer::{Recognized, Recognizer};
use flow_transcription::speakers::{AssignmentRules, assign_speakers};
use flow_transcription::{Segment, Word};
use futures::future::{join, join_all};

use super::*;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn model() -> PathBuf {
    root().join("configs/models/small.nemo")
}

fn recognizer() -> Recognizer {
    Recognizer::load(&model(), DType::F32, &Device::Cpu).unwrap()
}

fn named(name: &str, path: impl Into<PathBuf>) -> ModelSettings {
    ModelSettings {
        name: name.to_owned(),
        path: path.into(),
    }
}

fn settings() -> EngineSettings {
    EngineSettings {
        models: vec![named("small", model())],
        ..EngineSettings::default()
    }
}

/// The samples of a Hindi recording of the bundled corpus.
fn hindi(name: &str) -> Vec<f32> {
    let tar = root().join("tests/data/corpus/mini/shards/hi/hi_0000/hi_0000.tar");
    let mut file = std::fs::File::open(&tar).unwrap();
    let length = file.metadata().unwrap().len();
    let listing = flow_audio::tar::list(&mut file, length).unwrap();
    let members = listing.last_of_each_name();
    let member = members.into_iter().find(|member| member.name.ends_with(name)).unwrap();
    let bytes = flow_audio::decode::read_range(&tar, member.offset, member.size).unwrap();
    flow_audio::decode::decode(&bytes, 100.0).unwrap()
}

/// Two recordings with silence around them: two windows, or more.
fn two() -> Vec<f32> {
    let silence = vec![0.0; 24_000];
    let (first, second) = (hindi("rec_hi_0001_000.flac"), hindi("rec_hi_0008_001.flac"));
    [&silence[..], &first, &silence, &second, &silence].concat()
}

/// A mono WAV file of 16 kHz and 16 bits.
fn wav(samples: &[f32]) -> Vec<u8> {
    let data = 2 * samples.len() as u32;
    let mut file = b"RIFF".to_vec();
    file.extend((36 + data).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    file.extend(16_000u32.to_le_bytes());
    file.extend(32_000u32.to_le_bytes());
    file.extend(b"\x02\0\x10\0data");
    file.extend(data.to_le_bytes());
    let integers = samples.iter().map(|sample| (sample * 32_767.0) as i16);
    file.extend(integers.flat_map(i16::to_le_bytes));
    file
}

fn request(bytes: &[u8]) -> TranscriptionRequest {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    TranscriptionRequest {
        model: None,
        audio: file.into_temp_path(),
        source_name: "talk.wav".to_owned(),
        diarize: false,
    }
}

fn wait<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.unwrap().block_on(future)
}

/// Waits for something that happens soon.
fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !happened() {
        assert!(begun.elapsed() < Duration::from_secs(120), "{what} does not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Holds threads of batches, once something was decoded, until it is opened.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
    batches: AtomicUsize,
    finished: AtomicUsize,
    failed: AtomicUsize,
}

impl Gate {
    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }

    fn is_reached(&self) -> bool {
        self.batches.load(Ordering::SeqCst) > 0
    }
}

impl Observer for Gate {
    fn batch(&self, windows: usize, seconds: f64, elapsed: f64) {
        assert!(windows > 0 && seconds > 0.0 && elapsed >= 0.0);
        self.batches.fetch_add(1, Ordering::SeqCst);
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_while(open, |open| !*open));
    }

    fn finished(&self, finished: Result<&Finished, &EngineError>) {
        let count = if finished.is_ok() { &self.finished } else { &self.failed };
        count.fetch_add(1, Ordering::SeqCst);
    }
}

fn gated(settings: EngineSettings) -> (Engine, Arc<Gate>) {
    let gate = Arc::new(Gate::default());
    let engine = Engine::start_observed(settings, Arc::clone(&gate) as Arc<dyn Observer>).unwrap();
    (engine, gate)
}

/// All segments that came as events, and the end.
async fn events(mut job: Job) -> (Vec<Segment>, Result<Finished, EngineError>) {
    let mut segments = Vec::new();
    loop {
        match job.next().await.expect("an end") {
            JobEvent::Segments(new) => {
                assert!(!new.is_empty());
                segments.extend(new);
            }
            JobEvent::Done(finished) => {
                assert_eq!(job.next().await, None);
                return (segments, Ok(*finished));
            }
            JobEvent::Failed(error) => {
                assert_eq!(job.next().await, None);
                return (segments, Err(error));
            }
        }
    }
}

fn words(segments: &[Segment]) -> Vec<&Word> {
    segments.iter().flat_map(|segment| &segment.words).collect()
}

/// Confidences to what rounding may do where a matrix product depends on how many rows it has; times and words to the bit.
fn assert_same(finished: &Finished, expected: &Recognized) {
    let transcript = &finished.transcript;
    let outline = |segments: &[Segment]| -> Vec<(f64, f64, String)> {
        let outline = segments
            .iter()
            .map(|segment| (segment.start, segment.end, segment.text.clone()));
        outline.collect()
    };
    assert_eq!(outline(&transcript.segments), outline(&expected.segments));
    for (a, b) in words(&transcript.segments).into_iter().zip(words(&expected.segments)) {
        assert_eq!((&a.word, a.start, a.end), (&b.word, b.start, b.end));
        assert!(
            (a.confidence.unwrap() - b.confidence.unwrap()).abs() < 1e-3,
            "{a:?} {b:?}"
        );
    }
    assert_eq!(transcript.metadata.languages, expected.languages);
}

#[test]
fn transcripts_are_those_of_recordings_alone_whatever_else_is_transcribed() {
    let conversation = std::fs::read(root().join("tests/data/golden/speakers/conv2.flac")).unwrap();
    // More than ten minutes, which are read twice.
    let long = [&two()[..], &vec![0.0; 660 * 16_000], &hindi("rec_hi_0004_003.flac")].concat();
    let mut recordings = vec![wav(&long), wav(&two()), conversation, wav(&vec![0.0; 40_000])];
    for name in ["eval0_en-us", "eval1_de", "eval2_fr-fr", "eval3_es", "train3_sv"] {
        let path = root().join(format!("tests/data/golden/model/audio/{name}.wav"));
        recordings.push(std::fs::read(path).unwrap());
    }
    let settings = EngineSettings {
        batch_seconds: 40.0,
        ..settings()
    };
    let (recognizer, recognition) = (recognizer(), settings.recognition());
    let (engine, gate) = gated(settings);
    gate.open();
    let mut expected = Vec::new();
    for (index, bytes) in recordings.iter().enumerate() {
        let samples = flow_audio::decode::decode(bytes, 1_000.0).unwrap();
        let found = recognizer.transcribe(&samples, &recognition, &|| false);
        let found = found.unwrap().unwrap();
        let (segments, alone) = wait(events(engine.submit(request(bytes)).unwrap()));
        let alone = alone.unwrap();
        assert_same(&alone, &found);
        assert_eq!(segments, alone.transcript.segments);
        assert_eq!(alone.batches == 0, found.windows == 0);
        assert!(alone.queue_seconds >= 0.0 && alone.decode_seconds >= 0.0);
        let metadata = &alone.transcript.metadata;
        assert_eq!(
            (&metadata.model, &metadata.model_digest),
            (&recognizer.name, &recognizer.digest)
        );
        assert_eq!((&metadata.source_file[..], metadata.num_speakers), ("talk.wav", None));
        assert_eq!(metadata.duration_s, samples.len() as f64 / 16_000.0);
        assert_eq!(metadata.damaged_at, None);
        alone.transcript.to_json().unwrap();
        match index {
            0 | 1 => assert!(found.windows >= 2 && !found.segments.is_empty(), "recording {index}"),
            3 => assert_eq!(found, Recognized::default()),
            _ => {}
        }
        expected.push(found);
    }
    let jobs = recordings
        .iter()
        .map(|bytes| events(engine.submit(request(bytes)).unwrap()));
    let together = wait(join_all(jobs.collect::<Vec<_>>()));
    for ((segments, finished), expected) in together.into_iter().zip(&expected) {
        let finished = finished.unwrap();
        assert_same(&finished, expected);
        assert_eq!(segments, finished.transcript.segments);
    }
    assert_eq!(gate.finished.load(Ordering::SeqCst), 2 * recordings.len());
    assert_eq!((engine.queued(), gate.failed.load(Ordering::SeqCst)), (0, 0));
}

#[test]
fn who_speaks_is_found_where_it_is_asked_for() {
    let path = root().join("tests/data/golden/speakers/conv2.flac");
    let samples = flow_audio::decode::decode(&std::fs::read(&path).unwrap(), 100.0).unwrap();
    let settings = EngineSettings {
        diarization: true,
        ..settings()
    };
    let diarizer = Diarizer::bundled().unwrap();
    let diarized = diarizer.diarize(&samples, &DiarizationSettings::default(), &|| false);
    let diarized = diarized.unwrap().unwrap();
    let recognized = recognizer().transcribe(&samples, &settings.recognition(), &|| false);
    let recognized = recognized.unwrap().unwrap();
    let expected = assign_speakers(recognized.segments, &diarized.exclusive, &AssignmentRules::default());
    let engine = Engine::start(settings).unwrap();
    let mut request = request(&std::fs::read(&path).unwrap());
    request.diarize = true;
    let (segments, finished) = wait(events(engine.submit(request).unwrap()));
    let transcript = finished.unwrap().transcript;
    assert!(segments.is_empty(), "segments come with their speakers, at the end");
    assert_eq!(transcript.metadata.num_speakers, Some(diarized.speakers.len() as u64));
    assert!(diarized.speakers.len() > 1);
    let said = |segments: &[Segment]| -> Vec<(Option<String>, String)> {
        let said = segments
            .iter()
            .map(|segment| (segment.speaker.clone(), segment.text.clone()));
        said.collect()
    };
    assert_eq!(said(&transcript.segments), said(&expected));
    assert!(transcript.performance.diarization_s > 0.0);
}

#[test]
fn more_requests_than_there_are_places_are_refused_until_one_goes() {
    let settings = EngineSettings {
        max_queue: 2,
        ..settings()
    };
    let (engine, gate) = gated(settings);
    let bytes = wav(&two());
    let first = engine.submit(request(&bytes)).unwrap();
    let second_request = request(&bytes);
    let second_path = second_request.audio.to_path_buf();
    let second = engine.submit(second_request).unwrap();
    let refused = request(&bytes);
    let refused_path = refused.audio.to_path_buf();
    match engine.submit(refused) {
        Err(EngineError::Busy { retry_after }) => assert!((1..=60).contains(&retry_after)),
        other => panic!("{other:?}"),
    }
    assert!(!refused_path.exists() && second_path.exists());
    until("a batch", || gate.is_reached());
    assert_eq!(engine.queued(), 2);
    // A client that goes leaves its place and its file at once, though its windows may be in the model.
    drop(second);
    assert_eq!((engine.queued(), gate.failed.load(Ordering::SeqCst)), (1, 1));
    assert!(!second_path.exists());
    let third = engine.submit(request(&bytes)).unwrap();
    gate.open();
    let (first, third) = wait(join(first.finish(), third.finish()));
    assert_eq!(first.unwrap().transcript.text, third.unwrap().transcript.text);
    assert_eq!(engine.queued(), 0);
}

#[test]
fn a_job_that_is_cancelled_leaves_nothing_behind() {
    let settings = EngineSettings {
        batch_seconds: 1.0,
        ..settings()
    };
    let (engine, gate) = gated(settings);
    let job = engine.submit(request(&wav(&[two(), two()].concat()))).unwrap();
    until("a batch", || gate.is_reached());
    drop(job);
    let (send, receive) = mpsc::channel();
    let waiter = move |lease| send.send(lease).unwrap();
    engine.inner.shared.models.acquire(0, Box::new(waiter));
    let lease = receive.recv().unwrap().unwrap();
    assert_eq!(lease.model().batcher.waiting(), 0);
    drop(lease);
    gate.open();
    let finished = wait(engine.submit(request(&wav(&two()))).unwrap().finish()).unwrap();
    assert!(!finished.transcript.segments.is_empty());
}

#[test]
fn decoding_has_a_limit_of_time() {
    let settings = EngineSettings {
        // Each window goes alone.
        batch_seconds: 0.1,
        decode_timeout: 1e-9,
        ..settings()
    };
    let (engine, gate) = gated(settings);
    gate.open();
    let failed = wait(engine.submit(request(&wav(&two()))).unwrap().finish());
    assert_eq!(failed.unwrap_err(), EngineError::Timeout(1e-9));
    assert_eq!((engine.queued(), gate.failed.load(Ordering::SeqCst)), (0, 1));
}

#[test]
fn what_cannot_be_transcribed_is_told() {
    let settings = EngineSettings {
        max_duration: 60.0,
        ..settings()
    };
    let engine = Engine::start(settings).unwrap();
    let refused = |bytes: &[u8]| {
        let request = request(bytes);
        let path = request.audio.to_path_buf();
        let error = wait(engine.submit(request).unwrap().finish()).unwrap_err();
        assert!(!path.exists());
        assert!(!error.to_string().contains(path.to_str().unwrap()), "{error}");
        error
    };
    for (bytes, expected) in [
        (&b""[..], "empty_file"),
        (&b"this is a text"[..], "unsupported_format"),
        (&wav(&[])[..], "decode_error"),
        // Damaged before the first second is over.
        (&wav(&[0.1; 32_000])[..10_000], "decode_error"),
    ] {
        match refused(bytes) {
            EngineError::Audio { reason, detail } => {
                assert_eq!(reason, expected, "{detail}");
                assert!(detail.contains("talk.wav"), "{detail}");
            }
            other => panic!("{other:?}"),
        }
    }
    let too_long = refused(&wav(&vec![0.0; 61 * 16_000]));
    assert_eq!(too_long, EngineError::TooLong { max_duration: 60.0 });
    // What is before the damage is kept.
    let whole = wav(&two());
    let cut = &whole[..whole.len() - 40_000];
    let finished = wait(engine.submit(request(cut)).unwrap().finish()).unwrap();
    let metadata = &finished.transcript.metadata;
    assert_eq!(metadata.damaged_at, Some(metadata.duration_s));
    let mut other = request(b"");
    other.model = Some("large".to_owned());
    match engine.submit(other) {
        Err(EngineError::UnknownModel(message)) => {
            assert!(message.contains("`large`") && message.contains("`small`"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    let mut diarized = request(b"");
    diarized.diarize = true;
    assert_eq!(engine.submit(diarized).unwrap_err(), EngineError::NotDiarizing);
    assert_eq!(engine.queued(), 0);
}

#[test]
fn models_that_cannot_be_loaded_say_which() {
    let missing = EngineSettings {
        models: vec![named("gone", "missing.nemo")],
        ..EngineSettings::default()
    };
    match Engine::start(missing) {
        Err(EngineError::Model(message)) => {
            assert!(
                message.contains("`gone`") && message.contains("missing.nemo"),
                "{message}"
            );
        }
        other => panic!("{other:?}"),
    }
    let settings = EngineSettings {
        models: vec![named("small", model()), named("gone", "missing.nemo")],
        ..EngineSettings::default()
    };
    let engine = Engine::start(settings).unwrap();
    for _ in 0..2 {
        let mut request = request(&wav(&two()));
        request.model = Some("gone".to_owned());
        match wait(engine.submit(request).unwrap().finish()) {
            Err(EngineError::Model(message)) => assert!(message.contains("`gone`"), "{message}"),
            other => panic!("{other:?}"),
        }
    }
    let states = engine.models();
    let loaded: Vec<(&str, bool)> = states.iter().map(|state| (&state.name[..], state.loaded)).collect();
    assert_eq!(loaded, [("small", true), ("gone", false)]);
    let recognizer = recognizer();
    assert_eq!(states[0].digest.as_ref(), Some(&recognizer.digest));
    assert!(states[0].languages.contains(&"hi".to_owned()), "{states:?}");
    assert_eq!((&states[1].digest, states[1].languages.len()), (&None, 0));
}

#[test]
fn models_that_nobody_uses_are_unloaded() {
    let settings = EngineSettings {
        idle_unload: 0.05,
        ..settings()
    };
    let (engine, gate) = gated(settings);
    until("unloading", || !engine.models()[0].loaded);
    assert!(engine.models()[0].digest.is_some() && engine.is_ready());
    let bytes = wav(&two());
    let jobs: Vec<Job> = (0..3).map(|_| engine.submit(request(&bytes)).unwrap()).collect();
    until("a batch", || gate.is_reached());
    std::thread::sleep(Duration::from_millis(200));
    assert!(engine.models()[0].loaded, "it is in use");
    gate.open();
    for finished in wait(join_all(jobs.into_iter().map(Job::finish))) {
        finished.unwrap();
    }
    until("unloading", || !engine.models()[0].loaded);
}

#[test]
fn models_share_a_budget_of_memory() {
    let two_models = |budget| EngineSettings {
        models: vec![named("a", model()), named("b", model())],
        memory_budget: Some(budget),
        ..EngineSettings::default()
    };
    match Engine::start(two_models(1_000)) {
        Err(EngineError::NoMemory(message)) => assert!(message.contains("`a`"), "{message}"),
        other => panic!("{other:?}"),
    }
    let size = model().metadata().unwrap().len();
    let loaded = |engine: &Engine| -> Vec<bool> { engine.models().iter().map(|state| state.loaded).collect() };
    let with = |model: &str| {
        let mut request = request(&wav(&two()));
        request.model = Some(model.to_owned());
        request
    };
    // Both have room: the archive is some hundred kilobytes more or less than its tensors in 32 bits, or a multiple.
    let engine = Engine::start(two_models(100 * size)).unwrap();
    wait(engine.submit(with("b")).unwrap().finish()).unwrap();
    assert_eq!(loaded(&engine), [true, true]);
    drop(engine);
    let bytes = flow_model::checkpoint::OpenModel::open(&model()).unwrap().tensors;
    let bytes: u64 = bytes.iter().map(|tensor| 4 * tensor.elements() as u64).sum();
    let (engine, gate) = gated(two_models(bytes + bytes / 2));
    // One has to go for the other, unless it is in use.
    let of_a = engine.submit(with("a")).unwrap();
    until("a batch", || gate.is_reached());
    match wait(engine.submit(with("b")).unwrap().finish()) {
        Err(EngineError::NoMemory(message)) => assert!(message.contains("`a`") && message.contains("`b`"), "{message}"),
        other => panic!("{other:?}"),
    }
    gate.open();
    wait(of_a.finish()).unwrap();
    wait(engine.submit(with("b")).unwrap().finish()).unwrap();
    assert_eq!(loaded(&engine), [false, true]);
    wait(engine.submit(with("a")).unwrap().finish()).unwrap();
    assert_eq!(loaded(&engine), [true, false]);
}

#[test]
fn windows_of_live_sessions_are_decoded_beside_recordings() {
    let (engine, gate) = gated(settings());
    gate.open();
    let samples = hindi("rec_hi_0001_000.flac");
    let samples = samples[..samples.len().min(15 * 16_000)].to_vec();
    let expected = recognizer().decode(&[&samples]).unwrap().remove(0);
    let job = engine.submit(request(&wav(&two()))).unwrap();
    let windows = (0..4).map(|_| engine.decode_window(Some("small"), samples.clone()));
    let (heard, finished) = wait(join(join_all(windows), job.finish()));
    finished.unwrap();
    let outline = |heard: &Heard| -> Vec<(String, f64, f64)> {
        let words = heard.words.iter().map(|word| (word.word.clone(), word.start, word.end));
        words.collect()
    };
    for heard in heard {
        assert_eq!(outline(&heard.unwrap()), outline(&expected));
    }
    assert!(!expected.words.is_empty());
    let too_long = wait(engine.decode_window(None, vec![0.0; 21 * 16_000])).unwrap_err();
    assert_eq!(too_long, EngineError::TooLong { max_duration: 20.0 });
    let wrong = wait(engine.decode_window(None, vec![f32::NAN; 16_000])).unwrap_err();
    assert!(matches!(wrong, EngineError::Audio { .. }), "{wrong:?}");
    let unknown = wait(engine.decode_window(Some("large"), samples)).unwrap_err();
    assert!(matches!(unknown, EngineError::UnknownModel(_)), "{unknown:?}");
    assert_eq!(wait(engine.decode_window(None, Vec::new())).unwrap(), Heard::default());
}

#[test]
fn draining_ends_what_was_taken_and_takes_no_more() {
    let (engine, gate) = gated(settings());
    let bytes = wav(&two());
    let job = engine.submit(request(&bytes)).unwrap();
    let draining = async {
        until("a batch", || gate.is_reached());
        assert!(!engine.is_ready());
        assert_eq!(engine.submit(request(&bytes)).unwrap_err(), EngineError::Draining);
        gate.open();
        // Those that are live come to their end.
        engine.decode_window(None, vec![0.0; 16_000]).await.unwrap();
    };
    wait(join(engine.drain(Duration::from_secs(120)), draining));
    assert_eq!(engine.queued(), 0);
    assert!(wait(job.finish()).is_ok());

    let (engine, gate) = gated(settings());
    let job = engine.submit(request(&bytes)).unwrap();
    until("a batch", || gate.is_reached());
    wait(engine.drain(Duration::from_millis(20)));
    assert_eq!(wait(job.finish()).unwrap_err(), EngineError::Cancelled);
    assert_eq!(engine.queued(), 0);
    gate.open();
}

#[test]
fn an_engine_that_goes_ends_its_jobs() {
    let (engine, gate) = gated(settings());
    let job = engine.submit(request(&wav(&two()))).unwrap();
    until("a batch", || gate.is_reached());
    drop(engine);
    assert_eq!(wait(job.finish()).unwrap_err(), EngineError::Cancelled);
    gate.open();
}

#[test]
fn metrics_that_panic_do_not_hurt() {
    struct Panics;
    impl Observer for Panics {
        fn batch(&self, _: usize, _: f64, _: f64) {
            panic!("in a batch");
        }
        fn finished(&self, _: Result<&Finished, &EngineError>) {
            panic!("at the end");
        }
    }
    let engine = Engine::start_observed(settings(), Arc::new(Panics)).unwrap();
    for _ in 0..2 {
        let finished = wait(engine.submit(request(&wav(&two()))).unwrap().finish()).unwrap();
        assert!(!finished.transcript.segments.is_empty());
    }
}
