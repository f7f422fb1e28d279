//! Convolutions over frames and bands, 3 x 3 with padding 1 or 1 x 1, and residual blocks of them.

#![allow(
    clippy::needless_range_loop,
    clippy::many_single_char_names,
    reason = "loops over lanes become vectors in this form"
)]

use flow_kernels::multiversion;
use flow_kernels::product::PackedRhs;
use rayon::prelude::*;

use super::winograd::Winograd;
use super::winograd_frames::WinogradFrames;
use super::{BatchNorm, FeatureMap, LANES, Spare, product_error, rounded, with_scratch};
use crate::error::Result;
use crate::weights::Weights;

/// Rows of a product, at least, and frames, at least, that are laid out together: of the frames of a block two are laid out
/// for the next one, too.
const ROWS: usize = 96;
const FRAMES: usize = 8;
const TAPS: usize = 3;

/// A convolution without bias and the batch norm after it.
pub struct Conv2d {
    inputs: usize,
    outputs: usize,
    band_stride: usize,
    frame_stride: usize,
    kernel: Kernel,
    bias: Vec<f32>,
}

enum Kernel {
    Winograd(Winograd),
    WinogradFrames(WinogradFrames),
    /// 3 x 3; of the depth of the product the frame is outermost, then the band, then the channel.
    Rows(PackedRhs),
    /// 3 x 3 of a single channel: for each [`LANES`] outputs their weights at each tap, the bands of taps outermost.
    One(Vec<[[f32; LANES]; TAPS * TAPS]>),
    /// 1 x 1.
    Point(PackedRhs),
}

impl Conv2d {
    /// Reads `CONVOLUTION.weight` (outputs, inputs, `taps` bands, `taps` frames), with 1 or 3 taps, and the batch norm
    /// `norm`. Strides are those of bands and of frames.
    pub fn read(
        weights: &Weights,
        [convolution, norm]: [&str; 2],
        [inputs, outputs]: [usize; 2],
        taps: usize,
        [band_stride, frame_stride]: [usize; 2],
    ) -> Result<Self> {
        let name = format!("{convolution}.weight");
        let weight = weights.floats(&name, &[outputs, inputs, taps, taps])?;
        let norm = BatchNorm::read(weights, norm, outputs, true)?;
        let folded = norm.fold(&weight);
        let kernel = if taps == 1 {
            Kernel::Point(PackedRhs::from_weight(&rounded(&folded, &name)?, outputs).map_err(product_error)?)
        } else if band_stride == 1 && frame_stride == 1 && Winograd::fits(inputs, outputs) {
            Kernel::Winograd(Winograd::new(&folded, [inputs, outputs], &name)?)
        } else if frame_stride == 1 && Winograd::fits(inputs, outputs) {
            Kernel::WinogradFrames(WinogradFrames::new(&folded, [inputs, outputs], band_stride, &name)?)
        } else if inputs == 1 && outputs.is_multiple_of(LANES) && band_stride == 1 && frame_stride == 1 {
            let mut blocks = vec![[[0.0; LANES]; TAPS * TAPS]; outputs / LANES];
            for (output, weight) in rounded(&folded, &name)?.chunks_exact(TAPS * TAPS).enumerate() {
                for (to, &weight) in blocks[output / LANES].iter_mut().zip(weight) {
                    to[output % LANES] = weight;
                }
            }
            Kernel::One(blocks)
        } else {
            let folded = rounded(&folded, &name)?;
            let mut rows = Vec::with_capacity(folded.len());
            for weight in folded.chunks_exact(inputs * TAPS * TAPS) {
                for tap in 0..TAPS * TAPS {
                    let (frame, band) = (tap / TAPS, tap % TAPS);
                    rows.extend(weight.iter().skip(band * TAPS + frame).step_by(TAPS * TAPS));
                }
            }
            Kernel::Rows(PackedRhs::from_weight(&rows, outputs).map_err(product_error)?)
        };
        Ok(Self {
            inputs,
            outputs,
            band_stride,
            frame_stride,
            kernel,
            bias: rounded(&norm.shift, &name)?,
        })
    }

