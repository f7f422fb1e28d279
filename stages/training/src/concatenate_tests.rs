use std::path::Path;

use flow_random::SplitMix64;
use serde_json::Value;

use super::*;

fn tokenizer() -> Tokenizer {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/tokenizers/mini.model");
    Tokenizer::load(&file).unwrap()
}

#[test]
fn clips_are_joined_as_by_lhotse() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/golden/augment/concatenate.json");
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert!(cases.len() > 30);
    for case in cases {
        let concatenate = Concatenate {
            gap_seconds: case["gap"].as_f64().unwrap(),
            duration_factor: case["duration_factor"].as_f64().unwrap(),
            max_duration: case["max_duration"].as_f64(),
        };
        let durations: Vec<f64> = serde_json::from_value(case["durations"].clone()).unwrap();
        let lengths: Vec<usize> = durations
            .iter()
            .map(|seconds| (seconds * SAMPLE_RATE) as usize)
            .collect();
        let expected: Vec<Vec<usize>> = serde_json::from_value(case["joined"].clone()).unwrap();
        assert_eq!(concatenate.groups(&lengths, |_, _| true), expected, "{case}");
    }
}

/// A text of some words and the number of its row, perhaps with a tag.
fn text(random: &mut SplitMix64, row: usize) -> String {
    let tag = ["<|hi|> ", "<|en|> ", ""][random.below(3)];
    let words = (0..random.below(4)).map(|_| ["ring", "sing", "king"][random.below(3)]);
    format!("{tag}{} {row}", words.collect::<Vec<_>>().join(" "))
}

#[test]
fn every_row_is_in_one_clip_and_limits_hold() {
    let (tokenizer, mut random) = (tokenizer(), SplitMix64::new(5));
    let mut seen_joined = 0;
    for case in 0..60 {
        let rows = 1 + random.below(12);
        let texts: Vec<String> = (0..rows).map(|row| text(&mut random, row)).collect();
        let signals: Vec<Vec<f32>> = (0..rows)
            .map(|row| vec![(row + 1) as f32; 1 + random.below(4000)])
            .collect();
        let max_tokens = 8 + random.below(60);
        let loaded = LoadedBatch {
            epoch: 3,
            place: 2,
            segments: (0..rows).map(|row| row.to_string()).collect(),
            batch: MicroBatch {
                signals: signals.clone(),
                tokens: texts
                    .iter()
                    .map(|text| {
                        let mut tokens = tokenizer.encode(text);
                        tokens.truncate(max_tokens);
                        tokens
                    })
                    .collect(),
                // Of every third case: two prompts.
                prompts: (0..rows).filter(|_| case % 3 == 0).map(|row| row % 2).collect(),
            },
            ..LoadedBatch::default()
        };
        let concatenate = Concatenate {
            gap_seconds: 0.001 * random.below(40) as f64,
            duration_factor: 1.0 + random.below(3) as f64,
            max_duration: [None, Some(0.4), Some(1.0)][random.below(3)],
        };
        let joined = concatenate.join(loaded.clone(), &texts, &tokenizer, max_tokens);
        let gap = (concatenate.gap_seconds * SAMPLE_RATE).round() as usize;
        let longest = signals.iter().map(Vec::len).max().unwrap();
        let most = concatenate.limit(longest as f64 / SAMPLE_RATE) * SAMPLE_RATE;

        let mut all: Vec<usize> = joined.segments.iter().map(|name| name.parse().unwrap()).collect();
        let clips: Vec<Vec<usize>> = joined
            .segments_of_clips()
            .map(|names| names.iter().map(|name| name.parse().unwrap()).collect())
            .collect();
        assert_eq!(clips.concat(), all, "case {case}");
        all.sort_unstable();
        assert_eq!(all, (0..rows).collect::<Vec<_>>(), "case {case}");
        assert_eq!((joined.epoch, joined.place), (3, 2));
        let MicroBatch {
            signals: heard,
            tokens: learned,
            prompts,
        } = &joined.batch;
        assert_eq!(prompts.len(), if case % 3 == 0 { clips.len() } else { 0 });
        for (clip, prompt) in clips.iter().zip(prompts) {
            assert!(clip.iter().all(|row| row % 2 == *prompt), "case {case}");
        }
        assert_eq!((heard.len(), learned.len()), (clips.len(), clips.len()));
        for ((clip, signal), tokens) in clips.iter().zip(heard).zip(learned) {
            let mut expected: Vec<f32> = Vec::new();
            for (place, &row) in clip.iter().enumerate() {
                if place > 0 {
                    expected.resize(expected.len() + gap, 0.0);
                }
                expected.extend(&signals[row]);
            }
            assert_eq!(signal, &expected, "case {case}");
            assert!(tokens.len() <= max_tokens, "case {case}");
            if let [row] = clip[..] {
                assert_eq!(tokens, &loaded.batch.tokens[row], "case {case}");
                continue;
            }
            seen_joined += 1;
            assert!(signal.len() as f64 <= most.round(), "case {case}");
            // All words of all rows, in the order of the signals.
            let words = |text: &str| -> Vec<String> {
                text.split_whitespace()
                    .filter(|word| !word.starts_with("<|"))
                    .map(str::to_owned)
                    .collect()
            };
            let expected: Vec<String> = clip.iter().flat_map(|&row| words(&texts[row])).collect();
            assert_eq!(
                words(&tokenizer.decode(tokens).unwrap()),
                words(&tokenizer.decode(&tokenizer.encode(&expected.join(" "))).unwrap())
            );
        }
        assert_eq!(concatenate.join(loaded, &texts, &tokenizer, max_tokens), joined);
    }
    assert!(seen_joined > 50, "{seen_joined}");
}

#[test]
fn a_tag_comes_again_where_the_language_changes() {
    let joined = |texts: &[&str]| joined_text(texts.iter().copied());
    assert_eq!(joined(&["<|hi|> a", "<|hi|> b c", "d"]), "<|hi|> a b c d");
    assert_eq!(
        joined(&["<|hi|> a", "<|en|> b", "<|hi|> c"]),
        "<|hi|> a <|en|> b <|hi|> c"
    );
    assert_eq!(joined(&["", " a ", "", "<|hi|>", "<|hi|> b"]), "a <|hi|> b");
    assert_eq!(joined(&[""]), "");
    assert!(tokenizer().encode("").is_empty());
}

#[test]
fn wrong_numbers_are_named() {
    let named = |concatenate: Concatenate| concatenate.check().unwrap_err();
    let default = Concatenate::default();
    assert_eq!(default.check(), Ok(()));
    for gap_seconds in [f64::NAN, -0.1, f64::INFINITY] {
        assert!(named(Concatenate { gap_seconds, ..default }).contains("`gap_seconds`"));
    }
    for duration_factor in [f64::NAN, 0.5, 1e9] {
        assert!(
            named(Concatenate {
                duration_factor,
                ..default
            })
            .contains("`duration_factor`")
        );
    }
    for seconds in [f64::NAN, 0.0, f64::INFINITY] {
        let max_duration = Some(seconds);
        assert!(
            named(Concatenate {
                max_duration,
                ..default
            })
            .contains("`max_duration`")
        );
    }
}
