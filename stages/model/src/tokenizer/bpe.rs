//! Byte-pair segmentation: neighbouring symbols are merged, the pair with the best score first.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use super::model_file::{ModelFile, PieceKind};
use super::normaliser::Normaliser;

/// Calls `emit` with the pieces of a normalised text, in order, and whether a piece is an unused one that has no parts.
/// In each step the pair whose union has the best score is merged, the leftmost of equals.
pub(super) fn segment(
    file: &ModelFile,
    ids: &HashMap<String, u32>,
    normaliser: &Normaliser,
    text: &str,
    mut emit: impl FnMut(&str, bool),
) {
    let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        let (length, frozen) = normaliser.symbol_length(&text[at..]);
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
    // Length of the left part of each unused piece as it was last merged, to split it again.
    let mut parts: HashMap<&str, usize> = HashMap::new();
    let mut consider =
        |symbols: &[Symbol], left: Option<usize>, right: Option<usize>, agenda: &mut BinaryHeap<Pair>| {
            let (Some(left), Some(right)) = (left, right) else {
                return;
            };
            let (a, b) = (&symbols[left], &symbols[right]);
            if a.frozen || b.frozen {
                return;
            }
            if let Some(&id) = ids.get(&text[a.start..b.end]) {
                let piece = &file.pieces[id as usize];
                agenda.push(Pair {
                    // Minus zero equals zero.
                    score: piece.score + 0.0,
                    left,
                    right,
                    end: b.end,
                    start: a.start,
                });
                if piece.kind == PieceKind::Unused {
                    parts.insert(&text[a.start..b.end], a.end - a.start);
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
            let piece = &text[start..end];
            let unused = |id: &u32| file.pieces[*id as usize].kind == PieceKind::Unused;
            let unused = ids.get(piece).is_some_and(unused);
            match parts.get(piece) {
                Some(&left) if unused => {
                    stack.push((start + left, end));
                    stack.push((start, start + left));
                }
                _ => emit(piece, unused),
            }
        }
        current = symbol.next;
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
