use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::plan::BatchPlan;
use crate::test_data::train_rows;

fn hash(name: &str) -> u64 {
    let mut first = [0u8; 8];
    first.copy_from_slice(&blake3::hash(name.as_bytes()).as_bytes()[..8]);
    u64::from_be_bytes(first)
}

/// The golden train rows of mini, and a hash of each.
fn rows() -> (ManifestRows, Vec<u64>) {
    let mut rows = ManifestRows::default();
    let mut hashes = Vec::new();
    for (number, row) in train_rows("mini").iter().enumerate() {
        rows.durations.push(row.duration);
        rows.languages.push(&row.lang).unwrap();
        hashes.push(hash(&format!("row {number}")));
    }
    (rows, hashes)
}

fn packing() -> Packing {
    Packing {
        world_size: 2,
        grad_accum: 2,
        max_batch_seconds: 8.0,
        ..Packing::default()
    }
}

fn sizes(text: &[&str]) -> Vec<StageSize> {
    text.iter().map(|size| size.parse().unwrap()).collect()
}

fn curriculum(
    sizes: &[StageSize],
    stage_steps: &[u64],
    steps: u64,
    notes: Option<&Path>,
) -> (Curriculum, ManifestRows) {
    let (rows, hashes) = rows();
    let wanted = Wanted {
        plans: &[],
        sizes,
        stage_steps,
        steps,
        packing: &packing(),
        data: "data",
        notes,
    };
    let made = Curriculum::new::<SamplingError>(&rows, || Ok(hashes), &wanted);
    (made.unwrap(), rows)
}

#[test]
fn sizes_are_read_as_people_write_them() {
    for (text, rows, name) in [
        ("100k", 100_000, "100k"),
        ("100K", 100_000, "100k"),
        ("1M", 1_000_000, "1M"),
        ("1.5M", 1_500_000, "1500k"),
        ("500000", 500_000, "500k"),
        ("1234", 1_234, "1234"),
        ("0.25k", 250, "250"),
    ] {
        let size: StageSize = text.parse().unwrap();
        assert_eq!((size, size.to_string().as_str()), (StageSize::Rows(rows), name));
        assert_eq!(serde_json::from_value::<StageSize>(json!(name)).unwrap(), size);
    }
    assert_eq!(
        serde_json::from_value::<Vec<StageSize>>(json!([500_000, "all"])).unwrap(),
        sizes(&["500k", "all"])
    );
    for wrong in [
        "",
        "k",
        "-1",
        "0",
        "1.5",
        "1.2345k",
        "1m",
        "every",
        "1e5",
        "99999999999999999999",
        "1.M",
        ".5M",
    ] {
        assert!(wrong.parse::<StageSize>().is_err(), "{wrong}");
    }
    for wrong in [json!(-5), json!(0), json!(1.5), json!(null)] {
        assert!(serde_json::from_value::<StageSize>(wrong.clone()).is_err(), "{wrong}");
    }
}

#[test]
fn what_cannot_be_a_curriculum_is_refused_by_name() {
    let name = |text: &[&str], stage_steps: &[u64], steps| check(&sizes(text), stage_steps, steps).map_err(|e| e.0);
    assert_eq!(name(&["10", "20", "all"], &[], 3), Ok(()));
    assert_eq!(name(&["20", "10"], &[], 9), Err("curriculum"));
    assert_eq!(name(&["10", "10"], &[], 9), Err("curriculum"));
    assert_eq!(name(&["all", "10"], &[], 9), Err("curriculum"));
    assert_eq!(name(&["10", "20", "all"], &[], 2), Err("curriculum"));
    assert_eq!(name(&["10", "20"], &[4], 9), Ok(()));
    for wrong in [&[4, 5][..], &[9], &[0], &[u64::MAX]] {
        assert_eq!(name(&["10", "20"], wrong, 9), Err("curriculum_steps"), "{wrong:?}");
    }
    assert_eq!(name(&[], &[3], 9), Err("curriculum_steps"));
}

