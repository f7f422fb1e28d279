//! Random numbers that depend only on a seed and a position: dropout, dither, initial weights.
//!
//! Every number is a hash of (seed, position), so a mask can be made again in the backward pass instead of being kept,
//! and by any number of threads.

use flow_random::{mix, nth};

/// A generator: a seed and how many numbers were drawn. A copy draws the same numbers again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Noise {
    seed: u64,
    drawn: u64,
    no_masks: bool,
}

impl Noise {
    /// A generator for a seed; neighbouring seeds give unrelated numbers.
    pub fn new(seed: u64) -> Self {
        Self {
            seed: nth(seed, 1),
            drawn: 0,
            no_masks: false,
        }
    }

    /// The same generator, but [`DropMask::draw`] makes no mask of it: training without dropout.
    pub fn without_dropout(mut self) -> Self {
        self.no_masks = true;
        self
    }

    /// A generator for a named purpose; does not advance this one.
    pub fn derive(&self, name: &str) -> Self {
        // FNV-1a over the name, then mixed with the seed.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self::new(self.seed ^ mix(hash))
    }

    /// The next 64 bits; also the key of a counter-based mask.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.drawn += 1;
        nth(self.seed, self.drawn)
    }

    /// Uniform in [0, 1) with 53 bits.
    #[inline]
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Uniform in [0, 1) with 24 bits, exact in f32.
    #[inline]
    pub fn uniform_f32(&mut self) -> f32 {
        (self.bits() >> 40) as f32 * (1.0 / (1u32 << 24) as f32)
    }

    /// Two independent standard normal values (Box and Muller's method).
    #[inline]
    pub fn normal_pair(&mut self) -> (f64, f64) {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * self.uniform()).sin_cos();
        (radius * cos, radius * sin)
    }

    /// The key from which a kernel on a device draws the numbers of a new generator.
    pub fn key(&self) -> u64 {
        self.seed
    }

    /// Standard normal.
    #[inline]
    pub fn normal(&mut self) -> f64 {
        self.normal_pair().0
    }
}

/// A dropout mask that is made from a key and an element's index when it is needed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropMask {
    key: u64,
    /// An element is dropped if its 32 bits are below this.
    threshold: u64,
    /// `1 / (1 - p)`.
    pub keep_factor: f64,
}

impl DropMask {
    /// A mask that drops each element with probability `p`; none if `p` is 0.
    pub fn draw(p: f64, noise: &mut Noise) -> Option<Self> {
        if p <= 0.0 || noise.no_masks {
            return None;
        }
        Some(Self {
            key: noise.bits(),
            threshold: (p.min(1.0) * (1u64 << 32) as f64).round() as u64,
            keep_factor: if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 },
        })
    }

    /// Key and threshold, from which a kernel on a device computes the mask.
    pub(crate) fn key_and_threshold(&self) -> (u64, u64) {
        (self.key, self.threshold)
    }

    /// Whether the element at this index stays.
    #[inline(always)]
    pub fn keeps(&self, index: usize) -> bool {
        nth(self.key, index as u64) >> 32 >= self.threshold
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_of_the_generator_are_those_of_its_distributions() {
        let mut noise = Noise::new(3);
        let n = 200_000;
        let uniform: Vec<f64> = (0..n).map(|_| noise.uniform()).collect();
        let normal: Vec<f64> = (0..n).map(|_| noise.normal()).collect();
        let mean = |v: &[f64]| v.iter().sum::<f64>() / n as f64;
        let square = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>() / n as f64;
        // Five standard errors of each mean.
        assert!((mean(&uniform) - 0.5).abs() < 5.0 * 0.2887 / (n as f64).sqrt());
        assert!((square(&uniform) - 1.0 / 3.0).abs() < 5.0 * 0.2981 / (n as f64).sqrt());
        assert!(mean(&normal).abs() < 5.0 / (n as f64).sqrt());
        assert!((square(&normal) - 1.0).abs() < 5.0 * std::f64::consts::SQRT_2 / (n as f64).sqrt());
    }

    #[test]
    fn a_mask_drops_its_share_and_depends_on_its_key() {
        let mut noise = Noise::new(1);
        let a = DropMask::draw(0.1, &mut noise).unwrap();
        let b = DropMask::draw(0.1, &mut noise).unwrap();
        let n = 100_000;
        let dropped = |m: &DropMask| (0..n).filter(|&i| !m.keeps(i)).count();
        for mask in [&a, &b] {
            let share = dropped(mask) as f64 / n as f64;
            assert!((share - 0.1).abs() < 5.0 * 0.3 / (n as f64).sqrt());
        }
        let both = (0..n).filter(|&i| !a.keeps(i) && !b.keeps(i)).count() as f64 / n as f64;
        assert!((both - 0.01).abs() < 5.0 * 0.0995 / (n as f64).sqrt());
        assert!(DropMask::draw(0.0, &mut noise).is_none());
    }
}
