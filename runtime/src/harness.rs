//! Runs the body of a kind in a unit test, without timely and without a pipeline.
//!
//! ```ignore
//! let output = Harness::<Clean>::new(settings)
//!     .input("scan", schema)
//!     .feed("scan", "hi/hi_0001", batch)
//!     .run()?;
//! assert_eq!(output.rows("rows", "hi/hi_0001").num_rows(), 3);
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use arrow::datatypes::SchemaRef;

use crate::dataflow::partition_output::{PartitionOutput, drain};
use crate::dataflow::port_buffer::PortBuffer;
use crate::dataflow::work::apply;
use flow_base::digest::Digest;
use flow_base::error::StageError;
use flow_base::event::{Event, Events};
use flow_base::partition::Partition;
use flow_base::reject::{ID_COLUMN, Reject};
use flow_base::row_number::ROW;
use flow_decide::stored::Decisions;
use flow_decide::{Ended, Resources, decide_generations};
use flow_kind::context::{Cancel, Context, ProcessShare, RunLabels, StopAsked, Waker};
use flow_kind::decision::Decision;
use flow_kind::inputs::{self, InputPort, Inputs, Offered, Reads};
use flow_kind::kind::{Body, Export, Global, Kind, Log, LogPosition, Operator, Progress, Shape, Source};
use flow_kind::out::Out;
use flow_processes::{Address, Join, Processes, join};
use flow_storage::Storage;
use flow_store::row_order::in_row_order;
use flow_store::{Artifact, ExportSet, RejectSet};

/// Simulates several processes of a run by threads of this one, connected over the loopback network. In their order;
/// the first is process 0.
///
/// # Panics
/// When they cannot connect.
pub fn joined_processes(count: usize) -> Vec<Arc<Processes>> {
    let free = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = free.local_addr().expect("an address").port();
    drop(free);
    let joining: Vec<_> = (0..count)
        .map(|process| {
            let member = Join {
                process,
                processes: count,
                leader: Address {
                    host: "localhost".into(),
                    port,
                },
                port: None,
                hosts: Vec::new(),
                secret: None,
                digest: Digest::of(b"harness"),
                settings: Vec::new(),
                timeout: Duration::from_secs(20),
            };
            std::thread::spawn(move || join(&member, &|_| {}).expect("all come"))
        })
        .collect();
    joining
        .into_iter()
        .map(|thread| thread.join().expect("no panic"))
        .collect()
}

/// Bytes for key rows.
const HARNESS_MEMORY: u64 = 1 << 26;

/// A kind with its settings and inputs.
pub struct Harness<K: Kind> {
    settings: K::Settings,
    inputs: Vec<Fed>,
    rejects: Vec<(String, Partition, Reject)>,
    scratch: PathBuf,
    threads: usize,
    share: Option<ProcessShare>,
    id_column: &'static str,
    storage: Storage,
}

struct Fed {
    name: String,
    schema: SchemaRef,
    /// In the order in which they were fed.
    batches: Vec<(Partition, RecordBatch)>,
    partitions: BTreeSet<Partition>,
}

/// The output of a run.
#[derive(Debug)]
pub struct Output {
    pub shape: Shape,
    /// All partitions that ran, sorted.
    pub partitions: Vec<Partition>,
    /// By port and partition, sorted by `_row`.
    batches: BTreeMap<(usize, Partition), Vec<RecordBatch>>,
    rejects: Vec<(Partition, Reject)>,
    /// Events that the body sent.
    pub events: Vec<Event>,
    /// For a log stage: rows of its result.
    pub result: Option<RecordBatch>,
}

/// How long a body may be `NotYet` without waking the runtime.
const PATIENCE: Duration = Duration::from_secs(60);

impl<K: Kind> Harness<K> {
    pub fn new(settings: impl Into<K::Settings>) -> Self {
        Harness {
            settings: settings.into(),
            inputs: Vec::new(),
            rejects: Vec::new(),
            scratch: std::env::temp_dir().join(format!("flow-harness-{}", std::process::id())),
            threads: 1,
            share: None,
            id_column: ID_COLUMN,
            storage: Storage::default(),
        }
    }

