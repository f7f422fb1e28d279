//! The part of the report page about one set of utterances that was transcribed.

use std::collections::BTreeMap;

use flow_text::language_tag::split_tag;
use maud::{Markup, html};

use crate::alignment::{Edit, align};
use crate::chart::count;
use crate::figures::{Confusion, SetFigures, confusion};
use crate::language_name::language;
use crate::normalize::{Normalization, Normalizer};
use crate::page::percent;
use crate::wer::{EditCounts, Score, words};
use crate::word_confidence::Bin;
use crate::word_groups::WordFigures;

/// Sources that have a line in the page, those with the most words; `scores.json` has them all.
const SOURCES: usize = 40;
/// Tags that the table of confusions shows at most.
const TAGS: usize = 40;

pub fn set_section(set: &SetFigures, normalizer: &Normalizer) -> Markup {
    let all = (html! { "all" }, &set.scores.overall);
    let languages = set.scores.languages.iter().map(|(name, score)| (name.as_str(), score));
    let mut sources: Vec<(&str, &Score)> = set.sources.iter().map(|(name, score)| (name.as_str(), score)).collect();
    sources.sort_by(|a, b| b.1.words.units.cmp(&a.1.words.units).then_with(|| a.0.cmp(b.0)));
    let left_out = sources.len().saturating_sub(SOURCES);
    sources.truncate(SOURCES);
    html! {
        section {
            h2 { "Error rates: " (set.name) }
            (table("Language", languages.map(|(code, score)| (language(code), score)).chain([all]), normalizer))
            p.quiet {
                "Errors per word (WER) and per character (CER) of the reference, over all utterances, scored without the language tag, with no normalisation of case or punctuation."
                @match normalizer.normalization {
                    Normalization::None => {}
                    Normalization::WhisperEnglish => { " Beside them after Whisper's English normaliser: numbers, contractions, titles and spellings in one way." }
                    Normalization::OpenAsrEnglish => { " Beside them after the English normaliser of the Open ASR Leaderboard, as of August 2026." }
                    Normalization::OpenAsrMultilingual => { " Beside them after the multilingual normaliser of the Open ASR Leaderboard, as of August 2026: as Whisper's basic one, it cuts words of Indic scripts into letters." }
                    Normalization::Indic => { " Beside them as Vistaar has it" (options(normalizer)) ": without punctuation, and with one encoding for what can be encoded in several ways." }
                    Normalization::ByLanguage => { " Beside them normalised by language" (options(normalizer)) ": English as Whisper has it, Indic languages as Vistaar has it, others in lower case without punctuation." }
                    Normalization::WhisperBasic => {
                        " Beside them after Whisper's basic normaliser" (options(normalizer)) ": lower case, NFKC, bracketed text removed, a space for each mark, symbol and punctuation mark. "
                        "Vowel signs and viramas of Indic scripts are marks to it: it cuts their words into letters, so that for these languages the figure is not a word error rate. Compare it with figures made in the same way only."
                    }
                    Normalization::KeepMarks => {
                        " Beside them after normalisation" (options(normalizer)) ": lower case, NFKC, bracketed text removed, a space for each symbol and punctuation mark; marks (vowel signs) stay."
                    }
                }
            }
            @if !normalizer.languages.is_empty() {
                p.quiet { "Languages with normalisers of their own: " (normalizer.languages.keys().map(String::as_str).collect::<Vec<_>>().join(", ")) "." }
            }
            @if set.durations.len() > 1 {
                h3 { "By duration" }
                (table("Duration", set.durations.iter().map(|(name, score)| plain((name.as_str(), score))), normalizer))
            }
            @if sources.len() > 1 {
                h3 { "By " (set.source_kind) }
                (table(if set.source_kind == "source" { "Source" } else { "Shard" }, sources.into_iter().map(plain), normalizer))
                @if left_out > 0 { p.quiet { "Those with the most words; " (count(left_out as u64)) " more are in " code { "scores.json" } "." } }
            }
            @for (name, scores) in &set.columns { (by_column(name, scores, normalizer)) }
            (word_groups(set))
            (confidences(set))
            (times(set))
            (tags(set))
            (worst(set))
        }
    }
}

