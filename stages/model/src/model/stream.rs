//! The parts of a model for one recording that comes in blocks: features, encoder and greedy search, each with what it holds
//! between blocks.

use candle_core::Tensor;

use super::TdtModel;
use crate::Result;
use crate::decoding::{DecodingSettings, Hypothesis, TokenObserver};
use crate::encoder::stream::EncoderStream;
use crate::heads::SearchState;
use flow_nn::features::{LogMelStream, Moments};

impl TdtModel {
    /// Begins a signal of which log-mel features are made, not normalised.
    pub fn feature_stream(&self) -> LogMelStream {
        LogMelStream::new(&self.front_end)
    }

    /// An accumulator of the mean and standard deviation of each band of features.
    pub fn feature_moments(&self) -> Moments {
        Moments::new(self.config.preprocessor.features)
    }

    /// Feature frames of a signal of this many samples.
    pub fn feature_frames(&self, samples: usize) -> usize {
        self.front_end.frames(samples)
    }

    /// Frames of the encoder's output for a signal of this many samples.
    pub fn encoded_frames(&self, samples: usize) -> usize {
        self.config.encoder.subsampled(self.front_end.frames(samples))
    }

    /// Encoder output for some frames of a signal, (frames, d): those from `first` on, at most `most` of them.
    ///
    /// # Errors
    /// If the device fails.
    pub fn encode_frames(&self, signal: &[f32], first: usize, most: Option<usize>) -> Result<Tensor> {
        let (encoded, lengths) = self.encode(&[signal])?;
        let valid = lengths.first().copied().unwrap_or(0);
        let first = first.min(valid);
        let frames = most.unwrap_or(valid).min(valid - first);
        Ok(encoded.get(0)?.narrow(0, first, frames)?)
    }

    /// Begins an utterance of `frames` feature frames: [`Encoder::stream`](crate::Encoder::stream).
    ///
    /// # Errors
    /// If the device fails.
    pub fn encoder_stream(&self, frames: usize, context: Option<usize>) -> Result<EncoderStream<'_>> {
        self.encoder.stream(&self.parameters, frames, context)
    }

    /// Bytes that [`TdtModel::encoder_stream`] holds for this many frames of the encoder's output, about.
    pub fn encoder_stream_bytes(&self, frames: usize, context: Option<usize>) -> u64 {
        self.encoder.stream_bytes(frames, context, self.parameters.dtype())
    }

    /// Greedy search before the first frame of one recording.
    ///
    /// # Errors
    /// If a language model is of another vocabulary, or the head that is to decode has no such search.
    pub fn greedy_state(&self, settings: &DecodingSettings) -> Result<SearchState> {
        self.head_of(settings)?.start(&self.parameters, settings, 1)
    }

    /// Greedy search in the next encoded frames of a recording, (frames, d); frames of tokens count from the first of
    /// these. Texts are left empty. A token of CTC that goes on in the next part does not get longer. The settings are those
    /// that the state began with.
    ///
    /// # Errors
    /// If the device fails.
    pub fn decode_on(
        &self,
        settings: &DecodingSettings,
        encoded: &Tensor,
        state: &mut SearchState,
        observer: Option<TokenObserver>,
    ) -> Result<Hypothesis> {
        let (frames, encoded) = (encoded.dim(0)?, encoded.unsqueeze(0)?);
        let found = self.head_of(settings)?.search(
            &self.parameters,
            &self.config,
            settings,
            (&encoded, &[frames]),
            state,
            observer,
        )?;
        Ok(found.into_iter().next().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::testing::golden;

    #[test]
    fn parts_have_the_tokens_of_the_whole() {
        let model = TdtModel::load(&golden::file("model.nemo"), DType::F32, &Device::Cpu).unwrap();
        for wave in golden::waves("eval") {
            let whole = model.transcribe(&[&wave]).unwrap().swap_remove(0);
            let encoded = model.encode_frames(&wave, 0, None).unwrap();
            let frames = encoded.dim(0).unwrap();
            assert_eq!(frames, model.encoded_frames(wave.len()));
            for size in [1, 2, 7, frames] {
                let (mut state, mut found) = (model.greedy_state(&model.decoding).unwrap(), Hypothesis::default());
                let mut shown = 0;
                for first in (0..frames).step_by(size) {
                    let part = encoded.narrow(0, first, size.min(frames - first)).unwrap();
                    let mut observe = |_: usize, _: u32, _: &[f32]| shown += 1;
                    let next = model
                        .decode_on(&model.decoding, &part, &mut state, Some(&mut observe))
                        .unwrap();
                    found.ids.extend(next.ids);
                    found.durations.extend(next.durations);
                    found
                        .frames
                        .extend(next.frames.iter().map(|frame| first as u32 + frame));
                }
                assert!(!found.ids.is_empty());
                assert_eq!(shown, found.ids.len());
                assert_eq!(
                    (&found.ids, &found.frames, &found.durations),
                    (&whole.ids, &whole.frames, &whole.durations),
                    "parts of {size}"
                );
            }
        }
        let nothing = model.encode_frames(&[0.0; 200], 5, None).unwrap();
        assert_eq!(nothing.dim(0).unwrap(), 0);
        let mut state = model.greedy_state(&model.decoding).unwrap();
        assert_eq!(
            model.decode_on(&model.decoding, &nothing, &mut state, None).unwrap(),
            Hypothesis::default()
        );
    }
}
