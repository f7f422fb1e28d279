//! Data sets of Hugging Face.

use super::*;
use crate::configs_folder::{CONFIGS, lay_out_configs};

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
    // A single file or saved split is of one split, which another name does not fit.
    for name in [
        "hub/data/train-00000-of-00001.parquet",
        "saved/data-00000-of-00001.arrow",
        "saved_dict/train",
    ] {
        assert!(
            failure(split(name, "valid")).contains("this is of the split \"train\""),
            "{name}"
        );
        assert_eq!(rows_of(&run(split(name, "train"))).len(), 2, "{name}");
    }
    // One configuration for each language is one corpus; others are not.
    let folder = tempfile::tempdir().unwrap();
    for language in ["hindi", "ta"] {
        fs::create_dir(folder.path().join(language)).unwrap();
        let to = folder.path().join(language).join("train-00001-of-00003.parquet");
        fs::copy(data("hub/data/train-00000-of-00001.parquet"), to).unwrap();
    }
    let output = run(settings(folder.path()));
    let names: Vec<String> = rows_of(&output).into_iter().map(|row| row.0).collect();
    let stem = "train-00001-of-00003";
    let of = |folder: &str| [0, 1].map(|number| format!("{folder}/{stem}/{number}"));
    assert_eq!(names, [of("hindi"), of("ta")].concat());
    // A language without the split that is read is named.
    fs::create_dir(folder.path().join("bn")).unwrap();
    let to = folder.path().join("bn/valid-00000-of-00001.parquet");
    fs::copy(data("hub/data/test-00000-of-00001.parquet"), &to).unwrap();
    let decision = opened(&settings(folder.path())).decision().unwrap();
    assert!(
        decision.contains("reading `train`; configurations without that split: bn"),
        "{decision}"
    );
    fs::remove_dir_all(folder.path().join("bn")).unwrap();
    fs::rename(folder.path().join("ta"), folder.path().join("clean")).unwrap();
    assert!(failure(settings(folder.path())).contains("several configurations: clean, hindi"));
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
fn files_of_a_folder_are_of_the_splits_that_its_readme_declares() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("parts")).unwrap();
    for (from, to) in [("train", "one"), ("test", "two")] {
        let from = data("hub/data").join(format!("{from}-00000-of-00001.parquet"));
        fs::copy(from, at("parts").join(format!("{to}.parquet"))).unwrap();
    }
    let declare =
        |configs: &str| fs::write(at("README.md"), format!("---\nconfigs:\n{configs}---\n# A dataset\n")).unwrap();
    let split = |split: &str| ReadSettings {
        split: split.into(),
        ..settings(folder.path())
    };
    declare(
        "- config_name: default\n  data_files:\n  - {split: train, path: parts/two.parquet}\n  \
         - {split: validation, path: 'parts/o*.parquet'}\n  - {split: test, path: 'parts/gone-*'}\n",
    );
    assert_eq!(column(&run(split("")), "segment_id"), ["two/0"]);
    assert_eq!(column(&run(split("dev")), "segment_id"), ["one/0", "one/1"]);
    assert!(failure(split("test")).contains("no split \"test\""));
    declare(
        "- config_name: default\n  data_files:\n  - {split: train, path: [parts/two.parquet, parts/gone.parquet]}\n",
    );
    assert!(failure(split("")).contains("`parts/gone.parquet` matches no file"));
    // Of several without a default, names of files tell the splits.
    declare("- {config_name: a, data_dir: parts}\n- {config_name: b}\n");
    assert_eq!(column(&run(split("")), "segment_id"), ["one/0", "one/1", "two/0"]);
    declare("- 7\n");
    assert!(failure(split("")).contains("README.md"));
}

