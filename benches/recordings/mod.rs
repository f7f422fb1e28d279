//! Recordings for benchmarks, made of those of the bundled corpus.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use flow_audio::wire_audio::wav_header;

/// Samples of a second.
pub const RATE: usize = 16_000;

/// A mono WAV file of 16 bits, of samples in [-1, 1] at 16 kHz.
pub fn wav(samples: &[f32]) -> Vec<u8> {
    let data = (2 * samples.len()) as u32;
    let mut bytes = wav_header(RATE as u32, 1, 2, Some(data)).to_vec();
    let number = |sample: &f32| ((sample.clamp(-1.0, 1.0) * 32_767.0) as i16).to_le_bytes();
    bytes.extend(samples.iter().flat_map(number));
    bytes
}

fn tars(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the corpus can be read") {
        let path = entry.expect("the corpus can be read").path();
        if path.is_dir() {
            tars(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "tar") {
            found.push(path);
        }
    }
}

/// The recordings of the bundled corpus, at 16 kHz, of a second or more.
pub fn clips(root: &Path) -> Vec<Vec<f32>> {
    let mut paths = Vec::new();
    tars(&root.join("tests/data/corpus/mini/shards"), &mut paths);
    paths.sort();
    let mut clips = Vec::new();
    for path in paths {
        let mut archive = tar::Archive::new(File::open(&path).expect("a shard"));
        for entry in archive.entries().expect("a tar") {
            let mut bytes = Vec::new();
            // The corpus has members that are damaged on purpose.
            let read = entry.is_ok_and(|mut entry| entry.read_to_end(&mut bytes).is_ok());
            if let (true, Ok(samples)) = (read, flow_audio::decode::decode(&bytes, 60.0))
                && samples.len() >= RATE
            {
                clips.push(samples);
            }
        }
    }
    assert!(!clips.is_empty(), "the bundled corpus holds no recording");
    clips
}

/// `length` samples of the clips one after the other, with half a second of silence after each.
pub fn long(clips: &[Vec<f32>], length: usize) -> Vec<f32> {
    let mut long = Vec::with_capacity(length + 60 * RATE);
    for clip in clips.iter().cycle() {
        if long.len() >= length {
            break;
        }
        long.extend(clip);
        long.resize(long.len() + RATE / 2, 0.0);
    }
    long.truncate(length);
    long
}
