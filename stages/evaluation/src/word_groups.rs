//! Error rates of some of the words: by how often training saw them, of names, and where the language changes.
//!
//! A word of the reference that is deleted or substituted is an error of its own group; an inserted word is one of the group
//! that it belongs to itself, as in the biased and unbiased word error rates of contextual recognition (Le et al.,
//! "Contextualized streaming end-to-end speech recognition with trie-based deep biasing and shallow fusion", 2021). So the
//! groups of a partition of the words add up to the word error rate.
//!
//! Tags of languages inside of texts belong to no group. The plain word error rate counts them as words, as NeMo does; the groups
//! then add up to the normalised one, if its rules remove tags.

use std::collections::{BTreeMap, HashMap};

use flow_text::language_tag::{next_tag, split_tag};

use crate::alignment::aligned;
use crate::normalize::Normalizer;
use unicode_script::Script;

use crate::script::script_of;
use crate::wer::{EditCounts, words};

/// What is measured.
#[derive(Clone, Debug, Default)]
pub struct WordMeasure {
    pub rare: Option<TrainingCounts>,
    /// Names, each of one word or several.
    pub names: Vec<String>,
    /// Where script or language change.
    pub switches: bool,
}

impl WordMeasure {
    pub fn is_given(&self) -> bool {
        self.rare.is_some() || !self.names.is_empty() || self.switches
    }
}

/// How often words were seen in training.
#[derive(Clone, Debug, Default)]
pub struct TrainingCounts {
    counts: HashMap<String, u64>,
    /// Lower edges of the ranges with separate rates, from the second one on, rising.
    bounds: Vec<u64>,
}

impl TrainingCounts {
    /// `bounds`: the first counts of all ranges but the lowest, which begins with 0.
    pub fn new(bounds: Vec<u64>) -> Self {
        TrainingCounts {
            counts: HashMap::new(),
            bounds,
        }
    }

    /// Counts the words of a text of training, normalised as those that are scored.
    pub fn add(&mut self, text: &str, lang: &str, normalizer: &Normalizer) {
        for said in tagged_words(text, lang, normalizer) {
            let count = self.counts.entry(said.word).or_default();
            *count = count.saturating_add(1);
        }
    }

    fn range(&self, word: &str) -> usize {
        let count = self.counts.get(word).copied().unwrap_or(0);
        self.bounds.partition_point(|bound| *bound <= count)
    }

    fn label(&self, range: usize) -> String {
        let first = range
            .checked_sub(1)
            .and_then(|below| self.bounds.get(below))
            .copied()
            .unwrap_or(0);
        match self.bounds.get(range) {
            Some(end) if *end == first + 1 => first.to_string(),
            Some(end) => format!("{first} to {}", end - 1),
            None => format!("{first} or more"),
        }
    }
}

/// Errors of the groups of words.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WordFigures {
    /// By counts in training, from the rarest: label and errors; empty ranges are left out.
    pub rare: Vec<(String, EditCounts)>,
    pub names: Option<NameFigures>,
    pub switches: Option<SwitchFigures>,
}

impl WordFigures {
    /// The groups with their names, as tables show them.
    pub fn rows(&self) -> Vec<(String, &EditCounts)> {
        let rare = self.rare.iter();
        let mut rows: Vec<(String, &EditCounts)> = rare
            .map(|(label, counts)| (format!("{label} times in training"), counts))
            .collect();
        if let Some(names) = &self.names {
            rows.push(("names".to_owned(), &names.words));
            rows.push(("other words".to_owned(), &names.others));
        }
        if let Some(switches) = &self.switches {
            rows.push(("where script or language change".to_owned(), &switches.points));
            rows.push(("elsewhere".to_owned(), &switches.elsewhere));
        }
        rows
    }
}

/// Errors of names.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NameFigures {
    /// Errors of the words of names, and those of all others.
    pub words: EditCounts,
    pub others: EditCounts,
    /// Names in the references, and those of them whose words are all right.
    pub occurrences: u64,
    pub correct: u64,
}

/// Errors where script or language change.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SwitchFigures {
    /// Of the first words in another script or language than the word before, with words inserted right before them.
    pub points: EditCounts,
    /// Of all other words.
    pub elsewhere: EditCounts,
}

/// A word of a text.
#[derive(Clone, Debug, PartialEq)]
struct Said {
    word: String,
    /// The language of the tag before it in the text (not that at its beginning), if any.
    tag: Option<String>,
}

