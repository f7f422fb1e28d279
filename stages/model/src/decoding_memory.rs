//! Prediction of the memory that a model needs for decoding.
//!
//! Weights are counted from their shapes. What a batch needs beside them is measured and not computed by formulas, which would have
//! to follow every change of a kernel: batches of noise go through the encoder with its first layer alone, as layers come one after
//! another and keep nothing, while the allocator counts. What the search needs behind the encoder is a few rows of the vocabulary's
//! size.

use std::collections::HashMap;

use candle_core::{DType, Device};
use flow_kernels::Noise;
use flow_kernels::threads::install;

use crate::allocation::Count;
use crate::checkpoint::{OpenModel, TensorEntry, TensorSource};
use crate::model::TdtModel;
use crate::{Error, ModelConfig, Precision, Result, Weights};

/// Longer windows are not measured: attention grows with their square. 40 s at 10 ms for a frame of features.
const MEASURED_FRAMES: f64 = 4_000.0;

/// The shortest windows that fill a batch, in seconds.
const SHORTEST: f64 = 1.0;

/// Bytes of the tensors of a model that is loaded with its matrices stored as `weights` and its products in `precision`: all are of 32
/// bits, but for matrices, and those that low precision is for.
pub fn weight_bytes(opened: &OpenModel, weights: Weights, precision: Precision) -> u64 {
    let bytes = opened
        .tensors
        .iter()
        .map(|tensor| tensor_bytes(tensor, weights, precision));
    bytes.fold(0, u64::saturating_add)
}

/// What [`weight_bytes`] is the sum of, for models that share tensors ([`TdtModel::load_for_decoding`]).
#[derive(Clone, Debug, Default)]
pub struct WeightParts {
    own: u64,
    of_files: HashMap<TensorSource, u64>,
}

impl WeightParts {
    /// Those of a model.
    pub fn of(opened: &OpenModel, weights: Weights, precision: Precision) -> Self {
        let mut parts = Self::default();
        for tensor in &opened.tensors {
            let bytes = tensor_bytes(tensor, weights, precision);
            let all = match tensor.source() {
                Some(source) => parts.of_files.entry(source).or_default(),
                None => &mut parts.own,
            };
            *all = all.saturating_add(bytes);
        }
        parts
    }

    /// Bytes of the model alone.
    pub fn bytes(&self) -> u64 {
        self.of_files.values().copied().fold(self.own, u64::saturating_add)
    }

    /// Bytes of several models together.
    pub fn together<'a>(all: impl Iterator<Item = &'a WeightParts>) -> u64 {
        let (mut own, mut of_files) = (0u64, HashMap::new());
        for parts in all {
            own = own.saturating_add(parts.own);
            of_files.extend(parts.of_files.iter());
        }
        of_files.into_values().copied().fold(own, u64::saturating_add)
    }
}

/// Bytes of a tensor of such a model.
fn tensor_bytes(tensor: &TensorEntry, weights: Weights, precision: Precision) -> u64 {
    let matrix = if weights == Weights::F32 { 4 } else { 2 };
    let low = match precision {
        Precision::F32 => matrix,
        Precision::Bf16 => 2,
        Precision::Int8 => 1,
    };
    let in_low = tensor.name.starts_with("encoder.layers.") || tensor.name.starts_with("joint.");
    let each = match tensor.shape().len() {
        0 | 1 => 4,
        _ if in_low => low,
        _ => matrix,
    };
    (tensor.elements() as u64).saturating_mul(each)
}

