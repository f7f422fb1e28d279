//! A cache-aware model against NeMo's, whole recordings and step by step.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use flow_kernels::attention::merge_heads;
use flow_kernels::testing::max_difference;
use serde_json::Value;

use super::*;
use crate::checkpoint::OpenModel;
use crate::config::{AttentionContext, ModelConfig};
use crate::decoding::DecodingSettings;
use crate::heads::HeadKind;
use crate::testing::golden;
use flow_nn::tensor_files::read_packed;

const SET: &str = "streaming";

fn model() -> TdtModel {
    TdtModel::load(&golden::file_of(SET, "model.nemo"), DType::F32, &Device::Cpu).unwrap()
}

fn tensors() -> HashMap<String, Tensor> {
    golden::tensors_of(&golden::file_of(SET, "streaming.safetensors"))
}

fn facts() -> Value {
    serde_json::from_slice(&read_packed(&golden::file_of(SET, "streaming.json"), 1).unwrap()).unwrap()
}

fn waves() -> Vec<Vec<f32>> {
    golden::waves_in(&golden::file_of(SET, "audio"), "eval")
}

fn numbers(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// As the golden data name a context.
fn key(context: ChunkContext) -> String {
    let [left, right] = [context.left, context.right].map(Option::unwrap);
    format!("{left}_{right}")
}

fn near(name: &str, found: &Tensor, expected: &Tensor) {
    let difference = max_difference(found, expected);
    let magnitude = golden::magnitude(expected);
    assert!(
        difference < golden::FROM_WAVES * magnitude,
        "{name}: {difference:e} of {magnitude}"
    );
}

fn decoded_by(model: &mut TdtModel, head: HeadKind) {
    let settings = DecodingSettings {
        head: Some(head),
        ..DecodingSettings::default()
    };
    model.set_decoding(settings).unwrap();
}

/// Feature frames of a recording with the frame of zeros that NeMo's stream has behind them, (frames, mels).
fn features(model: &TdtModel, wave: &[f32]) -> Vec<f32> {
    let features = model.front_end.compute(&[wave], None).unwrap();
    let frame = |t: usize| (0..features.bands).map(move |band| (band, t));
    let places = (0..features.frames).flat_map(frame);
    places
        .map(|(band, t)| features.values[band * features.frames + t])
        .collect()
}

/// The chunks of NeMo's stream: a last one of fewer than 8 frames is dropped.
fn nemos_chunks(context: ChunkContext, frames: usize) -> Vec<usize> {
    let (mut chunks, mut left) = (Vec::new(), frames);
    loop {
        let whole = if chunks.is_empty() { 1 } else { 8 } + 8 * context.right.unwrap();
        let least = if chunks.is_empty() { 1 } else { 8 };
        if left < least {
            return chunks;
        }
        chunks.push(whole.min(left));
        left -= whole.min(left);
    }
}

#[test]
fn settings_are_read_and_written_back() {
    let model = model();
    assert!(model.unused_tensors().is_empty(), "{:?}", model.unused_tensors());
    let config = &model.config;
    assert!(config.is_cache_aware());
    assert_eq!(config.heads(), "RNN-T and CTC");
    let contexts: Vec<[usize; 2]> = serde_json::from_value(facts()["contexts"].clone()).unwrap();
    let found = config.encoder.causal.contexts.iter();
    assert_eq!(
        found.map(|c| [c.left.unwrap(), c.right.unwrap()]).collect::<Vec<_>>(),
        contexts
    );
    for yaml in [config.to_nemo_yaml().unwrap(), config.to_nemo_archive_yaml().unwrap()] {
        let again = ModelConfig::from_nemo_yaml(&yaml).unwrap();
        assert_eq!(
            (&again.encoder, &again.preprocessor),
            (&config.encoder, &config.preprocessor)
        );
    }
    // Written without the document that it was read from.
    let again: Value = serde_json::to_value(config).unwrap();
    let mut without = again.clone();
    without["source"] = serde_json::json!({});
    let without: ModelConfig = serde_json::from_value(without).unwrap();
    let again = ModelConfig::from_nemo_yaml(&without.to_nemo_yaml().unwrap()).unwrap();
    assert_eq!(
        (&again.encoder, &again.preprocessor),
        (&config.encoder, &config.preprocessor)
    );

    let changed = |from: &str, to: &str| {
        let yaml = config.to_nemo_yaml().unwrap();
        assert!(yaml.contains(from), "{from}");
        ModelConfig::from_nemo_yaml(&yaml.replacen(from, to, 1))
            .unwrap_err()
            .to_string()
    };
    let left = format!("- - {}\n", contexts[0][0]);
    for (from, to, expected) in [
        (&left[..], "- - 71\n", "encoder.att_context_size"),
        (&left, "- - -2\n", "encoder.att_context_size"),
        (&left, "- - 99999999999999\n", "encoder.att_context_size"),
        (
            "chunked_limited",
            "chunked_limited_with_rc",
            "encoder.att_context_style",
        ),
        (
            "conv_norm_type: layer_norm",
            "conv_norm_type: batch_norm",
            "encoder.conv_context_size",
        ),
        (
            "conv_context_size: causal",
            "conv_context_size: anticausal",
            "encoder.conv_context_size",
        ),
        (
            "causal_downsampling: true",
            "causal_downsampling: 1.5",
            "encoder.causal_downsampling",
        ),
        (
            "att_context_probs: null",
            "att_context_probs: [0.5, 0.6]",
            "encoder.att_context_probs",
        ),
        ("normalize: NA", "normalize: all_features", "preprocessor.normalize"),
    ] {
        let error = changed(from, to);
        assert!(error.contains(expected), "{to}: {error}");
    }
}

/// The model with other contexts, the first of which is that of whole recordings.
fn model_in(contexts: &[(Option<usize>, Option<usize>)]) -> TdtModel {
    let opened = OpenModel::open(&golden::file_of(SET, "model.nemo")).unwrap();
    let mut config = ModelConfig::from_nemo_yaml(&opened.config_yaml).unwrap();
    let contexts = contexts.iter().map(|&(left, right)| ChunkContext { left, right });
    config.encoder.causal.contexts = contexts.collect();
    config.encoder.attention_context = AttentionContext::Chunks(config.encoder.causal.contexts[0]);
    TdtModel::from_open(opened, config, DType::F32, DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn contexts_without_limits_are_read_and_written_back() {
    let yaml = model().config.to_nemo_yaml().unwrap();
    let begin = yaml.find("  att_context_size:\n").unwrap();
    let end = begin + yaml[begin..].find("  att_context_style").unwrap();
    let read = |list: &str| {
        let yaml = format!("{}  att_context_size: {list}\n{}", &yaml[..begin], &yaml[end..]);
        ModelConfig::from_nemo_yaml(&yaml)
    };
    for (list, streamed) in [
        (
            "[[-1, -1], [70, 13], [-1, 13], [-1, 0], [70, -1]]",
            "[70, 13] [-1, 13] [-1, 0]",
        ),
        ("[-1, 6]", "[-1, 6]"),
        ("[[-1, 6]]", "[-1, 6]"),
        ("[-1, -1]", ""),
        ("[[0, -1], [-1, -1]]", ""),
    ] {
        let config = read(list).unwrap();
        let names = |contexts: &[ChunkContext]| contexts.iter().map(ToString::to_string).collect::<Vec<_>>();
        let all = names(&config.encoder.causal.contexts).join(", ");
        assert_eq!(
            format!("[{all}]").replace("[[", "[").replace("]]", "]"),
            list.replace("[[", "[").replace("]]", "]")
        );
        let found = config.streamed_contexts();
        assert_eq!(names(found.as_deref().unwrap_or_default()).join(" "), streamed);
        assert_eq!(config.is_cache_aware(), !streamed.is_empty());
        if let Err(why) = found {
            assert!(why.to_string().contains("[-1, -1]"), "{why}");
        }
        let again = ModelConfig::from_nemo_yaml(&config.to_nemo_yaml().unwrap()).unwrap();
        assert_eq!(again.encoder, config.encoder);
        let again: ModelConfig = serde_json::from_value(serde_json::to_value(&config).unwrap()).unwrap();
        assert_eq!(again.encoder, config.encoder);
    }
    for wrong in [
        "[-2, 0]",
        "[-1, -2]",
        "[-1]",
        "[-1, 0, 0]",
        "[-1, 100001]",
        "[[-1, 0], -1]",
        "[-1, 1.5]",
        "[-1, ~]",
    ] {
        let error = read(wrong).unwrap_err().to_string();
        assert!(
            error.contains("encoder.att_context_size") && error.contains("-1 (no limit)"),
            "{wrong}: {error}"
        );
    }
}

/// No limit is a limit that is not reached; and the recording's length as a chunk is no limit to the right.
#[test]
fn contexts_without_limits_see_all() {
    let waves = waves();
    let signals: Vec<&[f32]> = waves.iter().map(Vec::as_slice).collect();
    let longest = model().encoded_frames(waves.iter().map(Vec::len).max().unwrap());
    for (no_limit, limit) in [
        ((None, Some(3)), (Some(longest.next_multiple_of(4)), Some(3))),
        ((None, Some(0)), (Some(longest), Some(0))),
        ((None, None), (Some(0), Some(longest))),
        ((Some(longest), None), (Some(0), Some(longest))),
    ] {
        let mut model = model_in(&[no_limit, limit]);
        let [found, expected] = [no_limit, limit].map(|(left, right)| {
            model.set_context(ChunkContext { left, right }).unwrap();
            model.encode(&signals).unwrap().0
        });
        assert!(
            max_difference(&found, &expected) < 1e-6 * golden::magnitude(&expected),
            "{no_limit:?}"
        );
    }
    let mut model = model_in(&[(None, None), (Some(2), None)]);
    let [all, few] = [0, 1].map(|index| {
        let context = model.config.encoder.causal.contexts[index];
        model.set_context(context).unwrap();
        model.encode(&signals).unwrap().0
    });
    assert!(max_difference(&all, &few) > 1e-2 * golden::magnitude(&all));
}

/// Several chunks and recordings, against whole recordings; without look-ahead, where these differ, against a limit that is not
/// reached.
#[test]
fn what_has_no_limit_before_is_heard_step_by_step() {
    let waves = waves();
    let longest = model().encoded_frames(waves.iter().map(Vec::len).max().unwrap());
    let encoded = |model: &TdtModel, context: ChunkContext| -> Vec<Tensor> {
        let plan = model.chunk_plan(context).unwrap();
        let each = waves.iter().map(|wave| {
            let mut stream = model.chunk_stream(Arc::new(model.decoding.clone())).unwrap();
            let mut found = Vec::new();
            let mut keep = |frames: &Tensor| found.push(frames.clone());
            for (number, samples) in wave.chunks(3_001).enumerate() {
                let next = NextSamples {
                    samples,
                    is_last: (number + 1) * 3_001 >= wave.len(),
                    speech: None,
                };
                let streams = &mut [(&mut stream, next)];
                model.hear_seen(&plan, streams, None, Some(&mut keep)).unwrap();
            }
            Tensor::cat(&found, 0).unwrap()
        });
        each.collect()
    };
    for right in [0, 1, 6] {
        let context = ChunkContext {
            left: None,
            right: Some(right),
        };
        let limited = ChunkContext::limited(longest.next_multiple_of(right + 1), right);
        let mut model = model_in(&[
            (None, None),
            (context.left, context.right),
            (limited.left, limited.right),
        ]);
        model.set_context(context).unwrap();
        let found = encoded(&model, context);
        let same = encoded(&model, limited);
        for ((wave, found), same) in waves.iter().zip(&found).zip(&same) {
            assert!(
                max_difference(found, same) < 1e-6 * golden::magnitude(same),
                "{context}"
            );
            if right > 0 {
                let whole = model.encode(&[wave]).unwrap().0.get(0).unwrap();
                near(&context.to_string(), found, &whole);
            }
        }
    }
}

#[test]
fn whole_recordings_are_nemos_in_each_context() {
    let mut model = model();
    let (golden, facts, waves) = (tensors(), facts(), waves());
    let signals: Vec<&[f32]> = waves.iter().map(Vec::as_slice).collect();
    let of_one = model.front_end.compute(&signals[1..2], None).unwrap();
    let mel = of_one.tensor(DType::F32, &Device::Cpu).unwrap();
    let expected = &golden["mel1"];
    let frames = expected.dim(1).unwrap();
    assert_eq!(of_one.lengths, [frames]);
    // As in `features`: rounding of NeMo's transform in quiet bands.
    let found = mel.get(0).unwrap().narrow(1, 0, frames).unwrap();
    assert!(max_difference(&found, expected) < 6e-5 * golden::magnitude(expected));
    let encoder = &model.encoder;
    let (rows, time, valid, _) = encoder.subsampling.forward(&model.parameters, &mel, &[frames]).unwrap();
    assert_eq!(
        (time, valid[0]),
        (
            model.config.encoder.subsampled(frames + 1),
            golden["pre_encode1"].dim(0).unwrap()
        )
    );
    near(
        "sub-sampling",
        &rows.narrow(0, 0, valid[0]).unwrap(),
        &golden["pre_encode1"],
    );

    for context in model.config.encoder.causal.contexts.clone() {
        model.set_context(context).unwrap();
        let (encoded, lengths) = model.encode(&signals).unwrap();
        let facts = &facts["per_context"][key(context)];
        assert_eq!(
            lengths,
            serde_json::from_value::<Vec<usize>>(facts["offline_len"].clone()).unwrap()
        );
        for (utterance, &length) in lengths.iter().enumerate() {
            let found = encoded.get(utterance).unwrap().narrow(0, 0, length).unwrap();
            let name = format!("{}.offline{utterance}", key(context));
            near(&name, &found, &golden[&name]);
        }
        for (head, ids) in [
            (HeadKind::Transducer, "offline_rnnt_ids"),
            (HeadKind::Ctc, "offline_ctc_ids"),
        ] {
            decoded_by(&mut model, head);
            for (utterance, found) in model.transcribe(&signals).unwrap().iter().enumerate() {
                assert_eq!(found.ids, numbers(&facts[ids][utterance]), "{context} {ids}");
                if head == HeadKind::Transducer {
                    assert_eq!(found.frames, numbers(&facts["offline_rnnt_frames"][utterance]));
                    assert_eq!(found.text, facts["offline_text"][utterance].as_str().unwrap());
                }
            }
        }
        decoded_by(&mut model, HeadKind::Transducer);
    }
    assert!(model.set_context(ChunkContext::limited(10, 4)).is_err());
}

#[test]
fn steps_are_nemos_with_what_they_keep() {
    let model = model();
    let (golden, facts, waves) = (tensors(), facts(), waves());
    let bands = model.config.preprocessor.features;
    let heads = [HeadKind::Transducer, HeadKind::Ctc];
    for context in model.config.encoder.causal.contexts.clone() {
        let plan = model.chunk_plan(context).unwrap();
        for (utterance, wave) in waves.iter().enumerate() {
            let facts = &facts["per_context"][key(context)][format!("stream_utt{utterance}")];
            let features = features(&model, wave);
            let mut cache = model.encoder.cache(&model.parameters).unwrap();
            let mut searches = heads.map(|head| {
                let mut model = self::model();
                decoded_by(&mut model, head);
                let state = model.greedy_state(&model.decoding).unwrap();
                (model, state, Hypothesis::default())
            });
            let chunks = nemos_chunks(context, features.len() / bands);
            assert_eq!(
                Some(chunks.len() as u64),
                facts["steps_count"].as_u64(),
                "{context} {utterance}"
            );
            let steps = facts["steps"].as_array().unwrap();
            let (mut first, mut all, mut frames) = (0, Vec::new(), 0);
            for (step, &length) in chunks.iter().enumerate() {
                assert!(length <= plan.next_chunk(&cache));
                let chunk = &features[first * bands..(first + length) * bands];
                first += length;
                let step_of = &mut [(&mut cache, chunk)];
                let encoded = model.encoder.step(&model.parameters, &plan, step_of).unwrap().remove(0);
                let name = format!("{}.utt{utterance}.step{step}", key(context));
                if let Some(expected) = golden.get(&format!("{name}.encoded")) {
                    near(&name, &encoded, &expected.get(0).unwrap().t().unwrap());
                }
                if let Some(kept) = golden.get(&format!("{name}.cache_last_time")) {
                    let channel = &golden[&format!("{name}.cache_last_channel_tail")];
                    let most = context.rows_kept();
                    for (number, layer) in cache.layers().iter().enumerate() {
                        let of = |kept: &Tensor| kept.get(number).unwrap().get(0).unwrap();
                        near(&name, &layer.convolution.t().unwrap(), &of(kept));
                        // NeMo keeps what keys are projected from.
                        let get = |part: &str| {
                            let name = format!("encoder.layers.{number}.self_attn.linear_k.{part}");
                            model.parameters.get(model.parameters.id(&name).unwrap())
                        };
                        let expected = of(channel).matmul(&get("weight").t().unwrap()).unwrap();
                        let expected = expected.broadcast_add(get("bias")).unwrap();
                        near(
                            &name,
                            &merge_heads(&layer.attention.keys(most).unwrap().unwrap(), None).unwrap(),
                            &expected,
                        );
                    }
                }
                for (model, state, found) in &mut searches {
                    let next = model.decode_on(&model.decoding, &encoded, state, None).unwrap();
                    found.ids.extend(next.ids);
                    found.frames.extend(next.frames.iter().map(|frame| frames + frame));
                }
                if let Some(expected) = steps.iter().find(|expected| expected["step"] == step) {
                    assert_eq!(searches[0].2.ids, numbers(&expected["rnnt_ids"][0]), "{name}");
                    assert_eq!(Some(encoded.dim(0).unwrap() as u64), expected["enc_len"][0].as_u64());
                }
                frames += encoded.dim(0).unwrap() as u32;
                all.push(encoded);
            }
            assert_eq!(searches[0].2.ids, numbers(&facts["final_rnnt_ids"][0]), "{context}");
            assert_eq!(
                searches[0].2.frames,
                numbers(&facts["final_rnnt_frames"][0]),
                "{context}"
            );
            assert_eq!(searches[1].2.ids, numbers(&facts["final_ctc_ids"][0]), "{context}");
            let all = Tensor::cat(&all, 0).unwrap();
            assert_eq!(Some(all.dim(0).unwrap() as u64), facts["stream_frames"].as_u64());
            if utterance == 0 {
                near("stream", &all, &golden[&format!("{}.utt0.stream_all", key(context))]);
            }
        }
    }
}

#[test]
fn recordings_of_a_batch_are_nemos() {
    let model = model();
    let (golden, waves) = (tensors(), waves());
    let (name, expected) = golden.iter().find(|(name, _)| name.ends_with(".both.stream1")).unwrap();
    let mut contexts = model.config.encoder.causal.contexts.iter().copied();
    let context = contexts.find(|&context| name.starts_with(&format!("{}.", key(context))));
    let plan = model.chunk_plan(context.unwrap()).unwrap();
    let bands = model.config.preprocessor.features;
    let features: Vec<Vec<f32>> = waves.iter().map(|wave| self::features(&model, wave)).collect();
    let mut caches: Vec<_> = waves
        .iter()
        .map(|_| model.encoder.cache(&model.parameters).unwrap())
        .collect();
    let mut at = [0, 0];
    let mut found = Vec::new();
    while at[0] < features[0].len() {
        let mut chunks = Vec::new();
        for ((cache, features), at) in caches.iter_mut().zip(&features).zip(&mut at) {
            let length = (plan.next_chunk(cache) * bands).min(features.len() - *at);
            if length > 0 {
                chunks.push((cache, &features[*at..*at + length]));
            }
            *at += length;
        }
        found.extend(
            model
                .encoder
                .step(&model.parameters, &plan, &mut chunks)
                .unwrap()
                .into_iter()
                .nth(1),
        );
    }
    near(name, &Tensor::cat(&found, 0).unwrap(), expected);
}

/// Whatever the blocks of samples, and beside other recordings: the frames of a stream are those of the whole recording, but for
/// a context without look-ahead, where NeMo's differ, too.
#[test]
fn what_is_heard_does_not_depend_on_the_blocks() {
    let mut model = model();
    let waves = waves();
    for context in model.config.encoder.causal.contexts.clone() {
        let plan = model.chunk_plan(context).unwrap();
        model.set_context(context).unwrap();
        let whole: Vec<Hypothesis> = waves
            .iter()
            .map(|wave| model.transcribe(&[wave]).unwrap().remove(0))
            .collect();
        let hear = |blocks: [usize; 2]| {
            let mut streams = [
                model.chunk_stream(Arc::new(model.decoding.clone())).unwrap(),
                model.chunk_stream(Arc::new(model.decoding.clone())).unwrap(),
            ];
            let mut found = [Hypothesis::default(), Hypothesis::default()];
            let mut at = [0, 0];
            while (0..2).any(|index| at[index] < waves[index].len()) {
                let mut next = Vec::new();
                let mut indices = Vec::new();
                for (index, stream) in streams.iter_mut().enumerate() {
                    let end = waves[index].len().min(at[index] + blocks[index]);
                    if at[index] < end {
                        let is_last = end == waves[index].len();
                        let samples = &waves[index][at[index]..end];
                        next.push((
                            stream,
                            NextSamples {
                                samples,
                                is_last,
                                speech: None,
                            },
                        ));
                        indices.push(index);
                        at[index] = end;
                    }
                }
                let mut scores = 0;
                let mut observe = |_: usize, _: u32, _: &[f32]| scores += 1;
                let heard = model.hear(&plan, &mut next, Some(&mut observe)).unwrap();
                assert_eq!(scores, heard.iter().map(|next| next.ids.len()).sum::<usize>());
                for (index, next) in indices.into_iter().zip(heard) {
                    found[index].ids.extend(next.ids);
                    found[index].frames.extend(next.frames);
                }
                for stream in &streams {
                    let most = plan.next_chunk(&stream.cache) * model.config.preprocessor.features;
                    assert!(stream.waiting.len() < most);
                }
            }
            for (stream, wave) in streams.iter_mut().zip(&waves) {
                assert_eq!(stream.frames(), model.encoded_frames(wave.len()), "{context}");
                let more = NextSamples {
                    samples: &[],
                    is_last: false,
                    speech: None,
                };
                assert!(model.hear(&plan, &mut [(stream, more)], None).is_err());
            }
            found.map(|found| (found.ids, found.frames))
        };
        let found = hear([1_000, 333]);
        for blocks in [[160, 16_000], [usize::MAX / 2; 2], [12_345, 1]] {
            assert_eq!(hear(blocks), found, "{context} {blocks:?}");
        }
        if context.right != Some(0) {
            for ((ids, frames), whole) in found.iter().zip(&whole) {
                assert_eq!((ids, frames), (&whole.ids, &whole.frames), "{context}");
            }
        }
    }
}

#[test]
fn frames_of_a_beginning_are_those_of_the_whole_once_their_samples_are_there() {
    let model = model();
    let wave = waves().swap_remove(0);
    let mut whole = Vec::new();
    let mut stream = model.feature_stream();
    stream.feed(&wave, &mut whole).unwrap();
    for fact in facts()["mel_of_prefix"].as_array().unwrap() {
        let number = |key: &str| fact[key].as_u64().unwrap() as usize;
        let (mut stream, mut found) = (model.feature_stream(), Vec::new());
        stream.feed(&wave[..number("samples")], &mut found).unwrap();
        assert_eq!(
            found.len() / model.config.preprocessor.features,
            number("first_frame_that_differs")
        );
        assert_eq!(found[..], whole[..found.len()]);
    }
}

#[test]
fn wrong_chunks_contexts_and_models_are_refused() {
    let model = model();
    let context = model.config.encoder.causal.contexts[0];
    let plan = model.chunk_plan(context).unwrap();
    let bands = model.config.preprocessor.features;
    let mut cache = model.encoder.cache(&model.parameters).unwrap();
    for length in [0, 1, bands + 1, (plan.next_chunk(&cache) + 1) * bands] {
        let features = vec![0.0; length];
        let chunks = &mut [(&mut cache, &features[..])];
        let error = model.encoder.step(&model.parameters, &plan, chunks).unwrap_err();
        assert!(error.to_string().contains("frames of"), "{error}");
    }
    assert!(model.hear(&plan, &mut [], None).unwrap().is_empty());
    let error = model.chunk_plan(ChunkContext::limited(3, 2)).unwrap_err().to_string();
    assert!(
        error.contains("[3, 2]") && error.contains(&context.to_string()),
        "{error}"
    );
    // No look-ahead has an end.
    let endless = ChunkContext {
        left: None,
        right: None,
    };
    let mixed = model_in(&[(None, None), (Some(70), Some(1)), (None, Some(0))]);
    let error = mixed.chunk_plan(endless).unwrap_err().to_string();
    assert!(
        error.contains("[-1, -1]") && error.ends_with("in [70, 1], [-1, 0]"),
        "{error}"
    );
    let error = model_in(&[(None, None)]).chunk_plan(endless).unwrap_err().to_string();
    assert!(error.contains("its contexts, [-1, -1]"), "{error}");
    let other = TdtModel::load(&golden::file("model.nemo"), DType::F32, &Device::Cpu).unwrap();
    assert!(
        other
            .chunk_plan(context)
            .unwrap_err()
            .to_string()
            .contains("cache-aware")
    );
    // A recording without samples.
    let mut stream = model.chunk_stream(Arc::new(model.decoding.clone())).unwrap();
    let nothing = NextSamples {
        samples: &[],
        is_last: true,
        speech: None,
    };
    assert!(
        model.hear(&plan, &mut [(&mut stream, nothing)], None).unwrap()[0]
            .ids
            .is_empty()
    );
}
