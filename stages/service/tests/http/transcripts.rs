//! Transcripts in every form, equal to those of the engine.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use candle_core::{DType, Device};
use flow_service::engine::{Engine, Finished, SpeakerRequest, TranscriptionRequest};
use flow_service::http::ENDPOINTS;
use flow_storage::Storage;
use flow_transcription::alignment::AlignmentSettings;
use flow_transcription::recognizer::Recognizer;
use flow_transcription::transcribe::TranscribeSettings;
use flow_transcription::{Format, LineLimits};
use serde_json::{Value, json};

use crate::service::{Answer, data, recording, settings, shared, silence, wait};

/// What the engine itself makes of a recording.
fn expected(audio: &[u8], diarize: bool) -> Finished {
    let mut settings = settings().engine;
    settings.diarization = diarize;
    let engine = Engine::start(settings).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), audio).unwrap();
    let request = TranscriptionRequest {
        model: None,
        audio: file.into_temp_path(),
        source_name: "talk.wav".to_owned(),
        diarize,
        speakers: SpeakerRequest::default(),
        channel: None,
        tokens: true,
        decoding: Default::default(),
        log: None,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async { engine.submit(request).unwrap().finish().await.unwrap() })
}

/// The data of server-sent events.
fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    let lines = answer.text.lines().filter_map(|line| line.strip_prefix("data: "));
    lines.map(|data| serde_json::from_str(data).unwrap()).collect()
}

#[test]
fn every_format_is_that_of_the_engine() {
    let service = shared();
    let audio = recording("eval3_es.wav");
    let transcript = expected(&audio, false).transcript;
    assert!(!transcript.text.is_empty());
    let asked = |format: &str| {
        let answer = service.transcribe(Some(&audio), &[("response_format", format), ("model", "small")]);
        assert_eq!(answer.status, 200, "{format}: {}", answer.text);
        answer
    };
    let written =
        |format: Format| String::from_utf8(format.write(&transcript, &LineLimits::default()).unwrap()).unwrap();

    let usage = json!({"type": "duration", "seconds": transcript.metadata.duration_s.ceil() as u64});
    assert_eq!(asked("json").json(), json!({"text": transcript.text, "usage": usage}));
    let unasked = service.transcribe(Some(&audio), &[]);
    assert_eq!(
        unasked.json()["text"],
        transcript.text.as_str(),
        "json, of the first model"
    );
    let text = asked("text");
    assert_eq!(text.text, format!("{}\n", transcript.text));
    assert_eq!(text.header("content-type"), Some("text/plain; charset=utf-8"));
    assert_eq!(asked("srt").text, written(Format::Srt));
    let vtt = asked("vtt");
    assert_eq!(vtt.text, written(Format::Vtt));
    assert_eq!(vtt.header("content-type"), Some("text/vtt; charset=utf-8"));

    let verbose = asked("verbose_json").json();
    assert_eq!(verbose["task"], "transcribe");
    assert_eq!(verbose["text"], transcript.text.as_str());
    assert_eq!(verbose["duration"], transcript.metadata.duration_s);
    let segments = verbose["segments"].as_array().unwrap();
    assert_eq!(segments.len(), transcript.segments.len());
    for (id, (found, segment)) in segments.iter().zip(&transcript.segments).enumerate() {
        let of_engine = json!(segment);
        assert_eq!(found["id"], id);
        for key in ["start", "end", "text", "confidence"] {
            assert_eq!(found[key], of_engine[key], "{key}");
        }
    }
    assert_eq!(verbose.get("words"), None);
}

#[test]
fn words_come_where_they_are_asked_for() {
    let service = shared();
    let audio = recording("eval1_de.wav");
    let transcript = expected(&audio, false).transcript;
    let with = |granularities: &[&str]| {
        let mut fields = vec![("response_format", "verbose_json")];
        fields.extend(granularities.iter().map(|name| ("timestamp_granularities[]", *name)));
        service.transcribe(Some(&audio), &fields).json()
    };
    let words = with(&["word"]);
    assert_eq!(words.get("segments"), None);
    let of_engine: Vec<Value> = transcript
        .segments
        .iter()
        .flat_map(|segment| &segment.words)
        .map(|word| json!(word))
        .collect();
    assert!(!of_engine.is_empty());
    assert_eq!(words["words"], json!(of_engine));
    let both = with(&["word", "segment"]);
    assert_eq!(both["words"], words["words"]);
    assert_eq!(both["segments"].as_array().unwrap().len(), transcript.segments.len());
}

