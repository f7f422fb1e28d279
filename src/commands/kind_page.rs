//! The reference page of a stage kind, made from its settings' doc comments and types.

use std::fmt::Write;

use flow_kind::registry::AnyKind;
use flow_kind::{ColumnType, InputCount, InputPort, OutputPort, Reads};
use serde_json::{Map, Value};

/// The page as Markdown.
pub fn page(kind: &dyn AnyKind) -> String {
    let schema = kind.schema();
    let mut page = format!(
        "# {}\n\n<!-- Made by `flow kinds --docs`; change the doc comments in the code instead. -->\n\n",
        kind.name()
    );
    let docs = kind.docs();
    if !docs.is_empty() {
        let _ = write!(page, "{}\n\n", lower_headings(docs.trim()));
    }
    inputs(&mut page, kind.inputs());
    outputs(&mut page, kind.outputs());
    page.push_str("## Settings\n\n");
    let empty = Map::new();
    let definitions = schema.get("$defs").and_then(Value::as_object).unwrap_or(&empty);
    settings(&mut page, &schema);
    for (name, definition) in definitions {
        let _ = write!(page, "### {name}\n\n");
        if let Some(text) = definition.get("description").and_then(Value::as_str) {
            let _ = write!(page, "{}\n\n", text.trim());
        }
        match definition.get("properties") {
            Some(_) => settings(&mut page, definition),
            None => choices(&mut page, definition),
        }
    }
    let _ = writeln!(page, "Version {} of the kind.", kind.version());
    page
}

fn inputs(page: &mut String, ports: &[InputPort]) {
    page.push_str("## Inputs\n\n");
    if ports.is_empty() {
        page.push_str("None.\n\n");
        return;
    }
    page.push_str("| input | given | read | columns | |\n|---|---|---|---|---|\n");
    for port in ports {
        let given = match port.count {
            InputCount::One => "once",
            InputCount::Optional => "at most once",
            InputCount::Many => "once or more, under names of your own",
        };
        let read = match port.reads {
            Reads::Streamed => "by partition",
            Reads::Whole => "whole",
        };
        let column = |(name, of): &(&str, ColumnType)| match of {
            ColumnType::Any => format!("`{name}`"),
            of => format!("`{name}` ({})", of.name()),
        };
        let columns: Vec<String> = port.columns.iter().map(column).collect();
        let _ = writeln!(
            page,
            "| `{}` | {given} | {read} | {} | {} |",
            port.name,
            columns.join(", "),
            cell(port.doc)
        );
    }
    page.push('\n');
}

fn outputs(page: &mut String, ports: &[OutputPort]) {
    page.push_str("## Outputs\n\n");
    if ports.is_empty() {
        page.push_str("None.\n\n");
        return;
    }
    page.push_str("| output | |\n|---|---|\n");
    for port in ports {
        let _ = writeln!(page, "| `{}` | {} |", port.name, cell(port.doc));
    }
    page.push('\n');
}

