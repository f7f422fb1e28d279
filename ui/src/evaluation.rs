//! Transcripts of an evaluation: error rates, the worst utterances with their errors and audio, and a comparison of two
//! evaluations.

use std::collections::HashMap;

use flow_evaluation::alignment::{Edit, align};
use flow_evaluation::page::percent;
use flow_evaluation::set_section::compared;
use flow_evaluation::wer::words;
use flow_inspect::frozen::Frozen;
use flow_inspect::table::{count, duration, plural};
use flow_text::language_tag::split_tag;

use crate::browse::{Filter, Group, PlacedRow, RowQuery, Test, Total};
use arrow::datatypes::Schema;
use axum::extract::{Query, State};
use axum::http::Uri;
use axum::response::Response;
use maud::{Markup, html};

use super::app::{App, Shared, answer};
use super::differences::{Settings, differences, on_one_line};
use super::filters::View;
use super::layout::{Section, page, said};
use super::page_error::PageError;
use super::rates::Rates;
use super::rows::{TIME_LIMIT, place_of};
use super::run_summary::RunSummary;
use super::sound::Place;
use super::state_directory::{store, when};
use super::summaries::{summary, titled};
use super::table_ref::{Pairs, Table, TableRef, value_of};
use super::tables::{open, past_run, ports_of_run};

/// The kind of stage whose rows are transcripts of an evaluation.
const KIND: &str = "evaluation.decode";
/// Runs in which evaluations are looked for.
const RUNS: usize = 30;
/// Number of utterances with the most errors that are shown, and in which confusions of words are counted.
const WORST: usize = 40;
const COUNTED: usize = 2000;
/// Pairs of words, and of letters, that are shown.
const CONFUSED: usize = 30;
/// Values of a column that have a line each.
const GROUPS: usize = 60;
/// Of a range of durations, in seconds.
const SECONDS: f64 = 2.0;
const COUNTS: [&str; 4] = ["word_errors", "words", "char_errors", "chars"];
const SHOWN: [&str; 7] = [
    "segment_id",
    "lang",
    "reference",
    "hypothesis",
    "word_errors",
    "words",
    "duration",
];

fn is_evaluation(schema: &Schema) -> bool {
    COUNTS
        .iter()
        .chain(&SHOWN)
        .all(|name| schema.column_with_name(name).is_some())
}

/// The transcripts of evaluations that a run kept.
fn of_run(app: &App, run: &str) -> Result<Vec<TableRef>, PageError> {
    let snapshots = past_run(app, run)?.snapshots()?;
    let kinds: HashMap<&str, &str> = snapshots
        .stages
        .iter()
        .map(|one| (one.stage.as_str(), one.kind.as_str()))
        .collect();
    if !kinds.values().any(|kind| *kind == KIND) {
        return Ok(Vec::new());
    }
    let tables = ports_of_run(app, run)?.into_iter().map(|port| port.table);
    let is_transcripts = |table: &TableRef| matches!(table, TableRef::Artifact { stage, .. } if kinds.get(stage.as_str()) == Some(&KIND));
    Ok(tables.filter(is_transcripts).collect())
}

/// The runs in which evaluations are looked for, the latest first.
fn runs_to_look_in(app: &App, only: Option<&str>) -> Result<Vec<String>, PageError> {
    let mut runs = store(app)?.runs()?;
    runs.reverse();
    runs.retain(|run| only.is_none_or(|only| only == run));
    runs.truncate(RUNS);
    Ok(runs)
}

/// The files of the command line that hold transcripts of an evaluation.
fn of_files(app: &App) -> impl Iterator<Item = (TableRef, Table)> {
    let files = (0..app.settings.files.len()).map(TableRef::File);
    files.filter_map(|file| {
        let table = open(app, &file).ok()?;
        is_evaluation(table.rows.schema()).then_some((file, table))
    })
}

/// All transcripts of evaluations, the latest first.
fn evaluations(app: &App) -> Result<Vec<TableRef>, PageError> {
    let runs = runs_to_look_in(app, None)?;
    let of_run = |run: &String| {
        summary(app, run, true)
            .rates
            .clone()
            .into_iter()
            .map(|(table, _)| table)
    };
    let found = runs.iter().flat_map(of_run);
    Ok(found.chain(of_files(app).map(|(file, _)| file)).collect())
}

fn name(app: &App, table: &TableRef) -> String {
    match table.run() {
        Some(run) => titled(app, run, &table.title()),
        None => table.title(),
    }
}

