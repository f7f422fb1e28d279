//! The encoder against NeMo's numbers, and its gradients against finite differences.

use candle_core::{DType, Device, Tensor};
use flow_kernels::testing::{max_difference, normal, values};

use super::*;
use crate::config::{AttentionContext, CausalConfig, ChunkContext, ModelConfig};
use crate::testing::golden;
use flow_nn::features::LogMel;
use flow_nn::tensor_files::read_packed;

/// The golden model's encoder in a data type, with a change to its configuration.
fn golden_encoder(dtype: DType, change: impl Fn(&mut ModelConfig)) -> (LogMel, Encoder, Parameters) {
    let (mut config, weights) = golden::model();
    change(&mut config);
    let mut builder = ParameterBuilder::from_tensors(dtype, Device::Cpu, weights);
    let front_end = LogMel::new(&config.preprocessor, &mut builder).unwrap();
    let encoder = Encoder::new(&config.encoder, "encoder", &mut builder).unwrap();
    let (parameters, unused) = builder.finish();
    assert!(unused.iter().all(|name| !name.starts_with("encoder.")), "{unused:?}");
    (front_end, encoder, parameters)
}

fn features(front_end: &LogMel, prefix: &str, dtype: DType) -> (Tensor, Vec<usize>) {
    let waves = golden::waves(prefix);
    let signals: Vec<&[f32]> = waves.iter().map(Vec::as_slice).collect();
    let features = front_end.compute(&signals, None).unwrap();
    (features.tensor(dtype, &Device::Cpu).unwrap(), features.lengths)
}

/// NeMo's own features of the evaluation utterances.
fn golden_features(dtype: DType) -> (Tensor, Vec<usize>) {
    let golden = golden::tensors("mel.safetensors");
    let shape = golden::lengths(&golden["eval.mel_padded_shape"]);
    let rows: Vec<Tensor> = (0..shape[0])
        .map(|i| {
            let mel = &golden[&format!("eval{i}.mel")];
            let missing = shape[2] - mel.dim(1).unwrap();
            mel.pad_with_zeros(1, 0, missing).unwrap()
        })
        .collect();
    let features = Tensor::stack(&rows, 0).unwrap().to_dtype(dtype).unwrap();
    (features, golden::lengths(&golden["eval.mel_len"]))
}

/// What is used for another Fourier transform in bounds of gradients moves features about as much as NeMo's does: not so
/// much more that such a bound would hide an error.
#[test]
fn rounded_recordings_have_features_as_far_away_as_nemos() {
    let (front_end, ..) = golden_encoder(DType::F64, |_| ());
    let (own, valid) = features(&front_end, "eval", DType::F64);
    let (theirs, _) = golden_features(DType::F64);
    let waves = golden::rounded(&golden::waves("eval"));
    let signals: Vec<&[f32]> = waves.iter().map(Vec::as_slice).collect();
    let rounded = front_end.compute(&signals, None).unwrap();
    let rounded = rounded.tensor(DType::F64, &Device::Cpu).unwrap();
    let root_mean_square = |other: &Tensor| {
        let squares = (&own - other).unwrap().sqr().unwrap().mean_all().unwrap();
        squares.to_scalar::<f64>().unwrap().sqrt()
    };
    let (to_theirs, to_rounded) = (root_mean_square(&theirs), root_mean_square(&rounded));
    println!("NeMo's features differ by {to_theirs:e}, those of rounded recordings by {to_rounded:e} ({valid:?})");
    assert!(to_rounded < 3.0 * to_theirs);
}

/// The (B, d, T) layout of golden outputs as (B, T, d).
fn time_major(tensor: &Tensor) -> Tensor {
    tensor.transpose(1, 2).unwrap().contiguous().unwrap()
}

