#![allow(dead_code, reason = "each test binary uses some of them")]
//! Stage kinds of a few lines each, for tests of the runtime.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::compute::concat_batches;
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef, UInt32Type};
use flow_runtime::event::Event;
use flow_runtime::registry::{AnyKind, kind};
use flow_runtime::store::DigestedFile;
use flow_runtime::{
    Artifact, Body, Conservation, Context, Export, ExportSet, Global, InputCount, InputPort, Inputs, Kind, Log,
    LogPosition, Operator, Out, OutputPort, Partition, Port, Progress, RejectClass, RowOutcome, Secret, Shape, Source,
    SourcePartition, StageError, UNREADABLE,
};
use serde::{Deserialize, Serialize};

pub fn kinds() -> Vec<Box<dyn AnyKind>> {
    vec![
        kind::<Count>(),
        kind::<Once>(),
        kind::<Double>(),
        kind::<Join>(),
        kind::<Login>(),
        kind::<Dedup>(),
        kind::<Write_>(),
        kind::<Steps>(),
        kind::<Train>(),
    ]
}

pub fn rows_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("_row", DataType::UInt32, false),
        Field::new("value", DataType::Int64, false),
    ]))
}

pub fn rows(numbers: &[u32], values: &[i64]) -> RecordBatch {
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from(numbers.to_vec())),
        Arc::new(Int64Array::from(values.to_vec())),
    ];
    RecordBatch::try_new(rows_schema(), columns).unwrap()
}

fn port(name: &str) -> Port {
    Port {
        name: name.into(),
        schema: rows_schema(),
    }
}

fn each(batch: &RecordBatch) -> Vec<(u32, i64)> {
    let (numbers, values) = (
        batch.column(0).as_primitive::<UInt32Type>(),
        batch.column(1).as_primitive::<Int64Type>(),
    );
    numbers
        .values()
        .iter()
        .copied()
        .zip(values.values().iter().copied())
        .collect()
}

/// Says in a file how often a stage worked on a partition.
fn note(folder: &Path, stage: &str, partition: &Partition) {
    if folder.as_os_str().is_empty() {
        return;
    }
    let mut file = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join("work.log"))
        .unwrap();
    file.write_all(format!("{stage} {partition}\n").as_bytes()).unwrap();
}

// --- source -----------------------------------------------------------------------------------------------

pub struct Count;

/// Reads a folder of text files, one partition per file, one number per line.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CountSettings {
    /// The folder.
    folder: PathBuf,
    /// Where to note work.
    #[serde(default)]
    noted: PathBuf,
    /// Milliseconds to spend on a partition.
    #[serde(default)]
    slow: u64,
}

struct CountBody {
    settings: CountSettings,
    stage: String,
}

impl Kind for Count {
    const NAME: &'static str = "toy.count";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = CountSettings;

    fn shape(_: &CountSettings, _: &Inputs) -> Result<Shape, StageError> {
        let mut shape = Shape::source(vec![port("rows")]);
        shape.conservation = Conservation::Rows;
        Ok(shape)
    }

    fn open(settings: &CountSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(CountBody {
            settings: settings.clone(),
            stage: context.stage.clone(),
        })))
    }

    fn identity(_: &CountSettings) -> serde_json::Value {
        serde_json::Value::Null
    }
}

impl Source for CountBody {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.settings.folder).map_err(StageError::failed)? {
            let path = entry.map_err(StageError::failed)?.path();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            found.push(SourcePartition {
                name: name.into(),
                files: vec![path],
                extra: String::new(),
            });
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        note(&self.settings.noted, &self.stage, partition);
        std::thread::sleep(std::time::Duration::from_millis(self.settings.slow));
        let path = self.settings.folder.join(format!("{partition}.txt"));
        let text = fs::read_to_string(&path).map_err(StageError::failed)?;
        if text.starts_with("broken") {
            out.reject_partition("unreadable", RejectClass::Fault, "it says so itself");
            return Ok(());
        }
        let (mut numbers, mut values) = (Vec::new(), Vec::new());
        for (row, line) in text.lines().enumerate() {
            out.read(1);
            match line.parse() {
                Ok(value) => {
                    numbers.push(row as u32);
                    values.push(value);
                }
                Err(_) => {
                    let batch = rows(&[row as u32], &[0]);
                    out.reject_rows(&batch, &[0], "not_a_number", RejectClass::Fault, line)?;
                }
            }
        }
        // Backwards and in pieces: the runtime puts rows into order.
        for (numbers, values) in numbers.chunks(3).zip(values.chunks(3)).rev() {
            out.send(0, rows(numbers, values));
        }
        Ok(())
    }
}

