//! A drawing of a run's stages, with their progress.

use std::path::Path;

use flow_runtime::Role;
use flow_runtime::spec::yaml::{self, Value};
use maud::{Markup, html};

use crate::commands::graph::Node;
use crate::commands::graph::drawing::{fitted, path};
use crate::commands::graph::layout::{HEIGHT, WIDTH, layout};

/// The largest frozen pipeline that is read.
const MAX_SPEC: u64 = 16 << 20;
/// Most stages of a drawing.
const MAX_NODES: usize = 400;

/// The progress of a stage in the drawing.
pub struct State {
    /// Of the style sheet.
    pub class: &'static str,
    pub text: String,
}

/// The pipeline of a run as it was frozen.
#[derive(Default)]
pub struct Frozen {
    pub nodes: Vec<Node>,
    /// Parameters and their values, as text.
    pub params: Vec<(String, String)>,
    /// Settings of stages, as `STAGE.SETTING`.
    pub settings: Vec<(String, String)>,
}

impl Frozen {
    /// Reads `spec.yaml` of a run; empty if it is not there or is none.
    pub fn read(file: &Path) -> Frozen {
        let is_small = file.metadata().is_ok_and(|metadata| metadata.len() <= MAX_SPEC);
        let text = if is_small {
            std::fs::read_to_string(file).ok()
        } else {
            None
        };
        let Some(spec) = text.and_then(|text| yaml::parse_text(&text).ok()) else {
            return Frozen::default();
        };
        let mut frozen = Frozen::default();
        for (name, value) in entries(&spec["params"]) {
            frozen.params.push((name, in_words(value)));
        }
        for (stage, written) in entries(&spec["stages"]) {
            for (name, value) in entries(&written["with"]) {
                frozen.settings.push((format!("{stage}.{name}"), in_words(value)));
            }
            let mut inputs = Vec::new();
            for (_, edge) in entries(&written["from"]) {
                let edge = edge.as_str().unwrap_or_default();
                let find = |name: &str| frozen.nodes.iter().position(|node| node.name == name);
                let port = edge
                    .rsplit_once('.')
                    .and_then(|(stage, port)| Some((find(stage)?, Some(port.to_owned()))));
                inputs.extend(find(edge).map(|producer| (producer, None)).or(port));
            }
            frozen.nodes.push(Node {
                name: stage,
                kind: written["uses"].as_str().unwrap_or_default().to_owned(),
                role: Role::Local,
                inputs,
                off: false,
            });
        }
        frozen
    }

    /// The value of a parameter.
    pub fn param(&self, name: &str) -> Option<&str> {
        let found = self.params.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The stages of a kind.
    pub fn stages_of(&self, kind: &str) -> impl Iterator<Item = &str> {
        let of_kind = self.nodes.iter().filter(move |node| node.kind == kind);
        of_kind.map(|node| node.name.as_str())
    }

    /// The settings of a stage, and the parameters of the pipeline that are not simply one of them.
    pub fn settings_of(&self, stage: &str) -> Vec<(String, String)> {
        let own = self.settings.iter().filter_map(|(name, value)| {
            let setting = name.strip_prefix(stage)?.strip_prefix('.')?;
            Some((setting.to_owned(), value.clone()))
        });
        let mut all: Vec<(String, String)> = own.collect();
        let count = all.len();
        for (name, value) in &self.params {
            let last = name.rsplit('.').next().unwrap_or(name);
            if !all[..count].iter().any(|(own, given)| own == last && given == value) {
                all.push((name.clone(), value.clone()));
            }
        }
        all
    }
}

fn entries(value: &Value) -> Vec<(String, &Value)> {
    let entries = value.as_mapping().into_iter().flatten();
    entries
        .filter_map(|(key, value)| Some((key.as_str()?.to_owned(), value)))
        .collect()
}

fn in_words(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => serde_json::to_string(other).unwrap_or_default(),
    }
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