/// The words of a text, normalised. Tags of languages between words are no words here.
fn tagged_words(text: &str, lang: &str, normalizer: &Normalizer) -> Vec<Said> {
    let (_, mut rest) = split_tag(text);
    let mut tag: Option<String> = None;
    let mut said = Vec::new();
    let mut add = |part: &str, tag: &Option<String>| {
        let part = normalizer.apply(part, lang);
        said.extend(words(&part).into_iter().map(|word| Said {
            word: word.to_owned(),
            tag: tag.clone(),
        }));
    };
    while let Some((before, code, after)) = next_tag(rest) {
        add(before, &tag);
        tag = Some(code.to_owned());
        rest = after;
    }
    add(rest, &tag);
    said
}

/// An edit, by places in the reference and in the hypothesis.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Edit {
    Match(usize),
    Substitution(usize),
    Deletion(usize),
    /// Of a word of the hypothesis, before a word of the reference.
    Insertion(usize, usize),
}

/// The edits of a shortest way, for texts of any length.
fn edits(reference: &[Said], hypothesis: &[Said]) -> Vec<Edit> {
    let mut numbers: HashMap<&str, u32> = HashMap::new();
    let mut sides = [
        Vec::with_capacity(reference.len()),
        Vec::with_capacity(hypothesis.len()),
    ];
    for (side, said) in sides.iter_mut().zip([reference, hypothesis]) {
        for said in said {
            let next = numbers.len() as u32;
            side.push(*numbers.entry(said.word.as_str()).or_insert(next));
        }
    }
    let [said, heard] = sides;
    let mut edits = Vec::with_capacity(said.len());
    let (mut row, mut column) = (0, 0);
    let mut until = |row_end: usize, column_end: usize, edits: &mut Vec<Edit>| {
        edits.extend((row..row_end).map(Edit::Deletion));
        edits.extend((column..column_end).map(|column| Edit::Insertion(column, row_end)));
        (row, column) = (row_end + 1, column_end + 1);
    };
    for (at, other) in aligned(&said, &heard) {
        until(at, other, &mut edits);
        edits.push(match said[at] == heard[other] {
            true => Edit::Match(at),
            false => Edit::Substitution(at),
        });
    }
    until(said.len(), heard.len(), &mut edits);
    edits
}

fn count(counts: &mut EditCounts, edit: Edit) {
    match edit {
        Edit::Match(_) => counts.units += 1,
        Edit::Substitution(_) => {
            counts.units += 1;
            counts.substitutions += 1;
        }
        Edit::Deletion(_) => {
            counts.units += 1;
            counts.deletions += 1;
        }
        Edit::Insertion(..) => counts.insertions += 1,
    }
}

/// Adds up the errors of groups of words over utterances.
pub struct WordTally<'m> {
    measure: &'m WordMeasure,
    normalizer: &'m Normalizer,
    rare: Vec<EditCounts>,
    names: NameFigures,
    switches: SwitchFigures,
    /// Names as they are normalised in each language: by their first words.
    normalized: BTreeMap<String, HashMap<String, Vec<Vec<String>>>>,
}

impl<'m> WordTally<'m> {
    pub fn new(measure: &'m WordMeasure, normalizer: &'m Normalizer) -> Self {
        let ranges = measure.rare.as_ref().map_or(0, |rare| rare.bounds.len() + 1);
        WordTally {
            measure,
            normalizer,
            rare: vec![EditCounts::default(); ranges],
            names: NameFigures::default(),
            switches: SwitchFigures::default(),
            normalized: BTreeMap::new(),
        }
    }

    pub fn add(&mut self, reference: &str, hypothesis: &str, lang: &str) {
        if !self.measure.is_given() {
            return;
        }
        let [said, heard] = [reference, hypothesis].map(|text| tagged_words(text, lang, self.normalizer));
        let edits = edits(&said, &heard);
        if let Some(counts) = &self.measure.rare {
            for edit in &edits {
                let word = match edit {
                    Edit::Match(at) | Edit::Substitution(at) | Edit::Deletion(at) => &said[*at],
                    Edit::Insertion(at, _) => &heard[*at],
                };
                count(&mut self.rare[counts.range(&word.word)], *edit);
            }
        }
        if !self.measure.names.is_empty() {
            self.add_names(&said, &heard, &edits, lang);
        }
        if self.measure.switches {
            let points = switch_points(&said);
            for edit in &edits {
                let at = match edit {
                    Edit::Match(at) | Edit::Substitution(at) | Edit::Deletion(at) | Edit::Insertion(_, at) => *at,
                };
                let is_point = points.get(at).copied().unwrap_or(false);
                let counts = match is_point {
                    true => &mut self.switches.points,
                    false => &mut self.switches.elsewhere,
                };
                count(counts, *edit);
            }
        }
    }

