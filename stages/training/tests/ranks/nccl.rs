//! Whole trainings whose ranks exchange by NCCL's functions, those of the stand-in.

use flow_training::settings::{ReduceDtype, ReduceEvery};

use super::*;

/// Sums that NCCL takes in the order of the ranks end with the bits of ranks that exchange in host memory: several ranks in
/// one process, one in each of two, two in each; in both phases, with gradients that are accumulated, with a rank without a
/// micro-batch, in bf16 and with an average of the weights, and where training goes on from a checkpoint.
#[test]
fn ranks_that_exchange_by_nccl_give_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    for (name, precision, average_decay, recompute) in [
        ("plain", Precision::F32, 0.0, false),
        ("average", Precision::F32, 0.9, true),
        ("bf16", Precision::Bf16, 0.0, false),
    ] {
        for (ranks, count) in [(2, 1), (4, 1), (2, 2), (4, 2)] {
            let of = |part: &str| TrainSettings {
                precision,
                average_decay,
                recompute,
                ..settings(&folder.path().join(format!("{name} {ranks} {count} {part}")), ranks)
            };
            let expected = numbers(&mut train(&of("host"), 0..5));
            let settings = of("nccl");
            let mut found = Vec::new();
            for steps in [0..3, 3..5] {
                found = by_nccl(|| match count {
                    1 => numbers(&mut train(&settings, steps)),
                    _ => {
                        let (first, others) = processes(count);
                        let found = numbers(&mut train_distributed(&settings, &first, steps));
                        assert!(others.iter().all(|(_, joined)| joined.abort_reason().is_none()));
                        found
                    }
                });
            }
            let (off, what) = distance(&expected, &found);
            assert_eq!(off, 0.0, "{name}, {ranks} ranks in {count} processes: {what}");
        }
    }
}

/// A trainer in 64 bits whose ranks reduce so.
fn reducing(model: &Path, ranks: u32, reduce_every: ReduceEvery, reduce_dtype: ReduceDtype) -> Trainer {
    let settings = TrainSettings {
        reduce_every,
        reduce_dtype,
        ..settings(Path::new("unused"), ranks)
    };
    let model = TdtModel::load(model, DType::F64, &Device::Cpu).expect("the model");
    let average = MovingAverage::new(0.9, &model.parameters).expect("an average");
    let config = settings.trainer_config(16);
    Trainer::new(model, AdamW::new(settings.adamw()), config, Some(average)).expect("a trainer")
}

/// Sums that are taken once in a step are those of all its micro-batches, in another order: 1e-16 apart in 64 bits, which
/// AdamW blows up as in `ranks_agree_with_one_that_does_everything`.
#[test]
fn gradients_that_are_reduced_once_in_a_step_are_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let model = session(&settings(folder.path(), 1)).checkpoint().expect("a checkpoint");
    for ranks in [2, 3] {
        let run = |every| state(reducing(&model, ranks, every, ReduceDtype::F32));
        let expected = run(ReduceEvery::MicroBatch);
        let once = run(ReduceEvery::Step);
        let (off, name) = distance(&expected, &once);
        assert!(off < 1e-9, "{ranks} ranks: {off:e} in {name}");
        let exchanged = by_nccl(|| run(ReduceEvery::Step));
        assert_eq!(distance(&once, &exchanged).0, 0.0, "{ranks} ranks by NCCL");
    }
}

/// Rounding to bf16 moves a number by at most 2^-9 of it, so the norm of the gradient by at most that part of the norms of
/// both ranks' terms, taken to be twice that of their sum; by NCCL the sum is rounded once more.
#[test]
fn gradients_travel_in_bf16_where_the_setting_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let model = session(&settings(folder.path(), 1)).checkpoint().expect("a checkpoint");
    let norm = |dtype| {
        let mut trainer = reducing(&model, 2, ReduceEvery::Step, dtype);
        // The encoder learns.
        let report = trainer.step(2, &micro_batches(2), PLANNED).expect("a step");
        assert_eq!(report.skipped, None);
        report.gradient_norm
    };
    let exact = norm(ReduceDtype::F32);
    for (found, roundings) in [
        (norm(ReduceDtype::Bf16), 1.0),
        (by_nccl(|| norm(ReduceDtype::Bf16)), 2.0),
    ] {
        let off = (found - exact).abs() / exact;
        assert!(off > 1e-9 && off < roundings / 256.0, "{found} for {exact}");
    }
}

/// A rank that fails in its step is named at once, and not after the time limit.
#[test]
fn a_rank_that_fails_beside_nccl_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let settings = TrainSettings {
        rank_timeout: 1000.0,
        average_decay: 0.0,
        ..settings(folder.path(), 4)
    };
    by_nccl(|| {
        let (first, _others) = processes(2);
        let mut session = train_distributed(&settings, &first, 0..3);
        let mut bad = micro_batches(4);
        // More signals than texts: an error, not a bad number.
        bad[2].batch.tokens.pop();
        match session.step(&bad, PLANNED) {
            Err(TrainingError::Rank { rank: 2, message }) => assert!(message.contains("token lists"), "{message}"),
            other => panic!("{other:?}"),
        }
    });
}
