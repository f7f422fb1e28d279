//! From the samples of a recording to its segments: voice activity, windows, decoding, words.

mod aligned;
#[cfg(test)]
mod languages_tests;
pub mod listen;
#[cfg(test)]
mod phrases_tests;
mod recover;
mod split;
mod spoken_speech;
mod stateful;
#[cfg(test)]
mod times_tests;
mod together;
mod windows_of_speech;

use std::borrow::Cow;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device};
use flow_kernels::is_gpu;
use flow_kernels::threads::install;
use flow_model::Precision;
use flow_model::checkpoint::OpenModel;
use flow_model::confidence::{Aggregation, ConfidenceMethod, word_confidences};
use flow_model::decoding::{DecodingOptions, DecodingSettings, Hypothesis, TokenObserver};
use flow_model::encoder::cached::ChunkPlan;
use flow_model::heads::HeadKind;
use flow_model::model::TdtModel;
use flow_model::tokenizer::Tokenizer;
use flow_speakers::silero::{SAMPLE_RATE, SileroVad};
use flow_text::language_tag::{is_language, split_tag};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use self::split::{more_confident, pause};
pub use self::windows_of_speech::{SpeechWindows, speech_of_window};
use crate::activity::Activity;
pub use crate::activity::ActivityPart;
use crate::boosted::{Boosted, PhraseIndex};
use crate::calibration::Calibration;
use crate::coverage::{Coverage, CoverageSettings, REACH, coverage, later};
use crate::decoding_request::DecodingRequest;
use crate::language_prior::LanguageCounts;
use crate::long_audio::LongAudio;
use crate::segments::{SegmentRules, segments};
use crate::streamed::Samples;
use crate::suspects::Suspect;
use crate::tokens::{Token, TokenScore, tokens_of_word};
use crate::window_groups::{GROUP_SAMPLES, group_by_group};
use crate::windows::join_words_of_turns;
use crate::{Result, Segment, TranscriptionError, Word};

/// The method of voice activity detection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum VoiceActivity {
    /// None: everything is decoded, in windows of `max_window`.
    Off,
    /// By the energy of the signal.
    Energy,
    /// By silero-vad's network.
    #[default]
    Neural,
}

/// Settings of the recognizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecognitionSettings {
    /// The processing mode. Voice activity, windows, pauses and batches apply to [`LongAudio::Vad`].
    pub long_audio: LongAudio,
    pub voice_activity: VoiceActivity,
    /// The longest window, in seconds.
    pub max_window: f64,
    /// A pause as long as this ends a window, in seconds.
    pub min_pause: f64,
    /// Most seconds of audio, padding included, in the model at once.
    pub batch_seconds: f64,
    pub segments: SegmentRules,
    /// Seconds that are subtracted from the times of words: how late the model emits tokens. At most 1.
    pub delay: f64,
    /// What is done about speech without words, with [`LongAudio::Vad`] and voice activity.
    pub coverage: CoverageSettings,
}

impl RecognitionSettings {
    /// Checks the ranges of values, except those of [`LongAudio`], which are checked elsewhere.
    ///
    /// # Errors
    /// The name of the setting that is out of range, its value, and its range.
    pub fn check(&self) -> std::result::Result<(), (&'static str, f64, &'static str)> {
        if !(1.0..=3600.0).contains(&self.max_window) {
            return Err(("max_window", self.max_window, "from 1 to 3600 seconds"));
        }
        if !(0.0..=self.max_window).contains(&self.min_pause) {
            return Err(("min_pause", self.min_pause, "from 0 to `max_window` seconds"));
        }
        if !(0.0..=1.0).contains(&self.delay) {
            return Err(("delay", self.delay, "from 0 to 1 second"));
        }
        for (setting, value) in [
            ("batch_seconds", self.batch_seconds),
            ("max_gap", self.segments.max_gap),
            ("max_segment", self.segments.max_duration),
        ] {
            if !(value > 0.0 && value.is_finite()) {
                return Err((setting, value, "a number of seconds above 0"));
            }
        }
        Ok(())
    }
}