#[test]
fn configurations_of_a_readme_are_read_of_every_layout() {
    let folder = tempfile::tempdir().unwrap();
    lay_out_configs(folder.path());
    let of = |config: &str, split: &str| ReadSettings {
        split: split.into(),
        ..with_lang(&folder.path().join(config), "hi")
    };
    let tars = column(&run(with_lang(&data("webdataset/train-000000.tar"), "hi")), "text");
    assert!(tars.len() > 1);
    let tars: Vec<&str> = tars.iter().map(String::as_str).collect();
    for (config, split, texts) in [
        ("", "", &["one", "two"][..]),
        ("lines", "held_out", &["three"]),
        ("lines", "all", &["one", "two", "three"]),
        ("tars", "", &tars),
        ("folder", "", &["four"]),
        ("folder", "test", &["five"]),
        ("tables", "", &["four"]),
        ("tables", "test", &["five"]),
        ("archives", "", &["ek, do", "teen"]),
    ] {
        assert_eq!(column(&run(of(config, split)), "text"), texts, "{config}:{split}");
    }
    let decision = opened(&of("tables", "")).decision().unwrap();
    for part in [
        "`tables` of 6 of README.md",
        "splits test, train; reading `train`",
        "AudioFolder",
    ] {
        assert!(decision.contains(part), "{decision}");
    }
    for (config, split, said) in [
        ("line", "", "no configuration `line`; write"),
        (
            "line",
            "",
            "/CONFIG with one of lines, tars, folder, tables, archives, texts",
        ),
        (
            "lines",
            "dev",
            "no split \"dev\", which `split` names; its splits are held_out, train",
        ),
        (
            "texts",
            "",
            "no file of its configuration `texts` is of a layout that is read",
        ),
    ] {
        let message = failure(of(config, split));
        assert!(message.contains(said), "{message}");
    }
    // `flow check` does not miss a configuration.
    let sources = |config: &str| <Read as flow_kind::Kind>::sources(&flow_kind::WithShared::from(of(config, "")));
    assert_eq!(sources("tables")[0].1, folder.path().join("README.md"));
    assert_eq!(sources("line")[0].1, folder.path().join("line"));
    // A split that was not downloaded is left out; a pattern of one that was is not.
    fs::remove_file(folder.path().join("lists/test.jsonl")).unwrap();
    assert_eq!(column(&run(of("", "all")), "text"), ["one", "two"]);
    fs::remove_file(folder.path().join("lists/more-0.jsonl")).unwrap();
    let message = failure(of("lines", ""));
    assert!(
        message.contains("the pattern `lists/more-*.jsonl` matches no file"),
        "{message}"
    );
    // Several, and none of them the default one; a chosen layout does not ask README.md.
    let several = CONFIGS.replace("  default: true\n", "");
    fs::write(folder.path().join("README.md"), several).unwrap();
    let message = failure(of("", ""));
    assert!(message.contains("several configurations"), "{message}");
    let plain = ReadSettings {
        layout: Layout::WebDataset,
        ..of("tars", "test")
    };
    assert!(run(plain).all_rows("rows").num_rows() > 0);
    // Texts of Shar are not in its tars.
    let shar = copied(&["shar/cuts.000000.jsonl.gz", "shar/recording.000000.tar"]);
    let at = shar.path().join("shar");
    let before = column(&run(with_lang(&at, "hi")), "text");
    fs::write(
        at.join("README.md"),
        "---\nconfigs:\n- {config_name: x, data_files: '*.tar'}\n---\n",
    )
    .unwrap();
    assert_eq!(column(&run(with_lang(&at, "hi")), "text"), before);
    assert!(!before.is_empty());
    // A header of another program is not asked.
    fs::write(folder.path().join("README.md"), "---\nA: title: [\n---\n").unwrap();
    assert_eq!(column(&run(of("af/test", "")), "text"), ["five"]);
    assert_eq!(column(&run(of("af", "test")), "text"), ["five"]);
    // Nothing leads out of the folder.
    for files in ["/etc/*", "../../*", "a/../../*", "{..,.}/*"] {
        let readme = format!(
            "---\nconfigs:\n- {{config_name: x, data_files: '{files}'}}\n- {{config_name: y, data_dir: '{files}'}}\n---\n"
        );
        fs::write(folder.path().join("README.md"), readme).unwrap();
        for config in ["x", "y"] {
            let message = failure(of(config, ""));
            assert!(message.contains("configuration `"), "{message}");
        }
    }
}

