//! Why a partition runs again, as text: the first difference from earlier runs.

use serde_json::Value;

use super::earlier::EarlierStage;
use super::graph::{Graph, KeyInput};
use flow_store::{Record, Records};

/// The parts of a stage's recipe, for comparison.
pub struct Identity<'a> {
    pub kind: &'a str,
    pub version: u32,
    pub settings: &'a Value,
}

/// Why a recipe has no records, by comparison with the stage of this name in the last plan. None if the stage itself is
/// unchanged: then a stage that streams into it has changed.
pub fn recipe_changed(before: &EarlierStage, now: &Identity) -> Option<String> {
    if before.kind != now.kind {
        return Some(format!("kind changed {} -> {}", before.kind, now.kind));
    }
    if before.kind_version != now.version {
        return Some(format!(
            "version of kind {} changed {} -> {}",
            now.kind, before.kind_version, now.version
        ));
    }
    setting_changed("", &before.identity, now.settings)
}

/// The first setting that differs, with both values.
fn setting_changed(path: &str, before: &Value, now: &Value) -> Option<String> {
    if before == now {
        return None;
    }
    let below = |key: &str| {
        if path.is_empty() {
            key.to_string()
        } else {
            format!("{path}.{key}")
        }
    };
    match (before, now) {
        (Value::Object(old), Value::Object(new)) => {
            let mut keys: Vec<&String> = old.keys().chain(new.keys()).collect();
            keys.sort_unstable();
            keys.dedup();
            keys.into_iter().find_map(|key| {
                let (old, new) = (
                    old.get(key).unwrap_or(&Value::Null),
                    new.get(key).unwrap_or(&Value::Null),
                );
                setting_changed(&below(key), old, new)
            })
        }
        (Value::Array(old), Value::Array(new)) if old.len() == new.len() => old
            .iter()
            .zip(new)
            .enumerate()
            .find_map(|(at, (old, new))| setting_changed(&format!("{path}[{at}]"), old, new)),
        _ => {
            let name = if path.is_empty() {
                "settings".to_string()
            } else {
                format!("setting `{path}`")
            };
            Some(match (short(before), short(now)) {
                (Some(before), Some(now)) => format!("{name} changed {before} -> {now}"),
                _ => format!("{name} changed"),
            })
        }
    }
}

/// A value that fits into a line.
fn short(value: &Value) -> Option<String> {
    let text = match value {
        Value::Null => "(none)".to_string(),
        Value::String(text) if !text.contains('\n') => text.clone(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::Array(_) => value.to_string(),
        _ => return None,
    };
    (text.chars().count() <= 60).then_some(text)
}

/// Why a partition with records under this recipe must run anyway.
pub fn input_changed(
    graph: &Graph,
    key_inputs: &[KeyInput],
    before: &Record,
    now: &[Option<flow_base::digest::Digest>],
) -> String {
    let named = |node: usize, port: usize| {
        let node = &graph.nodes[node];
        match node.outputs.get(port) {
            Some(port) if node.outputs.len() > 1 => format!("{}.{}", node.name, port.name),
            _ => node.name.clone(),
        }
    };
    for (at, input) in key_inputs.iter().enumerate() {
        if before.inputs.get(at).copied() == now.get(at).copied().flatten() {
            continue;
        }
        return match *input {
            KeyInput::Source { .. } => "its source files changed".to_string(),
            KeyInput::Partition { node, port } => format!("its rows from `{}` changed", named(node, port)),
            KeyInput::Whole { node, port } => format!("input `{}` changed", named(node, port)),
            KeyInput::Decisions { node } => format!("what `{}` decided of it changed", graph.nodes[node].name),
        };
    }
    "its inputs changed".to_string()
}

/// Why a partition without any record under a recipe that has records runs.
pub fn no_record(records: &Records, partition: &flow_base::partition::Partition) -> String {
    match records.lost_of(partition) {
        Some(lost) => match lost.found {
            None => format!("its data is missing ({})", lost.file),
            Some(bytes) => format!("its data is damaged ({} has {bytes} bytes)", lost.file),
        },
        None => "new partition".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_setting_is_named_with_both_values() {
        let changed = |before, now| setting_changed("", &before, &now);
        assert_eq!(changed(json!({"a": 1}), json!({"a": 1})), None);
        assert_eq!(
            changed(json!({"min_quality": 0.5, "x": 1}), json!({"min_quality": 0.6, "x": 2})).unwrap(),
            "setting `min_quality` changed 0.5 -> 0.6"
        );
        assert_eq!(
            changed(
                json!({"rejects": [{"when": "a"}, {"when": "b"}]}),
                json!({"rejects": [{"when": "a"}, {"when": "c"}]})
            )
            .unwrap(),
            "setting `rejects[1].when` changed b -> c"
        );
        assert_eq!(
            changed(json!({}), json!({"new": true})).unwrap(),
            "setting `new` changed (none) -> true"
        );
        assert_eq!(
            changed(json!({"query": "a\nb"}), json!({"query": "a\nc"})).unwrap(),
            "setting `query` changed"
        );
    }
}
