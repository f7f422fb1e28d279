//! Commits what workers have written, in groups.

use std::sync::Arc;
use std::time::{Duration, Instant};

use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::{Scope, Stream};

use super::job::Shared;

/// Partitions per node in a group, and how long the first of a group waits at most.
const GROUP: usize = 64;
const GROUP_AGE: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(100);

/// On worker 0, commits whenever a group is full or old enough. What is left at the end is committed after the
/// dataflow, by the thread that started it.
pub(super) fn build<'scope>(scope: Scope<'scope, u64>, written: Stream<'scope, u64, Vec<()>>, shared: &Arc<Shared>) {
    let shared = Arc::clone(shared);
    let full = GROUP * shared.job.nodes.len().max(1);
    let mut builder = OperatorBuilder::new("commit".into(), scope);
    let activator = scope.activator_for(builder.operator_info().address);
    let first = scope.index() == 0;
    let mut input = builder.new_input(written, Pipeline);
    builder.build(move |_| {
        let mut last = Instant::now();
        move |frontiers| {
            input.for_each(|_, _| {});
            if !first || shared.leaving() || frontiers[0].is_empty() {
                return;
            }
            let waiting = shared.waiting();
            if waiting >= full || (waiting > 0 && last.elapsed() >= GROUP_AGE) {
                if let Err((node, error)) = shared.commit() {
                    shared.fail_stage(node, None, error);
                }
                last = Instant::now();
            } else if waiting == 0 {
                last = Instant::now();
            }
            activator.activate_after(LOOK);
        }
    });
}
