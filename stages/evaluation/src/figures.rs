//! Error rates of transcripts: by language, by length, by source, and the worst utterances.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};

use arrow::array::{Array, AsArray, BinaryArray, Float64Array, ListArray, RecordBatch, StringArray, StructArray};
use arrow::datatypes::Float64Type;
use flow_kind::{Artifact, StageError};
use flow_text::language_tag::split_tag;
use serde_json::{Value, json};

use crate::bootstrap::{Clusters, RATES, Resampling, ratios};
use crate::normalize::Normalizer;
use crate::wer::{EditCounts, Score, Scores, score_with, words};
use crate::word_confidence::{Bin, Reliability, scored};
use crate::word_groups::{WordFigures, WordMeasure, WordTally};
use crate::word_times::{TimeDifferences, TimedWord};

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
    /// By the values of other columns: the column's name and scores.
    pub columns: Vec<(String, BTreeMap<String, Score>)>,
    /// Of groups of words.
    pub words: WordFigures,
    /// Words that were heard by their confidences, where these are known.
    pub reliability: Reliability,
    /// Times of words that were heard and known ones.
    pub times: TimeDifferences,
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
    /// Upper edges of the ranges of duration, in seconds; what is on an edge falls into the range above.
    pub duration_bounds: Vec<f64>,
    /// Utterances to list.
    pub worst: usize,
    /// Columns by whose values there are rates.
    pub by: Vec<String>,
    pub words: WordMeasure,
    /// Where there are intervals by the bootstrap.
    pub resampling: Option<Resampling>,
    /// The column whose rows of equal values are drawn together; empty: the recording.
    pub cluster: String,
}

/// The order of the worst utterances: most word errors first, then the highest rate, then names and references.
pub fn worse(a: (EditCounts, &str, &str), b: (EditCounts, &str, &str)) -> Ordering {
    (b.0.errors(), b.0.utterance_rate())
        .partial_cmp(&(a.0.errors(), a.0.utterance_rate()))
        .unwrap_or(Ordering::Equal)
        .then_with(|| (a.1, a.2).cmp(&(b.1, b.2)))
}

/// A set while its rows are collected.
struct Growing<'m> {
    figures: SetFigures,
    durations: Vec<Score>,
    by_source: BTreeMap<String, Score>,
    by_shard: BTreeMap<String, Score>,
    words: WordTally<'m>,
    clusters: Clusters<RATES>,
}

impl<'m> Growing<'m> {
    fn new(measure: &'m Measure) -> Self {
        let columns = measure.by.iter().map(|name| (name.clone(), BTreeMap::new()));
        Growing {
            figures: SetFigures {
                columns: columns.collect(),
                ..SetFigures::default()
            },
            durations: Vec::new(),
            by_source: BTreeMap::new(),
            by_shard: BTreeMap::new(),
            words: WordTally::new(&measure.words, &measure.normalizer),
            clusters: Clusters::default(),
        }
    }
}

/// Groupings of [`Clusters`]; those of columns begin with `column `.
const ALL: &str = "all";
const LANGUAGE: &str = "language";
const DURATION: &str = "duration";
const SOURCE: &str = "source";
const SHARD: &str = "shard";

fn column_grouping(name: &str) -> String {
    format!("column {name}")
}

/// The texts of a column of any type that has them; empty where there is no value.
fn values(batch: &RecordBatch, name: &str) -> Result<StringArray, StageError> {
    let column = batch.column_by_name(name);
    let column = column.ok_or_else(|| StageError::failed(format!("column {name} is missing")))?;
    let texts = arrow::compute::cast(column, &arrow::datatypes::DataType::Utf8)
        .map_err(|error| StageError::failed(format!("column {name}: {error}")))?;
    Ok(texts.as_string::<i32>().clone())
}

