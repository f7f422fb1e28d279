//! Decodes recordings from beginning to end with one decoder state: in chunks, or in one pass.

use std::borrow::Cow;
use std::ops::Range;

use candle_core::Tensor;
use flow_kernels::is_gpu;
use flow_kind::available_memory;
use flow_model::decoding::{DecodingSettings, Hypothesis};
use flow_model::heads::SearchState;
use flow_speakers::silero::SAMPLE_RATE;

use super::{Recognized, Recognizer, SpeechWindows, joined};
use crate::long_audio::{ChunkSettings, ChunkWindow, FullSettings, chunk_windows};
use crate::segments::SegmentRules;
use crate::streamed::{Samples, shorter};
use crate::tokens::TokenScore;
use crate::{Result, TranscriptionError};

/// Samples whose features are made at once: ten seconds.
const AT_ONCE: usize = 10 * SAMPLE_RATE as usize;

/// The result so far, and the decoder's state after it.
struct Decoded {
    state: SearchState,
    hypothesis: Hypothesis,
    scores: Vec<TokenScore>,
    /// Frames that were decoded.
    frames: usize,
    /// How they were, with the frames of speech from the first one of the recording.
    decoding: DecodingSettings,
}

impl Recognizer {
    /// Transcribes a recording with this speech in chunks.
    pub(super) fn transcribe_chunks(
        &self,
        recording: &dyn Samples,
        speech: &SpeechWindows,
        lengths: &ChunkSettings,
        rules: (&SegmentRules, f64),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Recognized>> {
        let samples = speech.samples;
        let frame_seconds = self.model.frame_seconds();
        let frame = (frame_seconds * f64::from(SAMPLE_RATE)).round() as u64;
        let windows = chunk_windows(samples, frame, lengths.frames(frame_seconds)?);
        let found = self.decode_chunks(recording, (&windows, speech), cancelled)?;
        found
            .map(|found| self.recognized(found, samples, windows.len(), rules))
            .transpose()
    }

    /// Decodes the chunks of these windows, which are in order.
    fn decode_chunks(
        &self,
        recording: &dyn Samples,
        (windows, speech): (&[ChunkWindow], &SpeechWindows),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Decoded>> {
        let mut found = self.nothing_yet(speech)?;
        let mut left = windows.iter().peekable();
        // Samples that a window still needs, and the number of the first.
        let (mut held, mut first): (Vec<f32>, u64) = (Vec::new(), 0);
        let mut stopped = false;
        recording.pass(&mut |block| {
            held.extend_from_slice(block);
            while let Some(window) = left.next_if(|window| window.samples.end <= first + held.len() as u64) {
                if cancelled() {
                    stopped = true;
                    return Ok(false);
                }
                let signal = &held[(window.samples.start - first) as usize..(window.samples.end - first) as usize];
                self.computing(|| self.decode_chunk(signal, window, &mut found))?;
            }
            let needed = left
                .peek()
                .map_or(first + held.len() as u64, |window| window.samples.start);
            let unused = ((needed - first) as usize).min(held.len());
            held.drain(..unused);
            first += unused as u64;
            Ok(left.peek().is_some())
        })?;
        if stopped {
            return Ok(None);
        }
        if left.peek().is_some() {
            return Err(shorter(first + held.len() as u64));
        }
        Ok(Some(found))
    }

    fn decode_chunk(&self, signal: &[f32], window: &ChunkWindow, found: &mut Decoded) -> Result<()> {
        let chunk = self.model.encode_frames(signal, window.left, window.frames)?;
        self.decode_next(&chunk, found)
    }

    /// Transcribes a recording with this speech in one pass of the encoder, which is computed in blocks.
    pub(super) fn transcribe_whole(
        &self,
        recording: &dyn Samples,
        speech: &SpeechWindows,
        settings: &FullSettings,
        rules: (&SegmentRules, f64),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Recognized>> {
        let samples = speech.samples;
        if !self.model.config.preprocessor.normalized {
            let why =
                "one pass (`full`) is for models that normalise their features: `vad` and `chunked` are for others";
            return Err(TranscriptionError::setting("window", why));
        }
        let seconds = samples as f64 / f64::from(SAMPLE_RATE);
        let limited = seconds > settings.full_attention;
        let context = limited.then_some(settings.attention_context);
        self.check_memory(samples, context)?;
        let found = self.decode_whole(recording, speech, context, cancelled)?;
        found.map(|found| self.recognized(found, samples, 1, rules)).transpose()
    }

    /// Decodes in one pass of the encoder. The samples are read three times: for the mean of the features, for their
    /// deviation, and for the encoder, so that features are equal to the bit to those of the whole.
    fn decode_whole(
        &self,
        recording: &dyn Samples,
        speech: &SpeechWindows,
        context: Option<usize>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Decoded>> {
        let samples = speech.samples;
        let mut found = self.nothing_yet(speech)?;
        let frames = self.model.feature_frames(samples as usize);
        if frames == 0 {
            return Ok(Some(found));
        }
        let mut moments = self.model.feature_moments();
        for pass in 0..2 {
            if pass == 1 {
                moments.begin_again();
            }
            let mut add = |features: &mut [f32]| {
                moments.add(features);
                Ok(())
            };
            if !self.features(recording, samples, cancelled, &mut add)? {
                return Ok(None);
            }
        }
        let normalisation = moments.finish()?;
        let mut encoder = self.computing(|| Ok(self.model.encoder_stream(frames, context)?))?;
        let mut decode = |features: &mut [f32]| {
            normalisation.apply(features);
            for encoded in encoder.feed(features)? {
                self.decode_next(&encoded, &mut found)?;
            }
            Ok(())
        };
        let whole = self.features(recording, samples, cancelled, &mut decode)?;
        Ok(whole.then_some(found))
    }

    /// Gives the features of the first `samples` samples of a recording, not normalised, to `take`, on the threads that compute.
    /// False: it was cancelled.
    fn features(
        &self,
        recording: &dyn Samples,
        samples: u64,
        cancelled: &dyn Fn() -> bool,
        take: &mut (dyn FnMut(&mut [f32]) -> Result<()> + Send),
    ) -> Result<bool> {
        let mut stream = self.model.feature_stream();
        let mut features = Vec::new();
        let (mut at, mut stopped) = (0, false);
        recording.pass(&mut |block| {
            let block = &block[..block.len().min((samples - at) as usize)];
            for part in block.chunks(AT_ONCE) {
                if cancelled() {
                    stopped = true;
                    return Ok(false);
                }
                self.computing(|| {
                    features.clear();
                    stream.feed(part, &mut features)?;
                    take(&mut features)
                })?;
            }
            at += block.len() as u64;
            Ok(at < samples)
        })?;
        if stopped {
            return Ok(false);
        }
        if at < samples {
            return Err(shorter(at));
        }
        self.computing(|| {
            features.clear();
            stream.finish(&mut features)?;
            take(&mut features)
        })?;
        Ok(true)
    }

    /// An error if one pass over this many samples, with attention to this many frames on either side or to all, needs more
    /// memory than available. Memory that other workers are about to allocate is not counted.
    fn check_memory(&self, samples: u64, context: Option<usize>) -> Result<()> {
        if is_gpu(self.model.parameters.device()) {
            return Ok(());
        }
        let frames = self.model.encoded_frames(samples as usize);
        let needed = self.model.encoder_stream_bytes(frames, context);
        let Some(available) = available_memory().filter(|&available| needed > available) else {
            return Ok(());
        };
        let seconds = samples as f64 / f64::from(SAMPLE_RATE);
        let (needed, available) = (needed >> 20, available >> 20);
        Err(match context {
            None => TranscriptionError::setting(
                "full_attention",
                format!(
                    "attention over all of {seconds:.0} s of audio needs about {needed} MB of memory, and {available} MB are \
                     available: with `full_attention` below {seconds:.0} the recording is decoded with limited attention"
                ),
            ),
            Some(context) => TranscriptionError::setting(
                "attention_context",
                format!(
                    "attention to {context} frames on either side needs about {needed} MB of memory, and {available} MB are \
                     available: a smaller `attention_context` needs less"
                ),
            ),
        })
    }

    /// Before the first frame of a recording with this speech.
    fn nothing_yet(&self, speech: &SpeechWindows) -> Result<Decoded> {
        let speech = match speech.is_heard {
            true => vec![speech.all_stretches()],
            false => Vec::new(),
        };
        Ok(Decoded {
            decoding: self.boosting_in(&speech, &self.model.decoding).into_owned(),
            state: self.computing(|| Ok(self.model.greedy_state(&self.model.decoding)?))?,
            hypothesis: Hypothesis::default(),
            scores: Vec::new(),
            frames: 0,
        })
    }

    /// Decodes the next frames of a recording, (frames, d).
    fn decode_next(&self, encoded: &Tensor, found: &mut Decoded) -> Result<()> {
        // Each frame looks through them: only those of these frames.
        let frames = found.frames..found.frames + encoded.dims()[0];
        let of_these = |part: &&Range<usize>| part.start < frames.end && part.end > frames.start;
        let from = |part: &Range<usize>| part.start.saturating_sub(frames.start)..part.end - frames.start;
        let of_part = match found.decoding.speech.is_empty() {
            true => Cow::Borrowed(&found.decoding),
            false => Cow::Owned(DecodingSettings {
                speech: (found.decoding.speech.iter())
                    .map(|speech| speech.iter().filter(of_these).map(from).collect())
                    .collect(),
                ..found.decoding.clone()
            }),
        };
        let (next, scores) = self.observed(1, true, |observer| {
            Ok(self
                .model
                .decode_on(&of_part, encoded, &mut found.state, Some(observer))?)
        })?;
        found.scores.extend(scores.into_iter().flatten());
        let hypothesis = &mut found.hypothesis;
        hypothesis.ids.extend(next.ids);
        hypothesis.durations.extend(next.durations);
        hypothesis.score += next.score;
        let begin = found.frames as u32;
        hypothesis
            .frames
            .extend(next.frames.into_iter().map(|frame| begin + frame));
        found.frames += encoded.dims()[0];
        Ok(())
    }

    fn recognized(
        &self,
        found: Decoded,
        samples: u64,
        windows: usize,
        (rules, delay): (&SegmentRules, f64),
    ) -> Result<Recognized> {
        let mut heard = self.words(&found.hypothesis, &found.scores)?;
        self.calibrate(std::slice::from_mut(&mut heard));
        let all = 0..samples;
        let all = std::slice::from_ref(&all);
        let phrases = self.phrases.as_ref();
        let boosted = phrases.map(|phrases| phrases.written(all, std::slice::from_ref(&heard), delay));
        let whole = joined(all, samples, vec![heard], rules)?;
        Ok(Recognized {
            boosted,
            windows: if samples == 0 { 0 } else { windows },
            ..whole
        })
    }
}

#[cfg(test)]
#[path = "stateful_tests.rs"]
mod tests;
