//! The nodes of a run, the edges between them, and their regions.
//!
//! Each stage is one node, except a global one, which becomes three: `keys` (local), `decide` (over all
//! partitions) and `apply` (local). Where a global stage takes rows from another one, which changes no row, its `keys`
//! are computed from the rows before that one, together with them, and `decide` only considers rows that passed. An
//! edge is *stored* when what flows on it is an artifact. The nodes that are joined by edges that are not stored form a
//! region: one timely dataflow.

use std::collections::BTreeMap;

use flow_base::digest::Digest;
use flow_kind::inputs::Reads;
use flow_kind::kind::{Conservation, Port, Role};
use flow_spec::Checked;
use flow_store::Record;

/// Which part of a stage a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StagePart {
    /// The stage itself.
    Whole,
    Keys,
    Decide,
    Apply,
}

/// Name of the port on which `keys` gives its key rows.
pub const KEYS_PORT: &str = "keys";
/// Ports of `decide`: all decisions in one file, and the list of what each partition was given.
pub const DECISIONS_PORT: &str = "decisions";
pub const DIGESTS_PORT: &str = "digests";

/// The one partition of a log stage's outputs.
pub const RESULT: &str = "result";

/// How an edge is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// From a node of the same region.
    Stream,
    /// From an artifact, partition by partition.
    Replay,
    /// From an artifact, as a whole.
    Whole,
    /// From the decisions of the stage's own `decide`.
    Decisions,
    /// Not rows: selects the key rows for `decide`, where these are of rows before another global stage.
    SemiJoin,
}

impl Flow {
    pub fn is_stored(self) -> bool {
        self != Flow::Stream
    }
}

#[derive(Clone, Debug)]
pub struct NodeInput {
    /// Position in the stage's `from`; none for what the runtime wires itself (keys, decisions).
    pub position: Option<usize>,
    pub node: usize,
    pub port: usize,
    pub flow: Flow,
}

#[derive(Clone, Debug)]
pub struct Node {
    /// Index into [`Checked::stages`].
    pub stage: usize,
    pub part: StagePart,
    pub name: String,
    pub role: Role,
    pub inputs: Vec<NodeInput>,
    /// For `keys` and `decide` the schemas are known once the body is open.
    pub outputs: Vec<Port>,
    /// Which outputs are kept as artifacts.
    pub stored: Vec<bool>,
    pub conservation: Conservation,
    pub level: usize,
    pub region: usize,
    pub recipe: Digest,
    /// What the key of a partition is made of, beside the recipe, in this order.
    pub key_inputs: Vec<KeyInput>,
}

impl Node {
    /// The first kept output that a record of the node lacks.
    pub fn unkept(&self, record: &Record) -> Option<String> {
        let mut kept = self.outputs.iter().zip(&self.stored).filter(|(_, kept)| **kept);
        let missing = kept.find(|(port, _)| !record.ports.contains_key(&port.name));
        missing.map(|(port, _)| port.name.clone())
    }
}

/// One part of a partition's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeyInput {
    /// The files (and `extra`) of the partition of a source.
    Source { node: usize },
    /// The partition's digest on a port that is kept.
    Partition { node: usize, port: usize },
    /// The digest of all partitions of a port that is kept.
    Whole { node: usize, port: usize },
    /// The decisions about the partition.
    Decisions { node: usize },
}

/// The kind of a region, which determines how it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionKind {
    Dataflow,
    /// A dataflow with one log stage; `log` is its node.
    Log {
        log: usize,
    },
    Decide {
        node: usize,
    },
    Export {
        node: usize,
    },
}

#[derive(Clone, Debug)]
pub struct Region {
    /// Producers first.
    pub nodes: Vec<usize>,
    pub kind: RegionKind,
}

pub struct Graph {
    /// Producers first.
    pub nodes: Vec<Node>,
    /// In the order in which they run.
    pub regions: Vec<Region>,
    /// By stage, the node whose outputs are the stage's.
    pub outputs_of: Vec<usize>,
}

/// The input of the first of consecutive global stages, which has all rows before any of them was selected.
fn before_global(nodes: &[Node], input: &NodeInput) -> NodeInput {
    let mut input = input.clone();
    while input.flow == Flow::Stream
        && nodes[input.node].part == StagePart::Apply
        && let Some(before) = nodes[input.node]
            .inputs
            .iter()
            .find(|before| before.flow == Flow::Stream)
    {
        (input.node, input.port) = (before.node, before.port);
    }
    input
}

