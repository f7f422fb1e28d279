use std::fs;
use std::sync::Arc;

use arrow::array::{BinaryArray, RecordBatch, StringArray, StructArray};
use arrow::datatypes::{Field, Fields, Schema};
use flow_storage::Storage;
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;

use super::*;
use crate::decode::{decode, read_file};
use crate::part::{decode_row, stated_seconds};
use crate::recording_reader::{Channels, RecordingReader};
use crate::test_data;

#[test]
fn only_the_two_forms_name_what_is_within_a_file() {
    let of = |path: &str| parse(Path::new(path)).map(|found| (found.file.display().to_string(), found.place));
    assert_eq!(
        of("a#b.arrow#offset=12&size=0"),
        Some(("a#b.arrow".into(), EmbeddedPlace::Bytes { offset: 12, size: 0 }))
    );
    let value = EmbeddedPlace::Value {
        column: 0,
        row_group: 2,
        row: 17,
    };
    assert_eq!(
        of("s3://b/t.parquet#column=0&row_group=2&row=17"),
        Some(("s3://b/t.parquet".into(), value))
    );
    let value = EmbeddedPlace::InBatch {
        column: 1,
        batch: 4096,
        row: 3,
    };
    assert_eq!(
        of(&path_in_batch("d.arrow", 1, 4096, 3)),
        Some(("d.arrow".into(), value))
    );
    for path in [
        "a.wav",
        "a#1.wav",
        "a#offset=1",
        "a#offset=1&size=2&x=3",
        "a#offset=01&size=2",
        "a#offset=+1&size=2",
        "a#offset=&size=2",
        "a#size=2&offset=1",
        "a#offset=18446744073709551616&size=2",
        "a#column=1&row_group=2",
        "a#column=1&group=2&row=3",
        "#offset=1&size=2",
    ] {
        assert_eq!(of(path), None, "{path}");
        assert_eq!(file_of(Path::new(path)), Path::new(path));
    }
    assert_eq!(path_of_bytes("f", 1, 2), "f#offset=1&size=2");
    assert_eq!(path_of_value("f", 1, 2, 3), "f#column=1&row_group=2&row=3");
}

/// A Parquet file with a column of Hugging Face's form: in row groups of three rows, pages of about one, the second value null.
fn parquet_of(recordings: &[Option<&[u8]>], path: &Path) {
    let bytes: ArrayRef = Arc::new(BinaryArray::from_iter(recordings.iter().copied()));
    let names: ArrayRef = Arc::new(StringArray::from_iter_values(recordings.iter().map(|_| "0.wav")));
    let fields = Fields::from(vec![
        Field::new("bytes", DataType::Binary, true),
        Field::new("path", DataType::Utf8, true),
    ]);
    let audio: ArrayRef = Arc::new(StructArray::new(fields.clone(), vec![bytes, names.clone()], None));
    let schema = Schema::new(vec![
        Field::new("text", DataType::Utf8, true),
        Field::new("audio", DataType::Struct(fields), true),
    ]);
    let batch = RecordBatch::try_new(Arc::new(schema), vec![names, audio]).unwrap();
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(3))
        .set_data_page_size_limit(1_000)
        .set_write_batch_size(1)
        .build();
    let file = fs::File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

#[test]
fn values_of_parquet_files_are_read_in_any_order_as_recordings() {
    let folder = tempfile::tempdir().unwrap();
    let flac = test_data::good_members("micro", "hi", "hi_0001").remove(0);
    let others: Vec<Vec<u8>> = (0..8u8).map(|n| [&flac[..], &[n; 3_000]].concat()).collect();
    let values: Vec<Option<&[u8]>> = (0..8).map(|n| (n != 1).then_some(&others[n][..])).collect();
    let path = folder.path().join("t.parquet");
    parquet_of(&values, &path);
    let at = |n: usize| path_of_value(path.to_str().unwrap(), 1, n / 3, n % 3);
    for n in [0, 2, 3, 4, 5, 6, 7, 7, 3, 2, 0, 1, 2] {
        let read = read_file(&Storage::default(), Path::new(&at(n)));
        match values[n] {
            Some(value) => assert!(read.unwrap() == value, "{n}"),
            None => assert!(read.unwrap_err().to_string().contains("has no bytes")),
        }
    }
    for (wrong, why) in [
        (
            path_of_value(path.to_str().unwrap(), 1, 3, 0),
            "no row 0 in a row group 3",
        ),
        (
            path_of_value(path.to_str().unwrap(), 1, 0, 3),
            "no row 3 in a row group 0",
        ),
        (path_of_value(path.to_str().unwrap(), 9, 0, 0), "no column 9"),
        (path_of_value(path.to_str().unwrap(), 0, 0, 0), "has no bytes"),
    ] {
        let error = read_file(&Storage::default(), Path::new(&wrong))
            .unwrap_err()
            .to_string();
        assert!(error.contains(why), "{error}");
    }
    // Another file of the same name is noticed.
    parquet_of(&[Some(&flac)], &path);
    let zero = at(0);
    let zero = Path::new(&zero);
    assert!(read_file(&Storage::default(), zero).unwrap() == flac);
    // All ways to a recording lead there.
    let whole = decode(&flac, 60.0).unwrap();
    let seconds = stated_seconds(&Storage::default(), zero, None).unwrap();
    assert_eq!(
        decode_row(&Storage::default(), zero, None, 0.0, seconds, 60.0).unwrap(),
        whole
    );
    let part = decode_row(&Storage::default(), zero, None, 0.5, 0.25, 60.0).unwrap();
    assert_eq!(part, whole[8_000..12_000]);
    assert!(RecordingReader::open(&Storage::default(), zero, None, Channels::Mix).is_ok());
    fs::write(&path, b"PAR1 this is none").unwrap();
    assert!(read_file(&Storage::default(), zero).is_err());
    fs::remove_file(&path).unwrap();
    assert!(matches!(
        read_file(&Storage::default(), zero),
        Err(AudioError::Read { .. })
    ));
}

#[test]
fn bytes_of_a_file_are_a_recording() {
    let folder = tempfile::tempdir().unwrap();
    let flac = test_data::good_members("micro", "hi", "hi_0001").remove(0);
    let path = folder.path().join("a.ark");
    fs::write(&path, [b"utt1 ", &flac[..], b"utt2 "].concat()).unwrap();
    let named = path_of_bytes(path.to_str().unwrap(), 5, flac.len() as u64);
    let named = Path::new(&named);
    assert!(read_file(&Storage::default(), named).unwrap() == flac);
    let seconds = stated_seconds(&Storage::default(), named, None).unwrap();
    assert_eq!(
        decode_row(&Storage::default(), named, None, 0.0, seconds, 60.0).unwrap(),
        decode(&flac, 60.0).unwrap()
    );
    let beyond = path_of_bytes(path.to_str().unwrap(), 5, flac.len() as u64 + 6);
    assert!(matches!(
        read_file(&Storage::default(), Path::new(&beyond)),
        Err(AudioError::PastEnd { .. })
    ));
    assert!(matches!(
        decode_row(&Storage::default(), Path::new(&beyond), None, 0.0, 1.0, 60.0),
        Err(AudioError::PastEnd { .. })
    ));
}
