//! The steps after the networks: from the activity in each chunk, and the embeddings, to turns.

use super::{DiarizationSettings, Diarized, GEOMETRY, Speaker};
use crate::chunks::{Segmentations, speaker_count};
use crate::clustering::agglomerative::Agglomerative;
use crate::clustering::assign::Assignment;
use crate::clustering::plda::Plda;
use crate::clustering::vbx::Vbx;
use crate::clustering::{Clustering, Embeddings, training_places};
use crate::error::Result;
use crate::reconstruct::{Candidates, reconstruct};
use crate::turns::{Thresholds, Turn};

/// The clustering algorithm, with the threshold of the settings.
#[derive(Debug, Clone)]
pub enum Method {
    /// [`Agglomerative`] with these.
    Agglomerative {
        min_cluster_size: usize,
        assignment: Assignment,
    },
    /// [`Vbx`] with these.
    Vbx { fa: f64, fb: f64, plda: Box<Plda> },
}

/// Settings of the steps after the networks.
#[derive(Debug, Clone)]
pub struct Steps {
    pub method: Method,
    /// Exactly as pyannote. Otherwise these do not apply:
    ///
    /// - speakers are active who are in no chunk, where chunks together count more speakers than there are clusters;
    /// - all are one speaker where no one speaks alone for two seconds of a chunk: clusters are then made of what there is;
    /// - filled gaps between exclusive turns overlap with those of others.
    pub as_pyannote: bool,
}

impl Default for Steps {
    /// For CAM++: clusters of at least 12 embeddings, speakers of a chunk in different ones.
    fn default() -> Self {
        Self {
            method: Method::Agglomerative {
                min_cluster_size: 12,
                assignment: Assignment::Constrained,
            },
            as_pyannote: false,
        }
    }
}

/// Turns by the numbers of clusters.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Found {
    pub turns: Vec<Turn<usize>>,
    pub exclusive: Vec<Turn<usize>>,
    /// Embedding of each cluster.
    pub voices: Vec<Vec<f32>>,
    pub dimension: usize,
}

impl Steps {
    pub(super) fn apply(
        &self,
        segmentations: &Segmentations,
        embeddings: &Embeddings,
        settings: &DiarizationSettings,
    ) -> Result<Found> {
        let (_, most) = settings.clusters.bounds()?;
        let count = speaker_count(segmentations, &GEOMETRY)?;
        let dimension = embeddings.dimension();
        if count.iter().all(|count| *count == 0) {
            return Ok(Found {
                dimension,
                ..Found::default()
            });
        }
        let clustering = self.cluster(segmentations, embeddings, settings)?;
        let clustering = clustering.without_silent(segmentations);
        let thresholds = Thresholds {
            min_duration_on: settings.min_duration_on,
            min_duration_off: settings.min_duration_off,
            ..Thresholds::default()
        };
        let candidates = match self.as_pyannote {
            true => Candidates::All,
            false => Candidates::Voted,
        };
        let turns = |most: usize, thresholds: &Thresholds| {
            let count: Vec<u8> = count.iter().map(|&count| usize::from(count).min(most) as u8).collect();
            reconstruct(segmentations, &clustering.clusters, &count, &GEOMETRY, candidates)?
                .turns(&GEOMETRY, thresholds)
        };
        let exclusive = match self.as_pyannote {
            true => turns(1, &thresholds)?,
            false => {
                let mut exclusive = joined(turns(1, &Thresholds::default())?, settings.min_duration_off);
                exclusive.retain(|turn| turn.duration() >= settings.min_duration_on);
                exclusive
            }
        };
        Ok(Found {
            turns: turns(most, &thresholds)?,
            exclusive,
            voices: voices(embeddings, &clustering),
            dimension,
        })
    }

    fn cluster(
        &self,
        segmentations: &Segmentations,
        embeddings: &Embeddings,
        settings: &DiarizationSettings,
    ) -> Result<Clustering> {
        let mut training = training_places(embeddings, segmentations)?;
        if training.is_empty() && !self.as_pyannote {
            training = (0..embeddings.count())
                .filter(|&place| embeddings.get(place).is_some())
                .collect();
        }
        let threshold = settings.clustering_threshold;
        match self.method {
            Method::Agglomerative {
                min_cluster_size,
                assignment,
            } => {
                let clustering = Agglomerative {
                    threshold,
                    min_cluster_size,
                    assignment,
                };
                clustering.cluster(embeddings, &training, &settings.clusters)
            }
            Method::Vbx { fa, fb, ref plda } => {
                let clustering = Vbx { threshold, fa, fb };
                clustering.cluster(embeddings, segmentations, &training, plda, &settings.clusters)
            }
        }
    }
}

/// Turns that do not overlap, in order, those of one speaker joined that have a gap shorter than `shortest` between them and
/// no one else in it.
fn joined(turns: Vec<Turn<usize>>, shortest: f64) -> Vec<Turn<usize>> {
    let mut joined: Vec<Turn<usize>> = Vec::with_capacity(turns.len());
    for turn in turns {
        match joined.last_mut() {
            Some(last) if last.speaker == turn.speaker && turn.start - last.end < shortest => last.end = turn.end,
            _ => joined.push(turn),
        }
    }
    joined
}

/// The embedding of each cluster: its centroid.
fn voices(embeddings: &Embeddings, clustering: &Clustering) -> Vec<Vec<f32>> {
    let voice = |centroid: &Vec<f64>| -> Vec<f32> {
        let mut voice: Vec<f32> = centroid.iter().map(|&value| value as f32).collect();
        voice.resize(embeddings.dimension(), 0.0);
        voice
    };
    clustering.centroids.iter().map(voice).collect()
}

impl Found {
    /// Speakers are numbered by their first turns.
    pub fn named(self) -> Diarized {
        let mut clusters: Vec<usize> = Vec::new();
        let mut seconds: Vec<f64> = Vec::new();
        for turn in &self.turns {
            let place = clusters.iter().position(|cluster| *cluster == turn.speaker);
            let place = place.unwrap_or_else(|| {
                clusters.push(turn.speaker);
                seconds.push(0.0);
                clusters.len() - 1
            });
            seconds[place] += turn.duration();
        }
        let name = |number: usize| format!("SPEAKER_{number:02}");
        let named = |turns: Vec<Turn<usize>>| -> Vec<Turn> {
            let turn = |turn: Turn<usize>| {
                let place = clusters.iter().position(|cluster| *cluster == turn.speaker)?;
                Some(Turn {
                    start: turn.start,
                    end: turn.end,
                    speaker: name(place),
                })
            };
            turns.into_iter().filter_map(turn).collect()
        };
        let speaker = |(number, (&cluster, &seconds)): (usize, (&usize, &f64))| Speaker {
            name: name(number),
            embedding: self
                .voices
                .get(cluster)
                .cloned()
                .unwrap_or_else(|| vec![0.0; self.dimension]),
            seconds,
        };
        let speakers = clusters.iter().zip(&seconds).enumerate().map(speaker).collect();
        let mut diarized = Diarized {
            turns: named(self.turns),
            exclusive: named(self.exclusive),
            speakers,
        };
        diarized.sort();
        diarized
    }
}

impl Diarized {
    /// Puts turns in order, after names have changed.
    pub(super) fn sort(&mut self) {
        crate::turns::sort(&mut self.turns);
        crate::turns::sort(&mut self.exclusive);
    }
}
