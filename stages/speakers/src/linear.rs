//! Linear layers, and convolutions in time as linear layers over rows that overlap.

/// Outputs that are computed together: they stay in the L1 cache with four rows of the weight.
const CACHED: usize = 4096;

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
        let step = (CACHED / self.outputs).max(1);
        for first in (0..rows).step_by(step) {
            let rows = first..rows.min(first + step);
            let fours = self.weight.chunks_exact(4 * self.outputs);
            let rest = fours.remainder();
            let mut input = 0;
            for weight in fours {
                for row in rows.clone() {
                    let (from, to) = place(row);
                    let x = &x[from + input..from + input + 4];
                    add_four(&mut out[to..to + self.outputs], weight, [x[0], x[1], x[2], x[3]]);
                }
                input += 4;
            }
            for weight in rest.chunks_exact(self.outputs) {
                for row in rows.clone() {
                    let (from, to) = place(row);
                    add_one(&mut out[to..to + self.outputs], weight, x[from + input]);
                }
                input += 1;
            }
        }
    }
}

/// Adds four rows of a weight to a result.
fn add_four(out: &mut [f32], weight: &[f32], x: [f32; 4]) {
    let (first, rest) = weight.split_at(out.len());
    let (second, rest) = rest.split_at(out.len());
    let (third, fourth) = rest.split_at(out.len());
    let weights = first.iter().zip(second).zip(third.iter().zip(fourth));
    for (out, ((&a, &b), (&c, &d))) in out.iter_mut().zip(weights) {
        *out = x[3].mul_add(d, x[2].mul_add(c, x[1].mul_add(b, x[0].mul_add(a, *out))));
    }
}

fn add_one(out: &mut [f32], weight: &[f32], x: f32) {
    for (out, &weight) in out.iter_mut().zip(weight) {
        *out = x.mul_add(weight, *out);
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
}
