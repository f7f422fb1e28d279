//! Log-mel features on a device, from samples that are copied there once.

use std::f64::consts::TAU;
use std::ops::Range;

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use crate::device::launch::Argument::{Float, Int, Read, Write};
use crate::device::launch::{Grid, THREADS, fresh, launch, numbers};
use crate::device::to_device;
use crate::device::upload::Upload;
use crate::error::{Error, Result};

/// Points of the Fourier transform, at most; as in `log_mel.cu`.
const MOST_POINTS: usize = 1024;

/// One row of the filter bank: its first bin, and the weights from there on.
#[derive(Clone, Debug)]
pub struct Band {
    pub first: usize,
    pub weights: Vec<f32>,
}

/// What the features of a model are made with.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// Points of the Fourier transform.
    pub points: usize,
    /// Samples from frame to frame.
    pub hop: usize,
    pub preemphasis: f32,
    /// No longer than the transform.
    pub window: &'a [f32],
    pub bands: &'a [Band],
    /// Added before the logarithm.
    pub log_guard: f32,
    /// Added to the standard deviation.
    pub deviation_guard: f32,
}

/// Masked frames and bands of an utterance.
#[derive(Clone, Copy, Debug, Default)]
pub struct Masked<'a> {
    pub frames: &'a [Range<usize>],
    pub bands: &'a [Range<usize>],
}

/// The front end on a device.
#[derive(Debug)]
pub struct FrontEnd {
    points: usize,
    hop: usize,
    preemphasis: f32,
    log_guard: f32,
    deviation_guard: f32,
    bands: usize,
    window: Tensor,
    twiddles: Tensor,
    weights: Tensor,
    band_table: Tensor,
    upload: Upload,
}

impl FrontEnd {
    /// Whether the kernels take a transform of so many points: powers of two up to 1024.
    pub fn takes(points: usize) -> bool {
        points.is_power_of_two() && (2..=MOST_POINTS).contains(&points)
    }

    /// Copies window, filter bank and twiddle factors to a device.
    ///
    /// # Errors
    /// Where the transform is none that the kernels take, or a part does not fit another.
    pub fn new(settings: &Settings, device: &Device) -> Result<Self> {
        let (points, width) = (settings.points, settings.window.len());
        let bins = points / 2 + 1;
        let fits = |band: &Band| band.first + band.weights.len() <= bins;
        if !Self::takes(points) || width == 0 || width > points || settings.hop == 0 || settings.bands.is_empty() {
            return Err(Error::Input(format!(
                "log-mel features on a device: a transform of {points} points with a window of {width} samples and a hop of \
                 {}",
                settings.hop
            )));
        }
        if !settings.bands.iter().all(fits) {
            return Err(Error::Input(format!(
                "log-mel features: a band reaches past {bins} bins"
            )));
        }
        let angle = |k: usize| TAU * k as f64 / points as f64;
        let twiddles: Vec<f64> = (0..points / 2).flat_map(|k| [angle(k).cos(), angle(k).sin()]).collect();
        let mut weights: Vec<f32> = Vec::new();
        let mut table = Vec::with_capacity(3 * settings.bands.len());
        for band in settings.bands {
            table.extend([band.first, weights.len(), band.weights.len()]);
            weights.extend(&band.weights);
        }
        // A device has no memory of no bytes.
        weights.push(0.0);
        let copied = |values: &[f32]| to_device(&Tensor::new(values, &Device::Cpu)?, device);
        Ok(Self {
            points,
            hop: settings.hop,
            preemphasis: settings.preemphasis,
            log_guard: settings.log_guard,
            deviation_guard: settings.deviation_guard,
            bands: settings.bands.len(),
            window: copied(settings.window)?,
            twiddles: to_device(&Tensor::new(twiddles.as_slice(), &Device::Cpu)?, device)?,
            weights: copied(&weights)?,
            band_table: numbers(table.into_iter(), device)?,
            upload: Upload::default(),
        })
    }

