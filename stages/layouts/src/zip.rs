//! The central directory of a `.zip`: its members, and where they are.

use std::io;

use flow_storage::InputFile;

/// What the directory ends with, before a comment of at most 65,535 bytes.
const END: [u8; 4] = *b"PK\x05\x06";
const END_LENGTH: usize = 22;
/// Of archives with more than 65,535 members or 4 GiB: where its larger form is.
const LOCATOR: [u8; 4] = *b"PK\x06\x07";
const LOCATOR_LENGTH: usize = 20;
const LARGE_END: [u8; 4] = *b"PK\x06\x06";
const LARGE_END_LENGTH: usize = 56;
const ENTRY: [u8; 4] = *b"PK\x01\x02";
const ENTRY_LENGTH: usize = 46;
const LOCAL: [u8; 4] = *b"PK\x03\x04";
const LOCAL_LENGTH: usize = 30;
/// Most bytes of a directory.
const LARGEST_DIRECTORY: u64 = 1 << 30;
/// The value of a number that is in the further field, as in large archives.
const ELSEWHERE: u64 = 0xffff_ffff;
const LARGE_FIELD: u16 = 1;
/// The flags of an encrypted member.
const ENCRYPTED: u16 = 1 | 1 << 6;

/// How a member is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Stored,
    Deflated,
    /// Another one, or encrypted.
    Other,
}

/// A file in an archive. Sizes and places are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub name: String,
    pub method: Method,
    pub size: u64,
    pub packed_size: u64,
    /// CRC-32 of its bytes.
    pub sum: u32,
    /// Where the header before its data begins.
    header: u64,
}

impl Member {
    /// Where its data begins, by the header before it.
    ///
    /// # Errors
    /// When it cannot be read, or the data would reach past the end of the file.
    pub fn data(&self, file: &InputFile) -> io::Result<u64> {
        let mut header = [0; LOCAL_LENGTH];
        file.read_exact_at(&mut header, self.header)?;
        if !header.starts_with(&LOCAL) {
            return Err(damaged("a member has no header"));
        }
        let offset =
            self.header + (LOCAL_LENGTH + usize::from(short(&header, 26)) + usize::from(short(&header, 28))) as u64;
        match offset.checked_add(self.packed_size) {
            Some(end) if end <= file.length()? => Ok(offset),
            _ => Err(damaged("a member reaches past its end")),
        }
    }
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("it is not a zip archive, or damaged: {why}"),
    )
}

fn short(bytes: &[u8], at: usize) -> u16 {
    let bytes = bytes.get(at..at + 2).and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, u16::from_le_bytes)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, |bytes| u64::from(u32::from_le_bytes(bytes)))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    word(bytes, at) | word(bytes, at + 4) << 32
}

/// Where the directory begins, and its length.
fn directory(file: &InputFile) -> io::Result<(u64, u64)> {
    let length = file.length()?;
    let most = (END_LENGTH + LOCATOR_LENGTH + usize::from(u16::MAX)) as u64;
    let start = length.saturating_sub(most);
    let mut tail = vec![0; usize::try_from(length - start).unwrap_or(0)];
    file.read_exact_at(&mut tail, start)?;
    let mut places = (0..tail.len().saturating_sub(END_LENGTH - 1)).rev();
    let is_end = |at: &usize| {
        let end = &tail[*at..];
        end.starts_with(&END) && END_LENGTH + usize::from(short(end, 20)) == end.len()
    };
    let at = places
        .find(is_end)
        .ok_or_else(|| damaged("it does not end with a directory"))?;
    let locator = at
        .checked_sub(LOCATOR_LENGTH)
        .map(|at| &tail[at..])
        .filter(|tail| tail.starts_with(&LOCATOR));
    let (begin, size) = match locator {
        None => (word(&tail[at..], 16), word(&tail[at..], 12)),
        Some(locator) => {
            let mut end = [0; LARGE_END_LENGTH];
            file.read_exact_at(&mut end, long(locator, 8))?;
            if !end.starts_with(&LARGE_END) {
                return Err(damaged("its directory does not end"));
            }
            (long(&end, 48), long(&end, 40))
        }
    };
    match begin.checked_add(size) {
        Some(end) if end <= length && size <= LARGEST_DIRECTORY => Ok((begin, size)),
        _ => Err(damaged("its directory reaches past its end")),
    }
}

/// The files of an archive whose names are UTF-8, without folders.
///
/// # Errors
/// When it cannot be read, or is no such archive (`InvalidData`).
pub fn members(file: &InputFile) -> io::Result<Vec<Member>> {
    let (begin, size) = directory(file)?;
    let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
    file.read_exact_at(&mut bytes, begin)?;
    let (mut found, mut rest) = (Vec::new(), &bytes[..]);
    while rest.starts_with(&ENTRY) {
        if rest.len() < ENTRY_LENGTH {
            return Err(damaged("its directory is cut short"));
        }
        let [name, further, comment] = [28, 30, 32].map(|at| usize::from(short(rest, at)));
        let end = ENTRY_LENGTH + name + further + comment;
        if rest.len() < end {
            return Err(damaged("its directory is cut short"));
        }
        let further = &rest[ENTRY_LENGTH + name..ENTRY_LENGTH + name + further];
        let mut numbers = [word(rest, 24), word(rest, 20), word(rest, 42)];
        large_numbers(further, &mut numbers);
        let [size, packed_size, header] = numbers;
        let method = match (short(rest, 8) & ENCRYPTED, short(rest, 10)) {
            (0, 0) if size == packed_size => Method::Stored,
            (0, 8) => Method::Deflated,
            _ => Method::Other,
        };
        if let Ok(name) = std::str::from_utf8(&rest[ENTRY_LENGTH..ENTRY_LENGTH + name])
            && !name.ends_with('/')
        {
            found.push(Member {
                name: name.to_owned(),
                method,
                size,
                packed_size,
                sum: u32::try_from(word(rest, 16)).unwrap_or(0),
                header,
            });
        }
        rest = &rest[end..];
    }
    match rest.is_empty() {
        true => Ok(found),
        false => Err(damaged("its directory has something else in it")),
    }
}

/// Replaces the numbers that are in the further field, which has them in this order.
fn large_numbers(mut fields: &[u8], numbers: &mut [u64; 3]) {
    while fields.len() >= 4 {
        let (id, size) = (short(fields, 0), usize::from(short(fields, 2)));
        let value = &fields[4..fields.len().min(4 + size)];
        if id == LARGE_FIELD {
            let elsewhere = numbers.iter_mut().filter(|number| **number == ELSEWHERE);
            for (number, at) in elsewhere.zip((0..value.len().saturating_sub(7)).step_by(8)) {
                *number = long(value, at);
            }
            return;
        }
        fields = fields.get(4 + size..).unwrap_or_default();
    }
}