/// A heading in a doc comment (`# What it does`) is one level below the page's.
fn lower_headings(text: &str) -> String {
    let mut in_code = false;
    let lines = text.lines().map(|line| {
        in_code ^= line.trim_start().starts_with("```");
        if !in_code && line.starts_with("# ") {
            format!("#{line}")
        } else {
            line.to_string()
        }
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn settings(page: &mut String, schema: &Value) {
    let Some(properties) = schema
        .get("properties")
        .and_then(Value::as_object)
        .filter(|properties| !properties.is_empty())
    else {
        page.push_str("None.\n\n");
        return;
    };
    let required: Vec<&str> = schema
        .get("required")
        .and_then(Value::as_array)
        .map(|names| names.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    page.push_str("| setting | type | default | |\n|---|---|---|---|\n");
    for (name, property) in properties {
        let default = match property.get("default") {
            _ if required.contains(&name.as_str()) => "required".to_string(),
            Some(Value::Null) | None => String::new(),
            Some(default) => format!("`{default}`"),
        };
        let text = property.get("description").and_then(Value::as_str).unwrap_or_default();
        let _ = writeln!(
            page,
            "| `{name}` | {} | {} | {} |",
            type_of(property),
            cell(&default),
            cell(text)
        );
    }
    page.push('\n');
}

/// The values of an enumeration, with what each means.
fn choices(page: &mut String, schema: &Value) {
    let values: Vec<(String, String)> = match (
        schema.get("enum").and_then(Value::as_array),
        schema.get("oneOf").and_then(Value::as_array),
    ) {
        (Some(values), _) => values.iter().map(|value| (value.to_string(), String::new())).collect(),
        (None, Some(variants)) => variants
            .iter()
            .map(|variant| {
                (
                    variant_name(variant).unwrap_or_else(|| type_of(variant)),
                    variant
                        .get("description")
                        .and_then(Value::as_str)
                        .unwrap_or_default()
                        .to_string(),
                )
            })
            .collect(),
        (None, None) => vec![(type_of(schema), String::new())],
    };
    for (value, meaning) in values {
        let value = value.trim_matches(['"', '`']);
        let _ = if meaning.is_empty() {
            writeln!(page, "- `{value}`")
        } else {
            writeln!(
                page,
                "- `{value}`: {}",
                meaning.split_whitespace().collect::<Vec<_>>().join(" ")
            )
        };
    }
    page.push('\n');
}

/// The key of an enum's variant that is a map of one key, whose settings have a section of their own.
fn variant_name(variant: &Value) -> Option<String> {
    let [key] = variant.get("required")?.as_array()?.as_slice() else {
        return None;
    };
    Some(key.as_str()?.to_owned())
}

/// The name of a type for readers.
fn type_of(schema: &Value) -> String {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        return reference.rsplit('/').next().unwrap_or(reference).to_string();
    }
    if let Some(value) = schema.get("const") {
        return format!("`{value}`");
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        return values
            .iter()
            .map(|value| format!("`{}`", value.as_str().map_or_else(|| value.to_string(), str::to_string)))
            .collect::<Vec<_>>()
            .join(", ");
    }
    for key in ["anyOf", "oneOf", "allOf"] {
        if let Some(options) = schema.get(key).and_then(Value::as_array) {
            let options: Vec<String> = options
                .iter()
                .filter(|option| option.get("type").and_then(Value::as_str) != Some("null"))
                .map(type_of)
                .collect();
            return options.join(" or ");
        }
    }
    match schema.get("type") {
        Some(Value::String(name)) => named_type(name, schema),
        // `["integer", "null"]`: may be left out.
        Some(Value::Array(names)) => names
            .iter()
            .filter_map(Value::as_str)
            .filter(|name| *name != "null")
            .map(|name| named_type(name, schema))
            .collect::<Vec<_>>()
            .join(" or "),
        _ => "anything".to_string(),
    }
}

fn named_type(name: &str, schema: &Value) -> String {
    match name {
        "string" => "text".to_string(),
        "integer" => "whole number".to_string(),
        "number" => "number".to_string(),
        "boolean" => "true or false".to_string(),
        "array" => format!(
            "list of {}",
            schema.get("items").map_or_else(|| "anything".to_string(), type_of)
        ),
        "object" => match schema.get("additionalProperties") {
            Some(values @ Value::Object(_)) => format!("map to {}", type_of(values)),
            _ => "map".to_string(),
        },
        other => other.to_string(),
    }
}

/// Text in a cell of a Markdown table: on one line, without bare bars.
fn cell(text: &str) -> String {
    text.split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use flow_kind::Storage;
    use flow_kind::registry::AnySettings;
    use flow_spec::yaml::{TypedError, Value as Yaml};
    use serde_json::json;

    use super::*;

    struct Made;

    impl AnyKind for Made {
        fn name(&self) -> &'static str {
            "toy.made"
        }
        fn version(&self) -> u32 {
            3
        }
        fn sql_settings(&self) -> &'static [&'static str] {
            &[]
        }
        fn inputs(&self) -> &'static [InputPort] {
            const INPUTS: &[InputPort] = &[
                InputPort::streamed("rows", "What is changed.")
                    .columns(&[("text", ColumnType::Text), ("id", ColumnType::Any)]),
                InputPort::whole("tables", "What is looked up.").count(InputCount::Many),
            ];
            INPUTS
        }
        fn outputs(&self) -> &'static [OutputPort] {
            const OUTPUTS: &[OutputPort] = &[OutputPort::new("rows", "What was `a|b`.")];
            OUTPUTS
        }
        fn schema(&self) -> Value {
            json!({
                "description": "Makes rows.\n\n# Example\n\n```yaml\n# not a heading\nuses: toy.made\n```",
                "type": "object",
                "required": ["shards"],
                "properties": {
                    "shards": {"type": "string", "description": "Folder of `a|b`."},
                    "rows": {"type": ["integer", "null"], "default": null, "description": "How many."},
                    "mode": {"$ref": "#/$defs/Mode", "default": "fast", "description": "How."},
                    "names": {"type": "array", "items": {"type": "string"}, "default": [], "description": "Which."},
                },
                "$defs": {"Mode": {"oneOf": [{"const": "fast", "type": "string", "description": "In a hurry."}, {"const": "slow", "type": "string"}]}},
            })
        }
        fn docs(&self) -> String {
            self.schema()["description"].as_str().unwrap_or_default().to_string()
        }
        fn parse(&self, _: &Yaml, _: &Storage) -> Result<Arc<dyn AnySettings>, TypedError> {
            unreachable!("a page is made without settings")
        }
    }

    #[test]
    fn a_page_lists_all_settings() {
        insta::assert_snapshot!(page(&Made));
    }
}