    /// Features (utterances, bands, frames) of signals, normalised, with frames past an utterance's end 0. `masked`, if not
    /// empty, is what to set to 0 in each; `dither` its factor, and a key for each utterance.
    ///
    /// # Errors
    /// Where there is no signal, lists have other lengths than the signals, or the device fails.
    pub fn compute(&self, signals: &[&[f32]], masked: &[Masked], dither: Option<(f32, &[u64])>) -> Result<Tensor> {
        let utterances = signals.len();
        let keys = dither.map_or(&[][..], |(_, keys)| keys);
        let wrong = |len: usize| len != 0 && len != utterances;
        if utterances == 0 || wrong(masked.len()) || (dither.is_some() && keys.len() != utterances) {
            return Err(Error::Input(format!(
                "log-mel features: {utterances} signals, {} masks and {} keys",
                masked.len(),
                keys.len()
            )));
        }
        let most = |count: fn(&Masked) -> usize| masked.iter().map(count).max().unwrap_or(0);
        let (of_time, of_bands) = (most(|masked| masked.frames.len()), most(|masked| masked.bands.len()));
        let words = 4 + 2 * (of_time + of_bands);
        let (table, count) = (
            utterances * words,
            signals.iter().map(|signal| signal.len()).sum::<usize>(),
        );
        let longest = signals.iter().map(|signal| signal.len()).max().unwrap_or(0);
        if u32::try_from(table + count).is_err() || i32::try_from(longest).is_err() {
            return Err(Error::Input(format!(
                "log-mel features: {count} samples are too many for the device"
            )));
        }
        let fill = |out: &mut [u32]| {
            let (table, samples) = out.split_at_mut(table);
            let (mut place, mut rest) = (table.len(), samples);
            let mut copies = Vec::with_capacity(utterances);
            for (at, (entry, signal)) in table.chunks_exact_mut(words).zip(signals).enumerate() {
                let key = keys.get(at).copied().unwrap_or(0);
                let Masked { frames, bands } = masked.get(at).copied().unwrap_or_default();
                let missing = |ranges: &[Range<usize>], count: usize| vec![0..0; count - ranges.len()];
                let (no_frames, no_bands) = (missing(frames, of_time), missing(bands, of_bands));
                let ranges = frames.iter().chain(&no_frames).chain(bands).chain(&no_bands);
                // The sizes of all of them are below those that were checked.
                let ranges = ranges.flat_map(|range| [range.start as u32, range.end as u32]);
                let numbers = [place as u32, signal.len() as u32, key as u32, (key >> 32) as u32];
                for (to, from) in entry.iter_mut().zip(numbers.into_iter().chain(ranges)) {
                    *to = from;
                }
                let (samples, after) = rest.split_at_mut(signal.len());
                copies.push((samples, signal));
                (place, rest) = (place + signal.len(), after);
            }
            // The device waits for it at the begin of a step.
            copies
                .into_par_iter()
                .for_each(|(samples, signal)| samples.copy_from_slice(bytemuck::cast_slice(signal)));
        };
        let device = self.window.device();
        self.upload.with(device, table + count, fill, |table| {
            self.of_table(
                table,
                (utterances, words, longest),
                (of_time, of_bands),
                dither.map_or(0.0, |of| of.0),
            )
        })
    }

