//! From samples as they come to words: turns of speech, the windows of a turn, and what is decided of each.
//!
//! A turn is what is between two pauses, or what a client commits. It is heard in windows that follow each other without a gap:
//! the one that grows is decoded again and again ([`Agreement`] says what is certain), and once more as a whole when it ends: at a
//! pause as in a recording (with turn detection), at the end of the turn, at its best pause when it is as long as a window may be,
//! or between two sentences before that.
//!
//! With a model that hears what is spoken ([`Session::set_latency`]), a turn has no windows: its samples go to the model once, part
//! by part as they come, and the words that it gives are certain.
//!
//! Nothing here waits or knows the time: who drives a session asks it for the next window to decode, and tells it what was heard.
//! Who speaks is found out beside that, from the same samples ([`WordSpeakers`]).
//! Positions are frames of [`WINDOW`] samples since the beginning of the session, less what was cleared of frames that were not whole.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use flow_speakers::silero::{SAMPLE_RATE, SileroStream, SileroVad, WINDOW};
use flow_transcription::boosted::Boosted;
use flow_transcription::recognizer::listen::HeardNext;
use flow_transcription::recognizer::{Heard, speech_of_window};
use flow_transcription::segments::ends_sentence;
use flow_transcription::text_style::TextStyle;
use flow_transcription::tokens::Token;
use flow_transcription::{Segment, Word};

use super::agreement::Agreement;
use super::session_event::{DecodeRequest, ItemTranscript, Requested, SessionEvent, SpokenPart};
use super::settings::{LiveSettings, ServerVad};
use super::speakers::WordSpeakers;
use crate::engine::EngineError;

/// Seconds of a frame.
const FRAME: f64 = WINDOW as f64 / SAMPLE_RATE as f64;
/// Frames of speech that begin a turn: a click is none.
const LEAST_SPEECH: u64 = 3;
/// What of the silence after speech belongs to it, in frames: 0.1 s.
const PADDING: u64 = 3;
/// Silence in which a window ends before speech goes on, in frames, if `min_pause` is not longer: 0.2 s. What comes next then has
/// as much of it as the window.
const CERTAIN_PAUSE: u64 = 2 * PADDING;
/// The least silence between two sentences at which a window is cut, in seconds: two frames of the encoder.
const SENTENCE_PAUSE: f64 = 0.16;
/// Shorter windows are filled up with silence before they are decoded, in samples: 0.25 s.
const LEAST_DECODED: usize = 4_000;

/// What is known of an item before it is complete.
#[derive(Default)]
struct Item {
    transcript: ItemTranscript,
    failure: Option<EngineError>,
    /// Which sample of the session its first part begins with, where it is heard as it is spoken.
    start: Option<u64>,
}

/// A turn that goes on. Its window begins with the first frame that is kept.
struct Turn {
    item: u64,
    /// Number of the window.
    window: u64,
    agreement: Agreement,
    /// Of the last decode of the window.
    languages: Vec<String>,
    /// Where the silence begins in which the turn may end.
    silence: Option<u64>,
    /// Whether there is speech in the window; without turn detection, nobody asks.
    has_speech: bool,
    /// Up to where the window was decoded, or is being decoded.
    decoded: u64,
}

/// A window that grows no more.
struct FinalWindow {
    item: u64,
    /// Which sample of the session the first one is.
    start: u64,
    samples: Vec<f32>,
    /// Its speech, in seconds from its beginning.
    speech: Vec<Range<f64>>,
    agreement: Agreement,
    /// Words after this window were decided, so all of its own are; or it is silent.
    all_decided: bool,
    ends_item: bool,
    /// None: it is a window.
    spoken: Option<SpokenPart>,
}

enum Running {
    Partial { window: u64 },
    Final(FinalWindow),
}

/// The buffer holds nothing that could be committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmptyBuffer;

