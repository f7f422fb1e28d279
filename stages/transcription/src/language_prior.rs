//! Which pieces of a vocabulary are written in a language: tags of the language and letters of its scripts, and how often each piece
//! comes in its texts and in those of other languages.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use flow_kind::open_regular_file;
use flow_model::tokenizer::Tokenizer;
use flow_text::language_tag::{is_language, same_language, split_tag};
use serde::{Deserialize, Serialize};
use unicode_script::Script;

use crate::language_scripts::{scripts_of_language, scripts_of_text};
use crate::{Result, TranscriptionError};

/// Usual weight of what follows from counts.
pub const WEIGHT: f64 = 1.0;

/// Largest file of counts.
const LARGEST_FILE: u64 = 256 << 20;
/// Most languages of a file.
const MOST_LANGUAGES: usize = 1000;
/// Share of the uniform distribution over all pieces in the frequencies of a language, so that a piece that its texts do not have is
/// improbable and not impossible.
const UNIFORM: f64 = 0.01;
/// What a score is at least, in nats: a text that was counted does not forbid anything.
const LEAST_SCORE: f64 = -12.0;
/// Mark of the space before a word.
const SPACE: char = '\u{2581}';

/// How often each piece of a vocabulary comes in texts of languages: the file that `flow lm build --languages` writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LanguageCounts {
    version: u32,
    /// BLAKE3 of the tokenizer, in hexadecimal digits.
    tokenizer: String,
    /// Pieces of the vocabulary.
    vocabulary: usize,
    /// For each language the pieces that its texts have, by id, and how often.
    languages: BTreeMap<String, BTreeMap<u32, u64>>,
}

impl LanguageCounts {
    const VERSION: u32 = 1;

    /// No texts yet.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        LanguageCounts {
            version: Self::VERSION,
            tokenizer: digest(tokenizer),
            vocabulary: tokenizer.vocabulary_size(),
            languages: BTreeMap::new(),
        }
    }

    /// Counts the pieces of a text.
    pub fn add(&mut self, language: &str, tokens: &[u32]) {
        let counts = self.languages.entry(language.to_owned()).or_default();
        for token in tokens {
            let count = counts.entry(*token).or_default();
            *count = count.saturating_add(1);
        }
    }

    /// The languages, with the number of pieces of their texts.
    pub fn languages(&self) -> impl Iterator<Item = (&str, u64)> {
        let sum = |counts: &BTreeMap<u32, u64>| counts.values().fold(0u64, |sum, count| sum.saturating_add(*count));
        self.languages
            .iter()
            .map(move |(language, counts)| (&language[..], sum(counts)))
    }

    /// # Errors
    /// If it cannot be serialised.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        let bytes = serde_json::to_vec(self).map_err(|error| TranscriptionError::Input(error.to_string()))?;
        Ok([&bytes[..], b"\n"].concat())
    }

    /// Reads a file of counts for a tokenizer.
    ///
    /// # Errors
    /// If it cannot be read, is none, or is of another tokenizer.
    pub fn read(path: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        let wrong = |why: String| TranscriptionError::setting("language_prior", format!("{}: {why}", path.display()));
        let mut bytes = Vec::new();
        let file = open_regular_file(path).map_err(|error| wrong(error.to_string()))?;
        let read = file.take(LARGEST_FILE + 1).read_to_end(&mut bytes);
        read.map_err(|error| wrong(error.to_string()))?;
        if bytes.len() as u64 > LARGEST_FILE {
            return Err(wrong(format!("it has more than {LARGEST_FILE} bytes")));
        }
        let counts: Self =
            serde_json::from_slice(&bytes).map_err(|error| wrong(format!("not such a file: {error}")))?;
        if counts.version != Self::VERSION {
            return Err(wrong(format!(
                "it has version {}; {} is known",
                counts.version,
                Self::VERSION
            )));
        }
        let size = tokenizer.vocabulary_size();
        let beyond = counts
            .languages
            .values()
            .flat_map(BTreeMap::keys)
            .any(|id| *id as usize >= size);
        if counts.vocabulary != size || counts.tokenizer != digest(tokenizer) || beyond {
            return Err(wrong(
                "it was counted with another tokenizer than that of the model".to_owned(),
            ));
        }
        if counts.languages.len() > MOST_LANGUAGES {
            return Err(wrong(format!("it has more than {MOST_LANGUAGES} languages")));
        }
        if let Some((language, _)) = counts
            .languages()
            .find(|(language, sum)| !is_language(language) || *sum == 0)
        {
            return Err(wrong(format!("`{language}` is not a language with texts")));
        }
        Ok(counts)
    }

    /// For each piece the natural logarithm of how much less probable it is in these languages (their mean) than in the other one
    /// that has it most often; 0 where it is not less probable, or none of the texts is of the others or of these.
    fn scores(&self, wanted: &[String]) -> Option<Vec<f64>> {
        let is_wanted = |code: &str| wanted.iter().any(|wanted| same_language(wanted, code));
        let (ours, others): (Vec<_>, Vec<_>) = self.languages().partition(|(code, _)| is_wanted(code));
        if ours.is_empty() || others.is_empty() {
            return None;
        }
        let frequency = |(code, sum): &(&str, u64), id: u32| {
            let count = self
                .languages
                .get(*code)
                .and_then(|counts| counts.get(&id))
                .copied()
                .unwrap_or(0);
            (1.0 - UNIFORM) * count as f64 / (*sum).max(1) as f64 + UNIFORM / self.vocabulary as f64
        };
        let score = |id: u32| {
            let mean = ours.iter().map(|language| frequency(language, id)).sum::<f64>() / ours.len() as f64;
            let other = others
                .iter()
                .map(|language| frequency(language, id))
                .fold(0.0, f64::max);
            (mean / other).ln().min(0.0)
        };
        Some((0..self.vocabulary as u32).map(score).collect())
    }
}

