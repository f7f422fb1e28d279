//! SentencePiece BPE tokenizers, exactly as NeMo uses them: plain text to ids, no begin or end token.
//!
//! Read from SentencePiece's `.model` file. Normalisation follows the file's own rules (its compiled character map),
//! not those of a Unicode library: they differ for combining marks, which Indian scripts are full of.

mod inside;
pub(crate) mod model_file;
mod normaliser;

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};
use std::path::Path;

use crate::{Error, Result};
use model_file::{ModelFile, PieceKind, read_model_file};
use normaliser::Normaliser;

/// SentencePiece's mark of a space.
const SPACE: char = '\u{2581}';

/// A byte-pair tokenizer.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    bytes: Vec<u8>,
    file: ModelFile,
    normaliser: Normaliser,
    /// Ids of the pieces that text may become.
    ids: HashMap<String, u32>,
    /// Ids of control, unknown and byte pieces.
    reserved: HashMap<String, u32>,
    unknown: u32,
}

impl Tokenizer {
    /// Reads a SentencePiece model. Only BPE models are supported.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut file = read_model_file(bytes).map_err(Error::Tokenizer)?;
        let mut ids = HashMap::new();
        let mut reserved = HashMap::new();
        let mut user_defined = Vec::new();
        let mut unknown = None;
        for (index, piece) in file.pieces.iter().enumerate() {
            let id = index as u32;
            let map = match piece.kind {
                PieceKind::Normal | PieceKind::Unused => &mut ids,
                PieceKind::UserDefined => {
                    user_defined.push(piece.text.clone());
                    &mut ids
                }
                PieceKind::Unknown => {
                    unknown = Some(id);
                    &mut reserved
                }
                PieceKind::Control | PieceKind::Byte => &mut reserved,
            };
            if piece.text.is_empty() || map.insert(piece.text.clone(), id).is_some() {
                return Err(Error::Tokenizer(format!(
                    "piece {id} `{}` is empty or stands twice",
                    piece.text
                )));
            }
        }
        let unknown = unknown.ok_or_else(|| Error::Tokenizer("has no unknown piece".into()))?;
        let map = std::mem::take(&mut file.character_map);
        let normaliser = Normaliser::new(&map, user_defined, &file).map_err(Error::Tokenizer)?;
        Ok(Tokenizer {
            bytes: bytes.to_vec(),
            file,
            normaliser,
            ids,
            reserved,
            unknown,
        })
    }

    /// Reads a SentencePiece `.model` file.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|source| Error::Io {
            path: path.into(),
            source,
        })?;
        Self::from_bytes(&bytes).map_err(|error| Error::File {
            path: path.into(),
            what: error.to_string(),
        })
    }

    /// The texts of all pieces, in the order of their ids.
    pub fn pieces(&self) -> Vec<String> {
        self.file.pieces.iter().map(|piece| piece.text.clone()).collect()
    }

    /// The bytes of the model file this was read from.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Number of pieces; the blank of a transducer has this id.
    pub fn vocabulary_size(&self) -> usize {
        self.file.pieces.len()
    }

    /// The text of a piece.
    pub fn piece(&self, id: u32) -> Option<&str> {
        self.file.pieces.get(id as usize).map(|piece| piece.text.as_str())
    }

    /// The id of a piece.
    pub fn id(&self, piece: &str) -> Option<u32> {
        self.reserved.get(piece).or_else(|| self.ids.get(piece)).copied()
    }

    /// Id of the unknown piece.
    pub fn unknown_id(&self) -> u32 {
        self.unknown
    }

    /// Ids of a text. A run of unknown characters becomes one unknown id (or bytes, if the model has byte pieces).
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let normalised = self.normaliser.normalise(text);
        let mut ids = Vec::new();
        let mut after_unknown = false;
        self.segment(&normalised, |part| {
            let id = self.id(part).unwrap_or(self.unknown);
            let is_unknown = id == self.unknown;
            if is_unknown && self.file.byte_fallback {
                for byte in part.bytes() {
                    ids.push(
                        self.reserved
                            .get(&format!("<0x{byte:02X}>"))
                            .copied()
                            .unwrap_or(self.unknown),
                    );
                }
            } else if !(is_unknown && after_unknown) {
                ids.push(id);
            }
            after_unknown = is_unknown;
        });
        ids
    }

    /// The text of ids, as SentencePiece's `DecodeIds`: leading spaces are dropped, an unknown becomes ` U+2047 `,
    /// control pieces nothing. An id outside the vocabulary is an error.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let mut text = String::new();
        let mut pending = Vec::new();
        let at_start = |text: &str| text.is_empty() && (self.file.add_dummy_prefix || self.file.remove_extra_spaces);
        let mut start_space_seen = false;
        for &id in ids {
            let piece = self
                .file
                .pieces
                .get(id as usize)
                .ok_or_else(|| Error::Tokenizer(format!("id {id} is not below {}", self.vocabulary_size())))?;
            if let (PieceKind::Byte, Some(byte)) = (piece.kind, byte_value(&piece.text)) {
                pending.push(byte);
                continue;
            }
            text.push_str(&String::from_utf8_lossy(&std::mem::take(&mut pending)));
            match piece.kind {
                PieceKind::Control => {}
                PieceKind::Unknown => text.push_str(&self.file.unknown_surface),
                _ => {
                    let mut part = piece.text.as_str();
                    if at_start(&text)
                        && !start_space_seen
                        && let Some(rest) = part.strip_prefix(SPACE)
                    {
                        part = rest;
                        start_space_seen = !self.file.remove_extra_spaces;
                    }
                    text.extend(part.chars().map(|c| if c == SPACE { ' ' } else { c }));
                }
            }
        }
        text.push_str(&String::from_utf8_lossy(&pending));
        Ok(text)
    }

    /// Byte-pair merges: always the pair whose union has the best score, the leftmost of equals.
    fn segment(&self, text: &str, mut emit: impl FnMut(&str)) {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        let mut at = 0;
        while at < text.len() {
            let (length, frozen) = self.normaliser.symbol_length(&text[at..]);
            let index = symbols.len();
            symbols.push(Symbol {
                start: at,
                end: at + length,
                previous: index.checked_sub(1),
                next: None,
                frozen,
            });
            if let Some(before) = index.checked_sub(1) {
                symbols[before].next = Some(index);
            }
            at += length;
        }
        let mut agenda = BinaryHeap::new();
        // How an unused piece was merged, so that it can be taken apart again.
        let mut parts: HashMap<(usize, usize), usize> = HashMap::new();
        let mut consider =
            |symbols: &[Symbol], left: Option<usize>, right: Option<usize>, agenda: &mut BinaryHeap<Pair>| {
                let (Some(left), Some(right)) = (left, right) else {
                    return;
                };
                let (a, b) = (&symbols[left], &symbols[right]);
                if a.frozen || b.frozen {
                    return;
                }
                if let Some(&id) = self.ids.get(&text[a.start..b.end]) {
                    let piece = &self.file.pieces[id as usize];
                    agenda.push(Pair {
                        score: piece.score,
                        left,
                        right,
                        end: b.end,
                        start: a.start,
                    });
                    if piece.kind == PieceKind::Unused {
                        parts.insert((a.start, b.end), a.end);
                    }
                }
            };
        for index in 1..symbols.len() {
            consider(&symbols, Some(index - 1), Some(index), &mut agenda);
        }
        while let Some(pair) = agenda.pop() {
            let (left, right) = (&symbols[pair.left], &symbols[pair.right]);
            let stale = left.is_gone() || right.is_gone() || left.start != pair.start || right.end != pair.end;
            if stale || left.end != right.start {
                continue;
            }
            let (end, next) = (right.end, right.next);
            symbols[pair.left].end = end;
            symbols[pair.left].next = next;
            symbols[pair.right].end = symbols[pair.right].start;
            if let Some(next) = next {
                symbols[next].previous = Some(pair.left);
            }
            let previous = symbols[pair.left].previous;
            consider(&symbols, previous, Some(pair.left), &mut agenda);
            consider(&symbols, Some(pair.left), next, &mut agenda);
        }
        let mut current = if symbols.is_empty() { None } else { Some(0) };
        while let Some(index) = current {
            let symbol = &symbols[index];
            let mut stack = vec![(symbol.start, symbol.end)];
            while let Some((start, end)) = stack.pop() {
                let unused = |id: &u32| self.file.pieces[*id as usize].kind == PieceKind::Unused;
                match parts.get(&(start, end)) {
                    Some(&middle) if self.ids.get(&text[start..end]).is_some_and(unused) => {
                        stack.push((middle, end));
                        stack.push((start, middle));
                    }
                    _ => emit(&text[start..end]),
                }
            }
            current = symbol.next;
        }
    }
}

#[derive(Debug)]
struct Symbol {
    start: usize,
    end: usize,
    previous: Option<usize>,
    next: Option<usize>,
    /// A user-defined symbol, which is never merged.
    frozen: bool,
}

impl Symbol {
    fn is_gone(&self) -> bool {
        self.start == self.end
    }
}

/// Two neighbouring symbols that make a piece.
#[derive(Debug)]
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    start: usize,
    end: usize,
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

/// The byte of a piece such as `<0x0A>`.
fn byte_value(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 {
        u8::from_str_radix(digits, 16).ok()
    } else {
        None
    }
}

#[cfg(test)]
mod tests;
