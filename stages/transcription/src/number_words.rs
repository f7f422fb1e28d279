//! Tables of a language: how its cardinal numbers are said, and its fillers.
//!
//! Rules are those of rule-based number formats (as in ICU and CLDR): the rule with the largest base that is not above a number says it;
//! `<<` is its quotient by the rule's divisor, `>>` the rest, and what is between brackets is left out where the rest is 0. The same
//! rules, and others that are only understood, read numbers: all ways to read the beginning of a text are tried, the longest wins.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use flow_kind::open_regular_file;
use flow_text::language_tag::{is_language, same_language};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// No number from here on is read or written.
const TOO_LARGE: u64 = 1_000_000_000_000_000;
/// Largest file of a table in bytes, and most forms in it.
const LARGEST_FILE: u64 = 1 << 20;
const MOST_FORMS: usize = 5_000;
/// The longest form and filler, in bytes.
const LONGEST: usize = 200;
/// Most ways to read the beginning of a text that are followed: one is usual.
const MOST_READINGS: usize = 64;

/// The tables that the program carries.
const BUNDLED: [&str; 4] = [
    include_str!("../tables/de.yaml"),
    include_str!("../tables/en.yaml"),
    include_str!("../tables/es.yaml"),
    include_str!("../tables/hi.yaml"),
];

/// How numbers of a language are said, and which of its words are fillers.
#[derive(Debug)]
pub struct NumberWords {
    /// The code of the language.
    pub language: String,
    /// Sorted by base: how numbers are written.
    cardinals: Vec<Rule>,
    /// Rules that replace those of the same base before `<<` ends.
    combining: BTreeMap<u64, Rule>,
    /// How numbers are said, too.
    also: Vec<Rule>,
    /// The least number that has no words.
    end: u64,
    /// Words, as [`plain`] gives them.
    not_alone: Vec<String>,
    years_after: Vec<String>,
    fillers: Vec<String>,
}

#[derive(Debug)]
struct Rule {
    base: u64,
    /// The numbers that it is for end here.
    end: u64,
    divisor: u64,
    form: Form,
}

/// Parts with a rest, and parts without one, of forms that have both.
#[derive(Clone, Debug, PartialEq)]
struct Form {
    with_rest: Option<Vec<Part>>,
    without: Option<Vec<Part>>,
}

#[derive(Clone, Debug, PartialEq)]
enum Part {
    /// As it is written, and as [`plain`] gives it.
    Text(String, String),
    Quotient,
    Rest,
}

/// A file, as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table with `language` and `cardinals`")]
struct File {
    language: String,
    cardinals: Forms,
    #[serde(default)]
    combining: Forms,
    #[serde(default)]
    also: Forms,
    #[serde(default)]
    not_alone: Vec<String>,
    #[serde(default)]
    years_after: Vec<String>,
    #[serde(default)]
    fillers: Vec<String>,
}

/// Forms by base, with a divisor of their own where the key has one: `1100/100`.
#[derive(Default)]
struct Forms(Vec<(u64, Option<u64>, Vec<String>)>);

