//! Compares the output of stages in a test with the expectations.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value;

use super::TestFailure;
use super::prepare::{Expected, Rows};
use super::rows::ExpectedValues;
use flow_base::error::StageError;
use flow_base::row_json::value_text;
use flow_kind::kind::Role;
use flow_plan::run_error::RunError;
use flow_spec::{Checked, CheckedStage};
use flow_store::{Artifact, Record, RunSnapshots, Store, add_up};

/// Unexpected rows that are shown at most.
const SHOWN: usize = 20;

/// Columns that are shown where only the number of rows is expected.
const COLUMNS_SHOWN: usize = 6;

/// Relative tolerance of floats, as expectations are written with few digits.
const TOLERANCE: f64 = 1e-6;

/// The result of one expectation.
pub(super) struct Came {
    pub rows: u64,
    /// Of the whole stage.
    pub rejects: u64,
    pub failures: Vec<TestFailure>,
}

pub(super) fn compare(
    expected: &Expected,
    checked: &Checked,
    store: &Store,
    snapshots: &RunSnapshots,
) -> Result<Came, RunError> {
    let stage = &checked.stages[expected.stage];
    let rejects = rejects_of(stage, store, snapshots)?;
    let rows = match expected.port {
        Some(port) => Some(artifact_of(stage, port, store, snapshots)?),
        None => None,
    };
    let came = rows.as_ref().map_or(0, Artifact::rows);
    let refused: u64 = rejects.values().sum();
    let mut failures = Vec::new();
    let mut fail = |message: String, table| {
        failures.push(TestFailure {
            place: expected.place.clone(),
            message: format!("`{}`: {message}", expected.port_name),
            table,
        });
    };
    if let (Some(wanted), Some(rows)) = (&expected.rows, &rows) {
        let failed = |error| RunError::stage(stage.name.clone(), None, error);
        if let Some((message, table)) = compare_rows(wanted, rows).map_err(failed)? {
            fail(format!("{message}{}", with_rejects(&rejects)), table);
        }
    }
    if let Some(wanted) = &expected.rejects
        && *wanted != rejects
    {
        fail(
            "other rejects than expected".to_string(),
            reject_table(wanted, &rejects),
        );
    }
    let none_is_meant = match &expected.rows {
        Some(Rows::Count(count)) => *count == 0,
        Some(Rows::Values(values)) => values.rows.is_empty(),
        None => false,
    };
    if failures.is_empty() && came == 0 && refused == 0 && !none_is_meant {
        failures.push(TestFailure {
            place: expected.place.clone(),
            message: format!(
                "`{}`: no rows and no rejects came; where that is meant, expect `rows: 0`",
                expected.port_name
            ),
            table: Vec::new(),
        });
    }
    Ok(Came {
        rows: came,
        rejects: refused,
        failures,
    })
}

/// The name of the node whose outputs are the stage's.
fn node_of(stage: &CheckedStage) -> String {
    match stage.shape.role {
        Role::Global => format!("{}:apply", stage.name),
        _ => stage.name.clone(),
    }
}

/// The number of rejected rows by reason.
fn rejects_of(
    stage: &CheckedStage,
    store: &Store,
    snapshots: &RunSnapshots,
) -> Result<BTreeMap<String, u64>, RunError> {
    let mut rejects = BTreeMap::new();
    let parts = snapshots.stages.iter();
    for part in parts.filter(|part| part.stage.split(':').next() == Some(&stage.name)) {
        let records = part.among(&store.records(&part.recipe)?);
        for count in add_up(records.iter().flat_map(|record| &record.rejects.by_reason)) {
            *rejects.entry(count.reason).or_default() += count.rows;
        }
    }
    Ok(rejects)
}

fn artifact_of(
    stage: &CheckedStage,
    port: usize,
    store: &Store,
    snapshots: &RunSnapshots,
) -> Result<Artifact, RunError> {
    let port = &stage.shape.outputs[port];
    let Some(snapshot) = snapshots.of(&node_of(stage)) else {
        return Ok(Artifact::empty(Arc::clone(&port.schema)));
    };
    let records: Vec<Arc<Record>> = snapshot.among(&store.records(&snapshot.recipe)?);
    Ok(store.artifact(&snapshot.recipe, &port.name, Arc::clone(&port.schema), &records)?)
}

