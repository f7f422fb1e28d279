//! What the commands of `flow` share: errors and exit codes, arguments that several of them take, and models that are fetched first.

pub mod arguments;
pub mod failure;
pub mod fetch;
