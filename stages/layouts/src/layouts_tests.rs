//! Each layout with a small corpus that its own tool wrote, or that is written as the tool does, and with what is wrong in it.
//! `tests/data/layouts/make.py` makes the files.

use std::collections::BTreeMap;
use std::io::Write;

use flow_audio::decode::{decode, read_file, read_range};
use flow_corpus::Layout;
use flow_corpus::files::Format;

use super::forms::{details, extra_of, lay_out, numbers, with_lang};

use super::*;

fn data(name: &str) -> PathBuf {
    repository("stages/layouts/tests/data/layouts").join(name)
}

/// Segment, text, language, start and duration of each row.
fn rows_of(output: &Output) -> Vec<(String, String, String, Option<f64>, f64)> {
    let [ids, texts, langs] = ["segment_id", "text", "lang"].map(|name| column(output, name));
    let (starts, durations) = (numbers(output, "start"), numbers(output, "duration"));
    let times = starts.into_iter().zip(durations.into_iter().map(Option::unwrap));
    let names = ids.into_iter().zip(texts).zip(langs);
    names
        .zip(times)
        .map(|(((id, text), lang), (start, duration))| (id, text, lang, start, (duration * 1e4).round() / 1e4))
        .collect()
}

fn row(
    id: &str,
    text: &str,
    lang: &str,
    start: Option<f64>,
    duration: f64,
) -> (String, String, String, Option<f64>, f64) {
    (id.into(), text.into(), lang.into(), start, duration)
}

/// The bytes of each row's recording, read as training reads them.
fn recordings_of(output: &Output) -> Vec<Vec<u8>> {
    let rows = output.all_rows("rows");
    let number = |name: &str| rows.column_by_name(name).unwrap().as_primitive::<Int64Type>().clone();
    let (offsets, sizes) = (number("offset"), number("size"));
    let paths = column(output, "audio_path");
    let read = |(row, path): (usize, &String)| match offsets.is_valid(row) {
        true => read_range(Path::new(path), offsets.value(row) as u64, sizes.value(row) as u64).unwrap(),
        false => read_file(Path::new(path)).unwrap(),
    };
    paths.iter().enumerate().map(read).collect()
}

fn wav(name: &str) -> Vec<u8> {
    fs::read(data("wav").join(name)).unwrap()
}

fn copied(names: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        let to = folder.path().join(name);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(data(name), to).unwrap();
    }
    folder
}

fn by_reason(output: &Output) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    for reason in reasons(output) {
        *found.entry(reason.to_string()).or_default() += 1;
    }
    found
}

fn counts(expected: &[(&str, usize)]) -> BTreeMap<String, usize> {
    expected
        .iter()
        .map(|(reason, count)| (reason.to_string(), *count))
        .collect()
}

fn gz(path: &Path, text: &str) {
    let mut writer = flate2::write::GzEncoder::new(fs::File::create(path).unwrap(), flate2::Compression::fast());
    writer.write_all(text.as_bytes()).unwrap();
    writer.finish().unwrap();
}

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
fn samples_of_webdataset_are_rows() {
    for name in ["webdataset", "webdataset/train-000000.tar"] {
        let output = run(with_lang(&data(name), "hi"));
        let expected = [
            row("de/a", "ek", "hi", None, 0.5),
            row("de/b", "text of b", "de", None, 0.75),
        ];
        assert_eq!(rows_of(&output), expected, "{name}");
        assert_eq!(recordings_of(&output), [wav("a.flac"), wav("b.flac")]);
        let extra: serde_json::Value = serde_json::from_str(extra_of(&output)[1].as_ref().unwrap()).unwrap();
        assert_eq!(extra["speaker"], "s1");
        assert_eq!(column(&output, "tar_member_name"), ["de/a.flac", "de/b.flac"]);
    }
    let of = |split: &str, columns: &[&str]| {
        let read = ReadSettings {
            split: split.into(),
            columns: columns.iter().map(|pair| (*pair).to_owned()).collect(),
            ..settings(&data("webdataset"))
        };
        run(read)
    };
    assert_eq!(column(&of("test", &[]), "text"), ["text of c"]);
    assert_eq!(column(&of("test", &["speaker=text"]), "text"), ["s1"]);
    let dots = tempfile::tempdir().unwrap();
    let tar = super::tar_of(&[("talk-12.5.wav", &recording()), ("talk-12.5.txt", &b"said".to_vec())]);
    fs::write(dots.path().join("x.tar"), tar).unwrap();
    let output = run(with_lang(dots.path(), "hi"));
    assert_eq!(column(&output, "tar_member_name"), ["talk-12.5.wav"]);
    assert_eq!(column(&output, "segment_id"), ["talk-12.5"]);
    // A tar that was cut, members that are no sample, and texts that are none.
    let folder = tempfile::tempdir().unwrap();
    let whole = fs::read(data("webdataset/train-000000.tar")).unwrap();
    let tar = folder.path().join("x.tar");
    for (cut, rows) in [
        (0, 0),
        (3, 0),
        (700, 0),
        (4_700, 0),
        (6_000, 1),
        (12_000, 1),
        (whole.len() - 1024, 2),
    ] {
        fs::write(&tar, &whole[..cut]).unwrap();
        let output = run(ReadSettings {
            layout: Layout::WebDataset,
            ..with_lang(&tar, "hi")
        });
        assert_eq!(rows_of(&output).len(), rows, "{cut}");
        let known = |reason: &&str| ["tar_truncated", "missing_text", "missing_audio"].contains(reason);
        assert!(reasons(&output).iter().all(known), "{cut}: {:?}", reasons(&output));
    }
    assert!(
        failure(ReadSettings {
            layout: Layout::WebDataset,
            columns: vec!["x=audio_filepath".into()],
            ..settings(&data("webdataset"))
        })
        .contains("name text, lang and duration")
    );
}

