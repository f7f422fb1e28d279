//! The encoder over one utterance whose features come in blocks, so that memory does not grow with its length.
//!
//! Nothing is computed twice: each layer keeps the rows that later frames still need.
//!
//! - Sub-sampling: three convolutions of width 3 and stride 2 with a zero before and after. Output frame t needs frames
//!   2t - 1 to 2t + 1 of the last one's input, so 4t - 3 to 4t + 3 of the one before, and 8t - 7 to 8t + 7 of the features.
//!   Frames a to b (excluded) are computed from features 8 (a - 1) to 8 b, and the first frame, which misses what is before
//!   it, is dropped.
//! - A Conformer layer: its attention's context of w frames, counted from a block of queries, and half the width of the
//!   depthwise convolution (4 of 9). Over all layers a frame depends on n (w + 4) frames to either side (24 layers of
//!   [128, 128]: 3168 frames, 253 s); but as each layer holds its own rows, what is held is some 3 w + 4 rows for each.

use candle_core::{DType, Tensor};
use flow_kernels::attention::Context;
use flow_kernels::elementwise::drop_scaled;

use super::Encoder;
use crate::config::{AttentionContext, CausalConfig, EncoderConfig};
use crate::{Error, Result};
use flow_nn::layers::attention::stream::QUERIES;
use flow_nn::layers::conformer_layer::stream::LayerStream;
use flow_nn::parameters::Parameters;

/// Frames of the encoder for which sub-sampling is computed at once: 20 s, of which the first convolution's output takes
/// 67 MB with 256 channels and 128 mels.
const BLOCK: usize = 256;

/// The encoder, when evaluating, over one utterance: gives, to the bit, what [`Encoder::encode`] gives for the whole, where
/// an element of a matrix product does not depend on the other rows (`flow_kernels::product`).
#[derive(Debug)]
pub struct EncoderStream<'a> {
    encoder: &'a Encoder,
    parameters: &'a Parameters,
    layers: Vec<LayerStream>,
    /// Feature frames of the utterance, and with the frame of zeros that [`LogMel`](flow_nn::features::LogMel) adds.
    valid: usize,
    padded: usize,
    /// Features, (frames, mels), from this frame on.
    features: Vec<f32>,
    from: usize,
    /// The next frame after sub-sampling.
    next: usize,
    block: usize,
}

impl Encoder {
    /// Begins an utterance of `valid` feature frames. `context`: frames that a frame sees to either side, if the model was
    /// not made with such a limit itself; none for all.
    ///
    /// # Errors
    /// If the device fails, or the encoder is causal.
    pub fn stream<'a>(
        &'a self,
        parameters: &'a Parameters,
        valid: usize,
        context: Option<usize>,
    ) -> Result<EncoderStream<'a>> {
        let padded = valid + 1;
        if self.config.causal != CausalConfig::default() {
            return Err(Error::Input(
                "a causal encoder does not take one pass over the whole recording".into(),
            ));
        }
        let frames = (self.config.subsampled(padded), self.config.subsampled(valid));
        let context = match (self.context, context) {
            (Context::All, Some(width)) => Context::Band(width),
            (own, _) => own,
        };
        let layers = self.layers.iter();
        let layers = layers.map(|layer| layer.stream(parameters, &self.table, context, frames));
        Ok(EncoderStream {
            encoder: self,
            parameters,
            layers: layers.collect::<Result<_>>()?,
            valid,
            padded,
            features: Vec::new(),
            from: 0,
            next: 0,
            block: BLOCK,
        })
    }

    /// Bytes that [`Encoder::stream`] holds for an utterance of this many frames after sub-sampling, about: rows of two layers
    /// (one is fed by the other; of all layers where attention is limited), the projected positions of all layers with the
    /// table that they are from, and the scores of a block of queries. Weights and sub-sampling come on top.
    pub fn stream_bytes(&self, frames: usize, context: Option<usize>, dtype: DType) -> u64 {
        let own = match self.config.attention_context {
            AttentionContext::Band(width) => Some(width),
            AttentionContext::Full | AttentionContext::Chunks(_) => None,
        };
        let (width, heads) = (self.config.d_model, self.config.n_heads);
        let context = own.or(context);
        let (layers, rows, queries, keys) = match context {
            Some(context) => {
                let rows = frames.min(context.saturating_mul(4).saturating_add(BLOCK));
                (self.layers.len(), rows, rows.min(QUERIES), rows)
            }
            None => (2, frames, frames.min(QUERIES), frames),
        };
        // Rows: five of the attention, two residuals, the gate. Scores: content, position of twice as many, weights.
        let elements = |factors: [usize; 3]| factors.iter().map(|&factor| factor as u64).fold(1, u64::saturating_mul);
        let rows = elements([8 * layers, rows, width]);
        let scores = elements([4 * heads, queries, keys]);
        // Positions from one end of what is seen to the other, in each layer, and twice as many in the table.
        let seen = context.unwrap_or(frames).min(frames);
        let positions = elements([2 * self.layers.len() + 4, seen, width]);
        let elements = rows.saturating_add(scores).saturating_add(positions);
        elements.saturating_mul(dtype.size_in_bytes() as u64)
    }
}

