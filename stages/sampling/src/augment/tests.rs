//! Each function against what NeMo and Lhotse give for the same draws, and the steps as training applies them.

use std::fs;

use flow_storage_testing::{Fault, FaultRule, TestServer};
use serde_json::Value;

use super::*;
use crate::test_data::golden_augment;

/// Absolute. NeMo and Lhotse, which compute in f32, differ by at most 2.3e-7 from a restatement in f64.
const TOLERANCE: f64 = 1e-6;

/// The golden file: `in.*` waves, `draw.*` random numbers and `out.*` results, and the parameters of each case.
struct Golden {
    tensors: Vec<u8>,
    header: Value,
    cases: Value,
}

impl Golden {
    fn read() -> Golden {
        let folder = golden_augment();
        let bytes = fs::read(folder.join("augment.safetensors")).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        Golden {
            header: serde_json::from_slice(&bytes[8..8 + length]).unwrap(),
            tensors: bytes[8 + length..].to_vec(),
            cases: serde_json::from_str(&fs::read_to_string(folder.join("augment.json")).unwrap()).unwrap(),
        }
    }

    fn tensor(&self, name: &str) -> Vec<f32> {
        let entry = &self.header[name];
        let at = |end: usize| entry["data_offsets"][end].as_u64().unwrap() as usize;
        let bytes = &self.tensors[at(0)..at(1)];
        match entry["dtype"].as_str().unwrap() {
            "I16" => {
                let sample = |pair: &[u8]| f32::from(i16::from_le_bytes(pair.try_into().unwrap())) / 32768.0;
                bytes.chunks(2).map(sample).collect()
            }
            "F32" => bytes
                .chunks(4)
                .map(|four| f32::from_le_bytes(four.try_into().unwrap()))
                .collect(),
            other => panic!("{name} is {other}"),
        }
    }

    fn case(&self, name: &str) -> &Value {
        &self.cases[name]
    }

    /// Compares with what is stored of a result: all of it, its beginning and end, or its beginning.
    fn compare(&self, name: &str, result: &[f32]) {
        let expected = self.tensor(&format!("out.{name}"));
        let case = self.case(name);
        let (head, tail) = match (case["stored"].as_str(), case["note"].as_str()) {
            (Some("first 2400 and last 800 samples"), _) => (2400, 800),
            (None, Some("first and last 400 samples")) => (400, 400),
            (None, _) => (expected.len(), 0),
            (Some(other), _) => panic!("{name} stores {other}"),
        };
        let stored: Vec<f32> = [&result[..head], &result[result.len() - tail..]].concat();
        let mut farthest = 0.0f64;
        for (found, expected) in stored.iter().zip(&expected) {
            farthest = farthest.max((f64::from(*found) - f64::from(*expected)).abs());
        }
        assert_eq!(stored.len(), expected.len(), "{name}");
        assert!(farthest <= TOLERANCE, "{name}: {farthest:e} apart");
    }

    fn names(&self, prefix: &str) -> Vec<String> {
        let cases = self.cases.as_object().unwrap();
        let names: Vec<String> = cases.keys().filter(|name| name.starts_with(prefix)).cloned().collect();
        assert!(!names.is_empty(), "no case {prefix}");
        names
    }

    fn input(&self, case: &Value, key: &str) -> Vec<f32> {
        let name = case[key].as_str().unwrap();
        self.tensor(&format!("in.{}", name.split(' ').next().unwrap()))
    }
}

fn samples(seconds: f64) -> usize {
    (seconds * f64::from(SAMPLE_RATE)).round() as usize
}

#[test]
fn white_noise_is_nemos() {
    let golden = Golden::read();
    for name in golden.names("nemo_white") {
        let case = golden.case(&name);
        let level = case["level_db"].as_f64().unwrap();
        let draws = golden.tensor(&format!("draw.{name}"));
        // Draws are stored as results are: of the first 2,400 samples and of the last 800.
        let mut signal = golden.input(case, "input");
        let length = signal.len();
        let mut kept = [&signal[..2400], &signal[length - 800..]].concat();
        let mut drawn = draws.iter().map(|&x| f64::from(x));
        noise::white_noise(&mut kept, level, || drawn.next().unwrap());
        signal[..2400].copy_from_slice(&kept[..2400]);
        signal[length - 800..].copy_from_slice(&kept[2400..]);
        golden.compare(&name, &signal);
    }
}

#[test]
fn noise_is_nemos() {
    let golden = Golden::read();
    for name in golden.names("nemo_noise") {
        let case = golden.case(&name);
        let mut signal = golden.input(case, "input");
        let noise = golden.input(case, "noise");
        let snr = case["snr_db"].as_f64().unwrap();
        let (data, of_noise) = (levels::power(&signal), levels::power(&noise));
        let factor = noise::noise_factor(data, of_noise, snr, case["max_gain_db"].as_f64().unwrap());
        match case["insert_at"].as_u64() {
            Some(at) => noise::add(&mut signal, &noise, factor, at as usize),
            None => {
                let start = samples(case["start_time"].as_f64().unwrap());
                noise::add(&mut signal, &noise[start..], factor, 0);
            }
        }
        golden.compare(&name, &signal);
    }
}

