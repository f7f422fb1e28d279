//! The words of a text as the model spells them.

use flow_model::tokenizer::Tokenizer;

use crate::letter_case::Case;
use crate::word_key::word_key;

/// A word of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpokenWord {
    /// As it is written.
    pub text: String,
    /// Empty where the vocabulary has none of its letters.
    pub tokens: Vec<u32>,
    /// Whether each token has a letter or a digit: marks have no sound.
    pub sounds: Vec<bool>,
    /// What it is compared by.
    pub key: String,
    /// Its characters that are not in the vocabulary.
    pub unknown: Vec<char>,
}

impl SpokenWord {
    /// `case`: the one that the model writes, if it writes one alone.
    pub fn new(tokenizer: &Tokenizer, text: &str, case: Option<Case>) -> Self {
        let (tokens, unknown) = match case {
            Some(case) => tokens(tokenizer, &case.applied(text)),
            None => tokens(tokenizer, text),
        };
        let has_sound = |id: &u32| {
            tokenizer
                .piece(*id)
                .is_some_and(|piece| piece.chars().any(char::is_alphanumeric))
        };
        SpokenWord {
            text: text.to_owned(),
            sounds: tokens.iter().map(has_sound).collect(),
            tokens,
            key: word_key(text),
            unknown,
        }
    }
}

/// The tokens of a word, and its characters that are in no token. A word that the vocabulary lacks as it is written is taken in
/// the case that it has more of.
fn tokens(tokenizer: &Tokenizer, word: &str) -> (Vec<u32>, Vec<char>) {
    let unknown = tokenizer.unknown_letters(word);
    if unknown.is_empty() {
        return (known(tokenizer, word), Vec::new());
    }
    let cases = [word.to_lowercase(), word.to_uppercase()];
    let counted = cases
        .iter()
        .map(|text| (tokenizer.unknown_letters(text).len(), text.as_str()));
    let best = counted.filter(|(count, _)| *count < unknown.len());
    let word = best.min_by_key(|(count, _)| *count).map_or(word, |(_, text)| text);
    let (mut kept, mut unknown) = (String::new(), Vec::new());
    for c in word.chars() {
        match tokenizer.unknown_letters(c.encode_utf8(&mut [0; 4])).is_empty() {
            true => kept.push(c),
            false => unknown.push(c),
        }
    }
    (known(tokenizer, &kept), unknown)
}

fn known(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    if !text.chars().any(char::is_alphanumeric) {
        return Vec::new();
    }
    let mut ids = tokenizer.encode(text);
    ids.retain(|id| *id != tokenizer.unknown_id());
    ids
}
