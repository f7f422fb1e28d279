//! Linear layers, and convolutions in time as linear layers over rows that overlap.

/// Rows and outputs whose sums are in registers together: eight vectors of AVX2, as many as keep its two units busy.
const ROWS: usize = 4;
const OUTPUTS: usize = 16;

/// `y = x W + b`. Each value of `y` begins with its bias and takes its products in order of the inputs, fused, whatever
/// the number of rows: a row's result is equal to the bit whether computed alone or with others.
#[derive(Debug, Clone)]
pub struct Linear {
    outputs: usize,
    /// (inputs, outputs): the inner loop goes over the outputs.
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Linear {
    /// From a weight of PyTorch's layout (outputs, inputs); the number of outputs is that of `bias`.
    pub fn new(weight: &[f32], bias: Vec<f32>) -> Self {
        Self::convolution(weight, 1, bias)
    }

    /// From a convolution's weight (outputs, channels, `taps`). A row of its input is `taps` frames of all channels, so
    /// frames that lie one after the other, channels innermost, need not be copied.
    pub fn convolution(weight: &[f32], taps: usize, bias: Vec<f32>) -> Self {
        let outputs = bias.len();
        let inputs = weight.len() / outputs;
        let channels = inputs / taps;
        let mut transposed = vec![0.0; weight.len()];
        for (output, row) in weight.chunks_exact(inputs).enumerate() {
            for (channel, row) in row.chunks_exact(taps).enumerate() {
                for (tap, &value) in row.iter().enumerate() {
                    transposed[(tap * channels + channel) * outputs + output] = value;
                }
            }
        }
        Self {
            outputs,
            weight: transposed,
            bias,
        }
    }

    /// `rows` rows of `x` into `out`; `place` gives where a row begins in each.
    pub fn apply(&self, x: &[f32], out: &mut [f32], rows: usize, place: impl Fn(usize) -> (usize, usize)) {
        for row in 0..rows {
            let to = place(row).1;
            out[to..to + self.outputs].copy_from_slice(&self.bias);
        }
        self.add(x, out, rows, place);
    }

    /// Adds `x W` to what `out` holds, without the bias.
    pub fn add(&self, x: &[f32], out: &mut [f32], rows: usize, place: impl Fn(usize) -> (usize, usize)) {
        let together = rows / ROWS * ROWS;
        let mut output = 0;
        while output < self.outputs {
            let left = self.outputs - output;
            for first in (0..together).step_by(ROWS) {
                let places = std::array::from_fn::<_, ROWS, _>(|row| place(first + row));
                match left {
                    OUTPUTS.. => self.tile::<ROWS, OUTPUTS>(x, out, places, output),
                    8.. => self.tile::<ROWS, 8>(x, out, places, output),
                    2.. => self.tile::<ROWS, 2>(x, out, places, output),
                    _ => self.tile::<ROWS, 1>(x, out, places, output),
                }
            }
            output += [OUTPUTS, 8, 2, 1]
                .into_iter()
                .find(|&width| width <= left)
                .unwrap_or(left);
        }
        // A row alone has as many sums at once, all along it.
        for row in together..rows {
            let places = [place(row)];
            let mut output = 0;
            while output < self.outputs {
                let left = self.outputs - output;
                match left {
                    64.. => self.tile::<1, 64>(x, out, places, output),
                    8.. => self.tile::<1, 8>(x, out, places, output),
                    _ => self.tile::<1, 1>(x, out, places, output),
                }
                output += [64, 8, 1].into_iter().find(|&width| width <= left).unwrap_or(left);
            }
        }
    }

    /// The sums of `R` rows for `C` outputs from `output` on.
    #[inline(always)]
    fn tile<const R: usize, const C: usize>(
        &self,
        x: &[f32],
        out: &mut [f32],
        places: [(usize, usize); R],
        output: usize,
    ) {
        let inputs = self.weight.len() / self.outputs;
        let x: [&[f32]; R] = places.map(|(from, _)| &x[from..from + inputs]);
        let mut sums = [[0.0f32; C]; R];
        for (sums, (_, to)) in sums.iter_mut().zip(places) {
            sums.copy_from_slice(&out[to + output..to + output + C]);
        }
        for (input, weight) in self.weight.chunks_exact(self.outputs).enumerate() {
            let weight = &weight[output..output + C];
            for (sums, x) in sums.iter_mut().zip(x) {
                let x = x[input];
                for (sum, &weight) in sums.iter_mut().zip(weight) {
                    *sum = x.mul_add(weight, *sum);
                }
            }
        }
        for (sums, (_, to)) in sums.iter().zip(places) {
            out[to + output..to + output + C].copy_from_slice(sums);
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
        layer.apply(&frames, &mut out, 3, |row| (row * 2, row * 2));
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
        layer.apply(&x, &mut together, rows, |row| (row * inputs, row * outputs));
        for row in 0..rows {
            let mut alone = vec![0.0; outputs];
            layer.apply(&x[row * inputs..], &mut alone, 1, |_| (0, 0));
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
            layer.apply(&x, &mut found, rows, |row| (row * inputs, row * outputs));
            for (at, found) in found.iter().enumerate() {
                let (x, weight) = (&x[at / outputs * inputs..], &weight[at % outputs * inputs..]);
                let products = x.iter().zip(&weight[..inputs]);
                let expected = products.fold(bias[at % outputs], |sum, (x, weight)| x.mul_add(*weight, sum));
                assert_eq!(*found, expected, "{inputs} {outputs} {at}");
            }
        }
    }
}
