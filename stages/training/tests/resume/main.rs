//! Checkpoints and resuming, on a model small enough to train in a blink.

mod changes;
mod early_stopping;
mod lora;

use std::path::{Path, PathBuf};

use candle_core::Tensor;
use flow_evaluation::transcribe::Recognize;
use flow_evaluation::validation::ValidationMetrics;
use flow_evaluation::wer::Scores;
use flow_model::model::{MicroBatch, TdtModel};
use flow_nn::tensor_files::read_safetensors;
use flow_random::SplitMix64;
use flow_storage::Storage;
use flow_training::TrainingError;
use flow_training::checkpoint;
use flow_training::session::{LeftOut, Session};
use flow_training::settings::{ModelSettings, TrainSettings};
use flow_training::start::{Start, find_start};
use flow_training::trainer::LoadedBatch;

fn settings(folder: &Path, max_steps: u64) -> TrainSettings {
    TrainSettings {
        checkpoints: folder.to_string_lossy().into_owned(),
        tokenizer: concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/tokenizers/mini.model").into(),
        model: ModelSettings {
            mels: 16,
            d_model: 16,
            layers: 1,
            heads: 2,
            conv_channels: 4,
            pred_hidden: 8,
            joint_hidden: 8,
            ..ModelSettings::default()
        },
        max_steps,
        phase1_lr: 1e-3,
        phase2_lr: 2e-3,
        unfreeze_step: 3,
        warmup_steps: 2,
        phase2_warmup: 2,
        grad_accum: 2,
        checkpoint_every: 100,
        keep_checkpoints: 10,
        eval_every: 0,
        ..TrainSettings::default()
    }
}

/// A step of two micro-batches that depends on its number alone.
fn micro_batches(step: u64) -> Vec<LoadedBatch> {
    let tone = |n: u64, samples: usize| {
        (0..samples)
            .map(|i| (i as f32 * 0.01 * (n as f32 + 1.0)).sin() * 0.3)
            .collect::<Vec<f32>>()
    };
    (0..2u32)
        .map(|micro| {
            let n = step * 2 + u64::from(micro);
            LoadedBatch {
                epoch: step / 4,
                rank: 0,
                micro,
                place: micro,
                segments: vec![format!("a{n}"), format!("b{n}")],
                batch: MicroBatch {
                    signals: vec![tone(n, 9_000 + 800 * (n as usize % 3)), tone(n + 7, 6_000)],
                    tokens: vec![vec![8, 30 + n as u32, 31], vec![7, 40]],
                    prompts: Vec::new(),
                },
                ..LoadedBatch::default()
            }
        })
        .collect()
}

fn begin(settings: &TrainSettings) -> Session {
    Session::begin(
        &Storage::default(),
        &settings.clone().into(),
        Some("data"),
        None,
        Box::new(|_| {}),
        None,
    )
    .expect("a session")
}

fn train(settings: &TrainSettings, steps: std::ops::Range<u64>) -> PathBuf {
    let mut session = begin(settings);
    assert_eq!(session.step_number(), steps.start);
    for step in steps {
        assert_eq!(session.step(&micro_batches(step), 2).expect("a step").skipped, None);
    }
    session.checkpoint().expect("a checkpoint")
}

fn bytes(checkpoint: &Path, name: &str) -> Vec<u8> {
    std::fs::read(checkpoint.join(name)).expect("a file of the checkpoint")
}

#[test]
fn resumed_training_gives_the_same_bytes_as_training_never_stopped() {
    resumed_equals_whole(0.0);
}

#[test]
fn resumed_training_with_averaged_weights_gives_the_same_bytes() {
    let checkpoint = resumed_equals_whole(0.9);
    let (average, live) = (
        read_safetensors(&checkpoint.path().join("step-000000008/model.safetensors")).expect("the average"),
        read_safetensors(&checkpoint.path().join("step-000000008/live.safetensors")).expect("the live weights"),
    );
    let weights = |tensors: &[(String, Tensor)], name: &str| -> Vec<f32> {
        let found = tensors.iter().find(|(n, _)| n == name).expect("the tensor");
        found.1.flatten_all().and_then(|t| t.to_vec1()).expect("values")
    };
    let name = "encoder.layers.0.norm_out.bias";
    let (average, live) = (weights(&average, name), weights(&live, name));
    // They begin at 0, and the average goes after them.
    assert!(
        average
            .iter()
            .zip(&live)
            .all(|(a, l)| *a != 0.0 && a.abs() < 1.5 * l.abs().max(1e-3))
    );
    assert!(average != live);
}

