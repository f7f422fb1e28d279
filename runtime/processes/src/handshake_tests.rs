//! Who proves the secret and who does not, from either side: right, wrong, missing, replayed, reflected and truncated.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use flow_storage_testing::free_port;

use super::greeting::{Hello, MAGIC, SETTINGS};
use super::handshake::{Answer, Challenge, Handshake, Side};
use super::tests::{SOON, leader, member, seeded};
use super::*;

const RIGHT: &str = "the secret of this run";

fn knowing(secret: &str, join_as: Join) -> Join {
    Join {
        secret: shared(secret),
        ..join_as
    }
}

fn shared(secret: &str) -> Option<SharedSecret> {
    Some(SharedSecret::new(secret.as_bytes()))
}

/// A connection to the leader, which may not listen yet.
fn connected(port: u16) -> TcpStream {
    loop {
        if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
            stream.set_read_timeout(Some(SOON)).unwrap();
            return stream;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// A connection that has sent a greeting, and its challenge.
fn challenged(port: u16, greeting: &[u8]) -> (TcpStream, Challenge) {
    let mut stream = connected(port);
    stream.write_all(greeting).unwrap();
    match Answer::read(&mut stream).unwrap() {
        Some(Answer::Challenge(challenge)) => (stream, challenge),
        other => panic!("{other:?}"),
    }
}

/// What a process that knows the secret sends first.
fn greeted(process: usize) -> (Handshake, Vec<u8>) {
    let digest = member(process, 2, 0).digest;
    let handshake = Handshake::new(process, shared(RIGHT).as_ref(), digest.as_bytes());
    let greeting = handshake.greet(&Hello::new(2, process, 0)).unwrap().bytes();
    (handshake, greeting)
}

#[track_caller]
fn is_refused(mut stream: TcpStream, proof: &[u8]) {
    stream.write_all(proof).unwrap();
    let answer = Answer::read(&mut stream).unwrap();
    let Some(Answer::Refused(why)) = answer else {
        panic!("{answer:?}");
    };
    assert_eq!(why, "it does not know the secret of process 0 (--secret-file)");
}

#[test]
fn those_who_know_the_secret_join_and_talk() {
    let port = free_port();
    let joining: Vec<_> = (0..3)
        .map(|process| thread::spawn(move || join(&knowing(RIGHT, member(process, 3, port)), &|_| {})))
        .collect();
    let group: Vec<_> = joining
        .into_iter()
        .map(|thread| thread.join().unwrap().unwrap())
        .collect();
    for (from, to) in [(1, 2), (2, 1), (0, 2), (1, 0)] {
        let (tell, told) = channel();
        group[to].listen(7, move |from, body| tell.send((from, body)).unwrap());
        group[from].send(to, 7, Box::new(vec![5u8; 9]));
        assert_eq!(told.recv_timeout(SOON).unwrap(), (from, vec![5; 9]));
        group[to].close(7);
    }
}

/// Who does not know the secret hears that, and nothing of the settings, which differ as well; who knows it hears of them.
#[test]
fn whoever_knows_another_secret_or_none_is_refused_and_told_nothing() {
    let port = free_port();
    let leading = leader(knowing(RIGHT, seeded(0, 2, port, "42")));
    let another = seeded(1, 2, port, "43");
    for (other, said) in [
        (
            knowing("another secret of 27 bytes.", another.clone()),
            "it does not know the secret of process 0",
        ),
        (another.clone(), "it has no secret, and process 0 has one"),
    ] {
        let refused = join(&other, &|_| {}).unwrap_err();
        assert!(matches!(refused, JoinError::Refused { .. }), "{refused}");
        let refused = refused.to_string();
        assert!(
            refused.contains(said) && refused.contains("refuses process 1"),
            "{refused}"
        );
        assert!(!refused.contains("seed") && !refused.contains("settings"), "{refused}");
    }
    let told = join(&knowing(RIGHT, another), &|_| {}).unwrap_err().to_string();
    assert!(told.contains("`train.seed` is 43 instead of 42"), "{told}");
    let right = join(&knowing(RIGHT, seeded(1, 2, port, "42")), &|_| {});
    assert_eq!(right.unwrap().count(), 2);
    let (led, said) = leading.join().unwrap();
    assert_eq!(led.unwrap().count(), 2);
    for expected in [
        "it does not know the secret of process 0",
        "it has no secret, and process 0 has one",
    ] {
        let line = said.lines().find(|line| line.contains(expected)).unwrap();
        assert!(line.starts_with("refused: process 1 ("), "{line}");
        assert!(!line.contains("seed"), "{line}");
    }

    // Where process 0 has none, too.
    let port = free_port();
    let leading = leader(member(0, 2, port));
    let refused = join(&knowing(RIGHT, member(1, 2, port)), &|_| {}).unwrap_err();
    let said = "it has a secret, and process 0 has none";
    assert!(refused.to_string().contains(said), "{refused}");
    join(&member(1, 2, port), &|_| {}).unwrap();
    assert!(leading.join().unwrap().1.contains(said));
}

/// A proof is right for the connection, the side and the process for which it was made.
#[test]
fn replayed_reflected_and_truncated_proofs_are_refused() {
    let port = free_port();
    let leading = leader(Join {
        timeout: Duration::from_secs(300),
        ..knowing(RIGHT, member(0, 2, port))
    });
    let (own, greeting) = greeted(1);
    let (mut first, challenge) = challenged(port, &greeting);
    let proof = own.proof(Side::Connecting, &greeting, &challenge);
    first.write_all(proof.as_bytes()).unwrap();
    let expected = own.proof(Side::Listening, &greeting, &challenge);
    assert_eq!(
        Answer::read(&mut first).unwrap(),
        Some(Answer::Proof(*expected.as_bytes()))
    );

    // The same bytes again.
    let (replaying, again) = challenged(port, &greeting);
    assert_ne!(again.nonce, challenge.nonce);
    is_refused(replaying, proof.as_bytes());
    // What process 0 itself said, or would say.
    let (reflecting, _) = challenged(port, &greeting);
    is_refused(reflecting, expected.as_bytes());
    let (reflecting, again) = challenged(port, &greeting);
    is_refused(reflecting, own.proof(Side::Listening, &greeting, &again).as_bytes());
    // That of another process, or of a process with other words.
    let (claiming, again) = challenged(port, &greeted(2).1);
    is_refused(claiming, own.proof(Side::Connecting, &greeting, &again).as_bytes());
    // More than a proof.
    let (longer, again) = challenged(port, &greeting);
    let right = own.proof(Side::Connecting, &greeting, &again);
    is_refused(longer, &[right.as_bytes().as_slice(), b"!"].concat());

    // All that breaks off is dropped without an answer.
    let ends = |mut stream: TcpStream, said: &[u8]| {
        // The other side may hang up in the middle.
        let _ = stream.write_all(said);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{answer:?}");
    };
    for length in (1..greeting.len()).step_by(9) {
        ends(connected(port), &greeting[..length]);
    }
    ends(connected(port), &[greeting.as_slice(), b"!"].concat());
    for length in [0, 1, 31] {
        ends(challenged(port, &greeting).0, &proof.as_bytes()[..length]);
    }
    let too_many = (SETTINGS as u32 + 1).to_le_bytes();
    for settings in [&b""[..], b"\x01", b"\x02\0\0\0x", b"\x01\0\0\0xy", &too_many] {
        let (mut proven, challenge) = challenged(port, &greeting);
        let proof = own.proof(Side::Connecting, &greeting, &challenge);
        proven.write_all(proof.as_bytes()).unwrap();
        assert!(matches!(Answer::read(&mut proven).unwrap(), Some(Answer::Proof(_))));
        ends(proven, settings);
    }
    // The first connection is still open, and has taken no place.
    let right = join(&knowing(RIGHT, member(1, 2, port)), &|_| {}).unwrap();
    assert_eq!(leading.join().unwrap().0.unwrap().peers(), right.peers());
}

/// Process 1 meets a server that does as process 0 would; the error, and all that the server got.
fn met(serve: impl FnOnce(&mut TcpStream, &[u8]) + Send + 'static) -> (JoinError, Vec<u8>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let mut greeting = vec![0; Hello::new(2, 1, 0).bytes().len()];
        stream.read_exact(&mut greeting).unwrap();
        serve(&mut stream, &greeting);
        let mut more = Vec::new();
        let _ = stream.read_to_end(&mut more);
        [greeting, more].concat()
    });
    let own = knowing(RIGHT, seeded(1, 2, port, "42"));
    let digest = own.digest;
    let own = Join {
        timeout: Duration::from_secs(4),
        ..own
    };
    let error = join(&own, &|_| {}).unwrap_err();
    let heard = serving.join().unwrap();
    // Neither the settings nor what would tell whether they are guessed.
    let holds = |part: &[u8]| heard.windows(part.len()).any(|window| window == part);
    assert!(!holds(b"seed") && !holds(digest.as_bytes()));
    (error, heard)
}

