//! Training of a cache-aware model with language prompts: a row has the prompt of its language, or `auto`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{
    ArrayRef, AsArray, Float32Builder, Float64Array, Int32Array, ListBuilder, RecordBatch, StringArray, UInt32Array,
};
use candle_core::{DType, Device};
use flow_evaluation::decode::{DecodeSettings, EvaluationDecode};
use flow_kind::StageError;
use flow_kind::event::Event;
use flow_model::ModelConfig;
use flow_model::Weights;
use flow_model::model::{MicroBatch, TdtModel};
use flow_model::tokenizer::Tokenizer;
use flow_nn::tensor_files::read_safetensors;
use flow_runtime::harness::{Harness, Output};
use flow_sampling::load::loaded_schema;
use flow_training::settings::{PromptMode, PromptSettings, TrainSettings};
use flow_training::train::{TrainingTrain, model_schema};
use flow_training::write_model::{WriteModel, WriteModelSettings};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// A folder with a small model of Nemotron's kind: RNN-T with CTC, causal, and with prompts unless they are left out.
fn init(place: &Path, prompts: bool) -> String {
    let tokenizer = Tokenizer::load(&Path::new(ROOT).join("configs/tokenizers/mini.model")).expect("a tokenizer");
    let size = tokenizer.vocabulary_size();
    let yaml = format!(
        "
preprocessor: {{sample_rate: 16000, window_size: 0.025, window_stride: 0.01, features: 16, n_fft: 512, pad_to: 0, normalize: NA}}
encoder:
  {{feat_in: 16, n_layers: 2, d_model: 16, n_heads: 2, use_bias: false, xscaling: false, conv_kernel_size: 5,
   subsampling: dw_striding, subsampling_factor: 8, subsampling_conv_channels: 4, dropout: 0.1, dropout_pre_encoder: 0.1,
   dropout_emb: 0.0, dropout_att: 0.1, causal_downsampling: true, conv_context_size: causal, conv_norm_type: layer_norm,
   att_context_style: chunked_limited, att_context_size: [[8, 3], [8, 0], [-1, 3], [-1, -1]]}}
decoder: {{vocab_size: {size}, prednet: {{pred_hidden: 8, pred_rnn_layers: 1}}}}
joint: {{jointnet: {{joint_hidden: 8}}}}
loss: {{loss_name: default}}
aux_ctc: {{ctc_loss_weight: 0.3, decoder: {{num_classes: {size}}}}}
model_defaults:
  {{initialize_prompt_feature: {prompts}, num_prompts: 6, prompt_dictionary: {{en-US: 0, hi-IN: 2, auto: 5}}}}
"
    );
    let config = ModelConfig::from_nemo_yaml(&yaml).expect("the configuration above is valid");
    assert_eq!(config.prompt.is_some(), prompts);
    let model = TdtModel::new(config, Some(tokenizer), 3, DType::F32, &Device::Cpu).expect("a model");
    let folder = place.join(format!("init-{prompts}"));
    model.save(&folder).expect("the model is written");
    folder.to_string_lossy().into_owned()
}

fn texts(values: &[&str]) -> ArrayRef {
    Arc::new(StringArray::from(values.to_vec()))
}

/// Rows whose second one has this language.
fn rows(language: &str) -> RecordBatch {
    let folder = std::env::var("FLOW_TEST_GOLDEN_MODEL").unwrap_or_else(|_| format!("{ROOT}/tests/data/golden/model"));
    let entries = std::fs::read_dir(Path::new(&folder).join("audio")).expect("recordings");
    let mut paths: Vec<String> = entries
        .map(|entry| entry.expect("an entry").path().to_string_lossy().into_owned())
        .collect();
    paths.sort();
    RecordBatch::try_from_iter([
        ("_row", Arc::new(UInt32Array::from_iter_values(0..2)) as ArrayRef),
        ("segment_id", texts(&["a", "b"])),
        ("text", texts(&["one two", "ek"])),
        ("duration", Arc::new(Float64Array::from(vec![0.8, 2.4]))),
        ("lang", texts(&["en", language])),
        ("audio_path", texts(&[&paths[0], &paths[1]])),
    ])
    .expect("rows")
}

fn step(number: usize, language: &str) -> RecordBatch {
    let mut signals = ListBuilder::new(Float32Builder::new());
    for samples in [8_000 + number * 100, 6_000] {
        let signal: Vec<f32> = (0..samples).map(|i| (i as f32 * 0.02).sin() * 0.2).collect();
        signals.values().append_slice(&signal);
        signals.append(true);
    }
    let numbers = |values: Vec<i32>| Arc::new(Int32Array::from(values)) as ArrayRef;
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from(vec![0, 1])),
        numbers(vec![0, 0]),
        numbers(vec![0, 1]),
        numbers(vec![0, 0]),
        texts(&["a", "b"]),
        texts(&["en", language]),
        Arc::new(Float64Array::from(vec![0.5, 0.4])),
        texts(&["one two", "ek"]),
        Arc::new(signals.finish()),
    ];
    RecordBatch::try_new(loaded_schema(), columns).expect("a step")
}

