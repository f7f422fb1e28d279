//! Trainings that end before their last step, and the best checkpoints. Error rates are played.

use std::path::Path;

use flow_evaluation::transcribe::Recognize;
use flow_evaluation::validation::ValidationMetrics;
use flow_evaluation::wer::Scores;
use flow_model::model::TdtModel;
use flow_nn::tensor_files::read_safetensors;
use flow_storage::Storage;
use flow_training::TrainingError;
use flow_training::checkpoint;
use flow_training::checkpoint::average_of::is_made;
use flow_training::model_from::{chosen, model_before};
use flow_training::resolved_settings::ResolvedSettings;
use flow_training::session::Session;
use flow_training::settings::{EarlyStopping, KeepBest, ModelFrom, Monitor, TrainSettings};
use flow_training::start::find_start;

use super::{bytes, micro_batches, settings};

/// Errors of a thousand words, by the number of steps that are done, and a loss that falls all the time.
fn errors(step: usize) -> u64 {
    [500, 400, 300, 310, 290, 350, 295, 320, 100, 90][step - 1]
}

/// Trains from step `from` on, until `to` or an early end.
fn train(settings: &TrainSettings, from: u64, to: u64) -> u64 {
    train_beside(settings, from, to, None)
}

/// The same, with the errors in a hundred words of a protected language in each of its evaluations.
fn train_beside(settings: &TrainSettings, from: u64, to: u64, protected: Option<&'static [u64]>) -> u64 {
    let mut step = from as usize;
    let evaluate = Box::new(move |_: &TdtModel, _: &mut Recognize<'_, TrainingError>| {
        step += 1;
        let mut scores = Scores::default();
        scores.overall.words.units = 1000;
        scores.overall.words.substitutions = errors(step);
        let loss = Some(10.0 - step as f64);
        Ok(ValidationMetrics {
            scores,
            loss,
            ..ValidationMetrics::default()
        })
    });
    let settings = ResolvedSettings::from(settings.clone());
    let mut session = Session::begin(
        &Storage::default(),
        &settings,
        Some("data"),
        Some(evaluate),
        Box::new(|_| {}),
        None,
    )
    .expect("a session");
    if let Some(protected) = protected {
        let mut protected = protected.iter();
        session.protect(Box::new(move |_, _| {
            let mut scores = Scores::default();
            let score = scores.languages.entry("en".into()).or_default();
            (score.words.units, score.words.substitutions) = (100, *protected.next().expect("an evaluation"));
            Ok(ValidationMetrics {
                scores,
                ..ValidationMetrics::default()
            })
        }));
    }
    for step in from..to {
        session.step(&micro_batches(step), 2).expect("a step");
        if session.ended_early() {
            break;
        }
    }
    session.checkpoint().expect("a checkpoint");
    session.step_number()
}

fn early(folder: &Path, patience: u64) -> TrainSettings {
    TrainSettings {
        eval_every: 1,
        early_stopping: Some(EarlyStopping {
            patience,
            min_delta: 0.02,
        }),
        ..settings(folder, 10)
    }
}

fn steps(folder: &Path) -> Vec<u64> {
    let all = checkpoint::list(folder).expect("checkpoints");
    all.iter().map(|checkpoint| checkpoint.step).collect()
}

/// 300 errors at step 3 are not beaten by 20 until step 9, which does not come.
#[test]
fn training_ends_at_the_same_step_whether_or_not_it_was_interrupted() {
    let [whole, parts] = [(), ()].map(|()| tempfile::tempdir().expect("folder"));
    assert_eq!(train(&early(whole.path(), 4), 0, 10), 7);
    assert_eq!(train(&early(parts.path(), 4), 0, 5), 5);
    assert_eq!(train(&early(parts.path(), 4), 5, 10), 7);
    for file in ["model.safetensors", "optimizer.safetensors", "training.json"] {
        let [a, b] = [&whole, &parts].map(|folder| bytes(&folder.path().join("step-000000007"), file));
        assert!(a == b, "{file}");
    }
    let over = |settings: TrainSettings| {
        let settings = ResolvedSettings::from(settings);
        find_start(&Storage::default(), &settings, Some("data"))
            .expect("a start")
            .is_over(&settings)
    };
    assert!(over(early(whole.path(), 4)));
    // More patience, and none of it at all: training goes on.
    assert!(!over(early(whole.path(), 5)) && !over(settings(whole.path(), 10)));
    assert_eq!(train(&early(whole.path(), 6), 7, 10), 10);

    // The loss falls until the end.
    let by_loss = tempfile::tempdir().expect("folder");
    let settings = TrainSettings {
        monitor: Monitor::ValLoss,
        ..early(by_loss.path(), 1)
    };
    assert_eq!(train(&settings, 0, 10), 10);
}

