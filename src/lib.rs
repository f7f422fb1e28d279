//! The command line of `flow`: arguments, commands, and the screen.
//!
//! A binary with stage kinds of its own is one line:
//!
//! ```no_run
//! fn main() -> std::process::ExitCode {
//!     let mut kinds = flow::kinds::all();
//!     // kinds.push(flow_kind::registry::kind::<MyKind>());
//!     flow::main(kinds)
//! }
//! ```

mod arguments;
mod bundle;
mod commands;
mod developer_log;
mod hook;
pub mod kinds;
mod launch;
mod screen;
mod secret_file;
#[cfg(test)]
mod tests;
mod usual_names;
mod visible;

use std::io::{self, BufWriter, StdoutLock, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use flow_kind::Storage;
use flow_kind::registry::{AnyKind, Registry};

#[cfg(feature = "service")]
use arguments::JobsCommand;
use arguments::{Arguments, Command, CompareFormat, EvaluateCommand};
use flow_cli::failure::{Exit, Failure};

/// Runs the command line with these stage kinds.
pub fn main(kinds: Vec<Box<dyn AnyKind>>) -> ExitCode {
    let arguments = match arguments::parse(std::env::args_os()) {
        Ok(arguments) => arguments,
        Err(error) if error.use_stderr() => {
            // If this cannot be printed, there is no way to report it.
            let _ = error.print();
            return ExitCode::from(Exit::Usage.code());
        }
        // Help, or the version.
        Err(asked) => {
            let printed = asked.print().and_then(|()| io::stdout().flush());
            let exit = printed.map_or_else(|error| tell(&Failure::Output(of_stdout(error))), |()| Exit::Done);
            return ExitCode::from(exit.code());
        }
    };
    // A bug has a separate exit code, so that scripts can distinguish it from a failed stage.
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        developer_log::begin()?;
        let mut out = StandardOutput(BufWriter::new(io::stdout().lock()));
        let exit = execute(arguments, kinds, &mut out)?;
        out.flush()?;
        Ok::<Exit, Failure>(exit)
    }));
    let exit = match outcome {
        Ok(Ok(exit)) => exit,
        Ok(Err(failure)) => tell(&failure),
        Err(_) => {
            let _ = writeln!(io::stderr(), "error: this is a bug in flow; the lines above say where");
            Exit::Bug
        }
    };
    ExitCode::from(exit.code())
}

/// Reports why a command failed.
fn tell(failure: &Failure) -> Exit {
    let text = failure.render(screen::style());
    if !text.is_empty() {
        let _ = writeln!(io::stderr(), "{}", text.trim_end());
    }
    failure.exit()
}

/// Standard output of all commands, whose errors name it.
struct StandardOutput(BufWriter<StdoutLock<'static>>);

impl Write for StandardOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(of_stdout)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(of_stdout)
    }
}

fn of_stdout(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("standard output: {error}"))
}

fn execute(arguments: Arguments, kinds: Vec<Box<dyn AnyKind>>, out: &mut dyn Write) -> Result<Exit, Failure> {
    // The one of the program: all commands hand it down.
    let storage = &Storage::of_environment();
    let registry = Registry::new(kinds).map_err(|error| Failure::Bug(error.to_string()))?;
    let registry = registry.with_id_column(flow_inspect::ID_COLUMN).with_storage(storage);
    // What programs read keeps its bytes.
    let is_for_programs = match &arguments.command {
        Command::Plan(arguments) => arguments.json,
        Command::Log(arguments) => arguments.json,
        Command::Doctor(arguments) => arguments.json,
        Command::Evaluate(EvaluateCommand::Diarization(arguments)) => arguments.json,
        Command::Evaluate(EvaluateCommand::Texts(arguments)) => arguments.json,
        Command::Evaluate(EvaluateCommand::Compare(arguments)) => {
            arguments.json || arguments.format == CompareFormat::Json
        }
        Command::Speakers(arguments) => arguments.is_json(),
        // Transcripts, too: as in their files.
        Command::Transcribe(_) | Command::Diarize(_) | Command::Align(_) => true,
        #[cfg(feature = "service")]
        Command::Jobs(arguments) => matches!(arguments.command, JobsCommand::Show { .. } | JobsCommand::Result { .. }),
        Command::Fmt(arguments) => arguments.paths.iter().any(|path| path.as_os_str() == "-"),
        Command::Graph(_) | Command::Kinds(_) | Command::Completions(_) | Command::Man(_) => true,
        _ => false,
    };
    let mut visible = visible::Visible(out);
    let out: &mut dyn Write = if is_for_programs { &mut *visible.0 } else { &mut visible };
    match arguments.command {
        Command::Run(arguments) => commands::run::run(&arguments, &registry, out),
        Command::Plan(arguments) => commands::plan::plan(&arguments, &registry, out),
        Command::Check(arguments) => commands::check::check(&arguments, &registry, out),
        Command::Test(arguments) => commands::test::test(&arguments, &registry, out),
        Command::Rejects(arguments) => commands::rejects::rejects(storage, &arguments, out),
        Command::Lineage(arguments) => commands::lineage::lineage(storage, &arguments, out),
        Command::Kinds(arguments) => commands::kinds::kinds(&arguments, &registry, out),
        Command::Graph(arguments) => commands::graph::graph(&arguments, &registry, out),
        Command::Status(arguments) => commands::status::status(storage, &arguments, out),
        Command::Log(arguments) => commands::log::log(storage, &arguments, out),
        Command::Compare(arguments) => commands::compare::compare(storage, &arguments, out),
        Command::Transcribe(arguments) => commands::transcribe::transcribe(&arguments, &registry, out),
        Command::Diarize(arguments) => commands::diarize::diarize(&arguments, &registry, out),
        Command::Speakers(arguments) => flow_cli_speakers::voices(&arguments, out),
        Command::Align(arguments) => commands::align::align(storage, &arguments, out),
        #[cfg(feature = "service")]
        Command::Serve(arguments) => commands::serve::serve(storage, &arguments, out),
        #[cfg(feature = "service")]
        Command::Jobs(arguments) => commands::jobs::jobs(&arguments, out),
        #[cfg(feature = "service")]
        Command::Ui(arguments) => commands::ui::ui(storage, &arguments, out),
        Command::Evaluate(command) => commands::evaluate::evaluate(&command, &registry, out),
        Command::Model(command) => commands::model::model(storage, &command, out),
        Command::Lm(command) => commands::lm::lm(storage, &command, out),
        Command::Push(arguments) => commands::push::push(storage, &arguments, out),
        Command::Memory(arguments) => flow_cli_memory::memory(
            storage,
            &arguments,
            &|pipeline| commands::checked(pipeline, &registry),
            out,
        ),
        Command::Gc(arguments) => commands::gc::gc(storage, &arguments, out),
        Command::Fmt(arguments) => commands::fmt::fmt(&arguments, &mut std::io::stdin().lock(), out),
        Command::New(arguments) => commands::new::new(&arguments, out),
        Command::Doctor(arguments) => flow_cli_doctor::doctor(storage, &arguments, arguments::VERSION, out),
        Command::Completions(arguments) => commands::shell::completions(&arguments, out),
        Command::Man(arguments) => commands::shell::man(&arguments, out),
    }
}
