//! `when: EXPRESSION` of stages and groups: a boolean over parameters. The parser is written here since operands are
//! references with the types of their values, and every mistake needs a line and a column.
//!
//! ```text
//! or         = and {"or" and}
//! and        = not {"and" not}
//! not        = "not" not | comparison
//! comparison = operand [("==" | "!=" | "<" | "<=" | ">" | ">=") operand]
//! operand    = "${" name "}" | 'text' | "text" | number | "true" | "false" | "null" | "(" or ")"
//! ```

use std::cmp::Ordering;

use super::substitute::{self, Lookup};
use super::yaml::{self, Number, Value};

/// Why an expression has no value.
#[derive(Debug, PartialEq)]
pub(super) struct Mistake {
    /// Line and column (from 1) within the expression.
    pub offset: (usize, usize),
    /// None where the cause was reported already.
    pub message: Option<String>,
    pub help: Option<String>,
}

/// The value of an expression.
pub(super) fn evaluate(text: &str, lookup: &mut impl Lookup) -> Result<bool, Mistake> {
    let mut parser = Parser {
        text,
        at: 0,
        depth: 0,
        lookup,
    };
    let (start, value) = parser.or()?;
    parser.skip_space();
    if parser.at < text.len() {
        let rest = parser.rest();
        let word: String = rest.chars().take_while(|c| !c.is_whitespace()).take(20).collect();
        let help = match word.as_str() {
            "&&" => "write `and`".to_string(),
            "||" => "write `or`".to_string(),
            "=" => "write `==`".to_string(),
            _ => "comparisons are joined by `and` and `or`".to_string(),
        };
        return Err(parser.mistake(parser.at, format!("`{word}` is not expected here"), Some(help)));
    }
    parser.boolean(start, &value)
}

/// Most parentheses and `not` within each other.
const DEEPEST: usize = 64;

struct Parser<'t, 'l, L> {
    text: &'t str,
    /// In bytes.
    at: usize,
    depth: usize,
    lookup: &'l mut L,
}

/// A value and where it begins.
type Found = (usize, Value);

#[derive(Clone, Copy)]
enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

const COMPARISONS: [(&str, Comparison); 6] = [
    ("==", Comparison::Equal),
    ("!=", Comparison::NotEqual),
    ("<=", Comparison::LessOrEqual),
    (">=", Comparison::GreaterOrEqual),
    ("<", Comparison::Less),
    (">", Comparison::Greater),
];