#[test]
fn encoder_equals_nemo_in_f32_and_f64() {
    let golden = golden::tensors("eval.safetensors");
    let lengths = golden::lengths(&golden["encoded_len"]);
    // In 64 bits NeMo's positions are still of 32.
    for (dtype, key, share) in [
        (DType::F32, "encoded", golden::FROM_FEATURES),
        (DType::F64, "encoded_f64", 5e-7),
    ] {
        let magnitude = golden::magnitude(&golden[key]);
        let (front_end, encoder, parameters) = golden_encoder(dtype, |_| ());
        let (own, own_valid) = features(&front_end, "eval", dtype);
        let (encoded, _) = encoder.encode(&parameters, &own, &own_valid).unwrap();
        let worst = golden::valid_difference(&encoded, &time_major(&golden[key]), &lengths);
        println!("{key} from waves: {worst:e}");
        assert!(
            worst < golden::FROM_WAVES * magnitude,
            "{key} from waves: {worst}, {magnitude}"
        );
        let (features, valid) = golden_features(dtype);
        let (encoded, found) = encoder.encode(&parameters, &features, &valid).unwrap();
        assert_eq!(found, lengths);
        let worst = golden::valid_difference(&encoded, &time_major(&golden[key]), &lengths);
        println!("{key}: {worst:e}, values up to {magnitude}");
        assert!(worst < share * magnitude, "{key}: {worst}, {magnitude}");
        let (again, ..) = encoder.forward(&parameters, &features, &valid, Mode::Evaluate).unwrap();
        assert_eq!(max_difference(&again, &encoded), 0.0);
    }
}

#[test]
fn every_activation_equals_nemo() {
    let golden = golden::tensors("eval.safetensors");
    let (_, encoder, parameters) = golden_encoder(DType::F32, |_| ());
    let (features, valid) = golden_features(DType::F32);
    let mut mode = Mode::Evaluate;
    let (mut x, start) = encoder
        .start(&parameters, (&features, &valid), encoder.context, &mut mode)
        .unwrap();
    let frames = &start.frames;
    let d = x.dims2().unwrap().1;
    let check = |name: &str, layers: usize, found: &Tensor| {
        let expected = &golden[&format!("act.encoder.{name}")];
        let count = expected.dim(0).unwrap();
        let found = found
            .reshape((frames.batch, frames.time, d))
            .unwrap()
            .narrow(0, 0, count)
            .unwrap();
        let worst = golden::valid_difference(&found, expected, &frames.lengths[..count]);
        // Each layer adds its own rounding to that of those below.
        let bound = 4e-6 * golden::magnitude(expected) * (layers.max(1) as f64).sqrt();
        println!("{name}: {worst:e}, bound {bound:e}");
        assert!(worst < bound, "{name}: {worst}");
    };
    // NeMo's activation is the one before it is scaled.
    let scale = if encoder.config.xscaling {
        (d as f64).sqrt()
    } else {
        1.0
    };
    check("pre_encode", 0, &(&x / scale).unwrap());
    let updates = &mut BufferUpdates::default();
    for (i, layer) in encoder.layers.iter().enumerate() {
        let mut branches = Vec::new();
        let normalised = layer.begin(&parameters, &x).unwrap();
        let body = layer.observed_body(
            &parameters,
            (&x, normalised),
            (&start.positions, frames),
            &mut mode,
            &mut encoder.alone(None, updates),
            &mut |branch| branches.push(branch.clone()),
        );
        let (y, _) = layer.end(&parameters, body.unwrap()).unwrap();
        if i == 0 {
            let parts = ["feed_forward1", "self_attn", "conv", "feed_forward2"];
            assert_eq!(branches.len(), parts.len());
            for (part, branch) in parts.iter().zip(&branches) {
                check(&format!("layers.0.{part}"), 0, branch);
            }
        }
        check(&format!("layers.{i}"), i, &y);
        x = y;
    }
}

#[test]
fn an_utterance_alone_gives_what_it_gives_in_a_batch() {
    let golden = golden::tensors("eval.safetensors");
    let (front_end, encoder, parameters) = golden_encoder(DType::F32, |_| ());
    for (i, wave) in golden::waves("eval").iter().enumerate() {
        let features = front_end.compute(&[wave], None).unwrap();
        let tensor = features.tensor(DType::F32, &Device::Cpu).unwrap();
        let (encoded, lengths) = encoder.encode(&parameters, &tensor, &features.lengths).unwrap();
        let expected = golden[&format!("alone{i}.encoded")].unsqueeze(0).unwrap();
        let worst = golden::valid_difference(&encoded, &time_major(&expected), &lengths);
        assert!(
            worst < golden::FROM_WAVES * golden::magnitude(&expected),
            "alone{i}: {worst}"
        );
    }
}

