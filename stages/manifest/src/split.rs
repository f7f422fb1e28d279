//! The kind `manifest.split`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arrow::array::{Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, SchemaRef};
use flow_corpus::columns;
use flow_kind::{
    Artifact, Body, ChoiceRows, ColumnType, Context, Decision, Global, GroupChoice, GroupKey, InputPort, Inputs, Kind,
    OutputPort, Partition, Port, ROW, RejectSet, RowOutcome, Shape, StageError,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::keys::{Key, halves, key_at, keys, keys_of};
use crate::validation::{Quota, SplitBy, decision_schema, group_key, group_keys, key_schema, words};

/// Divides rows into training and validation.
///
/// # What it does
///
/// Rows with the same words (`norm`) stay together, whatever their language; with `split_by: recording`, rows
/// of the same recording too, and those with the same `segment_key` if that is set. Such a group belongs to the
/// smallest language code of its rows. For each language, its groups go to validation in the order of a hash of their
/// words and `split_seed`, until `val_per_language` rows, or `val_percent` of the language's rows if that is less, are
/// reached; a group larger than the number still missing is skipped. Which rows are chosen does not depend on their
/// order or on how they are spread over shards. With `min_val_rows` the page of the run has a table of what each
/// language gave.
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
    /// What must not be on both sides: the same words (`text`), or also the same recording.
    pub split_by: SplitBy,
    /// Column with the language.
    pub lang: String,
    /// Column with the words as `norm_text` gives them.
    pub norm: String,
    /// Column with the recording; needed for `split_by: recording` only.
    pub recording_id: String,
    /// Column with a further key that must not be on both sides, such as a segment's name; for `split_by: recording`
    /// only. Empty: none. Null values tie nothing.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub segment_key: String,
    /// Fewest rows for validation in total; where fewer can be chosen, the stage fails with the reason.
    #[serde(skip_serializing_if = "is_none_asked_for")]
    pub min_val_rows: u64,
}

/// Omitted where it is not set, so that splits made before this setting existed keep their keys.
fn is_none_asked_for(rows: &u64) -> bool {
    *rows == 0
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
            segment_key: String::new(),
            min_val_rows: 0,
        }
    }
}

impl SplitSettings {
    fn segment_column(&self) -> Option<&String> {
        (self.split_by == SplitBy::Recording && !self.segment_key.is_empty()).then_some(&self.segment_key)
    }

    pub(crate) fn quota(&self) -> Quota {
        Quota {
            per_language: self.val_per_language,
            percent: self.val_percent,
        }
    }

    /// Refuses key rows without a language.
    fn check_languages(&self, partition: &Partition, keys: &RecordBatch) -> Result<(), StageError> {
        let lang = columns::text(keys, "lang")?;
        let Some(place) = (0..lang.len()).find(|&place| lang.is_null(place)) else {
            return Ok(());
        };
        let (column, row) = (&self.lang, columns::rows(keys)?.value(place));
        Err(StageError::failed(format!(
            "`{column}` of row {row} of {partition} is null: a row without a language cannot be divided by language"
        )))
    }

    /// Refuses a split that has fewer rows for validation than are asked for. `languages`: rows in all and for validation.
    /// `rejects`: of the stages before.
    fn check_rows(
        &self,
        languages: &BTreeMap<String, (u64, u64)>,
        quota: Quota,
        rejects: &RejectSet,
    ) -> Result<(), StageError> {
        let (rows, val) = totals(languages);
        if val >= self.min_val_rows {
            return Ok(());
        }
        let found = format!(
            "{val} of {rows} {} for validation, at least {} must be",
            if rows == 1 { "row is" } else { "rows are" },
            self.min_val_rows
        );
        // The language with the most rows is the first that gives some.
        let Some((lang, (most, _))) = languages.iter().max_by_key(|(_, (rows, _))| *rows) else {
            let why = format!(
                "there are no rows to divide into training and validation ({})",
                rejects.in_words()
            );
            return Err(StageError::failed(why).with_help("`flow rejects` shows what was refused"));
        };
        let targets: u64 = languages.values().map(|(rows, _)| quota.target(*rows)).sum();
        let of = if lang.is_empty() {
            String::new()
        } else {
            format!(" of `{lang}`")
        };
        let (setting, why, help) = if self.val_per_language == 0 {
            let help = "set it to the number of validation rows per language".to_string();
            ("val_per_language", "it is 0".to_string(), help)
        } else if targets < self.min_val_rows && languages.len() == 1 && self.val_per_language < self.min_val_rows {
            let why = format!("it allows {} rows", self.val_per_language);
            let help = format!("set it to {} or more", self.min_val_rows);
            ("val_per_language", why, help)
        } else if targets < self.min_val_rows {
            let why = format!(
                "{} % of the {most} rows{of} are {}",
                self.val_percent,
                quota.target(*most)
            );
            let enough = (100 * self.min_val_rows).div_ceil(*most);
            let help = match enough {
                1..=100 => format!("set it to {enough} or more, or take more rows"),
                _ => "there are too few rows: take more of them".to_string(),
            };
            ("val_percent", why, help)
        } else {
            let alike = match self.split_by {
                SplitBy::Text => "the same words",
                SplitBy::Recording if self.segment_key.is_empty() => "the same words or recording",
                SplitBy::Recording => "the same words, recording or segment",
            };
            let why = format!(
                "{targets} may be chosen, but rows with {alike} stay together, and there are more in each such group"
            );
            let help = "raise it, or take rows with other words or recordings".to_string();
            ("val_percent", why, help)
        };
        Err(StageError::setting(setting, format!("{found}: {why}")).with_help(help))
    }
}

