//! The greeting: the first bytes of a connecting process. It names the process and the protocol, and nothing of the run.

use std::io::{self, Read};

use super::frame::{read_text, read_u16, read_u32, text};

/// Version of the protocol. Processes of one run have the same.
pub(super) const VERSION: u32 = 4;

/// The first bytes of a greeting, and of each answer of a handshake.
pub(super) const MAGIC: &[u8; 8] = b"flow-pr\n";

const ORDER: u32 = 0x0102_0304;

/// The most bytes of settings that a process sends.
pub(super) const SETTINGS: usize = 1 << 17;

/// No greeting is longer; those of version 2 have the settings in them.
pub(super) const LONGEST_GREETING: usize = 512 + SETTINGS;

/// Bytes of a nonce and of whether there is a secret.
const TAIL: usize = 33;

/// The greeting of a connecting process.
///
/// Its form is that of version 2 with other content, so that processes of either version can read which version the
/// other one is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub version: u32,
    pub order: u32,
    pub processes: u32,
    pub process: u32,
    /// What the run is known by, keyed by the secret: see [`super::handshake::Handshake`].
    pub run: [u8; 32],
    /// Where it listens for other processes; 0: it does not.
    pub port: u16,
    pub pid: u32,
    pub host: String,
    /// Random, and used for this connection alone.
    pub nonce: [u8; 32],
    pub has_secret: bool,
}

impl Hello {
    pub fn new(processes: usize, process: usize, port: u16) -> Hello {
        Hello {
            version: VERSION,
            order: u32::from_le_bytes(ORDER.to_ne_bytes()),
            processes: processes as u32,
            process: process as u32,
            run: [0; 32],
            port,
            pid: std::process::id(),
            host: flow_base::host::host_name(),
            nonce: [0; 32],
            has_secret: false,
        }
    }

    /// Why `own`, which listens, cannot talk to this process.
    pub fn incompatible(&self, own: usize) -> Option<String> {
        if self.version != VERSION {
            return Some(format!(
                "it speaks version {} of the protocol, process {own} version {VERSION}; all processes must be the same program",
                self.version
            ));
        }
        (self.order != u32::from_le_bytes(ORDER.to_ne_bytes())).then(|| "its machine has another byte order".into())
    }

    /// The process, for a message.
    pub fn name(&self) -> String {
        format!("process {} ({}, pid {})", self.process, self.host, self.pid)
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for number in [self.version, self.order, self.processes, self.process] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.run);
        bytes.extend(self.port.to_le_bytes());
        bytes.extend(self.pid.to_le_bytes());
        text(&mut bytes, &self.host);
        bytes.extend((TAIL as u32).to_le_bytes());
        bytes.extend(self.nonce);
        bytes.push(u8::from(self.has_secret));
        bytes
    }

    /// Reads a greeting. None where the other side uses another protocol.
    ///
    /// # Errors
    /// `UnexpectedEof` where it is not complete; `InvalidData` where it cannot become one.
    pub fn read(from: &mut dyn Read) -> io::Result<Option<Hello>> {
        if !is_magic(from)? {
            return Ok(None);
        }
        let mut number = || read_u32(from);
        let (version, order, processes, process) = (number()?, number()?, number()?, number()?);
        let mut run = [0u8; 32];
        from.read_exact(&mut run)?;
        let (port, pid, host) = (read_u16(from)?, read_u32(from)?, read_text(from)?);
        // Version 1 ends here. Other versions are read to their end, so that they can be refused with a reason.
        let length = if version == 1 { 0 } else { read_u32(from)? as usize };
        if length > SETTINGS || (version == VERSION && length != TAIL) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut tail = vec![0u8; length];
        from.read_exact(&mut tail)?;
        let (mut nonce, mut has_secret) = ([0u8; 32], false);
        if version == VERSION {
            nonce.copy_from_slice(&tail[..32]);
            has_secret = tail[32] != 0;
        }
        Ok(Some(Hello {
            version,
            order,
            processes,
            process,
            run,
            port,
            pid,
            host,
            nonce,
            has_secret,
        }))
    }
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