    /// Settings as a pipeline gives them.
    pub fn from_yaml(with: &str) -> Result<Self, StageError> {
        let wrong = |error: flow_spec::yaml::TypedError| StageError::setting(error.steps.to_string(), &error.message);
        let value = flow_spec::yaml::parse_text(with).map_err(|error| StageError::setting("", error))?;
        Ok(Harness::new(
            flow_spec::yaml::typed::<K::Settings>(&value).map_err(wrong)?,
        ))
    }

    /// Gives an input under the name that `from: {name: ...}` would use.
    pub fn input(mut self, name: &str, schema: SchemaRef) -> Self {
        self.inputs.push(Fed {
            name: name.into(),
            schema,
            batches: Vec::new(),
            partitions: BTreeSet::new(),
        });
        self
    }

    /// Feeds one batch to an input declared before.
    ///
    /// # Panics
    /// If no input has that name: a mistake in the test.
    pub fn feed(mut self, input: &str, partition: &str, batch: RecordBatch) -> Self {
        let partition = Partition::new(partition);
        let fed = self.fed(input);
        fed.partitions.insert(partition.clone());
        fed.batches.push((partition, batch));
        self
    }

    /// Adds a partition without rows.
    ///
    /// # Panics
    /// If no input has that name: a mistake in the test.
    pub fn empty_partition(mut self, input: &str, partition: &str) -> Self {
        self.fed(input).partitions.insert(Partition::new(partition));
        self
    }

    /// Adds a reject of a stage upstream.
    pub fn rejected(mut self, stage: &str, partition: &str, reject: Reject) -> Self {
        self.rejects.push((stage.into(), Partition::new(partition), reject));
        self
    }

    /// The scratch folder of the body.
    pub fn scratch(mut self, folder: impl Into<PathBuf>) -> Self {
        self.scratch = folder.into();
        self
    }

    /// What files in object storage are read with.
    #[must_use]
    pub fn storage(mut self, storage: &Storage) -> Self {
        self.storage = storage.clone();
        self
    }

    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Runs the body as that process of several, each of which runs all partitions.
    pub fn share(mut self, share: ProcessShare) -> Self {
        self.share = Some(share);
        self
    }

    /// The column that names rows, as [`flow_kind::registry::Registry::with_id_column`] says it; `id` if nothing is said.
    pub fn id_column(mut self, id_column: &'static str) -> Self {
        self.id_column = id_column;
        self
    }

    fn fed(&mut self, name: &str) -> &mut Fed {
        match self.inputs.iter_mut().find(|fed| fed.name == name) {
            Some(fed) => fed,
            None => panic!("the test declares no input `{name}`"),
        }
    }

    pub fn shape(&self) -> Result<Shape, StageError> {
        K::shape(&self.settings, &self.bound()?.1)
    }

    /// The declared inputs: which of them were fed, and their schemas.
    fn bound(&self) -> Result<(Vec<usize>, Inputs), StageError> {
        let offered: Vec<Offered<'_>> = self
            .inputs
            .iter()
            .map(|fed| Offered {
                // As in a pipeline, the only input of a kind needs no name.
                key: (K::INPUTS.len() > 1 || K::INPUTS.iter().any(InputPort::is_many)).then_some(&fed.name),
                stage: &fed.name,
                schema: Some(&fed.schema),
            })
            .collect();
        let bound = inputs::bind(K::NAME, K::INPUTS, &offered).map_err(|unfit| StageError::Input {
            name: unfit
                .place
                .map_or_else(String::new, |place| self.inputs[place].name.clone()),
            message: unfit.message,
            help: unfit.help,
        })?;
        let (places, inputs) = bound.into_iter().unzip();
        Ok((places, Inputs::new(inputs)))
    }

