//! The memory that training is said to need is what it takes.

use std::alloc::System;

use candle_core::{DType, Device};
use flow_evaluation::decode::BATCH_SECONDS;
use flow_model::ModelConfig;
use flow_model::allocation::{Count, Counted};
use flow_model::config::{AttentionContext, ChunkContext};
use flow_model::model::{MicroBatch, TdtModel};
use flow_nn::lora::LoraConfig;
use flow_training::average::MovingAverage;
use flow_training::memory::{
    BatchShape, DataAssumptions, MeasuredMemory, MemoryCheck, MemoryNeeds, bucket_batch_sizes, check, largest_batch,
    step_fits,
};
use flow_training::optimizer::AdamW;
use flow_training::resolved_settings::ResolvedSettings;
use flow_training::settings::{BatchNormStatistics, LoraSettings, ModelSettings, Optimizer, Precision, TrainSettings};
use flow_training::trainer::{LoadedBatch, Trainer};

#[global_allocator]
static ALLOCATOR: Counted<System> = Counted(System);

fn config(settings: &ModelSettings, pieces: usize) -> ModelConfig {
    let labels: Vec<String> = (0..pieces).map(|n| format!("p{n}")).collect();
    settings.config(&labels).expect("a configuration")
}

fn step(shape: BatchShape, planned: u32, vocabulary: usize) -> Vec<LoadedBatch> {
    (0..planned)
        .map(|place| LoadedBatch {
            rank: place,
            place,
            segments: vec!["a".into(); shape.utterances],
            batch: MicroBatch {
                signals: (0..shape.utterances)
                    .map(|n| {
                        let samples = (shape.seconds * 16_000.0) as usize;
                        (0..samples)
                            .map(|i| (i as f32 * 0.001 * (n + 3) as f32).sin() * 0.3)
                            .collect()
                    })
                    .collect(),
                tokens: vec![(0..shape.tokens).map(|n| (n * 7 % vocabulary) as u32).collect(); shape.utterances],
                prompts: Vec::new(),
            },
            ..LoadedBatch::default()
        })
        .collect()
}

fn needs(config: &ModelConfig, settings: &ResolvedSettings, shapes: &[BatchShape]) -> MemoryNeeds {
    let measured = MeasuredMemory::new(config, settings, shapes).expect("a trial");
    measured.expect("nobody else counts").needs(settings)
}

/// The most that two steps of training hold, with everything that training keeps.
fn taken(config: &ModelConfig, settings: &TrainSettings, shape: BatchShape) -> i64 {
    let planned = settings.grad_accum * settings.ranks;
    let batches = step(shape, planned, config.vocab_size);
    let count = Count::begin().expect("nobody else counts");
    let mut model = TdtModel::new(config.clone(), None, 3, DType::F32, &Device::Cpu).expect("a model");
    model = model.stored_as(settings.precision.matrices()).expect("a model");
    if let Some(lora) = &settings.lora {
        let lora = LoraConfig {
            rank: lora.rank,
            alpha: lora.alpha,
            targets: lora.targets.clone(),
            base: String::new(),
        };
        model = model.with_lora(lora, Vec::new(), 3).expect("an adapted model");
    }
    model.set_recompute(settings.recompute);
    let average = (settings.average_decay > 0.0)
        .then(|| MovingAverage::new(settings.average_decay, &model.parameters).expect("an average"));
    let optimizer = AdamW::new(settings.adamw());
    let mut trainer = Trainer::new(model, optimizer, settings.trainer_config(64), average).expect("a trainer");
    // Making a model of random numbers takes more than the model.
    count.most();
    for number in 0..2 {
        let report = trainer.step(number, &batches, planned).expect("a step");
        assert!(report.loss.is_finite() && report.skipped.is_none());
    }
    count.most()
}

