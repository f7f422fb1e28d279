//! Reads the files of a recipe, with or without the lock.

use std::path::Path;

use super::StoreError;
use super::atomic::{self, Files};
use super::layout::records_folder;
use super::record::{Group, GroupName, Index, RECORD_VERSION};
use super::recovery::Listing;
use super::versioned_json::{Versioned, from_json};
use flow_base::digest::Digest;

/// What is in the folder of a recipe.
pub(super) struct RecipeFiles {
    pub top: Listing,
    pub data: Listing,
    pub records: Listing,
    pub index: Option<Index>,
    pub groups: Vec<(GroupName, Group)>,
}

/// Reads a recipe's folder. A folder that does not exist counts as empty.
///
/// The order matters while a writer runs: groups are read before the index, and the index before the data is listed. A
/// group that was removed before it is read is then in the index, and data files exist before the record that names
/// them.
pub(super) fn read_recipe_files(files: &Files, folder: &Path, recipe: &Digest) -> Result<RecipeFiles, StoreError> {
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
    let data = files.backend().list(folder)?;
    Ok(RecipeFiles {
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