#[test]
fn biases_and_xscaling_equal_nemo() {
    let golden = golden::tensors("variant_bias_xscale.safetensors");
    let text = std::fs::read_to_string(golden::file("model_config_resolved.yaml")).unwrap();
    let mut config: serde_yaml::Value = serde_yaml::from_str(&text).unwrap();
    let variant = std::fs::read(golden::file("variant_bias_xscale.json")).unwrap();
    let variant: serde_yaml::Value = serde_yaml::from_slice(&variant).unwrap();
    config["encoder"] = variant["encoder"].clone();
    config["preprocessor"]["features"] = variant["mels"].clone();
    config["joint"]["jointnet"]["encoder_hidden"] = variant["encoder"]["d_model"].clone();
    let config = ModelConfig::from_nemo_yaml(&serde_yaml::to_string(&config).unwrap())
        .unwrap()
        .encoder;
    assert!(config.use_bias && config.xscaling);
    let weights = golden
        .iter()
        .filter_map(|(name, tensor)| Some((name.strip_prefix("p.")?.to_string(), tensor.clone())));
    let mut builder = ParameterBuilder::from_tensors(DType::F32, Device::Cpu, weights);
    let encoder = Encoder::new(&config, "encoder", &mut builder).unwrap();
    let (parameters, _) = builder.finish();
    let mel_lengths = golden::lengths(&golden["mel_len"]);
    let (encoded, lengths) = encoder.encode(&parameters, &golden["mel"], &mel_lengths).unwrap();
    assert_eq!(lengths, golden::lengths(&golden["encoded_len"]));
    let worst = golden::valid_difference(&encoded, &time_major(&golden["encoded"]), &lengths);
    let magnitude = golden::magnitude(&golden["encoded"]);
    println!("variant: {worst:e}, values up to {magnitude}");
    assert!(worst < golden::FROM_FEATURES * magnitude, "{worst}, {magnitude}");
}

#[test]
fn limited_context_attention_equals_nemo() {
    let golden = golden::tensors("local_attn.safetensors");
    let rows = golden::lengths(&golden["rows"]);
    let text = std::fs::read_to_string(golden::file("manifest.jsonl")).unwrap();
    let mut all = Vec::new();
    for line in text.lines() {
        let entry: serde_json::Value = serde_json::from_str(line).unwrap();
        all.extend(golden::samples(&golden::file(
            entry["audio_filepath"].as_str().unwrap(),
        )));
    }
    let facts: serde_json::Value =
        serde_json::from_slice(&read_packed(&golden::file("local_attn.json"), 1).unwrap()).unwrap();
    // "... cut at 960000; batch of two: all of it, and its first 379200 samples"
    let numbers = facts["wave"].as_str().unwrap().split(|c: char| !c.is_ascii_digit());
    let cuts: Vec<usize> = numbers
        .filter_map(|number| number.parse().ok())
        .filter(|&cut| cut > 100)
        .collect();
    let [whole, part] = cuts[..] else {
        panic!("two lengths are not in {}", facts["wave"]);
    };
    let wave: Vec<f32> = all.iter().copied().cycle().take(whole).collect();
    let expected_lengths: Vec<usize> = serde_json::from_value(facts["enc_len"].clone()).unwrap();
    // Windows that are as wide to the left as to the right; NeMo has the others wrong.
    let bands = facts.as_object().unwrap().keys().filter_map(|key| {
        let (left, right) = key.split_once('_')?;
        Some((
            key.as_str(),
            AttentionContext::Band(left.parse().ok().filter(|_| left == right)?),
        ))
    });
    let bands: Vec<_> = bands.collect();
    assert!(!bands.is_empty());
    for (key, context) in std::iter::once(("full", AttentionContext::Full)).chain(bands) {
        let (front_end, encoder, parameters) =
            golden_encoder(DType::F32, |config| config.encoder.attention_context = context);
        let features = front_end.compute(&[&wave, &wave[..part]], None).unwrap();
        let tensor = features.tensor(DType::F32, &Device::Cpu).unwrap();
        let (encoded, lengths) = encoder.encode(&parameters, &tensor, &features.lengths).unwrap();
        assert_eq!(lengths, expected_lengths);
        let index: Vec<u32> = rows.iter().map(|&r| u32::try_from(r).unwrap()).collect();
        let index = Tensor::from_vec(index, rows.len(), &Device::Cpu).unwrap();
        let found = encoded.index_select(&index, 1).unwrap();
        let valid: Vec<usize> = lengths
            .iter()
            .map(|length| rows.iter().filter(|row| *row < length).count())
            .collect();
        let expected = &golden[&format!("{key}.encoded")];
        let worst = golden::valid_difference(&found, expected, &valid);
        println!("{key}: {worst:e}");
        assert!(
            worst < golden::FROM_WAVES * golden::magnitude(expected),
            "{key}: {worst}"
        );
    }
}

