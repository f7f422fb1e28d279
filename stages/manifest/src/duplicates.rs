//! Which rows are duplicates: of one segment, of the same audio with the same words, of the same audio with
//! other words.
//!
//! The best row of several stays: highest quality, then smallest segment id, shard id, member name (as
//! bytes), then first in the order of the manifest.

use std::cmp::Ordering;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow::array::{
    Array, FixedSizeBinaryArray, Float64Array, RecordBatch, StringArray, StringBuilder, UInt8Array, UInt32Array,
    UInt64Array, new_null_array,
};
use arrow::compute::{concat_batches, take_record_batch};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_corpus::ManifestError;
use flow_corpus::columns;
use flow_corpus::partitions::partition_order;
use flow_kind::{Artifact, Context, GroupDecision, GroupRows, Partition, ROW, StageError};
use rayon::prelude::*;

use crate::dedup::report;

use crate::keys::{Key, halves, key_at, keys, lang_and_shard};

/// Why a row is a duplicate. Decisions store the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Duplicate {
    /// A better row of the same shard has its segment id.
    SegmentId = 1,
    /// A better row has its audio and its words.
    Exact = 2,
    /// A better row has its audio, but other words.
    Conflict = 3,
}

impl Duplicate {
    pub const ALL: [Duplicate; 3] = [Duplicate::SegmentId, Duplicate::Exact, Duplicate::Conflict];

    pub fn reason(self) -> &'static str {
        match self {
            Duplicate::SegmentId => "duplicate_segment_id",
            Duplicate::Exact => "exact_duplicate",
            Duplicate::Conflict => "audio_conflict",
        }
    }

    pub fn of_number(number: u8) -> Option<Duplicate> {
        Duplicate::ALL.into_iter().find(|duplicate| *duplicate as u8 == number)
    }
}

/// Schema of key rows: `audio_hash` as a 128-bit key, which decides what is a duplicate; for `norm` a 64-bit mark
/// ([`mark_of`]), as the words only decide the kind of duplicate. Null where there is none.
///
/// [`mark_of`]: crate::keys::mark_of
pub fn key_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("segment_id", DataType::Utf8, true),
        Field::new("tar_member_name", DataType::Utf8, true),
        Field::new("quality", DataType::Float64, true),
        Field::new("norm", DataType::UInt64, true),
        Field::new("audio_hash", DataType::FixedSizeBinary(16), true),
    ]))
}

/// Schema of decisions: the rows that go, why ([`Duplicate`] as a number), and which row stays in their
/// place (`<lang>/<shard_id>/<segment_id>`).
pub fn decision_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("duplicate", DataType::UInt8, false),
        Field::new("kept", DataType::Utf8, false),
    ]))
}

/// Checks that no row number comes twice.
fn each_once(partition: &Partition, rows: &UInt32Array) -> Result<(), ManifestError> {
    // Key rows are stored in ascending order.
    if rows.values().is_sorted_by(|a, b| a < b) {
        return Ok(());
    }
    let mut seen = HashSet::with_capacity(rows.len());
    match rows.values().iter().find(|row| !seen.insert(**row)) {
        None => Ok(()),
        Some(twice) => Err(ManifestError::rows(
            format!("row {twice} of {partition} came twice"),
            Some(*twice),
        )),
    }
}

/// Whether the ids are strictly ascending without nulls, the usual case: then none is repeated.
fn ascend(ids: &StringArray) -> bool {
    ids.null_count() == 0 && (1..ids.len()).all(|place| ids.value(place - 1) < ids.value(place))
}

/// The places of ids that come more than once.
fn same_id(ids: &StringArray) -> Result<Vec<u32>, ManifestError> {
    number(ids.len())?;
    if ascend(ids) {
        return Ok(Vec::new());
    }
    let mut first: HashMap<&str, u32> = HashMap::with_capacity(ids.len());
    let mut same = Vec::new();
    for (place, id) in (0u32..).zip(ids.iter()) {
        if let Some(id) = id {
            match first.entry(id) {
                Entry::Vacant(entry) => {
                    entry.insert(place);
                }
                Entry::Occupied(entry) => same.extend([*entry.get(), place]),
            }
        }
    }
    Ok(same)
}

/// Key rows of one partition, by column.
struct Keys {
    partition: Partition,
    rows: UInt32Array,
    segment_id: StringArray,
    tar_member_name: StringArray,
    quality: Float64Array,
    norm: UInt64Array,
    audio_hash: FixedSizeBinaryArray,
}

