//! Rendezvous of the processes of a run: all connect to process 0, which sends each the addresses of the others.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::frame::{self, Hello, MAGIC};
use super::group::Processes;
use super::peer::Peer;
use super::pending::{Arrival, HANDSHAKE_TIMEOUT, PendingConnections};
use crate::digest::Digest;

/// Polling interval.
const AGAIN: Duration = Duration::from_millis(20);

/// Refusals that are reported at once; of later ones only the last is reported, at the end.
const TOLD: usize = 20;

/// A process with other settings is refused; for this time another one of its number with the right settings may
/// connect.
const SECOND_TRY: Duration = Duration::from_secs(10);

/// Most differing settings that are named.
const NAMED: usize = 5;

/// Most characters of a setting's name or value that are shown; longer values are compared by digest.
const SHOWN: usize = 80;

/// The address of process 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub host: String,
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl Address {
    /// Whether the host is a loopback name or address.
    fn is_local(&self) -> bool {
        self.host == "localhost" || self.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }

    fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        (self.host.as_str(), self.port).to_socket_addrs().map(Iterator::collect)
    }
}

/// The parameters for joining the other processes.
#[derive(Clone, Debug)]
pub struct Join {
    pub process: usize,
    pub processes: usize,
    /// Process 0.
    pub leader: Address,
    /// The port at which another process than 0 listens; none: any that is free.
    pub port: Option<u16>,
    /// Of pipeline and settings: the same for all.
    pub digest: Digest,
    /// The settings in the digest, by name, the most informative first, so that differences can be named.
    pub settings: Vec<(String, String)>,
    /// How long to wait for the others.
    pub timeout: Duration,
}

/// Why the rendezvous failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// Invalid numbers or addresses, or processes that were not started for the same run.
    #[error("{message}")]
    Refused { message: String },
    /// A process did not connect, or a port or machine cannot be reached.
    #[error("{message}")]
    Failed { message: String, help: String },
}

fn failed(message: impl fmt::Display, help: impl fmt::Display) -> JoinError {
    JoinError::Failed {
        message: message.to_string(),
        help: help.to_string(),
    }
}

/// Joins the other processes. Returns when all are connected. `tell` is called with lines of progress.
///
/// # Errors
/// Where not all connect in time, or they were not started for the same run.
pub fn join(join: &Join, tell: &dyn Fn(&str)) -> Result<Arc<Processes>, JoinError> {
    if join.processes == 0 || join.process >= join.processes || join.processes > u32::MAX as usize {
        return Err(JoinError::Refused {
            message: format!(
                "there is no process {} of {}: the first is 0",
                join.process, join.processes
            ),
        });
    }
    let until = Instant::now() + join.timeout;
    let (peers, streams) = if join.process == 0 {
        lead(join, until, tell)?
    } else {
        follow(join, until)?
    };
    let processes = Processes::new(join.process, peers, streams);
    processes
        .map(Arc::new)
        .map_err(|error| failed(format!("the connections cannot be used: {error}"), ""))
}

type Joined = (Vec<Peer>, Vec<Option<TcpStream>>);

/// Listens; on the loopback interface only if the address of process 0 is local.
fn listen(join: &Join, port: u16) -> Result<TcpListener, JoinError> {
    let bound = if join.leader.is_local() {
        TcpListener::bind((join.leader.host.as_str(), port))
    } else {
        TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|error| match error.kind() {
            io::ErrorKind::AddrInUse => Err(error),
            _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        })
    };
    let listener = bound.map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => failed(
            format!("port {port}, at which process {} is to listen, is taken", join.process),
            "another run may be using it; give another port",
        ),
        _ => failed(format!("cannot listen at port {port}: {error}"), "give another port"),
    })?;
    listener
        .set_nonblocking(true)
        .map_err(|error| failed(format!("cannot listen at port {port}: {error}"), ""))?;
    Ok(listener)
}

/// Accepts connections until `until`, which may change meanwhile, and passes those with a valid greeting to `take`.
/// Ends when `take` returns a value, or the time is over.
fn arrivals<R>(
    listener: &TcpListener,
    until: &Cell<Instant>,
    mut refused: impl FnMut(String),
    mut take: impl FnMut(Arrival) -> Option<R>,
) -> Option<R> {
    let mut pending = PendingConnections::default();
    while Instant::now() < until.get() {
        let came = pending.accept(listener);
        for heard in pending.listen() {
            match heard {
                Ok(arrival) => {
                    if let Some(result) = take(arrival) {
                        return Some(result);
                    }
                }
                Err(why) => refused(why),
            }
        }
        if !came {
            thread::sleep(AGAIN);
        }
    }
    None
}

