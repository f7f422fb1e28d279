//! The forms that corpora have when they are unpacked.

use std::os::unix::fs::symlink;

use flow_corpus::row_rules::Regions;
use flow_storage::Storage;

use super::*;

/// Writes files with their folders; what ends like a recording is one.
pub(super) fn lay_out(root: &Path, files: &[(&str, &str)]) {
    let audio = recording();
    for (name, text) in files {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let is_audio = [".flac", ".wav", ".mp3"].iter().any(|ending| name.ends_with(ending));
        let bytes = if is_audio { &audio[..] } else { text.as_bytes() };
        fs::write(path, bytes).unwrap();
    }
}

pub(super) fn with_lang(manifest: &Path, lang: &str) -> ReadSettings {
    ReadSettings {
        lang: lang.into(),
        ..settings(manifest)
    }
}

/// Segment, text and language of each row.
fn rows_of(output: &Output) -> Vec<[String; 3]> {
    let [ids, texts, langs] = ["segment_id", "text", "lang"].map(|name| column(output, name));
    ids.into_iter()
        .zip(texts)
        .zip(langs)
        .map(|((id, text), lang)| [id, text, lang])
        .collect()
}

pub(super) fn extra_of(output: &Output) -> Vec<Option<String>> {
    let rows = output.all_rows("rows");
    let extra = rows.column_by_name("extra").unwrap().as_string::<i32>().clone();
    extra.iter().map(|text| text.map(str::to_string)).collect()
}

pub(super) fn numbers(output: &Output, name: &str) -> Vec<Option<f64>> {
    let rows = output.all_rows("rows");
    rows.column_by_name(name)
        .unwrap()
        .as_primitive::<Float64Type>()
        .iter()
        .collect()
}

/// How long what `recording` gives is when it is decoded, in seconds.
fn measured() -> f64 {
    flow_audio::decode::decode(&recording(), 60.0).unwrap().len() as f64 / 16_000.0
}

pub(super) fn details(output: &Output) -> Vec<&str> {
    output
        .rejects()
        .iter()
        .map(|(_, reject)| reject.detail.as_str())
        .collect()
}

#[test]
fn a_folder_of_no_known_layout_is_told_by_what_is_in_it() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("parts")).unwrap();
    fs::write(folder.path().join("speech.zip"), "").unwrap();
    let said = failure(settings(folder.path()));
    for part in [
        "metadata.csv",
        "validated.tsv",
        "trans.txt",
        "in it is parts/, speech.zip",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    fs::remove_file(folder.path().join("speech.zip")).unwrap();
    (0..12).for_each(|number| fs::write(folder.path().join(format!("f{number:02}.doc")), "").unwrap());
    let said = failure(settings(folder.path()));
    assert!(said.contains("f09.doc and 3 more"), "{said}");
}

#[test]
fn what_a_folder_holds_beside_pairs_is_refused_and_not_passed_over() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("a.wav", ""),
            ("a.txt", "one"),
            ("lonely.txt", "two"),
            (".hidden.wav", ""),
            // Beside no recording a text is no transcript.
            ("notes/plan.txt", "three"),
        ],
    );
    let unnamed = |bytes: &'static [u8]| folder.path().join(OsStr::from_bytes(bytes));
    fs::write(unnamed(b"\xff.wav"), recording()).unwrap();
    fs::write(unnamed(b"\xff.doc"), "").unwrap();
    fs::create_dir(unnamed(b"\xfe")).unwrap();
    let output = run(with_lang(folder.path(), "en"));
    assert_eq!(column(&output, "segment_id"), ["a"]);
    let mut found = reasons(&output);
    found.sort_unstable();
    assert_eq!(found, ["missing_audio", "missing_text", "unsafe_name", "unsafe_name"]);
}

