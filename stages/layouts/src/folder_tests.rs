//! Folders as other systems leave them.

use super::forms::{details, extra_of, lay_out, with_lang};
use super::*;
use arrow::array::{ArrayRef, StructArray};
use flow_storage::Storage;

#[test]
fn transcripts_and_recordings_may_have_names_in_capitals() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("A.WAV.wav", ""),
            ("A.WAV.TXT", "one"),
            ("b.wav", ""),
            ("b.Lab", "two"),
            ("c.wav", ""),
            ("c.txt", "small letters count"),
            ("c.TXT", "capitals"),
        ],
    );
    fs::write(folder.path().join("D.FLAC"), recording()).unwrap();
    fs::write(folder.path().join("D.TXT"), "four").unwrap();
    let output = run(with_lang(folder.path(), "en"));
    assert_eq!(column(&output, "text"), ["one", "four", "two", "small letters count"]);
    assert_eq!(reasons(&output), Vec::<&str>::new());
}

#[test]
fn what_programs_put_beside_recordings_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("a.wav", ""),
            ("a.txt", "one"),
            ("._a.wav", ""),
            ("._a.txt", "not one"),
            ("__MACOSX/._a.wav", ""),
            ("__MACOSX/b.wav", ""),
            (".ipynb_checkpoints/a-checkpoint.wav", ""),
            (".ipynb_checkpoints/a-checkpoint.txt", "one"),
            ("lost+found/c.wav", ""),
        ],
    );
    let output = run(with_lang(folder.path(), "en"));
    assert_eq!(column(&output, "segment_id"), ["a"]);
    assert_eq!(reasons(&output), Vec::<&str>::new());
}

#[test]
fn recordings_have_the_extensions_of_containers_too() {
    let folder = tempfile::tempdir().unwrap();
    let extensions = ["webm", "wave", "mka", "aiff", "caf", "mov"];
    for extension in extensions {
        fs::write(folder.path().join(format!("{extension}.{extension}")), recording()).unwrap();
        fs::write(folder.path().join(format!("{extension}.txt")), extension).unwrap();
    }
    let mut expected = extensions.to_vec();
    expected.sort_unstable();
    assert_eq!(column(&run(with_lang(folder.path(), "en")), "text"), expected);
}

#[test]
fn why_a_transcript_has_no_recording_is_said() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("gone.txt", "one"),
            ("film.txt", "two"),
            ("film.avi", ""),
            // One letter, and two.
            ("caf\u{e9}.txt", "three"),
        ],
    );
    fs::write(folder.path().join("cafe\u{301}.wav"), recording()).unwrap();
    let output = run(with_lang(folder.path(), "en"));
    let said = details(&output).join("\n");
    for expected in [
        "no recording called `gone` is beside `gone.txt`",
        "`film.avi` is not of a format that is read",
        "`cafe\u{301}` is written in another form of Unicode",
    ] {
        assert!(said.contains(expected), "{said}");
    }
    // The same where a manifest names it.
    let manifest = folder.path().join("m.csv");
    fs::write(&manifest, "file_name,text\ncaf\u{e9}.wav,three\n").unwrap();
    let said = details(&run(with_lang(&manifest, "en"))).join("\n");
    assert!(
        said.contains("cafe\u{301}.wav is there, whose name is written in another form of Unicode"),
        "{said}"
    );
}

#[test]
fn a_table_nearby_is_named_where_texts_are_missing() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[("metadata.csv", "file_name,text\na.wav,one\n"), ("wavs/b.txt", "two")],
    );
    for name in ["a.wav", "b.wav"] {
        fs::write(folder.path().join("wavs").join(name), recording()).unwrap();
    }
    let output = run(with_lang(&folder.path().join("wavs"), "en"));
    assert_eq!(reasons(&output), ["missing_text"]);
    let said = details(&output).join("\n");
    assert!(
        said.contains("metadata.csv is a table: name it in place of the folder"),
        "{said}"
    );
    // In the folder itself, under a name of its own.
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[("my rows.csv", "path;text\nclips/a.wav;one\n"), ("clips/b.txt", "two")],
    );
    for name in ["a.wav", "b.wav"] {
        fs::write(folder.path().join("clips").join(name), recording()).unwrap();
    }
    let output = run(with_lang(folder.path(), "en"));
    let said = details(&output).join("\n");
    assert!(
        said.contains("my rows.csv is a table: name it in place of the folder"),
        "{said}"
    );
    fs::write(folder.path().join("others.csv"), "path,text\n").unwrap();
    let said = details(&run(with_lang(folder.path(), "en"))).join("\n");
    assert!(said.contains("a.txt") && !said.contains("is a table"), "{said}");
}

