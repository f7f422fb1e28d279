//! Recovery: from the files of a recipe, what is committed, what is orphaned, and what may be removed.
//!
//! Pure functions over lists of files and records. Reading and writing are done by the callers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::record::{Group, GroupName, Index, LostRecord, Record};

/// Files of a folder: name to size in bytes.
pub type Listing = BTreeMap<String, u64>;

/// All records in the order of their commits. Of two with the same (partition, key) the later one counts. Groups that
/// are part of the index are skipped: a crash between the writing of the index and the removal of its groups leaves
/// them.
pub fn merge(index: Option<Index>, mut groups: Vec<(GroupName, Group)>) -> Vec<Arc<Record>> {
    let merged_up_to = index.as_ref().map_or(0, |index| index.generation);
    groups.retain(|(name, _)| name.generation > merged_up_to);
    groups.sort_by_key(|(name, _)| *name);
    let all: Vec<Arc<Record>> = index
        .map(|index| index.records)
        .unwrap_or_default()
        .into_iter()
        .chain(groups.into_iter().flat_map(|(_, group)| group.records))
        .collect();
    let mut seen = BTreeSet::new();
    let mut latest: Vec<Arc<Record>> = all
        .into_iter()
        .rev()
        .filter(|record| seen.insert((record.partition.clone(), record.key)))
        .collect();
    latest.reverse();
    latest
}

/// Separates the records whose data files all exist with the recorded size from the others.
pub(crate) fn complete_records(records: Vec<Arc<Record>>, data: &Listing) -> (Vec<Arc<Record>>, Vec<LostRecord>) {
    let mut whole = Vec::with_capacity(records.len());
    let mut lost = Vec::new();
    for record in records {
        let missing = record.files().find(|(file, bytes)| data.get(file) != Some(bytes));
        match missing {
            None => whole.push(record),
            Some((file, _)) => {
                let found = data.get(&file).copied();
                lost.push(LostRecord {
                    partition: record.partition.clone(),
                    key: record.key,
                    file,
                    found,
                });
            }
        }
    }
    (whole, lost)
}

/// The generation for a new writer: later than everything written so far.
pub(crate) fn next_generation(index: Option<u64>, groups: impl IntoIterator<Item = GroupName>) -> u64 {
    groups
        .into_iter()
        .map(|name| name.generation)
        .chain(index)
        .max()
        .unwrap_or(0)
        + 1
}

/// Groups whose records are in the index.
pub(crate) fn superseded_groups(index: Option<u64>, groups: &[GroupName]) -> Vec<GroupName> {
    groups
        .iter()
        .copied()
        .filter(|name| index.is_some_and(|generation| name.generation <= generation))
        .collect()
}

/// Data files that no record names: left by a crash between their rename and the record of their group.
pub(crate) fn orphans(data: &Listing, records: &[Arc<Record>]) -> Vec<String> {
    let named: BTreeSet<String> = records
        .iter()
        .flat_map(|record| record.files())
        .map(|(file, _)| file)
        .collect();
    data.keys()
        .filter(|file| !is_temporary(file) && !named.contains(*file))
        .cloned()
        .collect()
}

/// Whether a name in the state directory is that of a writer's temporary file: `.tmp-`, a process id, and a number.
/// Only the holder of the lock may remove it.
pub(crate) fn is_temporary(file: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    file.strip_prefix(TEMPORARY)
        .and_then(|rest| rest.split_once('-'))
        .is_some_and(|(process, number)| is_number(process) && is_number(number))
}

/// Whether a name is that of a temporary file of a process of this machine that is no more.
pub(crate) fn is_of_dead_process(file: &str) -> bool {
    let process = file.strip_prefix(TEMPORARY).and_then(|rest| rest.split_once('-'));
    let is_dead = |(process, _): (&str, &str)| !std::path::Path::new("/proc").join(process).exists();
    is_temporary(file) && process.is_some_and(is_dead)
}

/// How names of temporary files begin.
pub(crate) const TEMPORARY: &str = ".tmp-";

