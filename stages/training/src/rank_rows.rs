//! The kind `training.rank`: the rows that a training found hardest.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, BooleanArray, Float64Array, RecordBatch, StringArray, UInt64Array};
use arrow::compute::{cast, filter_record_batch};
use arrow::datatypes::{DataType, Field, Float64Type, Schema, SchemaRef};
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

/// The column that is added with the input `alignments`.
const SCORE: &str = "alignment_score";

/// Finds the rows that a training learned worst, or whose texts fit their recordings least.
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
/// With `alignments` of a `transcription.align` of the rows, its `alignment_score` is one more column (null of rows that it refused), and
/// `by: [loss, alignment]` adds the `most` rows with the lowest scores to those with the highest losses; `by: [alignment]` gives the
/// former alone. Rows that were not trained on do not go on.
///
/// # Example
///
/// ```yaml
/// hard_rows:
///   uses: training.rank
///   from: {rows: rows, model: train}
///   with: {most: 1000}
/// fit:
///   uses: transcription.align
///   from: {rows: rows}
///   with: {model: configs/models/small.nemo}
/// hard_or_unfit:
///   uses: training.rank
///   from: {rows: rows, model: train, alignments: fit}
///   with: {most: 1000, by: [loss, alignment]}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RankRowsSettings {
    /// How many rows go on by each figure.
    pub most: u64,
    /// By what rows are chosen: `loss`, `alignment`, or both.
    #[serde(skip_serializing_if = "is_loss_alone")]
    pub by: Vec<RankBy>,
}

/// A figure by which rows are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RankBy {
    /// The highest mean loss in training.
    Loss,
    /// The lowest `alignment_score`.
    Alignment,
}

/// The default is left out, so that earlier results keep their keys.
fn is_loss_alone(by: &[RankBy]) -> bool {
    by == [RankBy::Loss]
}

impl Default for RankRowsSettings {
    fn default() -> Self {
        RankRowsSettings {
            most: 1000,
            by: vec![RankBy::Loss],
        }
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
        InputPort::whole(
            "alignments",
            "the port `alignments` of a transcription.align of the rows",
        )
        .optional()
        .columns(&[("segment_id", ColumnType::AnyText), (SCORE, ColumnType::Number)]),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new(
        "rows",
        "the rows with the highest losses or the lowest scores",
    )];
    type Settings = RankRowsSettings;

    fn shape(settings: &RankRowsSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        if !(1..=MOST).contains(&settings.most) {
            return Err(StageError::setting("most", format!("it is from 1 to {MOST}")));
        }
        if settings.by.is_empty() {
            return Err(StageError::setting("by", "it is empty; `[loss]` is usual"));
        }
        let scored = inputs.has("alignments");
        if settings.by.contains(&RankBy::Alignment) && !scored {
            return Err(StageError::setting(
                "by",
                "`alignment` needs the input `alignments`, from a transcription.align",
            ));
        }
        let rows = inputs.required("rows")?;
        let mut added = ADDED.iter().chain(scored.then_some(&SCORE));
        if let Some(name) = added.find(|name| rows.schema.field_with_name(name).is_ok()) {
            let why = format!("`{}` has a column `{name}` already", rows.name);
            return Err(
                StageError::input(rows.name.clone(), why).with_help("leave it out or give it another name in SQL")
            );
        }
        Ok(Shape::local(vec![Port::new(
            "rows",
            with_figures(&rows.schema, scored),
        )]))
    }

    fn open(settings: &RankRowsSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(Ranker {
            most: settings.most as usize,
            by: settings.by.clone(),
            context: context.clone(),
            chosen: None,
        })))
    }
}

fn with_figures(rows: &Schema, scored: bool) -> SchemaRef {
    let mut fields = rows.fields().to_vec();
    let added = ADDED.iter().map(|name| {
        let data_type = match *name {
            "times_trained" => DataType::UInt64,
            _ => DataType::Float64,
        };
        Arc::new(Field::new(*name, data_type, false))
    });
    fields.extend(added);
    fields.extend(scored.then(|| Arc::new(Field::new(SCORE, DataType::Float64, true))));
    Arc::new(Schema::new_with_metadata(fields, rows.metadata().clone()))
}

struct Ranker {
    most: usize,
    by: Vec<RankBy>,
    context: Context,
    /// Once they are known: the segments that go on.
    chosen: Option<HashMap<String, Found>>,
}

