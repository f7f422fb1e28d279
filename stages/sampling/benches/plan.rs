//! CPU seconds of planning an epoch of 4.8 million rows, beside the same plan in CPython, and of finding a step far
//! into training, also with a curriculum.
//!
//! `cargo bench --workspace --bench plan` (`-- ROWS` for another number of rows). Rows are made from a seed; the
//! peer, `benches/peers/sampler.py`, runs where there is a `python3`.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use flow_sampling::SamplingError;
use flow_sampling::curriculum::{Curriculum, Wanted};
use flow_sampling::manifest_rows::ManifestRows;
use flow_sampling::plan::{Balance, BatchPlan, Packing};
use flow_sampling::steps::Steps;
use sha2::{Digest, Sha256};

/// Uniform in (0, 1], from a 64-bit linear congruential generator.
struct Uniform(u64);

impl Uniform {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

/// Clips of 1 to 20 s, 6 s on average, to the millisecond, in 13 languages of very different sizes.
fn rows(count: usize) -> ManifestRows {
    let mut uniform = Uniform(11);
    let mut rows = ManifestRows::default();
    for _ in 0..count {
        let seconds = 1.0 - 2.5 * (uniform.next() * uniform.next()).ln();
        rows.durations.push((seconds.min(20.0) * 1000.0).round() / 1000.0);
        let language = (uniform.next().powi(3) * 13.0) as usize;
        let names = [
            "en", "hi", "ta", "bn", "te", "mr", "gu", "kn", "ml", "pa", "or", "as", "ur",
        ];
        rows.languages.push(names[language.min(12)]).expect("13 languages");
    }
    rows
}

/// CPU time of all threads that are alive.
fn cpu() -> Duration {
    let threads = std::fs::read_dir("/proc/self/task").expect("Linux");
    let nanos = threads.flatten().filter_map(|thread| {
        let text = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanos.sum())
}

fn measured<T>(work: impl FnOnce() -> T) -> (T, f64, f64) {
    let (before, start) = (cpu(), Instant::now());
    let result = work();
    (result, (cpu() - before).as_secs_f64(), start.elapsed().as_secs_f64())
}

fn digest(plan: &BatchPlan, rank: u32) -> String {
    let mut hasher = Sha256::new();
    for batch in plan.rank(rank) {
        hasher.update((batch.len() as u32).to_le_bytes());
        batch.iter().for_each(|row| hasher.update(row.to_le_bytes()));
    }
    hex::encode(hasher.finalize())
}

/// CPU seconds, number of batches and their digest from the peer; nothing without a `python3`.
fn peer(rows: &ManifestRows, packing: &Packing, epoch: u64) -> Option<(f64, String)> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (durations, languages) = (folder.path().join("durations"), folder.path().join("languages"));
    let bytes: Vec<u8> = rows
        .durations
        .iter()
        .flat_map(|seconds| seconds.to_le_bytes())
        .collect();
    std::fs::write(&durations, bytes).expect("the temporary folder is writable");
    let bytes: Vec<u8> = rows
        .languages
        .codes()
        .iter()
        .flat_map(|code| code.to_le_bytes())
        .collect();
    std::fs::write(&languages, bytes).expect("the temporary folder is writable");
    let output = Command::new("python3")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers/sampler.py"))
        .args([&durations, &languages])
        .args([packing.world_size, 0, packing.grad_accum].map(|number| number.to_string()))
        .arg(epoch.to_string())
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut words = text.split_whitespace();
    let seconds = words.next().and_then(|word| word.parse().ok());
    if seconds.is_none() {
        println!("the peer failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Some((seconds?, words.nth(1)?.to_owned()))
}

/// Where a run with a curriculum stands, at its first start and at the next one, in its last stage.
fn curriculum(rows: &ManifestRows, packing: &Packing) {
    let notes = tempfile::tempdir().expect("a temporary folder");
    let sizes = ["100k", "500k", "1M", "all"].map(|size| size.parse().expect("a size"));
    let mut uniform = Uniform(7);
    let hashes: Vec<u64> = rows.durations.iter().map(|_| (uniform.next() * 1e18) as u64).collect();
    for start in ["first", "next"] {
        let ((), cpu, wall) = measured(|| {
            let wanted = Wanted {
                plans: &[],
                sizes: &sizes,
                stage_steps: &[],
                steps: 100_000,
                packing,
                data: "bench",
                notes: Some(notes.path()),
            };
            let hashes = || Ok::<_, SamplingError>(hashes.clone());
            let curriculum = Curriculum::new(rows, hashes, &wanted).expect("a curriculum");
            curriculum.check(rows).expect("batches for every rank");
            let stage = curriculum.stage(99_000).expect("a stage");
            stage.step(rows, 99_000).expect("a step");
        });
        println!("step 99000 with the curriculum 100k, 500k, 1M, all, {start} start: {cpu:.3} CPU s, {wall:.3} s");
    }
}

fn main() {
    let count = std::env::args()
        .filter_map(|word| word.parse().ok())
        .next()
        .unwrap_or(4_800_000);
    let rows = rows(count);
    let packing = Packing {
        world_size: 8,
        grad_accum: 4,
        ..Packing::default()
    };
    let plan = |epoch| BatchPlan::new(&rows, &packing, epoch).expect("rows that can be packed");
    // The first one starts the threads.
    let mut best = (f64::INFINITY, f64::INFINITY);
    let mut first = None;
    for epoch in [0, 0, 0] {
        let (made, cpu, wall) = measured(|| plan(epoch));
        println!("plan of {count} rows, epoch {epoch}: {cpu:.3} CPU s, {wall:.3} s");
        best = (best.0.min(cpu), best.1.min(wall));
        first = Some(made);
    }
    let first = first.expect("three were made");
    println!("{} batches per rank", first.batches_per_rank());

    let quota = Packing {
        balance: Balance::Quota,
        ..packing.clone()
    };
    let (made, cpu, wall) = measured(|| BatchPlan::new(&rows, &quota, 7).expect("rows that can be packed"));
    println!(
        "with `balance: quota`, epoch 7: {cpu:.3} CPU s, {wall:.3} s, {} batches per rank",
        made.batches_per_rank()
    );

    let steps = || {
        let notes = std::env::temp_dir().join(format!("flow-bench-plan-{}", std::process::id()));
        (Steps::new(packing.clone(), &[], 0, "bench", Some(notes.clone())), notes)
    };
    let per_epoch = first.batches_per_rank() as u64 / u64::from(packing.grad_accum);
    if per_epoch > 0 {
        let far = per_epoch * 5 + 7;
        let (found, cpu, wall) = measured(|| steps().0.step(&rows, far).expect("a step"));
        println!(
            "step {far} (epoch {}), nothing noted: {cpu:.3} CPU s, {wall:.3} s",
            found.epoch
        );
        let (found, cpu, wall) = measured(|| steps().0.step(&rows, far).expect("a step"));
        println!(
            "step {far} (epoch {}), with notes: {cpu:.3} CPU s, {wall:.3} s",
            found.epoch
        );
        let _ = std::fs::remove_dir_all(steps().1);
    }
    curriculum(&rows, &packing);

    match peer(&rows, &packing, 0) {
        Some((seconds, digest_of_peer)) => println!(
            "CPython: {seconds:.2} CPU s, {:.1} times as much; rank 0 is {}",
            seconds / best.0,
            if digest_of_peer == digest(&first, 0) {
                "equal"
            } else {
                "DIFFERENT"
            }
        ),
        None => println!("no python3: nothing to compare with"),
    }
}
