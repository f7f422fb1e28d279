//! A drawing of a pipeline: boxes in rows, each below all that it reads.

use std::fmt::Write;

use flow_runtime::Role;

use super::Node;

const WIDTH: usize = 190;
const HEIGHT: usize = 44;
const GAP_X: usize = 24;
const GAP_Y: usize = 46;
const MARGIN: usize = 16;

/// The pipeline as SVG. `nodes` stand producers first.
pub fn svg(nodes: &[Node]) -> String {
    let places = places(nodes);
    let x = |column: usize| MARGIN + column * (WIDTH + GAP_X);
    let y = |row: usize| MARGIN + row * (HEIGHT + GAP_Y);
    let columns = places.iter().map(|(_, column)| column + 1).max().unwrap_or(1);
    let rows = places.iter().map(|(row, _)| row + 1).max().unwrap_or(1);
    let (width, height) = (x(columns) - GAP_X + MARGIN, y(rows) - GAP_Y + MARGIN);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\">\n\
         <defs><marker id=\"tip\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\"><path d=\"M0 0 8 4 0 8z\" fill=\"#666\"/></marker></defs>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    for (node, (row, column)) in nodes.iter().zip(&places) {
        for (producer, port) in &node.inputs {
            let (from_row, from_column) = places[*producer];
            let (x1, y1) = (x(from_column) + WIDTH / 2, y(from_row) + HEIGHT);
            let (x2, y2) = (x(*column) + WIDTH / 2, y(*row));
            let bend = (y2 - y1) / 2;
            let pale = pale(node.off || nodes[*producer].off);
            let _ = writeln!(
                text,
                "<path d=\"M{x1} {y1} C{x1} {} {x2} {} {x2} {y2}\" fill=\"none\" stroke=\"#666\" marker-end=\"url(#tip)\"{pale}/>",
                y1 + bend,
                y2 - bend
            );
            if let Some(port) = port {
                let (at_x, at_y) = ((x1 + x2) / 2 + 4, (y1 + y2) / 2);
                let _ = writeln!(
                    text,
                    "<text x=\"{at_x}\" y=\"{at_y}\" font-size=\"10\" fill=\"#666\">{}</text>",
                    escaped(port)
                );
            }
        }
    }
    for (node, (row, column)) in nodes.iter().zip(&places) {
        let fill = match node.role {
            Role::Source => "#e3f1e3",
            Role::Local => "#f4f4f4",
            Role::Global => "#e3ecf8",
            Role::Log => "#f8ecdc",
            Role::Export => "#f6e3ee",
        };
        let (left, top) = (x(*column), y(*row));
        let middle = left + WIDTH / 2;
        let fill = if node.off { "#fff" } else { fill };
        let _ = writeln!(text, "<g{}>", pale(node.off));
        let _ = writeln!(
            text,
            "<rect x=\"{left}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"6\" fill=\"{fill}\" stroke=\"#888\"/>"
        );
        let _ = writeln!(
            text,
            "<text x=\"{middle}\" y=\"{}\" font-size=\"13\" text-anchor=\"middle\">{}</text>",
            top + 19,
            escaped(&fitted(&node.name))
        );
        let _ = writeln!(
            text,
            "<text x=\"{middle}\" y=\"{}\" font-size=\"10\" fill=\"#555\" text-anchor=\"middle\">{}</text>",
            top + 34,
            escaped(&node.kind)
        );
        text.push_str("</g>\n");
    }
    text.push_str("</svg>\n");
    text
}

/// How what takes no part is drawn.
fn pale(off: bool) -> &'static str {
    if off {
        " opacity=\"0.5\" stroke-dasharray=\"4 4\""
    } else {
        ""
    }
}

/// Row and column of each node: below its lowest producer; in a row, near the middle of its producers.
fn places(nodes: &[Node]) -> Vec<(usize, usize)> {
    let mut places: Vec<(usize, usize)> = Vec::new();
    let mut taken: Vec<Vec<usize>> = Vec::new();
    for node in nodes {
        let producers: Vec<(usize, usize)> = node.inputs.iter().map(|(producer, _)| places[*producer]).collect();
        let row = producers.iter().map(|(row, _)| row + 1).max().unwrap_or(0);
        let wished = producers
            .iter()
            .map(|(_, column)| column)
            .sum::<usize>()
            .checked_div(producers.len())
            .unwrap_or(0);
        if taken.len() <= row {
            taken.resize(row + 1, Vec::new());
        }
        let column = (wished..).find(|column| !taken[row].contains(column)).unwrap_or(wished);
        taken[row].push(column);
        places.push((row, column));
    }
    places
}

/// A name that fits its box.
fn fitted(name: &str) -> String {
    // About the width of a box at this size of letters.
    const LETTERS: usize = 25;
    if name.chars().count() <= LETTERS {
        name.to_string()
    } else {
        name.chars().take(LETTERS - 1).chain(['…']).collect()
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_boxes_share_a_place_and_edges_lead_down() {
        let node = |name: &str, inputs: &[usize]| Node {
            name: name.into(),
            kind: "a.b".into(),
            role: Role::Local,
            inputs: inputs.iter().map(|&input| (input, None)).collect(),
            off: name == "b",
        };
        let nodes = [
            node("a", &[]),
            node("b", &[]),
            node("c", &[0]),
            node("d", &[0, 1]),
            node("e", &[2, 0]),
            node("<f>", &[0]),
        ];
        let places = places(&nodes);
        for (index, node) in nodes.iter().enumerate() {
            assert!(
                node.inputs
                    .iter()
                    .all(|(producer, _)| places[*producer].0 < places[index].0)
            );
            assert!(!places[..index].contains(&places[index]));
        }
        let text = svg(&nodes);
        assert!(text.contains("&lt;f&gt;") && text.ends_with("</svg>\n"));
    }
}
