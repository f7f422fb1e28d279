//! The kind `training.train`: takes steps from the dataflow and trains on a separate thread beside the workers.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use arrow::array::{Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use crossbeam_channel::{Receiver, Sender, TryRecvError, TrySendError, bounded, unbounded};
use flow_kind::{
    Body, ColumnType, Context, InputPort, Inputs, Kind, Log, LogPosition, Operator, Out, OutputPort, Partition, Port,
    Progress, ROW, ReadOnce, Shape, StageError, Storage, WithShared,
};
use flow_shards::probe::MEMBER_COLUMNS;

use flow_sampling::dataset::{AudioColumns, ROW_COLUMNS};
use flow_storage::is_url;
use serde_json::Value;

use crate::checkpoint::{self, CheckpointFolder, average_of, bucket};
use crate::error::TrainingError;
use crate::feed::Feed;
use crate::init::{fetch_for_stage, is_remote};
use crate::loaded_rows::BATCH_COLUMNS;
use crate::model_from::{Chosen, chosen, model_before};
use crate::resolved_settings::ResolvedSettings;
use crate::settings::TrainSettings;
use crate::start::{Start, check_changes, find_start};
use crate::train_tokenizer::{TOKENIZER_COLUMNS, read_tokenizer_files};
use crate::trainer::panic_text;
use crate::training_thread::{CheckpointRequest, StepBatches, train};

/// The kind `training.train`.
pub struct TrainingTrain;

/// Columns of the output: the checkpoint that becomes the model.
pub fn model_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("path", DataType::Utf8, false),
        Field::new("step", DataType::Int64, false),
        Field::new("digest", DataType::Utf8, false),
        Field::new("which", DataType::Utf8, false),
    ]))
}

impl Kind for TrainingTrain {
    const NAME: &'static str = "training.train";
    const VERSION: u32 = 2;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("batches", "the micro-batches of a sampling.load").columns(BATCH_COLUMNS),
        InputPort::whole("validation", "rows of validation, with where their recordings are").columns(ROW_COLUMNS),
        InputPort::whole("protect", "rows of languages that must not get worse, with where their recordings are")
            .optional()
            .columns(ROW_COLUMNS),
        InputPort::whole("train", "the rows that sampling.load takes: batches of others are refused; their digest is recorded, and texts with too many tokens are reported before the first step")
            .optional()
            .columns(&[
                ("segment_id", ColumnType::AnyText),
                ("text", ColumnType::AnyText),
                ("duration", ColumnType::Number),
            ]),
        InputPort::whole("members", "the port `members` of an audio.probe, where validation reads recordings from tars")
            .optional()
            .columns(MEMBER_COLUMNS),
        InputPort::whole("tokenizer", "from a tokenizer.train or a tokenizer.read; replaces the one of `init`")
            .optional()
            .columns(TOKENIZER_COLUMNS),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("model", "the checkpoint that is handed on")];
    const URL_SETTINGS: &'static [(&'static str, flow_kind::UrlUse)] = &[
        ("checkpoints", flow_kind::UrlUse::Write),
        ("init", flow_kind::UrlUse::Read),
        ("tokenizer", flow_kind::UrlUse::Read),
        ("shards", flow_kind::UrlUse::Read),
    ];
    /// Shared: the content of `tokenizer`.
    type Settings = WithShared<TrainSettings, ReadOnce<Vec<u8>>>;

    fn shape(settings: &Self::Settings, inputs: &Inputs) -> Result<Shape, StageError> {
        let mut settings = resolved(settings, inputs)?;
        if inputs.has("tokenizer") {
            // The tokenizer does not exist yet, but an input will bring it.
            settings.tokenizer_input = Some(Arc::from([]));
        }
        settings.validate()?;
        if settings.eval_every > 0 {
            AudioColumns::of_input(inputs.required("validation")?, inputs.has("members"))?;
        }
        if inputs.has("protect") {
            if settings.init == "none" || settings.eval_every == 0 {
                let message =
                    "the input `protect` needs an `init`, which knows its languages, and `eval_every` above 0";
                return Err(TrainingError::setting("protect", message).into());
            }
            AudioColumns::of_input(inputs.required("protect")?, inputs.has("members"))?;
        }
        let outputs = vec![Port::new("model", model_schema())];
        Ok(Shape::log(outputs))
    }

    fn sources(settings: &Self::Settings) -> Vec<(&'static str, PathBuf)> {
        let mut sources = Vec::new();
        if !settings.tokenizer_path().is_empty() {
            sources.push(("tokenizer", PathBuf::from(settings.tokenizer_path())));
        }
        // Once there is a checkpoint, training continues from it.
        let begins = !is_url(&settings.checkpoints) && !Path::new(&settings.checkpoints).exists();
        if begins && settings.init != "none" && !is_remote(&settings.init) {
            sources.push(("init", PathBuf::from(&settings.init)));
        }
        sources
    }

    /// The thresholds of warnings, losses of rows, MLflow's store and the token for the hub do not affect the result; TF32 does, also where it is a default.
    fn identity(settings: &Self::Settings) -> Value {
        let mut identity = serde_json::to_value(settings).unwrap_or(Value::Null);
        if let Some(fields) = identity.as_object_mut() {
            fields.remove("warn_unknown_letters");
            fields.remove("warn_empty_texts");
            fields.remove("hub_token");
            fields.remove("row_losses");
            fields.remove("mlflow");
            fields.insert("tf32".into(), settings.uses_tf32().into());
        }
        identity
    }

    fn ready(settings: &Self::Settings, storage: &Storage) -> Result<(), StageError> {
        let checked = settings.device()?.check();
        checked.map_err(|error| TrainingError::setting("device", error))?;
        Ok(check_changes(storage, settings)?)
    }

    fn spreads(settings: &Self::Settings, processes: usize) -> Result<bool, StageError> {
        settings.check_processes(processes)?;
        Ok(true)
    }

    fn open(settings: &Self::Settings, context: &Context) -> Result<Body, StageError> {
        if let (Some(share), Some(processes)) = (context.share, &context.processes)
            && share.process > 0
        {
            return Ok(Body::Log(Box::new(Feed::new(context, processes))));
        }
        let mut settings = resolved(settings, &context.inputs)?;
        if let Some(tokenizer) = context.input("tokenizer") {
            settings.tokenizer_input = Some(read_tokenizer_files(tokenizer)?.0.into());
        }
        settings.labels = context.labels.clone();
        if context.input("protect").is_none() {
            // Rates of an earlier run, which had the input, end nothing.
            settings.protect.stop = false;
        }
        Ok(Body::Log(Box::new(TrainBody {
            settings,
            context: context.clone(),
            arriving: BTreeMap::new(),
            ready: BTreeMap::new(),
            next: 0,
            thread: None,
            ended_early: Arc::default(),
        })))
    }
}

