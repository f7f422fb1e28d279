//! The kinds training.train, evaluation.decode and evaluation.report, one after the other, without timely.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{
    ArrayRef, AsArray, Float32Builder, Float64Array, Int32Array, ListBuilder, RecordBatch, StringArray, UInt32Array,
};
use arrow::datatypes::{Float32Type, Int64Type};
use candle_core::{DType, Device};
use flow_evaluation::decode::{DecodeSettings, EvaluationDecode};
use flow_evaluation::report::{EvaluationReport, ReportSettings};
use flow_kind::event::Event;
use flow_kind::{Reject, RejectClass, StageError};
use flow_model::Weights;
use flow_model::model::{MicroBatch, TdtModel};
use flow_runtime::harness::{Harness, Output};
use flow_sampling::load::loaded_schema;
use flow_training::row_losses::{LossCourse, ROW_LOSSES, read_row_losses};
use flow_training::settings::{Concatenate, ModelFrom, ModelSettings, TrainSettings};
use flow_training::train::{TrainingTrain, model_schema};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

fn audio() -> Vec<PathBuf> {
    let folder = std::env::var("FLOW_TEST_GOLDEN_MODEL").unwrap_or_else(|_| format!("{ROOT}/tests/data/golden/model"));
    let entries = std::fs::read_dir(Path::new(&folder).join("audio")).expect("recordings");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths.truncate(3);
    assert_eq!(paths.len(), 3);
    paths
}

/// Rows of a manifest; the last one's audio is not there.
fn rows() -> RecordBatch {
    let mut paths: Vec<String> = audio().iter().map(|path| path.to_string_lossy().into_owned()).collect();
    paths.push("/nowhere/at/all.wav".into());
    let n = paths.len();
    let text = |values: Vec<String>| Arc::new(StringArray::from(values)) as ArrayRef;
    RecordBatch::try_from_iter([
        ("_row", Arc::new(UInt32Array::from_iter_values(0..n as u32)) as ArrayRef),
        ("segment_id", text((0..n).map(|i| format!("seg_{i}")).collect())),
        (
            "text",
            text(vec![
                "<|en|> one two".into(),
                "<|hi|> ek do".into(),
                "<|en|> three".into(),
                "<|en|> four".into(),
            ]),
        ),
        ("duration", Arc::new(Float64Array::from(vec![0.8, 2.4, 1.5, 2.0]))),
        ("lang", text(vec!["en".into(), "hi".into(), "en".into(), "en".into()])),
        ("audio_path", text(paths)),
    ])
    .expect("rows")
}

/// What sampling.load gives for one step of two micro-batches, the second of them without any utterance.
fn step(number: usize) -> RecordBatch {
    let mut signals = ListBuilder::new(Float32Builder::new());
    for samples in [8_000 + number * 100, 6_000] {
        signals
            .values()
            .append_slice(&(0..samples).map(|i| (i as f32 * 0.02).sin() * 0.2).collect::<Vec<_>>());
        signals.append(true);
    }
    signals.values().append_value(0.0);
    signals.append(true);
    let numbers = |values: Vec<i32>| Arc::new(Int32Array::from(values)) as ArrayRef;
    let text = |values: [&str; 3]| Arc::new(StringArray::from(values.to_vec())) as ArrayRef;
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from(vec![0, 1, 2])),
        numbers(vec![0, 0, 0]),
        numbers(vec![0, 0, 1]),
        numbers(vec![0, 0, 0]),
        text(["a", "b", ""]),
        text(["en", "hi", ""]),
        Arc::new(Float64Array::from(vec![0.5, 0.4, 0.0])),
        text(["<|en|> one two", "<|hi|> ek", ""]),
        Arc::new(signals.finish()),
    ];
    RecordBatch::try_new(loaded_schema(), columns).expect("a step")
}

