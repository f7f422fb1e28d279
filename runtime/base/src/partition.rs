//! Names of partitions.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The name of a partition, the unit of progress: `hi/hi_0001` for a shard, `epoch-3`, `step-120`.
///
/// Names are compared as bytes. A name is stored and hashed; its place in the sorted list of one run
/// (timely's time) never is.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Partition(Arc<str>);

impl Partition {
    pub fn new(name: impl AsRef<str>) -> Self {
        Partition(Arc::from(name.as_ref()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Ord for Partition {
    fn cmp(&self, other: &Self) -> Ordering {
        // Clones are found without reading their names.
        match Arc::ptr_eq(&self.0, &other.0) {
            true => Ordering::Equal,
            false => self.0.cmp(&other.0),
        }
    }
}

impl PartialOrd for Partition {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

impl From<&str> for Partition {
    fn from(name: &str) -> Self {
        Partition::new(name)
    }
}

impl From<String> for Partition {
    fn from(name: String) -> Self {
        Partition(Arc::from(name))
    }
}

impl Serialize for Partition {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Partition {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Partition::from)
    }
}
