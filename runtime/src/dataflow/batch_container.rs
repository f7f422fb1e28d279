//! What travels on an edge: Arrow batches, each with its partition's ordinal and the port it left by.
//!
//! Between threads of a process the container moves by pointer. Where timely serialises (between
//! processes, or when asked to), each batch is an Arrow IPC stream.

use std::cell::OnceCell;
use std::io::{Cursor, Write};
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use arrow::ipc::reader::StreamReader;
use arrow::ipc::writer::StreamWriter;
use timely::Accountable;
use timely::bytes::arc::Bytes;
use timely::container::{DrainContainer, PushInto, SizableContainer};
use timely::dataflow::channels::ContainerBytes;

use super::in_flight::MemoryReservation;

/// A batch with its address.
#[derive(Clone)]
pub(super) struct Routed {
    pub ordinal: u64,
    pub port: u16,
    pub batch: RecordBatch,
    /// Counts the memory of the batch as in flight until every receiver has dropped it. None for batches of a source,
    /// which are counted until they are written, and for batches from another process, which are counted there.
    pub reserved: Option<Arc<MemoryReservation>>,
}

/// Timely's container of batches.
#[derive(Default)]
pub(super) struct BatchContainer {
    items: Vec<Routed>,
    /// Timely asks for the length before it asks for the bytes; the encoding is made once.
    encoded: OnceCell<Vec<u8>>,
}

impl BatchContainer {
    /// The batches, leaving the container empty.
    pub fn take(&mut self) -> Vec<Routed> {
        self.encoded = OnceCell::new();
        std::mem::take(&mut self.items)
    }

    fn bytes(&self) -> &[u8] {
        // Writing a batch to a Vec does not fail: the schema is that of the batch. Should it fail, the panic guard of
        // the worker ends the run.
        self.encoded
            .get_or_init(|| encode(&self.items).expect("a batch in memory can be encoded as arrow ipc"))
    }
}

impl Clone for BatchContainer {
    fn clone(&self) -> Self {
        BatchContainer {
            items: self.items.clone(),
            encoded: OnceCell::new(),
        }
    }
}

impl Accountable for BatchContainer {
    fn record_count(&self) -> i64 {
        self.items.len() as i64
    }
}

impl DrainContainer for BatchContainer {
    type Item<'a> = Routed;
    type DrainIter<'a> = std::vec::Drain<'a, Routed>;

    fn drain(&mut self) -> Self::DrainIter<'_> {
        self.encoded = OnceCell::new();
        self.items.drain(..)
    }
}

impl SizableContainer for BatchContainer {
    fn at_capacity(&self) -> bool {
        // Each batch holds thousands of rows already: nothing is gained by gathering several.
        !self.items.is_empty()
    }

    fn ensure_capacity(&mut self, _stash: &mut Option<Self>) {}
}

impl PushInto<Routed> for BatchContainer {
    fn push_into(&mut self, item: Routed) {
        self.encoded = OnceCell::new();
        self.items.push(item);
    }
}

/// Layout, all little-endian and padded to 8 bytes: count; per batch ordinal, port, length, IPC stream.
impl ContainerBytes for BatchContainer {
    fn from_bytes(bytes: Bytes) -> Self {
        // The bytes were written by `encode` in a peer of this run. Should they be damaged, the panic guard of the
        // worker ends the run.
        let items = decode(&bytes).expect("batches from a peer can be decoded");
        BatchContainer {
            items,
            encoded: OnceCell::new(),
        }
    }

    fn length_in_bytes(&self) -> usize {
        self.bytes().len()
    }

    fn into_bytes<W: Write>(&self, writer: &mut W) {
        writer
            .write_all(self.bytes())
            .expect("timely gives a writer of the length asked for");
    }
}