#[derive(Deserialize)]
#[serde(untagged)]
enum Key {
    Number(u64),
    Text(String),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

impl<'de> Deserialize<'de> for Forms {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Forms;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("forms by number, such as `20: 'twenty[->>]'`")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Forms, A::Error> {
                let mut entries: Vec<(u64, Option<u64>, Vec<String>)> = Vec::new();
                while let Some(key) = map.next_key::<Key>()? {
                    let (base, divisor) = match &key {
                        Key::Number(base) => (Some(*base), None),
                        Key::Text(text) => match text.split_once('/') {
                            Some((base, divisor)) => (base.parse().ok(), Some(divisor.parse().ok())),
                            None => (text.parse().ok(), None),
                        },
                    };
                    let shown = || match &key {
                        Key::Number(number) => number.to_string(),
                        Key::Text(text) => text.chars().take(40).collect(),
                    };
                    let divisor = divisor.map(|divisor: Option<u64>| divisor.ok_or(()));
                    let (Some(base), Ok(divisor)) = (base, divisor.transpose()) else {
                        let why = format!(
                            "`{}` is not a number, and no number with its divisor (`1100/100`)",
                            shown()
                        );
                        return Err(A::Error::custom(why));
                    };
                    if entries.iter().any(|known| (known.0, known.1) == (base, divisor)) {
                        return Err(A::Error::custom(format!("`{}` is there twice", shown())));
                    }
                    let forms = match map.next_value::<OneOrMore>()? {
                        OneOrMore::One(form) => vec![form],
                        OneOrMore::More(forms) => forms,
                    };
                    entries.push((base, divisor, forms));
                }
                entries.sort_by_key(|entry| (entry.0, entry.1));
                Ok(Forms(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

impl NumberWords {
    /// The tables that the program carries, by language.
    pub fn bundled() -> &'static [Arc<NumberWords>] {
        static TABLES: LazyLock<Vec<Arc<NumberWords>>> = LazyLock::new(|| {
            let tables = BUNDLED.iter().filter_map(|text| NumberWords::parse(text).ok());
            tables.map(Arc::new).collect()
        });
        &TABLES
    }

    /// Reads a table.
    ///
    /// # Errors
    /// If the file cannot be read, is not a table, or its rules contradict each other: with its path.
    pub fn read(path: &Path) -> Result<Self, String> {
        use std::io::Read;
        let shown = path.display();
        let file = open_regular_file(path).map_err(|error| format!("cannot read {shown}: {error}"))?;
        let mut text = String::new();
        let read = file.take(LARGEST_FILE + 1).read_to_string(&mut text);
        read.map_err(|error| format!("cannot read {shown}: {error}"))?;
        if text.len() as u64 > LARGEST_FILE {
            return Err(format!("{shown} has more than {LARGEST_FILE} bytes"));
        }
        NumberWords::parse(&text).map_err(|why| format!("{shown}: {why}"))
    }

    fn parse(text: &str) -> Result<Self, String> {
        flow_yaml_guard::check(text).map_err(|error| error.to_string())?;
        // The error quotes what is there in place of a table.
        let wrong = |error: serde_yaml::Error| error.to_string().chars().take(LONGEST).collect::<String>();
        let file: File = serde_yaml::from_str(text).map_err(wrong)?;
        if !is_language(&file.language) {
            return Err("`language` is not a code of a language, such as `fr`".to_owned());
        }
        let forms = [&file.cardinals, &file.combining, &file.also].into_iter();
        let forms: usize = forms.flat_map(|forms| &forms.0).map(|entry| entry.2.len()).sum();
        if forms > MOST_FORMS {
            return Err(format!("there are {forms} forms, more than {MOST_FORMS}"));
        }
        let bases: Vec<u64> = file.cardinals.0.iter().map(|entry| entry.0).collect();
        if bases.first() != Some(&0) {
            return Err("`cardinals` has no 0".to_owned());
        }
        // The numbers of the last rule end where its quotient would be as large as its divisor.
        let next = |base: u64| bases.iter().copied().find(|next| *next > base);
        let rules = |section: &str, forms: Forms| -> Result<Vec<Rule>, String> {
            let mut rules = Vec::new();
            for (base, divisor, texts) in forms.0 {
                for text in texts {
                    let rule = rule(base, divisor, next(base), &text);
                    rules.push(rule.map_err(|why| format!("`{section}`, {base}: `{}`: {why}", shown(&text)))?);
                }
            }
            Ok(rules)
        };
        for (section, forms) in [("cardinals", &file.cardinals), ("combining", &file.combining)] {
            for (base, divisor, texts) in &forms.0 {
                if texts.len() != 1 || divisor.is_some() {
                    let why = "has one form, and no divisor; others are below `also`";
                    return Err(format!("`{section}`, {base}: {why}"));
                }
                if !bases.contains(base) {
                    return Err(format!("`{section}`, {base}: `cardinals` has no such number"));
                }
            }
        }
        let cardinals = rules("cardinals", file.cardinals)?;
        let combining = rules("combining", file.combining)?;
        for rule in &combining {
            if cardinals
                .iter()
                .any(|known| known.base == rule.base && known.end != rule.end)
            {
                return Err(format!(
                    "`combining`, {}: `cardinals` has it for other numbers",
                    rule.base
                ));
            }
        }
        for (section, rules) in [("cardinals", &cardinals), ("combining", &combining)] {
            let needs_rest = |rule: &&Rule| {
                let whole = rule.base.div_ceil(rule.divisor) * rule.divisor;
                rule.form.without.is_none() && whole < rule.end
            };
            if let Some(rule) = rules.iter().find(needs_rest) {
                let why = "a number without a rest has no form: put `>>` between brackets";
                return Err(format!("`{section}`, {}: {why}", rule.base));
            }
        }
        let mut end = 0;
        for rule in &cardinals {
            // What is not covered by a rule is not written.
            if rule.base != end {
                break;
            }
            end = rule.end;
        }
        if let Some(gap) = bases.iter().find(|base| **base > end) {
            return Err(format!(
                "`cardinals`: no rule says the numbers from {end} to {}",
                gap - 1
            ));
        }
        let texts = |section: &str, texts: Vec<String>| -> Result<Vec<String>, String> {
            let plain: Vec<String> = texts.iter().map(|text| plain(text)).collect();
            let wrong = texts.iter().zip(&plain);
            let wrong = wrong.filter(|(text, plain)| {
                plain.is_empty() || plain.len() > LONGEST || text.trim().contains(char::is_whitespace)
            });
            match { wrong }.next() {
                Some((text, _)) => Err(format!("`{section}`: `{}` is not a word", shown(text))),
                None => Ok(plain),
            }
        };
        Ok(NumberWords {
            language: file.language,
            combining: combining.into_iter().map(|rule| (rule.base, rule)).collect(),
            also: rules("also", file.also)?,
            cardinals,
            end,
            not_alone: texts("not_alone", file.not_alone)?,
            years_after: texts("years_after", file.years_after)?,
            fillers: texts("fillers", file.fillers)?,
        })
    }

    /// Whether it is of this language; scripts and regions do not matter.
    pub fn is_of(&self, language: &str) -> bool {
        same_language(&self.language, language)
    }

    /// Whether a word is a filler. Case and marks do not matter.
    pub fn is_filler(&self, word: &str) -> bool {
        self.fillers.contains(&plain(word))
    }

    /// Whether a word, as [`plain`] gives it, is a number only beside others.
    pub(crate) fn is_not_alone(&self, word: &str) -> bool {
        self.not_alone.iter().any(|known| known == word)
    }

    /// Whether years that are said as two numbers come after a word, as [`plain`] gives it.
    pub(crate) fn is_before_years(&self, word: &str) -> bool {
        self.years_after.iter().any(|known| known == word)
    }

    /// Whether years may be said as two numbers: nineteen ninety.
    pub(crate) fn has_paired_years(&self) -> bool {
        !self.years_after.is_empty()
    }

    /// A number in words; none of one that is too large.
    pub fn written(&self, number: u64) -> Option<String> {
        let mut text = String::new();
        (number < self.end).then(|| self.write(number, false, &mut text))?;
        Some(text)
    }

    fn write(&self, number: u64, combining: bool, text: &mut String) {
        let Some(rule) = self.cardinals.iter().rfind(|rule| rule.base <= number) else {
            return;
        };
        let rule = self.combining.get(&rule.base).filter(|_| combining).unwrap_or(rule);
        let rest = number % rule.divisor;
        let parts = match rest {
            0 => rule.form.without.as_ref().or(rule.form.with_rest.as_ref()),
            _ => rule.form.with_rest.as_ref().or(rule.form.without.as_ref()),
        };
        for part in parts.into_iter().flatten() {
            match part {
                Part::Text(written, _) => text.push_str(written),
                // Both are smaller than the number: it ends.
                Part::Quotient => self.write(number / rule.divisor, true, text),
                Part::Rest => self.write(rest, combining, text),
            }
        }
    }

    /// The number that a text, as [`plain`] gives it, begins with, and where it ends: at the last of these ends that is possible.
    pub(crate) fn read_number(&self, text: &str, ends: &[usize]) -> Option<(u64, usize)> {
        let reading = Reading {
            table: self,
            text,
            known: RefCell::default(),
        };
        let found = reading.numbers(0, false, self.end);
        let whole = found.iter().filter(|(_, end)| ends.contains(end));
        // Of equal lengths the least number.
        whole
            .copied()
            .max_by_key(|(number, end)| (*end, std::cmp::Reverse(*number)))
    }
}

/// A rule for the numbers from `base` to `next`, if that is known.
fn rule(base: u64, divisor: Option<u64>, next: Option<u64>, text: &str) -> Result<Rule, String> {
    if base >= TOO_LARGE || text.len() > LONGEST {
        return Err("it is too large".to_owned());
    }
    let form = form(text)?;
    let usual = std::iter::successors(Some(1u64), |power| power.checked_mul(10));
    let usual = usual.take_while(|power| *power <= base).last().unwrap_or(1);
    let divisor = divisor.unwrap_or(usual);
    if divisor == 0 || divisor > base.max(1) {
        return Err(format!("the divisor {divisor} is not between 1 and {base}"));
    }
    let has = |part: &Part| {
        let forms = [&form.with_rest, &form.without];
        forms.into_iter().flatten().any(|parts| parts.contains(part))
    };
    let (has_quotient, has_rest) = (has(&Part::Quotient), has(&Part::Rest));
    if (has_quotient || has_rest) && divisor == 1 {
        return Err("numbers below 10 have no quotient and no rest".to_owned());
    }
    let floor = base / divisor * divisor;
    // Where the quotient would be as large as the divisor, and where what has none has another.
    let limit = match (has_quotient, has_rest) {
        (true, true) => divisor.saturating_mul(divisor),
        (false, true) => floor.saturating_add(divisor),
        (false, false) => base + 1,
        (true, false) => return Err("it has a quotient and no rest: write `[ >>]` after it".to_owned()),
    };
    let limit = limit.min(TOO_LARGE);
    let end = next.unwrap_or(limit).min(limit);
    if end <= base {
        return Err("it is for no number: its quotient is as large as its divisor".to_owned());
    }
    Ok(Rule {
        base,
        end,
        divisor,
        form,
    })
}

/// Reads a form: texts, `<<`, `>>`, and one part between brackets, which has the rest.
fn form(text: &str) -> Result<Form, String> {
    let parts = |text: &str| -> Result<Vec<Part>, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix("<<") {
                parts.push(Part::Quotient);
                rest = after;
            } else if let Some(after) = rest.strip_prefix(">>") {
                parts.push(Part::Rest);
                rest = after;
            } else {
                let end = ["<<", ">>"].iter().filter_map(|mark| rest.find(mark)).min();
                let (piece, after) = rest.split_at(end.unwrap_or(rest.len()));
                if piece.contains(['<', '>', '[', ']']) {
                    return Err("of `<`, `>`, `[` and `]` it may have `<<`, `>>` and one pair of brackets".to_owned());
                }
                parts.push(Part::Text(piece.to_owned(), plain(piece)));
                rest = after;
            }
        }
        let has_two = |part: &Part| parts.iter().filter(|other| *other == part).count() > 1;
        if has_two(&Part::Quotient) || has_two(&Part::Rest) {
            return Err("`<<` and `>>` may come once each".to_owned());
        }
        let has_text = |part: &Part| matches!(part, Part::Text(_, plain) if !plain.is_empty());
        match parts.iter().any(has_text) {
            true => Ok(parts),
            false => Err("it has no word".to_owned()),
        }
    };
    let Some((before, rest)) = text.split_once('[') else {
        let all = parts(text)?;
        return Ok(match all.contains(&Part::Rest) {
            true => Form {
                with_rest: Some(all),
                without: None,
            },
            false => Form {
                with_rest: None,
                without: Some(all),
            },
        });
    };
    let Some((within, after)) = rest.split_once(']') else {
        return Err("a bracket is not closed".to_owned());
    };
    let (with_rest, without) = (
        parts(&format!("{before}{within}{after}"))?,
        parts(&format!("{before}{after}"))?,
    );
    match with_rest.contains(&Part::Rest) && !without.contains(&Part::Rest) {
        true => Ok(Form {
            with_rest: Some(with_rest),
            without: Some(without),
        }),
        false => Err("between brackets is what comes with the rest, `>>`".to_owned()),
    }
}

/// The ways to read the beginning of a text: which number, and where it ends.
type Found = Arc<Vec<(u64, usize)>>;

/// A text that is read, with what was found in it: numbers below a limit from a place on, in the middle of another one or not.
struct Reading<'a> {
    table: &'a NumberWords,
    text: &'a str,
    known: RefCell<HashMap<(usize, bool, u64), Found>>,
}

impl Reading<'_> {
    /// The numbers below `below` that begin at `at`.
    fn numbers(&self, at: usize, combining: bool, below: u64) -> Found {
        if let Some(found) = self.known.borrow().get(&(at, combining, below)) {
            return Arc::clone(found);
        }
        let mut found = Vec::new();
        let table = self.table;
        let own = table.cardinals.iter().map(|rule| {
            let replaced = table.combining.get(&rule.base).filter(|_| combining);
            replaced.unwrap_or(rule)
        });
        for rule in own.chain(&table.also).filter(|rule| rule.base < below) {
            for (parts, has_rest) in [(&rule.form.with_rest, true), (&rule.form.without, false)] {
                let Some(parts) = parts else { continue };
                for (quotient, rest, end) in self.parts(parts, rule, (at, combining)) {
                    let floor = quotient.map_or(rule.base / rule.divisor, |quotient| quotient) * rule.divisor;
                    let number = match (quotient, has_rest) {
                        (None, false) => rule.base,
                        _ => floor + rest,
                    };
                    if (rule.base..rule.end.min(below)).contains(&number) && has_rest == (rest > 0) {
                        found.push((number, end));
                    }
                }
            }
        }
        found.sort_unstable();
        found.dedup();
        found.truncate(MOST_READINGS);
        let found = Arc::new(found);
        self.known
            .borrow_mut()
            .insert((at, combining, below), Arc::clone(&found));
        found
    }

