//! Frames, of which a connection is made after its handshake.
//!
//! A frame is its kind (1 byte), a number (4 bytes: the topic of a message, a signal, an exit code), the length of its body
//! (8 bytes) and the body. Numbers are little-endian; bodies of stages hold numbers as the machine has them, so machines
//! whose byte orders differ refuse each other in the handshake.

use std::io::{self, Read, Write};

/// Bytes of a frame before its body.
pub(super) const HEADER: u64 = 13;

/// The longest body; a larger length counts as damage.
const LONGEST: u64 = 1 << 34;

/// The longest body of a frame that is no message: of the end of a run, which says why.
const LONGEST_END: u64 = 1 << 24;

/// The most bytes of a reason to refuse a process.
const REASON: usize = 4096;

/// Most memory that is allocated by a length alone; more only as data arrives.
const BELIEVED: u64 = 1 << 26;

/// Kinds of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum FrameKind {
    /// A heartbeat.
    Beat = 0,
    Message = 1,
    Signal = 2,
    End = 3,
    Bye = 4,
}

pub(super) struct Frame {
    pub kind: FrameKind,
    pub number: u32,
    pub body: Vec<u8>,
}

pub(super) fn header(to: &mut dyn Write, kind: FrameKind, number: u32, length: u64) -> io::Result<()> {
    let mut bytes = [0u8; 13];
    bytes[0] = kind as u8;
    bytes[1..5].copy_from_slice(&number.to_le_bytes());
    bytes[5..].copy_from_slice(&length.to_le_bytes());
    to.write_all(&bytes)
}

/// Reads a frame. None where the connection ends before one begins. `admit` may refuse a message by its topic and length,
/// before any of it is read.
pub(super) fn read(from: &mut dyn Read, admit: impl FnOnce(u32, u64) -> io::Result<()>) -> io::Result<Option<Frame>> {
    let mut first = [0u8; 1];
    loop {
        match from.read(&mut first) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            // The process was stopped and continued, or got a signal: a socket with a timeout says so.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let mut rest = [0u8; 12];
    from.read_exact(&mut rest)?;
    let [n0, n1, n2, n3, length @ ..] = rest;
    let (number, length) = (u32::from_le_bytes([n0, n1, n2, n3]), u64::from_le_bytes(length));
    let kinds = [
        FrameKind::Beat,
        FrameKind::Message,
        FrameKind::Signal,
        FrameKind::End,
        FrameKind::Bye,
    ];
    let kind = kinds.into_iter().find(|kind| *kind as u8 == first[0]);
    let longest = |kind: &FrameKind| match kind {
        FrameKind::Message => LONGEST,
        _ => LONGEST_END,
    };
    let Some(kind) = kind.filter(|kind| length <= longest(kind)) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a frame of kind {} with {length} bytes", first[0]),
        ));
    };
    if kind == FrameKind::Message {
        admit(number, length)?;
    }
    let mut body = Vec::with_capacity(length.min(BELIEVED) as usize);
    from.take(length).read_to_end(&mut body)?;
    if body.len() as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(Frame { kind, number, body }))
}

/// Appends why a process is refused.
pub(super) fn reason(bytes: &mut Vec<u8>, text: &str) {
    let mut length = text.len().min(REASON);
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    bytes.extend((length as u16).to_le_bytes());
    bytes.extend(&text.as_bytes()[..length]);
}

pub(super) fn read_reason(from: &mut dyn Read) -> io::Result<String> {
    let mut bytes = vec![0u8; usize::from(read_u16(from)?).min(REASON)];
    from.read_exact(&mut bytes)?;
    Ok(shown(&bytes))
}

/// Text of another process, escaped for display.
fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).replace(char::is_control, "?")
}

/// Appends at most 255 bytes of text with their number.
pub(super) fn text(bytes: &mut Vec<u8>, text: &str) {
    let mut length = text.len().min(255);
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    bytes.push(length as u8);
    bytes.extend(&text.as_bytes()[..length]);
}

pub(super) fn read_text(from: &mut dyn Read) -> io::Result<String> {
    let mut length = [0u8; 1];
    from.read_exact(&mut length)?;
    let mut bytes = vec![0u8; usize::from(length[0])];
    from.read_exact(&mut bytes)?;
    Ok(shown(&bytes))
}

pub(super) fn read_u16(from: &mut dyn Read) -> io::Result<u16> {
    let mut bytes = [0u8; 2];
    from.read_exact(&mut bytes)?;
    Ok(u16::from_le_bytes(bytes))
}

pub(super) fn read_u32(from: &mut dyn Read) -> io::Result<u32> {
    let mut bytes = [0u8; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}
