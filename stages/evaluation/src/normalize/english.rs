//! English texts as Whisper's `EnglishTextNormalizer` and that of the Open ASR Leaderboard write them.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::LazyLock;

use regex::Regex;
use unicode_normalization::UnicodeNormalization;

use super::characters::{begins_word, ends_word, is_digit, is_letter_or_number, is_word, replaced};
use super::numbers::with_digits;
use super::{MORE_DIACRITICS, squeezed, without_brackets};
use crate::wer::{is_white_space, words};

/// Whose rules are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rules {
    /// OpenAI's.
    Whisper,
    /// The Open ASR Leaderboard's, of 21 August 2026 (commit d1e99b2).
    OpenAsr,
}

type Table = HashMap<&'static str, &'static str>;

/// A table of two columns.
fn table(text: &'static str) -> Table {
    text.lines().filter_map(|line| line.split_once('\t')).collect()
}

/// British and other spellings, and how they are written.
static WHISPER_SPELLING: LazyLock<Table> = LazyLock::new(|| table(include_str!("../../tables/whisper_spelling.tsv")));
/// Only where they differ from Whisper's.
static OPEN_ASR_SPELLING: LazyLock<Table> = LazyLock::new(|| table(include_str!("../../tables/open_asr_spelling.tsv")));
static OPEN_ASR_NAMES: LazyLock<Table> = LazyLock::new(|| table(include_str!("../../tables/open_asr_names.tsv")));

/// Marks, symbols and punctuation except those of numbers.
static SYMBOLS: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"[[\p{M}\p{S}\p{P}]--[.%$¢€£]]").ok());
static NON_SPACING: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\p{Mn}").ok());

const FILLERS: [&str; 6] = ["hmm", "mm", "mhm", "mmm", "uh", "um"];
const OPEN_ASR_FILLERS: [&str; 20] = [
    "hmm", "mm", "mhm", "mmm", "uh", "um", "ah", "aha", "ahh", "ahm", "eh", "ehehe", "em", "hm", "huh", "hum", "mhum",
    "uhm", "umm", "uhuh",
];

/// Whole words, in this order.
const WORDS: [(&str, &str); 35] = [
    ("won't", "will not"),
    ("can't", "can not"),
    ("let's", "let us"),
    ("ain't", "aint"),
    ("y'all", "you all"),
    ("wanna", "want to"),
    ("gotta", "got to"),
    ("gonna", "going to"),
    ("i'ma", "i am going to"),
    ("imma", "i am going to"),
    ("woulda", "would have"),
    ("coulda", "could have"),
    ("shoulda", "should have"),
    ("ma'am", "madam"),
    ("mr", "mister "),
    ("mrs", "missus "),
    ("st", "saint "),
    ("dr", "doctor "),
    ("prof", "professor "),
    ("capt", "captain "),
    ("gov", "governor "),
    ("ald", "alderman "),
    ("gen", "general "),
    ("sen", "senator "),
    ("rep", "representative "),
    ("pres", "president "),
    ("rev", "reverend "),
    ("hon", "honorable "),
    ("asst", "assistant "),
    ("assoc", "associate "),
    ("lt", "lieutenant "),
    ("col", "colonel "),
    ("jr", "junior "),
    ("sr", "senior "),
    ("esq", "esquire "),
];

/// Ends of words, in this order, after [`WORDS`].
const ENDINGS: [(&str, &str); 14] = [
    ("'d been", " had been"),
    ("'s been", " has been"),
    ("'d gone", " had gone"),
    ("'s gone", " has gone"),
    ("'d done", " had done"),
    ("'s got", " has got"),
    ("n't", " not"),
    ("'re", " are"),
    ("'s", " is"),
    ("'d", " would"),
    ("'ll", " will"),
    ("'t", " not"),
    ("'ve", " have"),
    ("'m", " am"),
];

