//! Shards: folders `<lang>/<shard_id>` with `metadata.parquet` and `audio_index.parquet`, and the rows that
//! the two make together.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Float64Array, RecordBatch, StringArray, UInt32Array, new_null_array};
use arrow::compute::{cast, concat, take};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_audio::listing::is_of_program;
use flow_corpus::ManifestError;
use flow_corpus::columns::constant;
use flow_kind::{ROW, UNREADABLE};
use flow_parquet::ForeignParquet;
use flow_storage::{Location, Storage, StorageError, folders_two_levels_below};
use parquet::arrow::ProjectionMask;

pub const METADATA: &str = "metadata.parquet";
pub const AUDIO_INDEX: &str = "audio_index.parquet";

/// What was found below a `shards` folder.
#[derive(Debug, Default, PartialEq)]
pub struct Listing {
    /// (language, shard id), in byte order of the two.
    pub shards: Vec<(String, String)>,
    /// Links to folders, which are not followed: their targets are not part of the corpus.
    pub links: Vec<PathBuf>,
}

/// Lists the folders exactly two levels below `root`. Files are stepped over, links are not followed. Below a prefix of object
/// storage, those in which an object lies.
///
/// # Errors
/// When `root` or a folder in it cannot be read, or a folder's name is not UTF-8.
pub fn list_shards(storage: &Storage, root: &Path) -> Result<Listing, ManifestError> {
    let mut listing = Listing::default();
    let failed = |error: StorageError| ManifestError::io(root, error.into());
    if let Location::Object(url) = Location::of_path(root).map_err(failed)? {
        listing.shards = folders_two_levels_below(storage, &url).map_err(failed)?;
        (listing.shards).retain(|(lang, shard_id)| ![lang, shard_id].iter().any(|name| is_of_program(name.as_ref())));
        return Ok(listing);
    }
    for (lang, folder) in folders(root, &mut listing.links)? {
        for (shard_id, _) in folders(&folder, &mut listing.links)? {
            listing.shards.push((lang.clone(), shard_id));
        }
    }
    listing.shards.sort_unstable();
    listing.links.sort_unstable();
    Ok(listing)
}

fn folders(folder: &Path, links: &mut Vec<PathBuf>) -> Result<Vec<(String, PathBuf)>, ManifestError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| ManifestError::io(folder, e))? {
        let entry = entry.map_err(|e| ManifestError::io(folder, e))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(|e| ManifestError::io(&path, e))?;
        if kind.is_symlink() && path.is_dir() {
            links.push(path);
        } else if kind.is_dir() && !is_of_program(&entry.file_name()) {
            let name = entry.file_name().into_string();
            let name = name
                .map_err(|_| ManifestError::io(&path, std::io::Error::other("the name of the folder is not UTF-8")))?;
            found.push((name, path));
        }
    }
    Ok(found)
}

/// Why a shard cannot be read at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantine {
    /// `missing_metadata`, `corrupt_metadata`, `missing_audio_index`, `corrupt_audio_index`, `missing_column`,
    /// `bad_column_type`, `too_many_rows`, `too_much_text`, or [`UNREADABLE`], which may pass.
    pub reason: &'static str,
    pub detail: String,
}

impl Quarantine {
    fn unreadable(path: &Path, why: impl std::fmt::Display) -> Self {
        Quarantine::new(UNREADABLE, format!("cannot read {}: {why}", path.display()))
    }

    fn new(reason: &'static str, detail: impl std::fmt::Display) -> Self {
        Quarantine {
            reason,
            detail: detail.to_string().chars().take(200).collect(),
        }
    }
}

/// How a shard's rows are made.
#[derive(Clone, Debug)]
pub struct ShardOptions {
    /// Value of the column `source`.
    pub source: String,
    /// A shard whose join gives more rows than this is put in quarantine (`too_many_rows`).
    pub max_rows: u32,
    /// A shard with more bytes than this in a column of texts is put in quarantine (`too_much_text`): stages hold a shard's
    /// rows as a whole, and a column of texts counts its bytes in 32 bits.
    pub max_text: u64,
}

impl Default for ShardOptions {
    fn default() -> Self {
        ShardOptions {
            source: "shards".into(),
            max_rows: 10_000_000,
            max_text: 1 << 30,
        }
    }
}

