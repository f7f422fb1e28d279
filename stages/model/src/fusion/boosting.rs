//! Boosting trees: phrases whose tokens score higher while they are decoded.
//!
//! NeMo's GPU-PB (`context_graph_universal.py`, `boosting_graph_batched.py`): an Aho-Corasick automaton over token ids.
//! A hypothesis that leaves a phrase before its end loses the scores of that phrase again.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use super::acceptor::{Arc, Backoff, BackoffAcceptor};
use super::open_regular_file;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Largest file of phrases, and most tokens of all phrases.
const LARGEST_FILE: u64 = 64 << 20;
const MOST_TOKENS: usize = 1 << 24;

/// The largest score of a phrase's own. With larger ones the scores of hypotheses would not fit 32 bits.
const MOST_SCORE: f64 = 1000.0;

/// How phrases score. The defaults are NeMo's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BoostingRules {
    /// Score of a phrase's first token.
    pub context_score: f64,
    /// Factor of that score for the other tokens, which have `ln(i + 1)` added, `i` being the place from 0.
    pub depth_scaling: f64,
    /// Score of a token that begins no phrase.
    pub unk_score: f64,
    /// All tokens have the context score, and the last one that of the whole phrase besides.
    pub uniform_weights: bool,
}

impl Default for BoostingRules {
    fn default() -> Self {
        BoostingRules {
            context_score: 1.0,
            depth_scaling: 2.0,
            unk_score: 0.0,
            uniform_weights: false,
        }
    }
}

/// A phrase to boost.
#[derive(Debug, Clone, PartialEq)]
pub struct Phrase {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Its own context score; that of the rules where there is none, or 0.
    pub context_score: Option<f64>,
}

/// A node of the tree. The root is node 0.
struct Node {
    children: BTreeMap<u32, usize>,
    token_score: f64,
    /// Sum from the root. As in NeMo, it is not updated when a later phrase raises the score of an ancestor.
    node_score: f64,
    is_end: bool,
    /// Whether it is a phrase's first token.
    is_first: bool,
    /// The node of the longest end of this one's tokens that is in the tree, too.
    fail: usize,
}

impl Node {
    fn new(token_score: f64, node_score: f64) -> Self {
        Node {
            children: BTreeMap::new(),
            token_score,
            node_score,
            is_end: false,
            is_first: false,
            fail: 0,
        }
    }
}

/// The phrases of a file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Phrases {
    pub phrases: Vec<Phrase>,
    /// Number of the line, from 1, and text of those that the model cannot write.
    pub left_out: Vec<(usize, String)>,
}