/// Trains eight steps in one go and in three, compares the checkpoints, and gives the folder of the latter.
fn resumed_equals_whole(average_decay: f64) -> tempfile::TempDir {
    let settings = |folder: &Path, steps: u64| TrainSettings {
        average_decay,
        ..settings(folder, steps)
    };
    let (whole, halves) = (
        tempfile::tempdir().expect("folder"),
        tempfile::tempdir().expect("folder"),
    );
    let through = train(&settings(whole.path(), 8), 0..8);
    // Stopped in the middle of phase 2, and once in phase 1.
    train(&settings(halves.path(), 8), 0..2);
    train(&settings(halves.path(), 8), 2..5);
    let resumed = train(&settings(halves.path(), 8), 5..8);
    assert_eq!(through.file_name(), resumed.file_name());
    let live = (average_decay > 0.0).then_some("live.safetensors");
    let files = [
        "model.safetensors",
        "model_config.yaml",
        "tokenizer.model",
        "optimizer.safetensors",
        "training.json",
    ];
    for name in files.into_iter().chain(live) {
        assert!(bytes(&through, name) == bytes(&resumed, name), "{name} differs");
    }
    let first = &checkpoint::list(halves.path()).expect("checkpoints")[0];
    assert!(
        bytes(&through, "model.safetensors") != bytes(&first.path, "model.safetensors"),
        "training changes nothing"
    );
    halves
}

#[test]
fn the_encoder_stands_still_while_it_is_frozen() {
    let folder = tempfile::tempdir().expect("folder");
    let mut session = begin(&settings(folder.path(), 8));
    let snapshot = |session: &Session, encoder: bool| -> Vec<(String, Vec<u8>)> {
        let parameters = session
            .model()
            .parameters
            .iter()
            .filter(|(_, p)| p.name.starts_with("encoder.") == encoder);
        parameters
            .map(|(_, p)| {
                let values = p
                    .tensor
                    .to_dtype(candle_core::DType::F64)
                    .and_then(|t| t.flatten_all())
                    .and_then(|t| t.to_vec1::<f64>());
                (
                    p.name.clone(),
                    values.expect("values").iter().flat_map(|v| v.to_le_bytes()).collect(),
                )
            })
            .collect()
    };
    let (encoder, rest) = (snapshot(&session, true), snapshot(&session, false));
    for step in 0..3 {
        assert!(session.step(&micro_batches(step), 2).expect("a step").encoder_frozen);
    }
    assert!(snapshot(&session, true) == encoder && snapshot(&session, false) != rest);
    assert!(!session.step(&micro_batches(3), 2).expect("a step").encoder_frozen);
    assert!(snapshot(&session, true) != encoder);
}

