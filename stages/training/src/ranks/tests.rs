use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use flow_kind::processes::Processes;
use flow_model::{Gradients, ParameterGroup, ParameterId, Parameters};
use flow_runtime::harness::joined_processes;

use super::codec::{Message, MessageReader};
use super::out_of_memory_tests::{config, model};
use super::peer_transport::PeerTransport;
use super::remote_ranks::{COMMANDS, END_TRAINING, OPTIMIZER_STATE_OF_ONE, PROCESS_FAILED, STEP, replies_topic};
use super::update::{ParameterUpdates, StepUpdate, Updater};
use super::*;
use crate::error::TrainingError;
use crate::optimizer::{AdamW, AdamWConfig};
use crate::settings::ReduceEvery;
use crate::trainer::TrainerConfig;

/// A group of ranks that are distributed over processes; all in this one where there is no other.
pub(super) fn distributed_group(
    size: usize,
    processes: &[Arc<Processes>],
    parameters: &Parameters,
    timeout: Duration,
) -> Vec<LocalCollective> {
    let owners = parameter_owners(parameters, size);
    if processes.is_empty() {
        return local_group(size, owners, timeout);
    }
    let layout = RankLayout::new(size, processes.len()).unwrap();
    let group = |(number, process): (usize, &Arc<Processes>)| {
        let transport = PeerTransport::new(process, 0, layout, parameters);
        group_in_process(size, layout.ranks_of(number), owners.clone(), timeout, Some(transport))
    };
    processes.iter().enumerate().flat_map(group).collect()
}

fn parameters(sizes: &[usize]) -> Parameters {
    let mut parameters = Parameters::new(DType::F32, Device::Cpu);
    for (number, &size) in sizes.iter().enumerate() {
        let tensor = Tensor::full(number as f32, size, &Device::Cpu).unwrap();
        parameters.add(format!("p{number}"), tensor, true);
    }
    parameters
}

fn key(step: u64) -> CollectiveKey {
    CollectiveKey {
        step,
        round: 0,
        op: CollectiveOp::ReduceGradients(ParameterGroup::Layer(3)),
    }
}

fn value(tensor: &Tensor) -> f32 {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()[0]
}

#[test]
fn parameters_are_shared_out_evenly() {
    let sizes = [100, 1, 40, 60, 50, 50, 3, 200];
    let owners = parameter_owners(&parameters(&sizes), 3);
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

/// Whichever rank is late, and in whichever process, sums are taken in the order of the ranks: with these numbers
/// another order gives another sum.
#[test]
fn sums_are_those_of_the_order_of_ranks_whoever_comes_late() {
    for count in [0, 2, 4] {
        for late in 0..4 {
            sums_of_four_ranks(count, late);
        }
    }
}

fn sums_of_four_ranks(count: usize, late: usize) {
    let parts = [1.0e8f32, 1.0, -1.0e8, 1.0];
    let expected = ((parts[0] + parts[1]) + parts[2]) + parts[3];
    let processes = joined_processes(count);
    let parameters = parameters(&[1, 1, 1, 1, 1]);
    let threads: Vec<_> = distributed_group(4, &processes, &parameters, Duration::from_secs(20))
        .into_iter()
        .map(|member| {
            // Two ranks through host memory, as ranks on GPUs do.
            let mut member: Box<dyn Collective> = match member.rank() {
                1 | 2 => Box::new(HostStaging::new(
                    member,
                    Device::Cpu,
                    Some(parameter_owners(&parameters, 4)),
                )),
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
                    member.start_reduce_scatter(key(step), given).unwrap();
                    for (id, sum) in member.finish_reduce_scatter(key(step), true).unwrap().unwrap() {
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
                    let op = CollectiveOp::BroadcastParameters;
                    let broadcast = CollectiveKey { op, ..key(step) };
                    member.start_broadcast(broadcast, &parameters, &ids).unwrap();
                    member.finish_broadcast(broadcast, &parameters).unwrap();
                    let op = CollectiveOp::GatherMetrics;
                    let all = member
                        .all_gather(CollectiveKey { op, ..key(step) }, vec![rank as f64])
                        .unwrap();
                    assert_eq!(all, [[0.0], [1.0], [2.0], [3.0]]);
                    let op = CollectiveOp::GatherBatchNorm;
                    let counter = Tensor::new(rank as i64, &Device::Cpu).unwrap();
                    let all = member
                        .all_gather_tensors(CollectiveKey { op, ..key(step) }, vec![counter])
                        .unwrap();
                    let all: Vec<i64> = all.iter().map(|given| given[0].to_scalar().unwrap()).collect();
                    assert_eq!(all, [0, 1, 2, 3]);
                }
                let values: Vec<f32> = parameters.iter().map(|(_, p)| value(&p.tensor)).collect();
                // A rank that ends before another has contributed to the last operation is a failure.
                (values, member)
            })
        })
        .collect();
    let ended: Vec<(Vec<f32>, Box<dyn Collective>)> =
        threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    let after: Vec<Vec<f32>> = ended.into_iter().map(|(values, _)| values).collect();
    assert!(after.iter().all(|values| *values == after[0]), "{after:?}");
    // Owners: 0, 1, 2, 3, and 0 again; parameter 3 had no gradient.
    assert_eq!(after[0], [20.0, 21.0, 22.0, 3.0, 20.0]);
}

