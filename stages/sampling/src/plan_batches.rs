//! The kind `sampling.plan`.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{
    ArrayRef, Float64Array, Int32Array, Int64Array, Int64Builder, ListBuilder, RecordBatch, StringArray, UInt32Array,
};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_kind::{
    Body, ColumnType, Context, InputPort, Inputs, Kind, Out, OutputPort, Partition, Port, ROW, RejectSet, Shape,
    Source, SourcePartition, StageError, open_input_file,
};
use flow_storage::Storage;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::SamplingError;
use crate::figures::{LanguageShare, PlanFigures};
use crate::manifest_rows::ManifestRows;
use crate::plan::{Balance, BatchPlan, Packing};
use crate::plan_tables::tables;

/// Plans which rows of a manifest make which batch of an epoch.
///
/// # What it does
///
/// Reads `duration` and `lang` of a manifest: the file `manifest`, or the rows of its one input, if it has
/// one. Rows fall into buckets by duration, are put into a weighted random order within each, and are packed
/// greedily into batches of at most `max_batch_seconds`; batches are sorted by cost, dealt over `world_size`
/// ranks, cut to whole steps of `grad_accum` micro-batches and shuffled. For a seed the batches are those of the
/// Python `DurationBucketBatchSampler`.
///
/// What the temperature does depends on `balance`. With `order` (the default, as in Python) it decides which clips
/// share a batch and not how often a language comes, since every row is packed once. With `quota` each language gets a
/// share of the epoch's time proportional to (its seconds)^temperature: rare languages are repeated, each row as often
/// as any other or once more; common ones are left out in part, and what is left out comes first in the next epoch.
/// An epoch is about as long as the manifest, and follows from `seed` and `epoch` alone.
///
/// Port `batches`: `_row, rank, batch, rows`, one row per batch in the order in which a rank takes them; `rows`
/// are row numbers of the manifest. Port `summary`, one row: `_row, manifest_digest` (BLAKE3 of the file, or
/// the digest of the input), `rows, rows_in_batches, batches, batches_per_rank, seconds_per_batch,
/// padding_waste`. Port `languages`, one row per language: `_row, epoch, balance, temperature, language, rows, seconds`
/// (of the manifest), `rows_in_batches, seconds_in_batches`; `evaluation.report` draws it. The screen shows batches,
/// padding and language shares of both ways to balance.
///
/// # Example
///
/// ```yaml
/// plan: {uses: sampling.plan, with: {manifest: train_manifest_v2.parquet, world_size: 8, grad_accum: 4}}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PlanSettings {
    /// A manifest (parquet). Left out where the stage has an input.
    pub manifest: PathBuf,
    /// Number of training replicas that the batches are dealt to.
    pub world_size: u32,
    /// Micro-batches that make one optimizer step on a rank.
    pub grad_accum: u32,
    /// What the temperature does: `order` (default) or `quota`.
    pub balance: Balance,
    /// With `balance: order` the exponent of a language's number of rows in its weight, which decides which clips share a
    /// batch; with `balance: quota` the exponent of its seconds in its share of an epoch's time: 1 for the manifest's own
    /// shares, 0.3 to 0.5 to lift rare languages, 0 for equal shares.
    pub temperature: f64,
    /// Which epoch to plan; the first is 0.
    pub epoch: u32,
    /// Most seconds of audio in a batch. A longer clip is a batch of its own.
    pub max_batch_seconds: f64,
    /// Upper edges of the duration buckets, in seconds; a clip on an edge falls into the bucket above it.
    pub boundaries: Vec<f64>,
    /// Upper edges by which each duration bucket is split again, in characters (Unicode code points) of the text with its
    /// language tag, so that a batch holds texts of like length too: `[40, 80, 120]`. Empty: durations alone count.
    pub token_boundaries: Vec<u32>,
    /// Clips in a micro-batch of each bucket, in place of `max_batch_seconds` (`bucket_batch_size` in NeMo and Lhotse): one number
    /// for each duration bucket, the last of which has no upper edge; with `token_boundaries` those of its text buckets, one after
    /// the other. `flow memory --bucket-batch-size` gives the largest that fit. Empty: `max_batch_seconds` counts.
    pub bucket_batch_size: Vec<u32>,
    /// Seed of the random order. Epoch e uses `seed + e`.
    pub seed: i64,
    /// Plan for this many rows only, the same ones that `sampling.load` takes with this setting; row numbers then count
    /// these. Needs an input. Left out: all.
    pub max_samples: Option<u64>,
}

