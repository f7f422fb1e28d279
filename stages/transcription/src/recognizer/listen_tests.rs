//! What is heard as it is spoken, against whole recordings.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use flow_nn::testing::unpacked_copy;
use flow_storage::Storage;

use super::*;
use crate::test_data::{bundled_model, root};

fn golden(name: &str) -> PathBuf {
    let folder = std::env::var_os("FLOW_TEST_GOLDEN_STREAMING")
        .map_or_else(|| root().join("tests/data/golden/streaming"), PathBuf::from);
    let place = std::env::current_exe().unwrap().with_file_name("golden-listen");
    unpacked_copy(&folder.join(name), &place).unwrap()
}

fn load(path: &Path) -> Recognizer {
    Recognizer::load(path, DType::F32, &Device::Cpu).unwrap()
}

fn waves() -> Vec<Vec<f32>> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(golden("audio"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("eval"))
        .collect();
    paths.sort();
    paths
        .iter()
        .map(|path| {
            flow_audio::samples::samples(&Storage::default(), path, 100.0)
                .unwrap()
                .unwrap()
        })
        .collect()
}

/// Hears recordings beside each other in blocks of `block` samples; all words of each, and the partial ones on the way.
fn hear(
    recognizer: &Recognizer,
    contexts: &[ChunkContext],
    waves: &[Vec<f32>],
    block: usize,
) -> Vec<(Vec<Word>, String)> {
    let mut listeners: Vec<Listener> = contexts
        .iter()
        .map(|&context| recognizer.listen(context, &DecodingRequest::default()).unwrap())
        .collect();
    let mut found: Vec<(Vec<Word>, String)> = vec![Default::default(); waves.len()];
    let longest = waves.iter().map(Vec::len).max().unwrap();
    for at in (0..longest).step_by(block) {
        let mut indices = Vec::new();
        let mut spoken = Vec::new();
        for (index, (listener, wave)) in listeners.iter_mut().zip(waves).enumerate() {
            if at < wave.len() {
                let end = wave.len().min(at + block);
                indices.push(index);
                spoken.push(Spoken {
                    listener,
                    samples: &wave[at..end],
                    is_last: end == wave.len(),
                });
            }
        }
        for (index, next) in indices.into_iter().zip(recognizer.hear_next(&mut spoken).unwrap()) {
            assert_eq!(next.heard.words.len(), next.heard.tokens.len());
            found[index].0.extend(next.heard.words);
            found[index]
                .1
                .extend(next.partial.into_iter().map(|word| word.word + " "));
        }
    }
    found
}

#[test]
fn words_are_those_of_the_whole_recording_whatever_the_blocks_are() {
    let mut recognizer = load(&golden("model.nemo"));
    let waves = waves();
    for context in recognizer.contexts().to_vec() {
        recognizer.model.set_context(context).unwrap();
        let contexts = vec![context; waves.len()];
        let found = hear(&recognizer, &contexts, &waves, 1_600);
        for (block, alone) in [(77, false), (16_000, true)] {
            let again = match alone {
                true => waves
                    .iter()
                    .flat_map(|wave| hear(&recognizer, &[context], std::slice::from_ref(wave), block))
                    .collect(),
                false => hear(&recognizer, &contexts, &waves, block),
            };
            for (found, again) in found.iter().zip(again) {
                assert_eq!(found.0, again.0, "{context} {block}");
            }
        }
        for (wave, (words, partial)) in waves.iter().zip(&found) {
            let signals: &[&[f32]] = &[wave];
            let whole = recognizer
                .decode_with((signals, &[]), &recognizer.model.decoding)
                .unwrap()
                .remove(0);
            let texts = |words: &[Word]| words.iter().map(|word| word.word.clone()).collect::<Vec<_>>();
            assert!(!words.is_empty() && !partial.is_empty());
            assert_eq!(texts(words), texts(&whole.words), "{context}");
            for (found, whole) in words.iter().zip(&whole.words) {
                assert_eq!(
                    (found.start, found.end),
                    (whole.start, whole.end),
                    "{context} {}",
                    found.word
                );
                assert!(found.confidence.is_some());
            }
        }
    }
    // Sessions in different contexts beside each other.
    let contexts: Vec<ChunkContext> = recognizer.contexts().iter().rev().take(waves.len()).copied().collect();
    let together = hear(&recognizer, &contexts, &waves, 1_600);
    for ((context, wave), found) in contexts.iter().zip(&waves).zip(together) {
        assert_eq!(
            hear(&recognizer, &[*context], std::slice::from_ref(wave), 1_600)[0],
            found
        );
    }
}

