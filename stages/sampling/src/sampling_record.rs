//! The record of how micro-batches were made, which is passed on with them.

use std::sync::Arc;

use arrow::datatypes::{Schema, SchemaRef};
use serde::{Deserialize, Serialize};

use crate::augment::Step;
use crate::curriculum::StageSize;
use crate::plan::Packing;

/// The settings of a `sampling.load`. Stored in the metadata of the schema of its port `batches`, so that training
/// knows how its micro-batches are made, and detects changes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SamplingRecord {
    pub packing: Packing,
    /// Number of optimizer steps.
    pub steps: u64,
    pub speeds: Vec<f64>,
    /// Steps of augmentation, with a digest of their recordings in place of each path.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub augment: Vec<Step>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub augment_steps: Option<u64>,
    pub max_samples: Option<u64>,
    pub curriculum: Vec<StageSize>,
    pub curriculum_steps: Vec<u64>,
}

/// The key of the schema's metadata, as JSON.
const KEY: &str = "flow.sampling";

impl SamplingRecord {
    /// The schema with this record in its metadata.
    pub fn written_to(&self, schema: &Schema) -> Result<SchemaRef, serde_json::Error> {
        let mut metadata = schema.metadata().clone();
        metadata.insert(KEY.to_owned(), serde_json::to_string(self)?);
        Ok(Arc::new(schema.clone().with_metadata(metadata)))
    }

    /// The record in a schema; none in that of micro-batches that were made by something else.
    ///
    /// # Errors
    /// When the metadata is not a valid record.
    pub fn of(schema: &Schema) -> Result<Option<SamplingRecord>, serde_json::Error> {
        let text = schema.metadata().get(KEY);
        text.map(|text| serde_json::from_str(text)).transpose()
    }
}
