//! The stages `tokenizer.train` and `tokenizer.write`, and training with what they make.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, AsArray, Float32Builder, Float64Array, Int32Array, ListBuilder, RecordBatch, StringArray, UInt32Array,
};
use arrow::datatypes::{DataType, Field, Int32Type, Schema, SchemaRef, UInt32Type};
use flow_kind::event::Event;
use flow_kind::{Artifact, Partition, RejectClass, StageError};
use flow_model::tokenizer::Tokenizer;
use flow_runtime::harness::{Harness, Output};
use flow_sampling::load::loaded_schema;
use flow_storage::Storage;
use flow_training::language_tags::{LanguageTags, LanguageTagsSettings, TagTexts};
use flow_training::limit_texts::{LimitTexts, LimitTextsSettings};
use flow_training::loaded_rows::{RowRules, micro_batches};
use flow_training::long_texts::{LongTexts, OverLimit, TextLimit};
use flow_training::read_tokenizer::{ReadTokenizer, ReadTokenizerSettings};
use flow_training::train_tokenizer::{
    NormalisationSetting, TokenizerType, TrainTokenizer, TrainTokenizerSettings, tokenizer_schema,
};
use flow_training::write_tokenizer::{WriteTokenizer, WriteTokenizerSettings};

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("_row", DataType::UInt32, false),
        Field::new("segment_id", DataType::Utf8, false),
        Field::new("text", DataType::Utf8, true),
        Field::new("lang", DataType::Utf8, true),
    ]))
}

fn batch(rows: &[(String, String)]) -> RecordBatch {
    RecordBatch::try_new(
        schema(),
        vec![
            Arc::new(UInt32Array::from_iter_values(0..rows.len() as u32)),
            Arc::new(StringArray::from_iter_values(rows.iter().map(|row| &row.0))),
            Arc::new(StringArray::from_iter(
                rows.iter().map(|row| (!row.1.is_empty()).then_some(&row.1)),
            )),
            Arc::new(StringArray::from_iter_values(
                rows.iter().map(|row| row.1.get(2..4).unwrap_or("").to_owned()),
            )),
        ],
    )
    .expect("rows")
}

/// Texts of two languages from a small generator of words.
fn rows() -> Vec<(String, String)> {
    let words = [
        "ring",
        "sing",
        "king",
        "string",
        "kettle",
        "nettle",
        "settle",
        "दस",
        "दूध",
        "किताब",
        "चाहिए",
        "मोहन",
    ];
    let mut state = 7u32;
    let mut next = |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) as usize % below
    };
    (0..400)
        .map(|number| {
            let hindi = next(2) == 1;
            let text: Vec<&str> = (0..1 + next(8))
                .map(|_| if hindi { words[7 + next(5)] } else { words[next(7)] })
                .collect();
            let tag = if hindi { "<|hi|>" } else { "<|en|>" };
            (format!("seg-{number}"), format!("{tag} {}", text.join(" ")))
        })
        .collect()
}

fn settings(r#type: TokenizerType) -> TrainTokenizerSettings {
    TrainTokenizerSettings {
        r#type,
        vocab_size: 50,
        special: vec!["<pad>".into()],
        reserve: vec!["<|fr|>".into(), "<|hi|>".into()],
        normalisation: NormalisationSetting::Identity,
        ..TrainTokenizerSettings::default()
    }
}

fn train(
    settings: TrainTokenizerSettings,
    parts: &[&[(String, String)]],
    threads: usize,
) -> Result<Output, StageError> {
    let mut harness = Harness::<TrainTokenizer>::new(settings)
        .input("rows", schema())
        .threads(threads);
    for (number, part) in parts.iter().enumerate() {
        harness = harness.feed("rows", &format!("p/{number}"), batch(part));
    }
    harness.run()
}

fn model(output: &Output) -> Vec<u8> {
    let rows = output.rows("tokenizer", "tokenizer");
    assert_eq!(rows.num_rows(), 1);
    rows.column_by_name("model")
        .expect("model")
        .as_binary::<i32>()
        .value(0)
        .to_vec()
}

