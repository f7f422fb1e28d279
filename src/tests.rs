//! Commands from end to end, with stage kinds made for the purpose.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{AsArray, Int64Array, RecordBatch, UInt32Array};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use clap::Parser;
use flow_kind::registry::{AnyKind, kind};
use flow_kind::{
    Body, Conservation, Context, Export, ExportSet, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition,
    Port, Progress, RejectClass, Shape, Source, SourcePartition, StageError,
};
use tempfile::TempDir;

use crate::arguments::Arguments;
use crate::execute;
use flow_cli::failure::{Exit, Failure};

type Settings = BTreeMap<String, String>;

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("_row", DataType::UInt32, false),
        Field::new("number", DataType::Int64, false),
    ]))
}

fn ports() -> Vec<Port> {
    vec![Port {
        name: "rows".into(),
        schema: schema(),
    }]
}

/// One partition per file of a folder, one row per line.
struct Numbers;
/// Refuses negative numbers, and fails at 13.
struct Positive;
/// Writes the sum of all numbers to a file.
struct Sum;

impl Kind for Numbers {
    const NAME: &'static str = "toy.numbers";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = Settings;
    fn shape(_: &Settings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape {
            conservation: Conservation::Rows,
            ..Shape::source(ports())
        })
    }
    fn open(settings: &Settings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(NumbersBody(PathBuf::from(
            settings.get("folder").cloned().unwrap_or_default(),
        )))))
    }
}

struct NumbersBody(PathBuf);

impl Source for NumbersBody {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let entries = std::fs::read_dir(&self.0)
            .map_err(|error| StageError::setting("folder", format!("cannot read {}: {error}", self.0.display())))?;
        let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        files.sort();
        Ok(files
            .into_iter()
            .map(|file| {
                SourcePartition::new(
                    Partition::new(file.file_name().unwrap().to_string_lossy()),
                    vec![file],
                    "",
                )
            })
            .collect())
    }
    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        let text = std::fs::read_to_string(self.0.join(partition.as_str())).map_err(StageError::failed)?;
        let numbers: Vec<i64> = text
            .lines()
            .map(|line| line.parse().map_err(StageError::failed))
            .collect::<Result<_, _>>()?;
        out.read(numbers.len() as u64);
        let rows = UInt32Array::from_iter_values(0..numbers.len() as u32);
        out.send(
            0,
            RecordBatch::try_new(schema(), vec![Arc::new(rows), Arc::new(Int64Array::from(numbers))])?,
        );
        Ok(())
    }
}

impl Kind for Positive {
    const NAME: &'static str = "toy.positive";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::streamed("rows", "numbers")];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = Settings;
    fn shape(_: &Settings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::local(ports()))
    }
    fn open(_: &Settings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(PositiveBody)))
    }
}

struct PositiveBody;

impl Operator for PositiveBody {
    fn batch(&mut self, _: &str, _: &Partition, batch: RecordBatch, out: &mut Out) -> Result<(), StageError> {
        let numbers = batch.column(1).as_primitive::<Int64Type>();
        if let Some(row) = numbers.values().iter().position(|number| *number == 13) {
            return Err(StageError::Failed {
                message: "thirteen".into(),
                row: Some(row as u32),
                help: Some("take another number".into()),
            });
        }
        let (refused, kept): (Vec<usize>, Vec<usize>) = (0..batch.num_rows()).partition(|row| numbers.value(*row) < 0);
        out.reject_rows(&batch, &refused, "negative", RejectClass::Fault, "")?;
        let kept = UInt32Array::from_iter_values(kept.into_iter().map(|row| row as u32));
        out.send(0, arrow::compute::take_record_batch(&batch, &kept)?);
        Ok(())
    }
    fn partition_complete(&mut self, _: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        Ok(Progress::Done)
    }
}

impl Kind for Sum {
    const NAME: &'static str = "toy.sum";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::whole("rows", "numbers")];
    const OUTPUTS: &'static [OutputPort] = &[];
    type Settings = Settings;
    fn shape(_: &Settings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::export())
    }
    fn open(settings: &Settings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Export(Box::new(SumBody(
            PathBuf::from(settings.get("out").cloned().unwrap_or_default()),
            context.clone(),
        ))))
    }
}