// --- local ------------------------------------------------------------------------------------------------

pub struct Double;

/// Multiplies; refuses what is below a limit.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DoubleSettings {
    /// The factor.
    by: i64,
    /// The least value that goes on.
    least: i64,
    /// Fails at this value.
    fail_at: Option<i64>,
    /// Panics at this value.
    panic_at: Option<i64>,
    /// Loses rows of this value.
    lose: Option<i64>,
    /// Declares itself expensive.
    dear: bool,
    /// Works beside the worker.
    aside: bool,
    /// Takes nothing as it stands.
    needs_current: bool,
    /// A file without which all rows are refused.
    needs: PathBuf,
    /// A state directory in which no data can be written any more, under recipes that have none yet.
    breaks: PathBuf,
    /// Where to note work.
    noted: PathBuf,
}

impl Default for DoubleSettings {
    fn default() -> Self {
        DoubleSettings {
            by: 2,
            least: i64::MIN,
            fail_at: None,
            panic_at: None,
            lose: None,
            dear: false,
            aside: false,
            needs_current: false,
            needs: PathBuf::new(),
            breaks: PathBuf::new(),
            noted: PathBuf::new(),
        }
    }
}

struct DoubleBody {
    settings: DoubleSettings,
    context: Context,
    aside: BTreeMap<Partition, Vec<RecordBatch>>,
    results: (SyncSender<Doubled>, Receiver<Doubled>),
}

type Doubled = (Partition, RecordBatch);

impl Kind for Double {
    const NAME: &'static str = "toy.double";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::streamed("rows", "numbers")];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers"), OutputPort::new("odd", "numbers")];
    type Settings = DoubleSettings;

    fn shape(settings: &DoubleSettings, _: &Inputs) -> Result<Shape, StageError> {
        let mut shape = Shape::local(vec![port("rows"), port("odd")]);
        shape.expensive = settings.dear;
        shape.needs_current = settings.needs_current;
        Ok(shape)
    }

    fn open(settings: &DoubleSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(DoubleBody {
            settings: settings.clone(),
            context: context.clone(),
            aside: BTreeMap::new(),
            results: sync_channel(1000),
        })))
    }

    fn identity(settings: &DoubleSettings) -> serde_json::Value {
        serde_json::json!({"by": settings.by, "least": settings.least, "lose": settings.lose})
    }
}

impl DoubleBody {
    fn double(&self, partition: &Partition, batch: &RecordBatch, out: &mut Out) -> Result<(), StageError> {
        let settings = &self.settings;
        if !settings.breaks.as_os_str().is_empty() {
            let recipes = fs::read_dir(settings.breaks.join("artifacts")).map_err(StageError::failed)?;
            for recipe in recipes {
                let data = recipe.map_err(StageError::failed)?.path().join("data");
                if fs::remove_dir(&data).is_ok() {
                    fs::write(&data, "").map_err(StageError::failed)?;
                }
            }
        }
        if !settings.needs.as_os_str().is_empty() && fs::read(&settings.needs).is_err() {
            let all: Vec<usize> = (0..batch.num_rows()).collect();
            out.of(partition);
            return out.reject_rows(batch, &all, UNREADABLE, RejectClass::Fault, "");
        }
        let (mut even, mut odd, mut refused) = ((vec![], vec![]), (vec![], vec![]), vec![]);
        for (at, (row, value)) in each(batch).into_iter().enumerate() {
            if settings.fail_at == Some(value) {
                return Err(StageError::Failed {
                    message: format!("{value} is not allowed"),
                    row: Some(row),
                    help: None,
                });
            }
            assert!(settings.panic_at != Some(value), "planted at {value}");
            if settings.lose == Some(value) {
                continue;
            }
            if value < settings.least {
                refused.push(at);
                continue;
            }
            let side = if value % 2 == 0 { &mut even } else { &mut odd };
            side.0.push(row);
            side.1.push(value * settings.by);
        }
        out.of(partition).send(0, rows(&even.0, &even.1));
        out.send(1, rows(&odd.0, &odd.1));
        out.reject_rows(batch, &refused, "too_small", RejectClass::Rule, "")
    }
}

