//! An evaluation is shared over the ranks, and its numbers are those of one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use flow_evaluation::transcribe::{Recognize, Recognized, recognize};
use flow_evaluation::validation::ValidationMetrics;
use flow_model::model::{MicroBatch, TdtModel};
use flow_storage::Storage;
use flow_training::TrainingError;
use flow_training::session::{Evaluate, Session};
use flow_training::settings::{Precision, TrainSettings};

use super::{PLANNED, micro_batches, numbers, process_group, processes, settings, train};

/// Five micro-batches of different lengths: not a multiple of any number of ranks but one.
fn sample() -> Vec<MicroBatch> {
    (0..5)
        .map(|n| MicroBatch {
            signals: vec![
                (0..8_000 + 1_700 * n)
                    .map(|i| (i as f32 * 0.02 * (n + 1) as f32).sin() * 0.2)
                    .collect(),
                vec![0.1; 5_000],
            ],
            tokens: vec![vec![8, 20 + n as u32], Vec::new()],
            prompts: Vec::new(),
        })
        .collect()
}

/// Compares what all ranks give with what the model gives alone, which it puts into `found`.
fn evaluation(found: &Arc<Mutex<Vec<Vec<Recognized>>>>) -> Evaluate {
    let found = Arc::clone(found);
    Box::new(move |model: &TdtModel, all: &mut Recognize<'_, TrainingError>| {
        let alone: Result<Vec<_>, _> = sample().iter().map(|batch| recognize(model, batch)).collect();
        let shared = all(&mut sample().into_iter())?;
        assert_eq!(shared, alone?);
        assert!(shared.iter().flat_map(|one| &one.losses).all(|loss| loss.is_finite()));
        found.lock().expect("the list").push(shared);
        Ok(ValidationMetrics::default())
    })
}

/// Of the model's own weights and of averaged ones, in 32 bits and in bf16, with updates offloaded; on ranks of one process and
/// of several. Training goes on as if nothing had been evaluated.
#[test]
fn an_evaluation_on_several_ranks_gives_the_numbers_of_one() {
    let folder = tempfile::tempdir().unwrap();
    for (number, (ranks, count, average_decay, precision, offload)) in [
        (1, 1, 0.9, Precision::F32, false),
        (2, 1, 0.9, Precision::F32, false),
        (4, 1, 0.0, Precision::F32, true),
        (4, 2, 0.9, Precision::F32, false),
        (2, 2, 0.0, Precision::F32, false),
        (4, 4, 0.9, Precision::Bf16, false),
        (4, 2, 0.0, Precision::Bf16, true),
    ]
    .into_iter()
    .enumerate()
    {
        let of = |name: &str, eval_every| TrainSettings {
            eval_every,
            average_decay,
            precision,
            offload,
            ..settings(&folder.path().join(format!("{number} {name}")), ranks)
        };
        let found = Arc::default();
        let spread = (count > 1).then(|| processes(count));
        let group = spread.as_ref().map(|(first, _)| process_group(first));
        let evaluated = of("evaluated", 2).into();
        let evaluate = Some(evaluation(&found));
        let mut session = Session::begin(&Storage::default(), &evaluated, None, evaluate, Box::new(|_| {}), group)
            .expect("training begins");
        for step in 0..5 {
            session.step(&micro_batches(step), PLANNED).expect("a step");
        }
        let found = found.lock().expect("the list");
        assert!(found.len() == 2 && found[0] != found[1]);
        let plain = numbers(&mut train(&of("plain", 0), 0..5));
        assert!(numbers(&mut session) == plain, "{ranks} ranks in {count} processes");
    }
}

/// What a rank cannot transcribe ends the evaluation with the rank's name: so it is not the first one that does all.
#[test]
fn a_rank_that_cannot_evaluate_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for (bad, count) in [(1, 1), (1, 2), (3, 2)] {
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let evaluate: Evaluate = Box::new(move |_: &TdtModel, all: &mut Recognize<'_, TrainingError>| {
            let mut batches = sample();
            // Fewer targets than signals.
            batches[bad].tokens.pop();
            counted.fetch_add(1, Ordering::Relaxed);
            all(&mut batches.into_iter())?;
            Ok(ValidationMetrics::default())
        });
        let settings = TrainSettings {
            eval_every: 1,
            ..settings(&folder.path().join(format!("{bad} {count}")), 4)
        };
        let spread = (count > 1).then(|| processes(count));
        let group = spread.as_ref().map(|(first, _)| process_group(first));
        let mut session = Session::begin(
            &Storage::default(),
            &settings.into(),
            None,
            Some(evaluate),
            Box::new(|_| {}),
            group,
        )
        .expect("training begins");
        match session.step(&micro_batches(0), PLANNED) {
            Err(TrainingError::Rank { rank, message }) => {
                assert!(rank == bad && message.contains("token lists"), "{rank}: {message}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }
}

/// A process that is lost while others wait for its part of an evaluation, or between two parts, ends the evaluation and the
/// training with its name, long before the patience with which ranks wait; and so do the moments for a checkpoint that it does
/// not send any more.
#[test]
fn a_process_that_is_lost_in_an_evaluation_is_named() {
    let folder = tempfile::tempdir().unwrap();
    // By the number of the micro-batch of process 0 that the loss comes before: the first is rank 0's, and the second to the
    // fourth are with other ranks, two of them in the process that is lost, when the fifth is asked for.
    for (number, average_decay) in [(0, 0.0), (1, 0.9), (3, 0.9), (4, 0.0)] {
        let (first, others) = processes(2);
        let dying = Arc::clone(&others[0].0);
        let evaluate: Evaluate = Box::new(move |_: &TdtModel, all: &mut Recognize<'_, TrainingError>| {
            all(&mut sample().into_iter())?;
            let cut = |(at, batch)| {
                if at == number {
                    dying.cut();
                }
                batch
            };
            all(&mut [sample(), sample()].concat().into_iter().enumerate().map(cut))?;
            Ok(ValidationMetrics::default())
        });
        let settings = TrainSettings {
            eval_every: 1,
            average_decay,
            rank_timeout: 1e6,
            ..settings(&folder.path().join(number.to_string()), 4)
        };
        let mut session = Session::begin(
            &Storage::default(),
            &settings.into(),
            None,
            Some(evaluate),
            Box::new(|_| {}),
            Some(process_group(&first)),
        )
        .expect("training begins");
        for outcome in [
            session.step(&micro_batches(0), PLANNED).map(drop),
            session.checkpoint().map(drop),
            session.step(&micro_batches(0), PLANNED).map(drop),
        ] {
            match outcome {
                Err(TrainingError::Rank { rank, message }) => {
                    assert!(rank >= 2 && message.starts_with("process 1 ("), "{rank}: {message}");
                    assert!(message.ends_with("ended without a message"), "{message}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