#[test]
fn a_column_of_bytes_holds_recordings() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = wav("a.flac");
    let columns: Vec<(&str, arrow::array::ArrayRef)> = vec![
        (
            "audio",
            Arc::new(arrow::array::BinaryArray::from_opt_vec(vec![Some(&bytes), None])),
        ),
        ("text", Arc::new(StringArray::from(vec!["one", "two"]))),
    ];
    let batch = arrow::array::RecordBatch::try_from_iter_with_nullable(
        columns.into_iter().map(|(name, column)| (name, column, true)),
    )
    .unwrap();
    let path = folder.path().join("x.parquet");
    let mut writer = ArrowWriter::try_new(fs::File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    for path in [&path, folder.path()] {
        let output = run(with_lang(path, "en"));
        assert_eq!(rows_of(&output), [row("x/0", "one", "en", None, 0.5)]);
        assert_eq!(reasons(&output), ["missing_audio"]);
        assert_eq!(recordings_of(&output), std::slice::from_ref(&bytes));
    }
}

/// A Parquet file as `datasets` writes it, of one row for each recording of the test data, with a column of recordings and of texts.
fn parquet_of(path: &Path, recordings: &[&str], columns: &[(&str, &[&str])]) {
    let bytes: Vec<Vec<u8>> = recordings.iter().map(|name| wav(name)).collect();
    let bytes: arrow::array::ArrayRef = Arc::new(arrow::array::BinaryArray::from_iter_values(bytes));
    let names: arrow::array::ArrayRef = Arc::new(StringArray::from_iter_values(recordings));
    let audio = arrow::array::StructArray::try_from(vec![("bytes", bytes), ("path", names)]).unwrap();
    let texts = columns.iter().map(|(name, values)| {
        let values: arrow::array::ArrayRef = Arc::new(StringArray::from_iter_values(*values));
        (*name, values)
    });
    let audio: arrow::array::ArrayRef = Arc::new(audio);
    let all = std::iter::once(("audio", audio)).chain(texts);
    let batch = arrow::array::RecordBatch::try_from_iter(all).unwrap();
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut writer = ArrowWriter::try_new(fs::File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

#[test]
fn data_sets_of_the_hub_are_read_as_they_lie() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let of = |name: &str, split: &str, columns: &[&str]| ReadSettings {
        split: split.into(),
        columns: columns.iter().map(|column| (*column).to_owned()).collect(),
        ..with_lang(&at(name), "en")
    };
    // yodas-granary: a folder of a language and part, in it one of transcripts and one of translations.
    let granary = "yodas-granary/data/en000";
    parquet_of(
        &at(&format!("{granary}/asr_only/00000000.parquet")),
        &["a.flac", "b.flac"],
        &[
            ("text", &["One.", "Two."]),
            ("utt_id", &["v-00000-00000012-00000062", "v-00001-00000100-00000175"]),
        ],
    );
    parquet_of(
        &at(&format!("{granary}/ast/00000000.parquet")),
        &["c.flac"],
        &[("text", &["Drei."])],
    );
    let output = run(of(granary, "asr_only", &["utt_id=segment_id"]));
    let expected = [
        row("v-00000-00000012-00000062", "One.", "en", None, 0.5),
        row("v-00001-00000100-00000175", "Two.", "en", None, 0.75),
    ];
    assert_eq!(rows_of(&output), expected);
    assert_eq!(recordings_of(&output), [wav("a.flac"), wav("b.flac")]);
    assert!(failure(of(granary, "", &[])).contains("its splits are asr_only, ast"));

    // SPRING-INX: on the hub, and as Kaldi's folders.
    parquet_of(
        &at("SPRING_INX_hub/data/train-00000-of-00001.parquet"),
        &["a.flac"],
        &[("utterance_id", &["u1"]), ("text", &["ek"])],
    );
    let output = run(of("SPRING_INX_hub", "", &["utterance_id=segment_id"]));
    assert_eq!(rows_of(&output), [row("u1", "ek", "en", None, 0.5)]);
    lay_out(
        folder.path(),
        &[
            ("SPRING_INX_Hindi/train/wav.scp", "rec1 Audio/b.flac\n"),
            (
                "SPRING_INX_Hindi/train/segments",
                "utt1 rec1 0.25 0.5\nutt2 rec1 0.5 0.75\n",
            ),
            ("SPRING_INX_Hindi/train/text", "utt1 ek do\nutt2 teen\n"),
            ("SPRING_INX_Hindi/train/utt2spk", "utt1 s1\nutt2 s1\n"),
        ],
    );
    fs::create_dir_all(at("SPRING_INX_Hindi/Audio")).unwrap();
    fs::copy(data("wav/b.flac"), at("SPRING_INX_Hindi/Audio/b.flac")).unwrap();
    let expected = [
        row("utt1", "ek do", "en", Some(0.25), 0.25),
        row("utt2", "teen", "en", Some(0.5), 0.25),
    ];
    assert_eq!(rows_of(&run(of("SPRING_INX_Hindi/train", "", &[]))), expected);

    // ESB: a folder for each corpus, whose splits have dots in their names.
    for (split, recording) in [
        ("test.clean", "a.flac"),
        ("test.other", "b.flac"),
        ("validation.clean", "c.flac"),
    ] {
        let columns: &[(&str, &[&str])] = &[("dataset", &["librispeech"]), ("text", &[split]), ("id", &["1-2-3"])];
        parquet_of(
            &at(&format!("esb/librispeech/{split}-00000-of-00001.parquet")),
            &[recording],
            columns,
        );
    }
    let texts = |split: &str| column(&run(of("esb/librispeech", split, &[])), "text");
    assert_eq!(texts("test.other"), ["test.other"]);
    assert_eq!(texts("test"), ["test.clean", "test.other"]);
    assert_eq!(texts("dev"), ["validation.clean"]);

    // YODAS3: tars of whole videos, whose texts are in an index beside them. Lines that name their members are read.
    let mut tar = std::process::Command::new("tar");
    fs::create_dir_all(at("yodas3/en/audio")).unwrap();
    tar.arg("-C")
        .arg(data("wav"))
        .arg("-cf")
        .arg(at("yodas3/en/audio/0000.tar"))
        .arg("b.flac");
    assert!(tar.status().unwrap().success());
    let said = failure(of("yodas3/en", "", &[]));
    assert!(
        said.contains("but tars") && said.contains("where a manifest names their members: `tars`"),
        "{said}"
    );
    lay_out(
        folder.path(),
        &[(
            "0000.jsonl",
            "{\"audio_filepath\": \"b.flac\", \"offset\": 0.25, \"duration\": 0.5, \"text\": \"one\"}\n",
        )],
    );
    let named = ReadSettings {
        tars: at("yodas3/en/audio/0000.tar").to_str().unwrap().into(),
        ..of("0000.jsonl", "", &[])
    };
    let output = run(named);
    assert_eq!(
        (column(&output, "text"), numbers(&output, "start")),
        (vec!["one".into()], vec![Some(0.25)])
    );
}

#[test]
fn compressed_arrow_files_are_read() {
    for name in ["lz4", "zstd"] {
        let path = data("compressed").join(format!("{name}.arrow"));
        let output = run(settings(&path));
        let expected = [
            row(&format!("{name}/0"), "ek", "hi", None, 0.5),
            row(&format!("{name}/1"), "do", "hi", None, 0.75),
        ];
        assert_eq!(rows_of(&output), expected);
        assert_eq!(recordings_of(&output), [wav("a.flac"), wav("b.flac")]);
        assert_eq!(by_reason(&output), counts(&[("missing_audio", 1), ("missing_text", 1)]));
        // A row that is not there, and damage anywhere: an error or rows, and no panic.
        let place = column(&output, "audio_path")[0].clone();
        let beyond = place.replace("&row=0", "&row=9");
        assert_ne!(place, beyond);
        assert!(flow_audio::decode::read_file(&Storage::default(), Path::new(&beyond)).is_err());
        let (folder, whole) = (tempfile::tempdir().unwrap(), fs::read(&path).unwrap());
        let copy = folder.path().join("x.arrow");
        let named = PathBuf::from(place.replace(path.to_str().unwrap(), copy.to_str().unwrap()));
        for at in (0..whole.len()).step_by(13) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0xff;
            fs::write(&copy, &bytes).unwrap();
            let _ = Harness::<Read>::new(settings(&copy)).run();
            let _ = flow_audio::decode::read_file(&Storage::default(), &named);
        }
    }
}

