//! Parquet files from outside, which may be damaged.
//!
//! A crate of its own since the `parquet` crate panics, loops for minutes or allocates without bound on headers whose numbers it
//! does not check. These numbers are checked here first ([`ForeignParquet`]).

mod column_chunks;
mod counted_rows;
mod foreign_parquet;
mod thrift;

pub use column_chunks::ColumnChunks;
pub use counted_rows::{CountedRows, rows_of_file, without_panic};
pub use foreign_parquet::{ForeignParquet, FromPlace, checked_metadata};
