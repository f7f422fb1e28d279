use super::*;

/// A tone of half scale between stretches of silence.
fn tone(before: usize, length: usize, after: usize) -> Vec<f32> {
    let sounding = (0..length).map(|n| 0.5 * (n as f32 * 0.3).sin());
    let silence = |count| std::iter::repeat_n(0.0, count);
    silence(before).chain(sounding).chain(silence(after)).collect()
}

fn plain() -> Scene {
    Scene {
        level: -20.0,
        silence: [0.1, 0.2],
        shortest: 0.0,
        noise: None,
        room: None,
    }
}

fn staged(spoken: &[f32], scene: &Scene, seed: u64) -> Vec<f32> {
    stage(spoken, scene, &mut Random::of(seed, &[])).unwrap()
}

fn peak(clip: &[f32]) -> f64 {
    clip.iter()
        .fold(0.0, |peak, sample| f64::max(peak, f64::from(sample.abs())))
}

fn in_decibels(ratio: f64) -> f64 {
    10.0 * ratio.log10()
}

#[test]
fn silence_is_cut_and_laid_around_anew_and_the_level_is_as_asked() {
    let spoken = tone(5_000, 16_000, 9_000);
    let clip = staged(&spoken, &plain(), 1);
    // 0.1 s and 0.2 s around the tone and its 20 and 40 ms. (The tone begins and ends near zero.)
    let expected = 1_600 + 320 + 16_000 + 640 + 3_200;
    assert!(clip.len().abs_diff(expected) < 20, "{} and not {expected}", clip.len());
    assert!(clip[..1_600 + 300].iter().all(|sample| *sample == 0.0));
    assert!((peak(&clip) - 0.1).abs() < 1e-6);
    // Level 0 is full scale, and nothing is clipped at it.
    let loud = staged(&spoken, &Scene { level: 0.0, ..plain() }, 1);
    let numbers = quantized(&loud);
    assert_eq!(numbers.iter().map(|number| number >> 16).max(), Some(32_767));
    assert!(numbers.iter().all(|number| number & 0xffff == 0));
    let full = |number: &&i32| (**number >> 16).abs() == 32_767;
    assert!(numbers.iter().filter(full).count() < 400, "only the peaks of the tone");
    let short = staged(
        &tone(0, 160, 0),
        &Scene {
            shortest: 1.0,
            ..plain()
        },
        1,
    );
    assert_eq!(short.len(), 16_000);
    assert_eq!(stage(&[0.001; 16_000], &plain(), &mut Random::of(1, &[])), None);
    assert_eq!(stage(&[], &plain(), &mut Random::of(1, &[])), None);
}

#[test]
fn noise_has_the_ratio_that_was_asked() {
    let speech = tone(0, 40_000, 0);
    for (ratio, colour) in [(0.0, 0.0), (10.0, 1.0), (30.0, 0.5), (60.0, 0.0)] {
        let mut clip = vec![0.0; 60_000];
        clip[10_000..50_000].copy_from_slice(&speech);
        let before = clip.clone();
        add_noise(
            &mut clip,
            power(&speech),
            &Noise { ratio, colour },
            &mut Random::of(3, &[]),
        );
        let noise: Vec<f32> = clip.iter().zip(&before).map(|(with, without)| with - without).collect();
        let found = in_decibels(power(&speech) / power(&noise));
        assert!((found - ratio).abs() < 0.01, "{found} dB instead of {ratio}");
    }
    let scene = Scene {
        level: 0.0,
        noise: Some(Noise {
            ratio: -10.0,
            colour: 0.3,
        }),
        ..plain()
    };
    let loud = staged(&speech, &scene, 1);
    assert!(
        (peak(&loud) - 1.0).abs() < 1e-6,
        "noise that is louder than speech does not clip either"
    );
}

/// Power of a signal around a frequency, in cycles per sample: the mean of many short spectra.
fn power_at(signal: &[f32], frequency: f64) -> f64 {
    const LENGTH: usize = 2_000;
    let of = |piece: &[f32]| {
        let (mut real, mut imaginary) = (0.0, 0.0);
        for (n, sample) in piece.iter().enumerate() {
            let angle = std::f64::consts::TAU * frequency * n as f64;
            let window = 0.5 - 0.5 * (std::f64::consts::TAU * n as f64 / LENGTH as f64).cos();
            real += window * f64::from(*sample) * angle.cos();
            imaginary += window * f64::from(*sample) * angle.sin();
        }
        real * real + imaginary * imaginary
    };
    let pieces = signal.chunks_exact(LENGTH);
    let count = pieces.len() as f64;
    pieces.map(of).sum::<f64>() / count
}

#[test]
fn pink_noise_loses_three_decibels_with_each_octave_and_white_noise_none() {
    let noise = |colour| {
        let mut clip = vec![0.0; 1_000_000];
        add_noise(&mut clip, 1.0, &Noise { ratio: 0.0, colour }, &mut Random::of(5, &[]));
        clip
    };
    for (colour, slope) in [(0.0, 0.0), (1.0, -3.0)] {
        let noise = noise(colour);
        // From 50 to 6,400 Hz at 16 kHz: seven octaves.
        let found = in_decibels(power_at(&noise, 0.4) / power_at(&noise, 0.4 / 128.0)) / 7.0;
        assert!((found - slope).abs() < 0.35, "{found} dB an octave instead of {slope}");
    }
}