/// What is known of a segment that goes on.
#[derive(Clone, Copy)]
struct Found {
    course: LossCourse,
    score: Option<f64>,
}

impl Ranker {
    fn choose(&self) -> Result<HashMap<String, Found>, StageError> {
        let losses = losses_of(self.context.required("model")?)?;
        let alignments = self.context.input("alignments");
        let mut chosen: HashMap<String, Found> = HashMap::new();
        if self.by.contains(&RankBy::Loss) {
            let of_loss = |(segment, course)| (segment, Found { course, score: None });
            chosen.extend(hardest(&losses, self.most)?.into_iter().map(of_loss));
        }
        let Some(alignments) = alignments else {
            return Ok(chosen);
        };
        if self.by.contains(&RankBy::Alignment) {
            let lowest = lowest(alignments, self.most)?;
            for row in read_row_losses(&losses)? {
                let (segment, course) = row?;
                if lowest.contains(&segment) {
                    chosen.insert(segment, Found { course, score: None });
                }
            }
        }
        each_score(alignments, |segment, score| {
            if let Some(found) = chosen.get_mut(segment) {
                found.score = Some(score);
            }
        })?;
        Ok(chosen)
    }
}

impl Operator for Ranker {
    fn batch(&mut self, input: &str, _: &Partition, batch: RecordBatch, out: &mut Out) -> Result<(), StageError> {
        if input != "rows" {
            return Ok(());
        }
        let scored = self.context.input("alignments").is_some();
        let chosen = match self.chosen.take() {
            Some(chosen) => chosen,
            None => self.choose()?,
        };
        let chosen = self.chosen.insert(chosen);
        let column = batch
            .column_by_name("segment_id")
            .ok_or_else(|| StageError::failed("the rows have no `segment_id`"))?;
        let segments = cast(column, &DataType::Utf8)?;
        let segments: &StringArray = segments.as_string();
        let of_row = |segment: Option<&str>| segment.and_then(|segment| chosen.get(segment).copied());
        let found: Vec<Option<Found>> = segments.iter().map(of_row).collect();
        let stays = filter_record_batch(
            &batch,
            &found
                .iter()
                .map(|found| Some(found.is_some()))
                .collect::<BooleanArray>(),
        )?;
        out.merged((batch.num_rows() - stays.num_rows()) as u64);
        let kept = || found.iter().flatten();
        let numbers = |of: fn(&LossCourse) -> f64| -> ArrayRef {
            Arc::new(Float64Array::from_iter_values(kept().map(|found| of(&found.course))))
        };
        let mut columns = stays.columns().to_vec();
        columns.extend([
            numbers(LossCourse::mean),
            numbers(|course| course.first),
            numbers(|course| course.last),
            Arc::new(UInt64Array::from_iter_values(kept().map(|found| found.course.times))),
        ]);
        if scored {
            let scores: Float64Array = kept().map(|found| found.score).collect();
            columns.push(Arc::new(scores));
        }
        out.send(
            0,
            RecordBatch::try_new(with_figures(batch.schema_ref(), scored), columns)?,
        );
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

/// The `most` segments with the lowest scores; of equal ones, the first by name.
fn lowest(alignments: &Artifact, most: usize) -> Result<HashSet<String>, StageError> {
    let mut heap: BinaryHeap<Scored> = BinaryHeap::new();
    each_score(alignments, |segment, score| {
        heap.push(Scored {
            score,
            segment: segment.to_owned(),
        });
        if heap.len() > most {
            heap.pop();
        }
    })?;
    Ok(heap.into_iter().map(|scored| scored.segment).collect())
}

/// Gives each segment of an alignment with its score; those without a number are passed over.
fn each_score(alignments: &Artifact, mut take: impl FnMut(&str, f64)) -> Result<(), StageError> {
    for batch in alignments.batches(Some(&["segment_id", SCORE])) {
        let (_, batch) = batch?;
        let column = |name: &str, data_type| {
            let found = batch.column_by_name(name);
            let found = found.ok_or_else(|| StageError::failed(format!("the alignments have no `{name}`")))?;
            Ok::<_, StageError>(cast(found, data_type)?)
        };
        let (segments, scores) = (
            column("segment_id", &DataType::Utf8)?,
            column(SCORE, &DataType::Float64)?,
        );
        let scores = scores.as_primitive::<Float64Type>().iter();
        for (segment, score) in segments.as_string::<i32>().iter().zip(scores) {
            if let (Some(segment), Some(score)) = (segment, score.filter(|score| !score.is_nan())) {
                take(segment, score);
            }
        }
    }
    Ok(())
}

/// In the order in which rows are dropped: the highest score is the greatest.
struct Scored {
    score: f64,
    segment: String,
}

impl Ord for Scored {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_score = self.score.total_cmp(&other.score);
        by_score.then_with(|| self.segment.cmp(&other.segment))
    }
}

impl PartialOrd for Scored {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Scored {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Scored {}

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