/// The most bytes that such a model needs at once, beside its weights, for a batch of `batch` seconds of audio, padding included, in
/// windows of at most `window` seconds; a window that is longer than `batch` goes alone. What other threads allocate meanwhile counts
/// too. None if the program's allocator does not count, or another count is running.
///
/// # Errors
/// If the model cannot be loaded.
pub fn batch_bytes(
    opened: OpenModel,
    weights: Weights,
    precision: Precision,
    window: f64,
    batch: f64,
) -> Result<Option<u64>> {
    let mut config = ModelConfig::from_nemo_yaml(&opened.config_yaml)?;
    let last = format!("encoder.layers.{}.", config.encoder.n_layers.saturating_sub(1));
    if !opened.tensors.iter().any(|tensor| tensor.name.starts_with(&last)) {
        let why = format!("{}: there is no tensor `{last}...`", opened.path.display());
        return Err(Error::Input(why));
    }
    config.encoder.n_layers = 1;
    if config.transducer.is_some() {
        config.ctc = None;
    }
    let (frame, rate) = (
        config.preprocessor.window_stride,
        config.preprocessor.sample_rate as f64,
    );
    let numbers = (DType::F32, weights.into(), precision);
    let model = TdtModel::from_entries(opened, config, numbers, &Device::Cpu, false)?;
    let measured = |windows: usize, seconds: f64| -> Result<Option<f64>> {
        let mut noise = Noise::new(1);
        let samples = (seconds * rate) as usize;
        let signal: Vec<f32> = (0..samples).map(|_| 0.1 * noise.normal() as f32).collect();
        let signals = vec![&signal[..]; windows];
        install(|| {
            let Some(count) = Count::begin() else { return Ok(None) };
            model.encode(&signals)?;
            Ok(Some(count.most() as f64))
        })
    };
    let longest = MEASURED_FRAMES * frame;
    // Of any length.
    let of = |windows: usize, seconds: f64| {
        if seconds <= longest {
            return measured(windows, seconds);
        }
        let at = |part: f64| measured(windows, part * longest);
        Ok(match (at(0.25)?, at(0.5)?, at(1.0)?) {
            (Some(quarter), Some(half), Some(whole)) => Some(extended([quarter, half, whole], seconds / longest)),
            _ => None,
        })
    };
    let mut most = Some(0.0);
    for seconds in [SHORTEST.min(window), window] {
        let windows = ((batch / seconds).floor() as usize).max(1);
        // Of more windows than twice as many it is known from these: memory grows by the same amount with each window.
        let frames = (seconds / frame).min(MEASURED_FRAMES);
        let few = (MEASURED_FRAMES / 2.0 / frames.max(1.0)).ceil() as usize;
        let needed = if windows <= 2 * few {
            of(windows, seconds)?
        } else {
            let (one, two) = (of(few, seconds)?, of(2 * few, seconds)?);
            one.zip(two)
                .map(|(one, two)| one + (two - one).max(0.0) * (windows - few) as f64 / few as f64)
        };
        most = most.zip(needed).map(|(most, needed): (f64, f64)| most.max(needed));
    }
    // A number that is too large becomes the largest one.
    Ok(most.map(|bytes| bytes as u64))
}

/// The value at `length` times the length of the last of three values, which are those of a quarter, a half and the whole of it: of the
/// parabola through them, or where that bends down, of the line through the last two.
fn extended([quarter, half, whole]: [f64; 3], length: f64) -> f64 {
    let slopes = [(half - quarter) / 0.25, (whole - half) / 0.5].map(|slope: f64| slope.max(0.0));
    let bend = ((slopes[1] - slopes[0]) / 0.75).max(0.0);
    let slope = slopes[1] + bend * (length - 0.5);
    whole + slope * (length - 1.0)
}

#[cfg(test)]
mod tests {
    use super::extended;

    #[test]
    fn lines_and_parabolas_go_on() {
        let of = |at: f64| 7.0 + 3.0 * at + 5.0 * at * at;
        assert!((extended([of(0.25), of(0.5), of(1.0)], 90.0) - of(90.0)).abs() < 1e-6);
        let line = |at: f64| 2.0 + at;
        assert!((extended([0.25, 0.5, 1.0].map(line), 10.0) - line(10.0)).abs() < 1e-9);
        // Less than before is nothing to go by.
        assert_eq!(extended([3.0, 2.0, 2.0], 8.0), 2.0);
    }
}
