//! The kind `training.train`: takes steps from the dataflow and trains on a thread of its own beside the
//! workers.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use arrow::array::{Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use crossbeam_channel::{Receiver, Sender, TryRecvError, TrySendError, bounded, select, unbounded};
use flow_evaluation::audio_rows::{check_rows, is_members};
use flow_evaluation::decode::ValidationSet;
use flow_model::ModelConfig;
use flow_model::checkpoint::OpenModel;
use flow_model::model::TdtModel;
use flow_runtime::event::Event;
use flow_runtime::{
    Artifact, Body, Conservation, Context, Input, Kind, Log, Operator, Out, Partition, Port, Progress, ROW, Reads,
    Role, Shape, StageError, Standing,
};

use crate::checkpoint;
use crate::error::TrainingError;
use crate::hub::{Hub, Reference};
use crate::init::configuration;
use crate::loaded_rows::{micro_batches, missing_column, stage_mark};
use crate::long_texts::LongTexts;
use crate::memory::{self, Checked};
use crate::ranks::{Among, share};
use crate::session::{Evaluate, Session, Start, find_start};
use crate::settings::TrainSettings;
use crate::train_tokenizer::{is_tokenizer, read_tokenizer_files};
use crate::trainer::panic_text;

/// The kind `training.train`.
pub struct TrainingTrain;

/// Columns of the output: the last checkpoint.
pub fn model_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("path", DataType::Utf8, false),
        Field::new("step", DataType::Int64, false),
        Field::new("digest", DataType::Utf8, false),
    ]))
}

impl Kind for TrainingTrain {
    const NAME: &'static str = "training.train";
    const VERSION: u32 = 1;
    type Settings = TrainSettings;

    fn shape(settings: &TrainSettings, inputs: &[Input]) -> Result<Shape, StageError> {
        let mut settings = settings.clone();
        if inputs.iter().skip(2).any(|input| is_tokenizer(&input.schema)) {
            // Its bytes are not there yet; that they will come is enough.
            settings.tokenizer_input = Some(Arc::from([]));
        }
        settings.validate()?;
        let [batches, validation, rest @ ..] = inputs else {
            return Err(StageError::Input {
                name: "from".into(),
                message: "training needs the micro-batches of sampling.load, then validation rows; then, in any order, the train rows, the port `members` of an audio.probe and a tokenizer.train".into(),
                help: Some("from: {batches: load, validation: ..., train: ..., members: ...}".into()),
            });
        };
        if let Some(column) = missing_column(&batches.schema) {
            return Err(StageError::Input {
                name: batches.name.clone(),
                message: format!("it has no column {column}, as sampling.load gives it"),
                help: None,
            });
        }
        for input in rest {
            let role = role_of(&input.schema);
            if role.is_none() || rest.iter().filter(|other| role_of(&other.schema) == role).count() > 1 {
                return Err(StageError::Input {
                    name: input.name.clone(),
                    message:
                        "further inputs of training are one set of train rows, one port `members` of an audio.probe, and one tokenizer.train"
                            .into(),
                    help: None,
                });
            }
        }
        if settings.eval_every > 0 {
            check_rows(
                validation,
                rest.iter()
                    .any(|input| role_of(&input.schema) == Some(Further::Members)),
            )?;
        }
        let reads = inputs
            .iter()
            .enumerate()
            .map(|(index, _)| if index == 0 { Reads::Streamed } else { Reads::Whole })
            .collect();
        let outputs = vec![Port {
            name: "model".into(),
            schema: model_schema(),
        }];
        Ok(Shape {
            role: Role::Log,
            reads,
            outputs,
            dear: false,
            conservation: Conservation::NewRows,
        })
    }

    fn open(settings: &TrainSettings, context: &Context) -> Result<Body, StageError> {
        let mut settings = settings.clone();
        if let Some(tokenizer) = further(context, Further::Tokenizer) {
            settings.tokenizer_input = Some(read_tokenizer_files(tokenizer)?.0.into());
        }
        Ok(Body::Log(Box::new(TrainBody {
            settings,
            context: context.clone(),
            arriving: BTreeMap::new(),
            ready: BTreeMap::new(),
            next: 0,
            thread: None,
        })))
    }
}

