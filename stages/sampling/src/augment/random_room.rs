//! Impulse responses of rooms that do not exist.

use std::f64::consts::{FRAC_1_SQRT_2, PI, TAU};
use std::sync::LazyLock;

use flow_random::SplitMix64;

/// Reverberation times that are drawn: seconds until sound has lost 60 dB.
const REVERBERATION: [f64; 2] = [0.1, 0.8];
/// Ratios of a room's volume to its surface, in m.
const VOLUME_TO_SURFACE: [f64; 2] = [0.1, 1.2];
/// Distances between mouth and microphone, in m.
const DISTANCE: [f64; 2] = [0.2, 12.0];
/// Of sound, in m/s.
const SPEED: f64 = 340.0;
/// Image sources for each second of samples.
const IMAGES: usize = 2;
/// Share of the density of near images in that of the farthest ones, before it is squared.
const NEAREST: f64 = 0.25;
/// The number of reflections is off by up to this, times the power of the distance's ratio.
const SPREAD: f64 = 2.0;
const SPREAD_POWER: f64 = 0.2;
/// What is below that many Hz is removed, as microphones do it.
const HIGH_PASS: f64 = 80.0;

/// Places between two samples at which an image may arrive.
const PHASES: usize = 64;
/// Zero crossings of the band limit on each side.
const CROSSINGS: usize = 6;
const TAPS: usize = 2 * CROSSINGS + 2;
/// Of the band, as a share of all that the sample rate holds.
const ROLLOFF: f64 = 0.99;

/// Row p: the samples around an image that arrives p / 64 of a sample after the one with number `CROSSINGS`.
static KERNELS: LazyLock<Vec<[f64; TAPS]>> = LazyLock::new(|| {
    let kernel = |phase: usize| {
        std::array::from_fn(|tap| {
            let at = (tap as f64 - CROSSINGS as f64 - phase as f64 / PHASES as f64) * ROLLOFF;
            let window = if at.abs() < CROSSINGS as f64 {
                (PI * at / (2.0 * CROSSINGS as f64)).cos().powi(2)
            } else {
                0.0
            };
            let sinc = if at == 0.0 { 1.0 } else { (PI * at).sin() / (PI * at) };
            ROLLOFF * window * sinc
        })
    };
    (0..PHASES).map(kernel).collect()
});

/// An impulse response of a random room and place, as Lhotse's `FastRandomRIRGenerator` draws them for one source (Luo and Gu,
/// "Fast random approximation of multi-channel room impulse response", 2023): image sources, two for each sample of a second,
/// whose distances have a density that grows with their square. Their number of reflections grows with it, up to the one at which
/// they are 60 dB lower when the reverberation time is over; Eyring's formula gives the share that a wall reflects. Its length is
/// the reverberation time.
///
/// Two things differ from Lhotse: images are put at 1/64 of a sample at once, instead of on samples at 64 times the rate that
/// are then resampled, and the logarithm of the reflected share has nothing added, which near 1 changes its sign there.
pub fn impulse_response(random: &mut SplitMix64, sample_rate: u32) -> Vec<f32> {
    let mut uniform = |[low, high]: [f64; 2]| low + (high - low) * random.unit();
    let rate = f64::from(sample_rate);
    let (t60, ratio, direct) = (uniform(REVERBERATION), uniform(VOLUME_TO_SURFACE), uniform(DISTANCE));
    // Reflected share of the amplitude at a wall, and how far sound goes in the reverberation time.
    let reflected = (1.0 - (1.0 - (-0.16 * ratio / t60).exp()).powi(2)).sqrt();
    let farthest = SPEED * t60;
    let most_reflections = (farthest / direct / 1000.0).log10() / reflected.log10();
    let last = ((PHASES as f64 * rate * t60).ceil() as usize).max(1) - 1;
    let length = last / PHASES + 1;
    // With room for the taps on both sides.
    let mut response = vec![0.0; length + TAPS];
    let mut add = |distance: f64, amplitude: f64| {
        let at = ((distance * PHASES as f64 * rate / SPEED).ceil() as usize).min(last);
        let kernel = &KERNELS[at % PHASES];
        for (to, tap) in response[at / PHASES..].iter_mut().zip(kernel) {
            *to += amplitude * tap;
        }
    };
    add(direct, 1.0 / direct);
    let cube = NEAREST.powi(3);
    for _ in 0..IMAGES * sample_rate as usize {
        // The inverse of the distribution whose density is the square, from NEAREST to 1.
        let place = (cube + (1.0 - cube) * uniform([0.0, 1.0])).cbrt();
        let place = (place - NEAREST) / (1.0 - NEAREST);
        let times = 1.0 + place * (farthest / direct - 2.0);
        let distance = direct * times;
        let reflections = 1.0 + (distance / farthest).powi(2) * (most_reflections - 1.0);
        let off = uniform([-SPREAD, SPREAD]) * times.powf(SPREAD_POWER);
        add(distance, reflected.powf((reflections + off).max(1.0)) / distance);
    }
    high_pass(&mut response, rate);
    response[CROSSINGS..CROSSINGS + length]
        .iter()
        .map(|&h| h as f32)
        .collect()
}

/// A high-pass filter of second order (Bristow-Johnson's "Cookbook formulae for audio EQ biquad filter coefficients", Q = √½).
fn high_pass(signal: &mut [f64], rate: f64) {
    let (sin, cos) = (TAU * HIGH_PASS / rate).sin_cos();
    let alpha = sin / (2.0 * FRAC_1_SQRT_2);
    let (b0, b1) = ((1.0 + cos) / 2.0, -(1.0 + cos));
    let (a0, a1, a2) = (1.0 + alpha, -2.0 * cos, 1.0 - alpha);
    let (mut x1, mut x2, mut y1, mut y2) = (0.0, 0.0, 0.0, 0.0);
    for x in signal {
        let y = (b0 * (*x + x2) + b1 * x1 - a1 * y1 - a2 * y2) / a0;
        (x2, x1) = (x1, *x);
        (y2, y1) = (y1, y);
        *x = y;
    }
}
