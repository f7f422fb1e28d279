use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use flow_base::digest::Digest;
use flow_storage_testing::free_port;

use super::greeting::{Hello, SETTINGS};
use super::settings::{differences, encoded};
use super::*;

pub(super) const SOON: Duration = Duration::from_secs(20);

pub(super) fn member(process: usize, processes: usize, port: u16) -> Join {
    Join {
        process,
        processes,
        leader: Address {
            host: "localhost".into(),
            port,
        },
        port: None,
        hosts: Vec::new(),
        secret: None,
        digest: Digest::of(b"this run"),
        settings: Vec::new(),
        timeout: SOON,
    }
}

fn group(count: usize) -> Vec<Arc<Processes>> {
    let port = free_port();
    let joining: Vec<_> = (0..count)
        .map(|process| thread::spawn(move || join(&member(process, count, port), &|_| {})))
        .collect();
    joining
        .into_iter()
        .map(|thread| thread.join().unwrap().unwrap())
        .collect()
}

/// All messages of process 0 while it waits.
pub(super) fn leader(join_as: Join) -> thread::JoinHandle<(Result<Arc<Processes>, JoinError>, String)> {
    thread::spawn(move || {
        let said = Mutex::new(String::new());
        let joined = join(&join_as, &|line| *said.lock().unwrap() += &format!("{line}\n"));
        (joined, said.into_inner().unwrap())
    })
}

#[test]
fn messages_go_straight_from_each_to_each_in_their_order() {
    let group = group(3);
    for (from, sender) in group.iter().enumerate() {
        assert_eq!((sender.process(), sender.count()), (from, 3));
        for to in (0..3).filter(|&to| to != from) {
            for number in 0..50u8 {
                // Bodies of all sizes, an empty one among them; the last are sent when the listener is there.
                sender.send(to, 7, Box::new(vec![number; usize::from(number) * 2000]));
            }
        }
    }
    for process in &group {
        let (tell, told) = channel();
        process.listen(7, move |from, body| tell.send((from, body)).unwrap());
        let mut next = [0u8; 3];
        for _ in 0..100 {
            let (from, body) = told.recv_timeout(SOON).unwrap();
            assert_eq!(body, vec![next[from]; usize::from(next[from]) * 2000]);
            next[from] += 1;
        }
        assert_eq!(next.iter().filter(|&&number| number == 50).count(), 2);
    }
    // Process 0 sends its outcome, and no process counts the others' leaving as a loss.
    let end = End {
        code: 4,
        message: "a limit".into(),
    };
    thread::scope(|scope| {
        for other in &group[1..] {
            scope.spawn(|| {
                assert_eq!(other.outcome(SOON), Some(Outcome::Ended(end.clone())));
                other.leave();
            });
        }
        group[0].end(&end);
    });
    assert!(group.iter().all(|process| process.lost().is_none()));
}

