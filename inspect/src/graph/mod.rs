//! A pipeline as a graph of stages, and its drawing.

pub mod drawing;
pub mod layout;

use flow_kind::Role;
use flow_spec::Checked;

/// A stage in the drawing.
pub struct Node {
    pub name: String,
    pub kind: String,
    pub role: Role,
    /// Producer and, where it has several ports, the name of the one that is read.
    pub inputs: Vec<(usize, Option<String>)>,
    /// It is switched off: drawn pale, like its edges.
    pub off: bool,
}

/// All stages, producers first, with those that are switched off.
pub fn nodes(checked: &Checked) -> Vec<Node> {
    let off = &checked.pipeline.switched_off;
    let mut standing = checked.stages.iter().zip(&checked.pipeline.stages);
    let mut nodes: Vec<Node> = Vec::new();
    for place in 0..checked.stages.len() + off.len() {
        let find = |name: &str| nodes.iter().position(|node| node.name == name);
        if let Some(off) = off.iter().find(|off| off.position == place) {
            nodes.push(Node {
                name: off.stage.clone(),
                kind: off.uses.clone(),
                role: Role::Local,
                inputs: off.from.iter().filter_map(|name| Some((find(name)?, None))).collect(),
                off: true,
            });
        } else if let Some((stage, written)) = standing.next() {
            let port = |name: &str, port: &Option<String>| {
                let ports = checked
                    .position(name)
                    .map(|index| &checked.stages[index].shape.outputs)?;
                let port = port.clone().or_else(|| Some(ports.first()?.name.clone()))?;
                (ports.len() > 1).then_some(port)
            };
            let inputs = written.from.iter();
            nodes.push(Node {
                name: stage.name.clone(),
                kind: stage.kind.name().to_string(),
                role: stage.shape.role,
                inputs: inputs
                    .filter_map(|edge| Some((find(&edge.stage)?, port(&edge.stage, &edge.port))))
                    .collect(),
                off: false,
            });
        }
    }
    nodes
}