/// The state of a live transcription.
pub struct Session {
    vad: SileroStream<'static>,
    /// None: turns end where the client says so.
    turn_detection: Option<ServerVad>,
    /// Frames of new audio from one decode of a window to the next, of the longest window, and of a pause that ends a window.
    interval: u64,
    longest: u64,
    pause: u64,
    /// Seconds that are subtracted from the times of words.
    delay: f64,
    /// How numbers and fillers are written in the end.
    style: TextStyle,
    requested: Requested,
    /// Frames of a part of a turn, with a model that hears what is spoken.
    part: Option<u64>,
    /// Most samples of windows that wait.
    most_waiting: usize,
    /// Samples from frame `first` on, and how likely each whole frame of them is to hold speech.
    samples: Vec<f32>,
    probabilities: Vec<f32>,
    first: u64,
    /// Samples that were cleared before they were a whole frame.
    cleared: u64,
    /// Frames of speech before a turn begins.
    voiced: u64,
    turn: Option<Turn>,
    waiting: VecDeque<FinalWindow>,
    running: Option<Running>,
    items: BTreeMap<u64, Item>,
    next_item: u64,
    next_window: u64,
    /// None: nobody asks who speaks.
    speakers: Option<WordSpeakers>,
    events: Vec<SessionEvent>,
}

impl Session {
    pub fn new(network: &'static SileroVad, settings: &LiveSettings, turn_detection: Option<ServerVad>) -> Self {
        let frames = |seconds: f64| (seconds / FRAME).round() as u64;
        Session {
            vad: network.stream(),
            turn_detection,
            interval: frames(settings.decode_interval).max(1),
            longest: ((settings.max_window / FRAME) as u64).max(4),
            pause: frames(settings.min_pause).max(1),
            delay: settings.delay,
            style: TextStyle::default(),
            requested: Requested::default(),
            part: None,
            most_waiting: (settings.max_buffer * f64::from(SAMPLE_RATE)) as usize,
            samples: Vec::new(),
            probabilities: Vec::new(),
            first: 0,
            cleared: 0,
            voiced: 0,
            turn: None,
            waiting: VecDeque::new(),
            running: None,
            items: BTreeMap::new(),
            next_item: 0,
            next_window: 0,
            speakers: None,
            events: Vec::new(),
        }
    }

    /// Says who speaks from here on, or not. Before the first samples alone: times are those since the beginning.
    pub fn set_speakers(&mut self, speakers: Option<WordSpeakers>) {
        debug_assert!(!self.has_begun());
        self.speakers = speakers;
    }

    /// How numbers and fillers are written from here on: in what is completed, and in segments. Words that are said before are as they
    /// were heard.
    pub fn set_style(&mut self, style: TextStyle) {
        self.style = style;
    }

    pub fn set_requested(&mut self, requested: Requested) {
        self.requested = requested;
    }

    /// Other models: one that hears what is spoken with this latency in seconds, or one that hears windows. A turn that goes on
    /// ends here where they hear in another way.
    pub fn set_latency(&mut self, latency: Option<f64>) {
        let part = latency.map(|seconds| ((seconds / FRAME) as u64).max(1));
        if part != self.part && self.turn.is_some() {
            self.end_turn(self.now());
        }
        self.part = part;
    }

    /// Whether samples came.
    pub fn has_begun(&self) -> bool {
        self.sample_of(self.first) > 0 || !self.samples.is_empty()
    }

    /// The words that wait for their speakers, and the samples that wait to be heard, where somebody asks who speaks.
    pub fn speakers(&mut self) -> Option<&mut WordSpeakers> {
        self.speakers.as_mut()
    }

    /// Takes samples (mono, 16 kHz, in [-1, 1]).
    ///
    /// # Errors
    /// If one is not a number, or far too large: nothing is taken.
    pub fn feed(&mut self, samples: &[f32]) -> flow_speakers::error::Result<()> {
        let mut probabilities = Vec::new();
        self.vad.feed(samples, &mut probabilities)?;
        if let Some(speakers) = &mut self.speakers {
            speakers.feed(samples);
        }
        self.samples.extend_from_slice(samples);
        for probability in probabilities {
            self.take_frame(probability);
        }
        Ok(())
    }