/// Rows in all, and rows for validation.
fn totals(languages: &BTreeMap<String, (u64, u64)>) -> (u64, u64) {
    let add = |(rows, val): (u64, u64), of: &(u64, u64)| (rows + of.0, val + of.1);
    languages.values().fold((0, 0), add)
}

/// What the screen shows of a split, and with a table the page of the run, too.
fn figures(languages: &BTreeMap<String, (u64, u64)>, with_table: bool) -> serde_json::Value {
    let (all, chosen) = totals(languages);
    let line = format!("{chosen} of {all} rows for validation");
    let by_language = languages.iter();
    let by_language = by_language.map(|(lang, (rows, val))| (lang.clone(), json!({"rows": rows, "val": val})));
    let by_language: serde_json::Map<_, _> = by_language.collect();
    let mut figures = json!({"line": line, "languages": by_language});
    if with_table {
        let rows = languages
            .iter()
            .map(|(lang, (rows, val))| json!([lang, rows - val, val]));
        figures["table"] = json!({
            "title": format!("Split: {line}"),
            "columns": ["language", "training", "validation"],
            "rows": rows.collect::<Vec<_>>(),
        });
    }
    figures
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
                format!("{} is not a share from 0 to 100 percent", settings.val_percent),
            ));
        }
        let input = inputs.required("rows")?;
        columns::expect(input, &settings.lang, &DataType::Utf8)?;
        columns::expect(input, &settings.norm, &DataType::Utf8)?;
        if settings.split_by == SplitBy::Recording {
            columns::expect(input, &settings.recording_id, &DataType::Utf8)?;
            if let Some(column) = settings.segment_column() {
                columns::expect(input, column, &DataType::Utf8)?;
            }
        } else if !settings.segment_key.is_empty() {
            return Err(StageError::setting(
                "segment_key",
                "it is for `split_by: recording` only",
            ));
        }
        let outputs = ["train", "val"].map(|name| Port::new(name, Arc::clone(&input.schema)));
        Ok(Shape::global(outputs.to_vec()))
    }

    fn open(settings: &SplitSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Global(Box::new(Splitter {
            settings: settings.clone(),
        })))
    }
}

struct Splitter {
    settings: SplitSettings,
}

impl Global for Splitter {
    fn key_schema(&self) -> SchemaRef {
        key_schema(self.settings.split_by, self.settings.segment_column().is_some())
    }

    fn decision_schema(&self) -> SchemaRef {
        decision_schema()
    }

    fn key_columns(&self) -> Option<Vec<String>> {
        let settings = &self.settings;
        let recording = (settings.split_by == SplitBy::Recording).then_some(&settings.recording_id);
        let names = [&settings.lang, &settings.norm].into_iter().chain(recording);
        let names = names.chain(settings.segment_column());
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
                let mut columns: Vec<Arc<dyn Array>> =
                    vec![Arc::new(rows), Arc::new(lang), Arc::new(norm), Arc::new(recording)];
                if let Some(column) = settings.segment_column() {
                    columns.push(Arc::new(keys_of(columns::text(batch, column)?)));
                }
                columns
            }
        };
        Ok(RecordBatch::try_new(self.key_schema(), columns)?)
    }

    fn decision(&self) -> Decision {
        Decision::Choice(Arc::new(ValidationChoice(self.settings.clone())))
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
                "row {} of {partition} was decided on, but does not exist",
                chosen.value(next)
            )));
        }
        Ok(outcomes)
    }
}

