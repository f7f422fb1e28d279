//! The best path of a text through the outputs of a CTC head. A path is in one of 2 U + 1 states for U tokens at each frame: blank
//! before, between and after the tokens (even), and the tokens (odd); between equal tokens it has to pass blank. Each blank between
//! words has a state beside it, in which a path is while it is in a passage of other words.

use super::{AlignedTokens, Costs, HeardFrame, PlacedToken, WordTokens, add_before, begins, cells, no_path};
use crate::{Error, Result};

/// How a path came into a cell: from the same state, the one before, or two before, in the frame before.
const STAY: u8 = 0;
const NEXT: u8 = 1;
const OVER_BLANK: u8 = 2;
/// In the same frame from the blank before a word, or the token before that blank, over the word into the blank behind it.
const LEFT_OUT: u8 = 3;
const LEFT_OUT_FROM_TOKEN: u8 = 4;
/// In the same frame from a passage beside a blank: the first, before all words that are placed, or a later one.
const PASSAGE_ENDS: [u8; 2] = [5, 6];
/// How a path came into a passage, besides [`STAY`] and [`LEFT_OUT`]: in the same frame from the blank beside it, or from the token
/// before that.
const BEGINS: u8 = 1;
const BEGINS_FROM_TOKEN: u8 = 2;

/// What free decoding hears: the best output of each frame.
fn heard(log_probs: &[f32], outputs: usize) -> Vec<HeardFrame> {
    let mut last = outputs - 1;
    let of_row = |row: &[f32]| {
        let best = (0..outputs).fold(0, |best, next| if row[next] > row[best] { next } else { best });
        let is_new = best != outputs - 1 && best != last;
        last = best;
        HeardFrame {
            logprob: f64::from(row[best]),
            tokens: usize::from(is_new),
        }
    };
    log_probs.chunks_exact(outputs).map(of_row).collect()
}

