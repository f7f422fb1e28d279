//! How numbers and fillers are written: the words of segments are changed once they are certain.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::decoding_request::DecodingRequest;
use crate::lines::width;
use crate::number_words::{NumberWords, plain};
use crate::segments::{ends_sentence, joined};
use crate::tokens::Token;
use crate::word_key::is_mark;
use crate::{Segment, Word};

/// How numbers are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NumberStyle {
    /// As the model does.
    #[default]
    Keep,
    /// Cardinal numbers in digits.
    Digits,
    /// Digits in words.
    Words,
}

/// What is done about fillers, such as `uh`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FillerUse {
    /// They stay.
    #[default]
    Keep,
    /// They are left out.
    Drop,
}

/// The tables of languages: the bundled ones, and those of a user, which replace them.
#[derive(Clone, Debug)]
pub struct Tables(Vec<Arc<NumberWords>>);

impl Default for Tables {
    fn default() -> Self {
        Tables(NumberWords::bundled().to_vec())
    }
}

impl Tables {
    /// With those of files.
    ///
    /// # Errors
    /// If a file is not a table, or two are of one language: with its path.
    pub fn with_files<'a>(files: impl IntoIterator<Item = &'a Path>) -> Result<Self, String> {
        let mut own: Vec<Arc<NumberWords>> = Vec::new();
        for file in files {
            let table = NumberWords::read(file)?;
            if own.iter().any(|known| known.is_of(&table.language)) {
                return Err(format!(
                    "{}: another file has the language `{}`, too",
                    file.display(),
                    table.language
                ));
            }
            own.push(Arc::new(table));
        }
        Ok(Tables::with(own))
    }

    /// With that of a file, which is to be of this language.
    ///
    /// # Errors
    /// If it is not a table, or of another language: with its path.
    pub fn with_file_for(file: &Path, language: &str) -> Result<Self, String> {
        let table = NumberWords::read(file)?;
        match table.is_of(language) {
            true => Ok(Tables::with(vec![Arc::new(table)])),
            false => Err(format!(
                "{} is a table of `{}`, not of `{language}`",
                file.display(),
                table.language
            )),
        }
    }

    fn with(mut own: Vec<Arc<NumberWords>>) -> Self {
        let bundled = NumberWords::bundled().iter();
        let others = bundled.filter(|table| !own.iter().any(|known| known.is_of(&table.language)));
        let others: Vec<_> = others.cloned().collect();
        own.extend(others);
        Tables(own)
    }

    /// The style that a request asks for. What it does not say is that of `usual`, as far as there is a table of its language.
    ///
    /// # Errors
    /// If it asks for a style and names no language or several, or there is no table of its language: the field, and why.
    pub fn style(
        &self,
        request: &DecodingRequest,
        (numbers, fillers): (NumberStyle, FillerUse),
    ) -> Result<TextStyle, (&'static str, String)> {
        let field = match (request.numbers, request.fillers) {
            (Some(NumberStyle::Digits | NumberStyle::Words), _) => Some("numbers"),
            (_, Some(FillerUse::Drop)) => Some("fillers"),
            _ => None,
        };
        let table = match &request.languages[..] {
            [language] => self.0.iter().find(|table| table.is_of(language)),
            _ => None,
        };
        if let (Some(field), None) = (field, table) {
            let mut known: Vec<&str> = self.0.iter().map(|table| &*table.language).collect();
            known.sort_unstable();
            let known = known.join(", ");
            let why = match &request.languages[..] {
                [language] => format!("there is no table of `{language}`; there are tables of {known}"),
                [] => format!("it needs a `language`; there are tables of {known}"),
                languages => format!(
                    "it needs one `language`, not {}; there are tables of {known}",
                    languages.len()
                ),
            };
            return Err((field, why));
        }
        let style = TextStyle {
            numbers: request.numbers.unwrap_or(numbers),
            fillers: request.fillers.unwrap_or(fillers),
            table: table.cloned(),
        };
        Ok(match style.changes() {
            true => style,
            false => TextStyle::default(),
        })
    }
}

/// How the numbers and fillers of a recording are written. By default as the model does.
#[derive(Clone, Debug, Default)]
pub struct TextStyle {
    numbers: NumberStyle,
    fillers: FillerUse,
    table: Option<Arc<NumberWords>>,
}