/// The name of what is drawn as a whole: the recording, else the segment.
fn recordings(batch: &RecordBatch) -> Result<Vec<String>, StageError> {
    let optional = |name: &str| match batch.column_by_name(name) {
        Some(_) => values(batch, name).map(Some),
        None => Ok(None),
    };
    let (files, tars, offsets) = (optional("audio_path")?, optional("tar_path")?, optional("tar_offset")?);
    let segments = values(batch, "segment_id")?;
    let given = |texts: &Option<StringArray>, row: usize| {
        let texts = texts.as_ref().filter(|texts| texts.is_valid(row));
        texts
            .map(|texts| texts.value(row).to_owned())
            .filter(|text| !text.is_empty())
    };
    let name = |row| match (given(&files, row), given(&tars, row), given(&offsets, row)) {
        (Some(file), _, _) => file,
        (None, Some(tar), Some(offset)) => format!("{tar} {offset}"),
        _ => segments.value(row).to_owned(),
    };
    Ok((0..batch.num_rows()).map(name).collect())
}

/// The known times of words, by segment.
pub type KnownTimes = HashMap<String, ListOfWords>;

/// A word, when it begins and ends, and its confidence, as a table has them.
type ListOfWords = Vec<(String, [f64; 2], Option<f64>)>;

/// The words of a list of `word, start, end, confidence` (there may be none) of a row.
fn list_of_words(column: &ListArray, row: usize) -> Result<ListOfWords, StageError> {
    if column.is_null(row) {
        return Ok(Vec::new());
    }
    let wrong = |name: &str| StageError::failed(format!("a list of words has no `{name}`, or of another type"));
    let list = column.value(row);
    let list: &StructArray = list.as_struct_opt().ok_or_else(|| wrong("word"))?;
    let numbers = |name: &str| {
        list.column_by_name(name)
            .and_then(|c| c.as_primitive_opt::<Float64Type>())
    };
    let texts = list
        .column_by_name("word")
        .and_then(|column| column.as_string_opt::<i32>());
    let texts = texts.ok_or_else(|| wrong("word"))?;
    let starts = numbers("start").ok_or_else(|| wrong("start"))?;
    let ends = numbers("end").ok_or_else(|| wrong("end"))?;
    let confidences = numbers("confidence");
    let word = |at: usize| {
        let confidence = confidences.filter(|column| column.is_valid(at));
        let times = [starts.value(at), ends.value(at)];
        (
            texts.value(at).to_owned(),
            times,
            confidence.map(|column| column.value(at)),
        )
    };
    Ok((0..list.len()).map(word).collect())
}

/// Known times of words: rows of `segment_id` and `words`, such as those of a `transcription.align`.
///
/// # Errors
/// Where a column is missing or of another type.
pub fn read_known_times(input: &Artifact) -> Result<KnownTimes, StageError> {
    let mut known = KnownTimes::new();
    for item in input.batches(Some(&["segment_id", "words"])) {
        let (_, batch) = item?;
        let segments = values(&batch, "segment_id")?;
        let lists = batch
            .column_by_name("words")
            .and_then(|column| column.as_list_opt::<i32>());
        let lists = lists.ok_or_else(|| StageError::failed("column words is missing or no list"))?;
        for row in (0..batch.num_rows()).filter(|row| segments.is_valid(*row)) {
            known.insert(segments.value(row).to_owned(), list_of_words(lists, row)?);
        }
    }
    Ok(known)
}

/// Words with times, normalised. A word of no duration whose confidence is 0 was not said, one without a confidence among others with
/// one cannot be spelled.
fn timed(list: &ListOfWords, normalizer: &Normalizer, language: &str) -> Vec<TimedWord> {
    let of_alignment = list.iter().any(|(.., confidence)| confidence.is_some());
    let word = |(text, times, confidence): &(String, [f64; 2], Option<f64>)| {
        let text = words(&normalizer.apply(text.trim(), language)).concat();
        let said = times[1] > times[0] || confidence.map_or(!of_alignment, |confidence| confidence > 0.0);
        (!text.is_empty()).then_some(TimedWord {
            text,
            times: *times,
            said,
        })
    };
    list.iter().filter_map(word).collect()
}

