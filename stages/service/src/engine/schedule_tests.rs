use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const SECOND: u64 = 16_000;

fn limits(batch: u64, share: f64) -> Limits {
    Limits {
        batch: batch * SECOND,
        beside_live: batch * SECOND / 4,
        share,
    }
}

fn jobs_of(batch: &[Item]) -> BTreeSet<u64> {
    let job = |item: &Item| match item {
        Item::Window { job, .. } => Some(*job),
        Item::Live(_) => None,
    };
    batch.iter().filter_map(job).collect()
}

#[derive(Debug, Clone)]
enum Step {
    Push { job: u64, samples: u64 },
    Live { samples: u64 },
    Remove { job: u64 },
    Batch,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0u64..6, 1u64..30 * SECOND).prop_map(|(job, samples)| Step::Push { job, samples }),
        1 => (1u64..10 * SECOND).prop_map(|samples| Step::Live { samples }),
        1 => (0u64..6).prop_map(|job| Step::Remove { job }),
        2 => Just(Step::Batch),
    ];
    prop::collection::vec(step, 0..120)
}

proptest! {
    #[test]
    fn nothing_is_lost_or_doubled_and_batches_keep_their_bound(
        steps in steps(), batch in 1u64..60, share in 0.05..1.0f64,
    ) {
        let limits = limits(batch, share);
        let mut schedule = Schedule::new(limits);
        let mut waiting: BTreeMap<Item, u64> = BTreeMap::new();
        let check = |found: Vec<Item>, waiting: &mut BTreeMap<Item, u64>| {
            let others = waiting.keys().any(|item| {
                matches!((item, &found[..]), (Item::Window { job, .. }, [Item::Window { job: first, .. }, ..]) if job != first)
            });
            let mut lengths = Vec::new();
            let mut of_job: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
            for item in &found {
                let length = waiting.remove(item);
                prop_assert!(length.is_some(), "{item:?} was lost or doubled");
                lengths.extend(length);
                if let Item::Window { job, .. } = item {
                    of_job.entry(*job).or_default().extend(length);
                }
            }
            let longest = lengths.iter().max().copied().unwrap_or(0);
            prop_assert!(lengths.len() <= 1 || longest * lengths.len() as u64 <= limits.batch, "{lengths:?}");
            if others {
                for lengths in of_job.values() {
                    let most = (limits.share * limits.batch as f64) as u64;
                    prop_assert!(lengths.len() == 1 || lengths.iter().sum::<u64>() <= most, "{lengths:?}");
                }
            }
            let is_live = |item: &Item| matches!(item, Item::Live(_));
            prop_assert!(found.iter().all(is_live) || !found.iter().any(is_live), "live windows go alone");
            Ok(())
        };
        for (index, step) in steps.into_iter().enumerate() {
            match step {
                Step::Push { job, samples } => {
                    schedule.push(job, index, samples);
                    waiting.insert(Item::Window { job, index }, samples);
                }
                Step::Live { samples } => {
                    schedule.push_live(index as u64, samples);
                    waiting.insert(Item::Live(index as u64), samples);
                }
                Step::Remove { job } => {
                    schedule.remove(job);
                    waiting.retain(|item, _| !matches!(item, Item::Window { job: of, .. } if *of == job));
                    prop_assert!(!schedule.jobs.contains_key(&job));
                }
                Step::Batch => check(schedule.next_batch(), &mut waiting)?,
            }
            prop_assert_eq!(schedule.is_empty(), waiting.is_empty());
        }
        while !schedule.is_empty() {
            let found = schedule.next_batch();
            prop_assert!(!found.is_empty());
            check(found, &mut waiting)?;
        }
        prop_assert!(waiting.is_empty(), "{waiting:?}");
        prop_assert!(schedule.next_batch().is_empty());
    }

    /// A recording of hours with whatever windows runs for some batches; then a window of another job comes.
    #[test]
    fn a_short_job_is_in_the_batch_after_it_comes(
        lengths in prop::collection::vec(1u64..20 * SECOND, 100..300), short in 1u64..20 * SECOND, before in 1usize..40,
    ) {
        let mut schedule = Schedule::new(limits(120, 0.5));
        for (index, length) in lengths.iter().enumerate() {
            schedule.push(1, index, *length);
        }
        for _ in 0..before {
            schedule.next_batch();
        }
        schedule.push(2, 0, short);
        let batch = schedule.next_batch();
        prop_assert!(batch.contains(&Item::Window { job: 2, index: 0 }), "{batch:?}");
    }

    #[test]
    fn jobs_that_wait_are_given_as_much(
        windows in prop::collection::vec(prop::collection::vec(SECOND / 4..20 * SECOND, 60), 2..5),
    ) {
        let limits = limits(60, 0.5);
        let mut schedule = Schedule::new(limits);
        for (job, lengths) in windows.iter().enumerate() {
            for (index, length) in lengths.iter().enumerate() {
                schedule.push(job as u64, index, *length);
            }
        }
        let mut given = vec![0u64; windows.len()];
        let mut left = vec![60usize; windows.len()];
        while left.iter().all(|left| *left > 0) {
            for item in schedule.next_batch() {
                if let Item::Window { job, index } = item {
                    given[job as usize] += windows[job as usize][index];
                    left[job as usize] -= 1;
                }
            }
            let (least, most) = (given.iter().min().unwrap(), given.iter().max().unwrap());
            // One may be a batch ahead of the mean, and then be given its share of another; all but one may.
            let bound = windows.len() as u64 * (limits.batch + limits.batch / 2);
            prop_assert!(most - least <= bound, "{given:?}");
        }
    }
}