/// Error rates by the values of a column.
fn by_column(name: &str, scores: &BTreeMap<String, Score>, normalizer: &Normalizer) -> Markup {
    let mut scores: Vec<(&str, &Score)> = scores.iter().map(|(name, score)| (name.as_str(), score)).collect();
    scores.sort_by(|a, b| b.1.words.units.cmp(&a.1.words.units).then_with(|| a.0.cmp(b.0)));
    let left_out = scores.len().saturating_sub(SOURCES);
    scores.truncate(SOURCES);
    let named = |(value, score): (&'_ str, _)| (html! { @if value.is_empty() { "none" } @else { (value) } }, score);
    html! {
        h3 { "By " code { (name) } }
        (table(name, scores.into_iter().map(named), normalizer))
        @if left_out > 0 { p.quiet { "Those with the most words; " (count(left_out as u64)) " more are in " code { "scores.json" } "." } }
    }
}

/// Error rates of groups of words.
fn word_groups(set: &SetFigures) -> Markup {
    let WordFigures { rare, names, switches } = &set.words;
    let names = names
        .as_ref()
        .map(|names| [("names", names.words), ("other words", names.others)]);
    let switches = switches
        .as_ref()
        .map(|switches| [("where it changes", switches.points), ("elsewhere", switches.elsewhere)]);
    html! {
        @if !rare.is_empty() {
            h3 { "By how often training has a word" }
            (word_table("Times in training", rare.iter().map(|(label, counts)| (label.as_str(), counts))))
        }
        @if let Some(names) = &names {
            h3 { "Names" }
            (word_table("Words", names.iter().map(|(label, counts)| (*label, counts))))
            @if let Some(names) = &set.words.names { p.quiet { (count(names.correct)) " of " (count(names.occurrences)) " names are right as a whole." } }
        }
        @if let Some(switches) = &switches {
            h3 { "Where the script or the language changes" }
            (word_table("Words", switches.iter().map(|(label, counts)| (*label, counts))))
        }
    }
}

/// How far confidences are from the share of words that are right.
fn confidences(set: &SetFigures) -> Markup {
    let all = set.reliability.all();
    if all.words == 0 {
        return html! {};
    }
    let row = |name: Markup, bin: &Bin, is_total: bool| {
        html! {
            tr.total[is_total] {
                td { (name) }
                td.n { (count(bin.words)) }
                td.n { (format!("{:.3}", bin.mean_confidence())) }
                td.n { span.meter style={ "width:" ((bin.accuracy() * 60.0).round()) "px" } {} (percent(bin.accuracy())) }
            }
        }
    };
    html! {
        h3 { "Confidence of words" }
        p { "Expected calibration error: " (format!("{:.3}", set.reliability.expected_calibration_error())) }
        table {
            thead { tr { th { "Confidence" } th.n { "Words heard" } th.n { "Mean confidence" } th.n { "Right" } } }
            tbody {
                @for (range, bin) in set.reliability.bins() {
                    (row(html! { (format!("{:.2}–{:.2}", range.start, range.end)) }, bin, false))
                }
                (row(html! { "all" }, &all, true))
            }
        }
        p.quiet {
            "Of a model whose confidences are probabilities, as many words are right as the mean confidence says. The error is the mean distance of the two, weighted by words."
            " Confidences are those of the model, without calibration: " code { "flow evaluate confidence --calibrate" } " fits one."
        }
    }
}

/// How far times of words are from known ones.
fn times(set: &SetFigures) -> Markup {
    let Some(spreads) = set.times.spreads() else {
        return html! {};
    };
    html! {
        h3 { "Times of words" }
        table {
            thead { tr { th { "Seconds" } th.n { "Words compared" } th.n { "Median error" } th.n { "95 % within" } th.n { "Signed median" } } }
            tbody { @for (name, spread) in ["beginnings", "ends"].iter().zip(&spreads) {
                tr { td { (name) } td.n { (count(set.times.compared() as u64)) } @for text in spread.texts() { td.n { (text) } } }
            } }
        }
        p.quiet {
            "Words that are right and have a known time: " (count(set.times.compared() as u64)) " of " (count(set.times.words as u64))
            ". The signed median is above 0 where words come late."
        }
    }
}

fn word_table<'w>(head: &str, groups: impl Iterator<Item = (&'w str, &'w EditCounts)>) -> Markup {
    html! {
        table {
            thead { tr { th { (head) } th.n { "Words" } th.n { "Errors per word" } th.n { "Insertions" } th.n { "Deletions" } th.n { "Substitutions" } } }
            tbody { @for (label, counts) in groups {
                tr {
                    td { (label) }
                    td.n { (count(counts.units)) }
                    td.n { (percent(counts.rate())) }
                    td.n { (count(counts.insertions)) }
                    td.n { (count(counts.deletions)) }
                    td.n { (count(counts.substitutions)) }
                }
            } }
        }
    }
}

