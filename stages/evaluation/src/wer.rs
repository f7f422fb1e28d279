//! Word and character error rates, as NeMo counts them: the sum of edit distances over the sum of
//! reference units, with no normalisation of the text (case and punctuation count); and optionally the same after
//! normalisation of both texts.

use std::collections::BTreeMap;

use flow_text::language_tag::split_tag;

use crate::bootstrap::Intervals;
use crate::normalize::Normalizer;

/// The edits that turn a reference into its hypothesis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EditCounts {
    /// Words or characters of the reference.
    pub units: u64,
    pub substitutions: u64,
    pub insertions: u64,
    pub deletions: u64,
}

impl EditCounts {
    pub fn errors(&self) -> u64 {
        self.substitutions + self.insertions + self.deletions
    }

    /// Errors per reference unit. Without reference units: infinite, as NeMo has it for a corpus.
    pub fn rate(&self) -> f64 {
        if self.units == 0 {
            f64::INFINITY
        } else {
            self.errors() as f64 / self.units as f64
        }
    }

    /// The rate of one utterance: 0 when both sides are empty.
    pub fn utterance_rate(&self) -> f64 {
        if self.units == 0 && self.errors() == 0 {
            0.0
        } else {
            self.rate()
        }
    }

    pub fn add(&mut self, other: &EditCounts) {
        self.units += other.units;
        self.substitutions += other.substitutions;
        self.insertions += other.insertions;
        self.deletions += other.deletions;
    }
}

/// White space as Python's `str.split()` sees it: Unicode white space and U+001C to U+001F.
pub fn is_white_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// The words of a text, cut as Python's `str.split()` cuts them.
pub fn words(text: &str) -> Vec<&str> {
    text.split(is_white_space).filter(|word| !word.is_empty()).collect()
}

/// Compares two texts word by word.
pub fn word_edits(reference: &str, hypothesis: &str) -> EditCounts {
    edits(&words(reference), &words(hypothesis))
}

/// Compares two texts by Unicode code points, spaces included.
pub fn character_edits(reference: &str, hypothesis: &str) -> EditCounts {
    let reference: Vec<char> = reference.chars().collect();
    let hypothesis: Vec<char> = hypothesis.chars().collect();
    edits(&reference, &hypothesis)
}

/// The smallest number of edits. Which ones, where several ways are equally short, follows Kaldi's rule,
/// which NeMo uses: an insertion before a deletion before a substitution or match.
pub fn edits<T: PartialEq>(reference: &[T], hypothesis: &[T]) -> EditCounts {
    #[derive(Clone, Copy, Default)]
    struct Cell {
        errors: u32,
        insertions: u32,
        deletions: u32,
    }
    let deleted = |cell: Cell| Cell {
        errors: cell.errors + 1,
        deletions: cell.deletions + 1,
        ..cell
    };
    let inserted = |cell: Cell| Cell {
        errors: cell.errors + 1,
        insertions: cell.insertions + 1,
        ..cell
    };
    // One column per hypothesis unit; row i represents the first i reference units.
    let mut column: Vec<Cell> = Vec::with_capacity(reference.len() + 1);
    let mut last = Cell::default();
    column.push(last);
    for _ in reference {
        last = deleted(last);
        column.push(last);
    }
    for unit in hypothesis {
        let mut diagonal = column[0];
        let mut below = inserted(diagonal);
        column[0] = below;
        for (cell, other) in column[1..].iter_mut().zip(reference) {
            let (insertion, deletion) = (inserted(*cell), deleted(below));
            let kept = Cell {
                errors: diagonal.errors + u32::from(unit != other),
                ..diagonal
            };
            diagonal = *cell;
            below = if kept.errors < insertion.errors && kept.errors < deletion.errors {
                kept
            } else if deletion.errors < insertion.errors {
                deletion
            } else {
                insertion
            };
            *cell = below;
        }
        last = below;
    }
    EditCounts {
        units: reference.len() as u64,
        substitutions: u64::from(last.errors - last.insertions - last.deletions),
        insertions: u64::from(last.insertions),
        deletions: u64::from(last.deletions),
    }
}

