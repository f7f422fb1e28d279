//! `config.yaml` of a pyannote pipeline: its networks, and how embeddings are clustered. Unknown fields are refused,
//! since ignoring one could change the results.

use std::path::{Path, PathBuf};

use serde_yaml::{Mapping, Value};

use crate::error::{Error, Result};

/// The only supported class of pipelines, and the step of its chunks as a fraction of their length.
const PIPELINE: &str = "pyannote.audio.pipelines.SpeakerDiarization";
const STEP: f64 = 0.1;
/// A larger file is no configuration.
const MAX_BYTES: u64 = 1 << 20;
/// Largest value accepted for the minimum cluster size.
const MAX_CLUSTER_SIZE: f64 = 1e6;

/// The content of `config.yaml`.
#[derive(Debug, Clone, PartialEq)]
pub struct PipelineConfig {
    /// Where the checkpoint of the segmentation network is: `$model/FOLDER` for a folder of the pipeline, a path, or
    /// `OWNER/NAME[@REVISION]` for a repository of the hub. So too of the others.
    pub segmentation: String,
    /// That of the embedding network.
    pub embedding: String,
    /// The distance of clusters, as [`DiarizationSettings`](crate::diarizer::DiarizationSettings) has it.
    pub threshold: f64,
    pub clustering: PipelineClustering<String>,
    /// Shorter pauses of a speaker are filled, in seconds.
    pub min_duration_off: f64,
}

/// How embeddings are clustered, by pyannote's names. `P` says where the transforms of a PLDA are: as `config.yaml` names
/// them, or as the files that were found.
#[derive(Debug, Clone, PartialEq)]
pub enum PipelineClustering<P> {
    /// Of speaker-diarization-3.1.
    AgglomerativeClustering { min_cluster_size: usize },
    /// Of speaker-diarization-community-1.
    VBxClustering { fa: f64, fb: f64, plda: P },
}

impl PipelineConfig {
    /// Reads the file.
    ///
    /// # Errors
    /// If it is not such a configuration, or has an unknown field or value: the message names file and field.
    pub fn read(path: &Path) -> Result<Self> {
        let wrong = |what: &dyn std::fmt::Display| Error::Input(format!("{}: {what}", path.display()));
        let length = std::fs::metadata(path).map_err(|error| wrong(&error))?.len();
        if length > MAX_BYTES {
            return Err(wrong(&format!("has {length} bytes: it is not a configuration")));
        }
        let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
        flow_yaml_guard::check(&text).map_err(|error| wrong(&error))?;
        let root = serde_yaml::from_str(&text).map_err(|error| wrong(&error))?;
        Self::of(Section {
            path: path.to_owned(),
            name: String::new(),
            fields: root,
        })
    }

