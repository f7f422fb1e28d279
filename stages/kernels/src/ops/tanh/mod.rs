//! The hyperbolic tangent of many values at once, equal to the bit to that of fdlibm in single precision, which C libraries have
//! used for long. So results do not depend on the library, and a vector is computed in the time of one value.

use crate::multiversion;

/// Replaces each value by its hyperbolic tangent, within two units in the last place.
pub fn tanh_in_place(values: &mut [f32]) {
    multiversion!({
        for value in values.iter_mut() {
            *value = tanh(*value);
        }
    });
}

/// The logarithm of 2 in two parts, the first of which has trailing zeros, and the inverse of it.
const LN2_HIGH: f32 = f32::from_bits(0x3f31_7180);
const LN2_LOW: f32 = f32::from_bits(0x3717_f7d1);
const INVERSE_LN2: f32 = f32::from_bits(0x3fb8_aa3b);
/// Half of the logarithm of 2, and one and a half of it.
const HALF_LN2: f32 = f32::from_bits(0x3eb1_7218);
const MORE_LN2: f32 = f32::from_bits(0x3f85_1592);
/// The polynomial of `exp(x) - 1`.
const Q1: f32 = f32::from_bits(0xbd08_8889);
const Q2: f32 = f32::from_bits(0x3ad0_0d01);
const Q3: f32 = f32::from_bits(0xb8a6_70cd);
const Q4: f32 = f32::from_bits(0x3686_7e54);
const Q5: f32 = f32::from_bits(0xb457_edbb);

/// `1 - 2 / (exp(2 |x|) + 1)` with the sign of x, or the same by `exp(-2 |x|)` below 1. No branches: all ways are computed.
#[inline(always)]
fn tanh(x: f32) -> f32 {
    let size = x.abs();
    let is_large = size >= 1.0;
    let t = exp_m1(if is_large { 2.0 * size } else { -2.0 * size });
    let bent = if is_large {
        1.0 - 2.0 / (t + 2.0)
    } else {
        -t / (t + 2.0)
    };
    // From 22 on `exp` would leave the range, and the result is 1.
    let bent = if size >= 22.0 { 1.0 } else { bent };
    // So small that the square is nothing.
    let bent = if size < f32::from_bits(0x2400_0000) { size } else { bent };
    bent.copysign(x)
}

/// `exp(x) - 1` for x above -2 and below 44.
#[inline(always)]
fn exp_m1(x: f32) -> f32 {
    let size = x.abs();
    // x = k ln 2 + r, and c is what the rounding of r lost.
    let far = (INVERSE_LN2 * x + 0.5f32.copysign(x)) as i32;
    let near = if x < 0.0 { -1 } else { 1 };
    let k = if size < MORE_LN2 { near } else { far };
    let k = if size > HALF_LN2 { k } else { 0 };
    let high = x - k as f32 * LN2_HIGH;
    let low = k as f32 * LN2_LOW;
    let r = high - low;
    let c = (high - r) - low;
    let half = 0.5 * r;
    let square = r * half;
    let r1 = 1.0 + square * (Q1 + square * (Q2 + square * (Q3 + square * (Q4 + square * Q5))));
    let t = 3.0 - r1 * half;
    let e = square * ((r1 - t) / (6.0 - r * t));
    let of_zero = r - (r * e - square);
    let e = (r * (e - c) - c) - square;
    let of_minus_one = 0.5 * (r - e) - 0.5;
    // With k = 1, where r is below -0.25 or not.
    let of_one = if r < -0.25 {
        -2.0 * (e - (r + 0.5))
    } else {
        1.0 + 2.0 * (r - e)
    };
    let scaled = |value: f32| f32::from_bits(value.to_bits().wrapping_add((k as u32) << 23));
    let at_ends = scaled(1.0 - (e - r)) - 1.0;
    let positive = k.clamp(0, 63) as u32;
    let of_few = scaled((1.0 - f32::from_bits((127 - positive) << 23)) - (e - r));
    let of_many = scaled((r - (e + f32::from_bits((127 - positive) << 23))) + 1.0);
    let between = if k < 23 { of_few } else { of_many };
    let value = if k <= -2 || k > 56 { at_ends } else { between };
    let value = if k == 1 { of_one } else { value };
    let value = if k == -1 { of_minus_one } else { value };
    let value = if k == 0 { of_zero } else { value };
    // So small that it is its own value.
    if size < f32::from_bits(0x3300_0000) { x } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_fdlibm() {
        // Read off a C library with fdlibm's functions. Each way of `exp_m1` has one.
        let pairs = [
            (0x0000_0000, 0x0000_0000),
            (0x0001_16c2, 0x0001_16c2),
            (0x1e3c_e508, 0x1e3c_e508),
            (0x3300_d959, 0x3300_d95a),
            (0x3a83_126f, 0x3a83_126c),
            (0x3dcc_cccd, 0x3dcc_1ebc),
            (0x3e2e_147b, 0x3e2c_6c15),
            (0x3e4c_cccd, 0x3e4a_1cc2),
            (0x3e99_999a, 0x3e95_26ed),
            (0x3f00_0000, 0x3eec_9a9f),
            (0x3f02_8f5c, 0x3ef0_9ca8),
            (0x3f05_1eb8, 0x3ef4_9518),
            (0x3f19_999a, 0x3f09_7c15),
            (0x3f4c_cccd, 0x3f29_fe50),
            (0x3f66_6666, 0x3f37_5f4c),
            (0x3f7d_70a4, 0x3f41_e27e),
            (0x3f80_0000, 0x3f42_f7d6),
            (0x3f83_d70a, 0x3f46_1edb),
            (0x3fc0_0000, 0x3f67_b7cc),
            (0x4000_0000, 0x3f76_ca83),
            (0x4040_0000, 0x3f7e_bbe9),
            (0x40a0_0000, 0x3f7f_fa0d),
            (0x40fc_cccd, 0x3f7f_fffb),
            (0x4100_0000, 0x3f7f_fffc),
            (0x4108_0000, 0x3f7f_ffff),
            (0x4118_0000, 0x3f80_0000),
            (0x4170_0000, 0x3f80_0000),
            (0x419d_999a, 0x3f80_0000),
            (0x41af_3333, 0x3f80_0000),
            (0x41b0_0000, 0x3f80_0000),
            (0x4e6e_6b28, 0x3f80_0000),
            (0x7f80_0000, 0x3f80_0000),
        ];
        for (x, expected) in pairs {
            for (x, expected) in [(x, expected), (x | 1 << 31, expected | 1 << 31)] {
                let mut found = [f32::from_bits(x); 19];
                tanh_in_place(&mut found);
                assert!(
                    found.iter().all(|found| found.to_bits() == expected),
                    "{}",
                    f32::from_bits(x)
                );
            }
        }
        let mut found = [f32::NAN];
        tanh_in_place(&mut found);
        assert!(found[0].is_nan());
    }

    #[test]
    fn values_of_all_sizes_are_close_to_the_tangent() {
        let values: Vec<f32> = (0..=f32::INFINITY.to_bits())
            .step_by(4_001)
            .map(f32::from_bits)
            .collect();
        let mut found = values.clone();
        tanh_in_place(&mut found);
        for (&x, found) in values.iter().zip(found) {
            let expected = f64::from(x).tanh() as f32;
            assert!(
                expected.to_bits().abs_diff(found.to_bits()) <= 2,
                "{x}: {found}, not {expected}"
            );
        }
    }
}
