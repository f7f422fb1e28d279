//! Positions of boxes, edges and labels of a drawing, by Sugiyama's method. Boxes are in layers, each below all that it
//! reads; an edge over several layers has a dummy item in each layer between; the order within a layer follows the mean
//! position of the neighbours (barycentres), and so do the positions, within that order.
//!
//! Our own, since the pages draw runs without anything from a network, and each box is a link with the state of its stage.

use super::Node;

pub const WIDTH: f64 = 190.0;
pub const HEIGHT: f64 = 44.0;
const GAP_X: f64 = 24.0;
/// Between layers, without labels.
const GAP_Y: f64 = 40.0;
const MARGIN: f64 = 16.0;
/// Width of an edge where it passes a layer.
const PASSING: f64 = 8.0;
pub const LABEL_HEIGHT: f64 = 13.0;
/// Of a letter of a label.
const LETTER: f64 = 6.0;
const SWEEPS: usize = 12;

pub struct Layout {
    /// The upper left corner of each node's box.
    pub boxes: Vec<(f64, f64)>,
    pub edges: Vec<Edge>,
    pub labels: Vec<Label>,
    pub size: (f64, f64),
}

pub struct Edge {
    pub producer: usize,
    pub consumer: usize,
    /// From the producer down: straight from the first to the second, bent from there to the third, in turn.
    pub points: Vec<(f64, f64)>,
}

/// The name of a port, where its edges begin.
pub struct Label {
    pub text: String,
    /// Left end of its base line.
    pub at: (f64, f64),
}

impl Label {
    pub fn width(&self) -> f64 {
        self.text.chars().count() as f64 * LETTER
    }
}

/// A box, or an edge that passes a layer.
struct Item {
    layer: usize,
    half: f64,
    centre: f64,
    above: Vec<usize>,
    below: Vec<usize>,
}