/// The choice of rows for validation: languages are the classes. By text the words are the key of a group. By recording they are its
/// name, and recordings (and segments) are ties.
pub(crate) struct ValidationChoice(pub SplitSettings);

fn group_key_of(key: Key) -> GroupKey {
    halves(key).into()
}

impl GroupChoice for ValidationChoice {
    fn rows(&self, partition: &Partition, all: &Artifact) -> Result<ChoiceRows, StageError> {
        let ValidationChoice(settings) = self;
        let batch = all.read_whole(partition, None)?;
        settings.check_languages(partition, &batch)?;
        let mut ties = Vec::new();
        let words = match settings.split_by {
            SplitBy::Text => keys(&batch, "words")?.clone(),
            SplitBy::Recording => {
                for column in ["recording", "segment"].into_iter().take(self.ties()) {
                    let tie = keys(&batch, column)?;
                    let at = |place: usize| tie.is_valid(place).then(|| group_key_of(key_at(tie, place)));
                    ties.push((0..tie.len()).map(at).collect());
                }
                group_keys(settings.split_seed, columns::text(&batch, "norm")?)
            }
        };
        let mut rows = ChoiceRows {
            keys: (0..words.len())
                .map(|place| group_key_of(key_at(&words, place)))
                .collect(),
            classes: Vec::with_capacity(words.len()),
            names: Vec::new(),
            numbers: columns::rows(&batch)?.values().to_vec(),
            ties,
        };
        let mut numbers: HashMap<&str, u32> = HashMap::new();
        let mut before: Option<(&str, u32)> = None;
        for lang in columns::text(&batch, "lang")?.iter().flatten() {
            let number = match before {
                // Rows of a language mostly come together.
                Some((last, number)) if last == lang => number,
                _ => {
                    let next = crate::validation::small(rows.names.len())?;
                    let number = *numbers.entry(lang).or_insert(next);
                    if number == next {
                        rows.names.push(lang.to_owned());
                    }
                    number
                }
            };
            before = Some((lang, number));
            rows.classes.push(number);
        }
        Ok(rows)
    }

    fn ties(&self) -> usize {
        match self.0.split_by {
            SplitBy::Text => 0,
            SplitBy::Recording => 1 + usize::from(self.0.segment_column().is_some()),
        }
    }

    fn names(&self, partition: &Partition, keys: &Artifact) -> Result<StringArray, StageError> {
        let batch = keys.read_whole(partition, Some(&["norm"]))?;
        Ok(columns::text(&batch, "norm")?.clone())
    }

    fn key_of(&self, name: &str) -> GroupKey {
        group_key_of(group_key(self.0.split_seed, name))
    }

    fn quota(&self, rows: u64) -> u64 {
        self.0.quota().target(rows)
    }

    fn decisions(&self, chosen: Vec<u32>) -> Result<RecordBatch, StageError> {
        Ok(RecordBatch::try_new(
            decision_schema(),
            vec![Arc::new(UInt32Array::from(chosen))],
        )?)
    }

