//! How far sources may read ahead of what is written.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// What the sources of a region have given that is not written yet, and how much of it there may be.
pub(crate) struct InFlight {
    partitions: u64,
    bytes: Option<u64>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By ordinal.
    given: BTreeMap<u64, u64>,
    /// Partitions that are being read.
    reading: u64,
    /// The largest that was read.
    largest: u64,
}

impl InFlight {
    /// At most so many partitions, and so many bytes where a number is given. Bytes never hold back the oldest partition, or
    /// nothing would go on, nor the one after it, which is read while that is worked on.
    pub fn new(partitions: u64, bytes: Option<u64>) -> Self {
        InFlight {
            partitions,
            bytes,
            state: Mutex::default(),
        }
    }

    /// Whether a partition may be read now, where all before `oldest` are written. Whoever is told so reads it, and then
    /// calls [`InFlight::gave`].
    ///
    /// What is being read counts as much as the largest partition so far.
    pub fn take(&self, ordinal: u64, oldest: u64) -> bool {
        if ordinal.saturating_sub(oldest) >= self.partitions {
            return false;
        }
        let Some(most) = self.bytes else {
            return true;
        };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.given = state.given.split_off(&oldest);
        let expected = state.given.values().sum::<u64>() + (state.reading + 1) * state.largest;
        let may = ordinal <= oldest + 1 || state.largest > 0 && expected <= most;
        state.reading += u64::from(may);
        may
    }

    /// A partition was read, and was so large.
    pub fn gave(&self, ordinal: u64, bytes: u64) {
        if self.bytes.is_none() {
            return;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.reading = state.reading.saturating_sub(1);
        state.largest = state.largest.max(bytes);
        *state.given.entry(ordinal).or_default() += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_counted_from_the_oldest() {
        let flight = InFlight::new(3, None);
        assert!(flight.take(5, 5) && flight.take(7, 5) && !flight.take(8, 5) && flight.take(8, 6));
    }

    #[test]
    fn bytes_hold_back_all_but_the_two_oldest() {
        let flight = InFlight::new(100, Some(350));
        assert!(flight.take(0, 0) && flight.take(1, 0));
        assert!(!flight.take(2, 0), "nobody knows yet how large one is");
        flight.gave(0, 100);
        // 100 there, 100 being read, 100 to come.
        assert!(flight.take(2, 0));
        assert!(!flight.take(3, 0), "while two are being read");
        flight.gave(1, 100);
        flight.gave(2, 100);
        assert!(!flight.take(3, 0));
        assert!(flight.take(3, 1), "0 is written");
        flight.gave(3, 1000);
        assert!(!flight.take(4, 2) && !flight.take(9, 3));
        assert!(flight.take(4, 3), "the one after the oldest, however large");
        flight.gave(4, 10);
        assert!(!flight.take(6, 4), "another one as large as the largest does not fit");
        assert!(flight.take(5, 4));
    }
}
