//! What the values of a message are written as, and read from: of structures field by field, of enumerations a code and what the
//! variant holds.

use std::collections::BTreeMap;
use std::time::Duration;

use flow_kernels::device::DeviceChoice;
use flow_model::ParameterGroup;
use flow_model::model::MicroBatch;
use flow_model::parameter_groups::StatisticsPass;
use flow_nn::layers::convolution::BatchNorm;

use super::{Message, MessageReader, malformed_message};
use crate::concatenate::Concatenate;
use crate::error::TrainingError;
use crate::loaded_rows::RowRules;
use crate::long_texts::{OverLimit, TextLimit};
use crate::optimizer::AdamWConfig;
use crate::prompts::{PromptMode, PromptSettings};
use crate::ranks::{CollectiveKey, CollectiveOp, LoadedShare, OutOfMemory, RankReport, StepPlan};
use crate::row_losses::RowLoss;
use crate::schedule::{Recipe, Schedule};
use crate::settings::{ReduceDtype, ReduceEvery};
use crate::trainer::{BatchFigures, LoadedBatch, TrainerConfig};

/// A value of a message.
pub(in crate::ranks) trait Value: Sized {
    fn write(&self, message: &mut Message);

    /// # Errors
    /// Where the message is too short or holds something else.
    fn read(reader: &mut MessageReader) -> Result<Self, TrainingError>;

    /// Several, without their number.
    fn write_all(values: &[Self], message: &mut Message) {
        values.iter().for_each(|value| value.write(message));
    }

    /// `count` of them. Each has at least one byte, so a number above that of the bytes that are left is an error.
    ///
    /// # Errors
    /// Where the message is too short or holds something else.
    fn read_all(count: usize, reader: &mut MessageReader) -> Result<Vec<Self>, TrainingError> {
        if count > reader.left() {
            return Err(malformed_message());
        }
        (0..count).map(|_| Self::read(reader)).collect()
    }
}

macro_rules! numbers {
    ($($number:ty)*) => { $(
        impl Value for $number {
            fn write(&self, message: &mut Message) {
                message.bytes(&self.to_le_bytes());
            }

            fn read(reader: &mut MessageReader) -> Result<Self, TrainingError> {
                reader.array().map(<$number>::from_le_bytes)
            }

            fn write_all(values: &[Self], message: &mut Message) {
                message.bytes(bytemuck::cast_slice(values));
            }

            fn read_all(count: usize, reader: &mut MessageReader) -> Result<Vec<Self>, TrainingError> {
                reader.numbers(count)
            }
        }
    )* };
}

macro_rules! structures {
    ($($name:ident { $($field:ident),* })*) => { $(
        impl Value for $name {
            fn write(&self, message: &mut Message) {
                let $name { $($field),* } = self;
                $($field.write(message);)*
            }

            fn read(reader: &mut MessageReader) -> Result<Self, TrainingError> {
                Ok($name { $($field: reader.value()?),* })
            }
        }
    )* };
}

macro_rules! enumerations {
    ($($name:ident {
        $($code:literal $variant:ident $(($($item:ident),*))? $({ $($field:ident),* })?),*
    })*) => { $(
        impl Value for $name {
            fn write(&self, message: &mut Message) {
                match self {
                    $($name::$variant $(($($item),*))? $({ $($field),* })? => {
                        message.bytes(&[$code]);
                        $($($item.write(message);)*)?
                        $($($field.write(message);)*)?
                    })*
                }
            }

            fn read(reader: &mut MessageReader) -> Result<Self, TrainingError> {
                Ok(match reader.value::<u8>()? {
                    $($code => {
                        $($(let $item = reader.value()?;)*)?
                        $($(let $field = reader.value()?;)*)?
                        $name::$variant $(($($item),*))? $({ $($field),* })?
                    })*
                    _ => return Err(malformed_message()),
                })
            }
        }
    )* };
}

numbers!(u8 u32 u64 f32 f64);

structures! {
    StepPlan { step, planned, received, rounds }
    CollectiveKey { step, round, op }
    MicroBatch { signals, tokens, prompts }
    LoadedBatch { epoch, rank, micro, place, segments, joined, batch }
    BatchFigures { place, epoch, utterances, audio_samples, padded_seconds }
    LoadedShare { step, seconds, batches, lost, dropped, too_long }
    OutOfMemory { segments, seconds, tokens, parts }
    RankReport { loss, gradient_norm, skipped, bad_segments, tokens, flops_left_out, wait_seconds, out_of_memory, rows }
    RowLoss { segment, loss }
    Recipe { unfreeze_step, phase1, phase2 }
    AdamWConfig { betas, epsilon, weight_decay, eight_bit, master_weights }
    TextLimit { max_tokens, rule }
    Concatenate { gap_seconds, duration_factor, max_duration }
    RowRules { limit, concatenate }
    PromptSettings { default_prompt_mode, unified_auto_ratio, prompt_of }
    TrainerConfig {
        recipe, clip, ranks, fold_update, offload, rank_timeout, device, tf32, recompute, batch_norm, reduce_dtype,
        reduce_every, seed, spec_augment, dither, dropout, row_losses
    }
}