/// Reads phrases, one a line, with a context score of its own after a tab where a phrase has one. Empty lines are left out, and so are
/// phrases with characters that the tokenizer knows in neither case.
///
/// # Errors
/// If the file cannot be read, a score is not a number, or no phrase is left.
pub fn read_phrases(path: &Path, tokenizer: &Tokenizer) -> Result<Phrases> {
    let io = |source| Error::Io {
        path: path.into(),
        source,
    };
    let wrong = |what: String| Error::File {
        path: path.into(),
        what,
    };
    let mut bytes = Vec::new();
    let file = open_regular_file(path).map_err(io)?;
    file.take(LARGEST_FILE + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > LARGEST_FILE {
        return Err(wrong(format!("more than {LARGEST_FILE} bytes of phrases")));
    }
    let text = String::from_utf8(bytes).map_err(|_| wrong("not UTF-8".into()))?;
    let found = parse_phrases(&text, tokenizer).map_err(wrong)?;
    match (found.phrases.is_empty(), found.left_out.first()) {
        (true, None) => Err(wrong("no phrase".into())),
        (true, Some((line, phrase))) => Err(wrong(format!(
            "line {line}: the model's tokenizer does not know all characters of `{phrase}`, nor those of any other phrase"
        ))),
        _ => Ok(found),
    }
}

/// Reads phrases as [`read_phrases`] does, from a text. There may be none.
///
/// # Errors
/// What is wrong with a line: a score is not a number, or a phrase has no tokens.
pub fn parse_phrases(text: &str, tokenizer: &Tokenizer) -> std::result::Result<Phrases, String> {
    let (mut phrases, mut left_out) = (Vec::new(), Vec::new());
    for (index, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
        let (phrase, score) = match line.split_once('\t') {
            Some((phrase, score)) => (phrase.trim(), Some(score.trim())),
            None => (line.trim(), None),
        };
        if phrase.is_empty() && score.is_none_or(str::is_empty) {
            continue;
        }
        let at = |what: String| format!("line {}: {what}", index + 1);
        let context_score = match score {
            Some(score) => {
                let number = score.parse::<f64>().ok().filter(|score| score.abs() <= MOST_SCORE);
                Some(number.ok_or_else(|| at(format!("`{score}` is not a score from -{MOST_SCORE} to {MOST_SCORE}")))?)
            }
            None => None,
        };
        if tokenizer.encode(phrase).is_empty() {
            return Err(at("a phrase without tokens".into()));
        }
        // A model that writes one case has the letters of that alone.
        let cases = [phrase.to_owned(), phrase.to_lowercase(), phrase.to_uppercase()];
        let mut cases = cases.iter().map(|phrase| tokenizer.encode(phrase));
        match cases.find(|tokens| !tokens.contains(&tokenizer.unknown_id())) {
            Some(tokens) => phrases.push(Phrase { tokens, context_score }),
            None => left_out.push((index + 1, phrase.to_owned())),
        }
    }
    Ok(Phrases { phrases, left_out })
}

/// The boosting tree of phrases over tokens below `vocabulary`.
///
/// # Errors
/// If a token is not below `vocabulary`, a score is not finite, or there are too many tokens.
pub fn boosting_tree(phrases: &[Phrase], rules: &BoostingRules, vocabulary: usize) -> Result<BackoffAcceptor> {
    let mut nodes = vec![Node::new(0.0, 0.0)];
    if phrases.iter().map(|phrase| phrase.tokens.len()).sum::<usize>() > MOST_TOKENS {
        return Err(Error::Input(format!("phrases of more than {MOST_TOKENS} tokens")));
    }
    for phrase in phrases {
        add(&mut nodes, phrase, rules, vocabulary)?;
    }
    let order = link(&mut nodes);
    // States have the order of the nodes from the root down: whatever a state backs off to has an earlier one.
    let mut states = vec![0; nodes.len()];
    for (state, &node) in order.iter().enumerate() {
        states[node] = state as u32;
    }
    let mut start = vec![(rules.unk_score as f32, 0); vocabulary];
    let (mut backoffs, mut arcs) = (Vec::with_capacity(nodes.len()), Vec::with_capacity(nodes.len()));
    for (state, &node) in order.iter().enumerate() {
        let at = &nodes[node];
        // The scores of a complete phrase are kept, unless they came with its last token only.
        let keeps = at.is_end && (!rules.uniform_weights || at.is_first);
        let weight = if keeps {
            0.0
        } else {
            nodes[at.fail].node_score - at.node_score
        };
        backoffs.push(Backoff {
            target: states[at.fail],
            weight: weight as f32,
            end: None,
        });
        for (&token, &child) in &at.children {
            let reached = &nodes[child];
            let whole = rules.uniform_weights && reached.is_end && node != 0;
            let weight = reached.token_score + if whole { reached.node_score } else { 0.0 };
            if node == 0 {
                start[token as usize] = (weight as f32, states[child]);
            } else {
                arcs.push(Arc {
                    from: state as u32,
                    token,
                    weight: weight as f32,
                    target: states[child],
                });
            }
        }
    }
    BackoffAcceptor::new(0, start, backoffs, &arcs)
}

fn add(nodes: &mut Vec<Node>, phrase: &Phrase, rules: &BoostingRules, vocabulary: usize) -> Result<()> {
    let context_score = phrase
        .context_score
        .filter(|&score| score != 0.0)
        .unwrap_or(rules.context_score);
    if !context_score.is_finite() {
        return Err(Error::Input(format!("{context_score} is not a score of a phrase")));
    }
    let mut node = 0;
    for (place, &token) in phrase.tokens.iter().enumerate() {
        if token as usize >= vocabulary {
            return Err(Error::Input(format!(
                "token {token} of a phrase is not below {vocabulary}"
            )));
        }
        let above = nodes[node].node_score;
        let child = match nodes[node].children.get(&token) {
            Some(&child) => {
                let score = nodes[child].token_score.max(context_score);
                nodes[child].token_score = score;
                nodes[child].node_score = above + score;
                child
            }
            None => {
                let score = if place > 0 && !rules.uniform_weights {
                    context_score * rules.depth_scaling + ((place + 1) as f64).ln()
                } else {
                    context_score
                };
                nodes.push(Node::new(score, above + score));
                let child = nodes.len() - 1;
                nodes[node].children.insert(token, child);
                child
            }
        };
        nodes[child].is_first = place == 0;
        nodes[child].is_end |= place + 1 == phrase.tokens.len();
        node = child;
    }
    Ok(())
}

/// Finds where each node fails to. Returns the nodes from the root down, level by level.
fn link(nodes: &mut [Node]) -> Vec<usize> {
    let mut order = vec![0];
    let mut next = 0;
    while let Some(&node) = order.get(next) {
        next += 1;
        let children: Vec<(u32, usize)> = nodes[node]
            .children
            .iter()
            .map(|(&token, &child)| (token, child))
            .collect();
        for (token, child) in children {
            let mut fail = node;
            nodes[child].fail = loop {
                if fail == 0 {
                    break 0;
                }
                fail = nodes[fail].fail;
                if let Some(&found) = nodes[fail].children.get(&token) {
                    break found;
                }
            };
            order.push(child);
        }
    }
    order
}