proptest! {
    /// Stages are nested and stratified, and their rows do not depend on the order in which rows come.
    #[test]
    fn stages_are_nested_and_stratified(
        counts in prop::collection::vec(1usize..60, 1..8),
        wanted in prop::collection::vec(1u64..300, 1..5),
        turn in any::<u64>(),
    ) {
        let mut names: Vec<(String, String)> = Vec::new();
        for (language, &count) in counts.iter().enumerate() {
            names.extend((0..count).map(|row| (format!("l{language}"), format!("{language}/{row}"))));
        }
        let select = |names: &[(String, String)], wanted: u64| -> BTreeSet<String> {
            let mut rows = ManifestRows::default();
            for (language, _) in names {
                rows.durations.push(1.0);
                rows.languages.push(language).unwrap();
            }
            let hashes: Vec<u64> = names.iter().map(|(_, name)| hash(name)).collect();
            let chosen = chosen(&rows, &hashes, wanted);
            assert!(chosen.is_sorted_by(|a, b| a < b));
            chosen.into_iter().map(|row| names[row as usize].1.clone()).collect()
        };
        let mut wanted = wanted;
        wanted.sort_unstable();
        let mut before = BTreeSet::new();
        let mut turned = names.clone();
        turned.sort_by_key(|(_, name)| hash(&format!("{turn} {name}")));
        for wanted in wanted {
            let now = select(&names, wanted);
            prop_assert_eq!(now.len(), (wanted as usize).min(names.len()));
            prop_assert!(now.is_superset(&before));
            prop_assert_eq!(&select(&turned, wanted), &now);
            let mut by_language: BTreeMap<&str, usize> = BTreeMap::new();
            for name in &now {
                *by_language.entry(name.split('/').next().unwrap()).or_default() += 1;
            }
            if now.len() >= counts.len() {
                prop_assert_eq!(by_language.len(), counts.len());
            }
            for (language, &count) in counts.iter().enumerate() {
                let share = now.len() as f64 * count as f64 / names.len() as f64;
                let has = by_language.get(language.to_string().as_str()).copied().unwrap_or(0) as f64;
                let off = (counts.len() as f64 * count as f64 / names.len() as f64).max(1.0);
                prop_assert!((has - share).abs() <= off + 1e-9, "{has} of {count}, share {share}");
            }
            before = now;
        }
    }

    #[test]
    fn ends_share_the_steps_out(weights in prop::collection::vec(1u64..5_000, 1..7), more in 0u64..1_000_000) {
        let total = weights.len() as u64 + more;
        let ends = ends(&weights, total);
        prop_assert_eq!(ends.last(), Some(&total));
        prop_assert!(ends[0] >= 1 && ends.is_sorted_by(|a, b| a < b));
        // Where there are steps enough, each end is the nearest whole number: the epochs of two stages differ by less
        // than a step of each.
        if total > 10_000 * weights.len() as u64 {
            let all: u64 = weights.iter().sum();
            let mut sum = 0;
            for (weight, end) in weights.iter().zip(&ends) {
                sum += weight;
                let exact = total as f64 * sum as f64 / all as f64;
                prop_assert!((*end as f64 - exact).abs() <= 0.5 + 1e-6, "{end} {exact}");
            }
        }
    }
}

#[test]
fn every_stage_has_the_same_number_of_epochs() {
    let (curriculum, rows) = curriculum(&sizes(&["60", "150", "all"]), &[], 200, None);
    let mut first = 0;
    let mut epochs = Vec::new();
    for stage in curriculum.stages() {
        assert_eq!(stage.first, first);
        let plan = BatchPlan::new(stage.rows(&rows), &stage.packing, 0).unwrap();
        let epoch = (plan.batches_per_rank() / 2) as f64;
        epochs.push(((stage.end - stage.first) as f64, epoch));
        first = stage.end;
    }
    assert_eq!(first, 200);
    for (steps, epoch) in &epochs {
        let mean = 200.0 / epochs.iter().map(|(_, epoch)| epoch).sum::<f64>();
        assert!((steps - mean * epoch).abs() <= 1.0, "{epochs:?}");
    }
    // The first stage is smaller than the others, and so has fewer steps.
    assert!(epochs[0].0 < epochs[1].0 && epochs[1].0 < epochs[2].0);
}

