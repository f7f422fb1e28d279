//! A lookup table joined with the rows of shards; and runs of some shards only, and after failures.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use arrow::array::{Array, AsArray};
use arrow::datatypes::Int64Type;
use serde_json::Value;

use crate::binary::{Workplace, expect_code, program, read_parquet, stderr};

/// Segments of the pipeline's last stage, each with the age of its speaker: of the artifact that holds the column `age`.
fn ages(state: &Path) -> BTreeMap<String, Option<i64>> {
    let mut ages = BTreeMap::new();
    for artifact in fs::read_dir(state.join("artifacts")).unwrap() {
        let Ok(files) = fs::read_dir(artifact.unwrap().path().join("data")) else {
            continue;
        };
        for file in files {
            let path = file.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "parquet") {
                continue;
            }
            for batch in read_parquet(&path) {
                let (Some(ids), Some(age)) = (batch.column_by_name("segment_id"), batch.column_by_name("age")) else {
                    continue;
                };
                let (ids, age) = (ids.as_string::<i32>(), age.as_primitive::<Int64Type>());
                for row in 0..batch.num_rows() {
                    let age = age.is_valid(row).then(|| age.value(row));
                    ages.insert(ids.value(row).to_string(), age);
                }
            }
        }
    }
    ages
}

fn pipeline(place: &Workplace) -> std::path::PathBuf {
    let path = place.path("pipeline.yaml");
    fs::write(
        &path,
        r#"
flow: 1
params:
  shards: {required: true}
  out: unused
  speakers: {required: true}
stages:
  scan: {uses: manifest.scan, with: {shards: "${shards}"}}
  speakers: {uses: manifest.table, with: {path: "${speakers}", columns: {segment: text, age: int64}}}
  named:
    uses: sql
    from: {rows: scan, speakers: speakers}
    with:
      whole: [speakers]
      query: SELECT rows.*, speakers.age FROM rows LEFT JOIN speakers ON rows.segment_id = speakers.segment
"#,
    )
    .unwrap();
    path
}

/// The setting that names the table.
fn speakers_table(place: &Workplace) -> String {
    format!("speakers={}", place.path("speakers.csv").display())
}

fn run(place: &Workplace, more: &[&str]) -> std::process::Output {
    let pipeline = pipeline(place);
    let mut command = place.command("run", pipeline.to_str().unwrap(), &[&speakers_table(place)]);
    command.args(more).output().unwrap()
}

/// The stages that `flow plan --json` names, with what it says of each.
fn planned(place: &Workplace, pipeline: &Path, settings: &[&str], more: &[&str]) -> BTreeMap<String, Value> {
    let mut command = place.command("plan", pipeline.to_str().unwrap(), settings);
    let output = command.arg("--json").args(more).output().unwrap();
    expect_code(&output, 0);
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    let stages = plan["stages"].as_array().unwrap();
    let named = |stage: &Value| (stage["stage"].as_str().unwrap().to_owned(), stage.clone());
    stages.iter().map(named).collect()
}

/// Some segments of the corpus, by a run without any speaker.
fn segments(place: &Workplace) -> Vec<String> {
    fs::write(place.path("speakers.csv"), "segment,age\n").unwrap();
    expect_code(&run(place, &[]), 0);
    ages(&place.path("state"))
        .into_keys()
        .filter(|id| !id.is_empty())
        .collect()
}

