//! Speaks with espeak-ng: one process for each clip, no shell, no temporary files.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use flow_audio::AudioError;

/// The help on how to install the program.
pub const INSTALL: &str = "install it (Debian and Ubuntu: `apt-get install espeak-ng`, Fedora: `dnf install espeak-ng`, macOS: `brew install espeak-ng`), or say in `program` where it is";
/// Most bytes that are read from the program: ten minutes of speech.
const MOST_BYTES: u64 = 32 << 20;
/// How long listing voices may take.
const LISTING: Duration = Duration::from_secs(20);

/// The program, with its version and voices.
#[derive(Clone, Debug)]
pub struct Espeak {
    program: PathBuf,
    limit: Duration,
}

/// How a sentence is to be spoken.
#[derive(Clone, Debug, PartialEq)]
pub struct Manner<'a> {
    pub voice: &'a str,
    /// Empty for the voice as it is.
    pub variant: &'a str,
    /// Words per minute.
    pub speed: u32,
    /// 0 to 99.
    pub pitch: u32,
}

impl Manner<'_> {
    /// As espeak-ng names it: `hi+f2`.
    pub fn name(&self) -> String {
        match self.variant {
            "" => self.voice.to_owned(),
            variant => format!("{}+{variant}", self.voice),
        }
    }
}

/// One channel of sound, full scale 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Sound {
    /// In Hz.
    pub rate: u32,
    pub signal: Vec<f32>,
}

/// Why one clip was not spoken.
#[derive(Clone, Debug, PartialEq)]
pub struct Unspoken {
    pub reason: &'static str,
    pub detail: String,
}

enum Ended {
    /// Exit status as text, standard output, standard error.
    Well(Vec<u8>),
    Badly {
        killed: bool,
        why: String,
    },
    TooLate,
}

impl Espeak {
    pub fn new(program: &Path, limit: Duration) -> Self {
        Espeak {
            program: program.to_owned(),
            limit,
        }
    }

    /// Its version text, without the path of its data.
    pub fn version(&self) -> Result<String, AudioError> {
        let text = self.ask(&["--version"])?;
        let version = text.split("Data at").next().unwrap_or_default();
        let version = version.split_whitespace().collect::<Vec<_>>().join(" ");
        if version.is_empty() {
            return Err(self.failed("it does not say its version".into()));
        }
        Ok(version)
    }

    /// Names of voices: the language column of its list, and the names of their files.
    pub fn voices(&self) -> Result<BTreeSet<String>, AudioError> {
        let text = self.ask(&["--voices"])?;
        let mut names = BTreeSet::new();
        for line in text.lines().skip(1) {
            let mut words = line.split_whitespace().skip(1);
            names.extend(words.next().map(str::to_owned));
            names.extend(words.nth(2).and_then(|file| file.rsplit('/').next()).map(str::to_owned));
        }
        Ok(names)
    }

    /// Names of variants: `f2`, `klatt`.
    pub fn variants(&self) -> Result<BTreeSet<String>, AudioError> {
        let text = self.ask(&["--voices=variant"])?;
        let name = |line: &str| {
            let (_, name) = line.split_once("!v/")?;
            Some(name.split_whitespace().next()?.to_owned())
        };
        Ok(text.lines().filter_map(name).collect())
    }

