//! The message about a disk or quota that is full.

use std::io;
use std::path::Path;

/// The help for an error of writing `path` where it is ENOSPC (full disk) or EDQUOT (quota exceeded); names the folder.
/// None for other errors.
pub fn full_disk(path: &Path, error: &io::Error) -> Option<String> {
    let what = match error.kind() {
        // The number ENOSPC, and EDQUOT.
        io::ErrorKind::StorageFull => "the disk is full",
        io::ErrorKind::QuotaExceeded => "the quota of this user is used up",
        _ => return None,
    };
    // The file may not exist, nor its folder.
    let folder = path.ancestors().skip(1).find(|folder| folder.is_dir());
    let folder = folder.unwrap_or(Path::new("."));
    Some(format!(
        "{what} that holds {}: free some space there, or name a folder on another disk, and run again; \
         what was committed stays",
        folder.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_named_by_the_number_of_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b/file");
        let said = |number| full_disk(&path, &io::Error::from_raw_os_error(number));
        let named = format!(" {}: free some space", folder.path().display());
        for (number, what) in [
            (libc::ENOSPC, "disk is full"),
            (libc::EDQUOT, "quota of this user is used up"),
        ] {
            let said = said(number).unwrap();
            assert!(said.contains(what) && said.contains(&named), "{said}");
        }
        assert_eq!(said(libc::EACCES), None);
        // The text of an error does not matter.
        let words = io::Error::other("No space left on device (os error 28)");
        assert_eq!(full_disk(&path, &words), None);
        let here = full_disk(Path::new("file"), &io::Error::from_raw_os_error(libc::ENOSPC)).unwrap();
        assert!(here.contains("that holds .:"), "{here}");
    }
}
