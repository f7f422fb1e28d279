//! PyTorch's checkpoint files: a zip of a pickle and of the raw bytes of each tensor.

use std::io::Write;
use std::sync::Arc;

use candle_core::DType;

use super::pickle::{Pickle, StoredTensor};
use super::tensor_entry::{OpenFile, TensorEntry};
use super::zip::{Member, Region, members};
use super::zip_write::{NewMember, ZipLayout};
use super::{MAX_SMALL_FILE, broken};
use crate::{Error, Result};

/// Opens a checkpoint that begins at byte `start` of `file`, and passes its tensors and the pickle to `read`.
pub fn open_torch<T>(
    file: &Arc<OpenFile>,
    start: u64,
    length: u64,
    read: impl FnOnce(&Pickle, Vec<TensorEntry>) -> std::result::Result<T, String>,
) -> std::result::Result<T, String> {
    let region = Region {
        file: &file.file,
        start,
        length,
    };
    let members = members(&region)?;
    let (pickle_name, &pickle) = members
        .iter()
        .find(|(name, _)| *name == "data.pkl" || name.ends_with("/data.pkl"))
        .ok_or("has no data.pkl: it is not a PyTorch checkpoint")?;
    let root = pickle_name.strip_suffix("data.pkl").unwrap_or_default();
    if pickle.length > MAX_SMALL_FILE {
        return Err(format!("has a data.pkl of {} bytes", pickle.length));
    }
    if let Some(order) = members.get(&format!("{root}byteorder"))
        && region.read(order.offset, order.length.min(16))? != b"little"
    {
        return Err("was written on a big-endian machine".into());
    }
    let bytes = region.read(pickle.offset, pickle.length)?;
    let pickle = Pickle::read(&bytes)?;
    let listed = pickle.state_dict()?;
    let mut tensors = Vec::with_capacity(listed.len());
    for (name, stored) in listed {
        let member = members
            .get(&format!("{root}data/{}", stored.key))
            .ok_or_else(|| format!("lacks the data of tensor `{name}`"))?;
        let (dtype, offset) = place(&region, member, &stored).map_err(|what| format!("tensor `{name}` {what}"))?;
        tensors.push(TensorEntry::in_file(
            name.to_string(),
            dtype,
            stored.shape,
            file,
            start + offset,
        ));
    }
    read(&pickle, tensors)
}

/// Number type of a tensor, and where in the region it begins.
fn place(region: &Region, member: &Member, stored: &StoredTensor<'_>) -> std::result::Result<(DType, u64), String> {
    let dtype = storage_dtype(stored.storage)?;
    if stored.strides.len() != stored.shape.len() {
        return Err("has a damaged shape".into());
    }
    let mut expected = 1usize;
    for (&size, &stride) in stored.shape.iter().zip(&stored.strides).rev() {
        if size != 1 && stride != expected {
            return Err(format!(
                "is not stored contiguously (shape {:?}, strides {:?})",
                stored.shape, stored.strides
            ));
        }
        expected = expected.checked_mul(size).ok_or("has a damaged shape")?;
    }
    let width = dtype.size_in_bytes() as u64;
    let length = (expected as u64).checked_mul(width).ok_or("has a damaged shape")?;
    let start = stored.offset.checked_mul(width).ok_or("has a damaged offset")?;
    let in_member = start.checked_add(length).is_some_and(|end| end <= member.length);
    let in_region = (member.offset.checked_add(start))
        .and_then(|at| at.checked_add(length))
        .is_some_and(|end| end <= region.length);
    if !in_member || !in_region {
        return Err(format!(
            "needs {length} bytes at {start}, but its data have {}, or the file is cut off",
            member.length
        ));
    }
    Ok((dtype, member.offset + start))
}

fn storage_dtype(storage: &str) -> std::result::Result<DType, String> {
    Ok(match storage {
        "FloatStorage" => DType::F32,
        "DoubleStorage" => DType::F64,
        "HalfStorage" => DType::F16,
        "BFloat16Storage" => DType::BF16,
        "LongStorage" => DType::I64,
        other => return Err(format!("is of the unsupported type {other}")),
    })
}

/// A checkpoint file to be written; its size is known before its contents.
pub struct TorchFile<'a> {
    entries: Vec<(&'a TensorEntry, String, DType)>,
    pickle: Vec<u8>,
    layout: ZipLayout,
}

