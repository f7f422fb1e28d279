//! Determines the language of a text from its script, its tag and its folder.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use flow_corpus::ManifestError;
use flow_kind::open_input_file;
use flow_kind::yaml;
use flow_storage::Storage;
use serde::{Deserialize, Serialize};

const DEFAULT_TABLE: &str = include_str!("../../../configs/languages.yaml");

/// The table as in its file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    aliases: BTreeMap<String, String>,
    scripts: Vec<Script>,
    #[serde(default)]
    letters: Vec<Letters>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Script {
    name: String,
    ranges: Vec<String>,
    languages: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Letters {
    script: String,
    any_of: String,
    #[serde(default)]
    except: Vec<String>,
    #[serde(default)]
    chosen: Option<String>,
    then: String,
}

/// Scripts, the languages they can be, and how tags are spelt.
#[derive(Debug)]
pub struct Languages {
    file: File,
    /// By rule of `letters`: the number of its script, and its letters.
    letters: Vec<(usize, Vec<char>)>,
    /// Script number + 1 of each code point below 65,536; 0 where none counts.
    plane: Vec<u8>,
    /// Ranges beyond, with their script number.
    beyond: Vec<(u32, u32, u8)>,
}

impl Languages {
    /// The table that ships with the program (`configs/languages.yaml`).
    pub fn shipped() -> Arc<Languages> {
        static TABLE: LazyLock<Arc<Languages>> = LazyLock::new(|| {
            // The text is part of the program, and a test reads it.
            Arc::new(Languages::parse(DEFAULT_TABLE).expect("the shipped language table is valid"))
        });
        Arc::clone(&TABLE)
    }

    /// # Errors
    /// When the file cannot be read or is not a language table.
    pub fn from_file(storage: &Storage, path: &Path) -> Result<Languages, ManifestError> {
        let text = open_input_file(storage, path).and_then(io::read_to_string);
        let text = text.map_err(|e| ManifestError::io(path, e))?;
        Languages::parse(&text).map_err(|e| ManifestError::Languages(format!("{}: {e}", path.display())))
    }

    /// # Errors
    /// When the text is not a language table; the message says where.
    pub fn parse(text: &str) -> Result<Languages, ManifestError> {
        let fault = |message: String| Err(ManifestError::Languages(message));
        let file: File = yaml::from_text(text).map_err(ManifestError::Languages)?;
        if file.scripts.len() > usize::from(u8::MAX) - 1 {
            return fault("more than 254 scripts".into());
        }
        let mut plane = vec![0u8; 0x1_0000];
        let mut beyond = Vec::new();
        for (number, script) in (0u8..).zip(&file.scripts) {
            if script.languages.is_empty() {
                return fault(format!("script {} lists no language", script.name));
            }
            for range in &script.ranges {
                let Some((first, last)) = code_points(range) else {
                    return fault(format!(
                        "script {}: {range:?} is not a range of code points such as \"0900-0963\"",
                        script.name
                    ));
                };
                if last >= 0x1_0000 {
                    beyond.push((first, last, number));
                }
                for slot in plane.iter_mut().take(last as usize + 1).skip(first as usize) {
                    if *slot != 0 {
                        return fault(format!("script {}: {range} overlaps another range", script.name));
                    }
                    *slot = number + 1;
                }
            }
        }
        let mut letters = Vec::with_capacity(file.letters.len());
        for rule in &file.letters {
            let Some(script) = file.scripts.iter().position(|script| script.name == rule.script) else {
                return fault(format!(
                    "letters name the script {:?}, which is not in the table",
                    rule.script
                ));
            };
            letters.push((script, rule.any_of.chars().collect()));
        }
        Ok(Languages {
            file,
            letters,
            plane,
            beyond,
        })
    }

    /// The identity of this table: equal for equal contents, whatever the layout of the file.
    pub fn digest(&self) -> String {
        // Plain data with string keys: cannot fail to serialise.
        let json = serde_json::to_vec(&self.file).unwrap_or_default();
        blake3::hash(&json).to_hex().to_string()
    }

    /// A tag in the table's spelling: stripped of spaces, lowercased, cut at the first `-` or `_`, aliases
    /// resolved.
    pub fn tag<'a>(&'a self, tag: &'a str) -> Cow<'a, str> {
        let tag = tag.trim_matches([' ', '\t', '\r', '\n']);
        let tag: Cow<str> = if tag.bytes().all(|b| b.is_ascii_lowercase()) {
            Cow::Borrowed(tag)
        } else {
            Cow::Owned(tag.to_lowercase())
        };
        let cut = tag.find(['-', '_']).unwrap_or(tag.len());
        if let Some(alias) = self.file.aliases.get(&tag[..cut]) {
            return Cow::Borrowed(alias);
        }
        match tag {
            Cow::Borrowed(tag) => Cow::Borrowed(&tag[..cut]),
            Cow::Owned(mut tag) => {
                tag.truncate(cut);
                Cow::Owned(tag)
            }
        }
    }

    /// The script that most code points of `clean` are in; of two with as many, the earlier in the table.
    fn script(&self, clean: &str) -> Option<(usize, &Script)> {
        let mut counts = [0u32; 256];
        for c in clean.chars() {
            let point = u32::from(c);
            let slot = match self.plane.get(point as usize) {
                Some(&slot) => slot,
                None => self
                    .beyond
                    .iter()
                    .find(|(first, last, _)| (*first..=*last).contains(&point))
                    .map_or(0, |(_, _, n)| n + 1),
            };
            counts[usize::from(slot)] += 1;
        }
        let mut best = None;
        let mut most = 0;
        for (script, &count) in self.file.scripts.iter().enumerate().zip(&counts[1..]) {
            if count > most {
                most = count;
                best = Some(script);
            }
        }
        best
    }

    fn knows(&self, lang: &str) -> bool {
        self.file
            .scripts
            .iter()
            .any(|script| script.languages.iter().any(|l| l == lang))
    }

    /// The language of a row.
    ///
    /// `tag` is the language of the metadata (or the folder, where that has none), `path_lang` the folder. The tag
    /// counts if the script of the text can be that language, else the folder if it can, else the script's first
    /// language; letters that only one language has may overrule that. Without any letter the tag counts if it is a
    /// known language, else the folder.
    pub fn correct<'a>(&'a self, clean: &str, tag: &'a str, path_lang: &'a str) -> Cow<'a, str> {
        let tag = self.tag(tag);
        let Some((number, script)) = self.script(clean) else {
            return if self.knows(&tag) { tag } else { self.tag(path_lang) };
        };
        let can_be = |lang: &str| script.languages.iter().any(|l| l == lang);
        let mut chosen = tag;
        if !can_be(&chosen) {
            chosen = self.tag(path_lang);
        }
        if !can_be(&chosen) {
            chosen = Cow::Borrowed(&script.languages[0]); // Checked when the table was read.
        }
        for (rule, (of, letters)) in self.file.letters.iter().zip(&self.letters) {
            let applies = *of == number
                && rule.chosen.as_deref().is_none_or(|only| only == chosen)
                && !rule.except.iter().any(|l| *l == chosen);
            if applies && clean.contains(letters.as_slice()) {
                return Cow::Borrowed(&rule.then);
            }
        }
        chosen
    }
}

