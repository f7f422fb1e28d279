//! A source of training steps.

use std::path::PathBuf;

use flow_kind::{
    Artifact, Body, Context, InputPort, Inputs, Kind, Out, OutputPort, Partition, Shape, Source, SourcePartition,
    StageError,
};
use serde::{Deserialize, Serialize};

use super::{note, port, rows};

pub struct Steps;

/// Deals the rows of its input out to steps.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StepsSettings {
    /// How many.
    steps: u64,
    /// Where to note work.
    #[serde(default)]
    noted: PathBuf,
    /// The process that cannot read a step, and which step.
    #[serde(default)]
    fail_at: Option<(usize, i64)>,
}

struct StepsBody {
    settings: StepsSettings,
    rows: i64,
    process: usize,
}

impl Kind for Steps {
    const NAME: &'static str = "toy.steps";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::whole("rows", "numbers").optional()];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = StepsSettings;

    fn shape(_: &StepsSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::source(vec![port("rows")]))
    }

    fn open(settings: &StepsSettings, context: &Context) -> Result<Body, StageError> {
        let rows = context.input("rows").map_or(0, Artifact::rows) as i64;
        Ok(Body::Source(Box::new(StepsBody {
            settings: settings.clone(),
            rows,
            process: context.share.map_or(0, |share| share.process),
        })))
    }

    fn identity(settings: &StepsSettings) -> serde_json::Value {
        serde_json::json!({ "steps": settings.steps })
    }
}

impl Source for StepsBody {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let step = |step| SourcePartition::new(format!("step-{step:08}").into(), Vec::new(), "");
        Ok((0..self.settings.steps).map(step).collect())
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        note(&self.settings.noted, "steps", partition);
        let step: i64 = partition.as_str()[5..].parse().map_err(StageError::failed)?;
        if self.settings.fail_at == Some((self.process, step)) {
            return Err(StageError::failed(format!("step {step} cannot be read")));
        }
        out.send(0, rows(&[0, 1], &[step, self.rows]));
        Ok(())
    }
}
