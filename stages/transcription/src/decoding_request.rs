//! What a request says of how its recording is decoded: phrases that are probable, the languages that are spoken, and how its numbers and
//! fillers are written.

use flow_model::decoding::{DecodingOptions, DecodingSettings};
use flow_model::fusion::parse_phrases;
use flow_model::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};

use crate::language_prior::{LanguageCounts, LanguagePrior};
use crate::text_style::{FillerUse, NumberStyle};
use crate::{Result, TranscriptionError};

/// Most phrases of a request.
const MOST_PHRASES: usize = 1000;
/// Most bytes of all of them.
const MOST_BYTES: usize = 64 << 10;
/// A part of a prompt that has more words is a sentence, and no phrase.
const LONGEST_PHRASE: usize = 6;
/// Most phrases without effect that are named.
const MOST_NAMED: usize = 5;

/// What a request says of how its recording is decoded. By default nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DecodingRequest {
    /// Phrases to boost.
    pub phrases: Vec<String>,
    /// The weight of their scores, from 0 to 100; none for the usual one.
    pub boost_weight: Option<f64>,
    /// Codes of the languages that are spoken; empty where nobody says.
    pub languages: Vec<String>,
    /// How numbers are written, and what is done about fillers ([`crate::text_style`]); none where nobody says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numbers: Option<NumberStyle>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fillers: Option<FillerUse>,
}

impl DecodingRequest {
    /// # Errors
    /// What is too much, or out of range: the field, and why.
    pub fn check(&self) -> std::result::Result<(), (&'static str, String)> {
        let bytes = self.phrases.iter().map(String::len).sum::<usize>();
        if self.phrases.len() > MOST_PHRASES || bytes > MOST_BYTES {
            let why = format!("there are more than {MOST_PHRASES} phrases, or more than {MOST_BYTES} bytes of them");
            return Err(("phrases", why));
        }
        match self.boost_weight {
            Some(weight) if !(0.0..=100.0).contains(&weight) => {
                Err(("boost_weight", format!("it is {weight}; it must be from 0 to 100")))
            }
            _ => Ok(()),
        }
    }

    /// These settings with what is asked for, and what of that has no effect. `counts`: those of a model, with their weight.
    /// `takes_phrases`: whether the search of the head that decodes can be boosted.
    ///
    /// # Errors
    /// If it does not fit the settings.
    pub(crate) fn applied(
        &self,
        usual: &DecodingSettings,
        tokenizer: &Tokenizer,
        counts: Option<(&LanguageCounts, f64)>,
        takes_phrases: bool,
    ) -> Result<(DecodingSettings, Vec<String>)> {
        self.check()
            .map_err(|(field, why)| TranscriptionError::Input(format!("{field}: {why}")))?;
        let mut settings = usual.clone();
        let (mut notes, mut of_languages) = (Vec::new(), Vec::new());
        if !self.languages.is_empty() {
            let prior = LanguagePrior::of(tokenizer, &self.languages, counts);
            notes = prior.notes;
            of_languages = prior.scores.clone();
            settings.fusion.set_prior(prior.scores)?;
        }
        let prior = of_languages;
        if !self.phrases.is_empty() {
            // A line break or a tab would be another phrase, or its score.
            let plain = |phrase: &String| phrase.split_whitespace().collect::<Vec<_>>().join(" ");
            // What is invisible has no token.
            let (lines, invisible): (Vec<String>, Vec<String>) =
                (self.phrases.iter().map(plain)).partition(|phrase| phrase.chars().any(char::is_alphanumeric));
            if !invisible.is_empty() {
                notes.push(format!("{} not boosted: no letters", phrases_are(invisible.len())));
            }
            let found = parse_phrases(&lines.join("\n"), tokenizer).map_err(TranscriptionError::Input)?;
            if !found.left_out.is_empty() {
                notes.push(format!(
                    "{} not boosted, as the model does not know all of the characters: {}",
                    phrases_are(found.left_out.len()),
                    named(found.left_out.iter().map(|(_, phrase)| phrase.as_str()))
                ));
            }
            // The prior makes what has other letters impossible, boosted or not.
            let is_impossible = |phrase: &&&str| {
                let tokens = tokenizer.encode(phrase);
                let score = |id: &u32| prior.get(*id as usize).copied().unwrap_or(0.0);
                tokens
                    .iter()
                    .any(|id| *id != tokenizer.unknown_id() && score(id) == f32::NEG_INFINITY)
            };
            let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
            let impossible: Vec<&str> = lines.iter().filter(is_impossible).copied().collect();
            if !impossible.is_empty() {
                notes.push(format!(
                    "{} boosted without effect, as {} is written in another script: {}",
                    phrases_are(impossible.len()),
                    self.languages.join(", "),
                    named(impossible.into_iter())
                ));
            }
            if !takes_phrases {
                notes.push(
                    "phrases are not boosted: a cache-aware model is decoded with its CTC head frame by frame"
                        .to_owned(),
                );
            } else if !found.phrases.is_empty() {
                let weight = self.boost_weight.unwrap_or(DecodingOptions::default().boost_weight);
                settings.boost(&found.phrases, weight, tokenizer)?;
            }
        }
        Ok((settings, notes))
    }
}