/// Answers a greeting: accepted, or why not.
fn answer(mut stream: &TcpStream, refusal: Option<&str>) -> io::Result<()> {
    let mut bytes = MAGIC.to_vec();
    bytes.push(u8::from(refusal.is_some()));
    if let Some(why) = refusal {
        frame::reason(&mut bytes, why);
    }
    stream.write_all(&bytes)
}

/// The settings in the form in which they are sent and compared.
fn in_short(settings: &[(String, String)]) -> Vec<(String, String)> {
    let short = |(name, value): &(String, String)| match value.chars().count() > SHOWN {
        true => (
            name.clone(),
            format!("a text with digest {}", Digest::of(value.as_bytes()).short()),
        ),
        false => (name.clone(), value.clone()),
    };
    settings.iter().map(short).collect()
}

/// Describes the differences between the settings of a connecting process and `own`. None where it did not send them,
/// they do not differ, or they are those of an entirely different run. The sent data is untrusted.
pub(super) fn differences(own: &[(String, String)], sent: &[u8]) -> Option<String> {
    let sent: Vec<(String, String)> = serde_json::from_slice(sent).ok()?;
    let theirs: BTreeMap<&str, &str> = sent
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    let mine: BTreeMap<&str, &str> = own
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    let common = mine.keys().filter(|name| theirs.contains_key(*name)).count();
    if common * 2 < mine.len().max(theirs.len()) {
        return None;
    }
    let shown = |text: &str| -> String {
        let visible = |c: char| if c.is_control() { '?' } else { c };
        text.chars().take(SHOWN).map(visible).collect()
    };
    let here = own.iter().filter_map(|(name, value)| {
        let name = name.as_str();
        match theirs.get(name) {
            Some(other) if *other == value.as_str() => None,
            Some(other) => Some(format!(
                "`{}` is {} instead of {}",
                shown(name),
                shown(other),
                shown(value)
            )),
            None => Some(format!("`{}` is missing", shown(name))),
        }
    });
    let more = theirs.iter().filter(|(name, _)| !mine.contains_key(*name));
    let more = more.map(|(name, value)| format!("`{}`, {}, is one too many", shown(name), shown(value)));
    let all: Vec<String> = here.chain(more).collect();
    let mut text = all.iter().take(NAMED).cloned().collect::<Vec<_>>().join("; ");
    if all.len() > NAMED {
        text.push_str(&format!("; and {} more", all.len() - NAMED));
    }
    (!all.is_empty()).then_some(text)
}