fn settings(folder: &Path, init: &str, prompts: PromptSettings) -> TrainSettings {
    TrainSettings {
        checkpoints: folder.join("checkpoints").to_string_lossy().into_owned(),
        init: init.to_owned(),
        max_steps: 6,
        // The first two steps train the prompt's layers and the heads alone.
        unfreeze_step: 2,
        warmup_steps: 1,
        phase2_warmup: 1,
        phase1_lr: 1e-2,
        phase2_lr: 1e-2,
        grad_accum: 2,
        eval_every: 3,
        log_every: 1,
        prompts,
        ..TrainSettings::default()
    }
}

fn train(settings: TrainSettings, steps: std::ops::Range<usize>, language: &str) -> Result<Output, StageError> {
    let rows = rows(language);
    let mut harness = Harness::<TrainingTrain>::new(settings)
        .input("batches", loaded_schema())
        .input("validation", rows.schema())
        .input("train", rows.schema())
        .feed("validation", "en/en_0", rows.clone())
        .feed("train", "en/en_0", rows);
    for number in steps {
        harness = harness.feed("batches", &format!("step-{number:09}"), step(number, language));
    }
    harness.run()
}

fn checkpoint(output: &Output) -> PathBuf {
    let row = output.result.as_ref().expect("a result");
    let paths = row.column_by_name("path").expect("path").as_string::<i32>();
    PathBuf::from(paths.value(0))
}

fn with_mode(default_prompt_mode: PromptMode) -> PromptSettings {
    PromptSettings {
        default_prompt_mode,
        ..PromptSettings::default()
    }
}

/// Stopped in either phase, the same bytes come out; other prompts give other weights.
#[test]
fn training_with_prompts_resumes_to_the_bit() {
    let place = tempfile::tempdir().expect("folder");
    let init = init(place.path(), true);
    let of = |name: &str, prompts: PromptSettings, bounds: &[usize]| {
        let settings = settings(&place.path().join(name), &init, prompts);
        let mut last = PathBuf::new();
        for part in bounds.windows(2) {
            last = checkpoint(&train(settings.clone(), part[0]..part[1], "hi").expect("trained"));
        }
        last
    };
    let whole = of("whole", PromptSettings::default(), &[0, 6]);
    let parts = of("parts", PromptSettings::default(), &[0, 1, 4, 6]);
    let read = |folder: &Path, name: &str| std::fs::read(folder.join(name)).expect("a file of the checkpoint");
    for name in [
        "model.safetensors",
        "optimizer.safetensors",
        "model_config.yaml",
        "training.json",
    ] {
        assert!(read(&whole, name) == read(&parts, name), "{name} differs");
    }
    for mode in [PromptMode::LangId, PromptMode::Auto] {
        let other = of(&format!("{mode:?}"), with_mode(mode), &[0, 6]);
        assert!(
            read(&whole, "model.safetensors") != read(&other, "model.safetensors"),
            "{mode:?}"
        );
    }
    // The column of a prompt learns where a row has the prompt, and weight decay alone moves the others.
    let columns = |folder: &Path| -> Vec<Vec<f32>> {
        let tensors = read_safetensors(&folder.join("model.safetensors")).expect("tensors");
        let (_, weight) = tensors
            .iter()
            .find(|(name, _)| name == "prompt_kernel.0.weight")
            .expect("the weight");
        let rows = weight.t().and_then(|weight| weight.to_vec2::<f32>()).expect("values");
        rows[16..].to_vec()
    };
    let before = columns(Path::new(&init));
    let by_language = columns(&place.path().join("LangId/checkpoints/step-000000006"));
    for (prompt, (before, after)) in before.iter().zip(&by_language).enumerate() {
        let moved = before.iter().zip(after).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert_eq!(moved > 1e-3, [0, 2].contains(&prompt), "prompt {prompt}: {moved}");
    }
}

