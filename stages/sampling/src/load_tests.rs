use std::collections::{BTreeMap, BTreeSet};

use arrow::array::{ArrayRef, AsArray, Float64Array, Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Float32Type, Float64Type, Int32Type, Schema, SchemaRef};
use flow_kind::event::Event;
use flow_kind::{ProcessShare, ROW};
use flow_runtime::harness::{Harness, Output};

use super::*;
use crate::plan::BatchPlan;
use crate::test_data::{corpus, golden};

/// The golden train rows of micro, by partition.
struct Train {
    rows: BTreeMap<String, Vec<TrainRow>>,
}

type TrainRow = (String, String, f64, String, String);

fn train() -> Train {
    #[derive(serde::Deserialize)]
    struct Row {
        segment_id: String,
        text: String,
        duration: f64,
        lang: String,
        tar_member_name: String,
        tar_path: String,
    }
    let text = std::fs::read_to_string(golden("micro").join("train_manifest_v2.jsonl")).unwrap();
    let mut train = Train { rows: BTreeMap::new() };
    for line in text.lines() {
        let row: Row = serde_json::from_str(line).unwrap();
        let parts: Vec<&str> = row.tar_path.split('/').collect();
        let rows = train.rows.entry(format!("{}/{}", parts[1], parts[2])).or_default();
        rows.push((row.segment_id, row.text, row.duration, row.lang, row.tar_member_name));
    }
    train
}

fn rows_schema() -> SchemaRef {
    let field = |name: &str, data_type| Field::new(name, data_type, false);
    Arc::new(Schema::new(vec![
        field(ROW, DataType::UInt32),
        field("segment_id", DataType::Utf8),
        field("text", DataType::Utf8),
        field("duration", DataType::Float64),
        field("lang", DataType::Utf8),
        field("tar_member_name", DataType::Utf8),
    ]))
}

fn members_schema() -> SchemaRef {
    flow_shards::probe::members_schema()
}

impl Train {
    fn batches(&self) -> Vec<(String, RecordBatch)> {
        let batch = |rows: &Vec<(String, String, f64, String, String)>| {
            let text = |of: fn(&(String, String, f64, String, String)) -> &String| -> ArrayRef {
                Arc::new(StringArray::from_iter_values(rows.iter().map(of)))
            };
            let columns: Vec<ArrayRef> = vec![
                Arc::new(UInt32Array::from_iter_values(0..rows.len() as u32)),
                text(|row| &row.0),
                text(|row| &row.1),
                Arc::new(Float64Array::from_iter_values(rows.iter().map(|row| row.2))),
                text(|row| &row.3),
                text(|row| &row.4),
            ];
            RecordBatch::try_new(rows_schema(), columns).unwrap()
        };
        self.rows
            .iter()
            .map(|(partition, rows)| (partition.clone(), batch(rows)))
            .collect()
    }
}

fn settings() -> LoadSettings {
    let shards = corpus("micro").join("shards");
    LoadSettings {
        shards,
        steps: 4,
        ranks: 2,
        grad_accum: 2,
        max_batch_seconds: 8.0,
        ..LoadSettings::default()
    }
}

fn probed() -> Output {
    use flow_shards::probe::{AudioFrom, Probe, ProbeSettings};
    let settings = ProbeSettings {
        shards: corpus("micro").join("shards"),
        audio_from: AudioFrom::Tar,
        formats: vec![flow_audio::format::Format::Flac],
    };
    Harness::<Probe>::new(settings).threads(2).run().unwrap()
}

/// `change` may spoil the members of a partition.
fn harness(
    settings: LoadSettings,
    change: impl Fn(&str, RecordBatch) -> RecordBatch,
) -> (Harness<Load>, tempfile::TempDir) {
    let temp = tempfile::tempdir().unwrap();
    let mut harness = Harness::<Load>::new(settings).threads(2).scratch(temp.path());
    harness = harness.input("rows", rows_schema()).input("members", members_schema());
    for (partition, batch) in train().batches() {
        harness = harness.feed("rows", &partition, batch);
    }
    let probed = probed();
    for partition in &probed.partitions {
        harness = harness.feed(
            "members",
            partition.as_str(),
            change(partition.as_str(), probed.rows("members", partition.as_str())),
        );
    }
    (harness, temp)
}