#[test]
fn rooms_have_the_energy_and_the_decay_that_were_asked() {
    for (decay, level) in [(0.1, -5.0), (0.4, -12.0), (1.0, 0.0)] {
        let reflections = reflections(&Room { decay, level }, &mut Random::of(9, &[]));
        let energy = |from: f64, to: f64| -> f64 {
            let within = |(delay, _): &&(usize, f32)| (samples_in(from)..samples_in(to)).contains(delay);
            reflections
                .iter()
                .filter(within)
                .map(|(_, factor)| f64::from(*factor).powi(2))
                .sum()
        };
        assert!((in_decibels(energy(0.0, 2.0 * decay)) - level).abs() < 1e-4);
        // The second quarter is 15 dB below the first, and so on: 60 dB in all. (Sums of 35 reflections and more.)
        let fall = in_decibels(energy(decay / 2.0, decay * 0.75) / energy(decay / 4.0, decay / 2.0));
        assert!((fall + 15.0).abs() < 1.5, "{fall} dB");
        assert!(reflections.windows(2).all(|pair| pair[0].0 <= pair[1].0));
        let last = reflections.last().unwrap().0;
        assert!(last > samples_in(decay * 0.95) && last <= samples_in(decay) + 1);
    }
    let spoken = tone(0, 8_000, 0);
    let room = Room {
        decay: 0.3,
        level: -8.0,
    };
    let wet = in_room(&spoken, &room, &mut Random::of(2, &[]));
    assert!(wet.len() > 8_000 && wet.len() <= 8_000 + samples_in(0.3) + 1);
    assert!(power(&wet[8_000..]) > 0.0 && power(&wet[8_000..]) < power(&wet[..8_000]) / 4.0);
    // A room too small for a reflection leaves the sound as it is.
    let small = Room {
        decay: 0.001,
        level: 0.0,
    };
    assert_eq!(in_room(&spoken, &small, &mut Random::of(2, &[])), spoken);
    let scene = Scene {
        level: 0.0,
        room: Some(room),
        ..plain()
    };
    assert!(peak(&staged(&spoken, &scene, 4)) <= 1.0);
    assert_eq!(staged(&spoken, &scene, 4), staged(&spoken, &scene, 4));
    assert_ne!(staged(&spoken, &scene, 4), staged(&spoken, &scene, 5));
}

#[test]
fn a_sentence_is_joined_after_a_pause_at_its_level() {
    let mut spoken = tone(3_000, 16_000, 2_000);
    let pause = Pause {
        seconds: 0.5,
        tone: None,
    };
    let begin = spoken.len() + 8_000;
    assert!(join(&mut spoken, &pause, &tone(4_000, 8_000, 4_000), -6.0));
    assert!(spoken[begin - 8_000..begin].iter().all(|sample| *sample == 0.0));
    // Its own silence is cut to 20 and 40 ms.
    let expected = begin + 320 + 8_000 + 640;
    assert!(
        spoken.len().abs_diff(expected) < 20,
        "{} and not {expected}",
        spoken.len()
    );
    let ratio = in_decibels(power(&spoken[begin + 400..begin + 8_200]) / power(&spoken[3_000..19_000]));
    assert!((ratio + 6.0).abs() < 0.5, "{ratio} dB");

    let before = spoken.clone();
    for silence in [&[0.001; 16_000][..], &[]] {
        assert!(!join(&mut spoken, &pause, silence, 0.0));
        assert_eq!(spoken, before);
    }

    // A tone of 500 Hz in the middle of the pause, 10 dB below the speech.
    let mut spoken = tone(0, 16_000, 0);
    let toned = Pause {
        seconds: 0.5,
        tone: Some(Tone {
            frequency: 500.0,
            level: -10.0,
        }),
    };
    assert!(join(&mut spoken, &toned, &tone(0, 8_000, 0), 0.0));
    let pause = &spoken[16_000..24_000];
    assert!(pause[..800].iter().chain(&pause[7_200..]).all(|sample| *sample == 0.0));
    let inner = &pause[1_000..7_000];
    let level = in_decibels(power(inner) / power(&spoken[..16_000]));
    assert!((level + 10.0).abs() < 0.5, "{level} dB");
    let crossings = inner.windows(2).filter(|two| (two[0] < 0.0) != (two[1] < 0.0)).count();
    // Two for each period of 32 samples.
    assert!(crossings.abs_diff(6_000 / 16) <= 1, "{crossings}");
    // A pause that is shorter than the silence around a tone has none.
    let mut spoken = tone(0, 16_000, 0);
    let short = Pause { seconds: 0.08, ..toned };
    assert!(join(&mut spoken, &short, &tone(0, 8_000, 0), 0.0));
    assert!(spoken[16_000..16_000 + 1_280].iter().all(|sample| *sample == 0.0));
}
