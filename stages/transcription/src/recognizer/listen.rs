//! Transcribes recordings as they are spoken, with a cache-aware model: every frame goes through its encoder once.

use std::sync::{Arc, PoisonError};

use flow_model::config::ChunkContext;
use flow_model::decoding::Hypothesis;
use flow_model::encoder::cached::ChunkPlan;
use flow_model::model::chunks::{self, ChunkStream, NextSamples};

use super::spoken_speech::SpokenSpeech;
use super::{Heard, Recognizer};
use crate::decoding_request::DecodingRequest;
use crate::tokens::TokenScore;
use crate::{Result, TranscriptionError, Word};

/// Tokens that wait for a word to end, at most: languages without spaces may have no end of a word for long.
const MOST_PENDING: usize = 64;

/// What is kept of a recording while it is spoken.
pub struct Listener {
    stream: ChunkStream,
    plan: Arc<ChunkPlan>,
    /// Tokens of the word that may go on, with frames from the recording's beginning, and their scores.
    pending: Hypothesis,
    scores: Vec<TokenScore>,
    /// Where phrases are boosted; none where there are no phrases.
    speech: Option<SpokenSpeech>,
}

impl Listener {
    /// Whether the recording has ended.
    pub fn has_ended(&self) -> bool {
        self.stream.has_ended()
    }

    /// Frames of the encoder so far.
    pub fn frames(&self) -> usize {
        self.stream.frames()
    }
}

/// The next samples of a recording that is spoken.
pub struct Spoken<'a> {
    pub listener: &'a mut Listener,
    /// Mono, 16 kHz, in [-1, 1].
    pub samples: &'a [f32],
    /// Whether the recording ends with them.
    pub is_last: bool,
}

/// What was heard in them. Times are from the recording's beginning.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeardNext {
    /// Words that do not change any more.
    pub heard: Heard,
    /// The word that may go on.
    pub partial: Vec<Word>,
}

impl Recognizer {
    /// The contexts in which the model hears recordings as they are spoken, the default one first; none if it does not.
    pub fn contexts(&self) -> Vec<ChunkContext> {
        self.model.config.streamed_contexts().unwrap_or_default()
    }

    /// Seconds from a chunk's first sample to its last one in a context: words are heard with about this delay. Infinite where a
    /// frame sees all that follow.
    pub fn latency(&self, context: ChunkContext) -> f64 {
        let frames = context.chunk().map_or(f64::INFINITY, |frames| frames as f64);
        frames * self.model.frame_seconds()
    }

    /// The context with the most look-ahead of those whose latency is at most `latency` seconds, or else the one with the least; of
    /// several with the same look-ahead the one that sees most before it. Without a latency the first one in which a recording can
    /// be heard as it is spoken.
    ///
    /// # Errors
    /// If there is none.
    pub fn context_for(&self, latency: Option<f64>) -> Result<ChunkContext> {
        let contexts = self.model.config.streamed_contexts();
        let mut contexts = contexts.map_err(|why| TranscriptionError::setting("model", why.to_string()))?;
        let Some(latency) = latency else { return Ok(contexts[0]) };
        contexts.sort_by_key(|context| (context.right, context.left.is_none(), context.left));
        // A frame's seconds are rounded.
        let is_soon = |context: &&ChunkContext| self.latency(**context) <= latency + 1e-6;
        Ok(contexts.iter().rfind(is_soon).copied().unwrap_or(contexts[0]))
    }

    /// Begins a recording in a context, decoded as a request says.
    ///
    /// # Errors
    /// If the model cannot be heard in this context, does not know it or is not cache-aware, or cannot be decoded from chunk to chunk.
    pub fn listen(&self, context: ChunkContext, request: &DecodingRequest) -> Result<Listener> {
        let decoding = self.decoding_for(request)?;
        if decoding.settings.beam > 1 {
            let why = "beam search needs the whole recording; while it is spoken the model is decoded by greedy search";
            return Err(TranscriptionError::setting("beam", why.to_owned()));
        }
        if self.decodes_ctc() && decoding.settings.fusion.has_models() {
            let why = "with a CTC head phrases and language models need beam search, which needs the whole recording: while it is \
                       spoken, boost with a transducer (`decoder`), or not at all";
            return Err(TranscriptionError::setting("boost", why.to_owned()));
        }
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = match plans.iter().find(|plan| plan.context == context) {
            Some(plan) => Arc::clone(plan),
            None => {
                let plan = Arc::new(self.computing(|| Ok(self.model.chunk_plan(context)?))?);
                plans.push(Arc::clone(&plan));
                plan
            }
        };
        drop(plans);
        let stream = self.computing(|| Ok(self.model.chunk_stream(Arc::clone(&decoding.settings))?))?;
        Ok(Listener {
            stream,
            plan,
            pending: Hypothesis::default(),
            scores: Vec::new(),
            speech: (decoding.settings.fusion.has_phrases())
                .then(|| SpokenSpeech::new(self.voice_activity, self.model.frame_seconds())),
        })
    }