/// What an input after the first two is, as its columns tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Further {
    TrainRows,
    Members,
    Tokenizer,
}

fn role_of(schema: &Schema) -> Option<Further> {
    if is_tokenizer(schema) {
        Some(Further::Tokenizer)
    } else if is_members(schema) {
        Some(Further::Members)
    } else {
        ["segment_id", "text", "duration"]
            .iter()
            .all(|name| schema.column_with_name(name).is_some())
            .then_some(Further::TrainRows)
    }
}

fn further(context: &Context, role: Further) -> Option<&Artifact> {
    context
        .inputs
        .iter()
        .skip(2)
        .flatten()
        .find(|input| role_of(input.schema()) == Some(role))
}

/// The micro-batches of one step.
struct Work {
    step: u64,
    partition: Partition,
    batches: Vec<RecordBatch>,
}

/// Writes a checkpoint between two steps, and ends the thread if `stop`.
struct Request {
    stop: bool,
    reply: Sender<Result<(), StageError>>,
}

struct TrainBody {
    settings: TrainSettings,
    context: Context,
    /// Batches of steps that are not complete.
    arriving: BTreeMap<u64, Vec<RecordBatch>>,
    /// Complete steps that the thread has not taken.
    ready: BTreeMap<u64, Work>,
    /// The step to hand over next.
    next: u64,
    thread: Option<Thread>,
}

struct Thread {
    /// Gone once no more work will come.
    work: Option<Sender<Work>>,
    requests: Sender<Request>,
    done: Receiver<Result<Partition, StageError>>,
    handle: Option<JoinHandle<()>>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        // The thread ends after the step in hand, when it finds nobody at the other end.
        self.work = None;
        let (nobody, _) = bounded(0);
        self.requests = nobody;
        if let Some(handle) = self.handle.take() {
            // A panic in there was caught and told before.
            let _ = handle.join();
        }
    }
}

/// The number in `step-000000012`.
fn step_of(partition: &Partition) -> Result<u64, StageError> {
    partition
        .as_str()
        .strip_prefix("step-")
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(|| {
            StageError::failed(format!(
                "partition {partition} is no step such as step-000000012; training reads from sampling.load"
            ))
        })
}

impl TrainBody {
    fn data_digest(&self) -> Option<String> {
        further(&self.context, Further::TrainRows).map(|rows| rows.digest().to_hex())
    }

    /// Starts the thread with the first step.
    fn thread(&mut self) -> Result<&mut Thread, StageError> {
        if self.thread.is_none() {
            let data = self.data_digest();
            self.next = find_start(&self.settings, data.as_deref())?.step();
            let (work, take) = bounded::<Work>(2);
            let (requests, asked) = unbounded::<Request>();
            let (tell, done) = unbounded();
            let (settings, context) = (self.settings.clone(), self.context.clone());
            let handle = std::thread::Builder::new()
                .name("training".into())
                .spawn(move || {
                    let waker = context.waker.clone();
                    let outcome = catch_unwind(AssertUnwindSafe(|| {
                        train(&settings, &context, data.as_deref(), &take, &asked, &tell)
                    }));
                    let failed = match outcome {
                        Ok(Ok(())) => None,
                        Ok(Err(error)) => Some(error),
                        Err(panic) => Some(StageError::failed(format!(
                            "training panicked: {}",
                            panic_text(panic.as_ref())
                        ))),
                    };
                    if let Some(error) = failed {
                        // Nobody is left to tell when the stage itself is gone.
                        let _ = tell.send(Err(error));
                    }
                    drop(tell);
                    waker.wake();
                })
                .map_err(|e| StageError::failed(format!("the training thread cannot be started: {e}")))?;
            self.thread = Some(Thread {
                work: Some(work),
                requests,
                done,
                handle: Some(handle),
            });
        }
        self.thread
            .as_mut()
            .ok_or_else(|| StageError::failed("the training thread is gone"))
    }

