//! A process other than 0: connects to process 0, then to all lower numbers, and accepts connections of higher ones.

use std::cell::Cell;
use std::io::{self, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::arrivals::{Refusals, answer, arrivals, is_closed, miscounted};
use super::connect::{Client, ReadUntil, Server, connect};
use super::frame;
use super::greeting::Hello;
use super::handshake::Handshake;
use super::joining::{Address, Join, JoinError, JoinMessage, Joined, failed};
use super::listeners::Listeners;
use super::peer::Peer;
use super::settings::encoded;

pub(super) fn follow(join: &Join, until: Instant, tell: &dyn Fn(JoinMessage)) -> Result<Joined, JoinError> {
    let (count, own) = (join.processes, join.process);
    // Nobody connects to the last one.
    let listeners = match own + 1 < count {
        true => Some(Listeners::open(join, join.port.unwrap_or(0), until, tell)?),
        false => None,
    };
    let hello = Hello::new(count, own, listeners.as_ref().map_or(0, Listeners::port));
    let with_run = |run: &[u8; 32]| Handshake::new(own, join.secret.as_ref(), run);
    let leader = Server {
        process: 0,
        addresses: std::slice::from_ref(&join.leader),
        name: format!("process 0 at {}", join.leader),
    };
    let client = Client {
        handshake: with_run(join.digest.as_bytes()),
        hello: &hello,
        settings: &encoded(&join.settings),
    };
    let stream = connect(&leader, &client, until)?;
    let (token, rows) = table(&stream, count, until, join)?;
    let mut peers = Vec::with_capacity(count);
    let mut streams: Vec<Option<TcpStream>> = (0..count).map(|_| None).collect();
    streams[0] = Some(stream);
    let client = Client {
        handshake: with_run(&token),
        hello: &hello,
        settings: &[],
    };
    for (process, row) in rows.into_iter().enumerate() {
        if process > 0 && process < own {
            // Where the file of hosts says, or else where process 0 sees it.
            let seen = if row.ip.is_empty() { &join.leader.host } else { &row.ip };
            let mut hosts = vec![join.hosts.get(process).unwrap_or(seen)];
            if !hosts.contains(&seen) {
                hosts.push(seen);
            }
            let at = |host: &&String| Address {
                host: (*host).clone(),
                port: row.port,
            };
            let addresses: Vec<Address> = hosts.iter().map(at).collect();
            let name = format!("process {process} at {} ({})", addresses[0], row.host);
            let server = Server {
                process,
                addresses: &addresses,
                name,
            };
            streams[process] = Some(connect(&server, &client, until)?);
        }
        peers.push(Peer {
            process,
            host: row.host,
            pid: row.pid,
        });
    }
    if let Some(listeners) = &listeners {
        let refusals = Refusals::new(tell);
        let handshake = &client.handshake;
        arrivals(
            listeners,
            handshake,
            &Cell::new(until),
            |why| refusals.add(why),
            |arrival| {
                let hello = &arrival.hello;
                let process = hello.process as usize;
                let refusal = if miscounted(hello, count).is_some() || hello.run != handshake.run {
                    Some("it is of another run")
                } else if process <= own || process >= count {
                    Some("there is no place for it here")
                } else if streams[process].as_ref().is_some_and(|other| !is_closed(other)) {
                    Some("another one of its number is there already")
                } else {
                    None
                };
                let answered = answer(&arrival.stream, refusal);
                if let Some(why) = refusal {
                    refusals.add(format!("{}: {why}", hello.name()));
                } else if answered.is_ok() {
                    streams[process] = Some(arrival.stream);
                }
                streams.iter().skip(own + 1).all(Option::is_some).then_some(())
            },
        );
    }
    let missing = (0..count).find(|&process| process != join.process && streams[process].is_none());
    if let Some(missing) = missing {
        return Err(failed(
            format!(
                "{} did not come to this process, {}, in time",
                peers[missing], join.process
            ),
            "every process must be able to reach every other one; see docs/machines.md for the ports",
        ));
    }
    Ok((peers, streams))
}

/// The table's entry of one process.
struct Row {
    ip: String,
    port: u16,
    pid: u32,
    host: String,
}

fn table(stream: &TcpStream, count: usize, until: Instant, join: &Join) -> Result<([u8; 32], Vec<Row>), JoinError> {
    // A little longer than process 0 waits, so that it reports which process is missing.
    let mut from = ReadUntil::new(stream, until + Duration::from_secs(2));
    let io = |error: io::Error| {
        let why = match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                format!("not all processes came within {} s", join.timeout.as_secs_f64())
            }
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                "process 0 ended before all processes had come".to_owned()
            }
            _ => format!("process 0 was lost before all processes had come: {error}"),
        };
        failed(why, "start all again")
    };
    let mut status = [0u8; 1];
    from.read_exact(&mut status).map_err(io)?;
    if status[0] != 0 {
        let why = frame::read_reason(&mut from).map_err(io)?;
        return Err(failed(why, "start all again"));
    }
    let mut token = [0u8; 32];
    from.read_exact(&mut token).map_err(io)?;
    let mut rows = Vec::new();
    for _ in 0..count {
        rows.push(Row {
            ip: frame::read_text(&mut from).map_err(io)?,
            port: frame::read_u16(&mut from).map_err(io)?,
            pid: frame::read_u32(&mut from).map_err(io)?,
            host: frame::read_text(&mut from).map_err(io)?,
        });
    }
    Ok((token, rows))
}
