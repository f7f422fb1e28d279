//! Clusters speakers over recordings: agglomerative, by centroids, where no cluster has two speakers of one recording.

use rayon::prelude::*;

use super::{cosine, unit};

/// A speaker to be clustered.
pub struct Item {
    /// Number of its recording.
    pub recording: u32,
    pub weight: f64,
    /// A unit vector.
    pub vector: Vec<f32>,
}

/// Slots for which the search for the nearest is divided among threads.
const PARALLEL_FROM: usize = 2_000;

/// The nearest of the slots after a slot, within the threshold.
#[derive(Clone, Copy)]
struct Nearest {
    /// A lower bound of the squared distance; infinite if there is none.
    squared: f32,
    /// Unknown once the nearest slot has changed: searched for when no other slot has a nearer one.
    slot: Option<usize>,
}

const NONE: Nearest = Nearest {
    squared: f32::INFINITY,
    slot: None,
};

struct Slots {
    dimension: usize,
    /// Centroids of length 1: (slots, dimension).
    centroids: Vec<f32>,
    /// Weighted sums of unit vectors: (slots, dimension).
    sums: Vec<f64>,
    /// Recordings of each, sorted. Empty if the slot was merged into another one.
    recordings: Vec<Vec<u32>>,
    /// Largest squared distance.
    most: f32,
}

impl Slots {
    fn centroid(&self, slot: usize) -> &[f32] {
        &self.centroids[slot * self.dimension..(slot + 1) * self.dimension]
    }

    /// Squared distance of two centroids, if it is within the threshold.
    fn squared(&self, a: usize, b: usize) -> Option<f32> {
        let squared = (2.0 - 2.0 * cosine(self.centroid(a), self.centroid(b))).max(0.0);
        (squared <= self.most).then_some(squared)
    }

    /// Whether both may become one.
    fn may_merge(&self, a: usize, b: usize) -> bool {
        are_disjoint(&self.recordings[a], &self.recordings[b])
    }

    fn find(&self, slot: usize) -> Nearest {
        let nearer = |best: Nearest, other: usize| match self.squared(slot, other) {
            Some(squared)
                if squared < best.squared && !self.recordings[other].is_empty() && self.may_merge(slot, other) =>
            {
                Nearest {
                    squared,
                    slot: Some(other),
                }
            }
            _ => best,
        };
        (slot + 1..self.recordings.len()).fold(NONE, nearer)
    }

    /// Merges the first slot into the second one.
    fn merge(&mut self, gone: usize, kept: usize) {
        let (from, to) = (gone * self.dimension, kept * self.dimension);
        for at in 0..self.dimension {
            self.sums[to + at] += self.sums[from + at];
        }
        let centroid = unit(self.sums[to..to + self.dimension].iter().copied());
        self.centroids[to..to + self.dimension].copy_from_slice(&centroid);
        let recordings = std::mem::take(&mut self.recordings[gone]);
        self.recordings[kept].extend(recordings);
        self.recordings[kept].sort_unstable();
    }
}

fn are_disjoint(a: &[u32], b: &[u32]) -> bool {
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    while let (Some(first), Some(second)) = (a.peek(), b.peek()) {
        match first.cmp(second) {
            std::cmp::Ordering::Less => a.next(),
            std::cmp::Ordering::Greater => b.next(),
            std::cmp::Ordering::Equal => return false,
        };
    }
    true
}

