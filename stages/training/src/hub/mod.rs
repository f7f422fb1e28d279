//! Models of the Hugging Face hub: `hf://OWNER/NAME[@REVISION][/FILE]` becomes a path in the hub's own cache, which is
//! shared with its other programs.

mod cache;
mod client;
mod download;
mod reference;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::TrainingError;

use cache::Cache;
use client::Client;
pub use reference::Reference;

/// Told what goes on, about once a second; false ends the download, which can be resumed.
pub type Tell<'a> = &'a mut dyn FnMut(&str) -> bool;

/// Where the hub is, where its files are kept, and who asks.
#[derive(Clone)]
pub struct Hub {
    pub endpoint: String,
    /// Holds `models--OWNER--NAME` folders.
    pub cache: PathBuf,
    pub token: Option<Token>,
    pub offline: bool,
    /// How long to wait for a connection or an answer; a download without a byte for so long is begun again.
    pub patience: Duration,
}

/// A token and where it was found.
#[derive(Clone)]
pub struct Token {
    pub secret: String,
    pub from: String,
}

impl Hub {
    /// By the environment, as the hub's other programs read it: `HF_ENDPOINT`, `HF_TOKEN` or the token file,
    /// `HF_HUB_CACHE` or `HF_HOME`, `HF_HUB_OFFLINE`.
    pub fn from_environment() -> Result<Self, TrainingError> {
        Self::from_variables(|name| std::env::var(name).ok().filter(|value| !value.trim().is_empty()))
    }

    /// As [`Hub::from_environment`], of these variables.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, TrainingError> {
        let user_cache = || {
            let folder = variable("XDG_CACHE_HOME").map(PathBuf::from);
            folder.or_else(|| variable("HOME").map(|home| Path::new(&home).join(".cache")))
        };
        let home = variable("HF_HOME").map(PathBuf::from);
        let home = home.or_else(|| user_cache().map(|cache| cache.join("huggingface")));
        let cache = match (variable("HF_HUB_CACHE"), &home) {
            (Some(cache), _) => PathBuf::from(cache),
            (None, Some(home)) => home.join("hub"),
            (None, None) => {
                return Err(TrainingError::Hub {
                    message: "there is no folder to keep models of the hub in: HOME is not set".into(),
                    help: "set HF_HOME to a folder".into(),
                });
            }
        };
        let token_file = variable("HF_TOKEN_PATH").map(PathBuf::from);
        let token_file = token_file.or_else(|| home.map(|home| home.join("token")));
        let named = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]
            .into_iter()
            .find_map(|name| Some((variable(name)?, name.to_owned())));
        let kept = || {
            let file = token_file?;
            Some((std::fs::read_to_string(&file).ok()?, file.display().to_string()))
        };
        let token = named.or_else(kept).map(|(secret, from)| Token {
            secret: secret.trim().to_owned(),
            from,
        });
        let yes = |value: String| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on");
        Ok(Hub {
            endpoint: variable("HF_ENDPOINT")
                .map(|endpoint| endpoint.trim_end_matches('/').to_owned())
                .unwrap_or_else(|| "https://huggingface.co".into()),
            cache,
            token: token.filter(|token| !token.secret.is_empty()),
            offline: variable("HF_HUB_OFFLINE").is_some_and(yes),
            patience: Duration::from_secs(30),
        })
    }

    /// Asks the hub for its first page, without the token: the status that it answers with, whatever it is.
    ///
    /// # Errors
    /// If it cannot be reached within `patience`.
    pub fn greet(&self) -> Result<u16, TrainingError> {
        Ok(Client::new(self).greet()?)
    }

    /// The path of a model: a `.nemo` archive, the file that was named, or a folder with safetensors. What is not in the
    /// cache is downloaded. None: `tell` ended it.
    pub fn fetch(&self, reference: &Reference, tell: Tell<'_>) -> Result<Option<PathBuf>, TrainingError> {
        let cache = Cache::new(&self.cache, reference);
        if let Some(path) = self.complete(&cache, reference)?
            && (self.offline || reference.is_commit())
        {
            return Ok(Some(path));
        }
        if self.offline {
            return Err(TrainingError::Hub {
                message: format!("{reference} is not in the cache {}, and HF_HUB_OFFLINE is set", self.cache.display()),
                help: "unset HF_HUB_OFFLINE to download it, or copy the cache of a machine that has it and point HF_HOME there"
                    .into(),
            });
        }
        if !tell(&format!("asking {} for {reference}", self.endpoint)) {
            return Ok(None);
        }
        let client = Client::new(self);
        let remote = match client.list(reference) {
            Ok(remote) => remote,
            Err(error) if error.passing => {
                return match self.complete(&cache, reference)? {
                    Some(path) => {
                        tell(&format!("{}; the copy in the cache is used", error.message));
                        Ok(Some(path))
                    }
                    None => Err(error.into()),
                };
            }
            Err(error) => return Err(error.into()),
        };
        let wanted = choose(reference, &remote.files)?;
        for file in wanted.files() {
            if cache.file(&remote.commit, file).is_none()
                && !download::one(self, &client, reference, &cache, &remote, file, tell)?
            {
                return Ok(None);
            }
        }
        cache.note_revision(&remote.commit)?;
        let snapshot = cache.snapshot(&remote.commit);
        Ok(Some(match &wanted {
            Wanted::File(file) => snapshot.join(file),
            Wanted::Folder(_) => snapshot,
        }))
    }

    /// What the cache holds whole for the reference, by the commit that its revision stood for last.
    pub fn complete(&self, cache: &Cache, reference: &Reference) -> Result<Option<PathBuf>, TrainingError> {
        let Some(commit) = cache.commit() else { return Ok(None) };
        let files = cache.files(&commit);
        // A folder is whole only with its configuration and all parts that its index names.
        let Ok(wanted) = choose(reference, &files) else {
            return Ok(None);
        };
        let snapshot = cache.snapshot(&commit);
        Ok(match wanted {
            Wanted::File(file) => Some(snapshot.join(file)),
            Wanted::Folder(_) => cache.is_whole_folder(&commit).then_some(snapshot),
        })
    }
}

