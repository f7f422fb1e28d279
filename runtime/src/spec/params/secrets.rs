//! Which values are secrets, and which files may contain them as text.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::super::source::SourceFile;
use super::Params;
use crate::secret::Secrets;

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
        let unknown = self.find(name).is_none();
        self.is_secret(name) || (unknown && self.has_secrets())
    }

    /// Notes that a file gives something under a name that is unknown, which is perhaps the misspelt one of a secret.
    pub fn may_stand_in(&mut self, source: &SourceFile) {
        if self.has_secrets() {
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
