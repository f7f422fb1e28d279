//! The kind `manifest.scan`.

use std::path::PathBuf;

use arrow::datatypes::SchemaRef;
use flow_kind::{
    Body, Conservation, Context, InputPort, Inputs, Kind, Out, OutputPort, Partition, Port, RejectClass, Shape, Source,
    SourcePartition, StageError, UNREADABLE,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::shard::{AUDIO_INDEX, METADATA, Shard, ShardOptions, joined_schema, list_shards};

/// Reads the metadata of a corpus.
///
/// # What it does
///
/// Every folder two levels below `shards`, `<lang>/<shard_id>`, is a shard and a partition; files beside them are
/// ignored, and so are folders that programs add (`__MACOSX`, `.ipynb_checkpoints`, `lost+found`). `metadata.parquet` and `audio_index.parquet` of a shard are joined on `segment_id`: every metadata row with
/// every index row of its id, in the order of the two files.
///
/// Columns out: `_row, segment_id, recording_id, path_lang, shard_id, segment_language, transcription_native,
/// duration_s, tx_quality_score, tar_member_name, tar_path, source, audio_hash`. `tar_path` is relative to
/// `shards`. `recording_id` and `audio_hash` are null where a shard has no such column; dictionaries and other
/// widths of text and numbers are read as text and float64.
///
/// A shard that cannot be read is refused as a whole, and the run goes on: `missing_metadata`,
/// `corrupt_metadata`, `missing_audio_index`, `corrupt_audio_index`, `missing_column`, `bad_column_type`,
/// `too_many_rows`, `too_much_text` (1 GiB in a column), `unreadable_file` (looked at again by the next run). Rows are
/// refused as `null_segment_id` and `no_index_row`. All are of class `fault`. Index rows that no
/// metadata row names are reported, not refused.
///
/// # Example
///
/// ```yaml
/// scan: {uses: manifest.scan, with: {shards: /corpus/shards}}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ScanSettings {
    /// Folder that holds `<lang>/<shard_id>/` folders.
    pub shards: PathBuf,
    /// Value of the column `source`.
    #[serde(default = "default_source")]
    pub source: String,
    /// A shard whose join gives more rows is refused as a whole: a repeated `segment_id` in both files
    /// multiplies rows.
    #[serde(default = "default_max_rows")]
    pub max_rows_per_shard: u32,
}

fn default_source() -> String {
    ShardOptions::default().source
}

fn default_max_rows() -> u32 {
    ShardOptions::default().max_rows
}

pub struct Scan;

impl Kind for Scan {
    const NAME: &'static str = "manifest.scan";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new(
        "rows",
        "one for each row of the shards' metadata, beside what their index says",
    )];
    const URL_SETTINGS: &'static [(&'static str, flow_kind::UrlUse)] =
        &[("shards", flow_kind::UrlUse::Read), ("source", flow_kind::UrlUse::Text)];
    type Settings = ScanSettings;

    fn shape(_: &ScanSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape {
            conservation: Conservation::Rows,
            ..Shape::source(vec![Port::new("rows", schema())])
        })
    }

    fn sources(settings: &ScanSettings) -> Vec<(&'static str, PathBuf)> {
        vec![("shards", settings.shards.clone())]
    }

    fn open(settings: &ScanSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(Scanner {
            settings: settings.clone(),
            context: context.clone(),
        })))
    }

    /// Files are identified by their contents, not by their paths.
    fn identity(settings: &ScanSettings) -> serde_json::Value {
        serde_json::json!({"source": settings.source, "max_rows_per_shard": settings.max_rows_per_shard})
    }
}

fn schema() -> SchemaRef {
    joined_schema()
}

struct Scanner {
    settings: ScanSettings,
    context: Context,
}

impl Source for Scanner {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let root = &self.settings.shards;
        let listing = list_shards(&self.context.storage, root).map_err(|error| {
            StageError::setting("shards", error).with_help("name the folder that holds <lang>/<shard_id>/ folders")
        })?;
        if !listing.links.is_empty() {
            self.context
                .report(serde_json::json!({"links_not_followed": listing.links}));
        }
        if listing.shards.is_empty() {
            let message = format!(
                "{} holds no shard, that is, no folder <lang>/<shard_id>/",
                root.display()
            );
            return Err(StageError::setting("shards", message).with_help("is the disk mounted that it is on?"));
        }
        let partition = |(lang, shard_id): (String, String)| {
            let folder = root.join(&lang).join(&shard_id);
            SourcePartition::new(
                Partition::from(format!("{lang}/{shard_id}")),
                vec![folder.join(METADATA), folder.join(AUDIO_INDEX)],
                "",
            )
        };
        let mut partitions: Vec<SourcePartition> = listing.shards.into_iter().map(partition).collect();
        partitions.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(partitions)
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        let Some((lang, shard_id)) = partition.as_str().split_once('/') else {
            return Err(StageError::failed(format!(
                "partition {partition} is not <lang>/<shard_id>"
            )));
        };
        let folder = self.settings.shards.join(lang).join(shard_id);
        let options = ShardOptions {
            source: self.settings.source.clone(),
            max_rows: self.settings.max_rows_per_shard,
            ..ShardOptions::default()
        };
        let shard = match Shard::read(&self.context.storage, &folder, lang, shard_id, &options) {
            Ok(shard) => shard,
            // Reported as an error: the runtime checks again whether the file can be read.
            Err(quarantine) if quarantine.reason == UNREADABLE => return Err(StageError::failed(quarantine.detail)),
            Err(quarantine) => {
                out.reject_partition(quarantine.reason, RejectClass::Fault, quarantine.detail);
                return Ok(());
            }
        };
        out.read(shard.rows());
        for batch in shard.joined(8192) {
            out.send(0, batch?);
        }
        for (reason, batch) in shard.unjoined()? {
            let positions: Vec<usize> = (0..batch.num_rows()).collect();
            out.reject_rows(&batch, &positions, reason, RejectClass::Fault, "")?;
        }
        let lone = &shard.index_without_metadata;
        self.context.report(serde_json::json!({
            "partition": partition, "metadata_rows": shard.metadata_rows(), "index_rows": shard.index_rows(),
            "index_without_metadata": lone.len(), "for_example": &lone[..lone.len().min(10)],
        }));
        Ok(())
    }
}
