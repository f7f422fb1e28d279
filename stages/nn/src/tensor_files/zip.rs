//! The zip container of PyTorch checkpoints, whose members are stored as they are, and of NumPy's `.npz`, where they may be
//! compressed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;

use flate2::read::DeflateDecoder;

/// Part of an open file: a whole file, or a member of an uncompressed archive.
pub struct Region<'a> {
    pub file: &'a File,
    pub start: u64,
    pub length: u64,
}

impl Region<'_> {
    /// The bytes `offset .. offset + length` of the region.
    pub fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>, String> {
        if offset.checked_add(length).is_none_or(|end| end > self.length) {
            return Err(format!("is cut off: {length} bytes at {offset} are missing"));
        }
        let size = usize::try_from(length).map_err(|_| format!("has a member of {length} bytes"))?;
        let mut bytes = vec![0; size];
        self.file
            .read_exact_at(&mut bytes, self.start + offset)
            .map_err(|error| match error.kind() {
                ErrorKind::UnexpectedEof => "is cut off".to_string(),
                _ => error.to_string(),
            })?;
        Ok(bytes)
    }
}

/// Offset and length in bytes of a member's contents, within the region of the zip file.
#[derive(Clone, Copy)]
pub struct Member {
    pub offset: u64,
    pub length: u64,
}

const END_OF_DIRECTORY: usize = 22;
const ZIP64_LOCATOR: usize = 20;
const ZIP64_END: u64 = 56;
const DIRECTORY_ENTRY: usize = 46;
const LOCAL_HEADER: u64 = 30;
/// A directory larger than this is refused: that of the largest known model has 0.1 MB.
const MAX_DIRECTORY: u64 = 64 << 20;

fn u16_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes
        .get(at..at + 2)
        .map(|b| u64::from(u16::from_le_bytes([b[0], b[1]])))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes
        .get(at..at + 4)
        .map(|b| u64::from(u32::from_le_bytes([b[0], b[1], b[2], b[3]])))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u32_at(bytes, at)? | u32_at(bytes, at + 4)? << 32)
}

/// Lists the members of a zip file by name, all of which must be stored.
pub fn members(region: &Region) -> Result<BTreeMap<String, Member>, String> {
    let members = packed_members(region)?;
    let stored = |(name, member): (String, PackedMember)| match member.deflated {
        None => Ok((name, member.member)),
        Some(_) => Err(format!(
            "has a compressed member `{name}`, which PyTorch does not write"
        )),
    };
    members.into_iter().map(stored).collect()
}

/// A member that may be compressed.
#[derive(Clone, Copy)]
pub struct PackedMember {
    /// Its length is that of what it holds.
    member: Member,
    /// The length that it takes in the file, if it is compressed (DEFLATE).
    deflated: Option<u64>,
}

impl PackedMember {
    /// Its decompressed content. More than `most` bytes are an error.
    pub fn read(&self, region: &Region, most: u64) -> Result<Vec<u8>, String> {
        let Member { offset, length } = self.member;
        if length > most {
            return Err(format!("has {length} bytes, where at most {most} are expected"));
        }
        let Some(packed) = self.deflated else {
            return region.read(offset, length);
        };
        if packed > most {
            return Err(format!("takes {packed} bytes, where at most {most} are expected"));
        }
        let packed = region.read(offset, packed)?;
        let mut bytes = Vec::new();
        let read = DeflateDecoder::new(&packed[..])
            .take(length + 1)
            .read_to_end(&mut bytes);
        match read {
            Ok(_) if bytes.len() as u64 == length => Ok(bytes),
            Ok(_) => Err(format!("is damaged: it does not hold {length} bytes")),
            Err(error) => Err(format!("is damaged: {error}")),
        }
    }
}

