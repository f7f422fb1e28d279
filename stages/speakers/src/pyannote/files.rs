//! The files of a pyannote pipeline: in a folder, or in repositories of the Hugging Face hub.

use std::path::{Path, PathBuf};

use flow_hub::{Hub, HubError, HubReference, Progress};

use super::Pipeline;
use super::config::{PipelineClustering, PipelineConfig};
use crate::diarizer::DiarizationSettings;
use crate::error::{Error, Result};

/// The configuration of a pipeline.
const CONFIG: &str = "config.yaml";
/// The weights of a network, as pyannote names them. In folders they may also be safetensors.
const CHECKPOINT: &str = "pytorch_model.bin";
const SAFETENSORS: &str = "model.safetensors";
/// The transforms of a PLDA.
const TRANSFORM: &str = "xvec_transform.npz";
const PLDA: &str = "plda.npz";
/// The placeholder of the folder or repository of the pipeline.
const OWN: &str = "$model/";

/// The transforms of a PLDA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PldaFiles {
    /// `xvec_transform.npz`: linear discriminant analysis.
    pub transform: PathBuf,
    /// `plda.npz`
    pub plda: PathBuf,
}

/// The files of a pipeline, all on this machine.
#[derive(Debug, Clone, PartialEq)]
pub struct PipelineFiles {
    pub config: PathBuf,
    pub segmentation: PathBuf,
    pub embedding: PathBuf,
    /// How embeddings are clustered: with VBx, by these files.
    pub clustering: PipelineClustering<PldaFiles>,
}

impl PipelineFiles {
    /// All files, in a fixed order.
    pub fn all(&self) -> Vec<PathBuf> {
        let mut files = vec![&self.config, &self.segmentation, &self.embedding];
        if let PipelineClustering::VBxClustering { plda, .. } = &self.clustering {
            files.extend([&plda.transform, &plda.plda]);
        }
        files.into_iter().cloned().collect()
    }
}

/// A place of files: a local folder or a repository of the hub.
enum Place {
    Local(PathBuf),
    /// A repository, or the folder of it that `file` names.
    Hub(HubReference),
}

/// Finds files, and fetches those of the hub.
pub(super) struct Finder<'a, 'b> {
    /// Created from the environment on first use, if none is given.
    pub hub: Option<Hub>,
    pub progress: Progress<'a>,
    pub model: &'b str,
}

impl Finder<'_, '_> {
    /// The pipeline. None if `progress` cancelled it.
    pub fn find(mut self) -> Result<Option<Pipeline>> {
        let model = self.model;
        let (place, config) = match HubReference::parse(model).transpose().map_err(hub_error)? {
            Some(HubReference { file: Some(_), .. }) => {
                let what = format!("{model} names a file; a pipeline is a whole repository, hf://OWNER/NAME");
                return Err(Error::Input(what));
            }
            Some(mut reference) => {
                let Some(config) = self.fetch(&reference, CONFIG)? else {
                    return Ok(None);
                };
                // All other files are taken from the same commit as this one.
                let commit = config.parent().and_then(Path::file_name).and_then(|name| name.to_str());
                reference.revision = commit.unwrap_or(&reference.revision).to_owned();
                (Place::Hub(reference), config)
            }
            None => {
                let folder = PathBuf::from(model);
                let config = folder.join(CONFIG);
                if !config.is_file() {
                    let mut what = format!(
                        "{} does not exist: {model} is not a folder of a pyannote pipeline",
                        config.display()
                    );
                    if let Some(meant) = HubReference::meant(model) {
                        what.push_str(&format!("; a model of the Hugging Face hub is written {meant}"));
                    }
                    return Err(Error::Input(what));
                }
                (Place::Local(folder), config)
            }
        };
        let read = PipelineConfig::read(&config)?;
        let weights = [CHECKPOINT, SAFETENSORS];
        let of = |finder: &mut Self, field: &str, text: &str, names: &[&str]| {
            let named = |error: Error| match error {
                Error::Input(what) => Error::Input(format!("{}: `pipeline.params.{field}`: {what}", config.display())),
                other => other,
            };
            let found = place_of(&place, text).map_err(named)?;
            finder.file(&found, names).map_err(named)
        };
        let Some(segmentation) = of(&mut self, "segmentation", &read.segmentation, &weights)? else {
            return Ok(None);
        };
        let Some(embedding) = of(&mut self, "embedding", &read.embedding, &weights)? else {
            return Ok(None);
        };
        let clustering = match read.clustering {
            PipelineClustering::AgglomerativeClustering { min_cluster_size } => {
                PipelineClustering::AgglomerativeClustering { min_cluster_size }
            }
            PipelineClustering::VBxClustering { fa, fb, plda: text } => {
                let Some(transform) = of(&mut self, "plda", &text, &[TRANSFORM])? else {
                    return Ok(None);
                };
                let Some(plda) = of(&mut self, "plda", &text, &[PLDA])? else {
                    return Ok(None);
                };
                let plda = PldaFiles { transform, plda };
                PipelineClustering::VBxClustering { fa, fb, plda }
            }
        };
        let settings = DiarizationSettings {
            clustering_threshold: read.threshold,
            min_duration_off: read.min_duration_off,
            ..DiarizationSettings::default()
        };
        let files = PipelineFiles {
            config,
            segmentation,
            embedding,
            clustering,
        };
        Ok(Some(Pipeline { settings, files }))
    }