/// A stage is the run on its rows alone: the same batches, with row numbers of the whole.
#[test]
fn steps_draw_from_their_stage_and_from_nothing_else() {
    let (curriculum, rows) = curriculum(&sizes(&["60", "all"]), &[12], 30, None);
    let (_, hashes) = self::rows();
    let small = chosen(&rows, &hashes, 60);
    let part = rows.part(&small).unwrap();
    let stage = curriculum.stage(11).unwrap();
    assert_eq!((stage.first, stage.end, stage.size), (0, 12, StageSize::Rows(60)));
    let alone = Steps::new(packing(), &[], 0, "alone", None);
    let mut seen = BTreeSet::new();
    for number in 0..12 {
        let (ours, theirs) = (stage.step(&rows, number).unwrap(), alone.step(&part, number).unwrap());
        for (rank, micro) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let (ours, theirs) = (
                ours.micro_batch(rank, micro).unwrap(),
                theirs.micro_batch(rank, micro).unwrap(),
            );
            assert_eq!(ours, theirs);
            seen.extend(ours.iter().map(|&row| stage.row(row)));
        }
    }
    assert!(seen.iter().all(|row| small.contains(row)));
    let next = curriculum.stage(12).unwrap();
    assert_eq!((next.first, next.end, next.size), (12, 30, StageSize::All));
    let step = next.step(&rows, 12).unwrap();
    assert_eq!((step.epoch, step.in_epoch), (0, 0));
    let beyond = curriculum.stage(1_000).unwrap();
    assert_eq!(beyond.size, StageSize::All);
}

#[test]
fn a_place_is_found_again_whatever_became_of_the_notes() {
    let temp = tempfile::tempdir().unwrap();
    let wanted = sizes(&["60", "150", "all"]);
    let place = |notes: Option<&Path>| {
        let (curriculum, rows) = curriculum(&wanted, &[], 90, notes);
        curriculum.check(&rows).unwrap();
        let stage = curriculum.stage(40).unwrap();
        let step = stage.step(&rows, 40).unwrap();
        let batch: Vec<u32> = step
            .micro_batch(1, 1)
            .unwrap()
            .iter()
            .map(|&row| stage.row(row))
            .collect();
        let ends: Vec<u64> = curriculum.stages().iter().map(|stage| stage.end).collect();
        (ends, step.epoch, step.in_epoch, batch)
    };
    let without = place(None);
    assert_eq!(place(Some(temp.path())), without);
    assert_eq!(place(Some(temp.path())), without);
    let notes: Vec<_> = std::fs::read_dir(temp.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    let ends = notes
        .iter()
        .find(|path| path.to_string_lossy().contains("curriculum-"))
        .unwrap();
    let (steps, sum): (Vec<u64>, String) = serde_json::from_slice(&std::fs::read(ends).unwrap()).unwrap();
    for wrong in [json!([[1, 1, 9], sum]), json!([steps[..2], sum]), json!(7)] {
        std::fs::write(ends, wrong.to_string()).unwrap();
        assert_eq!(place(Some(temp.path())), without, "{wrong}");
    }
}

#[test]
fn a_stage_of_more_rows_than_there_are_is_all_of_them() {
    let (ours, rows) = curriculum(&sizes(&["60", "100k", "all"]), &[10, 10], 30, None);
    let stages = ours.stages();
    assert!(stages[1].part.is_none() && stages[2].part.is_none());
    assert_eq!(stages[1].rows(&rows).durations.len(), rows.durations.len());
    // No row's name is asked for where nobody is chosen.
    let wanted = Wanted {
        plans: &[],
        sizes: &sizes(&["100k"]),
        stage_steps: &[],
        steps: 5,
        packing: &packing(),
        data: "data",
        notes: None,
    };
    let asked = || -> Result<Vec<u64>, SamplingError> { panic!("asked for names") };
    Curriculum::new(&rows, asked, &wanted).unwrap();
    // A stage without a batch for every rank is named.
    let (_, hashes) = self::rows();
    let few = sizes(&["3", "all"]);
    let wanted = Wanted { sizes: &few, ..wanted };
    let error = Curriculum::new::<SamplingError>(&rows, || Ok(hashes), &wanted)
        .map(drop)
        .unwrap_err();
    assert!(
        error.to_string().starts_with("stage 3 of the curriculum: 3 rows make"),
        "{error}"
    );
}