/// The beginning of a note on so many phrases.
fn phrases_are(count: usize) -> String {
    match count {
        1 => "1 phrase is".to_owned(),
        count => format!("{count} phrases are"),
    }
}

/// The first of these phrases, and that there are more.
fn named<'p>(phrases: impl ExactSizeIterator<Item = &'p str>) -> String {
    let more = phrases.len() > MOST_NAMED;
    let first: Vec<String> = phrases.take(MOST_NAMED).map(|phrase| format!("`{phrase}`")).collect();
    first.join(", ") + if more { ", ..." } else { "" }
}

/// The phrases of a prompt as programs write them for Whisper: what is between commas, colons, semicolons, line breaks and the ends
/// of sentences, up to `LONGEST_PHRASE` words. Longer parts are sentences, which show a style that a transducer does not follow.
/// Each comes once.
pub fn phrases_of_prompt(prompt: &str) -> Vec<String> {
    let parts = prompt.split([
        ',', ';', ':', '!', '?', '\n', '\r', '\t', '、', '，', '。', '।', '；', '：',
    ]);
    let mut phrases: Vec<String> = Vec::new();
    for part in parts.flat_map(|part| part.split(". ")) {
        let quotes = |c: char| c.is_whitespace() || matches!(c, '"' | '“' | '”' | '„' | '«' | '»' | '(' | ')');
        let phrase = part.trim_matches(quotes).trim_end_matches('.');
        let has_letters = phrase.chars().any(char::is_alphanumeric);
        let is_short = phrase.split_whitespace().count() <= LONGEST_PHRASE;
        if has_letters && is_short && !phrases.iter().any(|known| known == phrase) {
            phrases.push(phrase.to_owned());
        }
    }
    phrases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_gives_its_names() {
        let prompt = "The following conversation is a lecture about the recent developments around OpenAI. Names: \
                      ZyntriQix, Digique Plus,  \"CynapseFive\"; Ada Lovelace.\nDigique Plus, ... !";
        assert_eq!(
            phrases_of_prompt(prompt),
            ["Names", "ZyntriQix", "Digique Plus", "CynapseFive", "Ada Lovelace"]
        );
        assert_eq!(phrases_of_prompt(" \n,;. "), [""; 0]);
        assert_eq!(phrases_of_prompt("東京、大阪。"), ["東京", "大阪"]);
    }

    /// Each phrase that cannot be written is named, and the reason told.
    #[test]
    fn phrases_without_effect_are_told() {
        let bytes = flow_model::checkpoint::OpenModel::open(&crate::test_data::bundled_model())
            .unwrap()
            .tokenizer
            .unwrap();
        let tokenizer = Tokenizer::from_bytes(&bytes).unwrap();
        let notes = |phrases: &[&str], languages: &[&str]| {
            let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
            let request = DecodingRequest {
                phrases: owned(phrases),
                languages: owned(languages),
                ..DecodingRequest::default()
            };
            request
                .applied(&DecodingSettings::default(), &tokenizer, None, true)
                .unwrap()
                .1
        };
        assert_eq!(notes(&["teacher", "शिक्षक"], &[]), [""; 0]);
        assert_eq!(
            notes(&["teacher", "शिक्षक", "\u{4e2d}", "..."], &["hi"]),
            [
                "1 phrase is not boosted: no letters",
                "1 phrase is not boosted, as the model does not know all of the characters: `\u{4e2d}`",
                "1 phrase is boosted without effect, as hi is written in another script: `teacher`",
            ]
        );
    }

    #[test]
    fn requests_are_bounded() {
        let phrases = |phrases: Vec<String>| DecodingRequest {
            phrases,
            ..DecodingRequest::default()
        };
        assert_eq!(phrases(vec!["a".to_owned(); MOST_PHRASES]).check(), Ok(()));
        assert_eq!(
            phrases(vec!["a".to_owned(); MOST_PHRASES + 1]).check().unwrap_err().0,
            "phrases"
        );
        assert_eq!(
            phrases(vec!["a".repeat(MOST_BYTES + 1)]).check().unwrap_err().0,
            "phrases"
        );
        for weight in [-1.0, 101.0, f64::NAN, f64::INFINITY] {
            let request = DecodingRequest {
                boost_weight: Some(weight),
                ..DecodingRequest::default()
            };
            assert_eq!(request.check().unwrap_err().0, "boost_weight");
        }
    }
}
