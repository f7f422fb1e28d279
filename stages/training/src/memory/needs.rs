//! Bytes of memory by what they are for.

use super::BatchShape;

/// Bytes that one rank needs: on its device, but for `host`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemoryNeeds {
    pub parameters: u64,
    /// All gradients of this rank's share at the end of the backward pass; of one parameter group where they are
    /// applied at once.
    pub gradients: u64,
    /// The optimizer's moments of this rank's share.
    pub optimizer: u64,
    /// Averaged weights; on the first rank.
    pub average: u64,
    /// What the encoder's layers and its sub-sampling keep for the backward pass.
    pub activations: u64,
    /// The prediction and the joint network with the loss.
    pub joint: u64,
    /// The workspace of one layer while it is computed.
    pub workspace: u64,
    /// The most that a step needs at once beside parameters, optimizer and average. Less than the sum of gradients,
    /// activations, joint and workspace, which are not all there at the same time.
    pub step: u64,
    /// The most that evaluation between two steps needs beside parameters, optimizer and average.
    pub evaluation: u64,
    /// A copy of parameters, optimizer state and average from which a checkpoint is written while training goes on; on
    /// the first rank, of all ranks.
    pub checkpoint: u64,
    /// In host memory, where the device has a memory of its own.
    pub host: HostMemoryNeeds,
    /// The worst micro-batch.
    pub shape: Option<BatchShape>,
}

/// Bytes that one rank needs in host memory beside a device that has its own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostMemoryNeeds {
    /// The copy of the parameters that is updated in host memory.
    pub parameters: u64,
    /// Sums of this rank's share.
    pub gradients: u64,
    /// The optimizer's moments of this rank's share.
    pub optimizer: u64,
    /// The copy from which a checkpoint is written; on the first rank, of all ranks.
    pub checkpoint: u64,
}

impl HostMemoryNeeds {
    pub fn total(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer + self.checkpoint
    }
}

impl MemoryNeeds {
    /// Most bytes at once on the first rank's device: what is always there, and the peak of a step or of an evaluation.
    pub fn total(&self) -> u64 {
        self.parameters + self.optimizer + self.average + self.checkpoint + self.step.max(self.evaluation)
    }

    /// The same of any other rank. While averaged weights are evaluated, it has a copy of them.
    pub fn of_another(&self) -> u64 {
        let copy = if self.average > 0 { self.parameters } else { 0 };
        let evaluation = if self.evaluation > 0 { self.evaluation + copy } else { 0 };
        self.parameters + self.optimizer + self.step.max(evaluation)
    }

    /// Most bytes at once of so many ranks that share one memory.
    pub fn of_ranks(&self, ranks: u32) -> u64 {
        self.total() + u64::from(ranks.saturating_sub(1)) * self.of_another()
    }

    /// Most bytes at once in the host memory of so many ranks that have devices of their own.
    pub fn of_host(&self, ranks: u32) -> u64 {
        let other = self.host.total() - self.host.checkpoint;
        self.host.total() + u64::from(ranks.saturating_sub(1)) * other
    }
}