#[test]
fn streams_join_to_the_text() {
    let service = shared();
    let audio = recording("eval3_es.wav");
    let transcript = expected(&audio, false).transcript;
    for format in ["json", "text"] {
        let answer = service.transcribe(Some(&audio), &[("response_format", format), ("stream", "true")]);
        let events = events(&answer);
        let (done, deltas) = events.split_last().unwrap();
        assert_eq!(done["type"], "transcript.text.done");
        assert_eq!(done["text"], transcript.text.as_str());
        assert!(done["usage"]["seconds"].is_u64());
        let mut joined = String::new();
        for delta in deltas {
            assert_eq!(delta["type"], "transcript.text.delta");
            joined.push_str(delta["delta"].as_str().unwrap());
        }
        assert_eq!(joined, transcript.text);
    }
    // What is wrong with a recording has a status, though a stream was asked for.
    let broken = service.transcribe(Some(b"no recording"), &[("stream", "true")]);
    assert_eq!(broken.status, 400);
    assert_eq!(broken.error().1.as_deref(), Some("file"));
}

#[test]
fn speakers_are_named_in_every_form_that_is_asked_for() {
    let service = shared();
    let audio = std::fs::read(data("tests/data/golden/speakers/conv2.flac")).unwrap();
    let transcript = expected(&audio, true).transcript;
    let diarized = service.transcribe(Some(&audio), &[("response_format", "diarized_json")]);
    assert_eq!(diarized.status, 200, "{}", diarized.text);
    let diarized = diarized.json();
    assert_eq!(diarized["text"], transcript.text.as_str());
    let segments = diarized["segments"].as_array().unwrap().clone();
    assert_eq!(segments.len(), transcript.segments.len());
    for (found, segment) in segments.iter().zip(&transcript.segments) {
        assert_eq!(found["speaker"].as_str(), segment.speaker.as_deref());
        assert_eq!(found["text"], segment.text.as_str());
    }

    let streamed = service.transcribe(Some(&audio), &[("response_format", "diarized_json"), ("stream", "1")]);
    let events = events(&streamed);
    let (done, streamed) = events.split_last().unwrap();
    assert_eq!(done["text"], transcript.text.as_str());
    assert_eq!(streamed, segments);

    let srt = service.transcribe(Some(&audio), &[("response_format", "srt"), ("diarize", "true")]);
    let written = Format::Srt.write(&transcript, &LineLimits::default()).unwrap();
    assert_eq!(srt.text.as_bytes(), written);

    for path in ["/v1/audio/diarization", "/v1/audio/diarizations"] {
        let turns = service.send(path, Some(&audio), &[]);
        assert_eq!(turns.status, 200, "{}", turns.text);
        let turns = turns.json();
        assert_eq!(turns["task"], "diarize");
        assert_eq!(turns["speakers"], json!(transcript.speakers));
        for turn in turns["segments"].as_array().unwrap() {
            assert!(turn["start"].as_f64().unwrap() <= turn["end"].as_f64().unwrap());
            assert!(turn["speaker"].is_string());
        }
    }
}

#[test]
fn fields_without_effect_are_named() {
    let service = shared();
    let audio = recording("eval0_en-us.wav");
    let fields = [
        ("temperature", "0.5"),
        ("chunking_strategy", "{\"type\": \"server_vad\", \"threshold\": 0.4}"),
        ("beam_size", "5"),
    ];
    let answer = service.transcribe(Some(&audio), &fields);
    assert_eq!(answer.status, 200, "{}", answer.text);
    let ignored = answer.header("x-flow-ignored").unwrap();
    assert_eq!(ignored, "temperature, chunking_strategy, beam_size");
    // What changes nothing is not named.
    let plain = [
        ("prompt", ""),
        ("language", "auto"),
        ("temperature", "0"),
        ("chunking_strategy", "auto"),
        ("stream", "false"),
    ];
    assert_eq!(service.transcribe(Some(&audio), &plain).header("x-flow-ignored"), None);
    // Other formats have no place for log probabilities, as with OpenAI.
    for (format, ignored) in [
        ("json", None),
        ("verbose_json", Some("include[]")),
        ("srt", Some("include[]")),
    ] {
        let fields = [("include[]", "logprobs"), ("response_format", format)];
        let answer = service.transcribe(Some(&audio), &fields);
        assert_eq!(
            (answer.status, answer.header("x-flow-ignored")),
            (200, ignored),
            "{format}"
        );
    }
}