/// A key row: its partition and its place there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct At {
    partition: u32,
    place: u32,
}

/// Decides over all key rows ([`key_schema`]), independent of their order. A null segment id or audio hash is equal to
/// no other.
///
/// # Errors
/// When the key rows have other columns, or there are more than fit in 32 bits.
pub fn decide_duplicates(
    all: &[(Partition, Vec<RecordBatch>)],
) -> Result<Vec<(Partition, RecordBatch)>, ManifestError> {
    let mut partitions = all
        .par_iter()
        .map(|(partition, batches)| Keys::new(partition, batches))
        .collect::<Result<Vec<_>, _>>()?;
    partitions.sort_by(|a, b| partition_order(&a.partition, &b.partition));
    let all = AllKeys { partitions };
    let mut gone: Vec<Vec<Gone>> = all
        .partitions
        .par_iter()
        .enumerate()
        .map(|(partition, keys)| all.same_segment(number(partition)?, keys))
        .collect::<Result<_, ManifestError>>()?;

    for mut group in all.same_audio(&gone)? {
        group.sort_unstable_by(|a, b| all.compare(*a, *b));
        let kept = group[0];
        let mut words = HashMap::from([(all.norm(kept), kept)]);
        for &at in &group[1..] {
            let same_words = words.get(&all.norm(at)).copied();
            let why = if same_words.is_some() {
                Duplicate::Exact
            } else {
                Duplicate::Conflict
            };
            words.entry(all.norm(at)).or_insert(at);
            gone[at.partition as usize].push(Gone {
                place: at.place,
                why,
                kept,
            });
        }
    }
    all.partitions
        .par_iter()
        .zip(gone)
        .map(|(keys, gone)| Ok((keys.partition.clone(), all.decisions(keys, gone)?)))
        .collect()
}

/// A duplicate row of a partition, and the row that is kept instead.
struct Gone {
    place: u32,
    why: Duplicate,
    kept: At,
}

fn number(count: usize) -> Result<u32, ManifestError> {
    u32::try_from(count)
        .map_err(|_| ManifestError::rows("more partitions, or more rows of one, than fit in 32 bits", None))
}

impl Keys {
    fn new(partition: &Partition, batches: &[RecordBatch]) -> Result<Self, ManifestError> {
        let batch = concat_batches(&key_schema(), batches)?;
        number(batch.num_rows())?;
        let rows = columns::rows(&batch)?.clone();
        each_once(partition, &rows)?;
        Ok(Keys {
            partition: partition.clone(),
            rows,
            segment_id: columns::text(&batch, "segment_id")?.clone(),
            tar_member_name: columns::text(&batch, "tar_member_name")?.clone(),
            quality: columns::number(&batch, "quality")?.clone(),
            norm: marks(&batch)?.clone(),
            audio_hash: keys(&batch, "audio_hash")?.clone(),
        })
    }
}

fn marks(batch: &RecordBatch) -> Result<&UInt64Array, ManifestError> {
    let marks = batch
        .column_by_name("norm")
        .and_then(|column| column.as_any().downcast_ref());
    marks.ok_or_else(|| ManifestError::rows("key rows lack the mark `norm`", None))
}

fn text_at(texts: &StringArray, place: usize) -> Option<&str> {
    texts.is_valid(place).then(|| texts.value(place))
}

/// Key rows of all partitions, these in the order of the manifest.
struct AllKeys {
    partitions: Vec<Keys>,
}

impl AllKeys {
    fn of(&self, at: At) -> (&Keys, usize) {
        (&self.partitions[at.partition as usize], at.place as usize)
    }

    /// Of a row that has one.
    fn audio(&self, at: At) -> Key {
        let (keys, place) = self.of(at);
        key_at(&keys.audio_hash, place)
    }

    fn norm(&self, at: At) -> Option<u64> {
        let (keys, place) = self.of(at);
        keys.norm.is_valid(place).then(|| keys.norm.value(place))
    }

