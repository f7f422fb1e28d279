//! The code that calls NCCL, on the stand-in.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use flow_cuda_emulator::DeviceUnderTest;
use flow_cuda_emulator::nccl::{self as stand_in, Fault};
use flow_kernels::Noise;
use flow_kind::processes::Processes;
use flow_model::{ParameterGroup, ParameterId, Parameters};
use flow_runtime::harness::joined_processes;

use super::{NcclCollective, new_id, with_host_library};
use crate::ranks::tests::distributed_group;
use crate::ranks::{Collective, CollectiveKey, CollectiveOp, LocalCollective, parameter_owners};

/// Faults are those of the whole process.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    let guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    stand_in::clear_faults();
    guard
}

/// Parameters of layer 3, and one of layer 4.
fn parameters() -> Parameters {
    let mut parameters = Parameters::new(DType::F32, Device::Cpu);
    let shapes: [&[usize]; 7] = [&[3], &[120, 70], &[1], &[5], &[33, 2, 3], &[9_000], &[4]];
    for (number, shape) in shapes.into_iter().enumerate() {
        let layer = 3 + number / 6;
        let values = random(shape, number as u64);
        parameters.add(format!("encoder.layers.{layer}.p{number}"), values, true);
    }
    parameters
}

fn random(shape: &[usize], seed: u64) -> Tensor {
    let mut noise = Noise::new(seed);
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|_| noise.normal() as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn key(step: u64, op: CollectiveOp) -> CollectiveKey {
    CollectiveKey { step, round: 0, op }
}

const GRADIENTS: CollectiveOp = CollectiveOp::ReduceGradients(ParameterGroup::Layer(3));

fn controls(size: usize, processes: &[Arc<Processes>], timeout: Duration) -> Vec<LocalCollective> {
    distributed_group(size, processes, &parameters(), timeout)
}

fn nccl_group(size: usize, processes: &[Arc<Processes>], timeout: Duration) -> Vec<NcclCollective> {
    named_group(size, processes, timeout, |rank| format!("device {rank}"))
}

fn named_group(
    size: usize,
    processes: &[Arc<Processes>],
    timeout: Duration,
    name: impl Fn(usize) -> String,
) -> Vec<NcclCollective> {
    let id = with_host_library(stand_in::library(), || new_id(&Device::Cpu))
        .unwrap()
        .unwrap();
    let owners = parameter_owners(&parameters(), size);
    let member = |control: LocalCollective| {
        let name = name(control.rank());
        NcclCollective::new(control, &parameters(), owners.clone(), id, timeout, DType::F32, &name).unwrap()
    };
    controls(size, processes, timeout).into_iter().map(member).collect()
}

/// All numbers that a rank of a group is given in three steps.
fn exchanged(member: &mut dyn Collective, ranks_on_device: bool) -> Vec<Vec<f64>> {
    let mut work = || {
        let (rank, size) = (member.rank(), member.size());
        let parameters = parameters();
        let ids: Vec<ParameterId> = parameters.iter().map(|(id, _)| id).collect();
        let mut got = Vec::new();
        let mut note = |tensor: &Tensor| {
            let values = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
            got.push(values.to_vec1::<f64>().unwrap());
        };
        for step in 0..3 {
            // The last rank has no gradient of the second parameter, and none has one of the fourth.
            let given = ids[..6]
                .iter()
                .filter(|id| id.index() != 3 && !(id.index() == 1 && rank + 1 == size))
                .map(|&id| {
                    let seed = 1000 * step + 10 * rank as u64 + id.index() as u64;
                    let gradient = random(parameters.get(id).dims(), seed);
                    (id, gradient)
                })
                .collect();
            member.start_reduce_scatter(key(step, GRADIENTS), given).unwrap();
            let last = CollectiveOp::ReduceGradients(ParameterGroup::Layer(4));
            member.start_reduce_scatter(key(step, last), Vec::new()).unwrap();
            let sums = loop {
                // Without waiting, in the first step.
                match member.finish_reduce_scatter(key(step, GRADIENTS), step > 0).unwrap() {
                    Some(sums) => break sums,
                    None => std::thread::yield_now(),
                }
            };
            let nothing = member.finish_reduce_scatter(key(step, last), true).unwrap().unwrap();
            assert!(nothing.is_empty());
            for (id, sum) in sums {
                assert_eq!(sum.dims(), parameters.get(id).dims());
                note(&sum);
                parameters.get(id).slice_set(&sum, 0, 0).unwrap();
            }
            let metrics = key(step, CollectiveOp::GatherMetrics);
            let all = member.all_gather(metrics, vec![rank as f64]).unwrap();
            assert_eq!(all.len(), size);
            let statistics = vec![
                random(&[7], step + rank as u64),
                Tensor::new(rank as i64, &Device::Cpu).unwrap(),
                random(&[2, 3], 50 + rank as u64),
            ];
            let gathered = key(step, CollectiveOp::GatherBatchNorm);
            let all = member.all_gather_tensors(gathered, statistics).unwrap();
            all.iter().flatten().for_each(&mut note);
            // As after an update: group by group, with other work in between.
            let broadcast = |round| CollectiveKey {
                round,
                ..key(step, CollectiveOp::BroadcastParameters)
            };
            member.start_broadcast(broadcast(0), &parameters, &ids[..6]).unwrap();
            member.start_broadcast(broadcast(1), &parameters, &ids[6..]).unwrap();
            member.finish_broadcast(broadcast(0), &parameters).unwrap();
            member.finish_broadcast(broadcast(1), &parameters).unwrap();
            parameters.iter().for_each(|(_, parameter)| note(&parameter.tensor));
        }
        // No rank ends before the others have all they need.
        member
            .all_gather(key(9, CollectiveOp::GatherMetrics), Vec::new())
            .unwrap();
        got
    };
    match ranks_on_device {
        true => DeviceUnderTest::get().run(|_| work()),
        false => work(),
    }
}

fn on_threads<M: Collective>(members: Vec<M>, ranks_on_device: bool) -> Vec<Vec<Vec<f64>>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = members
            .into_iter()
            .map(|mut member| scope.spawn(move || (exchanged(&mut member, ranks_on_device), member)))
            .collect();
        // All members live until the last has ended.
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        ended.into_iter().map(|(got, _)| got).collect()
    })
}

