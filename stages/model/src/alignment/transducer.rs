//! The best path of a text through the lattice of a transducer, TDT or RNN-T. From the cell (frame t, tokens u) a blank of
//! duration d > 0 leads to (t + d, u), and the next token with a duration d to (t + d, u + 1); RNN-T has blanks of duration 1 and
//! tokens of duration 0. A duration may reach beyond the last frame, as in greedy search; a path ends there, with all tokens.
//! Each cell between words has another one beside it, in which a path is while it is in a passage of other words.

use super::{AlignedTokens, Boundary, Costs, HeardFrame, PlacedToken, WordTokens, add_before, begins, cells, no_path};
use crate::{Error, Result};

/// Log-probabilities of cells, (frames, tokens + 1).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Cells {
    pub blank: Vec<f64>,
    /// Of the next token; not used where there is none.
    pub label: Vec<f64>,
    /// Of each duration, duration minor; empty for RNN-T.
    pub durations: Vec<f64>,
}

/// Gives the cells of some frames, all of their states.
pub type OfFrames<'a> = dyn FnMut(std::ops::Range<usize>) -> Result<Cells> + 'a;

/// Frames whose cells are asked for at once, so that there are some thousand.
const CELLS_AT_ONCE: usize = 4096;

/// How a path came into a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Nowhere,
    /// A token, with the duration at an index.
    Label(u8),
    Blank(u8),
    /// One frame without text.
    NoText,
    /// A word that was left out.
    LeftOut,
    /// From a passage beside the cell.
    PassageEnds(Passage),
}

/// Passages of other words: those before all words that are placed, and those behind one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Passage {
    First = 0,
    Later = 1,
}

/// How a path came into a passage's cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PassageWay {
    /// From the frame before.
    Stays,
    /// From the cell beside it, or the first one.
    Begins,
    LeftOut,
}

impl Way {
    fn code(self) -> u8 {
        match self {
            Way::Nowhere => 0,
            Way::NoText => 1,
            Way::LeftOut => 2,
            Way::PassageEnds(Passage::First) => 3,
            Way::PassageEnds(Passage::Later) => 4,
            Way::Label(index) => 5 + 2 * index,
            Way::Blank(index) => 6 + 2 * index,
        }
    }

    fn of(code: u8) -> Self {
        match code {
            0 => Way::Nowhere,
            1 => Way::NoText,
            2 => Way::LeftOut,
            3 => Way::PassageEnds(Passage::First),
            4 => Way::PassageEnds(Passage::Later),
            code if code % 2 == 1 => Way::Label((code - 5) / 2),
            code => Way::Blank((code - 6) / 2),
        }
    }
}

/// Scores of the next frames, as a ring, and how each cell was reached.
struct Lattice {
    frames: usize,
    states: usize,
    scores: Vec<Vec<f64>>,
    ways: Vec<u8>,
    /// The same of passages, whose scores are those of one frame.
    passages: [Vec<f64>; 2],
    passage_ways: [Vec<PassageWay>; 2],
    /// Log-probability of the next token in each cell.
    labels: Vec<f32>,
    /// Of the cells behind the last frame, which are reached from several frames with one duration: the frame before.
    ends_from: Vec<usize>,
}

impl Lattice {
    fn new(frames: usize, states: usize, longest: usize) -> Result<Self> {
        let rows = longest.min(frames) + 1;
        cells(rows, states)?;
        Ok(Lattice {
            frames,
            states,
            scores: vec![vec![f64::NEG_INFINITY; states]; rows],
            ways: vec![Way::Nowhere.code(); cells(frames + 1, states)?],
            passages: [(); 2].map(|()| vec![f64::NEG_INFINITY; states]),
            passage_ways: [(); 2].map(|()| vec![PassageWay::Stays; (frames + 1) * states]),
            labels: Vec::with_capacity(frames * states),
            ends_from: vec![0; states],
        })
    }

    fn score(&mut self, frame: usize, state: usize) -> &mut f64 {
        let rows = self.scores.len();
        &mut self.scores[frame % rows][state]
    }

