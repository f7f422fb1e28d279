//! The kind `manifest.read`.

use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::RecordBatch;
use flow_corpus::files::expand;
use flow_corpus::recordings::Recordings;
use flow_corpus::rows::Rows;
use flow_corpus::{Manifest, ManifestError, ReadSettings, read_schema};
use flow_kind::event::Event;
use flow_kind::{
    Body, Conservation, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Port, Progress,
    ReadOnce, Shape, Source, SourcePartition, StageError, WithShared,
};

use crate::hugging_face::readme_of_config;
use crate::opening::{dataset, open};

pub struct Read;

impl Kind for Read {
    const NAME: &'static str = "manifest.read";
    const VERSION: u32 = 17;
    const INPUTS: &'static [InputPort] =
        &[InputPort::streamed("rows", "rows that are used if `manifest` is empty").optional()];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new(
        "rows",
        "the rows of the manifest, or those of the input",
    )];
    const URL_SETTINGS: &'static [(&'static str, flow_kind::UrlUse)] = &[
        ("manifest", flow_kind::UrlUse::Read),
        ("audio", flow_kind::UrlUse::Read),
        ("shards", flow_kind::UrlUse::Read),
        ("tars", flow_kind::UrlUse::Read),
        ("source", flow_kind::UrlUse::Text),
    ];
    /// Shared: the manifest, while it is read.
    type Settings = WithShared<ReadSettings, ReadOnce<Manifest>>;

    fn shape(settings: &Self::Settings, inputs: &Inputs) -> Result<Shape, StageError> {
        let port = |schema| vec![Port::new("rows", schema)];
        if !settings.manifest.is_empty() {
            settings.check_durations()?;
            settings.check_lang()?;
            settings.check_columns()?;
            dataset(settings).map_err(|why| StageError::setting("manifest", why))?;
            let patterns = [("manifest", &settings.manifest), ("tars", &settings.tars)];
            for (name, pattern) in patterns {
                expand(pattern).map_err(|why| StageError::setting(name, why))?;
            }
            return Ok(Shape {
                conservation: Conservation::Rows,
                ..Shape::source(port(read_schema()))
            });
        }
        match inputs.get("rows") {
            Some(input) => Ok(Shape::local(port(input.schema.clone()))),
            None => Err(
                StageError::setting("manifest", "`manifest` is empty, and there is no input to use instead")
                    .with_help("name a file or a folder"),
            ),
        }
    }

    fn sources(settings: &Self::Settings) -> Vec<(&'static str, PathBuf)> {
        let patterns = [("manifest", &settings.manifest), ("tars", &settings.tars)];
        // What the hub has is not a file that must exist here.
        let of_hub = settings.manifest.starts_with("hf://");
        let given = patterns
            .into_iter()
            .filter(|(name, pattern)| !pattern.is_empty() && (*name != "manifest" || !of_hub));
        given
            .flat_map(|(name, pattern)| {
                // An invalid one was refused when the settings were checked.
                let files = expand(pattern).unwrap_or_default();
                files
                    .into_iter()
                    .map(PathBuf::from)
                    .map(move |file| (name, readme_of_config(&file).unwrap_or(file)))
            })
            .collect()
    }

    fn open(settings: &Self::Settings, context: &Context) -> Result<Body, StageError> {
        Ok(if settings.manifest.is_empty() {
            Body::Local(Box::new(PassOn))
        } else {
            Body::Source(Box::new(Reader {
                settings: settings.clone(),
                context: context.clone(),
                manifest: settings.shared.held(&settings.name()),
            }))
        })
    }

    /// Paths are part of the output, so they count.
    fn identity(settings: &Self::Settings) -> serde_json::Value {
        if settings.manifest.is_empty() {
            return serde_json::json!({"from": "input"});
        }
        serde_json::to_value(settings).unwrap_or(serde_json::Value::Null)
    }
}

/// Gives the rows of the input as they are.
struct PassOn;

impl Operator for PassOn {
    fn batch(&mut self, _: &str, _: &Partition, batch: RecordBatch, out: &mut Out) -> Result<(), StageError> {
        out.send(0, batch);
        Ok(())
    }

    fn partition_complete(&mut self, _: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        Ok(Progress::Done)
    }
}

struct Reader {
    settings: WithShared<ReadSettings, ReadOnce<Manifest>>,
    context: Context,
    manifest: Option<Arc<Manifest>>,
}

impl Reader {
    /// Opened once for the plan and for all workers, so that all have the same rows.
    fn manifest(&mut self) -> Result<Arc<Manifest>, StageError> {
        if let Some(manifest) = &self.manifest {
            return Ok(Arc::clone(manifest));
        }
        let settings = &self.settings;
        let opened = || {
            open(&self.context.storage, settings, &self.context.scratch, &mut |line| {
                self.context.report(serde_json::json!({ "line": line }));
                !self.context.cancel.is_set()
            })
        };
        let manifest = settings
            .shared
            .get(&settings.name(), opened)
            .map_err(|error| match error {
                error @ (ManifestError::Manifest { .. } | ManifestError::Parquet { .. } | ManifestError::Io { .. }) => {
                    StageError::setting("manifest", error)
                }
                other => other.into(),
            })?;
        Ok(Arc::clone(self.manifest.insert(manifest)))
    }
}

impl Source for Reader {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let manifest = self.manifest()?;
        if let Some(decision) = manifest.decision() {
            self.context
                .events
                .send(Event::note(format!("{}: {decision}", self.settings.manifest)));
        }
        let mut partitions = manifest.partitions(&self.context.storage)?;
        partitions.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(partitions)
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        if self.context.cancel.is_set() {
            return Err(StageError::failed("stopped"));
        }
        let manifest = self.manifest()?;
        // Not needed any more when the workers have finished.
        self.settings.shared.forget();
        let mut recordings = Recordings::new(&self.context.storage, self.settings.check_audio);
        let mut rows = Rows::new(out, &mut recordings).with_rules(self.settings.row_rules());
        manifest.read(&self.context.storage, partition, &mut rows)?;
        if let Some(told) = rows.told_twice() {
            self.context
                .warn(format!("{}, {partition}: {told}", self.settings.manifest));
        }
        rows.finish()
    }
}

#[cfg(test)]
#[path = "read_tests.rs"]
mod tests;