#[test]
fn short_noises_at_several_places_are_nemos() {
    let golden = Golden::read();
    let name = "nemo_foreground";
    let case = golden.case(name);
    let mut signal = golden.input(case, "input");
    let noise = golden.input(case, "noise");
    let (data, of_noise) = (levels::power(&signal), levels::power(&noise));
    let snr = case["snr_db"].as_f64().unwrap();
    let factor = noise::noise_factor(data, of_noise, snr, case["max_gain_db"].as_f64().unwrap());
    let numbers = |key: &str| -> Vec<f64> {
        let list = case["foreground"][key].as_array().unwrap();
        list.iter().map(|number| number.as_f64().unwrap()).collect()
    };
    let (uniform, places) = (numbers("uniform"), numbers("randint"));
    // The first place is the number of additions; each has its length and its start in the noise.
    assert_eq!(places.len(), 1 + uniform.len() / 2);
    for (part, at) in uniform.chunks(2).zip(&places[1..]) {
        let start = samples(part[1]);
        noise::add(
            &mut signal,
            &noise[start..start + samples(part[0])],
            factor,
            *at as usize,
        );
    }
    golden.compare(name, &signal);
}

#[test]
fn normalized_noise_is_nemos() {
    let golden = Golden::read();
    for name in golden.names("nemo_norm") {
        let case = golden.case(&name);
        let mut signal = golden.input(case, "input");
        let noise = noise::repeated(&golden.input(case, "noise"), signal.len(), SAMPLE_RATE);
        let (snr, norm) = (case["snr_db"].as_f64().unwrap(), case["norm_to_db"].as_f64());
        noise::noise_norm(&mut signal, &noise, snr, norm);
        golden.compare(&name, &signal);
    }
}

#[test]
fn impulse_responses_are_nemos() {
    let golden = Golden::read();
    for name in golden.names("nemo_rir") {
        let case = golden.case(&name);
        let mut signal = golden.input(case, "input");
        let is = |key: &str| case[key].as_bool().unwrap_or(false);
        let response = golden.input(case, "rir");
        rooms::impulse(&mut signal, &response, is("normalize_impulse"), is("shift_impulse"));
        golden.compare(&name, &signal);
    }
}

#[test]
fn levels_and_places_are_nemos() {
    let golden = Golden::read();
    for name in golden.names("nemo_gain") {
        let case = golden.case(&name);
        let mut signal = golden.input(case, "input");
        levels::scale(&mut signal, levels::amplitude(case["gain_db"].as_f64().unwrap()));
        golden.compare(&name, &signal);
    }
    for name in golden.names("nemo_shift") {
        let case = golden.case(&name);
        let mut signal = golden.input(case, "input");
        let by = shift_samples(case["shift_ms"].as_f64().unwrap());
        let length = signal.len() as i64;
        assert_eq!(by.min(length), case["shift_samples"].as_i64().unwrap(), "{name}");
        levels::shift(&mut signal, by);
        golden.compare(&name, &signal);
    }
    let case = golden.case("nemo_silence");
    let seconds = |key: &str| (case[key].as_f64().unwrap() * f64::from(SAMPLE_RATE)) as usize;
    let padded = levels::pad(&golden.input(case, "input"), seconds("start_s"), seconds("end_s"));
    assert_eq!(padded.len() as u64, case["total"].as_u64().unwrap());
    golden.compare("nemo_silence", &padded);
}

#[test]
fn mixes_are_lhotses() {
    let golden = Golden::read();
    for name in golden.names("lhotse_mix") {
        let case = golden.case(&name);
        let mut signal = golden.input(case, "input");
        let power = levels::power(&signal);
        let mut noise = golden.input(case, "noise");
        let length = case["n"].as_u64().unwrap() as usize;
        if name == "lhotse_mix_padding_cut" {
            signal.resize(samples(1.2), 0.0);
        }
        // "noise_long truncated to 0.9 s"
        let words: Vec<&str> = case["noise"].as_str().unwrap().split(' ').collect();
        if let Some(seconds) = words.iter().rev().nth(1).filter(|_| words.len() > 1) {
            noise.truncate(samples(seconds.parse().unwrap()));
        } else if name != "lhotse_mix_long_untruncated" {
            noise.truncate(signal.len());
        }
        let at = samples(case["offset_s"].as_f64().unwrap_or(0.0));
        noise::mix(&mut signal, power, &noise, at, case["snr_db"].as_f64());
        assert_eq!(signal.len(), length, "{name}");
        golden.compare(&name, &signal);
    }
    for name in golden.names("lhotse_cutset_mix") {
        let case = golden.case(&name);
        let mut signal = golden.input(case, "input");
        let (power, length) = (levels::power(&signal), signal.len());
        for track in &case["tracks"].as_array().unwrap()[1..] {
            let number = |key: &str| track[key].as_f64().unwrap();
            let noise = golden.input(track, "of");
            let start = samples(number("start"));
            let noise = &noise[start..start + samples(number("duration"))];
            noise::mix(
                &mut signal,
                power,
                noise,
                samples(number("offset")),
                Some(number("snr")),
            );
        }
        signal.truncate(length);
        golden.compare(&name, &signal);
    }
}

