//! Connections whose handshake is not over. Many idle connections cannot block those that speak, and those that have
//! proved that they know the secret are kept before all others.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::frame::read_u32;
use super::greeting::{Hello, LONGEST_GREETING, MAGIC, SETTINGS};
use super::handshake::{Answer, Challenge, Handshake, Side};
use super::listeners::Listeners;

/// Timeout of a handshake.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Most pending connections. Beyond that one of those that have shown least is closed.
const MOST_PENDING: usize = 256;

/// Connections accepted before the pending ones are read again.
const AT_ONCE: usize = 64;

/// The most bytes that are read at once.
const PIECE: usize = 1 << 14;

/// A process that has proved that it knows the secret. It waits for an answer.
pub(super) struct Arrival {
    pub hello: Hello,
    /// The settings that it sent, as they came. Empty: unknown.
    pub settings: Vec<u8>,
    pub stream: TcpStream,
    pub ip: IpAddr,
}

/// What is awaited from a connection.
enum Awaited {
    Greeting,
    Proof {
        hello: Hello,
        /// As it came.
        greeting: Vec<u8>,
        challenge: Challenge,
    },
    Settings {
        hello: Hello,
    },
}

struct PendingConnection {
    stream: TcpStream,
    address: SocketAddr,
    awaited: Awaited,
    /// What came of it so far.
    said: Vec<u8>,
    /// It was read once.
    heard: bool,
    until: Instant,
}

/// The oldest first.
pub(super) struct PendingConnections<'a> {
    own: &'a Handshake,
    most: usize,
    all: Vec<PendingConnection>,
}

impl PendingConnections<'_> {
    pub fn new(own: &Handshake) -> PendingConnections<'_> {
        PendingConnections {
            own,
            most: MOST_PENDING,
            all: Vec::new(),
        }
    }

    /// Accepts waiting connections. Returns whether there may be more.
    pub fn accept(&mut self, listeners: &Listeners) -> bool {
        listeners.accept(AT_ONCE, |stream, address| {
            if stream.set_nonblocking(true).is_err() {
                return;
            }
            if self.all.len() >= self.most {
                // Of those that have shown as little the oldest.
                let ranked = self.all.iter().enumerate();
                let least = ranked.min_by_key(|(_, connection)| connection.rank());
                let least = least.map_or(0, |(position, _)| position);
                self.all.remove(least);
            }
            self.all.push(PendingConnection {
                stream,
                address,
                awaited: Awaited::Greeting,
                said: Vec::new(),
                heard: false,
                until: Instant::now() + HANDSHAKE_TIMEOUT,
            });
        })
    }

    /// Reads available data, and answers it. Returns the processes whose handshake is over but for the last answer, and
    /// the reasons why other connections are closed.
    pub fn listen(&mut self) -> Vec<Result<Arrival, String>> {
        let mut heard = Vec::new();
        for mut connection in std::mem::take(&mut self.all) {
            match connection.listen(self.own) {
                Ok(None) => self.all.push(connection),
                Ok(Some((hello, settings))) => heard.push(connection.arrive(hello, settings)),
                Err(why) => heard.push(Err(format!("{} {why}", connection.name()))),
            }
        }
        heard
    }
}

impl PendingConnection {
    /// How much it has shown; whoever has shown least is closed first. What has not been read yet is younger than all
    /// that may be silent.
    fn rank(&self) -> u8 {
        match &self.awaited {
            Awaited::Settings { .. } => 3,
            _ if !self.heard => 2,
            Awaited::Greeting if self.said.is_empty() => 0,
            _ => 1,
        }
    }

    /// What is known of it, for a message.
    fn name(&self) -> String {
        match &self.awaited {
            Awaited::Greeting => format!("{} connected and", self.address),
            Awaited::Proof { hello, .. } | Awaited::Settings { hello } => format!("{}:", hello.name()),
        }
    }