/// Words after which alone the Leaderboard takes `'s` for `is`.
const BEFORE_IS: [(&str, &str); 13] = [
    ("it's", "it is"),
    ("he's", "he is"),
    ("she's", "she is"),
    ("what's", "what is"),
    ("that's", "that is"),
    ("who's", "who is"),
    ("here's", "here is"),
    ("there's", "there is"),
    ("how's", "how is"),
    ("when's", "when is"),
    ("where's", "where is"),
    ("why's", "why is"),
    ("this's", "this is"),
];

/// Two words that the Leaderboard writes as one, in this order.
const COMPOUNDS: [(&str, &str, &str); 16] = [
    ("et", "cetera", "etc"),
    ("al", "right", "alright"),
    ("all", "right", "alright"),
    ("how", "ever", "however"),
    ("wi", "fi", "wifi"),
    ("hi", "fi", "hifi"),
    ("lo", "fi", "lofi"),
    ("sci", "fi", "scifi"),
    ("e", "mail", "email"),
    ("e", "book", "ebook"),
    ("e", "commerce", "ecommerce"),
    ("x", "ray", "xray"),
    ("t", "shirt", "tshirt"),
    ("a", "m", "am"),
    ("p", "m", "pm"),
    ("o", "k", "okay"),
];

/// The normalised text; there may be one space at either end, as in both.
pub(super) fn normalized(text: &str, rules: Rules) -> String {
    let lower = text.to_lowercase();
    let text = without_brackets(&lower);
    let text = without_fillers(&text, rules);
    let text = replaced_spaces(&text);
    let text = contractions(text, rules);
    let text = points(&commas(&text));
    let mut text = without_symbols(&text);
    if rules == Rules::OpenAsr {
        for (one, other, compound) in COMPOUNDS {
            text = joined(&text, one, other, compound);
        }
    }
    let text = with_digits(&text);
    let mut spelled: Vec<Cow<str>> = words(&text)
        .into_iter()
        .map(|word| Cow::Borrowed(spelling(word, rules)))
        .collect();
    if rules == Rules::OpenAsr {
        spelled = acronyms(spelled);
    }
    squeezed(&stray_symbols(&spelled.join(" ")))
}

/// Replaces `from` wherever it ends a word, and with `whole` begins one.
fn substituted<'t>(text: &'t str, from: &'static str, by: &'static str, whole: bool) -> Cow<'t, str> {
    // Most texts have none of them.
    if !text.contains(from) {
        return Cow::Borrowed(text);
    }
    let Some(first) = from.chars().next() else {
        return Cow::Borrowed(text);
    };
    replaced(text, &[first], |before, rest| {
        let behind = rest.strip_prefix(from)?;
        ((!whole || begins_word(before)) && ends_word(behind)).then_some((from.len(), Cow::Borrowed(by)))
    })
}

fn without_fillers(text: &str, rules: Rules) -> String {
    let fillers = match rules {
        Rules::Whisper => &FILLERS[..],
        Rules::OpenAsr => &OPEN_ASR_FILLERS,
    };
    let mut kept = String::with_capacity(text.len());
    // Runs of characters of words, each with the character behind it.
    for part in text.split_inclusive(|c| !is_word(c)) {
        let run = part.trim_end_matches(|c| !is_word(c));
        kept.push_str(if fillers.contains(&run) {
            &part[run.len()..]
        } else {
            part
        });
    }
    kept
}

/// No white space before an apostrophe.
fn replaced_spaces(text: &str) -> String {
    let mut new = String::with_capacity(text.len());
    for c in text.chars() {
        if c == '\'' {
            new.truncate(new.trim_end_matches(is_white_space).len());
        }
        new.push(c);
    }
    new
}

fn contractions(text: String, rules: Rules) -> String {
    let mut text = text;
    let mut replace = |from, by, whole| {
        if let Cow::Owned(new) = substituted(&text, from, by, whole) {
            text = new;
        }
    };
    for (from, by) in WORDS {
        replace(from, by, true);
    }
    for (from, by) in ENDINGS {
        match from == "'s" && rules == Rules::OpenAsr {
            true => BEFORE_IS.into_iter().for_each(|(from, by)| replace(from, by, true)),
            false => replace(from, by, false),
        }
    }
    text
}

