//! References to models of the hub: `hf://OWNER/NAME[@REVISION][/FILE]`.

use std::fmt;
use std::path::Path;

use crate::error::HubError;

/// A model on the hub, or one file of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubReference {
    pub owner: String,
    pub name: String,
    /// A branch, a tag or a commit; `main` if the reference names none.
    pub revision: String,
    /// Path of the file within the repository.
    pub file: Option<String>,
}

impl HubReference {
    /// Parses `hf://OWNER/NAME[@REVISION][/FILE]`; none for a text that does not begin with `hf://`.
    ///
    /// # Errors
    /// Where the rest is no valid reference, or a name could lead outside the cache.
    pub fn parse(text: &str) -> Option<Result<Self, HubError>> {
        let rest = text.strip_prefix("hf://")?;
        Some(Self::read(rest).ok_or_else(|| HubError::Reference {
            message: format!("`{text}` names no model of the hub; write hf://OWNER/NAME, hf://OWNER/NAME@REVISION or hf://OWNER/NAME/FILE"),
        }))
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

    /// Whether the revision is a commit, which never changes.
    pub fn is_commit(&self) -> bool {
        is_commit(&self.revision)
    }
}

impl fmt::Display for HubReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hf://{}/{}", self.owner, self.name)?;
        if self.revision != "main" {
            write!(f, "@{}", self.revision)?;
        }
        match &self.file {
            Some(file) => write!(f, "/{file}"),
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
