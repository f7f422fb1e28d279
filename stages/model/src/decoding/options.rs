//! Settings of decoding: beam, files and weights.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};

use super::DecodingSettings;
use crate::fusion::{Fusion, read_arpa, read_phrases};
use crate::heads::HeadKind;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Most hypotheses that a beam keeps.
pub const MAX_BEAM: usize = 64;

/// How settings describe decoding: see [`DecodingSettings`].
#[derive(Debug, Clone, PartialEq)]
pub struct DecodingOptions {
    /// The head that decodes; none for the model's own choice.
    pub head: Option<HeadKind>,
    /// Hypotheses that are kept; 0 or 1 for greedy search.
    pub beam: usize,
    /// An n-gram language model in the ARPA format.
    pub lm: Option<PathBuf>,
    pub lm_weight: f64,
    /// A file of phrases.
    pub boost: Option<PathBuf>,
    pub boost_weight: f64,
}

impl Default for DecodingOptions {
    fn default() -> Self {
        DecodingOptions {
            head: None,
            beam: 0,
            lm: None,
            lm_weight: 0.3,
            boost: None,
            boost_weight: 1.0,
        }
    }
}

impl DecodingOptions {
    /// From settings, in which an empty path means no file.
    pub fn of(beam: usize, lm: (&Path, f64), boost: (&Path, f64)) -> Self {
        let file = |path: &Path| (!path.as_os_str().is_empty()).then(|| path.to_owned());
        DecodingOptions {
            head: None,
            beam,
            lm: file(lm.0),
            lm_weight: lm.1,
            boost: file(boost.0),
            boost_weight: boost.1,
        }
    }

    /// The same with the head that decodes, none for the model's own choice.
    pub fn with_head(self, head: Option<HeadKind>) -> Self {
        DecodingOptions { head, ..self }
    }

    /// What is wrong with a value, and the name of its setting.
    pub fn check(&self) -> std::result::Result<(), (&'static str, String)> {
        if self.beam > MAX_BEAM {
            return Err((
                "beam",
                format!("`beam` is {}; it must be from 0 to {MAX_BEAM}", self.beam),
            ));
        }
        for (name, value) in [("lm_weight", self.lm_weight), ("boost_weight", self.boost_weight)] {
            if !(0.0..=100.0).contains(&value) {
                return Err((name, format!("`{name}` is {value}; it must be from 0 to 100")));
            }
        }
        Ok(())
    }

    /// The files that are named, with the names of their settings.
    pub fn files(&self) -> impl Iterator<Item = (&'static str, &PathBuf)> {
        let files = [("lm", &self.lm), ("boost", &self.boost)];
        files
            .into_iter()
            .filter_map(|(name, file)| Some((name, file.as_ref()?)))
    }

    /// The options that affect the result, apart from the bytes of the files; none for plain greedy search.
    pub fn identity(&self) -> Option<Value> {
        if self.beam <= 1 && self.lm.is_none() && self.boost.is_none() {
            return self.head.map(|head| json!({ "head": head }));
        }
        let mut identity = json!({
            "beam": if self.beam > 1 { self.beam } else { 0 },
            "lm_weight": self.lm.as_ref().map(|_| self.lm_weight),
            "boost_weight": self.boost.as_ref().map(|_| self.boost_weight),
        });
        if let Some(head) = self.head {
            identity["head"] = json!(head);
        }
        Some(identity)
    }

    /// Reads the files.
    ///
    /// # Errors
    /// If a value is out of its range, or a file cannot be read or is not for this tokenizer.
    pub fn load(&self, tokenizer: &Tokenizer) -> Result<DecodingSettings> {
        self.check().map_err(|(_, what)| Error::Input(what))?;
        let vocabulary = tokenizer.vocabulary_size();
        let mut fusion = Fusion::default();
        if let Some(lm) = &self.lm {
            fusion.add(Arc::new(read_arpa(lm, vocabulary)?), self.lm_weight)?;
        }
        let mut settings = DecodingSettings {
            head: self.head,
            beam: self.beam,
            fusion,
            ..DecodingSettings::default()
        };
        if let Some(boost) = &self.boost {
            let phrases = read_phrases(boost, tokenizer)?;
            settings.notes.extend(left_out(boost, &phrases.left_out));
            settings.boost(&phrases.phrases, self.boost_weight, tokenizer)?;
        }
        Ok(settings)
    }
}

/// Names phrases that are not boosted.
fn left_out(path: &Path, phrases: &[(usize, String)]) -> Option<String> {
    const MOST_NAMED: usize = 5;
    let named = phrases.iter().take(MOST_NAMED);
    let named: Vec<String> = named
        .map(|(line, phrase)| format!("`{phrase}` (line {line})"))
        .collect();
    let more = phrases.len().saturating_sub(MOST_NAMED);
    let more = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    (!named.is_empty()).then(|| {
        format!(
            "{}: not boosted, as the model's tokenizer does not know all of their characters: {}{more}",
            path.display(),
            named.join(", ")
        )
    })
}
