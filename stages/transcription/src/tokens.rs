//! The tokens that words are made of, with their probabilities.

use flow_model::confidence::{ConfidenceMethod, log_softmax};
use flow_model::tokenizer::Tokenizer;

use crate::{Result, TranscriptionError};

/// What OpenAI's API gives for tokens that are as good as impossible. Outputs of damaged weights, which are not numbers, have
/// it, too.
pub const LEAST_LOGPROB: f64 = -9999.0;

/// A token of a word.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// What it adds to the word: UTF-8; a token of bytes may have only a part of a character.
    pub bytes: Vec<u8>,
    /// The natural logarithm of its probability among all tokens and blank, by the model alone: language models and
    /// boosted phrases do not count.
    pub logprob: f64,
    /// Whether it is the most probable of all tokens by the model alone: not where language models, boosted phrases or another beam chose
    /// otherwise.
    pub is_first_choice: bool,
}

/// What the outputs of the joint network say of a token that was chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TokenScore {
    pub confidence: f64,
    pub logprob: f64,
    /// Of [`Token`].
    pub is_first_choice: bool,
}

impl TokenScore {
    /// From the logits of all tokens and, as the last, blank; without that, probabilities are those among tokens alone.
    ///
    /// # Errors
    /// If the token is not among them.
    pub fn new(method: &ConfidenceMethod, token: u32, logits: &[f32], with_blank: bool) -> Result<Self> {
        let tokens = &logits[..logits.len().saturating_sub(1)];
        let logits = if with_blank { logits } else { tokens };
        let logs = log_softmax(logits);
        let Some(&logprob) = logs.get(token as usize) else {
            let why = format!("{} outputs of the joint have no token {token}", logits.len());
            return Err(TranscriptionError::Input(why));
        };
        Ok(Self {
            confidence: method.confidence(&logs, logits.len()),
            // `max` takes the number that is one.
            logprob: logprob.max(LEAST_LOGPROB),
            is_first_choice: tokens.iter().all(|other| *other <= logits[token as usize]),
        })
    }
}

/// The tokens of a word, without the spaces before and behind it: their bytes together are its text.
///
/// # Errors
/// If an id is not in the vocabulary.
pub(crate) fn tokens_of_word(tokenizer: &Tokenizer, ids: &[u32], scores: &[TokenScore]) -> Result<Vec<Token>> {
    let mut tokens = Vec::with_capacity(ids.len());
    for (&id, score) in ids.iter().zip(scores) {
        tokens.push(Token {
            bytes: tokenizer.token_bytes(id)?,
            logprob: score.logprob,
            is_first_choice: score.is_first_choice,
        });
    }
    for token in &mut tokens {
        let spaces = token.bytes.iter().take_while(|&&byte| byte == b' ').count();
        token.bytes.drain(..spaces);
        if !token.bytes.is_empty() {
            break;
        }
    }
    for token in tokens.iter_mut().rev() {
        let kept = token
            .bytes
            .iter()
            .rposition(|&byte| byte != b' ')
            .map_or(0, |last| last + 1);
        token.bytes.truncate(kept);
        if !token.bytes.is_empty() {
            break;
        }
    }
    Ok(tokens)
}

#[cfg(test)]
#[path = "tokens_tests.rs"]
mod tests;