    fn add_names(&mut self, said: &[Said], heard: &[Said], edits: &[Edit], lang: &str) {
        if !self.normalized.contains_key(lang) {
            let mut names: HashMap<String, Vec<Vec<String>>> = HashMap::new();
            for name in &self.measure.names {
                let name = self.normalizer.apply(name, lang);
                let name: Vec<String> = words(&name).into_iter().map(str::to_owned).collect();
                if let Some(first) = name.first() {
                    names.entry(first.clone()).or_default().push(name);
                }
            }
            // The longest one that is found counts.
            names
                .values_mut()
                .for_each(|names| names.sort_by_key(|name| std::cmp::Reverse(name.len())));
            self.normalized.insert(lang.to_owned(), names);
        }
        let Some(names) = self.normalized.get(lang) else { return };
        let (in_said, in_heard) = (found(names, said), found(names, heard));
        let marks = |length: usize, found: &[(usize, usize)]| {
            let mut marks = vec![false; length];
            found.iter().for_each(|(start, end)| marks[*start..*end].fill(true));
            marks
        };
        let (said_marks, heard_marks) = (marks(said.len(), &in_said), marks(heard.len(), &in_heard));
        let mut is_right = vec![false; said.len()];
        for edit in edits {
            let is_name = match edit {
                Edit::Match(at) | Edit::Substitution(at) | Edit::Deletion(at) => said_marks[*at],
                Edit::Insertion(at, _) => heard_marks[*at],
            };
            if let Edit::Match(at) = edit {
                is_right[*at] = true;
            }
            let counts = match is_name {
                true => &mut self.names.words,
                false => &mut self.names.others,
            };
            count(counts, *edit);
        }
        self.names.occurrences += in_said.len() as u64;
        let right = in_said
            .iter()
            .filter(|(start, end)| is_right[*start..*end].iter().all(|right| *right));
        self.names.correct += right.count() as u64;
    }

    pub fn figures(self) -> WordFigures {
        let label = |range| {
            self.measure
                .rare
                .as_ref()
                .map_or(String::new(), |rare| rare.label(range))
        };
        let rare = self
            .rare
            .iter()
            .enumerate()
            .filter(|(_, counts)| counts.units > 0 || counts.insertions > 0);
        WordFigures {
            rare: rare.map(|(range, counts)| (label(range), *counts)).collect(),
            names: (!self.measure.names.is_empty()).then_some(self.names),
            switches: self.measure.switches.then_some(self.switches),
        }
    }
}

/// Where names are: begin and end of each, from left to right, without overlap.
fn found(names: &HashMap<String, Vec<Vec<String>>>, said: &[Said]) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut place = 0;
    while place < said.len() {
        let is_here = |name: &&Vec<String>| {
            let rest = &said[place..];
            rest.len() >= name.len() && name.iter().zip(rest).all(|(word, said)| *word == said.word)
        };
        let candidates = names.get(&said[place].word);
        match candidates.and_then(|names| names.iter().find(is_here)) {
            Some(name) => {
                found.push((place, place + name.len()));
                place += name.len();
            }
            None => place += 1,
        }
    }
    found
}

