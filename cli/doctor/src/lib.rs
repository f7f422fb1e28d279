//! `flow doctor`: checks that this machine has what runs need.

mod check;
mod disk;
mod gpu;
mod machine;
mod network;
mod selftest;

use std::fmt::Write as _;
use std::io::Write;

use clap::Args;
use flow_base::escape::escape_line;
use flow_cli::arguments::StateArguments;
use flow_cli::failure::{Exit, Failure};
use flow_kernels::device::DeviceChoice;
use flow_storage::Storage;
use serde::Serialize;

use self::check::{Check, State};

/// Version of the JSON object.
const DOCTOR_VERSION: u32 = 1;

#[derive(Args, Debug)]
pub struct DoctorArguments {
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub json: bool,
    /// Also run a small bundled model, and compare its results with NeMo's
    #[arg(long)]
    pub selftest: bool,
    /// The device for training: `cpu`, `cuda` or `cuda:1`; its driver must be available, and the self-test runs on it
    #[arg(long, default_value = "cpu")]
    pub device: DeviceChoice,
    #[command(flatten)]
    pub state: StateArguments,
}

/// All checks.
#[derive(Serialize)]
struct Report<'a> {
    version: u32,
    flow: &'a str,
    /// The worst of all.
    state: State,
    checks: Vec<Check>,
}

/// Runs the checks. `version` is that of the program.
///
/// # Errors
/// If `out` cannot be written.
pub fn doctor(
    storage: &Storage,
    arguments: &DoctorArguments,
    version: &str,
    out: &mut dyn Write,
) -> Result<Exit, Failure> {
    let mut checks = vec![
        machine::cores(),
        machine::memory(),
        machine::vectors(),
        machine::open_files(),
        disk::state_directory(storage, &arguments.state.state),
        disk::temporary_directory(&std::env::temp_dir()),
        machine::espeak(),
        gpu::driver(arguments.device),
        gpu::nccl(),
    ];
    checks.extend(gpu::cublaslt());
    checks.extend(network::hub());
    if arguments.selftest {
        checks.extend(selftest::run(arguments.device));
    }
    let report = Report {
        version: DOCTOR_VERSION,
        flow: version,
        state: checks.iter().map(|check| check.state).max().unwrap_or(State::Ok),
        checks,
    };
    if arguments.json {
        serde_json::to_writer(&mut *out, &report).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", shown(&report))?;
    }
    Ok(if report.state == State::Fail {
        Exit::Failed
    } else {
        Exit::Done
    })
}

fn shown(report: &Report<'_>) -> String {
    let mut text = format!("flow {}\n", report.flow);
    for Check {
        name,
        state,
        found,
        help,
    } in &report.checks
    {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{:4}  {name}: {}", state.name(), escape_line(found));
        if let Some(help) = help {
            let _ = writeln!(text, "      {help}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_state_name_what_was_found_and_what_to_do() {
        let report = Report {
            version: 1,
            flow: "0.0.0",
            state: State::Fail,
            checks: vec![Check::ok("cores", "2"), Check::fail("disk", "none", "mount it")],
        };
        assert_eq!(
            shown(&report),
            "flow 0.0.0\nok    cores: 2\nfail  disk: none\n      mount it\n"
        );
        assert!(State::Fail > State::Warn && State::Warn > State::Ok);
    }
}
