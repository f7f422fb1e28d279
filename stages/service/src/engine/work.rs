//! The state of an accepted request: its windows, speakers and transcript.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use chrono::{SecondsFormat, Utc};
use flow_audio::recording_reader::Channels;
use flow_kind::Kind;
use flow_speakers::diarizer::Diarized;
use flow_speakers::silero::SAMPLE_RATE;
use flow_storage::FileVersion;
use flow_transcription::decoding_request::DecodingRequest;
use flow_transcription::recognizer::{ActivityPart, Heard, RecognitionSettings, SpeechWindows, recognized};
use flow_transcription::speakers::{AssignmentRules, assign_speakers};
use flow_transcription::text_style::TextStyle;
use flow_transcription::tokens::Token;
use flow_transcription::transcribe::Transcribe;
use flow_transcription::{Metadata, Performance, Segment, Transcript};
use tempfile::TempPath;

use super::batcher::guarded;
use super::job::{Finished, JobEvent};
use super::models::{Lease, LoadedModel};
use super::progress_log::{Earlier, FoundWindows, ProgressLog};
use super::settled::Settled;
use super::shared::Shared;
use super::{EngineError, SpeakerRequest, TranscriptionRequest};

/// An accepted request, as seen by the threads that process it.
pub(crate) struct Work {
    id: u64,
    source_name: String,
    path: PathBuf,
    diarize: bool,
    speakers: SpeakerRequest,
    with_tokens: bool,
    decoding: Arc<DecodingRequest>,
    style: TextStyle,
    channels: Channels,
    log_path: Option<PathBuf>,
    taken: Instant,
    shared: Arc<Shared>,
    ended: AtomicBool,
    state: Mutex<State>,
}

struct State {
    audio: Option<TempPath>,
    lease: Option<Lease>,
    log: Option<ProgressLog>,
    /// When a thread began to prepare it.
    begun: Option<Instant>,
    progress: Option<Progress>,
    diarized: Option<(Diarized, f64)>,
    first_window: Option<Instant>,
    batches: usize,
    /// Segments that were not sent to the client yet.
    segments: Vec<Segment>,
    /// The tokens of their words.
    tokens: Vec<Vec<Token>>,
    outcome: Option<Result<Box<Finished>, EngineError>>,
    waker: Option<Waker>,
    over: bool,
}

/// The progress of the windows.
struct Progress {
    windows: SpeechWindows,
    damaged: bool,
    /// What a user has to know of how it is read.
    note: Option<String>,
    heard: Vec<Option<Heard>>,
    missing: usize,
    settled: Settled,
    /// The window of the first word that is not settled, and its number in it.
    unsettled: (usize, usize),
    /// When the last one was heard, where all were.
    last_window: Option<Instant>,
}

impl Progress {
    /// The tokens of the next `words` words: segments have the words of the windows, in order.
    fn settled_tokens(&mut self, words: usize) -> Vec<Vec<Token>> {
        let mut found = Vec::new();
        let (window, word) = &mut self.unsettled;
        while found.len() < words
            && let Some(Some(heard)) = self.heard.get(*window)
        {
            let next = heard.tokens.iter().skip(*word).take(words - found.len());
            let before = found.len();
            found.extend(next.cloned());
            *word += found.len() - before;
            if *word == heard.tokens.len() {
                (*window, *word) = (*window + 1, 0);
            }
        }
        found
    }
}