/// The losses of validation are those with the prompt of each row's language, and an archive that is written of the model decodes as the
/// checkpoint does.
#[test]
fn rows_are_validated_by_their_languages_and_the_archive_decodes_alike() {
    let place = tempfile::tempdir().expect("folder");
    let init = init(place.path(), true);
    let output = train(settings(place.path(), &init, PromptSettings::default()), 0..6, "hi").expect("trained");
    let path = checkpoint(&output);
    let mut model = TdtModel::load(&path, DType::F32, &Device::Cpu).expect("the checkpoint");
    let tokenizer = model.tokenizer.as_ref().expect("a tokenizer");
    let recordings = rows("hi");
    let recordings = recordings
        .column_by_name("audio_path")
        .expect("paths")
        .as_string::<i32>();
    let signal = |path: &str| flow_audio::decode::decode(&std::fs::read(path).expect("a recording"), 60.0);
    let mut batch = MicroBatch {
        signals: recordings
            .iter()
            .flatten()
            .map(|path| signal(path).expect("samples"))
            .collect(),
        tokens: ["one two", "ek"].map(|text| tokenizer.encode(text)).into(),
        prompts: vec![0, 2],
    };
    let metrics = std::fs::read_to_string(place.path().join("checkpoints/metrics.jsonl")).expect("metrics");
    let lines = metrics
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
    let last = lines
        .rev()
        .find_map(|line| line["val_loss"].as_f64())
        .expect("an evaluation");
    let loss = |batch: &MicroBatch| model.evaluate_loss(batch).expect("a loss").loss;
    let expected = loss(&batch);
    assert!((last - expected).abs() < 1e-6 * expected, "{last} {expected}");
    batch.prompts = vec![5, 5];
    assert!((last - loss(&batch)).abs() > 1e-3 * expected);

    let out = place.path().join("out");
    let written = WriteModelSettings {
        out: out.to_string_lossy().into_owned(),
        name: "model".into(),
        dtype: Weights::F32,
        ctc: true,
    };
    Harness::<WriteModel>::new(written)
        .input("train", model_schema())
        .feed("train", "model", output.result.expect("a result"))
        .run()
        .expect("written");
    let mut archive = TdtModel::load(&out.join("model.nemo"), DType::F32, &Device::Cpu).expect("the archive");
    assert_eq!(archive.config.prompt, model.config.prompt);
    let signals: Vec<&[f32]> = batch.signals.iter().map(Vec::as_slice).collect();
    let mut heard = Vec::new();
    for language in ["en", "hi-IN", "auto"] {
        model.set_language(Some(language)).expect("a prompt");
        archive.set_language(Some(language)).expect("a prompt");
        let (encoded, _) = model.encode(&signals).expect("frames");
        let values = encoded
            .flatten_all()
            .and_then(|frames| frames.to_vec1::<f32>())
            .expect("values");
        let (again, _) = archive.encode(&signals).expect("frames");
        assert!(
            again
                .flatten_all()
                .and_then(|frames| frames.to_vec1::<f32>())
                .expect("values")
                == values
        );
        let found = model.transcribe(&signals).expect("texts");
        assert_eq!(archive.transcribe(&signals).expect("texts"), found, "{language}");
        heard.push(values);
    }
    assert!(heard[0] != heard[1] && heard[1] != heard[2]);
}

/// The hypotheses of the two rows, and whether there was a warning that names the language of the second one.
fn decoded(model: &Path, prompts: PromptSettings, language: &str) -> Result<(Vec<String>, bool), StageError> {
    let settings = DecodeSettings {
        model: model.to_string_lossy().into_owned(),
        prompts,
        ..DecodeSettings::default()
    };
    let rows = rows(language);
    let output = Harness::<EvaluationDecode>::new(settings)
        .input("rows", rows.schema())
        .feed("rows", "en/en_0", rows)
        .run()?;
    let transcripts = output.rows("transcripts", "all");
    let texts = transcripts
        .column_by_name("hypothesis")
        .expect("texts")
        .as_string::<i32>();
    let warned = output.events.iter().any(|event| match event {
        Event::Warning { message, .. } => message.contains(&format!("{language} (1 rows)")),
        _ => false,
    });
    Ok((texts.iter().flatten().map(str::to_owned).collect(), warned))
}

