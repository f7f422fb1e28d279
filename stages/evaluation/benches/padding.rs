//! How much of an epoch is padding, with and without splitting the duration buckets by length of text: of audio
//! frames (10 ms), of target tokens, and of the lattice of both that the transducer loss goes through.
//!
//! `cargo bench --workspace --bench padding`. Rows are those of the bundled training manifest, and 20,000 of 1 to 20 s
//! that are made from a seed out of its texts.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::path::Path;

use flow_model::tokenizer::Tokenizer;
use flow_sampling::manifest_rows::ManifestRows;
use flow_sampling::plan::{BatchPlan, Packing};
use serde::Deserialize;

#[derive(Deserialize)]
struct Row {
    text: String,
    duration: f64,
    lang: String,
}

/// What is padded: lengths in frames and tokens.
struct Set {
    rows: ManifestRows,
    frames: Vec<u64>,
    tokens: Vec<u64>,
}

impl Set {
    fn new(rows: &[Row], tokenizer: &Tokenizer) -> Self {
        let mut set = Set {
            rows: ManifestRows::default(),
            frames: Vec::new(),
            tokens: Vec::new(),
        };
        for row in rows {
            set.rows.durations.push(row.duration);
            set.rows.languages.push(&row.lang).expect("a few languages");
            set.rows.text_lengths.push(row.text.chars().count() as u32);
            set.frames.push((row.duration * 100.0) as u64 + 1);
            set.tokens.push(tokenizer.encode(&row.text).len().min(512) as u64);
        }
        set
    }
}

fn bundled(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

/// Uniform in (0, 1], from a 64-bit linear congruential generator.
fn uniform(state: &mut u64) -> f64 {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    ((*state >> 11) + 1) as f64 / (1u64 << 53) as f64
}

/// Clips whose speakers say 6 to 29 characters in a second, most of them some 13.
fn synthetic(count: usize, texts: &[Row]) -> Vec<Row> {
    let mut state = 5;
    (0..count)
        .map(|_| {
            let duration = (1.0 - 2.5 * (uniform(&mut state) * uniform(&mut state)).ln()).min(20.0);
            let spread: f64 = (0..4).map(|_| uniform(&mut state) - 0.5).sum();
            let wanted = duration * 13.0 * (spread * 0.4).exp();
            let first = &texts[(uniform(&mut state) * texts.len() as f64) as usize % texts.len()];
            let mut text = first.text.clone();
            let of_language: Vec<&Row> = texts.iter().filter(|row| row.lang == first.lang).collect();
            while (text.chars().count() as f64) < wanted {
                let next = of_language[(uniform(&mut state) * of_language.len() as f64) as usize % of_language.len()];
                let words = next
                    .text
                    .split_once("|> ")
                    .map_or(next.text.as_str(), |(_, words)| words);
                text.push(' ');
                text.push_str(words);
            }
            text = text.chars().take(wanted.max(8.0) as usize).collect();
            Row {
                text,
                duration,
                lang: first.lang.clone(),
            }
        })
        .collect()
}

fn measure(name: &str, set: &Set, max_batch_seconds: f64, token_boundaries: &[u32]) {
    let packing = Packing {
        max_batch_seconds,
        token_boundaries: token_boundaries.to_vec(),
        ..Packing::default()
    };
    let plan = BatchPlan::new(&set.rows, &packing, 0).expect("rows that can be packed");
    let (mut frames, mut tokens, mut cells) = ([0u64; 2], [0u64; 2], [0u64; 2]);
    for batch in plan.rank(0) {
        let of = |lengths: &[u64]| -> Vec<u64> { batch.iter().map(|&row| lengths[row as usize]).collect() };
        let (t, u) = (of(&set.frames), of(&set.tokens));
        let longest = |lengths: &[u64]| lengths.iter().copied().max().unwrap_or(0);
        let count = batch.len() as u64;
        frames = [frames[0] + t.iter().sum::<u64>(), frames[1] + count * longest(&t)];
        tokens = [tokens[0] + u.iter().sum::<u64>(), tokens[1] + count * longest(&u)];
        let filled: u64 = t.iter().zip(&u).map(|(t, u)| t * (u + 1)).sum();
        cells = [cells[0] + filled, cells[1] + count * longest(&t) * (longest(&u) + 1)];
    }
    let waste = |[filled, padded]: [u64; 2]| format!("{:.1} %", 100.0 * (1.0 - filled as f64 / padded as f64));
    let edges = match token_boundaries {
        [] => "none".to_owned(),
        edges => format!("`{edges:?}`"),
    };
    println!(
        "| {name} | {edges} | {} | {} | {} | {} |",
        plan.batches(),
        waste(frames),
        waste(tokens),
        waste(cells)
    );
}

fn main() {
    let text = std::fs::read_to_string(bundled("tests/data/golden/data/mini/train_manifest_v2.jsonl"))
        .expect("the bundled manifest");
    let mini: Vec<Row> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("a row"))
        .collect();
    let tokenizer = Tokenizer::load(&bundled("configs/tokenizers/mini.model")).expect("the bundled tokenizer");
    let (small, large) = (
        Set::new(&mini, &tokenizer),
        Set::new(&synthetic(20_000, &mini), &tokenizer),
    );
    println!("| rows | `token_boundaries` | batches | padding of frames | of tokens | of the lattice |");
    println!("|---|---|---|---|---|---|");
    for edges in [&[][..], &[25], &[20, 25, 30, 40]] {
        measure("mini, 436, 20 s", &small, 20.0, edges);
    }
    for edges in [
        &[][..],
        &[50, 100, 150],
        &[20, 30, 40, 50, 60, 80, 100, 120, 150, 180, 220],
    ] {
        measure("synthetic, 20,000, 90 s", &large, 90.0, edges);
    }
}
