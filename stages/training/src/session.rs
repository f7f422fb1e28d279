//! One run of training: its steps, checkpoints and metrics.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use candle_core::DType;
use flow_evaluation::transcribe::Recognize;
use flow_evaluation::validation::ValidationMetrics;
use flow_model::model::TdtModel;
use flow_model::tokenizer::Tokenizer;
use flow_model::vocabulary::VocabularyChange;
use flow_sampling::planned::Planned;
use flow_storage::Storage;
use serde_json::{Value, json};

use crate::average::MovingAverage;
use crate::checkpoint::bucket::{self, Uploader};
use crate::checkpoint::{self, CheckpointFolder, CheckpointRecord, Figures, Identity, Monitor};
use crate::device_figures::DeviceFigures;
use crate::error::TrainingError;
use crate::init::first_model;
use crate::loaded_rows::StageMark;
use crate::memory;
use crate::metrics::Metrics;
use crate::model_from::{ModelFrom, chosen};
use crate::optimizer::AdamW;
use crate::protect;
use crate::ranks::{LoadedElsewhere, ProcessGroup, open_device};
use crate::resolved_settings::ResolvedSettings;
use crate::row_losses::RowLosses;
use crate::start::{Start, find_start};
use crate::trainable;
use crate::trainer::{BatchFigures, LoadedBatch, StepReport, Trainer, panic_text};
use crate::window::Window;

mod figures;

use figures::finite;

/// Evaluates a model on the validation sample, whose micro-batches it gives to a function that shares them out over the ranks.
pub type Evaluate =
    Box<dyn FnMut(&TdtModel, &mut Recognize<'_, TrainingError>) -> Result<ValidationMetrics, TrainingError> + Send>;

/// Receives figures for the screen.
pub type Report = Box<dyn FnMut(Value) + Send>;

/// Training in progress. Holds the checkpoint folder's lock.
pub struct Session {
    settings: ResolvedSettings,
    trainer: Trainer,
    folder: Arc<CheckpointFolder>,
    /// A checkpoint that is being written.
    writing: Option<JoinHandle<Result<PathBuf, TrainingError>>>,
    /// Copies checkpoints into object storage, where the setting names a URL.
    uploader: Option<Uploader>,
    metrics: Metrics,
    record: CheckpointRecord,
    evaluate: Option<Evaluate>,
    /// Evaluates on protected languages.
    protect: Option<Evaluate>,
    /// Whether their rates before training are not known yet.
    protect_first: bool,
    report: Report,
    device: DeviceFigures,
    bad_steps: u64,
    /// Since the last line of the metrics.
    window: Window,
    /// Since the last figures on the screen.
    shown: Window,
    began: Instant,
    first_step: u64,
    /// Whether the model that training begins with is to be evaluated first.
    evaluate_first: bool,
    /// Of the model's vocabulary before its first step.
    vocabulary_change: Option<VocabularyChange>,
    /// To report, one line each.
    warnings: Vec<String>,
    /// Damaged checkpoints that were skipped, one line each.
    set_aside: Vec<String>,
    rate_after_end: Option<String>,
    /// Step and figures of the last evaluation.
    evaluated: Option<(u64, Figures)>,
    /// The lowest figures of the checkpoints by which these are ranked, ascending.
    lowest: Vec<f64>,
    /// The stage of the curriculum that the next step belongs to.
    stage: Option<StageMark>,
    /// Of the next step.
    left_out: LeftOut,
    /// Where the settings ask for them.
    row_losses: Option<RowLosses>,
}

/// Segments that are left out of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LeftOut {
    /// Their recordings could not be loaded, or hold samples that are not numbers.
    pub recordings: Vec<String>,
    /// Their texts have too many tokens.
    pub too_long: Vec<String>,
}

/// By how much the share of texts with capital letters, marks or digits must differ for a warning.
const OTHER_STYLE: f64 = 0.5;

/// Name of the table, beside the checkpoints, of how the rows of each piece of a changed vocabulary were made.
pub const VOCABULARY: &str = "vocabulary.tsv";

