//! The parts of a pass over a micro-batch, as far as a [`PassObserver`] can tell them apart: for reports of where time goes,
//! and what is launched.

use std::fmt;

use crate::parameter_groups::{ParameterGroup, PassObserver};
use flow_nn::parameters::{Gradients, Parameters};

/// A part of the forward and backward pass over a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PassPart {
    /// Log-mel features, SpecAugment, and their way to the device.
    Features,
    SubsamplingForward,
    /// One layer of the encoder.
    LayerForward,
    PredictionForward,
    /// The joint network and the loss, the CTC head too, forward and backward.
    JointAndLoss,
    PredictionBackward,
    LayerBackward,
    SubsamplingBackward,
}

impl fmt::Display for PassPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PassPart::Features => "features",
            PassPart::SubsamplingForward => "sub-sampling, forward",
            PassPart::LayerForward => "encoder layer, forward",
            PassPart::PredictionForward => "prediction network, forward",
            PassPart::JointAndLoss => "joint network and loss",
            PassPart::PredictionBackward => "prediction network, backward",
            PassPart::LayerBackward => "encoder layer, backward",
            PassPart::SubsamplingBackward => "sub-sampling, backward",
        })
    }
}

/// Calls `ended` at the end of each part of a pass in which the encoder is trained.
pub struct PartObserver<F> {
    ended: F,
    now: PassPart,
}

impl<F: FnMut(PassPart)> PartObserver<F> {
    /// For one pass.
    pub fn new(ended: F) -> Self {
        Self {
            ended,
            now: PassPart::Features,
        }
    }

    fn end(&mut self, next: PassPart) {
        (self.ended)(self.now);
        self.now = next;
    }
}

impl<F: FnMut(PassPart)> PassObserver for PartObserver<F> {
    fn before_forward(&mut self, group: ParameterGroup, _: &Parameters) {
        self.end(match group {
            ParameterGroup::Subsampling => PassPart::SubsamplingForward,
            ParameterGroup::Layer(_) => PassPart::LayerForward,
            ParameterGroup::Prediction => PassPart::PredictionForward,
            ParameterGroup::Heads => PassPart::JointAndLoss,
        });
    }

    fn gradients_complete(&mut self, group: ParameterGroup, _: &mut Gradients, _: &Parameters) {
        self.end(match group {
            ParameterGroup::Heads => PassPart::PredictionBackward,
            // Of an encoder without layers, this is the sub-sampling's.
            ParameterGroup::Prediction => PassPart::LayerBackward,
            ParameterGroup::Layer(0) => PassPart::SubsamplingBackward,
            ParameterGroup::Layer(_) => PassPart::LayerBackward,
            // What is left are the running statistics.
            ParameterGroup::Subsampling => PassPart::Features,
        });
    }
}