fn plain<'s>((name, score): (&str, &'s Score)) -> (Markup, &'s Score) {
    (html! { (name) }, score)
}

fn options(normalizer: &Normalizer) -> String {
    let given = [
        (normalizer.remove_diacritics, "diacritics removed"),
        (normalizer.split_letters, "letters split"),
        (normalizer.ascii_digits, "digits in ASCII"),
    ];
    let given: Vec<&str> = given
        .into_iter()
        .filter(|(given, _)| *given)
        .map(|(_, name)| name)
        .collect();
    if given.is_empty() {
        String::new()
    } else {
        format!(" ({})", given.join(", "))
    }
}

const INDEPENDENT: &str = "Confidence interval of the WER, utterances taken as independent";
const RESAMPLED: &str =
    "Confidence interval of the WER by the bootstrap, recordings (or the given column) drawn as a whole";

/// What is said below a table in which rates rest on one utterance.
pub const SINGLE: &str = "Rates in grey are those of one utterance alone.";

fn table<'a>(head: &str, scores: impl Iterator<Item = (Markup, &'a Score)>, normalizer: &Normalizer) -> Markup {
    let normalized = normalizer.is_given();
    let scores: Vec<(Markup, &Score)> = scores.collect();
    let intervals = scores.iter().any(|(_, score)| score.shown_interval().is_some());
    let resampled = scores.iter().any(|(_, score)| score.intervals.is_some());
    html! {
        table {
            thead { tr {
                th { (head) } th.n { "Utterances" } th.n { "Minutes" } th.n { "Words" } th.n { "WER" }
                @if intervals { th.n title=(if resampled { RESAMPLED } else { INDEPENDENT }) { "95 %" } }
                @if normalized { th.n { "Normalised" } }
                th.n { "Insertions" } th.n { "Deletions" } th.n { "Substitutions" } th.n { "CER" }
                @if normalized { th.n { "Normalised" } }
                th.n { "Wrong tag" }
            } }
            tbody { @for (name, score) in &scores { (row(name, score, normalized, intervals)) } }
        }
        @if scores.iter().any(|(_, score)| score.utterances == 1) { p.quiet { (SINGLE) } }
    }
}

fn row(name: &Markup, score: &Score, normalized: bool, intervals: bool) -> Markup {
    let rate = score.words.rate();
    let width = if rate.is_finite() {
        (rate.min(1.0) * 60.0).round()
    } else {
        0.0
    };
    html! {
        tr.total[name.0 == "all"] .few[score.utterances == 1] {
            td { (name) }
            td.n { (count(score.utterances)) }
            td.n { (format!("{:.1}", score.seconds / 60.0)) }
            td.n { (count(score.words.units)) }
            td.n { span.meter style={ "width:" (width) "px" } {} (percent(rate)) }
            @if intervals { td.n { @if let Some((low, high)) = score.shown_interval() { (format!("{:.1}–{:.1}", 100.0 * low, 100.0 * high)) } } }
            @if normalized { td.n { (percent(score.normalized_words.rate())) } }
            td.n { (count(score.words.insertions)) }
            td.n { (count(score.words.deletions)) }
            td.n { (count(score.words.substitutions)) }
            td.n { (percent(score.characters.rate())) }
            @if normalized { td.n { (percent(score.normalized_characters.rate())) } }
            td.n { (count(score.wrong_tags)) }
        }
    }
}

