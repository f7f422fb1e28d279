//! Manifests: shards are scanned, their rows cleaned and corrected with SQL, deduplicated, split and
//! written.
//!
//! The modules [`language`], [`shard`], [`duplicates`] and [`validation`] are plain
//! functions; [`scan`], [`table`], [`sql`], [`correct`], [`dedup`], [`split`],
//! [`disjoint`] and [`mod@write`] are the stage kinds over them.

pub mod columns;
pub mod correct;
mod dataset_recordings;
mod dataset_refused;
mod dataset_rows;
#[cfg(test)]
mod dataset_test_data;
#[cfg(test)]
mod decision_tests;
pub mod dedup;
pub mod disjoint;
pub mod duplicates;
mod extracted;
pub mod identify;
pub mod keys;
pub mod language;
mod lhotse_items;
mod own_thread;
#[cfg(test)]
#[path = "parity_tests.rs"]
mod parity;
mod parquet_file;
mod pieces;
mod place_columns;
mod recipe;
pub mod scan;
pub mod session;
pub mod shard;
pub mod split;
pub mod sql;
pub mod statistics;
pub mod table;
pub mod validation;
pub mod write;
mod write_hugging_face;
mod write_lhotse;
pub mod write_lines;
mod write_parts;
pub mod write_rejects;
mod write_settings;
mod write_shar;

pub use flow_corpus::ManifestError;
