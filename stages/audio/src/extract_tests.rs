use std::fs;
use std::os::unix::fs::symlink;

use arrow::array::{Int32Array, Int64Array, UInt32Array};
use flow_runtime::harness::{Harness, Output};

use super::*;
use crate::probe::{AudioFrom, Probe, ProbeSettings, members_schema};
use crate::test_data::{corpus, member};

fn rows_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("_row", DataType::UInt32, false),
        Field::new("segment_id", DataType::Utf8, false),
        Field::new(NAME_COLUMN, DataType::Utf8, true),
    ]))
}

fn rows(names: &[&str]) -> RecordBatch {
    let ids: Vec<String> = (0..names.len()).map(|number| format!("s{number}")).collect();
    RecordBatch::try_new(
        rows_schema(),
        vec![
            Arc::new(UInt32Array::from_iter_values(0..names.len() as u32)),
            Arc::new(StringArray::from(ids)),
            Arc::new(StringArray::from(names.to_vec())),
        ],
    )
    .unwrap()
}

fn extract(settings: &ExtractSettings, names: &[&str], members: RecordBatch) -> Output {
    Harness::<Extract>::new(settings.clone())
        .threads(2)
        .input("rows", rows_schema())
        .input("members", members_schema())
        .feed("rows", "hi/hi_0000", rows(names))
        .feed("members", "hi/hi_0000", members)
        .run()
        .unwrap()
}

fn reasons(output: &Output) -> Vec<(Option<u32>, &str)> {
    output
        .rejects()
        .iter()
        .map(|(_, reject)| (reject.row, reject.reason.as_str()))
        .collect()
}

#[test]
fn copies_what_rows_name_and_refuses_the_rest() {
    let shards = corpus("micro").join("shards");
    let probed = Harness::<Probe>::new(ProbeSettings {
        shards: shards.clone(),
        audio_from: AudioFrom::Tar,
        unless: String::new(),
    })
    .run()
    .unwrap();
    let members = probed.rows("members", "hi/hi_0000");
    let (names, statuses) = (column(&members, "name").unwrap(), column(&members, "status").unwrap());
    let first_with = |status: &str, from: usize| {
        (from..members.num_rows())
            .find(|&row| statuses.value(row) == status)
            .map(|row| names.value(row).to_owned())
    };
    let good = first_with("ok", 0).unwrap();
    let other = first_with("ok", 5).unwrap();
    let link = first_with("not_regular_file", 0).unwrap();
    let temp = tempfile::tempdir().unwrap();
    let settings = ExtractSettings {
        shards,
        audio: temp.path().join("audio"),
    };
    let dotted = format!("./{other}");
    let wanted = [
        &good,
        "../../evil.flac",
        &link,
        &dotted,
        "not/there.flac",
        &good,
        "metadata.parquet",
        "",
    ];
    let output = extract(&settings, &wanted, members.clone());
    assert_eq!(
        reasons(&output),
        [
            (Some(1), "unsafe_name"),
            (Some(2), "not_regular_file"),
            (Some(4), "missing_member"),
            (Some(6), "unsafe_name"),
            (Some(7), "unsafe_name"),
        ]
    );
    let kept = output.rows("rows", "hi/hi_0000");
    let paths: Vec<&str> = column(&kept, PATH_COLUMN).unwrap().iter().flatten().collect();
    let folder = temp.path().join("audio/hi/hi_0000");
    let expected: Vec<String> = [&good, &other, &good]
        .iter()
        .map(|name| folder.join(name).to_string_lossy().into_owned())
        .collect();
    assert_eq!(paths, expected);
    assert_eq!(fs::read(folder.join(&good)).unwrap(), member("hi", "hi_0000", &good));
    assert_eq!(fs::read(folder.join(&other)).unwrap(), member("hi", "hi_0000", &other));
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
    assert_eq!(
        fs::read_dir(temp.path()).unwrap().count(),
        1,
        "nothing outside the target"
    );
    // A second run writes nothing that is there.
    let before = fs::metadata(folder.join(&good)).unwrap().modified().unwrap();
    extract(&settings, &wanted, members);
    assert_eq!(fs::metadata(folder.join(&good)).unwrap().modified().unwrap(), before);
}

#[test]
fn beside_the_tar_and_past_its_end() {
    let temp = tempfile::tempdir().unwrap();
    let shards = temp.path().join("shards");
    let folder = shards.join("hi/hi_0000");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("hi_0000.tar"), b"0123456789").unwrap();
    symlink("/etc", folder.join("planted")).unwrap();
    let members = |ranges: &[(&str, i64, i64)]| {
        let count = ranges.len();
        let texts = |text: &str| Arc::new(StringArray::from(vec![text; count]));
        let ints = || Arc::new(Int32Array::from(vec![None; count]));
        RecordBatch::try_new(
            members_schema(),
            vec![
                Arc::new(UInt32Array::from_iter_values(0..count as u32)),
                Arc::new(StringArray::from_iter_values(ranges.iter().map(|range| range.0))),
                texts("ok"),
                Arc::new(Int64Array::from_iter_values(ranges.iter().map(|range| range.1))),
                Arc::new(Int64Array::from_iter_values(ranges.iter().map(|range| range.2))),
                ints(),
                ints(),
                ints(),
                Arc::new(Int64Array::from(vec![None; count])),
                Arc::new(StringArray::from(vec![None::<&str>; count])),
                texts("tar"),
                texts(""),
            ],
        )
        .unwrap()
    };
    let settings = ExtractSettings {
        shards: shards.clone(),
        audio: PathBuf::new(),
    };
    let output = extract(
        &settings,
        &["a", "planted/passwd"],
        members(&[("a", 2, 3), ("planted/passwd", 0, 1)]),
    );
    assert_eq!(fs::read(folder.join("a")).unwrap(), b"234");
    assert_eq!(reasons(&output), [(Some(1), "unsafe_path")]);
    // The tar changed since it was probed: not this row's fault.
    let error = Harness::<Extract>::new(settings)
        .input("rows", rows_schema())
        .input("members", members_schema())
        .feed("rows", "hi/hi_0000", rows(&["a"]))
        .feed("members", "hi/hi_0000", members(&[("a", 8, 30)]))
        .run()
        .unwrap_err();
    assert!(error.to_string().contains("hi_0000.tar"), "{error}");
}

#[test]
fn inputs_are_checked_before_a_run() {
    let settings = ExtractSettings {
        shards: "s".into(),
        audio: "a".into(),
    };
    let input = |name: &str, schema| Input {
        name: name.into(),
        schema,
    };
    let shape = |inputs: &[Input]| Extract::shape(&settings, inputs);
    assert!(shape(&[input("rows", rows_schema())]).is_err());
    assert!(
        shape(&[input("rows", rows_schema()), input("rows2", rows_schema())])
            .unwrap_err()
            .to_string()
            .contains("`name`")
    );
    let shape = shape(&[input("rows", rows_schema()), input("members", members_schema())]).unwrap();
    assert_eq!(shape.outputs[0].schema.field(3).name(), PATH_COLUMN);
}
