//! An export.

use std::fs;
use std::path::PathBuf;

use flow_kind::{Body, Context, Export, ExportSet, InputCount, InputPort, Inputs, Kind, OutputPort, Shape, StageError};
use serde::{Deserialize, Serialize};

use super::each;

pub struct Write_;

/// Writes all rows, and all rejects, as text.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteSettings {
    /// The folder.
    folder: PathBuf,
    /// A word that its recipe contains.
    #[serde(default)]
    title: Option<String>,
}

struct WriteBody(PathBuf, Context);

impl Kind for Write_ {
    const NAME: &'static str = "toy.write";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::whole("tables", "numbers").count(InputCount::Many)];
    const OUTPUTS: &'static [OutputPort] = &[];
    type Settings = WriteSettings;

    fn shape(_: &WriteSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::export())
    }

    fn open(settings: &WriteSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Export(Box::new(WriteBody(
            settings.folder.clone(),
            context.clone(),
        ))))
    }

    fn identity(settings: &WriteSettings) -> serde_json::Value {
        serde_json::json!({"title": settings.title})
    }
}

impl Export for WriteBody {
    fn folder(&self) -> PathBuf {
        self.0.clone()
    }

    fn write(&mut self, set: &mut ExportSet) -> Result<(), StageError> {
        let mut text = String::new();
        for (_, input) in self.1.whole("tables") {
            for batch in input.batches(None) {
                let (partition, batch) = batch?;
                for (row, value) in each(&batch) {
                    text.push_str(&format!("{partition} {row} {value}\n"));
                }
            }
        }
        fs::write(set.file("rows.txt")?, text).map_err(StageError::failed)?;
        let mut text = String::new();
        for reject in self.1.rejects.iter() {
            let (stage, partition, reject) = reject?;
            text.push_str(&format!(
                "{stage} {partition} {:?} {} {}\n",
                reject.row, reject.reason, reject.detail
            ));
        }
        fs::write(set.file("rejects.txt")?, text).map_err(StageError::failed)?;
        Ok(())
    }
}