/// Process 0: waits for all others and sends each of them the addresses.
fn lead(join: &Join, until: Instant, tell: &dyn Fn(&str)) -> Result<Joined, JoinError> {
    let count = join.processes;
    let listener = listen(join, join.leader.port)?;
    tell(&format!(
        "process 0 of {count} waits at port {} for the others, at most {} s",
        join.leader.port,
        join.timeout.as_secs_f64().round()
    ));
    let mut come: Vec<Option<Arrival>> = (0..count).map(|_| None).collect();
    // Number of refusals, and the last one.
    let refusals = std::cell::RefCell::new((0usize, String::new()));
    let refuse = |why: String| {
        let mut refusals = refusals.borrow_mut();
        if refusals.0 < TOLD {
            tell(&format!("refused: {why}"));
        }
        *refusals = (refusals.0 + 1, why);
    };
    let settings = in_short(&join.settings);
    // By number: processes of this run that were started with other settings.
    let mut misfits: BTreeMap<usize, String> = BTreeMap::new();
    let deadline = Cell::new(until);
    if count > 1 {
        arrivals(&listener, &deadline, refuse, |arrival| {
            let hello = &arrival.hello;
            let process = hello.process as usize;
            let same = hello.token == *join.digest.as_bytes();
            let mut misfit = same && hello.processes as usize != count;
            let wrong = hello.wrong(count).or_else(|| {
                if !same {
                    let differ = "its pipeline, settings or program differ from those of process 0".to_owned();
                    let how = differences(&settings, &hello.settings);
                    misfit = how.is_some();
                    Some(match how {
                        Some(how) => format!("{differ}: {how}"),
                        None => differ,
                    })
                } else if process == 0 || process >= count {
                    Some(format!("there is no place for a process {process} of {count}"))
                } else if come[process].as_ref().is_some_and(|other| !is_closed(&other.stream)) {
                    Some(format!("another process {process} is there already"))
                } else {
                    None
                }
            });
            if let Some(why) = wrong {
                // Errors are ignored: the process is refused anyway.
                let _ = answer(&arrival.stream, Some(&why));
                let why = format!("process {process} ({}, pid {}): {why}", hello.host, hello.pid);
                if misfit && (1..count).contains(&process) && come[process].is_none() {
                    misfits.insert(process, why.clone());
                    deadline.set(until.min(Instant::now() + SECOND_TRY));
                }
                refuse(why);
                return None;
            }
            if answer(&arrival.stream, None).is_ok() {
                tell(&format!(
                    "process {process} of {count} is there: {}, pid {}",
                    hello.host, hello.pid
                ));
                come[process] = Some(arrival);
                misfits.remove(&process);
                if misfits.is_empty() {
                    deadline.set(until);
                }
            }
            come.iter().skip(1).all(Option::is_some).then_some(())
        });
    }
    let missing: Vec<String> = (1..count)
        .filter(|&process| come[process].is_none())
        .map(|p| p.to_string())
        .collect();
    if !missing.is_empty() {
        let misfit = misfits.into_values().next();
        let mut message = format!(
            "process {} did not come to port {} within {} s",
            missing.join(", "),
            join.leader.port,
            join.timeout.as_secs_f64()
        );
        let (refused, last) = refusals.into_inner();
        if refused > 0 {
            message.push_str(&format!("; {refused} refused, the last: {last}"));
        }
        if let Some(misfit) = &misfit {
            message.clone_from(misfit);
        }
        for other in come.iter().flatten() {
            // They wait for the table; the closed connection also informs them.
            let _ = (&other.stream).write_all(&[1]);
            let mut why = Vec::new();
            frame::reason(&mut why, &message);
            let _ = (&other.stream).write_all(&why);
        }
        if misfit.is_some() {
            return Err(JoinError::Refused { message });
        }
        return Err(failed(
            message,
            "start them all within that time, with the same pipeline and settings",
        ));
    }
    let token = Digest::of(
        format!(
            "{:?} {} {}",
            std::time::SystemTime::now(),
            std::process::id(),
            join.digest.to_hex()
        )
        .as_bytes(),
    );
    let own = Hello::new(count, 0, *token.as_bytes(), join.leader.port);
    let mut table = vec![0u8];
    table.extend(token.as_bytes());
    let mut peers = Vec::with_capacity(count);
    for (process, arrival) in come.iter().enumerate() {
        let hello = arrival.as_ref().map_or(&own, |arrival| &arrival.hello);
        // Empty for the machine of process 0, for which each process uses the address that it was given.
        let ip = arrival
            .as_ref()
            .map(|arrival| arrival.ip)
            .filter(|ip| !ip.to_canonical().is_loopback());
        frame::text(
            &mut table,
            &ip.map_or(String::new(), |ip| ip.to_canonical().to_string()),
        );
        table.extend(hello.port.to_le_bytes());
        table.extend(hello.pid.to_le_bytes());
        frame::text(&mut table, &hello.host);
        peers.push(Peer {
            process,
            host: hello.host.clone(),
            pid: hello.pid,
        });
    }
    let mut streams = Vec::with_capacity(count);
    for (peer, arrival) in peers.iter().zip(come) {
        if let Some(Arrival { mut stream, .. }) = arrival {
            stream
                .write_all(&table)
                .map_err(|error| failed(format!("{peer} went before all had come: {error}"), "start all again"))?;
            streams.push(Some(stream));
        } else {
            streams.push(None);
        }
    }
    Ok((peers, streams))
}

