use std::sync::Arc;

use arrow::array::{ArrayRef, UInt32Array};
use arrow::datatypes::Field;
use flow_storage::Storage;

use super::*;
use crate::test_data::corpus;

/// Rows as `manifest.read` gives them: files, parts of files, members of a tar, and parts past the end.
#[test]
fn files_parts_and_members_of_tars_are_read() {
    let tar = corpus("micro").join("shards/hi/hi_0001/hi_0001.tar");
    let mut reader = std::fs::File::open(&tar).unwrap();
    let length = reader.metadata().unwrap().len();
    let listing = flow_audio::tar::list(&mut reader, length).unwrap();
    let whole_tar = std::fs::read(&tar).unwrap();
    let bytes = |member: &flow_audio::tar::Member| {
        whole_tar[member.offset as usize..(member.offset + member.size) as usize].to_vec()
    };
    let member = listing
        .members
        .iter()
        .find(|member| bytes(member).starts_with(b"fLaC"))
        .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.flac");
    std::fs::write(&file, bytes(member)).unwrap();
    let (file, tar) = (file.to_str().unwrap(), tar.to_str().unwrap());
    let (offset, size) = (Some(member.offset as i64), Some(member.size as i64));

    let rows = [
        (file, None, None, None, 1.103),
        (file, None, None, Some(0.25), 0.125),
        (tar, offset, size, None, 1.1),
        (tar, offset, size, Some(0.25), 0.125),
        (file, None, None, Some(1000.0), 1.0),
        // Parts that begin where the recording does, and one that ends long after it.
        (file, None, None, None, 0.5),
        (file, None, None, Some(0.0), 0.5),
        (tar, offset, size, None, 0.5),
        (file, None, None, None, 1.5),
    ];
    let count = rows.len();
    let text = |value: &str| -> ArrayRef { Arc::new(StringArray::from(vec![value; count])) };
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("_row", Arc::new(UInt32Array::from_iter_values(0..count as u32))),
        ("segment_id", text("s")),
        ("text", text("x")),
        ("lang", text("hi")),
        (
            "audio_path",
            Arc::new(rows.iter().map(|row| Some(row.0)).collect::<StringArray>()),
        ),
        ("offset", Arc::new(rows.iter().map(|row| row.1).collect::<Int64Array>())),
        ("size", Arc::new(rows.iter().map(|row| row.2).collect::<Int64Array>())),
        (
            "start",
            Arc::new(rows.iter().map(|row| row.3).collect::<Float64Array>()),
        ),
        (
            "duration",
            Arc::new(rows.iter().map(|row| Some(row.4)).collect::<Float64Array>()),
        ),
    ];
    let field = |(name, column): &(&str, ArrayRef)| Field::new(*name, column.data_type().clone(), true);
    let schema = Arc::new(Schema::new(columns.iter().map(field).collect::<Vec<_>>()));
    assert_eq!(AudioColumns::of(&schema, false), Some(AudioColumns::PathRange));
    let batch = RecordBatch::try_new(schema.clone(), columns.into_iter().map(|column| column.1).collect()).unwrap();
    let artifact = Artifact::in_memory(schema, vec![(Partition::new("hi/hi_0001"), vec![batch])]).unwrap();
    let data = Dataset::read(&artifact, None, Path::new(""), None).unwrap();
    let signal = |row: u32| data.utterance(row).unwrap().signal(&Storage::default());

    let whole = decode(&bytes(member), 60.0).unwrap();
    assert_eq!(signal(0).unwrap(), whole);
    assert_eq!(signal(2).unwrap(), whole);
    assert_eq!(signal(1).unwrap(), whole[4_000..6_000]);
    assert_eq!(signal(3).unwrap(), whole[4_000..6_000]);
    assert!(signal(4).unwrap_err().to_string().contains("ends before 1000 s"));
    for row in 5..8 {
        assert_eq!(signal(row).unwrap(), whole[..8_000], "row {row}");
    }
    assert!(signal(8).unwrap_err().to_string().contains("the row ends at 1.5 s"));
}

