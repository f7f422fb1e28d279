//! Decoding with a model: transcription, alignment, times of tokens.

use std::ops::Range;

use candle_core::Tensor;
use flow_kernels::device::{is_out_of_memory, release_memory};

use super::TdtModel;
use crate::alignment::{AlignedTokens, Costs, WordTokens};
use crate::config::TransducerConfig;
use crate::decoding::{DecodingSettings, Hypothesis, TokenObserver, check_lengths};
use crate::heads::{Head, HeadKind};
use crate::timestamps::{TimeStamps, time_stamps};
use crate::{Error, Result};

impl TdtModel {
    /// Encoder output in evaluation mode, (batch, frames, d_model), and valid frames per signal. Signals are 16 kHz
    /// mono in [-1, 1], padded to the longest.
    pub fn encode(&self, signals: &[&[f32]]) -> Result<(Tensor, Vec<usize>)> {
        self.encode_for(signals, &self.decoding)
    }

    /// The same, with the language prompt of other settings.
    fn encode_for(&self, signals: &[&[f32]], settings: &DecodingSettings) -> Result<(Tensor, Vec<usize>)> {
        let prompts = match (&self.prompt_kernel, settings.prompt) {
            (Some(_), Some(prompt)) => vec![prompt; signals.len()],
            _ => Vec::new(),
        };
        self.encode_each(signals, &prompts)
    }

    /// The same, with a language prompt for each signal, or if there are none the model's own.
    pub(super) fn encode_each(&self, signals: &[&[f32]], prompts: &[usize]) -> Result<(Tensor, Vec<usize>)> {
        let prompts = self.prompts_of(prompts, signals.len())?;
        let place = (self.parameters.dtype(), self.parameters.device());
        let (features, lengths) = self.front_end.on(place, signals, None, None)?;
        let (encoded, lengths) = self.encoder.encode(&self.parameters, &features, &lengths)?;
        match &self.prompt_kernel {
            Some(kernel) if !prompts.is_empty() => {
                let (encoded, _) = kernel.forward_each(&self.parameters, &encoded, &prompts)?;
                Ok((encoded, lengths))
            }
            _ => Ok((encoded, lengths)),
        }
    }

    /// Transcription of signals (16 kHz mono in [-1, 1]), padded to the longest: group them by length.
    pub fn transcribe(&self, signals: &[&[f32]]) -> Result<Vec<Hypothesis>> {
        self.transcribe_with(signals, &self.decoding, None)
    }

    /// The same, with a language prompt for each signal, or if there are none the model's own; `observer` sees the outputs behind each
    /// token, for confidences.
    ///
    /// # Errors
    /// Where there are other prompts than the model's, or another number than signals.
    pub fn transcribe_each(
        &self,
        signals: &[&[f32]],
        prompts: &[usize],
        observer: Option<TokenObserver>,
    ) -> Result<Vec<Hypothesis>> {
        let prompts = self.prompts_of(prompts, signals.len())?;
        let parts = self.in_parts(0..signals.len(), &|part| {
            let of_part = prompts.get(part.clone()).unwrap_or_default();
            self.encode_each(&signals[part], of_part)
        })?;
        self.decode_parts(parts, &self.decoding, observer)
    }

    /// The same as [`TdtModel::transcribe`] with other decoding settings; `observer` sees the outputs behind each token, for
    /// confidences.
    ///
    /// # Errors
    /// Where the model cannot be decoded so, or the settings know the speech of another number of signals.
    pub fn transcribe_with(
        &self,
        signals: &[&[f32]],
        settings: &DecodingSettings,
        observer: Option<TokenObserver>,
    ) -> Result<Vec<Hypothesis>> {
        if !settings.speech.is_empty() && settings.speech.len() != signals.len() {
            let (known, signals) = (settings.speech.len(), signals.len());
            return Err(Error::Input(format!(
                "the speech of {known} signals is not that of {signals}"
            )));
        }
        let parts = self.in_parts(0..signals.len(), &|part| self.encode_for(&signals[part], settings))?;
        self.decode_parts(parts, settings, observer)
    }