/// The result of recognition of a recording.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recognized {
    pub segments: Vec<Segment>,
    /// Of language tags, in the order in which they first came.
    pub languages: Vec<String>,
    /// How many windows were decoded, and how long they are together, in seconds.
    pub windows: usize,
    pub decoded_seconds: f64,
    /// How much of the speech has words, where that was asked for and voice activity looked for speech.
    pub coverage: Option<Coverage>,
    /// What boosted phrases did, where there were any.
    pub boosted: Option<Boosted>,
}

impl Recognized {
    /// With times of words and segments `delay` seconds earlier, but not before the beginning.
    fn earlier(mut self, delay: f64) -> Self {
        if delay > 0.0 {
            let shift = |time: &mut f64| *time = (*time - delay).max(0.0);
            for segment in &mut self.segments {
                shift(&mut segment.start);
                shift(&mut segment.end);
                for word in &mut segment.words {
                    *word = std::mem::take(word).earlier(delay);
                }
            }
        }
        self
    }
}

/// A model that transcribes.
pub struct Recognizer {
    model: TdtModel,
    tokenizer: Tokenizer,
    voice_activity: &'static SileroVad,
    confidence: ConfidenceMethod,
    /// Counts of pieces by language, and the weight of what follows from them.
    language_counts: Option<(LanguageCounts, f64)>,
    /// What confidences become in the end.
    calibration: Option<Calibration>,
    /// Name of the model's file or folder.
    pub name: String,
    /// BLAKE3 of its files, in hexadecimal digits.
    pub digest: String,
    /// A device other than the CPU is used by one thread at a time.
    turn: Mutex<()>,
    /// What listeners in a context have in common, of each context that was asked for.
    plans: Mutex<Vec<Arc<ChunkPlan>>>,
    /// The last requests, and how they are decoded.
    requested: Mutex<Vec<(DecodingRequest, Arc<RequestedDecoding>)>>,
    /// The phrases that are boosted where a request says nothing.
    phrases: Option<PhraseIndex>,
}

/// Requests whose decoding is kept.
const MOST_REQUESTED: usize = 16;

/// How a model is decoded for a request.
#[derive(Debug)]
pub struct RequestedDecoding {
    pub settings: Arc<DecodingSettings>,
    /// The phrases that are boosted, if there are any.
    pub phrases: Option<PhraseIndex>,
    /// What of the request has no effect.
    pub notes: Vec<String>,
}

impl Recognizer {
    /// Loads a model (a `.nemo` archive, a model folder, a Hugging Face folder), its matrices stored as `weights`.
    ///
    /// # Errors
    /// If it cannot be read, has no tokenizer, or has another sample rate than 16 kHz.
    pub fn load(path: &Path, weights: DType, device: &Device) -> Result<Self> {
        Self::load_in(path, weights, Precision::F32, device)
    }

    /// The same with products of a precision.
    ///
    /// # Errors
    /// As [`Recognizer::load`], and if low precision is asked for with other weights than f32 or on a device.
    pub fn load_in(path: &Path, weights: DType, precision: Precision, device: &Device) -> Result<Self> {
        let model = TdtModel::load_for_decoding(path, weights, precision, device)?;
        let shown = path.display();
        let Some(tokenizer) = &model.tokenizer else {
            let why = format!("{shown} holds no tokenizer: flow model convert {shown} OUT.nemo --tokenizer FILE.model");
            return Err(TranscriptionError::setting("model", why));
        };
        let rate = model.config.preprocessor.sample_rate;
        if rate != SAMPLE_RATE as usize {
            let why = format!("{shown} hears {rate} samples a second; {SAMPLE_RATE} are known here");
            return Err(TranscriptionError::setting("model", why));
        }
        let digest = digest(path)?;
        Ok(Self {
            calibration: Calibration::of_model(path, &digest)?,
            tokenizer: Tokenizer::from_bytes(tokenizer.bytes())?,
            voice_activity: SileroVad::shared().map_err(|error| TranscriptionError::Input(error.to_string()))?,
            confidence: ConfidenceMethod::default(),
            language_counts: None,
            name: path
                .file_name()
                .unwrap_or(path.as_os_str())
                .to_string_lossy()
                .into_owned(),
            digest,
            model,
            turn: Mutex::new(()),
            plans: Mutex::new(Vec::new()),
            requested: Mutex::default(),
            phrases: None,
        })
    }

