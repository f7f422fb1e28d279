//! Greedy search of a transducer on a device: which tokens are emitted, and where each utterance stands, is decided there.
//! The host looks once in [`Search::STEPS`] steps.

use candle_core::{DType, Tensor};

use super::lstm::cuda::lstm_step_rows;
use crate::device::launch::Argument::{Int, Long, Read, Write};
use crate::device::launch::{Grid, fresh, fresh_of, launch, numbers};
use crate::device::to_host;
use crate::error::{Error, Result};
use crate::ops::lstm::LstmWeights;

/// Rows of logits that a step computes, about: a product with fewer takes as long.
const ROWS: usize = 64;
/// The most bytes of logits that are kept for the host.
const MOST_KEPT: usize = 32 << 20;
/// As in `greedy.cu`.
const NOTHING: u32 = u32::MAX;

/// What the search depends on.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// Frames of each duration output; may be empty.
    pub durations: &'a [usize],
    /// The most tokens on one frame.
    pub max_symbols: usize,
    /// Token outputs, of which the last one is blank.
    pub tokens: usize,
}

/// Where an utterance stands: its next frame, and the tokens emitted on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    pub frame: usize,
    pub emitted: usize,
}

/// A token that was emitted.
#[derive(Clone, Debug, PartialEq)]
pub struct Emission {
    pub utterance: usize,
    pub token: u32,
    pub frame: u32,
    pub duration: u32,
    pub logit: f32,
    /// The logits of all tokens, where they are kept.
    pub logits: Vec<f32>,
}

/// The search of a batch. `f` is (batch x frames, joint), the encoder's part of the joint network's hidden layer.
#[derive(Debug)]
pub struct Search {
    f: Tensor,
    batch: usize,
    frames: usize,
    tokens: usize,
    max_symbols: usize,
    /// Frames of each utterance that a step looks at.
    reach: usize,
    /// The most steps until the host looks.
    steps: usize,
    lengths: Tensor,
    durations: Tensor,
    duration_count: usize,
    record: Tensor,
    best: Tensor,
    entering: Tensor,
    moves: Tensor,
    rows: Tensor,
    kept: Option<Tensor>,
}

impl Search {
    /// Steps until the host looks, at most.
    pub const STEPS: usize = 32;

    /// Of utterances of this many frames each, which are at `places`; with `keep` the logits behind each token are kept.
    ///
    /// # Errors
    /// Where sizes do not fit, or the device fails.
    pub fn new(f: &Tensor, lengths: &[usize], places: &[Place], rules: Rules, keep: bool) -> Result<Self> {
        let (batch, device) = (lengths.len(), f.device());
        let frames = f.dim(0)? / batch.max(1);
        if batch == 0 || places.len() != batch || f.dim(0)? != batch * frames || rules.tokens == 0 {
            return Err(Error::Input(format!(
                "greedy search: {batch} lengths, {} places and {} frames do not fit",
                places.len(),
                f.dim(0)?
            )));
        }
        if lengths.iter().any(|&length| length > frames) {
            return Err(Error::Input(format!(
                "greedy search: an utterance has more than {frames} frames"
            )));
        }
        let reach = (ROWS / batch).clamp(4, 16);
        let row = (batch * rules.tokens * size_of::<f32>()).max(1);
        let steps = if keep {
            (MOST_KEPT / row).clamp(1, Self::STEPS)
        } else {
            Self::STEPS
        };
        let events = std::iter::repeat_n(0, steps * batch * 4);
        let start = places
            .iter()
            .flat_map(|place| [place.frame, place.emitted])
            .chain(events);
        let of_u32 = |count: usize| fresh_of(DType::U32, count, device);
        // A device has no memory of no bytes.
        let durations = rules
            .durations
            .iter()
            .copied()
            .chain(rules.durations.is_empty().then_some(0));
        Ok(Self {
            f: f.contiguous()?,
            batch,
            frames,
            tokens: rules.tokens,
            max_symbols: rules.max_symbols.max(1),
            reach,
            steps,
            lengths: numbers(lengths.iter().copied(), device)?,
            durations: numbers(durations, device)?,
            duration_count: rules.durations.len(),
            record: numbers(start, device)?,
            best: of_u32(batch * reach * 3)?,
            entering: of_u32(batch)?,
            moves: of_u32(batch)?,
            // Looked at only where something was emitted.
            rows: Tensor::zeros(batch, DType::U32, device)?,
            kept: match keep {
                true => Some(Tensor::zeros((steps, batch, rules.tokens), DType::F32, device)?),
                false => None,
            },
        })
    }