/// No commas between digits: of `1,2,3` the second one stays.
fn commas(text: &str) -> String {
    let characters: Vec<char> = text.chars().collect();
    let mut new = String::with_capacity(text.len());
    let mut place = 0;
    while let Some(&c) = characters.get(place) {
        new.push(c);
        place += 1;
        if is_digit(c)
            && characters.get(place) == Some(&',')
            && let Some(&other) = characters.get(place + 1)
            && is_digit(other)
        {
            new.push(other);
            place += 2;
        }
    }
    new
}

/// No full stops but those before a digit.
fn points(text: &str) -> String {
    let mut new = String::with_capacity(text.len());
    let mut characters = text.chars().peekable();
    while let Some(c) = characters.next() {
        if c != '.' || characters.peek().is_some_and(char::is_ascii_digit) {
            new.push(c);
            continue;
        }
        new.push(' ');
        // Taken with it, also if it is another full stop.
        new.extend(characters.next());
    }
    new
}

/// Decomposed, without diacritics, and a space for each other symbol.
fn without_symbols(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.nfkd() {
        match MORE_DIACRITICS.iter().find(|(letter, _)| *letter == c) {
            Some((_, letters)) => plain.push_str(letters),
            None => plain.push(c),
        }
    }
    let plain = super::replaced(&NON_SPACING, &plain, "");
    super::replaced(&SYMBOLS, &plain, " ").into_owned()
}

/// Two words as one.
fn joined(text: &str, one: &'static str, other: &'static str, compound: &'static str) -> String {
    let Some(first) = one.chars().next().filter(|_| text.contains(other)) else {
        return text.to_owned();
    };
    let found = replaced(text, &[first], |before, rest| {
        let after = rest.strip_prefix(one).filter(|_| begins_word(before))?;
        let behind = after.trim_start_matches(is_white_space);
        let end = behind.strip_prefix(other).filter(|_| behind.len() < after.len())?;
        ends_word(end).then_some((rest.len() - end.len(), Cow::Borrowed(compound)))
    });
    found.into_owned()
}

fn spelling(word: &str, rules: Rules) -> &str {
    let whisper = |word| WHISPER_SPELLING.get(word).copied();
    match rules {
        Rules::Whisper => whisper(word).unwrap_or(word),
        Rules::OpenAsr => {
            let spelled = OPEN_ASR_SPELLING.get(word).copied().or_else(|| whisper(word));
            let spelled = spelled.unwrap_or(word);
            OPEN_ASR_NAMES.get(spelled).copied().unwrap_or(spelled)
        }
    }
}

/// Runs of single letters and digits as one word: of two, or of three if `a` or `i` is among them.
fn acronyms(words: Vec<Cow<str>>) -> Vec<Cow<str>> {
    let is_single = |word: &str| {
        let mut characters = word.chars();
        characters.next().is_some_and(is_letter_or_number) && characters.next().is_none()
    };
    let mut found: Vec<Cow<str>> = Vec::with_capacity(words.len());
    for run in words.chunk_by(|one, other| is_single(one) && is_single(other)) {
        let fewest = match run.iter().any(|word| word == "a" || word == "i") {
            true => 3,
            false => 2,
        };
        match run.len() >= fewest {
            true => found.push(Cow::Owned(run.concat())),
            false => found.extend_from_slice(run),
        }
    }
    found
}

/// A space for each symbol of numbers that does not belong to one.
fn stray_symbols(text: &str) -> String {
    let mut before = String::with_capacity(text.len());
    let mut characters = text.chars().peekable();
    while let Some(c) = characters.next() {
        let is_stray = ".$¢€£".contains(c) && characters.peek().is_some_and(|next| !next.is_ascii_digit());
        if !is_stray {
            before.push(c);
            continue;
        }
        before.push(' ');
        before.extend(characters.next());
    }
    let mut after = String::with_capacity(before.len());
    let mut characters = before.chars().peekable();
    while let Some(c) = characters.next() {
        after.push(c);
        if !c.is_ascii_digit() && characters.peek() == Some(&'%') {
            characters.next();
            after.push(' ');
        }
    }
    after
}
