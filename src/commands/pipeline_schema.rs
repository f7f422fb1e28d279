//! The JSON schema of pipeline files, for editors: with the settings of every kind.

use flow_kind::registry::Registry;
use flow_kind::{InputCount, InputPort};
use serde_json::{Map, Value, json};

/// A reference to a parameter in place of a value.
const REFERENCE: &str = "#/$defs/reference";
/// A stage that an input reads, or several of which it reads one.
const FIRST_OF: &str = "#/$defs/first_of";

pub fn schema(registry: &Registry) -> Value {
    let mut definitions = Map::new();
    definitions.insert(
        "reference".into(),
        json!({"description": "The value of a parameter: `${name}`, or of the environment: `${env:NAME:-default}`.", "type": "string", "pattern": "\\$\\{"}),
    );
    definitions.insert(
        "name".into(),
        json!({"type": "string", "pattern": "^[A-Za-z][A-Za-z0-9_-]{0,63}$"}),
    );
    definitions.insert(
        "first_of".into(),
        json!({"anyOf": [
            {"type": "string"},
            {"description": "Of these the first that is not switched off.", "type": "array", "minItems": 1, "items": {"type": "string"}},
        ]}),
    );
    let mut by_kind = Vec::new();
    for kind in registry.kinds() {
        let (name, mut settings) = (kind.name(), kind.schema());
        if let Value::Object(map) = &mut settings {
            map.remove("$schema");
            for (inner, mut definition) in map
                .remove("$defs")
                .and_then(|defs| {
                    if let Value::Object(defs) = defs {
                        Some(defs)
                    } else {
                        None
                    }
                })
                .unwrap_or_default()
            {
                adapt(&mut definition, name);
                definitions.insert(format!("{name}.{inner}"), definition);
            }
        }
        adapt(&mut settings, name);
        if let Some(Value::Object(properties)) = settings.get_mut("properties") {
            let groups = "Groups of parameters, such as `${train}`: of these the stage takes the settings that it has and that are not given here.";
            properties.insert(
                "<<".into(),
                json!({"description": groups, "anyOf": [
                    {"$ref": REFERENCE},
                    {"type": "array", "items": {"$ref": REFERENCE}},
                ]}),
            );
        }
        definitions.insert(name.to_string(), settings);
        by_kind.push(json!({
            "if": {"properties": {"uses": {"const": name}}},
            "then": {"properties": {"with": {"$ref": format!("#/$defs/{name}")}, "from": from(kind.inputs())}},
        }));
    }
    let kinds: Vec<&str> = registry.kinds().map(|kind| kind.name()).collect();
    let mut stage = json!({
        "type": "object",
        "additionalProperties": false,
        "required": ["uses"],
        "properties": {
            "uses": {"description": "The stage's kind.", "enum": kinds},
            "when": when("The stage"),
            "from": {"description": "The stage's inputs: `stage`, `stage.port` or `group/stage.port`, or a map of the kind's inputs to these. In a map, a list of stages is read as the first of them that is not switched off."},
            "with": {"description": "The settings of the kind.", "type": ["object", "null"]},
            "max_rejects": {"description": "How many rejects of class `fault` the stage may give: `5%` of its rows, or a count.", "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]},
            "max_rejects_action": {"description": "What happens past the limit: the run fails, or continues and ends with exit code 4.", "enum": ["fail", "warn"]},
        },
    });
    if let (Some(stage), false) = (stage.as_object_mut(), by_kind.is_empty()) {
        stage.insert("allOf".into(), by_kind.into());
    }
    definitions.insert("stage".into(), stage);
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A pipeline of flow",
        "type": "object",
        "additionalProperties": false,
        "required": ["flow"],
        "properties": {
            "flow": {"description": "The version of this format.", "const": flow_spec::FORMAT},
            "description": {"type": "string"},
            "params": {"description": "Parameters: values, `{default, help}`, perhaps with `range: [0, 1]`, `{required: true, help}`, `{secret: true, help}`, or groups of these.", "type": "object"},
            "include": {
                "description": "Other pipelines as groups; their stages are `group/stage`.",
                "type": "object",
                "propertyNames": {"$ref": "#/$defs/name"},
                "additionalProperties": {
                    "type": "object",
                    "additionalProperties": false,
                    "required": ["pipeline"],
                    "properties": {
                        "when": when("The group"),
                        "pipeline": {"description": "The file, relative to this one.", "type": "string"},
                        "group": {"description": "false: its stages are stages of this pipeline, under their own names.", "type": "boolean"},
                        "from": connections("Its inputs: the stages that they are."),
                        "params": {"description": "Values for its parameters; the names of those that are passed on; or `inherit`: its parameters become parameters of this pipeline, where it has none of the same name, and are all passed on. `<<: inherit` beside values inherits the others.", "anyOf": [
                            {"const": "inherit"},
                            {"type": "object"},
                            {"type": "array", "items": {"type": "string"}},
                        ]},
                    },
                },
            },
            "inputs": {
                "description": "What a pipeline that includes this file gives to its stages, under these names.",
                "type": ["object", "null"],
                "propertyNames": {"$ref": "#/$defs/name"},
                "additionalProperties": {"anyOf": [
                    {"description": "What it is.", "type": ["string", "null"]},
                    {"type": "object", "additionalProperties": false, "properties": {"optional": {"type": "boolean"}, "help": {"type": "string"}}},
                ]},
            },
            "outputs": connections("What pipelines that include this file read as `GROUP/NAME`."),
            "stages": {"type": "object", "propertyNames": {"$ref": "#/$defs/name"}, "additionalProperties": {"$ref": "#/$defs/stage"}},
            "tests": {"description": "What `flow test` runs.", "type": ["object", "null"], "propertyNames": {"$ref": "#/$defs/name"}, "additionalProperties": test()},
        },
        "$defs": definitions,
    })
}

