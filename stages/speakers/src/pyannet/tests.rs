use std::collections::BTreeMap;

use flow_kernels::threads::pool;

use super::sinc::{self, FILTERS, TAPS};
use super::sincnet::{Statistics, pooled_filters};
use super::*;
use crate::formula::{Tensors, file, tensors};
use crate::golden;

/// f32 against f64 moved nothing before the LSTM by more than 1e-5; three steps of norms may.
const BEFORE_LSTM: f32 = 1e-4;
/// From the first LSTM layer on, where values are at most 1; f32 against f64 was 3e-6 at the end.
const FROM_LSTM: f32 = 2e-5;
/// Log-probabilities with the real weights, down to -30: f32 against f64 was 7e-4.
const REAL: f32 = 2e-3;

fn largest_difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |largest, difference| match difference.is_nan() {
        true => f32::INFINITY,
        false => largest.max(difference),
    })
}

fn formula() -> Tensors {
    tensors("pyannet_formula.json")
}

/// (channels, frames), as the golden data has it.
fn channels_first(frames: &[f32], channels: usize) -> Vec<f32> {
    let count = frames.len() / channels;
    (0..frames.len())
        .map(|at| frames[at % count * channels + at / count])
        .collect()
}

/// All stages of a chunk under the names of the golden data.
fn stages(network: &PyanNet, chunk: &[f32]) -> BTreeMap<String, Vec<f32>> {
    let mut stages = BTreeMap::new();
    let sincnet = &network.sincnet;
    let wave = sincnet.wave_norm(chunk, 0).apply(chunk);
    let filtered = sincnet.filters.apply(&wave).unwrap();
    for filter in 0..FILTERS {
        let of_filter = filtered.iter().skip(filter).step_by(FILTERS);
        stages.insert(format!("conv0.{filter}"), of_filter.map(|value| value.abs()).collect());
    }
    // The filters of a single chunk are folded at their centres.
    let mut frames = sincnet.filters.pooled::<3>(&wave).unwrap();
    let (pooled, _) = pooled_filters(&filtered, 1.0, &[0.0; FILTERS]);
    assert!(largest_difference(&frames, &pooled) < BEFORE_LSTM);
    let mut statistics = Statistics::new(FILTERS);
    statistics.add(&frames);
    stages.insert("wav_norm".into(), wave);
    let mut channels = FILTERS;
    for layer in 0..3 {
        stages.insert(format!("pool{layer}"), channels_first(&frames, channels));
        let scale = sincnet.norms[layer].scale(&statistics);
        let mut scaled = frames.clone();
        scale.apply(&mut scaled);
        // Below 0, the leaky ReLU turned back.
        let before = |&value: &f32| if value < 0.0 { value * 100.0 } else { value };
        let normed: Vec<f32> = scaled.iter().map(before).collect();
        stages.insert(format!("norm{layer}"), channels_first(&normed, channels));
        stages.insert(format!("act{layer}"), channels_first(&scaled, channels));
        if let Some(convolution) = sincnet.convolutions.get(layer) {
            let mut sums = convolution.apply(&scaled).unwrap();
            for row in sums.chunks_exact_mut(CHANNELS) {
                row.iter_mut()
                    .zip(convolution.bias())
                    .for_each(|(sum, bias)| *sum += bias);
            }
            stages.insert(format!("conv{}", layer + 1), channels_first(&sums, CHANNELS));
            (frames, statistics) = convolution.pooled(frames, &scale).unwrap();
            channels = CHANNELS;
        } else {
            frames = scaled;
        }
    }
    assert_eq!(frames, sincnet.features(chunk).unwrap());
    for layer in 0..network.lstm.layers() {
        frames = network.lstm.apply_layer(layer, &frames, 1).unwrap();
        stages.insert(format!("lstm{layer}"), frames.clone());
    }
    for (layer, linear) in network.linear.iter().enumerate() {
        frames = linear.apply(&frames).unwrap();
        frames.iter_mut().for_each(|value| *value = leaky_relu(*value));
        stages.insert(format!("linear{layer}"), frames.clone());
    }
    let logits = network.classifier.apply(&frames).unwrap();
    stages.insert("logits".into(), logits);
    stages.insert("output".into(), network.log_probabilities(&[chunk]).unwrap().remove(0));
    stages
}

