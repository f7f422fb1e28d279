//! Limits how deep lists and maps of YAML are nested, by a scan of the text before the parser, whose time grows with the square of
//! the depth. It has no dependencies, so that every crate that reads YAML can use it.

use std::fmt;
use std::str::Chars;

/// Most levels of `[` and `{` within each other. The parser itself allows 128 levels of any form.
pub const DEEPEST: usize = 128;
/// What a message says of such a text.
pub const TOO_DEEP: &str = "lists and maps are nested more than 128 deep";
/// Most brackets that are text, times the bytes of the document. Where the parser should take them for lists after all, it needs
/// some seconds.
const MOST_AS_TEXT: usize = 2_000_000_000;

/// Where a text goes deeper than [`DEEPEST`]: line and column, both from 1, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooDeep {
    pub line: usize,
    pub column: usize,
}

impl fmt::Display for TooDeep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{TOO_DEEP} at line {} column {}", self.line, self.column)
    }
}

impl std::error::Error for TooDeep {}

/// Refuses a text that goes too deep.
///
/// Brackets count where YAML takes them for lists and maps: not in quotes, comments, block texts (`|`), or within plain
/// text. This scan knows less than the parser (of plain text over several lines, say), so that brackets that are text are
/// limited, too, to a number that only a text made for it has.
///
/// # Errors
/// With the place of the bracket that is one too many.
pub fn check(text: &str) -> Result<(), TooDeep> {
    let mut scan = Scan::default();
    let mut as_text = 0usize;
    for (number, line) in text.split('\n').enumerate() {
        let place = |column| TooDeep {
            line: number + 1,
            column,
        };
        let counted = scan.counted;
        if let Some(column) = scan.line(line) {
            return Err(place(column));
        }
        let all = line.bytes().filter(|byte| matches!(byte, b'[' | b'{')).count();
        as_text += all.saturating_sub(scan.counted - counted);
        if as_text.saturating_mul(text.len()) > MOST_AS_TEXT {
            return Err(place(1));
        }
    }
    Ok(())
}

#[derive(Default)]
struct Scan {
    /// Of `[` and `{`.
    depth: usize,
    /// Those that began a list or map.
    counted: usize,
    /// The quote that is open.
    quote: Option<char>,
    /// The indentation that lines of a block text exceed.
    block_text: Option<isize>,
}

impl Scan {
    /// Scans a line; gives the column at which it is too deep.
    fn line(&mut self, line: &str) -> Option<usize> {
        let indentation = line.chars().take_while(|c| *c == ' ').count();
        if let Some(parent) = self.block_text {
            if line.trim().is_empty() || indentation as isize > parent {
                return None;
            }
            self.block_text = None;
        }
        let mut column = 0;
        // The column of the list item or key that the line is in, and whether a value may begin here.
        let mut parent = -1;
        let mut begins = true;
        let mut before = ' ';
        let mut rest = line.chars();
        while let Some(c) = rest.next() {
            column += 1;
            let blank_before = before == ' ' || before == '\t';
            let blank_after = rest.as_str().starts_with([' ', '\t', '\r']) || rest.as_str().is_empty();
            before = c;
            if let Some(quote) = self.quote {
                column += self.in_quotes(quote, c, &mut rest);
                continue;
            }
            if begins && self.depth == 0 && !matches!(c, ' ' | '\t' | '\r' | '!' | '&' | '|' | '>') {
                parent = column as isize - 1;
            }
            match c {
                ' ' | '\t' | '\r' => continue,
                '#' if blank_before => return None,
                '[' | '{' if begins || self.depth > 0 => {
                    self.depth += 1;
                    self.counted += 1;
                    begins = true;
                    if self.depth > DEEPEST {
                        return Some(column);
                    }
                    continue;
                }
                ']' | '}' if self.depth > 0 => self.depth -= 1,
                ',' if self.depth > 0 => {
                    begins = true;
                    continue;
                }
                '"' | '\'' if begins => self.quote = Some(c),
                ':' if blank_after || self.depth > 0 => {
                    begins = true;
                    continue;
                }
                '-' | '?' if begins && blank_after && self.depth == 0 => continue,
                '|' | '>' if begins && self.depth == 0 => {
                    self.block_text = Some(parent);
                    return None;
                }
                // A tag or an anchor: the value comes after it.
                '!' | '&' if begins => {
                    while !rest.as_str().is_empty() && !rest.as_str().starts_with([' ', '\t', ',', '[', ']', '{', '}'])
                    {
                        rest.next();
                        column += 1;
                    }
                    continue;
                }
                '-' if column == 1 && line.starts_with("---") && self.depth == 0 => {
                    rest.nth(1);
                    column += 2;
                    continue;
                }
                _ => {}
            }
            begins = false;
        }
        None
    }