#[test]
fn equal_jobs_end_about_together() {
    let mut schedule = Schedule::new(limits(60, 0.5));
    for index in 0..40 {
        for job in 0..4 {
            schedule.push(job, index, 5 * SECOND);
        }
    }
    let mut left = [40usize; 4];
    let mut ended = [0usize; 4];
    for batch in 1.. {
        let items = schedule.next_batch();
        if items.is_empty() {
            break;
        }
        assert_eq!(items.len(), 12.min(left.iter().sum()), "batches are full");
        for item in items {
            let Item::Window { job, .. } = item else {
                panic!("{item:?}")
            };
            left[job as usize] -= 1;
            ended[job as usize] = batch;
        }
    }
    assert_eq!(left, [0; 4]);
    assert!(ended.iter().all(|end| (13..=14).contains(end)), "{ended:?}");
}

#[test]
fn new_jobs_do_not_hold_up_an_old_one_for_ever() {
    let mut schedule = Schedule::new(limits(10, 0.5));
    for index in 0..100 {
        schedule.push(0, index, 10 * SECOND);
    }
    let mut given = 0;
    // In the time of each batch there come as many windows as it takes.
    for job in 1..100 {
        schedule.push(job, 0, 10 * SECOND);
        given += usize::from(jobs_of(&schedule.next_batch()).contains(&0));
    }
    assert!(given >= 3, "{given}");
    // One that comes back has nothing left over from when it was away.
    let mut schedule = Schedule::new(limits(10, 0.5));
    schedule.push(7, 0, SECOND);
    schedule.next_batch();
    for index in 0..100 {
        schedule.push(8, index, 10 * SECOND);
    }
    for _ in 0..50 {
        schedule.next_batch();
    }
    for index in 1..20 {
        schedule.push(7, index, 10 * SECOND);
    }
    let next: Vec<BTreeSet<u64>> = (0..10).map(|_| jobs_of(&schedule.next_batch())).collect();
    let old = next.iter().filter(|jobs| jobs.contains(&8)).count();
    assert!((4..=6).contains(&old), "{next:?}");
}

#[test]
fn live_windows_go_first_and_leave_something_to_recordings() {
    let mut schedule = Schedule::new(limits(60, 0.5));
    for index in 0..200 {
        schedule.push(1, index, 5 * SECOND);
    }
    assert_eq!(schedule.next_batch().len(), 12);
    let mut of_recordings = Vec::new();
    for round in 0..20u64 {
        schedule.push_live(round, SECOND);
        let batch = schedule.next_batch();
        match &batch[..] {
            [Item::Live(_), ..] => {}
            windows => of_recordings.push(windows.len()),
        }
    }
    // Every fifth batch, and a quarter as long.
    assert_eq!(of_recordings, [3; 4]);
    while schedule.live.front().is_some() {
        schedule.next_batch();
    }
    let after: Vec<usize> = (0..SHORT_AFTER_LIVE + 3).map(|_| schedule.next_batch().len()).collect();
    assert!(
        after[..SHORT_AFTER_LIVE - 1].iter().all(|windows| *windows == 3),
        "{after:?}"
    );
    assert_eq!(after.last(), Some(&12));
    // Live windows go together as far as they fit.
    let mut schedule = Schedule::new(limits(10, 0.5));
    for (key, seconds) in [(0, 3), (1, 4), (2, 5), (3, 30), (4, 1)] {
        schedule.push_live(key, seconds * SECOND);
    }
    let batches: Vec<usize> = (0..4).map(|_| schedule.next_batch().len()).collect();
    assert_eq!(batches, [2, 1, 1, 1]);
    assert!(schedule.is_empty());
}

#[test]
fn a_window_that_is_too_long_goes_alone() {
    let mut schedule = Schedule::new(limits(10, 1.0));
    for (index, seconds) in [20, 20, 2, 3].into_iter().enumerate() {
        schedule.push(1, index, seconds * SECOND);
    }
    let batches: Vec<usize> = (0..4).map(|_| schedule.next_batch().len()).collect();
    assert_eq!(batches, [1, 1, 2, 0]);
}
