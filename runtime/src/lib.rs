//! Runs pipelines on timely dataflow: works out what must run (`planner`), streams batches between stages (`dataflow`), decides,
//! exports and commits (`run`). It is independent of speech, and with `flow-decide` and `flow-processes` the only crate that
//! knows timely.

pub mod dataflow;
pub mod harness;
mod options;
pub mod pipeline_test;
mod planner;
pub mod run;

pub use flow_decide::StandingDecisions;
pub use options::Options;
