//! Files of a dataset: which there are, and fetching of some.

use std::path::PathBuf;

use crate::cache::Cache;
use crate::client::{HttpClient, TreeFile, address_of};
use crate::download::download_file;
use crate::error::HubError;
use crate::hub::{Hub, Progress};
use crate::reference::HubReference;

/// The files of a dataset at a commit.
#[derive(Clone, Debug)]
pub struct DatasetFiles {
    reference: HubReference,
    /// 40 hexadecimal digits.
    pub commit: String,
    /// Paths within the repository, sorted. None leads outside.
    pub files: Vec<String>,
}

impl Hub {
    /// The files of a dataset. Nothing is downloaded. Where the hub cannot be asked, or need not be because the revision is a commit,
    /// they are those that were listed before. None: `progress` cancelled it.
    ///
    /// # Errors
    /// Where the hub does not list them and has not before, or the cache cannot be written.
    pub fn dataset(&self, reference: &HubReference, progress: Progress<'_>) -> Result<Option<DatasetFiles>, HubError> {
        let cache = Cache::new(&self.cache, reference);
        let listed = |commit: String, files: Vec<String>| DatasetFiles {
            reference: reference.clone(),
            commit,
            files,
        };
        let kept = || {
            let commit = cache.commit()?;
            let files = cache.listing(&commit)?;
            Some(listed(commit, files))
        };
        if self.offline || reference.is_commit() {
            match kept() {
                Some(kept) => return Ok(Some(kept)),
                None if self.offline => return Err(self.offline_error(&reference.to_string())),
                None => {}
            }
        }
        if !progress(&format!("asking {} for the files of {reference}", self.endpoint)) {
            return Ok(None);
        }
        let remote = match HttpClient::new(self).list(reference) {
            Ok(remote) => remote,
            Err(error) if error.transient => {
                return match kept() {
                    Some(kept) => {
                        progress(&format!("{}; the files in the cache are used", error.message));
                        Ok(Some(kept))
                    }
                    None => Err(error.into()),
                };
            }
            Err(error) => return Err(error.into()),
        };
        cache.write_listing(&remote.commit, &remote.files)?;
        cache.write_ref(&remote.commit)?;
        Ok(Some(listed(remote.commit, remote.files)))
    }

    /// The paths of some files of a dataset, in their order. Those that are not in the cache are downloaded. None: `progress`
    /// cancelled it.
    ///
    /// # Errors
    /// Where the hub does not deliver a file, or the cache cannot be written.
    pub fn fetch_files(
        &self,
        dataset: &DatasetFiles,
        files: &[&str],
        progress: Progress<'_>,
    ) -> Result<Option<Vec<PathBuf>>, HubError> {
        let cache = Cache::new(&self.cache, &dataset.reference);
        let client = HttpClient::new(self);
        let commit = &dataset.commit;
        let mut paths = Vec::with_capacity(files.len());
        for (number, file) in files.iter().enumerate() {
            if cache.file(commit, file).is_none() {
                if self.offline {
                    return Err(self.offline_error(&format!("{file} of {}", dataset.reference)));
                }
                let mut numbered = |line: &str| progress(&format!("file {} of {}: {line}", number + 1, files.len()));
                if !download_file(self, &client, &dataset.reference, &cache, commit, file, &mut numbered)? {
                    return Ok(None);
                }
            }
            paths.push(cache.snapshot(commit).join(file));
        }
        Ok(Some(paths))
    }

    /// The address of the folder of a dataset at its commit, below which its files have addresses, and all of them with sizes and ETags.
    /// Nothing is downloaded. None: `progress` cancelled it.
    ///
    /// # Errors
    /// Where the hub does not list them, or must not be asked (`HF_HUB_OFFLINE`).
    pub fn tree(
        &self,
        dataset: &DatasetFiles,
        progress: Progress<'_>,
    ) -> Result<Option<(String, Vec<TreeFile>)>, HubError> {
        let (reference, commit) = (&dataset.reference, &dataset.commit);
        if self.offline {
            return Err(self.offline_in_parts(reference));
        }
        if !progress(&format!(
            "asking {} for the sizes of the files of {reference}",
            self.endpoint
        )) {
            return Ok(None);
        }
        let files = HttpClient::new(self).tree(reference, commit)?;
        let folder = address_of(&self.endpoint, reference, commit, "");
        Ok(Some((folder.trim_end_matches('/').to_owned(), files)))
    }

    fn offline_in_parts(&self, reference: &HubReference) -> HubError {
        HubError::unavailable(
            format!("{reference} cannot be read in parts: HF_HUB_OFFLINE is set"),
            "unset it, or leave `fetch: ranges` out where the files are in the cache",
        )
    }

    /// The addresses of some files of a dataset at its commit, which never change. Whether the hub gives them is asked of the first one
    /// alone. Nothing is downloaded.
    ///
    /// # Errors
    /// Where the hub does not give the first file, or must not be asked (`HF_HUB_OFFLINE`).
    pub fn addresses(&self, dataset: &DatasetFiles, files: &[&str]) -> Result<Vec<String>, HubError> {
        let (reference, commit) = (&dataset.reference, &dataset.commit);
        if self.offline {
            return Err(self.offline_in_parts(reference));
        }
        if let Some(first) = files.first() {
            HttpClient::new(self).describe(reference, commit, first)?;
        }
        let address = |file: &&str| address_of(&self.endpoint, reference, commit, file);
        Ok(files.iter().map(address).collect())
    }
}
