//! Encoding of a message.

use std::io::{self, Write};

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use flow_kernels::device::moved;
use flow_model::ParameterGroup;
use flow_model::layers::convolution::BatchNorm;
use flow_model::model::MicroBatch;
use flow_model::parameter_groups::StatisticsPass;
use flow_model::tokenizer::Tokenizer;
use flow_runtime::processes::Payload;
use half::slice::HalfFloatSliceExt;

use super::format::dtype_code;
use crate::error::TrainingError;
use crate::long_texts::{OverLimit, TextLimit};
use crate::optimizer::AdamWConfig;
use crate::ranks::{CollectiveKey, CollectiveOp, RankReport, StepPlan};
use crate::schedule::{Recipe, Schedule};
use crate::settings::{ReduceDtype, ReduceEvery};
use crate::trainer::{LoadedBatch, TrainerConfig};

/// A message that is built value by value. Tensors are referenced, and written when the message is sent.
#[derive(Clone, Default)]
pub(in crate::ranks) struct Message {
    pieces: Vec<Piece>,
    size: u64,
}

#[derive(Clone)]
enum Piece {
    Bytes(Vec<u8>),
    /// Contiguous, on the CPU.
    Tensor(Tensor),
}

impl Message {
    /// A message of a kind, which is its first byte.
    pub fn new(kind: u8) -> Message {
        let mut message = Message::default();
        message.u8(kind);
        message
    }

    /// Appends bytes without their count.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.size += bytes.len() as u64;
        if let Some(Piece::Bytes(last)) = self.pieces.last_mut() {
            last.extend_from_slice(bytes);
        } else {
            self.pieces.push(Piece::Bytes(bytes.to_vec()));
        }
    }

    /// Appends bytes after their count.
    pub fn counted(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.bytes(bytes);
    }

    pub fn u8(&mut self, number: u8) {
        self.bytes(&[number]);
    }

    pub fn bool(&mut self, value: bool) {
        self.u8(u8::from(value));
    }

    pub fn u32(&mut self, number: u32) {
        self.bytes(&number.to_le_bytes());
    }

    pub fn u64(&mut self, number: u64) {
        self.bytes(&number.to_le_bytes());
    }

    pub fn count(&mut self, number: usize) {
        self.u64(number as u64);
    }

    pub fn f64(&mut self, number: f64) {
        self.bytes(&number.to_le_bytes());
    }

    /// Appends a text after its length.
    pub fn text(&mut self, text: &str) {
        self.counted(text.as_bytes());
    }

    /// Appends a tensor: data type, shape, elements in row-major order.
    ///
    /// # Errors
    /// Where its data type is not sent, or it cannot be copied to host memory.
    pub fn tensor(&mut self, tensor: &Tensor) -> Result<(), TrainingError> {
        let tensor = moved(tensor, &Device::Cpu)?.contiguous()?;
        self.u8(dtype_code(tensor.dtype())?);
        self.count(tensor.dims().len());
        for &size in tensor.dims() {
            self.count(size);
        }
        self.size += (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64;
        self.pieces.push(Piece::Tensor(tensor));
        Ok(())
    }

    pub fn key(&mut self, key: CollectiveKey) {
        self.u64(key.step);
        self.u32(key.round);
        let (op, layer) = match key.op {
            CollectiveOp::GatherMetrics => (0, 0),
            CollectiveOp::GatherBatchNorm => (1, 0),
            CollectiveOp::BroadcastParameters => (2, 0),
            CollectiveOp::ReduceGradients(ParameterGroup::Heads) => (3, 0),
            CollectiveOp::ReduceGradients(ParameterGroup::Prediction) => (4, 0),
            CollectiveOp::ReduceGradients(ParameterGroup::Layer(number)) => (5, number),
            CollectiveOp::ReduceGradients(ParameterGroup::Subsampling) => (6, 0),
            CollectiveOp::GatherDevices => (7, 0),
            CollectiveOp::GatherStatistics(StatisticsPass::Forward, layer) => (8, layer),
            CollectiveOp::GatherStatistics(StatisticsPass::Backward, layer) => (9, layer),
        };
        self.u8(op);
        self.count(layer);
    }

    pub fn plan(&mut self, plan: &StepPlan) {
        let StepPlan {
            step,
            planned,
            received,
            rounds,
        } = *plan;
        self.u64(step);
        self.u32(planned);
        self.count(received);
        self.u32(rounds);
    }

    pub fn micro_batch(&mut self, loaded: &LoadedBatch) {
        let LoadedBatch {
            epoch,
            rank,
            micro,
            place,
            segments,
            batch,
        } = loaded;
        self.u64(*epoch);
        for number in [rank, micro, place] {
            self.u32(*number);
        }
        self.count(segments.len());
        segments.iter().for_each(|segment| self.text(segment));
        self.clips(batch);
    }

    /// The signals and tokens of a micro-batch.
    pub fn clips(&mut self, MicroBatch { signals, tokens }: &MicroBatch) {
        self.count(signals.len());
        for signal in signals {
            self.count(signal.len());
            self.bytes(bytemuck::cast_slice(signal));
        }
        self.all_tokens(tokens);
    }

    /// A list of lists of tokens.
    pub fn all_tokens(&mut self, tokens: &[Vec<u32>]) {
        self.count(tokens.len());
        for tokens in tokens {
            self.count(tokens.len());
            self.bytes(bytemuck::cast_slice(tokens));
        }
    }

    pub fn report(&mut self, report: &RankReport) {
        let RankReport {
            loss,
            gradient_norm,
            skipped,
            bad_segments,
            tokens,
            flops_left_out,
            wait_seconds,
            out_of_memory,
        } = report;
        self.f64(*loss);
        self.f64(*gradient_norm);
        self.bool(*skipped);
        self.count(bad_segments.len());
        bad_segments.iter().for_each(|segment| self.text(segment));
        self.u64(*tokens);
        self.f64(*flops_left_out);
        self.f64(*wait_seconds);
        self.count(out_of_memory.len());
        for event in out_of_memory {
            self.count(event.segments.len());
            event.segments.iter().for_each(|segment| self.text(segment));
            self.f64(event.seconds);
            self.u64(event.tokens);
            self.u32(event.parts);
        }
    }

    pub fn config(&mut self, config: &TrainerConfig) {
        let TrainerConfig {
            recipe:
                Recipe {
                    unfreeze_step,
                    phase1,
                    phase2,
                },
            clip,
            ranks,
            fold_update,
            offload,
            rank_timeout,
            device,
            tf32,
            recompute,
            batch_norm,
            reduce_dtype,
            reduce_every,
            seed,
            spec_augment,
            dither,
            dropout,
        } = config;
        self.u64(*unfreeze_step);
        self.schedule(phase1);
        self.schedule(phase2);
        self.f64(*clip);
        self.u32(*ranks);
        self.f64(rank_timeout.as_secs_f64());
        self.text(&device.to_string());
        self.u64(*seed);
        for flag in [fold_update, offload, tf32, recompute, spec_augment, dither, dropout] {
            self.bool(*flag);
        }
        self.u8(match batch_norm {
            BatchNorm::OwnRows => 0,
            BatchNorm::AllRanks => 1,
            BatchNorm::Frozen => 2,
        });
        self.bool(*reduce_dtype == ReduceDtype::Bf16);
        self.bool(*reduce_every == ReduceEvery::Step);
    }

    fn schedule(&mut self, schedule: &Schedule) {
        match *schedule {
            Schedule::Cosine {
                base,
                minimum,
                warmup,
                constant,
                end,
            } => {
                self.u8(0);
                self.f64(base);
                self.f64(minimum);
                self.u64(warmup);
                self.u64(constant);
                self.u64(end);
            }
            Schedule::Noam {
                base,
                minimum,
                warmup,
                d_model,
            } => {
                self.u8(1);
                self.f64(base);
                self.f64(minimum);
                self.u64(warmup);
                self.u64(d_model);
            }
            Schedule::Constant { base, warmup } => {
                self.u8(2);
                self.f64(base);
                self.u64(warmup);
            }
        }
    }

    /// Whether the process loads the micro-batches of its ranks, and by which rules.
    pub fn own_batches(&mut self, limit: Option<TextLimit>, tokenizer: Option<&Tokenizer>) {
        let (Some(TextLimit { max_tokens, rule }), Some(tokenizer)) = (limit, tokenizer) else {
            return self.bool(false);
        };
        self.bool(true);
        self.count(max_tokens);
        self.bool(rule == OverLimit::Reject);
        self.counted(tokenizer.bytes());
    }

    pub fn adamw(&mut self, config: &AdamWConfig) {
        let AdamWConfig {
            betas,
            epsilon,
            weight_decay,
            eight_bit,
            master_weights,
        } = *config;
        for number in [betas.0, betas.1, epsilon, weight_decay] {
            self.f64(number);
        }
        self.bool(eight_bit);
        self.bool(master_weights);
    }

    pub fn dtype(&mut self, dtype: DType) -> Result<(), TrainingError> {
        self.u8(dtype_code(dtype)?);
        Ok(())
    }
}