    /// Offers a way into a cell from a frame.
    fn offer(&mut self, from: usize, (frame, state): (usize, usize), score: f64, way: Way) {
        let frame = frame.min(self.frames);
        let best = self.score(frame, state);
        if score > *best {
            *best = score;
            self.ways[frame * self.states + state] = way.code();
            if frame == self.frames {
                self.ends_from[state] = from;
            }
        }
    }
}

impl Lattice {
    /// Offers what takes no frame: the end and the beginning of a passage, and leaving out the word that begins in a state. Gives
    /// the score of the cell.
    fn between_words(&mut self, frame: usize, state: usize, boundary: Boundary, costs: Costs) -> f64 {
        if !boundary.between_words {
            return *self.score(frame, state);
        }
        let [first, later] = [0, 1].map(|passage: usize| self.passages[passage][state]);
        let resumed = later + boundary.resumes(costs.passage);
        self.offer(frame, (frame, state), first, Way::PassageEnds(Passage::First));
        self.offer(frame, (frame, state), resumed, Way::PassageEnds(Passage::Later));
        let score = *self.score(frame, state);
        if costs.has_passages() {
            self.offer_passage(Passage::Later, (frame, state), score, PassageWay::Begins);
        }
        if let Some(end) = boundary.word_end {
            let cost = costs.left_out * boundary.left_out;
            self.offer(frame, (frame, end), score + cost, Way::LeftOut);
            let cost = costs.passage.left_out * boundary.left_out;
            for passage in [Passage::First, Passage::Later] {
                let score = self.passages[passage as usize][state] + cost;
                self.offer_passage(passage, (frame, end), score, PassageWay::LeftOut);
            }
        }
        score
    }

    fn offer_passage(&mut self, passage: Passage, (frame, state): (usize, usize), score: f64, way: PassageWay) {
        let best = &mut self.passages[passage as usize][state];
        if score > *best {
            *best = score;
            self.passage_ways[passage as usize][frame * self.states + state] = way;
        }
    }
}

/// Aligns a text with the lattice of this many frames. `heard`: what free decoding does on each. `durations` are those of the
/// duration outputs, in frames; none for RNN-T. Cells are asked for in the order of frames.
///
/// # Errors
/// Those of `of_frames`, where it gives other numbers of values, where no path leads through, or there are too many cells.
pub fn align(
    heard: &[HeardFrame],
    durations: &[usize],
    text: &WordTokens,
    costs: Costs,
    of_frames: &mut OfFrames<'_>,
) -> Result<AlignedTokens> {
    let (tokens, boundaries) = (text.tokens().len(), text.boundaries());
    let (frames, states) = (heard.len(), tokens + 1);
    if durations.len() > 100 {
        let count = durations.len();
        return Err(Error::Input(format!("{count} durations are more than alignment knows")));
    }
    let longest = durations.iter().copied().max().unwrap_or(1).max(1);
    let mut lattice = Lattice::new(frames, states, longest)?;
    *lattice.score(0, 0) = 0.0;
    if costs.has_passages() {
        let cost = boundaries[0].resumes(costs.passage);
        lattice.offer_passage(Passage::First, (0, 0), cost, PassageWay::Begins);
    }
    let at_once = (CELLS_AT_ONCE / states).max(1);
    let (mut here, mut asked) = (Cells::default(), 0..0);
    for (frame, there) in heard.iter().enumerate() {
        if frame >= asked.end {
            asked = frame..frames.min(frame + at_once);
            here = of_frames(asked.clone())?;
            let count = asked.len() * states;
            let fits = here.blank.len() == count && here.label.len() == count;
            if !fits || here.durations.len() != count * durations.len() {
                return Err(Error::Input(format!(
                    "{count} cells of a lattice have lists of another length"
                )));
            }
            lattice.labels.extend(here.label.iter().map(|label| *label as f32));
        }
        for (state, &boundary) in boundaries.iter().enumerate().take(states) {
            let score = lattice.between_words(frame, state, boundary, costs);
            if score == f64::NEG_INFINITY {
                continue;
            }
            let cell = (frame - asked.start) * states + state;
            let (blank, label) = (here.blank[cell], here.label[cell]);
            if durations.is_empty() {
                lattice.offer(frame, (frame + 1, state), score + blank, Way::Blank(0));
                if state < tokens {
                    lattice.offer(frame, (frame, state + 1), score + label, Way::Label(0));
                }
            }
            for (index, &duration) in durations.iter().enumerate() {
                let score = score + here.durations[cell * durations.len() + index];
                let index = index as u8;
                if duration > 0 {
                    lattice.offer(frame, (frame + duration, state), score + blank, Way::Blank(index));
                }
                if state < tokens {
                    let next = (frame + duration, state + 1);
                    lattice.offer(frame, next, score + label, Way::Label(index));
                }
            }
            if boundary.between_words {
                let score = score + there.no_text(costs);
                lattice.offer(frame, (frame + 1, state), score, Way::NoText);
            }
        }
        let cost = there.cost(costs.passage);
        let passages = lattice.passages.iter_mut().flatten();
        passages.for_each(|score| *score += cost);
        // The row becomes that of a later frame.
        let rows = lattice.scores.len();
        lattice.scores[frame % rows].fill(f64::NEG_INFINITY);
    }
    for (state, &boundary) in boundaries.iter().enumerate() {
        lattice.between_words(frames, state, boundary, costs);
    }
    let score = *lattice.score(frames, tokens);
    if !score.is_finite() {
        return Err(no_path(frames, tokens));
    }
    Ok(AlignedTokens {
        score,
        ..back(&lattice, durations, &boundaries, costs)
    })
}

