//! Diarization of a recording, from samples to labelled turns: chunks of 10 s, one each second; the activity of up to
//! three speakers in each frame of a chunk ([`SegmentationNetwork`]); an embedding of each of these
//! ([`EmbeddingNetwork`]); clusters of the embeddings, and turns ([`Steps`]). After pyannote.audio's
//! `SpeakerDiarization`, with another embedding network.

mod features;
mod known;
mod networks;
mod online;
mod steps;
#[cfg(test)]
mod tests;

use flow_kernels::threads::install;
use rayon::prelude::*;

pub use known::KnownSpeakers;
pub use networks::{Activities, EmbeddingNetwork, SegmentationNetwork};
pub use online::{Decided, OnlineDiarizer, OnlineSettings};
pub use steps::{Method, Steps};

use crate::campplus::CamPlusPlus;
use crate::chunks::{Geometry, Segmentations};
use crate::clustering::{Clusters, Embeddings};
use crate::error::{Error, Result};
use crate::fbank::BANDS;
use crate::pyannet::PyanNet;
use crate::turns::Turn;
use features::ChunkFeatures;

/// Sample rate of the input, in Hz.
pub const SAMPLE_RATE: u32 = 16_000;
/// Samples of a chunk, and from the start of one to that of the next, as [`GEOMETRY`] has them in seconds.
pub const CHUNK: usize = 160_000;
pub const CHUNK_STEP: usize = 16_000;
/// Where chunks and their frames lie.
pub const GEOMETRY: Geometry = Geometry::SEGMENTATION;

/// Chunks for each thread between two checks for cancellation.
const TOGETHER: usize = 4;

/// Settings of clustering and of turns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DiarizationSettings {
    /// The number of speakers, or limits of it.
    pub clusters: Clusters,
    /// Voices whose embeddings of length 1 are farther apart than this are different speakers: above 0; 2 is the most that
    /// vectors of length 1 can be apart.
    pub clustering_threshold: f64,
    /// Turns that are shorter are dropped, in seconds.
    pub min_duration_on: f64,
    /// Gaps between turns of a speaker that are shorter are filled, in seconds.
    pub min_duration_off: f64,
}

impl Default for DiarizationSettings {
    /// For the bundled networks. Between thresholds of 0.6 and 0.8 their results were the same on all recordings tried.
    fn default() -> Self {
        Self {
            clusters: Clusters::default(),
            clustering_threshold: 0.7,
            min_duration_on: 0.0,
            min_duration_off: 0.0,
        }
    }
}

impl DiarizationSettings {
    fn check(&self) -> Result<()> {
        self.clusters.bounds()?;
        if !(self.clustering_threshold.is_finite() && self.clustering_threshold > 0.0) {
            return Err(Error::Input(format!(
                "clustering_threshold is {}; it is a number above 0",
                self.clustering_threshold
            )));
        }
        for (name, value) in [
            ("min_duration_on", self.min_duration_on),
            ("min_duration_off", self.min_duration_off),
        ] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::Input(format!(
                    "{name} is {value}; it is a number of seconds from 0"
                )));
            }
        }
        Ok(())
    }
}

/// A voice of a recording.
#[derive(Debug, Clone, PartialEq)]
pub struct Speaker {
    /// `SPEAKER_00`, `SPEAKER_01`, ... in order of their first turns, or a name of [`KnownSpeakers`].
    pub name: String,
    /// Mean of the embeddings of its chunks: [`EmbeddingNetwork::dimension`] values of any length. Zeros if there was
    /// too little speech; with pyannote's steps, if the voice never speaks alone for two seconds of a chunk.
    pub embedding: Vec<f32>,
    /// Total duration of its turns, in seconds.
    pub seconds: f64,
}

/// A diarization. Times in seconds, within the recording.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Diarized {
    /// In order of start, end and name. Turns of different speakers may overlap.
    pub turns: Vec<Turn>,
    /// One speaker at a time: of several the one who is active in most chunks. For assigning words to speakers.
    pub exclusive: Vec<Turn>,
    /// Those who have turns, in order of their first ones.
    pub speakers: Vec<Speaker>,
}

/// Networks and the steps behind them.
pub struct Diarizer {
    segmentation: Box<dyn SegmentationNetwork>,
    embedding: Box<dyn EmbeddingNetwork>,
    steps: Steps,
}

