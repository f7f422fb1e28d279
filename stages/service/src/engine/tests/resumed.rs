//! Requests that go on where a process died.

use std::fs;

use flow_transcription::coverage::CoverageMode;
use serde_json::json;

use super::*;

/// Counts windows that are decoded.
#[derive(Default)]
struct Decoded(AtomicUsize);

impl Observer for Decoded {
    fn batch(&self, windows: usize, _: f64) {
        self.0.fetch_add(windows, Ordering::SeqCst);
    }

    fn finished(&self, _: Result<&Finished, &EngineError>) {}
}

/// Fields of a request.
type Change<'a> = &'a dyn Fn(&mut TranscriptionRequest);

/// What a client is given, without times of processing.
fn given(finished: Finished) -> String {
    let mut transcript = finished.transcript;
    transcript.metadata.processed_at = String::new();
    format!(
        "{:?} {:?} {:?} {:?}",
        transcript.segments, transcript.metadata, finished.tokens, finished.warnings
    )
}

/// A stereo WAV file of 16 kHz and 16 bits.
fn stereo(left: &[f32], right: &[f32]) -> Vec<u8> {
    let both: Vec<f32> = left
        .iter()
        .zip(right)
        .flat_map(|(left, right)| [*left, *right])
        .collect();
    let mut file = wav(&both);
    (file[22], file[32]) = (2, 4);
    file[28..32].copy_from_slice(&64_000u32.to_le_bytes());
    file
}

#[test]
fn what_is_done_is_not_done_again_and_the_result_is_the_same_to_the_bit() {
    let silence = vec![0.0; 30 * 16_000];
    let samples = [
        &two()[..],
        &silence,
        &hindi("rec_hi_0004_003.flac"),
        &silence,
        &two(),
        &silence[..9_000],
    ]
    .concat();
    let reversed: Vec<f32> = samples.iter().rev().copied().collect();
    let mut damaged = wav(&samples);
    damaged.truncate(damaged.len() - 100_001);
    let recover = EngineSettings {
        coverage: CoverageMode::Recover,
        diarization: true,
        ..settings()
    };
    let phrases = json!({"phrases": ["kaha", "\u{928}\u{939}\u{940}\u{902}"], "languages": ["hi"]});
    let cases: [(&str, EngineSettings, Vec<u8>, Change<'_>); 4] = [
        ("tokens", settings(), wav(&samples), &|request| request.tokens = true),
        ("recovered", recover.clone(), wav(&samples), &|request| {
            request.decoding = Arc::new(serde_json::from_value(phrases.clone()).unwrap());
        }),
        ("channel", settings(), stereo(&samples, &reversed), &|request| {
            request.channel = Some(1)
        }),
        ("speakers", recover, damaged, &|request| request.diarize = true),
    ];
    for (name, settings, bytes, change) in cases {
        let folder = tempfile::tempdir().unwrap();
        let (audio, log) = (folder.path().join("audio"), folder.path().join("progress"));
        fs::write(&audio, bytes).unwrap();
        let decoded = Arc::new(Decoded::default());
        let engine = Engine::start_observed(settings, Arc::clone(&decoded) as Arc<dyn Observer>).unwrap();
        let run = |log: Option<&Path>| {
            let mut request = request(&[]);
            request.audio = TempPath::try_from_path(audio.clone()).unwrap();
            request.audio.disable_cleanup(true);
            request.log = log.map(Path::to_owned);
            change(&mut request);
            decoded.0.store(0, Ordering::SeqCst);
            let (_, finished) = wait(events(engine.submit(request).unwrap()));
            (given(finished.unwrap()), decoded.0.load(Ordering::SeqCst))
        };
        let (expected, windows) = run(None);
        assert!(windows >= 4, "{name}: {windows} windows");
        assert_eq!(run(Some(&log)), (expected.clone(), windows), "{name}");
        // Waits for the thread that writes.
        fs::File::open(&log).unwrap().lock().unwrap();
        let lines: Vec<Vec<u8>> = fs::read(&log)
            .unwrap()
            .split_inclusive(|byte| *byte == b'\n')
            .map(<[u8]>::to_vec)
            .collect();
        let before = lines.len() - windows;
        assert!(before > 2, "{name}: the log, voice activity, and windows");
        let seconds = Logged::read(&log).seconds.unwrap();
        assert_eq!(seconds.0, seconds.1, "{name}");
        let is_tried = |kept: &usize| *kept < 3 || kept.is_multiple_of(9) || *kept + 1 >= before;
        for kept in (0..=lines.len()).filter(is_tried) {
            // The next line is torn.
            let torn = lines.get(kept).map_or(&[][..], |line| &line[..line.len() / 2]);
            fs::write(&log, [&lines[..kept].concat(), torn].concat()).unwrap();
            let left = windows - kept.saturating_sub(before);
            assert_eq!(
                run(Some(&log)),
                (expected.clone(), left),
                "{name}: {kept} of {} lines",
                lines.len()
            );
            fs::File::open(&log).unwrap().lock().unwrap();
            assert_eq!(Logged::read(&log).seconds, Some(seconds), "{name}: {kept} lines");
        }
        // The log of another recording.
        let mut other = fs::read(&audio).unwrap();
        let length = other.len();
        other[length / 2..].fill(0);
        fs::write(&audio, other).unwrap();
        let (fresh, _) = run(None);
        assert_ne!(fresh, expected, "{name}");
        assert_eq!(run(Some(&log)).0, fresh, "{name}");
    }
}
