//! What comes out of the engine.

use flow_speakers::diarizer::{DiarizationSettings, KnownSpeakers};
use flow_transcription::coverage::CoverageMode;
use flow_transcription::speakers::{AssignmentRules, assign_speakers};
use flow_transcription::text_style::{FillerUse, NumberStyle};
use futures::future::{join, join_all};
use serde_json::json;

use super::*;

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
    let mut settings = EngineSettings {
        diarization: true,
        ..settings()
    };
    let diarizer = Diarizer::bundled().unwrap();
    let diarized = diarizer.diarize(&samples, &DiarizationSettings::default(), &|| false);
    let mut diarized = diarized.unwrap().unwrap();
    // One of them is known.
    let folder = tempfile::tempdir().unwrap();
    let known = folder.path().join("known.json");
    let voice = diarized.speakers[1].embedding.clone();
    std::fs::write(&known, serde_json::json!({"Ann": voice}).to_string()).unwrap();
    settings.known_speakers = Some(known);
    let known = KnownSpeakers::new(vec![("Ann".to_owned(), voice)], KnownSpeakers::THRESHOLD).unwrap();
    known.name(&mut diarized).unwrap();
    assert!(diarized.exclusive.iter().any(|turn| turn.speaker == "Ann"));
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
    // And what is to be known of it comes with its transcript.
    let warnings = |samples: &[f32]| {
        wait(engine.submit(request(&wav(samples))).unwrap().finish())
            .unwrap()
            .warnings
    };
    assert_eq!(warnings(&[0.0; 16_000]), Vec::<String>::new());
    let told = warnings(&[-0.25; 16_000]);
    assert!(told.len() == 1 && told[0].contains("DC offset of -25 %"), "{told:?}");
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
fn windows_of_live_sessions_are_decoded_beside_recordings() {
    let (engine, gate) = gated(settings());
    gate.open();
    let samples = hindi("rec_hi_0001_000.flac");
    let samples = samples[..samples.len().min(15 * 16_000)].to_vec();
    let expected = recognizer().decode(&[&samples]).unwrap().remove(0);
    let job = engine.submit(request(&wav(&two()))).unwrap();
    let windows = (0..4).map(|_| engine.decode_window(Some("small"), (samples.clone(), None), false, Arc::default()));
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
    let too_long = wait(engine.decode_window(None, (vec![0.0; 21 * 16_000], None), false, Arc::default())).unwrap_err();
    assert_eq!(too_long, EngineError::TooLong { max_duration: 20.0 });
    let wrong = wait(engine.decode_window(None, (vec![f32::NAN; 16_000], None), false, Arc::default())).unwrap_err();
    assert!(matches!(wrong, EngineError::Audio { .. }), "{wrong:?}");
    let unknown = wait(engine.decode_window(Some("large"), (samples, None), false, Arc::default())).unwrap_err();
    assert!(matches!(unknown, EngineError::UnknownModel(_)), "{unknown:?}");
    assert_eq!(
        wait(engine.decode_window(None, (Vec::new(), None), false, Arc::default())).unwrap(),
        Heard::default()
    );
}