struct SumBody(PathBuf, Context);

impl Export for SumBody {
    fn folder(&self) -> PathBuf {
        self.0.clone()
    }
    fn write(&mut self, set: &mut ExportSet) -> Result<(), StageError> {
        let mut sum = 0;
        for batch in self.1.required("rows")?.batches(None) {
            let (_, batch) = batch?;
            sum += batch.column(1).as_primitive::<Int64Type>().values().iter().sum::<i64>();
        }
        std::fs::write(set.file("sum.txt").map_err(StageError::failed)?, format!("{sum}\n")).map_err(StageError::failed)
    }
}

fn kinds() -> Vec<Box<dyn AnyKind>> {
    vec![kind::<Numbers>(), kind::<Positive>(), kind::<Sum>()]
}

const PIPELINE: &str = "flow: 1
params: {limit: 5}
stages:
  numbers: {uses: toy.numbers, with: {folder: DIR/in}}
  positive: {uses: toy.positive, from: numbers, max_rejects: '${limit}', max_rejects_action: warn}
  sum: {uses: toy.sum, from: positive, with: {out: DIR/out}}
";

struct Workplace(TempDir);

impl Workplace {
    fn new() -> Workplace {
        let place = Workplace(TempDir::new().unwrap());
        std::fs::create_dir(place.path("in")).unwrap();
        place.write("in/a", "1\n2\n-3\n");
        place.write("in/b", "4\n");
        place.write(
            "p.yaml",
            &PIPELINE.replace("DIR", &place.0.path().display().to_string()),
        );
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// Runs a command; `p.yaml` and the like are files of this workplace.
    fn flow(&self, line: &str) -> (Result<Exit, Failure>, String) {
        self.flow_with(line, &[])
    }

    /// As `flow`, with arguments that may hold blanks at the end.
    fn flow_with(&self, line: &str, more: &[&str]) -> (Result<Exit, Failure>, String) {
        let state = self.path("state");
        let words = line.split(' ').map(|word| {
            if word.ends_with(".yaml") || word.ends_with(".jsonl") {
                self.path(word).display().to_string()
            } else {
                word.to_string()
            }
        });
        let mut words: Vec<String> = ["flow".to_string()].into_iter().chain(words).collect();
        words.extend(more.iter().map(|word| word.to_string()));
        if !matches!(words[1].as_str(), "kinds" | "graph") {
            words.extend(["--state".to_string(), state.display().to_string()]);
        }
        if words[1] == "run" {
            words.extend(["--progress", "none", "--workers", "2"].map(String::from));
        }
        let mut out = Vec::new();
        let result = execute(Arguments::try_parse_from(words).unwrap(), kinds(), &mut out);
        (result, String::from_utf8(out).unwrap())
    }

    fn done(&self, line: &str) -> String {
        match self.flow(line) {
            (Ok(Exit::Done), out) => out,
            (Ok(exit), _) => panic!("{line}: {exit:?}"),
            (Err(failure), _) => panic!("{line}: {}", failure.render(flow_spec::Style::Plain)),
        }
    }

    fn failure(&self, line: &str) -> (Exit, String) {
        match self.flow(line).0 {
            Err(failure) => (failure.exit(), failure.render(flow_spec::Style::Plain)),
            Ok(exit) => panic!("{line}: {exit:?}"),
        }
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn run_plan_and_run_again() {
    let place = Workplace::new();
    assert!(matches!(place.flow("plan p.yaml --exit-code").0, Ok(Exit::Noted)));
    assert!(!place.path("state").exists(), "a plan writes nothing");
    place.done("check p.yaml --deep");
    place.done("run p.yaml --events e.jsonl");
    assert_eq!(read(&place.path("out/sum.txt")), "7\n");
    let events = read(&place.path("e.jsonl"));
    assert!(events.lines().count() > 3);
    for line in events.lines() {
        let event: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(event["event"].is_string() && event["at"].is_string(), "{line}");
    }
    assert!(matches!(place.flow("plan p.yaml --exit-code").0, Ok(Exit::Done)));
    assert!(place.done("plan p.yaml").ends_with("nothing would run\n"));

    place.write("in/b", "5\n");
    let plan = place.done("plan p.yaml --partitions");
    assert!(plan.lines().any(|line| line.starts_with("numbers b: run: ")), "{plan}");
    assert!(!plan.contains("numbers a:"), "{plan}");
    let json: serde_json::Value = serde_json::from_str(&place.done("plan p.yaml --json")).unwrap();
    assert_eq!(json["stages"][0]["stage"], "numbers");
    place.done("run p.yaml");
    assert_eq!(read(&place.path("out/sum.txt")), "8\n");
}

#[test]
fn rejects_status_and_log_of_a_run() {
    let place = Workplace::new();
    let (exit, said) = place.failure("status");
    assert_eq!(
        (exit, said.contains("is not a state directory of flow")),
        (Exit::Usage, true)
    );
    place.done("run p.yaml");
    assert_eq!(
        place.done("rejects"),
        "stage     reason    rows  class\npositive  negative     1  fault\n"
    );
    assert_eq!(
        place.done("rejects p.yaml --reason negative").lines().nth(1),
        Some("a\t2\t\tpositive\tnegative\tfault\t")
    );
    assert_eq!(place.done("rejects --stage numbers").lines().count(), 1);
    assert!(
        place
            .failure("rejects --stage positiv")
            .1
            .contains("did you mean `positive`?")
    );
    let (exit, said) = place.failure("rejects --reason negativ");
    assert_eq!(exit, Exit::Usage);
    assert!(
        said.contains("no rejects with the reason `negativ`") && said.contains("did you mean `negative`?"),
        "{said}"
    );
    assert!(
        place
            .failure("rejects --stage numbers --reason negative")
            .1
            .contains("no rejects of stage `numbers`")
    );
    let away = place.path("none/rejects.parquet");
    let (_, said) = place.failure(&format!("rejects --export {}", away.display()));
    assert!(said.contains(&format!("cannot write {}: ", away.display())), "{said}");
    assert!(place.failure("rejects q.yaml").1.contains("there is no run of `q`"));
    let status = place.done("status");
    assert!(
        status.contains("of p, started ") && status.contains("\ndone in "),
        "{status}"
    );
    assert!(
        status
            .lines()
            .any(|line| line.starts_with("positive") && line.ends_with("done")),
        "{status}"
    );
    let export: Vec<&str> = status
        .lines()
        .find(|line| line.starts_with("sum "))
        .map_or(Vec::new(), |line| line.split_whitespace().take(3).collect());
    assert_eq!(export, ["sum", "1", "1"], "{status}");
    assert!(
        place
            .done("log")
            .contains("positive done: 4 rows in, 3 out, 1 reject: negative 1 (fault)")
    );
    assert!(place.done("log --json").lines().all(|line| line.starts_with('{')));
    assert!(place.failure("log --run none").1.contains("there is no run `none`"));
}

#[test]
fn stages_that_fail_are_told_as_failed() {
    let place = Workplace::new();
    place.write("in/c", "1\n13\n");
    let state_of = |stage: &str| {
        let status = place.done("status");
        let line = status.lines().find(|line| line.starts_with(stage)).map(str::to_owned);
        (line.unwrap_or_default(), status)
    };
    let bad = place.path("bad");
    let hook = format!("--on-failure=cat > '{}'", bad.display());
    for options in ["", " --keep-going"] {
        let run = place.flow_with(&format!("run p.yaml{options}"), &[hook.as_str()]);
        assert!(run.0.is_err());
        let (line, status) = state_of("positive");
        assert!(line.ends_with("failed"), "{status}");
        assert_eq!(status.matches("partition c").count(), 1, "{status}");
        assert!(status.contains("thirteen"), "{status}");
        assert_eq!(state_of("sum").0.split_whitespace().nth(1), Some("-"), "{status}");
        let said: serde_json::Value = serde_json::from_str(&read(&bad)).unwrap();
        let mut stages = said["stages"].as_array().unwrap().iter();
        let positive = stages.find(|stage| stage["stage"] == "positive").unwrap();
        assert_eq!(positive["outcome"], "failed", "{said}");
        assert_eq!(
            positive["failures"],
            serde_json::json!([{"partition": "c", "message": "thirteen"}])
        );
    }
    let log = place.done("log");
    assert!(log.contains("positive failed (partition c: thirteen): "), "{log}");
    assert!(!log.contains("positive done"), "{log}");
    // Past its limit of rejects.
    place.write("in/c", "1\n");
    let text = read(&place.path("p.yaml")).replace("max_rejects_action: warn", "max_rejects_action: fail");
    place.write("p.yaml", &text);
    assert!(place.flow("run p.yaml --set limit=0").0.is_err());
    let (line, status) = state_of("positive");
    assert!(line.ends_with("failed"), "{status}");
}

/// Opening a pipe waits until somebody writes to it.
#[test]
fn a_pipeline_or_overlay_that_is_no_regular_file_is_refused() {
    let place = Workplace::new();
    let made = std::process::Command::new("mkfifo")
        .arg(place.path("pipe.yaml"))
        .status()
        .unwrap();
    assert!(made.success());
    let lines = [
        "check pipe.yaml",
        "plan pipe.yaml",
        "run pipe.yaml",
        "run p.yaml --config pipe.yaml",
    ];
    for line in lines {
        let (exit, said) = place.failure(line);
        assert_eq!(exit, Exit::Usage, "{said}");
        assert!(said.contains("pipe.yaml: it is a pipe, not a regular file"), "{said}");
    }
}

#[test]
fn partitions_that_are_tried_again_are_counted_once() {
    let place = Workplace::new();
    place.write("in/c", "1\n13\n");
    place.write("in/d", "13\n");
    let summary = place.path("summary");
    let hook = format!("--on-failure=cat > '{}'", summary.display());
    assert!(place.flow_with("run p.yaml --keep-going", &[hook.as_str()]).0.is_err());
    let status = place.done("status");
    let positive = status.lines().find(|line| line.starts_with("positive")).unwrap();
    let numbers: Vec<&str> = positive.split_whitespace().skip(1).take(5).collect();
    // Done, of how many, reused, rows, rejects.
    assert_eq!(numbers, ["2", "4", "0", "3", "1"], "{status}");
    let said: serde_json::Value = serde_json::from_str(&read(&summary)).unwrap();
    let mut stages = said["stages"].as_array().unwrap().iter();
    let positive = stages.find(|stage| stage["stage"] == "positive").unwrap();
    assert_eq!(
        (&positive["ran"], &positive["reused"]),
        (&2.into(), &0.into()),
        "{said}"
    );
}

/// A count is a limit that ends a stage in the middle.
#[test]
fn what_was_committed_before_the_limit_of_rejects_is_shown() {
    let place = Workplace::new();
    let text = read(&place.path("p.yaml")).replace("max_rejects_action: warn", "max_rejects_action: fail");
    place.write("p.yaml", &text);
    let summary = place.path("summary");
    let hook = format!("--on-failure=cat > '{}'", summary.display());
    let run = place.flow_with("run p.yaml --set limit=0", &[hook.as_str()]);
    assert!(run.0.is_err_and(|failure| failure.exit() == Exit::Failed));
    let said: serde_json::Value = serde_json::from_str(&read(&summary)).unwrap();
    assert!(said["error"].as_str().unwrap().contains("max_rejects is 0"), "{said}");
    let mut stages = said["stages"].as_array().unwrap().iter();
    let positive = stages.find(|stage| stage["stage"] == "positive").unwrap();
    assert_eq!(
        positive["rejects"],
        serde_json::json!([{"reason": "negative", "class": "fault", "rows": 1}]),
        "{said}"
    );
    // With the other file, if that was committed before.
    let (rows_in, rows_out) = (&positive["rows_in"], &positive["rows_out"]);
    let (rows_in, rows_out) = (rows_in.as_u64().unwrap(), rows_out.as_u64().unwrap());
    assert!(rows_in >= 3 && rows_out == rows_in - 1, "{said}");
    assert!(positive["ran"].as_u64().unwrap() >= 1, "{said}");
    let page = read(Path::new(said["report"].as_str().unwrap()));
    assert!(page.contains("<td>negative</td><td>positive</td>"), "{page}");
}

#[test]
fn how_runs_end_is_in_the_exit_code() {
    let place = Workplace::new();
    assert!(matches!(place.flow("run p.yaml --set limit=0").0, Ok(Exit::Noted)));
    place.write("in/c", "1\n13\n");
    let (exit, said) = place.failure("run p.yaml");
    assert_eq!(exit, Exit::Failed);
    assert_eq!(
        said,
        "error: stage `positive`, partition c, row 1: thirteen\n  help: take another number"
    );
    assert!(place.done("status").contains("failed: "));
    let (exit, said) = place.failure("run p.yaml --only positve");
    assert_eq!(
        (exit, said.contains("did you mean `positive`?")),
        (Exit::Usage, true),
        "{said}"
    );
    std::fs::remove_dir_all(place.path("in")).unwrap();
    let (exit, said) = place.failure("run p.yaml");
    assert_eq!(exit, Exit::Usage);
    assert!(
        said.contains("p.yaml:4:47: error: stage `numbers`: cannot read "),
        "{said}"
    );
    assert_eq!(place.failure("run p.yaml --set limti=1").0, Exit::Usage);
}

#[test]
fn graphs_and_kinds() {
    let place = Workplace::new();
    let mermaid = place.done("graph p.yaml");
    assert!(
        mermaid.starts_with("flowchart TD\n") && mermaid.contains("s0 --> s1") && mermaid.contains("s1 --> s2"),
        "{mermaid}"
    );
    assert!(place.done("graph p.yaml --format dot").contains("s1 -> s2;"));
    assert!(place.done("graph p.yaml --format svg").contains("toy.positive"));
    assert!(place.done("kinds").contains("toy.sum"));
    assert!(place.failure("kinds toy.som").1.contains("did you mean `toy.sum`?"));
    let schema: serde_json::Value = serde_json::from_str(&place.done("kinds --schema")).unwrap();
    assert_eq!(schema["$defs"]["stage"]["properties"]["uses"]["enum"][2], "toy.sum");
    let docs = place.path("docs");
    assert_eq!(
        place.done(&format!("kinds --docs {}", docs.display())).lines().count(),
        4
    );
    assert!(read(&docs.join("kinds/toy.sum.md")).starts_with("# toy.sum\n"));
    assert!(docs.join("schema/pipeline.schema.json").is_file());
}

#[test]
fn a_past_run_is_found_by_the_values_of_its_parameters() {
    let place = Workplace::new();
    let one = "stage     reason    rows  class\npositive  negative     1  fault\n";
    let two = one.replace(" 1 ", " 2 ");
    place.done("run p.yaml");
    place.write("in/b", "-4\n");
    place.write("nine.yaml", "flow: 1\nparams: {limit: 9}\n");
    place.done("run p.yaml --config nine.yaml");
    assert_eq!(place.done("rejects p.yaml"), two);
    assert_eq!(place.done("rejects p.yaml --set limit=5"), one);
    assert_eq!(place.done("rejects p.yaml --set limit=9"), two);
    assert_eq!(place.done("rejects p.yaml --config nine.yaml"), two);
    // A later value wins, as for `flow run`.
    assert_eq!(place.done("rejects p.yaml --config nine.yaml --set limit=5"), one);
    let first = |command: &str| place.done(command).lines().next().unwrap().to_string();
    assert_ne!(first("status p.yaml --set limit=5"), first("status p.yaml"));
    assert_eq!(first("status p.yaml --set limit=9"), first("status p.yaml"));
    assert_ne!(first("log p.yaml --set limit=5"), first("log p.yaml"));
    let (exit, said) = place.failure("rejects p.yaml --set limit=7");
    assert_eq!(exit, Exit::Usage);
    assert!(
        said.contains("there is no run of `p` with these values") && said.contains("had limit=9 (not 7)"),
        "{said}"
    );
    let (exit, said) = place.failure("rejects p.yaml --set limti=7");
    assert_eq!((exit, said.contains("limti")), (Exit::Usage, true), "{said}");
    // Values are those of a pipeline, and a run that is named needs none.
    for wrong in [
        &["flow", "rejects", "--set", "limit=5"][..],
        &["flow", "status", "p.yaml", "--run", "x", "--set", "limit=5"],
    ] {
        assert!(Arguments::try_parse_from(wrong).is_err(), "{wrong:?}");
    }
}

#[test]
fn what_a_run_did_not_use_is_not_shown_as_its_own() {
    let place = Workplace::new();
    place.done("run p.yaml");
    let all = place.done("rejects p.yaml");
    assert!(all.contains("negative"), "{all}");
    // `sum` reads what `positive` left.
    place.done("run p.yaml --only sum");
    assert_eq!(place.done("rejects p.yaml"), all);
    place.done("run p.yaml --until numbers");
    assert_eq!(place.done("rejects p.yaml"), "no rejects\n");
    assert_eq!(place.done("rejects p.yaml --stage positive").lines().count(), 1);
}

#[test]
fn commands_for_the_end_of_a_run_get_its_summary_and_change_nothing() {
    let place = Workplace::new();
    let [good, bad] = ["good", "bad"].map(|name| place.path(name));
    let hooks = [
        format!("--on-success=cat > '{}'", good.display()),
        format!("--on-failure=cat > '{}'; exit 3", bad.display()),
    ];
    let run = |line: &str| {
        for file in [&good, &bad] {
            let _ = std::fs::remove_file(file);
        }
        let (result, _) = place.flow_with(line, &hooks.each_ref().map(String::as_str));
        result.map_err(|failure| failure.exit())
    };
    let summary = |path: &Path| -> serde_json::Value { serde_json::from_str(&read(path)).unwrap() };
    assert_eq!(run("run p.yaml"), Ok(Exit::Done));
    assert!(!bad.exists());
    let said = summary(&good);
    assert_eq!(
        (&said["version"], &said["outcome"], &said["exit_code"], &said["error"]),
        (&1.into(), &"done".into(), &0.into(), &serde_json::Value::Null)
    );
    let positive = said["stages"].as_array().unwrap().iter();
    let positive = positive.clone().find(|stage| stage["stage"] == "positive").unwrap();
    assert_eq!((&positive["rows_in"], &positive["rows_out"]), (&4.into(), &3.into()));
    assert_eq!(
        positive["rejects"],
        serde_json::json!([{"reason": "negative", "class": "fault", "rows": 1}])
    );
    assert!(Path::new(said["report"].as_str().unwrap()).is_file());
    assert_eq!(said["exports"][0]["files"][0], "sum.txt");

    assert_eq!(run("run p.yaml --set limit=0"), Ok(Exit::Noted));
    let said = summary(&good);
    assert_eq!(
        (&said["outcome"], &said["exit_code"]),
        (&"past_reject_limit".into(), &4.into())
    );

    place.write("in/c", "1\n13\n");
    assert_eq!(run("run p.yaml --events e.jsonl"), Err(Exit::Failed));
    assert!(!good.exists());
    let said = summary(&bad);
    assert_eq!((&said["outcome"], &said["exit_code"]), (&"failed".into(), &1.into()));
    assert!(said["error"].as_str().unwrap().contains("thirteen"), "{said}");
    let events = read(&place.path("e.jsonl"));
    assert!(
        events.contains("the command of --on-failure ended with exit code 3"),
        "{events}"
    );

    // Where no run began there is nothing to tell; of one that was refused there is.
    assert_eq!(run("run p.yaml --set limti=1"), Err(Exit::Usage));
    assert!(!good.exists() && !bad.exists());
    std::fs::remove_dir_all(place.path("in")).unwrap();
    assert_eq!(run("run p.yaml"), Err(Exit::Usage));
    let said = summary(&bad);
    assert_eq!((&said["outcome"], &said["exit_code"]), (&"failed".into(), &2.into()));
    assert!(!good.exists());
}

#[cfg(not(feature = "service"))]
#[test]
fn commands_of_a_feature_that_was_left_out_name_it() {
    for name in ["serve", "jobs", "ui"] {
        let error = crate::arguments::parse(["flow", name, "--model", "a.nemo"]).unwrap_err();
        assert!(error.to_string().contains("without the feature `service`"), "{error}");
    }
    let other = crate::arguments::parse(["flow", "sreve"]).unwrap_err().to_string();
    assert!(other.contains("unrecognized subcommand"), "{other}");
}
