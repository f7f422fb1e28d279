//! Whether the fields of a table are in quotes.

use std::borrow::Cow;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::table_text::{Layout, records};

/// Whether fields of CSV and TSV may be in double quotes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Quoting {
    /// Those of CSV; those of TSV where all its quotes are written as CSV has them (pandas, Excel), which the log says.
    #[default]
    Auto,
    /// Quotes are letters like others.
    None,
    /// A field in double quotes may hold separators, line breaks and doubled quotes (RFC 4180).
    Csv,
}

impl Quoting {
    /// The layout of a table, and what a person should know of it.
    pub fn layout(self, text: &str, separator: char) -> (Layout, Option<String>) {
        let layout = |quoted| Layout { separator, quoted };
        match self {
            Quoting::Csv => (layout(true), None),
            Quoting::Auto if separator != '\t' => (layout(true), None),
            Quoting::Auto if is_quoted(text, separator) => {
                let told = "fields in double quotes are read as CSV has them; `quoting: none` keeps the quotes";
                (layout(true), Some(told.into()))
            }
            Quoting::Auto | Quoting::None => (layout(false), kept_quotes(text, layout(false))),
        }
    }
}

/// Whether all quotes of a table are written as CSV has them: each opens or closes a field, or is doubled within one; and
/// fields are in quotes where they must be, or in the heading, too. Rows in which a quotation begins and ends look like one record
/// of several lines, too, but the first and the last of them have all fields. (With one column any line has.)
fn is_quoted(text: &str, separator: char) -> bool {
    if !text.contains('"') {
        return false;
    }
    let (mut heading, mut found) = (None, false);
    let has_all = |line: &str, columns: usize| line.split(separator).count() == columns;
    for record in records(
        text,
        Layout {
            separator,
            quoted: true,
        },
    ) {
        if record.broken.is_some() {
            return false;
        }
        let is_in_quotes = |field: &Cow<'_, str>| matches!(field, Cow::Owned(_));
        let (all, columns) =
            *heading.get_or_insert_with(|| (record.fields.iter().all(is_in_quotes), record.fields.len()));
        let mut lines = record.line.trim_end_matches(['\n', '\r']).split('\n');
        let are_rows = match (lines.next(), lines.next_back()) {
            (Some(first), Some(last)) => columns > 1 && has_all(first, columns) && has_all(last, columns),
            _ => false,
        };
        if are_rows {
            return false;
        }
        for field in &record.fields {
            let is_as_written = match is_in_quotes(field) {
                true => all || field.contains([separator, '"', '\n', '\r']),
                false => !field.contains('"'),
            };
            if !is_as_written {
                return false;
            }
            found |= is_in_quotes(field);
        }
    }
    found
}

/// What is told of fields that look quoted, and keep their quotes.
fn kept_quotes(text: &str, layout: Layout) -> Option<String> {
    if !text.contains('"') {
        return None;
    }
    let is_in_quotes = |field: &&Cow<'_, str>| field.len() > 1 && field.starts_with('"') && field.ends_with('"');
    let fields = records(text, layout).map(|record| record.fields.iter().filter(is_in_quotes).count());
    match fields.sum::<usize>() {
        0 => None,
        fields => Some(format!(
            "quotes around {fields} fields are kept as letters of them; `quoting: csv` takes them away"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_of_tsv_are_told_from_letters() {
        for (table, quoted, told) in [
            // pandas and csv.excel_tab quote what must be quoted.
            ("path\ttext\na.wav\t\"he said \"\"hi\"\"\"\nb.wav\tx\n", true, true),
            ("path\ttext\na.wav\t\"one\ntwo\"\n", true, true),
            // R, and others that quote all.
            ("\"path\"\t\"text\"\n\"a.wav\"\t\"one\"\nb.wav\t2\n", true, true),
            // Common Voice quotes nothing.
            ("path\ttext\na.wav\t\"Ja\", sagte er.\n", false, false),
            ("path\ttext\na.wav\t\"Ja.\"\n", false, true),
            ("path\ttext\na.wav\t\"\"Ja\"\" und \"nein\"\n", false, true),
            ("path\ttext\na.wav\t12\" vinyl\nb.wav\t\"a \"\"b\"\"\"\n", false, true),
            ("path\ttext\na.wav\tone\n", false, false),
            // Of one column.
            ("text\n\"one\ntwo\"\n\"he said \"\"hi\"\"\"\nx\n", true, true),
            ("\"text\"\n\"one\"\n\"two\"\n", true, true),
            ("text\n\"Ja.\"\nx\n", false, true),
            // A quotation over two rows of it.
            (
                "path\ttext\tlang\na\t\"Come here.\ten\nb\tGo away.\"\ten\n",
                false,
                false,
            ),
            (
                "path\tlang\ttext\na\ten\t\"Come here.\nb\ten\tGo away.\"\n",
                false,
                false,
            ),
        ] {
            let (layout, said) = Quoting::Auto.layout(table, '\t');
            assert_eq!((layout.quoted, said.is_some()), (quoted, told), "{table}: {said:?}");
        }
        assert!(Quoting::Auto.layout("a,b\n", ',').0.quoted);
        assert!(!Quoting::None.layout("a,b\n", ',').0.quoted);
        assert!(Quoting::Csv.layout("path\ttext\na.wav\t\"Ja.\"\n", '\t').0.quoted);
    }
}
