//! Runs of the state directory: a list, and a page of each with live updates.

use std::convert::Infallible;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{Path as InAddress, Query, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::response::sse::{Event as ServerSentEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use flow_base::event::{Event, StageOutcome};
use flow_evaluation::page::percent;
use flow_inspect::frozen::Frozen;
use flow_inspect::progress::StageProgress;
use flow_inspect::sentence::sentence;
use flow_inspect::table::{count, duration, plural};
use flow_spec::SwitchedOff;
use flow_store::Store;
use maud::{Markup, html};

use super::address::address;
use super::app::{App, Shared, answer};
use super::dag;
use super::evaluation;
use super::follower::{Ended, Follower, last_lines};
use super::layout::{Section, page};
use super::page_error::PageError;
use super::state_directory::{follower, store, when};
use super::summaries::{SHOWN, summary};
use super::table_ref::TableRef;
use super::tables::{RunPort, ports_of_run};

/// For looking up figures of the runs of the list, which are known from then on.
const LIST_TIME: Duration = Duration::from_millis(1500);
/// Between looks at a run that goes on.
const PAUSE: Duration = Duration::from_secs(1);
/// Largest report that is served.
const MAX_REPORT: u64 = 256 << 20;

pub async fn list(State(app): State<Shared>) -> Response {
    answer(&app, |app| {
        let store = store(app)?;
        let holder = Store::holder(&app.settings.storage, &app.settings.state);
        let mut ids = store.runs()?;
        ids.reverse();
        let left_out = ids.len().saturating_sub(SHOWN);
        ids.truncate(SHOWN);
        let deadline = Instant::now() + LIST_TIME;
        let rows = ids.into_iter().map(|id| {
            let is_held = holder.as_ref().is_some_and(|holder| holder.run == id);
            (summary(app, &id, Instant::now() < deadline), is_held, id)
        });
        let rows: Vec<_> = rows.collect();
        let main = html! {
            @if rows.is_empty() { p { "There are no runs yet: " code { "flow run" } " makes one." } }
            @if let Some(holder) = &holder { p.going { "Going on: " (holder) } }
            @if !rows.is_empty() {
                div.scroll { table.rows {
                    thead { tr {
                        th { "Run" } th { "Pipeline" } th { "Started (UTC)" } th.n { "Time" }
                        th.n title="The most rows that one stage gave out" { "Rows" } th.n { "Rejects" } th { "WER" } th { "Outcome" }
                    } }
                    tbody { @for (run, is_held, id) in &rows {
                        @let link = format!("/runs/{id}");
                        tr data-href=(link) {
                            td.whole { a href=(link) { (id) } @if let Some(name) = &run.name { br; b dir="auto" { (name) } } @if let Some(note) = &run.note { br; span.quiet dir="auto" { (note) } } }
                            td dir="auto" { (run.pipeline) }
                            td.whole { (when(&run.started)) }
                            td.n { (run.seconds.map_or("-".to_owned(), duration)) }
                            td.n { (run.rows.map_or("-".to_owned(), count)) }
                            td.n { (run.rejects.map_or("-".to_owned(), count)) }
                            td.whole { @for (number, (table, rates)) in run.rates.iter().enumerate() {
                                @if number > 0 { br; }
                                a href=(evaluation::show_address(table, None)) { (table.stage()) } " " (percent(rates.map_or(f64::NAN, |rates| rates.wer())))
                            } }
                            td class=(outcome_class(run.outcome.as_deref(), *is_held)) {
                                @match (&run.outcome, is_held) {
                                    (Some(outcome), _) => { (outcome) }
                                    (None, true) => { "going on" }
                                    (None, false) => { "cut short" }
                                }
                            }
                        }
                    } }
                } }
            }
            @let without = rows.iter().filter(|(run, ..)| run.rows.is_none()).count();
            @if without > 0 { p.quiet { "Rows, rejects and WER of " (plural(without as u64, "run")) " were not looked up in time: load the page again." } }
            @if left_out > 0 { p.quiet { (plural(left_out as u64, "earlier run")) " not shown." } }
        };
        Ok(page(app, Section::Runs, "Runs", &main))
    })
    .await
}

fn outcome_class(outcome: Option<&str>, is_held: bool) -> &'static str {
    match outcome {
        Some("done") => "done",
        Some(_) => "failed",
        None if is_held => "going",
        None => "quiet",
    }
}

pub async fn show(State(app): State<Shared>, InAddress(id): InAddress<String>) -> Response {
    answer(&app, move |app| {
        let follower = follower(app, &id)?;
        let folder = store(app)?.run_folder(&id)?;
        let (pipeline, started, is_over, name, note) = {
            let follower = follower.lock().unwrap_or_else(PoisonError::into_inner);
            let (name, note) = (follower.name.clone(), follower.note.clone());
            (follower.pipeline.clone(), follower.started.clone(), follower.ended.is_some(), name, note)
        };
        let frozen = Frozen::read(&folder.join("spec.yaml"));
        let ports = ports_of_run(app, &id);
        let main = html! {
            p.quiet { "Run " @if let Some(name) = &name { b dir="auto" { (name) } " " } code { (id) } ", started " (started) }
            @if let Some(note) = &note { p dir="auto" { (note) } }
            p.links {
                a href={ "/runs/" (id) "/log" } { "Log" }
                @if folder.join("report.html").is_file() { a href={ "/runs/" (id) "/report" } { "Report" } }
                a href=(address("/evaluation", [("run", id.as_str())])) { "Evaluation" }
            }
            div #live data-live=[(!is_over).then(|| format!("/runs/{id}/live"))] { (live(app, &id)?.0) }
            (rows_of_stages(ports))
            @if !frozen.params.is_empty() {
                details { summary { "Parameters" }
                    table { tbody { @for (name, value) in &frozen.params { tr { td { code { (name) } } td dir="auto" { (value) } } } } }
                }
            }
        };
        Ok(page(app, Section::Runs, &pipeline, &main))
    })
    .await
}

fn rows_of_stages(ports: Result<Vec<RunPort>, PageError>) -> Markup {
    let ports = match ports {
        Ok(ports) => ports,
        Err(error) => return html! { p.quiet dir="auto" { (error.message) } },
    };
    if ports.is_empty() {
        return html! {};
    }
    html! {
        section {
            h2 { "Rows that stages kept" }
            ul.columns { @for port in &ports { (port.line()) } }
        }
    }
}

/// The part of the page that changes while the run goes on, and whether it shows the run's end.
fn live(app: &App, id: &str) -> Result<(Markup, bool), PageError> {
    let follower = follower(app, id)?;
    let run = follower.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = store(app)?.run_folder(id)?;
    let frozen = Frozen::read(&folder.join("spec.yaml"));
    let is_held = Store::holder(&app.settings.storage, &app.settings.state).is_some_and(|holder| holder.run == id);
    let stage = |name: &str| run.progress.stages.iter().find(|stage| stage.name == name);
    let drawn = dag::drawing(&frozen.nodes, |node| {
        let at = stage(&node.name);
        let class = state_class(at, run.ended.is_some(), is_held);
        let text = at.map_or("not reached".to_owned(), |at| state_text(at, run.times.get(&node.name)));
        dag::State { class, text }
    });
    let part = html! {
        @match &run.ended {
            Some(Ended { in_words, outcome, seconds }) => {
                p class=(if outcome == "done" { "done" } else { "failed" }) dir="auto" { (in_words) " (" (duration(*seconds)) ")" }
            }
            None if is_held => { p.going { "Going on." } }
            None => { p.failed { "It was cut short; what was committed stays, and " code { "flow run" } " goes on from there." } }
        }
        @for failure in &run.failures { p.failed dir="auto" { (failure) } }
        (drawn)
        (switched_off(&run.switched_off))
        section {
            h2 { "Stages" }
            table.rows {
                thead { tr { th { "Stage" } th { "Partitions" } th.n { "Reused" } th.n { "Rows in" } th.n { "Rows out" } th.n { "Rejects" } th.n { "Time" } th { "State" } } }
                tbody { @for name in &run.stages {
                    @match stage(name) {
                        None => { tr { td { (name) } td {} td.n { "-" } td.n { "-" } td.n { "-" } td.n { "-" } td.n { "-" } td.quiet { "not reached" } } }
                        Some(at) => {
                            tr {
                                td { (name) @if let Some(figures) = run.figures.get(name) { br; span.quiet dir="auto" { (figures) } } }
                                td.partitions { progress value=(at.done()) max=(at.to_run().max(1)) aria-label={ (at.done()) " of " (at.to_run()) } {} " " (count(at.done())) " of " (count(at.to_run())) }
                                td.n { (count(at.reused())) }
                                td.n { (count(at.rows_in)) }
                                td.n { (count(at.rows_out)) }
                                td.n { (count(at.rejected)) }
                                td.n { (run.times.get(name).and_then(|(from, to)| seconds_between(from, to)).map_or("-".to_owned(), duration)) }
                                td class=(state_class(Some(at), run.ended.is_some(), is_held)) { (outcome_text(at)) @for failure in &at.failures { br; span dir="auto" { (failure.message) } } }
                            }
                        }
                    }
                } }
            }
        }
        (rejects(id, &run))
        @if !run.exports.is_empty() {
            section { h2 { "Exports" }
                ul { @for (number, (stage, folder, files)) in run.exports.iter().enumerate() {
                    li { (stage) ": " code dir="auto" { (folder) } ul { @for file in files.iter().take(50) {
                        @let table = TableRef::Export { run: id.to_owned(), export: number, file: file.clone() };
                        li { @if table.may_have_rows() { a href=(table.address()) { (file) } } @else { (file) } }
                    } } }
                } }
            }
        }
        @if !run.warnings.is_empty() {
            section { h2 { "Warnings" } ul { @for warning in &run.warnings { li dir="auto" { (warning) } } } }
        }
        section { h2 { "Latest events" }
            ol.log { @for (at, told) in run.latest.iter().rev() { li { time { (at) } " " span dir="auto" { (told) } } } }
            @if run.damaged > 0 { p.failed { (plural(run.damaged, "line")) " of the events cannot be read." } }
        }
    };
    Ok((part, run.ended.is_some()))
}

/// Stages that take no part, folded: a pipeline for several uses has many.
fn switched_off(off: &[SwitchedOff]) -> Markup {
    html! { @if !off.is_empty() {
        details { summary { (plural(off.len() as u64, "stage")) " switched off" }
            table { tbody { @for off in off { tr { td { (off.stage) } td { code { (off.uses) } } td dir="auto" { (off.reason) } } } } }
        }
    } }
}

fn rejects(id: &str, run: &Follower) -> Markup {
    let all: Vec<_> = run
        .progress
        .stages
        .iter()
        .flat_map(|stage| stage.rejects.iter().map(move |reason| (&stage.name, reason)))
        .collect();
    if all.is_empty() {
        return html! {};
    }
    html! {
        section {
            h2 { "Rejects" }
            table.rows {
                thead { tr { th { "Stage" } th { "Reason" } th { "Class" } th.n { "Rows" } } }
                tbody { @for (stage, reason) in all {
                    @let link = address("/rows", [("of", "rejects"), ("run", id), ("f.stage", stage.as_str()), ("f.reason", reason.reason.as_str())]);
                    tr data-href=(link) {
                        td { (stage) } td { a href=(link) { (reason.reason) } } td { (reason.class.as_str()) } td.n { (count(reason.rows)) }
                    }
                } }
            }
        }
    }
}

fn state_class(stage: Option<&StageProgress>, is_over: bool, is_held: bool) -> &'static str {
    match stage.map(|stage| stage.outcome) {
        None => "waiting",
        Some(Some(StageOutcome::Done)) => "done",
        Some(Some(StageOutcome::Failed)) => "failed",
        Some(Some(StageOutcome::Incomplete | StageOutcome::LeftOut)) => "incomplete",
        Some(None) if is_over || !is_held => "incomplete",
        Some(None) => "going",
    }
}

