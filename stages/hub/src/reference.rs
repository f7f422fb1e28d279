//! References to models of the hub, `hf://OWNER/NAME[@REVISION][/FILE]`, and to datasets,
//! `hf://datasets/OWNER/NAME[@REVISION][/CONFIG][:SPLIT]`.

use std::fmt;
use std::path::Path;

use crate::error::HubError;

/// Before a reference to a dataset.
const DATASETS: &str = "hf://datasets/";

/// What a repository of the hub contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RepositoryKind {
    #[default]
    Model,
    Dataset,
}

impl RepositoryKind {
    /// The name in addresses of the hub's API, and in the folders of its cache.
    pub(crate) fn plural(self) -> &'static str {
        match self {
            RepositoryKind::Model => "models",
            RepositoryKind::Dataset => "datasets",
        }
    }

    /// What precedes `OWNER/NAME` in addresses of pages and files, and in references.
    pub(crate) fn prefix(self) -> &'static str {
        match self {
            RepositoryKind::Model => "",
            RepositoryKind::Dataset => "datasets/",
        }
    }
}

/// A repository on the hub, or one file of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubReference {
    pub kind: RepositoryKind,
    pub owner: String,
    pub name: String,
    /// A branch, a tag or a commit; `main` if the reference names none.
    pub revision: String,
    /// Path of the file within the repository.
    pub file: Option<String>,
}

impl HubReference {
    /// Parses the reference to a model, `hf://OWNER/NAME[@REVISION][/FILE]`; none for a text that does not begin with `hf://`.
    ///
    /// # Errors
    /// Where the rest is not a valid reference, or a name could lead outside the cache.
    pub fn parse(text: &str) -> Option<Result<Self, HubError>> {
        let rest = text.strip_prefix("hf://")?;
        if text.starts_with(DATASETS) {
            return Some(Err(HubError::Reference {
                message: format!("`{text}` names a dataset of the hub, not a model"),
            }));
        }
        Some(Self::read(rest).ok_or_else(|| HubError::Reference {
            message: format!("`{text}` names no model of the hub; write hf://OWNER/NAME, hf://OWNER/NAME@REVISION or hf://OWNER/NAME/FILE"),
        }))
    }

    /// Parses the repository that is pushed to: `hf://OWNER/NAME[@BRANCH]` (a model) or `hf://datasets/OWNER/NAME[@BRANCH]`.
    ///
    /// # Errors
    /// Where the text is neither, or names a part of a repository.
    pub fn target(text: &str) -> Result<Self, HubError> {
        let wrong = || HubError::Reference {
            message: format!(
                "`{text}` is not a repository of the hub; write hf://datasets/OWNER/NAME, or hf://OWNER/NAME for a model"
            ),
        };
        if let Some(dataset) = DatasetReference::parse(text) {
            let dataset = dataset.map_err(|_| wrong())?;
            let is_whole = dataset.config.is_none() && dataset.split.is_none();
            return Some(dataset.repository).filter(|_| is_whole).ok_or_else(wrong);
        }
        let model = Self::parse(text).and_then(Result::ok);
        model.filter(|model| model.file.is_none()).ok_or_else(wrong)
    }

    /// A suggestion for a text that is no existing path, but may be the `OWNER/NAME` of a model of the hub.
    pub fn meant(text: &str) -> Option<String> {
        let is_file = ["nemo", "ckpt", "model", "safetensors", "bin", "pt"];
        let (owner, name) = text.split_once('/')?;
        let suffix = name.rsplit_once('.').map_or("", |(_, suffix)| suffix);
        let fits = plain_name(owner) && plain_name(name) && !is_file.contains(&suffix);
        (fits && !Path::new(text).exists()).then(|| format!("hf://{text}"))
    }

    fn read(rest: &str) -> Option<Self> {
        let (owner, rest) = rest.split_once('/')?;
        let (head, file) = match rest.split_once('/') {
            Some((head, file)) => (head, Some(file)),
            None => (rest, None),
        };
        let (name, revision) = head.split_once('@').unwrap_or((head, "main"));
        if ![owner, name].into_iter().all(plain_name) || !plain_name(revision) {
            return None;
        }
        if file.is_some_and(|file| !is_inside(file)) {
            return None;
        }
        Some(HubReference {
            kind: RepositoryKind::Model,
            owner: owner.to_owned(),
            name: name.to_owned(),
            revision: revision.to_owned(),
            file: file.map(str::to_owned),
        })
    }