/// `FLOW_TEST_FLIPS` is another number of flips.
#[test]
fn every_flipped_bit_of_a_checkpoint_is_found() {
    let flips = std::env::var("FLOW_TEST_FLIPS").map_or(100, |flips| flips.parse().expect("a number"));
    let folder = tempfile::tempdir().expect("folder");
    let settings = TrainSettings {
        average_decay: 0.9,
        ..settings(folder.path(), 8)
    };
    let first = train(&settings, 0..2);
    let second = train(&settings, 2..4);
    let mut names: Vec<String> = std::fs::read_dir(&second)
        .expect("the checkpoint")
        .map(|entry| entry.expect("a file").file_name().into_string().expect("a name"))
        .collect();
    names.sort();
    assert_eq!(names.len(), 6, "{names:?}");
    let mut random = SplitMix64::new(3);
    for flip in 0..flips {
        let name = &names[flip % names.len()];
        let good = bytes(&second, name);
        let mut bad = good.clone();
        let bit = random.below(bad.len() * 8);
        bad[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(second.join(name), &bad).expect("damage");
        match find_start(&Storage::default(), &settings.clone().into(), Some("data")).expect("a start") {
            Start::Resume {
                checkpoint, damaged, ..
            } => {
                assert_eq!(checkpoint.path, first, "bit {bit} of {name} was not noticed");
                assert!(damaged[0].message.contains(name.as_str()), "{}", damaged[0].message);
            }
            other => panic!("bit {bit} of {name}: {other:?}"),
        }
        std::fs::write(second.join(name), &good).expect("repair");
    }
}

#[test]
fn a_damaged_checkpoint_is_passed_over_for_the_one_before() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = settings(folder.path(), 8);
    let first = train(&settings, 0..2);
    let second = train(&settings, 2..4);
    let passed_over =
        |what: &str| match find_start(&Storage::default(), &settings.clone().into(), Some("data")).expect("a start") {
            Start::Resume {
                checkpoint, damaged, ..
            } => {
                assert_eq!(checkpoint.path, first, "{what}: the damage was not noticed");
                assert_eq!((damaged.len(), &damaged[0].folder), (1, &second));
                assert!(damaged[0].message.contains(what), "{}", damaged[0].message);
            }
            other => panic!("{what}: {other:?}"),
        };
    for name in [
        "model.safetensors",
        "optimizer.safetensors",
        "tokenizer.model",
        "model_config.yaml",
    ] {
        let good = bytes(&second, name);
        let mut bad = good.clone();
        let middle = bad.len() / 2;
        bad[middle] ^= 1;
        std::fs::write(second.join(name), &bad).expect("damage");
        passed_over(name);
        std::fs::write(second.join(name), &good[..good.len() - 1]).expect("damage");
        passed_over(name);
        std::fs::remove_file(second.join(name)).expect("damage");
        passed_over(name);
        std::fs::write(second.join(name), &good).expect("repair");
    }
    let good = bytes(&second, "training.json");
    std::fs::write(second.join("training.json"), &good[..good.len() / 2]).expect("damage");
    passed_over("training.json");
    // Training goes on from the one before, and nothing of the damaged one is lost.
    let session = begin(&settings);
    assert_eq!(session.step_number(), 2);
    let aside = folder.path().join("damaged-step-000000004");
    assert!(
        session.set_aside()[0].contains("damaged-step-000000004"),
        "{:?}",
        session.set_aside()
    );
    assert!(aside.join("model.safetensors").exists() && !second.exists());
    drop(session);
    assert_eq!(bytes(&train(&settings, 2..4), "training.json"), good);
    // Where none is sound, training does not quietly start over.
    for checkpoint in [&first, &second] {
        std::fs::remove_file(checkpoint.join("model.safetensors")).expect("damage");
    }
    match Session::begin(
        &Storage::default(),
        &settings.clone().into(),
        Some("data"),
        None,
        Box::new(|_| {}),
        None,
    ) {
        Err(TrainingError::Damaged { folder, .. }) => assert_eq!(folder, second),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("the damage was not noticed"),
    }
}

/// Who may read the files of a checkpoint is for the umask to say, the same for all of them; and what may not be read is
/// neither damaged nor passed over.
#[test]
fn all_files_of_a_checkpoint_have_the_mode_of_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("folder");
    let settings = TrainSettings {
        average_decay: 0.5,
        ..settings(folder.path(), 8)
    };
    let checkpoint = train(&settings, 0..1);
    let mode = |path: &Path| std::fs::metadata(path).expect("a file").permissions().mode() & 0o777;
    let probe = folder.path().join("probe");
    std::fs::write(&probe, "").expect("a file");
    let mut files = 0;
    for entry in std::fs::read_dir(&checkpoint).expect("files") {
        let path = entry.expect("an entry").path();
        assert_eq!(mode(&path), mode(&probe), "{}", path.display());
        files += 1;
    }
    assert!(files >= 6, "{files} files");
    let path = checkpoint.join("optimizer.safetensors");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).expect("a mode");
    if std::fs::File::open(&path).is_ok() {
        // Permissions do not bind this user.
        return;
    }
    match find_start(&Storage::default(), &settings.clone().into(), Some("data")) {
        Err(TrainingError::File { path: named, source }) => {
            assert_eq!(named, path);
            assert_eq!(source.kind(), std::io::ErrorKind::PermissionDenied);
        }
        other => panic!("{other:?}"),
    }
}