fn digest(tokenizer: &Tokenizer) -> String {
    blake3::hash(tokenizer.bytes()).to_hex().to_string()
}

/// Codes of languages in a list apart by commas; `auto` and nothing are none.
///
/// # Errors
/// What is not a code of a language.
pub fn parse_languages(text: &str) -> std::result::Result<Vec<String>, String> {
    let mut languages: Vec<String> = Vec::new();
    for code in text
        .split(',')
        .map(str::trim)
        .filter(|code| !code.is_empty() && *code != "auto")
    {
        if !is_language(code) {
            let shown: String = code.chars().filter(|c| !c.is_control()).take(40).collect();
            return Err(format!(
                "`{shown}` is not a code of a language, such as `fr` or `pt-BR`"
            ));
        }
        if !languages.iter().any(|known| known == code) {
            languages.push(code.to_owned());
        }
    }
    match languages.len() {
        0..=20 => Ok(languages),
        more => Err(format!("{more} languages are more than 20")),
    }
}

/// Scores to be added to those of pieces, for [`flow_model::fusion::Fusion::set_prior`], and what has no effect.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LanguagePrior {
    /// Of each piece, at most 0; empty where nothing follows from the languages.
    pub scores: Vec<f32>,
    pub notes: Vec<String>,
}

impl LanguagePrior {
    /// For text in these languages:
    ///
    /// - Pieces with letters of other scripts are impossible, where the scripts of all languages are known and the vocabulary has
    ///   letters of theirs.
    /// - Tags of other languages are impossible, where the vocabulary has a tag of one of these.
    /// - By `counts`, which come with a factor, pieces are less probable as they are rarer in texts of these languages than in those
    ///   of another one.
    pub fn of(tokenizer: &Tokenizer, languages: &[String], counts: Option<(&LanguageCounts, f64)>) -> Self {
        let pieces = tokenizer.pieces();
        let mut prior = Self::default();
        if languages.is_empty() {
            return prior;
        }
        let named = languages.join(", ");
        let tag = |piece: &str| match split_tag(piece.trim_start_matches(SPACE)) {
            (Some(tag), "") if is_language(tag) => Some(tag.to_owned()),
            _ => None,
        };
        let tags: Vec<Option<String>> = pieces.iter().map(|piece| tag(piece)).collect();
        let is_wanted = |tag: &str| languages.iter().any(|wanted| same_language(wanted, tag));
        let has_tag = tags.iter().flatten().any(|tag| is_wanted(tag));
        let is_untagged = |wanted: &&str| !tags.iter().flatten().any(|tag| same_language(wanted, tag));
        let untagged: Vec<&str> = languages.iter().map(String::as_str).filter(is_untagged).collect();
        if !untagged.is_empty() && tags.iter().any(Option::is_some) {
            let named = untagged.join(", ");
            prior
                .notes
                .push(format!("the model was not made for {named}: it has no tag of it"));
        }
        let scripts = prior.scripts(languages);
        let is_special = |piece: &str| (piece.starts_with('<') && piece.ends_with('>')) || piece.is_empty();
        let of_pieces: Vec<Vec<Script>> = pieces
            .iter()
            .map(|piece| match is_special(piece) {
                true => Vec::new(),
                false => scripts_of_text(piece),
            })
            .collect();
        let writes = |scripts: &[Script]| of_pieces.iter().flatten().any(|script| scripts.contains(script));
        let scripts = scripts.filter(|scripts| {
            let has_letters = writes(scripts);
            if !has_letters {
                prior.notes.push(format!(
                    "the model has no letters of {named}, which therefore has no effect"
                ));
            }
            has_letters
        });
        let frequencies = counts.and_then(|(counts, weight)| {
            let scores = counts.scores(languages);
            if scores.is_none() {
                prior.notes.push(format!(
                    "the texts of `language_prior` do not tell {named} from other languages"
                ));
            }
            scores.map(|scores| (scores, weight))
        });
        let scores = (0..pieces.len()).map(|id| match &tags[id] {
            Some(tag) if has_tag && !is_wanted(tag) => f32::NEG_INFINITY,
            Some(_) => 0.0,
            None => {
                let foreign = |scripts: &Vec<Script>| of_pieces[id].iter().any(|script| !scripts.contains(script));
                if scripts.as_ref().is_some_and(foreign) {
                    return f32::NEG_INFINITY;
                }
                let score = frequencies.as_ref().map_or(0.0, |(scores, weight)| weight * scores[id]);
                score.max(LEAST_SCORE) as f32
            }
        });
        let scores: Vec<f32> = scores.collect();
        if scores.iter().any(|score| *score != 0.0) && scores.iter().any(|score| *score > f32::NEG_INFINITY) {
            prior.scores = scores;
        }
        prior
    }

