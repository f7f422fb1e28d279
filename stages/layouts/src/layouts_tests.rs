//! Each layout with a small corpus that its own tool wrote, or that is written as the tool does, and with what is wrong in it.
//! `tests/data/layouts/make.py` makes the files.

use std::collections::BTreeMap;
use std::io::Write;

use flow_audio::decode::decode;
use flow_corpus::Layout;
use flow_corpus::files::Format;
use flow_storage::Storage;

use super::forms::{details, extra_of, lay_out, numbers, with_lang};

use super::*;

#[path = "layouts_hugging_face_tests.rs"]
mod hugging_face;
#[path = "layouts_lhotse_tests.rs"]
mod lhotse;
#[path = "layouts_public_corpora_tests.rs"]
mod public_corpora;

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

/// The bytes of each row's recording.
fn recordings_of(output: &Output) -> Vec<Vec<u8>> {
    let read = bucket::recordings(&Storage::default(), output).into_iter();
    read.map(Option::unwrap).collect()
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
    let names = [
        ("a.wav", recording()),
        ("a.transcript", b"one".to_vec()),
        ("b.wav", recording()),
        ("b.TEXT", b"two".to_vec()),
    ];
    let members = [
        &names[..],
        &[("c.wav", recording()), ("c.jsn", b"{\"text\": \"three\"}".to_vec())],
    ]
    .concat();
    let members: Vec<(&str, &Vec<u8>)> = members.iter().map(|(name, bytes)| (*name, bytes)).collect();
    fs::write(dots.path().join("x.tar"), super::tar_of(&members)).unwrap();
    assert_eq!(
        column(&run(with_lang(dots.path(), "hi")), "text"),
        ["one", "two", "three"]
    );
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
        let (mut out, mut recordings) = (Out::new(partition.clone()), Recordings::new(&Storage::default(), true));
        let read = manifest.read(
            &Storage::default(),
            &partition,
            &mut Rows::new(&mut out, &mut recordings),
        );
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
fn channels_of_kaldi_are_refused() {
    let folder = copied(&["wav/a.flac", "wav/b.flac"]);
    // Half a second of two channels, and 24 bytes that are the same in each format of a header.
    let mut stereo = b"RIFF\x24\x7d\0\0WAVEfmt \x10\0\0\0\x01\0\x02\0".to_vec();
    for number in [16_000u32, 64_000, 4 | 16 << 16] {
        stereo.extend(number.to_le_bytes());
    }
    stereo.extend(b"data\0\x7d\0\0");
    stereo.resize(44 + 32_000, 1);
    fs::write(folder.path().join("wav/s.wav"), stereo).unwrap();
    lay_out(
        folder.path(),
        &[
            (
                "wav.scp",
                "c-A wav/a.flac\nc-B wav/a.flac\nd-A wav/b.flac\ns wav/s.wav\n",
            ),
            ("reco2file_and_channel", "c-A c A\nc-B c B\nd-A d A\ns s A\n"),
            ("text", "c-A one\nc-B two\nd-A three\ns four\n"),
        ],
    );
    let check = || {
        let output = run(with_lang(folder.path(), "en"));
        assert_eq!(column(&output, "text"), ["three"]);
        assert_eq!(by_reason(&output), counts(&[("several_channels", 3)]));
        details(&output).join("\n")
    };
    let said = check();
    assert!(
        said.contains("names channel B of a file") && said.contains("has 2 channels"),
        "{said}"
    );
    // With segments, too.
    let segments = ["c-A", "c-B", "d-A", "s"]
        .map(|id| format!("{id} {id} 0 0.5\n"))
        .concat();
    fs::write(folder.path().join("segments"), segments).unwrap();
    check();
    // What is not told of channels is one recording under two names.
    fs::remove_file(folder.path().join("reco2file_and_channel")).unwrap();
    let output = run(with_lang(folder.path(), "en"));
    assert_eq!(column(&output, "text"), ["one", "two", "three"]);
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
