use std::fs;

use flow_storage::Storage;

use super::*;

/// Silence as a WAV of 16 bits.
fn wav(rate: u32, channels: u16, seconds: f64) -> Vec<u8> {
    let data = (f64::from(rate) * seconds) as u32 * u32::from(channels) * 2;
    let mut bytes = Vec::new();
    bytes.extend(b"RIFF");
    bytes.extend((36 + data).to_le_bytes());
    bytes.extend(b"WAVEfmt ");
    bytes.extend(16u32.to_le_bytes());
    bytes.extend(1u16.to_le_bytes());
    bytes.extend(channels.to_le_bytes());
    bytes.extend(rate.to_le_bytes());
    bytes.extend((rate * u32::from(channels) * 2).to_le_bytes());
    bytes.extend((channels * 2).to_le_bytes());
    bytes.extend(16u16.to_le_bytes());
    bytes.extend(b"data");
    bytes.extend(data.to_le_bytes());
    bytes.resize(bytes.len() + data as usize, 0);
    bytes
}

fn settings(manifest: &Path) -> ReadSettings {
    ReadSettings {
        manifest: manifest.display().to_string(),
        lang: "de".into(),
        max_duration: Some(20.0),
        ..ReadSettings::default()
    }
}

fn sample(settings: &ReadSettings) -> ManifestSample {
    let scratch = tempfile::tempdir().unwrap();
    ManifestSample::of(
        &Storage::default(),
        settings,
        scratch.path(),
        40,
        Duration::from_secs(600),
    )
    .unwrap()
}

#[test]
fn rows_are_looked_at_as_training_will_and_named_by_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("a.wav"), wav(16_000, 1, 2.0)).unwrap();
    fs::write(at("b.wav"), wav(44_100, 2, 2.0)).unwrap();
    let mut cut = wav(16_000, 1, 2.0);
    cut.truncate(20_000);
    fs::write(at("cut.wav"), cut).unwrap();
    fs::write(at("text.wav"), "no audio").unwrap();
    let line = |file: &str, text: &str, more: &str| {
        format!("{{\"audio_filepath\": \"{file}\", \"text\": \"{text}\", \"duration\": {more}}}\n")
    };
    let lines = [
        line("a.wav", "<|de|> eins", "2.0"),
        line("b.wav", "<|en|> zwei", "2.0"),
        line("a.wav", "<|de|> ", "1.0, \"offset\": 0.5"),
        line("gone.wav", "drei", "2.0"),
        "no JSON\n".into(),
        line("cut.wav", "vier", "2.0"),
        line("text.wav", "sechs", "2.0"),
        line("a.wav", "lang", "30.0"),
    ];
    fs::write(at("m.jsonl"), lines.concat()).unwrap();
    let found = sample(&settings(&at("m.jsonl")));
    assert_eq!((found.rows_read, found.rows, found.is_cut), (8, 7, false));
    assert_eq!((found.partitions, found.partitions_read), (1, 1));
    assert_eq!(found.layouts, BTreeMap::from([((16_000, 1), 2), ((44_100, 2), 1)]));
    assert_eq!(found.languages, BTreeMap::from([("de".to_string(), 3)]));
    assert_eq!(found.without_text, ["m.jsonl, line 3"]);
    assert_eq!(
        (found.tagged, found.other_tag),
        (3, vec!["m.jsonl, line 2".to_string()])
    );
    assert_eq!((found.parts, found.seconds), (1, 5.0));
    let refused = found.refused.by_reason.iter().map(|(reason, (rows, first))| {
        let places: Vec<&str> = first.iter().map(|row| row.place.as_str()).collect();
        (*reason, *rows, places)
    });
    let refused: Vec<(&str, u64, Vec<&str>)> = refused.collect();
    let line = [
        "",
        "",
        "",
        "",
        "m.jsonl, line 4",
        "m.jsonl, line 5",
        "m.jsonl, line 6",
        "m.jsonl, line 7",
        "m.jsonl, line 8",
    ];
    assert_eq!(refused[0], ("bad_json", 1, vec![line[5]]));
    assert!(refused.contains(&("missing_audio", 1, vec![line[4]])), "{refused:?}");
    assert!(
        refused.contains(&("duration_past_end", 1, vec![line[8]])),
        "{refused:?}"
    );
    assert_eq!(found.refused.rows(), 5);
}

#[test]
fn of_many_rows_some_are_looked_at_and_no_time_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("a.wav"), wav(8_000, 1, 0.1)).unwrap();
    let mut table = String::from("path,text\n");
    for number in 0..2_500 {
        table.push_str(&format!("a.wav,text {number}\n"));
    }
    fs::write(at("t.csv"), table).unwrap();
    let settings = settings(&at("t.csv"));
    let found = sample(&settings);
    assert_eq!(
        (found.partitions, found.partitions_read, found.rows_read),
        (3, 3, 2_500)
    );
    assert!((40..=42).contains(&found.rows), "{found:?}");
    assert_eq!(found.layouts, BTreeMap::from([((8_000, 1), found.rows)]));
    let scratch = tempfile::tempdir().unwrap();
    let none = ManifestSample::of(&Storage::default(), &settings, scratch.path(), 40, Duration::ZERO).unwrap();
    assert!(none.is_cut && none.rows == 0, "{none:?}");
}

#[test]
fn numbers_are_spread_evenly() {
    assert_eq!(spread(0, 3), [] as [usize; 0]);
    assert_eq!(spread(2, 3), [0, 1]);
    assert_eq!(spread(10, 3), [0, 3, 6]);
}
