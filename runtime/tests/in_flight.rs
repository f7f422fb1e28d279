//! The memory of a run beyond that of its stages, counted by the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, AsArray, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, UInt32Type};
use flow_base::event::Events;
use flow_kind::registry::{Registry, kind};
use flow_kind::{
    Body, Conservation, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Port, Progress,
    RejectClass, Shape, Source, SourcePartition, StageError,
};
use flow_runtime::Options;
use flow_runtime::run::{RunSummary, run};
use flow_spec::{Overrides, check, load};
use flow_storage::Storage;
use serde::{Deserialize, Serialize};

/// Counts the bytes that are asked of the system.
struct Counting;

static HELD: AtomicI64 = AtomicI64::new(0);
static MOST: AtomicI64 = AtomicI64::new(0);

fn count(bytes: i64) {
    let held = HELD.fetch_add(bytes, Relaxed) + bytes;
    MOST.fetch_max(held, Relaxed);
}

// SAFETY: every call is forwarded unchanged; counting uses atomics, which allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise, handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's promise, handed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        // SAFETY: the caller's promise, handed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One measurement at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The result of `work`, and its peak of allocated bytes.
fn most_held<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let before = HELD.load(Relaxed);
    MOST.store(before, Relaxed);
    let given = work();
    (given, (MOST.load(Relaxed) - before).max(0) as u64)
}

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("_row", DataType::UInt32, false),
        Field::new("text", DataType::Utf8, false),
    ]))
}

/// Rows whose texts are long and differ.
fn rows(numbers: &[u32], length: usize) -> RecordBatch {
    let text = |row: &u32| format!("{row:0>length$}");
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from(numbers.to_vec())),
        Arc::new(StringArray::from_iter_values(numbers.iter().map(text))),
    ];
    RecordBatch::try_new(schema(), columns).unwrap()
}

fn port() -> Port {
    Port::new("rows", schema())
}

struct Give;

/// Partitions of rows with texts.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
struct GiveSettings {
    partitions: u32,
    rows: u32,
    /// Bytes of a text.
    length: usize,
}

impl Kind for Give {
    const NAME: &'static str = "toy.give";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = GiveSettings;

    fn shape(_: &GiveSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::source(vec![port()]))
    }

    fn open(settings: &GiveSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(GiveBody(settings.clone()))))
    }
}

struct GiveBody(GiveSettings);

impl Source for GiveBody {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let partition = |number| SourcePartition::new(format!("p{number:04}").into(), Vec::new(), "");
        Ok((0..self.0.partitions).map(partition).collect())
    }

    fn read(&mut self, _: &Partition, out: &mut Out) -> Result<(), StageError> {
        let numbers: Vec<u32> = (0..self.0.rows).collect();
        for numbers in numbers.chunks(8_192) {
            out.send(0, rows(numbers, self.0.length));
        }
        Ok(())
    }
}

struct Change;

/// Does something with each row.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
struct ChangeSettings {
    /// Refuses all rows.
    #[serde(default)]
    refuse: bool,
    /// Otherwise gives rows with texts of this many bytes.
    #[serde(default)]
    length: usize,
    /// Is through with a partition so many milliseconds after it is complete.
    #[serde(default)]
    slow: u64,
}

impl Kind for Change {
    const NAME: &'static str = "toy.change";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::streamed("rows", "numbers")];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = ChangeSettings;

    fn shape(_: &ChangeSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape {
            conservation: Conservation::Rows,
            ..Shape::local(vec![port()])
        })
    }

    fn open(settings: &ChangeSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(ChangeBody {
            settings: settings.clone(),
            complete: Vec::new(),
        })))
    }
}

struct ChangeBody {
    settings: ChangeSettings,
    complete: Vec<(Partition, Instant)>,
}

impl Operator for ChangeBody {
    fn batch(&mut self, _: &str, _: &Partition, batch: RecordBatch, out: &mut Out) -> Result<(), StageError> {
        if self.settings.refuse {
            let all: Vec<usize> = (0..batch.num_rows()).collect();
            return out.reject_rows(&batch, &all, "unwanted", RejectClass::Rule, "no row is wanted");
        }
        let numbers = batch.column(0).as_primitive::<UInt32Type>().values();
        out.send(0, rows(numbers, self.settings.length));
        Ok(())
    }