/// Within a tenth, for widths, depths and switches of every kind. One test, since there is one allocator.
#[test]
fn what_is_predicted_is_taken() {
    let base = TrainSettings {
        unfreeze_step: 0,
        rank_timeout: 60.0,
        checkpoint_in_background: false,
        eval_every: 0,
        max_tokens: 60,
        ..TrainSettings::default()
    };
    let small = ModelSettings {
        layers: 5,
        ..ModelSettings::default()
    };
    let wide = ModelSettings {
        mels: 128,
        d_model: 320,
        heads: 8,
        layers: 8,
        conv_channels: 64,
        pred_hidden: 320,
        pred_layers: 2,
        joint_hidden: 320,
        ..ModelSettings::default()
    };
    let lora = LoraSettings {
        targets: ["linear.*", "pointwise_conv[12]"].map(String::from).to_vec(),
        ..LoraSettings::default()
    };
    let cases: [(&str, &ModelSettings, usize, f64, TrainSettings); 11] = [
        ("small", &small, 512, 20.0, base.clone()),
        (
            "small, long",
            &small,
            2048,
            40.0,
            TrainSettings {
                recompute: true,
                ..base.clone()
            },
        ),
        ("wide", &wide, 1024, 12.0, base.clone()),
        (
            "wide, recomputed",
            &wide,
            1024,
            12.0,
            TrainSettings {
                recompute: true,
                ..base.clone()
            },
        ),
        (
            "wide, accumulated",
            &wide,
            1024,
            10.0,
            TrainSettings {
                recompute: true,
                grad_accum: 3,
                ..base.clone()
            },
        ),
        (
            "wide, in eight bits, averaged",
            &wide,
            1024,
            10.0,
            TrainSettings {
                optimizer: Optimizer::Adamw8bit,
                average_decay: 0.9,
                ..base.clone()
            },
        ),
        (
            "wide, texts cut in three",
            &wide,
            8192,
            10.0,
            TrainSettings {
                max_tokens: 200,
                ..base.clone()
            },
        ),
        (
            "wide, folded, in bf16",
            &wide,
            1024,
            10.0,
            TrainSettings {
                recompute: true,
                fold_update: true,
                precision: Precision::Bf16,
                clip: 0.0,
                ..base.clone()
            },
        ),
        (
            "wide, offloaded",
            &wide,
            1024,
            12.0,
            TrainSettings {
                offload: true,
                ..base.clone()
            },
        ),
        (
            "wide, adapted, recomputed, in bf16",
            &wide,
            1024,
            10.0,
            TrainSettings {
                lora: Some(lora),
                recompute: true,
                precision: Precision::Bf16,
                batch_norm: BatchNormStatistics::Frozen,
                ..base.clone()
            },
        ),
        (
            "small, two ranks",
            &small,
            512,
            20.0,
            TrainSettings {
                ranks: 2,
                ..base.clone()
            },
        ),
    ];
    for (number, (name, model, pieces, seconds, settings)) in cases.into_iter().enumerate() {
        let settings = ResolvedSettings::from(settings).with_batch_seconds(seconds);
        let config = config(model, pieces);
        let assumed = DataAssumptions {
            longest: if name == "small, long" { 40.0 } else { 5.0 },
            tokens_per_second: 40.0,
        };
        // The short clips of one case, the long ones of the next.
        for shape in assumed.shapes(&settings).into_iter().skip(number % 2).take(1) {
            let needs = needs(&config, &settings, &[shape]);
            let predicted = needs.of_ranks(settings.ranks) as f64;
            let taken = taken(&config, &settings, shape) as f64;
            let off = predicted / taken - 1.0;
            println!(
                "{name}, {shape:?}: {:.1} MB predicted, {:.1} MB taken, {:+.1} %",
                predicted / 1e6,
                taken / 1e6,
                100.0 * off
            );
            println!("    {needs:?}");
            assert!(off.abs() <= 0.1, "{name}: {off}");
        }
    }
    // What an evaluation needs, in a model of any depth.
    let (long, config_wide) = (BATCH_SECONDS / 4.0, config(&wide, 1024));
    let evaluated = TrainSettings {
        eval_every: 1,
        ..base.clone()
    };
    let evaluated = ResolvedSettings::from(evaluated).with_batch_seconds(1000.0);
    let shape = BatchShape {
        utterances: 1,
        seconds: long,
        tokens: 4,
    };
    let predicted = needs(&config_wide, &evaluated, &[shape]).evaluation as f64;
    let model = TdtModel::new(config_wide, None, 3, DType::F32, &Device::Cpu).expect("a model");
    let signal: Vec<f32> = (0..(long * 16_000.0) as usize)
        .map(|i| (i as f32 * 0.01).sin())
        .collect();
    let count = Count::begin().expect("nobody else counts");
    model.transcribe(&[&signal[..]; 4]).expect("texts");
    let taken = count.most() as f64;
    drop(count);
    println!(
        "evaluation: {:.1} MB predicted, {:.1} MB taken",
        predicted / 1e6,
        taken / 1e6
    );
    assert!((predicted / taken - 1.0).abs() <= 0.1, "{predicted} {taken}");
    // On a device with a memory of its own, offloading leaves there what a step computes with.
    let on_device = TrainSettings {
        device: "cuda".into(),
        ..base.clone()
    };
    let config_small = config(&small, 512);
    let [all, some] = [false, true].map(|offload| {
        let settings = TrainSettings {
            offload,
            ..on_device.clone()
        };
        needs(&config_small, &settings.into(), &[shape])
    });
    assert_eq!(all.host.total(), 0);
    assert_eq!((some.optimizer, some.host.optimizer), (0, all.optimizer));
    assert_eq!(
        (some.host.parameters, some.host.gradients),
        (all.parameters, all.gradients)
    );
    assert!(
        some.step < all.step && some.parameters == all.parameters,
        "{some:?}, {all:?}"
    );
    // The largest batch that fits needs about what it may.
    let config = config(&small, 512);
    let assumed = DataAssumptions {
        longest: 5.0,
        tokens_per_second: 12.0,
    };
    let device = 200_000_000;
    let base = ResolvedSettings::from(base);
    let seconds = largest_batch(&config, &base, &assumed, device)
        .expect("needs")
        .expect("one that fits");
    let share = |seconds: f64| {
        let settings = base.with_batch_seconds(seconds);
        needs(&config, &settings, &assumed.shapes(&settings)).total() as f64 / device as f64
    };
    // Two clips more do not fit any more.
    let (fits, does_not) = (share(seconds), share(seconds + 10.0));
    assert!(
        fits <= 1.02 && does_not > 1.0,
        "{seconds} s need {fits} of it, 10 s more {does_not}"
    );
    assert_eq!(largest_batch(&config, &base, &assumed, 1_000_000).expect("needs"), None);
    largest_of_each_bucket(&config, &base);
    the_widest_context_counts(&config, &base);
    a_trial_is_noted_and_not_made_again(&config, &base);
}

