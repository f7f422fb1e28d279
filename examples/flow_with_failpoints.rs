//! `flow` with failpoints that are set by environment variables, for end-to-end tests that kill it at a given point.
//!
//! - `FLOW_KILL_AT=name[:n]` kills the process when it passes a point of the store, in a folder or in object storage, or of a
//!   decision (`flow_base::failpoints`) for the n-th time.
//! - `FLOW_STAND_IN_NCCL=1` has ranks on the CPU exchange by a stand-in for NCCL.
//! - `FLOW_HANG_AT=rank:step` makes that rank hang before that optimizer step, like one whose device does not respond.

use std::process::ExitCode;
use std::time::Duration;

use flow_base::failpoints;

#[path = "../runtime/tests/failpoints/mod.rs"]
mod hooks;
#[path = "../src/process.rs"]
mod process;

fn main() -> ExitCode {
    process::set_up();
    let points = [&failpoints::STORE[..], &failpoints::REMOTE, &[failpoints::DECIDED]].concat();
    let kill = variable("FLOW_KILL_AT").map(|value| hooks::kill_at(&value, &points));
    if variable("FLOW_STAND_IN_NCCL").is_some() {
        flow_training::ranks::nccl::use_host_library(flow_cuda_emulator::nccl::library()).expect("the stand-in");
    }
    let hang = variable("FLOW_HANG_AT").map(|value| rank_and_step(&value));
    failpoints::set(move |point, numbers| {
        if let Some(kill) = &kill {
            kill(point);
        }
        while hang.is_some_and(|hang| point == flow_training::ranks::OPTIMIZER_STEP && numbers == hang) {
            std::thread::sleep(Duration::from_secs(3600));
        }
    });
    flow::main(flow::kinds::all())
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn rank_and_step(value: &str) -> [u64; 2] {
    let numbers = value.split_once(':');
    let numbers = numbers.and_then(|(rank, step)| Some([rank.parse().ok()?, step.parse().ok()?]));
    numbers.unwrap_or_else(|| panic!("FLOW_HANG_AT={value} is not `rank:step`"))
}
