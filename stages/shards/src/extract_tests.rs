use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use arrow::array::{AsArray, Int32Array, Int64Array, UInt32Array};
use arrow::datatypes::{DataType, Int64Type};
use flow_runtime::harness::{Harness, Output};
use flow_storage::Storage;

use super::settings::column;
use super::*;
use crate::probe::{AudioFrom, Probe, ProbeSettings, members_schema};
use crate::test_data::{corpus, member, tar_of, tone, wav};
use flow_audio::format::Format;
use flow_audio::recording;

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

fn as_is(shards: PathBuf, audio: PathBuf) -> ExtractSettings {
    ExtractSettings {
        shards,
        audio,
        store: Store::AsIs,
        watch: true,
    }
}

/// The port `members` of a shard, with every format allowed.
fn probed(shards: &Path, shard: &str) -> RecordBatch {
    let settings = ProbeSettings {
        shards: shards.to_owned(),
        audio_from: AudioFrom::Tar,
        formats: Format::ALL.to_vec(),
    };
    Harness::<Probe>::new(settings).run().unwrap().rows("members", shard)
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
    let members = probed(&shards, "hi/hi_0000");
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
    let settings = as_is(shards, temp.path().join("audio"));
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
                Arc::new(StringArray::from(vec![None::<&str>; count])),
                texts("tar"),
                texts(""),
            ],
        )
        .unwrap()
    };
    let settings = as_is(shards.clone(), PathBuf::new());
    let output = extract(
        &settings,
        &["a", "planted/passwd"],
        members(&[("a", 2, 3), ("planted/passwd", 0, 1)]),
    );
    assert_eq!(fs::read(folder.join("a")).unwrap(), b"234");
    assert_eq!(reasons(&output), [(Some(1), "unsafe_path")]);
    // More than any disk holds: refused before anything is written, the small one included.
    let huge: Vec<String> = (0..64).map(|number| format!("huge{number}")).collect();
    let mut ranges: Vec<(&str, i64, i64)> = huge.iter().map(|name| (name.as_str(), 0, 1 << 50)).collect();
    ranges.push(("small", 0, 1));
    let error = Harness::<Extract>::new(settings.clone())
        .input("rows", rows_schema())
        .input("members", members_schema())
        .feed(
            "rows",
            "hi/hi_0000",
            rows(&ranges.iter().map(|range| range.0).collect::<Vec<_>>()),
        )
        .feed("members", "hi/hi_0000", members(&ranges))
        .run()
        .unwrap_err();
    let said = error.to_string();
    // 64 times 2^50 bytes and a little.
    assert!(said.contains("72057594") && said.contains("bytes free"), "{said}");
    assert!(!folder.join("small").exists());
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
    let settings = as_is("s".into(), "a".into());
    let harness = || Harness::<Extract>::new(settings.clone()).input("rows", rows_schema());
    assert!(harness().shape().is_err());
    let error = harness().input("members", rows_schema()).shape().unwrap_err();
    assert!(error.to_string().contains("`name`"), "{error}");
    let shape = harness().input("members", members_schema()).shape().unwrap();
    assert_eq!(shape.outputs[0].schema.field(3).name(), PATH_COLUMN);
}

/// A shard with a tar of its own.
fn shard_of(shards: &Path, members: &[(&str, &[u8])]) -> PathBuf {
    let folder = shards.join("hi/hi_0000");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("hi_0000.tar"), tar_of(members)).unwrap();
    folder
}

