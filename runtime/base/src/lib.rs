//! What all parts of the runtime have in common: partitions, digests, rejects, events and errors; and small helpers that depend on
//! nothing else of it.

pub mod available_memory;
pub mod digest;
pub mod error;
pub mod escape;
pub mod event;
pub mod failpoints;
pub mod full_disk;
pub mod glob;
pub mod host;
pub mod panic_guard;
pub mod partition;
pub mod random_bytes;
pub mod read_once;
pub mod regular_file;
pub mod reject;
pub mod row_json;
pub mod row_number;
pub mod secret;
pub mod shared;
pub mod suggest;
pub mod switched_off;
pub mod unlinked_file;
pub mod url_use;
pub mod yaml;
