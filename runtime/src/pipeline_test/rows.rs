//! Lists of rows of a test: as batches of a port, and as expectations.

use arrow::array::{ArrayRef, RecordBatch, UInt32Array};
use arrow::datatypes::{DataType, SchemaRef};
use std::sync::Arc;

use super::cell::{Unfit, cell, joined, known_columns};
use flow_base::row_json::value_text;
use flow_base::row_number::ROW;
use flow_spec::yaml::{Mapping, Part, Steps};
use flow_spec::{Diagnostic, TestCase};

/// The place of rows in the file, and a list for their errors.
pub(super) struct Mistakes<'a> {
    pub test: &'a TestCase,
    /// Of the list of rows, from the test's name.
    pub steps: Steps,
    pub found: &'a mut Vec<Diagnostic>,
}

impl Mistakes<'_> {
    fn add(&mut self, row: usize, column: Option<&str>, unfit: Unfit) {
        let mut steps = self.steps.index(row);
        if let Some(column) = column {
            steps = steps.key(column);
        }
        let message = match column {
            Some(column) => format!("column `{column}`: {}", unfit.message),
            None => unfit.message,
        };
        self.found.push(Diagnostic {
            message,
            place: Some(self.test.place(&steps.join(&unfit.steps), unfit.part)),
            help: unfit.help,
        });
    }
}

/// Rows with the schema of their port; none where they have errors, which were reported. `_row` counts on from the row
/// before, from 0 at first, where it is left out.
pub(super) fn batch(schema: &SchemaRef, rows: &[Mapping], mistakes: &mut Mistakes<'_>) -> Option<RecordBatch> {
    let before = mistakes.found.len();
    let mut columns: Vec<Vec<ArrayRef>> = vec![Vec::with_capacity(rows.len()); schema.fields().len()];
    let mut next: u32 = 0;
    for (index, row) in rows.iter().enumerate() {
        let names = schema.fields().iter().map(|field| field.name().as_str());
        if let Err(unfit) = known_columns(row, names) {
            mistakes.add(index, None, unfit);
            continue;
        }
        for (field, column) in schema.fields().iter().zip(&mut columns) {
            let name = field.name().as_str();
            let value = row.get(name);
            let made = if name == ROW && *field.data_type() == DataType::UInt32 {
                number(value.is_none(), &mut next, || {
                    cell(field.data_type(), false, value).map(|cell| cell_number(&cell))
                })
            } else {
                cell(field.data_type(), field.is_nullable(), value)
            };
            match made {
                Ok(cell) => column.push(cell),
                Err(unfit) => mistakes.add(index, Some(name), unfit),
            }
        }
    }
    if mistakes.found.len() > before {
        return None;
    }
    let columns = schema.fields().iter().zip(&columns);
    let columns: Result<Vec<ArrayRef>, _> = columns.map(|(field, cells)| joined(field.data_type(), cells)).collect();
    let batch = columns.and_then(|columns| RecordBatch::try_new(Arc::clone(schema), columns));
    batch
        .inspect_err(|error| {
            let place = mistakes.test.place(&mistakes.steps, Part::Key);
            mistakes.found.push(Diagnostic::new(error.to_string()).at(place));
        })
        .ok()
}

fn cell_number(cell: &ArrayRef) -> u32 {
    let numbers = cell.as_any().downcast_ref::<UInt32Array>();
    numbers.map_or(0, |numbers| numbers.value(0))
}

/// The number of a row: the next one, or the one that is given, if it is not below that.
fn number(left_out: bool, next: &mut u32, given: impl FnOnce() -> Result<u32, Unfit>) -> Result<ArrayRef, Unfit> {
    let number = if left_out { *next } else { given()? };
    let unfit = |message: &str| Unfit {
        steps: Steps::default(),
        part: Part::Value,
        message: message.to_string(),
        help: None,
    };
    if number < *next {
        return Err(unfit("each row has a higher number than the one before"));
    }
    *next = number.checked_add(1).ok_or_else(|| unfit("the number is too high"))?;
    Ok(Arc::new(UInt32Array::from(vec![number])))
}

/// Rows that are expected: the columns that one of them names, in the order of the schema, and for each row the values of
/// those that it names, as JSON.
pub(super) struct ExpectedValues {
    pub columns: Vec<String>,
    pub rows: Vec<Vec<Option<String>>>,
}

/// Reads expected rows; errors are reported.
pub(super) fn expected(schema: &SchemaRef, rows: &[Mapping], mistakes: &mut Mistakes<'_>) -> ExpectedValues {
    let names = || schema.fields().iter().map(|field| field.name().as_str());
    let named: Vec<_> = schema
        .fields()
        .iter()
        .filter(|field| rows.iter().any(|row| row.contains_key(field.name().as_str())))
        .collect();
    let mut values = Vec::with_capacity(rows.len());
    for (index, row) in rows.iter().enumerate() {
        if let Err(unfit) = known_columns(row, names()) {
            mistakes.add(index, None, unfit);
            continue;
        }
        let mut of_row = Vec::with_capacity(named.len());
        for field in &named {
            let name = field.name().as_str();
            let value = row.get(name).map(|value| {
                let cell = cell(field.data_type(), true, Some(value))?;
                value_text(cell.as_ref(), 0).map_err(|error| Unfit {
                    steps: Steps::default(),
                    part: Part::Value,
                    message: error.to_string(),
                    help: None,
                })
            });
            match value.transpose() {
                Ok(value) => of_row.push(value),
                Err(unfit) => mistakes.add(index, Some(name), unfit),
            }
        }
        values.push(of_row);
    }
    ExpectedValues {
        columns: named.iter().map(|field| field.name().clone()).collect(),
        rows: values,
    }
}
