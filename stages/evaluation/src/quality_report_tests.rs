use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array, Int64Array, RecordBatch};
use flow_runtime::harness::Harness;
use proptest::prelude::*;

use super::*;

/// Some rows, whose values are in no order: `snr_db` from 0 to 39.99, null for each hundredth row.
fn rows(range: std::ops::Range<usize>) -> RecordBatch {
    let snr = |row: usize| (!row.is_multiple_of(100)).then(|| ((row * 7919) % 4000) as f64 / 100.0);
    let columns: [(&str, ArrayRef); 3] = [
        ("snr_db", Arc::new(range.clone().map(snr).collect::<Float64Array>())),
        (
            "clipped_share",
            Arc::new(range.clone().map(|_| Some(0.0)).collect::<Float64Array>()),
        ),
        (
            "words",
            Arc::new(range.map(|row| Some(row as i64 - 50)).collect::<Int64Array>()),
        ),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true))).unwrap()
}

fn run(settings: &str, kept: Option<RecordBatch>) -> Result<(), StageError> {
    let all = rows(0..4000);
    let mut harness = Harness::<QualityReport>::from_yaml(settings)?.input("rows", all.schema());
    harness = harness
        .feed("rows", "a", all.slice(0, 1500))
        .feed("rows", "b", all.slice(1500, 2500));
    if let Some(kept) = kept {
        harness = harness.input("kept", kept.schema()).feed("kept", "a", kept);
    }
    harness.run().map(|_| ())
}

fn read(out: &Path) -> (String, Value) {
    let page = std::fs::read_to_string(out.join(PAGE)).unwrap();
    let figures = std::fs::read(out.join(FIGURES)).unwrap();
    (page, serde_json::from_slice(&figures).unwrap())
}

#[test]
fn a_page_has_histograms_percentiles_and_limits() {
    let folder = tempfile::tempdir().unwrap();
    let settings = format!("{{out: {:?}, limits: {{snr_db: {{min: 10}}}}}}", folder.path());
    run(&settings, Some(rows(0..1000))).unwrap();
    let (page, figures) = read(folder.path());
    let snr = &figures["columns"][0];
    let histogram = |name: &str| -> u64 {
        let bars = snr["histogram"][name].as_array().unwrap();
        bars.iter().map(|bar| bar.as_u64().unwrap()).sum()
    };
    let outside = snr["histogram"]["below"].as_u64().unwrap() + snr["histogram"]["above"].as_u64().unwrap();
    assert_eq!((&snr["values"], &snr["missing"]), (&json!(3960), &json!(40)));
    assert_eq!(histogram("rows") + outside, 3960);
    assert!(outside < 60 && histogram("kept") > 900 && histogram("kept") <= 990);
    // 1 in 4 rows is below 10, less those without a value.
    assert_eq!(snr["beyond_limits"], 990);
    let near = |name: &str, expected: f64| (snr[name].as_f64().unwrap() - expected).abs() < 0.1;
    assert!(near("p5", 2.0) && near("median", 20.0) && near("p95", 38.0), "{snr}");
    assert_eq!(
        (snr["max"].as_f64(), figures["columns"].as_array().unwrap().len()),
        (Some(39.99), 2)
    );
    // A column of one value.
    assert_eq!(figures["columns"][1]["p95"], 0.0);
    assert!(page.contains("class=\"limit\"") && page.contains("Signal-to-noise ratio in dB"));
    assert!(!page.contains("NaN") && !page.contains("inf"));
}

#[test]
fn columns_without_values_and_of_odd_numbers_are_drawn() {
    let folder = tempfile::tempdir().unwrap();
    for values in [
        vec![],
        vec![None, Some(f64::NAN), Some(f64::INFINITY)],
        vec![Some(f64::MAX), Some(f64::MIN), Some(5e-324)],
        vec![Some(-0.0), Some(0.0)],
    ] {
        let column: ArrayRef = Arc::new(values.iter().copied().collect::<Float64Array>());
        let rows = RecordBatch::try_from_iter_with_nullable([("snr_db", column, true)]).unwrap();
        let settings = format!(
            "{{out: {:?}, limits: {{snr_db: {{min: -1e300, max: 3}}}}}}",
            folder.path()
        );
        let harness = Harness::<QualityReport>::from_yaml(&settings).unwrap();
        harness
            .input("rows", rows.schema())
            .feed("rows", "a", rows)
            .run()
            .unwrap();
        let (page, figures) = read(folder.path());
        assert!(!page.contains("NaN") && !page.contains("inf"), "{values:?}");
        let finite = values.iter().flatten().filter(|value| value.is_finite()).count();
        assert_eq!(figures["columns"][0]["values"], finite);
    }
}

#[test]
fn settings_that_cannot_be_drawn_are_told() {
    for (settings, expected) in [
        ("{out: ''}", "name a folder"),
        ("{out: x, columns: [nothing]}", "no column of numbers `nothing`"),
        ("{out: x, limits: {words: {min: 1}}}", "`words` is not among"),
        ("{out: x, limits: {snr_db: {min: .nan}}}", "not finite"),
        ("{out: x, limits: {snr_db: {least: 1}}}", "least"),
    ] {
        let error = run(settings, None).unwrap_err();
        assert!(format!("{error:?}").contains(expected), "{settings}: {error:?}");
    }
    let column: ArrayRef = Arc::new(Int64Array::from(vec![1]));
    let kept = RecordBatch::try_from_iter([("words", column)]).unwrap();
    let error = run("{out: x}", Some(kept)).unwrap_err();
    assert!(
        format!("{error:?}").contains("`kept` has no column of numbers `snr_db`"),
        "{error:?}"
    );
}

proptest! {
    /// Percentiles are those of the sorted values, to 0.2 %, whatever the values and their order.
    #[test]
    fn percentiles_are_those_of_sorted_values(
        mut values in prop::collection::vec(prop::num::f64::NORMAL | prop::num::f64::ZERO, 1..60),
        share in 0.0..=1.0f64,
    ) {
        let mut sketch = Sketch::new();
        values.iter().for_each(|value| sketch.add(Some(*value)));
        values.sort_by(f64::total_cmp);
        let exact = values[(share * (values.len() - 1) as f64).round() as usize];
        let found = sketch.quantile(share).unwrap();
        prop_assert!((found - exact).abs() <= exact.abs() * 0.002 + 1e-300, "{} {}", found, exact);
    }
}