#[test]
fn yodas_is_read_from_tars_and_folders() {
    let folder = copied(&["wav/a.flac", "wav/b.flac"]);
    let at = |name: &str| folder.path().join("data/hi000").join(name);
    let ids = [
        "v1-00000-00000012-00000062",
        "v1-00001-00000100-00000175",
        "v2-00000-00000000-00000010",
    ];
    let texts = [
        (
            "data/hi000/text/00000000.txt",
            format!("{} ek\n{}\tdo \"teen\n", ids[0], ids[1]),
        ),
        (
            "data/hi000/text/00000001.txt",
            format!("{} chaar\n../x y\n{}\n", ids[2], ids[0]),
        ),
        ("data/hi000/duration/00000000.txt", format!("{} 0.5\n", ids[0])),
    ];
    let files: Vec<(&str, &str)> = texts.iter().map(|(name, text)| (*name, text.as_str())).collect();
    lay_out(folder.path(), &files);
    fs::create_dir_all(at("audio/00000001")).unwrap();
    let packed = at("audio/00000000.tar.gz");
    fs::write(&packed, b"packed").unwrap();
    assert!(failure(settings(&at(""))).contains("gunzip"));
    // As `tar` writes it, of the recordings of the first two.
    for (name, id) in [("a.flac", ids[0]), ("b.flac", ids[1])] {
        fs::copy(data("wav").join(name), folder.path().join(format!("{id}.wav"))).unwrap();
    }
    let tar = |members: &[&str]| {
        let mut tar = std::process::Command::new("tar");
        tar.arg("-C")
            .arg(folder.path())
            .arg("-cf")
            .arg(at("audio/00000000.tar"));
        assert!(tar.args(members).status().unwrap().success());
    };
    tar(&[&format!("{}.wav", ids[0]), &format!("{}.wav", ids[1])]);
    fs::copy(data("wav/c.flac"), at("audio/00000001").join(format!("{}.wav", ids[2]))).unwrap();
    let output = run(settings(&at("")));
    let expected = [
        row(ids[0], "ek", "hi", None, 0.5),
        row(ids[1], "do \"teen", "hi", None, 0.75),
        row(ids[2], "chaar", "hi", None, 0.25),
    ];
    assert_eq!(rows_of(&output), expected);
    assert_eq!(recordings_of(&output)[1], wav("b.flac"));
    assert_eq!(by_reason(&output), counts(&[("missing_text", 1), ("unsafe_name", 1)]));
    tar(&[&format!("{}.wav", ids[0])]);
    assert_eq!(rows_of(&run(settings(&at("")))).len(), 2);
}

#[test]
fn utterances_of_yodas2_are_parts_of_videos() {
    let folder = copied(&["wav/a.flac"]);
    let at = |name: &str| folder.path().join("data/hi100").join(name);
    // Names of videos have dashes, too.
    let (first, second) = ("-a-b_1", "v2");
    let texts = format!(
        r#"[{{"audio_id": "{first}", "text": {{
            "{first}-00000-00000005-00000020": "ek \"do\"",
            "{first}-00001-00000020-00000050": " teen ",
            "{first}-00002-00000030-00000030": "x",
            "{first}-00003-00000030": "x",
            "{first}-00004-00000001-00000002": "",
            "{first}-00005-00000001-00000002": 7}}}},
          {{"audio_id": "../../x", "text": {{"x-00000-00000001-00000002": "y"}}}},
          {{"text": {{}}}},
          {{"audio_id": "{second}", "duration": 1.5, "text": {{}}}}]"#
    );
    lay_out(
        folder.path(),
        &[
            ("data/hi100/text/00000000.json", &texts),
            (
                "data/hi100/text/00000001.json",
                r#"[{"audio_id": "v2", "text": {"v2-00000-00000010-00000035": "chaar"}}]"#,
            ),
            ("data/hi100/text/00000002.json", r#"[{"audio_id": "v2", "te"#),
        ],
    );
    fs::create_dir_all(at("audio/00000001")).unwrap();
    fs::create_dir_all(at("audio/00000002")).unwrap();
    assert!(failure(settings(&at(""))).contains("00000000.tar"));
    fs::copy(data("wav").join("b.flac"), at("audio/00000001/v2.wav")).unwrap();
    fs::copy(data("wav").join("a.flac"), folder.path().join(format!("{first}.wav"))).unwrap();
    let tar = std::process::Command::new("tar")
        .arg("-C")
        .arg(folder.path())
        .arg("-cf")
        .arg(at("audio/00000000.tar"))
        .arg(format!("./{first}.wav"))
        .status();
    assert!(tar.unwrap().success());
    let output = run(settings(&at("")));
    let expected = [
        row(
            &format!("{first}-00000-00000005-00000020"),
            "ek \"do\"",
            "hi",
            Some(0.05),
            0.15,
        ),
        row(
            &format!("{first}-00001-00000020-00000050"),
            "teen",
            "hi",
            Some(0.2),
            0.3,
        ),
        row("v2-00000-00000010-00000035", "chaar", "hi", Some(0.1), 0.25),
    ];
    assert_eq!(rows_of(&output), expected);
    assert_eq!(recordings_of(&output)[..2], [wav("a.flac"), wav("a.flac")]);
    let refused = [
        ("bad_json", 2),
        ("duration_invalid", 2),
        ("missing_text", 2),
        ("unsafe_name", 1),
    ];
    assert_eq!(by_reason(&output), counts(&refused));
}

