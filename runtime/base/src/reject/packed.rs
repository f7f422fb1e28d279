//! Rejects of a partition that is worked on, packed: there may be one for each of its rows.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};

use super::{ReasonCount, Reject, RejectClass};
use crate::error::StageError;

/// A pack is closed when it holds this many rejects, or this many bytes of them.
const PACK_REJECTS: usize = 1_024;
const PACK_BYTES: usize = 1 << 19;

/// Rejects in any order. They are sorted and compressed pack by pack, so that rejects that are alike take some tens of
/// bytes each, and given back in order without unpacking all of them at once.
#[derive(Default)]
pub struct PackedRejects {
    open: Vec<Reject>,
    open_bytes: usize,
    packs: Vec<Pack>,
    packed_bytes: usize,
    counts: BTreeMap<(String, RejectClass), u64>,
    rows: u64,
    partitions: u64,
}

impl From<Vec<Reject>> for PackedRejects {
    fn from(rejects: Vec<Reject>) -> Self {
        let mut packed = PackedRejects::default();
        rejects.into_iter().for_each(|reject| packed.push(reject));
        packed
    }
}

/// Sorted rejects.
struct Pack {
    first: Reject,
    /// LZ4, after the length of what it unpacks to.
    bytes: Vec<u8>,
}

impl PackedRejects {
    pub fn push(&mut self, reject: Reject) {
        self.add(&reject.reason, reject.class, 1);
        match reject.row {
            Some(_) => self.rows += 1,
            None => self.partitions += 1,
        }
        self.put(reject);
    }

    /// Takes over all that `other` holds.
    pub fn append(&mut self, other: PackedRejects) {
        for ((reason, class), rejects) in &other.counts {
            self.add(reason, *class, *rejects);
        }
        self.rows += other.rows;
        self.partitions += other.partitions;
        self.packed_bytes += other.packed_bytes;
        self.packs.extend(other.packs);
        for reject in other.open {
            self.put(reject);
        }
    }

    fn add(&mut self, reason: &str, class: RejectClass, rejects: u64) {
        *self.counts.entry((reason.to_owned(), class)).or_default() += rejects;
    }

    fn put(&mut self, reject: Reject) {
        self.open_bytes += size_of::<Reject>() + text_bytes(&reject);
        self.open.push(reject);
        if self.open.len() >= PACK_REJECTS || self.open_bytes >= PACK_BYTES {
            self.close();
        }
    }

    fn close(&mut self) {
        self.open.sort_by(Reject::compare);
        let mut plain = Vec::with_capacity(self.open_bytes);
        for reject in &self.open {
            write(&mut plain, reject);
        }
        self.open_bytes = 0;
        let mut rejects = self.open.drain(..);
        if let Some(first) = rejects.next() {
            let bytes = lz4_flex::block::compress_prepend_size(&plain);
            self.packed_bytes += size_of::<Pack>() + text_bytes(&first) + bytes.len();
            self.packs.push(Pack { first, bytes });
        }
    }

    pub fn is_empty(&self) -> bool {
        self.rows == 0 && self.partitions == 0
    }

    /// How many of them refuse a row.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Whether one of them refuses the whole partition.
    pub fn refuses_partition(&self) -> bool {
        self.partitions > 0
    }

    /// Bytes of memory that they take.
    pub fn bytes(&self) -> usize {
        self.open_bytes + self.packed_bytes
    }

    /// How many there are for each reason.
    pub fn by_reason(&self) -> Vec<ReasonCount> {
        let count = |((reason, class), rows): (&(String, RejectClass), &u64)| ReasonCount {
            reason: reason.clone(),
            class: *class,
            rows: *rows,
        };
        self.counts.iter().map(count).collect()
    }

    /// All of them in order. What is unpacked at one time are the packs that overlap.
    pub fn sorted(mut self) -> Sorted {
        self.close();
        // The next one last.
        self.packs.sort_by(|a, b| b.first.compare(&a.first));
        Sorted {
            packs: self.packs,
            unpacked: BinaryHeap::new(),
        }
    }
}

/// Rejects in order.
pub struct Sorted {
    packs: Vec<Pack>,
    unpacked: BinaryHeap<Unpacked>,
}

