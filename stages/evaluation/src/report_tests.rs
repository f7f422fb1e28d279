use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array, RecordBatch, StringArray, UInt32Array};
use flow_kind::ROW;
use flow_runtime::harness::Harness;
use flow_sampling::plan::Balance;
use flow_sampling::plan_batches::{Plan, PlanSettings};

use super::*;
use crate::decode::word_lists;
use crate::page::chosen;
use crate::screen::course;
use crate::transcribe::HeardWord;

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
            ..ReportSettings::default()
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
    assert!(quota.contains("The rows of Assamese come most often, 3.0 times on average."));
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

#[test]
fn the_page_begins_with_model_data_date_and_what_training_gained() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = folder.path().join("step-000000020");
    std::fs::create_dir(&checkpoint).unwrap();
    let told = json!({ "identity": { "init": "models/small.nemo" } });
    std::fs::write(checkpoint.join("training.json"), told.to_string()).unwrap();
    let evaluation = |step: u64, wer: f64| {
        let languages = json!({ "hi": { "wer": wer, "utterances": 40 }, "ml": { "wer": 1.0, "utterances": 1 } });
        json!({ "kind": "evaluation", "step": step, "wer": wer, "cer": 0.1, "languages": languages, "time": 1795860400.5 + step as f64 })
    };
    let lines = [
        evaluation(0, 0.452),
        json!({ "kind": "train", "step": 10, "loss": 1.0, "time": 1795860401.0 }),
        evaluation(20, 0.097),
        // Of another checkpoint than the one that is scored.
        evaluation(30, 0.3),
    ];
    let text: Vec<String> = lines.iter().map(Value::to_string).collect();
    std::fs::write(folder.path().join("metrics.jsonl"), text.join("\n")).unwrap();
    let path = checkpoint.display().to_string();
    let mut set = SetFigures {
        name: "validation".into(),
        ..Default::default()
    };
    for _ in 0..3 {
        set.scores.add("hi", &crate::wer::score("a b c d", "a b c e"), 7200.0);
    }
    set.scores.add("ml", &crate::wer::score("a", "b"), 7200.0);
    let mut data = PageData {
        model: Some(ModelFigures {
            init: init_of(&path),
            path,
            step: 20,
            ..ModelFigures::default()
        }),
        sets: vec![set],
        curves: read_curves(&folder.path().join("metrics.jsonl")),
        languages: vec![("hi".into(), 430, 7000.0), ("ml".into(), 5, 200.0)],
        ..PageData::default()
    };
    let made = page(&data);
    let order = [
        "<title>Fine-tuning of small.nemo</title>",
        "began from <code>models/small.nemo</code>",
        "435 utterances, 2.00 h of speech in Hindi, Malayalam",
        "validation: 4 utterances, 8.00 h",
        "28 November 2026, 10:07 UTC",
        "45.2 → 9.7 %",
        "Loss by optimizer step",
        "Word error rate while training",
        "Error rates: validation",
    ];
    let places: Vec<usize> = order
        .iter()
        .map(|part| made.find(part).unwrap_or_else(|| panic!("{part}: {made}")))
        .collect();
    assert!(places.is_sorted(), "{places:?}");
    // Malayalam has one utterance in both tables.
    assert_eq!(made.matches("few\"><td>Malayalam").count(), 2, "{made}");
    assert_eq!(made.matches("of one utterance alone").count(), 2);
    assert!(!made.contains(">95 %<"), "four utterances give no interval");
    for _ in 0..9 {
        data.sets[0]
            .scores
            .add("hi", &crate::wer::score("a b c d", "a b c d"), 1.0);
    }
    // By hand: errors 1 of 4 in 3 utterances, 0 of 4 in 9, 1 of 1 in one; the rate is 4/49.
    assert!(page(&data).contains(">0.8–15.6<"), "{}", page(&data));
    // A damaged state says nothing.
    std::fs::write(checkpoint.join("training.json"), "{").unwrap();
    assert_eq!(init_of(&checkpoint.display().to_string()), None);
}

