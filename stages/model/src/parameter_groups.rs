//! Groups of parameters whose gradients are complete at the same time in a backward pass.

use std::collections::BTreeMap;
use std::fmt;

use candle_core::Tensor;

use crate::heads::ctc;
use crate::prompt;
use crate::{Error, Result};
use flow_nn::parameters::{Gradients, ParameterId, Parameters};

/// A group of parameters whose gradients are complete at the same time. The order is that of the backward pass, but for
/// the layers of the encoder, of which the backward pass completes the last one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ParameterGroup {
    /// The last layers of the heads: the joint network, the CTC head, or both.
    Heads,
    /// The prediction network.
    Prediction,
    /// A layer of the encoder; the one next to its input is 0.
    Layer(usize),
    /// The encoder below its layers.
    Subsampling,
}

impl ParameterGroup {
    /// The group of a parameter, by its name in NeMo's state dict, such as `encoder.layers.3.norm_out.weight`.
    ///
    /// # Errors
    /// Where the name belongs to no module of the model, or has no layer number.
    pub fn from_name(name: &str) -> Result<ParameterGroup> {
        let unknown = || Error::ParameterGroup(name.to_string());
        if let Some(rest) = name.strip_prefix("encoder.layers.") {
            let (number, _) = rest.split_once('.').ok_or_else(unknown)?;
            let layer: usize = number.parse().map_err(|_| unknown())?;
            // Refuses `+3` and `03`: names are canonical.
            if layer.to_string() != number {
                return Err(unknown());
            }
            Ok(ParameterGroup::Layer(layer))
        } else if name.starts_with("encoder.") {
            Ok(ParameterGroup::Subsampling)
        } else if name.starts_with("joint.")
            || name.starts_with(ctc::AUXILIARY)
            || name.starts_with(ctc::ALONE)
            || name.starts_with(prompt::NAME)
        {
            Ok(ParameterGroup::Heads)
        } else if name.starts_with("decoder.") {
            Ok(ParameterGroup::Prediction)
        } else {
            Err(unknown())
        }
    }

    /// All groups of a model with `layers` encoder layers, in the order in which a backward pass completes them.
    pub fn backward_order(layers: usize) -> Vec<ParameterGroup> {
        [ParameterGroup::Heads, ParameterGroup::Prediction]
            .into_iter()
            .chain((0..layers).rev().map(ParameterGroup::Layer))
            .chain([ParameterGroup::Subsampling])
            .collect()
    }

    /// The groups of an encoder with `layers` layers, in the order in which a forward pass reads them.
    pub fn encoder_forward_order(layers: usize) -> impl Iterator<Item = ParameterGroup> {
        [ParameterGroup::Subsampling]
            .into_iter()
            .chain((0..layers).map(ParameterGroup::Layer))
    }
}

impl fmt::Display for ParameterGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ParameterGroup::Heads => write!(f, "the joint network or CTC head"),
            ParameterGroup::Prediction => write!(f, "the prediction network"),
            ParameterGroup::Layer(number) => write!(f, "encoder layer {number}"),
            ParameterGroup::Subsampling => write!(f, "sub-sampling"),
        }
    }
}

/// The trainable parameters by group, in the order in which the model declares them.
///
/// # Errors
/// Where a name belongs to no group ([`ParameterGroup::from_name`]).
pub fn trainable_groups(parameters: &Parameters) -> Result<BTreeMap<ParameterGroup, Vec<ParameterId>>> {
    let mut groups: BTreeMap<ParameterGroup, Vec<ParameterId>> = BTreeMap::new();
    for (id, parameter) in parameters.iter().filter(|(_, parameter)| parameter.trainable) {
        let group = ParameterGroup::from_name(&parameter.name)?;
        groups.entry(group).or_default().push(id);
    }
    Ok(groups)
}

/// Hooks into the forward and the backward pass of a micro-batch, called for each parameter group.
pub trait PassObserver {
    /// The parameters of a group are about to be read, for the first time in this pass. Until this returns they may be
    /// changed in place.
    fn before_forward(&mut self, group: ParameterGroup, parameters: &Parameters);

