//! Tensors of several parameters that are the parts of one: a product with all of them is one product.

use candle_core::{Tensor, TensorId};

use crate::error::Result;
use crate::parameters::ParameterId;

#[derive(Clone, Debug)]
struct Stack {
    ids: Vec<ParameterId>,
    whole: Tensor,
    parts: Vec<TensorId>,
}

/// The stacks of some tensors by parameter, as long as these are the parts that they were.
#[derive(Clone, Debug, Default)]
pub struct Stacks(Vec<Stack>);

impl Stacks {
    /// Cuts a tensor into equal parts along its first dimension, one for each parameter. They share its storage.
    pub fn cut(&mut self, ids: &[ParameterId], whole: Tensor) -> Result<Vec<Tensor>> {
        let parts = whole.chunk(ids.len(), 0)?;
        self.note(ids, whole, &parts);
        Ok(parts)
    }

    /// Notes that these tensors, one for each parameter, are the parts of another and share its storage.
    pub fn note(&mut self, ids: &[ParameterId], whole: Tensor, parts: &[Tensor]) {
        ids.iter().for_each(|&id| self.forget(id));
        self.0.push(Stack {
            ids: ids.to_vec(),
            whole,
            parts: parts.iter().map(Tensor::id).collect(),
        });
    }

    /// The tensor whose parts those of these parameters are, if they still are. `now` tells which one a parameter has.
    pub fn whole(&self, ids: &[ParameterId], now: impl Fn(ParameterId) -> Option<TensorId>) -> Option<&Tensor> {
        let stack = self.0.iter().find(|stack| stack.ids == ids)?;
        let same = ids.iter().zip(&stack.parts).all(|(&id, &part)| now(id) == Some(part));
        same.then_some(&stack.whole)
    }

    /// Forgets a stack, so that it is held no longer than its parts.
    pub fn forget(&mut self, id: ParameterId) {
        self.0.retain(|stack| !stack.ids.contains(&id));
    }

    /// Forgets all of them.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}