    /// Runs the body over everything that was fed, partition by partition in the order of their names, and
    /// checks conservation as a run does.
    pub fn run(mut self) -> Result<Output, StageError> {
        let (places, described) = self.bound()?;
        let shape = K::shape(&self.settings, &described)?;
        let mut fed: Vec<Option<Fed>> = std::mem::take(&mut self.inputs).into_iter().map(Some).collect();
        self.inputs = places.into_iter().filter_map(|place| fed[place].take()).collect();
        for (fed, input) in self.inputs.iter_mut().zip(described.iter()) {
            fed.name = input.name.clone();
        }
        let reads: Vec<Reads> = described.iter().map(|input| shape.reads(input)).collect();
        let events = Events::default();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let listener = Arc::clone(&seen);
        // The lock is only ever poisoned by a panic that fails the test anyway.
        events.listen(move |event| {
            listener
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .push(event.clone())
        });
        let woken = Arc::new((Mutex::new(false), Condvar::new()));
        let artifacts = self
            .inputs
            .iter()
            .zip(&reads)
            .map(|(fed, reads)| match reads {
                Reads::Streamed => Ok(None),
                Reads::Whole => fed.artifact().map(Some),
            })
            .collect::<Result<Vec<_>, _>>()?;
        let bell = Arc::clone(&woken);
        let context = Context {
            stage: "harness".into(),
            labels: RunLabels::default(),
            inputs: described,
            artifacts: artifacts.into(),
            rejects: RejectSet::in_memory(self.rejects.clone()),
            worker: 0,
            workers: 1,
            threads: self.threads,
            scratch: self.scratch.clone(),
            storage: self.storage.clone(),
            events,
            cancel: Cancel::default(),
            stop: StopAsked::default(),
            waker: Waker::new(move || {
                *bell.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = true;
                bell.1.notify_all();
            }),
            processes: None,
            share: self.share,
            compare_unreadable: None,
        };
        let body = K::open(&self.settings, &context)?;
        let mut run = Run {
            shape,
            id_column: self.id_column,
            streamed: reads.iter().map(|reads| *reads == Reads::Streamed).collect(),
            woken,
            in_hand: BTreeMap::new(),
            done: BTreeMap::new(),
            result: None,
        };
        match body {
            Body::Source(body) => run.source(body)?,
            Body::Local(mut body) => {
                run.operator(&self.inputs, body.as_mut())?;
                body.complete()?;
            }
            Body::Log(body) => run.log(&self.inputs, body)?,
            Body::Global(body) => run.global(&self.inputs, body, &context)?,
            Body::Export(body) => self.export(body)?,
        }
        drop(context);
        let mut output = Output {
            partitions: run.done.keys().cloned().collect(),
            batches: BTreeMap::new(),
            rejects: Vec::new(),
            events: std::mem::take(&mut *seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner)),
            result: run.result,
            shape: run.shape,
        };
        for (partition, collected) in run.done {
            for (port, kept) in collected.buffers.into_iter().enumerate() {
                let (_, batches) = kept.map(PortBuffer::into_parts).unwrap_or_default();
                let sorted = in_row_order(&output.shape.outputs[port].schema, batches)?;
                output.batches.insert((port, partition.clone()), sorted);
            }
            let mut rejects: Vec<Reject> = collected.rejects.sorted().collect::<Result<_, _>>()?;
            rejects.sort_by(|a, b| (a.row, &a.reason, &a.detail).cmp(&(b.row, &b.reason, &b.detail)));
            let named = rejects.into_iter().map(|reject| (partition.clone(), reject));
            output.rejects.extend(named);
        }
        Ok(output)
    }

    fn export(&self, mut body: Box<dyn Export>) -> Result<(), StageError> {
        let mut set = ExportSet::begin(
            &self.storage,
            &body.folder(),
            &body.manifest(),
            flow_base::digest::Digest::of(b"harness"),
            "harness",
            &self.scratch,
        )?;
        body.write(&mut set)?;
        if let Some(why) = set.without_rows() {
            return Err(StageError::Refused {
                message: why.to_string(),
                help: None,
            });
        }
        set.finish()?;
        body.stands();
        Ok(())
    }
}

