//! Which words of a window that grows are certain: those that two decodes in a row agree on.
//!
//! This is the policy LocalAgreement-2 of Macháček, Dabre and Bojar, "Turning Whisper into Real-Time Transcription System" (2023),
//! for a model that is not a streaming model: the window is decoded again and again while it grows, and what two decodes say alike
//! from the beginning of the undecided part on is decided. Decided words never change.

use flow_transcription::Word;

/// The words of a window so far. Times are seconds from the beginning of the window.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Agreement {
    decided: Vec<Word>,
    /// What the last decode had after the decided words.
    undecided: Vec<Word>,
}

impl Agreement {
    /// A window that begins with words that were decided before.
    pub fn with_decided(decided: Vec<Word>) -> Self {
        Agreement {
            decided,
            undecided: Vec::new(),
        }
    }

    /// Takes all words of a decode of the window, and gives those that became decided. Times may differ between decodes; those
    /// of the newer one are kept.
    pub fn update(&mut self, words: &[Word]) -> &[Word] {
        let rest = &words[self.place_after_decided(words)..];
        let agreed = rest
            .iter()
            .zip(&self.undecided)
            .take_while(|(now, before)| now.word == before.word)
            .count();
        let before = self.decided.len();
        self.decided.extend_from_slice(&rest[..agreed]);
        self.undecided = rest[agreed..].to_vec();
        &self.decided[before..]
    }

    /// Takes the words of the last decode, of the whole window: all that come after the decided words are decided, and given.
    pub fn finish(&mut self, words: &[Word]) -> &[Word] {
        let rest = &words[self.place_after_decided(words)..];
        let before = self.decided.len();
        self.decided.extend_from_slice(rest);
        self.undecided.clear();
        &self.decided[before..]
    }

    pub fn decided(&self) -> &[Word] {
        &self.decided
    }

    pub fn undecided(&self) -> &[Word] {
        &self.undecided
    }

    /// Cuts the window: takes away the decided words whose middles are before `at` (in seconds), and what is undecided. The
    /// words that stay keep their times, less `at`.
    pub fn split_off_before(&mut self, at: f64) -> Agreement {
        let middle = |word: &Word| (word.start + word.end) / 2.0;
        let count = self.decided.iter().take_while(|word| middle(word) < at).count();
        let rest = self.decided.split_off(count);
        let before = std::mem::take(&mut self.decided);
        self.undecided.clear();
        self.decided = rest
            .into_iter()
            .map(|word| Word {
                start: (word.start - at).max(0.0),
                end: (word.end - at).max(0.0),
                ..word
            })
            .collect();
        Agreement::with_decided(before)
    }

    /// How many words of a decode represent the decided ones: so many that the edit distance between both is least, and of equal
    /// ones the number that fits the times best.
    fn place_after_decided(&self, words: &[Word]) -> usize {
        let Some(last) = self.decided.last() else { return 0 };
        let bare_words: Vec<String> = words.iter().map(|word| bare(&word.word)).collect();
        // The last row of the table of Levenshtein distances: of all decided words to the first words of the decode.
        let mut row: Vec<usize> = (0..=words.len()).collect();
        for (index, decided) in self.decided.iter().enumerate() {
            let mut diagonal = row[0];
            row[0] = index + 1;
            let bare_decided = bare(&decided.word);
            for (number, word) in bare_words.iter().enumerate() {
                let substituted = diagonal + usize::from(*word != bare_decided);
                diagonal = row[number + 1];
                row[number + 1] = substituted.min(diagonal + 1).min(row[number] + 1);
            }
        }
        let by_time = words
            .iter()
            .take_while(|word| (word.start + word.end) / 2.0 < last.end)
            .count();
        (0..row.len())
            .min_by_key(|&count| (row[count], count.abs_diff(by_time)))
            .unwrap_or(0)
    }
}

