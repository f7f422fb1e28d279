//! The stage kinds of this binary, in one list.

use flow_runtime::registry::{AnyKind, kind};

/// The column that names a segment of speech, in the rows of all kinds: rejects have it, and `flow lineage` finds rows by it.
pub const ID_COLUMN: &str = "segment_id";

/// All stage kinds that `flow` comes with.
pub fn all() -> Vec<Box<dyn AnyKind>> {
    vec![
        kind::<flow_manifest::scan::Scan>(),
        kind::<flow_manifest::read::Read>(),
        kind::<flow_manifest::table::Table>(),
        kind::<flow_manifest::sql::Sql>(),
        kind::<flow_manifest::dedup::Dedup>(),
        kind::<flow_manifest::split::Split>(),
        kind::<flow_manifest::disjoint::Disjoint>(),
        kind::<flow_manifest::write::Write>(),
        kind::<flow_audio::Probe>(),
        kind::<flow_audio::Extract>(),
        kind::<flow_audio::DeleteTars>(),
        kind::<flow_audio::WebDataset>(),
        kind::<flow_audio::Synthesize>(),
        kind::<flow_sampling::Plan>(),
        kind::<flow_sampling::WritePlan>(),
        kind::<flow_sampling::Load>(),
        kind::<flow_training::train_tokenizer::TrainTokenizer>(),
        kind::<flow_training::read_tokenizer::ReadTokenizer>(),
        kind::<flow_training::write_tokenizer::WriteTokenizer>(),
        kind::<flow_training::limit_texts::LimitTexts>(),
        kind::<flow_training::language_tags::TagTexts>(),
        kind::<flow_training::train::TrainingTrain>(),
        kind::<flow_training::write_model::WriteModel>(),
        kind::<flow_evaluation::decode::EvaluationDecode>(),
        kind::<flow_evaluation::report::EvaluationReport>(),
        kind::<flow_speakers::Diarize>(),
        kind::<flow_speakers::Write>(),
        kind::<flow_transcription::Transcribe>(),
        kind::<flow_transcription::Utterances>(),
        kind::<flow_transcription::AssignSpeakers>(),
        kind::<flow_transcription::Write>(),
    ]
}

#[cfg(test)]
mod tests {
    use flow_runtime::registry::Registry;

    #[test]
    fn all_kinds_are_documented_and_refuse_unknown_settings() {
        let registry = Registry::new(super::all()).unwrap();
        assert_eq!(registry.faults(), Vec::<String>::new());
    }
}
