//! The report of a run: one page without scripts, beside the run's events.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use flow_base::event::{Event, Events, StageOutcome};
use flow_base::reject::ReasonCount;
use flow_evaluation::document::document;
use flow_evaluation::page::STYLE;
use flow_spec::SwitchedOff;
use flow_storage::{Location, Storage};
use flow_store::{Store, StoreError, path_in_set, write_atomically};
use maud::{Markup, PreEscaped, html};
use serde_json::{Value, json};

use crate::progress::RunProgress;
use crate::sentence::failure;
use crate::table::{count, duration};

/// Name of the page in the run's folder.
const PAGE: &str = "report.html";

/// Version of the summary for programs.
const SUMMARY_VERSION: u32 = 1;

/// Largest page of a stage that is taken into the report.
const MAX_INSET: u64 = 16 << 20;

/// The content of the page, collected from the run's events.
#[derive(Clone, Default)]
pub struct Report {
    seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
struct Seen {
    run: String,
    /// As the user named it, and a note.
    name: Option<String>,
    note: Option<String>,
    pipeline: String,
    outcome: String,
    seconds: f64,
    /// Partitions, as the end of the run counted them.
    ran: u64,
    reused: u64,
    progress: RunProgress,
    switched_off: Vec<SwitchedOff>,
    warnings: Vec<(String, String)>,
    failure: Option<String>,
    tables: Vec<Value>,
    /// Stage, folder, files.
    exports: Vec<(String, String, Vec<String>)>,
}

impl Report {
    /// Collects `events` from now on.
    pub fn listen(events: &Events) -> Report {
        let report = Report::default();
        let seen = Arc::clone(&report.seen);
        events.listen(move |event| seen.lock().unwrap_or_else(PoisonError::into_inner).take(event));
        report
    }

    /// Writes the page into the run's folder below the state directory, and gives its path; nothing if no run began.
    ///
    /// # Errors
    /// When the page cannot be written.
    pub fn write(&self, storage: &Storage, state: &Path) -> Result<Option<PathBuf>, StoreError> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.run.is_empty() {
            return Ok(None);
        }
        let page = page_path(&Store::folder_of(storage, state)?, &seen.run);
        write_atomically(&page, seen.page(storage).as_bytes())?;
        Store::upload_run_file(storage, state, &seen.run, PAGE)?;
        Ok(Some(page_path(state, &seen.run)))
    }

    /// Whether a run began: mistakes in a pipeline, or a state directory that another run holds, end before.
    pub fn began(&self) -> bool {
        !self.seen.lock().unwrap_or_else(PoisonError::into_inner).run.is_empty()
    }

    /// The summary of the run of the pipeline in `file`, for programs (docs/running.md). `code` is the exit code, and
    /// `error` the message of a failure, or empty.
    pub fn summary(&self, file: &Path, state: &Path, code: u8, error: &str) -> Value {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let began = !seen.run.is_empty();
        let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let stages = seen.progress.stages.iter().map(|stage| {
            json!({
                "stage": stage.name,
                "kind": text(&stage.kind),
                "ran": stage.done(),
                "reused": stage.reused(),
                "rows_in": stage.rows_in,
                "rows_out": stage.rows_out,
                "rejects": stage.rejects,
                "outcome": stage.outcome,
                "failures": stage.failures,
            })
        });
        let exports = seen.exports.iter();
        let exports = exports.map(|(stage, folder, files)| json!({"stage": stage, "folder": folder, "files": files}));
        let warnings = seen.warnings.iter();
        let warnings = warnings.map(|(stage, message)| json!({"stage": text(stage), "message": message}));
        json!({
            "version": SUMMARY_VERSION,
            "run": text(&seen.run),
            "pipeline": file.display().to_string(),
            "state": state.display().to_string(),
            "outcome": text(&seen.outcome).unwrap_or_else(|| "failed".into()),
            "exit_code": code,
            "error": text(error),
            "seconds": seen.seconds,
            "ran": seen.ran,
            "reused": seen.reused,
            "stages": stages.collect::<Vec<_>>(),
            "exports": exports.collect::<Vec<_>>(),
            "warnings": warnings.collect::<Vec<_>>(),
            "report": began.then(|| page_path(state, &seen.run).display().to_string()),
        })
    }
}

