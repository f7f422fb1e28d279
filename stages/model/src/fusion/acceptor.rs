//! A weighted acceptor over token ids with back-off arcs: the one form of n-gram models and of boosting trees.

use crate::{Error, Result};

/// The state of the empty history. It alone has an arc for every token, and no state to back off to.
const START: u32 = 0;

/// A deterministic weighted acceptor with back-off (failure) arcs. Weights are natural logarithms.
///
/// A token without an arc in a state costs that state's back-off weight, and is looked for in the state backed off to,
/// which represents a shorter history; at the latest the start state has it.
#[derive(Debug, Clone)]
pub struct BackoffAcceptor {
    initial: u32,
    /// Of the start state's arcs, by token.
    start_weights: Vec<f32>,
    start_targets: Vec<u32>,
    /// First of each state's arcs, and the number of all arcs. Those of a state are sorted by token.
    first_arcs: Vec<u32>,
    tokens: Vec<u32>,
    weights: Vec<f32>,
    targets: Vec<u32>,
    backoffs: Vec<Backoff>,
}

/// The back-off arc of a state, and the weight of ending in it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Backoff {
    pub target: u32,
    pub weight: f32,
    /// None where ending is looked for in the state backed off to.
    pub end: Option<f32>,
}

/// An arc of a state other than the start state.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arc {
    pub from: u32,
    pub token: u32,
    pub weight: f32,
    pub target: u32,
}

impl BackoffAcceptor {
    /// `start`: weight and target of each token in the start state. `backoffs`: one for each state, that of the start state
    /// first. `arcs` are sorted by state and token. States come after those that they back off to.
    pub(super) fn new(initial: u32, start: Vec<(f32, u32)>, backoffs: Vec<Backoff>, arcs: &[Arc]) -> Result<Self> {
        let states = backoffs.len();
        if u32::try_from(states.max(arcs.len())).is_err() {
            return Err(Error::Input(
                "a language model has more than 4294967295 states or arcs".into(),
            ));
        }
        debug_assert!(arcs.is_sorted_by(|a, b| (a.from, a.token) < (b.from, b.token)));
        debug_assert!(
            backoffs
                .iter()
                .enumerate()
                .skip(1)
                .all(|(state, backoff)| (backoff.target as usize) < state)
        );
        let mut first_arcs = vec![0; states + 1];
        for arc in arcs {
            first_arcs[arc.from as usize + 1] += 1;
        }
        for state in 0..states {
            first_arcs[state + 1] += first_arcs[state];
        }
        Ok(BackoffAcceptor {
            initial,
            start_weights: start.iter().map(|(weight, _)| *weight).collect(),
            start_targets: start.iter().map(|(_, target)| *target).collect(),
            first_arcs,
            tokens: arcs.iter().map(|arc| arc.token).collect(),
            weights: arcs.iter().map(|arc| arc.weight).collect(),
            targets: arcs.iter().map(|arc| arc.target).collect(),
            backoffs,
        })
    }

    /// Number of tokens.
    pub fn vocabulary(&self) -> usize {
        self.start_weights.len()
    }

    /// Number of states.
    pub fn states(&self) -> usize {
        self.backoffs.len()
    }

    /// The state at the beginning of a text.
    pub fn initial(&self) -> u32 {
        self.initial
    }

    /// The state of no history at all.
    pub fn start(&self) -> u32 {
        START
    }

    fn arcs(&self, state: u32) -> std::ops::Range<usize> {
        self.first_arcs[state as usize] as usize..self.first_arcs[state as usize + 1] as usize
    }

    /// The score of a token in a state, and the state after it. A token outside the vocabulary scores negative infinity.
    pub fn step(&self, mut state: u32, token: u32) -> (f32, u32) {
        let mut backed_off = 0.0;
        while state != START {
            let arcs = self.arcs(state);
            if let Ok(place) = self.tokens[arcs.clone()].binary_search(&token) {
                let arc = arcs.start + place;
                return (backed_off + self.weights[arc], self.targets[arc]);
            }
            let backoff = self.backoffs[state as usize];
            backed_off += backoff.weight;
            state = backoff.target;
        }
        match self.start_weights.get(token as usize) {
            Some(weight) => (backed_off + weight, self.start_targets[token as usize]),
            None => (f32::NEG_INFINITY, START),
        }
    }

    /// The scores of all tokens in a state; `scores` is overwritten.
    pub fn scores(&self, state: u32, scores: &mut Vec<f32>) {
        // From the state to the start state, with what it cost to back off so far.
        let mut chain = vec![(state, 0.0)];
        while let Some(&(state, backed_off)) = chain.last()
            && state != START
        {
            let backoff = self.backoffs[state as usize];
            chain.push((backoff.target, backed_off + backoff.weight));
        }
        let backed_off = chain.pop().map_or(0.0, |(_, backed_off)| backed_off);
        scores.clear();
        scores.extend(self.start_weights.iter().map(|weight| backed_off + weight));
        // Arcs of longer histories are written last, as they take precedence.
        for (state, backed_off) in chain.into_iter().rev() {
            for arc in self.arcs(state) {
                scores[self.tokens[arc] as usize] = backed_off + self.weights[arc];
            }
        }
    }

    /// What it costs to back off from a state to the start state.
    pub fn to_start(&self, mut state: u32) -> f32 {
        let mut backed_off = 0.0;
        while state != START {
            let backoff = self.backoffs[state as usize];
            backed_off += backoff.weight;
            state = backoff.target;
        }
        backed_off
    }

    /// The score of the end of the text in a state.
    pub fn end(&self, mut state: u32) -> f32 {
        let mut backed_off = 0.0;
        loop {
            let backoff = self.backoffs[state as usize];
            match backoff.end {
                Some(end) => return backed_off + end,
                None if state == START => return f32::NEG_INFINITY,
                None => {
                    backed_off += backoff.weight;
                    state = backoff.target;
                }
            }
        }
    }
}
