//! Shell commands for the end of a run: `--on-success` and `--on-failure`.

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};

use flow_runtime::run::is_ignored;

use crate::arguments::RunArguments;

/// The option and the command that an exit code asks for. Where no run began, as with a mistake in the pipeline, there is none.
pub fn for_code(arguments: &RunArguments, code: u8, began: bool) -> Option<(&'static str, &str)> {
    let (option, command) = match code {
        0 | 4 => ("--on-success", &arguments.on_success),
        _ if !began => return None,
        _ => ("--on-failure", &arguments.on_failure),
    };
    Some((option, command.as_deref()?))
}

/// Runs a command by `sh -c` with a text on its standard input, and waits for its end. Returns a message, if there is
/// one; the exit code of the run does not change.
pub fn run(option: &str, command: &str, input: &str) -> Option<String> {
    // The run's signal handlers are gone: restores the default actions, so that signals end the program.
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // Under nohup it stays ignored.
        if is_ignored(signal) {
            continue;
        }
        // SAFETY: the default action is always a valid one; no handler of ours is called any more.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    match status(command, input) {
        Ok(status) if status.success() => None,
        Ok(status) => Some(format!("the command of {option} ended with {}", ended(status))),
        Err(error) => Some(format!("the command of {option} could not be run: {error}")),
    }
}

fn status(command: &str, input: &str) -> std::io::Result<ExitStatus> {
    let mut child = Command::new("sh")
        .arg("-c")
        .arg(command)
        .stdin(Stdio::piped())
        .spawn()?;
    // Closed after writing, so that the command sees the end of its input. A command that does not read it causes an
    // error, which is ignored.
    if let Some(mut stdin) = child.stdin.take() {
        let _ = stdin.write_all(input.as_bytes());
    }
    child.wait()
}

fn ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "no exit code".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_reads_its_input_and_its_end_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        // More than a pipe holds.
        let long = "x".repeat(1 << 18);
        assert_eq!(run("--on-success", &format!("cat > {}", file.display()), &long), None);
        assert_eq!(std::fs::read_to_string(file).unwrap(), long);
        let said = run("--on-failure", "exit 3", &long).unwrap();
        assert_eq!(said, "the command of --on-failure ended with exit code 3");
        let said = run("--on-failure", "kill -9 $$", "").unwrap();
        assert_eq!(said, "the command of --on-failure ended with signal 9");
    }
}