#[test]
fn librispeech_has_its_texts_in_lists() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("dev-clean/84/121123/84-121123-0000.flac", ""),
            ("dev-clean/84/121123/84-121123-0001.flac", ""),
            ("dev-clean/84/121123/84-121123-0003.flac", ""),
            (
                "dev-clean/84/121123/84-121123.trans.txt",
                "84-121123-0001 TWO  WORDS\r\n\n84-121123-0000 ONE\n84-121123-0002 NOBODY SAYS IT\n84-121123-0001 AGAIN\n",
            ),
            ("dev-clean/85/1/85-1-0000.flac", ""),
            ("dev-clean/85/1/85-1.trans.txt", "85-1-0000 THREE"),
        ],
    );
    let output = run(with_lang(folder.path(), "en"));
    let row = |id: &str, text: &str| [format!("dev-clean/{id}"), text.to_string(), "en".to_string()];
    assert_eq!(
        rows_of(&output),
        [
            row("84/121123/84-121123-0000", "ONE"),
            row("84/121123/84-121123-0001", "TWO WORDS"),
            row("85/1/85-1-0000", "THREE")
        ]
    );
    // A second line of one utterance, a line without a recording, and a recording without a line.
    assert_eq!(
        reasons(&output),
        ["duplicate_utterance", "missing_audio", "missing_text"]
    );

    // `dev-clean` is no language.
    let without = run(settings(folder.path()));
    assert_eq!(without.all_rows("rows").num_rows(), 0);
    assert_eq!(
        reasons(&without)
            .iter()
            .filter(|reason| **reason == "missing_field")
            .count(),
        4
    );
    assert!(
        details(&without)
            .iter()
            .any(|detail| detail.starts_with("lang: ") && detail.contains("setting `lang`"))
    );

    // Another list is another partition.
    let files = |settings: &ReadSettings| {
        let partitions = opened(settings).partitions(&Storage::default()).unwrap();
        partitions
            .into_iter()
            .map(|partition| partition.files)
            .collect::<Vec<_>>()
    };
    let list = folder.path().join("dev-clean/84/121123/84-121123.trans.txt");
    let found = files(&settings(folder.path()));
    assert_eq!(found[0].iter().filter(|file| **file == list).count(), 1);
    assert_eq!(found.len(), 2);

    // Letters that are not UTF-8 refuse their line alone.
    fs::write(&list, b"84-121123-0000 \xff\n84-121123-0001 TWO\n84-121123-0003 FOUR").unwrap();
    let damaged = run(with_lang(folder.path(), "en"));
    assert_eq!(column(&damaged, "text"), ["TWO", "FOUR", "THREE"]);
    assert_eq!(reasons(&damaged), ["not_utf8"]);
    assert!(
        details(&damaged)[0].starts_with("line 1 of "),
        "{:?}",
        details(&damaged)
    );
    // The letter that is put for such is one like others.
    fs::write(
        &list,
        "84-121123-0000 \u{fffd}\n84-121123-0001 TWO\n84-121123-0003 FOUR",
    )
    .unwrap();
    let whole = run(with_lang(folder.path(), "en"));
    assert_eq!(column(&whole, "text"), ["\u{fffd}", "TWO", "FOUR", "THREE"]);
}

#[test]
fn folders_of_libri_speech_are_splits() {
    let folder = tempfile::tempdir().unwrap();
    let folders = [
        "train-clean-100",
        "train-other-500",
        "dev-clean",
        "dev-other",
        "test-clean",
    ];
    let names: Vec<(String, String)> = folders
        .iter()
        .flat_map(|split| {
            let audio = (format!("{split}/1/2/1-2-0000.flac"), String::new());
            [
                audio,
                (format!("{split}/1/2/1-2.trans.txt"), format!("1-2-0000 {split}")),
            ]
        })
        .chain([("SPEAKERS.TXT".to_string(), "1 | F".to_string())])
        .collect();
    let files: Vec<(&str, &str)> = names
        .iter()
        .map(|(name, text)| (name.as_str(), text.as_str()))
        .collect();
    lay_out(folder.path(), &files);
    let of = |split: &str| ReadSettings {
        split: split.into(),
        ..with_lang(folder.path(), "en")
    };
    let all = [
        "dev-clean",
        "dev-other",
        "test-clean",
        "train-clean-100",
        "train-other-500",
    ];
    for (split, expected) in [
        ("", &all[3..]),
        ("train", &all[3..]),
        ("dev", &all[..2]),
        ("dev-other", &all[1..2]),
        ("test", &all[2..3]),
        ("all", &all[..]),
    ] {
        let output = run(of(split));
        assert_eq!(column(&output, "text"), expected, "{split}");
        assert_eq!(
            column(&output, "segment_id")[0],
            format!("{}/1/2/1-2-0000", expected[0])
        );
        assert!(reasons(&output).is_empty());
    }
    let told = opened(&of("")).decision().unwrap();
    assert!(told.contains("reading `train-clean-100`, `train-other-500`"), "{told}");
    assert!(failure(of("x")).contains("no split \"x\""));
    // A folder of one split has no others.
    let one = ReadSettings {
        manifest: folder.path().join("dev-clean").display().to_string(),
        ..of("dev")
    };
    assert!(failure(one).contains("`split` belongs"));
}

