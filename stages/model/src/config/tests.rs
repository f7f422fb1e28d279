//! Reading and writing of NeMo's configuration.

use serde_yaml::{Mapping, Value};

use super::write::put;
use super::*;
use crate::error::Result;
use crate::layers::golden;

/// The golden configuration as it stands.
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
    let config = read(|_| ()).unwrap();
    let plain = plain();
    assert_eq!(config.encoder.d_model, size(&plain["encoder"]["d_model"]));
    assert_eq!(config.decoder.vocab_size, size(&plain["decoder"]["vocab_size"]));
    assert_eq!(config.loss.durations, [0, 1, 2, 3, 4]);
    assert_eq!(config.loss.reduction, Reduction::MeanBatch);
    assert_eq!(config.labels.len(), config.decoder.vocab_size);
    let written = config.to_nemo_yaml().unwrap();
    let again = ModelConfig::from_nemo_yaml(&written).unwrap();
    assert_eq!(again.encoder, config.encoder);
    assert_eq!(again.loss, config.loss);
    assert_eq!(again.labels, config.labels);
    // What we do not know stays.
    assert!(written.contains("validation_ds"));
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
    assert_eq!(config.decoder.pred_hidden, size(&defaults["pred_hidden"]));
    let error = read(|root| put(root, &["encoder", "d_model"], "${encoder.d_model}")).unwrap_err();
    assert!(error.to_string().contains("refers to itself"), "{error}");
}

#[test]
fn unsupported_and_wrong_values_are_named() {
    let cases: &[(&[&str], Value, &str)] = &[
        (
            &["encoder", "conv_norm_type"],
            "layer_norm".into(),
            "encoder.conv_norm_type",
        ),
        (&["encoder", "subsampling"], "striding".into(), "encoder.subsampling"),
        (
            &["encoder", "causal_downsampling"],
            true.into(),
            "encoder.causal_downsampling",
        ),
        (
            &["encoder", "conv_context_size"],
            "causal".into(),
            "encoder.conv_context_size",
        ),
        (&["encoder", "d_model"], (-5).into(), "encoder.d_model"),
        (&["encoder", "n_heads"], 7.into(), "encoder.n_heads"),
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
        (&["preprocessor", "features"], 80.into(), "encoder.feat_in"),
        (&["decoder", "vocab_size"], 159.into(), "joint.num_classes"),
        (&["joint", "num_extra_outputs"], 4.into(), "joint.num_extra_outputs"),
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