impl std::fmt::Debug for Diarizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Diarizer")
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}

impl Diarizer {
    /// With the bundled networks: pyannote's segmentation-3.0 and 3D-Speaker's CAM++.
    pub fn bundled() -> Result<Self> {
        Self::new(
            Box::new(PyanNet::bundled()?),
            Box::new(CamPlusPlus::bundled()?),
            Steps::default(),
        )
    }

    /// # Errors
    /// If the segmentation network has no frames or no speakers, or the embeddings no values.
    pub fn new(
        segmentation: Box<dyn SegmentationNetwork>,
        embedding: Box<dyn EmbeddingNetwork>,
        steps: Steps,
    ) -> Result<Self> {
        if segmentation.frames() == 0 || segmentation.speakers() == 0 || embedding.dimension() == 0 {
            return Err(Error::Input(
                "networks of diarization need frames, speakers and values".into(),
            ));
        }
        Ok(Self {
            segmentation,
            embedding,
            steps,
        })
    }

    /// Values of the embedding of a voice.
    pub fn dimension(&self) -> usize {
        self.embedding.dimension()
    }

    /// Diarizes `samples` (mono, 16 kHz, in [-1, 1]). None if `cancelled` returns true, which is called between groups
    /// of chunks. The result is equal to the bit for any number of threads.
    ///
    /// Memory beside the samples: for each hour 6 MB of frames and 8 MB of embeddings, and some 200 MB while these are
    /// clustered.
    ///
    /// # Errors
    /// If a setting is out of range, or a sample is not finite or larger than 1e9.
    pub fn diarize(
        &self,
        samples: &[f32],
        settings: &DiarizationSettings,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Diarized>> {
        self.diarize_watched(samples, settings, &|_| cancelled())
    }

    /// [`diarize`](Self::diarize), where `cancelled` is told how many seconds of the recording the networks have heard: they take
    /// nearly all of the time.
    ///
    /// # Errors
    /// As [`diarize`](Self::diarize).
    pub fn diarize_watched(
        &self,
        samples: &[f32],
        settings: &DiarizationSettings,
        cancelled: &dyn Fn(f64) -> bool,
    ) -> Result<Option<Diarized>> {
        self.diarize_by(&self.steps, samples, settings, cancelled)
    }

    fn diarize_by(
        &self,
        steps: &Steps,
        samples: &[f32],
        settings: &DiarizationSettings,
        cancelled: &dyn Fn(f64) -> bool,
    ) -> Result<Option<Diarized>> {
        settings.check()?;
        let Some((activities, embeddings)) = self.networks(samples, cancelled)? else {
            return Ok(None);
        };
        let (frames, speakers) = (self.segmentation.frames(), self.segmentation.speakers());
        let segmentations = Segmentations::new(&activities, frames, speakers)?;
        let embeddings = Embeddings::new(&embeddings, speakers, self.embedding.dimension())?;
        let mut found = install(|| steps.apply(&segmentations, &embeddings, settings))?;
        let duration = samples.len() as f64 / f64::from(SAMPLE_RATE);
        if cancelled(duration) {
            return Ok(None);
        }
        for turns in [&mut found.turns, &mut found.exclusive] {
            // The last chunk may be filled up with zeros.
            turns.retain(|turn| turn.start < duration);
            turns.iter_mut().for_each(|turn| turn.end = turn.end.min(duration));
        }
        Ok(Some(found.named()))
    }

    /// The embedding of the only voice in `samples`, for [`KnownSpeakers`]; at least 2 s of speech are recommended.
    /// None if `cancelled`.
    ///
    /// # Errors
    /// As [`diarize`](Self::diarize), and if no speech is found.
    pub fn voice(&self, samples: &[f32], cancelled: &dyn Fn() -> bool) -> Result<Option<Vec<f32>>> {
        let settings = DiarizationSettings {
            clusters: Clusters {
                number: Some(1),
                ..Clusters::default()
            },
            ..DiarizationSettings::default()
        };
        // Not with pyannote's steps, which only give embeddings for long stretches of clean speech.
        let steps = Steps {
            as_pyannote: false,
            ..self.steps.clone()
        };
        let Some(diarized) = self.diarize_by(&steps, samples, &settings, &|_| cancelled())? else {
            return Ok(None);
        };
        let voice = diarized.speakers.into_iter().next().map(|speaker| speaker.embedding);
        match voice.filter(|voice| voice.iter().any(|value| *value != 0.0)) {
            Some(voice) => Ok(Some(voice)),
            None => Err(Error::Input(
                "no speech, or too little, is found in the recording; give 2 s or more of one voice".into(),
            )),
        }
    }

    /// The activity of each chunk, (chunks, frames, speakers), 0 or 1, and the embeddings, (chunks, speakers,
    /// dimension), NaN where there is none.
    fn networks(&self, samples: &[f32], cancelled: &dyn Fn(f64) -> bool) -> Result<Option<(Vec<u8>, Vec<f32>)>> {
        let (frames, speakers) = (self.segmentation.frames(), self.segmentation.speakers());
        let chunks = GEOMETRY.chunks(samples.len() as f64 / f64::from(SAMPLE_RATE));
        let mut activities = Vec::with_capacity(chunks * frames * speakers);
        let mut embeddings = Vec::with_capacity(chunks * speakers * self.embedding.dimension());
        let mut features = ChunkFeatures::new(self.embedding.fbank(), samples);
        let mut segmented = self.segmentation.recording(samples)?;
        let together = TOGETHER * install(rayon::current_num_threads);
        for first in (0..chunks).step_by(together) {
            let start = activities.len();
            for _ in first..chunks.min(first + together) {
                if cancelled((first * CHUNK_STEP) as f64 / f64::from(SAMPLE_RATE)) {
                    return Ok(None);
                }
                let chunk = segmented.next().transpose()?.unwrap_or_default();
                if chunk.len() != frames * speakers {
                    return Err(Error::Input(format!(
                        "the segmentation of a chunk has {} values, not {frames} frames of {speakers} speakers",
                        chunk.len()
                    )));
                }
                activities.extend(chunk);
            }
            let found = install(|| self.embeddings(first, &activities[start..], &mut features))?;
            found.iter().for_each(|found| embeddings.extend_from_slice(found));
        }
        Ok(Some((activities, embeddings)))
    }

    /// Of each of the chunks from `first` on the embeddings, (speakers, dimension).
    fn embeddings(&self, first: usize, activities: &[u8], features: &mut ChunkFeatures) -> Result<Vec<Vec<f32>>> {
        let size = self.segmentation.frames() * self.segmentation.speakers();
        features.load(first..first + activities.len() / size)?;
        let features = &*features;
        let of_chunk = |(number, active): (usize, &[u8])| match active.contains(&1) {
            true => self.of_chunk(&features.of(first + number), active),
            false => Ok(vec![
                f32::NAN;
                self.segmentation.speakers() * self.embedding.dimension()
            ]),
        };
        activities.par_chunks_exact(size).enumerate().map(of_chunk).collect()
    }

    /// The embeddings of the speakers of a chunk: of the frames in which one is active alone, or, if these are too few, of
    /// all in which it is.
    fn of_chunk(&self, features: &[f32], active: &[u8]) -> Result<Vec<f32>> {
        let (speakers, dimension) = (self.segmentation.speakers(), self.embedding.dimension());
        debug_assert!(features.len().is_multiple_of(BANDS));
        let mut masks = Vec::new();
        let mut heard = Vec::new();
        for speaker in 0..speakers {
            let frames = active.chunks_exact(speakers);
            let whole: Vec<bool> = frames.clone().map(|frame| frame[speaker] == 1).collect();
            let alone = |frame: &[u8]| frame[speaker] == 1 && frame.iter().filter(|active| **active == 1).count() == 1;
            let clean: Vec<bool> = frames.map(alone).collect();
            if whole.contains(&true) {
                let enough = clean.iter().filter(|clean| **clean).count() > self.embedding.min_clean_frames();
                masks.push(if enough { clean } else { whole });
                heard.push(speaker);
            }
        }
        let mut embeddings = vec![f32::NAN; speakers * dimension];
        for (speaker, found) in heard.into_iter().zip(self.embedding.embeddings(features, &masks)?) {
            if let Some(found) = found.filter(|found| found.len() == dimension) {
                embeddings[speaker * dimension..(speaker + 1) * dimension].copy_from_slice(&found);
            }
        }
        Ok(embeddings)
    }
}