/// The path that ends with all tokens behind the last frame.
fn back(lattice: &Lattice, durations: &[usize], boundaries: &[Boundary], costs: Costs) -> AlignedTokens {
    let (frames, states) = (lattice.frames, lattice.states);
    let mut found = AlignedTokens {
        tokens: vec![None; states - 1],
        ..AlignedTokens::default()
    };
    let begins = begins(boundaries);
    let (mut frame, mut state, mut in_passage) = (frames, states - 1, None);
    // A duration of nothing in RNN-T, where a blank takes one frame.
    let advance = |index: u8, of_rnnt: usize| durations.get(usize::from(index)).copied().unwrap_or(of_rnnt);
    let from = |frame: usize, state: usize, advance: usize| match frame == frames {
        true => lattice.ends_from[state],
        false => frame - advance,
    };
    loop {
        if let Some(passage) = in_passage {
            match (lattice.passage_ways[passage as usize][frame * states + state], passage) {
                (PassageWay::Begins, Passage::First) => break,
                (PassageWay::Begins, Passage::Later) => in_passage = None,
                (PassageWay::LeftOut, _) => {
                    state = begins[state];
                    found.left_out += costs.passage.left_out * boundaries[state].left_out;
                }
                (PassageWay::Stays, _) => {
                    frame -= 1;
                    add_before(&mut found.without_text, frame);
                }
            }
            continue;
        }
        match Way::of(lattice.ways[frame * states + state]) {
            // Only the first cell is reached from nowhere.
            Way::Nowhere => break,
            Way::NoText => {
                frame -= 1;
                add_before(&mut found.without_text, frame);
            }
            Way::LeftOut => {
                state = begins[state];
                found.left_out += costs.left_out * boundaries[state].left_out;
            }
            Way::PassageEnds(passage) => in_passage = Some(passage),
            Way::Blank(index) => frame = from(frame, state, advance(index, 1)),
            Way::Label(index) => {
                let advance = advance(index, 0);
                let end = frame;
                frame = from(frame, state, advance);
                state -= 1;
                found.tokens[state] = Some(PlacedToken {
                    frame,
                    duration: if durations.is_empty() { 1 } else { end - frame },
                    logprob: f64::from(lattice.labels[frame * states + state]),
                });
            }
        }
    }
    found.without_text.reverse();
    found
}
