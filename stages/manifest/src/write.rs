//! The kind `manifest.write`.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, Float64Builder, RecordBatch, StringBuilder};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_corpus::columns::{self, MANIFEST_COLUMNS, manifest_schema, with_extra};
use flow_corpus::extra::EXTRA;
use flow_corpus::written_set::{FILES, REJECTS, STATISTICS, rejects_schema};
use flow_datasets::{AudioOfRows, Writing};
use flow_kind::event::{Event, Events};
use flow_kind::reject::ReasonCount;
use flow_kind::{
    Artifact, Body, Context, Digest, Export, ExportFile, ExportSet, InputPort, Inputs, Kind, OutputPort, Partition,
    RejectSet, Shape, StageError, UrlUse,
};
use flow_storage::{Storage, is_url};

use crate::extracted::Extracted;
use crate::parquet_file::ROW_GROUP;
use crate::pieces::{Notes, Piece, Standing, parts_of};
use crate::place_columns::{self, Places, columns_of, of_read};
use crate::recipe::Recipe;
use crate::statistics::{Durations, Figures, Languages, write_statistics};
use crate::write_lines::write_lines;
use crate::write_parts::{FileOfParts, write_parts};
use crate::write_rejects::write_rejects_of_set;
use crate::write_settings::{Format, WriteSettings};

/// Row counts that are guarded against shrinking, and the inputs that they are of.
const GUARDED: [(&str, &[&str]); 2] = [
    ("the master manifest", &["master"]),
    ("train and validation", &["train", "val"]),
];

pub struct Write;

/// Columns that pipelines make for deduplication and the split: nobody misses them in a manifest.
const FOR_STAGES: [&str; 4] = ["audio_hash", "norm", "quality", "recording_id"];

impl Kind for Write {
    const NAME: &'static str = "manifest.write";
    const VERSION: u32 = 9;
    const INPUTS: &'static [InputPort] = &[
        InputPort::whole("master", "rows for `master_manifest.parquet`").optional(),
        InputPort::whole("train", "rows for `train_manifest_v2.parquet`").optional(),
        InputPort::whole("val", "rows for `val_manifest_v2.parquet`").optional(),
    ];
    const OUTPUTS: &'static [OutputPort] = &[];
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[
        ("out", UrlUse::Write),
        ("shards", UrlUse::Text),
        ("audio", UrlUse::Text),
    ];
    type Settings = WriteSettings;

    fn shape(settings: &WriteSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        if !(0.0..=1.0).contains(&settings.max_shrink) {
            return Err(StageError::setting("max_shrink", "it is a share from 0 to 1"));
        }
        if !(0.0..=1.0).contains(&settings.max_unreadable) {
            return Err(StageError::setting("max_unreadable", "it is a share from 0 to 1"));
        }
        for input in inputs.iter() {
            for field in manifest_schema().fields() {
                columns::expect(input, field.name(), field.data_type())?;
            }
            place_columns::check(input)?;
        }
        check_further(&settings.extra_columns, inputs)?;
        check_format(settings, inputs)?;
        Ok(Shape::export())
    }

    fn open(settings: &WriteSettings, context: &Context) -> Result<Body, StageError> {
        let given = FILES
            .iter()
            .filter_map(|file| Some((*file, context.input(file.0)?.clone())));
        let (files, inputs) = given.unzip();
        Ok(Body::Export(Box::new(Writer {
            settings: settings.clone(),
            files,
            inputs,
            rejects: context.rejects.clone(),
            scratch: context.scratch.clone(),
            stage: context.stage.clone(),
            storage: context.storage.clone(),
            events: context.events.clone(),
            pieces: BTreeMap::new(),
            stop: Box::new(context.gives_up()),
        })))
    }

    fn identity(settings: &WriteSettings) -> serde_json::Value {
        settings.identity()
    }
}

