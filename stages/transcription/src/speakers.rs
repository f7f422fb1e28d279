//! Assigns the speakers of a diarization's turns to the words of a transcript.

use flow_speakers::turns::Turn;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::segments::cut_at_speakers;
use crate::{Segment, Word};

/// The speaker of words that are too far from every turn.
pub const UNKNOWN: &str = "UNKNOWN";

/// How words get their speakers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Rule {
    /// Each word separately: the speaker with the largest overlap, else that of the nearest turn, else `UNKNOWN`.
    /// Segments are split where the speaker changes.
    #[default]
    Words,
    /// Segments stay whole: each has the speaker of most of its words, by the rule `words`.
    Majority,
    /// As WhisperX: each word, and each segment by its own times, has the speaker with the largest overlap, or none.
    Whisperx,
}

/// The rule with its limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AssignmentRules {
    pub rule: Rule,
    /// `words` and `majority`: the nearest turn is no farther away than this, in seconds.
    pub max_gap: f64,
    /// `whisperx`: words and segments without overlap get the speaker of the turn with the nearest middle.
    pub fill_nearest: bool,
}

impl Default for AssignmentRules {
    fn default() -> Self {
        Self {
            rule: Rule::default(),
            max_gap: 1.0,
            fill_nearest: false,
        }
    }
}

/// Gives segments and their words the speakers of `turns`, which may come in any order and overlap. With the rules `words` and
/// `majority` everything has a speaker then, be it [`UNKNOWN`]; these are meant for exclusive turns, of which no two are at the
/// same time.
///
/// A segment without words is treated as one word.
pub fn assign_speakers(segments: Vec<Segment>, turns: &[Turn], rules: &AssignmentRules) -> Vec<Segment> {
    let turns = SortedTurns::new(turns);
    let by_words = |start: f64, end: f64| {
        let speaker = turns
            .longest(start, end)
            .or_else(|| turns.nearest_edge(start, end, rules.max_gap));
        speaker.unwrap_or(UNKNOWN).to_owned()
    };
    let by_whisperx = |start: f64, end: f64| {
        let nearest = || turns.nearest_middle((start + end) / 2.0).filter(|_| rules.fill_nearest);
        turns.longest(start, end).or_else(nearest).map(str::to_owned)
    };
    let assigned = segments.into_iter().flat_map(|mut segment| {
        if rules.rule == Rule::Whisperx {
            segment.speaker = by_whisperx(segment.start, segment.end);
            for word in &mut segment.words {
                word.speaker = by_whisperx(word.start, word.end);
            }
            return vec![segment];
        }
        for word in &mut segment.words {
            word.speaker = Some(by_words(word.start, word.end));
        }
        if segment.words.is_empty() {
            segment.speaker = Some(by_words(segment.start, segment.end));
            return vec![segment];
        }
        if rules.rule == Rule::Majority {
            segment.speaker = majority(&segment.words);
            for word in &mut segment.words {
                word.speaker.clone_from(&segment.speaker);
            }
            return vec![segment];
        }
        cut_at_speakers(segment)
    });
    assigned.collect()
}

/// The speaker with whom a stretch has most time in common, if there is one; of equal ones the one whose turn begins first.
/// Turns are those of [`assign_speakers`], times are seconds.
pub fn speaker_during(turns: &[Turn], start: f64, end: f64) -> Option<&str> {
    SortedTurns::new(turns).longest(start, end)
}

/// The speaker of the turn that is nearest to a stretch with which no turn has time in common, at most `max_gap` seconds away.
pub fn speaker_near(turns: &[Turn], start: f64, end: f64, max_gap: f64) -> Option<&str> {
    SortedTurns::new(turns).nearest_edge(start, end, max_gap)
}