    /// Goes on within quotes; gives how many characters it took beyond `c`.
    fn in_quotes(&mut self, quote: char, c: char, rest: &mut Chars<'_>) -> usize {
        let doubled = quote == '\'' && c == '\'' && rest.as_str().starts_with('\'');
        let escaped = quote == '"' && c == '\\' && !rest.as_str().is_empty();
        if doubled || escaped {
            rest.next();
            return 1;
        }
        if c == quote {
            self.quote = None;
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_yaml::Value;

    use super::*;

    fn too_deep(text: &str) -> Option<(usize, usize)> {
        check(text).err().map(|place| (place.line, place.column))
    }

    fn parse(text: &str) -> Result<Value, String> {
        check(text).map_err(|error| error.to_string())?;
        serde_yaml::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_too_deep_is_found_where_it_is() {
        for (open, close) in [
            ("[", "]"),
            ("{a: ", "}"),
            ("[{a: ", "}]"),
            ("[\n", "]"),
            ("{? ", "}"),
            ("!t [", "]"),
        ] {
            let times = |times: usize| format!("x: {}1{}", open.repeat(times), close.repeat(times));
            let levels = open.matches(['[', '{']).count();
            assert_eq!(too_deep(&times(DEEPEST / levels)), None, "{open}");
            assert!(too_deep(&times(DEEPEST / levels + 1)).is_some(), "{open}");
        }
        let deep = "[".repeat(DEEPEST + 1);
        assert_eq!(too_deep(&format!("a: 1\nb: {deep}")), Some((2, 4 + DEEPEST)));
        assert_eq!(too_deep(&format!("- - ? {deep}")), Some((1, 7 + DEEPEST)));
        assert_eq!(too_deep(&format!("--- &a !b {deep}")), Some((1, 11 + DEEPEST)));
    }

    #[test]
    fn brackets_that_are_text_do_not_count() {
        let many = "[{".repeat(DEEPEST);
        for text in [
            format!("a: |\n  {many}\n\n  {many}\nb: 1"),
            format!("- k: >-\n    {many}\n  b: 1"),
            format!("- |2\n   {many}\n"),
            format!("a: \"{many}\\\" {many}\"\nb: 1"),
            format!("a: 'it''s {many}\n  {many}'\nb: 1"),
            format!("a: plain {many}\nb: 1"),
            format!("a: x{many}\nb: 1"),
            format!("a: 1 # {many}\nb: 1"),
            format!("# {many}\nb: 1"),
            format!("a: [\"{many}\", 'x{many}'] # {many}\nb: 1"),
            format!("\"{many}\": 1\nb: 1"),
            format!("? |\n  {many}\n: 1\nb: 1"),
        ] {
            assert_eq!(too_deep(&text), None, "{text}");
            assert!(parse(&text).is_ok(), "{text}: {:?}", parse(&text));
            // Brackets after them count.
            let deep = format!("{}\nc: {}", text.trim_end(), "[".repeat(DEEPEST + 1));
            assert!(too_deep(&deep).is_some(), "{deep}");
        }
    }

    #[test]
    fn deep_documents_are_refused_at_once() {
        let many = 200_000;
        for text in [
            "[".repeat(many),
            "{a: ".repeat(many),
            "- [".repeat(many),
            format!("{}1{}", "[".repeat(many), "]".repeat(many)),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(
                error.contains("128 deep") && error.contains(" at line 1 column "),
                "{error}"
            );
        }
        // Other forms of nesting, which the parser limits itself.
        for text in [
            "- ".repeat(many),
            "? ".repeat(many),
            "a: &b !c ".repeat(1000),
            "a:\n ".repeat(1000),
        ] {
            let _ = parse(&text);
        }
        assert!(parse(&"- ".repeat(many)).is_err());
    }

    /// What the scan takes for a comment, a quote or a block text, and the parser does not.
    #[test]
    fn what_is_taken_for_text_is_limited_too() {
        let deep = "[".repeat(100_000);
        for begin in ["#\r", "a: x\n  \"y\nb: ", "- x\n  'y\n- ", "a:\n  |\n  t\nb: "] {
            let text = format!("{begin}{deep}");
            assert!(too_deep(&text).is_some(), "{begin:?}");
        }
        // A text with brackets is none of these.
        assert_eq!(too_deep(&"- 'a [b] {c}'\n".repeat(1000)), None);
    }

    fn document() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            "[a-z #:'\"\\[\\]{}\n,|>!&*%@`?-]{0,12}".prop_map(Value::from),
            any::<i32>().prop_map(Value::from)
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Sequence),
                prop::collection::btree_map("[a-z\\[{'\" #:|-]{1,6}", inner, 0..4)
                    .prop_map(|map| Value::Mapping(map.into_iter().map(|(k, v)| (Value::from(k), v)).collect())),
            ]
        })
    }

    proptest! {
        /// A document that is written well is never taken for too deep, and when too deep a list follows, that is found.
        #[test]
        fn only_the_depth_of_lists_and_maps_counts(value in document()) {
            let Value::Mapping(map) = &value else { return Ok(()) };
            if map.is_empty() { return Ok(()) }
            let text = serde_yaml::to_string(&value).unwrap();
            prop_assert_eq!(too_deep(&text), None, "{}", text);
            let deep = format!("{text}\nlast: {}", "[".repeat(DEEPEST + 1));
            prop_assert!(too_deep(&deep).is_some(), "{}", deep);
        }
    }
}