#[test]
fn the_latency_chooses_the_context() {
    let recognizer = load(&golden("model.nemo"));
    let mut contexts = recognizer.contexts().to_vec();
    assert_eq!(recognizer.context_for(None).unwrap(), contexts[0]);
    contexts.sort_by_key(|context| context.right);
    for context in &contexts {
        let latency = recognizer.latency(*context);
        assert!((latency - 0.08 * context.chunk().unwrap() as f64).abs() < 1e-9);
        assert_eq!(recognizer.context_for(Some(latency)).unwrap(), *context);
        assert_eq!(recognizer.context_for(Some(latency + 0.03)).unwrap(), *context);
    }
    assert_eq!(recognizer.context_for(Some(0.001)).unwrap(), contexts[0]);
    assert_eq!(recognizer.context_for(Some(1e9)).unwrap(), contexts[contexts.len() - 1]);
    // Contexts without limits: none that sees all that follows is chosen.
    let mut recognizer = recognizer;
    let mut with = |contexts: &[(Option<usize>, Option<usize>)], latency: Option<f64>| {
        let contexts = contexts.iter().map(|&(left, right)| ChunkContext { left, right });
        recognizer.model.config.encoder.causal.contexts = contexts.collect();
        let found = recognizer.context_for(latency);
        found.map_or_else(|why| why.to_string(), |context| context.to_string())
    };
    let mixed = [
        (None, None),
        (Some(70), Some(0)),
        (None, Some(0)),
        (None, Some(6)),
        (Some(70), Some(6)),
        (Some(70), None),
    ];
    for (latency, expected) in [(None, "[70, 0]"), (Some(0.2), "[-1, 0]"), (Some(1e9), "[-1, 6]")] {
        assert_eq!(with(&mixed, latency), expected, "{latency:?}");
    }
    let error = with(&mixed[..1], None);
    assert!(
        error.contains("`model`") && error.contains("its contexts, [-1, -1], a frame sees all"),
        "{error}"
    );
}

#[test]
fn what_cannot_be_heard_is_refused() {
    let recognizer = load(&golden("model.nemo"));
    let context = recognizer.contexts()[0];
    let mut listener = recognizer.listen(context, &DecodingRequest::default()).unwrap();
    let hear = |listener: &mut Listener, samples: &[f32], is_last: bool| {
        let spoken = &mut [Spoken {
            listener,
            samples,
            is_last,
        }];
        recognizer.hear_next(spoken)
    };
    assert!(
        hear(&mut listener, &[0.0, f32::NAN], false)
            .unwrap_err()
            .to_string()
            .contains("not a number")
    );
    hear(&mut listener, &[0.0; 10], true).unwrap();
    assert!(
        hear(&mut listener, &[0.0], false)
            .unwrap_err()
            .to_string()
            .contains("ended")
    );
    assert!(
        recognizer
            .listen(ChunkContext::limited(1, 0), &DecodingRequest::default())
            .is_err()
    );
    let whole = load(&bundled_model());
    assert!(whole.contexts().is_empty());
    assert!(whole.context_for(None).unwrap_err().to_string().contains("cache-aware"));
    assert!(whole.listen(context, &DecodingRequest::default()).is_err());
}

