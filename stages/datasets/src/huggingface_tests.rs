use std::fs::{self, File};

use flow_corpus::ReadSettings;
use flow_kind::event::Events;
use flow_layouts::read::Read;
use flow_runtime::harness::Harness;
use flow_storage::Storage;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::*;
use crate::settings::DatasetFormat;

fn layout(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../layouts/tests/data/layouts")
        .join(name)
}

fn parquet(path: &Path) -> ParquetRecordBatchReaderBuilder<File> {
    ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap()
}

/// Whatever the limits, the rows and their order are the same.
#[test]
fn files_and_row_groups_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = folder.path().join("all.jsonl");
    let line = |number: usize| {
        let file = layout(["wav/a.flac", "wav/b.flac"][number % 2]);
        json!({ "audio_filepath": file, "text": format!("words {number}"), "lang": "hi", "segment_id": format!("r{number:02}") }).to_string()
    };
    fs::write(&manifest, (0..23).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    let settings_of_rows = ReadSettings {
        manifest: manifest.to_str().unwrap().into(),
        ..ReadSettings::default()
    };
    let rows = Harness::<Read>::new(settings_of_rows).run().unwrap();
    let schema = rows.shape.outputs[0].schema.clone();
    let parts = rows
        .partitions
        .iter()
        .map(|partition| (partition.clone(), vec![rows.rows("rows", partition.as_str())]));
    let artifact = Artifact::in_memory(schema, parts.collect()).unwrap();
    let settings = DatasetSettings {
        format: DatasetFormat::HuggingFace,
        shards: String::new(),
        license: String::new(),
        audio_of_rows: AudioOfRows::Embed,
        shard_rows: 1,
        max_unreadable: 0.5,
        max_shrink: 0.5,
        allow_empty: false,
        extra_columns: Vec::new(),
    };
    let one = fs::metadata(layout("wav/b.flac")).unwrap().len() as usize;
    for (number, (file_seconds, group_rows, group_bytes, files)) in [
        (1e9, 100, 1 << 30, 1),
        (4.0, 100, 1 << 30, 4),
        (1e9, 5, 1 << 30, 1),
        (1e9, 100, 3 * one, 1),
        (0.1, 1, 1, 23),
    ]
    .into_iter()
    .enumerate()
    {
        let limits = Limits {
            file_seconds,
            group_rows,
            group_bytes,
            read_rows: 3,
            read_seconds: 2.0,
        };
        let out = folder.path().join(number.to_string());
        let mut set = ExportSet::begin(
            &Storage::default(),
            &out,
            "flow.json",
            flow_kind::Digest::of(b""),
            "run",
            folder.path(),
        )
        .unwrap();
        let writing = Writing {
            stage: "write",
            storage: &Storage::default(),
            events: &Events::default(),
            stop: &|| false,
        };
        write_with_limits(&settings, &[("train", &artifact)], &mut set, &writing, limits).unwrap();
        set.finish().unwrap();
        let mut texts = Vec::new();
        for at in 0..files {
            let file = parquet(&out.join(format!("data/train-{at:05}-of-{files:05}.parquet")));
            for group in file.metadata().row_groups() {
                assert!(group.num_rows() as usize <= group_rows, "{number}");
                let bytes = group.column(0).uncompressed_size() as usize;
                assert!(
                    group.num_rows() == 1 || bytes <= group_bytes + 1000,
                    "{number}: {bytes}"
                );
            }
            for batch in file.build().unwrap() {
                let batch = batch.unwrap();
                texts.extend(
                    columns::text(&batch, "text")
                        .unwrap()
                        .iter()
                        .map(|text| text.unwrap().to_owned()),
                );
            }
        }
        assert_eq!(
            texts,
            (0..23).map(|number| format!("words {number}")).collect::<Vec<_>>(),
            "{number}"
        );
    }
}

#[test]
fn recordings_beyond_two_gigabytes_are_refused_before_they_are_read() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(3 << 30).unwrap();
    for range in [None, Some((0, 3 << 30))] {
        let place = RowPlace {
            path: file.path().to_owned(),
            range,
            start: None,
        };
        let error = place.stored_bytes(&Storage::default()).unwrap_err().to_string();
        assert!(error.contains("3221225472 bytes"), "{error}");
    }
}