#[test]
fn a_request_names_its_language_and_its_phrases() {
    let service = shared();
    let audio = recording("eval1_de.wav");
    let verbose = |fields: &[(&str, &str)]| {
        let answer = service.transcribe(
            Some(&audio),
            &[&[("response_format", "verbose_json")][..], fields].concat(),
        );
        assert_eq!(
            (answer.status, answer.header("x-flow-ignored")),
            (200, None),
            "{}",
            answer.text
        );
        answer.json()
    };
    let text = |document: &Value| document["text"].as_str().unwrap().to_owned();
    let plain = verbose(&[]);
    for (language, letters) in [
        ("hi", '\u{900}'..='\u{97f}'),
        ("ta-IN", '\u{b80}'..='\u{bff}'),
        ("en", 'A'..='z'),
    ] {
        let asked = verbose(&[("language", language)]);
        let heard = text(&asked);
        assert!(!heard.is_empty(), "{language}");
        let is_foreign = |c: &char| c.is_alphabetic() && !letters.contains(c);
        assert_eq!(heard.chars().find(is_foreign), None, "{language}: {heard}");
        assert_eq!(asked["language"], language[..2], "{asked}");
        assert_eq!(asked.get("warnings"), None, "{asked}");
    }
    let either = verbose(&[("languages[]", "hi"), ("languages[]", "ta")]);
    assert!(["hi", "ta"].contains(&either["language"].as_str().unwrap()), "{either}");
    // A language that the model cannot write changes nothing, and that is said.
    let greek = verbose(&[("language", "el")]);
    assert_eq!(text(&greek), text(&plain));
    assert!(greek["warnings"].to_string().contains("no letters of el"), "{greek}");

    let boosted = verbose(&[("language", "en"), ("phrases[]", "seventeen"), ("boost_weight", "100")]);
    assert!(text(&boosted).contains("seventeen"), "{boosted}");
    let written = &boosted["boosted"]["phrases"][0];
    assert_eq!(written["phrase"], "seventeen", "{boosted}");
    assert!(written["changed"].as_u64().unwrap() > 0, "{boosted}");
    let digits = verbose(&[
        ("language", "en"),
        ("phrases[]", "seventeen"),
        ("boost_weight", "100"),
        ("numbers", "digits"),
        ("fillers", "drop"),
    ]);
    assert!(
        text(&digits).contains("17") && !text(&digits).contains("seventeen"),
        "{digits}"
    );
    let prompted = verbose(&[("language", "en"), ("prompt", "seventeen."), ("boost_weight", "100")]);
    assert_eq!(text(&prompted), text(&boosted));
    let unknown = verbose(&[("prompt", "Ελλάδα")]);
    assert_eq!(text(&unknown), text(&plain));
    assert!(unknown["warnings"].to_string().contains("Ελλάδα"), "{unknown}");
    // Requests that are decoded at the same time do not mix.
    std::thread::scope(|scope| {
        let of = |language| move || text(&verbose(&[("language", language)]));
        let running = ["hi", "ta", "en", "hi"].map(|language| (language, scope.spawn(of(language))));
        for (language, running) in running {
            assert_eq!(running.join().unwrap(), of(language)(), "{language}");
        }
    });
    for (fields, param) in [
        (&[("language", "klingon")][..], "language"),
        (&[("language", "en"), ("language", "hi")], "language"),
        (&[("languages[]", "x")], "languages[]"),
        (&[("boost_weight", "-1")], "boost_weight"),
        (&[("language", "en"), ("numbers", "roman")], "numbers"),
        (&[("numbers", "digits")], "numbers"),
        (&[("language", "ta"), ("fillers", "drop")], "fillers"),
    ] {
        let refused = service.transcribe(Some(&audio), fields);
        assert_eq!((refused.status, refused.error().1.as_deref()), (400, Some(param)));
    }
}

