//! Several processes, on one machine or several, that take part in one run.
//!
//! Process 0 runs the pipeline: it plans and holds the lock of the state directory. The others join it, compute and commit
//! their share of the partitions, execute a stage's messages, and end with process 0, with its exit code. All pairs of
//! processes are connected, so messages are sent directly. Stages define the meaning of their messages; the runtime
//! transports them, detects processes that die or stop responding, and reports these to all.
//!
//! A connecting process must use this protocol, prove that it knows the secret of the run, and have the same pipeline and
//! settings. Without a secret that only separates runs. Nothing is encrypted, and what is sent after the handshake of a
//! connection is not authenticated: whoever can change it on its way is not kept out.

mod arrivals;
mod connect;
mod follow;
mod frame;
mod greeting;
mod group;
mod handshake;
#[cfg(test)]
mod handshake_tests;
mod joining;
mod lead;
mod link;
mod listeners;
mod peer;
mod pending;
mod rendezvous;
mod settings;
mod state;
#[cfg(test)]
mod tests;
mod topics;

pub use group::Processes;
pub use handshake::SharedSecret;
pub use joining::{Address, Join, JoinError, JoinMessage};
pub use peer::{End, Loss, Outcome, Payload, Peer};
pub use rendezvous::join;
pub use state::SignalFlags;
pub use topics::{ANSWERS, INVITATIONS, RegionTopics};