#[test]
fn a_rank_that_does_not_come_is_named_to_all_others() {
    let mut members = local_group(3, Vec::new(), Duration::from_millis(200));
    let absent = members.remove(1);
    let errors: Vec<String> = std::thread::scope(|scope| {
        let waiting: Vec<_> = members
            .iter_mut()
            .map(|member| scope.spawn(move || member.all_gather(key(17), vec![]).unwrap_err().to_string()))
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
    // The absent rank itself gets the error too.
    let mut absent = absent;
    assert!(absent.all_gather(key(17), vec![]).is_err());
}

#[test]
fn a_rank_that_ends_or_fails_is_named_at_once() {
    for why in [Some("no memory"), None] {
        let mut members = local_group(2, Vec::new(), Duration::from_secs(1000));
        let mut other = members.remove(1);
        let error = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| members[0].all_gather(key(1), vec![]).unwrap_err().to_string());
            std::thread::sleep(Duration::from_millis(20));
            if let Some(why) = why {
                other.abort(why);
            }
            drop(other);
            waiting.join().unwrap()
        });
        let why = why.unwrap_or("it ended before the others");
        assert_eq!(error, format!("rank 1 of training failed: {why}"));
    }
}

#[test]
fn a_rank_of_another_process_that_does_not_come_or_is_lost_is_named_to_all_others() {
    let parameters = parameters(&[1]);
    let waiting = |members: &mut [LocalCollective]| -> Vec<String> {
        std::thread::scope(|scope| {
            let waiting: Vec<_> = members
                .iter_mut()
                .map(|member| scope.spawn(move || member.all_gather(key(17), vec![]).unwrap_err().to_string()))
                .collect();
            waiting.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    };
    let hanging = joined_processes(2);
    let mut members = distributed_group(4, &hanging, &parameters, Duration::from_millis(300));
    // The first of those that have not come is named, so that no other is named for a thread that began late. The other
    // process gives the same error.
    let absent = members.remove(0);
    for error in waiting(&mut members) {
        let named = "rank 0 of training failed: it did not come to the gradients of encoder layer 3";
        assert!(error.starts_with(named) && error.contains("within 0.3 s"), "{error}");
    }
    drop((absent, members));

    let mut dying = joined_processes(3);
    let mut members = distributed_group(6, &dying, &parameters, Duration::from_secs(1000));
    let last = (members.pop(), members.pop());
    let errors = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| waiting(&mut members));
        std::thread::sleep(Duration::from_millis(50));
        // As if its process were killed: its ranks send nothing.
        std::mem::forget(last);
        dying.pop().unwrap().cut();
        waiting.join().unwrap()
    });
    for error in errors {
        assert!(error.starts_with("rank 4 of training failed: process 2 ("), "{error}");
        assert!(error.ends_with("ended without a message"), "{error}");
    }

    let failing = joined_processes(2);
    let mut members = distributed_group(2, &failing, &parameters, Duration::from_secs(1000));
    members[1].abort("no memory");
    let error = members[0].all_gather(key(1), vec![]).unwrap_err();
    assert_eq!(error.to_string(), "rank 1 of training failed: no memory");
}

#[test]
fn ranks_are_shared_out_evenly_or_not_at_all() {
    let halves = RankLayout::new(4, 2).unwrap();
    assert_eq!((halves.ranks_of(0), halves.ranks_of(1)), (0..2, 2..4));
    assert_eq!([0, 1, 2, 3].map(|rank| halves.process_of(rank)), [0, 0, 1, 1]);
    for (ranks, processes) in [(1, 2), (3, 2), (0, 1), (1, 0)] {
        let error = RankLayout::new(ranks, processes).unwrap_err().to_string();
        assert!(error.contains(&format!("over {processes} processes")), "{error}");
    }
}

/// A collective of one rank whose broadcast of parameters calls a closure of the test.
struct FailingBroadcast<F>(SingleRank, F);