#[test]
fn other_formats_become_flac_files_with_the_same_samples() {
    let temp = tempfile::tempdir().unwrap();
    let shards = temp.path().join("shards");
    let flac = member("as", "as_0000", "rec_as_0004_000.flac");
    let (wav, mp3) = (wav(44_100, 2, &[5, -5, 700, 9, i16::MAX, i16::MIN]), tone("tone.mp3"));
    shard_of(
        &shards,
        &[
            ("a.flac", &flac),
            ("b", &wav),
            ("deep/c.mp3", &mp3),
            ("d.ogg", &tone("tone.ogg")),
            ("e.amr", b"#!AMR\n\x3c\x91\x17\x16\xbe\x66"),
            // What becomes of `b` would have the name of this one.
            ("b.flac", &flac),
        ],
    );
    let members = probed(&shards, "hi/hi_0000");
    let settings = ExtractSettings {
        store: Store::Flac,
        ..as_is(shards, temp.path().join("audio"))
    };
    let wanted = ["a.flac", "b", "deep/c.mp3", "./d.ogg", "e.amr", "b.flac", "b"];
    let output = extract(&settings, &wanted, members.clone());
    assert_eq!(
        reasons(&output),
        [(Some(4), "unsupported_format"), (Some(5), "name_taken")]
    );
    let folder = temp.path().join("audio/hi/hi_0000");
    let kept = output.rows("rows", "hi/hi_0000");
    let (paths, sizes) = (
        column(&kept, PATH_COLUMN).unwrap(),
        kept[BYTES_COLUMN].as_primitive::<Int64Type>(),
    );
    let names = ["a.flac", "b.flac", "deep/c.mp3.flac", "d.ogg.flac", "b.flac"];
    assert_eq!(kept.num_rows(), names.len());
    let hashes: Vec<String> = [&wav, &mp3]
        .iter()
        .map(|bytes| recording::probe(bytes, &Format::ALL).unwrap().1.audio_hash)
        .collect();
    for (row, name) in names.iter().enumerate() {
        let path = folder.join(name);
        assert_eq!(paths.value(row), path.to_string_lossy());
        assert_eq!(fs::metadata(&path).unwrap().len() as i64, sizes.value(row));
    }
    assert_eq!(fs::read(folder.join("a.flac")).unwrap(), flac);
    let hash = |name: &str| {
        flow_audio::flac::probe(&fs::read(folder.join(name)).unwrap())
            .unwrap()
            .audio_hash
    };
    assert_eq!([hash("b.flac"), hash("deep/c.mp3.flac")], hashes[..]);
    // A file with other samples in its place is replaced, the others stay.
    let before = fs::metadata(folder.join("b.flac")).unwrap().modified().unwrap();
    fs::copy(folder.join("a.flac"), folder.join("d.ogg.flac")).unwrap();
    let again = extract(&settings, &wanted, members);
    assert_eq!(again.rows("rows", "hi/hi_0000"), kept);
    assert_ne!(hash("d.ogg.flac"), hash("a.flac"));
    assert_eq!(fs::metadata(folder.join("b.flac")).unwrap().modified().unwrap(), before);
}

#[test]
fn rows_can_point_into_the_tar() {
    let shards = corpus("micro").join("shards");
    let members = probed(&shards, "hi/hi_0000");
    let (names, statuses) = (column(&members, "name").unwrap(), column(&members, "status").unwrap());
    let good: Vec<usize> = (0..members.num_rows())
        .filter(|&row| statuses.value(row) == "ok" && !flow_audio::member_name::is_unsafe(names.value(row)))
        .collect();
    let temp = tempfile::tempdir().unwrap();
    let settings = ExtractSettings {
        store: Store::Tar,
        ..as_is(shards.clone(), temp.path().join("audio"))
    };
    let wanted: Vec<&str> = good.iter().map(|&row| names.value(row)).chain(["none"]).collect();
    let output = extract(&settings, &wanted, members.clone());
    assert_eq!(reasons(&output), [(Some(good.len() as u32), "missing_member")]);
    let kept = output.rows("rows", "hi/hi_0000");
    for (row, &member_row) in good.iter().enumerate() {
        let number = |name: &str| kept[name].as_primitive::<Int64Type>().value(row) as u64;
        let path = shards.join(column(&kept, "tar_path").unwrap().value(row));
        let bytes =
            flow_audio::decode::read_range(&Storage::default(), &path, number("offset"), number("size")).unwrap();
        assert_eq!(bytes, member("hi", "hi_0000", names.value(member_row)));
    }
    assert!(!temp.path().join("audio").exists());
}

/// The rows that a run would take for done.
fn committed(output: &Output) -> Artifact {
    let rows = output.rows("rows", "hi/hi_0000");
    Artifact::in_memory(rows.schema(), vec![("hi/hi_0000".into(), vec![rows])]).unwrap()
}

#[test]
fn files_that_went_or_changed_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let shards = temp.path().join("shards");
    let flac = member("as", "as_0000", "rec_as_0004_000.flac");
    let folder = shard_of(&shards, &[("a", &flac), ("b", &flac), ("c", &flac)]);
    let members = probed(&shards, "hi/hi_0000");
    let settings = as_is(shards, PathBuf::new());
    let done = committed(&extract(&settings, &["a", "b", "c"], members.clone()));
    let gone = || Extract::missing_outputs(&settings, &Storage::default(), &done, 2).unwrap();
    assert_eq!(gone(), BTreeMap::new());
    fs::remove_file(folder.join("b")).unwrap();
    fs::write(folder.join("c"), b"short").unwrap();
    let reason = gone().remove(&"hi/hi_0000".into()).unwrap();
    assert!(reason.contains("/b is gone (and 1 others)"), "{reason}");
    let unwatched = ExtractSettings {
        watch: false,
        ..settings.clone()
    };
    assert_eq!(
        Extract::missing_outputs(&unwatched, &Storage::default(), &done, 2).unwrap(),
        BTreeMap::new()
    );
    extract(&settings, &["a", "b", "c"], members);
    assert_eq!(gone(), BTreeMap::new());
}

