//! A trie that finds all pieces which are prefixes of a text.

use std::collections::VecDeque;

/// No piece ends here.
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Node {
    /// The children of a node have consecutive numbers, in the order of their bytes.
    first_child: u32,
    children: u16,
    value: u32,
}

/// A set of byte strings with a number for each.
#[derive(Debug, Clone)]
pub(super) struct PieceTrie {
    nodes: Vec<Node>,
    /// The byte that leads to each node.
    bytes: Vec<u8>,
}

impl PieceTrie {
    /// Keys must be distinct and not empty; of equal ones only one is kept.
    pub fn new<'a>(keys: impl Iterator<Item = (&'a str, u32)>) -> Self {
        let mut keys: Vec<(&[u8], u32)> = keys.map(|(key, value)| (key.as_bytes(), value)).collect();
        keys.sort_unstable();
        let root = Node {
            first_child: 0,
            children: 0,
            value: NONE,
        };
        let mut trie = PieceTrie {
            nodes: vec![root],
            bytes: vec![0],
        };
        // A node, the keys that go through it, and how long they are up to it.
        let mut open = VecDeque::from([(0, 0..keys.len(), 0)]);
        while let Some((node, mut range, depth)) = open.pop_front() {
            while range.start < range.end && keys[range.start].0.len() == depth {
                trie.nodes[node].value = keys[range.start].1;
                range.start += 1;
            }
            trie.nodes[node].first_child = trie.nodes.len() as u32;
            while range.start < range.end {
                let byte = keys[range.start].0[depth];
                let end = range.start + keys[range.clone()].partition_point(|(key, _)| key[depth] == byte);
                open.push_back((trie.nodes.len(), range.start..end, depth + 1));
                trie.nodes[node].children += 1;
                trie.nodes.push(root);
                trie.bytes.push(byte);
                range.start = end;
            }
        }
        trie
    }

    /// Calls `found` with the length and the number of every key that `text` begins with, the shortest first.
    pub fn prefixes(&self, text: &[u8], mut found: impl FnMut(usize, u32)) {
        let mut node = self.nodes[0];
        for (index, byte) in text.iter().enumerate() {
            let first = node.first_child as usize;
            let children = &self.bytes[first..first + usize::from(node.children)];
            let Ok(place) = children.binary_search(byte) else { break };
            node = self.nodes[first + place];
            if node.value != NONE {
                found(index + 1, node.value);
            }
        }
    }
}
