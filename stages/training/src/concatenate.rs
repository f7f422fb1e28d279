//! Clips of a micro-batch that are joined to longer ones, as Lhotse's `CutConcatenate` does (`concatenate_samples` in NeMo).
//!
//! Rows are joined when a micro-batch is made of them: how rows are planned, which of them are left out, and what is reported of
//! them is the same as without. The result follows from the rows of the micro-batch alone, so a resumed training joins the same.

use std::cmp::Reverse;
use std::collections::VecDeque;

use flow_model::model::MicroBatch;
use flow_model::tokenizer::Tokenizer;
use flow_text::language_tag::{tag_of, untagged};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::trainer::{LoadedBatch, SAMPLE_RATE};

/// Joins short clips of a micro-batch, with silence between them and their texts after each other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Concatenate {
    /// Seconds of silence between two clips (`concatenate_gap_seconds` in NeMo).
    pub gap_seconds: f64,
    /// Most seconds of joined clips, as a multiple of the longest clip of their micro-batch (`concatenate_duration_factor` in
    /// NeMo).
    pub duration_factor: f64,
    /// Most seconds of joined clips, in place of `duration_factor`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_duration: Option<f64>,
}

impl Default for Concatenate {
    fn default() -> Self {
        Concatenate {
            gap_seconds: 0.1,
            duration_factor: 1.0,
            max_duration: None,
        }
    }
}

impl Concatenate {
    /// # Errors
    /// Which number is wrong, and what is possible.
    pub fn check(&self) -> Result<(), String> {
        let within = |name: &str, value: f64, least: f64, most: f64| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(format!("`{name}` is {value}; {least} to {most} are possible")),
        };
        within("gap_seconds", self.gap_seconds, 0.0, 60.0)?;
        within("duration_factor", self.duration_factor, 1.0, 1000.0)?;
        within("max_duration", self.max_duration.unwrap_or(1.0), 0.1, 36_000.0)
    }

    /// The most that joined clips have where the longest one of their micro-batch has `longest`, in seconds as in samples.
    pub fn limit(&self, longest: f64) -> f64 {
        self.max_duration.unwrap_or(longest * self.duration_factor)
    }

    /// Which clips of `lengths` samples are joined, in their order, by falling length of the first one. The shortest clip that is
    /// left goes to the longest one that has room for it, if it `fits` the clips there.
    fn groups(&self, lengths: &[usize], mut fits: impl FnMut(&[usize], usize) -> bool) -> Vec<Vec<usize>> {
        let gap = (self.gap_seconds * SAMPLE_RATE).round() as usize;
        let longest = lengths.iter().copied().max().unwrap_or(0) as f64 / SAMPLE_RATE;
        let most = (self.limit(longest) * SAMPLE_RATE).round() as usize;
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.sort_by_key(|&clip| Reverse(lengths[clip]));
        let mut left = VecDeque::from(order);
        let mut groups = Vec::new();
        while let Some(first) = left.pop_front() {
            let (mut group, mut length) = (vec![first], lengths[first]);
            while let Some(&shortest) = left.back() {
                let joined = length.saturating_add(gap).saturating_add(lengths[shortest]);
                if joined > most || !fits(&group, shortest) {
                    break;
                }
                left.pop_back();
                group.push(shortest);
                length = joined;
            }
            groups.push(group);
        }
        groups
    }

    /// The micro-batch with its clips joined, those with the same language prompt. `texts` are those of its rows. Joined texts have at
    /// most `max_tokens` tokens.
    pub fn join(&self, loaded: LoadedBatch, texts: &[String], tokenizer: &Tokenizer, max_tokens: usize) -> LoadedBatch {
        let MicroBatch {
            signals,
            tokens,
            prompts,
        } = &loaded.batch;
        let lengths: Vec<usize> = signals.iter().map(Vec::len).collect();
        let tokens_of =
            |clips: &[usize]| tokenizer.encode(&joined_text(clips.iter().map(|&clip| texts[clip].as_str())));
        let groups = self.groups(&lengths, |clips, next| {
            prompts.get(clips[0]) == prompts.get(next) && tokens_of(&[clips, &[next]].concat()).len() <= max_tokens
        });
        let gap = vec![0.0; (self.gap_seconds * SAMPLE_RATE).round() as usize];
        let mut batch = MicroBatch::default();
        for clips in &groups {
            let parts: Vec<&[f32]> = clips.iter().map(|&clip| signals[clip].as_slice()).collect();
            batch.signals.push(parts.join(gap.as_slice()));
            batch.prompts.extend(prompts.get(clips[0]));
            batch.tokens.push(match clips[..] {
                // Perhaps cut to `max_tokens`.
                [only] => tokens[only].clone(),
                _ => tokens_of(clips),
            });
        }
        LoadedBatch {
            segments: groups
                .iter()
                .flatten()
                .map(|&clip| loaded.segments[clip].clone())
                .collect(),
            joined: groups.iter().map(|clips| clips.len() as u32).collect(),
            batch,
            ..loaded
        }
    }
}

/// Texts after each other. The tag of a language comes again only where the language changes.
fn joined_text<'t>(texts: impl Iterator<Item = &'t str>) -> String {
    let (mut joined, mut last) = (String::new(), None);
    for text in texts {
        let tag = tag_of(text);
        let text = if tag.is_some() && tag == last {
            untagged(text)
        } else {
            text.trim()
        };
        last = tag.or(last);
        if !joined.is_empty() && !text.is_empty() {
            joined.push(' ');
        }
        joined.push_str(text);
    }
    joined
}

#[cfg(test)]
#[path = "concatenate_tests.rs"]
mod tests;
