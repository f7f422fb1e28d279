//! Transcripts without a word, and tags that cannot be meant.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema};
use flow_kind::{Artifact, Partition};
use flow_model::tokenizer::Tokenizer;
use flow_training::text_faults::TextFaults;

const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/tokenizers/mini.model");

/// Rows of a language and a text, which may be null.
fn counted(rows: &[(&str, Option<&str>)]) -> TextFaults {
    let tokenizer = Tokenizer::load(Path::new(TOKENIZER)).expect("a tokenizer");
    let schema = Arc::new(Schema::new(vec![
        Field::new("_row", DataType::UInt32, false),
        Field::new("segment_id", DataType::Utf8, false),
        Field::new("text", DataType::Utf8, true),
        Field::new("lang", DataType::Utf8, false),
    ]));
    let batch = RecordBatch::try_new(
        schema.clone(),
        vec![
            Arc::new(UInt32Array::from_iter_values(0..rows.len() as u32)),
            Arc::new(StringArray::from_iter_values(
                (0..rows.len()).map(|row| format!("seg-{row}")),
            )),
            Arc::new(StringArray::from_iter(rows.iter().map(|(_, text)| *text))),
            Arc::new(StringArray::from_iter_values(rows.iter().map(|(lang, _)| *lang))),
        ],
    )
    .expect("rows");
    let artifact = Artifact::in_memory(schema, vec![(Partition::new("p/0"), vec![batch])]).expect("an artifact");
    TextFaults::count(&artifact, &tokenizer).expect("counted")
}

#[test]
fn empty_texts_are_counted_and_told_above_a_share() {
    let mut rows = vec![("en", Some("<|en|> one")); 96];
    rows.extend([
        ("en", None),
        ("en", Some("")),
        ("en", Some(" \t")),
        ("hi", Some("<|hi|> ")),
    ]);
    let found = counted(&rows);
    assert_eq!((found.texts, found.empty.texts), (100, 4));
    assert_eq!(found.empty.examples, ["seg-96", "seg-97", "seg-98", "seg-99"]);
    let warning = found.empty_warning(0.01).expect("a warning");
    assert!(
        warning.contains("4 of 100 transcripts (4.0 %)")
            && warning.contains("seg-96")
            && warning.contains("wrong column"),
        "{warning}"
    );
    assert_eq!(found.empty_warning(0.04), None);
    assert_eq!(found.figures().len(), 1);
    assert_eq!(found.figures()[0]["affected"], 4);
}

#[test]
fn wrong_tags_are_counted_and_told() {
    let found = counted(&[
        ("hi", Some("<|hi|> one")),
        ("hi", Some("<|null|> one <|null|> <|null|>")),
        ("hi", Some("<|xx|> one")),
        ("en-US", Some("<|en|> one")),
        ("en", Some("<|hi|> one")),
        // No tags, or none that names the language of the text.
        ("en", Some("one <| two |> <|> <||> <|h\u{fc}|>")),
        ("en", Some("one <|hi|> two")),
    ]);
    assert_eq!(found.wrong_tags, 3);
    let unknown: Vec<(&str, u64)> = found
        .unknown_tags
        .iter()
        .map(|(tag, of)| (tag.as_str(), of.texts))
        .collect();
    assert_eq!(unknown, [("null", 1), ("xx", 1)]);
    let others: Vec<_> = found.other_languages.keys().cloned().collect();
    let pair = |tag: &str, lang: &str| (tag.to_string(), lang.to_string());
    assert_eq!(others, [pair("hi", "en"), pair("xx", "hi")]);
    let warning = found.tag_warning().expect("a warning");
    for part in [
        "3 of 7",
        "<|null|> in 1 (as seg-1)",
        "<|hi|> where `lang` is en in 1 (as seg-4)",
    ] {
        assert!(warning.contains(part), "{part}: {warning}");
    }
    let figures = found.figures();
    assert_eq!(figures.len(), 1);
    assert_eq!(
        (&figures[0]["kind"], &figures[0]["affected"]),
        (&"wrong_tags".into(), &3.into())
    );
}

#[test]
fn nothing_is_said_of_sound_texts() {
    let found = counted(&[("en", Some("<|en|> one")), ("hi", Some("two"))]);
    assert_eq!((found.empty_warning(0.0), found.tag_warning()), (None, None));
    assert!(found.figures().is_empty());
}
