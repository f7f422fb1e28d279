//! Which characters get a piece.

use std::collections::HashMap;

use super::words::{BOUNDARY, Count, UNKNOWN};

/// The words to learn from, and the characters that must be in the vocabulary.
pub(super) struct Alphabet {
    /// The most frequent first, equally frequent ones in the order of their bytes. Characters without a piece are [`UNKNOWN`].
    pub words: Vec<(String, Count)>,
    /// With their counts, the most frequent first.
    pub characters: Vec<(char, u64)>,
}

impl Alphabet {
    /// Takes characters, the most frequent first, until they make up `coverage` of all.
    pub fn new(words: HashMap<String, Count>, coverage: f64) -> Self {
        let mut counts: HashMap<char, u64> = HashMap::new();
        let mut total = 0u64;
        for (word, count) in &words {
            for character in word.chars().filter(|&character| character != '\0') {
                *counts.entry(character).or_default() += count.all;
                total += count.all;
            }
        }
        let mut characters: Vec<(char, u64)> = counts.into_iter().collect();
        characters.sort_unstable_by(|(a, n), (b, m)| m.cmp(n).then_with(|| a.cmp(b)));
        let mut covered = 0u64;
        // Both in 32 bits, as SentencePiece compares them.
        characters.retain(|&(_, count)| {
            let wanted = ((covered as f64 / total as f64) as f32) < coverage as f32;
            if wanted {
                covered += count;
            }
            wanted
        });
        // Its count is part of the total, but it does not become a piece.
        characters.retain(|&(character, _)| character != BOUNDARY);
        let known: HashMap<char, ()> = characters.iter().map(|&(character, _)| (character, ())).collect();
        let mut merged: HashMap<String, Count> = HashMap::new();
        for (word, count) in words {
            let word = word
                .chars()
                .map(|c| if known.contains_key(&c) { c } else { UNKNOWN })
                .collect();
            merged.entry(word).or_default().add(count);
        }
        let mut words: Vec<_> = merged.into_iter().collect();
        words.sort_unstable_by(|(a, n), (b, m)| m.all.cmp(&n.all).then_with(|| a.cmp(b)));
        Alphabet { words, characters }
    }
}