#[test]
fn texts_are_aligned_as_by_the_command() {
    const PATH: &str = "/v1/audio/alignments";
    let service = shared();
    let audio = recording("eval3_es.wav");
    let heard = service.transcribe(Some(&audio), &[]).json()["text"]
        .as_str()
        .unwrap()
        .to_owned();
    let words: Vec<&str> = heard.split_whitespace().collect();
    let lines: Vec<String> = words.chunks(3).map(|line| line.join(" ")).collect();
    assert!(lines.len() > 1, "{heard}");
    let recognizer = Recognizer::load(&data("configs/models/small.nemo"), DType::F32, &Device::Cpu).unwrap();
    let samples = flow_audio::decode::decode(&audio, 100.0).unwrap();
    let recognition = TranscribeSettings::new(Vec::new(), "").recognition();
    let found = recognizer.align(&samples, &lines, &recognition, &AlignmentSettings::default(), &|| false);
    let found = found.unwrap().unwrap();
    let text = lines.join("\n");
    let answer = service.send(PATH, Some(&audio), &[("text", &text)]);
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let document = answer.json();
    assert_eq!(document["segments"], json!(found.segments));
    assert_eq!(document["alignment"], found.report());
    assert_eq!(document["metadata"]["source_file"], "talk.wav");

    let transcript = recognizer.aligned_transcript(&found, "talk.wav", samples.len() as u64);
    let srt = String::from_utf8(Format::Srt.write(&transcript, &LineLimits::default()).unwrap()).unwrap();
    let again = service.send(
        PATH,
        Some(&audio),
        &[("subtitles", &srt), ("response_format", "srt"), ("model", "small")],
    );
    assert_eq!((again.status, again.text), (200, srt));
    for (file, fields, code, param) in [
        (&audio[..], &[][..], "missing_required_parameter", "text"),
        (
            &audio,
            &[("text", "a"), ("subtitles", "b")],
            "invalid_value",
            "subtitles",
        ),
        (&audio, &[("text", "a"), ("text", "b")], "duplicate_parameter", "text"),
        (
            &audio,
            &[("text", "a"), ("response_format", "parquet")],
            "invalid_value",
            "response_format",
        ),
        (&audio, &[("text", "a"), ("delay", "NaN")], "invalid_value", "delay"),
        (&audio, &[("text", "a"), ("model", "large")], "model_not_found", "model"),
        (&audio, &[("text", "Ελλάδα")], "unknown_letters", "text"),
        (&audio, &[("text", &"a ".repeat(100_000))], "text_too_long", "text"),
        (b"no recording", &[("text", "a")], "unsupported_format", "file"),
        (b"", &[("text", "a")], "empty_file", "file"),
    ] {
        let refused = service.send(PATH, Some(file), fields);
        let (found, of) = refused.error();
        assert_eq!((&*found, of.as_deref()), (code, Some(param)), "{}", refused.text);
    }
    let other = service.send(PATH, Some(&audio), &[("text", "a"), ("language", "en")]);
    assert_eq!(other.error().0, "unknown_parameter");
}

/// The text that tokens are together, by their bytes and by their texts.
fn joined(logprobs: &Value) -> String {
    let tokens = logprobs.as_array().unwrap();
    let bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| serde_json::from_value::<Vec<u8>>(token["bytes"].clone()).unwrap())
        .collect();
    let texts: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(texts.as_bytes(), bytes);
    texts
}

