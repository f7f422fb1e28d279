//! Rows that are kept of those of a partition, for a sample.

use std::collections::BTreeMap;

use crate::manifest_row::{ManifestRow, Refusal};

/// Rows of a partition that are kept until it is known how many it has.
const MOST_KEPT: usize = 64;
/// Rejected rows of one reason that are reported.
const MOST_TOLD: usize = 3;

/// A row that `manifest.read` or training would refuse.
#[derive(Clone, Debug, PartialEq)]
pub struct RefusedRow {
    /// File and line, or the recording.
    pub place: String,
    pub detail: String,
}

/// Rows that would be rejected.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Refused {
    /// By the reason how many there are, and the first of them.
    pub by_reason: BTreeMap<&'static str, (u64, Vec<RefusedRow>)>,
}

impl Refused {
    pub fn rows(&self) -> u64 {
        self.by_reason.values().map(|(rows, _)| rows).sum()
    }

    pub fn add(&mut self, place: impl FnOnce() -> String, Refusal { reason, detail, .. }: Refusal) {
        let (rows, first) = self.by_reason.entry(reason).or_default();
        *rows += 1;
        if first.len() < MOST_TOLD {
            let place = place();
            first.push(RefusedRow { place, detail });
        }
    }

    pub fn extend(&mut self, other: Refused) {
        for (reason, (more, theirs)) in other.by_reason {
            let (rows, first) = self.by_reason.entry(reason).or_default();
            *rows += more;
            first.extend(theirs);
            first.truncate(MOST_TOLD);
        }
    }
}

/// Rows that are kept while a partition is read: every n-th, and those that are rejected while reading.
#[derive(Default)]
pub struct KeptRows {
    /// Their number among all, place, and value.
    pub rows: Vec<(u64, String, ManifestRow)>,
    /// One row in this many is kept; a power of two.
    every: u64,
    /// Rows that were read.
    pub seen: u64,
    pub refused: Refused,
}

impl KeptRows {
    pub fn add(&mut self, row: Result<ManifestRow, Refusal>, place: impl FnOnce(Option<&ManifestRow>) -> String) {
        let number = self.seen;
        self.seen += 1;
        self.every = self.every.max(1);
        match row {
            Ok(row) if number.is_multiple_of(self.every) => {
                let place = place(Some(&row));
                self.rows.push((number, place, row));
                if self.rows.len() > MOST_KEPT {
                    self.every *= 2;
                    self.rows.retain(|(number, ..)| number.is_multiple_of(self.every));
                }
            }
            Ok(_) => {}
            Err(refusal) => self.refused.add(|| place(None), refusal),
        }
    }
}
