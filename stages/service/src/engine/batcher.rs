//! The queue of windows of all jobs of a model, and the thread that decodes them.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use flow_model::decoding::DecodingSettings;
use flow_speakers::silero::SAMPLE_RATE;
use flow_transcription::TranscriptionError;
use flow_transcription::decoding_request::DecodingRequest;
use flow_transcription::recognizer::{Heard, RecognitionSettings, Recognizer};
use tokio::sync::oneshot;

use super::schedule::{Item, Limits, Schedule};
use super::spoken::{SpokenSamples, hear_together};
use super::work::Work;
use super::{EngineError, Observer};

/// Most waiting samples of one job: ten minutes, in 38 MB.
const AHEAD: u64 = 600 * SAMPLE_RATE as u64;
/// Most waiting samples of all jobs, except for one more window.
const AHEAD_TOGETHER: u64 = 2 * AHEAD;
/// Samples of a job (a minute, 4 MB) that may always wait, however many others do, so that short recordings do not
/// queue twice.
const ALWAYS: u64 = 60 * SAMPLE_RATE as u64;

/// The receiver of the result of a live session's window.
type LiveReply = oneshot::Sender<Result<Heard, EngineError>>;

/// The windows that wait for a model.
pub(crate) struct Batcher {
    queue: Mutex<Queue>,
    /// Signalled when a window arrives, or the thread is to end.
    filled: Condvar,
    /// Signalled when there is room for windows, or a job has ended.
    room: Condvar,
    /// Held by the decoding thread, where models share the device.
    turn: Option<Arc<Mutex<()>>>,
}

struct Queue {
    schedule: Schedule,
    jobs: HashMap<u64, JobWindows>,
    live: HashMap<u64, LiveWindow>,
    next_live: u64,
    /// What is heard as it is spoken, all together and before windows; but not twice in a row while these wait.
    spoken: Vec<SpokenSamples>,
    was_spoken: bool,
    samples: u64,
    stopped: bool,
}

/// A window of a live session.
pub(crate) struct LiveWindow {
    pub signal: Vec<f32>,
    /// The stretches of its speech, in seconds, where that is known.
    pub speech: Option<Vec<Range<f64>>>,
    /// Whether it still grows.
    pub grows: bool,
    /// Phrases and languages.
    pub decoding: Arc<DecodingRequest>,
    pub reply: LiveReply,
}

struct JobWindows {
    work: Arc<Work>,
    signals: HashMap<usize, Vec<f32>>,
    samples: u64,
}

/// The next action of the thread.
enum Next {
    Batch(Vec<Taken>),
    Spoken(Vec<SpokenSamples>),
    /// No window arrived within the timeout.
    Nothing,
    Stop,
}

/// A window taken out of the queue.
struct Taken {
    signal: Vec<f32>,
    /// Whether it will be decoded again with more audio, and so is decoded once now.
    grows: bool,
    decoding: Arc<DecodingRequest>,
    of: Owner,
}

enum Owner {
    Job(Arc<Work>, usize),
    Live(LiveReply, Option<Vec<Range<f64>>>),
}

impl Taken {
    fn job(&self) -> Option<&Arc<Work>> {
        match &self.of {
            Owner::Job(work, _) => Some(work),
            Owner::Live(..) => None,
        }
    }

    /// The window as it is decoded.
    fn window(&self) -> Window<'_> {
        Window {
            signal: &self.signal,
            grows: self.grows,
            decoding: &self.decoding,
            speech: match &self.of {
                Owner::Job(work, index) => work.stretches(*index),
                Owner::Live(_, speech) => speech.clone(),
            },
            recognition: self.job().map(|work| *work.recognition()),
        }
    }
}

/// A window that is decoded.
struct Window<'a> {
    signal: &'a [f32],
    grows: bool,
    decoding: &'a DecodingRequest,
    /// The stretches of its speech, in seconds, where that is known.
    speech: Option<Vec<Range<f64>>>,
    /// What is done about speech without words; nothing in live sessions.
    recognition: Option<RecognitionSettings>,
}