/// Figures of the sets of an `evaluation.decode`, scored again from the texts. `known`: the times of words of the references.
pub fn read_sets(input: &Artifact, measure: &Measure, known: &KnownTimes) -> Result<Vec<SetFigures>, StageError> {
    let mut sets: BTreeMap<String, Growing> = BTreeMap::new();
    let column_groupings: Vec<String> = measure.by.iter().map(|name| column_grouping(name)).collect();
    for item in input.batches(None) {
        let (partition, batch) = item?;
        let column = |name: &str| text(&batch, name);
        let (names, segments, langs) = (column("set")?, column("segment_id")?, column("lang")?);
        let (references, hypotheses) = (column("reference")?, column("hypothesis")?);
        let durations = float(&batch, "duration")?;
        // Transcripts of others need not have these.
        let (sources, shards) = (column("source").ok(), column("shard").ok());
        let by: Vec<StringArray> = (measure.by.iter())
            .map(|name| values(&batch, name))
            .collect::<Result<_, _>>()?;
        let clusters = match (measure.resampling, measure.cluster.as_str()) {
            (None, _) => Vec::new(),
            (Some(_), "") => recordings(&batch)?,
            (Some(_), name) => {
                let (column, segments) = (values(&batch, name)?, values(&batch, "segment_id")?);
                // A row without a value stands alone.
                let name = |row| match column.is_valid(row) && !column.value(row).is_empty() {
                    true => format!("{} ", column.value(row)),
                    false => segments.value(row).to_owned(),
                };
                (0..batch.num_rows()).map(name).collect()
            }
        };
        let heard: Option<&ListArray> = batch.column_by_name("word").and_then(|c| c.as_list_opt());
        let clips: Option<&BinaryArray> = batch.column_by_name("clip").and_then(|c| c.as_binary_opt());
        for row in 0..batch.num_rows() {
            let set = sets
                .entry(names.value(row).to_owned())
                .or_insert_with(|| Growing::new(measure));
            let (reference, hypothesis) = (references.value(row), hypotheses.value(row));
            let (seconds, utterance) = (
                durations.value(row),
                score_with(reference, hypothesis, langs.value(row), &measure.normalizer),
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
            for ((_, scores), column) in set.figures.columns.iter_mut().zip(&by) {
                let value = if column.is_valid(row) { column.value(row) } else { "" };
                match scores.get_mut(value) {
                    Some(score) => score.add(&utterance, seconds),
                    None => scores.entry(value.to_owned()).or_default().add(&utterance, seconds),
                }
            }
            set.words.add(reference, hypothesis, langs.value(row));
            if let Some(heard) = heard {
                let (list, normalizer, language) = (list_of_words(heard, row)?, &measure.normalizer, langs.value(row));
                let sure = list.iter().map(|(text, _, confidence)| (text.as_str(), *confidence));
                for (confidence, is_right) in scored(split_tag(reference).1, sure, normalizer, language) {
                    set.figures.reliability.add(confidence, is_right);
                }
                if let Some(known) = known.get(segments.value(row)) {
                    let (known, heard) = (timed(known, normalizer, language), timed(&list, normalizer, language));
                    set.figures.times.add(&known, &heard);
                }
            }
            if let Some(cluster) = clusters.get(row) {
                let range = label(&measure.duration_bounds, range);
                let groups = [
                    (ALL, ""),
                    (LANGUAGE, langs.value(row)),
                    (DURATION, &range),
                    (SOURCE, source),
                    (SHARD, shard),
                ];
                let columns = column_groupings.iter().zip(&by).map(|(grouping, column)| {
                    let value = if column.is_valid(row) { column.value(row) } else { "" };
                    (grouping.as_str(), value)
                });
                set.clusters
                    .add(cluster, groups.into_iter().chain(columns), &ratios(&utterance));
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
        if let Some(resampling) = measure.resampling {
            let clusters = &set.clusters;
            let of = |grouping: &str, name: &str| Some(resampling.intervals(&clusters.of(grouping, name)));
            set.figures.scores.overall.intervals = of(ALL, "");
            let each = |grouping: &str, scores: &mut BTreeMap<String, Score>| {
                scores
                    .iter_mut()
                    .for_each(|(name, score)| score.intervals = of(grouping, name));
            };
            each(LANGUAGE, &mut set.figures.scores.languages);
            match by_source {
                true => each(SOURCE, &mut set.by_source),
                false => each(SHARD, &mut set.by_shard),
            }
            for (index, score) in set.durations.iter_mut().enumerate() {
                score.intervals = of(DURATION, &label(&measure.duration_bounds, index));
            }
            for (name, scores) in &mut set.figures.columns {
                each(&column_grouping(name), scores);
            }
        }
        SetFigures {
            words: set.words.figures(),
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
    let normalized = normalizer.is_given();
    let one = |score: &Score| {
        let mut value = json!({
            "utterances": score.utterances, "seconds": score.seconds, "words": edits(&score.words),
            "characters": edits(&score.characters), "tagged": score.tagged, "wrong_tags": score.wrong_tags,
            "word_error_rate_interval": score.shown_interval().map(|(low, high)| [low, high]),
        });
        if let Some(intervals) = &score.intervals {
            value["clusters"] = json!(intervals.clusters);
            value["character_error_rate_interval"] = json!(intervals.rates[1]);
            if normalized {
                value["normalized_word_error_rate_interval"] = json!(intervals.rates[2]);
                value["normalized_character_error_rate_interval"] = json!(intervals.rates[3]);
            }
        }
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
        let mut value = json!({
            "name": set.name, "overall": one(&set.scores.overall), "languages": by(&set.scores.languages),
            "durations": durations.collect::<Value>(), "source_kind": set.source_kind, "sources": by(&set.sources),
            "tags": tags.collect::<Value>(),
        });
        if !set.columns.is_empty() {
            value["columns"] = set
                .columns
                .iter()
                .map(|(name, scores)| (name.clone(), by(scores)))
                .collect();
        }
        let WordFigures { rare, names, switches } = &set.words;
        if !rare.is_empty() {
            let ranges = rare
                .iter()
                .map(|(label, counts)| json!({ "training_count": label, "words": edits(counts) }));
            value["rare_words"] = ranges.collect();
        }
        if let Some(names) = names {
            value["names"] = json!({
                "words": edits(&names.words), "others": edits(&names.others), "occurrences": names.occurrences,
                "correct": names.correct,
            });
        }
        let words = set.reliability.all();
        if words.words > 0 {
            let bin = |(range, bin): (std::ops::Range<f64>, &Bin)| {
                json!({
                    "from": range.start, "to": range.end, "words": bin.words, "mean_confidence": bin.mean_confidence(),
                    "right": bin.accuracy(),
                })
            };
            value["confidence"] = json!({
                "words": words.words, "mean_confidence": words.mean_confidence(), "right": words.accuracy(),
                "expected_calibration_error": set.reliability.expected_calibration_error(),
                "bins": set.reliability.bins().map(bin).collect::<Value>(),
            });
        }
        if let Some([beginnings, ends]) = set.times.spreads() {
            value["times"] = json!({
                "words": set.times.words, "compared": set.times.compared(), "not_said": set.times.not_said,
                "beginnings": beginnings.figures(), "ends": ends.figures(),
            });
        }
        if let Some(switches) = switches {
            value["switches"] = json!({ "points": edits(&switches.points), "elsewhere": edits(&switches.elsewhere) });
        }
        value
    };
    let mut normalization = json!({
        "normalize": normalizer.normalization, "remove_diacritics": normalizer.remove_diacritics,
        "split_letters": normalizer.split_letters,
    });
    if !normalizer.languages.is_empty() {
        normalization["normalize_languages"] = json!(normalizer.languages);
    }
    if normalizer.ascii_digits {
        normalization["ascii_digits"] = json!(true);
    }
    json!({
        "version": 1,
        "normalization": normalization,
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