#[test]
fn folders_of_kaldi_are_joined_by_ids() {
    let folder = copied(&["wav/a.flac", "wav/b.flac", "kaldi/flac.ark", "kaldi/wav.ark"]);
    let at = |name: &str| folder.path().join(name);
    lay_out(
        folder.path(),
        &[
            (
                "data/train/wav.scp",
                "r1 wav/a.flac\nr2\tkaldi/wav.ark:2\nr3 sph2pipe -f wav -p x/y.sph |\nr4 kaldi/flac.ark:2\nr5 none.flac\n\
                 r6 kaldi/flac.ark:900\n",
            ),
            (
                "data/train/segments",
                "u1 r1 0.1 0.4\nu2 r2 0.25 -1\nu3 r3 0 1\nu4 r4 0 0.5\nu5 r5 0 1\nu6 r1 0.4 0.2\nu7 r9 0 1\nu8 r1 0 0.1\nu9 r1 0 1 1\nuA r6 0 1\n",
            ),
            (
                "data/train/text",
                "u2 दो\nu1 ek \"one\nu3 x\nu4 chaar\nu5 x\nu6 x\nu7 x\nua x\nu9 x\nuA x\nuB\n",
            ),
            ("data/train/utt2spk", "u1 s1\nu2 s2\n"),
            ("data/train/spk2gender", "s1 f\n"),
            ("data/train/utt2lang", "u1 hi\nu2 ta\nu4 hindi\n"),
        ],
    );
    let output = run(with_lang(&at("data/train"), "en"));
    let expected = [
        row("u2", "दो", "ta", Some(0.25), 0.5),
        row("u1", "ek \"one", "hi", Some(0.1), 0.3),
        row("u4", "chaar", "hi", None, 0.5),
    ];
    assert_eq!(rows_of(&output), expected);
    assert_eq!(
        extra_of(&output)[1].as_deref(),
        Some("{\"gender\":\"f\",\"speaker\":\"s1\"}")
    );
    let found = recordings_of(&output);
    assert!(found[1] == wav("a.flac"));
    let lengths: Vec<usize> = found.iter().map(|bytes| decode(bytes, 9.0).unwrap().len()).collect();
    assert_eq!(lengths, [12_000, 8_000, 8_000]);
    let expected = [
        ("duration_invalid", 1),
        ("missing_audio", 5),
        ("missing_text", 1),
        ("several_channels", 1),
        ("shell_command", 1),
    ];
    assert_eq!(by_reason(&output), counts(&expected), "{:?}", details(&output));
    let said = details(&output).join("\n");
    for part in [
        "it reads x/y.sph",
        "no line in segments",
        "no line in wav.scp",
        "no recording",
        "\"u8\" of segments has no line in text",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // A list that is changed while rows are read has its lines elsewhere.
    for name in ["utt2spk", "utt2lang", "spk2gender", "segments", "wav.scp"] {
        let path = at("data/train").join(name);
        let before = fs::read(&path).unwrap();
        let settings = with_lang(&at("data/train"), "en");
        let manifest = opened(&settings);
        let partition = manifest.names().remove(0);
        fs::write(&path, [b"u0 x 0 1\n", &before[..]].concat()).unwrap();
        let (mut out, mut recordings) = (Out::new(partition.clone()), Recordings::new(true));
        let read = manifest.read(&partition, &mut Rows::new(&mut out, &mut recordings));
        let error = read.unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("was changed while"), "{error}");
        fs::write(&path, before).unwrap();
    }
    // Without segments an utterance is a recording.
    fs::remove_file(at("data/train/segments")).unwrap();
    fs::write(at("data/train/text"), "r1 ek\n").unwrap();
    let output = run(with_lang(&at("data/train"), "en"));
    assert_eq!(rows_of(&output), [row("r1", "ek", "en", None, 0.5)]);
    assert_eq!(by_reason(&output), counts(&[("missing_text", 5)]));
    fs::remove_file(at("data/train/text")).unwrap();
    assert!(failure(settings(&at("data/train"))).contains("there is no text in it"));
}

#[test]
fn data_sets_of_hugging_face_are_read_where_they_are() {
    let expected = |stem: &str| {
        [
            row(&format!("{stem}/0"), "ek", "hi", None, 0.5),
            row(&format!("{stem}/1"), "do", "hi", None, 0.75),
        ]
    };
    for (name, stem) in [
        ("hub", "train-00000-of-00001"),
        ("hub/data/train-00000-of-00001.parquet", "train-00000-of-00001"),
        ("hub/data/train-0000{0,0}-of-00001.parquet", "train-00000-of-00001"),
        ("saved", "data-00000-of-00001"),
        ("saved/data-00000-of-00001.arrow", "data-00000-of-00001"),
    ] {
        let output = run(settings(&data(name)));
        let mut twice = expected(stem).to_vec();
        if name.contains('{') {
            twice.extend(expected(stem));
        }
        assert_eq!(rows_of(&output), twice, "{name}");
        assert_eq!(
            by_reason(&output),
            counts(&[("missing_audio", twice.len() / 2), ("missing_text", twice.len() / 2)])
        );
        // Names of classes, not their numbers; times of another recording are no times of this one.
        let extra: serde_json::Value = serde_json::from_str(extra_of(&output)[1].as_ref().unwrap()).unwrap();
        assert_eq!(
            extra,
            serde_json::json!({"gender": "female", "original_begin_time": 8.0, "path": "0.wav"})
        );
        assert_eq!(recordings_of(&output)[..2], [wav("a.flac"), wav("b.flac")], "{name}");
    }
    let split = |name: &str, split: &str| ReadSettings {
        split: split.into(),
        ..settings(&data(name))
    };
    let output = run(split("hub", "test"));
    assert_eq!(rows_of(&output), [row("test-00000-of-00001/0", "do", "hi", None, 0.75)]);
    assert!(failure(split("hub", "dev")).contains("no split \"dev\", which"));
    assert_eq!(
        rows_of(&run(settings(&data("saved_dict")))),
        expected("data-00000-of-00001")
    );
    assert_eq!(reasons(&run(split("saved_dict", "test"))), ["missing_text"]);
    // Both splits have a file of one name.
    let folder = copied(&["saved_dict/dataset_dict.json"]);
    for name in ["data-00000-of-00001.arrow", "state.json"] {
        for split in ["train", "test"] {
            let to = folder.path().join("saved_dict").join(split);
            fs::create_dir_all(&to).unwrap();
            fs::copy(data("saved_dict/train").join(name), to.join(name)).unwrap();
        }
    }
    let all = run(ReadSettings {
        split: "all".into(),
        ..settings(&folder.path().join("saved_dict"))
    });
    let ids: Vec<String> = ["test", "train"]
        .iter()
        .flat_map(|split| (0..2).map(move |row| format!("{split}/data-00000-of-00001/{row}")))
        .collect();
    let mut found = column(&all, "segment_id");
    found.sort();
    assert_eq!(found, ids);
    // A manifest of these rows is read again.
    let output = run(settings(&data("saved")));
    let folder = tempfile::tempdir().unwrap();
    let line = |path: &String| {
        serde_json::json!({"audio_filepath": path, "duration": 0.5, "text": "x", "lang": "hi"}).to_string()
    };
    let lines: Vec<String> = column(&output, "audio_path").iter().map(line).collect();
    fs::write(folder.path().join("m.jsonl"), lines.join("\n")).unwrap();
    let again = run(settings(&folder.path().join("m.jsonl")));
    assert_eq!(recordings_of(&again)[0], wav("a.flac"));
}