    /// The most steps until the host looks, if the farthest utterance has this many frames left.
    pub fn steps(&self, frames_left: usize) -> usize {
        self.steps.min(frames_left.saturating_mul(self.max_symbols))
    }

    /// The joint network's hidden layer for the frames that a step looks at, given the prediction network's part `g`,
    /// (batch, joint).
    pub fn hidden(&self, g: &Tensor) -> Result<Tensor> {
        let width = self.f.dim(1)?;
        if g.dims() != [self.batch, width] {
            return Err(Error::Input(format!("greedy search: a hidden part of {:?}", g.dims())));
        }
        let out = fresh((self.batch * self.reach, width), &self.f)?;
        let n = out.elem_count();
        let tensors = [Read(&self.f), Read(g), Read(&self.record), Write(&out)];
        let sizes = [width, self.frames, self.reach].map(Int);
        launch(
            "greedy_hidden",
            Grid::elements(n),
            &[&tensors[..], &[Long(n as u64)], &sizes].concat(),
        )?;
        Ok(out)
    }

    /// Goes on by a step, the `step`-th since the host looked, with the logits of the hidden layer, without bias.
    pub fn advance(&self, step: usize, logits: &Tensor, bias: &Tensor) -> Result<()> {
        let width = self.tokens + self.duration_count;
        if logits.dims() != [self.batch * self.reach, width] || bias.elem_count() != width || step >= self.steps {
            return Err(Error::Input(format!("greedy search: logits of {:?}", logits.dims())));
        }
        let inputs = [logits, bias, &self.record, &self.lengths].map(Read);
        let sizes = [self.tokens, self.duration_count, self.reach].map(Int);
        launch(
            "greedy_best",
            Grid::rows(self.batch * self.reach),
            &[&inputs[..], &[Write(&self.best)], &sizes].concat(),
        )?;
        let inputs = [&self.best, &self.lengths, &self.durations].map(Read);
        let outputs = [&self.record, &self.entering, &self.moves, &self.rows].map(Write);
        let blank = self.tokens - 1;
        let most = self.max_symbols.min(i32::MAX as usize);
        let sizes = [self.batch, self.duration_count, self.reach, blank, most, step].map(Int);
        launch(
            "greedy_advance",
            Grid::elements(self.batch),
            &[&inputs[..], &outputs, &sizes].concat(),
        )?;
        if let Some(kept) = &self.kept {
            let inputs = [logits, bias, &self.moves, &self.rows].map(Read);
            let sizes = [self.batch, self.tokens, self.duration_count, step].map(Int);
            launch(
                "greedy_keep",
                Grid::rows(self.batch),
                &[&inputs[..], &[Write(kept)], &sizes].concat(),
            )?;
        }
        Ok(())
    }

    /// The embeddings of what enters the prediction network after a step, rows of `table` (tokens, width).
    pub fn embedded(&self, table: &Tensor) -> Result<Tensor> {
        let (rows, width) = table.dims2()?;
        if rows < self.tokens {
            return Err(Error::Input(format!(
                "greedy search: {rows} embeddings for {} tokens",
                self.tokens
            )));
        }
        let out = fresh((self.batch, width), table)?;
        let n = out.elem_count();
        let tensors = [Read(table), Read(&self.entering), Write(&out)];
        launch(
            "greedy_embed",
            Grid::elements(n),
            &[&tensors[..], &[Long(n as u64), Int(width)]].concat(),
        )?;
        Ok(out)
    }

    /// A step of an LSTM layer for those utterances that emitted something: their rows of `hidden` and `cell`, (batch,
    /// width), are replaced.
    pub fn lstm_step(&self, x: &Tensor, hidden: &Tensor, cell: &Tensor, weights: LstmWeights) -> Result<()> {
        let width = weights.hidden.dim(1)?;
        if hidden.dims() != [self.batch, width] || cell.dims() != hidden.dims() {
            return Err(Error::Input(format!("greedy search: a state of {:?}", hidden.dims())));
        }
        lstm_step_rows(x, hidden, cell, &self.moves, weights)
    }