enumerations! {
    ParameterGroup { 0 Heads, 1 Prediction, 2 Layer(layer), 3 Subsampling }
    StatisticsPass { 0 Forward, 1 Backward }
    CollectiveOp {
        0 GatherMetrics, 1 GatherBatchNorm, 2 BroadcastParameters, 3 ReduceGradients(group), 4 GatherDevices,
        5 GatherStatistics(pass, layer)
    }
    Schedule {
        0 Cosine { base, minimum, warmup, constant, end },
        1 Noam { base, minimum, warmup, d_model },
        2 Constant { base, warmup }
    }
    BatchNorm { 0 OwnRows, 1 AllRanks, 2 Frozen }
    ReduceDtype { 0 F32, 1 Bf16 }
    ReduceEvery { 0 MicroBatch, 1 Step }
    OverLimit { 0 Reject, 1 Truncate }
    PromptMode { 0 LangId, 1 Auto, 2 Unified }
}

impl Value for bool {
    fn write(&self, message: &mut Message) {
        u8::from(*self).write(message);
    }

    fn read(reader: &mut MessageReader) -> Result<Self, TrainingError> {
        Ok(reader.value::<u8>()? != 0)
    }
}

impl Value for usize {
    fn write(&self, message: &mut Message) {
        (*self as u64).write(message);
    }

    fn read(reader: &mut MessageReader) -> Result<Self, TrainingError> {
        usize::try_from(reader.value::<u64>()?).map_err(|_| malformed_message())
    }
}

impl<const N: usize> Value for [u8; N] {
    fn write(&self, message: &mut Message) {
        message.bytes(self);
    }

    fn read(reader: &mut MessageReader) -> Result<Self, TrainingError> {
        reader.array()
    }
}

impl<T: Value> Value for Vec<T> {
    fn write(&self, message: &mut Message) {
        self.len().write(message);
        T::write_all(self, message);
    }

    fn read(reader: &mut MessageReader) -> Result<Self, TrainingError> {
        let count = reader.value()?;
        T::read_all(count, reader)
    }
}

impl Value for String {
    fn write(&self, message: &mut Message) {
        message.text(self);
    }

    fn read(reader: &mut MessageReader) -> Result<Self, TrainingError> {
        String::from_utf8(reader.value()?).map_err(|_| malformed_message())
    }
}

impl<T: Value> Value for Option<T> {
    fn write(&self, message: &mut Message) {
        self.is_some().write(message);
        self.iter().for_each(|value| value.write(message));
    }

    fn read(reader: &mut MessageReader) -> Result<Self, TrainingError> {
        reader.value::<bool>()?.then(|| reader.value()).transpose()
    }
}

impl<A: Value, B: Value> Value for (A, B) {
    fn write(&self, message: &mut Message) {
        self.0.write(message);
        self.1.write(message);
    }

    fn read(reader: &mut MessageReader) -> Result<Self, TrainingError> {
        Ok((reader.value()?, reader.value()?))
    }
}

impl<K: Value + Clone + Ord, V: Value + Clone> Value for BTreeMap<K, V> {
    fn write(&self, message: &mut Message) {
        let entries: Vec<(K, V)> = self.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
        entries.write(message);
    }

    fn read(reader: &mut MessageReader) -> Result<Self, TrainingError> {
        Ok(reader.value::<Vec<(K, V)>>()?.into_iter().collect())
    }
}

impl Value for Duration {
    fn write(&self, message: &mut Message) {
        self.as_secs_f64().write(message);
    }

    fn read(reader: &mut MessageReader) -> Result<Self, TrainingError> {
        Duration::try_from_secs_f64(reader.value()?).map_err(|_| malformed_message())
    }
}

impl Value for DeviceChoice {
    fn write(&self, message: &mut Message) {
        message.text(&self.to_string());
    }

    fn read(reader: &mut MessageReader) -> Result<Self, TrainingError> {
        reader.value::<String>()?.parse().map_err(|_| malformed_message())
    }
}
