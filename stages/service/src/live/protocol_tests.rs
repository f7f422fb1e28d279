use proptest::prelude::*;

use super::*;

fn update(session: Value) -> Result<SessionConfig, Refused> {
    let event = json!({"type": "session.update", "session": session}).to_string();
    match ClientEvent::parse(&event).1? {
        ClientEvent::Update { update, .. } => SessionConfig::default().updated(*update, &models(false)),
        other => panic!("{other:?}"),
    }
}

fn models(accept_any: bool) -> KnownModels {
    KnownModels {
        names: vec!["a".into(), "b".into()],
        accept_any,
    }
}

#[test]
fn both_forms_of_a_session_are_read_and_written() {
    let new = update(json!({"type": "transcription", "audio": {"input": {
        "format": {"type": "audio/pcm", "rate": 16_000},
        "noise_reduction": {"type": "near_field"},
        "transcription": {"model": "b", "language": "en", "prompt": ""},
        "turn_detection": {"type": "server_vad", "threshold": 0.25, "silence_duration_ms": 200, "create_response": true},
    }}, "include": [PARTIALS, SPEAKERS, LOGPROBS]}));
    let new = new.unwrap();
    assert_eq!(new.format, AudioFormat::Pcm { rate: 16_000 });
    assert_eq!(new.model.as_deref(), Some("b"));
    let rules = new.turn_detection.unwrap();
    assert_eq!(
        (rules.threshold, rules.prefix_padding_ms, rules.silence_duration_ms),
        (0.25, 300.0, 200.0)
    );
    assert!(new.partials && new.speakers && new.logprobs && !new.words);
    // What has no effect is not shown.
    let shown = new.to_json("sess_1", "a", 0, false);
    assert_eq!(shown["audio"]["input"].get("noise_reduction"), None);
    assert_eq!(shown["include"], json!([PARTIALS, SPEAKERS, LOGPROBS]));
    // What is said of a session can be said by a client.
    assert_eq!(update(new.to_json("sess_1", "a", 0, false)).unwrap(), new);

    let old = update(json!({
        "input_audio_format": "g711_alaw", "input_audio_transcription": {"model": "a"}, "turn_detection": null,
    }));
    let old = old.unwrap();
    assert_eq!((old.format, old.turn_detection), (AudioFormat::Alaw, None));
    assert_eq!(update(old.to_json("sess_1", "a", 0, true)).unwrap(), old);
    // What is not there stays.
    assert_eq!(update(json!({})).unwrap(), SessionConfig::default());
    assert_eq!(
        update(json!({"audio": {"input": {"turn_detection": null}}}))
            .unwrap()
            .turn_detection,
        None
    );
}

#[test]
fn options_of_requests_hold_in_sessions() {
    let transcription = |fields: Value| json!({"audio": {"input": {"transcription": fields}}});
    let first = update(transcription(json!({"language": "fr", "prompt": "Ada Lovelace"}))).unwrap();
    assert_eq!(first.options.decoding.languages, ["fr"]);
    assert_eq!(first.options.decoding.phrases, ["Ada Lovelace"]);
    let shown = first.to_json("sess_1", "a", 0, false)["audio"]["input"]["transcription"].clone();
    assert_eq!(shown, json!({"model": "a", "language": "fr", "prompt": "Ada Lovelace"}));
    // What is not there stays, and `null` takes away; in the older form, too.
    let event = json!({"type": "transcription_session.update", "session": {
        "input_audio_transcription": {"language": null, "phrases": ["Zürich"]}, "include": [SPEAKERS],
    }});
    let Ok(ClientEvent::Update { update: next, .. }) = ClientEvent::parse(&event.to_string()).1 else {
        panic!("{event}");
    };
    let second = first.updated(*next, &models(false)).unwrap();
    assert_eq!(second.options.decoding.languages, [""; 0]);
    assert_eq!(second.options.decoding.phrases, ["Zürich", "Ada Lovelace"]);
    let reference = json!({"known_speaker_names": ["Ann"], "known_speaker_references": ["data:;base64,AQ=="]});
    for (fields, param) in [
        (
            json!({"language": "klingon"}),
            "session.audio.input.transcription.language",
        ),
        (
            json!({"boost_weight": 1e9}),
            "session.audio.input.transcription.boost_weight",
        ),
        (
            json!({"num_speakers": 2}),
            "session.audio.input.transcription.num_speakers",
        ),
        (
            json!({"known_speaker_names": ["Ann"]}),
            "session.audio.input.transcription.known_speaker_references",
        ),
        (json!({"max_speakers": 2}), "session.include"),
        (reference, "session.include"),
    ] {
        let refused = update(transcription(fields.clone())).unwrap_err();
        assert_eq!(
            (refused.code, refused.param.as_deref()),
            ("invalid_value", Some(param)),
            "{fields}"
        );
    }
}

