//! Lhotse's manifests and Shar.

use super::*;

#[test]
fn recordings_and_supervisions_of_lhotse_are_joined() {
    for name in ["lhotse", "lhotse/x_supervisions_train.jsonl.gz"] {
        let output = run(settings(&data(name)));
        let expected = [row("u1", "ek", "hi", Some(0.1), 0.3), row("u2", "do", "hi", None, 0.75)];
        assert_eq!(rows_of(&output), expected);
        assert_eq!(reasons(&output), ["missing_recording"]);
        assert_eq!(recordings_of(&output), [wav("a.flac"), wav("b.flac")]);
        assert_eq!(extra_of(&output)[0].as_deref(), Some("{\"k\":1,\"speaker\":\"s1\"}"));
    }
    // What no row is made of, by name.
    let folder = copied(&["wav/a.flac"]);
    let at = |name: &str| folder.path().join(name);
    let recording = |id: &str, more: &str| {
        format!("{{\"id\": \"{id}\", \"sampling_rate\": 16000, \"num_samples\": 8000, \"duration\": 0.5{more}}}\n")
    };
    let file = "{\"type\": \"file\", \"channels\": [0], \"source\": \"wav/a.flac\"}";
    // `resample` of Lhotse leaves the file as it is.
    let resampled = |rate: u32| {
        let kwargs = format!("{{\"source_sampling_rate\": 48000, \"target_sampling_rate\": {rate}}}");
        format!(", \"sources\": [{file}], \"transforms\": [{{\"name\": \"Resample\", \"kwargs\": {kwargs}}}]")
    };
    let recordings = [
        recording("ok", &format!(", \"sources\": [{file}], \"channel_ids\": null")),
        recording(
            "cmd",
            ", \"sources\": [{\"type\": \"command\", \"channels\": [0], \"source\": \"sox x |\"}]",
        ),
        recording(
            "url",
            ", \"sources\": [{\"type\": \"url\", \"channels\": [0], \"source\": \"https://x/y\"}]",
        ),
        recording(
            "two",
            ", \"sources\": [{\"type\": \"file\", \"channels\": [0, 1], \"source\": \"wav/a.flac\"}]",
        ),
        recording(
            "fast",
            &format!(", \"sources\": [{file}], \"transforms\": [{{\"name\": \"Speed\", \"kwargs\": {{}}}}]"),
        ),
        recording("low", &resampled(8_000)),
        recording("high", &resampled(16_000)),
    ];
    // A byte order mark is of no line.
    fs::write(at("recordings.jsonl"), format!("\u{feff}{}", recordings.concat())).unwrap();
    let supervision = |id: &str, of: &str, start: f64, duration: f64| {
        format!(
            "{{\"id\": \"{id}\", \"recording_id\": \"{of}\", \"start\": {start}, \"duration\": {duration}, \"channel\": 0, \
             \"text\": \"x\", \"language\": \"hi\"}}\n"
        )
    };
    let mut supervisions = supervision("s", "ok", 0.0, 0.5);
    for of in ["cmd", "url", "two", "fast", "low", "high"] {
        supervisions += &supervision(of, of, 0.0, 0.5);
    }
    supervisions += &supervision("past", "ok", 0.3, 0.5);
    supervisions += &supervision("before", "ok", -0.3, 0.5);
    supervisions += "{\"id\": 7}\nnone\n";
    gz(&at("supervisions.jsonl.gz"), &supervisions);
    let output = run(settings(folder.path()));
    assert_eq!(
        rows_of(&output),
        [row("s", "x", "hi", None, 0.5), row("high", "x", "hi", None, 0.5)]
    );
    let expected = [
        ("bad_json", 2),
        ("duration_past_end", 1),
        ("offset_invalid", 1),
        ("several_channels", 1),
        ("shell_command", 1),
        ("transformed_audio", 2),
        ("unsupported_source", 1),
    ];
    assert_eq!(by_reason(&output), counts(&expected));
    let said = details(&output).join("\n");
    assert!(said.contains("changed by Speed") && said.contains("sox x |"), "{said}");
}

#[test]
fn cuts_of_lhotse_are_read_and_mixed_ones_refused_by_name() {
    for name in ["cuts", "cuts/x_cuts_train.jsonl.gz"] {
        let output = run(settings(&data(name)));
        let expected = [
            row("a-0", "ek", "hi", None, 0.5),
            row("b-1", "do", "hi", None, 0.75),
            row("padded", "ek", "hi", None, 0.5),
        ];
        assert_eq!(rows_of(&output), expected);
        assert_eq!(
            reasons(&output),
            ["mixed_audio", "transformed_audio", "text_beyond_cut"]
        );
        assert_eq!(recordings_of(&output)[1], wav("b.flac"));
    }
}