impl<F: FnMut() -> Result<(), TrainingError> + Send> Collective for FailingBroadcast<F> {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        2
    }

    fn start_reduce_scatter(
        &mut self,
        key: CollectiveKey,
        gradients: Vec<(ParameterId, Tensor)>,
    ) -> Result<(), TrainingError> {
        self.0.start_reduce_scatter(key, gradients)
    }

    fn finish_reduce_scatter(
        &mut self,
        key: CollectiveKey,
        wait: bool,
    ) -> Result<Option<ReducedGradients>, TrainingError> {
        self.0.finish_reduce_scatter(key, wait)
    }

    fn all_gather(&mut self, key: CollectiveKey, numbers: Vec<f64>) -> Result<Vec<Vec<f64>>, TrainingError> {
        self.0.all_gather(key, numbers)
    }

    fn all_gather_tensors(
        &mut self,
        key: CollectiveKey,
        tensors: Vec<Tensor>,
    ) -> Result<Vec<Vec<Tensor>>, TrainingError> {
        self.0.all_gather_tensors(key, tensors)
    }

    fn start_broadcast(&mut self, _: CollectiveKey, _: &Parameters, _: &[ParameterId]) -> Result<(), TrainingError> {
        Ok(())
    }

    fn finish_broadcast(&mut self, _: CollectiveKey, _: &Parameters) -> Result<(), TrainingError> {
        self.1()
    }

    fn abort(&mut self, _: &str) {}

    fn take_wait_seconds(&mut self) -> f64 {
        0.0
    }
}

/// The forward pass waits for the group that it needs and not for those after it; an error in a running update is given
/// where its result is first needed.
#[test]
fn an_offloaded_update_is_waited_for_part_by_part_and_its_failure_is_told() {
    let groups = [
        ParameterGroup::Subsampling,
        ParameterGroup::Layer(0),
        ParameterGroup::Heads,
    ];
    let updates = |exchange: Box<dyn FnMut() -> Result<(), TrainingError> + Send>| {
        let mut parameters = parameters(&[4, 4, 4]);
        let mut sums = Gradients::new(&parameters);
        let ids: Vec<ParameterId> = parameters.iter().map(|(id, _)| id).collect();
        for &id in &ids {
            sums.add(id, Tensor::ones(4, DType::F32, &Device::Cpu).unwrap())
                .unwrap();
        }
        let updater = Updater {
            optimizer: AdamW::new(AdamWConfig::default()),
            collective: Box::new(FailingBroadcast(SingleRank, exchange)),
            sums,
        };
        let mut updates = ParameterUpdates::new(updater, &parameters, true).unwrap();
        let update = StepUpdate {
            step: 0,
            rate: 0.5,
            scale: 1.0,
        };
        let by_group = groups.into_iter().zip(ids.iter().map(|&id| vec![id])).collect();
        updates.update(by_group, update, &mut parameters).unwrap();
        (updates, parameters, ids)
    };
    let changed = |parameters: &Parameters, ids: &[ParameterId]| -> Vec<bool> {
        let before = [0.0, 1.0, 2.0];
        ids.iter()
            .zip(before)
            .map(|(&id, before)| value(parameters.get(id)) != before)
            .collect()
    };

    // The broadcast of the second group waits for the test.
    let (go_on, wait) = crossbeam_channel::unbounded::<()>();
    go_on.send(()).unwrap();
    let (mut halting, parameters, ids) = updates(Box::new(move || {
        let _ = wait.recv();
        Ok(())
    }));
    // Not a group of this update.
    halting.wait_for_group(ParameterGroup::Prediction, &parameters).unwrap();
    assert_eq!(changed(&parameters, &ids), [false, false, false]);
    halting
        .wait_for_group(ParameterGroup::Subsampling, &parameters)
        .unwrap();
    assert_eq!(changed(&parameters, &ids), [true, false, false]);
    drop(go_on);
    halting.wait_for_group(ParameterGroup::Layer(0), &parameters).unwrap();
    assert_eq!(changed(&parameters, &ids), [true, true, false]);
    let updater = halting.synchronize(&parameters).unwrap();
    assert_eq!(updater.sums.iter().count(), 0);
    assert_eq!(updater.optimizer.names().count(), 3);
    assert_eq!(changed(&parameters, &ids), [true, true, true]);

    let mut calls = 0;
    let (mut failing, parameters, _) = updates(Box::new(move || {
        calls += 1;
        match calls {
            1 => Ok(()),
            _ => Err(rank_disconnected(1)),
        }
    }));
    failing
        .wait_for_group(ParameterGroup::Subsampling, &parameters)
        .unwrap();
    let error = failing
        .wait_for_group(ParameterGroup::Heads, &parameters)
        .unwrap_err()
        .to_string();
    assert_eq!(error, "rank 1 of training failed: it does not answer any more");

    let (mut panicking, parameters, _) = updates(Box::new(|| panic!("out of luck")));
    let error = panicking.synchronize(&parameters).map(drop).unwrap_err().to_string();
    assert_eq!(error, "rank 0 of training failed: its update panicked: out of luck");
    let error = panicking.synchronize(&parameters).map(drop).unwrap_err().to_string();
    assert_eq!(error, "rank 0 of training failed: its last update panicked");
    panicking.abort("nobody is left to tell");
}

