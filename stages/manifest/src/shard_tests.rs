use std::fs::{self, File};

use arrow::array::{AsArray, DictionaryArray, Float32Array, Int16Array, LargeStringArray, NullArray};
use arrow::datatypes::{Float64Type, Int8Type, UInt32Type};
use flow_storage::Storage;
use parquet::arrow::ArrowWriter;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

type Columns = Vec<(&'static str, ArrayRef)>;

fn write(path: &Path, columns: Columns) {
    let batch =
        RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, array)| (name, array, true))).unwrap();
    let mut writer = ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

fn texts(values: &[Option<&str>]) -> ArrayRef {
    Arc::new(values.iter().copied().collect::<StringArray>())
}

fn metadata(ids: &[Option<&str>]) -> Columns {
    vec![
        ("segment_id", texts(ids)),
        ("transcription_native", texts(&vec![Some("one"); ids.len()])),
        ("duration_s", Arc::new(Float64Array::from(vec![2.0; ids.len()]))),
        ("tx_quality_score", Arc::new(Float64Array::from(vec![0.9; ids.len()]))),
        ("segment_language", texts(&vec![None; ids.len()])),
    ]
}

fn index(ids: &[Option<&str>]) -> Columns {
    let members: Vec<String> = (0..ids.len()).map(|n| format!("m{n}")).collect();
    vec![
        ("segment_id", texts(ids)),
        (
            "tar_member_name",
            texts(&members.iter().map(|m| Some(m.as_str())).collect::<Vec<_>>()),
        ),
    ]
}

fn shard(metadata: Columns, index: Columns) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join(METADATA), metadata);
    write(&folder.path().join(AUDIO_INDEX), index);
    folder
}

fn read(folder: &TempDir) -> Result<Shard, Quarantine> {
    Shard::read(
        &Storage::default(),
        folder.path(),
        "hi",
        "hi_0000",
        &ShardOptions::default(),
    )
}

/// (`_row`, segment id, member) of the joined rows.
fn joined(shard: &Shard) -> Vec<(u32, String, String)> {
    let mut rows = Vec::new();
    for batch in shard.joined(2) {
        let batch = batch.unwrap();
        let text = |name: &str, row| {
            batch
                .column_by_name(name)
                .unwrap()
                .as_string::<i32>()
                .value(row)
                .to_string()
        };
        let numbers = batch.column(0).as_primitive::<UInt32Type>();
        rows.extend((0..batch.num_rows()).map(|row| {
            (
                numbers.value(row),
                text("segment_id", row),
                text("tar_member_name", row),
            )
        }));
    }
    rows
}

#[test]
fn every_metadata_row_meets_every_index_row_of_its_id_in_order() {
    let folder = shard(
        metadata(&[Some("b"), None, Some("a"), Some("x"), Some("b")]),
        index(&[Some("b"), Some("a"), None, Some("b"), Some("lone")]),
    );
    let shard = read(&folder).unwrap();
    let row = |n: u32, id: &str, member: &str| (n, id.to_string(), member.to_string());
    let expected = [
        row(0, "b", "m0"),
        row(1, "b", "m3"),
        row(3, "a", "m1"),
        row(5, "b", "m0"),
        row(6, "b", "m3"),
    ];
    assert_eq!(joined(&shard), expected);
    assert_eq!(shard.rows(), 7);
    let unjoined: Vec<(&str, u32)> = shard
        .unjoined()
        .unwrap()
        .iter()
        .map(|(reason, batch)| (*reason, batch.column(0).as_primitive::<UInt32Type>().value(0)))
        .collect();
    assert_eq!(unjoined, [("null_segment_id", 2), ("no_index_row", 4)]);
    assert_eq!(shard.index_without_metadata, ["lone"]);
}