    /// The convolution of `x`; `add` is added to it, and of the sum ReLU is taken if asked.
    pub fn apply(&self, x: &FeatureMap, add: Option<&FeatureMap>, relu: bool, spare: &mut Spare) -> Result<FeatureMap> {
        let strided = |length: usize, stride: usize| length.div_ceil(stride);
        let (frames, bands) = (strided(x.frames, self.frame_stride), strided(x.bands, self.band_stride));
        let mut out = spare.take(frames, bands, self.outputs);
        let epilogue = Epilogue {
            bias: &self.bias,
            add: add.map(|add| &add.values[..]),
            relu,
        };
        match &self.kernel {
            Kernel::Winograd(kernel) => kernel.apply(x, &epilogue, &mut out)?,
            Kernel::WinogradFrames(kernel) => kernel.apply(x, &epilogue, &mut out)?,
            Kernel::Rows(kernel) => self.by_rows(kernel, x, &epilogue, &mut out)?,
            Kernel::One(kernel) => one_channel(kernel, x, &epilogue, &mut out),
            Kernel::Point(kernel) => self.by_points(kernel, x, &epilogue, &mut out)?,
        }
        Ok(out)
    }

    /// In blocks of frames, which are laid out with a band of padding on each side: the three bands of a result are adjacent
    /// in each of its three frames. Where every other frame is skipped, even and odd ones lie apart, so that those of
    /// the results follow each other.
    fn by_rows(&self, kernel: &PackedRhs, x: &FeatureMap, epilogue: &Epilogue, out: &mut FeatureMap) -> Result<()> {
        let width = (x.bands + 2).next_multiple_of(self.band_stride);
        let grid = width / self.band_stride;
        let frames = ROWS.div_ceil(grid).max(FRAMES);
        let (in_size, width) = (x.bands * self.inputs, width * self.inputs);
        let plane = (frames + TAPS - 1) * width;
        let taps: [usize; TAPS] =
            std::array::from_fn(|tap| tap % self.frame_stride * plane + tap / self.frame_stride * width);
        let (bands, frame_size) = (out.bands, out.bands * self.outputs);
        let block = |(number, out): (usize, &mut [f32])| {
            with_scratch(|[buffer, sums, _]| -> Result<()> {
                let count = out.len() / frame_size;
                buffer.resize(self.frame_stride * plane);
                for at in 0..(count - 1) * self.frame_stride + TAPS {
                    let row = at % self.frame_stride * plane + at / self.frame_stride * width;
                    let row = &mut buffer[row..row + width];
                    let frame = number * frames * self.frame_stride + at;
                    match frame.checked_sub(1).filter(|frame| *frame < x.frames) {
                        Some(frame) => {
                            // Padding, in which another convolution may have left values.
                            row[..self.inputs].fill(0.0);
                            row[self.inputs..][..in_size].copy_from_slice(&x.values[frame * in_size..][..in_size]);
                            row[self.inputs + in_size..].fill(0.0);
                        }
                        None => row.fill(0.0),
                    }
                }
                // Rows behind the last band of a frame do not count.
                let rows = (count - 1) * grid + bands;
                sums.resize(rows * self.outputs);
                kernel
                    .product_of_taps_into(buffer, rows, self.band_stride * self.inputs, &taps, sums)
                    .map_err(product_error)?;
                let frames_of_sums = sums.chunks(grid * self.outputs);
                for (row, (sums, out)) in frames_of_sums.zip(out.chunks_exact_mut(frame_size)).enumerate() {
                    epilogue.apply(&sums[..frame_size], (number * frames + row) * frame_size, out);
                }
                Ok(())
            })
        };
        out.values
            .par_chunks_mut(frames * frame_size)
            .enumerate()
            .try_for_each(block)
    }

    /// In blocks of frames. Where positions are evenly apart they are read where they lie.
    fn by_points(&self, kernel: &PackedRhs, x: &FeatureMap, epilogue: &Epilogue, out: &mut FeatureMap) -> Result<()> {
        let even = self.frame_stride == 1 && x.bands.is_multiple_of(self.band_stride);
        let frames = ROWS.div_ceil(out.bands).max(FRAMES);
        let (bands, frame_size) = (out.bands, out.bands * self.outputs);
        let block = |(number, out): (usize, &mut [f32])| {
            with_scratch(|[positions, sums, _]| -> Result<()> {
                let (first, count) = (number * frames, out.len() / frame_size);
                let (from, step) = if even {
                    (
                        &x.values[first * x.bands * self.inputs..],
                        self.band_stride * self.inputs,
                    )
                } else {
                    positions.resize(count * bands * self.inputs);
                    for (at, to) in positions.chunks_exact_mut(self.inputs).enumerate() {
                        let frame = (first + at / bands) * self.frame_stride;
                        to.copy_from_slice(x.at(frame, at % bands * self.band_stride));
                    }
                    (&positions[..], self.inputs)
                };
                sums.resize(out.len());
                kernel
                    .product_of_rows_into(from, count * bands, step, sums)
                    .map_err(product_error)?;
                epilogue.apply(sums, first * frame_size, out);
                Ok(())
            })
        };
        out.values
            .par_chunks_mut(frames * frame_size)
            .enumerate()
            .try_for_each(block)
    }
}

