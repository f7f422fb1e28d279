//! Which rank keeps the optimizer's state of a parameter and updates it.

use flow_model::Parameters;

/// The owner of every parameter among `ranks` ranks, by [`flow_model::ParameterId::index`]: the rank that owns the
/// fewest elements so far, the first of them where several do. Buffers have no owner; their entry is 0.
pub fn parameter_owners(parameters: &Parameters, ranks: usize) -> Vec<usize> {
    let mut owned = vec![0u64; ranks.max(1)];
    parameters
        .iter()
        .map(|(_, parameter)| {
            if !parameter.trainable {
                return 0;
            }
            let owner = (0..owned.len()).min_by_key(|&rank| owned[rank]).unwrap_or(0);
            owned[owner] += parameter.tensor.elem_count() as u64;
            owner
        })
        .collect()
}
