use flow_kind::RejectClass;
use proptest::prelude::*;

use super::*;

fn rules() -> LineRules {
    LineRules {
        places: Places {
            folder: "/m".into(),
            ..Places::default()
        },
        source: "manifest".into(),
        ..LineRules::default()
    }
}

fn row(line: &str) -> Result<ManifestRow, Refusal> {
    row_of(line, 1, &rules(), "stem", |_| None, false)
}

#[test]
fn a_line_becomes_a_row() {
    let read =
        row(r#"{"audio_filepath": "a/b.wav", "duration": 1.5, "text": "x", "lang": "hi", "offset": 2, "y": [1]}"#)
            .unwrap();
    assert_eq!((read.segment_id.as_str(), read.shard_id.as_str()), ("b@2", "stem"));
    assert_eq!(
        (read.duration, read.start, read.lang.as_str()),
        (Some(1.5), Some(2.0), "hi")
    );
    assert_eq!(read.wanted.files, [Path::new("/m/a/b.wav"), Path::new("a/b.wav")]);

    let marked = |mark: &str| {
        row(&format!(
            r#"{{"audio_filepath": "a", "text": "x", "duration": 1, "_skipme": {mark}}}"#
        ))
    };
    let refusal = marked("true").unwrap_err();
    assert_eq!((refusal.class, refusal.reason), (RejectClass::Rule, "skipme"));
    for mark in ["false", "0", "null", "\"\""] {
        assert!(marked(mark).is_ok(), "{mark}");
    }
    assert!(marked("1").is_err() && marked("\"yes\"").is_err());

    let ours = row(
        r#"{"tar_path": "s/hi/hi_1/hi_1.tar", "tar_member_name": "./b.flac", "duration": 1, "text": "<|hi|> x", "segment_id": "b", "shard_id": "hi_1", "source": "v"}"#,
    );
    let ours = ours.unwrap();
    assert_eq!((ours.lang.as_str(), ours.source.as_str()), ("hi", "v"));
    assert_eq!(ours.wanted.files, [Path::new("s/hi/hi_1/b.flac")]);
    assert_eq!(ours.wanted.member, Some(("s/hi/hi_1/hi_1.tar".into(), "b.flac".into())));
}

#[test]
fn numbers_that_json_does_not_have_lose_no_row_but_count_where_they_are_needed() {
    let read = row(r#"{"audio_filepath": "a", "duration": 1, "text": "x", "snr": NaN, "y": [Infinity]}"#).unwrap();
    assert_eq!(read.extra.as_deref(), Some(r#"{"snr":null,"y":[null]}"#));
    let read = row(r#"{"audio_filepath": "a", "duration": NaN, "offset": -Infinity, "text": "x"}"#).unwrap();
    assert!(
        read.duration.unwrap().is_nan() && read.start == Some(f64::NEG_INFINITY),
        "{read:?}"
    );
}

#[test]
fn a_number_as_a_name_is_its_text() {
    let id = |id: &str| {
        let line = format!(r#"{{"audio_filepath": "a", "duration": 1, "text": "x", "segment_id": {id}}}"#);
        row(&line).unwrap().segment_id
    };
    for (written, read) in [
        ("17", "17"),
        ("12345678901234567890123", "12345678901234567890123"),
        ("\"b\"", "b"),
    ] {
        assert_eq!(id(written), read);
    }
    let of_hugging_face = row(r#"{"file_name": "a.wav", "text": "x", "segment_id": 7}"#).unwrap();
    assert_eq!(of_hugging_face.segment_id, "7");
}

#[test]
fn languages_are_found_in_their_order() {
    let lang = |rest: &str| {
        row(&format!(
            r#"{{"audio_filepath": "a", "duration": 1, "text": "<|ta|> x" {rest}}}"#
        ))
        .unwrap()
        .lang
    };
    assert_eq!(lang(r#", "target_lang": "en", "lang": "hi""#), "hi");
    assert_eq!(lang(r#", "target_lang": "en", "source_lang": "de""#), "en");
    assert_eq!(lang(r#", "lang": "", "source_lang": "de""#), "de");
    assert_eq!(lang(""), "ta");
}

#[test]
fn keys_that_a_setting_names_count_in_lines_that_have_them() {
    let settings = ReadSettings {
        columns: ["tongue=locale", "words=sentence", "clip=path"]
            .map(String::from)
            .to_vec(),
        ..ReadSettings::default()
    };
    let rules = LineRules {
        names: new_names(&settings),
        ..rules()
    };
    let row = |line: &str| row_of(line, 1, &rules, "stem", |_| None, false).unwrap();
    let named = row(r#"{"clip": "a.wav", "words": "said", "text": "raw", "tongue": "de", "target_lang": "en"}"#);
    assert_eq!(
        (named.text.as_str(), named.lang.as_str(), named.lang_field),
        ("said", "de", "lang")
    );
    assert_eq!(named.wanted.files[0], Path::new("/m/a.wav"));
    let usual = row(r#"{"audio_filepath": "b.wav", "text": "raw", "target_lang": "en", "lang": "hi", "duration": 1}"#);
    assert_eq!((usual.text.as_str(), usual.lang.as_str()), ("raw", "hi"));
    assert_eq!(usual.wanted.files[0], Path::new("/m/b.wav"));
}

#[test]
fn each_mistake_has_its_reason() {
    for (line, reason) in [
        ("", "bad_json"),
        ("{\"audio_filepath\": \"a\"", "bad_json"),
        ("[1]", "bad_json"),
        (r#"{"audio_filepath": "a", "duration": NaN "text": "x"}"#, "bad_json"),
        (
            r#"{"audio_filepath": "a", "duration": 1, "text": NaN}"#,
            "missing_field",
        ),
        (r#"{"duration": 1, "text": "x"}"#, "missing_field"),
        (r#"{"audio_filepath": "", "duration": 1, "text": "x"}"#, "missing_field"),
        (r#"{"audio_filepath": "a", "duration": 1}"#, "missing_field"),
        (
            r#"{"audio_filepath": "a", "duration": 1, "text": null}"#,
            "missing_field",
        ),
        (r#"{"audio_filepath": "a", "duration": 1, "text": 7}"#, "bad_type"),
        (r#"{"audio_filepath": "a", "duration": "1", "text": "x"}"#, "bad_type"),
        (r#"{"audio_filepath": 3, "duration": 1, "text": "x"}"#, "bad_type"),
        (
            r#"{"audio_filepath": "a", "duration": 1, "text": "x", "lang": ["hi"]}"#,
            "bad_type",
        ),
        (
            r#"{"tar_path": "a/b/c.tar", "tar_member_name": "../x", "duration": 1, "text": "x"}"#,
            "unsafe_name",
        ),
    ] {
        assert_eq!(row(line).unwrap_err().reason, reason, "{line}");
    }
}

proptest! {
    /// Durations come back to the bit, whatever is before and behind them.
    #[test]
    fn numbers_are_read_as_they_are_written(seconds in proptest::num::f64::NORMAL, text in ".{0,12}", last: bool) {
        let text = serde_json::to_string(&text).unwrap();
        let seconds_text = format!("{seconds:?}");
        let inner = r#""in": {"duration": 7}"#;
        let line = if last {
            format!(r#"{{"text": {text}, {inner}, "duration" : {seconds_text}}}"#)
        } else {
            format!(r#"{{"duration":{seconds_text}, {inner}, "text": {text}}}"#)
        };
        prop_assert_eq!(written_value(&line, "duration"), Some(seconds_text.as_str()));
        prop_assert_eq!(written_value(&line, "duration").unwrap().parse::<f64>().unwrap(), seconds);
    }

    #[test]
    fn hostile_lines_are_refused_or_read(line in r#"[{}\[\]":,a0-9.\\ détext]{0,60}"#) {
        let _ = row(&line);
        let _ = written_value(&line, "text");
    }
}
