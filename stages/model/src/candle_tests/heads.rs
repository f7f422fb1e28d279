//! Heads with their losses.

use candle_core::{D, Device, Result, Tensor};
use candle_nn::rnn::{LSTMConfig, RNN, lstm};
use candle_nn::{Embedding, Module, ops};
use flow_kernels::Noise;

use super::{Case, DTYPES, Variables, declared, random};
use crate::heads::ctc::CtcHead;
use crate::heads::{Head, HeadInput};
use crate::joint::{Joint, JointSizes};
use crate::loss::TdtLoss;
use crate::prediction::Prediction;
use crate::prompt::PromptKernel;
use crate::testing::golden;
use flow_nn::parameters::Mode;

/// The logarithm of the sum of exponentials of numbers.
fn log_sum(terms: &[Tensor]) -> Result<Tensor> {
    Tensor::stack(terms, 0)?.log_sum_exp(0)
}

fn targets() -> Vec<Vec<u32>> {
    vec![vec![4, 4, 0], vec![], vec![6, 1]]
}

#[test]
fn prediction_network() {
    const PREFIX: &str = "decoder.prediction";
    let (vocabulary, width) = (7, 10);
    for dtype in DTYPES {
        let (network, parameters) = declared(dtype, |builder| {
            Prediction::new(vocabulary, width, 2, 0.0, PREFIX, builder)
        });
        let targets = targets();
        let dy = random(&[3, 4, width], dtype, &mut Noise::new(1));
        let case = Case {
            name: "prediction network",
            parameters: &parameters,
            inputs: &[],
            dy: &dy,
            terms: 2 * width,
        };
        case.compare(
            |gradients| {
                let (y, saved) = network.forward(&parameters, &targets, Mode::Evaluate)?;
                network.backward(&parameters, &saved, &dy, gradients)?;
                Ok((y, Vec::new()))
            },
            |v, _| {
                // The row of blank, which also stands for padding, is not learned.
                let table = v.get(&format!("{PREFIX}.embed.weight"));
                let blank = table.narrow(0, vocabulary, 1)?.detach();
                let table = Tensor::cat(&[table.narrow(0, 0, vocabulary)?, blank], 0)?;
                let rows = targets.iter().flat_map(|target| {
                    let tokens = target.iter().copied().chain(std::iter::repeat(vocabulary as u32));
                    std::iter::once(vocabulary as u32).chain(tokens).take(4)
                });
                let rows = Tensor::from_iter(rows, &Device::Cpu)?.reshape((3, 4))?;
                let mut x = Embedding::new(table, width).forward(&rows)?;
                for layer_idx in 0..2 {
                    let config = LSTMConfig {
                        layer_idx,
                        ..Default::default()
                    };
                    let layer = lstm(width, width, config, v.builder().pp(format!("{PREFIX}.dec_rnn.lstm")))?;
                    x = layer.states_to_tensor(&layer.seq(&x)?)?;
                }
                Ok(x)
            },
        );
    }
}

#[test]
fn layers_of_a_language_prompt() {
    let (width, prompts) = (10, 6);
    for dtype in DTYPES {
        let (kernel, parameters) = declared(dtype, |builder| PromptKernel::new(width, prompts, builder));
        let noise = &mut Noise::new(1);
        let (x, dy) = (
            random(&[3, 5, width], dtype, noise),
            random(&[3, 5, width], dtype, noise),
        );
        let case = Case {
            name: "language prompt",
            parameters: &parameters,
            inputs: &[&x],
            dy: &dy,
            terms: 2 * width,
        };
        let chosen = [4, 0, 4];
        case.compare(
            |gradients| {
                let (y, saved) = kernel.forward_each(&parameters, &x, &chosen)?;
                let dx = kernel.backward(&parameters, &saved, &dy, false, gradients)?;
                Ok((y, vec![dx]))
            },
            |v, inputs| {
                let rows = Tensor::new(&chosen.map(|prompt| prompt as u32), &Device::Cpu)?;
                let one_hot = Tensor::eye(prompts, dtype, &Device::Cpu)?.index_select(&rows, 0)?;
                let one_hot = one_hot.unsqueeze(1)?.broadcast_as((3, 5, prompts))?;
                let input = Tensor::cat(&[&inputs[0], &one_hot], 2)?;
                let hidden = v.linear("prompt_kernel.0")?.forward(&input)?.relu()?;
                v.linear("prompt_kernel.2")?.forward(&hidden)
            },
        );
    }
}