#[test]
fn every_step_holds_the_planned_utterances_with_their_samples() {
    let settings = settings();
    let (harness, _temp) = harness(settings.clone(), |_, batch| batch);
    let output = harness.run().unwrap();
    assert_eq!(output.partitions.len(), 4);
    let train: Vec<_> = train().rows.into_values().flatten().collect();
    let mut rows = crate::manifest_rows::ManifestRows::default();
    train.iter().for_each(|row| rows.languages.push(&row.3).unwrap());
    rows.durations = train.iter().map(|row| row.2).collect();
    let mut number = 0;
    for epoch in 0.. {
        let plan = BatchPlan::new(&rows, &settings.packing(), epoch).unwrap();
        for in_epoch in 0..plan.batches_per_rank() / 2 {
            if number == 4 {
                return;
            }
            let loaded = output.rows("batches", &step_name(number));
            let mut at = 0;
            for (rank, micro) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                for &row in plan.batch(rank, in_epoch * 2 + micro).unwrap() {
                    let expected = &train[row as usize];
                    let int = |name: &str| loaded[name].as_primitive::<Int32Type>().value(at);
                    let text = |name: &str| loaded[name].as_string::<i32>().value(at);
                    assert_eq!(
                        (int("rank"), int("micro"), int("epoch")),
                        (rank as i32, micro as i32, epoch as i32)
                    );
                    assert_eq!(
                        (text("segment_id"), text("text"), text("lang")),
                        (&*expected.0, &*expected.1, &*expected.3)
                    );
                    let signal = loaded["signal"].as_list::<i32>().value(at);
                    let signal = signal.as_primitive::<Float32Type>();
                    // The manifest's duration is within 0.1 s of the audio's.
                    assert!((signal.len() as f64 / 16_000.0 - expected.2).abs() <= 0.1 + 1e-4);
                    assert!(signal.values().iter().any(|sample| sample.abs() > 1e-3));
                    at += 1;
                }
            }
            assert_eq!(loaded.num_rows(), at);
            number += 1;
        }
    }
}

/// Rank and number of the micro-batch, segment, samples, seconds.
type LoadedRow = (i32, i32, String, usize, f64);

fn loaded_rows(output: &Output, step: u64) -> Vec<LoadedRow> {
    let rows = output.rows("batches", &step_name(step));
    let int = |name: &str, at: usize| rows[name].as_primitive::<Int32Type>().value(at);
    (0..rows.num_rows())
        .map(|at| {
            (
                int("rank", at),
                int("micro", at),
                rows["segment_id"].as_string::<i32>().value(at).to_owned(),
                rows["signal"].as_list::<i32>().value(at).len(),
                rows["duration"].as_primitive::<Float64Type>().value(at),
            )
        })
        .collect()
}

/// Of two processes with a rank each, one row with its seconds represents each micro-batch of the other.
#[test]
fn a_process_loads_the_micro_batches_of_its_ranks() {
    let (harness_of_all, _temp) = harness(settings(), |_, batch| batch);
    let whole = harness_of_all.run().unwrap();
    for process in 0..2 {
        let (harness, _temp) = harness(settings(), |_, batch| batch);
        let share = ProcessShare { process, processes: 2 };
        let output = harness.share(share).run().unwrap();
        for step in 0..4 {
            let mut expected: Vec<LoadedRow> = Vec::new();
            for row in loaded_rows(&whole, step) {
                if row.0 == process as i32 {
                    expected.push(row);
                    continue;
                }
                match expected.last_mut() {
                    Some(last) if (last.0, last.1) == (row.0, row.1) => last.4 += row.4,
                    _ => expected.push((row.0, row.1, String::new(), 1, row.4)),
                }
            }
            assert_eq!(loaded_rows(&output, step), expected, "process {process}, step {step}");
        }
    }
}

