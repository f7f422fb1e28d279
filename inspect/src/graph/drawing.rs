//! A drawing of a pipeline: boxes in rows, each below all that it reads.

use std::fmt::Write;

use flow_kind::Role;

use super::Node;
use super::layout::{HEIGHT, WIDTH, layout};

/// The pipeline as SVG. `nodes` are sorted producers first.
pub fn svg(nodes: &[Node]) -> String {
    let layout = layout(nodes);
    let (width, height) = layout.size;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" font-family=\"sans-serif\">\n\
         <defs><marker id=\"tip\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\"><path d=\"M0 0 8 4 0 8z\" fill=\"#666\"/></marker></defs>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    for edge in &layout.edges {
        let pale = pale(nodes[edge.consumer].off || nodes[edge.producer].off);
        let _ = writeln!(
            text,
            "<path d=\"{}\" fill=\"none\" stroke=\"#666\" marker-end=\"url(#tip)\"{pale}/>",
            path(&edge.points)
        );
    }
    for label in &layout.labels {
        // A white outline separates the letters from lines behind them.
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{:.1}\" font-size=\"10\" fill=\"#666\" stroke=\"#fff\" stroke-width=\"3\" paint-order=\"stroke\">{}</text>",
            label.at.0,
            label.at.1,
            escaped(&label.text)
        );
    }
    for (node, (left, top)) in nodes.iter().zip(&layout.boxes) {
        let fill = match node.role {
            Role::Source => "#e3f1e3",
            Role::Local => "#f4f4f4",
            Role::Global => "#e3ecf8",
            Role::Log => "#f8ecdc",
            Role::Export => "#f6e3ee",
        };
        let middle = left + WIDTH / 2.0;
        let fill = if node.off { "#fff" } else { fill };
        let _ = writeln!(text, "<g{}>", pale(node.off));
        let _ = writeln!(
            text,
            "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"6\" fill=\"{fill}\" stroke=\"#888\"/>"
        );
        let _ = writeln!(
            text,
            "<text x=\"{middle:.1}\" y=\"{:.1}\" font-size=\"13\" text-anchor=\"middle\">{}</text>",
            top + 19.0,
            escaped(&fitted(&node.name))
        );
        let _ = writeln!(
            text,
            "<text x=\"{middle:.1}\" y=\"{:.1}\" font-size=\"10\" fill=\"#555\" text-anchor=\"middle\">{}</text>",
            top + 34.0,
            escaped(&node.kind)
        );
        text.push_str("</g>\n");
    }
    text.push_str("</svg>\n");
    text
}

/// Style of switched-off stages.
fn pale(off: bool) -> &'static str {
    if off {
        " opacity=\"0.5\" stroke-dasharray=\"4 4\""
    } else {
        ""
    }
}

/// The path of an edge: straight and bent in turn, a bend with upright ends.
pub fn path(points: &[(f64, f64)]) -> String {
    let mut text = String::new();
    for (number, (x, y)) in points.iter().enumerate() {
        let _ = match number.checked_sub(1).map(|before| points[before]) {
            None => write!(text, "M{x:.1} {y:.1}"),
            Some(_) if number % 2 == 1 => write!(text, " L{x:.1} {y:.1}"),
            Some((from_x, from_y)) => {
                let middle = (from_y + y) / 2.0;
                write!(text, " C{from_x:.1} {middle:.1} {x:.1} {middle:.1} {x:.1} {y:.1}")
            }
        };
    }
    text
}

/// A name that fits its box.
pub fn fitted(name: &str) -> String {
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
        let places = layout(&nodes).boxes;
        for (index, node) in nodes.iter().enumerate() {
            assert!(
                node.inputs
                    .iter()
                    .all(|(producer, _)| places[*producer].1 < places[index].1)
            );
            assert!(!places[..index].contains(&places[index]));
        }
        let text = svg(&nodes);
        assert!(text.contains("&lt;f&gt;") && text.ends_with("</svg>\n"));
    }
}
