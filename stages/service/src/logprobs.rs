//! Log probabilities of tokens, as OpenAI writes them.

use flow_transcription::tokens::Token;
use serde_json::{Value, json};

/// OpenAI's list of the tokens of these words: their bytes together are the text, which begins with a space unless these are
/// its `first` words. A token that is a part of a character has U+FFFD in its text.
pub fn logprobs(words: &[Vec<Token>], first: bool) -> Value {
    let mut list = Vec::new();
    for (number, tokens) in words.iter().enumerate() {
        for (place, token) in tokens.iter().enumerate() {
            let mut bytes = Vec::with_capacity(token.bytes.len() + 1);
            if place == 0 && !(first && number == 0) {
                bytes.push(b' ');
            }
            bytes.extend_from_slice(&token.bytes);
            list.push(json!({
                "token": String::from_utf8_lossy(&bytes),
                "logprob": token.logprob,
                "bytes": bytes,
            }));
        }
    }
    Value::Array(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spaces_stand_before_all_words_but_the_first() {
        let token = |bytes: &[u8]| Token {
            bytes: bytes.to_vec(),
            logprob: -0.5,
            is_first_choice: true,
        };
        let words = [
            vec![token(b""), token(b"ab")],
            vec![token("\u{e9}".as_bytes().split_at(1).0)],
        ];
        let texts = |first: bool| -> Vec<Value> {
            let list = logprobs(&words, first);
            list.as_array()
                .unwrap()
                .iter()
                .map(|token| token["token"].clone())
                .collect()
        };
        assert_eq!(texts(true), ["", "ab", " \u{fffd}"]);
        assert_eq!(texts(false), [" ", "ab", " \u{fffd}"]);
        assert_eq!(
            logprobs(&words, true)[2],
            json!({"token": " \u{fffd}", "logprob": -0.5, "bytes": [32, 0xc3]})
        );
    }
}