    fn partition_complete(&mut self, partition: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        if self.settings.slow == 0 {
            return Ok(Progress::Done);
        }
        self.complete.push((partition.clone(), Instant::now()));
        Ok(Progress::NotYet)
    }

    fn poll(&mut self, _: &mut Out) -> Result<Vec<Partition>, StageError> {
        let long = Duration::from_millis(self.settings.slow);
        let (done, left) = std::mem::take(&mut self.complete)
            .into_iter()
            .partition(|(_, since): &(Partition, Instant)| since.elapsed() >= long);
        self.complete = left;
        let done: Vec<(Partition, Instant)> = done;
        Ok(done.into_iter().map(|(partition, _)| partition).collect())
    }
}

/// Runs a pipeline of these stages in a new state directory.
fn run_stages(stages: &str, bytes: Option<u64>) -> RunSummary {
    let dir = tempfile::tempdir().unwrap();
    let path: PathBuf = dir.path().join("pipeline.yaml");
    std::fs::write(&path, format!("flow: 1\nstages:\n{stages}")).unwrap();
    let registry = Registry::new(vec![kind::<Give>(), kind::<Change>()]).unwrap();
    let pipeline = load(&path, &Overrides::default(), &registry).unwrap_or_else(|found| panic!("{found:?}"));
    let checked = check(pipeline, &registry).unwrap_or_else(|found| panic!("{found:?}"));
    let mut options = Options::new(&Storage::default(), dir.path().join("state"));
    options.workers = Some(2);
    options.in_flight_bytes = bytes;
    run(&Arc::new(checked), &options, &Events::default()).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn a_rejected_row_takes_some_tens_of_bytes() {
    let _alone = alone();
    let stages = |refuse: bool| {
        format!(
            "  give: {{uses: toy.give, with: {{partitions: 1, rows: 400000, length: 100}}}}\n  \
             change: {{uses: toy.change, from: give, with: {{refuse: {refuse}, length: 1}}}}\n"
        )
    };
    // What the source gives is in memory as a whole.
    let (_, kept) = most_held(|| run_stages(&stages(false), None));
    let (summary, refused) = most_held(|| run_stages(&stages(true), None));
    let rejects: u64 = summary
        .stages
        .iter()
        .flat_map(|stage| &stage.rejects)
        .map(|count| count.rows)
        .sum();
    assert_eq!(rejects, 400_000);
    println!("{refused} held for 400,000 rejects, {kept} where none is refused");
    let each = refused.saturating_sub(kept) / 400_000;
    assert!(
        each < 150,
        "{each} bytes for each rejected row ({refused} held, {kept} where none is refused)"
    );
}

#[test]
fn sources_hold_back_for_what_stages_collect() {
    let _alone = alone();
    // A partition is 2 KB as the source gives it and 12 MB as the next stage does; 16 partitions may be in flight.
    let stages = "  give: {uses: toy.give, with: {partitions: 24, rows: 200, length: 1}}\n  \
                  grow: {uses: toy.change, from: give, with: {length: 60000, slow: 30}}\n";
    let partition = 12_000_000;
    let (_, most) = most_held(|| run_stages(stages, Some(3 * partition)));
    println!("{most} held");
    // Collected, and once more while it is encoded.
    assert!(most < 6 * partition, "{most} bytes held");
    // The same with practically no bound, which shows that the bound does it.
    let (_, unbounded) = most_held(|| run_stages(stages, Some(u64::MAX / 4)));
    println!("{unbounded} held without a bound");
    assert!(unbounded > 9 * partition, "{unbounded} bytes held");
}

#[test]
fn row_groups_are_written_as_they_come() {
    let _alone = alone();
    // 4 MB in, 500 MB out, in the order of the rows.
    let stages = "  give: {uses: toy.give, with: {partitions: 1, rows: 500000, length: 1}}\n  \
                  grow: {uses: toy.change, from: give, with: {length: 1000}}\n";
    let (summary, most) = most_held(|| run_stages(stages, None));
    assert_eq!(summary.stages.iter().map(|stage| stage.rows_out).max(), Some(500_000));
    println!("{most} held");
    // A row group of 65,536 rows, in batches, joined and encoded.
    assert!(most < 260 << 20, "{most} bytes held");
}