/// A checkpoint that is written while training goes on holds what stood when it was begun; the best one stays.
#[test]
fn checkpoints_in_the_background_are_those_of_their_step() {
    let [fore, back] = [(), ()].map(|()| tempfile::tempdir().expect("folder"));
    for (folder, checkpoint_in_background) in [(&fore, false), (&back, true)] {
        let settings = TrainSettings {
            checkpoint_every: 2,
            checkpoint_in_background,
            keep_checkpoints: 2,
            eval_every: 2,
            average_decay: 0.9,
            ..settings(folder.path(), 10)
        };
        // The second evaluation is the best one.
        let mut rates = [5u64, 1, 3, 4, 2].into_iter();
        let evaluate = Box::new(move |_: &TdtModel, _: &mut Recognize<'_, TrainingError>| {
            let mut scores = Scores::default();
            scores.overall.words.units = 10;
            scores.overall.words.substitutions = rates.next().expect("five evaluations");
            Ok(ValidationMetrics {
                scores,
                ..ValidationMetrics::default()
            })
        });
        let mut session = Session::begin(
            &Storage::default(),
            &settings.clone().into(),
            Some("data"),
            Some(evaluate),
            Box::new(|_| {}),
            None,
        )
        .expect("a session");
        for step in 0..10 {
            session.step(&micro_batches(step), 2).expect("a step");
        }
        drop(session);
        let steps = checkpoint::list(folder.path()).expect("checkpoints");
        assert_eq!(steps.iter().map(|c| c.step).collect::<Vec<_>>(), [4, 8, 10]);
    }
    for step in [4, 8, 10] {
        let name = format!("step-{step:09}");
        for file in ["model.safetensors", "live.safetensors", "optimizer.safetensors"] {
            let [fore, back] = [&fore, &back].map(|folder| bytes(&folder.path().join(&name), file));
            assert!(fore == back, "{file} of step {step}");
        }
    }
    let record = checkpoint::read_record(&back.path().join("step-000000004")).expect("a record");
    assert_eq!(record.validation_wer, Some(0.1));
}

/// A folder that cannot be written to ends training with its name, and the checkpoints before stay.
#[test]
fn a_checkpoint_that_cannot_be_written_is_told_and_the_old_ones_stay() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = TrainSettings {
        checkpoint_every: 2,
        ..settings(folder.path(), 10)
    };
    let old = train(&settings, 0..2);
    let mut session = begin(&settings);
    // In the way of what is to be written.
    std::os::unix::fs::symlink("none/at/all", folder.path().join("step-000000004")).expect("a link");
    let outcome = (2..6).try_for_each(|step| session.step(&micro_batches(step), 2).map(drop));
    let error = outcome.expect_err("it cannot be written").to_string();
    assert!(error.contains("step-000000004"), "{error}");
    let left: Vec<String> = std::fs::read_dir(folder.path())
        .expect("the folder")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with('.'))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(old.join("model.safetensors").exists());
}

#[test]
fn two_processes_cannot_train_into_one_folder() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = settings(folder.path(), 8);
    let first = begin(&settings);
    match Session::begin(
        &Storage::default(),
        &settings.clone().into(),
        None,
        None,
        Box::new(|_| {}),
        None,
    ) {
        Err(TrainingError::Locked { owner, .. }) => assert!(owner.contains(&std::process::id().to_string()), "{owner}"),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("the lock was not noticed"),
    }
    drop(first);
    begin(&settings);
}