#[test]
fn other_widths_and_dictionaries_are_read_and_a_missing_name_is_empty() {
    let mut meta = metadata(&[Some("a"), Some("b")]);
    let words: DictionaryArray<Int8Type> = vec![Some("eins"), None].into_iter().collect();
    meta[1].1 = Arc::new(words);
    meta[2].1 = Arc::new(Float32Array::from(vec![1.83, 2.0]));
    meta[3].1 = Arc::new(Int16Array::from(vec![Some(1), None]));
    meta[4].1 = Arc::new(NullArray::new(2));
    meta.push(("recording_id", Arc::new(LargeStringArray::from(vec!["r1", "r2"]))));
    meta.push(("flags", Arc::new(Int16Array::from(vec![1, 2]))));
    let mut idx = index(&[Some("a"), Some("b")]);
    idx[1].1 = texts(&[None, Some("m")]);
    idx.push(("audio_hash", texts(&[Some("h"), None])));
    let folder = shard(meta, idx);
    let shard = read(&folder).unwrap();
    let batch = shard.joined(10).next().unwrap().unwrap();
    let of = |name: &str| Arc::clone(batch.column_by_name(name).unwrap());
    assert_eq!(
        of("duration_s").as_primitive::<Float64Type>().value(0),
        1.8300000429153442
    );
    assert_eq!(of("tx_quality_score").as_primitive::<Float64Type>().value(0), 1.0);
    assert!(
        of("tx_quality_score").is_null(1) && of("transcription_native").is_null(1) && of("segment_language").is_null(0)
    );
    assert_eq!(of("transcription_native").as_string::<i32>().value(0), "eins");
    assert_eq!(of("recording_id").as_string::<i32>().value(1), "r2");
    assert_eq!(of("audio_hash").as_string::<i32>().value(0), "h");
    assert_eq!(of("tar_member_name").as_string::<i32>().value(0), "");
    assert_eq!(of("tar_path").as_string::<i32>().value(0), "hi/hi_0000/hi_0000.tar");
}

#[test]
fn a_shard_that_cannot_be_read_says_why() {
    let reason = |change: &dyn Fn(&Path)| {
        let folder = shard(metadata(&[Some("a")]), index(&[Some("a")]));
        change(folder.path());
        read(&folder).err().map(|q| (q.reason, q.detail))
    };
    let name = |found: Option<(&'static str, String)>| found.map(|(reason, _)| reason);
    assert_eq!(name(reason(&|_| {})), None);
    assert_eq!(
        name(reason(&|f| fs::remove_file(f.join(METADATA)).unwrap())),
        Some("missing_metadata")
    );
    assert_eq!(
        name(reason(&|f| fs::remove_file(f.join(AUDIO_INDEX)).unwrap())),
        Some("missing_audio_index")
    );
    assert_eq!(
        name(reason(&|f| fs::write(f.join(METADATA), b"").unwrap())),
        Some("corrupt_metadata")
    );
    assert_eq!(
        name(reason(&|f| fs::write(f.join(AUDIO_INDEX), b"PAR1").unwrap())),
        Some("corrupt_audio_index")
    );
    let without = |drop: &'static str| {
        move |f: &Path| {
            write(
                &f.join(METADATA),
                metadata(&[Some("a")]).into_iter().filter(|(n, _)| *n != drop).collect(),
            )
        }
    };
    assert_eq!(
        reason(&without("duration_s")),
        Some(("missing_column", "duration_s".into()))
    );
    let wrong = |f: &Path| {
        let mut columns = metadata(&[Some("a")]);
        columns[3].1 = texts(&[Some("0.9")]);
        write(&f.join(METADATA), columns);
    };
    assert_eq!(
        reason(&wrong),
        Some(("bad_column_type", "tx_quality_score: Utf8".into()))
    );
    let both = |f: &Path| {
        fs::remove_file(f.join(AUDIO_INDEX)).unwrap();
        without("duration_s")(f);
    };
    assert_eq!(
        name(reason(&both)),
        Some("missing_column"),
        "metadata is looked at first"
    );
    // An optional column of another type is as good as none.
    let odd = |f: &Path| {
        let mut columns = metadata(&[Some("a")]);
        columns.push(("recording_id", Arc::new(Int16Array::from(vec![7]))));
        write(&f.join(METADATA), columns);
    };
    assert_eq!(name(reason(&odd)), None);
}

#[test]
fn a_join_that_explodes_is_refused() {
    let ids = vec![Some("same"); 2000];
    let folder = shard(metadata(&ids), index(&ids));
    let refused = Shard::read(
        &Storage::default(),
        folder.path(),
        "hi",
        "x",
        &ShardOptions {
            max_rows: 100_000,
            ..ShardOptions::default()
        },
    );
    assert_eq!(refused.err().map(|q| q.reason), Some("too_many_rows"));
}