    /// Quotients and rests with which the parts of a rule begin at a place, and where they end.
    fn parts(&self, parts: &[Part], rule: &Rule, (at, combining): (usize, bool)) -> Vec<(Option<u64>, u64, usize)> {
        let mut found = vec![(None, 0, at)];
        for part in parts {
            let mut next = Vec::new();
            for (quotient, rest, at) in found {
                match part {
                    Part::Text(_, plain) if self.text[at..].starts_with(plain.as_str()) => {
                        next.push((quotient, rest, at + plain.len()));
                    }
                    Part::Text(..) => {}
                    // Quotients and rests are below the divisor, which is not above the base: it ends.
                    Part::Quotient => {
                        let below = rule.end.div_ceil(rule.divisor).min(rule.divisor);
                        let all = self.numbers(at, true, below);
                        next.extend(all.iter().map(|(number, end)| (Some(*number), rest, *end)));
                    }
                    Part::Rest => {
                        let all = self.numbers(at, combining, rule.divisor);
                        next.extend(all.iter().map(|(number, end)| (quotient, *number, *end)));
                    }
                }
            }
            next.truncate(MOST_READINGS);
            found = next;
        }
        found
    }
}

/// The letters of a text, by which words are compared: in lower case, without spaces, hyphens and joiners, and without the differences
/// of spelling that mean nothing (German ß and ss, the dot and the moon of Devanagari).
pub(crate) fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars().flat_map(char::to_lowercase) {
        match c {
            'ß' => plain.push_str("ss"),
            '\u{901}' => plain.push('\u{902}'),
            // Letters with a dot in them, which stand for two characters.
            '\u{95c}' => plain.push('\u{921}'),
            '\u{95d}' => plain.push('\u{922}'),
            '\u{95b}' => plain.push('\u{91c}'),
            '\u{95e}' => plain.push('\u{92b}'),
            '\u{93c}' | '-' | '\u{ad}' | '\u{2010}'..='\u{2013}' | '\u{200b}'..='\u{200d}' => {}
            c if c.is_whitespace() => {}
            c => plain.push(c),
        }
    }
    plain
}

fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(40).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table(language: &str) -> &'static NumberWords {
        let tables = NumberWords::bundled().iter();
        tables.clone().find(|table| table.is_of(language)).unwrap()
    }

    fn read(language: &str, text: &str) -> Option<u64> {
        let text = plain(text);
        let found = table(language).read_number(&text, &[text.len()]);
        found.map(|(number, _)| number)
    }

    #[test]
    fn bundled_tables_are_read() {
        for text in BUNDLED {
            NumberWords::parse(text).unwrap();
        }
        let languages: Vec<&str> = NumberWords::bundled().iter().map(|table| &*table.language).collect();
        assert_eq!(languages, ["de", "en", "es", "hi"]);
    }

    #[test]
    fn numbers_are_written_as_they_are_said() {
        for (language, number, text) in [
            ("en", 0, "zero"),
            ("en", 25_000, "twenty-five thousand"),
            ("en", 1_000_001, "one million one"),
            ("de", 21, "einundzwanzig"),
            ("de", 101, "einhunderteins"),
            ("de", 21_101, "einundzwanzigtausendeinhunderteins"),
            ("de", 1_000_000, "eine Million"),
            ("de", 21_000_022, "einundzwanzig Millionen zweiundzwanzig"),
            ("es", 31, "treinta y uno"),
            ("es", 100, "cien"),
            ("es", 1_101, "mil ciento uno"),
            ("es", 21_000, "veintiún mil"),
            ("es", 31_131, "treinta y un mil ciento treinta y uno"),
            ("es", 100_000_000, "cien millones"),
            ("es", 2_500_000_000, "dos mil quinientos millones"),
            ("hi", 25, "पच्चीस"),
            ("hi", 1_234_567, "बारह लाख चौंतीस हज़ार पाँच सौ सड़सठ"),
            ("hi", 10_000_000, "एक करोड़"),
        ] {
            assert_eq!(
                table(language).written(number).as_deref(),
                Some(text),
                "{language} {number}"
            );
        }
        assert_eq!(table("en").written(TOO_LARGE), None);
        assert_eq!(table("en").written(u64::MAX), None);
    }

    #[test]
    fn other_ways_to_say_them_are_understood() {
        for (language, text, number) in [
            ("en", "Twenty Five", 25),
            ("en", "a hundred and five thousand", 105_000),
            ("en", "nineteen hundred and twelve", 1912),
            ("en", "hundred twelve", 112),
            ("en", "thousand and five", 1005),
            ("en", "two thousand and one", 2001),
            ("de", "zwei und zwanzig", 22),
            ("de", "hundertzwo", 102),
            ("de", "neunzehnhundertneunundachtzig", 1989),
            ("de", "dreissig", 30),
            ("es", "treinta y un mil", 31_000),
            ("es", "doscientas", 200),
            ("hi", "पांच हजार", 5000),
            ("hi", "उन्नीस सौ सैंतालीस", 1947),
            ("hi", "स\u{921}\u{93c}सठ", 67),
            ("hi", "स\u{95c}सठ", 67),
        ] {
            assert_eq!(read(language, text), Some(number), "{text}");
        }
        for (language, text) in [
            ("en", "twenty eleven"),
            ("en", "one two"),
            ("en", "ten hundred"),
            ("en", "hundred"),
            ("en", "and five"),
            ("de", "ein"),
            ("de", "zehnhundert"),
            ("de", "einszwanzig"),
            ("es", "un"),
            ("es", "treinta y"),
            ("hi", "सौ सौ"),
            ("en", ""),
        ] {
            assert_eq!(read(language, text), None, "{text}");
        }
    }

    #[test]
    fn every_small_number_is_read_as_it_is_written() {
        for table in NumberWords::bundled() {
            for number in 0..20_000 {
                let written = table.written(number).unwrap();
                assert_eq!(read(&table.language, &written), Some(number), "{written}");
            }
        }
    }

    proptest! {
        #[test]
        fn every_number_is_read_as_it_is_written(number in 0..TOO_LARGE, digits in 0..15u32) {
            let number = number / 10u64.pow(digits);
            for table in NumberWords::bundled() {
                if let Some(written) = table.written(number) {
                    prop_assert_eq!(read(&table.language, &written), Some(number), "{}", written);
                } else {
                    prop_assert!(number >= table.end);
                }
            }
        }

        #[test]
        fn tables_of_users_never_loop(
            entries in prop::collection::vec((0..3000u64, "(<<|>>|a|b| |\\[|\\]){1,5}"), 0..8), text in "[ab ]{0,12}",
        ) {
            let mut yaml = "language: xx\ncardinals:\n  0: z\n".to_owned();
            for (base, form) in &entries {
                yaml += &format!("  {base}: '{form}'\n");
            }
            if let Ok(table) = NumberWords::parse(&yaml) {
                for number in 0..table.end.min(500) {
                    prop_assert!(table.written(number).is_some());
                }
                let text = plain(&text);
                table.read_number(&text, &[text.len()]);
            }
        }
    }

    #[test]
    fn wrong_tables_are_refused_with_the_reason() {
        let refused = |yaml: &str, why: &str| {
            let error = NumberWords::parse(yaml).err().unwrap_or_default();
            assert!(error.contains(why), "{yaml}: {error}");
        };
        let with = |entries: &str| format!("language: fr\ncardinals: {{0: zero, {entries}}}\n");
        refused("", "missing field");
        refused("language: french\ncardinals: {0: a}", "not a code");
        refused("language: fr\ncardinals: {}", "no 0");
        refused("language: fr\ncardinals: {0: a}\nx: 1", "unknown field");
        refused(&with("1: un, 3: trois"), "no rule says the numbers from 2 to 2");
        refused(&with("1: un, 1: deux"), "twice");
        refused(&with("a: un"), "not a number");
        refused(&with("1: [un, une]"), "one form");
        refused(&with("1: '[ >>]'"), "no word");
        refused(&with("1: '>> et un'"), "below 10");
        refused(&with("1: 'un['"), "not closed");
        refused(&with("1: 'un[ et]'"), "with the rest");
        refused(&with("1: '<un'"), "one pair");
        refused(&with("1: '<< << x'"), "once");
        refused(&with("10: '<< dix'"), "quotient and no rest");
        refused(&with("10: '>> dix'"), "between brackets");
        refused(&with("'10/0': dix"), "one form, and no divisor");
        refused("language: fr\ncardinals: {0: a}\nalso: {'10/0': x}", "divisor");
        refused("language: fr\ncardinals: {0: a}\nalso: {'10/100': x}", "divisor");
        refused("language: fr\ncardinals: {0: a}\ncombining: {1: x}", "no such number");
        refused("language: fr\ncardinals: {0: a}\nfillers: ['tu sais']", "not a word");
        refused("language: fr\ncardinals: {0: a}\nfillers: ['-']", "not a word");
        refused("language: fr\ncardinals: {0: 1.5}", "did not match");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "language: fr\n").unwrap();
        let error = NumberWords::read(file.path()).unwrap_err();
        assert!(error.contains(&file.path().display().to_string()), "{error}");
        std::fs::write(file.path(), [0xff, 0xfe]).unwrap();
        assert!(NumberWords::read(file.path()).is_err());
        assert!(NumberWords::read(Path::new("/nowhere.yaml")).is_err());
    }
}