impl<L: Lookup> Parser<'_, '_, L> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn skip_space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    fn mistake(&self, at: usize, message: impl Into<String>, help: Option<String>) -> Mistake {
        Mistake {
            offset: substitute::position(self.text, at),
            message: Some(message.into()),
            help,
        }
    }

    /// Takes a word that is not the beginning of a longer one.
    fn word(&mut self, word: &str) -> bool {
        self.skip_space();
        let Some(after) = self.rest().strip_prefix(word) else {
            return false;
        };
        if after.starts_with(|c: char| c.is_alphanumeric() || c == '_') {
            return false;
        }
        self.at += word.len();
        true
    }

    fn boolean(&self, start: usize, value: &Value) -> Result<bool, Mistake> {
        value.as_bool().ok_or_else(|| {
            let help = "compare it, as in `${manifest} == ''`".to_string();
            let message = format!("expected true or false, found {}", yaml::describe(value));
            self.mistake(start, message, Some(help))
        })
    }

    fn or(&mut self) -> Result<Found, Mistake> {
        self.joined("or", Self::and, |left, right| left || right)
    }

    fn and(&mut self) -> Result<Found, Mistake> {
        self.joined("and", Self::not, |left, right| left && right)
    }

    /// Operands joined by a word. Both sides are always evaluated, so that mistakes are found whatever the values.
    fn joined(
        &mut self,
        word: &str,
        operand: fn(&mut Self) -> Result<Found, Mistake>,
        join: fn(bool, bool) -> bool,
    ) -> Result<Found, Mistake> {
        let (start, mut value) = operand(self)?;
        while self.word(word) {
            let left = self.boolean(start, &value)?;
            let (right_start, right) = operand(self)?;
            value = Value::Bool(join(left, self.boolean(right_start, &right)?));
        }
        Ok((start, value))
    }

    fn not(&mut self) -> Result<Found, Mistake> {
        self.skip_space();
        let start = self.at;
        if !self.word("not") {
            return self.comparison();
        }
        self.deeper(start)?;
        let (at, value) = self.not()?;
        self.depth -= 1;
        Ok((start, Value::Bool(!self.boolean(at, &value)?)))
    }

    fn deeper(&mut self, start: usize) -> Result<(), Mistake> {
        self.depth += 1;
        if self.depth > DEEPEST {
            let message = format!("more than {DEEPEST} parentheses or `not` are nested");
            return Err(self.mistake(start, message, None));
        }
        Ok(())
    }

    fn comparison(&mut self) -> Result<Found, Mistake> {
        let (start, left) = self.operand()?;
        self.skip_space();
        let sign = COMPARISONS.iter().find(|(sign, _)| self.rest().starts_with(sign));
        let Some((sign, comparison)) = sign else {
            return Ok((start, left));
        };
        let at = self.at;
        self.at += sign.len();
        let (_, right) = self.operand()?;
        let order = order(&left, &right);
        let holds = match (comparison, order) {
            (Comparison::Equal, Some(order)) => order == Some(Ordering::Equal),
            (Comparison::NotEqual, Some(order)) => order != Some(Ordering::Equal),
            (Comparison::Less, Some(Some(order))) => order.is_lt(),
            (Comparison::LessOrEqual, Some(Some(order))) => order.is_le(),
            (Comparison::Greater, Some(Some(order))) => order.is_gt(),
            (Comparison::GreaterOrEqual, Some(Some(order))) => order.is_ge(),
            _ => {
                let message = format!(
                    "`{sign}` cannot compare {} with {}",
                    yaml::describe(&left),
                    yaml::describe(&right)
                );
                return Err(self.mistake(at, message, None));
            }
        };
        Ok((start, Value::Bool(holds)))
    }

    fn operand(&mut self) -> Result<Found, Mistake> {
        self.skip_space();
        let start = self.at;
        if self.rest().starts_with('(') {
            self.at += 1;
            self.deeper(start)?;
            let (_, value) = self.or()?;
            self.depth -= 1;
            self.skip_space();
            if !self.rest().starts_with(')') {
                return Err(self.mistake(start, "`(` is not closed with `)`", None));
            }
            self.at += 1;
            return Ok((start, value));
        }
        for (word, value) in [
            ("true", Value::Bool(true)),
            ("false", Value::Bool(false)),
            ("null", Value::Null),
        ] {
            if self.word(word) {
                return Ok((start, value));
            }
        }
        match self.rest().chars().next() {
            Some('$') => self.reference(start),
            Some(quote @ ('\'' | '"')) => self.quoted(start, quote),
            Some(c) if c.is_ascii_digit() || matches!(c, '-' | '+' | '.') => self.number(start),
            Some(_) => {
                let word: String = self
                    .rest()
                    .chars()
                    .take_while(|c| !c.is_whitespace())
                    .take(40)
                    .collect();
                let help = format!("a parameter is written `${{{word}}}`, a text `'{word}'`");
                Err(self.mistake(start, format!("`{word}` is not a value"), Some(help)))
            }
            None => Err(self.mistake(start, "a value is missing here", None)),
        }
    }

    fn reference(&mut self, start: usize) -> Result<Found, Mistake> {
        let reference = match self.rest().find('}') {
            Some(end) if self.rest().starts_with("${") => &self.text[start..=start + end],
            _ => {
                let help = Some("a parameter is written `${name}`".to_string());
                return Err(self.mistake(start, "this is not a reference to a parameter", help));
            }
        };
        self.at += reference.len();
        match substitute::lone_reference(reference, self.lookup) {
            Ok(value) => Ok((start, value)),
            Err((message, help)) => Err(Mistake {
                offset: substitute::position(self.text, start),
                message,
                help,
            }),
        }
    }

    /// A text in quotes; the quote itself is written twice.
    fn quoted(&mut self, start: usize, quote: char) -> Result<Found, Mistake> {
        self.at += 1;
        let mut text = String::new();
        loop {
            let Some(end) = self.rest().find(quote) else {
                return Err(self.mistake(start, format!("the text is not closed with {quote}"), None));
            };
            text.push_str(&self.rest()[..end]);
            self.at += end + 1;
            if !self.rest().starts_with(quote) {
                if text.contains("${") {
                    let message = "a reference within quotes would be plain text";
                    let help = Some("write it without them: `${name} == 'text'`".to_string());
                    return Err(self.mistake(start, message, help));
                }
                return Ok((start, Value::String(text)));
            }
            text.push(quote);
            self.at += 1;
        }
    }

    fn number(&mut self, start: usize) -> Result<Found, Mistake> {
        let part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+');
        let end = self.rest().find(|c| !part(c)).unwrap_or(self.rest().len());
        let text = &self.text[start..start + end];
        self.at += end;
        match yaml::parse_text(text) {
            Ok(value @ Value::Number(_)) => Ok((start, value)),
            _ => Err(self.mistake(start, format!("`{text}` is not a number"), None)),
        }
    }
}

