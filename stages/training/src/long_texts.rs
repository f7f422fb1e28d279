//! Transcripts with more tokens than training takes.

use std::collections::BTreeMap;

use flow_kind::{Artifact, StageError};
use flow_model::tokenizer::Tokenizer;
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::transcripts::Transcripts;

/// How to treat a transcript with more than `max_tokens` tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OverLimit {
    /// Its row is not trained on.
    #[default]
    Reject,
    /// It is learned up to the limit, from all of its audio, as in pipelines that truncate token batches; this teaches
    /// a model to leave out the end of utterances.
    Truncate,
}

/// How long the target of a row may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextLimit {
    pub max_tokens: usize,
    /// What becomes of a row with more.
    pub rule: OverLimit,
}

/// Examples that are kept for each language.
const EXAMPLES: usize = 3;

/// How many transcripts are over the limit, by language.
#[derive(Debug, Default, PartialEq)]
pub struct LongTexts {
    pub texts: u64,
    pub limit: usize,
    pub rule: OverLimit,
    pub languages: BTreeMap<String, LanguageLongTexts>,
}

/// Transcripts over the limit, of one language.
#[derive(Debug, Default, PartialEq)]
pub struct LanguageLongTexts {
    pub count: u64,
    /// Most tokens in one of them.
    pub longest: usize,
    /// Segments, the first ones in the order of the rows.
    pub examples: Vec<String>,
}

impl LongTexts {
    /// Counts the rows of a manifest. Columns `segment_id` and `text` are needed; `lang` is used where it is.
    pub fn count(rows: &Artifact, tokenizer: &Tokenizer, limit: usize, rule: OverLimit) -> Result<Self, StageError> {
        let mut long = LongTexts {
            limit,
            rule,
            ..LongTexts::default()
        };
        for batch in Transcripts::of_rows(rows) {
            let batch = batch?;
            let over: Vec<(usize, usize)> = (0..batch.len())
                .into_par_iter()
                .filter_map(|row| Some((row, tokenizer.tokens_over(batch.text(row)?, limit)?)))
                .collect();
            long.texts += batch.len() as u64;
            for (row, tokens) in over {
                let language = long.languages.entry(batch.language(row).to_owned()).or_default();
                language.count += 1;
                language.longest = language.longest.max(tokens);
                if language.examples.len() < EXAMPLES {
                    language.examples.push(batch.segment(row).to_owned());
                }
            }
        }
        Ok(long)
    }

    /// The number of transcripts over the limit.
    pub fn total(&self) -> u64 {
        self.languages.values().map(|language| language.count).sum()
    }

    /// The warning for the user; none if all texts fit.
    pub fn warning(&self) -> Option<String> {
        if self.languages.is_empty() {
            return None;
        }
        let each: Vec<String> = self
            .languages
            .iter()
            .map(|(name, language)| {
                let more = if language.count > language.examples.len() as u64 {
                    ", ..."
                } else {
                    ""
                };
                format!(
                    "{} {} (up to {} tokens: {}{more})",
                    if name.is_empty() { "no language" } else { name },
                    language.count,
                    language.longest,
                    language.examples.join(", ")
                )
            })
            .collect();
        let fate = match self.rule {
            OverLimit::Reject => "are left out",
            OverLimit::Truncate => "are learned only up to there",
        };
        Some(format!(
            "{} of {} transcripts have more than {} tokens, and {fate} (`max_tokens`, `long_texts`): {}",
            self.total(),
            self.texts,
            self.limit,
            each.join("; ")
        ))
    }

    /// A line for `metrics.jsonl` and the report.
    pub fn figures(&self) -> Value {
        let languages: BTreeMap<&str, Value> = self
            .languages
            .iter()
            .map(|(name, language)| {
                let value =
                    json!({ "count": language.count, "longest": language.longest, "examples": language.examples });
                (name.as_str(), value)
            })
            .collect();
        json!({ "kind": "long_texts", "limit": self.limit, "long_texts": self.rule, "texts": self.texts, "over": self.total(), "languages": languages })
    }
}
