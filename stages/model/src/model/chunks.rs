//! Recordings that a cache-aware model hears as they come: features, encoder and greedy search, each with what it keeps, so that
//! every frame goes through the encoder once and memory is bounded.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;

use super::TdtModel;
use crate::config::ChunkContext;
use crate::decoding::{DecodingSettings, Hypothesis, TokenObserver};
use crate::encoder::cached::{ChunkPlan, EncoderCache};
use crate::heads::SearchState;
use crate::{Error, Result};
use flow_nn::features::LogMelStream;

/// What is kept of a recording between its samples.
pub struct ChunkStream {
    /// None once the recording has ended.
    features: Option<LogMelStream>,
    /// Feature frames that make no chunk yet, (frames, mels) row-major.
    waiting: Vec<f32>,
    cache: EncoderCache,
    search: SearchState,
    /// How it is decoded.
    settings: Arc<DecodingSettings>,
    /// Encoded frames.
    frames: usize,
}

impl ChunkStream {
    /// Whether the last samples were taken.
    pub fn has_ended(&self) -> bool {
        self.features.is_none()
    }

    /// Encoded frames that were decoded so far.
    pub fn frames(&self) -> usize {
        self.frames
    }
}

/// Where a recording that is spoken has speech.
pub trait SpokenSpeech: Sync {
    /// The frames of a chunk in which phrases score, counted from its first frame. `chunk`: its frames, counted from that of the
    /// recording; the samples up to its last frame have been fed.
    fn of_chunk(&self, chunk: Range<usize>) -> Vec<Range<usize>>;
}

/// What comes next of a recording.
#[derive(Clone, Copy)]
pub struct NextSamples<'a> {
    /// Mono, in [-1, 1].
    pub samples: &'a [f32],
    /// Whether these are the last ones.
    pub is_last: bool,
    /// Where phrases score; none for everywhere.
    pub speech: Option<&'a dyn SpokenSpeech>,
}

impl TdtModel {
    /// Prepares the model to hear recordings in one of its contexts.
    ///
    /// # Errors
    /// Where the model is not cache-aware, normalises its features, does not know the context, or sees all that follows in it.
    pub fn chunk_plan(&self, context: ChunkContext) -> Result<ChunkPlan> {
        self.config.streamed_contexts()?;
        self.encoder.chunk_plan(&self.parameters, context)
    }

    /// Begins a recording that is decoded as these settings say.
    ///
    /// # Errors
    /// As [`TdtModel::greedy_state`].
    pub fn chunk_stream(&self, settings: Arc<DecodingSettings>) -> Result<ChunkStream> {
        Ok(ChunkStream {
            features: Some(self.feature_stream()),
            waiting: Vec::new(),
            cache: self.encoder.cache(&self.parameters)?,
            search: self.greedy_state(&settings)?,
            settings,
            frames: 0,
        })
    }

    /// Takes the next samples of several recordings, and gives the tokens of each that are found by them; their frames count from
    /// the recording's beginning, texts are left empty. Chunks of several recordings go through the encoder together. What a
    /// recording gives does not depend on how its samples are cut, nor on the others, where an element of a matrix product does
    /// not depend on the other rows.
    ///
    /// # Errors
    /// Where a recording has ended before, or the device fails: the streams are then no longer of use.
    pub fn hear(
        &self,
        plan: &ChunkPlan,
        streams: &mut [(&mut ChunkStream, NextSamples)],
        observer: Option<TokenObserver>,
    ) -> Result<Vec<Hypothesis>> {
        self.hear_seen(plan, streams, observer, None)
    }

    /// The same; `frames_seen` gets what the heads get.
    pub(crate) fn hear_seen(
        &self,
        plan: &ChunkPlan,
        streams: &mut [(&mut ChunkStream, NextSamples)],
        mut observer: Option<TokenObserver>,
        mut frames_seen: Option<&mut dyn FnMut(&Tensor)>,
    ) -> Result<Vec<Hypothesis>> {
        let bands = self.config.preprocessor.features;
        for (stream, next) in streams.iter_mut() {
            let Some(mut features) = stream.features.take() else {
                return Err(Error::Input("the recording has ended".into()));
            };
            features.feed(next.samples, &mut stream.waiting)?;
            if next.is_last {
                features.finish(&mut stream.waiting)?;
            } else {
                stream.features = Some(features);
            }
        }
        let mut found = vec![Hypothesis::default(); streams.len()];
        loop {
            // Which recordings have a chunk, and how many feature frames it has.
            let ready: Vec<(usize, usize)> = streams
                .iter()
                .enumerate()
                .filter_map(|(index, (stream, next))| {
                    let there = stream.waiting.len() / bands;
                    let whole = plan.next_chunk(&stream.cache);
                    let frames = if next.is_last { there.min(whole) } else { whole };
                    (frames > 0 && frames <= there).then_some((index, frames))
                })
                .collect();
            if ready.is_empty() {
                return Ok(found);
            }
            let mut of_chunks = ready.iter().peekable();
            let mut chunks = Vec::with_capacity(ready.len());
            for (index, (stream, _)) in streams.iter_mut().enumerate() {
                if let Some((_, frames)) = of_chunks.next_if(|(ready, _)| *ready == index) {
                    let stream = &mut **stream;
                    chunks.push((&mut stream.cache, &stream.waiting[..frames * bands]));
                }
            }
            let encoded = self.encoder.step(&self.parameters, plan, &mut chunks)?;
            for ((index, frames), encoded) in ready.into_iter().zip(encoded) {
                let (stream, NextSamples { speech, .. }) = &mut streams[index];
                let (stream, speech) = (&mut **stream, *speech);
                stream.waiting.drain(..frames * bands);
                let mut of_this = observer
                    .as_mut()
                    .map(|observer| move |_: usize, token: u32, logits: &[f32]| observer(index, token, logits));
                let of_this = of_this.as_mut().map(|of_this| -> TokenObserver { of_this });
                let encoded = self.prompted(&encoded, stream.settings.prompt.or(self.prompt))?;
                if let Some(see) = &mut frames_seen {
                    see(&encoded);
                }
                let settings = match speech {
                    None => Cow::Borrowed(&*stream.settings),
                    Some(speech) => Cow::Owned(DecodingSettings {
                        speech: vec![speech.of_chunk(stream.frames..stream.frames + encoded.dim(0)?)],
                        ..(*stream.settings).clone()
                    }),
                };
                let next = self.decode_on(&settings, &encoded, &mut stream.search, of_this)?;
                let all = &mut found[index];
                all.ids.extend(next.ids);
                all.durations.extend(next.durations);
                all.score += next.score;
                let begin = u32::try_from(stream.frames)
                    .map_err(|_| Error::Input("a recording of more than 2^32 frames".into()))?;
                all.frames.extend(next.frames.iter().map(|frame| begin + frame));
                stream.frames += encoded.dim(0)?;
            }
        }
    }
}

#[cfg(test)]
#[path = "chunks_tests.rs"]
mod tests;