    /// The gradients of a group are complete. They may be taken out of `gradients`, and sent or applied, while the
    /// backward pass goes on. The parameters of the group are not read again in this pass and may be changed in place.
    fn gradients_complete(&mut self, group: ParameterGroup, gradients: &mut Gradients, parameters: &Parameters);

    /// What all ranks have for the batch normalisation of an encoder layer, (ranks, n) in the order of the ranks, where this
    /// one has `own`, (n). Called with [`AllRanks`](flow_nn::layers::convolution::BatchNorm::AllRanks) alone, once for each layer in the forward pass and once in
    /// the backward pass. With one rank that is `own`.
    ///
    /// # Errors
    /// Where a rank failed; the pass is then given up.
    fn gather_statistics(
        &mut self,
        _layer: usize,
        _pass: StatisticsPass,
        own: &Tensor,
        _parameters: &Parameters,
    ) -> flow_kernels::Result<Tensor> {
        Ok(own.unsqueeze(0)?)
    }
}

/// In which pass statistics are gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StatisticsPass {
    /// Means and variances.
    Forward,
    /// Sums of gradients.
    Backward,
}

/// A closure observes complete gradients only.
impl<F: FnMut(ParameterGroup, &mut Gradients, &Parameters)> PassObserver for F {
    fn before_forward(&mut self, _: ParameterGroup, _: &Parameters) {}

    fn gradients_complete(&mut self, group: ParameterGroup, gradients: &mut Gradients, parameters: &Parameters) {
        self(group, gradients, parameters);
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::*;

    #[test]
    fn a_name_gives_its_group_or_an_error() {
        for (name, group) in [
            ("encoder.layers.0.norm_out.weight", ParameterGroup::Layer(0)),
            ("encoder.layers.17.conv.batch_norm.bias", ParameterGroup::Layer(17)),
            ("encoder.pre_encode.out.weight", ParameterGroup::Subsampling),
            ("decoder.prediction.embed.weight", ParameterGroup::Prediction),
            ("joint.pred.weight", ParameterGroup::Heads),
            ("ctc_decoder.decoder_layers.0.bias", ParameterGroup::Heads),
            ("decoder.decoder_layers.0.weight", ParameterGroup::Heads),
        ] {
            assert_eq!(ParameterGroup::from_name(name).unwrap(), group, "{name}");
        }
        for name in [
            "encoder.layers.x.norm_out.weight",
            "encoder.layers..norm_out.weight",
            "encoder.layers.+3.norm_out.weight",
            "encoder.layers.03.norm_out.weight",
            "encoder.layers.-1.norm_out.weight",
            "encoder.layers.99999999999999999999999.norm_out.weight",
            "encoder.layers.3",
            "encoders.layers.3.norm_out.weight",
            "p0",
            "",
        ] {
            let error = ParameterGroup::from_name(name).unwrap_err().to_string();
            assert!(error.contains(&format!("`{name}`")), "{error}");
        }
    }

    #[test]
    fn a_trainable_parameter_with_an_unreadable_name_is_in_no_group() {
        let tensor = || Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
        let mut parameters = Parameters::new(DType::F32, Device::Cpu);
        let first = parameters.add("encoder.layers.0.norm_out.weight", tensor(), true);
        // A buffer has no gradient, whatever its name.
        parameters.add("encoder.layers.x.running_mean", tensor(), false);
        let groups = trainable_groups(&parameters).unwrap();
        assert_eq!(
            groups.into_iter().collect::<Vec<_>>(),
            [(ParameterGroup::Layer(0), vec![first])]
        );
        parameters.add("encoder.layers.x.norm_out.weight", tensor(), true);
        let error = trainable_groups(&parameters).unwrap_err().to_string();
        assert!(error.contains("encoder.layers.x.norm_out.weight"), "{error}");
    }
}
