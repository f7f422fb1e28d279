//! Tables that can be browsed: results of stages, rejects, exported manifests, and files of the command line. URLs name
//! one of these, never a path.

use std::path::{Component, Path, PathBuf};
use std::sync::PoisonError;

use flow_inspect::frozen::Frozen;
use flow_inspect::past_run::PastRun;
use flow_inspect::progress::stage_of;
use flow_inspect::table::plural;

use crate::browse::{RowSet, texts};
use arrow::array::RecordBatch;
use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};

use super::app::{App, Shared, answer};
use super::layout::{Section, page};
use super::page_error::PageError;
use super::state_directory::{follower, store};
use super::table_ref::{Table, TableRef, value_of};

/// Runs whose rows the page of tables lists.
const RUNS: usize = 5;
/// Tables that stay open.
const REMEMBERED: usize = 4;

/// The column of rejects that holds the values that the row had, as JSON.
pub const REJECTED: &str = "values";

/// Opens a table; recently used ones are cached.
pub fn open(app: &App, table: &TableRef) -> Result<Table, PageError> {
    // Not cached: results of a running run may grow, and so may files of the command line.
    let is_settled = matches!(table, TableRef::Artifact { run, .. } | TableRef::Rejects { run } if is_over(app, run));
    let mut tables = app.tables.lock().unwrap_or_else(PoisonError::into_inner);
    if is_settled && let Some(at) = tables.iter().position(|(known, _)| known == table) {
        let found = tables.remove(at);
        tables.push(found.clone());
        return Ok(found.1);
    }
    drop(tables);
    let opened = opened(app, table)?;
    if is_settled {
        tables = app.tables.lock().unwrap_or_else(PoisonError::into_inner);
        tables.push((table.clone(), opened.clone()));
        let too_many = tables.len().saturating_sub(REMEMBERED);
        tables.drain(..too_many);
    }
    Ok(opened)
}

fn is_over(app: &App, run: &str) -> bool {
    flow_store::Store::holder(&app.settings.storage, &app.settings.state).is_none_or(|holder| holder.run != run)
}

/// The run of this name.
pub fn past_run(app: &App, id: &str) -> Result<PastRun, PageError> {
    let store = store(app)?;
    let folder = store.run_folder(id).map_err(|_| PageError::absent("run"))?;
    if !folder.is_dir() {
        return Err(PageError::absent("run"));
    }
    Ok(PastRun {
        id: id.to_owned(),
        folder,
        store,
    })
}

fn opened(app: &App, table: &TableRef) -> Result<Table, PageError> {
    let shards = match (&app.settings.shards, table.run()) {
        (Some(shards), _) => Some(shards.clone()),
        (None, Some(run)) => {
            let frozen = Frozen::read(&past_run(app, run)?.folder.join("spec.yaml"));
            // That of the whole pipeline, or of a stage (an included pipeline has parameters of its own).
            let of_stage = || frozen.settings.iter().find(|(name, _)| name.ends_with(".shards"));
            frozen
                .param("shards")
                .or_else(|| of_stage().map(|(_, value)| value.as_str()))
                .map(PathBuf::from)
        }
        (None, None) => None,
    };
    let table_of = |rows, beside: Option<&Path>| Table {
        rows,
        title: table.title(),
        shards,
        beside: beside.map(Path::to_owned),
    };
    match table {
        TableRef::Artifact { run, stage, port } => {
            let run = past_run(app, run)?;
            let snapshots = run.snapshots()?;
            let snapshot = snapshots.stages.iter().find(|snapshot| is_of(&snapshot.stage, stage));
            let snapshot = snapshot.ok_or_else(|| PageError::absent("stage of that run"))?;
            let records = run.records_of(snapshot)?;
            let artifact = run.store.stored_artifact(&snapshot.recipe, &records, port)?;
            let artifact = artifact.ok_or_else(|| PageError::absent("rows of that stage"))?;
            Ok(table_of(RowSet::of_artifact(&artifact), None))
        }
        TableRef::Rejects { run } => {
            let run = past_run(app, run)?;
            let mut sets = Vec::new();
            for snapshot in &run.snapshots()?.stages {
                let stage = stage_of(&snapshot.stage).to_owned();
                for record in run.records_of(snapshot)? {
                    if record.rejects.rows > 0 {
                        let set = run
                            .store
                            .reject_set(&[(stage.clone(), snapshot.recipe, vec![record.clone()])]);
                        sets.push((stage.clone(), record.partition.clone(), set));
                    }
                }
            }
            Ok(table_of(RowSet::of_rejects(sets)?, None))
        }
        TableRef::Export { run, export, file } => {
            let path = exported(app, run, *export, file)?;
            Ok(table_of(RowSet::of_files(std::slice::from_ref(&path))?, path.parent()))
        }
        TableRef::File(number) => {
            let path = app
                .settings
                .files
                .get(*number)
                .ok_or_else(|| PageError::absent("file"))?;
            let title = path.display().to_string();
            let table = table_of(RowSet::of_files(std::slice::from_ref(path))?, path.parent());
            Ok(Table { title, ..table })
        }
    }
}

/// The path of a file that the run says it exported.
fn exported(app: &App, run: &str, export: usize, file: &str) -> Result<PathBuf, PageError> {
    let follower = follower(app, run)?;
    let run = follower.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, folder, files) = run.exports.get(export).ok_or_else(|| PageError::absent("export"))?;
    let is_below = Path::new(file)
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    if !is_below || !files.iter().any(|known| known == file) {
        return Err(PageError::absent("file of that export"));
    }
    Ok(Path::new(folder).join(file))
}