    /// Transcription of signals as [`TdtModel::transcribe`] gives it, and the loss of each as [`TdtModel::evaluate_loss`]
    /// gives it (natural logarithm, not divided by the number of tokens), from one pass of the encoder. `targets`: token
    /// ids of what was said in each signal. `prompts`: as [`MicroBatch::prompts`](super::MicroBatch::prompts).
    ///
    /// # Errors
    /// Where the numbers of targets or prompts and signals differ, or a target has a token outside the vocabulary.
    pub fn transcribe_with_losses(
        &self,
        signals: &[&[f32]],
        targets: &[Vec<u32>],
        prompts: &[usize],
    ) -> Result<(Vec<Hypothesis>, Vec<f64>)> {
        if signals.len() != targets.len() {
            return Err(Error::Input(format!(
                "there are {} signals and {} token lists",
                signals.len(),
                targets.len()
            )));
        }
        let prompts = self.prompts_of(prompts, signals.len())?;
        let parts = self.in_parts(0..signals.len(), &|part| {
            let of_part = prompts.get(part.clone()).unwrap_or_default();
            let (encoded, lengths) = self.encode_each(&signals[part.clone()], of_part)?;
            let losses = self.losses_of_encoded(&encoded, &lengths, &targets[part])?;
            Ok((encoded, lengths, losses))
        })?;
        let mut all_losses = Vec::with_capacity(signals.len());
        let encoded = parts.into_iter().map(|(encoded, lengths, losses)| {
            all_losses.extend(losses);
            (encoded, lengths)
        });
        let encoded = encoded.collect();
        Ok((self.decode_parts(encoded, &self.decoding, None)?, all_losses))
    }

    /// What `compute` gives for utterances: for all together, or where the device has no memory left for that, for halves of
    /// them, down to one.
    fn in_parts<T>(&self, utterances: Range<usize>, compute: &dyn Fn(Range<usize>) -> Result<T>) -> Result<Vec<T>> {
        if utterances.is_empty() {
            return Ok(Vec::new());
        }
        match compute(utterances.clone()) {
            Err(error) if utterances.len() > 1 && is_out_of_memory(&error) => {
                release_memory(self.parameters.device())?;
                let middle = utterances.start + utterances.len() / 2;
                let mut parts = self.in_parts(utterances.start..middle, compute)?;
                parts.extend(self.in_parts(middle..utterances.end, compute)?);
                Ok(parts)
            }
            outcome => Ok(vec![outcome?]),
        }
    }

    /// [`TdtModel::decode_encoded`] of the parts of a batch, one after the other.
    fn decode_parts(
        &self,
        parts: Vec<(Tensor, Vec<usize>)>,
        settings: &DecodingSettings,
        mut observer: Option<TokenObserver>,
    ) -> Result<Vec<Hypothesis>> {
        let mut all = Vec::new();
        for (encoded, lengths) in parts {
            let before = all.len();
            let mut of_part = observer.as_mut().map(|observer| {
                move |utterance: usize, token: u32, logits: &[f32]| observer(before + utterance, token, logits)
            });
            let of_part = of_part.as_mut().map(|of_part| -> TokenObserver { of_part });
            let of_signals = settings.speech.get(before..before + lengths.len());
            let of_signals = of_signals.filter(|part| part.len() < settings.speech.len());
            let speech_of_part = of_signals.map(|speech| DecodingSettings {
                speech: speech.to_vec(),
                ..settings.clone()
            });
            let settings = speech_of_part.as_ref().unwrap_or(settings);
            all.extend(self.decode_encoded(&encoded, &lengths, settings, of_part)?);
        }
        Ok(all)
    }

    /// The best hypothesis of each utterance, from the output of the encoder: frames (batch, frames, d_model), of which so many
    /// are valid.
    ///
    /// # Errors
    /// Where lengths do not fit, or the settings name a head that the model does not have.
    pub fn decode_encoded(
        &self,
        encoded: &Tensor,
        lengths: &[usize],
        settings: &DecodingSettings,
        observer: Option<TokenObserver>,
    ) -> Result<Vec<Hypothesis>> {
        if self.head_of(settings)?.is_beam_search(settings) {
            let found = self.beam_search(encoded, lengths, settings, observer)?;
            return Ok(found
                .into_iter()
                .map(|best| best.into_iter().next().unwrap_or_default())
                .collect());
        }
        let (batch, padded, _) = encoded.dims3()?;
        check_lengths(lengths, batch, padded)?;
        let head = self.head_of(settings)?;
        if lengths.iter().all(|&length| length == 0) {
            return Ok(vec![Hypothesis::default(); batch]);
        }
        let mut state = head.start(&self.parameters, settings, batch)?;
        let encoded = (encoded, lengths);
        let mut hypotheses = head.search(&self.parameters, &self.config, settings, encoded, &mut state, observer)?;
        self.add_texts(&mut hypotheses)?;
        Ok(hypotheses)
    }