#[test]
fn rooms_and_volume_are_lhotses() {
    let golden = Golden::read();
    for name in golden.names("lhotse_rir") {
        let case = golden.case(&name);
        let mut signal = golden.input(case, "input");
        let response = golden.input(case, "rir");
        if case["args"]["normalize_output"] == false {
            // As it is before its power is that of the input; Lhotse's responses are 2^-15 of what the file holds.
            let at = case["argmax"].as_u64().unwrap() as usize;
            rooms::convolve(&mut signal, &response, at);
            levels::scale(&mut signal, 2f64.powi(-15));
            golden.compare(&name, &signal);
            continue;
        }
        let early_only = case["args"]["early_only"] == true;
        rooms::reverb_rir(&mut signal, &response, early_only, SAMPLE_RATE);
        golden.compare(&name, &signal);
    }
    let case = golden.case("lhotse_volume_0.3");
    let mut signal = golden.input(case, "input");
    levels::scale(&mut signal, case["factor"].as_f64().unwrap());
    golden.compare("lhotse_volume_0.3", &signal);
}

#[test]
fn blocks_of_a_convolution_join_without_a_seam() {
    let mut random = SplitMix64::new(1);
    let mut noise = |length| -> Vec<f32> { (0..length).map(|_| random.unit() as f32 - 0.5).collect() };
    for (signal, response, skipped) in [
        (5000, 300, 0),
        (5000, 300, 299),
        (100, 2000, 7),
        (1, 1, 0),
        (4096, 1, 0),
        // Of an even and an odd number of blocks, the last one short.
        (120_000, 8000, 20),
        (40_000, 8000, 7_999),
    ] {
        let (signal, response) = (noise(signal), noise(response));
        let mut found = signal.clone();
        rooms::convolve(&mut found, &response, skipped);
        for (at, found) in found.iter().enumerate().step_by(1 + signal.len() / 4001) {
            let at = at + skipped;
            let terms = response
                .iter()
                .enumerate()
                .filter(|(lag, _)| *lag <= at && at - lag < signal.len());
            let sum: f64 = terms.map(|(lag, h)| f64::from(*h) * f64::from(signal[at - lag])).sum();
            assert!((sum - f64::from(*found)).abs() < 1e-5, "{at}: {sum} and {found}");
        }
    }
}

#[test]
fn a_room_does_not_silence_a_signal() {
    let mut signal = vec![0.0; 100];
    signal[99] = 0.5;
    for response in [vec![], vec![0.0; 7]] {
        let before = signal.clone();
        rooms::impulse(&mut signal, &response, false, false);
        assert_eq!(signal, before);
        rooms::reverb_rir(&mut signal, &response, false, SAMPLE_RATE);
        assert_eq!(signal, before);
    }
}

/// A folder with a noise of 0.3 s and one of 2 s.
fn noises() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut random = SplitMix64::new(2);
    for (name, length) in [("short.wav", 4800), ("long.wav", 32_000)] {
        let samples: Vec<i16> = (0..length).map(|_| (random.unit() * 8000.0 - 4000.0) as i16).collect();
        fs::write(folder.path().join(name), wav(&samples)).unwrap();
    }
    folder
}

/// 16 kHz, mono, 16 bits.
fn wav(samples: &[i16]) -> Vec<u8> {
    wav_of_rate(16_000, samples)
}

/// Mono, 16 bits.
fn wav_of_rate(rate: u32, samples: &[i16]) -> Vec<u8> {
    let data: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
    let size = data.len() as u32;
    let mut bytes = [
        b"RIFF".as_slice(),
        &(36 + size).to_le_bytes(),
        b"WAVEfmt ",
        &16u32.to_le_bytes(),
    ]
    .concat();
    for field in [1u16, 1] {
        bytes.extend(field.to_le_bytes());
    }
    bytes.extend(rate.to_le_bytes());
    bytes.extend((2 * rate).to_le_bytes());
    for field in [2u16, 16] {
        bytes.extend(field.to_le_bytes());
    }
    [bytes.as_slice(), b"data", &size.to_le_bytes(), &data].concat()
}

fn steps(yaml_as_json: &Value) -> Vec<Step> {
    serde_json::from_value(yaml_as_json.clone()).unwrap()
}

