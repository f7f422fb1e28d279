//! An existing model on a manifest: the report, and its files for programs.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

use serde_json::{Value, json};

use crate::binary::{Workplace, expect_code, golden_model, program};

fn evaluate(place: &Workplace, settings: &[&str]) -> String {
    let mut flow = program();
    flow.args(["run", "pipelines/evaluate.yaml", "--progress", "plain", "--state"]);
    flow.arg(place.path("state"));
    flow.args(["--set", &format!("shards={}", place.shards.display())]);
    for name in ["report", "manifests"] {
        flow.args(["--set", &format!("{name}={}", place.path(name).display())]);
    }
    for setting in settings {
        flow.args(["--set", setting]);
    }
    let output = flow.output().unwrap();
    expect_code(&output, 0);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// How many words of the validation rows of the bundled corpus are wrong in each precision, and how many there are.
#[test]
fn low_precision_costs_few_words() {
    let place = Workplace::new("mini");
    let errors = |precision: &str| -> (u64, u64) {
        evaluate(&place, &[&format!("precision={precision}"), "clips=0"]);
        let scores = std::fs::read_to_string(place.path("report/scores.json")).unwrap();
        let scores: Value = serde_json::from_str(&scores).unwrap();
        let words = &scores["sets"][0]["overall"]["words"];
        let count = |field: &str| words[field].as_u64().unwrap();
        (
            ["insertions", "deletions", "substitutions"]
                .into_iter()
                .map(count)
                .sum(),
            count("units"),
        )
    };
    let (f32, words) = errors("f32");
    for precision in ["bf16", "int8"] {
        let (low, _) = errors(precision);
        println!("{precision}: {low} of {words} words wrong, {f32} in f32");
        assert!(
            low <= f32 + words / 50,
            "{precision}: {low} of {words} words, {f32} in f32"
        );
    }
}

/// What `manifest.read` keeps in `extra` reaches the report.
#[test]
fn rates_by_what_rows_say_of_themselves() {
    let place = Workplace::new("micro");
    let lines =
        [("eval0_en-us", "f", 7), ("eval1_de", "m", 8), ("eval0_en-us", "f", 9)].map(|(name, gender, speaker)| {
            let path = golden_model("audio").join(format!("{name}.wav"));
            let text = format!("one two {speaker}");
            json!({"audio_filepath": path, "text": text, "lang": "en", "gender": gender, "speaker": speaker})
                .to_string()
        });
    let manifest = place.path("rows.jsonl");
    std::fs::write(&manifest, lines.join("\n")).unwrap();
    let of = |name: &str| format!("{name}={}", manifest.display());
    let settings = [
        of("manifest"),
        of("train_manifest"),
        "by=[gender]".into(),
        "cluster=speaker".into(),
        "resamples=100".into(),
        "seed=1".into(),
        "normalize=keep_marks".into(),
        "normalize_languages={en: open_asr_english}".into(),
        "names=[one two]".into(),
        "switches=true".into(),
        "training_counts=[1, 3]".into(),
    ];
    evaluate(&place, &settings.each_ref().map(String::as_str));
    let scores = std::fs::read_to_string(place.path("report/scores.json")).unwrap();
    let scores: Value = serde_json::from_str(&scores).unwrap();
    let set = &scores["sets"][0];
    let genders = &set["columns"]["gender"];
    assert_eq!(
        (&genders["f"]["utterances"], &genders["m"]["utterances"]),
        (&json!(2), &json!(1))
    );
    assert_eq!(set["overall"]["clusters"], 3, "{set:.2000}");
    for given in ["names", "switches", "rare_words"] {
        assert!(!set[given].is_null(), "no {given} in {set:.2000}");
    }
}

#[test]
fn the_report_of_a_model_has_figures_for_people_and_for_programs() {
    let place = Workplace::new("micro");
    let screen = evaluate(
        &place,
        &["normalize=whisper_basic", "duration_bounds=[1.5, 3]", "clips=3"],
    );
    for part in ["normalised WER", "By duration: evaluation", "under 1.5 s", "insertions"] {
        assert!(screen.contains(part), "no {part:?} in\n{screen}");
    }
    let read = |name: &str| std::fs::read_to_string(place.path("report").join(name)).unwrap();
    let lines: Vec<Value> = read("transcripts.jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let scores: Value = serde_json::from_str(&read("scores.json")).unwrap();
    let set = &scores["sets"][0];
    assert_eq!(set["overall"]["utterances"].as_u64(), Some(lines.len() as u64));

    // NeMo's own rule, applied to what is written for NeMo, gives the figures of the report.
    let mut words: BTreeMap<&str, u64> = BTreeMap::new();
    for line in &lines {
        let text = |name: &str| line[name].as_str().unwrap();
        let said = text("text").split_whitespace().count() as u64;
        *words.entry(text("lang")).or_default() += said - u64::from(text("text").starts_with("<|"));
        assert!(line["duration"].as_f64().unwrap() > 0.0 && line["pred_text"].is_string());
        // The tar is there, and the recording where it is said to be.
        let tar = std::fs::File::open(text("audio_filepath")).unwrap();
        let mut head = [0; 4];
        tar.read_exact_at(&mut head, line["tar_offset"].as_u64().unwrap())
            .unwrap();
        assert_eq!(&head, b"fLaC", "{line}");
    }
    for (lang, words) in words {
        assert_eq!(set["languages"][lang]["words"]["units"].as_u64(), Some(words), "{lang}");
    }
    // Each way of dividing the utterances has all of them.
    let all = set["overall"]["words"].clone();
    let sum = |values: &mut dyn Iterator<Item = &Value>, field: &str| -> u64 {
        values.map(|score| score["words"][field].as_u64().unwrap()).sum()
    };
    for field in ["units", "insertions", "deletions", "substitutions"] {
        let whole = all[field].as_u64().unwrap();
        let by = |name: &str| sum(&mut set[name].as_object().unwrap().values(), field);
        assert_eq!((by("languages"), by("sources")), (whole, whole), "{field}");
        let durations = set["durations"].as_array().unwrap();
        assert_eq!(
            sum(&mut durations.iter().map(|range| &range["score"]), field),
            whole,
            "{field}"
        );
    }
    assert!(set["overall"]["normalized_words"]["units"].as_u64() > all["units"].as_u64());
    let page = read("report.html");
    assert_eq!(page.matches("<audio").count(), 3);
    assert!(page.contains("By shard") && page.contains("cuts their words"));
    assert!(!page.contains("<script") && page.len() < 2_500_000);
    // What is only shown differently is not decoded again.
    evaluate(&place, &["clips=3"]);
    assert!(!read("report.html").contains("cuts their words"));
}