/// `nodes` are sorted producers first.
pub fn layout(nodes: &[Node]) -> Layout {
    let rows = rows(nodes);
    let item = |layer, half| Item {
        layer,
        half,
        centre: 0.0,
        above: Vec::new(),
        below: Vec::new(),
    };
    let mut items: Vec<Item> = rows.iter().map(|row| item(*row, WIDTH / 2.0)).collect();
    // The items that an edge goes through, its ends among them.
    let mut chains: Vec<(usize, &Option<String>, Vec<usize>)> = Vec::new();
    for (consumer, node) in nodes.iter().enumerate() {
        for (producer, port) in &node.inputs {
            let mut chain = vec![*producer];
            for layer in rows[*producer] + 1..rows[consumer] {
                chain.push(items.len());
                items.push(item(layer, PASSING / 2.0));
            }
            chain.push(consumer);
            for pair in chain.windows(2) {
                items[pair[0]].below.push(pair[1]);
                items[pair[1]].above.push(pair[0]);
            }
            chains.push((consumer, port, chain));
        }
    }
    let mut layers: Vec<Vec<usize>> = vec![Vec::new(); rows.iter().max().map_or(0, |last| last + 1)];
    for (index, item) in items.iter().enumerate() {
        layers[item.layer].push(index);
    }
    order(&mut layers, &items);
    place(&layers, &mut items);
    let left = items
        .iter()
        .map(|item| item.centre - item.half)
        .fold(f64::INFINITY, f64::min);
    items.iter_mut().for_each(|item| item.centre += MARGIN - left);

    // Ports of edges on boxes: side by side, in the order of their other ends.
    let slot = |node: usize, number: usize, of: usize| {
        items[node].centre - WIDTH / 2.0 + WIDTH * (number + 1) as f64 / (of + 1) as f64
    };
    let by_centre = |a: &usize, b: &usize| items[*a].centre.total_cmp(&items[*b].centre);
    let mut leave: Vec<Vec<(&Option<String>, usize)>> = vec![Vec::new(); nodes.len()];
    let mut enter: Vec<Vec<(usize, usize)>> = vec![Vec::new(); nodes.len()];
    for (edge, (consumer, port, chain)) in chains.iter().enumerate() {
        // Edges that read the same port leave together.
        if !leave[chain[0]].iter().any(|(other, _)| other == port) {
            leave[chain[0]].push((*port, chain[1]));
        }
        enter[*consumer].push((chain[chain.len() - 2], edge));
    }
    leave
        .iter_mut()
        .for_each(|ports| ports.sort_by(|a, b| by_centre(&a.1, &b.1)));
    enter
        .iter_mut()
        .for_each(|edges| edges.sort_by(|a, b| by_centre(&a.0, &b.0)));

    // Labels of a layer are placed in lanes below it without overlaps.
    let mut labels: Vec<(usize, usize, Label)> = Vec::new();
    let mut lanes: Vec<Vec<f64>> = vec![Vec::new(); layers.len()];
    for (node, ports) in leave.iter().enumerate() {
        for (number, (port, _)) in ports.iter().enumerate() {
            let Some(port) = port else { continue };
            let at = (slot(node, number, ports.len()) + 4.0, 0.0);
            labels.push((rows[node], 0, Label { text: port.clone(), at }));
        }
    }
    labels.sort_by(|(_, _, a), (_, _, b)| a.at.0.total_cmp(&b.at.0));
    for (layer, lane, label) in &mut labels {
        let ends = &mut lanes[*layer];
        *lane = ends.iter().position(|end| *end <= label.at.0).unwrap_or(ends.len());
        let end = label.at.0 + label.width() + LETTER;
        match ends.get_mut(*lane) {
            Some(standing) => *standing = end,
            None => ends.push(end),
        }
    }
    let mut tops = vec![MARGIN];
    for lanes in &lanes {
        let top = tops.last().copied().unwrap_or(MARGIN);
        tops.push(top + HEIGHT + lanes.len() as f64 * LABEL_HEIGHT + GAP_Y);
    }
    let labels: Vec<Label> = labels
        .into_iter()
        .map(|(layer, lane, label)| Label {
            at: (label.at.0, tops[layer] + HEIGHT + (lane + 1) as f64 * LABEL_HEIGHT),
            ..label
        })
        .collect();
    let edges = chains.iter().enumerate().map(|(edge, (consumer, port, chain))| {
        let producer = chain[0];
        let mut points = Vec::new();
        for (step, pair) in chain.windows(2).enumerate() {
            let layer = items[pair[0]].layer;
            let ports = &leave[producer];
            let number = ports.iter().position(|(other, _)| other == port).unwrap_or(0);
            let x = if step == 0 {
                slot(producer, number, ports.len())
            } else {
                items[pair[0]].centre
            };
            let top = if step == 0 { tops[layer] + HEIGHT } else { tops[layer] };
            points.push((x, top));
            points.push((x, tops[layer + 1] - GAP_Y));
        }
        let entries = &enter[*consumer];
        let number = entries.iter().position(|(_, other)| *other == edge).unwrap_or(0);
        points.push((slot(*consumer, number, entries.len()), tops[rows[*consumer]]));
        Edge {
            producer,
            consumer: *consumer,
            points,
        }
    });
    let edges: Vec<Edge> = edges.collect();
    let boxes: Vec<(f64, f64)> = (0..nodes.len())
        .map(|node| (items[node].centre - WIDTH / 2.0, tops[rows[node]]))
        .collect();
    let right = items
        .iter()
        .map(|item| item.centre + item.half)
        .chain(labels.iter().map(|label| label.at.0 + label.width()));
    let width = right.fold(0.0, f64::max) + MARGIN;
    let height = (tops.last().copied().unwrap_or(MARGIN) - GAP_Y + MARGIN).max(MARGIN);
    Layout {
        boxes,
        edges,
        labels,
        size: (width, height),
    }
}

/// The layer of each node: below its lowest producer; one without producers just above the first that reads it.
fn rows(nodes: &[Node]) -> Vec<usize> {
    let mut rows: Vec<usize> = Vec::new();
    for node in nodes {
        let above = node.inputs.iter().map(|(producer, _)| rows[*producer] + 1);
        rows.push(above.max().unwrap_or(0));
    }
    let mut first = vec![usize::MAX; nodes.len()];
    for (node, row) in nodes.iter().zip(&rows) {
        for (producer, _) in &node.inputs {
            first[*producer] = first[*producer].min(*row);
        }
    }
    for (index, node) in nodes.iter().enumerate() {
        if node.inputs.is_empty() && first[index] != usize::MAX {
            rows[index] = first[index] - 1;
        }
    }
    rows
}

