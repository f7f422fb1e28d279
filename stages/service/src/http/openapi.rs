//! The description of the API in the form of OpenAPI 3.1, made of the tables that the router and the parser of forms use.

use serde_json::{Map, Value, json};

use super::alignments;
use super::endpoints::{Action, ENDPOINTS, Endpoint};
use super::form::{FIELDS, Field, FieldType};
use crate::options::MAX_SPEAKERS;

/// The document.
pub fn document(version: &str) -> Value {
    let paths = ENDPOINTS.iter().map(|endpoint| {
        let methods = endpoint.action.methods().iter();
        let operations = methods.map(|method| ((*method).to_owned(), operation(endpoint, method)));
        (endpoint.path.to_owned(), operations.collect::<Value>())
    });
    json!({
        "openapi": "3.1.0",
        "info": {"title": "flow", "version": version},
        "paths": paths.collect::<Map<String, Value>>(),
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": error_schema()},
        },
    })
}

fn operation(endpoint: &Endpoint, method: &str) -> Value {
    let mut operation = json!({
        "summary": endpoint.doc,
        "responses": {
            "200": {"description": "Done"},
            "default": {
                "description": "Refused or failed",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    });
    if endpoint.needs_key {
        // Where the server has no keys, none is needed.
        operation["security"] = json!([{}, {"key": []}]);
    }
    if endpoint.path.contains("{id}") {
        operation["parameters"] = json!([{"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}]);
    }
    let fields = match endpoint.action {
        Action::Transcribe | Action::Diarize | Action::Jobs => FIELDS,
        Action::Align => alignments::FIELDS,
        _ => &[],
    };
    if !fields.is_empty() && method == "post" {
        let properties: Map<String, Value> = fields
            .iter()
            .map(|field| (field.name.to_owned(), property(field)))
            .collect();
        operation["requestBody"] = json!({
            "required": true,
            "content": {"multipart/form-data": {"schema": {
                "type": "object",
                "properties": properties,
                "required": ["file"],
            }}},
        });
    }
    operation
}

fn property(field: &Field) -> Value {
    let mut schema = match field.kind {
        FieldType::File => json!({"type": "string", "format": "binary"}),
        FieldType::String => json!({"type": "string"}),
        FieldType::Number => json!({"type": "number", "minimum": 0, "maximum": 1}),
        FieldType::Weight => json!({"type": "number", "minimum": 0, "maximum": 100}),
        FieldType::Boolean => json!({"type": "boolean"}),
        FieldType::Choice(names) => json!({"type": "string", "enum": names}),
        FieldType::Choices(names) => json!({"type": "array", "items": {"type": "string", "enum": names}}),
        FieldType::Count => json!({"type": "integer", "minimum": 1, "maximum": MAX_SPEAKERS}),
        FieldType::Strings => json!({"type": "array", "items": {"type": "string"}}),
        FieldType::Object(names) => json!({"anyOf": [{"type": "string", "enum": names}, {"type": "object"}]}),
    };
    schema["description"] = json!(field.doc);
    schema
}

fn error_schema() -> Value {
    let nullable = json!({"type": ["string", "null"]});
    json!({
        "type": "object",
        "required": ["error"],
        "properties": {"error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": nullable, "code": nullable},
        }},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_paths_and_fields_are_described() {
        let document = document("1.2.3");
        let mut paths: Vec<&String> = document["paths"].as_object().unwrap().keys().collect();
        paths.sort();
        assert_eq!(
            paths,
            [
                "/health",
                "/metrics",
                "/openapi.json",
                "/ready",
                "/v1/audio/alignments",
                "/v1/audio/diarization",
                "/v1/audio/diarizations",
                "/v1/audio/transcriptions",
                "/v1/audio/translations",
                "/v1/health/live",
                "/v1/health/ready",
                "/v1/jobs",
                "/v1/jobs/{id}",
                "/v1/jobs/{id}/result",
                "/v1/metrics",
                "/v1/models",
                "/v1/models/{id}",
                "/version",
            ]
        );
        let transcriptions = &document["paths"]["/v1/audio/transcriptions"]["post"];
        let schema = &transcriptions["requestBody"]["content"]["multipart/form-data"]["schema"];
        assert_eq!(schema["properties"].as_object().unwrap().len(), FIELDS.len());
        assert_eq!(schema["properties"]["response_format"]["enum"][3], "verbose_json");
        assert!(document["paths"]["/v1/jobs"]["post"].get("requestBody").is_some());
        assert!(document["paths"]["/v1/jobs"]["get"].get("requestBody").is_none());
        assert!(document["paths"]["/v1/jobs/{id}"]["delete"].get("parameters").is_some());
        assert_eq!(document["info"]["version"], "1.2.3");
        assert_eq!(document["paths"]["/health"]["get"].get("security"), None);
    }
}