/// Training draws one of several contexts: what it needs is what the one that sees most needs.
fn the_widest_context_counts(config: &ModelConfig, base: &ResolvedSettings) {
    let shape = BatchShape {
        utterances: 3,
        seconds: 20.0,
        tokens: 20,
    };
    let in_contexts = |contexts: &[(Option<usize>, Option<usize>)]| {
        let contexts: Vec<_> = (contexts.iter())
            .map(|&(left, right)| ChunkContext { left, right })
            .collect();
        let mut config = config.clone();
        config.encoder.attention_context = AttentionContext::Chunks(contexts[0]);
        config.encoder.causal.contexts = contexts;
        needs(&config, base, &[shape]).activations
    };
    let (narrow, wide) = ((Some(8), Some(1)), (None, None));
    let all = in_contexts(&[wide]);
    assert!(in_contexts(&[narrow]) < all);
    for mixed in [[narrow, wide, narrow], [narrow, narrow, wide], [wide, narrow, narrow]] {
        assert_eq!(in_contexts(&mixed), all);
    }
}

/// What a check measured serves the next one, unless the model, the settings or the note are others.
fn a_trial_is_noted_and_not_made_again(config: &ModelConfig, base: &ResolvedSettings) {
    let notes = tempfile::tempdir().expect("a folder");
    let checked = |settings: &ResolvedSettings, config: &ModelConfig| {
        let checked = check(settings, config, 1, notes.path()).expect("it fits");
        let MemoryCheck { tried, .. } = checked.expect("nobody else counts");
        (
            tried.is_some(),
            checked.map(|checked| (checked.needed, checked.another)),
        )
    };
    let first = checked(base, config);
    assert!(first.0);
    assert_eq!(checked(base, config), (false, first.1));
    // The optimizer's part is arithmetic.
    let other = base.with(|settings| settings.optimizer = Optimizer::Adamw8bit);
    let smaller = checked(&other, config);
    assert!(!smaller.0 && smaller.1 < first.1, "{smaller:?} {first:?}");
    let recomputed = base.with(|settings| settings.recompute = !settings.recompute);
    assert!(checked(&recomputed, config).0 && checked(base, config).0);
    let mut deeper = config.clone();
    deeper.encoder.n_layers += 1;
    assert!(checked(base, &deeper).0 && !checked(base, &deeper).0);
    std::fs::write(notes.path().join("memory.json"), "{").expect("a file");
    assert!(checked(base, &deeper).0 && !checked(base, &deeper).0);
    // Nowhere to note it.
    let nowhere = notes.path().join("none");
    assert!(check(base, config, 1, &nowhere).expect("it fits").is_some() && !nowhere.exists());
}

