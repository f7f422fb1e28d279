//! Planner and commit path on a corpus of 200,000 shards of three files each, with a pipeline of the shape of
//! `pipelines/build_manifest_v2.yaml`: seconds and peak memory of each phase, each in a process of its own. Rows cost next to
//! nothing; state directory, records and notes of source files are real.
//!
//! `cargo bench -p flow-runtime --bench scale [-- SHARDS [FOLDER [PHASE...]]]`: without a folder a temporary one is
//! used, which takes 9 GB for 200,000 shards; a folder that is named stays, so that phases can be measured again on what
//! the first run left.

#![allow(clippy::print_stdout, reason = "a bench tells people what it measured")]

#[path = "scale/kinds.rs"]
mod kinds;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use flow_base::event::{Event, Events};
use flow_kind::registry::Registry;
use flow_plan::{Action, Plan};
use flow_runtime::Options;
use flow_runtime::run::{plan, run};
use flow_spec::{Checked, Overrides, check, load};
use flow_storage::Storage;
use flow_store::{Access, Store};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const PIPELINE: &str = r#"
flow: 1
params:
  folder: {required: true}
  out: {required: true}
  shards: {required: true}
stages:
  scan: {uses: scale.scan, with: {folder: "${folder}", shards: "${shards}"}}
  cleaned: {uses: scale.pass, from: scan, with: {refused: 1}}
  v1: {uses: scale.pass, from: cleaned, with: {step: 1}}
  master: {uses: scale.pass, from: v1, with: {step: 2}}
  corrected: {uses: scale.pass, from: v1, with: {step: 3}}
  probe: {uses: scale.probe, with: {folder: "${folder}", shards: "${shards}"}}
  checked: {uses: scale.pass, from: {rows: corrected, members: probe.members, tars: probe.tars}, with: {step: 4}}
  unique: {uses: scale.unique, from: checked}
  split: {uses: scale.split, from: unique}
  write: {uses: scale.write, from: {master: master, train: split.train, val: split.val}, with: {folder: "${out}"}}
"#;

/// In the order in which they are run.
const PHASES: [&str; 9] = [
    "files",
    "first-plan",
    "first-run",
    "open",
    "plan",
    "unchanged-run",
    "changed-plan",
    "changed-run",
    "gc",
];

struct Corpus {
    folder: PathBuf,
    shards: u64,
}

impl Corpus {
    fn files(&self) -> PathBuf {
        self.folder.join("shards")
    }

    fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    fn checked(&self) -> Outcome<Arc<Checked>> {
        let overrides = Overrides {
            set: vec![
                format!("folder={}", self.files().display()),
                format!("out={}", self.folder.join("out").display()),
                format!("shards={}", self.shards),
            ],
            ..Overrides::default()
        };
        let file = self.folder.join("pipeline.yaml");
        fs::write(&file, PIPELINE)?;
        let wrong = |found| format!("{found:?}");
        let registry = Registry::new(kinds::kinds())?;
        let pipeline = load(&file, &overrides, &registry).map_err(wrong)?;
        Ok(Arc::new(check(pipeline, &registry).map_err(wrong)?))
    }

    fn make_files(&self) -> Outcome<()> {
        for shard in 0..self.shards {
            for file in kinds::FILES {
                let path = kinds::file_of(&self.files(), shard, file);
                if let (0, Some(folder)) = (shard % 1_000, path.parent()) {
                    fs::create_dir_all(folder)?;
                }
                fs::write(path, "")?;
            }
        }
        Ok(())
    }

    fn plan(&self) -> Outcome<Plan> {
        Ok(plan(
            &self.checked()?,
            &Options::new(&Storage::default(), self.state()),
        )?)
    }

    fn run(&self) -> Outcome<String> {
        let events = Events::default();
        let began = Instant::now();
        let stages = Arc::new(Mutex::new(String::new()));
        let told = Arc::clone(&stages);
        events.listen(move |event| {
            if let (Event::StageStarted { stage, .. }, Ok(mut told)) = (event, told.lock()) {
                told.push_str(&format!(" {stage} {:.1}", began.elapsed().as_secs_f64()));
            }
        });
        let summary = run(
            &self.checked()?,
            &Options::new(&Storage::default(), self.state()),
            &events,
        )?;
        let stages = stages.lock().map_err(|error| error.to_string())?;
        let when = if stages.is_empty() { "" } else { "; begun at second:" };
        Ok(format!("{} ran, {} reused{when}{stages}", summary.ran, summary.reused))
    }