#[test]
fn transcripts_of_other_programs_are_no_texts() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("a.wav", ""),
            (
                "a.txt",
                "0.000000\t1.500000\tone\n\\\t100.0\t200.0\n1.500000\t2.250000\ttwo\n",
            ),
            ("b.wav", ""),
            ("b.srt", "1\n00:00:00,000 --> 00:00:01,000\none\n"),
            ("c.wav", ""),
            // Numbers that are spoken.
            ("c.txt", "1.5 2.5\n3\t4\n"),
            ("data/DR1/SA1.wav", ""),
            ("data/DR1/SA1.TXT", "0 46797 She had your dark suit\n"),
            // Deeper than the folder of a split.
            ("data/train/d.wav", ""),
            (
                "data/train/metadata.jsonl",
                "{\"file_name\": \"d.wav\", \"text\": \"one\"}\n",
            ),
        ],
    );
    let output = run(with_lang(folder.path(), "en"));
    assert_eq!(column(&output, "text"), ["1.5 2.5 3 4"]);
    assert_eq!(
        reasons(&output),
        ["unread_time", "missing_text", "unread_time", "missing_text"]
    );
    let said = details(&output).join("\n");
    for expected in [
        "a.txt has labels with times",
        "b.srt is not read",
        "SA1.TXT has labels with times",
        "data/train/metadata.jsonl is a table",
    ] {
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn of_folders_of_splits_train_is_read_and_said() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("train/metadata.csv", "file_name,transcription\nx/a.wav,one\n"),
            ("test/metadata.csv", "file_name,transcription\nb.wav,two\n"),
            ("train/x/none.md", ""),
        ],
    );
    fs::write(folder.path().join("train/x/a.wav"), recording()).unwrap();
    fs::write(folder.path().join("test/b.wav"), recording()).unwrap();
    let settings = with_lang(folder.path(), "en");
    assert_eq!(column(&run(settings.clone()), "text"), ["one"]);
    let decision = opened(&settings).decision().unwrap();
    assert!(
        decision.contains("of the folders of splits `train` is read"),
        "{decision}"
    );
}

#[test]
fn a_folder_of_tars_names_the_kind_that_reads_them() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(folder.path(), &[("train/000000.tar", "")]);
    let said = failure(with_lang(folder.path(), "en"));
    assert!(said.contains("audio.webdataset"), "{said}");
    fs::write(folder.path().join("x.tar.gz"), [0x1f, 0x8b]).unwrap();
    assert!(failure(with_lang(folder.path(), "en")).contains("gunzip"));
}