#[test]
fn whoever_is_lost_is_named_to_all_others() {
    let mut group = group(3);
    let (tell, told) = channel();
    group[2].on_loss(move |loss| tell.send(loss.clone()).unwrap());
    drop(group.remove(1));
    let named = format!(
        "process 1 ({}, pid {}) ended without a message",
        group[0].peers()[1].host,
        std::process::id()
    );
    assert_eq!(told.recv_timeout(SOON).unwrap().message, named);
    // A process other than 0 might have ended because the run did, so process 0 gets time to report that.
    assert_eq!(group[1].outcome(Duration::ZERO), None);
    let until = Instant::now() + SOON;
    let loss = loop {
        match group[1].outcome(Duration::from_millis(50)) {
            Some(Outcome::Lost(loss)) => break loss,
            Some(other) => panic!("{other:?}"),
            None => assert!(Instant::now() < until),
        }
    };
    assert_eq!(loss.message, named);
    while group[0].lost().is_none() && Instant::now() < until {
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(group[0].lost().unwrap().process, 1);
    // The loss of process 0 needs no more waiting.
    let late = group.pop().unwrap();
    drop(group);
    assert!(matches!(late.outcome(Duration::ZERO), Some(Outcome::Lost(_))));
}

#[test]
fn signals_of_the_others_reach_process_0() {
    let group = group(2);
    group[1].signal(15);
    let flags = SignalFlags {
        stop: Arc::default(),
        checkpoint: Arc::default(),
    };
    group[0].signals_to(flags.clone());
    group[1].signal(signal_hook::consts::SIGUSR1);
    let until = Instant::now() + SOON;
    while !(flags.checkpoint.load(Ordering::Acquire) && flags.stop.load(Ordering::Acquire) == 15) {
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn strangers_and_processes_of_other_runs_are_refused_and_the_right_one_is_let_in() {
    let port = free_port();
    let leading = leader(member(0, 2, port));
    let wrong = |change: &dyn Fn(&mut Join)| {
        let mut other = member(1, 2, port);
        change(&mut other);
        join(&other, &|_| {}).unwrap_err()
    };
    let differs = wrong(&|other| other.digest = Digest::of(b"another run"));
    assert!(matches!(differs, JoinError::Refused { .. }));
    assert!(
        differs.to_string().contains("pipeline, settings or program differ"),
        "{differs}"
    );
    let miscounted = wrong(&|other| other.processes = 3).to_string();
    assert!(
        miscounted.contains("3 processes, process 0 that there are 2"),
        "{miscounted}"
    );
    // A client that is not a process of a run: its data is dropped, however long it is.
    for said in [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], &[0xff; 100_000], b"flow"] {
        let mut connection = TcpStream::connect(("127.0.0.1", port)).unwrap();
        // The other side may hang up in the middle.
        let _ = connection.write_all(said);
        let _ = connection.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = connection.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{answer:?}");
    }
    let right = join(&member(1, 2, port), &|_| {}).unwrap();
    let (led, said) = leading.join().unwrap();
    assert_eq!(led.unwrap().peers(), right.peers());
    assert!(
        said.contains("speaks something else") && said.contains("settings or program differ"),
        "{said}"
    );
}

fn settings(of: &[(&str, &str)]) -> Vec<(String, String)> {
    let pair = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    of.iter().map(pair).collect()
}

/// A process of this run with this seed, which waits long for the others.
pub(super) fn seeded(process: usize, processes: usize, port: u16, seed: &str) -> Join {
    Join {
        digest: Digest::of(seed.as_bytes()),
        settings: settings(&[
            ("train.seed", seed),
            ("train.max_steps", "4"),
            ("stage train: uses", "x"),
        ]),
        timeout: Duration::from_secs(300),
        ..member(process, processes, port)
    }
}

#[test]
fn the_setting_that_differs_is_named_to_all_and_nobody_waits_for_long() {
    let (port, began) = (free_port(), Instant::now());
    let leading = leader(seeded(0, 3, port, "42"));
    let waiting = thread::spawn(move || join(&seeded(2, 3, port, "42"), &|_| {}));
    let refused = join(&seeded(1, 3, port, "43"), &|_| {}).unwrap_err();
    let led = leading.join().unwrap().0.unwrap_err();
    for error in [&refused, &led] {
        let told = error.to_string();
        assert!(matches!(error, JoinError::Refused { .. }), "{told}");
        assert!(
            told.contains("process 1") && told.contains("`train.seed` is 43 instead of 42"),
            "{told}"
        );
        assert!(!told.contains("max_steps"), "{told}");
    }
    let waited = waiting.join().unwrap().unwrap_err().to_string();
    assert!(waited.contains("`train.seed` is 43 instead of 42"), "{waited}");
    assert!(began.elapsed() < Duration::from_secs(100), "{:?}", began.elapsed());
}

#[test]
fn who_comes_again_with_the_right_settings_is_let_in() {
    let port = free_port();
    let leading = leader(seeded(0, 2, port, "42"));
    assert!(join(&seeded(1, 2, port, "43"), &|_| {}).is_err());
    assert_eq!(join(&seeded(1, 2, port, "42"), &|_| {}).unwrap().count(), 2);
    assert_eq!(leading.join().unwrap().0.unwrap().count(), 2);
}

/// Settings from unknown clients are compared with bounded work, and those of another run do not end this one.
#[test]
fn settings_of_strangers_are_looked_at_within_bounds() {
    let own = settings(&[("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")]);
    let with = |theirs: &[(&str, &str)]| differences(&own, &serde_json::to_vec(&settings(theirs)).unwrap());
    assert_eq!(with(&[("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")]), None);
    assert_eq!(
        with(&[("a", "9"), ("b", "2"), ("c", "3"), ("e", "5")]).unwrap(),
        "`a` is 9 instead of 1; `d` is missing; `e`, 5, is one too many"
    );
    assert_eq!(with(&[("x", "1"), ("y", "2"), ("a", "3")]), None);
    for bytes in [&b""[..], b"[", b"{}", b"[[\"a\"]]", &[0xff; 1000], &[b'['; 100_000]] {
        assert_eq!(differences(&own, bytes), None);
    }
    let long = "\u{1b}".repeat(100_000);
    let told = with(&["a", "b", "c", "d"].map(|name| (name, long.as_str()))).unwrap();
    assert!(told.len() < 1000 && !told.contains('\u{1b}'), "{told}");
    let many: Vec<(String, String)> = (0..1000).map(|n| (format!("n{n}"), "1".to_owned())).collect();
    let others: Vec<(String, String)> = many.iter().map(|(name, _)| (name.clone(), "2".to_owned())).collect();
    let told = differences(&many, &serde_json::to_vec(&others).unwrap()).unwrap();
    assert!(told.ends_with("; and 995 more") && told.len() < 300, "{told}");

    // They are sent unless they are too many.
    assert_eq!(differences(&own, &encoded(&settings(&[("a", "9")]))), None);
    assert!(encoded(&own).len() < 100);
    let vast: Vec<(String, String)> = (0..SETTINGS / 16)
        .map(|number| (format!("setting {number:08}"), "1".to_owned()))
        .collect();
    assert!(encoded(&vast).is_empty());
}

/// Greetings of all versions are read to their end, so that the process can be refused with a reason.
#[test]
fn greetings_of_other_versions_are_understood() {
    let greeting = Hello {
        run: [7; 32],
        nonce: [9; 32],
        has_secret: true,
        ..Hello::new(2, 1, 24_500)
    };
    let bytes = greeting.bytes();
    assert_eq!(Hello::read(&mut bytes.as_slice()).unwrap(), Some(greeting.clone()));
    let version = |number: u32, bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        bytes[8..12].copy_from_slice(&number.to_le_bytes());
        let mut left = bytes.as_slice();
        let read = Hello::read(&mut left).unwrap().unwrap();
        assert!(left.is_empty());
        read.incompatible(0).unwrap()
    };
    // That of the first version ends behind the host; that of the second has settings there.
    let tail = bytes.len() - 37;
    assert!(version(1, &bytes[..tail]).contains("version 1 of the protocol, process 0 version 4"));
    let mut second = bytes[..tail].to_vec();
    second.extend((SETTINGS as u32).to_le_bytes());
    second.resize(second.len() + SETTINGS, b' ');
    assert!(version(2, &second).contains("version 2"));
    second[tail..tail + 4].copy_from_slice(&(SETTINGS as u32 + 1).to_le_bytes());
    second.push(b' ');
    assert!(Hello::read(&mut second.as_slice()).is_err());
    // One of this version has nothing else.
    let mut longer = bytes;
    longer[tail] += 1;
    longer.push(0);
    assert!(Hello::read(&mut longer.as_slice()).is_err());
}

/// More idle connections than are listened to, some that begin to speak, and some that are made again and again.
#[test]
fn silent_strangers_keep_nobody_out() {
    let port = free_port();
    let leading = leader(member(0, 3, port));
    let connect = || loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    };
    let silent: Vec<TcpStream> = (0..400)
        .map(|number| {
            let mut stream = connect();
            if number % 3 == 0 {
                // Closed for the one after the last, perhaps.
                let _ = stream.write_all(b"flow-pr\n\x01");
            }
            stream
        })
        .collect();
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Acquire) {
                // Nobody listens once all have come.
                let _ = TcpStream::connect(("127.0.0.1", port));
                thread::sleep(Duration::from_millis(1));
            }
        });
        let others = [1, 2].map(|process| scope.spawn(move || join(&member(process, 3, port), &|_| {})));
        let others = others.map(|thread| thread.join().unwrap());
        ended.store(true, Ordering::Release);
        for joined in others {
            assert_eq!(joined.unwrap().count(), 3);
        }
    });
    drop(silent);
    let (led, said) = leading.join().unwrap();
    assert_eq!(led.unwrap().count(), 3);
    assert!(said.lines().count() < 40, "{said}");
}

