//! Transcripts of the rows of a manifest, batch by batch.

use arrow::array::{Array, AsArray, StringArray};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use flow_kind::{Artifact, StageError};

/// The transcripts of a batch of rows.
pub struct Transcripts {
    texts: StringArray,
    segments: StringArray,
    languages: Option<StringArray>,
}

impl Transcripts {
    /// Those of all rows. Columns `segment_id` and `text` are needed; `lang` is used where it is.
    pub fn of_rows(rows: &Artifact) -> impl Iterator<Item = Result<Transcripts, StageError>> {
        let columns: &'static [&'static str] = match rows.schema().column_with_name("lang") {
            Some(_) => &["segment_id", "text", "lang"],
            None => &["segment_id", "text"],
        };
        rows.batches(Some(columns)).map(|item| {
            let (_, batch) = item?;
            let strings = |name: &str| -> Result<Option<StringArray>, StageError> {
                let Some(column) = batch.column_by_name(name) else {
                    return Ok(None);
                };
                Ok(cast(column, &DataType::Utf8)?.as_string_opt::<i32>().cloned())
            };
            let (Some(texts), Some(segments)) = (strings("text")?, strings("segment_id")?) else {
                return Err(StageError::failed("the train rows have no `text` and `segment_id`"));
            };
            Ok(Transcripts {
                texts,
                segments,
                languages: strings("lang")?,
            })
        })
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    pub fn text(&self, row: usize) -> Option<&str> {
        self.texts.is_valid(row).then(|| self.texts.value(row))
    }

    pub fn segment(&self, row: usize) -> &str {
        self.segments.value(row)
    }

    /// Empty where the row names none.
    pub fn language(&self, row: usize) -> &str {
        let languages = self.languages.as_ref().filter(|column| column.is_valid(row));
        languages.map_or("", |column| column.value(row))
    }
}