/// The settings for the micro-batches that are an input.
fn resolved(settings: &<TrainingTrain as Kind>::Settings, inputs: &Inputs) -> Result<ResolvedSettings, TrainingError> {
    let batches = &inputs
        .required("batches")
        .map_err(|error| TrainingError::data(error.to_string()))?
        .schema;
    Ok(ResolvedSettings {
        tokenizer_read: settings.shared.clone(),
        ..ResolvedSettings::new(settings.settings.clone(), batches)?
    })
}

struct TrainBody {
    settings: ResolvedSettings,
    context: Context,
    /// Batches of steps that are not complete.
    arriving: BTreeMap<u64, Vec<RecordBatch>>,
    /// Complete steps that the thread has not taken.
    ready: BTreeMap<u64, StepBatches>,
    /// The step to hand over next.
    next: u64,
    thread: Option<Thread>,
    /// Set by the thread where it needs no more steps.
    ended_early: Arc<AtomicBool>,
}

struct Thread {
    /// Gone once no more work will come.
    work: Option<Sender<StepBatches>>,
    requests: Sender<CheckpointRequest>,
    done: Receiver<Result<Partition, StageError>>,
    handle: Option<JoinHandle<()>>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        // The thread ends after its current step, when it finds the channel closed.
        self.work = None;
        let (nobody, _) = bounded(0);
        self.requests = nobody;
        if let Some(handle) = self.handle.take() {
            // A panic in there was caught and sent before.
            let _ = handle.join();
        }
    }
}

/// The number in `step-000000012`.
pub(crate) fn step_of(partition: &Partition) -> Result<u64, StageError> {
    partition
        .as_str()
        .strip_prefix("step-")
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(|| {
            StageError::failed(format!(
                "partition {partition} is not a step such as step-000000012; training reads from sampling.load"
            ))
        })
}