/// Refuses settings of another format, and rows that do not say where the recordings are that the format needs.
fn check_format(settings: &WriteSettings, inputs: &Inputs) -> Result<(), StageError> {
    if settings.shard_rows == 0 {
        return Err(StageError::setting("shard_rows", "a shard has at least one row"));
    }
    if settings.format != Format::Huggingface {
        if !settings.license.is_empty() {
            return Err(StageError::setting("license", "only `format: huggingface` writes it"));
        }
        if settings.audio_of_rows != AudioOfRows::Embed {
            return Err(StageError::setting(
                "audio_of_rows",
                "only `format: huggingface` has it",
            ));
        }
    }
    match settings.dataset() {
        Some(dataset) => flow_datasets::check(&dataset, inputs),
        None => Ok(()),
    }
}

/// Refuses columns that cannot be written beside those of a manifest, or that rows lack.
fn check_further(further: &[String], inputs: &Inputs) -> Result<(), StageError> {
    let wrong = |message: String| Err(StageError::setting("extra_columns", message));
    for (at, name) in further.iter().enumerate() {
        if further[..at].contains(name) {
            return wrong(format!("`{name}` is named twice"));
        }
        for input in inputs.iter() {
            let Ok(field) = input.schema.field_with_name(name) else {
                return wrong(format!(
                    "`{}` has no column `{name}`; those that can be written are: {}",
                    input.name,
                    place_columns::others(&input.schema).join(", ")
                ));
            };
            let is_ours = !place_columns::others(&input.schema).contains(&name.as_str());
            if is_ours || [EXTRA, "audio_filepath", "offset"].contains(&name.as_str()) {
                return wrong(format!(
                    "`{name}` is a column that manifests have anyway, or has another meaning in them"
                ));
            }
            let data_type = field.data_type();
            if !(data_type.is_numeric() || data_type.is_string() || *data_type == DataType::Boolean) {
                return wrong(format!(
                    "`{name}` of `{}` is {data_type}: texts, numbers and truth values can be written; cast it in SQL",
                    input.name
                ));
            }
        }
    }
    Ok(())
}

struct Writer {
    settings: WriteSettings,
    /// By input: its name, and its file.
    files: Vec<(&'static str, &'static str)>,
    inputs: Vec<Artifact>,
    rejects: RejectSet,
    scratch: PathBuf,
    /// Of messages.
    stage: String,
    storage: Storage,
    events: Events,
    /// Of the files of the set that was written.
    pieces: BTreeMap<String, Vec<Piece>>,
    /// Whether to give up.
    stop: Box<dyn Fn() -> bool + Send + Sync>,
}

impl Export for Writer {
    fn folder(&self) -> PathBuf {
        self.settings.out.clone()
    }

    fn further_inputs(&self) -> Result<Option<Digest>, StageError> {
        let dataset = self.settings.dataset();
        let digest = dataset.map(|dataset| flow_datasets::recordings_digest(&self.storage, &dataset, &self.splits()));
        digest.transpose()
    }

