//! Pipelines as pyannote.audio publishes them: speaker-diarization-3.1 and speaker-diarization-community-1, from a folder or from
//! the Hugging Face hub, with their own networks, thresholds and steps. Others would need other networks.

mod config;
mod files;
#[cfg(test)]
#[path = "../tests/written_pipelines.rs"]
pub(crate) mod written;

use std::path::Path;

use flow_hub::{Hub, Progress};
use flow_nn::tensor_files::read_npz;

use config::PipelineClustering;
use files::{PipelineFiles, PldaFiles};

use crate::clustering::assign::Assignment;
use crate::clustering::plda::{Plda, PldaParts};
use crate::diarizer::{DiarizationSettings, Diarizer, Method, Steps};
use crate::error::{Error, Result};
use crate::pyannet::PyanNet;
use crate::weights::Weights;
use crate::wespeaker::{DIMENSION, WeSpeakerResNet34};

/// Values after the linear discriminant analysis, all of which are features of VBx.
const REDUCED: usize = 128;

/// A pipeline whose configuration was read and whose files exist.
#[derive(Debug, Clone, PartialEq)]
pub struct Pipeline {
    settings: DiarizationSettings,
    pub(crate) files: PipelineFiles,
}

impl Pipeline {
    /// The pipeline in a folder, or `hf://OWNER/NAME[@REVISION]`, which is downloaded into the hub's cache if needed.
    /// So are networks that `config.yaml` names as repositories of the hub. The hub is that of the environment if none
    /// is given; `progress` is called with lines about downloads. None if it cancelled them.
    ///
    /// # Errors
    /// If the pipeline or one of its files is missing or cannot be downloaded, or its configuration is not supported.
    pub fn find(model: &str, hub: Option<Hub>, progress: Progress<'_>) -> Result<Option<Self>> {
        let finder = files::Finder { hub, progress, model };
        finder.find()
    }

    /// Loads the networks, with steps exactly as pyannote's: see [`Steps::as_pyannote`].
    ///
    /// # Errors
    /// If a file is damaged or has tensors of another network; it is named.
    pub(crate) fn diarizer(&self) -> Result<Diarizer> {
        let files = &self.files;
        let segmentation = network(&files.segmentation, PyanNet::from_weights)?;
        let embedding = network(&files.embedding, WeSpeakerResNet34::from_weights)?;
        let method = match &files.clustering {
            PipelineClustering::AgglomerativeClustering { min_cluster_size } => Method::Agglomerative {
                min_cluster_size: *min_cluster_size,
                assignment: Assignment::Nearest,
            },
            PipelineClustering::VBxClustering { fa, fb, plda } => Method::Vbx {
                fa: *fa,
                fb: *fb,
                plda: Box::new(read_plda(plda)?),
            },
        };
        let steps = Steps {
            method,
            as_pyannote: true,
        };
        Diarizer::new(Box::new(segmentation), Box::new(embedding), steps)
    }

    /// The settings that the configuration gives.
    pub(crate) fn settings(&self) -> DiarizationSettings {
        self.settings
    }
}

fn network<N>(path: &Path, read: impl FnOnce(&Weights) -> Result<N>) -> Result<N> {
    let weights = Weights::open_file(path)?;
    read(&weights).map_err(|error| Error::Input(format!("{}: {error}", path.display())))
}

fn read_plda(files: &PldaFiles) -> Result<Plda> {
    let (embedding, reduced, square) = ([DIMENSION], [REDUCED], [REDUCED, REDUCED]);
    let [mean1, lda, mean2] = arrays(
        &files.transform,
        [
            ("mean1", &embedding),
            ("lda", &[DIMENSION, REDUCED]),
            ("mean2", &reduced),
        ],
    )?;
    let [mu, tr, psi] = arrays(&files.plda, [("mu", &reduced), ("tr", &square), ("psi", &reduced)])?;
    let parts = PldaParts {
        mean1,
        lda,
        mean2,
        mu,
        tr,
        psi,
    };
    Plda::new(&parts, REDUCED).map_err(|error| Error::Input(format!("{}: {error}", files.plda.display())))
}

fn arrays<const N: usize>(path: &Path, arrays: [(&str, &[usize]); N]) -> Result<[Vec<f64>; N]> {
    let read = read_npz(path, &arrays).map_err(|error| Error::Input(error.to_string()))?;
    read.try_into()
        .map_err(|_| Error::Input(format!("{}: arrays are missing", path.display())))
}

#[cfg(test)]
mod tests;