#[test]
fn the_best_checkpoints_are_kept_and_their_mean_is_handed_on() {
    let folder = tempfile::tempdir().expect("folder");
    let best = |keep: usize, monitor: Monitor| TrainSettings {
        checkpoint_every: 100,
        keep_checkpoints: 1,
        keep_best: KeepBest(keep),
        model_from: ModelFrom::AverageBest,
        monitor,
        eval_every: 1,
        ..settings(folder.path(), 8)
    };
    assert_eq!(train(&best(3, Monitor::ValWer), 0, 8), 8);
    // The last one, and those of 300, 290 and 295 errors.
    assert_eq!(steps(folder.path()), [3, 5, 7, 8]);
    let mean = chosen(folder.path(), &best(3, Monitor::ValWer))
        .expect("a mean")
        .expect("a mean");
    assert_eq!(mean.which, "mean of the checkpoints of steps 3, 5, 7");
    let values = |folder: &Path| -> Vec<f32> {
        let tensors = read_safetensors(&folder.join("model.safetensors")).expect("tensors");
        let (_, tensor) = tensors
            .into_iter()
            .find(|(name, _)| name == "joint.enc.weight")
            .expect("it");
        tensor.flatten_all().and_then(|flat| flat.to_vec1()).expect("values")
    };
    let parts = [3, 5, 7].map(|step| values(&folder.path().join(format!("step-{step:09}"))));
    for (i, mean) in values(&mean.path).into_iter().enumerate() {
        let sum: f64 = parts.iter().map(|part| f64::from(part[i])).sum();
        assert_eq!(mean, (sum / 3.0) as f32);
    }

    let by_loss = tempfile::tempdir().expect("folder");
    let settings = TrainSettings {
        checkpoints: by_loss.path().to_string_lossy().into_owned(),
        ..best(2, Monitor::ValLoss)
    };
    train(&settings, 0, 8);
    assert_eq!(steps(by_loss.path()), [7, 8]);
    let record = checkpoint::read_record(&by_loss.path().join("step-000000007")).expect("a record");
    assert_eq!((record.validation_loss, record.validation_cer), (Some(3.0), None));
}

/// Every second step is evaluated and kept; before training the protected language has 5 errors.
#[test]
fn training_ends_where_a_protected_language_gets_worse() {
    let [whole, parts] = [(), ()].map(|()| tempfile::tempdir().expect("folder"));
    let protected = |folder: &Path, model_from: ModelFrom| TrainSettings {
        eval_every: 2,
        checkpoint_every: 2,
        model_from,
        ..settings(folder, 10)
    };
    let settings = protected(whole.path(), ModelFrom::Last);
    assert_eq!(train_beside(&settings, 0, 10, Some(&[5, 6, 7, 8, 0])), 6);
    // The rate before training is that of the first run.
    let in_parts = protected(parts.path(), ModelFrom::Last);
    assert_eq!(train_beside(&in_parts, 0, 3, Some(&[5, 6])), 3);
    assert_eq!(train_beside(&in_parts, 3, 10, Some(&[7, 8])), 6);
    let [a, b] = [&whole, &parts].map(|folder| bytes(&folder.path().join("step-000000006"), "training.json"));
    assert!(a == b);

    let record = checkpoint::read_record(&whole.path().join("step-000000006")).expect("a record");
    let why = settings.early_end(&record).expect("a reason");
    assert!(
        why.contains("en from 5.0 % to 8.0 %") && why.contains("protect.max_rise"),
        "{why}"
    );
    // What is handed on is from before: of 400, 310 and 350 errors in step 2, 4 and 6, the last has none that counts.
    let step = |model_from| {
        let settings = protected(whole.path(), model_from);
        chosen(whole.path(), &settings)
            .expect("a checkpoint")
            .expect("a checkpoint")
            .step
    };
    assert_eq!((step(ModelFrom::Last), step(ModelFrom::Best)), (4, 4));
    assert_eq!(record.validation_wer, None);
    let mut only = settings.clone();
    only.protect.stop = false;
    let last = chosen(whole.path(), &only)
        .expect("a checkpoint")
        .expect("a checkpoint");
    assert_eq!(last.step, 6);
}

/// Where the first evaluation ends training, no checkpoint is from before: the model before training is handed on, whatever was to
/// be chosen.
#[test]
fn the_model_before_training_is_handed_on_where_the_first_evaluation_ends_it() {
    for model_from in [
        ModelFrom::Last,
        ModelFrom::Best,
        ModelFrom::Average,
        ModelFrom::AverageBest,
    ] {
        let folder = tempfile::tempdir().expect("folder");
        let settings = TrainSettings {
            eval_every: 2,
            checkpoint_every: 2,
            model_from,
            ..settings(folder.path(), 10)
        };
        assert_eq!(train_beside(&settings, 0, 10, Some(&[5, 8])), 2);
        assert_eq!(
            chosen(folder.path(), &settings).expect("no error"),
            None,
            "{model_from:?}"
        );
        if let Some(of) = settings.mean() {
            assert!(is_made(folder.path(), of).expect("checkpoints"));
        }
        let model = folder.path().join("step-000000002");
        let before = model_before(model.clone(), folder.path()).expect("a model");
        assert_eq!((before.step, &before.path), (0, &model));
        assert!(before.which.contains("protect.max_rise"), "{}", before.which);
        // As that of a checkpoint with these files.
        let record = checkpoint::read_record(&model).expect("a record");
        assert_eq!(before.digest, record.model_digest());
    }
}
