//! A stage's own figures on one line.

use serde_json::Value;

/// The figures of a stage as one line: its own `line` where it gives one, else `step 120, loss 2.314`: the
/// entries of the object; nested ones as `a.b`.
pub fn on_one_line(figures: &Value) -> String {
    let own = ["/notice", "/line", "/table/title"];
    if let Some(text) = own.iter().find_map(|own| figures.pointer(own)?.as_str()) {
        return text.to_string();
    }
    let mut parts = Vec::new();
    collect(figures, "", &mut parts);
    parts.join(", ")
}

/// Whether figures are a notice, which is always shown, and not a state that the next figures replace.
pub fn is_notice(figures: &Value) -> bool {
    figures.get("notice").is_some()
}

/// The progress of a log stage from its figures: steps done, and total.
pub fn steps(figures: &Value) -> Option<(u64, u64)> {
    let number = |name: &str| figures.get(name)?.as_u64();
    Some((number("step")?, number("max_steps")?))
}

/// Figures of the form `{"table": {"title", "columns", "rows"}}` as text, for standard output.
pub fn table(figures: &Value) -> Option<String> {
    let table = figures.get("table")?;
    let cells = |row: &Value| -> Vec<String> {
        let cell = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
        row.as_array()
            .map(|row| row.iter().map(cell).collect())
            .unwrap_or_default()
    };
    let mut rows = vec![cells(table.get("columns")?)];
    rows.extend(table.get("rows")?.as_array()?.iter().map(cells));
    let mut text = String::new();
    if let Some(title) = table.get("title").and_then(Value::as_str) {
        text.push_str(&format!("\n{}\n", flow_base::escape::escape_line(title)));
    }
    text.push_str(&crate::table::lines(&rows).join("\n"));
    Some(text)
}

fn collect(value: &Value, name: &str, parts: &mut Vec<String>) {
    match value {
        Value::Object(entries) => {
            for (key, inner) in entries {
                let below = if name.is_empty() {
                    key.clone()
                } else {
                    format!("{name}.{key}")
                };
                collect(inner, &below, parts);
            }
        }
        Value::Null => {}
        // Lists are only in the log.
        Value::Array(items) => parts.push(format!("{name} [{}]", items.len())),
        Value::Number(number) if number.is_f64() => parts.push(
            format!("{name} {}", short(number.as_f64().unwrap_or(f64::NAN)))
                .trim_start()
                .to_string(),
        ),
        Value::String(text) => parts.push(format!("{name} {text}").trim_start().to_string()),
        other => parts.push(format!("{name} {other}").trim_start().to_string()),
    }
}

/// Four significant digits.
fn short(number: f64) -> String {
    let size = number.abs();
    if size != 0.0 && !(1e-3..1e6).contains(&size) {
        return format!("{number:.3e}");
    }
    let decimals = if size >= 1000.0 {
        0
    } else if size >= 100.0 {
        1
    } else if size >= 10.0 {
        2
    } else {
        4
    };
    format!("{number:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn figures_fit_a_line() {
        let figures = json!({"step": 120, "loss": 2.31412, "lr": 3e-7, "memory": {"peak_gib": 12.345}, "note": "warm", "none": null, "ids": [1, 2]});
        let mut parts: Vec<String> = on_one_line(&figures).split(", ").map(String::from).collect();
        parts.sort();
        assert_eq!(
            parts,
            [
                "ids [2]",
                "loss 2.3141",
                "lr 3.000e-7",
                "memory.peak_gib 12.35",
                "note warm",
                "step 120"
            ]
        );
        assert_eq!(on_one_line(&json!(3)), "3");
        assert_eq!(on_one_line(&json!({"step": 1, "line": "step 1 of 2"})), "step 1 of 2");
    }

    #[test]
    fn steps_are_read_where_there_are_some() {
        assert_eq!(
            steps(&json!({"step": 22, "max_steps": 40, "loss": 1.5})),
            Some((22, 40))
        );
        assert_eq!(steps(&json!({"step": 22, "validation_wer": 0.5})), None);
        assert_eq!(steps(&json!({"line": "step 22 of 40"})), None);
    }

    #[test]
    fn a_table_is_laid_out() {
        let figures = json!({"table": {"title": "Rates", "columns": ["lang", "WER"], "rows": [["hi", "12.5 %"], ["en", "8.0 %"]]}});
        assert_eq!(
            table(&figures).as_deref(),
            Some("\nRates\nlang     WER\nhi    12.5 %\nen     8.0 %")
        );
        assert_eq!(table(&json!({"step": 3})), None);
    }
}