/// Raise the kind's VERSION when these move.
#[test]
fn the_same_rows_give_these_bytes_in_any_order_and_with_any_threads() {
    let rows = rows();
    let mut others = rows.clone();
    others.reverse();
    for (r#type, digest) in [
        (
            TokenizerType::Bpe,
            "bf9727aaab63b06ea32441c35064d8d06c71e14f209cc492d4b4ba0db958d2f2",
        ),
        (
            TokenizerType::Unigram,
            "e23ed7249da343f54724318ff01d209294613947ede6525727b184841ce9a2f9",
        ),
    ] {
        let one = train(settings(r#type), &[&rows[..100], &rows[100..]], 1).expect("trained");
        let another = train(settings(r#type), &[&others[..390], &others[390..]], 4).expect("trained");
        assert!(model(&one) == model(&another), "{type:?}");
        assert_eq!(blake3::hash(&model(&one)).to_hex().as_str(), digest, "{type:?}");
        let table = one.rows("tokenizer", "tokenizer");
        assert_eq!(
            table
                .column_by_name("pieces")
                .expect("pieces")
                .as_primitive::<Int32Type>()
                .value(0),
            50
        );
    }
}

#[test]
fn tags_and_special_pieces_are_reserved_and_stay_whole() {
    let rows = rows();
    let tokenizer = Tokenizer::from_bytes(&model(
        &train(settings(TokenizerType::Bpe), &[&rows], 1).expect("trained"),
    ))
    .expect("a model");
    let first: Vec<&str> = (0..5).map(|id| tokenizer.piece(id).expect("a piece")).collect();
    assert_eq!(first, ["<unk>", "<pad>", "<|en|>", "<|hi|>", "<|fr|>"]);
    let ids = tokenizer.encode("<|fr|> ring <pad>");
    assert!(ids.contains(&4) && !ids.contains(&1), "{ids:?}");
    for (_, text) in &rows {
        assert_eq!(tokenizer.decode(&tokenizer.encode(text)).expect("decoded"), *text);
    }
}

#[test]
fn a_sample_is_chosen_by_hash_whatever_the_order() {
    let rows = rows();
    let mut others = rows.clone();
    others.rotate_left(123);
    let few = |max_sentences| TrainTokenizerSettings {
        max_sentences,
        vocab_size: 45,
        ..settings(TokenizerType::Bpe)
    };
    let model_of = |max, rows: &[(String, String)]| model(&train(few(max), &[rows], 1).expect("trained"));
    assert!(model_of(60, &rows) == model_of(60, &others));
    assert!(model_of(60, &rows) != model_of(400, &rows));
}

#[test]
fn what_cannot_be_learned_from_is_told() {
    let mut rows = rows();
    rows[0].1 = "<|en|> ".to_owned() + &"long ".repeat(2000);
    rows[1].1 = String::new();
    rows[2].1 = "\u{2585}".into();
    let output = train(settings(TokenizerType::Bpe), &[&rows], 1).expect("trained");
    let warnings: Vec<&String> = output
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Warning { message, .. } => Some(message),
            _ => None,
        })
        .collect();
    assert!(
        warnings.len() == 2
            && warnings[0].contains("1 texts of more than 4192 bytes")
            && warnings[1].contains("U+2585"),
        "{warnings:?}"
    );

    let error = |settings, rows: &[(String, String)]| train(settings, &[rows], 1).expect_err("refused").to_string();
    let with = |vocab_size| TrainTokenizerSettings {
        vocab_size,
        ..settings(TokenizerType::Unigram)
    };
    assert!(
        error(with(10), &rows).contains("too small"),
        "{}",
        error(with(10), &rows)
    );
    assert!(error(with(5000), &rows).contains("too large"));
    assert!(error(with(50), &[]).contains("no text"));
    let twice = TrainTokenizerSettings {
        special: vec!["<pad>".into(), "<pad>".into()],
        ..settings(TokenizerType::Bpe)
    };
    assert!(error(twice, &rows).contains("named twice"));
}

#[test]
fn the_files_are_written_as_a_set() {
    let folder = tempfile::tempdir().expect("folder");
    let trained = train(settings(TokenizerType::Unigram), &[&rows()], 1).expect("trained");
    let out = folder.path().join("out");
    Harness::<WriteTokenizer>::new(WriteTokenizerSettings {
        out: out.to_string_lossy().into_owned(),
        name: "hindi".into(),
    })
    .input("tokenizer", tokenizer_schema())
    .feed("tokenizer", "tokenizer", trained.rows("tokenizer", "tokenizer"))
    .run()
    .expect("written");
    assert_eq!(std::fs::read(out.join("hindi.model")).expect("model"), model(&trained));
    let vocabulary = std::fs::read_to_string(out.join("hindi.vocab")).expect("vocab");
    assert_eq!(vocabulary.lines().count(), 50);
    assert!(
        vocabulary.starts_with("<unk>\t0\n<pad>\t0\n<|en|>\t0\n"),
        "{vocabulary}"
    );
}

#[test]
fn long_transcripts_are_counted_by_language() {
    let mut rows = rows();
    let tokenizer = Tokenizer::from_bytes(&model(
        &train(settings(TokenizerType::Bpe), &[&rows], 1).expect("trained"),
    ))
    .expect("a model");
    let limit = 40;
    let long = |rows: &[(String, String)]| {
        let partition = Partition::from("p/0".to_owned());
        let artifact = Artifact::in_memory(schema(), vec![(partition, vec![batch(rows)])]).expect("rows");
        LongTexts::count(&artifact, &tokenizer, limit, OverLimit::Truncate).expect("counted")
    };
    assert_eq!(long(&rows).warning(), None);
    for number in [3, 7, 8, 9, 10] {
        rows[number].1 = format!("<|en|>{}", " kettle string".repeat(20 + number));
    }
    rows[5].1 = format!("<|hi|>{}", " किताब चाहिए".repeat(30));
    let found = long(&rows);
    let counted = |lang: &str| found.languages[lang].count;
    assert_eq!((found.total(), counted("en"), counted("hi")), (6, 5, 1));
    assert_eq!(found.languages["en"].examples, ["seg-3", "seg-7", "seg-8"]);
    assert_eq!(found.languages["en"].longest, tokenizer.encode(&rows[10].1).len());
    let warning = found.warning().expect("a warning");
    assert!(
        warning.contains("6 of 400 transcripts have more than 40 tokens") && warning.contains("seg-5"),
        "{warning}"
    );
}

/// A text that is cut while its audio is not teaches deletions, so its row does not go on.
#[test]
fn rows_with_too_many_tokens_are_rejects() {
    let mut rows = rows();
    let trained = train(settings(TokenizerType::Bpe), &[&rows], 1).expect("trained");
    let table = trained.rows("tokenizer", "tokenizer");
    let tokenizer = Tokenizer::from_bytes(&model(&trained)).expect("a model");
    rows[3].1 = format!("<|en|>{}", " kettle string".repeat(40));
    rows[9].1 = format!("<|hi|>{}", " किताब चाहिए".repeat(30));
    let tokens = |row: usize| tokenizer.encode(&rows[row].1).len();
    // The first of these is the limit itself, and stays.
    let max_tokens = tokens(3).min(tokens(9));
    let limited = |max_tokens: usize, long_texts: OverLimit| {
        Harness::<LimitTexts>::new(LimitTextsSettings { max_tokens, long_texts })
            .id_column("segment_id")
            .input("rows", schema())
            .input("tokenizer", tokenizer_schema())
            .feed("rows", "p/0", batch(&rows))
            .feed("tokenizer", "tokenizer", table.clone())
            .run()
            .expect("limited")
    };
    let all = limited(max_tokens.max(tokens(3)).max(tokens(9)), OverLimit::Reject);
    assert_eq!(all.rows("rows", "p/0"), batch(&rows));
    assert!(all.rejects().is_empty());

    let one = limited(max_tokens, OverLimit::Reject);
    let longer = if tokens(3) > tokens(9) { 3 } else { 9 };
    assert_eq!(one.reasons("p/0"), [(Some(longer as u32), "too_many_tokens")]);
    let both = limited(max_tokens - 1, OverLimit::Reject);
    assert_eq!(
        both.reasons("p/0"),
        [(Some(3), "too_many_tokens"), (Some(9), "too_many_tokens")]
    );
    let (_, reject) = &both.rejects()[0];
    assert_eq!((reject.id.as_deref(), reject.class), (Some("seg-3"), RejectClass::Rule));
    assert_eq!(
        reject.detail,
        format!("{} tokens; at most {} are taken", tokens(3), max_tokens - 1)
    );
    assert!(reject.values.contains("kettle string"));
    let kept = both.rows("rows", "p/0");
    let left: Vec<u32> = (0..rows.len() as u32).filter(|row| ![3, 9].contains(row)).collect();
    let numbers = kept.column_by_name("_row").expect("_row").as_primitive::<UInt32Type>();
    assert_eq!(numbers.values(), &left[..]);

    // As the old pipeline did it: all go on, and training cuts them.
    let cut = limited(max_tokens - 1, OverLimit::Truncate);
    assert_eq!(cut.rows("rows", "p/0"), batch(&rows));
    assert!(cut.rejects().is_empty());

    let wrong = Harness::<LimitTexts>::new(LimitTextsSettings::default())
        .input("rows", schema())
        .input("tokenizer", schema());
    assert!(
        wrong
            .shape()
            .expect_err("no tokenizer")
            .to_string()
            .contains("tokenizer.read")
    );
}

/// Texts of shards, which are tagged, and of manifests, which are not, become the same.
#[test]
fn texts_begin_with_the_tags_that_the_tokenizer_has() {
    let trained = train(settings(TokenizerType::Bpe), &[&rows()], 1).expect("trained");
    let table = trained.rows("tokenizer", "tokenizer");
    let tagged = |texts: &[(&str, &str)], tags: LanguageTags| {
        let rows = RecordBatch::try_new(
            schema(),
            vec![
                Arc::new(UInt32Array::from_iter_values(0..texts.len() as u32)),
                Arc::new(StringArray::from(vec!["seg"; texts.len()])),
                Arc::new(StringArray::from_iter_values(texts.iter().map(|(text, _)| text))),
                Arc::new(StringArray::from_iter_values(texts.iter().map(|(_, lang)| lang))),
            ],
        )
        .expect("rows");
        let output = Harness::<TagTexts>::new(LanguageTagsSettings { tags })
            .input("rows", schema())
            .input("tokenizer", tokenizer_schema())
            .feed("rows", "p/0", rows)
            .feed("tokenizer", "tokenizer", table.clone())
            .run()
            .expect("tagged");
        assert!(output.rejects().is_empty());
        // One row is of no known language, which is told where tags are put.
        let is_note = |event: &Event| matches!(event, Event::Note { message } if message.contains("language `und`"));
        let told = output.events.iter().any(is_note);
        assert_eq!(told, tags == LanguageTags::Auto);
        let rows = output.rows("rows", "p/0");
        let texts = rows.column_by_name("text").expect("text").as_string::<i32>().clone();
        texts
            .iter()
            .map(|text| text.expect("a text").to_owned())
            .collect::<Vec<_>>()
    };
    // The tokenizer has the tags of `en` and `hi`.
    let texts = [
        ("ring king", "en"),
        ("<|en|> ring king", "en"),
        ("दस", "hi"),
        ("<|de|> ring", "de"),
        ("ring", "de"),
        ("ring", "und"),
        ("<|noise|> ring", "de"),
        ("<|hi|> ring", "en"),
        // Regions, of which the tokenizer has no tags.
        ("ring", "en-GB"),
        ("<|en-US|> ring", "en-GB"),
        ("<|hi_IN|>दस", "hi"),
        ("<|de-AT|> ring", "de"),
        // Three letters in place of two.
        ("ring", "eng"),
        ("<|hin|> दस", "hi"),
    ];
    assert_eq!(
        tagged(&texts, LanguageTags::Auto),
        [
            "<|en|> ring king",
            "<|en|> ring king",
            "<|hi|> दस",
            "ring",
            "ring",
            "ring",
            "<|noise|> ring",
            "<|hi|> ring",
            "<|en|> ring",
            "<|en|> ring",
            "<|hi|> दस",
            "ring",
            "<|en|> ring",
            "<|hi|> दस"
        ]
    );
    assert_eq!(
        tagged(&texts, LanguageTags::Never),
        [
            "ring king",
            "ring king",
            "दस",
            "ring",
            "ring",
            "ring",
            "<|noise|> ring",
            "ring",
            "ring",
            "ring",
            "दस",
            "ring",
            "ring",
            "दस"
        ]
    );
    let as_is: Vec<&str> = texts.iter().map(|(text, _)| *text).collect();
    assert_eq!(tagged(&texts, LanguageTags::AsIs), as_is);
}

/// Training that is given such rows all the same leaves them out, or cuts them.
#[test]
fn micro_batches_leave_out_or_cut_what_is_too_long() {
    let trained = train(settings(TokenizerType::Bpe), &[&rows()], 1).expect("trained");
    let tokenizer = Tokenizer::from_bytes(&model(&trained)).expect("a model");
    let texts = ["<|en|> ring", "<|en|> king sing nettle kettle string ring sing"];
    let count = texts.len();
    let numbers = |values: Vec<i32>| Arc::new(Int32Array::from(values)) as ArrayRef;
    let mut signals = ListBuilder::new(Float32Builder::new());
    for _ in texts {
        signals.values().append_slice(&[0.1; 1600]);
        signals.append(true);
    }
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from_iter_values(0..count as u32)),
        numbers(vec![0; count]),
        numbers(vec![0; count]),
        numbers(vec![0; count]),
        Arc::new(StringArray::from(vec!["short", "long"])),
        Arc::new(StringArray::from(vec!["en"; count])),
        Arc::new(Float64Array::from(vec![0.1; count])),
        Arc::new(StringArray::from(texts.to_vec())),
        Arc::new(signals.finish()),
    ];
    let step = [RecordBatch::try_new(loaded_schema(), columns).expect("a step")];
    let max_tokens = tokenizer.encode(texts[1]).len() - 1;
    let loaded = |rule| {
        let rules = RowRules {
            limit: TextLimit { max_tokens, rule },
            concatenate: None,
        };
        micro_batches(&step, &tokenizer, rules, None).expect("micro-batches")
    };
    let (left_out, cut) = (loaded(OverLimit::Reject), loaded(OverLimit::Truncate));
    assert_eq!(
        (&left_out.batches[0].segments[..], &left_out.too_long[..]),
        (&["short".to_owned()][..], &["long".to_owned()][..])
    );
    assert_eq!(cut.batches[0].segments, ["short", "long"]);
    assert_eq!(cut.batches[0].batch.tokens[1].len(), max_tokens);
    assert!(cut.too_long.is_empty());
}

