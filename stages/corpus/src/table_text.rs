//! Comma- and tab-separated tables.
//!
//! Not `csv-core`: to it a quote that is not closed takes the rest of the file, here only its own line.

use std::borrow::Cow;
use std::ops::Range;

use crate::decoded_text::DecodedText;

/// One line of a table (several lines, where a quoted field holds line breaks).
#[derive(Clone, Debug, PartialEq)]
pub struct Record<'t> {
    pub fields: Vec<Cow<'t, str>>,
    /// Its text in the file.
    pub line: &'t str,
    /// An error: its reason and its detail.
    pub broken: Option<(&'static str, &'static str)>,
}

/// How the fields of a table are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Between fields: a comma, a tab or another letter of ASCII.
    pub separator: char,
    /// A field in double quotes may hold separators, line breaks and doubled quotes (RFC 4180). Otherwise quotes are letters like
    /// others.
    pub quoted: bool,
}

/// The records of a table one after the other.
#[derive(Clone, Debug)]
pub struct Records<'t> {
    /// Ends where the table does.
    text: &'t str,
    at: usize,
    /// Where the record begins that was given last.
    given: usize,
    layout: Layout,
    decoded: Option<&'t DecodedText>,
}

/// Reads a table, its heading included. Blank lines are stepped over.
pub fn records(text: &str, layout: Layout) -> Records<'_> {
    Records {
        text,
        at: 0,
        given: 0,
        layout,
        decoded: None,
    }
}

impl<'t> Records<'t> {
    /// The records in a range of a text, in bytes. Those in which something was replaced are broken.
    pub fn of(decoded: &'t DecodedText, range: Range<usize>, layout: Layout) -> Self {
        Records {
            text: &decoded.text[..range.end],
            at: range.start,
            given: range.start,
            layout,
            decoded: Some(decoded),
        }
    }

    /// Where in the text the next record begins, in bytes.
    pub fn at(&self) -> usize {
        self.at
    }

    /// The records, each with the number of the line that it begins at; `line` is the one that the first byte is of.
    pub fn with_lines(mut self, mut line: u64) -> impl Iterator<Item = (u64, Record<'t>)> {
        let mut counted = self.at;
        std::iter::from_fn(move || {
            let record = self.next()?;
            line += line_ends(&self.text[counted..self.given]);
            counted = self.given;
            Some((line, record))
        })
    }
}

pub fn line_ends(text: &str) -> u64 {
    text.bytes().filter(|byte| *byte == b'\n').count() as u64
}

impl<'t> Iterator for Records<'t> {
    type Item = Record<'t>;

    fn next(&mut self) -> Option<Record<'t>> {
        loop {
            let rest = &self.text[self.at..];
            if rest.is_empty() {
                return None;
            }
            let (mut record, length) = if self.layout.quoted {
                quoted_record(rest, self.layout.separator)
            } else {
                plain_record(rest, self.layout.separator)
            };
            let range = self.at..self.at + length;
            self.at = range.end;
            if !record.line.trim().is_empty() {
                self.given = range.start;
                if self.decoded.is_some_and(|decoded| decoded.is_replaced(range)) && record.broken.is_none() {
                    record.broken = Some(("not_utf8", "the line is not UTF-8"));
                }
                return Some(record);
            }
        }
    }
}

fn record<'t>(fields: Vec<Cow<'t, str>>, line: &'t str, broken: Option<&'static str>) -> Record<'t> {
    Record {
        fields,
        line: line.trim_end_matches(['\n', '\r']),
        broken: broken.map(|why| ("bad_line", why)),
    }
}

fn plain_record(rest: &str, separator: char) -> (Record<'_>, usize) {
    let length = rest.find('\n').map_or(rest.len(), |end| end + 1);
    let line = rest[..length].trim_end_matches(['\n', '\r']);
    (
        record(line.split(separator).map(Cow::Borrowed).collect(), line, None),
        length,
    )
}

