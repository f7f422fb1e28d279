//! The thread that trains, beside the workers of the dataflow.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use arrow::array::{AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use crossbeam_channel::{Receiver, Sender, select};
use flow_evaluation::EvaluationError;
use flow_evaluation::hub_token::hub_with_token;
use flow_evaluation::transcribe::Recognize;
use flow_evaluation::validation::ValidationSet;
use flow_kind::event::Event;
use flow_kind::{Artifact, Context, Partition, StageError};
use flow_model::ModelConfig;
use flow_model::checkpoint::OpenModel;
use flow_model::model::TdtModel;

use crate::error::TrainingError;
use crate::init::{configuration, fetch_model, is_remote};
use crate::loaded_rows::{RowRules, micro_batches, own_micro_batches, stage_mark};
use crate::long_texts::{LongTexts, TextLimit};
use crate::memory::{self, MemoryCheck};
use crate::prompts::RowPrompts;
use crate::ranks::{LoadedElsewhere, ProcessGroup, RankLayout};
use crate::resolved_settings::ResolvedSettings;
use crate::session::{Evaluate, LeftOut, Session};
use crate::start::{Start, find_start};
use crate::start_report;
use crate::text_faults::TextFaults;
use crate::unknown_letters::UnknownLetters;

/// The micro-batches of one step.
pub(crate) struct StepBatches {
    pub step: u64,
    pub partition: Partition,
    pub batches: Vec<RecordBatch>,
}

/// Asks for a checkpoint between two steps, and for the end of the thread if `stop`.
pub(crate) struct CheckpointRequest {
    pub stop: bool,
    pub reply: Sender<Result<(), StageError>>,
}

