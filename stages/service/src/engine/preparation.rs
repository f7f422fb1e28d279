//! Threads that decode recordings, find their windows, and enqueue them for the model.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use flow_audio::part::stated_seconds;
use flow_audio::samples::{OnDamage, Refusal, lock_if_long, samples_or_damage};
use flow_speakers::diarizer::{DiarizationSettings, KnownSpeakers};
use flow_speakers::silero::SAMPLE_RATE;
use flow_transcription::TranscriptionError;
use flow_transcription::recognizer::ActivityPart;
use flow_transcription::streamed::StreamedRecording;
use flow_transcription::window_groups::each_window;

use super::batcher::guarded;
use super::models::LoadedModel;
use super::progress_log::{Earlier, FoundWindows};
use super::shared::Shared;
use super::work::Work;
use super::{EngineError, SpeakerRequest};

/// Recordings longer than this, in seconds, do not use the threads that are reserved for short ones.
const SHORT_SECONDS: u64 = 60;

/// How often it is noted what voice activity found.
const LOGGED: Duration = Duration::from_millis(if cfg!(test) { 0 } else { 300 });

/// Recordings that wait to be prepared.
#[derive(Default)]
pub(crate) struct Preparation {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    /// Not known to be long.
    any: VecDeque<Arc<Work>>,
    long: VecDeque<Arc<Work>>,
    stopped: bool,
}

impl Waiting {
    /// The next recording of a thread: the first one, except that threads for short recordings take no long ones.
    fn take(&mut self, for_short: bool) -> Option<Arc<Work>> {
        let long_first = match (self.any.front(), self.long.front()) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(any), Some(long)) => long.id() < any.id(),
        };
        if long_first && !for_short {
            self.long.pop_front()
        } else {
            self.any.pop_front()
        }
    }
}

impl Preparation {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn push(&self, work: Arc<Work>) {
        if !work.has_ended() {
            self.lock().any.push_back(work);
            self.changed.notify_all();
        }
    }

    fn push_long(&self, work: Arc<Work>) {
        let mut waiting = self.lock();
        if waiting.stopped {
            return;
        }
        let place = waiting.long.partition_point(|other| other.id() < work.id());
        waiting.long.insert(place, work);
        drop(waiting);
        self.changed.notify_all();
    }

    /// Removes a request that has ended.
    pub fn remove(&self, job: u64) {
        let mut waiting = self.lock();
        waiting.any.retain(|work| work.id() != job);
        waiting.long.retain(|work| work.id() != job);
    }

    pub fn stop(&self) {
        let mut waiting = self.lock();
        waiting.stopped = true;
        waiting.any.clear();
        waiting.long.clear();
        drop(waiting);
        self.changed.notify_all();
    }