#[test]
fn common_voice_is_read_as_it_is_unpacked() {
    let folder = tempfile::tempdir().unwrap();
    let heading = "client_id\tpath\tsentence\tup_votes\tlocale\tage\n";
    let train = format!(
        "{heading}c1\ta.mp3\tHe said \"no\", twice\t2\ten-US\t\nc2\tb.mp3\t\"Open quote\t0\ten\tteens\nc3\tmissing.mp3\tx\t0\ten\t\nc4\ta.mp3\tx\n"
    );
    lay_out(
        folder.path(),
        &[
            ("clips/a.mp3", ""),
            ("clips/b.mp3", ""),
            ("train.tsv", &train),
            ("dev.tsv", &format!("{heading}c5\tb.mp3\tdev\t0\ten\t\n")),
        ],
    );
    let (of_folder, of_table) = (
        run(settings(folder.path())),
        run(settings(&folder.path().join("train.tsv"))),
    );
    for output in [&of_folder, &of_table] {
        let row = |id: &str, text: &str| [id.to_string(), text.to_string(), "en".to_string()];
        assert_eq!(
            rows_of(output),
            [row("a", "He said \"no\", twice"), row("b", "\"Open quote")]
        );
        assert_eq!(reasons(output), ["missing_audio", "bad_line"]);
        assert_eq!(
            extra_of(output),
            [
                Some(r#"{"client_id":"c1","up_votes":"2"}"#.to_string()),
                Some(r#"{"age":"teens","client_id":"c2","up_votes":"0"}"#.to_string())
            ]
        );
        assert!(column(output, "audio_path")[0].ends_with("/clips/a.mp3"));
        // Nobody says how long they are.
        assert_eq!(numbers(output, "duration")[0], Some(measured()));
    }
    assert_eq!(column(&of_table, "shard_id"), ["train", "train"]);
    assert_eq!(column(&run(settings(&folder.path().join("dev.tsv"))), "text"), ["dev"]);

    let keep = ReadSettings {
        regions: Regions::Keep,
        ..settings(folder.path())
    };
    assert_eq!(column(&run(keep), "lang"), ["en-US", "en"]);
    // What is believed without a look is in `clips`.
    let unseen = ReadSettings {
        check_audio: false,
        ..settings(folder.path())
    };
    assert!(
        column(&run(unseen), "audio_path")
            .iter()
            .all(|path| path.contains("/clips/"))
    );

    // The oldest tables.
    fs::write(
        folder.path().join("other.tsv"),
        format!("{heading}c6\ta\told\t0\ten\t\n"),
    )
    .unwrap();
    let old = run(settings(&folder.path().join("other.tsv")));
    assert!(column(&old, "audio_path")[0].ends_with("/clips/a.mp3"));
    fs::remove_file(folder.path().join("other.tsv")).unwrap();

    fs::write(
        folder.path().join("validated.tsv"),
        format!("{heading}c6\ta.mp3\tall\t0\ten\t\n"),
    )
    .unwrap();
    assert_eq!(column(&run(settings(folder.path())), "text"), ["all"]);
    // All tables are parts of this one. Rows of tests are no training data.
    let of_dev = format!("{heading}c6\ta.mp3\tall\t0\ten\t\nc5\tb.mp3\tdev\t0\ten\t\n");
    fs::write(folder.path().join("validated.tsv"), of_dev).unwrap();
    let of = |split: &str| ReadSettings {
        split: split.into(),
        ..settings(folder.path())
    };
    let output = run(of(""));
    assert_eq!(
        (column(&output, "text"), reasons(&output)),
        (vec!["all".to_string()], vec!["other_split"])
    );
    let told = opened(&of("")).decision().unwrap();
    assert!(
        told.contains("Common Voice, validated.tsv without the one row of dev.tsv"),
        "{told}"
    );
    for split in ["validated", "all"] {
        assert_eq!(column(&run(of(split)), "text"), ["all", "dev"], "{split}");
    }
    // What the other tables say decides, too.
    let files = |settings: &ReadSettings| {
        opened(settings).partitions(&Storage::default()).unwrap()[0]
            .files
            .clone()
    };
    assert!(files(&of("")).iter().any(|file| file.ends_with("dev.tsv")));
    fs::write(folder.path().join("dev.tsv"), heading).unwrap();
    assert_eq!(column(&run(of("")), "text"), ["all", "dev"]);
    fs::write(
        folder.path().join("dev.tsv"),
        format!("{heading}c5\tb.mp3\tdev\t0\ten\t\n"),
    )
    .unwrap();
    fs::remove_file(folder.path().join("validated.tsv")).unwrap();
    assert_eq!(column(&run(of("all")), "text").len(), 3);
    assert!(failure(of("other")).contains("its tables are train, dev"));
    fs::remove_file(folder.path().join("train.tsv")).unwrap();
    assert!(failure(settings(folder.path())).contains("dev.tsv"));
}

#[test]
fn tables_name_their_columns() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(folder.path(), &[("wavs/a.wav", ""), ("wavs/b.wav", "")]);
    let table = folder.path().join("all.csv");
    let text = "\u{feff}ID,wav,transcript,duration,offset,speaker,Language\r\n\
                ,wavs/a.wav,\"one, two\",0.5,0.25,s1,de\r\n\
                named,wavs/b.wav,\"with\nbreak\",,,,\r\n\
                n2,wavs/b.wav,rest,,0.5,s2,pt-BR\r\n\
                n3,wavs/b.wav,x,,7,s2,\r\n\
                n4,wavs/b.wav,x,0.5,-1,s2,\r\n\
                n5,,x,1,,s2,\r\n\
                n6,wavs/b.wav,x,long,,s2,\r\n\
                n7,wavs/b.wav,x\r\n\
                n8,wavs/none.wav,x,1,,s2,\r\n\
                n9,wavs/b.wav,\"open,1,,s2,\r\n";
    fs::write(&table, text).unwrap();
    let output = run(with_lang(&table, "en"));
    let row = |id: &str, text: &str, lang: &str| [id, text, lang].map(str::to_string);
    assert_eq!(
        rows_of(&output),
        [
            row("wavs/a@0.25", "one, two", "de"),
            row("named", "with\nbreak", "en"),
            row("n2", "rest", "pt")
        ]
    );
    assert_eq!(
        reasons(&output),
        [
            "duration_past_end",
            "offset_invalid",
            "missing_field",
            "bad_type",
            "bad_line",
            "missing_audio",
            "bad_line"
        ]
    );
    assert_eq!(numbers(&output, "start"), [Some(0.25), None, Some(0.5)]);
    let durations = numbers(&output, "duration");
    assert_eq!(durations[0], Some(0.5));
    assert_eq!(
        durations[2].unwrap(),
        durations[1].unwrap() - 0.5,
        "to the end of the recording"
    );
    let speaker = |name: &str| Some(format!("{{\"speaker\":\"{name}\"}}"));
    assert_eq!(extra_of(&output), [speaker("s1"), None, speaker("s2")]);
    assert_eq!(column(&output, "shard_id"), ["wavs"; 3]);

    // A line that is not UTF-8 is refused alone.
    fs::write(&table, b"file,text\nwavs/a.wav,\xff\nwavs/b.wav,good\n").unwrap();
    let output = run(with_lang(&table, "en"));
    assert_eq!(
        (column(&output, "text"), reasons(&output)),
        (vec!["good".to_string()], vec!["not_utf8"])
    );
    fs::write(&table, "file,text\nwavs/a.wav,\u{fffd}\nwavs/b.wav,good\n").unwrap();
    let output = run(with_lang(&table, "en"));
    assert_eq!(column(&output, "text"), ["\u{fffd}", "good"]);

    for (heading, message) in [
        ("sound,text\nx,y\n", "no column for the recording's file"),
        ("path,words\nx,y\n", "no column for the text"),
        ("", "no column for the recording's file"),
    ] {
        fs::write(&table, heading).unwrap();
        let message_there = failure(settings(&table));
        assert!(message_there.contains(message), "{message_there}");
        if let Some(columns) = heading.split('\n').next().filter(|line| !line.is_empty()) {
            assert!(message_there.contains(&columns.replace(',', ", ")), "{message_there}");
        }
    }

    // Many rows are many partitions, and tables are read one after the other.
    let rows: String = (0..1_001).map(|row| format!("wavs/a.wav,t{row},1,{row}\n")).collect();
    fs::write(folder.path().join("t_0.csv"), format!("path,text,duration,id\n{rows}")).unwrap();
    fs::write(
        folder.path().join("t_1.csv"),
        "text,path,duration,id\nlast,wavs/a.wav,1,z\n",
    )
    .unwrap();
    let output = run(with_lang(&folder.path().join("t_{0,1}.csv"), "en"));
    let names: Vec<&str> = output.partitions.iter().map(Partition::as_str).collect();
    assert_eq!(names, ["00000-t_0/000000", "00000-t_0/000001", "00001-t_1/000000"]);
    let texts = column(&output, "text");
    assert_eq!(
        (texts.len(), texts[1_000].as_str(), texts[1_001].as_str()),
        (1_002, "t1000", "last")
    );
}

/// `Dataset.to_json` of `datasets` writes a recording as an object; of one whose bytes are in it there is no file.
#[test]
fn recordings_may_be_objects_with_a_path() {
    let folder = tempfile::tempdir().unwrap();
    let lines = [
        r#"{"audio": {"bytes": null, "path": "data/a.wav"}, "sentence": "one"}"#,
        r#"{"audio": {"path": "data/b.wav"}, "sentence": "two"}"#,
        r#"{"audio": {"bytes": "UklGRg==", "path": "data/a.wav"}, "sentence": "three"}"#,
        r#"{"audio": {"path": 7}, "sentence": "four"}"#,
    ];
    lay_out(
        folder.path(),
        &[("data/a.wav", ""), ("data/b.wav", ""), ("x.jsonl", &lines.join("\n"))],
    );
    let output = run(with_lang(&folder.path().join("x.jsonl"), "en"));
    assert_eq!(column(&output, "text"), ["one", "two"]);
    assert_eq!(reasons(&output), ["missing_field"; 2]);
    assert_eq!(extra_of(&output), [None, None]);
}

#[test]
fn hugging_face_folders_have_metadata_as_json_lines() {
    let folder = tempfile::tempdir().unwrap();
    let metadata = [
        r#"{"file_name": "data/a.wav", "transcription": "one", "speaker_id": 7, "language": "fr"}"#,
        r#"{"file_name": "data/b.wav", "sentence": "two", "duration": 0.5, "offset": 0.25}"#,
        r#"{"file_name": "data/none.wav", "text": "x"}"#,
        r#"{"file_name": "data/b.wav"}"#,
        r#"{"file_name": "data/b.wav", "text": "x""#,
    ];
    lay_out(
        folder.path(),
        &[
            ("data/a.wav", ""),
            ("data/b.wav", ""),
            ("metadata.jsonl", &metadata.join("\n")),
        ],
    );
    for manifest in [folder.path().to_path_buf(), folder.path().join("metadata.jsonl")] {
        let output = run(with_lang(&manifest, "en"));
        let row = |id: &str, text: &str, lang: &str| [id, text, lang].map(str::to_string);
        assert_eq!(
            rows_of(&output),
            [row("data/a", "one", "fr"), row("data/b@0.25", "two", "en")]
        );
        assert_eq!(reasons(&output), ["missing_audio", "missing_field", "bad_json"]);
        assert!(
            details(&output)[2].contains("at line 5 column "),
            "{:?}",
            details(&output)
        );
        assert_eq!(
            extra_of(&output),
            [Some(r#"{"language":"fr","speaker_id":7}"#.to_string()), None]
        );
        assert_eq!(numbers(&output, "duration")[0], Some(measured()));
        assert_eq!(numbers(&output, "start"), [None, Some(0.25)]);
    }
    // A recording whose length is measured is looked at, whatever `check_audio` says.
    let unseen = ReadSettings {
        check_audio: false,
        ..with_lang(folder.path(), "en")
    };
    let before = extras(&unseen);
    fs::write(folder.path().join("data/a.wav"), b"other").unwrap();
    assert_ne!(extras(&unseen), before);

    fs::write(
        folder.path().join("metadata.csv"),
        "file_name,transcription\ndata/b.wav,of the table\n",
    )
    .unwrap();
    assert_eq!(column(&run(with_lang(folder.path(), "en")), "text"), ["of the table"]);
}

#[test]
fn columns_of_other_names_are_named_by_a_setting() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    lay_out(folder.path(), &[("a.wav", ""), ("b.wav", "")]);
    fs::write(
        at("all.csv"),
        "wav_file,words,text,secs,tongue,speaker\na.wav,said,raw,1.5,de,s1\nb.wav,heard,raw,1.0,de,s2\n",
    )
    .unwrap();
    let read = |columns: &[&str]| {
        let mut settings = with_lang(&at("all.csv"), "en");
        settings.check_audio = false;
        settings.columns = columns.iter().map(ToString::to_string).collect();
        settings
    };
    let columns = ["wav_file=audio_filepath", "words=text", "secs=duration", "tongue=lang"];
    let output = run(read(&columns));
    // The setting counts, though the table has a column `text` too.
    assert_eq!(column(&output, "text"), ["said", "heard"]);
    assert_eq!(column(&output, "lang"), ["de", "de"]);
    assert_eq!(column(&output, "extra"), [r#"{"speaker":"s1"}"#, r#"{"speaker":"s2"}"#]);
    for (wrong, message) in [
        (&["words"][..], "THEIRS=OURS"),
        (&["words=txt"], "is not a column that is read"),
        (&["a=text", "b=sentence"], "both"),
    ] {
        let refused = Harness::<Read>::new(read(wrong)).shape().unwrap_err().to_string();
        assert!(refused.contains(message), "{refused}");
    }
}

#[test]
fn of_several_columns_of_one_name_the_first_is_read_and_told() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("t.csv");
    let told = |heading: &str| {
        fs::write(&table, format!("{heading}\na.wav,one,two,1\n")).unwrap();
        let mut settings = with_lang(&table, "en");
        settings.check_audio = false;
        let output = run(settings);
        assert_eq!(column(&output, "text"), ["one"]);
        let is_note = |event: &flow_kind::event::Event| matches!(event, flow_kind::event::Event::Note { message } if message.contains("several columns are called `Text`"));
        output.events.iter().any(is_note)
    };
    assert!(told("path,text,Text,duration"));
    assert!(!told("path,text,,duration"));
}

#[test]
fn folders_of_keys_that_a_setting_names_are_languages() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = folder.path().join("m.jsonl");
    let line =
        |lang: &str| format!(r#"{{"clip": "{lang}/a.wav", "audio_filepath": "old.wav", "text": "x", "duration": 1}}"#);
    fs::write(&manifest, [line("hi"), line("de")].join("\n")).unwrap();
    let mut settings = settings(&manifest);
    settings.check_audio = false;
    settings.columns = vec!["clip=path".into(), "wrods=text".into()];
    let output = run(settings);
    assert_eq!(reasons(&output), Vec::<&str>::new());
    assert_eq!(column(&output, "lang"), ["hi", "de"]);
    let told = output.events.iter().any(
        |event| matches!(event, flow_kind::event::Event::Note { message } if message.contains("no line has `wrods`")),
    );
    assert!(told, "{:?}", output.events);
}

#[test]
fn a_flat_folder_needs_no_more_than_a_language() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("a.wav", ""),
            ("a.txt", "text"),
            ("a.lab", "not this"),
            ("b.wav", ""),
            ("b.lab", "label"),
            ("wav/deep/er/c.flac", ""),
            ("wav/deep/er/c.txt", "deep"),
            // A transcript, no list.
            ("d.trans.wav", ""),
            ("d.trans.txt", "just words"),
        ],
    );
    let output = run(with_lang(folder.path(), "de"));
    let row = |id: &str, text: &str| [id.to_string(), text.to_string(), "de".to_string()];
    assert_eq!(
        rows_of(&output),
        [
            row("a", "text"),
            row("b", "label"),
            row("d.trans", "just words"),
            row("wav/deep/er/c", "deep")
        ]
    );
    assert_eq!(reasons(&output), Vec::<&str>::new());
    // `wav` is no language, so the setting is asked for.
    let without = run(settings(folder.path()));
    assert_eq!(reasons(&without), ["missing_field"; 4]);
    assert!(details(&without).iter().all(|detail| detail.contains("setting `lang`")));
}