    /// The hypotheses of beam search for each signal, the best first.
    pub fn transcribe_n_best(&self, signals: &[&[f32]]) -> Result<Vec<Vec<Hypothesis>>> {
        if signals.is_empty() {
            return Ok(Vec::new());
        }
        let (encoded, lengths) = self.encode(signals)?;
        self.beam_search(&encoded, &lengths, &self.decoding, None)
    }

    fn beam_search(
        &self,
        encoded: &Tensor,
        lengths: &[usize],
        settings: &DecodingSettings,
        observer: Option<TokenObserver>,
    ) -> Result<Vec<Vec<Hypothesis>>> {
        let (head, encoded) = (self.head_of(settings)?, (encoded, lengths));
        let mut found = head.n_best(&self.parameters, &self.config, settings, encoded, observer)?;
        for hypotheses in &mut found {
            self.add_texts(hypotheses)?;
        }
        Ok(found)
    }

    /// The head that decodes.
    ///
    /// # Errors
    /// Where the settings name one that the model does not have.
    fn decoding_head(&self) -> Result<&dyn Head> {
        self.head_of(&self.decoding)
    }

    pub(super) fn head_of(&self, settings: &DecodingSettings) -> Result<&dyn Head> {
        if let Some(kind) = settings.head {
            self.config.check_decoder(kind)?;
        }
        let mut heads = self.heads.iter().map(Box::as_ref);
        let head = heads.find(|head| settings.head.is_none_or(|kind| head.kind() == kind));
        head.ok_or_else(|| Error::Input("the model has no head".into()))
    }

    /// The best path of a known text through the encoded frames of one signal, (frames, d_model): by a head of the model, or if
    /// none is named by CTC where there is one, and else by the transducer.
    ///
    /// # Errors
    /// As those of the searches in [`crate::alignment`], and where the model has no such head.
    pub fn align(
        &self,
        frames: &Tensor,
        text: &WordTokens,
        costs: Costs,
        head: Option<HeadKind>,
    ) -> Result<AlignedTokens> {
        let kind = head.unwrap_or(match self.config.ctc {
            Some(_) => HeadKind::Ctc,
            None => HeadKind::Transducer,
        });
        let head = self.heads.iter().find(|head| head.kind() == kind);
        let head = head.ok_or_else(|| {
            Error::Input(format!(
                "the model has no head `{}`: it is of {}",
                kind.name(),
                self.config.heads()
            ))
        })?;
        head.align(&self.parameters, &self.config, frames, text, costs)
    }

    /// Sets how the model is decoded.
    ///
    /// # Errors
    /// Where it cannot be: it has no such head, or the head no such search.
    pub fn set_decoding(&mut self, settings: DecodingSettings) -> Result<()> {
        let before = std::mem::replace(&mut self.decoding, settings);
        let possible = self.decoding_head().and_then(|head| head.check(&self.decoding));
        if possible.is_err() {
            self.decoding = before;
        }
        possible
    }

    /// Time stamps of a hypothesis, by NeMo's rules for the head that found it. (For CTC, NeMo's own stamps place each token in the gap
    /// before it; these are where it is.)
    ///
    /// # Errors
    /// As [`time_stamps`], and where there is no tokenizer or the settings name a head that the model does not have.
    pub fn time_stamps(&self, hypothesis: &Hypothesis) -> Result<TimeStamps> {
        let Some(tokenizer) = &self.tokenizer else {
            return Err(Error::Tokenizer("the model holds none".into()));
        };
        let rnnt = self.config.transducer.as_ref().is_some_and(TransducerConfig::is_rnnt);
        let marks_last = rnnt && self.decoding_head()?.kind() == HeadKind::Transducer;
        time_stamps(tokenizer, hypothesis, !marks_last)
    }

    fn add_texts(&self, hypotheses: &mut [Hypothesis]) -> Result<()> {
        if let Some(tokenizer) = &self.tokenizer {
            for hypothesis in hypotheses {
                hypothesis.text = tokenizer.decode(&hypothesis.ids)?;
            }
        }
        Ok(())
    }
}
