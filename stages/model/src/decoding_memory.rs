//! Prediction of the memory that a model needs for decoding.
//!
//! Weights are counted from their shapes. What a batch needs beside them is measured and not computed by formulas, which would have
//! to follow every change of a kernel: batches of noise go through the encoder with its first layer alone, as
//! layers come one after another and keep nothing, while the allocator counts. What the search needs behind the encoder is a few rows
//! of the vocabulary's size.

use candle_core::{DType, Device};
use flow_kernels::Noise;
use flow_kernels::threads::install;

use crate::allocation::Count;
use crate::checkpoint::OpenModel;
use crate::model::TdtModel;
use crate::{ModelConfig, Precision, Result, Weights};

/// Samples of a second, as in [`TdtModel::encode`].
const SAMPLE_RATE: f64 = 16_000.0;

/// A batch of more than twice as many seconds is not measured whole: memory grows by the same amount with each window.
const MEASURED: f64 = 20.0;

/// The shortest windows that fill a batch, in seconds.
const SHORTEST: f64 = 1.0;

/// Bytes of the tensors of a model that is loaded with its matrices stored as `weights` and its products in `precision`: all are of 32
/// bits, but for matrices, and those that low precision is for.
pub fn weight_bytes(opened: &OpenModel, weights: Weights, precision: Precision) -> u64 {
    let matrix = if weights == Weights::F32 { 4 } else { 2 };
    let low = match precision {
        Precision::F32 => matrix,
        Precision::Bf16 => 2,
        Precision::Int8 => 1,
    };
    let bytes = opened.tensors.iter().map(|tensor| {
        let in_low = tensor.name.starts_with("encoder.layers.") || tensor.name.starts_with("joint.");
        let each = match tensor.shape().len() {
            0 | 1 => 4,
            _ if in_low => low,
            _ => matrix,
        };
        (tensor.elements() as u64).saturating_mul(each)
    });
    bytes.fold(0, u64::saturating_add)
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
    config.encoder.n_layers = 1;
    config.ctc_weight = None;
    let numbers = (DType::F32, weights.into(), precision);
    let model = TdtModel::from_entries(opened, config, numbers, &Device::Cpu)?;
    let of = |windows: usize, seconds: f64| -> Result<Option<u64>> {
        let mut noise = Noise::new(1);
        let samples = (seconds * SAMPLE_RATE) as usize;
        let signal: Vec<f32> = (0..samples).map(|_| 0.1 * noise.normal() as f32).collect();
        let signals = vec![&signal[..]; windows];
        install(|| {
            let Some(count) = Count::begin() else { return Ok(None) };
            model.encode(&signals)?;
            Ok(Some(u64::try_from(count.most()).unwrap_or(0)))
        })
    };
    let mut most = Some(0);
    for seconds in [SHORTEST.min(window), window] {
        let windows = ((batch / seconds).floor() as usize).max(1);
        let few = (MEASURED / seconds).ceil() as usize;
        let needed = if windows <= 2 * few {
            of(windows, seconds)?
        } else {
            let (one, two) = (of(few, seconds)?, of(2 * few, seconds)?);
            let extended = |(one, two): (u64, u64)| {
                one + (two.saturating_sub(one) as f64 * (windows - few) as f64 / few as f64) as u64
            };
            one.zip(two).map(extended)
        };
        most = most.zip(needed).map(|(most, needed)| most.max(needed));
    }
    Ok(most)
}