#[test]
fn und_is_the_language_of_rows_where_nothing_else_tells_one() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("mono/a.wav", ""),
            ("mono/a.txt", "just words"),
            ("two/hi/a.wav", ""),
            ("two/hi/a.txt", "words"),
            ("two/en/b.wav", ""),
            ("two/en/b.txt", "words"),
        ],
    );
    let at = |name: &str| folder.path().join(name);
    assert_eq!(column(&run(with_lang(&at("mono"), "und")), "lang"), ["und"]);
    let mut languages = column(&run(with_lang(&at("two"), "und")), "lang");
    languages.sort();
    assert_eq!(languages, ["en", "hi"]);

    fs::write(
        at("m.jsonl"),
        [
            r#"{"audio_filepath": "mono/a.wav", "duration": 1.0, "text": "words"}"#,
            r#"{"audio_filepath": "mono/a.wav", "duration": 1.0, "text": "<|ta|> words"}"#,
            r#"{"audio_filepath": "mono/a.wav", "duration": 1.0, "text": "words", "lang": "de"}"#,
        ]
        .join("\n"),
    )
    .unwrap();
    let mut settings = with_lang(&at("m.jsonl"), "und");
    settings.check_audio = false;
    let output = run(settings);
    assert_eq!(column(&output, "lang"), ["und", "ta", "de"]);
    assert_eq!(reasons(&output), Vec::<&str>::new());
}