/// One of each step, always applied.
fn all_steps(path: &str) -> Vec<Step> {
    steps(&serde_json::json!([
        {"mix": {"path": path, "prob": 1}},
        {"noise": {"path": path, "prob": 1}},
        {"noise_norm": {"path": path, "prob": 1, "norm_to_db": -25}},
        {"white_noise": {"prob": 1}},
        {"reverb_rir": {"path": path, "prob": 1}},
        {"impulse": {"path": path, "prob": 1}},
        {"gain": {"prob": 1}},
        {"perturb_volume": {"prob": 1}},
        {"clip_amplitude": {"prob": 1}},
        {"lowpass": {"prob": 1, "frequencies_interval": [3500, 7900]}},
        {"narrowband": {"prob": 1}},
        {"reverb_rir": {"prob": 1}},
        {"compress": {"prob": 1}},
        {"shift": {"prob": 1, "min_shift_ms": 1}},
        {"silence": {"prob": 1, "min_start_silence_secs": 0.1, "max_start_silence_secs": 0.2}},
    ]))
}

fn tone(length: usize) -> Vec<f32> {
    (0..length)
        .map(|at| (at as f32 * 0.05).sin() * 0.3 + (at as f32 * 0.9).sin() * 0.1)
        .collect()
}

#[test]
fn each_step_changes_the_signal_the_same_way_each_time_and_in_each_epoch_anew() {
    let folder = noises();
    for step in all_steps(folder.path().to_str().unwrap()) {
        check(std::slice::from_ref(&step)).unwrap();
        let name = step.name();
        let (one, other) = (
            Augmenter::open(&Storage::default(), std::slice::from_ref(&step)).unwrap(),
            Augmenter::open(&Storage::default(), &[step]).unwrap(),
        );
        let signal = tone(10_000);
        let changed = one.apply(signal.clone(), 42, 0, "a").unwrap();
        assert_ne!(changed, signal, "{name}");
        assert!(changed.iter().all(|x| x.is_finite()), "{name}");
        if name == "silence" {
            assert!((1600..=3200).contains(&(changed.len() - signal.len())));
        } else {
            assert_eq!(changed.len(), signal.len(), "{name}");
        }
        // Whatever came before it.
        other.apply(signal.clone(), 42, 0, "b").unwrap();
        assert_eq!(other.apply(signal.clone(), 42, 0, "a").unwrap(), changed, "{name}");
        let differs = |of: Vec<Vec<f32>>| of.iter().any(|signal| *signal != changed);
        let epochs = (1..5)
            .map(|epoch| one.apply(signal.clone(), 42, epoch, "a").unwrap())
            .collect();
        assert!(differs(epochs), "{name} is the same in each epoch");
        let others = ["b", "c", "d"]
            .map(|id| one.apply(signal.clone(), 42, 0, id).unwrap())
            .to_vec();
        assert!(differs(others), "{name} is the same for each utterance");
        // Silence and single samples.
        for signal in [vec![], vec![0.5], vec![0.0; 3000]] {
            assert!(
                one.apply(signal, 42, 0, "a").unwrap().iter().all(|x| x.is_finite()),
                "{name}"
            );
        }
        assert!(one.newly_broken().is_empty());
    }
}

#[test]
fn a_step_is_applied_as_often_as_its_probability_says() {
    let steps = steps(&serde_json::json!([{"gain": {"prob": 0.3}}]));
    let augmenter = Augmenter::open(&Storage::default(), &steps).unwrap();
    let changed = |n: &u32| augmenter.apply(vec![0.5; 4], 1, 0, &n.to_string()).unwrap() != vec![0.5; 4];
    let count = (0..2000).filter(changed).count();
    // Four standard deviations.
    assert!((518..682).contains(&count), "{count} of 2,000");
}

#[test]
fn mixed_noise_has_the_snr_that_was_asked_for() {
    let folder = noises();
    let path = folder.path().to_str().unwrap();
    for (snr, length) in [(0.0, 3000), (10.0, 9000), (20.0, 60_000)] {
        let steps = steps(&serde_json::json!([{"mix": {"path": path, "prob": 1, "snr": [snr, snr]}}]));
        let augmenter = Augmenter::open(&Storage::default(), &steps).unwrap();
        let signal = tone(length);
        let mixed = augmenter.apply(signal.clone(), 3, 1, "a").unwrap();
        let filled = length - 800;
        let added: Vec<f32> = mixed.iter().zip(&signal).map(|(mixed, x)| mixed - x).collect();
        assert!(added[filled..].iter().all(|x| *x == 0.0));
        let found = 10.0 * (levels::power(&signal) / levels::power(&added[..filled])).log10();
        assert!((found - snr).abs() < 0.01, "{found} dB for {snr}");
    }
}