impl Operator for DoubleBody {
    fn batch(&mut self, _: &str, partition: &Partition, batch: RecordBatch, out: &mut Out) -> Result<(), StageError> {
        if self.settings.aside {
            self.aside.entry(partition.clone()).or_default().push(batch);
            return Ok(());
        }
        self.double(partition, &batch, out)
    }

    fn partition_complete(&mut self, partition: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        note(&self.settings.noted, &self.context.stage, partition);
        if !self.settings.aside {
            return Ok(Progress::Done);
        }
        let batches = self.aside.remove(partition).unwrap_or_default();
        let (send, partition, waker) = (self.results.0.clone(), partition.clone(), self.context.waker.clone());
        std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(2));
            // Fails once the run has ended.
            let _ = send.send((partition, concat_batches(&rows_schema(), &batches).unwrap()));
            waker.wake();
        });
        Ok(Progress::NotYet)
    }

    fn poll(&mut self, out: &mut Out) -> Result<Vec<Partition>, StageError> {
        let mut done = Vec::new();
        while let Ok((partition, batch)) = self.results.1.try_recv() {
            self.double(&partition, &batch, out)?;
            done.push(partition);
        }
        Ok(done)
    }
}

pub struct Login;

/// Passes rows on, and shows that it was given a secret.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LoginSettings {
    /// The secret.
    password: Secret,
    /// A setting that may be shown.
    #[serde(default)]
    user: String,
    /// What the password has to be.
    #[serde(default)]
    length: usize,
    /// Fails with the password in its message.
    #[serde(default)]
    fail: bool,
}

struct LoginBody(LoginSettings, Context);

impl Kind for Login {
    const NAME: &'static str = "toy.login";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::streamed("rows", "numbers")];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = LoginSettings;

    fn shape(settings: &LoginSettings, _: &Inputs) -> Result<Shape, StageError> {
        if settings.length > 0 && settings.password.reveal().len() != settings.length {
            let message = format!("`{}` has another length", settings.password.reveal());
            return Err(StageError::setting("password", message));
        }
        Ok(Shape::local(vec![port("rows")]))
    }

    fn open(settings: &LoginSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(LoginBody(settings.clone(), context.clone()))))
    }
}

impl Operator for LoginBody {
    fn batch(&mut self, _: &str, _: &Partition, batch: RecordBatch, out: &mut Out) -> Result<(), StageError> {
        let LoginBody(settings, context) = self;
        let password = settings.password.reveal();
        context.report(serde_json::json!({"line": format!("sent {password}"), password: 1}));
        context.events.send(Event::Warning {
            stage: None,
            message: format!("{} logs in with {password}", settings.user),
        });
        if settings.fail {
            return Err(StageError::failed(format!("{password} was refused")).with_help(format!("change {password}")));
        }
        out.send(0, batch);
        Ok(())
    }

    fn partition_complete(&mut self, _: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        Ok(Progress::Done)
    }
}

pub struct Join;

/// Adds the values of two inputs by row; rows of the first alone are passed on.
#[derive(Clone, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct JoinSettings {}

#[derive(Default)]
struct JoinBody {
    sides: BTreeMap<Partition, [Vec<(u32, i64)>; 2]>,
}

impl Kind for Join {
    const NAME: &'static str = "toy.join";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("left", "numbers"),
        InputPort::streamed("right", "numbers").optional(),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = JoinSettings;

