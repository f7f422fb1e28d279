//! `flow test`: runs the tests that a pipeline file holds.

use std::io::Write;

use flow_inspect::table::{self, plural};
use flow_kind::registry::Registry;
use flow_runtime::pipeline_test::{PreparedTest, TestOutcome, prepare};
use flow_spec::{Diagnostics, TestCase};
use flow_storage::Storage;

use super::{overrides, pipeline_file, record};
use crate::arguments::TestArguments;
use flow_cli::failure::{Exit, Failure};

pub fn test(arguments: &TestArguments, registry: &Registry, out: &mut dyn Write) -> Result<Exit, Failure> {
    if !arguments.record.is_empty() {
        return record::record(registry.storage(), arguments, out);
    }
    let path = pipeline_file(&arguments.pipeline.pipeline)?;
    let tests = flow_spec::load_tests(&path, registry)?;
    let chosen = choose(arguments, &tests)?;
    if chosen.is_empty() {
        writeln!(out, "{}: no tests", path.display())?;
        return Ok(Exit::Done);
    }
    // All mistakes are shown before anything runs; those of the pipeline itself are the same for each test.
    let (mut ready, mut found) = (Vec::new(), Vec::new());
    for test in chosen {
        match prepare(&path, &overrides(&arguments.pipeline), registry, test) {
            Ok(test) => ready.push(test),
            Err(Diagnostics(mistakes)) => {
                for mistake in mistakes {
                    if !found.contains(&mistake) {
                        found.push(mistake);
                    }
                }
            }
        }
    }
    Diagnostics::unless_empty(found, ())?;
    let mut failed = 0;
    for test in &ready {
        let is_ok = run(registry.storage(), test, out)?;
        failed += u64::from(!is_ok);
        out.flush()?;
    }
    let tests = plural(ready.len() as u64, "test");
    if failed == 0 {
        writeln!(out, "{tests}, all as expected")?;
        return Ok(Exit::Done);
    }
    writeln!(out, "{tests}, {failed} failed")?;
    Ok(Exit::Failed)
}

/// The tests that the arguments name, in the order of the file.
fn choose<'t>(arguments: &TestArguments, tests: &'t [TestCase]) -> Result<Vec<&'t TestCase>, Failure> {
    for name in &arguments.only {
        if !tests.iter().any(|test| test.name == *name) {
            let help = flow_spec::did_you_mean(name, tests.iter().map(|test| test.name.as_str()), "tests");
            let file = arguments.pipeline.pipeline.display();
            return Err(Failure::usage(format!("{file} has no test `{name}`"), help));
        }
    }
    let wanted = |test: &&TestCase| arguments.only.is_empty() || arguments.only.contains(&test.name);
    Ok(tests.iter().filter(wanted).collect())
}

/// Runs a test and prints its result; true if it passed.
fn run(storage: &Storage, test: &PreparedTest, out: &mut dyn Write) -> Result<bool, Failure> {
    let folder = tempfile::Builder::new()
        .prefix("flow-test-")
        .tempdir()
        .map_err(|error| Failure::unreadable(format!("cannot make a temporary folder: {error}")))?;
    match test.run(storage, &folder.path().join("state"), true) {
        Ok(outcome) if outcome.failures.is_empty() => {
            writeln!(out, "ok      {}: {}", test.name, counts(&outcome))?;
            Ok(true)
        }
        Ok(outcome) => {
            writeln!(out, "failed  {}", test.name)?;
            for failure in &outcome.failures {
                writeln!(out, "  {}: {}", failure.place, failure.message)?;
                for line in table::lines(&failure.table) {
                    writeln!(out, "    {line}")?;
                }
            }
            Ok(false)
        }
        Err(error) => {
            let help = error.help();
            let failure = Failure::run(error, &test.checked);
            // An interrupted test, or a stage that refuses to run, is not a failed test.
            if failure.exit() != Exit::Failed {
                return Err(failure);
            }
            writeln!(out, "failed  {}", test.name)?;
            writeln!(out, "  {failure}")?;
            if let Some(help) = help {
                writeln!(out, "  help: {help}")?;
            }
            Ok(false)
        }
    }
}

fn counts(outcome: &TestOutcome) -> String {
    let expectations = plural(outcome.expectations, "expectation");
    let (rows, rejects) = (plural(outcome.rows, "row"), plural(outcome.rejects, "reject"));
    format!("{expectations}, {rows}, {rejects}")
}
