//! What the screen shows of a plan: both ways of balancing side by side.

use serde_json::{Value, json};

use crate::figures::PlanFigures;

fn percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

/// Two tables: batches and padding, and the share of time of each language. `plans` are names and figures of the same
/// rows; the chosen one comes first.
pub fn tables(epoch: u32, plans: &[(&str, &PlanFigures)]) -> Vec<Value> {
    let Some((_, any)) = plans.first() else {
        return Vec::new();
    };
    let batches: Vec<Value> = plans
        .iter()
        .enumerate()
        .map(|(place, (name, plan))| {
            json!([
                if place == 0 {
                    format!("{name} (chosen)")
                } else {
                    (*name).to_string()
                },
                plan.batches,
                plan.batches_per_rank,
                plan.rows_in_batches,
                format!("{:.1}", plan.rows_per_batch),
                format!("{:.2}", plan.seconds_per_batch),
                format!("{:.2}", plan.longest_batch_seconds),
                percent(plan.padding_waste),
                plan.text_padding_waste.map_or("-".into(), percent),
            ])
        })
        .collect();
    let columns = [
        "balance",
        "batches",
        "per rank",
        "rows",
        "rows/batch",
        "s/batch",
        "longest s",
        "audio padding",
        "text padding",
    ];
    let batches = json!({"table": {"title": format!("Batches of epoch {epoch}"), "columns": columns, "rows": batches}});

    let mut columns: Vec<String> = ["language", "rows", "minutes", "manifest"].map(String::from).into();
    columns.extend(plans.iter().map(|(name, _)| (*name).to_string()));
    let shares: Vec<Value> = any
        .languages
        .iter()
        .enumerate()
        .map(|(place, language)| {
            let mut row = vec![
                json!(language.language),
                json!(language.rows),
                json!(format!("{:.1}", language.seconds / 60.0)),
                json!(percent(language.share)),
            ];
            // Plans of the same rows list the same languages.
            let emitted = plans.iter().filter_map(|(_, plan)| plan.languages.get(place));
            row.extend(emitted.map(|language| json!(percent(language.share_in_batches))));
            Value::Array(row)
        })
        .collect();
    let title = format!("Share of time by language: in the manifest, and in the batches of epoch {epoch}");
    vec![
        batches,
        json!({"table": {"title": title, "columns": columns, "rows": shares}}),
    ]
}