#[test]
fn rows_without_bytes_are_read_again_when_their_recordings_turn_up() {
    use arrow::array::{ArrayRef, BinaryArray, RecordBatch, StructArray};
    let folder = tempfile::tempdir().unwrap();
    let texts = |texts: [&str; 2]| Arc::new(StringArray::from_iter_values(texts)) as ArrayRef;
    let bytes = BinaryArray::from_opt_vec(vec![Some(b"x"), None]);
    let audio = StructArray::try_from(vec![
        ("bytes", Arc::new(bytes) as ArrayRef),
        ("path", texts(["", "a.flac"])),
    ]);
    let columns = [
        ("audio", Arc::new(audio.unwrap()) as ArrayRef),
        ("text", texts(["x", "ek"])),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let at = |name: &str| folder.path().join(name);
    let mut writer = ArrowWriter::try_new(fs::File::create(at("x.parquet")).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let file = fs::File::create(at("x.arrow")).unwrap();
    let mut writer = arrow::ipc::writer::StreamWriter::try_new(file, &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.finish().unwrap();
    for name in ["x.parquet", "x.arrow"] {
        let settings = with_lang(&at(name), "hi");
        let (before, missing) = (extras(&settings), run(settings.clone()));
        assert_eq!(column(&missing, "text"), Vec::<String>::new());
        fs::write(at("a.flac"), wav("a.flac")).unwrap();
        assert_ne!(extras(&settings), before, "{name}");
        assert_eq!(column(&run(settings), "text"), ["ek"]);
        fs::remove_file(at("a.flac")).unwrap();
    }
}

#[test]
fn damaged_data_sets_are_named() {
    let folder = copied(&[
        "saved/data-00000-of-00001.arrow",
        "saved/state.json",
        "hub/data/train-00000-of-00001.parquet",
    ]);
    let arrow = folder.path().join("saved/data-00000-of-00001.arrow");
    let whole = fs::read(&arrow).unwrap();
    for length in [0, 3, 8, 100, whole.len() / 2, whole.len() - 12] {
        fs::write(&arrow, &whole[..length]).unwrap();
        let said = match Harness::<Read>::new(settings(&folder.path().join("saved"))).run() {
            Err(error) => error.to_string(),
            Ok(output) => panic!("{length}: {:?}", rows_of(&output)),
        };
        assert!(said.contains("data-00000-of-00001.arrow"), "{said}");
    }
    // Polars writes the schema at the beginning without its length.
    fs::write(&arrow, [&b"ARROW1\0\0\x04\0\0\0\xf2\xff\xff\xff"[..], &whole].concat()).unwrap();
    let error = Harness::<Read>::new(settings(&folder.path().join("saved"))).run();
    let said = error.err().unwrap().to_string();
    assert!(said.contains("as Polars writes it"), "{said}");
    for at in (0..whole.len().min(3_000)).step_by(7) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0xff;
        fs::write(&arrow, &bytes).unwrap();
        // An error or rows, and no panic.
        let _ = Harness::<Read>::new(settings(&folder.path().join("saved"))).run();
    }
    fs::write(
        folder.path().join("saved/state.json"),
        "{\"_data_files\": [{\"filename\": \"../x.arrow\"}]}",
    )
    .unwrap();
    assert!(failure(settings(&folder.path().join("saved"))).contains("names no file of the folder"));
}

#[test]
fn lists_of_public_corpora_are_read_by_their_columns() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    lay_out(
        folder.path(),
        &[
            (
                "mls_german/train/transcripts.txt",
                "1_2_000001\teins \"zwei\n1_2_000002\tdrei\n9\tx\n1_2_3\t\n../../x_y_z\tx\n",
            ),
            ("mls_german/train/audio/1/2/1_2_000001.flac", ""),
            ("mls_german/dev/transcripts.txt", "1_2_000001\tvier\n"),
            ("mls_german/dev/audio/1/2/1_2_000001.flac", ""),
            (
                "vp/transcribed_data/hr/asr_train.tsv",
                "id\traw_text\tnormalized_text\tspeaker_id\tsplit\tgender\n2009-x\tJedan.\tjedan\t7\ttrain\tmale\n2010-y\tDva\t\t7\ttrain\tmale\n2009\tx\n",
            ),
            (
                "fleurs/hi_in/train.tsv",
                "1\t12.wav\tRaw \"one\traw one\tr a w\t17600\tMALE\n1\t13.wav\tRaw\traw\tr\tx\tMALE\n1\t../1.wav\ta\tb\tc\t1\tMALE\n",
            ),
            ("fleurs/hi_in/audio/train/12.wav", ""),
            ("gs2/th/train_raw.tsv", "0-1-2\traw\n"),
            (
                "gs2/th/train_refined.tsv",
                "0-1-2\tsawasdee \"x\n0-1-3\tgone\n..-1\tx\n",
            ),
            ("gs2/th/train/0/1/0-1-2.wav", ""),
            ("lj/metadata.csv", "LJ1|In 1850|in eighteen fifty\nLJ2|x \"y\nLJ3\n"),
            ("lj/wavs/LJ1.wav", ""),
            ("lj/wavs/LJ2.wav", ""),
            ("cv/clips/a.mp3", ""),
            ("cv/clips/b.mp3", ""),
            (
                "cv/train.tsv",
                "client_id\tpath\tsentence\tlocale\n1\ta.mp3\tsaid \"one\tmt\n",
            ),
            ("cv/test.tsv", "client_id\tpath\tsentence\tlocale\n1\tb.mp3\ttwo\tmt\n"),
            ("sps/audios/c.mp3", ""),
            (
                "sps/ss-corpus-ga.tsv",
                "client_id\taudio_id\taudio_file\tduration_ms\ttranscription\tsplit\n1\t2\tc.mp3\t1000\ta haon\ttrain\n1\t3\td.mp3\t1000\t\ttrain\n1\t4\tc.mp3\t1000\ta do\tdev\n1\t5\tc.mp3\t1000\ta tri\t\n",
            ),
        ],
    );
    let long = fs::metadata(at("lj/wavs/LJ1.wav")).is_ok();
    assert!(long);
    let length = (decode(&recording(), 60.0).unwrap().len() as f64 / 16.0).round() / 1e3;
    let read = |name: &str, split: &str, columns: &[&str]| {
        run(ReadSettings {
            split: split.into(),
            columns: columns.iter().map(|pair| pair.to_string()).collect(),
            ..with_lang(&at(name), "")
        })
    };
    let short = |output: &Output| -> Vec<(String, String, String)> {
        rows_of(output)
            .into_iter()
            .map(|(id, text, lang, ..)| (id, text, lang))
            .collect()
    };
    let one = |id: &str, text: &str, lang: &str| vec![(id.to_string(), text.to_string(), lang.to_string())];

    let mls = read("mls_german", "", &[]);
    assert_eq!(short(&mls), one("1_2_000001", "eins \"zwei", "de"));
    assert!((rows_of(&mls)[0].4 - length).abs() < 0.001);
    assert_eq!(
        by_reason(&mls),
        counts(&[
            ("bad_line", 1),
            ("missing_audio", 1),
            ("missing_text", 1),
            ("unsafe_name", 1)
        ])
    );
    assert_eq!(
        short(&read("mls_german", "validation", &[])),
        one("1_2_000001", "vier", "de")
    );
    assert_eq!(
        short(&read("mls_german/train", "", &[])),
        one("1_2_000001", "eins \"zwei", "de")
    );

    // The recordings are of another ending here.
    fs::create_dir(at("vp/transcribed_data/hr/2009")).unwrap();
    fs::write(at("vp/transcribed_data/hr/2009/2009-x.ogg"), recording()).unwrap();
    let vp = read("vp", "", &[]);
    assert_eq!(short(&vp), one("2009-x", "jedan", "hr"));
    assert_eq!(by_reason(&vp), counts(&[("bad_line", 1), ("missing_text", 1)]));
    let raw = read("vp/transcribed_data/hr", "train", &["raw_text=text"]);
    assert_eq!(short(&raw), one("2009-x", "Jedan.", "hr"));

    let fleurs = read("fleurs/hi_in", "", &[]);
    assert_eq!(short(&fleurs), one("12", "raw one", "hi"));
    assert_eq!(rows_of(&fleurs)[0].4, 1.1);
    assert_eq!(by_reason(&fleurs), counts(&[("bad_type", 1), ("unsafe_name", 1)]));
    assert_eq!(
        short(&read("fleurs/hi_in", "", &["raw_transcription=text"])),
        one("12", "Raw \"one", "hi")
    );
    for (name, pair) in [
        ("fleurs/hi_in", "raw_transcript=text"),
        ("vp", "raw_text=text2"),
        ("vp", "gender=lang"),
    ] {
        let message = failure(ReadSettings {
            columns: vec![pair.into()],
            ..settings(&at(name))
        });
        assert!(message.contains(pair.split('=').next_back().unwrap()), "{message}");
    }
    fs::rename(at("fleurs/hi_in/audio/train"), at("fleurs/hi_in/audio/other")).unwrap();
    fs::write(at("fleurs/hi_in/audio/train.tar.gz"), "").unwrap();
    assert!(failure(settings(&at("fleurs/hi_in"))).contains("unpack it"));

    let gs2 = read("gs2/th", "", &[]);
    assert_eq!(short(&gs2), one("0-1-2", "sawasdee \"x", "th"));
    assert_eq!(by_reason(&gs2), counts(&[("missing_audio", 1), ("unsafe_name", 1)]));
    assert_eq!(short(&read("gs2/th", "train_raw", &[])), one("0-1-2", "raw", "th"));
    // The recordings of the raw list are those of the other.
    assert_eq!(short(&read("gs2/th", "all", &[])), one("0-1-2", "sawasdee \"x", "th"));
    fs::remove_file(at("gs2/th/train_refined.tsv")).unwrap();
    fs::write(at("gs2/th/dev.tsv"), "0-1-2\tdev\n").unwrap();
    for split in ["", "train", "training"] {
        assert_eq!(short(&read("gs2/th", split, &[])), one("0-1-2", "raw", "th"), "{split}");
    }

    let lj = run(with_lang(&at("lj"), "en"));
    let texts = ["in eighteen fifty", "x \"y"];
    assert_eq!(column(&lj, "text"), texts);
    assert_eq!(reasons(&lj), ["bad_line"]);

    assert_eq!(short(&read("cv", "", &[])), one("a", "said \"one", "mt"));
    assert_eq!(short(&read("cv", "test", &[])), one("b", "two", "mt"));
    let message = failure(ReadSettings {
        split: "other".into(),
        ..settings(&at("cv"))
    });
    assert!(message.contains("its tables are train, test"), "{message}");
    let sps = read("sps", "", &[]);
    assert_eq!(column(&sps, "text"), ["a haon", "a tri"]);
    assert_eq!(by_reason(&sps), counts(&[("missing_text", 1), ("other_split", 1)]));
    assert_eq!(short(&sps)[..1], one("c", "a haon", "ga"));
    assert_eq!(column(&read("sps", "all", &[]), "text"), ["a haon", "a do", "a tri"]);
    assert_eq!(column(&read("sps", "validation", &[]), "text"), ["a do"]);
}

#[test]
fn gigaspeech_is_read_segment_by_segment() {
    let folder = tempfile::tempdir().unwrap();
    let segment = |sid: &str, end: f64, text: &str, subset: &str| serde_json::json!({"sid": sid, "begin_time": 0.25, "end_time": end, "speaker": "N/A", "text_tn": text, "subsets": [subset]});
    let audios = serde_json::json!({"dataset": "GigaSpeech", "audios": [
        {"aid": "POD1", "path": "audio/podcast/P0001/POD1.wav", "channels": 1, "subsets": ["{XL}"], "segments": [
            segment("s1", 1.0, "HELLO <COMMA> WORLD <QUESTIONMARK>", "{XL}"),
            segment("s2", 1.0, "<MUSIC>", "{XL}"),
            segment("s3", 1.0, "DEV", "{DEV}"),
            segment("s4", 0.25, "X", "{XL}"),
        ]},
        {"aid": "POD2", "path": 7},
        {"aid": "POD3", "path": "../x.opus", "segments": [segment("s5", 1.0, "X", "{XL}")]},
    ]});
    lay_out(
        folder.path(),
        &[
            ("GigaSpeech.json", &audios.to_string()),
            ("audio/podcast/P0001/POD1.wav", ""),
        ],
    );
    let output = run(settings(folder.path()));
    assert_eq!(rows_of(&output), [row("s1", "HELLO, WORLD?", "en", Some(0.25), 0.75)]);
    let expected = [
        ("bad_json", 1),
        ("duration_invalid", 1),
        ("no_speech", 1),
        ("unsafe_name", 1),
    ];
    assert_eq!(by_reason(&output), counts(&expected));
    let dev = ReadSettings {
        split: "dev".into(),
        ..settings(folder.path())
    };
    assert_eq!(column(&run(dev), "segment_id"), ["s3"]);
    let split = |split: &str| ReadSettings {
        split: split.into(),
        ..settings(folder.path())
    };
    assert_eq!(column(&run(split("XL")), "segment_id"), ["s1"]);
    assert!(failure(split("medium")).contains("no subset \"medium\", which `split` names; its subsets are xs, s, m"));
}

#[test]
fn subtitles_beside_long_recordings_are_rows() {
    let folder = tempfile::tempdir().unwrap();
    let srt = "1\n00:00:00,100 --> 00:00:00,600\n<i>one</i>\n\n2\n00:00:00,600 --> 00:00:00,500\ntwo\n\n3\n00:10:00,000 --> 00:10:01,000\nlate\n";
    lay_out(
        folder.path(),
        &[
            ("a.wav", ""),
            ("a.srt", srt),
            ("talks/b.mp3", ""),
            ("talks/b.de.vtt", "WEBVTT\n\n00:00.000 --> 00:00.500\nzwei\n"),
        ],
    );
    let output = run(with_lang(folder.path(), "und"));
    let expected = [
        row("a@0.1", "one", "und", Some(0.1), 0.5),
        row("talks/b", "zwei", "de", None, 0.5),
    ];
    let mut found = rows_of(&output);
    found[1].0 = found[1].0.replace("@0", "");
    assert_eq!(found, expected);
    assert_eq!(
        by_reason(&output),
        counts(&[("duration_invalid", 1), ("duration_past_end", 1)])
    );
    fs::write(folder.path().join("a.en.srt"), srt).unwrap();
    assert!(failure(settings(folder.path())).contains("subtitles of one recording"));
}

#[test]
fn recordings_and_subtitles_of_any_name_are_rows_or_rejects() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let vtt = "WEBVTT\n\n00:00.000 --> 00:00.500\nein\n";
    lay_out(
        folder.path(),
        &[
            ("_4K.wav", ""),
            ("_4K.de.vtt", vtt),
            // Another recording of this name.
            ("_4K.mp3", ""),
            ("_talks/_b.mp3", ""),
            ("_talks/_b.srt", "1\n00:00:00,000 --> 00:00:00,500\nzwei\n"),
            ("_talks/untitled.flac", ""),
            ("_talks/gone.srt", ""),
            ("_talks/notes.pdf", ""),
            ("lost+found/c.mp3", ""),
        ],
    );
    let unnamed = std::ffi::OsStr::from_bytes(b"caf\xe9.mp3");
    fs::write(folder.path().join(unnamed), recording()).unwrap();
    let settings = with_lang(folder.path(), "de");
    let output = run(settings.clone());
    assert_eq!(column(&output, "text"), ["ein", "zwei"]);
    assert_eq!(
        by_reason(&output),
        counts(&[("missing_audio", 1), ("missing_text", 2), ("unsafe_name", 1)])
    );
    let said = details(&output).join("\n");
    assert!(
        said.contains("are read with _4K.") && said.contains("untitled.flac: there are no subtitles"),
        "{said}"
    );
    // What turns up later is read, too.
    let before = extras(&settings);
    fs::write(folder.path().join("new.mp3"), recording()).unwrap();
    assert_ne!(extras(&settings), before);
}

