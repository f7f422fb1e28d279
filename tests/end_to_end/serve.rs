//! `flow serve`: from start to shutdown by a signal.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use crate::binary::{program, stderr};

/// Longer than the small model takes to load, however slow the machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// Ends the program where a test fails before it does.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn the_service_begins_with_its_address_and_ends_well_at_a_signal() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let mut flow = program();
        flow.args(["serve", "--listen", "127.0.0.1:0", "--log-requests"]);
        flow.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut running = Running(flow.spawn().unwrap());
        let mut out = BufReader::new(running.0.stdout.take().unwrap());
        // Read all the time, as a pipe that is full would hold up the program.
        let mut errors = running.0.stderr.take().unwrap();
        let told = spawn(move || {
            let mut told = String::new();
            errors.read_to_string(&mut told).map(|_| told)
        });
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let address = line
            .strip_prefix("listening on http://")
            .unwrap_or_else(|| panic!("{line}"))
            .trim()
            .to_owned();

        let begin = Instant::now();
        while !get(&address, "/ready").starts_with("HTTP/1.1 200") {
            assert!(begin.elapsed() < PATIENCE);
            sleep(Duration::from_millis(20));
        }
        assert!(get(&address, "/v1/models?secret=1").contains("\"id\":\"small\""));

        // SAFETY: the call takes two numbers; the process is a child that was not waited for, so the number is its own.
        assert_eq!(unsafe { libc::kill(running.0.id() as i32, signal) }, 0);
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = running.0.try_wait().unwrap() {
                break status;
            }
            assert!(begin.elapsed() < PATIENCE, "signal {signal} does not end it");
            sleep(Duration::from_millis(20));
        };
        assert_eq!(status.code(), Some(0), "signal {signal}");
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "", "one line alone is on standard output");
        let told = told.join().unwrap().unwrap();
        assert!(
            told.contains("bundled small model") && told.contains("stopping"),
            "{told}"
        );
        assert!(told.contains("/v1/models") && !told.contains("secret"), "{told}");
    }
}

#[test]
fn wrong_settings_end_it_before_it_listens() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("serve.yaml");
    for (text, said) in [
        ("http: {max_uplod: 1}\n", "max_uplod"),
        ("http: {listen: 'nowhere'}\n", "cannot listen on nowhere"),
    ] {
        std::fs::write(&file, text).unwrap();
        let output = program().arg("serve").arg("--config").arg(&file).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}: {}", stderr(&output));
        assert!(stderr(&output).contains(said), "{text}: {}", stderr(&output));
        assert!(output.stdout.is_empty());
    }
    // Of several models, one that is not loaded at the start.
    let file = folder.path().join("small.nemo");
    std::fs::write(&file, "no model").unwrap();
    let output = program()
        .args(["serve", "--listen", "127.0.0.1:0", "--model"])
        .arg(&file)
        .args(["--model", "no-such.nemo"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("no-such.nemo does not exist"),
        "{}",
        stderr(&output)
    );
    assert!(output.stdout.is_empty());
}
