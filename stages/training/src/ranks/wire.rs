//! How what ranks exchange is written for another process, and read there.
//!
//! Numbers are little-endian, as on every machine that takes part (the greeting of the processes sees to it). What is read
//! is checked against the bytes that are there: lengths are never believed.

use std::io::{self, Write};

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use flow_model::Part;
use flow_model::model::MicroBatch;
use flow_runtime::processes::Body;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::{Place, RankReport, StepPlan, What};
use crate::error::TrainingError;
use crate::optimizer::AdamWConfig;
use crate::schedule::{Recipe, Schedule};
use crate::trainer::{LoadedBatch, TrainerConfig};

/// A message in the making. Tensors are not copied into it.
#[derive(Clone, Default)]
pub(super) struct Parcel {
    pieces: Vec<Piece>,
    size: u64,
}

#[derive(Clone)]
enum Piece {
    Bytes(Vec<u8>),
    /// Contiguous, on the CPU.
    Tensor(Tensor),
}

impl Parcel {
    /// A message that begins with this number, which says what it is.
    pub fn of(kind: u8) -> Parcel {
        let mut parcel = Parcel::default();
        parcel.u8(kind);
        parcel
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.size += bytes.len() as u64;
        if let Some(Piece::Bytes(last)) = self.pieces.last_mut() {
            last.extend_from_slice(bytes);
        } else {
            self.pieces.push(Piece::Bytes(bytes.to_vec()));
        }
    }

    pub fn u8(&mut self, number: u8) {
        self.bytes(&[number]);
    }

