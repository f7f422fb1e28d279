//! The parts of a model, whose gradients become complete one after the other in a backward pass.

use crate::parameters::{Gradients, Parameters};

/// Parameters whose gradients are complete together. Ordered as the backward pass completes them, but for layers, of
/// which it completes the last one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// The joint network, and the CTC head where there is one.
    Heads,
    Prediction,
    /// A layer of the encoder, counted from its input.
    Layer(usize),
    /// Everything of the encoder before its layers.
    Subsampling,
}

impl Part {
    /// The part to which a parameter belongs, by its name, such as `encoder.layers.3.norm_out.weight`.
    pub fn of(name: &str) -> Part {
        if let Some(rest) = name.strip_prefix("encoder.layers.") {
            let number = rest.split('.').next().and_then(|number| number.parse().ok());
            Part::Layer(number.unwrap_or(0))
        } else if name.starts_with("encoder.") {
            Part::Subsampling
        } else if name.starts_with("decoder.") {
            Part::Prediction
        } else {
            Part::Heads
        }
    }

    /// All parts of a model with so many encoder layers, in the order in which a backward pass completes them.
    pub fn in_order(layers: usize) -> Vec<Part> {
        [Part::Heads, Part::Prediction]
            .into_iter()
            .chain((0..layers).rev().map(Part::Layer))
            .chain([Part::Subsampling])
            .collect()
    }

    /// The parts of an encoder with so many layers, in the order in which it uses them.
    pub fn of_encoder(layers: usize) -> impl Iterator<Item = Part> {
        [Part::Subsampling].into_iter().chain((0..layers).map(Part::Layer))
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Part::Heads => write!(f, "the joint network"),
            Part::Prediction => write!(f, "the prediction network"),
            Part::Layer(number) => write!(f, "encoder layer {number}"),
            Part::Subsampling => write!(f, "sub-sampling"),
        }
    }
}

/// Follows a training pass through the parts of a model.
pub trait Follow {
    /// A part's parameters are about to be read, for the first time in this pass. Until this returns they may be changed in
    /// place.
    fn needed(&mut self, part: Part, parameters: &Parameters);

    /// The gradients of a part are complete, and can be taken out of the rest and sent on, or used, while the backward pass
    /// goes on below. The part's parameters are not read again in this pass and may be changed in place.
    fn finished(&mut self, part: Part, gradients: &mut Gradients, parameters: &Parameters);
}

/// Only wants to know what is finished.
impl<F: FnMut(Part, &mut Gradients, &Parameters)> Follow for F {
    fn needed(&mut self, _: Part, _: &Parameters) {}

    fn finished(&mut self, part: Part, gradients: &mut Gradients, parameters: &Parameters) {
        self(part, gradients, parameters);
    }
}
