//! The stages `tokenizer.train` and `tokenizer.write`, and training with what they make.

use std::sync::Arc;

use arrow::array::{AsArray, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Int32Type, Schema, SchemaRef};
use flow_model::tokenizer::Tokenizer;
use flow_runtime::event::Event;
use flow_runtime::harness::{Harness, Output};
use flow_runtime::{Artifact, Partition, StageError};
use flow_training::long_texts::{LongTexts, OverLimit};
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