impl Graph {
    /// Lays out a checked pipeline. The error is a sentence for the user.
    pub fn new(checked: &Checked) -> Result<Graph, String> {
        let mut nodes: Vec<Node> = Vec::new();
        let mut outputs_of = Vec::with_capacity(checked.stages.len());
        for (stage, described) in checked.stages.iter().enumerate() {
            let role = described.shape.role;
            let inputs: Vec<NodeInput> = described
                .inputs
                .iter()
                .enumerate()
                .map(|(position, input)| {
                    let whole = input.reads == Reads::Whole;
                    // Streams are sorted out below; what a kind reads whole is stored in any case.
                    let flow = if whole { Flow::Whole } else { Flow::Stream };
                    NodeInput {
                        position: Some(position),
                        node: outputs_of[input.stage],
                        port: input.port,
                        flow,
                    }
                })
                .collect();
            let node = |part, name: String, inputs, outputs: Vec<Port>, conservation| Node {
                stage,
                part,
                name,
                role,
                inputs,
                stored: vec![false; outputs.len()],
                outputs,
                conservation,
                level: 0,
                region: 0,
                recipe: Digest::from_bytes([0; 32]),
                key_inputs: Vec::new(),
            };
            let name = described.name.clone();
            let outputs = described.shape.outputs.clone();
            if role == Role::Global {
                let unknown = || std::sync::Arc::new(arrow::datatypes::Schema::empty());
                let port = |name: &str| Port::new(name, unknown());
                let whole: Vec<NodeInput> = inputs
                    .iter()
                    .filter(|input| input.flow == Flow::Whole)
                    .cloned()
                    .collect();
                let keys = nodes.len();
                let among = inputs.iter().find(|input| input.flow == Flow::Stream).cloned();
                let among = among.filter(|input| nodes[input.node].part == StagePart::Apply);
                nodes.push(node(
                    StagePart::Keys,
                    format!("{name}:keys"),
                    inputs.iter().map(|input| before_global(&nodes, input)).collect(),
                    vec![port(KEYS_PORT)],
                    Conservation::NewRows,
                ));
                let wired = |node, flow| NodeInput {
                    position: None,
                    node,
                    port: 0,
                    flow,
                };
                let mut decide = vec![wired(keys, Flow::Whole)];
                decide.extend(among.map(|input| NodeInput {
                    position: None,
                    flow: Flow::SemiJoin,
                    ..input
                }));
                decide.extend(whole);
                let ports = vec![port(DECISIONS_PORT), port(DIGESTS_PORT)];
                nodes.push(node(
                    StagePart::Decide,
                    format!("{name}:decide"),
                    decide,
                    ports,
                    Conservation::NewRows,
                ));
                let mut apply = inputs;
                apply.push(wired(keys + 1, Flow::Decisions));
                nodes.push(node(
                    StagePart::Apply,
                    format!("{name}:apply"),
                    apply,
                    outputs,
                    described.shape.conservation,
                ));
            } else {
                nodes.push(node(
                    StagePart::Whole,
                    name,
                    inputs,
                    outputs,
                    described.shape.conservation,
                ));
            }
            outputs_of.push(nodes.len() - 1);
        }
        let mut graph = Graph {
            nodes,
            regions: Vec::new(),
            outputs_of,
        };
        graph.store_edges(checked);
        graph.form_regions(checked)?;
        graph.make_recipes(checked);
        Ok(graph)
    }