#[test]
fn training_statistics_equal_nemo_and_are_applied_once() {
    let golden = golden::tensors("train_step.safetensors");
    let (front_end, encoder, mut parameters) = golden_encoder(DType::F32, |_| ());
    let (features, valid) = features(&front_end, "train", DType::F32);
    let mut noise = Noise::new(0);
    let (_, lengths, _, updates) = encoder
        .forward(&parameters, &features, &valid, Mode::Train(&mut noise))
        .unwrap();
    assert_eq!(lengths, golden::lengths(&golden["enc_len"]));
    updates.apply(&mut parameters).unwrap();
    let mut seen = 0;
    for (name, expected) in golden.iter().filter(|(name, _)| name.starts_with("after.")) {
        let id = parameters.id(&name["after.".len()..]).unwrap();
        let worst = max_difference(parameters.get(id), expected);
        // Means over frames and utterances: rounding of the single values mostly goes.
        assert!(worst < 2e-6 * golden::magnitude(expected), "{name}: {worst}");
        seen += 1;
    }
    assert_eq!(seen, 3 * encoder.layers.len());
}

/// A tiny encoder in f64 with dropout everywhere, biases and xscaling.
fn tiny(context: AttentionContext, causal: CausalConfig) -> (Encoder, Parameters, Tensor, Vec<usize>) {
    let config = EncoderConfig {
        feat_in: 9,
        n_layers: 2,
        d_model: 6,
        use_bias: true,
        subsampling_conv_channels: 3,
        ff_expansion_factor: 2,
        n_heads: 2,
        attention_context: context,
        xscaling: true,
        conv_kernel_size: 3,
        causal,
        dropout: 0.2,
        dropout_pre_encoder: 0.1,
        dropout_emb: 0.1,
        dropout_att: 0.2,
    };
    let mut builder = ParameterBuilder::random(DType::F64, Device::Cpu, 5);
    let encoder = Encoder::new(&config, "encoder", &mut builder).unwrap();
    let (mut parameters, _) = builder.finish();
    // Away from the special values of the initialisation (zeros and ones).
    let mut noise = Noise::new(77);
    let ids: Vec<_> = parameters
        .iter()
        .filter(|(_, p)| p.trainable)
        .map(|(id, _)| id)
        .collect();
    for id in ids {
        let tensor = parameters.get(id);
        let moved = (tensor + (normal(tensor.dims(), &mut noise) * 0.1).unwrap()).unwrap();
        parameters.set(id, moved).unwrap();
    }
    let features = normal(&[2, 9, 29], &mut noise);
    (encoder, parameters, features, vec![29, 14])
}

fn gradients_of(
    encoder: &Encoder,
    parameters: &Parameters,
    features: &Tensor,
    lengths: &[usize],
    weight: &Tensor,
) -> Gradients {
    let mut noise = Noise::new(9);
    let (_, _, saved, _) = encoder
        .forward(parameters, features, lengths, Mode::Train(&mut noise))
        .unwrap();
    let mut gradients = Gradients::new(parameters);
    encoder.backward(parameters, saved, weight, &mut gradients).unwrap();
    gradients
}

