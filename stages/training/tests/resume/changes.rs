//! Settings, data or micro-batches that are others than those of the checkpoint.

use flow_sampling::SamplingRecord;
use flow_sampling::load::loaded_schema;
use flow_sampling::plan::{Balance, Packing};
use flow_storage::Storage;
use flow_training::TrainingError;
use flow_training::checkpoint;
use flow_training::long_texts::OverLimit;
use flow_training::resolved_settings::ResolvedSettings;
use flow_training::session::Session;
use flow_training::settings::{ModelSettings, OnChange, TrainSettings};
use flow_training::start::{Start, check_changes, find_start};

use super::{micro_batches, settings, train};

#[test]
fn changed_settings_are_refused_continued_or_restarted() {
    let folder = tempfile::tempdir().expect("folder");
    let before = settings(folder.path(), 8);
    train(&before, 0..4);
    let refusal = |settings: &TrainSettings, data: &str| match find_start(
        &Storage::default(),
        &settings.clone().into(),
        Some(data),
    ) {
        Err(TrainingError::Refused { message, .. }) => message,
        other => panic!("not refused: {other:?}"),
    };
    // What never matters, and more steps, is no change.
    let live = TrainSettings {
        max_steps: 9,
        log_every: 1,
        keep_checkpoints: 2,
        eval_every: 5,
        checkpoint_every: 7,
        ..before.clone()
    };
    assert_eq!(
        find_start(&Storage::default(), &live.clone().into(), Some("data"))
            .expect("no change")
            .step(),
        4
    );
    let changed = TrainSettings {
        phase2_lr: 5e-3,
        ..before.clone()
    };
    assert!(refusal(&changed, "data").contains("phase2_lr: 0.002 in the checkpoint, 0.005 now"));
    assert!(refusal(&before, "other data").contains("train rows"));
    assert!(
        refusal(
            &TrainSettings {
                max_steps: 7,
                ..before.clone()
            },
            "data"
        )
        .contains("max_steps")
    );
    let wider = TrainSettings {
        model: ModelSettings {
            d_model: 32,
            ..before.model.clone()
        },
        on_change: OnChange::Continue,
        ..before.clone()
    };
    assert!(
        refusal(&wider, "data").contains("model.d_model: 16 in the checkpoint, 32 now"),
        "another model cannot be continued"
    );
    let onwards = TrainSettings {
        on_change: OnChange::Continue,
        ..changed.clone()
    };
    match find_start(&Storage::default(), &onwards.clone().into(), Some("other data")).expect("continued") {
        Start::Resume {
            checkpoint, changes, ..
        } => assert_eq!((checkpoint.step, changes.len()), (4, 2)),
        other => panic!("not continued: {other:?}"),
    }
    let again = TrainSettings {
        on_change: OnChange::Restart,
        ..wider
    };
    let path = train(&again, 0..2);
    assert!(
        path.starts_with(folder.path().join("restart-001")),
        "{}",
        path.display()
    );
    assert_eq!(
        checkpoint::list(folder.path()).expect("checkpoints").len(),
        1,
        "restart deletes nothing"
    );
    // With the same settings the restarted training simply goes on.
    train(&again, 2..3);
}

/// Said before the inputs are made, and of nothing that only they tell.
#[test]
fn changed_settings_are_refused_without_the_inputs() {
    let folder = tempfile::tempdir().expect("folder");
    let before = settings(folder.path(), 8);
    check_changes(&Storage::default(), &before).expect("no checkpoint yet");
    train(&before, 0..4);
    check_changes(&Storage::default(), &before).expect("no change");
    check_changes(
        &Storage::default(),
        &TrainSettings {
            max_steps: 9,
            ..before.clone()
        },
    )
    .expect("more steps");
    let changed = TrainSettings {
        phase2_lr: 5e-3,
        ..before.clone()
    };
    let said = check_changes(&Storage::default(), &changed)
        .expect_err("refused")
        .to_string();
    assert!(said.contains("phase2_lr: 0.002 in the checkpoint, 0.005 now"), "{said}");
    let cut = TrainSettings {
        long_texts: OverLimit::Truncate,
        ..before.clone()
    };
    let said = check_changes(&Storage::default(), &cut)
        .expect_err("refused")
        .to_string();
    assert!(
        said.contains("long_texts: \"reject\" in the checkpoint, null now"),
        "{said}"
    );
    let wider = TrainSettings {
        model: ModelSettings {
            d_model: 32,
            ..before.model.clone()
        },
        ..before.clone()
    };
    for (on_change, rate, model) in [
        (OnChange::Refuse, false, false),
        (OnChange::Continue, true, false),
        (OnChange::Restart, true, true),
    ] {
        let with = |settings: &TrainSettings| TrainSettings {
            on_change,
            ..settings.clone()
        };
        assert_eq!(
            check_changes(&Storage::default(), &with(&changed)).is_ok(),
            rate,
            "{on_change:?}"
        );
        assert_eq!(
            check_changes(&Storage::default(), &with(&wider)).is_ok(),
            model,
            "{on_change:?}"
        );
    }
}