    /// Levels, and which edges are artifacts: what is read whole, what comes out of an expensive, a global or a
    /// log stage, and every edge between levels.
    fn store_edges(&mut self, checked: &Checked) {
        for index in 0..self.nodes.len() {
            let mut level = 0;
            for place in 0..self.nodes[index].inputs.len() {
                let input = self.nodes[index].inputs[place].clone();
                let producer = &self.nodes[input.node];
                let expensive = checked.stages[producer.stage].shape.expensive && producer.part == StagePart::Whole;
                let stored = input.flow.is_stored()
                    || expensive
                    || matches!(producer.part, StagePart::Apply)
                    || producer.role == Role::Log;
                if stored && input.flow == Flow::Stream {
                    self.nodes[index].inputs[place].flow = Flow::Replay;
                }
                level = level.max(self.nodes[input.node].level + usize::from(stored));
            }
            self.nodes[index].level = level;
        }
        self.lift_feeds();
        for index in 0..self.nodes.len() {
            for place in 0..self.nodes[index].inputs.len() {
                let NodeInput { node, port, flow, .. } = self.nodes[index].inputs[place];
                if flow == Flow::Stream && self.nodes[node].level != self.nodes[index].level {
                    self.nodes[index].inputs[place].flow = Flow::Replay;
                }
                match self.nodes[index].inputs[place].flow {
                    Flow::Stream => {}
                    Flow::Decisions => self.nodes[node].stored.fill(true),
                    Flow::Replay | Flow::Whole | Flow::SemiJoin => self.nodes[node].stored[port] = true,
                }
            }
        }
        let mut read = vec![false; self.nodes.len()];
        for input in self.nodes.iter().flat_map(|node| &node.inputs) {
            read[input.node] = true;
        }
        for (node, read) in self.nodes.iter_mut().zip(read) {
            let gives_rows = matches!(node.part, StagePart::Whole | StagePart::Apply);
            let expensive = gives_rows && checked.stages[node.stage].shape.expensive;
            // Outputs that no stage reads are results of the pipeline.
            if expensive || !read || node.role == Role::Log {
                node.stored.fill(true);
            }
        }
    }

    /// Puts nodes that only feed a log on the level of that log. Their rows are the signals of a whole training run and
    /// must stream, even if the log waits for an artifact that its feed does not need.
    fn lift_feeds(&mut self) {
        let mut readers: Vec<Vec<(usize, bool)>> = vec![Vec::new(); self.nodes.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            for input in &node.inputs {
                readers[input.node].push((index, input.flow == Flow::Stream));
            }
        }
        // Readers come after what they read, so theirs is settled first.
        let mut feeds: Vec<Option<usize>> = vec![None; self.nodes.len()];
        for index in (0..self.nodes.len()).rev() {
            let node = &self.nodes[index];
            feeds[index] = if node.role == Role::Log {
                Some(node.level)
            } else {
                let level = readers[index].first().and_then(|(reader, _)| feeds[*reader]);
                level.filter(|_| {
                    readers[index]
                        .iter()
                        .all(|(reader, streams)| *streams && feeds[*reader] == level)
                })
            };
            if let Some(level) = feeds[index] {
                self.nodes[index].level = level;
            }
        }
    }

    fn form_regions(&mut self, checked: &Checked) -> Result<(), String> {
        // Nodes joined by streams get the smallest node index among them.
        let mut group: Vec<usize> = (0..self.nodes.len()).collect();
        fn find(group: &mut [usize], mut at: usize) -> usize {
            while group[at] != at {
                group[at] = group[group[at]];
                at = group[at];
            }
            at
        }
        for index in 0..self.nodes.len() {
            for input in self.nodes[index].inputs.iter().filter(|input| !input.flow.is_stored()) {
                let (a, b) = (find(&mut group, index), find(&mut group, input.node));
                group[a.max(b)] = a.min(b);
            }
        }
        let mut members: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
        for index in 0..self.nodes.len() {
            let first = find(&mut group, index);
            members.entry((self.nodes[index].level, first)).or_default().push(index);
        }
        for nodes in members.into_values() {
            let kind = self.region_kind(checked, &nodes)?;
            for node in &nodes {
                self.nodes[*node].region = self.regions.len();
            }
            self.regions.push(Region { nodes, kind });
        }
        Ok(())
    }

    fn region_kind(&self, checked: &Checked, nodes: &[usize]) -> Result<RegionKind, String> {
        let first = &self.nodes[nodes[0]];
        if first.part == StagePart::Decide {
            return Ok(RegionKind::Decide { node: nodes[0] });
        }
        if first.role == Role::Export {
            return Ok(RegionKind::Export { node: nodes[0] });
        }
        let logs: Vec<usize> = nodes
            .iter()
            .copied()
            .filter(|node| self.nodes[*node].role == Role::Log)
            .collect();
        let log = match logs.as_slice() {
            [] => return Ok(RegionKind::Dataflow),
            [log] => *log,
            [a, b, ..] => {
                return Err(format!(
                    "stages `{}` and `{}` read one stream, and both keep a log of their own: give each its own loader",
                    self.nodes[*a].name, self.nodes[*b].name
                ));
            }
        };
        // Feeds of a log are not recorded, so nothing else may depend on them.
        let mut feeds = vec![false; self.nodes.len()];
        feeds[log] = true;
        for index in nodes.iter().rev() {
            if feeds[*index] {
                for input in self.nodes[*index].inputs.iter().filter(|input| !input.flow.is_stored()) {
                    feeds[input.node] = true;
                }
            }
        }
        for index in nodes {
            let node = &self.nodes[*index];
            if !feeds[*index] || (*index != log && node.stored.contains(&true)) {
                let log = &checked.stages[self.nodes[log].stage].name;
                return Err(format!(
                    "stage `{}` hangs on the stream that feeds `{log}`, which keeps its own log: give it an input of its own",
                    node.name
                ));
            }
        }
        Ok(RegionKind::Log { log })
    }

