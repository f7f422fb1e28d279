//! Time stamps of tokens, words and segments, by NeMo's rules.

use std::collections::HashSet;
use std::ops::Range;

use crate::decoding::Hypothesis;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// A part of a transcript and the encoder frames (80 ms each for sub-sampling by 8) from and to which it was spoken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamped {
    pub text: String,
    pub start: u32,
    pub end: u32,
}

/// Time stamps of one utterance.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TimeStamps {
    /// One per token.
    pub tokens: Vec<Stamped>,
    pub words: Vec<Stamped>,
    /// Which tokens make each word.
    pub word_tokens: Vec<Range<usize>>,
    /// Words up to one that ends in a mark that ends a sentence.
    pub segments: Vec<Stamped>,
}

/// Ends of segments.
const SENTENCE_ENDS: [char; 3] = ['.', '!', '?'];

/// Time stamps of what a search found. `attach_marks`: marks of punctuation are at the end of the token before and have no duration,
/// as in NeMo for TDT and CTC; for RNN-T they are tokens as any other.
///
/// # Errors
/// Where the lists of the hypothesis have other lengths, or an id is not in the vocabulary.
pub fn time_stamps(tokenizer: &Tokenizer, hypothesis: &Hypothesis, attach_marks: bool) -> Result<TimeStamps> {
    let Hypothesis {
        ids, frames, durations, ..
    } = hypothesis;
    if frames.len() != ids.len() || durations.len() != ids.len() {
        return Err(Error::Input(format!(
            "{} tokens have {} frames and {} durations",
            ids.len(),
            frames.len(),
            durations.len()
        )));
    }
    let marks = punctuation(tokenizer);
    let is_mark = |text: &str| {
        let mut chars = text.chars();
        chars.next().is_some_and(|c| marks.contains(&c)) && chars.next().is_none()
    };
    let mut tokens: Vec<Stamped> = Vec::with_capacity(ids.len());
    for ((id, &start), &duration) in ids.iter().zip(frames).zip(durations) {
        let text = tokenizer.decode(&[*id])?;
        let (start, end) = match tokens.last() {
            Some(before) if attach_marks && is_mark(&text) => (before.end, before.end),
            _ => (start, start.saturating_add(duration)),
        };
        tokens.push(Stamped { text, start, end });
    }
    let mut words: Vec<Stamped> = Vec::new();
    let mut word_tokens: Vec<Range<usize>> = Vec::new();
    // The word that grows: its tokens.
    let mut word = 0..0;
    let mut finish = |words: &mut Vec<Stamped>, word: &Range<usize>| -> Result<()> {
        word_tokens.push(word.clone());
        words.push(Stamped {
            text: tokenizer.decode(&ids[word.clone()])?,
            // The first word begins with the first token, whatever that is.
            start: tokens[if words.is_empty() { 0 } else { word.start }].start,
            end: tokens[word.end - 1].end,
        });
        Ok(())
    };
    for (index, token) in tokens.iter().enumerate() {
        // The text of a piece that begins with the mark of a space differs from the piece.
        let begins = tokenizer.piece(ids[index]) != Some(&token.text) && !is_mark(&token.text);
        if begins && !word.is_empty() {
            finish(&mut words, &word)?;
            word = index..index;
        }
        word.end = index + 1;
    }
    if !word.is_empty() {
        finish(&mut words, &word)?;
    }
    let mut segments = Vec::new();
    let ends = |word: &Stamped| word.text.ends_with(SENTENCE_ENDS);
    for words in words.split_inclusive(ends) {
        let texts: Vec<&str> = words.iter().map(|word| word.text.as_str()).collect();
        segments.push(Stamped {
            text: texts.join(" "),
            start: words[0].start,
            end: words[words.len() - 1].end,
        });
    }
    Ok(TimeStamps {
        tokens,
        words,
        word_tokens,
        segments,
    })
}