    /// Hears the next samples of several recordings, and gives for each what was heard in them. Recordings in one context go
    /// through the model together; what one gives does not depend on the others, where an element of a matrix product does not
    /// depend on the other rows, nor on how its samples are cut.
    ///
    /// # Errors
    /// If a sample is not a number, a recording has ended before, or the model fails: the listeners are then no longer of use.
    pub fn hear_next(&self, spoken: &mut [Spoken]) -> Result<Vec<HeardNext>> {
        if let Some(bad) = spoken
            .iter()
            .find(|next| !next.samples.iter().all(|sample| sample.is_finite()))
        {
            let why = format!("a sample after frame {} is not a number", bad.listener.frames());
            return Err(TranscriptionError::Input(why));
        }
        for Spoken {
            listener,
            samples,
            is_last,
        } in &mut *spoken
        {
            if let Some(speech) = &mut listener.speech {
                speech.feed(samples, *is_last)?;
            }
        }
        let mut found = vec![HeardNext::default(); spoken.len()];
        let mut contexts: Vec<ChunkContext> = Vec::new();
        for next in spoken.iter() {
            if !contexts.contains(&next.listener.plan.context) {
                contexts.push(next.listener.plan.context);
            }
        }
        for context in contexts {
            let (mut indices, mut streams, mut plan) = (Vec::new(), Vec::new(), None);
            for (index, next) in spoken.iter_mut().enumerate() {
                if next.listener.plan.context == context {
                    indices.push(index);
                    plan = Some(Arc::clone(&next.listener.plan));
                    let (samples, is_last) = (next.samples, next.is_last);
                    let Listener { stream, speech, .. } = &mut *next.listener;
                    let speech = speech.as_ref().map(|speech| speech as &dyn chunks::SpokenSpeech);
                    let next = NextSamples {
                        samples,
                        is_last,
                        speech,
                    };
                    streams.push((stream, next));
                }
            }
            let Some(plan) = plan else { continue };
            let (hypotheses, scores) = self.observed(streams.len(), true, |observer| {
                self.computing(|| Ok(self.model.hear(&plan, &mut streams, Some(observer))?))
            })?;
            for ((index, hypothesis), scores) in indices.into_iter().zip(hypotheses).zip(scores) {
                let Spoken { listener, is_last, .. } = &mut spoken[index];
                listener.pending.ids.extend(hypothesis.ids);
                listener.pending.frames.extend(hypothesis.frames);
                listener.pending.durations.extend(hypothesis.durations);
                listener.scores.extend(scores);
                if let Some(speech) = &mut listener.speech {
                    speech.forget(listener.stream.frames());
                }
                found[index] = self.words_next(listener, *is_last)?;
            }
        }
        Ok(found)
    }

    /// Takes the words that have ended from the tokens of a recording.
    fn words_next(&self, listener: &mut Listener, is_last: bool) -> Result<HeardNext> {
        let Listener { pending, scores, .. } = listener;
        let all = pending.ids.len();
        let begins_word = |id: &u32| {
            self.tokenizer
                .piece(*id)
                .is_some_and(|piece| piece.starts_with('\u{2581}'))
        };
        let ended = match pending.ids.iter().rposition(begins_word) {
            _ if is_last => all,
            Some(last) if all - last <= MOST_PENDING => last,
            None if all <= MOST_PENDING => 0,
            _ => all - 1,
        };
        let rest = Hypothesis {
            ids: pending.ids.split_off(ended),
            frames: pending.frames.split_off(ended),
            durations: pending.durations.split_off(ended),
            ..Hypothesis::default()
        };
        let rest_scores = scores.split_off(ended);
        let mut found = [self.words(pending, scores)?, self.words(&rest, &rest_scores)?];
        self.calibrate(&mut found);
        let [heard, partial] = found;
        (*pending, *scores) = (rest, rest_scores);
        Ok(HeardNext {
            heard,
            partial: partial.words,
        })
    }
}

#[cfg(test)]
#[path = "listen_tests.rs"]
mod tests;
