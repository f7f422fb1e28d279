//! Parquet manifests: flow's own, and others with these columns.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arrow::array::{Array, AsArray, Float64Array, RecordBatch, StringArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type, Schema};
use flow_kind::{Partition, SourcePartition, StageError};
use flow_parquet::{CountedRows, ForeignParquet};
use flow_storage::{FileVersion, Storage};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, RowSelection, RowSelector};

use crate::ManifestError;
use crate::column_names::{FILE_COLUMNS, ID_COLUMNS, LANGUAGE_COLUMNS, TEXT_COLUMNS};
use crate::extra::{self, EXTRA};
use crate::files::label;
use crate::grouped::{Grouped, Grouping};
use crate::looks::{Chain, Look, check_version, looks_of, version_of};
use crate::manifest::Opened;
use crate::manifest_row::{ManifestRow, Refusal, Wanted, refuse};
use crate::naming::{language, named};
use crate::places::{Places, shard_folders};
use crate::rows::Rows;
use crate::text_tables::new_heading;
use crate::times::{DURATION, ENDS, OFFSET, STARTS, Times, Unit, UnitSample, unread, unread_among};
use crate::unpacking::misnamed_or;
use crate::{ReadSettings, file_stem};

const TEXTS: [&str; 9] = [
    "segment_id",
    "shard_id",
    "text",
    "lang",
    "tar_member_name",
    "tar_path",
    "source",
    "audio_path",
    "audio_filepath",
];
/// Required columns.
const REQUIRED: [&str; 2] = ["segment_id", "text"];
/// Columns that are used where a file has none with our names, as in tables of text.
const STAND_INS: [(&str, &[&str]); 4] = [
    ("text", &TEXT_COLUMNS),
    ("audio_filepath", &FILE_COLUMNS),
    ("lang", &LANGUAGE_COLUMNS),
    ("segment_id", &ID_COLUMNS),
];
/// Columns that say which shard a row is of.
const OF_SHARDS: [&str; 3] = ["shard_id", "tar_path", "lang"];
/// Columns that say, with those, where its recording is.
const OF_RECORDINGS: [&str; 3] = ["tar_member_name", "audio_path", "audio_filepath"];

/// Rows of a file without shards that make a partition.
const BLOCK_ROWS: usize = 65_536;
/// Rows that are decoded at a time, and bytes after which it is fewer of them. (A batch cannot have more than 2 GiB of text.)
const BATCH_ROWS: usize = 2_048;
const BATCH_BYTES: u64 = 64 << 20;

/// Rows of a file: first and number.
type Run = (usize, usize);

/// By the name of the shard: its rows, and how their recordings look.
type ShardsOfFile = BTreeMap<String, (Vec<Run>, Chain)>;

/// Parquet manifests, cut into shards.
pub struct TableManifest {
    files: Vec<Table>,
    shards: BTreeMap<Partition, Shard>,
    lang: String,
    source: String,
    look: bool,
    scratch: PathBuf,
}

struct Table {
    path: PathBuf,
    places: Places,
    metadata: ArrowReaderMetadata,
    rows: usize,
    /// How the file looked before it was opened.
    look: FileVersion,
    /// Where rows are in their recordings, and what else the manifest says, where it has columns for that.
    further: Vec<&'static str>,
    /// Columns of other names that replace ours: theirs, and ours (empty: it is not read).
    stand_ins: Vec<(String, String)>,
    has_id: bool,
    /// If not, recordings are measured.
    has_duration: bool,
    /// Of the columns `start` and `end`.
    unit: Unit,
    reading: Mutex<Reading>,
}

/// How the rows of a file are read: shard by shard out of the file, until as many rows were passed over as it has; then
/// all of them once, into groups by shard. So it does not matter how the shards are in it.
#[derive(Default)]
struct Reading {
    passed: usize,
    grouped: Option<Grouped>,
}

#[derive(Default)]
struct Shard {
    /// Its place among the shards.
    number: u32,
    runs: Vec<(usize, Vec<Run>)>,
    recordings: Chain,
}

