//! Runs a model over many utterances: grouped by length, loaded in parallel, scored.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use flow_kernels::threads::{install, pool};
use flow_model::confidence::{Aggregation, ConfidenceMethod, log_softmax, word_confidences};
use flow_model::decoding::Hypothesis;
use flow_model::model::{MicroBatch, TdtModel};
use flow_model::tokenizer::Tokenizer;
use flow_text::language_tag::split_tag;

use crate::error::EvaluationError;
use crate::wer::{Scores, UtteranceScore, score};

/// Samples per second of every signal.
pub const SAMPLE_RATE: f64 = 16_000.0;

/// One utterance to transcribe.
#[derive(Clone, Debug, PartialEq)]
pub struct Utterance {
    pub segment_id: String,
    pub lang: String,
    /// What was said, with its language tag.
    pub text: String,
    /// Seconds, as the manifest says.
    pub duration: f64,
}

/// The result for one utterance.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Transcript {
        /// The reference as it is scored; see [`scored_reference`].
        reference: String,
        hypothesis: String,
        score: UtteranceScore,
        seconds: f64,
        /// What was heard, without tags; none where only tokens are known.
        words: Vec<HeardWord>,
    },
    /// The audio could not be read or decoded.
    Unreadable { why: String },
}

/// A word that was heard.
#[derive(Clone, Debug, PartialEq)]
pub struct HeardWord {
    pub text: String,
    /// Seconds from the beginning of the utterance, as the model emits the word.
    pub times: [f64; 2],
    /// From 0 to 1, by NeMo's default: Tsallis entropy, the minimum over the tokens of the word.
    pub confidence: f64,
}

/// Gives the signals of the utterances at some indices (16 kHz mono), or why there is none.
pub type Load<'a> = dyn Fn(&[usize]) -> Vec<Result<Vec<f32>, String>> + Sync + 'a;

/// Transcribes utterances with replicas of one model, which take micro-batches in turn, each when it has done the one before.
/// Several have a thread each and an equal share of the threads that compute; replicas on the CPU may be the same model.
/// Outcomes are in the order of the utterances, and depend neither on the number of replicas nor on that of threads: no
/// micro-batch is divided.
///
/// `prompts`: the language prompt of each utterance, or none for the model's own.
///
/// At most `batch_seconds` of audio, padding included, are in memory and in each replica at once (one longer utterance goes
/// alone).
///
/// # Errors
/// Where a replica fails (the error of the first micro-batch that failed), there is none, or the run is cancelled.
pub fn transcribe(
    models: &[&TdtModel],
    (utterances, prompts): (&[Utterance], &[usize]),
    batch_seconds: f64,
    load: &Load<'_>,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<Vec<Outcome>, EvaluationError> {
    let groups = groups(utterances, batch_seconds);
    let (next, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    // With the number of the micro-batch that failed.
    type Share = Result<Vec<(usize, Outcome)>, (usize, EvaluationError)>;
    let work = |model: &TdtModel| -> Share {
        let mut outcomes = Vec::new();
        while !stopped.load(Ordering::Acquire) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(group) = groups.get(number) else { break };
            let done = match cancelled() {
                true => Err(EvaluationError::Cancelled),
                false => transcribe_group(model, (utterances, prompts), group, load, &mut outcomes),
            };
            if let Err(error) = done {
                stopped.store(true, Ordering::Release);
                return Err((number, error));
            }
        }
        Ok(outcomes)
    };
    let shares: Vec<Share> = match models {
        [] => {
            let message = "there is no model to transcribe with".into();
            return Err(EvaluationError::Data { message });
        }
        [model] => vec![work(model)],
        _ => {
            let threads = (install(rayon::current_num_threads) / models.len()).max(1);
            let started = (0..models.len()).map(|number| pool(&format!("decode-{number}"), threads));
            let pools: Vec<_> = started
                .collect::<Result<_, _>>()
                .map_err(|error| EvaluationError::Data {
                    message: format!("threads to transcribe with cannot be started: {error}"),
                })?;
            std::thread::scope(|scope| {
                let work = &work;
                let each = models.iter().zip(&pools);
                let running: Vec<_> = each
                    .map(|(model, pool)| scope.spawn(move || pool.install(|| work(model))))
                    .collect();
                running
                    .into_iter()
                    .map(|share| share.join().unwrap_or_else(|panic| resume_unwind(panic)))
                    .collect()
            })
        }
    };
    let mut outcomes: Vec<Option<Outcome>> = vec![None; utterances.len()];
    let mut failed: Option<(usize, EvaluationError)> = None;
    for share in shares {
        match share {
            Ok(share) => share
                .into_iter()
                .for_each(|(index, outcome)| outcomes[index] = Some(outcome)),
            Err((number, error)) if failed.as_ref().is_none_or(|(first, _)| number < *first) => {
                failed = Some((number, error));
            }
            Err(_) => {}
        }
    }
    match failed {
        Some((_, error)) => Err(error),
        None => Ok(complete(outcomes)),
    }
}