/// A convolution of a single channel. Each sum takes its products, fused, in order of the taps.
fn one_channel(kernel: &[[[f32; LANES]; TAPS * TAPS]], x: &FeatureMap, epilogue: &Epilogue, out: &mut FeatureMap) {
    let (channels, frame_size) = (out.channels, out.bands * out.channels);
    let width = x.bands + TAPS - 1;
    let frame = |padded: &mut Vec<f32>, (frame, out): (usize, &mut [f32])| {
        // Three frames with a band of padding on each side.
        padded.clear();
        padded.resize(TAPS * width, 0.0);
        for (tap, padded) in padded.chunks_exact_mut(width).enumerate() {
            if let Some(from) = (frame + tap).checked_sub(1).filter(|from| *from < x.frames) {
                padded[1..=x.bands].copy_from_slice(&x.values[from * x.bands..][..x.bands]);
            }
        }
        let (first, rest) = padded.split_at(width);
        let (second, third) = rest.split_at(width);
        multiversion!({
            for (block, [a, b, c, d, e, f, g, h, i]) in kernel.iter().enumerate() {
                let bias = &epilogue.bias.as_chunks().0[block];
                for (band, out) in out.chunks_exact_mut(channels).enumerate() {
                    let [x, y, z] = [
                        &first[band..band + TAPS],
                        &second[band..band + TAPS],
                        &third[band..band + TAPS],
                    ];
                    let mut sums = [0.0; LANES];
                    // In this form the loop becomes vectors.
                    for lane in 0..LANES {
                        let sum = c[lane].mul_add(z[0], b[lane].mul_add(y[0], a[lane].mul_add(x[0], 0.0)));
                        let sum = f[lane].mul_add(z[1], e[lane].mul_add(y[1], d[lane].mul_add(x[1], sum)));
                        sums[lane] = i[lane].mul_add(z[2], h[lane].mul_add(y[2], g[lane].mul_add(x[2], sum)));
                    }
                    let add = epilogue.add.map(|add| {
                        let at = frame * frame_size + band * channels + block * LANES;
                        &add[at..].as_chunks().0[0]
                    });
                    epilogue.finish(&sums, bias, add, &mut out.as_chunks_mut().0[block]);
                }
            }
        });
    };
    out.values
        .par_chunks_mut(frame_size)
        .enumerate()
        .for_each_init(Vec::new, frame);
}

/// What is applied to the sums of a convolution.
pub struct Epilogue<'a> {
    pub bias: &'a [f32],
    /// Values of the size of the result.
    pub add: Option<&'a [f32]>,
    pub relu: bool,
}

impl Epilogue<'_> {
    /// `sums`, whole positions, are those of the result from `start`; what becomes of them goes to `out`.
    fn apply(&self, sums: &[f32], start: usize, out: &mut [f32]) {
        let channels = self.bias.len();
        let add = self.add.map(|add| &add[start..start + out.len()]);
        if !channels.is_multiple_of(LANES) {
            for (at, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
                let sum = sum + self.bias[at % channels];
                *out = self.rectified(add.map_or(sum, |add| sum + add[at]));
            }
            return;
        }
        multiversion!({
            let (out, sums, bias) = (out.as_chunks_mut().0, sums.as_chunks().0, self.bias.as_chunks().0);
            let add = add.map(|add| add.as_chunks().0);
            for (at, (out, sums)) in out.iter_mut().zip(sums).enumerate() {
                self.finish(sums, &bias[at % bias.len()], add.map(|add| &add[at]), out);
            }
        });
    }

    #[inline(always)]
    fn rectified(&self, value: f32) -> f32 {
        let least = if self.relu { 0.0 } else { f32::NEG_INFINITY };
        if value > least { value } else { least }
    }

    /// Some channels of one position, with their biases and what is added to them.
    #[inline(always)]
    pub fn finish(&self, sums: &[f32; LANES], bias: &[f32; LANES], add: Option<&[f32; LANES]>, out: &mut [f32; LANES]) {
        if let Some(add) = add {
            for lane in 0..LANES {
                out[lane] = self.rectified(sums[lane] + bias[lane] + add[lane]);
            }
        } else {
            for lane in 0..LANES {
                out[lane] = self.rectified(sums[lane] + bias[lane]);
            }
        }
    }
}

