//! Pipelines as a user writes them, right and wrong, through `load` and `check`.

use std::path::PathBuf;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::*;
use crate::registry::{Registry, kind};
use crate::{Body, Context, InputCount, InputPort, Inputs, Kind, OutputPort, Port, Role, Shape, StageError};

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("_row", DataType::UInt32, false)]))
}

fn ports(names: &[&str]) -> Vec<Port> {
    names
        .iter()
        .map(|name| Port {
            name: name.to_string(),
            schema: schema(),
        })
        .collect()
}

macro_rules! toy {
    ($kind:ident, $name:literal, $settings:ty, $ports:expr, $outputs:expr, |$with:ident, $inputs:ident| $shape:expr) => {
        toy!($kind, $name, $settings, $ports, $outputs, sql: &[], |$with, $inputs| $shape);
    };
    ($kind:ident, $name:literal, $settings:ty, $ports:expr, $outputs:expr, sql: $sql:expr, |$with:ident, $inputs:ident| $shape:expr) => {
        struct $kind;
        impl Kind for $kind {
            const NAME: &'static str = $name;
            const VERSION: u32 = 1;
            const INPUTS: &'static [InputPort] = $ports;
            const OUTPUTS: &'static [OutputPort] = $outputs;
            const SQL_SETTINGS: &'static [&'static str] = $sql;
            type Settings = $settings;
            fn shape($with: &$settings, $inputs: &Inputs) -> Result<Shape, StageError> {
                $shape
            }
            fn open(_: &$settings, _: &Context) -> Result<Body, StageError> {
                Err(StageError::failed("not opened here"))
            }
        }
    };
}

const TABLES: InputPort = InputPort::streamed("tables", "numbers").count(InputCount::Many);
const ROWS: OutputPort = OutputPort::new("rows", "numbers");

/// Counts.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
struct CountSettings {
    /// How many rows.
    rows: u32,
    /// A name.
    #[serde(default)]
    label: Option<String>,
}

/// Looks at SQL.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
struct SqlSettings {
    /// The query.
    query: String,
    /// Rejects.
    #[serde(default)]
    rejects: Vec<RejectSettings>,
    /// Bound values.
    #[serde(default)]
    params: std::collections::BTreeMap<String, serde_json::Value>,
}

/// A reject.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
struct RejectSettings {
    /// Why.
    reason: String,
    /// When.
    when: String,
}

/// Nothing to set.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
struct NoSettings {}

toy!(
    Count,
    "toy.count",
    CountSettings,
    &[],
    &[ROWS, OutputPort::new("facts", "facts")],
    |_with, _inputs| Ok(Shape::source(ports(&["rows", "facts"])))
);
toy!(Sql, "sql", SqlSettings, &[TABLES], &[ROWS], sql: &["query", "join", "when", "detail"], |with, _inputs| {
    // Stands for a database that knows no column `nine`.
    for (line, text) in with.query.lines().enumerate() {
        if let Some(at) = text.find("nine") {
            let column = text[..at].chars().count() + 1;
            return Err(StageError::Setting {
                path: "query".into(),
                offset: Some((line + 1, column)),
                message: "unknown column `nine`".into(),
                help: None,
            });
        }
    }
    if let Some(index) = with.rejects.iter().position(|reject| reject.when.contains("nine")) {
        return Err(StageError::setting(
            format!("rejects[{index}].when"),
            "unknown column `nine`",
        ));
    }
    Ok(Shape::local(ports(&["rows"])))
});
toy!(
    Pair,
    "toy.pair",
    NoSettings,
    &[TABLES],
    &[OutputPort::new("train", "rows"), OutputPort::new("val", "rows")],
    |_with, inputs| {
        if !inputs.iter().any(|input| input.name == "left") {
            return Err(StageError::Input {
                name: "right".into(),
                message: "needs an input `left`".into(),
                help: Some("name the inputs `left` and `right`".into()),
            });
        }
        Ok(Shape {
            role: Role::Global,
            ..Shape::local(ports(&["train", "val"]))
        })
    }
);
toy!(Write, "toy.write", NoSettings, &[TABLES], &[], |_with, _inputs| Ok(
    Shape {
        role: Role::Export,
        ..Shape::source(Vec::new())
    }
));