/// How many micro-batches [`transcribe`] makes of utterances.
pub fn micro_batches(utterances: &[Utterance], batch_seconds: f64) -> usize {
    groups(utterances, batch_seconds).len()
}

/// Loads and transcribes the utterances at some indices together.
fn transcribe_group(
    model: &TdtModel,
    (utterances, prompts): (&[Utterance], &[usize]),
    group: &[usize],
    load: &Load<'_>,
    outcomes: &mut Vec<(usize, Outcome)>,
) -> Result<(), EvaluationError> {
    let loaded = install(|| load(group));
    let mut signals = Vec::with_capacity(loaded.len());
    let mut indices = Vec::with_capacity(loaded.len());
    for (&index, signal) in group.iter().zip(&loaded) {
        match signal {
            Ok(signal) => {
                indices.push(index);
                signals.push(signal.as_slice());
            }
            Err(why) => outcomes.push((index, Outcome::Unreadable { why: why.clone() })),
        }
    }
    if signals.is_empty() {
        return Ok(());
    }
    let prompts: Vec<usize> = indices
        .iter()
        .filter_map(|&index| prompts.get(index).copied())
        .collect();
    let method = ConfidenceMethod::default();
    let mut confidences: Vec<Vec<f64>> = vec![Vec::new(); signals.len()];
    let mut observe = |utterance: usize, _: u32, logits: &[f32]| {
        confidences[utterance].push(method.confidence(&log_softmax(logits), logits.len()));
    };
    let hypotheses = install(|| model.transcribe_each(&signals, &prompts, Some(&mut observe)))?;
    let found = hypotheses.into_iter().zip(&confidences);
    for ((index, signal), (hypothesis, confidences)) in indices.into_iter().zip(signals).zip(found) {
        let seconds = signal.len() as f64 / SAMPLE_RATE;
        let words = heard_words(model, &hypothesis, confidences)?;
        let heard = (hypothesis.text, words);
        let outcome = outcome(&utterances[index], heard, seconds, model.tokenizer.as_ref());
        outcomes.push((index, outcome));
    }
    Ok(())
}

/// The words of a hypothesis, without tags such as `<|hi|>`. `confidences` are those of its tokens.
fn heard_words(
    model: &TdtModel,
    hypothesis: &Hypothesis,
    confidences: &[f64],
) -> Result<Vec<HeardWord>, EvaluationError> {
    let Some(tokenizer) = &model.tokenizer else {
        return Ok(Vec::new());
    };
    let is_tag = |id: u32| {
        let piece = tokenizer.piece(id).unwrap_or_default();
        let (tag, rest) = split_tag(piece.trim_start_matches('\u{2581}'));
        tag.is_some_and(|tag| !tag.is_empty()) && rest.is_empty()
    };
    let kept: Vec<usize> = (0..hypothesis.ids.len())
        .filter(|&at| !is_tag(hypothesis.ids[at]))
        .collect();
    let of = |values: &[u32]| kept.iter().filter_map(|&at| values.get(at).copied()).collect();
    let text = Hypothesis {
        ids: of(&hypothesis.ids),
        frames: of(&hypothesis.frames),
        durations: of(&hypothesis.durations),
        ..Hypothesis::default()
    };
    let confidences: Vec<f64> = kept.iter().filter_map(|&at| confidences.get(at).copied()).collect();
    let stamps = model.time_stamps(&text)?;
    let confidences = word_confidences(&confidences, &stamps.word_tokens, Aggregation::default())?;
    let seconds = |frame: u32| f64::from(frame) * model.frame_seconds();
    let words = stamps
        .words
        .into_iter()
        .zip(confidences)
        .map(|(word, confidence)| HeardWord {
            times: [seconds(word.start), seconds(word.end)],
            text: word.text,
            confidence,
        });
    // A lone mark of a space is a word of NeMo's, too.
    Ok(words.filter(|word| !word.text.trim().is_empty()).collect())
}