    fn shape(_: &JoinSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::local(vec![port("rows")]))
    }

    fn open(_: &JoinSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(JoinBody::default())))
    }
}

impl Operator for JoinBody {
    fn batch(&mut self, input: &str, partition: &Partition, batch: RecordBatch, _: &mut Out) -> Result<(), StageError> {
        self.sides.entry(partition.clone()).or_default()[usize::from(input == "right")].extend(each(&batch));
        Ok(())
    }

    fn partition_complete(&mut self, partition: &Partition, out: &mut Out) -> Result<Progress, StageError> {
        let [left, right] = self.sides.remove(partition).unwrap_or_default();
        let right: BTreeMap<u32, i64> = right.into_iter().collect();
        let (numbers, values): (Vec<u32>, Vec<i64>) = left
            .into_iter()
            .map(|(row, value)| (row, value + right.get(&row).unwrap_or(&0)))
            .unzip();
        out.send(0, rows(&numbers, &values));
        Ok(Progress::Done)
    }
}

// --- global -----------------------------------------------------------------------------------------------

pub struct Dedup;

/// Keeps the first row of each value, over all partitions.
#[derive(Clone, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DedupSettings {
    /// Where to note work.
    noted: PathBuf,
    /// Values with the same remainder count as the same; 0 for the values themselves.
    modulo: i64,
    /// Keeps the last row instead.
    last: bool,
    /// Gives a key row too few.
    lossy: bool,
}

struct DedupBody {
    settings: DedupSettings,
}

impl Kind for Dedup {
    const NAME: &'static str = "toy.dedup";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::streamed("rows", "numbers")];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = DedupSettings;

    fn shape(_: &DedupSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::global(vec![port("rows")]))
    }

    fn open(settings: &DedupSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Global(Box::new(DedupBody {
            settings: settings.clone(),
        })))
    }

    fn identity(settings: &DedupSettings) -> serde_json::Value {
        serde_json::json!({"modulo": settings.modulo, "last": settings.last})
    }
}

impl DedupBody {
    fn same(&self, value: i64) -> i64 {
        match self.settings.modulo {
            0 => value,
            modulo => value.rem_euclid(modulo),
        }
    }
}

fn original_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("_row", DataType::UInt32, false),
        Field::new("original", DataType::Utf8, false),
    ]))
}

impl Global for DedupBody {
    fn key_schema(&self) -> SchemaRef {
        rows_schema()
    }

    fn decision_schema(&self) -> SchemaRef {
        original_schema()
    }

    fn keys(&mut self, partition: &Partition, batch: &RecordBatch) -> Result<RecordBatch, StageError> {
        note(&self.settings.noted, "keys", partition);
        Ok(batch.slice(0, batch.num_rows() - usize::from(self.settings.lossy)))
    }

    fn decide(&mut self, keys: &Artifact) -> Result<Vec<(Partition, RecordBatch)>, StageError> {
        let mut all: BTreeSet<(i64, Partition, u32)> = BTreeSet::new();
        for batch in keys.batches(None) {
            let (partition, batch) = batch?;
            all.extend(
                each(&batch)
                    .into_iter()
                    .map(|(row, value)| (self.same(value), partition.clone(), row)),
            );
        }
        let mut all: Vec<_> = all.into_iter().collect();
        if self.settings.last {
            all.reverse();
        }
        let mut first: BTreeMap<i64, String> = BTreeMap::new();
        let mut said: BTreeMap<Partition, Vec<(u32, String)>> = BTreeMap::new();
        for (value, partition, row) in all {
            match first.get(&value) {
                None => {
                    first.insert(value, format!("{partition}/{row}"));
                }
                Some(original) => said.entry(partition).or_default().push((row, original.clone())),
            }
        }
        Ok(said
            .into_iter()
            .map(|(partition, mut said)| {
                said.sort();
                let columns: Vec<ArrayRef> = vec![
                    Arc::new(UInt32Array::from_iter_values(said.iter().map(|one| one.0))),
                    Arc::new(StringArray::from_iter_values(said.iter().map(|one| &one.1))),
                ];
                (partition, RecordBatch::try_new(original_schema(), columns).unwrap())
            })
            .collect())
    }