#[test]
fn the_tokenizer_that_training_would_take_is_read() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs");
    let (pieces, archive) = (
        format!("{root}/tokenizers/mini.model"),
        format!("{root}/models/small.nemo"),
    );
    let read = |init: &str, tokenizer: &str, from_nothing: &str| {
        let settings = ReadTokenizerSettings {
            init: init.into(),
            tokenizer: tokenizer.into(),
            from_nothing: from_nothing.into(),
            ..ReadTokenizerSettings::default()
        };
        Harness::<ReadTokenizer>::new(settings)
            .run()
            .map(|output| model(&output))
    };
    let of_file = std::fs::read(&pieces).expect("a file");
    let opened = flow_model::checkpoint::OpenModel::open(std::path::Path::new(&archive)).expect("a model");
    let of_model = opened.tokenizer.expect("a tokenizer");
    assert!(read(&archive, "", &pieces).expect("of the model") == of_model);
    assert!(read(&archive, &pieces, "").expect("of the file") == of_file);
    assert!(read("none", "", &pieces).expect("of the file") == of_file);
    for (init, tokenizer, named) in [
        ("none", "", "init: none"),
        ("/no/such.nemo", "", "/no/such.nemo"),
        (&archive, "/no/such.model", "/no/such.model"),
    ] {
        let error = read(init, tokenizer, "").expect_err(named).to_string();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn the_tokenizer_of_a_model_is_extended() {
    let with = |extend: &str, vocab_size: u32| TrainTokenizerSettings {
        extend: extend.into(),
        vocab_size,
        ..TrainTokenizerSettings::default()
    };
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs");
    let (pieces, archive) = (
        format!("{root}/tokenizers/mini.model"),
        format!("{root}/models/small.nemo"),
    );
    for (extend, old, new) in [(&pieces, 512, 530), (&archive, 1024, 1050)] {
        let trained = train(with(extend, new), &[&rows()], 1).expect("trained");
        let tokenizer = Tokenizer::from_bytes(&model(&trained)).expect("a model");
        assert_eq!(tokenizer.vocabulary_size(), new as usize);
        let kept = flow_model::checkpoint::OpenModel::open(std::path::Path::new(&archive)).expect("a model");
        let kept = match old {
            512 => std::fs::read(&pieces).expect("a file"),
            _ => kept.tokenizer.expect("a tokenizer"),
        };
        assert_eq!(
            tokenizer.pieces()[..old],
            Tokenizer::from_bytes(&kept).expect("a model").pieces()
        );
    }
    let error = |settings| train(settings, &[&rows()], 1).unwrap_err().to_string();
    assert!(error(with("gone.model", 600)).contains("gone.model"));
    assert!(error(with("gone.nemo", 600)).contains("gone.nemo"));
    assert!(error(with(&format!("{root}/mini.yaml"), 600)).contains("mini.yaml"));
    let unigram = TrainTokenizerSettings {
        r#type: TokenizerType::Unigram,
        ..with(&pieces, 600)
    };
    assert!(error(unigram).contains("bpe"));
}

/// The file whose digest a checkpoint notes is the one that is used.
#[test]
fn a_tokenizer_file_is_read_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("t.model");
    std::fs::write(&path, b"first").expect("written");
    let settings = flow_training::settings::TrainSettings {
        tokenizer: path.display().to_string(),
        ..Default::default()
    };
    let settings = flow_training::resolved_settings::ResolvedSettings::from(settings);
    let noted = settings.identity(&Storage::default()).expect("read").tokenizer;
    std::fs::write(&path, b"second").expect("written");
    let used = settings
        .clone()
        .tokenizer_file(&Storage::default())
        .expect("read")
        .expect("given");
    assert_eq!(noted, Some(blake3::hash(&used).to_hex().to_string()));
    assert_eq!(used, b"first");
}
