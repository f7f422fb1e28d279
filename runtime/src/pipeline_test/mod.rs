//! Runs the tests of a pipeline: some stages are replaced by rows of the test, the stages with expectations run on
//! them, and their output is compared.

mod cell;
mod compare;
mod given;
mod prepare;
mod rows;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

pub use prepare::prepare;

use crate::options::Options;
use crate::run::run;
use flow_base::event::Events;
use flow_plan::run_error::RunError;
use flow_spec::{Checked, Place};
use flow_storage::Storage;
use flow_store::{Access, Store};
use prepare::Expected;

/// A test that is ready to run.
pub struct PreparedTest {
    pub name: String,
    /// The stages that run, and those that give rows of the test in place of others.
    pub checked: Arc<Checked>,
    expected: Vec<Expected>,
}

/// The result of a test.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TestOutcome {
    /// Number of expectations.
    pub expectations: u64,
    /// The output and rejects of stages with expectations.
    pub rows: u64,
    pub rejects: u64,
    /// Differences; empty if the test passed.
    pub failures: Vec<TestFailure>,
}

/// A difference from an expectation.
#[derive(Clone, Debug, PartialEq)]
pub struct TestFailure {
    /// The place of the expectation.
    pub place: Place,
    pub message: String,
    /// A table with header; may be empty.
    pub table: Vec<Vec<String>>,
}

impl PreparedTest {
    /// Runs the test in the state directory `state`, which should be a new one, on one worker. Takes SIGINT and the like if
    /// `signals` is set. Limits of rejects do not count.
    ///
    /// # Errors
    /// When a stage fails, or the state directory cannot be used.
    pub fn run(&self, storage: &Storage, state: &Path, signals: bool) -> Result<TestOutcome, RunError> {
        let options = Options {
            workers: Some(1),
            signals,
            ..Options::new(storage, state)
        };
        let done = run(&self.checked, &options, &Events::default())?;
        let store = Store::open(storage, state, Access::Read)?;
        let snapshots = store
            .run_snapshots(&done.run)?
            .ok_or_else(|| RunError::internal("the run of a test did not note what its stages had"))?;
        let mut outcome = TestOutcome::default();
        let mut counted = BTreeSet::new();
        for expected in &self.expected {
            let came = compare::compare(expected, &self.checked, &store, &snapshots)?;
            outcome.expectations += 1;
            outcome.rows += came.rows;
            // Several ports of a stage have the same rejects.
            if counted.insert(expected.stage) {
                outcome.rejects += came.rejects;
            }
            outcome.failures.extend(came.failures);
        }
        Ok(outcome)
    }
}