#[test]
fn speeds_are_drawn_anew_in_each_epoch_and_the_same_in_each_run() {
    let of = |speeds: &[f64]| -> Vec<(i32, String, usize)> {
        let (harness, _temp) = harness(
            LoadSettings {
                speeds: speeds.to_vec(),
                steps: 40,
                ..settings()
            },
            |_, batch| batch,
        );
        let output = harness.run().unwrap();
        let mut found = Vec::new();
        for number in 0..40 {
            let rows = output.rows("batches", &step_name(number));
            for at in 0..rows.num_rows() {
                found.push((
                    rows["epoch"].as_primitive::<Int32Type>().value(at),
                    rows["segment_id"].as_string::<i32>().value(at).to_owned(),
                    rows["signal"].as_list::<i32>().value(at).len(),
                ));
            }
        }
        found
    };
    let (plain, slow, mixed) = (of(&[1.0]), of(&[0.8]), of(&[0.8, 1.0]));
    assert_eq!(mixed, of(&[0.8, 1.0]));
    let mut drawn = BTreeMap::<&str, BTreeSet<bool>>::new();
    let mut slowed = 0;
    for ((plain, slow), mixed) in plain.iter().zip(&slow).zip(&mixed) {
        assert_eq!((plain.0, &plain.1), (mixed.0, &mixed.1));
        assert_eq!(slow.2, (plain.2 * 10).div_ceil(8), "played at 0.8, {} samples", plain.2);
        assert!(mixed.2 == plain.2 || mixed.2 == slow.2);
        drawn.entry(&plain.1).or_default().insert(mixed.2 == slow.2);
        slowed += usize::from(mixed.2 == slow.2);
    }
    assert!(
        (0.3..0.7).contains(&(slowed as f64 / plain.len() as f64)),
        "{slowed} of {}",
        plain.len()
    );
    assert!(
        drawn.values().any(|speeds| speeds.len() == 2),
        "the same speed in every epoch"
    );
}

