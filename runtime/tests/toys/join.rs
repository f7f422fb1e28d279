//! A local stage with two inputs.

use std::collections::BTreeMap;

use arrow::array::RecordBatch;
use flow_kind::{
    Body, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Progress, Shape, StageError,
};
use serde::{Deserialize, Serialize};

use super::{each, port, rows};

pub struct Join;

/// Adds the values of two inputs by row; rows of the first alone are passed on.
#[derive(Clone, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct JoinSettings {}

#[derive(Default)]
struct JoinBody {
    sides: BTreeMap<Partition, [Vec<(u32, i64)>; 2]>,
}

impl Kind for Join {
    const NAME: &'static str = "toy.join";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("left", "numbers"),
        InputPort::streamed("right", "numbers").optional(),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = JoinSettings;

    fn shape(_: &JoinSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::local(vec![port("rows")]))
    }

    fn open(_: &JoinSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(JoinBody::default())))
    }
}

impl Operator for JoinBody {
    fn batch(&mut self, input: &str, partition: &Partition, batch: RecordBatch, _: &mut Out) -> Result<(), StageError> {
        self.sides.entry(partition.clone()).or_default()[usize::from(input == "right")].extend(each(&batch));
        Ok(())
    }

    fn partition_complete(&mut self, partition: &Partition, out: &mut Out) -> Result<Progress, StageError> {
        let [left, right] = self.sides.remove(partition).unwrap_or_default();
        let right: BTreeMap<u32, i64> = right.into_iter().collect();
        let (numbers, values): (Vec<u32>, Vec<i64>) = left
            .into_iter()
            .map(|(row, value)| (row, value + right.get(&row).unwrap_or(&0)))
            .unzip();
        out.send(0, rows(&numbers, &values));
        Ok(Progress::Done)
    }
}