/// The TDT loss of one utterance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UtteranceLoss {
    /// Negative log likelihood of the text (natural logarithm), not divided by `tokens`.
    pub loss: f64,
    /// Tokens of the text.
    pub tokens: usize,
}

/// What a model makes of the clips of a micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recognized {
    /// Token ids of what was said in each clip.
    pub ids: Vec<Vec<u32>>,
    /// As [`UtteranceLoss::loss`], of each clip.
    pub losses: Vec<f64>,
}

/// The tokens of each clip by greedy search, and the loss of each with its target, from one pass of the encoder.
pub fn recognize(model: &TdtModel, batch: &MicroBatch) -> Result<Recognized, EvaluationError> {
    let signals: Vec<&[f32]> = batch.signals.iter().map(Vec::as_slice).collect();
    let (hypotheses, losses) = install(|| model.transcribe_with_losses(&signals, &batch.tokens, &batch.prompts))?;
    let ids = hypotheses.into_iter().map(|hypothesis| hypothesis.ids).collect();
    Ok(Recognized { ids, losses })
}

/// Gives what a model makes of micro-batches, in their order, as [`recognize`] does of one. They are loaded when they are asked
/// for.
pub type Recognize<'a, E> = dyn FnMut(&mut dyn Iterator<Item = MicroBatch>) -> Result<Vec<Recognized>, E> + 'a;

/// Gives the number of the language prompt of a language; none where the model has no prompts, or is to take its own.
pub type PromptOf<'a> = dyn Fn(&str) -> Result<Option<usize>, EvaluationError> + 'a;

/// How texts and languages become what a model is compared with and told.
#[derive(Clone, Copy)]
pub struct Targets<'a> {
    pub tokenizer: Option<&'a Tokenizer>,
    /// Texts with more tokens have no loss.
    pub max_tokens: usize,
    pub prompt_of: &'a PromptOf<'a>,
}

