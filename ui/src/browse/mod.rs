//! Browsing rows of artifacts, rejects, and manifest files: filtered, sorted, a page at a time. Columns that no filter,
//! order or page names are not read, nor row groups of Parquet files whose statistics exclude every row. Memory is
//! bounded: the rows of a page, and a limit for the sort.
//!
//! This module and [`flow_manifest::session`] are the ones that name DataFusion. Filters are built as expressions, never as SQL text.

mod condition;
mod lines;
mod parquet_part;
mod query;
mod row_set;
mod scan;
#[cfg(test)]
mod tests;

pub use condition::Test;
pub use query::{Filter, Group, PlacedRow, RowQuery, Total, texts};
pub use row_set::RowSet;