    /// Hands over the steps that the thread has room for.
    fn hand_over(&mut self) -> Result<(), StageError> {
        self.thread()?;
        while let Some(entry) = self.ready.first_entry() {
            let Some(work) = self.thread.as_ref().and_then(|thread| thread.work.as_ref()) else {
                break;
            };
            if *entry.key() != self.next {
                break;
            }
            match work.try_send(entry.remove()) {
                Ok(()) => self.next += 1,
                Err(TrySendError::Full(back) | TrySendError::Disconnected(back)) => {
                    // When the thread is gone, `poll` finds out why.
                    self.ready.insert(back.step, back);
                    break;
                }
            }
        }
        Ok(())
    }

    fn ask(&mut self, stop: bool) -> Result<(), StageError> {
        let Some(thread) = &self.thread else { return Ok(()) };
        let (reply, answer) = bounded(1);
        if thread.requests.send(Request { stop, reply }).is_err() {
            return Ok(());
        }
        // The thread is gone without an answer only if it failed, which `poll` tells.
        answer.recv().unwrap_or(Ok(()))
    }
}

impl Operator for TrainBody {
    fn batch(
        &mut self,
        input: usize,
        partition: &Partition,
        batch: RecordBatch,
        _out: &mut Out,
    ) -> Result<(), StageError> {
        if input == 0 {
            self.arriving.entry(step_of(partition)?).or_default().push(batch);
        }
        Ok(())
    }

    fn partition_complete(&mut self, partition: &Partition, _out: &mut Out) -> Result<Progress, StageError> {
        let step = step_of(partition)?;
        let batches = self.arriving.remove(&step).unwrap_or_default();
        self.thread()?;
        if step < self.next {
            // Done before; only a loader that does not know where training stands gives it again.
            return Ok(Progress::Done);
        }
        self.ready.insert(
            step,
            Work {
                step,
                partition: partition.clone(),
                batches,
            },
        );
        self.hand_over()?;
        Ok(Progress::NotYet)
    }

    fn poll(&mut self, _out: &mut Out) -> Result<Vec<Partition>, StageError> {
        let mut finished = Vec::new();
        if let Some(thread) = &self.thread {
            loop {
                match thread.done.try_recv() {
                    Ok(partition) => finished.push(partition?),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) if self.ready.is_empty() || !finished.is_empty() => break,
                    Err(TryRecvError::Disconnected) => {
                        return Err(StageError::failed("the training thread ended before its work was done"));
                    }
                }
            }
            self.hand_over()?;
        }
        Ok(finished)
    }

    fn complete(&mut self) -> Result<(), StageError> {
        self.ask(true)
    }
}

impl Log for TrainBody {
    fn standing(&mut self) -> Result<Standing, StageError> {
        let start = find_start(&self.settings, self.data_digest().as_deref())?;
        let step = start.step();
        let detail = match &start {
            Start::Fresh { folder } => format!("from the first step, in {}", folder.display()),
            Start::Resume {
                checkpoint,
                changes,
                damaged,
                ..
            } => {
                let mut detail = format!(
                    "step {step} of {}, {}",
                    self.settings.max_steps,
                    checkpoint.path.display()
                );
                if !changes.is_empty() {
                    detail.push_str(&format!("; changed: {}", changes.join("; ")));
                }
                for damage in damaged {
                    detail.push_str(&format!("; {} is damaged", damage.folder.display()));
                }
                detail
            }
        };
        if step >= self.settings.max_steps {
            Ok(Standing::Finished { detail })
        } else {
            Ok(Standing::At { step, detail })
        }
    }

    fn result(&mut self) -> Result<RecordBatch, StageError> {
        let root = Path::new(&self.settings.checkpoints);
        let folder = checkpoint::current(root)?;
        let (standing, record) = checkpoint::latest(&folder)?
            .ok_or_else(|| StageError::failed(format!("{} holds no checkpoint", folder.display())))?;
        Ok(RecordBatch::try_new(
            model_schema(),
            vec![
                Arc::new(UInt32Array::from(vec![0])),
                Arc::new(StringArray::from(vec![standing.path.to_string_lossy().into_owned()])),
                Arc::new(Int64Array::from(vec![i64::try_from(record.step).unwrap_or(i64::MAX)])),
                Arc::new(StringArray::from(vec![record.model_digest()])),
            ],
        )?)
    }