/// One utterance, scored.
#[derive(Clone, Debug, PartialEq)]
pub struct UtteranceScore {
    pub words: EditCounts,
    pub characters: EditCounts,
    /// Words and characters after normalisation, where it was asked for.
    pub normalized: Option<Box<(EditCounts, EditCounts)>>,
    /// The tag of the reference, and that of the hypothesis.
    pub tags: (Option<String>, Option<String>),
}

/// Scores one utterance without its language tags, which are compared separately.
pub fn score(reference: &str, hypothesis: &str) -> UtteranceScore {
    score_with(reference, hypothesis, "", &Normalizer::default())
}

/// As [`score`], and also after normalisation by the rules of language `lang` (empty where it is not known), trimmed.
pub fn score_with(reference: &str, hypothesis: &str, lang: &str, normalizer: &Normalizer) -> UtteranceScore {
    let (reference_tag, reference) = split_tag(reference);
    let (hypothesis_tag, hypothesis) = split_tag(hypothesis);
    let normalized = normalizer.is_given().then(|| {
        let (reference, hypothesis) = (normalizer.apply(reference, lang), normalizer.apply(hypothesis, lang));
        let (reference, hypothesis) = (reference.trim_matches(' '), hypothesis.trim_matches(' '));
        Box::new((
            word_edits(reference, hypothesis),
            character_edits(reference, hypothesis),
        ))
    });
    UtteranceScore {
        words: word_edits(reference, hypothesis),
        characters: character_edits(reference, hypothesis),
        normalized,
        tags: (reference_tag.map(str::to_owned), hypothesis_tag.map(str::to_owned)),
    }
}

/// The sums over many utterances.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Score {
    pub utterances: u64,
    pub words: EditCounts,
    pub characters: EditCounts,
    /// The same after normalisation; nothing where none was asked for.
    pub normalized_words: EditCounts,
    pub normalized_characters: EditCounts,
    /// Utterances whose hypothesis begins with another tag than the reference, or with none.
    pub wrong_tags: u64,
    /// Utterances whose reference has a tag.
    pub tagged: u64,
    pub seconds: f64,
    /// Intervals by the bootstrap, where they were computed.
    pub intervals: Option<Intervals>,
    spread: Spread,
}

/// Sums over utterances, of errors and words of each.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Spread {
    errors_squared: f64,
    words_squared: f64,
    errors_by_words: f64,
}

impl Score {
    pub fn add(&mut self, utterance: &UtteranceScore, seconds: f64) {
        self.utterances += 1;
        self.words.add(&utterance.words);
        self.characters.add(&utterance.characters);
        if let Some(normalized) = &utterance.normalized {
            self.normalized_words.add(&normalized.0);
            self.normalized_characters.add(&normalized.1);
        }
        if utterance.tags.0.is_some() {
            self.tagged += 1;
            self.wrong_tags += u64::from(utterance.tags.0 != utterance.tags.1);
        }
        self.seconds += seconds;
        let (errors, words) = (utterance.words.errors() as f64, utterance.words.units as f64);
        self.spread.errors_squared += errors * errors;
        self.spread.words_squared += words * words;
        self.spread.errors_by_words += errors * words;
    }

    /// The 95 % confidence interval of the word error rate, where utterances are independent: that of a ratio of sums, by
    /// its linearisation. None for few utterances, and where there is no error: it says nothing there.
    pub fn word_interval(&self) -> Option<(f64, f64)> {
        const FEWEST: u64 = 10;
        // Of the normal distribution.
        const QUANTILE: f64 = 1.959_963_985;
        if self.utterances < FEWEST || self.words.units == 0 || self.words.errors() == 0 {
            return None;
        }
        let (count, rate) = (self.utterances as f64, self.words.rate());
        let Spread {
            errors_squared,
            words_squared,
            errors_by_words,
        } = self.spread;
        // Of what the errors of each utterance are beside the rate times its words.
        let squares = (errors_squared - 2.0 * rate * errors_by_words + rate * rate * words_squared).max(0.0);
        let half = QUANTILE * (squares * count / (count - 1.0)).sqrt() / self.words.units as f64;
        Some(((rate - half).max(0.0), rate + half))
    }

