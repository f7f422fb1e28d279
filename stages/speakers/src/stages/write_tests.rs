use flow_kind::Storage;
use flow_kind::output_files::missing;
use flow_runtime::harness::{Harness, Output};

use super::*;
use crate::rttm::read_rttm;
use crate::stages::rows::{
    recordings_batch, recordings_schema, speakers_batch, speakers_schema, turns_batch, turns_schema,
};

fn turn(start: f64, end: f64, speaker: &str) -> Turn {
    Turn {
        start,
        end,
        speaker: speaker.to_owned(),
    }
}

fn harness(out: &Path, formats: &[Format]) -> Harness<Write> {
    let settings = WriteSettings {
        out: out.to_owned(),
        formats: formats.to_vec(),
        keep: BTreeSet::new(),
    };
    Harness::<Write>::new(settings)
        .input("turns", turns_schema())
        .input("exclusive", turns_schema())
        .input("speakers", speakers_schema())
        .input("recordings", recordings_schema())
}

fn run(out: &Path, formats: &[Format]) -> Output {
    let turns = [turn(0.5, 1.2504, "SPEAKER_00"), turn(1.0, 2.0, "Ann Lee")];
    let exclusive = [turn(0.5, 1.0, "SPEAKER_00"), turn(1.0, 2.0, "Ann Lee")];
    let speaker = |name: &str| Speaker {
        name: name.to_owned(),
        embedding: vec![0.5, -0.25],
        seconds: 1.0,
    };
    let speakers = speakers_batch(&[speaker("SPEAKER_00"), speaker("Ann Lee")]).unwrap();
    harness(out, formats)
        .feed("turns", "talks/a", turns_batch(&turns).unwrap())
        .feed("exclusive", "talks/a", turns_batch(&exclusive).unwrap())
        .feed("speakers", "talks/a", speakers)
        .feed(
            "recordings",
            "talks/a",
            recordings_batch("talks/a b.wav", 2.0, 2, None).unwrap(),
        )
        .feed(
            "recordings",
            "silence",
            recordings_batch("silence.wav", 2.0, 0, None).unwrap(),
        )
        .feed(
            "recordings",
            "cut",
            recordings_batch("cut.wav", 2.250_4, 0, Some(2.250_4)).unwrap(),
        )
        .empty_partition("recordings", "refused")
        .run()
        .unwrap()
}

#[test]
fn each_recording_gets_a_file_of_each_format() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    let output = run(&out, &[Format::Json, Format::Rttm, Format::Json]);
    let read = |name: &str| std::fs::read_to_string(out.join(name)).unwrap();
    assert_eq!(
        read("talks/a.rttm"),
        "SPEAKER a_b 1 0.500 0.750 <NA> <NA> SPEAKER_00 <NA> <NA>\n\
         SPEAKER a_b 1 1.000 1.000 <NA> <NA> Ann_Lee <NA> <NA>\n"
    );
    assert_eq!(read_rttm(&read("talks/a.rttm")).unwrap()["a_b"].len(), 2);
    let json: Value = serde_json::from_str(&read("talks/a.json")).unwrap();
    assert_eq!(
        json,
        json!({
            "diarization": [
                {"start": 0.5, "end": 1.25, "speaker": "SPEAKER_00"},
                {"start": 1.0, "end": 2.0, "speaker": "Ann Lee"},
            ],
            "exclusive_diarization": [
                {"start": 0.5, "end": 1.0, "speaker": "SPEAKER_00"},
                {"start": 1.0, "end": 2.0, "speaker": "Ann Lee"},
            ],
            "speakers": [
                {"speaker": "SPEAKER_00", "seconds": 1.0, "embedding": [0.5, -0.25]},
                {"speaker": "Ann Lee", "seconds": 1.0, "embedding": [0.5, -0.25]},
            ],
        })
    );
    // Nobody speaks: that is a diarization, too. What was refused has none.
    assert_eq!(read("silence.rttm"), "");
    let silent: Value = serde_json::from_str(&read("silence.json")).unwrap();
    assert_eq!(
        silent,
        json!({"diarization": [], "exclusive_diarization": [], "speakers": []})
    );
    let cut: Value = serde_json::from_str(&read("cut.json")).unwrap();
    assert_eq!(
        cut,
        json!({"diarization": [], "exclusive_diarization": [], "speakers": [], "damaged_at": 2.25})
    );
    assert_eq!(read("cut.rttm"), "");
    assert!(!out.join("refused.rttm").exists());
    let files = output.rows("files", "talks/a");
    assert_eq!(files.num_rows(), 2);
    let committed = Artifact::in_memory(files.schema(), vec![(Partition::new("talks/a"), vec![files])]).unwrap();
    let look = || {
        missing(&Storage::default(), &BTreeSet::new(), &committed, &out, 1)
            .unwrap()
            .into_values()
            .next()
    };
    assert_eq!(look(), None);
    std::fs::write(out.join("talks/a.rttm"), "other").unwrap();
    assert!(look().unwrap().contains("another than the one"));
}

#[test]
fn nothing_to_write_is_refused() {
    let refused = |out: &str, formats: &[Format]| harness(Path::new(out), formats).shape().unwrap_err().to_string();
    assert!(refused("out", &[]).contains("`formats` is empty"));
    assert!(refused("", &[Format::Rttm]).contains("names no folder"));
    assert!(harness(Path::new("out"), &Format::ALL).shape().is_ok());
}
