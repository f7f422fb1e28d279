use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use flow_model::Parameters;

use super::*;

fn parameters(sizes: &[usize]) -> Parameters {
    let mut parameters = Parameters::new(DType::F32, Device::Cpu);
    for (number, &size) in sizes.iter().enumerate() {
        let tensor = Tensor::full(number as f32, size, &Device::Cpu).unwrap();
        parameters.add(format!("p{number}"), tensor, true);
    }
    parameters
}

fn place(step: u64) -> Place {
    Place {
        step,
        round: 0,
        what: What::Gradients(Part::Layer(3)),
    }
}

fn value(tensor: &Tensor) -> f32 {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()[0]
}

#[test]
fn parameters_are_shared_out_evenly() {
    let sizes = [100, 1, 40, 60, 50, 50, 3, 200];
    let owners = owners(&parameters(&sizes), 3);
    let mut owned = [0; 3];
    for (owner, size) in owners.iter().zip(sizes) {
        owned[*owner] += size;
    }
    // No rank has more than the others by more than the largest tensor.
    assert!(
        owned.iter().max().unwrap() - owned.iter().min().unwrap() <= 200,
        "{owned:?}"
    );
    assert_eq!(owners.iter().collect::<std::collections::BTreeSet<_>>().len(), 3);
}

/// Whatever comes late, sums are taken in the order of the ranks: with these numbers another order gives another sum.
#[test]
fn sums_are_those_of_the_order_of_ranks_whoever_comes_late() {
    let parts = [1.0e8f32, 1.0, -1.0e8, 1.0];
    let expected = ((parts[0] + parts[1]) + parts[2]) + parts[3];
    for late in 0..4usize {
        let parameters = parameters(&[1, 1, 1, 1, 1]);
        let owners = owners(&parameters, 4);
        let threads: Vec<_> = members(4, owners, Duration::from_secs(20))
            .into_iter()
            .map(|member| {
                // Through host memory too, as ranks with devices of their own do it.
                let mut member: Box<dyn Collective> = match member.rank() {
                    1 | 2 => Box::new(OverHost::new(member, Device::Cpu)),
                    _ => Box::new(member),
                };
                let mut parameters = parameters.clone();
                let ids: Vec<ParameterId> = parameters.iter().map(|(id, _)| id).collect();
                for id in &ids {
                    let own = parameters.get(*id).copy().unwrap();
                    parameters.set(*id, own).unwrap();
                }
                std::thread::spawn(move || {
                    let rank = member.rank();
                    for step in 0..3 {
                        if rank == late {
                            std::thread::sleep(Duration::from_millis(20));
                        }
                        // Rank 1 has no gradient of the last parameter, and none has one of the one before it.
                        let given = ids.iter().filter(|id| id.index() < 3 || (id.index() == 4 && rank != 1));
                        let given = given
                            .map(|&id| (id, Tensor::full(parts[rank], 1, &Device::Cpu).unwrap()))
                            .collect();
                        member.start_sum(place(step), given).unwrap();
                        for (id, sum) in member.finish_sum(place(step), true).unwrap().unwrap() {
                            let wanted = match id.index() {
                                4 => (parts[0] + parts[2]) + parts[3],
                                _ => expected,
                            };
                            assert_eq!(value(&sum), wanted, "rank {rank}, parameter {id:?}");
                            assert_ne!(id.index(), 3);
                            // The owner's update.
                            let new = Tensor::full(10.0 * step as f32 + rank as f32, 1, &Device::Cpu).unwrap();
                            parameters.get(id).slice_set(&new, 0, 0).unwrap();
                        }
                        let what = What::Parameters;
                        member
                            .spread(Place { what, ..place(step) }, &mut parameters, &ids)
                            .unwrap();
                        let what = What::Figures;
                        let all = member.gather(Place { what, ..place(step) }, vec![rank as f64]).unwrap();
                        assert_eq!(all, [[0.0], [1.0], [2.0], [3.0]]);
                    }
                    parameters.iter().map(|(_, p)| value(&p.tensor)).collect::<Vec<f32>>()
                })
            })
            .collect();
        let after: Vec<Vec<f32>> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(after.iter().all(|values| *values == after[0]), "{after:?}");
        // Owners: 0, 1, 2, 3, and 0 again; parameter 3 had no gradient.
        assert_eq!(after[0], [20.0, 21.0, 22.0, 3.0, 20.0]);
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_to_all_others() {
    let mut members = members(3, Vec::new(), Duration::from_millis(200));
    let absent = members.remove(1);
    let errors: Vec<String> = std::thread::scope(|scope| {
        let waiting: Vec<_> = members
            .iter_mut()
            .map(|member| scope.spawn(move || member.gather(place(17), vec![]).unwrap_err().to_string()))
            .collect();
        waiting.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for error in &errors {
        assert!(
            error.starts_with("rank 1 of training failed: it did not come to"),
            "{error}"
        );
        assert!(
            error.contains("encoder layer 3") && error.contains("step 17"),
            "{error}"
        );
    }
    // The one that comes after all learns of it too.
    let mut absent = absent;
    assert!(absent.gather(place(17), vec![]).is_err());
}

#[test]
fn a_rank_that_ends_or_fails_is_named_at_once() {
    for why in [Some("no memory"), None] {
        let mut members = members(2, Vec::new(), Duration::from_secs(1000));
        let mut other = members.remove(1);
        let error = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| members[0].gather(place(1), vec![]).unwrap_err().to_string());
            std::thread::sleep(Duration::from_millis(20));
            if let Some(why) = why {
                other.fail(why);
            }
            drop(other);
            waiting.join().unwrap()
        });
        let why = why.unwrap_or("it ended before the others");
        assert_eq!(error, format!("rank 1 of training failed: {why}"));
    }
}
