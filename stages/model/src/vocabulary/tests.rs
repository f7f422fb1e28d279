use std::collections::HashMap;

use flow_kernels::testing::values;

use super::*;
use crate::model::TdtModel;
use crate::testing::golden;

fn opened() -> OpenModel {
    OpenModel::open(&golden::file("model.nemo")).unwrap()
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_bytes(opened().tokenizer.as_deref().unwrap()).unwrap()
}

/// A SentencePiece model with other pieces: the given messages of its pieces in the given order, the rest as it was.
fn with_pieces(order: impl Fn(Vec<Vec<u8>>) -> Vec<Vec<u8>>) -> Tokenizer {
    let bytes = opened().tokenizer.unwrap();
    let (mut pieces, mut rest) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < bytes.len() {
        // Every field at the top is a message: a tag of one byte, and a length.
        let (mut length, mut shift, mut head) = (0usize, 0, 1);
        loop {
            let byte = bytes[at + head];
            head += 1;
            length |= usize::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                break;
            }
        }
        let field = bytes[at..at + head + length].to_vec();
        if bytes[at] == 0x0a { &mut pieces } else { &mut rest }.push(field);
        at += head + length;
    }
    let all = [order(pieces), rest].concat().concat();
    Tokenizer::from_bytes(&all).unwrap()
}

/// The field of a normal piece.
fn piece(text: &str, score: f32) -> Vec<u8> {
    let mut message = vec![0x0a, text.len() as u8];
    message.extend(text.bytes());
    message.push(0x15);
    message.extend(score.to_le_bytes());
    [vec![0x0a, message.len() as u8], message].concat()
}

fn model(opened: &OpenModel) -> TdtModel {
    let config = ModelConfig::from_nemo_yaml(&opened.config_yaml).unwrap();
    TdtModel::from_stored(opened.load().unwrap(), config, DType::F32, &Device::Cpu).unwrap()
}

fn tensors(opened: &OpenModel) -> HashMap<String, Vec<f64>> {
    let load = |entry: &TensorEntry| (entry.name.clone(), values(&entry.load().unwrap()));
    opened.tensors.iter().map(load).collect()
}

fn texts(opened: &OpenModel) -> Vec<String> {
    let waves = golden::waves("eval");
    let waves: Vec<&[f32]> = waves.iter().map(Vec::as_slice).collect();
    let found = model(opened).transcribe(&waves).unwrap();
    found.into_iter().map(|hypothesis| hypothesis.text).collect()
}

/// A text that is no piece of the golden vocabulary, and is made of such.
fn joined_pieces(tokenizer: &Tokenizer) -> String {
    let letters = |piece: &String| piece.chars().all(char::is_alphabetic);
    let pieces: Vec<String> = tokenizer.pieces().into_iter().filter(letters).collect();
    let words = pieces
        .iter()
        .map(|piece| format!("\u{2581}{piece}{}{piece}", pieces[0]));
    let mut new = words.filter(|word| tokenizer.id(word).is_none() && tokenizer.encode_piece(word).len() > 1);
    new.next().expect("a word")
}

#[test]
fn the_same_vocabulary_changes_no_bit() {
    let (same, change) = opened().with_tokenizer(&tokenizer(), NewPieces::Mean, 1).unwrap();
    assert_eq!(change, None);
    assert_eq!(tensors(&same), tensors(&opened()));
}

/// Ids move, and nothing else.
#[test]
fn another_order_of_pieces_says_the_same() {
    let turned = with_pieces(|mut pieces| {
        pieces[1..].reverse();
        pieces
    });
    let (permuted, change) = opened().with_tokenizer(&turned, NewPieces::Mean, 1).unwrap();
    let change = change.unwrap();
    let size = turned.vocabulary_size();
    assert_eq!((change.kept(), change.averaged(), change.random()), (size, 0, 0));
    let before = texts(&opened());
    assert!(before.iter().any(|text| !text.is_empty()), "{before:?}");
    assert_eq!(texts(&permuted), before);
}