/// Phrases are boosted where a session says that speech is, and nowhere else.
#[test]
fn windows_of_live_sessions_are_boosted_in_their_speech() {
    let engine = Engine::start(settings()).unwrap();
    let samples = hindi("rec_hi_0001_000.flac");
    let samples = samples[..samples.len().min(15 * 16_000)].to_vec();
    let decoding = Arc::new(DecodingRequest {
        phrases: vec!["north".to_owned(), "garden".to_owned()],
        boost_weight: Some(100.0),
        ..DecodingRequest::default()
    });
    let heard = |speech: Option<Vec<Range<f64>>>, decoding: &Arc<DecodingRequest>| {
        wait(engine.decode_window(None, (samples.clone(), speech), false, Arc::clone(decoding))).unwrap()
    };
    let (plain, everywhere) = (heard(None, &Arc::default()), heard(None, &decoding));
    assert_ne!(plain, everywhere);
    assert_eq!(heard(Some(Vec::new()), &decoding), plain);
    assert_eq!(heard(Some(std::iter::once(0.0..15.0).collect()), &decoding), everywhere);

    // What sessions say of such a request: the phrases that are looked for, and those that the model cannot write.
    let unknown = DecodingRequest {
        phrases: vec!["garden".to_owned(), "\u{4e2d}".to_owned()],
        ..DecodingRequest::default()
    };
    let made = wait(engine.decoding(None, &unknown)).unwrap();
    assert!(made.phrases.is_some());
    assert_eq!(made.notes.len(), 1, "{:?}", made.notes);
    let missing = wait(engine.decoding(Some("other"), &unknown)).unwrap_err();
    assert!(matches!(missing, EngineError::UnknownModel(_)), "{missing:?}");
}

/// Of sentences of two languages with a pause between them there are some that a second hearing tells apart.
#[test]
fn windows_of_live_sessions_are_heard_again_as_two_only_when_they_grow_no_more() {
    let of = |name: &str| {
        let path = root().join(format!("tests/data/golden/model/audio/{name}.wav"));
        flow_audio::decode::decode(&std::fs::read(path).unwrap(), 100.0).unwrap()
    };
    let mut clips = ["eval0_en-us", "eval1_de", "eval2_fr-fr", "eval3_es", "train3_sv"]
        .map(of)
        .to_vec();
    clips.push(hindi("rec_hi_0001_000.flac"));
    let pairs = clips
        .iter()
        .flat_map(|first| clips.iter().map(move |second| (first, second)));
    let windows = pairs.map(|(first, second)| [&first[..], &[0.0; 3_200], &second[..]].concat());
    let (recognizer, engine) = (recognizer(), Engine::start(settings()).unwrap());
    let (window, once, twice) = windows
        .filter(|window| window.len() <= 20 * 16_000)
        .find_map(|window| {
            let twice = recognizer.decode(&[&window]).unwrap().remove(0);
            let once = recognizer
                .decode_again_where((&[&window], &[]), &|_| false, recognizer.decoding())
                .unwrap()
                .remove(0);
            (once != twice).then_some((window, once, twice))
        })
        .expect("a window that is heard otherwise as two");
    // One beside the other: each is decoded as it asks for.
    let windows = [true, false].map(|grows| engine.decode_window(None, (window.clone(), None), grows, Arc::default()));
    assert_eq!(wait(join_all(windows)), [Ok(once), Ok(twice)]);
}

/// Of a model that says nothing the service tells the holes; its words are those that the recognizer finds by itself.
#[test]
fn speech_without_words_is_told() {
    let settings = EngineSettings {
        coverage: CoverageMode::Recover,
        ..settings()
    };
    let (recognizer, recognition) = (recognizer(), settings.recognition());
    let samples = flow_audio::decode::decode(&wav(&two()), 100.0).unwrap();
    let expected = recognizer
        .transcribe(&samples, &recognition, &|| false)
        .unwrap()
        .unwrap();
    let (engine, gate) = gated(settings);
    gate.open();
    let (_, found) = wait(events(engine.submit(request(&wav(&two()))).unwrap()));
    let found = found.unwrap();
    let coverage = found.transcript.metadata.coverage.clone().unwrap();
    assert!(coverage.speech_s > 2.0 && coverage.share > 0.5, "{coverage:?}");
    assert_eq!(coverage, expected.coverage.unwrap());
    let (engine, gate) = gated(super::settings());
    gate.open();
    let (_, off) = wait(events(engine.submit(request(&wav(&two()))).unwrap()));
    assert_eq!(off.unwrap().transcript.metadata.coverage, None);
}

