//! The kind `manifest.split`.

use std::sync::Arc;

use arrow::array::{Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, SchemaRef};
use flow_runtime::{
    Artifact, Body, ColumnType, Context, Global, InputPort, Inputs, Kind, OutputPort, Partition, Port, ROW, RowOutcome,
    Shape, StageError,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::columns;
use crate::keys::{key_rows, keys_of};
use crate::validation::{Quota, SplitBy, decide_split, decision_schema, group_keys, key_schema, words};

/// Divides rows into training and validation.
///
/// # What it does
///
/// Rows with the same words (`norm`) stay together, whatever their language; with `split_by: recording`, rows
/// of the same recording too. Such a group is at home in the smallest language code of its rows. For each
/// language, groups at home there go to validation in the order of a hash of their words and `split_seed`, until
/// `val_per_language` rows, or `val_percent` of the language's rows if that is less, are reached; a group larger than what
/// is missing is passed over. Which rows are chosen does not depend on their order or on how they are
/// spread over shards.
///
/// Ports: `train` and `val`, both with the columns of the input.
///
/// # Example
///
/// ```yaml
/// split: {uses: manifest.split, from: unique, with: {val_per_language: 10, val_percent: 10}}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SplitSettings {
    /// Rows of each language for validation.
    pub val_per_language: u64,
    /// At most this share of a language's rows, in percent, rounded down.
    pub val_percent: f64,
    /// Another seed chooses other groups.
    pub split_seed: i64,
    /// What must not stand on both sides: the same words (`text`), or also the same recording.
    pub split_by: SplitBy,
    /// Column with the language.
    pub lang: String,
    /// Column with the words as `norm_text` gives them.
    pub norm: String,
    /// Column with the recording; needed for `split_by: recording` only.
    pub recording_id: String,
}

impl Default for SplitSettings {
    fn default() -> Self {
        SplitSettings {
            val_per_language: 10,
            val_percent: 10.0,
            split_seed: 1,
            split_by: SplitBy::Text,
            lang: "lang".into(),
            norm: "norm".into(),
            recording_id: "recording_id".into(),
        }
    }
}

pub struct Split;

impl Kind for Split {
    const NAME: &'static str = "manifest.split";
    const VERSION: u32 = 3;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("rows", "rows with the columns that the settings name")
            .columns(&[(ROW, ColumnType::UInt32)]),
    ];
    const OUTPUTS: &'static [OutputPort] = &[
        OutputPort::new("train", "the rows for training, as they came"),
        OutputPort::new("val", "the rows for validation, as they came"),
    ];
    type Settings = SplitSettings;

    fn shape(settings: &SplitSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        if !(0.0..=100.0).contains(&settings.val_percent) {
            return Err(StageError::setting(
                "val_percent",
                format!("{} is no share from 0 to 100 percent", settings.val_percent),
            ));
        }
        let input = inputs.required("rows")?;
        columns::expect(input, &settings.lang, &DataType::Utf8)?;
        columns::expect(input, &settings.norm, &DataType::Utf8)?;
        if settings.split_by == SplitBy::Recording {
            columns::expect(input, &settings.recording_id, &DataType::Utf8)?;
        }
        let outputs = ["train", "val"].map(|name| Port {
            name: name.into(),
            schema: Arc::clone(&input.schema),
        });
        Ok(Shape::global(outputs.to_vec()))
    }

    fn open(settings: &SplitSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Global(Box::new(Splitter {
            settings: settings.clone(),
            context: context.clone(),
        })))
    }
}

struct Splitter {
    settings: SplitSettings,
    context: Context,
}

impl Global for Splitter {
    fn key_schema(&self) -> SchemaRef {
        key_schema(self.settings.split_by)
    }

    fn decision_schema(&self) -> SchemaRef {
        decision_schema()
    }

    fn key_columns(&self) -> Option<Vec<String>> {
        let settings = &self.settings;
        let recording = (settings.split_by == SplitBy::Recording).then_some(&settings.recording_id);
        let names = [&settings.lang, &settings.norm].into_iter().chain(recording);
        Some(std::iter::once(ROW.to_string()).chain(names.cloned()).collect())
    }

