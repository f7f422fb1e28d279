//! The lattice of all segmentations of a word into pieces, and sums over it.

use super::super::piece_trie::PieceTrie;

/// The number of an unknown character.
pub(super) const NO_PIECE: u32 = u32::MAX;

/// How much worse than the worst piece an unknown character is.
const UNKNOWN_PENALTY: f64 = 10.0;

/// Pieces with their scores, in training.
pub(super) struct Scored {
    pub pieces: Vec<(String, f64)>,
    trie: PieceTrie,
    unknown_score: f64,
}

impl Scored {
    pub fn new(pieces: Vec<(String, f64)>) -> Self {
        let trie = PieceTrie::new(
            pieces
                .iter()
                .enumerate()
                .map(|(id, (text, _))| (text.as_str(), id as u32)),
        );
        let least = pieces.iter().map(|(_, score)| *score).fold(f64::MAX, f64::min);
        Scored {
            pieces,
            trie,
            unknown_score: least - UNKNOWN_PENALTY,
        }
    }

    pub fn least_score(&self) -> f64 {
        self.unknown_score + UNKNOWN_PENALTY
    }
}

/// A piece at a place in the word.
#[derive(Clone, Copy)]
struct Edge {
    start: usize,
    end: usize,
    id: u32,
    score: f64,
}

/// The lattice of one word; reused for all words, to keep its memory.
#[derive(Default)]
pub(super) struct Lattice {
    length: usize,
    /// By their starts.
    edges: Vec<Edge>,
    forward: Vec<f64>,
    backward: Vec<f64>,
}

impl Lattice {
    pub fn set(&mut self, word: &str, model: &Scored) {
        self.length = word.len();
        self.edges.clear();
        for (start, character) in word.char_indices() {
            let single = character.len_utf8();
            let mut has_single = false;
            let edges = &mut self.edges;
            model.trie.prefixes(&word.as_bytes()[start..], |length, id| {
                has_single |= length == single;
                edges.push(Edge {
                    start,
                    end: start + length,
                    id,
                    score: model.pieces[id as usize].1,
                });
            });
            if !has_single {
                self.edges.push(Edge {
                    start,
                    end: start + single,
                    id: NO_PIECE,
                    score: model.unknown_score,
                });
            }
        }
    }

    /// Adds to each piece its expected count over all segmentations, weighted by their probabilities, for `count` such
    /// words.
    pub fn add_expected(&mut self, count: f64, expected: &mut [f64]) {
        let places = self.length + 1;
        for sums in [&mut self.forward, &mut self.backward] {
            sums.clear();
            sums.resize(places, f64::NEG_INFINITY);
        }
        self.forward[0] = 0.0;
        for edge in &self.edges {
            let sum = self.forward[edge.start] + edge.score;
            self.forward[edge.end] = log_of_sum(self.forward[edge.end], sum);
        }
        self.backward[self.length] = 0.0;
        for edge in self.edges.iter().rev() {
            let sum = self.backward[edge.end] + edge.score;
            self.backward[edge.start] = log_of_sum(self.backward[edge.start], sum);
        }
        let all = self.forward[self.length];
        for edge in self.edges.iter().filter(|edge| edge.id != NO_PIECE) {
            let share = self.forward[edge.start] + edge.score + self.backward[edge.end] - all;
            expected[edge.id as usize] += count * share.exp();
        }
    }

    /// The best ways, at most two, the best first: the pieces of each in order.
    pub fn two_best(&self) -> Vec<Vec<u32>> {
        // For each place its two best ways: score, edge, and which way of the edge's start it goes on.
        let mut ways: Vec<Vec<(f64, usize, usize)>> = vec![Vec::new(); self.length + 1];
        ways[0].push((0.0, usize::MAX, 0));
        for (index, edge) in self.edges.iter().enumerate() {
            for rank in 0..ways[edge.start].len() {
                let way = (ways[edge.start][rank].0 + edge.score, index, rank);
                let here = &mut ways[edge.end];
                let place = here.iter().position(|other| way.0 > other.0).unwrap_or(here.len());
                here.insert(place, way);
                here.truncate(2);
            }
        }
        let path = |mut rank: usize| {
            let mut ids = Vec::new();
            let mut place = self.length;
            while place > 0 {
                let (_, index, before) = ways[place][rank];
                ids.push(self.edges[index].id);
                (place, rank) = (self.edges[index].start, before);
            }
            ids.reverse();
            ids
        };
        (0..ways[self.length].len()).map(path).collect()
    }

    /// The pieces of the best way, in order.
    pub fn best(&mut self, found: &mut Vec<u32>) {
        self.forward.clear();
        self.forward.resize(self.length + 1, f64::NEG_INFINITY);
        self.forward[0] = 0.0;
        let mut last = vec![usize::MAX; self.length + 1];
        for (index, edge) in self.edges.iter().enumerate() {
            let sum = self.forward[edge.start] + edge.score;
            if sum > self.forward[edge.end] {
                self.forward[edge.end] = sum;
                last[edge.end] = index;
            }
        }
        found.clear();
        let mut place = self.length;
        while place > 0 {
            // Every place at the end of a character is reached by a piece or an unknown character.
            let edge = self.edges[last[place]];
            found.push(edge.id);
            place = edge.start;
        }
        found.reverse();
    }
}

fn log_of_sum(a: f64, b: f64) -> f64 {
    let (least, most) = if a < b { (a, b) } else { (b, a) };
    if least == f64::NEG_INFINITY || most > least + 50.0 {
        return most;
    }
    most + (least - most).exp().ln_1p()
}