    /// Rows 0 to 29 have losses, 28 and 29 the highest of those that did not rise.
    fn unfit_rows_go_on(folder: &Path) {
        let names = |rows: std::ops::Range<usize>| texts(rows.map(|row| format!("s{row:02}")).collect());
        let rows = RecordBatch::try_from_iter([("segment_id", names(0..40))]).unwrap();
        // Row 10 fits worst, then 11 and so on; the first ten have no number, and of row 35 there are no losses.
        let score = |row: usize| match row {
            0..5 => None,
            5..10 => Some(f64::NAN),
            35 => Some(-100.0),
            row => Some(row as f64 / 10.0 - 9.0),
        };
        let scores: Float64Array = (0..40).map(score).collect();
        let columns = [("segment_id", names(0..40)), (SCORE, Arc::new(scores) as ArrayRef)];
        let alignments =
            RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, name == SCORE)))
                .unwrap();
        let run = |settings: &str| {
            Harness::<RankRows>::from_yaml(settings)
                .unwrap()
                .input("rows", rows.schema())
                .input("model", model(folder).schema())
                .input("alignments", alignments.schema())
                .feed("model", "all", model(folder))
                .feed("alignments", "all", alignments.clone())
                .feed("rows", "a", rows.clone())
                .run()
        };
        let chosen = |settings: &str| -> Vec<(String, Option<f64>)> {
            let rows = run(settings).unwrap().all_rows("rows");
            let ids = rows.column_by_name("segment_id").unwrap().as_string::<i32>().iter();
            let scores = rows.column_by_name(SCORE).unwrap().as_primitive::<Float64Type>().iter();
            ids.map(|id| id.unwrap().to_owned()).zip(scores).collect()
        };
        let expected = |rows: &[(&str, Option<f64>)]| -> Vec<(String, Option<f64>)> {
            rows.iter().map(|(id, score)| ((*id).to_owned(), *score)).collect()
        };
        let (ten, eleven) = (("s10", Some(-8.0)), ("s11", Some(11.0 / 10.0 - 9.0)));
        assert_eq!(chosen("{most: 3, by: [alignment]}"), expected(&[ten, eleven]));
        // A NaN is not a score.
        let (three, seven) = (("s03", None), ("s07", None));
        assert_eq!(chosen("{most: 2}"), expected(&[three, seven]));
        assert_eq!(
            chosen("{most: 2, by: [loss, alignment]}"),
            expected(&[three, seven, ten])
        );
        let wrong = |settings: &str, alignments: bool| {
            let harness = Harness::<RankRows>::from_yaml(settings)
                .unwrap()
                .input("rows", if alignments { columns_of_both() } else { rows.schema() })
                .input("model", model(folder).schema());
            let harness = match alignments {
                true => harness.input("alignments", columns_of_both()),
                false => harness,
            };
            format!("{:?}", harness.feed("model", "all", model(folder)).run().unwrap_err())
        };
        assert!(wrong("{by: [alignment]}", false).contains("needs the input"));
        assert!(wrong("{by: []}", false).contains("is empty"));
        assert!(wrong("{by: [loss]}", true).contains("has a column `alignment_score` already"));
    }

    fn columns_of_both() -> SchemaRef {
        Arc::new(Schema::new(vec![
            Field::new("segment_id", DataType::Utf8, false),
            Field::new(SCORE, DataType::Float64, true),
        ]))
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
        unfit_rows_go_on(folder.path());
        std::fs::write(checkpoint.join(ROW_LOSSES), b"no losses").unwrap();
        let error = ranked(folder.path(), 3).unwrap_err();
        assert!(format!("{error:?}").contains(ROW_LOSSES), "{error:?}");
    }
}