impl Default for PlanSettings {
    fn default() -> Self {
        let packing = Packing::default();
        PlanSettings {
            manifest: PathBuf::new(),
            world_size: packing.world_size,
            grad_accum: packing.grad_accum,
            balance: packing.balance,
            temperature: packing.temperature,
            epoch: 0,
            max_batch_seconds: packing.max_batch_seconds,
            boundaries: packing.boundaries,
            token_boundaries: packing.token_boundaries,
            bucket_batch_size: packing.bucket_batch_size,
            seed: packing.seed,
            max_samples: None,
        }
    }
}

impl PlanSettings {
    fn packing(&self) -> Packing {
        Packing {
            world_size: self.world_size,
            grad_accum: self.grad_accum,
            balance: self.balance,
            temperature: self.temperature,
            max_batch_seconds: self.max_batch_seconds,
            boundaries: self.boundaries.clone(),
            token_boundaries: self.token_boundaries.clone(),
            bucket_batch_size: self.bucket_batch_size.clone(),
            seed: self.seed,
        }
    }

    fn has_file(&self) -> bool {
        !self.manifest.as_os_str().is_empty()
    }
}

pub struct Plan;

impl Kind for Plan {
    const NAME: &'static str = "sampling.plan";
    const VERSION: u32 = 2;
    const INPUTS: &'static [InputPort] = &[
        InputPort::whole("rows", "rows of a manifest, where no `manifest` is set")
            .optional()
            .columns(&[("duration", ColumnType::Number), ("lang", ColumnType::AnyText)]),
    ];
    const OUTPUTS: &'static [OutputPort] = &[
        OutputPort::new("batches", "rank, number and rows of each micro-batch"),
        OutputPort::new("summary", "figures of the plan"),
        OutputPort::new("languages", "what balancing does to each language"),
    ];
    const URL_SETTINGS: &'static [(&'static str, flow_kind::UrlUse)] = &[("manifest", flow_kind::UrlUse::Read)];
    type Settings = PlanSettings;

    fn shape(settings: &PlanSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        settings
            .packing()
            .check()
            .map_err(|(name, why)| StageError::setting(name, format!("`{name}`: {why}")))?;
        if settings.max_samples.is_some() && inputs.is_empty() {
            return Err(StageError::setting(
                "max_samples",
                "`max_samples` needs an input; a `manifest` is planned whole",
            ));
        }
        match (inputs.has("rows"), settings.has_file()) {
            (false, true) | (true, false) => {}
            (false, false) => return Err(StageError::setting("manifest", "`manifest` or an input is needed")),
            (true, true) => {
                return Err(StageError::setting(
                    "manifest",
                    "`manifest` is of no use where the stage has an input",
                ));
            }
        }
        let port = |name: &str, schema| Port::new(name, schema);
        let outputs = vec![
            port("batches", batches_schema()),
            port("summary", summary_schema()),
            port("languages", languages_schema()),
        ];
        Ok(Shape::source(outputs))
    }

    fn sources(settings: &PlanSettings) -> Vec<(&'static str, PathBuf)> {
        let file = settings.has_file().then(|| ("manifest", settings.manifest.clone()));
        file.into_iter().collect()
    }

    fn open(settings: &PlanSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(Planner {
            settings: settings.clone(),
            context: context.clone(),
        })))
    }

    /// The manifest is identified by its contents, not by its path.
    fn identity(settings: &PlanSettings) -> serde_json::Value {
        serde_json::json!({
            "packing": settings.packing(),
            "epoch": settings.epoch,
            "max_samples": settings.max_samples,
        })
    }
}

/// Checks that an input has the needed columns.
struct Planner {
    settings: PlanSettings,
    context: Context,
}