toy!(
    Pass,
    "toy.pass",
    NoSettings,
    &[InputPort::streamed("rows", "numbers").optional()],
    &[ROWS],
    |_with, _inputs| Ok(Shape::local(ports(&["rows"])))
);
toy!(
    Save,
    "toy.save",
    NoSettings,
    &[InputPort::whole("rows", "numbers").optional()],
    &[],
    |_with, _inputs| Ok(Shape::export())
);

toy!(
    Both,
    "toy.both",
    NoSettings,
    &[
        InputPort::streamed("rows", "numbers"),
        InputPort::whole("built", "numbers").optional(),
        InputPort::whole("given", "numbers").optional(),
    ],
    &[ROWS],
    |_with, _inputs| Ok(Shape::local(ports(&["rows"])))
);

fn words() -> SchemaRef {
    let text = Field::new("text", DataType::Utf8, false);
    let fields = schema()
        .fields()
        .iter()
        .cloned()
        .chain([Arc::new(text)])
        .collect::<Vec<_>>();
    Arc::new(Schema::new(fields))
}

toy!(
    Speak,
    "toy.speak",
    NoSettings,
    &[],
    &[OutputPort::new("numbers", "numbers"), OutputPort::new("words", "words")],
    |_with, _inputs| {
        let mut outputs = ports(&["numbers", "words"]);
        outputs[1].schema = words();
        Ok(Shape::source(outputs))
    }
);
toy!(
    Hear,
    "toy.hear",
    NoSettings,
    &[InputPort::whole("heard", "words").columns(&[("text", crate::ColumnType::Text)])],
    &[],
    |_with, _inputs| Ok(Shape::export())
);

fn registry() -> Registry {
    Registry::new(vec![
        kind::<Speak>(),
        kind::<Hear>(),
        kind::<Both>(),
        kind::<Count>(),
        kind::<Sql>(),
        kind::<Pair>(),
        kind::<Write>(),
        kind::<Pass>(),
        kind::<Save>(),
    ])
    .unwrap()
}

/// Files in a folder of their own; `DIR` in a text stands for the folder.
struct Files(TempDir);

