//! Alignment against all paths of small lattices, and against NeMo's searches on its own networks.

use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;
use serde_json::Value;

use super::transducer::Cells;
use super::*;
use crate::heads::HeadKind;
use crate::model::TdtModel;
use crate::testing::golden;
use flow_nn::tensor_files::read_packed;

/// Words of one token or two; the second and the third are left out at other costs, and before the third and the fourth a path
/// goes on behind a passage at others.
fn text(tokens: &[u32], twos: bool) -> WordTokens {
    let words = WordTokens::new(tokens.chunks(if twos { 2 } else { 1 }));
    words
        .with_factors(vec![1.0, 0.5, 2.0])
        .with_borders(vec![1.0, 1.0, 0.5, 2.0])
}

/// The same between words without tokens, as tags may be, where the text begins and ends with the signal or not.
fn text_within(tokens: &[u32], twos: bool, meets: [bool; 2]) -> WordTokens {
    let none: &[u32] = &[];
    let words = tokens.chunks(if twos { 2 } else { 1 });
    let count = words.len();
    let words = WordTokens::new([none].into_iter().chain(words).chain([none]));
    let mut borders = vec![1.0, 1.0, 1.0, 0.5, 2.0, 1.0, 1.0];
    borders.truncate(count + 3);
    for (ends, meets) in [0..2, count + 1..count + 3].into_iter().zip(meets) {
        borders[ends].fill(if meets { 0.7 } else { 0.0 });
    }
    words.with_factors(vec![1.0, 1.0, 0.5, 2.0]).with_borders(borders)
}

/// What going on behind a passage costs behind so many tokens: the least of the words that are there.
fn resumes(text: &WordTokens, state: usize, costs: Costs) -> f64 {
    let here = (0..=text.words()).filter(|word| text.starts[*word] == state);
    let factors = here.map(|word| text.borders.get(word).copied().unwrap_or(1.0));
    costs.passage.resumes * factors.fold(f64::INFINITY, f64::min)
}

/// What leaving out a word costs.
fn left_out(text: &WordTokens, word: usize, costs: Costs) -> f64 {
    costs.left_out * text.factors.get(word).unwrap_or(&1.0) * text.word(word).len() as f64
}

/// What leaving it out costs in a passage.
fn left_out_there(text: &WordTokens, word: usize, costs: Costs) -> f64 {
    costs.passage.left_out * text.factors.get(word).unwrap_or(&1.0) * text.word(word).len() as f64
}

/// The word with tokens that begins behind so many tokens.
fn word_at(text: &WordTokens, state: usize) -> Option<usize> {
    (0..text.words()).find(|word| text.word(*word).start == state && !text.word(*word).is_empty())
}

/// Where a path of CTC is: in the blank behind so many tokens, on the token at an index, or in a passage behind so
/// many, with whether it is the first.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Blank(usize),
    Token(usize),
    Passage(usize, bool),
}