    /// Greeting and settings of the process, once its handshake is complete; why it will not be.
    fn listen(&mut self, own: &Handshake) -> Result<Option<(Hello, Vec<u8>)>, String> {
        self.heard = true;
        let mut piece = [0; PIECE];
        match self.stream.read(&mut piece) {
            Ok(0) => {
                return Err(match &self.awaited {
                    Awaited::Greeting if self.said.is_empty() => "did not say who it is: it hung up",
                    Awaited::Greeting => "speaks something else",
                    _ => "it hung up before it had proved that it belongs to the run",
                }
                .into());
            }
            Ok(read) => {
                self.said.extend_from_slice(&piece[..read]);
                let understood = self.understand(own)?;
                if understood.is_some() {
                    return Ok(understood);
                }
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(format!("did not say who it is: {error}")),
        }
        if Instant::now() < self.until {
            return Ok(None);
        }
        Err("did not say who it is in time".into())
    }

    /// Goes on to the next step where all that is awaited is there.
    fn understand(&mut self, own: &Handshake) -> Result<Option<(Hello, Vec<u8>)>, String> {
        match &self.awaited {
            Awaited::Greeting => {
                let Some(hello) = greeting(&self.said)? else {
                    return Ok(None);
                };
                let greeting = std::mem::take(&mut self.said);
                let wrong = hello.incompatible(own.process).or_else(|| secret_of_one(&hello, own));
                let challenge = own.challenge();
                let challenge =
                    challenge.map_err(|error| format!("cannot be challenged: no random numbers: {error}"))?;
                self.awaited = Awaited::Proof {
                    hello,
                    greeting,
                    challenge: challenge.clone(),
                };
                if let Some(why) = wrong {
                    return Err(self.refuse(why));
                }
                self.answer(&Answer::Challenge(challenge))?;
            }
            Awaited::Proof {
                hello,
                greeting,
                challenge,
            } => {
                if self.said.len() < blake3::OUT_LEN {
                    return Ok(None);
                }
                let expected = own.proof(Side::Connecting, greeting, challenge);
                // Too many bytes are no proof either. Digests are compared in constant time.
                let given = <[u8; blake3::OUT_LEN]>::try_from(self.said.as_slice());
                if !given.is_ok_and(|given| blake3::Hash::from_bytes(given) == expected) {
                    let why = format!("it does not know the secret of process {} (--secret-file)", own.process);
                    return Err(self.refuse(why));
                }
                let proof = own.proof(Side::Listening, greeting, challenge);
                self.awaited = Awaited::Settings { hello: hello.clone() };
                self.said.clear();
                self.answer(&Answer::Proof(*proof.as_bytes()))?;
            }
            Awaited::Settings { hello } => {
                let mut left = self.said.as_slice();
                let Ok(length) = read_u32(&mut left) else {
                    return Ok(None);
                };
                if length as usize > SETTINGS || left.len() > length as usize {
                    return Err("it sends more settings than there can be".into());
                }
                if left.len() == length as usize {
                    return Ok(Some((hello.clone(), left.to_vec())));
                }
            }
        }
        Ok(None)
    }

    /// Answers are short: what a new connection does not take at once it will not take.
    fn answer(&mut self, answer: &Answer) -> Result<(), String> {
        let sent = self.stream.write_all(&answer.bytes());
        sent.map_err(|error| format!("cannot be answered: {error}"))
    }

    /// Tells the process why it is refused; returns that.
    fn refuse(&mut self, why: String) -> String {
        let answer = Answer::Refused(why.clone());
        // Where it cannot be sent the reason it is refused nevertheless.
        let _ = self.answer(&answer);
        why
    }

    fn arrive(self, hello: Hello, settings: Vec<u8>) -> Result<Arrival, String> {
        let ready = self
            .stream
            .set_nonblocking(false)
            .and_then(|()| self.stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT)))
            .and_then(|()| self.stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT)));
        match ready {
            Ok(()) => Ok(Arrival {
                hello,
                settings,
                stream: self.stream,
                ip: self.address.ip(),
            }),
            Err(error) => Err(format!("{} cannot be answered: {error}", hello.name())),
        }
    }
}

/// Why two processes cannot prove anything to each other: only one of them has a secret.
fn secret_of_one(hello: &Hello, own: &Handshake) -> Option<String> {
    let process = own.process;
    match (hello.has_secret, own.has_secret) {
        (false, true) => Some(format!(
            "it has no secret, and process {process} has one; start it with the same --secret-file"
        )),
        (true, false) => Some(format!(
            "it has a secret, and process {process} has none; start all processes with the same --secret-file"
        )),
        _ => None,
    }
}

