//! The layout of the state directory: its version, and where the files of a recipe are.

use std::path::{Path, PathBuf};

/// The version that this program writes, and the newest that it reads; the file `FORMAT` holds it.
pub(super) const FORMAT: u64 = 1;

pub(super) fn data_folder(recipe_folder: &Path) -> PathBuf {
    recipe_folder.join("data")
}

pub(super) fn records_folder(recipe_folder: &Path) -> PathBuf {
    recipe_folder.join("records")
}