    fn apply(
        &mut self,
        partition: &Partition,
        rows: &UInt32Array,
        decisions: &RecordBatch,
    ) -> Result<Vec<RowOutcome>, StageError> {
        note(&self.settings.noted, "apply", partition);
        let gone: BTreeMap<u32, String> = decisions
            .column(0)
            .as_primitive::<UInt32Type>()
            .values()
            .iter()
            .copied()
            .zip(
                decisions
                    .column(1)
                    .as_string::<i32>()
                    .iter()
                    .map(|text| text.unwrap().to_string()),
            )
            .collect();
        let fate = |row: &u32| match gone.get(row) {
            None => RowOutcome::Port(0),
            Some(original) => RowOutcome::Rejected {
                reason: "duplicate",
                class: RejectClass::Rule,
                detail: original.clone(),
            },
        };
        Ok(rows.values().iter().map(fate).collect())
    }
}

// --- export -----------------------------------------------------------------------------------------------

pub struct Write_;

/// Writes all rows, and all rejects, as text.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteSettings {
    /// The folder.
    folder: PathBuf,
}

struct WriteBody(PathBuf, Context);

impl Kind for Write_ {
    const NAME: &'static str = "toy.write";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::whole("tables", "numbers").count(InputCount::Many)];
    const OUTPUTS: &'static [OutputPort] = &[];
    type Settings = WriteSettings;

    fn shape(_: &WriteSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::export())
    }

    fn open(settings: &WriteSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Export(Box::new(WriteBody(
            settings.folder.clone(),
            context.clone(),
        ))))
    }

    fn identity(_: &WriteSettings) -> serde_json::Value {
        serde_json::Value::Null
    }
}

impl Export for WriteBody {
    fn folder(&self) -> PathBuf {
        self.0.clone()
    }

    fn write(&mut self, set: &mut ExportSet) -> Result<(), StageError> {
        let mut text = String::new();
        for (_, input) in self.1.whole("tables") {
            for batch in input.batches(None) {
                let (partition, batch) = batch?;
                for (row, value) in each(&batch) {
                    text.push_str(&format!("{partition} {row} {value}\n"));
                }
            }
        }
        fs::write(set.file("rows.txt")?, text).map_err(StageError::failed)?;
        let mut text = String::new();
        for reject in self.1.rejects.iter() {
            let (stage, partition, reject) = reject?;
            text.push_str(&format!(
                "{stage} {partition} {:?} {} {}\n",
                reject.row, reject.reason, reject.detail
            ));
        }
        fs::write(set.file("rejects.txt")?, text).map_err(StageError::failed)?;
        Ok(())
    }
}

// --- a source that digests what it reads -------------------------------------------------------------------

pub struct Once;

/// Reads files that hold one number, and digests them itself.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OnceSettings {
    /// The folder.
    folder: PathBuf,
    /// Lets the runtime digest the files.
    #[serde(default)]
    leave: bool,
    /// What is written into each file before it is opened, with a time that is long past.
    #[serde(default)]
    before: Option<String>,
    /// And when half of it was read.
    #[serde(default)]
    between: Option<String>,
}

struct OnceBody(OnceSettings);

impl Kind for Once {
    const NAME: &'static str = "toy.once";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = OnceSettings;

    fn shape(_: &OnceSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::source(vec![port("rows")]))
    }

    fn open(settings: &OnceSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(OnceBody(settings.clone()))))
    }

    fn identity(_: &OnceSettings) -> serde_json::Value {
        serde_json::Value::Null
    }
}

/// Writes a file that looks as if it were a hundred seconds old.
pub fn write_aged(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    let then = std::time::SystemTime::now() - std::time::Duration::from_secs(100);
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_modified(then).unwrap();
}