/// An actual row: its partition, and its values as JSON.
struct CameRow {
    partition: String,
    values: Vec<String>,
}

/// The first rows of an artifact, in its order.
fn first_rows(rows: &Artifact, columns: &[&str], limit: usize) -> Result<Vec<CameRow>, StageError> {
    let mut first = Vec::new();
    for batch in rows.batches(Some(columns)) {
        let (partition, batch) = batch?;
        for row in 0..batch.num_rows().min(limit - first.len()) {
            let values = batch.columns().iter().map(|column| value_text(column.as_ref(), row));
            first.push(CameRow {
                partition: partition.to_string(),
                values: values.collect::<Result<_, _>>()?,
            });
        }
        if first.len() == limit {
            break;
        }
    }
    Ok(first)
}

/// A message, and a table of the differences.
type Difference = Option<(String, Vec<Vec<String>>)>;

fn compare_rows(wanted: &Rows, rows: &Artifact) -> Result<Difference, StageError> {
    let came = rows.rows();
    match wanted {
        Rows::Count(count) if *count == came => Ok(None),
        Rows::Count(count) => {
            let names = rows.schema().fields().iter().map(|field| field.name().as_str());
            let columns: Vec<&str> = names.take(COLUMNS_SHOWN).collect();
            let first = first_rows(rows, &columns, SHOWN)?;
            let head = ["came", "partition"].into_iter().chain(columns);
            let mut table = vec![head.map(str::to_string).collect::<Vec<_>>()];
            table.extend((0..).zip(first).map(|(place, row): (usize, _)| {
                let head = [place.to_string(), row.partition];
                head.into_iter().chain(row.values).collect()
            }));
            if table.len() == 1 {
                table.clear();
            }
            Ok(Some((counts(*count, came), table)))
        }
        Rows::Values(values) => {
            let columns: Vec<&str> = values.columns.iter().map(String::as_str).collect();
            let first = first_rows(rows, &columns, values.rows.len() + SHOWN)?;
            let (differ, table) = row_by_row(values, &first);
            let wanted = values.rows.len() as u64;
            Ok(match (wanted == came, differ) {
                (true, 0) => None,
                (true, 1) => Some((format!("1 of {came} rows is not as expected"), table)),
                (true, _) => Some((format!("{differ} of {came} rows are not as expected"), table)),
                (false, _) => Some((counts(wanted, came), table)),
            })
        }
    }
}

fn counts(expected: u64, came: u64) -> String {
    match (expected, came) {
        (1, _) => format!("1 row is expected, {came} came"),
        _ => format!("{expected} rows are expected, {came} came"),
    }
}

/// The number of expected rows that differ from the actual ones at their positions, and a table of both.
fn row_by_row(expected: &ExpectedValues, came: &[CameRow]) -> (usize, Vec<Vec<String>>) {
    let head = ["", "partition"].into_iter().map(str::to_string);
    let mut table: Vec<Vec<String>> = vec![head.chain(expected.columns.iter().cloned()).collect()];
    let mut differ = 0;
    for place in 0..expected.rows.len().max(came.len()) {
        let (wanted, came) = (expected.rows.get(place), came.get(place));
        let same = match (wanted, came) {
            (Some(wanted), Some(came)) => wanted.iter().zip(&came.values).all(|(wanted, came)| {
                // A column that this row does not name.
                wanted.as_ref().is_none_or(|wanted| is_same(wanted, came))
            }),
            _ => false,
        };
        differ += usize::from(!same);
        if let (Some(wanted), false) = (wanted, same) {
            let values = wanted
                .iter()
                .map(|value| value.clone().unwrap_or_else(|| "-".to_string()));
            table.push(
                ["expected".to_string(), String::new()]
                    .into_iter()
                    .chain(values)
                    .collect(),
            );
        }
        if let Some(came) = came {
            let what = if same { "same" } else { "came" };
            let head = [what.to_string(), came.partition.clone()];
            table.push(head.into_iter().chain(came.values.iter().cloned()).collect());
        }
    }
    (differ, table)
}