/// The predicted size of each bucket of durations and texts needs about what there is, and more does not fit; a trial says the
/// same.
fn largest_of_each_bucket(config: &ModelConfig, base: &ResolvedSettings) {
    let device = 200_000_000;
    let assumed = DataAssumptions {
        longest: 6.0,
        tokens_per_second: 12.0,
    };
    let mut settings = base.clone();
    let sampling = settings.sampling.get_or_insert_default();
    sampling.packing.boundaries = vec![3.0, 8.0];
    sampling.packing.token_boundaries = vec![10];
    sampling.speeds = vec![0.8, 1.0];
    let sizes = bucket_batch_sizes(config, &settings, &assumed, device)
        .expect("sizes")
        .expect("nobody else counts");
    let shapes: Vec<(f64, usize)> = sizes.iter().map(|shape| (shape.seconds, shape.tokens)).collect();
    // Of the tokens of a text `max_tokens` count.
    let (short, long) = (3.0 / 0.8, 6.0 / 0.8);
    assert_eq!(
        shapes,
        [(short, 10), (short, 36), (long, 10), (long, 60), (long, 10), (long, 60)]
    );
    let count = |at: usize| sizes[at].utterances;
    assert!(
        count(0) > count(1) && count(1) > count(3) && count(2) > count(3),
        "{sizes:?}"
    );
    assert_eq!((count(2), count(3)), (count(4), count(5)));
    for shape in &sizes[..4] {
        let share = |utterances: usize| {
            let shape = BatchShape { utterances, ..*shape };
            needs(config, &settings, &[shape]).total() as f64 / device as f64
        };
        let (fits, does_not) = (
            share(shape.utterances),
            share(shape.utterances + shape.utterances.div_ceil(20)),
        );
        assert!(fits <= 1.02 && does_not > 0.98, "{shape:?}: {fits} {does_not}");
        let tried = |memory: u64| {
            step_fits(config, &settings, *shape, memory)
                .expect("a step")
                .expect("it counts")
        };
        assert!(tried(device * 11 / 10) && !tried(device * 8 / 10), "{shape:?}");
    }
    // The check of a training with these sizes looks at all buckets.
    let sampling = settings.sampling.get_or_insert_default();
    sampling.packing.bucket_batch_size = sizes.iter().map(|shape| shape.utterances as u32).collect();
    sampling.packing.check().expect("a size for each bucket");
    assert_eq!(assumed.shapes(&settings), sizes);
    let none = bucket_batch_sizes(config, &settings, &assumed, 1_000_000)
        .expect("sizes")
        .expect("nobody else counts");
    assert!(none.iter().all(|shape| shape.utterances == 0));
}

/// Fine-tuning all of parakeet-tdt-0.6b within 8 GB: one step of one utterance of 90 s with 512 tokens, in its full size.
/// Takes some ten minutes and 9 GB: `cargo test --release --workspace --test memory -- --ignored --nocapture`
#[test]
#[ignore = "ten minutes and 9 GB of memory"]
fn the_full_size_is_fine_tuned_within_eight_gigabytes() {
    let model = ModelSettings {
        mels: 128,
        d_model: 1024,
        heads: 8,
        layers: 24,
        conv_channels: 256,
        pred_hidden: 640,
        pred_layers: 2,
        joint_hidden: 640,
        ..ModelSettings::default()
    };
    let settings = TrainSettings {
        unfreeze_step: 0,
        max_duration: 90.0,
        recompute: true,
        optimizer: Optimizer::Adamw8bit,
        checkpoint_in_background: false,
        eval_every: 0,
        ..TrainSettings::default()
    };
    let config = config(&model, 8192);
    let shape = BatchShape {
        utterances: 1,
        seconds: 90.0,
        tokens: 512,
    };
    let needs = needs(&config, &settings.clone().into(), &[shape]);
    println!("{:.2} GB predicted: {needs:?}", needs.total() as f64 / 1e9);
    let taken = taken(&config, &settings, shape) as f64;
    println!("{:.2} GB taken", taken / 1e9);
    assert!((needs.total() as f64 / taken - 1.0).abs() <= 0.1);
    assert!(taken < 8e9);
}