#[test]
fn the_validation_loss_stands_in_the_chart_of_the_loss_and_in_the_table() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    let made = |loss: Value| {
        let lines = [
            json!({ "kind": "train", "step": 10, "loss": 1.0 }),
            json!({ "kind": "evaluation", "step": 10, "wer": 0.5, "cer": 0.1, "loss": loss, "languages": {} }),
        ];
        let text: Vec<String> = lines.iter().map(Value::to_string).collect();
        std::fs::write(&path, text.join("\n")).unwrap();
        let curves = read_curves(&path);
        let points = curves.validation_loss.clone();
        let page = page(&PageData {
            curves,
            ..PageData::default()
        });
        (points, page.contains("0.8125"), page.contains("key s1\">validation<"))
    };
    assert_eq!(made(json!(0.8125)), (vec![(10.0, 0.8125)], true, true));
    assert_eq!(made(Value::Null), (Vec::new(), false, false));
}

#[test]
fn what_could_not_be_loaded_stands_in_the_tiles() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    let left_out = |step: u64, count: u64| json!({ "kind": "left_out", "step": step, "recordings": count });
    let skipped = |step: u64, why: &str| json!({ "kind": "skipped", "step": step, "why": why });
    let lines = [
        left_out(3, 1200),
        left_out(4, 34),
        skipped(4, "nothing_loaded"),
        skipped(5, "not_finite"),
        // As it was written when that was the only reason.
        json!({ "kind": "skipped", "step": 6 }),
    ];
    let text: Vec<String> = lines.iter().map(Value::to_string).collect();
    std::fs::write(&path, text.join("\n")).unwrap();
    let curves = read_curves(&path);
    assert_eq!((curves.left_out, curves.not_loaded, curves.skipped), (1234, 1, 2));
    let with = page(&PageData {
        curves,
        ..PageData::default()
    });
    assert!(with.contains("<b>1,234</b>") && with.contains("recordings left out"));
    assert!(with.contains("nothing could be loaded"));
    assert!(!page(&PageData::default()).contains("left out"));
}

/// Utterances of two languages, lengths and shards, one of them with its audio.
fn heard() -> RecordBatch {
    let text = |texts: [&str; 4]| -> ArrayRef { Arc::new(StringArray::from(texts.to_vec())) };
    let clips: [Option<&[u8]>; 4] = [None, Some(b"fLaC"), None, None];
    RecordBatch::try_from_iter_with_nullable([
        (ROW, Arc::new(UInt32Array::from(vec![0, 1, 2, 3])) as ArrayRef, false),
        ("set", text(["v"; 4]), false),
        ("segment_id", text(["a", "b", "c", "d"]), false),
        ("lang", text(["hi", "hi", "en", "en"]), false),
        (
            "reference",
            text(["<|hi|> ek do", "<|hi|> \u{939}\u{93f}", "<|en|> Yes.", "<|en|> no"]),
            false,
        ),
        (
            "hypothesis",
            text(["<|hi|> ek", "<|ur|> \u{939} x", "<|en|> yes", "no"]),
            false,
        ),
        (
            "duration",
            Arc::new(Float64Array::from(vec![2.9, 3.0, 4.0, 20.0])),
            false,
        ),
        ("source", text(["s"; 4]), false),
        ("shard", text(["one", "two", "two", "two"]), false),
        (
            "audio_path",
            Arc::new(StringArray::from(vec![Some("/a/b.flac"), None, None, None])),
            true,
        ),
        (
            "tar_path",
            Arc::new(StringArray::from(vec![None, Some("x/y.tar"), Some("x/y.tar"), None])),
            true,
        ),
        (
            "tar_offset",
            Arc::new(arrow::array::Int64Array::from(vec![None, Some(512), Some(1024), None])),
            true,
        ),
        (
            "tar_size",
            Arc::new(arrow::array::Int64Array::from(vec![None, Some(7), Some(8), None])),
            true,
        ),
        (
            "start",
            Arc::new(Float64Array::from(vec![Some(1.5), None, None, None])),
            true,
        ),
        ("clip", Arc::new(arrow::array::BinaryArray::from_iter(clips)), true),
    ])
    .unwrap()
}

