//! What the commands of `flow` share: errors and exit codes, arguments that several of them take, files that are named, and models that are fetched first.

pub mod arguments;
pub mod failure;
pub mod fetch;
pub mod files;