#[test]
fn tarred_data_of_nemo_is_found_by_its_names() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for number in 0..2 {
        let mut tar = fs::read(data("shar/recording.000000.tar")).unwrap();
        tar.truncate(tar.len());
        fs::write(at(&format!("audio_{number}.tar")), tar).unwrap();
    }
    let line = |name: &str, shard: usize| {
        serde_json::json!({"audio_filepath": name, "duration": 0.5, "text": name, "shard_id": shard, "lang": "hi"})
            .to_string()
    };
    let lines = [line("a-0.flac", 0), line("b-1.flac", 1), line("none.flac", 1)];
    fs::write(at("tarred_audio_manifest.json"), lines.join("\n")).unwrap();
    let output = run(settings(folder.path()));
    assert_eq!(column(&output, "text"), ["a-0.flac", "b-1.flac"]);
    assert_eq!(reasons(&output), ["missing_audio"]);
    fs::create_dir(at("sharded_manifests")).unwrap();
    for number in 0..2 {
        fs::write(
            at(&format!("sharded_manifests/manifest_{number}.json")),
            line("a-0.flac", number),
        )
        .unwrap();
    }
    assert_eq!(column(&run(settings(folder.path())), "text"), ["a-0.flac", "a-0.flac"]);
    fs::remove_file(at("audio_1.tar")).unwrap();
    assert!(failure(settings(folder.path())).contains("2 manifests in sharded_manifests, but 1 tars"));
}