/// Losses of utterances: `log_probabilities` (frames, states, tokens and blank) and those of durations of each.
fn transducer_loss(tokens: &Tensor, durations: &[(usize, Option<Tensor>)], target: &[u32]) -> Result<Tensor> {
    let (frames, states, outputs) = tokens.dims3()?;
    let at = |x: &Tensor, t: usize, u: usize, output: usize| x.get(t)?.get(u)?.get(output);
    let duration = |t: usize, u: usize, of: &Option<Tensor>| match of {
        Some(of) => of.get(t)?.get(u),
        None => Tensor::zeros((), tokens.dtype(), &Device::Cpu),
    };
    let is_rnnt = durations.iter().all(|(_, of)| of.is_none());
    let mut forward: Vec<Vec<Option<Tensor>>> = vec![vec![None; states]; frames];
    let mut ends = Vec::new();
    for t in 0..frames {
        for u in 0..states {
            let mut into = Vec::new();
            if (t, u) == (0, 0) {
                into.push(Tensor::zeros((), tokens.dtype(), &Device::Cpu)?);
            }
            for (advance, of) in durations {
                let (blank, label) = if is_rnnt { (1, 0) } else { (*advance, *advance) };
                if let Some(from) = t.checked_sub(blank).filter(|_| blank > 0)
                    && let Some(before) = &forward[from][u]
                {
                    into.push(((before + at(tokens, from, u, outputs - 1)?)? + duration(from, u, of)?)?);
                }
                if let (Some(from), Some(state)) = (t.checked_sub(label), u.checked_sub(1))
                    && let Some(before) = &forward[from][state]
                {
                    into.push(
                        ((before + at(tokens, from, state, target[state] as usize)?)? + duration(from, state, of)?)?,
                    );
                }
            }
            if !into.is_empty() {
                forward[t][u] = Some(log_sum(&into)?);
            }
        }
    }
    for (advance, of) in durations {
        let advance = if is_rnnt { 1 } else { *advance };
        if let Some(from) = frames.checked_sub(advance).filter(|_| advance > 0)
            && let Some(before) = &forward[from][states - 1]
        {
            let blank = at(tokens, from, states - 1, outputs - 1)?;
            ends.push(((before + blank)? + duration(from, states - 1, of)?)?);
        }
    }
    log_sum(&ends)?.neg()
}