fn report_on(heard: RecordBatch, settings: Value) -> Result<tempfile::TempDir, StageError> {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = settings;
    settings["out"] = json!(folder.path().join("report"));
    let settings: ReportSettings = serde_json::from_value(settings).unwrap();
    Harness::<EvaluationReport>::new(settings)
        .input("heard", heard.schema())
        .feed("heard", "all", heard)
        .run()?;
    Ok(folder)
}

#[test]
fn figures_come_by_language_length_and_source_and_tags_in_a_table() {
    let folder = report_on(heard(), json!({ "normalize": "keep_marks", "shards": "/shards" })).unwrap();
    let read = |name: &str| std::fs::read_to_string(folder.path().join("report").join(name)).unwrap();
    let scores: Value = serde_json::from_str(&read(SCORES)).unwrap();
    let set = &scores["sets"][0];
    let ranges: Vec<(&str, &Value)> = (set["durations"].as_array().unwrap().iter())
        .map(|range| (range["range"].as_str().unwrap(), &range["score"]["words"]["deletions"]))
        .collect();
    let (none, one) = (&json!(0), &json!(1));
    assert_eq!(ranges, [("under 3 s", one), ("3 to 5 s", none), ("from 16 s", none)]);
    // One source for all tells nothing; the shards do.
    assert_eq!(
        (&set["source_kind"], &set["sources"]["two"]["utterances"]),
        (&json!("shard"), &json!(3))
    );
    let en = &set["languages"]["en"];
    assert_eq!(
        (&en["words"]["substitutions"], &en["normalized_words"]["substitutions"]),
        (&json!(1), &json!(0))
    );
    let tags = set["tags"].as_array().unwrap();
    assert!(tags.contains(&json!({ "reference": "en", "heard": "", "utterances": 1 })));
    assert_eq!(tags.len(), 4);
    let page = read(PAGE);
    assert!(page.contains("3 to 5 s") && page.contains("By shard") && page.contains("data:audio/flac;base64,ZkxhQw=="));
    assert_eq!(page.matches("<audio").count(), 1);
    let lines: Vec<Value> = read(TRANSCRIPTS)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        lines[0],
        json!({ "audio_filepath": "/a/b.flac", "duration": 2.9, "text": "<|hi|> ek do", "pred_text": "<|hi|> ek", "lang": "hi",
                "segment_id": "a", "set": "v", "source": "s", "offset": 1.5 })
    );
    assert_eq!(
        (&lines[1]["audio_filepath"], &lines[1]["tar_offset"]),
        (&json!("/shards/x/y.tar"), &json!(512))
    );
    assert_eq!(lines.len(), 4);
}

#[test]
fn the_screen_has_the_short_tables() {
    let mut data = PageData::default();
    let artifact = Artifact::in_memory(
        heard().schema(),
        vec![(flow_kind::Partition::new("all"), vec![heard()])],
    )
    .unwrap();
    let settings: ReportSettings = serde_json::from_value(json!({ "out": "x", "normalize": "whisper_basic" })).unwrap();
    data.normalizer = settings.measure().normalizer;
    data.sets = read_sets(&artifact, &settings.measure(), &KnownTimes::new()).unwrap();
    let tables = tables(&data);
    let titles: Vec<&str> = tables.iter().map(|t| t["table"]["title"].as_str().unwrap()).collect();
    assert_eq!(
        titles,
        ["Error rates: v", "By duration: v", "By shard: v", "Language tags: v"]
    );
    // The vowel sign is a space: one letter stays of the word, and it is heard.
    let rows = &tables[0]["table"]["rows"];
    assert_eq!(
        rows[1],
        json!(["hi", 2, 3, "100.0 %", "71.4 %", "66.7 %", "83.3 %", 1, 1, 1, 1]),
        "{rows}"
    );
    assert_eq!(
        tables[3]["table"]["columns"],
        json!(["tag, heard as", "en", "hi", "ur", "none"])
    );
    assert_eq!(
        tables[3]["table"]["rows"],
        json!([["en", 1, "", "", 1], ["hi", "", 1, 1, ""]])
    );
}