    fn of(mut root: Section) -> Result<Self> {
        // The release that wrote it, and its dependencies.
        root.take("version");
        root.take("dependencies");
        let mut pipeline = root.section("pipeline")?;
        let name = pipeline.text("name")?;
        if name != PIPELINE {
            return Err(pipeline.wrong("name", format!("is {name}; the pipeline that is known is {PIPELINE}")));
        }
        let mut networks = pipeline.section("params")?;
        pipeline.end()?;
        let mut params = root.section("params")?;
        root.end()?;
        let mut clustering = params.section("clustering")?;
        let mut segmentation = params.section("segmentation")?;
        params.end()?;

        for size in ["segmentation_batch_size", "embedding_batch_size"] {
            // Batch sizes do not affect the result.
            if let Some(value) = networks.take(size)
                && !value.is_u64()
            {
                return Err(networks.wrong(size, "is not a whole number"));
            }
        }
        // pyannote's default is false.
        if networks.take("embedding_exclude_overlap") != Some(Value::Bool(true)) {
            return Err(networks.wrong(
                "embedding_exclude_overlap",
                "is not `true`; embeddings without overlaps alone are known",
            ));
        }
        if let Some(step) = networks.take("segmentation_step")
            && step.as_f64() != Some(STEP)
        {
            return Err(networks.wrong("segmentation_step", format!("is not {STEP}, the one that is known")));
        }
        let threshold = clustering.number("threshold", 2.0)?;
        let method = networks.text("clustering")?;
        let found = match method.as_str() {
            "AgglomerativeClustering" => {
                let linkage = clustering.text("method")?;
                if linkage != "centroid" {
                    return Err(
                        clustering.wrong("method", format!("is {linkage}; the method that is known is centroid"))
                    );
                }
                let size = clustering.number("min_cluster_size", MAX_CLUSTER_SIZE)?;
                if size.fract() != 0.0 {
                    return Err(clustering.wrong("min_cluster_size", "is not a whole number"));
                }
                PipelineClustering::AgglomerativeClustering {
                    min_cluster_size: size as usize,
                }
            }
            "VBxClustering" => PipelineClustering::VBxClustering {
                fa: clustering.number("Fa", 1e3)?,
                fb: clustering.number("Fb", 1e3)?,
                plda: networks.text("plda")?,
            },
            other => {
                let what = format!("is {other}; AgglomerativeClustering and VBxClustering are known");
                return Err(networks.wrong("clustering", what));
            }
        };
        clustering.end()?;
        let min_duration_off = segmentation
            .take("min_duration_off")
            .map_or(Some(0.0), |off| off.as_f64());
        let Some(min_duration_off) = min_duration_off.filter(|off| (0.0..=3600.0).contains(off)) else {
            return Err(segmentation.wrong("min_duration_off", "is not a number of seconds from 0 to 3600"));
        };
        segmentation.end()?;
        let config = Self {
            segmentation: networks.text("segmentation")?,
            embedding: networks.text("embedding")?,
            threshold,
            clustering: found,
            min_duration_off,
        };
        networks.end()?;
        Ok(config)
    }
}

/// A mapping of the file, whose fields are taken one by one.
struct Section {
    path: PathBuf,
    /// Dotted, empty for the whole file.
    name: String,
    fields: Mapping,
}

impl Section {
    fn full(&self, field: &str) -> String {
        match self.name.is_empty() {
            true => field.to_owned(),
            false => format!("{}.{field}", self.name),
        }
    }

    fn wrong(&self, field: &str, what: impl std::fmt::Display) -> Error {
        Error::Input(format!("{}: `{}` {what}", self.path.display(), self.full(field)))
    }

    fn take(&mut self, field: &str) -> Option<Value> {
        self.fields.remove(field)
    }

    fn needed(&mut self, field: &str) -> Result<Value> {
        self.take(field).ok_or_else(|| self.wrong(field, "is missing"))
    }

    fn section(&mut self, field: &str) -> Result<Section> {
        match self.needed(field)? {
            Value::Mapping(fields) => Ok(Section {
                path: self.path.clone(),
                name: self.full(field),
                fields,
            }),
            _ => Err(self.wrong(field, "is not a mapping of fields")),
        }
    }

    fn text(&mut self, field: &str) -> Result<String> {
        match self.needed(field)? {
            Value::String(text) => Ok(text),
            _ => Err(self.wrong(field, "is not text")),
        }
    }

    /// A number above 0.
    fn number(&mut self, field: &str, most: f64) -> Result<f64> {
        let number = self.needed(field)?.as_f64();
        number
            .filter(|number| *number > 0.0 && *number <= most)
            .ok_or_else(|| self.wrong(field, format!("is not a number above 0, at most {most}")))
    }

    /// Refuses fields that were not taken.
    fn end(self) -> Result<()> {
        match self.fields.keys().next() {
            None => Ok(()),
            Some(field) => {
                let field = field.as_str().unwrap_or("a field that is not text");
                Err(self.wrong(field, "is not known"))
            }
        }
    }
}