    /// The scripts of all of the languages; none where those of one are not known.
    fn scripts(&mut self, languages: &[String]) -> Option<Vec<Script>> {
        let is_unknown = |code: &&str| scripts_of_language(code).is_none();
        let unknown: Vec<&str> = languages.iter().map(String::as_str).filter(is_unknown).collect();
        if !unknown.is_empty() {
            let named = unknown.join(", ");
            self.notes.push(format!(
                "the script of {named} is not known, so that no letters are left out"
            ));
            return None;
        }
        let found: Option<Vec<Vec<Script>>> = languages.iter().map(|code| scripts_of_language(code)).collect();
        found.map(|scripts| scripts.concat())
    }
}

#[cfg(test)]
mod tests {
    use flow_model::checkpoint::OpenModel;

    use super::*;

    fn tokenizer() -> Tokenizer {
        let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/small.nemo");
        Tokenizer::from_bytes(&OpenModel::open(&small).unwrap().tokenizer.unwrap()).unwrap()
    }

    fn codes(codes: &[&str]) -> Vec<String> {
        codes.iter().map(|code| (*code).to_owned()).collect()
    }

    #[test]
    fn other_scripts_and_tags_are_impossible() {
        let tokenizer = tokenizer();
        let prior = LanguagePrior::of(&tokenizer, &codes(&["hi"]), None);
        assert_eq!(prior.notes, [""; 0]);
        let score = |piece: &str| prior.scores[tokenizer.id(piece).unwrap() as usize];
        assert_eq!((score("<|hi|>"), score("<|mr|>")), (0.0, f32::NEG_INFINITY));
        assert_eq!((score("ार"), score("te"), score("7")), (0.0, f32::NEG_INFINITY, 0.0));
        let both = LanguagePrior::of(&tokenizer, &codes(&["hi", "en-IN"]), None);
        assert_eq!(both.scores[tokenizer.id("te").unwrap() as usize], 0.0);
        // Nothing is known, or nothing follows.
        let greek = LanguagePrior::of(&tokenizer, &codes(&["el"]), None);
        assert!(greek.scores.is_empty() && greek.notes.len() == 2, "{greek:?}");
        let unknown = LanguagePrior::of(&tokenizer, &codes(&["xx"]), None);
        assert!(unknown.scores.is_empty() && unknown.notes.len() == 2, "{unknown:?}");
        let one_unknown = LanguagePrior::of(&tokenizer, &codes(&["hi", "xx"]), None).notes;
        assert_eq!(one_unknown.len(), 2, "{one_unknown:?}");
        assert!(
            one_unknown
                .iter()
                .all(|note| note.contains("xx") && !note.contains("hi")),
            "{one_unknown:?}"
        );
        assert_eq!(LanguagePrior::of(&tokenizer, &[], None), LanguagePrior::default());
    }