#[test]
fn without_the_tar_what_was_extracted_stands_and_the_rest_is_refused() {
    let temp = tempfile::tempdir().unwrap();
    let shards = temp.path().join("shards");
    let flac = member("as", "as_0000", "rec_as_0004_000.flac");
    let wav = wav(16_000, 1, &[3; 500]);
    let folder = shard_of(&shards, &[("a", &flac), ("b", &flac), ("c.wav", &wav)]);
    let members = probed(&shards, "hi/hi_0000");
    let settings = ExtractSettings {
        store: Store::Flac,
        ..as_is(shards, PathBuf::new())
    };
    let before = extract(&settings, &["a", "c.wav"], members.clone());
    flow_kind::store::remove_source(&folder.join("hi_0000.tar")).unwrap();
    let after = extract(&settings, &["a", "c.wav"], members.clone());
    assert_eq!(after.rows("rows", "hi/hi_0000"), before.rows("rows", "hi/hi_0000"));
    // `b` was never wanted, and `a` is damaged now: there is nothing to take them from.
    let mut damaged = flac.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    fs::write(folder.join("a"), damaged).unwrap();
    let probed_before = members.clone();
    let output = extract(&settings, &["a", "b", "c.wav"], members);
    assert_eq!(reasons(&output), [(Some(0), "missing_tar"), (Some(1), "missing_tar")]);
    // A tar that somebody else took away may come back: no reason to refuse rows for good.
    fs::remove_file(folder.join("hi_0000.tar.flow-removed")).unwrap();
    let error = Harness::<Extract>::new(settings)
        .input("rows", rows_schema())
        .input("members", members_schema())
        .feed("rows", "hi/hi_0000", rows(&["a"]))
        .feed("members", "hi/hi_0000", probed_before)
        .run()
        .unwrap_err();
    assert!(error.to_string().contains("hi_0000.tar"), "{error}");
}

/// What stands already is taken; what would have to be read is refused, to be looked at again.
#[test]
fn a_tar_that_cannot_be_read_refuses_rows_and_ends_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let shards = temp.path().join("shards");
    let flac = member("as", "as_0000", "rec_as_0004_000.flac");
    let wav = wav(16_000, 1, &[3; 500]);
    let folder = shard_of(&shards, &[("a", &flac), ("b.wav", &wav)]);
    let members = probed(&shards, "hi/hi_0000");
    let settings = ExtractSettings {
        store: Store::Flac,
        ..as_is(shards, temp.path().join("audio"))
    };
    let whole = extract(&settings, &["a", "b.wav"], members.clone());
    let (tar, aside) = (folder.join("hi_0000.tar"), folder.join("aside"));
    fs::rename(&tar, &aside).unwrap();
    for make in [
        |tar: &Path| fs::create_dir(tar).unwrap(),
        |tar: &Path| std::os::unix::fs::symlink(tar, tar).unwrap(),
    ] {
        make(&tar);
        fs::remove_file(temp.path().join("audio/hi/hi_0000/b.wav.flac")).unwrap();
        let output = extract(&settings, &["a", "b.wav"], members.clone());
        let refused = reasons(&output);
        assert!(refused.contains(&(Some(1), "unreadable_file")), "{refused:?}");
        let detail = &output.rejects()[0].1.detail;
        assert!(detail.contains("hi_0000.tar"), "{detail}");
        let _ = fs::remove_dir(&tar);
        let _ = fs::remove_file(&tar);
        fs::rename(&aside, &tar).unwrap();
        let again = extract(&settings, &["a", "b.wav"], members.clone());
        assert_eq!(again.rows("rows", "hi/hi_0000"), whole.rows("rows", "hi/hi_0000"));
        fs::rename(&tar, &aside).unwrap();
    }
}

/// A change of these rows, or of the files, asks for a higher [`Kind::VERSION`].
#[test]
fn version_guards_the_output() {
    let shards = corpus("micro").join("shards");
    let members = probed(&shards, "hi/hi_0000");
    let names: Vec<String> = column(&members, "name")
        .unwrap()
        .iter()
        .flatten()
        .map(str::to_string)
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let temp = tempfile::tempdir().unwrap();
    let mut seen = Vec::new();
    for store in [Store::AsIs, Store::Flac, Store::Tar] {
        let settings = ExtractSettings {
            store,
            ..as_is(shards.clone(), temp.path().join("audio"))
        };
        let output = extract(&settings, &names, members.clone());
        let rows = output.rows("rows", "hi/hi_0000");
        for (field, column) in rows.schema().fields().iter().zip(rows.columns()) {
            seen.push(format!("{}: {column:?}", field.name()));
        }
        seen.extend(
            output
                .rejects()
                .iter()
                .map(|(_, reject)| format!("{:?} {}", reject.row, reject.reason)),
        );
    }
    let text = seen.join("\n");
    let text = text
        .replace(temp.path().to_str().unwrap(), "TEMP")
        .replace(shards.to_str().unwrap(), "SHARDS");
    assert_eq!(
        (
            Extract::VERSION,
            flow_kind::Digest::of(text.as_bytes()).short().to_string()
        ),
        (2, "5e2c929a7b7e31f3".to_string())
    );
}