#[test]
fn a_folder_that_may_be_of_two_layouts_is_an_error_that_names_both() {
    let folder = copied(&["wav/a.flac"]);
    lay_out(
        folder.path(),
        &[
            ("wav.scp", "a wav/a.flac\n"),
            ("text", "a of kaldi\n"),
            ("metadata.csv", "file_name,text\nwav/a.flac,of a table\n"),
        ],
    );
    let message = failure(with_lang(folder.path(), "en"));
    assert!(
        message.contains("kaldi (wav.scp)") && message.contains("audio_folder (metadata.csv)"),
        "{message}"
    );
    for (layout, text) in [(Layout::Kaldi, "of kaldi"), (Layout::AudioFolder, "of a table")] {
        let settings = ReadSettings {
            layout,
            ..with_lang(folder.path(), "en")
        };
        assert_eq!(column(&run(settings), "text"), [text]);
    }
    let wrong = |change: fn(&mut ReadSettings)| {
        let mut settings = ReadSettings {
            layout: Layout::Kaldi,
            ..with_lang(folder.path(), "en")
        };
        change(&mut settings);
        failure(settings)
    };
    assert!(wrong(|settings| settings.split = "dev".into()).contains("`split` belongs to layouts with splits"));
    assert!(wrong(|settings| settings.columns = vec!["a=text".into()]).contains("`columns` belongs to"));
    assert!(wrong(|settings| settings.format = Format::Nemo).contains("leave it out where `layout` is given"));
    assert!(wrong(|settings| settings.layout = Layout::Gigaspeech).contains("no GigaSpeech.json"));
}

