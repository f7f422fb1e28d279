//! Layers of the encoder. Each has a `forward` that returns what its `backward` needs, and a hand-written `backward`
//! that adds into named gradients.
//!
//! Activations are (rows, width) matrices, a row per frame, utterance by utterance: row `b * time + t`.

pub mod adapter;
pub mod attention;
pub mod conformer_layer;
pub mod convolution;
pub mod dropout;
pub mod feed_forward;
pub mod held_rows;
pub mod linear;
pub mod norm;
pub mod subsampling;

use flow_kernels::Lengths;
use flow_kernels::attention::Context;

/// How the rows of an activation are laid out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frames {
    /// Utterances.
    pub batch: usize,
    /// Frames per utterance, padding included.
    pub time: usize,
    /// Valid frames of each utterance.
    pub lengths: Lengths,
    /// Which frames a frame sees in self-attention.
    pub context: Context,
}

impl Frames {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.batch * self.time
    }
}

#[cfg(test)]
pub(crate) mod golden {
    //! Golden data made by NeMo.

    use std::collections::HashMap;
    use std::path::{Path, PathBuf};

    use candle_core::{DType, Device, Tensor};

    use crate::checkpoint::read_packed;
    use crate::config::ModelConfig;
    use crate::testing::unpacked_copy;

    /// A file or folder of the golden model data, unpacked where it is packed.
    pub fn file(name: &str) -> PathBuf {
        file_of("model", name)
    }

    /// The same of another set: `ctc`, `rnnt`, `hybrid` or `streaming`. `FLOW_TEST_GOLDEN_CTC` and so on name folders in place of those in the
    /// repository.
    pub fn file_of(set: &str, name: &str) -> PathBuf {
        let folder = std::env::var_os(format!("FLOW_TEST_GOLDEN_{}", set.to_uppercase())).map_or_else(
            || Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/golden")).join(set),
            PathBuf::from,
        );
        // Beside the test itself, in the target folder.
        let place = std::env::current_exe().unwrap().with_file_name(format!("golden-{set}"));
        unpacked_copy(&folder.join(name), &place).unwrap()
    }

    /// All tensors of a golden safetensors file, which may be packed.
    pub fn tensors(name: &str) -> HashMap<String, Tensor> {
        tensors_of(&file(name))
    }

    /// All tensors of a safetensors file, which may be packed.
    pub fn tensors_of(path: &Path) -> HashMap<String, Tensor> {
        candle_core::safetensors::load_buffer(&read_packed(path, 4).unwrap(), &Device::Cpu).unwrap()
    }

    /// The weights in the golden archive, and its configuration.
    pub fn model() -> (ModelConfig, Vec<(String, Tensor)>) {
        let folder = tempfile::tempdir().unwrap();
        let archive = std::fs::File::open(file("model.nemo")).unwrap();
        tar::Archive::new(archive).unpack(folder.path()).unwrap();
        let text = std::fs::read_to_string(folder.path().join("model_config.yaml")).unwrap();
        let weights = folder.path().join("model_weights.ckpt");
        (
            ModelConfig::from_nemo_yaml(&text).unwrap(),
            candle_core::pickle::read_all(weights).unwrap(),
        )
    }

    /// The recordings of a golden set, in the order of their numbers: `eval0_xx.wav`, `eval1_yy.wav`, ...
    pub fn waves(set: &str) -> Vec<Vec<f32>> {
        waves_in(&file("audio"), set)
    }

    /// The same in a folder.
    pub fn waves_in(folder: &Path, set: &str) -> Vec<Vec<f32>> {
        let number = |path: &Path| -> Option<usize> {
            let name = path.file_stem()?.to_str()?.strip_prefix(set)?;
            name.split_once('_').map_or(name, |(number, _)| number).parse().ok()
        };
        let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut found: Vec<(usize, PathBuf)> = paths.filter_map(|path| Some((number(&path)?, path))).collect();
        found.sort();
        assert!(!found.is_empty(), "no recordings of {set}");
        found.into_iter().map(|(_, path)| samples(&path)).collect()
    }

    /// Recordings with noise of an eighth of the loudest sample's rounding error on each sample. This changes the
    /// features about twice as much as NeMo's differ from ours, so the change of an output bounds the difference from
    /// NeMo that is due to rounding.
    pub fn rounded(waves: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let rounded = |wave: &Vec<f32>| {
            let unit = wave.iter().fold(0f32, |largest, x| largest.max(x.abs())) * f32::EPSILON / 16.0;
            let sign = |i: usize| {
                if (i.wrapping_mul(0x9E37_79B9) >> 16) & 1 == 0 {
                    unit
                } else {
                    -unit
                }
            };
            wave.iter().enumerate().map(|(i, x)| x + sign(i)).collect()
        };
        waves.iter().map(rounded).collect()
    }

    /// One recording of a golden set.
    pub fn wave(set: &str, number: usize) -> Vec<f32> {
        waves(set).swap_remove(number)
    }

    /// Samples of a golden recording, int16 / 32768.
    pub fn samples(path: &Path) -> Vec<f32> {
        let bytes = std::fs::read(path).unwrap();
        let data = bytes.windows(4).position(|w| w == b"data").unwrap() + 8;
        bytes[data..]
            .chunks_exact(2)
            .map(|b| f32::from(i16::from_le_bytes([b[0], b[1]])) / 32768.0)
            .collect()
    }

    /// Largest absolute value of what is compared, at least 1: errors of floating-point numbers grow with it.
    pub fn magnitude(tensor: &Tensor) -> f64 {
        let values = flow_kernels::testing::values(tensor);
        values.iter().fold(1.0, |largest, value| largest.max(value.abs()))
    }

    /// Relative tolerance against NeMo for outputs that are computed from recordings. Features of two Fourier
    /// transforms differ by up to 6e-5 in quiet bands, where the loudest are about 4; a network of normalised layers
    /// about preserves the relative error.
    pub const FROM_WAVES: f64 = 1e-5;

    /// Relative tolerance against NeMo in 32 bits for outputs that are computed from NeMo's own features: some twenty
    /// units in the last place, the difference between NeMo's outputs in 32 and 64 bits.
    pub const FROM_FEATURES: f64 = 2.5e-6;

    /// An int64 vector as lengths.
    pub fn lengths(tensor: &Tensor) -> Vec<usize> {
        let values: Vec<i64> = tensor.flatten_all().unwrap().to_vec1().unwrap();
        values.into_iter().map(|n| usize::try_from(n).unwrap()).collect()
    }

    /// Largest difference of two (B, T, ..) tensors over the valid frames, in f64.
    pub fn valid_difference(a: &Tensor, b: &Tensor, lengths: &[usize]) -> f64 {
        assert_eq!(a.dims(), b.dims());
        lengths
            .iter()
            .enumerate()
            .map(|(i, &length)| {
                let valid = |t: &Tensor| {
                    let t = t.to_dtype(DType::F64).unwrap();
                    t.get(i).unwrap().narrow(0, 0, length).unwrap().contiguous().unwrap()
                };
                flow_kernels::testing::max_difference(&valid(a), &valid(b))
            })
            .fold(0.0, f64::max)
    }
}