/// A number among words: which words it has, and whether it is written.
struct Number {
    words: Range<usize>,
    value: u64,
    is_written: bool,
}

/// Most words of a number that are looked at.
const MOST_WORDS: usize = 40;

impl TextStyle {
    fn changes(&self) -> bool {
        self.table.is_some() && (self.numbers != NumberStyle::Keep || self.fillers != FillerUse::Keep)
    }

    /// Segments with words in this style; those that have no words left are left out. A number that was said in several words is one
    /// word, from the beginning of the first to the end of the last, with the least of their confidences. A number of several words
    /// that was one has shares of its time by their length. What is not changed keeps its bytes.
    pub fn apply(&self, segments: Vec<Segment>) -> Vec<Segment> {
        self.apply_with_tokens(segments, Vec::new()).0
    }

    /// [`TextStyle::apply`] of segments and the tokens of each of their words. A word that is made of several has the tokens of all,
    /// as they were said; of several words that are made of one, the first has them.
    pub fn apply_with_tokens(
        &self,
        segments: Vec<Segment>,
        tokens: Vec<Vec<Token>>,
    ) -> (Vec<Segment>, Vec<Vec<Token>>) {
        if !self.changes() {
            return (segments, tokens);
        }
        let has_tokens = !tokens.is_empty();
        let (mut styled, mut of_words) = (Vec::with_capacity(segments.len()), Vec::new());
        let mut tokens = tokens.into_iter();
        for segment in segments {
            let of_segment: Vec<Vec<Token>> = tokens.by_ref().take(segment.words.len()).collect();
            let (words, ranges): (Vec<Word>, Vec<Range<usize>>) =
                self.styled(segment.words.clone()).into_iter().unzip();
            if has_tokens {
                of_words.extend(
                    ranges
                        .into_iter()
                        .map(|range| spelled(of_segment.get(range).unwrap_or_default())),
                );
            }
            if words == segment.words {
                styled.push(segment);
            } else if !words.is_empty() {
                styled.push(Segment {
                    speaker: segment.speaker,
                    ..joined(words)
                });
            }
        }
        of_words.extend(tokens);
        (styled, of_words)
    }

    /// The words of a segment, or of what was said in one go, in this style.
    pub fn apply_to_words(&self, words: Vec<Word>) -> Vec<Word> {
        self.styled(words).into_iter().map(|(word, _)| word).collect()
    }

    /// Words in this style, each with those that it is made of.
    fn styled(&self, words: Vec<Word>) -> Vec<Made> {
        let mut words: Vec<Made> = (0..)
            .map(|index| index..index + 1)
            .zip(words)
            .map(|(of, word)| (word, of))
            .collect();
        let Some(table) = self.table.as_ref().filter(|_| self.changes()) else {
            return words;
        };
        if self.fillers == FillerUse::Drop {
            words = without_fillers(words, table);
        }
        match self.numbers {
            NumberStyle::Keep => words,
            NumberStyle::Digits => in_digits(words, table),
            NumberStyle::Words => in_words(words, table),
        }
    }
}

/// A word, and the words that it is made of.
type Made = (Word, Range<usize>);

/// The tokens of words, with spaces between the words.
fn spelled(words: &[Vec<Token>]) -> Vec<Token> {
    let mut tokens: Vec<Token> = Vec::new();
    for word in words {
        let begins = tokens.len();
        tokens.extend_from_slice(word);
        if begins > 0
            && let Some(first) = tokens.get_mut(begins)
        {
            first.bytes.insert(0, b' ');
        }
    }
    tokens
}

/// The marks before a word, the word, and the marks behind it.
fn parts(word: &str) -> (&str, &str, &str) {
    let is_mark = |c: char| is_mark(c) || ".,!?;:\"'()[]".contains(c);
    let core = word.trim_start_matches(is_mark);
    let before = &word[..word.len() - core.len()];
    let trimmed = core.trim_end_matches(is_mark);
    (before, trimmed, &core[trimmed.len()..])
}

