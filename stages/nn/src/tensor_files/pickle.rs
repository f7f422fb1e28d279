//! Pickles as PyTorch and Lightning write them. Nothing is executed: a call of anything but the known constructors
//! stays an inert node, and is an error where a tensor is expected.
//!
//! Texts are borrowed from the bytes of the pickle: a small hostile file can refer to a long one again and again.

use std::collections::{BTreeMap, HashSet};

use serde_yaml::{Mapping, Value};

/// Nodes refer to each other by index, so that nesting of any depth or shape costs no stack and no copies.
type NodeId = usize;

enum Node<'a> {
    None,
    Boolean(bool),
    Number(i64),
    Real(f64),
    Text(&'a str),
    /// Module and name.
    Global(&'a str, &'a str),
    Sequence(Vec<NodeId>),
    Dictionary(Vec<(NodeId, NodeId)>),
    Persistent(NodeId),
    /// What is called, with what, and the attributes that are set on the result.
    Call(NodeId, NodeId, Option<NodeId>),
    Mark,
}

/// Where a tensor of a state dictionary lies.
#[derive(Debug, PartialEq)]
pub struct StoredTensor<'a> {
    /// PyTorch's storage class, such as `FloatStorage`.
    pub storage: &'a str,
    /// Name of the storage, the last part of the member `<root>/data/<key>`.
    pub key: &'a str,
    /// Offset in elements.
    pub offset: u64,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
}

/// A pickle that was read.
pub struct Pickle<'a> {
    bytes: &'a [u8],
    nodes: Vec<Node<'a>>,
    stack: Vec<NodeId>,
    memo: BTreeMap<u32, NodeId>,
    root: NodeId,
}

/// Hyper-parameters with more values, or nested deeper, than any model has are refused: a small hostile file can say
/// the same list a billion times.
const MAX_VALUES: usize = 1_000_000;
const MAX_DEPTH: usize = 64;

/// Most values of a pickle, of its stack and of its memo. A checkpoint has some dozens for each tensor.
const MAX_NODES: usize = 2_000_000;

/// Shapes of more dimensions are refused: they are copied for each tensor.
const MAX_DIMENSIONS: usize = 8;

impl<'a> Pickle<'a> {
    /// Reads `data.pkl`.
    pub fn read(bytes: &'a [u8]) -> Result<Self, String> {
        let mut pickle = Pickle {
            bytes,
            nodes: Vec::new(),
            stack: Vec::new(),
            memo: BTreeMap::new(),
            root: 0,
        };
        pickle.root = pickle.run()?;
        Ok(pickle)
    }

    /// The tensors of a dictionary of tensors, or of a dictionary with such a one under `state_dict`, each name once.
    pub fn state_dict(&self) -> Result<Vec<(&'a str, StoredTensor<'a>)>, String> {
        let mut entries = self.dictionary(self.root).ok_or("holds no dictionary of tensors")?;
        if let Some(inner) = self
            .entry(self.root, "state_dict")
            .and_then(|node| self.dictionary(node))
        {
            entries = inner;
        }
        let mut tensors = Vec::new();
        let mut names = HashSet::new();
        for &(key, value) in entries {
            let name = self.text(key).ok_or("has a tensor without a name")?;
            if !names.insert(name) {
                return Err(format!("has two tensors of the name `{name}`"));
            }
            let tensor = self
                .tensor(value)
                .ok_or_else(|| format!("holds `{name}`, which is not a plain tensor"))?;
            tensors.push((name, tensor));
        }
        Ok(tensors)
    }

    /// Lightning's `hyper_parameters`: plain data, or OmegaConf's containers of plain data. Other objects become null.
    /// None where the key is missing.
    pub fn hyper_parameters(&self) -> Result<Option<Value>, String> {
        let Some(node) = self.entry(self.root, "hyper_parameters") else {
            return Ok(None);
        };
        let mut left = MAX_VALUES;
        self.plain(node, MAX_DEPTH, &mut left).map(Some)
    }