/// As [`transcribe`], with the loss of each utterance. `all` may share the micro-batches out: the outcomes do not depend on who
/// computes which. No loss: the audio could not be read, the text has more than `max_tokens` tokens, or there is no tokenizer.
///
/// # Errors
/// Those of `all` and of `targets.prompt_of`; where the run is cancelled; and where `all` gives something else than it was asked
/// for.
pub fn transcribe_with_losses<E: From<EvaluationError>>(
    targets: Targets<'_>,
    utterances: &[Utterance],
    batch_seconds: f64,
    load: &Load<'_>,
    cancelled: &dyn Fn() -> bool,
    all: &mut Recognize<'_, E>,
) -> Result<(Vec<Outcome>, Vec<Option<UtteranceLoss>>), E> {
    let Targets {
        tokenizer,
        max_tokens,
        prompt_of,
    } = targets;
    let prompts = utterances.iter().map(|utterance| prompt_of(&utterance.lang));
    let prompts: Vec<Option<usize>> = prompts.collect::<Result<_, _>>()?;
    let target = |index: usize| {
        let tokens = tokenizer?.encode(&utterances[index].text);
        (tokens.len() <= max_tokens).then_some(tokens)
    };
    let mut outcomes: Vec<Option<Outcome>> = vec![None; utterances.len()];
    // Of each micro-batch: indices, seconds, and the tokens of those that have a loss.
    let mut clips: Vec<Vec<(usize, f64, Option<usize>)>> = Vec::new();
    let mut stopped = false;
    let mut groups = groups(utterances, batch_seconds).into_iter();
    let mut batches = std::iter::from_fn(|| {
        loop {
            stopped = stopped || cancelled();
            let group = groups.next().filter(|_| !stopped)?;
            let (mut batch, mut of_batch) = (MicroBatch::default(), Vec::new());
            for (&index, signal) in group.iter().zip(install(|| load(&group))) {
                let signal = match signal {
                    Ok(signal) => signal,
                    Err(why) => {
                        outcomes[index] = Some(Outcome::Unreadable { why });
                        continue;
                    }
                };
                let target = target(index);
                of_batch.push((index, signal.len() as f64 / SAMPLE_RATE, target.as_ref().map(Vec::len)));
                batch.signals.push(signal);
                // One that does not count gets an empty target.
                batch.tokens.push(target.unwrap_or_default());
                batch.prompts.extend(prompts[index]);
            }
            if !of_batch.is_empty() {
                clips.push(of_batch);
                return Some(batch);
            }
        }
    });
    let found = all(&mut batches)?;
    if stopped {
        return Err(EvaluationError::Cancelled.into());
    }
    let same =
        |(clips, found): (&Vec<_>, &Recognized)| (found.ids.len(), found.losses.len()) == (clips.len(), clips.len());
    if found.len() != clips.len() || !clips.iter().zip(&found).all(same) {
        let message = "an evaluation did not give what it was asked for".into();
        return Err(EvaluationError::Data { message }.into());
    }
    let mut losses: Vec<Option<UtteranceLoss>> = vec![None; utterances.len()];
    for (clips, found) in clips.into_iter().zip(found) {
        for ((index, seconds, tokens), (ids, loss)) in clips.into_iter().zip(found.ids.iter().zip(found.losses)) {
            let text = tokenizer.map(|tokenizer| tokenizer.decode(ids)).transpose();
            let hypothesis = text.map_err(EvaluationError::from)?.unwrap_or_default();
            let heard = (hypothesis, Vec::new());
            outcomes[index] = Some(outcome(&utterances[index], heard, seconds, tokenizer));
            losses[index] = tokens.map(|tokens| UtteranceLoss { loss, tokens });
        }
    }
    Ok((complete(outcomes), losses))
}

/// The scored transcript of an utterance.
fn outcome(
    utterance: &Utterance,
    (hypothesis, words): (String, Vec<HeardWord>),
    seconds: f64,
    tokenizer: Option<&Tokenizer>,
) -> Outcome {
    let reference = scored_reference(&utterance.text, tokenizer);
    let score = score(&reference, &hypothesis);
    Outcome::Transcript {
        reference,
        hypothesis,
        score,
        seconds,
        words,
    }
}

fn complete(outcomes: Vec<Option<Outcome>>) -> Vec<Outcome> {
    let missing = || Outcome::Unreadable {
        why: "the model gave no hypothesis for it".into(),
    };
    let complete = outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(missing));
    complete.collect()
}

/// Adds up what was transcribed. The second number counts utterances that could not be read.
pub fn scores(utterances: &[Utterance], outcomes: &[Outcome]) -> (Scores, u64) {
    let mut scores = Scores::default();
    let mut unreadable = 0;
    for (utterance, outcome) in utterances.iter().zip(outcomes) {
        match outcome {
            Outcome::Transcript { score, seconds, .. } => scores.add(&utterance.lang, score, *seconds),
            Outcome::Unreadable { .. } => unreadable += 1,
        }
    }
    (scores, unreadable)
}

/// The reference as NeMo scores it: encoded and decoded by the tokenizer, so that a difference of spaces or
/// Unicode form that the model cannot express is not an error. A text with characters that the tokenizer does
/// not know stays as it is, so that these do count as errors.
pub fn scored_reference(text: &str, tokenizer: Option<&Tokenizer>) -> String {
    let Some(tokenizer) = tokenizer else {
        return text.to_owned();
    };
    let ids = tokenizer.encode(text);
    if ids.contains(&tokenizer.unknown_id()) {
        return text.to_owned();
    }
    tokenizer.decode(&ids).unwrap_or_else(|_| text.to_owned())
}

