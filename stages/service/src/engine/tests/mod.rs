//! The engine with the bundled model.

mod limits;
mod loading;
mod resumed;
mod spoken;
mod transcripts;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, PoisonError};
use std::time::Instant;

use candle_core::{DType, Device};
use flow_transcription::recognizer::{Recognized, Recognizer};
use flow_transcription::{Segment, Word};

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
        language_prior: None,
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
    let bytes =
        flow_audio::decode::read_range(&flow_storage::Storage::default(), &tar, member.offset, member.size).unwrap();
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
        speakers: super::SpeakerRequest::default(),
        channel: None,
        model: None,
        audio: file.into_temp_path(),
        source_name: "talk.wav".to_owned(),
        diarize: false,
        tokens: false,
        decoding: Arc::default(),
        log: None,
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
    fn batch(&self, windows: usize, seconds: f64) {
        assert!(windows > 0 && seconds > 0.0);
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
    let (mut segments, mut told_tokens) = (Vec::new(), Vec::new());
    loop {
        match job.next().await.expect("an end") {
            JobEvent::Segments(new, tokens) => {
                assert!(!new.is_empty());
                told_tokens.extend(tokens);
                segments.extend(new);
            }
            JobEvent::Done(finished) => {
                assert_eq!(job.next().await, None);
                assert_eq!(told_tokens, finished.tokens);
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