/// The path of a run's page.
fn page_path(state: &Path, run: &str) -> PathBuf {
    state.join("runs").join(run).join(PAGE)
}

impl Seen {
    fn take(&mut self, event: &Event) {
        self.progress.take(event);
        match event {
            Event::RunStarted {
                run,
                pipeline,
                switched_off,
                name,
                note,
                ..
            } => {
                (self.name, self.note) = (name.clone(), note.clone());
                self.run.clone_from(run);
                self.pipeline.clone_from(pipeline);
                self.switched_off.clone_from(switched_off);
            }
            Event::StageFigures { figures, .. } => self.tables.extend(figures.get("table").cloned()),
            Event::Exported { stage, folder, files } => {
                self.exports.push((stage.clone(), folder.clone(), files.clone()));
            }
            Event::Warning { stage, message } => {
                self.warnings.push((stage.clone().unwrap_or_default(), message.clone()));
            }
            // With `--keep-going` there may be several failures.
            Event::RunFailed { message, .. } => {
                self.failure = Some(match self.failure.take() {
                    Some(before) => format!("{before}\n{message}"),
                    None => message.clone(),
                });
            }
            Event::RunFinished {
                outcome,
                seconds,
                ran,
                reused,
            } => {
                self.outcome.clone_from(outcome);
                self.seconds = *seconds;
                (self.ran, self.reused) = (*ran, *reused);
            }
            Event::StageStarted { .. } | Event::Committed { .. } | Event::StageFinished { .. } | Event::Note { .. } => {
            }
        }
    }

    fn page(&self, storage: &Storage) -> String {
        let stages = &self.progress.stages;
        let rejects: u64 = stages.iter().map(|stage| stage.rejected).sum();
        let main = html! {
            h1 { (self.pipeline) }
            p.quiet { "Run " @if let Some(name) = &self.name { b dir="auto" { (name) } " " } code { (self.run) } ", " (self.outcome.replace('_', " ")) }
            @if let Some(note) = &self.note { p dir="auto" { (note) } }
            @if let Some(failure) = &self.failure { section { h2 { "What ended it" } p { (failure) } } }
            div.tiles {
                div.tile { b { (duration(self.seconds)) } span { "from start to end" } }
                div.tile { b { (count(self.ran)) } span { "partitions ran" } }
                div.tile { b { (count(self.reused)) } span { "partitions reused" } }
                div.tile { b { a href="#rejected-rows" { (count(rejects)) } } span { "rows rejected" } }
            }
            (self.stage_table())
            (self.switched_off())
            (self.rejects())
            @for table in &self.tables { (reported_table(table)) }
            (self.export_list())
            (self.warning_list())
            @for inset in self.insets(storage) { (PreEscaped(inset)) }
        };
        document(&format!("{} – run {}", self.pipeline, self.run), STYLE, &main, None)
    }

    fn stage_table(&self) -> Markup {
        html! { section {
            h2 { "Stages" }
            table {
                thead { tr { th { "Stage" } th { "Kind" } th { "Outcome" } th.n { "Ran" } th.n { "Reused" } th.n { "Rows in" } th.n { "Rows out" } th.n { "Rejects" } } }
                tbody { @for stage in &self.progress.stages { tr {
                    td { (stage.name) }
                    td { code { (stage.kind) } }
                    td { (stage.outcome.map_or("not finished", StageOutcome::as_str)) @for failed in &stage.failures { br; (failure(failed)) } }
                    td.n { (count(stage.done())) }
                    td.n { (count(stage.reused())) }
                    td.n { (count(stage.rows_in)) }
                    td.n { (count(stage.rows_out)) }
                    td.n { (count(stage.rejected)) }
                } } }
            }
        } }
    }