    fn checkpoint(&mut self, stop: bool) -> Result<(), StageError> {
        self.ask(stop)
    }
}

/// The thread's life: steps in order, requests between them.
fn train(
    settings: &TrainSettings,
    context: &Context,
    data: Option<&str>,
    work: &Receiver<Work>,
    requests: &Receiver<Request>,
    done: &Sender<Result<Partition, StageError>>,
) -> Result<(), StageError> {
    let Some(settings) = &with_init(settings, context, data, requests)? else {
        return Ok(());
    };
    let checked = check_memory(settings, context, data)?;
    let screen = context.clone();
    let evaluate = validation(settings, context)?;
    let mut session = Session::begin_among(
        settings,
        data,
        evaluate,
        Box::new(move |figures| screen.report(figures)),
        context.processes.as_ref().map(|processes| Among {
            processes,
            rank_bytes: checked.map(|checked| checked.another),
        }),
    )?;
    if let Some(change) = session.vocabulary_change() {
        context.events.send(Event::Warning {
            stage: Some(context.stage.clone()),
            message: format!(
                "{} differs from that of init: {}",
                if settings.tokenizer_input.is_some() {
                    "the tokenizer that comes as an input"
                } else {
                    settings.tokenizer_path()
                },
                change.summary()
            ),
        });
    }
    for message in session.set_aside() {
        context.events.send(Event::Warning {
            stage: Some(context.stage.clone()),
            message: message.clone(),
        });
    }
    tell_long_texts(settings, context, &mut session)?;
    loop {
        let began = Instant::now();
        // A request goes before the steps that wait.
        if let Ok(request) = requests.try_recv()
            && answer(&mut session, request)
        {
            return Ok(());
        }
        select! {
            recv(requests) -> request => match request {
                Ok(request) => if answer(&mut session, request) { return Ok(()) },
                Err(_) => return Ok(()),
            },
            recv(work) -> step => match step {
                Ok(step) => {
                    if context.cancel.is_set() {
                        return Ok(());
                    }
                    session.waited_for_data(began.elapsed());
                    let partition = one_step(settings, context, &mut session, step)?;
                    if done.send(Ok(partition)).is_err() {
                        return Ok(());
                    }
                    context.waker.wake();
                }
                Err(_) => return Ok(()),
            },
        }
    }
}

/// The settings with the path of a model of the hub, which is downloaded if training begins from it. None: the run is to
/// end.
fn with_init(
    settings: &TrainSettings,
    context: &Context,
    data: Option<&str>,
    requests: &Receiver<Request>,
) -> Result<Option<TrainSettings>, StageError> {
    let mut settings = settings.clone();
    let Some(reference) = Reference::parse(&settings.init).transpose()? else {
        return Ok(Some(settings));
    };
    if !matches!(find_start(&settings, data)?, Start::Fresh { .. }) {
        return Ok(Some(settings));
    }
    let hub = Hub::from_environment()?;
    let mut stopped = false;
    let fetched = hub.fetch(&reference, &mut |line| {
        context.report(serde_json::json!({ "line": line }));
        if let Ok(request) = requests.try_recv() {
            // There is nothing to checkpoint yet. Whoever asked may be gone.
            let _ = request.reply.send(Ok(()));
            stopped |= request.stop;
        }
        !stopped && !context.cancel.is_set()
    })?;
    settings.fetched = fetched;
    Ok(settings.fetched.is_some().then_some(settings))
}