#[test]
fn what_other_programs_write_is_read_or_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("a.wav"), recording()).unwrap();
    lay_out(
        folder.path(),
        &[
            ("semicolons.csv", "path;text;lang\na.wav;\"one; two\";en\n"),
            ("tabs.csv", "path\ttext\na.wav\t\"he said \"\"hi\"\"\"\n"),
            ("bars.csv", "path|text\na.wav|one, two\n"),
            (
                "keys.jsonl",
                "{\"path\": \"a.wav\", \"sentence\": \"one\", \"locale\": \"de-DE\", \"speaker\": 7}\n",
            ),
            (
                "sentence.jsonl",
                "{\"audio_filepath\": \"a.wav\", \"sentence\": \"one\", \"up_votes\": 2}\n",
            ),
            (
                "array.json",
                "\u{feff}\n[{\"audio_filepath\": \"a.wav\", \"text\": \"one\"}]\n",
            ),
            ("macos9.csv", "path,text\ra.wav,one\r"),
        ],
    );
    let utf_16: Vec<u8> = "\u{feff}path\ttext\n"
        .encode_utf16()
        .flat_map(u16::to_le_bytes)
        .collect();
    fs::write(at("excel.tsv"), &utf_16).unwrap();
    fs::write(at("notepad.jsonl"), utf_16).unwrap();
    for name in ["packed.jsonl", "packed.csv"] {
        fs::write(at(name), [0x1f, 0x8b, 8, 0]).unwrap();
    }
    fs::write(
        at("indented.jsonl"),
        "{\n  \"audio_filepath\": \"a.wav\",\n  \"text\": \"one\"\n}\n",
    )
    .unwrap();
    // As R writes it: quotes in quoted fields are escaped by backslashes.
    fs::write(
        at("quoted.tsv"),
        "\"file_name\"\t\"text\"\n\"a.wav\"\t\"he said \\\"hi\\\"\"\n",
    )
    .unwrap();
    fs::write(at("blank.jsonl"), "\u{feff}\n \n").unwrap();
    fs::write(at("cuts.jsonl.gz"), [0x1f, 0x8b]).unwrap();
    let texts = |name: &str| column(&run(with_lang(&at(name), "en")), "text");
    assert_eq!(texts("semicolons.csv"), ["one; two"]);
    assert_eq!(texts("tabs.csv"), ["he said \"hi\""]);
    assert_eq!(texts("bars.csv"), ["one, two"]);
    assert_eq!(texts("sentence.jsonl"), ["one"]);
    let output = run(settings(&at("keys.jsonl")));
    assert_eq!(
        (column(&output, "text"), column(&output, "lang")),
        (vec!["one".into()], vec!["de".into()])
    );
    let extra = extra_of(&output).remove(0).unwrap();
    assert!(extra.contains("\"speaker\":7") && !extra.contains("a.wav"), "{extra}");
    for (name, said) in [
        ("excel.tsv", "it is UTF-16"),
        ("notepad.jsonl", "it is UTF-16"),
        ("packed.jsonl", "it is compressed"),
        ("packed.csv", "it is compressed"),
        ("blank.jsonl", "there are no rows in it"),
        ("array.json", "it is one JSON array"),
        ("indented.jsonl", "goes over several lines"),
        ("quoted.tsv", "`quoting: csv`"),
        ("macos9.csv", "carriage returns alone"),
        ("cuts.jsonl.gz", "it is compressed"),
    ] {
        let message = failure(with_lang(&at(name), "en"));
        assert!(message.contains(said), "{message}");
    }
}

#[test]
fn files_whose_names_lie_about_compression_are_named_with_a_command() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let packed = |name: &str| {
        fs::create_dir_all(at(name).parent().unwrap()).unwrap();
        let mut writer =
            flate2::write::GzEncoder::new(fs::File::create(at(name)).unwrap(), flate2::Compression::fast());
        std::io::Write::write_all(&mut writer, b"path,text\n").unwrap();
        writer.finish().unwrap();
    };
    for name in [
        "a.csv",
        "a.jsonl",
        "a.parquet",
        "a.tar",
        "tars/a.tar",
        "af/metadata.csv",
        "hub/train-00000-of-00001.parquet",
    ] {
        packed(name);
    }
    for name in ["b.csv.gz", "b.jsonl.gz", "plain/b.tar.gz"] {
        fs::create_dir_all(at(name).parent().unwrap()).unwrap();
        fs::write(at(name), "path,text\n").unwrap();
    }
    for (input, file) in [
        ("a.csv", "a.csv"),
        ("a.jsonl", "a.jsonl"),
        ("a.parquet", "a.parquet"),
        ("a.tar", "a.tar"),
        ("tars", "tars/a.tar"),
        ("af", "af/metadata.csv"),
        ("hub/train-00000-of-00001.parquet", "hub/train-00000-of-00001.parquet"),
    ] {
        let message = failure(with_lang(&at(input), "en"));
        let path = at(file).display().to_string();
        let said = format!(
            "{path}: it is compressed by gzip, which its name does not say; run `mv -n {path} {path}.gz && gunzip {path}.gz`"
        );
        assert!(message.contains(&said), "{message}");
    }
    for (input, file) in [
        ("b.csv.gz", "b.csv.gz"),
        ("b.jsonl.gz", "b.jsonl.gz"),
        ("plain", "plain/b.tar.gz"),
    ] {
        let message = failure(with_lang(&at(input), "en"));
        let path = at(file).display().to_string();
        let plain = path.strip_suffix(".gz").unwrap();
        let said = format!("{path}: its name ends in .gz, and it is not compressed; run `mv -n {path} {plain}`");
        assert!(message.contains(&said), "{message}");
    }
    // Of a tar that is chosen by `layout`, the reject says it.
    let read = ReadSettings {
        layout: flow_corpus::Layout::WebDataset,
        ..with_lang(&at("tars"), "en")
    };
    let output = run(read);
    assert_eq!(reasons(&output), ["tar_truncated"]);
    assert!(details(&output)[0].contains("&& gunzip "), "{:?}", details(&output));
}

