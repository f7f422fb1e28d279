//! The stored ports of a partition, by name.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Index;
use std::sync::Arc;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::record::PortRecord;

/// The stored ports of a partition, sorted by name. A map of one slice, since a plan holds millions of them with one or two
/// ports each; in files it is a JSON object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortRecords(Box<[(Arc<str>, PortRecord)]>);

impl PortRecords {
    pub fn get(&self, port: &str) -> Option<&PortRecord> {
        self.iter().find(|(name, _)| *name == port).map(|(_, record)| record)
    }

    pub fn contains_key(&self, port: &str) -> bool {
        self.get(port).is_some()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &PortRecord)> {
        self.0.iter().map(|(name, record)| (&**name, record))
    }

    pub fn keys(&self) -> impl ExactSizeIterator<Item = &str> {
        self.iter().map(|(name, _)| name)
    }

    pub fn values(&self) -> impl ExactSizeIterator<Item = &PortRecord> {
        self.iter().map(|(_, record)| record)
    }
}

impl Index<&str> for PortRecords {
    type Output = PortRecord;

    /// # Panics
    /// If there is no such port.
    fn index(&self, port: &str) -> &PortRecord {
        match self.get(port) {
            Some(record) => record,
            None => panic!("there is no port `{port}`"),
        }
    }
}

/// Of two records of one port the later one counts.
impl<N: Into<Arc<str>>> FromIterator<(N, PortRecord)> for PortRecords {
    fn from_iter<I: IntoIterator<Item = (N, PortRecord)>>(records: I) -> Self {
        let named = records.into_iter().map(|(name, record)| (name.into(), record));
        let mut all: Vec<(Arc<str>, PortRecord)> = named.collect();
        if !all.is_sorted_by(|a, b| a.0 < b.0) {
            all = BTreeMap::from_iter(all).into_iter().collect();
        }
        PortRecords(all.into_boxed_slice())
    }
}

impl Serialize for PortRecords {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de> Deserialize<'de> for PortRecords {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Ports)
    }
}

struct Ports;

impl<'de> Visitor<'de> for Ports {
    type Value = PortRecords;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ports by name")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<PortRecords, M::Error> {
        let mut all = Vec::new();
        while let Some((PortName(name), record)) = map.next_entry::<PortName, PortRecord>()? {
            all.push((name, record));
        }
        Ok(all.into_iter().collect())
    }
}

/// The name of a port, which is one allocation for all records that a thread reads: there are few names.
struct PortName(Arc<str>);

impl<'de> Deserialize<'de> for PortName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(SharedName)
    }
}

struct SharedName;

impl Visitor<'_> for SharedName {
    type Value = PortName;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a port")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<PortName, E> {
        /// More names than that are those of a damaged file.
        const MOST: usize = 64;
        thread_local! {
            static KNOWN: RefCell<Vec<Arc<str>>> = const { RefCell::new(Vec::new()) };
        }
        Ok(KNOWN.with_borrow_mut(|known| {
            if let Some(known) = known.iter().find(|known| ***known == *name) {
                return PortName(Arc::clone(known));
            }
            let name: Arc<str> = name.into();
            if known.len() < MOST {
                known.push(Arc::clone(&name));
            }
            PortName(name)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flow_base::digest::Digest;

    #[test]
    fn in_files_it_is_the_object_that_a_map_is_and_in_memory_sorted() {
        let port = |rows| PortRecord {
            digest: Digest::of(b"rows"),
            rows,
            bytes: 7,
            selection: None,
        };
        let map = BTreeMap::from([("val".to_string(), port(1)), ("train".to_string(), port(2))]);
        let own: PortRecords = [("val", port(0)), ("train", port(2)), ("val", port(1))]
            .into_iter()
            .collect();
        assert_eq!(own.keys().collect::<Vec<_>>(), ["train", "val"]);
        assert_eq!(own["val"].rows, 1, "the later of two");
        let text = serde_json::to_string(&own).unwrap();
        assert_eq!(text, serde_json::to_string(&map).unwrap());
        assert_eq!(serde_json::from_str::<PortRecords>(&text).unwrap(), own);
        // Objects have no order.
        let one = serde_json::to_string(&port(1)).unwrap();
        let turned: PortRecords =
            serde_json::from_str(&format!("{{\"val\":{one},\"train\":{one},\"val\":{one}}}")).unwrap();
        assert_eq!(turned.keys().collect::<Vec<_>>(), ["train", "val"]);
        assert!(turned.contains_key("train") && turned.get("test").is_none() && !turned.is_empty());
        assert!(serde_json::from_str::<PortRecords>("{}").unwrap().is_empty());
    }
}