#[test]
fn speakers_are_joined_with_the_rows_of_all_shards() {
    let place = Workplace::bundled("micro");
    let segments = segments(&place);
    assert!(segments.len() > 20, "{segments:?}");
    fs::remove_dir_all(place.path("state")).unwrap();
    let (first, last) = (&segments[0], &segments[segments.len() - 1]);
    fs::write(
        place.path("speakers.csv"),
        format!("segment,name,age\n{last},\"Ann, of B\",41\nnobody,C,7\n{first},D,\nbroken,E,old\n"),
    )
    .unwrap();
    let output = run(&place, &[]);
    expect_code(&output, 0);
    let found = ages(&place.path("state"));
    assert_eq!((found[last], found[first]), (Some(41), None));
    assert_eq!(found.values().flatten().count(), 1);
    assert_eq!(found.keys().filter(|id| !id.is_empty()).count(), segments.len());
    // The line that is none is refused, and the rest of the table used.
    let rejects = program()
        .args([
            "rejects",
            pipeline(&place).to_str().unwrap(),
            "--stage",
            "speakers",
            "--state",
        ])
        .arg(place.path("state"))
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&rejects.stdout).into_owned();
    assert!(shown.contains("bad_value"), "{shown}");
    // Nothing changed; then the table alone.
    let again = run(&place, &[]);
    expect_code(&again, 0);
    assert!(stderr(&again).contains("nothing to do"), "{}", stderr(&again));
    fs::write(place.path("speakers.csv"), format!("segment,age\n{last},42\n")).unwrap();
    let plan = planned(&place, &pipeline(&place), &[&speakers_table(&place)], &[]);
    assert_eq!(
        (plan["scan"]["run"].as_u64(), plan["speakers"]["run"].as_u64()),
        (Some(0), Some(1))
    );
    assert!(plan["named"]["if_changed"].as_u64().unwrap() > 1);
    expect_code(&run(&place, &[]), 0);
}

#[test]
fn some_shards_are_joined_with_all_of_the_table() {
    let place = Workplace::bundled("micro");
    let segments = segments(&place);
    fs::remove_dir_all(place.path("state")).unwrap();
    let lines: String = segments.iter().map(|segment| format!("{segment},7\n")).collect();
    fs::write(place.path("speakers.csv"), format!("segment,age\n{lines}")).unwrap();
    let output = run(&place, &["--partition", "bn/*"]);
    expect_code(&output, 0);
    assert!(!stderr(&output).contains("left out"), "{}", stderr(&output));
    let found = ages(&place.path("state"));
    let (joined, table): (Vec<_>, Vec<_>) = found.iter().partition(|(id, _)| !id.is_empty());
    assert!(table.len() <= 1, "{table:?}");
    assert!(!joined.is_empty() && joined.len() < segments.len(), "{joined:?}");
    assert!(joined.iter().all(|(_, age)| **age == Some(7)), "{joined:?}");
    // The run of all shards makes the others alone.
    let plan = planned(&place, &pipeline(&place), &[&speakers_table(&place)], &[]);
    let reused = plan
        .into_iter()
        .map(|(name, stage)| (name, stage["reuse"].as_u64().unwrap()));
    let reused: BTreeMap<String, u64> = reused.collect();
    assert!(reused["named"] > 0 && reused["named"] == reused["scan"], "{reused:?}");
    assert_eq!(reused["speakers"], 1);
    expect_code(&run(&place, &[]), 0);
    assert_eq!(ages(&place.path("state")).values().flatten().count(), segments.len());
    // The table itself has no partition of such a name.
    let unknown = run(&place, &["--partition", "speakers*"]);
    expect_code(&unknown, 2);
}

