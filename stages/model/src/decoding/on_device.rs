//! Greedy search of a batch on a device, without a copy to the host for each token: label looping, with the frames that
//! follow looked at together.

use candle_core::Tensor;
use flow_kernels::greedy::{Place, Rules, Search};

use super::beam::Steps;
use super::{GreedyState, Hypothesis, Networks, Search as Standing, TokenObserver};
use crate::Result;

/// [`decode_greedy_on`](super::decode_greedy_on) for tensors on a device, without fusion. Every step emits at most one token
/// of each utterance; the host looks once in [`Search::STEPS`] steps.
pub(super) fn decode_greedy(
    networks: &Networks,
    Steps {
        durations, max_symbols, ..
    }: Steps,
    encoded: &Tensor,
    lengths: &[usize],
    state: &mut GreedyState,
    mut observer: Option<TokenObserver>,
) -> Result<Vec<Hypothesis>> {
    let Networks {
        parameters,
        prediction,
        joint,
    } = *networks;
    let mut hypotheses = vec![Hypothesis::default(); lengths.len()];
    let left = |searches: &[Standing]| {
        let left = searches.iter().zip(lengths);
        left.map(|(search, length)| length.saturating_sub(search.frame))
            .max()
            .unwrap_or(0)
    };
    let mut frames_left = left(&state.searches);
    if frames_left > 0 {
        let f = joint.project_encoder(parameters, &encoded.contiguous()?.flatten_to(1)?)?;
        let places: Vec<Place> = state
            .searches
            .iter()
            .map(|search| Place {
                frame: search.frame,
                emitted: search.emitted,
            })
            .collect();
        let rules = Rules {
            durations,
            max_symbols,
            tokens: joint.tokens(),
        };
        let search = Search::new(&f, lengths, &places, rules, observer.is_some())?;
        // Copies of the state share its tensors, which the steps change.
        state.prediction = state.prediction.copied()?;
        while frames_left > 0 {
            let steps = search.steps(frames_left);
            for step in 0..steps {
                let (logits, bias) = joint.logits_and_bias(parameters, &search.hidden(&state.predicted)?)?;
                search.advance(step, &logits, bias)?;
                let predicted = prediction.step_of_search(parameters, &search, &mut state.prediction)?;
                state.predicted = joint.project_prediction(parameters, &predicted)?;
            }
            let (emissions, places) = search.look(steps)?;
            for (standing, place) in state.searches.iter_mut().zip(places) {
                *standing = Standing {
                    frame: place.frame,
                    emitted: place.emitted,
                };
            }
            frames_left = left(&state.searches);
            for emission in emissions {
                let hypothesis = &mut hypotheses[emission.utterance];
                hypothesis.ids.push(emission.token);
                hypothesis.frames.push(emission.frame);
                hypothesis.durations.push(emission.duration);
                hypothesis.score += f64::from(emission.logit);
                if let Some(observer) = &mut observer {
                    observer(emission.utterance, emission.token, &emission.logits);
                }
            }
        }
    }
    for (standing, length) in state.searches.iter_mut().zip(lengths) {
        standing.frame -= length;
    }
    Ok(hypotheses)
}
