//! Arrow's stream format, read so that it is known where in the file values lie. Those of batches that are compressed are read with
//! their whole batch.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch};
use arrow::buffer::{Buffer, MutableBuffer};
use arrow::datatypes::{DataType, Schema, SchemaRef};
use arrow::ipc::convert::fb_to_schema;
use arrow::ipc::reader::{read_dictionary, read_record_batch};
use arrow::ipc::{MessageHeader, root_as_message};
use flow_kind::open_input_file;
use flow_storage::{InputFile, Storage};

use crate::error::AudioError;

/// What files of Arrow's file format begin with; a stream follows.
const MAGIC: &[u8; 6] = b"ARROW1";
/// Where it does.
const AFTER_MAGIC: u64 = 8;
/// Most bytes of the metadata of a message, and of its body.
const LARGEST_METADATA: u64 = 64 << 20;
const LARGEST_BODY: u64 = 4 << 30;

/// A file of record batches.
pub struct ArrowFile {
    pub path: PathBuf,
    pub schema: SchemaRef,
    file: InputFile,
    length: u64,
    /// Where the message after the schema begins.
    first: u64,
}

struct Message {
    metadata: Vec<u8>,
    body: u64,
    size: u64,
}

/// A batch, the bytes that its values are in, and where in the file these begin.
pub struct PlacedBatch {
    pub batch: RecordBatch,
    /// Where in the file its message begins, in bytes.
    pub at: u64,
    /// Whether its buffers may be compressed: a value that was has no place of its own.
    pub is_compressed: bool,
    body: Buffer,
    start: u64,
}

impl PlacedBatch {
    /// Where in the file a value of the batch lies, in bytes; none where it was copied.
    pub fn place_of(&self, value: &[u8]) -> Option<(u64, u64)> {
        let (from, base) = (value.as_ptr() as usize, self.body.as_ptr() as usize);
        let at = from.checked_sub(base)?;
        let end = at.checked_add(value.len())?;
        (end <= self.body.len()).then(|| (self.start + at as u64, value.len() as u64))
    }
}

/// A panic of the Arrow crate counts as damage of the file.
fn sheltered<T>(path: &Path, work: impl FnOnce() -> Result<T, AudioError>) -> Result<T, AudioError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(AudioError::manifest(path, "it is damaged: the Arrow decoder failed")))
}

impl ArrowFile {
    /// # Errors
    /// When it cannot be read, or is no such file.
    pub fn open(storage: &Storage, path: &Path) -> Result<ArrowFile, AudioError> {
        let failed = |error| AudioError::read(path, error);
        let file = open_input_file(storage, path).map_err(failed)?;
        let mut opened = ArrowFile {
            path: path.to_path_buf(),
            schema: Arc::new(Schema::empty()),
            length: file.length().map_err(failed)?,
            file,
            first: 0,
        };
        let mut magic = [0; MAGIC.len()];
        if opened.file.read_exact_at(&mut magic, 0).is_ok() && magic == *MAGIC {
            opened.first = AFTER_MAGIC;
        }
        let no_schema = || AudioError::manifest(path, "it is not an Arrow file: it does not begin with a schema");
        let message = opened.message(opened.first).map_err(|error| match opened.first {
            0 => error,
            _ => AudioError::manifest(
                path,
                "its schema is at its end alone, as Polars writes it, or it is damaged: write it as Parquet",
            ),
        });
        let message = message?.ok_or_else(no_schema)?;
        opened.schema = sheltered(path, || {
            let header = root_as_message(&message.metadata).map_err(|error| damaged(path, &error))?;
            let schema = header.header_as_schema().ok_or_else(no_schema)?;
            Ok(Arc::new(fb_to_schema(schema)))
        })?;
        opened.first = message.body + message.size;
        Ok(opened)
    }