#[test]
fn a_report_on_nothing_is_an_error_that_says_where_the_rows_went() {
    let refused = |number: u32, reason: &str| flow_kind::Reject {
        row: Some(number),
        id: None,
        reason: reason.into(),
        class: flow_kind::RejectClass::Rule,
        detail: String::new(),
        values: String::new(),
    };
    let on = |heard: RecordBatch| {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("report");
        let mut harness = Harness::<EvaluationReport>::new(ReportSettings {
            out: out.display().to_string(),
            ..ReportSettings::default()
        })
        .input("heard", heard.schema())
        .feed("heard", "all", heard);
        for (number, reason) in (0..).zip(["quality_too_low", "too_short", "too_short"]) {
            harness = harness.rejected("clean", "hi/hi_0000", refused(number, reason));
        }
        let error = harness.run().unwrap_err().to_string();
        assert!(!out.join(PAGE).exists());
        error
    };
    let told = on(transcripts().slice(0, 0));
    assert!(told.contains("no transcripts"), "{told}");
    assert!(
        told.contains("3 were refused") && told.contains("`too_short` of stage clean, 2 times"),
        "{told}"
    );
    // Rows whose references are tags alone have no word either.
    let mut columns = transcripts().columns().to_vec();
    columns[4] = Arc::new(StringArray::from(vec!["<|hi|> "]));
    let silent = RecordBatch::try_new(transcripts().schema(), columns).unwrap();
    let told = on(silent);
    assert!(
        told.contains("set `validation`") && told.contains("too_short"),
        "{told}"
    );
}

#[test]
fn options_that_would_do_nothing_are_refused() {
    for (settings, named) in [
        (json!({ "remove_diacritics": true }), "remove_diacritics"),
        (
            json!({ "normalize": "keep_marks", "remove_diacritics": true }),
            "remove_diacritics",
        ),
        (json!({ "split_letters": true }), "split_letters"),
        (json!({ "duration_bounds": [5, 3] }), "duration_bounds"),
    ] {
        let error = report_on(heard(), settings).map(drop).unwrap_err();
        assert!(error.to_string().contains(named), "{error}");
    }
}

/// Forty utterances of ten recordings and two speakers; every second recording has errors.
fn forty(reversed: bool) -> RecordBatch {
    let mut rows: Vec<u32> = (0..40).collect();
    if reversed {
        rows.reverse();
    }
    let text = |of: &dyn Fn(u32) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(rows.iter().map(|row| of(*row))))
    };
    RecordBatch::try_from_iter([
        (ROW, Arc::new(UInt32Array::from_iter_values(0..40)) as ArrayRef),
        ("set", text(&|_| "v".into())),
        ("segment_id", text(&|row| format!("s{row}"))),
        (
            "lang",
            text(&|row| if row % 2 == 0 { "en".into() } else { "hi".into() }),
        ),
        ("reference", text(&|_| "Twenty one office जा Anna".into())),
        (
            "hypothesis",
            text(&|row| match row / 4 % 2 {
                0 => "21 office जा Anna".into(),
                _ => "21 जा Hannah".into(),
            }),
        ),
        ("duration", Arc::new(Float64Array::from(vec![1.0; 40]))),
        ("audio_path", text(&|row| format!("/a/{}.wav", row / 4))),
        (
            "speaker",
            text(&|row| if row < 20 { "x".into() } else { String::new() }),
        ),
    ])
    .unwrap()
}