#[test]
fn links_to_folders_are_followed_once() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("elsewhere/x.wav", ""),
            ("elsewhere/x.txt", "x"),
            ("elsewhere/in/y.wav", ""),
            ("elsewhere/in/y.txt", "y"),
            ("corpus/en/a.wav", ""),
            ("corpus/en/a.txt", "a"),
        ],
    );
    let at = |name: &str| folder.path().join(name);
    symlink(at("elsewhere"), at("corpus/hi")).unwrap();
    symlink(at("elsewhere"), at("corpus/zz")).unwrap();
    // Round in circles: to itself, to what is above, and between two.
    symlink(at("corpus"), at("corpus/en/again")).unwrap();
    symlink(at("corpus/hi"), at("elsewhere/in/up")).unwrap();
    symlink(".", at("elsewhere/self")).unwrap();
    symlink(at("nowhere"), at("corpus/en/gone")).unwrap();
    let output = run(settings(&at("corpus")));
    let row = |id: &str, text: &str, lang: &str| [id, text, lang].map(str::to_string);
    assert_eq!(
        rows_of(&output),
        [
            row("en/a", "a", "en"),
            row("hi/x", "x", "hi"),
            row("hi/in/y", "y", "hi")
        ]
    );
    assert_eq!(reasons(&output), Vec::<&str>::new());
}