/// The cluster of each item, numbered in the order of their first items. Merges the two clusters with the nearest centroids
/// (of length 1), of equal ones the first, as long as their Euclidean distance is at most `threshold`; two that have a recording in
/// common are never merged.
///
/// Each step computes the distances of one or a few clusters from all others: O(n²) vectors for n items, where few have the
/// same nearest cluster, O(n³) at worst; memory is O(n).
pub fn clusters(items: &[Item], threshold: f64) -> Vec<usize> {
    let count = items.len();
    let dimension = items.first().map_or(0, |item| item.vector.len());
    let weighted = |item: &Item| {
        let weight = item.weight;
        item.vector
            .iter()
            .map(move |&value| weight * f64::from(value))
            .collect::<Vec<_>>()
    };
    let mut slots = Slots {
        dimension,
        centroids: items.iter().flat_map(|item| item.vector.iter().copied()).collect(),
        sums: items.iter().flat_map(weighted).collect(),
        recordings: items.iter().map(|item| vec![item.recording]).collect(),
        most: (threshold * threshold) as f32,
    };
    let mut nearest: Vec<Nearest> = (0..count).into_par_iter().map(|slot| slots.find(slot)).collect();
    let mut parents: Vec<usize> = (0..count).collect();
    loop {
        let mut best = 0;
        for (slot, near) in nearest.iter().enumerate() {
            if near.squared < nearest[best].squared {
                best = slot;
            }
        }
        if nearest.is_empty() || nearest[best].squared.is_infinite() {
            break;
        }
        let Some(kept) = nearest[best].slot else {
            nearest[best] = slots.find(best);
            continue;
        };
        // The result is in the later slot.
        slots.merge(best, kept);
        parents[best] = kept;
        nearest[best] = NONE;
        let distance = |slot: usize| {
            let is_there = slot != best && !slots.recordings[slot].is_empty();
            slots.squared(slot, kept).filter(|_| is_there)
        };
        let distances: Vec<Option<f32>> = match kept < PARALLEL_FROM {
            true => (0..kept).map(distance).collect(),
            false => (0..kept).into_par_iter().map(distance).collect(),
        };
        for (slot, squared) in distances.into_iter().enumerate() {
            let near = &mut nearest[slot];
            match squared {
                Some(squared) if squared < near.squared && slots.may_merge(slot, kept) => {
                    *near = Nearest {
                        squared,
                        slot: Some(kept),
                    };
                }
                _ if near.slot == Some(best) || near.slot == Some(kept) => near.slot = None,
                _ => {}
            }
        }
        nearest[kept] = slots.find(kept);
    }
    numbered(&parents)
}

/// The root of each, numbered in the order of the first items.
fn numbered(parents: &[usize]) -> Vec<usize> {
    // A parent comes after its children.
    let mut roots: Vec<usize> = (0..parents.len()).collect();
    for slot in (0..parents.len()).rev() {
        roots[slot] = if parents[slot] == slot {
            slot
        } else {
            roots[parents[slot]]
        };
    }
    let mut numbers = vec![None; parents.len()];
    let mut next = 0;
    let number = |&root: &usize| {
        *numbers[root].get_or_insert_with(|| {
            next += 1;
            next - 1
        })
    };
    roots.iter().map(number).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same, by looking at all pairs in each step.
    fn plainly(items: &[Item], threshold: f64) -> Vec<usize> {
        let mut members: Vec<Vec<usize>> = (0..items.len()).map(|item| vec![item]).collect();
        let centroid = |members: &[usize]| -> Vec<f32> {
            let mut sum = vec![0.0; items[0].vector.len()];
            for &item in members {
                for (sum, value) in sum.iter_mut().zip(&items[item].vector) {
                    *sum += items[item].weight * f64::from(*value);
                }
            }
            unit(sum.iter().copied())
        };
        loop {
            let mut best: Option<(f32, usize, usize)> = None;
            for a in 0..members.len() {
                for b in a + 1..members.len() {
                    let shared = |&x: &usize| members[b].iter().any(|&y| items[x].recording == items[y].recording);
                    if members[a].is_empty() || members[b].is_empty() || members[a].iter().any(shared) {
                        continue;
                    }
                    let squared = (2.0 - 2.0 * cosine(&centroid(&members[a]), &centroid(&members[b]))).max(0.0);
                    if squared <= (threshold * threshold) as f32 && best.is_none_or(|(least, ..)| squared < least) {
                        best = Some((squared, a, b));
                    }
                }
            }
            let Some((_, a, b)) = best else { break };
            let moved = std::mem::take(&mut members[a]);
            members[b].extend(moved);
        }
        let mut found = vec![0; items.len()];
        members.sort_by_key(|members| members.iter().min().copied());
        for (number, members) in members.iter().filter(|members| !members.is_empty()).enumerate() {
            members.iter().for_each(|&item| found[item] = number);
        }
        found
    }

    proptest! {
        #[test]
        fn clusters_are_those_of_all_pairs(
            angles in prop::collection::vec((0u32..6, 0.0f64..3.1, 0.0f64..3.1, 1u32..20), 1..24),
            threshold in 0.05f64..1.5,
        ) {
            let items: Vec<Item> = angles
                .iter()
                .map(|&(recording, a, b, weight)| Item {
                    recording,
                    weight: f64::from(weight),
                    vector: unit([a.cos() * b.sin(), a.sin() * b.sin(), b.cos()].into_iter()),
                })
                .collect();
            let found = clusters(&items, threshold);
            prop_assert_eq!(&found, &plainly(&items, threshold));
            for (a, b) in (0..items.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
                prop_assert!(found[a] != found[b] || items[a].recording != items[b].recording);
            }
        }
    }

    #[test]
    fn nothing_is_clustered_to_nothing() {
        assert!(clusters(&[], 0.7).is_empty());
    }
}