/// Of each evaluation, in what its stage's settings and its pipeline's parameters differ from those of the others.
fn differing(app: &App, tables: &[&TableRef]) -> Vec<Settings> {
    let settings = |table: &&TableRef| {
        let folder = store(app).ok()?.run_folder(table.run()?).ok()?;
        Some(Frozen::read(&folder.join("spec.yaml")).settings_of(&table.stage()))
    };
    let all: Vec<Settings> = tables.iter().map(|table| settings(table).unwrap_or_default()).collect();
    differences(&all)
}

pub fn show_address(table: &TableRef, other: Option<&TableRef>) -> String {
    let other = other.map(|other| ("other".to_owned(), other.link("", &[])));
    table.link("/evaluation/show", other.as_slice())
}

pub async fn list(State(app): State<Shared>, Query(pairs): Query<Pairs>) -> Response {
    answer(&app, move |app| {
        let only = value_of(&pairs, "run");
        let runs = runs_to_look_in(app, only)?;
        let runs: Vec<_> = runs.iter().map(|run| summary(app, run, true)).collect();
        let mut rows: Vec<(TableRef, Option<Rates>, Option<&RunSummary>)> = Vec::new();
        for run in &runs {
            rows.extend(run.rates.iter().map(|(table, rates)| (table.clone(), *rates, Some(&**run))));
        }
        if only.is_none() {
            rows.extend(of_files(app).map(|(file, table)| (file, overall(&table, &[]).ok(), None)));
        }
        let differ = differing(app, &rows.iter().map(|(table, ..)| table).collect::<Vec<_>>());
        let main = html! {
            @if rows.is_empty() { p { "No run kept transcripts of an evaluation: those have a stage " code { "evaluation.decode" } "." } }
            @else { div.scroll { table.rows {
                thead { tr { th { "Evaluation" } th { "Pipeline" } th { "Started (UTC)" } th.n { "Time of the run" } th.n { "Utterances" } th.n { "Hours" } th.n { "Words" } th { "WER" } th.n { "CER" } } }
                tbody { @for ((table, rates, run), differs) in rows.iter().zip(&differ) {
                    @let link = show_address(table, None);
                    tr data-href=(link) {
                        td { a href=(link) { (table.title()) } @if !differs.is_empty() { br; span.quiet dir="auto" { (on_one_line(differs)) } } }
                        @match run {
                            Some(run) => { td dir="auto" { (run.pipeline) } td.whole { (when(&run.started)) } td.n { (run.seconds.map_or("-".to_owned(), duration)) } }
                            None => { td {} td {} td {} }
                        }
                        @match rates {
                            Some(rates) => {
                                td.n { (count(rates.utterances)) } td.n { (rates.hours()) } td.n { (count(rates.words as u64)) }
                                td.whole { (bar(rates.wer())) (percent(rates.wer())) } td.n { (percent(rates.cer())) }
                            }
                            None => { td.n { "-" } td.n { "-" } td.n { "-" } td { "-" } td.n { "-" } }
                        }
                    }
                } }
            } } }
        };
        Ok(page(app, Section::Evaluation, "Evaluations", &main))
    })
    .await
}

/// The sums over the rows that pass `filters`.
fn overall(table: &Table, filters: &[Filter]) -> Result<Rates, PageError> {
    // All numbers of words are in one range of this width.
    let all = Group::Bucket {
        column: "words".into(),
        width: f64::MAX,
    };
    let sums = ["duration", "word_errors", "words", "char_errors", "chars"];
    let totals = table.rows.totals(&all, &sums, filters, GROUPS, TIME_LIMIT)?;
    let mut rates = Rates::default();
    for total in &totals {
        rates.utterances += total.rows;
        rates.seconds += total.sums[0];
        rates.word_errors += total.sums[1];
        rates.words += total.sums[2];
        rates.char_errors += total.sums[3];
        rates.chars += total.sums[4];
    }
    Ok(rates)
}

/// The evaluations of a run with their totals; None where they cannot be read; their own pages show the error.
pub fn rates_of_run(app: &App, run: &str) -> Vec<(TableRef, Option<Rates>)> {
    let tables = of_run(app, run).unwrap_or_default().into_iter();
    let with_rates = tables.map(|table| {
        let rates = evaluation(app, &table).and_then(|opened| overall(&opened, &[]));
        (table, rates.ok())
    });
    with_rates.collect()
}