/// ResNet's basic block: `relu(conv(relu(conv x)) + shortcut x)`, where the shortcut is a convolution 1 x 1 if the shape
/// changes, and nothing otherwise.
pub struct BasicBlock {
    first: Conv2d,
    second: Conv2d,
    shortcut: Option<Conv2d>,
}

impl BasicBlock {
    /// Reads `NAME.{conv1,bn1,conv2,bn2}` and, if the block has them, `NAME.{shortcut.0,shortcut.1}`.
    pub fn read(weights: &Weights, name: &str, [inputs, outputs]: [usize; 2], strides: [usize; 2]) -> Result<Self> {
        let names = |parts: [&str; 2]| parts.map(|part| format!("{name}.{part}"));
        let read = |parts: [&str; 2], inputs: usize, taps: usize, strides: [usize; 2]| {
            let [convolution, norm] = names(parts);
            Conv2d::read(weights, [&convolution, &norm], [inputs, outputs], taps, strides)
        };
        let same = strides == [1, 1] && inputs == outputs;
        Ok(Self {
            first: read(["conv1", "bn1"], inputs, TAPS, strides)?,
            second: read(["conv2", "bn2"], outputs, TAPS, [1, 1])?,
            shortcut: if same {
                None
            } else {
                Some(read(["shortcut.0", "shortcut.1"], inputs, 1, strides)?)
            },
        })
    }