impl TableManifest {
    /// `scratch` is a folder for temporary files.
    ///
    /// # Errors
    /// When a file cannot be read or lacks a column, or there is no row.
    pub fn open(
        storage: &Storage,
        files: Vec<PathBuf>,
        settings: &ReadSettings,
        scratch: &Path,
    ) -> Result<Self, ManifestError> {
        let mut manifest = TableManifest {
            files: Vec::new(),
            shards: BTreeMap::new(),
            lang: settings.lang.clone(),
            source: settings.source.clone(),
            look: settings.check_audio,
            scratch: scratch.to_path_buf(),
        };
        for (number, path) in files.into_iter().enumerate() {
            let mut table = Table::open(storage, &path, settings)?;
            // A measured duration is part of the row, so the recording is looked at.
            let look = settings.check_audio || !table.has_duration;
            let (found, rows) = table.shards(storage, number, look)?;
            table.rows = rows;
            for (name, (runs, recordings)) in found {
                let shard = manifest.shards.entry(Partition::from(name)).or_default();
                shard.runs.push((number, runs));
                shard.recordings.join(recordings);
            }
            manifest.files.push(table);
        }
        for (number, shard) in (0..).zip(manifest.shards.values_mut()) {
            shard.number = number;
        }
        match manifest.files.first() {
            Some(first) if manifest.shards.is_empty() => Err(first.wrong("there are no rows in it".into())),
            _ => Ok(manifest),
        }
    }

    /// The rows of a shard, where those of the file were grouped; none where they are to be read out of it.
    fn of_group(
        &self,
        storage: &Storage,
        file: usize,
        shard: u32,
        runs: &[Run],
    ) -> Result<Option<Vec<RecordBatch>>, StageError> {
        let table = &self.files[file];
        // The lock is held while rows are grouped, since other workers need the result, too.
        let mut reading = table.reading.lock().unwrap_or_else(PoisonError::into_inner);
        if reading.grouped.is_none() {
            let passed = reading.passed.saturating_add(table.passed_for(runs));
            if passed <= table.rows {
                reading.passed = passed;
                return Ok(None);
            }
            reading.passed += table.rows;
            reading.grouped = Some(self.group(storage, file)?);
        }
        Ok(match &reading.grouped {
            Some(grouped) => Some(grouped.read(shard as usize)?),
            None => None,
        })
    }

    fn group(&self, storage: &Storage, file: usize) -> Result<Grouped, ManifestError> {
        let table = &self.files[file];
        let mut shard_of = vec![0u32; table.rows];
        for shard in self.shards.values() {
            for (_, runs) in shard.runs.iter().filter(|(of, _)| *of == file) {
                for &(first, count) in runs {
                    shard_of[first..first + count].fill(shard.number);
                }
            }
        }
        let mut grouping = Grouping::new(&self.scratch, self.shards.len());
        let mut reader = table.rows(storage, &table.columns(), None)?;
        let mut at = 0;
        while let Some(batch) = table.next(&mut reader)? {
            let rows = batch.num_rows();
            let shards = shard_of.get(at..at + rows);
            let shards = shards.ok_or_else(|| table.wrong("it has more rows than it had before".into()))?;
            grouping.add(batch, shards)?;
            at += rows;
        }
        grouping.finish()
    }

    /// How many rows of its files were passed over to read what was asked for.
    pub fn rows_passed(&self) -> usize {
        let passed = |table: &Table| table.reading.lock().unwrap_or_else(PoisonError::into_inner).passed;
        self.files.iter().map(passed).sum()
    }
}

impl Opened for TableManifest {
    fn decision(&self) -> Option<String> {
        self.files.iter().find_map(|table| table.unit.decision())
    }

    fn names(&self) -> Vec<Partition> {
        self.shards.keys().cloned().collect()
    }

    fn partitions(&self, _storage: &Storage) -> Result<Vec<SourcePartition>, ManifestError> {
        let partition = |(name, shard): (&Partition, &Shard)| {
            SourcePartition::new(
                name.clone(),
                shard
                    .runs
                    .iter()
                    .map(|(file, _)| self.files[*file].path.clone())
                    .collect(),
                if self.look || shard.runs.iter().any(|(file, _)| !self.files[*file].has_duration) {
                    let units = shard.runs.iter().map(|(file, _)| self.files[*file].unit.in_key());
                    shard.recordings.to_hex() + &units.collect::<String>()
                } else {
                    String::new()
                },
            )
        };
        Ok(self.shards.iter().map(partition).collect())
    }