/// Stages hold the rows of a shard as a whole, and a column of texts counts its bytes in 32 bits.
#[test]
fn a_shard_of_too_much_text_is_refused() {
    let reason = |folder: &Path, max_text| {
        let options = ShardOptions {
            max_text,
            ..ShardOptions::default()
        };
        Shard::read(&Storage::default(), folder, "hi", "x", &options)
            .err()
            .map(|q| q.reason)
    };
    // 200 ids of 200 bytes in each file.
    let ids: Vec<String> = (0..200).map(|number| format!("{number:0200}")).collect();
    let ids: Vec<Option<&str>> = ids.iter().map(|id| Some(id.as_str())).collect();
    let folder = shard(metadata(&ids), index(&ids));
    assert_eq!(reason(folder.path(), 40_000), None);
    assert_eq!(reason(folder.path(), 39_999), Some("too_much_text"));
    // 100 times the same id makes 10,000 rows of 100.
    let ids = [Some("same"); 100];
    let folder = shard(metadata(&ids), index(&ids));
    assert_eq!(reason(folder.path(), 1 << 20), None);
    assert_eq!(reason(folder.path(), 39_999), Some("too_much_text"));
}

#[test]
fn only_folders_two_levels_down_are_shards() {
    let root = tempfile::tempdir().unwrap();
    let of_programs = ["__MACOSX/hi", "lost+found/1", "hi/.ipynb_checkpoints"];
    for folder in ["hi/hi_1", "hi/hi_0", "a-b/x", "a/x/deeper"].iter().chain(&of_programs) {
        fs::create_dir_all(root.path().join(folder)).unwrap();
    }
    for file in ["_SUCCESS", "hi/.listing.tmp"] {
        fs::write(root.path().join(file), b"").unwrap();
    }
    std::os::unix::fs::symlink("/etc", root.path().join("hi/out")).unwrap();
    let listing = list_shards(&Storage::default(), root.path()).unwrap();
    let names: Vec<String> = listing
        .shards
        .iter()
        .map(|(lang, shard)| format!("{lang}/{shard}"))
        .collect();
    assert_eq!(names, ["a/x", "a-b/x", "hi/hi_0", "hi/hi_1"]);
    assert_eq!(listing.links, [root.path().join("hi/out")]);
    let error = list_shards(&Storage::default(), &root.path().join("nowhere"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("nowhere"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever happens to the bytes of a file, the shard is read or put in quarantine.
    #[test]
    fn damaged_files_never_panic(cut in prop::option::of(0.0..1.0f64), flips in prop::collection::vec((0.0..1.0f64, any::<u8>()), 0..8)) {
        let folder = shard(metadata(&[Some("a"), None, Some("b")]), index(&[Some("a"), Some("b")]));
        let path = folder.path().join(METADATA);
        let mut bytes = fs::read(&path).unwrap();
        if let Some(cut) = cut {
            bytes.truncate((bytes.len() as f64 * cut) as usize);
        }
        for (at, value) in flips {
            let at = (bytes.len() as f64 * at) as usize;
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        fs::write(&path, bytes).unwrap();
        if let Ok(shard) = read(&folder) {
            for batch in shard.joined(8192) {
                prop_assert!(batch.is_ok());
            }
        }
    }
}

#[test]
fn files_that_are_there_and_cannot_be_read_are_told_from_missing_ones() {
    use std::os::unix::fs::symlink;
    let ids = [Some("a")];
    for name in [METADATA, AUDIO_INDEX] {
        let folder = shard(metadata(&ids), index(&ids));
        let path = folder.path().join(name);
        let refused = || read(&folder).err().unwrap();
        fs::remove_file(&path).unwrap();
        assert!(refused().reason.starts_with("missing_"));
        fs::create_dir(&path).unwrap();
        let quarantine = refused();
        assert_eq!(quarantine.reason, UNREADABLE);
        assert!(quarantine.detail.contains(name), "{}", quarantine.detail);
        fs::remove_dir(&path).unwrap();
        symlink(&path, &path).unwrap();
        assert_eq!(refused().reason, UNREADABLE);
        fs::remove_file(&path).unwrap();
        symlink(folder.path().join("none"), &path).unwrap();
        assert!(refused().reason.starts_with("missing_"));
    }
}
