use super::*;
use crate::testing::golden;
use proptest::prelude::*;

fn tokenizer() -> Tokenizer {
    Tokenizer::from_bytes(&std::fs::read(golden::file("tokenizer/tokenizer.model")).unwrap()).unwrap()
}

#[test]
fn encodes_and_decodes_as_sentencepiece() {
    let tokenizer = tokenizer();
    let cases: serde_json::Value =
        serde_json::from_slice(&std::fs::read(golden::file("tokenizer_cases.json")).unwrap()).unwrap();
    let pieces: Vec<&str> = cases["pieces"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p.as_str().unwrap())
        .collect();
    assert_eq!(pieces.len(), tokenizer.vocabulary_size());
    for (id, piece) in pieces.iter().enumerate() {
        assert_eq!(tokenizer.piece(id as u32), Some(*piece));
    }
    let cases = cases["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = case["ids"]
            .as_array()
            .unwrap()
            .iter()
            .map(|id| id.as_u64().unwrap() as u32)
            .collect();
        assert_eq!(tokenizer.encode(text), ids, "{text:?}");
        assert_eq!(
            tokenizer.decode(&ids).unwrap(),
            case["back"].as_str().unwrap(),
            "{text:?}"
        );
    }
}

#[test]
fn letters_without_a_piece_are_named() {
    let tokenizer = tokenizer();
    let known = "Good morning";
    assert!(!tokenizer.encode(known).contains(&tokenizer.unknown_id()));
    assert!(tokenizer.unknown_letters(known).is_empty());
    // Each as often as it is there, though a run of them is one unknown piece.
    assert_eq!(tokenizer.unknown_letters("Good 日本 morning 日"), ['日', '本', '日']);
    assert!(tokenizer.unknown_letters("").is_empty());
}

#[test]
fn an_id_outside_the_vocabulary_is_an_error() {
    let tokenizer = tokenizer();
    assert!(tokenizer.decode(&[tokenizer.vocabulary_size() as u32]).is_err());
}

#[test]
fn a_damaged_model_is_an_error_or_still_works() {
    let bytes = std::fs::read(golden::file("tokenizer/tokenizer.model")).unwrap();
    for end in [0, 1, 5, bytes.len() / 2, bytes.len() - 1] {
        assert!(Tokenizer::from_bytes(&bytes[..end]).is_err(), "cut at {end}");
    }
    for at in (0..bytes.len()).step_by(997) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x55;
        if let Ok(tokenizer) = Tokenizer::from_bytes(&damaged) {
            tokenizer
                .decode(&tokenizer.encode("Good morning, ﬁne ｆｕｌｌ é 日本語 \u{3000}"))
                .unwrap();
        }
    }
}

proptest! {
    #[test]
    fn any_text_encodes_to_ids_that_decode(text in ".{0,40}") {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode(&text);
        prop_assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocabulary_size()));
        tokenizer.decode(&ids).unwrap();
        prop_assert_eq!(ids.contains(&tokenizer.unknown_id()), !tokenizer.unknown_letters(&text).is_empty());
    }
}
