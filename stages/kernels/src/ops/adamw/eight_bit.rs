//! Optimizer moments in eight bits: blocks of 256 numbers, each with its largest absolute value as scale, and one code
//! per number for its ratio to the scale.
//!
//! Block-wise dynamic quantisation (Dettmers et al., 2022, "8-bit optimizers via block-wise quantization"), with the
//! tables and the rounding of bitsandbytes 0.50.2 on the CPU: a ratio of -1 to 1 is rounded to one of 65,536 steps, and
//! each step has the code whose value is nearest. As there, a small ratio that is not zero never becomes the code of
//! zero, so that the second moment does not vanish while the first one does not. Unlike there, a ratio of exactly zero
//! does become it, so that elements without gradients stay zero.

use std::sync::OnceLock;

/// Numbers that share a scale.
pub const BLOCK: usize = 256;
/// Tensors with fewer elements are kept in 32 bits.
pub const LEAST: usize = 4096;

/// Steps to which a ratio is rounded.
const STEPS: usize = 1 << 16;

/// A code table: signed or unsigned.
pub struct Table {
    /// The ratio of each code, ascending.
    values: [f32; 256],
    /// The code of each step.
    nearest: Vec<u8>,
    /// The code of zero.
    zero: u8,
}

impl Table {
    /// For numbers of both signs.
    pub fn signed() -> &'static Table {
        static TABLE: OnceLock<Table> = OnceLock::new();
        TABLE.get_or_init(|| Table::new(true))
    }

    /// For numbers that are not negative.
    pub fn unsigned() -> &'static Table {
        static TABLE: OnceLock<Table> = OnceLock::new();
        TABLE.get_or_init(|| Table::new(false))
    }

    /// The values of a table: seven decades, each with twice as many evenly spaced values as the one below it; zero and
    /// one.
    fn new(signed: bool) -> Table {
        let mut shares = vec![0.0f32, 1.0];
        for decade in 0..7i32 {
            let edges = (1usize << decade) * if signed { 1 } else { 2 };
            let edge = |index: usize| (0.1 + 0.9 * index as f64 / edges as f64) as f32;
            let factor = 10f64.powi(decade - 6) as f32;
            for index in 0..edges {
                let share = factor * ((edge(index) + edge(index + 1)) / 2.0);
                shares.push(share);
                if signed {
                    shares.push(-share);
                }
            }
        }
        shares.sort_by(f32::total_cmp);
        let mut values = [0.0f32; 256];
        values.copy_from_slice(&shares);
        let middle = |code: usize| (f64::from(values[code]) + f64::from(values[code + 1])) / 2.0;
        let mut nearest = Vec::with_capacity(STEPS);
        let mut code = 0usize;
        for step in 0..STEPS {
            let share = step as f64 * 2.0 / (STEPS - 1) as f64 - 1.0;
            while code < 255 && middle(code) < share {
                code += 1;
            }
            nearest.push(code as u8);
        }
        let zero = values.iter().position(|value| *value == 0.0).unwrap_or(0) as u8;
        Table { values, nearest, zero }
    }

    /// The ratio of each code.
    pub fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// The numbers of a block into `out`, which is as long as `codes`.
    #[inline]
    pub fn read(&self, codes: &[u8], scale: f32, out: &mut [f32]) {
        for (out, code) in out.iter_mut().zip(codes) {
            *out = self.values[usize::from(*code)] * scale;
        }
    }

    /// The codes of a block of numbers; gives its scale. A block of zeros has the scale 0 and the codes 0. Numbers that
    /// are not finite give the scale NaN.
    #[inline]
    pub fn write(&self, numbers: &[f32], codes: &mut [u8]) -> f32 {
        let mut scale = 0.0f32;
        let mut finite = true;
        for number in numbers {
            finite &= number.is_finite();
            scale = scale.max(number.abs());
        }
        if !finite {
            codes.fill(self.zero);
            return f32::NAN;
        }
        if scale == 0.0 {
            codes.fill(0);
            return 0.0;
        }
        for (code, number) in codes.iter_mut().zip(numbers) {
            *code = if *number == 0.0 {
                self.zero
            } else {
                let step = (number / scale + 1.0) * 0.5 * (STEPS - 1) as f32 + 0.5;
                self.nearest[(step as usize).min(STEPS - 1)]
            };
        }
        scale
    }
}

/// Both tables as the kernels for devices take them: values, signed and then unsigned; codes of all steps in the same
/// order, and behind them the codes of zero.
pub(crate) fn both() -> (Vec<f32>, Vec<u8>) {
    let tables = [Table::signed(), Table::unsigned()];
    let values = tables.iter().flat_map(|table| table.values).collect();
    let codes = tables.iter().flat_map(|table| table.nearest.iter().copied());
    (values, codes.chain(tables.map(|table| table.zero)).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A decoded number differs by at most half the distance of its neighbours in the table plus half a step; zero
        /// and the largest number are exact.
        #[test]
        fn numbers_come_back(mut numbers in prop::collection::vec(-1e3..1e3f32, 1..256), exponent in -30..30i32, place in 0usize..256) {
            let factor = 2f32.powi(exponent);
            numbers.iter_mut().for_each(|number| *number *= factor);
            let place = place % numbers.len();
            numbers[place] = 0.0;
            for (table, numbers) in [
                (Table::signed(), numbers.clone()),
                (Table::unsigned(), numbers.iter().map(|number| number.abs()).collect()),
            ] {
                let mut codes = vec![0; numbers.len()];
                let scale = table.write(&numbers, &mut codes);
                let mut back = vec![0.0; numbers.len()];
                table.read(&codes, scale, &mut back);
                prop_assert_eq!(back[place], 0.0);
                for (number, back) in numbers.iter().zip(&back) {
                    let share = f64::from(number / scale.max(f32::MIN_POSITIVE));
                    let away = f64::from(back / scale.max(f32::MIN_POSITIVE)) - share;
                    // A decade has values some tenths of its upper edge apart at its sparsest.
                    prop_assert!(away.abs() <= 0.0081 + 3.1e-5, "{} {} of {}", number, back, scale);
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_not_hidden() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut codes = [7; 3];
            assert!(Table::signed().write(&[1.0, bad, 2.0], &mut codes).is_nan());
        }
    }
}