    fn plain(&self, node: NodeId, depth: usize, left: &mut usize) -> Result<Value, String> {
        if depth == 0 || *left == 0 {
            return Err("has hyper-parameters that are nested too deeply or are too many".into());
        }
        *left -= 1;
        Ok(match &self.nodes[node] {
            Node::None | Node::Global(..) | Node::Persistent(_) | Node::Mark => Value::Null,
            Node::Boolean(value) => Value::from(*value),
            Node::Number(value) => Value::from(*value),
            Node::Real(value) => Value::from(*value),
            Node::Text(text) => {
                // Texts are copied.
                *left = left
                    .checked_sub(text.len() / 16)
                    .ok_or("has hyper-parameters that are too long")?;
                Value::from(*text)
            }
            Node::Sequence(items) => Value::Sequence(
                items
                    .iter()
                    .map(|&item| self.plain(item, depth - 1, left))
                    .collect::<Result<_, _>>()?,
            ),
            Node::Dictionary(entries) => {
                let mut map = Mapping::new();
                for &(key, value) in entries {
                    map.insert(self.plain(key, depth - 1, left)?, self.plain(value, depth - 1, left)?);
                }
                Value::Mapping(map)
            }
            // OmegaConf's containers hold `_content`, its leaves `_val`.
            Node::Call(_, _, attributes) => {
                // The containers are replaced by their content.
                let entries = attributes.and_then(|node| self.dictionary(node)).map_or(0, <[_]>::len);
                *left = left
                    .checked_sub(entries / 16)
                    .ok_or("has hyper-parameters that are too long")?;
                let held = attributes.and_then(|node| self.entry(node, "_content").or(self.entry(node, "_val")));
                match held {
                    Some(held) => self.plain(held, depth - 1, left)?,
                    None => Value::Null,
                }
            }
        })
    }

    /// The value of a text key of a dictionary.
    fn entry(&self, node: NodeId, name: &str) -> Option<NodeId> {
        let entries = self.dictionary(node)?;
        entries
            .iter()
            .find(|(key, _)| self.text(*key) == Some(name))
            .map(|&(_, value)| value)
    }