/// The best score of all ways to place states of CTC on frames.
fn best_ctc(log_probs: &[f32], outputs: usize, text: &WordTokens, costs: Costs) -> f64 {
    struct Walk<'a>(&'a [f32], usize, &'a WordTokens, Costs);
    impl Walk<'_> {
        /// `passes`: a passage has just ended here, or begun: equal tokens need more between them than a passage of nothing.
        fn from(&self, frame: usize, place: Place, passes: bool) -> f64 {
            let Walk(log_probs, outputs, text, costs) = *self;
            let tokens = text.tokens();
            let frames = log_probs.len() / outputs;
            let row = |frame: usize| &log_probs[frame * outputs..][..outputs];
            let output = |frame: usize| {
                (0..outputs)
                    .rev()
                    .max_by(|a, b| row(frame)[*a].total_cmp(&row(frame)[*b]))
                    .unwrap()
            };
            let is_token =
                |frame: usize| output(frame) != outputs - 1 && (frame == 0 || output(frame) != output(frame - 1));
            let (state, last) = match place {
                Place::Blank(state) | Place::Passage(state, _) => (state, None),
                Place::Token(token) => (token + 1, Some(token)),
            };
            let word = word_at(text, state);
            let between_words = word.is_some() || state == tokens.len();
            let mut best = f64::NEG_INFINITY;
            if frame == frames && state == tokens.len() && !matches!(place, Place::Passage(..)) {
                best = 0.0;
            }
            if let Place::Passage(_, first) = place {
                let cost = if first { 0.0 } else { resumes(text, state, costs) };
                if !passes {
                    best = best.max(cost + self.from(frame, Place::Blank(state), true));
                }
                if let Some(word) = word {
                    let there = Place::Passage(text.word(word).end, first);
                    best = best.max(left_out_there(text, word, costs) + self.from(frame, there, false));
                }
                if frame < frames {
                    let heard = if is_token(frame) { costs.passage.heard } else { 0.0 };
                    let logprob = f64::from(row(frame)[output(frame)]);
                    best = best.max(logprob + heard + self.from(frame + 1, place, false));
                }
                return best;
            }
            if costs != Costs::FORCED && between_words && !passes {
                best = best.max(self.from(frame, Place::Passage(state, false), true));
            }
            if let Some(word) = word {
                let end = text.word(word).end;
                // Between equal tokens a path would have to pass blank.
                if last.is_none_or(|last| tokens.get(end) != Some(&tokens[last])) {
                    best = best.max(left_out(text, word, costs) + self.from(frame, Place::Blank(end), false));
                }
            }
            if frame == frames {
                return best;
            }
            let row = row(frame);
            let mut blank = f64::from(row[outputs - 1]);
            if between_words {
                let tokens = if is_token(frame) { 1.0 } else { 0.0 };
                blank = blank.max(costs.no_text + tokens * costs.passed_over);
            }
            best = best.max(blank + self.from(frame + 1, Place::Blank(state), false));
            let mut next = Vec::new();
            next.extend(last);
            if state < tokens.len() && last.is_none_or(|last| tokens[last] != tokens[state]) {
                next.push(state);
            }
            for token in next {
                let logprob = f64::from(row[tokens[token] as usize]);
                best = best.max(logprob + self.from(frame + 1, Place::Token(token), false));
            }
            best
        }
    }
    let walk = Walk(log_probs, outputs, text, costs);
    let within = walk.from(0, Place::Blank(0), false);
    match costs == Costs::FORCED {
        true => within,
        false => within.max(resumes(text, 0, costs) + walk.from(0, Place::Passage(0, true), false)),
    }
}

/// The best score of all paths through a lattice.
fn best_path(heard: &[HeardFrame], durations: &[usize], text: &WordTokens, costs: Costs, cells: &Cells) -> f64 {
    struct Walk<'a>(&'a [HeardFrame], &'a [usize], &'a WordTokens, Costs, &'a Cells);
    impl Walk<'_> {
        fn in_passage(&self, frame: usize, state: usize, first: bool) -> f64 {
            let Walk(heard, _, text, costs, _) = *self;
            let word = word_at(text, state);
            let mut best = f64::NEG_INFINITY;
            if word.is_some() || state == text.tokens().len() {
                best = self.from(frame, state, true) + if first { 0.0 } else { resumes(text, state, costs) };
            }
            if let Some(word) = word {
                let cost = left_out_there(text, word, costs);
                best = best.max(cost + self.in_passage(frame, text.word(word).end, first));
            }
            if let Some(there) = heard.get(frame) {
                let cost = (0..there.tokens).map(|_| costs.passage.heard).sum::<f64>() + there.logprob;
                best = best.max(cost + self.in_passage(frame + 1, state, first));
            }
            best
        }

        /// `ended`: a passage has just ended here.
        fn from(&self, frame: usize, state: usize, ended: bool) -> f64 {
            let Walk(heard, durations, text, costs, cells) = *self;
            let (frames, tokens) = (heard.len(), text.tokens().len());
            let frame = frame.min(frames);
            let mut best = f64::NEG_INFINITY;
            let word = word_at(text, state);
            if let Some(word) = word {
                best = self.from(frame, text.word(word).end, false) + left_out(text, word, costs);
            }
            if costs != Costs::FORCED && !ended && (word.is_some() || state == tokens) {
                best = best.max(self.in_passage(frame, state, false));
            }
            if frame >= frames {
                return if state == tokens { best.max(0.0) } else { best };
            }
            let cell = frame * (tokens + 1) + state;
            if word.is_some() || state == tokens {
                let cost = costs.no_text + costs.passed_over * heard[frame].tokens as f64;
                best = best.max(cost + self.from(frame + 1, state, false));
            }
            let arcs: Vec<(usize, usize, f64)> = match durations.is_empty() {
                true => vec![(1, 0, 0.0)],
                false => (0..durations.len())
                    .map(|index| {
                        (
                            durations[index],
                            durations[index],
                            cells.durations[cell * durations.len() + index],
                        )
                    })
                    .collect(),
            };
            for (of_blank, of_label, score) in arcs {
                if of_blank > 0 {
                    best = best.max(score + cells.blank[cell] + self.from(frame + of_blank, state, false));
                }
                if state < tokens {
                    best = best.max(score + cells.label[cell] + self.from(frame + of_label, state + 1, false));
                }
            }
            best
        }
    }
    let walk = Walk(heard, durations, text, costs, cells);
    let within = walk.from(0, 0, false);
    match costs == Costs::FORCED {
        true => within,
        false => within.max(resumes(text, 0, costs) + walk.in_passage(0, 0, true)),
    }
}