impl Session {
    /// Locks the folder and makes or loads the model. All ranks are in this process, or those of `group` are distributed over
    /// the processes of a run, of which this is process 0.
    pub fn begin(
        storage: &Storage,
        settings: &ResolvedSettings,
        data: Option<&str>,
        evaluate: Option<Evaluate>,
        report: Report,
        group: Option<ProcessGroup>,
    ) -> Result<Self, TrainingError> {
        settings.validate()?;
        let root = settings.checkpoint_root(storage)?;
        let root = root.as_path();
        let lock = checkpoint::lock(root)?;
        let start = find_start(storage, settings, data)?;
        let resumed = match &start {
            Start::Fresh { .. } => None,
            Start::Resume { record, .. } => Some(record.step),
        };
        let steps_before = match &start {
            Start::Fresh { .. } => None,
            Start::Resume { record, .. } => record.settings.get("max_steps").and_then(serde_json::Value::as_u64),
        };
        let identity = settings.identity(storage)?;
        let processes = group.map_or(1, |group| group.processes.count());
        for (set, path) in [
            (settings.lora.is_some(), "lora"),
            (!settings.groups.is_empty(), "groups"),
        ] {
            if set && processes > 1 {
                let message = format!("it is for the ranks of one process, and this run has {processes}");
                return Err(TrainingError::setting(path, message));
            }
        }
        let local_ranks = settings.ranks as usize / processes.max(1);
        let device = open_device(settings.device()?, 0, local_ranks, processes > 1)?;
        if let Some(needs) = settings.device_needs {
            memory::check_device(&device, 0, needs.needed)?;
            for rank in 1..local_ranks {
                let other = open_device(settings.device()?, rank, local_ranks, processes > 1)?;
                memory::check_device(&other, rank, needs.another)?;
            }
        }
        let decay = settings.average_decay;
        let mut vocabulary_change = None;
        let mut set_aside = bucket::take_warnings(&settings.checkpoints);
        let (folder, mut model, mut optimizer, average, record) = match start {
            Start::Fresh { folder } => {
                let folder = CheckpointFolder::open(lock, &folder)?;
                let (model, change) = first_model(storage, settings, &device)?;
                if settings.lora.is_some() && change.is_some() {
                    return Err(TrainingError::setting(
                        "tokenizer",
                        "its pieces differ from those of `init`, and with `lora` the rows of new pieces would not be trained",
                    ));
                }
                vocabulary_change = change;
                let model = trainable::with_new_matrices(model, settings)?;
                let average = (decay > 0.0)
                    .then(|| MovingAverage::new(decay, &model.parameters))
                    .transpose()?;
                let optimizer = AdamW::new(settings.adamw());
                (folder, model, optimizer, average, first_record(identity))
            }
            Start::Resume {
                checkpoint,
                record,
                damaged,
                ..
            } => {
                let parent = checkpoint.path.parent().unwrap_or(root);
                let folder = CheckpointFolder::open(lock, parent)?;
                for damage in damaged {
                    let aside = folder.set_aside(&damage.folder)?;
                    set_aside.push(format!(
                        "checkpoint {} is damaged ({}) and now named {}; training continues from {}",
                        damage.folder.display(),
                        damage.message,
                        aside.display(),
                        checkpoint.path.display()
                    ));
                }
                // Averaged weights are in 32 bits, whatever those are stored in that training continues from.
                let averaged = record.files.contains_key(checkpoint::LIVE);
                let short = Some(settings.precision.matrices()).filter(|_| !averaged);
                let (path, matrices) = (&checkpoint.path, short.unwrap_or(DType::F32));
                let mut model = trainable::continued(path, settings, matrices, &device)?;
                let optimizer = checkpoint::read_optimizer(&checkpoint.path, settings.adamw())?;
                let average = checkpoint::read_average(&checkpoint.path, &record, decay, &mut model)?;
                (folder, model, optimizer, average, *record)
            }
        };
        model = model.stored_as(settings.precision.matrices())?;
        optimizer.set_rate_factors(trainable::apply_groups(&settings.groups, &mut model)?);
        model.set_recompute(settings.recompute);
        model.set_batch_norm(settings.batch_norm.into());
        let mut record = CheckpointRecord {
            version: checkpoint::CHECKPOINT_VERSION,
            settings: settings.recorded(),
            data: data.map(str::to_owned).or(record.data),
            validation_wer: None,
            validation_cer: None,
            validation_loss: None,
            improvement: record.improvement.filter(|_| settings.early_stopping.is_some()),
            ..record
        };
        Planned::note(&mut record.plans, record.step, settings.ranks, settings.grad_accum);
        let width = model.config.encoder.d_model;
        let rate_after_end = steps_before.and_then(|before| settings.rate_after_end(before, record.step, width));
        let mut metrics = Metrics::open(folder.folder(), resumed)?;
        metrics.follow_settings(settings)?;
        let ranking = settings.ranking();
        let best = checkpoint::best(folder.folder(), ranking)?;
        let lowest = best
            .iter()
            .filter_map(|(_, record)| record.figure(ranking.monitor))
            .collect();
        if let Some(change) = &vocabulary_change {
            let path = folder.folder().join(VOCABULARY);
            std::fs::write(&path, change.table()).map_err(TrainingError::file(&path))?;
            metrics.append(&json!({
                "kind": "vocabulary", "step": 0, "pieces": change.pieces.len(), "old_pieces": change.old_size,
                "kept": change.kept(), "mean": change.averaged(), "random": change.random(),
            }))?;
        }
        let mirror = bucket::mirror(
            storage,
            &settings.checkpoints,
            folder.folder(),
            settings.keep_checkpoints,
            ranking,
        )?;
        let uploader = mirror.map(Uploader::start).transpose()?;
        let before = resumed.map(|step| folder.of_step(step));
        let row_losses = (settings.row_losses > 0).then(|| RowLosses::after(before.as_deref()));
        let config = settings.trainer_config(model.config.encoder.d_model);
        let device = DeviceFigures::of(&device);
        let trainer = Trainer::distributed(model, optimizer, config, average, group)?;
        // The evaluation of a randomly initialised model is useless. A run that was interrupted before its first step may have
        // left a checkpoint without it.
        let evaluate_first =
            record.step == 0 && settings.eval_every > 0 && settings.init != "none" && !metrics.has_evaluation(0);
        Ok(Session {
            settings: settings.clone(),
            trainer,
            folder: Arc::new(folder),
            writing: None,
            uploader,
            warnings: Vec::new(),
            set_aside,
            rate_after_end,
            evaluated: None,
            lowest,
            metrics,
            first_step: record.step,
            record,
            evaluate,
            protect: None,
            protect_first: false,
            report,
            device,
            bad_steps: 0,
            window: Window::new(),
            shown: Window::new(),
            began: Instant::now(),
            evaluate_first,
            vocabulary_change,
            stage: None,
            left_out: LeftOut::default(),
            row_losses,
        })
    }

