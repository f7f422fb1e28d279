//! Looking up many partitions in sorted lists.

use std::cmp::Ordering;
use std::iter::Peekable;

use flow_base::partition::Partition;

/// Finds ascending partitions in a list that ascends as well, without a search for each of them.
pub(super) struct Cursor<I: Iterator>(Peekable<I>);

impl<'a, V, I: Iterator<Item = (&'a Partition, V)>> Cursor<I> {
    pub fn new(list: I) -> Self {
        Cursor(list.peekable())
    }

    /// What the list has for a partition. Partitions are asked for in ascending order, each once.
    pub fn find(&mut self, wanted: &Partition) -> Option<V> {
        loop {
            match self.0.peek()?.0.cmp(wanted) {
                Ordering::Less => {
                    self.0.next();
                }
                Ordering::Equal => return self.0.next().map(|(_, found)| found),
                Ordering::Greater => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn finds_what_a_search_finds(list in prop::collection::btree_map("[a-c]{0,3}", any::<u8>(), 0..20), wanted in prop::collection::btree_set("[a-c]{0,3}", 0..20)) {
            let list: BTreeMap<Partition, u8> = list.into_iter().map(|(name, value)| (name.into(), value)).collect();
            let mut cursor = Cursor::new(list.iter());
            for name in wanted {
                let partition = Partition::from(name);
                prop_assert_eq!(cursor.find(&partition), list.get(&partition));
            }
        }
    }
}