impl Fed {
    fn artifact(&self) -> Result<Artifact, StageError> {
        let mut by_partition: BTreeMap<Partition, Vec<RecordBatch>> = self
            .partitions
            .iter()
            .map(|partition| (partition.clone(), Vec::new()))
            .collect();
        for (partition, batch) in &self.batches {
            by_partition.entry(partition.clone()).or_default().push(batch.clone());
        }
        let mut sorted = Vec::new();
        for (partition, batches) in by_partition {
            sorted.push((partition, in_row_order(&self.schema, batches)?));
        }
        Artifact::in_memory(self.schema.clone(), sorted)
    }
}

struct Run {
    shape: Shape,
    id_column: &'static str,
    /// Of each input, whether it is streamed.
    streamed: Vec<bool>,
    woken: Arc<(Mutex<bool>, Condvar)>,
    in_hand: BTreeMap<Partition, PartitionOutput>,
    done: BTreeMap<Partition, PartitionOutput>,
    result: Option<RecordBatch>,
}

impl Run {
    fn drain(&mut self, out: &mut Out) -> Result<(), StageError> {
        Ok(drain(out, &self.shape.outputs, &mut self.in_hand, |_, _, _| {})?)
    }

    fn begin(&mut self, partition: &Partition) {
        let keep = vec![true; self.shape.outputs.len()];
        self.in_hand
            .insert(partition.clone(), PartitionOutput::new(&keep, None, None));
    }

    fn finish(&mut self, partition: &Partition, source: bool) -> Result<(), StageError> {
        let mut collected = self.in_hand.remove(partition).ok_or_else(|| {
            StageError::failed(format!("partition {partition} is said to be done, but is not in hand"))
        })?;
        collected.check_numbers(&self.shape.outputs)?;
        collected.check_conservation(self.shape.conservation, source)?;
        self.done.insert(partition.clone(), collected);
        Ok(())
    }

    fn source(&mut self, mut body: Box<dyn Source>) -> Result<(), StageError> {
        let partitions = body.partitions()?;
        if !partitions.is_sorted_by(|a, b| a.name < b.name) {
            return Err(StageError::failed("partitions must be sorted by name, each name once"));
        }
        let names: Vec<Partition> = partitions.into_iter().map(|partition| partition.name).collect();
        for (index, name) in names.iter().enumerate() {
            self.begin(name);
            let mut out = Out::new(name.clone()).named_by(self.id_column);
            body.upcoming(&names[index + 1..]);
            body.read(name, &mut out)?;
            self.drain(&mut out)?;
            self.finish(name, true)?;
        }
        Ok(())
    }

    /// Feeds the streamed inputs, and waits for partitions that the body finishes later.
    fn operator<O: Operator + ?Sized>(&mut self, inputs: &[Fed], body: &mut O) -> Result<(), StageError> {
        let streamed = self.streamed.clone();
        let partitions: BTreeSet<Partition> = inputs
            .iter()
            .zip(&streamed)
            .filter(|(_, streamed)| **streamed)
            .flat_map(|(fed, _)| fed.partitions.clone())
            .collect();
        let first = streamed.iter().position(|streamed| *streamed);
        for partition in &partitions {
            self.begin(partition);
            let mut out = Out::new(partition.clone()).named_by(self.id_column);
            for (position, fed) in inputs.iter().enumerate().filter(|(position, _)| streamed[*position]) {
                for (_, batch) in fed.batches.iter().filter(|(of, _)| of == partition) {
                    if Some(position) == first {
                        // Just begun above, and only `finish` takes it out.
                        if let Some(collected) = self.in_hand.get_mut(partition) {
                            collected.rows_in += batch.num_rows() as u64;
                        }
                    }
                    out.of(partition);
                    body.batch(&fed.name, partition, batch.clone(), &mut out)?;
                    self.drain(&mut out)?;
                }
            }
            out.of(partition);
            let progress = body.partition_complete(partition, &mut out)?;
            self.drain(&mut out)?;
            if progress == Progress::Done {
                self.finish(partition, false)?;
            }
            self.poll(body)?;
        }
        while !self.in_hand.is_empty() {
            let (flag, bell) = &*self.woken;
            let guard = flag.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let (mut guard, waited) = bell
                .wait_timeout_while(guard, PATIENCE, |woken| !*woken)
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            *guard = false;
            drop(guard);
            if waited.timed_out() {
                let waiting: Vec<&str> = self.in_hand.keys().map(Partition::as_str).collect();
                return Err(StageError::failed(format!(
                    "nobody woke the runtime; still waiting for {}",
                    waiting.join(", ")
                )));
            }
            self.poll(body)?;
        }
        Ok(())
    }

