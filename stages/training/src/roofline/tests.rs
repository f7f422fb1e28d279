//! Operations are those of a training step.

use candle_core::{DType, Device};
use flow_kernels::counts::counted;
use flow_model::config::{AttentionContext, CtcConfig, PromptConfig, Reduction};
use flow_model::joint::cells_computed_again;
use flow_model::model::{MicroBatch, TdtModel, TrainOptions};
use flow_model::{Gradients, ModelConfig};

use super::*;
use crate::memory::BatchShape;
use crate::resolved_settings::ResolvedSettings;
use crate::settings::{Optimizer, Precision, TrainSettings};

fn config() -> ModelConfig {
    let yaml = "
preprocessor: {sample_rate: 16000, window_size: 0.025, window_stride: 0.01, features: 24, n_fft: 512, pad_to: 0}
encoder:
  {feat_in: 24, n_layers: 3, d_model: 24, n_heads: 2, use_bias: false, xscaling: false, conv_kernel_size: 5,
   subsampling: dw_striding, subsampling_factor: 8, subsampling_conv_channels: 6, dropout: 0.1,
   dropout_pre_encoder: 0.1, dropout_emb: 0.0, dropout_att: 0.1}
decoder: {vocab_size: 20, prednet: {pred_hidden: 14, pred_rnn_layers: 2}}
joint: {jointnet: {joint_hidden: 18}}
loss: {tdt_kwargs: {durations: [0, 1, 2, 3, 4], sigma: 0.02}}
";
    ModelConfig::from_nemo_yaml(yaml).expect("the configuration above is valid")
}

fn settings(change: impl Fn(&mut TrainSettings)) -> ResolvedSettings {
    let mut settings = TrainSettings::default();
    change(&mut settings);
    ResolvedSettings::from(settings)
}

/// A model of this form is trained on the CPU: its products have as many operations as the parts say, and it has as many
/// parameters.
fn check(what: &str, config: &ModelConfig, shape: BatchShape, recompute: bool) {
    let mut model = TdtModel::new(config.clone(), None, 1, DType::F32, &Device::Cpu).expect("a model");
    model.set_recompute(recompute);
    assert_eq!(
        parameter_counts(config).0,
        model.parameters.count_trainable() as f64,
        "{what}"
    );
    let samples = (shape.seconds * 16_000.0) as usize;
    let signals =
        (0..shape.utterances).map(|n| (0..samples).map(|i| (i as f32 * 0.01 * (n + 2) as f32).sin()).collect());
    let batch = MicroBatch {
        signals: signals.collect(),
        tokens: vec![(0..shape.tokens as u32).collect(); shape.utterances],
        prompts: Vec::new(),
    };
    let mut gradients = Gradients::new(&model.parameters);
    let train = || model.train_micro_batch(&batch, &TrainOptions::default(), &mut gradients);
    let (output, counts) = counted(train);
    assert!(output.expect("a step").loss.is_finite(), "{what}");
    let settings = settings(|settings| settings.recompute = recompute);
    let parts = parts(config, &settings, shape, false);
    let all = parts.iter().fold(Work::default(), |all, part| all + part.work);
    assert_eq!(
        (all.model + all.again).all(),
        counts.product_flops as f64,
        "{what}: {parts:#?}"
    );
    assert_eq!(all.again.all() > 0.0, recompute, "{what}");
}

#[test]
fn operations_are_those_of_a_training_step() {
    let shape = |utterances, seconds, tokens| BatchShape {
        utterances,
        seconds,
        tokens,
    };
    for recompute in [false, true] {
        check("two clips", &config(), shape(2, 0.5, 3), recompute);
        // Padding adds a frame to the 8 of each clip.
        check(
            "a clip with a frame of padding",
            &config(),
            shape(1, 0.64, 2),
            recompute,
        );
    }
    check("no tokens", &config(), shape(3, 0.3, 0), false);
    let mut limited = config();
    limited.encoder.attention_context = AttentionContext::Band(2);
    check("limited attention", &limited, shape(2, 3.0, 4), true);
    let mut hybrid = config();
    hybrid.ctc = Some(CtcConfig {
        weight: 0.3,
        reduction: Reduction::MeanBatch,
    });
    hybrid.encoder.use_bias = true;
    hybrid.encoder.conv_kernel_size = 9;
    check("biases and a CTC head", &hybrid, shape(2, 0.7, 3), false);
    let mut prompted = config();
    prompted.prompt = Some(PromptConfig {
        prompts: 5,
        dictionary: vec![("auto".into(), 4)],
    });
    check("a language prompt", &prompted, shape(2, 0.7, 3), true);
}

#[test]
fn a_device_computes_large_logits_again() {
    // Of 8198 outputs in 32 bits, one chunk of 512 cells is kept in 32 MiB, and none of 8192.
    assert_eq!(cells_computed_again(10_000, 8198, true), 10_000);
    assert_eq!(cells_computed_again(10_000, 8198, false), 10_000 - 512);
    assert_eq!(cells_computed_again(300, 8198, false), 0);
}