/// Compares what the golden data has of a chunk's stages; says how many there were. Of the first stage they have some channels,
/// whose numbers are in the name: `conv0_channels_0_39`.
fn compare(tensors: &golden::Tensors, prefix: &str, found: &BTreeMap<String, Vec<f32>>, output: f32) -> usize {
    let mut compared = 0;
    for full in tensors.names() {
        let Some(name) = full.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('.')) else {
            continue;
        };
        let found = match name.strip_prefix("conv0_channels_") {
            Some(channels) => channels
                .split('_')
                .map(|channel| found.get(&format!("conv0.{channel}")).cloned())
                .collect::<Option<Vec<_>>>()
                .map(|channels| channels.concat()),
            None => found.get(name).cloned(),
        };
        let Some(found) = found else { continue };
        let (_, expected) = tensors.floats(&full);
        let tolerance = match name {
            "output" | "logits" => output,
            name if name.starts_with("lstm") || name.starts_with("linear") => FROM_LSTM.max(output / 10.0),
            // Turning a leaky ReLU back makes rounding a hundred times as large.
            name if name.starts_with("norm") => 2.0 * BEFORE_LSTM,
            _ => BEFORE_LSTM,
        };
        let difference = largest_difference(&found, &expected);
        assert!(difference < tolerance, "{prefix}.{name}: {difference}");
        compared += 1;
    }
    compared
}

/// The samples that stages of the golden data are of: those that are beside them, or the part of a recording, beginning at each
/// `step`, that they are alike. `change` is made to it first.
fn samples_of(
    tensors: &golden::Tensors,
    prefix: &str,
    network: &PyanNet,
    (samples, step): (usize, usize),
    change: fn(&mut [f32]),
) -> Option<Vec<f32>> {
    if let Some((_, input)) = tensors.find(&format!("{prefix}.input")) {
        return Some(input);
    }
    let (_, expected) = tensors.find(&format!("{prefix}.output"))?;
    let parts = golden::parts(samples, step).map(|mut samples| {
        change(&mut samples);
        samples
    });
    let mut parts = parts.into_iter();
    let found = parts.find(|samples| {
        let output = network.log_probabilities(&[samples]).unwrap().remove(0);
        golden::alike(&output, &expected, 0.01)
    });
    if found.is_none() {
        golden::lacks(prefix, "no recording of the folder has this output");
    }
    found
}

fn check_filters(tensors: &golden::Tensors, low_hz: &[f32], band_hz: &[f32]) {
    if let Some((_, expected)) = tensors.find("sinc_filters") {
        let found = sinc::filters(low_hz, band_hz).unwrap();
        let difference = largest_difference(&found, &expected);
        // The original computes angles of up to 400 in f32.
        assert!(difference < 1e-4, "{difference}");
    }
}

#[test]
fn stages_are_those_of_the_original_with_weights_by_formula() {
    let tensors = golden::Tensors::load("pyannet_stages.safetensors");
    let weights = formula();
    let parameter = |name: &str| &weights[&format!("sincnet.conv1d.0.filterbank.{name}")].1[..];
    check_filters(&tensors, parameter("low_hz_"), parameter("band_hz_"));
    let network = PyanNet::from_safetensors(&file(&weights)).unwrap();
    let mut compared = 0;
    let second = (16_000, 4_000);
    for prefix in ["speech", "noise"] {
        if let Some(samples) = samples_of(&tensors, prefix, &network, second, |_| ()) {
            compared += compare(&tensors, prefix, &stages(&network, &samples), FROM_LSTM);
        }
    }
    // Ten seconds from the beginning of a recording.
    let ten = (160_000, usize::MAX);
    let padded: fn(&mut [f32]) = |samples| samples[100_000..].fill(0.0);
    for (prefix, change) in [("speech10s", (|_| ()) as fn(&mut [f32])), ("zeropadded10s", padded)] {
        if let Some(samples) = samples_of(&tensors, prefix, &network, ten, change) {
            let output = network.log_probabilities(&[&samples]).unwrap().remove(0);
            compared += compare(&tensors, prefix, &[("output".to_owned(), output)].into(), FROM_LSTM);
        }
    }
    assert!(compared >= if golden::is_bundled() { 4 } else { 1 });
}