fn outcome_text(stage: &StageProgress) -> &'static str {
    stage.outcome.map_or("in work", StageOutcome::as_str)
}

/// The text of a stage's box.
fn state_text(stage: &StageProgress, times: Option<&(String, String)>) -> String {
    let time = times.and_then(|(from, to)| seconds_between(from, to)).map(duration);
    let time = time.map_or(String::new(), |time| format!(", {time}"));
    match stage.outcome {
        None => format!("{} of {}{time}", stage.done(), stage.to_run()),
        Some(StageOutcome::Done) if stage.to_run() == 0 && stage.reused() > 0 => "reused".to_owned(),
        Some(StageOutcome::Done) => format!("{}{time}", plural(stage.rows_out, "row")),
        Some(outcome) => format!("{}{time}", outcome.as_str()),
    }
}

fn seconds_between(from: &str, to: &str) -> Option<f64> {
    let read = |text: &str| chrono::DateTime::parse_from_rfc3339(text).ok();
    Some((read(to)? - read(from)?).num_milliseconds() as f64 / 1000.0)
}

/// The changing part of the page, each time it changed, until the run is over.
pub async fn follow(State(app): State<Shared>, InAddress(id): InAddress<String>) -> Response {
    let events = futures::stream::unfold(
        (app, id, None::<String>, false),
        |(app, id, shown, is_last)| async move {
            if is_last {
                return None;
            }
            loop {
                if shown.is_some() {
                    tokio::time::sleep(PAUSE).await;
                }
                let (worker, run) = (Arc::clone(&app), id.clone());
                let drawn = tokio::task::spawn_blocking(move || {
                    live(&worker, &run).map(|(drawn, is_over)| (drawn.into_string(), is_over))
                });
                let Ok(Ok((drawn, is_over))) = drawn.await else {
                    return None;
                };
                if shown.as_ref() == Some(&drawn) {
                    continue;
                }
                let name = if is_over { "end" } else { "part" };
                let event = ServerSentEvent::default().event(name).data(drawn.replace('\r', " "));
                return Some((Ok::<_, Infallible>(event), (app, id, Some(drawn), is_over)));
            }
        },
    );
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

#[derive(serde::Deserialize)]
pub struct LogQuery {
    to: Option<u64>,
}

pub async fn log(
    State(app): State<Shared>,
    InAddress(id): InAddress<String>,
    Query(query): Query<LogQuery>,
) -> Response {
    answer(&app, move |app| {
        let folder = store(app)?.run_folder(&id).map_err(|_| PageError::absent("run"))?;
        let (first, lines) =
            last_lines(&folder.join("events.jsonl"), query.to).map_err(|_| PageError::absent("log of that run"))?;
        let told = lines.iter().map(|line| {
            let value: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
            let at = value["at"].as_str().unwrap_or_default().to_owned();
            match serde_json::from_value::<Event>(value) {
                Ok(event) => (at, sentence(&event)),
                Err(_) => (
                    at,
                    format!("unreadable: {}", line.chars().take(200).collect::<String>()),
                ),
            }
        });
        let main = html! {
            p { a href={ "/runs/" (id) } { "Run " (id) } }
            @if first > 0 { p { a rel="prev" href={ "/runs/" (id) "/log?to=" (first) } { "Earlier" } } }
            ol.log { @for (at, told) in told { li { time { (at) } " " span dir="auto" { (told) } } } }
        };
        Ok(page(app, Section::Runs, "Log", &main))
    })
    .await
}

/// The report that the run wrote, as it is: a page without scripts.
pub async fn report(State(app): State<Shared>, InAddress(id): InAddress<String>) -> Response {
    answer(&app, move |app| {
        let folder = store(app)?.run_folder(&id).map_err(|_| PageError::absent("run"))?;
        let file = folder.join("report.html");
        let absent = || PageError::absent("report of that run");
        if file.metadata().map_err(|_| absent())?.len() > MAX_REPORT {
            return Err(PageError::new(StatusCode::PAYLOAD_TOO_LARGE, "the report is too large to be shown here"));
        }
        let text = flow_kind::read_local_file(&file).map_err(|_| absent())?;
        let policy = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; frame-ancestors 'none'";
        Ok((
            [(CONTENT_TYPE, "text/html; charset=utf-8"), (CONTENT_SECURITY_POLICY, policy)],
            text,
        )
            .into_response())
    })
    .await
}