    /// How it is decoded where a request says nothing.
    pub fn decoding(&self) -> &DecodingSettings {
        &self.model.decoding
    }

    /// What a user has to know of the files of its decoding settings.
    pub fn notes(&self) -> &[String] {
        &self.model.decoding.notes
    }

    /// The same model with other decoding settings.
    ///
    /// # Errors
    /// If a value is out of its range, a file cannot be read or does not fit the model's tokenizer, or the model cannot be decoded so.
    pub fn with_decoding(mut self, options: &DecodingOptions) -> Result<Self> {
        let settings = options.load(&self.tokenizer)?;
        self.set_decoding(settings)?;
        Ok(self)
    }

    fn set_decoding(&mut self, settings: DecodingSettings) -> Result<()> {
        self.requested = Mutex::default();
        self.phrases = phrases_of(&settings);
        Ok(self.model.set_decoding(settings)?)
    }

    /// The same model with the counts of a file, by which requests for a language make pieces of other languages less probable.
    ///
    /// # Errors
    /// If the file cannot be read or is of another tokenizer.
    pub fn with_language_counts(mut self, path: &Path, weight: f64) -> Result<Self> {
        self.language_counts = Some((LanguageCounts::read(path, &self.tokenizer)?, weight));
        self.requested = Mutex::default();
        Ok(self)
    }

    /// The same model, decoded as a request says. What of it has no effect is in [`Recognizer::notes`].
    ///
    /// # Errors
    /// As [`Recognizer::decoding_for`].
    pub fn with_request(mut self, request: &DecodingRequest) -> Result<Self> {
        let decoding = self.decoding_for(request)?;
        self.set_decoding((*decoding.settings).clone())?;
        self.model.decoding.notes.extend(decoding.notes.iter().cloned());
        Ok(self)
    }