    fn write(&mut self, set: &mut ExportSet) -> Result<(), StageError> {
        self.note_left_out();
        let WriteSettings { audio, out, .. } = &self.settings;
        let (inputs, rejects) = (&self.inputs, &self.rejects);
        let rows: u64 = inputs.iter().map(Artifact::rows).sum();
        if rows == 0 && rejects.rows() > 0 && !self.settings.allow_empty {
            set.guard_empty(all_refused(rejects));
        }
        if let Some(dataset) = self.settings.dataset() {
            let writing = Writing {
                stage: &self.stage,
                storage: &self.storage,
                events: &self.events,
                stop: &self.stop,
            };
            return flow_datasets::write(&dataset, &self.splits(), set, &writing);
        }
        set.refuse_others(self.names())?;
        for (what, names) in GUARDED {
            let rows = self
                .files
                .iter()
                .zip(inputs)
                .filter(|((name, _), _)| names.contains(name));
            let (files, rows): (Vec<String>, Vec<u64>) = rows
                .map(|((_, file), artifact)| (format!("{file}.parquet"), artifact.rows()))
                .unzip();
            set.guard_rows(what, files, rows.iter().sum(), self.settings.max_shrink);
        }
        let recipe = Recipe::of::<Write>(&self.settings)?;
        let notes = Notes::read(&self.scratch);
        let (statistics, refused) = (set.file(STATISTICS)?, set.create(REJECTS)?);
        let standing = notes.standing(set.folder(), REJECTS);
        let (written, refused) = std::thread::scope(|scope| {
            // In parallel with the encoders of the manifests.
            let recipe_of_rejects = recipe.of_file(&rejects_schema(), &Schema::empty());
            let standing = &standing;
            let beside = scope.spawn(move || {
                let path = refused.path().to_path_buf();
                let (refused, pieces) = write_rejects_of_set(rejects, recipe_of_rejects, standing, &path, refused)?;
                refused.close();
                Ok::<_, StageError>(pieces)
            });
            let written = self.write_manifests(inputs, &Extracted::new(audio, out), &recipe, &notes, set);
            // Propagates a panic of the other thread.
            let beside = beside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            written.and_then(|written| beside.map(|beside| (written, beside)))
        })?;
        let mut figures = Vec::new();
        for ((input, file), written) in self.files.iter().zip(written) {
            figures.push((*input, written.figures));
            self.pieces.insert(format!("{file}.parquet"), written.rows);
            if let Some(lines) = written.lines {
                self.pieces.insert(format!("{file}.jsonl"), lines);
            }
        }
        self.pieces.insert(REJECTS.into(), refused);
        write_statistics(figures, &statistics)
    }

    fn stands(&mut self) {
        if !is_url(&self.settings.out) {
            // Without them the next set is written from nothing.
            let _ = Notes::of(std::mem::take(&mut self.pieces)).write(&self.scratch);
        }
    }
}

/// What was written of one input.
struct Written {
    figures: Languages<Figures>,
    /// Pieces of the parquet file, and of the JSON lines.
    rows: Vec<Piece>,
    lines: Option<Vec<Piece>>,
}

/// The message that all rows were rejected, with the most frequent reasons.
fn all_refused(rejects: &RejectSet) -> String {
    const NAMED: usize = 5;
    let mut reasons: Vec<(u64, String)> = Vec::new();
    for (stage, counts) in rejects.by_reason() {
        let named = |count: ReasonCount| (count.rows, format!("{} of stage {stage}", count.reason));
        reasons.extend(counts.into_iter().map(named));
    }
    reasons.sort_by(|one, other| other.0.cmp(&one.0).then_with(|| one.1.cmp(&other.1)));
    let named = reasons.iter().take(NAMED);
    let named: Vec<String> = named.map(|(rows, reason)| format!("{rows} {reason}")).collect();
    format!("all {} rows were refused: {}", rejects.rows(), named.join(", "))
}

impl Writer {
    /// Reports columns of the rows that are not written.
    fn note_left_out(&self) {
        let WriteSettings {
            format, extra_columns, ..
        } = &self.settings;
        let mut left_out = BTreeSet::new();
        for input in &self.inputs {
            let others = place_columns::others(input.schema());
            let extra = (*format == Format::Huggingface && with_extra(input.schema())).then_some(EXTRA);
            let columns = others
                .into_iter()
                .chain(extra)
                .filter(|name| !FOR_STAGES.contains(name));
            left_out.extend(columns.filter(|name| extra_columns.iter().all(|further| further != name)));
        }
        if !left_out.is_empty() {
            let names: Vec<&str> = left_out.into_iter().collect();
            self.events.send(Event::note(format!(
                "{}: columns that are not written: {}; name them in `extra_columns` to write them",
                self.stage,
                names.join(", ")
            )));
        }
    }