/// If the leader closes a connection before it has read the greeting, the client connects again.
#[test]
fn who_is_not_heard_at_first_asks_again() {
    let busy = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = busy.local_addr().unwrap().port();
    let follower = thread::spawn(move || join(&member(1, 2, port), &|_| {}));
    for _ in 0..3 {
        drop(busy.accept().unwrap());
    }
    drop(busy);
    let (led, _) = leader(member(0, 2, port)).join().unwrap();
    assert_eq!(led.unwrap().count(), 2);
    assert_eq!(follower.join().unwrap().unwrap().count(), 2);
}

#[test]
fn who_does_not_come_is_named_and_the_others_hear_of_it() {
    let port = free_port();
    let short = |process| Join {
        timeout: Duration::from_millis(1500),
        ..member(process, 3, port)
    };
    let leading = leader(short(0));
    let waiting = join(&short(1), &|_| {}).unwrap_err().to_string();
    let alone = leading.join().unwrap().0.unwrap_err().to_string();
    assert!(
        alone.contains("process 2 did not come") && alone.contains("within 1.5 s"),
        "{alone}"
    );
    assert!(waiting.contains("process 2 did not come"), "{waiting}");
}

#[test]
fn wrong_numbers_taken_ports_and_unreachable_hosts_are_said() {
    let no_place = join(&member(2, 2, 1), &|_| {}).unwrap_err();
    assert!(matches!(no_place, JoinError::Refused { .. }), "{no_place}");
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let impatient = Join {
        timeout: Duration::from_millis(300),
        ..member(0, 2, port)
    };
    let refused = join(&impatient, &|_| {}).unwrap_err().to_string();
    assert!(
        refused.contains(&port.to_string()) && refused.contains("taken"),
        "{refused}"
    );
    // The process that listened there before was killed, and goes only now.
    let leading = leader(member(0, 2, port));
    thread::sleep(Duration::from_millis(300));
    drop(taken);
    assert_eq!(join(&member(1, 2, port), &|_| {}).unwrap().count(), 2);
    let (led, said) = leading.join().unwrap();
    assert!(led.is_ok() && said.contains("is taken: waiting for it"), "{said}");
    let nobody = Join {
        timeout: Duration::from_millis(300),
        ..member(1, 2, free_port())
    };
    let message = join(&nobody, &|_| {}).unwrap_err().to_string();
    assert!(
        message.contains("cannot be reached") && message.contains("localhost"),
        "{message}"
    );
    // Something else listens there and says so.
    let other = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = other.local_addr().unwrap().port();
    thread::spawn(move || {
        let (mut stream, _) = other.accept().unwrap();
        stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").unwrap();
    });
    let message = join(&member(1, 2, port), &|_| {}).unwrap_err().to_string();
    assert!(message.contains("is not a process of a run"), "{message}");
}

