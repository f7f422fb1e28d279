//! The stage kinds of this binary, in one list.

use flow_kind::registry::{AnyKind, kind};

/// All stage kinds that `flow` comes with.
pub fn all() -> Vec<Box<dyn AnyKind>> {
    vec![
        kind::<flow_manifest::scan::Scan>(),
        kind::<flow_layouts::read::Read>(),
        kind::<flow_manifest::table::Table>(),
        kind::<flow_manifest::sql::Sql>(),
        kind::<flow_manifest::correct::MatchCorrections>(),
        kind::<flow_manifest::correct::Correct>(),
        kind::<flow_manifest::dedup::Dedup>(),
        kind::<flow_manifest::split::Split>(),
        kind::<flow_manifest::disjoint::Disjoint>(),
        kind::<flow_manifest::write::Write>(),
        kind::<flow_shards::Probe>(),
        kind::<flow_shards::Extract>(),
        kind::<flow_shards::DeleteTars>(),
        kind::<flow_shards::WebDataset>(),
        kind::<flow_synthesis::Synthesize>(),
        kind::<flow_training::audio_quality::AudioQuality>(),
        kind::<flow_evaluation::quality_report::QualityReport>(),
        kind::<flow_sampling::Plan>(),
        kind::<flow_sampling::WritePlan>(),
        kind::<flow_sampling::Load>(),
        kind::<flow_training::train_tokenizer::TrainTokenizer>(),
        kind::<flow_training::read_tokenizer::ReadTokenizer>(),
        kind::<flow_training::write_tokenizer::WriteTokenizer>(),
        kind::<flow_training::limit_texts::LimitTexts>(),
        kind::<flow_training::language_tags::TagTexts>(),
        kind::<flow_training::train::TrainingTrain>(),
        kind::<flow_training::rank_rows::RankRows>(),
        kind::<flow_training::write_model::WriteModel>(),
        kind::<flow_evaluation::decode::EvaluationDecode>(),
        kind::<flow_evaluation::report::EvaluationReport>(),
        kind::<flow_speakers::Diarize>(),
        kind::<flow_speakers::Write>(),
        kind::<flow_transcription::Transcribe>(),
        kind::<flow_transcription::Utterances>(),
        kind::<flow_transcription::Align>(),
        kind::<flow_transcription::AssignSpeakers>(),
        kind::<flow_transcription::Write>(),
    ]
}

#[cfg(test)]
mod tests {
    use flow_kind::Storage;
    use flow_kind::registry::Registry;
    use flow_spec::yaml::parse_text;

    #[test]
    fn all_kinds_are_documented_and_refuse_unknown_settings() {
        let registry = Registry::new(super::all()).unwrap();
        assert_eq!(registry.faults(), Vec::<String>::new());
    }

    /// Whether a setting of the first level may hold a text, alone or in a list.
    fn takes_text(schema: &serde_json::Value) -> bool {
        let is_text = |schema: &serde_json::Value| match &schema["type"] {
            serde_json::Value::String(kind) => kind == "string" && schema.get("enum").is_none(),
            serde_json::Value::Array(kinds) => kinds.iter().any(|kind| kind == "string"),
            _ => false,
        };
        is_text(schema) || (schema["type"] == "array" && is_text(&schema["items"]))
    }

    #[test]
    fn settings_that_take_no_urls_refuse_them_by_name() {
        let mut refused = 0;
        for kind in super::all() {
            let schema = kind.schema();
            let Some(properties) = schema["properties"].as_object() else {
                continue;
            };
            for (name, property) in properties.iter().filter(|(_, property)| takes_text(property)) {
                let is_open = kind.url_settings().iter().any(|(open, _)| open == name);
                let is_sql = kind.sql_settings().contains(&name.as_str());
                let value = match property["type"] == "array" {
                    true => "['s3://bucket/key']",
                    false => "'s3://bucket/key'",
                };
                // Other settings are missing, which is told later.
                let error = kind
                    .parse(
                        &parse_text(&format!("{{{name}: {value}}}")).unwrap(),
                        &Storage::default(),
                    )
                    .err();
                let message = error.map(|error| error.message).unwrap_or_default();
                let is_refused = message.contains(&format!("`{name}")) && message.contains("takes no URL");
                assert_eq!(is_refused, !is_open && !is_sql, "{}.{name}: {message}", kind.name());
                refused += u32::from(is_refused);
            }
        }
        assert!(refused > 20, "only {refused} settings were looked at");
    }
}