#[test]
fn columns_of_parquet_are_called_as_those_of_tables() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("clips")).unwrap();
    fs::write(at("clips/a.wav"), recording()).unwrap();
    let write = |name: &str, columns: Vec<(&str, ArrayRef)>| {
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let mut writer = ArrowWriter::try_new(fs::File::create(at(name)).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
    };
    let text = |value: &str| -> ArrayRef { Arc::new(StringArray::from(vec![value])) };
    write(
        "pandas.parquet",
        vec![
            ("path", text("clips/a.wav")),
            ("sentence", text("one")),
            ("locale", text("de-DE")),
        ],
    );
    let output = run(settings(&at("pandas.parquet")));
    assert_eq!(
        (column(&output, "text"), column(&output, "lang")),
        (vec!["one".into()], vec!["de".into()])
    );
    assert_eq!(column(&output, "segment_id"), ["clips/a"]);
    let measured = output
        .all_rows("rows")
        .column_by_name("duration")
        .unwrap()
        .as_primitive::<Float64Type>()
        .value(0);
    assert!(measured > 0.5);
    // The measured length changes with the recording, so the partition does, too.
    let key = |settings: &ReadSettings| {
        opened(settings).partitions(&Storage::default()).unwrap()[0]
            .extra
            .clone()
    };
    let unlooked = ReadSettings {
        check_audio: false,
        ..settings(&at("pandas.parquet"))
    };
    let before = key(&unlooked);
    fs::write(at("clips/a.wav"), [recording(), vec![0]].concat()).unwrap();
    assert_ne!(key(&unlooked), before);
    // Hugging Face's metadata, and recordings within a column.
    write(
        "metadata.parquet",
        vec![("file_name", text("clips/a.wav")), ("text", text("two"))],
    );
    assert_eq!(column(&run(with_lang(folder.path(), "en")), "text"), ["two"]);
    let bytes: ArrayRef = Arc::new(StructArray::from(vec![(
        Arc::new(Field::new("path", DataType::Utf8, true)),
        text("a.wav"),
    )]));
    write(
        "hub.parquet",
        vec![("audio", bytes), ("text", text("three")), ("id", text("a"))],
    );
    let said = failure(with_lang(&at("hub.parquet"), "en"));
    assert!(said.contains("without the bytes of the recordings"), "{said}");
}