/// Rows of the table go elsewhere, too: taken whole, they would be made for a stage that nobody asked all partitions of.
#[test]
fn a_table_whose_rows_go_elsewhere_is_not_taken_whole() {
    let place = Workplace::bundled("micro");
    fs::write(place.path("speakers.csv"), "segment,age\na,7\n").unwrap();
    let path = pipeline(&place);
    let mut text = fs::read_to_string(&path).unwrap();
    text.push_str("  old: {uses: sql, from: speakers, with: {query: 'SELECT *, age + 1 AS next FROM speakers'}}\n");
    fs::write(&path, text).unwrap();
    let speakers = speakers_table(&place);
    let planned = |more: &[&str]| planned(&place, &path, &[&speakers], &[&["--partition", "bn/*"], more].concat());
    let plan = planned(&[]);
    let runs = |name: &str| plan.get(name).map_or(0, |stage| stage["run"].as_u64().unwrap());
    assert!(runs("scan") > 0);
    assert_eq!([runs("speakers"), runs("old"), runs("named")], [0, 0, 0], "{plan:?}");
    assert!(plan["named"]["left_out"].is_string(), "{plan:?}");
    // Without the stage that reads its rows it is a table alone.
    let plan = planned(&["--until", "named"]);
    assert!(plan["named"]["left_out"].is_null(), "{plan:?}");
    assert_eq!(plan["named"]["selected"], true, "{plan:?}");
    assert_eq!(plan["speakers"]["run"], 1, "{plan:?}");
    assert_eq!(plan["old"]["selected"], false, "{plan:?}");
    let mut run = place.command("run", path.to_str().unwrap(), &[&speakers]);
    let run = run.args(["--partition", "bn/*", "--until", "named"]).output().unwrap();
    expect_code(&run, 0);
    let ages = ages(&place.path("state"));
    assert!(ages.keys().filter(|id| !id.is_empty()).count() > 0, "{ages:?}");
}

#[test]
fn some_shards_are_manifests_of_nothing() {
    let place = Workplace::bundled("micro");
    let command = |command: &str, partitions: &[&str]| {
        let mut flow = place.manifest_command(command, &[]);
        for partition in partitions {
            flow.args(["--partition", partition]);
        }
        flow
    };
    let plan = command("plan", &["bn/*"]).output().unwrap();
    expect_code(&plan, 0);
    let shown = String::from_utf8_lossy(&plan.stdout).into_owned();
    assert!(shown.contains("left out: it decides over all partitions"), "{shown}");
    assert!(
        shown.contains("left out: it writes one set of all partitions"),
        "{shown}"
    );
    let output = command("run", &["bn/*", "en/en_0001"]).output().unwrap();
    expect_code(&output, 0);
    assert!(stderr(&output).contains("left out are"), "{}", stderr(&output));
    assert!(!place.out().exists());
    let unknown = command("run", &["bn/bn_9000"]).output().unwrap();
    expect_code(&unknown, 2);
    assert!(
        stderr(&unknown).contains("did you mean `bn/bn_000"),
        "{}",
        stderr(&unknown)
    );
    let both = command("run", &["bn/*"]).args(["--only", "scan"]).output().unwrap();
    expect_code(&both, 2);
    // The same manifests as without what ran before.
    place.build_manifests(&[]);
    let other = Workplace::bundled("micro");
    other.build_manifests(&[]);
    assert!(place.out_bytes() == other.out_bytes());
}

#[test]
fn a_failing_stage_is_named_when_the_rest_is_done() {
    let place = Workplace::bundled("micro");
    let path = place.path("two.yaml");
    fs::write(
        &path,
        r#"
flow: 1
params:
  shards: {required: true}
  out: unused
stages:
  scan: {uses: manifest.scan, with: {shards: "${shards}"}}
  bad: {uses: sql, from: scan, with: {query: "SELECT *, CAST(segment_id AS BIGINT) AS n FROM scan"}}
  good: {uses: sql, from: scan, with: {query: SELECT * FROM scan}}
"#,
    )
    .unwrap();
    let output = place
        .command("run", path.to_str().unwrap(), &[])
        .args(["--keep-going", "--workers", "2", "--partition", "bn/*"])
        .output()
        .unwrap();
    expect_code(&output, 1);
    let said = stderr(&output);
    assert!(
        said.contains("failures:") && said.contains("stage `bad`, partition bn/bn_0000"),
        "{said}"
    );
    // The metadata of bn_0001 are damaged, so that no row of it comes to be cast.
    assert!(said.contains("stage `bad`, partition bn/bn_0002"), "{said}");
    let plan = planned(&place, &path, &[], &["--partition", "bn/*"]);
    assert!(plan.contains_key("bad"), "{plan:?}");
    for (name, stage) in plan {
        let left = stage["run"].as_u64().unwrap();
        assert_eq!(left > 0, name == "bad", "{stage}");
    }
}