    fn run(&mut self) -> Result<NodeId, String> {
        loop {
            // An instruction of one byte makes a node of many.
            let most = self.nodes.len().max(self.stack.len()).max(self.memo.len());
            if most > MAX_NODES {
                return Err(format!(
                    "has a data.pkl of more than {MAX_NODES} values, which no checkpoint needs"
                ));
            }
            let code = self.take(1)?[0];
            match code {
                0x80 => drop(self.take(1)?),
                b'.' => return self.pop(),
                b'(' => self.push(Node::Mark),
                b'N' => self.push(Node::None),
                0x88 | 0x89 => self.push(Node::Boolean(code == 0x88)),
                b'K' | b'M' | b'J' | 0x8a => {
                    let number = self.number(code)?;
                    self.push(number.map_or(Node::None, Node::Number));
                }
                b'G' => {
                    let mut bytes = [0; 8];
                    bytes.copy_from_slice(self.take(8)?);
                    self.push(Node::Real(f64::from_be_bytes(bytes)));
                }
                b'X' | 0x8c | 0x8d => {
                    let length = match code {
                        0x8c => usize::from(self.take(1)?[0]),
                        0x8d => self.long_length()?,
                        _ => self.length()?,
                    };
                    let text = utf8(self.take(length)?)?;
                    self.push(Node::Text(text));
                }
                // Byte strings, which are not used here.
                b'U' | b'T' | b'B' | b'C' | 0x8e => {
                    let length = match code {
                        b'U' | b'C' => usize::from(self.take(1)?[0]),
                        0x8e => self.long_length()?,
                        _ => self.length()?,
                    };
                    self.take(length)?;
                    self.push(Node::None);
                }
                // The length of the following frame, a hint for buffering.
                0x95 => drop(self.take(8)?),
                0x94 => {
                    let top = *self.stack.last().ok_or(DAMAGED)?;
                    let slot = u32::try_from(self.memo.len()).map_err(|_| DAMAGED)?;
                    self.memo.insert(slot, top);
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.push(Node::Global(module, name));
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    let part = |node| self.text(node).ok_or(DAMAGED);
                    let global = Node::Global(part(module)?, part(name)?);
                    self.push(global);
                }
                b')' | b']' | 0x8f => self.push(Node::Sequence(Vec::new())),
                b'}' => self.push(Node::Dictionary(Vec::new())),
                b'0' => drop(self.pop()?),
                b't' | b'l' | 0x91 => {
                    let items = self.pop_to_mark()?;
                    self.push(Node::Sequence(items));
                }
                0x85..=0x87 => {
                    let mut items = Vec::new();
                    for _ in 0x84..code {
                        items.push(self.pop()?);
                    }
                    items.reverse();
                    self.push(Node::Sequence(items));
                }
                b'a' => {
                    let item = self.pop()?;
                    self.append(vec![item])?;
                }
                b'e' | 0x90 => {
                    let items = self.pop_to_mark()?;
                    self.append(items)?;
                }
                b'd' => {
                    let items = self.pop_to_mark()?;
                    self.push(Node::Dictionary(Vec::new()));
                    self.set_items(&items)?;
                }
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.set_items(&[key, value])?;
                }
                b'u' => {
                    let items = self.pop_to_mark()?;
                    self.set_items(&items)?;
                }
                b'Q' => {
                    let id = self.pop()?;
                    self.push(Node::Persistent(id));
                }
                b'R' | 0x81 => {
                    let (arguments, callable) = (self.pop()?, self.pop()?);
                    let ordered = matches!(self.nodes[callable], Node::Global("collections", "OrderedDict"));
                    self.push(if ordered {
                        Node::Dictionary(Vec::new())
                    } else {
                        Node::Call(callable, arguments, None)
                    });
                }
                // The attributes of an object; those of an ordered dictionary are metadata.
                b'b' => {
                    let state = self.pop()?;
                    let top = *self.stack.last().ok_or(DAMAGED)?;
                    if let Node::Call(_, _, attributes) = &mut self.nodes[top] {
                        *attributes = Some(state);
                    }
                }
                b'q' | b'r' => {
                    let slot = if code == b'q' {
                        u32::from(self.take(1)?[0])
                    } else {
                        self.length()? as u32
                    };
                    let top = *self.stack.last().ok_or(DAMAGED)?;
                    self.memo.insert(slot, top);
                }
                b'h' | b'j' => {
                    let slot = if code == b'h' {
                        u32::from(self.take(1)?[0])
                    } else {
                        self.length()? as u32
                    };
                    let node = *self.memo.get(&slot).ok_or(DAMAGED)?;
                    self.stack.push(node);
                }
                other => {
                    return Err(format!(
                        "uses pickle instruction 0x{other:02x}, which no checkpoint needs"
                    ));
                }
            }
        }
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (taken, rest) = self.bytes.split_at_checked(count).ok_or("is cut off")?;
        self.bytes = rest;
        Ok(taken)
    }

    fn length(&mut self) -> Result<usize, String> {
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize)
    }

    fn long_length(&mut self) -> Result<usize, String> {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(self.take(8)?);
        usize::try_from(u64::from_le_bytes(bytes)).map_err(|_| DAMAGED.into())
    }

    /// A little-endian integer of the width that the instruction says; none beyond 64 bits, which only the states of
    /// random generators have.
    fn number(&mut self, code: u8) -> Result<Option<i64>, String> {
        let width = match code {
            b'K' => 1,
            b'M' => 2,
            b'J' => 4,
            _ => usize::from(self.take(1)?[0]),
        };
        let bytes = self.take(width)?;
        let mut value = [0; 8];
        let Some(low) = value.get_mut(..width) else {
            return Ok(None);
        };
        low.copy_from_slice(bytes);
        let signed = matches!(code, b'J' | 0x8a) && bytes.last().is_some_and(|&top| top >= 0x80);
        if signed {
            value[width..].fill(0xff);
        }
        Ok(Some(i64::from_le_bytes(value)))
    }

    fn line(&mut self) -> Result<&'a str, String> {
        let end = self.bytes.iter().position(|&byte| byte == b'\n').ok_or("is cut off")?;
        let line = utf8(self.take(end)?)?;
        self.take(1)?;
        Ok(line)
    }

    fn push(&mut self, node: Node<'a>) {
        self.stack.push(self.nodes.len());
        self.nodes.push(node);
    }

    fn pop(&mut self) -> Result<NodeId, String> {
        self.stack.pop().ok_or_else(|| DAMAGED.into())
    }

    fn pop_to_mark(&mut self) -> Result<Vec<NodeId>, String> {
        let mark = self
            .stack
            .iter()
            .rposition(|&node| matches!(self.nodes[node], Node::Mark))
            .ok_or(DAMAGED)?;
        let items = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(items)
    }

    fn append(&mut self, items: Vec<NodeId>) -> Result<(), String> {
        let top = *self.stack.last().ok_or(DAMAGED)?;
        match &mut self.nodes[top] {
            Node::Sequence(list) => list.extend(items),
            // Items of an object that is not read.
            Node::Call(..) => {}
            _ => return Err(DAMAGED.into()),
        }
        Ok(())
    }

    fn set_items(&mut self, items: &[NodeId]) -> Result<(), String> {
        let top = *self.stack.last().ok_or(DAMAGED)?;
        match &mut self.nodes[top] {
            Node::Dictionary(entries) if items.len().is_multiple_of(2) => {
                entries.extend(items.chunks_exact(2).map(|pair| (pair[0], pair[1])));
            }
            Node::Call(..) => {}
            _ => return Err(DAMAGED.into()),
        }
        Ok(())
    }

    fn dictionary(&self, node: NodeId) -> Option<&[(NodeId, NodeId)]> {
        match &self.nodes[node] {
            Node::Dictionary(entries) => Some(entries),
            _ => None,
        }
    }

    fn text(&self, node: NodeId) -> Option<&'a str> {
        match self.nodes[node] {
            Node::Text(text) => Some(text),
            _ => None,
        }
    }

    fn sequence(&self, node: NodeId) -> Option<&[NodeId]> {
        match &self.nodes[node] {
            Node::Sequence(items) => Some(items),
            _ => None,
        }
    }

    fn size(&self, node: NodeId) -> Option<usize> {
        match self.nodes[node] {
            Node::Number(number) => usize::try_from(number).ok(),
            _ => None,
        }
    }

    fn sizes(&self, node: NodeId) -> Option<Vec<usize>> {
        let items = self.sequence(node).filter(|items| items.len() <= MAX_DIMENSIONS)?;
        items.iter().map(|&item| self.size(item)).collect()
    }

    /// `_rebuild_tensor_v2(storage, offset, shape, strides, ...)`, possibly wrapped in `_rebuild_parameter`.
    fn tensor(&self, node: NodeId) -> Option<StoredTensor<'a>> {
        let (name, arguments) = self.rebuilt(node)?;
        match name {
            "_rebuild_tensor_v2" => self.stored(arguments),
            // One level only: in a hostile file the inner node could be the node itself.
            "_rebuild_parameter" => match self.rebuilt(*arguments.first()?)? {
                ("_rebuild_tensor_v2", arguments) => self.stored(arguments),
                _ => None,
            },
            _ => None,
        }
    }

    /// Name and arguments of a function of `torch._utils` that is called.
    fn rebuilt(&self, node: NodeId) -> Option<(&'a str, &[NodeId])> {
        let Node::Call(callable, arguments, _) = self.nodes[node] else {
            return None;
        };
        match self.nodes[callable] {
            Node::Global("torch._utils", name) => Some((name, self.sequence(arguments)?)),
            _ => None,
        }
    }

    /// The tensor of `storage, offset, shape, strides, ...`, where the storage is `("storage", class, key, ...)`.
    fn stored(&self, arguments: &[NodeId]) -> Option<StoredTensor<'a>> {
        let &[storage, offset, shape, strides, ..] = arguments else {
            return None;
        };
        let Node::Persistent(storage) = self.nodes[storage] else {
            return None;
        };
        let &[_, class, key, ..] = self.sequence(storage)? else {
            return None;
        };
        let Node::Global("torch", class) = self.nodes[class] else {
            return None;
        };
        Some(StoredTensor {
            storage: class,
            key: self.text(key)?,
            offset: self.size(offset)? as u64,
            shape: self.sizes(shape)?,
            strides: self.sizes(strides)?,
        })
    }
}

const DAMAGED: &str = "has a damaged data.pkl";

fn utf8(bytes: &[u8]) -> Result<&str, String> {
    std::str::from_utf8(bytes).map_err(|_| "has a name that is not UTF-8".into())
}

#[cfg(test)]
#[path = "pickle_tests.rs"]
mod tests;
