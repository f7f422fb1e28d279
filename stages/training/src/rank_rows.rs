//! The kind `training.rank`: the rows that a training found hardest.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, BooleanArray, Float64Array, RecordBatch, StringArray, UInt64Array};
use arrow::compute::{cast, filter_record_batch};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_evaluation::report::{MODEL_COLUMNS, read_model};
use flow_kind::{
    Artifact, Body, ColumnType, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Port, Progress,
    Shape, StageError,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::checkpoint;
use crate::error::TrainingError;
use crate::row_losses::{LossCourse, ROW_LOSSES, read_row_losses};

/// The most rows that may be asked for: each needs some 200 bytes.
const MOST: u64 = 10_000_000;
/// The columns that are added.
const ADDED: [&str; 4] = ["mean_loss", "first_loss", "last_loss", "times_trained"];

/// Finds the rows that a training learned worst.
///
/// # What it does
///
/// `rows` are those that were trained on, `model` is of a `training.train` with `row_losses`. The `most` rows with the
/// highest mean loss go on, with four more columns: `mean_loss`, `first_loss`, `last_loss`, in nats per token of the text, and
/// `times_trained`, how often the row was trained on. The other rows end here. A text that does not fit its recording keeps a high
/// loss while those of others fall, so `last_loss` beside `first_loss` tells such rows from rows that are only difficult.
/// `flow ui` lists the rows by these columns, plays them and takes corrections ([docs/training.md](../training.md)).
///
/// Losses are those of the newest checkpoint beside the model, and are of augmented recordings, as training saw them. All
/// columns of `rows` stay, such as the `alignment_score` of `transcription.align`. Memory depends on `most` and not on the
/// number of rows.
///
/// # Example
///
/// ```yaml
/// hard_rows:
///   uses: training.rank
///   from: {rows: rows, model: train}
///   with: {most: 1000}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RankRowsSettings {
    /// How many rows go on.
    pub most: u64,
}

impl Default for RankRowsSettings {
    fn default() -> Self {
        RankRowsSettings { most: 1000 }
    }
}

/// The kind `training.rank`.
pub struct RankRows;

impl Kind for RankRows {
    const NAME: &'static str = "training.rank";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("rows", "the rows that were trained on").columns(&[("segment_id", ColumnType::AnyText)]),
        InputPort::whole("model", "the model of a training.train with `row_losses`").columns(MODEL_COLUMNS),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "the rows with the highest losses")];
    type Settings = RankRowsSettings;

    fn shape(settings: &RankRowsSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        if !(1..=MOST).contains(&settings.most) {
            return Err(StageError::setting("most", format!("it is from 1 to {MOST}")));
        }
        let rows = inputs.required("rows")?;
        if let Some(name) = ADDED.iter().find(|name| rows.schema.field_with_name(name).is_ok()) {
            let why = format!("`{}` has a column `{name}` already", rows.name);
            return Err(
                StageError::input(rows.name.clone(), why).with_help("leave it out or give it another name in SQL")
            );
        }
        Ok(Shape::local(vec![Port::new("rows", with_losses(&rows.schema))]))
    }

    fn open(settings: &RankRowsSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(Ranker {
            most: settings.most as usize,
            context: context.clone(),
            hardest: None,
        })))
    }
}

fn with_losses(rows: &Schema) -> SchemaRef {
    let mut fields = rows.fields().to_vec();
    let added = ADDED.iter().map(|name| {
        let data_type = match *name {
            "times_trained" => DataType::UInt64,
            _ => DataType::Float64,
        };
        Arc::new(Field::new(*name, data_type, false))
    });
    fields.extend(added);
    Arc::new(Schema::new_with_metadata(fields, rows.metadata().clone()))
}

struct Ranker {
    most: usize,
    context: Context,
    /// Once they are known: the hardest segments.
    hardest: Option<HashMap<String, LossCourse>>,
}

impl Operator for Ranker {
    fn batch(&mut self, input: &str, _: &Partition, batch: RecordBatch, out: &mut Out) -> Result<(), StageError> {
        if input != "rows" {
            return Ok(());
        }
        let hardest = match &mut self.hardest {
            Some(hardest) => hardest,
            none => none.insert(hardest(&losses_of(self.context.required("model")?)?, self.most)?),
        };
        let column = batch
            .column_by_name("segment_id")
            .ok_or_else(|| StageError::failed("the rows have no `segment_id`"))?;
        let segments = cast(column, &DataType::Utf8)?;
        let segments: &StringArray = segments.as_string();
        let of_row = |segment: Option<&str>| segment.and_then(|segment| hardest.get(segment).copied());
        let found: Vec<Option<LossCourse>> = segments.iter().map(of_row).collect();
        let stays = filter_record_batch(
            &batch,
            &found
                .iter()
                .map(|found| Some(found.is_some()))
                .collect::<BooleanArray>(),
        )?;
        out.merged((batch.num_rows() - stays.num_rows()) as u64);
        let kept = || found.iter().flatten();
        let numbers =
            |of: fn(&LossCourse) -> f64| -> ArrayRef { Arc::new(Float64Array::from_iter_values(kept().map(of))) };
        let mut columns = stays.columns().to_vec();
        columns.extend([
            numbers(LossCourse::mean),
            numbers(|course| course.first),
            numbers(|course| course.last),
            Arc::new(UInt64Array::from_iter_values(kept().map(|course| course.times))),
        ]);
        out.send(0, RecordBatch::try_new(with_losses(batch.schema_ref()), columns)?);
        Ok(())
    }

    fn partition_complete(&mut self, _: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        Ok(Progress::Done)
    }
}

