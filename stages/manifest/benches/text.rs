//! Nanoseconds per row of what the manifest pipeline does to every text: cleaning, normalising, language
//! correction. Rows are made up of words of several scripts, 120 bytes long on average.
//!
//! `cargo bench -p flow-manifest --bench text`

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::hint::black_box;
use std::time::Instant;

use flow_manifest::language::correct_language;
use flow_text::normalize::{clean_text, norm_text};

fn texts(rows: usize) -> Vec<String> {
    let words = [
        "नमस्ते",
        "दुनिया",
        "कल",
        "सुबह।",
        "please",
        "bring",
        "water,",
        "[noise]",
        "வணக்கம்",
        "நண்பர்",
        "নমস্কার",
        "আমি",
    ];
    let mut state = 7u64;
    (0..rows)
        .map(|_| {
            let mut text = String::new();
            while text.len() < 110 {
                state = state
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                text.push_str(words[(state >> 33) as usize % words.len()]);
                text.push(' ');
            }
            text
        })
        .collect()
}

fn timed<T>(name: &str, rows: usize, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = black_box(work());
    println!(
        "{name:<20} {:>6.0} ns per row",
        start.elapsed().as_nanos() as f64 / rows as f64
    );
    result
}

fn main() {
    let rows = 200_000;
    let texts = texts(rows);
    let clean = timed("clean_text", rows, || {
        texts.iter().map(|text| clean_text(text)).collect::<Vec<_>>()
    });
    timed("norm_text", rows, || {
        clean.iter().map(|text| norm_text(text)).collect::<Vec<_>>()
    });
    timed("correct_language", rows, || {
        clean
            .iter()
            .map(|text| correct_language(text, "en-IN", "hi"))
            .collect::<Vec<_>>()
    });
}
