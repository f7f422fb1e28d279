//! A run of only some partitions (`--partition`): which stages can take part, and which partitions are selected.
//!
//! A stage takes part if what it gives for a partition follows from that partition of its sources. A stage that needs all
//! partitions (it decides over them, writes one set of all, or reads a whole artifact) is left out, and so are the
//! stages after it: a set of some partitions never replaces a complete one. For the same reason such a run has no
//! complete snapshots.
//!
//! A lookup table beside the rows is no reason to leave a stage out: if the table's sources feed no other selected
//! stage, all of their partitions are taken.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::graph::{Flow, Graph, RegionKind, StagePart};
use crate::run_error::RunError;
use flow_base::glob::path_fits;
use flow_base::partition::Partition;
use flow_base::suggest::did_you_mean;
use flow_kind::kind::Role;
use flow_spec::Checked;

/// Which nodes take part, and with which partitions.
pub(super) struct Parts {
    /// By node, why it cannot take part; none where it can.
    pub left_out: Vec<Option<String>>,
    /// By node, the nodes whose artifacts it reads whole as tables beside its rows.
    tables: Vec<Vec<usize>>,
}

/// Computes this for the nodes that are `selected` by name; everything that a selected node reads is selected, too.
pub(super) fn parts(checked: &Checked, graph: &Graph, selected: &[bool]) -> Parts {
    let mut no_tables = BTreeSet::new();
    loop {
        let (parts, sources, row_sources) = parts_with(checked, graph, &no_tables);
        let tables = parts.tables.iter().zip(selected).filter(|(_, selected)| **selected);
        let tables: BTreeSet<usize> = tables.flat_map(|(tables, _)| tables).copied().collect();
        let mut before_tables = tables.clone();
        before_tables.extend(tables.iter().flat_map(|&table| graph.upstream(table)));
        // Sources of rows other than those of tables only.
        let elsewhere = (0..graph.nodes.len()).filter(|node| selected[*node] && !before_tables.contains(node));
        let elsewhere: BTreeSet<usize> = elsewhere.flat_map(|node| &row_sources[node]).copied().collect();
        let found = tables
            .into_iter()
            .filter(|&table| !sources[table].is_disjoint(&elsewhere));
        let known = no_tables.len();
        no_tables.extend(found);
        if no_tables.len() == known {
            return parts;
        }
    }
}

/// With the sources before each node, and those whose rows it streams. The producers `no_tables` are no tables.
fn parts_with(
    checked: &Checked,
    graph: &Graph,
    no_tables: &BTreeSet<usize>,
) -> (Parts, Vec<BTreeSet<usize>>, Vec<BTreeSet<usize>>) {
    let mut row_sources: Vec<BTreeSet<usize>> = Vec::with_capacity(graph.nodes.len());
    let mut parts = Parts {
        left_out: Vec::with_capacity(graph.nodes.len()),
        tables: Vec::with_capacity(graph.nodes.len()),
    };
    // By node, the sources before it.
    let mut sources: Vec<BTreeSet<usize>> = Vec::with_capacity(graph.nodes.len());
    for (index, node) in graph.nodes.iter().enumerate() {
        let name = |index: usize| &graph.nodes[index].name;
        let of_inputs = |is_meant: &dyn Fn(Flow) -> bool| -> BTreeSet<usize> {
            let inputs = node.inputs.iter().filter(|input| is_meant(input.flow));
            inputs.flat_map(|input| &sources[input.node]).copied().collect()
        };
        let of_rows = of_inputs(&|flow| matches!(flow, Flow::Stream | Flow::Replay));
        let is_table = |producer: usize| {
            node.part == StagePart::Whole
                && !no_tables.contains(&producer)
                && !of_rows.is_empty()
                && parts.left_out[producer].is_none()
                && sources[producer].is_disjoint(&of_rows)
        };
        let is_left_out = |producer: usize| {
            let why = || format!("it reads `{}`, which is left out", name(producer));
            parts.left_out[producer].as_ref().map(|_| why())
        };
        let of_input = || {
            node.inputs.iter().find_map(|input| match input.flow {
                Flow::Whole if is_table(input.node) => None,
                Flow::Whole | Flow::SemiJoin => Some(format!("it reads all of `{}`", name(input.node))),
                Flow::Decisions => Some(format!("`{}` decides over all partitions", name(input.node))),
                Flow::Stream | Flow::Replay => is_left_out(input.node),
            })
        };
        let why = match graph.regions[node.region].kind {
            _ if node.part == StagePart::Decide => Some("it decides over all partitions".to_string()),
            _ if node.role == Role::Export => Some("it writes one set of all partitions".to_string()),
            RegionKind::Log { log } => Some(format!("`{}` keeps one log of all steps", name(log))),
            _ if checked.stages[node.stage].shape.needs_current => {
                Some("what it does cannot be undone: it works on whole sets alone".to_string())
            }
            _ => of_input(),
        };
        let whole = node.inputs.iter().filter(|input| input.flow == Flow::Whole);
        let tables = match why {
            None => whole.map(|input| input.node).collect(),
            Some(_) => Vec::new(),
        };
        let mut own = of_inputs(&|_| true);
        if node.role == Role::Source {
            own.insert(index);
        }
        parts.left_out.push(why);
        parts.tables.push(tables);
        sources.push(own);
        row_sources.push(of_rows);
    }
    (parts, sources, row_sources)
}

impl Parts {
    /// By node, whether all of its partitions are taken: for tables of `selected` nodes, and their upstream nodes.
    pub fn taken_whole(&self, graph: &Graph, selected: &[bool]) -> Vec<bool> {
        let mut whole = vec![false; graph.nodes.len()];
        let readers = self.tables.iter().zip(selected).filter(|(_, selected)| **selected);
        for table in readers.flat_map(|(tables, _)| tables) {
            whole[*table] = true;
            for before in graph.upstream(*table) {
                whole[before] = true;
            }
        }
        whole
    }
}

/// Of the partitions of each source that can be run in part those that are wanted.
///
/// # Errors
/// If no source has a wanted partition.
pub fn wanted(
    patterns: &[String],
    sources: &[(usize, Arc<Vec<Partition>>)],
) -> Result<Vec<(usize, Vec<Partition>)>, RunError> {
    let mut found = vec![false; patterns.len()];
    let mut kept = Vec::with_capacity(sources.len());
    for (node, space) in sources {
        let mut of_node = Vec::new();
        for partition in space.iter() {
            let mut is_wanted = false;
            for (pattern, found) in patterns.iter().zip(&mut found) {
                if pattern == partition.as_str() || path_fits(pattern, partition.as_str()) {
                    (is_wanted, *found) = (true, true);
                }
            }
            if is_wanted {
                of_node.push(partition.clone());
            }
        }
        kept.push((*node, of_node));
    }
    let Some((pattern, _)) = patterns.iter().zip(found).find(|(_, found)| !found) else {
        return Ok(kept);
    };
    let message = match pattern.contains(['*', '?']) {
        true => format!("no source that can be run in part has a partition that fits `{pattern}`"),
        false => format!("no source that can be run in part has a partition `{pattern}`"),
    };
    let names: BTreeSet<&str> = sources
        .iter()
        .flat_map(|(_, space)| space.iter())
        .map(Partition::as_str)
        .collect();
    Err(RunError::Usage {
        message,
        help: Some(did_you_mean(pattern, names, "partitions")),
    })
}
