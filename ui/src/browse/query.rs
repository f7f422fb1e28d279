//! Queries of a [`RowSet`]: a page of its rows, the number of rows that pass, and sums by the values of a column.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Float64Type, Int64Type, UInt32Type, UInt64Type};
use arrow::util::display::{ArrayFormatter, FormatOptions};
use datafusion::catalog::streaming::StreamingTable;
use datafusion::dataframe::DataFrame;
use datafusion::error::DataFusionError;
use datafusion::execution::disk_manager::{DiskManagerBuilder, DiskManagerMode};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::functions::expr_fn::{contains, floor, lower};
use datafusion::functions_aggregate::expr_fn::{count, sum};
use datafusion::logical_expr::{Expr, cast, ident, lit};
use datafusion::prelude::{SessionConfig, SessionContext};
use flow_manifest::ManifestError;

use super::condition::{Bound, Test};
use super::row_set::{RowSet, too_slow};
use super::scan::{PART, PLACE, Scan};

/// Memory for sorting and aggregation; a query that needs more is an error.
const MEMORY: usize = 256 << 20;

/// A condition on the values of a column.
#[derive(Clone, Debug, PartialEq)]
pub struct Filter {
    pub column: String,
    pub test: Test,
}

/// Which of the rows that pass all filters, and which columns.
#[derive(Clone, Debug)]
pub struct RowQuery {
    pub filters: Vec<Filter>,
    /// Sort column, and whether the order is descending; none: the stored order.
    pub sort: Option<(String, bool)>,
    pub columns: Vec<String>,
    pub offset: usize,
    pub limit: usize,
    pub time_limit: Duration,
}

/// A row, and its position.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedRow {
    pub part: usize,
    pub row: u64,
    /// The values of the columns that were asked for, as text; None for null.
    pub values: Vec<Option<String>>,
}

/// How rows are grouped.
#[derive(Clone, Debug)]
pub enum Group {
    Value(String),
    /// Numbers, in buckets of `width`.
    Bucket {
        column: String,
        width: f64,
    },
}

impl Group {
    /// The column by which rows are grouped.
    pub fn column(&self) -> &str {
        match self {
            Group::Value(column) | Group::Bucket { column, .. } => column,
        }
    }
}

/// The rows of a group.
#[derive(Clone, Debug, PartialEq)]
pub struct Total {
    /// The common value, as text; None for null.
    pub value: Option<String>,
    pub rows: u64,
    /// The sums of the columns that were asked for.
    pub sums: Vec<f64>,
}

impl RowSet {
    /// The rows of a page.
    ///
    /// # Errors
    /// If a column is not there or does not fit its filter, if a part cannot be read, or the time is over.
    pub fn page(&self, query: &RowQuery) -> Result<Vec<PlacedRow>, ManifestError> {
        let mut needed: Vec<&str> = query.columns.iter().map(String::as_str).collect();
        needed.extend(query.sort.iter().map(|(column, _)| column.as_str()));
        let batches = self.ask(&needed, &query.filters, query.time_limit, |frame| {
            let frame = match &query.sort {
                Some((column, descending)) => {
                    let by = [(column.as_str(), !descending), (PART, true), (PLACE, true)];
                    frame.sort(by.map(|(name, ascending)| ident(name).sort(ascending, false)).to_vec())?
                }
                None => frame,
            };
            let wanted = query.columns.iter().map(String::as_str).chain([PART, PLACE]);
            let frame = frame.limit(query.offset, Some(query.limit))?;
            frame.select(wanted.map(ident).collect::<Vec<_>>())
        })?;
        let mut rows = Vec::new();
        for batch in &batches {
            let place = query.columns.len();
            let parts = batch.column(place).as_primitive::<UInt32Type>();
            let places = batch.column(place + 1).as_primitive::<UInt64Type>();
            let texts = texts(&batch.columns()[..place], batch.num_rows())?;
            for (row, values) in texts.into_iter().enumerate() {
                rows.push(PlacedRow {
                    part: parts.value(row) as usize,
                    row: places.value(row),
                    values,
                });
            }
        }
        Ok(rows)
    }

