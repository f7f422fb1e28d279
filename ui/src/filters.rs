//! Filters, order and position of a page of rows in the query of a URL: `f.COLUMN=VALUE` (is), `c.COLUMN=TEXT`
//! (contains), `min.COLUMN=NUMBER`, `max.COLUMN=NUMBER`, `null.COLUMN=1`, `sort=COLUMN`, `desc=1`, `page=NUMBER`.

use crate::browse::{Filter, Test};
use arrow::datatypes::{DataType, Schema};

use super::page_error::PageError;
use super::table_ref::{Pairs, value_of};

/// Rows of a page.
pub const PAGE_ROWS: usize = 50;
/// The last page that is shown: the sort keeps all rows before it in memory.
pub const LAST_PAGE: usize = 2000;
/// Columns that a list shows at most.
const COLUMNS: usize = 12;

/// Categorical columns, in the order in which they are offered.
const KINDS: [&str; 13] = [
    "stage",
    "reason",
    "class",
    "set",
    "lang",
    "language",
    "segment_language",
    "path_lang",
    "source",
    "dataset",
    "speaker",
    "partition",
    "status",
];
/// Columns of text for people.
const TEXTS: [&str; 12] = [
    "text",
    "reference",
    "hypothesis",
    "transcription_native",
    "clean",
    "segment_id",
    "id",
    "detail",
    "values",
    "name",
    "audio_filepath",
    "audio_path",
];
/// Numeric columns.
const NUMBERS: [&str; 14] = [
    "duration",
    "duration_s",
    "quality",
    "tx_quality_score",
    "word_errors",
    "words",
    "confidence",
    "wer",
    "actual",
    "mean_loss",
    "last_loss",
    "first_loss",
    "times_trained",
    "alignment_score",
];

/// Columns that only the page of a row shows.
const UNLISTED: [&str; 5] = [flow_kind::ROW, "tar_path", "tar_member_name", "audio_hash", "norm"];

/// What a page shows of a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    pub filters: Vec<Filter>,
    /// By which column, and whether the largest come first.
    pub sort: Option<(String, bool)>,
    /// From 0.
    pub page: usize,
}

impl View {
    /// Reads it from an address.
    ///
    /// # Errors
    /// If a number is none.
    pub fn parse(pairs: &[(String, String)]) -> Result<View, PageError> {
        let mut view = View::default();
        for (name, value) in pairs {
            let value = value.trim();
            if value.is_empty() {
                continue;
            }
            let number = || -> Result<f64, PageError> {
                let number = value.parse().ok().filter(|number: &f64| number.is_finite());
                number.ok_or_else(|| PageError::bad_request(format!("`{value}` is not a number (for `{name}`)")))
            };
            let (what, column) = name.split_once('.').unwrap_or((name, ""));
            let test = match what {
                "f" => Test::Equals(value.to_owned()),
                "c" => Test::Contains(value.to_owned()),
                "min" => Test::AtLeast(number()?),
                "max" => Test::AtMost(number()?),
                "null" => Test::IsNull,
                "sort" if column.is_empty() => {
                    view.sort.get_or_insert_default().0 = value.to_owned();
                    continue;
                }
                "desc" if column.is_empty() => {
                    view.sort.get_or_insert_default().1 = value == "1";
                    continue;
                }
                "page" if column.is_empty() => {
                    view.page = value.parse().ok().filter(|page| *page <= LAST_PAGE).ok_or_else(|| {
                        PageError::bad_request(format!(
                            "pages go from 0 to {LAST_PAGE}: narrow the filters to see more"
                        ))
                    })?;
                    continue;
                }
                _ => continue,
            };
            view.filters.push(Filter {
                column: column.to_owned(),
                test,
            });
        }
        view.sort = view.sort.filter(|(column, _)| !column.is_empty());
        Ok(view)
    }

    /// As [`View::parse`] reads it.
    pub fn query(&self) -> Pairs {
        let mut pairs: Pairs = self
            .filters
            .iter()
            .map(|filter| {
                let (what, value) = match &filter.test {
                    Test::Equals(value) => ("f", value.clone()),
                    // No address has more values than one.
                    Test::OneOf(values) => ("f", values.first().cloned().unwrap_or_default()),
                    Test::Contains(value) => ("c", value.clone()),
                    Test::AtLeast(least) => ("min", least.to_string()),
                    Test::AtMost(most) => ("max", most.to_string()),
                    Test::IsNull => ("null", "1".to_owned()),
                };
                (format!("{what}.{}", filter.column), value)
            })
            .collect();
        if let Some((column, descending)) = &self.sort {
            pairs.push(("sort".into(), column.clone()));
            if *descending {
                pairs.push(("desc".into(), "1".into()));
            }
        }
        if self.page > 0 {
            pairs.push(("page".into(), self.page.to_string()));
        }
        pairs
    }