    /// Ends the turn here. A last frame that is incomplete is filled up with silence. Who spoke up to here is decided without
    /// waiting for more, whether there is a turn or not.
    ///
    /// # Errors
    /// If there is no turn: nothing came since the last one, or nothing that is speech.
    pub fn commit(&mut self) -> Result<(), EmptyBuffer> {
        let committed = self.commit_turn();
        if let Some(speakers) = &mut self.speakers {
            speakers.settle();
        }
        committed
    }

    fn commit_turn(&mut self) -> Result<(), EmptyBuffer> {
        let rest = self.rest();
        if self.turn.is_none() && (self.turn_detection.is_some() || rest == 0) {
            return Err(EmptyBuffer);
        }
        if rest > 0 {
            // Zeros are numbers of the right size.
            let filled = self.feed(&[0.0; WINDOW][rest..]);
            debug_assert!(filled.is_ok());
        }
        self.end_turn(self.now());
        Ok(())
    }

    /// Forgets the audio that was not committed, and the item that it would have been.
    pub fn clear(&mut self) {
        if let Some(turn) = self.turn.take() {
            self.items.remove(&turn.item);
            if let Some(speakers) = &mut self.speakers {
                speakers.remove(turn.item);
            }
            self.waiting.retain(|window| window.item != turn.item);
        }
        self.drop_before(self.now());
        let rest = self.rest();
        if rest > 0 {
            // The network hears silence instead of the rest of the frame, of which nothing is kept.
            let filled = self.vad.feed(&[0.0; WINDOW][rest..], &mut Vec::new());
            debug_assert!(filled.is_ok());
            self.samples.clear();
            self.cleared += rest as u64;
        }
        self.voiced = 0;
    }

    /// Other rules for turns. A turn that goes on ends here if it was to be ended by the client and is not any more, or the
    /// other way round.
    pub fn set_turn_detection(&mut self, turn_detection: Option<ServerVad>) {
        if self.turn_detection.is_some() != turn_detection.is_some() {
            if self.turn.is_some() {
                self.end_turn(self.now());
            }
            self.drop_before(self.now());
            self.voiced = 0;
        }
        self.turn_detection = turn_detection;
    }

    /// Whether as much audio waits to be decoded, or for who speaks, as may: no more should be fed before some of it was.
    pub fn is_full(&self) -> bool {
        let waiting: usize = self.waiting.iter().map(|window| window.samples.len()).sum();
        let unheard = self.speakers.as_ref().map_or(0, WordSpeakers::waiting);
        waiting.max(unheard) >= self.most_waiting
    }

    /// What the session has to say since it was asked last.
    pub fn take_events(&mut self) -> Vec<SessionEvent> {
        if let Some(speakers) = &mut self.speakers {
            for (item, segment) in speakers.take_segments() {
                let styled = self.style.apply(vec![segment]).into_iter();
                self.events
                    .extend(styled.map(|segment| SessionEvent::Segment { item, segment }));
            }
        }
        std::mem::take(&mut self.events)
    }

    /// The window to be decoded now, if there is one. There is none before [`Session::heard`] was told of the one before. No
    /// window of an item that has failed is decoded.
    pub fn next_decode(&mut self) -> Option<DecodeRequest> {
        if self.running.is_some() {
            return None;
        }
        while let Some(mut window) = self.waiting.pop_front() {
            let is_lost = self.items.get(&window.item).is_none_or(|item| item.failure.is_some());
            let ends_turn = window.spoken.is_some_and(|part| part.ends && !part.begins);
            let is_empty = window.samples.is_empty() && !ends_turn;
            if window.all_decided || is_empty || is_lost {
                self.close(&window);
                continue;
            }
            let samples = std::mem::take(&mut window.samples);
            let speech = std::mem::take(&mut window.speech);
            let (start, spoken) = (window.start, window.spoken);
            self.running = Some(Running::Final(window));
            return Some(match spoken {
                None => request((samples, speech), start, true),
                Some(_) => DecodeRequest {
                    samples,
                    start,
                    speech: Vec::new(),
                    is_final: true,
                    spoken,
                },
            });
        }
        if self.part.is_some() {
            return None;
        }
        let (now, first, start) = (self.now(), self.first, self.sample_of(self.first));
        let turn = self.turn.as_mut()?;
        if self.items.get(&turn.item).is_none_or(|item| item.failure.is_some()) {
            return None;
        }
        let end = turn.silence.map_or(now, |from| (from + PADDING).clamp(first, now));
        if end < turn.decoded + self.interval {
            return None;
        }
        turn.decoded = end;
        self.running = Some(Running::Partial { window: turn.window });
        let samples = self.samples[..(end - first) as usize * WINDOW].to_vec();
        let speech = self.speech((end - first) as usize);
        Some(request((samples, speech), start, false))
    }