#[test]
fn a_broken_recording_is_left_out_and_told() {
    let spoil = |partition: &str, batch: RecordBatch| {
        if partition != "en/en_0000" {
            return batch;
        }
        // As if the tar had changed: every member of one shard lies elsewhere.
        let mut columns = batch.columns().to_vec();
        let position = batch.schema().index_of("offset").unwrap();
        columns[position] = Arc::new(Int64Array::from(vec![1; batch.num_rows()]));
        RecordBatch::try_new(batch.schema(), columns).unwrap()
    };
    let whole = harness(settings(), |_, batch| batch).0.run().unwrap();
    let output = harness(settings(), spoil).0.run().unwrap();
    // Each planned row is there, a broken one without samples.
    let rows = |output: &Output| -> Vec<(String, usize)> {
        let steps = (0..4).map(|step| output.rows("batches", &step_name(step)));
        steps
            .flat_map(|rows| {
                let segment = |at| rows["segment_id"].as_string::<i32>().value(at).to_owned();
                let samples = |at| rows["signal"].as_list::<i32>().value_length(at) as usize;
                (0..rows.num_rows())
                    .map(|at| (segment(at), samples(at)))
                    .collect::<Vec<_>>()
            })
            .collect()
    };
    let spoilt: BTreeSet<String> = train()
        .batches()
        .iter()
        .filter(|(partition, _)| *partition == "en/en_0000")
        .flat_map(|(_, batch)| {
            batch["segment_id"]
                .as_string::<i32>()
                .iter()
                .flatten()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .collect();
    let mut broken = 0;
    for (before, after) in rows(&whole).into_iter().zip(rows(&output)) {
        assert_eq!(before.0, after.0);
        assert!(before.1 > 0);
        if spoilt.contains(&before.0) && after.1 == 0 {
            broken += 1;
        } else {
            assert_eq!(before.1, after.1);
        }
    }
    assert!(broken > 0 && rows(&whole).len() == rows(&output).len());
    let warned = |event: &Event| matches!(event, Event::Warning { message, .. } if message.contains("left out") && message.contains("rec_en_"));
    assert!(output.events.iter().any(warned));
    // `flow rejects` finds each of these warnings by its figures.
    let messages = |of: &dyn Fn(&Event) -> Option<String>| output.events.iter().filter_map(of).collect::<Vec<String>>();
    let warnings = messages(&|event| match event {
        Event::Warning { message, .. } if message.contains("left out") => Some(message.clone()),
        _ => None,
    });
    let figures = messages(&|event| match event {
        Event::StageFigures { figures, .. } => figures["left_out"]["warning"].as_str().map(str::to_string),
        _ => None,
    });
    assert_eq!(figures, warnings);
    // The first of the four steps is 1.
    let is_of = |event: &Event, step: u64| matches!(event, Event::Warning { message, .. } if message.starts_with(&format!("step {step}: ")));
    let told = |step| output.events.iter().any(|event| is_of(event, step));
    let lost = |step: u64| {
        let rows = output.rows("batches", &step_name(step - 1));
        (0..rows.num_rows()).any(|at| rows["signal"].as_list::<i32>().value_length(at) == 0)
    };
    for step in 1..=4 {
        assert_eq!(told(step), lost(step), "step {step}");
    }
    let all_spoilt = |_: &str, batch: RecordBatch| spoil("en/en_0000", batch);
    // A step of which nothing could be loaded is for training to skip.
    let nothing = harness(settings(), all_spoilt).0.run().unwrap();
    assert_eq!(rows(&nothing).len(), rows(&whole).len());
    assert!(rows(&nothing).iter().all(|(_, samples)| *samples == 0));
}

#[test]
fn a_larger_sample_holds_a_smaller_one() {
    let schema = rows_schema();
    let parts = train()
        .batches()
        .into_iter()
        .map(|(partition, batch)| (Partition::new(partition), vec![batch]))
        .collect();
    let rows = flow_kind::Artifact::in_memory(schema, parts).unwrap();
    let members = flow_kind::Artifact::empty(members_schema());
    let sample = |count: u64| -> Vec<String> {
        let data = Dataset::read(&rows, Some(&members), "shards".as_ref(), Some(count)).unwrap();
        (0..data.len() as u32)
            .map(|row| data.utterance(row).unwrap().segment_id.to_owned())
            .collect()
    };
    let (ten, thirty, all) = (sample(10), sample(30), sample(10_000));
    assert_eq!((ten.len(), thirty.len()), (10, 30));
    assert_eq!(
        all,
        train()
            .rows
            .values()
            .flatten()
            .map(|row| row.0.clone())
            .collect::<Vec<_>>()
    );
    // In manifest order, each within the next.
    let mut rest = thirty.iter();
    assert!(ten.iter().all(|id| rest.any(|other| other == id)));
    let mut rest = all.iter();
    assert!(thirty.iter().all(|id| rest.any(|other| other == id)));
}

#[test]
fn a_rank_without_batches_is_refused() {
    let wide = LoadSettings {
        ranks: 8,
        grad_accum: 4,
        max_batch_seconds: 90.0,
        ..settings()
    };
    let error = harness(wide, |_, batch| batch).0.run().unwrap_err();
    assert!(
        matches!(&error, StageError::Refused { help: Some(help), .. } if help.contains("max_batch_seconds")),
        "{error}"
    );
}

#[test]
fn where_no_row_is_left_the_commonest_reject_is_named() {
    let temp = tempfile::tempdir().unwrap();
    let mut harness = Harness::<Load>::new(settings())
        .scratch(temp.path())
        .input("rows", rows_schema())
        .input("members", members_schema())
        .feed("rows", "hi/hi_0000", RecordBatch::new_empty(rows_schema()))
        .empty_partition("members", "hi/hi_0000");
    for (row, reason) in (0..).zip(["quality_too_low", "duration_too_long", "duration_too_long"]) {
        let reject = flow_kind::Reject {
            row: Some(row),
            id: None,
            reason: reason.into(),
            class: flow_kind::RejectClass::Rule,
            detail: String::new(),
            values: String::new(),
        };
        harness = harness.rejected("cleaned", "hi/hi_0000", reject);
    }
    let error = harness.run().unwrap_err();
    assert!(matches!(&error, StageError::Refused { .. }), "{error}");
    let error = error.to_string();
    for part in [
        "no rows to train on",
        "3 were refused",
        "`duration_too_long` of stage cleaned, 2 times",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn an_empty_micro_batch_still_takes_part() {
    let batch = micro_batch(7, 1, 2, 3, &[], 0.0).unwrap();
    assert_eq!(
        (batch.num_rows(), batch["segment_id"].as_string::<i32>().value(0)),
        (1, "")
    );
    assert_eq!(
        batch["signal"]
            .as_list::<i32>()
            .value(0)
            .as_primitive::<Float32Type>()
            .values()[..],
        [0.0]
    );
    assert_eq!(batch["rank"].as_primitive::<Int32Type>().value(0), 1);
}

#[test]
fn what_is_missing_is_said_before_the_run() {
    let shape = |settings: LoadSettings, members: bool| {
        let harness = Harness::<Load>::new(settings).input("rows", rows_schema());
        match members {
            true => harness.input("members", members_schema()).shape(),
            false => harness.shape(),
        }
    };
    let error = shape(settings(), false).unwrap_err();
    assert!(error.to_string().contains("where the audio is"), "{error}");
    assert!(Harness::<Load>::new(settings()).shape().is_err());
    assert!(shape(LoadSettings { steps: 0, ..settings() }, true).is_err());
    let no_folder = LoadSettings {
        shards: PathBuf::new(),
        ..settings()
    };
    let error = shape(no_folder, true).unwrap_err();
    assert!(
        matches!(&error, StageError::Setting { path, .. } if path == "shards"),
        "{error}"
    );
    assert!(shape(settings(), true).is_ok());
}

/// Every step says its stage, holds rows of that stage only, and is the same whatever the number of threads.
#[test]
fn a_curriculum_grows_in_stages() {
    let of = |threads: usize| -> Vec<RecordBatch> {
        let (harness, _temp) = harness(
            LoadSettings {
                steps: 12,
                curriculum: ["40", "80", "all"].map(|size| size.parse().unwrap()).to_vec(),
                curriculum_steps: vec![4, 4],
                speeds: vec![0.9, 1.1],
                ..settings()
            },
            |_, batch| batch,
        );
        let output = harness.threads(threads).run().unwrap();
        (0..12).map(|step| output.rows("batches", &step_name(step))).collect()
    };
    let steps = of(1);
    assert_eq!(steps, of(3));
    let mut seen: Vec<BTreeMap<String, String>> = vec![BTreeMap::new(); 3];
    for (number, rows) in steps.iter().enumerate() {
        let stage = number / 4;
        for at in 0..rows.num_rows() {
            assert_eq!(rows["stage"].as_string::<i32>().value(at), ["40", "80", "all"][stage]);
            let end = rows["stage_end"]
                .as_primitive::<arrow::datatypes::Int64Type>()
                .value(at);
            assert_eq!(end, [4, 8, 12][stage]);
            let text = |name: &str| rows[name].as_string::<i32>().value(at).to_owned();
            seen[stage].insert(text("segment_id"), text("lang"));
        }
    }
    let limits = [40, 80, usize::MAX];
    for (seen, limit) in seen.iter().zip(limits) {
        assert!(!seen.is_empty() && seen.len() <= limit);
    }
    // A stage has rows of all languages.
    let languages = |stage: usize| seen[stage].values().collect::<std::collections::BTreeSet<_>>().len();
    assert!(languages(0) > 5, "{:?}", seen[0]);
    // Without a curriculum nothing is said of stages.
    let (harness, _temp) = harness(settings(), |_, batch| batch);
    let output = harness.run().unwrap();
    assert!(output.rows("batches", &step_name(0)).column_by_name("stage").is_none());
}

#[test]
fn signals_are_augmented_up_to_a_step_and_rows_stay_as_they_are() {
    let rows = |settings: LoadSettings| -> Vec<(i32, String, Vec<f32>)> {
        let (harness, _temp) = harness(settings, |_, batch| batch);
        let output = harness.run().unwrap();
        let mut found = Vec::new();
        for number in 0..6 {
            let rows = output.rows("batches", &step_name(number));
            for at in 0..rows.num_rows() {
                let signal = rows["signal"].as_list::<i32>().value(at);
                found.push((
                    number as i32,
                    rows["segment_id"].as_string::<i32>().value(at).to_owned(),
                    signal.as_primitive::<Float32Type>().values().to_vec(),
                ));
            }
        }
        found
    };
    let augment: Vec<Step> = serde_json::from_value(json!([{"gain": {"prob": 1}}])).unwrap();
    let with = |augment_steps| LoadSettings {
        augment: augment.clone(),
        augment_steps,
        steps: 6,
        ..settings()
    };
    let plain = rows(LoadSettings { steps: 6, ..settings() });
    let all = rows(with(None));
    let some = rows(with(Some(3)));
    assert_eq!(all, rows(with(None)));
    for ((plain, all), some) in plain.iter().zip(&all).zip(&some) {
        assert_eq!((plain.0, &plain.1, plain.2.len()), (all.0, &all.1, all.2.len()));
        assert!(plain.2 != all.2 || plain.2.iter().all(|x| *x == 0.0));
        assert_eq!(some.2, if plain.0 < 3 { &all.2 } else { &plain.2 }.clone());
    }
    // Nothing of it is in the identity of batches without.
    let keys = |settings: &LoadSettings| Load::identity(settings).to_string();
    assert!(!keys(&settings()).contains("augment"));
    assert!(keys(&with(Some(3))).contains("augment_steps"));
}