#[test]
fn intervals_columns_and_groups_of_words_are_reported() {
    let settings = json!({
        "normalize": "by_language", "resamples": 500, "seed": 3, "by": ["speaker"], "names": ["Anna"], "switches": true,
    });
    let scores_of = |heard: RecordBatch, settings: &Value| {
        let folder = report_on(heard, settings.clone()).unwrap();
        let read = |name: &str| std::fs::read_to_string(folder.path().join("report").join(name)).unwrap();
        let scores: Value = serde_json::from_str(&read(SCORES)).unwrap();
        (scores, read(PAGE))
    };
    let (scores, page) = scores_of(forty(false), &settings);
    let set = &scores["sets"][0];
    let overall = &set["overall"];
    assert_eq!(overall["clusters"], 10);
    let bounds = |name: &str| {
        let bound = |at: usize| overall[name][at].as_f64().unwrap();
        (bound(0), bound(1))
    };
    // 2 errors in 5 words in half of the recordings, 4 in the others.
    let (low, high) = bounds("word_error_rate_interval");
    assert!((0.4..0.6).contains(&low) && (0.6..=0.8).contains(&high), "{low} {high}");
    assert!(bounds("normalized_character_error_rate_interval").0 > 0.0);
    assert_eq!(set["columns"]["speaker"]["x"]["utterances"], 20);
    assert_eq!(set["columns"]["speaker"][""]["clusters"], 5);
    assert_eq!(
        (&set["names"]["occurrences"], &set["names"]["correct"]),
        (&json!(40), &json!(20))
    );
    // जा and `Anna`: the latter is wrong in half of the utterances.
    let points = &set["switches"]["points"];
    assert_eq!(
        (&points["units"], &points["deletions"], &points["substitutions"]),
        (&json!(80), &json!(0), &json!(20))
    );
    for part in [
        "By <code>speaker</code>",
        "20 of 40 names",
        "Where the script",
        "drawn as a whole",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    // The order of rows has no influence.
    assert_eq!(scores_of(forty(true), &settings).0, scores);
    let mut other = settings.clone();
    other["cluster"] = json!("speaker");
    // The rows without a speaker represent themselves.
    assert_eq!(scores_of(forty(false), &other).0["sets"][0]["overall"]["clusters"], 21);
    // Nothing more without these settings.
    let (scores, page) = scores_of(forty(false), &json!({}));
    let set = scores["sets"][0].as_object().unwrap();
    assert!(
        ["columns", "names", "switches", "rare_words"]
            .iter()
            .all(|name| !set.contains_key(*name))
    );
    assert!(set["overall"].get("clusters").is_none() && page.contains("taken as independent"));
}

#[test]
fn words_are_counted_in_the_train_rows() {
    let train = RecordBatch::try_from_iter([
        (ROW, Arc::new(UInt32Array::from(vec![0, 1])) as ArrayRef),
        (
            "text",
            Arc::new(StringArray::from(vec!["<|en|> ONE office", "office"])) as ArrayRef,
        ),
        ("lang", Arc::new(StringArray::from(vec!["en", "en"])) as ArrayRef),
        ("duration", Arc::new(Float64Array::from(vec![1.0, 1.0])) as ArrayRef),
    ])
    .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let heard = forty(false);
    let settings = json!({ "out": folder.path().join("report"), "training_counts": [1, 2], "normalize": "keep_marks" });
    Harness::<EvaluationReport>::new(serde_json::from_value::<ReportSettings>(settings).unwrap())
        .input("heard", heard.schema())
        .input("train", train.schema())
        .feed("heard", "all", heard)
        .feed("train", "all", train)
        .run()
        .unwrap();
    let scores = std::fs::read_to_string(folder.path().join("report").join(SCORES)).unwrap();
    let scores: Value = serde_json::from_str(&scores).unwrap();
    let ranges: Vec<(&str, u64)> = scores["sets"][0]["rare_words"]
        .as_array()
        .unwrap()
        .iter()
        .map(|range| {
            (
                range["training_count"].as_str().unwrap(),
                range["words"]["units"].as_u64().unwrap(),
            )
        })
        .collect();
    assert_eq!(ranges, [("0", 120), ("1", 40), ("2 or more", 40)]);
}

#[test]
fn settings_that_need_others_are_refused() {
    for (settings, named) in [
        (json!({ "training_counts": [1] }), "needs an input `train`"),
        (json!({ "training_counts": [0, 1] }), "rising numbers"),
        (json!({ "cluster": "speaker" }), "needs `resamples`"),
        (json!({ "by": ["gender"] }), "has no column `gender`"),
        (json!({ "ascii_digits": true }), "needs `indic`"),
        (json!({ "resamples": 2_000_000 }), "at most 1000000"),
        (json!({ "normalize_languages": { "en": "whisper" } }), "whisper"),
    ] {
        let wrong = || -> Result<(), Box<dyn std::error::Error>> {
            let mut named = settings.clone();
            named["out"] = json!("x");
            let _: ReportSettings = serde_json::from_value(named)?;
            report_on(forty(false), settings.clone()).map(drop)?;
            Ok(())
        };
        let error = wrong().unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn confidences_and_times_of_words_are_on_the_page() {
    let heard = |text: &str, times: [f64; 2], confidence: f64| HeardWord {
        text: text.to_owned(),
        times,
        confidence,
    };
    let list = |words: &[HeardWord]| -> ArrayRef { Arc::new(word_lists(&[words]).unwrap()) };
    let text = |text: &str| -> ArrayRef { Arc::new(StringArray::from(vec![text])) };
    let found = [
        heard("ek", [0.1, 0.4], 0.9),
        heard("do", [0.5, 0.8], 0.6),
        heard("das", [1.0, 1.2], 0.6),
    ];
    let transcripts = RecordBatch::try_from_iter([
        (ROW, Arc::new(UInt32Array::from(vec![0])) as ArrayRef),
        ("set", text("validation")),
        ("segment_id", text("a")),
        ("lang", text("hi")),
        ("reference", text("<|hi|> ek do teen")),
        ("hypothesis", text("<|hi|> ek do das")),
        ("duration", Arc::new(Float64Array::from(vec![1.5]))),
        ("word", list(&found)),
    ])
    .unwrap();
    // `do` was not said, as the alignment has it.
    let known = [
        heard("ek", [0.05, 0.4], 0.8),
        heard("do", [0.4, 0.4], 0.0),
        heard("teen", [0.9, 1.2], 0.7),
    ];
    let alignments = RecordBatch::try_from_iter([
        (ROW, Arc::new(UInt32Array::from(vec![0])) as ArrayRef),
        ("segment_id", text("a")),
        ("words", list(&known)),
    ])
    .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("report");
    Harness::<EvaluationReport>::new(ReportSettings {
        out: out.display().to_string(),
        ..ReportSettings::default()
    })
    .input("validation", transcripts.schema())
    .input("alignments", alignments.schema())
    .feed("validation", "hi/hi_0000", transcripts)
    .feed("alignments", "hi/hi_0000", alignments)
    .run()
    .unwrap();
    let scores: Value = serde_json::from_slice(&std::fs::read(out.join(SCORES)).unwrap()).unwrap();
    let near = |value: &Value, expected: f64| assert!((value.as_f64().unwrap() - expected).abs() < 1e-9, "{value}");
    let confidence = &scores["sets"][0]["confidence"];
    // One of 0.9 that is right, two of 0.6 of which one is.
    near(&confidence["expected_calibration_error"], (0.1 + 0.2) / 3.0);
    assert_eq!(confidence["bins"].as_array().unwrap().len(), 2);
    let times = &scores["sets"][0]["times"];
    assert_eq!(
        (&times["words"], &times["compared"], &times["not_said"]),
        (&json!(3), &json!(1), &json!(1))
    );
    near(&times["beginnings"]["median"], 0.05);
    near(&times["ends"]["signed_median"], 0.0);
    let page = std::fs::read_to_string(out.join(PAGE)).unwrap();
    for part in [
        "Expected calibration error: 0.100",
        "0.60–0.67",
        "Times of words",
        "+0.050",
    ] {
        assert!(page.contains(part), "{part}");
    }
}