/// The last word of a language without spaces goes on for long: what is kept does not grow.
#[test]
fn tokens_that_wait_for_a_word_to_end_are_bounded() {
    let recognizer = load(&golden("model.nemo"));
    let mut listener = recognizer
        .listen(recognizer.contexts()[0], &DecodingRequest::default())
        .unwrap();
    let inside = (0..).find(|&id| {
        let piece = recognizer.tokenizer.piece(id).unwrap();
        piece.chars().all(char::is_alphabetic)
    });
    for frame in 0..500 {
        listener.pending.ids.push(inside.unwrap());
        listener.pending.frames.push(frame);
        listener.pending.durations.push(1);
        listener.scores.push(TokenScore {
            confidence: 0.5,
            logprob: -1.0,
            is_first_choice: true,
        });
        recognizer.words_next(&mut listener, false).unwrap();
        assert!(listener.pending.ids.len() <= MOST_PENDING + 1);
    }
}

/// How a listener looks for speech.
#[derive(Clone, Copy)]
enum Looks {
    /// It does not, and phrases are boosted everywhere.
    Not,
    /// It finds none.
    Deaf,
    Everywhere,
}

/// Phrases are boosted where voice activity hears speech, however the samples come; in speech the words are as without looking for it.
#[test]
fn phrases_are_not_heard_where_nobody_speaks() {
    let recognizer = load(&golden("model.nemo"));
    let request = DecodingRequest {
        phrases: vec!["night".to_owned(), "teacher".to_owned()],
        boost_weight: Some(100.0),
        ..DecodingRequest::default()
    };
    let hear = |request: &DecodingRequest, samples: &[f32], context: ChunkContext, looks: Looks, block: usize| {
        let mut listener = recognizer.listen(context, request).unwrap();
        match looks {
            Looks::Not => listener.speech = None,
            Looks::Deaf => listener.speech.as_mut().unwrap().end(),
            Looks::Everywhere => {}
        }
        let mut words = Vec::new();
        let blocks = samples.len().div_ceil(block);
        for (number, samples) in samples.chunks(block).enumerate() {
            let spoken = &mut [Spoken {
                listener: &mut listener,
                samples,
                is_last: number + 1 == blocks,
            }];
            words.extend(recognizer.hear_next(spoken).unwrap().remove(0).heard.words);
            let kept = listener.speech.as_ref().map_or(0, SpokenSpeech::kept);
            assert!(kept < 64 + block / 512, "{kept}");
        }
        words
    };
    let mut draw = 7u32;
    let noise: Vec<f32> = (0..64_000)
        .map(|_| {
            draw = draw.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            0.1 * ((draw >> 8) as f32 / (1 << 24) as f32 - 0.5)
        })
        .collect();
    let speech: Vec<f32> = waves().concat();
    for context in recognizer.contexts().to_vec() {
        // What the model hears without phrases.
        let plain = |samples: &[f32]| hear(&DecodingRequest::default(), samples, context, Looks::Not, 1_600);
        let boosted = |samples: &[f32], looks: Looks, block: usize| hear(&request, samples, context, looks, block);
        assert_eq!(boosted(&noise, Looks::Everywhere, 1_600), plain(&noise), "{context}");
        assert_eq!(boosted(&speech, Looks::Deaf, 1_600), plain(&speech), "{context}");
        let everywhere = boosted(&speech, Looks::Not, 1_600);
        assert_ne!(everywhere, plain(&speech), "{context}");
        let found = boosted(&speech, Looks::Everywhere, 1_600);
        // Without look-ahead the first frames of speech come before voice activity hears it.
        if context.right != Some(0) {
            assert_eq!(found, everywhere, "{context}");
        }
        for block in [77, 48_000] {
            assert_eq!(boosted(&speech, Looks::Everywhere, block), found, "{context}, {block}");
        }
    }
}