const SOME_COSTS: Costs = Costs {
    left_out: -4.0,
    no_text: -2.0,
    passed_over: 0.0,
    passage: PassageCosts {
        resumes: -10.0,
        left_out: -2.0,
        heard: -0.5,
    },
};

/// Costs of all kinds, or of none.
fn some_costs() -> impl Strategy<Value = Costs> {
    prop_oneof![
        Just(Costs::FORCED),
        prop::array::uniform6(-3.0..-0.1f64).prop_map(|[left_out, no_text, passed_over, resumes, there, heard]| {
            Costs {
                left_out,
                no_text,
                passed_over,
                passage: PassageCosts {
                    resumes,
                    left_out: there,
                    heard,
                },
            }
        }),
    ]
}

/// Tokens that are placed are in order, and those of a word are all placed or all left out.
fn check_order(found: &AlignedTokens, text: &WordTokens, frames: usize, apart: bool) {
    let mut at = 0;
    for placed in found.tokens.iter().flatten() {
        assert!(placed.frame >= at && placed.frame + placed.duration <= frames.max(placed.frame + 1));
        at = placed.frame + if apart { placed.duration } else { 0 };
    }
    for word in 0..text.words() {
        let tokens = &found.tokens[text.word(word)];
        assert!(
            tokens.iter().all(|token| token.is_some() == tokens[0].is_some()),
            "{tokens:?}"
        );
    }
    for pair in found.without_text.windows(2) {
        assert!(pair[0].end < pair[1].start);
    }
}

