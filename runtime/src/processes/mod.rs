//! Several processes, on one machine or several, that take part in one run.
//!
//! Process 0 runs the pipeline: it plans, commits and holds the lock of the state directory. The others join it, do what
//! a stage asks of them by messages, and end when it says so, with its exit code. Every two processes are connected, so
//! messages go straight from one to the other. What a message means is for the stage that sends it to say; the runtime
//! carries it, notices whoever dies or falls silent, and names that process to all.
//!
//! Whoever connects must speak this protocol and name the digest of the same pipeline and settings. That keeps two runs
//! apart; it is no protection against an attacker, since nothing is encrypted.

mod frame;
mod group;
mod link;
mod peer;
mod pending;
mod rendezvous;
mod state;
#[cfg(test)]
mod tests;

pub use group::Processes;
pub use peer::{End, Loss, Outcome, Payload, Peer};
pub use rendezvous::{Address, Join, JoinError, join};
pub(crate) use state::SignalFlags;
