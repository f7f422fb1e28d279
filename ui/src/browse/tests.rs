use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, AsArray, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Int64Type, Schema};
use flow_kind::{Artifact, Partition};
use flow_manifest::ManifestError;
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use tempfile::TempDir;

use super::condition::Bound;
use super::row_set::PARTITION;
use super::*;

const TIME: Duration = Duration::from_secs(60);
/// A name that SQL text would have to quote.
const HOSTILE_NAME: &str = "Länge\" OR 1=1 --";

fn batch(numbers: std::ops::Range<i64>) -> RecordBatch {
    let text = |number: i64| match number % 4 {
        0 => Some(format!("naïve Ärger {number}")),
        1 => Some("it's' OR '1'='1".to_owned()),
        2 => Some("100%_\\".to_owned()),
        _ => None,
    };
    let schema = Schema::new(vec![
        Field::new("number", DataType::Int64, false),
        Field::new("lang", DataType::Utf8, true),
        Field::new("text", DataType::Utf8, true),
        Field::new(HOSTILE_NAME, DataType::Float64, true),
    ]);
    let lang = |number: i64| if number < 50 { "hi" } else { "ta" };
    RecordBatch::try_new(
        Arc::new(schema),
        vec![
            Arc::new(Int64Array::from_iter_values(numbers.clone())),
            Arc::new(StringArray::from_iter_values(numbers.clone().map(lang))),
            Arc::new(StringArray::from_iter(numbers.clone().map(text))),
            Arc::new(Float64Array::from_iter_values(
                numbers.map(|number| number as f64 / 10.0),
            )),
        ],
    )
    .unwrap()
}

/// A Parquet file of a hundred rows, ten of each row group.
fn file(folder: &TempDir) -> PathBuf {
    let path = folder.path().join("rows.parquet");
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(10))
        .build();
    let rows = batch(0..100);
    let mut writer = ArrowWriter::try_new(fs::File::create(&path).unwrap(), rows.schema(), Some(properties)).unwrap();
    writer.write(&rows).unwrap();
    writer.close().unwrap();
    path
}

fn query(filters: Vec<Filter>) -> RowQuery {
    RowQuery {
        filters,
        sort: None,
        columns: vec!["number".into()],
        offset: 0,
        limit: 1000,
        time_limit: TIME,
    }
}

fn filter(column: &str, test: Test) -> Filter {
    Filter {
        column: column.into(),
        test,
    }
}

fn numbers(set: &RowSet, query: &RowQuery) -> Vec<i64> {
    let rows = set.page(query).unwrap();
    rows.iter()
        .map(|row| row.values[0].as_ref().unwrap().parse().unwrap())
        .collect()
}

#[test]
fn values_of_filters_are_values_whatever_stands_in_them() {
    let folder = tempfile::tempdir().unwrap();
    let set = RowSet::of_files(&[file(&folder)]).unwrap();
    let found = |column: &str, test: Test| numbers(&set, &query(vec![filter(column, test)])).len();
    assert_eq!(found("text", Test::Equals("it's' OR '1'='1".into())), 25);
    assert_eq!(found("text", Test::Equals("' OR '1'='1".into())), 0);
    assert_eq!(found("lang", Test::OneOf(vec!["ta".into(), "') OR true".into()])), 50);
    // No sign of a pattern, and letters of either case.
    assert_eq!(found("text", Test::Contains("100%_\\".into())), 25);
    assert_eq!(found("text", Test::Contains("%".into())), 25);
    assert_eq!(found("text", Test::Contains("ÄRGER 4".into())), 4);
    assert_eq!(found("text", Test::IsNull), 25);
    assert_eq!(found(HOSTILE_NAME, Test::AtLeast(9.0)), 10);
    for wrong in [filter("no such", Test::IsNull), filter("text", Test::AtMost(1.0))] {
        assert!(set.page(&query(vec![wrong])).is_err());
    }
}

/// Statistics hold decimals without their point, and unsigned numbers as signed ones.
#[test]
fn no_row_group_is_left_out_for_statistics_of_another_form() {
    use arrow::array::{Decimal128Array, UInt32Array};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.parquet");
    let seconds = Decimal128Array::from(vec![150, 1_250])
        .with_precision_and_scale(9, 2)
        .unwrap();
    let large = UInt32Array::from(vec![u32::MAX - 1, u32::MAX]);
    let wrong = Float64Array::from(vec![f64::NAN, 3.0]);
    let columns: [(&str, ArrayRef); 3] = [
        ("seconds", Arc::new(seconds)),
        ("large", Arc::new(large)),
        ("wrong", Arc::new(wrong)),
    ];
    let rows = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::try_new(fs::File::create(&path).unwrap(), rows.schema(), None).unwrap();
    writer.write(&rows).unwrap();
    writer.close().unwrap();
    let set = RowSet::of_files(&[path]).unwrap();
    for (column, test) in [
        ("seconds", Test::AtMost(2.0)),
        ("seconds", Test::AtLeast(12.0)),
        ("large", Test::AtLeast(4294967295.0)),
        ("wrong", Test::AtLeast(2.0)),
        ("wrong", Test::AtMost(4.0)),
    ] {
        assert_eq!(
            set.count(&[filter(column, test.clone())], TIME).unwrap(),
            1,
            "{column} {test:?}"
        );
    }
}