fn tags(set: &SetFigures) -> Markup {
    let Some(Confusion { heard, rows }) = confusion(&set.scores) else {
        return html! {};
    };
    if heard.len() > TAGS {
        return html! { p.quiet { "Tags taken for others: see " code { "scores.json" } "." } };
    }
    html! {
        h3 { "Language tags: what was said, and what was heard" }
        table.tags {
            thead { tr { th { "Tag, heard as" } @for tag in &heard { th.n { @if tag.is_empty() { "none" } @else { (tag) } } } } }
            tbody { @for (reference, counts) in &rows {
                tr { td { (reference) } @for (tag, n) in heard.iter().zip(counts) {
                    td.n.right[tag == reference] { @if *n > 0 { (count(*n)) } }
                } }
            } }
        }
    }
}

fn worst(set: &SetFigures) -> Markup {
    if set.worst.is_empty() {
        return html! {};
    }
    html! {
        h3 { "Most errors" }
        p.quiet.marks {
            "Words that were not heard are " del { "struck through" } ", those that were heard and not said " ins { "underlined" }
            ", those that were heard as others " span.sub { "have a wavy line" } "."
        }
        table.worst {
            thead { tr { th { "Segment" } th.n { "Errors" } th { "Reference, and what was heard" } } }
            tbody { @for worst in &set.worst {
                tr {
                    td { code { (worst.segment_id) } br; (language(&worst.lang)) }
                    td.n { (worst.words.errors()) " of " (worst.words.units) }
                    td {
                        (compared(&worst.reference, &worst.hypothesis))
                        @if let Some(clip) = &worst.clip { audio controls preload="metadata" src={ "data:audio/flac;base64," (base64(clip)) } {} }
                    }
                }
            } }
        }
    }
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let of = |place: usize| u32::from(group.get(place).copied().unwrap_or(0));
        let bits = of(0) << 16 | of(1) << 8 | of(2);
        for place in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * place)) as usize & 63];
            text.push(if place > group.len() { '=' } else { char::from(letter) });
        }
    }
    text
}

/// The mark of a run of words in one of the two texts.
#[derive(Clone, Copy, PartialEq)]
enum Mark {
    None,
    Deleted,
    Inserted,
    Substituted,
}

/// Reference and hypothesis, with the words marked in which they differ. Long texts are cut, and very long ones have no marks.
pub fn compared<'t>(reference: &'t str, hypothesis: &'t str) -> Markup {
    // Tags are compared separately: word errors are counted without them.
    let ((_, said_text), (_, heard_text)) = (split_tag(reference), split_tag(hypothesis));
    let Some(edits) = align(&words(said_text), &words(heard_text)) else {
        return html! {
            div dir="auto" { (clipped(reference)) }
            div.heard dir="auto" { (clipped(hypothesis)) }
        };
    };
    let tag = |text: &'t str, rest: &str| {
        words(&text[..text.len() - rest.len()])
            .into_iter()
            .map(|tag| (tag, Mark::None))
    };
    let mut said: Vec<(&str, Mark)> = tag(reference, said_text).collect();
    let mut heard: Vec<(&str, Mark)> = tag(hypothesis, heard_text).collect();
    for edit in edits {
        match edit {
            Edit::Match(word) => {
                said.push((word, Mark::None));
                heard.push((word, Mark::None));
            }
            Edit::Substitution(word, other) => {
                said.push((word, Mark::Substituted));
                heard.push((other, Mark::Substituted));
            }
            Edit::Insertion(word) => heard.push((word, Mark::Inserted)),
            Edit::Deletion(word) => said.push((word, Mark::Deleted)),
        }
    }
    html! {
        div.marks dir="auto" { (marked(&said)) }
        div.heard.marks dir="auto" { @if heard.is_empty() { "(nothing)" } @else { (marked(&heard)) } }
    }
}