/// With sums in the order of the ranks, what NCCL's functions give is what the collective of the CPU gives, to the bit: with
/// several ranks in a process, with one in each, and with several in each of several processes; with tensors on an emulated
/// device.
#[test]
fn what_nccl_gives_is_what_ranks_on_the_cpu_give() {
    let _one = one_at_a_time();
    let timeout = Duration::from_secs(60);
    for (size, count) in [(2, 0), (3, 0), (2, 2), (4, 2)] {
        let expected = on_threads(controls(size, &joined_processes(count), timeout), false);
        let found = on_threads(nccl_group(size, &joined_processes(count), timeout), true);
        assert!(expected == found, "{size} ranks in {count} processes");
    }
}

/// What each rank is told where the ranks do two reductions.
fn errors(members: Vec<NcclCollective>) -> Vec<String> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = members
            .into_iter()
            .map(|mut member| {
                scope.spawn(move || {
                    let mut outcome = Ok(None);
                    for step in 0..2 {
                        outcome = member
                            .start_reduce_scatter(key(step, GRADIENTS), Vec::new())
                            .and_then(|()| member.finish_reduce_scatter(key(step, GRADIENTS), true));
                        if outcome.is_err() {
                            break;
                        }
                    }
                    // The member is given back, as a rank that ends is a failure itself.
                    (outcome.unwrap_err().to_string(), member)
                })
            })
            .collect();
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        ended.into_iter().map(|(error, _)| error).collect()
    })
}