/// Indices in groups of similar length, the longest first.
fn groups(utterances: &[Utterance], batch_seconds: f64) -> Vec<Vec<usize>> {
    let duration = |index: usize| utterances[index].duration.max(0.0);
    let mut order: Vec<usize> = (0..utterances.len()).collect();
    order.sort_by(|&a, &b| duration(b).total_cmp(&duration(a)).then(a.cmp(&b)));
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for index in order {
        match groups.last_mut() {
            // The first of a group is its longest.
            Some(group) if duration(group[0]) * (group.len() + 1) as f64 <= batch_seconds => group.push(index),
            _ => groups.push(vec![index]),
        }
    }
    groups
}

/// Chooses `per_language` utterances of each language (0: all), always the same ones: those whose digest of
/// segment id and text is smallest. Takes language, segment id and text; returns indices in ascending order.
pub fn sample<'a>(utterances: impl Iterator<Item = (&'a str, &'a str, &'a str)>, per_language: usize) -> Vec<usize> {
    if per_language == 0 {
        return (0..utterances.count()).collect();
    }
    let mut keyed: Vec<(&str, [u8; 32], usize)> = utterances
        .enumerate()
        .map(|(index, (lang, segment_id, text))| {
            let mut hasher = blake3::Hasher::new();
            hasher
                .update(segment_id.as_bytes())
                .update(&[0])
                .update(text.as_bytes());
            (lang, *hasher.finalize().as_bytes(), index)
        })
        .collect();
    keyed.sort_unstable();
    let mut chosen: Vec<usize> = keyed
        .chunk_by(|a, b| a.0 == b.0)
        .flat_map(|language| language.iter().take(per_language).map(|entry| entry.2))
        .collect();
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::{DType, Device};
    use flow_model::ModelConfig;

    use super::*;

    fn utterance(lang: &str, number: usize, duration: f64) -> Utterance {
        Utterance {
            segment_id: format!("{lang}_{number}"),
            lang: lang.into(),
            text: format!("<|{lang}|> x"),
            duration,
        }
    }

    #[test]
    fn groups_hold_every_utterance_once_within_their_seconds() {
        let utterances: Vec<_> = [3.0, 1.0, 40.0, 2.5, f64::NAN, -1.0, 2.0, 0.0]
            .iter()
            .enumerate()
            .map(|(i, &d)| utterance("hi", i, d))
            .collect();
        let groups = groups(&utterances, 6.0);
        let mut all: Vec<usize> = groups.concat();
        all.sort_unstable();
        assert_eq!(all, (0..utterances.len()).collect::<Vec<_>>());
        assert_eq!(groups[0], [2], "one that is too long goes alone");
        for group in &groups[1..] {
            let longest = group
                .iter()
                .map(|&i| utterances[i].duration.max(0.0))
                .fold(0.0, f64::max);
            assert!(longest * group.len() as f64 <= 6.0);
        }
    }

    /// A small model with random weights and the bundled tokenizer.
    fn model() -> TdtModel {
        let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/tokenizers/mini.model");
        let tokenizer = Tokenizer::load(Path::new(tokenizer)).unwrap();
        let yaml = format!(
            "
preprocessor: {{sample_rate: 16000, window_size: 0.025, window_stride: 0.01, features: 16, n_fft: 512, pad_to: 0}}
encoder:
  {{feat_in: 16, n_layers: 2, d_model: 16, n_heads: 2, use_bias: false, xscaling: false, conv_kernel_size: 5,
   subsampling: dw_striding, subsampling_factor: 8, subsampling_conv_channels: 4, dropout: 0.1,
   dropout_pre_encoder: 0.1, dropout_emb: 0.0, dropout_att: 0.1}}
decoder: {{vocab_size: {}, prednet: {{pred_hidden: 8, pred_rnn_layers: 1}}}}
joint: {{jointnet: {{joint_hidden: 8}}}}
loss: {{tdt_kwargs: {{durations: [0, 1, 2, 3, 4], sigma: 0.02}}}}
",
            tokenizer.vocabulary_size()
        );
        let config = ModelConfig::from_nemo_yaml(&yaml).unwrap();
        TdtModel::new(config, Some(tokenizer), 3, DType::F32, &Device::Cpu).unwrap()
    }

    /// Whatever the number of replicas, and if there are more of them than micro-batches, also with replicas of their own
    /// weights: outcomes, the unreadable ones among them, and errors are those of one.
    #[test]
    fn outcomes_do_not_depend_on_the_number_of_replicas() {
        let utterances: Vec<_> = (0..23)
            .map(|n| utterance("en", n, 0.3 + 0.05 * (n * 7 % 11) as f64))
            .collect();
        let load = |indices: &[usize]| -> Vec<Result<Vec<f32>, String>> {
            let signal = |&index: &usize| match index {
                5 | 20 => Err(format!("{index} is damaged")),
                _ => Ok((0..(utterances[index].duration * SAMPLE_RATE) as usize)
                    .map(|i| (i as f32 * (0.01 + 0.003 * index as f32)).sin() * 0.4)
                    .collect()),
            };
            indices.iter().map(signal).collect()
        };
        let (model, go_on) = (model(), || false);
        let one = transcribe(&[&model], (&utterances, &[]), 2.0, &load, &go_on).unwrap();
        let heard =
            |outcome: &&Outcome| matches!(outcome, Outcome::Transcript { hypothesis, .. } if !hypothesis.is_empty());
        assert!(one.iter().filter(heard).count() > 10, "{one:?}");
        assert_eq!(
            one[5],
            Outcome::Unreadable {
                why: "5 is damaged".into()
            }
        );
        let batches = micro_batches(&utterances, 2.0);
        assert!(batches > 4 && batches < 23, "{batches}");
        let replica = model.replica_on(&Device::Cpu).unwrap();
        for count in [2, 3, batches + 2] {
            let models: Vec<&TdtModel> = (0..count).map(|n| if n == 1 { &replica } else { &model }).collect();
            let several = transcribe(&models, (&utterances, &[]), 2.0, &load, &go_on).unwrap();
            assert_eq!(several, one, "{count} replicas");
        }
        // Audio that no model takes: of the micro-batches that fail the first one is reported.
        let wrong = |indices: &[usize]| -> Vec<Result<Vec<f32>, String>> { vec![Ok(Vec::new()); indices.len()] };
        let told = |models: &[&TdtModel], load: &Load<'_>, cancelled: &(dyn Fn() -> bool + Sync)| {
            transcribe(models, (&utterances, &[]), 2.0, load, cancelled).map_err(|error| error.to_string())
        };
        let all = [&model, &replica, &model];
        assert_eq!(told(&all, &wrong, &go_on), told(&[&model], &wrong, &go_on));
        assert_eq!(told(&all, &load, &|| true), Err(EvaluationError::Cancelled.to_string()));
        assert!(told(&[], &load, &go_on).is_err());
    }

    #[test]
    fn the_sample_is_stratified_and_does_not_depend_on_the_order() {
        let utterances: Vec<_> = (0..30)
            .map(|i| utterance(["hi", "ta", "en"][i % 3], i, 1.0))
            .chain([utterance("or", 99, 1.0)])
            .collect();
        let choose = |list: &[Utterance], n| {
            sample(
                list.iter()
                    .map(|u| (u.lang.as_str(), u.segment_id.as_str(), u.text.as_str())),
                n,
            )
        };
        let ids = |list: &[Utterance]| {
            let mut ids: Vec<String> = choose(list, 4)
                .into_iter()
                .map(|i| list[i].segment_id.clone())
                .collect();
            ids.sort();
            ids
        };
        let chosen = ids(&utterances);
        assert_eq!(chosen.len(), 13);
        let mut turned = utterances.clone();
        turned.reverse();
        assert_eq!(ids(&turned), chosen);
        assert_eq!(choose(&utterances, 0).len(), 31);
    }
}