#[test]
fn texts_of_libri_tts_are_the_normalised_ones() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("1/2/1_2_3_4.wav", ""),
            ("1/2/1_2_3_4.normalized.txt", "Mister Smith"),
            ("1/2/1_2_3_4.original.txt", "Mr. Smith"),
            ("1/2/1_2_3_5.wav", ""),
            ("1/2/1_2_3_5.original.txt", "only this"),
            ("1/2/1_2_3_6.normalized.txt", "no recording"),
        ],
    );
    let output = run(with_lang(folder.path(), "en"));
    assert_eq!(column(&output, "text"), ["Mister Smith"]);
    assert_eq!(by_reason(&output), counts(&[("missing_audio", 1), ("missing_text", 1)]));
}

#[test]
fn recordings_with_texts_may_have_a_list_beside_them() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[("a.wav", ""), ("a.txt", "one"), ("wav.scp", "a a.wav\n")],
    );
    assert_eq!(column(&run(with_lang(folder.path(), "en")), "text"), ["one"]);
    for (split, columns) in [("dev", vec![]), ("", vec!["a=text".to_string()])] {
        let message = failure(ReadSettings {
            layout: Layout::Transcripts,
            split: split.into(),
            columns,
            ..with_lang(folder.path(), "en")
        });
        assert!(message.ends_with("and this is transcripts"), "{message}");
    }
    // Cuts beside recordings and supervisions.
    let folder = copied(&[
        "lhotse/x_recordings_train.jsonl.gz",
        "lhotse/x_supervisions_train.jsonl.gz",
    ]);
    fs::copy(
        data("cuts/x_cuts_train.jsonl.gz"),
        folder.path().join("lhotse/x_cuts_train.jsonl.gz"),
    )
    .unwrap();
    let message = failure(settings(&folder.path().join("lhotse")));
    assert!(
        message.contains("lhotse_recordings") && message.contains("lhotse_cuts"),
        "{message}"
    );
}

