//! Which members the rows need, and which rows have none.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{ArrowPrimitiveType, Int32Type, Int64Type};
use flow_kind::StageError;

use super::settings::{NAME_COLUMN, Store, column};
use crate::shards::Shard;
use flow_audio::member_name::{safe_components, strip_dot_slash};

/// Why a row cannot have a file: reason and detail.
pub(super) type Refusal = (String, String);

/// The result of `audio.probe` for one member.
#[derive(Clone, Debug, Default)]
pub(crate) struct Member {
    pub status: String,
    pub offset: u64,
    pub size: u64,
    pub in_tar: bool,
    /// Empty where the member is not `ok`.
    pub audio_hash: String,
    pub is_flac: bool,
    /// Bytes of the decoded samples, in whole bytes per sample; 0 where the member is not `ok`.
    pub decoded_bytes: u64,
}

/// One recording to be placed.
pub(super) struct Job<'a> {
    /// The member's name, in safe parts.
    pub components: Vec<&'a str>,
    pub member: &'a Member,
    /// It becomes a FLAC file.
    pub encode: bool,
}

impl Job<'_> {
    /// The file's name below the folder of its shard.
    pub fn name(&self) -> String {
        let name = self.components.join("/");
        if self.encode { name + ".flac" } else { name }
    }
}

pub(super) struct Wanted<'a> {
    /// Each recording once, whatever the number of rows that name it.
    pub jobs: Vec<Job<'a>>,
    /// The job of each row, or why it has none.
    pub rows: Vec<Result<usize, Refusal>>,
}

pub(crate) fn members_by_name(batches: &[RecordBatch]) -> Result<HashMap<String, Member>, StageError> {
    let mut members = HashMap::new();
    for batch in batches {
        let text = |name: &str| column(batch, name);
        let (names, statuses, stored) = (text("name")?, text("status")?, text("stored")?);
        let (hashes, formats) = (text("audio_hash")?, text("format")?);
        let (offsets, sizes) = (
            numbers::<Int64Type>(batch, "offset")?,
            numbers::<Int64Type>(batch, "size")?,
        );
        let frames = numbers::<Int64Type>(batch, "frames")?;
        let (channels, bits) = (
            numbers::<Int32Type>(batch, "channels")?,
            numbers::<Int32Type>(batch, "bits")?,
        );
        for row in 0..batch.num_rows() {
            let unsigned =
                |value: i64| u64::try_from(value).map_err(|_| StageError::failed("a negative number in `members`"));
            let mut member = Member {
                status: statuses.value(row).to_owned(),
                offset: unsigned(offsets.value(row))?,
                size: unsigned(sizes.value(row))?,
                in_tar: stored.value(row) == "tar",
                ..Member::default()
            };
            if !hashes.is_null(row) {
                member.audio_hash = hashes.value(row).to_owned();
                member.is_flac = formats.value(row) == "flac";
                let width = unsigned(bits.value(row).into())?.div_ceil(8);
                member.decoded_bytes = unsigned(frames.value(row))?
                    .saturating_mul(unsigned(channels.value(row).into())?)
                    .saturating_mul(width);
            }
            members.insert(names.value(row).to_owned(), member);
        }
    }
    Ok(members)
}

fn numbers<'a, T: ArrowPrimitiveType>(
    batch: &'a RecordBatch,
    name: &str,
) -> Result<&'a arrow::array::PrimitiveArray<T>, StageError> {
    batch
        .column_by_name(name)
        .and_then(|column| column.as_primitive_opt::<T>())
        .ok_or_else(|| StageError::failed(format!("a batch has no number column `{name}`")))
}

pub(super) fn find<'a>(
    rows: &'a RecordBatch,
    members: &'a HashMap<String, Member>,
    shard: &Shard,
    store: Store,
) -> Result<Wanted<'a>, StageError> {
    let names = column(rows, NAME_COLUMN)?;
    let mut wanted = Wanted {
        jobs: Vec::new(),
        rows: Vec::with_capacity(rows.num_rows()),
    };
    // By the name of the file, which two members of other spelling (`a/./b`) or format may share.
    let mut by_file: HashMap<String, usize> = HashMap::new();
    for row in 0..rows.num_rows() {
        let name = if names.is_null(row) { "" } else { names.value(row) };
        let refused = |reason: &str| Err((reason.to_owned(), format!("{name:?}")));
        let found = (
            safe_components(name, &shard.shard_id),
            members.get(strip_dot_slash(name)),
        );
        wanted.rows.push(match found {
            (None, _) => refused("unsafe_name"),
            (_, None) => refused("missing_member"),
            (_, Some(member)) if member.status != "ok" => refused(&member.status),
            (Some(components), Some(member)) => {
                let job = Job {
                    components,
                    member,
                    encode: store == Store::Flac && !member.is_flac,
                };
                match by_file.entry(job.name()) {
                    Entry::Occupied(taken) if !std::ptr::eq(wanted.jobs[*taken.get()].member, member) => {
                        refused("name_taken")
                    }
                    Entry::Occupied(same) => Ok(*same.get()),
                    Entry::Vacant(free) => {
                        wanted.jobs.push(job);
                        Ok(*free.insert(wanted.jobs.len() - 1))
                    }
                }
            }
        });
    }
    Ok(wanted)
}