/// Leaves fillers out. What ends a sentence goes to the word before, a capital at the beginning to the word after.
fn without_fillers(words: Vec<Made>, table: &NumberWords) -> Vec<Made> {
    let mut kept: Vec<Made> = Vec::with_capacity(words.len());
    let mut begins_with_capital = false;
    for (mut word, of) in words {
        let (_, core, after) = parts(&word.word);
        let is_capital = core.chars().next().is_some_and(char::is_uppercase);
        if table.is_filler(core) {
            let begins = kept.last().is_none_or(|(last, _)| ends_sentence(&last.word));
            begins_with_capital |= begins && is_capital;
            if let Some((last, _)) = kept.last_mut()
                && ends_sentence(&word.word)
                && !ends_sentence(&last.word)
            {
                let text = last.word.trim_end_matches([',', ';', ':', '،', '、']).to_owned();
                last.word = text + after;
            }
            continue;
        }
        if std::mem::take(&mut begins_with_capital)
            && let Some(first) = word.word.chars().next()
        {
            let rest = word.word.split_off(first.len_utf8());
            word.word = first.to_uppercase().collect::<String>() + &rest;
        }
        kept.push((word, of));
    }
    kept
}

/// Cardinal numbers in digits.
fn in_digits(made: Vec<Made>, table: &NumberWords) -> Vec<Made> {
    let words: Vec<&Word> = made.iter().map(|(word, _)| word).collect();
    let mut numbers: Vec<Number> = Vec::new();
    let mut at = 0;
    while at < words.len() {
        match number_at(&words, at, table) {
            Some((value, end)) => {
                numbers.push(Number {
                    words: at..end,
                    value,
                    is_written: true,
                });
                at = end;
            }
            None => at += 1,
        }
    }
    // Numbers that follow each other without a mark between.
    let follows = |first: &Number, second: &Number| {
        first.words.end == second.words.start && are_together(words[first.words.end - 1], words[second.words.start])
    };
    let mut begin = 0;
    while begin < numbers.len() {
        let next = numbers[begin..]
            .windows(2)
            .take_while(|pair| follows(&pair[0], &pair[1]));
        let end = begin + 1 + next.count();
        let before = numbers[begin].words.start.checked_sub(1).map(|before| words[before]);
        match &mut numbers[begin..end] {
            [one] if one.words.len() == 1 => {
                one.is_written = !table.is_not_alone(&plain(parts(&words[one.words.start].word).1));
            }
            [century, years]
                if table.has_paired_years()
                    && (13..=20).contains(&century.value)
                    && (10..=99).contains(&years.value) =>
            {
                let is_year = before.is_some_and(|before| {
                    let (_, core, after) = parts(&before.word);
                    after.is_empty() && table.is_before_years(&plain(core))
                });
                // Two numbers, or a year: nobody can say.
                century.is_written = is_year;
                century.value = 100 * century.value + years.value;
                century.words.end = years.words.end;
                years.words.start = years.words.end;
                years.is_written = false;
            }
            _ => {}
        }
        begin = end;
    }
    let mut changed: Vec<Made> = Vec::with_capacity(made.len());
    let mut at = 0;
    for number in numbers.into_iter().filter(|number| number.is_written) {
        changed.extend_from_slice(&made[at..number.words.start]);
        changed.push(merged(&made[number.words.clone()], number.value));
        at = number.words.end;
    }
    changed.extend_from_slice(&made[at..]);
    changed
}

/// Whether nothing is between two words, and one speaker says both.
fn are_together(first: &Word, second: &Word) -> bool {
    parts(&first.word).2.is_empty() && parts(&second.word).0.is_empty() && first.speaker == second.speaker
}

/// The longest number that is said from a word on, and the word after it.
fn number_at(words: &[&Word], at: usize, table: &NumberWords) -> Option<(u64, usize)> {
    let mut text = String::new();
    let mut ends = Vec::new();
    for (index, word) in words[at..].iter().take(MOST_WORDS).enumerate() {
        if index > 0 && !are_together(words[at + index - 1], word) {
            break;
        }
        text += &plain(parts(&word.word).1);
        ends.push(text.len());
    }
    let (value, end) = table.read_number(&text, &ends)?;
    let count = ends.iter().position(|known| *known == end)? + 1;
    Some((value, at + count))
}

/// The word of a number that was said in these words.
fn merged(made: &[Made], value: u64) -> Made {
    let ((first, first_of), (last, last_of)) = (&made[0], &made[made.len() - 1]);
    let words = made.iter().map(|(word, _)| word);
    let (before, after) = (parts(&first.word).0, parts(&last.word).2);
    let word = Word {
        word: format!("{before}{value}{after}"),
        start: first.start,
        end: words.clone().map(|word| word.end).fold(first.end, f64::max),
        confidence: words.filter_map(|word| word.confidence).reduce(f64::min),
        speaker: first.speaker.clone(),
    };
    (word, first_of.start..last_of.end)
}