#[test]
fn lists_in_json_are_read_as_lines_are() {
    let output = run(settings(&data("lists/x_recordings_train.json.gz")));
    let expected = [row("u1", "ek", "hi", Some(0.1), 0.3), row("u2", "do", "hi", None, 0.75)];
    assert_eq!(rows_of(&output), expected);
    assert_eq!(recordings_of(&output), [wav("a.flac"), wav("b.flac")]);
    let output = run(settings(&data("lists/x_cuts_dev.json")));
    let expected = [row("a-0", "ek", "hi", None, 0.5), row("b-1", "do", "hi", None, 0.75)];
    assert_eq!(rows_of(&output), expected);
    // Wherever a list is cut.
    let folder = tempfile::tempdir().unwrap();
    let (whole, path) = (
        fs::read(data("lists/x_cuts_dev.json")).unwrap(),
        folder.path().join("x_cuts_dev.json"),
    );
    for length in (600..whole.len() - 2).step_by(97) {
        fs::write(&path, &whole[..length]).unwrap();
        let said = failure(ReadSettings {
            layout: Layout::LhotseCuts,
            ..settings(&path)
        });
        assert!(
            said.contains("x_cuts_dev.json: its list is damaged"),
            "{length}: {said}"
        );
    }
    fs::write(&path, [&whole[..], b" []"].concat()).unwrap();
    assert!(failure(settings(&path)).contains("its list is damaged"));
}

#[test]
fn shar_has_the_part_of_each_cut_in_its_tar() {
    let output = run(settings(&data("shar")));
    let expected = [
        row("a-0", "ek", "hi", None, 0.5),
        row("b-1", "do", "hi", None, 0.75),
        row("of/folder.1", "ek", "hi", None, 0.35),
    ];
    assert_eq!(rows_of(&output), expected);
    assert_eq!(reasons(&output), Vec::<&str>::new());
    let lengths: Vec<usize> = recordings_of(&output)
        .iter()
        .map(|bytes| decode(bytes, 9.0).unwrap().len())
        .collect();
    assert_eq!(lengths, [8_000, 12_000, 5_600]);
    // Another number of shards, and a tar that lacks a recording.
    let folder = copied(&[
        "shar/cuts.000000.jsonl.gz",
        "shar/cuts.000001.jsonl.gz",
        "shar/recording.000000.tar",
    ]);
    let shar = folder.path().join("shar");
    assert!(failure(settings(&shar)).contains("recording.000001.tar: it does not exist"));
    fs::copy(data("shar/recording.000000.tar"), shar.join("recording.000001.tar")).unwrap();
    let output = run(settings(&shar));
    assert_eq!((rows_of(&output).len(), reasons(&output)), (2, vec!["missing_audio"]));
}

#[test]
fn folders_of_splits_of_shar_are_read_as_shar() {
    let folder = copied(&[
        "shar/cuts.000000.jsonl.gz",
        "shar/cuts.000001.jsonl.gz",
        "shar/recording.000000.tar",
        "shar/recording.000001.tar",
    ]);
    let at = |name: &str| folder.path().join(name);
    for (split, number) in [("train", 0), ("validation", 1)] {
        fs::create_dir_all(at("sets").join(split)).unwrap();
        for name in ["cuts.00000N.jsonl.gz", "recording.00000N.tar"] {
            let from = at("shar").join(name.replace('N', &number.to_string()));
            fs::copy(from, at("sets").join(split).join(name.replace('N', "0"))).unwrap();
        }
    }
    let of = |name: &str, split: &str| ReadSettings {
        split: split.into(),
        ..settings(&at(name))
    };
    let ids = |name: &str, split: &str| column(&run(of(name, split)), "segment_id");
    let (train, validation) = (ids("sets", ""), ids("sets", "dev"));
    assert_eq!(train, ids("sets/train", "train"));
    assert_eq!(validation, ids("sets/validation", "dev"));
    assert_eq!(ids("sets", "all"), [train, validation].concat());
    assert_eq!(ids("sets", "all").len(), 3);
    let shards = column(&run(of("sets", "all")), "shard_id");
    assert!(shards.contains(&"train/000000".into()) && shards.contains(&"validation/000000".into()));
    let told = opened(&of("sets", "")).decision().unwrap();
    assert!(told.contains("Shar") && told.contains("reading `train`"), "{told}");
    assert!(failure(of("sets", "test")).contains("its splits are train, validation"));
    assert!(failure(of("sets/train", "test")).contains("of the split \"train\""));
}