impl Source for OnceBody {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let mut files: Vec<PathBuf> = fs::read_dir(&self.0.folder)
            .map_err(StageError::failed)?
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        let partition = |path: PathBuf| SourcePartition {
            name: path.file_stem().unwrap().to_string_lossy().into_owned().into(),
            files: vec![path],
            extra: String::new(),
        };
        Ok(files.into_iter().map(partition).collect())
    }

    fn digests(&self, _: &SourcePartition) -> bool {
        !self.0.leave
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        let path = self.0.folder.join(format!("{partition}.txt"));
        if let Some(text) = &self.0.before {
            // Another text each time that it is read.
            let more = fs::read_to_string(&path).is_ok_and(|found| found.starts_with(text.as_str()));
            write_aged(&path, &format!("{text}{}", if more { "0" } else { "" }));
        }
        let mut file = DigestedFile::open(&path).map_err(StageError::failed)?;
        let length = file.length() as usize;
        let mut bytes = file.read(0, length / 2).map_err(StageError::failed)?;
        if let Some(text) = &self.0.between {
            fs::write(&path, text).map_err(StageError::failed)?;
        }
        bytes.extend(
            file.read(length as u64 / 2, length - length / 2)
                .map_err(StageError::failed)?,
        );
        let value = String::from_utf8_lossy(&bytes)
            .trim()
            .parse()
            .map_err(StageError::failed)?;
        out.send(0, rows(&[0], &[value]));
        if !self.0.leave {
            out.digested(file);
        }
        Ok(())
    }
}

// --- steps and a log --------------------------------------------------------------------------------------

pub struct Steps;

/// Deals the rows of its input out to steps.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StepsSettings {
    /// How many.
    steps: u64,
    /// Where to note work.
    #[serde(default)]
    noted: PathBuf,
}

struct StepsBody {
    settings: StepsSettings,
    rows: i64,
}

impl Kind for Steps {
    const NAME: &'static str = "toy.steps";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::whole("rows", "numbers").optional()];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = StepsSettings;

    fn shape(_: &StepsSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::source(vec![port("rows")]))
    }

    fn open(settings: &StepsSettings, context: &Context) -> Result<Body, StageError> {
        let rows = context.input("rows").map_or(0, Artifact::rows) as i64;
        Ok(Body::Source(Box::new(StepsBody {
            settings: settings.clone(),
            rows,
        })))
    }
}

impl Source for StepsBody {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let step = |step| SourcePartition {
            name: format!("step-{step:08}").into(),
            files: Vec::new(),
            extra: String::new(),
        };
        Ok((0..self.settings.steps).map(step).collect())
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        note(&self.settings.noted, "steps", partition);
        let step: i64 = partition.as_str()[5..].parse().map_err(StageError::failed)?;
        out.send(0, rows(&[0, 1], &[step, self.rows]));
        Ok(())
    }
}

pub struct Train;

/// Adds up what each step gives, in a file that says which step comes next.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TrainSettings {
    /// The file.
    log: PathBuf,
    /// After which step it is done.
    steps: u64,
    /// Refuses to run if its log was made with another.
    #[serde(default)]
    rate: i64,
    /// Fails at this step.
    #[serde(default)]
    fail_at: Option<u64>,
    /// Milliseconds that a step takes.
    #[serde(default)]
    slow: u64,
}

/// Works on a thread of its own, as training does.
struct TrainBody {
    settings: TrainSettings,
    context: Context,
    in_hand: BTreeMap<Partition, i64>,
    finished: Vec<Partition>,
    to: Option<SyncSender<(u64, i64)>>,
    from: Option<Receiver<Result<(u64, i64), String>>>,
    thread: Option<std::thread::JoinHandle<()>>,
    done: (u64, i64),
}

impl Kind for Train {
    const NAME: &'static str = "toy.train";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("steps", "numbers"),
        InputPort::whole("late", "numbers").optional(),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("result", "numbers")];
    type Settings = TrainSettings;

    fn shape(_: &TrainSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::log(vec![port("result")]))
    }

    fn open(settings: &TrainSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Log(Box::new(TrainBody {
            settings: settings.clone(),
            context: context.clone(),
            in_hand: BTreeMap::new(),
            finished: Vec::new(),
            to: None,
            from: None,
            thread: None,
            done: (0, 0),
        })))
    }

    fn identity(_: &TrainSettings) -> serde_json::Value {
        serde_json::Value::Null
    }
}

