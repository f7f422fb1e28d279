//! Versions of partitions, by number: the key rows of a partition that changed are others, under another number, or they are
//! compared with those before.

use std::collections::{BTreeMap, HashMap};

use flow_base::digest::Digest;
use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_store::Artifact;

/// The versions that a dataflow holds.
#[derive(Default)]
pub(super) struct PartitionVersions {
    held: BTreeMap<Partition, (u32, Digest)>,
    names: HashMap<u32, Partition>,
    next: u32,
}

/// What changes from one generation to the next.
#[derive(Default)]
pub(super) struct Changes {
    pub gone: Vec<(u32, Partition)>,
    pub new: Vec<(u32, Partition)>,
    /// Partitions with other key rows than before, which keep their number ([`PartitionVersions::advance_in_place`]).
    pub changed: Vec<(u32, Partition)>,
}

impl PartitionVersions {
    /// Takes over the partitions of `keys`. One with other key rows than before is gone, and comes under a new number.
    ///
    /// # Errors
    /// When there are no more numbers.
    pub fn advance(&mut self, keys: &Artifact) -> Result<Changes, StageError> {
        let digest = |partition: &Partition| keys.digest_of(partition);
        let gone: Vec<(u32, Partition)> = self
            .held
            .iter()
            .filter(|(partition, (_, held))| digest(partition).as_ref() != Some(held))
            .map(|(partition, (version, _))| (*version, partition.clone()))
            .collect();
        for (version, partition) in &gone {
            self.held.remove(partition);
            self.names.remove(version);
        }
        let new = self.add_new(keys)?;
        Ok(Changes {
            gone,
            new,
            changed: Vec::new(),
        })
    }

    /// The same, but that a partition with other key rows than before keeps its number.
    ///
    /// # Errors
    /// When there are no more numbers.
    pub fn advance_in_place(&mut self, keys: &Artifact) -> Result<Changes, StageError> {
        let mut changes = Changes::default();
        self.held
            .retain(|partition, (version, held)| match keys.digest_of(partition) {
                Some(digest) => {
                    if digest != *held {
                        *held = digest;
                        changes.changed.push((*version, partition.clone()));
                    }
                    true
                }
                None => {
                    self.names.remove(version);
                    changes.gone.push((*version, partition.clone()));
                    false
                }
            });
        changes.new = self.add_new(keys)?;
        Ok(changes)
    }

    /// Gives numbers to the partitions of `keys` that have none.
    fn add_new(&mut self, keys: &Artifact) -> Result<Vec<(u32, Partition)>, StageError> {
        let mut new = Vec::new();
        for partition in keys.partitions() {
            if self.held.contains_key(partition) {
                continue;
            }
            let Some(digest) = keys.digest_of(partition) else {
                continue;
            };
            let version = self.next;
            let next = version.checked_add(1);
            self.next = next.ok_or_else(|| StageError::failed("more versions of partitions than fit in 32 bits"))?;
            self.held.insert(partition.clone(), (version, digest));
            self.names.insert(version, partition.clone());
            new.push((version, partition.clone()));
        }
        Ok(new)
    }

    pub fn name(&self, version: u32) -> Option<&Partition> {
        self.names.get(&version)
    }

    pub fn version(&self, partition: &Partition) -> Option<u32> {
        self.held.get(partition).map(|(version, _)| *version)
    }

    pub fn all(&self) -> impl Iterator<Item = (&Partition, u32)> {
        self.held.iter().map(|(partition, (version, _))| (partition, *version))
    }
}
