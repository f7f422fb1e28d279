//! The sections of a transducer in NeMo's `model_config.yaml`: prediction network, joint network, loss and decoding.

use serde_yaml::{Mapping, Value};

use super::read::{MAX_WIDTH, reduction};
use super::section::Section;
use super::write::put;
use super::{DecodingConfig, EncoderConfig, JointConfig, LossConfig, PredictionConfig, TransducerConfig};
use crate::{Error, Result};

/// Tokens without blank.
pub(super) fn vocab_size(root: &Section) -> Result<usize> {
    root.section("decoder")?.size("vocab_size", 1..=1_000_000)
}

pub(super) fn read(root: &Section, encoder: &EncoderConfig, vocab_size: usize) -> Result<TransducerConfig> {
    let prediction = prediction(&root.section("decoder")?)?;
    let loss = loss(root)?;
    let joint = joint(
        &root.section("joint")?,
        encoder,
        (&prediction, vocab_size),
        loss.durations.len(),
    )?;
    let greedy = root.section("decoding")?.section("greedy")?;
    let max_symbols = match greedy.optional_size("max_symbols", 1..=100_000)? {
        Some(n) => n,
        None => greedy.optional_size("max_symbols_per_step", 1..=100_000)?.unwrap_or(10),
    };
    Ok(TransducerConfig {
        prediction,
        joint,
        loss,
        decoding: DecodingConfig { max_symbols },
    })
}

fn prediction(section: &Section) -> Result<PredictionConfig> {
    section.only("normalization_mode", &[])?;
    section.only("random_state_sampling", &[false.into()])?;
    section.only("blank_as_pad", &[true.into()])?;
    let prednet = section.section("prednet")?;
    Ok(PredictionConfig {
        pred_hidden: prednet.size("pred_hidden", 1..=MAX_WIDTH)?,
        pred_rnn_layers: prednet.optional_size("pred_rnn_layers", 1..=64)?.unwrap_or(1),
        dropout: prednet.probability("dropout", 0.0)?,
    })
}

/// The durations of TDT, from the first place that has some.
fn durations(root: &Section) -> Result<Option<Vec<usize>>> {
    let places = [
        (root.section("loss")?.section("tdt_kwargs")?, "durations"),
        (root.section("model_defaults")?, "tdt_durations"),
        (root.section("decoding")?, "durations"),
    ];
    for (section, key) in &places {
        // NeMo writes an empty list where a transducer has none.
        if let Some(durations) = section.sizes(key)?.filter(|durations| !durations.is_empty()) {
            if durations.iter().any(|&d| d > 10_000)
                || durations.windows(2).any(|w| w[0] >= w[1])
                || durations.iter().all(|&d| d == 0)
            {
                return Err(Error::Config(format!(
                    "`{}` is {durations:?}, expected ascending frame counts with one above 0",
                    section.key(key)
                )));
            }
            return Ok(Some(durations));
        }
    }
    Ok(None)
}

fn joint(
    section: &Section,
    encoder: &EncoderConfig,
    (prediction, vocab_size): (&PredictionConfig, usize),
    durations: usize,
) -> Result<JointConfig> {
    let net = section.section("jointnet")?;
    net.only("activation", &["relu".into()])?;
    net.only("encoder_hidden", &[encoder.d_model.into()])?;
    net.only("pred_hidden", &[prediction.pred_hidden.into()])?;
    section.only("num_classes", &[vocab_size.into()])?;
    section.only("num_extra_outputs", &[durations.into()])?;
    Ok(JointConfig {
        joint_hidden: net.size("joint_hidden", 1..=MAX_WIDTH)?,
        dropout: net.probability("dropout", 0.0)?,
    })
}