    /// Has protected languages evaluated, too.
    pub fn protect(&mut self, evaluate: Evaluate) {
        self.protect = Some(evaluate);
        self.protect_first = self.record.protected.is_empty();
    }

    /// Steps that are done.
    pub fn step_number(&self) -> u64 {
        self.record.step
    }

    pub fn model(&self) -> &TdtModel {
        self.trainer.model()
    }

    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.trainer.model().tokenizer.as_ref()
    }

    /// What the other processes load of each step; none where they load nothing.
    pub(crate) fn loaded_elsewhere(&self) -> Option<LoadedElsewhere> {
        self.trainer.loaded_elsewhere()
    }

    /// Warnings since the last call.
    pub fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Damaged checkpoints that were skipped and renamed, one line each.
    pub fn set_aside(&self) -> &[String] {
        &self.set_aside
    }

    /// A note on the learning rate where training had ended and now continues.
    pub fn rate_after_end(&self) -> Option<&str> {
        self.rate_after_end.as_deref()
    }

    /// Adds to the time without data to work on.
    pub fn waited_for_data(&mut self, time: Duration) {
        self.window.waited_for_data += time.as_secs_f64();
        self.shown.waited_for_data += time.as_secs_f64();
    }

    /// The change of the model's vocabulary, where it differs from that of `init`.
    pub fn vocabulary_change(&self) -> Option<&VocabularyChange> {
        self.vocabulary_change.as_ref()
    }

    /// Sets the stage of a curriculum to which the next step belongs.
    pub fn in_stage(&mut self, stage: Option<StageMark>) {
        self.stage = stage;
    }

    /// Sets the segments that are left out of the next step.
    pub fn without(&mut self, left_out: LeftOut) {
        self.left_out = left_out;
    }

    /// The stage that ends with the step done last.
    fn ended_stage(&self) -> Option<&str> {
        let ended = |stage: &&StageMark| stage.end == self.record.step;
        self.stage.as_ref().filter(ended).map(|stage| stage.name.as_str())
    }

    /// Appends a line to `metrics.jsonl`, with the number of steps done.
    pub fn note(&mut self, mut value: Value) -> Result<(), TrainingError> {
        value["step"] = json!(self.record.step);
        self.metrics.append(&value)
    }

    /// Does the next optimizer step on its micro-batches, of which `planned` were to come, and evaluates and writes a
    /// checkpoint where one is due (always after the last step of all and of a stage). A model that was given is evaluated
    /// before its first step too. Without any micro-batch the step is skipped.
    pub fn step(&mut self, micro_batches: &[LoadedBatch], planned: u32) -> Result<StepReport, TrainingError> {
        self.step_beside(micro_batches, planned, &[])
    }

    /// As [`Session::step`], where other processes have loaded the micro-batches of their ranks themselves, which are
    /// `elsewhere`.
    pub fn step_beside(
        &mut self,
        micro_batches: &[LoadedBatch],
        planned: u32,
        elsewhere: &[BatchFigures],
    ) -> Result<StepReport, TrainingError> {
        let protect_first = std::mem::take(&mut self.protect_first);
        if std::mem::take(&mut self.evaluate_first) {
            self.evaluate()?;
        } else if protect_first {
            self.evaluate_protected()?;
        }
        let mut report = self
            .trainer
            .step_beside(self.record.step, micro_batches, planned, elsewhere)?;
        if let Some(losses) = self.row_losses.as_mut().filter(|_| report.skipped.is_none()) {
            losses.add(std::mem::take(&mut report.rows));
        }
        let left_out = std::mem::take(&mut self.left_out);
        if report.micro_batches == 0 {
            report.epoch = self.record.epoch;
            report.skipped = Some([left_out.recordings.clone(), left_out.too_long].concat());
        }
        let record = &mut self.record;
        record.step += 1;
        record.micro_batches += u64::from(report.micro_batches);
        record.samples += report.utterances;
        record.audio_samples += report.audio_samples;
        record.tokens += report.tokens;
        // Epochs are counted per stage of a curriculum; a step without utterances has no epoch.
        if report.utterances > 0 {
            record.epoch = report.epoch;
        }
        let model = (&self.trainer.model().config, &self.settings);
        let flops = self
            .device
            .flops(model, micro_batches, elsewhere, report.encoder_frozen);
        for window in [&mut self.window, &mut self.shown] {
            window.add(&report);
            window.flops += flops;
        }
        if !left_out.recordings.is_empty() {
            self.note(json!({
                "kind": "left_out", "recordings": left_out.recordings.len(), "segments": left_out.recordings,
            }))?;
        }
        for event in &report.out_of_memory {
            self.out_of_memory(event)?;
        }
        if let Some(segments) = &report.skipped {
            self.record.skipped_steps += 1;
            self.skip(segments, &report)?;
            self.refuse_unchanged_model(segments, report.micro_batches == 0)?;
        }
        let last = self.record.step >= self.settings.max_steps || self.ended_stage().is_some();
        if self.record.step.is_multiple_of(self.settings.log_every) || last {
            self.log(&report)?;
        }
        if self.shown.since.elapsed() >= Duration::from_secs(1) || last {
            self.show(&report);
        }
        let due = |every: u64| every > 0 && self.record.step.is_multiple_of(every);
        let (evaluate, keep) = (
            due(self.settings.eval_every) || last,
            due(self.settings.checkpoint_every) || last,
        );
        if evaluate {
            self.evaluate()?;
        }
        let early_end = self.settings.early_end(&self.record).filter(|_| evaluate);
        let last = last || early_end.is_some();
        let keep = keep || last || self.is_among_best();
        if keep && let Some(figure) = self.figure() {
            let place = self.lowest.partition_point(|other| *other <= figure);
            self.lowest.insert(place, figure);
            self.lowest.truncate(self.settings.keep_best.0);
        }
        if keep && (last || !self.settings.checkpoint_in_background) {
            self.checkpoint()?;
        } else if keep {
            self.checkpoint_in_background()?;
        } else if self.writing.as_ref().is_some_and(JoinHandle::is_finished) {
            self.written()?;
        }
        match early_end {
            Some(why) if !self.settings.may_hand_on(&self.record) => self.warnings.push(why),
            Some(why) => (self.report)(json!({ "notice": why, "step": self.record.step })),
            None => {}
        }
        if self.settings.is_over(&self.record) {
            self.hand_on()?;
            self.metrics.finish()?;
        }
        Ok(report)
    }

    /// Whether training ended although steps are left.
    pub fn ended_early(&self) -> bool {
        self.record.step < self.settings.max_steps && self.settings.is_over(&self.record)
    }

    /// The figures of the present model, where it was evaluated.
    fn figures(&self) -> Option<Figures> {
        let now = self.evaluated.filter(|(step, _)| *step == self.record.step);
        now.map(|(_, figures)| figures)
    }

    /// The one of these by which checkpoints are ranked.
    fn figure(&self) -> Option<f64> {
        self.figures()?.of(self.settings.monitor)
    }

    /// Whether the model was evaluated after this very step and is to be kept, as one of those that may be handed on.
    fn is_among_best(&self) -> bool {
        let count = match self.settings.model_from {
            ModelFrom::Best => 1,
            ModelFrom::AverageBest => self.settings.keep_best.0,
            ModelFrom::Last | ModelFrom::Average => return false,
        };
        let worst = count.checked_sub(1).and_then(|place| self.lowest.get(place));
        let figure = self.figure().filter(|_| self.settings.may_hand_on(&self.record));
        figure.is_some_and(|figure| worst.is_none_or(|worst| figure < *worst))
    }

    /// Sets which checkpoint becomes the output model when all steps are done, and writes it where it is a mean.
    fn hand_on(&mut self) -> Result<(), TrainingError> {
        if let Some(of) = self.settings.mean() {
            self.folder.make_average(of)?;
        }
        let (step, which) = match chosen(self.folder.folder(), &self.settings)? {
            Some(chosen) => (chosen.step, chosen.which),
            None => (0, format!("model before training, {}", self.settings.init)),
        };
        (self.report)(json!({
            "notice": format!("the model that is handed on: the {which}"),
            "model_step": step,
        }));
        Ok(())
    }

    /// Writes a checkpoint of the present state, and removes old ones.
    pub fn checkpoint(&mut self) -> Result<PathBuf, TrainingError> {
        self.written()?;
        let record = self.stamped();
        let losses = self.losses_so_far();
        let folder = &self.folder;
        let path = self.trainer.with_state(|model, optimizer, live| {
            folder.write(&record, model, optimizer, live, |writing| {
                write_losses(losses.as_ref(), writing)
            })
        })??;
        self.folder
            .prune(self.settings.keep_checkpoints, self.settings.ranking())?;
        if let Some(uploader) = &self.uploader {
            uploader.wake();
        }
        Ok(path)
    }

    /// What could not be copied into object storage since the last call, one line each.
    pub fn upload_warnings(&self) -> Vec<String> {
        self.uploader.as_ref().map_or_else(Vec::new, Uploader::warnings)
    }

    /// Waits until all checkpoints are copied into object storage. Later ones are not.
    ///
    /// # Errors
    /// Where the last ones could not be copied.
    pub fn finish_upload(&mut self) -> Result<(), TrainingError> {
        self.written()?;
        let Some(uploader) = self.uploader.take() else {
            return Ok(());
        };
        let line = format!("copies the last checkpoints to {}", self.settings.checkpoints);
        (self.report)(json!({ "line": line }));
        uploader.finish()
    }

    /// Begins to write a checkpoint of the present state in the background, from a copy in host memory, to which the other
    /// ranks send their moments meanwhile. Errors are returned by a later call.
    fn checkpoint_in_background(&mut self) -> Result<(), TrainingError> {
        self.written()?;
        let record = self.stamped();
        let snapshot = self.trainer.snapshot()?;
        let losses = self.losses_so_far();
        let folder = self.folder.clone();
        let (keep, best) = (self.settings.keep_checkpoints, self.settings.ranking());
        let waker = self.uploader.as_ref().and_then(Uploader::waker);
        let write = move || {
            let (model, live, optimizer) = snapshot.whole()?;
            let path = folder.write(&record, &model, &optimizer, live.as_ref(), |writing| {
                write_losses(losses.as_ref(), writing)
            })?;
            folder.prune(keep, best)?;
            if let Some(waker) = waker {
                waker.wake();
            }
            Ok(path)
        };
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(write);
        self.writing = Some(thread.map_err(TrainingError::file(self.folder.folder()))?);
        Ok(())
    }

    /// The losses of rows that the checkpoint of this step is to have.
    fn losses_so_far(&mut self) -> Option<RowLosses> {
        let checkpoint = self.folder.of_step(self.record.step);
        self.row_losses.as_mut().map(|losses| losses.hand_over(&checkpoint))
    }

    /// Waits for the checkpoint that is being written.
    fn written(&mut self) -> Result<(), TrainingError> {
        match self.writing.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(written)) => written.map(drop),
            Some(Err(panic)) => Err(TrainingError::data(format!(
                "writing a checkpoint panicked: {}",
                panic_text(panic.as_ref())
            ))),
        }
    }

    /// The record, with the result of the last evaluation if that was of this model.
    fn stamped(&self) -> CheckpointRecord {
        // One that must not be handed on is not among the best.
        let figures = self.figures().filter(|_| self.settings.may_hand_on(&self.record));
        let figures = figures.unwrap_or_default();
        let ranked_by = |monitor| figures.of(monitor).filter(|_| self.settings.monitor == monitor);
        CheckpointRecord {
            validation_wer: figures.wer,
            validation_cer: ranked_by(Monitor::ValCer),
            validation_loss: ranked_by(Monitor::ValLoss),
            ..self.record.clone()
        }
    }

    fn skip(&mut self, segments: &[String], report: &StepReport) -> Result<(), TrainingError> {
        self.bad_steps += 1;
        let step = self.record.step;
        let empty = report.micro_batches == 0;
        let why = if empty { "nothing_loaded" } else { "not_finite" };
        self.metrics.append(&json!({ "kind": "skipped", "step": step, "why": why, "segments": segments, "loss": finite(report.loss), "grad_norm": finite(report.gradient_norm) }))?;
        (self.report)(
            json!({ "step": step, "skipped_steps": self.record.skipped_steps, "skipped_segments": segments }),
        );
        if self.bad_steps <= self.settings.max_bad_steps {
            return Ok(());
        }
        let (count, segments) = (self.bad_steps, segments.join(", "));
        let skipped = format!("{count} steps were skipped, more than `max_bad_steps` allows");
        Err(if empty {
            TrainingError::NothingLoaded {
                message: format!("{skipped}; of the last, step {step}, nothing could be loaded: segments {segments}"),
            }
        } else {
            TrainingError::NotFinite {
                message: format!(
                    "{skipped}; the last, step {step}, had no finite loss and gradient: segments {segments}"
                ),
            }
        })
    }

    /// Fails where this was the last step and all before it were skipped too: the model is the one that training began with.
    fn refuse_unchanged_model(&self, segments: &[String], nothing_loaded: bool) -> Result<(), TrainingError> {
        let (step, skipped) = (self.record.step, self.record.skipped_steps);
        if step < self.settings.max_steps || skipped < step {
            return Ok(());
        }
        let segments = segments.join(", ");
        let message = format!("all {step} steps were skipped, so the model has learned nothing");
        Err(if nothing_loaded {
            TrainingError::NothingLoaded {
                message: format!("{message}; of the last, nothing could be loaded: segments {segments}"),
            }
        } else {
            TrainingError::NotFinite {
                message: format!("{message}; the last had no finite loss and gradient: segments {segments}"),
            }
        })
    }

    fn evaluate(&mut self) -> Result<(), TrainingError> {
        let Some(evaluate) = &mut self.evaluate else {
            return Ok(());
        };
        let began = Instant::now();
        let found = self.trainer.evaluate(|model, all| evaluate(model, all))??;
        let figures = Figures {
            wer: finite(found.scores.overall.words.rate()),
            cer: finite(found.scores.overall.characters.rate()),
            loss: found.loss.and_then(finite),
        };
        self.evaluated = Some((self.record.step, figures));
        if let Some(stopping) = &self.settings.early_stopping
            && self.record.step > 0
        {
            let (monitor, step) = (self.settings.monitor, self.record.step);
            let improvement = self.record.improvement.get_or_insert_default();
            improvement.note(stopping, monitor, step, figures.of(monitor));
        }
        self.tell_evaluation(&found, began.elapsed())?;
        if self.record.step == 0 {
            self.warnings.extend(style_warning(&found));
        }
        self.evaluate_protected()?;
        // Not part of the speed of training.
        let spent = began.elapsed();
        self.window.since += spent;
        self.shown.since += spent;
        self.began += spent;
        Ok(())
    }

    fn evaluate_protected(&mut self) -> Result<(), TrainingError> {
        let Some(evaluate) = &mut self.protect else {
            return Ok(());
        };
        let began = Instant::now();
        let found = self.trainer.evaluate(|model, all| evaluate(model, all))??;
        protect::note(&mut self.record.protected, &found.scores);
        let risen = protect::risen(&self.record.protected, self.settings.protect.max_rise);
        if let Some(risen) = risen.filter(|_| !self.settings.protect.stop) {
            let step = self.record.step;
            self.warnings.push(format!(
                "step {step}: the word error rate of protected languages rose by more than `protect.max_rise`: {risen}"
            ));
        }
        self.tell_protected(began.elapsed())
    }
}