impl EncoderStream<'_> {
    /// Sub-sampling in blocks of this many frames, 1 at least; it changes nothing but memory and speed.
    #[cfg(test)]
    fn with_block(mut self, block: usize) -> Self {
        self.block = block.max(1);
        self
    }

    /// Takes the next feature frames, (frames, mels) row-major, and gives the encoded frames that are complete by them, in
    /// order, each part (frames, d). After the last feature all are given; those of padding are left out.
    ///
    /// # Errors
    /// If there are more features than announced, or they make no whole frames.
    pub fn feed(&mut self, features: &[f32]) -> Result<Vec<Tensor>> {
        let bands = self.encoder.config.feat_in;
        let held = self.from + self.features.len() / bands;
        let fed = features.len() / bands;
        if !features.len().is_multiple_of(bands) || fed > self.valid.saturating_sub(held) {
            return Err(Error::Input(format!(
                "{} features are not frames of {bands} each, at most {} of which were to come",
                features.len(),
                self.valid.saturating_sub(held)
            )));
        }
        self.features.extend_from_slice(features);
        let mut there = held + fed;
        if there == self.valid && fed > 0 {
            self.features.resize(self.features.len() + bands, 0.0);
            there = self.padded;
        }
        let time = self.encoder.config.subsampled(self.padded);
        let mut encoded = Vec::new();
        while self.next < time {
            let end = time.min(self.next + self.block);
            if there < self.padded.min(EncoderConfig::SUBSAMPLING * end) {
                break;
            }
            let x = self.subsampled(end)?;
            self.next = end;
            self.through(0, x, &mut encoded)?;
        }
        if self.next == time {
            self.cut(&mut encoded)?;
        }
        Ok(encoded)
    }

    /// Frames from the next one to `end` after sub-sampling, (frames, d).
    fn subsampled(&mut self, end: usize) -> Result<Tensor> {
        let config = &self.encoder.config;
        let (bands, factor) = (config.feat_in, EncoderConfig::SUBSAMPLING);
        // One frame more, which misses what is before it; at the beginning there is nothing before.
        let dropped = self.next.min(1);
        let features = factor * (self.next - dropped)..self.padded.min(factor * end);
        let frames = &self.features[(features.start - self.from) * bands..(features.end - self.from) * bands];
        let count = features.len();
        let mut by_band = vec![0.0f32; frames.len()];
        for (t, frame) in frames.chunks_exact(bands).enumerate() {
            for (band, value) in frame.iter().enumerate() {
                by_band[band * count + t] = *value;
            }
        }
        let device = self.parameters.device();
        let tensor = Tensor::from_vec(by_band, (1, bands, count), &candle_core::Device::Cpu)?;
        let tensor = tensor.to_dtype(self.parameters.dtype())?.to_device(device)?;
        let valid = self.valid.saturating_sub(features.start).min(count);
        let (x, ..) = self.encoder.subsampling.forward(self.parameters, &tensor, &[valid])?;
        let x = x.narrow(0, dropped, end - self.next)?.contiguous()?;
        // The next block begins a frame earlier.
        let kept = (factor * (end - 1)).clamp(self.from, self.from + self.features.len() / bands);
        self.features.drain(..(kept - self.from) * bands);
        self.from = kept;
        Ok(drop_scaled(&x, self.encoder.input_scale(), None)?)
    }

    /// Rows through a layer and those behind it; what comes out of the last one is appended to `encoded`.
    fn through(&mut self, number: usize, x: Tensor, encoded: &mut Vec<Tensor>) -> Result<()> {
        let Some(layer) = self.encoder.layers.get(number) else {
            encoded.push(x);
            return Ok(());
        };
        layer.feed(self.parameters, &mut self.layers[number], &x)?;
        while let Some(y) = layer.next(self.parameters, &mut self.layers[number])? {
            self.through(number + 1, y, encoded)?;
        }
        Ok(())
    }

    /// Takes the padding off the last part.
    fn cut(&self, encoded: &mut Vec<Tensor>) -> Result<()> {
        let config = &self.encoder.config;
        let padding = config.subsampled(self.padded) - config.subsampled(self.valid);
        if let Some(last) = encoded.pop() {
            let rows = last.dim(0)?.saturating_sub(padding);
            if rows > 0 {
                encoded.push(last.narrow(0, 0, rows)?);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use flow_kernels::testing::max_difference;

    use super::*;
    use crate::testing::golden;
    use flow_nn::features::LogMel;
    use flow_nn::parameters::ParameterBuilder;

    fn encoder(dtype: DType, context: Option<usize>) -> (LogMel, Encoder, Parameters) {
        let (mut config, weights) = golden::model();
        if let Some(context) = context {
            config.encoder.attention_context = AttentionContext::Band(context);
        }
        let mut builder = ParameterBuilder::from_tensors(dtype, Device::Cpu, weights);
        let front_end = LogMel::new(&config.preprocessor, &mut builder).unwrap();
        let encoder = Encoder::new(&config.encoder, "encoder", &mut builder).unwrap();
        (front_end, encoder, builder.finish().0)
    }

    /// Normalised features of all golden recordings behind each other, cut to this many samples: (bands, frames), with the
    /// padding, and (frames, bands) without it.
    fn features(front_end: &LogMel, samples: usize) -> (Tensor, usize, Vec<f32>) {
        let mut wave = golden::waves("eval").concat();
        wave.truncate(samples);
        let features = front_end.compute(&[&wave], None).unwrap();
        let valid = features.lengths[0];
        let mut by_frame = Vec::with_capacity(valid * features.bands);
        for t in 0..valid {
            by_frame.extend((0..features.bands).map(|band| features.values[band * features.frames + t]));
        }
        (features.tensor(DType::F32, &Device::Cpu).unwrap(), valid, by_frame)
    }

    #[test]
    fn blocks_give_what_the_whole_gives() {
        // Equal to the bit where an element of a product does not depend on the other rows; otherwise up to rounding.
        #[cfg(target_arch = "x86_64")]
        let exact = std::arch::is_x86_feature_detected!("avx2");
        #[cfg(not(target_arch = "x86_64"))]
        let exact = false;
        for dtype in [DType::F32, DType::F64] {
            for context in [None, Some(1), Some(5), Some(40)] {
                // Last frames with and without padding.
                for samples in [usize::MAX, 150_000, 128_000, 127_999, 1_280, 160] {
                    let (front_end, own, parameters) = encoder(dtype, context);
                    let (_, encoder, _) = encoder(dtype, None);
                    let (tensor, valid, by_frame) = features(&front_end, samples);
                    let tensor = tensor.to_dtype(dtype).unwrap();
                    let (expected, lengths) = own.encode(&parameters, &tensor, &[valid]).unwrap();
                    let expected = expected.get(0).unwrap().narrow(0, 0, lengths[0]).unwrap();
                    let bands = tensor.dim(1).unwrap();
                    for (block, fed) in [(1, 1), (3, 50), (64, 7), (BLOCK, 100_000)] {
                        let stream = encoder.stream(&parameters, valid, context).unwrap();
                        let mut stream = stream.with_block(block);
                        let mut parts = Vec::new();
                        for features in by_frame.chunks(fed * bands) {
                            parts.extend(stream.feed(features).unwrap());
                        }
                        let found = Tensor::cat(&parts, 0).unwrap();
                        assert_eq!(found.dims(), expected.dims(), "{context:?} {valid} {block}");
                        let worst = max_difference(&found, &expected);
                        let bound = match dtype {
                            DType::F32 if exact => 0.0,
                            DType::F32 => 1e-4,
                            _ => 1e-11,
                        };
                        assert!(
                            worst <= bound,
                            "{dtype:?} {context:?} {valid} frames, {block}: {worst:e}"
                        );
                        assert!(stream.feed(&vec![0.0; bands]).is_err());
                    }
                }
            }
        }
    }

    #[test]
    fn limited_context_holds_rows_that_do_not_grow_with_the_frames() {
        let (front_end, encoder, parameters) = encoder(DType::F32, None);
        let (_, valid, by_frame) = features(&front_end, usize::MAX);
        let bands = encoder.config.feat_in;
        let longest = |repeated: usize| {
            let mut stream = encoder
                .stream(&parameters, repeated * valid, Some(4))
                .unwrap()
                .with_block(8);
            let mut longest = 0;
            for _ in 0..repeated {
                for features in by_frame.chunks(64 * bands) {
                    stream.feed(features).unwrap();
                    let rows = stream.layers.iter().map(LayerStream::held).max();
                    longest = longest.max(rows.unwrap_or(0)).max(stream.features.len() / bands);
                }
            }
            longest
        };
        let (short, long) = (longest(1), longest(5));
        assert!(short > 0 && long <= short + 64, "{short} {long}");
        // And what memory is said to be needed does not, either; without the limit it does.
        let bytes = |frames, context| encoder.stream_bytes(frames, context, DType::F32);
        assert_eq!(bytes(100_000, Some(4)), bytes(1_000_000, Some(4)));
        assert!(bytes(1_000_000, None) >= 10 * bytes(100_000, None));
    }
}
