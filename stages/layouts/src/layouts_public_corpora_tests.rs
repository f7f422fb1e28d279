//! Corpora that are published in forms of their own.

use super::*;

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
    fs::write(&packed, b"\x1f\x8bpacked").unwrap();
    assert!(failure(settings(&at(""))).contains("00000000.tar.gz`"));
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
    let said = failure(settings(&at("fleurs/hi_in")));
    assert!(
        said.contains("train.tar.gz: ") && said.contains("run `tar -xf "),
        "{said}"
    );

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
    let said = failure(split("m"));
    assert!(
        said.contains("no rows of the subset {M}") && said.contains("are {DEV}, {XL}"),
        "{said}"
    );
    assert!(failure(split("medium")).contains("no subset \"medium\", which `split` names; its subsets are xs, s, m"));
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

#[test]
fn spgispeech_is_read_from_its_root() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join("spgispeech").join(name);
    let table = |rows: &str| format!("wav_filename|wav_filesize|transcript\n{rows}");
    let train = "2511ab/1.wav|320044|Our \"EBITDA\" rose 5%, to $7.\n2511ab/2.wav|320044|\n2511ab/9.wav|320044|gone\n../1.wav|1|x\na|b\na.wav|1|b|c\n";
    lay_out(
        folder.path(),
        &[
            ("spgispeech/train.csv", &table(train)),
            ("spgispeech/val.csv", &table("7c/1.wav|1|Thank you.\n")),
            ("spgispeech/train/2511ab/1.wav", ""),
            ("spgispeech/val/7c/1.wav", ""),
        ],
    );
    let texts = |name: &str, split: &str| {
        let output = run(ReadSettings {
            split: split.into(),
            ..settings(&at(name))
        });
        let names = column(&output, "segment_id").into_iter().zip(column(&output, "lang"));
        let rows = names
            .zip(column(&output, "text"))
            .map(|((id, lang), text)| format!("{id} {lang} {text}"));
        (rows.collect::<Vec<_>>(), by_reason(&output))
    };
    let refused = [
        ("bad_line", 2),
        ("missing_audio", 1),
        ("missing_text", 1),
        ("unsafe_name", 1),
    ];
    let first = "2511ab/1 en Our \"EBITDA\" rose 5%, to $7.".to_owned();
    assert_eq!(texts("", ""), (vec![first.clone()], counts(&refused)));
    assert_eq!(texts("", "dev").0, ["7c/1 en Thank you."]);
    assert_eq!(texts("val.csv", "").0, ["7c/1 en Thank you."]);
    // In the folder of its recordings.
    fs::copy(at("train.csv"), at("train/train.csv")).unwrap();
    assert_eq!(texts("train/train.csv", "").0, [first]);
}

#[test]
fn granary_names_the_corpus_that_it_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let line = |path: &str, text: &str| {
        let line = serde_json::json!({"utt_id": text, "audio_filepath": path, "duration": 0.4, "offset": 0.1, "text": text, "source_lang": "de", "taskname": "asr"});
        format!("{line}\n")
    };
    lay_out(
        folder.path(),
        &[
            (
                "de/voxpopuli/de_asr.jsonl",
                &[line("2009/a.wav", "eins"), line("2009/b.wav", "zwei")].concat(),
            ),
            ("de/voxpopuli/de_ast.jsonl", &line("2009/a.wav", "one")),
            ("de/voxpopuli/2009/a.wav", ""),
            ("de/yodas/de_asr.jsonl", &line("0001/v.wav", "drei")),
        ],
    );
    let said = failure(settings(&folder.path().join("de")));
    assert!(
        said.contains("yodas/de_asr.jsonl: Granary has no recordings: fetch YODAS2"),
        "{said}"
    );
    assert!(said.contains("de/yodas/0001/v.wav"), "{said}");
    let voxpopuli = folder.path().join("de/voxpopuli");
    let output = run(settings(&voxpopuli));
    assert_eq!(
        (column(&output, "text"), column(&output, "lang")),
        (vec!["eins".to_owned()], vec!["de".to_owned()])
    );
    assert_eq!(
        (reasons(&output), numbers(&output, "start")),
        (vec!["missing_audio"], vec![Some(0.1)])
    );
    assert_eq!(column(&run(settings(&voxpopuli.join("de_ast.jsonl"))), "text"), ["one"]);
    let translations = ReadSettings {
        split: "ast".into(),
        ..settings(&voxpopuli)
    };
    assert_eq!(column(&run(translations), "text"), ["one"]);
}

#[test]
fn a_folder_above_a_corpus_names_the_corpus() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    lay_out(
        folder.path(),
        &[
            ("kaldi/data/notes.md", "x"),
            ("kaldi/data/train/wav.scp", "a a.wav\n"),
            ("kaldi/data/train/text", "a one\n"),
            ("cv/hi/train.tsv", "client_id\tpath\tsentence\n1\ta.mp3\tone\n"),
            ("cv/hi/clips/a.mp3", ""),
            ("fleurs/hi_in/train.tsv", "1\ta.wav\tOne\tone\to n e\t17600\tMALE\n"),
            ("fleurs/hi_in/audio/train/a.wav", ""),
            ("gigaspeech2/data/th/train_refined.tsv", "0-1-2\tone\n"),
            ("gigaspeech2/data/th/train/0/1/0-1-2.wav", ""),
            (
                "Granary/de/yodas/de.jsonl",
                "{\"utt_id\": \"a\", \"audio_filepath\": \"a.wav\"}\n",
            ),
            // Recordings with texts are read.
            ("mixed/a.wav", ""),
            ("mixed/a.txt", "one"),
            ("mixed/data/wav.scp", "a a.wav\n"),
        ],
    );
    for (name, below) in [
        ("kaldi/data", "kaldi/data/train has the layout kaldi (wav.scp)"),
        ("kaldi", "kaldi/data/train has the layout kaldi (wav.scp)"),
        ("cv", "cv/hi has the layout common_voice (train.tsv beside clips)"),
        ("fleurs", "fleurs/hi_in has the layout fleurs"),
        ("gigaspeech2", "gigaspeech2/data/th has the layout gigaspeech_2"),
        ("Granary", "Granary/de has the layout granary"),
    ] {
        let said = failure(settings(&at(name)));
        assert!(
            said.contains(below) && said.contains("name that folder"),
            "{name}: {said}"
        );
    }
    let said = failure(ReadSettings {
        split: "test".into(),
        ..settings(&at("cv"))
    });
    assert!(said.contains("cv/hi has the layout"), "{said}");
    assert_eq!(column(&run(with_lang(&at("mixed"), "en")), "text"), ["one"]);
    let told = opened(&with_lang(&at("mixed"), "en")).decision().unwrap();
    assert_eq!(told, "recordings with their texts beside them");
}