    /// The 95 % confidence interval of the word error rate that is shown: that of the bootstrap where it was computed, else
    /// [`Score::word_interval`].
    pub fn shown_interval(&self) -> Option<(f64, f64)> {
        match &self.intervals {
            Some(intervals) => intervals.rates[0],
            None => self.word_interval(),
        }
    }
}

/// Scores by language and over all, and the confusion of tags.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    pub overall: Score,
    pub languages: BTreeMap<String, Score>,
    /// (tag of the reference, tag of the hypothesis; empty: none) -> utterances, of all whose reference has a tag.
    pub tag_confusion: BTreeMap<(String, String), u64>,
}

impl Scores {
    /// Adds one utterance of language `lang`.
    pub fn add(&mut self, lang: &str, utterance: &UtteranceScore, seconds: f64) {
        self.overall.add(utterance, seconds);
        self.languages
            .entry(lang.to_owned())
            .or_default()
            .add(utterance, seconds);
        if let (Some(reference), hypothesis) = &utterance.tags {
            let pair = (reference.clone(), hypothesis.clone().unwrap_or_default());
            *self.tag_confusion.entry(pair).or_default() += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::normalize::Normalization;
    use proptest::prelude::*;
    use serde_json::Value;

    #[test]
    fn the_interval_is_that_of_resampled_utterances() {
        let utterance = |words: u64, errors: u64| UtteranceScore {
            words: EditCounts {
                units: words,
                substitutions: errors,
                ..EditCounts::default()
            },
            characters: EditCounts::default(),
            normalized: None,
            tags: (None, None),
        };
        let mut random = flow_random::SplitMix64::new(7);
        let of = |random: &mut flow_random::SplitMix64, below: u64| random.next_u64() % below;
        // Half of the utterances have no error, others many.
        let all: Vec<(u64, u64)> = (0..200)
            .map(|_| {
                let words = 1 + of(&mut random, 20);
                (
                    words,
                    if of(&mut random, 2) == 0 {
                        0
                    } else {
                        of(&mut random, words + 1)
                    },
                )
            })
            .collect();
        let mut score = Score::default();
        all.iter()
            .for_each(|(words, errors)| score.add(&utterance(*words, *errors), 1.0));
        let (low, high) = score.word_interval().unwrap();
        let mut rates: Vec<f64> = (0..4000)
            .map(|_| {
                let drawn = (0..all.len()).map(|_| all[of(&mut random, 200) as usize]);
                let (words, errors) = drawn.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
                errors as f64 / words as f64
            })
            .collect();
        rates.sort_by(f64::total_cmp);
        // A twentieth of its width, more than the chance in 4,000 drawings.
        let near = |a: f64, b: f64| (a - b).abs() < (high - low) / 20.0;
        assert!(
            near(low, rates[100]) && near(high, rates[3899]),
            "{low} {high} {} {}",
            rates[100],
            rates[3899]
        );

        let mut few = Score::default();
        (0..9).for_each(|_| few.add(&utterance(5, 1), 1.0));
        assert_eq!(few.word_interval(), None);
        // All alike: no spread but the root of what rounding leaves of squares that cancel out.
        few.add(&utterance(5, 1), 1.0);
        let (low, high) = few.word_interval().unwrap();
        assert!((low - 0.2).abs() < 1e-6 && (high - 0.2).abs() < 1e-6);
        let mut right = Score::default();
        (0..20).for_each(|_| right.add(&utterance(5, 0), 1.0));
        assert_eq!(right.word_interval(), None);
    }

    fn golden() -> Value {
        let folder = std::env::var("FLOW_TEST_GOLDEN_MODEL")
            .unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/golden/model").into());
        let text =
            flow_nn::tensor_files::read_packed(format!("{folder}/wer.json").as_ref(), 1).expect("golden wer.json");
        let text = String::from_utf8(text).expect("golden wer.json is text");
        // Python writes an infinite rate as a bare word, which JSON does not know.
        serde_json::from_str(&text.replace("Infinity", "\"inf\"")).expect("golden wer.json is JSON")
    }

    fn number(value: &Value) -> f64 {
        if value == "inf" {
            f64::INFINITY
        } else {
            value.as_f64().expect("a number")
        }
    }

    fn check(counts: &EditCounts, golden: &Value, what: &str) {
        let share = |n: u64| {
            if counts.units == 0 {
                f64::INFINITY
            } else {
                n as f64 / counts.units as f64
            }
        };
        assert_eq!(counts.units as f64, number(&golden["count"]), "{what}: units");
        // The same quotients of small integers; NeMo adds some of them up in another order.
        let same = |ours: f64, golden: &Value, part: &str| {
            let theirs = number(golden);
            assert!(
                ours == theirs || (ours - theirs).abs() < 1e-12,
                "{what}: {part}: {ours} is not {theirs}"
            );
        };
        same(counts.rate(), &golden["rate"], "rate");
        same(share(counts.insertions), &golden["ins"], "insertions");
        same(share(counts.deletions), &golden["dele"], "deletions");
        same(share(counts.substitutions), &golden["sub"], "substitutions");
        same(counts.utterance_rate(), &golden["per_utt"], "of one utterance");
    }

    #[test]
    fn rates_are_nemos() {
        let golden = golden();
        let (mut all_words, mut all_characters) = (EditCounts::default(), EditCounts::default());
        let pairs = golden["pairs"].as_array().expect("pairs");
        assert!(!pairs.is_empty());
        for pair in pairs {
            let (reference, hypothesis) = (pair["ref"].as_str().expect("ref"), pair["hyp"].as_str().expect("hyp"));
            let what = format!("{reference:?} against {hypothesis:?}");
            let (by_word, by_character) = (
                word_edits(reference, hypothesis),
                character_edits(reference, hypothesis),
            );
            check(&by_word, &pair["wer"], &what);
            check(&by_character, &pair["cer"], &what);
            all_words.add(&by_word);
            all_characters.add(&by_character);
        }
        assert_eq!(all_words.rate(), number(&golden["corpus"]["wer"]));
        assert_eq!(all_characters.rate(), number(&golden["corpus"]["cer"]));
    }

    #[test]
    fn the_tag_is_no_word() {
        let same = score("<|hi|> ek do", "<|hi|> ek do");
        assert_eq!((same.words.units, same.words.errors()), (2, 0));
        let other = score("<|hi|> ek do", "<|ur|>ek do");
        assert_eq!(other.words.errors(), 0);
        let none = score("<|hi|> ek do", "ek");
        let mut scores = Scores::default();
        for utterance in [&same, &other, &none] {
            scores.add("hi", utterance, 1.0);
        }
        assert_eq!((scores.overall.tagged, scores.overall.wrong_tags), (3, 2));
        assert_eq!(scores.tag_confusion.get(&("hi".into(), "ur".into())), Some(&1));
        assert_eq!(scores.tag_confusion.get(&("hi".into(), String::new())), Some(&1));
        assert_eq!(scores.tag_confusion.get(&("hi".into(), "hi".into())), Some(&1));
    }

    /// The normalised rates do not change the plain ones.
    #[test]
    fn normalised_rates_stand_beside_the_plain_ones() {
        let normalizer = Normalizer {
            normalization: Normalization::WhisperBasic,
            ..Normalizer::default()
        };
        let (reference, hypothesis) = ("<|en|> Well, yes.", "<|en|> well yes no");
        let both = score_with(reference, hypothesis, "en", &normalizer);
        let plain = score(reference, hypothesis);
        assert_eq!((both.words, both.characters), (plain.words, plain.characters));
        assert_eq!((both.words.units, both.words.errors()), (2, 3));
        let (words, characters) = *both.normalized.expect("normalised counts");
        assert_eq!((words.units, words.errors()), (2, 1));
        // The space that replaces the full stop does not count as a character.
        assert_eq!((characters.units, characters.errors()), (8, 3));
        assert_eq!(plain.normalized, None);
    }

    proptest! {
        #[test]
        fn edits_are_a_distance(a in "[ab ]{0,12}", b in "[ab ]{0,12}") {
            let forward = character_edits(&a, &b);
            let backward = character_edits(&b, &a);
            prop_assert_eq!(forward.errors(), backward.errors());
            prop_assert_eq!(forward.errors() == 0, a == b);
            prop_assert!(forward.errors() <= a.len().max(b.len()) as u64);
            prop_assert_eq!(a.len() as u64 + forward.insertions, b.len() as u64 + forward.deletions);
        }
    }
}