fn challenge(process: u32, nonce: [u8; 32], has_secret: bool) -> Vec<u8> {
    Answer::Challenge(Challenge {
        nonce,
        process,
        has_secret,
    })
    .bytes()
}

#[test]
fn who_listens_in_the_place_of_process_0_learns_nothing() {
    let (error, _) = met(|stream, greeting| {
        // The nonce of the process itself, and then its own proof.
        let nonce = Hello::read(&mut &*greeting).unwrap().unwrap().nonce;
        stream.write_all(&challenge(0, nonce, true)).unwrap();
        let mut proof = [0; 32];
        stream.read_exact(&mut proof).unwrap();
        stream.write_all(&Answer::Proof(proof).bytes()).unwrap();
    });
    assert!(matches!(error, JoinError::Refused { .. }), "{error}");
    assert!(
        error.to_string().contains("does not know the secret of process 1"),
        "{error}"
    );

    let length = Hello::new(2, 1, 0).bytes().len();
    for (answer, said) in [
        (challenge(0, [1; 32], false), "does not know the secret of process 1"),
        (challenge(5, [1; 32], true), "process 5 listens there"),
        (Answer::Accepted.bytes(), "is not a process of a run"),
        (Answer::Proof([1; 32]).bytes(), "is not a process of a run"),
        ([MAGIC.as_slice(), b"\x09"].concat(), "is not a process of a run"),
    ] {
        let (error, heard) = met(move |stream, _| stream.write_all(&answer).unwrap());
        assert!(matches!(error, JoinError::Refused { .. }), "{error}");
        assert!(error.to_string().contains(said), "{error}");
        assert_eq!(heard.len(), length, "{said}");
    }
}

/// Nobody is kept waiting by a server that always says a little more, or that breaks off.
#[test]
fn servers_that_never_finish_are_given_up() {
    let (error, _) = met(|stream, _| {
        let mut why = MAGIC.to_vec();
        why.push(1);
        why.extend(4096u16.to_le_bytes());
        let _ = stream.write_all(&why);
        // More than three minutes, if anybody listened.
        for _ in 0..4096 {
            if stream.write_all(b"x").is_err() {
                break;
            }
            thread::sleep(Duration::from_millis(50));
        }
    });
    assert!(matches!(error, JoinError::Failed { .. }), "{error}");
    let (error, _) = met(|stream, _| {
        stream.write_all(&challenge(0, [1; 32], true)[..20]).unwrap();
        let _ = stream.shutdown(Shutdown::Both);
    });
    assert!(matches!(error, JoinError::Failed { .. }), "{error}");
}