/// The word in lower case, without the marks around it. A word that is nothing but marks stays as it is.
fn bare(word: &str) -> String {
    match word.trim_matches(|c: char| !c.is_alphanumeric()) {
        "" => word.to_owned(),
        letters => letters.to_lowercase(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn word(text: &str, start: f64) -> Word {
        Word {
            word: text.to_owned(),
            start,
            end: start + 0.25,
            ..Word::default()
        }
    }

    /// Words each 0.3 s.
    fn words(text: &str) -> Vec<Word> {
        let words = text.split_whitespace().enumerate();
        words.map(|(index, text)| word(text, index as f64 * 0.3)).collect()
    }

    fn texts(words: &[Word]) -> Vec<&str> {
        words.iter().map(|word| &word.word[..]).collect()
    }

    #[test]
    fn what_two_decodes_agree_on_is_decided() {
        let mut window = Agreement::default();
        assert_eq!(texts(window.update(&words("the cat"))), [""; 0]);
        assert_eq!(texts(window.undecided()), ["the", "cat"]);
        assert_eq!(texts(window.update(&words("the cats at"))), ["the"]);
        // The decode before has to say it as well, from the first undecided word on.
        assert_eq!(texts(window.update(&words("the cat sat on"))), [""; 0]);
        assert_eq!(texts(window.update(&words("the cat sat on a"))), ["cat", "sat", "on"]);
        assert_eq!(texts(window.undecided()), ["a"]);
        // What is decided stays, whatever is said of it later.
        assert_eq!(texts(window.update(&words("a cap sat on a mat"))), ["a"]);
        assert_eq!(texts(window.finish(&words("The cat sat on a mat."))), ["mat."]);
        assert_eq!(texts(window.decided()), ["the", "cat", "sat", "on", "a", "mat."]);
    }

    #[test]
    fn a_decode_that_loses_or_repeats_words_is_put_beside_the_decided_ones() {
        let decided = || Agreement::with_decided(words("no no no yes"));
        for (decode, rest) in [
            ("no no no yes no", vec!["no"]),
            ("no no yes maybe", vec!["maybe"]),
            ("No, no, no, yes. Right", vec!["Right"]),
            ("«NO» no no yes — !", vec!["—", "!"]),
            ("no", vec![]),
            ("", vec![]),
        ] {
            assert_eq!(texts(decided().finish(&words(decode))), rest, "{decode}");
        }
        // As near by its letters: times say that the third word is new.
        let mut window = Agreement::with_decided(words("a b"));
        let decode = [word("a", 0.0), word("c", 0.7), word("d", 1.0)];
        assert_eq!(texts(window.finish(&decode)), ["c", "d"]);
    }

    #[test]
    fn a_cut_takes_the_words_before_it() {
        let mut window = Agreement::with_decided(words("a b c d"));
        let before = window.split_off_before(0.6);
        assert_eq!(texts(before.decided()), ["a", "b"]);
        assert_eq!(texts(window.decided()), ["c", "d"]);
        assert!((window.decided()[1].start - 0.3).abs() < 1e-9);
        assert_eq!(texts(window.finish(&words("c d e"))), ["e"]);
    }

    proptest! {
        #[test]
        fn decided_words_never_change_and_all_are_given_once(
            decodes in prop::collection::vec(prop::collection::vec("[ab]", 0..6), 0..8),
        ) {
            let mut window = Agreement::default();
            let mut given: Vec<String> = Vec::new();
            for decode in &decodes {
                let new = window.update(&words(&decode.join(" ")));
                given.extend(new.iter().map(|word| word.word.clone()));
                prop_assert_eq!(texts(window.decided()), given.iter().map(String::as_str).collect::<Vec<_>>());
            }
        }

        /// Each decode hears the first words rightly, and others at its end: what is decided is right, and nothing is lost.
        #[test]
        fn ends_of_decodes_that_are_wrong_do_not_matter(
            truth in prop::collection::vec("[ab]", 0..12),
            decodes in prop::collection::vec((0usize..12, 0usize..3), 0..10),
        ) {
            let mut window = Agreement::default();
            for (step, (right, wrong)) in decodes.iter().enumerate() {
                let mut decode = truth[..truth.len().min(*right)].to_vec();
                decode.extend((0..*wrong).map(|index| format!("{step}x{index}")));
                window.update(&words(&decode.join(" ")));
                let decided = texts(window.decided());
                prop_assert!(decided.len() <= truth.len());
                prop_assert_eq!(&decided[..], &truth[..decided.len()]);
            }
            window.finish(&words(&truth.join(" ")));
            prop_assert_eq!(texts(window.decided()), truth);
        }
    }
}
