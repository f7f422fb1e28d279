//! Names speakers whose voices are known.

use flow_text::written_form::nfc;

use super::Diarized;
use crate::assignment::least_cost;
use crate::error::{Error, Result};

/// Voices with names.
#[derive(Debug, Clone, PartialEq)]
pub struct KnownSpeakers {
    voices: Vec<(String, Vec<f32>)>,
    threshold: f64,
}

impl KnownSpeakers {
    /// Least cosine for two voices to be of one person, for CAM++: 95 % of pairs of utterances of one speaker were
    /// above 0.58, 95 % of pairs of two speakers below 0.44.
    pub const THRESHOLD: f64 = 0.5;

    /// The error for a name that is invalid for a known speaker.
    pub fn fault_of_name(name: &str) -> Option<&'static str> {
        if name.trim().is_empty() {
            Some("has an empty name")
        } else if name.chars().any(char::is_control) {
            Some("has a name with control characters")
        } else if name.starts_with("SPEAKER_") || name == "UNKNOWN" {
            Some("has a name that unknown speakers have: SPEAKER_... and UNKNOWN")
        } else {
            None
        }
    }

    /// Names and embeddings, as [`Diarizer::voice`](super::Diarizer::voice) and
    /// [`Diarizer::diarize`](super::Diarizer::diarize) give them. A voice matches its nearest name if the cosine of
    /// both embeddings is at least `threshold`, from 0 to 1.
    ///
    /// # Errors
    /// If a name is empty, has control characters, comes twice, or is one of unknown speakers (`SPEAKER_00`, `UNKNOWN`), an embedding is zero or not
    /// finite or has another number of values than the first, or the threshold is out of range.
    pub fn new(voices: Vec<(String, Vec<f32>)>, threshold: f64) -> Result<Self> {
        if !(0.0..=1.0).contains(&threshold) {
            return Err(Error::Input(format!(
                "the threshold of known speakers is {threshold}; it is a cosine from 0 to 1"
            )));
        }
        for (number, (name, voice)) in voices.iter().enumerate() {
            let fault = if let Some(fault) = Self::fault_of_name(name) {
                fault
            } else if voices[..number].iter().any(|(other, _)| nfc(other) == nfc(name)) {
                "comes twice"
            } else if voice.len() != voices[0].1.len() {
                "has an embedding of another length than the first"
            } else if length(voice) == 0.0 || voice.iter().any(|value| !value.is_finite()) {
                "has an embedding that is zero or not finite"
            } else {
                continue;
            };
            return Err(Error::Input(format!("known speaker {name:?} {fault}")));
        }
        Ok(Self { voices, threshold })
    }

    /// # Errors
    /// If embeddings of so many values are not those of the networks that the voices are known by.
    pub(super) fn check_dimension(&self, dimension: usize) -> Result<()> {
        match self.voices.first() {
            Some((_, first)) if first.len() != dimension => Err(Error::Input(format!(
                "known speakers have embeddings of {} values, those of the recording {dimension}",
                first.len()
            ))),
            _ => Ok(()),
        }
    }

    /// The name of the nearest voice that is near enough, among those whose names are free.
    pub(super) fn nearest(&self, voice: &[f64], is_free: impl Fn(&str) -> bool) -> Option<&str> {
        let voice: Vec<f32> = voice.iter().map(|&value| value as f32).collect();
        let free = self.voices.iter().filter(|(name, _)| is_free(name));
        let near = free.map(|(name, known)| (name, cosine(&voice, known)));
        let near = near.filter(|(_, cosine)| *cosine >= self.threshold);
        near.max_by(|(_, a), (_, b)| a.total_cmp(b))
            .map(|(name, _)| name.as_str())
    }

    /// Gives the speakers who are known their names, each name once, so that the cosines have the greatest sum. The others
    /// keep theirs.
    ///
    /// # Errors
    /// If the embeddings have other lengths than the known ones: they are from other networks.
    pub fn name(&self, diarized: &mut Diarized) -> Result<()> {
        if self.voices.is_empty() {
            return Ok(());
        }
        for speaker in &diarized.speakers {
            self.check_dimension(speaker.embedding.len())?;
        }
        let cosines: Vec<f64> = diarized
            .speakers
            .iter()
            .flat_map(|speaker| self.voices.iter().map(|(_, voice)| cosine(&speaker.embedding, voice)))
            .collect();
        // Pairs below the threshold count as 0, so that they do not prevent others.
        let cost = |&cosine: &f64| if cosine >= self.threshold { -1e-9 - cosine } else { 0.0 };
        let costs: Vec<f64> = cosines.iter().map(cost).collect();
        let known = least_cost(&costs, self.voices.len())?;
        let mut names: Vec<(String, &str)> = Vec::new();
        for (number, speaker) in diarized.speakers.iter_mut().enumerate() {
            if let Some(voice) = known[number]
                && cosines[number * self.voices.len() + voice] >= self.threshold
            {
                let name = &self.voices[voice].0;
                names.push((std::mem::replace(&mut speaker.name, name.clone()), name));
            }
        }
        for turn in diarized.turns.iter_mut().chain(&mut diarized.exclusive) {
            if let Some((_, name)) = names.iter().find(|(before, _)| *before == turn.speaker) {
                turn.speaker = (*name).to_owned();
            }
        }
        diarized.sort();
        Ok(())
    }
}