    /// The value that a field of the form shows.
    pub fn value(&self, field: &str) -> String {
        value_of(&self.query(), field).unwrap_or_default().to_owned()
    }
}

/// The columns of a table by their use.
#[derive(Debug, Default, PartialEq)]
pub struct Columns {
    /// With few values each.
    pub kinds: Vec<String>,
    pub texts: Vec<String>,
    pub numbers: Vec<String>,
    /// What a list shows.
    pub shown: Vec<String>,
}

impl Columns {
    pub fn of(schema: &Schema) -> Columns {
        let is_text = |name: &str| {
            let field = schema.field_with_name(name);
            field.is_ok_and(|field| {
                matches!(
                    field.data_type(),
                    DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View
                )
            })
        };
        let is_number = |name: &str| {
            schema
                .field_with_name(name)
                .is_ok_and(|field| field.data_type().is_numeric())
        };
        let these = |names: &[&str], is: &dyn Fn(&str) -> bool| -> Vec<String> {
            names
                .iter()
                .filter(|name| is(name))
                .map(|name| (*name).to_owned())
                .collect()
        };
        let mut columns = Columns {
            kinds: these(&KINDS, &is_text),
            texts: these(&TEXTS, &is_text),
            numbers: these(&NUMBERS, &is_number),
            shown: Vec::new(),
        };
        let first = [
            "stage",
            "reason",
            "segment_id",
            "id",
            "lang",
            "text",
            "reference",
            "hypothesis",
        ];
        let usual = first.iter().copied().map(str::to_owned);
        let all: Vec<String> = usual
            .chain(columns.numbers.clone())
            .chain(columns.texts.clone())
            .chain(columns.kinds.clone())
            .collect();
        let rest = schema
            .fields()
            .iter()
            .filter(|field| !field.data_type().is_nested() && !UNLISTED.contains(&field.name().as_str()));
        for name in all.into_iter().chain(rest.map(|field| field.name().clone())) {
            let is_there = schema.field_with_name(&name).is_ok();
            if is_there && !columns.shown.contains(&name) && columns.shown.len() < COLUMNS {
                columns.shown.push(name);
            }
        }
        // A table of others' has names of its own.
        for field in schema.fields() {
            let name = field.name();
            if columns.texts.len() < 4
                && is_text(name)
                && !columns.kinds.contains(name)
                && !columns.texts.contains(name)
            {
                columns.texts.push(name.clone());
            }
            if columns.numbers.len() < 4 && is_number(name) && name != flow_kind::ROW && !columns.numbers.contains(name)
            {
                columns.numbers.push(name.clone());
            }
        }
        columns
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::Field;

    use super::*;

    fn pairs(pairs: &[(&str, &str)]) -> Pairs {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn filters_are_read_from_addresses_and_written_to_them() {
        let given = pairs(&[
            ("f.lang", "hi' OR 1=1"),
            ("c.a.b", "x&y"),
            ("min.duration", "1.5"),
            ("null.text", "1"),
            ("sort", "duration"),
            ("desc", "1"),
            ("page", "3"),
        ]);
        let view = View::parse(&given).unwrap();
        assert_eq!(view.query(), given);
        assert_eq!(view.filters[1].column, "a.b");
        assert_eq!(
            (view.value("f.lang").as_str(), view.value("f.other").as_str()),
            ("hi' OR 1=1", "")
        );
        // Empty fields of a form, and what is not of it.
        let empty = pairs(&[
            ("f.lang", " "),
            ("min.x", ""),
            ("of", "file"),
            ("sort", ""),
            ("desc", "1"),
        ]);
        assert_eq!(View::parse(&empty).unwrap(), View::default());
        for wrong in [
            ("min.x", "NaN"),
            ("max.x", "1e999"),
            ("max.x", "a"),
            ("page", "-1"),
            ("page", "2001"),
        ] {
            assert!(View::parse(&pairs(&[wrong])).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn columns_are_offered_by_what_they_hold() {
        let field = |name: &str, data_type| Field::new(name, data_type, true);
        let list = DataType::List(std::sync::Arc::new(field("item", DataType::Float32)));
        let schema = Schema::new(vec![
            field("_row", DataType::UInt32),
            field("signal", list),
            field("text", DataType::Utf8),
            field("lang", DataType::Utf8),
            field("duration", DataType::Utf8),
            field("loudness", DataType::Float32),
        ]);
        let columns = Columns::of(&schema);
        assert_eq!(columns.kinds, ["lang"]);
        assert_eq!(columns.texts, ["text", "duration"]);
        assert_eq!(columns.numbers, ["loudness"]);
        assert_eq!(columns.shown, ["lang", "text", "duration", "loudness"]);
    }
}