    /// Speaks one sentence. A failure that is not due to the sentence (the program cannot be started) is an error.
    pub fn speak(&self, text: &str, manner: &Manner<'_>) -> Result<Result<Sound, Unspoken>, AudioError> {
        let (speed, pitch) = (manner.speed.to_string(), manner.pitch.to_string());
        let voice = manner.name();
        let arguments = [
            "-b", "1", "-v", &voice, "-s", &speed, "-p", &pitch, "--stdin", "--stdout",
        ];
        let text = as_it_reads(text);
        let mut ended = self.run(&arguments, &text, self.limit)?;
        // Tried once more: the machine may be short of memory or time.
        if matches!(ended, Ended::Badly { killed: true, .. } | Ended::TooLate) {
            ended = self.run(&arguments, &text, self.limit)?;
        }
        let unspoken = |reason, detail| Ok(Err(Unspoken { reason, detail }));
        match ended {
            Ended::Well(wav) if wav.is_empty() => unspoken("no_audio", "espeak-ng gave nothing".into()),
            Ended::Well(wav) => match sound_of(&wav) {
                Ok(sound) if sound.signal.is_empty() => unspoken("no_audio", "espeak-ng gave no samples".into()),
                Ok(sound) => Ok(Ok(sound)),
                Err(why) => unspoken(
                    "espeak_failed",
                    format!("espeak-ng gave no WAV that can be used: {why}"),
                ),
            },
            Ended::Badly { why, .. } => unspoken("espeak_failed", why),
            Ended::TooLate => unspoken(
                "espeak_timeout",
                format!("espeak-ng was not done after {} s, twice", self.limit.as_secs_f64()),
            ),
        }
    }

