//! `flow speakers`: the two voices of the bundled conversation are found again in its second part.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use crate::binary::{expect_code, program, stderr, wav};

const RATE: usize = 16_000;
/// Nobody speaks here, in seconds.
const CUT: f64 = 21.4;

/// `flow ...` in a folder, which must succeed; its standard output.
fn flow(folder: &Path, line: &str) -> String {
    let mut flow = program();
    let output = flow.current_dir(folder).args(line.split(' ')).output().unwrap();
    expect_code(&output, 0);
    String::from_utf8(output.stdout).unwrap()
}

/// Turns of an RTTM: start, end, speaker.
fn turns(path: &Path) -> Vec<(f64, f64, String)> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let turn = |line: &str| {
        let fields: Vec<&str> = line.split(' ').collect();
        let [start, duration] = [3, 4].map(|at| fields[at].parse::<f64>().unwrap());
        (start, start + duration, fields[7].to_owned())
    };
    text.lines().map(turn).collect()
}

/// Who of the reference speaks most of the time in the turns of each speaker of a part that begins at `from` seconds.
fn heard_as(part: &Path, reference: &[(f64, f64, String)], from: f64) -> BTreeMap<String, String> {
    let mut seconds: BTreeMap<(String, String), f64> = BTreeMap::new();
    for (start, end, speaker) in turns(part) {
        for (true_start, true_end, of) in reference {
            let common = (end + from).min(*true_end) - (start + from).max(*true_start);
            *seconds.entry((speaker.clone(), of.clone())).or_default() += common.max(0.0);
        }
    }
    let mut most: BTreeMap<String, (f64, String)> = BTreeMap::new();
    for ((speaker, of), common) in seconds {
        let best = most.entry(speaker).or_default();
        if common > best.0 {
            *best = (common, of);
        }
    }
    most.into_iter().map(|(speaker, (_, of))| (speaker, of)).collect()
}

#[test]
fn voices_are_the_same_in_two_recordings() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/speakers");
    let bytes = std::fs::read(bundled.join("conv2.flac")).unwrap();
    let samples = flow_audio::decode::decode(&bytes, 60.0).unwrap();
    let samples: Vec<i16> = samples.iter().map(|sample| (sample * 32767.0).round() as i16).collect();
    let (first, second) = samples.split_at((CUT * RATE as f64) as usize);
    std::fs::create_dir_all(folder.join("in/later")).unwrap();
    std::fs::write(folder.join("in/first.wav"), wav(first)).unwrap();
    std::fs::write(folder.join("in/later/second.wav"), wav(second)).unwrap();

    flow(folder, "diarize in --out out --format json --progress none");
    let said = flow(folder, "speakers add out");
    assert!(
        said.contains("2 recordings added, 0 replaced, 0 unchanged; 4 speakers"),
        "{said}"
    );
    let list = || serde_json::from_str::<Value>(&flow(folder, "speakers list --json")).unwrap();
    let voices = list();
    let recordings: Vec<u64> = voices["voices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|voice| voice["recordings"].as_u64().unwrap())
        .collect();
    assert_eq!(recordings, [2, 2], "{voices}");

    flow(folder, "speakers name V1 Ann");
    flow(folder, "speakers name V2 Bob");
    flow(folder, "speakers apply out --out named");
    let reference = turns(&bundled.join("conv2.rttm"));
    let heard = heard_as(&folder.join("named/first.rttm"), &reference, 0.0);
    assert_eq!(
        heard,
        heard_as(&folder.join("named/later/second.rttm"), &reference, CUT)
    );
    assert_eq!(heard.keys().collect::<Vec<_>>(), ["Ann", "Bob"]);
    assert_eq!(heard.values().collect::<BTreeSet<_>>().len(), 2, "{heard:?}");

    // The exported voices name the speakers of a diarization: the same turns, and in the store the same voices.
    flow(folder, "speakers export known.json");
    flow(
        folder,
        "diarize in --out out --format json,rttm --known-speakers known.json --progress none",
    );
    for part in ["first.rttm", "later/second.rttm"] {
        let [known, applied] = ["out", "named"].map(|of| turns(&folder.join(of).join(part)));
        assert_eq!(known.len(), applied.len());
        for (known, applied) in known.iter().zip(&applied) {
            // The JSON has both ends of a turn to the millisecond, RTTM its start and its duration.
            let is_near = |a: f64, b: f64| (a - b).abs() < 0.0015;
            let same = known.2 == applied.2 && is_near(known.0, applied.0) && is_near(known.1, applied.1);
            assert!(same, "{known:?}, not {applied:?}");
        }
    }
    let named = list();
    let said = flow(folder, "speakers add out");
    assert!(said.contains("0 recordings added, 2 replaced"), "{said}");
    assert_eq!(list(), named);
    for _ in 0..3 {
        flow(folder, "speakers undo");
    }
    assert_eq!(list(), voices);
    let history = flow(folder, "speakers history");
    assert_eq!(history.matches("undone").count(), 3, "{history}");

    // What is not a diarization is named, and nothing changes.
    std::fs::write(folder.join("text.json"), "[]").unwrap();
    let output = program()
        .current_dir(folder)
        .args(["speakers", "add", "text.json"])
        .output()
        .unwrap();
    expect_code(&output, 1);
    assert!(
        stderr(&output).contains("text.json: it is not a diarization"),
        "{}",
        stderr(&output)
    );
}