#[test]
fn folders_that_lie_too_deep_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let deep = |count: usize| vec!["d"; count].join("/");
    lay_out(
        folder.path(),
        &[
            (&format!("{}/a.wav", deep(64)), ""),
            (&format!("{}/a.txt", deep(64)), "x"),
        ],
    );
    assert_eq!(column(&run(with_lang(folder.path(), "en")), "text"), ["x"]);
    fs::create_dir(folder.path().join(deep(65))).unwrap();
    let message = failure(with_lang(folder.path(), "en"));
    assert!(
        message.contains("folders_too_deep") && message.contains("64"),
        "{message}"
    );
}

#[test]
fn folders_are_languages_only_where_all_of_them_are() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("tree/dr/a.wav", ""),
            ("tree/dr/a.txt", "one"),
            ("tree/speaker1/b.wav", ""),
            ("tree/speaker1/b.txt", "<|de|> two"),
            ("tree/hi/c.wav", ""),
            ("tree/hi/c.txt", "three"),
            ("table/hi/a.wav", ""),
            ("table/s1/a.wav", ""),
            ("table/t.csv", "path,text\nhi/a.wav,one\ns1/a.wav,<|de|> two\n"),
            ("lines/hi/a.wav", ""),
            ("lines/s1/a.wav", ""),
            (
                "lines/metadata.jsonl",
                "{\"file_name\": \"hi/a.wav\", \"text\": \"one\"}\n{\"file_name\": \"s1/a.wav\", \"text\": \"<|de|> two\"}\n",
            ),
        ],
    );
    for (manifest, lost) in [("tree", 2), ("table/t.csv", 1), ("lines", 1)] {
        let settings = settings(&folder.path().join(manifest));
        let output = run(settings.clone());
        assert_eq!(column(&output, "lang"), ["de"], "{manifest}");
        assert_eq!(reasons(&output), vec!["missing_field"; lost], "{manifest}");
        let decision = opened(&settings).decision().unwrap();
        assert!(decision.contains("are not taken for languages"), "{decision}");
        // It is in the log.
        let is_told = |event: &Event| matches!(event, Event::Note { message } if message.ends_with(&decision));
        assert!(output.events.iter().any(is_told), "{:?}", output.events);
    }
    // Where the table has a row of each language's folder alone, folders count.
    fs::write(
        folder.path().join("table/t.csv"),
        "path,text,lang\nhi/a.wav,one,\ns1/a.wav,two,de\n",
    )
    .unwrap();
    let settings = settings(&folder.path().join("table/t.csv"));
    assert_eq!(column(&run(settings.clone()), "lang"), ["hi", "de"]);
    let decision = opened(&settings).decision().unwrap();
    assert!(decision.ends_with("taken for languages: `hi`"), "{decision}");
}