#[test]
fn log_probabilities_are_those_of_the_tokens_of_the_text() {
    let service = shared();
    for (audio, diarize) in [
        (recording("eval3_es.wav"), false),
        (
            std::fs::read(data("tests/data/golden/speakers/conv2.flac")).unwrap(),
            true,
        ),
        (crate::service::silence(), false),
    ] {
        let engine = expected(&audio, diarize);
        let of_engine: Vec<f64> = engine.tokens.iter().flatten().map(|token| token.logprob).collect();
        let diarized = if diarize { "true" } else { "false" };
        let fields = [("include[]", "logprobs"), ("diarize", diarized)];
        let whole = service.transcribe(Some(&audio), &fields).json();
        let text = &engine.transcript.text;
        assert_eq!(
            (whole["text"].as_str(), &joined(&whole["logprobs"])),
            (Some(text.as_str()), text)
        );
        let found: Vec<f64> = whole["logprobs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|token| token["logprob"].as_f64().unwrap())
            .collect();
        assert_eq!(found.len(), of_engine.len());
        for (found, of_engine) in found.iter().zip(&of_engine) {
            // To what rounding may do where a matrix product depends on how many rows it has.
            assert!(*found <= 0.0 && (found - of_engine).abs() < 1e-2, "{found} {of_engine}");
        }

        let streamed = service.transcribe(Some(&audio), &[fields[0], fields[1], ("stream", "true")]);
        let events = events(&streamed);
        let (done, deltas) = events.split_last().unwrap();
        assert_eq!(&joined(&done["logprobs"]), text);
        let mut told = Vec::new();
        for delta in deltas {
            assert_eq!(joined(&delta["logprobs"]), delta["delta"].as_str().unwrap());
            told.extend(delta["logprobs"].as_array().unwrap().clone());
        }
        assert_eq!(Value::Array(told), done["logprobs"]);
        // Nobody gets them who does not ask.
        assert_eq!(service.transcribe(Some(&audio), &[]).json().get("logprobs"), None);
    }
}

#[test]
fn models_and_paths_are_told() {
    let service = shared();
    let models = service.get("/v1/models").json();
    assert_eq!(models["object"], "list");
    assert_eq!(models["data"][0]["id"], "small");
    assert_eq!(models["data"][0]["object"], "model");
    assert_eq!(models["data"][0]["loaded"], true);
    assert_eq!(service.get("/v1/models/small").json(), models["data"][0]);
    let unknown = service.get("/v1/models/openai/whisper-1");
    assert_eq!((unknown.status, unknown.error().0.as_str()), (404, "model_not_found"));
    assert_eq!(
        service.get("/version").json(),
        json!({"name": "flow", "version": "1.2.3"})
    );
    assert_eq!(service.get("/health").json(), json!({"status": "ok"}));
    assert_eq!(service.get("/v1/health/ready").json()["status"], "ready");
    assert_eq!(service.get("/v1/health/live").json()["object"], "health.response");

    let document = service.get("/openapi.json").json();
    let paths = document["paths"].as_object().unwrap();
    assert_eq!(paths.len(), ENDPOINTS.len());
    for (path, operations) in paths {
        let path = path.replace("{id}", "small");
        // These have tests of their own.
        if path.starts_with("/v1/jobs") {
            let none = service.get(&path);
            assert_eq!((none.status, none.error().0.as_str()), (404, "no_jobs"), "{path}");
            continue;
        }
        if operations.get("get").is_some() {
            assert_eq!(service.get(&path).status, 200, "{path}");
            let wrong = service.post(&path, "text/plain", b"", &[]);
            assert_eq!(
                (wrong.status, wrong.error().0.as_str()),
                (405, "method_not_allowed"),
                "{path}"
            );
        } else {
            let answer = service.post(&path, "text/plain", b"", &[]);
            assert!(
                matches!(answer.error().0.as_str(), "no_form" | "translation_not_supported"),
                "{path}"
            );
            assert_eq!(service.get(&path).status, 405, "{path}");
        }
    }
    for path in ["/", "/page-transcribe.js", "/v1/realtime"] {
        let wrong = service.post(path, "text/plain", b"", &[]);
        assert_eq!(
            (wrong.status, wrong.error().0.as_str()),
            (405, "method_not_allowed"),
            "{path}"
        );
    }
    let no_text = service.get("/v1/models/%ff");
    assert_eq!((no_text.status, no_text.error().0.as_str()), (404, "model_not_found"));
    let nothing = service.get("/v1/chat/completions");
    assert_eq!((nothing.status, nothing.error().0.as_str()), (404, "unknown_url"));
    for answer in [nothing, service.get("/health")] {
        assert!(answer.header("x-request-id").unwrap().starts_with("req_"));
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
    }
}

#[test]
fn metrics_parse() {
    let service = shared();
    let audio = recording("eval0_en-us.wav");
    assert_eq!(service.transcribe(Some(&audio), &[]).status, 200);
    for path in ["/metrics", "/v1/metrics"] {
        let answer = service.get(path);
        assert!(
            answer
                .header("content-type")
                .unwrap()
                .starts_with("application/openmetrics-text")
        );
        assert!(answer.text.ends_with("# EOF\n"));
        for line in answer.text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.starts_with("flow_"), "{line}");
            value.parse::<f64>().unwrap_or_else(|_| panic!("{line}"));
        }
    }
    assert_eq!(service.get("/health").status, 200);
    for name in [
        "flow_http_responses_total{method=\"GET\",route=\"/health\",status=\"200\"}",
        "flow_http_responses_total{method=\"POST\",route=\"/v1/audio/transcriptions\",status=\"200\"}",
        "flow_queue_seconds_count",
        "flow_decode_seconds_count",
        "flow_request_seconds_count",
        "flow_audio_seconds_count",
        "flow_batch_windows_count",
        "flow_transcriptions_total{outcome=\"done\"}",
        "flow_loaded_models",
        "flow_connections",
        "flow_ready",
    ] {
        // The engine may count a request after it was answered.
        wait(|| service.metric(name) >= 1.0);
    }
}