    /// How the model is decoded for a request.
    ///
    /// # Errors
    /// If the request is out of its bounds.
    pub fn decoding_for(&self, request: &DecodingRequest) -> Result<Arc<RequestedDecoding>> {
        let known = || self.requested.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, decoding)) = known().iter().find(|(of, _)| of == request) {
            return Ok(Arc::clone(decoding));
        }
        let counts = self.language_counts.as_ref().map(|(counts, weight)| (counts, *weight));
        // A cache-aware model may be decoded as it hears.
        let takes_phrases = !(self.decodes_ctc() && self.model.config.is_cache_aware());
        let (mut settings, mut notes) =
            request.applied(&self.model.decoding, &self.tokenizer, counts, takes_phrases)?;
        if let (Some(_), [language]) = (&self.model.config.prompt, &request.languages[..]) {
            match self.model.prompt_of(Some(language)) {
                Ok(prompt) => settings.prompt = prompt,
                Err(why) => notes.push(why.to_string()),
            }
        }
        let decoding = Arc::new(RequestedDecoding {
            phrases: phrases_of(&settings),
            settings: Arc::new(settings),
            notes,
        });
        let mut requested = known();
        requested.truncate(MOST_REQUESTED - 1);
        requested.insert(0, (request.clone(), Arc::clone(&decoding)));
        Ok(decoding)
    }

    /// Whether a CTC head decodes.
    fn decodes_ctc(&self) -> bool {
        self.model.config.transducer.is_none() || self.model.decoding.head == Some(HeadKind::Ctc)
    }

    /// The languages that its vocabulary has tags of, sorted.
    pub fn languages(&self) -> Vec<String> {
        languages(&self.tokenizer)
    }

    /// Transcribes samples (mono, 16 kHz, in [-1, 1]). None if `cancelled` returned true between two batches.
    ///
    /// The result depends only on the samples and the settings, not on other recordings transcribed at the same time or
    /// on the number of threads. (It does not depend on `batch_seconds` where an element of a matrix product does not
    /// depend on the other rows: on CPUs with AVX2.)
    ///
    /// # Errors
    /// If a sample is not a number, a setting is out of its range, or the model fails.
    pub fn transcribe(
        &self,
        samples: &[f32],
        settings: &RecognitionSettings,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Recognized>> {
        let mut first = self.first_pass(settings);
        first.feed(samples)?;
        self.transcribe_again(first, &samples, settings, cancelled)
    }

    /// Begins a streamed recording: feed its samples to the result, and pass that to [`Recognizer::transcribe_again`].
    pub fn first_pass(&self, settings: &RecognitionSettings) -> FirstPass<'_> {
        let voice_activity = match settings.long_audio {
            LongAudio::Vad => settings.voice_activity,
            // Phrases are boosted where speech is.
            _ if self.model.decoding.fusion.has_phrases() => settings.voice_activity,
            LongAudio::Chunked(_) | LongAudio::Full(_) => VoiceActivity::Off,
        };
        FirstPass {
            activity: Activity::new(voice_activity, self.voice_activity),
            network: self.voice_activity,
            kept: Some(Vec::new()),
        }
    }

    /// [`Recognizer::transcribe`] of a recording whose first pass was done with the same settings. Unless it was short,
    /// its samples are read again (three times for [`LongAudio::Full`]), and at most ten minutes of it, or one window,
    /// are in memory at once.
    ///
    /// # Errors
    /// As [`Recognizer::transcribe`], if the recording cannot be read, and if it has become shorter.
    pub fn transcribe_again(
        &self,
        first: FirstPass<'_>,
        recording: &dyn Samples,
        settings: &RecognitionSettings,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Recognized>> {
        let kept = first.kept.as_deref();
        let recording = kept.as_ref().map_or(recording, |kept| kept as &dyn Samples);
        let rules = (&settings.segments, settings.delay);
        let samples = first.activity.samples();
        let windows = match settings.long_audio == LongAudio::Vad || self.model.decoding.fusion.has_phrases() {
            true => SpeechWindows::of(first.activity, settings)?,
            false => SpeechWindows {
                samples,
                ..SpeechWindows::default()
            },
        };
        let found = match &settings.long_audio {
            LongAudio::Vad => return self.decode_windows(&windows, recording, settings, cancelled),
            LongAudio::Chunked(lengths) => self.transcribe_chunks(recording, &windows, lengths, rules, cancelled),
            LongAudio::Full(full) => self.transcribe_whole(recording, &windows, full, rules, cancelled),
        };
        Ok(found?.map(|found| found.earlier(settings.delay)))
    }

    /// Transcribes windows of a recording.
    fn decode_windows(
        &self,
        windows: &SpeechWindows,
        recording: &dyn Samples,
        settings: &RecognitionSettings,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Recognized>> {
        let mut heard: Vec<Heard> = Vec::with_capacity(windows.windows.len());
        let mut decode = |indices: Range<usize>, signals: &[Vec<f32>]| {
            let signals: Vec<&[f32]> = signals.iter().map(Vec::as_slice).collect();
            let speech: Vec<_> = indices.map(|index| windows.stretches(index)).collect();
            let found = self.decode_covered(&signals, &speech, settings, cancelled)?;
            let wanted = found.is_some();
            heard.extend(found.into_iter().flatten());
            Ok(wanted)
        };
        if !group_by_group(&windows.windows, recording, &mut decode)? {
            return Ok(None);
        }
        recognized(windows, heard, settings, self.phrases.as_ref()).map(Some)
    }

    /// [`Recognizer::decode`] of any number of windows with this speech, those of similar length together. None if `cancelled`
    /// returned true between two batches.
    fn decode_in_batches(
        &self,
        signals: &[&[f32]],
        speech: &[Vec<Range<f64>>],
        batch_seconds: f64,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Heard>>> {
        let mut heard: Vec<Heard> = vec![Heard::default(); signals.len()];
        for batch in batches(signals, batch_seconds) {
            if cancelled() {
                return Ok(None);
            }
            let of_batch: Vec<&[f32]> = batch.iter().map(|&index| signals[index]).collect();
            let speech: Vec<_> = batch.iter().map(|&index| speech[index].clone()).collect();
            let found = self.decode_again_where((&of_batch, &speech), &|_| true, &self.model.decoding)?;
            for (index, found) in batch.into_iter().zip(found) {
                heard[index] = found;
            }
        }
        Ok(Some(heard))
    }

    /// Transcribes windows (mono, 16 kHz, in [-1, 1]), possibly of different recordings: the result of a window does
    /// not depend on the others, where an element of a matrix product does not depend on the other rows (on CPUs with
    /// AVX2).
    ///
    /// A window with a pause of 0.1 s that voice activity did not see is decoded again as two, and those are its result where
    /// their words are more confident: models that were trained on sentences of one language fail on two.
    ///
    /// # Errors
    /// If a sample is not a number, or the model fails.
    pub fn decode(&self, signals: &[&[f32]]) -> Result<Vec<Heard>> {
        self.decode_again_where((signals, &[]), &|_| true, &self.model.decoding)
    }

    /// [`Recognizer::decode`] with these settings, such as those of [`Recognizer::decoding_for`], but only windows for whose index
    /// `again` is true may be decoded again as two: windows that still grow are decoded once. `speech`: the stretches of each window
    /// ([`SpeechWindows::stretches`]), where phrases are boosted; none where it is not known, and phrases are boosted everywhere.
    ///
    /// # Errors
    /// As [`Recognizer::decode`], and if there is the speech of another number of windows.
    pub fn decode_again_where(
        &self,
        (signals, speech): (&[&[f32]], &[Vec<Range<f64>>]),
        again: &dyn Fn(usize) -> bool,
        decoding: &DecodingSettings,
    ) -> Result<Vec<Heard>> {
        let mut heard = self.decode_with((signals, speech), decoding)?;
        let cuts = signals.iter().enumerate().filter_map(|(index, signal)| {
            let worth_it = again(index) && !heard[index].words.is_empty();
            Some((index, worth_it.then(|| pause(signal)).flatten()?))
        });
        let cuts: Vec<(usize, usize)> = cuts.collect();
        if cuts.is_empty() {
            return Ok(heard);
        }
        let (firsts, seconds): (Vec<&[f32]>, Vec<&[f32]>) =
            cuts.iter().map(|&(index, cut)| signals[index].split_at(cut)).unzip();
        // One after the other: padded to the longest of both, they would take up to twice the memory of the windows.
        let after = |cut: usize| cut as f64 / f64::from(SAMPLE_RATE);
        let of_cuts = cuts
            .iter()
            .filter_map(|&(index, cut)| Some((speech.get(index)?, after(cut))));
        let (speech_of_firsts, speech_of_seconds): (Vec<_>, Vec<_>) = of_cuts
            .map(|(speech, after)| (speech.clone(), later(speech, -after)))
            .unzip();
        let firsts = self.decode_with((&firsts, &speech_of_firsts), decoding)?;
        let seconds = self.decode_with((&seconds, &speech_of_seconds), decoding)?;
        let parts = firsts.into_iter().zip(seconds);
        for ((index, cut), (first, second)) in cuts.into_iter().zip(parts) {
            let after = after(cut);
            let whole = std::mem::take(&mut heard[index]);
            heard[index] = more_confident(whole, first, second, after);
        }
        Ok(heard)
    }

    /// One pass of [`Recognizer::decode`] with these settings. With a penalty on blank, scores of tokens are those among tokens alone.
    fn decode_with(
        &self,
        (signals, speech): (&[&[f32]], &[Vec<Range<f64>>]),
        decoding: &DecodingSettings,
    ) -> Result<Vec<Heard>> {
        let decoding = &*self.boosting_in(speech, decoding);
        let with_blank = decoding.blank_penalty == 0.0;
        let (hypotheses, scores) = self.observed(signals.len(), with_blank, |observer| {
            self.computing(|| Ok(self.model.transcribe_with(signals, decoding, Some(observer))?))
        })?;
        let heard = hypotheses
            .iter()
            .zip(&scores)
            .map(|(hypothesis, scores)| self.words(hypothesis, scores));
        heard.collect()
    }

    /// These settings, in which phrases score in the speech of each window (seconds) and up to [`REACH`] seconds before and after it: tokens
    /// come some frames late. Without phrases, or where no speech is given, they are the same.
    fn boosting_in<'a>(&self, speech: &[Vec<Range<f64>>], decoding: &'a DecodingSettings) -> Cow<'a, DecodingSettings> {
        if !decoding.fusion.has_phrases() || speech.is_empty() {
            return Cow::Borrowed(decoding);
        }
        let frame = self.model.frame_seconds();
        // Negative numbers become 0.
        let frames =
            |part: &Range<f64>| ((part.start - REACH) / frame) as usize..((part.end + REACH) / frame).ceil() as usize;
        Cow::Owned(DecodingSettings {
            speech: speech.iter().map(|parts| parts.iter().map(frames).collect()).collect(),
            ..decoding.clone()
        })
    }

    /// Confidences as probabilities, where the model has a calibration: once windows are decoded for good.
    pub fn calibrate(&self, heard: &mut [Heard]) {
        if let Some(calibration) = &self.calibration {
            heard.iter_mut().for_each(|heard| calibration.apply(&mut heard.words));
        }
    }

    /// Runs work on the threads that compute; on a device, one task at a time.
    fn computing<R: Send>(&self, work: impl FnOnce() -> Result<R> + Send) -> Result<R> {
        let _alone =
            is_gpu(self.model.parameters.device()).then(|| self.turn.lock().unwrap_or_else(PoisonError::into_inner));
        install(work)
    }

    /// Decoding of so many utterances by `decode`, and the scores of the tokens of each.
    fn observed<R>(
        &self,
        utterances: usize,
        with_blank: bool,
        decode: impl FnOnce(TokenObserver<'_>) -> Result<R>,
    ) -> Result<(R, Vec<Vec<TokenScore>>)> {
        let mut scores = vec![Vec::new(); utterances];
        let mut failure = None;
        let mut observe = |utterance: usize, token: u32, logits: &[f32]| match TokenScore::new(
            &self.confidence,
            token,
            logits,
            with_blank,
        ) {
            Ok(score) => scores[utterance].push(score),
            Err(error) => failure = Some(error),
        };
        let decoded = decode(&mut observe)?;
        match failure {
            Some(failure) => Err(failure),
            None => Ok((decoded, scores)),
        }
    }

    /// The words of a window, with times from its beginning, and its languages.
    fn words(&self, hypothesis: &Hypothesis, scores: &[TokenScore]) -> Result<Heard> {
        let mut languages = Vec::new();
        let mut text = Hypothesis::default();
        let mut kept: Vec<TokenScore> = Vec::new();
        for (index, &id) in hypothesis.ids.iter().enumerate() {
            if let Some(tag) = self.tokenizer.piece(id).and_then(tag) {
                if is_language(tag) {
                    languages.push(tag.to_owned());
                }
                continue;
            }
            text.ids.push(id);
            text.frames.extend(hypothesis.frames.get(index));
            text.durations.extend(hypothesis.durations.get(index));
            kept.extend(scores.get(index));
        }
        let blanks = hypothesis.blanks.iter();
        let blanks = blanks.map(|blank| (f64::from(blank.frame) * self.model.frame_seconds(), blank.lead));
        let blanks = blanks.collect();
        let stamps = self.model.time_stamps(&text)?;
        let confidences: Vec<f64> = kept.iter().map(|score| score.confidence).collect();
        let confidences = word_confidences(&confidences, &stamps.word_tokens, Aggregation::default())?;
        let stamped = Word::from_stamps(&stamps.words, self.model.frame_seconds());
        let (mut words, mut tokens) = (Vec::new(), Vec::new());
        for ((word, confidence), range) in stamped.into_iter().zip(confidences).zip(stamps.word_tokens) {
            // A lone mark of a space is a word of NeMo's, too.
            if word.word.trim().is_empty() {
                continue;
            }
            let (ids, scores) = (&text.ids[range.clone()], &kept[range]);
            tokens.push(tokens_of_word(&self.tokenizer, ids, scores)?);
            words.push(Word {
                confidence: Some(confidence),
                ..word
            });
        }
        Ok(Heard {
            words,
            tokens,
            languages,
            blanks,
            ..Heard::default()
        })
    }
}

fn phrases_of(settings: &DecodingSettings) -> Option<PhraseIndex> {
    settings
        .fusion
        .has_phrases()
        .then(|| PhraseIndex::of(&settings.boosted))
}

/// Texts in the order in which they first come.
fn unique(texts: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for text in texts {
        if !found.contains(&text) {
            found.push(text);
        }
    }
    found
}

/// The result of recognition of a window.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Heard {
    /// With times from the beginning of the window.
    pub words: Vec<Word>,
    /// The tokens of each word.
    pub tokens: Vec<Vec<Token>>,
    /// Of language tags, in order.
    pub languages: Vec<String>,
    /// How many of the words were found when a stretch without words was decoded again.
    pub recovered: usize,
    /// Frames on which greedy search of a transducer on the CPU chose blank: seconds from the beginning of the window, and how far the
    /// logit of blank was above that of the best token.
    pub blanks: Vec<(f64, f32)>,
    /// Suspect words that were left out, with times from the beginning of the window.
    pub dropped: Vec<Suspect>,
}