    /// What was heard in the window that [`Session::next_decode`] gave last. A window that still grows and could not be decoded
    /// is decoded again; an item of which another one could not be has failed.
    pub fn heard(&mut self, heard: Result<Heard, EngineError>) {
        match (self.running.take(), heard) {
            (Some(Running::Partial { window }), Ok(heard)) => {
                let start = self.sample_of(self.first);
                let Some(turn) = self.turn.as_mut().filter(|turn| turn.window == window) else {
                    return;
                };
                let item = turn.item;
                turn.languages = heard.languages;
                let decided = turn.agreement.update(&heard.words).to_vec();
                let partial = text(turn.agreement.undecided());
                let tokens = decided_tokens(heard.tokens, decided.len(), turn.agreement.undecided().len());
                self.say(item, decided, tokens, start);
                self.events.push(SessionEvent::Partial { item, text: partial });
                self.cut_between_sentences();
            }
            (Some(Running::Final(mut window)), Ok(heard)) => {
                let decided = window.agreement.finish(&heard.words).to_vec();
                let tokens = decided_tokens(heard.tokens, decided.len(), 0);
                let of_item = self.items.get(&window.item).and_then(|item| item.start);
                let start = of_item.filter(|_| window.spoken.is_some()).unwrap_or(window.start);
                self.say(window.item, decided, tokens, start);
                self.add_languages(window.item, heard.languages);
                self.close(&window);
            }
            (Some(Running::Final(window)), Err(error)) => {
                if let Some(item) = self.items.get_mut(&window.item) {
                    item.failure.get_or_insert(error);
                }
                self.close(&window);
            }
            (Some(Running::Partial { .. }), Err(_)) | (None, _) => {}
        }
    }

    /// The same of a part of a turn that is heard as it is spoken.
    pub fn heard_next(&mut self, next: Result<HeardNext, EngineError>) {
        let item = match &self.running {
            Some(Running::Final(window)) => Some(window.item),
            _ => None,
        };
        let (heard, partial) = match next {
            Ok(HeardNext { heard, partial }) => (Ok(heard), text(&partial)),
            Err(error) => (Err(error), String::new()),
        };
        self.heard(heard);
        let Some(item) = item else { return };
        if self.items.get(&item).is_some_and(|item| item.failure.is_none()) {
            self.events.push(SessionEvent::Partial { item, text: partial });
        }
    }

    /// The frame after the last whole one.
    fn now(&self) -> u64 {
        self.first + self.probabilities.len() as u64
    }

    /// Samples after the last whole frame.
    fn rest(&self) -> usize {
        self.samples.len() - self.probabilities.len() * WINDOW
    }

    /// With which sample of the session a frame begins.
    fn sample_of(&self, frame: u64) -> u64 {
        frame * WINDOW as u64 + self.cleared
    }