/// Schema of joined rows. `duration_s` in seconds; `tar_path` relative to the folder of shards; columns
/// that a shard may lack are nullable.
pub fn joined_schema() -> SchemaRef {
    let text = |name, nullable| Field::new(name, DataType::Utf8, nullable);
    let number = |name| Field::new(name, DataType::Float64, true);
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        text("segment_id", false),
        text("recording_id", true),
        text("path_lang", false),
        text("shard_id", false),
        text("segment_language", true),
        text("transcription_native", true),
        number("duration_s"),
        number("tx_quality_score"),
        text("tar_member_name", false),
        text("tar_path", false),
        text("source", false),
        text("audio_hash", true),
    ]))
}

/// Schema of metadata rows that found no partner.
fn unjoined_schema() -> SchemaRef {
    let joined = joined_schema();
    let fields = joined.fields()[..9].iter().map(|field| {
        if field.name() == "segment_id" {
            Arc::new(Field::new("segment_id", DataType::Utf8, true))
        } else {
            Arc::clone(field)
        }
    });
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

/// A shard's metadata and index, read and joined.
pub struct Shard {
    path_lang: String,
    shard_id: String,
    source: String,
    metadata: Metadata,
    index: Index,
    joined: Vec<Pair>,
    null_segment_id: Vec<Single>,
    no_index_row: Vec<Single>,
    /// Segment ids of index rows that no metadata row names; sorted.
    pub index_without_metadata: Vec<String>,
}

struct Metadata {
    segment_id: StringArray,
    recording_id: ArrayRef,
    segment_language: ArrayRef,
    transcription_native: ArrayRef,
    duration_s: ArrayRef,
    tx_quality_score: ArrayRef,
}

struct Index {
    segment_id: StringArray,
    tar_member_name: ArrayRef,
    audio_hash: ArrayRef,
}

/// A joined row: its number, and the rows of metadata and index it is made of.
struct Pair {
    row: u32,
    metadata: u32,
    index: u32,
}

struct Single {
    row: u32,
    metadata: u32,
}

impl Shard {
    /// Reads and joins the two files below `folder`.
    ///
    /// # Errors
    /// When the shard has to be put in quarantine: a file is missing or corrupt, or lacks a column.
    pub fn read(
        storage: &Storage,
        folder: &Path,
        path_lang: &str,
        shard_id: &str,
        options: &ShardOptions,
    ) -> Result<Shard, Quarantine> {
        use Kind::{Number, Text};
        let wanted = [
            Wanted::required("segment_id", Text),
            Wanted::required("transcription_native", Text),
            Wanted::required("duration_s", Number),
            Wanted::required("tx_quality_score", Number),
            Wanted::required("segment_language", Text),
            Wanted::optional("recording_id", Text),
        ];
        let table = read_table(
            storage,
            &folder.join(METADATA),
            &wanted,
            "missing_metadata",
            "corrupt_metadata",
            options.max_text,
        )?;
        let [
            segment_id,
            transcription_native,
            duration_s,
            tx_quality_score,
            segment_language,
            recording_id,
        ] = table;
        let metadata = Metadata {
            segment_id: as_text(&segment_id),
            recording_id,
            segment_language,
            transcription_native,
            duration_s,
            tx_quality_score,
        };
        let wanted = [
            Wanted::required("segment_id", Text),
            Wanted::required("tar_member_name", Text),
            Wanted::optional("audio_hash", Text),
        ];
        let [segment_id, tar_member_name, audio_hash] = read_table(
            storage,
            &folder.join(AUDIO_INDEX),
            &wanted,
            "missing_audio_index",
            "corrupt_audio_index",
            options.max_text,
        )?;
        let index = Index {
            segment_id: as_text(&segment_id),
            tar_member_name,
            audio_hash,
        };
        let mut shard = Shard {
            path_lang: path_lang.into(),
            shard_id: shard_id.into(),
            source: options.source.clone(),
            metadata,
            index,
            joined: Vec::new(),
            null_segment_id: Vec::new(),
            no_index_row: Vec::new(),
            index_without_metadata: Vec::new(),
        };
        shard.join(options.max_rows)?;
        shard.check_text(options.max_text)?;
        Ok(shard)
    }

    /// Ids that are repeated in both files multiply rows.
    fn check_text(&self, most: u64) -> Result<(), Quarantine> {
        let (metadata, index) = (&self.metadata, &self.index);
        let of_metadata = [
            metadata.segment_id.clone(),
            as_text(&metadata.recording_id),
            as_text(&metadata.segment_language),
            as_text(&metadata.transcription_native),
        ];
        let of_index = [as_text(&index.tar_member_name), as_text(&index.audio_hash)];
        let columns = of_metadata.into_iter().map(|texts| (texts, true));
        for (texts, is_metadata) in columns.chain(of_index.into_iter().map(|texts| (texts, false))) {
            let length = |row: usize| texts.value_length(row) as u64;
            let longest = (0..texts.len()).map(length).max().unwrap_or(0);
            if longest * self.joined.len() as u64 <= most {
                continue;
            }
            let row = |pair: &Pair| if is_metadata { pair.metadata } else { pair.index };
            let bytes: u64 = self.joined.iter().map(|pair| length(row(pair) as usize)).sum();
            if bytes > most {
                let why = format!("metadata and index join to {bytes} bytes in a column, more than {most}");
                return Err(Quarantine::new("too_much_text", why));
            }
        }
        Ok(())
    }

    /// Inner join on `segment_id`, every metadata row with every index row of its id, numbered in the order
    /// (metadata row, index row). Null ids match nothing.
    fn join(&mut self, max_rows: u32) -> Result<(), Quarantine> {
        const END: u32 = u32::MAX;
        if self.aligned() {
            let rows = self.metadata.segment_id.len();
            if rows as u64 <= u64::from(max_rows) {
                self.joined = (0..END)
                    .take(rows)
                    .map(|row| Pair {
                        row,
                        metadata: row,
                        index: row,
                    })
                    .collect();
                return Ok(());
            }
        }
        // Index rows of one id are a chain: from `first` along `next`, in order.
        let ids = &self.index.segment_id;
        let mut first: HashMap<&str, u32> = HashMap::with_capacity(ids.len());
        let mut next = vec![END; ids.len()];
        for (row, id) in (0..END).zip(ids.iter()).collect::<Vec<_>>().into_iter().rev() {
            if let Some(id) = id {
                next[row as usize] = first.insert(id, row).unwrap_or(END);
            }
        }
        let mut row = 0u32;
        let mut number = || {
            let this = row;
            row = row.checked_add(1).filter(|&rows| rows <= max_rows).ok_or_else(|| {
                Quarantine::new(
                    "too_many_rows",
                    format!("metadata and index join to more than {max_rows} rows"),
                )
            })?;
            Ok(this)
        };
        let mut named = BTreeSet::new();
        for (metadata, id) in (0..END).zip(self.metadata.segment_id.iter()) {
            let Some(id) = id else {
                self.null_segment_id.push(Single {
                    row: number()?,
                    metadata,
                });
                continue;
            };
            match first.get(id) {
                None => self.no_index_row.push(Single {
                    row: number()?,
                    metadata,
                }),
                Some(&chain) => {
                    named.insert(chain);
                    let mut index = chain;
                    while index != END {
                        self.joined.push(Pair {
                            row: number()?,
                            metadata,
                            index,
                        });
                        index = next[index as usize];
                    }
                }
            }
        }
        let lone = first
            .iter()
            .filter(|(_, chain)| !named.contains(chain))
            .map(|(id, _)| (*id).to_string());
        self.index_without_metadata = lone.collect::<BTreeSet<_>>().into_iter().collect();
        Ok(())
    }

    /// Whether the two files have the same ids in the same, ascending order, none twice: then each row's partner has
    /// the same index.
    fn aligned(&self) -> bool {
        let (metadata, index) = (&self.metadata.segment_id, &self.index.segment_id);
        metadata.len() == index.len()
            && metadata.null_count() == 0
            && index.null_count() == 0
            && (0..metadata.len()).all(|row| metadata.value(row) == index.value(row))
            && (1..metadata.len()).all(|row| metadata.value(row - 1) < metadata.value(row))
    }

    pub fn metadata_rows(&self) -> usize {
        self.metadata.segment_id.len()
    }

    pub fn index_rows(&self) -> usize {
        self.index.segment_id.len()
    }

    /// Joined rows and rows without a partner.
    pub fn rows(&self) -> u64 {
        (self.joined.len() + self.null_segment_id.len() + self.no_index_row.len()) as u64
    }

    /// The joined rows, [`joined_schema`], at most `size` to a batch.
    pub fn joined(&self, size: usize) -> impl Iterator<Item = Result<RecordBatch, ManifestError>> + '_ {
        self.joined.chunks(size.max(1)).map(|pairs| {
            let from_metadata = Places::new(pairs.iter().map(|pair| pair.metadata).collect());
            let from_index = Places::new(pairs.iter().map(|pair| pair.index).collect());
            let rows = pairs.iter().map(|pair| pair.row).collect::<Vec<_>>();
            let mut columns = self.metadata_columns(rows, &from_metadata)?;
            let mut names = from_index.of(&self.index.tar_member_name)?;
            if names.null_count() > 0 {
                // A member without a name is a member with an empty one, which is refused as unsafe later.
                let named = as_text(&names)
                    .iter()
                    .map(|name| Some(name.unwrap_or("")))
                    .collect::<StringArray>();
                names = Arc::new(named);
            }
            let tar_path = format!("{0}/{1}/{1}.tar", self.path_lang, self.shard_id);
            columns.push(names);
            columns.push(constant(&tar_path, pairs.len())?);
            columns.push(constant(&self.source, pairs.len())?);
            columns.push(from_index.of(&self.index.audio_hash)?);
            Ok(RecordBatch::try_new(joined_schema(), columns)?)
        })
    }

    /// Metadata rows that found no partner, with the reason.
    ///
    /// # Errors
    /// Only where memory for them is lacking.
    pub fn unjoined(&self) -> Result<Vec<(&'static str, RecordBatch)>, ManifestError> {
        let mut batches = Vec::new();
        for (reason, singles) in [
            ("null_segment_id", &self.null_segment_id),
            ("no_index_row", &self.no_index_row),
        ] {
            if !singles.is_empty() {
                let from_metadata = Places::new(singles.iter().map(|single| single.metadata).collect());
                let rows = singles.iter().map(|single| single.row).collect();
                batches.push((
                    reason,
                    RecordBatch::try_new(unjoined_schema(), self.metadata_columns(rows, &from_metadata)?)?,
                ));
            }
        }
        Ok(batches)
    }

    fn metadata_columns(&self, rows: Vec<u32>, from: &Places) -> Result<Vec<ArrayRef>, ManifestError> {
        let count = rows.len();
        let metadata = &self.metadata;
        Ok(vec![
            Arc::new(UInt32Array::from(rows)),
            from.of(&metadata.segment_id)?,
            from.of(&metadata.recording_id)?,
            constant(&self.path_lang, count)?,
            constant(&self.shard_id, count)?,
            from.of(&metadata.segment_language)?,
            from.of(&metadata.transcription_native)?,
            from.of(&metadata.duration_s)?,
            from.of(&metadata.tx_quality_score)?,
        ])
    }
}