/// Corrects with the shipped table; see [`Languages::correct`].
pub fn correct_language(clean: &str, tag: &str, path_lang: &str) -> String {
    Languages::shipped().correct(clean, tag, path_lang).into_owned()
}

fn code_points(range: &str) -> Option<(u32, u32)> {
    let (first, last) = range.split_once('-')?;
    let hex = |text: &str| u32::from_str_radix(text.trim(), 16).ok();
    let (first, last) = (hex(first)?, hex(last)?);
    (first <= last && last <= 0x10_FFFF).then_some((first, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn corrects_as_the_rules_say() {
        for (clean, tag, path, lang) in [
            ("नमस्ते", "en", "hi", "hi"),
            ("வணக்கம்", "hi", "hi", "ta"),
            ("please bring water", "bn", "bn", "en"),
            ("hello", "en-IN", "en", "en"),
            ("नमस्ते", " HIN ", "hi", "hi"),
            ("নমস্কাৰ", "bn", "as", "as"),
            ("নমস্কার", "as", "bn", "bn"),
            ("আমি", "as", "as", "as"),
            ("আমি", "en", "hi", "bn"),
            ("নমস্কাৰ", "mni", "as", "mni"),
            ("कल", "ta", "mr", "mr"),
            ("कल", "ta", "en", "hi"),
            ("42", "ta", "te", "ta"),
            ("42", "zz", "te", "te"),
            ("42", "zz", "Qq-x", "qq"),
            ("कa", "en", "en", "hi"),
            ("ab कल c", "hi", "hi", "en"),
        ] {
            assert_eq!(
                correct_language(clean, tag, path),
                lang,
                "{clean:?} tagged {tag:?} in {path:?}"
            );
        }
    }

    #[test]
    fn a_broken_table_is_refused_by_name() {
        for (table, expected) in [
            (
                "aliases: {}\nscripts: [{name: A, ranges: [\"41-\"], languages: [en]}]",
                "is not a range",
            ),
            (
                "aliases: {}\nscripts: [{name: A, ranges: [\"41-5A\", \"50-60\"], languages: [en]}]",
                "overlaps",
            ),
            (
                "aliases: {}\nscripts: [{name: A, ranges: [], languages: []}]",
                "lists no language",
            ),
            (
                "aliases: {}\nscripts: []\nletters: [{script: B, any_of: x, then: as}]",
                "not in the table",
            ),
            ("aliases: {}\nscripts: []\nother: 1", "unknown field"),
        ] {
            let message = Languages::parse(table).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn tables_beyond_the_basic_plane_work_and_digests_see_contents_only() {
        let one =
            Languages::parse("aliases: {}\nscripts: [{name: Chakma, ranges: [\"FFF0-11147\"], languages: [ccp]}]")
                .unwrap();
        assert_eq!(one.correct("\u{11103}", "en", "en"), "ccp");
        let same = Languages::parse(
            "scripts:\n - name: Chakma\n   languages: [ccp]\n   ranges: [\"FFF0-11147\"]\naliases: {}",
        )
        .unwrap();
        assert_eq!(one.digest(), same.digest());
        assert_ne!(one.digest(), Languages::shipped().digest());
    }
}
