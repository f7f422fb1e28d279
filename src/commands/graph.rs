//! `flow graph`: stages and edges as a picture.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write;

use flow_inspect::graph::{Node, drawing, nodes};
use flow_kind::Role;
use flow_kind::registry::Registry;
use flow_spec::Checked;

use super::checked;
use crate::arguments::{GraphArguments, GraphFormat};
use flow_cli::failure::{Exit, Failure};

pub fn graph(arguments: &GraphArguments, registry: &Registry, out: &mut dyn Write) -> Result<Exit, Failure> {
    let checked = checked(&arguments.pipeline, registry)?;
    let text = match arguments.format {
        GraphFormat::Mermaid => mermaid(&checked),
        GraphFormat::Dot => dot(&checked),
        GraphFormat::Svg => drawing::svg(&nodes(&checked)),
    };
    out.write_all(text.as_bytes())?;
    Ok(Exit::Done)
}

/// Stages by group, groups in the order of their names.
fn by_group(nodes: &[Node]) -> BTreeMap<&str, Vec<usize>> {
    let mut groups: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, node) in nodes.iter().enumerate() {
        groups
            .entry(node.name.rsplit_once('/').map_or("", |(group, _)| group))
            .or_default()
            .push(index);
    }
    groups
}

fn mermaid(checked: &Checked) -> String {
    let nodes = nodes(checked);
    let mut text = String::from("flowchart TD\n");
    for (group, members) in by_group(&nodes) {
        let indent = if group.is_empty() { "    " } else { "        " };
        if !group.is_empty() {
            let _ = writeln!(text, "    subgraph {} [\"{group}\"]", group.replace(['/', '-'], "_"));
        }
        for index in members {
            let node = &nodes[index];
            let own = node.name.rsplit('/').next().unwrap_or(&node.name);
            let label = format!("\"{own}<br/><small>{}</small>\"", node.kind);
            let (open, close) = match node.role {
                Role::Source => ("([", "])"),
                Role::Local => ("[", "]"),
                Role::Global => ("{{", "}}"),
                Role::Log => ("[[", "]]"),
                Role::Export => ("[/", "/]"),
            };
            let class = if node.off { ":::off" } else { "" };
            let _ = writeln!(text, "{indent}s{index}{open}{label}{close}{class}");
        }
        if !group.is_empty() {
            text.push_str("    end\n");
        }
    }
    for (index, node) in nodes.iter().enumerate() {
        for (producer, port) in &node.inputs {
            match port {
                Some(port) => drop(writeln!(text, "    s{producer} -- {port} --> s{index}")),
                None if node.off || nodes[*producer].off => drop(writeln!(text, "    s{producer} -.-> s{index}")),
                None => drop(writeln!(text, "    s{producer} --> s{index}")),
            }
        }
    }
    if nodes.iter().any(|node| node.off) {
        text.push_str("    classDef off stroke-dasharray: 4 4, opacity: 0.5\n");
    }
    text
}

fn dot(checked: &Checked) -> String {
    let nodes = nodes(checked);
    let mut text = String::from("digraph pipeline {\n    node [shape=box, fontname=\"sans-serif\"];\n");
    for (number, (group, members)) in by_group(&nodes).into_iter().enumerate() {
        if !group.is_empty() {
            let _ = writeln!(text, "    subgraph cluster_{number} {{\n    label=\"{group}\";");
        }
        for index in members {
            let shape = match nodes[index].role {
                Role::Source => "ellipse",
                Role::Local => "box",
                Role::Global => "hexagon",
                Role::Log => "box3d",
                Role::Export => "folder",
            };
            let style = if nodes[index].off {
                ", style=dashed, fontcolor=gray"
            } else {
                ""
            };
            let _ = writeln!(
                text,
                "    s{index} [label=\"{}\\n{}\", shape={shape}{style}];",
                nodes[index].name, nodes[index].kind
            );
        }
        if !group.is_empty() {
            text.push_str("    }\n");
        }
    }
    for (index, node) in nodes.iter().enumerate() {
        for (producer, port) in &node.inputs {
            let label = port
                .as_ref()
                .map_or(String::new(), |port| format!(" [label=\"{port}\"]"));
            let _ = writeln!(text, "    s{producer} -> s{index}{label};");
        }
    }
    text.push_str("}\n");
    text
}