    fn read(&self, storage: &Storage, partition: &Partition, rows: &mut Rows<'_>) -> Result<(), StageError> {
        let shard = self.shards.get(partition);
        let shard = shard.ok_or_else(|| StageError::failed(format!("the manifest has no shard {partition}")))?;
        for (file, runs) in &shard.runs {
            let table = &self.files[*file];
            check_version(storage, table.look, &table.path)?;
            let mut push = |batch: &RecordBatch| {
                let columns = Columns::of(batch)?;
                for row in 0..batch.num_rows() {
                    let read = columns.row(row, table, &self.lang, &self.source);
                    rows.push(read, || columns.values(row))?;
                }
                Ok::<_, StageError>(())
            };
            if let Some(batches) = self.of_group(storage, *file, shard.number, runs)? {
                batches.iter().try_for_each(push)?;
                continue;
            }
            let mut reader = table.rows(storage, &table.columns(), Some(runs))?;
            while let Some(batch) = table.next(&mut reader)? {
                push(&batch)?;
            }
        }
        Ok(())
    }
}

impl Table {
    fn open(storage: &Storage, path: &Path, settings: &ReadSettings) -> Result<Table, ManifestError> {
        let look = version_of(storage, path).map_err(|e| ManifestError::io(path, e))?;
        let file = ForeignParquet::open(storage, path).map_err(|e| ManifestError::io(path, e))?;
        let metadata = file
            .metadata()
            .map_err(|source| misnamed_or(storage, path, ManifestError::parquet(path, source)))?;
        let rows = metadata.metadata().row_groups().iter().map(|group| group.num_rows());
        let mut table = Table {
            path: path.to_path_buf(),
            places: settings.places(path.parent().unwrap_or(Path::new(""))),
            rows: rows.fold(0, |sum, rows| sum.saturating_add(usize::try_from(rows).unwrap_or(0))),
            metadata,
            look,
            further: Vec::new(),
            stand_ins: Vec::new(),
            has_id: false,
            has_duration: false,
            unit: Unit::Seconds,
            reading: Mutex::default(),
        };
        let (schema, renamed) =
            with_new_names(table.metadata.schema(), &settings.columns).map_err(|why| table.wrong(why))?;
        let has = |name: &&str| schema.field_with_name(name).is_ok();
        // With a column `size` (bytes in a tar), `offset` is in bytes: these are rows of `manifest.read` itself.
        let starts = if has(&"size") { &STARTS[1..2] } else { &STARTS[..] };
        let [starts, ends] = [starts, &ENDS[..]].map(|names| names.iter().copied().filter(|name| has(name)));
        let (starts, ends): (Vec<&'static str>, Vec<&'static str>) = (starts.collect(), ends.collect());
        let has_place = ["audio_path", "audio_filepath", "tar_path"].iter().any(has);
        let stand_ins: Vec<(&str, &str)> = STAND_INS
            .into_iter()
            .filter(|(ours, _)| !(has(ours) || *ours == "audio_filepath" && has_place))
            .filter_map(|(ours, names)| {
                let is_text = |name: &&&str| {
                    schema
                        .field_with_name(name)
                        .is_ok_and(|field| accepted(false, field.data_type()))
                };
                Some((*names.iter().find(is_text)?, ours))
            })
            .collect();
        let has_ours = |ours: &str| has(&ours) || stand_ins.iter().any(|(_, name)| *name == ours);
        let names_files = ["audio_path", "audio_filepath"].into_iter().any(has_ours);
        if let (false, Ok(field)) = (names_files || has_place, schema.field_with_name("audio"))
            && matches!(field.data_type(), DataType::Struct(_))
        {
            let why = "its column `audio` is a structure without the bytes of the recordings; name their files in a column \
                       `audio_filepath`";
            return Err(table.wrong(why.into()));
        }
        let lacking = REQUIRED
            .into_iter()
            .find(|name| !(has_ours(name) || *name == "segment_id" && names_files));
        // A recording is measured where the row is told from its beginning on.
        let is_told = has(&DURATION) || names_files || !(starts.is_empty() || ends.is_empty());
        let lacking = lacking.or((!is_told).then_some(DURATION));
        // Without names of files ids are needed; whoever has neither lacks the former.
        let lacking = lacking.map(|name| {
            if name == "segment_id" && !has_place {
                "audio_filepath"
            } else {
                name
            }
        });
        if let Some(name) = lacking {
            let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
            let names = names.join(", ");
            return Err(table.wrong(format!("it has no column `{name}`; its columns are {names}")));
        }
        if let (Some(end), true) = (ends.first(), starts.is_empty()) {
            return Err(table.wrong(format!(
                "its column `{end}` says where rows end, but none where they begin (one of {})",
                STARTS.join(", ")
            )));
        }
        let names = schema.fields().iter().filter(|field| !field.data_type().is_nested());
        let is_placed = !starts.is_empty() && (has(&DURATION) || !ends.is_empty());
        if let (false, Some(name)) = (is_placed, unread_among(names.map(|field| field.name().as_str()))) {
            return Err(table.wrong(format!(
                "its column {}; `columns` gives it such a name ([{name}=start]), or leaves it out of account ([{name}=extra])",
                unread(name)
            )));
        }
        let times = [&starts[..], &ends].concat();
        for name in TEXTS.into_iter().chain([DURATION]).chain(times.iter().copied()) {
            let number = !TEXTS.contains(&name);
            if let Ok(field) = schema.field_with_name(name)
                && !accepted(number, field.data_type())
            {
                let wanted = if number { "a number" } else { "text" };
                return Err(table.wrong(format!("column `{name}` is {}, not {wanted}", field.data_type())));
            }
        }
        let is_sampled = settings.check_audio && starts.iter().any(|name| *name != OFFSET) && !ends.is_empty();
        let mut further = times;
        // A column `extra` of another type has another meaning.
        further.extend(
            schema
                .field_with_name(EXTRA)
                .is_ok_and(|field| accepted(false, field.data_type()) && !field.data_type().is_integer())
                .then_some(EXTRA),
        );
        table.has_id = has_ours("segment_id");
        table.has_duration = has(&DURATION);
        table.further = further;
        let of_ours = |name: &str| {
            stand_ins
                .iter()
                .find(|(theirs, _)| *theirs == name)
                .map(|(_, ours)| *ours)
        };
        let both = renamed
            .iter()
            .map(|(theirs, ours)| (theirs.as_str(), of_ours(ours).unwrap_or(ours)));
        let others = stand_ins
            .iter()
            .copied()
            .filter(|(theirs, _)| !renamed.iter().any(|(name, _)| name == theirs));
        let both: Vec<(&str, &str)> = both.chain(others).collect();
        table.stand_ins = both
            .into_iter()
            .map(|(theirs, ours)| (theirs.into(), ours.into()))
            .collect();
        if is_sampled {
            table.unit = table.sampled_unit(storage)?;
        }
        Ok(table)
    }