/// What of a repository is needed.
#[derive(Debug, PartialEq)]
enum Wanted {
    File(String),
    Folder(Vec<String>),
}

impl Wanted {
    fn files(&self) -> &[String] {
        match self {
            Wanted::File(file) => std::slice::from_ref(file),
            Wanted::Folder(files) => files,
        }
    }
}

/// The file that was named, else the `.nemo` archive, else what makes a safetensors model.
fn choose(reference: &Reference, files: &[String]) -> Result<Wanted, TrainingError> {
    if let Some(file) = &reference.file {
        if files.contains(file) {
            return Ok(Wanted::File(file.clone()));
        }
        return Err(TrainingError::Hub {
            message: format!("there is no file {file} in {}", reference.repository()),
            help: format!("it holds: {}", shown(files)),
        });
    }
    let archives: Vec<&String> = files.iter().filter(|file| file.ends_with(".nemo")).collect();
    match archives.as_slice() {
        [one] => return Ok(Wanted::File((*one).clone())),
        [] => {}
        several => {
            let names: Vec<&str> = several.iter().map(|file| file.as_str()).collect();
            return Err(TrainingError::Hub {
                message: format!(
                    "{} holds several .nemo archives: {}",
                    reference.repository(),
                    names.join(", ")
                ),
                help: format!("name the one that is meant: {}/{}", reference, names[0]),
            });
        }
    }
    let top = |file: &&String| !file.contains('/');
    let parts = |file: &str| {
        [".safetensors", ".json", ".model", ".yaml", ".txt"]
            .iter()
            .any(|end| file.ends_with(end))
    };
    if files.iter().filter(top).any(|file| file.ends_with(".safetensors"))
        && files
            .iter()
            .any(|file| file == "config.json" || file.ends_with("_config.yaml"))
    {
        return Ok(Wanted::Folder(
            files.iter().filter(top).filter(|file| parts(file)).cloned().collect(),
        ));
    }
    Err(TrainingError::Hub {
        message: format!(
            "{} holds neither a .nemo archive nor config.json with safetensors",
            reference.repository()
        ),
        help: format!("it holds: {}", shown(files)),
    })
}

fn shown(files: &[String]) -> String {
    let mut names: Vec<&str> = files.iter().take(12).map(String::as_str).collect();
    if names.is_empty() {
        names.push("nothing");
    }
    if files.len() > names.len() {
        names.push("...");
    }
    names.join(", ")
}

#[cfg(test)]
mod tests;
