//! Letters of transcripts that the tokenizer does not know.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema};
use flow_kind::{Artifact, Partition};
use flow_model::tokenizer::Tokenizer;
use flow_training::unknown_letters::UnknownLetters;

const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/tokenizers/mini.model");

/// Rows of a language (none where it is empty) and a text.
fn counted(tokenizer: &Tokenizer, rows: &[(&str, &str)]) -> UnknownLetters {
    let schema = Arc::new(Schema::new(vec![
        Field::new("_row", DataType::UInt32, false),
        Field::new("segment_id", DataType::Utf8, false),
        Field::new("text", DataType::Utf8, true),
        Field::new("lang", DataType::Utf8, true),
    ]));
    let some = |text: &&str| (!text.is_empty()).then(|| text.to_string());
    let batch = RecordBatch::try_new(
        schema.clone(),
        vec![
            Arc::new(UInt32Array::from_iter_values(0..rows.len() as u32)),
            Arc::new(StringArray::from_iter_values(
                (0..rows.len()).map(|row| format!("seg-{row}")),
            )),
            Arc::new(StringArray::from_iter(rows.iter().map(|(_, text)| some(text)))),
            Arc::new(StringArray::from_iter(rows.iter().map(|(lang, _)| some(lang)))),
        ],
    )
    .expect("rows");
    let artifact = Artifact::in_memory(schema, vec![(Partition::new("p/0"), vec![batch])]).expect("an artifact");
    UnknownLetters::count(&artifact, tokenizer).expect("counted")
}

#[test]
fn letters_are_counted_by_language_and_a_warning_names_them() {
    let tokenizer = Tokenizer::load(Path::new(TOKENIZER)).expect("a tokenizer");
    assert!(tokenizer.unknown_letters("one two three").is_empty());
    assert_eq!(tokenizer.unknown_letters("one ßtwo ßß"), ['ß', 'ß', 'ß']);
    let mut rows = vec![("en", "one two three"); 98];
    rows.extend([
        ("de", "one ßtwo ßß"),
        ("de", "one ☃ two"),
        ("de", "one"),
        ("de", ""),
        ("en", "ß"),
        ("", "two ☃"),
    ]);
    let found = counted(&tokenizer, &rows);
    assert_eq!(found.affected(), 4);
    let german = &found.languages["de"];
    assert_eq!((german.texts, german.affected, german.share()), (4, 2, 0.5));
    let sharp = &german.letters[&'ß'];
    assert_eq!((sharp.count, sharp.texts, sharp.example.as_str()), (3, 1, "seg-98"));
    assert_eq!(found.languages["en"].letters[&'ß'].example, "seg-102");
    assert!(found.languages[""].letters.contains_key(&'☃'));

    // One of 99 is more than a percent, and not more than two.
    let warning = found.warning(0.01).expect("a warning");
    for part in [
        "de 2 of 4",
        "☃ (U+2603) in 1",
        "en 1 of 99 (ß (U+00DF) in 1)",
        "no language 1 of 1",
    ] {
        assert!(warning.contains(part), "{part}: {warning}");
    }
    let fewer = found.warning(0.02).expect("a warning");
    assert!(fewer.contains("de 2 of 4") && !fewer.contains("en 1 of"), "{fewer}");
    assert_eq!(found.warning(1.0), None);

    let table = found.table().expect("a table");
    let rows = table["table"]["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 4);
    assert_eq!(
        rows[2],
        serde_json::json!(["de", "☃ (U+2603)", 1, 1, "25.00 %", "seg-99"]),
        "{table}"
    );
    let figures = found.figures();
    assert_eq!((&figures["texts"], &figures["affected"]), (&104.into(), &4.into()));
    assert_eq!(figures["languages"]["de"]["letters"]["ß"], 3);
}

#[test]
fn nothing_is_said_where_all_letters_are_known() {
    let tokenizer = Tokenizer::load(Path::new(TOKENIZER)).expect("a tokenizer");
    let found = counted(&tokenizer, &[("en", "one two"), ("en", "")]);
    assert_eq!((found.affected(), found.warning(0.0), found.table()), (0, None, None));
}
