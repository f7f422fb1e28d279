//! Rows of a table: a page of them, one with all its values and its recording, and how many there are of each kind.

use std::borrow::Cow;
use std::time::Duration;

use flow_evaluation::chart;
use flow_inspect::lineage;
use flow_inspect::table::count;

use crate::browse::{Group, PlacedRow, RowQuery, texts};
use axum::extract::{Query, State};
use axum::response::Response;
use maud::{Markup, html};

use super::app::{Shared, answer};
use super::corrections;
use super::filters::{Columns, LAST_PAGE, PAGE_ROWS, View};
use super::layout::{Section, page, said};
use super::page_error::PageError;
use super::sound::Place;
use super::table_ref::{Pairs, TableRef, value_of};
use super::tables::{open, past_run, row_of, value};

/// Timeout of a query over all rows.
pub const TIME_LIMIT: Duration = Duration::from_secs(15);
/// Longer values are cut in lists.
const SHOWN_LETTERS: usize = 240;
/// The longest value that an address filters by, as bytes.
const LONGEST_FILTER: usize = 4000;
/// On the page of its row.
const SHOWN_OF_ROW: usize = 100_000;
/// Of a path, the end is shown.
const SHOWN_OF_PATH: usize = 36;
/// Values of a column that are counted one by one.
const VALUES: usize = 200;

/// The position of a row in its table, in URLs.
pub fn place_of(row: &PlacedRow) -> [(String, String); 2] {
    [
        ("part".to_owned(), row.part.to_string()),
        ("row".to_owned(), row.row.to_string()),
    ]
}

pub async fn list(State(app): State<Shared>, Query(pairs): Query<Pairs>) -> Response {
    answer(&app, move |app| {
        let reference = TableRef::parse(&pairs)?;
        let view = View::parse(&pairs)?;
        let table = open(app, &reference)?;
        let columns = Columns::of(table.rows.schema());
        let query = RowQuery {
            filters: view.filters.clone(),
            sort: view.sort.clone(),
            columns: columns.shown.clone(),
            offset: view.page * PAGE_ROWS,
            // One more row shows whether there is another page.
            limit: PAGE_ROWS + 1,
            time_limit: TIME_LIMIT,
        };
        // After an error the form stays, to be changed.
        let found = table.rows.page(&query);
        let number = match (&found, view.filters.is_empty()) {
            (Err(_), _) => None,
            (_, true) => table.rows.rows(),
            (_, false) => table.rows.count(&view.filters, TIME_LIMIT).ok(),
        };
        let may_sound = Place::may_be_in(table.rows.schema());
        let main = html! {
            (form(&reference, &columns, &view))
            @match found {
                Err(error) => { p.failed role="alert" dir="auto" { (error) } }
                Ok(rows) => {
                    p { @if let Some(number) = number { (count(number)) " rows" }
                        @if let Some(of) = table.rows.rows().filter(|_| !view.filters.is_empty()) { " of " (count(of)) }
                        @for column in columns.kinds.iter().chain(&columns.numbers) {
                            @let more: Pairs = [("by".to_owned(), column.clone())].into_iter().chain(view.query()).collect();
                            " · " a href=(reference.link("/counts", &more)) { "by " (column) }
                        }
                    }
                    (list_of(&reference, &columns, &view, &rows, may_sound))
                    (pages(&reference, &view, rows.len() > PAGE_ROWS))
                }
            }
        };
        Ok(page(app, Section::Rows, &table.title, &main))
    })
    .await
}

fn form(table: &TableRef, columns: &Columns, view: &View) -> Markup {
    let field = |prefix: &str, column: &str| format!("{prefix}.{column}");
    html! {
        form.filters action="/rows" method="get" role="search" {
            @for (name, value) in table.query() { input type="hidden" name=(name) value=(value); }
            @for column in &columns.texts {
                @let name = field("c", column);
                label { (column) " contains" input type="search" name=(name) value=(view.value(&name)) dir="auto" autocomplete="off" data-search; }
            }
            @for column in &columns.kinds {
                @let name = field("f", column);
                label { (column) " is" input name=(name) value=(view.value(&name)) autocomplete="off"; }
            }
            @for column in &columns.numbers {
                @let (least, most) = (field("min", column), field("max", column));
                label { (column) " from" input type="number" step="any" name=(least) value=(view.value(&least)); }
                label { "to" input type="number" step="any" name=(most) value=(view.value(&most)); }
            }
            @for (name, value) in others(columns, view) {
                label { (name.replacen('.', " ", 1)) input name=(name) value=(value) autocomplete="off"; }
            }
            @if let Some((column, descending)) = &view.sort {
                input type="hidden" name="sort" value=(column);
                @if *descending { input type="hidden" name="desc" value="1"; }
            }
            button { "Show" }
        }
    }
}