    /// The first of these files that exists; on the hub, the first.
    fn file(&mut self, place: &Place, names: &[&str]) -> Result<Option<PathBuf>> {
        match place {
            Place::Local(path) if path.is_file() => Ok(Some(path.clone())),
            Place::Local(folder) => {
                let found = names.iter().map(|name| folder.join(name)).find(|path| path.is_file());
                found
                    .map(Some)
                    .ok_or_else(|| Error::Input(format!("{} holds no {}", folder.display(), names.join(" and no "))))
            }
            Place::Hub(reference) => {
                let name = match &reference.file {
                    Some(folder) => format!("{folder}/{}", names[0]),
                    None => names[0].to_owned(),
                };
                self.fetch(reference, &name)
            }
        }
    }

    fn fetch(&mut self, reference: &HubReference, file: &str) -> Result<Option<PathBuf>> {
        let hub = match self.hub.take() {
            Some(hub) => hub,
            None => Hub::from_environment().map_err(hub_error)?,
        };
        let reference = HubReference {
            file: Some(file.to_owned()),
            ..reference.clone()
        };
        let fetched = self.hub.insert(hub).fetch(&reference, &mut *self.progress);
        fetched.map_err(hub_error)
    }
}

/// Parses a place in the configuration of the pipeline at `own`.
fn place_of(own: &Place, text: &str) -> Result<Place> {
    if let Some(below) = text.strip_prefix(OWN) {
        // The parser of references refuses paths outside the repository.
        if !matches!(HubReference::parse(&format!("hf://own/model/{below}")), Some(Ok(_))) {
            return Err(Error::Input(format!("{text} is not a folder of the pipeline")));
        }
        return Ok(match own {
            Place::Local(folder) => Place::Local(folder.join(below)),
            Place::Hub(reference) => Place::Hub(HubReference {
                file: Some(below.to_owned()),
                ..reference.clone()
            }),
        });
    }
    // A pipeline of the hub must not name local files.
    if let Place::Local(folder) = own
        && folder.join(text).exists()
    {
        return Ok(Place::Local(folder.join(text)));
    }
    match HubReference::parse(&format!("hf://{text}")) {
        Some(Ok(reference)) if reference.file.is_none() => Ok(Place::Hub(reference)),
        _ => Err(Error::Input(format!(
            "{text} does not exist, and no repository of the hub, OWNER/NAME"
        ))),
    }
}

fn hub_error(error: HubError) -> Error {
    match error {
        HubError::Unavailable { message, help } => Error::Hub { message, help },
        other => Error::Input(other.to_string()),
    }
}
