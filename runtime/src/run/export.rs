//! Runs an export: all files of its set, or none.

use super::counts::RunCounts;
use super::node::started;
use crate::planner::state::PlanState;
use flow_base::error::StageError;
use flow_base::event::Event;
use flow_base::panic_guard::catch_panic;
use flow_kind::kind::Body;
use flow_plan::Action;
use flow_plan::run_error::RunError;
use flow_plan::verdict::{NodeVerdict, Verdict};
use flow_store::{ExportSet, Shrunk};

pub(super) fn run(
    state: &mut PlanState,
    node: usize,
    verdicts: Vec<NodeVerdict>,
    run_id: &str,
    run_counts: &mut RunCounts,
) -> Result<(), RunError> {
    let Some(Verdict::Export {
        folder,
        key: Some(key),
        action,
        ..
    }) = verdicts.into_iter().next().map(|verdict| verdict.verdict)
    else {
        return Err(RunError::internal(format!(
            "the inputs of `{}` are not settled in time",
            state.graph.nodes[node].name
        )));
    };
    let runs = u64::from(action != Action::Reuse);
    started(state, node, runs, 1 - runs);
    run_counts.add(node, runs, 1 - runs);
    state.nodes[node].all_settled = true;
    if runs == 0 {
        ExportSet::clean_up(&folder, run_id);
        if state.selection.selected[node] {
            let stage = &state.stage(node).name;
            let message = format!("{stage}: its files are unchanged in {}", folder.display());
            state.events.send(Event::Note { message });
        }
        return Ok(());
    }
    let Some(context) = state.context(node)?.filter(|_| state.is_settled_upstream(node)) else {
        return Err(RunError::internal(format!(
            "the inputs of `{}` are not settled in time",
            state.graph.nodes[node].name
        )));
    };
    let stage = &state.checked.stages[state.graph.nodes[node].stage];
    let mut body = catch_panic(|| match stage.settings.open(&context)? {
        Body::Export(body) => Ok(body),
        _ => Err(StageError::failed(
            "the kind says it is an export, but its body is none",
        )),
    })
    .map_err(|error| state.failed(node, None, error))?;
    let mut set = ExportSet::begin(
        &context.storage,
        &folder,
        &body.manifest(),
        key,
        run_id,
        &context.scratch,
    )?;
    catch_panic(|| body.write(&mut set)).map_err(|error| state.failed(node, None, error))?;
    if let (false, [shrunk, ..]) = (state.options.allow_shrink, set.shrunk().as_slice()) {
        let Shrunk { what, before, now } = shrunk;
        let error = StageError::refused(
            format!(
                "the set in {} would shrink: {what}: {now} rows instead of {before}",
                folder.display()
            ),
            "look whether everything that is read is there (a disk that is not mounted?); --allow-shrink writes the smaller set",
        );
        return Err(state.failed(node, None, error));
    }
    if let (false, Some(why)) = (state.options.allow_shrink, set.without_rows()) {
        let error = StageError::refused(
            format!("the set in {} would be empty: {why}", folder.display()),
            "look at the rejects with `flow rejects`; `allow_empty: true`, or --allow-shrink, writes the empty set",
        );
        return Err(state.failed(node, None, error));
    }
    let files = set.finish()?;
    catch_panic(|| {
        body.stands();
        Ok(())
    })
    .map_err(|error| state.failed(node, None, error))?;
    state.events.send(Event::Exported {
        stage: stage.name.clone(),
        folder: folder.display().to_string(),
        files,
    });
    Ok(())
}