#[test]
fn a_low_pass_and_a_telephone_leave_the_low_frequencies() {
    let wave = |hertz: f32| -> Vec<f32> {
        let step = std::f32::consts::TAU * hertz / SAMPLE_RATE as f32;
        (0..16_000).map(|at| (at as f32 * step).sin() * 0.5).collect()
    };
    let left = |hertz: f32, change: &dyn Fn(&mut Vec<f32>)| {
        let signal = wave(hertz);
        let mut changed = signal.clone();
        change(&mut changed);
        assert_eq!(changed.len(), signal.len());
        levels::power(&changed) / levels::power(&signal)
    };
    let lowpass = |signal: &mut Vec<f32>| bands::lowpass(signal, 4000, SAMPLE_RATE).unwrap();
    assert!((left(1000.0, &lowpass) - 1.0).abs() < 0.01);
    assert!(left(5000.0, &lowpass) < 1e-4);
    for codec in [Codec::MuLaw, Codec::ALaw] {
        let telephone = |signal: &mut Vec<f32>| bands::narrowband(signal, codec, SAMPLE_RATE).unwrap();
        assert!((left(1017.0, &telephone) - 1.0).abs() < 0.01);
        // What G.711 adds lies some 38 dB below the signal.
        assert!(left(5000.0, &telephone) < 1e-3);
        let mut signal = wave(300.0);
        let before = signal.clone();
        telephone(&mut signal);
        let noise: Vec<f32> = signal.iter().zip(&before).map(|(x, y)| x - y).collect();
        let ratio = 10.0 * (levels::power(&before) / levels::power(&noise[200..15_800])).log10();
        assert!((30.0..45.0).contains(&ratio), "{ratio} dB");
    }
}

/// Speech, 0.6 s.
fn speech() -> Vec<f32> {
    Golden::read().tensor("in.speech")
}

/// The SNR in dB of what a codec leaves, at each lag.
fn snr_at_lags(signal: &[f32], changed: &[f32], lags: std::ops::RangeInclusive<i64>) -> Vec<(i64, f64)> {
    let snr = |lag: i64| {
        let mut moved = changed.to_vec();
        levels::shift(&mut moved, lag);
        let noise: Vec<f32> = moved.iter().zip(signal).map(|(x, y)| x - y).collect();
        (lag, 10.0 * (levels::power(signal) / levels::power(&noise)).log10())
    };
    lags.map(snr).collect()
}

#[test]
fn opus_keeps_the_place_and_loses_more_at_lower_rates() {
    let signal = speech();
    let mut last = f64::INFINITY;
    // The SNRs of what libsndfile 1.2 writes at these levels of the same recording and reads again, in dB; the encoders are of
    // different releases, so they choose differently.
    let levels = [
        (0.0, 256_000, 30.7),
        (0.8, 56_000, 23.1),
        (0.99, 8500, 7.5),
        (1.0, 6000, 4.7),
    ];
    for (level, rate, libsndfile) in levels {
        assert!((compress::opus_rate(level) - rate).abs() <= 1, "{level}");
        let mut changed = signal.clone();
        compress::opus(&mut changed, rate, SAMPLE_RATE).unwrap();
        assert_eq!(changed.len(), signal.len());
        let snrs = snr_at_lags(&signal, &changed, -40..=40);
        let best = snrs.iter().max_by(|x, y| x.1.total_cmp(&y.1)).unwrap();
        assert!(best.0.abs() <= 1, "{rate} bit/s: moved by {} samples", best.0);
        assert!(best.1 < last, "{rate} bit/s: {} dB after {last} dB", best.1);
        assert!(
            best.1 > libsndfile - 1.0,
            "{rate} bit/s: {} dB, libsndfile {libsndfile} dB",
            best.1
        );
        last = best.1;
    }
    // Nothing, less than the delay, values that are not numbers, and far above full scale.
    for mut odd in [vec![], vec![0.5; 3], vec![f32::NAN; 700], vec![1e30; 700]] {
        let length = odd.len();
        compress::opus(&mut odd, 6000, SAMPLE_RATE).unwrap();
        assert!(odd.len() == length && odd.iter().all(|x| x.is_finite()));
    }
}

