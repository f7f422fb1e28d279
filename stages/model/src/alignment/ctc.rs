//! The best path of a text through the outputs of a CTC head. A path is in one of 2 U + 1 states for U tokens at each frame: blank
//! before, between and after the tokens (even), and the tokens (odd); between equal tokens it has to pass blank.

use super::{AlignedTokens, Costs, PlacedToken, WordTokens, add_before, cells, no_path};
use crate::{Error, Result};

/// How a path came into a cell: from the same state, the one before, or two before, in the frame before.
const STAY: u8 = 0;
const NEXT: u8 = 1;
const OVER_BLANK: u8 = 2;
/// In the same frame from the blank before a word, or the token before that blank, over the word into the blank behind it.
const LEFT_OUT: u8 = 3;
const LEFT_OUT_FROM_TOKEN: u8 = 4;

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
    let mut scores = vec![f64::NEG_INFINITY; states];
    scores[0] = 0.0;
    let mut before = scores.clone();
    // What a state costs at a frame. Blank between words costs no more than `no_text`.
    let cost = |row: &[f32], state: usize| match state % 2 {
        1 => f64::from(row[tokens[state / 2] as usize]),
        _ if boundaries[state / 2].between_words => f64::from(row[blank]).max(costs.no_text),
        _ => f64::from(row[blank]),
    };
    // Words that are left out before the first frame or after one.
    let leave_out = |scores: &mut [f64], ways: &mut [u8]| {
        for (begin, boundary) in boundaries.iter().enumerate() {
            let Some(end) = boundary.word_end else { continue };
            let cost = costs.left_out * boundary.left_out;
            let target = 2 * end;
            let from_blank = (scores[2 * begin] + cost, LEFT_OUT);
            // Equal tokens without a blank in between would be one.
            let from_token = begin
                .checked_sub(1)
                .filter(|last| tokens.get(end) != Some(&tokens[*last]));
            let from_token = from_token.map(|last| (scores[2 * last + 1] + cost, LEFT_OUT_FROM_TOKEN));
            for (score, way) in from_token.into_iter().chain([from_blank]) {
                if score > scores[target] {
                    (scores[target], ways[target]) = (score, way);
                }
            }
        }
    };
    leave_out(&mut scores, &mut ways[..states]);
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
            scores[state] = best + cost(row, state);
            ways[state] = way;
        }
        leave_out(&mut scores, ways);
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
        without_text: Vec::new(),
    };
    // Where the word that ends at a boundary begins.
    let mut begins = vec![0; boundaries.len()];
    for (begin, boundary) in boundaries.iter().enumerate() {
        if let Some(end) = boundary.word_end {
            begins[end] = begin;
        }
    }
    let mut at = frames;
    loop {
        let way = ways[at * states + state];
        match way {
            LEFT_OUT => state = 2 * begins[state / 2],
            LEFT_OUT_FROM_TOKEN => state = 2 * begins[state / 2] - 1,
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
                } else if boundaries[state / 2].between_words && costs.no_text > f64::from(row[blank]) {
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