    fn ask(&self, arguments: &[&str]) -> Result<String, AudioError> {
        match self.run(arguments, "", LISTING)? {
            Ended::Well(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Ended::Badly { why, .. } => Err(self.failed(why)),
            Ended::TooLate => Err(self.failed(format!("`{}` does not end", arguments.join(" ")))),
        }
    }

    fn failed(&self, why: String) -> AudioError {
        AudioError::Espeak {
            program: self.program.clone(),
            why,
        }
    }

    fn run(&self, arguments: &[&str], text: &str, limit: Duration) -> Result<Ended, AudioError> {
        let mut child = Command::new(&self.program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // In its own process group: a Ctrl-C on the terminal must not end it, as the current shard is finished
            // first.
            .process_group(0)
            .spawn()
            .map_err(|error| self.failed(format!("cannot be started: {error}")))?;
        let heard = listen(&mut child, text.as_bytes().to_vec());
        let Ok((output, complaint)) = heard.recv_timeout(limit) else {
            // It may have ended meanwhile.
            let _ = child.kill();
            child
                .wait()
                .map_err(|error| self.failed(format!("cannot be stopped: {error}")))?;
            return Ok(Ended::TooLate);
        };
        // Both its outputs are closed, so it ends soon, unless it closed them and hangs.
        let Some(status) = end_of(&mut child, limit).map_err(|error| self.failed(error.to_string()))? else {
            let _ = child.kill();
            child
                .wait()
                .map_err(|error| self.failed(format!("cannot be stopped: {error}")))?;
            return Ok(Ended::TooLate);
        };
        if status.success() {
            return Ok(Ended::Well(output));
        }
        let complaint = String::from_utf8_lossy(&complaint);
        let complaint: String = complaint.trim().chars().take(200).collect();
        Ok(Ended::Badly {
            killed: status.signal().is_some(),
            why: format!("{status}: {complaint}"),
        })
    }
}

/// The spelling that espeak-ng reads rightly. Normal form C writes the Bengali letters rra, rha and yya as two code points,
/// which version 1.51 takes for a letter and a sign that it names: it knows them as one.
fn as_it_reads(text: &str) -> String {
    text.replace("\u{9a1}\u{9bc}", "\u{9dc}")
        .replace("\u{9a2}\u{9bc}", "\u{9dd}")
        .replace("\u{9af}\u{9bc}", "\u{9df}")
}

/// Writes the text to the program and reads its outputs, on threads that end when its pipes are closed.
fn listen(child: &mut Child, text: Vec<u8>) -> mpsc::Receiver<(Vec<u8>, Vec<u8>)> {
    let (said, heard) = mpsc::channel();
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    thread::spawn(move || {
        let complaints = thread::spawn(move || read_all(stderr, 1 << 16));
        // A write error is ignored: a program that does not read its input is detected by its output.
        if let Some(mut stdin) = stdin {
            let _ = stdin.write_all(&text);
        }
        let output = read_all(stdout, MOST_BYTES);
        // The receiver is dropped after the time limit.
        let _ = said.send((output, complaints.join().unwrap_or_default()));
    });
    heard
}

/// Reads to the end, and keeps the first `limit` bytes.
fn read_all(from: Option<impl Read>, limit: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(mut from) = from {
        let _ = from.by_ref().take(limit).read_to_end(&mut bytes);
        let _ = std::io::copy(&mut from, &mut std::io::sink());
    }
    bytes
}

/// Waits for the end of a program that has closed its outputs.
fn end_of(child: &mut Child, limit: Duration) -> std::io::Result<Option<std::process::ExitStatus>> {
    let step = Duration::from_millis(1);
    let mut waited = Duration::ZERO;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if waited >= limit {
            return Ok(None);
        }
        thread::sleep(step);
        waited += step;
    }
}

/// The samples of a WAV that was written to a pipe: its sizes are invalid, and the data extends to the end.
fn sound_of(wav: &[u8]) -> Result<Sound, String> {
    let number = |at: usize, bytes: usize| -> Option<u32> {
        let field = wav.get(at..at + bytes)?;
        Some(
            field
                .iter()
                .rev()
                .fold(0, |number, byte| number << 8 | u32::from(*byte)),
        )
    };
    if wav.get(..4) != Some(b"RIFF") || wav.get(8..12) != Some(b"WAVE") {
        return Err("it does not begin like one".into());
    }
    let mut at = 12;
    let mut rate = None;
    while let (Some(name), Some(size)) = (wav.get(at..at + 4), number(at + 4, 4)) {
        match name {
            b"fmt " => {
                let (format, channels) = (number(at + 8, 2), number(at + 10, 2));
                let bits = number(at + 22, 2);
                if (format, channels, bits) != (Some(1), Some(1), Some(16)) {
                    return Err("it is not of 16 bits and one channel".into());
                }
                rate = number(at + 12, 4);
            }
            b"data" => {
                let rate = rate.ok_or("its data comes before its format")?;
                let data = wav.get(at + 8..).unwrap_or_default();
                let samples = data.chunks_exact(2).map(|pair| i16::from_le_bytes([pair[0], pair[1]]));
                return Ok(Sound {
                    rate,
                    signal: samples.map(|sample| f32::from(sample) / 32_768.0).collect(),
                });
            }
            _ => {}
        }
        // Chunks begin at even places.
        at += 8 + size as usize + (size as usize & 1);
    }
    Err("it has no data".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{raw_wav, wav};

    #[test]
    fn letters_are_handed_over_as_espeak_knows_them() {
        assert_eq!(
            as_it_reads("\u{99b}\u{9af}\u{9bc} \u{997}\u{9be}\u{9a1}\u{9bc}\u{9bf}"),
            "\u{99b}\u{9df} \u{997}\u{9be}\u{9dc}\u{9bf}"
        );
        assert_eq!(as_it_reads("बड\u{93c}ा"), "बड\u{93c}ा");
    }

    #[test]
    fn a_wav_from_a_pipe_is_read_to_its_end() {
        let mut bytes = wav(22_050, 1, &[0, 16_384, -32_768]);
        // The sizes that espeak-ng writes, since it cannot know them.
        bytes[4..8].copy_from_slice(&0x7fff_f024u32.to_le_bytes());
        bytes[40..44].copy_from_slice(&0x7fff_f000u32.to_le_bytes());
        let sound = sound_of(&bytes).unwrap();
        assert_eq!((sound.rate, sound.signal), (22_050, vec![0.0, 0.5, -1.0]));
        for length in 0..bytes.len() {
            // A header cut short is refused; samples cut short are fewer.
            assert_eq!(sound_of(&bytes[..length]).is_ok(), length >= 44, "{length}");
        }
        assert!(sound_of(&wav(22_050, 2, &[0, 0])).is_err());
        assert!(sound_of(&raw_wav(22_050, 1, 3, 32, &[0; 8])).is_err());
        assert!(sound_of(b"RIFF\xff\xff\xff\xffWAVExxxx\xff\xff\xff\xff").is_err());
    }
}