#[test]
fn tables_in_folders_below_have_the_recordings_beside_and_below_them() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["en/a.flac", "hi/x/b.flac", "hi/x/c.flac"] {
        fs::create_dir_all(folder.path().join(name).parent().unwrap()).unwrap();
        fs::write(folder.path().join(name), recording()).unwrap();
    }
    lay_out(
        folder.path(),
        &[
            ("en/metadata.csv", "file_name,text\na.flac,one\n"),
            (
                "hi/metadata.tsv",
                "file_name\ttext\nx/b.flac\ttwo\nx/gone.flac\tthree\n",
            ),
            ("hi/x/notes.csv", "no table\n"),
            (".cache/metadata.csv", "file_name,text\nhidden.flac,no\n"),
        ],
    );
    std::os::unix::fs::symlink(folder.path(), folder.path().join("hi/again")).unwrap();
    let read = || run(with_lang(folder.path(), "en"));
    assert_eq!(column(&read(), "text"), ["one", "two"]);
    assert_eq!(reasons(&read()), ["missing_audio"]);
    let settings = |split: &str, layout: Layout| ReadSettings {
        split: split.into(),
        layout,
        ..with_lang(folder.path(), "en")
    };
    assert_eq!(column(&run(settings("", Layout::AudioFolder)), "text"), ["one", "two"]);
    let message = failure(settings("test", Layout::Auto));
    assert!(message.contains("`split` belongs to layouts with splits"), "{message}");

    // Of folders that are called by splits, the one that is asked for.
    fs::create_dir(folder.path().join("train")).unwrap();
    fs::create_dir(folder.path().join("test")).unwrap();
    fs::rename(folder.path().join("en"), folder.path().join("train/en")).unwrap();
    fs::rename(folder.path().join("hi"), folder.path().join("test/hi")).unwrap();
    assert_eq!(column(&read(), "text"), ["one"]);
    assert_eq!(column(&run(settings("test", Layout::Auto)), "text"), ["two"]);
    assert_eq!(column(&run(settings("all", Layout::Auto)), "text"), ["two", "one"]);

    // `datasets` refuses tables of several formats, too.
    lay_out(
        folder.path(),
        &[(
            "train/hi/metadata.jsonl",
            "{\"file_name\": \"a.flac\", \"text\": \"x\"}\n",
        )],
    );
    let message = failure(settings("", Layout::Auto));
    assert!(
        message.contains("several formats (csv, jsonl)") && message.contains("train/hi/metadata.jsonl"),
        "{message}"
    );
}

