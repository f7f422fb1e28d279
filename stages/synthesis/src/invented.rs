//! Words that no list holds, spelled as a language's words are: a model that only ever hears the same words learns these, and
//! not how the language is spelled.

use std::collections::{BTreeMap, BTreeSet};

use super::random::Random;

/// Fewest and most characters of a word.
const LENGTH: [usize; 2] = [2, 12];
/// Most draws for one word.
const MOST_DRAWS: usize = 100;

/// A Markov chain of order 2 over the characters of a language's words: each character, and the end of a word, is drawn from
/// those that follow the two before it in some word, as often as there.
#[derive(Clone, Debug, Default)]
pub struct InventedWords {
    known: BTreeSet<String>,
    /// What follows two characters (none before the beginning of a word); none is the end.
    next: BTreeMap<[Option<char>; 2], Vec<Option<char>>>,
}

impl InventedWords {
    /// The chain of these words, each of which counts once, whatever their order.
    pub fn of<'a>(words: impl Iterator<Item = &'a str>) -> Self {
        let known: BTreeSet<String> = words.flat_map(str::split_whitespace).map(str::to_owned).collect();
        let mut next: BTreeMap<[Option<char>; 2], Vec<Option<char>>> = BTreeMap::new();
        for word in &known {
            let mut before = [None, None];
            for follows in word.chars().map(Some).chain([None]) {
                next.entry(before).or_default().push(follows);
                before = [before[1], follows];
            }
        }
        InventedWords { known, next }
    }

    /// A word of 2 to 12 characters that is none of the known ones; none if the chain gives no such word in many draws.
    pub fn draw(&self, random: &mut Random) -> Option<String> {
        (0..MOST_DRAWS).find_map(|_| self.walk(random).filter(|word| !self.known.contains(word)))
    }

    fn walk(&self, random: &mut Random) -> Option<String> {
        let mut word = String::new();
        let mut before = [None, None];
        for length in 0..=LENGTH[1] {
            let Some(next) = *random.pick(self.next.get(&before)?)? else {
                return (length >= LENGTH[0]).then_some(word);
            };
            word.push(next);
            before = [before[1], Some(next)];
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_new_and_every_three_characters_are_those_of_a_known_word() {
        let known = ["banana", "bandana", "panama", "pan", "mana"];
        let words = InventedWords::of(known.into_iter());
        let spelled = |word: &str| -> BTreeSet<String> {
            let padded: Vec<char> = format!("^^{word}$").chars().collect();
            padded.windows(3).map(|three| three.iter().collect()).collect()
        };
        let allowed: BTreeSet<String> = known.iter().flat_map(|word| spelled(word)).collect();
        let mut random = Random::of(1, &["words"]);
        let drawn: BTreeSet<String> = (0..500).map(|_| words.draw(&mut random).unwrap()).collect();
        assert!(drawn.len() > 20, "{drawn:?}");
        for word in &drawn {
            assert!(!known.contains(&word.as_str()), "{word}");
            assert!((2..=12).contains(&word.chars().count()), "{word}");
            assert!(spelled(word).is_subset(&allowed), "{word}");
        }
        let again: BTreeSet<String> = {
            let other = InventedWords::of(known.into_iter().rev().chain(["pan mana"]));
            let mut random = Random::of(1, &["words"]);
            (0..500).map(|_| other.draw(&mut random).unwrap()).collect()
        };
        assert_eq!(drawn, again, "the order of the words counts");
    }

    #[test]
    fn where_nothing_new_can_be_spelled_there_is_no_word() {
        let mut random = Random::of(1, &[]);
        for words in [&["one"][..], &[], &["a", "b"], &["0123456789abcdef"]] {
            assert_eq!(
                InventedWords::of(words.iter().copied()).draw(&mut random),
                None,
                "{words:?}"
            );
        }
    }
}
