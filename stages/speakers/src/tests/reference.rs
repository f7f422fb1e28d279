//! The steps after the networks, one after the other, against a golden run of the whole: segmentations and embeddings to
//! clusters, turns and error rate.

use crate::chunks::{Geometry, Segmentations, speaker_count};
use crate::clustering::agglomerative::Agglomerative;
use crate::clustering::assign::Assignment;
use crate::clustering::{Embeddings, tests::clusters, tests::same_partition, training_places};
use crate::error_rate::{Scoring, errors};
use crate::golden;
use crate::reconstruct::{Candidates, reconstruct};
use crate::rttm::read_rttm;
use crate::turns::tests::assert_turns;
use crate::turns::{Thresholds, Turn};

#[test]
fn turns_and_error_rates_are_those_of_the_reference() {
    let tensors = golden::Tensors::load("flow_reference.safetensors");
    let geometry = Geometry::SEGMENTATION;
    let cases = golden::json("flow_reference.json");
    assert!(!cases.as_array().unwrap().is_empty());
    for case in cases.as_array().unwrap() {
        let key = case["key"].as_str().unwrap();
        let recording = key.split('.').next().unwrap();
        let (shape, values) = tensors.bytes(&format!("{recording}.segmentations"));
        let segmentations = Segmentations::new(&values, shape[1], shape[2]).unwrap();
        let (shape, values) = tensors.floats(&format!("{recording}.embeddings"));
        let embeddings = Embeddings::new(&values, shape[1], shape[2]).unwrap();

        let settings = Agglomerative {
            threshold: case["threshold"].as_f64().unwrap(),
            min_cluster_size: case["min_cluster_size"].as_u64().unwrap() as usize,
            assignment: Assignment::Constrained,
        };
        let places = training_places(&embeddings, &segmentations).unwrap();
        let wanted = clusters(&case["arguments"]);
        let heard = golden::speakers_heard(&cases, recording);
        let found = settings.cluster(&embeddings, &places, &wanted).unwrap();
        let (_, hard) = tensors.integers(&format!("{key}.hard"));
        assert!(same_partition(&found.clusters, &hard), "{key}");

        // Clusters are numbered as scipy numbers them, so turns have the same numbers.
        let found = found.without_silent(&segmentations);
        let most = wanted.number.or(wanted.most).unwrap_or(usize::MAX);
        let count = speaker_count(&segmentations, &geometry).unwrap();
        let found_turns = |most: usize| {
            let count: Vec<u8> = count.iter().map(|&count| usize::from(count).min(most) as u8).collect();
            let of = |candidates| reconstruct(&segmentations, &found.clusters, &count, &geometry, candidates).unwrap();
            let all = of(Candidates::All);
            // Where more speakers are counted than clusters have votes, the original makes others active.
            let voted = of(Candidates::Voted);
            assert!(
                voted.active.iter().zip(&all.active).all(|(voted, all)| voted <= all),
                "{key}"
            );
            assert!(
                wanted.number.is_some_and(|number| number < heard) || voted == all,
                "{key}"
            );
            all.turns(&geometry, &Thresholds::default()).unwrap()
        };
        assert_turns(&found_turns(1), &case["exclusive_turns"], key);
        let all = found_turns(most);
        assert_turns(&all, &case["turns"], key);

        let named = |turn: &Turn<usize>| Turn {
            start: turn.start,
            end: turn.end,
            speaker: turn.speaker.to_string(),
        };
        let hypothesis: Vec<Turn> = all.iter().map(named).collect();
        let text = std::fs::read_to_string(golden::file(&format!("{recording}.rttm"))).unwrap();
        let (found, _) = errors(&read_rttm(&text).unwrap()[recording], &hypothesis, &Scoring::default()).unwrap();
        let expected = &case["der_no_collar_with_overlap"];
        let parts = [
            ("total", found.total),
            ("correct", found.correct),
            ("confusion", found.confusion),
            ("false alarm", found.false_alarm),
            ("missed detection", found.missed),
            ("diarization error rate", found.der()),
        ];
        for (name, found) in parts {
            // The golden figures are rounded to six digits.
            let expected = expected[name].as_f64().unwrap();
            assert!(
                (found - expected).abs() < 2e-6,
                "{key}, {name}: {found}, not {expected}"
            );
        }
    }
}