    fn complete(&self, context: &Context, languages: &BTreeMap<String, (u64, u64)>) -> Result<(), StageError> {
        let ValidationChoice(settings) = self;
        settings.check_rows(languages, settings.quota(), &context.rejects)?;
        context.report(figures(languages, settings.min_val_rows > 0));
        Ok(())
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

    /// The message for a split of rows of German in groups of equal words.
    fn refused(rows: usize, alike: usize, settings: &str) -> String {
        let schema = Arc::new(Schema::new(vec![
            Field::new(ROW, DataType::UInt32, false),
            Field::new("lang", DataType::Utf8, false),
            Field::new("norm", DataType::Utf8, false),
        ]));
        let columns: Vec<Arc<dyn Array>> = vec![
            Arc::new(UInt32Array::from_iter_values(0..rows as u32)),
            Arc::new(StringArray::from(vec!["de"; rows])),
            Arc::new(StringArray::from_iter_values(
                (0..rows).map(|row| format!("{}", row / alike)),
            )),
        ];
        let batch = RecordBatch::try_new(Arc::clone(&schema), columns).unwrap();
        let output = Harness::<Split>::from_yaml(settings)
            .unwrap()
            .input("rows", schema)
            .feed("rows", "de/a", batch)
            .run();
        match output {
            Ok(output) => format!("{} rows", output.all_rows("val").num_rows()),
            Err(StageError::Setting {
                path, message, help, ..
            }) => {
                format!("{path}: {message}; {}", help.unwrap_or_default())
            }
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn where_no_row_is_left_the_commonest_reject_is_named() {
        let reject = flow_kind::Reject {
            row: Some(0),
            id: None,
            reason: "duration_too_long".into(),
            class: flow_kind::RejectClass::Rule,
            detail: String::new(),
            values: String::new(),
        };
        let schema = Arc::new(Schema::new(vec![
            Field::new(ROW, DataType::UInt32, false),
            Field::new("lang", DataType::Utf8, false),
            Field::new("norm", DataType::Utf8, false),
        ]));
        let harness = Harness::<Split>::from_yaml("{min_val_rows: 1}")
            .unwrap()
            .input("rows", Arc::clone(&schema))
            .feed("rows", "de/a", RecordBatch::new_empty(schema))
            .rejected("train_rows", "de/a", reject);
        let said = harness.run().unwrap_err().to_string();
        assert!(said.contains("no rows to divide"), "{said}");
        assert!(
            said.contains("`duration_too_long` of stage train_rows, 1 times"),
            "{said}"
        );
    }

    #[test]
    fn too_few_rows_for_validation_are_refused_with_the_setting_that_helps() {
        assert_eq!(refused(30, 1, "{min_val_rows: 1}"), "3 rows");
        assert_eq!(refused(4, 1, "{}"), "0 rows", "as it always was");
        let said = refused(4, 1, "{min_val_rows: 1}");
        assert!(
            said.starts_with("val_percent: 0 of 4 rows are for validation"),
            "{said}"
        );
        assert!(
            said.contains("10 % of the 4 rows of `de` are 0; set it to 25 or more"),
            "{said}"
        );
        assert_eq!(refused(4, 1, "{min_val_rows: 1, val_percent: 25}"), "1 rows");
        let said = refused(1, 1, "{min_val_rows: 2}");
        assert!(
            said.contains("0 of 1 row is for validation, at least 2 must be"),
            "{said}"
        );
        assert!(said.contains("too few rows"), "{said}");
        let said = refused(30, 1, "{min_val_rows: 1, val_per_language: 0}");
        assert!(said.starts_with("val_per_language: 0 of 30 rows"), "{said}");
        // Three rows may be chosen, but ten always stay together.
        let said = refused(30, 10, "{min_val_rows: 1}");
        assert!(
            said.contains("3 may be chosen, but rows with the same words stay together"),
            "{said}"
        );
        assert_eq!(refused(30, 10, "{min_val_rows: 1, val_percent: 34}"), "10 rows");
    }

    #[test]
    fn a_setting_that_is_not_set_is_not_part_of_the_key() {
        let settings = serde_json::to_value(SplitSettings::default()).unwrap();
        for name in ["min_val_rows", "segment_key"] {
            assert!(settings.get(name).is_none(), "{settings}");
        }
    }

    #[test]
    fn rows_of_one_segment_stay_together() {
        let names = ["norm", "recording_id", "segment", "lang"];
        let fields = names.map(|name| Field::new(name, DataType::Utf8, true));
        let number = Field::new(ROW, DataType::UInt32, false);
        let schema = Arc::new(Schema::new(std::iter::once(number).chain(fields).collect::<Vec<_>>()));
        let columns: Vec<Arc<dyn Array>> = vec![
            Arc::new(UInt32Array::from_iter_values(0..4)),
            // In the order of choice: zwei, drei, vier, eins.
            Arc::new(StringArray::from(vec!["eins", "zwei", "drei", "vier"])),
            Arc::new(StringArray::from(vec![Some("a"), Some("b"), None, None])),
            Arc::new(StringArray::from(vec![Some("s"), Some("s"), None, None])),
            Arc::new(StringArray::from(vec!["de"; 4])),
        ];
        let batch = RecordBatch::try_new(Arc::clone(&schema), columns).unwrap();
        let val = |settings: &str| -> Vec<String> {
            let output = Harness::<Split>::from_yaml(settings)
                .unwrap()
                .input("rows", Arc::clone(&schema))
                .feed("rows", "de/a", batch.clone())
                .run()
                .unwrap();
            let rows = output.all_rows("val");
            let norms = columns::text(&rows, "norm").unwrap();
            norms.iter().flatten().map(str::to_string).collect()
        };
        assert_eq!(val("{split_by: recording, val_percent: 50}"), ["zwei", "drei"]);
        assert_eq!(
            val("{split_by: recording, val_percent: 50, segment_key: segment}"),
            ["drei", "vier"]
        );
        assert_eq!(
            val("{split_by: recording, val_percent: 75, segment_key: segment}").len(),
            2
        );
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