/// Orders the items of each layer; of all orders that were tried, the one with the fewest crossings is kept.
fn order(layers: &mut Vec<Vec<usize>>, items: &[Item]) {
    let mut best = (crossings(layers, items), layers.clone());
    let count = layers.len();
    for sweep in 0..SWEEPS {
        let down = sweep % 2 == 0;
        let mut places = positions(layers, items.len());
        for step in 0..count {
            let layer = &mut layers[if down { step } else { count - 1 - step }];
            let mean = |index: &usize| {
                let neighbours = if down {
                    &items[*index].above
                } else {
                    &items[*index].below
                };
                match neighbours.len() {
                    0 => places[*index],
                    number => neighbours.iter().map(|other| places[*other]).sum::<f64>() / number as f64,
                }
            };
            let mut keyed: Vec<(f64, usize)> = layer.iter().map(|index| (mean(index), *index)).collect();
            keyed.sort_by(|a, b| a.0.total_cmp(&b.0));
            *layer = keyed.into_iter().map(|(_, index)| index).collect();
            for (place, index) in layer.iter().enumerate() {
                places[*index] = place as f64;
            }
        }
        let found = crossings(layers, items);
        if found < best.0 {
            best = (found, layers.clone());
        }
    }
    *layers = best.1;
}

fn positions(layers: &[Vec<usize>], items: usize) -> Vec<f64> {
    let mut places = vec![0.0; items];
    for layer in layers {
        for (place, index) in layer.iter().enumerate() {
            places[*index] = place as f64;
        }
    }
    places
}

fn crossings(layers: &[Vec<usize>], items: &[Item]) -> usize {
    let places = positions(layers, items.len());
    let mut count = 0;
    for layer in layers {
        let edges = layer
            .iter()
            .flat_map(|from| items[*from].below.iter().map(|to| (places[*from], places[*to])));
        let edges: Vec<(f64, f64)> = edges.collect();
        for (number, a) in edges.iter().enumerate() {
            count += edges[..number]
                .iter()
                .filter(|b| (a.0 - b.0) * (a.1 - b.1) < 0.0)
                .count();
        }
    }
    count
}

/// Moves the items of each layer towards the middle of their neighbours, without changing their order.
fn place(layers: &[Vec<usize>], items: &mut [Item]) {
    for sweep in 0..SWEEPS {
        let down = sweep % 2 == 1;
        for step in 0..layers.len() {
            let layer = &layers[if down { step } else { layers.len() - 1 - step }];
            let wished = layer.iter().map(|index| {
                let item = &items[*index];
                let neighbours = if down { &item.above } else { &item.below };
                match neighbours.len() {
                    0 => item.centre,
                    count => neighbours.iter().map(|other| items[*other].centre).sum::<f64>() / count as f64,
                }
            });
            let wished: Vec<f64> = wished.collect();
            let halves: Vec<f64> = layer.iter().map(|index| items[*index].half).collect();
            for (index, centre) in layer.iter().zip(apart(&wished, &halves)) {
                items[*index].centre = centre;
            }
        }
    }
}

/// The centres nearest to the wished ones (by the sum of squares) that keep their order and a gap: isotonic regression by
/// pooling adjacent violators.
fn apart(wished: &[f64], halves: &[f64]) -> Vec<f64> {
    let mut offsets = vec![0.0];
    for pair in halves.windows(2) {
        offsets.push(offsets[offsets.len() - 1] + pair[0] + GAP_X + pair[1]);
    }
    // Sum and number of each pool.
    let mut pools: Vec<(f64, usize)> = Vec::new();
    for (wished, offset) in wished.iter().zip(&offsets) {
        let mut pool = (wished - offset, 1);
        while let Some((sum, count)) = pools.pop() {
            if sum / count as f64 <= pool.0 / pool.1 as f64 {
                pools.push((sum, count));
                break;
            }
            pool = (pool.0 + sum, pool.1 + count);
        }
        pools.push(pool);
    }
    let means = pools
        .into_iter()
        .flat_map(|(sum, count)| std::iter::repeat_n(sum / count as f64, count));
    means.zip(offsets).map(|(mean, offset)| mean + offset).collect()
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
