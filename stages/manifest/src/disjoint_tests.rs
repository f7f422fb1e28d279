use std::sync::Arc;

use arrow::array::{ArrayRef, StringArray, UInt32Array};
use arrow::datatypes::{Field, Schema};
use flow_kind::event::Event;
use flow_runtime::harness::{Harness, Output};
use proptest::prelude::*;

use super::*;

/// `segment_id`, `shard_id`, text, `audio_path`, duration.
type Row<'a> = (&'a str, &'a str, &'a str, &'a str, f64);

fn schema() -> SchemaRef {
    let text = |name: &str| Field::new(name, DataType::Utf8, true);
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        text("segment_id"),
        text("shard_id"),
        text("text"),
        text("audio_path"),
        Field::new("duration", DataType::Float64, true),
    ]))
}

fn batch(rows: &[Row<'_>]) -> RecordBatch {
    let text =
        |of: fn(&Row<'_>) -> String| -> ArrayRef { Arc::new(StringArray::from_iter_values(rows.iter().map(of))) };
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from_iter_values(0..rows.len() as u32)),
        text(|row| row.0.into()),
        text(|row| row.1.into()),
        text(|row| row.2.into()),
        text(|row| row.3.into()),
        Arc::new(Float64Array::from_iter_values(rows.iter().map(|row| row.4))),
    ];
    RecordBatch::try_new(schema(), columns).unwrap()
}

fn run(val: &[Row<'_>], train: &[Row<'_>], allow_overlap: bool) -> Result<Output, StageError> {
    let settings = DisjointSettings {
        allow_overlap,
        ..DisjointSettings::default()
    };
    let half = val.len() / 2;
    Harness::<Disjoint>::new(settings)
        .input("val", schema())
        .input("train", schema())
        .feed("val", "hi/a", batch(&val[..half]))
        .feed("val", "hi/b", batch(&val[half..]))
        .feed("train", "hi/a", batch(train))
        .run()
}

#[test]
fn what_is_shared_is_counted_and_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("real")).unwrap();
    std::os::unix::fs::symlink(folder.path().join("real"), folder.path().join("link")).unwrap();
    let at = |path: &str| folder.path().join(path).display().to_string();
    let (real, link) = (at("real/x.wav"), at("link/x.wav"));
    let val: [Row<'_>; 5] = [
        ("s1", "h1", "<|hi|> Caf\u{e9} one", "a.wav", 1.0),
        ("s2", "h1", "two", &real, 2.0),
        ("s3", "h1", "three", "c.wav", 3.0004),
        ("s4", "h1", "", "", 4.0),
        ("s5", "h1", "five", "e.wav", 5.0),
    ];
    let train: [Row<'_>; 6] = [
        // Another shard and duration: not the segment. Text and path are empty, and are no reason.
        ("s1", "h2", "", "", 1.0),
        ("s4", "h1", "", "", 4.1),
        // The words of s1, composed otherwise and with another tag.
        ("t1", "h2", "<|mr|> cafe\u{301}  ONE", "t1.wav", 1.5),
        ("t2", "h2", "zwei", &link, 2.0),
        ("s3", "h1", "drei", "t3.wav", 3.0),
        ("t4", "h2", "vier", "t4.wav", 4.0),
    ];
    let Err(StageError::Refused { message, help }) = run(&val, &train, false) else {
        panic!("it ran");
    };
    assert_eq!(
        message,
        "3 of 5 rows of validation are also in training (1 by their segment, 1 by their text, 1 by their recording): \
         \"s1\" has the text of \"t1\", \"s2\" has the recording of \"t2\", \"s3\""
    );
    assert!(help.unwrap().contains("allow_overlap"));

    let output = run(&val, &train, true).unwrap();
    assert_eq!(output.all_rows("rows").num_rows(), 5);
    let warned = |event: &Event| matches!(event, Event::Warning { message, .. } if message.starts_with("3 of 5"));
    assert_eq!(output.events.iter().filter(|event| warned(event)).count(), 1);

    let output = run(&val[3..], &train[2..], false).unwrap();
    assert_eq!(output.all_rows("rows").num_rows(), 2);
    assert!(output.events.is_empty());
}

proptest! {
    /// As sets of words say.
    #[test]
    fn texts_are_compared_as_sets(
        val in prop::collection::vec(0..12u8, 1..12), train in prop::collection::vec(0..12u8, 1..40),
    ) {
        let named = |side: &str, words: &[u8]| -> Vec<(String, String)> {
            let row = |(number, word): (usize, &u8)| (format!("{side}{number}"), format!("word{word}"));
            words.iter().enumerate().map(row).collect()
        };
        let (val_rows, train_rows) = (named("v", &val), named("t", &train));
        fn rows(named: &[(String, String)]) -> Vec<Row<'_>> {
            named.iter().map(|(id, text)| (id.as_str(), "x", text.as_str(), "", 1.0)).collect()
        }
        let shared = val.iter().filter(|word| train.contains(word)).count() as u64;
        let artifact = |rows: &[Row<'_>]| {
            Artifact::in_memory(schema(), vec![(Partition::new("all"), vec![batch(rows)])]).unwrap()
        };
        let found = overlap(&artifact(&rows(&val_rows)), &artifact(&rows(&train_rows))).unwrap();
        let counts = found.map(|found| (found.in_training, found.by, found.examples.len() as u64));
        prop_assert_eq!(counts, (shared > 0).then_some((shared, [0, shared, 0], shared.min(3))));
    }
}
