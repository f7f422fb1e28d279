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

/// Words of one token or two; the second and the third are left out at other costs.
fn text(tokens: &[u32], twos: bool) -> WordTokens {
    WordTokens::new(tokens.chunks(if twos { 2 } else { 1 })).with_factors(vec![1.0, 0.5, 2.0])
}

/// What leaving out a word costs.
fn left_out(text: &WordTokens, word: usize, costs: Costs) -> f64 {
    costs.left_out * [1.0, 0.5, 2.0, 1.0][word.min(3)] * text.word(word).len() as f64
}

/// Sets of words that are left out, as flags.
fn choices(words: usize) -> impl Iterator<Item = Vec<bool>> {
    (0..1usize << words).map(move |bits| (0..words).map(|word| bits >> word & 1 == 1).collect())
}

/// Tokens that are not left out, each with whether a word begins with it, and the cost of the others.
fn kept(text: &WordTokens, left_out: &[bool], costs: Costs) -> (Vec<(u32, bool)>, f64) {
    let (mut kept, mut cost) = (Vec::new(), 0.0);
    for (word, &left_out) in left_out.iter().enumerate() {
        let tokens = &text.tokens()[text.word(word)];
        if left_out {
            cost += self::left_out(text, word, costs);
        } else {
            kept.extend(tokens.iter().enumerate().map(|(at, token)| (*token, at == 0)));
        }
    }
    (kept, cost)
}

/// The best score of all ways to place states of CTC on frames.
fn best_ctc(log_probs: &[f32], outputs: usize, text: &WordTokens, costs: Costs) -> f64 {
    let rows: Vec<&[f32]> = log_probs.chunks_exact(outputs).collect();
    fn walk(rows: &[&[f32]], kept: &[(u32, bool)], state: usize, no_text: f64) -> f64 {
        let Some((row, rest)) = rows.split_first() else {
            return if state + 1 >= 2 * kept.len() {
                0.0
            } else {
                f64::NEG_INFINITY
            };
        };
        let mut best = f64::NEG_INFINITY;
        for next in state..=state + 2 {
            let (place, is_token) = (next / 2, next % 2 == 1);
            if next > 2 * kept.len() || (next == state + 2 && !is_token) {
                continue;
            }
            if next == state + 2 && kept[place].0 == kept[place - 1].0 {
                continue;
            }
            let cost = match is_token {
                true => f64::from(row[kept[place].0 as usize]),
                false if kept.get(place).is_none_or(|token| token.1) => f64::from(row[row.len() - 1]).max(no_text),
                false => f64::from(row[row.len() - 1]),
            };
            best = best.max(cost + walk(rest, kept, next, no_text));
        }
        best
    }
    let all = choices(text.words()).map(|left_out| {
        let (kept, cost) = kept(text, &left_out, costs);
        // Before the first frame a path is in the blank before all tokens.
        cost + walk(&rows, &kept, 0, costs.no_text)
    });
    all.fold(f64::NEG_INFINITY, f64::max)
}

/// The best score of all paths through a lattice.
fn best_path(frames: usize, durations: &[usize], text: &WordTokens, costs: Costs, cells: &Cells) -> f64 {
    struct Walk<'a>(usize, &'a [usize], &'a WordTokens, Costs, &'a Cells);
    impl Walk<'_> {
        fn from(&self, frame: usize, state: usize) -> f64 {
            let Walk(frames, durations, text, costs, cells) = *self;
            let tokens = text.tokens().len();
            let mut best = f64::NEG_INFINITY;
            let word = (0..text.words()).find(|word| text.word(*word).start == state);
            if let Some(word) = word {
                let range = text.word(word);
                best = self.from(frame, range.end) + left_out(text, word, costs);
            }
            if frame >= frames {
                return if state == tokens { 0.0 } else { best };
            }
            let cell = frame * (tokens + 1) + state;
            if word.is_some() || state == tokens {
                best = best.max(costs.no_text + self.from(frame + 1, state));
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
                    best = best.max(score + cells.blank[cell] + self.from(frame + of_blank, state));
                }
                if state < tokens {
                    best = best.max(score + cells.label[cell] + self.from(frame + of_label, state + 1));
                }
            }
            best
        }
    }
    Walk(frames, durations, text, costs, cells).from(0, 0)
}

/// Costs of both kinds, or of none.
fn some_costs() -> impl Strategy<Value = Costs> {
    prop_oneof![
        Just(Costs::FORCED),
        (-3.0..-0.1f64, -3.0..-0.1f64).prop_map(|(left_out, no_text)| Costs { left_out, no_text }),
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
        assert!(tokens.iter().all(|token| token.is_some() == tokens[0].is_some()));
    }
    for pair in found.without_text.windows(2) {
        assert!(pair[0].end < pair[1].start);
    }
}

proptest! {
    #[test]
    fn ctc_finds_the_best_of_all_paths(
        frames in 0usize..6, tokens in prop::collection::vec(0u32..3, 0..4), twos: bool, costs in some_costs(),
        values in prop::collection::vec(-4.0..0.0f32, 24),
    ) {
        let (text, log_probs) = (text(&tokens, twos), &values[..frames * 4]);
        let best = best_ctc(log_probs, 4, &text, costs);
        match ctc::align(log_probs, 4, &text, costs) {
            // A path may also leave out a word between equal tokens, with no blank between these, which would be one.
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
        frames in 0usize..5, tokens in prop::collection::vec(0u32..3, 0..4), twos: bool, costs in some_costs(),
        durations in prop_oneof![Just(vec![]), Just(vec![0, 1, 2]), Just(vec![1, 4]), Just(vec![0, 3])],
        values in prop::collection::vec(-4.0..0.0f64, 5 * 4 * 5),
    ) {
        let text = text(&tokens, twos);
        let (states, width) = (tokens.len() + 1, durations.len());
        let cells = Cells {
            blank: values[..frames * states].to_vec(),
            label: values[20..20 + frames * states].to_vec(),
            durations: values[40..40 + frames * states * width].to_vec(),
        };
        let best = best_path(frames, &durations, &text, costs, &cells);
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
        match transducer::align(frames, &durations, &text, costs, &mut of_frames) {
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
    assert!(transducer::align(2, &[0, 1], &text, Costs::FORCED, &mut nothing).is_err());
    let long = WordTokens::new([&vec![0u32; MAX_CELLS][..]]);
    assert!(transducer::align(9, &[0, 1], &long, Costs::FORCED, &mut nothing).is_err());
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

/// These networks are as good as certain of their own texts: each choice of greedy search is far better than any other.
#[test]
fn transducers_align_their_own_texts_where_greedy_search_found_them() {
    for set in ["rnnt", "hybrid"] {
        let (model, frames) = encoded(set);
        for frames in &frames {
            let greedy = model
                .decode_on(frames, &mut model.greedy_state().unwrap(), None)
                .unwrap();
            let text = text(&greedy.ids, false);
            for costs in [
                Costs::FORCED,
                Costs {
                    left_out: -4.0,
                    no_text: -2.0,
                },
            ] {
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
            let found = model
                .align(
                    frames,
                    &other,
                    Costs {
                        left_out: -4.0,
                        no_text: -2.0,
                    },
                    None,
                )
                .unwrap();
            assert!(
                found.tokens.iter().all(Option::is_none) && !found.without_text.is_empty(),
                "{set}"
            );
        }
    }
}
