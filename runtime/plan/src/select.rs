//! The selected stages of a run: `--from`, `--until`, `--only`, `--force`, `--partition`.

use super::graph::Graph;
use super::partitions;
use flow_spec::Checked;

/// What a user asks to be run.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Run this stage and all that follow it.
    pub from: Option<String>,
    /// Run this stage and all that it needs.
    pub until: Option<String>,
    /// Run only these stages, on existing artifacts.
    pub only: Vec<String>,
    /// Run these stages even where a record exists; `all` for every stage.
    pub force: Vec<String>,
    /// Work only on these partitions of the sources: names, or patterns of names (see [`flow_base::glob`]). Empty for all.
    /// Stages that need all partitions are left out. Not together with `from` or `only`.
    pub partitions: Vec<String>,
}

/// Per node of the graph.
#[derive(Debug, PartialEq, Eq)]
pub struct StageSelection {
    /// Selected nodes. Others are reused, and run only to feed these.
    pub selected: Vec<bool>,
    /// Runs even where a record exists.
    pub forced: Vec<bool>,
    /// Why it is not selected, in a run of only some partitions.
    pub left_out: Vec<Option<String>>,
    /// All its partitions are taken although the run is of only some partitions, since it is a lookup table.
    pub whole: Vec<bool>,
}

/// The error for an unknown stage name: message and help.
pub type NoSuchStage = (String, String);

impl StageSelection {
    pub fn new(checked: &Checked, graph: &Graph, asked: &Selection) -> Result<StageSelection, NoSuchStage> {
        let stage = |name: &String| {
            checked.position(name).ok_or_else(|| {
                let off = checked.pipeline.switched_off.iter().find(|off| off.stage == *name);
                match off {
                    Some(off) => (format!("stage `{name}` is switched off"), off.reason.clone()),
                    None => (format!("the pipeline has no stage `{name}`"), checked.suggest(name)),
                }
            })
        };
        let mut selected = vec![true; graph.nodes.len()];
        let is_partial = !asked.partitions.is_empty();
        if is_partial && (asked.from.is_some() || !asked.only.is_empty()) {
            return Err((
                "--partition cannot be given together with --from or --only".to_string(),
                "these take the stored output of other stages, which covers all partitions".to_string(),
            ));
        }
        if let Some(name) = &asked.from {
            let first = first_node(graph, stage(name)?);
            let mut kept = vec![false; selected.len()];
            kept[first] = true;
            for node in graph.downstream(first) {
                kept[node] = true;
            }
            retain(&mut selected, &kept);
        }
        if let Some(name) = &asked.until {
            let last = graph.outputs_of[stage(name)?];
            let mut kept = vec![false; selected.len()];
            kept[last] = true;
            for node in graph.upstream(last) {
                kept[node] = true;
            }
            retain(&mut selected, &kept);
        }
        if !asked.only.is_empty() {
            let only = asked.only.iter().map(stage).collect::<Result<Vec<_>, _>>()?;
            let kept: Vec<bool> = graph.nodes.iter().map(|node| only.contains(&node.stage)).collect();
            retain(&mut selected, &kept);
        }
        if let (Some(from), Some(until), false) = (&asked.from, &asked.until, selected.contains(&true)) {
            return Err((
                format!("no stage is selected: `{until}` does not need `{from}`"),
                "--from takes a stage and all that follow it, --until one and all that it needs; together they take what \
                 is between them"
                    .to_string(),
            ));
        }
        let (mut left_out, mut whole) = (vec![None; selected.len()], vec![false; selected.len()]);
        if is_partial {
            let mut parts = partitions::parts(checked, graph, &selected);
            for (selected, left_out) in selected.iter_mut().zip(&mut parts.left_out) {
                if !*selected {
                    *left_out = None;
                }
                *selected &= left_out.is_none();
            }
            whole = parts.taken_whole(graph, &selected);
            left_out = parts.left_out;
        }
        let all = asked.force.iter().any(|name| name == "all");
        let forced = asked
            .force
            .iter()
            .filter(|name| *name != "all")
            .map(stage)
            .collect::<Result<Vec<_>, _>>()?;
        let forced = graph
            .nodes
            .iter()
            .map(|node| all || forced.contains(&node.stage))
            .collect();
        Ok(StageSelection {
            selected,
            forced,
            left_out,
            whole,
        })
    }
}

/// The first node of a stage: `keys` of a global one.
fn first_node(graph: &Graph, stage: usize) -> usize {
    graph.nodes.iter().position(|node| node.stage == stage).unwrap_or(0)
}

fn retain(selected: &mut [bool], kept: &[bool]) {
    for (selected, kept) in selected.iter_mut().zip(kept) {
        *selected &= kept;
    }
}