fn length(a: &[f32]) -> f64 {
    a.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

/// 0 for a vector of zeros.
fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let lengths = length(a) * length(b);
    let product: f64 = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    if lengths > 0.0 { product / lengths } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::super::Speaker;
    use super::*;
    use crate::turns::Turn;

    fn diarized(voices: &[[f32; 2]]) -> Diarized {
        let name = |number: usize| format!("SPEAKER_{number:02}");
        let speaker = |(number, voice): (usize, &[f32; 2])| Speaker {
            name: name(number),
            embedding: voice.to_vec(),
            seconds: 1.0,
        };
        let turn = |number: usize| Turn {
            start: number as f64,
            end: number as f64 + 1.0,
            speaker: name(number),
        };
        let turns: Vec<Turn> = (0..voices.len()).map(turn).collect();
        Diarized {
            exclusive: turns.clone(),
            turns,
            speakers: voices.iter().enumerate().map(speaker).collect(),
        }
    }

    fn names(found: &Diarized) -> Vec<&str> {
        found.speakers.iter().map(|speaker| speaker.name.as_str()).collect()
    }

    #[test]
    fn each_name_is_given_once_to_who_is_near_enough() {
        let known = |voices: &[(&str, [f32; 2])], threshold| {
            let voices = voices.iter().map(|(name, voice)| ((*name).to_owned(), voice.to_vec()));
            KnownSpeakers::new(voices.collect(), threshold).unwrap()
        };
        // Both are nearest to Ann, and the second one nearer.
        let mut found = diarized(&[[2.0, 1.0], [3.0, 0.1], [0.0, 0.0]]);
        known(&[("Bo", [0.0, 1.0]), ("Ann", [1.0, 0.0])], 0.5)
            .name(&mut found)
            .unwrap();
        assert_eq!(names(&found), ["SPEAKER_00", "Ann", "SPEAKER_02"]);
        for turns in [&found.turns, &found.exclusive] {
            let speakers: Vec<&str> = turns.iter().map(|turn| turn.speaker.as_str()).collect();
            assert_eq!(speakers, ["SPEAKER_00", "Ann", "SPEAKER_02"]);
        }
        // With a lower threshold Bo is the first: together both fit best.
        let mut found = diarized(&[[2.0, 1.0], [3.0, 0.1]]);
        known(&[("Bo", [0.0, 1.0]), ("Ann", [1.0, 0.0])], 0.4)
            .name(&mut found)
            .unwrap();
        assert_eq!(names(&found), ["Bo", "Ann"]);
        let mut found = diarized(&[[1.0, 0.0]]);
        known(&[], 0.5).name(&mut found).unwrap();
        known(&[("Bo", [-1.0, 0.0])], 0.0).name(&mut found).unwrap();
        assert_eq!(names(&found), ["SPEAKER_00"]);
    }

    #[test]
    fn what_cannot_be_a_voice_is_refused_by_name() {
        let of = |voices: &[(&str, &[f32])]| {
            let voices = voices.iter().map(|(name, voice)| ((*name).to_owned(), voice.to_vec()));
            KnownSpeakers::new(voices.collect(), 0.5)
        };
        let bad: [&[(&str, &[f32])]; 8] = [
            &[("", &[1.0])],
            &[("Ann\u{1b}[2J", &[1.0])],
            &[("Ann\nBo", &[1.0])],
            &[("SPEAKER_01", &[1.0])],
            &[("Ann", &[1.0]), ("Ann", &[2.0])],
            &[("Ann", &[1.0]), ("Bo", &[2.0, 1.0])],
            &[("Ann", &[0.0])],
            &[("Ann", &[f32::NAN])],
        ];
        for voices in bad {
            let error = of(voices).unwrap_err().to_string();
            assert!(error.contains(&format!("{:?}", voices[voices.len() - 1].0)), "{error}");
            assert!(!error.contains(char::is_control), "{error:?}");
        }
        assert!(KnownSpeakers::new(Vec::new(), f64::NAN).is_err());
        let mut found = diarized(&[[1.0, 0.0]]);
        assert!(of(&[("Ann", &[1.0])]).unwrap().name(&mut found).is_err());
    }
}