#[test]
fn old_checkpoints_are_removed_and_half_written_ones_ignored() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = TrainSettings {
        checkpoint_every: 1,
        keep_checkpoints: 2,
        ..settings(folder.path(), 4)
    };
    train(&settings, 0..3);
    let steps: Vec<u64> = checkpoint::list(folder.path())
        .expect("checkpoints")
        .iter()
        .map(|c| c.step)
        .collect();
    assert_eq!(steps, [2, 3]);
    // What an interrupted process wrote down is removed; what merely looks like it stays.
    let ours = [".writing-step-000000009", ".removing-step-000000002-2"];
    let theirs = [
        ".writing-mine",
        ".removing-step-000000001",
        ".writing-step-000000004",
        "notes/.writing-x",
    ];
    for name in ours.iter().chain(&theirs) {
        let torn = folder.path().join(name);
        std::fs::create_dir_all(&torn).expect("folder");
        std::fs::write(torn.join("model.safetensors"), b"half").expect("file");
    }
    let noted = [
        ours[0],
        ours[1],
        "../x",
        "notes/.writing-x",
        "step-000000003",
        "/etc/.writing-x",
        "none/.writing-1",
    ];
    let lock = serde_json::json!({"host": "h", "pid": 1, "run": "training", "temporary": noted});
    std::fs::write(folder.path().join("lock"), lock.to_string()).expect("file");
    train(&settings, 3..4);
    for name in ours {
        assert!(!folder.path().join(name).exists(), "{name}");
    }
    for name in theirs {
        assert!(folder.path().join(name).join("model.safetensors").exists(), "{name}");
    }
    assert!(!folder.path().join("lock").exists());
    // The next run has nothing to train where the last step is written.
    std::fs::write(folder.path().join("lock"), lock.to_string()).expect("file");
    std::fs::create_dir(folder.path().join(ours[0])).expect("folder");
    checkpoint::remove_left(folder.path());
    assert!(!folder.path().join(ours[0]).exists() && !folder.path().join("lock").exists());
    // Whoever trains there now is not disturbed.
    let held = checkpoint::lock(folder.path()).expect("the lock");
    checkpoint::remove_left(folder.path());
    assert!(folder.path().join("lock").exists());
    drop(held);
}

#[test]
fn a_step_that_is_not_finite_changes_nothing_and_is_named() {
    let folder = tempfile::tempdir().expect("folder");
    let mut settings = TrainSettings {
        max_bad_steps: 1,
        unfreeze_step: 0,
        ..settings(folder.path(), 8)
    };
    // Without duration 0, more tokens than frames cannot be aligned: the loss is infinite.
    settings.model.durations = vec![1, 2, 3, 4];
    let mut session = begin(&settings);
    session.step(&micro_batches(0), 2).expect("a step");
    let snapshot = |session: &Session| -> Vec<u8> {
        let path = folder.path().join("snapshot");
        let _ = std::fs::remove_dir_all(&path);
        session.model().save(&path).expect("saved");
        std::fs::read(path.join("model.safetensors")).expect("weights")
    };
    let before = snapshot(&session);
    let mut bad = micro_batches(1);
    bad[1].batch.tokens[0] = vec![30; 60];
    let report = session.step(&bad, 2).expect("a skipped step");
    assert_eq!(report.skipped.as_deref(), Some(&bad[1].segments[..1]), "{report:?}");
    assert!(snapshot(&session) == before, "the skipped step changed the model");
    assert_eq!(session.step_number(), 2);
    match session.step(&bad, 2) {
        Err(TrainingError::NotFinite { message }) => assert!(message.contains(&bad[1].segments[0]), "{message}"),
        other => panic!("past the limit: {other:?}"),
    }
    let metrics = std::fs::read_to_string(folder.path().join("metrics.jsonl")).expect("metrics");
    assert!(
        metrics.lines().filter(|line| line.contains("\"skipped\"")).count() == 2,
        "{metrics}"
    );
}

/// The model that training began with is not handed on as if it had learned.
#[test]
fn a_training_whose_steps_were_all_skipped_fails() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = settings(folder.path(), 2);
    let mut session = begin(&settings);
    let skip = |session: &mut Session| {
        session.without(LeftOut {
            recordings: vec![format!("gone_{}", session.step_number() + 1)],
            too_long: Vec::new(),
        });
        session.step(&[], 1)
    };
    skip(&mut session).expect("a skipped step");
    match skip(&mut session) {
        Err(TrainingError::NothingLoaded { message }) => assert!(
            message.contains("all 2 steps were skipped") && message.contains("gone_2"),
            "{message}"
        ),
        other => panic!("handed on: {other:?}"),
    }
    drop(session);
    let metrics = std::fs::read_to_string(folder.path().join("metrics.jsonl")).expect("metrics");
    let steps: Vec<u64> = metrics
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"))
        .filter(|line| line["kind"] == "skipped")
        .map(|line| line["step"].as_u64().expect("a step"))
        .collect();
    assert_eq!(steps, [1, 2]);
    // One step that was done is enough.
    let mut session = begin(&settings);
    session.step(&micro_batches(0), 2).expect("a step");
    skip(&mut session).expect("a skipped step");
}