/// The main function of the training thread: executes steps in order, and requests between them, until all steps are
/// done.
pub(crate) fn train(
    settings: &ResolvedSettings,
    context: &Context,
    data: Option<&str>,
    work: &Receiver<StepBatches>,
    requests: &Receiver<CheckpointRequest>,
    done: &Sender<Result<Partition, StageError>>,
    ended_early: &AtomicBool,
) -> Result<(), StageError> {
    let Some(settings) = &with_init(settings, context, data, requests)? else {
        return Ok(());
    };
    let checked = check_memory(settings, context, data)?;
    let mut settings = settings.clone();
    settings.device_needs = checked.filter(|checked| checked.available.is_none());
    let settings = &settings;
    let screen = context.clone();
    let evaluate = evaluation(settings, context, "validation", settings.eval_samples_per_language)?;
    let protected = evaluation(settings, context, "protect", settings.protect.samples_per_language)?;
    let mut session = Session::begin(
        &context.storage,
        settings,
        data,
        evaluate,
        Box::new(move |figures| screen.report(figures)),
        context.processes.as_ref().map(|processes| ProcessGroup {
            processes,
            rank_bytes: checked.map(|checked| checked.another),
            own_batches: context.share.map(|_| (row_rules(settings), &settings.prompts)),
        }),
    )?;
    if let Some(protected) = protected {
        session.protect(protected);
    }
    if let Some(change) = session.vocabulary_change() {
        context.warn(format!(
            "{} differs from that of init: {}",
            if settings.tokenizer_input.is_some() {
                "the tokenizer that comes as an input"
            } else {
                settings.tokenizer_path()
            },
            change.summary()
        ));
    }
    for message in session.set_aside() {
        context.warn(message.clone());
    }
    if let Some(message) = session.rate_after_end() {
        context
            .events
            .send(Event::note(format!("{}: {message}", context.stage)));
    }
    for message in settings.phase_warnings() {
        context.warn(message);
    }
    let prompts = RowPrompts::of_model(&session.model().config, &settings.prompts, settings.seed)?;
    if let Some(prompts) = &prompts {
        for input in ["train", "validation", "protect"] {
            let rows = context.input(input);
            rows.map_or(Ok(()), |rows| prompts.check_input(input, rows))?;
        }
    }
    warn_of_long_texts(settings, context, &mut session)?;
    report_unknown_letters(settings, context, &mut session)?;
    report_text_faults(settings, context, &mut session)?;
    report_start(settings, context, &session)?;
    let mut elsewhere = session.loaded_elsewhere();
    let mut compared = false;
    loop {
        let began = Instant::now();
        // Requests take precedence over waiting steps.
        warn_of_uploads(context, &session);
        let request = match session.ended_early() {
            false => requests.try_recv().ok(),
            // No more steps are taken.
            true => match requests.recv() {
                Ok(request) => Some(request),
                Err(_) => return Ok(()),
            },
        };
        if let Some(request) = request {
            if serve_request(context, &mut session, request) {
                return Ok(());
            }
            continue;
        }
        select! {
            recv(requests) -> request => match request {
                Ok(request) => if serve_request(context, &mut session, request) { return Ok(()) },
                Err(_) => return Ok(()),
            },
            recv(work) -> step => match step {
                Ok(step) => {
                    if context.cancel.is_set() {
                        return Ok(());
                    }
                    if let Some(elsewhere) = &mut elsewhere
                        && wait_for_others(context, &mut session, elsewhere, requests, step.step)?
                    {
                        return Ok(());
                    }
                    session.waited_for_data(began.elapsed());
                    if !std::mem::replace(&mut compared, true)
                        && let Some(rows) = context.input("train")
                    {
                        batches_of_rows(&step.batches, rows)?;
                    }
                    let partition = one_step(settings, context, &mut session, &mut elsewhere, prompts.as_ref(), step)?;
                    for message in session.take_warnings() {
                        context.warn(message);
                    }
                    ended_early.store(session.ended_early(), Ordering::Release);
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

/// Refuses micro-batches whose segments are not among the train rows: one of the two inputs is probably a wrong one
/// (validation rows, for example), and the recorded digest would not be that of the data trained on.
fn batches_of_rows(batches: &[RecordBatch], rows: &Artifact) -> Result<(), StageError> {
    let segments = |batch: &RecordBatch| -> Result<Vec<String>, StageError> {
        let column = batch
            .column_by_name("segment_id")
            .ok_or_else(|| StageError::failed("there is no column `segment_id`"))?;
        let column = cast(column, &DataType::Utf8)?;
        Ok(column.as_string::<i32>().iter().flatten().map(str::to_owned).collect())
    };
    let mut missing: BTreeSet<String> = BTreeSet::new();
    for batch in batches {
        // An empty micro-batch has one row without a segment.
        missing.extend(segments(batch)?.into_iter().filter(|segment| !segment.is_empty()));
    }
    for item in rows.batches(Some(&["segment_id"])) {
        if missing.is_empty() {
            break;
        }
        for segment in segments(&item?.1)? {
            missing.remove(&segment);
        }
    }
    match missing.first() {
        None => Ok(()),
        Some(segment) => Err(StageError::refused(
            format!("the input `batches` has the segment {segment}, which the input `train` does not have"),
            "`train` takes the rows that sampling.load takes; look at what `from` gives for each input",
        )),
    }
}

/// The settings with the local path of a model of the hub or in object storage, which is fetched if training begins from it.
/// None: the run is to end.
fn with_init(
    settings: &ResolvedSettings,
    context: &Context,
    data: Option<&str>,
    requests: &Receiver<CheckpointRequest>,
) -> Result<Option<ResolvedSettings>, StageError> {
    let mut settings = settings.clone();
    if !is_remote(&settings.init) {
        return Ok(Some(settings));
    }
    if !matches!(find_start(&context.storage, &settings, data)?, Start::Fresh { .. }) {
        return Ok(Some(settings));
    }
    let hub = || hub_with_token(settings.hub_token.as_ref());
    let mut stopped = false;
    let fetched = fetch_model(&context.storage, &settings.init, hub, &mut |line| {
        context.report(serde_json::json!({ "line": line }));
        if let Ok(request) = requests.try_recv() {
            // There is nothing to checkpoint yet. The receiver may be dropped.
            let _ = request.reply.send(Ok(()));
            stopped |= request.stop;
        }
        !stopped && !context.cancel.is_set()
    });
    settings.fetched = fetched?;
    Ok(settings.fetched.is_some().then_some(settings))
}

/// Checks whether training fits into memory. Skipped where no steps are left.
fn check_memory(
    settings: &ResolvedSettings,
    context: &Context,
    data: Option<&str>,
) -> Result<Option<MemoryCheck>, StageError> {
    if !settings.memory_check {
        return Ok(None);
    }
    let config = match find_start(&context.storage, settings, data)? {
        Start::Resume { checkpoint, .. } => {
            let opened = OpenModel::open(&checkpoint.path).map_err(TrainingError::from)?;
            ModelConfig::from_nemo_yaml(&opened.config_yaml).map_err(TrainingError::from)?
        }
        Start::Fresh { .. } => configuration(&context.storage, settings, None)?,
    };
    context.report(serde_json::json!({ "line": "predicts how much memory training needs" }));
    let checked = memory::check(settings, &config, local_ranks(settings, context)?, &context.scratch)?;
    if let Some(MemoryCheck {
        needed,
        available,
        tried,
        ..
    }) = checked
    {
        let needs = memory::gigabytes(needed);
        let line = match available {
            Some(available) => {
                let available = memory::gigabytes(available);
                format!("training needs up to {needs} of memory, {available} are available")
            }
            None => format!("training needs up to {needs} of the first rank's device"),
        };
        let seconds = tried.map(|tried| tried.as_secs_f64());
        let trial = seconds.map_or(String::new(), |seconds| {
            format!(" (found out by a trial of {seconds:.1} s)")
        });
        context.report(serde_json::json!({
            "line": format!("{line}{trial}"), "memory_needed_mib": needed >> 20, "memory_trial_s": seconds,
        }));
    }
    Ok(checked)
}

/// The number of ranks of this process.
fn local_ranks(settings: &ResolvedSettings, context: &Context) -> Result<u32, TrainingError> {
    let Some(processes) = &context.processes else {
        return Ok(settings.ranks);
    };
    let layout = RankLayout::new(settings.ranks as usize, processes.count())?;
    Ok(layout.ranks_of(processes.process()).len() as u32)
}

/// Sends a warning about transcripts that are left out or truncated.
fn warn_of_long_texts(settings: &ResolvedSettings, context: &Context, session: &mut Session) -> Result<(), StageError> {
    let (Some(rows), Some(tokenizer)) = (context.input("train"), session.tokenizer()) else {
        return Ok(());
    };
    let long = LongTexts::count(rows, tokenizer, settings.max_tokens, settings.long_texts)?;
    if let Some(message) = long.warning() {
        context.warn(message);
        session.note(long.figures())?;
    }
    Ok(())
}

/// Reports the letters of transcripts that the tokenizer does not know, and sends a warning where they are many.
fn report_unknown_letters(
    settings: &ResolvedSettings,
    context: &Context,
    session: &mut Session,
) -> Result<(), StageError> {
    let (Some(rows), Some(tokenizer)) = (context.input("train"), session.tokenizer()) else {
        return Ok(());
    };
    let unknown = UnknownLetters::count(rows, tokenizer)?;
    if let Some(message) = unknown.warning(settings.warn_unknown_letters) {
        context.warn(message);
    }
    if let Some(table) = unknown.table() {
        context.report(table);
        session.note(unknown.figures())?;
    }
    Ok(())
}

/// Reports what is trained and how, where training begins, and warns where words are cut into many tokens.
fn report_start(settings: &ResolvedSettings, context: &Context, session: &Session) -> Result<(), StageError> {
    let (Some(rows), Some(tokenizer)) = (context.input("train"), session.tokenizer()) else {
        return Ok(());
    };
    if session.step_number() > 0 {
        return Ok(());
    }
    let languages = start_report::words_and_tokens(rows, tokenizer)?;
    if let Some(message) = start_report::many_tokens(&languages) {
        context.warn(message);
    }
    context.report(start_report::table(settings, session.model(), &languages)?);
    Ok(())
}

/// Sends warnings of transcripts without a word, where they are many, and of wrong tags.
fn report_text_faults(settings: &ResolvedSettings, context: &Context, session: &mut Session) -> Result<(), StageError> {
    let (Some(rows), Some(tokenizer)) = (context.input("train"), session.tokenizer()) else {
        return Ok(());
    };
    let faults = TextFaults::count(rows, tokenizer)?;
    let warnings = [faults.empty_warning(settings.warn_empty_texts), faults.tag_warning()];
    for message in warnings.into_iter().flatten() {
        context.warn(message);
    }
    for figures in faults.figures() {
        session.note(figures)?;
    }
    Ok(())
}

/// Sends warnings about checkpoints that could not be copied into object storage.
fn warn_of_uploads(context: &Context, session: &Session) {
    for message in session.upload_warnings() {
        context.warn(message);
    }
}

/// Writes a checkpoint, waits at the end until all are where they are to be, and replies. Whether the thread is to end.
fn serve_request(context: &Context, session: &mut Session, request: CheckpointRequest) -> bool {
    let mut outcome = session.checkpoint().map(drop);
    // The last failure is the error of the run, and no warning beside it.
    warn_of_uploads(context, session);
    if request.stop {
        outcome = outcome.and_then(|()| session.finish_upload());
    }
    let outcome = outcome.map_err(StageError::from);
    // The receiver may be dropped.
    let _ = request.reply.send(outcome);
    request.stop
}

fn row_rules(settings: &ResolvedSettings) -> RowRules {
    RowRules {
        limit: TextLimit {
            max_tokens: settings.max_tokens,
            rule: settings.long_texts,
        },
        concatenate: settings.concatenate,
    }
}

/// Waits until all other processes have loaded their part of a step, and serves requests meanwhile. True: the thread is
/// to end.
fn wait_for_others(
    context: &Context,
    session: &mut Session,
    elsewhere: &mut LoadedElsewhere,
    requests: &Receiver<CheckpointRequest>,
    step: u64,
) -> Result<bool, StageError> {
    let until = Instant::now() + elsewhere.patience;
    while let Some(process) = elsewhere.missing(step) {
        let told = elsewhere.told.clone();
        select! {
            recv(requests) -> request => match request {
                Ok(request) => if serve_request(context, session, request) { return Ok(true) },
                Err(_) => return Ok(true),
            },
            recv(told) -> share => match share {
                Ok(share) => elsewhere.note(share)?,
                Err(_) => return Err(StageError::failed("nobody listens to the other processes any more")),
            },
            default(until.saturating_duration_since(Instant::now())) => return Err(elsewhere.late(step, process).into()),
        }
    }
    Ok(false)
}

fn one_step(
    settings: &ResolvedSettings,
    context: &Context,
    session: &mut Session,
    elsewhere: &mut Option<LoadedElsewhere>,
    prompts: Option<&RowPrompts>,
    work: StepBatches,
) -> Result<Partition, StageError> {
    if work.step != session.step_number() {
        return Err(StageError::refused(
            format!(
                "the loader gives step {}, but training in {} is at step {}",
                work.step,
                settings.checkpoints,
                session.step_number()
            ),
            "run again: the training's step was read before its data was known",
        ));
    }
    let tokenizer = session
        .tokenizer()
        .ok_or_else(|| StageError::failed("the model has no tokenizer"))?;
    let prompts = prompts.map(|prompts| (prompts, work.step));
    let mut loaded = match &elsewhere {
        None => micro_batches(&work.batches, tokenizer, row_rules(settings), prompts)?,
        Some(elsewhere) => own_micro_batches(
            &work.batches,
            tokenizer,
            row_rules(settings),
            prompts,
            |place, planned| elsewhere.is_own(place, planned),
        )?,
    };
    let mut batches_elsewhere = Vec::new();
    if let Some(elsewhere) = elsewhere {
        for share in elsewhere.take(work.step, &loaded.seconds)? {
            batches_elsewhere.extend(share.batches);
            loaded.lost.extend(share.lost);
            loaded.dropped.extend(share.dropped);
            loaded.too_long.extend(share.too_long);
        }
    }
    session.in_stage(stage_mark(&work.batches)?);
    drop(work.batches);
    // Where the train rows are an input, a warning about those with too many tokens was sent before the first step.
    let warned = context.input("train").is_some();
    let left_out = [
        (&loaded.dropped, "samples that are not numbers"),
        (&loaded.too_long, "more tokens than `max_tokens`"),
    ];
    for (segments, why) in &left_out[..if warned { 1 } else { 2 }] {
        if segments.is_empty() {
            continue;
        }
        // Counted from 1, as in `metrics.jsonl` and on the screen.
        let message = format!("step {}: left out for {why}: {}", work.step + 1, segments.join(", "));
        context.warn(message);
    }
    session.without(LeftOut {
        recordings: [loaded.lost, loaded.dropped].concat(),
        too_long: loaded.too_long,
    });
    session.step_beside(&loaded.batches, loaded.planned, &batches_elsewhere)?;
    Ok(work.partition)
}

/// Evaluation during training: on a fixed sample of the rows of an input, read once.
fn evaluation(
    settings: &ResolvedSettings,
    context: &Context,
    input: &str,
    per_language: usize,
) -> Result<Option<Evaluate>, StageError> {
    if settings.eval_every == 0 {
        return Ok(None);
    }
    let Some(rows) = context.input(input) else {
        return Ok(None);
    };
    let set = ValidationSet::read(
        &context.storage,
        rows,
        context.input("members"),
        &settings.shards,
        per_language,
    )
    .map_err(TrainingError::from)?;
    set.check(&context.rejects)?;
    let (batch_seconds, max_tokens) = (settings.max_batch_seconds(), settings.max_tokens);
    let cancel = context.cancel.clone();
    let (prompts, seed) = (settings.prompts.clone(), settings.seed);
    Ok(Some(Box::new(
        move |model: &TdtModel, all: &mut Recognize<'_, TrainingError>| {
            let prompts = RowPrompts::of_model(&model.config, &prompts, seed)?;
            let prompt_of = |language: &str| {
                let prompt = prompts.as_ref().map(|prompts| prompts.evaluated(language));
                prompt.transpose().map_err(|message| EvaluationError::Data { message })
            };
            set.evaluate(model, max_tokens, batch_seconds, &prompt_of, &|| cancel.is_set(), all)
        },
    )))
}