/// For each word, whether it is in another language (by tags in the text) or script than the last one before it that has one.
fn switch_points(said: &[Said]) -> Vec<bool> {
    let mut points = Vec::with_capacity(said.len());
    let mut before: Option<(Option<&str>, Script)> = None;
    for Said { word, tag } in said {
        // Numbers, for instance, belong to what is before them.
        let now = script_of(word).map(|script| (tag.as_deref(), script));
        points.push(now.is_some_and(|now| before.is_some_and(|before| before != now)));
        before = now.or(before);
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::normalize::Normalization;
    use crate::wer::{score, score_with};
    use proptest::prelude::*;

    fn keep_marks() -> Normalizer {
        Normalizer {
            normalization: Normalization::KeepMarks,
            ..Normalizer::default()
        }
    }

    fn counts(units: u64, substitutions: u64, insertions: u64, deletions: u64) -> EditCounts {
        EditCounts {
            units,
            substitutions,
            insertions,
            deletions,
        }
    }

    #[test]
    fn rare_words_are_those_that_training_had_seldom() {
        let normalizer = keep_marks();
        let mut rare = TrainingCounts::new(vec![1, 3]);
        rare.add("<|en|> The the THE cat", "en", &normalizer);
        let measure = WordMeasure {
            rare: Some(rare),
            ..WordMeasure::default()
        };
        let mut tally = WordTally::new(&measure, &normalizer);
        // `zebra` is new and wrong, `the` is inserted.
        tally.add("<|en|> The cat, the zebra.", "<|en|> the the cat the sabre", "en");
        let figures = tally.figures();
        let expected = [
            ("0", counts(1, 1, 0, 0)),
            ("1 to 2", counts(1, 0, 0, 0)),
            ("3 or more", counts(2, 0, 1, 0)),
        ];
        assert_eq!(figures.rare, expected.map(|(label, counts)| (label.to_owned(), counts)));
        assert_eq!((figures.names, figures.switches), (None, None));
    }

    #[test]
    fn names_count_as_a_whole() {
        let measure = WordMeasure {
            names: ["New York", "york", "Anna"].map(str::to_owned).to_vec(),
            ..WordMeasure::default()
        };
        let normalizer = keep_marks();
        let mut tally = WordTally::new(&measure, &normalizer);
        tally.add("Anna is in New York", "anna is in new cork", "en");
        tally.add("no one", "no one anna", "en");
        let names = tally.figures().names.unwrap();
        assert_eq!(names.words, counts(3, 1, 1, 0));
        assert_eq!(names.others, counts(4, 0, 0, 0));
        assert_eq!((names.occurrences, names.correct), (2, 1));
    }

    #[test]
    fn points_of_code_switching_are_found_by_script_and_by_tags() {
        let points = |text: &str| switch_points(&tagged_words(text, "", &Normalizer::default()));
        assert_eq!(points("मैं office जा 12 रहा"), [false, true, true, false, false]);
        assert_eq!(
            points("<|de|> das <|en|> meeting is <|de|>um"),
            [false, true, false, true]
        );
        assert_eq!(points("12 one"), [false, false]);
        let measure = WordMeasure {
            switches: true,
            ..WordMeasure::default()
        };
        let normalizer = Normalizer::default();
        let mut tally = WordTally::new(&measure, &normalizer);
        tally.add("मैं office जा रहा", "मैं the ऑफिस रहा", "hi");
        let switches = tally.figures().switches.unwrap();
        assert_eq!(switches.points.units + switches.elsewhere.units, 4);
        assert_eq!((switches.points.units, switches.points.errors()), (2, 2));
    }

    /// The plain rate counts tags inside of texts as words, as NeMo does; groups and normalised rates do not.
    #[test]
    fn tags_inside_of_texts_belong_to_no_group() {
        let (reference, hypothesis) = (
            "<|de|> das <|en|> meeting <|de|> ist gut",
            "<|de|> das <|en|> meting <|de|> ist",
        );
        let normalizer = keep_marks();
        let measure = WordMeasure {
            switches: true,
            ..WordMeasure::default()
        };
        for normalizer in [&Normalizer::default(), &normalizer] {
            let mut tally = WordTally::new(&measure, normalizer);
            tally.add(reference, hypothesis, "de");
            let switches = tally.figures().switches.unwrap();
            assert_eq!(switches.points, counts(2, 1, 0, 0));
            assert_eq!(switches.elsewhere, counts(2, 0, 0, 1));
        }
        let score = score_with(reference, hypothesis, "de", &normalizer);
        assert_eq!(score.words, counts(6, 1, 0, 1));
        assert_eq!(score.normalized.unwrap().0, counts(4, 1, 0, 1));
    }

    proptest! {
        /// Groups that divide the words add up to the word error rate.
        #[test]
        fn groups_add_up(reference in "[abc आ ]{0,20}", hypothesis in "[abc आ ]{0,20}", training in "[ab ]{0,10}") {
            let normalizer = Normalizer::default();
            let mut rare = TrainingCounts::new(vec![1, 2]);
            rare.add(&training, "", &normalizer);
            let measure = WordMeasure { rare: Some(rare), names: vec!["a b".into(), "c".into()], switches: true };
            let mut tally = WordTally::new(&measure, &normalizer);
            tally.add(&reference, &hypothesis, "");
            let figures = tally.figures();
            let all = score(&reference, &hypothesis).words;
            let sum = |parts: &[EditCounts]| {
                let mut sum = EditCounts::default();
                parts.iter().for_each(|part| sum.add(part));
                sum
            };
            let parts: Vec<EditCounts> = figures.rare.iter().map(|(_, counts)| *counts).collect();
            prop_assert_eq!(sum(&parts), all);
            let names = figures.names.unwrap();
            prop_assert_eq!(sum(&[names.words, names.others]), all);
            let switches = figures.switches.unwrap();
            prop_assert_eq!(sum(&[switches.points, switches.elsewhere]), all);
        }
    }
}