/// The greeting, once it is whole; why there will be none.
fn greeting(said: &[u8]) -> Result<Option<Hello>, String> {
    let begun = &said[..said.len().min(MAGIC.len())];
    let mut left = said;
    if MAGIC.starts_with(begun) {
        match Hello::read(&mut left) {
            Ok(Some(hello)) if left.is_empty() => return Ok(Some(hello)),
            // The data so far is an incomplete greeting.
            Ok(None) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && said.len() < LONGEST_GREETING => {
                return Ok(None);
            }
            _ => {}
        }
    }
    Err("speaks something else".to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::tests::member;
    use super::*;

    /// Process 0, which listens.
    fn listening() -> (Listeners, Handshake) {
        let own = member(0, 2, 0);
        let handshake = Handshake::new(0, None, own.digest.as_bytes());
        (Listeners::open(&own, 0, Instant::now(), &|_| {}).unwrap(), handshake)
    }

    fn connect(listeners: &Listeners) -> TcpStream {
        let stream = TcpStream::connect(("localhost", listeners.port())).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    /// Reads until as many connections are pending and have said something.
    fn hear(pending: &mut PendingConnections, listeners: &Listeners, count: usize) {
        let until = Instant::now() + Duration::from_secs(20);
        let spoke = |connection: &PendingConnection| connection.heard && connection.rank() > 0;
        while pending.all.iter().filter(|connection| spoke(connection)).count() < count {
            assert!(Instant::now() < until);
            pending.accept(listeners);
            assert!(pending.listen().iter().all(Result::is_err));
        }
    }

    /// Strangers can greet, too; a process that has proved what it knows is not closed for them.
    #[test]
    fn slots_are_kept_for_those_who_have_shown_most() {
        let (listeners, own) = listening();
        let mut pending = PendingConnections::new(&own);
        pending.most = 4;
        let other = Handshake::new(1, None, member(1, 2, 0).digest.as_bytes());
        let greeting = other.greet(&Hello::new(2, 1, 0)).unwrap().bytes();
        let mut proven = connect(&listeners);
        proven.write_all(&greeting).unwrap();
        hear(&mut pending, &listeners, 1);
        let Some(Answer::Challenge(challenge)) = Answer::read(&mut proven).unwrap() else {
            panic!("no challenge");
        };
        let proof = other.proof(Side::Connecting, &greeting, &challenge);
        proven.write_all(proof.as_bytes()).unwrap();
        while pending.all[0].rank() < 3 {
            assert!(pending.listen().is_empty());
        }
        pending.all[0].until += HANDSHAKE_TIMEOUT * 6;
        let mut strangers = Vec::new();
        for number in 0..12 {
            let mut stranger = connect(&listeners);
            stranger.write_all(&greeting).unwrap();
            strangers.push(stranger);
            hear(&mut pending, &listeners, (number + 2).min(4));
        }
        assert_eq!(pending.all.len(), 4);
        // Who has not been read yet is no worse than those who are silent.
        let silent = connect(&listeners);
        while pending.all.iter().all(|connection| connection.rank() > 0) {
            pending.accept(&listeners);
            pending.listen();
        }
        let last = connect(&listeners);
        while pending.all.iter().all(|connection| connection.heard) {
            pending.accept(&listeners);
        }
        let ranks: Vec<u8> = pending.all.iter().map(PendingConnection::rank).collect();
        assert_eq!(ranks, [3, 1, 1, 2]);
        proven.write_all(&0u32.to_le_bytes()).unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        let arrived = loop {
            assert!(Instant::now() < until);
            if let Some(arrived) = pending.listen().into_iter().find_map(Result::ok) {
                break arrived;
            }
        };
        assert_eq!((arrived.hello.process, arrived.settings.len()), (1, 0));
        drop((silent, last, strangers));
    }

    /// A client of which there is always a byte to read has no more time than others.
    #[test]
    fn slow_clients_are_closed_in_time() {
        let (listeners, own) = listening();
        let mut pending = PendingConnections::new(&own);
        let mut slow = connect(&listeners);
        slow.write_all(&MAGIC[..1]).unwrap();
        hear(&mut pending, &listeners, 1);
        pending.all[0].until = Instant::now();
        slow.write_all(&MAGIC[1..2]).unwrap();
        // The byte may be on its way.
        std::thread::sleep(Duration::from_millis(50));
        let told = pending.listen().pop().map(Result::err);
        assert!(told.flatten().unwrap().contains("in time"));
        assert!(pending.all.is_empty());
    }
}
