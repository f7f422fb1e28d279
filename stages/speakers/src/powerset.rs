//! Sets of speakers as classes: of `speakers` speakers all sets of at most `largest`, the small ones first, those of one
//! size in lexicographic order. As pyannote.audio's `Powerset`.

use crate::error::{Error, Result};

/// Most sets that a network may have as classes.
const MOST_SETS: usize = 4096;

/// The sets, as classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Powerset {
    speakers: usize,
    /// (sets, speakers), 0 or 1.
    mapping: Vec<u8>,
}

impl Powerset {
    /// No speakers, or more than 4096 sets, are an error.
    pub fn new(speakers: usize, largest: usize) -> Result<Self> {
        if speakers == 0 {
            return Err(Error::Input("sets of speakers need a speaker".into()));
        }
        let mut mapping = Vec::new();
        for size in 0..=largest.min(speakers) {
            let mut members: Vec<usize> = (0..size).collect();
            loop {
                if mapping.len() >= MOST_SETS * speakers {
                    return Err(Error::Input(format!(
                        "sets of up to {largest} of {speakers} speakers are more than {MOST_SETS}"
                    )));
                }
                mapping.extend((0..speakers).map(|speaker| u8::from(members.contains(&speaker))));
                // The last member that can move on, moves on, and those after it follow.
                let Some(place) = (0..size).rev().find(|&place| members[place] < speakers - size + place) else {
                    break;
                };
                let next = members[place] + 1;
                for (member, value) in members[place..].iter_mut().zip(next..) {
                    *member = value;
                }
            }
        }
        Ok(Self { speakers, mapping })
    }

    /// Number of sets.
    pub fn sets(&self) -> usize {
        self.mapping.len() / self.speakers
    }

    /// Who is in each set: (sets, speakers), 0 or 1.
    pub fn mapping(&self) -> &[u8] {
        &self.mapping
    }

    /// The speakers of the likeliest set of each frame: (frames, sets) to (frames, speakers), 0 or 1. Of equal ones the
    /// first; NaN is never the likeliest.
    pub fn decode(&self, scores: &[f32]) -> Result<Vec<u8>> {
        let frames = self.frames(scores.len(), self.sets())?;
        let mut active = Vec::with_capacity(frames * self.speakers);
        for scores in scores.chunks_exact(self.sets()) {
            active.extend_from_slice(self.set(likeliest(scores.iter().copied())));
        }
        Ok(active)
    }

    fn set(&self, set: usize) -> &[u8] {
        &self.mapping[set * self.speakers..(set + 1) * self.speakers]
    }

    fn frames(&self, values: usize, of: usize) -> Result<usize> {
        if values.is_multiple_of(of) {
            return Ok(values / of);
        }
        Err(Error::Input(format!(
            "{values} values do not divide into frames of {of}"
        )))
    }
}

/// Place of the first largest value; 0 if all are NaN.
fn likeliest(values: impl Iterator<Item = f32>) -> usize {
    let mut best = (0, f32::NEG_INFINITY);
    for (place, value) in values.enumerate() {
        if value > best.1 {
            best = (place, value);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden;

    fn golden() -> golden::Tensors {
        golden::Tensors::load("f_powerset.safetensors")
    }

    #[test]
    fn mappings_are_those_of_the_original() {
        let tensors = golden();
        let mut compared = 0;
        for name in tensors.names() {
            let Some(sizes) = name.strip_prefix("mapping_") else {
                continue;
            };
            let (speakers, largest) = sizes.split_once('_').unwrap();
            let powerset = Powerset::new(speakers.parse().unwrap(), largest.parse().unwrap()).unwrap();
            let (shape, expected) = tensors.bytes(&name);
            assert_eq!(
                (powerset.sets(), powerset.mapping()),
                (shape[0], &expected[..]),
                "{name}"
            );
            compared += 1;
        }
        assert!(compared > 0);
    }

    #[test]
    fn decoding_is_that_of_the_original() {
        let tensors = golden();
        let (shape, scores) = tensors.floats("logprob");
        let (speakers, hard) = tensors.bytes("hard");
        let of_size = |largest| Powerset::new(speakers[2], largest).unwrap();
        let powerset = (1..=speakers[2])
            .map(of_size)
            .find(|of_size| of_size.sets() == shape[2]);
        let powerset = powerset.expect("a size of sets");
        assert_eq!(powerset.decode(&scores).unwrap(), hard);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(Powerset::new(0, 2).is_err());
        assert!(Powerset::new(40, 20).is_err());
        assert_eq!(Powerset::new(2, 9).unwrap().sets(), 4);
        let powerset = Powerset::new(3, 2).unwrap();
        assert!(powerset.decode(&[0.0; 8]).is_err());
        // NaN is never the largest.
        assert_eq!(powerset.decode(&[f32::NAN; 7]).unwrap(), [0, 0, 0]);
    }
}