    /// The message at a place; none at the end.
    fn message(&self, at: u64) -> Result<Option<Message>, AudioError> {
        let read = |buffer: &mut [u8], at: u64| {
            self.file.read_exact_at(buffer, at).map_err(|error| match error.kind() {
                std::io::ErrorKind::UnexpectedEof => AudioError::manifest(&self.path, "it is cut short"),
                _ => AudioError::read(&self.path, error),
            })
        };
        if at >= self.length {
            return Ok(None);
        }
        let (mut word, mut at) = ([0; 4], at);
        read(&mut word, at)?;
        at += 4;
        if word == [0xff; 4] {
            read(&mut word, at)?;
            at += 4;
        }
        let size = u64::from(u32::from_le_bytes(word));
        if size == 0 {
            return Ok(None);
        }
        if size > LARGEST_METADATA || size > self.length - at.min(self.length) {
            return Err(AudioError::manifest(&self.path, "it is not an Arrow file, or damaged"));
        }
        let mut metadata = vec![0; usize::try_from(size).unwrap_or(0)];
        read(&mut metadata, at)?;
        let header = root_as_message(&metadata).map_err(|error| damaged(&self.path, &error))?;
        let body = at + size;
        let size = u64::try_from(header.bodyLength()).unwrap_or(u64::MAX);
        if size > LARGEST_BODY || size > self.length.saturating_sub(body) {
            return Err(AudioError::manifest(&self.path, "it is cut short, or damaged"));
        }
        Ok(Some(Message { metadata, body, size }))
    }

    /// Whether a column, or the field `inner` of it where it is a struct, has nulls, by the metadata of all batches. What does not
    /// say so counts as having some.
    ///
    /// # Errors
    /// When it cannot be read, or is damaged.
    pub fn has_nulls(&self, column: &str, inner: &str) -> Result<bool, AudioError> {
        let mut nodes = Vec::new();
        let mut next = 0;
        for field in self.schema.fields() {
            if field.name() == column {
                nodes.push(next);
                if let DataType::Struct(fields) = field.data_type() {
                    let before = fields.iter().take_while(|field| field.name() != inner);
                    nodes.push(next + 1 + before.map(|field| nodes_of(field.data_type())).sum::<usize>());
                }
            }
            next += nodes_of(field.data_type());
        }
        let mut at = self.first;
        while let Some(message) = self.message(at)? {
            at = message.body + message.size;
            let has_nulls = sheltered(&self.path, || {
                let header = root_as_message(&message.metadata).map_err(|error| damaged(&self.path, &error))?;
                let Some(batch) = header.header_as_record_batch() else {
                    return Ok(false);
                };
                let said = batch.nodes();
                let is_full = |node: &usize| {
                    let node = said.filter(|said| *node < said.len()).map(|said| said.get(*node));
                    node.is_some_and(|node| node.null_count() == 0)
                };
                Ok(nodes.is_empty() || !nodes.iter().all(is_full))
            })?;
            if has_nulls {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The record batches, one after the other.
    pub fn batches(&self) -> Batches<'_> {
        Batches {
            file: self,
            at: self.first,
            dictionaries: HashMap::new(),
        }
    }

    /// A column of the record batch whose message begins at a place, in bytes.
    ///
    /// # Errors
    /// When it cannot be read, is damaged, or there is no such batch or column.
    pub fn column_of(&self, at: u64, column: usize) -> Result<ArrayRef, AudioError> {
        let no_batch = || {
            AudioError::manifest(
                &self.path,
                format!("it has no record batch at {at} with a column {column}"),
            )
        };
        if column >= self.schema.fields().len() || at < self.first {
            return Err(no_batch());
        }
        let message = self.message(at)?.ok_or_else(no_batch)?;
        let body = self.body(&message)?;
        sheltered(&self.path, || {
            let header = root_as_message(&message.metadata).map_err(|error| damaged(&self.path, &error))?;
            let batch = header.header_as_record_batch().ok_or_else(no_batch)?;
            check_sizes(&batch, &body).map_err(|why| damaged(&self.path, &why))?;
            let (schema, none) = (Arc::clone(&self.schema), HashMap::new());
            let batch = read_record_batch(&body, batch, schema, &none, Some(&[column]), &header.version());
            let batch = batch.map_err(|error| damaged(&self.path, &error))?;
            batch.columns().first().cloned().ok_or_else(no_batch)
        })
    }

    /// Aligned, as the values are in the file, so that they are not copied.
    fn body(&self, message: &Message) -> Result<Buffer, AudioError> {
        let mut body = MutableBuffer::from_len_zeroed(usize::try_from(message.size).unwrap_or(0));
        let read = self.file.read_exact_at(body.as_slice_mut(), message.body);
        read.map_err(|error| AudioError::read(&self.path, error))?;
        Ok(body.into())
    }
}

/// The record batches of a file.
pub struct Batches<'f> {
    file: &'f ArrowFile,
    at: u64,
    dictionaries: HashMap<i64, ArrayRef>,
}

impl Batches<'_> {
    /// The next one; none at the end.
    ///
    /// # Errors
    /// When it cannot be read, or is damaged.
    pub fn next_batch(&mut self) -> Result<Option<PlacedBatch>, AudioError> {
        let path = &self.file.path;
        while let Some(message) = self.file.message(self.at)? {
            let at = std::mem::replace(&mut self.at, message.body + message.size);
            let body = self.file.body(&message)?;
            let batch = sheltered(path, || {
                let header = root_as_message(&message.metadata).map_err(|error| damaged(path, &error))?;
                let version = header.version();
                match header.header_type() {
                    MessageHeader::RecordBatch => {
                        let batch = header.header_as_record_batch();
                        let batch = batch.ok_or_else(|| AudioError::manifest(path, "a record batch is damaged"))?;
                        check_sizes(&batch, &body).map_err(|why| damaged(path, &why))?;
                        let schema = Arc::clone(&self.file.schema);
                        let is_compressed = batch.compression().is_some();
                        let batch = read_record_batch(&body, batch, schema, &self.dictionaries, None, &version);
                        let batch = batch.map_err(|error| damaged(path, &error))?;
                        Ok(Some((batch, is_compressed)))
                    }
                    MessageHeader::DictionaryBatch => {
                        let batch = header.header_as_dictionary_batch();
                        let batch = batch.ok_or_else(|| AudioError::manifest(path, "a dictionary is damaged"))?;
                        if let Some(values) = batch.data() {
                            check_sizes(&values, &body).map_err(|why| damaged(path, &why))?;
                        }
                        let read = read_dictionary(&body, batch, &self.file.schema, &mut self.dictionaries, &version);
                        read.map(|()| None).map_err(|error| damaged(path, &error))
                    }
                    _ => Ok(None),
                }
            })?;
            if let Some((batch, is_compressed)) = batch {
                return Ok(Some(PlacedBatch {
                    batch,
                    at,
                    is_compressed,
                    body,
                    start: message.body,
                }));
            }
        }
        Ok(None)
    }
}