/// The record of (partition, key) after `new` is committed over `old`. Which ports are stored depends on what the run
/// needed; ports stored before are kept if the rest of the record shows that both runs made the same rows.
pub(crate) fn combine(old: &Record, mut new: Record) -> Record {
    let same_rows = (old.rows_in, old.rows_out, old.read, old.merged)
        == (new.rows_in, new.rows_out, new.read, new.merged)
        && old.rejects == new.rejects
        && new
            .ports
            .iter()
            .all(|(name, port)| old.ports.get(name).is_none_or(|before| before == port));
    if same_rows {
        // Of a port that both have the later one counts: the new one, which is equal.
        let both = old.ports.iter().chain(new.ports.iter());
        new.ports = both.map(|(name, port)| (name, port.clone())).collect();
    }
    new
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::record::{PortRecord, RECORD_VERSION, RejectRecord};
    use super::*;
    use flow_base::digest::Digest;
    use flow_base::partition::Partition;

    fn record(partition: u8, key: u8, content: u8, ports: &[&str]) -> Arc<Record> {
        let port = |name: &&str| {
            let digest = Digest::of(&[content, name.len() as u8]);
            (
                name.to_string(),
                PortRecord {
                    digest,
                    rows: 1,
                    bytes: 100 + u64::from(content),
                    selection: None,
                },
            )
        };
        Arc::new(Record {
            partition: Partition::new(format!("p{partition}")),
            key: Digest::of(&[key]),
            inputs: vec![],
            ports: ports.iter().map(port).collect(),
            rows_in: 1,
            rows_out: 1,
            read: 0,
            merged: 0,
            rejects: RejectRecord::none(),
        })
    }

    fn group(records: Vec<Arc<Record>>) -> Group {
        Group {
            version: RECORD_VERSION,
            recipe: Digest::of(b""),
            records,
        }
    }

    fn listing(records: &[Arc<Record>]) -> Listing {
        records
            .iter()
            .flat_map(|record| record.files().collect::<Vec<_>>())
            .collect()
    }

    proptest! {
        /// At whatever point a crash comes while an index is written and its groups are removed, and in whatever order
        /// files are listed: the last record of each (partition, key) counts.
        #[test]
        fn merging_gives_the_last_of_each(
            commits in prop::collection::vec(prop::collection::vec((0u8..4, 0u8..3, any::<u8>()), 1..4), 0..8),
            indexed in 0usize..9,
            removed in prop::collection::vec(any::<bool>(), 8),
            order in any::<prop::sample::Index>(),
        ) {
            let indexed = indexed.min(commits.len());
            let groups: Vec<(GroupName, Group)> = commits.iter().enumerate().map(|(i, commit)| {
                let records = commit.iter().map(|&(p, k, c)| record(p, k, c, &["rows"])).collect();
                (GroupName { generation: i as u64 + 1, number: 0 }, group(records))
            }).collect();
            let merge_of = |groups: &[(GroupName, Group)]| merge(None, groups.to_vec());
            let index = (indexed > 0).then(|| Index {
                version: RECORD_VERSION,
                recipe: Digest::of(b""),
                generation: indexed as u64,
                records: merge_of(&groups[..indexed]),
            });
            let names: Vec<GroupName> = groups.iter().map(|(name, _)| *name).collect();
            let generation = index.as_ref().map(|index| index.generation);
            prop_assert_eq!(superseded_groups(generation, &names).len(), indexed);
            prop_assert_eq!(next_generation(generation, names.iter().copied()), commits.len() as u64 + 1);
            // Any subset of the superseded groups may be removed, and a power failure may bring back any of them.
            let mut left: Vec<_> = groups
                .iter()
                .zip(0..)
                .filter(|(_, i)| *i >= indexed || !removed[*i])
                .map(|(group, _)| group.clone())
                .collect();
            if !left.is_empty() {
                let by = order.index(left.len());
                left.rotate_left(by);
            }
            let merged = merge(index, left);
            prop_assert_eq!(&merged, &merge_of(&groups));
            let mut last = BTreeMap::new();
            for (p, k, c) in commits.iter().flatten() {
                last.insert((Partition::new(format!("p{p}")), Digest::of(&[*k])), record(*p, *k, *c, &["rows"]));
            }
            let found: BTreeMap<_, _> = merged.iter().map(|r| ((r.partition.clone(), r.key), r.clone())).collect();
            prop_assert_eq!(found.len(), merged.len());
            prop_assert_eq!(found, last);
        }

        /// Every file is named by what stands or is an orphan, never both; collecting leaves what is used.
        #[test]
        fn files_are_named_or_orphans(
            keys in prop::collection::btree_set((0u8..4, 0u8..3), 0..8),
            gone in prop::collection::vec(any::<bool>(), 8),
        ) {
            let records: Vec<_> = keys.iter().map(|&(p, k)| record(p, k, p * 3 + k, &["rows", "rest"])).collect();
            let mut data = listing(&records);
            for (record, _) in records.iter().zip(&gone).filter(|(_, gone)| **gone) {
                let (name, _) = record.files().next().unwrap();
                data.remove(&name);
            }
            data.insert(".tmp-1-1".into(), 5);
            let (whole, lost) = complete_records(records.clone(), &data);
            prop_assert_eq!(whole.len() + lost.len(), records.len());
            prop_assert_eq!(lost.len(), records.iter().zip(&gone).filter(|(_, gone)| **gone).count());
            let orphans = orphans(&data, &whole);
            prop_assert_eq!(listing(&whole).len() + orphans.len() + 1, data.len());
        }
    }

    #[test]
    fn ports_are_combined_only_where_the_rows_agree() {
        let (a, ab) = (record(0, 0, 1, &["a"]), record(0, 0, 1, &["a", "bb"]));
        assert_eq!(combine(&ab, (*a).clone()), *ab);
        let other = record(0, 0, 2, &["a"]);
        assert_eq!(combine(&ab, (*other).clone()), *other);
        let mut fewer = (*record(0, 0, 1, &[])).clone();
        fewer.rows_out = 7;
        assert_eq!(combine(&ab, fewer.clone()), fewer);
    }

    #[test]
    fn temporary_files_are_told_by_their_whole_name() {
        assert!(is_temporary(".tmp-12-345"));
        for other in [
            ".tmp-mine",
            ".tmp-1",
            ".tmp-1-",
            ".tmp--1",
            ".tmp-1-2.txt",
            "x.tmp-1-2",
            ".tmp-1-2-3",
            ".tmp-",
        ] {
            assert!(!is_temporary(other), "{other}");
        }
    }

    #[test]
    fn names_of_groups_are_read_as_written() {
        let name = GroupName {
            generation: 12,
            number: 345,
        };
        assert_eq!(GroupName::parse(&name.file()), Some(name));
        for foreign in [
            "1-2.json",
            "00000012-000345.json.bak",
            ".tmp-1-1",
            "+0000012-000345.json",
            "x.json",
        ] {
            assert_eq!(GroupName::parse(foreign), None, "{foreign}");
        }
    }
}