/// What process 0 gives the others to start a training of so many ranks, with the small golden model.
fn starting<R>(processes: &[Arc<Processes>], ranks: usize, with: impl FnOnce(&RemoteStart) -> R) -> R {
    let (model, optimizer) = (model(), AdamW::new(AdamWConfig::default()));
    let config = TrainerConfig {
        ranks: ranks as u32,
        ..config(true, false, ReduceEvery::MicroBatch)
    };
    with(&RemoteStart {
        layout: RankLayout::new(ranks, processes.len()).unwrap(),
        owners: &parameter_owners(&model.parameters, ranks),
        model: &model,
        optimizer: &optimizer,
        config: &config,
        nccl_id: None,
        rank_bytes: None,
        own_batches: None,
    })
}

const PLAN: StepPlan = StepPlan {
    step: 0,
    planned: 2,
    received: 2,
    rounds: 1,
};

/// A step that was given to a rank of another process goes there before the end of the training, though the training
/// ends at once: the process would take it for a malformed message, or not learn from its own rank why the step failed.
#[test]
fn a_step_is_sent_before_the_end_of_the_training() {
    let processes = joined_processes(2);
    let (tell, told) = crossbeam_channel::unbounded();
    processes[1].listen(COMMANDS, move |_, command| {
        // The test may be over.
        let _ = tell.send(MessageReader::new(&command).unwrap().0);
    });
    starting(&processes, 2, |start| {
        for round in 0..100 {
            let mut remote = RemoteRanks::start(&processes[0], start).unwrap();
            let handles = remote.handles().unwrap();
            assert!(handles[0].commands.send(RankCommand::Step(PLAN, Vec::new())).is_ok());
            drop(handles);
            drop(remote);
            let mut commands = std::iter::from_fn(|| told.recv_timeout(Duration::from_secs(60)).ok());
            let ended = commands.find(|&kind| kind == STEP || kind == END_TRAINING);
            assert_eq!(
                (ended, commands.next()),
                (Some(STEP), Some(END_TRAINING)),
                "round {round}"
            );
        }
    });
}

/// Whatever process 0 waits for from a rank of another process ends at once, with the reason, where that process is lost, says
/// that it cannot go on, or sends what cannot be read: the report of a step, the moments, and a part of an evaluation.
#[test]
fn what_is_awaited_of_a_process_that_is_gone_fails_at_once() {
    let lost = |process: &Processes| process.cut();
    let failed = |process: &Processes| {
        let message = Message::new(PROCESS_FAILED).with(&2usize).with_text("no memory");
        process.send(0, replies_topic(0), Box::new(message));
    };
    let garbled = |process: &Processes| {
        let message = Message::new(OPTIMIZER_STATE_OF_ONE).with(&2usize);
        let message = message.with_bytes(&[1, 2, 3]);
        process.send(0, replies_topic(0), Box::new(message));
    };
    type End<'a> = &'a dyn Fn(&Processes);
    let ends: [(End, &str); 3] = [
        (&lost, "ended without a message"),
        (&failed, "no memory"),
        (&garbled, "process 1 sent what cannot be read: the optimizer's state: "),
    ];
    for (end, why) in ends {
        let processes = joined_processes(2);
        starting(&processes, 4, |start| {
            let mut remote = RemoteRanks::start(&processes[0], start).unwrap();
            let handles = remote.handles().unwrap();
            let (moments, arriving) = crossbeam_channel::bounded(1);
            let (evaluated, evaluating) = crossbeam_channel::bounded(1);
            let give = |at: usize, command: RankCommand| assert!(handles[at].commands.send(command).is_ok());
            give(0, RankCommand::OptimizerState(moments));
            give(0, RankCommand::Step(PLAN, Vec::new()));
            let reply = Box::new(move |outcome| evaluated.send(outcome).unwrap());
            give(1, RankCommand::Evaluate(Evaluation::End, reply));
            end(&processes[1]);
            let patience = Duration::from_secs(60);
            let errors = [
                arriving.recv_timeout(patience).expect("an answer").map(drop),
                handles[0].reports.recv_timeout(patience).expect("a report").map(drop),
                evaluating.recv_timeout(patience).expect("an answer").map(drop),
            ];
            for (error, asked) in errors.into_iter().zip([2, 2, 3]) {
                match error {
                    Err(TrainingError::Rank { rank, message }) => {
                        assert!(rank == asked && message.contains(why), "rank {rank}: {message}");
                    }
                    other => panic!("{other:?}"),
                }
            }
        });
    }
}