/// The speaker of most words, the first of several; [`UNKNOWN`] only where it is that of all of them.
fn majority(words: &[Word]) -> Option<String> {
    let mut counts: Vec<(&str, f64)> = Vec::new();
    for speaker in words.iter().filter_map(|word| word.speaker.as_deref()) {
        add(&mut counts, speaker, if speaker == UNKNOWN { 0.0 } else { 1.0 });
    }
    most(&counts).map(str::to_owned)
}

/// Adds to a speaker's sum. Speakers keep the order in which they were first added.
fn add<'a>(sums: &mut Vec<(&'a str, f64)>, speaker: &'a str, value: f64) {
    match sums.iter_mut().find(|(name, _)| *name == speaker) {
        Some((_, sum)) => *sum += value,
        None => sums.push((speaker, value)),
    }
}

/// The speaker with the largest sum; of equal ones the first.
fn most<'a>(sums: &[(&'a str, f64)]) -> Option<&'a str> {
    let mut best: Option<(&str, f64)> = None;
    for &(speaker, sum) in sums {
        if best.is_none_or(|(_, most)| sum > most) {
            best = Some((speaker, sum));
        }
    }
    best.map(|(speaker, _)| speaker)
}

/// Turns sorted by their starts, for binary search.
struct SortedTurns<'a> {
    turns: Vec<&'a Turn>,
    /// For each turn: the one that ends last of those up to it, the first of several.
    last_end: Vec<usize>,
}

impl<'a> SortedTurns<'a> {
    fn new(turns: &'a [Turn]) -> Self {
        let mut turns: Vec<&Turn> = turns.iter().collect();
        turns.sort_by(|a, b| a.start.total_cmp(&b.start));
        let mut last_end = Vec::with_capacity(turns.len());
        let mut last = 0;
        for (place, turn) in turns.iter().enumerate() {
            if turn.end > turns[last].end {
                last = place;
            }
            last_end.push(last);
        }
        Self { turns, last_end }
    }

    /// The end of the turn that ends last of those up to `place`.
    fn end_up_to(&self, place: usize) -> f64 {
        self.turns[self.last_end[place]].end
    }

    /// The speaker with the largest overlap with an interval; of equal ones the one whose turn begins first.
    fn longest(&self, start: f64, end: f64) -> Option<&'a str> {
        let after = self.turns.partition_point(|turn| turn.start < end);
        let mut first = after;
        while first > 0 && self.end_up_to(first - 1) > start {
            first -= 1;
        }
        let mut times: Vec<(&str, f64)> = Vec::new();
        for turn in &self.turns[first..after] {
            let common = turn.end.min(end) - turn.start.max(start);
            if common > 0.0 {
                add(&mut times, &turn.speaker, common);
            }
        }
        most(&times)
    }

    /// The speaker of the turn with the edge nearest to an interval without overlap, at most `max_gap` away; of two the
    /// earlier one.
    fn nearest_edge(&self, start: f64, end: f64, max_gap: f64) -> Option<&'a str> {
        let after = self.turns.partition_point(|turn| turn.start < end);
        let before = after.checked_sub(1).map(|place| self.turns[self.last_end[place]]);
        let before = before.map(|turn| ((start - turn.end).max(0.0), turn));
        let next = self.turns.get(after).map(|turn| ((turn.start - end).max(0.0), *turn));
        let nearest = match (before, next) {
            (Some(before), Some(next)) if next.0 < before.0 => Some(next),
            (before, next) => before.or(next),
        };
        nearest
            .filter(|(gap, _)| *gap <= max_gap)
            .map(|(_, turn)| turn.speaker.as_str())
    }

    /// The speaker of the turn whose middle is nearest to a time; of equal ones the one that begins first.
    fn nearest_middle(&self, time: f64) -> Option<&'a str> {
        let distance = |turn: &Turn| ((turn.start + turn.end) / 2.0 - time).abs();
        let nearest = self.turns.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)));
        nearest.map(|turn| turn.speaker.as_str())
    }
}

#[cfg(test)]
#[path = "speakers_tests.rs"]
mod tests;
