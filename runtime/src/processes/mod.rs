//! Several processes, on one machine or several, that take part in one run.
//!
//! Process 0 runs the pipeline: it plans and holds the lock of the state directory. The others join it, compute and commit
//! their share of the partitions, execute a stage's messages, and end with process 0, with its exit code. All pairs of
//! processes are connected, so messages are sent directly. Stages define the meaning of their messages; the runtime
//! transports them, detects processes that die or stop responding, and reports these to all.
//!
//! A connecting process must use this protocol and send the digest of the same pipeline and settings. That separates
//! runs; it is no protection against an attacker, since nothing is encrypted.

mod frame;
mod group;
mod link;
mod peer;
mod pending;
mod rendezvous;
mod state;
#[cfg(test)]
mod tests;
mod topics;

pub use group::Processes;
pub use peer::{End, Loss, Outcome, Payload, Peer};
pub use rendezvous::{Address, Join, JoinError, join};
pub(crate) use state::SignalFlags;
pub(crate) use topics::{ANSWERS, INVITATIONS, RegionTopics};