#[test]
fn wrong_values_are_named() {
    let refused = |session: Value| {
        let refused = update(session.clone()).expect_err(&session.to_string());
        (refused.code, refused.param.unwrap_or_default())
    };
    let input = |key: &str, value: Value| json!({"audio": {"input": {key: value}}});
    for (session, param) in [
        (json!({"type": "realtime"}), "session.type"),
        (json!("all"), "session"),
        (json!({"audio": {"input": 3}}), "session.audio.input"),
        (json!({"input_audio_format": "mp3"}), "session.input_audio_format"),
        (
            input("format", json!({"type": "audio/pcm", "rate": 11_025})),
            "session.audio.input.format.rate",
        ),
        (
            input("format", json!({"type": "audio/pcm", "rate": -1})),
            "session.audio.input.format.rate",
        ),
        (
            input("format", json!({"type": "audio/pcmu", "rate": 24_000})),
            "session.audio.input.format.rate",
        ),
        (
            input("format", json!({"type": "audio/mp3"})),
            "session.audio.input.format.type",
        ),
        (
            input("turn_detection", json!({"type": "semantic_vad"})),
            "session.audio.input.turn_detection.type",
        ),
        (
            input("turn_detection", json!({"threshold": 1.5})),
            "session.audio.input.turn_detection.threshold",
        ),
        (
            json!({"turn_detection": {"silence_duration_ms": 1e9}}),
            "session.turn_detection.silence_duration_ms",
        ),
        (json!({"include": ["everything"]}), "session.include"),
    ] {
        assert_eq!(refused(session), ("invalid_value", param.to_owned()));
    }
    let unknown = refused(input("transcription", json!({"model": "whisper-1"})));
    assert_eq!(
        unknown,
        ("model_not_found", "session.audio.input.transcription.model".to_owned())
    );
    let mut config = SessionConfig {
        model: Some("b".into()),
        ..SessionConfig::default()
    };
    assert_eq!(
        config.set_model(Some("whisper-1".into()), &models(true), "model"),
        Ok(())
    );
    assert_eq!(config.model, None);
}

#[test]
fn messages_name_the_field_and_what_it_may_be() {
    let input = |key: &str, value: Value| json!({"audio": {"input": {key: value}}});
    for (session, message) in [
        (
            input("format", json!({"type": "audio/pcm", "rate": -1})),
            "`session.audio.input.format.rate` is -1; it must be one of 8000, 16000, 22050, 24000, 32000, 44100, 48000, 88200, \
             96000, 192000",
        ),
        (
            input("format", json!({"type": "audio/pcmu", "rate": 24_000})),
            "`session.audio.input.format.rate` is 24000; it must be one of 8000",
        ),
        (
            input("format", json!(3)),
            "`session.audio.input.format` is 3; it must be an object",
        ),
        (
            input("transcription", json!({"latency_ms": "low"})),
            "`session.audio.input.transcription.latency_ms` is \"low\"; it must be a number from 10 to 60000",
        ),
        (
            json!({"input_audio_transcription": {"latency_ms": 5}}),
            "`session.input_audio_transcription.latency_ms` is 5; it must be a number from 10 to 60000",
        ),
        (
            json!({"turn_detection": {"threshold": 1.5}}),
            "`session.turn_detection.threshold` is 1.5; it must be a number from 0 to 1",
        ),
        (
            json!({"turn_detection": {"threshold": [0.5]}}),
            "`session.turn_detection.threshold` is [0.5]; it must be a number from 0 to 1",
        ),
        (
            json!({"include": "all"}),
            "`session.include` is \"all\"; it must be a list of texts",
        ),
        (json!("all"), "`session` is \"all\"; it must be an object"),
    ] {
        assert_eq!(update(session.clone()).unwrap_err().message, message, "{session}");
    }
}