/// Whatever decides which rows make a micro-batch is noticed, as it came with them.
#[test]
fn changes_of_how_micro_batches_are_made_are_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let plain = settings(folder.path(), 8);
    let sampling = SamplingRecord {
        packing: Packing {
            grad_accum: plain.grad_accum,
            seed: plain.seed as i64,
            ..Packing::default()
        },
        steps: 8,
        speeds: vec![1.0],
        ..SamplingRecord::default()
    };
    let schema = sampling.written_to(&loaded_schema()).expect("a schema");
    let before = ResolvedSettings::new(plain, &schema).expect("settings");
    assert_eq!(before.sampling.as_ref(), Some(&sampling));
    let mut session =
        Session::begin(&Storage::default(), &before, Some("data"), None, Box::new(|_| {}), None).expect("a session");
    session.step(&micro_batches(0), 2).expect("a step");
    session.checkpoint().expect("a checkpoint");
    drop(session);
    assert_eq!(
        find_start(&Storage::default(), &before, Some("data"))
            .expect("no change")
            .step(),
        1
    );
    type Change = dyn Fn(&mut SamplingRecord);
    let refusal = |change: &Change| {
        let mut now = before.clone();
        change(now.sampling.as_mut().expect("a record"));
        match find_start(&Storage::default(), &now, Some("data")) {
            Err(TrainingError::Refused { message, .. }) => message,
            other => panic!("not refused: {other:?}"),
        }
    };
    let recorded: [(&Change, &str); 10] = [
        (
            &|s| s.packing.boundaries = vec![4.0],
            "boundaries: null in the checkpoint, [4.0] now",
        ),
        (&|s| s.packing.seed += 1, "sampling_seed: null in the checkpoint"),
        (
            &|s| s.packing.token_boundaries = vec![40],
            "token_boundaries: [] in the checkpoint, [40] now",
        ),
        (
            &|s| s.packing.max_batch_seconds = 7.0,
            "max_batch_seconds: 90.0 in the checkpoint, 7.0 now",
        ),
        (
            &|s| s.packing.bucket_batch_size = vec![9; 6],
            "bucket_batch_size: null in the checkpoint",
        ),
        (&|s| s.packing.balance = Balance::Quota, "balance: "),
        (&|s| s.packing.temperature = 1.0, "temperature: "),
        (&|s| s.speeds = vec![0.9, 1.0], "speeds: "),
        (&|s| s.max_samples = Some(7), "max_samples: "),
        (&|s| s.curriculum_steps = vec![3], ""),
    ];
    for (change, named) in recorded {
        if named.is_empty() {
            // Without a curriculum they decide nothing.
            let mut now = before.clone();
            change(now.sampling.as_mut().expect("a record"));
            assert_eq!(
                find_start(&Storage::default(), &now, Some("data"))
                    .expect("no change")
                    .step(),
                1
            );
        } else {
            let said = refusal(change);
            assert!(said.contains(named), "{said}");
        }
    }
    // Micro-batches of other ranks, accumulations or of too few steps cannot be trained on.
    let unfit: [(&Change, &str); 3] = [
        (&|s| s.packing.world_size = 2, "for 2 ranks, not for 1"),
        (&|s| s.packing.grad_accum += 1, "micro-batches a step"),
        (&|s| s.steps = 7, "come for 7 steps, not for 8"),
    ];
    for (change, named) in unfit {
        let mut now = before.clone();
        change(now.sampling.as_mut().expect("a record"));
        let said = now.validate().expect_err("a mistake").to_string();
        assert!(said.contains(named), "{said}");
    }
}
