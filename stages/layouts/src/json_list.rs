//! Lists in JSON, `[{…}, {…}]`, as `json.dump` of Python writes them. Their items are read as lines.

use std::fs::File;
use std::io::{self, BufRead, BufWriter, Write};
use std::path::Path;

use flow_corpus::ManifestError;
use flow_kind::unlinked_file;
use serde::de::{DeserializeSeed, Deserializer, Error, SeqAccess, Visitor};
use serde_json::Value;

/// Whether a file that begins so is a list.
pub fn is_list(head: &[u8]) -> bool {
    let head = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    head.trim_ascii_start().starts_with(b"[")
}

/// The first item of a list that begins so; none where it is incomplete.
pub fn first_item(head: &[u8]) -> Option<Value> {
    let head = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    let items = head.trim_ascii_start().strip_prefix(b"[")?;
    serde_json::Deserializer::from_slice(items).into_iter().next()?.ok()
}

/// A file without a name with an item on each line.
///
/// # Errors
/// When the list cannot be read or is damaged, or the file cannot be written.
pub fn to_lines(mut list: impl BufRead, path: &Path, scratch: &Path) -> Result<File, ManifestError> {
    let failed = |error| ManifestError::io(scratch, error);
    let mut lines = BufWriter::with_capacity(1 << 18, unlinked_file(scratch).map_err(failed)?);
    if list.fill_buf().is_ok_and(|bytes| bytes.starts_with(b"\xef\xbb\xbf")) {
        list.consume(3);
    }
    let mut parsed = serde_json::Deserializer::from_reader(list);
    Lines(&mut lines)
        .deserialize(&mut parsed)
        .and_then(|()| parsed.end())
        .map_err(|error| match error.io_error_kind() {
            Some(kind) => ManifestError::io(path, io::Error::new(kind, error.to_string())),
            None => ManifestError::manifest(path, format!("its list is damaged: {error}")),
        })?;
    lines.into_inner().map_err(|error| failed(error.into_error()))
}

/// Writes each item as it is parsed: a list may be larger than memory.
struct Lines<'w>(&'w mut BufWriter<File>);

impl<'de> DeserializeSeed<'de> for Lines<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, list: D) -> Result<(), D::Error> {
        list.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Lines<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while let Some(item) = items.next_element::<Value>()? {
            let written = serde_json::to_writer(&mut *self.0, &item).map_err(io::Error::from);
            let written = written.and_then(|()| self.0.write_all(b"\n"));
            written.map_err(|error| A::Error::custom(format!("the lines cannot be written: {error}")))?;
        }
        Ok(())
    }
}
