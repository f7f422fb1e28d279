//! The few pickle instructions that PyTorch uses in a state dictionary. Nothing is executed: a call of anything but
//! the known constructors stays an inert node, and is an error where a tensor is expected.

use std::collections::BTreeMap;

/// Nodes refer to each other by index, so that nesting of any depth or shape costs no stack and no copies.
type NodeId = usize;

enum Node {
    None,
    Number(i64),
    Text(String),
    Global(String),
    Sequence(Vec<NodeId>),
    Dictionary(Vec<(NodeId, NodeId)>),
    Persistent(NodeId),
    Call(NodeId, NodeId),
    Mark,
}

/// Where a tensor of a state dictionary lies.
#[derive(Debug, PartialEq)]
pub(super) struct StoredTensor {
    /// PyTorch's storage class, such as `FloatStorage`.
    pub storage: String,
    /// Name of the storage, the last part of the member `<root>/data/<key>`.
    pub key: String,
    /// Offset in elements.
    pub offset: u64,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
}

struct Pickle<'a> {
    bytes: &'a [u8],
    nodes: Vec<Node>,
    stack: Vec<NodeId>,
    memo: BTreeMap<u32, NodeId>,
}

/// Reads `data.pkl`: a dictionary of tensors, or a dictionary with such a one under `state_dict`.
pub(super) fn read_state_dict(bytes: &[u8]) -> Result<Vec<(String, StoredTensor)>, String> {
    let mut pickle = Pickle {
        bytes,
        nodes: Vec::new(),
        stack: Vec::new(),
        memo: BTreeMap::new(),
    };
    let root = pickle.run()?;
    let mut entries = pickle.dictionary(root).ok_or("holds no dictionary of tensors")?;
    let inner = entries.iter().find(|(key, _)| pickle.text(*key) == Some("state_dict"));
    if let Some(inner) = inner.and_then(|&(_, value)| pickle.dictionary(value)) {
        entries = inner;
    }
    let mut tensors = Vec::with_capacity(entries.len());
    for &(key, value) in entries {
        let name = pickle.text(key).ok_or("has a tensor without a name")?;
        let tensor = pickle
            .tensor(value)
            .ok_or_else(|| format!("holds `{name}`, which is not a plain tensor"))?;
        tensors.push((name.to_string(), tensor));
    }
    Ok(tensors)
}

impl Pickle<'_> {
    fn run(&mut self) -> Result<NodeId, String> {
        loop {
            let code = self.take(1)?[0];
            match code {
                0x80 => drop(self.take(1)?),
                b'.' => return self.pop(),
                b'(' => self.push(Node::Mark),
                b'N' => self.push(Node::None),
                0x88 => self.push(Node::Number(1)),
                0x89 => self.push(Node::Number(0)),
                b'K' | b'M' | b'J' | 0x8a => {
                    let number = self.number(code)?;
                    self.push(Node::Number(number));
                }
                // Floating point numbers occur only beside what is read here.
                b'G' => {
                    self.take(8)?;
                    self.push(Node::None);
                }
                b'X' => {
                    let length = self.length()?;
                    let text = std::str::from_utf8(self.take(length)?).map_err(|_| "has a name that is no UTF-8")?;
                    let text = text.to_string();
                    self.push(Node::Text(text));
                }
                b'c' => {
                    let name = format!("{}.{}", self.line()?, self.line()?);
                    self.push(Node::Global(name));
                }
                b')' | b']' => self.push(Node::Sequence(Vec::new())),
                b'}' => self.push(Node::Dictionary(Vec::new())),
                b't' => {
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
                b'e' => {
                    let items = self.pop_to_mark()?;
                    self.append(items)?;
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
                    let ordered =
                        matches!(&self.nodes[callable], Node::Global(name) if name == "collections.OrderedDict");
                    self.push(if ordered {
                        Node::Dictionary(Vec::new())
                    } else {
                        Node::Call(callable, arguments)
                    });
                }
                // The attributes of an object: only the metadata of an ordered dictionary.
                b'b' => drop(self.pop()?),
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
                        "uses pickle instruction 0x{other:02x}, which no state dictionary needs"
                    ));
                }
            }
        }
    }

    fn take(&mut self, count: usize) -> Result<&[u8], String> {
        let (taken, rest) = self.bytes.split_at_checked(count).ok_or("is cut off")?;
        self.bytes = rest;
        Ok(taken)
    }

    fn length(&mut self) -> Result<usize, String> {
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize)
    }

    /// A little-endian integer of the width that the instruction says.
    fn number(&mut self, code: u8) -> Result<i64, String> {
        let width = match code {
            b'K' => 1,
            b'M' => 2,
            b'J' => 4,
            _ => usize::from(self.take(1)?[0]),
        };
        let bytes = self.take(width)?;
        let mut value = [0; 8];
        value
            .get_mut(..width)
            .ok_or("holds a number of more than 64 bits")?
            .copy_from_slice(bytes);
        let signed = matches!(code, b'J' | 0x8a) && bytes.last().is_some_and(|&top| top >= 0x80);
        if signed {
            value[width..].fill(0xff);
        }
        Ok(i64::from_le_bytes(value))
    }

    fn line(&mut self) -> Result<String, String> {
        let end = self.bytes.iter().position(|&byte| byte == b'\n').ok_or("is cut off")?;
        let line = String::from_utf8_lossy(self.take(end)?).into_owned();
        self.take(1)?;
        Ok(line)
    }

    fn push(&mut self, node: Node) {
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

    fn text(&self, node: NodeId) -> Option<&str> {
        match &self.nodes[node] {
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
        self.sequence(node)?.iter().map(|&item| self.size(item)).collect()
    }

    /// `_rebuild_tensor_v2(storage, offset, shape, strides, ...)`, possibly wrapped in `_rebuild_parameter`.
    fn tensor(&self, node: NodeId) -> Option<StoredTensor> {
        let Node::Call(callable, arguments) = self.nodes[node] else {
            return None;
        };
        let Node::Global(name) = &self.nodes[callable] else {
            return None;
        };
        let arguments = self.sequence(arguments)?;
        if name == "torch._utils._rebuild_parameter" {
            let &inner = arguments.first()?;
            // One level only: the inner node of a hostile file could be the node itself.
            let Node::Call(callable, _) = self.nodes[inner] else {
                return None;
            };
            let Node::Global(name) = &self.nodes[callable] else {
                return None;
            };
            return if name == "torch._utils._rebuild_tensor_v2" {
                self.tensor(inner)
            } else {
                None
            };
        }
        if name != "torch._utils._rebuild_tensor_v2" {
            return None;
        }
        let &[storage, offset, shape, strides, ..] = arguments else {
            return None;
        };
        let Node::Persistent(storage) = self.nodes[storage] else {
            return None;
        };
        let &[_, class, key, ..] = self.sequence(storage)? else {
            return None;
        };
        let Node::Global(class) = &self.nodes[class] else {
            return None;
        };
        Some(StoredTensor {
            storage: class.strip_prefix("torch.").unwrap_or(class).to_string(),
            key: self.text(key)?.to_string(),
            offset: self.size(offset)? as u64,
            shape: self.sizes(shape)?,
            strides: self.sizes(strides)?,
        })
    }
}

const DAMAGED: &str = "has a damaged data.pkl";
