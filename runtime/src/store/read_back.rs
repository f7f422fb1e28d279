//! Reading the files of a recipe, by whoever holds the lock or none.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::StoreError;
use super::atomic;
use super::decide::Listing;
use super::record::{Group, GroupName, Index, RECORD_VERSION};
use super::writer::{data_folder, records_folder};
use crate::digest::Digest;

/// What lies in the folder of a recipe.
pub(super) struct Found {
    pub top: Listing,
    pub data: Listing,
    pub records: Listing,
    pub index: Option<Index>,
    pub groups: Vec<(GroupName, Group)>,
}

/// Reads a recipe's folder. A folder that is not there is one in which nothing lies.
///
/// The order matters to readers beside a running writer: groups are read before the index, and the index
/// before the data is listed. A group that is gone by the time it is read stands in the index then, and data
/// that a record names was there before the record.
pub(super) fn recipe_folder(folder: &Path, recipe: &Digest) -> Result<Found, StoreError> {
    let top = atomic::list(folder)?;
    let records = atomic::list(&records_folder(folder))?;
    let mut groups = Vec::new();
    for name in records.keys().filter_map(|name| GroupName::parse(name)) {
        let path = records_folder(folder).join(name.file());
        let Some(bytes) = atomic::read(&path)? else { continue };
        let group: Group = from_json(&path, &bytes, u64::from(RECORD_VERSION))?;
        same_recipe(&path, &group.recipe, recipe)?;
        groups.push((name, group));
    }
    let path = folder.join("index.json");
    let index: Option<Index> = match atomic::read(&path)? {
        Some(bytes) => Some(from_json(&path, &bytes, u64::from(RECORD_VERSION))?),
        None => None,
    };
    if let Some(index) = &index {
        same_recipe(&path, &index.recipe, recipe)?;
    }
    let data = atomic::list(&data_folder(folder))?;
    Ok(Found {
        top,
        data,
        records,
        index,
        groups,
    })
}

fn same_recipe(path: &Path, found: &Digest, expected: &Digest) -> Result<(), StoreError> {
    if found == expected {
        return Ok(());
    }
    Err(StoreError::OtherRecipe {
        path: path.to_path_buf(),
        found: found.to_hex(),
        expected: expected.to_hex(),
    })
}

/// A JSON file that says of which version it is.
pub(super) trait Versioned: DeserializeOwned {
    fn version(&self) -> u64;
}

impl Versioned for Index {
    fn version(&self) -> u64 {
        self.version.into()
    }
}

impl Versioned for Group {
    fn version(&self) -> u64 {
        self.version.into()
    }
}

/// The version alone, of a file whose other fields a newer flow may have changed.
#[derive(Deserialize)]
struct Head {
    version: u64,
}

/// Parses a JSON file; a version later than `known` is refused as such.
pub(super) fn from_json<T: Versioned>(path: &Path, bytes: &[u8], known: u64) -> Result<T, StoreError> {
    let parsed: Result<T, _> = serde_json::from_slice(bytes);
    let version = match &parsed {
        Ok(value) => value.version(),
        Err(_) => serde_json::from_slice::<Head>(bytes).map_or(0, |head| head.version),
    };
    if version > known {
        return Err(StoreError::Newer {
            path: path.to_path_buf(),
            found: version,
            known,
        });
    }
    parsed.map_err(|e| StoreError::Damaged {
        path: path.to_path_buf(),
        detail: e.to_string(),
    })
}

pub(super) fn to_json(path: &Path, value: &impl Serialize) -> Result<Vec<u8>, StoreError> {
    let mut bytes = serde_json::to_vec(value).map_err(|e| StoreError::Damaged {
        path: path.to_path_buf(),
        detail: e.to_string(),
    })?;
    bytes.push(b'\n');
    Ok(bytes)
}