/// Filters that an address has and the form has no field for.
fn others(columns: &Columns, view: &View) -> Pairs {
    let has = |columns: &[String], column: &str| columns.iter().any(|known| known == column);
    let is_other = |(name, _): &(String, String)| match name.split_once('.') {
        Some(("c", column)) => !has(&columns.texts, column),
        Some(("f", column)) => !has(&columns.kinds, column),
        Some(("min" | "max", column)) => !has(&columns.numbers, column),
        Some(_) => true,
        None => false,
    };
    view.query().into_iter().filter(is_other).collect()
}

fn list_of(table: &TableRef, columns: &Columns, view: &View, rows: &[PlacedRow], may_sound: bool) -> Markup {
    let language = columns
        .shown
        .iter()
        .position(|column| column == "lang" || column == "language");
    html! {
        div.scroll { table.rows {
            thead { tr { th { span.hidden { "Sound" } } @for column in &columns.shown {
                @let (ordered, descending) = match &view.sort { Some((by, descending)) if by == column => (true, *descending), _ => (false, false) };
                @let sorted = View { sort: Some((column.clone(), ordered && !descending)), page: 0, ..view.clone() };
                th.n[columns.numbers.contains(column)] aria-sort=[ordered.then_some(if descending { "descending" } else { "ascending" })] {
                    a href=(table.link("/rows", &sorted.query())) { (column) @if ordered { @if descending { " ↓" } @else { " ↑" } } }
                }
            } } }
            tbody { @for row in rows.iter().take(PAGE_ROWS) {
                @let place = place_of(row);
                @let lang = language.and_then(|at| row.values[at].as_deref());
                @let href = table.link("/row", &place);
                tr data-href=(href) {
                    td.open { a href=(href) aria-label={ "Row " (row.row) } { "›" } @if may_sound { button.play type="button" data-play=(table.link("/sound", &place)) aria-label="Play" { "▶" } } }
                    @for (column, value) in columns.shown.iter().zip(&row.values) {
                        td.n[columns.numbers.contains(column)] .whole[is_short_name(value.as_deref())] .words[value.as_ref().is_some_and(|value| value.len() > 24)] { @match value {
                            None => { span.quiet { "null" } }
                            Some(value) => { (listed(value, columns.numbers.contains(column), lang)) }
                        } }
                    }
                }
            } }
        } }
    }
}

/// A value as a list shows it: of numbers some digits, of paths the end, of long texts the beginning; whole where the mouse
/// rests on it.
fn listed(value: &str, is_number: bool, lang: Option<&str>) -> Markup {
    let number = value
        .parse::<f64>()
        .ok()
        .filter(|number| is_number && number.is_finite());
    let short = match number {
        Some(number) if value.len() > 8 && (1e-3..1e9).contains(&number.abs()) => rounded(&format!("{number:.4}")),
        Some(_) => value.to_owned(),
        None if is_path(value) => end_of_path(value),
        None => cut(value),
    };
    if short == value {
        return said(value, lang);
    }
    // A title of many thousand letters is of no use.
    let title: String = value.chars().take(2000).collect();
    html! { span title=(title) { (said(&short, lang)) } }
}

/// Whether it is the path of a file: some folders, and no space.
fn is_path(value: &str) -> bool {
    value.len() <= 4096 && value.matches('/').count() >= 2 && !value.contains(char::is_whitespace)
}

/// A name, such as that of a segment, that should not be wrapped.
fn is_short_name(value: Option<&str>) -> bool {
    value.is_some_and(|value| value.len() <= 24 && !value.contains(char::is_whitespace))
}

/// As many of its last parts as there is room for, the last one in any case.
fn end_of_path(path: &str) -> String {
    if path.chars().count() <= SHOWN_OF_PATH {
        return path.to_owned();
    }
    let mut ends = path.match_indices('/').map(|(at, _)| &path[at..]);
    let last = path.rfind('/').map_or(path, |at| &path[at..]);
    let end = ends.find(|end| end.chars().count() < SHOWN_OF_PATH).unwrap_or(last);
    cut(&format!("…{end}"))
}

/// A value on the page of its row: complete unless very long.
fn whole(value: &str) -> Cow<'_, str> {
    match value.char_indices().nth(SHOWN_OF_ROW) {
        None => value.into(),
        Some((end, _)) => format!("{}… ({} bytes in all)", &value[..end], count(value.len() as u64)).into(),
    }
}

fn cut(value: &str) -> String {
    match value.char_indices().nth(SHOWN_LETTERS) {
        None => value.to_owned(),
        Some((end, _)) => format!("{}…", &value[..end]),
    }
}

