//! Golden data of NeMo, silero and WhisperX.

use std::path::{Path, PathBuf};

use flow_nn::tensor_files::read_packed;
use flow_storage::Storage;
use serde_json::Value;

use crate::{Segment, Transcript, Word};

fn file(variable: &str, bundled: &str, name: &str) -> PathBuf {
    std::env::var_os(variable)
        .map_or_else(|| root().join(bundled), PathBuf::from)
        .join(name)
}

/// The folder of the workspace.
pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// A file of the golden data of transcription.
pub fn transcription(name: &str) -> PathBuf {
    file(
        "FLOW_TEST_GOLDEN_TRANSCRIPTION",
        "tests/data/golden/transcription",
        name,
    )
}

/// Whether the golden data of transcription are the bundled ones, for which all expected values are known.
pub fn is_bundled() -> bool {
    std::env::var_os("FLOW_TEST_GOLDEN_TRANSCRIPTION").is_none()
}

/// The model that the golden data of transcription are of: `small.nemo` beside them, or else the bundled one. Tests that compare
/// nothing with them use the bundled one.
pub fn golden_model() -> PathBuf {
    let beside = transcription("small.nemo");
    if beside.is_file() { beside } else { bundled_model() }
}

pub fn bundled_model() -> PathBuf {
    root().join("configs/models/small.nemo")
}

/// The samples of a recording of the golden data of transcription: of the file, which may be beside them, or of the bundled
/// corpus by its number. None, and a line that says so, if it is in neither.
pub fn golden_recording(storage: &Storage, file: &str, id: &str) -> Option<Vec<f32>> {
    let beside = transcription(file);
    if beside.is_file() {
        return Some(flow_audio::samples::samples(storage, &beside, 1000.0).unwrap().unwrap());
    }
    let found = corpus()
        .iter()
        .find_map(|tar| member(storage, tar, &format!("{id}.flac")));
    if found.is_none() {
        println!("not compared: {file}, {id}, is neither beside the golden data nor in the bundled corpus");
    }
    Some(flow_audio::decode::decode(&found?, 1000.0).unwrap())
}

/// The tars of the bundled corpus.
fn corpus() -> Vec<PathBuf> {
    let below = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths
    };
    let languages = below(&root().join("tests/data/corpus/mini/shards"));
    let shards = languages
        .iter()
        .filter(|path| path.is_dir())
        .flat_map(|path| below(path));
    let files = shards.filter(|path| path.is_dir()).flat_map(|path| below(&path));
    files
        .filter(|path| path.extension().is_some_and(|ending| ending == "tar"))
        .collect()
}

/// A file of the golden data of speakers and voice activity.
pub fn speakers(name: &str) -> PathBuf {
    file("FLOW_TEST_GOLDEN_SPEAKERS", "tests/data/golden/speakers", name)
}

pub fn speakers_json(name: &str) -> Value {
    json(&speakers(name))
}

/// A file of JSON, which may be packed.
pub fn json(path: &Path) -> Value {
    let text = read_packed(path, 1).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The float32 tensors of a safetensors file whose names `wanted` takes: name, shape, values. The file may be packed.
pub fn tensors(path: &Path, wanted: impl Fn(&str) -> bool) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let bytes = read_packed(path, 4);
    let bytes = bytes.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter().filter(|(name, _)| wanted(name));
    tensors
        .map(|(name, tensor)| {
            assert_eq!(tensor.dtype(), safetensors::Dtype::F32, "{name}");
            let numbers = tensor.data().chunks_exact(4);
            let numbers = numbers.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
            (name, tensor.shape().to_vec(), numbers.collect())
        })
        .collect()
}

