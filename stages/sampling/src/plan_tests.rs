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