#[test]
fn pages_are_cut_out_of_the_sorted_rows_and_name_their_places() {
    let folder = tempfile::tempdir().unwrap();
    let set = RowSet::of_files(&[file(&folder), file(&folder)]).unwrap();
    let long = vec![filter("number", Test::AtLeast(90.0))];
    let all = RowQuery {
        sort: Some((HOSTILE_NAME.into(), true)),
        ..query(long.clone())
    };
    let whole = numbers(&set, &all);
    let twice: Vec<i64> = (90..100).rev().flat_map(|number| [number, number]).collect();
    assert_eq!(whole, twice);
    let mut pages = Vec::new();
    for offset in (0..20).step_by(3) {
        pages.extend(numbers(
            &set,
            &RowQuery {
                offset,
                limit: 3,
                ..all.clone()
            },
        ));
    }
    assert_eq!(pages, whole);
    for row in set.page(&all).unwrap() {
        let found = set.row(row.part, row.row).unwrap().unwrap();
        let number = found
            .column_by_name("number")
            .unwrap()
            .as_primitive::<Int64Type>()
            .value(0);
        assert_eq!(
            (Some(number.to_string()), row.row),
            (row.values[0].clone(), number as u64)
        );
    }
    assert_eq!((set.rows(), set.count(&[], TIME).unwrap()), (Some(200), 200));
    assert_eq!(set.count(&long, TIME).unwrap(), 20);
    assert!(set.row(1, 100).unwrap().is_none() && set.row(2, 0).unwrap().is_none());
}

#[test]
fn row_groups_that_cannot_pass_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(&folder);
    let read = |column: &str, test: Test| {
        let column = column.to_owned();
        let groups = parquet_part::batches(&path, &["number"], &[Bound { column, test }]).unwrap();
        let firsts: Vec<u64> = groups.map(|placed| placed.unwrap().0).collect();
        firsts
    };
    assert_eq!(read("number", Test::AtLeast(75.0)), [70, 80, 90]);
    assert_eq!(read(HOSTILE_NAME, Test::AtMost(0.9)), [0]);
    assert_eq!(read("lang", Test::Equals("hi".into())), [0, 10, 20, 30, 40]);
    assert_eq!(read("lang", Test::IsNull).len(), 10);
}

#[test]
fn rows_are_added_up_by_value_and_by_bucket() {
    let folder = tempfile::tempdir().unwrap();
    let set = RowSet::of_files(&[file(&folder)]).unwrap();
    let by = Group::Value("lang".into());
    let totals = set.totals(&by, &["number"], &[], 10, TIME).unwrap();
    let total = |value: &str, rows, sum| Total {
        value: Some(value.into()),
        rows,
        sums: vec![sum],
    };
    assert_eq!(totals, [total("hi", 50, 1225.0), total("ta", 50, 3725.0)]);
    let by = Group::Bucket {
        column: HOSTILE_NAME.into(),
        width: 4.0,
    };
    let buckets = set.totals(&by, &[], &[], 10, TIME).unwrap();
    assert_eq!(
        buckets.iter().map(|bucket| bucket.rows).collect::<Vec<_>>(),
        [40, 40, 20]
    );
}

#[test]
fn artifacts_tell_the_partition_of_each_row() {
    let partitions = vec![
        (Partition::new("hi/a"), vec![batch(0..3), batch(3..5)]),
        (Partition::new("ta/b"), vec![batch(50..52)]),
    ];
    let set = RowSet::of_artifact(&Artifact::in_memory(batch(0..1).schema(), partitions).unwrap());
    let rows = set
        .page(&RowQuery {
            columns: vec![PARTITION.into(), "number".into()],
            offset: 4,
            ..query(Vec::new())
        })
        .unwrap();
    let told: Vec<(usize, u64, Option<&str>)> = rows
        .iter()
        .map(|row| (row.part, row.row, row.values[0].as_deref()))
        .collect();
    assert_eq!(told, [(0, 4, Some("hi/a")), (1, 0, Some("ta/b")), (1, 1, Some("ta/b"))]);
    // Partitions that cannot pass are not opened.
    let bounds = [filter(PARTITION, Test::Equals("hi/a".into()))].map(|filter| Bound {
        column: filter.column,
        test: filter.test,
    });
    let opened: Vec<bool> = (0..set.parts()).map(|part| set.may_pass(part, &bounds)).collect();
    assert_eq!(opened, [true, false]);
    let found = set.row(0, 4).unwrap().unwrap();
    assert_eq!(
        found
            .column_by_name("number")
            .unwrap()
            .as_primitive::<Int64Type>()
            .value(0),
        4
    );
    assert_eq!(
        set.count(&[filter(PARTITION, Test::Equals("ta/b".into()))], TIME)
            .unwrap(),
        2
    );
}