/// New pieces get rows of their own, and the outputs of the old ones, of blank and of the durations stay to the bit.
#[test]
fn more_pieces_leave_the_old_ones_alone() {
    let old = tokenizer();
    let word = joined_pieces(&old);
    let longer = with_pieces(|mut pieces| {
        pieces.push(piece(&word, -500.0));
        pieces.push(piece("\u{e000}\u{e001}", -501.0));
        pieces
    });
    let size = old.vocabulary_size();
    let (extended, change) = opened().with_tokenizer(&longer, NewPieces::Mean, 7).unwrap();
    let change = change.unwrap();
    assert_eq!((change.kept(), change.averaged(), change.random()), (size, 1, 1));
    let parts = old.encode_piece(&word);
    assert!(parts.len() > 1);
    assert_eq!(change.pieces[size].1, Origin::Mean(parts.clone()));
    assert_eq!(change.pieces[size + 1].1, Origin::Random);
    let table = change.table();
    assert_eq!(table.lines().count(), size + 3);
    let names: Vec<&str> = parts.iter().map(|&id| old.piece(id).unwrap()).collect();
    assert!(
        table.contains(&format!("\t{word}\tmean\t{}\n", names.join(" "))),
        "{table}"
    );

    let (before, after) = (tensors(&opened()), tensors(&extended));
    for (name, was) in &before {
        let is = &after[name];
        let Some(kind) = RowKind::of(name) else {
            assert_eq!(is, was, "{name}");
            continue;
        };
        let durations = ModelConfig::from_nemo_yaml(&extended.config_yaml)
            .unwrap()
            .transducer
            .unwrap()
            .loss
            .durations
            .len();
        let behind = if kind == RowKind::Output { 1 + durations } else { 1 };
        let width = was.len() / (size + behind);
        assert_eq!(is.len(), (size + 2 + behind) * width);
        assert_eq!(is[..size * width], was[..size * width], "{name}");
        assert_eq!(is[(size + 2) * width..], was[size * width..], "{name}");
        for at in 0..width {
            let mean = parts.iter().map(|&id| was[id as usize * width + at]).sum::<f64>() / parts.len() as f64;
            assert!((is[size * width + at] - mean).abs() < 1e-6);
        }
        assert!(
            is[(size + 1) * width..(size + 2) * width]
                .iter()
                .all(|x| *x != 0.0 && x.abs() < 6.0)
        );
    }

    // The outputs over every frame of an utterance, after the embedding of token 5.
    let wave = golden::wave("eval", 1);
    let logits = |opened: &OpenModel| {
        let (frames, _) = model(opened).encode(&[&wave]).unwrap();
        let tensor = |name: &str| {
            opened
                .tensors
                .iter()
                .find(|entry| entry.name == name)
                .unwrap()
                .load()
                .unwrap()
        };
        let linear = |x: &Tensor, name: &str| {
            let product = x.matmul(&tensor(&format!("{name}.weight")).t().unwrap()).unwrap();
            product.broadcast_add(&tensor(&format!("{name}.bias"))).unwrap()
        };
        let token = tensor("decoder.prediction.embed.weight").narrow(0, 5, 1).unwrap();
        let sum = linear(&frames.get(0).unwrap(), "joint.enc").broadcast_add(&linear(&token, "joint.pred"));
        let last = opened.tensors.iter().map(|entry| entry.name.as_str());
        let mut last = last
            .filter_map(|name| name.strip_suffix(".weight"))
            .filter(|name| name.starts_with("joint.joint_net."));
        linear(&sum.unwrap().relu().unwrap(), last.next().unwrap())
    };
    let (old_logits, new_logits) = (logits(&opened()), logits(&extended));
    let (old_width, new_width) = (old_logits.dims()[1], new_logits.dims()[1]);
    assert_eq!(new_width, old_width + 2);
    let (old_values, new_values) = (values(&old_logits), values(&new_logits));
    for (was, is) in old_values.chunks(old_width).zip(new_values.chunks(new_width)) {
        assert_eq!(is[..size], was[..size]);
        assert_eq!(is[size + 2..], was[size..]);
    }
}

#[test]
fn random_rows_hang_on_seed_and_piece_alone() {
    let word = joined_pieces(&tokenizer());
    let one = with_pieces(|mut pieces| {
        pieces.push(piece(&word, -500.0));
        pieces
    });
    let two = with_pieces(|mut pieces| {
        pieces.push(piece("xqzj", -499.0));
        pieces.push(piece(&word, -500.0));
        pieces
    });
    let row = |tokenizer: &Tokenizer, seed: u64| {
        let (changed, _) = opened().with_tokenizer(tokenizer, NewPieces::Random, seed).unwrap();
        let embedding = &tensors(&changed)["decoder.prediction.embed.weight"];
        let width = embedding.len() / (tokenizer.vocabulary_size() + 1);
        embedding[(tokenizer.vocabulary_size() - 1) * width..][..width].to_vec()
    };
    assert_eq!(row(&one, 3), row(&two, 3));
    assert_ne!(row(&one, 3), row(&one, 4));
}

#[test]
fn a_model_without_tokenizer_takes_only_its_own() {
    let mut bare = opened();
    bare.tokenizer = None;
    bare.no_tokenizer = Some("x.ckpt holds no tokenizer".into());
    assert!(
        bare.clone()
            .with_tokenizer(&tokenizer(), NewPieces::Mean, 1)
            .unwrap()
            .1
            .is_none()
    );
    let other = with_pieces(|mut pieces| {
        pieces.swap(3, 4);
        pieces
    });
    let error = bare.with_tokenizer(&other, NewPieces::Mean, 1).unwrap_err().to_string();
    assert!(
        error.contains("x.ckpt holds no tokenizer") && error.contains("other texts"),
        "{error}"
    );
}
