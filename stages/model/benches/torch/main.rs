//! Our parts and whole models beside PyTorch and NeMo, in turns in one run.
//!
//! `FLOW_BENCH_PYTHON=python cargo bench -p flow-model --bench torch -- [products] [kernels] [block] [loss] [step]
//! [decode]`; all of them without arguments (`decode` makes a network of 0.6 billion parameters). One thread unless
//! `RAYON_NUM_THREADS` says another number, which the peers then use as well. Every figure is the best of
//! `FLOW_BENCH_ROUNDS` (5) rounds. Without a Python that has torch, transformers and NeMo only our side is shown.

#![allow(
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a bench tells people what it measured"
)]

mod kernels;
mod model;
mod peer;

use std::process::{Command, ExitCode};

use flow_model::Result;
use peer::Peer;

/// The allocator of the `flow` binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // Candle and rayon read the number of threads once, from the environment.
    if std::env::var_os("RAYON_NUM_THREADS").is_none() {
        let again = std::env::current_exe().and_then(|program| {
            Command::new(program)
                .args(std::env::args_os().skip(1))
                .env("RAYON_NUM_THREADS", "1")
                // As the `flow` binary sets it.
                .env("MIMALLOC_PURGE_DELAY", "60000")
                .status()
        });
        return match again {
            Ok(status) if status.success() => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        };
    }
    // On the threads that training and decoding run on.
    match flow_kernels::threads::install(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let asked: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let wants = |name: &str| asked.is_empty() || asked.iter().any(|arg| arg == name);
    println!("{:34} {:>18} {:>18} {:>8}", "wall ms / CPU ms", "flow", "peer", "times");
    let mut torch = Peer::start("torch_parts.py");
    if wants("products") {
        kernels::products(&mut torch)?;
    }
    if wants("kernels") {
        kernels::around(&mut torch)?;
    }
    if wants("block") {
        kernels::block(&mut torch)?;
    }
    if wants("loss") {
        model::loss(&mut torch)?;
    }
    drop(torch);
    if wants("step") {
        model::step(&mut Peer::start("nemo_model.py"))?;
    }
    if wants("decode") {
        model::decode(&mut Peer::start("nemo_model.py"))?;
    }
    Ok(())
}
