//! PLACEHOLDER: the types of the diarizer, so that stages compile before it is there.

use crate::clustering::Clusters;
use crate::error::{Error, Result};
use crate::turns::Turn;

/// How recordings are diarized.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DiarizationSettings {
    pub clusters: Clusters,
    pub clustering_threshold: f64,
    pub min_duration_on: f64,
    pub min_duration_off: f64,
}

impl Default for DiarizationSettings {
    fn default() -> Self {
        Self {
            clusters: Clusters::default(),
            clustering_threshold: 0.7,
            min_duration_on: 0.0,
            min_duration_off: 0.0,
        }
    }
}

/// A speaker of a recording.
#[derive(Debug, Clone, PartialEq)]
pub struct Speaker {
    pub name: String,
    pub embedding: Vec<f32>,
    pub seconds: f64,
}

/// Who speaks when in a recording.
#[derive(Debug, Clone, PartialEq)]
pub struct Diarized {
    pub turns: Vec<Turn>,
    pub exclusive: Vec<Turn>,
    pub speakers: Vec<Speaker>,
}

/// Speakers whose names are known, by their embeddings.
#[derive(Debug, Clone)]
pub struct KnownSpeakers {
    pub speakers: Vec<(String, Vec<f32>)>,
}

impl KnownSpeakers {
    pub fn new(speakers: Vec<(String, Vec<f32>)>) -> Result<Self> {
        Ok(Self { speakers })
    }

    pub fn name(&self, _: Diarized, _: f64) -> Result<Diarized> {
        Err(Error::Input("PLACEHOLDER".to_owned()))
    }
}

/// Finds who speaks when.
pub struct Diarizer;

impl Diarizer {
    pub fn bundled() -> Result<Self> {
        Ok(Self)
    }

    pub fn diarize(&self, _: &[f32], _: &DiarizationSettings, _: &dyn Fn() -> bool) -> Result<Option<Diarized>> {
        Err(Error::Input("PLACEHOLDER".to_owned()))
    }
}