/// Finds out whether training fits into memory. A run that has nothing left to do is not looked at.
fn check_memory(
    settings: &TrainSettings,
    context: &Context,
    data: Option<&str>,
) -> Result<Option<Checked>, StageError> {
    if !settings.memory_check {
        return Ok(None);
    }
    let config = match find_start(settings, data)? {
        Start::Resume { checkpoint, .. } => {
            let opened = OpenModel::open(&checkpoint.path).map_err(TrainingError::from)?;
            ModelConfig::from_nemo_yaml(&opened.config_yaml).map_err(TrainingError::from)?
        }
        Start::Fresh { .. } => configuration(settings, None)?,
    };
    let checked = memory::check(settings, &config, ranks_here(settings, context)?)?;
    if let Some(Checked { needed, available, .. }) = checked {
        let line = format!(
            "training needs up to {} of memory, {} are available",
            memory::gigabytes(needed),
            memory::gigabytes(available)
        );
        context.report(serde_json::json!({ "line": line, "memory_needed_mib": needed >> 20 }));
    }
    Ok(checked)
}

/// Ranks that share the memory of this process.
fn ranks_here(settings: &TrainSettings, context: &Context) -> Result<u32, TrainingError> {
    let Some(processes) = &context.processes else {
        return Ok(settings.ranks);
    };
    let share = share(settings.ranks as usize, processes.count())?;
    Ok(share.of(processes.process()).len() as u32)
}

/// Says which transcripts are learned only in part.
fn tell_long_texts(settings: &TrainSettings, context: &Context, session: &mut Session) -> Result<(), StageError> {
    let (Some(rows), Some(tokenizer)) = (further(context, Further::TrainRows), session.tokenizer()) else {
        return Ok(());
    };
    let long = LongTexts::count(rows, tokenizer, settings.max_tokens)?;
    if let Some(message) = long.warning() {
        context.events.send(Event::Warning {
            stage: Some(context.stage.clone()),
            message,
        });
        session.note(long.figures())?;
    }
    Ok(())
}

/// Whether the thread is to end.
fn answer(session: &mut Session, request: Request) -> bool {
    let outcome = session.checkpoint().map(|_| ()).map_err(StageError::from);
    // Whoever asked may be gone.
    let _ = request.reply.send(outcome);
    request.stop
}

fn one_step(
    settings: &TrainSettings,
    context: &Context,
    session: &mut Session,
    work: Work,
) -> Result<Partition, StageError> {
    if work.step != session.step_number() {
        return Err(StageError::Refused {
            message: format!(
                "the loader gives step {}, but training in {} stands at step {}",
                work.step,
                settings.checkpoints,
                session.step_number()
            ),
            help: Some("run again: where training stands was found before its data was known".into()),
        });
    }
    let tokenizer = session
        .tokenizer()
        .ok_or_else(|| StageError::failed("the model has no tokenizer"))?;
    let loaded = micro_batches(&work.batches, tokenizer, settings.max_tokens)?;
    session.in_stage(stage_mark(&work.batches)?);
    drop(work.batches);
    if !loaded.dropped.is_empty() {
        let message = format!(
            "step {}: left out for samples that are no numbers: {}",
            work.step,
            loaded.dropped.join(", ")
        );
        context.events.send(Event::Warning {
            stage: Some(context.stage.clone()),
            message,
        });
    }
    // On a worker of the pool itself: each of the thousands of parallel pieces of a step would else be handed to it
    // from outside, and waited for, by way of the system.
    rayon::scope(|_| session.step(&loaded.batches, loaded.planned))?;
    Ok(work.partition)
}

/// The evaluation during training: a fixed sample of the validation rows, read once.
fn validation(settings: &TrainSettings, context: &Context) -> Result<Option<Evaluate>, StageError> {
    if settings.eval_every == 0 {
        return Ok(None);
    }
    let Some(rows) = context.input(1) else { return Ok(None) };
    let set = ValidationSet::read(
        rows,
        further(context, Further::Members),
        &settings.shards,
        settings.eval_samples_per_language,
    )
    .map_err(TrainingError::from)?;
    let batch_seconds = settings.max_batch_seconds;
    let cancel = context.cancel.clone();
    Ok(Some(Box::new(move |model: &TdtModel| {
        Ok(set.scores(model, batch_seconds, &|| cancel.is_set())?)
    })))
}
