//! A program with a stage kind of its own, beside those that `flow` comes with.
//!
//! ```sh
//! cargo run --release --example own_kind -- run examples/own_kind.yaml
//! cargo run --release --example own_kind -- kinds text.speed
//! ```
//!
//! A kind declares its settings, inputs and outputs; checks, documentation and the JSON schema of pipelines come from there.

use std::process::ExitCode;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, Float64Array, RecordBatch};
use arrow::compute::{cast, filter_record_batch};
use arrow::datatypes::{DataType, Field, Float64Type, Schema, SchemaRef};
use flow_kind::registry::kind;
use flow_kind::{
    Body, ColumnType, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Port, Progress, ROW,
    RejectClass, Shape, StageError,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

fn main() -> ExitCode {
    let mut kinds = flow::kinds::all();
    kinds.push(kind::<Speed>());
    flow::main(kinds)
}

/// Rejects rows with an impossible speaking rate.
///
/// # What it does
///
/// A text with far more words than its recording has time for belongs to another recording, or the recording was cut. Rows
/// with more words in a second than `max_words_per_second` are refused as `too_fast` (class `rule`); the others go on with
/// the column `words_per_second`. A row without a duration counts as one of no time.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct SpeedSettings {
    /// Highest plausible number of words per second.
    max_words_per_second: f64,
}

impl Default for SpeedSettings {
    fn default() -> Self {
        SpeedSettings {
            max_words_per_second: 6.0,
        }
    }
}

const SPEED: &str = "words_per_second";

struct Speed;

impl Kind for Speed {
    const NAME: &'static str = "text.speed";
    // Raised whenever the same rows and settings give others: what was computed before is then computed again.
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::streamed("rows", "rows with texts").columns(&[
        (ROW, ColumnType::UInt32),
        ("text", ColumnType::Text),
        ("duration", ColumnType::Number),
    ])];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "the rows that stay, with their speed")];
    type Settings = SpeedSettings;

    // Called by `flow check` too: it reads no data.
    fn shape(settings: &SpeedSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        if settings.max_words_per_second.is_nan() || settings.max_words_per_second <= 0.0 {
            return Err(StageError::setting("max_words_per_second", "it is a number above 0"));
        }
        let rows = inputs.required("rows")?;
        if rows.schema.field_with_name(SPEED).is_ok() {
            return Err(StageError::Input {
                name: rows.name.clone(),
                message: format!("its rows have a column `{SPEED}` already"),
                help: None,
            });
        }
        Ok(Shape::local(vec![Port::new("rows", with_speed(&rows.schema))]))
    }

    // Called once for each worker.
    fn open(settings: &SpeedSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(SpeedBody(settings.clone()))))
    }
}

fn with_speed(schema: &Schema) -> SchemaRef {
    let mut fields = schema.fields().to_vec();
    fields.push(Arc::new(Field::new(SPEED, DataType::Float64, false)));
    Arc::new(Schema::new(fields))
}

struct SpeedBody(SpeedSettings);

impl Operator for SpeedBody {
    fn batch(&mut self, _: &str, _: &Partition, batch: RecordBatch, out: &mut Out) -> Result<(), StageError> {
        let texts = batch["text"].as_string::<i32>();
        let durations = cast(&batch["duration"], &DataType::Float64)?;
        let durations = durations.as_primitive::<Float64Type>();
        let speed = |row: usize| {
            let words = if texts.is_null(row) {
                0
            } else {
                texts.value(row).split_whitespace().count()
            };
            let seconds = if durations.is_null(row) {
                0.0
            } else {
                durations.value(row)
            };
            if words == 0 {
                0.0
            } else {
                words as f64 / seconds.max(0.0)
            }
        };
        let speeds: Vec<f64> = (0..batch.num_rows()).map(speed).collect();
        let stays: Vec<bool> = speeds
            .iter()
            .map(|speed| *speed <= self.0.max_words_per_second)
            .collect();
        for row in (0..batch.num_rows()).filter(|row| !stays[*row]) {
            let detail = format!("{:.1} words in a second", speeds[row]);
            out.reject_rows(&batch, &[row], "too_fast", RejectClass::Rule, &detail)?;
        }
        let mut columns = batch.columns().to_vec();
        columns.push(Arc::new(Float64Array::from(speeds)) as ArrayRef);
        let all = RecordBatch::try_new(with_speed(&batch.schema()), columns)?;
        out.send(0, filter_record_batch(&all, &BooleanArray::from(stays))?);
        Ok(())
    }

    fn partition_complete(&mut self, _: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        Ok(Progress::Done)
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{StringArray, UInt32Array};
    use flow_kind::registry::Registry;
    use flow_runtime::harness::Harness;

    use super::*;

    fn rows() -> RecordBatch {
        let columns: [(&str, ArrayRef); 3] = [
            (ROW, Arc::new(UInt32Array::from(vec![0, 1, 2, 3]))),
            (
                "text",
                Arc::new(StringArray::from(vec!["one two", "a b c d e f g", "no time", ""])),
            ),
            (
                "duration",
                Arc::new(Float64Array::from(vec![Some(1.0), Some(2.0), None, Some(1.0)])),
            ),
        ];
        RecordBatch::try_from_iter(columns).unwrap()
    }

    /// The harness runs a kind as a run does, and checks that no row is lost.
    #[test]
    fn fast_rows_are_refused() {
        let output = Harness::<Speed>::from_yaml("max_words_per_second: 3")
            .unwrap()
            .input("rows", rows().schema())
            .feed("rows", "en/en_0000", rows())
            .run()
            .unwrap();
        assert_eq!(
            output.reasons("en/en_0000"),
            [(Some(1), "too_fast"), (Some(2), "too_fast")]
        );
        let stay = output.rows("rows", "en/en_0000");
        assert_eq!(stay[SPEED].as_primitive::<Float64Type>().values()[..], [2.0, 0.0]);
    }

    #[test]
    fn mistakes_are_found_before_a_run() {
        for (with, input, found) in [
            ("max_words_per_second: 0", rows(), "above 0"),
            ("{}", rows().project(&[0, 1]).unwrap(), "no column `duration`"),
        ] {
            let harness = Harness::<Speed>::from_yaml(with).unwrap().input("rows", input.schema());
            let error = harness.shape().unwrap_err().to_string();
            assert!(error.contains(found), "{error}");
        }
        assert!(Harness::<Speed>::from_yaml("max_speed: 1").is_err());
        assert_eq!(
            Registry::new(vec![kind::<Speed>()]).unwrap().faults(),
            Vec::<String>::new()
        );
    }
}
