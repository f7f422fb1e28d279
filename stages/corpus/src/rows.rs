//! Rows of `manifest.read`, and lines that it rejects.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Builder, Int64Builder, RecordBatch, StringBuilder, UInt32Builder};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_kind::{Out, ROW, Reject, RejectClass, StageError};

use crate::extra::EXTRA;
use crate::kept_rows::KeptRows;
use crate::line_search::LineSearch;
use crate::manifest_row::{KEPT_OF_A_LINE, ManifestRow, Refusal};
use crate::recordings::{Found, Recordings};
use crate::row_rules::RowRules;

/// Rows per batch, and bytes of text that end a batch early: a column of texts has 32-bit offsets.
const CHUNK: usize = 8_192;
const CHUNK_BYTES: usize = 64 << 20;
/// Most bytes of text that a partition may have: stages after this one hold it as a whole.
const MOST_TEXT: usize = 1 << 30;
const TEXTS: [&str; 8] = [
    "segment_id",
    "shard_id",
    "text",
    "lang",
    "tar_member_name",
    "tar_path",
    "source",
    "audio_path",
];

/// `_row`, the columns of a manifest, the place of the recording, and `extra`.
pub fn read_schema() -> SchemaRef {
    let field = |name: &str, data_type, nullable| Field::new(name, data_type, nullable);
    let mut fields = vec![field(ROW, DataType::UInt32, false)];
    fields.extend(TEXTS.map(|name| field(name, DataType::Utf8, false)));
    fields.insert(4, field("duration", DataType::Float64, false));
    fields.push(field("start", DataType::Float64, true));
    fields.push(field("offset", DataType::Int64, true));
    fields.push(field("size", DataType::Int64, true));
    fields.push(field(EXTRA, DataType::Utf8, true));
    Arc::new(Schema::new(fields))
}

/// Collects the rows of one partition and hands them on.
pub struct Rows<'a> {
    out: &'a mut Out,
    recordings: &'a mut Recordings,
    rules: RowRules,
    texts: [StringBuilder; TEXTS.len()],
    rows: UInt32Builder,
    durations: Float64Builder,
    starts: Float64Builder,
    offsets: Int64Builder,
    sizes: Int64Builder,
    extras: StringBuilder,
    waiting: usize,
    /// Bytes of the texts that wait, and of all so far.
    bytes: usize,
    all_bytes: usize,
    most_bytes: usize,
    /// Number of the next row.
    next: u32,
    /// The row's place in the manifest: the file, and the number of the line, from 1.
    place: Option<(String, u64)>,
    /// When sampling, the rows that are kept.
    kept: Option<KeptRows>,
    /// Where one row is looked for, its line.
    search: Option<LineSearch>,
    /// By the hash of a part of a recording, that of its text.
    parts: HashMap<u64, u64>,
    /// How many rows have another text than one before them on the same part of a recording, and where the first is.
    told_twice: Option<(u64, String)>,
}

impl<'a> Rows<'a> {
    pub fn new(out: &'a mut Out, recordings: &'a mut Recordings) -> Self {
        Rows {
            out,
            recordings,
            rules: RowRules::default(),
            texts: Default::default(),
            rows: UInt32Builder::new(),
            durations: Float64Builder::new(),
            starts: Float64Builder::new(),
            offsets: Int64Builder::new(),
            sizes: Int64Builder::new(),
            extras: StringBuilder::new(),
            waiting: 0,
            bytes: 0,
            all_bytes: 0,
            most_bytes: MOST_TEXT,
            next: 0,
            place: None,
            kept: None,
            search: None,
            parts: HashMap::new(),
            told_twice: None,
        }
    }

    pub fn with_rules(self, rules: RowRules) -> Self {
        Rows { rules, ..self }
    }