    fn poll<O: Operator + ?Sized>(&mut self, body: &mut O) -> Result<(), StageError> {
        if self.in_hand.is_empty() {
            return Ok(());
        }
        let mut out = Out::new(Partition::new("")).named_by(self.id_column);
        let done = body.poll(&mut out)?;
        self.drain(&mut out)?;
        for partition in done {
            self.finish(&partition, false)?;
        }
        Ok(())
    }

    fn log(&mut self, inputs: &[Fed], mut body: Box<dyn Log>) -> Result<(), StageError> {
        if let LogPosition::At { .. } = body.position()? {
            // A log counts steps, not rows.
            self.shape.conservation = flow_kind::Conservation::NewRows;
            self.operator(inputs, body.as_mut())?;
            body.complete()?;
        }
        self.result = Some(body.result()?);
        Ok(())
    }

    fn global(&mut self, inputs: &[Fed], mut body: Box<dyn Global>, context: &Context) -> Result<(), StageError> {
        let position = self
            .streamed
            .iter()
            .position(|streamed| *streamed)
            .ok_or_else(|| StageError::failed("a global stage needs an input that is streamed"))?;
        let rows = inputs[position].artifact()?;
        let key_schema = body.key_schema();
        let decision_schema = body.decision_schema();
        let mut key_rows = Vec::new();
        for partition in rows.partitions() {
            let mut keys = Vec::new();
            for batch in rows.read(partition, None)? {
                keys.push(body.keys(partition, &batch?)?);
            }
            key_rows.push((partition.clone(), in_row_order(&key_schema, keys)?));
        }
        let decision = body.decision();
        let keys = Artifact::in_memory(key_schema, key_rows)?;
        let (decided, classes) = decide(&decision, &keys, HARNESS_MEMORY, &context.scratch)?;
        match &decision {
            Decision::Groups(groups) => groups.complete(context, &decided)?,
            Decision::Choice(choice) => choice.complete(context, &classes)?,
        }
        let mut decisions: BTreeMap<Partition, Vec<RecordBatch>> = BTreeMap::new();
        for (partition, batch) in decided {
            decisions.entry(partition).or_default().push(batch);
        }
        for partition in rows.partitions() {
            self.begin(partition);
            let batch = rows.read_whole(partition, None)?;
            if let Some(collected) = self.in_hand.get_mut(partition) {
                collected.rows_in = batch.num_rows() as u64;
            }
            let own = in_row_order(&decision_schema, decisions.remove(partition).unwrap_or_default())?;
            let own = concat_batches(&decision_schema, &own)?;
            let mut out = Out::new(partition.clone()).named_by(self.id_column);
            let numbers: Vec<_> = batch.column_by_name(ROW).cloned().into_iter().collect();
            let ports = self.shape.outputs.len();
            apply(body.as_mut(), ports, &rows, partition, &numbers, &own, &mut out)?;
            for (_, port, ranges) in std::mem::take(&mut out.selected) {
                for batch in rows.read_rows(partition, &ranges)? {
                    out.send(port, batch?);
                }
            }
            self.drain(&mut out)?;
            self.finish(partition, false)?;
        }
        match decisions.keys().next() {
            None => Ok(()),
            Some(partition) => Err(StageError::failed(format!(
                "there are decisions for partition {partition}, which has no rows"
            ))),
        }
    }
}