    fn switched_off(&self) -> Markup {
        html! { @if !self.switched_off.is_empty() { section {
            h2 { "Switched off" }
            table {
                thead { tr { th { "Stage" } th { "Kind" } th { "Why" } } }
                tbody { @for off in &self.switched_off { tr {
                    td { (off.stage) }
                    td { code { (off.uses) } }
                    td { (off.reason) }
                } } }
            }
        } } }
    }

    fn rejects(&self) -> Markup {
        let mut lines: Vec<(&str, &ReasonCount)> = self
            .progress
            .stages
            .iter()
            .flat_map(|stage| stage.rejects.iter().map(|reject| (stage.name.as_str(), reject)))
            .collect();
        lines.sort_by(|a, b| {
            b.1.rows
                .cmp(&a.1.rows)
                .then_with(|| a.0.cmp(b.0))
                .then_with(|| a.1.reason.cmp(&b.1.reason))
        });
        let most = lines.first().map_or(1, |(_, reject)| reject.rows.max(1));
        html! { section id="rejected-rows" {
            h2 { "Rejected rows" }
            @if lines.is_empty() { p.quiet { "None." } } @else {
                table {
                    thead { tr { th { "Reason" } th { "Stage" } th { "Class" } th.n { "Rows" } } }
                    tbody { @for (stage, reject) in &lines { tr {
                        td { (reject.reason) }
                        td { (stage) }
                        td { (reject.class.as_str()) }
                        td.n {
                            span.meter style={ "width:" ((reject.rows as f64 / most as f64 * 120.0).round()) "px" } {}
                            (count(reject.rows))
                        }
                    } } }
                }
                p.quiet { "Each row with its original values: " code { "flow rejects --run " (self.run) } }
            }
        } }
    }

    fn export_list(&self) -> Markup {
        if self.exports.is_empty() {
            return html! {};
        }
        html! { section {
            h2 { "Files written" }
            table { tbody { @for (stage, folder, files) in &self.exports { tr {
                td { (stage) }
                td { code { (folder) } }
                td { (files.iter().take(12).cloned().collect::<Vec<_>>().join(", ")) @if files.len() > 12 { " and " (count(files.len() as u64 - 12)) " more" } }
            } } } }
        } }
    }

    fn warning_list(&self) -> Markup {
        if self.warnings.is_empty() {
            return html! {};
        }
        html! { section {
            h2 { "Warnings" }
            ul { @for (stage, message) in self.warnings.iter().take(200) { li { @if !stage.is_empty() { b { (stage) } ": " } (message) } } }
            @if self.warnings.len() > 200 { p.quiet { (count(self.warnings.len() as u64 - 200)) " more are in the run's events." } }
        } }
    }

    /// Pages that stages wrote: the part between `<main>` and `</main>`.
    fn insets(&self, storage: &Storage) -> Vec<String> {
        let mut insets = Vec::new();
        for (_, folder, files) in &self.exports {
            for file in files.iter().filter(|file| file.ends_with(".html")) {
                // A page that cannot be read is still where the list of files says.
                let Some(page) = read_page(storage, &Path::new(folder).join(file)) else {
                    continue;
                };
                if let (Some(start), Some(end)) = (page.find("<main>"), page.rfind("</main>"))
                    && start + 6 <= end
                {
                    insets.push(page[start + 6..end].to_string());
                }
            }
        }
        insets
    }
}

/// A page of an export, also in object storage; none if it cannot be read or is too large.
fn read_page(storage: &Storage, path: &Path) -> Option<String> {
    match Location::of_path(&path_in_set(storage, path).ok()?).ok()? {
        Location::Local(path) => {
            let is_large = std::fs::metadata(&path).is_ok_and(|found| found.len() > MAX_INSET);
            if is_large {
                None
            } else {
                std::fs::read_to_string(&path).ok()
            }
        }
        Location::Object(url) => {
            let bytes = storage.read(&url, MAX_INSET).ok()?;
            String::from_utf8(bytes.to_vec()).ok()
        }
    }
}