    /// The rows of a partition that are replaced by a better row with their segment id, ascending by position.
    fn same_segment(&self, partition: u32, keys: &Keys) -> Result<Vec<Gone>, ManifestError> {
        let ids = &keys.segment_id;
        if ascend(ids) {
            return Ok(Vec::new());
        }
        let mut gone = Vec::new();
        let mut best: HashMap<&str, At> = HashMap::with_capacity(ids.len());
        for (place, id) in ids.iter().enumerate() {
            let Some(id) = id else { continue };
            let this = At {
                partition,
                place: number(place)?,
            };
            let before = best.entry(id).or_insert(this);
            if *before != this && self.compare(this, *before) == Ordering::Less {
                *before = this;
            }
        }
        for (place, id) in (0u32..).zip(ids.iter()) {
            if let Some(&kept) = id.and_then(|id| best.get(id))
                && kept.place != place
            {
                let why = Duplicate::SegmentId;
                gone.push(Gone { place, why, kept });
            }
        }
        Ok(gone)
    }

    /// Rows that are left and share their audio with another: group by group.
    fn same_audio(&self, gone: &[Vec<Gone>]) -> Result<Vec<Vec<At>>, ManifestError> {
        let rows = self
            .partitions
            .iter()
            .map(|keys| keys.audio_hash.len() - keys.audio_hash.null_count());
        // The first half of a key distinguishes nearly all recordings, and sorting it moves half the bytes.
        let mut by_audio: Vec<(u64, At)> = Vec::with_capacity(rows.sum());
        for (partition, (keys, gone)) in (0u32..).zip(self.partitions.iter().zip(gone)) {
            let mut gone = gone.iter().map(|gone| gone.place).peekable();
            for place in 0..number(keys.audio_hash.len())? {
                if gone.next_if_eq(&place).is_none() && keys.audio_hash.is_valid(place as usize) {
                    let [first, _] = halves(key_at(&keys.audio_hash, place as usize));
                    by_audio.push((first, At { partition, place }));
                }
            }
        }
        by_audio.par_sort_unstable();
        let mut groups = Vec::new();
        for alike in by_audio.chunk_by(|a, b| a.0 == b.0).filter(|alike| alike.len() > 1) {
            let mut alike: Vec<(Key, At)> = alike.iter().map(|&(_, at)| (self.audio(at), at)).collect();
            alike.sort_unstable();
            let same = alike.chunk_by(|a, b| a.0 == b.0).filter(|same| same.len() > 1);
            groups.extend(same.map(|same| same.iter().map(|&(_, at)| at).collect()));
        }
        Ok(groups)
    }

    /// The better row is the lesser one in this order.
    fn compare(&self, a: At, b: At) -> Ordering {
        let ((x, i), (y, j)) = (self.of(a), self.of(b));
        // No quality, or one that is not a number, is worse than any.
        let quality = |keys: &Keys, place: usize| {
            keys.quality
                .is_valid(place)
                .then(|| keys.quality.value(place))
                .filter(|q| !q.is_nan())
        };
        let by_quality = match (quality(x, i), quality(y, j)) {
            (Some(p), Some(q)) => q.partial_cmp(&p).unwrap_or(Ordering::Equal),
            (p, q) => q.is_some().cmp(&p.is_some()),
        };
        by_quality
            .then_with(|| text_at(&x.segment_id, i).cmp(&text_at(&y.segment_id, j)))
            .then_with(|| lang_and_shard(&x.partition).1.cmp(lang_and_shard(&y.partition).1))
            .then_with(|| text_at(&x.tar_member_name, i).cmp(&text_at(&y.tar_member_name, j)))
            .then_with(|| a.partition.cmp(&b.partition))
            .then_with(|| x.rows.value(i).cmp(&y.rows.value(j)))
    }

    fn decisions(&self, keys: &Keys, gone: Vec<Gone>) -> Result<RecordBatch, ManifestError> {
        let mut gone: Vec<(u32, Duplicate, At)> = gone
            .into_iter()
            .map(|gone| (keys.rows.value(gone.place as usize), gone.why, gone.kept))
            .collect();
        gone.sort_unstable_by_key(|(row, ..)| *row);
        let mut kept = StringBuilder::new();
        for (_, _, at) in &gone {
            let (of, place) = self.of(*at);
            kept.append_value(format!(
                "{}/{}",
                of.partition,
                text_at(&of.segment_id, place).unwrap_or("")
            ));
        }
        let rows: UInt32Array = gone.iter().map(|(row, ..)| *row).collect::<Vec<_>>().into();
        let why: UInt8Array = gone.iter().map(|(_, why, _)| *why as u8).collect::<Vec<_>>().into();
        Ok(RecordBatch::try_new(
            decision_schema(),
            vec![Arc::new(rows), Arc::new(why), Arc::new(kept.finish())],
        )?)
    }
}