    fn take_frame(&mut self, probability: f32) {
        self.probabilities.push(probability);
        let (now, probability) = (self.now(), f64::from(probability));
        let rules = self.turn_detection.unwrap_or_default();
        let (is_speech, is_silence) = (
            probability >= rules.threshold,
            probability < rules.threshold_of_silence(),
        );
        if self.turn.is_none() {
            if self.turn_detection.is_some() {
                self.listen(&rules, is_speech, is_silence);
                return;
            }
            self.begin_turn();
        }
        let Some(turn) = &mut self.turn else { return };
        let pause = match (is_speech, is_silence) {
            // Speech goes on: the pause belongs to both sides.
            (true, _) => {
                let from = turn.silence.take().filter(|from| now - 1 - from >= self.pause);
                from.map(|from| from + (now - from) / 2)
            }
            (_, true) => {
                let from = *turn.silence.get_or_insert(now - 1);
                (now - from == CERTAIN_PAUSE.max(self.pause)).then_some(from + PADDING)
            }
            _ => None,
        };
        let had_speech = turn.has_speech;
        turn.has_speech |= is_speech;
        let (item, silence) = (turn.item, turn.silence);
        // What a client commits is heard as a whole.
        let ends_at_pauses = had_speech && self.turn_detection.is_some();
        let at = pause.filter(|at| ends_at_pauses && self.part.is_none() && *at > self.first);
        if let Some(at) = at {
            self.cut(at);
        }
        match silence {
            Some(from)
                if self.turn_detection.is_some() && now - from >= frames_of(rules.silence_duration_ms).max(1) =>
            {
                let end = (from + PADDING).clamp(self.first, now);
                self.events.push(SessionEvent::SpeechStopped {
                    item,
                    at: seconds(self.sample_of(end)),
                });
                self.end_turn(end);
            }
            _ if self.part.is_some_and(|part| now - self.first >= part) => self.cut(now),
            _ if self.part.is_none() && now - self.first >= self.longest => {
                let cut = self.first + best_cut(&self.probabilities, rules.threshold);
                self.cut(cut);
            }
            _ => {}
        }
    }

    /// Takes a frame outside of turns: begins one when there was enough speech, with the silence before it.
    fn listen(&mut self, rules: &ServerVad, is_speech: bool, is_silence: bool) {
        if is_silence {
            self.voiced = 0;
        } else if is_speech || self.voiced > 0 {
            self.voiced += 1;
        }
        // The window with which a turn begins has room for more than what was before it.
        let (now, padding) = (self.now(), frames_of(rules.prefix_padding_ms).min(self.longest / 2));
        if self.voiced >= LEAST_SPEECH {
            self.drop_before((now - self.voiced).saturating_sub(padding));
            let item = self.begin_turn();
            let at = seconds(self.sample_of(self.first));
            self.events.push(SessionEvent::SpeechStarted { item, at });
        } else {
            self.drop_before(now.saturating_sub(padding + LEAST_SPEECH));
        }
    }

    fn begin_turn(&mut self) -> u64 {
        let item = self.next_item;
        self.next_item += 1;
        self.next_window += 1;
        self.items.insert(item, Item::default());
        self.turn = Some(Turn {
            item,
            window: self.next_window,
            agreement: Agreement::default(),
            languages: Vec::new(),
            silence: None,
            // With turn detection, speech begins it.
            has_speech: true,
            decoded: self.first,
        });
        self.voiced = 0;
        item
    }

    /// Ends the turn at a frame: its last window waits to be decoded.
    fn end_turn(&mut self, end: u64) {
        let Some(turn) = self.turn.take() else { return };
        self.events.push(SessionEvent::Committed { item: turn.item });
        let all_decided = !turn.has_speech && self.part.is_none();
        self.wait(turn.item, end, turn.agreement, all_decided, true);
    }

    /// Cuts the window of the turn at a frame: what is before it waits to be decoded, what is after it is the next window. Decided
    /// words after the cut are said already, and so those before it are all there.
    fn cut(&mut self, at: u64) {
        let Some(mut turn) = self.turn.take() else { return };
        let before = turn.agreement.split_off_before((at - self.first) as f64 * FRAME);
        let is_window = self.part.is_none();
        let all_decided = is_window && (!turn.has_speech || !turn.agreement.decided().is_empty());
        let languages = std::mem::take(&mut turn.languages);
        if all_decided {
            // It is not decoded again.
            self.add_languages(turn.item, languages);
        }
        self.wait(turn.item, at, before, all_decided, false);
        self.next_window += 1;
        let threshold = self.turn_detection.unwrap_or_default().threshold;
        let is_speech = |probability: &f32| f64::from(*probability) >= threshold;
        self.turn = Some(Turn {
            window: self.next_window,
            decoded: at,
            has_speech: self.turn_detection.is_none() || self.probabilities.iter().any(is_speech),
            ..turn
        });
    }

