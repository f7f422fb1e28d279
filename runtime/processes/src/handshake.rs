//! The handshake of a connection: both sides prove that they know the secret of the run before either says anything of it.
//!
//! | from | message |
//! |---|---|
//! | connecting | greeting: protocol, number of the process, a nonce ([`Hello`]) |
//! | listening | challenge: number of the process, a nonce ([`Challenge`]) |
//! | connecting | its proof, 32 bytes |
//! | listening | its proof, 32 bytes |
//! | connecting | to process 0 its settings, so that differences can be named: their length (4 bytes), and JSON |
//! | listening | accepted |
//!
//! Instead of each answer the listening side may send why it refuses the process. A proof is a keyed BLAKE3 hash of the
//! side, the whole greeting and the whole challenge. So it holds for this connection alone (nonces), for this direction
//! (side), for these two processes and for this run. The connecting side proves first: who only connects learns nothing
//! that the secret goes into.
//!
//! Without a secret the handshake is the same with a key that everybody knows.

use std::fmt;
use std::io::{self, Read};

use flow_base::random_bytes::random_bytes;

use super::frame::{read_reason, read_u32, reason};
use super::greeting::{Hello, MAGIC, is_magic};

/// Contexts of BLAKE3's key derivation: never to be used for anything else.
const SECRET_CONTEXT: &str = "flow-runtime 2026-11-23 handshake between processes of one run";
const NO_SECRET_CONTEXT: &str = "flow-runtime 2026-11-23 handshake between processes of one run, no secret";

/// What only the processes of a run know. Kept as a key that is derived from it.
#[derive(Clone, PartialEq, Eq)]
pub struct SharedSecret([u8; 32]);

impl SharedSecret {
    /// From at least 16 bytes that nobody can guess: who has seen a handshake can try secrets as fast as they are hashed.
    pub fn new(bytes: &[u8]) -> SharedSecret {
        SharedSecret(blake3::derive_key(SECRET_CONTEXT, bytes))
    }
}

impl fmt::Debug for SharedSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedSecret")
    }
}

/// Which side of a connection proves something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Side {
    Connecting = 1,
    Listening = 2,
}

/// What a process shows and checks in the handshakes of its connections.
#[derive(Clone)]
pub(super) struct Handshake {
    /// The number of this process.
    pub process: usize,
    pub has_secret: bool,
    /// What the run is known by, hashed with the key: those without the secret cannot tell whether they know the run.
    pub run: [u8; 32],
    key: [u8; 32],
}

impl Handshake {
    /// `run`: to process 0 the digest of pipeline and settings, between others the token that process 0 sent to all.
    pub fn new(process: usize, secret: Option<&SharedSecret>, run: &[u8; 32]) -> Handshake {
        let key = match secret {
            Some(secret) => secret.0,
            None => blake3::derive_key(NO_SECRET_CONTEXT, b""),
        };
        // Proofs begin with the number of a side.
        let mut hasher = blake3::Hasher::new_keyed(&key);
        hasher.update(&[0]).update(run);
        Handshake {
            process,
            has_secret: secret.is_some(),
            run: *hasher.finalize().as_bytes(),
            key,
        }
    }

    /// The proof of a side of the connection that began with these bytes.
    pub fn proof(&self, side: Side, greeting: &[u8], challenge: &Challenge) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&[side as u8]);
        hasher.update(&(greeting.len() as u64).to_le_bytes());
        hasher.update(greeting).update(&challenge.bytes());
        hasher.finalize()
    }

    /// The greeting of this process for a new connection.
    ///
    /// # Errors
    /// Where there are no random numbers.
    pub fn greet(&self, hello: &Hello) -> io::Result<Hello> {
        Ok(Hello {
            run: self.run,
            nonce: random_bytes()?,
            has_secret: self.has_secret,
            ..hello.clone()
        })
    }

    /// The challenge of this process for a new connection.
    ///
    /// # Errors
    /// Where there are no random numbers.
    pub fn challenge(&self) -> io::Result<Challenge> {
        Ok(Challenge {
            nonce: random_bytes()?,
            process: self.process as u32,
            has_secret: self.has_secret,
        })
    }
}

/// The answer of a listening process to a greeting that it understands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Challenge {
    /// Random, and used for this connection alone.
    pub nonce: [u8; 32],
    /// The number of the listening process.
    pub process: u32,
    pub has_secret: bool,
}

impl Challenge {
    fn bytes(&self) -> [u8; 37] {
        let mut bytes = [0u8; 37];
        bytes[..32].copy_from_slice(&self.nonce);
        bytes[32..36].copy_from_slice(&self.process.to_le_bytes());
        bytes[36] = u8::from(self.has_secret);
        bytes
    }
}

/// What a listening process sends in a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Accepted,
    Refused(String),
    Challenge(Challenge),
    Proof([u8; 32]),
}

impl Answer {
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        match self {
            Answer::Accepted => bytes.push(0),
            Answer::Refused(why) => {
                bytes.push(1);
                reason(&mut bytes, why);
            }
            Answer::Challenge(challenge) => {
                bytes.push(2);
                bytes.extend(challenge.bytes());
            }
            Answer::Proof(proof) => {
                bytes.push(3);
                bytes.extend(proof);
            }
        }
        bytes
    }

    /// Reads an answer. None: this is none.
    pub fn read(from: &mut dyn Read) -> io::Result<Option<Answer>> {
        if !is_magic(from)? {
            return Ok(None);
        }
        let mut status = [0u8; 1];
        from.read_exact(&mut status)?;
        let mut bytes = [0u8; 32];
        Ok(match status[0] {
            0 => Some(Answer::Accepted),
            1 => Some(Answer::Refused(read_reason(from)?)),
            2 => {
                from.read_exact(&mut bytes)?;
                let process = read_u32(from)?;
                from.read_exact(&mut status)?;
                Some(Answer::Challenge(Challenge {
                    nonce: bytes,
                    process,
                    has_secret: status[0] != 0,
                }))
            }
            3 => {
                from.read_exact(&mut bytes)?;
                Some(Answer::Proof(bytes))
            }
            _ => None,
        })
    }
}
