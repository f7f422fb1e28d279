//! Prefix beam search: the texts whose paths have the largest sums of probabilities (Graves, "Supervised Sequence Labelling with
//! Recurrent Neural Networks", 2012, section 7.5.3; Hannun et al., 2014, arXiv:1408.2873).
//!
//! For each text of the beam there are two sums: over its paths that end with blank, and over those that end with its last token. A
//! frame leaves a text as it is (blank, or its last token again) or adds a token, which is the last one only behind a blank. Fusion
//! scores a token where it is added, and at the end the end of the text, so its score depends on the text alone, but where phrases
//! score on some frames only: then each path counts with the scores of the frames on which its tokens are added.

use std::collections::HashMap;
use std::ops::Range;

use flow_kernels::ctc::log_add;

use crate::decoding::expansion::{ScoredState, best_of};
use crate::decoding::{DecodingSettings, Pruning, is_speech};

/// A text: the one before its last token, and this token. Number 0 is the text without tokens.
#[derive(Clone, Copy)]
struct Prefix {
    before: u32,
    last: u32,
}

/// A text of the beam.
#[derive(Clone)]
struct Live {
    prefix: u32,
    last: Option<u32>,
    /// Logarithms of the sums over paths that end with blank, and with the last token. A path whose tokens have another score of
    /// fusion than `fused` counts with the difference.
    blank: f64,
    token: f64,
    /// The score of fusion.
    fused: f64,
    fusion: ScoredState,
}

impl Live {
    /// The logarithm of the text's probability.
    fn total(&self) -> f64 {
        log_add(self.blank, self.token)
    }

    fn score(&self) -> f64 {
        self.total() + self.fused
    }

    /// The score of fusion with one more token. `scores`: those of all tokens; empty without fusion.
    fn fused_with(&self, token: usize, scores: &[f32]) -> f64 {
        self.fused + scores.get(token).map_or(0.0, |score| f64::from(*score))
    }

    /// The logarithm of the sum over paths to which a token can be added.
    fn before(&self, token: u32) -> f64 {
        match self.last == Some(token) {
            true => self.blank,
            false => self.total(),
        }
    }
}

/// The texts that are found in rows of log-probabilities (frames, tokens and blank), blank last, the best first: at most
/// `settings.beam` of them, one at least. Each with its score: the logarithm of the sum over the paths that stayed in the beam, and the
/// scores of fusion.
///
/// A frame keeps the texts of the best scores; of equal ones those that it leaves as they are come first. With [`Pruning::Early`]
/// only the `beam` most probable tokens of a frame are added. Scores of texts of any length are of the same frames, so
/// `settings.score_norm` does not apply; neither do `blank_score`, as fusion never scores a blank, and `blank_penalty`. `speech`: the
/// frames on which phrases score; none for all.
pub fn search(
    log_probs: &[f32],
    outputs: usize,
    settings: &DecodingSettings,
    speech: Option<&[Range<usize>]>,
) -> Vec<(Vec<u32>, f64)> {
    let fusion = &settings.fusion;
    let mut beam = vec![Live {
        prefix: 0,
        last: None,
        blank: 0.0,
        token: f64::NEG_INFINITY,
        fused: 0.0,
        fusion: ScoredState::start(fusion),
    }];
    let mut prefixes = vec![Prefix { before: 0, last: 0 }];
    let mut numbers = HashMap::new();
    for (frame, row) in log_probs.chunks_exact(outputs).enumerate() {
        let scored = Scored {
            row,
            speech: is_speech(speech, frame),
            by_frame: speech.is_some(),
        };
        let Some(chosen) = chosen(&beam, &prefixes, scored, settings) else {
            // Only where the outputs are NaN.
            break;
        };
        let next = chosen.into_iter().map(|choice| match choice {
            Choice::Same(live) => live,
            Choice::Longer {
                parent,
                token,
                sum,
                fused,
            } => {
                let parent = &beam[parent];
                let number = prefixes.len() as u32;
                let prefix = *numbers.entry((parent.prefix, token)).or_insert(number);
                if prefix == number {
                    prefixes.push(Prefix {
                        before: parent.prefix,
                        last: token,
                    });
                }
                Live {
                    prefix,
                    last: Some(token),
                    blank: f64::NEG_INFINITY,
                    token: sum,
                    fused,
                    fusion: parent.fusion.step(fusion, token, scored.speech),
                }
            }
        });
        beam = next.collect();
    }
    let text = |live: &Live| {
        let mut tokens = Vec::new();
        let mut at = live.prefix;
        while at != 0 {
            let Prefix { before, last } = prefixes[at as usize];
            tokens.push(last);
            at = before;
        }
        tokens.reverse();
        tokens
    };
    let ended = |live: &Live| live.score() + live.fusion.end(fusion);
    let mut found: Vec<(Vec<u32>, f64)> = beam.iter().map(|live| (text(live), ended(live))).collect();
    found.sort_by(|a, b| b.1.total_cmp(&a.1));
    found
}