    /// The unit of the times, by a sample of the rows.
    fn sampled_unit(&self, storage: &Storage) -> Result<Unit, ManifestError> {
        let mut sample = UnitSample::default();
        let columns = [&OF_SHARDS[..2], &OF_RECORDINGS, &[DURATION], &self.further].concat();
        let mut reader = self.rows(storage, &columns, None)?;
        while let Some(batch) = self.next(&mut reader)? {
            let columns = Columns::of(&batch)?;
            for row in 0..batch.num_rows() {
                if sample.is_due()
                    && let (Ok(times), Ok(wanted)) = (columns.times(row), columns.wanted(row, &self.places, &self.path))
                {
                    times.add_to(&mut sample, wanted.files);
                }
            }
        }
        Ok(sample.unit(storage))
    }

    /// The columns that rows are made of, whether the file has them or not.
    fn columns(&self) -> Vec<&'static str> {
        [&TEXTS[..], &[DURATION][..], &self.further[..]].concat()
    }

    fn wrong(&self, why: String) -> ManifestError {
        ManifestError::manifest(&self.path, why)
    }

    fn rows(&self, storage: &Storage, columns: &[&str], runs: Option<&[Run]>) -> Result<CountedRows, ManifestError> {
        let parquet = |source| ManifestError::parquet(&self.path, source);
        let file = ForeignParquet::open(storage, &self.path).map_err(|e| ManifestError::io(&self.path, e))?;
        let schema = self.metadata.schema();
        let roots = schema
            .fields()
            .iter()
            .enumerate()
            .filter(|(_, field)| columns.contains(&self.our_name(field.name())))
            .map(|(root, _)| root);
        let mask = ProjectionMask::roots(self.metadata.parquet_schema(), roots);
        let bytes: i64 = self
            .metadata
            .metadata()
            .row_groups()
            .iter()
            .flat_map(|group| group.columns().iter().map(|column| column.uncompressed_size()))
            .fold(0, i64::saturating_add);
        let of_row = u64::try_from(bytes).unwrap_or(0) / (self.rows as u64).max(1) + 1;
        let batch_rows = usize::try_from(BATCH_BYTES / of_row)
            .unwrap_or(BATCH_ROWS)
            .clamp(1, BATCH_ROWS);
        let Some(runs) = runs else {
            return file.rows(&self.metadata, mask, batch_rows, None).map_err(parquet);
        };
        let (groups, selection) = self.selection(runs);
        file.rows_of(&self.metadata, &groups, mask, batch_rows, Some(selection))
            .map_err(parquet)
    }

    /// The row groups that rows are in, and which of the rows of these groups they are.
    fn selection(&self, runs: &[Run]) -> (Vec<usize>, RowSelection) {
        let (mut groups, mut selectors) = (Vec::new(), Vec::new());
        let (mut start, mut at, mut runs) = (0usize, 0usize, runs.iter().copied().peekable());
        for (number, group) in self.metadata.metadata().row_groups().iter().enumerate() {
            let end = start.saturating_add(usize::try_from(group.num_rows()).unwrap_or(0));
            while let Some((first, count)) = runs.peek_mut().filter(|run| run.0 < end) {
                if groups.last() != Some(&number) {
                    groups.push(number);
                    at = start;
                }
                let here = (*count).min(end - *first);
                selectors.push(RowSelector::skip(*first - at));
                selectors.push(RowSelector::select(here));
                at = *first + here;
                (*first, *count) = (at, *count - here);
                if *count > 0 {
                    break;
                }
                runs.next();
            }
            if groups.last() == Some(&number) {
                selectors.push(RowSelector::skip(end - at));
            }
            start = end;
        }
        (groups, RowSelection::from(selectors))
    }

    fn next(&self, reader: &mut CountedRows) -> Result<Option<RecordBatch>, ManifestError> {
        let Some(batch) = reader.next().transpose()? else {
            return Ok(None);
        };
        if self.stand_ins.is_empty() {
            return Ok(Some(batch));
        }
        let schema = batch.schema();
        let fields = schema.fields().iter().map(|field| {
            let name = self.our_name(field.name());
            field.as_ref().clone().with_name(name)
        });
        let schema = Schema::new(fields.collect::<Vec<_>>());
        Ok(Some(RecordBatch::try_new(Arc::new(schema), batch.columns().to_vec())?))
    }

    /// The name that we have for a column of the file.
    fn our_name<'n>(&'n self, theirs: &'n str) -> &'n str {
        let ours = self.stand_ins.iter().find(|(name, _)| name == theirs);
        ours.map_or(theirs, |(_, ours)| ours)
    }

    /// How many rows are passed over to read these: all of the row groups that they are in.
    fn passed_for(&self, runs: &[Run]) -> usize {
        let groups = self.metadata.metadata().row_groups();
        let rows = |group: usize| usize::try_from(groups[group].num_rows()).unwrap_or(0);
        let (touched, _) = self.selection(runs);
        touched.into_iter().map(rows).fold(0, usize::saturating_add)
    }

    /// The shards in this file by name: where their rows are, in order, and how their recordings look if `look` asks for
    /// that. And how many rows there are.
    fn shards(&self, storage: &Storage, number: usize, look: bool) -> Result<(ShardsOfFile, usize), ManifestError> {
        let recordings = if look { &OF_RECORDINGS[..] } else { &[] };
        let mut reader = self.rows(storage, &[&OF_SHARDS[..], recordings].concat(), None)?;
        let label = label(number, &self.path);
        let mut numbers: HashMap<String, usize> = HashMap::new();
        let mut shards: Vec<(Vec<Run>, Chain)> = Vec::new();
        let mut at = 0;
        let mut current: Option<([String; 3], usize)> = None;
        while let Some(batch) = self.next(&mut reader)? {
            let rows = batch.num_rows();
            let [shard_ids, tars, langs] = OF_SHARDS.map(|name| text_column(&batch, name));
            let (shard_ids, tars, langs) = (shard_ids?, tars?, langs?);
            let looks = if look { Some(self.looks(storage, &batch)?) } else { None };
            for row in 0..rows {
                let values = [&shard_ids, &tars, &langs].map(|column| value(column, row));
                // The language is part of the name only where the tar does not tell the folder.
                let same = current.as_ref().is_some_and(|(held, _)| {
                    held[0] == values[0] && held[1] == values[1] && (held[2] == values[2] || !held[1].is_empty())
                });
                let begins_block = values[0].is_empty() && at % BLOCK_ROWS == 0;
                let shard = match &current {
                    Some((_, shard)) if same && !begins_block => *shard,
                    _ => {
                        let [shard_id, tar_path, lang] = values;
                        let name = match shard_folders(tar_path) {
                            _ if shard_id.is_empty() => format!("{label}/{:06}", at / BLOCK_ROWS),
                            Some((lang, folder)) if folder == shard_id => format!("{lang}/{shard_id}"),
                            _ if lang.is_empty() => format!("und/{shard_id}"),
                            _ => format!("{lang}/{shard_id}"),
                        };
                        let shard = *numbers.entry(name).or_insert(shards.len());
                        if shard == shards.len() {
                            shards.push(Default::default());
                        }
                        current = Some((values.map(str::to_string), shard));
                        shard
                    }
                };
                let (runs, chain) = &mut shards[shard];
                match runs.last_mut() {
                    Some((first, count)) if *first + *count == at => *count += 1,
                    _ => runs.push((at, 1)),
                }
                if let Some(looks) = &looks {
                    chain.add(&looks[row]);
                }
                at += 1;
            }
        }
        let named = |(name, number): (String, usize)| (name, std::mem::take(&mut shards[number]));
        Ok((numbers.into_iter().map(named).collect(), at))
    }

    /// The metadata of each row's recording.
    fn looks(&self, storage: &Storage, batch: &RecordBatch) -> Result<Vec<Look>, ManifestError> {
        let columns = Columns::of(batch)?;
        let wanted: Vec<Wanted> = (0..batch.num_rows())
            .map(|row| columns.wanted(row, &self.places, &self.path).unwrap_or_default())
            .collect();
        looks_of(storage, &wanted)
    }
}