/// Errors and units of words and letters.
fn rate(total: &Total, errors: usize) -> f64 {
    match total.sums[errors + 1] {
        units if units > 0.0 => total.sums[errors] / units,
        _ => f64::NAN,
    }
}

pub async fn show(State(app): State<Shared>, Query(pairs): Query<Pairs>) -> Response {
    answer(&app, move |app| {
        let reference = TableRef::parse(&pairs)?;
        let table = evaluation(app, &reference)?;
        let other = value_of(&pairs, "other").map(other_of).transpose()?;
        let other = other.map(|other| Ok::<_, PageError>((evaluation(app, &other)?, other))).transpose()?;
        let view = View::parse(&pairs)?;
        let compared_with = other.as_ref().map(|(table, _)| table);
        let groups = [
            ("Set", Group::Value("set".into())),
            ("Language", Group::Value("lang".into())),
            ("Duration", Group::Bucket { column: "duration".into(), width: SECONDS }),
            ("Source", Group::Value("source".into())),
        ];
        let mut tables = Vec::new();
        for (head, group) in groups {
            tables.push(rates(head, &group, &table, compared_with, &view.filters)?);
        }
        let worst = worst(&table, &view.filters, COUNTED)?;
        let beside = match compared_with {
            Some(other) => hypotheses(other, &worst[..worst.len().min(WORST)])?,
            None => HashMap::new(),
        };
        let candidates = evaluations(app)?;
        let candidates: Vec<&TableRef> = candidates.iter().filter(|candidate| **candidate != reference).collect();
        // The first is this one.
        let with_own: Vec<&TableRef> = [&reference].into_iter().chain(candidates.iter().copied()).collect();
        let differ = differing(app, &with_own);
        let pair = other.as_ref().map(|(_, other)| differing(app, &[&reference, other]));
        let of_all = overall(&table, &view.filters)?;
        let main = html! {
            p { a href=(reference.address()) { "Rows" }
                @if let Some((_, other)) = &other { " · beside " a href=(show_address(other, Some(&reference))) { (name(app, other)) } " · " a href=(show_address(&reference, None)) { "alone" } }
            }
            p { strong { "WER " (percent(of_all.wer())) } " · CER " (percent(of_all.cer())) " · " (plural(of_all.utterances, "utterance")) " · " (of_all.hours()) " hours" }
            @if let Some(pair) = &pair { @for (of, settings) in ["This one", "The other"].iter().zip(pair) {
                @if !settings.is_empty() { p.quiet dir="auto" { (of) ": " (on_one_line(settings)) } }
            } }
            @if !candidates.is_empty() { details { summary { "Compare with another" }
                ul { @for (candidate, differs) in candidates.iter().zip(&differ[1..]) { li {
                    a href=(show_address(&reference, Some(candidate))) { (name(app, candidate)) } " " span.quiet dir="auto" { (on_one_line(differs)) }
                } } }
            } }
            @for table in &tables { (table) }
            (worst_section(&reference, &table, &worst, &beside, other.is_some()))
            (confusions(&worst))
        };
        Ok(page(app, Section::Evaluation, &name(app, &reference), &main))
    })
    .await
}

fn other_of(query: &str) -> Result<TableRef, PageError> {
    let wrong = || PageError::bad_request("`other` in the address names no rows");
    let uri: Uri = format!("/{}", query.trim_start_matches('/'))
        .parse()
        .map_err(|_| wrong())?;
    let Query(pairs) = Query::<Pairs>::try_from_uri(&uri).map_err(|_| wrong())?;
    TableRef::parse(&pairs)
}

fn evaluation(app: &App, reference: &TableRef) -> Result<Table, PageError> {
    let table = open(app, reference)?;
    match is_evaluation(table.rows.schema()) {
        true => Ok(table),
        false => Err(PageError::bad_request(format!(
            "{} holds no transcripts of an evaluation",
            table.title
        ))),
    }
}