/// Refuses compressed buffers that say that they are larger unpacked than a body may be: the Arrow crate would reserve as much memory.
fn check_sizes(batch: &arrow::ipc::RecordBatch<'_>, body: &Buffer) -> Result<(), String> {
    if batch.compression().is_none() {
        return Ok(());
    }
    let unpacked = |buffer: &arrow::ipc::Buffer| {
        let at = usize::try_from(buffer.offset()).ok()?;
        let size = body.as_slice().get(at..at.checked_add(8)?)?;
        // A negative one means that it is not compressed.
        u64::try_from(i64::from_le_bytes(size.try_into().ok()?)).ok()
    };
    let buffers = batch.buffers().into_iter().flatten();
    let total = buffers.filter_map(unpacked).fold(0, u64::saturating_add);
    match total > LARGEST_BODY {
        true => Err(format!("its buffers would have {total} bytes unpacked")),
        false => Ok(()),
    }
}

/// How many nodes of a record batch a column has: itself and, depth first, what is in it.
fn nodes_of(data_type: &DataType) -> usize {
    let inner: usize = match data_type {
        DataType::Struct(fields) => fields.iter().map(|field| nodes_of(field.data_type())).sum(),
        DataType::Union(fields, _) => fields.iter().map(|(_, field)| nodes_of(field.data_type())).sum(),
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::ListView(field)
        | DataType::LargeListView(field)
        | DataType::FixedSizeList(field, _)
        | DataType::Map(field, _) => nodes_of(field.data_type()),
        DataType::RunEndEncoded(ends, values) => nodes_of(ends.data_type()) + nodes_of(values.data_type()),
        _ => 0,
    };
    1 + inner
}

fn damaged(path: &Path, error: &dyn std::fmt::Display) -> AudioError {
    AudioError::manifest(path, format!("it is damaged: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nulls_are_told_by_the_metadata_of_batches() {
        let data = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../layouts/tests/data/layouts"));
        let of = |folder: &str| {
            ArrowFile::open(
                &Storage::default(),
                &data.join(folder).join("data-00000-of-00001.arrow"),
            )
            .unwrap()
        };
        let has_nulls = |folder: &str, column: &str| of(folder).has_nulls(column, "bytes").unwrap();
        assert!(has_nulls("saved", "audio") && has_nulls("saved", "sentence"));
        assert!(!has_nulls("saved", "lang") && !has_nulls("saved_dict/train", "audio"));
        // Only the path of its row is null.
        assert!(!has_nulls("saved_dict/test", "audio"));
        assert!(of("saved_dict/test").has_nulls("audio", "path").unwrap());
        assert!(has_nulls("saved", "no such column"));
    }
}