    /// The inputs that are splits of a dataset, and the names of these.
    fn splits(&self) -> Vec<(&'static str, &Artifact)> {
        let named = |wanted: &str, split| {
            let mut inputs = self.files.iter().zip(&self.inputs);
            inputs
                .find(|((name, _), _)| *name == wanted)
                .map(|(_, artifact)| (split, artifact))
        };
        let divided: Vec<_> = [named("train", "train"), named("val", "validation")]
            .into_iter()
            .flatten()
            .collect();
        match divided.is_empty() {
            true => named("master", "train").into_iter().collect(),
            false => divided,
        }
    }

    /// The files of manifests.
    fn names(&self) -> Vec<String> {
        let lines = self.settings.jsonl.then_some("jsonl");
        let of_input = |(_, file): &(_, &str)| {
            let endings = std::iter::once("parquet").chain(lines);
            endings.map(|ending| format!("{file}.{ending}")).collect::<Vec<_>>()
        };
        let manifests = self.files.iter().flat_map(of_input);
        manifests.chain([REJECTS, STATISTICS].map(String::from)).collect()
    }

    /// Gives what was written of each input.
    fn write_manifests(
        &self,
        inputs: &[Artifact],
        extracted: &Extracted,
        recipe: &Recipe<'_>,
        notes: &Notes,
        set: &mut ExportSet,
    ) -> Result<Vec<Written>, StageError> {
        let folder = set.folder().to_path_buf();
        let mut files = Vec::with_capacity(inputs.len());
        for (_, file) in &self.files {
            let mut of = |name: String| Ok::<_, StageError>((set.create(&name)?, notes.standing(&folder, &name)));
            let lines = self.settings.jsonl.then(|| of(format!("{file}.jsonl"))).transpose()?;
            files.push((of(format!("{file}.parquet"))?, lines));
        }
        type File = (ExportFile, Standing);
        let write = &|artifact: &Artifact, ((rows, standing), lines): (File, Option<File>)| {
            let path = rows.path().to_path_buf();
            let (figures, pieces, rows) = write_manifest(artifact, extracted, recipe, &standing, &path, rows)?;
            rows.close();
            let lines = lines.map(|(lines, standing)| {
                let path = lines.path().to_path_buf();
                let (pieces, lines) = write_lines(artifact, extracted, recipe, &standing, &path, lines)?;
                lines.close();
                Ok::<_, StageError>(pieces)
            });
            Ok::<_, StageError>(Written {
                figures,
                rows: pieces,
                lines: lines.transpose()?,
            })
        };
        std::thread::scope(|scope| {
            // Small manifests in parallel with the others: for a few rows of validation the files of nearly all rows
            // are read.
            let (mut beside, mut large) = (Vec::new(), Vec::new());
            for (at, (artifact, files)) in inputs.iter().zip(files).enumerate() {
                match artifact.rows() <= ROW_GROUP as u64 {
                    true => beside.push((at, scope.spawn(move || write(artifact, files)))),
                    false => large.push((at, artifact, files)),
                }
            }
            let mut written = BTreeMap::new();
            for (at, artifact, files) in large {
                written.insert(at, write(artifact, files)?);
            }
            for (at, beside) in beside {
                // Propagates a panic of the other thread.
                let small = beside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                written.insert(at, small?);
            }
            Ok(written.into_values().collect())
        })
    }
}

/// The columns of a manifest. One of rows that may be files, or parts of one, says so in two columns more, as NeMo calls
/// them; what else a manifest said that was read is in one more, and `further` ones come last.
fn written_schema(rows: &Schema, further: &[String]) -> SchemaRef {
    let mut fields: Vec<_> = manifest_schema().fields().iter().cloned().collect();
    if of_read(rows) {
        fields.push(Arc::new(Field::new("audio_filepath", DataType::Utf8, true)));
        fields.push(Arc::new(Field::new("offset", DataType::Float64, true)));
    }
    if with_extra(rows) {
        fields.push(Arc::new(Field::new(EXTRA, DataType::Utf8, true)));
    }
    // That they are there was checked before the run.
    let named = further.iter().filter_map(|name| rows.field_with_name(name).ok());
    fields.extend(named.map(|field| Arc::new(Field::new(field.name(), field.data_type().clone(), true))));
    Arc::new(Schema::new(fields))
}