fn pages(table: &TableRef, view: &View, is_more: bool) -> Markup {
    let at = |page: usize| table.link("/rows", &View { page, ..view.clone() }.query());
    html! {
        nav.pages aria-label="Pages of rows" {
            @if view.page > 0 { a rel="prev" href=(at(view.page - 1)) { "← Before" } }
            span { "Page " (view.page + 1) }
            @if is_more && view.page < LAST_PAGE { a rel="next" href=(at(view.page + 1)) { "Next →" } }
        }
    }
}

/// How many rows there are of each value of a column, or in ranges of its numbers.
pub async fn counts(State(app): State<Shared>, Query(pairs): Query<Pairs>) -> Response {
    answer(&app, move |app| {
        let reference = TableRef::parse(&pairs)?;
        let view = View::parse(&pairs)?;
        let by = value_of(&pairs, "by").ok_or_else(|| PageError::bad_request("the address lacks `by`"))?;
        let table = open(app, &reference)?;
        let columns = Columns::of(table.rows.schema());
        let is_number = table.rows.schema().field_with_name(by).is_ok_and(|field| field.data_type().is_numeric());
        let seconds: Vec<&str> = columns.numbers.iter().map(String::as_str).filter(|name| name.starts_with("duration")).take(1).collect();
        let group = match is_number {
            true => Group::Bucket { column: by.to_owned(), width: width_of(by) },
            false => Group::Value(by.to_owned()),
        };
        let mut totals = table.rows.totals(&group, &seconds, &view.filters, VALUES, TIME_LIMIT)?;
        if is_number {
            totals.iter_mut().for_each(|total| total.value = total.value.as_deref().map(rounded));
        }
        let bars: Vec<(String, f64)> = totals.iter().filter_map(|total| Some((total.value.clone()?, total.rows as f64))).collect();
        let main = html! {
            p { a href=(reference.link("/rows", &view.query())) { "← Rows" } }
            @if is_number && bars.len() < 40 { (chart::columns(by, &bars)) }
            table.rows {
                thead { tr { th { (by) @if is_number { " from" } } th.n { "Rows" } @if !seconds.is_empty() { th.n { "Hours" } } } }
                tbody { @for total in &totals {
                    @let value = total.value.clone().unwrap_or_default();
                    @let filter = match (&total.value, is_number) {
                        (None, _) => vec![(format!("null.{by}"), "1".to_owned())],
                        (Some(value), false) => vec![(format!("f.{by}"), value.clone())],
                        (Some(value), true) => {
                            let end = value.parse::<f64>().unwrap_or(0.0) + width_of(by);
                            vec![(format!("min.{by}"), value.clone()), (format!("max.{by}"), rounded(&end.to_string()))]
                        }
                    };
                    @let more: Pairs = view.query().into_iter().filter(|(name, _)| name != "page").chain(filter).collect();
                    @let href = reference.link("/rows", &more);
                    // What is longer than an address may be is not led on from.
                    @let is_long = value.len() > LONGEST_FILTER;
                    tr data-href=[(!is_long).then_some(&href)] {
                        td {
                            @if is_long { (said(&cut(&value), None)) }
                            @else { a href=(href) { @if total.value.is_none() { "null" } @else { (said(&cut(&value), None)) } } }
                        }
                        td.n { (count(total.rows)) }
                        @for seconds in &total.sums { td.n { (format!("{:.2}", seconds / 3600.0)) } }
                    }
                } }
            }
            @if totals.len() == VALUES { p.quiet { "The " (VALUES) " most frequent ones." } }
        };
        Ok(page(app, Section::Rows, &format!("{}: rows by {by}", table.title), &main))
    })
    .await
}

/// A number without digits of rounding errors.
fn rounded(number: &str) -> String {
    let number = number.parse::<f64>().unwrap_or(f64::NAN);
    ((number * 1e6).round() / 1e6).to_string()
}

/// Of a range of a column's numbers.
fn width_of(column: &str) -> f64 {
    match column {
        name if name.contains("quality") || name.contains("confidence") || name == "wer" => 0.05,
        _ => 1.0,
    }
}