/// Any bytes from a peer are a frame within limits or an error; nothing is allocated by a length alone.
#[test]
fn frames_of_hostile_peers_are_errors() {
    let frame = |kind: u8, length: u64, body: &[u8]| {
        let mut bytes = vec![kind, 1, 0, 0, 0];
        bytes.extend(length.to_le_bytes());
        bytes.extend(body);
        let admit = |_, length| match length < 1 << 33 {
            true => Ok(()),
            false => Err(std::io::ErrorKind::InvalidData.into()),
        };
        super::frame::read(&mut bytes.as_slice(), admit)
    };
    assert!(frame(1, u64::MAX, b"").is_err());
    assert!(frame(99, 0, b"").is_err());
    assert!(frame(1, 1 << 33, b"short").is_err());
    assert!(frame(1, 1 << 32, b"short").is_err());
    // The end of a run is not that long.
    assert!(frame(3, 1 << 25, &vec![0; 1 << 25]).is_err());
    let whole = frame(1, 3, b"abc").unwrap().unwrap();
    assert_eq!((whole.number, whole.body.as_slice()), (1, &b"abc"[..]));
    assert!(super::frame::read(&mut &b""[..], |_, _| Ok(())).unwrap().is_none());
    assert!(super::frame::read(&mut &b"\x01\x00"[..], |_, _| Ok(())).is_err());
}
