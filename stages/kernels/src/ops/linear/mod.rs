//! Linear layers, and convolutions in time as linear layers over rows that overlap.

#![allow(clippy::needless_range_loop, reason = "loops over lanes become vectors in this form")]

use std::ops::Range;

use crate::multiversion;

/// Outputs whose weights lie together.
const PANEL: usize = 32;
/// Rows and outputs whose sums are in registers together: eight vectors of AVX2, as many as keep its two units busy.
const ROWS: usize = 4;
const OUTPUTS: usize = 16;
/// Rows whose sums for a panel are in registers together where vectors are those of AVX-512.
#[cfg(target_arch = "x86_64")]
const WIDE_ROWS: usize = 8;
/// Panels whose sums are in registers together for a row alone.
const PANELS: usize = 2;

/// Where a row begins, in the input and in the output. Not generic, so that the sums are compiled here, with the settings of this
/// crate.
pub type Place<'a> = &'a dyn Fn(usize) -> (usize, usize);

/// `y = x W + b`. Each value of `y` begins with its bias and takes its products in order of the inputs, fused, whatever
/// the number of rows: a row's result is equal to the bit whether computed alone or with others, and on every processor.
#[derive(Debug, Clone)]
pub struct Linear {
    inputs: usize,
    outputs: usize,
    /// (panels, inputs, PANEL): the last panel is filled up with zeros.
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Linear {
    /// From a weight of PyTorch's layout (outputs, inputs); the number of outputs is that of `bias`.
    pub fn new(weight: &[f32], bias: Vec<f32>) -> Self {
        Self::convolution(weight, 1, bias)
    }

    /// From a convolution's weight (outputs, channels, `taps`). A row of its input is `taps` frames of all channels, so
    /// frames that are one after the other, channels innermost, need not be copied.
    pub fn convolution(weight: &[f32], taps: usize, bias: Vec<f32>) -> Self {
        let outputs = bias.len();
        let inputs = weight.len() / outputs;
        let channels = inputs / taps;
        let mut panels = vec![0.0; outputs.div_ceil(PANEL) * inputs * PANEL];
        for (output, row) in weight.chunks_exact(inputs).enumerate() {
            let first = output / PANEL * inputs * PANEL + output % PANEL;
            for (channel, row) in row.chunks_exact(taps).enumerate() {
                for (tap, &value) in row.iter().enumerate() {
                    panels[first + (tap * channels + channel) * PANEL] = value;
                }
            }
        }
        Self {
            inputs,
            outputs,
            weight: panels,
            bias,
        }
    }

    /// `rows` rows of `x` into `out`; `place` gives where a row begins in each.
    pub fn apply(&self, x: &[f32], out: &mut [f32], rows: usize, place: Place) {
        for row in 0..rows {
            let to = place(row).1;
            out[to..to + self.outputs].copy_from_slice(&self.bias);
        }
        self.add(x, out, rows, place);
    }

    /// Adds `x W` to what `out` holds, without the bias.
    pub fn add(&self, x: &[f32], out: &mut [f32], rows: usize, place: Place) {
        let mut first = 0;
        #[cfg(target_arch = "x86_64")]
        if crate::has_avx512() {
            first = rows / WIDE_ROWS * WIDE_ROWS;
            multiversion!(self.add_tiles::<WIDE_ROWS, PANEL>(x, out, 0..first, place));
        }
        let together = first + (rows - first) / ROWS * ROWS;
        self.add_tiles::<ROWS, OUTPUTS>(x, out, first..together, place);
        multiversion!(self.add_single_rows(x, out, together..rows, place));
    }

    /// [`Linear::add`] of rows in tiles of `R` rows, which divides their number, and of `C` outputs, a panel or half of one.
    #[inline(always)]
    fn add_tiles<const R: usize, const C: usize>(&self, x: &[f32], out: &mut [f32], rows: Range<usize>, place: Place) {
        for output in (0..self.outputs).step_by(C) {
            for first in rows.clone().step_by(R) {
                let places = std::array::from_fn::<_, R, _>(|row| place(first + row));
                if self.outputs - output <= OUTPUTS {
                    self.tile::<R, OUTPUTS, 1>(x, out, places, output);
                } else {
                    self.tile::<R, C, 1>(x, out, places, output);
                }
            }
        }
    }

    /// [`Linear::add`] of rows one by one.
    #[inline(always)]
    fn add_single_rows(&self, x: &[f32], out: &mut [f32], rows: Range<usize>, place: Place) {
        for row in rows {
            let places = [place(row)];
            let mut output = 0;
            while output < self.outputs {
                let left = self.outputs - output;
                if left > PANEL {
                    self.tile::<1, PANEL, PANELS>(x, out, places, output);
                    output += PANELS * PANEL;
                } else {
                    self.tile::<1, PANEL, 1>(x, out, places, output);
                    output += PANEL;
                }
            }
        }
    }

    /// The sums of `R` rows for `C` outputs in each of `P` panels from `output` on, as far as there are outputs.
    #[inline(always)]
    fn tile<const R: usize, const C: usize, const P: usize>(
        &self,
        x: &[f32],
        out: &mut [f32],
        places: [(usize, usize); R],
        output: usize,
    ) {
        let inputs = self.inputs;
        // `map` would be a call.
        let mut begins: [&[f32]; R] = [&[]; R];
        for row in 0..R {
            begins[row] = &x[places[row].0..][..inputs];
        }
        let x = begins;
        let panels: &[f32] = &self.weight[output / PANEL * inputs * PANEL..];
        let offset = output % PANEL;
        let mut sums = [[[0.0f32; C]; P]; R];
        for row in 0..R {
            for panel in 0..P {
                // By way of an array of its own, or the sums were in memory, not in registers.
                let mut before = [0.0; C];
                let out = &out[places[row].1 + output + panel * C..places[row].1 + self.outputs];
                let count = out.len().min(C);
                before[..count].copy_from_slice(&out[..count]);
                sums[row][panel] = before;
            }
        }
        for input in 0..inputs {
            for panel in 0..P {
                let first = (panel * inputs + input) * PANEL + offset;
                let weights = &panels[first..first + C];
                for row in 0..R {
                    let x = x[row][input];
                    for (sum, &weight) in sums[row][panel].iter_mut().zip(weights) {
                        *sum = x.mul_add(weight, *sum);
                    }
                }
            }
        }
        for row in 0..R {
            for panel in 0..P {
                let after = sums[row][panel];
                let out = &mut out[places[row].1 + output + panel * C..places[row].1 + self.outputs];
                let count = out.len().min(C);
                out[..count].copy_from_slice(&after[..count]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_convolution_is_what_its_formula_says() {
        // Two channels, three taps, two outputs; whole numbers are exact.
        let weight: Vec<f32> = (0..12).map(|value| value as f32 - 5.0).collect();
        let layer = Linear::convolution(&weight, 3, vec![0.5, -0.5]);
        let frames: Vec<f32> = (0..10).map(|value| (value * value % 7) as f32).collect();
        let mut out = vec![0.0; 6];
        layer.apply(&frames, &mut out, 3, &|row| (row * 2, row * 2));
        for time in 0..3 {
            for output in 0..2 {
                let mut expected = [0.5, -0.5][output];
                for channel in 0..2 {
                    for tap in 0..3 {
                        expected += weight[(output * 2 + channel) * 3 + tap] * frames[(time + tap) * 2 + channel];
                    }
                }
                assert_eq!(out[time * 2 + output], expected, "{time} {output}");
            }
        }
    }

    #[test]
    fn a_row_gives_the_same_bits_alone_and_among_others() {
        let (inputs, outputs, rows) = (387, 128, 70);
        let value = |seed: usize| (seed * 7919 % 2003) as f32 / 1001.5 - 1.0;
        let weight: Vec<f32> = (0..inputs * outputs).map(value).collect();
        let layer = Linear::new(&weight, (0..outputs).map(value).collect());
        let x: Vec<f32> = (0..inputs * rows).map(|at| value(at * 31 + 5)).collect();
        let mut together = vec![0.0; rows * outputs];
        layer.apply(&x, &mut together, rows, &|row| (row * inputs, row * outputs));
        for row in 0..rows {
            let mut alone = vec![0.0; outputs];
            layer.apply(&x[row * inputs..], &mut alone, 1, &|_| (0, 0));
            assert_eq!(alone, together[row * outputs..(row + 1) * outputs], "{row}");
        }
    }

    #[test]
    fn sums_take_their_products_in_the_order_of_the_inputs() {
        let value = |seed: usize| (seed * 7919 % 2003) as f32 / 1001.5 - 1.0;
        for (inputs, outputs, rows) in [(256, 258, 9), (7, 1, 5), (128, 512, 1), (3, 75, 6), (31, 27, 4)] {
            let weight: Vec<f32> = (0..inputs * outputs).map(value).collect();
            let bias: Vec<f32> = (0..outputs).map(|at| value(at + 3)).collect();
            let layer = Linear::new(&weight, bias.clone());
            let x: Vec<f32> = (0..inputs * rows).map(|at| value(at * 31 + 5)).collect();
            let mut found = vec![0.0; rows * outputs];
            layer.apply(&x, &mut found, rows, &|row| (row * inputs, row * outputs));
            for (at, found) in found.iter().enumerate() {
                let (x, weight) = (&x[at / outputs * inputs..], &weight[at % outputs * inputs..]);
                let products = x.iter().zip(&weight[..inputs]);
                let expected = products.fold(bias[at % outputs], |sum, (x, weight)| x.mul_add(*weight, sum));
                assert_eq!(*found, expected, "{inputs} {outputs} {at}");
            }
        }
    }
}