/// Joins the results of the windows of a recording. `phrases`: those that were boosted.
///
/// # Errors
/// If there are not as many as windows, if the windows are not in order within the recording, or if a time is not a number.
pub fn recognized(
    windows: &SpeechWindows,
    heard: Vec<Heard>,
    settings: &RecognitionSettings,
    phrases: Option<&PhraseIndex>,
) -> Result<Recognized> {
    let boosted = phrases.map(|phrases| phrases.written(&windows.windows, &heard, settings.delay));
    let covered = (!settings.coverage.is_off() && windows.is_heard).then(|| {
        let speech: Vec<_> = (0..windows.windows.len())
            .map(|index| windows.stretches(index))
            .collect();
        coverage(&windows.windows, &speech, &heard)
    });
    let recognized = joined(&windows.windows, windows.samples, heard, &settings.segments)?;
    Ok(Recognized {
        coverage: covered,
        boosted,
        ..recognized.earlier(settings.delay)
    })
}

/// Joins the results of windows of a recording of this many samples.
///
/// # Errors
/// As [`recognized`].
pub fn joined(windows: &[Range<u64>], samples: u64, heard: Vec<Heard>, rules: &SegmentRules) -> Result<Recognized> {
    let (words, languages): (Vec<_>, Vec<_>) = heard.into_iter().map(|heard| (heard.words, heard.languages)).unzip();
    let words = join_words_of_turns(windows, samples, SAMPLE_RATE, words)?;
    let decoded: u64 = windows.iter().map(|window| window.end - window.start).sum();
    Ok(Recognized {
        segments: segments(words, rules)?,
        languages: unique(languages.into_iter().flatten()),
        windows: windows.len(),
        decoded_seconds: decoded as f64 / f64::from(SAMPLE_RATE),
        coverage: None,
        boosted: None,
    })
}