    /// The number of rows that pass all filters. Without filters no row is read where the number is known.
    ///
    /// # Errors
    /// As [`RowSet::page`].
    pub fn count(&self, filters: &[Filter], time_limit: Duration) -> Result<u64, ManifestError> {
        if let (true, Some(rows)) = (filters.is_empty(), self.rows()) {
            return Ok(rows);
        }
        let batches = self.ask(&[], filters, time_limit, |frame| {
            frame.aggregate(Vec::new(), vec![count(ident(PLACE)).alias("rows")])
        })?;
        let counts = batches.iter().filter(|batch| batch.num_rows() > 0);
        Ok(counts.map(|batch| whole(batch.column(0), 0)).sum())
    }

    /// Sums of the columns `sums` over the rows of each group: the `limit` groups with the most rows, or of buckets the first
    /// ones, in their order.
    ///
    /// # Errors
    /// As [`RowSet::page`]; also where a column that is to be added up holds no numbers.
    pub fn totals(
        &self,
        group: &Group,
        sums: &[&str],
        filters: &[Filter],
        limit: usize,
        time_limit: Duration,
    ) -> Result<Vec<Total>, ManifestError> {
        let needed: Vec<&str> = sums.iter().copied().chain([group.column()]).collect();
        let batches = self.ask(&needed, filters, time_limit, |frame| {
            let by = match group {
                Group::Value(column) => cast(ident(column), DataType::Utf8),
                Group::Bucket { column, width } => {
                    floor(cast(ident(column), DataType::Float64) / lit(*width)) * lit(*width)
                }
            };
            let totals = sums
                .iter()
                .enumerate()
                .map(|(number, column)| sum(cast(ident(*column), DataType::Float64)).alias(format!("sum{number}")));
            let all = [count(ident(PLACE)).alias("rows")].into_iter().chain(totals);
            let frame = frame.aggregate(vec![by.alias("value")], all.collect())?;
            let order = match group {
                Group::Value(_) => vec![ident("rows").sort(false, false), ident("value").sort(true, false)],
                Group::Bucket { .. } => vec![ident("value").sort(true, false)],
            };
            frame.sort(order)?.limit(0, Some(limit))
        })?;
        let mut totals = Vec::new();
        for batch in &batches {
            for (row, value) in texts(&batch.columns()[..1], batch.num_rows())?.into_iter().enumerate() {
                let sum = |column: &ArrayRef| match column.as_primitive_opt::<Float64Type>() {
                    Some(column) if column.is_valid(row) => column.value(row),
                    _ => 0.0,
                };
                totals.push(Total {
                    value: value.into_iter().next().flatten(),
                    rows: whole(batch.column(1), row),
                    sums: batch.columns()[2..].iter().map(sum).collect(),
                });
            }
        }
        Ok(totals)
    }

    /// Runs a query over the rows that pass the filters, with the columns `needed`.
    fn ask(
        &self,
        needed: &[&str],
        filters: &[Filter],
        time_limit: Duration,
        question: impl FnOnce(DataFrame) -> Result<DataFrame, DataFusionError>,
    ) -> Result<Vec<RecordBatch>, ManifestError> {
        let deadline = Instant::now() + time_limit;
        let filtered = filters.iter().map(|filter| filter.column.as_str());
        let mut columns = Vec::new();
        for name in needed.iter().copied().chain(filtered) {
            let column = self.schema().index_of(name);
            columns.push(column.map_err(|_| ManifestError::sql(format!("there is no column `{name}`")))?);
        }
        columns.sort_unstable();
        columns.dedup();
        let conditions: Result<Vec<Expr>, ManifestError> =
            filters.iter().map(|filter| self.condition(filter)).collect();
        let conditions = conditions?;
        let bounds = filters.iter().map(|filter| Bound {
            column: filter.column.clone(),
            test: filter.test.clone(),
        });
        let scan = Scan::new(self, columns, bounds.collect(), deadline)?;
        let config = SessionConfig::new().with_target_partitions(1).with_batch_size(2048);
        let environment = RuntimeEnvBuilder::new()
            .with_disk_manager_builder(DiskManagerBuilder::default().with_mode(DiskManagerMode::Disabled))
            .with_memory_limit(MEMORY, 1.0)
            .build_arc()
            .map_err(|error| in_words(&error))?;
        let context = SessionContext::new_with_config_rt(config, environment);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .map_err(ManifestError::sql)?;
        let answer = async {
            let schema = Arc::clone(datafusion::physical_plan::streaming::PartitionStream::schema(&scan));
            let table = StreamingTable::try_new(schema, vec![Arc::new(scan)])?;
            let mut frame = context.read_table(Arc::new(table))?;
            for condition in conditions {
                frame = frame.filter(condition)?;
            }
            question(frame)?.collect().await
        };
        let answer = runtime.block_on(async { tokio::time::timeout(time_limit, answer).await });
        answer.map_err(|_| too_slow())?.map_err(|error| in_words(&error))
    }