#[test]
fn mp3_keeps_the_place_and_loses_more_at_lower_rates() {
    let signal = speech();
    let mut last = f64::INFINITY;
    // The SNRs of what libmp3lame 3.100 writes at these rates of the same recording and ffmpeg reads again, in dB, without its gain of
    // 0.95. It leaves out more of the high frequencies.
    let levels = [
        (0.63, 64_000, 27.3),
        (0.8, 40_000, 21.6),
        (0.9, 24_000, 16.3),
        (0.95, 16_000, 13.4),
        (1.0, 8_000, 9.8),
    ];
    for (level, rate, libmp3lame) in levels {
        assert!(compress::mp3_rate(level).abs_diff(rate) <= 4000, "{level}");
        let mut changed = signal.clone();
        compress::mp3(&mut changed, rate, SAMPLE_RATE).unwrap();
        assert_eq!(changed.len(), signal.len());
        let snrs = snr_at_lags(&signal, &changed, -40..=40);
        let best = snrs.iter().max_by(|x, y| x.1.total_cmp(&y.1)).unwrap();
        assert_eq!(best.0, 0, "{rate} bit/s: moved by {} samples", best.0);
        assert!(best.1 < last, "{rate} bit/s: {} dB after {last} dB", best.1);
        let apart = best.1 - libmp3lame;
        assert!(
            (-2.0..=8.0).contains(&apart),
            "{rate} bit/s: {} dB, libmp3lame {libmp3lame} dB",
            best.1
        );
        last = best.1;
    }
    for mut odd in [
        vec![],
        vec![0.5; 3],
        vec![f32::NAN; 700],
        vec![1e30; 700],
        vec![f32::MIN_POSITIVE; 3000],
    ] {
        let length = odd.len();
        compress::mp3(&mut odd, 8000, SAMPLE_RATE).unwrap();
        assert!(odd.len() == length && odd.iter().all(|x| x.is_finite()));
    }
}

#[test]
fn simulated_rooms_decay_as_long_as_they_are() {
    let mut random = SplitMix64::new(5);
    let mut seconds = Vec::new();
    for _ in 0..50 {
        let before = random.clone();
        let response = random_room::impulse_response(&mut random, SAMPLE_RATE);
        assert_eq!(
            random_room::impulse_response(&mut before.clone(), SAMPLE_RATE),
            response
        );
        // The same draws: reverberation time, size, distance.
        let mut draws = Draws(before);
        let (t60, _, distance) = (
            draws.uniform([0.1, 0.8]),
            draws.uniform([0.1, 1.2]),
            draws.uniform([0.2, 12.0]),
        );
        assert_eq!(response.len(), (t60 * 16_000.0).ceil() as usize);
        // The direct sound is the first and the loudest.
        let arrival = distance / 340.0 * 16_000.0;
        let first = response.iter().position(|h| h.abs() > 0.5 / distance as f32).unwrap();
        assert!((first as f64 - arrival).abs() <= 1.5, "{first} for {arrival}");
        // Schroeder's backward integral: what is left of the energy after half the time, of that behind the direct sound.
        let left = |from: usize| -> f64 { response[from..].iter().map(|h| f64::from(*h).powi(2)).sum() };
        let start = first + 20;
        let middle = start + (response.len() - start) / 2;
        let lost = 10.0 * (left(start) / left(middle)).log10();
        assert!(
            (8.0..60.0).contains(&lost),
            "{lost} dB in half of {t60} s from {distance} m"
        );
        // No constant part.
        let sum: f64 = response.iter().map(|h| f64::from(*h)).sum();
        let magnitudes: f64 = response.iter().map(|h| f64::from(h.abs())).sum();
        assert!(sum.abs() < 0.05 * magnitudes, "{sum} of {magnitudes}");
        seconds.push(t60);
    }
    let mean = seconds.iter().sum::<f64>() / seconds.len() as f64;
    assert!((0.35..0.55).contains(&mean), "{mean}");
}

