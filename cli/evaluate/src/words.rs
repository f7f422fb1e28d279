//! Errors of words with speakers.

use std::ops::AddAssign;

use flow_evaluation::cpwer::{CpErrors, cp_errors};
use flow_evaluation::normalize::Normalizer;
use flow_evaluation::utterance::{SpeakerWords, Utterance, within};
use flow_evaluation::wder::{WordSpeakerErrors, word_speaker_errors};
use serde_json::{Map, Value, json};

use crate::diarization::cannot_be_scored;
use flow_cli::failure::Failure;

/// The errors of a recording, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WordErrors {
    pub cp: CpErrors,
    pub speakers: WordSpeakerErrors,
}

impl AddAssign for WordErrors {
    fn add_assign(&mut self, other: Self) {
        self.cp += other.cp;
        self.speakers += other.speakers;
    }
}

impl WordErrors {
    /// None without words of the reference.
    pub fn cpwer(&self) -> Option<f64> {
        Some(self.cp.words.rate()).filter(|rate| rate.is_finite())
    }

    /// None without aligned words.
    pub fn wder(&self) -> Option<f64> {
        self.speakers.rate()
    }

    /// Rates as shares, all else as counts of words and speakers.
    pub fn figures(&self) -> Map<String, Value> {
        let words = &self.cp.words;
        let counts = json!({
            "total": words.units,
            "insertions": words.insertions,
            "deletions": words.deletions,
            "substitutions": words.substitutions,
            "speakers": self.cp.speakers,
            "missed_speakers": self.cp.missed_speakers,
            "extra_speakers": self.cp.extra_speakers,
            "aligned": self.speakers.aligned,
            "wrong_speaker": self.speakers.wrong_speaker,
        });
        let figures = [
            ("cpwer", json!(self.cpwer())),
            ("wder", json!(self.wder())),
            ("words", counts),
        ];
        figures
            .map(|(name, value)| (name.to_owned(), value))
            .into_iter()
            .collect()
    }
}

/// Scores the utterances of a recording: reference, then hypothesis. With `parts`, those that have time in common
/// with one of them.
pub fn score(
    name: &str,
    sides: [&[Utterance]; 2],
    parts: Option<&[(f64, f64)]>,
    normalizer: &Normalizer,
) -> Result<WordErrors, Failure> {
    let [reference, hypothesis] = sides.map(|utterances| match parts {
        Some(parts) => SpeakerWords::new(&within(utterances, parts), normalizer),
        None => SpeakerWords::new(utterances, normalizer),
    });
    let wrong = |error| cannot_be_scored(name, &error);
    let cp = cp_errors(&reference, &hypothesis).map_err(wrong)?;
    let speakers = word_speaker_errors(&reference, &hypothesis).map_err(wrong)?;
    Ok(WordErrors { cp, speakers })
}
