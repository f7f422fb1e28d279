//! Features as a tensor on the model's device: computed there, if it is a GPU.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use flow_kernels::log_mel::{FrontEnd, Masked, Settings};
use flow_kernels::{Noise, is_gpu};

use super::{DEVIATION_GUARD, LOG_GUARD, LogMel, dither_of};
use crate::config::SpecAugmentConfig;
use crate::error::Result;
use crate::spec_augment::{self, Draws};

impl LogMel {
    /// Features of a batch of signals on a device, (batch, bands, frames), and the valid frames of each. Dither is added
    /// with `dither` only, and masks are set to 0 with `augment` only, which draws them.
    ///
    /// On a GPU they are computed there from the samples, with masks and dither as on the CPU.
    ///
    /// # Errors
    /// Where the batch is empty or the device fails.
    pub fn on(
        &self,
        (dtype, device): (DType, &Device),
        signals: &[&[f32]],
        dither: Option<&mut Noise>,
        augment: Option<(&SpecAugmentConfig, &mut Noise)>,
    ) -> Result<(Tensor, Vec<usize>)> {
        if !self.normalized || !is_gpu(device) || dtype != DType::F32 || !FrontEnd::takes(self.n_fft) {
            let mut features = self.compute(signals, dither)?;
            if let Some((config, noise)) = augment {
                spec_augment::apply(config, &mut features, noise);
            }
            return Ok((features.tensor(dtype, device)?, features.lengths));
        }
        let lengths: Vec<usize> = signals.iter().map(|signal| self.frames(signal.len())).collect();
        let longest = signals.iter().map(|signal| signal.len()).max().unwrap_or(0);
        let masks = augment.map_or_else(Vec::new, |(config, noise)| {
            let draws = Draws::new(config, signals.len(), noise);
            spec_augment::masks(config, self.bands.len(), 1 + longest / self.hop, &lengths, &draws)
        });
        let masked: Vec<Masked> = masks
            .iter()
            .map(|masks| Masked {
                frames: &masks.frames,
                bands: &masks.bands,
            })
            .collect();
        let keys = self
            .dither_seed(dither)
            .map(|seed| -> Vec<u64> { (0..signals.len()).map(|index| dither_of(seed, index).key()).collect() });
        let dither = keys.as_deref().map(|keys| (self.dither, keys));
        let features = self.front_end_on(device)?.compute(signals, &masked, dither)?;
        Ok((features, lengths))
    }

    /// The front end on a device.
    fn front_end_on(&self, device: &Device) -> Result<Arc<FrontEnd>> {
        let settings = Settings {
            points: self.n_fft,
            hop: self.hop,
            preemphasis: self.preemphasis,
            window: &self.window,
            bands: &self.bands,
            log_guard: LOG_GUARD,
            deviation_guard: DEVIATION_GUARD,
        };
        Ok(self.on_devices.get(device, || FrontEnd::new(&settings, device))?)
    }
}

#[cfg(test)]
mod tests {
    use flow_cuda_emulator::DeviceUnderTest;
    use flow_kernels::counts::counted;

    use super::*;
    use crate::config::TimeWidth;
    use crate::features::tests::{compare, front_end, values};
    use crate::features::{Features, LogMel};
    use crate::testing::golden;

    /// Features that were computed on a device.
    fn on_device(
        front_end: &LogMel,
        signals: &[&[f32]],
        seed: Option<u64>,
        augment: Option<&SpecAugmentConfig>,
    ) -> Features {
        let (mut dither, mut masks) = (seed.map(Noise::new), Noise::new(77));
        let compute = |device: &Device| {
            let augment = augment.map(|config| (config, &mut masks));
            front_end
                .on((DType::F32, device), signals, dither.as_mut(), augment)
                .unwrap()
        };
        let ((features, lengths), counts) = counted(|| DeviceUnderTest::get().run(compute));
        assert!(counts.kernels.contains_key("log_mel"), "{counts:?}");
        let (batch, bands, frames) = features.dims3().unwrap();
        Features {
            values: values(&features),
            batch,
            bands,
            frames,
            lengths,
        }
    }

    /// The largest difference of two batches of features of one shape.
    fn difference(a: &Features, b: &Features) -> f32 {
        assert_eq!(
            (a.batch, a.bands, a.frames, &a.lengths),
            (b.batch, b.bands, b.frames, &b.lengths)
        );
        let differences = a.values.iter().zip(&b.values).map(|(a, b)| (a - b).abs());
        differences.fold(0.0, |most, difference| {
            if difference.is_nan() {
                f32::NAN
            } else {
                most.max(difference)
            }
        })
    }

