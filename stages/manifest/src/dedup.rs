//! The kind `manifest.dedup`.

use std::sync::Arc;

use arrow::array::{Array, RecordBatch, StringArray, UInt8Array, UInt32Array};
use arrow::datatypes::{DataType, SchemaRef};
use flow_corpus::columns;
use flow_kind::{
    Body, ColumnType, Context, Decision, Global, InputPort, Inputs, Kind, OutputPort, Partition, Port, ROW,
    RejectClass, RowOutcome, Shape, StageError,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::duplicates::{Duplicate, Duplicates, decision_schema, key_schema};
use crate::keys::{keys_of, marks_of};

/// Keeps one row of each segment and of each recording.
///
/// # What it does
///
/// Rows go in three steps, each with its reason (class `rule`): `duplicate_segment_id`, another row of the same
/// partition has the segment id; `exact_duplicate`, another row has the same audio and the same words;
/// `audio_conflict`, another row has the same audio, with other words. The best row is kept: highest quality, then
/// smallest segment id, shard id, member name (compared as bytes), then the first in the order of language, shard, row.
/// The detail of a reject names the row that was kept.
///
/// Rows with the same words and other audio are kept. A row whose audio hash is null has no duplicate by audio.
///
/// # Example
///
/// ```yaml
/// unique: {uses: manifest.dedup, from: checked}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DedupSettings {
    /// Column with the segment's id.
    pub segment_id: String,
    /// Column with the name of the tar member.
    pub tar_member_name: String,
    /// Column with a hash or other text that identifies a recording's samples.
    pub audio_hash: String,
    /// Column with the words as `norm_text` gives them.
    pub norm: String,
    /// Column by which the best row is chosen; float64, higher is better.
    pub quality: String,
}

impl Default for DedupSettings {
    fn default() -> Self {
        DedupSettings {
            segment_id: "segment_id".into(),
            tar_member_name: "tar_member_name".into(),
            audio_hash: "audio_hash".into(),
            norm: "norm".into(),
            quality: "quality".into(),
        }
    }
}

pub struct Dedup;

impl Kind for Dedup {
    const NAME: &'static str = "manifest.dedup";
    const VERSION: u32 = 3;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("rows", "rows with the columns that the settings name")
            .columns(&[(ROW, ColumnType::UInt32)]),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "the rows that stay, as they came")];
    type Settings = DedupSettings;

    fn shape(settings: &DedupSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        let input = inputs.required("rows")?;
        for name in [
            &settings.segment_id,
            &settings.tar_member_name,
            &settings.audio_hash,
            &settings.norm,
        ] {
            columns::expect(input, name, &DataType::Utf8)?;
        }
        columns::expect(input, &settings.quality, &DataType::Float64)?;
        let outputs = vec![Port::new("rows", Arc::clone(&input.schema))];
        Ok(Shape::global(outputs))
    }

    fn open(settings: &DedupSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Global(Box::new(Deduplicator {
            settings: settings.clone(),
        })))
    }
}

struct Deduplicator {
    settings: DedupSettings,
}

impl Global for Deduplicator {
    fn key_schema(&self) -> SchemaRef {
        key_schema()
    }

    fn decision_schema(&self) -> SchemaRef {
        decision_schema()
    }

    fn key_columns(&self) -> Option<Vec<String>> {
        let settings = &self.settings;
        let names = [
            &settings.segment_id,
            &settings.tar_member_name,
            &settings.quality,
            &settings.norm,
            &settings.audio_hash,
        ];
        Some(
            std::iter::once(ROW.to_string())
                .chain(names.map(String::clone))
                .collect(),
        )
    }

    fn keys(&mut self, _: &Partition, batch: &RecordBatch) -> Result<RecordBatch, StageError> {
        let settings = &self.settings;
        let keys = RecordBatch::try_new(
            key_schema(),
            vec![
                Arc::new(columns::rows(batch)?.clone()),
                Arc::new(columns::text(batch, &settings.segment_id)?.clone()),
                Arc::new(columns::text(batch, &settings.tar_member_name)?.clone()),
                Arc::new(columns::number(batch, &settings.quality)?.clone()),
                Arc::new(marks_of(columns::text(batch, &settings.norm)?)),
                Arc::new(keys_of(columns::text(batch, &settings.audio_hash)?)),
            ],
        )?;
        Ok(keys)
    }

    fn decision(&self) -> Decision {
        Decision::Groups(Arc::new(Duplicates))
    }

    fn apply(
        &mut self,
        partition: &Partition,
        rows: &UInt32Array,
        decisions: &RecordBatch,
    ) -> Result<Vec<RowOutcome>, StageError> {
        let gone = columns::rows(decisions)?;
        let why = duplicates(decisions)?;
        let kept: &StringArray = columns::text(decisions, "kept")?;
        let mut next = 0;
        let mut outcomes = Vec::with_capacity(rows.len());
        for number in rows.values() {
            if next == gone.len() || gone.value(next) != *number {
                outcomes.push(RowOutcome::Port(0));
                continue;
            }
            let duplicate = Duplicate::of_number(why.value(next)).ok_or_else(|| {
                StageError::failed(format!(
                    "decisions of {partition} hold {}, which is not a decision",
                    why.value(next)
                ))
            })?;
            outcomes.push(RowOutcome::Rejected {
                reason: duplicate.reason(),
                class: RejectClass::Rule,
                detail: format!("kept {}", kept.value(next)),
            });
            next += 1;
        }
        if next < gone.len() {
            return Err(StageError::failed(format!(
                "row {} of {partition} was decided on, but does not exist",
                gone.value(next)
            )));
        }
        Ok(outcomes)
    }
}

/// Reports how many rows go for each reason.
pub(crate) fn report(context: &Context, decisions: &[(Partition, RecordBatch)]) -> Result<(), StageError> {
    let mut counts = [0u64; 3];
    for (_, batch) in decisions {
        for number in duplicates(batch)?.values() {
            if let Some(duplicate) = Duplicate::of_number(*number) {
                counts[duplicate as usize - 1] += 1; // Numbered from 1 to 3.
            }
        }
    }
    let figures: serde_json::Map<_, _> = Duplicate::ALL
        .iter()
        .zip(counts)
        .map(|(d, n)| (d.reason().to_string(), n.into()))
        .collect();
    context.report(figures.into());
    Ok(())
}

fn duplicates(decisions: &RecordBatch) -> Result<&UInt8Array, StageError> {
    let column = decisions
        .column_by_name("duplicate")
        .and_then(|column| column.as_any().downcast_ref());
    column.ok_or_else(|| StageError::failed("decisions lack the column `duplicate`"))
}