/// The columns of a file that count, with the names that the setting `columns` gives them, and the columns that it concerns:
/// theirs, and ours (empty: it is not read). Pairs for columns of other files are passed over.
fn with_new_names(schema: &Schema, columns: &[String]) -> Result<(Schema, Vec<(String, String)>), String> {
    let theirs: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
    let is_there = |pair: &&String| {
        let named = pair.rsplit_once('=').map_or("", |(name, _)| name.trim());
        theirs.iter().any(|name| name.eq_ignore_ascii_case(named))
    };
    let columns: Vec<String> = columns.iter().filter(is_there).cloned().collect();
    let (names, kept) = new_heading(&theirs, &columns)?;
    let (mut fields, mut renamed) = (Vec::new(), Vec::new());
    for (place, (field, name)) in schema.fields().iter().zip(names).enumerate() {
        let name = if kept.contains(&place) { String::new() } else { name };
        if *field.name() != name {
            renamed.push((field.name().clone(), name.clone()));
        }
        if !name.is_empty() {
            fields.push(field.as_ref().clone().with_name(name));
        }
    }
    Ok((Schema::new(fields), renamed))
}

/// Whether a column of this type can be read as numbers or as text; whole numbers and decimals are read as either.
fn accepted(number: bool, data_type: &DataType) -> bool {
    match data_type {
        DataType::Dictionary(_, values) => !matches!(**values, DataType::Dictionary(..)) && accepted(number, values),
        DataType::Null => true,
        other if other.is_integer() => true,
        DataType::Decimal128(..) | DataType::Decimal256(..) => true,
        other if number => other.is_floating(),
        other => matches!(other, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View),
    }
}