impl Source for Planner {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let mut files = Vec::new();
        if self.settings.has_file() {
            let manifest = &self.settings.manifest;
            if let Err(error) = open_input_file(&self.context.storage, manifest) {
                return Err(StageError::setting(
                    "manifest",
                    format!("cannot read {}: {error}", manifest.display()),
                ));
            }
            files.push(manifest.clone());
        }
        let name = Partition::from(format!("epoch-{:06}", self.settings.epoch));
        Ok(vec![SourcePartition::new(name, files, "")])
    }

    fn read(&mut self, _: &Partition, out: &mut Out) -> Result<(), StageError> {
        let (rows, digest) = if self.settings.has_file() {
            let manifest = &self.settings.manifest;
            (
                ManifestRows::from_file(&self.context.storage, manifest).map_err(StageError::failed)?,
                digest_of_file(&self.context.storage, manifest)?,
            )
        } else {
            let input = self.context.required("rows")?;
            (
                ManifestRows::from_artifact(input, self.settings.max_samples)?,
                input.digest().to_hex(),
            )
        };
        let packing = self.settings.packing();
        let epoch = u64::from(self.settings.epoch);
        let plan = BatchPlan::new(&rows, &packing, epoch).map_err(|error| refused(error, &self.context.rejects))?;
        let figures = PlanFigures::of(&plan, &rows);
        if plan.batches_per_rank() == 0 {
            let message = format!(
                "no batches: {} rows do not fill one step of {} ranks x {} micro-batches{} ({}); lower {}, `grad_accum` or \
                 `world_size`",
                figures.rows,
                packing.world_size,
                packing.grad_accum,
                match packing.bucket_batch_size.is_empty() {
                    true => format!(" of {} s", packing.max_batch_seconds),
                    false => String::new(),
                },
                self.context.rejects.in_words(),
                match packing.bucket_batch_size.is_empty() {
                    true => "`max_batch_seconds`",
                    false => "`bucket_batch_size`",
                },
            );
            self.context.warn(message);
        }
        self.context.report(serde_json::to_value(&figures).unwrap_or_default());
        self.show(&rows, &packing, &figures);
        for batch in batches_of(&plan)? {
            out.send(0, batch);
        }
        out.send(1, summary(&figures, &digest)?);
        out.send(2, languages(&figures, &self.settings)?);
        Ok(())
    }
}

impl Planner {
    /// Shows the plan beside what the other way to balance would give.
    fn show(&self, rows: &ManifestRows, packing: &Packing, figures: &PlanFigures) {
        let balance = match packing.balance {
            Balance::Order => Balance::Quota,
            Balance::Quota => Balance::Order,
        };
        let other = Packing {
            balance,
            ..packing.clone()
        };
        let epoch = self.settings.epoch;
        let mut plans = vec![(packing.balance.name(), figures)];
        let other_figures = BatchPlan::new(rows, &other, u64::from(epoch)).map(|plan| PlanFigures::of(&plan, rows));
        match &other_figures {
            Ok(figures) => plans.push((balance.name(), figures)),
            Err(error) => self.context.report(serde_json::json!({"notice": error.to_string()})),
        }
        for table in tables(epoch, &plans) {
            self.context.report(table);
        }
    }
}

/// Errors that a setting can fix name the setting. Where there are no rows, the most frequent reason of `rejects` is
/// named.
pub(crate) fn refused(error: SamplingError, rejects: &RejectSet) -> StageError {
    match error {
        SamplingError::Setting { name, why } => StageError::setting(name, format!("`{name}`: {why}")),
        error @ SamplingError::Repeats { .. } => StageError::setting("temperature", error.to_string()),
        SamplingError::Stage { stage, error } => {
            let mut error = refused(*error, rejects);
            if let StageError::Refused { message, .. } | StageError::Setting { message, .. } = &mut error {
                *message = format!("stage {stage} of the curriculum: {message}");
            }
            error
        }
        SamplingError::NoBatch { rows: 0, .. } => StageError::refused(
            format!("there are no rows to train on ({})", rejects.in_words()),
            "`flow rejects` shows what was refused; or look at how the rows are split and chosen",
        ),
        error @ SamplingError::NoBatch { .. } => StageError::refused(
            format!("{error} ({})", rejects.in_words()),
            "lower `max_batch_seconds` (or `bucket_batch_size`), `grad_accum` or `ranks`, or give more rows",
        ),
        other => StageError::failed(other),
    }
}

/// BLAKE3 of a file, in hexadecimal digits.
fn digest_of_file(storage: &Storage, path: &Path) -> Result<String, StageError> {
    let failed = |error| {
        StageError::failed(SamplingError::Manifest {
            path: path.to_owned(),
            why: format!("{error}"),
        })
    };
    let mut file = open_input_file(storage, path).map_err(failed)?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hasher.finalize().to_hex().to_string()),
            Ok(length) => {
                hasher.update(&buffer[..length]);
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
    }
}

fn list_of_rows() -> Field {
    Field::new(
        "rows",
        DataType::List(Arc::new(Field::new_list_field(DataType::Int64, true))),
        false,
    )
}