/// Duplicates as a decision of groups that share the first half of their audio key. Rows that share a segment id are decided about in
/// their partition alone; of the others few share a half, and only these are read whole.
pub(crate) struct Duplicates;

impl GroupDecision for Duplicates {
    fn rows(&self, partition: &Partition, all: &Artifact) -> Result<GroupRows, StageError> {
        let batch = all.read_whole(partition, Some(&[ROW, "segment_id", "audio_hash"]))?;
        let rows = columns::rows(&batch)?;
        each_once(partition, rows)?;
        let same = same_id(columns::text(&batch, "segment_id")?)?;
        let decisions = match same.is_empty() {
            true => None,
            false => Some(by_segment_id(all, partition, same)?),
        };
        let gone: HashSet<u32> = match &decisions {
            Some(decisions) => columns::rows(decisions)?.values().iter().copied().collect(),
            None => HashSet::new(),
        };
        let audio = keys(&batch, "audio_hash")?;
        let is_left = |place: &u32| {
            let at = *place as usize;
            audio.is_valid(at) && (gone.is_empty() || !gone.contains(&rows.value(at)))
        };
        let places: Vec<u32> = (0..number(audio.len())?).filter(is_left).collect();
        let hash = |place: &u32| hash_of(halves(key_at(audio, *place as usize))[0]);
        Ok(GroupRows {
            hashes: places.iter().map(hash).collect(),
            places,
            decisions,
        })
    }

    fn whole(&self, partition: &Partition, keys: &Artifact, places: &[u32]) -> Result<RecordBatch, StageError> {
        let Some(last) = places.last() else {
            return Ok(RecordBatch::new_empty(key_schema()));
        };
        let whole = keys.read_whole(partition, None)?;
        if *last as usize >= whole.num_rows() {
            return Err(StageError::failed(format!(
                "{partition} has fewer rows than were decided on"
            )));
        }
        Ok(take_record_batch(&whole, &UInt32Array::from(places.to_vec()))?)
    }

    fn decide(&self, rows: &[(Partition, Vec<RecordBatch>)]) -> Result<Vec<(Partition, RecordBatch)>, StageError> {
        Ok(decide_duplicates(rows)?)
    }

    fn complete(&self, context: &Context, decisions: &[(Partition, RecordBatch)]) -> Result<(), StageError> {
        report(context, decisions)
    }
}