/// Aligns a text with log-probabilities (frames, tokens and blank), blank last, row by row.
///
/// # Errors
/// Where the rows have another width, a token is not in the vocabulary, no path leads through, or there are too many cells.
pub fn align(log_probs: &[f32], outputs: usize, text: &WordTokens, costs: Costs) -> Result<AlignedTokens> {
    if outputs == 0 || !log_probs.len().is_multiple_of(outputs) {
        let values = log_probs.len();
        return Err(Error::Input(format!(
            "{values} values are not rows of {outputs} outputs"
        )));
    }
    let blank = outputs - 1;
    text.check(blank)?;
    let (tokens, boundaries) = (text.tokens(), text.boundaries());
    let frames = log_probs.len() / outputs;
    let states = 2 * tokens.len() + 1;
    let mut ways = vec![STAY; cells(frames + 1, states)?];
    // Of the first passage and of later ones, behind each other.
    let ends = boundaries.len();
    let mut passage_ways = vec![STAY; (frames + 1) * 2 * ends];
    let heard = heard(log_probs, outputs);
    let mut scores = vec![f64::NEG_INFINITY; states];
    scores[0] = 0.0;
    let mut before = scores.clone();
    let mut passages = vec![f64::NEG_INFINITY; 2 * ends];
    if costs.has_passages() {
        (passages[0], passage_ways[0]) = (boundaries[0].resumes(costs.passage), BEGINS);
    }
    // What a state costs at a frame. Blank between words costs no more than `no_text`.
    let cost = |row: &[f32], there: HeardFrame, state: usize| match state % 2 {
        1 => f64::from(row[tokens[state / 2] as usize]),
        _ if boundaries[state / 2].between_words => f64::from(row[blank]).max(there.no_text(costs)),
        _ => f64::from(row[blank]),
    };
    // What takes no frame, before the first one or after one: the end and the beginning of a passage, and words that are left out.
    let between_words = |scores: &mut [f64], passages: &mut [f64], ways: &mut [u8], passage_ways: &mut [u8]| {
        let mut offer = |scores: &mut [f64], target: usize, score: f64, way: u8| {
            if score > scores[target] {
                (scores[target], ways[target]) = (score, way);
            }
        };
        let mut offer_passage = |passages: &mut [f64], target: usize, score: f64, way: u8| {
            if score > passages[target] {
                (passages[target], passage_ways[target]) = (score, way);
            }
        };
        for (begin, boundary) in boundaries.iter().enumerate().filter(|(_, at)| at.between_words) {
            let token = begin.checked_sub(1).map(|last| (last, scores[2 * last + 1]));
            let resumed = passages[ends + begin] + boundary.resumes(costs.passage);
            offer(scores, 2 * begin, passages[begin], PASSAGE_ENDS[0]);
            offer(scores, 2 * begin, resumed, PASSAGE_ENDS[1]);
            let blank = scores[2 * begin];
            if costs.has_passages() {
                offer_passage(passages, ends + begin, blank, BEGINS);
                if let Some((_, score)) = token {
                    offer_passage(passages, ends + begin, score, BEGINS_FROM_TOKEN);
                }
            }
            let Some(end) = boundary.word_end else { continue };
            let cost = costs.left_out * boundary.left_out;
            // Equal tokens without a blank in between would be one.
            if let Some((_, score)) = token.filter(|(last, _)| tokens.get(end) != Some(&tokens[*last])) {
                offer(scores, 2 * end, score + cost, LEFT_OUT_FROM_TOKEN);
            }
            offer(scores, 2 * end, blank + cost, LEFT_OUT);
            let cost = costs.passage.left_out * boundary.left_out;
            for first in [0, ends] {
                let score = passages[first + begin] + cost;
                offer_passage(passages, first + end, score, LEFT_OUT);
            }
        }
    };
    between_words(
        &mut scores,
        &mut passages,
        &mut ways[..states],
        &mut passage_ways[..2 * ends],
    );
    for (frame, row) in log_probs.chunks_exact(outputs).enumerate() {
        std::mem::swap(&mut scores, &mut before);
        let ways = &mut ways[(frame + 1) * states..(frame + 2) * states];
        for state in 0..states {
            let (mut best, mut way) = (before[state], STAY);
            if state >= 1 && before[state - 1] > best {
                (best, way) = (before[state - 1], NEXT);
            }
            let over_blank = state % 2 == 1 && state >= 3 && tokens[state / 2] != tokens[state / 2 - 1];
            if over_blank && before[state - 2] > best {
                (best, way) = (before[state - 2], OVER_BLANK);
            }
            scores[state] = best + cost(row, heard[frame], state);
            ways[state] = way;
        }
        let cost = heard[frame].cost(costs.passage);
        passages.iter_mut().for_each(|score| *score += cost);
        let passage_ways = &mut passage_ways[(frame + 1) * 2 * ends..][..2 * ends];
        between_words(&mut scores, &mut passages, ways, passage_ways);
    }
    let mut state = states - 1;
    if frames > 0 && state > 0 && scores[state - 1] > scores[state] {
        state -= 1;
    }
    let score = scores[state];
    if !score.is_finite() {
        return Err(no_path(frames, tokens.len()));
    }
    let mut found = AlignedTokens {
        tokens: vec![None; tokens.len()],
        score,
        ..AlignedTokens::default()
    };
    let begins = begins(&boundaries);
    let (mut at, mut in_passage) = (frames, None);
    loop {
        if let Some(passage) = in_passage {
            let boundary = state / 2;
            match passage_ways[(2 * at + passage) * ends + boundary] {
                BEGINS if passage == 0 => break,
                BEGINS => in_passage = None,
                BEGINS_FROM_TOKEN => (in_passage, state) = (None, state - 1),
                LEFT_OUT => {
                    let begin = begins[boundary];
                    found.left_out += costs.passage.left_out * boundaries[begin].left_out;
                    state = 2 * begin;
                }
                _ => {
                    at -= 1;
                    add_before(&mut found.without_text, at);
                }
            }
            continue;
        }
        let way = ways[at * states + state];
        match way {
            way if PASSAGE_ENDS.contains(&way) => in_passage = Some(usize::from(way - PASSAGE_ENDS[0])),
            LEFT_OUT | LEFT_OUT_FROM_TOKEN => {
                let begin = begins[state / 2];
                found.left_out += costs.left_out * boundaries[begin].left_out;
                state = 2 * begin - usize::from(way == LEFT_OUT_FROM_TOKEN);
            }
            _ => {
                if at == 0 {
                    break;
                }
                at -= 1;
                let row = &log_probs[at * outputs..][..outputs];
                if state % 2 == 1 {
                    let logprob = f64::from(row[tokens[state / 2] as usize]);
                    let placed = found.tokens[state / 2].get_or_insert(PlacedToken {
                        frame: at,
                        duration: 0,
                        logprob: 0.0,
                    });
                    placed.frame = at;
                    placed.duration += 1;
                    placed.logprob += logprob;
                } else if boundaries[state / 2].between_words && heard[at].no_text(costs) > f64::from(row[blank]) {
                    add_before(&mut found.without_text, at);
                }
                state -= usize::from(way);
            }
        }
    }
    for placed in found.tokens.iter_mut().flatten() {
        placed.logprob /= placed.duration as f64;
    }
    found.without_text.reverse();
    Ok(found)
}
