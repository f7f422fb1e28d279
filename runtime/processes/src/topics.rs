//! Numbers of the topics that the runtime itself uses. Those of stages are below 2^31.

/// The first topic of the runtime.
const FIRST: u32 = 1 << 31;

/// Process 0 asks the others to take part: in the run, and in each region.
pub const INVITATIONS: u32 = FIRST;

/// Their answers.
pub const ANSWERS: u32 = FIRST + 1;

/// Topics of one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionTopics {
    /// What process 0 tells the others.
    pub orders: u32,
    /// What the others tell process 0.
    pub reports: u32,
    /// What timely's workers send each other.
    pub batches: u32,
}

impl RegionTopics {
    /// Of the region with this session number ([`super::Processes::new_session`]).
    pub fn of_session(session: u32) -> Self {
        let first = (FIRST + 2).saturating_add(session.saturating_mul(3));
        RegionTopics {
            orders: first,
            reports: first.saturating_add(1),
            batches: first.saturating_add(2),
        }
    }
}