/// Keys are those of the data, which need not be spread evenly.
fn hash_of(half: u64) -> u64 {
    let product = half.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (product ^ (product >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// The decisions on rows that share their segment id with another row of the partition, whatever their audio.
fn by_segment_id(keys: &Artifact, partition: &Partition, mut places: Vec<u32>) -> Result<RecordBatch, StageError> {
    places.sort_unstable();
    places.dedup();
    let whole = keys.read_whole(partition, None)?;
    let rows = take_record_batch(&whole, &UInt32Array::from(places))?;
    let (schema, mut columns, _) = rows.into_parts();
    let audio = schema.index_of("audio_hash").map_err(StageError::from)?;
    columns[audio] = new_null_array(columns[audio].data_type(), columns[audio].len());
    let rows = RecordBatch::try_new(schema, columns)?;
    let decided = decide_duplicates(&[(partition.clone(), vec![rows])])?;
    let decisions = decided.into_iter().next().map(|(_, decisions)| decisions);
    decisions.ok_or_else(|| StageError::failed(format!("nothing was decided about {partition}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::FixedSizeBinaryBuilder;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    struct Row {
        shard: u8,
        segment: u8,
        member: u8,
        quality: Option<f64>,
        norm: u8,
        audio: Option<u8>,
    }

    fn rows() -> impl Strategy<Value = Vec<Row>> {
        let quality = prop_oneof![
            Just(Some(0.5)),
            Just(Some(0.9)),
            Just(Some(f64::INFINITY)),
            Just(Some(f64::NAN)),
            Just(None)
        ];
        let row = (0..4u8, 0..6u8, 0..3u8, quality, 0..3u8, prop::option::of(0..5u8)).prop_map(
            |(shard, segment, member, quality, norm, audio)| Row {
                shard,
                segment,
                member,
                quality,
                norm,
                audio,
            },
        );
        prop::collection::vec(row, 0..40)
    }

    /// `b/x` and `a-b/x`: names whose order differs from that of their components, and one shard id twice.
    const SHARDS: [&str; 4] = ["a/x", "a-b/x", "b/x", "b/y"];

    fn batch(rows: &[(u32, &Row)]) -> RecordBatch {
        let key = |values: Vec<Option<u8>>| {
            let mut keys = FixedSizeBinaryBuilder::new(16);
            for value in values {
                match value {
                    Some(value) => keys.append_value([value; 16]).unwrap(),
                    None => keys.append_null(),
                }
            }
            keys.finish()
        };
        RecordBatch::try_new(
            key_schema(),
            vec![
                Arc::new(UInt32Array::from_iter_values(rows.iter().map(|r| r.0))),
                Arc::new(StringArray::from_iter_values(
                    rows.iter().map(|r| format!("s{}", r.1.segment)),
                )),
                Arc::new(StringArray::from_iter_values(
                    rows.iter().map(|r| format!("m{}", r.1.member)),
                )),
                Arc::new(Float64Array::from_iter(rows.iter().map(|r| r.1.quality))),
                Arc::new(UInt64Array::from_iter_values(rows.iter().map(|r| u64::from(r.1.norm)))),
                Arc::new(key(rows.iter().map(|r| r.1.audio).collect())),
            ],
        )
        .unwrap()
    }

    /// The rules as three passes over all rows in the order of "best".
    fn slowly(rows: &[Row]) -> Vec<(&'static str, u32, u8)> {
        let mut order: Vec<(usize, &Row)> = rows.iter().enumerate().collect();
        let shard = |row: &Row| SHARDS[row.shard as usize].split_once('/').unwrap();
        order.sort_by(|(i, a), (j, b)| {
            let quality = |row: &Row| row.quality.filter(|q| !q.is_nan()).unwrap_or(f64::NEG_INFINITY);
            quality(b)
                .total_cmp(&quality(a))
                .then(a.segment.cmp(&b.segment))
                .then(shard(a).1.cmp(shard(b).1))
                .then(a.member.cmp(&b.member))
                .then(shard(a).0.cmp(shard(b).0))
                .then(i.cmp(j))
        });
        let mut fate = vec![0u8; rows.len()];
        for step in 1..=3u8 {
            let mut seen = HashSet::new();
            for &(i, row) in &order {
                if fate[i] != 0 {
                    continue;
                }
                let key = match (step, row.audio) {
                    (1, _) => (row.shard, row.segment, 0),
                    (_, None) => continue,
                    (2, Some(audio)) => (row.norm, audio, 1),
                    (_, Some(audio)) => (audio, 0, 2),
                };
                if !seen.insert(key) {
                    fate[i] = step;
                }
            }
        }
        let mut gone: Vec<_> = (0u32..)
            .zip(rows)
            .filter(|(i, _)| fate[*i as usize] != 0)
            .map(|(i, row)| (SHARDS[row.shard as usize], i, fate[i as usize]))
            .collect();
        gone.sort_unstable();
        gone
    }

    proptest! {
        #[test]
        fn decides_as_three_passes_do(rows in rows(), turned in any::<bool>()) {
            let mut keys: Vec<(Partition, Vec<RecordBatch>)> = Vec::new();
            for (number, name) in SHARDS.iter().enumerate() {
                let mut of_shard: Vec<(u32, &Row)> = (0u32..).zip(&rows).filter(|(_, row)| row.shard as usize == number).collect();
                if turned {
                    of_shard.reverse();
                }
                let (first, second) = of_shard.split_at(of_shard.len() / 2);
                keys.push((Partition::from(*name), vec![batch(first), batch(second)]));
            }
            if turned {
                keys.reverse();
            }
            let decided = decide_duplicates(&keys).unwrap();
            let mut gone = Vec::new();
            for (partition, decisions) in decided {
                let numbers = columns::rows(&decisions).unwrap().clone();
                let why = decisions.column(1).as_any().downcast_ref::<UInt8Array>().unwrap();
                for place in 0..decisions.num_rows() {
                    gone.push((*SHARDS.iter().find(|name| **name == partition.as_str()).unwrap(), numbers.value(place), why.value(place)));
                }
            }
            gone.sort_unstable();
            prop_assert_eq!(gone, slowly(&rows));
        }
    }
}