fn encode(items: &[Routed]) -> Result<Vec<u8>, ArrowError> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&(items.len() as u64).to_le_bytes());
    for item in items {
        bytes.extend_from_slice(&item.ordinal.to_le_bytes());
        bytes.extend_from_slice(&u64::from(item.port).to_le_bytes());
        let mut writer = StreamWriter::try_new(Vec::new(), item.batch.schema_ref())?;
        writer.write(&item.batch)?;
        let stream = writer.into_inner()?;
        bytes.extend_from_slice(&(stream.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&stream);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
    Ok(bytes)
}

fn decode(bytes: &[u8]) -> Result<Vec<Routed>, ArrowError> {
    let short = || ArrowError::IpcError("batches are cut short".into());
    let mut at = 0usize;
    let word = |at: &mut usize| -> Result<u64, ArrowError> {
        let end = at.checked_add(8).ok_or_else(short)?;
        let raw: [u8; 8] = bytes
            .get(*at..end)
            .and_then(|raw| raw.try_into().ok())
            .ok_or_else(short)?;
        *at = end;
        Ok(u64::from_le_bytes(raw))
    };
    let count = word(&mut at)?;
    let mut items = Vec::new();
    for _ in 0..count {
        let ordinal = word(&mut at)?;
        let port =
            u16::try_from(word(&mut at)?).map_err(|_| ArrowError::IpcError("port number out of range".into()))?;
        let length = usize::try_from(word(&mut at)?).map_err(|_| short())?;
        let end = at.checked_add(length).ok_or_else(short)?;
        let stream = bytes.get(at..end).ok_or_else(short)?;
        let batch = StreamReader::try_new(Cursor::new(stream), None)?
            .next()
            .ok_or_else(short)??;
        at = end.next_multiple_of(8);
        items.push(Routed {
            ordinal,
            port,
            batch,
            reserved: None,
        });
    }
    Ok(items)
}

#[cfg(test)]
mod tests {
    use arrow::array::{Array, ArrayRef, Float32Array, ListArray, StringArray, UInt32Array};
    use arrow::datatypes::{DataType, Field, Float32Type, Schema};

    use super::*;

    fn routed(ordinal: u64) -> Routed {
        let signal =
            ListArray::from_iter_primitive::<Float32Type, _, _>([Some(vec![Some(0.5), None]), None, Some(vec![])]);
        let schema = Schema::new(vec![
            Field::new("_row", DataType::UInt32, false),
            Field::new("text", DataType::Utf8, true),
            Field::new("signal", signal.data_type().clone(), true),
            Field::new("score", DataType::Float32, true),
        ]);
        let columns: Vec<ArrayRef> = vec![
            Arc::new(UInt32Array::from(vec![7, 8, 9])),
            Arc::new(StringArray::from(vec![Some("नमस्ते"), None, Some("")])),
            Arc::new(signal),
            Arc::new(Float32Array::from(vec![Some(f32::MIN_POSITIVE), None, Some(-0.0)])),
        ];
        Routed {
            ordinal,
            port: 3,
            batch: RecordBatch::try_new(Arc::new(schema), columns).unwrap(),
            reserved: None,
        }
    }

    #[test]
    fn bytes_and_back() {
        let sliced = Routed {
            batch: routed(0).batch.slice(1, 2),
            ..routed(u64::MAX)
        };
        let items = vec![
            routed(1),
            sliced,
            Routed {
                batch: routed(0).batch.slice(0, 0),
                ..routed(2)
            },
        ];
        let bytes = encode(&items).unwrap();
        assert_eq!(bytes.len() % 8, 0);
        let parts = |items: Vec<Routed>| -> Vec<_> {
            let part = |routed: Routed| (routed.ordinal, routed.port, routed.batch);
            items.into_iter().map(part).collect()
        };
        assert_eq!(parts(decode(&bytes).unwrap()), parts(items));
    }

    #[test]
    fn bytes_cut_short_are_an_error_and_no_panic() {
        let bytes = encode(&[routed(1)]).unwrap();
        for end in [0, 7, 8, 20, 31, 40, bytes.len() / 2, bytes.len() - 200] {
            assert!(decode(&bytes[..end]).is_err(), "{end}");
        }
    }
}