/// The order of two values: `None` where they cannot be compared, `Some(None)` where they differ without an order.
fn order(left: &Value, right: &Value) -> Option<Option<Ordering>> {
    match (left, right) {
        (Value::Null, Value::Null) => Some(Some(Ordering::Equal)),
        (Value::Null, _) | (_, Value::Null) => Some(None),
        (Value::Bool(left), Value::Bool(right)) if left == right => Some(Some(Ordering::Equal)),
        (Value::Bool(_), Value::Bool(_)) => Some(None),
        (Value::String(left), Value::String(right)) => Some(Some(left.cmp(right))),
        (Value::Number(left), Value::Number(right)) => match (whole(left), whole(right)) {
            (Some(left), Some(right)) => Some(Some(left.cmp(&right))),
            _ => Some(left.as_f64()?.partial_cmp(&right.as_f64()?)),
        },
        _ => None,
    }
}

fn whole(number: &Number) -> Option<i128> {
    number
        .as_i64()
        .map(i128::from)
        .or_else(|| number.as_u64().map(i128::from))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Fixed;

    impl Lookup for Fixed {
        fn param(&mut self, name: &str) -> Result<Value, Option<String>> {
            match name {
                "manifest" => Ok(Value::from("a.jsonl")),
                "empty" => Ok(Value::from("")),
                "delete" => Ok(Value::from(true)),
                "train.steps" => Ok(Value::from(600)),
                "share" => Ok(Value::from(0.5)),
                "limit" => Ok(Value::Null),
                "formats" => Ok(Value::Sequence(vec![Value::from("zip")])),
                "broken" => Err(None),
                _ => Err(Some("no such thing".into())),
            }
        }

        fn environment(&mut self, name: &str) -> Option<String> {
            (name == "RANKS").then(|| "8".to_string())
        }

        fn spend(&mut self, _: usize) -> bool {
            true
        }
    }

    fn holds(text: &str) -> bool {
        evaluate(text, &mut Fixed).unwrap_or_else(|mistake| panic!("{text}: {mistake:?}"))
    }

    #[test]
    fn comparisons_go_by_the_types_of_values() {
        for (text, expected) in [
            ("${manifest} == ''", false),
            ("${empty} == ''", true),
            ("${manifest} != \"a.jsonl\"", false),
            ("${delete}", true),
            ("not ${delete}", false),
            ("not ${delete} or ${empty} == ''", true),
            ("not (${delete} or ${empty} == '')", false),
            ("${train.steps} >= 600 and ${train.steps} < 1e3", true),
            ("${share} == 0.5", true),
            ("${share} > 1", false),
            ("18446744073709551615 == 18446744073709551614", false),
            ("${limit} == null", true),
            ("${limit} == 7", false),
            ("${env:RANKS} == 8", true),
            ("${env:NO_SUCH:-x} == 'x'", true),
            ("true and not false", true),
            ("false and false or true", true),
            ("'it''s' == \"it's\"", true),
            ("'a' < 'b'", true),
            ("  ${delete}\n  and true ", true),
        ] {
            assert_eq!(holds(text), expected, "{text}");
        }
    }

    #[test]
    fn mistakes_say_where_they_are() {
        for (text, offset, message) in [
            ("${manifest}", (1, 1), "expected true or false, found text"),
            ("${manifest} == 7", (1, 13), "`==` cannot compare"),
            ("${formats} == ''", (1, 12), "`==` cannot compare"),
            ("${limit} < 7", (1, 10), "`<` cannot compare"),
            ("${delete} && true", (1, 11), "`&&` is not expected here"),
            ("${nothing} == ''", (1, 1), "unknown parameter `nothing`"),
            ("manifest == ''", (1, 1), "`manifest` is not a value"),
            ("${manifest == ''", (1, 1), "this is not a reference"),
            ("true and\n  7", (2, 3), "expected true or false"),
            ("(true", (1, 1), "`(` is not closed"),
            ("'a", (1, 1), "the text is not closed"),
            ("'${manifest}' == ''", (1, 1), "a reference within quotes"),
            ("", (1, 1), "a value is missing"),
            ("true or", (1, 8), "a value is missing"),
            ("1.2.3 == 1", (1, 1), "`1.2.3` is not a number"),
            // The second side is evaluated although the first one decides.
            ("true or ${nothing}", (1, 9), "unknown parameter `nothing`"),
        ] {
            let mistake = evaluate(text, &mut Fixed).unwrap_err();
            assert_eq!(mistake.offset, offset, "{text}: {mistake:?}");
            let found = mistake.message.unwrap_or_default();
            assert!(found.starts_with(message), "{text}: {found}");
        }
        // The mistake was reported where it is.
        assert_eq!(evaluate("${broken}", &mut Fixed).unwrap_err().message, None);
        let deep = "(".repeat(100_000);
        assert!(evaluate(&deep, &mut Fixed).is_err());
        assert!(evaluate(&"not ".repeat(100_000), &mut Fixed).is_err());
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,40}", parts in prop::collection::vec(
            prop::sample::select(vec!["${delete}", "${share}", "==", "(", ")", "not ", "and ", "or ", "'", "7", "ß"]), 0..12))
        {
            let _ = evaluate(&text, &mut Fixed);
            let _ = evaluate(&parts.concat(), &mut Fixed);
        }
    }
}