fn rates(
    head: &str,
    group: &Group,
    table: &Table,
    other: Option<&Table>,
    filters: &[Filter],
) -> Result<Markup, PageError> {
    let column = group.column();
    if table.rows.schema().column_with_name(column).is_none() {
        return Ok(html! {});
    }
    let totals = table.rows.totals(group, &COUNTS, filters, GROUPS, TIME_LIMIT)?;
    let others = match other.filter(|other| other.rows.schema().column_with_name(column).is_some()) {
        Some(other) => other.rows.totals(group, &COUNTS, filters, GROUPS, TIME_LIMIT)?,
        None => Vec::new(),
    };
    if totals.len() < 2 && head != "Set" {
        return Ok(html! {});
    }
    let label = |total: &Total| {
        let value = total.value.clone().unwrap_or_else(|| "none".into());
        match (group, value.parse::<f64>()) {
            (Group::Bucket { width, .. }, Ok(from)) => format!("{from} to {} s", from + width),
            _ => value,
        }
    };
    Ok(html! {
        section {
            h2 { "Error rates by " (head.to_lowercase()) }
            div.scroll { table.rows {
                thead { tr { th { (head) } th.n { "Utterances" } th.n { "Words" } th { "WER" } @if other.is_some() { th { "Other" } th.n { "Difference" } } th.n { "CER" } } }
                tbody { @for total in &totals {
                    @let own = rate(total, 0);
                    @let beside = others.iter().find(|other| other.value == total.value).map(|other| rate(other, 0));
                    tr {
                        td { (said(&label(total), None)) }
                        td.n { (count(total.rows)) }
                        td.n { (count(total.sums[1] as u64)) }
                        td { (bar(own)) (percent(own)) }
                        @if other.is_some() {
                            td { @if let Some(beside) = beside { (bar(beside)) (percent(beside)) } @else { "-" } }
                            @match beside.map(|beside| beside - own).filter(|difference| difference.is_finite()) {
                                Some(difference) => { td.n class=(if difference <= 0.0 { "done" } else { "failed" }) { (format!("{:+.2}", 100.0 * difference)) } }
                                None => { td.n { "-" } }
                            }
                        }
                        td.n { (percent(rate(total, 2))) }
                    }
                } }
            } }
        }
    })
}

fn bar(rate: f64) -> Markup {
    let value = if rate.is_finite() { rate.clamp(0.0, 1.0) } else { 0.0 };
    html! { meter min="0" max="1" value=(format!("{value:.4}")) {} " " }
}

/// The utterances with the most errors.
fn worst(table: &Table, filters: &[Filter], limit: usize) -> Result<Vec<PlacedRow>, PageError> {
    let mut filters = filters.to_vec();
    filters.push(Filter {
        column: "word_errors".into(),
        test: Test::AtLeast(1.0),
    });
    Ok(table.rows.page(&RowQuery {
        filters,
        sort: Some(("word_errors".into(), true)),
        columns: SHOWN.map(str::to_owned).to_vec(),
        offset: 0,
        limit,
        time_limit: TIME_LIMIT,
    })?)
}

fn text(row: &PlacedRow, column: usize) -> &str {
    row.values[column].as_deref().unwrap_or_default()
}

/// Transcripts of another model for the same segments, with its errors.
fn hypotheses(other: &Table, rows: &[PlacedRow]) -> Result<HashMap<String, (String, String)>, PageError> {
    let segments: Vec<String> = rows.iter().map(|row| text(row, 0).to_owned()).collect();
    let found = other.rows.page(&RowQuery {
        filters: vec![Filter {
            column: "segment_id".into(),
            test: Test::OneOf(segments),
        }],
        sort: None,
        columns: ["segment_id", "hypothesis", "word_errors"].map(str::to_owned).to_vec(),
        offset: 0,
        limit: 4 * WORST,
        time_limit: TIME_LIMIT,
    })?;
    let told = found.into_iter().map(|row| {
        (
            text(&row, 0).to_owned(),
            (text(&row, 1).to_owned(), text(&row, 2).to_owned()),
        )
    });
    Ok(told.collect())
}

fn worst_section(
    reference: &TableRef,
    table: &Table,
    rows: &[PlacedRow],
    beside: &HashMap<String, (String, String)>,
    is_compared: bool,
) -> Markup {
    if rows.is_empty() {
        return html! {};
    }
    let may_sound = Place::may_be_in(table.rows.schema());
    html! {
        section {
            h2 { "Most errors" }
            p.quiet { "Words that were not heard are " del { "struck through" } ", those that were heard and not said " ins { "underlined" } ", those that were heard as others " span.sub { "have a wavy line" } "." }
            div.scroll { table.rows.marks {
                thead { tr { th { "Segment" } th.n { "Errors" } th { "Reference, and what was heard" } @if is_compared { th { "What the other heard" } } } }
                tbody { @for row in rows.iter().take(WORST) {
                    @let place = place_of(row);
                    @let link = reference.link("/row", &place);
                    tr data-href=(link) {
                        td { a href=(link) { (said(text(row, 0), None)) } br; (text(row, 1)) @if may_sound { " " button.play type="button" data-play=(reference.link("/sound", &place)) aria-label="Play" { "▶" } } }
                        td.n { (text(row, 4)) " of " (text(row, 5)) }
                        td { (compared(text(row, 2), text(row, 3))) }
                        @if is_compared { td { @match beside.get(text(row, 0)) {
                            Some((hypothesis, errors)) => { (compared(text(row, 2), hypothesis)) span.quiet { (errors) @if errors == "1" { " error" } @else { " errors" } } }
                            None => { span.quiet { "not in it" } }
                        } } }
                    }
                } }
            } }
        }
    }
}

