//! Reading and writing of NeMo's configuration.

use serde_yaml::{Mapping, Value};

use super::write::put;
use super::*;
use crate::Result;
use crate::testing::golden;

/// The golden configuration as it is.
fn plain() -> Value {
    serde_yaml::from_str(&std::fs::read_to_string(golden::file("model_config_resolved.yaml")).unwrap()).unwrap()
}

fn size(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

fn read(change: impl Fn(&mut Mapping)) -> Result<ModelConfig> {
    let text = std::fs::read_to_string(golden::file("model_config_resolved.yaml")).unwrap();
    let mut map: Mapping = serde_yaml::from_str(&text).unwrap();
    change(&mut map);
    ModelConfig::from_nemo_yaml(&serde_yaml::to_string(&map).unwrap())
}

#[test]
fn nemo_configuration_survives_reading_and_writing() {
    let config = read(|root| put(root, &["of_ours", "unknown"], "kept")).unwrap();
    let plain = plain();
    assert_eq!(config.encoder.d_model, size(&plain["encoder"]["d_model"]));
    assert_eq!(config.vocab_size, size(&plain["decoder"]["vocab_size"]));
    let durations = plain["loss"]["tdt_kwargs"]["durations"].as_sequence().unwrap();
    assert_eq!(
        config.transducer.as_ref().unwrap().loss.durations,
        durations.iter().map(size).collect::<Vec<_>>()
    );
    assert_eq!(
        config.transducer.as_ref().unwrap().loss.reduction.name(),
        plain["rnnt_reduction"].as_str().unwrap_or("mean_batch")
    );
    assert_eq!(config.labels.len(), config.vocab_size);
    let written = config.to_nemo_yaml().unwrap();
    let again = ModelConfig::from_nemo_yaml(&written).unwrap();
    assert_eq!(again.encoder, config.encoder);
    assert_eq!(again.transducer, config.transducer);
    assert_eq!(again.labels, config.labels);
    // What we do not know stays.
    let written: Value = serde_yaml::from_str(&written).unwrap();
    assert_eq!(written["of_ours"]["unknown"], "kept");
}

/// `transcribe` of NeMo looks into `validation_ds`, its users write into the others.
#[test]
fn an_archive_has_the_sections_that_nemos_calls_need() {
    let sections = ["train_ds", "validation_ds", "test_ds", "optim"];
    let archive = |change: &dyn Fn(&mut Mapping)| -> Value {
        let config = read(change).unwrap();
        serde_yaml::from_str(&config.to_nemo_archive_yaml().unwrap()).unwrap()
    };
    let without = |root: &mut Mapping| sections.iter().for_each(|section| drop(root.remove(section)));
    let written = archive(&without);
    for section in sections {
        assert!(written[section].is_mapping(), "{section}");
    }
    for section in &sections[..3] {
        assert_eq!(written[section].get("manifest_filepath"), Some(&Value::Null));
        assert_eq!(written[section]["sample_rate"], written["sample_rate"]);
        assert_eq!(written[section]["use_start_end_token"], false);
        assert_eq!(written[section]["shuffle"], *section == "train_ds");
    }
    assert!(written["optim"]["sched"].is_mapping());
    // Null, as NeMo leaves a section that it has taken out, is none.
    let emptied = archive(&|root| sections.iter().for_each(|section| put(root, &[section], Value::Null)));
    assert_eq!(emptied, written);
}

/// What the model that training began from says in a section stays as it was, and what NeMo asks for besides is added.
#[test]
fn what_is_missing_in_a_section_of_an_archive_is_added() {
    let kept = |brought: &str| -> Value {
        let brought: Value = serde_yaml::from_str(brought).unwrap();
        let sections = ["train_ds", "validation_ds", "test_ds", "optim"];
        let config = read(|root| {
            sections
                .iter()
                .for_each(|section| put(root, &[section], brought.clone()))
        })
        .unwrap();
        serde_yaml::from_str(&config.to_nemo_archive_yaml().unwrap()).unwrap()
    };
    let section = |text: &str| -> Value { serde_yaml::from_str(text).unwrap() };
    // As archives have it whose scheduler was taken out.
    let written = kept("{name: adam, lr: 0.5, manifest_filepath: /data/of/theirs.json, shuffle: true}");
    assert_eq!(
        written["optim"]["sched"],
        section("{name: CosineAnnealing, warmup_steps: 1000, min_lr: 1e-6}")
    );
    assert_eq!(
        (&written["optim"]["name"], &written["optim"]["lr"]),
        (&"adam".into(), &0.5.into())
    );
    for name in ["train_ds", "validation_ds", "test_ds"] {
        let ds = &written[name];
        assert_eq!(ds["manifest_filepath"], "/data/of/theirs.json");
        assert_eq!(
            (&ds["shuffle"], &ds["use_start_end_token"]),
            (&true.into(), &false.into())
        );
        assert_eq!(
            (&ds["sample_rate"], &ds["batch_size"]),
            (&written["sample_rate"], &16.into())
        );
        assert!(ds.get("max_duration").is_none(), "its rows stay those that they were");
    }
    // Another schedule, and sections whose batches Lhotse makes.
    let written = kept("{sched: {name: NoamAnnealing, warmup_ratio: 0.1}, use_lhotse: true, batch_duration: 600}");
    assert_eq!(
        written["optim"]["sched"],
        section("{name: NoamAnnealing, warmup_ratio: 0.1}")
    );
    let ds = &written["validation_ds"];
    assert!(ds.get("batch_size").is_none() && ds.get("shuffle").is_none());
    assert_eq!(
        (&ds["manifest_filepath"], &ds["use_start_end_token"]),
        (&Value::Null, &false.into())
    );
}

#[test]
fn a_changed_value_is_written() {
    let mut config = read(|_| ()).unwrap();
    config.encoder.attention_context = AttentionContext::Band(8);
    config.spec_augment.time_masks = 3;
    config.spec_augment.time_width = TimeWidth::Share(1.0);
    let again = ModelConfig::from_nemo_yaml(&config.to_nemo_yaml().unwrap()).unwrap();
    assert_eq!(again.encoder.attention_context, AttentionContext::Band(8));
    assert_eq!(again.spec_augment, config.spec_augment);
}

#[test]
fn references_are_followed() {
    let config = read(|root| {
        put(root, &["encoder", "d_model"], "${model.model_defaults.enc_hidden}");
        put(
            root,
            &["decoder", "prednet", "pred_hidden"],
            "${model_defaults.pred_hidden}",
        );
    })
    .unwrap();
    let defaults = &plain()["model_defaults"];
    assert_eq!(config.encoder.d_model, size(&defaults["enc_hidden"]));
    assert_eq!(
        config.transducer.as_ref().unwrap().prediction.pred_hidden,
        size(&defaults["pred_hidden"])
    );
    let error = read(|root| put(root, &["encoder", "d_model"], "${encoder.d_model}")).unwrap_err();
    assert!(error.to_string().contains("refers to itself"), "{error}");
}

#[test]
fn unsupported_and_wrong_values_are_named() {
    let right = read(|_| ()).unwrap();
    let one_more = |size: usize| Value::from(size as u64 + 1);
    let cases: &[(&[&str], Value, &str)] = &[
        (
            &["encoder", "conv_norm_type"],
            "group_norm".into(),
            "encoder.conv_norm_type",
        ),
        (&["encoder", "subsampling"], "striding".into(), "encoder.subsampling"),
        (
            &["encoder", "causal_downsampling"],
            "yes please".into(),
            "encoder.causal_downsampling",
        ),
        (
            &["encoder", "conv_context_size"],
            "causal".into(),
            "encoder.conv_context_size",
        ),
        (&["encoder", "d_model"], (-5).into(), "encoder.d_model"),
        (
            &["encoder", "n_heads"],
            one_more(right.encoder.d_model),
            "encoder.n_heads",
        ),
        (
            &["encoder", "att_context_size"],
            vec![70u64, 13].into(),
            "encoder.att_context_size",
        ),
        (&["encoder", "dropout"], 1.5.into(), "encoder.dropout"),
        (
            &["preprocessor", "normalize"],
            "all_features".into(),
            "preprocessor.normalize",
        ),
        (
            &["preprocessor", "features"],
            one_more(right.preprocessor.features),
            "encoder.feat_in",
        ),
        (
            &["decoder", "vocab_size"],
            one_more(right.vocab_size),
            "joint.num_classes",
        ),
        (
            &["joint", "num_extra_outputs"],
            one_more(right.transducer.as_ref().unwrap().loss.durations.len()),
            "joint.num_extra_outputs",
        ),
        (&["loss", "tdt_kwargs", "durations"], vec![0u64].into(), "durations"),
        (
            &["loss", "tdt_kwargs", "sigma"],
            f64::NAN.into(),
            "loss.tdt_kwargs.sigma",
        ),
        (&["rnnt_reduction"], "median".into(), "rnnt_reduction"),
    ];
    for (path, value, expected) in cases {
        let error = read(|root| put(root, path, value)).unwrap_err().to_string();
        assert!(error.contains(expected), "{path:?}: {error}");
    }
    assert!(ModelConfig::from_nemo_yaml("").is_err());
    assert!(ModelConfig::from_nemo_yaml("[1, 2").is_err());
}