/// An archive of files as they are.
fn stored_zip(files: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let (mut archive, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in files {
        let mut sum = flate2::Crc::new();
        sum.update(bytes);
        let numbers = |of: &[u32]| of.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
        let (size, offset) = (bytes.len() as u32, archive.len() as u32);
        // Version, flags, method, time, date, sum, sizes, and the length of the name.
        let common = [
            vec![20, 0, 0, 0, 0, 0, 0, 0, 0x21, 0x5a],
            numbers(&[sum.sum(), size, size, name.len() as u32]),
        ]
        .concat();
        archive.extend([b"PK\x03\x04", &common[..], name.as_bytes(), bytes].concat());
        directory.extend(
            [
                b"PK\x01\x02\x14\0",
                &common[..],
                &[0; 10],
                &numbers(&[offset]),
                name.as_bytes(),
            ]
            .concat(),
        );
    }
    let (count, size, offset) = (files.len() as u16, directory.len() as u32, archive.len() as u32);
    let count = count.to_le_bytes();
    let end = [
        &b"PK\x05\x06\0\0\0\0"[..],
        &count,
        &count,
        &size.to_le_bytes(),
        &offset.to_le_bytes(),
        &[0; 2],
    ]
    .concat();
    [archive, directory, end].concat()
}

#[test]
fn audio_folders_in_archives_are_read_in_place() {
    let expected = |folder: &str| {
        [
            row("clips/a", "ek, do", "hi", None, 0.5),
            row("clips/b", "teen", "hi", None, 0.75),
        ]
        .map(|row| (row, folder.to_owned()))
    };
    for name in ["train", "large"] {
        let output = run(with_lang(&data("zip").join(format!("{name}.zip")), "hi"));
        let rows = rows_of(&output).into_iter().zip(column(&output, "shard_id"));
        assert_eq!(rows.collect::<Vec<_>>(), expected("clips"), "{name}");
        assert_eq!(recordings_of(&output), [wav("a.flac"), wav("b.flac")]);
        assert_eq!(by_reason(&output), counts(&[("missing_audio", 1), ("unsafe_name", 1)]));
        assert!(extra_of(&output)[0].as_ref().unwrap().contains("s1"));
    }
    // The command that the error prints gives the folder that is read.
    let folder = copied(&["zip/train.zip", "zip/test.zip", "zip/packed.zip"]);
    let said = failure(settings(&folder.path().join("zip/packed.zip")));
    assert!(
        said.contains("packed.zip: 2 of 2 recordings in it are compressed"),
        "{said}"
    );
    let command = said.split('`').nth(1).unwrap().to_owned();
    assert!(
        command.starts_with("unzip ") && command.ends_with("/packed"),
        "{command}"
    );
    fs::remove_file(folder.path().join("zip/packed.zip")).unwrap();
    let read = |split: &str| {
        let read = ReadSettings {
            split: split.into(),
            ..with_lang(&folder.path().join("zip"), "hi")
        };
        column(&run(read), "text")
    };
    assert_eq!(read(""), ["ek, do", "teen"]);
    assert_eq!(read("test"), ["teen"]);
    assert_eq!(read("all"), ["teen", "ek, do", "teen"]);
    // Several tables: all, or those of a split.
    let several = |tables: &[(&str, &str)]| {
        let mut files = vec![
            ("train/clips/a.flac", wav("a.flac")),
            ("test/clips/b.flac", wav("b.flac")),
        ];
        files.extend(tables.iter().map(|(name, text)| (*name, text.as_bytes().to_vec())));
        let path = folder.path().join("several.zip");
        fs::write(&path, stored_zip(&files)).unwrap();
        path
    };
    let csv = |file: &str, text: &str| format!("file_name,text\nclips/{file}.flac,{text}\n../../x.flac,out\n");
    let (train, test) = (csv("a", "one"), csv("b", "two"));
    let path = several(&[("train/metadata.csv", &train), ("test/metadata.csv", &test)]);
    let read = |split: &str| ReadSettings {
        split: split.into(),
        ..with_lang(&path, "hi")
    };
    for (split, texts, recordings) in [
        ("", &["one"][..], &["a.flac"][..]),
        ("dev", &[], &[]),
        ("test", &["two"], &["b.flac"]),
        ("all", &["two", "one"], &["b.flac", "a.flac"]),
    ] {
        if texts.is_empty() {
            assert!(failure(read(split)).contains("its splits are test, train"));
            continue;
        }
        let output = run(read(split));
        assert_eq!(column(&output, "text"), texts, "{split}");
        let recordings: Vec<Vec<u8>> = recordings.iter().map(|name| wav(name)).collect();
        assert_eq!(recordings_of(&output), recordings, "{split}");
        assert_eq!(by_reason(&output), counts(&[("unsafe_name", texts.len())]));
    }
    let lines = "{\"file_name\": \"clips/b.flac\", \"text\": \"two\"}\n";
    for (tables, said) in [
        (
            &[("en/metadata.csv", train.as_str()), ("hi/metadata.jsonl", lines)][..],
            "of several formats (en/metadata.csv, hi/metadata.jsonl)",
        ),
        (
            &[("metadata.csv", &train), ("hi/metadata.csv", &test)],
            "one above another (metadata.csv, hi/metadata.csv)",
        ),
        (
            &[("../metadata.csv", &train), ("hi/metadata.csv", &test)],
            "../metadata.csv is not read in an archive",
        ),
    ] {
        let message = failure(with_lang(&several(tables), "hi"));
        assert!(message.contains(said) && message.contains("run `unzip "), "{message}");
    }
    // Damage anywhere: an error or rows, and no panic.
    let (whole, path) = (fs::read(data("zip/large.zip")).unwrap(), folder.path().join("x.zip"));
    for length in [0, 3, 21, 22, 100, whole.len() / 2, whole.len() - 23, whole.len() - 1] {
        fs::write(&path, &whole[..length]).unwrap();
        assert!(failure(settings(&path)).contains("x.zip"), "{length}");
    }
    for at in (0..200).chain(whole.len() - 500..whole.len()) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0xff;
        fs::write(&path, &bytes).unwrap();
        let _ = Harness::<Read>::new(settings(&path)).run();
    }
}