/// All null where the file has no such column.
fn text_column(batch: &RecordBatch, name: &str) -> Result<StringArray, ManifestError> {
    match batch.column_by_name(name) {
        Some(column) => Ok(cast(column, &DataType::Utf8)?.as_string::<i32>().clone()),
        None => Ok(StringArray::new_null(batch.num_rows())),
    }
}

/// Empty where it is null.
fn value(column: &StringArray, row: usize) -> &str {
    if column.is_null(row) { "" } else { column.value(row) }
}

struct Columns {
    texts: Vec<StringArray>,
    /// Those that say where a row is in its recording, by their names.
    times: Vec<(&'static str, Float64Array)>,
    extra: StringArray,
}

impl Columns {
    fn of(batch: &RecordBatch) -> Result<Columns, ManifestError> {
        // Of several names only those that were asked for are in the batch.
        let mut times = Vec::new();
        for name in STARTS.into_iter().chain(ENDS).chain([DURATION]) {
            if let Some(column) = batch.column_by_name(name) {
                let column = cast(column, &DataType::Float64)?;
                times.push((name, column.as_primitive::<Float64Type>().clone()));
            }
        }
        Ok(Columns {
            texts: TEXTS
                .iter()
                .map(|name| text_column(batch, name))
                .collect::<Result<_, _>>()?,
            times,
            extra: text_column(batch, EXTRA)?,
        })
    }