#[test]
fn the_bundled_network_says_what_the_original_says() {
    let tensors = golden::Tensors::load("segmentation3_real.safetensors");
    let bytes = unpack(BUNDLED, 4).unwrap();
    let weights = Weights::open(&bytes).unwrap();
    let parameter = |name: &str| {
        let name = format!("sincnet.conv1d.0.filterbank.{name}");
        weights.floats(&name, &[sinc::PAIRS, 1]).unwrap()
    };
    check_filters(&tensors, &parameter("low_hz_"), &parameter("band_hz_"));
    let network = PyanNet::bundled().unwrap();
    if let Some(samples) = samples_of(&tensors, "speech1s", &network, (16_000, 4_000), |_| ()) {
        compare(&tensors, "speech1s", &stages(&network, &samples), REAL);
    }
    let mut compared = 0;
    for (name, samples) in golden::recordings() {
        let Some((shape, sets)) = tensors.find(&format!("{name}.argmax")) else {
            continue;
        };
        let found: Vec<Vec<f32>> = network
            .recording(&samples, 160_000, 16_000)
            .unwrap()
            .collect::<Result<_>>()
            .unwrap();
        assert_eq!([found.len(), network.frames(160_000)], shape[..], "{name}");
        // A name reads `conv2.logprob_chunks_0_1_last`.
        let listed = format!("{name}.logprob_chunks_");
        for full in tensors.names() {
            let Some(chunks) = full.strip_prefix(&listed) else {
                continue;
            };
            let chunk = |chunk: &str| match chunk {
                "last" => found.len() - 1,
                number => number.parse().unwrap(),
            };
            let some: Vec<f32> = chunks.split('_').flat_map(|of| found[chunk(of)].clone()).collect();
            let difference = largest_difference(&some, &tensors.floats(&full).1);
            assert!(difference < REAL, "{full}: {difference}");
        }
        // Where the two likeliest sets are further apart than rounding goes, they are in one order; few others are not.
        let mut close = 0;
        for (frame, (scores, &expected)) in found.concat().chunks_exact(7).zip(&sets).enumerate() {
            let mut order: Vec<usize> = (0..7).collect();
            order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            if order[0] != expected as usize {
                assert!(scores[order[0]] - scores[order[1]] <= 0.01, "{name} {frame}");
                close += 1;
            }
        }
        assert!(close * 1000 <= sets.len(), "{name}: {close} of {}", sets.len());
        compared += 1;
    }
    assert!(compared > 0);
}

#[test]
fn chunks_of_a_recording_are_those_alone_but_for_rounding() {
    let network = PyanNet::bundled().unwrap();
    let recording = &golden::speech(330_123)[100_000..];
    // Silence around, and a recording that lies off 0.
    let mut other: Vec<f32> = recording.iter().map(|sample| 0.3 + 0.5 * sample).collect();
    other[30_000..100_000].fill(0.3);
    for samples in [recording, &other, &recording[..100_000], &[0.0; 170_001][..]] {
        for (chunk, step) in [(160_000, 16_000), (80_000, 8_010), (50_000, 16_003), (20_000, 30_000)] {
            let mut starts: Vec<usize> = (0..samples.len())
                .step_by(step)
                .take_while(|start| start + chunk <= samples.len())
                .collect();
            let next = starts.len() * step;
            if starts.last().is_none_or(|start| start + chunk < samples.len()) {
                starts.push(next);
            }
            let chunks: Vec<Vec<f32>> = starts
                .iter()
                .map(|&start| {
                    let mut samples = samples[start.min(samples.len())..samples.len().min(start + chunk)].to_vec();
                    samples.resize(chunk, 0.0);
                    samples
                })
                .collect();
            let views: Vec<&[f32]> = chunks.iter().map(|chunk| &chunk[..]).collect();
            let alone = network.log_probabilities(&views).unwrap();
            let found = network.recording(samples, chunk, step).unwrap();
            assert_eq!(found.len(), alone.len());
            for (number, (found, alone)) in found.zip(&alone).enumerate() {
                // What f32 against f64 did, and more where a chunk is mostly silence: its norm makes the rounding larger.
                let difference = largest_difference(&found.unwrap(), alone);
                assert!(difference < 2.0 * REAL, "{chunk} {step} {number}: {difference}");
            }
        }
    }
}