/// The next reject of a pack, and where the one after it begins.
struct Unpacked {
    next: Reject,
    bytes: Vec<u8>,
    at: usize,
}

impl Ord for Unpacked {
    /// The one that comes first is the greatest, which the heap gives out.
    fn cmp(&self, other: &Self) -> Ordering {
        other.next.compare(&self.next)
    }
}

impl PartialOrd for Unpacked {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Unpacked {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Unpacked {}

impl Sorted {
    fn next_reject(&mut self) -> Result<Option<Reject>, StageError> {
        while let Some(pack) = self.packs.last() {
            let first = self.unpacked.peek();
            if first.is_some_and(|unpacked| unpacked.next.compare(&pack.first) == Ordering::Less) {
                break;
            }
            let bytes = lz4_flex::block::decompress_size_prepended(&pack.bytes)
                .map_err(|error| StageError::failed(format!("rejects do not unpack ({error}): {FAULT}")))?;
            self.packs.pop();
            let mut at = 0;
            let next = read(&bytes, &mut at)?;
            self.unpacked.push(Unpacked { next, bytes, at });
        }
        let Some(mut unpacked) = self.unpacked.pop() else {
            return Ok(None);
        };
        if unpacked.at == unpacked.bytes.len() {
            return Ok(Some(unpacked.next));
        }
        let after = read(&unpacked.bytes, &mut unpacked.at)?;
        let next = std::mem::replace(&mut unpacked.next, after);
        self.unpacked.push(unpacked);
        Ok(Some(next))
    }
}

impl Iterator for Sorted {
    type Item = Result<Reject, StageError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_reject().transpose()
    }
}

const FAULT: &str = "a fault of the runtime";

fn text_bytes(reject: &Reject) -> usize {
    let id = reject.id.as_ref().map_or(0, String::len);
    id + reject.reason.len() + reject.detail.len() + reject.values.len()
}

const HAS_ROW: u8 = 1;
const HAS_ID: u8 = 2;
const IS_FAULT: u8 = 4;

/// One byte that says what is there; the row; each text after its length.
fn write(out: &mut Vec<u8>, reject: &Reject) {
    let flag = |set: bool, flag: u8| if set { flag } else { 0 };
    out.push(
        flag(reject.row.is_some(), HAS_ROW)
            | flag(reject.id.is_some(), HAS_ID)
            | flag(reject.class == RejectClass::Fault, IS_FAULT),
    );
    if let Some(row) = reject.row {
        out.extend_from_slice(&row.to_le_bytes());
    }
    let id = reject.id.as_ref();
    for text in id.into_iter().chain([&reject.reason, &reject.detail, &reject.values]) {
        out.extend_from_slice(&(text.len() as u64).to_le_bytes());
        out.extend_from_slice(text.as_bytes());
    }
}

fn read(bytes: &[u8], at: &mut usize) -> Result<Reject, StageError> {
    read_one(bytes, at).ok_or_else(|| StageError::failed(format!("packed rejects are cut short: {FAULT}")))
}

fn read_one(bytes: &[u8], at: &mut usize) -> Option<Reject> {
    let mut take = |length: usize| {
        let taken = bytes.get(*at..at.checked_add(length)?)?;
        *at += length;
        Some(taken)
    };
    let flags = *take(1)?.first()?;
    let row = match flags & HAS_ROW {
        0 => None,
        _ => Some(u32::from_le_bytes(take(4)?.try_into().ok()?)),
    };
    let mut text = || {
        let length = u64::from_le_bytes(take(8)?.try_into().ok()?);
        let text = take(usize::try_from(length).ok()?)?;
        String::from_utf8(text.to_vec()).ok()
    };
    let id = match flags & HAS_ID {
        0 => None,
        _ => Some(text()?),
    };
    Some(Reject {
        row,
        id,
        reason: text()?,
        class: if flags & IS_FAULT == 0 {
            RejectClass::Rule
        } else {
            RejectClass::Fault
        },
        detail: text()?,
        values: text()?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reject() -> impl Strategy<Value = Reject> {
        let texts = (prop::option::of("[a-c]{0,2}"), "[a-b]", ".{0,3}", ".{0,40}");
        (prop::option::of(0u32..50), texts, any::<bool>()).prop_map(|(row, (id, reason, detail, values), fault)| {
            Reject {
                row,
                id,
                reason,
                class: if fault { RejectClass::Fault } else { RejectClass::Rule },
                detail,
                values,
            }
        })
    }

    fn many(rejects: &[Reject], times: usize) -> Vec<Reject> {
        rejects.iter().cycle().take(rejects.len() * times).cloned().collect()
    }

    proptest! {
        /// However they are gathered, they come back as sorting them at once gives them.
        #[test]
        fn rejects_come_back_in_order(rejects in prop::collection::vec(reject(), 0..40), times in 1usize..150, parts in 1usize..5) {
            let all = many(&rejects, times);
            let mut packed = PackedRejects::default();
            for part in all.chunks(all.len() / parts + 1) {
                let mut piece = PackedRejects::default();
                part.iter().cloned().for_each(|reject| piece.push(reject));
                packed.append(piece);
            }
            prop_assert_eq!(packed.rows(), all.iter().filter(|reject| reject.row.is_some()).count() as u64);
            prop_assert_eq!(packed.refuses_partition(), all.iter().any(|reject| reject.row.is_none()));
            prop_assert_eq!(packed.is_empty(), all.is_empty());
            prop_assert_eq!(packed.by_reason().iter().map(|count| count.rows).sum::<u64>(), all.len() as u64);
            for count in packed.by_reason() {
                let alike = all.iter().filter(|reject| reject.reason == count.reason && reject.class == count.class);
                prop_assert_eq!(alike.count() as u64, count.rows);
            }
            let mut sorted = all;
            sorted.sort_by(Reject::compare);
            let back: Result<Vec<Reject>, StageError> = packed.sorted().collect();
            prop_assert_eq!(back.unwrap(), sorted);
        }
    }

    /// Rows that come in their order, as they do from a stage that goes through its batches, are unpacked pack by pack.
    #[test]
    fn packs_that_do_not_overlap_are_unpacked_one_at_a_time() {
        let mut packed = PackedRejects::default();
        let rows = 50 * PACK_REJECTS as u32;
        for row in 0..rows {
            // Neighbours are swapped.
            packed.push(Reject {
                row: Some(row ^ 1),
                id: Some(format!("name-{row:08}")),
                reason: "too_short".into(),
                class: RejectClass::Rule,
                detail: String::new(),
                values: format!(r#"{{"weight_kg":0.{row},"colour":"red","text":"{}"}}"#, "अ".repeat(100)),
            });
        }
        assert!(packed.bytes() < 100 * rows as usize, "{} bytes", packed.bytes());
        let mut sorted = packed.sorted();
        for row in 0..rows {
            assert_eq!(sorted.next().unwrap().unwrap().row, Some(row));
            assert!(
                sorted.unpacked.len() <= 1,
                "{} packs at row {row}",
                sorted.unpacked.len()
            );
        }
        assert!(sorted.next().is_none());
    }

    #[test]
    fn a_reject_larger_than_a_pack_goes_through() {
        let mut packed = PackedRejects::default();
        let large = Reject {
            row: None,
            id: None,
            reason: "r".into(),
            class: RejectClass::Fault,
            detail: "x".repeat(3 * PACK_BYTES),
            values: String::new(),
        };
        packed.push(large.clone());
        packed.push(large.clone());
        let back: Result<Vec<Reject>, StageError> = packed.sorted().collect();
        assert_eq!(back.unwrap(), [large.clone(), large]);
    }

    #[test]
    fn bytes_cut_short_are_an_error_and_no_panic() {
        let mut bytes = Vec::new();
        let reject = Reject {
            row: Some(7),
            id: Some("s".into()),
            reason: "r".into(),
            class: RejectClass::Fault,
            detail: "d".into(),
            values: "{}".into(),
        };
        write(&mut bytes, &reject);
        for end in 0..bytes.len() {
            assert!(read(&bytes[..end], &mut 0).is_err(), "{end}");
        }
        assert_eq!(read(&bytes, &mut 0).unwrap(), reject);
    }
}
