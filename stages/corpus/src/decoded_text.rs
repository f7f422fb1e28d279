//! Text of a file, some bytes of which may not be UTF-8.

use std::ops::Range;

use crate::table_text::{Layout, Records};

/// The byte-order mark of UTF-8.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
/// Those of UTF-16.
const OF_UTF_16: [[u8; 2]; 2] = [[0xff, 0xfe], [0xfe, 0xff]];
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Why bytes that begin so are no text that is read.
pub fn no_text(bytes: &[u8]) -> Option<&'static str> {
    if OF_UTF_16.iter().any(|mark| bytes.starts_with(mark)) {
        return Some("it is UTF-16; save it as UTF-8");
    }
    bytes
        .starts_with(&GZIP)
        .then_some("it is compressed by gzip; unpack it")
}

/// Text without a byte-order mark, in which U+FFFD replaces bytes that are not UTF-8. The file itself may contain
/// U+FFFD, so replaced positions are recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodedText {
    pub text: String,
    /// Positions of the replacements in the text, ascending.
    replaced: Vec<usize>,
}

impl DecodedText {
    pub fn of(mut bytes: Vec<u8>) -> Self {
        while bytes.starts_with(BYTE_ORDER_MARK) {
            bytes.drain(..BYTE_ORDER_MARK.len());
        }
        let mut replaced = Vec::new();
        let text = String::from_utf8(bytes).unwrap_or_else(|error| {
            let mut text = String::with_capacity(error.as_bytes().len());
            for chunk in error.as_bytes().utf8_chunks() {
                text.push_str(chunk.valid());
                if !chunk.invalid().is_empty() {
                    replaced.push(text.len());
                    text.push(char::REPLACEMENT_CHARACTER);
                }
            }
            text
        });
        DecodedText { text, replaced }
    }

    /// Whether something was replaced in a range of the text, in bytes.
    pub fn is_replaced(&self, range: Range<usize>) -> bool {
        let first = self.replaced.partition_point(|place| *place < range.start);
        self.replaced.get(first).is_some_and(|place| *place < range.end)
    }

    /// Lines without their ends, each with whether something was replaced in it.
    pub fn lines(&self) -> impl Iterator<Item = (&str, bool)> {
        let mut at = 0;
        self.text.split_inclusive('\n').map(move |line| {
            let from = at;
            at += line.len();
            (line.lines().next().unwrap_or_default(), self.is_replaced(from..at))
        })
    }

    /// The records of a table in a range of the text, in bytes; see [`crate::table_text::records`].
    pub fn records(&self, range: Range<usize>, layout: Layout) -> Records<'_> {
        Records::of(self, range, layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_judged_by_their_bytes() {
        let decoded = DecodedText::of(b"\xef\xbb\xbfa\r\n\xef\xbf\xbd\n\n\xff\xfe b\nc".to_vec());
        let lines: Vec<(&str, bool)> = decoded.lines().collect();
        let replaced = "\u{fffd}\u{fffd} b";
        assert_eq!(
            lines,
            [
                ("a", false),
                ("\u{fffd}", false),
                ("", false),
                (replaced, true),
                ("c", false)
            ]
        );
        let table = DecodedText::of(b"x\ty\n\xef\xbf\xbd\tb\n\xff\tc\n".to_vec());
        let tabs = Layout {
            separator: '\t',
            quoted: false,
        };
        let from = table.text.find('\n').unwrap() + 1;
        let records = table.records(from..table.text.len(), tabs);
        let broken: Vec<bool> = records.map(|record| record.broken.is_some()).collect();
        assert_eq!(broken, [false, true]);
        assert_eq!(table.records(0..from, tabs).count(), 1);
    }
}
