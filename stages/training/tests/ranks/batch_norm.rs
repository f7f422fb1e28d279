//! Batch normalisation with the statistics of all ranks (`SyncBatchNorm`), and with frozen ones.

use flow_training::settings::BatchNormStatistics;

use super::*;

/// Utterances of one length and with as many tokens each, so that a batch of them is padded and reduced like any part of it.
fn utterances(step: u64) -> MicroBatch {
    let tone = |n: u64| {
        let frequency = 0.005 * (n as f32 + 1.0);
        (0..9_000)
            .map(|i| (i as f32 * frequency).sin() * 0.3)
            .collect::<Vec<f32>>()
    };
    let numbers = || (0..4).map(|n| step * 4 + n);
    MicroBatch {
        signals: numbers().map(tone).collect(),
        tokens: numbers().map(|n| vec![8, 30 + n as u32, 31]).collect(),
        prompts: Vec::new(),
    }
}

/// The utterances of a step in so many micro-batches, one for each rank.
fn shared_out(step: u64, ranks: u32) -> Vec<LoadedBatch> {
    let all = utterances(step);
    let count = all.signals.len() / ranks as usize;
    let parts = all.signals.chunks(count).zip(all.tokens.chunks(count));
    (0..)
        .zip(parts)
        .map(|(rank, (signals, tokens))| LoadedBatch {
            epoch: 0,
            rank,
            micro: 0,
            place: rank,
            segments: (0..count).map(|n| format!("{rank} {n}")).collect(),
            batch: MicroBatch {
                signals: signals.to_vec(),
                tokens: tokens.to_vec(),
                prompts: Vec::new(),
            },
            ..LoadedBatch::default()
        })
        .collect()
}

fn quiet(batch_norm: BatchNormStatistics, ranks: u32) -> TrainSettings {
    TrainSettings {
        batch_norm,
        spec_augment: false,
        dropout: false,
        unfreeze_step: 0,
        average_decay: 0.0,
        grad_accum: 1,
        ..settings(Path::new("unused"), ranks)
    }
}

/// Losses, norms, weights and statistics after four steps, in 64 bits and without any noise.
fn trained(model: &Path, settings: &TrainSettings, recompute: bool) -> Vec<(String, Vec<f64>)> {
    let mut model = TdtModel::load(model, DType::F64, &Device::Cpu).expect("the model");
    model.config.transducer.as_mut().unwrap().loss.omega = 0.0;
    model.set_recompute(recompute);
    model.set_batch_norm(settings.batch_norm.into());
    let config = TrainerConfig {
        dither: false,
        ..settings.trainer_config(16)
    };
    let mut trainer = Trainer::new(model, AdamW::new(settings.adamw()), config, None).expect("a trainer");
    let mut reports = Vec::new();
    for step in 0..4 {
        let batches = shared_out(step, settings.ranks);
        let report = trainer.step(step, &batches, settings.ranks).expect("a step");
        assert_eq!(report.skipped, None);
        reports.extend([report.loss, report.gradient_norm]);
    }
    let mut all = vec![("reports".to_owned(), reports)];
    trainer
        .with_model(|model| {
            for (_, parameter) in model.parameters.iter() {
                let values = |tensor: &Tensor| tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1();
                all.push((parameter.name.clone(), values(&parameter.tensor).expect("values")));
            }
        })
        .expect("the model");
    all
}

