//! The connection to one process: a thread that writes, a thread that reads.

use std::io::{self, BufReader, BufWriter, Write};
use std::net::{Shutdown, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, unbounded};

use super::frame::{self, FrameKind};
use super::peer::{End, Payload, Peer};
use super::state::GroupState;

/// Interval of heartbeats on an idle connection.
const BEAT: Duration = Duration::from_secs(2);

/// A process is lost after this time without data: its machine or the network failed, or it was stopped. A busy process
/// sends heartbeats from a separate thread.
const SILENCE: Duration = Duration::from_secs(60);

/// What is to be written.
pub(super) enum Outgoing {
    Message { topic: u32, body: Box<dyn Payload> },
    Signal(i32),
    End(End),
    Bye(Sender<()>),
}

/// Starts the threads. They end with the connection.
pub(super) fn start(shared: &Arc<GroupState>, peer: Peer, stream: TcpStream) -> io::Result<Sender<Outgoing>> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE))?;
    // Data may wait as long as the other side is heard of; the handshake had a timeout.
    stream.set_write_timeout(None)?;
    let (send, outgoing) = unbounded();
    let (writing, reading) = (stream.try_clone()?, stream);
    let (at_writer, at_reader) = (Arc::clone(shared), Arc::clone(shared));
    let to = peer.clone();
    thread::Builder::new()
        .name(format!("to-process-{}", peer.process))
        .spawn(move || {
            if let Err(error) = write(&writing, &outgoing, &at_writer) {
                at_writer.closed(&to, &why(&error));
            }
            // Nothing more is sent; the other side may still send data.
            let _ = writing.shutdown(Shutdown::Write);
        })?;
    thread::Builder::new()
        .name(format!("from-process-{}", peer.process))
        .spawn(move || {
            // Listeners run on this thread: a panic of theirs must end the connection, too.
            let ended = catch_unwind(AssertUnwindSafe(|| read(&reading, &peer, &at_reader)));
            let told = match ended {
                Ok(Ok(())) => ENDED.to_owned(),
                Ok(Err(error)) => why(&error),
                Err(_) => "sent what ended the thread that reads its messages".to_owned(),
            };
            at_reader.closed(&peer, &told);
            let _ = reading.shutdown(Shutdown::Both);
        })?;
    Ok(send)
}

const ENDED: &str = "ended without a message";

/// Describes what an error of a connection means for the process at its other end.
fn why(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            format!("was not heard of for {} s", SILENCE.as_secs())
        }
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => ENDED.to_owned(),
        io::ErrorKind::InvalidData => format!("sent what no process of a run sends ({error})"),
        _ => format!("cannot be reached any more: {error}"),
    }
}

fn write(stream: &TcpStream, outgoing: &Receiver<Outgoing>, shared: &GroupState) -> io::Result<()> {
    let mut to = BufWriter::with_capacity(1 << 16, stream);
    loop {
        let next = match outgoing.try_recv() {
            Ok(next) => next,
            Err(TryRecvError::Disconnected) => return to.flush(),
            Err(TryRecvError::Empty) => {
                to.flush()?;
                match outgoing.recv_timeout(BEAT) {
                    Ok(next) => next,
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                    Err(RecvTimeoutError::Timeout) => {
                        frame::header(&mut to, FrameKind::Beat, 0, 0)?;
                        continue;
                    }
                }
            }
        };
        match next {
            Outgoing::Message { topic, body } => {
                shared.sent.fetch_add(frame::HEADER + body.size(), Ordering::Relaxed);
                frame::header(&mut to, FrameKind::Message, topic, body.size())?;
                body.write(&mut to)?;
            }
            Outgoing::Signal(signal) => frame::header(&mut to, FrameKind::Signal, signal as u32, 0)?,
            Outgoing::End(End { code, message }) => {
                frame::header(&mut to, FrameKind::End, u32::from(code), message.len() as u64)?;
                to.write_all(message.as_bytes())?;
            }
            Outgoing::Bye(written) => {
                frame::header(&mut to, FrameKind::Bye, 0, 0)?;
                to.flush()?;
                // The waiting thread may have continued.
                let _ = written.send(());
            }
        }
    }
}

/// Until the connection ends.
fn read(stream: &TcpStream, peer: &Peer, shared: &GroupState) -> io::Result<()> {
    let mut from = BufReader::with_capacity(1 << 16, stream);
    while let Some(frame) = frame::read(&mut from, |topic, bytes| shared.admit(topic, bytes))? {
        let bytes = frame::HEADER + frame.body.len() as u64;
        shared.received.fetch_add(bytes, Ordering::Relaxed);
        match frame.kind {
            FrameKind::Beat => {}
            FrameKind::Message => shared.deliver(peer.process, frame.number, frame.body)?,
            FrameKind::Signal => shared.signal(frame.number as i32),
            // Only process 0 may end the run.
            FrameKind::End if peer.process == 0 => shared.end(End {
                code: u8::try_from(frame.number).unwrap_or(u8::MAX),
                message: String::from_utf8_lossy(&frame.body).into_owned(),
            }),
            FrameKind::End => {}
            FrameKind::Bye => shared.goodbye(peer.process),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// A process that is busy for longer than a handshake may take is not lost.
    #[test]
    fn messages_are_written_without_the_timeout_of_the_handshake() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
        let peer = Peer {
            process: 1,
            host: "here".into(),
            pid: 1,
        };
        let _link = start(&Arc::new(GroupState::new(2)), peer, stream.try_clone().unwrap()).unwrap();
        assert_eq!(stream.write_timeout().unwrap(), None);
    }
}
