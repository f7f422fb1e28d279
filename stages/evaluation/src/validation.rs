//! The validation sample, on which a model is evaluated while it trains.

use flow_kind::{Artifact, RejectSet, StageError, Storage};
use flow_model::loss::reduced;
use flow_model::model::TdtModel;
use flow_text::language_tag::split_tag;

use crate::audio_rows::AudioRows;
use crate::decode::BATCH_SECONDS;
use crate::error::{EvaluationError, nothing_to_score};
use crate::text_style::TextStyle;
use crate::transcribe::{Outcome, PromptOf, Recognize, Targets, UtteranceLoss, scores, transcribe_with_losses};
use crate::wer::{Scores, words};

/// The result of an evaluation of the validation sample.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ValidationMetrics {
    pub scores: Scores,
    /// The TDT loss of the sample, after the reduction of the model's configuration. None where it is not finite, or no
    /// utterance has one.
    pub loss: Option<f64>,
    /// How the texts of the sample are written, and how the model writes what it recognizes in them: of utterances of which it
    /// recognizes something.
    pub references: TextStyle,
    pub written: TextStyle,
}

/// A fixed sample of validation rows, for evaluation while a model trains.
pub struct ValidationSet {
    rows: AudioRows,
    /// For recordings that are in object storage.
    storage: Storage,
}

impl ValidationSet {
    /// Chooses `per_language` rows of each language (0: all), always the same ones. `members` is the port of an
    /// `audio.probe`, where rows need it.
    pub fn read(
        storage: &Storage,
        rows: &Artifact,
        members: Option<&Artifact>,
        shards: &str,
        per_language: usize,
    ) -> Result<Self, EvaluationError> {
        Ok(ValidationSet {
            rows: AudioRows::read(rows, members, shards, per_language)?,
            storage: storage.clone(),
        })
    }

    /// Checks that the sample can be scored: reads recordings until one can be read. `rejects` are those of the stages
    /// before.
    ///
    /// # Errors
    /// Where there are no rows, none with a word in its text, or none whose recording can be read.
    pub fn check(&self, rejects: &RejectSet) -> Result<(), StageError> {
        let utterances = &self.rows.utterances;
        if utterances.is_empty() {
            return Err(nothing_to_score("there are no rows to validate on", rejects));
        }
        let mut unreadable = None;
        for (index, utterance) in utterances.iter().enumerate() {
            if words(split_tag(&utterance.text).1).is_empty() {
                continue;
            }
            match self.rows.signal(&self.storage, index) {
                Ok(_) => return Ok(()),
                Err(why) => unreadable = unreadable.or(Some((&utterance.segment_id, why))),
            }
        }
        let count = utterances.len();
        Err(match unreadable {
            Some((segment, why)) => StageError::failed(format!(
                "none of the {count} recordings to validate on can be read; {segment}: {why}"
            ))
            .with_help("check that the audio is where the rows say"),
            None => nothing_to_score(format!("none of the {count} rows to validate on has a word"), rejects),
        })
    }

    /// Transcribes and scores the sample, with this many seconds of padded audio in the model at once, [`BATCH_SECONDS`] at
    /// most. What cannot be read is left out.
    ///
    /// The loss is that of training without noise (no dropout, no SpecAugment, no dither, the statistics of batch
    /// normalisation as stored, never the RNN-T loss that `omega` draws), reduced over the sample as if it was one batch.
    /// NeMo's `val_loss` is the mean over its batches of that reduction, which is the same where the sample is one batch.
    /// Texts of more than `max_tokens` tokens have no part in it. `all` has the micro-batches recognized by `model`, or copies of
    /// it. `prompt_of`: the language prompts of the rows.
    pub fn evaluate<E: From<EvaluationError>>(
        &self,
        model: &TdtModel,
        max_tokens: usize,
        batch_seconds: f64,
        prompt_of: &PromptOf<'_>,
        cancelled: &dyn Fn() -> bool,
        all: &mut Recognize<'_, E>,
    ) -> Result<ValidationMetrics, E> {
        let (outcomes, losses) = transcribe_with_losses(
            Targets {
                tokenizer: model.tokenizer.as_ref(),
                max_tokens,
                prompt_of,
            },
            &self.rows.utterances,
            batch_seconds.min(BATCH_SECONDS),
            &|indices| self.rows.signals(&self.storage, indices),
            cancelled,
            all,
        )?;
        let counted: Vec<UtteranceLoss> = losses.into_iter().flatten().collect();
        let (losses, lengths): (Vec<f64>, Vec<usize>) = counted.iter().map(|found| (found.loss, found.tokens)).unzip();
        let loss = reduced(model.config.reduction(), &losses, &lengths);
        let (mut references, mut written) = (TextStyle::default(), TextStyle::default());
        for (utterance, outcome) in self.rows.utterances.iter().zip(&outcomes) {
            if let Outcome::Transcript { hypothesis, .. } = outcome
                && !split_tag(hypothesis).1.trim().is_empty()
            {
                references.add(&utterance.text);
                written.add(hypothesis);
            }
        }
        Ok(ValidationMetrics {
            references,
            written,
            scores: scores(&self.rows.utterances, &outcomes).0,
            loss: Some(loss).filter(|loss| loss.is_finite() && !losses.is_empty()),
        })
    }
}