impl Payload for Message {
    fn size(&self) -> u64 {
        self.size
    }

    fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        for piece in &self.pieces {
            match piece {
                Piece::Bytes(bytes) => to.write_all(bytes)?,
                Piece::Tensor(tensor) => write_tensor(tensor, to)?,
            }
        }
        Ok(())
    }
}

fn write_tensor(tensor: &Tensor, to: &mut dyn Write) -> io::Result<()> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(numbers), Some((from, end))) = (&*storage, layout.contiguous_offsets()) else {
        return Err(io::Error::other("a tensor that is not contiguous on the CPU"));
    };
    match numbers {
        CpuStorage::F32(numbers) => to.write_all(bytemuck::cast_slice(&numbers[from..end])),
        CpuStorage::F64(numbers) => to.write_all(bytemuck::cast_slice(&numbers[from..end])),
        CpuStorage::I64(numbers) => to.write_all(bytemuck::cast_slice(&numbers[from..end])),
        CpuStorage::U32(numbers) => to.write_all(bytemuck::cast_slice(&numbers[from..end])),
        CpuStorage::BF16(numbers) => {
            let bits: &[u16] = numbers[from..end].reinterpret_cast();
            to.write_all(bytemuck::cast_slice(bits))
        }
        CpuStorage::F16(numbers) => {
            let bits: &[u16] = numbers[from..end].reinterpret_cast();
            to.write_all(bytemuck::cast_slice(bits))
        }
        _ => Err(io::Error::other("a tensor of a type that is not sent")),
    }
}