pub async fn row(State(app): State<Shared>, Query(pairs): Query<Pairs>) -> Response {
    answer(&app, move |app| {
        let (reference, table, row) = row_of(app, &pairs)?;
        let lang = value(&row, "lang").or_else(|| value(&row, "language"));
        let segment = value(&row, "segment_id");
        let steps = match (reference.run(), &segment) {
            (Some(run), Some(segment)) => Some(lineage::steps_of_segment(&past_run(app, run)?, segment)),
            _ => None,
        };
        let place: Pairs = pairs.iter().filter(|(name, _)| name == "part" || name == "row").cloned().collect();
        let at = |path: &str| reference.link(path, &place);
        let number: u64 = value_of(&place, "row").and_then(|value| value.parse().ok()).unwrap_or(0);
        let beside = |row: u64| {
            let place: Pairs = place.iter().map(|(name, value)| (name.clone(), if name == "row" { row.to_string() } else { value.clone() })).collect();
            reference.link("/row", &place)
        };
        let part = value_of(&pairs, "part").and_then(|value| value.parse().ok());
        let is_last = part.and_then(|part| table.rows.rows_of_part(part)).is_some_and(|rows| number + 1 >= rows);
        let sound = Place::of_row(&row, &table).and_then(Place::found);
        let values = texts(row.columns(), 1)?.pop().unwrap_or_default();
        let main = html! {
            nav.pages aria-label="Rows beside this one" {
                @if number > 0 { a rel="prev" href=(beside(number - 1)) { "← Before" } }
                a href=(reference.address()) { "All rows" }
                @if !is_last { a rel="next" href=(beside(number + 1)) { "Next →" } }
            }
            @match &sound {
                Ok(_) => {
                    section.sound {
                        audio controls preload="none" src=(at("/sound")) {}
                        img src=(at("/waveform")) width="800" height="120" alt="Waveform of the recording" loading="lazy";
                        img src=(at("/spectrogram")) width="800" height="160" alt="Spectrogram of the recording, from 0 to 8 kHz" loading="lazy";
                    }
                }
                Err(why) => { p.quiet dir="auto" { "No sound: " (why) } }
            }
            table.values { tbody { @for (field, value) in row.schema().fields().iter().zip(&values) {
                tr { th scope="row" { (field.name()) } td { @match value {
                    None => { span.quiet { "null" } }
                    Some(value) => { (said(&whole(value), lang.as_deref())) }
                } } }
            } } }
            (corrections::form(app, &row, &pairs))
            @if let Some(steps) = &steps {
                section { h2 { "Lineage" }
                    @match steps {
                        Err(error) => { p.quiet dir="auto" { (error) } }
                        Ok(steps) => { ol { @for step in steps {
                            li { span dir="auto" { (step.text()) }
                                details { summary { "Values" } table.values { tbody { @for (name, value) in &step.values {
                                    tr { th scope="row" { (name) } td { (said(value, lang.as_deref())) } }
                                } } } }
                            }
                        } } }
                    }
                }
            }
        };
        let title = segment.unwrap_or_else(|| format!("Row {number}"));
        Ok(page(app, Section::Rows, &title, &main))
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_nobody_reads_are_cut() {
        let long = "न".repeat(SHOWN_OF_ROW);
        assert_eq!(whole(&long), long);
        let shown = whole(&format!("{long}न")).into_owned();
        assert!(shown.ends_with("न… (300,003 bytes in all)"));
    }

    #[test]
    fn lists_show_the_ends_of_paths_and_some_digits_of_numbers() {
        let shown = |value: &str, is_number| listed(value, is_number, None).into_string();
        let path = "/data/corpus/with/many/folders/000001/seg_000001.flac";
        let drawn = shown(path, false);
        assert!(
            drawn.contains(">…/folders/000001/seg_000001.flac<") && drawn.contains(&format!("title=\"{path}\"")),
            "{drawn}"
        );
        let name = format!("/a/b/{}.flac", "é".repeat(60));
        assert!(shown(&name, false).contains(&format!("…/{}.flac", "é".repeat(60))));
        for whole in ["a/b/c.wav", "said and/or heard, at 1/2", "///", "seg_1"] {
            assert!(!shown(whole, false).contains("title"), "{whole}");
        }
        let drawn = shown("0.5603926342014051", true);
        assert!(
            drawn.contains(">0.5604<") && drawn.contains("title=\"0.5603926342014051\""),
            "{drawn}"
        );
        for whole in ["NaN", "inf", "1e-12", "0.5", "12345678901", "0.0000000012"] {
            assert!(!shown(whole, true).contains("title"), "{whole}");
        }
    }

    #[test]
    fn filters_without_a_field_stay_in_the_form() {
        let columns = Columns {
            kinds: vec!["lang".into()],
            ..Columns::default()
        };
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let given = [
            pair("f.lang", "hi"),
            pair("f.segment_id", "a"),
            pair("null.lang", "1"),
            pair("sort", "lang"),
        ];
        let view = View::parse(&given).unwrap();
        assert_eq!(
            others(&columns, &view),
            [pair("f.segment_id", "a"), pair("null.lang", "1")]
        );
    }
}
