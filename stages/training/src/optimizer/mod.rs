//! AdamW and gradient clipping, as in torch and NeMo; with moments in 32 or in 8 bits.
//!
//! NeMo uses one parameter group: weight decay acts on biases, norms and embeddings too. A parameter
//! without a gradient (frozen, or untouched by the loss) is left as it is, decay included.

mod adamw;
mod gradient_norm;
mod state_file;
#[cfg(test)]
mod tests;

pub use adamw::{AdamW, AdamWConfig};
pub use flow_kernels::adamw::moment_bytes;
pub use gradient_norm::{clip_factor, squared_norm};