/// Names for stages.
fn connections(description: &str) -> Value {
    json!({
        "description": description,
        "type": ["object", "null"],
        "propertyNames": {"$ref": "#/$defs/name"},
        "additionalProperties": {"$ref": FIRST_OF},
    })
}

/// One entry of `tests`.
fn test() -> Value {
    let ports = |description: &str, value: Value| {
        json!({
            "description": description,
            "type": "object",
            "propertyNames": {"pattern": "^[A-Za-z][A-Za-z0-9_/-]*(\\.[A-Za-z][A-Za-z0-9_-]*)?$"},
            "additionalProperties": value,
        })
    };
    let rows = json!({"type": ["array", "null"], "items": {"type": "object"}});
    let given = json!({"description": "By partition.", "type": "object", "additionalProperties": rows});
    let expected = json!({
        "type": "object",
        "additionalProperties": false,
        "minProperties": 1,
        "properties": {
            "rows": {"description": "How many rows the port gives, or all of them; of each the columns that are named are compared.", "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "array", "items": {"type": "object"}},
            ]},
            "rejects": {"description": "How many rows the stage refuses, by reason; it gives no others.", "type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
        },
    });
    let mut expect = ports("What stages give, by `stage` or `stage.port`.", expected);
    expect["minProperties"] = 1.into();
    json!({
        "type": "object",
        "additionalProperties": false,
        "required": ["expect"],
        "properties": {
            "params": {"description": "Values of parameters, over the defaults.", "type": "object"},
            "rows": ports("Rows that stages give instead of running, by `stage` or `stage.port`. Columns left out are null or empty; `_row` counts from 0.", given),
            "expect": expect,
        },
    })
}

fn when(what: &str) -> Value {
    json!({
        "description": format!("{what} takes part where this holds: `${{manifest}} == ''`."),
        "type": ["string", "boolean"],
    })
}

/// The inputs of a kind, as `from` gives them.
fn from(ports: &[InputPort]) -> Value {
    let mut given: Map<String, Value> = Map::new();
    let many = ports.iter().find(|port| port.is_many());
    for port in ports.iter().filter(|port| !port.is_many()) {
        given.insert(port.name.into(), json!({"description": port.doc, "$ref": FIRST_OF}));
    }
    let required: Vec<&str> = ports
        .iter()
        .filter(|port| port.count == InputCount::One)
        .map(|port| port.name)
        .collect();
    let mut map = json!({"type": "object", "properties": given, "required": required, "additionalProperties": false});
    if let Some(many) = many {
        map["additionalProperties"] = json!({"description": many.doc, "$ref": FIRST_OF});
    }
    let mut forms = vec![map];
    let alone = match (ports, required.as_slice()) {
        ([], _) => return json!(false),
        ([_], _) | (_, [_]) => true,
        _ => many.is_some() && required.is_empty(),
    };
    if alone {
        forms.push(json!({"type": "string"}));
    }
    if many.is_some() && required.is_empty() {
        forms.push(json!({"type": "array", "items": {"type": "string"}}));
    }
    json!({"anyOf": forms})
}

/// Prefixes references to the kind's definitions, and allows a parameter reference in place of every value.
fn adapt(schema: &mut Value, kind: &str) {
    match schema {
        Value::Object(map) => {
            if let Some(Value::String(reference)) = map.get_mut("$ref")
                && let Some(inner) = reference.strip_prefix("#/$defs/")
            {
                *reference = format!("#/$defs/{kind}.{inner}");
            }
            for (key, inner) in map.iter_mut() {
                match key.as_str() {
                    "properties" => {
                        for property in inner.as_object_mut().into_iter().flat_map(Map::values_mut) {
                            adapt(property, kind);
                            or_reference(property);
                        }
                    }
                    "items" | "additionalProperties" if inner.is_object() => {
                        adapt(inner, kind);
                        or_reference(inner);
                    }
                    "default" | "examples" | "enum" | "const" => {}
                    _ => adapt(inner, kind),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| adapt(item, kind)),
        _ => {}
    }
}

/// `schema`, or a reference; the description stays outside, where editors look for it.
fn or_reference(schema: &mut Value) {
    let Value::Object(map) = schema else { return };
    if map.get("type").and_then(Value::as_str) == Some("string") && !map.contains_key("pattern") {
        return;
    }
    let mut outside = Map::new();
    for key in ["description", "default", "title"] {
        outside.extend(map.remove_entry(key));
    }
    let inside = std::mem::take(map);
    outside.insert("anyOf".into(), json!([inside, {"$ref": REFERENCE}]));
    *map = outside;
}
