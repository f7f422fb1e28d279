//! Whole runs of toy pipelines: results, reuse, failure, logs.

mod digested;
#[path = "../failpoints/mod.rs"]
mod failpoints;
mod failures;
mod globals;
mod keep_going;
mod killed;
mod logs;
mod partitions;
mod plans;
mod reuse;
mod secrets;
mod shared_recipes;
mod spread;
#[path = "../toys/mod.rs"]
mod toys;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use arrow::array::AsArray;
use flow_base::event::{Event, Events, StageOutcome};
use flow_kind::registry::Registry;
use flow_plan::{Action, Plan};
use flow_runtime::Options;
use flow_runtime::run::{RunError, RunSummary, plan, plan_despite_refusal, run};
use flow_spec::{Checked, Overrides, check, load};
use flow_storage::Storage;
use flow_store::{Access, Store};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

/// A folder with shards, a pipeline and a state directory.
struct Place {
    dir: tempfile::TempDir,
    options: Options,
}

const PIPELINE: &str = r#"
flow: 1
params:
  shards: {required: true}
  noted: {required: true}
  out: {required: true}
  least: 3
stages:
  scan: {uses: toy.count, with: {folder: "${shards}", noted: "${noted}"}}
  probe: {uses: toy.double, from: scan, with: {by: 10, dear: true, aside: true, noted: "${noted}"}}
  clean: {uses: toy.double, from: scan, with: {least: "${least}", noted: "${noted}"}}
  both: {uses: toy.join, from: {left: clean, right: probe.rows}}
  dedup: {uses: toy.dedup, from: both, with: {noted: "${noted}"}}
  out: {uses: toy.write, from: [dedup, clean.odd], with: {folder: "${out}"}}
"#;

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("shards")).unwrap();
        let mut options = Options::new(&Storage::default(), dir.path().join("state"));
        options.workers = Some(2);
        let place = Place { dir, options };
        place.pipeline(PIPELINE);
        for shard in 0..11 {
            let lines: Vec<String> = (0..20).map(|row| ((row * 7 + shard * 3) % 40).to_string()).collect();
            place.shard(&format!("s{shard:02}"), &lines.join("\n"));
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn pipeline(&self, text: &str) {
        fs::write(self.path("pipeline.yaml"), text).unwrap();
    }

    fn shard(&self, name: &str, text: &str) {
        fs::write(self.path("shards").join(format!("{name}.txt")), text).unwrap();
    }

    fn checked(&self, set: &[&str]) -> Arc<Checked> {
        self.checked_with(&Registry::new(toys::kinds()).unwrap(), set)
    }

    fn checked_with(&self, registry: &Registry, set: &[&str]) -> Arc<Checked> {
        let mut given: Vec<String> = set.iter().map(|one| one.to_string()).collect();
        for name in ["shards", "out", "noted"] {
            if fs::read_to_string(self.path("pipeline.yaml"))
                .unwrap()
                .contains(&format!("  {name}: "))
            {
                let path = if name == "noted" {
                    self.dir.path().to_path_buf()
                } else {
                    self.path(name)
                };
                given.push(format!("{name}={}", path.display()));
            }
        }
        let overrides = Overrides {
            set: given,
            ..Overrides::default()
        };
        let pipeline = load(&self.path("pipeline.yaml"), &overrides, registry);
        let checked = check(pipeline.unwrap_or_else(|found| panic!("{found:?}")), registry);
        Arc::new(checked.unwrap_or_else(|found| panic!("{found:?}")))
    }

    fn plan(&self, set: &[&str]) -> Plan {
        plan(&self.checked(set), &self.options).unwrap()
    }

    fn try_run(&self, set: &[&str]) -> Result<RunSummary, RunError> {
        run(&self.checked(set), &self.options, &Events::default())
    }

    fn run(&self, set: &[&str]) -> RunSummary {
        let _ = fs::remove_file(self.path("work.log"));
        self.try_run(set).unwrap_or_else(|error| panic!("{error} {error:?}"))
    }

    /// What was worked on in the last run, by stage.
    fn worked(&self) -> BTreeMap<String, Vec<String>> {
        worked_in(&self.path("work.log"))
    }

    /// Every data file of the store, and every file that was exported, with its bytes.
    fn bytes(&self) -> BTreeMap<String, Vec<u8>> {
        let mut found = BTreeMap::new();
        for recipe in fs::read_dir(self.path("state/artifacts")).unwrap() {
            let recipe = recipe.unwrap().path();
            // In object storage there is no folder without files.
            for file in fs::read_dir(recipe.join("data")).into_iter().flatten() {
                let file = file.unwrap().path();
                let name = file.strip_prefix(self.path("state")).unwrap().display().to_string();
                found.insert(name, fs::read(&file).unwrap());
            }
        }
        for name in ["rows.txt", "rejects.txt"] {
            if let Ok(bytes) = fs::read(self.path("out").join(name)) {
                found.insert(name.into(), bytes);
            }
        }
        found
    }
}