/// Without `start` all of a recording would be taken for each of its parts.
/// Channels that cancel each other out at the beginning of a recording, and not later: what is made of them is decided for the
/// recording, also where a row that is read alone would say otherwise.
#[test]
fn rows_read_alone_are_mixed_as_their_recording_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.wav");
    let tone = |at: u32| (f64::from(at) * 0.3).sin() * 8_000.0;
    let frames = (0..80_000u32).flat_map(|at| {
        let of_right = if at < 32_000 { -1.0 } else { 0.5 };
        [tone(at) as i16, (of_right * tone(at)) as i16]
    });
    let samples: Vec<u8> = frames.flat_map(i16::to_le_bytes).collect();
    let mut bytes = Vec::new();
    bytes.extend(b"RIFF");
    bytes.extend((36 + samples.len() as u32).to_le_bytes());
    bytes.extend(b"WAVEfmt ");
    bytes.extend(16u32.to_le_bytes());
    bytes.extend([1u16, 2].map(u16::to_le_bytes).concat());
    bytes.extend([16_000u32, 64_000].map(u32::to_le_bytes).concat());
    bytes.extend([4u16, 16].map(u16::to_le_bytes).concat());
    bytes.extend(b"data");
    bytes.extend((samples.len() as u32).to_le_bytes());
    bytes.extend(samples);
    std::fs::write(&path, bytes).unwrap();
    let row = |start: Option<f64>, duration: f64, by_duration: bool| Utterance {
        segment_id: "s",
        text: "x",
        lang: "hi",
        duration,
        place: Some(Place::File(path.clone())),
        start,
        by_duration,
    };
    let whole = row(None, 5.0, false).signal(&Storage::default()).unwrap();
    // The left channel alone: the mean would be less.
    assert!(whole[48_000..49_000].iter().any(|sample| sample.abs() > 0.24));
    for start in [0.5, 1.75, 2.5, 4.0] {
        let part = row(Some(start), 0.5, true).signal(&Storage::default()).unwrap();
        let from = (start * 16_000.0) as usize;
        assert_eq!(part, whole[from..from + 8_000], "{start} s");
    }
}

#[test]
fn rows_that_lost_a_column_of_their_place_are_refused() {
    static PORT: flow_kind::InputPort = flow_kind::InputPort::whole("rows", "rows");
    let rows = |names: &[&str]| {
        let fields: Vec<Field> = names
            .iter()
            .map(|name| Field::new(*name, DataType::Utf8, true))
            .collect();
        Input {
            name: "rows".into(),
            port: &PORT,
            schema: Arc::new(Schema::new(fields)),
            before: Vec::new(),
        }
    };
    let place = |names: &[&str]| AudioColumns::of_input(&rows(names), false).map_err(|error| error.to_string());
    assert_eq!(
        place(&["audio_path", "offset", "size", "start"]),
        Ok(AudioColumns::PathRange)
    );
    assert_eq!(place(&["audio_path"]), Ok(AudioColumns::Path));
    assert_eq!(place(&["tar_path", "offset", "size"]), Ok(AudioColumns::TarRange));
    let lost = place(&["audio_path", "offset", "size"]).unwrap_err();
    assert!(lost.contains("only in part") && lost.contains("not `start`"), "{lost}");
    assert!(place(&["audio_path", "start"]).is_err());
    // Of rows that had them before, the path alone is not enough; of those that had no path, it is that of their own file.
    let parts = rows(&["audio_path", "offset", "size", "start"]).schema;
    let after = |before: &[&SchemaRef]| {
        let input = Input {
            before: before.iter().map(|schema| SchemaRef::clone(schema)).collect(),
            ..rows(&["audio_path", "text"])
        };
        AudioColumns::of_input(&input, false).map_err(|error| error.to_string())
    };
    let alone = rows(&["audio_path"]).schema;
    let lost = after(&[&alone, &parts]).unwrap_err();
    assert!(lost.contains("not `offset`, `size`, `start`"), "{lost}");
    assert_eq!(after(&[&alone]), Ok(AudioColumns::Path));
    assert_eq!(after(&[&rows(&["text"]).schema, &parts]), Ok(AudioColumns::Path));
}