#[test]
fn joint_network_with_its_loss() {
    let vocabulary = 7;
    for dtype in DTYPES {
        for (name, durations) in [("TDT", vec![0, 1, 2]), ("RNN-T", vec![])] {
            let sizes = JointSizes {
                encoder: 9,
                prediction: 10,
                hidden: 14,
                vocabulary,
                durations: durations.len(),
                dropout: 0.0,
            };
            let (joint, parameters) = declared(dtype, |builder| Joint::new(&sizes, "joint", builder));
            let settings = TdtLoss {
                rnnt: durations.is_empty(),
                durations: durations.clone(),
                sigma: 0.0,
                fastemit: 0.0,
                clamp: 0.0,
            };
            let noise = &mut Noise::new(2);
            let (encoded, predicted) = (random(&[3, 6, 9], dtype, noise), random(&[3, 4, 10], dtype, noise));
            let (frames, targets, factors) = ([6, 2, 5], targets(), [0.5, 2.0, 1.25]);
            let dy = Tensor::new(&factors, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            // A lattice's longest path and a cell's outputs.
            let case = Case {
                name,
                parameters: &parameters,
                inputs: &[&encoded, &predicted],
                dy: &dy,
                terms: 3 * 6 * 4,
            };
            case.compare(
                |gradients| {
                    let inputs = ((&encoded, &frames[..]), (&predicted, &targets[..]));
                    let found = joint.loss(&parameters, &settings, inputs.0, inputs.1, Mode::Evaluate)?;
                    let (d_encoded, d_predicted) =
                        joint.backward(&parameters, &settings, &found, &factors, false, gradients)?;
                    let losses = Tensor::new(found.losses, &Device::Cpu)?.to_dtype(dtype)?;
                    Ok((losses, vec![d_encoded, Some(d_predicted)]))
                },
                |v, inputs| {
                    let f = v.linear("joint.enc")?.forward(&inputs[0])?.unsqueeze(2)?;
                    let g = v.linear("joint.pred")?.forward(&inputs[1])?.unsqueeze(1)?;
                    let logits = v.linear("joint.joint_net.2")?.forward(&f.broadcast_add(&g)?.relu()?)?;
                    let tokens = ops::log_softmax(&logits.narrow(3, 0, vocabulary + 1)?, D::Minus1)?;
                    let of_durations = match durations.is_empty() {
                        true => None,
                        false => Some(ops::log_softmax(
                            &logits.narrow(3, vocabulary + 1, durations.len())?,
                            D::Minus1,
                        )?),
                    };
                    let losses = targets.iter().zip(frames).enumerate().map(|(b, (target, count))| {
                        let cut = |x: &Tensor| x.get(b)?.narrow(0, 0, count)?.narrow(1, 0, target.len() + 1);
                        let arcs: Vec<(usize, Option<Tensor>)> = match &of_durations {
                            None => vec![(0, None)],
                            Some(all) => {
                                let arc = |(index, &advance)| {
                                    Ok((advance, Some(cut(&all.narrow(3, index, 1)?.squeeze(3)?)?)))
                                };
                                durations.iter().enumerate().map(arc).collect::<Result<_>>()?
                            }
                        };
                        transducer_loss(&cut(&tokens)?, &arcs, target)
                    });
                    Tensor::stack(&losses.collect::<Result<Vec<_>>>()?, 0)
                },
            );
        }
    }
}

/// The loss of an utterance from log-probabilities (frames, tokens and blank).
fn ctc_loss(rows: &Tensor, target: &[u32]) -> Result<Tensor> {
    let (frames, outputs) = rows.dims2()?;
    let blank = outputs as u32 - 1;
    let mut labels = vec![blank];
    labels.extend(target.iter().flat_map(|&token| [token, blank]));
    let at = |t: usize, state: usize| rows.get(t)?.get(labels[state] as usize);
    let mut forward: Vec<Option<Tensor>> = vec![None; labels.len()];
    for t in 0..frames {
        let before = std::mem::replace(&mut forward, vec![None; labels.len()]);
        for (state, sum) in forward.iter_mut().enumerate() {
            if t == 0 {
                *sum = if state < 2 { Some(at(0, state)?) } else { None };
                continue;
            }
            let skips = state >= 2 && labels[state] != blank && labels[state] != labels[state - 2];
            let from = [
                Some(state),
                state.checked_sub(1),
                state.checked_sub(2).filter(|_| skips),
            ];
            let from: Vec<Tensor> = from
                .into_iter()
                .flatten()
                .filter_map(|state| before[state].clone())
                .collect();
            if !from.is_empty() {
                *sum = Some((log_sum(&from)? + at(t, state)?)?);
            }
        }
    }
    let last = labels.len().saturating_sub(2)..labels.len();
    log_sum(&forward[last].iter().flatten().cloned().collect::<Vec<_>>())?.neg()
}

#[test]
fn ctc_head_with_its_loss() {
    let (mut config, _) = golden::model();
    (config.transducer, config.vocab_size, config.encoder.d_model) = (None, 7, 12);
    for dtype in DTYPES {
        let (head, parameters) = declared(dtype, |builder| CtcHead::new(&config, builder));
        let encoded = random(&[3, 6, 12], dtype, &mut Noise::new(3));
        let (lengths, targets, factors) = ([6, 2, 5], targets(), [0.5, 2.0, 1.25]);
        let dy = Tensor::new(&factors, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let case = Case {
            name: "CTC",
            parameters: &parameters,
            inputs: &[&encoded],
            dy: &dy,
            terms: 3 * 6,
        };
        case.compare(
            |gradients| {
                let input = HeadInput {
                    frames: &encoded,
                    lengths: &lengths,
                    targets: &targets,
                    factors: &factors,
                    choices: None,
                };
                let mut pass = head.forward(&parameters, &config, &input, Mode::Evaluate, &mut |_| ())?;
                let losses = Tensor::new(pass.losses(), &Device::Cpu)?.to_dtype(dtype)?;
                Ok((losses, vec![pass.backward_outputs(&parameters, false, gradients)?]))
            },
            |v: &Variables, inputs| {
                let logits = v.linear("decoder.decoder_layers.0")?.forward(&inputs[0])?;
                let rows = ops::log_softmax(&logits, D::Minus1)?;
                let losses = targets
                    .iter()
                    .zip(lengths)
                    .enumerate()
                    .map(|(b, (target, count))| ctc_loss(&rows.get(b)?.narrow(0, 0, count)?, target));
                Tensor::stack(&losses.collect::<Result<Vec<_>>>()?, 0)
            },
        );
    }
}
