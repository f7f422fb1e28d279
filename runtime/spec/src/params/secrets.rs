//! Which values are secrets, and which files may contain them as text.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::super::source::SourceFile;
use super::Params;
use flow_base::secret::Secrets;
use flow_base::suggest::nearest;

impl Params {
    /// Where the values of secret parameters are kept.
    pub fn keep_secrets_in(&mut self, secrets: &Secrets) {
        self.secrets = secrets.clone();
    }

    pub(super) fn is_secret(&self, name: &str) -> bool {
        let found = self.find(name);
        found.is_some_and(|(index, _)| self.params[index].secret)
    }

    /// Whether a value of the command line is not to be shown: it is a secret, or given under a name that is perhaps the
    /// misspelt one of a secret.
    pub(super) fn may_be_secret(&self, name: &str) -> bool {
        self.is_secret(name) || (self.find(name).is_none() && self.resembles_secret(name))
    }

    /// Whether a name that is not a parameter's is like that of a secret, is that of a group with one, or says itself that it is
    /// a credential.
    fn resembles_secret(&self, name: &str) -> bool {
        let name = name.to_lowercase();
        let secrets: Vec<String> = self
            .params
            .iter()
            .filter(|param| param.secret)
            .map(|param| param.name.to_lowercase())
            .collect();
        let is_like = |part: &str| {
            secrets.iter().any(|secret| {
                let last = secret.rsplit('.').next().unwrap_or_default();
                part == last || nearest(part, [last]).is_some()
            })
        };
        let group = format!("{name}.");
        secrets.iter().any(|secret| secret.starts_with(&group))
            || name.split('.').any(|part| is_credential(part) || is_like(part))
    }

    /// Notes that a file gives something in a place where a secret may be meant.
    pub fn may_stand_in(&mut self, source: &SourceFile) {
        if self.has_secrets() {
            self.files_with_secrets.insert(source.path.clone());
        }
    }

    /// Notes that a file gives something under a name that is not a parameter's.
    pub(super) fn may_stand_in_as(&mut self, name: &str, source: &SourceFile) {
        if self.resembles_secret(name) {
            self.files_with_secrets.insert(source.path.clone());
        }
    }

    /// Files that contain values of secrets as text, or may contain them under a misspelt name.
    pub fn files_with_secrets(&self) -> &BTreeSet<PathBuf> {
        &self.files_with_secrets
    }

    pub fn has_secrets(&self) -> bool {
        self.params.iter().any(|param| param.secret)
    }
}

/// Whether a name says that its value gives access to something: `hf_token`, `api-key`.
fn is_credential(name: &str) -> bool {
    const WORDS: [&str; 8] = [
        "token",
        "secret",
        "password",
        "passwd",
        "pwd",
        "credential",
        "credentials",
        "apikey",
    ];
    const KEYS: [&str; 3] = ["api_key", "access_key", "private_key"];
    let name = name.replace('-', "_");
    name.split('_').any(|word| WORDS.contains(&word)) || KEYS.iter().any(|key| name.ends_with(key))
}