/// The result of the first pass over a recording.
pub struct FirstPass<'a> {
    activity: Activity<'a>,
    network: &'a SileroVad,
    /// All samples, as long as they are at most ten minutes.
    kept: Option<Vec<f32>>,
}

impl FirstPass<'_> {
    /// Begins behind what an earlier first pass over the same recording found, which all [`FirstPass::part`]s of that tell, from the
    /// beginning of the recording on. All samples are fed nevertheless.
    ///
    /// # Errors
    /// If these are not the parts of a recording.
    pub fn resume(&mut self, parts: &[ActivityPart]) -> Result<()> {
        self.activity.resume(parts, self.network)
    }

    /// What voice activity found since the last call. None if that is nothing, or it is found again as fast as it is read.
    pub fn part(&mut self) -> Option<ActivityPart> {
        self.activity.part()
    }

    /// Takes the next samples (mono, 16 kHz, in [-1, 1]).
    ///
    /// # Errors
    /// If a sample is not a number.
    pub fn feed(&mut self, samples: &[f32]) -> Result<()> {
        self.activity.feed(samples)?;
        match &mut self.kept {
            Some(kept) if (kept.len() + samples.len()) as u64 <= GROUP_SAMPLES => kept.extend_from_slice(samples),
            kept => *kept = None,
        }
        Ok(())
    }

    /// All samples that were fed, where these were ten minutes at most. [`Recognizer::transcribe_again`] then reads them again.
    pub fn take_samples(&mut self) -> Option<Vec<f32>> {
        self.kept.take()
    }

    /// With [`LongAudio::Vad`], the windows of the recording: for callers that decode them with [`Recognizer::decode`] and join
    /// the results with [`recognized`].
    ///
    /// # Errors
    /// If `max_window` or `min_pause` is out of its range.
    pub fn windows(self, settings: &RecognitionSettings) -> Result<SpeechWindows> {
        SpeechWindows::of(self.activity, settings)
    }
}