fn settings(folder: &Path, max_steps: u64) -> TrainSettings {
    TrainSettings {
        checkpoints: folder.join("checkpoints").to_string_lossy().into_owned(),
        tokenizer: format!("{ROOT}/configs/tokenizers/mini.model"),
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
        unfreeze_step: 0,
        phase2_warmup: 1,
        grad_accum: 2,
        eval_every: 2,
        log_every: 1,
        ..TrainSettings::default()
    }
}

fn train(settings: TrainSettings, steps: std::ops::Range<usize>) -> Result<Output, StageError> {
    let mut harness = Harness::<TrainingTrain>::new(settings)
        .input("batches", loaded_schema())
        .input("validation", rows().schema())
        .feed("validation", "en/en_0", rows());
    for number in steps {
        harness = harness.feed("batches", &format!("step-{number:09}"), step(number));
    }
    harness.run()
}

/// `train` and `validation` exchanged, say: what is recorded would not be what was learned.
#[test]
fn batches_are_made_of_the_train_rows() {
    let train = |segments: [&str; 3]| {
        let folder = tempfile::tempdir().expect("folder");
        let mut columns = rows().slice(0, 3).columns().to_vec();
        columns[1] = Arc::new(StringArray::from(segments.to_vec()));
        let rows = RecordBatch::try_new(rows().schema(), columns).expect("train rows");
        Harness::<TrainingTrain>::new(TrainSettings {
            eval_every: 0,
            ..settings(folder.path(), 1)
        })
        .input("batches", loaded_schema())
        .input("validation", rows.schema())
        .input("train", rows.schema())
        .feed("batches", "step-000000000", step(0))
        .feed("train", "en/en_0", rows)
        .run()
    };
    train(["c", "b", "a"]).expect("trained");
    let error = train(["a", "c", "d"]).expect_err("other rows").to_string();
    assert!(
        error.contains("the segment b, which the input `train` does not have"),
        "{error}"
    );
}