    fn next(&self, for_short: bool) -> Option<Arc<Work>> {
        let mut waiting = self.lock();
        loop {
            if waiting.stopped {
                return None;
            }
            if let Some(work) = waiting.take(for_short) {
                return Some(work);
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The result of preparing a recording.
enum Prepared {
    Done,
    /// Too long for a thread that is reserved for short ones.
    IsLong,
}

/// The number of threads for `cores`, and how many of them are reserved for short recordings. A thread mostly waits
/// until there is room for its recording's windows; so there are many more threads than cores, and several long
/// recordings do not block a slightly shorter one. Each keeps the samples of ten minutes at most.
fn threads(cores: usize) -> (usize, usize) {
    let count = cores.max(32);
    (count, count / 4)
}

/// Starts the threads.
///
/// # Errors
/// If a thread cannot be started.
pub(crate) fn start(shared: &Arc<Shared>) -> Result<(), EngineError> {
    let (count, short) = threads(thread::available_parallelism().map_or(1, std::num::NonZero::get));
    for index in 0..count {
        let for_short = index < short;
        let of_thread = Arc::clone(shared);
        let started = thread::Builder::new()
            .name("recordings".to_owned())
            .spawn(move || run(&of_thread, for_short));
        if let Err(error) = started {
            shared.preparation.stop();
            return Err(EngineError::Failed(format!("no thread can be started: {error}")));
        }
    }
    Ok(())
}

fn run(shared: &Shared, for_short: bool) {
    while let Some(work) = shared.preparation.next(for_short) {
        match guarded(|| prepare(shared, &work, for_short)) {
            Ok(Ok(Prepared::Done)) => {}
            Ok(Ok(Prepared::IsLong)) => shared.preparation.push_long(work),
            Ok(Err(error)) => work.end(Err(error)),
            Err(panic) => work.end(Err(EngineError::Failed(named(work.file(), &panic)))),
        }
    }
}

/// Enqueues the windows of a recording, and diarizes it if requested.
fn prepare(shared: &Shared, work: &Arc<Work>, for_short: bool) -> Result<Prepared, EngineError> {
    // None: it has ended meanwhile.
    let Some(model) = work.model() else {
        return Ok(Prepared::Done);
    };
    if for_short
        && stated_seconds(&shared.storage, work.path(), None).is_some_and(|seconds| seconds > SHORT_SECONDS as f64)
    {
        return Ok(Prepared::IsLong);
    }
    work.begin();
    let recording = StreamedRecording::new(&shared.storage, work.path(), work.channels());
    // What takes no minute is done again.
    let earlier = if for_short {
        Earlier::default()
    } else {
        work.earlier(&model)
    };
    let (found, kept) = match &earlier.windows {
        Some(found) => (found.clone(), None),
        None => match first_pass(shared, work, &model, (&recording, for_short), &earlier.activity)? {
            First::Found(found, kept) => (found, kept),
            First::Ended => return Ok(Prepared::Done),
            First::IsLong => return Ok(Prepared::IsLong),
        },
    };
    let windows = found.windows();
    let heard = earlier.heard_in(&windows.windows);
    let missing: Vec<usize> = (0..heard.len()).filter(|index| heard[*index].is_none()).collect();
    let places: Vec<Range<u64>> = missing.iter().map(|index| windows.windows[*index].clone()).collect();
    work.found(windows, found, heard);
    let mut give = |place: usize, signal| Ok(model.batcher.push(work, missing[place], signal) && !work.fail_if_late());
    let handed_over = match kept.as_deref() {
        Some(kept) => each_window(&places, &kept, &mut give),
        None => each_window(&places, &recording, &mut give),
    };
    if handed_over.map_err(|error| failed(work.file(), &error))? && work.diarize() {
        diarize(shared, work, kept)?;
    }
    Ok(Prepared::Done)
}

/// What came of reading a recording once.
enum First {
    /// Its windows, and all samples if these are few.
    Found(FoundWindows, Option<Vec<f32>>),
    /// The request has ended meanwhile.
    Ended,
    IsLong,
}

/// Finds the windows of a recording, behind what was found before.
fn first_pass(
    shared: &Shared,
    work: &Arc<Work>,
    model: &LoadedModel,
    (recording, for_short): (&StreamedRecording, bool),
    earlier: &[ActivityPart],
) -> Result<First, EngineError> {
    let max_duration = shared.settings.max_duration;
    let mut first = model.recognizer.first_pass(&shared.recognition);
    if first.resume(earlier).is_err() {
        // All lines are whole, and yet they do not fit each other.
        work.close_log();
        first = model.recognizer.first_pass(&shared.recognition);
    }
    let (mut samples, mut is_long) = (0, false);
    let (has_log, mut logged) = (work.has_log(), Instant::now());
    let extent = recording.first_pass(max_duration, OnDamage::Keep, &mut |block| {
        samples += block.len() as u64;
        is_long = for_short && samples > SHORT_SECONDS * u64::from(SAMPLE_RATE);
        first.feed(block)?;
        if has_log && logged.elapsed() >= LOGGED {
            first.part().into_iter().for_each(|part| work.log_activity(part));
            logged = Instant::now();
        }
        Ok(!is_long && !work.has_ended() && !work.fail_if_late())
    });
    if is_long {
        return Ok(First::IsLong);
    }
    if work.has_ended() {
        return Ok(First::Ended);
    }
    let extent = extent.map_err(|error| unreadable(work.file(), error))?;
    let extent = extent.map_err(|refusal| refused(work.file(), refusal, max_duration))?;
    let kept = first.take_samples();
    let windows = first
        .windows(&shared.recognition)
        .map_err(|error| failed(work.file(), &error))?;
    let found = FoundWindows::new(&windows, extent.damage.is_some(), extent.note);
    work.log_windows(found.clone());
    Ok(First::Found(found, kept))
}

/// Diarizes a recording. Long recordings, all samples of which are in memory for this, are processed one at a time.
fn diarize(shared: &Shared, work: &Work, kept: Option<Vec<f32>>) -> Result<(), EngineError> {
    let diarizer = shared.diarizer.as_ref().ok_or(EngineError::NotDiarizing)?;
    let (samples, _alone) = match kept {
        Some(kept) => (kept, None),
        None => {
            let Ok(alone) = lock_if_long(&shared.storage, work.path(), &|| work.has_ended() || work.is_late()) else {
                work.fail_if_late();
                return Ok(());
            };
            let max_duration = shared.settings.max_duration;
            let found = samples_or_damage(&shared.storage, work.path(), max_duration, OnDamage::Keep, None);
            let found = found.map_err(|error| EngineError::Failed(named(work.file(), &error.to_string())))?;
            (
                found
                    .map_err(|refusal| refused(work.file(), refusal, max_duration))?
                    .samples,
                alone,
            )
        }
    };
    let begun = Instant::now();
    let stopped = || work.has_ended() || work.is_late();
    let SpeakerRequest { clusters, known } = work.speakers();
    let settings = DiarizationSettings {
        clusters: *clusters,
        ..DiarizationSettings::default()
    };
    let known = (!known.is_empty()).then(|| KnownSpeakers::new(known.clone(), shared.settings.known_threshold));
    let known = known
        .transpose()
        .map_err(|error| EngineError::Failed(error.to_string()))?;
    let found = diarizer.diarize(&samples, &settings, &stopped);
    match found.map_err(|error| EngineError::Failed(named(work.file(), &error.to_string())))? {
        Some(mut diarized) => {
            if let Some(known) = known.as_ref().or(shared.known_speakers.as_ref()) {
                let renamed = known.name(&mut diarized);
                renamed.map_err(|error| EngineError::Failed(named(work.file(), &error.to_string())))?;
            }
            work.diarized(diarized, begun.elapsed().as_secs_f64());
        }
        None => {
            work.fail_if_late();
        }
    }
    Ok(())
}

/// Replaces the path of a recording in a message by the name that the client gave.
fn named((path, name): (&Path, &str), message: &str) -> String {
    message.replace(&path.display().to_string(), name)
}

pub(super) fn refused(file: (&Path, &str), Refusal { reason, detail }: Refusal, max_duration: f64) -> EngineError {
    match reason {
        "too_long" => EngineError::TooLong { max_duration },
        _ => EngineError::Audio {
            reason,
            detail: named(file, &detail),
        },
    }
}

/// Why the samples of a recording cannot be read.
pub(super) fn unreadable(file: (&Path, &str), error: TranscriptionError) -> EngineError {
    let reason = match &error {
        TranscriptionError::Audio(_) => "unreadable_file",
        // A sample that is NaN.
        TranscriptionError::Input(_) => "decode_error",
        _ => return failed(file, &error),
    };
    let detail = match named(file, &error.to_string()) {
        detail if detail.contains(file.1) => detail,
        detail => format!("{}: {detail}", file.1),
    };
    EngineError::Audio { reason, detail }
}

fn failed(file: (&Path, &str), error: &TranscriptionError) -> EngineError {
    EngineError::Failed(named(file, &error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_long_recordings_are_prepared_at_once_on_any_machine() {
        for cores in [1, 2, 3, 8, 64] {
            let (count, short) = threads(cores);
            assert!(count >= cores && short >= 8 && count - short >= 24, "{cores} cores");
        }
    }
}