/// Windows in groups of similar length, the longest first, each of at most this many seconds, padding included (one that is
/// longer goes alone).
fn batches(signals: &[&[f32]], batch_seconds: f64) -> Vec<Vec<usize>> {
    let length = |index: usize| signals[index].len();
    let most = batch_seconds * f64::from(SAMPLE_RATE);
    let mut order: Vec<usize> = (0..signals.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(length(index)), index));
    let mut batches: Vec<Vec<usize>> = Vec::new();
    for index in order {
        match batches.last_mut() {
            // The first of a batch is its longest.
            Some(batch) if (length(batch[0]) * (batch.len() + 1)) as f64 <= most => batch.push(index),
            _ => batches.push(vec![index]),
        }
    }
    batches
}

/// The content of a tag piece such as `<|hi|>`, which is not part of the text.
fn tag(piece: &str) -> Option<&str> {
    match split_tag(piece.trim_start_matches('\u{2581}')) {
        (Some(tag), "") if !tag.is_empty() => Some(tag),
        _ => None,
    }
}

/// The languages that a model's vocabulary has tags of, sorted.
pub fn languages(tokenizer: &Tokenizer) -> Vec<String> {
    let pieces = tokenizer.pieces();
    let mut languages: Vec<String> = pieces
        .iter()
        .filter_map(|piece| tag(piece).filter(|tag| is_language(tag)).map(str::to_owned))
        .collect();
    languages.sort();
    languages.dedup();
    languages
}

/// BLAKE3 of a model file; for a folder, that of the names and digests of its model files.
pub fn digest(path: &Path) -> Result<String> {
    let of_file = |path: &Path| {
        let mut hasher = blake3::Hasher::new();
        let read = File::open(path).and_then(|file| hasher.update_reader(file).map(|hasher| hasher.finalize()));
        read.map_err(|error| TranscriptionError::Input(format!("cannot read {}: {error}", path.display())))
    };
    let files = OpenModel::files(path)?;
    if let [file] = &files[..] {
        return Ok(of_file(file)?.to_hex().to_string());
    }
    let mut all = blake3::Hasher::new();
    for file in &files {
        let name = file.file_name().unwrap_or_default().as_encoded_bytes();
        all.update(&(name.len() as u64).to_le_bytes());
        all.update(name);
        all.update(of_file(file)?.as_bytes());
    }
    Ok(all.finalize().to_hex().to_string())
}

#[cfg(test)]
#[path = "recognizer_tests.rs"]
mod tests;
