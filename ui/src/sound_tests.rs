use crate::browse::RowSet;
use arrow::array::{ArrayRef, BinaryArray, Float64Array, StringArray};
use arrow::record_batch::RecordBatch;
use axum::http::HeaderValue;

use super::*;

fn table(shards: Option<&Path>, beside: Option<&Path>) -> Table {
    Table {
        rows: RowSet::of_rejects(Vec::new()).unwrap(),
        title: String::new(),
        shards: shards.map(Path::to_owned),
        beside: beside.map(Path::to_owned),
    }
}

fn row(columns: &[(&str, ArrayRef)]) -> RecordBatch {
    RecordBatch::try_from_iter(columns.iter().map(|(name, column)| (*name, Arc::clone(column)))).unwrap()
}

fn text(text: &str) -> ArrayRef {
    Arc::new(StringArray::from(vec![text]))
}

fn number(number: f64) -> ArrayRef {
    Arc::new(Float64Array::from(vec![number]))
}

/// A ramp, so that every place sounds another way.
fn ramp(seconds: f64) -> Vec<f32> {
    let samples = (seconds * 16_000.0) as usize;
    (0..samples).map(|place| place as f32 / samples as f32).collect()
}

#[test]
fn sounds_are_found_in_files_tars_and_rows() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = wav(&ramp(2.0));
    std::fs::write(folder.path().join("a.wav"), &bytes).unwrap();
    let mut tar = tar::Builder::new(Vec::new());
    for (name, content) in [("x.wav", &b"none"[..]), ("./b.wav", &bytes)] {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        tar.append_data(&mut header, name, content).unwrap();
    }
    std::fs::write(folder.path().join("s.tar"), tar.into_inner().unwrap()).unwrap();
    let path = folder.path().join("a.wav").display().to_string();
    let (below, manifest) = (table(Some(folder.path()), None), table(None, Some(folder.path())));
    let heard = |row: RecordBatch, table: &Table| {
        Place::of_row(&row, table)
            .unwrap()
            .samples(&flow_storage::Storage::default())
    };
    let whole = heard(row(&[("audio_path", text(&path))]), &below).unwrap();
    assert_eq!(whole.len(), 32_000);
    let part = heard(
        row(&[
            ("audio_filepath", text("a.wav")),
            ("offset", number(0.5)),
            ("duration", number(1.0)),
        ]),
        &manifest,
    )
    .unwrap();
    assert_eq!(part, whole[8000..24_000]);
    let member = row(&[("tar_path", text("s.tar")), ("tar_member_name", text("b.wav"))]);
    assert_eq!(heard(member, &below).unwrap(), whole);
    // A written manifest has the whole path, beside a folder of shards or without one.
    let whole_path = text(&folder.path().join("s.tar").display().to_string());
    let member = row(&[("tar_path", whole_path), ("tar_member_name", text("b.wav"))]);
    assert_eq!(heard(member.clone(), &below).unwrap(), whole);
    assert_eq!(heard(member, &table(None, None)).unwrap(), whole);
    let reject = row(&[(
        "values",
        text("{\"tar_path\":\"s.tar\",\"tar_member_name\":\"./b.wav\"}"),
    )]);
    assert_eq!(heard(reject, &below).unwrap(), whole);
    let clip: ArrayRef = Arc::new(BinaryArray::from_vec(vec![&bytes]));
    assert_eq!(heard(row(&[("clip", clip)]), &below).unwrap(), whole);

    // What is not there, or no recording.
    std::fs::write(folder.path().join("text"), "root:x:0:0").unwrap();
    for (wrong, said) in [
        (
            row(&[("tar_path", text("s.tar")), ("tar_member_name", text("c.wav"))]),
            "no member `c.wav`",
        ),
        (
            row(&[("tar_path", text("no.tar")), ("tar_member_name", text("b.wav"))]),
            "no.tar",
        ),
        (
            row(&[("tar_path", text("s.tar")), ("tar_member_name", text("x.wav"))]),
            "s.tar",
        ),
        (
            row(&[("audio_path", text(&folder.path().join("text").display().to_string()))]),
            "text",
        ),
        (row(&[("audio_path", text("/dev/zero"))]), "/dev/zero"),
        (
            row(&[
                ("audio_path", text(&path)),
                ("start", number(7.0)),
                ("duration", number(1.0)),
            ]),
            "no sound at 7 s",
        ),
    ] {
        let error = heard(wrong, &below).unwrap_err();
        assert!(error.contains(said), "{said}: {error}");
    }
    assert!(Place::of_row(&row(&[("text", text("a"))]), &below).is_err());
}

#[test]
fn parts_of_a_sound_are_sent_as_they_are_asked_for() {
    let bytes = wav(&ramp(0.001));
    assert_eq!(bytes.len(), 76);
    let answer = |range: &str| {
        let mut headers = HeaderMap::new();
        headers.insert(RANGE, HeaderValue::from_str(range).unwrap());
        let response = part_of(&bytes, &headers);
        let told = response
            .headers()
            .get(CONTENT_RANGE)
            .map(|value| value.to_str().unwrap().to_owned());
        (response.status().as_u16(), told.unwrap_or_default())
    };
    for (range, status, told) in [
        ("bytes=0-", 206, "bytes 0-75/76"),
        ("bytes=0-0", 206, "bytes 0-0/76"),
        ("bytes=10-1000", 206, "bytes 10-75/76"),
        ("bytes=-6", 206, "bytes 70-75/76"),
        ("bytes=-1000", 206, "bytes 0-75/76"),
        ("bytes=76-", 416, "bytes */76"),
        ("bytes=-0", 416, "bytes */76"),
        ("bytes=99999999999999999999-", 416, "bytes */76"),
        // Passed over.
        ("bytes=9-3", 200, ""),
        ("bytes=0-1,5-6", 200, ""),
        ("bytes=a-b", 200, ""),
        ("bytes=+1-2", 200, ""),
        ("lines=0-1", 200, ""),
    ] {
        assert_eq!(answer(range), (status, told.to_owned()), "{range}");
    }
    assert_eq!(part_of(&bytes, &HeaderMap::new()).status().as_u16(), 200);
}

#[test]
fn a_recording_that_is_gone_is_told_by_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| {
        let place = Place::Stored {
            path: folder.path().join(name),
            range: None,
            member: None,
            start: 0.0,
            duration: None,
        };
        place.found()
    };
    std::fs::write(folder.path().join("a.wav"), "no sound").unwrap();
    assert!(at("a.wav").is_ok() && Place::Bytes(Vec::new()).found().is_ok());
    for wrong in ["gone.tar", "."] {
        let why = at(wrong).unwrap_err();
        assert!(why.contains(&folder.path().display().to_string()), "{why}");
    }
}
