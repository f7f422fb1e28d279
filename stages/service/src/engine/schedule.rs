//! Which windows go through a model next: start-time fair queueing over samples, with windows of similar length together.

use std::collections::{BTreeMap, VecDeque};

/// Windows whose lengths differ by no more than this (a second) are similar, however short.
const SIMILAR: u64 = 16_000;

/// Consecutive batches of live windows while recordings wait; then a batch of recordings follows.
const LIVE_IN_A_ROW: usize = 4;

/// Number of batches of recordings after the last live window that are kept short, so that the next live window does
/// not wait for long.
const SHORT_AFTER_LIVE: usize = 32;

/// Limits of batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Limits {
    /// Most samples of a batch, padding included; a longer window goes alone.
    pub batch: u64,
    /// Most samples of a batch while there are live sessions.
    pub beside_live: u64,
    /// Largest share of a batch that one job gets while others wait.
    pub share: f64,
}

/// A window to be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Item {
    Live(u64),
    Window { job: u64, index: usize },
}

/// Windows of jobs that wait.
///
/// Each job has a virtual start time, which grows by the samples of its decoded windows; a job that arrives (again)
/// starts at the present virtual time, which grows by all decoded samples divided by the number of jobs. The job with
/// the smallest start time provides the first window of a batch (Goyal, Vin and Cheng, "Start-time Fair Queuing", 1996,
/// with the virtual time of fair queueing, by which new jobs cannot starve old ones).
#[derive(Debug)]
pub(crate) struct Schedule {
    limits: Limits,
    jobs: BTreeMap<u64, Waiting>,
    live: VecDeque<(u64, u64)>,
    now: u64,
    live_in_a_row: usize,
    since_live: usize,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Index and samples.
    windows: VecDeque<(usize, u64)>,
    start: u64,
    given: u64,
}

/// A batch under construction.
struct Filling {
    items: Vec<Item>,
    longest: u64,
    shortest: u64,
    most: u64,
    given: BTreeMap<u64, u64>,
}

impl Filling {
    fn fits(&self, length: u64) -> bool {
        let (longest, shortest) = (self.longest.max(length), self.shortest.min(length));
        let padded = longest.saturating_mul(self.items.len() as u64 + 1);
        padded <= self.most && longest - shortest <= (longest / 2).max(SIMILAR)
    }

    fn add(&mut self, job: u64, index: usize, length: u64) {
        self.items.push(Item::Window { job, index });
        self.longest = self.longest.max(length);
        self.shortest = self.shortest.min(length);
        *self.given.entry(job).or_default() += length;
    }
}

impl Schedule {
    pub fn new(limits: Limits) -> Self {
        Schedule {
            limits,
            jobs: BTreeMap::new(),
            live: VecDeque::new(),
            now: 0,
            live_in_a_row: 0,
            since_live: SHORT_AFTER_LIVE,
        }
    }

    /// A window of this many samples of a job.
    pub fn push(&mut self, job: u64, index: usize, samples: u64) {
        let waiting = self.jobs.entry(job).or_default();
        if waiting.windows.is_empty() {
            waiting.start = waiting.start.max(self.now);
        }
        waiting.windows.push_back((index, samples));
    }

    /// A window of a live session.
    pub fn push_live(&mut self, key: u64, samples: u64) {
        self.live.push_back((key, samples));
    }

    /// Forgets a job and its windows.
    pub fn remove(&mut self, job: u64) {
        self.jobs.remove(&job);
    }

    pub fn is_empty(&self) -> bool {
        self.live.is_empty() && !self.recordings_wait()
    }

    fn recordings_wait(&self) -> bool {
        self.jobs.values().any(|waiting| !waiting.windows.is_empty())
    }

    /// The next batch, which is empty only if nothing waits.
    pub fn next_batch(&mut self) -> Vec<Item> {
        let recordings_wait = self.recordings_wait();
        if !self.live.is_empty() && (self.live_in_a_row < LIVE_IN_A_ROW || !recordings_wait) {
            self.live_in_a_row += 1;
            self.since_live = 0;
            return self.live_batch();
        }
        self.live_in_a_row = 0;
        let most = if self.since_live < SHORT_AFTER_LIVE {
            self.since_live += 1;
            self.limits.beside_live.min(self.limits.batch)
        } else {
            self.limits.batch
        };
        self.batch_of_recordings(most)
    }

    /// In the order in which they came, as many as fit.
    fn live_batch(&mut self) -> Vec<Item> {
        let mut items = Vec::new();
        let mut longest = 0;
        while let Some(&(key, length)) = self.live.front() {
            longest = length.max(longest);
            if !items.is_empty() && longest.saturating_mul(items.len() as u64 + 1) > self.limits.batch {
                break;
            }
            self.live.pop_front();
            items.push(Item::Live(key));
        }
        items
    }

    fn batch_of_recordings(&mut self, most: u64) -> Vec<Item> {
        let waiting = |(_, waiting): &(&u64, &Waiting)| !waiting.windows.is_empty();
        let active = self.jobs.iter().filter(waiting).count() as u64;
        let first = self.jobs.iter().filter(waiting);
        // Of those with equal start times, the one with the fewest samples so far.
        let Some(job) = first
            .min_by_key(|(job, waiting)| (waiting.start, waiting.given, **job))
            .map(|(job, _)| *job)
        else {
            return Vec::new();
        };
        let mut filling = Filling {
            items: Vec::new(),
            longest: 0,
            shortest: u64::MAX,
            most,
            given: BTreeMap::new(),
        };
        self.now = self.now.max(self.jobs[&job].start);
        self.give(job, 0, &mut filling);
        let share = if active > 1 {
            (self.limits.share * most as f64) as u64
        } else {
            most
        };
        // A job that is this far ahead waits for the others.
        let ahead = if active > 1 {
            self.now.saturating_add(most)
        } else {
            u64::MAX
        };
        while let Some((job, position)) = self.next_to_fill(&filling, share, ahead) {
            self.give(job, position, &mut filling);
        }
        let given: u64 = filling.given.values().sum();
        self.now += given / active.max(1);
        filling.items
    }

    /// The job whose turn it is among those with a window that fits, and the place of that window.
    fn next_to_fill(&self, filling: &Filling, share: u64, ahead: u64) -> Option<(u64, usize)> {
        let candidates = self.jobs.iter().filter(|(_, waiting)| waiting.start <= ahead);
        let fitting = candidates.filter_map(|(&job, waiting)| {
            let room = share.saturating_sub(filling.given.get(&job).copied().unwrap_or(0));
            let fits = |(_, length): &(usize, u64)| *length <= room && filling.fits(*length);
            let position = waiting.windows.iter().position(fits)?;
            Some(((waiting.start, waiting.given, job), position))
        });
        fitting.min().map(|((.., job), position)| (job, position))
    }

    fn give(&mut self, job: u64, position: usize, filling: &mut Filling) {
        let Some(waiting) = self.jobs.get_mut(&job) else { return };
        if let Some((index, length)) = waiting.windows.remove(position) {
            waiting.start += length;
            waiting.given += length;
            filling.add(job, index, length);
        }
    }
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
