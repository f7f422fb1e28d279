use flow_kind::Role;
use proptest::prelude::*;

use super::*;

fn node(name: &str, inputs: &[(usize, Option<&str>)]) -> Node {
    Node {
        name: name.into(),
        kind: "a.b".into(),
        role: Role::Local,
        inputs: inputs
            .iter()
            .map(|(from, port)| (*from, port.map(str::to_string)))
            .collect(),
        off: false,
    }
}

/// Left, top, right, bottom.
type Area = (f64, f64, f64, f64);

fn overlap(a: Area, b: Area) -> bool {
    // Less than a tenth of a pixel is not seen.
    let apart = |low: f64, high: f64| low > high - 0.1;
    !(apart(a.0, b.2) || apart(b.0, a.2) || apart(a.1, b.3) || apart(b.1, a.3))
}

/// The area of a line, which has none, is as wide as the line.
fn around(a: (f64, f64), b: (f64, f64)) -> Area {
    (a.0.min(b.0) - 0.5, a.1.min(b.1), a.0.max(b.0) + 0.5, a.1.max(b.1))
}

fn check(nodes: &[Node]) {
    let layout = layout(nodes);
    let area = |index: usize| {
        let (left, top) = layout.boxes[index];
        (left, top, left + WIDTH, top + HEIGHT)
    };
    let inside = (0.0, 0.0, layout.size.0, layout.size.1);
    let is_inside = |a: Area| a.0 >= inside.0 && a.1 >= inside.1 && a.2 <= inside.2 && a.3 <= inside.3;
    for index in 0..nodes.len() {
        assert!(is_inside(area(index)));
        assert!(
            (0..index).all(|other| !overlap(area(index), area(other))),
            "box {index}"
        );
    }
    let edges: usize = nodes.iter().map(|node| node.inputs.len()).sum();
    assert_eq!(layout.edges.len(), edges);
    for edge in &layout.edges {
        let (first, last) = (edge.points[0], edge.points[edge.points.len() - 1]);
        let (from, to) = (area(edge.producer), area(edge.consumer));
        assert!(first.1 == from.3 && (from.0..from.2).contains(&first.0));
        assert!(last.1 == to.1 && (to.0..to.2).contains(&last.0));
        for pair in edge.points.windows(2) {
            assert!(pair[0].1 <= pair[1].1, "an edge leads up");
            // A bent part has its control points in this area too, and so it is within.
            let part = around(pair[0], pair[1]);
            for other in (0..nodes.len()).filter(|other| ![edge.producer, edge.consumer].contains(other)) {
                assert!(
                    !overlap(part, area(other)),
                    "{} -> {} over {other}",
                    edge.producer,
                    edge.consumer
                );
            }
        }
    }
    let labels: Vec<Area> = layout
        .labels
        .iter()
        .map(|label| {
            (
                label.at.0,
                label.at.1 - LABEL_HEIGHT,
                label.at.0 + label.width(),
                label.at.1,
            )
        })
        .collect();
    for (number, label) in labels.iter().enumerate() {
        assert!(is_inside(*label));
        assert!(
            labels[..number].iter().all(|other| !overlap(*label, *other)),
            "label {number}"
        );
        assert!(
            (0..nodes.len()).all(|index| !overlap(*label, area(index))),
            "label {number}"
        );
    }
}

#[test]
fn a_long_edge_goes_round_the_boxes_between() {
    check(&[
        node("scan", &[]),
        node("clean", &[(0, None)]),
        node("dedup", &[(1, None)]),
        node("split", &[(2, None), (0, None)]),
        node("write", &[(3, Some("train")), (3, Some("val")), (0, None)]),
    ]);
    check(&[]);
    check(&[node("alone", &[])]);
}

#[test]
fn edges_that_read_one_port_have_one_label() {
    let nodes = [
        node("split", &[]),
        node("a", &[(0, Some("train"))]),
        node("b", &[(0, Some("train"))]),
        node("c", &[(0, Some("a_port_with_a_long_name")), (0, Some("val"))]),
    ];
    check(&nodes);
    let mut labels: Vec<String> = layout(&nodes).labels.into_iter().map(|label| label.text).collect();
    labels.sort();
    assert_eq!(labels, ["a_port_with_a_long_name", "train", "val"]);
}

#[test]
fn two_edges_that_need_not_cross_do_not() {
    let nodes = [
        node("a", &[]),
        node("b", &[]),
        node("of_b", &[(1, None)]),
        node("of_a", &[(0, None)]),
    ];
    let layout = layout(&nodes);
    let x = |index: usize| layout.boxes[index].0;
    assert_eq!(x(0) < x(1), x(3) < x(2));
}

proptest! {
    #[test]
    fn nothing_lies_over_anything_else_in_any_graph(
        reads in prop::collection::vec(prop::collection::vec((0usize..1000, 0usize..4), 0..4), 1..25),
    ) {
        let ports = [None, Some("train"), Some("val"), Some("members_of_all_tars")];
        let nodes: Vec<Node> = reads
            .iter()
            .enumerate()
            .map(|(index, inputs)| {
                let inputs: Vec<_> = if index == 0 {
                    Vec::new()
                } else {
                    inputs.iter().map(|(from, port)| (from % index, ports[*port])).collect()
                };
                node("n", &inputs)
            })
            .collect();
        check(&nodes);
    }
}
