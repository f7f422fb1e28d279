//! Error rates of transcripts: by language, by length, by source, and the worst utterances.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use arrow::array::{Array, AsArray, BinaryArray, Float64Array, RecordBatch, StringArray};
use arrow::datatypes::Float64Type;
use flow_runtime::{Artifact, StageError};
use serde_json::{Value, json};

use crate::normalize::Normalizer;
use crate::wer::{EditCounts, Score, Scores, score_with};

/// One set of utterances that was transcribed.
#[derive(Clone, Debug, Default)]
pub struct SetFigures {
    pub name: String,
    pub scores: Scores,
    /// By seconds of audio: label and score, in rising order; empty ranges are left out.
    pub durations: Vec<(String, Score)>,
    /// By what the utterances come from.
    pub sources: BTreeMap<String, Score>,
    /// What `sources` are: `source` or `shard`.
    pub source_kind: &'static str,
    pub worst: Vec<Worst>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Worst {
    pub segment_id: String,
    pub lang: String,
    pub words: EditCounts,
    pub reference: String,
    pub hypothesis: String,
    /// Its audio as a FLAC file, where it was kept.
    pub clip: Option<Vec<u8>>,
}

/// Settings of the figures.
#[derive(Clone, Debug)]
pub struct Measure {
    pub normalizer: Normalizer,
    /// Upper edges of the ranges of duration, in seconds; what lies on an edge falls into the range above.
    pub duration_bounds: Vec<f64>,
    /// Utterances to list.
    pub worst: usize,
}

/// The order of the worst utterances: most word errors first, then the highest rate, then names and references.
pub fn worse(a: (EditCounts, &str, &str), b: (EditCounts, &str, &str)) -> Ordering {
    (b.0.errors(), b.0.utterance_rate())
        .partial_cmp(&(a.0.errors(), a.0.utterance_rate()))
        .unwrap_or(Ordering::Equal)
        .then_with(|| (a.1, a.2).cmp(&(b.1, b.2)))
}

/// A set while its rows are collected.
#[derive(Default)]
struct Growing {
    figures: SetFigures,
    durations: Vec<Score>,
    by_source: BTreeMap<String, Score>,
    by_shard: BTreeMap<String, Score>,
}

/// Figures of the sets of an `evaluation.decode`, scored again from the texts.
pub fn read_sets(input: &Artifact, measure: &Measure) -> Result<Vec<SetFigures>, StageError> {
    let mut sets: BTreeMap<String, Growing> = BTreeMap::new();
    for item in input.batches(None) {
        let (partition, batch) = item?;
        let column = |name: &str| text(&batch, name);
        let (names, segments, langs) = (column("set")?, column("segment_id")?, column("lang")?);
        let (references, hypotheses) = (column("reference")?, column("hypothesis")?);
        let durations = float(&batch, "duration")?;
        // Transcripts of others need not have these.
        let (sources, shards) = (column("source").ok(), column("shard").ok());
        let clips: Option<&BinaryArray> = batch.column_by_name("clip").and_then(|c| c.as_binary_opt());
        for row in 0..batch.num_rows() {
            let set = sets.entry(names.value(row).to_owned()).or_default();
            let (reference, hypothesis) = (references.value(row), hypotheses.value(row));
            let (seconds, utterance) = (
                durations.value(row),
                score_with(reference, hypothesis, &measure.normalizer),
            );
            set.figures.scores.add(langs.value(row), &utterance, seconds);
            let range = measure.duration_bounds.partition_point(|edge| *edge <= seconds);
            set.durations
                .resize(measure.duration_bounds.len() + 1, Score::default());
            set.durations[range].add(&utterance, seconds);
            let source = sources.map_or("", |sources| sources.value(row));
            let shard = shards.map_or(partition.as_str(), |shards| shards.value(row));
            for (by, name) in [(&mut set.by_source, source), (&mut set.by_shard, shard)] {
                match by.get_mut(name) {
                    Some(score) => score.add(&utterance, seconds),
                    None => by.entry(name.to_owned()).or_default().add(&utterance, seconds),
                }
            }
            let list = &mut set.figures.worst;
            if utterance.words.errors() > 0 {
                list.push(Worst {
                    segment_id: segments.value(row).to_owned(),
                    lang: langs.value(row).to_owned(),
                    words: utterance.words,
                    reference: reference.to_owned(),
                    hypothesis: hypothesis.to_owned(),
                    clip: clips
                        .filter(|clips| clips.is_valid(row))
                        .map(|clips| clips.value(row).to_vec()),
                });
            }
            if list.len() > measure.worst.saturating_mul(4).saturating_add(1000) {
                keep_worst(list, measure.worst);
            }
        }
    }
    let finish = |(name, mut set): (String, Growing)| {
        keep_worst(&mut set.figures.worst, measure.worst);
        // A source that is the same for all rows is no information.
        let by_source = set.by_source.len() > 1;
        SetFigures {
            name,
            durations: (set.durations.into_iter().enumerate())
                .filter(|(_, score)| score.utterances > 0)
                .map(|(index, score)| (label(&measure.duration_bounds, index), score))
                .collect(),
            source_kind: if by_source { "source" } else { "shard" },
            sources: if by_source { set.by_source } else { set.by_shard },
            ..set.figures
        }
    };
    Ok(sets.into_iter().map(finish).collect())
}

fn label(edges: &[f64], index: usize) -> String {
    match (
        index.checked_sub(1).and_then(|below| edges.get(below)),
        edges.get(index),
    ) {
        (None, None) => "all".into(),
        (None, Some(end)) => format!("under {end} s"),
        (Some(start), Some(end)) => format!("{start} to {end} s"),
        (Some(start), None) => format!("from {start} s"),
    }
}

fn keep_worst(list: &mut Vec<Worst>, keep: usize) {
    list.sort_by(|a, b| {
        worse(
            (a.words, &a.segment_id, &a.reference),
            (b.words, &b.segment_id, &b.reference),
        )
    });
    list.truncate(keep);
}

/// The confusion matrix of language tags.
pub struct Confusion<'s> {
    /// All tags of references and hypotheses; the empty one, last, means no tag.
    pub heard: Vec<&'s str>,
    /// For each tag of a reference, how often each of `heard` was recognised.
    pub rows: Vec<(&'s str, Vec<u64>)>,
}

/// The confusion matrix of tags; none where no reference has a tag or all are correct.
pub fn confusion(scores: &Scores) -> Option<Confusion<'_>> {
    if scores.overall.wrong_tags == 0 {
        return None;
    }
    let pairs = &scores.tag_confusion;
    let mut heard: Vec<&str> = pairs.keys().flat_map(|(a, b)| [a.as_str(), b.as_str()]).collect();
    heard.sort_unstable_by_key(|tag| (tag.is_empty(), *tag));
    heard.dedup();
    let mut said: Vec<&str> = pairs.keys().map(|(reference, _)| reference.as_str()).collect();
    said.dedup();
    let of = |reference: &str, hypothesis: &str| {
        let pair = (reference.to_owned(), hypothesis.to_owned());
        pairs.get(&pair).copied().unwrap_or(0)
    };
    let counts = |reference: &str| heard.iter().map(|hypothesis| of(reference, hypothesis)).collect();
    let rows = said
        .into_iter()
        .map(|reference| (reference, counts(reference)))
        .collect();
    Some(Confusion { heard, rows })
}