#[test]
fn what_bounds_a_part_is_named() {
    let card = Card::named("H100").expect("a card");
    let wide = Arithmetic {
        matrices_in_bf16: false,
        tf32: false,
    };
    let mut work = Work {
        bytes: card.memory,
        ..Work::default()
    };
    assert_eq!(
        card.least_time(&work, wide),
        LeastTime {
            seconds: 1.0,
            bound: Bound::Memory
        }
    );
    work.again.matrices = 3.0 * card.f32;
    assert_eq!(
        card.least_time(&work, wide),
        LeastTime {
            seconds: 3.0,
            bound: Bound::Arithmetic
        }
    );
    let short = Arithmetic {
        matrices_in_bf16: true,
        ..wide
    };
    assert_eq!(card.least_time(&work, short).bound, Bound::Memory);
    work.exchanged = 5.0 * card.link;
    assert_eq!(
        card.least_time(&work, wide),
        LeastTime {
            seconds: 5.0,
            bound: Bound::Link
        }
    );
    assert!(Card::named("abacus").is_none());
}

#[test]
fn settings_change_the_bytes_of_the_update() {
    let shape = BatchShape {
        utterances: 1,
        seconds: 0.5,
        tokens: 1,
    };
    let bytes_of = |settings: &ResolvedSettings, name: &str| {
        let parts = parts(&config(), settings, shape, true);
        parts
            .iter()
            .find(|part| part.name == name)
            .map(|part| part.work.bytes + part.work.exchanged)
    };
    let plain = settings(|_| {});
    assert_eq!(bytes_of(&plain, "gradient exchange"), None);
    let (all, matrices) = parameter_counts(&config());
    // Gradients twice, weights and two moments read and written.
    assert_eq!(bytes_of(&plain, "optimizer"), Some(all * (8.0 + 8.0 + 16.0)));
    let short = settings(|settings| {
        settings.optimizer = Optimizer::Adamw8bit;
        settings.precision = Precision::Bf16;
        settings.ranks = 4;
    });
    let scales = 2.0 * 2.0 * 4.0 / 256.0;
    assert_eq!(
        bytes_of(&short, "optimizer"),
        Some(all * (8.0 + 8.0 + 4.0 + scales) - 4.0 * matrices)
    );
    assert_eq!(
        bytes_of(&short, "gradient exchange"),
        Some(0.75 * (all * 8.0 - 2.0 * matrices))
    );
}

/// On a device scores of attention never go through memory, and are computed again; the joint network's factors and logits are in
/// bf16 where matrices are.
#[test]
fn bytes_on_a_device_are_those_of_its_kernels() {
    let of = |config: &ModelConfig, precision, shape, name: &str, on_device| {
        let settings = settings(|settings| settings.precision = precision);
        let all = parts(config, &settings, shape, on_device);
        all.iter().find(|part| part.name == name).expect("a part").work
    };
    let shape = |seconds, tokens| BatchShape {
        utterances: 4,
        seconds,
        tokens,
    };
    let attention = |seconds, on_device| of(&config(), Precision::Bf16, shape(seconds, 1), "attention", on_device);
    let growth = |on_device| attention(160.0, on_device).bytes / attention(40.0, on_device).bytes;
    assert!(
        growth(true) < 4.01 && growth(false) > 12.0,
        "{} {}",
        growth(true),
        growth(false)
    );
    let (device, host) = (attention(40.0, true), attention(40.0, false));
    assert_eq!((device.model.all(), device.model.others), (host.model.all(), 0.0));
    assert!(device.again.all() > 0.0 && host.again.all() == 0.0);

    // Bytes for each output of each cell: of the logits, which are written and read twice, and of their gradients, which are
    // written once and read twice.
    let mut wide = config();
    wide.vocab_size = 2020;
    for (precision, bytes) in [
        (Precision::Bf16, (4.0 + 3.0) * 2.0),
        (Precision::F32, (4.0 + 3.0) * 4.0),
    ] {
        let joint = |config: &ModelConfig| of(config, precision, shape(80.0, 400), "joint network and loss", true);
        let cells = 4.0 * 1000.0 * 401.0;
        let each = (joint(&wide).bytes - joint(&config()).bytes) / (cells * 2000.0);
        assert!((each - bytes).abs() < 0.2, "{precision:?}: {each} {bytes}");
    }

    // Weights of the arcs of a cell: of five durations, or of one.
    let joint = |omega: f64| {
        let mut config = config();
        config.transducer.as_mut().unwrap().loss.omega = omega;
        let all = of(
            &config,
            Precision::Bf16,
            shape(80.0, 400),
            "joint network and loss",
            true,
        );
        all.bytes / (4.0 * 1000.0 * 401.0)
    };
    let weights = |omega| joint(0.0) - joint(omega);
    assert!((weights(1.0) - 4.0 * 96.0).abs() < 1e-6 && (weights(0.25) - 96.0).abs() < 1e-6);
}