#[test]
fn a_step_of_which_nothing_was_loaded_is_skipped_and_named() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = TrainSettings {
        max_bad_steps: 1,
        log_every: 1,
        ..settings(folder.path(), 8)
    };
    let mut session = begin(&settings);
    let lost = |name: &str| LeftOut {
        recordings: vec![name.to_owned()],
        too_long: Vec::new(),
    };
    let weights = |session: &Session| -> Vec<u8> {
        let path = folder.path().join("snapshot");
        let _ = std::fs::remove_dir_all(&path);
        session.model().save(&path).expect("saved");
        std::fs::read(path.join("model.safetensors")).expect("weights")
    };
    session.step(&micro_batches(0), 2).expect("a step");
    let before = weights(&session);
    session.without(lost("gone_1"));
    let report = session.step(&[], 1).expect("a skipped step");
    assert_eq!(report.skipped, Some(vec!["gone_1".to_owned()]));
    assert!(weights(&session) == before, "the skipped step changed the model");
    // It is done with, and what was left out of it is not of the next one.
    let report = session.step(&micro_batches(2), 2).expect("the next step");
    assert_eq!((session.step_number(), report.skipped), (3, None));
    assert!(weights(&session) != before);
    session.without(lost("gone_2"));
    match session.step(&[], 1) {
        Err(TrainingError::NothingLoaded { message }) => {
            assert!(
                message.contains("gone_2") && message.contains("max_bad_steps"),
                "{message}"
            );
        }
        other => panic!("past the limit: {other:?}"),
    }
    let metrics = std::fs::read_to_string(folder.path().join("metrics.jsonl")).expect("metrics");
    let lines: Vec<serde_json::Value> = metrics
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let of = |kind: &str| -> Vec<(u64, serde_json::Value)> {
        let lines = lines.iter().filter(|line| line["kind"] == kind);
        lines
            .map(|line| (line["step"].as_u64().expect("a step"), line["segments"].clone()))
            .collect()
    };
    let both = [(2, serde_json::json!(["gone_1"])), (4, serde_json::json!(["gone_2"]))];
    assert_eq!((of("left_out"), of("skipped")), (both.to_vec(), both.to_vec()));
    let loss = |step: u64| {
        lines
            .iter()
            .find(|line| line["kind"] == "train" && line["step"] == step)
    };
    assert!(loss(2).expect("a line")["loss"].is_null(), "{metrics}");
    assert!(loss(3).expect("a line")["loss"].is_f64(), "{metrics}");
}

#[test]
fn a_model_that_is_given_is_evaluated_before_its_first_step() {
    let temp = tempfile::tempdir().expect("a folder");
    let first = train(&settings(&temp.path().join("first"), 3), 0..3);
    let evaluations = |init: &str, steps: u64, interrupted: bool| {
        let folder = temp.path().join("next");
        let _ = std::fs::remove_dir_all(&folder);
        let settings = TrainSettings {
            init: init.into(),
            eval_every: 2,
            ..settings(&folder, 4)
        };
        // Twice from the beginning: what the first one wrote was kept by no checkpoint, or by one before the first step.
        for run in 0..if interrupted { 3 } else { 2 } {
            let score = Box::new(|_: &_, _: &mut Recognize<'_, TrainingError>| Ok(ValidationMetrics::default()));
            let mut session = Session::begin(
                &Storage::default(),
                &settings.clone().into(),
                Some("data"),
                Some(score),
                Box::new(|_| {}),
                None,
            )
            .expect("a session");
            if interrupted && run == 0 {
                session.checkpoint().expect("a checkpoint");
                continue;
            }
            for step in 0..steps {
                session.step(&micro_batches(step), 2).expect("a step");
            }
        }
        let text = std::fs::read_to_string(folder.join("metrics.jsonl")).expect("metrics");
        let lines = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
        lines
            .filter(|line| line["kind"] == "evaluation")
            .map(|line| line["step"].as_u64().expect("a step"))
            .collect::<Vec<_>>()
    };
    for interrupted in [false, true] {
        assert_eq!(evaluations(&first.to_string_lossy(), 3, interrupted), [0, 2]);
        assert_eq!(evaluations("none", 3, interrupted), [2]);
    }
}