    fn keys(&mut self, _: &Partition, batch: &RecordBatch) -> Result<RecordBatch, StageError> {
        let settings = &self.settings;
        let rows = columns::rows(batch)?.clone();
        let lang = columns::text(batch, &settings.lang)?.clone();
        let norm = columns::text(batch, &settings.norm)?;
        let norm = if norm.null_count() == 0 {
            norm.clone()
        } else {
            words(norm).map(Some).collect::<StringArray>()
        };
        let columns: Vec<Arc<dyn Array>> = match settings.split_by {
            SplitBy::Text => {
                let words = group_keys(settings.split_seed, &norm);
                vec![Arc::new(rows), Arc::new(lang), Arc::new(words)]
            }
            SplitBy::Recording => {
                let recording = keys_of(columns::text(batch, &settings.recording_id)?);
                vec![Arc::new(rows), Arc::new(lang), Arc::new(norm), Arc::new(recording)]
            }
        };
        Ok(RecordBatch::try_new(key_schema(settings.split_by), columns)?)
    }

    fn decide(&mut self, keys: &Artifact) -> Result<Vec<(Partition, RecordBatch)>, StageError> {
        let settings = &self.settings;
        let quota = Quota {
            per_language: settings.val_per_language,
            percent: settings.val_percent,
        };
        let keys = key_rows(keys)?;
        for (partition, batch) in keys
            .iter()
            .flat_map(|(partition, batches)| batches.iter().map(move |batch| (partition, batch)))
        {
            let lang = columns::text(batch, "lang")?;
            if let Some(place) = (0..lang.len()).find(|&place| lang.is_null(place)) {
                let (column, row) = (&settings.lang, columns::rows(batch)?.value(place));
                return Err(StageError::failed(format!(
                    "`{column}` of row {row} of {partition} is null: a row without a language cannot be divided by language"
                )));
            }
        }
        let split = decide_split(&keys, settings.split_by, quota, settings.split_seed)?;
        let figures = split
            .languages
            .iter()
            .map(|(lang, (rows, val))| (lang.clone(), serde_json::json!({"rows": rows, "val": val})));
        self.context.report(serde_json::Value::Object(figures.collect()));
        Ok(split.validation)
    }

    fn apply(
        &mut self,
        partition: &Partition,
        rows: &UInt32Array,
        decisions: &RecordBatch,
    ) -> Result<Vec<RowOutcome>, StageError> {
        let chosen = columns::rows(decisions)?;
        let mut next = 0;
        let mut outcomes = Vec::with_capacity(rows.len());
        for number in rows.values() {
            let val = next < chosen.len() && chosen.value(next) == *number;
            next += usize::from(val);
            outcomes.push(RowOutcome::Port(usize::from(val)));
        }
        if next < chosen.len() {
            return Err(StageError::failed(format!(
                "row {} of {partition} was decided on, but is not there",
                chosen.value(next)
            )));
        }
        Ok(outcomes)
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::{Field, Schema};
    use flow_runtime::harness::Harness;

    use super::*;

    fn split(langs: &[Option<&str>]) -> Result<flow_runtime::harness::Output, StageError> {
        let schema = Arc::new(Schema::new(vec![
            Field::new(ROW, DataType::UInt32, false),
            Field::new("lang", DataType::Utf8, true),
            Field::new("norm", DataType::Utf8, true),
        ]));
        let texts = (0..langs.len()).map(|row| Some(format!("words {row}")));
        let columns: Vec<Arc<dyn Array>> = vec![
            Arc::new(UInt32Array::from_iter_values(0..langs.len() as u32)),
            Arc::new(StringArray::from(langs.to_vec())),
            Arc::new(texts.collect::<StringArray>()),
        ];
        let batch = RecordBatch::try_new(Arc::clone(&schema), columns)?;
        Harness::<Split>::from_yaml("{val_per_language: 1, val_percent: 100}")?
            .input("rows", schema)
            .feed("rows", "hi/a", batch)
            .run()
    }

    #[test]
    fn a_row_without_a_language_is_named() {
        let output = split(&[Some("hi"), Some("hi"), Some("ta")]).unwrap();
        assert_eq!(output.all_rows("val").num_rows(), 2);
        let Err(error) = split(&[Some("hi"), None]) else {
            panic!("a null went through")
        };
        assert!(error.to_string().contains("`lang` of row 1 of hi/a is null"), "{error}");
    }
}