/// What the kinds noted in a file of theirs: the partitions that they worked on, by stage.
fn worked_in(log: &Path) -> BTreeMap<String, Vec<String>> {
    let text = fs::read_to_string(log).unwrap_or_default();
    let mut worked: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in text.lines() {
        let (stage, partition) = line.split_once(' ').unwrap();
        worked.entry(stage.into()).or_default().push(partition.into());
    }
    worked.values_mut().for_each(|partitions| partitions.sort());
    worked
}

fn counts(plan: &Plan) -> Vec<(&str, u64, u64, u64)> {
    plan.stages
        .iter()
        .map(|stage| (stage.stage.as_str(), stage.run, stage.if_changed, stage.reuse))
        .collect()
}

fn stage<'a>(plan: &'a Plan, name: &str) -> &'a flow_plan::StagePlan {
    plan.stages.iter().find(|stage| stage.stage == name).unwrap()
}

/// What the pipeline should give, computed without the runtime.
fn expected(place: &Place, least: i64) -> String {
    let mut shards: Vec<(String, Vec<i64>)> = Vec::new();
    for file in fs::read_dir(place.path("shards")).unwrap() {
        let path = file.unwrap().path();
        let values = fs::read_to_string(&path)
            .unwrap()
            .lines()
            .map(|line| line.parse().unwrap())
            .collect();
        shards.push((path.file_stem().unwrap().to_string_lossy().into_owned(), values));
    }
    shards.sort();
    let mut seen = std::collections::BTreeSet::new();
    let (mut text, mut odd) = (String::new(), String::new());
    for (shard, values) in &shards {
        for (row, value) in values.iter().enumerate().filter(|(_, value)| **value >= least) {
            if value % 2 == 0 {
                if seen.insert(value) {
                    text.push_str(&format!("{shard} {row} {}\n", value * 12));
                }
            } else {
                odd.push_str(&format!("{shard} {row} {}\n", value * 2));
            }
        }
    }
    text + &odd
}

#[test]
fn in_flight_is_bounded() {
    for in_flight in [1, 3] {
        let mut place = Place::new();
        place.options.workers = Some(3);
        place.options.in_flight = Some(in_flight);
        place.run(&[]);
        let text = fs::read_to_string(place.path("work.log")).unwrap();
        // In the region of the source: what was read and is not yet complete in `clean`.
        let (mut ahead, mut most) = (0usize, 0);
        for line in text.lines() {
            match line.split_once(' ').unwrap().0 {
                "scan" => ahead += 1,
                "clean" => ahead -= 1,
                _ => {}
            }
            most = most.max(ahead);
        }
        assert!(most <= in_flight, "{most} in flight, {in_flight} allowed");
    }
}