/// Lists the members of a zip file by name.
pub fn packed_members(region: &Region) -> Result<BTreeMap<String, PackedMember>, String> {
    let directory = read_directory(region)?;
    let mut members = BTreeMap::new();
    let mut rest = &directory[..];
    while u32_at(rest, 0) == Some(0x0201_4b50) {
        let (name, member, size) = read_entry(rest).ok_or("has a damaged zip directory")?;
        let Entry {
            header,
            length,
            packed,
            method,
        } = member;
        let deflated = match method {
            STORED => None,
            DEFLATED => Some(packed),
            other => return Err(format!("has a member `{name}` compressed by method {other}")),
        };
        let local = region.read(header, LOCAL_HEADER)?;
        if u32_at(&local, 0) != Some(0x0403_4b50) {
            return Err(format!("has a damaged header at member `{name}`"));
        }
        let names = u16_at(&local, 26).unwrap_or(0) + u16_at(&local, 28).unwrap_or(0);
        members.insert(
            name,
            PackedMember {
                member: Member {
                    offset: header + LOCAL_HEADER + names,
                    length,
                },
                deflated,
            },
        );
        rest = rest.get(size..).ok_or("has a damaged zip directory")?;
    }
    Ok(members)
}

fn read_directory(region: &Region) -> Result<Vec<u8>, String> {
    let tail_length = region.length.min(65_535 + (END_OF_DIRECTORY + ZIP64_LOCATOR) as u64);
    let tail_start = region.length - tail_length;
    let tail = region.read(tail_start, tail_length)?;
    let damaged = "has a damaged zip directory";
    let end = (0..(tail.len() + 1).saturating_sub(END_OF_DIRECTORY))
        .rev()
        .find(|&at| u32_at(&tail, at) == Some(0x0605_4b50))
        .ok_or("is not a zip file, or is cut off")?;
    let mut size = u32_at(&tail, end + 12).ok_or(damaged)?;
    let mut offset = u32_at(&tail, end + 16).ok_or(damaged)?;
    if let Some(locator) = end.checked_sub(ZIP64_LOCATOR)
        && u32_at(&tail, locator) == Some(0x0706_4b50)
    {
        let record = region.read(u64_at(&tail, locator + 8).ok_or(damaged)?, ZIP64_END)?;
        if u32_at(&record, 0) != Some(0x0606_4b50) {
            return Err(damaged.into());
        }
        size = u64_at(&record, 40).ok_or(damaged)?;
        offset = u64_at(&record, 48).ok_or(damaged)?;
    }
    if size > MAX_DIRECTORY {
        return Err(format!("has a zip directory of {size} bytes"));
    }
    region.read(offset, size)
}

/// How a member is in the file.
const STORED: u64 = 0;
const DEFLATED: u64 = 8;

struct Entry {
    header: u64,
    length: u64,
    /// The length that it takes in the file.
    packed: u64,
    method: u64,
}

/// Name, place and directory bytes of the first entry of `bytes`.
fn read_entry(bytes: &[u8]) -> Option<(String, Entry, usize)> {
    let method = u16_at(bytes, 10)?;
    let mut packed = u32_at(bytes, 20)?;
    let mut length = u32_at(bytes, 24)?;
    let name_length = u16_at(bytes, 28)? as usize;
    let extra_length = u16_at(bytes, 30)? as usize;
    let comment_length = u16_at(bytes, 32)? as usize;
    let mut header = u32_at(bytes, 42)?;
    let extra_start = DIRECTORY_ENTRY + name_length;
    let name = std::str::from_utf8(bytes.get(DIRECTORY_ENTRY..extra_start)?)
        .ok()?
        .to_string();
    let mut extra = bytes.get(extra_start..extra_start + extra_length)?;
    while extra.len() >= 4 {
        let (kind, size) = (u16_at(extra, 0)?, u16_at(extra, 2)? as usize);
        let field = extra.get(4..4 + size)?;
        if kind == 1 {
            // Zip64: 64-bit values of just those fields that hold the mark 0xffffffff, in this order.
            let mut at = 0;
            for value in [&mut length, &mut packed, &mut header] {
                if *value == 0xffff_ffff {
                    *value = u64_at(field, at)?;
                    at += 8;
                }
            }
        }
        extra = &extra[4 + size..];
    }
    let size = extra_start + extra_length + comment_length;
    Some((
        name,
        Entry {
            header,
            length,
            packed,
            method,
        },
        size,
    ))
}