/// Two and four ranks with parts of a batch train as one rank with the whole batch: in 64 bits only the order of sums tells
/// them apart, at 1e-16, which AdamW blows up where a gradient is near zero, as in `ranks_agree_with_one_that_does_everything`.
/// With statistics of each rank's own rows they do not.
#[test]
fn ranks_with_common_statistics_are_one_with_the_whole_batch() {
    let folder = tempfile::tempdir().unwrap();
    let model = session(&settings(folder.path(), 1)).checkpoint().expect("a checkpoint");
    let whole = trained(&model, &quiet(BatchNormStatistics::Rank, 1), false);
    // The statistics of one rank are those of all; merged moments are rounded otherwise than those of one pass.
    let alone = trained(&model, &quiet(BatchNormStatistics::Sync, 1), false);
    let (off, name) = distance(&whole, &alone);
    assert!(off < 1e-9, "one rank: {off:e} in {name}");
    for ranks in [2, 4] {
        let settings = quiet(BatchNormStatistics::Sync, ranks);
        let several = trained(&model, &settings, false);
        let (off, name) = distance(&whole, &several);
        println!("{ranks} ranks: {off:e} in {name}");
        assert!(off < 1e-9, "{ranks} ranks: {off:e} in {name}");
        let exchanged = by_nccl(|| trained(&model, &settings, false));
        assert_eq!(distance(&several, &exchanged).0, 0.0, "{ranks} ranks by NCCL");
        // Layers that are computed again do not exchange their statistics again.
        let again = trained(&model, &settings, true);
        assert_eq!(distance(&several, &again).0, 0.0, "{ranks} ranks, recomputed");
        let own = trained(&model, &quiet(BatchNormStatistics::Rank, ranks), false);
        let (off, _) = distance(&whole, &own);
        assert!(off > 1e-4, "{ranks} ranks with their own statistics: {off:e}");
    }
}

/// Ranks without a micro-batch, ranks in several processes, updates in host memory, a bad batch on one rank: all go on together,
/// with the same bits whatever they exchange by.
#[test]
fn ranks_with_common_statistics_stay_together() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, ranks, offload| {
        let mut settings = TrainSettings {
            batch_norm: BatchNormStatistics::Sync,
            average_decay: 0.0,
            offload,
            ..settings(&folder.path().join(name), ranks)
        };
        settings.model.durations = vec![1, 2, 3, 4];
        settings
    };
    let run = |settings: &TrainSettings, count: usize| {
        let joined = (count > 1).then(|| processes(count));
        let group = joined.as_ref().map(|(first, _)| process_group(first));
        let mut session = begin(settings, group);
        for step in 0..6 {
            let mut batches = micro_batches(step);
            if step == 4 {
                // Without duration 0, more tokens than frames cannot be aligned: the loss is infinite, on one rank alone, which
                // has no backward pass.
                batches[1].batch.tokens[0] = vec![30; 60];
            }
            let report = session.step(&batches, PLANNED).expect("a step");
            assert_eq!(report.skipped.is_some(), step == 4, "step {step}");
        }
        numbers(&mut session)
    };
    for ranks in [2, 4] {
        let expected = run(&of(&format!("host {ranks}"), ranks, false), 1);
        let others = [
            ("offloaded", run(&of(&format!("offloaded {ranks}"), ranks, true), 1)),
            ("processes", run(&of(&format!("processes {ranks}"), ranks, false), 2)),
            ("NCCL", by_nccl(|| run(&of(&format!("nccl {ranks}"), ranks, false), 2))),
        ];
        for (name, found) in others {
            let (off, what) = distance(&expected, &found);
            assert_eq!(off, 0.0, "{ranks} ranks, {name}: {what}");
        }
    }
}

/// Frozen statistics stay as they are, while the weights learn.
#[test]
fn frozen_statistics_stay() {
    let folder = tempfile::tempdir().unwrap();
    let before = numbers(&mut session(&settings(&folder.path().join("first"), 1)));
    for ranks in [1, 2] {
        let settings = TrainSettings {
            batch_norm: BatchNormStatistics::Frozen,
            average_decay: 0.0,
            ..settings(&folder.path().join(format!("frozen {ranks}")), ranks)
        };
        let after = numbers(&mut train(&settings, 0..5));
        for (name, values) in &before {
            let Some((_, after)) = after.iter().find(|(other, _)| other == name) else {
                continue;
            };
            if name.starts_with("model.") && name.contains("batch_norm.running") {
                assert_eq!(values, after, "{name}");
            } else if name.starts_with("model.") && name.ends_with("batch_norm.weight") {
                assert_ne!(values, after, "{name}");
            }
        }
    }
}
