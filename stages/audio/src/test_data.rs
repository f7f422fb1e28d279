//! Where the tests find corpora and golden figures.

use std::path::PathBuf;

use crate::{decode, tar};

fn folder(variable: &str, bundled: &str) -> PathBuf {
    match std::env::var_os(variable) {
        Some(folder) => folder.into(),
        None => PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data")).join(bundled),
    }
}

/// `<corpora>/micro` or `<corpora>/mini`.
pub fn corpus(name: &str) -> PathBuf {
    folder("FLOW_TEST_CORPUS", "corpus").join(name)
}

/// Golden figures of a corpus.
pub fn golden(name: &str) -> PathBuf {
    folder("FLOW_TEST_GOLDEN", "golden/data").join(name)
}

/// The bytes of one member of a shard of the micro corpus.
pub fn member(lang: &str, shard: &str, name: &str) -> Vec<u8> {
    let path = corpus("micro").join(format!("shards/{lang}/{shard}/{shard}.tar"));
    let mut file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let length = file.metadata().unwrap().len();
    let listing = tar::list(&mut file, length).unwrap();
    let found = listing
        .last_of_each_name()
        .into_iter()
        .find(|member| member.name == name)
        .cloned();
    let found = found.unwrap_or_else(|| panic!("no member {name} in {}", path.display()));
    decode::read_range(&path, found.offset, found.size).unwrap()
}
