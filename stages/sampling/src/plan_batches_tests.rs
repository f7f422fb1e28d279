use arrow::array::AsArray;
use arrow::datatypes::{Float64Type, Int64Type};
use flow_kind::event::Event;
use flow_runtime::harness::{Harness, Output};
use flow_storage::Storage;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use serde_json::Value;

use super::*;
use crate::test_data::{bundled_manifest, golden, train_rows};
use crate::write_plan::{WritePlan, WriteSettings};

fn settings(manifest: &str) -> PlanSettings {
    PlanSettings {
        manifest: golden("mini").join(manifest),
        max_batch_seconds: 12.0,
        world_size: 2,
        ..PlanSettings::default()
    }
}

fn planned(settings: PlanSettings) -> Output {
    Harness::<Plan>::new(settings).run().unwrap()
}

#[test]
fn the_manifest_is_read_planned_and_written() {
    let output = planned(settings("train_manifest_v2.parquet"));
    let batches = output.rows("batches", "epoch-000000");
    let mut rows = ManifestRows::default();
    for row in train_rows("mini") {
        rows.durations.push(row.duration);
        rows.languages.push(&row.lang).unwrap();
    }
    let packing = Packing {
        max_batch_seconds: 12.0,
        world_size: 2,
        ..Packing::default()
    };
    let expected = BatchPlan::new(&rows, &packing, 0).unwrap();
    assert_eq!(batches.num_rows(), expected.batches_per_rank() * 2);
    let lists = batches["rows"].as_list::<i32>();
    for (row, batch) in (0..2).flat_map(|rank| expected.rank(rank)).enumerate() {
        let got: Vec<u32> = lists
            .value(row)
            .as_primitive::<Int64Type>()
            .values()
            .iter()
            .map(|&n| n as u32)
            .collect();
        assert_eq!(got, batch);
    }
    let summary = output.rows("summary", "epoch-000000");
    let bytes = std::fs::read(golden("mini").join("train_manifest_v2.parquet")).unwrap();
    let digest = blake3::hash(&bytes).to_hex().to_string();
    assert_eq!(summary["manifest_digest"].as_string::<i32>().value(0), digest);
    assert!(
        output
            .events
            .iter()
            .any(|event| matches!(event, Event::StageFigures { figures, .. } if figures["padding_waste"].is_f64()))
    );

    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("plan/batches.parquet");
    let write = |out: PathBuf| {
        Harness::<WritePlan>::new(WriteSettings { out })
            .input("batches", batches_schema())
            .input("summary", summary_schema())
            .feed("batches", "epoch-000000", batches.clone())
            .feed("summary", "epoch-000000", summary.clone())
            .run()
    };
    write(out.clone()).unwrap();
    let first = std::fs::read(&out).unwrap();
    let reader = ParquetRecordBatchReaderBuilder::try_new(std::fs::File::open(&out).unwrap()).unwrap();
    let metadata = reader.metadata().file_metadata().key_value_metadata().unwrap().clone();
    assert_eq!(
        metadata
            .iter()
            .find(|pair| pair.key == "manifest_digest")
            .unwrap()
            .value
            .as_ref(),
        Some(&digest)
    );
    let fields: Vec<String> = reader
        .schema()
        .fields()
        .iter()
        .map(|field| format!("{} {}", field.name(), field.data_type()))
        .collect();
    assert_eq!(fields[..2], ["rank Int32", "batch Int32"]);
    assert!(
        matches!(reader.schema().field(2).data_type(), DataType::List(item) if item.data_type() == &DataType::Int64)
    );
    let written: usize = reader.build().unwrap().map(|batch| batch.unwrap().num_rows()).sum();
    assert_eq!(written, batches.num_rows());
    // Again: the same bytes. Another plan beside it takes nothing away.
    write(out.clone()).unwrap();
    assert_eq!(std::fs::read(&out).unwrap(), first);
    write(temp.path().join("plan/other.parquet")).unwrap();
    assert_eq!(std::fs::read(&out).unwrap(), first);
    assert!(out.with_file_name("other.parquet.flow.json").is_file());
}

/// What the screen shows, and the port `languages`, for the chosen balance and the other one.
#[test]
fn both_ways_to_balance_are_shown_and_the_chosen_one_is_told_on() {
    for (balance, names) in [
        (Balance::Order, ["order", "quota"]),
        (Balance::Quota, ["quota", "order"]),
    ] {
        let output = planned(PlanSettings {
            balance,
            world_size: 1,
            ..settings("train_manifest_v2.parquet")
        });
        let figures = |name: &str| {
            let of = |event: &Event| match event {
                Event::StageFigures { figures, .. } => figures.pointer(name).cloned(),
                _ => None,
            };
            output.events.iter().filter_map(of).collect::<Vec<_>>()
        };
        let tables = figures("/table/rows");
        assert_eq!(tables.len(), 2);
        assert_eq!(tables[0][0][0], format!("{} (chosen)", names[0]));
        assert_eq!(tables[0][1][0], names[1]);
        // The texts of this manifest were measured.
        assert!(tables[0][0][8].as_str().unwrap().ends_with(" %"));
        let columns = &figures("/table/columns")[1];
        assert_eq!(
            (&columns[4], &columns[5]),
            (&Value::from(names[0]), &Value::from(names[1]))
        );

        let languages = output.rows("languages", "epoch-000000");
        assert_eq!((languages.num_rows(), tables[1].as_array().unwrap().len()), (13, 13));
        let float = |name: &str| languages[name].as_primitive::<Float64Type>().values().to_vec();
        let (held, emitted) = (float("seconds"), float("seconds_in_batches"));
        if balance == Balance::Order {
            let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-9;
            assert!(held.iter().zip(&emitted).all(near));
            continue;
        }
        let sum: f64 = held.iter().map(|seconds| seconds.powf(0.3)).sum();
        let total: f64 = held.iter().sum();
        let in_batches: f64 = emitted.iter().sum();
        for (row, (held, emitted)) in held.iter().zip(&emitted).enumerate() {
            let quota = total * held.powf(0.3) / sum;
            assert!((emitted - quota).abs() <= 20.0, "{row}: {emitted} s, {quota} s");
            assert_eq!(tables[1][row][4], format!("{:.2} %", emitted / in_batches * 100.0));
        }
    }
}

