//! Rows of a table: a page of them, one with all its values and its recording, and how many there are of each kind.

use std::time::Duration;

use arrow::array::{Array, RecordBatch};
use axum::extract::{Query, State};
use axum::response::Response;
use flow_evaluation::chart;
use flow_manifest::browse::{Group, PlacedRow, RowQuery, texts};
use maud::{Markup, html};

use super::filters::{Columns, LAST_PAGE, PAGE_ROWS, View};
use super::layout::{Section, address, page, said};
use super::sound::Place;
use super::tables::{Pairs, Table, TableRef, open, past_run};
use super::{App, PageError, Shared, answer, corrections};
use crate::commands::lineage;
use crate::table::count;

/// For a question about all rows.
pub const TIME_LIMIT: Duration = Duration::from_secs(15);
/// Longer values are cut in lists.
const SHOWN_LETTERS: usize = 240;
/// Values of a column that are counted one by one.
const VALUES: usize = 200;

/// An address of this table's with more in its query.
fn link(path: &str, table: &TableRef, more: &[(String, String)]) -> String {
    let own = table.query();
    let own = own.iter().map(|(name, value)| (*name, value.as_str()));
    address(
        path,
        own.chain(more.iter().map(|(name, value)| (name.as_str(), value.as_str()))),
    )
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
            // One more tells whether there is another page.
            limit: PAGE_ROWS + 1,
            time_limit: TIME_LIMIT,
        };
        // What cannot be answered leaves the form to be changed.
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
                            " · " a href=(link("/counts", &reference, &more)) { "by " (column) }
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
            @if let Some((column, descending)) = &view.sort {
                input type="hidden" name="sort" value=(column);
                @if *descending { input type="hidden" name="desc" value="1"; }
            }
            button { "Show" }
        }
    }
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
                    a href=(link("/rows", table, &sorted.query())) { (column) @if ordered { @if descending { " ↓" } @else { " ↑" } } }
                }
            } } }
            tbody { @for row in rows.iter().take(PAGE_ROWS) {
                @let place = [("part".to_owned(), row.part.to_string()), ("row".to_owned(), row.row.to_string())];
                @let lang = language.and_then(|at| row.values[at].as_deref());
                @let href = link("/row", table, &place);
                tr data-href=(href) {
                    td { a href=(href) aria-label={ "Row " (row.row) } { "›" } @if may_sound { button.play type="button" data-play=(link("/sound", table, &place)) aria-label="Play" { "▶" } } }
                    @for (column, value) in columns.shown.iter().zip(&row.values) {
                        td.n[columns.numbers.contains(column)] { @match value {
                            None => { span.quiet { "null" } }
                            Some(value) => { (said(&cut(value), lang)) }
                        } }
                    }
                }
            } }
        } }
    }
}

fn cut(value: &str) -> String {
    match value.char_indices().nth(SHOWN_LETTERS) {
        None => value.to_owned(),
        Some((end, _)) => format!("{}…", &value[..end]),
    }
}

fn pages(table: &TableRef, view: &View, is_more: bool) -> Markup {
    let at = |page: usize| link("/rows", table, &View { page, ..view.clone() }.query());
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
        let by = pairs.iter().find(|(name, _)| name == "by").map(|(_, value)| value.as_str());
        let by = by.ok_or_else(|| PageError::bad_request("the address lacks `by`"))?;
        let table = open(app, &reference)?;
        let columns = Columns::of(table.rows.schema());
        let is_number = table.rows.schema().field_with_name(by).is_ok_and(|field| field.data_type().is_numeric());
        let seconds: Vec<&str> = columns.numbers.iter().map(String::as_str).filter(|name| name.starts_with("duration")).take(1).collect();
        let group = match is_number {
            true => Group::Bucket { column: by.to_owned(), width: width_of(by) },
            false => Group::Value(by.to_owned()),
        };
        let totals = table.rows.totals(&group, &seconds, &view.filters, VALUES, TIME_LIMIT)?;
        let bars: Vec<(String, f64)> = totals.iter().filter_map(|total| Some((total.value.clone()?, total.rows as f64))).collect();
        let main = html! {
            p { a href=(link("/rows", &reference, &view.query())) { "← Rows" } }
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
                            vec![(format!("min.{by}"), value.clone()), (format!("max.{by}"), end.to_string())]
                        }
                    };
                    @let more: Pairs = view.query().into_iter().filter(|(name, _)| name != "page").chain(filter).collect();
                    @let href = link("/rows", &reference, &more);
                    tr data-href=(href) {
                        td { a href=(href) { @if total.value.is_none() { "null" } @else { (said(&value, None)) } } }
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

/// Of a range of a column's numbers.
fn width_of(column: &str) -> f64 {
    match column {
        name if name.contains("quality") || name.contains("confidence") || name == "wer" => 0.05,
        _ => 1.0,
    }
}

/// The row that an address names.
pub fn row_of(app: &App, pairs: &[(String, String)]) -> Result<(TableRef, Table, RecordBatch), PageError> {
    let reference = TableRef::parse(pairs)?;
    let number = |wanted: &str| {
        let found = pairs.iter().find(|(name, _)| name == wanted);
        let number = found.and_then(|(_, value)| value.parse::<u64>().ok());
        number.ok_or_else(|| PageError::bad_request(format!("`{wanted}` in the address is no number")))
    };
    let table = open(app, &reference)?;
    let part = usize::try_from(number("part")?).unwrap_or(usize::MAX);
    let row = table.rows.row(part, number("row")?)?;
    Ok((reference, table, row.ok_or_else(|| PageError::absent("row"))?))
}

/// The value of a text column of a row.
pub fn value(row: &RecordBatch, column: &str) -> Option<String> {
    let column = row.column_by_name(column)?;
    texts(std::slice::from_ref(column), 1).ok()?.pop()?.pop()?
}

pub async fn row(State(app): State<Shared>, Query(pairs): Query<Pairs>) -> Response {
    answer(&app, move |app| {
        let (reference, table, row) = row_of(app, &pairs)?;
        let lang = value(&row, "lang").or_else(|| value(&row, "language"));
        let segment = value(&row, "segment_id");
        let steps = match (reference.run(), &segment) {
            (Some(run), Some(segment)) => Some(lineage::steps(&past_run(app, run)?, segment)),
            _ => None,
        };
        let place: Pairs = pairs.iter().filter(|(name, _)| name == "part" || name == "row").cloned().collect();
        let at = |path: &str| link(path, &reference, &place);
        let number: u64 = place.iter().find(|(name, _)| name == "row").and_then(|(_, value)| value.parse().ok()).unwrap_or(0);
        let beside = |row: u64| {
            let place: Pairs = place.iter().map(|(name, value)| (name.clone(), if name == "row" { row.to_string() } else { value.clone() })).collect();
            link("/row", &reference, &place)
        };
        let sound = Place::of_row(&row, &table);
        let values = texts(row.columns(), 1)?.pop().unwrap_or_default();
        let main = html! {
            nav.pages aria-label="Rows beside this one" {
                @if number > 0 { a rel="prev" href=(beside(number - 1)) { "← Before" } }
                a href=(reference.address()) { "All rows" }
                a rel="next" href=(beside(number + 1)) { "Next →" }
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
                    Some(value) => { (said(value, lang.as_deref())) }
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

/// Whether the row has a value in this column.
pub fn has(row: &RecordBatch, column: &str) -> bool {
    row.column_by_name(column).is_some_and(|column| column.is_valid(0))
}