/// Rows of one batch, each with the prompt of its language.
#[test]
fn rows_are_decoded_by_their_languages() {
    let place = tempfile::tempdir().expect("folder");
    let path = PathBuf::from(init(place.path(), true));
    let mut model = TdtModel::load(&path, DType::F32, &Device::Cpu).expect("the model");
    let of_rows = rows("hi");
    let paths = of_rows.column_by_name("audio_path").expect("paths").as_string::<i32>();
    let signals: Vec<Vec<f32>> = (paths.iter().flatten())
        .map(|path| flow_audio::decode::decode(&std::fs::read(path).expect("a recording"), 60.0).expect("samples"))
        .collect();
    // Both in one batch, as they are decoded.
    let signals: Vec<&[f32]> = signals.iter().map(Vec::as_slice).collect();
    let [en, hi, auto] = ["en", "hi", "auto"].map(|language| {
        model.set_language(Some(language)).expect("a prompt");
        let found = model.transcribe(&signals).expect("texts").into_iter();
        found.map(|found| found.text).collect::<Vec<_>>()
    });
    assert!(
        en[1] != hi[1] && hi[1] != auto[1] && en[0] != auto[0],
        "{en:?} {hi:?} {auto:?}"
    );
    let decode = |prompts: PromptSettings, language: &str| decoded(&path, prompts, language);
    let [first, auto_first] = [&en[0], &auto[0]].map(Clone::clone);
    let by_language = vec![first.clone(), hi[1].clone()];
    for prompts in [PromptSettings::default(), with_mode(PromptMode::LangId)] {
        assert_eq!(decode(prompts, "hi").expect("decoded"), (by_language.clone(), false));
    }
    let all_auto = (vec![auto_first, auto[1].clone()], false);
    assert_eq!(decode(with_mode(PromptMode::Auto), "hi").expect("decoded"), all_auto);
    // A language without a prompt.
    let found = decode(PromptSettings::default(), "ta").expect("decoded");
    assert_eq!(found, (vec![first, auto[1].clone()], true));
    let mut mapped = PromptSettings::default();
    mapped.prompt_of.insert("ta".into(), "hi-IN".into());
    assert_eq!(decode(mapped.clone(), "ta").expect("decoded"), (by_language, false));
    mapped.prompt_of.insert("xx".into(), "xx-XX".into());
    let error = decode(mapped, "ta").expect_err("no such prompt");
    assert!(error.to_string().contains("`xx-XX`"), "{error}");
    assert!(matches!(error, StageError::Setting { path, .. } if path == "prompts.prompt_of.xx"));
    // A model without prompts.
    let without = PathBuf::from(init(place.path(), false));
    decoded(&without, PromptSettings::default(), "hi").expect("decoded");
    let error = decoded(&without, with_mode(PromptMode::LangId), "hi").expect_err("no prompts");
    assert!(error.to_string().contains("no language prompts"), "{error}");
}

#[test]
fn languages_without_a_prompt_are_refused_before_the_first_step() {
    let place = tempfile::tempdir().expect("folder");
    let init_with = init(place.path(), true);
    let refused = |name: &str, init: &str, prompts: PromptSettings, language: &str| {
        let settings = settings(&place.path().join(name), init, prompts);
        let error = train(settings, 0..6, language).expect_err("it is refused");
        assert!(!place.path().join(name).join("checkpoints/step-000000001").exists());
        error.to_string()
    };
    let error = refused("unknown", &init_with, PromptSettings::default(), "ta");
    assert!(
        error.contains("the input `train`") && error.contains("ta (1 rows)"),
        "{error}"
    );
    let mut mapped = PromptSettings::default();
    mapped.prompt_of.insert("ta".into(), "hi-IN".into());
    train(
        settings(&place.path().join("mapped"), &init_with, mapped.clone()),
        0..2,
        "ta",
    )
    .expect("trained");
    train(
        settings(&place.path().join("auto"), &init_with, with_mode(PromptMode::Auto)),
        0..2,
        "ta",
    )
    .expect("trained");
    // Training goes on with the prompts that it began with.
    let error = refused("mapped", &init_with, PromptSettings::default(), "ta");
    assert!(error.contains("prompts"), "{error}");

    mapped.prompt_of.insert("ta".into(), "ta-IN".into());
    let error = refused("name", &init_with, mapped, "ta");
    assert!(error.contains("`ta-IN`"), "{error}");
    let ratio = PromptSettings {
        unified_auto_ratio: f64::NAN,
        ..PromptSettings::default()
    };
    assert!(refused("ratio", &init_with, ratio, "hi").contains("probability"));
    let without = init(place.path(), false);
    let error = refused("none", &without, with_mode(PromptMode::LangId), "hi");
    assert!(error.contains("no language prompts"), "{error}");
    // Without prompts the model is trained as ever.
    let plain = settings(&place.path().join("plain"), &without, PromptSettings::default());
    train(plain, 0..2, "ta").expect("trained");
}

/// Settings without prompts are recorded and written as before.
#[test]
fn what_is_not_used_is_not_recorded() {
    let settings = TrainSettings::default();
    assert!(serde_json::to_value(&settings).expect("JSON").get("prompts").is_none());
    let resolved = flow_training::resolved_settings::ResolvedSettings::from(settings);
    assert!(!resolved.recorded().contains_key("prompts"));
    let known: PromptSettings =
        serde_json::from_str(r#"{"default_prompt_mode": "langID", "prompt_of": {"hi": "hi-IN"}}"#).expect("settings");
    assert_eq!(known.default_prompt_mode, PromptMode::LangId);
    for wrong in [
        r#"{"default_prompt_mode": "langid"}"#,
        r#"{"mode": "auto"}"#,
        r#"{"prompt_of": ["hi"]}"#,
    ] {
        assert!(serde_json::from_str::<PromptSettings>(wrong).is_err(), "{wrong}");
    }
}