#[test]
fn fields_that_are_not_known_are_refused() {
    let input =
        |key: &str, value: Value| json!({"type": "session.update", "session": {"audio": {"input": {key: value}}}});
    for (event, param) in [
        (
            json!({"type": "session.update", "session": {"voice": "alloy"}}),
            "session.voice",
        ),
        (
            json!({"type": "session.update", "session": {"audio": {"output": {}}}}),
            "session.audio.output",
        ),
        (input("volume", json!(3)), "session.audio.input.volume"),
        (input("format", json!({"bits": 16})), "session.audio.input.format.bits"),
        (
            input("transcription", json!({"frases": ["Zürich"]})),
            "session.audio.input.transcription.frases",
        ),
        (
            input("transcription", json!({"phrases[]": ["Zürich"]})),
            "session.audio.input.transcription.phrases[]",
        ),
        (
            input("turn_detection", json!({"silence": null})),
            "session.audio.input.turn_detection.silence",
        ),
        (
            json!({"type": "transcription_session.update", "session": {"turn_detection": {"treshold": 0.5}}}),
            "session.turn_detection.treshold",
        ),
        (
            json!({"type": "transcription_session.update", "session": {"input_audio_transcription": {"a": 1}}}),
            "session.input_audio_transcription.a",
        ),
        (json!({"type": "session.update", "session": {}, "sesion": {}}), "sesion"),
        (
            json!({"type": "input_audio_buffer.append", "audio": "AAEC", "rate": 8000}),
            "rate",
        ),
        (json!({"type": "input_audio_buffer.commit", "final": true}), "final"),
    ] {
        let refused = ClientEvent::parse(&event.to_string()).1.expect_err(param);
        assert_eq!(
            (refused.code, refused.param.as_deref()),
            ("unknown_parameter", Some(param))
        );
        assert!(
            refused.message.contains(param) && refused.message.contains("known here are"),
            "{}",
            refused.message
        );
    }
}

#[test]
fn fields_without_effect_are_told() {
    let ignored = |event: Value| match ClientEvent::parse(&event.to_string()).1 {
        Ok(ClientEvent::Update { ignored, .. }) => ignored,
        other => panic!("{other:?}"),
    };
    let present = json!({"type": "session.update", "session": {"audio": {"input": {
        "noise_reduction": {"type": "near_field"},
        "turn_detection": {"type": "server_vad", "create_response": true, "idle_timeout_ms": null},
    }}}});
    assert_eq!(
        ignored(present),
        [
            "session.audio.input.noise_reduction",
            "session.audio.input.turn_detection.create_response"
        ]
    );
    let older = json!({"type": "transcription_session.update", "session": {
        "input_audio_noise_reduction": {"type": "far_field"}, "turn_detection": {"interrupt_response": false},
    }});
    assert_eq!(
        ignored(older),
        [
            "session.input_audio_noise_reduction",
            "session.turn_detection.interrupt_response"
        ]
    );
    assert_eq!(
        ignored(json!({"type": "session.update", "session": {"id": "sess_1"}})),
        [""; 0]
    );
}

#[test]
fn every_option_of_a_session_is_known() {
    for name in TRANSCRIPTION_FIELDS {
        assert!(
            ["model", "latency_ms"].contains(name) || Options::field(name).is_some(),
            "{name}"
        );
    }
    assert_eq!(TRANSCRIPTION_FIELDS.len(), 2 + Options::FIELDS);
}

#[test]
fn events_are_read_or_refused_with_their_id() {
    let parse = |text: &str| ClientEvent::parse(text);
    let (id, event) = parse(r#"{"type": "input_audio_buffer.append", "event_id": "e1", "audio": "AAEC"}"#);
    assert_eq!(id.as_deref(), Some("e1"));
    assert!(matches!(event, Ok(ClientEvent::Append(bytes)) if bytes == [0, 1, 2]));
    assert!(matches!(
        parse(r#"{"type": "input_audio_buffer.commit"}"#).1,
        Ok(ClientEvent::Commit)
    ));
    assert!(matches!(
        parse(r#"{"type": "input_audio_buffer.clear"}"#).1,
        Ok(ClientEvent::Clear)
    ));
    let older = parse(r#"{"type": "transcription_session.update", "session": {}}"#).1;
    assert!(matches!(older, Ok(ClientEvent::Update { older: true, .. })));
    for (text, code) in [
        ("", "invalid_json"),
        ("[1]", "missing_required_parameter"),
        (r#"{"type": 3}"#, "missing_required_parameter"),
        (r#"{"type": "response.create", "event_id": "e2"}"#, "unknown_event"),
        (r#"{"type": "input_audio_buffer.append"}"#, "invalid_value"),
        (
            r#"{"type": "input_audio_buffer.append", "audio": "?"}"#,
            "invalid_value",
        ),
        (r#"{"type": "session.update"}"#, "invalid_value"),
    ] {
        let (id, refused) = parse(text);
        assert_eq!(refused.unwrap_err().code, code, "{text}");
        assert_eq!(id.is_some(), text.contains("e2"));
    }
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in ".{0,200}", kind in "[a-z_.]{0,30}") {
        let _ = ClientEvent::parse(&text);
        let _ = ClientEvent::parse(&json!({"type": kind, "session": text, "audio": text}).to_string());
        let _ = ClientEvent::parse(&json!({"type": "session.update", "session": {"include": text}}).to_string());
    }
}
