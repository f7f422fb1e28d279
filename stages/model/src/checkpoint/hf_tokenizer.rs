//! `tokenizer.json` of Hugging Face's tokenizers, from and to SentencePiece models of the BPE kind.
//!
//! There a vocabulary comes with a list of merges in order of priority; in SentencePiece each piece has a score and may
//! be merged from any split of it. The two are equivalent where every split of a piece into pieces is in the list and
//! the splits of one piece are adjacent. Anything else is refused.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::{Value, json};

use crate::tokenizer::Tokenizer;
use crate::tokenizer::message::Message;
use crate::tokenizer::model_file::{Algorithm, ModelFile, Piece, PieceKind};
use crate::{Error, Result};

const SPACE: &str = "\u{2581}";
/// Two spaces or more, as SentencePiece collapses them.
const SPACES: &str = " {2,}";
pub(super) const PAD: &str = "<pad>";
pub(super) const BLANK: &str = "<blank>";

/// A SentencePiece model as `tokenizer.json`, with the transducer's blank after its pieces.
pub(super) fn tokenizer_json(tokenizer: &Tokenizer) -> Result<Value> {
    let file = tokenizer.model_file()?;
    let refuse = |what: &str| {
        Err(Error::Tokenizer(format!(
            "{what}, which a tokenizer.json cannot say; write a .nemo archive or a model folder instead"
        )))
    };
    if file.algorithm != Algorithm::Bpe {
        return refuse("is a unigram model");
    }
    if file.spaces_as_suffix || !file.remove_extra_spaces || !file.escape_spaces {
        return refuse("treats spaces in another way than SentencePiece does by default");
    }
    if file.pieces.iter().any(|piece| piece.kind == PieceKind::Unused) {
        return refuse("has unused pieces");
    }
    let has_bytes = file.pieces.iter().any(|piece| piece.kind == PieceKind::Byte);
    let mut normalisers = Vec::new();
    if !file.character_map.is_empty() {
        normalisers.push(json!({ "type": "Precompiled", "precompiled_charsmap": base64(&file.character_map) }));
    }
    normalisers.push(json!({ "type": "Strip", "strip_left": false, "strip_right": true }));
    normalisers.push(json!({ "type": "Replace", "pattern": { "Regex": SPACES }, "content": SPACE }));
    let added = |id: usize, text: &str, special: bool| {
        json!({
            "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": special,
        })
    };
    let mut added_tokens: Vec<Value> = (file.pieces.iter().enumerate())
        .filter_map(|(id, piece)| match piece.kind {
            PieceKind::Unknown | PieceKind::Control => Some(added(id, &piece.text, true)),
            PieceKind::UserDefined => Some(added(id, &piece.text, piece.text == PAD)),
            _ => None,
        })
        .collect();
    added_tokens.push(added(file.pieces.len(), BLANK, true));
    let metaspace = json!({
        "type": "Metaspace", "replacement": SPACE,
        "prepend_scheme": if file.add_dummy_prefix { "always" } else { "never" }, "split": true,
    });
    let decoder = if has_bytes {
        json!({ "type": "Sequence", "decoders": [{ "type": "ByteFallback" }, metaspace] })
    } else {
        metaspace.clone()
    };
    let vocabulary: serde_json::Map<String, Value> = (file.pieces.iter().enumerate())
        .map(|(id, piece)| (piece.text.clone(), Value::from(id)))
        .collect();
    let merges: Vec<Value> = merges(&file.pieces).into_iter().map(|(a, b)| json!([a, b])).collect();
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added_tokens,
        "normalizer": { "type": "Sequence", "normalizers": normalisers },
        "pre_tokenizer": metaspace,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": {},
        },
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": tokenizer.piece(tokenizer.unknown_id()),
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
            // Has no effect without byte pieces; transformers writes it.
            "byte_fallback": file.byte_fallback || !has_bytes,
            "ignore_merges": false, "vocab": vocabulary, "merges": merges,
        },
    }))
}

/// All splits of pieces into two pieces, those of the best score first, the longest left part first of one piece.
fn merges(pieces: &[Piece]) -> Vec<(String, String)> {
    let known: HashSet<&str> = normal(pieces).map(|piece| piece.text.as_str()).collect();
    let mut found = Vec::new();
    for piece in normal(pieces) {
        for (at, _) in piece.text.char_indices().skip(1) {
            let (left, right) = piece.text.split_at(at);
            if known.contains(left) && known.contains(right) {
                found.push((piece.score, left.chars().count(), right.chars().count(), left, right));
            }
        }
    }
    found.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)).then(b.2.cmp(&a.2)));
    found
        .into_iter()
        .map(|(_, _, _, left, right)| (left.to_string(), right.to_string()))
        .collect()
}

fn normal(pieces: &[Piece]) -> impl Iterator<Item = &Piece> {
    pieces.iter().filter(|piece| piece.kind == PieceKind::Normal)
}

