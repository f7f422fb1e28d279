//! Decoding of a message.

use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use flow_model::ParameterGroup;
use flow_model::layers::convolution::BatchNorm;
use flow_model::model::MicroBatch;
use flow_model::parameter_groups::StatisticsPass;
use flow_model::tokenizer::Tokenizer;
use half::{bf16, f16};

use super::format::{DTYPES, malformed_message};
use crate::error::TrainingError;
use crate::long_texts::{OverLimit, TextLimit};
use crate::optimizer::AdamWConfig;
use crate::ranks::{CollectiveKey, CollectiveOp, OutOfMemory, RankReport, StepPlan};
use crate::schedule::{Recipe, Schedule};
use crate::settings::{ReduceDtype, ReduceEvery};
use crate::trainer::{LoadedBatch, TrainerConfig};

/// Reads a received message value by value, in the order in which [`super::Message`] was built.
///
/// # Errors
/// Every read fails where the message is too short or holds something else.
pub(in crate::ranks) struct MessageReader<'a>(&'a [u8]);

/// The most dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;

impl<'a> MessageReader<'a> {
    /// The kind of a message, and a reader of the rest.
    pub fn new(message: &'a [u8]) -> Result<(u8, MessageReader<'a>), TrainingError> {
        let mut reader = MessageReader(message);
        Ok((reader.u8()?, reader))
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8], TrainingError> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or_else(malformed_message)?;
        self.0 = rest;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], TrainingError> {
        self.take(N)?.try_into().map_err(|_| malformed_message())
    }

    pub fn u8(&mut self) -> Result<u8, TrainingError> {
        Ok(self.array::<1>()?[0])
    }

    pub fn bool(&mut self) -> Result<bool, TrainingError> {
        Ok(self.u8()? != 0)
    }

    pub fn u32(&mut self) -> Result<u32, TrainingError> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, TrainingError> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn count(&mut self) -> Result<usize, TrainingError> {
        usize::try_from(self.u64()?).map_err(|_| malformed_message())
    }

    pub fn f64(&mut self) -> Result<f64, TrainingError> {
        self.array().map(f64::from_le_bytes)
    }

    /// Bytes, after their count.
    pub fn counted(&mut self) -> Result<&'a [u8], TrainingError> {
        let length = self.count()?;
        self.take(length)
    }

    pub fn text(&mut self) -> Result<String, TrainingError> {
        String::from_utf8(self.counted()?.to_vec()).map_err(|_| malformed_message())
    }

    /// All bytes that are left.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }

    /// A list, after its length. Each item takes at least one byte, so a length above the bytes that are left is an
    /// error.
    pub fn list<T>(&mut self, read: impl Fn(&mut Self) -> Result<T, TrainingError>) -> Result<Vec<T>, TrainingError> {
        let count = self.count()?;
        if count > self.0.len() {
            return Err(malformed_message());
        }
        (0..count).map(|_| read(self)).collect()
    }

    fn numbers<T: bytemuck::Pod>(&mut self, count: usize) -> Result<Vec<T>, TrainingError> {
        let bytes = self.take(count.checked_mul(size_of::<T>()).ok_or_else(malformed_message)?)?;
        let mut numbers = vec![T::zeroed(); count];
        bytemuck::cast_slice_mut(&mut numbers).copy_from_slice(bytes);
        Ok(numbers)
    }

    pub fn tensor(&mut self) -> Result<Tensor, TrainingError> {
        let dtype = self.dtype()?;
        let dimensions = self.count()?;
        if dimensions > MAX_DIMENSIONS {
            return Err(malformed_message());
        }
        let shape = (0..dimensions).map(|_| self.count()).collect::<Result<Vec<_>, _>>()?;
        let count = shape.iter().try_fold(1usize, |all, &size| all.checked_mul(size));
        let count = count.ok_or_else(malformed_message)?;
        let cpu = &Device::Cpu;
        Ok(match dtype {
            DType::F32 => Tensor::from_vec(self.numbers::<f32>(count)?, shape, cpu)?,
            DType::F64 => Tensor::from_vec(self.numbers::<f64>(count)?, shape, cpu)?,
            DType::I64 => Tensor::from_vec(self.numbers::<i64>(count)?, shape, cpu)?,
            DType::U32 => Tensor::from_vec(self.numbers::<u32>(count)?, shape, cpu)?,
            DType::BF16 => {
                let bits = self.numbers::<u16>(count)?;
                Tensor::from_vec(bits.into_iter().map(bf16::from_bits).collect::<Vec<_>>(), shape, cpu)?
            }
            _ => {
                let bits = self.numbers::<u16>(count)?;
                Tensor::from_vec(bits.into_iter().map(f16::from_bits).collect::<Vec<_>>(), shape, cpu)?
            }
        })
    }

    pub fn dtype(&mut self) -> Result<DType, TrainingError> {
        DTYPES
            .get(usize::from(self.u8()?))
            .copied()
            .ok_or_else(malformed_message)
    }

    pub fn key(&mut self) -> Result<CollectiveKey, TrainingError> {
        let (step, round) = (self.u64()?, self.u32()?);
        let (op, layer) = (self.u8()?, self.count()?);
        let op = match op {
            0 => CollectiveOp::GatherMetrics,
            1 => CollectiveOp::GatherBatchNorm,
            2 => CollectiveOp::BroadcastParameters,
            3 => CollectiveOp::ReduceGradients(ParameterGroup::Heads),
            4 => CollectiveOp::ReduceGradients(ParameterGroup::Prediction),
            5 => CollectiveOp::ReduceGradients(ParameterGroup::Layer(layer)),
            6 => CollectiveOp::ReduceGradients(ParameterGroup::Subsampling),
            7 => CollectiveOp::GatherDevices,
            8 => CollectiveOp::GatherStatistics(StatisticsPass::Forward, layer),
            9 => CollectiveOp::GatherStatistics(StatisticsPass::Backward, layer),
            _ => return Err(malformed_message()),
        };
        Ok(CollectiveKey { step, round, op })
    }

    pub fn plan(&mut self) -> Result<StepPlan, TrainingError> {
        Ok(StepPlan {
            step: self.u64()?,
            planned: self.u32()?,
            received: self.count()?,
            rounds: self.u32()?,
        })
    }

    pub fn micro_batch(&mut self) -> Result<LoadedBatch, TrainingError> {
        Ok(LoadedBatch {
            epoch: self.u64()?,
            rank: self.u32()?,
            micro: self.u32()?,
            place: self.u32()?,
            segments: self.list(MessageReader::text)?,
            batch: self.clips()?,
        })
    }

    /// The signals and tokens of a micro-batch.
    pub fn clips(&mut self) -> Result<MicroBatch, TrainingError> {
        Ok(MicroBatch {
            signals: self.list(|reader| {
                let samples = reader.count()?;
                reader.numbers(samples)
            })?,
            tokens: self.list(MessageReader::tokens)?,
        })
    }

    pub fn tokens(&mut self) -> Result<Vec<u32>, TrainingError> {
        let tokens = self.count()?;
        self.numbers(tokens)
    }

    pub fn report(&mut self) -> Result<RankReport, TrainingError> {
        Ok(RankReport {
            loss: self.f64()?,
            gradient_norm: self.f64()?,
            skipped: self.bool()?,
            bad_segments: self.list(MessageReader::text)?,
            tokens: self.u64()?,
            flops_left_out: self.f64()?,
            wait_seconds: self.f64()?,
            out_of_memory: self.list(|reader| {
                Ok(OutOfMemory {
                    segments: reader.list(MessageReader::text)?,
                    seconds: reader.f64()?,
                    tokens: reader.u64()?,
                    parts: reader.u32()?,
                })
            })?,
        })
    }

    pub fn config(&mut self) -> Result<TrainerConfig, TrainingError> {
        let recipe = Recipe {
            unfreeze_step: self.u64()?,
            phase1: self.schedule()?,
            phase2: self.schedule()?,
        };
        let (clip, ranks) = (self.f64()?, self.u32()?);
        let rank_timeout = Duration::try_from_secs_f64(self.f64()?).map_err(|_| malformed_message())?;
        let device = self.text()?.parse().map_err(|_| malformed_message())?;
        Ok(TrainerConfig {
            recipe,
            clip,
            ranks,
            rank_timeout,
            device,
            seed: self.u64()?,
            fold_update: self.bool()?,
            offload: self.bool()?,
            tf32: self.bool()?,
            recompute: self.bool()?,
            spec_augment: self.bool()?,
            dither: self.bool()?,
            dropout: self.bool()?,
            batch_norm: match self.u8()? {
                0 => BatchNorm::OwnRows,
                1 => BatchNorm::AllRanks,
                2 => BatchNorm::Frozen,
                _ => return Err(malformed_message()),
            },
            reduce_dtype: match self.bool()? {
                true => ReduceDtype::Bf16,
                false => ReduceDtype::F32,
            },
            reduce_every: match self.bool()? {
                true => ReduceEvery::Step,
                false => ReduceEvery::MicroBatch,
            },
        })
    }

    fn schedule(&mut self) -> Result<Schedule, TrainingError> {
        Ok(match self.u8()? {
            0 => Schedule::Cosine {
                base: self.f64()?,
                minimum: self.f64()?,
                warmup: self.u64()?,
                constant: self.u64()?,
                end: self.u64()?,
            },
            1 => Schedule::Noam {
                base: self.f64()?,
                minimum: self.f64()?,
                warmup: self.u64()?,
                d_model: self.u64()?,
            },
            2 => Schedule::Constant {
                base: self.f64()?,
                warmup: self.u64()?,
            },
            _ => return Err(malformed_message()),
        })
    }

    pub fn own_batches(&mut self) -> Result<Option<(TextLimit, Tokenizer)>, TrainingError> {
        if !self.bool()? {
            return Ok(None);
        }
        let max_tokens = self.count()?;
        let rule = match self.bool()? {
            true => OverLimit::Reject,
            false => OverLimit::Truncate,
        };
        let tokenizer = Tokenizer::from_bytes(self.counted()?)?;
        Ok(Some((TextLimit { max_tokens, rule }, tokenizer)))
    }

    pub fn adamw(&mut self) -> Result<AdamWConfig, TrainingError> {
        Ok(AdamWConfig {
            betas: (self.f64()?, self.f64()?),
            epsilon: self.f64()?,
            weight_decay: self.f64()?,
            eight_bit: self.bool()?,
            master_weights: self.bool()?,
        })
    }
}