/// Durations make a transducer TDT. Their absence makes it RNN-T, unless the loss is called TDT's.
fn loss(root: &Section) -> Result<LossConfig> {
    let section = root.section("loss")?;
    let names = ["tdt", "default", "tdt_pytorch", "rnnt", "warprnnt_numba", "warprnnt"];
    section.only("loss_name", &names.map(Value::from))?;
    let name = section.text("loss_name")?;
    let name = name.as_deref().unwrap_or("default");
    let reduction = reduction(root, "rnnt_reduction")?;
    if let Some(durations) = durations(root)? {
        if !name.starts_with("tdt") && name != "default" {
            return Err(Error::Config(format!(
                "`loss.loss_name` is `{name}`, but there are durations {durations:?}: expected tdt"
            )));
        }
        let tdt = section.section("tdt_kwargs")?;
        return Ok(LossConfig {
            durations,
            sigma: tdt.number("sigma", 0.0)?,
            omega: tdt.probability("omega", 0.0)?,
            fastemit_lambda: tdt.number("fastemit_lambda", 0.0)?,
            clamp: tdt.number("clamp", -1.0)?,
            reduction,
        });
    }
    if name.starts_with("tdt") {
        return Err(Error::Config(format!(
            "`loss.loss_name` is `{name}`, but there are no durations (`loss.tdt_kwargs.durations` or \
             `model_defaults.tdt_durations`)"
        )));
    }
    let plain = section.section("warprnnt_numba_kwargs")?;
    Ok(LossConfig {
        durations: Vec::new(),
        sigma: 0.0,
        omega: 0.0,
        fastemit_lambda: plain.number("fastemit_lambda", 0.0)?,
        clamp: plain.number("clamp", -1.0)?,
        reduction,
    })
}

/// Writes what [`read`] reads.
pub(super) fn write(
    transducer: &TransducerConfig,
    root: &mut Mapping,
    encoder: &EncoderConfig,
    vocab_size: usize,
    labels: &[String],
) {
    let TransducerConfig {
        prediction,
        joint,
        loss,
        decoding,
    } = transducer;
    put(root, &["decoder", "vocab_size"], vocab_size);
    put(root, &["decoder", "prednet", "pred_hidden"], prediction.pred_hidden);
    put(
        root,
        &["decoder", "prednet", "pred_rnn_layers"],
        prediction.pred_rnn_layers,
    );
    put(root, &["decoder", "prednet", "dropout"], prediction.dropout);
    put(root, &["joint", "num_classes"], vocab_size);
    if !transducer.is_rnnt() {
        put(root, &["joint", "num_extra_outputs"], loss.durations.len());
    }
    put(root, &["joint", "jointnet", "joint_hidden"], joint.joint_hidden);
    put(root, &["joint", "jointnet", "activation"], "relu");
    put(root, &["joint", "jointnet", "dropout"], joint.dropout);
    put(root, &["joint", "jointnet", "encoder_hidden"], encoder.d_model);
    put(root, &["joint", "jointnet", "pred_hidden"], prediction.pred_hidden);
    if !labels.is_empty() {
        put(root, &["joint", "vocabulary"], labels);
        put(root, &["labels"], labels);
    }
    put(root, &["model_defaults", "enc_hidden"], encoder.d_model);
    put(root, &["model_defaults", "pred_hidden"], prediction.pred_hidden);
    put(root, &["model_defaults", "joint_hidden"], joint.joint_hidden);
    put(root, &["rnnt_reduction"], loss.reduction.name());
    if transducer.is_rnnt() {
        put(root, &["loss", "loss_name"], "default");
        let kwargs = "warprnnt_numba_kwargs";
        put(root, &["loss", kwargs, "fastemit_lambda"], loss.fastemit_lambda);
        put(root, &["loss", kwargs, "clamp"], loss.clamp);
    } else {
        put(root, &["model_defaults", "tdt_durations"], &loss.durations);
        put(root, &["model_defaults", "num_tdt_durations"], loss.durations.len());
        put(root, &["loss", "loss_name"], "tdt");
        put(root, &["loss", "tdt_kwargs", "durations"], &loss.durations);
        put(root, &["loss", "tdt_kwargs", "sigma"], loss.sigma);
        put(root, &["loss", "tdt_kwargs", "omega"], loss.omega);
        put(root, &["loss", "tdt_kwargs", "fastemit_lambda"], loss.fastemit_lambda);
        put(root, &["loss", "tdt_kwargs", "clamp"], loss.clamp);
        put(root, &["decoding", "model_type"], "tdt");
        put(root, &["decoding", "durations"], &loss.durations);
    }
    put(root, &["decoding", "greedy", "max_symbols"], decoding.max_symbols);
}