    #[test]
    fn pieces_of_other_languages_are_less_probable() {
        let tokenizer = tokenizer();
        let mut counts = LanguageCounts::new(&tokenizer);
        let [first, second] = ["ार", "ीस"].map(|piece| tokenizer.id(piece).unwrap());
        counts.add("hi", &[first, first, first, second]);
        counts.add("mr", &[first, second, second, second]);
        let scores = |wanted: &[&str], weight| {
            let prior = LanguagePrior::of(&tokenizer, &codes(wanted), Some((&counts, weight)));
            (prior.scores[first as usize], prior.scores[second as usize], prior.notes)
        };
        let third = (1.0f32 / 3.0).ln();
        let (common, rare, _) = scores(&["hi"], 1.0);
        assert!(common == 0.0 && (rare - third).abs() < 1e-2, "{rare}");
        let (rare, common, _) = scores(&["mr-IN"], 2.0);
        assert!(common == 0.0 && (rare - 2.0 * third).abs() < 2e-2, "{rare}");
        // There is nothing to compare with.
        assert_eq!(scores(&["hi", "mr"], 1.0).2.len(), 1);
    }

    #[test]
    fn files_are_read_back_and_checked() {
        let tokenizer = tokenizer();
        let mut counts = LanguageCounts::new(&tokenizer);
        counts.add("hi", &[3, 3, 4]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("counts.json");
        let good = String::from_utf8(counts.to_json().unwrap()).unwrap();
        std::fs::write(&path, &good).unwrap();
        assert_eq!(LanguageCounts::read(&path, &tokenizer).unwrap(), counts);
        for wrong in [
            String::new(),
            "[]".to_owned(),
            good.replace("\"version\":1", "\"version\":2"),
            good.replace("\"4\":", "\"40000\":"),
            good.replace("\"4\":", "\"-4\":"),
            good.replace("\"hi\"", "\"hindi\""),
            good.replace("{\"3\":2,\"4\":1}", "{}"),
            good.replace(&digest(&tokenizer), "00"),
            good[..good.len() / 2].to_owned(),
        ] {
            std::fs::write(&path, &wrong).unwrap();
            let error = LanguageCounts::read(&path, &tokenizer).unwrap_err().to_string();
            assert!(error.contains("counts.json"), "{error}");
        }
        assert!(LanguageCounts::read(folder.path(), &tokenizer).is_err());
    }

    #[test]
    fn lists_of_languages_are_checked() {
        assert_eq!(parse_languages(" fr, pt-BR,fr,").unwrap(), ["fr", "pt-BR"]);
        assert_eq!(parse_languages("auto").unwrap(), [""; 0]);
        assert!(parse_languages("english").unwrap_err().contains("`english`"));
        let many: Vec<String> = (b'a'..=b'z').map(|c| format!("a{}", c as char)).collect();
        assert!(parse_languages(&many.join(",")).is_err());
    }
}