    /// Within the bounds of the features of the CPU, against NeMo; and as near to the CPU as rounding of the logarithm lets
    /// them be.
    #[test]
    fn features_of_a_device_equal_nemo() {
        let golden = golden::tensors("mel.safetensors");
        let waves = golden::waves("eval");
        let signals: Vec<&[f32]> = waves.iter().map(Vec::as_slice).collect();
        let front_end = front_end();
        let found = on_device(&front_end, &signals, None, None);
        for i in 0..waves.len() {
            let (worst, zero) = compare(&found, i, &golden[&format!("eval{i}.mel")]);
            assert!(worst < 6e-5, "eval{i}: {worst}");
            assert!(zero);
        }
        let worst = difference(&found, &front_end.compute(&signals, None).unwrap());
        assert!(worst < 1e-5, "{worst}");
        for name in golden
            .keys()
            .filter_map(|key| key.strip_prefix("special.")?.strip_suffix(".wav"))
        {
            let wave = values(&golden[&format!("special.{name}.wav")]);
            let found = on_device(&front_end, &[&wave], None, None);
            let (worst, zero) = compare(&found, 0, &golden[&format!("special.{name}.mel")]);
            let loudest = wave.iter().fold(0.0f32, |loudest, sample| loudest.max(sample.abs()));
            // As `short_and_odd_signals_equal_nemo` has them.
            let bound = match loudest {
                0.0 => 2.0,
                quiet if quiet < 1e-3 => 2e-3,
                _ => 1.5e-4,
            };
            assert!(zero && worst < bound, "{name}: {worst}");
        }
        let signals = [&[][..], &[0.5; 100]];
        let (found, expected) = (
            on_device(&front_end, &signals, None, None),
            front_end.compute(&signals, None).unwrap(),
        );
        assert_eq!(found, expected);
    }

    /// With dither and SpecAugment: the same noise, and zeros at the same places.
    #[test]
    fn dither_and_masks_of_a_device_are_those_of_the_cpu() {
        let front_end = LogMel {
            dither: 1e-3,
            ..front_end()
        };
        let waves = golden::waves("eval");
        let signals: Vec<&[f32]> = waves.iter().map(Vec::as_slice).collect();
        for config in [
            SpecAugmentConfig {
                freq_masks: 2,
                time_masks: 5,
                freq_width: 27,
                time_width: TimeWidth::Share(0.05),
            },
            SpecAugmentConfig {
                freq_masks: 0,
                time_masks: 3,
                freq_width: 0,
                time_width: TimeWidth::Frames(20),
            },
        ] {
            let found = on_device(&front_end, &signals, Some(3), Some(&config));
            let mut expected = front_end.compute(&signals, Some(&mut Noise::new(3))).unwrap();
            let plain = expected.clone();
            spec_augment::apply(&config, &mut expected, &mut Noise::new(77));
            assert!(difference(&found, &expected) < 1e-4);
            let masked = plain
                .values
                .iter()
                .zip(&expected.values)
                .filter(|(a, b)| a != b)
                .count();
            let zeros = |features: &Features| -> Vec<bool> { features.values.iter().map(|x| *x == 0.0).collect() };
            assert!(masked > 100 && zeros(&found) == zeros(&expected));
        }
        let other = on_device(&front_end, &signals, Some(4), None);
        assert!(difference(&other, &on_device(&front_end, &signals, Some(3), None)) > 1e-3);
    }

    /// The tables of one device are not used on another. Candle's device for Metal is there in every build, and holds nothing.
    #[test]
    fn a_front_end_is_made_for_each_device() {
        let front_end = front_end();
        DeviceUnderTest::get().run(|device| {
            let first = front_end.front_end_on(device).unwrap();
            let other = Device::Metal(candle_core::MetalDevice);
            assert!(front_end.front_end_on(&other).is_err());
            assert!(Arc::ptr_eq(&first, &front_end.clone().front_end_on(device).unwrap()));
        });
    }

    #[test]
    fn transforms_that_no_kernel_takes_are_computed_on_the_cpu() {
        let mut config = golden::preprocessor();
        (config.n_fft, config.features) = (400, 64);
        let mut builder = crate::parameters::ParameterBuilder::random(DType::F32, Device::Cpu, 1);
        let front_end = LogMel::new(&config, &mut builder).unwrap();
        let wave = golden::wave("eval", 0);
        let compute = |device: &Device| front_end.on((DType::F32, device), &[&wave], None, None).unwrap();
        let ((features, _), counts) = counted(|| DeviceUnderTest::get().run(compute));
        assert_eq!(counts.launches(), 0);
        assert_eq!(values(&features), front_end.compute(&[&wave], None).unwrap().values);
    }
}