/// Writes the manifest columns of all rows of `artifact`, and further ones, to `to`, partitions in the order of the manifest.
/// Gives what the manifest holds, language by language, where its row groups lie, and `to`. `path` is what errors name.
///
/// # Errors
/// When a value is null, a row does not say where its recording is, or the file cannot be written.
pub(crate) fn write_manifest<W: io::Write + Send>(
    artifact: &Artifact,
    extracted: &Extracted<'_>,
    recipe: &Recipe<'_>,
    standing: &Standing,
    path: &Path,
    to: W,
) -> Result<(Languages<Figures>, Vec<Piece>, W), StageError> {
    let further = &recipe.settings.extra_columns;
    let wanted = columns_of(artifact.schema(), further);
    let schema = written_schema(artifact.schema(), further);
    let (partitions, parts) = parts_of(artifact);
    let file = FileOfParts {
        path,
        schema: Arc::clone(&schema),
        recipe: recipe.of_file(&schema, artifact.schema()),
        parts: &parts,
        standing,
    };
    let written = write_parts(to, &file, Some(Durations::default()), |at, push| {
        let partition = partitions[at];
        for batch in artifact.read(partition, Some(&wanted))? {
            push(manifest_rows(
                &batch?,
                partition,
                &recipe.settings.shards,
                extracted,
                &schema,
            )?)?;
        }
        Ok(())
    })?;
    let figures = written.figures.unwrap_or_else(|| Durations::default().figures());
    Ok((figures, written.pieces, written.to))
}

/// The columns of a manifest, with the folder of shards before `tar_path`.
fn manifest_rows(
    batch: &RecordBatch,
    partition: &Partition,
    shards: &str,
    extracted: &Extracted<'_>,
    schema: &SchemaRef,
) -> Result<RecordBatch, StageError> {
    for (name, array) in MANIFEST_COLUMNS.iter().zip(batch.columns()) {
        if array.null_count() > 0 {
            return Err(StageError::failed(format!(
                "`{name}` is null in {} rows of {partition}; a manifest has no nulls",
                array.null_count()
            )));
        }
    }
    let places = Places::of(batch)?;
    let (mut tars, mut files, mut offsets) = (StringBuilder::new(), StringBuilder::new(), Float64Builder::new());
    for row in 0..batch.num_rows() {
        let place = places.of_row(row, shards, extracted, partition)?;
        tars.append_value(place.tar_path);
        files.append_option(place.file);
        offsets.append_option(place.offset);
    }
    let (tars, files, offsets): (ArrayRef, ArrayRef, ArrayRef) = (
        Arc::new(tars.finish()),
        Arc::new(files.finish()),
        Arc::new(offsets.finish()),
    );
    let mut arrays: Vec<ArrayRef> = Vec::with_capacity(schema.fields().len());
    for (name, array) in MANIFEST_COLUMNS.iter().zip(batch.columns()) {
        arrays.push(Arc::clone(if *name == "tar_path" { &tars } else { array }));
    }
    if of_read(batch.schema_ref()) {
        arrays.extend([files, offsets]);
    }
    if let Some(extra) = batch.column_by_name(EXTRA) {
        arrays.push(Arc::clone(extra));
    }
    let further = schema.fields().iter().skip(arrays.len());
    arrays.extend(further.filter_map(|field| batch.column_by_name(field.name()).cloned()));
    Ok(RecordBatch::try_new(Arc::clone(schema), arrays)?)
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
