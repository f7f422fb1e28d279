//! Converts a prediction and a joint network of different widths to a common width, for formats that have only one. The
//! narrower network gets units whose weights are all zero: such a unit of the LSTM stays at zero, such a unit of the
//! joint network adds zero to every output, so the model's results do not change.

use super::TensorEntry;
use crate::Result;
use crate::config::{ModelConfig, TransducerConfig};

/// Gates of an LSTM, whose rows are one after the other.
const GATES: usize = 4;

/// Widths of the prediction and the joint network; 0 where there are none.
fn widths(config: &ModelConfig) -> (usize, usize) {
    let of = |transducer: &TransducerConfig| (transducer.prediction.pred_hidden, transducer.joint.joint_hidden);
    config.transducer.as_ref().map_or((0, 0), of)
}

/// The width that both networks have then.
pub(super) fn width(config: &ModelConfig) -> usize {
    let (prediction, joint) = widths(config);
    prediction.max(joint)
}

/// A note for the user; none where the widths are equal.
pub(super) fn note(config: &ModelConfig) -> Option<String> {
    let (prediction, joint) = widths(config);
    let (narrow, was) = match prediction.cmp(&joint) {
        std::cmp::Ordering::Equal => return None,
        std::cmp::Ordering::Less => ("prediction", prediction),
        std::cmp::Ordering::Greater => ("joint", joint),
    };
    Some(format!(
        "the {narrow} network is written with a width of {} instead of {was}, the same as the other's, since transformers \
         has one width for both: all weights of the units added are zero, so the model's outputs are the same",
        width(config)
    ))
}

/// The tensor in a model of one width; one that is wide enough is given as it is.
pub(super) fn widened(entry: &TensorEntry, config: &ModelConfig) -> Result<TensorEntry> {
    let (width, (prediction, joint)) = (width(config), widths(config));
    let (prediction, joint) = (width - prediction, width - joint);
    let name = entry.name.as_str();
    let lstm = name.strip_prefix("decoder.prediction.dec_rnn.lstm.");
    // Padding of each dimension; for an LSTM's rows, of each gate.
    let grows: &[usize] = match (name, lstm) {
        (_, Some(part)) if part.starts_with("weight_") => &[prediction, prediction],
        (_, Some(_)) => &[prediction],
        ("decoder.prediction.embed.weight", _) => &[0, prediction],
        ("joint.pred.weight", _) => &[joint, prediction],
        ("joint.enc.weight", _) => &[joint, 0],
        ("joint.pred.bias" | "joint.enc.bias", _) => &[joint],
        (other, _) if other.starts_with("joint.joint_net.") && other.ends_with(".weight") => &[0, joint],
        _ => &[],
    };
    if grows.iter().all(|&more| more == 0) {
        return Ok(entry.clone());
    }
    let mut tensor = entry.load()?;
    let mut shape = entry.shape().to_vec();
    let gates = usize::from(lstm.is_some());
    if lstm.is_some() {
        let mut apart = shape.clone();
        apart[0] /= GATES;
        apart.insert(0, GATES);
        tensor = tensor.reshape(apart)?;
    }
    for (dimension, &more) in grows.iter().enumerate() {
        tensor = tensor.pad_with_zeros(dimension + gates, 0, more)?;
        shape[dimension] += more * if dimension == 0 && lstm.is_some() { GATES } else { 1 };
    }
    let tensor = tensor.reshape(shape)?.contiguous()?;
    Ok(TensorEntry::in_memory(entry.name.clone(), tensor))
}