/// What becomes of a text of the beam at a frame.
enum Choice {
    Same(Live),
    /// A token is added to the text at this place of the beam.
    Longer {
        parent: usize,
        token: u32,
        sum: f64,
        fused: f64,
    },
}

/// What scores on a frame.
#[derive(Clone, Copy)]
struct Scored<'a> {
    /// Log-probabilities.
    row: &'a [f32],
    /// Whether phrases do, and whether there are frames on which they do not.
    speech: bool,
    by_frame: bool,
}

/// The beam after a frame; none where no score is a number.
fn chosen(beam: &[Live], prefixes: &[Prefix], scored: Scored, settings: &DecodingSettings) -> Option<Vec<Choice>> {
    let Scored { row, speech, by_frame } = scored;
    let fusion = &settings.fusion;
    let blank = row.len() - 1;
    let log_prob = |output: usize| f64::from(row[output]);
    let mut same: Vec<Live> = beam.to_vec();
    for (live, before) in same.iter_mut().zip(beam) {
        live.blank = before.total() + log_prob(blank);
        live.token += live.last.map_or(0.0, |last| log_prob(last as usize));
    }
    // Tokens whose text is in the beam already, which then gets their paths.
    let mut there: Vec<Vec<u32>> = vec![Vec::new(); beam.len()];
    for (place, live) in same.iter_mut().enumerate() {
        let before = prefixes[beam[place].prefix as usize].before;
        let parent = beam.iter().position(|parent| parent.prefix == before);
        if let (Some(token), Some(parent)) = (live.last, parent) {
            let mut arriving = beam[parent].before(token) + log_prob(token as usize);
            if by_frame {
                let parent = &beam[parent];
                arriving += parent.fused_with(token as usize, parent.fusion.scores(fusion, speech)) - live.fused;
                if arriving > live.total() {
                    live.fusion = parent.fusion.step(fusion, token, speech);
                }
            }
            live.token = log_add(live.token, arriving);
            there[parent].push(token);
        }
    }
    let size = settings.beam.max(1);
    let mut best: Vec<(f64, Choice)> = Vec::with_capacity(size + 1);
    let mut offer = |score: f64, choice: &dyn Fn() -> Choice| {
        let is_better = best.len() < size || best.last().is_some_and(|(least, _)| score > *least);
        if score.is_finite() && is_better {
            let rank = best.partition_point(|(better, _)| *better >= score);
            best.insert(rank, (score, choice()));
            best.truncate(size);
        }
    };
    for live in &same {
        offer(live.score(), &|| Choice::Same(live.clone()));
    }
    let tokens: Vec<usize> = match settings.pruning {
        Pruning::Late => (0..blank).collect(),
        Pruning::Early => best_of(&row[..blank], size)
            .into_iter()
            .map(|(token, _)| token)
            .collect(),
    };
    for (parent, live) in beam.iter().enumerate() {
        let scores = live.fusion.scores(fusion, speech);
        let total = live.total();
        for &token in &tokens {
            let before = match live.last == Some(token as u32) {
                true => live.blank,
                false => total,
            };
            let sum = before + log_prob(token);
            let fused = live.fused_with(token, scores);
            if there[parent].contains(&(token as u32)) {
                continue;
            }
            let token = token as u32;
            offer(sum + fused, &|| Choice::Longer {
                parent,
                token,
                sum,
                fused,
            });
        }
    }
    (!best.is_empty()).then(|| best.into_iter().map(|(_, choice)| choice).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::fusion::{BoostingRules, Fusion, Phrase, boosting_tree, parse_arpa};

    /// Three tokens and blank.
    const OUTPUTS: usize = 4;

    /// Log-probabilities of rows of logits.
    fn normalised(logits: &[f32]) -> Vec<f32> {
        let rows = logits.chunks_exact(OUTPUTS).flat_map(|row| {
            let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
            row.iter().map(move |logit| (f64::from(*logit) - sum.ln()) as f32)
        });
        rows.collect()
    }

    /// The text of a path.
    fn collapsed(path: &[usize]) -> Vec<u32> {
        let mut last = OUTPUTS - 1;
        let mut text = Vec::new();
        for &output in path {
            if output != last && output != OUTPUTS - 1 {
                text.push(output as u32);
            }
            last = output;
        }
        text
    }

    /// The logarithms of the probabilities of all texts, summed over all paths.
    fn exhaustive(log_probs: &[f32]) -> HashMap<Vec<u32>, f64> {
        let frames = log_probs.len() / OUTPUTS;
        let mut sums: HashMap<Vec<u32>, f64> = HashMap::new();
        for number in 0..OUTPUTS.pow(frames as u32) {
            let path: Vec<usize> = (0..frames).map(|t| number / OUTPUTS.pow(t as u32) % OUTPUTS).collect();
            let score: f64 = path
                .iter()
                .enumerate()
                .map(|(t, output)| f64::from(log_probs[t * OUTPUTS + output]))
                .sum();
            *sums.entry(collapsed(&path)).or_default() += score.exp();
        }
        sums.into_iter().map(|(text, sum)| (text, sum.ln())).collect()
    }

    /// A bigram model with an end, written with NeMo's characters for tokens, and a boosted phrase.
    fn models() -> Fusion {
        let token = |id: u32| char::from_u32(crate::fusion::TOKEN_OFFSET + id).unwrap();
        let (a, b, c) = (token(0), token(1), token(2));
        let arpa = format!(
            "\\data\\\nngram 1=6\nngram 2=3\n\n\\1-grams:\n-99\t<s>\t-0.3\n-0.9\t</s>\n-1.5\t<unk>\n-0.5\t{a}\t-0.2\n-0.7\t{b}\t-0.4\n-1.1\t{c}\t0\n\n\
             \\2-grams:\n-0.2\t<s> {b}\n-0.3\t{a} {c}\n-0.1\t{b} </s>\n\n\\end\\\n"
        );
        let mut fusion = Fusion::default();
        fusion
            .add(Arc::new(parse_arpa(arpa.as_bytes(), 3).unwrap()), 0.4)
            .unwrap();
        let phrase = Phrase {
            tokens: vec![2, 2],
            context_score: None,
        };
        let tree = boosting_tree(&[phrase], &BoostingRules::default(), 3).unwrap();
        fusion.add_phrases(Arc::new(tree), 0.3).unwrap();
        fusion.set_prior(vec![0.0, -0.5, 0.25]).unwrap();
        fusion
    }

    /// The score of a text in all models, and of its end in that of the language.
    fn fused(fusion: &Fusion, text: &[u32]) -> f64 {
        let (mut state, mut score, mut scores) = (fusion.start(), 0.0, Vec::new());
        for &token in text {
            fusion.scores(&state, true, &mut scores);
            score += scores.get(token as usize).map_or(0.0, |score| f64::from(*score));
            state = fusion.step(&state, token, true);
        }
        score + f64::from(fusion.end(&state))
    }

    fn settings(beam: usize, fusion: Fusion) -> DecodingSettings {
        DecodingSettings {
            beam,
            fusion,
            ..DecodingSettings::default()
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// A beam that drops nothing finds all texts, each with the sum over its paths.
        #[test]
        fn a_wide_beam_finds_the_sum_over_all_paths(
            logits in (0usize..=5).prop_flat_map(|frames| prop::collection::vec(-4f32..4.0, frames * OUTPUTS)),
            with_models: bool,
        ) {
            let log_probs = normalised(&logits);
            let fusion = if with_models { models() } else { Fusion::default() };
            let expected = exhaustive(&log_probs);
            let found = search(&log_probs, OUTPUTS, &settings(1000, fusion.clone()), None);
            prop_assert_eq!(found.len(), expected.len());
            for (text, score) in &found {
                let expected = expected[text] + fused(&fusion, text);
                prop_assert!((score - expected).abs() < 1e-9, "{text:?}: {score} is not {expected}");
            }
            prop_assert!(found.windows(2).all(|pair| pair[0].1 >= pair[1].1));
        }

        /// A narrow beam loses paths, but adds none: scores are lower bounds.
        #[test]
        fn a_narrow_beam_has_at_most_the_sum_over_all_paths(
            logits in prop::collection::vec(-4f32..4.0, 5 * OUTPUTS),
            beam in 1usize..6,
            early: bool,
        ) {
            let log_probs = normalised(&logits);
            let expected = exhaustive(&log_probs);
            let pruning = if early { Pruning::Early } else { Pruning::Late };
            let found = search(&log_probs, OUTPUTS, &DecodingSettings { pruning, ..settings(beam, Fusion::default()) }, None);
            prop_assert!((1..=beam).contains(&found.len()));
            for (text, score) in found {
                prop_assert!(score <= expected[&text] + 1e-9);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Where phrases score on some frames only, each path counts with the scores of the frames on which its tokens are added.
        #[test]
        fn paths_have_the_scores_of_their_frames(
            logits in (1usize..=5).prop_flat_map(|frames| prop::collection::vec(-4f32..4.0, frames * OUTPUTS)),
            speech in prop::collection::vec(any::<bool>(), 5),
        ) {
            let log_probs = normalised(&logits);
            let frames = log_probs.len() / OUTPUTS;
            // Of one token, so that no state depends on the frames.
            let phrase = Phrase { tokens: vec![2], context_score: None };
            let mut fusion = Fusion::default();
            let tree = boosting_tree(&[phrase], &BoostingRules::default(), 3).unwrap();
            fusion.add_phrases(Arc::new(tree), 0.7).unwrap();
            let mut expected: HashMap<Vec<u32>, f64> = HashMap::new();
            for number in 0..OUTPUTS.pow(frames as u32) {
                let path: Vec<usize> = (0..frames).map(|t| number / OUTPUTS.pow(t as u32) % OUTPUTS).collect();
                let mut score = 0.0;
                for (t, &output) in path.iter().enumerate() {
                    score += f64::from(log_probs[t * OUTPUTS + output]);
                    if output == 2 && (t == 0 || path[t - 1] != 2) && speech[t] {
                        score += fused(&fusion, &[2]);
                    }
                }
                *expected.entry(collapsed(&path)).or_default() += score.exp();
            }
            let ranges: Vec<Range<usize>> = (0..frames).filter(|&t| speech[t]).map(|t| t..t + 1).collect();
            let found = search(&log_probs, OUTPUTS, &settings(1000, fusion.clone()), Some(&ranges));
            prop_assert_eq!(found.len(), expected.len());
            for (text, score) in &found {
                prop_assert!((score - expected[text].ln()).abs() < 1e-9, "{text:?}: {score}");
            }
            // All frames are as none that are told.
            let all = 0..frames;
            let all = Some(std::slice::from_ref(&all));
            let everywhere = search(&log_probs, OUTPUTS, &settings(3, models()), all);
            prop_assert_eq!(everywhere, search(&log_probs, OUTPUTS, &settings(3, models()), None));
        }
    }

    #[test]
    fn outputs_that_are_no_numbers_end_the_search() {
        let mut log_probs = normalised(&[0.0, 3.0, 0.0, 0.0]);
        log_probs.extend([f32::NAN; OUTPUTS]);
        let found = search(&log_probs, OUTPUTS, &settings(2, Fusion::default()), None);
        assert_eq!(found[0].0, [1]);
        let nothing = search(
            &[f32::NEG_INFINITY; 2 * OUTPUTS],
            OUTPUTS,
            &settings(2, Fusion::default()),
            None,
        );
        assert!(nothing[0].0.is_empty());
    }
}