    /// Sets the file of the following rows.
    pub fn begin_file(&mut self, path: &Path) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.place = Some((name, 0));
        if let Some(search) = &mut self.search {
            search.begin_file(path);
        }
    }

    /// Sets the line of the next row, from 1.
    pub fn at_line(&mut self, number: u64) {
        if let Some((_, line)) = &mut self.place {
            *line = number;
        }
    }

    /// What is wrong with a row, with its place in the manifest.
    fn with_place(&self, detail: String) -> String {
        match &self.place {
            Some((file, line)) if !detail.contains(&format!("line {line} ")) => {
                let space = if detail.is_empty() { "" } else { " " };
                format!("{detail}{space}({file}, line {line})")
            }
            _ => detail,
        }
    }

    /// Rows are kept in `kept`, and neither looked up nor handed on.
    pub fn keeping(self, kept: KeptRows) -> Self {
        Rows {
            kept: Some(kept),
            ..self
        }
    }

    /// One row is looked for, and none is looked up or handed on.
    pub fn searching(self, search: LineSearch) -> Self {
        Rows {
            search: Some(search),
            ..self
        }
    }

    /// The search, with what it found.
    pub fn into_search(self) -> Option<LineSearch> {
        self.search
    }

    /// The rows that were kept; from now on none are.
    pub fn take_kept(&mut self) -> KeptRows {
        self.kept.take().unwrap_or_default()
    }

    /// Takes the next row of the manifest, or what is wrong with it. `values` gives it as JSON, for the reject.
    ///
    /// # Errors
    /// Where a partition has more rows than `_row` can count, or a tar cannot be read.
    pub fn push(
        &mut self,
        row: Result<ManifestRow, Refusal>,
        values: impl FnOnce() -> String,
    ) -> Result<(), StageError> {
        let number = self.next;
        self.next = number
            .checked_add(1)
            .ok_or_else(|| StageError::failed("a partition has more rows than `_row` can count"))?;
        if let Some(kept) = &mut self.kept {
            kept.add(row, |row| {
                match (&self.place, row.and_then(|row| row.wanted.files.first())) {
                    (Some((file, line)), _) => format!("{file}, line {line}"),
                    (None, Some(recording)) => recording.display().to_string(),
                    (None, None) => format!("row {number}"),
                }
            });
            return Ok(());
        }
        if let Some(search) = &mut self.search {
            let line = self.place.as_ref().map_or(0, |(_, line)| *line);
            search.row(line, row, values);
            return Ok(());
        }
        self.out.read(1);
        let segment_id = row.as_ref().ok().map(|row| row.segment_id.clone());
        let found = match row {
            Ok(row) => self.found(row)?,
            Err(refusal) => Err(refusal),
        };
        let found = match found {
            Ok((row, _)) if self.all_bytes.saturating_add(row.bytes()) > self.most_bytes => {
                let detail = self.with_place(format!("the partition has more than {} bytes of text", self.most_bytes));
                // Without its values, which are too much text.
                let values = serde_json::json!({"text_bytes": row.text.len()}).to_string();
                self.out.reject(Reject {
                    row: Some(number),
                    id: segment_id.filter(|id| !id.is_empty() && id.len() <= KEPT_OF_A_LINE),
                    reason: "too_much_text".into(),
                    class: RejectClass::Fault,
                    detail,
                    values,
                });
                return Ok(());
            }
            found => found,
        };
        match found {
            Ok((row, found)) => self.append(number, &row, &found)?,
            Err(Refusal { reason, class, detail }) => {
                let detail = self.with_place(detail);
                self.out.reject(Reject {
                    row: Some(number),
                    id: segment_id.filter(|id| !id.is_empty()),
                    reason: reason.into(),
                    class,
                    detail,
                    values: values(),
                });
            }
        }
        Ok(())
    }

    /// Applies the rules to a row, and finds its recording.
    pub fn found(&mut self, mut row: ManifestRow) -> Result<Result<(ManifestRow, Found), Refusal>, StageError> {
        row.lang = self.rules.language(row.lang);
        if let Err(refusal) = row.check() {
            return Ok(Err(refusal));
        }
        let found = self.recordings.find(&row)?;
        Ok(found.and_then(|found| self.rules.duration(found.duration).map(|()| (row, found))))
    }

    /// Whether a row before this one had the same part of the same recording with another text: times that were not read, or
    /// that are wrong, give such rows.
    pub fn is_told_twice(&mut self, row: &ManifestRow, found: &Found) -> bool {
        let part = (
            &found.audio_path,
            found.range,
            row.start.map(f64::to_bits),
            found.duration.to_bits(),
        );
        let text = hash_of(&row.text);
        *self.parts.entry(hash_of(part)).or_insert(text) != text
    }

    /// What a person should know of rows that tell the same part of a recording in other words.
    pub fn told_twice(&self) -> Option<String> {
        let (rows, first) = self.told_twice.as_ref()?;
        let rows = if *rows == 1 {
            "1 row has".into()
        } else {
            format!("{rows} rows have")
        };
        Some(format!(
            "{rows} another text than a row before on exactly the same part of the same recording; the first: {first}"
        ))
    }

    fn append(&mut self, number: u32, row: &ManifestRow, found: &Found) -> Result<(), StageError> {
        if self.is_told_twice(row, found) {
            let place = self.with_place(format!("row {number}"));
            self.told_twice.get_or_insert((0, place)).0 += 1;
        }
        self.rows.append_value(number);
        let texts = [
            &row.segment_id,
            &row.shard_id,
            &row.text,
            &row.lang,
            &row.tar_member_name,
            &row.tar_path,
            &row.source,
            &found.audio_path,
        ];
        let bytes = row.bytes() + found.audio_path.len();
        for (builder, text) in self.texts.iter_mut().zip(texts) {
            builder.append_value(text);
        }
        self.durations.append_value(found.duration);
        self.starts.append_option(row.start);
        self.offsets.append_option(found.range.map(|(offset, _)| offset));
        self.sizes.append_option(found.range.map(|(_, size)| size));
        self.extras.append_option(row.extra.as_deref());
        self.waiting += 1;
        self.bytes += bytes;
        self.all_bytes += bytes;
        if self.waiting == CHUNK || self.bytes >= CHUNK_BYTES {
            self.send()?;
        }
        Ok(())
    }

    fn send(&mut self) -> Result<(), StageError> {
        if self.waiting == 0 {
            return Ok(());
        }
        (self.waiting, self.bytes) = (0, 0);
        let mut columns: Vec<ArrayRef> = vec![Arc::new(self.rows.finish())];
        columns.extend(self.texts.iter_mut().map(|text| Arc::new(text.finish()) as ArrayRef));
        columns.insert(4, Arc::new(self.durations.finish()));
        columns.push(Arc::new(self.starts.finish()));
        columns.push(Arc::new(self.offsets.finish()));
        columns.push(Arc::new(self.sizes.finish()));
        columns.push(Arc::new(self.extras.finish()));
        self.out.send(0, RecordBatch::try_new(read_schema(), columns)?);
        Ok(())
    }

    /// No more rows will come.
    ///
    /// # Errors
    /// Only where memory for them is lacking.
    pub fn finish(mut self) -> Result<(), StageError> {
        self.send()
    }
}

fn hash_of(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest_row::Wanted;
    use flow_kind::{Partition, Storage};

    #[test]
    fn rows_beyond_the_text_that_a_partition_may_have_are_refused() {
        let (mut out, mut recordings) = (
            Out::new(Partition::new("p")),
            Recordings::new(&Storage::default(), false),
        );
        let mut rows = Rows::new(&mut out, &mut recordings);
        rows.most_bytes = 350;
        for _ in 0..10 {
            let row = ManifestRow {
                text: "x".repeat(98),
                lang: "hi".into(),
                duration: Some(1.0),
                wanted: Wanted::file("f"),
                ..ManifestRow::default()
            };
            rows.push(Ok(row), String::new).unwrap();
        }
        assert_eq!((rows.waiting, rows.next), (3, 10));
        assert_eq!(rows.bytes, 3 * 101, "the path counts, too");
    }
}