#[test]
fn neither_company_nor_threads_change_a_bit() {
    let network = PyanNet::bundled().unwrap();
    let recording = golden::speech(400_000);
    // More chunks than go together, of two lengths in turns.
    let chunks: Vec<&[f32]> = (0..30)
        .map(|chunk| &recording[chunk * 5_001..][..if chunk % 3 == 1 { 9_000 } else { 30_000 }])
        .collect();
    let alone: Vec<Vec<f32>> = chunks
        .iter()
        .map(|chunk| network.log_probabilities(&[chunk]).unwrap().remove(0))
        .collect();
    let samples = &recording[..400_000];
    let whole = |threads: usize| {
        pool("test", threads).unwrap().install(|| {
            assert!(
                network.log_probabilities(&chunks).unwrap() == alone,
                "{threads} threads"
            );
            let chunks = network.recording(samples, 32_000, 8_000).unwrap();
            chunks.collect::<Result<Vec<_>>>().unwrap()
        })
    };
    let expected = whole(1);
    assert_eq!(expected.len(), 47);
    for threads in [2, 3, 8] {
        assert!(whole(threads) == expected, "{threads} threads");
    }
}

#[test]
fn a_network_of_fewer_layers_is_one_and_one_of_other_classes_is_refused() {
    let mut weights = formula();
    // Of any number of layers.
    weights.retain(|name, _| !name.contains("_l2") && !name.contains("_l3"));
    let network = PyanNet::from_safetensors(&file(&weights)).unwrap();
    assert_eq!(network.lstm.layers(), 2);
    let found = network.log_probabilities(&[&golden::speech(80_000)]).unwrap().remove(0);
    assert_eq!(found.len(), 293 * CLASSES);
    for (name, values) in [("classifier.weight", 3 * LINEAR), ("classifier.bias", 3)] {
        let (shape, tensor) = weights.get_mut(name).unwrap();
        shape[0] = 3;
        tensor.truncate(values);
    }
    assert!(matches!(
        PyanNet::from_safetensors(&file(&weights)),
        Err(Error::Weights(_))
    ));
}

#[test]
fn frames_are_those_of_the_receptive_field() {
    let network = PyanNet::bundled().unwrap();
    let expected = [
        (0, 0),
        (RECEPTIVE_FIELD - 1, 0),
        (RECEPTIVE_FIELD, 1),
        (RECEPTIVE_FIELD + FRAME_STEP - 1, 1),
        (RECEPTIVE_FIELD + FRAME_STEP, 2),
        (16_000, 56),
        (80_000, 293),
        (160_000, 589),
    ];
    for (samples, frames) in expected {
        assert_eq!(network.frames(samples), frames, "{samples}");
    }
    let least = network.log_probabilities(&[&golden::speech(RECEPTIVE_FIELD)]).unwrap();
    assert_eq!(least[0].len(), 7);
}

#[test]
fn silence_and_loud_sounds_have_probabilities() {
    let network = PyanNet::bundled().unwrap();
    let square: Vec<f32> = (0..20_000)
        .map(|at| if at / 50 % 2 == 0 { MAX_SAMPLE } else { -MAX_SAMPLE })
        .collect();
    for chunk in [&[0.0; 20_000][..], &[1.0; 20_000], &[MAX_SAMPLE; 20_000], &square] {
        let found = network.log_probabilities(&[chunk]).unwrap().remove(0);
        let of_recording = network
            .recording(chunk, 20_000, 1_000)
            .unwrap()
            .next()
            .unwrap()
            .unwrap();
        for frame in found.chunks_exact(7).chain(of_recording.chunks_exact(7)) {
            let sum: f32 = frame.iter().map(|value| value.exp()).sum();
            assert!((sum - 1.0).abs() < 1e-5, "{frame:?}");
        }
    }
}