    fn condition(&self, filter: &Filter) -> Result<Expr, ManifestError> {
        let field = self.schema().field_with_name(&filter.column);
        let field = field.map_err(|_| ManifestError::sql(format!("there is no column `{}`", filter.column)))?;
        let column = || ident(field.name());
        let is_nested =
            field.data_type().is_nested() || matches!(field.data_type(), DataType::Binary | DataType::LargeBinary);
        let text = || cast(column(), DataType::Utf8);
        let number = || cast(column(), DataType::Float64);
        match &filter.test {
            Test::IsNull => Ok(column().is_null()),
            _ if is_nested => Err(ManifestError::sql(format!(
                "the column `{}` holds neither text nor numbers",
                filter.column
            ))),
            Test::Equals(value) => Ok(text().eq(lit(value.as_str()))),
            Test::OneOf(values) => Ok(text().in_list(values.iter().map(|value| lit(value.as_str())).collect(), false)),
            Test::Contains(value) => Ok(contains(lower(text()), lit(value.to_lowercase()))),
            Test::AtLeast(_) | Test::AtMost(_) if !field.data_type().is_numeric() => Err(ManifestError::sql(format!(
                "the column `{}` holds no numbers",
                filter.column
            ))),
            // NaN is sorted after all numbers; it does not match a condition.
            Test::AtLeast(least) => Ok(number().gt_eq(lit(*least)).and(number().lt_eq(lit(f64::INFINITY)))),
            Test::AtMost(most) => Ok(number().lt_eq(lit(*most))),
        }
    }
}

/// The message of an error, without DataFusion's wrappers.
fn in_words(error: &DataFusionError) -> ManifestError {
    match error.find_root() {
        DataFusionError::External(inner) => ManifestError::rows(inner.to_string(), None),
        DataFusionError::ResourcesExhausted(_) => ManifestError::rows(
            "the answer needs more memory than a question may have: narrow the filters",
            None,
        ),
        other => ManifestError::sql(other),
    }
}

/// A count at `row`.
fn whole(column: &ArrayRef, row: usize) -> u64 {
    let count = column
        .as_primitive_opt::<Int64Type>()
        .map_or(0, |column| column.value(row));
    u64::try_from(count).unwrap_or(0)
}

/// The values of rows as text, row by row; None for null. Binary values are shown by their length.
///
/// # Errors
/// If a value has no form as text.
pub fn texts(columns: &[ArrayRef], rows: usize) -> Result<Vec<Vec<Option<String>>>, ManifestError> {
    let options = FormatOptions::default().with_null("");
    let mut texts = vec![Vec::with_capacity(columns.len()); rows];
    for column in columns {
        let bytes = column.as_binary_opt::<i32>();
        let formatter = ArrayFormatter::try_new(column.as_ref(), &options)?;
        for (row, values) in texts.iter_mut().enumerate() {
            values.push(match bytes {
                _ if column.is_null(row) => None,
                Some(bytes) => Some(format!("{} bytes", bytes.value(row).len())),
                None => Some(formatter.value(row).try_to_string()?),
            });
        }
    }
    Ok(texts)
}