/// What other parts of a manifest decide about the languages of a part belongs to its key.
#[test]
fn a_folder_that_is_no_language_changes_the_key_of_all_parts() {
    let folder = tempfile::tempdir().unwrap();
    let line = |file: &str| format!("{{\"file_name\": \"{file}\", \"text\": \"one\"}}\n");
    let table = |file: &str| format!("path,text\n{file},one\n");
    lay_out(
        folder.path(),
        &[
            ("tree/hi/a.wav", ""),
            ("tree/hi/a.txt", "one"),
            ("tree/ta/b.wav", ""),
            ("tree/ta/b.txt", "two"),
            ("l/hi/a.wav", ""),
            ("l/1.jsonl", &line("hi/a.wav")),
            ("l/2.jsonl", &line("ta/a.wav")),
            ("t/hi/a.wav", ""),
            ("t/1.csv", &table("hi/a.wav")),
            ("t/2.csv", &table("ta/a.wav")),
        ],
    );
    for (manifest, change) in [
        ("tree", &[("tree/s1/c.wav", ""), ("tree/s1/c.txt", "three")][..]),
        ("l/{1,2}.jsonl", &[("l/2.jsonl", &line("s1/a.wav"))]),
        ("t/{1,2}.csv", &[("t/2.csv", &table("s1/a.wav"))]),
    ] {
        let settings = settings(&folder.path().join(manifest));
        let first = |settings: &ReadSettings| extras(settings).swap_remove(0);
        let (before, named) = (first(&settings), first(&with_lang(&folder.path().join(manifest), "de")));
        lay_out(folder.path(), change);
        assert_ne!(first(&settings), before, "{manifest}");
        // Where a language is given, folders do not count.
        assert_eq!(
            first(&with_lang(&folder.path().join(manifest), "de")),
            named,
            "{manifest}"
        );
    }
}