/// The SentencePiece model that is equivalent to a `tokenizer.json`. `blank` is the number of pieces; tokens from there
/// on are not the tokenizer's. The error names what SentencePiece cannot express.
pub(super) fn sentencepiece_model(json: &Value, blank: usize) -> std::result::Result<Vec<u8>, String> {
    let model = &json["model"];
    if model["type"].as_str() != Some("BPE") {
        return Err(format!("is of the kind {}, not BPE", model["type"]));
    }
    for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model[key].as_str().is_some_and(|text| !text.is_empty()) {
            return Err(format!("has a `{key}`"));
        }
    }
    if model["ignore_merges"].as_bool() == Some(true) {
        return Err("ignores its merges (`ignore_merges`)".into());
    }
    let texts = texts_by_id(&model["vocab"], blank)?;
    let unknown = model["unk_token"].as_str().ok_or("has no `unk_token`")?;
    let mut special: HashSet<&str> = HashSet::new();
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let (id, content) = (token["id"].as_u64(), token["content"].as_str());
        let (Some(id), Some(content)) = (id, content) else {
            return Err("has an added token without id or text".into());
        };
        if id < blank as u64 {
            if texts.get(id as usize).is_some_and(|text| text != content) {
                return Err(format!("has two texts for token {id}"));
            }
            special.insert(content);
        }
    }
    let is_byte = |text: &str| text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
    let bytes = texts.iter().filter(|text| is_byte(text)).count();
    if bytes != 0 && bytes != 256 {
        return Err(format!("has {bytes} byte tokens instead of 256"));
    }
    let mut pieces: Vec<Piece> = texts
        .into_iter()
        .map(|text| {
            let kind = if text == unknown {
                PieceKind::Unknown
            } else if bytes > 0 && is_byte(&text) {
                PieceKind::Byte
            } else if special.contains(text.as_str()) {
                PieceKind::UserDefined
            } else {
                PieceKind::Normal
            };
            Piece { text, score: 0.0, kind }
        })
        .collect();
    if !pieces.iter().any(|piece| piece.kind == PieceKind::Unknown) {
        return Err(format!("has no token `{unknown}`, which `unk_token` names"));
    }
    put_scores(&mut pieces, &model["merges"])?;
    let file = ModelFile {
        algorithm: Algorithm::Bpe,
        pieces,
        byte_fallback: bytes > 0 && model["byte_fallback"].as_bool() == Some(true),
        spaces_as_suffix: false,
        unknown_surface: String::new(),
        character_map: character_map(&json["normalizer"])?,
        add_dummy_prefix: prepends_space(&json["pre_tokenizer"])?,
        remove_extra_spaces: true,
        escape_spaces: true,
    };
    Ok(model_bytes(&file))
}

fn texts_by_id(vocabulary: &Value, blank: usize) -> std::result::Result<Vec<String>, String> {
    let mut texts: BTreeMap<u64, &str> = BTreeMap::new();
    for (text, id) in vocabulary.as_object().ok_or("has no vocabulary")? {
        let id = id.as_u64().ok_or_else(|| format!("has no number for token `{text}`"))?;
        if id < blank as u64 && texts.insert(id, text).is_some() {
            return Err(format!("has two tokens of number {id}"));
        }
    }
    if texts.len() != blank {
        return Err(format!("has {} tokens where the model has {blank}", texts.len()));
    }
    Ok(texts.into_values().map(str::to_string).collect())
}

/// Scores by which SentencePiece merges in the order of the list; pieces that no merge creates come after.
fn put_scores(pieces: &mut [Piece], listed: &Value) -> std::result::Result<(), String> {
    let listed: Vec<(&str, &str)> = listed
        .as_array()
        .ok_or("has no list of merges")?
        .iter()
        .map(|merge| match (merge.as_str(), merge.as_array().map(Vec::as_slice)) {
            (Some(text), _) => text.split_once(' ').ok_or("has a merge of one part"),
            (_, Some([left, right])) => left.as_str().zip(right.as_str()).ok_or("has a merge that is not text"),
            _ => Err("has a merge that is not a pair"),
        })
        .collect::<std::result::Result<_, _>>()?;
    let mut ranks: HashMap<String, usize> = HashMap::new();
    let mut previous = String::new();
    for (left, right) in &listed {
        let whole = format!("{left}{right}");
        if whole != previous {
            let rank = ranks.len();
            if ranks.insert(whole.clone(), rank).is_some() {
                return Err(format!("merges into `{whole}` in two places of its list"));
            }
            previous = whole;
        }
    }
    let mut next = ranks.len();
    for piece in pieces.iter_mut().filter(|piece| piece.kind == PieceKind::Normal) {
        let rank = ranks.get(&piece.text).copied().unwrap_or_else(|| {
            next += 1;
            next - 1
        });
        // Exact up to 16 million pieces.
        piece.score = -(rank as f32);
    }
    let ours: HashSet<(String, String)> = merges(pieces).into_iter().collect();
    let theirs: HashSet<(String, String)> = listed.iter().map(|&(a, b)| (a.into(), b.into())).collect();
    if let Some((left, right)) = ours.symmetric_difference(&theirs).min() {
        return Err(if theirs.contains(&(left.clone(), right.clone())) {
            format!("merges `{left}` and `{right}`, which are not both tokens that make a token")
        } else {
            format!("does not merge `{left}` and `{right}`, though the three are tokens")
        });
    }
    Ok(())
}

