//! The process that runs PyTorch's networks.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

pub struct Peer {
    running: Option<(Child, ChildStdin, BufReader<ChildStdout>)>,
}

/// One run of a case.
pub struct Ran {
    pub cpu_seconds: f64,
    /// The first values of the result.
    pub values: Vec<f32>,
}

impl Peer {
    /// Starts it on one thread, with the inputs and weights of a folder. If it does not start, the reason is printed, and it is
    /// left out.
    pub fn start(folder: &Path) -> Peer {
        let python = std::env::var("FLOW_BENCH_PYTHON").unwrap_or_else(|_| "python3".into());
        let child = Command::new(&python)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/peers/speakers.py"))
            .arg(folder)
            .arg("1")
            .envs([
                ("OMP_NUM_THREADS", "1"),
                ("MKL_NUM_THREADS", "1"),
                ("CUDA_VISIBLE_DEVICES", ""),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let running = child.ok().and_then(|mut child| {
            let (input, output) = (child.stdin.take()?, child.stdout.take()?);
            Some((child, input, BufReader::new(output)))
        });
        let mut peer = Peer { running };
        match peer.answer() {
            Some(hello) => println!("torch {}, one thread", hello["torch"]),
            None => {
                println!("PyTorch is skipped: {python} does not have torch");
                peer.running = None;
            }
        }
        peer
    }

    fn answer(&mut self) -> Option<Value> {
        let (_, _, output) = self.running.as_mut()?;
        loop {
            let mut line = String::new();
            if output.read_line(&mut line).ok()? == 0 {
                return None;
            }
            // Libraries talk on standard output too.
            if let Ok(value) = serde_json::from_str::<Value>(&line) {
                return Some(value);
            }
        }
    }

    /// One run of a case; none, with the reason printed, if it cannot be run.
    pub fn run(&mut self, case: &str) -> Option<Ran> {
        let (_, input, _) = self.running.as_mut()?;
        let sent = writeln!(input, "{case}").and_then(|()| input.flush());
        let answer = sent.ok().and_then(|()| self.answer());
        let Some(answer) = answer else {
            println!("PyTorch is skipped from here on: it failed at `{case}`");
            self.running = None;
            return None;
        };
        if let Some(missing) = answer["missing"].as_str() {
            println!("the peer of {case} is skipped: {missing}");
            return None;
        }
        let values = answer["values"].as_array()?.iter();
        Some(Ran {
            cpu_seconds: answer["cpu"].as_f64()?,
            values: values.map(|value| value.as_f64().unwrap_or(f64::NAN) as f32).collect(),
        })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some((mut child, input, _)) = self.running.take() {
            drop(input);
            // It ends with its input.
            let _ = child.wait();
        }
    }
}