/// The file of losses of a training: that of its newest checkpoint which has one.
fn losses_of(model: &Artifact) -> Result<PathBuf, StageError> {
    let model = read_model(model)?.ok_or_else(|| StageError::failed("the input `model` has no row"))?;
    let folder = Path::new(&model.path).parent().unwrap_or(Path::new("."));
    let checkpoints = checkpoint::list(folder)?.into_iter().rev();
    let mut files = checkpoints.map(|checkpoint| checkpoint.path.join(ROW_LOSSES));
    files.find(|file| file.is_file()).ok_or_else(|| {
        StageError::refused(
            format!("no checkpoint in {} has losses of rows", folder.display()),
            "set `row_losses` of training.train (`train.row_losses`), and train on or begin again",
        )
    })
}

/// The `most` segments with the highest mean loss; of equal ones, the first by name.
fn hardest(losses: &Path, most: usize) -> Result<HashMap<String, LossCourse>, TrainingError> {
    let mut heap: BinaryHeap<Ranked> = BinaryHeap::new();
    for row in read_row_losses(losses)? {
        let (segment, course) = row?;
        heap.push(Ranked { segment, course });
        if heap.len() > most {
            heap.pop();
        }
    }
    Ok(heap.into_iter().map(|ranked| (ranked.segment, ranked.course)).collect())
}

/// In the order in which rows are dropped: the lowest mean loss is the greatest.
struct Ranked {
    segment: String,
    course: LossCourse,
}

impl Ord for Ranked {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_loss = other.course.mean().total_cmp(&self.course.mean());
        by_loss.then_with(|| self.segment.cmp(&other.segment))
    }
}

impl PartialOrd for Ranked {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Ranked {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Ranked {}

#[cfg(test)]
mod tests {
    use arrow::array::Int64Array;
    use arrow::datatypes::Float64Type;
    use flow_runtime::harness::Harness;

    use super::*;
    use crate::row_losses::{RowLoss, RowLosses};

    fn texts(values: Vec<String>) -> ArrayRef {
        Arc::new(StringArray::from(values))
    }

    fn model(folder: &Path) -> RecordBatch {
        let path = folder.join("average").display().to_string();
        RecordBatch::try_from_iter([
            ("path", texts(vec![path])),
            ("step", Arc::new(Int64Array::from(vec![20])) as ArrayRef),
            ("digest", texts(vec!["d".into()])),
        ])
        .unwrap()
    }

    fn ranked(folder: &Path, most: u64) -> Result<Vec<(String, f64, f64, f64)>, StageError> {
        let rows = |range: std::ops::Range<usize>| {
            let ids = texts(range.clone().map(|row| format!("s{row:02}")).collect());
            let words = texts(range.map(|row| format!("words {row}")).collect());
            RecordBatch::try_from_iter([("segment_id", ids), ("text", words)]).unwrap()
        };
        let harness = Harness::<RankRows>::from_yaml(&format!("{{most: {most}}}")).unwrap();
        let harness = harness
            .input("rows", rows(0..0).schema())
            .input("model", model(folder).schema());
        let harness = harness.feed("model", "all", model(folder));
        let output = harness
            .feed("rows", "a", rows(0..20))
            .feed("rows", "b", rows(20..40))
            .run()?;
        let rows = output.all_rows("rows");
        let number = |name: &str, row: usize| {
            rows.column_by_name(name)
                .unwrap()
                .as_primitive::<Float64Type>()
                .value(row)
        };
        let id = |row: usize| {
            rows.column(rows.schema().index_of("segment_id").unwrap())
                .as_string::<i32>()
                .value(row)
                .to_owned()
        };
        Ok((0..rows.num_rows())
            .map(|row| {
                (
                    id(row),
                    number("mean_loss", row),
                    number("first_loss", row),
                    number("last_loss", row),
                )
            })
            .collect())
    }

    #[test]
    fn rows_with_the_highest_mean_loss_go_on() {
        let folder = tempfile::tempdir().unwrap();
        let error = ranked(folder.path(), 3).unwrap_err();
        assert!(format!("{error:?}").contains("has losses of rows"), "{error:?}");
        let mut losses = RowLosses::after(None);
        let row = |at: usize, loss: f64| RowLoss {
            segment: format!("s{at:02}"),
            loss,
        };
        losses.add((0..30).map(|at| row(at, at as f64)).collect());
        // Those of two rows rise; a row that is not among those that are read counts for nothing here.
        losses.add(vec![row(3, 60.0), row(7, 100.0), row(99, 0.5)]);
        let checkpoint = folder.path().join("step-000000020");
        std::fs::create_dir(&checkpoint).unwrap();
        losses.write(&checkpoint).unwrap();
        // An older one does not count.
        let older = folder.path().join("step-000000010");
        std::fs::create_dir(&older).unwrap();
        RowLosses::after(None).write(&older).unwrap();
        let found = ranked(folder.path(), 4).unwrap();
        let expected = [
            ("s03", 31.5, 3.0, 60.0),
            ("s07", 53.5, 7.0, 100.0),
            ("s28", 28.0, 28.0, 28.0),
            ("s29", 29.0, 29.0, 29.0),
        ];
        assert_eq!(
            found,
            expected.map(|(id, mean, first, last)| (id.to_owned(), mean, first, last))
        );
        assert_eq!(ranked(folder.path(), 1000).unwrap().len(), 30);
        std::fs::write(checkpoint.join(ROW_LOSSES), b"no losses").unwrap();
        let error = ranked(folder.path(), 3).unwrap_err();
        assert!(format!("{error:?}").contains(ROW_LOSSES), "{error:?}");
    }
}