#[test]
fn every_gradient_agrees_with_finite_differences_in_f64() {
    let chunks = ChunkContext::limited(2, 1);
    let causal = |convolution: bool| CausalConfig {
        subsampling: true,
        convolution,
        layer_norm: true,
        contexts: vec![chunks],
        probabilities: Vec::new(),
    };
    let none = CausalConfig::default;
    let no_limit = |left, right| AttentionContext::Chunks(ChunkContext { left, right });
    for (context, causal) in [
        (AttentionContext::Full, none()),
        (AttentionContext::Band(1), none()),
        (AttentionContext::Chunks(chunks), causal(true)),
        (AttentionContext::Chunks(chunks), causal(false)),
        (no_limit(None, Some(1)), causal(true)),
        (no_limit(Some(1), None), causal(true)),
    ] {
        let (encoder, parameters, features, lengths) = tiny(context, causal);
        let mut noise = Noise::new(8);
        let weight = normal(&[2, encoder.config.subsampled(29), 6], &mut noise);
        let gradients = gradients_of(&encoder, &parameters, &features, &lengths, &weight);
        let mut checked = 0;
        for (id, parameter) in parameters.iter().filter(|(_, p)| p.trainable) {
            let gradient = gradients
                .get(id)
                .unwrap_or_else(|| panic!("{} has none", parameter.name));
            flow_kernels::testing::check_gradient(&parameter.name, &parameter.tensor, &weight, gradient, |moved| {
                let mut parameters = parameters.clone();
                parameters.set(id, moved.clone())?;
                let mut noise = Noise::new(9);
                let mode = Mode::Train(&mut noise);
                crate::Result::Ok(encoder.forward(&parameters, &features, &lengths, mode)?.0)
            });
            checked += 1;
        }
        assert_eq!(checked, 12 + 2 * 37);
    }
}

#[test]
fn recomputed_layers_give_the_same_gradients_to_the_bit_and_frozen_ones_none() {
    let (mut encoder, parameters, features, lengths) = tiny(AttentionContext::Full, CausalConfig::default());
    let weight = normal(&[2, 4, 6], &mut Noise::new(8));
    let kept = gradients_of(&encoder, &parameters, &features, &lengths, &weight);
    encoder.recompute = true;
    let again = gradients_of(&encoder, &parameters, &features, &lengths, &weight);
    let mut compared = 0;
    for (id, gradient) in kept.iter() {
        assert_eq!(values(gradient), values(again.get(id).unwrap()));
        compared += 1;
    }
    assert_eq!(compared, 12 + 2 * 37);
    let mut frozen = Gradients::new(&parameters);
    for (id, _) in parameters.iter() {
        frozen.freeze(id);
    }
    let mut noise = Noise::new(9);
    let (_, _, saved, _) = encoder
        .forward(&parameters, &features, &lengths, Mode::Train(&mut noise))
        .unwrap();
    encoder.backward(&parameters, saved, &weight, &mut frozen).unwrap();
    assert_eq!(frozen.iter().count(), 0);
}

#[test]
fn hostile_shapes_are_errors_and_empty_utterances_are_not() {
    let (front_end, encoder, parameters) = golden_encoder(DType::F32, |_| ());
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let mels = golden::model().0.encoder.feat_in;
    assert!(encoder.encode(&parameters, &zeros(&[1, mels + 1, 8]), &[8]).is_err());
    assert!(encoder.encode(&parameters, &zeros(&[1, mels, 8]), &[9]).is_err());
    assert!(encoder.encode(&parameters, &zeros(&[1, mels, 8]), &[8, 8]).is_err());
    assert!(encoder.encode(&parameters, &zeros(&[0, mels, 8]), &[]).is_err());
    let features = front_end.compute(&[&[], &[0.1; 4000]], None).unwrap();
    let tensor = features.tensor(DType::F32, &Device::Cpu).unwrap();
    let (encoded, lengths) = encoder.encode(&parameters, &tensor, &features.lengths).unwrap();
    assert_eq!(lengths, [0, 4]);
    assert!(values(&encoded).iter().all(|v| v.is_finite()));
}