impl Batcher {
    pub fn new(limits: Limits, turn: Option<Arc<Mutex<()>>>) -> Self {
        Batcher {
            queue: Mutex::new(Queue {
                schedule: Schedule::new(limits),
                jobs: HashMap::new(),
                live: HashMap::new(),
                next_live: 0,
                spoken: Vec::new(),
                was_spoken: false,
                samples: 0,
                stopped: false,
            }),
            filled: Condvar::new(),
            room: Condvar::new(),
            turn,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues a window of a job; blocks while too many wait. False: the job has ended.
    pub fn push(&self, work: &Arc<Work>, index: usize, signal: Vec<f32>) -> bool {
        let length = signal.len() as u64;
        let mut queue = self.lock();
        loop {
            if queue.stopped || work.has_ended() {
                return false;
            }
            let own = queue.jobs.get(&work.id()).map_or(0, |waiting| waiting.samples);
            // A window longer than the limit is accepted when no other one of its job waits.
            let is_little = own == 0 || own + length <= ALWAYS;
            if is_little || (own + length <= AHEAD && queue.samples + length <= AHEAD_TOGETHER) {
                break;
            }
            queue = self.room.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        let waiting = queue.jobs.entry(work.id()).or_insert_with(|| JobWindows {
            work: Arc::clone(work),
            signals: HashMap::new(),
            samples: 0,
        });
        waiting.signals.insert(index, signal);
        waiting.samples += length;
        queue.samples += length;
        queue.schedule.push(work.id(), index, length);
        drop(queue);
        self.filled.notify_one();
        true
    }

    /// Enqueues a window of a live session.
    pub fn push_live(&self, window: LiveWindow) {
        let mut queue = self.lock();
        if queue.stopped {
            let _ = window.reply.send(Err(EngineError::Cancelled));
            return;
        }
        let key = queue.next_live;
        queue.next_live += 1;
        queue.schedule.push_live(key, window.signal.len() as u64);
        queue.live.insert(key, window);
        drop(queue);
        self.filled.notify_one();
    }

    /// Enqueues the next samples of a turn that is heard as it is spoken.
    pub fn push_spoken(&self, turn: SpokenSamples) {
        let mut queue = self.lock();
        if queue.stopped {
            turn.refuse(EngineError::Cancelled);
            return;
        }
        queue.spoken.push(turn);
        drop(queue);
        self.filled.notify_one();
    }

    /// Removes a job that has ended, with its windows.
    pub fn remove(&self, job: u64) {
        let mut queue = self.lock();
        queue.schedule.remove(job);
        if let Some(waiting) = queue.jobs.remove(&job) {
            queue.samples -= waiting.samples;
        }
        drop(queue);
        self.room.notify_all();
    }

    /// Ends the thread; windows that wait are dropped.
    pub fn stop(&self) {
        let mut queue = self.lock();
        queue.stopped = true;
        queue.jobs.clear();
        queue.samples = 0;
        let live = std::mem::take(&mut queue.live);
        let spoken = std::mem::take(&mut queue.spoken);
        drop(queue);
        for window in live.into_values() {
            let _ = window.reply.send(Err(EngineError::Cancelled));
        }
        spoken.into_iter().for_each(|turn| turn.refuse(EngineError::Cancelled));
        self.filled.notify_all();
        self.room.notify_all();
    }

    /// Samples that wait.
    #[cfg(test)]
    pub fn waiting(&self) -> u64 {
        self.lock().samples
    }

    fn next(&self, patience: Option<Duration>) -> Next {
        let mut queue = self.lock();
        let until = patience.map(|patience| Instant::now() + patience);
        loop {
            if queue.stopped {
                return Next::Stop;
            }
            let windows_wait = !queue.schedule.is_empty();
            let windows_are_next = queue.was_spoken && windows_wait;
            if !queue.spoken.is_empty() && !windows_are_next {
                queue.was_spoken = true;
                return Next::Spoken(std::mem::take(&mut queue.spoken));
            }
            if windows_wait {
                queue.was_spoken = false;
                let batch = queue.take();
                drop(queue);
                self.room.notify_all();
                return Next::Batch(batch);
            }
            queue = match until.map(|until| until.saturating_duration_since(Instant::now())) {
                None => self.filled.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some(left) if left.is_zero() => return Next::Nothing,
                Some(left) => {
                    let waited = self.filled.wait_timeout(queue, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Decodes until it is stopped. After `patience` without work, `idle` returns how long to wait further; None ends
    /// the thread.
    pub fn run(
        &self,
        recognizer: &Recognizer,
        observer: &dyn Observer,
        mut patience: Option<Duration>,
        idle: &dyn Fn() -> Option<Duration>,
    ) {
        let whole = patience;
        loop {
            match self.next(patience) {
                Next::Stop => return,
                Next::Nothing => match idle() {
                    Some(longer) => patience = Some(longer),
                    None => return,
                },
                Next::Spoken(turns) => {
                    patience = whole;
                    let _alone = (self.turn.as_deref()).map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
                    hear_together(recognizer, turns);
                }
                Next::Batch(batch) => {
                    patience = whole;
                    let jobs: Vec<Arc<Work>> = batch.iter().filter_map(Taken::job).cloned().collect();
                    let decoded = guarded(|| decode(recognizer, observer, self.turn.as_deref(), batch));
                    if let Err(panic) = decoded {
                        for work in jobs {
                            work.end(Err(EngineError::Failed(panic.clone())));
                        }
                    }
                }
            }
        }
    }
}

impl Queue {
    /// Takes the next batch out of the queue. It may be empty, as clients of live sessions may have disconnected.
    fn take(&mut self) -> Vec<Taken> {
        let mut batch = Vec::new();
        for item in self.schedule.next_batch() {
            match item {
                Item::Live(key) => {
                    if let Some(window) = self.live.remove(&key).filter(|window| !window.reply.is_closed()) {
                        batch.push(Taken {
                            signal: window.signal,
                            grows: window.grows,
                            decoding: window.decoding,
                            of: Owner::Live(window.reply, window.speech),
                        });
                    }
                }
                Item::Window { job, index } => {
                    let Some(waiting) = self.jobs.get_mut(&job) else {
                        continue;
                    };
                    let Some(signal) = waiting.signals.remove(&index) else {
                        continue;
                    };
                    waiting.samples -= signal.len() as u64;
                    self.samples -= signal.len() as u64;
                    batch.push(Taken {
                        signal,
                        grows: false,
                        decoding: Arc::clone(waiting.work.decoding()),
                        of: Owner::Job(Arc::clone(&waiting.work), index),
                    });
                }
            }
        }
        batch
    }
}

/// What `work` returns, or the message of its panic.
pub(crate) fn guarded<R>(work: impl FnOnce() -> R) -> Result<R, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        format!(
            "a thread panicked: {}",
            text.unwrap_or_else(|| "for an unknown reason".to_owned())
        )
    })
}

/// Decodes a batch and passes the results to its jobs. If it fails, each window is tried alone, so that none fails
/// because of another.
fn decode(recognizer: &Recognizer, observer: &dyn Observer, turn: Option<&Mutex<()>>, mut batch: Vec<Taken>) {
    batch.retain(|taken| taken.job().is_none_or(|work| !work.has_ended() && !work.fail_if_late()));
    if batch.is_empty() {
        return;
    }
    let alone = turn.map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
    let begun = Instant::now();
    let mut jobs = BTreeSet::new();
    for work in batch.iter().filter_map(Taken::job) {
        if jobs.insert(work.id()) {
            work.in_batch(begun);
        }
    }
    let seconds = batch.iter().map(|taken| taken.signal.len()).sum::<usize>() as f64 / f64::from(SAMPLE_RATE);
    let windows = batch.len();
    let signals: Vec<Window<'_>> = batch.iter().map(Taken::window).collect();
    let heard = decode_signals(recognizer, &signals);
    let heard: Vec<Result<Heard, EngineError>> = match heard {
        Ok(heard) => heard.into_iter().map(Ok).collect(),
        Err(error) if windows == 1 => vec![Err(error)],
        Err(_) => signals
            .iter()
            .map(|signal| {
                let alone = std::slice::from_ref(signal);
                decode_signals(recognizer, alone)?.pop().ok_or_else(no_answer)
            })
            .collect(),
    };
    drop(alone);
    // A panic of the metrics must not end the thread.
    let _ = guarded(|| observer.batch(windows, seconds));
    for (taken, heard) in batch.into_iter().zip(heard) {
        drop(taken.signal);
        match taken.of {
            Owner::Live(reply, _) => {
                let _ = reply.send(heard);
            }
            Owner::Job(work, index) => {
                let delivered = guarded(|| match heard {
                    Ok(heard) => work.heard(index, heard),
                    Err(error) => work.end(Err(error)),
                });
                if let Err(panic) = delivered {
                    work.end(Err(EngineError::Failed(panic)));
                }
            }
        }
    }
}

fn no_answer() -> EngineError {
    EngineError::Failed("the model did not answer for all windows".to_owned())
}

/// Decodes windows, those with the same phrases and languages together.
fn decode_signals(recognizer: &Recognizer, windows: &[Window<'_>]) -> Result<Vec<Heard>, EngineError> {
    let mut groups: Vec<(&DecodingRequest, Vec<usize>)> = Vec::new();
    for (index, window) in windows.iter().enumerate() {
        match groups.iter_mut().find(|(decoding, _)| *decoding == window.decoding) {
            Some((_, group)) => group.push(index),
            None => groups.push((window.decoding, vec![index])),
        }
    }
    let mut heard: Vec<Heard> = windows.iter().map(|_| Heard::default()).collect();
    for (decoding, group) in groups {
        let of_group: Vec<&Window<'_>> = group.iter().map(|&index| &windows[index]).collect();
        for (index, found) in group.into_iter().zip(decode_alike(recognizer, decoding, &of_group)?) {
            heard[index] = found;
        }
    }
    Ok(heard)
}

/// Decodes windows, those that grow once, and where that is asked for speech without words again.
fn decode_alike(
    recognizer: &Recognizer,
    decoding: &DecodingRequest,
    windows: &[&Window<'_>],
) -> Result<Vec<Heard>, EngineError> {
    let signals: Vec<&[f32]> = windows.iter().map(|window| window.signal).collect();
    let everywhere = || std::slice::from_ref(&(0.0..f64::INFINITY)).to_vec();
    let speech: Vec<Vec<Range<f64>>> = windows
        .iter()
        .map(|window| window.speech.clone().unwrap_or_else(everywhere))
        .collect();
    let heard = guarded(|| {
        let decoding = recognizer.decoding_for(decoding)?;
        let settings = &decoding.settings;
        let mut heard = recognizer.decode_again_where((&signals, &speech), &|index| !windows[index].grows, settings)?;
        if heard.len() == windows.len() {
            recover(recognizer, settings, windows, &mut heard)?;
        }
        recognizer.calibrate(&mut heard);
        Ok::<_, TranscriptionError>(heard)
    });
    let heard = heard.map_err(EngineError::Failed)?;
    let heard = heard.map_err(|error| EngineError::Failed(error.to_string()))?;
    if heard.len() == signals.len() {
        Ok(heard)
    } else {
        Err(no_answer())
    }
}

/// Decodes speech without words again, in the windows for which that is asked.
fn recover(
    recognizer: &Recognizer,
    decoding: &DecodingSettings,
    windows: &[&Window<'_>],
    heard: &mut [Heard],
) -> Result<(), TranscriptionError> {
    let (mut signals, mut speech, mut found, mut indices) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut settings = None;
    for (index, (window, heard)) in windows.iter().zip(&mut *heard).enumerate() {
        if let (Some(of_engine), Some(stretches)) = (&window.recognition, &window.speech) {
            settings = Some(of_engine);
            signals.push(window.signal);
            speech.push(stretches.clone());
            found.push(std::mem::take(heard));
            indices.push(index);
        }
    }
    if let Some(settings) = settings {
        recognizer.recover(&signals, &speech, (settings, decoding), &mut found, &|| false)?;
    }
    for (index, found) in indices.into_iter().zip(found) {
        heard[index] = found;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_messages() {
        assert_eq!(guarded(|| 3), Ok(3));
        let panic = guarded(|| -> usize { panic!("of {}", 3) }).unwrap_err();
        assert!(panic.ends_with("of 3"), "{panic}");
        let panic = guarded(|| -> usize { panic!("plain") }).unwrap_err();
        assert!(panic.ends_with("plain"), "{panic}");
    }
}