    fn make_recipes(&mut self, checked: &Checked) {
        for index in 0..self.nodes.len() {
            let node = &self.nodes[index];
            let stage = &checked.stages[node.stage];
            let part = match node.part {
                StagePart::Whole => "stage",
                StagePart::Keys => "keys",
                StagePart::Decide => "decide",
                StagePart::Apply => "apply",
            };
            let mut parts: Vec<Vec<u8>> = vec![
                b"flow recipe 1".to_vec(),
                stage.kind.name().into(),
                stage.kind.version().to_le_bytes().to_vec(),
                part.into(),
                stage.settings.identity().to_string().into(),
            ];
            let names: Vec<&str> = stage.inputs.iter().map(|input| input.name.as_str()).collect();
            for input in &node.inputs {
                let producer = &self.nodes[input.node];
                if let Some(position) = input.position {
                    // A name given in the pipeline may affect the output (as a table or a file name). The default name,
                    // that of the producing stage, is replaced by its rank among the others, so that renaming a stage
                    // has no effect while swapping two inputs does. The only input of a kind needs no name.
                    let name = names[position];
                    let own = match stage.inputs[position].declared.is_many() {
                        true => checked.stages[producer.stage].name.rsplit('/').next() == Some(name),
                        false => stage.kind.inputs().len() == 1,
                    };
                    let rank = names.iter().filter(|other| **other < name).count();
                    parts.push(if own { Vec::new() } else { name.into() });
                    parts.push((rank as u64).to_le_bytes().to_vec());
                }
                parts.push(match input.flow {
                    Flow::Stream => "stream".into(),
                    Flow::Replay => "artifact".into(),
                    Flow::Whole => "whole artifact".into(),
                    Flow::Decisions => "decisions".into(),
                    Flow::SemiJoin => "among".into(),
                });
                if input.flow == Flow::Stream {
                    parts.push(producer.outputs[input.port].name.clone().into());
                    parts.push(producer.recipe.as_bytes().to_vec());
                }
            }
            let recipe = Digest::of_parts(parts);
            let mut key_inputs = Vec::new();
            self.collect_key_inputs(index, &mut key_inputs);
            self.nodes[index].recipe = recipe;
            self.nodes[index].key_inputs = key_inputs;
        }
    }

    fn collect_key_inputs(&self, index: usize, into: &mut Vec<KeyInput>) {
        let node = &self.nodes[index];
        let mut add = |input| {
            if !into.contains(&input) {
                into.push(input);
            }
        };
        if node.role == Role::Source {
            add(KeyInput::Source { node: index });
        }
        for input in &node.inputs {
            match input.flow {
                // Made before: producers come first.
                Flow::Stream => self.nodes[input.node].key_inputs.iter().for_each(|input| add(*input)),
                Flow::Replay => add(KeyInput::Partition {
                    node: input.node,
                    port: input.port,
                }),
                Flow::Whole | Flow::SemiJoin => add(KeyInput::Whole {
                    node: input.node,
                    port: input.port,
                }),
                Flow::Decisions => add(KeyInput::Decisions { node: input.node }),
            }
        }
    }

    /// All nodes that `node` depends on, itself left out.
    pub fn upstream(&self, node: usize) -> Vec<usize> {
        let mut needed = vec![false; self.nodes.len()];
        needed[node] = true;
        for index in (0..=node).rev() {
            if needed[index] {
                for input in &self.nodes[index].inputs {
                    needed[input.node] = true;
                }
            }
        }
        (0..node).filter(|index| needed[*index]).collect()
    }

    /// All nodes that depend on `node`, itself left out.
    pub fn downstream(&self, node: usize) -> Vec<usize> {
        let mut reached = vec![false; self.nodes.len()];
        reached[node] = true;
        for index in node + 1..self.nodes.len() {
            reached[index] = self.nodes[index].inputs.iter().any(|input| reached[input.node]);
        }
        (node + 1..self.nodes.len()).filter(|index| reached[*index]).collect()
    }
}
