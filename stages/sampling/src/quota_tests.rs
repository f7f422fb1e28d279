use proptest::prelude::*;

use super::*;
use crate::figures::PlanFigures;
use crate::plan::{Balance, BatchPlan};

fn manifest<'a>(each: impl IntoIterator<Item = (f64, &'a str)>) -> ManifestRows {
    let mut rows = ManifestRows::default();
    for (seconds, language) in each {
        rows.durations.push(seconds);
        rows.languages.push(language).unwrap();
    }
    rows
}

fn packing(temperature: f64, seed: i64) -> Packing {
    Packing {
        balance: Balance::Quota,
        temperature,
        seed,
        max_batch_seconds: 20.0,
        ..Packing::default()
    }
}

/// Rows, seconds and longest row of each language, and its share of time at this temperature.
fn wanted(rows: &ManifestRows, temperature: f64) -> Vec<(f64, f64, f64)> {
    let mut languages = vec![(0.0, 0.0, 0.0f64); rows.languages.names().len()];
    for (&code, &seconds) in rows.languages.codes().iter().zip(&rows.durations) {
        let language = &mut languages[usize::from(code)];
        *language = (language.0 + 1.0, language.1 + seconds, language.2.max(seconds));
    }
    let powers: f64 = languages.iter().map(|language| language.1.powf(temperature)).sum();
    let total: f64 = languages.iter().map(|language| language.1).sum();
    languages
        .into_iter()
        .map(|(_, seconds, longest)| (seconds, longest, total * seconds.powf(temperature) / powers))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn quotas_are_kept_and_nothing_starves(
        rows in proptest::collection::vec((1u32..24_000, 0usize..40), 1..300),
        temperature in prop_oneof![Just(0.0), Just(1.0), 0.0f64..1.5],
        seed in any::<i64>(),
        first_epoch in 0u64..100_000,
    ) {
        // Most rows are in the first language.
        let names = ["en", "hi", "ta", "bn", "as"];
        let rows = manifest(rows.iter().map(|(ms, code)| (f64::from(*ms) / 1000.0, *names.get(*code).unwrap_or(&"en"))));
        let packing = packing(temperature, seed);
        let wanted = wanted(&rows, temperature);
        let codes = rows.languages.codes();
        let mut so_far = vec![0u64; codes.len()];
        for epoch in first_epoch..first_epoch + 5 {
            let times = times(&rows, &packing, epoch).unwrap();
            prop_assert_eq!(&times, &super::times(&rows, &packing, epoch).unwrap());
            if temperature == 1.0 {
                prop_assert!(times.iter().all(|&times| times == 1));
            }
            let mut seconds = vec![0.0; wanted.len()];
            for (row, &times) in times.iter().enumerate() {
                so_far[row] += u64::from(times);
                seconds[usize::from(codes[row])] += f64::from(times) * rows.durations[row];
            }
            for (code, &(_, longest, quota)) in wanted.iter().enumerate() {
                prop_assert!((seconds[code] - quota).abs() <= longest + 1e-4, "{} s for a quota of {} s", seconds[code], quota);
            }
            for code in 0..wanted.len() {
                let alike = |counts: &mut dyn Iterator<Item = u64>| {
                    let counts: Vec<u64> = counts.collect();
                    counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1
                };
                let of_language = || (0..codes.len()).filter(|&row| usize::from(codes[row]) == code);
                // Within an epoch, and over all of them: what was left out comes before anything is repeated.
                prop_assert!(alike(&mut of_language().map(|row| u64::from(times[row]))));
                prop_assert!(alike(&mut of_language().map(|row| so_far[row])));
            }
        }
    }

    #[test]
    fn batches_hold_what_the_quotas_give_and_every_rank_has_as_many(
        rows in proptest::collection::vec((1000u32..20_000, 0usize..12), 1..300),
        world_size in 1u32..4,
        grad_accum in 1u32..4,
        epoch in 0u64..50,
    ) {
        let names = ["hi", "ta", "bn"];
        let rows = manifest(rows.iter().map(|(ms, code)| (f64::from(*ms) / 1000.0, *names.get(*code).unwrap_or(&"en"))));
        let packing = Packing { world_size, grad_accum, ..packing(0.3, 7) };
        let plan = BatchPlan::new(&rows, &packing, epoch).unwrap();
        prop_assert_eq!(&plan, &BatchPlan::new(&rows, &packing, epoch).unwrap());
        prop_assert_eq!(plan.batches_per_rank() % grad_accum as usize, 0);
        for rank in 0..world_size {
            prop_assert_eq!(plan.rank(rank).count(), plan.batches_per_rank());
        }
        // One rank that leaves no batch out emits exactly the quotas.
        let alone = Packing { world_size: 1, grad_accum: 1, ..packing };
        let plan = BatchPlan::new(&rows, &alone, epoch).unwrap();
        let mut emitted = vec![0u32; rows.durations.len()];
        plan.rank(0).flatten().for_each(|&row| emitted[row as usize] += 1);
        prop_assert_eq!(emitted, times(&rows, &alone, epoch).unwrap());
    }
}

#[test]
fn a_rare_language_gets_its_share_of_time() {
    // 100 h of en, 10 h of hi, 1 h of as.
    let rows = manifest((0..11_100).map(|row| match row % 111 {
        0 => (5.0, "as"),
        1..=10 => (5.0, "hi"),
        _ => (5.0, "en"),
    }));
    let shares = |temperature: f64, balance: Balance| -> Vec<f64> {
        let packing = Packing {
            balance,
            ..packing(temperature, 42)
        };
        let plan = BatchPlan::new(&rows, &packing, 3).unwrap();
        let figures = PlanFigures::of(&plan, &rows);
        figures
            .languages
            .iter()
            .map(|language| language.share_in_batches)
            .collect()
    };
    let near = |got: Vec<f64>, wanted: [f64; 3]| {
        assert!(
            got.iter().zip(wanted).all(|(got, wanted)| (got - wanted).abs() < 5e-4),
            "{got:?}, {wanted:?}"
        );
    };
    let powers = [1.0, 100f64.sqrt(), 10f64.sqrt()];
    let sum: f64 = powers.iter().sum();
    near(shares(0.0, Balance::Quota), [1.0 / 3.0; 3]);
    near(shares(0.5, Balance::Quota), powers.map(|power| power / sum));
    let natural = [1.0 / 111.0, 100.0 / 111.0, 10.0 / 111.0];
    near(shares(1.0, Balance::Quota), natural);
    // The order of rows alone does not change how often a language comes.
    near(shares(0.0, Balance::Order), natural);
}

#[test]
fn a_quota_that_would_repeat_without_end_is_refused() {
    // A microsecond of `as` would come a billion times to fill half the epoch.
    let rows = manifest((0..500).map(|_| (20.0, "en")).chain([(1e-6, "as")]));
    let error = BatchPlan::new(&rows, &packing(0.0, 1), 0).unwrap_err();
    assert!(
        matches!(&error, SamplingError::Repeats { language, rows: 1, .. } if language == "as"),
        "{error}"
    );
    // Odd lengths and the last epoch are no harm.
    for seconds in [f64::MIN_POSITIVE, 1e-300, 1e300, f64::MAX] {
        let rows = manifest([(seconds, "en"), (seconds, "hi")]);
        assert_eq!(times(&rows, &packing(0.5, i64::MIN), u64::MAX).unwrap(), [1, 1]);
    }
    assert!(times(&ManifestRows::default(), &packing(0.5, 1), 0).unwrap().is_empty());
}