fn reject_table(expected: &BTreeMap<String, u64>, came: &BTreeMap<String, u64>) -> Vec<Vec<String>> {
    let mut table = vec![["reason", "expected", "came"].map(str::to_string).to_vec()];
    let reasons: BTreeSet<&String> = expected.keys().chain(came.keys()).collect();
    for reason in reasons {
        let count = |counts: &BTreeMap<String, u64>| counts.get(reason).copied().unwrap_or_default().to_string();
        table.push(vec![reason.clone(), count(expected), count(came)]);
    }
    table
}

/// A hint on where missing rows may be.
fn with_rejects(rejects: &BTreeMap<String, u64>) -> String {
    if rejects.is_empty() {
        return String::new();
    }
    let rejects = rejects.iter().map(|(reason, rows)| format!("{reason} {rows}"));
    format!(" (rejects: {})", rejects.collect::<Vec<_>>().join(", "))
}

/// Whether two values, as JSON, are the same, floats up to [`TOLERANCE`].
fn is_same(expected: &str, came: &str) -> bool {
    if expected == came {
        return true;
    }
    match (serde_json::from_str(expected), serde_json::from_str(came)) {
        (Ok(expected), Ok(came)) => same_values(&expected, &came),
        _ => false,
    }
}

fn same_values(expected: &Value, came: &Value) -> bool {
    match (expected, came) {
        (Value::Number(expected), Value::Number(came)) if expected.is_f64() && came.is_f64() => {
            let (Some(expected), Some(came)) = (expected.as_f64(), came.as_f64()) else {
                return false;
            };
            (expected - came).abs() <= TOLERANCE * expected.abs().max(came.abs())
        }
        (Value::Array(expected), Value::Array(came)) => {
            expected.len() == came.len() && expected.iter().zip(came).all(|(a, b)| same_values(a, b))
        }
        (Value::Object(expected), Value::Object(came)) => {
            let same = |(name, value): (&String, &Value)| came.get(name).is_some_and(|came| same_values(value, came));
            expected.len() == came.len() && expected.iter().all(same)
        }
        (expected, came) => expected == came,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_compared_as_people_write_them() {
        assert!(is_same("3.3333333", "3.3333333333333335"));
        assert!(is_same("0.0", "-0.0"));
        assert!(is_same("[1,{\"x\":0.1}]", "[1,{\"x\":0.10000000000000001}]"));
        assert!(is_same("\"NaN\"", "\"NaN\""));
        for (expected, came) in [
            ("3.333", "3.3333333333333335"),
            ("1e-7", "2e-7"),
            ("9007199254740993", "9007199254740992"),
            ("null", "0"),
            ("[1]", "[1,2]"),
            ("\"1\"", "1"),
            ("{\"a\":1}", "{\"b\":1}"),
        ] {
            assert!(!is_same(expected, came), "{expected} {came}");
        }
    }

    #[test]
    fn rows_stand_under_each_other() {
        let expected = ExpectedValues {
            columns: vec!["id".into(), "n".into()],
            rows: vec![
                vec![Some("\"a\"".into()), None],
                vec![Some("\"b\"".into()), Some("1".into())],
            ],
        };
        let row = |values: [&str; 2]| CameRow {
            partition: "p".into(),
            values: values.map(str::to_string).to_vec(),
        };
        let (differ, table) = row_by_row(
            &expected,
            &[row(["\"a\"", "7"]), row(["\"b\"", "2"]), row(["\"c\"", "3"])],
        );
        assert_eq!(differ, 2);
        let lines: Vec<String> = table.iter().map(|row| row.join("|")).collect();
        assert_eq!(
            lines,
            [
                "|partition|id|n",
                "same|p|\"a\"|7",
                "expected||\"b\"|1",
                "came|p|\"b\"|2",
                "came|p|\"c\"|3"
            ]
        );
    }
}
