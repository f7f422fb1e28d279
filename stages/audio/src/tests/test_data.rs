//! Where the tests find corpora and golden figures.

#![allow(dead_code, reason = "two crates use some of them each")]

use std::path::{Path, PathBuf};

use flow_storage::Storage;

use crate::{decode, tar};

fn bundled(folder: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data")).join(folder)
}

/// The bundled corpus `micro` or `mini`.
pub fn corpus(name: &str) -> PathBuf {
    bundled("corpus").join(name)
}

/// For parity: that corpus, or one of its name in the folder that `FLOW_TEST_CORPUS` names.
pub fn parity_corpus(name: &str) -> PathBuf {
    std::env::var_os("FLOW_TEST_CORPUS")
        .map_or_else(|| bundled("corpus"), PathBuf::from)
        .join(name)
}

/// The reference's figures of a [`parity_corpus`].
pub fn parity_golden(name: &str) -> PathBuf {
    std::env::var_os("FLOW_TEST_GOLDEN")
        .map_or_else(|| bundled("golden/data"), PathBuf::from)
        .join(name)
}

/// The good recordings of a shard.
pub fn good_members(corpus_name: &str, lang: &str, shard: &str) -> Vec<Vec<u8>> {
    let path = corpus(corpus_name).join(format!("shards/{lang}/{shard}/{shard}.tar"));
    let mut file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let length = file.metadata().unwrap().len();
    let listing = tar::list(&mut file, length).unwrap();
    let members = listing.last_of_each_name().into_iter();
    let bytes =
        members.filter_map(|member| decode::read_range(&Storage::default(), &path, member.offset, member.size).ok());
    bytes.filter(|bytes| crate::flac::probe(bytes).is_ok()).collect()
}

/// The bytes of one member of a shard of the bundled micro corpus.
pub fn member(lang: &str, shard: &str, name: &str) -> Vec<u8> {
    member_of(&corpus("micro"), lang, shard, name)
}

/// The bytes of one member of a shard.
pub fn member_of(corpus: &Path, lang: &str, shard: &str, name: &str) -> Vec<u8> {
    let path = corpus.join(format!("shards/{lang}/{shard}/{shard}.tar"));
    let mut file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let length = file.metadata().unwrap().len();
    let listing = tar::list(&mut file, length).unwrap();
    let found = listing
        .last_of_each_name()
        .into_iter()
        .find(|member| member.name == name)
        .cloned();
    let found = found.unwrap_or_else(|| panic!("no member {name} in {}", path.display()));
    decode::read_range(&Storage::default(), &path, found.offset, found.size).unwrap()
}

/// A recording of tests/data, which make.py there makes.
pub fn tone(name: &str) -> Vec<u8> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../audio/tests/data")).join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A WAV of 16-bit PCM.
pub fn wav(rate: u32, channels: u16, samples: &[i16]) -> Vec<u8> {
    let data: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
    raw_wav(rate, channels, 1, 16, &data)
}

/// A WAV with any format tag.
pub fn raw_wav(rate: u32, channels: u16, format: u16, bits: u16, data: &[u8]) -> Vec<u8> {
    let block = channels * bits.div_ceil(8);
    let mut bytes = Vec::new();
    bytes.extend(b"RIFF");
    bytes.extend((36 + data.len() as u32).to_le_bytes());
    bytes.extend(b"WAVEfmt ");
    bytes.extend(16u32.to_le_bytes());
    bytes.extend(format.to_le_bytes());
    bytes.extend(channels.to_le_bytes());
    bytes.extend(rate.to_le_bytes());
    bytes.extend((rate * u32::from(block)).to_le_bytes());
    bytes.extend(block.to_le_bytes());
    bytes.extend(bits.to_le_bytes());
    bytes.extend(b"data");
    bytes.extend((data.len() as u32).to_le_bytes());
    bytes.extend(data);
    bytes
}

/// A tar of these members.
pub fn tar_of(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = ::tar::Builder::new(Vec::new());
    for (name, data) in members {
        let mut header = ::tar::Header::new_ustar();
        header.set_size(data.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, *data).unwrap();
    }
    builder.into_inner().unwrap()
}