    /// `OWNER/NAME`.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// The path of the repository in addresses: `OWNER/NAME`, or `datasets/OWNER/NAME`.
    pub(crate) fn path(&self) -> String {
        format!("{}{}", self.kind.prefix(), self.repository())
    }

    /// Whether the revision is a commit, which never changes.
    pub fn is_commit(&self) -> bool {
        is_commit(&self.revision)
    }
}

impl fmt::Display for HubReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hf://{}", self.path())?;
        if self.revision != "main" {
            write!(f, "@{}", self.revision)?;
        }
        match &self.file {
            Some(file) => write!(f, "/{file}"),
            None => Ok(()),
        }
    }
}

/// A dataset on the hub: which of its configurations and splits are meant, where the reference names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetReference {
    /// Its `file` is none. Its `revision` may be `refs/convert/parquet` or `refs/pr/N`.
    pub repository: HubReference,
    pub config: Option<String>,
    pub split: Option<String>,
}

impl DatasetReference {
    /// Parses `hf://datasets/OWNER/NAME[@REVISION][/CONFIG][:SPLIT]`; none for a text that does not begin with `hf://datasets/`.
    ///
    /// # Errors
    /// Where the rest is not a valid reference, or a name could lead outside the cache.
    pub fn parse(text: &str) -> Option<Result<Self, HubError>> {
        let rest = text.strip_prefix(DATASETS)?;
        Some(Self::read(rest).ok_or_else(|| HubError::Reference {
            message: format!(
                "`{text}` names no dataset of the hub; write hf://datasets/OWNER/NAME[@REVISION][/CONFIG][:SPLIT]"
            ),
        }))
    }

    fn read(rest: &str) -> Option<Self> {
        let (rest, split) = match rest.rsplit_once(':') {
            Some((rest, split)) => (rest, Some(split)),
            None => (rest, None),
        };
        let (owner, rest) = rest.split_once('/')?;
        let name_end = rest.find(['/', '@']).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(name_end);
        let (revision, rest) = match rest.strip_prefix('@') {
            // Such a revision is the only one with slashes.
            Some(rest) if rest.starts_with("refs/") => {
                let end = rest.match_indices('/').nth(2).map_or(rest.len(), |(at, _)| at);
                rest.split_at(end)
            }
            Some(rest) => rest.split_at(rest.find('/').unwrap_or(rest.len())),
            None => ("main", rest),
        };
        let config = match rest.strip_prefix('/') {
            Some(config) => Some(config),
            None if rest.is_empty() => None,
            None => return None,
        };
        let is_revision = |revision: &str| match revision.strip_prefix("refs/") {
            Some(rest) => rest.split('/').count() == 2 && rest.split('/').all(plain_name),
            None => plain_name(revision),
        };
        let is_part = |part: &str| is_inside(part) && !part.contains('/');
        let is_valid = [owner, name].into_iter().all(plain_name)
            && is_revision(revision)
            && config.is_none_or(is_inside)
            && split.is_none_or(is_part);
        is_valid.then(|| DatasetReference {
            repository: HubReference {
                kind: RepositoryKind::Dataset,
                owner: owner.to_owned(),
                name: name.to_owned(),
                revision: revision.to_owned(),
                file: None,
            },
            config: config.map(str::to_owned),
            split: split.map(str::to_owned),
        })
    }
}

impl fmt::Display for DatasetReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.repository)?;
        if let Some(config) = &self.config {
            write!(f, "/{config}")?;
        }
        match &self.split {
            Some(split) => write!(f, ":{split}"),
            None => Ok(()),
        }
    }
}

pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether a text can be a file name of the cache: letters, digits, `-`, `_` and `.`, and no dot at the beginning.
pub(crate) fn plain_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !text.is_empty() && text.len() <= 200 && text.bytes().all(allowed) && !text.starts_with('.')
}

/// Whether a path stays within its repository: no empty, `.` or `..` component, no control character, no backslash.
pub(crate) fn is_inside(file: &str) -> bool {
    let odd = |c: char| c.is_control() || c == '\\';
    !file.contains(odd) && file.len() <= 1000 && file.split('/').all(|part| !matches!(part, "" | "." | ".."))
}