/// Whole numbers of ASCII digits in words.
fn in_words(made: Vec<Made>, table: &NumberWords) -> Vec<Made> {
    let mut changed: Vec<Made> = Vec::with_capacity(made.len());
    for (word, of) in made {
        let (before, core, after) = parts(&word.word);
        let is_number = !core.is_empty() && core.bytes().all(|byte| byte.is_ascii_digit());
        // A number does not begin with 0; a code may.
        let is_number = is_number && (core == "0" || !core.starts_with('0'));
        let value: Option<u64> = core.parse().ok().filter(|_| is_number);
        let Some(written) = value.and_then(|value| table.written(value)) else {
            changed.push((word, of));
            continue;
        };
        let written = format!("{before}{written}{after}");
        let total: usize = written.split(' ').map(width).sum();
        let (start, length) = (word.start, word.end - word.start);
        let time = |letters: usize| match letters {
            letters if letters == total => word.end,
            letters => start + length * (letters as f64 / total as f64),
        };
        let mut behind = 0;
        for part in written.split(' ') {
            let begin = behind;
            behind += width(part);
            let part = Word {
                word: part.to_owned(),
                start: time(begin),
                end: time(behind),
                ..word.clone()
            };
            changed.push((part, if begin == 0 { of.clone() } else { of.end..of.end }));
        }
    }
    changed
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::segments::{SegmentRules, segments};

    /// Words of 0.5 s, the first with a confidence of 0.9, the next with 0.8, and so on.
    fn said(text: &str) -> Vec<Word> {
        let words = text.split(' ').filter(|word| !word.is_empty()).enumerate();
        words
            .map(|(index, word)| Word {
                word: word.to_owned(),
                start: index as f64 * 0.5,
                end: index as f64 * 0.5 + 0.5,
                confidence: Some(0.9 - 0.1 * (index % 5) as f64),
                speaker: None,
            })
            .collect()
    }

    fn request(language: &str, numbers: NumberStyle, fillers: FillerUse) -> DecodingRequest {
        DecodingRequest {
            languages: language
                .split(',')
                .filter(|code| !code.is_empty())
                .map(str::to_owned)
                .collect(),
            numbers: Some(numbers),
            fillers: Some(fillers),
            ..DecodingRequest::default()
        }
    }

    fn style(language: &str, numbers: NumberStyle, fillers: FillerUse) -> TextStyle {
        let request = request(language, numbers, fillers);
        Tables::default().style(&request, Default::default()).unwrap()
    }

    fn text(words: &[Word]) -> String {
        let texts: Vec<&str> = words.iter().map(|word| word.word.as_str()).collect();
        texts.join(" ")
    }

    #[test]
    fn numbers_become_digits() {
        for (language, before, after) in [
            (
                "en",
                "It costs twenty five thousand dollars.",
                "It costs 25000 dollars.",
            ),
            ("en", "\"Twenty-five, thirty!\"", "\"25, 30!\""),
            ("en", "call one two three", "call 1 2 3"),
            ("en", "no one knows, one of two", "no one knows, one of 2"),
            ("en", "one hundred and one and two", "101 and 2"),
            ("en", "In nineteen ninety nine it", "In 1999 it"),
            ("en", "some nineteen ninety people", "some nineteen ninety people"),
            ("en", "in twenty twenty four ten", "in 20 24 10"),
            ("en", "in nineteen, ninety", "in 19, 90"),
            ("en", "twenty. Five", "20. 5"),
            ("en", "seventeenth of May", "seventeenth of May"),
            ("en-GB", "two hundred", "200"),
            ("en", "at hundred twelve, a hundred", "at 112, 100"),
            ("en", "some hundred people", "some hundred people"),
            (
                "de",
                "Zweiundzwanzig Leute, ein Haus, hunderteins.",
                "22 Leute, ein Haus, 101.",
            ),
            ("de", "eine Million zwei", "1000002"),
            ("hi", "पच्चीस लोग। एक बात, दो सौ", "25 लोग। एक बात, 200"),
            ("es", "Treinta y uno, un perro y uno.", "31, un perro y uno."),
            ("es", "¿dos mil?", "¿2000?"),
        ] {
            let style = style(language, NumberStyle::Digits, FillerUse::Keep);
            assert_eq!(text(&style.apply_to_words(said(before))), after, "{before}");
        }
    }

    #[test]
    fn digits_become_words() {
        for (language, before, after) in [
            (
                "en",
                "It costs $25, or 25000.",
                "It costs $25, or twenty-five thousand.",
            ),
            ("en", "007, 3.5 and 25,000 on the 5th", "007, 3.5 and 25,000 on the 5th"),
            ("en", "0 99999999999999999999", "zero 99999999999999999999"),
            ("de", "(21)", "(einundzwanzig)"),
            ("hi", "25।", "पच्चीस।"),
        ] {
            let style = style(language, NumberStyle::Words, FillerUse::Keep);
            assert_eq!(text(&style.apply_to_words(said(before))), after, "{before}");
        }
    }

    #[test]
    fn fillers_are_left_out_with_their_marks() {
        for (language, before, after) in [
            ("en", "Um, so we, uh, went. Uh. Home, hmm.", "So we, went. Home."),
            ("en", "Umbrella", "Umbrella"),
            ("en", "twenty, um, five", "twenty, five"),
            ("en", "uh", ""),
            ("de", "Ähm, um drei", "Um drei"),
            ("es", "Eh, este", "Este"),
            ("hi", "हम्म, हम", "हम"),
        ] {
            let style = style(language, NumberStyle::Keep, FillerUse::Drop);
            assert_eq!(text(&style.apply_to_words(said(before))), after, "{before}");
        }
        let both = style("en", NumberStyle::Digits, FillerUse::Drop);
        assert_eq!(text(&both.apply_to_words(said("twenty um five"))), "25");
    }

    #[test]
    fn a_merged_word_spans_its_parts_and_is_as_sure_as_the_least_sure_one() {
        let digits = style("en", NumberStyle::Digits, FillerUse::Drop);
        let segments = segments(said("for twenty five thousand people"), &SegmentRules::default()).unwrap();
        let [segment] = &digits.apply(segments)[..] else {
            panic!()
        };
        assert_eq!(segment.text, "for 25000 people");
        let number = &segment.words[1];
        assert_eq!((number.start, number.end), (0.5, 2.0));
        assert!((number.confidence.unwrap() - 0.6).abs() < 1e-12);
        assert_eq!((segment.start, segment.end), (0.0, 2.5));
        let words = style("en", NumberStyle::Words, FillerUse::Keep).apply_to_words(segment.words.clone());
        assert_eq!(text(&words), "for twenty-five thousand people");
        assert_eq!(
            (words[1].start, words[2].end, words[2].confidence),
            (0.5, 2.0, number.confidence)
        );
        assert!(words[1].end > 1.0 && words[1].end == words[2].start);
        let mut two = said("twenty five");
        two[1].speaker = Some("B".to_owned());
        assert_eq!(text(&digits.apply_to_words(two)), "20 5");
        let gone = crate::segments::segments(said("Uh."), &SegmentRules::default()).unwrap();
        assert_eq!(digits.apply(gone), []);
    }

    #[test]
    fn tokens_go_with_their_words() {
        let token = |text: &str| Token {
            bytes: text.as_bytes().to_vec(),
            logprob: -0.5,
            is_first_choice: true,
        };
        let of = |words: &[&[&str]]| -> Vec<Vec<Token>> {
            words
                .iter()
                .map(|word| word.iter().map(|text| token(text)).collect())
                .collect()
        };
        let said = |text: &str| segments(said(text), &SegmentRules::default()).unwrap();
        let digits = style("en", NumberStyle::Digits, FillerUse::Drop);
        let tokens = of(&[&["f", "or"], &["tw", "enty"], &["um"], &["five."], &["Uh."], &["we"]]);
        let (found, left) = digits.apply_with_tokens(said("for twenty um five. Uh. we"), tokens.clone());
        assert_eq!(
            found.iter().map(|segment| &*segment.text).collect::<Vec<_>>(),
            ["for 25.", "we"]
        );
        assert_eq!(left, of(&[&["f", "or"], &["tw", "enty", " um", " five."], &["we"]]));
        let words = style("en", NumberStyle::Words, FillerUse::Keep);
        let (_, left) = words.apply_with_tokens(said("101 we"), of(&[&["10", "1"], &["we"]]));
        assert_eq!(left, of(&[&["10", "1"], &[], &[], &["we"]]));
        let keep = TextStyle::default().apply_with_tokens(said("for twenty um five. Uh. we"), tokens.clone());
        assert_eq!(keep.1, tokens);
    }

    #[test]
    fn a_style_needs_one_language_with_a_table() {
        let of = |request: &DecodingRequest| Tables::default().style(request, (NumberStyle::Digits, FillerUse::Drop));
        let (field, why) = of(&request("fr", NumberStyle::Digits, FillerUse::Keep)).unwrap_err();
        assert_eq!(
            (field, why.as_str()),
            (
                "numbers",
                "there is no table of `fr`; there are tables of de, en, es, hi"
            )
        );
        let (field, why) = of(&request("de,en", NumberStyle::Keep, FillerUse::Drop)).unwrap_err();
        assert_eq!((field, why.contains("one `language`, not 2")), ("fillers", true));
        let (field, why) = of(&request("", NumberStyle::Words, FillerUse::Keep)).unwrap_err();
        assert_eq!((field, why.contains("needs a `language`")), ("numbers", true));
        // The usual style holds where there is a table.
        let silent = |languages: &[&str]| DecodingRequest {
            languages: languages.iter().map(|&code| code.to_owned()).collect(),
            ..DecodingRequest::default()
        };
        assert!(!of(&silent(&["fr"])).unwrap().changes());
        assert!(!of(&silent(&[])).unwrap().changes());
        assert!(of(&silent(&["hi"])).unwrap().changes());
        assert!(
            !of(&request("fr", NumberStyle::Keep, FillerUse::Keep))
                .unwrap()
                .changes()
        );
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("fr.yaml");
        std::fs::write(&file, "language: fr\ncardinals: {0: zéro, 1: un}\nfillers: [euh]\n").unwrap();
        let tables = Tables::with_files([file.as_path()]).unwrap();
        let style = tables.style(
            &request("fr-CA", NumberStyle::Words, FillerUse::Drop),
            Default::default(),
        );
        assert_eq!(text(&style.unwrap().apply_to_words(said("euh 0 1 2"))), "zéro un 2");
        assert!(
            Tables::with_files([file.as_path(), file.as_path()])
                .unwrap_err()
                .contains("fr.yaml")
        );
    }

    proptest! {
        #[test]
        fn words_of_numbers_become_these_numbers_again(numbers in prop::collection::vec(0..1_000_000_000u64, 1..5)) {
            for language in ["de", "en", "es", "hi"] {
                let written: Vec<String> = numbers.iter().map(|number| format!("{number},")).collect();
                let words = style(language, NumberStyle::Words, FillerUse::Keep).apply_to_words(said(&written.join(" ")));
                prop_assert!(words.windows(2).all(|pair| pair[0].end <= pair[1].start));
                prop_assert!(words.iter().all(|word| word.start < word.end && !word.word.contains(|c: char| c.is_ascii_digit())));
                let again = style(language, NumberStyle::Digits, FillerUse::Keep).apply_to_words(words);
                let table = Tables::default().0.into_iter().find(|table| table.is_of(language)).unwrap();
                let alone = |number: &u64| table.is_not_alone(&plain(&table.written(*number).unwrap()));
                let expected: Vec<String> = numbers.iter().map(|number| match alone(number) {
                    true => format!("{},", table.written(*number).unwrap()),
                    false => format!("{number},"),
                }).collect();
                prop_assert_eq!(text(&again), expected.join(" "));
            }
        }

        #[test]
        fn any_words_stay_in_order(words in "[ a-c0-9,.!-]{0,40}", language in "de|en|es|hi") {
            let words = said(&words);
            for (numbers, fillers) in [(NumberStyle::Digits, FillerUse::Drop), (NumberStyle::Words, FillerUse::Keep)] {
                let styled = style(&language, numbers, fillers).apply_to_words(words.clone());
                prop_assert!(styled.windows(2).all(|pair| pair[0].end <= pair[1].start + 1e-9));
            }
            let keep = style(&language, NumberStyle::Keep, FillerUse::Keep);
            prop_assert_eq!(keep.apply_to_words(words.clone()), words);
        }
    }
}