/// Rows to take of a column.
enum Places {
    /// From this one on, this many: no copy is made of them.
    Run(usize, usize),
    Any(UInt32Array),
}

impl Places {
    fn new(rows: Vec<u32>) -> Self {
        match rows.first() {
            Some(&first) if (first..).zip(&rows).all(|(run, &row)| run == row) => {
                Places::Run(first as usize, rows.len())
            }
            _ => Places::Any(rows.into()),
        }
    }

    fn of(&self, column: &dyn Array) -> Result<ArrayRef, ManifestError> {
        Ok(match self {
            Places::Run(first, rows) => column.slice(*first, *rows),
            Places::Any(rows) => take(column, rows, None)?,
        })
    }
}

/// `read_table` returns text columns as `StringArray`.
fn as_text(array: &ArrayRef) -> StringArray {
    array
        .as_any()
        .downcast_ref::<StringArray>()
        .cloned()
        .unwrap_or_else(|| StringArray::new_null(array.len()))
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Text,
    Number,
}

impl Kind {
    fn accepts(self, data_type: &DataType) -> bool {
        match (self, data_type) {
            (_, DataType::Dictionary(_, values)) => {
                !matches!(**values, DataType::Dictionary(..)) && self.accepts(values)
            }
            (_, DataType::Null) | (Kind::Text, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View) => true,
            (Kind::Number, other) => other.is_integer() || other.is_floating(),
            (Kind::Text, _) => false,
        }
    }

