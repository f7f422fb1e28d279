//! The protocol of a connection: a greeting, then frames.
//!
//! A frame is its kind (1 byte), a number (4 bytes: the topic of a message, a signal, an exit code), the length of its body
//! (8 bytes) and the body. Numbers are little-endian; bodies of stages hold numbers as the machine has them, so machines
//! whose byte orders differ refuse each other in the greeting.

use std::io::{self, Read, Write};

/// Version of the protocol. Processes of one run have the same.
pub(super) const VERSION: u32 = 2;

/// The first bytes of both sides.
pub(super) const MAGIC: &[u8; 8] = b"flow-pr\n";

const ORDER: u32 = 0x0102_0304;

/// Bytes of a frame before its body.
pub(super) const HEADER: u64 = 13;

/// The longest body; a larger length counts as damage.
const LONGEST: u64 = 1 << 34;

/// The most bytes of settings in a greeting.
pub(super) const SETTINGS: usize = 1 << 17;

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

/// Reads a frame. None where the connection ends before one begins.
pub(super) fn read(from: &mut dyn Read) -> io::Result<Option<Frame>> {
    let mut first = [0u8; 1];
    if from.read(&mut first)? == 0 {
        return Ok(None);
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
    let Some(kind) = kind.filter(|_| length <= LONGEST) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a frame of kind {} with {length} bytes", first[0]),
        ));
    };
    let mut body = Vec::with_capacity(length.min(BELIEVED) as usize);
    from.take(length).read_to_end(&mut body)?;
    if body.len() as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(Frame { kind, number, body }))
}

/// The greeting of a connecting process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub version: u32,
    pub order: u32,
    pub processes: u32,
    pub process: u32,
    /// To process 0 the digest of pipeline and settings, to others the token that process 0 sent to all.
    pub token: [u8; 32],
    /// Where it listens for other processes.
    pub port: u16,
    pub pid: u32,
    pub host: String,
    /// To process 0: the settings in the digest, so that it can name differences. Empty: unknown.
    pub settings: Vec<u8>,
}

impl Hello {
    pub fn new(processes: usize, process: usize, token: [u8; 32], port: u16) -> Hello {
        Hello {
            version: VERSION,
            order: u32::from_le_bytes(ORDER.to_ne_bytes()),
            processes: processes as u32,
            process: process as u32,
            token,
            port,
            pid: std::process::id(),
            host: crate::host::host_name(),
            settings: Vec::new(),
        }
    }

    /// The same with settings, unless they are too many.
    pub fn with_settings(mut self, settings: &[(String, String)]) -> Hello {
        let bytes = serde_json::to_vec(settings).unwrap_or_default();
        if bytes.len() <= SETTINGS {
            self.settings = bytes;
        }
        self
    }

    /// Why this greeting of a process of the same version cannot be accepted.
    pub fn wrong(&self, processes: usize) -> Option<String> {
        if self.version != VERSION {
            return Some(format!(
                "it speaks version {} of the protocol, process 0 version {VERSION}; all processes must be the same program",
                self.version
            ));
        }
        if self.order != u32::from_le_bytes(ORDER.to_ne_bytes()) {
            return Some("its machine has another byte order".into());
        }
        if self.processes as usize != processes {
            return Some(format!(
                "it was told that there are {} processes, process 0 that there are {processes}",
                self.processes
            ));
        }
        None
    }

    pub fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        let mut bytes = MAGIC.to_vec();
        for number in [self.version, self.order, self.processes, self.process] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.token);
        bytes.extend(self.port.to_le_bytes());
        bytes.extend(self.pid.to_le_bytes());
        text(&mut bytes, &self.host);
        bytes.extend((self.settings.len() as u32).to_le_bytes());
        bytes.extend(&self.settings);
        to.write_all(&bytes)
    }

    /// Reads a greeting. None where the other side uses another protocol.
    pub fn read(from: &mut dyn Read) -> io::Result<Option<Hello>> {
        if !is_magic(from)? {
            return Ok(None);
        }
        let mut number = || read_u32(from);
        let (version, order, processes, process) = (number()?, number()?, number()?, number()?);
        let mut token = [0u8; 32];
        from.read_exact(&mut token)?;
        let (port, pid, host) = (read_u16(from)?, read_u32(from)?, read_text(from)?);
        // Version 1 ends here; it is parsed so that the process can be refused with a reason.
        let length = if version == 1 { 0 } else { read_u32(from)? as usize };
        if length > SETTINGS {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut settings = vec![0u8; length];
        from.read_exact(&mut settings)?;
        Ok(Some(Hello {
            version,
            order,
            processes,
            process,
            token,
            port,
            pid,
            host,
            settings,
        }))
    }
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

/// Whether the first bytes are the magic of this protocol.
///
/// # Errors
/// If no bytes arrive: a peer that closes the connection at once may respond to another attempt.
pub(super) fn is_magic(from: &mut dyn Read) -> io::Result<bool> {
    let mut magic = [0u8; MAGIC.len()];
    from.read_exact(&mut magic[..1])?;
    match from.read_exact(&mut magic[1..]) {
        Ok(()) => Ok(&magic == MAGIC),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}