impl TrainBody {
    /// Step that comes next, sum so far, rate.
    fn read_log(&self) -> (u64, i64, Option<i64>) {
        let Ok(text) = fs::read_to_string(&self.settings.log) else {
            return (0, 0, None);
        };
        let mut words = text.split_whitespace();
        let next = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
        let sum = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
        (next, sum, words.next().and_then(|word| word.parse().ok()))
    }

    fn write_log(&self) -> Result<(), StageError> {
        fs::write(
            &self.settings.log,
            format!("{} {} {}", self.done.0, self.done.1, self.settings.rate),
        )
        .map_err(StageError::failed)
    }
}

impl Operator for TrainBody {
    fn batch(&mut self, _: &str, partition: &Partition, batch: RecordBatch, _: &mut Out) -> Result<(), StageError> {
        *self.in_hand.entry(partition.clone()).or_default() +=
            each(&batch).into_iter().map(|(_, value)| value).sum::<i64>();
        Ok(())
    }

    fn partition_complete(&mut self, partition: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        let step: u64 = partition.as_str()[5..].parse().map_err(StageError::failed)?;
        if self.to.is_none() {
            let (to, work) = sync_channel::<(u64, i64)>(100);
            let (results, from) = sync_channel(100);
            let (next, mut sum, _) = self.read_log();
            if next != step {
                return Err(StageError::failed(format!("step {next} comes next, not {step}")));
            }
            self.done = (next, sum);
            let (waker, settings) = (self.context.waker.clone(), self.settings.clone());
            self.thread = Some(std::thread::spawn(move || {
                for (step, value) in work {
                    std::thread::sleep(std::time::Duration::from_millis(settings.slow));
                    sum += value;
                    let result = if settings.fail_at == Some(step) {
                        Err(format!("step {step} exploded"))
                    } else {
                        Ok((step, sum))
                    };
                    if results.send(result).is_err() {
                        return;
                    }
                    waker.wake();
                }
            }));
            (self.to, self.from) = (Some(to), Some(from));
        }
        let value = self.in_hand.remove(partition).unwrap_or_default();
        self.to
            .as_ref()
            .unwrap()
            .send((step, value))
            .map_err(StageError::failed)?;
        Ok(Progress::NotYet)
    }

    fn poll(&mut self, _: &mut Out) -> Result<Vec<Partition>, StageError> {
        let mut done = std::mem::take(&mut self.finished);
        while let Some(Ok(result)) = self.from.as_ref().map(Receiver::try_recv) {
            let (step, sum) = result.map_err(StageError::failed)?;
            self.done = (step + 1, sum);
            done.push(Partition::new(format!("step-{step:08}")));
        }
        Ok(done)
    }

    fn complete(&mut self) -> Result<(), StageError> {
        self.write_log()
    }
}

impl Log for TrainBody {
    fn position(&mut self) -> Result<LogPosition, StageError> {
        let (next, _, rate) = self.read_log();
        if rate.is_some_and(|rate| rate != self.settings.rate) {
            return Err(StageError::Refused {
                message: "the rate changed".into(),
                help: Some("start anew".into()),
            });
        }
        if next >= self.settings.steps {
            return Ok(LogPosition::Finished {
                detail: format!("{next} steps are done"),
            });
        }
        Ok(LogPosition::At {
            step: next,
            detail: format!("goes on at step {next}"),
        })
    }

    fn result(&mut self) -> Result<RecordBatch, StageError> {
        let (next, sum, _) = self.read_log();
        Ok(rows(&[0, 1], &[next as i64, sum]))
    }

    fn checkpoint(&mut self, _stop: bool) -> Result<(), StageError> {
        let mut out = Out::new(Partition::new(""));
        self.finished = self.poll(&mut out)?;
        self.write_log()
    }
}

impl Drop for TrainBody {
    fn drop(&mut self) {
        self.to = None;
        self.from = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