    pub fn bool(&mut self, is: bool) {
        self.u8(u8::from(is));
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

    pub fn text(&mut self, text: &str) {
        self.count(text.len());
        self.bytes(text.as_bytes());
    }

    pub fn tensor(&mut self, tensor: &Tensor) -> Result<(), TrainingError> {
        let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?;
        self.u8(code(tensor.dtype())?);
        self.count(tensor.dims().len());
        for &size in tensor.dims() {
            self.count(size);
        }
        self.size += (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64;
        self.pieces.push(Piece::Tensor(tensor));
        Ok(())
    }

    pub fn place(&mut self, place: Place) {
        self.u64(place.step);
        self.u32(place.round);
        let (what, layer) = match place.what {
            What::Figures => (0, 0),
            What::Statistics => (1, 0),
            What::Parameters => (2, 0),
            What::Gradients(Part::Heads) => (3, 0),
            What::Gradients(Part::Prediction) => (4, 0),
            What::Gradients(Part::Layer(number)) => (5, number),
            What::Gradients(Part::Subsampling) => (6, 0),
        };
        self.u8(what);
        self.count(layer);
    }

    pub fn plan(&mut self, plan: &StepPlan) {
        let StepPlan {
            step,
            planned,
            came,
            rounds,
        } = *plan;
        self.u64(step);
        self.u32(planned);
        self.count(came);
        self.u32(rounds);
    }

    pub fn micro_batch(&mut self, loaded: &LoadedBatch) {
        let LoadedBatch {
            epoch,
            rank,
            micro,
            place,
            segments,
            batch: MicroBatch { signals, tokens },
        } = loaded;
        self.u64(*epoch);
        for number in [rank, micro, place] {
            self.u32(*number);
        }
        self.count(segments.len());
        segments.iter().for_each(|segment| self.text(segment));
        self.count(signals.len());
        for signal in signals {
            self.count(signal.len());
            self.bytes(bytemuck::cast_slice(signal));
        }
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
            bad,
            tokens,
            waited,
        } = report;
        self.f64(*loss);
        self.f64(*gradient_norm);
        self.bool(*skipped);
        self.count(bad.len());
        bad.iter().for_each(|segment| self.text(segment));
        self.u64(*tokens);
        self.f64(*waited);
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
            rank_timeout,
            recompute,
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
        self.u64(*seed);
        for is in [fold_update, recompute, spec_augment, dither, dropout] {
            self.bool(*is);
        }
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

    pub fn adamw(&mut self, config: &AdamWConfig) {
        let AdamWConfig {
            betas,
            epsilon,
            weight_decay,
            eight_bit,
        } = *config;
        for number in [betas.0, betas.1, epsilon, weight_decay] {
            self.f64(number);
        }
        self.bool(eight_bit);
    }

    pub fn dtype(&mut self, dtype: DType) -> Result<(), TrainingError> {
        self.u8(code(dtype)?);
        Ok(())
    }
}

impl Body for Parcel {
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

const DTYPES: [DType; 6] = [DType::F32, DType::F64, DType::I64, DType::U32, DType::BF16, DType::F16];

fn code(dtype: DType) -> Result<u8, TrainingError> {
    let at = DTYPES.iter().position(|known| *known == dtype);
    at.map(|at| at as u8).ok_or_else(|| TrainingError::Data {
        message: format!("tensors of type {dtype:?} are not sent between processes"),
    })
}

/// A message that came.
pub(super) struct Reader<'a>(&'a [u8]);

/// The most dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;

impl<'a> Reader<'a> {
    /// The message, and the number that says what it is.
    pub fn new(message: &'a [u8]) -> Result<(u8, Reader<'a>), TrainingError> {
        let mut reader = Reader(message);
        Ok((reader.u8()?, reader))
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8], TrainingError> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or_else(damaged)?;
        self.0 = rest;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], TrainingError> {
        self.take(N)?.try_into().map_err(|_| damaged())
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
        usize::try_from(self.u64()?).map_err(|_| damaged())
    }

    pub fn f64(&mut self) -> Result<f64, TrainingError> {
        self.array().map(f64::from_le_bytes)
    }

    pub fn text(&mut self) -> Result<String, TrainingError> {
        let length = self.count()?;
        String::from_utf8(self.take(length)?.to_vec()).map_err(|_| damaged())
    }

    /// All that is left.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }

    /// Several things, each by `read`. Each takes a byte at least, so a number beyond the bytes that are left is damage.
    pub fn several<T>(
        &mut self,
        read: impl Fn(&mut Self) -> Result<T, TrainingError>,
    ) -> Result<Vec<T>, TrainingError> {
        let count = self.count()?;
        if count > self.0.len() {
            return Err(damaged());
        }
        (0..count).map(|_| read(self)).collect()
    }

    fn numbers<T: bytemuck::Pod>(&mut self, count: usize) -> Result<Vec<T>, TrainingError> {
        let bytes = self.take(count.checked_mul(size_of::<T>()).ok_or_else(damaged)?)?;
        let mut numbers = vec![T::zeroed(); count];
        bytemuck::cast_slice_mut(&mut numbers).copy_from_slice(bytes);
        Ok(numbers)
    }

    pub fn tensor(&mut self) -> Result<Tensor, TrainingError> {
        let dtype = self.dtype()?;
        let dimensions = self.count()?;
        if dimensions > MAX_DIMENSIONS {
            return Err(damaged());
        }
        let shape = (0..dimensions).map(|_| self.count()).collect::<Result<Vec<_>, _>>()?;
        let count = shape.iter().try_fold(1usize, |all, &size| all.checked_mul(size));
        let count = count.ok_or_else(damaged)?;
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
        DTYPES.get(usize::from(self.u8()?)).copied().ok_or_else(damaged)
    }

    pub fn place(&mut self) -> Result<Place, TrainingError> {
        let (step, round) = (self.u64()?, self.u32()?);
        let (what, layer) = (self.u8()?, self.count()?);
        let what = match what {
            0 => What::Figures,
            1 => What::Statistics,
            2 => What::Parameters,
            3 => What::Gradients(Part::Heads),
            4 => What::Gradients(Part::Prediction),
            5 => What::Gradients(Part::Layer(layer)),
            6 => What::Gradients(Part::Subsampling),
            _ => return Err(damaged()),
        };
        Ok(Place { step, round, what })
    }

    pub fn plan(&mut self) -> Result<StepPlan, TrainingError> {
        Ok(StepPlan {
            step: self.u64()?,
            planned: self.u32()?,
            came: self.count()?,
            rounds: self.u32()?,
        })
    }

    pub fn micro_batch(&mut self) -> Result<LoadedBatch, TrainingError> {
        Ok(LoadedBatch {
            epoch: self.u64()?,
            rank: self.u32()?,
            micro: self.u32()?,
            place: self.u32()?,
            segments: self.several(Reader::text)?,
            batch: MicroBatch {
                signals: self.several(|reader| {
                    let samples = reader.count()?;
                    reader.numbers(samples)
                })?,
                tokens: self.several(|reader| {
                    let tokens = reader.count()?;
                    reader.numbers(tokens)
                })?,
            },
        })
    }

    pub fn report(&mut self) -> Result<RankReport, TrainingError> {
        Ok(RankReport {
            loss: self.f64()?,
            gradient_norm: self.f64()?,
            skipped: self.bool()?,
            bad: self.several(Reader::text)?,
            tokens: self.u64()?,
            waited: self.f64()?,
        })
    }

    pub fn config(&mut self) -> Result<TrainerConfig, TrainingError> {
        let recipe = Recipe {
            unfreeze_step: self.u64()?,
            phase1: self.schedule()?,
            phase2: self.schedule()?,
        };
        let (clip, ranks) = (self.f64()?, self.u32()?);
        let rank_timeout = std::time::Duration::try_from_secs_f64(self.f64()?).map_err(|_| damaged())?;
        Ok(TrainerConfig {
            recipe,
            clip,
            ranks,
            rank_timeout,
            seed: self.u64()?,
            fold_update: self.bool()?,
            recompute: self.bool()?,
            spec_augment: self.bool()?,
            dither: self.bool()?,
            dropout: self.bool()?,
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
            _ => return Err(damaged()),
        })
    }

    pub fn adamw(&mut self) -> Result<AdamWConfig, TrainingError> {
        Ok(AdamWConfig {
            betas: (self.f64()?, self.f64()?),
            epsilon: self.f64()?,
            weight_decay: self.f64()?,
            eight_bit: self.bool()?,
        })
    }
}

pub(super) fn damaged() -> TrainingError {
    TrainingError::Data {
        message: "what another process sent cannot be read".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(parcel: &Parcel) -> Vec<u8> {
        let mut bytes = Vec::new();
        parcel.write(&mut bytes).unwrap();
        assert_eq!(bytes.len() as u64, parcel.size());
        bytes
    }

    fn parcel() -> Parcel {
        let mut parcel = Parcel::of(9);
        for dtype in DTYPES {
            let numbers = Tensor::new(&[[1.5f32, 2.0, 0.0], [7.0, 1.0, 3.0]], &Device::Cpu).unwrap();
            parcel.tensor(&numbers.to_dtype(dtype).unwrap().t().unwrap()).unwrap();
        }
        parcel.tensor(&Tensor::new(3i64, &Device::Cpu).unwrap()).unwrap();
        parcel.place(Place {
            step: 5,
            round: 2,
            what: What::Gradients(Part::Layer(17)),
        });
        parcel.micro_batch(&loaded());
        parcel.report(&report());
        parcel.config(&config());
        parcel.adamw(&AdamWConfig::default());
        parcel
    }

    fn loaded() -> LoadedBatch {
        LoadedBatch {
            epoch: 3,
            rank: 1,
            micro: 2,
            place: 4,
            segments: vec!["a".into(), String::new()],
            batch: MicroBatch {
                signals: vec![vec![0.25, -1.0], vec![]],
                tokens: vec![vec![], vec![7, 8, 9]],
            },
        }
    }

    fn report() -> RankReport {
        RankReport {
            loss: f64::INFINITY,
            gradient_norm: 0.1,
            skipped: true,
            bad: vec!["b".into()],
            tokens: 12,
            waited: 0.5,
        }
    }

    fn config() -> TrainerConfig {
        TrainerConfig {
            recipe: Recipe {
                unfreeze_step: 3,
                phase1: Schedule::Constant { base: 0.1, warmup: 4 },
                phase2: Schedule::Cosine {
                    base: 1e-3 / 3.0,
                    minimum: 1e-6,
                    warmup: 5,
                    constant: 6,
                    end: 7,
                },
            },
            clip: 1.0 / 3.0,
            ranks: 4,
            fold_update: false,
            rank_timeout: std::time::Duration::from_millis(1500),
            recompute: true,
            seed: u64::MAX,
            spec_augment: true,
            dither: false,
            dropout: true,
        }
    }

    fn read(bytes: &[u8]) -> Result<(), TrainingError> {
        let (kind, mut reader) = Reader::new(bytes)?;
        assert_eq!(kind, 9);
        for dtype in DTYPES {
            let tensor = reader.tensor()?;
            assert_eq!((tensor.dtype(), tensor.dims()), (dtype, &[3, 2][..]));
            let expected = if dtype.is_float() { 1.5 } else { 1.0 };
            let numbers = tensor.to_dtype(DType::F64)?.to_vec2::<f64>()?;
            assert_eq!(numbers, [[expected, 7.0], [2.0, 1.0], [0.0, 3.0]]);
        }
        assert_eq!(reader.tensor()?.to_scalar::<i64>()?, 3);
        assert_eq!(
            reader.place()?.to_string(),
            "the gradients of encoder layer 17, micro-batch 2, step 5"
        );
        assert_eq!(reader.micro_batch()?, loaded());
        assert_eq!(reader.report()?, report());
        assert_eq!(reader.config()?, config());
        assert_eq!(reader.adamw()?, AdamWConfig::default());
        assert!(reader.rest().is_empty());
        Ok(())
    }

    #[test]
    fn what_is_written_is_read_to_the_bit_and_what_is_cut_is_an_error() {
        let bytes = written(&parcel());
        read(&bytes).unwrap();
        for length in 0..bytes.len() {
            assert!(read(&bytes[..length]).is_err(), "{length} bytes");
        }
    }

    /// Lengths that lie are errors, and no memory is asked for on their word.
    #[test]
    fn damaged_messages_are_errors_and_never_panic() {
        let bytes = written(&parcel());
        for at in 1..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] = 0xff;
            let mut reader = Reader::new(&damaged).unwrap().1;
            let _ = (|| -> Result<(), TrainingError> {
                for _ in 0..=DTYPES.len() {
                    reader.tensor()?;
                }
                reader.place()?;
                reader.micro_batch()?;
                reader.report()?;
                reader.config()?;
                reader.adamw()?;
                Ok(())
            })();
        }
    }
}
