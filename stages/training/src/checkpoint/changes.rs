//! Differences between the settings of a checkpoint and the present ones.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{CheckpointRecord, Identity};

/// What differs between the recorded settings and the present ones, one line each: `phase2_lr: 0.0001 in
/// the checkpoint, 0.0002 now`. A raised `max_steps` is no change, unless it moves the ends of the stages of a curriculum.
/// Data is compared only where both sides know it.
pub fn changes(record: &CheckpointRecord, settings: &BTreeMap<String, Value>, data: Option<&str>) -> Vec<String> {
    let names: BTreeSet<&String> = record.settings.keys().chain(settings.keys()).collect();
    let mut changes = Vec::new();
    // Recorded only with a curriculum whose stages divide `max_steps` among them.
    let moves = record
        .settings
        .get("curriculum_steps")
        .is_some_and(|steps| steps == &serde_json::json!([]));
    for name in names {
        let (before, now) = (
            record.settings.get(name).unwrap_or(&Value::Null),
            settings.get(name).unwrap_or(&Value::Null),
        );
        let raised = name == "max_steps" && !moves && now.as_u64() >= before.as_u64();
        if !raised && !same_value(before, now) {
            changes.push(format!("{name}: {before} in the checkpoint, {now} now"));
        }
    }
    if let (Some(before), Some(now)) = (&record.data, data)
        && before != now
    {
        changes.push("the train rows are others than those of the checkpoint".to_owned());
    }
    changes
}

/// What differs in identity, one line each.
pub fn identity_changes(before: &Identity, now: &Identity) -> Vec<String> {
    let mut changes = Vec::new();
    let mut compare = |name: &str, before: String, now: String| {
        if before != now {
            changes.push(format!("{name}: {before} in the checkpoint, {now} now"));
        }
    };
    match (&before.model, &now.model) {
        (Value::Object(a), Value::Object(b)) => {
            let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for name in names {
                let text = |map: &serde_json::Map<String, Value>| map.get(name).unwrap_or(&Value::Null).to_string();
                compare(&format!("model.{name}"), text(a), text(b));
            }
        }
        (a, b) => compare("model", a.to_string(), b.to_string()),
    }
    let tokenizer = |t: &Option<String>| {
        t.as_ref()
            .map_or("that of init".to_owned(), |digest| digest.chars().take(16).collect())
    };
    compare("tokenizer", tokenizer(&before.tokenizer), tokenizer(&now.tokenizer));
    compare("init", before.init.clone(), now.init.clone());
    compare("seed", before.seed.to_string(), now.seed.to_string());
    changes
}

/// 1 and 1.0 are the same setting, and so are numbers that differ in the last bit: a number read from JSON
/// may.
fn same_value(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => (a - b).abs() <= 1e-14 * a.abs().max(b.abs()),
        _ => a == b,
    }
}