impl TrainBody {
    fn data_digest(&self) -> Option<String> {
        self.context.input("train").map(|rows| rows.digest().to_hex())
    }

    /// Starts the thread with the first step.
    fn thread(&mut self) -> Result<&mut Thread, StageError> {
        if self.thread.is_none() {
            let data = self.data_digest();
            self.next = find_start(&self.context.storage, &self.settings, data.as_deref())?.step();
            let (work, take) = bounded::<StepBatches>(2);
            let (requests, received_requests) = unbounded::<CheckpointRequest>();
            let (done_sender, done) = unbounded();
            let (settings, context) = (self.settings.clone(), self.context.clone());
            let ended_early = Arc::clone(&self.ended_early);
            let handle = std::thread::Builder::new()
                .name("training".into())
                .spawn(move || {
                    let waker = context.waker.clone();
                    let outcome = catch_unwind(AssertUnwindSafe(|| {
                        train(
                            &settings,
                            &context,
                            data.as_deref(),
                            &take,
                            &received_requests,
                            &done_sender,
                            &ended_early,
                        )
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
                        // The receiver is dropped when the stage has ended.
                        let _ = done_sender.send(Err(error));
                    }
                    drop(done_sender);
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
            .ok_or_else(|| StageError::failed("the training thread has ended"))
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

    /// Whether the mean of checkpoints exists, where it is the output model.
    fn average_stands(&self, start: &Start) -> Result<bool, TrainingError> {
        match (start, self.settings.mean()) {
            (Start::Resume { checkpoint, .. }, Some(of)) => {
                let folder = checkpoint.path.parent().unwrap_or(Path::new(""));
                average_of::is_made(folder, of)
            }
            _ => Ok(true),
        }
    }

    /// The model before training, with a warning: none of the checkpoints in `folder` may be handed on.
    fn model_before(&self, folder: &Path) -> Result<Chosen, StageError> {
        let path = fetch_for_stage(
            &self.context,
            "init",
            &self.settings.init,
            self.settings.hub_token.as_ref(),
        )?;
        let before = model_before(path, folder)?;
        self.context.warn(format!(
            "the {} is handed on; train from the first step with lower rates or rows of these languages, or raise `protect.max_rise`",
            before.which
        ));
        Ok(before)
    }

    /// Writes the mean of checkpoints, where it is the output model and all steps were done before.
    fn make_average(&self) -> Result<(), StageError> {
        let Some(of) = self.settings.mean() else {
            return Ok(());
        };
        let start = find_start(&self.context.storage, &self.settings, self.data_digest().as_deref())?;
        if !start.is_over(&self.settings) || self.average_stands(&start)? {
            return Ok(());
        }
        let root = self.settings.checkpoint_root(&self.context.storage)?;
        let lock = match checkpoint::lock(&root) {
            // The last step is running on another worker, which writes it.
            Err(TrainingError::Locked { .. }) => return Ok(()),
            lock => lock?,
        };
        let folder = CheckpointFolder::open(lock, &checkpoint::current(&root)?)?;
        Ok(folder.make_average(of)?)
    }

    /// Whether the checkpoint that training would go on from is where it is to be, also if that is a bucket.
    fn is_uploaded(&self, start: &Start) -> Result<bool, TrainingError> {
        match start {
            Start::Resume { checkpoint, .. } => {
                bucket::is_uploaded(&self.context.storage, &self.settings.checkpoints, checkpoint)
            }
            Start::Fresh { .. } => Ok(true),
        }
    }

    /// Copies the last checkpoints into the bucket, where all steps were done before and a process was killed while it copied
    /// them.
    fn upload_rest(&self) -> Result<(), StageError> {
        if !is_url(&self.settings.checkpoints) {
            return Ok(());
        }
        let start = find_start(&self.context.storage, &self.settings, self.data_digest().as_deref())?;
        if !start.is_over(&self.settings) || self.is_uploaded(&start)? {
            return Ok(());
        }
        let root = self.settings.checkpoint_root(&self.context.storage)?;
        let _lock = match checkpoint::lock(&root) {
            // Another worker trains.
            Err(TrainingError::Locked { .. }) => return Ok(()),
            lock => lock?,
        };
        let (keep, ranking) = (self.settings.keep_checkpoints, self.settings.ranking());
        let folder = checkpoint::current(&root)?;
        match bucket::mirror(
            &self.context.storage,
            &self.settings.checkpoints,
            &folder,
            keep,
            ranking,
        )? {
            Some(mut mirror) => Ok(mirror.copy_all()?),
            None => Ok(()),
        }
    }

    fn request_checkpoint(&mut self, stop: bool) -> Result<(), StageError> {
        let Some(thread) = &self.thread else { return Ok(()) };
        let (reply, answer) = bounded(1);
        if thread.requests.send(CheckpointRequest { stop, reply }).is_err() {
            return Ok(());
        }
        // The thread ends without a reply only if it failed, which `poll` reports.
        answer.recv().unwrap_or(Ok(()))
    }
}

impl Operator for TrainBody {
    fn batch(
        &mut self,
        input: &str,
        partition: &Partition,
        batch: RecordBatch,
        _out: &mut Out,
    ) -> Result<(), StageError> {
        if input == "batches" {
            self.arriving.entry(step_of(partition)?).or_default().push(batch);
        }
        Ok(())
    }

    fn partition_complete(&mut self, partition: &Partition, _out: &mut Out) -> Result<Progress, StageError> {
        let step = step_of(partition)?;
        let batches = self.arriving.remove(&step).unwrap_or_default();
        self.thread()?;
        if step < self.next {
            // Done before; only a loader that does not know the position of training sends it again.
            return Ok(Progress::Done);
        }
        self.ready.insert(
            step,
            StepBatches {
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
        if self.thread.is_none() && self.context.worker == 0 {
            self.make_average()?;
            self.upload_rest()?;
        }
        self.request_checkpoint(true)
    }
}

impl Log for TrainBody {
    fn position(&mut self) -> Result<LogPosition, StageError> {
        let start = find_start(&self.context.storage, &self.settings, self.data_digest().as_deref())?;
        let step = start.step();
        let detail = match &start {
            Start::Fresh { folder } => format!("from the first step, in {}", folder.display()),
            Start::Resume {
                checkpoint,
                changes,
                damaged,
                record,
            } => {
                let mut detail = format!(
                    "step {step} of {}, {}",
                    self.settings.max_steps,
                    checkpoint.path.display()
                );
                if !changes.is_empty() {
                    detail.push_str(&format!("; changed: {}", changes.join("; ")));
                }
                if let Some(why) = self.settings.early_end(record) {
                    detail.push_str(&format!("; {why}"));
                }
                for damage in damaged {
                    detail.push_str(&format!("; {} is damaged", damage.folder.display()));
                }
                detail
            }
        };
        if !start.is_over(&self.settings) {
            return Ok(LogPosition::At { step, detail });
        }
        // No step is left, also where training ended before the last one.
        let step = step.max(self.settings.max_steps);
        if !self.is_uploaded(&start)? {
            let detail = format!("{detail}; it is to be copied to {}", self.settings.checkpoints);
            Ok(LogPosition::At { step, detail })
        } else if self.average_stands(&start)? {
            Ok(LogPosition::Finished { detail })
        } else {
            let detail = format!("{detail}; the mean of checkpoints is to be made");
            Ok(LogPosition::At { step, detail })
        }
    }

    fn result(&mut self) -> Result<RecordBatch, StageError> {
        let root = self.settings.checkpoint_root(&self.context.storage)?;
        checkpoint::remove_left(&root);
        let folder = checkpoint::current(&root)?;
        let chosen = match chosen(&folder, &self.settings)? {
            Some(chosen) => chosen,
            None => self.model_before(&folder)?,
        };
        Ok(RecordBatch::try_new(
            model_schema(),
            vec![
                Arc::new(UInt32Array::from(vec![0])),
                Arc::new(StringArray::from(vec![chosen.path.to_string_lossy().into_owned()])),
                Arc::new(Int64Array::from(vec![i64::try_from(chosen.step).unwrap_or(i64::MAX)])),
                Arc::new(StringArray::from(vec![chosen.digest])),
                Arc::new(StringArray::from(vec![chosen.which])),
            ],
        )?)
    }

    fn ended_early(&self) -> bool {
        self.ended_early.load(Ordering::Acquire)
    }

    fn checkpoint(&mut self, stop: bool) -> Result<(), StageError> {
        self.request_checkpoint(stop)
    }
}