/// They are learned as the unknown piece, so they are counted before the first step; rows and texts stay as they are.
#[test]
fn letters_that_the_tokenizer_does_not_know_are_told() {
    let train = |warn_unknown_letters: f64| {
        let folder = tempfile::tempdir().expect("folder");
        let mut columns = rows().slice(0, 3).columns().to_vec();
        columns[1] = Arc::new(StringArray::from(vec!["c", "b", "a"]));
        let text = rows().schema().index_of("text").expect("text");
        columns[text] = Arc::new(StringArray::from(vec!["<|en|> Straße", "<|hi|> ek do", "<|en|> two"]));
        let rows = RecordBatch::try_new(rows().schema(), columns).expect("train rows");
        let output = Harness::<TrainingTrain>::new(TrainSettings {
            eval_every: 0,
            warn_unknown_letters,
            ..settings(folder.path(), 1)
        })
        .input("batches", loaded_schema())
        .input("validation", rows.schema())
        .input("train", rows.schema())
        .feed("batches", "step-000000000", step(0))
        .feed("train", "en/en_0", rows)
        .run()
        .expect("trained");
        let metrics = std::fs::read_to_string(folder.path().join("checkpoints/metrics.jsonl")).expect("metrics");
        assert!(metrics.contains(r#""kind":"unknown_letters""#), "{metrics}");
        let table = output.events.iter().any(|event| {
            matches!(event, Event::StageFigures { figures, .. } if figures["table"].to_string().contains("ß (U+00DF)"))
        });
        assert!(table, "no table");
        output.events.into_iter().find_map(|event| match event {
            Event::Warning { message, .. } => Some(message),
            _ => None,
        })
    };
    let warning = train(0.01).expect("a warning");
    assert!(warning.contains("en 1 of 2 (ß (U+00DF) in 1)"), "{warning}");
    assert_eq!(train(0.5), None);
}

#[test]
fn a_model_is_trained_decoded_and_reported() {
    let folder = tempfile::tempdir().expect("folder");
    let output = train(settings(folder.path(), 4), 0..4).expect("trained");
    let result = output.result.expect("a result");
    assert_eq!(
        result
            .column_by_name("step")
            .expect("step")
            .as_primitive::<Int64Type>()
            .value(0),
        4
    );
    let path = PathBuf::from(result.column_by_name("path").expect("path").as_string::<i32>().value(0));
    assert!(path.join("model.safetensors").exists(), "{}", path.display());
    let figures = |name: &str| {
        output
            .events
            .iter()
            .any(|event| matches!(event, Event::StageFigures { figures, .. } if !figures[name].is_null()))
    };
    assert!(figures("loss") && figures("memory_mib") && figures("validation_wer") && figures("validation_loss"));

    // Finished: nothing is trained again, and the result is the same.
    let again = train(settings(folder.path(), 4), 0..0).expect("standing");
    assert_eq!(again.result.expect("a result"), result);

    let decode = || {
        Harness::<EvaluationDecode>::new(DecodeSettings::default())
            .input("rows", rows().schema())
            .input("model", model_schema())
            .feed("rows", "en/en_0", rows())
            .feed("model", "result", result.clone())
            .run()
            .expect("decoded")
    };
    let decoded = decode();
    let transcripts = decoded.rows("transcripts", "all");
    assert_eq!(transcripts.num_rows(), 3);
    assert_eq!(decoded.reasons("all"), [(Some(3), "audio_unreadable")]);
    assert_eq!(
        transcripts
            .column_by_name("reference")
            .expect("reference")
            .as_string::<i32>()
            .value(0),
        "<|en|> one two"
    );
    assert_eq!(
        decode().rows("transcripts", "all"),
        transcripts,
        "the same model hears the same"
    );

    // Whatever the number of micro-batches at a time: here each row, which says that it is long, is one.
    let long = {
        let mut columns = rows().columns().to_vec();
        columns[3] = Arc::new(Float64Array::from(vec![100.0; 4]));
        RecordBatch::try_new(rows().schema(), columns).expect("rows")
    };
    let spread = |devices: u32| {
        let settings = DecodeSettings {
            devices,
            ..DecodeSettings::default()
        };
        let output = Harness::<EvaluationDecode>::new(settings)
            .input("rows", long.schema())
            .input("model", model_schema())
            .feed("rows", "en/en_0", long.clone())
            .feed("model", "result", result.clone())
            .run();
        let output = output.expect("decoded");
        assert_eq!(output.reasons("all"), [(Some(3), "audio_unreadable")]);
        output.rows("transcripts", "all")
    };
    let one = spread(0);
    assert_eq!(one.num_rows(), 3);
    for devices in [1, 2, 3, 64] {
        assert_eq!(spread(devices), one, "{devices} devices");
    }

    // The same checkpoint by its name; in half precision it is nearly the same, so that only the run is looked at.
    for (weights, same) in [(Weights::F32, true), (Weights::Bf16, false)] {
        let named = Harness::<EvaluationDecode>::new(DecodeSettings {
            model: path.to_string_lossy().into_owned(),
            weights,
            ..DecodeSettings::default()
        })
        .input("rows", rows().schema())
        .feed("rows", "en/en_0", rows())
        .run()
        .expect("decoded");
        let found = named.rows("transcripts", "all");
        assert!(found.num_rows() == 3 && (!same || found == transcripts), "{weights:?}");
    }

    let out = folder.path().join("report");
    let reported = Harness::<EvaluationReport>::new(ReportSettings {
        out: out.to_string_lossy().into_owned(),
        ..ReportSettings::default()
    })
    .input("decoded", transcripts.schema())
    .input("model", model_schema())
    .input("train", rows().schema())
    .feed("decoded", "all", transcripts.clone())
    .feed("model", "result", result)
    .feed("train", "en/en_0", rows())
    .rejected(
        "clean",
        "en/en_0",
        Reject {
            row: Some(1),
            id: None,
            reason: "quality_too_low".into(),
            class: RejectClass::Rule,
            detail: String::new(),
            values: String::new(),
        },
    )
    .run()
    .expect("reported");
    let page = std::fs::read_to_string(out.join("report.html")).expect("a page");
    assert!(
        page.contains("Loss by optimizer step")
            && page.contains("quality_too_low")
            && page.contains("Utterances by duration")
    );
    let table = reported.events.iter().find_map(|event| match event {
        Event::StageFigures { figures, .. } => figures["table"]["rows"].as_array().cloned(),
        _ => None,
    });
    assert_eq!(table.expect("a table").len(), 3, "en, hi, all");
}

#[test]
fn training_goes_on_where_it_stood_and_skips_what_is_done() {
    let folder = tempfile::tempdir().expect("folder");
    let first = train(
        TrainSettings {
            eval_every: 0,
            ..settings(folder.path(), 6)
        },
        0..3,
    )
    .expect("half");
    assert_eq!(
        first
            .result
            .expect("a result")
            .column_by_name("step")
            .expect("step")
            .as_primitive::<Int64Type>()
            .value(0),
        3
    );
    // A loader that begins at the first step all the same does no harm.
    let second = train(
        TrainSettings {
            eval_every: 0,
            ..settings(folder.path(), 6)
        },
        0..6,
    )
    .expect("whole");
    assert_eq!(
        second
            .result
            .expect("a result")
            .column_by_name("step")
            .expect("step")
            .as_primitive::<Int64Type>()
            .value(0),
        6
    );
}

/// Both rows of a step become one clip. They stay two rows in figures and losses, and a resumed training has the same bits.
#[test]
fn joined_clips_are_trained_on_and_resumed() {
    let folder = tempfile::tempdir().expect("folder");
    let concatenate = |gap_seconds: f64| {
        Some(Concatenate {
            gap_seconds,
            max_duration: Some(3.0),
            ..Concatenate::default()
        })
    };
    let with = |name: &str, concatenate: Option<Concatenate>| TrainSettings {
        concatenate,
        eval_every: 0,
        // Losses are summed up from checkpoint to checkpoint.
        checkpoint_every: 3,
        row_losses: 5,
        ..settings(&folder.path().join(name), 6)
    };
    let column = |output: &Output, name: &str| {
        let row = output.result.clone().expect("a result");
        row.column_by_name(name)
            .expect(name)
            .as_string::<i32>()
            .value(0)
            .to_owned()
    };
    let whole = train(with("whole", concatenate(0.1)), 0..6).expect("whole");
    train(with("resumed", concatenate(0.1)), 0..3).expect("half");
    let resumed = train(with("resumed", concatenate(0.1)), 3..6).expect("the rest");
    let weights =
        |output: &Output| std::fs::read(Path::new(&column(output, "path")).join("model.safetensors")).expect("weights");
    assert!(weights(&whole) == weights(&resumed));
    let plain = train(with("plain", None), 0..6).expect("without");
    assert!(weights(&whole) != weights(&plain));

    // Of the joined clip, for each of its rows.
    let losses = |output: &Output| {
        let path = Path::new(&column(output, "path")).join(ROW_LOSSES);
        let rows = read_row_losses(&path).expect("losses");
        rows.collect::<Result<Vec<_>, _>>().expect("rows")
    };
    let (joined, resumed, apart) = (losses(&whole), losses(&resumed), losses(&plain));
    let rows = |losses: &[(String, LossCourse)]| -> Vec<(String, u64)> {
        losses
            .iter()
            .map(|(segment, course)| (segment.clone(), course.times))
            .collect()
    };
    assert_eq!(rows(&joined), [("a".to_owned(), 6), ("b".to_owned(), 6)]);
    assert_eq!((&joined, rows(&joined)), (&resumed, rows(&apart)));
    assert_eq!(joined[0].1, joined[1].1);
    assert_ne!(apart[0].1, apart[1].1);

    let samples = |output: &Output| {
        let record = std::fs::read(Path::new(&column(output, "path")).join("training.json")).expect("a record");
        serde_json::from_slice::<serde_json::Value>(&record).expect("JSON")["samples"].clone()
    };
    assert_eq!((samples(&whole), samples(&plain)), (12.into(), 12.into()));

    let refused = train(with("resumed", concatenate(0.2)), 0..6).expect_err("another gap");
    assert!(refused.to_string().contains("concatenate"), "{refused}");
    let refused = train(with("wrong", concatenate(f64::NAN)), 0..6).expect_err("no number");
    assert!(refused.to_string().contains("`gap_seconds`"), "{refused}");
}

/// Its value is that of the loss that is trained, without noise, over all utterances that can be read and whose texts are
/// no longer than those that are trained on. It is the same when training goes on, and changes no bit of the model.
#[test]
fn the_validation_loss_is_that_of_training_without_noise() {
    let losses = |folder: &Path| -> Vec<(u64, f64)> {
        let text = std::fs::read_to_string(folder.join("checkpoints/metrics.jsonl")).expect("metrics");
        let lines = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
        let evaluations = lines.filter(|line| line["kind"] == "evaluation");
        evaluations
            .map(|line| {
                assert_eq!(line["loss"], line["val_loss"]);
                (
                    line["step"].as_u64().expect("a step"),
                    line["val_loss"].as_f64().expect("a loss"),
                )
            })
            .collect()
    };
    let path = |output: &Output| -> PathBuf {
        let row = output.result.clone().expect("a result");
        row.column_by_name("path")
            .expect("path")
            .as_string::<i32>()
            .value(0)
            .into()
    };
    let whole = tempfile::tempdir().expect("folder");
    let last = path(&train(settings(whole.path(), 4), 0..4).expect("trained"));
    let found = losses(whole.path());
    assert_eq!(found.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [2, 4]);

    let model = TdtModel::load(&last, DType::F32, &Device::Cpu).expect("the checkpoint");
    let tokenizer = model.tokenizer.as_ref().expect("a tokenizer");
    let texts = ["<|en|> one two", "<|hi|> ek do", "<|en|> three"];
    let signal = |path: PathBuf| flow_audio::decode::decode(&std::fs::read(path).expect("a recording"), 60.0);
    let batch = MicroBatch {
        signals: audio().into_iter().map(|path| signal(path).expect("samples")).collect(),
        tokens: texts.iter().map(|text| tokenizer.encode(text)).collect(),
        prompts: Vec::new(),
    };
    let expected = model.evaluate_loss(&batch).expect("a loss").loss;
    let last_loss = found[1].1;
    assert!((last_loss - expected).abs() < 1e-6 * expected, "{last_loss} {expected}");

    // Texts that are too long to be trained on have no part in it.
    let short = tempfile::tempdir().expect("folder");
    let lengths: Vec<usize> = batch.tokens.iter().map(Vec::len).collect();
    let most = lengths.iter().max().expect("tokens") - 1;
    let limited = TrainSettings {
        max_tokens: most,
        ..settings(short.path(), 2)
    };
    let limited = path(&train(limited, 0..2).expect("trained"));
    let limited = TdtModel::load(&limited, DType::F32, &Device::Cpu).expect("the checkpoint");
    let all = limited.evaluate_loss(&batch).expect("losses").losses;
    let counted: Vec<f64> = (all.iter().zip(&lengths))
        .filter_map(|(loss, length)| (*length <= most).then_some(*loss))
        .collect();
    assert!((1..3).contains(&counted.len()), "{lengths:?}");
    let expected = counted.iter().sum::<f64>() / counted.len() as f64;
    let found_limited = losses(short.path())[0].1;
    assert!(
        (found_limited - expected).abs() < 1e-6 * expected,
        "{found_limited} {expected}"
    );

    let halves = tempfile::tempdir().expect("folder");
    train(settings(halves.path(), 4), 0..2).expect("trained");
    train(settings(halves.path(), 4), 2..4).expect("trained");
    assert_eq!(losses(halves.path()), found);

    let silent = tempfile::tempdir().expect("folder");
    let without = TrainSettings {
        eval_every: 0,
        ..settings(silent.path(), 4)
    };
    let without = path(&train(without, 0..4).expect("trained"));
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let [a, b] = [&last, &without].map(|folder| std::fs::read(folder.join(file)).expect("a file"));
        assert!(a == b, "{file}");
    }
}

/// What is handed on is what `model_from` says; changing that when training is done costs no step.
#[test]
fn the_checkpoint_that_is_handed_on_is_a_setting() {
    let folder = tempfile::tempdir().expect("folder");
    let with = |model_from: ModelFrom, keep_checkpoints: usize| TrainSettings {
        model_from,
        keep_checkpoints,
        checkpoint_every: 4,
        eval_every: 1,
        // Steps so long that the model is not the better the longer it is trained.
        phase2_lr: 3e-2,
        ..settings(folder.path(), 6)
    };
    let columns = |output: &Output| {
        let row = output.result.clone().expect("a result");
        let text = |name: &str| {
            row.column_by_name(name)
                .expect(name)
                .as_string::<i32>()
                .value(0)
                .to_owned()
        };
        let step = row
            .column_by_name("step")
            .expect("step")
            .as_primitive::<Int64Type>()
            .value(0);
        (step as u64, text("path"), text("which"), text("digest"))
    };
    let trained = train(with(ModelFrom::Best, 2), 0..6).expect("trained");
    let (step, path, which, _) = columns(&trained);
    // The lowest of all evaluations, whether or not a checkpoint was due there.
    let metrics = std::fs::read_to_string(folder.path().join("checkpoints/metrics.jsonl")).expect("metrics");
    let lines = metrics
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
    let rates: Vec<(u64, f64)> = lines
        .filter(|line| line["kind"] == "evaluation")
        .map(|line| {
            (
                line["step"].as_u64().expect("a step"),
                line["wer"].as_f64().expect("a rate"),
            )
        })
        .collect();
    let lowest = rates.iter().map(|(_, rate)| *rate).fold(f64::INFINITY, f64::min);
    let first = rates.iter().find(|(_, rate)| *rate == lowest).expect("an evaluation").0;
    assert_eq!(rates.len(), 6);
    assert_eq!(step, first, "{rates:?}");
    assert!(
        path.ends_with(&format!("step-{first:09}")) && which.contains("lowest word error rate"),
        "{which}"
    );
    let notice = trained.events.iter().any(|event| {
        matches!(event, Event::StageFigures { figures, .. } if figures["notice"].as_str().is_some_and(|text| text.contains(&which)))
    });
    assert!(notice, "the run does not say which");

    let (step, path, which, last) = columns(&train(with(ModelFrom::Last, 2), 0..0).expect("standing"));
    assert_eq!((step, which.as_str()), (6, "last checkpoint"));
    let newest = PathBuf::from(path);

    let average = train(with(ModelFrom::Average, 2), 0..0).expect("made");
    let (step, path, which, digest) = columns(&average);
    assert_eq!((step, which.as_str()), (6, "mean of the checkpoints of steps 4, 6"));
    assert_ne!(digest, last);
    let values = |folder: &Path, name: &str| -> Vec<f32> {
        let file = folder.join("model.safetensors");
        let tensors = flow_nn::tensor_files::read_safetensors(&file).expect("tensors");
        let (_, tensor) = tensors.into_iter().find(|(found, _)| found == name).expect(name);
        tensor.flatten_all().and_then(|flat| flat.to_vec1()).expect("values")
    };
    for name in ["joint.enc.weight", "encoder.layers.0.conv.batch_norm.running_var"] {
        let before = newest.with_file_name("step-000000004");
        let (a, b, mean) = (
            values(&before, name),
            values(&newest, name),
            values(Path::new(&path), name),
        );
        assert_ne!(a, b);
        for ((a, b), mean) in a.iter().zip(&b).zip(mean) {
            assert_eq!(mean, ((f64::from(*a) + f64::from(*b)) / 2.0) as f32, "{name}");
        }
    }
    // It stands, and is another one where it is to be of others.
    let again = columns(&train(with(ModelFrom::Average, 2), 0..0).expect("standing"));
    assert_eq!(again.3, digest);
    let (_, path, which, alone) = columns(&train(with(ModelFrom::Average, 1), 0..0).expect("made"));
    assert_eq!(which, "mean of the checkpoints of steps 6");
    assert_eq!(
        values(Path::new(&path), "joint.enc.weight"),
        values(&newest, "joint.enc.weight")
    );
    assert_ne!(alone, digest);

    let refused = train(
        TrainSettings {
            eval_every: 0,
            ..with(ModelFrom::Best, 2)
        },
        0..0,
    );
    assert!(refused.expect_err("never evaluated").to_string().contains("eval_every"));
}

/// A recording that cannot be loaded, and a step of none that can be loaded, do not end training, and are noted.
#[test]
fn a_step_whose_recordings_are_lost_is_skipped() {
    let folder = tempfile::tempdir().expect("folder");
    let settings = TrainSettings {
        eval_every: 0,
        max_bad_steps: 1,
        ..settings(folder.path(), 4)
    };
    // Of step 1 the first recording, of step 2 both; where nothing could be loaded, the signal has no samples.
    let without = |number: usize, lost: &[usize]| {
        let whole = step(number);
        let list = whole["signal"].as_list::<i32>();
        let mut signals = ListBuilder::new(Float32Builder::new());
        for at in 0..whole.num_rows() {
            let samples = list.value(at);
            if !lost.contains(&at) {
                signals
                    .values()
                    .append_slice(samples.as_primitive::<Float32Type>().values());
            }
            signals.append(true);
        }
        let mut columns = whole.columns().to_vec();
        columns[8] = Arc::new(signals.finish());
        RecordBatch::try_new(loaded_schema(), columns).expect("a step")
    };
    let run = |settings: &TrainSettings, lost: [&[usize]; 4]| {
        let mut harness = Harness::<TrainingTrain>::new(settings.clone())
            .input("batches", loaded_schema())
            .input("validation", rows().schema());
        for (number, lost) in lost.into_iter().enumerate() {
            harness = harness.feed("batches", &format!("step-{number:09}"), without(number, lost));
        }
        harness.run()
    };
    run(&settings, [&[], &[0], &[0, 1], &[]]).expect("trained");
    let metrics = std::fs::read_to_string(folder.path().join("checkpoints/metrics.jsonl")).expect("metrics");
    let segments = |kind: &str| -> Vec<(u64, String)> {
        let lines = metrics
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
        lines
            .filter(|line| line["kind"] == kind)
            .map(|line| (line["step"].as_u64().expect("a step"), line["segments"].to_string()))
            .collect()
    };
    let (one, both) = ((2, r#"["a"]"#.to_owned()), (3, r#"["a","b"]"#.to_owned()));
    assert_eq!(segments("left_out"), [one, both.clone()]);
    assert_eq!(segments("skipped"), [both]);
    // Not one bad recording, but a disk that is gone.
    let gone = TrainSettings {
        checkpoints: folder.path().join("gone").to_string_lossy().into_owned(),
        ..settings
    };
    let error = run(&gone, [&[], &[0, 1], &[0, 1], &[]]).expect_err("too many");
    assert!(error.to_string().contains("nothing could be loaded"), "{error}");
}

/// Nothing to validate on is an error before the first step, and says where the rows went; without evaluation it is none.
#[test]
fn an_empty_validation_set_ends_training_before_its_first_step() {
    let refused = |row: u32, reason: &str| Reject {
        row: Some(row),
        id: None,
        reason: reason.into(),
        class: RejectClass::Rule,
        detail: String::new(),
        values: String::new(),
    };
    let on = |settings: TrainSettings, validation: RecordBatch| {
        let mut harness = Harness::<TrainingTrain>::new(settings)
            .input("batches", loaded_schema())
            .input("validation", validation.schema())
            .feed("validation", "en/en_0", validation);
        for (row, reason) in (0..).zip(["too_long", "too_short", "too_short"]) {
            harness = harness.rejected("manifest/clean", "en/en_0", refused(row, reason));
        }
        for number in 0..2 {
            harness = harness.feed("batches", &format!("step-{number:09}"), step(number));
        }
        harness.run()
    };
    let with = |column: usize, text: &str| {
        let mut columns = rows().columns().to_vec();
        columns[column] = Arc::new(StringArray::from(vec![text; 4]));
        RecordBatch::try_new(rows().schema(), columns).expect("rows")
    };
    let (silent, lost) = (with(2, "<|en|>"), with(5, "/nowhere/at/all.wav"));
    for (validation, said) in [
        (rows().slice(0, 0), "`too_short` of stage manifest/clean, 2 times"),
        (silent, "none of the 4 rows to validate on has a word"),
        (lost, "none of the 4 recordings to validate on can be read; seg_0"),
    ] {
        let folder = tempfile::tempdir().expect("folder");
        let error = on(settings(folder.path(), 2), validation.clone()).expect_err("nothing to validate on");
        assert!(error.to_string().contains(said), "{error}");
        assert!(
            !folder.path().join("checkpoints/metrics.jsonl").exists(),
            "a step was trained"
        );
        let unasked = TrainSettings {
            eval_every: 0,
            ..settings(folder.path(), 2)
        };
        on(unasked, validation).expect("trained without evaluation");
    }
    let folder = tempfile::tempdir().expect("folder");
    let model = folder.path().join("model.nemo");
    std::fs::write(&model, "never opened").expect("file");
    let decoded = Harness::<EvaluationDecode>::new(DecodeSettings {
        model: model.to_string_lossy().into_owned(),
        ..DecodeSettings::default()
    })
    .input("rows", rows().schema())
    .empty_partition("rows", "en/en_0")
    .rejected("manifest/clean", "en/en_0", refused(0, "too_short"));
    let error = decoded.run().expect_err("nothing to decode").to_string();
    assert!(
        error.contains("no rows to transcribe") && error.contains("too_short"),
        "{error}"
    );
}

#[test]
fn mistakes_are_told_before_anything_runs() {
    let folder = tempfile::tempdir().expect("folder");
    let told = |settings: TrainSettings| train(settings, 0..1).expect_err("a mistake").to_string();
    assert!(
        told(TrainSettings {
            ranks: 0,
            ..settings(folder.path(), 4)
        })
        .contains("from 1 to 64")
    );
    assert!(
        told(TrainSettings {
            tokenizer: "/no/such.model".into(),
            ..settings(folder.path(), 4)
        })
        .contains("/no/such.model")
    );
    assert!(
        told(TrainSettings {
            phase2_lr: f64::NAN,
            ..settings(folder.path(), 4)
        })
        .contains("above 0")
    );
    assert!(!folder.path().join("checkpoints").exists(), "nothing was made");
    let yaml = "{checkpoints: x, tokenizer: y, max_step: 3}";
    assert!(
        Harness::<TrainingTrain>::from_yaml(yaml)
            .err()
            .expect("an unknown setting")
            .to_string()
            .contains("max_step")
    );
}

#[test]
fn a_failure_in_the_thread_ends_the_stage_with_its_cause() {
    let folder = tempfile::tempdir().expect("folder");
    let broken = folder.path().join("broken.model");
    std::fs::write(&broken, b"no model").expect("file");
    let error = train(
        TrainSettings {
            tokenizer: broken.to_string_lossy().into_owned(),
            ..settings(folder.path(), 4)
        },
        0..2,
    )
    .expect_err("a broken tokenizer");
    assert!(error.to_string().contains("broken.model"), "{error}");
}
