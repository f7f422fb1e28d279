//! The least time that a training step takes on a card: floating-point operations and bytes of each part of the step, and
//! what the card is said to do of them in a second (the roofline model: Williams, Waterman, Patterson, "Roofline", 2009).
//!
//! A step is one micro-batch, all of whose clips have the same length, forward and backward, with an encoder that is
//! trained, and one update. Operations are those of matrix products, `2 m k n` for (m, k) times (k, n); the rest are few and
//! wait for memory. Bytes are those that kernels read and write once each, as they are launched today: a product reads its
//! factors and writes its result, a pass over a tensor reads and writes it. What stays in a cache meanwhile is not taken
//! into account, but that the recurrent weights of the LSTM are read once.

mod cards;
mod parts;
#[cfg(test)]
mod tests;
mod work;

pub use cards::{CARDS, Card};
pub use parts::{Part, parameter_counts, parts};
pub use work::{Flops, Work};

/// What bounds a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    Arithmetic,
    Memory,
    Link,
}

/// The least time of a part, and what bounds it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LeastTime {
    pub seconds: f64,
    pub bound: Bound,
}

/// The number types that products are computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arithmetic {
    /// Products with matrices of linear layers, in the joint network's last layer and within attention are in bf16, not in f32.
    pub matrices_in_bf16: bool,
    /// Products in f32 are computed with factors rounded to TF32.
    pub tf32: bool,
}

impl Card {
    /// The least time of some work: of arithmetic, memory and link whichever takes longest, each at its published rate and
    /// all at once.
    pub fn least_time(&self, work: &Work, arithmetic: Arithmetic) -> LeastTime {
        let single = if arithmetic.tf32 { self.tf32 } else { self.f32 };
        let matrices = if arithmetic.matrices_in_bf16 { self.bf16 } else { single };
        let flops = work.model + work.again;
        let bounds = [
            (flops.matrices / matrices + flops.others / single, Bound::Arithmetic),
            (work.bytes / self.memory, Bound::Memory),
            (work.exchanged / self.link, Bound::Link),
        ];
        let [first, rest @ ..] = bounds;
        let (seconds, bound) = rest
            .into_iter()
            .fold(first, |most, next| if next.0 > most.0 { next } else { most });
        LeastTime { seconds, bound }
    }
}
