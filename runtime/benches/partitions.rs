//! The cost of partitions: a first run, a plan and a run without changes, with a changed setting and changed back. The
//! partitions have few rows, so the runtime's overhead per partition is measured.
//!
//! `cargo bench --workspace --bench partitions [-- 10000 100000]`

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

#[path = "../tests/toys/mod.rs"]
mod toys;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use flow_base::event::Events;
use flow_kind::registry::Registry;
use flow_runtime::Options;
use flow_runtime::run::{plan, run};
use flow_spec::{Checked, Overrides, check, load};
use flow_storage::Storage;

const PIPELINE: &str = r#"
flow: 1
params:
  shards: {required: true}
  out: {required: true}
  least: 0
stages:
  scan: {uses: toy.count, with: {folder: "${shards}"}}
  probe: {uses: toy.double, from: scan, with: {by: 10, dear: true}}
  clean: {uses: toy.double, from: scan, with: {least: "${least}"}}
  both: {uses: toy.join, from: {left: clean, right: probe.rows}}
  dedup: {uses: toy.dedup, from: both}
  out: {uses: toy.write, from: [dedup, clean.odd], with: {folder: "${out}"}}
"#;

fn checked(folder: &Path, least: u32) -> Result<Arc<Checked>, Box<dyn std::error::Error>> {
    let overrides = Overrides {
        set: vec![
            format!("shards={}", folder.join("shards").display()),
            format!("out={}", folder.join("out").display()),
            format!("least={least}"),
        ],
        ..Overrides::default()
    };
    let wrong = |found| format!("{found:?}");
    let registry = Registry::new(toys::kinds())?;
    let pipeline = load(&folder.join("pipeline.yaml"), &overrides, &registry).map_err(wrong)?;
    Ok(Arc::new(check(pipeline, &registry).map_err(wrong)?))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut sizes: Vec<u64> = std::env::args().filter_map(|arg| arg.parse().ok()).collect();
    if sizes.is_empty() {
        sizes = vec![1_000, 10_000, 100_000];
    }
    println!("seconds (and for each partition, in microseconds)");
    println!(
        "{:>10} {:>16} {:>16} {:>16} {:>16} {:>16} {:>16}",
        "partitions", "first run", "plan", "unchanged", "one changed", "setting changed", "changed back"
    );
    for size in sizes {
        let folder = tempfile::tempdir()?;
        let shards = folder.path().join("shards");
        fs::create_dir(&shards)?;
        fs::write(folder.path().join("pipeline.yaml"), PIPELINE)?;
        for shard in 0..size {
            fs::write(shards.join(format!("s{shard:06}.txt")), format!("1\n3\n{}", 2 * shard))?;
        }
        let options = Options::new(&Storage::default(), folder.path().join("state"));
        let mut figures = Vec::new();
        let mut timed = |what: &dyn Fn() -> Result<(), Box<dyn std::error::Error>>| {
            let start = Instant::now();
            what()?;
            figures.push(start.elapsed().as_secs_f64());
            Ok::<_, Box<dyn std::error::Error>>(())
        };
        let runs = |least: u32| {
            run(&checked(folder.path(), least)?, &options, &Events::default())?;
            Ok(())
        };
        timed(&|| runs(0))?;
        timed(&|| {
            plan(&checked(folder.path(), 0)?, &options)?;
            Ok(())
        })?;
        timed(&|| runs(0))?;
        fs::write(shards.join("s000000.txt"), "5\n7\n0")?;
        timed(&|| runs(0))?;
        timed(&|| runs(2))?;
        timed(&|| runs(0))?;
        print!("{size:>10}");
        for seconds in figures {
            print!(" {:>16}", format!("{seconds:.2} ({:.0})", seconds * 1e6 / size as f64));
        }
        println!();
    }
    Ok(())
}
