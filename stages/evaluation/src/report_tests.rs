use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array, StringArray, UInt32Array};
use flow_runtime::ROW;
use flow_runtime::harness::Harness;
use flow_sampling::plan::Balance;
use flow_sampling::plan_batches::{Plan, PlanSettings};

use super::*;

fn transcripts() -> RecordBatch {
    let text = |text: &str| -> ArrayRef { Arc::new(StringArray::from(vec![text])) };
    RecordBatch::try_from_iter([
        (ROW, Arc::new(UInt32Array::from(vec![0])) as ArrayRef),
        ("set", text("validation")),
        ("segment_id", text("a")),
        ("lang", text("hi")),
        ("reference", text("<|hi|> ek do")),
        ("hypothesis", text("<|hi|> ek do")),
        ("duration", Arc::new(Float64Array::from(vec![1.5]))),
    ])
    .unwrap()
}

/// Ten clips of `en` and two of `as`, as `sampling.plan` plans them.
fn languages(balance: Balance) -> RecordBatch {
    let count = 12;
    let langs = (0..count).map(|row| if row < 10 { "en" } else { "as" });
    let rows = RecordBatch::try_from_iter([
        (ROW, Arc::new(UInt32Array::from_iter_values(0..count)) as ArrayRef),
        ("duration", Arc::new(Float64Array::from(vec![2.0; count as usize]))),
        ("lang", Arc::new(StringArray::from_iter_values(langs))),
    ])
    .unwrap();
    let settings = PlanSettings {
        balance,
        temperature: 0.0,
        ..PlanSettings::default()
    };
    let plan = Harness::<Plan>::new(settings)
        .input("rows", rows.schema())
        .feed("rows", "en/en_0000", rows);
    plan.run().unwrap().rows("languages", "epoch-000000")
}

#[test]
fn what_an_epoch_emits_is_drawn_from_the_plan() {
    let page = |balance: Balance| {
        let folder = tempfile::tempdir().unwrap();
        let (transcripts, languages) = (transcripts(), languages(balance));
        Harness::<EvaluationReport>::new(ReportSettings {
            out: folder.path().join("report").display().to_string(),
            worst: 5,
        })
        .input("validation", transcripts.schema())
        .input("mixture", languages.schema())
        .feed("validation", "hi/hi_0000", transcripts)
        .feed("mixture", "epoch-000000", languages)
        .run()
        .unwrap();
        std::fs::read_to_string(folder.path().join("report").join(PAGE)).unwrap()
    };
    // 10 to 2 clips; half the time each under equal quotas, so that `as` comes three times.
    let order = page(Balance::Order);
    assert!(order.contains("83.3 %") && order.contains("16.7 %") && !order.contains("50.0 %"));
    assert!(order.contains("every row comes once"));
    let quota = page(Balance::Quota);
    assert!(quota.contains("83.3 %") && quota.contains("50.0 %"));
    assert!(quota.contains("The rows of as come most often, 3.0 times on average."));
}

#[test]
fn the_course_of_training_is_told_from_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let evaluation = |step: u64, hi: f64, all: f64| json!({ "kind": "evaluation", "step": step, "wer": all, "cer": 0.1, "languages": { "hi": { "wer": hi } } });
    let train =
        |step: u64, frozen: bool| json!({ "kind": "train", "step": step, "loss": 1.0, "encoder_frozen": frozen });
    let lines = [
        evaluation(0, 1.25, 1.125),
        train(10, true),
        evaluation(10, 0.75, 0.625),
        train(20, false),
        evaluation(20, 0.375, 0.5),
    ];
    let text: Vec<String> = lines.iter().map(Value::to_string).collect();
    std::fs::write(folder.path().join("metrics.jsonl"), text.join("\n")).unwrap();
    let curves = read_curves(&folder.path().join("metrics.jsonl"));
    let told: Vec<(u64, Option<bool>)> = curves.evaluations.iter().map(|e| (e.step, e.frozen)).collect();
    assert_eq!(told, [(0, None), (10, Some(true)), (20, Some(false))]);
    let table = course(&curves.evaluations).unwrap();
    assert_eq!(
        table["table"]["rows"],
        json!([
            ["hi", "125.0 %", "75.0 %", "37.5 %"],
            ["all", "112.5 %", "62.5 %", "50.0 %"]
        ])
    );
    assert_eq!(
        table["table"]["columns"],
        json!(["language", "before", "step 10", "step 20"])
    );
    let page = page(&PageData {
        curves,
        ..PageData::default()
    });
    assert!(page.contains("frozen") && page.contains("learned") && page.contains("112.5 %"));
    // Nothing is said of a run that began from nothing, and of many evaluations the first and the last are shown.
    assert_eq!(course(&[]), None);
    let many: Vec<Evaluated> = (0..100u64)
        .map(|step| Evaluated {
            step,
            ..Evaluated::default()
        })
        .collect();
    let steps: Vec<u64> = chosen(&many).iter().map(|e| e.step).collect();
    assert_eq!(steps, [0, 16, 33, 49, 66, 82, 99]);
}
