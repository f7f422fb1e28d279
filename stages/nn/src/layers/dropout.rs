//! Dropout masks drawn from the mode of a forward pass.

use flow_kernels::noise::DropMask;

use crate::parameters::Mode;

/// A mask that drops with probability `p`; none when evaluating or if `p` is 0.
pub fn draw(p: f64, mode: &mut Mode) -> Option<DropMask> {
    match mode {
        Mode::Evaluate => None,
        Mode::Train(noise) => DropMask::draw(p, noise),
    }
}
