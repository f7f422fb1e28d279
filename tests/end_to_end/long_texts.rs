//! Texts with more tokens than training takes, from shards to a model.

use std::process::Output;

use flow_model::tokenizer::Tokenizer;

use crate::binary::{Workplace, expect_code, program, read_manifest, stderr};
use crate::training::finetune;

fn rejects(place: &Workplace) -> Output {
    let mut flow = program();
    flow.args(["rejects", "pipelines/finetune.yaml", "--state"])
        .arg(place.path("state"))
        .args(["--reason", "too_many_tokens"]);
    flow.output().unwrap()
}

#[test]
fn rows_with_too_many_tokens_are_rejects_of_the_main_job() {
    let place = Workplace::new("micro");
    let steps = "train.max_steps=2";
    expect_code(&finetune(&place, &[steps, "train.eval_every=0"]).output().unwrap(), 0);
    let none = rejects(&place);
    expect_code(&none, 0);

    // So many tokens that some texts have more, and some not.
    let tokenizer = Tokenizer::load("configs/tokenizers/mini.model".as_ref()).unwrap();
    let rows = read_manifest(&place.out().join("train_manifest_v2.parquet"));
    let mut tokens: Vec<usize> = rows.iter().map(|row| tokenizer.encode(&row.text).len()).collect();
    tokens.sort_unstable();
    let most = tokens[tokens.len() / 2];
    let over: Vec<&str> = rows
        .iter()
        .filter(|row| tokenizer.encode(&row.text).len() > most)
        .map(|row| row.segment_id.as_str())
        .collect();
    assert!(!over.is_empty() && over.len() < rows.len());
    // Only what has more than the default is refused by it.
    let refused = String::from_utf8_lossy(&none.stdout).into_owned();
    for row in &rows {
        let is_over = tokenizer.encode(&row.text).len() > 512;
        assert_eq!(
            refused.contains(&row.segment_id),
            is_over,
            "{}: {refused}",
            row.segment_id
        );
    }

    let most = format!("train.max_tokens={most}");
    let restart = "train.on_change=restart";
    let output = finetune(&place, &[steps, &most, restart]).output().unwrap();
    expect_code(&output, 0);
    assert!(
        !stderr(&output).contains("transcripts have more than"),
        "{}",
        stderr(&output)
    );
    let said = rejects(&place);
    expect_code(&said, 0);
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("fitting"), "{said}");
    for segment in &over {
        assert!(said.contains(segment), "{segment}: {said}");
    }

    // As the old pipeline did it, with a warning.
    let cut = "train.long_texts=truncate";
    let output = finetune(&place, &[steps, &most, cut, restart]).output().unwrap();
    expect_code(&output, 0);
    let warning = format!("{} of {} transcripts have more than", over.len(), rows.len());
    assert!(
        stderr(&output).contains(&warning) && stderr(&output).contains("learned only up to there"),
        "{}",
        stderr(&output)
    );
}
