//! Numbers in English texts as Whisper's `EnglishNumberNormalizer` writes them: `twenty five dollars` becomes `$25`.
//!
//! Numbers are kept as decimal digits, so that they may be of any size.

use std::borrow::Cow;

use super::characters::{ascii_digit, begins_word, ends_word, is_digit, replaced};
use crate::wer::{is_white_space, words};

const ZEROS: [&str; 3] = ["o", "oh", "zero"];
const ONES: [&str; 19] = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
];
const TENS: [&str; 8] = [
    "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
];
/// With the number of zeros.
const MULTIPLIERS: [(&str, usize); 12] = [
    ("hundred", 2),
    ("thousand", 3),
    ("million", 6),
    ("billion", 9),
    ("trillion", 12),
    ("quadrillion", 15),
    ("quintillion", 18),
    ("sextillion", 21),
    ("septillion", 24),
    ("octillion", 27),
    ("nonillion", 30),
    ("decillion", 33),
];
const CURRENCIES: [char; 3] = ['€', '£', '$'];

/// What a word is in a number.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Role {
    Zero,
    One(u32),
    /// Ordinal or plural, with its ending.
    OneWithEnding(u32, &'static str),
    Ten(u32),
    TenWithEnding(u32, &'static str),
    /// A power of ten.
    Multiplier(usize),
    MultiplierWithEnding(usize, &'static str),
    /// Before a number: its sign.
    Sign(&'static str),
    /// After a number: the symbol that is put before it.
    Currency(&'static str),
    Per,
    Percent,
    And,
    Repeat(usize),
    Point,
}

impl Role {
    fn of(word: &str) -> Option<Role> {
        let place = |list: &[&str], word: &str| list.iter().position(|other| *other == word).map(|place| place as u32);
        let one = |word: &str| Some(place(&ONES, word)? + 1);
        let ten = |word: &str| Some(place(&TENS, word)? * 10 + 20);
        let multiplier = |word: &str| {
            MULTIPLIERS
                .iter()
                .find(|(name, _)| *name == word)
                .map(|(_, zeros)| *zeros)
        };
        Some(match word {
            "minus" | "negative" => Role::Sign("-"),
            "plus" | "positive" => Role::Sign("+"),
            "pound" | "pounds" => Role::Currency("£"),
            "euro" | "euros" => Role::Currency("€"),
            "dollar" | "dollars" => Role::Currency("$"),
            "cent" | "cents" => Role::Currency("¢"),
            "per" => Role::Per,
            "percent" => Role::Percent,
            "and" => Role::And,
            "double" => Role::Repeat(2),
            "triple" => Role::Repeat(3),
            "point" => Role::Point,
            "zeroth" => Role::OneWithEnding(0, "th"),
            "first" => Role::OneWithEnding(1, "st"),
            "second" => Role::OneWithEnding(2, "nd"),
            "third" => Role::OneWithEnding(3, "rd"),
            "fifth" => Role::OneWithEnding(5, "th"),
            "twelfth" => Role::OneWithEnding(12, "th"),
            "eighth" => Role::OneWithEnding(8, "th"),
            "sixes" => Role::OneWithEnding(6, "s"),
            _ if ZEROS.contains(&word) => Role::Zero,
            _ => {
                if let Some(value) = one(word) {
                    return Some(Role::One(value));
                }
                if let Some(value) = ten(word) {
                    return Some(Role::Ten(value));
                }
                if let Some(zeros) = multiplier(word) {
                    return Some(Role::Multiplier(zeros));
                }
                for (ending, letters) in [("s", "s"), ("th", "th")] {
                    let Some(stem) = word.strip_suffix(letters) else {
                        continue;
                    };
                    // `sixes`, and the ordinals of their own above.
                    let regular = match ending {
                        "s" => stem != "six",
                        _ => !matches!(stem, "one" | "two" | "three" | "five" | "eight" | "twelve"),
                    };
                    if let Some(value) = one(stem).filter(|_| regular) {
                        return Some(Role::OneWithEnding(value, ending));
                    }
                    if let Some(zeros) = multiplier(stem) {
                        return Some(Role::MultiplierWithEnding(zeros, ending));
                    }
                }
                for (ending, letters) in [("s", "ies"), ("th", "ieth")] {
                    let value = word.strip_suffix(letters).and_then(|stem| ten(&format!("{stem}y")));
                    if let Some(value) = value {
                        return Some(Role::TenWithEnding(value, ending));
                    }
                }
                return None;
            }
        })
    }

    /// Digits one after the other, as after `point`.
    fn is_decimal(self) -> bool {
        matches!(self, Role::Zero | Role::One(_) | Role::Ten(_))
    }
}

/// `^\d+(\.\d+)?$`
fn is_numeral(word: &str) -> bool {
    let is_digits = |part: &str| !part.is_empty() && part.chars().all(is_digit);
    match word.split_once('.') {
        Some((whole, fraction)) => is_digits(whole) && is_digits(fraction),
        None => is_digits(word),
    }
}

/// The number that has been said so far.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    /// An integer: ASCII digits without leading zeros.
    Number(String),
    /// Digits, and perhaps other characters, that are not counted on.
    Digits(String),
}

impl Value {
    fn number(value: u32) -> Value {
        Value::Number(value.to_string())
    }

    fn power_of_ten(zeros: usize) -> Value {
        Value::Number(format!("1{}", "0".repeat(zeros)))
    }

    fn text(&self) -> &str {
        match self {
            Value::Number(text) | Value::Digits(text) => text,
        }
    }

    /// The text, but nothing for zero.
    fn text_unless_zero(value: Option<&Value>) -> &str {
        match value {
            Some(Value::Number(zero)) if zero == "0" => "",
            Some(value) => value.text(),
            None => "",
        }
    }

    /// Adds a number below a hundred where the last digits are zeros that it fills, else puts its digits behind.
    fn with(&self, addend: u32) -> Value {
        let digits = addend.to_string();
        if let Value::Number(number) = self {
            // What is below ten fills one zero, all else two.
            let places = digits.len();
            let ends_in_zeros = number == "0" || (number.len() > places && number.ends_with(&"00"[..places]));
            if ends_in_zeros {
                let kept = if number == "0" {
                    ""
                } else {
                    &number[..number.len() - places]
                };
                return Value::Number(format!("{kept}{digits}"));
            }
        }
        Value::Digits(format!("{}{digits}", self.text()))
    }

    /// An integer times a power of ten: of its part below a thousand alone.
    fn multiplied(number: &str, zeros: usize) -> String {
        let (before, residual) = number.split_at(number.len().saturating_sub(3));
        let product = stripped(&format!("{residual}{}", "0".repeat(zeros)));
        match before.is_empty() {
            true => product,
            false => sum(&format!("{before}000"), &product),
        }
    }

    /// Digits with a point times a power of ten, where that is an integer.
    fn scaled(text: &str, zeros: usize) -> Option<String> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        if whole.is_empty() && fraction.is_empty() {
            return None;
        }
        let ascii = |part: &str| part.chars().map(ascii_digit).collect::<Option<String>>();
        let (whole, fraction) = (ascii(whole)?, ascii(fraction)?);
        let fraction = fraction.trim_end_matches('0');
        let missing = zeros.checked_sub(fraction.len())?;
        Some(stripped(&format!("{whole}{fraction}{}", "0".repeat(missing))))
    }
}

/// Digits without leading zeros.
fn stripped(digits: &str) -> String {
    match digits.trim_start_matches('0') {
        "" => "0".to_owned(),
        digits => digits.to_owned(),
    }
}

/// The sum of two integers of ASCII digits.
fn sum(a: &str, b: &str) -> String {
    let mut digits = Vec::with_capacity(a.len().max(b.len()) + 1);
    let (mut a, mut b) = (a.bytes().rev(), b.bytes().rev());
    let mut carry = 0;
    loop {
        let (one, other) = (a.next(), b.next());
        if one.is_none() && other.is_none() && carry == 0 {
            break;
        }
        let digit = carry + one.map_or(0, |digit| digit - b'0') + other.map_or(0, |digit| digit - b'0');
        digits.push(char::from(b'0' + digit % 10));
        carry = digit / 10;
    }
    stripped(&digits.into_iter().rev().collect::<String>())
}

/// A text with its numbers in digits, its words separated by one space.
pub(super) fn with_digits(text: &str) -> String {
    let prepared = prepared(text);
    let mut machine = Machine::default();
    machine.read(&words(&prepared));
    finished(&machine.written.join(" "))
}

#[derive(Default)]
struct Machine {
    written: Vec<String>,
    prefix: Option<String>,
    value: Option<Value>,
}

impl Machine {
    fn write(&mut self, text: &str) {
        let prefix = self.prefix.take().unwrap_or_default();
        self.written.push(format!("{prefix}{text}"));
        self.value = None;
    }

    /// Writes the number that has been said, if any.
    fn end(&mut self) {
        if let Some(value) = self.value.take() {
            self.write(value.text());
        }
    }

    fn read(&mut self, words: &[&str]) {
        let mut place = 0;
        while place < words.len() {
            let before = place.checked_sub(1).and_then(|before| Role::of(words[before]));
            let taken = self.step(before, words[place], words.get(place + 1).copied());
            place += taken;
        }
        self.end();
    }

    /// Reads a word, between the one before and the one after it. Returns how many it took.
    fn step(&mut self, before: Option<Role>, word: &str, next: Option<&str>) -> usize {
        let signed = word.chars().next().filter(|c| "-+£€$¢".contains(*c));
        let unsigned = &word[signed.map_or(0, char::len_utf8)..];
        if is_numeral(unsigned) {
            self.numeral(word, signed, unsigned);
            return 1;
        }
        let Some(role) = Role::of(word) else {
            self.end();
            self.write(word);
            return 1;
        };
        let next_role = next.and_then(Role::of);
        let next_is_numeral = next.is_some_and(is_numeral);
        let after_ten = matches!(before, Some(Role::Ten(_)));
        let after_one = matches!(before, Some(Role::One(_)));
        // A one behind others: a value, and whether it goes behind them as digits do.
        let with_one = |value: &Value, one: u32| match value {
            Value::Digits(digits) if after_ten && one < 10 => {
                Value::Digits(format!("{}{one}", &digits[..digits.len().saturating_sub(1)]))
            }
            Value::Number(number) if after_one => Value::Digits(format!("{number}{one}")),
            value => value.with(one),
        };
        match role {
            Role::Zero => {
                let digits = Value::text_unless_zero(self.value.as_ref());
                self.value = Some(Value::Digits(format!("{digits}0")));
            }
            Role::One(one) => {
                let value = self.value.as_ref().map(|value| with_one(value, one));
                self.value = Some(value.unwrap_or_else(|| Value::number(one)));
            }
            Role::OneWithEnding(one, ending) => {
                let value = self.value.as_ref().map(|value| with_one(value, one));
                let value = value.unwrap_or_else(|| Value::number(one));
                self.write(&format!("{}{ending}", value.text()));
            }
            Role::Ten(ten) => {
                let value = self.value.as_ref().map(|value| value.with(ten));
                self.value = Some(value.unwrap_or_else(|| Value::number(ten)));
            }
            Role::TenWithEnding(ten, ending) => {
                let value = self.value.as_ref().map(|value| value.with(ten));
                let value = value.unwrap_or_else(|| Value::number(ten));
                self.write(&format!("{}{ending}", value.text()));
            }
            Role::Multiplier(zeros) => match self.value.take() {
                None => self.value = Some(Value::power_of_ten(zeros)),
                Some(Value::Number(number)) => {
                    self.value = Some(Value::Number(Value::multiplied(&number, zeros)));
                }
                Some(Value::Digits(digits)) => match Value::scaled(&digits, zeros) {
                    Some(number) => self.value = Some(Value::Number(number)),
                    None => {
                        self.write(&digits);
                        self.value = Some(Value::power_of_ten(zeros));
                    }
                },
            },
            Role::MultiplierWithEnding(zeros, ending) => match self.value.take() {
                None => self.write(&format!("{}{ending}", Value::power_of_ten(zeros).text())),
                Some(Value::Number(number)) => self.write(&format!("{}{ending}", Value::multiplied(&number, zeros))),
                Some(Value::Digits(digits)) => match Value::scaled(&digits, zeros) {
                    Some(number) => self.write(&format!("{number}{ending}")),
                    None => {
                        self.write(&digits);
                        self.write(&format!("{}{ending}", Value::power_of_ten(zeros).text()));
                    }
                },
            },
            Role::Sign(sign) => {
                self.end();
                if next_role.is_some() || next_is_numeral {
                    self.prefix = Some(sign.to_owned());
                } else {
                    self.write(word);
                }
            }
            Role::Currency(symbol) => match self.value {
                Some(_) => {
                    self.prefix = Some(symbol.to_owned());
                    self.end();
                }
                None => self.write(word),
            },
            Role::Percent => match self.value.take() {
                Some(value) => self.write(&format!("{}%", value.text())),
                None => self.write(word),
            },
            Role::Per => match self.value.take() {
                Some(value) if next == Some("cent") => {
                    self.write(&format!("{}%", value.text()));
                    return 2;
                }
                value => {
                    self.value = value;
                    self.end();
                    self.write(word);
                }
            },
            // These need a number behind them.
            Role::And | Role::Repeat(_) | Role::Point if next_role.is_none() && !next_is_numeral => {
                self.end();
                self.write(word);
            }
            Role::And => {
                if !matches!(before, Some(Role::Multiplier(_))) {
                    self.end();
                    self.write(word);
                }
            }
            Role::Repeat(times) => {
                let digit = match next_role {
                    Some(Role::One(one)) => Some(one),
                    Some(Role::Zero) => Some(0),
                    _ => None,
                };
                let Some(digit) = digit else {
                    self.end();
                    self.write(word);
                    return 1;
                };
                let digits = Value::text_unless_zero(self.value.as_ref());
                let repeated = digit.to_string().repeat(times);
                self.value = Some(Value::Digits(format!("{digits}{repeated}")));
                return 2;
            }
            Role::Point => {
                // Before other words of numbers it vanishes, as in Whisper.
                if next_role.is_some_and(Role::is_decimal) || next_is_numeral {
                    let digits = Value::text_unless_zero(self.value.as_ref());
                    self.value = Some(Value::Digits(format!("{digits}.")));
                }
            }
        }
        1
    }

    /// Digits in the text, perhaps behind a sign or a currency.
    fn numeral(&mut self, word: &str, signed: Option<char>, unsigned: &str) {
        match &mut self.value {
            Some(Value::Digits(digits)) if digits.ends_with('.') => {
                // Decimals, or the next part of an IP address.
                digits.push_str(word);
                return;
            }
            _ => self.end(),
        }
        if let Some(sign) = signed {
            self.prefix = Some(sign.to_string());
        }
        self.value = Some(match Value::scaled(unsigned, 0) {
            Some(number) => Value::Number(number),
            None => Value::Digits(unsigned.to_owned()),
        });
    }
}

/// `and a half` as a number, and digits apart from letters.
fn prepared(text: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    let mut rest = text;
    while let Some((segment, behind)) = at_half(rest) {
        if let Some(last) = words(segment).last() {
            let is_number = Role::of(last).is_some_and(|role| role.is_decimal() || matches!(role, Role::Multiplier(_)));
            parts.push(segment);
            parts.push(if is_number { "point five" } else { "and a half" });
        }
        rest = behind;
    }
    if !rest.chars().all(is_white_space) {
        parts.push(rest);
    }
    let text = parts.join(" ");
    // Letters and digits of ASCII alone.
    let mut apart = String::with_capacity(text.len());
    let mut before = ' ';
    for c in text.chars() {
        let is_boundary =
            (before.is_ascii_lowercase() && c.is_ascii_digit()) || (before.is_ascii_digit() && c.is_ascii_lowercase());
        if is_boundary {
            apart.push(' ');
        }
        apart.push(c);
        before = c;
    }
    // But an ending stays with its number.
    let joined = replaced(
        &apart,
        &['0', '1', '2', '3', '4', '5', '6', '7', '8', '9'],
        |_, rest| {
            let behind = rest[1..].trim_start_matches(is_white_space);
            if behind.len() == rest.len() - 1 {
                return None;
            }
            let ending = ["st", "nd", "rd", "th", "s"]
                .into_iter()
                .find(|ending| behind.strip_prefix(ending).is_some_and(ends_word))?;
            let length = rest.len() - behind.len() + ending.len();
            Some((length, Cow::Owned(format!("{}{ending}", &rest[..1]))))
        },
    );
    joined.into_owned()
}

/// The text before `and a half` and that behind it.
fn at_half(text: &str) -> Option<(&str, &str)> {
    let mut from = 0;
    while let Some(place) = text[from..].find("and").map(|place| from + place) {
        from = place + 3;
        if !begins_word(&text[..place]) {
            continue;
        }
        let next = |rest: &str, word: &str| -> Option<usize> {
            let behind = rest.trim_start_matches(is_white_space);
            (behind.len() < rest.len() && behind.starts_with(word)).then(|| rest.len() - behind.len() + word.len())
        };
        let half = next(&text[from..], "a").and_then(|a| Some(from + a + next(&text[from + a..], "half")?));
        if let Some(end) = half.filter(|end| ends_word(&text[*end..])) {
            return Some((&text[..place], &text[end..]));
        }
    }
    None
}

/// One or two digits that end a word, and what is behind them.
fn cents(text: &str) -> Option<(&str, usize)> {
    let digits = text.bytes().take(2).take_while(u8::is_ascii_digit).count();
    (1..=digits)
        .rev()
        .find(|length| ends_word(&text[*length..]))
        .map(|length| (&text[..length], length))
}

/// `$2 and ¢7` is `$2.07`, `$0.07` is `¢7`, and 1 is `one`.
fn finished(text: &str) -> String {
    let text = replaced(text, &CURRENCIES, |_, rest| {
        let symbol = rest.chars().next()?;
        let behind = &rest[symbol.len_utf8()..];
        let whole = behind.bytes().take_while(u8::is_ascii_digit).count();
        let after = behind[whole..].strip_prefix(' ').filter(|_| whole > 0)?;
        let after = after.strip_prefix("and ").unwrap_or(after).strip_prefix('¢')?;
        let (digits, length) = cents(after)?;
        let length = rest.len() - after.len() + length;
        Some((length, Cow::Owned(format!("{symbol}{}.{digits:0>2}", &behind[..whole]))))
    });
    let text = replaced(&text, &CURRENCIES, |_, rest| {
        let symbol = rest.chars().next()?;
        let behind = rest[symbol.len_utf8()..].strip_prefix('0')?;
        let any = behind.chars().next()?;
        let after = &behind[any.len_utf8()..];
        let (digits, length) = cents(after)?;
        let length = rest.len() - after.len() + length;
        Some((length, Cow::Owned(format!("¢{}", stripped(digits)))))
    });
    let text = replaced(&text, &['1'], |before, rest| {
        if !begins_word(before) {
            return None;
        }
        match rest[1..].strip_prefix('s') {
            Some(behind) if ends_word(behind) => Some((2, Cow::Borrowed("ones"))),
            _ => ends_word(&rest[1..]).then_some((1, Cow::Borrowed("one"))),
        }
    });
    text.into_owned()
}
