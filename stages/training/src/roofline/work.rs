//! Operations and bytes of some work. Numbers are `f64`, exact up to 2^53, so that no size overflows.

use std::ops::{Add, AddAssign, Mul};

/// Bytes of a number in 32 bits.
pub(super) const WIDE: f64 = 4.0;

/// Floating-point operations of matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Flops {
    /// With matrices of linear layers, in the joint network's last layer and on a device within attention: their factors may be
    /// in bf16.
    pub matrices: f64,
    /// All others, which are in 32 bits: attention on the CPU, the LSTM, the last layer of sub-sampling.
    pub others: f64,
}

impl Flops {
    pub fn all(&self) -> f64 {
        self.matrices + self.others
    }
}

impl Add for Flops {
    type Output = Flops;

    fn add(self, other: Flops) -> Flops {
        Flops {
            matrices: self.matrices + other.matrices,
            others: self.others + other.others,
        }
    }
}

/// What is to be done.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// What the model's forward and backward pass consist of.
    pub model: Flops,
    /// What is computed a second time, to save memory.
    pub again: Flops,
    /// Read from and written to the card's memory.
    pub bytes: f64,
    /// Sent to other cards.
    pub exchanged: f64,
}

impl Add for Work {
    type Output = Work;

    fn add(self, other: Work) -> Work {
        Work {
            model: self.model + other.model,
            again: self.again + other.again,
            bytes: self.bytes + other.bytes,
            exchanged: self.exchanged + other.exchanged,
        }
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Work) {
        *self = *self + other;
    }
}

/// The same work this many times.
impl Mul<f64> for Work {
    type Output = Work;

    fn mul(self, times: f64) -> Work {
        let flops = |flops: Flops| Flops {
            matrices: flops.matrices * times,
            others: flops.others * times,
        };
        Work {
            model: flops(self.model),
            again: flops(self.again),
            bytes: self.bytes * times,
            exchanged: self.exchanged * times,
        }
    }
}

/// A linear layer with a stored matrix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub inputs: f64,
    pub outputs: f64,
    /// Bytes of a stored number.
    pub stored: f64,
    pub bias: bool,
}

impl Work {
    /// Passes over tensors in 32 bits that read and write so many numbers together.
    pub(super) fn pass(&mut self, numbers: f64) {
        self.bytes += WIDE * numbers;
    }

    /// `count` products (m, k) times (k, n) of tensors in 32 bits.
    pub(super) fn product(&mut self, count: f64, m: f64, k: f64, n: f64) {
        self.model.others += 2.0 * count * m * k * n;
        self.pass(count * (m * k + k * n + m * n));
    }

    /// A linear layer over this many rows.
    pub(super) fn linear(&mut self, rows: f64, matrix: Matrix) {
        let Matrix { inputs, outputs, .. } = matrix;
        self.model.matrices += 2.0 * rows * inputs * outputs;
        self.bytes += matrix.stored * inputs * outputs;
        self.pass(rows * (inputs + outputs));
        if matrix.bias {
            self.pass(2.0 * rows * outputs);
        }
    }

    /// The gradient of its matrix and bias.
    pub(super) fn linear_weights(&mut self, rows: f64, matrix: Matrix) {
        let Matrix { inputs, outputs, .. } = matrix;
        self.model.matrices += 2.0 * rows * inputs * outputs;
        self.pass(rows * (inputs + outputs) + inputs * outputs);
        if matrix.bias {
            self.pass(rows * outputs);
        }
    }

    /// The gradients of its matrix, bias and input.
    pub(super) fn linear_backward(&mut self, rows: f64, matrix: Matrix) {
        self.linear_weights(rows, matrix);
        self.linear(rows, Matrix { bias: false, ..matrix });
    }

    /// The same products within one kernel, whose factors are in bf16 or in 32 bits: nothing of them goes through memory.
    pub(super) fn in_one_kernel(self, in_bf16: bool) -> Work {
        let factors = |flops: Flops| match in_bf16 {
            true => Flops {
                matrices: flops.all(),
                others: 0.0,
            },
            false => flops,
        };
        Work {
            model: factors(self.model),
            again: factors(self.again),
            bytes: 0.0,
            exchanged: self.exchanged,
        }
    }

    /// The same work as work that is done again.
    pub(super) fn again(self) -> Work {
        Work {
            model: Flops::default(),
            again: self.again + self.model,
            ..self
        }
    }
}