#[test]
fn token_boundaries_need_texts_and_split_the_buckets() {
    let with_edges = |token_boundaries: Vec<u32>| PlanSettings {
        token_boundaries,
        ..settings("train_manifest_v2.parquet")
    };
    let waste = |settings: PlanSettings| {
        let of = |event: &Event| match event {
            Event::StageFigures { figures, .. } => figures["text_padding_waste"].as_f64(),
            _ => None,
        };
        planned(settings).events.iter().find_map(of).unwrap()
    };
    assert!(waste(with_edges(vec![20, 25, 30])) < waste(with_edges(Vec::new())) - 0.05);
    let wrong = Harness::<Plan>::new(with_edges(vec![30, 20])).run().unwrap_err();
    assert!(
        matches!(&wrong, StageError::Setting { path, .. } if path == "token_boundaries"),
        "{wrong}"
    );
    let without_texts = PlanSettings {
        manifest: golden("sampler_synth").join("input.parquet"),
        ..with_edges(vec![20])
    };
    let wrong = Harness::<Plan>::new(without_texts).run().unwrap_err();
    assert!(
        matches!(&wrong, StageError::Setting { path, .. } if path == "token_boundaries"),
        "{wrong}"
    );
}

#[test]
fn too_few_rows_give_an_empty_plan_and_a_warning() {
    let output = planned(PlanSettings {
        world_size: 8,
        grad_accum: 4,
        max_batch_seconds: 90.0,
        ..settings("train_manifest_v2.parquet")
    });
    assert_eq!(output.rows("batches", "epoch-000000").num_rows(), 0);
    assert!(
        output
            .events
            .iter()
            .any(|event| matches!(event, Event::Warning { message, .. } if message.contains("max_batch_seconds")))
    );
}

#[test]
fn wrong_manifests_and_settings_are_named() {
    let error = Harness::<Plan>::new(settings("no_such.parquet")).run().unwrap_err();
    assert!(
        matches!(&error, StageError::Setting { path, .. } if path == "manifest"),
        "{error}"
    );
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("rows.parquet");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    let error = Harness::<Plan>::new(PlanSettings {
        manifest: pipe,
        ..PlanSettings::default()
    });
    let error = error.run().unwrap_err();
    assert!(
        error.to_string().contains("it is a pipe, not a regular file"),
        "{error}"
    );
    let error = Harness::<Plan>::new(settings("report.json")).run().unwrap_err();
    assert!(error.to_string().contains("report.json"), "{error}");
    let error = Harness::<Plan>::new(settings("decisions.parquet")).run().unwrap_err();
    assert!(error.to_string().contains("duration"), "{error}");
    let wrong = PlanSettings {
        temperature: f64::NAN,
        ..settings("train_manifest_v2.parquet")
    };
    let error = Harness::<Plan>::new(wrong).run().unwrap_err();
    assert!(
        matches!(&error, StageError::Setting { path, .. } if path == "temperature"),
        "{error}"
    );
    assert!(Harness::<Plan>::new(PlanSettings::default()).run().is_err());
    let temp = tempfile::tempdir().unwrap();
    let mut bytes = std::fs::read(golden("mini").join("train_manifest_v2.parquet")).unwrap();
    let middle = bytes.len() / 3;
    bytes[middle..middle + 400].fill(0xa5);
    let damaged = temp.path().join("damaged.parquet");
    std::fs::write(&damaged, bytes).unwrap();
    // Either the damage hit a column that is not read, or it is an error that names the file.
    if let Err(error) = ManifestRows::from_file(&Storage::default(), &damaged) {
        assert!(error.to_string().contains("damaged.parquet"), "{error}");
    }
}

/// A change of these rows asks for a higher [`Kind::VERSION`].
#[test]
fn version_guards_the_output() {
    let output = planned(PlanSettings {
        manifest: bundled_manifest("mini"),
        ..settings("")
    });
    let ports = ["batches", "summary", "languages"];
    let rows = format!("{:?}", ports.map(|port| output.rows(port, "epoch-000000")));
    assert_eq!(
        (Plan::VERSION, blake3::hash(rows.as_bytes()).to_hex().as_str()),
        (2, "0e24dae3b36e33d9342e9f8418443cc8b9a3607c71e026a8fbb582e4adc4e53f")
    );
}