    /// Lets what is kept up to a frame wait, as the next window of an item.
    fn wait(&mut self, item: u64, end: u64, agreement: Agreement, all_decided: bool, ends_item: bool) {
        let (start, frames) = (self.sample_of(self.first), end - self.first);
        let samples = self.samples[..frames as usize * WINDOW].to_vec();
        let speech = self.speech(frames as usize);
        self.drop_before(end);
        let mut spoken = None;
        if let Some(item) = self.items.get_mut(&item) {
            item.transcript.seconds += frames as f64 * FRAME;
            if self.part.is_some() {
                let begins = item.start.is_none();
                item.start.get_or_insert(start);
                spoken = Some(SpokenPart {
                    begins,
                    ends: ends_item,
                });
            }
        }
        self.waiting.push_back(FinalWindow {
            item,
            start,
            samples,
            speech,
            agreement,
            all_decided,
            ends_item,
            spoken,
        });
    }

    /// The speech of the first frames that are kept, in seconds from their beginning.
    fn speech(&self, frames: usize) -> Vec<Range<f64>> {
        let threshold = self.turn_detection.unwrap_or_default().threshold;
        let found = speech_of_window(&self.probabilities[..frames], threshold);
        // A threshold that is none was refused before.
        found.unwrap_or_else(|_| std::iter::once(0.0..f64::INFINITY).collect())
    }

    /// Cuts a window that is long at the last end of a sentence that is decided: what comes after it is decoded in less time.
    fn cut_between_sentences(&mut self) {
        let Some(turn) = &self.turn else { return };
        let (decided, undecided) = (turn.agreement.decided(), turn.agreement.undecided());
        if self.now() - self.first <= self.longest / 2 {
            return;
        }
        let nexts = decided.iter().chain(undecided).skip(1);
        let pauses = decided.iter().zip(nexts).filter_map(|(word, next)| {
            let pauses = ends_sentence(&word.word) && next.start - word.end >= SENTENCE_PAUSE;
            pauses.then(|| ((word.end + next.start) / 2.0 / FRAME).round() as u64)
        });
        if let Some(cut) = pauses.last()
            && cut >= self.longest / 4
            && self.first + cut < self.now()
        {
            self.cut(self.first + cut);
        }
    }

    /// Adds words to an item, whose times begin with a sample of the session, and says them.
    fn say(&mut self, number: u64, words: Vec<Word>, tokens: Vec<Vec<Token>>, sample: u64) {
        let Some(item) = self.items.get_mut(&number) else {
            return;
        };
        let (offset, transcript) = (seconds(sample), &mut item.transcript);
        let (before, words_before) = (transcript.text.len(), transcript.words.len());
        for word in words {
            if !transcript.text.is_empty() {
                transcript.text.push(' ');
            }
            transcript.text.push_str(word.word.trim());
            let last = transcript.words.last().map_or(0.0, |word| word.start);
            // Times are not before the session, nor in another order.
            let start = (offset + word.start - self.delay).max(last);
            transcript.words.push(Word {
                start,
                end: (offset + word.end - self.delay).max(start),
                ..word
            });
        }
        if let Some(speakers) = &mut self.speakers {
            speakers.add(number, &transcript.words[words_before..]);
        }
        if transcript.text.len() > before {
            let text = transcript.text[before..].to_owned();
            transcript.tokens.extend_from_slice(&tokens);
            self.events.push(SessionEvent::Delta {
                item: number,
                text,
                tokens,
                first: before == 0,
            });
        }
    }

    fn add_languages(&mut self, item: u64, languages: Vec<String>) {
        let Some(item) = self.items.get_mut(&item) else { return };
        for language in languages {
            if !item.transcript.languages.contains(&language) {
                item.transcript.languages.push(language);
            }
        }
    }