proptest! {
    #[test]
    fn ctc_finds_the_best_of_all_paths(
        frames in 0usize..6, tokens in prop::collection::vec(0u32..3, 0..4), twos: bool, meets: [bool; 2],
        costs in some_costs(),
        values in prop::collection::vec(-4.0..0.0f32, 24),
    ) {
        let (text, log_probs) = (text_within(&tokens, twos, meets), &values[..frames * 4]);
        let best = best_ctc(log_probs, 4, &text, costs);
        match ctc::align(log_probs, 4, &text, costs) {
            Ok(found) => {
                prop_assert!((found.score - best).abs() < 1e-9, "{} is not {best}", found.score);
                check_order(&found, &text, frames, true);
            }
            Err(error) => {
                prop_assert_eq!(best, f64::NEG_INFINITY);
                prop_assert!(error.to_string().contains("cannot hold"), "{}", error);
            }
        }
    }

    #[test]
    fn transducers_find_the_best_of_all_paths(
        frames in 0usize..5, tokens in prop::collection::vec(0u32..3, 0..4), twos: bool, meets: [bool; 2],
        costs in some_costs(),
        durations in prop_oneof![Just(vec![]), Just(vec![0, 1, 2]), Just(vec![1, 4]), Just(vec![0, 3])],
        values in prop::collection::vec(-4.0..0.0f64, 5 * 4 * 5),
        heard in prop::collection::vec((-1.0..0.0f64, 0usize..3), 5),
    ) {
        let heard: Vec<HeardFrame> = heard[..frames].iter().map(|&(logprob, tokens)| HeardFrame { logprob, tokens }).collect();
        let text = text_within(&tokens, twos, meets);
        let (states, width) = (tokens.len() + 1, durations.len());
        let cells = Cells {
            blank: values[..frames * states].to_vec(),
            label: values[20..20 + frames * states].to_vec(),
            durations: values[40..40 + frames * states * width].to_vec(),
        };
        let best = best_path(&heard, &durations, &text, costs, &cells);
        let mut next = 0;
        let mut of_frames = |asked: Range<usize>| {
            assert_eq!(asked.start, next);
            next = asked.end;
            let range = asked.start * states..asked.end * states;
            Ok(Cells {
                blank: cells.blank[range.clone()].to_vec(),
                label: cells.label[range.clone()].to_vec(),
                durations: cells.durations[range.start * width..range.end * width].to_vec(),
            })
        };
        match transducer::align(&heard, &durations, &text, costs, &mut of_frames) {
            Ok(found) => {
                prop_assert!((found.score - best).abs() < 1e-9, "{} is not {best}", found.score);
                check_order(&found, &text, frames, !durations.is_empty());
                for (at, placed) in found.tokens.iter().enumerate() {
                    if let Some(placed) = placed {
                        let label = cells.label[placed.frame * states + at];
                        prop_assert!((placed.logprob - label).abs() < 1e-6);
                    }
                }
            }
            Err(_) => prop_assert_eq!(best, f64::NEG_INFINITY),
        }
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let text = text(&[3], false);
    assert!(
        ctc::align(&[0.0; 8], 4, &text, Costs::FORCED)
            .unwrap_err()
            .to_string()
            .contains("token 3")
    );
    assert!(ctc::align(&[0.0; 7], 4, &text, Costs::FORCED).is_err());
    assert!(ctc::align(&[], 0, &text, Costs::FORCED).is_err());
    let nan = [f32::NAN; 8];
    assert!(ctc::align(&nan, 4, &WordTokens::new([&[1u32][..]]), Costs::FORCED).is_err());
    let mut nothing = |_: Range<usize>| Ok(Cells::default());
    assert!(transducer::align(&[HeardFrame::default(); 2], &[0, 1], &text, Costs::FORCED, &mut nothing).is_err());
    let long = WordTokens::new([&vec![0u32; MAX_CELLS][..]]);
    assert!(transducer::align(&[HeardFrame::default(); 9], &[0, 1], &long, Costs::FORCED, &mut nothing).is_err());
}

fn decoded(set: &str) -> Value {
    serde_json::from_slice(&read_packed(&golden::file_of(set, "decode.json"), 1).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn encoded(set: &str) -> (TdtModel, Vec<Tensor>) {
    let model = TdtModel::load(&golden::file_of(set, "model.nemo"), DType::F32, &Device::Cpu).unwrap();
    let waves = golden::waves_in(&golden::file_of(set, "audio"), "eval");
    let frames = waves.iter().map(|wave| model.encode_frames(wave, 0, None).unwrap());
    let frames = frames.collect();
    (model, frames)
}

/// Hypotheses of NeMo's beam search (`beam_batch`, 4) for the first recording, with their scores: those of their best paths.
const NEMOS_BEAM: [([u32; 6], f64); 4] = [
    ([56, 70, 1, 60, 9, 45], -0.001_863_7),
    ([56, 70, 1, 60, 9, 107], -9.101_795),
    ([115, 70, 1, 60, 9, 45], -9.268_720),
    ([56, 70, 47, 60, 9, 45], -9.305_395),
];

/// What greedy search finds is the best of all paths of CTC, so its tokens are aligned to their frames.
#[test]
fn ctc_aligns_as_nemo_decodes() {
    for set in ["ctc", "hybrid"] {
        let (model, frames) = encoded(set);
        let golden = decoded(set);
        for (ids, score) in NEMOS_BEAM.iter().filter(|_| set == "ctc") {
            let found = model.align(&frames[0], &text(ids, false), Costs::FORCED, None).unwrap();
            assert!((found.score - score).abs() < 1e-3, "{} is not {score}", found.score);
        }
        for (number, frames) in frames.iter().enumerate() {
            let own = &golden["ctc_own"][number];
            let ids = numbers(&own["ids"]);
            let text = text(&ids, false);
            let found = model.align(frames, &text, Costs::FORCED, Some(HeadKind::Ctc)).unwrap();
            let first: Vec<u32> = found.tokens.iter().map(|token| token.unwrap().frame as u32).collect();
            let last = found.tokens.iter().map(|token| token.unwrap());
            let last: Vec<u32> = last.map(|token| (token.frame + token.duration - 1) as u32).collect();
            assert_eq!(
                (first, last),
                (numbers(&own["first_frame"]), numbers(&own["last_frame"])),
                "{set}"
            );
        }
    }
}

/// Another program's search over NeMo's log-probabilities: texts that were said, in part, or not at all (`tests/data/golden/alignment`).
/// Our own network's log-probabilities differ from these by rounding.
#[test]
fn ctc_aligns_as_another_program() {
    let cases: Vec<Value> =
        serde_json::from_slice(&read_packed(&golden::file_of("alignment", "paths.json"), 1).unwrap()).unwrap();
    let sets = ["ctc", "hybrid"].map(|set| (set, encoded(set)));
    for case in &cases {
        let (_, (model, recordings)) = sets.iter().find(|(set, _)| case["set"] == *set).unwrap();
        let frames = &recordings[case["recording"].as_u64().unwrap() as usize];
        let text = WordTokens::new([&numbers(&case["ids"])[..]]);
        let found = model.align(frames, &text, Costs::FORCED, Some(HeadKind::Ctc)).unwrap();
        let found = found.tokens.iter().map(|token| token.unwrap());
        let found: Vec<[usize; 2]> = found
            .map(|token| [token.frame, token.frame + token.duration - 1])
            .collect();
        let expected: Vec<[usize; 2]> = serde_json::from_value(case["frames"].clone()).unwrap();
        assert_eq!(
            found, expected,
            "{} {}: {}",
            case["set"], case["recording"], case["text"]
        );
    }
    assert_eq!(cases.len(), 33);
}

/// These networks are as good as certain of their own texts: each choice of greedy search is far better than any other.
#[test]
fn transducers_align_their_own_texts_where_greedy_search_found_them() {
    for set in ["rnnt", "hybrid"] {
        let (model, frames) = encoded(set);
        for frames in &frames {
            let greedy = model
                .decode_on(
                    &model.decoding,
                    frames,
                    &mut model.greedy_state(&model.decoding).unwrap(),
                    None,
                )
                .unwrap();
            let text = text(&greedy.ids, false);
            for costs in [Costs::FORCED, SOME_COSTS] {
                let found = model.align(frames, &text, costs, Some(HeadKind::Transducer)).unwrap();
                let placed: Vec<(u32, u32)> = found
                    .tokens
                    .iter()
                    .map(|token| token.map(|token| (token.frame as u32, token.duration as u32)).unwrap())
                    .collect();
                let last = frames.dim(0).unwrap() as u32;
                let expected = greedy.frames.iter().zip(&greedy.durations);
                let expected: Vec<(u32, u32)> = expected
                    .map(|(frame, duration)| (*frame, (*duration).min(last - frame)))
                    .collect();
                assert_eq!(placed, expected, "{set}");
                assert!(found.without_text.is_empty());
            }
            let other = WordTokens::new([&[0u32, 1, 2][..]]);
            let found = model.align(frames, &other, SOME_COSTS, None).unwrap();
            assert!(
                found.tokens.iter().all(Option::is_none) && !found.without_text.is_empty(),
                "{set}"
            );
        }
    }
}