    /// What was emitted in the last `steps` steps, in their order, and where the utterances stand. Waits for the device.
    pub fn look(&self, steps: usize) -> Result<(Vec<Emission>, Vec<Place>)> {
        let taken = 2 * self.batch + steps * self.batch * 4;
        let record = to_host::<u32>(&self.record.narrow(0, 0, taken)?)?;
        let kept = match &self.kept {
            Some(kept) => to_host::<f32>(&kept.narrow(0, 0, steps)?.flatten_all()?)?,
            None => Vec::new(),
        };
        let (places, events) = record.split_at(2 * self.batch);
        let places = places.as_chunks::<2>().0.iter().map(|&[frame, emitted]| Place {
            frame: frame as usize,
            emitted: emitted as usize,
        });
        let emissions = events.as_chunks::<4>().0.iter().enumerate();
        let emissions = emissions.filter(|(_, event)| event[0] != NOTHING);
        let emissions = emissions.map(|(at, &[token, frame, duration, logit])| Emission {
            utterance: at % self.batch,
            token,
            frame,
            duration,
            logit: f32::from_bits(logit),
            logits: kept.chunks_exact(self.tokens).nth(at).unwrap_or_default().to_vec(),
        });
        Ok((emissions.collect(), places.collect()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::flow_cuda_emulator::DeviceUnderTest;
    use crate::noise::Noise;
    use crate::ops::lstm::lstm_step;
    use crate::product::product;
    use crate::testing::normal;

    /// Of the encoder's part, of the LSTM and of the hidden layer.
    const WIDTH: usize = 6;
    const TOKENS: usize = 7;
    const BLANK: usize = TOKENS - 1;

    fn random(shape: &[usize], noise: &mut Noise) -> Tensor {
        normal(shape, noise).to_dtype(DType::F32).unwrap()
    }

    /// Embeddings, weights and biases of the LSTM, weight and bias of the outputs.
    fn decoder(durations: usize) -> [Tensor; 7] {
        let (mut noise, outputs) = (Noise::new(8), TOKENS + durations);
        let (wide, square) = ([TOKENS, WIDTH], [4 * WIDTH, WIDTH]);
        [
            random(&wide, &mut noise),
            random(&square, &mut noise),
            random(&square, &mut noise),
            random(&[4 * WIDTH], &mut noise),
            random(&[4 * WIDTH], &mut noise),
            random(&[outputs, WIDTH], &mut noise),
            random(&[outputs], &mut noise),
        ]
    }

    fn lstm(decoder: &[Tensor; 7]) -> LstmWeights<'_> {
        LstmWeights {
            input: &decoder[1],
            hidden: &decoder[2],
            input_bias: &decoder[3],
            hidden_bias: &decoder[4],
        }
    }

    /// Output and cell of the LSTM after blank.
    fn start(decoder: &[Tensor; 7], batch: usize) -> Result<(Tensor, Tensor)> {
        let blank = decoder[0].narrow(0, BLANK, 1)?;
        let blank = blank.broadcast_as((batch, WIDTH))?.contiguous()?;
        let state = blank.zeros_like()?;
        lstm_step(&blank, &state, &state.copy()?, lstm(decoder))
    }

    /// What one utterance emits, frame by frame and without a batch: token, frame, duration and logits of tokens.
    fn expected(decoder: &[Tensor; 7], f: &Tensor, rules: Rules) -> Vec<(u32, u32, u32, Vec<f32>)> {
        let (mut g, mut cell) = start(decoder, 1).unwrap();
        let (mut frame, mut emitted, mut found) = (0, 0, Vec::new());
        while frame < f.dim(0).unwrap() {
            let hidden = (f.narrow(0, frame, 1).unwrap() + &g).unwrap().relu().unwrap();
            let logits = product(&hidden, &decoder[5].t().unwrap()).unwrap();
            let logits: Vec<f32> = (logits.get(0).unwrap() + &decoder[6]).unwrap().to_vec1().unwrap();
            let first_largest =
                |of: &[f32]| (0..of.len()).fold(0, |best, next| if of[next] > of[best] { next } else { best });
            let (tokens, durations) = logits.split_at(TOKENS);
            let token = first_largest(tokens);
            let duration = rules.durations.get(first_largest(durations)).copied().unwrap_or(0);
            if token == BLANK {
                (frame, emitted) = (frame + duration.max(1), 0);
                continue;
            }
            found.push((token as u32, frame as u32, duration as u32, tokens.to_vec()));
            emitted += 1;
            if duration > 0 || emitted >= rules.max_symbols {
                (frame, emitted) = (frame + duration.max(1), 0);
            }
            let embedded = decoder[0].narrow(0, token, 1).unwrap();
            (g, cell) = lstm_step(&embedded, &g, &cell, lstm(decoder)).unwrap();
        }
        found
    }

    /// All emissions of a batch, and how often the host looked.
    fn searched(
        decoder: &[Tensor; 7],
        (f, lengths): (&Tensor, &[usize]),
        rules: Rules,
    ) -> Result<(Vec<Emission>, usize)> {
        let (mut all, mut looks) = (Vec::new(), 0);
        let search = Search::new(f, lengths, &vec![Place::default(); lengths.len()], rules, true)?;
        let (g, cell) = start(decoder, lengths.len())?;
        let mut left = lengths.iter().copied().max().unwrap_or(0);
        while left > 0 {
            let steps = search.steps(left);
            for step in 0..steps {
                let logits = product(&search.hidden(&g)?, &decoder[5].t()?)?;
                search.advance(step, &logits, &decoder[6])?;
                search.lstm_step(&search.embedded(&decoder[0])?, &g, &cell, lstm(decoder))?;
            }
            let (emissions, places) = search.look(steps)?;
            all.extend(emissions);
            looks += 1;
            let to_go = places.iter().zip(lengths);
            left = to_go
                .map(|(place, length)| length.saturating_sub(place.frame))
                .max()
                .unwrap_or(0);
        }
        Ok((all, looks))
    }

    /// More frames than a step looks at, more steps than the host waits for, utterances without frames, with and without
    /// durations, and few tokens allowed on a frame.
    #[test]
    fn a_batch_emits_what_its_utterances_emit() {
        let mut repeated = 0;
        for (durations, max_symbols, lengths) in [
            (&[0, 1, 2][..], 3, &[90, 0, 17, 1][..]),
            (&[], 2, &[9, 60]),
            (&[1, 3], 1, &[30]),
            (&[0], 4, &[12; 20]),
        ] {
            let rules = Rules {
                durations,
                max_symbols,
                tokens: TOKENS,
            };
            let frames = *lengths.iter().max().unwrap();
            let f = random(&[lengths.len() * frames, WIDTH], &mut Noise::new(9));
            let decoder = decoder(durations.len());
            let (found, looks) = DeviceUnderTest::get()
                .run(|device| {
                    let on = |tensor: &Tensor| tensor.to_device(device).unwrap();
                    searched(&decoder.each_ref().map(on), (&on(&f), lengths), rules)
                })
                .unwrap();
            for (utterance, &length) in lengths.iter().enumerate() {
                let found: Vec<&Emission> = found.iter().filter(|found| found.utterance == utterance).collect();
                let expected = match length {
                    0 => Vec::new(),
                    _ => expected(&decoder, &f.narrow(0, utterance * frames, length).unwrap(), rules),
                };
                let events = |found: &Emission| (found.token, found.frame, found.duration);
                assert_eq!(
                    found.iter().map(|found| events(found)).collect::<Vec<_>>(),
                    expected
                        .iter()
                        .map(|&(token, frame, duration, _)| (token, frame, duration))
                        .collect::<Vec<_>>(),
                    "{rules:?}, utterance {utterance} of {lengths:?}"
                );
                for (found, (token, .., logits)) in found.iter().zip(&expected) {
                    assert_eq!(found.logits.len(), TOKENS);
                    assert_eq!(found.logit, found.logits[*token as usize]);
                    let close = found.logits.iter().zip(logits).all(|(a, b)| (a - b).abs() < 1e-4);
                    assert!(close, "{found:?}, {logits:?}");
                }
                assert!(length < 9 || !expected.is_empty());
                repeated += expected.windows(2).filter(|pair| pair[0].1 == pair[1].1).count();
            }
            assert!(looks <= found.len() / Search::STEPS + 2, "{looks} looks");
        }
        assert!(repeated > 10, "{repeated}");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let f = Tensor::zeros((6, WIDTH), DType::F32, &Device::Cpu).unwrap();
        let rules = Rules {
            durations: &[],
            max_symbols: 1,
            tokens: TOKENS,
        };
        let new = |lengths: &[usize], places: usize, rules: Rules| {
            DeviceUnderTest::get().run(|device| {
                let f = f.to_device(device).unwrap();
                Search::new(&f, lengths, &vec![Place::default(); places], rules, false)
            })
        };
        assert!(new(&[3, 1], 2, rules).is_ok());
        for (lengths, places) in [(&[][..], 0), (&[3, 1], 1), (&[4, 1], 2), (&[1; 4], 4)] {
            assert!(new(lengths, places, rules).is_err(), "{lengths:?}");
        }
        assert!(new(&[3, 1], 2, Rules { tokens: 0, ..rules }).is_err());
    }
}
