//! What a rank does where the device has no memory left for a micro-batch: it computes its layers again in the backward
//! pass, which takes less memory and gives the same bits; and then divides it, once and again, down to single clips.
//!
//! The loss of a part is normalised over the whole micro-batch, so gradients are those of the whole, up to rounding, for the
//! same random numbers; but batch normalisation of an encoder that learns has the statistics of each part.

use std::borrow::Cow;
use std::collections::BTreeMap;

use flow_kernels::device::{is_out_of_memory, release_memory};
use flow_model::Gradients;
use flow_model::model::{MicroBatch, MicroBatchOutput, PartOf, TdtModel, TrainOptions};
use flow_model::parameter_groups::PassObserver;

use crate::error::TrainingError;
use crate::trainer::{LoadedBatch, SAMPLE_RATE};

/// A micro-batch for which the device had no memory left.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OutOfMemory {
    pub segments: Vec<String>,
    /// Seconds of the longest clip.
    pub seconds: f64,
    /// Target tokens of the longest text.
    pub tokens: u64,
    /// How many parts it is computed in next; 1 where its layers are computed again in the backward pass first.
    pub parts: u32,
}

/// How the micro-batches of a step are computed, by their number, where it is not as they come.
#[derive(Debug, Default)]
pub(super) struct Remedies {
    parts: BTreeMap<u32, usize>,
    pub events: Vec<OutOfMemory>,
}

impl Remedies {
    /// How many parts micro-batch `round` is computed in, and whether its layers are computed again.
    pub fn of(&self, round: u32) -> (usize, bool) {
        let parts = self.parts.get(&round);
        (parts.copied().unwrap_or(1), parts.is_some())
    }

    /// Takes what is next for a micro-batch that found no memory. `frozen`: whether the encoder does not learn. `spent`: why it
    /// cannot be computed again, if so.
    ///
    /// # Errors
    /// `error`, if it is of another kind; and where a single clip does not fit, or the micro-batch cannot be computed again.
    pub fn after(
        &mut self,
        error: flow_model::Error,
        (step, round): (u64, u32),
        loaded: &LoadedBatch,
        (model, frozen): (&TdtModel, bool),
        spent: Option<&str>,
    ) -> Result<(), TrainingError> {
        if !is_out_of_memory(&error) {
            return Err(error.into());
        }
        let MicroBatch { signals, tokens, .. } = &loaded.batch;
        let longest = signals.iter().map(Vec::len).max().unwrap_or(0) as f64 / SAMPLE_RATE;
        let most = tokens.iter().map(Vec::len).max().unwrap_or(0);
        let clips = signals.len();
        if let Some(why) = spent {
            return Err(TrainingError::refused(
                format!(
                    "step {}: the device has no memory left for {clips} clips of up to {longest:.1} s and {most} tokens, and \
                     they cannot be computed again in parts: {why} (segments {})",
                    step + 1,
                    loaded.segments.join(", ")
                ),
                "lower `max_batch_seconds`, or set `recompute: true` or `offload: true`; `flow memory PIPELINE \
                     --device-memory SIZE` says what needs how much",
            ));
        }
        let (parts, recomputed) = self.of(round);
        // A frozen encoder keeps nothing for the backward pass.
        let divides = recomputed || frozen || model.recomputes();
        let next = if divides { (2 * parts).min(clips) } else { 1 };
        if divides && next == parts {
            return Err(TrainingError::refused(
                format!(
                    "step {}: the device has no memory left for one clip: the longest of its micro-batch has {longest:.1} s, \
                     and its texts have up to {most} tokens (segments {})",
                    step + 1,
                    loaded.segments.join(", ")
                ),
                "lower `max_duration` or `max_tokens`, or set `optimizer: adamw8bit` or `offload: true`; `flow memory \
                     PIPELINE --device-memory SIZE` says what needs how much",
            ));
        }
        self.parts.insert(round, next);
        self.events.push(OutOfMemory {
            segments: loaded.segments.clone(),
            seconds: longest,
            tokens: most as u64,
            parts: next as u32,
        });
        release_memory(model.parameters.device())?;
        Ok(())
    }
}

/// An error of a step. Where a device had no memory left and nothing more can be done, it says what to do.
pub(super) fn named(error: TrainingError, step: u64, at: &str) -> TrainingError {
    if !is_out_of_memory(&error) || matches!(error, TrainingError::Rank { .. }) {
        return error;
    }
    TrainingError::refused(
        format!("step {}: the device has no memory left {at} ({error})", step + 1),
        "set `optimizer: adamw8bit`, `offload: true` or `recompute: true`, or make micro-batches smaller; `flow memory \
             PIPELINE --device-memory SIZE` says what needs how much",
    )
}

/// Computes a micro-batch in so many parts. `before` is called before each with whether it is the last, of which alone the
/// gradients of the whole are complete.
pub(super) fn train_in_parts<O: PassObserver + Send>(
    model: &mut TdtModel,
    batch: &MicroBatch,
    (parts, again): (usize, bool),
    options: &TrainOptions,
    gradients: &mut Gradients,
    observer: &mut O,
    before: fn(&mut O, bool),
) -> flow_model::Result<MicroBatchOutput> {
    let recomputes = model.recomputes();
    model.set_recompute(recomputes || again);
    let clips = batch.signals.len();
    let mut whole: Option<MicroBatchOutput> = None;
    let mut all = || -> flow_model::Result<()> {
        for number in 0..parts {
            let range = number * clips / parts..(number + 1) * clips / parts;
            let part = match parts {
                1 => Cow::Borrowed(batch),
                _ => Cow::Owned(MicroBatch {
                    signals: batch.signals[range.clone()].to_vec(),
                    tokens: batch.tokens[range.clone()].to_vec(),
                    // All of them, or none.
                    prompts: batch.prompts.get(range).unwrap_or_default().to_vec(),
                }),
            };
            let options = TrainOptions {
                part: (parts > 1).then(|| PartOf {
                    number: number as u64,
                    utterances: clips,
                    tokens: batch.tokens.iter().map(Vec::len).sum(),
                }),
                ..options.clone()
            };
            before(observer, number + 1 == parts);
            let output = model.train_micro_batch_observed(&part, &options, gradients, observer)?;
            let finite = output.loss.is_finite();
            match &mut whole {
                None => whole = Some(output),
                Some(whole) => join(whole, output),
            }
            if !finite {
                // The step is skipped.
                break;
            }
        }
        Ok(())
    };
    let outcome = all();
    model.set_recompute(recomputes);
    outcome?;
    whole.ok_or_else(|| flow_model::Error::Input("a micro-batch has no parts".into()))
}

pub(super) fn join(whole: &mut MicroBatchOutput, part: MicroBatchOutput) {
    let MicroBatchOutput {
        loss,
        losses,
        ctc_loss,
        frames,
        padded_frames,
        tokens,
        flops_left_out,
    } = part;
    whole.loss += loss;
    whole.losses.extend(losses);
    whole.ctc_loss = whole.ctc_loss.zip(ctc_loss).map(|(whole, part)| whole + part);
    whole.frames.extend(frames);
    whole.padded_frames += padded_frames;
    whole.tokens += tokens;
    whole.flops_left_out += flops_left_out;
}