/// Whichever stage refuses a row, a source, a local or a global one: the reject has the column that the binary names.
#[test]
fn rejects_are_named_by_the_column_that_the_binary_says() {
    let place = Place::new();
    place.shard("wrong", "7\nx\n9");
    let registry = Registry::new(toys::kinds()).unwrap().with_id_column("value");
    run(&place.checked_with(&registry, &[]), &place.options, &Events::default()).unwrap();
    let mut reasons = BTreeMap::new();
    for name in place.bytes().keys().filter(|name| name.contains(".rejects.")) {
        let file = fs::File::open(place.path("state").join(name)).unwrap();
        for batch in ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap() {
            let batch = batch.unwrap();
            let names: Vec<String> = batch
                .schema()
                .fields()
                .iter()
                .map(|field| field.name().clone())
                .collect();
            assert_eq!(names, ["row", "value", "reason", "class", "detail", "values"]);
            let text = |name: &str| batch[name].as_string::<i32>().clone();
            for row in 0..batch.num_rows() {
                assert!(text("value").value(row).parse::<i64>().is_ok(), "{batch:?}");
                assert_eq!(text("values").value(row), "{}");
                *reasons.entry(text("reason").value(row).to_owned()).or_insert(0) += 1;
            }
        }
    }
    let reasons: Vec<&str> = reasons.keys().map(String::as_str).collect();
    assert_eq!(reasons, ["duplicate", "not_a_number", "too_small"]);
}

#[test]
fn twins_and_inputs_of_other_partitions() {
    let place = Place::new();
    fs::create_dir(place.path("other")).unwrap();
    fs::write(place.path("other/s03.txt"), "100\n200").unwrap();
    fs::write(place.path("other/z.txt"), "1").unwrap();
    let pipeline = |slow: u64| {
        format!(
            r#"
flow: 1
params:
  shards: {{required: true}}
  noted: {{required: true}}
  out: {{required: true}}
stages:
  scan: {{uses: toy.count, with: {{folder: "${{shards}}", noted: "${{noted}}"}}}}
  other: {{uses: toy.count, with: {{folder: {}, slow: {slow}}}}}
  a: {{uses: toy.double, from: scan}}
  b: {{uses: toy.double, from: scan}}
  twins: {{uses: toy.join, from: {{left: a, right: b}}}}
  both: {{uses: toy.join, from: {{left: twins, right: other}}}}
  alone: {{uses: toy.double, from: twins}}
  out: {{uses: toy.write, from: {{a: both, b: alone, c: alone.odd}}, with: {{folder: "${{out}}"}}}}
"#,
            place.path("other").display()
        )
    };
    place.pipeline(&pipeline(0));
    place.run(&[]);
    let text = fs::read_to_string(place.path("out/rows.txt")).unwrap();
    let values: Vec<i64> = fs::read_to_string(place.path("shards/s03.txt"))
        .unwrap()
        .lines()
        .map(|line| line.parse().unwrap())
        .collect();
    for (row, value) in values.iter().enumerate().filter(|(_, value)| *value % 2 == 0) {
        let other = [100, 200].get(row).unwrap_or(&0);
        assert!(
            text.contains(&format!("s03 {row} {}\n", value * 4 + other)),
            "{row} {value}"
        );
        assert!(text.contains(&format!("s03 {row} {}\n", value * 8)), "{row} {value}");
    }
    // A source that lags behind does not make the partitions of others look left out.
    fs::remove_dir_all(place.path("state")).unwrap();
    fs::remove_dir_all(place.path("out")).unwrap();
    place.pipeline(&pipeline(50));
    place.run(&[]);
    assert_eq!(fs::read_to_string(place.path("out/rows.txt")).unwrap(), text);
    assert!(place.plan(&[]).is_empty(), "{:?}", counts(&place.plan(&[])));
}

#[test]
fn a_second_run_on_one_state_directory_is_refused() {
    let place = Place::new();
    let held = Store::open(
        &Storage::default(),
        &place.options.state,
        Access::Run { run_id: "other".into() },
    )
    .unwrap();
    let error = place.try_run(&[]).unwrap_err();
    assert_eq!(error.exit_code(), 3);
    assert!(error.to_string().contains("run other"), "{error}");
    drop(held);
    place.run(&[]);
}
