//! Pipelines as a user writes them, right and wrong, through `load` and `check`.

mod groups;
mod hostile;
mod mistakes;
mod parts;
mod values;

use std::path::PathBuf;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::*;
use flow_kind::registry::{Registry, kind};
use flow_kind::{Body, Context, InputCount, InputPort, Inputs, Kind, OutputPort, Port, Role, Shape, StageError};

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("_row", DataType::UInt32, false)]))
}

fn ports(names: &[&str]) -> Vec<Port> {
    names.iter().map(|name| Port::new(name.to_string(), schema())).collect()
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
            return Err(
                StageError::input("right", "needs an input `left`").with_help("name the inputs `left` and `right`")
            );
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
    &[InputPort::whole("heard", "words").columns(&[("text", flow_kind::ColumnType::Text)])],
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

/// Files in a folder of their own; `DIR` in a text represents the folder.
struct Files(TempDir);

impl Files {
    fn new(files: &[(&str, &str)]) -> Files {
        let files_at = Files(TempDir::new().unwrap());
        for (name, text) in files {
            std::fs::create_dir_all(files_at.path(name).parent().unwrap()).unwrap();
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
            usual_names: UsualNames {
                same: &[
                    ("phase1_lr phase2_lr", "learning_rate max_lr"),
                    ("max_steps steps", "epochs"),
                ],
                near: &[
                    ("training does not stop early", "max_steps", "patience"),
                    ("`--workers` sets it", "", "workers"),
                    ("there are no adapters", "unfreeze_step", "lora"),
                ],
            },
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