    fn read_as(self) -> DataType {
        match self {
            Kind::Text => DataType::Utf8,
            Kind::Number => DataType::Float64,
        }
    }
}

/// A column asked of a file. One that is optional is all null where it is missing or of another type.
struct Wanted {
    name: &'static str,
    kind: Kind,
    required: bool,
}

impl Wanted {
    fn required(name: &'static str, kind: Kind) -> Self {
        Wanted {
            name,
            kind,
            required: true,
        }
    }

    fn optional(name: &'static str, kind: Kind) -> Self {
        Wanted {
            name,
            kind,
            required: false,
        }
    }
}

/// Reads columns of a parquet file, each as one text or float64 array.
fn read_table<const N: usize>(
    storage: &Storage,
    path: &Path,
    wanted: &[Wanted; N],
    missing: &'static str,
    corrupt: &'static str,
    most: u64,
) -> Result<[ArrayRef; N], Quarantine> {
    let file = ForeignParquet::open(storage, path).map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => Quarantine::new(missing, ""),
        _ => Quarantine::unreadable(path, error),
    })?;
    decode(&file, wanted, corrupt, most).map_err(|quarantine| match file.unreadable() {
        Some(why) => Quarantine::unreadable(path, why),
        None => quarantine,
    })
}

fn decode<const N: usize>(
    file: &ForeignParquet,
    wanted: &[Wanted; N],
    corrupt: &'static str,
    most: u64,
) -> Result<[ArrayRef; N], Quarantine> {
    let broken = |e: &dyn std::fmt::Display| Quarantine::new(corrupt, e);
    let metadata = file.metadata().map_err(|e| broken(&e))?;
    let schema = Arc::clone(metadata.schema());
    let mut roots = Vec::new();
    for column in wanted {
        match schema.fields().iter().position(|field| field.name() == column.name) {
            Some(root) if column.required || column.kind.accepts(schema.field(root).data_type()) => roots.push(root),
            None if column.required => return Err(Quarantine::new("missing_column", column.name)),
            _ => {}
        }
    }
    let rows = usize::try_from(metadata.metadata().file_metadata().num_rows()).map_err(|e| broken(&e))?;
    let mask = ProjectionMask::roots(metadata.parquet_schema(), roots);
    let reader = file.rows(&metadata, mask, 8192, None).map_err(|e| broken(&e))?;
    let too_much = || Quarantine::new("too_much_text", format!("a column has more than {most} bytes"));
    let batches = reader.collect::<Result<Vec<_>, _>>().map_err(|e| {
        let message = e.to_string();
        // The reader's error where the texts of one batch have more than 2 GiB.
        if message.contains("overflow decoding byte array") {
            too_much()
        } else {
            broken(&message)
        }
    })?;
    let found: usize = batches.iter().map(RecordBatch::num_rows).sum();
    if found != rows {
        return Err(broken(&format!("{found} rows instead of {rows}")));
    }
    let mut table = Vec::with_capacity(N);
    for column in wanted {
        let plain = column.kind.read_as();
        let field = schema
            .field_with_name(column.name)
            .ok()
            .filter(|field| column.kind.accepts(field.data_type()));
        let Some(_) = field else {
            if column.required {
                let found = schema
                    .field_with_name(column.name)
                    .map(|field| field.data_type().to_string())
                    .unwrap_or_default();
                return Err(Quarantine::new("bad_column_type", format!("{}: {found}", column.name)));
            }
            table.push(new_null_array(&plain, found));
            continue;
        };
        let (mut parts, mut bytes) = (Vec::with_capacity(batches.len()), 0);
        for batch in &batches {
            let part = batch.column_by_name(column.name).ok_or_else(|| broken(&column.name))?;
            let part = cast(part, &plain).map_err(|e| broken(&e))?;
            bytes += part
                .as_string_opt::<i32>()
                .map_or(0, |texts| texts.value_data().len() as u64);
            parts.push(part);
        }
        if bytes > most {
            return Err(too_much());
        }
        let parts: Vec<&dyn Array> = parts.iter().map(AsRef::as_ref).collect();
        table.push(if parts.is_empty() {
            new_null_array(&plain, 0)
        } else {
            concat(&parts).map_err(|e| broken(&e))?
        });
    }
    debug_assert!(
        table
            .iter()
            .all(|array| array.as_any().is::<StringArray>() || array.as_any().is::<Float64Array>())
    );
    table.try_into().map_err(|_| broken(&"wrong number of columns"))
}

#[cfg(test)]
#[path = "shard_tests.rs"]
mod tests;