const ROOT: &str = "model_weights";
const BYTE_ORDER: &[u8] = b"little";
/// The version of PyTorch's format that has been written since 2020.
const VERSION: &[u8] = b"3\n";

impl<'a> TorchFile<'a> {
    /// A state dictionary of these tensors, under these names and in these types.
    pub fn new(entries: Vec<(&'a TensorEntry, String, DType)>) -> Result<Self> {
        let mut pickle = b"\x80\x02ccollections\nOrderedDict\n)R(".to_vec();
        for (index, (entry, name, dtype)) in entries.iter().enumerate() {
            put_tensor(&mut pickle, index, entry, name, *dtype)?;
        }
        pickle.extend(b"u.");
        let mut members = vec![
            NewMember {
                name: format!("{ROOT}/data.pkl"),
                length: pickle.len() as u64,
            },
            NewMember {
                name: format!("{ROOT}/byteorder"),
                length: BYTE_ORDER.len() as u64,
            },
        ];
        members.extend(entries.iter().enumerate().map(|(index, (entry, _, dtype))| NewMember {
            name: format!("{ROOT}/data/{index}"),
            length: (entry.elements() * dtype.size_in_bytes()) as u64,
        }));
        members.push(NewMember {
            name: format!("{ROOT}/version"),
            length: VERSION.len() as u64,
        });
        Ok(TorchFile {
            entries,
            pickle,
            layout: ZipLayout::new(members),
        })
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.layout.length()
    }

    /// Writes it, one tensor in memory at a time.
    pub fn write(&self, out: &mut dyn Write, path: &std::path::Path) -> Result<()> {
        let written = self.layout.write(out, |index| match index {
            0 => Ok(self.pickle.clone()),
            1 => Ok(BYTE_ORDER.to_vec()),
            _ => match self.entries.get(index - 2) {
                Some((entry, _, dtype)) => entry.bytes_as(*dtype).map_err(WriteError::Tensor),
                None => Ok(VERSION.to_vec()),
            },
        });
        written.map_err(|error| match error {
            WriteError::Tensor(error) => error,
            WriteError::Io(error) => broken(path, error),
        })
    }
}

enum WriteError {
    Tensor(Error),
    Io(std::io::Error),
}

impl From<std::io::Error> for WriteError {
    fn from(error: std::io::Error) -> Self {
        WriteError::Io(error)
    }
}

/// `name: torch._utils._rebuild_tensor_v2((storage), 0, shape, strides, False, OrderedDict())`.
fn put_tensor(pickle: &mut Vec<u8>, index: usize, entry: &TensorEntry, name: &str, dtype: DType) -> Result<()> {
    let storage = match dtype {
        DType::F32 => "FloatStorage",
        DType::F64 => "DoubleStorage",
        DType::F16 => "HalfStorage",
        DType::BF16 => "BFloat16Storage",
        DType::I64 => "LongStorage",
        other => {
            return Err(Error::Input(format!(
                "tensor `{name}` is of the type {other:?}, which a .nemo archive cannot hold"
            )));
        }
    };
    put_text(pickle, name);
    pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
    put_text(pickle, "storage");
    pickle.extend(format!("ctorch\n{storage}\n").bytes());
    put_text(pickle, &index.to_string());
    put_text(pickle, "cpu");
    put_number(pickle, entry.elements());
    pickle.extend(b"tQ");
    put_number(pickle, 0);
    put_numbers(pickle, entry.shape().iter().copied());
    let mut stride = entry.elements();
    put_numbers(
        pickle,
        entry.shape().iter().map(|&size| {
            stride /= size.max(1);
            stride
        }),
    );
    pickle.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    Ok(())
}

fn put_text(pickle: &mut Vec<u8>, text: &str) {
    pickle.push(b'X');
    pickle.extend((text.len() as u32).to_le_bytes());
    pickle.extend(text.bytes());
}

fn put_numbers(pickle: &mut Vec<u8>, numbers: impl Iterator<Item = usize>) {
    pickle.push(b'(');
    numbers.for_each(|number| put_number(pickle, number));
    pickle.push(b't');
}

fn put_number(pickle: &mut Vec<u8>, number: usize) {
    match i32::try_from(number) {
        Ok(small) => {
            pickle.push(b'J');
            pickle.extend(small.to_le_bytes());
        }
        // Eight bytes and a zero, so that the number is not taken for a negative one.
        Err(_) => {
            pickle.extend([0x8a, 9]);
            pickle.extend((number as u64).to_le_bytes());
            pickle.push(0);
        }
    }
}