#[test]
fn json_lines_have_the_columns_of_their_first_lines() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("manifest.json");
    let lines = "\u{feff}{\"text\": \"नमस्ते\", \"duration\": 1.5, \"tags\": [1]}\n\n{\"duration\": null, \"text\": 7}\n{\"duration\": 3, \"late\": 1}\n";
    fs::write(&path, lines).unwrap();
    let set = RowSet::of_files(std::slice::from_ref(&path)).unwrap();
    let rows = set
        .page(&RowQuery {
            columns: ["text", "duration", "tags", "late"].map(String::from).to_vec(),
            ..query(Vec::new())
        })
        .unwrap();
    let values: Vec<Vec<&str>> = rows
        .iter()
        .map(|row| row.values.iter().map(|value| value.as_deref().unwrap_or("-")).collect())
        .collect();
    assert_eq!(
        values,
        [
            ["नमस्ते", "1.5", "[1]", "-"],
            ["7", "-", "-", "-"],
            ["-", "3.0", "-", "1.0"]
        ]
    );
    assert_eq!(set.rows(), None);
    assert_eq!(set.count(&[], TIME).unwrap(), 3);
    assert_eq!(set.count(&[filter("duration", Test::AtLeast(2.0))], TIME).unwrap(), 1);
    fs::write(&path, format!("{lines}{{\"text\": ")).unwrap();
    let error = RowSet::of_files(&[path]).err().unwrap().to_string();
    assert!(error.contains("manifest.json") && error.contains("line 5"), "{error}");
}

#[test]
fn files_that_are_cut_or_damaged_anywhere_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(&folder);
    let whole = fs::read(&path).unwrap();
    let looked_at = |bytes: &[u8]| -> Result<usize, ManifestError> {
        fs::write(&path, bytes).unwrap();
        let set = RowSet::of_files(std::slice::from_ref(&path))?;
        Ok(set
            .page(&query(vec![filter("lang", Test::Contains("h".into()))]))?
            .len())
    };
    assert_eq!(looked_at(&whole).unwrap(), 50);
    for end in (0..whole.len()).step_by(97) {
        let error = looked_at(&whole[..end]).unwrap_err().to_string();
        assert!(error.contains("rows.parquet"), "{end}: {error}");
    }
    assert!(RowSet::of_files(&[folder.path().join("absent.parquet")]).is_err());
    assert!(RowSet::of_files(&[folder.path().to_owned()]).is_err());
    let short = RowQuery {
        time_limit: Duration::ZERO,
        ..query(Vec::new())
    };
    let set = RowSet::of_files(&[file(&folder)]).unwrap();
    assert!(set.page(&short).unwrap_err().to_string().contains("narrow the filters"));
}

#[test]
fn long_values_that_a_small_file_repeats_come_few_at_a_time() {
    const ROWS: usize = 400;
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("rows.parquet");
    // A value of 256 KiB, which is stored once.
    let long = "x".repeat(1 << 18);
    let text = StringArray::from_iter_values(std::iter::repeat_n(long.as_str(), 20));
    let rows = RecordBatch::try_from_iter([("text", Arc::new(text) as ArrayRef)]).unwrap();
    let mut writer = ArrowWriter::try_new(fs::File::create(&path).unwrap(), rows.schema(), None).unwrap();
    for _ in 0..ROWS / rows.num_rows() {
        writer.write(&rows).unwrap();
    }
    writer.close().unwrap();
    assert!(path.metadata().unwrap().len() < 4 << 20);
    let set = RowSet::of_files(&[path]).unwrap();
    let mut next = 0;
    for placed in set.batches(0, &[0], &[]).unwrap() {
        let (first, batch) = placed.unwrap();
        assert_eq!(first, next);
        assert!(
            batch.num_rows() * long.len() <= parquet_part::BATCH_BYTES,
            "{} rows",
            batch.num_rows()
        );
        next += batch.num_rows() as u64;
    }
    assert_eq!(next, ROWS as u64);
}
