//! A local stage that multiplies, and fails in all ways.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use flow_kind::{
    Body, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Progress, RejectClass, Shape,
    StageError, UNREADABLE,
};
use serde::{Deserialize, Serialize};

use super::{each, note, port, rows, rows_schema};

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
    /// Gives rows of this value twice.
    twice: Option<i64>,
    /// Declares itself expensive.
    dear: bool,
    /// Works beside the worker.
    aside: bool,
    /// Milliseconds for each batch.
    slow: u64,
    /// Takes nothing as it is.
    needs_current: bool,
    /// A file without which all rows are refused.
    needs: PathBuf,
    /// A file whose presence hides that file.
    blind: PathBuf,
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
            twice: None,
            dear: false,
            aside: false,
            slow: 0,
            needs_current: false,
            needs: PathBuf::new(),
            blind: PathBuf::new(),
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
        let (begun, gives_up) = (Instant::now(), self.context.gives_up());
        while begun.elapsed() < Duration::from_millis(settings.slow) && !gives_up() {
            std::thread::sleep(Duration::from_millis(5));
        }
        if gives_up() {
            return Err(StageError::failed("given up"));
        }
        if !settings.breaks.as_os_str().is_empty() {
            let recipes = fs::read_dir(settings.breaks.join("artifacts")).map_err(StageError::failed)?;
            for recipe in recipes {
                let data = recipe.map_err(StageError::failed)?.path().join("data");
                if fs::remove_dir(&data).is_ok() {
                    fs::write(&data, "").map_err(StageError::failed)?;
                }
            }
        }
        let needs = !settings.needs.as_os_str().is_empty();
        if needs && (fs::read(&settings.needs).is_err() || settings.blind.is_file()) {
            self.context.compare_unreadable(&settings.needs)?;
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
            for _ in 0..if settings.twice == Some(value) { 2 } else { 1 } {
                side.0.push(row);
                side.1.push(value * settings.by);
            }
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