/// Schema of the port `batches`.
pub fn batches_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("rank", DataType::Int32, false),
        Field::new("batch", DataType::Int32, false),
        list_of_rows(),
    ]))
}

/// Schema of the port `summary`.
pub fn summary_schema() -> SchemaRef {
    let field = |name: &str, data_type| Field::new(name, data_type, false);
    Arc::new(Schema::new(vec![
        field(ROW, DataType::UInt32),
        field("manifest_digest", DataType::Utf8),
        field("rows", DataType::Int64),
        field("rows_in_batches", DataType::Int64),
        field("batches", DataType::Int64),
        field("batches_per_rank", DataType::Int64),
        field("seconds_per_batch", DataType::Float64),
        field("padding_waste", DataType::Float64),
    ]))
}

/// Schema of the port `languages`.
pub fn languages_schema() -> SchemaRef {
    let field = |name: &str, data_type| Field::new(name, data_type, false);
    Arc::new(Schema::new(vec![
        field(ROW, DataType::UInt32),
        field("epoch", DataType::Int32),
        field("balance", DataType::Utf8),
        field("temperature", DataType::Float64),
        field("language", DataType::Utf8),
        field("rows", DataType::Int64),
        field("seconds", DataType::Float64),
        field("rows_in_batches", DataType::Int64),
        field("seconds_in_batches", DataType::Float64),
    ]))
}

fn languages(figures: &PlanFigures, settings: &PlanSettings) -> Result<RecordBatch, StageError> {
    let each = &figures.languages;
    let long = |of: fn(&LanguageShare) -> u64| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values(
            each.iter().map(|language| of(language) as i64),
        ))
    };
    let float =
        |of: fn(&LanguageShare) -> f64| -> ArrayRef { Arc::new(Float64Array::from_iter_values(each.iter().map(of))) };
    let epoch = i32::try_from(settings.epoch).unwrap_or(i32::MAX);
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from_iter_values(0..each.len() as u32)),
        Arc::new(Int32Array::from(vec![epoch; each.len()])),
        Arc::new(StringArray::from(vec![settings.balance.name(); each.len()])),
        Arc::new(Float64Array::from(vec![settings.temperature; each.len()])),
        Arc::new(StringArray::from_iter_values(
            each.iter().map(|language| &language.language),
        )),
        long(|language| language.rows),
        float(|language| language.seconds),
        long(|language| language.rows_in_batches),
        float(|language| language.seconds_in_batches),
    ];
    Ok(RecordBatch::try_new(languages_schema(), columns)?)
}

/// One batch per rank.
fn batches_of(plan: &BatchPlan) -> Result<Vec<RecordBatch>, StageError> {
    let mut made = Vec::new();
    let mut number: u32 = 0;
    for rank in 0..plan.world_size() {
        let count = plan.batches_per_rank() as u32;
        let end = number
            .checked_add(count)
            .ok_or_else(|| StageError::failed("more than 2^32 batches"))?;
        let mut rows = ListBuilder::new(Int64Builder::new());
        for batch in plan.rank(rank) {
            rows.append_value(batch.iter().map(|&row| Some(i64::from(row))));
        }
        let columns: Vec<ArrayRef> = vec![
            Arc::new(UInt32Array::from_iter_values(number..end)),
            Arc::new(Int32Array::from(vec![rank as i32; count as usize])),
            Arc::new(Int32Array::from_iter_values(0..count as i32)),
            Arc::new(rows.finish()),
        ];
        made.push(RecordBatch::try_new(batches_schema(), columns)?);
        number = end;
    }
    Ok(made)
}

fn summary(figures: &PlanFigures, digest: &str) -> Result<RecordBatch, StageError> {
    let long = |number: u64| -> ArrayRef { Arc::new(Int64Array::from(vec![number as i64])) };
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from(vec![0])),
        Arc::new(StringArray::from(vec![digest])),
        long(figures.rows),
        long(figures.rows_in_batches),
        long(figures.batches),
        long(figures.batches_per_rank),
        Arc::new(Float64Array::from(vec![figures.seconds_per_batch])),
        Arc::new(Float64Array::from(vec![figures.padding_waste])),
    ];
    Ok(RecordBatch::try_new(summary_schema(), columns)?)
}

#[cfg(test)]
#[path = "plan_batches_tests.rs"]
mod tests;