impl Work {
    pub fn new(id: u64, request: TranscriptionRequest, style: TextStyle, shared: Arc<Shared>) -> Self {
        Work {
            id,
            source_name: request.source_name,
            path: request.audio.to_path_buf(),
            diarize: request.diarize,
            speakers: request.speakers,
            with_tokens: request.tokens,
            decoding: request.decoding,
            style,
            channels: request.channel.map_or(Channels::Mix, Channels::One),
            log_path: request.log,
            taken: Instant::now(),
            shared,
            ended: AtomicBool::new(false),
            state: Mutex::new(State {
                audio: Some(request.audio),
                lease: None,
                log: None,
                begun: None,
                progress: None,
                diarized: None,
                first_window: None,
                batches: 0,
                segments: Vec::new(),
                tokens: Vec::new(),
                outcome: None,
                waker: None,
                over: false,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn path(&self) -> &PathBuf {
        &self.path
    }

    /// Its path and the client's name.
    pub fn file(&self) -> (&Path, &str) {
        (&self.path, &self.source_name)
    }

    pub fn diarize(&self) -> bool {
        self.diarize
    }

    pub fn speakers(&self) -> &SpeakerRequest {
        &self.speakers
    }

    /// Phrases and languages.
    pub fn decoding(&self) -> &Arc<DecodingRequest> {
        &self.decoding
    }

    pub fn channels(&self) -> Channels {
        self.channels
    }

    /// Opens its log, if it has one, and returns what earlier attempts did. Without a log it is done from the beginning.
    pub fn earlier(&self, model: &LoadedModel) -> Earlier {
        let (Some(path), Some(of)) = (&self.log_path, self.log_is_of(model)) else {
            return Earlier::default();
        };
        let Ok((log, earlier)) = ProgressLog::open(path, &of) else {
            return Earlier::default();
        };
        let mut state = self.lock();
        if !self.has_ended() {
            state.log = Some(log);
        }
        earlier
    }

    /// What decides about windows and words: the recording, the model, the settings and the program.
    fn log_is_of(&self, model: &LoadedModel) -> Option<String> {
        let version = |path: &Path| path.metadata().ok().map(|metadata| FileVersion::of_file(&metadata));
        let recording = version(&self.path)?;
        let settings = &self.shared.settings;
        let priors = settings
            .models
            .iter()
            .filter_map(|model| model.language_prior.as_deref());
        let of = (
            (env!("CARGO_PKG_VERSION"), <Transcribe as Kind>::VERSION, recording),
            (&model.recognizer.digest, self.recognition(), settings.max_duration),
            (
                &settings.device,
                &settings.weights,
                &settings.precision,
                &settings.decoder,
            ),
            (settings.language_weight, priors.map(version).collect::<Vec<_>>()),
            (&self.decoding, self.channels, self.with_tokens),
        );
        Some(format!("{of:?}"))
    }

    /// Notes in its log what voice activity found.
    pub fn log_activity(&self, part: ActivityPart) {
        if let Some(log) = &self.lock().log {
            log.activity(part);
        }
    }

    /// From here on nothing is noted.
    pub fn close_log(&self) {
        self.lock().log = None;
    }

    pub fn has_log(&self) -> bool {
        self.lock().log.is_some()
    }

    /// Notes its windows in its log.
    pub fn log_windows(&self, found: FoundWindows) {
        if let Some(log) = &self.lock().log {
            log.windows(found);
        }
    }

    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// Holds the model as long as the request needs it.
    pub fn set_lease(&self, lease: Lease) {
        let mut state = self.lock();
        if !self.has_ended() {
            state.lease = Some(lease);
        }
    }

    /// The model; None once the request has ended.
    pub fn model(&self) -> Option<Arc<LoadedModel>> {
        self.lock().lease.as_ref().map(|lease| Arc::clone(lease.model()))
    }

    /// Notes that a thread has begun to prepare it; anew where one that takes short recordings alone gave it back, after which it
    /// waited again.
    pub fn begin(&self) {
        self.lock().begun = Some(Instant::now());
    }

    #[cfg(test)]
    pub fn begun(&self) -> Option<Instant> {
        self.lock().begun
    }

    /// The settings of the recognizer.
    pub fn recognition(&self) -> &RecognitionSettings {
        &self.shared.recognition
    }

    /// The speech of a window in stretches, in seconds from its beginning; none where it has ended.
    pub fn stretches(&self, window: usize) -> Option<Vec<Range<f64>>> {
        let state = self.lock();
        Some(state.progress.as_ref()?.windows.stretches(window))
    }

    /// Sets the windows of its recording, and what was heard in those that were decoded before.
    pub fn found(&self, windows: SpeechWindows, found: FoundWindows, heard: Vec<Option<Heard>>) {
        let mut state = self.lock();
        if self.has_ended() {
            return;
        }
        let missing = heard.iter().filter(|heard| heard.is_none()).count();
        state.progress = Some(Progress {
            missing,
            heard,
            windows,
            damaged: found.damaged,
            note: found.note,
            settled: Settled::default(),
            unsettled: (0, 0),
            last_window: None,
        });
        self.settle(state);
    }

    /// Notes that the decoding of its windows began at `begun`.
    pub fn in_batch(&self, begun: Instant) {
        let mut state = self.lock();
        state.first_window.get_or_insert(begun);
        state.batches += 1;
    }

    /// Notes the result of a window.
    pub fn heard(&self, index: usize, mut heard: Heard) {
        // Those of boosted phrases say which were not the model's first choice.
        if !self.with_tokens && self.decoding.phrases.is_empty() {
            heard.tokens = Vec::new();
        }
        let mut state = self.lock();
        let state_of = &mut *state;
        let Some(progress) = &mut state_of.progress else { return };
        if let Some(log) = &state_of.log {
            log.heard(&progress.windows.windows[index], &heard);
        }
        if progress.heard[index].replace(heard).is_none() {
            progress.missing -= 1;
        }
        if progress.missing == 0 {
            progress.last_window = Some(Instant::now());
        }
        self.settle(state);
    }

    /// Tells the client of segments that are final now, and ends the request if all is done.
    fn settle(&self, mut state: MutexGuard<'_, State>) {
        let Some(progress) = &mut state.progress else { return };
        if !self.diarize {
            let rules = &self.shared.recognition.segments;
            let settled = &mut progress.settled;
            let SpeechWindows { windows, samples, .. } = &progress.windows;
            match settled.advance(windows, *samples, &progress.heard, rules) {
                Ok(new) if new.is_empty() => {}
                Ok(new) => {
                    let words = new.iter().map(|segment| segment.words.len()).sum();
                    let tokens = match self.with_tokens {
                        true => progress.settled_tokens(words),
                        false => Vec::new(),
                    };
                    let (new, tokens) = self.style.apply_with_tokens(new, tokens);
                    state.segments.extend(new);
                    state.tokens.extend(tokens);
                    // Before the following steps, which may fail.
                    if let Some(waker) = state.waker.take() {
                        waker.wake();
                    }
                }
                Err(error) => {
                    drop(state);
                    self.end(Err(EngineError::Failed(error.to_string())));
                    return;
                }
            }
        }
        self.finish_if_complete(state);
    }

    /// Notes the diarization, which took `seconds`.
    pub fn diarized(&self, diarized: Diarized, seconds: f64) {
        let mut state = self.lock();
        if !self.has_ended() {
            state.diarized = Some((diarized, seconds));
            self.finish_if_complete(state);
        }
    }

    fn finish_if_complete(&self, mut state: MutexGuard<'_, State>) {
        let is_complete = state.progress.as_ref().is_some_and(|progress| progress.missing == 0);
        if !is_complete || (self.diarize && state.diarized.is_none()) {
            return;
        }
        let (Some(progress), Some(model)) = (
            state.progress.take(),
            state.lease.as_ref().map(|lease| Arc::clone(lease.model())),
        ) else {
            return;
        };
        let diarized = state.diarized.take();
        let (begun, first, batches) = (state.begun.unwrap_or(self.taken), state.first_window, state.batches);
        drop(state);
        let finished = self.finished(progress, diarized, &model, begun, first, batches);
        drop(model);
        self.end(finished.map(Box::new));
    }

    fn finished(
        &self,
        progress: Progress,
        diarized: Option<(Diarized, f64)>,
        model: &LoadedModel,
        begun: Instant,
        first: Option<Instant>,
        batches: usize,
    ) -> Result<Finished, EngineError> {
        let heard: Vec<Heard> = progress.heard.into_iter().map(Option::unwrap_or_default).collect();
        let of_words = heard.iter().filter(|_| self.with_tokens);
        let tokens: Vec<Vec<Token>> = of_words.flat_map(|heard| heard.tokens.clone()).collect();
        // What of the request has no effect.
        let decoding = model.recognizer.decoding_for(&self.decoding);
        let decoding = decoding.map_err(|error| EngineError::Failed(error.to_string()))?;
        let notes = decoding.notes.clone();
        let recognized = recognized(
            &progress.windows,
            heard,
            &self.shared.recognition,
            decoding.phrases.as_ref(),
        );
        let recognized = recognized.map_err(|error| EngineError::Failed(error.to_string()))?;
        let (segments, tokens) = self.style.apply_with_tokens(recognized.segments, tokens);
        let duration = progress.windows.samples as f64 / f64::from(SAMPLE_RATE);
        let metadata = Metadata {
            source_file: self.source_name.clone(),
            channel: None,
            row: None,
            duration_s: duration,
            damaged_at: progress.damaged.then_some(duration),
            model: model.recognizer.name.clone(),
            model_digest: model.recognizer.digest.clone(),
            languages: recognized.languages,
            num_speakers: diarized.as_ref().map(|(diarized, _)| diarized.speakers.len() as u64),
            coverage: recognized.coverage,
            boosted: recognized.boosted,
            processed_at: Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true),
        };
        let last = progress.last_window.unwrap_or_else(Instant::now);
        let seconds = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64();
        let performance = Performance::new(
            duration,
            seconds(begun, last),
            diarized.as_ref().map_or(0.0, |(_, seconds)| *seconds),
            begun.elapsed().as_secs_f64(),
        );
        let speakers = metadata.num_speakers;
        let segments = match &diarized {
            Some((diarized, _)) => assign_speakers(segments, &diarized.exclusive, &AssignmentRules::default()),
            None => segments,
        };
        let mut transcript = Transcript::from_segments(metadata, performance, segments);
        // There may be speakers without words.
        transcript.metadata.num_speakers = speakers.or(transcript.metadata.num_speakers);
        Ok(Finished {
            transcript,
            warnings: progress.note.into_iter().chain(notes).collect(),
            tokens,
            queue_seconds: seconds(self.taken, first.unwrap_or(begun)),
            decode_seconds: first.map_or(0.0, |first| seconds(first, last)),
            batches,
        })
    }

    /// Seconds of the recording without those of windows that are not decoded yet, and all seconds. None where the windows are
    /// not known yet, or no more.
    pub fn decoded_seconds(&self) -> Option<(f64, f64)> {
        let state = self.lock();
        let progress = state.progress.as_ref()?;
        let windows = progress.windows.windows.iter().zip(&progress.heard);
        let missing = windows.filter(|(_, heard)| heard.is_none());
        let missing: u64 = missing.map(|(window, _)| window.end - window.start).sum();
        let seconds = |samples: u64| samples as f64 / f64::from(SAMPLE_RATE);
        Some((
            seconds(progress.windows.samples.saturating_sub(missing)),
            seconds(progress.windows.samples),
        ))
    }

    /// Whether it is past its time limit.
    pub fn is_late(&self) -> bool {
        let state = self.lock();
        // Between the end of the preparation and the first window it waits for others.
        let prepared = state.begun.filter(|_| state.progress.is_none());
        let first = state.first_window.or(prepared);
        drop(state);
        let limit = Duration::from_secs_f64(self.shared.settings.decode_timeout);
        first.is_some_and(|first| first.elapsed() > limit)
    }

    /// Ends it if it is past its time limit, and returns whether it was.
    pub fn fail_if_late(&self) -> bool {
        let is_late = self.is_late();
        if is_late {
            self.end(Err(EngineError::Timeout(self.shared.settings.decode_timeout)));
        }
        is_late
    }

    /// Ends it; later results are ignored. Its place, its file and its windows are released at once.
    pub fn end(&self, outcome: Result<Box<Finished>, EngineError>) {
        if self.ended.swap(true, Ordering::SeqCst) {
            return;
        }
        // A panic of the metrics must not keep the client waiting.
        let _ = guarded(|| {
            self.shared
                .observer
                .finished(outcome.as_ref().map(|finished| &**finished))
        });
        let mut state = self.lock();
        let (audio, lease) = (state.audio.take(), state.lease.take());
        state.progress = None;
        state.log = None;
        state.diarized = None;
        drop(state);
        if let Some(lease) = lease {
            lease.model().batcher.remove(self.id);
        }
        drop(audio);
        self.shared.preparation.remove(self.id);
        self.shared.release(self.id, self.taken.elapsed());
        // Released first, so that a client that sees the end finds the place free.
        let mut state = self.lock();
        state.outcome = Some(outcome);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The next event for the client.
    pub fn poll(&self, context: &Context<'_>) -> Poll<Option<JobEvent>> {
        let mut state = self.lock();
        if state.over {
            return Poll::Ready(None);
        }
        if !state.segments.is_empty() {
            let (segments, tokens) = (std::mem::take(&mut state.segments), std::mem::take(&mut state.tokens));
            return Poll::Ready(Some(JobEvent::Segments(segments, tokens)));
        }
        if let Some(outcome) = state.outcome.take() {
            state.over = true;
            return Poll::Ready(Some(match outcome {
                Ok(finished) => JobEvent::Done(finished),
                Err(error) => JobEvent::Failed(error),
            }));
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}
