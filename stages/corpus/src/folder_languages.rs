//! Whether the folders of recordings are named like languages.

use std::collections::BTreeSet;

use crate::row_rules::{Likeness, names_language};

/// Most languages that a message names.
const SHOWN: usize = 20;

/// The first folders of the paths of all recordings of a manifest. They are taken for languages only where each of them is
/// named like one: `hi/`, `en-IN/`, but not `dr1/` or `hi/` beside `speaker1/`, and `cut/` and `man/` not by themselves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FolderLanguages {
    folders: BTreeSet<String>,
    /// One of these is a code for certain.
    has_code: bool,
    /// The first folder that is not named like a language.
    other: Option<String>,
}

impl FolderLanguages {
    pub fn of<'f>(files: impl IntoIterator<Item = &'f str>) -> FolderLanguages {
        let mut folders = FolderLanguages::default();
        files.into_iter().for_each(|file| folders.add(file));
        folders
    }

    /// Adds the path of a recording as the manifest has it; one without a folder says nothing.
    pub fn add(&mut self, file: &str) {
        let Some(folder) = first_folder(file) else { return };
        if self.other.is_some() || self.folders.contains(folder) {
            return;
        }
        let likeness = names_language(folder);
        if likeness == Likeness::None {
            self.other = Some(folder.to_string());
        } else {
            self.folders.insert(folder.to_string());
            self.has_code |= likeness == Likeness::Code;
        }
    }

    /// The folder of the path that names its language; none where folders do not.
    pub fn language<'f>(&self, file: &'f str) -> Option<&'f str> {
        first_folder(file).filter(|folder| self.are_languages() && self.folders.contains(*folder))
    }

    fn are_languages(&self) -> bool {
        self.other.is_none() && self.has_code
    }

    /// The part of the decision that belongs to the key of a partition, since it also depends on files of other
    /// partitions.
    pub fn in_key(&self) -> &'static str {
        match self.are_languages() {
            true => " folders are languages",
            false => "",
        }
    }

    /// The decision as text for the log; none where there is no folder.
    pub fn decision(&self) -> Option<String> {
        let quoted = |name: &String| format!("`{name}`");
        match &self.other {
            Some(other) if self.folders.is_empty() => Some(format!(
                "folders are not taken for languages, since `{other}` is not a language code"
            )),
            Some(other) => {
                let first = self.folders.first().map(quoted).unwrap_or_default();
                Some(format!(
                    "folders are not taken for languages, since `{other}` is not a language code, though {first} might be one"
                ))
            }
            None if self.folders.is_empty() => None,
            None if !self.has_code => {
                let first = self.folders.first().map(quoted).unwrap_or_default();
                Some(format!(
                    "folders are not taken for languages, since names such as {first} alone may be anything"
                ))
            }
            None => {
                let shown: Vec<String> = self.folders.iter().take(SHOWN).map(quoted).collect();
                let more = match self.folders.len().saturating_sub(SHOWN) {
                    0 => String::new(),
                    more => format!(" and {more} more"),
                };
                Some(format!(
                    "the names of folders are taken for languages: {}{more}",
                    shown.join(", ")
                ))
            }
        }
    }
}

fn first_folder(file: &str) -> Option<&str> {
    file.split_once('/').map(|(first, _)| first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_languages_together_or_not_at_all() {
        let all = FolderLanguages::of(["hi/x/a.wav", "en-IN/b.wav", "c.wav"]);
        assert_eq!((all.language("hi/y.wav"), all.language("c.wav")), (Some("hi"), None));
        assert_eq!(
            all.decision().unwrap(),
            "the names of folders are taken for languages: `en-IN`, `hi`"
        );
        let mixed = FolderLanguages::of(["en/a.wav", "speaker1/b.wav", "hi/c.wav"]);
        assert_eq!((mixed.language("en/a.wav"), mixed.language("hi/c.wav")), (None, None));
        let dialects = FolderLanguages::of(["dr/a.wav", "hi/b.wav"]);
        assert_eq!(dialects.language("hi/b.wav"), None);
        assert!(mixed.decision().unwrap().contains("`speaker1`"), "{mixed:?}");
        // Words of three letters are languages beside codes alone.
        let words = FolderLanguages::of(["cut/a.wav", "man/b.wav"]);
        assert_eq!((words.language("man/b.wav"), words.in_key()), (None, ""));
        assert!(words.decision().unwrap().contains("`cut`"), "{words:?}");
        let codes = FolderLanguages::of(["cut/a.wav", "man/b.wav", "hi/c.wav"]);
        assert_eq!(codes.language("man/b.wav"), Some("man"));
        let words = FolderLanguages::of(["rec/a.wav", "hi/c.wav"]);
        assert_eq!(words.language("hi/c.wav"), None);
        // An absolute path has no first folder.
        assert_eq!(FolderLanguages::of(["/hi/a.wav"]).language("/hi/a.wav"), None);
        assert_eq!(FolderLanguages::of(["a.wav"]).decision(), None);
    }
}