#[test]
fn wrong_settings_and_recordings_are_named() {
    let folder = noises();
    let path = folder.path().to_str().unwrap();
    let cases = [
        (serde_json::json!([{"mix": {}}]), "step 1, `mix`: `path` is needed"),
        (serde_json::json!([{"gain": {"prob": 1.5}}]), "`prob` is 1.5"),
        (
            serde_json::json!([{"gain": {}}, {"mix": {"path": "x", "snr": [20, 10]}}]),
            "step 2, `mix`: `snr` reaches",
        ),
        (
            serde_json::json!([{"lowpass": {"frequencies_interval": [100, 200]}}]),
            "500 to 8000 are possible",
        ),
        (serde_json::json!([{"narrowband": {"codecs": []}}]), "`codecs` is empty"),
        (serde_json::json!([{"compress": {"codecs": []}}]), "`codecs` is empty"),
        (
            serde_json::json!([{"compress": {"compression_level_interval": [0.5, 1.5]}}]),
            "0 to 1 are possible",
        ),
        (serde_json::json!([{"impulse": {}}]), "`path` is needed"),
        (
            serde_json::json!([{"white_noise": {"min_level": -46, "max_level": -46}}]),
            "`level` reaches",
        ),
    ];
    for (settings, part) in cases {
        let error = check(&steps(&settings)).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
    for (codec, part) in [("vorbis", "does not encode it"), ("speex", "is not a codec")] {
        let settings = serde_json::json!([{"compress": {"codecs": [codec]}}]);
        let error = serde_json::from_value::<Vec<Step>>(settings).unwrap_err().to_string();
        assert!(error.contains(codec) && error.contains(part), "{error}");
    }
    for nan in ["snr", "prob"] {
        let mut step = Mix {
            path: path.into(),
            ..Mix::default()
        };
        match nan {
            "snr" => step.snr = [f64::NAN, 1.0],
            _ => step.prob = f64::NAN,
        }
        check(&[Step::Mix(step)]).unwrap_err();
    }
    // As Lhotse takes it.
    let snr = |snr: Value| serde_json::from_value::<Mix>(serde_json::json!({"path": path, "snr": snr}));
    assert_eq!(snr(5.into()).unwrap().snr, [5.0, 5.0]);
    assert_eq!(snr(serde_json::json!([0, 20])).unwrap().snr, [0.0, 20.0]);
    let error = snr(serde_json::json!([1, 2, 3])).unwrap_err().to_string();
    assert!(error.contains("[10, 20]"), "{error}");
    let missing = steps(&serde_json::json!([{"mix": {"path": folder.path().join("none").to_str()}}]));
    assert!(identified(&Storage::default(), &missing).unwrap_err().contains("none"));
    assert!(Augmenter::open(&Storage::default(), &missing).is_err());
    for (name, text, part) in [
        ("empty.jsonl", "\n", "no recordings"),
        ("broken.jsonl", "{\"audio_filepath\": \"long.wav\"}\n{", "line 2"),
        (
            "part.jsonl",
            "{\"audio_filepath\": \"long.wav\", \"offset\": 1}",
            "`offset` without `duration`",
        ),
    ] {
        let manifest = folder.path().join(name);
        fs::write(&manifest, text).unwrap();
        let error = Sounds::open(&Storage::default(), manifest.to_str().unwrap())
            .err()
            .unwrap();
        assert!(error.contains(name) && error.contains(part), "{error}");
    }
    // A recording that cannot be decoded is named, and the signal stays.
    let manifest = folder.path().join("bad.jsonl");
    fs::write(folder.path().join("bad.wav"), b"RIFF").unwrap();
    fs::write(&manifest, "{\"audio_filepath\": \"bad.wav\"}").unwrap();
    let augmenter = Augmenter::open(&Storage::default(), &all_steps(manifest.to_str().unwrap())[..1]).unwrap();
    assert_eq!(augmenter.apply(tone(2000), 1, 0, "a").unwrap(), tone(2000));
    let broken = augmenter.newly_broken();
    assert!(broken.len() == 1 && broken[0].contains("bad.wav"), "{broken:?}");
    augmenter.apply(tone(2000), 1, 1, "a").unwrap();
    assert!(augmenter.newly_broken().is_empty(), "told twice");
    // So is one that follows another.
    fs::write(folder.path().join("good.wav"), wav(&[1000; 400])).unwrap();
    let lines =
        ["bad.wav", "good.wav", "good.wav", "good.wav"].map(|name| format!("{{\"audio_filepath\": \"{name}\"}}\n"));
    fs::write(&manifest, lines.concat()).unwrap();
    let augmenter = Augmenter::open(&Storage::default(), &all_steps(manifest.to_str().unwrap())[..1]).unwrap();
    for epoch in 0..20 {
        augmenter.apply(tone(4000), 1, epoch, "a").unwrap();
    }
    let broken = augmenter.newly_broken();
    assert!(broken.len() == 1 && broken[0].contains("bad.wav"), "{broken:?}");
}

/// Whether the samples of a recording stay in memory depends on the size of the whole collection; what is heard does not.
#[test]
fn pieces_are_the_same_whether_recordings_stay_decoded_or_not() {
    let folder = tempfile::tempdir().unwrap();
    let mut random = SplitMix64::new(3);
    for (name, rate) in [("a.wav", 16_000), ("b.wav", 44_100), ("c.wav", 8000)] {
        let samples: Vec<i16> = (0..3 * rate)
            .map(|_| (random.unit() * 8000.0 - 4000.0) as i16)
            .collect();
        fs::write(folder.path().join(name), wav_of_rate(rate, &samples)).unwrap();
    }
    let sounds = Sounds::open(&Storage::default(), folder.path().to_str().unwrap()).unwrap();
    for number in 0..3 {
        for (length, unit) in [(1, 0.0), (1600, 0.0), (1600, 0.37), (4800, 0.73), (11_000, 0.999_999)] {
            let first = ((48_000.0 - f64::from(length) + 1.0) * unit) as usize;
            let alone = sounds.decode_piece(number, first, length as usize).unwrap();
            assert_eq!(
                *sounds.piece(number, length as usize, unit).unwrap(),
                *alone,
                "{number}"
            );
        }
    }
}

#[test]
fn a_manifest_gives_parts_and_a_moved_folder_has_the_same_digest() {
    let folder = noises();
    let manifest = folder.path().join("noise.jsonl");
    let line = "{\"audio_filepath\": \"long.wav\", \"offset\": 0.5, \"duration\": 0.25, \"text\": \"\"}\n";
    fs::write(&manifest, line).unwrap();
    let whole = Sounds::open(&Storage::default(), folder.path().to_str().unwrap()).unwrap();
    let part = Sounds::open(&Storage::default(), manifest.to_str().unwrap()).unwrap();
    assert_eq!((whole.len(), part.len()), (2, 1));
    let long = whole.whole(0).unwrap();
    assert_eq!(long.len(), 32_000);
    assert_eq!(*part.whole(0).unwrap(), long[8000..12_000]);
    // A short piece of a long recording is the same as of the decoded whole.
    let piece = whole.piece(0, 1000, 0.5).unwrap();
    assert_eq!(*piece, long[15_500..16_500]);
    let other = tempfile::tempdir().unwrap();
    for name in ["short.wav", "long.wav"] {
        fs::copy(folder.path().join(name), other.path().join(name)).unwrap();
    }
    let digest = |folder: &std::path::Path| {
        let path = folder.to_str().unwrap();
        Sounds::open(&Storage::default(), path).unwrap().digest(path)
    };
    assert_eq!(digest(folder.path()), digest(other.path()));
    fs::write(other.path().join("short.wav"), b"RIFF").unwrap();
    assert_ne!(digest(folder.path()), digest(other.path()));
}

#[test]
fn sounds_in_a_bucket_are_heard_and_identified_as_on_disk() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("sounds/noise");
    fs::create_dir_all(folder.join("inner")).unwrap();
    let noises = noises();
    fs::copy(noises.path().join("long.wav"), folder.join("inner/long.wav")).unwrap();
    fs::copy(noises.path().join("short.wav"), folder.join("short.wav")).unwrap();
    // Of a manifest in a bucket, relative paths and URLs.
    let manifest = root.path().join("sounds/lists/noise.jsonl");
    fs::create_dir_all(manifest.parent().unwrap()).unwrap();
    let lines = |last: &str| {
        let part = "{\"audio_filepath\": \"../noise/inner/long.wav\", \"offset\": 0.5, \"duration\": 1.25}";
        format!("{part}\n{{\"audio_filepath\": \"{last}\"}}\n")
    };
    fs::write(&manifest, lines("s3://sounds/noise/short.wav")).unwrap();
    let on_disk = root.path().join("sounds/lists/disk.jsonl");
    fs::write(&on_disk, lines("../noise/short.wav")).unwrap();
    let server = TestServer::start(root.path()).unwrap();
    let (storage, disk) = (server.storage(), Storage::default());
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let heard = |storage: &Storage, steps: &[Step]| {
        let augmenter = Augmenter::open(storage, steps).unwrap();
        let ids = ["a", "b", "c", "d", "e"];
        let heard = ids.map(|id| augmenter.apply(tone(2000), 7, 3, id).unwrap());
        assert!(augmenter.newly_broken().is_empty());
        heard
    };
    for (url, local) in [
        ("s3://sounds/noise", path(&folder)),
        ("s3://sounds/noise/", path(&folder)),
        ("s3://sounds/noise/**/*.wav", path(&folder.join("**/*.wav"))),
        ("s3://sounds/noise/short.wav", path(&folder.join("short.wav"))),
        ("s3://sounds/lists/noise.jsonl", path(&on_disk)),
    ] {
        for (there, here) in all_steps(url).iter().zip(all_steps(&local)) {
            let (there, here) = (std::slice::from_ref(there), [here]);
            assert!(
                heard(&storage, there) == heard(&disk, &here),
                "{url}, {}",
                here[0].name()
            );
        }
    }
    let digest = |storage: &Storage, path: &str| Sounds::open(storage, path).unwrap().digest(path);
    let before = digest(&storage, "s3://sounds/noise");
    assert_eq!(before, digest(&disk, &path(&folder)));
    fs::write(folder.join("third.wav"), b"RIFF").unwrap();
    storage.forget_all();
    assert_ne!(digest(&storage, "s3://sounds/noise"), before);
    fs::remove_file(folder.join("third.wav")).unwrap();
    storage.forget_all();
    assert_eq!(digest(&storage, "s3://sounds/noise"), before);
    // What cannot be listed or read is an error, not silence.
    for missing in ["s3://sounds/none", "s3://sounds/none.jsonl", "s3://sounds/none/*.wav"] {
        let error = Sounds::open(&storage, missing).err().unwrap();
        assert!(error.contains(missing), "{error}");
    }
    let steps = [steps(&serde_json::json!([{"noise": {"path": "s3://sounds/noise/short.wav", "prob": 1}}])).remove(0)];
    let augmenter = Augmenter::open(&storage, &steps).unwrap();
    server.fault(FaultRule::always(Fault::Status(403), "/sounds/noise/short.wav"));
    let error = augmenter.apply(tone(2000), 7, 3, "f").unwrap_err().to_string();
    assert!(error.contains("s3://sounds/noise/short.wav"), "{error}");
}