/// Marks of punctuation in the vocabulary, but for pieces that begin a word or look special.
fn punctuation(tokenizer: &Tokenizer) -> HashSet<char> {
    let special = |piece: &str| {
        piece.starts_with('\u{2581}')
            || piece.starts_with("##")
            || piece.starts_with('[') && piece.ends_with(']')
            || piece.starts_with('<') && piece.ends_with('>')
    };
    let pieces = tokenizer.pieces();
    let chars = pieces
        .iter()
        .filter(|piece| !special(piece))
        .flat_map(|piece| piece.chars());
    chars.filter(|&c| is_punctuation(c)).collect()
}

/// Whether Unicode counts a character among its punctuation (category P).
fn is_punctuation(c: char) -> bool {
    let c = u32::from(c);
    let place = PUNCTUATION.partition_point(|&(_, last)| last < c);
    PUNCTUATION.get(place).is_some_and(|&(first, _)| first <= c)
}

/// First and last characters of the ranges of category P in Unicode's basic plane, in order.
#[rustfmt::skip]
const PUNCTUATION: &[(u32, u32)] = &[
    (0x21, 0x23), (0x25, 0x2A), (0x2C, 0x2F), (0x3A, 0x3B), (0x3F, 0x40), (0x5B, 0x5D), (0x5F, 0x5F), (0x7B, 0x7B),
    (0x7D, 0x7D), (0xA1, 0xA1), (0xA7, 0xA7), (0xAB, 0xAB), (0xB6, 0xB7), (0xBB, 0xBB), (0xBF, 0xBF), (0x37E,
    0x37E), (0x387, 0x387), (0x55A, 0x55F), (0x589, 0x58A), (0x5BE, 0x5BE), (0x5C0, 0x5C0), (0x5C3, 0x5C3), (0x5C6,
    0x5C6), (0x5F3, 0x5F4), (0x609, 0x60A), (0x60C, 0x60D), (0x61B, 0x61B), (0x61D, 0x61F), (0x66A, 0x66D), (0x6D4,
    0x6D4), (0x700, 0x70D), (0x7F7, 0x7F9), (0x830, 0x83E), (0x85E, 0x85E), (0x964, 0x965), (0x970, 0x970), (0x9FD,
    0x9FD), (0xA76, 0xA76), (0xAF0, 0xAF0), (0xC77, 0xC77), (0xC84, 0xC84), (0xDF4, 0xDF4), (0xE4F, 0xE4F), (0xE5A,
    0xE5B), (0xF04, 0xF12), (0xF14, 0xF14), (0xF3A, 0xF3D), (0xF85, 0xF85), (0xFD0, 0xFD4), (0xFD9, 0xFDA),
    (0x104A, 0x104F), (0x10FB, 0x10FB), (0x1360, 0x1368), (0x1400, 0x1400), (0x166E, 0x166E), (0x169B, 0x169C),
    (0x16EB, 0x16ED), (0x1735, 0x1736), (0x17D4, 0x17D6), (0x17D8, 0x17DA), (0x1800, 0x180A), (0x1944, 0x1945),
    (0x1A1E, 0x1A1F), (0x1AA0, 0x1AA6), (0x1AA8, 0x1AAD), (0x1B5A, 0x1B60), (0x1B7D, 0x1B7E), (0x1BFC, 0x1BFF),
    (0x1C3B, 0x1C3F), (0x1C7E, 0x1C7F), (0x1CC0, 0x1CC7), (0x1CD3, 0x1CD3), (0x2010, 0x2027), (0x2030, 0x2043),
    (0x2045, 0x2051), (0x2053, 0x205E), (0x207D, 0x207E), (0x208D, 0x208E), (0x2308, 0x230B), (0x2329, 0x232A),
    (0x2768, 0x2775), (0x27C5, 0x27C6), (0x27E6, 0x27EF), (0x2983, 0x2998), (0x29D8, 0x29DB), (0x29FC, 0x29FD),
    (0x2CF9, 0x2CFC), (0x2CFE, 0x2CFF), (0x2D70, 0x2D70), (0x2E00, 0x2E2E), (0x2E30, 0x2E4F), (0x2E52, 0x2E5D),
    (0x3001, 0x3003), (0x3008, 0x3011), (0x3014, 0x301F), (0x3030, 0x3030), (0x303D, 0x303D), (0x30A0, 0x30A0),
    (0x30FB, 0x30FB), (0xA4FE, 0xA4FF), (0xA60D, 0xA60F), (0xA673, 0xA673), (0xA67E, 0xA67E), (0xA6F2, 0xA6F7),
    (0xA874, 0xA877), (0xA8CE, 0xA8CF), (0xA8F8, 0xA8FA), (0xA8FC, 0xA8FC), (0xA92E, 0xA92F), (0xA95F, 0xA95F),
    (0xA9C1, 0xA9CD), (0xA9DE, 0xA9DF), (0xAA5C, 0xAA5F), (0xAADE, 0xAADF), (0xAAF0, 0xAAF1), (0xABEB, 0xABEB),
    (0xFD3E, 0xFD3F), (0xFE10, 0xFE19), (0xFE30, 0xFE52), (0xFE54, 0xFE61), (0xFE63, 0xFE63), (0xFE68, 0xFE68),
    (0xFE6A, 0xFE6B), (0xFF01, 0xFF03), (0xFF05, 0xFF0A), (0xFF0C, 0xFF0F), (0xFF1A, 0xFF1B), (0xFF1F, 0xFF20),
    (0xFF3B, 0xFF3D), (0xFF3F, 0xFF3F), (0xFF5B, 0xFF5B), (0xFF5D, 0xFF5D), (0xFF5F, 0xFF65),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::golden::file;
    use flow_nn::tensor_files::read_packed;

    #[test]
    fn time_stamps_equal_nemos() {
        let tokenizer = Tokenizer::load(&file("tokenizer/tokenizer.model")).unwrap();
        let text = read_packed(&file("timestamp_cases.json"), 1).unwrap();
        let golden: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let marks = punctuation(&tokenizer);
        let expected: HashSet<String> = serde_json::from_value(golden["supported_punctuation"].clone()).unwrap();
        assert_eq!(marks.iter().map(char::to_string).collect::<HashSet<_>>(), expected);
        for case in golden["cases"].as_array().unwrap() {
            let numbers = |key: &str| -> Vec<u32> { serde_json::from_value(case[key].clone()).unwrap() };
            let hypothesis = Hypothesis {
                ids: numbers("ids"),
                frames: numbers("frames"),
                durations: numbers("durations"),
                ..Hypothesis::default()
            };
            let found = time_stamps(&tokenizer, &hypothesis, true).unwrap();
            assert_eq!(found.words.len(), found.word_tokens.len());
            let mut next = 0;
            for (word, tokens) in found.words.iter().zip(&found.word_tokens) {
                assert_eq!(
                    (tokens.start, &word.text),
                    (next, &tokenizer.decode(&hypothesis.ids[tokens.clone()]).unwrap())
                );
                next = tokens.end;
            }
            assert_eq!(next, hypothesis.ids.len());
            for (key, found) in [
                ("char", found.tokens),
                ("word", found.words),
                ("segment", found.segments),
            ] {
                let expected = case[key].as_array().unwrap().iter().map(|one| {
                    // The text of a token is a list of one.
                    let text = one[key].as_str().or_else(|| one[key][0].as_str()).unwrap();
                    let offset = |name: &str| one[name].as_u64().unwrap() as u32;
                    (text.to_owned(), offset("start_offset"), offset("end_offset"))
                });
                let expected: Vec<(String, u32, u32)> = expected.collect();
                let found: Vec<_> = found.into_iter().map(|one| (one.text, one.start, one.end)).collect();
                assert_eq!(found, expected, "{key}");
            }
        }
    }

    #[test]
    fn lists_that_do_not_fit_and_unknown_ids_are_errors() {
        let tokenizer = Tokenizer::load(&file("tokenizer/tokenizer.model")).unwrap();
        let hypothesis = |ids: &[u32], frames: &[u32]| Hypothesis {
            ids: ids.to_vec(),
            frames: frames.to_vec(),
            durations: vec![1; frames.len()],
            ..Hypothesis::default()
        };
        assert!(time_stamps(&tokenizer, &hypothesis(&[1, 2], &[0]), true).is_err());
        assert!(time_stamps(&tokenizer, &hypothesis(&[1_000_000], &[0]), true).is_err());
    }
}
