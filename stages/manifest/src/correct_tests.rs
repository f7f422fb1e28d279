use flow_runtime::harness::{Harness, Output};

use super::*;

/// `what`, segment, new text, bad.
type Correction<'a> = (Option<&'a str>, Option<&'a str>, Option<&'a str>, Option<bool>);

fn corrections(rows: &[Correction<'_>]) -> RecordBatch {
    let texts = |of: fn(&Correction<'_>) -> Option<String>| -> ArrayRef {
        Arc::new(rows.iter().map(of).collect::<StringArray>())
    };
    let columns: [(&str, ArrayRef); 5] = [
        (ROW, Arc::new(UInt32Array::from_iter_values(0..rows.len() as u32))),
        ("what", texts(|row| row.0.map(str::to_string))),
        ("segment_id", texts(|row| row.1.map(str::to_string))),
        ("new_text", texts(|row| row.2.map(str::to_string))),
        ("bad", Arc::new(rows.iter().map(|row| row.3).collect::<BooleanArray>())),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, name != ROW))).unwrap()
}

/// Rows of segments in recordings, with a text between segment and place.
fn rows(rows: &[(&str, &str, &str)]) -> RecordBatch {
    let texts = |of: fn(&(&str, &str, &str)) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(rows.iter().map(of)))
    };
    let columns: [(&str, ArrayRef); 4] = [
        (ROW, Arc::new(UInt32Array::from_iter_values(0..rows.len() as u32))),
        ("segment_id", texts(|row| row.0.into())),
        ("text", texts(|row| row.1.into())),
        ("audio_path", texts(|row| row.2.into())),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, name != ROW))).unwrap()
}

const TRAIN: [(&str, &str, &str); 4] = [
    ("a", "<|de|> eins", "a.wav"),
    ("b", "zwei", "b.wav"),
    ("twice", "x", "1/t.wav"),
    ("d", "vier", "d.wav"),
];
const VAL: [(&str, &str, &str); 2] = [("twice", "y", "2/t.wav"), ("e", "<|de|> f\u{fc}nf", "e.wav")];

fn matched(given: &[Correction<'_>], all_recordings: bool) -> Result<Output, StageError> {
    let given = corrections(given);
    Harness::<MatchCorrections>::new(MatchSettings { all_recordings })
        .input("corrections", given.schema())
        .input("train", rows(&TRAIN).schema())
        .input("val", rows(&VAL).schema())
        .feed("corrections", ALL, given.slice(0, given.num_rows() / 2))
        .feed(
            "corrections",
            ALL,
            given.slice(given.num_rows() / 2, given.num_rows() - given.num_rows() / 2),
        )
        // Rows of a segment may be in several partitions.
        .feed("train", "x", rows(&TRAIN[..1]))
        .feed("train", "y", rows(&TRAIN))
        .feed("val", "x", rows(&VAL))
        .run()
}

fn texts(output: &RecordBatch, name: &str) -> Vec<String> {
    let column = columns::text(output, name).unwrap();
    column.iter().map(|text| text.unwrap_or("-").to_string()).collect()
}

const GIVEN: [Correction<'static>; 9] = [
    (Some("text"), Some("a"), Some("first"), Some(true)),
    (Some("speaker"), Some("d"), Some("Anna"), Some(false)),
    (Some("text"), Some("twice"), Some("z"), Some(false)),
    (Some("text"), Some("gone"), Some("z"), Some(false)),
    (Some("text"), Some("a"), Some("last"), None),
    (Some("text"), Some("e"), Some("<|nl|> vijf"), Some(false)),
    (Some("text"), None, Some("z"), Some(false)),
    (Some("Text"), Some("b"), Some("z"), Some(false)),
    (Some("text"), Some("b"), None, Some(true)),
];

#[test]
fn corrections_of_rows_count_and_others_are_refused() {
    let output = matched(&GIVEN, false).unwrap();
    let kept = output.all_rows("corrections");
    assert_eq!(texts(&kept, "segment_id"), ["a", "e", "b"]);
    assert_eq!(texts(&kept, "new_text"), ["last", "<|nl|> vijf", "-"]);
    assert_eq!(columns::rows(&kept).unwrap().values(), &[0, 1, 2]);
    assert_eq!(
        output.reasons(ALL),
        [
            (Some(2), "several_recordings"),
            (Some(3), "no_such_segment"),
            (Some(6), "no_such_segment"),
            (Some(7), "unknown_correction"),
        ]
    );
    let output = matched(&GIVEN, true).unwrap();
    assert_eq!(
        texts(&output.all_rows("corrections"), "segment_id"),
        ["twice", "a", "e", "b"]
    );
}

#[test]
fn corrections_of_nothing_are_an_error() {
    let mut given = vec![GIVEN[3]; 200];
    // A name of a speaker is none.
    given.push(GIVEN[1]);
    let error = matched(&given, false).unwrap_err().to_string();
    let said = "none of the 200 corrections is of a row here: 1 no_such_segment";
    assert!(error.contains(said), "{error}");
    // Names of speakers alone are none of other data.
    let output = matched(&[GIVEN[1]; 3], false).unwrap();
    assert_eq!(output.all_rows("corrections").num_rows(), 0);
    assert!(output.rejects().is_empty());
    // One of many suffices, and a file to which nobody has added anything is none of other data.
    let mut many = vec![GIVEN[7]; 999];
    many.push(GIVEN[4]);
    assert_eq!(matched(&many, false).unwrap().all_rows("corrections").num_rows(), 1);
    assert_eq!(matched(&[], false).unwrap().all_rows("corrections").num_rows(), 0);
}

#[test]
fn rows_get_the_last_text_and_keep_their_tag() {
    let given = corrections(&GIVEN);
    let run = |column: &str| {
        Harness::<Correct>::new(CorrectSettings { column: column.into() })
            .input("rows", rows(&TRAIN).schema())
            .input("corrections", given.schema())
            .feed("rows", "x", rows(&TRAIN))
            .feed("rows", "y", rows(&VAL))
            .feed("corrections", ALL, given.clone())
            .run()
    };
    let output = run("text").unwrap();
    let corrected = output.all_rows("rows");
    assert_eq!(texts(&corrected, "segment_id"), ["a", "twice", "d", "twice", "e"]);
    assert_eq!(
        texts(&corrected, "text"),
        ["<|de|> last", "z", "vier", "z", "<|nl|> vijf"]
    );
    assert_eq!(output.reasons("x"), [(Some(1), "marked_bad")]);
    let (_, reject) = &output.rejects()[0];
    assert_eq!(reject.class, RejectClass::Rule);
    assert!(
        reject.values.contains(r#""new_text":null,"bad":true"#),
        "{}",
        reject.values
    );
    let error = run("words").unwrap_err().to_string();
    assert!(error.contains("`words`"), "{error}");
}