/// Counts of confusions: reference and hypothesis.
type Confused = Vec<((String, String), u64)>;

/// Confused words, and letters within them.
fn confused(rows: &[PlacedRow]) -> (Confused, Confused) {
    let (mut of_words, mut of_letters) = (HashMap::new(), HashMap::new());
    for row in rows {
        let ((_, said), (_, heard)) = (split_tag(text(row, 2)), split_tag(text(row, 3)));
        for edit in align(&words(said), &words(heard)).unwrap_or_default() {
            let Edit::Substitution(said, heard) = edit else {
                continue;
            };
            *of_words.entry((said.to_owned(), heard.to_owned())).or_insert(0) += 1;
            for edit in align(&letters(said), &letters(heard)).unwrap_or_default() {
                if let Edit::Substitution(said, heard) = edit {
                    *of_letters.entry((said.to_owned(), heard.to_owned())).or_insert(0) += 1;
                }
            }
        }
    }
    let most = |counts: HashMap<(String, String), u64>| {
        let mut counts: Confused = counts.into_iter().collect();
        counts.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        counts.truncate(CONFUSED);
        counts
    };
    (most(of_words), most(of_letters))
}

fn letters(word: &str) -> Vec<&str> {
    let ends = word
        .char_indices()
        .map(|(begin, letter)| &word[begin..begin + letter.len_utf8()]);
    ends.collect()
}

fn confusions(rows: &[PlacedRow]) -> Markup {
    let (of_words, of_letters) = confused(rows);
    let table = |head: &str, pairs: &Confused| {
        html! {
            table.rows { thead { tr { th { (head) " said" } th { "Heard as" } th.n { "Times" } } }
                tbody { @for ((from, to), times) in pairs { tr { td { (said(from, None)) } td { (said(to, None)) } td.n { (count(*times)) } } } } }
        }
    };
    if of_words.is_empty() {
        return html! {};
    }
    html! {
        section {
            h2 { "Words and letters heard as others" }
            @if rows.len() == COUNTED { p.quiet { "In the " (COUNTED) " utterances with the most errors." } }
            div.two { (table("Word", &of_words)) (table("Letter", &of_letters)) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_letters_heard_as_others_are_counted() {
        let row = |said: &str, heard: &str| PlacedRow {
            part: 0,
            row: 0,
            values: ["s", "hi", said, heard, "1", "3", "1.0"]
                .iter()
                .map(|value| Some((*value).to_owned()))
                .collect(),
        };
        let rows = [
            row("<|hi|> अब कल ठीक", "<|en|> अब कब ठीक"),
            row("कल", "कब"),
            row("ठीक", ""),
        ];
        let (of_words, of_letters) = confused(&rows);
        assert_eq!(of_words, [(("कल".to_owned(), "कब".to_owned()), 2)]);
        assert_eq!(of_letters, [(("ल".to_owned(), "ब".to_owned()), 2)]);
    }

    #[test]
    fn the_other_evaluation_is_read_from_within_an_address() {
        let table = TableRef::Artifact {
            run: "r".into(),
            stage: "a&b".into(),
            port: "rows".into(),
        };
        let other = TableRef::File(3);
        let uri: Uri = show_address(&table, Some(&other)).parse().unwrap();
        let Query(pairs) = Query::<Pairs>::try_from_uri(&uri).unwrap();
        assert_eq!(TableRef::parse(&pairs).unwrap(), table);
        let query = &pairs.iter().find(|(name, _)| name == "other").unwrap().1;
        assert_eq!(other_of(query).unwrap(), other);
        for wrong in ["", "?of=file", "\n", "?of=file&file=x"] {
            assert!(other_of(wrong).is_err());
        }
    }
}