fn write_losses(losses: Option<&RowLosses>, checkpoint: &std::path::Path) -> Result<(), TrainingError> {
    losses.map_or(Ok(()), |losses| losses.write(checkpoint))
}

/// Says in which shares of texts the first model writes otherwise than the rows that it is validated on; none where they are alike.
fn style_warning(found: &ValidationMetrics) -> Option<String> {
    let differences = found.written.differences(&found.references, OTHER_STYLE);
    (!differences.is_empty()).then(|| {
        format!(
            "the model writes otherwise than the texts of validation ({}): it will learn their style, and its error rate before \
             training counts the difference",
            differences.join("; ")
        )
    })
}

fn first_record(identity: Identity) -> CheckpointRecord {
    CheckpointRecord {
        version: checkpoint::CHECKPOINT_VERSION,
        step: 0,
        micro_batches: 0,
        samples: 0,
        audio_samples: 0,
        tokens: 0,
        skipped_steps: 0,
        epoch: 0,
        identity,
        settings: Default::default(),
        data: None,
        random: "splitmix64(seed, step, rank, micro_batch)".into(),
        validation_wer: None,
        validation_cer: None,
        validation_loss: None,
        improvement: None,
        protected: Default::default(),
        plans: Vec::new(),
        files: Default::default(),
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // An error is lost here, but then no checkpoint was renamed into place either; a run that ends normally has
        // waited before.
        let _ = self.written();
        // While the folder is still locked.
        self.uploader = None;
    }
}