    pub fn apply(&self, x: &FeatureMap, spare: &mut Spare) -> Result<FeatureMap> {
        let hidden = self.first.apply(x, None, true, spare)?;
        let out = match &self.shortcut {
            Some(shortcut) => {
                let add = shortcut.apply(x, None, false, spare)?;
                let out = self.second.apply(&hidden, Some(&add), true, spare)?;
                spare.give(add);
                out
            }
            None => self.second.apply(&hidden, Some(x), true, spare)?,
        };
        spare.give(hidden);
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;

    use super::*;

    fn values(count: usize, seed: usize) -> Vec<f32> {
        (0..count)
            .map(|at| ((at * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0)
            .collect()
    }

    /// A file with a convolution `c` and a batch norm `n`, and their values: weight, then weight, bias, mean, variance.
    fn file(inputs: usize, outputs: usize, taps: usize) -> (Vec<u8>, [Vec<f32>; 5]) {
        let mut parts = [
            values(outputs * inputs * taps * taps, 1),
            values(outputs, 2),
            values(outputs, 3),
            values(outputs, 4),
            values(outputs, 5),
        ];
        parts[4].iter_mut().for_each(|value| *value = value.abs() + 0.5);
        let bytes: Vec<Vec<u8>> = parts
            .iter()
            .map(|part| part.iter().flat_map(|value| value.to_le_bytes()).collect())
            .collect();
        let names = ["c.weight", "n.weight", "n.bias", "n.running_mean", "n.running_var"];
        let views = names.iter().zip(&bytes).map(|(name, bytes)| {
            let shape = match *name {
                "c.weight" => vec![outputs, inputs, taps, taps],
                _ => vec![outputs],
            };
            (*name, TensorView::new(Dtype::F32, shape, bytes).unwrap())
        });
        (safetensors::serialize(views, None).unwrap(), parts)
    }

    /// Every kernel against the formula in f64, for sizes that do not fill a tile or block. Tolerance for sums of 9 *
    /// inputs terms below 2.
    #[test]
    fn convolutions_are_what_their_formula_says() {
        let cases = [
            (1, 16, 3, [1, 1], 7, 9),
            (1, 64, 3, [1, 1], 7, 9),
            (8, 16, 3, [1, 1], 1, 1),
            (32, 64, 3, [1, 1], 1, 1),
            (64, 32, 3, [1, 1], 30, 6),
            (16, 24, 3, [1, 1], 13, 10),
            (32, 32, 3, [1, 1], 51, 40),
            (8, 16, 3, [2, 1], 11, 10),
            (32, 64, 3, [2, 1], 1, 1),
            (32, 32, 3, [2, 1], 51, 40),
            (64, 32, 3, [2, 1], 30, 7),
            (8, 16, 3, [2, 2], 12, 9),
            (5, 7, 3, [1, 1], 30, 6),
            (8, 16, 1, [2, 2], 7, 9),
            (8, 16, 1, [2, 1], 7, 10),
        ];
        for case in cases {
            let (inputs, outputs, taps, strides, frames, bands) = case;
            let (bytes, [weight, scale, bias, mean, variance]) = file(inputs, outputs, taps);
            let weights = Weights::open(&bytes).unwrap();
            let layer = Conv2d::read(&weights, ["c", "n"], [inputs, outputs], taps, strides).unwrap();
            let x = FeatureMap::new(frames, bands, inputs, &values(frames * bands * inputs, 6));
            // Memory with values that must not count.
            let mut spare = Spare::default();
            let mut used = spare.take(frames, bands, 2 * inputs.max(outputs));
            used.values.fill(f32::NAN);
            spare.give(used);
            let plain = layer.apply(&x, None, false, &mut spare).unwrap();
            let add = values(plain.values.len(), 7);
            let add = FeatureMap::new(plain.frames, plain.bands, outputs, &add);
            let whole = layer.apply(&x, Some(&add), true, &mut spare).unwrap();
            assert_eq!(plain.frames, (frames - 1) / strides[1] + 1, "{case:?}");
            assert_eq!(plain.bands, (bands - 1) / strides[0] + 1, "{case:?}");
            let padding = taps / 2;
            for frame in 0..plain.frames {
                for band in 0..plain.bands {
                    for output in 0..outputs {
                        let mut sum = 0.0;
                        for (tap, input) in (0..taps * taps).flat_map(|tap| (0..inputs).map(move |input| (tap, input)))
                        {
                            let at = |index: usize, stride: usize, tap: usize, count: usize| {
                                (index * stride + tap).checked_sub(padding).filter(|at| *at < count)
                            };
                            let from = at(frame, strides[1], tap % taps, frames);
                            if let (Some(frame), Some(band)) = (from, at(band, strides[0], tap / taps, bands)) {
                                let weight = weight[(output * inputs + input) * taps * taps + tap];
                                sum += f64::from(weight) * f64::from(x.at(frame, band)[input]);
                            }
                        }
                        let norm = f64::from(scale[output]) / (f64::from(variance[output]) + 1e-5).sqrt();
                        let expected = (sum - f64::from(mean[output])) * norm + f64::from(bias[output]);
                        let place = (frame, band, output);
                        let found = f64::from(plain.at(frame, band)[output]);
                        let bound = 3e-6 * (9 * inputs) as f64;
                        assert!(
                            (found - expected).abs() < bound,
                            "{case:?} {place:?}: {found} {expected}"
                        );
                        let expected = (expected + f64::from(add.at(frame, band)[output])).max(0.0);
                        let found = f64::from(whole.at(frame, band)[output]);
                        assert!(
                            (found - expected).abs() < bound,
                            "{case:?} {place:?}: {found} {expected}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn weights_that_cannot_be_are_refused() {
        let (bytes, _) = file(8, 8, 3);
        let weights = Weights::open(&bytes).unwrap();
        assert!(Conv2d::read(&weights, ["c", "n"], [8, 8], 1, [1, 1]).is_err());
        assert!(Conv2d::read(&weights, ["c", "m"], [8, 8], 3, [1, 1]).is_err());
        for (value, name) in [(-1.0f32, "running_var"), (f32::NAN, "running_var")] {
            // The variance is what the header says is there; the first value of it is replaced.
            let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let at = tensors.tensor("n.running_var").unwrap().data().as_ptr() as usize - bytes.as_ptr() as usize;
            let mut bad = bytes.clone();
            bad[at..at + 4].copy_from_slice(&value.to_le_bytes());
            let error = Conv2d::read(&Weights::open(&bad).unwrap(), ["c", "n"], [8, 8], 3, [1, 1]).err();
            assert!(error.unwrap().to_string().contains(name));
        }
    }
}