#[test]
fn one_table_above_folders_of_splits_gives_the_chosen_rows() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("train/a.wav", ""),
            ("test/b.wav", ""),
            (
                "metadata.csv",
                "file_name,text,split\ntrain/a.wav,one,x\ntest/b.wav,two,x\ntrain/none.wav,gone,x\n",
            ),
        ],
    );
    let of = |split: &str| ReadSettings {
        split: split.into(),
        ..with_lang(folder.path(), "en")
    };
    let texts = |split: &str| column(&run(of(split)), "text");
    let output = run(of(""));
    assert_eq!(
        (column(&output, "text"), reasons(&output)),
        (vec!["one".to_string()], vec!["other_split", "missing_audio"])
    );
    assert_eq!(texts("test"), ["two"]);
    assert_eq!(texts("all"), ["one", "two"]);
    assert!(failure(of("dev")).contains("its splits are test, train"));
    let told = opened(&of("")).decision().unwrap();
    assert_eq!(
        told,
        "AudioFolder with metadata.csv; splits test, train; reading `train`"
    );
    // Lines, of which another table is not read.
    let lines =
        "{\"file_name\": \"train/a.wav\", \"text\": \"one\"}\n{\"file_name\": \"test/b.wav\", \"text\": \"two\"}\n";
    fs::write(folder.path().join("metadata.jsonl"), lines).unwrap();
    let told = opened(&of("")).decision().unwrap();
    assert!(told.contains("metadata.csv; metadata.jsonl is not read"), "{told}");
    fs::remove_file(folder.path().join("metadata.csv")).unwrap();
    assert_eq!(
        (texts(""), texts("test")),
        (vec!["one".to_string()], vec!["two".to_string()])
    );
    // Where recordings are elsewhere, too, folders are no splits.
    let elsewhere = lines.replace("train/a.wav", "a.wav");
    fs::write(folder.path().join("metadata.jsonl"), elsewhere).unwrap();
    fs::write(folder.path().join("a.wav"), recording()).unwrap();
    assert_eq!(texts(""), ["one", "two"]);
    assert_eq!(texts("all"), ["one", "two"]);
    assert!(failure(of("test")).contains("a column `split`"));
    fs::remove_file(folder.path().join("metadata.jsonl")).unwrap();
    fs::remove_file(folder.path().join("a.wav")).unwrap();
    // A table for each split.
    for (split, file) in [("train", "a"), ("test", "b")] {
        let table = format!("file_name,text\n{file}.wav,of {split}\n");
        fs::write(folder.path().join(split).join("metadata.csv"), table).unwrap();
    }
    assert_eq!(texts("all"), ["of test", "of train"]);
    assert_eq!(texts(""), ["of train"]);
    let told = opened(&of("")).decision().unwrap();
    assert!(told.contains("AudioFolder with train/metadata.csv"), "{told}");
    fs::remove_dir_all(folder.path().join("train")).unwrap();
    assert_eq!(texts(""), ["of test"]);
    let told = opened(&of("")).decision().unwrap();
    assert!(told.contains("only split is `test`"), "{told}");
}

#[test]
fn a_column_split_is_obeyed_where_a_split_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let table = "path,text,split\na.wav,one,train\na.wav,two,dev\na.wav,three,\"train\"\n";
    lay_out(
        folder.path(),
        &[
            ("a.wav", ""),
            ("list.csv", table),
            ("none.csv", "path,text\na.wav,one\n"),
            (
                "list.jsonl",
                "{\"audio_filepath\": \"a.wav\", \"text\": \"one\", \"split\": \"test\"}\n",
            ),
        ],
    );
    let of = |name: &str, split: &str| ReadSettings {
        split: split.into(),
        ..with_lang(&folder.path().join(name), "en")
    };
    let output = run(of("list.csv", "train"));
    assert_eq!(
        (column(&output, "text"), reasons(&output)),
        (vec!["one".to_string(), "three".into()], vec!["other_split"])
    );
    assert_eq!(column(&run(of("list.csv", "validation")), "text"), ["two"]);
    assert_eq!(column(&run(of("list.csv", "all")), "text").len(), 3);
    assert_eq!(column(&run(of("list.jsonl", "test")), "text"), ["one"]);
    assert!(failure(of("list.jsonl", "train")).contains("its splits are test"));
    assert!(failure(of("none.csv", "train")).contains("without a column `split`"));
    // Unasked, all rows are read, and the log says so.
    assert_eq!(column(&run(of("list.csv", "")), "text").len(), 3);
    let told = |name: &str| opened(&of(name, "")).decision().unwrap();
    assert!(
        told("list.csv").contains("rows of all splits are read"),
        "{}",
        told("list.csv")
    );
    assert_eq!(told("none.csv"), "a text table");
}