#[test]
fn a_pair_with_another_name_is_another_row() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(folder.path(), &[("a.wav", ""), ("a.txt", "one"), ("lonely.txt", "two")]);
    let settings = with_lang(folder.path(), "en");
    let before = extras(&settings);
    for (old, new) in [("a.wav", "b.wav"), ("a.txt", "b.txt")] {
        fs::rename(folder.path().join(old), folder.path().join(new)).unwrap();
    }
    let after = extras(&settings);
    assert_ne!(after, before);
    fs::rename(folder.path().join("lonely.txt"), folder.path().join("other.txt")).unwrap();
    assert_ne!(extras(&settings), after, "the reject names it");
}

#[test]
fn what_is_no_language_is_a_reject_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let line = |lang: &str| {
        format!("{{\"audio_filepath\": \"a.wav\", \"duration\": 0.5, \"text\": \"x\", \"target_lang\": \"{lang}\"}}\n")
    };
    lay_out(
        folder.path(),
        &[
            ("a.wav", ""),
            (
                "m.jsonl",
                &["hi", "auto_detect", "en-US", "speaker one"].map(line).concat(),
            ),
            (
                "t.csv",
                "path,text,Locale,duration\na.wav,x,hi,0.5\na.wav,x,auto_detect,0.5\na.wav,x,en-US,0.5\na.wav,x,speaker one,0.5\n",
            ),
            ("tagged.csv", "path,text,duration\na.wav,<|null|> x,0.5\n"),
        ],
    );
    for (manifest, field, line) in [("m.jsonl", "`target_lang`", 2), ("t.csv", "`locale`", 3)] {
        let output = run(settings(&folder.path().join(manifest)));
        assert_eq!(column(&output, "lang"), ["hi", "en"]);
        assert_eq!(reasons(&output), ["bad_language"; 2]);
        let expected = format!(
            "\"auto_detect\" in {field} is not a language code such as `hi` or `en-US` ({manifest}, line {line})"
        );
        assert_eq!(details(&output)[0], expected);
        assert!(details(&output)[1].contains("\"speaker one\""));
    }
    let tagged = run(settings(&folder.path().join("tagged.csv")));
    assert_eq!(reasons(&tagged), ["bad_language"]);
    assert!(
        details(&tagged)[0].contains("\"null\" in the tag"),
        "{:?}",
        details(&tagged)
    );
    let message = failure(with_lang(&folder.path().join("m.jsonl"), "English, US"));
    assert!(message.contains("is not a language code"), "{message}");
}
