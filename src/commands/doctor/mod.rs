//! `flow doctor`: checks that this machine has what runs need.

mod disk;
mod gpu;
mod machine;
mod network;
mod selftest;

use std::fmt::Write as _;
use std::io::Write;

use flow_base::escape::escape_line;
use serde::Serialize;

use crate::arguments::{DoctorArguments, VERSION};
use crate::failure::{Exit, Failure};

/// Version of the JSON object.
const DOCTOR_VERSION: u32 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Ok,
    /// Something is slower than necessary, or a part of the program cannot be used.
    Warn,
    /// Runs cannot work.
    Fail,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Warn => "warn",
            State::Fail => "fail",
        }
    }
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Check {
    name: String,
    state: State,
    found: String,
    /// What to do about it.
    help: Option<String>,
}

impl Check {
    fn ok(name: impl Into<String>, found: impl Into<String>) -> Check {
        Check {
            name: name.into(),
            state: State::Ok,
            found: found.into(),
            help: None,
        }
    }

    fn warn(name: impl Into<String>, found: impl Into<String>, help: impl Into<String>) -> Check {
        Check {
            state: State::Warn,
            help: Some(help.into()),
            ..Check::ok(name, found)
        }
    }

    fn fail(name: impl Into<String>, found: impl Into<String>, help: impl Into<String>) -> Check {
        Check {
            state: State::Fail,
            ..Check::warn(name, found, help)
        }
    }
}

/// All checks.
#[derive(Serialize)]
struct Report {
    version: u32,
    flow: &'static str,
    /// The worst of all.
    state: State,
    checks: Vec<Check>,
}

pub fn doctor(arguments: &DoctorArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let mut checks = vec![
        machine::cores(),
        machine::memory(),
        machine::vectors(),
        machine::open_files(),
        disk::state_directory(&arguments.state.state),
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
        flow: VERSION,
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

fn shown(report: &Report) -> String {
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

/// `1.5 GB`, in powers of ten.
fn gigabytes(bytes: u64) -> String {
    flow_training::memory::gigabytes(bytes)
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