    fn time(&self, name: &str, row: usize) -> Option<f64> {
        let (_, column) = self.times.iter().find(|(other, _)| *other == name)?;
        column.is_valid(row).then(|| column.value(row))
    }

    fn times(&self, row: usize) -> Result<Times, Refusal> {
        Times::of(|name| Ok(self.time(name, row)))
    }

    fn row(&self, row: usize, table: &Table, lang: &str, source: &str) -> Result<ManifestRow, Refusal> {
        for (name, column) in TEXTS.iter().zip(&self.texts) {
            let is_there = *name != "segment_id" || table.has_id;
            if REQUIRED.contains(name) && column.is_null(row) && is_there {
                return Err(refuse("missing_field", *name));
            }
        }
        let (start, duration) = self.times(row)?.place(table.unit)?;
        if duration.is_none() && table.has_duration {
            return Err(refuse("missing_field", DURATION));
        }
        let wanted = self.wanted(row, &table.places, &table.path)?;
        if wanted == Wanted::default() {
            return Err(refuse(
                "missing_field",
                "neither audio_path, nor tar_path and tar_member_name",
            ));
        }
        let of = |place: usize| value(&self.texts[place], row).to_string();
        let or = |text: String, otherwise: &str| if text.is_empty() { otherwise.to_string() } else { text };
        let text = of(2);
        let file = if of(7).is_empty() { of(8) } else { of(7) };
        let segment_id = if table.has_id {
            of(0)
        } else {
            named(&file, start).segment_id
        };
        Ok(ManifestRow {
            segment_id,
            shard_id: self.shard_id(row, &table.path),
            lang: language(Some(&of(3)), lang, None, &text),
            lang_field: if of(3).is_empty() { "" } else { "lang" },
            text,
            duration,
            tar_member_name: of(4),
            tar_path: of(5),
            source: or(of(6), source),
            start,
            wanted,
            one_channel: false,
            extra: extra::of_column(value(&self.extra, row)),
        })
    }

    fn shard_id(&self, row: usize, file: &Path) -> String {
        match value(&self.texts[1], row) {
            "" => file_stem(file),
            shard_id => shard_id.to_string(),
        }
    }

    /// Candidate places of the recording; none, if the row has no path.
    fn wanted(&self, row: usize, places: &Places, file: &Path) -> Result<Wanted, Refusal> {
        let of = |place: usize| value(&self.texts[place], row);
        let (member, tar_path) = (of(4), of(5));
        let path = if of(7).is_empty() { of(8) } else { of(7) };
        let mut wanted = Wanted::default();
        if !path.is_empty() {
            wanted = places.of_path(path);
        }
        if !tar_path.is_empty() && !member.is_empty() {
            let in_shard = places.of_member(tar_path, member, &self.shard_id(row, file))?;
            wanted.files.extend(in_shard.files);
            wanted.member = in_shard.member;
        }
        Ok(wanted)
    }

    fn values(&self, row: usize) -> String {
        let mut values = serde_json::Map::new();
        for (name, column) in TEXTS.iter().zip(&self.texts) {
            if column.is_valid(row) {
                values.insert((*name).into(), column.value(row).into());
            }
        }
        for (name, _) in &self.times {
            if let Some(seconds) = self.time(name, row) {
                let number = serde_json::Number::from_f64(seconds);
                values.insert(
                    (*name).into(),
                    number.map_or_else(|| seconds.to_string().into(), serde_json::Value::Number),
                );
            }
        }
        serde_json::Value::Object(values).to_string()
    }
}