fn is_closed(stream: &TcpStream) -> bool {
    let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let _ = stream.set_nonblocking(false);
    match peeked {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}

/// A process other than 0: connects to process 0, then to all lower numbers, and accepts connections of higher ones.
fn follow(join: &Join, until: Instant) -> Result<Joined, JoinError> {
    let count = join.processes;
    let listener = listen(join, join.port.unwrap_or(0))?;
    let port = listener
        .local_addr()
        .map_err(|error| failed(format!("cannot listen: {error}"), ""))?
        .port();
    let hello = Hello::new(count, join.process, *join.digest.as_bytes(), port).with_settings(&in_short(&join.settings));
    let leader = format!("process 0 at {}", join.leader);
    let stream = greeted(&join.leader, &hello, until, &leader)?;
    let (token, rows) = table(&stream, count, until, join)?;
    let mut peers = Vec::with_capacity(count);
    let mut streams: Vec<Option<TcpStream>> = (0..count).map(|_| None).collect();
    streams[0] = Some(stream);
    let hello = Hello {
        token,
        settings: Vec::new(),
        ..hello
    };
    for (process, row) in rows.into_iter().enumerate() {
        if process > 0 && process < join.process {
            let address = Address {
                host: if row.ip.is_empty() {
                    join.leader.host.clone()
                } else {
                    row.ip
                },
                port: row.port,
            };
            let name = format!("process {process} at {address} ({})", row.host);
            streams[process] = Some(greeted(&address, &hello, until, &name)?);
        }
        peers.push(Peer {
            process,
            host: row.host,
            pid: row.pid,
        });
    }
    if join.process + 1 < count {
        arrivals(
            &listener,
            &Cell::new(until),
            |_| {},
            |arrival| {
                let process = arrival.hello.process as usize;
                let known = arrival.hello.wrong(count).is_none() && arrival.hello.token == token;
                if !known || process <= join.process || process >= count {
                    let _ = answer(&arrival.stream, Some("it is of another run"));
                    return None;
                }
                if answer(&arrival.stream, None).is_ok() {
                    streams[process] = Some(arrival.stream);
                }
                streams.iter().skip(join.process + 1).all(Option::is_some).then_some(())
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

/// Connects and sends the greeting, repeatedly until the other side responds: it may be busy, and close connections
/// that it has not read yet.
fn greeted(address: &Address, hello: &Hello, until: Instant, name: &str) -> Result<TcpStream, JoinError> {
    let unreachable = |why: &dyn fmt::Display| {
        failed(
            format!("{name} cannot be reached: {why}"),
            "is it started, with that host and port, and does no firewall stand between?",
        )
    };
    let mut last = unreachable(&"no time was left");
    while Instant::now() < until {
        match connect(address, until) {
            Ok(stream) => match greeting(stream, hello, until, name) {
                Err(error @ JoinError::Failed { .. }) => last = error,
                decided => return decided,
            },
            Err(error) => last = unreachable(&error),
        }
        thread::sleep((AGAIN * 5).min(until.saturating_duration_since(Instant::now())));
    }
    Err(last)
}

fn connect(address: &Address, until: Instant) -> io::Result<TcpStream> {
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

fn greeting(mut stream: TcpStream, hello: &Hello, until: Instant, name: &str) -> Result<TcpStream, JoinError> {
    let io = |error: io::Error| {
        failed(
            format!("{name} did not answer: {error}"),
            "is something else listening there?",
        )
    };
    let left = until.saturating_duration_since(Instant::now());
    let patience = Some(left.clamp(Duration::from_millis(100), HANDSHAKE_TIMEOUT));
    stream.set_read_timeout(patience).map_err(io)?;
    stream.set_write_timeout(patience).map_err(io)?;
    hello.write(&mut stream).map_err(io)?;
    if !frame::is_magic(&mut stream).map_err(io)? {
        return Err(JoinError::Refused {
            message: format!("{name}: what listens there is no process of a run"),
        });
    }
    let mut status = [0u8; 1];
    stream.read_exact(&mut status).map_err(io)?;
    if status[0] != 0 {
        let why = frame::read_reason(&mut stream).map_err(io)?;
        return Err(JoinError::Refused {
            message: format!("{name} refuses process {}: {why}", hello.process),
        });
    }
    stream.set_write_timeout(None).map_err(io)?;
    Ok(stream)
}

/// The table's entry of one process.
struct Row {
    ip: String,
    port: u16,
    pid: u32,
    host: String,
}

fn table(stream: &TcpStream, count: usize, until: Instant, join: &Join) -> Result<([u8; 32], Vec<Row>), JoinError> {
    let mut from = stream;
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
    // A little longer than process 0 waits, so that it reports which process is missing.
    let left = until.saturating_duration_since(Instant::now()) + Duration::from_secs(2);
    stream.set_read_timeout(Some(left)).map_err(io)?;
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

/// A port that is free at the moment.
#[cfg(test)]
pub(super) fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    listener.local_addr().expect("its address").port()
}