/// Transcripts and how WhisperX writes them, by format, without limits of lines.
pub fn whisperx_cases() -> Vec<(Transcript, Vec<(String, String)>)> {
    let cases = speakers_json("words_to_speakers.json");
    let cases = cases.as_array().unwrap().iter().map(|case| {
        let segments = case["result"]["segments"]
            .as_array()
            .unwrap()
            .iter()
            .map(whisperx_segment);
        let transcript = Transcript {
            segments: segments.collect(),
            ..Transcript::default()
        };
        let written = case["written"].as_object().unwrap().iter();
        // A key reads `srt max_line_width=None max_line_count=None highlight_words=False`.
        let plain = written.filter_map(|(key, text)| {
            let (format, layout) = key.split_once(' ')?;
            (layout == "max_line_width=None max_line_count=None highlight_words=False")
                .then(|| (format.to_owned(), text.as_str().unwrap().to_owned()))
        });
        (transcript, plain.collect())
    });
    cases.collect()
}

fn whisperx_segment(segment: &Value) -> Segment {
    let speaker = |value: &Value| value["speaker"].as_str().map(str::to_owned);
    let times = |value: &Value| Some((value["start"].as_f64()?, value["end"].as_f64()?));
    let words = segment["words"].as_array().map_or(&[][..], Vec::as_slice);
    // Without any times of words, WhisperX shows the segment.
    let words = if words.iter().any(|word| times(word).is_some()) {
        words
    } else {
        &[]
    };
    // WhisperX leaves out the times of words that it could not align: they come with the word before or after.
    let mut last = words.iter().find_map(times).map(|(start, _)| start);
    let words = words.iter().map(|word| {
        let (start, end) = times(word)
            .or(last.map(|last| (last, last)))
            .expect("a word with times");
        last = Some(end);
        Word {
            word: word["word"].as_str().unwrap().to_owned(),
            start,
            end,
            confidence: word["score"].as_f64(),
            speaker: speaker(word),
        }
    });
    let words = words.collect();
    Segment {
        start: segment["start"].as_f64().unwrap(),
        end: segment["end"].as_f64().unwrap(),
        text: segment["text"].as_str().unwrap().to_owned(),
        confidence: None,
        speaker: speaker(segment),
        words,
    }
}

/// A mono WAV file of 16 bits.
pub fn wav(rate: u32, samples: &[i16]) -> Vec<u8> {
    let data = samples.len() as u32 * 2;
    let mut file = b"RIFF".to_vec();
    file.extend((36 + data).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    file.extend(rate.to_le_bytes());
    file.extend((rate * 2).to_le_bytes());
    file.extend(b"\x02\0\x10\0data");
    file.extend(data.to_le_bytes());
    file.extend(samples.iter().flat_map(|sample| sample.to_le_bytes()));
    file
}

/// The samples of recordings of the bundled corpus, each `step`th of every tar.
pub fn corpus_samples(storage: &Storage, step: usize) -> Vec<Vec<f32>> {
    let mut found = Vec::new();
    for tar in corpus() {
        let mut file = std::fs::File::open(&tar).unwrap_or_else(|error| panic!("{}: {error}", tar.display()));
        let length = file.metadata().unwrap().len();
        let listing = flow_audio::tar::list(&mut file, length).unwrap();
        for member in listing.last_of_each_name().iter().step_by(step) {
            let bytes = flow_audio::decode::read_range(storage, &tar, member.offset, member.size).unwrap();
            found.extend(flow_audio::decode::decode(&bytes, 100.0).ok());
        }
    }
    found
}

/// The bytes of a Hindi recording of the bundled corpus: FLAC, 16 kHz, mono.
pub fn hindi(storage: &Storage, name: &str) -> Vec<u8> {
    let tar = root().join("tests/data/corpus/mini/shards/hi/hi_0000/hi_0000.tar");
    member(storage, &tar, name).unwrap_or_else(|| panic!("{} has no {name}", tar.display()))
}

/// The bytes of the member of a tar whose name ends so.
fn member(storage: &Storage, tar: &Path, name: &str) -> Option<Vec<u8>> {
    let mut file = std::fs::File::open(tar).unwrap_or_else(|error| panic!("{}: {error}", tar.display()));
    let length = file.metadata().unwrap().len();
    let listing = flow_audio::tar::list(&mut file, length).unwrap();
    let members = listing.last_of_each_name();
    let member = members.iter().find(|member| member.name.ends_with(name))?;
    Some(flow_audio::decode::read_range(storage, tar, member.offset, member.size).unwrap())
}
