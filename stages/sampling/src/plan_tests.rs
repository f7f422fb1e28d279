use std::collections::BTreeMap;

use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use proptest::prelude::*;
use sha2::{Digest, Sha256};

use super::*;
use crate::figures::PlanFigures;
use crate::test_data::{golden, train_rows};

#[derive(serde::Deserialize)]
struct Configuration {
    max_dur: f64,
    world_size: u32,
    grad_accum: u32,
    temperature: f64,
    epoch: u64,
    seed: i64,
    weights: BTreeMap<String, String>,
    batches_per_rank: usize,
    sha256: String,
    ranks: Option<Vec<Vec<Vec<u32>>>>,
    first: Option<Vec<Vec<Vec<u32>>>>,
    last: Option<Vec<Vec<Vec<u32>>>>,
}

fn compare(corpus: &str, rows: &ManifestRows, count: usize) {
    let packed = std::fs::read(golden(corpus).join("batches.jsonl.zst"));
    let text = match packed {
        Ok(packed) => String::from_utf8(zstd::decode_all(&packed[..]).unwrap()).unwrap(),
        // Golden folders of others are not packed.
        Err(_) => std::fs::read_to_string(golden(corpus).join("batches.jsonl")).unwrap(),
    };
    let cases: Vec<Configuration> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(cases.len(), count);
    for case in cases {
        let packing = Packing {
            world_size: case.world_size,
            grad_accum: case.grad_accum,
            temperature: case.temperature,
            max_batch_seconds: case.max_dur,
            seed: case.seed,
            ..Packing::default()
        };
        let name = format!("{corpus} {packing:?} epoch {}", case.epoch);
        let weights = rows.languages.weights(case.temperature);
        assert_eq!(weights.len(), case.weights.len());
        for (language, weight) in rows.languages.names().iter().zip(weights) {
            assert_eq!(
                weight.to_bits(),
                case.weights[language].parse::<f64>().unwrap().to_bits(),
                "{name} {language}"
            );
        }
        let plan = BatchPlan::new(rows, &packing, case.epoch).unwrap();
        assert_eq!(plan.batches_per_rank(), case.batches_per_rank, "{name}");
        let ranks: Vec<Vec<Vec<u32>>> = (0..case.world_size)
            .map(|rank| plan.rank(rank).map(<[u32]>::to_vec).collect())
            .collect();
        let digest = hex::encode(Sha256::digest(serde_json::to_string(&ranks).unwrap()));
        assert_eq!(digest, case.sha256, "{name}");
        if let Some(expected) = case.ranks {
            assert_eq!(ranks, expected, "{name}");
        }
        let part =
            |take: fn(&[Vec<u32>]) -> &[Vec<u32>]| ranks.iter().map(|rank| take(rank).to_vec()).collect::<Vec<_>>();
        if let Some(first) = case.first {
            assert_eq!(first, part(|rank| &rank[..rank.len().min(2)]), "{name}");
        }
        if let Some(last) = case.last {
            assert_eq!(last, part(|rank| &rank[rank.len().saturating_sub(1)..]), "{name}");
        }
    }
}

fn manifest<'a>(each: impl IntoIterator<Item = (f64, &'a str)>) -> ManifestRows {
    let mut rows = ManifestRows::default();
    for (seconds, language) in each {
        rows.durations.push(seconds);
        rows.languages.push(language).unwrap();
    }
    rows
}

#[test]
fn equals_python_on_the_corpora() {
    for corpus in ["micro", "mini"] {
        let rows = train_rows(corpus);
        compare(
            corpus,
            &manifest(rows.iter().map(|row| (row.duration, row.lang.as_str()))),
            72,
        );
    }
}

#[test]
fn equals_python_on_twenty_thousand_rows() {
    let file = std::fs::File::open(golden("sampler_synth").join("input.parquet")).unwrap();
    let mut rows = ManifestRows::default();
    for batch in ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap() {
        let batch = batch.unwrap();
        rows.push(&batch).unwrap();
    }
    assert_eq!(rows.durations.len(), 20_000);
    compare("sampler_synth", &rows, 36);
}

#[test]
fn figures_add_up() {
    let mut rows = manifest([(1.0, "en"), (2.0, "hi"), (2.0, "en"), (10.0, "hi")]);
    let packing = Packing {
        max_batch_seconds: 5.0,
        ..Packing::default()
    };
    let plan = BatchPlan::new(&rows, &packing, 0).unwrap();
    let figures = PlanFigures::of(&plan, &rows);
    assert_eq!((figures.rows, figures.rows_in_batches, figures.batches), (4, 4, 2));
    assert_eq!((figures.seconds_per_batch, figures.longest_batch_seconds), (7.5, 10.0));
    // 1 s of padding in 6 + 10 s.
    assert_eq!(figures.padding_waste, 1.0 - 15.0 / 16.0);
    assert_eq!(figures.text_padding_waste, None);
    let hindi = &figures.languages[1];
    assert_eq!((hindi.language.as_str(), hindi.rows_in_batches), ("hi", 2));
    assert_eq!((hindi.seconds_in_batches, hindi.share_in_batches), (12.0, 0.8));
    rows.text_lengths = vec![5, 10, 9, 20];
    // 6 characters of padding in 30 + 20.
    assert_eq!(
        PlanFigures::of(&plan, &rows).text_padding_waste,
        Some(1.0 - 44.0 / 50.0)
    );
}