/// A fault of the library in one rank ends all of them within the time limit, and they all name the one that has
/// it. Where an operation hangs that all ranks have started, NCCL cannot tell which rank is to blame.
#[test]
fn a_fault_in_one_rank_is_told_to_all() {
    let _one = one_at_a_time();
    for count in [0, 2] {
        for (fault, words) in [
            (
                Fault::Refused,
                "NCCL: unhandled system error (a fault that the test asked for)",
            ),
            (Fault::Failed, "NCCL: internal error (a fault that the test asked for)"),
            (
                Fault::Hangs,
                "NCCL did not end the exchange of the gradients of encoder layer 3, micro-batch 0, step 1 within 4 s",
            ),
        ] {
            stand_in::clear_faults();
            stand_in::set_fault(1, 2, fault);
            let began = Instant::now();
            // A rank that a busy machine keeps from coming in time would be named in place of the fault.
            let timeout = match fault {
                Fault::Hangs => Duration::from_secs(4),
                Fault::Refused | Fault::Failed => Duration::from_secs(60),
            };
            let errors = errors(nccl_group(4, &joined_processes(count), timeout));
            assert!(began.elapsed() < Duration::from_secs(50), "{fault:?}");
            for error in &errors {
                assert!(error.ends_with(words), "{fault:?}: {error}");
                if fault != Fault::Hangs {
                    assert!(error.starts_with("rank 1 of training failed: "), "{error}");
                }
            }
        }
    }
    stand_in::clear_faults();
}

/// A rank that does not come to an operation, or to the first one, or that ends, is named by all others; and so is one of
/// a process that is killed.
#[test]
fn a_rank_that_does_not_come_is_named() {
    let _one = one_at_a_time();
    let timeout = Duration::from_millis(500);
    // The first rank of three does not even begin. (The first of those that have not come is named, so that no other is named
    // for a thread that began late.)
    let mut members = nccl_group(3, &[], timeout);
    let absent = members.remove(0);
    // It has named its device, as its collective was made.
    for error in errors(members) {
        let named = "rank 0 of training failed: it did not come to the gradients of encoder layer 3";
        assert!(error.starts_with(named) && error.contains("within 0.5 s"), "{error}");
    }
    drop(absent);

    // It ends.
    let mut members = nccl_group(3, &[], Duration::from_secs(1000));
    drop(members.pop());
    for error in errors(members) {
        assert_eq!(error, "rank 2 of training failed: it ended before the others");
    }

    // Its process is killed.
    let mut dying = joined_processes(3);
    let mut members = nccl_group(6, &dying, Duration::from_secs(1000));
    let last = (members.pop(), members.pop());
    let errors = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| errors(members));
        std::thread::sleep(Duration::from_millis(100));
        std::mem::forget(last);
        dying.pop().unwrap().cut();
        waiting.join().unwrap()
    });
    for error in errors {
        assert!(error.starts_with("rank 4 of training failed: process 2 ("), "{error}");
        assert!(error.ends_with("ended without a message"), "{error}");
    }
}

#[test]
fn ranks_on_one_device_are_refused_by_all() {
    let _one = one_at_a_time();
    let members = named_group(4, &joined_processes(2), Duration::from_secs(20), |rank| {
        format!("GPU {} of node1", rank % 3)
    });
    for error in errors(members) {
        let named = "rank 3 of training failed: it computes on GPU 0 of node1, and so does rank 0: NCCL needs";
        assert!(error.starts_with(named), "{error}");
    }
}

/// The stand-in itself finds ranks that do not do the same, and calls that come too early.
#[test]
fn ranks_that_do_not_do_the_same_fail() {
    let _one = one_at_a_time();
    let mut members = nccl_group(2, &[], Duration::from_secs(20));
    let errors = std::thread::scope(|scope| {
        let threads: Vec<_> = members
            .iter_mut()
            .map(|member| {
                scope.spawn(move || {
                    let count = 3 + member.rank();
                    let statistics = vec![random(&[count], 1)];
                    let gathered = key(0, CollectiveOp::GatherBatchNorm);
                    member.all_gather_tensors(gathered, statistics).unwrap_err().to_string()
                })
            })
            .collect();
        let ended = threads.into_iter().map(|thread| thread.join().unwrap());
        ended.collect::<Vec<_>>()
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("NCCL: invalid usage (rank "), "{errors:?}");
}
