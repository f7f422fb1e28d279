//! A drawing of a run's stages, with their progress.

use maud::{Markup, html};

use flow_inspect::graph::Node;
use flow_inspect::graph::drawing::{fitted, path};
use flow_inspect::graph::layout::{HEIGHT, WIDTH, layout};

/// Most stages of a drawing.
const MAX_NODES: usize = 400;

/// The progress of a stage in the drawing.
pub struct State {
    /// Of the style sheet.
    pub class: &'static str,
    pub text: String,
}

/// The drawing. `state` says how far a stage came.
pub fn drawing(nodes: &[Node], state: impl Fn(&Node) -> State) -> Markup {
    if nodes.is_empty() || nodes.len() > MAX_NODES {
        return html! {};
    }
    let layout = layout(nodes);
    let (width, height) = layout.size;
    html! {
        div.scroll tabindex="0" {
            svg.dag viewBox={ "0 0 " (short(width)) " " (short(height)) } width=(short(width)) height=(short(height)) role="img" aria-label="The stages, with what each reads" {
                defs { marker #tip viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto" { path d="M0 0 8 4 0 8z" {} } }
                @for edge in &layout.edges {
                    path.edge d=(path(&edge.points)) marker-end="url(#tip)" {}
                }
                @for label in &layout.labels {
                    text.port x=(short(label.at.0)) y=(short(label.at.1)) { (label.text) }
                }
                @for (node, (left, top)) in nodes.iter().zip(&layout.boxes) {
                    @let state = state(node);
                    g class={ "stage " (state.class) } {
                        title { (node.name) " (" (node.kind) "): " (state.text) }
                        rect x=(short(*left)) y=(short(*top)) width=(WIDTH) height=(HEIGHT) rx="6" {}
                        text.name x=(short(left + WIDTH / 2.0)) y=(short(top + 19.0)) text-anchor="middle" { (fitted(&node.name)) }
                        text x=(short(left + WIDTH / 2.0)) y=(short(top + 34.0)) text-anchor="middle" { (fitted(&state.text)) }
                    }
                }
            }
        }
    }
}

fn short(number: f64) -> String {
    format!("{number:.1}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use flow_inspect::frozen::Frozen;

    #[test]
    fn the_frozen_pipeline_is_drawn() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("spec.yaml");
        let text = "flow: 1\nparams: {shards: /data, n: 3}\nstages:\n  m/scan: {uses: manifest.scan, with: {shards: /data}}\n  split: {uses: manifest.split, from: {rows: m/scan}}\n  write: {uses: manifest.write, from: {train: split.train, val: split.val}}\n";
        std::fs::write(&file, text).unwrap();
        let frozen = Frozen::read(&file);
        let names: Vec<&str> = frozen.nodes.iter().map(|node| node.name.as_str()).collect();
        assert_eq!(names, ["m/scan", "split", "write"]);
        assert_eq!(
            frozen.nodes[2].inputs,
            [(1, Some("train".into())), (1, Some("val".into()))]
        );
        assert_eq!((frozen.param("shards"), frozen.param("n")), (Some("/data"), Some("3")));
        assert_eq!(frozen.stages_of("manifest.split").collect::<Vec<_>>(), ["split"]);
        // The parameter `shards` is the setting of that name.
        let own = [("shards", "/data"), ("n", "3")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(frozen.settings_of("m/scan"), own);
        let drawn = drawing(&frozen.nodes, |_| State {
            class: "done",
            text: "<7> rows".into(),
        });
        let drawn = drawn.into_string();
        assert!(
            drawn.contains("&lt;7&gt; rows") && drawn.contains("stage done"),
            "{drawn}"
        );
        // Whatever is there.
        for damaged in ["", "[", "stages: [1]", "stages: {a: {from: 7}}", "params: x"] {
            std::fs::write(&file, damaged).unwrap();
            let _ = drawing(&Frozen::read(&file).nodes, |_| State {
                class: "",
                text: String::new(),
            });
        }
    }
}