    /// After a window was decoded, or need not be: completes its item if it was the last one.
    fn close(&mut self, window: &FinalWindow) {
        if !window.ends_item {
            return;
        }
        let Some(Item {
            mut transcript,
            failure,
            ..
        }) = self.items.remove(&window.item)
        else {
            return;
        };
        let item = window.item;
        if let Some(speakers) = &mut self.speakers {
            speakers.complete(item);
        }
        transcript.boosted = self.boosted(&transcript);
        transcript.warnings.clone_from(&self.requested.warnings);
        self.styled(&mut transcript);
        self.events.push(match failure {
            None => SessionEvent::Completed { item, transcript },
            Some(error) => SessionEvent::Failed { item, error },
        });
    }

    /// What phrases did in an item, with times since the beginning of the session.
    fn boosted(&self, transcript: &ItemTranscript) -> Option<Boosted> {
        let phrases = self.requested.phrases.as_ref()?;
        let heard = Heard {
            words: transcript.words.clone(),
            tokens: transcript.tokens.clone(),
            ..Heard::default()
        };
        Some(phrases.written(std::slice::from_ref(&(0..0)), &[heard], 0.0))
    }

    /// Writes the words of an item in the style of the session: as a segment without pauses.
    fn styled(&self, transcript: &mut ItemTranscript) {
        if transcript.words.is_empty() {
            return;
        }
        let segment = Segment {
            words: std::mem::take(&mut transcript.words),
            text: std::mem::take(&mut transcript.text),
            ..Segment::default()
        };
        let tokens = std::mem::take(&mut transcript.tokens);
        let (segments, tokens) = self.style.apply_with_tokens(vec![segment], tokens);
        transcript.tokens = tokens;
        if let Some(Segment { text, words, .. }) = segments.into_iter().next() {
            (transcript.text, transcript.words) = (text, words);
        }
    }

    fn drop_before(&mut self, frame: u64) {
        let count = frame.saturating_sub(self.first).min(self.probabilities.len() as u64);
        self.samples.drain(..count as usize * WINDOW);
        self.probabilities.drain(..count as usize);
        self.first += count;
    }
}

fn request((mut samples, speech): (Vec<f32>, Vec<Range<f64>>), start: u64, is_final: bool) -> DecodeRequest {
    samples.resize(samples.len().max(LEAST_DECODED), 0.0);
    DecodeRequest {
        samples,
        start,
        speech,
        is_final,
        spoken: None,
    }
}

/// The tokens of the words that became decided: `undecided` others of their decode come after them.
fn decided_tokens(mut tokens: Vec<Vec<Token>>, decided: usize, undecided: usize) -> Vec<Vec<Token>> {
    tokens.truncate(tokens.len().saturating_sub(undecided));
    tokens.split_off(tokens.len().saturating_sub(decided))
}

/// When a sample of the session is.
fn seconds(sample: u64) -> f64 {
    sample as f64 / f64::from(SAMPLE_RATE)
}

fn text(words: &[Word]) -> String {
    let texts: Vec<&str> = words.iter().map(|word| word.word.trim()).collect();
    texts.join(" ")
}

fn frames_of(milliseconds: f64) -> u64 {
    (milliseconds / 1000.0 / FRAME).round() as u64
}

/// The frame before which a window of this many frames is cut: the middle of the longest pause in its second half, the last of equal
/// ones, or else the frame that is least likely to hold speech. At least 1.
fn best_cut(probabilities: &[f32], threshold: f64) -> u64 {
    let half = probabilities.len() / 2;
    let is_pause = |probability: f32| f64::from(probability) < threshold;
    let mut longest = 0..0;
    let mut at = half;
    for run in probabilities[half..].chunk_by(|a, b| is_pause(*a) == is_pause(*b)) {
        if is_pause(run[0]) && run.len() >= longest.len() {
            longest = at..at + run.len();
        }
        at += run.len();
    }
    let cut = if longest.is_empty() {
        let frames = half..probabilities.len();
        let quietest = frames.min_by(|a, b| probabilities[*a].total_cmp(&probabilities[*b]).then(b.cmp(a)));
        quietest.unwrap_or(half)
    } else {
        longest.start + longest.len().div_ceil(2)
    };
    cut.max(1) as u64
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