/// Adjacent words with the same mark share one element. At most as many characters as of a truncated text.
fn marked(words: &[(&str, Mark)]) -> Markup {
    let mut left = CLIPPED;
    let mut shown: Vec<(&str, Mark)> = Vec::new();
    let mut cut = false;
    for (word, mark) in words {
        let end = word.char_indices().nth(left).map_or(word.len(), |(end, _)| end);
        cut = end < word.len();
        if end > 0 {
            shown.push((&word[..end], *mark));
        }
        if cut {
            break;
        }
        left = left.saturating_sub(word.chars().count() + 1);
    }
    let runs = shown.chunk_by(|a, b| a.1 == b.1);
    let texts = runs.map(|run| {
        let text: Vec<&str> = run.iter().map(|(word, _)| *word).collect();
        (run[0].1, text.join(" "))
    });
    html! {
        @for (place, (mark, text)) in texts.enumerate() {
            @if place > 0 { " " }
            @match mark {
                Mark::None => (text),
                Mark::Deleted => del { (text) },
                Mark::Inserted => ins { (text) },
                Mark::Substituted => span.sub { (text) },
            }
        }
        @if cut { " …" }
    }
}

/// Characters of a text that are shown.
const CLIPPED: usize = 400;

/// The beginning of a long text.
fn clipped(text: &str) -> String {
    match text.char_indices().nth(CLIPPED) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_differ_are_marked() {
        let shown = compared("a b c d", "a x d e").into_string();
        assert_eq!(
            shown,
            "<div class=\"marks\" dir=\"auto\">a <span class=\"sub\">b</span> <del>c</del> d</div>\
             <div class=\"heard marks\" dir=\"auto\">a <span class=\"sub\">x</span> d <ins>e</ins></div>"
        );
        let shown = compared("<b> two", "").into_string();
        assert!(
            shown.contains("<del>&lt;b&gt; two</del>") && shown.contains("(nothing)"),
            "{shown}"
        );
        let long = vec!["word"; 200].join(" ");
        let shown = compared(&long, "word").into_string();
        assert!(shown.contains(" …") && shown.len() < 1000, "{shown}");
    }

    #[test]
    fn a_long_word_is_cut() {
        let shown = compared(&"ä".repeat(1000), &format!("a {}", "b".repeat(1000))).into_string();
        assert!(shown.contains(&format!("{}</span> …", "ä".repeat(400))), "{shown}");
        assert!(!shown.contains(&"ä".repeat(401)), "{shown}");
        assert!(
            shown.contains(&format!("{}</", "b".repeat(398))) && !shown.contains(&"b".repeat(399)),
            "{shown}"
        );
        // As long as may be: not cut.
        let shown = compared(&"a".repeat(400), "b").into_string();
        assert!(shown.contains(&"a".repeat(400)) && !shown.contains('…'), "{shown}");
    }

    #[test]
    fn tags_are_no_words() {
        let shown = compared("<|hi|> a b", "<|en|> a c").into_string();
        assert!(shown.contains("&lt;|hi|&gt; a <span class=\"sub\">b</span>"), "{shown}");
        assert!(shown.contains("&lt;|en|&gt; a <span class=\"sub\">c</span>"), "{shown}");
    }

    /// The examples of RFC 4648, section 10.
    #[test]
    fn base64_is_that_of_the_standard() {
        let cases = [
            "", "", "f", "Zg==", "fo", "Zm8=", "foo", "Zm9v", "foob", "Zm9vYg==", "fooba", "Zm9vYmE=", "foobar",
            "Zm9vYmFy",
        ];
        for case in cases.chunks(2) {
            assert_eq!(base64(case[0].as_bytes()), case[1]);
        }
        assert_eq!(base64(&[0xfb, 0xff]), "+/8=");
    }
}