/// All figures of the sets, for programs: the file `scores.json` beside the page.
pub fn as_json(sets: &[SetFigures], normalizer: &Normalizer) -> Value {
    let rate = |rate: f64| rate.is_finite().then_some(rate);
    let edits = |counts: &EditCounts| {
        json!({
            "units": counts.units, "insertions": counts.insertions, "deletions": counts.deletions,
            "substitutions": counts.substitutions, "rate": rate(counts.rate()),
        })
    };
    let normalized = normalizer.normalization != Default::default();
    let one = |score: &Score| {
        let mut value = json!({
            "utterances": score.utterances, "seconds": score.seconds, "words": edits(&score.words),
            "characters": edits(&score.characters), "tagged": score.tagged, "wrong_tags": score.wrong_tags,
            "word_error_rate_interval": score.word_interval().map(|(low, high)| [low, high]),
        });
        if normalized {
            value["normalized_words"] = edits(&score.normalized_words);
            value["normalized_characters"] = edits(&score.normalized_characters);
        }
        value
    };
    let by = |scores: &BTreeMap<String, Score>| -> Value {
        scores
            .iter()
            .map(|(name, score)| (name.clone(), one(score)))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    let set = |set: &SetFigures| {
        let durations = set
            .durations
            .iter()
            .map(|(label, score)| json!({ "range": label, "score": one(score) }));
        let tags = set.scores.tag_confusion.iter().map(|((reference, heard), utterances)| {
            json!({ "reference": reference, "heard": heard, "utterances": utterances })
        });
        json!({
            "name": set.name, "overall": one(&set.scores.overall), "languages": by(&set.scores.languages),
            "durations": durations.collect::<Value>(), "source_kind": set.source_kind, "sources": by(&set.sources),
            "tags": tags.collect::<Value>(),
        })
    };
    json!({
        "version": 1,
        "normalization": {
            "normalize": normalizer.normalization, "remove_diacritics": normalizer.remove_diacritics,
            "split_letters": normalizer.split_letters,
        },
        "sets": sets.iter().map(set).collect::<Value>(),
    })
}

pub(crate) fn text<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a StringArray, StageError> {
    batch
        .column_by_name(name)
        .and_then(|c| c.as_string_opt())
        .ok_or_else(|| StageError::failed(format!("column {name} is missing or no text")))
}

pub(crate) fn float<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a Float64Array, StageError> {
    batch
        .column_by_name(name)
        .and_then(|c| c.as_primitive_opt::<Float64Type>())
        .ok_or_else(|| StageError::failed(format!("column {name} is missing or no float64")))
}