/// A table as stages report it: `{title, columns, rows}`.
fn reported_table(table: &Value) -> Markup {
    let cells = |row: &Value| -> Vec<String> {
        let text = |cell: &Value| cell.as_str().map_or_else(|| cell.to_string(), str::to_string);
        row.as_array()
            .map(|row| row.iter().map(text).collect())
            .unwrap_or_default()
    };
    let columns = cells(&table["columns"]);
    let rows: Vec<Vec<String>> = table["rows"]
        .as_array()
        .map(|rows| rows.iter().map(cells).collect())
        .unwrap_or_default();
    html! { section {
        h2 { (table["title"].as_str().unwrap_or("Table")) }
        table {
            thead { tr { @for (at, column) in columns.iter().enumerate() { @if at == 0 { th { (column) } } @else { th.n { (column) } } } } }
            tbody { @for row in &rows { tr { @for (at, cell) in row.iter().enumerate() { @if at == 0 { td { (cell) } } @else { td.n { (cell) } } } } } }
        }
    } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flow_kind::RejectClass;

    #[test]
    fn the_page_shows_stages_rejects_tables_and_the_pages_of_stages() {
        let folder = tempfile::tempdir().expect("folder");
        std::fs::create_dir_all(folder.path().join("runs/r1")).expect("folder");
        std::fs::write(
            folder.path().join("own.html"),
            "<html><main><h1>Own & <i>page</i></h1></main></html>",
        )
        .expect("page");
        let events = Events::default();
        let report = Report::listen(&events);
        assert_eq!(
            report
                .write(&Storage::default(), folder.path())
                .expect("nothing to write"),
            None
        );
        let stage = |name: &str| name.to_string();
        for event in [
            Event::RunStarted {
                version: 1,
                run: stage("r1"),
                pipeline: stage("build"),
                stages: vec![],
                switched_off: vec![SwitchedOff {
                    stage: stage("given"),
                    uses: stage("manifest.read"),
                    reason: stage("`when: '<a>' == ''` does not hold"),
                    since: None,
                    position: 0,
                    from: vec![],
                }],
                name: Some(stage("warm <1>")),
                note: None,
            },
            Event::StageStarted {
                stage: stage("unique:keys"),
                kind: stage("manifest.dedup"),
                run: 3,
                reused: 4,
            },
            Event::StageFinished {
                stage: stage("unique"),
                rows_in: 1234,
                rows_out: 1200,
                rejects: vec![ReasonCount {
                    reason: stage("exact_duplicate"),
                    class: RejectClass::Rule,
                    rows: 34,
                }],
                outcome: StageOutcome::Done,
                failures: vec![],
            },
            Event::RunFailed {
                stage: Some(stage("broken")),
                partition: Some(stage("s7")),
                row: None,
                message: stage("no space"),
            },
            Event::StageFigures {
                stage: stage("unique"),
                figures: serde_json::json!({"table": {"title": "Sizes", "columns": ["a", "b"], "rows": [["x", 7]]}}),
            },
            Event::Exported {
                stage: stage("write"),
                folder: folder.path().display().to_string(),
                files: vec![stage("own.html")],
            },
            Event::warning(None, stage("a <script> here")),
            Event::RunFinished {
                outcome: stage("done"),
                seconds: 3725.0,
                ran: 3,
                reused: 4,
            },
        ] {
            events.send(event);
        }
        let path = report
            .write(&Storage::default(), folder.path())
            .expect("written")
            .expect("a path");
        let page = std::fs::read_to_string(path).expect("the page");
        for part in [
            "1,234",
            "exact_duplicate",
            "Sizes",
            "Own & <i>page</i>",
            "a &lt;script&gt; here",
            "1 h 02 min",
            "does not hold",
            "failed<br>partition s7: no space",
        ] {
            assert!(page.contains(part), "{part}");
        }
        assert!(page.contains("<a href=\"#rejected-rows\">34</a>") && page.contains("<section id=\"rejected-rows\">"));
        assert!(!page.contains("unique:keys"));
    }
}