    /// Does one phase; what it did in a few words.
    fn phase(&self, name: &str) -> Outcome<String> {
        match name {
            "files" => self.make_files().map(|()| String::new()),
            "first-plan" | "plan" => Ok(in_words(&self.plan()?)),
            "changed-plan" => {
                let path = kinds::file_of(&self.files(), self.shards / 2, kinds::FILES[0]);
                // Another size each time.
                let size = fs::metadata(&path)?.len() as usize;
                fs::write(path, "x".repeat(size + 1))?;
                Ok(in_words(&self.plan()?))
            }
            "first-run" | "unchanged-run" | "changed-run" => self.run(),
            "open" => {
                let store = Store::open(&Storage::default(), self.state(), Access::Read)?;
                Ok(format!("{} runs", store.runs()?.len()))
            }
            "gc" => {
                let run_id = "gc".to_string();
                let store = Store::open(&Storage::default(), self.state(), Access::Run { run_id })?;
                let found = store.collect_garbage(1, true)?;
                Ok(format!("would remove {} partitions of artifacts", found.partitions))
            }
            other => Err(format!("no phase `{other}`: there are {}", PHASES.join(", ")).into()),
        }
    }
}

fn in_words(plan: &Plan) -> String {
    let sum = |of: Action| {
        let counted = plan.stages.iter().map(|stage| match of {
            Action::Run => stage.run,
            Action::IfChanged => stage.if_changed,
            Action::Reuse => stage.reuse,
        });
        counted.sum::<u64>()
    };
    let (runs, may_run, reused) = (sum(Action::Run), sum(Action::IfChanged), sum(Action::Reuse));
    format!("{runs} to run, {may_run} if changed, {reused} to reuse")
}

/// The most memory that this process has had, in MiB.
fn peak_memory() -> Outcome<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).unwrap_or("0");
    Ok(kib.parse::<u64>()? / 1024)
}

/// Seconds of processor time that this process has used.
fn processor_seconds() -> Outcome<f64> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after_name.split_whitespace().skip(11).take(2);
    let ticks = ticks.map(str::parse::<f64>).collect::<Result<Vec<_>, _>>()?;
    Ok(ticks.iter().sum::<f64>() / 100.0)
}

fn tell(name: &str, shards: u64, corpus: &Corpus) -> Outcome<()> {
    let began = Instant::now();
    let did = corpus.phase(name)?;
    let (seconds, mib) = (began.elapsed().as_secs_f64(), peak_memory()?);
    println!(
        "{name:>14} {seconds:>8.2} {:>8.2} {:>8.0} {mib:>7} {:>8.1}  {did}",
        processor_seconds()?,
        seconds * 1e6 / shards as f64,
        (mib << 10) as f64 / shards as f64,
    );
    Ok(())
}

fn main() -> Outcome<()> {
    let mut words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| !word.starts_with("--"))
        .collect();
    if words.first().is_some_and(|word| word == "phase") {
        let [_, name, shards, folder] = words.as_slice() else {
            return Err("phase NAME SHARDS FOLDER".into());
        };
        let (folder, shards) = (PathBuf::from(folder), shards.parse()?);
        return tell(name, shards, &Corpus { folder, shards });
    }
    let shards: u64 = match words.is_empty() {
        true => 200_000,
        false => words.remove(0).parse()?,
    };
    let (temporary, folder) = match words.is_empty() {
        true => {
            let folder = tempfile::tempdir()?;
            let path = folder.path().to_path_buf();
            (Some(folder), path)
        }
        false => (None, PathBuf::from(words.remove(0))),
    };
    let phases: Vec<&str> = match words.is_empty() {
        true => PHASES.to_vec(),
        false => words.iter().map(String::as_str).collect(),
    };
    fs::create_dir_all(&folder)?;
    println!(
        "{:>14} {:>8} {:>8} {:>8} {:>7} {:>8}",
        "phase", "seconds", "cpu s", "us/shard", "MiB", "KiB/shard"
    );
    for phase in phases {
        run_phase(phase, shards, &folder)?;
    }
    drop(temporary);
    Ok(())
}

/// In a process of its own, so that its peak memory is its own.
fn run_phase(phase: &str, shards: u64, folder: &Path) -> Outcome<()> {
    let program = std::env::current_exe()?;
    let mut command = Command::new(program);
    command.args(["phase", phase, &shards.to_string()]).arg(folder);
    match command.status()?.success() {
        true => Ok(()),
        false => Err(format!("phase {phase} failed").into()),
    }
}
