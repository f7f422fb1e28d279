//! The hub's address and cache, and fetching of models.

use std::path::PathBuf;
use std::time::Duration;

use flow_storage::{HubAccess, HubToken};

use crate::cache::Cache;
use crate::client::HttpClient;
use crate::download::download_file;
use crate::error::HubError;
use crate::reference::HubReference;
use crate::selection::{Selection, select};

/// Called with a line about the state of a download, about once a second. False cancels the download, which can be
/// resumed.
pub type Progress<'a> = &'a mut dyn FnMut(&str) -> bool;

/// Address of the hub, folder of its cache, and the token for requests.
#[derive(Clone)]
pub struct Hub {
    /// Such as `https://huggingface.co`, without a slash at the end.
    pub endpoint: String,
    /// Holds `models--OWNER--NAME` and `datasets--OWNER--NAME` folders.
    pub cache: PathBuf,
    pub token: Option<HubToken>,
    /// Only the cache is used.
    pub offline: bool,
    /// Longest wait for a connection or an answer; a download without a new byte for so long is requested again.
    pub timeout: Duration,
}

impl Hub {
    /// From the environment variables that `huggingface_hub` reads: `HF_ENDPOINT`, `HF_TOKEN` or the token file,
    /// `HF_HUB_CACHE` or `HF_HOME`, `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// Where no variable gives the folder of the cache.
    pub fn from_environment() -> Result<Self, HubError> {
        Self::from_variables(|name| std::env::var(name).ok().filter(|value| !value.trim().is_empty()))
    }

    /// As [`Hub::from_environment`], with the variables that `variable` looks up by name.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, HubError> {
        let access = HubAccess::from_variables(&variable);
        let cache = match (variable("HF_HUB_CACHE"), &access.home) {
            (Some(cache), _) => PathBuf::from(cache),
            (None, Some(home)) => home.join("hub"),
            (None, None) => {
                return Err(HubError::unavailable(
                    "there is no folder to keep models of the hub in: HOME is not set",
                    "set HF_HOME to a folder",
                ));
            }
        };
        Ok(Hub {
            endpoint: access.endpoint,
            cache,
            token: access.token,
            offline: access.offline,
            timeout: Duration::from_secs(30),
        })
    }

    /// Asks the hub for its first page, without the token: the status that it answers with, whatever it is.
    ///
    /// # Errors
    /// If it cannot be reached within the time-out.
    pub fn greet(&self) -> Result<u16, HubError> {
        Ok(HttpClient::new(self).greet()?)
    }

    /// The path of a model: a `.nemo` archive, the file that the reference names, or a folder with safetensors. What is
    /// not in the cache is downloaded. None: `progress` cancelled it.
    ///
    /// # Errors
    /// Where the hub does not deliver the model and the cache does not have it, or the cache cannot be written.
    pub fn fetch(&self, reference: &HubReference, progress: Progress<'_>) -> Result<Option<PathBuf>, HubError> {
        let cache = Cache::new(&self.cache, reference);
        if let Some(path) = self.cached_path(&cache, reference)?
            && (self.offline || reference.is_commit())
        {
            return Ok(Some(path));
        }
        if self.offline {
            return Err(self.offline_error(&reference.to_string()));
        }
        if !progress(&format!("asking {} for {reference}", self.endpoint)) {
            return Ok(None);
        }
        let client = HttpClient::new(self);
        let remote = match client.list(reference) {
            Ok(remote) => remote,
            Err(error) if error.transient => {
                return match self.cached_path(&cache, reference)? {
                    Some(path) => {
                        progress(&format!("{}; the copy in the cache is used", error.message));
                        Ok(Some(path))
                    }
                    None => Err(error.into()),
                };
            }
            Err(error) => return Err(error.into()),
        };
        let selection = select(reference, &remote.files)?;
        for file in selection.files() {
            if cache.file(&remote.commit, file).is_none()
                && !download_file(self, &client, reference, &cache, &remote.commit, file, progress)?
            {
                return Ok(None);
            }
        }
        cache.write_ref(&remote.commit)?;
        let snapshot = cache.snapshot(&remote.commit);
        Ok(Some(match &selection {
            Selection::File(file) => snapshot.join(file),
            Selection::Folder(_) => snapshot,
        }))
    }

    /// The error for what is not in the cache where only the cache is used.
    pub(crate) fn offline_error(&self, what: &str) -> HubError {
        HubError::unavailable(
            format!(
                "{what} is not in the cache {}, and HF_HUB_OFFLINE is set",
                self.cache.display()
            ),
            "unset HF_HUB_OFFLINE to download it, or copy the cache of a machine that has it and point HF_HOME there",
        )
    }

    /// The path of the reference in the cache, at the commit that its revision was last resolved to. None where the
    /// cache does not hold all files of the model.
    fn cached_path(&self, cache: &Cache, reference: &HubReference) -> Result<Option<PathBuf>, HubError> {
        let Some(commit) = cache.commit() else { return Ok(None) };
        let files = cache.files(&commit);
        // A folder needs its configuration and all shards that its index names.
        let Ok(selection) = select(reference, &files) else {
            return Ok(None);
        };
        let snapshot = cache.snapshot(&commit);
        Ok(match selection {
            Selection::File(file) => Some(snapshot.join(file)),
            Selection::Folder(_) => cache.has_all_shards(&commit).then_some(snapshot),
        })
    }
}