/// By a table in which the first word that is heard is a filler, and the second a number.
#[test]
fn numbers_and_fillers_are_written_as_a_request_asks() {
    let place = tempfile::tempdir().unwrap();
    let table = place.path().join("hi.yaml");
    let core = |word: &Word| word.word.trim_matches(['।', ',', '.', '?']).to_owned();
    let words = |segments: &[Segment]| {
        segments
            .iter()
            .flat_map(|segment| segment.words.clone())
            .collect::<Vec<_>>()
    };
    let asked = |numbers: &str, fillers: &str| {
        let decoding = json!({"languages": ["hi"], "numbers": numbers, "fillers": fillers});
        TranscriptionRequest {
            tokens: true,
            decoding: Arc::new(serde_json::from_value(decoding).unwrap()),
            ..request(&wav(&two()))
        }
    };
    let of = |settings: EngineSettings, request: TranscriptionRequest| {
        let (engine, gate) = gated(settings);
        gate.open();
        let (segments, finished) = wait(events(engine.submit(request).unwrap()));
        let finished = finished.unwrap();
        assert_eq!(segments, finished.transcript.segments);
        assert_eq!(words(&segments).len(), finished.tokens.len());
        finished
    };
    let plain = of(settings(), asked("keep", "keep"));
    let heard = words(&plain.transcript.segments);
    let (filler, number) = (core(&heard[0]), core(&heard[1]));
    assert_ne!(filler, number);
    std::fs::write(
        &table,
        format!("language: hi\ncardinals: {{0: {number}}}\nfillers: [{filler}]\n"),
    )
    .unwrap();
    let with_table = EngineSettings {
        text_tables: vec![table.clone()],
        ..settings()
    };
    let styled = of(with_table.clone(), asked("digits", "drop"));
    let kept: Vec<&Word> = heard.iter().filter(|word| core(word) != filler).collect();
    let found = words(&styled.transcript.segments);
    assert_eq!(found.len(), kept.len());
    for (found, kept) in found.iter().zip(kept) {
        assert_eq!(
            (found.start, found.end, found.confidence),
            (kept.start, kept.end, kept.confidence)
        );
        let expected = if core(kept) == number {
            "0".to_owned()
        } else {
            core(kept)
        };
        assert_eq!(core(found), expected);
    }
    assert!(
        styled.transcript.text.split(' ').any(|word| word.starts_with('0')),
        "{}",
        styled.transcript.text
    );
    // What nobody asks for is as it was, also where it is usual: a request has to name the language.
    let usual = EngineSettings {
        numbers: NumberStyle::Digits,
        fillers: FillerUse::Drop,
        ..with_table
    };
    let silent = of(
        usual.clone(),
        TranscriptionRequest {
            tokens: true,
            ..request(&wav(&two()))
        },
    );
    assert_eq!(
        silent.transcript.segments,
        of(
            settings(),
            TranscriptionRequest {
                tokens: true,
                ..request(&wav(&two()))
            }
        )
        .transcript
        .segments
    );
    let mut named = asked("keep", "keep");
    named.decoding = Arc::new(serde_json::from_value(json!({"languages": ["hi-IN"]})).unwrap());
    assert_eq!(words(&of(usual, named).transcript.segments).len(), found.len());
    let (engine, _) = gated(settings());
    let mut unknown = asked("digits", "keep");
    unknown.decoding = Arc::new(serde_json::from_value(json!({"languages": ["ta"], "numbers": "digits"})).unwrap());
    match engine.submit(unknown) {
        Err(EngineError::Field { field: "numbers", why }) => assert!(why.contains("de, en, es, hi"), "{why}"),
        other => panic!("{other:?}"),
    }
    std::fs::write(&table, "language: hi\n").unwrap();
    let wrong = EngineSettings {
        text_tables: vec![table],
        ..settings()
    };
    match Engine::start(wrong) {
        Err(EngineError::Setting { setting, why }) => {
            assert!(setting == "text_tables" && why.contains("hi.yaml"), "{why}")
        }
        other => panic!("{other:?}"),
    }
}
