//! How far sources may read ahead of what is written.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What is in flight in a region: what its sources have given that is not written yet, and what the stages hold of it
/// beside that (rows between stages, rows and rejects that are to be written); and how much of it there may be.
pub(crate) struct InFlight {
    partitions: u64,
    bytes: Option<u64>,
    own: OwnPartitions,
    state: Mutex<InFlightState>,
}

/// Which partitions fall to this process, of those that a region has on all processes of its dataflow: those of workers
/// `first` to `first + workers` of `all`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnPartitions {
    pub first: u64,
    pub workers: u64,
    pub all: u64,
}

impl OwnPartitions {
    fn has(self, ordinal: u64) -> bool {
        let worker = ordinal % self.all.max(1);
        worker >= self.first && worker < self.first + self.workers
    }
}

#[derive(Default)]
struct InFlightState {
    /// By ordinal, until it is written.
    given: BTreeMap<u64, u64>,
    /// By ordinal, the bytes of all [`MemoryReservation`]s of the partition that were not dropped.
    reserved: BTreeMap<u64, u64>,
    /// Partitions that are being read.
    reading: u64,
    /// The most that was in flight of one partition.
    largest: u64,
}

impl InFlightState {
    fn total(&self) -> u64 {
        self.given.values().sum::<u64>() + self.reserved.values().sum::<u64>()
    }

    fn measure(&mut self, ordinal: u64) {
        let of = |bytes: &BTreeMap<u64, u64>| bytes.get(&ordinal).copied().unwrap_or_default();
        self.largest = self.largest.max(of(&self.given) + of(&self.reserved));
    }
}

/// Memory that a stage, or an edge between two stages, uses for one partition. Dropping it frees the amount.
pub(crate) struct MemoryReservation {
    flight: Arc<InFlight>,
    ordinal: u64,
    bytes: u64,
}

impl MemoryReservation {
    pub fn new(flight: &Arc<InFlight>, ordinal: u64, bytes: u64) -> Self {
        let mut reserved = MemoryReservation {
            flight: Arc::clone(flight),
            ordinal,
            bytes: 0,
        };
        reserved.resize(bytes);
        reserved
    }

    /// Sets the amount to `bytes`.
    pub fn resize(&mut self, bytes: u64) {
        if bytes == self.bytes {
            return;
        }
        let mut state = self.flight.lock();
        let sum = state.reserved.entry(self.ordinal).or_default();
        *sum = (*sum + bytes).saturating_sub(self.bytes);
        if *sum == 0 {
            state.reserved.remove(&self.ordinal);
        }
        self.bytes = bytes;
        state.measure(self.ordinal);
    }
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        self.resize(0);
    }
}

impl InFlight {
    /// Allows at most `partitions`, and at most `bytes` where given. The limit of bytes never holds back the oldest
    /// partition of this process, or the run would stop, nor the one after it, which is read while the oldest is worked on.
    pub fn new(partitions: u64, bytes: Option<u64>, own: OwnPartitions) -> Self {
        InFlight {
            partitions,
            bytes,
            own,
            state: Mutex::default(),
        }
    }

    /// Whether the partition `ordinal` may be read now; all before `oldest` are written. If true, the caller reads it
    /// and then calls [`InFlight::gave`].
    ///
    /// A partition that is being read counts as much as the largest one so far.
    pub fn take(&self, ordinal: u64, oldest: u64) -> bool {
        if ordinal.saturating_sub(oldest) >= self.partitions {
            return false;
        }
        let Some(most) = self.bytes else {
            return true;
        };
        let mut state = self.lock();
        state.given = state.given.split_off(&oldest);
        let expected = state.total() + (state.reading + 1) * state.largest;
        let before = (oldest..ordinal).filter(|before| self.own.has(*before)).take(2).count();
        let may = before < 2 || state.largest > 0 && expected <= most;
        state.reading += u64::from(may);
        may
    }

    /// Notes that a partition was read and takes `bytes`.
    pub fn gave(&self, ordinal: u64, bytes: u64) {
        if self.bytes.is_none() {
            return;
        }
        let mut state = self.lock();
        state.reading = state.reading.saturating_sub(1);
        *state.given.entry(ordinal).or_default() += bytes;
        state.measure(ordinal);
    }

    fn lock(&self) -> MutexGuard<'_, InFlightState> {
        // A panic while the sums change leaves them slightly wrong at worst, which only shifts the limit.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: OwnPartitions = OwnPartitions {
        first: 0,
        workers: 1,
        all: 1,
    };

    #[test]
    fn partitions_are_counted_from_the_oldest() {
        let flight = InFlight::new(3, None, ALL);
        assert!(flight.take(5, 5) && flight.take(7, 5) && !flight.take(8, 5) && flight.take(8, 6));
    }

    #[test]
    fn bytes_hold_back_all_but_the_two_oldest() {
        let flight = InFlight::new(100, Some(350), ALL);
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

    /// Process 1 of 3 with two workers each has the partitions 2, 3, 8, 9, ...: it does not wait for those of others.
    #[test]
    fn the_two_oldest_are_those_of_this_process() {
        let own = OwnPartitions {
            first: 2,
            workers: 2,
            all: 6,
        };
        let flight = InFlight::new(100, Some(350), own);
        assert!(flight.take(2, 0) && flight.take(3, 0));
        assert!(!flight.take(8, 0), "nobody knows yet how large one is");
        flight.gave(2, 100);
        flight.gave(3, 100);
        assert!(flight.take(8, 0));
        flight.gave(8, 100);
        assert!(!flight.take(9, 0));
        assert!(flight.take(9, 3), "2 is written");
        let alone = InFlight::new(100, Some(350), ALL);
        assert!(alone.take(0, 0) && alone.take(1, 0) && !alone.take(2, 0));
    }

    #[test]
    fn what_stages_hold_counts_until_they_let_it_go() {
        let flight = Arc::new(InFlight::new(100, Some(350), ALL));
        for ordinal in 0..2 {
            assert!(flight.take(ordinal, 0));
            flight.gave(ordinal, 50);
        }
        let mut collected = MemoryReservation::new(&flight, 1, 60);
        // 50 and 110 there, 110 to come.
        assert!(flight.take(2, 0));
        flight.gave(2, 50);
        collected.resize(200);
        assert!(!flight.take(3, 0), "350 there, 250 to come");
        let between = MemoryReservation::new(&flight, 0, 10);
        collected.resize(30);
        assert!(!flight.take(3, 0), "one may become as large as the largest was");
        drop((collected, between));
        assert!(flight.take(3, 3));
        assert!(flight.lock().reserved.is_empty());
    }
}
