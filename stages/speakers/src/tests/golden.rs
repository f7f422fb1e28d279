//! Golden data for tests: made by pyannote, Silero, scipy and others. Names, shapes and lengths are taken from the files.

use std::path::PathBuf;

use flow_nn::tensor_files::read_packed;
use safetensors::{Dtype, SafeTensors};

/// A file of the golden data: of the folder `FLOW_TEST_GOLDEN_SPEAKERS`, or the bundled one.
pub fn file(name: &str) -> PathBuf {
    std::env::var_os("FLOW_TEST_GOLDEN_SPEAKERS")
        .map_or_else(
            || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/golden/speakers")),
            PathBuf::from,
        )
        .join(name)
}

/// Whether the golden data are the bundled ones, for which all expected values are known.
pub fn is_bundled() -> bool {
    std::env::var_os("FLOW_TEST_GOLDEN_SPEAKERS").is_none()
}

/// The bytes of a file, which may be packed by elements of `size` bytes.
fn read(name: &str, size: usize) -> Vec<u8> {
    let path = file(name);
    read_packed(&path, size).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub fn json(name: &str) -> serde_json::Value {
    serde_json::from_slice(&read(name, 1)).unwrap()
}

/// The recordings (`*.flac`) by name, decoded, at least one.
pub fn recordings() -> Vec<(String, Vec<f32>)> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(file(""))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "flac"))
        .collect();
    paths.sort();
    assert!(!paths.is_empty());
    let recording = |path: &PathBuf| {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        (
            name,
            flow_audio::decode::decode(&std::fs::read(path).unwrap(), 1e5).unwrap(),
        )
    };
    paths.iter().map(recording).collect()
}

/// This many samples of speech: those of a recording, again and again where it is shorter.
pub fn speech(samples: usize) -> Vec<f32> {
    let (_, recording) = recordings().swap_remove(0);
    recording.into_iter().cycle().take(samples).collect()
}

/// Parts of the recordings, of this many samples, that begin at each `step`: golden data do not say of which part they are. It is
/// the one that they are alike.
pub fn parts(samples: usize, step: usize) -> impl Iterator<Item = Vec<f32>> {
    recordings().into_iter().flat_map(move |(_, recording)| {
        let starts = (0..recording.len()).step_by(step);
        let parts = starts.map_while(|start| Some(recording.get(start..start + samples)?.to_vec()));
        parts.collect::<Vec<_>>()
    })
}

/// Whether nine of ten values are near those of the golden data: these are of one part, whatever is wrong with some of them.
pub fn alike(found: &[f32], expected: &[f32], distance: f32) -> bool {
    let near = found.iter().zip(expected).filter(|(a, b)| (*a - *b).abs() < distance);
    found.len() == expected.len() && near.count() * 10 >= 9 * found.len()
}

/// Says that something was not compared, and why.
#[allow(clippy::print_stdout, reason = "tells why nothing was compared")]
pub fn not_compared(what: &str, why: &str) {
    println!("not compared: {what}: {why}");
}

/// The same of what the bundled golden data have.
pub fn lacks(what: &str, why: &str) {
    assert!(!is_bundled(), "{what}: {why}");
    not_compared(what, why);
}

/// The turns of a recording that a person marked; none if the folder has none.
pub fn turns(recording: &str) -> Option<Vec<crate::turns::Turn>> {
    let text = std::fs::read_to_string(file(&format!("{recording}.rttm"))).ok()?;
    crate::rttm::read_rttm(&text).unwrap().remove(recording)
}

/// How many speakers the reference hears in a recording if it is not told how many there are: of `flow_reference.json`.
pub fn speakers_heard(reference: &serde_json::Value, recording: &str) -> usize {
    let cases = reference.as_array().unwrap();
    let case = cases.iter().find(|case| case["key"] == format!("{recording}.auto"));
    let turns = case.map_or(&[][..], |case| case["turns"].as_array().unwrap());
    let speakers: std::collections::BTreeSet<u64> = turns.iter().filter_map(|turn| turn[2].as_u64()).collect();
    speakers.len()
}

/// The tensors of a file.
pub struct Tensors(Vec<u8>);

impl Tensors {
    pub fn load(name: &str) -> Self {
        Self(read(name, 4))
    }

    fn all(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.0).unwrap()
    }

    /// Names in order.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.all().names().iter().map(|name| (*name).to_owned()).collect();
        names.sort();
        names
    }

    pub fn has(&self, name: &str) -> bool {
        self.all().tensor(name).is_ok()
    }

    /// Shape and values of a tensor of any type.
    pub fn doubles(&self, name: &str) -> (Vec<usize>, Vec<f64>) {
        let all = self.all();
        let tensor = all.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        let data = tensor.data();
        let values = match tensor.dtype() {
            Dtype::F64 => data
                .as_chunks()
                .0
                .iter()
                .map(|&bytes| f64::from_le_bytes(bytes))
                .collect(),
            Dtype::F32 => data
                .as_chunks()
                .0
                .iter()
                .map(|&bytes| f64::from(f32::from_le_bytes(bytes)))
                .collect(),
            Dtype::I64 => data
                .as_chunks()
                .0
                .iter()
                .map(|&bytes| i64::from_le_bytes(bytes) as f64)
                .collect(),
            Dtype::U8 => data.iter().map(|&byte| f64::from(byte)).collect(),
            other => panic!("{name} is {other:?}"),
        };
        (tensor.shape().to_vec(), values)
    }

    pub fn floats(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        let (shape, values) = self.doubles(name);
        (shape, values.iter().map(|&value| value as f32).collect())
    }

    pub fn find(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        self.has(name).then(|| self.floats(name))
    }

    pub fn bytes(&self, name: &str) -> (Vec<usize>, Vec<u8>) {
        let (shape, values) = self.doubles(name);
        (shape, values.iter().map(|&value| value as u8).collect())
    }

    pub fn integers(&self, name: &str) -> (Vec<usize>, Vec<i64>) {
        let (shape, values) = self.doubles(name);
        (shape, values.iter().map(|&value| value as i64).collect())
    }
}