/// Buckets with sizes have batches of so many clips, but for the last one, whatever they last; without sizes nothing changes.
#[test]
fn a_bucket_with_a_size_is_packed_by_it() {
    let each = (0..400).map(|n| (0.5 + f64::from(n * 7 % 90) / 10.0, ["en", "hi"][n as usize % 2]));
    let mut rows = manifest(each);
    rows.text_lengths = (0..400).map(|n| n * 13 % 50).collect();
    let packing = Packing {
        boundaries: vec![3.0, 6.0],
        token_boundaries: vec![20],
        bucket_batch_size: vec![40, 30, 16, 12, 7, 5],
        ..Packing::default()
    };
    let plan = BatchPlan::new(&rows, &packing, 3).unwrap();
    let mut counts = vec![Vec::new(); packing.buckets()];
    for batch in plan.rank(0) {
        let bucket = |row: &u32| {
            let (row, edges) = (*row as usize, &packing.token_boundaries);
            bucket_of(&packing.boundaries, rows.durations[row]) * 2 + bucket_of(edges, rows.text_lengths[row])
        };
        let first = bucket(&batch[0]);
        assert!(batch.iter().all(|row| bucket(row) == first));
        counts[first].push(batch.len() as u32);
    }
    assert_eq!(counts.iter().flatten().sum::<u32>(), 400);
    for (counts, size) in counts.iter().zip(&packing.bucket_batch_size) {
        let not_full: Vec<&u32> = counts.iter().filter(|count| *count != size).collect();
        assert!(counts.len() > 1 && not_full.len() <= 1, "{counts:?} of {size}");
        assert!(not_full.iter().all(|count| *count < size));
    }
    // Keys and notes are those from before the setting.
    let text = serde_json::to_string(&Packing::default()).unwrap();
    assert!(!text.contains("bucket_batch_size"), "{text}");
    assert_eq!(serde_json::from_str::<Packing>(&text).unwrap(), Packing::default());
    for sizes in [vec![5; 5], vec![5, 0, 5, 5, 5, 5]] {
        let wrong = Packing {
            bucket_batch_size: sizes,
            ..packing.clone()
        };
        let (name, why) = wrong.check().unwrap_err();
        assert!(
            name == "bucket_batch_size" && why.contains("6 buckets (3 of durations"),
            "{why}"
        );
    }
}

#[test]
fn what_cannot_be_packed_is_refused() {
    let packing = Packing::default();
    for bad in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
        let error = BatchPlan::new(&manifest([(1.0, "en"), (bad, "en")]), &packing, 0).unwrap_err();
        assert!(matches!(error, SamplingError::Duration { row: 1, .. }), "{error}");
    }
    let good = manifest([(1.0, "en"), (1.0, "en")]);
    let mut uneven = good.clone();
    uneven.durations.pop();
    assert!(matches!(
        BatchPlan::new(&uneven, &packing, 0),
        Err(SamplingError::Rows { .. })
    ));
    let wrong = Packing {
        boundaries: vec![5.0, 3.0],
        ..Packing::default()
    };
    assert!(matches!(
        BatchPlan::new(&good, &wrong, 0),
        Err(SamplingError::Setting { name: "boundaries", .. })
    ));
    assert_eq!(
        BatchPlan::new(&ManifestRows::default(), &packing, 0)
            .unwrap()
            .batches_per_rank(),
        0
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn every_row_once_no_batch_too_long_every_rank_alike(
        rows in proptest::collection::vec((1u32..24_000, 0usize..5), 0..400),
        world_size in 1u32..5,
        grad_accum in 1u32..5,
        temperature in 0.0f64..1.5,
        seed in any::<i64>(),
        epoch in 0u64..1000,
    ) {
        let names = ["en", "hi", "ta", "bn", "as"];
        let rows = manifest(rows.iter().map(|(ms, code)| (f64::from(*ms) / 1000.0, names[*code])));
        let packing = Packing { world_size, grad_accum, temperature, max_batch_seconds: 20.0, seed, ..Packing::default() };
        let plan = BatchPlan::new(&rows, &packing, epoch).unwrap();
        prop_assert_eq!(plan.batches_per_rank() % grad_accum as usize, 0);
        let mut seen = vec![false; rows.durations.len()];
        for rank in 0..world_size {
            prop_assert_eq!(plan.rank(rank).count(), plan.batches_per_rank());
            for batch in plan.rank(rank) {
                let seconds: f64 = batch.iter().map(|&row| rows.durations[row as usize]).sum();
                prop_assert!(!batch.is_empty() && (batch.len() == 1 || seconds <= 20.0 + 1e-9));
                for &row in batch {
                    prop_assert!(!std::mem::replace(&mut seen[row as usize], true));
                }
            }
        }
        // At most one step's worth of batches per rank is left out.
        let left_out = plan.by_cost.len() - plan.batches_per_rank() * world_size as usize;
        prop_assert!(left_out < (world_size * grad_accum) as usize);
        prop_assert_eq!(plan.batch(world_size, 0), None);
    }
}