#[test]
fn annotations_of_voxpopuli_are_parts_of_sessions() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // Quoted as Python's csv module writes fields with quotes or bars, which the publisher uses.
    let heading = "session_id|id_|original_text|normed_text|speaker_id|gender|split|start_time|end_time|vad";
    let rows = [
        "2009-S|a|\"He said \"\"no | yes\"\".\"|he said no yes|7|male|train|0.0|9.0|\"[(0.25, 0.5), (0.6, 1.0)]\"",
        "2009-S|b|Two|two|7|male|train|0.5|1.0|[[0.5, 0.75]]",
        "2009-S|c|Three||7|male|dev|0.5|1.0|",
        "2009-S|d|Four|four|7|male|train|0.5|0.25|",
        "2009-S|e|Five|five|7|male|train|0|1|[(0.5,)]",
        "2010-T|f|Six|six|7|male|train|0|1|",
        "../x|g|Seven|seven|7|male|train|0|1|",
        "2009-S|h|short",
        "2009-S|i|\"open|x|7|male|train|0|1|",
    ];
    fs::create_dir_all(at("annotations/asr")).unwrap();
    fs::create_dir_all(at("raw_audios/original/2009")).unwrap();
    fs::write(at("raw_audios/original/2009/2009-S_original.ogg"), recording()).unwrap();
    gz(
        &at("annotations/asr/asr_hr.tsv.gz"),
        &[&[heading][..], &rows].concat().join("\n"),
    );
    let output = run(settings(folder.path()));
    let expected = [
        row("2009-S-a", "he said no yes", "hr", Some(0.25), 0.75),
        row("2009-S-b", "two", "hr", Some(0.5), 0.25),
    ];
    assert_eq!(rows_of(&output), expected);
    let reasons = [
        ("bad_line", 2),
        ("duration_invalid", 2),
        ("missing_audio", 1),
        ("other_split", 1),
        ("unsafe_name", 1),
    ];
    assert_eq!(by_reason(&output), counts(&reasons));
    assert_eq!(
        extra_of(&output)[0].as_deref(),
        Some("{\"gender\":\"male\",\"original_text\":\"He said \\\"no | yes\\\".\",\"speaker\":\"7\"}")
    );
    let dev = run(ReadSettings {
        split: "validation".into(),
        columns: vec!["original_text=text".into()],
        ..settings(&at("annotations/asr/asr_hr.tsv.gz"))
    });
    assert_eq!(
        (rows_of(&dev), by_reason(&dev)["other_split"]),
        (vec![row("2009-S-c", "Three", "hr", Some(0.5), 0.5)], 5)
    );
    // Lists that the publisher's tool wrote beside the annotations come first.
    fs::create_dir_all(at("transcribed_data/hr/2009")).unwrap();
    fs::write(at("transcribed_data/hr/2009/2009-S-a.ogg"), recording()).unwrap();
    fs::rename(
        at("annotations/asr/asr_hr.tsv.gz"),
        at("transcribed_data/hr/asr_hr.tsv.gz"),
    )
    .unwrap();
    assert_eq!(
        column(&run(settings(folder.path())), "segment_id"),
        ["2009-S-a", "2009-S-b"]
    );
    let list = "id\traw_text\tnormalized_text\tspeaker_id\tsplit\tgender\n2009-S-a\tHe\the\t7\ttrain\tmale\n";
    fs::write(at("transcribed_data/hr/asr_train.tsv"), list).unwrap();
    let whole = run(settings(folder.path()));
    assert_eq!(
        (column(&whole, "text"), rows_of(&whole)[0].3),
        (vec!["he".to_string()], None)
    );
    fs::remove_file(at("transcribed_data/hr/asr_train.tsv")).unwrap();
    fs::remove_dir_all(at("raw_audios")).unwrap();
    assert!(failure(settings(folder.path())).contains("a folder raw_audios"));
}

#[test]
fn sessions_of_the_peoples_speech_are_read_clip_by_clip() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let session = |id: &str, clips: &[(f64, &str, &str)]| {
        let list = |of: &dyn Fn(&(f64, &str, &str)) -> serde_json::Value| clips.iter().map(of).collect::<Vec<_>>();
        let (times, texts, names) = (
            list(&|clip| clip.0.into()),
            list(&|clip| clip.1.into()),
            list(&|clip| clip.2.into()),
        );
        let data = serde_json::json!({"duration_ms": times, "label": texts, "name": names});
        serde_json::json!({"identifier": id, "training_data": data}).to_string()
    };
    let clean = [
        session(
            "s1",
            &[
                (500.0, "one", "s1/a.flac"),
                (750.0, "two", "s1/b.flac"),
                (1.0, "", "s1/a.flac"),
            ],
        ),
        session(
            "s2",
            &[
                (0.0, "x", "s1/a.flac"),
                (1.0, "x", "../a.flac"),
                (1.0, "x", "gone.flac"),
            ],
        ),
        "{\"identifier\": \"s3\", \"training_data\": {\"duration_ms\": [1], \"label\": [], \"name\": [\"a\"]}}".into(),
        "{\"identifier\": 7".into(),
    ];
    fs::create_dir_all(at("train/clean/s1")).unwrap();
    fs::create_dir_all(at("validation/validation")).unwrap();
    fs::write(at("train/clean.json"), clean.join("\n")).unwrap();
    fs::write(at("train/dirty.json"), session("s4", &[(500.0, "three", "c.flac")])).unwrap();
    fs::write(
        at("validation/validation.json"),
        session("s5", &[(500.0, "four", "d.flac")]),
    )
    .unwrap();
    for name in [
        "train/clean/s1/a.flac",
        "train/clean/s1/b.flac",
        "validation/validation/d.flac",
    ] {
        fs::write(at(name), recording()).unwrap();
    }
    fs::copy(at("train/clean/s1/a.flac"), at("c.flac")).unwrap();
    let mut tar = std::process::Command::new("tar");
    tar.args(["-C", at("").to_str().unwrap(), "-cf"])
        .arg(at("train/dirty.tar"))
        .arg("c.flac");
    assert!(tar.status().unwrap().success());
    let read = |name: &str, split: &str| {
        let output = run(ReadSettings {
            split: split.into(),
            ..settings(&at(name))
        });
        let rows = rows_of(&output)
            .into_iter()
            .map(|(id, text, lang, _, seconds)| (id, text, lang, seconds));
        (rows.collect::<Vec<_>>(), by_reason(&output))
    };
    let one = |id: &str, text: &str, seconds: f64| (id.to_string(), text.to_string(), "en".to_string(), seconds);
    let (clean, reasons) = read("", "clean");
    assert_eq!(clean, [one("a", "one", 0.5), one("b", "two", 0.75)]);
    let expected = [
        ("bad_json", 2),
        ("duration_invalid", 1),
        ("missing_audio", 1),
        ("missing_text", 1),
        ("unsafe_name", 1),
    ];
    assert_eq!(reasons, counts(&expected));
    let dirty = one("c", "three", 0.5);
    assert_eq!(read("", "").0, [&clean[..], std::slice::from_ref(&dirty)].concat());
    assert_eq!(read("train", "dirty").0, std::slice::from_ref(&dirty));
    assert_eq!(read("train/dirty.json", "").0, [dirty]);
    assert_eq!(read("", "dev").0, [one("d", "four", 0.5)]);
    assert!(
        failure(ReadSettings {
            split: "x".into(),
            ..settings(folder.path())
        })
        .contains("no split")
    );
}