/// Rows that a stage kept.
pub struct RunPort {
    pub table: TableRef,
    pub rows: u64,
}

impl RunPort {
    /// A line of a list, with a link to the rows.
    pub fn line(&self) -> Markup {
        html! { li { a href=(self.table.address()) { (self.table.title()) } " " span.quiet { (plural(self.rows, "row")) } } }
    }
}

/// Whether a snapshot belongs to the stage; those of the keys and decisions of a global stage are internal.
fn is_of(part: &str, stage: &str) -> bool {
    stage_of(part) == stage && !part.ends_with(":keys") && !part.ends_with(":decide")
}

/// All ports that stages of a run kept rows of.
pub fn ports_of_run(app: &App, id: &str) -> Result<Vec<RunPort>, PageError> {
    let run = past_run(app, id)?;
    let mut found = Vec::new();
    for snapshot in &run.snapshots()?.stages {
        let stage = stage_of(&snapshot.stage);
        if !is_of(&snapshot.stage, stage) {
            continue;
        }
        let mut ports: Vec<(&str, u64)> = Vec::new();
        // Missing data is reported when the rows are opened.
        let records = snapshot.among(&run.store.records(&snapshot.recipe)?);
        for record in &records {
            for (port, stored) in record.ports.iter() {
                match ports.iter_mut().find(|(known, _)| *known == port) {
                    Some((_, rows)) => *rows += stored.rows,
                    None => ports.push((port, stored.rows)),
                }
            }
        }
        for (port, rows) in ports {
            let table = TableRef::Artifact {
                run: id.to_owned(),
                stage: stage.to_owned(),
                port: port.to_owned(),
            };
            found.push(RunPort { table, rows });
        }
    }
    Ok(found)
}

/// The page of all tables.
pub async fn list(State(app): State<Shared>) -> Response {
    answer(&app, |app| {
        let mut runs = store(app)?.runs()?;
        runs.reverse();
        runs.truncate(RUNS);
        let main = html! {
            @if !app.settings.files.is_empty() {
                section { h2 { "Files" }
                    ul { @for (number, file) in app.settings.files.iter().enumerate() {
                        @let table = TableRef::File(number);
                        li { a href=(table.address()) dir="auto" { (file.display()) } " "
                            @match open(app, &table) {
                                Ok(opened) => { @if let Some(rows) = opened.rows.rows() { span.quiet { (plural(rows, "row")) } } }
                                Err(_) => { span.failed { "cannot be read" } }
                            }
                        }
                    } }
                }
            }
            @for run in &runs {
                section {
                    h2 { a href={ "/runs/" (run) } { "Run " (run) } }
                    @match ports_of_run(app, run) {
                        Err(error) => { p.quiet dir="auto" { (error.message) } }
                        Ok(ports) => {
                            ul.columns {
                                @for port in &ports { (port.line()) }
                                li { a href=(TableRef::Rejects { run: run.clone() }.address()) { "Rejects" } }
                            }
                        }
                    }
                }
            }
            @if runs.is_empty() && app.settings.files.is_empty() {
                p { "There is nothing to look at: run a pipeline, or name files as in " code { "flow ui manifest.parquet" } "." }
            }
        };
        Ok(page(app, Section::Rows, "Rows", &main))
    })
    .await
}

/// The row that an address names.
pub fn row_of(app: &App, pairs: &[(String, String)]) -> Result<(TableRef, Table, RecordBatch), PageError> {
    let reference = TableRef::parse(pairs)?;
    let number = |wanted: &str| {
        let number = value_of(pairs, wanted).and_then(|value| value.parse::<u64>().ok());
        number.ok_or_else(|| PageError::bad_request(format!("`{wanted}` in the address is not a number")))
    };
    let table = open(app, &reference)?;
    let part = usize::try_from(number("part")?).unwrap_or(usize::MAX);
    let row = table.rows.row(part, number("row")?)?;
    Ok((reference, table, row.ok_or_else(|| PageError::absent("row"))?))
}

/// The value of a row's column as text; of a reject, also one of those that its row had.
pub fn value(row: &RecordBatch, column: &str) -> Option<String> {
    if let Some(column) = row.column_by_name(column) {
        return texts(std::slice::from_ref(column), 1).ok()?.pop()?.pop()?;
    }
    let values = texts(std::slice::from_ref(row.column_by_name(REJECTED)?), 1)
        .ok()?
        .pop()?
        .pop()??;
    let values: serde_json::Value = serde_json::from_str(&values).ok()?;
    match values.get(column)? {
        serde_json::Value::Null => None,
        serde_json::Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, StringArray};

    use super::*;

    #[test]
    fn a_reject_has_the_values_that_its_row_had() {
        let text = |text: Option<&str>| -> ArrayRef { Arc::new(StringArray::from(vec![text])) };
        let row = |values| {
            let columns = [
                ("segment_id", text(Some("s"))),
                ("detail", text(None)),
                (REJECTED, text(values)),
            ];
            RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true))).unwrap()
        };
        let reject = row(Some(
            "{\"segment_id\":\"other\",\"detail\":\"x\",\"text\":\"नमस्ते\",\"duration\":1.5,\"lang\":null}",
        ));
        let told = |column: &str| value(&reject, column);
        assert_eq!((told("segment_id").as_deref(), told("detail")), (Some("s"), None));
        assert_eq!(
            (told("text").as_deref(), told("duration").as_deref()),
            (Some("नमस्ते"), Some("1.5"))
        );
        assert_eq!((told("lang"), told("no_such")), (None, None));
        for damaged in [None, Some(""), Some("[1]"), Some("{")] {
            assert_eq!(value(&row(damaged), "text"), None);
        }
    }
}