/// The compiled character map; empty for none.
fn character_map(normaliser: &Value) -> std::result::Result<Vec<u8>, String> {
    let alone = [normaliser.clone()];
    let steps = match normaliser["type"].as_str() {
        Some("Sequence") => normaliser["normalizers"].as_array().map_or(&[][..], Vec::as_slice),
        Some(_) => &alone,
        None => &[],
    };
    let mut map = Vec::new();
    let (mut strips, mut collapses) = (false, false);
    for (index, step) in steps.iter().enumerate() {
        match step["type"].as_str() {
            Some("Precompiled") if index == 0 => {
                let text = step["precompiled_charsmap"].as_str().unwrap_or_default();
                map = from_base64(text).ok_or("has a damaged character map")?;
            }
            Some("Strip") if step["strip_right"].as_bool() == Some(true) => strips = true,
            Some("Replace") if step["pattern"]["Regex"].as_str() == Some(SPACES) => collapses = true,
            _ => return Err(format!("normalises by a step of the kind {}", step["type"])),
        }
    }
    if !(strips && collapses) {
        return Err("does not strip and collapse spaces as SentencePiece does".into());
    }
    Ok(map)
}

fn prepends_space(step: &Value) -> std::result::Result<bool, String> {
    let refuse = || Err(format!("splits words by {step}"));
    if step["type"].as_str() != Some("Metaspace") || step["replacement"].as_str() != Some(SPACE) {
        return refuse();
    }
    match (step["prepend_scheme"].as_str(), step["add_prefix_space"].as_bool()) {
        (Some("always"), _) | (None, Some(true)) => Ok(true),
        (Some("never"), _) | (None, Some(false)) => Ok(false),
        _ => refuse(),
    }
}

/// SentencePiece's `.model` file of a BPE model; field numbers are those of `sentencepiece_model.proto`.
fn model_bytes(file: &ModelFile) -> Vec<u8> {
    let mut model = Message::default();
    for piece in &file.pieces {
        let mut message = Message::default();
        message.bytes(1, piece.text.as_bytes());
        message.float(2, piece.score);
        let kind = match piece.kind {
            PieceKind::Normal => 1,
            PieceKind::Unknown => 2,
            PieceKind::Control => 3,
            PieceKind::UserDefined => 4,
            PieceKind::Unused => 5,
            PieceKind::Byte => 6,
        };
        message.number(3, kind);
        model.bytes(1, message.as_slice());
    }
    let unknown = file.pieces.iter().position(|piece| piece.kind == PieceKind::Unknown);
    let mut trainer = Message::default();
    trainer.number(3, file.algorithm as i64);
    trainer.number(4, file.pieces.len() as i64);
    trainer.number(35, i64::from(file.byte_fallback));
    trainer.number(40, unknown.unwrap_or(0) as i64);
    // No begin, end or padding piece.
    for field in 41..=43 {
        trainer.number(field, -1);
    }
    model.bytes(2, trainer.as_slice());
    let mut normaliser = Message::default();
    normaliser.bytes(2, &file.character_map);
    normaliser.number(3, i64::from(file.add_dummy_prefix));
    normaliser.number(4, i64::from(file.remove_extra_spaces));
    normaliser.number(5, i64::from(file.escape_spaces));
    model.bytes(3, normaliser.as_slice());
    model.into_bytes()
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let [a, b, c] = [0, 1, 2].map(|index| u32::from(chunk.get(index).copied().unwrap_or(0)));
        let bits = a << 16 | b << 8 | c;
        for index in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * index) & 63) as usize];
            text.push(if index <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

fn from_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=').as_bytes();
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    for chunk in digits.chunks(4) {
        let mut bits = 0u32;
        for index in 0..4 {
            let value = match chunk.get(index) {
                Some(digit) => DIGITS.iter().position(|known| known == digit)? as u32,
                None => 0,
            };
            bits = bits << 6 | value;
        }
        let whole = bits.to_be_bytes();
        bytes.extend(whole.get(1..chunk.len())?);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn base64_is_that_of_others() {
        for (bytes, text) in [
            (&b""[..], ""),
            (b"M", "TQ=="),
            (b"Ma", "TWE="),
            (b"Man", "TWFu"),
            (&[255; 4], "/////w=="),
        ] {
            assert_eq!(base64(bytes), text);
            assert_eq!(from_base64(text).as_deref(), Some(bytes));
        }
        assert_eq!(from_base64("T*=="), None);
    }

    proptest! {
        #[test]
        fn any_bytes_come_back_from_base64(bytes: Vec<u8>) {
            prop_assert_eq!(from_base64(&base64(&bytes)), Some(bytes));
        }
    }
}