impl Files {
    fn new(files: &[(&str, &str)]) -> Files {
        let files_at = Files(TempDir::new().unwrap());
        for (name, text) in files {
            std::fs::write(
                files_at.path(name),
                text.replace("DIR", &files_at.0.path().display().to_string()),
            )
            .unwrap();
        }
        files_at
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn load(&self, configs: &[&str], set: &[&str]) -> Result<Pipeline, Diagnostics> {
        let overrides = Overrides {
            configs: configs.iter().map(|name| self.path(name)).collect(),
            set: set.iter().map(|text| text.to_string()).collect(),
            environment: Arc::new(|name| (name == "HOME").then(|| "/home/x".to_string())),
            usual_names: &[
                ("learning_rate", &["phase1_lr", "phase2_lr"]),
                ("epochs", &["max_steps", "steps"]),
            ],
        };
        load(&self.path("p.yaml"), &overrides, &registry())
    }

    fn check(&self, set: &[&str]) -> Result<Checked, Diagnostics> {
        check(self.load(&[], set)?, &registry())
    }

    fn said(&self, diagnostics: Diagnostics) -> String {
        diagnostics
            .to_string()
            .replace(&format!("{}/", self.0.path().display()), "")
    }
}

/// What is said of one file that is wrong.
fn mistakes(text: &str) -> String {
    let files = Files::new(&[("p.yaml", text)]);
    match files.check(&[]) {
        Ok(_) => panic!("accepted"),
        Err(diagnostics) => files.said(diagnostics),
    }
}

const INNER: &str = "flow: 1
params: {rows: 1, label: {default: none, help: a name}}
stages:
  clean: {uses: sql, from: scan, with: {query: 'SELECT * FROM scan WHERE n > ${rows}'}}
  scan: {uses: toy.count, with: {rows: '${rows}', label: 'x-${label}'}}
";

const OUTER: &str = "flow: 1
description: all of it
params:
  rows: {default: 3, help: how many}
  share: 0.5
  home: '${env:HOME}/data'
  train: {steps: {required: true}, rate: 1e-3}
include:
  inner: {pipeline: DIR/inner.yaml, params: {rows: '${rows}'}}
stages:
  write: {uses: toy.write, from: {train: pair.train, val: pair.val}}
  pair: {uses: toy.pair, from: {left: inner/clean}, max_rejects: 5%, max_rejects_action: warn}
  more: {uses: toy.count, with: {rows: '${train.steps}', label: '${home}/${share}/${train.rate}'}}
";

#[test]
fn a_pipeline_with_a_group_an_overlay_and_values_from_the_command_line() {
    let overlay = "flow: 1\nparams: {rows: 7, train: {steps: 10}}\n";
    let files = Files::new(&[("p.yaml", OUTER), ("inner.yaml", INNER), ("o.yaml", overlay)]);
    let pipeline = files.load(&["o.yaml"], &["train.steps=12", "share=1"]).unwrap();
    let values = pipeline.values();
    let place = |name: &str| values.iter().position(|(known, _)| known == name).expect(name);
    let of = |name: &str| values[place(name)].1.as_str();
    assert_eq!((of("train.steps"), of("stage more: with.rows")), ("12", "12"));
    assert_eq!(of("stage pair: from.left"), "\"inner/clean\"");
    // What a user sets stands before what it was put into.
    assert!(place("train.steps") < place("stage more: with.rows"));
    let frozen = pipeline.frozen().replace(&files.0.path().display().to_string(), "DIR");
    insta::assert_snapshot!(frozen);
    let checked = check(pipeline, &registry()).unwrap();
    let inputs: Vec<_> = checked
        .stages
        .iter()
        .map(|stage| {
            (
                stage.name.as_str(),
                stage
                    .inputs
                    .iter()
                    .map(|i| (i.name.as_str(), i.stage, i.port))
                    .collect::<Vec<_>>(),
            )
        })
        .collect();
    assert_eq!(
        inputs,
        [
            ("inner/scan", vec![]),
            ("inner/clean", vec![("scan", 0, 0)]),
            ("pair", vec![("left", 1, 0)]),
            ("write", vec![("train", 2, 0), ("val", 2, 1)]),
            ("more", vec![]),
        ]
    );
    assert_eq!(
        checked.stages[2].max_rejects,
        Some(MaxRejects {
            limit: RejectLimit::Share(0.05),
            action: LimitAction::Warn
        })
    );
    assert_eq!(
        checked
            .pipeline
            .params
            .iter()
            .find(|p| p.name == "train.steps")
            .unwrap()
            .given_by,
        "--set train.steps=12"
    );
}

const SWITCHED: &str = "flow: 1
params: {manifest: '', rows: 3, label: {default: x}, train: {rows: 5, label: y}}
include:
  inner: {when: \"${manifest} == ''\", pipeline: DIR/inner.yaml, params: [rows, label]}
stages:
  given: {when: \"${manifest} != ''\", uses: toy.count, with: {rows: 1, label: '${manifest}'}}
  pair: {uses: toy.pair, from: {left: inner/clean}}
  base: {uses: toy.count, with: {rows: 2}}
  both: {uses: toy.both, from: {rows: base, built: pair.train, given: given}}
  more: {uses: toy.count, with: {<<: '${train}', rows: 7}}
  rest: {uses: toy.count, with: {<<: ['${train}']}}
";

#[test]
fn stages_that_are_switched_off_take_no_part_nor_do_those_that_need_them() {
    let files = Files::new(&[("p.yaml", SWITCHED), ("inner.yaml", INNER)]);
    let names = |checked: &Checked| {
        checked
            .stages
            .iter()
            .map(|stage| stage.name.clone())
            .collect::<Vec<_>>()
    };
    let off = |checked: &Checked| {
        let off = checked.pipeline.switched_off.iter();
        off.map(|off| format!("{} {}: {}", off.position, off.stage, off.reason))
            .collect::<Vec<_>>()
    };
    let built = files.check(&[]).unwrap();
    assert_eq!(
        names(&built),
        ["inner/scan", "inner/clean", "pair", "base", "both", "more", "rest"]
    );
    assert_eq!(off(&built), ["2 given: `when: ${manifest} != ''` does not hold"]);
    // The optional input is gone, the others stay where they were.
    let inputs = |checked: &Checked, stage: &str| {
        let stage = &checked.stages[checked.position(stage).unwrap()];
        let inputs = stage.inputs.iter();
        inputs
            .map(|input| (input.name.clone(), checked.stages[input.stage].name.clone()))
            .collect::<Vec<_>>()
    };
    let pair = |a: &str, b: &str| (a.to_string(), b.to_string());
    assert_eq!(inputs(&built, "both"), [pair("rows", "base"), pair("built", "pair")]);
    let given = files.check(&["manifest=t.jsonl"]).unwrap();
    assert_eq!(names(&given), ["given", "base", "both", "more", "rest"]);
    let group = "the group `inner` is switched off: `when: ${manifest} == ''` does not hold";
    assert_eq!(
        off(&given),
        [
            format!("0 inner/scan: {group}"),
            format!("1 inner/clean: {group}"),
            "3 pair: its input `left` comes from `clean`, which is switched off".to_string(),
        ]
    );
    assert_eq!(inputs(&given, "both"), [pair("rows", "base"), pair("given", "given")]);
    assert!(given.pipeline.frozen().contains("switched_off"));
    // Settings of a group that is given whole, and one of the stage's own, which comes first.
    let all = |stage: &str| given.stages[given.position(stage).unwrap()].settings.all().to_string();
    assert_eq!(all("more"), r#"{"label":"y","rows":7}"#);
    assert_eq!(all("rest"), r#"{"label":"y","rows":5}"#);
}

#[test]
fn mistakes_in_conditions_and_groups_are_shown_where_they_stand() {
    let text = "flow: 1
params: {manifest: '', train: {rows: 5, lable: y}, list: [1]}
include:
  none: {when: [1], pipeline: DIR/p.yaml}
stages:
  a: {when: \"${manifst} == ''\", uses: toy.count, with: {rows: 1}}
  b:
    when: ${manifest}
    uses: toy.count
    with: {rows: 1}
  c: {when: false, uses: toy.count, with: {rows: many}}
  d: {uses: toy.count, with: {<<: '${list}', rows: 1}}
";
    let said = mistakes(text);
    assert!(
        said.contains("p.yaml:4:16: error: `when` must be a condition, found a list"),
        "{said}"
    );
    assert!(
        said.contains("p.yaml:6:14: error: `when`: unknown parameter `manifst`"),
        "{said}"
    );
    assert!(said.contains("did you mean `manifest`?"), "{said}");
    assert!(
        said.contains("p.yaml:8:11: error: `when`: expected true or false, found text"),
        "{said}"
    );
    assert!(
        said.contains("`<<` takes a group of parameters, found a list"),
        "{said}"
    );
    // Of a stage that is switched off the form of the settings is checked.
    let text = "flow: 1
params: {train: {rows: 5, lable: y}}
stages:
  c: {when: false, uses: toy.count, with: {rows: many}}
  d: {uses: toy.count, with: {<<: '${train}'}}
";
    let said = mistakes(text);
    assert!(said.contains("p.yaml:4:50: error: stage `c`"), "{said}");
    let unused = "p.yaml:5:35: error: no stage that takes the group `train` has a setting `lable`";
    assert!(
        said.contains(unused) && said.contains("did you mean `label`?"),
        "{said}"
    );
    let off = mistakes("flow: 1\nstages:\n  a: {when: false, uses: toy.count, with: {rows: 1}}\n");
    assert!(off.contains("every stage is switched off"), "{off}");
}

#[test]
fn layout_comments_and_order_of_keys_change_no_identity() {
    let one = Files::new(&[(
        "p.yaml",
        "flow: 1\nstages:\n  a: {uses: toy.count, with: {rows: 1, label: x}}\n",
    )]);
    let two = Files::new(&[(
        "p.yaml",
        "stages:\n  a:   # here\n    with:\n      label: 'x'\n      rows: ${n}\n    uses: toy.count\nparams: {n: 1}\nflow: 1\n",
    )]);
    let identity = |files: &Files| files.check(&[]).unwrap().stages[0].settings.identity();
    assert_eq!(identity(&one), identity(&two));
}

#[test]
fn mistakes_in_the_form_of_a_pipeline() {
    insta::assert_snapshot!(mistakes(
        "flow: 1
descripton: x
params:
  rows: {defualt: 1, help: [x]}
  a-b: 1
stages:
  scan: {uses: toy.count, with: {rows: '${rwos}'}, form: x}
  2x: {uses: toy.count}
  none: {with: {}}
  bad: {uses: toy.count, from: 7, with: [1], max_rejects: 500%}
  twice: {uses: sql, from: [scan.rows, scan.facts]}
  lost:
    uses: sql
    from: scna
    with:
      query: |
        SELECT '${rows}'
          , ${nothing}
"
    ));
}

#[test]
fn mistakes_against_kinds() {
    insta::assert_snapshot!(mistakes(
        "flow: 1
params: {many: {default: lots}, few: 1}
stages:
  scan: {uses: toy.cuont}
  count: {uses: toy.count, with: {rows: '${many}', lable: x}}
  lone:
    uses: toy.count
    with:
      rows: ${many}
  fine: {uses: toy.count, with: {rows: 1}}
  after: {uses: sql, from: fine.fact, with: {query: x}}
  sql:
    uses: sql
    from: fine
    with:
      rejects:
        - {reason: a, when: 'a > ${few}'}
        - {reason: b, when: nine}
      query: x
  block:
    uses: sql
    from: fine
    with:
      query: |
        SELECT a, ${few}, b
        FROM fine WHERE ${few} < nine
  pair: {uses: toy.pair, from: {right: fine}}
  write: {uses: toy.save}
  reads: {uses: sql, from: out, with: {query: x}}
  out: {uses: toy.write, from: fine}
  lonely: {uses: toy.pass}
"
    ));
}

#[test]
fn circles_are_shown() {
    let said = mistakes(
        "flow: 1\nstages:\n  d: {uses: sql, from: b}\n  a: {uses: sql, from: c}\n  b: {uses: sql, from: a}\n  c: {uses: sql, from: b}\n",
    );
    assert!(said.contains("in a circle: a -> b -> c -> a"), "{said}");
    let files = Files::new(&[
        ("p.yaml", "flow: 1\ninclude: {g: {pipeline: DIR/q.yaml}}\n"),
        ("q.yaml", "flow: 1\ninclude: {h: {pipeline: DIR/p.yaml}}\n"),
    ]);
    let said = files.said(files.load(&[], &[]).unwrap_err());
    assert!(
        said.contains("q.yaml:2:25: error: pipelines include each other in a circle: p.yaml -> q.yaml -> p.yaml"),
        "{said}"
    );
    let files = Files::new(&[(
        "p.yaml",
        "flow: 1\nparams: {a: '${b}', b: 'x${a}'}\nstages: {s: {uses: toy.count}}\n",
    )]);
    let said = files.said(files.load(&[], &[]).unwrap_err());
    assert!(said.contains("refers to itself"), "{said}");
}

/// References that double at each step, in texts and in lists, and chains of them.
#[test]
fn references_that_grow_without_end_are_refused_where_they_stand() {
    let pipeline = |params: String, label: &str| {
        format!("flow: 1\nparams:\n{params}stages:\n  c: {{uses: toy.count, with: {{rows: 1, label: \"{label}\"}}}}\n")
    };
    let doubled = |first: &str, next: &dyn Fn(&str) -> String, steps: usize| {
        let mut params = format!("  p0: {first}\n");
        for step in 1..=steps {
            params.push_str(&format!("  p{step}: {}\n", next(&format!("${{p{}}}", step - 1))));
        }
        params
    };
    let texts = |steps| doubled("\"0123456789abcdef\"", &|before| format!("\"{before}{before}\""), steps);
    let lists = |steps| doubled("[x]", &|before| format!("[\"{before}\", \"{before}\"]"), steps);
    let maps = |steps| {
        doubled(
            "{a: x}",
            &|before| format!("{{a: \"{before}\", b: \"{before}\"}}"),
            steps,
        )
    };
    for grown in [
        texts(24),
        lists(40),
        maps(24),
        doubled("[x]", &|before| format!("[[[\"{before}\"]]]"), 100),
    ] {
        let said = mistakes(&pipeline(grown, "x"));
        assert!(
            said.contains("more than 1 MiB, or more than 128 levels") && said.contains("p.yaml:"),
            "{said}"
        );
    }
    // As much as is allowed, many times.
    let many: String = (0..80).map(|n| format!("  m{n}: \"${{p16}}\"\n")).collect();
    let said = mistakes(&pipeline(texts(16) + &many, "x"));
    assert!(said.contains("more than 64 MiB into this pipeline"), "{said}");
    let label = "${p16}".repeat(2);
    let said = mistakes(&pipeline(texts(16), &label));
    assert!(said.contains("more than 1 MiB"), "{said}");
    // Each refers to the one below it, so that none is known before the last.
    let chain = doubled("1", &|before| format!("\"{before}\""), 300);
    let upwards: String = chain.lines().rev().map(|line| format!("{line}\n")).collect();
    let said = mistakes(&pipeline(upwards, "x"));
    assert!(said.contains("more than 200 references"), "{said}");
    // What people write is far from that.
    let files = Files::new(&[(
        "p.yaml",
        &pipeline(
            doubled("1", &|before| format!("\"{before}\""), 150) + "  t: \"${p150}${p150}\"\n",
            "${t}",
        ),
    )]);
    let checked = files.check(&[]).unwrap_or_else(|found| panic!("{}", files.said(found)));
    assert_eq!(checked.stages.len(), 1);
}

/// In a pipeline, an overlay, and on the command line.
#[test]
fn documents_without_a_bottom_are_refused_by_place() {
    let deep = "[".repeat(200_000);
    let said = mistakes(&format!("flow: 1\nstages: {deep}"));
    assert!(said.contains("more than 128 deep") && said.contains(":2:"), "{said}");
    let files = Files::new(&[
        (
            "p.yaml",
            "flow: 1\nparams: {a: 1}\nstages:\n  c: {uses: toy.count, with: {rows: \"${a}\"}}\n",
        ),
        ("over.yaml", &format!("params:\n  a: {deep}\n")),
    ]);
    let said = files.said(files.load(&["over.yaml"], &[]).err().unwrap());
    assert!(
        said.contains("more than 128 deep") && said.contains("over.yaml"),
        "{said}"
    );
    let said = files.said(files.check(&[&format!("a={deep}")]).err().unwrap());
    assert!(
        said.contains("a=") || said.contains("`a`"),
        "{}",
        &said[..said.len().min(400)]
    );
    assert!(
        said.len() < 2_000,
        "the value is not shown in full: {} bytes",
        said.len()
    );
}

#[test]
fn another_port_of_the_stage_that_fits_is_named() {
    let said = mistakes("flow: 1\nstages:\n  say: {uses: toy.speak}\n  hear: {uses: toy.hear, from: {heard: say}}\n");
    assert!(
        said.contains("has no column `text`") && said.contains("did you mean its port `say.words`?"),
        "{said}"
    );
}

#[test]
fn formats_of_the_future_are_refused_by_name() {
    assert!(mistakes("flow: 2\nstages: []\n").contains("is of format 2, and this binary reads formats up to 1"));
    assert!(mistakes("flow: one\n").contains("`flow` must be 1"));
    assert!(mistakes("stages: {}\n").contains("`flow: 1` is missing"));
    assert!(mistakes("").contains("expected a pipeline"));
    assert!(mistakes("flow: 1\n").contains("this pipeline has no stages"));
    assert!(mistakes("flow: 1\nstages: {a: !x {uses: b}}\n").contains("tags"));
    assert!(mistakes("flow: 1\nstages:\n\ta: 1\n").contains("p.yaml:3:1: error: this is no YAML"));
    let said = mistakes("flow: 1\nstages: {}\nparams: {a: 1, b: '${a}', a: 2}\n");
    assert!(
        said.contains("p.yaml:3:27: error: duplicate key: `a` is given twice") && !said.contains("YAML"),
        "{said}"
    );
    let said = mistakes("flow: 1\nstages: {a: {uses: x, with: {y: ${z}}}}\n");
    assert!(
        said.contains("help: within { } or [ ] put quotes around a text that holds ${...}"),
        "{said}"
    );
}

#[test]
fn values_must_fit_the_defaults() {
    let text = "flow: 1
params:
  text: a
  count: 3
  share: 0.5
  flag: true
  list: [1, 2]
  free: {default: {}}
  map: {default: {a: 1, b: {c: x}}}
  any: null
  lone: '${env:NONE:-4}'
  group: {inner: 1}
stages: {s: {uses: toy.count, with: {rows: 1}}}
";
    let files = Files::new(&[("p.yaml", text)]);
    let value = |set: &[&str], name: &str| match files.load(&[], set) {
        Ok(pipeline) => serde_json::to_string(&pipeline.params.iter().find(|p| p.name == name).unwrap().value).unwrap(),
        Err(diagnostics) => diagnostics.to_string(),
    };
    for (set, name, expected) in [
        ("text=0042", "text", r#""0042""#),
        ("text=", "text", r#""""#),
        ("text='a b'", "text", r#""a b""#),
        ("text=a: b # c", "text", r#""a: b # c""#),
        ("text=${count}", "text", r#""3""#),
        ("count=-7", "count", "-7"),
        ("share=2", "share", "2.0"),
        ("share=3e-4", "share", "0.0003"),
        ("count=1e5", "count", "100000"),
        ("count=-2.0", "count", "-2"),
        ("count=100k", "count", "100000"),
        ("count=1.5k", "count", "1500"),
        ("count=2M", "count", "2000000"),
        ("count=0k", "count", "0"),
        ("list=[3, 1k]", "list", "[3,1000]"),
        ("text=100k", "text", r#""100k""#),
        ("flag=false", "flag", "false"),
        ("list=[3]", "list", "[3]"),
        ("list=3", "list", "[3]"),
        ("free={x: 1}", "free", r#"{"x":1}"#),
        ("free.x.y=1", "free", r#"{"x":{"y":1}}"#),
        ("map={a: 2}", "map", r#"{"a":2,"b":{"c":"x"}}"#),
        ("map.b.c=y", "map", r#"{"a":1,"b":{"c":"y"}}"#),
        ("any=[1, x]", "any", r#"[1,"x"]"#),
        ("lone=5", "lone", "5"),
        ("group.inner=2", "group.inner", "2"),
    ] {
        assert_eq!(value(&[set], name), expected, "{set}");
    }
    for (set, expected) in [
        (
            "count=1.5",
            "error: --set count=1.5: parameter `count`: expected a whole number like its default 3, found 1.5",
        ),
        ("count=", "found nothing"),
        ("count=1.5e-1", "found 0.15"),
        ("count=1e300", "expected a whole number"),
        ("count=.inf", "expected a whole number"),
        ("count=1.2345k", "expected a whole number"),
        ("count=k", "expected a whole number"),
        ("count=1.k", "expected a whole number"),
        ("count=-1k", "expected a whole number"),
        ("count=99999999999999999M", "expected a whole number"),
        ("flag=1", "expected true or false like its default true, found 1"),
        ("list=[x]", "item 1: expected a whole number"),
        ("list=x", "expected a whole number"),
        ("map.d=1", "unknown key `d`"),
        ("map.b.d=1", "unknown key `d`; did you mean `c`?"),
        (
            "cuont=1",
            "error: --set cuont=1: unknown parameter `cuont`\n  help: did you mean `count`?",
        ),
        ("count", "error: --set count: expected NAME=VALUE"),
        ("group=1", "`group` is a group of parameters"),
        (
            "count.x=1",
            "expected a whole number like its default 3, found {\"x\":1}",
        ),
        ("=1", "unknown parameter ``"),
        ("share=[", "error: --set share=["),
        ("share=${nope}", "unknown parameter `nope`"),
        ("share=${text}", "expected a number like its default 0.5, found \"a\""),
    ] {
        let said = value(&[set], "text");
        assert!(said.contains(expected), "{set}: {said}");
    }
    assert_eq!(value(&["free.x=1", "free.y=2"], "free"), r#"{"x":1,"y":2}"#);
}

#[test]
fn usual_names_of_other_programs_lead_to_the_parameters_here() {
    let text = "flow: 1
params:
  train: {phase1_lr: 1e-3, phase2_lr: 1e-4, max_steps: 9, warmup_steps: 1, clip: 1.0}
  max_rows: 3
stages: {s: {uses: toy.count, with: {rows: 1}}}
";
    let files = Files::new(&[("p.yaml", text), ("o.yaml", "flow: 1\nparams: {train: {epochs: 3}}\n")]);
    for (set, expected) in [
        (
            "train.learning_rate=1",
            "here that is `train.phase1_lr` and `train.phase2_lr`",
        ),
        (
            "Learning-Rate=1",
            "here that is `train.phase1_lr` and `train.phase2_lr`",
        ),
        ("epochs=1", "here that is `train.max_steps`"),
        // A parameter of that name in another group, or in none.
        ("max_steps=1", "did you mean `train.max_steps`?"),
        ("train.max_rows=1", "did you mean `max_rows`?"),
        ("train.max_stesp=1", "did you mean `train.max_steps`?"),
        ("train.warmup=1", "the parameters in `train` are `train.warmup_steps`, "),
    ] {
        let said = files.load(&[], &[set]).map(drop).unwrap_err().to_string();
        assert!(
            said.contains("unknown parameter") && said.contains(expected),
            "{set}: {said}"
        );
    }
    let said = files.load(&["o.yaml"], &[]).map(drop).unwrap_err().to_string();
    assert!(
        said.contains("o.yaml") && said.contains("here that is `train.max_steps`"),
        "{said}"
    );
}

#[test]
fn values_in_overlays_and_includes_are_checked_where_they_stand() {
    let files = Files::new(&[
        (
            "p.yaml",
            "flow: 1\nparams: {n: 1, m: {required: true}}\ninclude:\n  g: {pipeline: DIR/inner.yaml, params: {row: 1, label: [x]}}\n",
        ),
        ("inner.yaml", INNER),
        ("o.yaml", "flow: 1\nparams:\n  n: many\n  nn: 2\nstages: {}\n"),
    ]);
    insta::assert_snapshot!(files.said(files.load(&["o.yaml"], &[]).unwrap_err()));
    let said = files.said(files.load(&["none.yaml"], &["m=1"]).unwrap_err());
    assert!(said.contains("cannot read an overlay from none.yaml"), "{said}");
}

#[test]
fn sql_gets_bound_values_and_other_settings_get_types() {
    let text = "flow: 1
params: {min: 0.5, why: low}
stages:
  a: {uses: toy.count, with: {rows: 1}}
  b: {uses: sql, from: a, with: {query: 'SELECT ${min}', rejects: [{reason: '${why}', when: '${min}'}], params: {own: '${why}'}}}
";
    let checked = Files::new(&[("p.yaml", text)]).check(&["min=2"]).unwrap();
    assert_eq!(
        checked.stages[1].settings.all().to_string(),
        r#"{"params":{"own":"low","p_min":2.0},"query":"SELECT $p_min","rejects":[{"reason":"low","when":"$p_min"}]}"#
    );
}

#[test]
fn errors_while_running_find_their_place() {
    let files = Files::new(&[(
        "p.yaml",
        "flow: 1\nparams: {n: 1}\nstages:\n  a: {uses: toy.count, with: {rows: '${n}'}}\n",
    )]);
    let checked = files.check(&["n=2"]).unwrap();
    let error = StageError::setting("rows", "too few");
    let said = files.said(Diagnostics(vec![checked.diagnose(0, &error)]));
    assert_eq!(
        said,
        "p.yaml:4:38: error: stage `a`: too few\n 4 |   a: {uses: toy.count, with: {rows: '${n}'}}\n   |                                      ^^^^^^\n  help: `${n}` is 2 (--set n=2)"
            .replace("4:38", "4:37")
            .replace("                                      ^", "                                     ^")
    );
}

#[test]
fn a_terminal_gets_a_picture() {
    let files = Files::new(&[("p.yaml", "flow: 1\nstages:\n  a: {usse: toy.count}\n")]);
    let Err(Diagnostics(found)) = files.load(&[], &[]) else {
        panic!("accepted")
    };
    let picture = found[0]
        .render(Style::Unicode)
        .replace(&format!("{}/", files.0.path().display()), "");
    insta::assert_snapshot!(picture);
}

proptest! {
    /// Whatever becomes of a pipeline's text, the answer is a pipeline or a list of mistakes, and each has a
    /// place in the text.
    #[test]
    fn damaged_pipelines_never_panic(cuts in prop::collection::vec((0usize..900, 0usize..40, "[ -~\n]{0,4}"), 1..4)) {
        let files = Files::new(&[("p.yaml", OUTER), ("inner.yaml", INNER)]);
        let mut text = std::fs::read_to_string(files.path("p.yaml")).unwrap();
        for (at, length, new) in cuts {
            let at = (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap();
            let end = (at + length).min(text.len());
            if text.is_char_boundary(end) {
                text.replace_range(at..end, &new);
            }
        }
        std::fs::write(files.path("p.yaml"), &text).unwrap();
        match files.check(&["train.steps=1"]) {
            Ok(checked) => prop_assert!(!checked.stages.is_empty()),
            Err(Diagnostics(found)) => {
                prop_assert!(!found.is_empty());
                for diagnostic in found {
                    diagnostic.render(Style::Unicode);
                    if let Some(place) = diagnostic.place {
                        prop_assert!(place.source.text.get(place.offset..place.offset + place.length).is_some());
                    }
                }
            }
        }
    }
}