/// 16 kHz, mono, 16 bits, as a data URL.
fn data_url(samples: &[f32]) -> String {
    let mut wav = silence()[..44].to_vec();
    let length = u32::try_from(samples.len() * 2).unwrap();
    wav[4..8].copy_from_slice(&(length + 36).to_le_bytes());
    wav[40..44].copy_from_slice(&length.to_le_bytes());
    for sample in samples {
        wav.extend_from_slice(&((sample * 32_767.0) as i16).to_le_bytes());
    }
    format!("data:audio/wav;base64,{}", STANDARD.encode(wav))
}

#[test]
fn a_request_names_its_speakers_and_their_number() {
    let service = shared();
    let path = data("tests/data/golden/speakers/conv2.flac");
    let audio = std::fs::read(&path).unwrap();
    let samples = flow_audio::samples::samples(&Storage::default(), &path, 600.0)
        .unwrap()
        .unwrap();
    let with = |fields: &[(&str, &str)]| {
        let answer = service.transcribe(
            Some(&audio),
            &[&[("response_format", "diarized_json")][..], fields].concat(),
        );
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.json()["segments"].as_array().unwrap().clone()
    };
    let unnamed = with(&[]);
    let length = |segment: &Value| segment["end"].as_f64().unwrap() - segment["start"].as_f64().unwrap();
    let longest = unnamed.iter().max_by(|a, b| length(a).total_cmp(&length(b))).unwrap();
    let speaker = longest["speaker"].as_str().unwrap();
    let at = |name: &str| (longest[name].as_f64().unwrap() * 16_000.0) as usize;
    let reference = &*data_url(&samples[at("start")..at("end")]);
    let named = with(&[
        ("known_speaker_names[]", "Ada Lovelace"),
        ("known_speaker_references[]", reference),
    ]);
    assert_eq!(named.len(), unnamed.len());
    assert!(unnamed.iter().any(|segment| segment["speaker"] != speaker));
    for (named, unnamed) in named.iter().zip(&unnamed) {
        assert_eq!(
            named["speaker"] == "Ada Lovelace",
            unnamed["speaker"] == speaker,
            "{named} {unnamed}"
        );
        assert_eq!(named["text"], unnamed["text"]);
    }
    let one = with(&[("num_speakers", "1")]);
    assert!(
        one.iter().all(|segment| segment["speaker"] == one[0]["speaker"]),
        "{one:?}"
    );

    let silent = &*data_url(&vec![0.0; 32_000]);
    let long = &*data_url(&vec![0.0; 61 * 16_000]);
    for (fields, param) in [
        (&[("num_speakers", "0")][..], "num_speakers"),
        (&[("max_speakers", "2.5")], "max_speakers"),
        (&[("min_speakers", "3"), ("max_speakers", "2")], "max_speakers"),
        (&[("num_speakers", "2"), ("num_speakers", "2")], "num_speakers"),
        (&[("known_speaker_names[]", "Ada")], "known_speaker_references[]"),
        (&[("known_speaker_names[]", "SPEAKER_00")], "known_speaker_names[]"),
        (&[("known_speaker_names[]", "UNKNOWN")], "known_speaker_names[]"),
        (
            &[("known_speaker_names[]", "a"), ("known_speaker_names[]", "a")],
            "known_speaker_names[]",
        ),
        (
            &[("known_speaker_references[]", "https://a/b.wav")],
            "known_speaker_references[]",
        ),
        (
            &[("known_speaker_names[]", "a"), ("known_speaker_references[]", silent)],
            "known_speaker_references[]",
        ),
        (
            &[("known_speaker_names[]", "a"), ("known_speaker_references[]", long)],
            "known_speaker_references[]",
        ),
        (
            &[
                ("known_speaker_names[]", "a"),
                ("known_speaker_references[]", "data:;base64,AQID"),
            ],
            "known_speaker_references[]",
        ),
    ] {
        let refused = service.transcribe(
            Some(&audio),
            &[&[("response_format", "diarized_json")][..], fields].concat(),
        );
        assert_eq!(
            (refused.status, refused.error().1.as_deref()),
            (400, Some(param)),
            "{}",
            refused.text
        );
    }
    let without = service.transcribe(Some(&audio), &[("num_speakers", "2")]);
    assert_eq!(without.error().1.as_deref(), Some("num_speakers"));
}

