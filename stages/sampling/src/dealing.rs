//! Which rank of a training, and which process, a micro-batch of a step falls to.

/// The rank that gets the micro-batch at `place` among the `planned` ones of a step, ordered by the rank that they were
/// planned for and then by number: each rank gets those that follow one another, as many as any other or one more.
pub fn rank_of(place: u32, planned: u32, ranks: usize) -> usize {
    let rank = u64::from(place) * ranks as u64 / u64::from(planned.max(1));
    (rank as usize).min(ranks.saturating_sub(1))
}

/// The process of `processes` that has a rank. All have the same number of ranks, in the order of the processes.
pub fn process_of(rank: usize, ranks: usize, processes: usize) -> usize {
    rank * processes / ranks.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_micro_batch_falls_to_one_rank_and_process_in_order() {
        let ranks: Vec<usize> = (0..8).map(|place| rank_of(place, 8, 4)).collect();
        assert_eq!(ranks, [0, 0, 1, 1, 2, 2, 3, 3]);
        // Planned for three ranks, trained on two.
        let ranks: Vec<usize> = (0..3).map(|place| rank_of(place, 3, 2)).collect();
        assert_eq!(ranks, [0, 0, 1]);
        let processes: Vec<usize> = (0..4).map(|rank| process_of(rank, 4, 2)).collect();
        assert_eq!(processes, [0, 0, 1, 1]);
    }
}
