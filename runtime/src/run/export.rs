//! Runs an export: all files of its set, or none.

use super::RunError;
use super::region::{Ran, started};
use crate::event::Event;
use crate::kind::{Body, StageError};
use crate::plan::Action;
use crate::plan::decide::{NodeVerdict, Verdict};
use crate::plan::ledger::{Ledger, guarded};
use crate::store::{ExportSet, Shrunk};

pub(super) fn run(
    ledger: &mut Ledger,
    node: usize,
    verdicts: Vec<NodeVerdict>,
    run_id: &str,
    ran: &mut Ran,
) -> Result<(), RunError> {
    let Some(Verdict::Export {
        folder,
        key: Some(key),
        action,
        ..
    }) = verdicts.into_iter().next().map(|verdict| verdict.verdict)
    else {
        return Err(RunError::Internal {
            message: format!(
                "the inputs of `{}` are not settled in time",
                ledger.graph.nodes[node].name
            ),
        });
    };
    let runs = u64::from(action != Action::Reuse);
    started(ledger, node, runs, 1 - runs);
    ran.add(node, runs, 1 - runs);
    ledger.nodes[node].all_settled = true;
    if runs == 0 {
        return Ok(());
    }
    let Some(context) = ledger.context(node)?.filter(|_| ledger.is_settled_upstream(node)) else {
        return Err(RunError::Internal {
            message: format!(
                "the inputs of `{}` are not settled in time",
                ledger.graph.nodes[node].name
            ),
        });
    };
    let stage = &ledger.checked.stages[ledger.graph.nodes[node].stage];
    let mut body = guarded(|| match stage.settings.open(&context)? {
        Body::Export(body) => Ok(body),
        _ => Err(StageError::failed(
            "the kind says it is an export, but its body is none",
        )),
    })
    .map_err(|error| ledger.failed(node, None, error))?;
    let mut set = ExportSet::begin(&folder, &body.manifest(), key, run_id)?;
    guarded(|| body.write(&mut set)).map_err(|error| ledger.failed(node, None, error))?;
    if let (false, [shrunk, ..]) = (ledger.options.allow_shrink, set.shrunk().as_slice()) {
        let Shrunk { what, before, now } = shrunk;
        let error = StageError::Refused {
            message: format!(
                "the set in {} would shrink: {what}: {now} rows instead of {before}",
                folder.display()
            ),
            help: Some(
                "look whether everything that is read is there (a disk that is not mounted?); --allow-shrink writes the smaller set"
                    .into(),
            ),
        };
        return Err(ledger.failed(node, None, error));
    }
    let files = set.finish()?;
    ledger.events.send(Event::Exported {
        stage: stage.name.clone(),
        folder: folder.display().to_string(),
        files,
    });
    Ok(())
}