#[test]
fn channels_apart_are_one_transcript_in_the_order_of_time() {
    let service = shared();
    let (left, right) = (recording("eval3_es.wav"), recording("eval1_de.wav"));
    // Of the left one's length: the right one speaks at the beginning.
    let mut stereo = left[..44].to_vec();
    let frames = (left.len() - 44) / 2;
    let length = u32::try_from(frames * 4).unwrap();
    stereo[4..8].copy_from_slice(&(length + 36).to_le_bytes());
    stereo[22..24].copy_from_slice(&2_u16.to_le_bytes());
    stereo[28..32].copy_from_slice(&64_000_u32.to_le_bytes());
    stereo[32..34].copy_from_slice(&4_u16.to_le_bytes());
    stereo[40..44].copy_from_slice(&length.to_le_bytes());
    for frame in 0..frames {
        let of = |wav: &[u8]| wav.get(44 + frame * 2..46 + frame * 2).unwrap_or(&[0, 0]).to_vec();
        stereo.extend(of(&left));
        stereo.extend(of(&right));
    }
    let mut padded = right.clone();
    padded.resize(left.len(), 0);
    padded[4..8].copy_from_slice(&left[4..8]);
    padded[40..44].copy_from_slice(&left[40..44]);
    let verbose = |audio: &[u8], fields: &[(&str, &str)]| {
        let fields = [&[("response_format", "verbose_json")][..], fields].concat();
        let answer = service.transcribe(Some(audio), &fields);
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.json()
    };
    let split = verbose(&stereo, &[("channels", "split")]);
    let segments = split["segments"].as_array().unwrap();
    let starts: Vec<f64> = segments
        .iter()
        .map(|segment| segment["start"].as_f64().unwrap())
        .collect();
    assert!(starts.is_sorted(), "{starts:?}");
    for (speaker, alone) in [("CHANNEL_1", &left), ("CHANNEL_2", &padded)] {
        let of_channel = segments.iter().filter(|segment| segment["speaker"] == speaker);
        let texts: Vec<&str> = of_channel.map(|segment| segment["text"].as_str().unwrap()).collect();
        let alone = verbose(alone, &[]);
        assert!(!texts.is_empty());
        assert_eq!(texts.join(" "), alone["text"].as_str().unwrap(), "{speaker}");
    }
    let text = service.transcribe(Some(&stereo), &[("channels", "split"), ("response_format", "text")]);
    assert!(
        text.text.contains("[CHANNEL_1]: ") && text.text.contains("[CHANNEL_2]: "),
        "{}",
        text.text
    );
    // One of one channel has one; who speaks is not found out by voices.
    let mono = service
        .transcribe(
            Some(&left),
            &[("channels", "split"), ("response_format", "diarized_json")],
        )
        .json();
    assert!(
        mono["segments"]
            .as_array()
            .unwrap()
            .iter()
            .all(|segment| segment["speaker"] == "CHANNEL_1"),
        "{mono}"
    );
    assert_eq!(mono["text"], verbose(&left, &[])["text"]);
    for (fields, param) in [
        (&[("channels", "left")][..], "channels"),
        (&[("channels", "split"), ("diarize", "true")], "channels"),
        (&[("channels", "split"), ("stream", "true")], "stream"),
        (&[("channels", "split"), ("num_speakers", "2")], "num_speakers"),
    ] {
        let refused = service.transcribe(Some(&stereo), fields);
        assert_eq!(
            (refused.status, refused.error().1.as_deref()),
            (400, Some(param)),
            "{}",
            refused.text
        );
    }
    let broken = service.transcribe(Some(b"no recording"), &[("channels", "split")]);
    assert_eq!((broken.status, broken.error().1.as_deref()), (400, Some("file")));
}