    /// The features of utterances whose table, with the samples, is on the device.
    fn of_table(
        &self,
        table: &Tensor,
        (utterances, words, longest): (usize, usize, usize),
        (of_time, of_bands): (usize, usize),
        dither: f32,
    ) -> Result<Tensor> {
        let frames = 1 + longest / self.hop;
        let emphasised = fresh(table.shape(), &self.window)?;
        let numbers = [Float(self.preemphasis.into()), Float(dither.into()), Int(words)];
        launch(
            "emphasise",
            Grid::of(longest.div_ceil(THREADS), utterances),
            &[&[Read(table), Write(&emphasised)][..], &numbers].concat(),
        )?;
        let features = fresh((utterances, self.bands, frames), &self.window)?;
        let parts = [
            &emphasised,
            table,
            &self.window,
            &self.twiddles,
            &self.weights,
            &self.band_table,
        ]
        .map(Read);
        let width = self.window.elem_count();
        let sizes = [self.points, width, self.hop, self.bands, frames, words].map(Int);
        let rest = [&[Write(&features)][..], &sizes, &[Float(self.log_guard.into())]].concat();
        launch("log_mel", Grid::of(frames, utterances), &[&parts[..], &rest].concat())?;
        let sizes = [self.hop, self.bands, frames, words, of_time, of_bands].map(Int);
        let tensors = [Write(&features), Read(table)];
        let rest = [&sizes[..], &[Float(self.deviation_guard.into())]].concat();
        launch(
            "normalise_features",
            Grid::of(self.bands, utterances),
            &[&tensors[..], &rest].concat(),
        )?;
        Ok(features)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow_cuda_emulator::DeviceUnderTest;
    use crate::noise::Noise;

    const DITHER: f32 = 0.05;

    /// Features of one signal by their definition, (bands, frames), with the Fourier transform as a sum.
    fn expected(settings: &Settings, signal: &[f32], frames: usize, noise: &mut Noise, masked: &Masked) -> Vec<f32> {
        let mut noisy = signal.to_vec();
        for pair in noisy.chunks_mut(2) {
            let (first, second) = noise.normal_pair();
            for (sample, normal) in pair.iter_mut().zip([first, second]) {
                *sample += DITHER * normal as f32;
            }
        }
        let before = |at: usize| if at == 0 { 0.0 } else { noisy[at - 1] };
        let emphasised: Vec<f32> = (0..noisy.len())
            .map(|at| noisy[at] - settings.preemphasis * before(at))
            .collect();
        let (points, width) = (settings.points, settings.window.len());
        let valid = signal.len() / settings.hop;
        let mut features = vec![0.0; settings.bands.len() * frames];
        for frame in 0..valid {
            // The first sample of the window: it is centred at `frame * hop`.
            let first = (frame * settings.hop + (points - width) / 2) as i64 - (points / 2) as i64;
            let inside: Vec<(usize, f64)> = (0..width)
                .filter_map(|i| {
                    let at = usize::try_from(first + i as i64).ok()?;
                    Some((i, f64::from(emphasised.get(at)? * settings.window[i])))
                })
                .collect();
            let power: Vec<f64> = (0..=points / 2)
                .map(|bin| {
                    let angle = |i: usize| TAU * (bin * i) as f64 / points as f64;
                    let part = |of: fn(f64) -> f64| inside.iter().map(|&(i, x)| x * of(angle(i))).sum::<f64>();
                    part(f64::cos).powi(2) + part(f64::sin).powi(2)
                })
                .collect();
            for (band, row) in settings.bands.iter().zip(features.chunks_exact_mut(frames)) {
                let energy: f64 = band
                    .weights
                    .iter()
                    .zip(&power[band.first..])
                    .map(|(w, p)| f64::from(*w) * p)
                    .sum();
                row[frame] = (energy + f64::from(settings.log_guard)).ln() as f32;
            }
        }
        for (band, row) in features.chunks_exact_mut(frames).enumerate() {
            let row = &mut row[..valid];
            // Exact where all are equal, as in a band without weights.
            let mean = (row.iter().copied().map(f64::from).sum::<f64>() / valid as f64) as f32;
            let squares: f32 = row.iter().map(|x| (x - mean) * (x - mean)).sum();
            let deviation = if valid > 1 {
                (squares / (valid as f32 - 1.0)).sqrt()
            } else {
                0.0
            };
            for (frame, x) in row.iter_mut().enumerate() {
                let is_masked = masked.frames.iter().any(|range| range.contains(&frame))
                    || masked.bands.iter().any(|range| range.contains(&band));
                *x = if is_masked {
                    0.0
                } else {
                    (*x - mean) / (deviation + settings.deviation_guard)
                };
            }
        }
        features
    }

    /// Windows as long as the transform and shorter, signals without a sample, without a frame and of one, an odd number of
    /// samples, a band without weights, and other numbers of masks for each.
    #[test]
    fn features_are_those_of_the_definition() {
        for (points, width, hop) in [(16, 16, 4), (64, 50, 13), (1024, 400, 160)] {
            let bins = points / 2 + 1;
            let mut noise = Noise::new(points as u64);
            let window: Vec<f32> = (0..width).map(|_| 0.5 + 0.5 * noise.uniform_f32()).collect();
            let bands: Vec<Band> = (0..5)
                .map(|k| Band {
                    first: k * bins / 8,
                    weights: (0..if k == 2 { 0 } else { bins / 4 })
                        .map(|_| 0.1 + noise.uniform_f32())
                        .collect(),
                })
                .collect();
            let settings = Settings {
                points,
                hop,
                preemphasis: 0.97,
                window: &window,
                bands: &bands,
                log_guard: 1e-5,
                deviation_guard: 1e-5,
            };
            let signals: Vec<Vec<f32>> = [0, hop - 1, hop + 1, 9 * hop + 3, 300 * hop / points.div_ceil(16)]
                .into_iter()
                .map(|samples| (0..samples).map(|_| noise.normal() as f32).collect())
                .collect();
            let signals: Vec<&[f32]> = signals.iter().map(Vec::as_slice).collect();
            let frames = 1 + signals.iter().map(|signal| signal.len()).max().unwrap() / hop;
            let (times, of_bands) = ([2..4, 7..8], [1..2, 3..4]);
            let mut masked = [Masked::default(); 5];
            masked[3].frames = &times;
            (masked[4].frames, masked[4].bands) = (&times[..1], &of_bands);
            let generators: Vec<Noise> = (0..5).map(|seed| Noise::new(seed + 70)).collect();
            let keys: Vec<u64> = generators.iter().map(Noise::key).collect();
            let features = DeviceUnderTest::get()
                .run(|device| FrontEnd::new(&settings, device)?.compute(&signals, &masked, Some((DITHER, &keys))))
                .unwrap();
            assert_eq!(features.dims(), [5, 5, frames]);
            let found: Vec<f32> = features.flatten_all().unwrap().to_vec1().unwrap();
            for (at, (found, mut noise)) in found.chunks_exact(5 * frames).zip(generators).enumerate() {
                let expected = expected(&settings, signals[at], frames, &mut noise, &masked[at]);
                for (place, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    assert!(
                        (found - expected).abs() <= 2e-4,
                        "{points} points, signal {at}, band {}, frame {}: {found} for {expected}",
                        place / frames,
                        place % frames
                    );
                }
                assert!(signals[at].len() <= 2 * hop || expected.iter().any(|x| x.abs() > 0.3));
            }
        }
    }

    #[test]
    fn settings_that_no_kernel_takes_are_refused() {
        let bands = [Band {
            first: 7,
            weights: vec![1.0; 2],
        }];
        let settings = Settings {
            points: 16,
            hop: 4,
            preemphasis: 0.97,
            window: &[1.0; 16],
            bands: &bands,
            log_guard: 1e-5,
            deviation_guard: 1e-5,
        };
        let made = |settings: Settings| DeviceUnderTest::get().run(|device| FrontEnd::new(&settings, device));
        let front_end = made(settings).unwrap();
        let compute = |signals: &[&[f32]], masked: &[Masked], keys: Option<&[u64]>| {
            let dither = keys.map(|keys| (DITHER, keys));
            DeviceUnderTest::get().run(|_| front_end.compute(signals, masked, dither))
        };
        assert!(compute(&[&[0.0; 9]], &[], None).is_ok());
        assert!(compute(&[], &[], None).is_err());
        assert!(compute(&[&[0.0; 9]], &[Masked::default(); 2], None).is_err());
        assert!(compute(&[&[0.0; 9]], &[], Some(&[])).is_err());
        let past_the_end = [Band {
            first: 8,
            weights: vec![1.0; 2],
        }];
        for wrong in [
            Settings { points: 24, ..settings },
            Settings { points: 8, ..settings },
            Settings {
                points: 2048,
                ..settings
            },
            Settings { hop: 0, ..settings },
            Settings {
                window: &[],
                ..settings
            },
            Settings { bands: &[], ..settings },
            Settings {
                bands: &past_the_end,
                ..settings
            },
        ] {
            assert!(made(wrong).is_err());
        }
    }
}