impl Output {
    fn port(&self, name: &str) -> usize {
        match self.shape.outputs.iter().position(|port| port.name == name) {
            Some(port) => port,
            None => panic!("the kind has no port `{name}`"),
        }
    }

    /// The batches of a port and partition, sorted by `_row`.
    ///
    /// # Panics
    /// If there is no such port: a mistake in the test.
    pub fn batches(&self, port: &str, partition: &str) -> &[RecordBatch] {
        self.batches
            .get(&(self.port(port), Partition::new(partition)))
            .map_or(&[], Vec::as_slice)
    }

    /// The same as one batch.
    ///
    /// # Panics
    /// If there is no such port: a mistake in the test.
    pub fn rows(&self, port: &str, partition: &str) -> RecordBatch {
        let schema = &self.shape.outputs[self.port(port)].schema;
        match concat_batches(schema, self.batches(port, partition)) {
            Ok(batch) => batch,
            Err(error) => panic!("batches of one schema join: {error}"),
        }
    }

    /// All partitions of a port as one batch, in the order of their names.
    ///
    /// # Panics
    /// If there is no such port: a mistake in the test.
    pub fn all_rows(&self, port: &str) -> RecordBatch {
        let index = self.port(port);
        let batches: Vec<&RecordBatch> = self
            .batches
            .iter()
            .filter(|((of, _), _)| *of == index)
            .flat_map(|(_, batches)| batches)
            .collect();
        match concat_batches(&self.shape.outputs[index].schema, batches) {
            Ok(batch) => batch,
            Err(error) => panic!("batches of one schema join: {error}"),
        }
    }

    /// All rejects, by partition, then row.
    pub fn rejects(&self) -> &[(Partition, Reject)] {
        &self.rejects
    }

    /// Row and reason of the rejects of one partition.
    pub fn reasons(&self, partition: &str) -> Vec<(Option<u32>, &str)> {
        let partition = Partition::new(partition);
        self.rejects
            .iter()
            .filter(|(of, _)| *of == partition)
            .map(|(_, reject)| (reject.row, reject.reason.as_str()))
            .collect()
    }
}

/// Decisions as they are stored: by partition, sorted by `_row`, without partitions that have none.
///
/// # Errors
/// When they do not have the columns of `schema`.
pub fn stored_decisions(
    schema: &SchemaRef,
    decisions: Vec<(Partition, RecordBatch)>,
) -> Result<BTreeMap<Partition, RecordBatch>, StageError> {
    let decisions = Decisions::new(Arc::clone(schema), decisions)?;
    let partitions = decisions.partitions();
    Ok(partitions.map(|name| (name.clone(), decisions.of(name))).collect())
}

/// Decides about `keys` with this many bytes of memory for them: the decisions, and of a choice rows in all and chosen rows by
/// class.
///
/// # Errors
/// Those of the stage.
pub fn decide(decision: &Decision, keys: &Artifact, memory: u64, scratch: &Path) -> Result<OfGeneration, StageError> {
    let resources = Resources {
        memory,
        scratch: scratch.to_path_buf(),
        stop: Box::new(|| None),
    };
    match flow_decide::decide(decision, keys, &resources) {
        Ok(decided) => Ok((decided.decisions, decided.classes)),
        Err(Ended::Stage(error)) => Err(error),
        Err(Ended::Signal(signal)) => Err(StageError::failed(format!("signal {signal}"))),
    }
}

/// The decisions about a generation of key rows, and of a choice rows in all and chosen rows by class.
pub type OfGeneration = (Vec<(Partition, RecordBatch)>, BTreeMap<String, (u64, u64)>);

/// Decides about each of these generations of key rows by what changed since the one before.
///
/// # Errors
/// Those of the stage.
pub fn decide_incrementally(decision: &Decision, generations: &[Artifact]) -> Result<Vec<OfGeneration>, StageError> {
    let decided = decide_generations(decision, generations)?.into_iter();
    Ok(decided.map(|decided| (decided.decisions, decided.classes)).collect())
}