#[test]
fn bad_chunks_recordings_and_weights_are_refused() {
    let network = PyanNet::bundled().unwrap();
    let good = [0.1; 2_000];
    assert_eq!(network.log_probabilities(&[]).unwrap(), Vec::<Vec<f32>>::new());
    for short in [&[][..], &good[..RECEPTIVE_FIELD - 1]] {
        let error = network.log_probabilities(&[&good, short]).unwrap_err();
        assert!(error.to_string().contains("chunk 1 has"), "{error}");
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -2e9] {
        let mut samples = good;
        samples[1_234] = bad;
        let error = network.log_probabilities(&[&good, &samples]).unwrap_err();
        assert!(matches!(error, Error::Sample { at: 1_234, .. }), "{error}");
        assert!(network.recording(&samples, 1_000, 10).is_err());
    }
    for (chunk, step) in [(0, 10), (RECEPTIVE_FIELD - 1, 10), (usize::MAX, 10), (1_000, 0)] {
        assert!(network.recording(&good, chunk, step).is_err(), "{chunk} {step}");
    }
    assert_eq!(network.recording(&[], 1_000, 10).unwrap().count(), 0);
    assert_eq!(network.recording(&good[..5], 1_000, usize::MAX).unwrap().count(), 1);

    let refused = |change: &dyn Fn(&mut Tensors), named: &str| {
        let mut weights = formula();
        change(&mut weights);
        match PyanNet::from_safetensors(&file(&weights)) {
            Err(error @ Error::Weights(_)) => assert!(error.to_string().contains(named), "{error}"),
            other => panic!("{named}: {other:?}"),
        }
    };
    assert!(PyanNet::from_safetensors(&[1; 100]).is_err());
    for name in [
        "sincnet.conv1d.1.bias",
        "lstm.weight_hh_l1_reverse",
        "classifier.weight",
        "linear.1.weight",
    ] {
        refused(&|weights| drop(weights.remove(name)), name);
    }
    refused(
        &|weights| {
            weights.insert("classifier.weight".into(), (vec![5, LINEAR], vec![0.0; 5 * LINEAR]));
        },
        "classifier.weight is F32 of shape [5, 128]",
    );
    refused(
        &|weights| weights.get_mut("sincnet.conv1d.0.filterbank.low_hz_").unwrap().1[3] = 7_950.0,
        "sinc filter",
    );
    let mut weights = formula();
    weights.get_mut("classifier.weight").unwrap().1.fill(f32::MAX);
    let network = PyanNet::from_safetensors(&file(&weights)).unwrap();
    assert!(network.log_probabilities(&[&good]).is_err());
}

#[test]
fn a_filter_passes_its_band() {
    // 1000 to 1500 Hz: 50 is added to each parameter.
    let filters = sinc::filters(&[950.0; sinc::PAIRS], &[450.0; sinc::PAIRS]).unwrap();
    let gain = |filter: usize, hz: f64| {
        let filter = &filters[filter * TAPS..(filter + 1) * TAPS];
        let part = |f: fn(f64) -> f64| -> f64 {
            let angle = |tap: usize| 2.0 * std::f64::consts::PI * hz * tap as f64 / 16_000.0;
            filter
                .iter()
                .enumerate()
                .map(|(tap, &value)| f64::from(value) * f(angle(tap)))
                .sum()
        };
        part(f64::sin).hypot(part(f64::cos))
    };
    for filter in [0, sinc::PAIRS] {
        let inside = gain(filter, 1_250.0);
        assert!(gain(filter, 1_100.0) > 0.9 * inside && gain(filter, 1_400.0) > 0.9 * inside);
        assert!(gain(filter, 700.0) < 0.02 * inside && gain(filter, 1_800.0) < 0.02 * inside);
    }
}