fn quoted_record(rest: &str, separator: char) -> (Record<'_>, usize) {
    let mut fields = Vec::new();
    let mut at = 0;
    loop {
        let (field, end) = match rest[at..].strip_prefix('"') {
            Some(inner) => {
                let Some((field, length)) = quoted_field(inner) else {
                    // The end of the field is unknown: the line is rejected, and parsing goes on with the next.
                    let length = rest.find('\n').map_or(rest.len(), |end| end + 1);
                    return (
                        record(Vec::new(), &rest[..length], Some("a quote is not closed")),
                        length,
                    );
                };
                (Cow::Owned(field), at + 1 + length)
            }
            None => {
                let length = rest[at..].find([separator, '\n']).unwrap_or(rest.len() - at);
                let field = rest[at..at + length].trim_end_matches('\r');
                (Cow::Borrowed(field), at + length)
            }
        };
        fields.push(field);
        match rest.as_bytes().get(end) {
            Some(&byte) if char::from(byte) == separator => at = end + 1,
            None => return (record(fields, rest, None), rest.len()),
            Some(b'\n') => return (record(fields, &rest[..end], None), end + 1),
            Some(b'\r') if rest.as_bytes().get(end + 1) == Some(&b'\n') => {
                return (record(fields, &rest[..end], None), end + 2);
            }
            Some(_) => {
                // As above: over several lines this is a quote that is not closed, and the next one's opening quote.
                let length = rest.find('\n').map_or(rest.len(), |found| found + 1);
                let broken = Some(match end > length {
                    true => "a quote is not closed",
                    false => "letters follow a closing quote",
                });
                return (record(Vec::new(), &rest[..length], broken), length);
            }
        }
    }
}

/// The field behind an opening quote, and the bytes up to behind the closing one.
fn quoted_field(inner: &str) -> Option<(String, usize)> {
    let (mut field, mut at) = (String::new(), 0);
    loop {
        let quote = at + inner[at..].find('"')?;
        field.push_str(&inner[at..quote]);
        if !inner[quote + 1..].starts_with('"') {
            return Some((field, quote + 1));
        }
        field.push('"');
        at = quote + 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const COMMAS: Layout = Layout {
        separator: ',',
        quoted: true,
    };
    const TABS: Layout = Layout {
        separator: '\t',
        quoted: false,
    };

    #[test]
    fn quotes_hold_commas_breaks_and_quotes() {
        let table = "file,text\r\n\r\na.wav,\"one, \"\"two\"\"\nthree\"\nb.wav,x\n\"c\"d,e\nf.wav,\"open\ng.wav,y";
        let read: Vec<Record<'_>> = records(table, COMMAS).collect();
        let fields: Vec<Vec<&str>> = read
            .iter()
            .map(|record| record.fields.iter().map(AsRef::as_ref).collect())
            .collect();
        assert_eq!(
            fields,
            [
                vec!["file", "text"],
                vec!["a.wav", "one, \"two\"\nthree"],
                vec!["b.wav", "x"],
                vec![],
                vec![],
                vec!["g.wav", "y"]
            ]
        );
        assert!(read[3].broken.is_some() && read[4].broken.is_some());
        // One that is not closed costs its own line, also where another one follows.
        let unclosed: Vec<Record<'_>> = records("a,\"b\n\"c\",d\n\"e\",f\n", COMMAS).collect();
        assert_eq!(unclosed[0].broken, Some(("bad_line", "a quote is not closed")));
        assert_eq!(
            [&unclosed[1].fields[..], &unclosed[2].fields[..]],
            [["c", "d"], ["e", "f"]]
        );
        let tabs: Vec<Record<'_>> = records("a\t\"b\n", TABS).collect();
        assert_eq!(tabs[0].fields, ["a", "\"b"]);
    }

    #[test]
    fn records_are_read_again_from_where_they_begin() {
        for (table, layout) in [("a,b\n\n\"c\nd\",e\nf,g", COMMAS), ("a\tb\n\n\"c\td\ne\tf", TABS)] {
            let all: Vec<Record<'_>> = records(table, layout).collect();
            let mut walk = records(table, layout);
            for number in 0..=all.len() {
                let from: Vec<Record<'_>> = records(&table[walk.at()..], layout).collect();
                assert_eq!(from, all[number..]);
                walk.next();
            }
            assert_eq!(walk.at(), table.len());
        }
    }

    proptest! {
        /// Any content of a field survives a round trip.
        #[test]
        fn written_tables_are_read_back(fields in proptest::collection::vec(".{0,12}|[,\"\n\r]{0,5}", 2..6)) {
            let line: Vec<String> = fields.iter().map(|field| format!("\"{}\"", field.replace('"', "\"\""))).collect();
            let text = format!("{}\nnext,line\n", line.join(","));
            let read: Vec<Record<'_>> = records(&text, COMMAS).collect();
            prop_assert_eq!(&read[0].fields, &fields);
            prop_assert_eq!(read.len(), 2);
        }

        #[test]
        fn any_text_is_read_to_its_end(text in "[a,\"\n\r\té]{0,60}", quoted: bool) {
            let lines = records(&text, Layout { separator: ',', quoted }).map(|record| record.line.len()).sum::<usize>();
            prop_assert!(lines <= text.len());
        }
    }
}
