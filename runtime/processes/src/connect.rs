//! Connects to a listening process, and proves that this one belongs to the run.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use super::greeting::Hello;
use super::handshake::{Answer, Handshake, Side};
use super::joining::{AGAIN, Address, JoinError, failed};
use super::pending::HANDSHAKE_TIMEOUT;

/// The listening process that is to be reached.
pub(super) struct Server<'a> {
    pub process: usize,
    /// Tried in this order.
    pub addresses: &'a [Address],
    /// For messages.
    pub name: String,
}

/// What the connecting process says.
pub(super) struct Client<'a> {
    pub handshake: Handshake,
    pub hello: &'a Hello,
    /// Only for a process that has proved that it knows the secret.
    pub settings: &'a [u8],
}

/// Connects and goes through the handshake, repeatedly until the other side responds: it may be busy, and close
/// connections that it has not read yet.
pub(super) fn connect(server: &Server, client: &Client, until: Instant) -> Result<TcpStream, JoinError> {
    let unreachable = |why: &dyn fmt::Display| {
        failed(
            format!("{} cannot be reached: {why}", server.name),
            "is it started, with that host and port, and is there no firewall between them?",
        )
    };
    let mut last = unreachable(&"no time was left");
    while Instant::now() < until {
        for address in server.addresses {
            match open(address, until) {
                Ok(stream) => match shake_hands(stream, server, client, until) {
                    Err(error @ JoinError::Failed { .. }) => last = error,
                    decided => return decided,
                },
                Err(error) => last = unreachable(&error),
            }
        }
        thread::sleep((AGAIN * 5).min(until.saturating_duration_since(Instant::now())));
    }
    Err(last)
}

fn open(address: &Address, until: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "its host has no address");
    for socket in address.resolve()? {
        let left = until.saturating_duration_since(Instant::now());
        let patience = left.clamp(Duration::from_millis(10), Duration::from_secs(5));
        match TcpStream::connect_timeout(&socket, patience) {
            // Linux may connect a socket to itself where no process listens and the port is free.
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                last = io::ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The connecting side of a handshake.
fn shake_hands(
    mut stream: TcpStream,
    server: &Server,
    client: &Client,
    until: Instant,
) -> Result<TcpStream, JoinError> {
    let Server { process, name, .. } = server;
    let Client { handshake, hello, .. } = client;
    let own = hello.process;
    let io = |error: io::Error| {
        failed(
            format!("{name} did not answer: {error}"),
            "is something else listening there?",
        )
    };
    let refused = |message: String| JoinError::Refused { message };
    let unexpected = |answer: Option<Answer>| match answer {
        Some(Answer::Refused(why)) => refused(format!("{name} refuses process {own}: {why}")),
        _ => refused(format!("{name}: what listens there is not a process of a run")),
    };
    let left = until.saturating_duration_since(Instant::now());
    let patience = left.clamp(Duration::from_millis(100), HANDSHAKE_TIMEOUT);
    stream.set_write_timeout(Some(patience)).map_err(io)?;
    let reader = stream.try_clone().map_err(io)?;
    let mut from = ReadUntil::new(&reader, Instant::now() + patience);
    let hello = handshake.greet(hello);
    let hello = hello.map_err(|error| failed(format!("no random numbers for a handshake: {error}"), ""))?;
    let greeting = hello.bytes();
    stream.write_all(&greeting).map_err(io)?;
    let challenge = match Answer::read(&mut from).map_err(io)? {
        Some(Answer::Challenge(challenge)) => challenge,
        other => return Err(unexpected(other)),
    };
    if challenge.process as usize != *process {
        return Err(refused(format!("{name}: process {} listens there", challenge.process)));
    }
    let ignorant = || {
        refused(format!(
            "{name} does not know the secret of process {own} (--secret-file)"
        ))
    };
    if handshake.has_secret && !challenge.has_secret {
        // Nothing that the secret goes into is sent to it.
        return Err(ignorant());
    }
    let proof = handshake.proof(Side::Connecting, &greeting, &challenge);
    stream.write_all(proof.as_bytes()).map_err(io)?;
    match Answer::read(&mut from).map_err(io)? {
        // Digests are compared in constant time.
        Some(Answer::Proof(given)) => {
            let expected = handshake.proof(Side::Listening, &greeting, &challenge);
            if blake3::Hash::from_bytes(given) != expected {
                return Err(ignorant());
            }
        }
        other => return Err(unexpected(other)),
    }
    stream
        .write_all(&(client.settings.len() as u32).to_le_bytes())
        .and_then(|()| stream.write_all(client.settings))
        .map_err(io)?;
    match Answer::read(&mut from).map_err(io)? {
        Some(Answer::Accepted) => {}
        other => return Err(unexpected(other)),
    }
    Ok(stream)
}

/// Reads until a point in time, however slowly the bytes come.
pub(super) struct ReadUntil<'a> {
    stream: &'a TcpStream,
    until: Instant,
}

impl ReadUntil<'_> {
    pub fn new(stream: &TcpStream, until: Instant) -> ReadUntil<'_> {
        ReadUntil { stream, until }
    }
}

impl Read for ReadUntil<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}
